"""The records that flow through a step, in the order in which they are made.

    Prompt -> (PartialCompletion ->) Completion -> ScoredGroup -> Sample -> MicroBatch

All are frozen, plain Python data, cheap to gather to every rank, but `MicroBatch`, which has
tensors and is in `rlmath.data.packing`.
"""

from __future__ import annotations

import itertools
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "lost"]
FEEDBACK = "feedback"
"""Status of what an answer was told: `ToolCall.status`."""
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce++", "lite_ppo", "opo", "maxrl", "pass@k")
"""Words of `algorithm.advantage` that compare the completions of a group."""


@dataclass(frozen=True)
class Prompt:
    """One problem as the model reads it.

    >>> Prompt("q-17", "47+85=", (11, 14, 3), ("\\\\boxed{132}",), "math").prompt_id
    'q-17'
    """

    prompt_id: str
    """Unique in the data set (`query_id` of the file); part of every request's seed."""
    text: str
    """The prompt after templating, exactly as it was tokenized."""
    token_ids: tuple[int, ...]
    solutions: tuple[str, ...]
    """Reference answers; a completion that equals any of them is right."""
    task: str
    more_json: str = "{}"
    """The row's further columns, a JSON object; a reward function of the user's may want them."""
    problem_key: int = field(default=0, compare=False)
    """Key of the problem, whatever the prompt's file, name and template; 0: not known."""
    question: str = field(default="", compare=False, repr=False)
    """The problem as the data file has it, without template.

    Its words may stand beside an answer's value."""

    @property
    def row(self) -> dict:
        """The row of the data file, as a reward function sees it."""
        columns = {
            "prompt": self.text,
            "task": self.task,
            "query_id": self.prompt_id,
            "solutions": list(self.solutions),
        }
        return {"question": self.question} | json.loads(self.more_json) | columns


@dataclass(frozen=True)
class Segment:
    """Tokens in a row that the same weights sampled, or that others wrote between two turns."""

    tokens: int
    policy_version: int
    """Version of the weights: their number of optimizer steps."""
    step: int
    """The step (from 0) that sampled them; at its beginning the engines got these weights."""
    sampled: bool = True
    """Whether the model sampled them; others wrote them if not, while engines had these weights."""


def unsampled_tokens(segments: Sequence[Segment]) -> int:
    return sum(segment.tokens for segment in segments if not segment.sampled)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in a completion, which was executed while the completion waited.

    Feedback to an answer, or what an environment says to a turn, is one without code."""

    code: str
    output: str
    """What the model was shown; of a call that was lost the reason, which it was not shown."""
    status: str
    """One of `rlmath.sandbox.calls.STATUSES`, or FEEDBACK."""
    position: int
    """Characters of the completion's text in front of the output."""
    seconds: float = field(default=0.0, compare=False)
    """How long the completion waited for it."""
    cpu_seconds: float = field(default=0.0, compare=False)
    """CPU time that counts towards the completion's limit."""
    is_cut: bool = False
    """Whether the output was longer than the model was shown."""
    ends_turn: bool = False
    """Whether it ended a turn of a chat, so that it is no part of the answer."""


@dataclass(frozen=True)
class RoutesAt:
    """The place of the experts that an engine has sent tokens of a completion to.

    They are those of one slice: of the tokens that were read first to sample it. Together the
    slices have prompt and completion but the last token, which no pass has read."""

    rank: int
    """The rank that holds them; they are too many for every rank."""
    number: int
    """Their number on that rank."""
    tokens: int
    """Tokens that have experts."""


