"""The groups of an engine that are not yet sampled and scored.

add -> its completions end one by one -> score -> finish_scored: `on_done`, when all have a score
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlmath.algorithms.types import Completion, PartialCompletion, Prompt, ScoredCompletion
from rlmath.config.schema import RewardConfig
from rlmath.rewards.reward_manager import UNSCORED, RewardManager, RewardWorkers
from rlmath.rollout.engine_messages import GroupDone
from rlmath.rollout.sampling import Key, Request


@dataclass
class _Group:
    prompt: Prompt
    samples: list[PartialCompletion | Completion | ScoredCompletion]
    """The samples by their index.

    An unfinished one has the tokens that it had when it began or at the last snapshot; a finished
    one waits for its score."""


class GroupsInFlight:
    """Groups by draw, in the order in which they began, and the scoring of their completions.

    Only an engine's leader has them."""

    def __init__(
        self,
        workers: RewardWorkers,
        reward: RewardConfig,
        on_done: Callable[[GroupDone], None],
        discount: float = 1.0,
    ) -> None:
        """`discount` is that of retries (`RewardManager`)."""
        self._discount = discount
        self._workers = workers
        self._reward = reward
        self._on_done = on_done
        self._groups: dict[int, _Group] = {}
        self._rewards: RewardManager | None = None
        self._max_new_tokens = 0

    def __iter__(self) -> Iterator[int]:
        """Their draws."""
        return iter(self._groups)

    def prompt_of(self, key: Key) -> Prompt:
        """The prompt of a completion."""
        draw, _ = key
        return self._groups[draw].prompt

    @property
    def queued_scores(self) -> int:
        """Completions that wait for their score."""
        return 0 if self._rewards is None else len(self._rewards)

    def expect_lengths(self, max_new_tokens: int) -> None:
        """Score as completions of at most so many tokens from now on; before the first `add`."""
        if max_new_tokens != self._max_new_tokens:
            self.finish_scored(wait=True)
            self._rewards = RewardManager(
                self._workers, self._reward, max_new_tokens, discount=self._discount
            )
            self._max_new_tokens = max_new_tokens

    def add(
        self, draw: int, prompt: Prompt, samples: Sequence[PartialCompletion | ScoredCompletion]
    ) -> None:
        """Add a group, of which some samples may be finished."""
        self._groups[draw] = _Group(prompt, list(samples))

    def score(self, request: Request, completion: Completion) -> None:
        """Have a completion scored; functions that take groups wait until all of it is sampled.

        They are not given what is lost."""
        assert self._rewards is not None
        draw, g = request.key
        group = self._groups[draw]
        if not self._rewards.takes_groups:
            group.samples[g] = completion
            self._rewards.submit(group.prompt, completion, key=(draw, [g]))
            return
        group.samples[g] = ScoredCompletion(completion, UNSCORED)
        samples = [sample for sample in group.samples if isinstance(sample, ScoredCompletion)]
        if len(samples) < len(group.samples):
            return
        judged = {
            index: sample.completion
            for index, sample in enumerate(samples)
            if not sample.completion.is_lost
        }
        if judged:
            self._rewards.submit_group(
                group.prompt, list(judged.values()), key=(draw, list(judged))
            )
        else:
            self._finish(draw)

    def finish_scored(self, wait: bool = False) -> None:
        """Record the scores that have come, and report the groups that have all of theirs."""
        if self._rewards is None or not len(self._rewards):
            return
        for (draw, indices), scores in self._rewards.take_finished(wait):
            group = self._groups[draw]
            for g, score in zip(indices, scores, strict=True):
                sample = group.samples[g]
                assert not isinstance(sample, PartialCompletion)
                completion = sample.completion if isinstance(sample, ScoredCompletion) else sample
                group.samples[g] = ScoredCompletion(completion, score)
            if all(isinstance(sample, ScoredCompletion) for sample in group.samples):
                self._finish(draw)

    def _finish(self, draw: int) -> None:
        """Report a group of which nothing is to be scored any more."""
        samples = tuple(self._groups.pop(draw).samples)
        self._on_done(GroupDone(draw, samples))  # type: ignore[arg-type]

    def snapshot(
        self, requests: Sequence[Request]
    ) -> dict[int, tuple[PartialCompletion | ScoredCompletion, ...]]:
        """The samples by draw, those of `requests` with the tokens that they have so far.

        It waits for the scores of those that are finished."""
        for request in requests:
            draw, g = request.key
            self._groups[draw].samples[g] = request.so_far
        self.finish_scored(wait=True)
        return {  # type: ignore[return-value]
            draw: tuple(group.samples) for draw, group in self._groups.items()
        }
