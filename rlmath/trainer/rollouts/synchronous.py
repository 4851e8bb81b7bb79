"""The samples of a step, and the groups that it learns from, by `rollout.tail`.

- "wait" (`WholeRollouts`): the step's own prompts, every completion to its end.
- "carry" (`PartialRollouts`): rounds of a slice of every completion in flight, until enough groups
  are complete; the others are carried into the next step.
- "defer" (`PartialRollouts`): groups with completions longer than a slice are sampled anew in steps
  of their own.

The rules of the last two are in `algorithms/partial_rollouts.py`. Every rank computes the same,
from what is gathered.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlmath.algorithms.dynamic_sampling import Chosen, Selection, SelectionRules, choose, select
from rlmath.algorithms.partial_rollouts import (
    Leaving,
    UnfinishedGroup,
    UnfinishedGroups,
    advance_carry,
    advance_defer,
    too_old,
)
from rlmath.algorithms.types import (
    FEEDBACK,
    Completion,
    PartialCompletion,
    RoutesAt,
    Score,
    ScoredCompletion,
    ScoredGroup,
    unsampled_tokens,
)
from rlmath.checkpoint.hf.run_shapes import RunShapes
from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished, write_unfinished
from rlmath.config.length_curriculum import (
    LengthStage,
    length_stage_at,
    unfinished_problem,
    unsampled_limit,
)
from rlmath.config.schema import Config, RolloutConfig
from rlmath.data.dataset import Inputs
from rlmath.data.prompt_curriculum import HISTORY, PromptCurriculum, rules_of
from rlmath.data.routes import places_of
from rlmath.data.tokenizer import completion_text
from rlmath.rewards.several_rewards import compared_rewards, takes_groups
from rlmath.rollout.collector import CollectGroups, Collector, Work
from rlmath.rollout.sampling import (
    Key,
    RolloutSeed,
    SamplingSettings,
    requests_of,
    training_sampling,
)
from rlmath.rollout.unfinished_rules import slice_tokens, unfinished_rules
from rlmath.rollout.work_queue import EngineUsage
from rlmath.trainer.void_turns import void_rule_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRollout:
    """What a step has to learn from."""

    selection: Selection
    rounds: list[list[EngineUsage]]
    """What every engine did, for each rollout of the step."""
    scores: list[Score]
    """Scores of all that was sampled and leaves, without lost completions."""
    sampled_tokens: int
    """New tokens of the step: those of `selection` if every completion is sampled to its end."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of what is in flight."""


Keep = Callable[[Sequence[ScoredGroup]], list[bool]]
"""Says which groups are learned from, by a function of the user's; a collective."""


def selection_rules(config: Config, keep: Keep | None = None) -> SelectionRules:
    """The rules by which groups and completions are learned from.

    `keep` is the function of selection.dynamic_sampling, if any."""
    settings = config.selection
    reward = config.reward
    word = settings.dynamic_sampling
    return SelectionRules(
        word if word in (None, "accuracy", "reward") else "function",
        settings.min_completion_tokens,
        max_tokens=settings.max_completion_tokens,
        drop_truncated=settings.drop_truncated,
        parts=compared_rewards(reward) if settings.dynamic_sampling == "reward" else (),
        is_void=void_rule_of(config, "drop"),
        keep=keep,
        resample_to=settings.resample_to,
        seed=0 if settings.resample_to is None else config.run.seed,
    )


