"""Steps of whole and of partial rollouts, with engines that know how long completions become."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from rlmath.algorithms.partial_rollouts import UnfinishedGroup, UnfinishedGroups
from rlmath.algorithms.types import (
    NOTHING_SAMPLED,
    PartialCompletion,
    Prompt,
    RoutesAt,
    Score,
    ScoredCompletion,
    ScoredGroup,
    scored_group,
)
from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished, write_unfinished
from rlmath.config.length_curriculum import length_stages
from rlmath.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SelectionConfig,
)
from rlmath.data.dataset import load_inputs
from rlmath.rollout.collector import CollectGroups, Rollout, Sampled, Work
from rlmath.rollout.sampling import Key, request_seed, requests_of
from rlmath.rollout.work_queue import EngineUsage
from rlmath.trainer.rollouts.synchronous import (
    Keep,
    PartialRollouts,
    StepRollout,
    StepRollouts,
    WholeRollouts,
    defer_metrics,
    routed,
    with_places,
)
from tests.tiny_models import shape_of

STEPS = 4
PER_STEP = 2
LONGEST = 12
SLICE = 4
LENGTHS = [(3, 2), (10, 3), (2, 4), (3, 3), (5, 2), (1, 11), (2, 2), (4, 3)]
"""Tokens of the two completions of each prompt."""


class Engines:
    """Sample completions of the lengths above; the first of a group of an even prompt is right.

    That is so unless `right_prompts` has others."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        """Title and step of each round."""
        self.prompts: list[list[str]] = []
        """Prompts of each round."""
        self.begun: list[tuple[str, int, int]] = []
        """Prompt, sample and tokens so far of each request."""
        self.scored: list[str] = []
        """Prompts of the groups that were scored as a whole."""
        self.seeds: set[int] = set()
        self.resets = 0
        self.right_prompts: Collection[int] = range(0, len(LENGTHS), 2)

    def sample(
        self, rows: Sequence[Sequence[Work]], max_new_tokens: int, step: int, title: str
    ) -> tuple[dict[Key, Sampled], list[EngineUsage]]:
        self.calls.append((title, step))
        works = chain.from_iterable(rows)
        return self._sampled(works, max_new_tokens, step), [EngineUsage(1.0, 1, 0, 1.0)]

    def _sampled(self, works: Iterable[Work], max_new_tokens: int, step: int) -> dict[Key, Sampled]:
        sampled: dict[Key, Sampled] = {}
        for work in works:
            request = work.request
            so_far = len(request.so_far.token_ids)
            index = request.key[1]
            self.seeds.add(request.seed)
            self.begun.append((work.prompt.prompt_id, index, so_far))
            sampled[request.key] = self._completion(work, index, max_new_tokens, step=step)
        return sampled

    def _completion(self, work: Work, index: int, max_new_tokens: int, step: int) -> Sampled:
        so_far = work.request.so_far
        whole = LENGTHS[number_of(work.prompt)][index]
        left = whole - len(so_far.token_ids)
        tokens = min(left, work.request.slice_tokens or max_new_tokens)
        part = so_far.extended((7,) * tokens, (-0.5,) * tokens, policy_version=step, step=step)
        if tokens < left:
            return part
        right = index == 0 and number_of(work.prompt) in self.right_prompts
        score = Score(float(right), right, "", "string")
        return ScoredCompletion(part.finished(index, "", "stop"), score)

    def collect(self, request: CollectGroups) -> Rollout:
        self.prompts.append([prompt.prompt_id for prompt in request.prompts])
        self.calls.append((request.title, request.seed.step))
        groups = []
        for prompt in request.prompts:
            requests = requests_of(prompt, 0, request.sampling, seed=request.seed)
            works = [Work(prompt, completion_request) for completion_request in requests]
            sampled = self._sampled(works, LONGEST, request.seed.step)
            groups.append(scored_group(prompt, [sampled[work.request.key] for work in works]))
        return Rollout(groups, [EngineUsage(1.0, 1, 0, 1.0)])

    def score_groups(self, groups: list[ScoredGroup], max_new_tokens: int) -> list[ScoredGroup]:
        """A reward of 5 for each completion."""
        assert max_new_tokens == LONGEST
        self.scored += [group.prompt.prompt_id for group in groups]
        score = Score(5.0, True, "", "function")
        return [replace(group, scores=(score,) * len(group.scores)) for group in groups]

    def reset_prefix_cache(self) -> None:
        self.resets += 1


def write_files(rollouts: StepRollouts, place: Path) -> None:
    """What a checkpoint has of them."""
    for name, content in rollouts.files().items():
        (place / name).write_bytes(content)


def number_of(prompt: Prompt) -> int:
    return int(prompt.prompt_id.removeprefix("q"))


def rollouts_of(
    place: Path,
    model: Path,
    tail: str,
    selection: SelectionConfig | None = None,
    reward: RewardConfig | None = None,
    keep: Keep | None = None,
) -> tuple[StepRollouts, Engines]:
    """The rollouts of a run of four steps over eight prompts, and their engines."""
    rows = [{"question": f"{n}+1", "answer": n + 1, "id": f"q{n}"} for n in range(len(LENGTHS))]
    file = place / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(
        run=RunConfig(seed=7),
        model=ModelConfig(path=str(model)),
        data=DataConfig(
            train_path=str(file), template="raw", prompts_per_step=PER_STEP, shuffle=False
        ),
        rollout=RolloutConfig(
            tail=tail,  # type: ignore[arg-type]
            group_size=2,
            max_new_tokens=LONGEST,
            slice_tokens=SLICE,
        ),
        selection=selection or SelectionConfig(),
        reward=reward or RewardConfig(),
    )
    shape = shape_of(model)
    inputs = load_inputs(config, shape)
    assert inputs.total_steps == STEPS
    shapes = read_run_shapes(config, shape).with_total_steps(config, inputs.total_steps)
    engines = Engines()
    kind = WholeRollouts if tail == "wait" else PartialRollouts
    return kind(config, inputs, engines, shapes=shapes, keep=keep), engines


def make_step(rollouts: StepRollouts, number: int) -> StepRollout:
    (stage,) = length_stages(rollouts._config, STEPS)
    rollout = rollouts.step(number, stage)
    rollouts.commit()
    return rollout


def lengths_of(rollout: StepRollout) -> dict[str, list[int]]:
    """Tokens of the completions that a step learns from, by prompt."""
    return {
        group.prompt.prompt_id: [len(completion.token_ids) for completion in group.completions]
        for group in rollout.selection.learned
    }


@pytest.mark.parametrize("tail", ["wait", "carry", "defer"])
def test_a_run_learns_from_every_prompt_once_and_whole(
    tail: str, tied_model: Path, tmp_path: Path
) -> None:
    """Its seeds are those of the step that drew it, and its tokens are recent."""
    rollouts, engines = rollouts_of(tmp_path, tied_model, tail)
    learned: dict[str, list[int]] = {}
    tokens = 0
    for number in range(STEPS):
        engines.calls.clear()
        engines.resets = 0
        rollout = make_step(rollouts, number)
        assert len(lengths_of(rollout)) == PER_STEP and not learned.keys() & lengths_of(rollout)
        learned |= lengths_of(rollout)
        tokens += rollout.sampled_tokens
        title = f"step {number + 1}/{STEPS}"
        titles = [title, *(f"{title}, round {n}" for n in range(2, len(engines.calls) + 1))]
        assert engines.calls == [(text, number) for text in titles[: len(engines.calls)]]
        assert engines.resets == max(0, len(engines.calls) - 1)
        assert len(rollout.rounds) == len(engines.calls)
        oldest = number - 1 if tail == "carry" else number
        for group in rollout.selection.learned:
            for completion in group.completions:
                assert {segment.step for segment in completion.segments} <= {oldest, number}
    assert learned == {f"q{n}": list(lengths) for n, lengths in enumerate(LENGTHS)}
    assert engines.seeds == {
        request_seed(7, n // PER_STEP, f"q{n}", sample_index=g)
        for n in range(len(LENGTHS))
        for g in range(2)
    }
    whole = sum(map(sum, LENGTHS))
    assert tokens > whole if tail == "defer" else tokens == whole
    assert rollouts.next_draw == len(LENGTHS)


def test_what_is_carried_is_told_with_its_age(tied_model: Path, tmp_path: Path) -> None:
    """A completion of ten tokens is sampled in three slices, the first two of an earlier step."""
    rollouts, engines = rollouts_of(tmp_path, tied_model, "carry")
    first = make_step(rollouts, 0)
    assert lengths_of(first) == {"q0": [3, 2], "q2": [2, 4]}
    assert first.metrics["rollout/rounds"] == 1.0 and first.metrics["rollout/staleness"] == 0.0
    assert first.metrics["rollout/groups_in_flight"] == 2.0
    assert first.metrics["rollout/carried_tokens"] == 4 + 3 + 3 + 3
    assert first.metrics["rollout/sequences_in_flight"] == 1.0
    assert first.metrics["rollout/prefilled_again_tokens"] == 0.0
    engines.begun.clear()
    second = make_step(rollouts, 1)
    assert "q1" in lengths_of(second)
    assert ("q1", 0, 4) in engines.begun and ("q1", 0, 8) in engines.begun
    (carried,) = (group for group in second.selection.learned if group.prompt.prompt_id == "q1")
    segments = [(part.tokens, part.step) for part in carried.completions[0].segments]
    assert segments == [(4, 0), (6, 1)]
    assert second.metrics["rollout/prefilled_again_tokens"] >= 4 + 8
    assert second.metrics["rollout/staleness_max"] == 1.0


@pytest.mark.parametrize("tail", ["carry", "defer"])
def test_a_function_of_groups_gets_each_once_when_it_is_complete(
    tail: str, tied_model: Path, tmp_path: Path
) -> None:
    """A group that is sampled anew is another one."""
    reward = RewardConfig(function="own:reward", function_takes="group")
    rollouts, engines = rollouts_of(tmp_path, tied_model, tail, reward=reward)
    for number in range(STEPS):
        for group in make_step(rollouts, number).selection.learned:
            assert group.prompt.prompt_id in engines.scored
            assert [score.reward for score in group.scores] == [5.0, 5.0]
    times = Counter(engines.scored)
    assert times.keys() == {f"q{n}" for n in range(len(LENGTHS))}
    if tail == "carry":
        assert set(times.values()) == {1}


def test_what_is_sampled_anew_is_told(tied_model: Path, tmp_path: Path) -> None:
    rollouts, _ = rollouts_of(tmp_path, tied_model, "defer")
    metrics = [make_step(rollouts, number).metrics for number in range(STEPS)]
    assert all("rollout/carried_tokens" not in row for row in metrics)
    name = "rollout/deferred_now_short"
    shares = [row[name] for row in metrics if name in row]
    assert shares and set(shares) == {0.0}, "they are as long as before"
    assert metrics[-1]["rollout/groups_in_flight"] == 0.0


def test_a_step_asks_for_more_prompts_where_selection_drops_some(
    tied_model: Path, tmp_path: Path
) -> None:
    """Groups of odd prompts have no contrast; the step's own prompts are sampled first."""
    selection = SelectionConfig(dynamic_sampling="reward", max_extra_prompts=6)
    rollouts, engines = rollouts_of(tmp_path, tied_model, "wait", selection)
    rollout = make_step(rollouts, 1)
    assert engines.prompts[0] == ["q2", "q3"]
    asked = [prompt for prompts in engines.prompts for prompt in prompts]
    assert len(asked) > PER_STEP and len(set(asked)) == len(asked)
    assert len(lengths_of(rollout)) == PER_STEP
    assert all(number_of(group.prompt) % 2 == 0 for group in rollout.selection.learned)
    assert rollout.sampled_tokens == sum(sum(LENGTHS[int(prompt[1:])]) for prompt in asked)
    assert len(rollout.scores) == 2 * len(asked) and len(rollout.rounds) == len(engines.prompts)


