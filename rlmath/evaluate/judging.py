"""Completions are judged, as in training, while others are still sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from transformers import PreTrainedTokenizerFast

from rlmath.evaluate.benchmarks import Problem
from rlmath.evaluate.plan import GREEDY_INDEX
from rlmath.evaluate.store import Record
from rlmath.rewards.judge import judged_text
from rlmath.rewards.pool import VerifierPool
from rlmath.rewards.verify import Verdict
from rlmath.rollout.sampling import Generated, Request


class Judging:
    """Takes what the engine made and hands it on once it is judged, in that order."""

    def __init__(
        self,
        pool: VerifierPool,
        tokenizer: PreTrainedTokenizerFast,
        problems: Mapping[int, Problem],
        hand_on: Callable[[Problem, Record], None],
    ) -> None:
        """`problems` by the first part of the requests' keys."""
        self._pool = pool
        self._tokenizer = tokenizer
        self._problems = problems
        self._hand_on = hand_on
        self._asked: deque[tuple[Request, Generated, str, Future[Verdict]]] = deque()

    def ask(self, request: Request, generated: Generated) -> None:
        """Hand a completion to the judges."""
        problem = self._problems[generated.key[0]]
        text = str(self._tokenizer.decode(list(generated.token_ids), skip_special_tokens=True))
        future = self._pool.submit(judged_text(problem.prompt, text), problem.solutions, problem.task)
        self._asked.append((request, generated, text, future))
        self.poll()

    def poll(self) -> None:
        """Hand on what is judged; waits for nothing."""
        while self._asked and self._asked[0][3].done():
            self._pass(*self._asked.popleft())

    def finish(self) -> None:
        """Hand on all; each answer waits no longer than its time limit."""
        while self._asked:
            self._pass(*self._asked.popleft())

    def _pass(self, request: Request, generated: Generated, text: str, future: Future[Verdict]) -> None:
        problem, index = self._problems[generated.key[0]], generated.key[1]
        self._hand_on(problem, _record(problem, index, request.seed, generated, text, future.result()))


def _record(
    problem: Problem, index: int, seed: int, generated: Generated, text: str, verdict: Verdict
) -> Record:
    facts: dict[str, Any] = {"mode": "sample", "sample": index}
    if index == GREEDY_INDEX:
        facts = {"mode": "greedy", "sample": 0}
    return Record(
        problem_id=problem.problem_id,
        **facts,
        seed=seed,
        prompt_hash=problem.prompt_hash,
        text=text,
        tokens=len(generated.token_ids),
        finish_reason="stop" if generated.finish_reason == "stop" else "length",
        correct=verdict.correct,
        extracted=verdict.extracted,
        verdict=verdict.verdict,
    )
