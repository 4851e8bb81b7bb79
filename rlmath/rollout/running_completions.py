"""The completions that an engine samples: the one loop around vLLM's steps.

                       interrupted
                        ^       |
              interrupt |       | begin
                        |       v
    Request -- begin -> decoding ----> finished: a stop token, or `max_new_tokens`; its text, then `score`
        ^                  |  <---> called: a tool's code runs, then its output is behind the tokens;
        |                  |        or a finished answer is told something (`finished_turns`)
        |                  v
        +-- begin -- unfinished: `slice_tokens` are sampled

Whoever has work gives it, in its own order: a rollout and an evaluation by a source (`sample`), an
engine on ranks of its own between two steps (`begin`, `step`). Finish reason, text and segments of
a completion are made here and nowhere else. Who scores it is the caller's matter.

A completion that is interrupted, or whose slice ends, leaves vLLM with what is sampled of it
(`Request.so_far`); begun again, vLLM prefills that. So does one that calls a tool: it is begun
again with the output, in front of new work (`called_completions`); a call at the end of a slice is
answered first.

vLLM's engine core is given requests and asked for tokens, without what `LLM` does around it for
text.
"""

from __future__ import annotations

import copy
import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import Completion, FinishReason, PartialCompletion
from rlmath.config.schema import RolloutConfig
from rlmath.data.tokenizer import completion_text
from rlmath.rollout.called_completions import CalledCompletions, FoundCalls
from rlmath.rollout.engine_adapters import adapter_request
from rlmath.rollout.finished_turns import FinishedTurns
from rlmath.rollout.sampling import Key, Request

_NAMES = itertools.count()
"""Names of requests, never used twice in a process.

An engine may still hold the last ones of the step before."""


@dataclass(frozen=True)
class Weights:
    """The weights that an engine samples with; every token of a completion is marked with them."""

    version: int = 0
    """Optimizer steps."""
    step: int = 0
    """The step, counted from 0, that samples with them."""


@dataclass(frozen=True)
class Ended:
    """A completion that an engine samples no further."""

    request: Request
    """The request.

    Where its slice ended, as it goes on: with what is sampled. Where it is finished, its `so_far`
    may lack the last tokens: read `completion`."""
    completion: PartialCompletion | Completion
    """All of it; partial where its slice ended first."""
    routes: Tensor | None = None
    """Experts of the tokens that it was sampled by, [tokens, layers, experts of a token].

    They begin behind the routes that the request had (`PartialCompletion.routes_at`), and lack the
    tokens that no pass has read: the last one that was sampled, and outputs of tools behind it.
    None: they were not asked for."""


@dataclass(frozen=True)
class Load:
    """What an engine has to do, in sequences."""

    in_flight: int
    """Begun and not ended."""
    waiting: int
    """Sequences in flight without a place: not begun yet, or put off by a full KV cache."""
    called: int = 0
    """Sequences in flight that wait for a tool."""


@dataclass
class Usage:
    """What an engine has done since it was reset."""

    since: float = field(default_factory=time.perf_counter)
    busy_seconds: float = 0.0
    """Time spent in steps of vLLM."""
    waiting_seconds: float = 0.0
    """Time in which all completions waited for tools."""
    new_tokens: int = 0
    steps: int = 0
    running: int = 0
    """Completions that were decoded, summed over steps."""


class RequestSource(Protocol):
    """Gives requests while an engine samples.

    All ranks of an engine must be given the same."""

    def pop(self, load: Load) -> Sequence[Request]:
        """Requests to begin before the next step.

        Sampling ends where an engine that has none is given none."""

    def ended(self, key: Key, tokens: int) -> None:
        """Called for every request that has ended, before it is yielded.

        `tokens` is the number of sampled tokens of its completion."""


