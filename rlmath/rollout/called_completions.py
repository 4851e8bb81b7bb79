"""Completions with calls of a tool: each call is found, executed beside the engine, and answered.

    decoding -- a call is complete --> called: its code runs in a sandbox
       ^                                  |
       +----------- its output -----------+     lost: the machine was at fault, three times

Every rank of an engine finds the same calls, in the same tokens. The sandboxes are those of the
engine's leader, which reads results and, every few steps, shares them, so that all ranks go on
alike.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rlmath.algorithms.types import FinishReason, PartialCompletion, ToolCall, turn_tokens
from rlmath.config.schema import ToolsConfig
from rlmath.config.terminal import visible
from rlmath.data.tokenizer import completion_text
from rlmath.data.tool_fences import most_output_characters
from rlmath.data.tool_formats import ToolFormat
from rlmath.data.tool_outputs import SampledCall
from rlmath.rollout.sampling import Key, Request
from rlmath.sandbox.calls import KEEPING, CallResult, Limits, PastCall
from rlmath.sandbox.sandboxes import Sandboxes

logger = logging.getLogger(__name__)

SHARE_STEPS = 4
"""Steps of an engine of several ranks between two looks for results."""
WAIT_SECONDS = 0.2
"""Longest wait for a result where the engine has nothing else to do."""
TRIAL_SECONDS = 60.0
"""Longest wait for the call by which sandboxes are tried."""
FEW_LOST = 5
MOST_LOST_SHARE = 0.2
"""A rollout ends in an error where FEW_LOST completions or more, and more than this share of those
with calls, are lost by faults of the machine."""

SharedResults = list[tuple[str, CallResult]]
Share = Callable[[SharedResults], SharedResults]
"""Gives all ranks of an engine what its leader has."""


@dataclass(frozen=True)
class FoundCalls:
    """The calls that are complete in the tokens of a turn."""

    tokens: int
    """Tokens of the turn, to the one that completes its calls."""
    calls: tuple[SampledCall, ...]
    """All of the turn, in order; none where it is a finished answer (`finished_turns`)."""


@dataclass(frozen=True)
class Answered:
    """A completion whose calls have results, or whose finished turn has an answer."""

    request: Request
    """It goes on with the outputs, unless it is lost or over."""
    is_lost: bool
    is_over: bool = False
    """Whether its last answer is the last one."""


@dataclass(frozen=True)
class _Called:
    """A completion whose turn has calls that run one after another."""

    request: Request
    sampled_calls: tuple[SampledCall, ...]
    """All calls of the turn."""
    submitted_at: float
    """When the call that runs was submitted (seconds of the monotonic clock)."""
    results: tuple[tuple[CallResult, float], ...] = ()
    """Results of the calls that have run, and how long each took (seconds)."""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that have results."""
        return [
            ToolCall(
                call.code,
                outcome.text,
                outcome.status,
                position=0,
                seconds=seconds,
                cpu_seconds=outcome.cpu_seconds,
            )
            for call, (outcome, seconds) in zip(self.sampled_calls, self.results, strict=False)
        ]


def open_sandboxes(settings: ToolsConfig) -> Sandboxes:
    """The sandboxes of an engine's leader, tried by a call.

    ValueError for what this machine lacks, RuntimeError where the call has no right result."""
    sandboxes = Sandboxes(
        settings.cores,
        settings.sessions,
        limits=Limits(
            call_cpu_seconds=settings.call_cpu_seconds,
            completion_cpu_seconds=settings.completion_cpu_seconds,
            memory_bytes=math.ceil(settings.memory_gib * 2**30),
            output_characters=most_output_characters(settings.max_output_tokens),
        ),
        isolation=settings.isolation,
        state=settings.state,
    )
    try:
        sandboxes.await_ready()
        sandboxes.submit("trial", "print(6 * 7)", seed=1)
        results = sandboxes.wait(TRIAL_SECONDS)
        if not results:
            raise RuntimeError(f"a sandbox gave no result of print(6 * 7) in {TRIAL_SECONDS:.0f} s")
        ((_, outcome),) = results
        if (outcome.status, outcome.text) != ("ok", "42\n"):
            raise RuntimeError(
                f"a sandbox answers {outcome.text!r}, status {outcome.status}, to print(6 * 7); "
                "see `rlmath doctor` and `rlmath sandbox`"
            )
        sandboxes.release("trial")
    except BaseException:
        sandboxes.close()
        raise
    return sandboxes


