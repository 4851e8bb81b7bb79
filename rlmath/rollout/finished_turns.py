"""Completions that go on behind a finished answer: with feedback, or in an environment.

    decoding -- a stop token --> finished turn: judged by the run's scorer, or given to the user's
       ^                            |           function, in workers that can be killed
       +---- a text behind it ------+---> over: the completion ends with this answer
                                    +---> lost: the function failed, three times

`called_completions` has the same states for calls of tools. Every rank of an engine finds the same
turns, in the same tokens; the engine's leader has workers and tokenizer, and shares what follows.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from rlmath.algorithms.types import (
    FEEDBACK,
    NOTHING_SAMPLED,
    Completion,
    FinishReason,
    PartialCompletion,
    Prompt,
    Score,
    ToolCall,
)
from rlmath.answers.verifier import FAILURES
from rlmath.config.schema import TurnsConfig
from rlmath.config.terminal import visible
from rlmath.data.feedback import FeedbackTokens
from rlmath.data.tokenizer import completion_text
from rlmath.rewards.reward_manager import RewardManager
from rlmath.rollout.called_completions import (
    SHARE_STEPS,
    WAIT_SECONDS,
    Answered,
    FoundCalls,
    line_end,
    segment_runs,
)
from rlmath.rollout.sampling import Key, Request
from rlmath.workers.function_calls import HookResult
from rlmath.workers.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Calls of an environment for a turn, where the ones before failed."""
VERDICT = "verdict"
"""The word of `turns.feedback` for one of the following texts."""
NO_ANSWER = "No final answer was found. Try again."
WRONG_ANSWER = "The answer {} is not right. Try again."
WRONG = "That is not right. Try again."
"""The text where a function of the user's judges."""


@dataclass(frozen=True)
class TurnOutcome:
    """What follows a finished turn."""

    text: str | None = None
    """What the model reads next; None: the completion is over."""
    figures: tuple[tuple[str, float], ...] = ()
    """`Completion.figures` of the turn."""
    failure: str | None = None
    """Why there is no outcome, after ATTEMPTS."""
    score: Score | None = None
    """The score of the completion as it is now, where it was judged."""


class TurnAnswers(Protocol):
    """Says what follows finished turns, by workers."""

    def ask(self, prompt: Prompt, completion: Completion, key: Key, turns: list[str]) -> None:
        """Ask what follows a completion that ends with the last of these turns."""

    def outcomes(self, seconds: float) -> list[tuple[Key, TurnOutcome]]:
        """The outcomes that are there; waits for one, at most so long."""
        ...


class Feedback:
    """Tells wrong answers that they are, by the scores that the run rewards with."""

    def __init__(self, rewards: RewardManager, text: str) -> None:
        """`text` is `turns.feedback`."""
        self._rewards = rewards
        self._text = text

    def ask(self, prompt: Prompt, completion: Completion, key: Key, turns: list[str]) -> None:
        self._rewards.submit(prompt, completion, key)

    def outcomes(self, seconds: float) -> list[tuple[Key, TurnOutcome]]:
        if seconds:
            self._rewards.await_any(seconds)
        return [(key, self._outcome(score)) for key, (score,) in self._rewards.take_finished()]

    def _outcome(self, score: Score) -> TurnOutcome:
        """What follows a judged answer; one that could not be judged is not called wrong."""
        if score.correct or score.failures or score.verdict in FAILURES:
            return TurnOutcome(score=score)
        text = verdict_text(score) if self._text == VERDICT else self._text
        return TurnOutcome(text, score=score)


def verdict_text(score: Score) -> str:
    """A sentence that says how a wrong answer was judged.

    >>> verdict_text(Score(-1.0, False, "41", "number"))
    'The answer 41 is not right. Try again.'
    """
    if score.extracted:
        return WRONG_ANSWER.format(score.extracted)
    return WRONG if score.verdict == "function" else NO_ANSWER


@dataclass(frozen=True)
class _EnvironmentCall:
    arguments: tuple[list[str], dict, int]
    attempt: int
    future: Future[HookResult]


