"""What is asked of an engine: requests for completions.

    prompts + SamplingSettings + RolloutSeed -> group_requests -> Request -> `running_completions`

A request's seed follows from (run seed, step, prompt id, sample index): its tokens depend neither
on which engine samples it nor on how many engines there are.
"""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlmath.algorithms.types import NOTHING_SAMPLED, PartialCompletion, Prompt
from rlmath.config.schema import RolloutConfig

Key = tuple[int, int]
"""(row of the request in its rollout, sample index); a row has requests for the same prompt."""

CPU_SAMPLER_VERSION = 2
"""Version of the sampler on CPU: another one draws other tokens from the same seeds.

1: every request's generator in turn; 2: noise from seed and position."""


@dataclass(frozen=True)
class SamplingSettings:
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


def training_sampling(settings: RolloutConfig) -> SamplingSettings:
    """The sampling settings of a training rollout."""
    return SamplingSettings(
        samples=settings.group_size,
        temperature=settings.temperature,
        top_p=settings.top_p,
        min_new_tokens=settings.min_new_tokens,
        max_new_tokens=settings.max_new_tokens,
    )


@dataclass(frozen=True)
class RolloutSeed:
    """What the seed of every request is made of, beside the prompt and the sample index."""

    run_seed: int
    step: int


@dataclass(frozen=True)
class Request:
    """A completion to sample, or to continue.

    The noise of its tokens is that of their positions: whole or in slices, the tokens are the same.
    """

    key: Key
    token_ids: tuple[int, ...]
    """The prompt."""
    seed: int
    min_new_tokens: int
    """The completion has no end-of-sequence token before this many tokens."""
    max_new_tokens: int
    """Sampled tokens after which the completion is cut off."""
    temperature: float | None = None
    """Temperature, 0 for greedy; None: that of the settings."""
    top_p: float | None = None
    """Share of the probability that is sampled from; None: that of the settings."""
    so_far: PartialCompletion = NOTHING_SAMPLED
    """What is sampled of the completion already."""
    slice_tokens: int | None = None
    """Tokens that are sampled behind `so_far` at most, 0 at a slice's end; None: all to its end."""
    cache_salt: str | None = None
    """Blocks of the KV cache are shared by requests with the same salt only."""

    def with_more(self, so_far: PartialCompletion) -> Request:
        """The request as it goes on from `so_far`; tokens that are new there leave its slice.

        >>> more = NOTHING_SAMPLED.extended((7, 8), (-0.5, -0.5), policy_version=4, step=2)
        >>> Request((0, 0), (5,), 1, 0, max_new_tokens=9, slice_tokens=3).with_more(more).slice_tokens
        1
        """
        if self.slice_tokens is None:
            return replace(self, so_far=so_far)
        slice_tokens = self.slice_tokens - (so_far.n_sampled - self.so_far.n_sampled)
        return replace(self, so_far=so_far, slice_tokens=slice_tokens)

    @property
    def most_now(self) -> int:
        """Tokens that are sampled now at most."""
        done = self.so_far.n_sampled
        left = self.max_new_tokens - done
        assert left > 0, (
            f"the completion is finished: it has {done} of {self.max_new_tokens} tokens"
        )
        return left if self.slice_tokens is None else min(self.slice_tokens, left)

    @property
    def least_now(self) -> int:
        """Tokens that are sampled now at least; vLLM refuses more than `most_now`."""
        return min(self.most_now, max(0, self.min_new_tokens - self.so_far.n_sampled))


def request_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Seed of one completion, the same whichever engine samples it (0 to 2**63 - 1)."""
    text = f"{run_seed}/{step}/{sample_index}/{prompt_id}"
    return (
        int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        >> 1
    )


def group_requests(
    prompts: Sequence[Prompt], sampling: SamplingSettings, seed: RolloutSeed
) -> list[list[Request]]:
    """The requests for G samples of each of P prompts, the same whichever engine samples them.

    A prompt that comes again gets further samples: those behind the G of its first time."""
    times: Counter[str] = Counter()
    requests_PG = []
    for p, prompt in enumerate(prompts):
        requests_PG.append(
            requests_of(prompt, p, sampling, seed=seed, times=times[prompt.prompt_id])
        )
        times[prompt.prompt_id] += 1
    return requests_PG


def requests_of(
    prompt: Prompt, row: int, sampling: SamplingSettings, seed: RolloutSeed, times: int = 0
) -> list[Request]:
    """The requests for G samples of a prompt that has come `times` before in its step."""
    first = times * sampling.samples
    return [
        Request(
            key=(row, g),
            token_ids=prompt.token_ids,
            seed=request_seed(seed.run_seed, seed.step, prompt.prompt_id, sample_index=first + g),
            min_new_tokens=sampling.min_new_tokens,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        for g in range(sampling.samples)
    ]