class CalledCompletions:
    """The completions of an engine that wait for a call.

    All ranks of the engine call every method alike."""

    unanswered_reason: FinishReason = "length"
    """How a completion ends whose calls are not run."""

    def __init__(
        self,
        settings: ToolsConfig,
        tool_format: ToolFormat,
        sandboxes: Sandboxes | None,
        share: Share | None = None,
    ) -> None:
        """The leader has `sandboxes`; engines of several ranks need `share`."""
        self._settings = settings
        self._format = tool_format
        self._sandboxes = sandboxes
        self._share = share
        self._called: dict[str, _Called] = {}
        """Completions that wait, by their sessions' names."""
        self._steps = itertools.count()
        self._prefix = ""
        """Begins the names of sessions; those that are set aside have another one."""
        self._results_aside: SharedResults = []
        """Results of completions that are set aside, on the leader."""

    def __len__(self) -> int:
        """Completions that wait for a call."""
        return len(self._called)

    @property
    def requests(self) -> list[Request]:
        """The requests that wait for a call, with what is sampled up to it."""
        return [called.request for called in self._called.values()]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let other completions of the engine call, whatever their keys.

        Those that wait have their results afterwards; the others must have ended by then."""
        called = self._called
        prefix = self._prefix
        self._called = {}
        self._prefix = f"{prefix}other "
        yield
        self._called = called
        self._prefix = prefix

    def find(
        self, so_far: PartialCompletion, token_ids: Sequence[int], new_tokens: int
    ) -> FoundCalls | None:
        """The calls that one of the last `new_tokens` completes, None where none does.

        `token_ids` are sampled behind `so_far`."""
        newest = token_ids[len(token_ids) - new_tokens :]
        if self._format.can_complete.isdisjoint(newest):
            return None
        before = list(so_far.token_ids[len(so_far.token_ids) - turn_tokens(so_far) :])
        turn_ids = before + list(token_ids)
        for end in range(len(turn_ids) - new_tokens + 1, len(turn_ids) + 1):
            if turn_ids[end - 1] in self._format.can_complete:
                calls = self._format.calls_in(turn_ids[:end])
                if calls:
                    return FoundCalls(end - len(before), calls)
        return None

    def unanswered(self, so_far: PartialCompletion) -> FoundCalls | None:
        """The calls that the last token completes: what is sampled goes on behind their outputs."""
        turn_ids = so_far.token_ids[len(so_far.token_ids) - turn_tokens(so_far) :]
        if len(turn_ids) == 0 or turn_ids[-1] not in self._format.can_complete:
            return None
        calls = self._format.calls_in(list(turn_ids))
        return FoundCalls(len(turn_ids), calls) if calls else None

    def submit(self, request: Request, calls: tuple[SampledCall, ...]) -> bool:
        """Let the calls of a turn run, whose last token is the last one of `request.so_far`.

        False where the completion has too few calls or no token left: none is run."""
        so_far = request.so_far
        if len(so_far.calls) + len(calls) > self._settings.max_calls:
            return False
        if so_far.n_sampled >= request.max_new_tokens:
            return False
        self._run_next(_Called(request, calls, time.monotonic()))
        return True

    def _run_next(self, called: _Called) -> None:
        """Let the first call without a result run."""
        name = self._session_name(called.request.key)
        self._called[name] = called
        if self._sandboxes is not None:
            earlier = [*called.request.so_far.calls, *called.calls]
            code = called.sampled_calls[len(called.results)].code
            past_calls = [_past_call(call) for call in earlier]
            self._sandboxes.submit(name, code, called.request.seed, past_calls)

    def answered(self, is_idle: bool) -> list[Answered]:
        """The completions whose turn's calls all have results, or one of which is lost.

        Engines of several ranks share them every SHARE_STEPS times that it is called. Where the
        engine `is_idle`, it waits for a result every time. RuntimeError where sandboxes' servers
        start and cannot work."""
        is_due = self._share is None or next(self._steps) % SHARE_STEPS == 0
        if not self._called or not (is_idle or is_due):
            return []
        results: SharedResults = []
        if self._sandboxes is not None:
            results = self._results(self._sandboxes, is_idle)
        if self._share is not None:
            results = self._share(results)
        answers = (self._answer(name, outcome) for name, outcome in results)
        return [answer for answer in answers if answer is not None]

    def release(self, key: Key) -> None:
        """End the session of a completion that has ended."""
        if self._sandboxes is not None:
            self._sandboxes.release(self._session_name(key))

    def close(self) -> None:
        """End the sandboxes."""
        if self._sandboxes is not None:
            self._sandboxes.close()

    def text_of(self, completion: PartialCompletion, stopped: bool = False) -> str:
        """All that is sampled of a completion, as text; an output begins a line.

        Where the completion `stopped` by itself its end is left out."""
        text = ""
        runs = segment_runs(completion)
        for number, (is_sampled, token_ids) in enumerate(runs, start=1):
            if is_sampled:
                text += self._turn_text(token_ids, stopped and number == len(runs))
            else:
                text += line_end(text)
        return text

    def _turn_text(self, turn_ids: Sequence[int], stopped: bool) -> str:
        """The text of a turn; of one that `stopped` by itself the last token is left out."""
        if stopped:
            return completion_text(self._format.tokenizer, turn_ids, stopped=True)
        return self._format.turn_text(turn_ids)

    def _results(self, sandboxes: Sandboxes, is_idle: bool) -> SharedResults:
        """Results of the completions that wait; those of others are kept, which are set aside."""
        has_some = any(name in self._called for name, _ in self._results_aside)
        arrived = sandboxes.wait(WAIT_SECONDS if is_idle and not has_some else 0.0)
        results = [*self._results_aside, *arrived]
        self._results_aside = [entry for entry in results if entry[0] not in self._called]
        return [entry for entry in results if entry[0] in self._called]

    def _session_name(self, key: Key) -> str:
        return f"{self._prefix}{key[0]}/{key[1]}"

    def _answer(self, name: str, outcome: CallResult) -> Answered | None:
        """The completion with the outputs of its turn's calls; None where another call runs now."""
        called = self._called.pop(name)
        now = time.monotonic()
        results = (*called.results, (outcome, now - called.submitted_at))
        called = replace(called, results=results, submitted_at=now)
        request = called.request
        so_far = request.so_far
        is_answered = len(results) == len(called.sampled_calls)
        if not is_answered and not outcome.is_infrastructure_fault:
            self._run_next(called)
            return None
        text = self.text_of(so_far)
        if outcome.is_infrastructure_fault:
            calls = [replace(call, position=len(text)) for call in called.calls]
            so_far = replace(so_far, calls=(*so_far.calls, *calls))
            return Answered(replace(request, so_far=so_far), is_lost=True)
        turn_ids = so_far.token_ids[len(so_far.token_ids) - turn_tokens(so_far) :]
        printed = [result.text for result, _ in results]
        outputs = self._format.outputs(list(turn_ids), called.sampled_calls, printed)
        calls = [
            replace(
                call,
                output=output,
                position=len(text + line_end(text)),
                is_cut=is_cut or result.left_out_characters > 0,
                ends_turn=self._settings.format == "chat",
            )
            for call, output, is_cut, (result, _) in zip(
                called.calls, outputs.texts, outputs.are_cut, results, strict=True
            )
        ]
        so_far = so_far.answered(calls, outputs.token_ids)
        return Answered(replace(request, so_far=so_far), is_lost=False)