class Environment:
    """Calls the user's function for every finished turn."""

    def __init__(self, pool: WorkerPool) -> None:
        """The workers of `pool` have the function."""
        self._pool = pool
        self._calls: dict[Key, _EnvironmentCall] = {}

    def ask(self, prompt: Prompt, completion: Completion, key: Key, turns: list[str]) -> None:
        texts = [turns[0]]
        for call, turn in zip(completion.calls, turns[1:], strict=True):
            texts += [call.output, turn]
        self._call(key, (texts, prompt.row, len(turns)), attempt=1)

    def _call(self, key: Key, arguments: tuple[list[str], dict, int], attempt: int) -> None:
        self._calls[key] = _EnvironmentCall(arguments, attempt, self._pool.call_hook(arguments))

    def outcomes(self, seconds: float) -> list[tuple[Key, TurnOutcome]]:
        if seconds:
            wait_for([call.future for call in self._calls.values()], seconds, FIRST_COMPLETED)
        done = {key: call for key, call in self._calls.items() if call.future.done()}
        outcomes = []
        for key, call in done.items():
            del self._calls[key]
            result = call.future.result()
            if result.failure is None:
                text, figures = result.value
                pairs = tuple((name, value) for name, value in figures)
                outcomes.append((key, TurnOutcome(text, figures=pairs)))
            elif call.attempt < ATTEMPTS:
                self._call(key, call.arguments, attempt=call.attempt + 1)
            else:
                outcomes.append((key, TurnOutcome(failure=result.message or result.failure)))
        return outcomes


@dataclass(frozen=True)
class _Reply:
    """What all ranks of an engine put behind a turn."""

    call: ToolCall | None = None
    """None: the completion is over."""
    token_ids: Sequence[int] = ()
    figures: tuple[tuple[str, float], ...] = ()


SharedReplies = list[tuple[Key, _Reply]]


@dataclass(frozen=True)
class _Waiting:
    request: Request
    since: float
    """When its turn was finished (seconds of the monotonic clock)."""