@pytest.mark.parametrize("tail", ["wait", "carry", "defer"])
def test_rollouts_go_on_from_the_files_of_a_checkpoint(
    tail: str, tied_model: Path, tmp_path: Path
) -> None:
    whole, _ = rollouts_of(tmp_path, tied_model, tail)
    expected = [lengths_of(make_step(whole, number)) for number in range(STEPS)]
    stopped, _ = rollouts_of(tmp_path, tied_model, tail)
    learned = [lengths_of(make_step(stopped, number)) for number in range(2)]
    write_files(stopped, tmp_path)
    resumed, _ = rollouts_of(tmp_path, tied_model, tail)
    resumed.resume(tmp_path, 2, reward_changed=False)
    assert resumed.next_draw == stopped.next_draw
    learned += [lengths_of(make_step(resumed, number)) for number in (2, 3)]
    assert learned == expected


def test_groups_that_another_reward_has_scored_in_part_are_sampled_anew(
    tied_model: Path, tmp_path: Path
) -> None:
    """One completion of q1 is scored, and the other is in flight."""
    stopped, _ = rollouts_of(tmp_path, tied_model, "carry")
    make_step(stopped, 0)
    write_files(stopped, tmp_path)
    begun = []
    for changed in (False, True):
        resumed, engines = rollouts_of(tmp_path, tied_model, "carry")
        resumed.resume(tmp_path, 1, reward_changed=changed)
        make_step(resumed, 1)
        first_round = [request for request in engines.begun if request[0] == "q1"]
        begun.append(first_round[: 1 + changed])
    assert begun == [[("q1", 0, 4)], [("q1", 0, 0), ("q1", 1, 0)]]