SANDBOXES = (
    "completions with calls are lost, as their sandbox gave no result in three attempts",
    "`rlmath doctor` says what isolates; see docs/tool_use.md",
)
"""What `check_lost` says, and what it advises."""
ENVIRONMENTS = (
    "completions are lost, as environment.function failed in three attempts at a turn",
    "Correct the function; see docs/turns.md",
)


def check_lost(
    reasons: Sequence[str],
    calling: int,
    outcome: str,
    tells: bool = True,
    texts: tuple[str, str] = SANDBOXES,
) -> None:
    """Warn of completions that were lost, and of the outcome, where this rank `tells`.

    `reasons` has one for each, whose first line is told; `calling` is the number of completions
    with calls. RuntimeError, on all ranks, where many are lost."""
    if not reasons:
        return
    lost = len(reasons)
    cause, advice = texts
    first_line = reasons[0].strip().partition("\n")[0]
    text = f"{lost} of {calling} {cause}. The first: {visible(first_line)}"
    if lost >= FEW_LOST and lost > MOST_LOST_SHARE * calling:
        raise RuntimeError(f"{text}. {advice}")
    if tells:
        logger.warning("%s. %s", text, outcome)


def _past_call(call: ToolCall) -> PastCall:
    return PastCall(call.code, call.status in KEEPING, call.cpu_seconds)


def segment_runs(completion: PartialCompletion) -> list[tuple[bool, Sequence[int]]]:
    """(whether they are sampled, tokens) of the turns of a completion, and of what is between.

    >>> once = PartialCompletion().extended((7, 8), (-0.5, -0.5), policy_version=4, step=2)
    >>> segment_runs(once.extended((9,), (-0.1,), policy_version=5, step=3))
    [(True, array('i', [7, 8, 9]))]
    """
    runs = []
    start = 0
    for is_sampled, segments in itertools.groupby(
        completion.segments, lambda segment: segment.sampled
    ):
        end = start + sum(segment.tokens for segment in segments)
        runs.append((is_sampled, completion.token_ids[start:end]))
        start = end
    return runs


def line_end(text: str) -> str:
    """What begins a new line behind the text."""
    return "" if not text or text.endswith("\n") else "\n"