class StepRollouts(ABC):
    """A way to sample, and its state between steps."""

    next_draw: int
    """Draws of the run so far."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        engines: Any,
        shapes: RunShapes,
        keep: Keep | None = None,
    ) -> None:
        """`engines` is a `Collector`, or an `EngineConnection`."""
        self._config = config
        self._inputs = inputs
        self._total_steps = inputs.total_steps
        self._engines = engines
        self._shapes = shapes
        self._rules = selection_rules(config, keep)
        ids = [prompt.prompt_id for prompt in inputs.prompts]
        self.curriculum = PromptCurriculum(
            inputs.order, ids, rules_of(config.data), history=inputs.history
        )
        """Draws the prompts, and counts how often they are solved."""
        self._sampled: list[ScoredGroup] = []
        """The groups that the last step took."""

    @abstractmethod
    def step(self, number: int, stage: LengthStage) -> StepRollout:
        """Sample for step `number`, counted from 0, of a length stage.

        A collective."""

    def commit(self) -> dict[str, float]:
        """Make what the last step left the state; returns the metrics of the prompts' history.

        What the step sampled is counted in that history. A step that fails before leaves the state
        as it was."""
        return self.curriculum.commit(self._sampled)

    @property
    def parts_in_flight(self) -> list[PartialCompletion | Completion]:
        """The completions that later steps learn from."""
        return []

    def files(self) -> dict[str, bytes]:
        """What a checkpoint keeps of the state, by file name."""
        return {HISTORY: self.curriculum.file()}

    def rank_files(self) -> dict[str, bytes]:
        """What a checkpoint keeps of what this rank alone has, by file name."""
        return {}

    def resume(self, folder: Path, steps_done: int, reward_changed: bool) -> None:
        """Continue from a checkpoint; older ones have no history, and begin without.

        `reward_changed`: the reward function is another one since. ValueError where the
        checkpoint's file is damaged."""
        try:
            content = (folder / HISTORY).read_bytes()
        except FileNotFoundError as error:
            if self.curriculum.draws_by_rates:
                raise ValueError(
                    f"{folder}: there is no {HISTORY}, which data.curriculum needs"
                ) from error
            self.curriculum.forget()
            return
        except OSError as error:
            raise ValueError(f"{folder / HISTORY} cannot be read ({error.strerror})") from error
        try:
            self.curriculum.resume(content)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error


class WholeRollouts(StepRollouts):
    """Every completion is sampled to its end in the step that began it."""

    _engines: Collector
    next_draw = 0

    def step(self, number: int, stage: LengthStage) -> StepRollout:
        """Sample the step's own prompts, and then those that dynamic sampling asks for."""
        order = self._inputs.order
        sampling = training_sampling(stage.config.rollout)
        seed = RolloutSeed(order.seed_at(number), number)
        prompt_indices = self.curriculum.begin(number).batch(number)
        indices = chain(prompt_indices, self.curriculum.extra(number))
        rounds: list[list[EngineUsage]] = []

        def sample(count: int) -> list[ScoredGroup]:
            """The groups of the next `count` prompts, fewer where there are no more."""
            prompts = [self._inputs.prompts[index] for index in islice(indices, count)]
            if not prompts:
                return []
            title = f"step {number + 1}/{self._total_steps}"
            rollout = self._engines.collect(CollectGroups(prompts, sampling, seed, title=title))
            rounds.append(rollout.engines)
            return rollout.groups

        selection = select(
            sample, len(prompt_indices), self._config.selection.max_extra_prompts, rules=self._rules
        )
        tokens = sum(
            completion.n_sampled for group in selection.sampled for completion in group.completions
        )
        scores = [score for group in selection.sampled for score in group.judged.scores]
        self._sampled = selection.sampled
        self.next_draw = (number + 1) * order.prompts_per_step
        return StepRollout(selection, rounds, scores, sampled_tokens=tokens)

    def resume(self, folder: Path, steps_done: int, reward_changed: bool) -> None:
        super().resume(folder, steps_done, reward_changed)
        self.next_draw = steps_done * self._inputs.order.prompts_per_step
        if (folder / HISTORY).exists():
            self.curriculum.require_draws(self.next_draw, ())


@dataclass
class Rounds:
    """What the rounds of a step did."""

    usages: list[list[EngineUsage]] = field(default_factory=list)
    """What every engine did, for each round."""
    new_tokens: int = 0
    prefilled_again: int = 0
    """Tokens of completions that were prefilled again between rounds, those of tools included."""


