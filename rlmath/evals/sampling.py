"""Completions are judged, as in training, while others are still sampled."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rlmath.config.schema import RolloutConfig
from rlmath.data.tokenizer import load_tokenizer
from rlmath.distributed.collectives import shared_store
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.evals.benchmarks import Lengths, Problem
from rlmath.evals.completions import Record, Writer
from rlmath.evals.plan import GREEDY_INDEX, Plan, completion_seed
from rlmath.rewards.reward_manager import judged_text
from rlmath.rewards.verifier import Verdict
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.rollout.engine import open_standalone
from rlmath.rollout.sampling import Request, RequestResult, sample
from rlmath.rollout.work_queue import WorkQueue


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
        self._asked: deque[tuple[Request, RequestResult, str, Future[Verdict]]] = deque()

    def ask(self, request: Request, generated: RequestResult) -> None:
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

    def _pass(self, request: Request, generated: RequestResult, text: str, future: Future[Verdict]) -> None:
        problem, index = self._problems[generated.key[0]], generated.key[1]
        self._hand_on(problem, _record(problem, index, request.seed, generated, text, future.result()))


def _record(
    problem: Problem, index: int, seed: int, generated: RequestResult, text: str, verdict: Verdict
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


logger = logging.getLogger(__name__)

TELL_SECONDS = 60.0
"""Between two lines on how far the first engine is."""


class Missing(NamedTuple):
    """A problem, and the indices of the completions that it lacks."""

    problem: Problem
    indices: tuple[int, ...]


class Engines:
    """The engine that this rank is part of, as long as the context lasts."""

    def __init__(
        self, model: Path, rollout: RolloutConfig, lengths: Lengths, mesh: Mesh, device: Device
    ) -> None:
        self.mesh = mesh
        self.rollout = rollout
        self._on_cpu = device.kind == "cpu"
        longest = lengths.max_prompt_tokens + lengths.max_new_tokens
        self.llm: Any = open_standalone(str(model), rollout, longest, device.kind, mesh)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """On GPU the end of the process frees it."""
        if self._on_cpu:
            self.llm.llm_engine.engine_core.shutdown()


def sample_missing(
    engine: Engines,
    missing: Sequence[Missing],
    plan: Plan,
    lengths: Lengths,
    model: Path,
    pool: VerifierPool | None,
) -> None:
    """Sample, judge and write. The engines share the work; of the ranks of each, the one with a `pool` writes."""
    mesh = engine.mesh
    requests = [_requests(number, one, plan, lengths) for number, one in enumerate(missing)]
    work_queue = WorkQueue(shared_store("evaluation"), requests, mesh, engine.rollout.max_num_seqs)
    if pool is None:
        for _ in sample(engine.llm, engine.rollout, work_queue):
            pass
        return
    by_key = {request.key: request for row in requests for request in row}
    writer, progress = Writer(plan.output, mesh.engine_index), _Progress(len(by_key), mesh)
    judging = Judging(
        pool,
        load_tokenizer(str(model)),
        {number: one.problem for number, one in enumerate(missing)},
        lambda problem, record: writer.add(problem.benchmark, record),
    )

    def on_step() -> None:
        judging.poll()
        writer.tick()

    try:
        for generated in sample(engine.llm, engine.rollout, work_queue, on_step):
            judging.ask(by_key[generated.key], generated)
            progress.one_more()
        judging.finish()
    finally:
        writer.close()
        progress.close()


def _requests(number: int, missing: Missing, plan: Plan, lengths: Lengths) -> list[Request]:
    problem = missing.problem
    return [
        Request(
            (number, index),
            problem.token_ids,
            completion_seed(plan.seed, problem.benchmark, problem.problem_id, index),
            0,
            lengths.max_new_tokens,
            temperature=0.0 if index == GREEDY_INDEX else plan.temperature,
            top_p=1.0 if index == GREEDY_INDEX else plan.top_p,
        )
        for index in missing.indices
    ]


class _Progress:
    """A bar on a terminal, and a line a minute elsewhere, of the first engine's completions."""

    def __init__(self, total: int, mesh: Mesh) -> None:
        self._about = round(total / mesh.engines)
        self._speaks = mesh.rank == 0
        self._done, self._told_at = 0, time.monotonic()
        # None: shown on a terminal, not in a log file.
        self._bar = tqdm(
            total=self._about, desc="evaluation", disable=None if self._speaks else True, leave=False
        )

    def one_more(self) -> None:
        self._done += 1
        self._bar.update()
        if self._speaks and self._bar.disable and time.monotonic() - self._told_at > TELL_SECONDS:
            self._told_at = time.monotonic()
            logger.info("The first engine has sampled %d completions, of about %d", self._done, self._about)

    def close(self) -> None:
        self._bar.close()
