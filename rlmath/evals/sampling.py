"""Samples the missing completions of an evaluation, and verifies them meanwhile."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rlmath.algorithms.types import Completion
from rlmath.answers.extraction import extract_answer, split_boxes
from rlmath.answers.verifier import MAX_ANSWER_CHARS, Verdict
from rlmath.config.schema import RolloutConfig
from rlmath.data.tokenizer import load_tokenizer
from rlmath.distributed import process
from rlmath.distributed.collectives import shared_store
from rlmath.distributed.device import Device
from rlmath.distributed.mesh import Mesh
from rlmath.evals.benchmarks import LengthLimits, Problem
from rlmath.evals.completions import CompletionRecord, Writer
from rlmath.evals.plan import GREEDY_INDEX, Plan, completion_seed
from rlmath.rewards.reward_manager import text_to_verify
from rlmath.rollout.collector import SamplingProgress
from rlmath.rollout.engine import continues_noise, end_engine, open_standalone, stop_tokens
from rlmath.rollout.engine_tools import open_tools
from rlmath.rollout.running_completions import RunningCompletions
from rlmath.rollout.sampling import Request
from rlmath.rollout.work_queue import WorkQueue
from rlmath.workers.function_calls import FunctionResult
from rlmath.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)


class Missing(NamedTuple):
    """A problem, and the indices of its missing completions."""

    problem: Problem
    indices: tuple[int, ...]


@contextmanager
def open_engine(
    model: Path,
    rollout: RolloutConfig,
    lengths: LengthLimits,
    mesh: Mesh,
    device: Device,
    stop_token_ids: Sequence[int] | None,
    tool_tokens: int,
    adapter: Path | None = None,
) -> Iterator[Any]:
    """This rank's vLLM engine; outputs of tools are of at most `tool_tokens` in a completion.

    `adapter` is the PEFT folder of its adapters, if it has any.

    On GPU the end of the process frees its memory."""
    longest = lengths.max_prompt_tokens + lengths.max_new_tokens + tool_tokens
    logger.info("Building the engine (seconds to minutes) ...")
    started = time.monotonic()
    llm = open_standalone(
        str(model),
        rollout,
        longest,
        device_kind=device.kind,
        mesh=mesh,
        stop_token_ids=stop_token_ids,
        adapter=adapter,
    )
    process.freeze_live_objects()
    logger.info("The engine is ready after %.0f s. Sampling ...", time.monotonic() - started)
    try:
        yield llm
    finally:
        end_engine(llm, device.kind)


def sample_missing(
    llm: Any,
    missing: Sequence[Missing],
    *,
    plan: Plan,
    rollout: RolloutConfig,
    lengths: LengthLimits,
    mesh: Mesh,
    tokenizer_folder: Path,
    pool: WorkerPool | None,
    scorer: WorkerPool | None = None,
) -> None:
    """Sample, verify and write.

    The engines share the work; in each engine the rank with a `pool` writes."""
    requests = [_requests(number, gap, plan, lengths) for number, gap in enumerate(missing)]
    store = shared_store("evaluation")
    work_queue = WorkQueue(store, requests, mesh, rollout.max_num_seqs)
    needs_tokenizer = pool is not None or plan.tools.format is not None
    tokenizer = None
    if needs_tokenizer:
        settings = plan.chat if plan.tools.format == "chat" else None
        tokenizer = load_tokenizer(str(tokenizer_folder), "--model", settings)
    with ExitStack() as stack:
        tools = None
        if tokenizer is not None:
            tools = open_tools(
                plan.tools,
                tokenizer,
                mesh,
                continues_noise=continues_noise(llm),
                stop_token_ids=stop_tokens(llm),
            )
        if tools is not None:
            stack.callback(tools.close)
        if pool is None:
            for _ in RunningCompletions(llm, rollout, tools=tools).sample(work_queue):
                pass
            return
        problems = {number: gap.problem for number, gap in enumerate(missing)}
        writer = Writer(plan.output, mesh.engine_index)
        stack.callback(writer.close)
        total = sum(map(len, requests))
        progress = SamplingProgress(
            total, mesh, store, title="evaluation", longest=lengths.max_new_tokens
        )
        stack.callback(progress.close)
        verification = Verification(
            pool, problems, writer.add, scorer=scorer, answer_from=plan.answer_from
        )

        def on_step() -> None:
            verification.write_done()
            progress.tokens = running.usage.new_tokens
            progress.tick()

        running = RunningCompletions(
            llm,
            rollout,
            tokenizer=tokenizer,
            score=verification.submit,
            on_step=on_step,
            tools=tools,
        )
        for _ in running.sample(work_queue):
            progress.add_one()
        verification.finish()


def _requests(number: int, missing: Missing, plan: Plan, lengths: LengthLimits) -> list[Request]:
    """Requests for the missing completions of a problem."""
    problem = missing.problem
    return [
        Request(
            (number, index),
            problem.token_ids,
            completion_seed(plan.seed, problem.benchmark, problem.prompt_id, index),
            min_new_tokens=0,
            max_new_tokens=lengths.max_new_tokens,
            temperature=0.0 if index == GREEDY_INDEX else plan.temperature,
            top_p=1.0 if index == GREEDY_INDEX else plan.top_p,
        )
        for index in missing.indices
    ]


class Verification:
    """Verifies completions in workers and writes the records in the order of submission."""

    def __init__(
        self,
        pool: WorkerPool,
        problems: Mapping[int, Problem],
        write: Callable[[str, CompletionRecord], None],
        scorer: WorkerPool | None = None,
        answer_from: str = "boxed",
    ) -> None:
        """Take what verification needs.

        `problems` are by the first part of the requests' keys; `write` takes the benchmark's name
        and the record. The `scorer` has a function of the user's, which says what is right in place
        of the `pool`."""
        self._pool = pool
        self._problems = problems
        self._write = write
        self._scorer = scorer
        self._answer_from = answer_from
        self._submitted: deque[tuple[Request, Completion, Future[Any]]] = deque()

    def submit(self, request: Request, completion: Completion) -> None:
        """Queue a completion for the workers, and write the records that are done."""
        problem = self._problems[request.key[0]]
        if self._scorer is None:
            text = text_to_verify(problem.text, completion.answer_text)
            future = self._pool.submit(
                text, problem.solutions, problem.task, question=problem.question
            )
        else:
            future = self._scorer.call(completion.text, problem.solutions, problem.row)
        self._submitted.append((request, completion, future))
        self.write_done()

    def write_done(self) -> None:
        """Write the records of verified completions, without waiting."""
        while self._submitted and self._submitted[0][2].done():
            self._write_first()

    def finish(self) -> None:
        """Write all records; each answer waits at most its time limit."""
        while self._submitted:
            self._write_first()

    def _write_first(self) -> None:
        """Write the record of the completion that was submitted first, once it is verified."""
        request, completion, future = self._submitted.popleft()
        number, index = request.key
        problem = self._problems[number]
        greedy = index == GREEDY_INDEX
        verdict = future.result()
        if isinstance(verdict, FunctionResult):
            # For the vote of maj@k, which compares answers.
            text = text_to_verify(problem.text, completion.answer_text)
            answer = extract_answer(text, self._answer_from) or ""
            extracted = split_boxes(answer)[0][:MAX_ANSWER_CHARS]
            correct = verdict.failure is None and verdict.reward > 0
            verdict = Verdict(correct, extracted, verdict.failure or "function")
        if completion.is_lost:  # which says nothing of the model
            verdict = Verdict(False, "", "error")
        record = CompletionRecord(
            problem_id=problem.prompt_id,
            mode="greedy" if greedy else "sample",
            sample=0 if greedy else index,
            seed=request.seed,
            prompt_hash=problem.prompt_hash,
            text=completion.text,
            tokens=completion.n_sampled,
            finish_reason=completion.finish_reason,
            correct=verdict.correct,
            extracted=verdict.extracted,
            verdict=verdict.verdict,
            calls=[asdict(call) for call in completion.calls],
        )
        self._write(problem.benchmark, record)