class RolloutsWithUnfinished(StepRollouts):
    """The state of ways to sample that leave groups in flight between steps."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        engines: Any,
        shapes: RunShapes,
        keep: Keep | None = None,
    ) -> None:
        super().__init__(config, inputs, engines, shapes=shapes, keep=keep)
        self._limits = unfinished_rules(config)
        self._unfinished = self._after = UnfinishedGroups()
        """The state, and what the last step left."""
        self._choices: dict[int, Chosen] = {}
        """Choice from each complete group in flight, by its draw."""

    @property
    def next_draw(self) -> int:  # type: ignore[override]
        return self._unfinished.next_draw

    def commit(self) -> dict[str, float]:
        self._unfinished = self._after
        complete = {group.draw for group in self._unfinished.groups if group.is_complete}
        self._choices = {draw: chosen for draw, chosen in self._choices.items() if draw in complete}
        return self.curriculum.commit(
            self._sampled, {group.draw for group in self._unfinished.groups}
        )

    @property
    def parts_in_flight(self) -> list[PartialCompletion | Completion]:
        return [part for group in self._unfinished.groups for part in group.parts]

    def files(self) -> dict[str, bytes]:
        return super().files() | {UNFINISHED: write_unfinished(self._unfinished)}

    def rank_files(self) -> dict[str, bytes]:
        return self._engines.route_files() if self._replays_engine else {}

    @property
    def _replays_engine(self) -> bool:
        return self._config.policy.routing_replay == "engine"

    def resume(self, folder: Path, steps_done: int, reward_changed: bool) -> None:
        super().resume(folder, steps_done, reward_changed)
        self._choices.clear()
        stages = self._shapes.length_stages
        stage = length_stage_at(stages, steps_done - 1)
        try:
            unfinished = self._read(folder, steps_done, stage.config.rollout)
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder}: the groups in flight cannot be read: {error}") from error
        moved: Mapping[RoutesAt, RoutesAt] = {}
        if self._replays_engine:
            unfinished.groups = [routed(group, steps_done) for group in unfinished.groups]
            places = places_of(part for group in unfinished.groups for part in group.parts)
            try:
                moved = self._engines.load_routes(folder, places, self._shapes.policy)
            except ValueError as error:
                raise ValueError(f"{folder}: routes cannot be read: {error}") from error
        unfinished.groups = [with_places(group, moved) for group in unfinished.groups]
        if reward_changed:
            unfinished.groups = [unscored(group, steps_done) for group in unfinished.groups]
        for group in unfinished.groups:
            if not group.is_complete:  # a choice may be of completions that it has lost
                self._choices.pop(group.draw, None)
        groups_to_learn = sum(
            not group.is_complete or self._choose(group).dropped is None
            for group in unfinished.groups
        )
        if problem := unfinished_problem(
            stages,
            self._inputs.order.prompts_per_step,
            steps_done,
            usable_groups=groups_to_learn,
        ):
            raise ValueError(problem)
        self._unfinished = self._after = unfinished

    def _read(self, folder: Path, steps_done: int, rollout: RolloutConfig) -> UnfinishedGroups:
        """The groups in flight of a checkpoint that this run can continue."""
        tokenizer = self._inputs.tokenizer
        unfinished = read_unfinished(
            (folder / UNFINISHED).read_bytes(),
            rollout.group_size,
            self._shapes.policy.vocab_size,
            text_of=lambda token_ids, stopped: completion_text(tokenizer, token_ids, stopped),
        )
        self.curriculum.require_draws(
            unfinished.next_draw, [group.draw for group in unfinished.groups]
        )
        most_unsampled = unsampled_limit(self._config)
        # Engines on ranks of their own may have begun to sample with the weights of the checkpoint
        # already.
        latest = steps_done if rollout.ranks > 0 else steps_done - 1
        for group in unfinished.groups:
            steps = [
                group.first_step,
                *(segment.step for part in group.parts for segment in part.segments),
            ]
            if min(steps) < group.first_step or max(steps) > latest:
                raise ValueError(
                    f"draw {group.draw} was sampled in steps {sorted(set(steps))} of {steps_done}"
                )
            if any(group.parts[g].n_sampled >= rollout.max_new_tokens for g in group.unfinished):
                raise ValueError(
                    f"draw {group.draw} has an unfinished completion of the greatest length"
                )
            if any(unsampled_tokens(part.segments) > most_unsampled for part in group.parts):
                raise ValueError(
                    f"draw {group.draw} has more than {most_unsampled} tokens that were not sampled"
                )
        if rollout.tail != "defer" and too_old(
            unfinished.groups, self._limits, steps_done - 1, choose=self._choose
        ):
            raise ValueError(
                f"groups are older than rollout.max_staleness, {rollout.max_staleness} steps, "
                "allows"
            )
        return unfinished

    def _scored(self, group: UnfinishedGroup) -> ScoredGroup:
        return group.scored(self._inputs.prompts[self.curriculum.drawn(group.draw).prompt])

    def _choose(self, group: UnfinishedGroup) -> Chosen:
        if group.draw not in self._choices:
            self._choices[group.draw] = choose(self._scored(group), self._rules)
        return self._choices[group.draw]

    def _take(self, number: int, leaving_groups: Leaving, left: UnfinishedGroups) -> StepRollout:
        """What step `number` learns from; the groups of `left` stay in flight.

        Its only metric is `rollout/groups_in_flight`."""
        self._sampled = sampled = [self._scored(group) for group in leaving_groups.groups]
        if number + 1 == self._total_steps and left.groups:
            text = (
                "%d groups that were drawn are not learned from: the run has fewer steps than "
                "when it drew them"
            )
            logger.warning(text, len(left.groups))
        return StepRollout(
            Selection(sampled, leaving_groups.chosen, self._limits.groups_per_step),
            rounds=[],
            scores=[score for group in sampled for score in group.judged.scores],
            sampled_tokens=sum(map(tokens_of, leaving_groups.groups)),
            metrics={"rollout/groups_in_flight": float(len(left.groups))},
        )


class PartialRollouts(RolloutsWithUnfinished):
    """Leaves groups in flight that a step does not complete.

    "carry" continues their completions in the next step, with the weights of that step; "defer"
    samples them anew, together with others like them."""

    _engines: Collector

    def step(self, number: int, stage: LengthStage) -> StepRollout:
        """Sample slices in rounds until enough groups are complete and none must wait longer."""
        self.curriculum.begin(number)
        before = self._unfinished
        rounds = Rounds()
        unfinished = self._after = replace(before, groups=list(before.groups))
        leaving_groups = self._advance(unfinished, number, stage, rounds=rounds)
        rollout = self._take(number, leaving_groups, unfinished)
        metrics = rollout.metrics | {"rollout/rounds": float(leaving_groups.rounds)}
        if self._config.rollout.tail == "carry":
            metrics |= carry_metrics(
                unfinished,
                rollout.selection.learned,
                number,
                max_staleness=self._limits.max_staleness,
            )
            metrics["rollout/staleness_waits"] = float(leaving_groups.waits)
            metrics["rollout/prefilled_again_tokens"] = float(rounds.prefilled_again)
        else:
            longest = slice_tokens(stage.config.rollout)
            metrics |= defer_metrics(
                unfinished, leaving_groups.groups, rounds.new_tokens, slice_length=longest
            )
        return replace(
            rollout, rounds=rounds.usages, sampled_tokens=rounds.new_tokens, metrics=metrics
        )

    def _advance(
        self, unfinished: UnfinishedGroups, number: int, stage: LengthStage, rounds: Rounds
    ) -> Leaving:
        """Make the rounds of step `number`; what it learns from leaves `unfinished`."""
        rollout = stage.config.rollout
        steps_left = stage.end - number
        length = slice_tokens(rollout)
        if rollout.tail == "carry":
            return advance_carry(
                unfinished,
                self._limits,
                step=number,
                steps_left=steps_left,
                samples=rollout.group_size,
                sample_round=lambda groups: self._round(
                    groups, length, number, stage=stage, rounds=rounds
                ),
                choose=self._choose,
            )

        def sample_round(groups: list[UnfinishedGroup], whole: bool) -> list[UnfinishedGroup]:
            return self._round(
                groups,
                rollout.max_new_tokens if whole else length,
                number,
                stage=stage,
                rounds=rounds,
            )

        return advance_defer(
            unfinished,
            self._limits,
            step=number,
            steps_left=steps_left,
            samples=rollout.group_size,
            sample_round=sample_round,
            choose=self._choose,
        )

    # ------------------------------------------------------------ parts of a step

    def _round(
        self,
        groups: list[UnfinishedGroup],
        length: int,
        number: int,
        stage: LengthStage,
        rounds: Rounds,
    ) -> list[UnfinishedGroup]:
        """The groups after at most `length` new tokens of every unfinished completion.

        Those begun earlier are sampled first."""
        sampling = training_sampling(stage.config.rollout)
        rows: list[list[Work]] = []
        keys: list[dict[int, Key]] = []
        """Key of each request, by group and sample index."""
        for group in groups:
            group_rows = self._rows(group, sampling, length, first=len(rows))
            rows += group_rows
            keys.append(
                {work.request.key[1]: work.request.key for row in group_rows for work in row}
            )
        if self._replays_engine:
            self._engines.keep_routes(
                [part for group in self._after.groups for part in group.parts]
            )
        title = f"step {number + 1}/{self._total_steps}"
        if rounds.usages:
            title += f", round {len(rounds.usages) + 1}"
            self._engines.reset_prefix_cache()
        sampled, usages = self._engines.sample(rows, sampling.max_new_tokens, number, title)
        after = [
            replace(
                group,
                samples=tuple(
                    sampled[group_keys[g]] if g in group_keys else sample
                    for g, sample in enumerate(group.samples)
                ),
            )
            for group, group_keys in zip(groups, keys, strict=True)
        ]
        after = self._score_complete(groups, after, sampling.max_new_tokens)
        rounds.usages.append(usages)
        rounds.new_tokens += sum(map(tokens_of, after)) - sum(map(tokens_of, groups))
        rounds.prefilled_again += sum(
            len(work.request.so_far.token_ids) for row in rows for work in row
        )
        return after

    def _score_complete(
        self, before: Sequence[UnfinishedGroup], after: list[UnfinishedGroup], max_new_tokens: int
    ) -> list[UnfinishedGroup]:
        """The groups after a round; those that it completed have scores of group functions, too."""
        if not takes_groups(self._config.reward):
            return after
        places = [
            place
            for place, group in enumerate(after)
            if group.is_complete and not before[place].is_complete
        ]
        scored = self._engines.score_groups(
            [self._scored(after[place]) for place in places], max_new_tokens
        )
        for place, group in zip(places, scored, strict=True):
            samples = map(ScoredCompletion, group.completions, group.scores)
            after[place] = replace(after[place], samples=tuple(samples))
        return after

    def _rows(
        self, group: UnfinishedGroup, sampling: SamplingSettings, length: int, first: int
    ) -> list[list[Work]]:
        """A group's requests of a round; the number of its first row is `first`.

        There is one row where nothing is sampled yet, as the completions share their prompt, and
        otherwise a row for each completion."""
        if group.is_complete:
            return []
        step, index, times = self.curriculum.drawn(group.draw)
        prompt = self._inputs.prompts[index]
        seed = RolloutSeed(self._inputs.order.seed_at(step), step)
        requests = requests_of(prompt, 0, sampling, seed=seed, times=times)
        works = []
        begun = any(
            not isinstance(sample, PartialCompletion) or sample.token_ids
            for sample in group.samples
        )
        for g in group.unfinished:
            so_far = group.samples[g]
            assert isinstance(so_far, PartialCompletion)
            row = first + len(works) if begun else first
            request = replace(requests[g], key=(row, g), so_far=so_far, slice_tokens=length)
            works.append(Work(prompt, request))
        return [[work] for work in works] if begun else [works]


def sampled_anew(group: UnfinishedGroup, steps_done: int) -> UnfinishedGroup:
    """The group with nothing sampled, as if it began in the next step."""
    return replace(group.nothing_sampled(group.deferred), first_step=steps_done)


def unscored(group: UnfinishedGroup, steps_done: int) -> UnfinishedGroup:
    """The group, with nothing sampled where another reward function has judged a part of it.

    It has scored a completion, or has judged an answer that was told something."""
    has_feedback = any(call.status == FEEDBACK for part in group.parts for call in part.calls)
    if len(group.unfinished) == len(group.samples) and not has_feedback:
        return group
    return sampled_anew(group, steps_done)


def routed(group: UnfinishedGroup, steps_done: int) -> UnfinishedGroup:
    """The group, with nothing sampled where a run without replay has sampled a part of it."""
    if all(part.routes_at or not part.token_ids for part in group.parts):
        return group
    return sampled_anew(group, steps_done)


def with_places(group: UnfinishedGroup, places: Mapping[RoutesAt, RoutesAt]) -> UnfinishedGroup:
    """The group with its routes at other places; those that have none are forgotten."""
    samples: list[PartialCompletion | ScoredCompletion] = []
    for sample, part in zip(group.samples, group.parts, strict=True):
        moved = tuple(places[place] for place in part.routes_at if place in places)
        if isinstance(sample, ScoredCompletion):
            completion = replace(sample.completion, routes_at=moved)
            samples.append(replace(sample, completion=completion))
        else:
            samples.append(replace(sample, routes_at=moved) if part.routes_at else sample)
    return replace(group, samples=tuple(samples))


def tokens_of(group: UnfinishedGroup) -> int:
    """Number of the group's sampled tokens."""
    return sum(part.n_sampled for part in group.parts)


