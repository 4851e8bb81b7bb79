"""Messages between the trainers and the engines of an asynchronous run.

    trainers -> Continue, Admit, NewWeights, TakeSnapshot, CollectGroups, ScoreTokens, End -> engines
    engines  -> GroupDone, WeightsTaken, Snapshot, Rollout, Scored                         -> trainers

`collector` has CollectGroups and Rollout, which synchronous runs know, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.algorithms.partial_rollouts import UnfinishedGroup
from rlmath.algorithms.types import PartialCompletion, ScoredCompletion
from rlmath.rollout.collector import CollectGroups, Rollout

RECEIVER = 0
"""Rank of the run that the engines report to."""


# ---------------------------------------------------------------- messages of the trainers


@dataclass(frozen=True)
class Admit:
    """Draws that may begin."""

    first: int
    """The first draw of this start that no engine has begun."""
    draws: int
    """Every draw below this number may begin."""
    length_stage: int
    """The length stage whose lengths they have."""


@dataclass(frozen=True)
class Continue:
    """Groups that an earlier start left in flight, which this engine goes on with.

    Sent before the first `Admit`."""

    groups: list[UnfinishedGroup]
    length_stage: int


@dataclass(frozen=True)
class NewWeights:
    """A version is offered."""

    version: int
    """Optimizer steps."""
    step: int
    """The step, counted from 0, that would sample with them in a synchronous run."""
    learned_at: float
    """Time at which the step that made them was done, by rank 0's monotonic clock (seconds)."""


@dataclass(frozen=True)
class TakeSnapshot:
    """Report what is in flight."""


@dataclass(frozen=True)
class ScoreTokens:
    """Give the log-probs of these tokens."""

    sequences: Sequence[Sequence[int]]


@dataclass(frozen=True)
class End:
    """The run ends with this exit status."""

    status: int


TrainerMessage = Admit | Continue | NewWeights | TakeSnapshot | CollectGroups | ScoreTokens | End
"""What an engine is sent."""


# ---------------------------------------------------------------- messages of the engines


@dataclass(frozen=True)
class GroupDone:
    """A group is sampled and scored."""

    draw: int
    samples: tuple[ScoredCompletion, ...]


@dataclass(frozen=True)
class WeightsTaken:
    """An engine has sampled its first token with new weights; its figures since its last report."""

    version: int
    learned_at: float
    """The one of `NewWeights`."""
    transfer_seconds: float
    seconds: float
    """Time since it took the weights of its last report."""
    busy_seconds: float
    """The part of `seconds` that it spent in steps of vLLM."""
    waiting_seconds: float
    """The part of `seconds` in which all its completions waited for tools."""
    new_tokens: int
    interrupted: int
    """Completions that were begun and not finished when it took the version."""
    prefilled_again_tokens: int
    """Tokens of those of them whose KV cache is computed again."""
    running: float
    """Completions that it decoded, mean over its steps."""
    queued_scores: int
    """Completions that wait for their score."""


@dataclass(frozen=True)
class Snapshot:
    """What is in flight in an engine, by draw."""

    samples: dict[int, tuple[PartialCompletion | ScoredCompletion, ...]]


@dataclass(frozen=True)
class Scored:
    """What `ScoreTokens` asked for."""

    engine: int
    logprobs: list[list[float]]


EngineMessage = GroupDone | WeightsTaken | Snapshot | Rollout | Scored
"""What an engine sends."""
