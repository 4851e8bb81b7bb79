"""One step's rollout: every engine samples what it draws and judges while it samples."""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Completion, FinishReason, Prompt, Score, ScoredGroup
from rlmath.config.schema import RewardConfig, RolloutConfig
from rlmath.distributed.collectives import gather_objects, shared_store
from rlmath.distributed.mesh import Mesh
from rlmath.rewards.reward_manager import Judge
from rlmath.rewards.worker_pool import VerifierPool
from rlmath.rollout.engine import Engine
from rlmath.rollout.sampling import Generated, Request, RequestSource, request_seed
from rlmath.rollout.work_queue import WorkQueue

Key = tuple[int, int]
"""(position of the prompt in the step's batch, sample index)."""


@dataclass(frozen=True)
class RolloutSeed:
    """What the seed of every request is made of, beside the prompt and the sample index."""

    run_seed: int
    step: int


@dataclass(frozen=True)
class Rollout:
    """What the engines made of some prompts."""

    groups: list[ScoredGroup]
    """In the order of the prompts, whoever sampled them."""
    engine_seconds: tuple[float, ...]
    """By engine: from the start until its last completion was there (seconds)."""


@dataclass(frozen=True)
class _Share:
    """What one engine reports."""

    judged: dict[Key, tuple[Completion, Score]]
    seconds: float


@dataclass(frozen=True)
class Sampling:
    """How the completions of a prompt are sampled."""

    samples: int
    """G, completions of one prompt."""
    temperature: float
    """0 is greedy."""
    top_p: float
    min_new_tokens: int
    """No end-of-sequence token before this many new tokens."""
    max_new_tokens: int
    """New tokens after which a completion is cut off."""


def training_sampling(settings: RolloutConfig) -> Sampling:
    """As the settings of the rollout say."""
    return Sampling(
        settings.group_size,
        settings.temperature,
        settings.top_p,
        settings.min_new_tokens,
        settings.max_new_tokens,
    )


def group_requests(prompts: Sequence[Prompt], how: Sampling, seed: RolloutSeed) -> list[list[Request]]:
    """The requests for G samples of each of P prompts, the same whoever samples them. A prompt that comes again gets
    other samples: those behind the G of its first time."""
    times: dict[str, int] = {}
    firsts = []
    for prompt in prompts:
        times[prompt.prompt_id] = times.get(prompt.prompt_id, -1) + 1
        firsts.append(times[prompt.prompt_id] * how.samples)
    return [
        [
            Request(
                (p, g),
                prompt.token_ids,
                request_seed(seed.run_seed, seed.step, prompt.prompt_id, firsts[p] + g),
                how.min_new_tokens,
                how.max_new_tokens,
                how.temperature,
                how.top_p,
            )
            for g in range(how.samples)
        ]
        for p, prompt in enumerate(prompts)
    ]


class Collector:
    """Samples and judges; the ranks of one engine generate alike, and the first of them judges."""

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        tokenizer: PreTrainedTokenizerFast,
        rollout: RolloutConfig,
        reward: RewardConfig,
        pool: VerifierPool | None,
    ) -> None:
        """Every rank makes one, and one at a time: rollouts are told apart by their number."""
        assert (pool is not None) == mesh.is_engine_leader, (
            "the rank that speaks for an engine has the judges"
        )
        self._engine = engine
        self._mesh = mesh
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._reward = reward
        self._pool = pool
        self._rollouts = 0

    def collect(self, prompts: Sequence[Prompt], how: Sampling, seed: RolloutSeed, title: str) -> Rollout:
        """G scored completions of each of the P prompts, the same on every rank; `title` is that of the progress
        bar."""
        requests_PG = group_requests(prompts, how, seed)
        store = shared_store(f"rollout/{self._rollouts}")
        self._rollouts += 1
        work_queue = WorkQueue(store, requests_PG, self._mesh, self._rollout.max_num_seqs)
        shares = gather_objects(self._sample(prompts, work_queue, how, title))
        work_queue.forget()
        judged: dict[Key, tuple[Completion, Score]] = {}
        for share in shares:
            judged |= share.judged if share is not None else {}
        groups = [
            ScoredGroup(
                prompt,
                tuple(judged[p, g][0] for g in range(how.samples)),
                tuple(judged[p, g][1] for g in range(how.samples)),
            )
            for p, prompt in enumerate(prompts)
        ]
        return Rollout(groups, tuple(share.seconds for share in shares if share is not None))

    def _sample(
        self, prompts: Sequence[Prompt], source: RequestSource, how: Sampling, title: str
    ) -> _Share | None:
        """What this rank reports: all its engine's completions, or None where another rank speaks for it."""
        started = time.perf_counter()
        judge = None if self._pool is None else Judge(self._pool, self._reward, how.max_new_tokens)
        completions: dict[Key, Completion] = {}
        # None: shown on a terminal, not in a log file.
        hide_bar = None if self._mesh.rank == 0 and self._rollout.progress_bar else True
        about = round(len(prompts) * how.samples / self._mesh.engines)
        with tqdm(total=about, desc=title, disable=hide_bar, leave=False) as bar:
            for generated in self._engine.generate(source):
                bar.update()
                if judge is None:
                    continue
                completion = self._completion(generated)
                completions[generated.key] = completion
                judge.ask(prompts[generated.key[0]], completion)
        seconds = time.perf_counter() - started
        if judge is None:
            return None
        pairs = zip(completions.items(), judge.scores(), strict=True)
        return _Share({key: (completion, score) for (key, completion), score in pairs}, seconds)

    def _completion(self, generated: Generated) -> Completion:
        reason: FinishReason = "stop" if generated.finish_reason == "stop" else "length"
        text = self._tokenizer.decode(list(generated.token_ids), skip_special_tokens=True)
        return Completion(
            generated.key[1],
            generated.token_ids,
            generated.logprobs,
            str(text),
            reason,
            self._engine.version,
        )
