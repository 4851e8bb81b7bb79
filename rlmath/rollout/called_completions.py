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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerFast

from rlmath.algorithms.types import PartialCompletion, ToolCall, turn_tokens
from rlmath.config.schema import ToolsConfig
from rlmath.data.tokenizer import completion_text
from rlmath.data.tool_fences import FenceFormat, most_output_characters
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
class FoundCall:
    """A call that is complete in the tokens of a turn."""

    tokens: int
    """Tokens of the turn, to the one that completes the call."""
    code: str


@dataclass(frozen=True)
class Answered:
    """A completion whose call has a result."""

    request: Request
    """It goes on with the output, unless it is lost."""
    is_lost: bool


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

    def __init__(
        self,
        settings: ToolsConfig,
        tokenizer: PreTrainedTokenizerFast,
        sandboxes: Sandboxes | None,
        share: Share | None = None,
    ) -> None:
        """The leader has `sandboxes`; engines of several ranks need `share`.

        ValueError where the tokenizer cannot write a call."""
        self._settings = settings
        self._format = FenceFormat(tokenizer, settings.max_output_tokens)
        self._sandboxes = sandboxes
        self._share = share
        self._called: dict[str, tuple[Request, str, float]] = {}
        """Requests, the code of their calls, and when they called, by their sessions' names."""
        self._steps = itertools.count()

    def __len__(self) -> int:
        """Completions that wait for a call."""
        return len(self._called)

    def find(
        self, so_far: PartialCompletion, token_ids: Sequence[int], new_tokens: int
    ) -> FoundCall | None:
        """The call that one of the last `new_tokens` completes, None where none does.

        `token_ids` are sampled behind `so_far`."""
        newest = token_ids[len(token_ids) - new_tokens :]
        if self._format.can_complete.isdisjoint(newest):
            return None
        before = list(so_far.token_ids[len(so_far.token_ids) - turn_tokens(so_far) :])
        turn_ids = before + list(token_ids)
        for end in range(len(turn_ids) - new_tokens + 1, len(turn_ids) + 1):
            if turn_ids[end - 1] in self._format.can_complete:
                code = self._format.call_in(turn_ids[:end])
                if code is not None:
                    return FoundCall(end - len(before), code)
        return None

    def submit(self, request: Request, code: str) -> bool:
        """Let a call run, whose last token is the last one of `request.so_far`.

        False where the completion has no call or no token left: it is not run."""
        so_far = request.so_far
        if len(so_far.calls) >= self._settings.max_calls:
            return False
        if so_far.n_sampled >= request.max_new_tokens:
            return False
        name = _session_name(request.key)
        self._called[name] = request, code, time.monotonic()
        if self._sandboxes is not None:
            earlier = [_past_call(call) for call in so_far.calls]
            self._sandboxes.submit(name, code, request.seed, earlier)
        return True

    def answered(self, is_idle: bool) -> list[Answered]:
        """The completions whose calls have results.

        Engines of several ranks share them every SHARE_STEPS times that it is called. Where the
        engine `is_idle`, it waits for a result every time. RuntimeError where the sandboxes cannot
        start again."""
        is_due = self._share is None or next(self._steps) % SHARE_STEPS == 0
        if not self._called or not (is_idle or is_due):
            return []
        results: SharedResults = []
        if self._sandboxes is not None:
            results = self._sandboxes.wait(WAIT_SECONDS if is_idle else 0.0)
        if self._share is not None:
            results = self._share(results)
        return [self._answer(name, outcome) for name, outcome in results]

    def release(self, key: Key) -> None:
        """End the session of a completion that has ended."""
        if self._sandboxes is not None:
            self._sandboxes.release(_session_name(key))

    def close(self) -> None:
        """End the sandboxes."""
        if self._sandboxes is not None:
            self._sandboxes.close()

    def text_of(self, completion: PartialCompletion, stopped: bool = False) -> str:
        """All that is sampled of a completion, as text; an output begins a line.

        Where the completion `stopped` by itself its end is left out."""
        token_ids = completion.token_ids
        text = ""
        start = 0
        for is_sampled, segments in itertools.groupby(
            completion.segments, lambda segment: segment.sampled
        ):
            end = start + sum(segment.tokens for segment in segments)
            if is_sampled:
                is_end = stopped and end == len(token_ids)
                text += completion_text(self._format.tokenizer, token_ids[start:end], is_end)
            else:
                text += _line_end(text)
            start = end
        return text

    def _answer(self, name: str, outcome: CallResult) -> Answered:
        """The completion with the output of its call."""
        request, code, called_at = self._called.pop(name)
        text = self.text_of(request.so_far)
        call = ToolCall(
            code,
            outcome.text,
            outcome.status,
            position=len(text),
            seconds=time.monotonic() - called_at,
            cpu_seconds=outcome.cpu_seconds,
        )
        if outcome.is_infrastructure_fault:
            so_far = replace(request.so_far, calls=(*request.so_far.calls, call))
            return Answered(replace(request, so_far=so_far), is_lost=True)
        output = self._format.output(text, outcome.text)
        call = replace(
            call,
            output=output.text,
            position=len(text + _line_end(text)),
            is_cut=output.is_cut or outcome.left_out_characters > 0,
        )
        so_far = request.so_far.answered(call, output.token_ids)
        return Answered(replace(request, so_far=so_far), is_lost=False)


def check_lost(reasons: Sequence[str], calling: int, outcome: str, tells: bool = True) -> None:
    """Warn of completions that were lost, and of the outcome, where this rank `tells`.

    `reasons` has one for each, `calling` is the number of completions with calls. RuntimeError, on
    all ranks, where many are lost."""
    if not reasons:
        return
    lost = len(reasons)
    text = (
        f"{lost} of {calling} completions with calls are lost, as their sandbox gave no result in "
        f"three attempts. The first: {reasons[0].strip()}"
    )
    if lost >= FEW_LOST and lost > MOST_LOST_SHARE * calling:
        raise RuntimeError(f"{text}. `rlmath doctor` says what isolates; see docs/tool_use.md")
    if tells:
        logger.warning("%s. %s", text, outcome)


def _session_name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def _past_call(call: ToolCall) -> PastCall:
    return PastCall(call.code, call.status in KEEPING, call.cpu_seconds)


def _line_end(text: str) -> str:
    """What begins a new line behind the text."""
    return "" if not text or text.endswith("\n") else "\n"
