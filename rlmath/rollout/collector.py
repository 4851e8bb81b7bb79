"""One step's rollout: every engine samples the work it pops from the queue, and scores completions while it samples.

    requests -> work queue -> engine -> completions -> reward workers -> gathered to all ranks -> groups

Completions are scored where they were sampled, by worker processes, while the engine still generates.
"""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.config.schema import RewardConfig, RolloutConfig
from rlmath.distributed.collectives import all_gather_objects, shared_store
from rlmath.distributed.mesh import Mesh
from rlmath.rewards.reward_manager import RewardManager
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.rollout.engine import Engine
from rlmath.rollout.sampling import Key, RolloutSeed, SamplingSettings, group_requests
from rlmath.rollout.work_queue import WorkQueue


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
        """G scored completions of each of the P prompts, the same on every rank; `title` is that of the progress
        bar."""
        requests_PG = group_requests(prompts, sampling, seed)
        store = shared_store(f"rollout/{self._rollouts}")
        self._rollouts += 1
        work_queue = WorkQueue(store, requests_PG, self._mesh, self._rollout.max_num_seqs)
        gathered = all_gather_objects(self._sample(prompts, work_queue, sampling, title))
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
        self, prompts: Sequence[Prompt], work_queue: WorkQueue, sampling: SamplingSettings, title: str
    ) -> tuple[_Scored, float] | None:
        """All completions of this rank's engine, scored, and its seconds; None on ranks that do not lead it."""
        started = time.perf_counter()
        rewards = (
            None if self._pool is None else RewardManager(self._pool, self._reward, sampling.max_new_tokens)
        )
        completions: dict[Key, Completion] = {}
        # None shows the bar on a terminal, not in a log file.
        hide_bar = None if self._mesh.rank == 0 and self._rollout.progress_bar else True
        even_share = round(len(prompts) * sampling.samples / self._mesh.num_engines)
        with tqdm(total=even_share, desc=title, disable=hide_bar, leave=False) as bar:
            for result in self._engine.generate(work_queue):
                bar.update()
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
        pairs = zip(completions.items(), rewards.collect(), strict=True)
        return {key: (completion, score) for (key, completion), score in pairs}, seconds