class AllAtOnce:
    """Gives all its requests before the first step; vLLM queues them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def pop(self, load: Load) -> Sequence[Request]:
        requests, self._requests = self._requests, ()
        return requests

    def ended(self, key: Key, tokens: int) -> None:
        pass


class RunningCompletions:
    """The completions that a vLLM `LLM` of this process samples.

    Nothing else may use the `LLM` while there are any. All ranks of an engine call every method
    alike. The log-probs are of the distribution that was sampled from, temperature included.

        running = RunningCompletions(llm, settings, tokenizer=tokenizer, score=submit)
        for ended in running.sample(requests):
            ...
    """

    def __init__(
        self,
        llm: Any,
        settings: RolloutConfig,
        *,
        weights: Weights = Weights(),
        tokenizer: PreTrainedTokenizerFast | None = None,
        score: Callable[[Request, Completion], None] = lambda request, completion: None,
        on_step: Callable[[], None] = lambda: None,
        keeps_cache: bool = False,
        tools: CalledCompletions | FinishedTurns | None = None,
        routes_of: Callable[[str, int, int], Tensor] | None = None,
    ) -> None:
        """`settings` give the distribution where a request does not set its own.

        Finished completions get their text from the `tokenizer` and are handed to `score`; without
        a tokenizer, as on ranks that do not lead their engine, neither happens. `score` gets the
        request, whose `so_far` may lack the last tokens. `on_step` is called before each step. With
        `keeps_cache`, completions keep their KV cache when new weights come: those begun later do
        not share its blocks. `tools` answer calls, or finished turns; other completions of the
        engine that wait for one must be `interrupted`. `routes_of` gives the experts of a request's
        tokens from the first to the end of a range, by its name, which must all be of these
        weights: no completion is interrupted."""
        self._core = llm.llm_engine.engine_core
        self._scheduler = (
            self._core.engine_core.scheduler
        )  # in this process (see `prepare_environment`)
        self._prepare = _Preparation(llm, settings)
        self._tokenizer = tokenizer
        self._score = score
        self._on_step = on_step
        self._keeps_cache = keeps_cache
        self._tools = tools
        self._routes_of = routes_of
        self._decoding: dict[str, _Decoding] = {}
        self._routes: dict[Key, list[Tensor]] = {}
        """Experts of what completions were sampled by since they were begun, between their calls."""
        self.weights = weights
        """Set them when the engine gets new ones, after `keep_tokens` or inside `interrupted`."""
        self.usage = Usage()

    def __len__(self) -> int:
        """Completions that are begun and not ended."""
        return len(self._decoding) + self._waiting_for_tools

    @property
    def _waiting_for_tools(self) -> int:
        """Completions that wait for a tool."""
        return 0 if self._tools is None else len(self._tools)

    @property
    def busy(self) -> bool:
        return bool(self._scheduler.requests)

    def load(self) -> Load:
        _, waiting = self._scheduler.get_request_counts()
        return Load(len(self), waiting, self._waiting_for_tools)

    def sample(self, requests: Sequence[Request] | RequestSource) -> Iterator[Ended]:
        """Sample all requests, those of a source as it gives them.

        Yields each as soon as it has ended."""
        source = AllAtOnce(requests) if isinstance(requests, Sequence) else requests
        while True:
            # New work first: with some an engine does not wait for calls. Completions that go on
            # are computed before it all the same.
            for request in source.pop(self.load()):
                self.begin(request)
            ended_after_calls = self.resume_called()
            if not (self.busy or self._waiting_for_tools or ended_after_calls):
                break
            for ended in (*ended_after_calls, *self.step()):
                source.ended(ended.request.key, ended.completion.n_sampled)
                yield ended
        assert not len(self), f"vLLM did not return {len(self)} requests"

    def begin(self, request: Request, goes_first: bool = False) -> None:
        """Sample a completion from where it is; where it `goes_first`, before all that wait.

        Where it is at a call, as in a checkpoint, the call runs first. vLLM's VLLMValidationError
        for a prompt that the model cannot take."""
        if self._tools is not None and (turn := self._tools.unanswered(request.so_far)):
            is_submitted = self._tools.submit(request, turn.calls)
            assert is_submitted, "a completion without calls left is finished, not begun"
            return
        if self._keeps_cache:
            request = replace(request, cache_salt=str(self.weights.version))
        name = str(next(_NAMES))
        self._decoding[name] = _Decoding(request)
        self._core.add_request(self._prepare(name, request))
        if goes_first:
            core_request = self._scheduler.requests[name]
            self._scheduler.waiting.remove_request(core_request)
            self._scheduler.waiting.prepend_request(core_request)

    def step(self) -> list[Ended]:
        """Make one step of vLLM; returns the completions that ended with it.

        Finished ones are handed to `score` first. RuntimeError where vLLM gave one up."""
        self._on_step()
        if not self.busy:  # all wait for tools
            return []
        usage = self.usage
        tools = self._tools
        decodings = self._decoding
        started = time.perf_counter()
        usage.steps += 1
        usage.running += len(decodings)
        ended: list[tuple[_Decoding, str]] = []
        called: dict[str, tuple[_Decoding, FoundCalls]] = {}
        for output in self._core.get_output().outputs:
            if (decoding := decodings.get(output.request_id)) is None:
                continue  # interrupted
            new_tokens = decoding.add(output)
            usage.new_tokens += new_tokens
            if tools is not None and (
                calls := tools.find(decoding.request.so_far, decoding.token_ids, new_tokens)
            ):
                called[output.request_id] = decoding, calls
            elif output.finish_reason is not None:
                del decodings[output.request_id]
                self._keep_routes(output.request_id, decoding)
                ended.append((decoding, str(output.finish_reason)))
        usage.busy_seconds += time.perf_counter() - started
        return [
            *(self._end(decoding, reason) for decoding, reason in ended),
            *self._hand_over(called),
        ]

    def _hand_over(self, called: Mapping[str, tuple[_Decoding, FoundCalls]]) -> Iterator[Ended]:
        """Take completions out of vLLM, without tokens behind their calls, and let the calls run.

        Those that may call no more have ended."""
        if not called:
            return
        assert self._tools is not None
        self._abort(name for name in called if name in self._scheduler.requests)
        for name, (decoding, calls) in called.items():
            del self._decoding[name]
            decoding.drop_behind(calls.tokens)
            self._keep_routes(name, decoding)
            request = decoding.request.with_more(decoding.sampled(self.weights))
            if not self._tools.submit(request, calls.calls):
                yield self._finish(request, request.so_far, self._tools.unanswered_reason)

    def _keep_routes(self, name: str, decoding: _Decoding) -> None:
        """Keep the routes of the tokens that the completion was sampled by and that have none yet.

        Its blocks are its own until the next step."""
        if self._routes_of is None:
            return
        request = decoding.request
        pieces = self._routes.setdefault(request.key, [])
        first = sum(place.tokens for place in request.so_far.routes_at) + sum(map(len, pieces))
        pieces.append(self._routes_of(name, first, decoding.length - 1))

    def _pop_routes(self, request: Request) -> Tensor | None:
        """`Ended.routes` of a completion that ends."""
        pieces = self._routes.pop(request.key, None)
        return None if pieces is None else torch.cat(pieces)

    def _abort(self, names: Iterable[str]) -> None:
        """Take requests out of vLLM, one by one.

        It frees the blocks of several in the order of a set, which differs between ranks."""
        for name in names:
            self._core.abort_requests([name])

    def resume_called(self) -> list[Ended]:
        """Begin completions again whose calls are answered; call it before every step.

        Where all completions wait, so does it, for a while. Returns those that have ended: they are
        lost, over, or at the end of their slice."""
        if self._tools is None:
            return []
        is_idle = not self.busy
        waits = is_idle and self._waiting_for_tools > 0
        started = time.perf_counter()
        answers = self._tools.answered(is_idle)
        if waits:
            self.usage.waiting_seconds += time.perf_counter() - started
        ended = []
        for answered in answers:
            if answered.is_lost:
                ended.append(self._finish(answered.request, answered.request.so_far, "lost"))
            elif answered.is_over:
                ended.append(self._finish(answered.request, answered.request.so_far, "stop"))
            elif answered.request.slice_tokens == 0:
                ended.append(self._leave(answered.request))
            else:
                self.begin(answered.request, goes_first=True)
        return ended

    def _end(self, decoding: _Decoding, reason: str) -> Ended:
        """The completion: partial, or finished with its text and handed to `score`."""
        stopped = reason == "stop"
        if not stopped and reason != "length":
            raise RuntimeError(f"vLLM ended a completion with {reason!r}, unfinished")
        request = decoding.request
        sampled = decoding.sampled(self.weights)
        if not stopped and sampled.n_sampled < request.max_new_tokens:
            return self._leave(request.with_more(sampled))
        return self._finish(request, sampled, "stop" if stopped else "length")

    def _leave(self, request: Request) -> Ended:
        """The completion at the end of its slice, unfinished.

        Its session ends; a further call makes it again from the earlier ones."""
        self._end_session(request, request.so_far)
        return Ended(request, request.so_far, self._pop_routes(request))

    def _end_session(self, request: Request, sampled: PartialCompletion) -> None:
        """End the sandbox of a completion, if it has one."""
        if self._tools is not None and sampled.calls:
            self._tools.release(request.key)

    def _finish(self, request: Request, sampled: PartialCompletion, reason: FinishReason) -> Ended:
        """The finished completion, all of `sampled`, with its text; handed to `score`."""
        stopped = reason == "stop"
        text = ""
        self._end_session(request, sampled)
        if self._tokenizer is not None and self._tools is not None:
            text = self._tools.text_of(sampled, stopped)
        elif self._tokenizer is not None:
            text = completion_text(self._tokenizer, sampled.token_ids, stopped)
        completion = sampled.finished(request.key[1], text, reason)
        if self._tokenizer is not None:
            self._score(request, completion)
        return Ended(request, completion, self._pop_routes(request))

    def keep_tokens(self) -> list[Request]:
        """All requests in flight, with what is sampled of them by now; they go on.

        Those that wait for a tool come last. Call it before the engine gets new weights: later
        tokens are marked with those."""
        for decoding in self._decoding.values():
            decoding.keep_tokens(self.weights)
        return [*(decoding.request for decoding in self._decoding.values()), *self.called]

    @property
    def called(self) -> list[Request]:
        """The requests that wait for a tool, with what is sampled up to their calls."""
        return [] if self._tools is None else self._tools.requests

    @contextmanager
    def interrupted(self) -> Iterator[list[Request]]:
        """Take all requests out of vLLM while the engine does something else or gets new weights.

        Gives them, and those that wait for a tool, with what is sampled of each. Afterwards they go
        on. Calls run meanwhile; other completions may call, too.

            with running.interrupted() as requests:
                engine.score(sequences)
        """
        requests = self.keep_tokens()
        decoding_requests = [decoding.request for decoding in self._decoding.values()]
        self._abort(self._decoding)
        self._decoding.clear()
        with nullcontext() if self._tools is None else self._tools.set_aside():
            yield requests
        for request in decoding_requests:
            self.begin(request)


@dataclass
class _Decoding:
    """A completion in vLLM, and what it has sampled since `request.so_far`.

    An array takes 8 bytes for a token with its log-prob, Python's numbers 70."""

    request: Request
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))

    @property
    def length(self) -> int:
        """Tokens of the prompt and of all that is sampled."""
        request = self.request
        return len(request.token_ids) + len(request.so_far.token_ids) + len(self.token_ids)

    def add(self, output: Any) -> int:
        """Add the tokens of a vLLM `EngineCoreOutput`; returns their number."""
        token_ids = output.new_token_ids
        logprobs = output.new_logprobs or ()  # a list (see `scheduler_shortcuts`)
        new_tokens = len(token_ids)
        assert len(logprobs) == new_tokens, "vLLM returned another number of log-probs than tokens"
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        return new_tokens

    def sampled(self, weights: Weights) -> PartialCompletion:
        """All there is of the completion."""
        so_far = self.request.so_far
        if not self.token_ids:
            return so_far
        return so_far.extended(self.token_ids, self.logprobs, weights.version, step=weights.step)

    def drop_behind(self, tokens: int) -> None:
        """Drop what was sampled behind so many tokens."""
        del self.token_ids[tokens:]
        del self.logprobs[tokens:]

    def keep_tokens(self, weights: Weights) -> None:
        """Move the tokens that these weights have sampled into `request.so_far`."""
        self.request = self.request.with_more(self.sampled(weights))
        self.token_ids = array("i")
        self.logprobs = array("f")