def test_a_complete_group_that_another_reward_has_scored_is_judged_by_its_new_scores(
    tied_model: Path, tmp_path: Path
) -> None:
    """q3 is complete and in flight: without contrast in the checkpoint, with it when made anew."""
    selection = SelectionConfig(dynamic_sampling="reward", max_extra_prompts=6)
    stopped, _ = rollouts_of(tmp_path, tied_model, "carry", selection)
    make_step(stopped, 0)
    write_files(stopped, tmp_path)
    resumed, engines = rollouts_of(tmp_path, tied_model, "carry", selection)
    resumed.resume(tmp_path, 1, reward_changed=True)
    engines.right_prompts = range(len(LENGTHS))
    learned = {prompt for number in (1, 2, 3) for prompt in lengths_of(make_step(resumed, number))}
    assert ("q3", 0, 0) in engines.begun and "q3" in learned


def test_groups_in_flight_go_on_with_their_routes_and_without_them_are_sampled_anew(
    tied_model: Path, tmp_path: Path
) -> None:
    """A completion of q1 is finished; the run before had no routes of others in flight."""
    place = RoutesAt(1, 5, tokens=7)
    moved = RoutesAt(0, 0, tokens=7)
    whole = UnfinishedGroup(3, 2, (NOTHING_SAMPLED,) * 2)
    part = replace(NOTHING_SAMPLED.extended((5,), (-1.0,), 0, step=2), routes_at=(place,))
    finished = ScoredCompletion(part.finished(1, "", "stop"), Score(1.0, True, "", "string"))
    group = replace(whole, samples=(part, finished))
    assert routed(whole, 4) is whole and routed(group, 4) is group
    assert [sample.routes_at for sample in with_places(group, {place: moved}).parts] == [
        (moved,),
        (moved,),
    ]
    assert [sample.routes_at for sample in with_places(group, {}).parts] == [(), ()]
    unrouted = replace(group, samples=(replace(part, routes_at=()), finished))
    assert routed(unrouted, 4) == replace(whole, first_step=4)