def carry_metrics(
    unfinished: UnfinishedGroups, learned: Sequence[ScoredGroup], number: int, max_staleness: int
) -> dict[str, float]:
    """`staleness_metrics`, and tokens and unfinished sequences in flight behind the step."""
    metrics = {
        "rollout/carried_tokens": float(sum(map(tokens_of, unfinished.groups))),
        "rollout/sequences_in_flight": float(
            sum(len(group.unfinished) for group in unfinished.groups)
        ),
    }
    return metrics | staleness_metrics(learned, number, max_staleness)


def staleness_metrics(
    learned: Sequence[ScoredGroup], number: int, max_staleness: int
) -> dict[str, float]:
    """How old the tokens are that step `number` learns from: mean, most, and share of each age.

    The age is the number of steps since the one whose weights sampled a token."""
    ages = dict.fromkeys(range(max_staleness + 1), 0)
    for segment in (s for group in learned for c in group.completions for s in c.segments):
        ages[number - segment.step] += segment.tokens if segment.sampled else 0
    total = sum(ages.values())
    if not total:
        return {}
    return {
        "rollout/staleness": sum(age * tokens for age, tokens in ages.items()) / total,
        "rollout/staleness_max": float(max(age for age, tokens in ages.items() if tokens)),
        **{f"rollout/staleness/{age}": tokens / total for age, tokens in ages.items()},
    }


def defer_metrics(
    unfinished: UnfinishedGroups,
    leaving_groups: Sequence[UnfinishedGroup],
    new_tokens: int,
    slice_length: int,
) -> dict[str, float]:
    """Groups that wait for a whole round, and tokens that were sampled in vain.

    Beside them stands the share of the deferred groups, sampled whole by now, that would have
    fitted a short round after all: by the change of the weights, since the noise is the same."""
    metrics = {
        "rollout/deferred_groups": float(sum(group.deferred for group in unfinished.groups)),
        "rollout/discarded_tokens": float(new_tokens - sum(map(tokens_of, leaving_groups))),
        "rollout/short_share": unfinished.short_share,
    }
    whole = [group for group in leaving_groups if group.deferred]
    if whole:
        now_short = [all(part.n_sampled <= slice_length for part in group.parts) for group in whole]
        metrics["rollout/deferred_now_short"] = sum(now_short) / len(whole)
    return metrics