class _Preparation:
    """Turns our requests into vLLM's.

    Of requests that follow one another and are alike, the samples of a prompt, vLLM checks and
    completes the first; the others are copies of it with their own seeds."""

    def __init__(self, llm: Any, settings: RolloutConfig) -> None:
        self._engine = llm.llm_engine
        self._adapter = adapter_request(llm)
        self._settings = settings
        self._last: tuple[Request, Any] | None = None

    def __call__(self, name: str, request: Request) -> Any:
        """An `EngineCoreRequest`.

        vLLM's VLLMValidationError for a prompt that the model cannot take."""
        if request.so_far.token_ids:  # there is none alike
            core_request = self._check(name, request)
            core_request.request_id = name
            return core_request
        alike = replace(request, key=(0, 0), seed=0)
        if self._last is None or self._last[0] != alike:
            self._last = alike, self._check(name, request)
        checked = self._last[1]
        core_request = copy.copy(checked)
        core_request.request_id = name
        core_request.sampling_params = copy.copy(checked.sampling_params)
        core_request.sampling_params.seed = request.seed
        return core_request

    def _check(self, name: str, request: Request) -> Any:
        """vLLM's request, checked and completed by its input processor."""
        from vllm.inputs import tokens_input

        engine = self._engine
        token_ids = [*request.token_ids, *request.so_far.token_ids]
        prompt = tokens_input(token_ids, cache_salt=request.cache_salt)
        parameters = _parameters(self._settings, request)
        return engine.input_processor.process_inputs(
            name,
            prompt,
            parameters,
            supported_tasks=engine.get_supported_tasks(),
            lora_request=self._adapter,
        )


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