def test_groups_in_flight_that_cannot_be_this_runs_are_refused(
    tied_model: Path, tmp_path: Path
) -> None:
    """Engines in the training ranks sample a step's groups before it is done."""
    stopped, _ = rollouts_of(tmp_path, tied_model, "carry")
    make_step(stopped, 0)
    write_files(stopped, tmp_path)
    resumed, _ = rollouts_of(tmp_path, tied_model, "carry")
    with pytest.raises(ValueError, match=r"draw \d+ was sampled in steps \[0\] of 0"):
        resumed.resume(tmp_path, 0, reward_changed=False)
    unfinished = read_unfinished(
        stopped.files()[UNFINISHED], 2, vocab_size=101, text_of=lambda token_ids, stopped: ""
    )
    (group,) = (group for group in unfinished.groups if not group.is_complete)
    part, score = group.samples
    assert isinstance(part, PartialCompletion)
    later = part.extended((7,), (-0.5,), policy_version=1, step=1)
    content = write_unfinished(replace(unfinished, groups=[replace(group, samples=(later, score))]))
    (tmp_path / UNFINISHED).write_bytes(content)
    with pytest.raises(ValueError, match=r"draw 1 was sampled in steps \[0, 1\] of 1"):
        resumed.resume(tmp_path, 1, reward_changed=False)
    as_long_as_any = part.extended((7,) * 8, (-0.5,) * 8, policy_version=0, step=0)
    content = write_unfinished(
        replace(unfinished, groups=[replace(group, samples=(as_long_as_any, score))])
    )
    (tmp_path / UNFINISHED).write_bytes(content)
    with pytest.raises(
        ValueError, match="draw 1 has an unfinished completion of the greatest length"
    ):
        resumed.resume(tmp_path, 1, reward_changed=False)
    others_wrote = part.answered([], (7,))
    content = write_unfinished(
        replace(unfinished, groups=[replace(group, samples=(others_wrote, score))])
    )
    (tmp_path / UNFINISHED).write_bytes(content)
    with pytest.raises(ValueError, match="more than 0 tokens that were not sampled"):
        resumed.resume(tmp_path, 1, reward_changed=False)
    (tmp_path / UNFINISHED).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="the groups in flight cannot be read"):
        resumed.resume(tmp_path, 1, reward_changed=False)
    (tmp_path / UNFINISHED).unlink()
    with pytest.raises(ValueError, match="the groups in flight cannot be read"):
        resumed.resume(tmp_path, 1, reward_changed=False)