class FinishedTurns:
    """The completions of a rollout that wait for what follows their turn.

    All ranks of the engine call every method alike."""

    unanswered_reason: FinishReason = "stop"
    """How a completion ends whose turn cannot be answered: it is a finished answer."""

    def __init__(
        self,
        settings: TurnsConfig,
        stop_token_ids: Sequence[int],
        *,
        answers: TurnAnswers | None,
        tokens: FeedbackTokens | None,
        prompt_of: Callable[[Key], Prompt],
        share: Callable[[SharedReplies], SharedReplies] | None = None,
        asks_always: bool = False,
    ) -> None:
        """The leader has `answers` and `tokens`; engines of several ranks need `share`.

        `asks_always`: also of a turn that nothing can follow, as the completion has no answer or
        token left."""
        self._settings = settings
        self._ends = frozenset(stop_token_ids)
        self._answers = answers
        self._tokens = tokens
        self._prompt_of = prompt_of
        self._share = share
        self._asks_always = asks_always
        self.scores: dict[Key, Score] = {}
        """Scores of the answers that ended their completions, where they were judged; the
        leader's."""
        self._waiting: dict[Key, _Waiting] = {}
        self._steps = itertools.count()

    def __len__(self) -> int:
        """Completions that wait."""
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """The requests that wait, with what is sampled up to the end of their turn."""
        return [waiting.request for waiting in self._waiting.values()]

    def set_aside(self) -> AbstractContextManager[None]:
        """Nothing: other completions of the engine have turns of their own."""
        return nullcontext()

    def unanswered(self, so_far: PartialCompletion) -> FoundCalls | None:
        """The turn that the last token ends, as in a checkpoint that was made while it waited."""
        if not so_far.segments or not so_far.segments[-1].sampled:
            return None
        return self.find(NOTHING_SAMPLED, so_far.token_ids, new_tokens=1)

    def find(
        self, so_far: PartialCompletion, token_ids: Sequence[int], new_tokens: int
    ) -> FoundCalls | None:
        """The end of a turn, None where the last of these tokens is none.

        They are sampled behind `so_far`."""
        if not token_ids or token_ids[-1] not in self._ends:
            return None
        return FoundCalls(len(token_ids), ())

    def submit(self, request: Request, calls: Sequence[object] = ()) -> bool:
        """Ask what follows the turn, whose end is the last token of `request.so_far`.

        False where nothing can."""
        if not (self._asks_always or self._goes_on(request)):
            return False
        self._waiting[request.key] = _Waiting(request, time.monotonic())
        if self._answers is not None:
            so_far = request.so_far
            text = self.text_of(so_far, stopped=True)
            completion = so_far.finished(request.key[1], text, "stop")
            runs = segment_runs(so_far)
            turns = [self._turn_text(token_ids) for is_sampled, token_ids in runs if is_sampled]
            self._answers.ask(self._prompt_of(request.key), completion, request.key, turns=turns)
        return True

    def _goes_on(self, request: Request) -> bool:
        """Whether the completion has an answer and a token left."""
        so_far = request.so_far
        has_answers = len(so_far.calls) + 1 < self._settings.max
        return has_answers and so_far.n_sampled < request.max_new_tokens

    def answered(self, is_idle: bool) -> list[Answered]:
        """The completions of which it is known what follows.

        Engines of several ranks share it every SHARE_STEPS times that this is called. Where the
        engine `is_idle`, it waits every time."""
        is_due = self._share is None or next(self._steps) % SHARE_STEPS == 0
        if not self._waiting or not (is_idle or is_due):
            return []
        replies: SharedReplies = []
        if self._answers is not None:
            outcomes = self._answers.outcomes(WAIT_SECONDS if is_idle else 0.0)
            replies = [(key, self._reply(key, outcome)) for key, outcome in outcomes]
        if self._share is not None:
            replies = self._share(replies)
        return [self._answer(key, reply) for key, reply in replies]

    def _reply(self, key: Key, outcome: TurnOutcome) -> _Reply:
        """What follows a turn, as tokens; by the leader."""
        assert self._tokens is not None
        waiting = self._waiting[key]
        so_far = waiting.request.so_far
        seconds = time.monotonic() - waiting.since
        text = self.text_of(so_far, stopped=True)
        if outcome.failure is not None:
            call = ToolCall("", outcome.failure, "lost", position=len(text), seconds=seconds)
            return _Reply(call)
        prompt = self._prompt_of(key).text
        can_go_on = outcome.text is not None and self._goes_on(waiting.request)
        last_token = so_far.token_ids[-1]
        if can_go_on and not self._tokens.goes_on(prompt, last_token):
            _warn_of_end(str(self._tokens.plain.tokenizer.convert_ids_to_tokens(last_token)))
            can_go_on = False
        if outcome.text is None or not can_go_on:
            if outcome.score is not None:
                self.scores[key] = outcome.score
            return _Reply(figures=outcome.figures)
        output = self._tokens.behind(prompt, outcome.text)
        call = ToolCall(
            "",
            output.texts[0],
            FEEDBACK,
            position=len(text + line_end(text)),
            seconds=seconds,
            is_cut=output.are_cut[0],
            ends_turn=self._tokens.is_chat(prompt),
        )
        return _Reply(call, output.token_ids, figures=outcome.figures)

    def _answer(self, key: Key, reply: _Reply) -> Answered:
        request = self._waiting.pop(key).request
        figures = (*request.so_far.figures, *reply.figures)
        so_far = replace(request.so_far, figures=figures)
        is_lost = reply.call is not None and reply.call.status == "lost"
        if reply.call is not None and is_lost:
            so_far = replace(so_far, calls=(*so_far.calls, reply.call))
        elif reply.call is not None:
            so_far = so_far.answered([reply.call], reply.token_ids)
        is_over = reply.call is None
        return Answered(replace(request, so_far=so_far), is_lost=is_lost, is_over=is_over)

    def release(self, key: Key) -> None:
        """A completion that has ended holds nothing here."""

    def text_of(self, completion: PartialCompletion, stopped: bool) -> str:
        """All that is sampled of a completion, as text, without the ends of turns.

        Feedback begins a line."""
        text = ""
        for is_sampled, token_ids in segment_runs(completion):
            text += self._turn_text(token_ids) if is_sampled else line_end(text)
        return text

    def _turn_text(self, token_ids: Sequence[int]) -> str:
        """The text of a turn without its end, whether or not the completion goes on."""
        assert self._tokens is not None
        is_finished = token_ids[-1] in self._ends
        return completion_text(self._tokens.plain.tokenizer, token_ids, stopped=is_finished)


@cache
def _warn_of_end(token: str) -> None:
    """Warn, once, of answers in a chat behind which nothing can stand."""
    logger.warning(
        "an answer in a chat ends with %r, with which the chat template ends no turn: it is told "
        "nothing, and so is every other that does",
        visible(token),
    )
