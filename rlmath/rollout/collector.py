"""One step's rollout: every engine samples the work it pops from the queue, and scores completions while it samples.

    requests -> work queue -> engine -> completions -> reward workers -> gathered to all ranks -> groups

Completions are scored where they were sampled, by worker processes, while the engine still generates.
"""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.schema import RewardConfig, RolloutConfig
from rlmath.distributed.collectives import all_gather_objects, shared_store
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.signed_store import SignedStore
from rlmath.rewards.reward_manager import RewardManager
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.rollout.engine import Engine
from rlmath.rollout.sampling import Key, RolloutSeed, SamplingSettings, group_requests
from rlmath.rollout.work_queue import WorkQueue

logger = logging.getLogger(__name__)

PUBLISH_SECONDS = 1.0
"""Interval at which an engine publishes how much it has sampled."""
PROGRESS_SECONDS = 20.0
"""Interval of the log lines on the progress, where there is no terminal for a bar."""


@dataclass(frozen=True)
class Rollout:
    """The scored completions of some prompts."""

    groups: list[ScoredGroup]
    """In the order of the prompts, whoever sampled them."""
    engine_seconds: tuple[float, ...]
    """By engine: from the start to its last completion (seconds)."""


_Scored = dict[Key, tuple[Completion, Score]]


class Collector:
    """Samples and scores; the ranks of one engine generate alike, and the first of them scores."""

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        tokenizer: PreTrainedTokenizerFast,
        rollout: RolloutConfig,
        reward: RewardConfig,
        pool: VerifierPool | None,
    ) -> None:
        """Every rank makes one, and one at a time: the number of a rollout names its keys in the store."""
        assert (pool is not None) == mesh.is_engine_leader, (
            "the leading rank of an engine has the reward workers"
        )
        self._engine = engine
        self._mesh = mesh
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._reward = reward
        self._pool = pool
        self._rollouts = 0

    def collect(
        self, prompts: Sequence[Prompt], sampling: SamplingSettings, seed: RolloutSeed, title: str
    ) -> Rollout:
        """G scored completions of each of the P prompts, the same on every rank; `title` is for the console."""
        requests_PG = group_requests(prompts, sampling, seed)
        store = shared_store(f"rollout/{self._rollouts}")
        self._rollouts += 1
        work_queue = WorkQueue(store, requests_PG, self._mesh, self._rollout.max_num_seqs)
        total, shown = len(prompts) * sampling.samples, self._rollout.progress_bar
        progress = SamplingProgress(total, self._mesh, store, title, shown)
        gathered = all_gather_objects(self._sample(prompts, work_queue, sampling, progress))
        progress.close()
        progress.forget()
        work_queue.close()
        by_engine = [results for results in gathered if results is not None]
        scored: _Scored = {}
        for of_engine, _ in by_engine:
            scored |= of_engine
        groups = [
            ScoredGroup(
                prompt,
                tuple(scored[p, g][0] for g in range(sampling.samples)),
                tuple(scored[p, g][1] for g in range(sampling.samples)),
            )
            for p, prompt in enumerate(prompts)
        ]
        return Rollout(groups, tuple(seconds for _, seconds in by_engine))

    def _sample(
        self,
        prompts: Sequence[Prompt],
        work_queue: WorkQueue,
        sampling: SamplingSettings,
        progress: SamplingProgress,
    ) -> tuple[_Scored, float] | None:
        """All completions of this rank's engine, scored, and its seconds; None on ranks that do not lead it."""
        started = time.perf_counter()
        rewards = (
            None if self._pool is None else RewardManager(self._pool, self._reward, sampling.max_new_tokens)
        )
        completions: dict[Key, Completion] = {}
        for result in self._engine.generate(work_queue):
            progress.add_one()
            progress.tick()
            if rewards is None:
                continue
            completion = Completion(
                sample_index=result.key[1],
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                text=str(self._tokenizer.decode(list(result.token_ids), skip_special_tokens=True)),
                finish_reason="stop" if result.finish_reason == "stop" else "length",
                policy_version=self._engine.version,
            )
            completions[result.key] = completion
            rewards.submit(prompts[result.key[0]], completion)
        seconds = time.perf_counter() - started
        if rewards is None:
            return None
        pairs = zip(completions.items(), rewards.collect(self._engine.on_step), strict=True)
        return {key: (completion, score) for (key, completion), score in pairs}, seconds


class SamplingProgress:
    """How many completions all engines have sampled: on rank 0 a bar where there is a terminal, else a log line every
    PROGRESS_SECONDS."""

    def __init__(self, total: int, mesh: Mesh, store: SignedStore, title: str, shown: bool = True) -> None:
        """All engines sample `total` completions; `title` is for the console. Several at a time need stores of their
        own."""
        self._total, self._mesh, self._store, self._title = total, mesh, store, title
        self._shown = shown and mesh.rank == 0
        self._done = 0
        self._by_engine: dict[str, Any] = {}
        self._started = self._published = self._logged = time.monotonic()
        # None: shown on a terminal, not in a log file.
        hide_bar = None if self._shown else True
        form = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} completions, {remaining} left"
        self._bar = tqdm(total=total, desc=title, disable=hide_bar, leave=False, bar_format=form)

    def add_one(self) -> None:
        """This engine has sampled one more."""
        self._done += 1

    def tick(self) -> None:
        """Call it regularly. Publishes this engine's count at most once in PUBLISH_SECONDS; rank 0 shows the sum."""
        now = time.monotonic()
        if not self._mesh.is_engine_leader or now - self._published < PUBLISH_SECONDS:
            return
        self._published = now
        self._store.set(_count_key(self._mesh.engine_index), self._done)
        if not self._shown:
            return
        self._by_engine |= self._store.get_all(
            [_count_key(engine) for engine in range(self._mesh.num_engines)]
        )
        done = sum(count for count in self._by_engine.values() if isinstance(count, int))
        if not self._bar.disable:
            self._bar.update(done - self._bar.n)
        elif now - self._logged >= PROGRESS_SECONDS:
            self._logged = now
            logger.info("%s", progress_line(self._title, done, self._total, now - self._started))

    def close(self) -> None:
        self._bar.close()

    def forget(self) -> None:
        """Delete this engine's count from the store. Call it when all engines are done."""
        if self._mesh.is_engine_leader:
            self._store.delete(_count_key(self._mesh.engine_index))


def _count_key(engine: int) -> str:
    return f"sampled/{engine}"


def progress_line(title: str, done: int, total: int, seconds: float) -> str:
    """
    >>> progress_line("step 7/20", 500, 2000, 60.0)
    'step 7/20: sampled 500 of 2,000 completions (25%) in 01:00, about 03:00 left'
    """
    left = f", about {tqdm.format_interval(seconds / done * (total - done))} left" if done else ""
    passed = tqdm.format_interval(seconds)
    return f"{title}: sampled {done:,} of {total:,} completions ({done / total:.0%}) in {passed}{left}"
