"""Sampling what is missing, with all engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tqdm import tqdm

from rlmath.config import RolloutConfig
from rlmath.data.tokenizer import load_tokenizer
from rlmath.evaluate.benchmarks import Lengths, Problem
from rlmath.evaluate.judging import Judging
from rlmath.evaluate.plan import GREEDY_INDEX, Plan, completion_seed
from rlmath.evaluate.store import Writer
from rlmath.parallel.collectives import shared_store
from rlmath.parallel.device import Device
from rlmath.parallel.mesh import Mesh
from rlmath.rewards.pool import VerifierPool
from rlmath.rollout.claims import Claims
from rlmath.rollout.engine import open_standalone
from rlmath.rollout.sampling import Request, sample

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
    claims = Claims(shared_store("evaluation"), requests, mesh, engine.rollout.max_num_seqs)
    if pool is None:
        for _ in sample(engine.llm, engine.rollout, claims):
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
        for generated in sample(engine.llm, engine.rollout, claims, on_step):
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