@dataclass(frozen=True)
class Completion:
    """One sampled answer."""

    sample_index: int
    """Position in its group, 0 <= sample_index < group size."""
    token_ids: Sequence[int]
    """All its tokens, the end-of-sequence token included when there was one.

    From an engine they are an array, 4 bytes each."""
    logprobs: Sequence[float]
    """Log-probability of each token under the distribution it was really sampled from (nats).

    It is any number where the token was not sampled."""
    text: str
    """Decoded from what the model sampled, without special tokens and outputs of tools."""
    finish_reason: FinishReason
    """"length" when it was cut off at `rollout.max_new_tokens` or had no call left; "lost" where
    a tool's machine or the user's environment was at fault and gave no result."""
    policy_version: int
    """Version of the policy's weights that the engine sampled its last token with."""
    segments: tuple[Segment, ...] = ()
    """The weights by which its tokens were sampled, in order.

    From an engine there is at least one segment. Without any, all tokens are sampled."""
    calls: tuple[ToolCall, ...] = ()
    """Its calls of tools, or the feedback to its answers, in order."""
    figures: tuple[tuple[str, float], ...] = ()
    """Numbers by name that the user's environment returned; those of its turns, in order."""
    routes_at: tuple[RoutesAt, ...] = field(default=(), compare=False)
    """The places of its experts, by slice; empty: they were not recorded."""

    @property
    def sampled(self) -> list[bool] | None:
        """Whether the model produced each token; None: all.

        >>> segments = (Segment(1, 4, 1), Segment(1, 4, 1, sampled=False))
        >>> done = Completion(0, (7, 8), (-1.0, 0.0), "", "stop", 4, segments)
        >>> done.sampled, done.n_sampled
        ([True, False], 1)
        """
        if all(segment.sampled for segment in self.segments):
            return None
        return [segment.sampled for segment in self.segments for _ in range(segment.tokens)]

    @property
    def is_lost(self) -> bool:
        """Whether a tool's machine or the user's environment was at fault.

        It says nothing of the model then."""
        return self.finish_reason == "lost"

    @property
    def turns(self) -> list[str]:
        """The sampled text in front of the first output, between outputs and behind the last."""
        positions = [0, *(call.position for call in self.calls), len(self.text)]
        return [self.text[start:end] for start, end in itertools.pairwise(positions)]

    @property
    def retries(self) -> int:
        """Answers before the last one, to which there was feedback."""
        return sum(call.status == FEEDBACK for call in self.calls)

    @property
    def answer_text(self) -> str:
        """The text that is judged: all that was sampled.

        Of a chat with calls, and behind feedback, it is the last turn."""
        ends_turn = bool(self.calls) and self.calls[-1].ends_turn
        return self.turns[-1] if ends_turn or self.retries else self.text

    @property
    def earlier_text(self) -> str:
        """What was sampled in front of `answer_text`, where no turn of a chat is between them."""
        if not self.calls or self.calls[-1].ends_turn:
            return ""
        return self.text[: len(self.text) - len(self.answer_text)]

    @property
    def last_answer(self) -> str:
        """The text that the user's functions judge: all that was sampled behind feedback."""
        return self.turns[-1] if self.retries else self.text

    @property
    def n_sampled(self) -> int:
        """Tokens that the model produced: its length, wherever one is counted."""
        return len(self.token_ids) - unsampled_tokens(self.segments)

    def lag(self, version: int) -> list[int]:
        """How many optimizer steps each token's weights are behind `version`.

        It is 0 where they are newer, as in a replay from an earlier checkpoint.

        >>> done = Completion(0, (7, 8), (-1.0, -1.0), "", "stop", 4, (Segment(1, 2, 0), Segment(1, 4, 1)))
        >>> done.lag(5), done.lag(3)
        ([3, 1], [1, 0])
        """
        return [
            max(0, version - segment.policy_version)
            for segment in self.segments
            for _ in range(segment.tokens)
        ]


@dataclass(frozen=True)
class PartialCompletion:
    """What is sampled so far of a completion that a step did not finish."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """Log-probability of each token, as in `Completion` (nats)."""
    segments: tuple[Segment, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    """`Completion.calls`."""
    figures: tuple[tuple[str, float], ...] = ()
    """`Completion.figures`."""
    routes_at: tuple[RoutesAt, ...] = field(default=(), compare=False)
    """`Completion.routes_at`."""

    @property
    def n_sampled(self) -> int:
        """Tokens that the model produced."""
        return len(self.token_ids) - unsampled_tokens(self.segments)

    def extended(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_version: int,
        step: int,
        sampled: bool = True,
    ) -> PartialCompletion:
        """The completion with more tokens behind, sampled by weights of this version.

        Others wrote them where they are not `sampled`, while engines had these weights.

        >>> once = PartialCompletion().extended((7, 8), (-0.5, -0.5), policy_version=4, step=2)
        >>> once.extended((9,), (-0.1,), policy_version=4, step=2).segments
        (Segment(tokens=3, policy_version=4, step=2, sampled=True),)
        """
        segment = Segment(len(token_ids), policy_version, step, sampled=sampled)
        before = self.segments
        if before and replace(before[-1], tokens=0) == replace(segment, tokens=0):
            segment = replace(segment, tokens=before[-1].tokens + segment.tokens)
            before = before[:-1]
        if not self.token_ids:
            return PartialCompletion(token_ids, logprobs, (segment,), calls=self.calls)
        return PartialCompletion(
            array("i", self.token_ids) + array("i", token_ids),
            array("f", self.logprobs) + array("f", logprobs),
            (*before, segment),
            calls=self.calls,
            figures=self.figures,
            routes_at=self.routes_at,
        )

    def answered(self, calls: Sequence[ToolCall], token_ids: Sequence[int]) -> PartialCompletion:
        """The completion with outputs of a turn's calls, which `token_ids` show to the model."""
        latest = self.segments[-1]
        longer = self.extended(
            token_ids,
            (0.0,) * len(token_ids),
            latest.policy_version,
            step=latest.step,
            sampled=False,
        )
        return replace(longer, calls=(*self.calls, *calls))

    def finished(self, sample_index: int, text: str, finish_reason: FinishReason) -> Completion:
        """The whole completion."""
        return Completion(
            sample_index=sample_index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            text=text,
            finish_reason=finish_reason,
            policy_version=self.segments[-1].policy_version,
            segments=self.segments,
            calls=self.calls,
            figures=self.figures,
            routes_at=self.routes_at,
        )