@pytest.mark.parametrize("tail", ["wait", "carry", "defer"])
def test_groups_that_a_function_refuses_are_replaced_with_every_tail(
    tail: str, tied_model: Path, tmp_path: Path
) -> None:
    """It refuses q0."""
    selection = SelectionConfig(dynamic_sampling="own:keep", max_extra_prompts=6)

    def keep(groups: Sequence[ScoredGroup]) -> list[bool]:
        return [number_of(group.prompt) != 0 for group in groups]

    rollouts, _ = rollouts_of(tmp_path, tied_model, tail, selection=selection, keep=keep)
    rollout = make_step(rollouts, 0)
    learned = lengths_of(rollout)
    assert len(learned) == PER_STEP and "q0" not in learned
    assert "q0" in {group.prompt.prompt_id for group in rollout.selection.sampled}


def test_a_group_that_was_deferred_would_have_fitted_a_slice_of_its_length(
    tied_model: Path, tmp_path: Path
) -> None:
    """Both completions have as many tokens as a slice at most; then one has a token more."""

    def group(lengths: tuple[int, ...]) -> UnfinishedGroup:
        parts = [
            PartialCompletion().extended((7,) * tokens, (-0.5,) * tokens, policy_version=0, step=0)
            for tokens in lengths
        ]
        samples = tuple(
            ScoredCompletion(part.finished(g, "", "stop"), Score(0.0, False, "", "string"))
            for g, part in enumerate(parts)
        )
        return UnfinishedGroup(0, 0, samples, deferred=True)

    for lengths, share in (((SLICE, 2), 1.0), ((SLICE + 1, 2), 0.0)):
        metrics = defer_metrics(UnfinishedGroups(), [group(lengths)], 10, slice_length=SLICE)
        assert metrics["rollout/deferred_now_short"] == share
        assert metrics["rollout/discarded_tokens"] == 10 - sum(lengths)
    metrics = defer_metrics(UnfinishedGroups(), [], 0, slice_length=SLICE)
    assert "rollout/deferred_now_short" not in metrics
