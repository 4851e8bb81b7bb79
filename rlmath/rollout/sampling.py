"""Requests to a vLLM engine, and their results.

    prompts + SamplingSettings + RolloutSeed -> group_requests -> Request -> sample (vLLM) -> RequestResult

A request's seed follows from (run seed, step, prompt id, sample index): its tokens depend neither on which engine
samples it nor on how many engines there are.

`sample` gives requests to vLLM's engine core and takes tokens from it, without what `LLM` does around it for text.
"""

# Shape legend: P prompts, G samples per prompt.

from __future__ import annotations

import copy
import hashlib
import itertools
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlmath.algorithms.types import NOTHING_SAMPLED, PartialCompletion, Prompt
from rlmath.config.schema import RolloutConfig

Key = tuple[int, int]
"""(row of the request in its rollout, sample index); a row has requests for the same prompt."""

CPU_SAMPLER_VERSION = 2
"""On CPU, engines of another version draw other tokens from the same seeds: 1, every request's generator in turn; 2,
noise from seed and position."""

_NAMES = itertools.count()
"""Names of requests, never used twice in a process: an engine may still hold the last ones of the step before."""


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
    """As the settings of the rollout say."""
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
    """A completion to sample, or to continue. The noise of its tokens is that of their positions: whole or in slices,
    the tokens are the same."""

    key: Key
    token_ids: tuple[int, ...]
    """The prompt."""
    seed: int
    min_new_tokens: int
    """The completion has no end-of-sequence token before this many tokens."""
    max_new_tokens: int
    """Tokens after which the completion is cut off."""
    temperature: float | None = None
    """None: as the settings say; 0 is greedy."""
    top_p: float | None = None
    """None: as the settings say."""
    so_far: PartialCompletion = NOTHING_SAMPLED
    """What is sampled of the completion already."""
    slice_tokens: int | None = None
    """Tokens that are sampled now at most; None: all to its end."""
    cache_salt: str | None = None
    """Blocks of the KV cache are shared by requests with the same salt only."""

    @property
    def most_now(self) -> int:
        """Tokens that are sampled now at most."""
        done = len(self.so_far.token_ids)
        left = self.max_new_tokens - done
        assert left > 0, f"the completion is finished: it has {done} of {self.max_new_tokens} tokens"
        return left if self.slice_tokens is None else min(self.slice_tokens, left)

    @property
    def least_now(self) -> int:
        """Tokens that are sampled now at least; vLLM refuses more than `most_now`."""
        return min(self.most_now, max(0, self.min_new_tokens - len(self.so_far.token_ids)))


@dataclass(frozen=True)
class RequestResult:
    key: Key
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str


def request_seed(run_seed: int, step: int, prompt_id: str, sample_index: int) -> int:
    """Seed of one completion, the same whichever engine samples it (0 to 2**63 - 1)."""
    text = f"{run_seed}/{step}/{sample_index}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def group_requests(
    prompts: Sequence[Prompt], sampling: SamplingSettings, seed: RolloutSeed
) -> list[list[Request]]:
    """The requests for G samples of each of P prompts, the same whichever engine samples them. A prompt that comes
    again gets further samples: those behind the G of its first time."""
    times: Counter[str] = Counter()
    requests_PG = []
    for p, prompt in enumerate(prompts):
        requests_PG.append(requests_of(prompt, p, sampling, seed, times[prompt.prompt_id]))
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
            seed=request_seed(seed.run_seed, seed.step, prompt.prompt_id, first + g),
            min_new_tokens=sampling.min_new_tokens,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        for g in range(sampling.samples)
    ]


@dataclass(frozen=True)
class Load:
    """What an engine has to do, in sequences."""

    in_flight: int
    """Added and not finished."""
    waiting: int
    """Those in flight that have no place: not begun yet, or put off because the KV cache is full."""