NOTHING_SAMPLED = PartialCompletion()


def turn_tokens(completion: PartialCompletion | Completion) -> int:
    """Tokens that the model sampled behind all that others wrote into the completion.

    >>> once = PartialCompletion().extended((7, 8), (-0.5, -0.5), policy_version=4, step=2)
    >>> turn_tokens(once), turn_tokens(once.answered([ToolCall("1", "1", "ok", position=3)], [9]))
    (2, 0)
    """
    tokens = len(completion.token_ids)
    for segment in reversed(completion.segments):
        if not segment.sampled:
            return len(completion.token_ids) - tokens
        tokens -= segment.tokens
    return len(completion.token_ids)


@dataclass(frozen=True)
class RewardFailure:
    """Why one of several rewards failed."""

    name: str
    kind: str
    """"timeout" or "error"."""
    message: str
    """The error message of a function of the user's, with the last lines of its traceback."""


@dataclass(frozen=True)
class Score:
    """The judgement of one completion."""

    reward: float
    correct: bool
    extracted: str
    """The answer that was compared, "" when none was found."""
    verdict: str
    """How it was decided.

    "string", "number", "choice", "symbolic", "no_answer", "too_long", "timeout" or "error";
    "function" where the user's function gave the reward."""
    boxed: bool = False
    """Whether the final part of the completion has a complete box."""
    metrics: tuple[tuple[str, float], ...] = ()
    """Further numbers of the user's reward function."""
    queue_seconds: float = field(default=0.0, compare=False)
    """How long the completion waited for a reward worker."""
    parts: tuple[float | None, ...] = ()
    """Value of each of `reward.rewards`, in that order; None where it failed."""
    failures: tuple[RewardFailure, ...] = ()
    """Failures of the rewards that failed."""
    verified_correct: bool | None = field(default=None, compare=False)
    """What the verifier says of the answer, also where it is no part of the reward.

    None where it is not asked. What counts as `correct` in selection and curriculum may be said by
    a function of the user's."""


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion with its score."""

    completion: Completion
    score: Score


@dataclass(frozen=True)
class ScoredGroup:
    """A prompt with its G completions and their scores, in the order of `sample_index`."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]

    @property
    def rewards(self) -> list[float]:
        return [score.reward for score in self.scores]

    @property
    def judged(self) -> ScoredGroup:
        """The group without completions that are lost."""
        pairs = zip(self.completions, self.scores, strict=True)
        judged = [pair for pair in pairs if not pair[0].is_lost]
        completions = tuple(completion for completion, _ in judged)
        return ScoredGroup(self.prompt, completions, tuple(score for _, score in judged))

    def with_scores(self, scores: Sequence[Score]) -> ScoredGroup:
        """The group with these scores of its `judged` completions; lost ones keep theirs."""
        judged_scores = iter(scores)
        pairs = zip(self.completions, self.scores, strict=True)
        all_scores = [
            score if completion.is_lost else next(judged_scores) for completion, score in pairs
        ]
        return ScoredGroup(self.prompt, self.completions, tuple(all_scores))


def scored_group(
    prompt: Prompt, samples: Sequence[PartialCompletion | ScoredCompletion]
) -> ScoredGroup:
    """The group of samples that are all finished."""
    done = [sample for sample in samples if isinstance(sample, ScoredCompletion)]
    assert len(done) == len(samples), f"a completion of {prompt.prompt_id} is not finished"
    return ScoredGroup(
        prompt, tuple(sample.completion for sample in done), tuple(sample.score for sample in done)
    )


@dataclass(frozen=True)
class Sample:
    """One sequence to train on: prompt and completion, with what the loss needs."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    behaviour_logprobs: Sequence[float]
    """Log-prob of each completion token (nats)."""
    advantage: float
    """Shared by all tokens of the completion."""
    sampled: Sequence[bool] | None = None
    """Whether the model produced each token of the completion; None: all.

    In supervised training, whether it is to produce it. What others wrote between two of the
    model's turns is not sampled."""
    learned: Sequence[bool] | None = None
    """Whether each sampled token of the completion has weight in the gradient; None: all have.

    A filter of turns or tokens says False, which changes no count and no mean."""
    lag: Sequence[int] | None = None
    """How many optimizer steps each completion token's weights are behind the step's first ones.

    None: not asked for."""
    routes_at: tuple[RoutesAt, ...] = ()
    """`Completion.routes_at`."""

    @property
    def length(self) -> int:
        """Tokens in all, prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)