class RunningRequests:
    """The requests that a vLLM `LLM` of this process samples. The log-probs are of the distribution that was sampled
    from, temperature included. Of the settings those of that distribution count, where a request has none of its own;
    lengths are the requests' own."""

    def __init__(self, llm: Any, settings: RolloutConfig) -> None:
        self._core = llm.llm_engine.engine_core
        self._scheduler = self._core.engine_core.scheduler  # in this process (see `prepare_environment`)
        self._prepare = _Preparation(llm, settings)
        self._pending: dict[str, _Pending] = {}
        self.new_tokens = 0
        """Sampled so far, of all requests."""

    def __len__(self) -> int:
        """Requests that are added and not finished."""
        return len(self._pending)

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.requests)

    def load(self) -> Load:
        _, waiting = self._scheduler.get_request_counts()
        return Load(len(self._pending), waiting)

    def add(self, request: Request) -> None:
        name = str(next(_NAMES))
        self._pending[name] = _Pending(request.key)
        self._core.add_request(self._prepare(name, request))

    def step(self) -> list[RequestResult]:
        """Make one step of vLLM's; the completions that are finished with it."""
        finished = []
        for output in self._core.get_output().outputs:
            if (one := self._pending.get(output.request_id)) is None:
                continue  # aborted
            one.add(output)
            self.new_tokens += len(output.new_token_ids)
            if output.finished:
                del self._pending[output.request_id]
                finished.append(
                    RequestResult(one.key, one.token_ids, one.logprobs, str(output.finish_reason))
                )
        return finished

    def take_tokens(self) -> list[RequestResult]:
        """What is sampled of every unfinished request since it was added or last taken. The requests go on."""
        taken = [RequestResult(one.key, one.token_ids, one.logprobs, "") for one in self._pending.values()]
        self._pending = {name: _Pending(one.key) for name, one in self._pending.items()}
        return taken

    def abort(self) -> list[RequestResult]:
        """End all requests; what was sampled of them, as `take_tokens`."""
        taken = self.take_tokens()
        self._core.abort_requests(list(self._pending))
        self._pending.clear()
        return taken


@dataclass(frozen=True)
class _Pending:
    """What vLLM has sampled of a request. An array takes 8 bytes for a token with its log-prob, Python's numbers 70."""

    key: Key
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    def add(self, output: Any) -> None:
        """The tokens of one of vLLM's `EngineCoreOutput`."""
        self.token_ids.extend(output.new_token_ids)
        if output.new_logprobs is not None:
            self.logprobs.extend(output.new_logprobs)  # a list (see `scheduler_shortcuts`)
        assert len(self.logprobs) == len(self.token_ids), (
            "vLLM returned another number of log-probs than tokens"
        )


class _Preparation:
    """Makes vLLM's requests of ours. vLLM checks and completes one of those that follow each other and are alike, the
    samples of a prompt; the others are copies of it with seeds of their own."""

    def __init__(self, llm: Any, settings: RolloutConfig) -> None:
        self._engine = llm.llm_engine
        self._settings = settings
        self._last: tuple[Request, Any] | None = None

    def __call__(self, name: str, request: Request) -> Any:
        """An `EngineCoreRequest`. vLLM's VLLMValidationError for a prompt that the model cannot take."""
        if request.so_far.token_ids:  # there is none alike
            made = self._check(name, request)
            made.request_id = name
            return made
        alike = replace(request, key=(0, 0), seed=0)
        if self._last is None or self._last[0] != alike:
            self._last = alike, self._check(name, request)
        checked = self._last[1]
        made = copy.copy(checked)
        made.request_id, made.sampling_params = name, copy.copy(checked.sampling_params)
        made.sampling_params.seed = request.seed
        return made

    def _check(self, name: str, request: Request) -> Any:
        from vllm.inputs import tokens_input

        engine = self._engine
        prompt = tokens_input([*request.token_ids, *request.so_far.token_ids], cache_salt=request.cache_salt)
        parameters = _parameters(self._settings, request)
        return engine.input_processor.process_inputs(name, prompt, parameters, engine.get_supported_tasks())


def _parameters(settings: RolloutConfig, request: Request) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=settings.temperature if request.temperature is None else request.temperature,
        top_p=settings.top_p if request.top_p is None else request.top_p,
        top_k=settings.top_k,
        max_tokens=request.most_now,
        min_tokens=request.least_now,
        seed=request.seed,
        logprobs=0,
        detokenize=False,
    )
