"""Which prompts a curriculum draws: orders worked by hand, and what holds for any pass rates."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rlmath.algorithms.prompt_history import CurriculumRules, PromptHistory
from rlmath.algorithms.types import Completion, Prompt, Score, ScoredGroup
from rlmath.data.order import PromptOrder, Rollback, shares_of
from rlmath.data.prompt_curriculum import PromptCurriculum, is_floor_draw, read_history

BAND = CurriculumRules("band", low=0.25, high=0.75, floor=0.25)
WRONG, RIGHT = (0, 8), (8, 8)
UNSHRUNK = (Phase.explicit, Phase.generate)
"""A failure is shown as it was found: to make it smaller takes minutes."""


def names(count: int) -> list[str]:
    return [f"q{index}" for index in range(count)]


def curriculum(
    n_prompts: int,
    per_step: int,
    rules: CurriculumRules = BAND,
    known: dict[int, tuple[int, int]] | None = None,
    shuffle: bool = False,
    weights: Sequence[float] = (),
) -> PromptCurriculum:
    """`known`: what an earlier run sampled of prompts, as (right, sampled)."""
    order = PromptOrder(n_prompts, per_step, 1, shuffle, shares_of([n_prompts], weights))
    groups = {index: (counts,) for index, counts in (known or {}).items()}
    return PromptCurriculum(order, names(n_prompts), rules, PromptHistory(4, groups))


@cache
def group(index: int, correct: int, sampled: int = 8) -> ScoredGroup:
    completions = tuple(
        Completion(g, (1,), (0.0,), "", "stop", policy_version=0) for g in range(sampled)
    )
    scores = tuple(Score(1.0, g < correct, "", "string") for g in range(sampled))
    return ScoredGroup(Prompt(f"q{index}", "", (1,), (), "math"), completions, scores)


def make_steps(
    one: PromptCurriculum, steps: range, correct_of: Callable[[int, int], int], extra: int = 0
) -> list[list[int]]:
    """The prompts that steps draw, with so many `extra` ones.

    `correct_of(step, prompt)` of 8 completions are right."""
    drawn = []
    for step in steps:
        batch = one.begin(step).batch(step)
        extras = [index for index, _ in zip(one.extra(step), range(extra), strict=False)]
        one.commit(group(index, correct_of(step, index)) for index in [*batch, *extras])
        drawn.append([*batch, *extras])
    return drawn


def test_lost_completions_are_not_counted() -> None:
    """Two of three wrong ones say nothing of the model; a group of such changes nothing."""
    drawn = curriculum(2, 2, known={0: (1, 2), 1: (1, 2)})
    drawn.begin(0)
    sampled = [group(0, 1, sampled=4), group(1, 0, sampled=2)]
    lost = [
        replace(
            lossy,
            completions=tuple(
                replace(done, finish_reason="lost") if done.sample_index in places else done
                for done in lossy.completions
            ),
        )
        for lossy, places in zip(sampled, ((2, 3), (0, 1)), strict=True)
    ]
    assert drawn.commit(lost)["history/drift"] == 0.0
    judged = curriculum(2, 2, known={0: (1, 2), 1: (1, 2)})
    judged.begin(0)
    judged.commit([group(0, 1, sampled=2)])
    assert drawn.file() == judged.file()


# ---------------------------------------------------------------- orders worked by hand


def test_a_band_passes_over_what_is_too_easy_or_too_hard_and_runs_on_into_the_next_pass() -> None:
    """Prompt 1 of 0 to 5 is too easy, and prompt 4 too hard.

    Draws 3, 7, 11, ... are the queue's."""
    prompt_curriculum = curriculum(6, 2, known={1: RIGHT, 4: WRONG})
    drawn = make_steps(prompt_curriculum, range(6), lambda step, index: {1: 8, 4: 0}.get(index, 4))
    # draw 0: 0; 1: passes over 1, 2 | 2: 3; 3 (floor): 1 | 4: passes over 4, 5; 5: the next pass, 0
    # | 6: 2, 1 waits; 7 (floor): 4 | 8: 3; 9: passes over 4, 5 | 10: 0; 11 (floor): 1 again
    assert drawn == [[0, 2], [3, 1], [5, 0], [2, 4], [3, 5], [0, 1]]
    summary = prompt_curriculum.summary()
    assert summary["skipped_at_the_end"] == {"easy": 1, "hard": 1}
    assert summary["places_passed_over"] == {"easy": 2, "hard": 2}
    assert (summary["draws"], summary["draws_from_skipped"]) == (12, 3)


def test_what_a_draw_of_the_floor_finds_inside_the_band_is_drawn_in_its_turn_again() -> None:
    prompt_curriculum = curriculum(4, 2, known={1: WRONG})
    drawn = make_steps(
        prompt_curriculum, range(4), lambda step, index: 8 if index == 1 else 4
    )  # 8 of 16 are right then
    assert drawn == [[0, 2], [3, 1], [0, 1], [2, 3]]
    assert prompt_curriculum.summary()["skipped_at_the_end"] == {"easy": 0, "hard": 0}


def test_solved_prompts_are_those_of_which_enough_samples_are_all_right() -> None:
    rules = CurriculumRules("skip_solved", solved_samples=16, floor=0.01)
    prompt_curriculum = curriculum(3, 3, rules, known={0: (16, 16), 1: (8, 8), 2: (15, 16)})
    assert prompt_curriculum.begin(0).batch(0)[:2] == [1, 2]
    prompt_curriculum.commit([group(1, 8)])
    assert prompt_curriculum.summary()["skipped_at_the_end"] == {"easy": 2, "hard": 0}


def test_a_step_sees_the_pass_rates_of_earlier_steps_only_and_draws_again_the_same_until_it_is_made() -> (
    None
):
    prompt_curriculum = curriculum(6, 3)
    before = prompt_curriculum.file()
    first = prompt_curriculum.begin(0).batch(0)
    assert prompt_curriculum.file() == before  # a step that fails leaves the state as it was
    repeated = prompt_curriculum.begin(0).batch(0)
    assert first == repeated == [0, 1, 2]
    prompt_curriculum.commit([group(0, 8), group(1, 4), group(2, 0)])
    assert prompt_curriculum.begin(1).batch(1) == [3, 4, 5]
    prompt_curriculum.commit([group(index, 4) for index in (3, 4, 5)])
    assert prompt_curriculum.begin(2).batch(2) == [1, 0, 3]  # the second is the floor's; 2 waits


def test_extra_prompts_of_dynamic_sampling_keep_their_turn_and_are_counted() -> None:
    prompt_curriculum = curriculum(8, 2, known={5: RIGHT, 6: RIGHT})
    batch = prompt_curriculum.begin(0).batch(0)
    extra = list(prompt_curriculum.extra(0))
    assert sorted(extra) == [2, 3, 4, 5, 6, 7] and set(extra[-2:]) == {5, 6}
    metrics = prompt_curriculum.commit([group(index, 0) for index in (*batch, extra[0])])
    assert metrics["history/prompts/0"] == 3 and metrics["history/prompts/100"] == 2
    assert metrics["history/skipped_share"] == 5 / 8


def test_without_a_curriculum_the_draws_are_those_of_the_order() -> None:
    rules = CurriculumRules("none")
    prompt_curriculum = curriculum(7, 3, rules, known=dict.fromkeys(range(7), RIGHT), shuffle=True)
    order = PromptOrder(7, 3, 1, True)
    for step in range(9):
        assert prompt_curriculum.begin(step).batch(step) == order.batch(step)[1]
        assert list(prompt_curriculum.extra(step)) == list(order.extra(step))
        prompt_curriculum.commit([])
    assert [prompt_curriculum.drawn(draw) for draw in range(27)] == [
        order.drawn(draw) for draw in range(27)
    ]


def test_draws_of_groups_in_flight_stay_known() -> None:
    """Two draws stay in flight while later steps draw on with other pass rates."""
    prompt_curriculum = curriculum(6, 2, known={1: RIGHT})
    before = [prompt_curriculum.begin(0).drawn(draw) for draw in range(4)]
    assert before == [(0, 0, 0), (0, 2, 0), (1, 3, 0), (1, 1, 0)]
    prompt_curriculum.commit([group(0, 4), group(2, 8)], in_flight=[2, 3])
    resumed = curriculum(6, 2)
    resumed.resume(prompt_curriculum.file())
    resumed.require_draws(4, [2, 3])
    for each in (prompt_curriculum, resumed):
        each.begin(1)
        assert [each.drawn(draw) for draw in (2, 3, 4, 5)] == [*before[2:], (2, 4, 0), (2, 5, 0)]
    with pytest.raises(ValueError, match="other draws in flight"):
        resumed.require_draws(4, [3])


def test_drift_is_the_change_of_a_pass_rate_by_its_new_group() -> None:
    prompt_curriculum = curriculum(4, 2, known={0: (2, 8)})
    prompt_curriculum.begin(0)
    assert prompt_curriculum.commit([group(0, 6), group(1, 8)])["history/drift"] == 0.5
    prompt_curriculum.begin(1)
    assert prompt_curriculum.commit([group(0, 4), group(1, 4)])["history/drift"] == pytest.approx(
        (0.0 - 0.5) / 2
    )


def test_only_the_last_groups_of_a_prompt_count() -> None:
    prompt_curriculum = curriculum(2, 1, CurriculumRules("none"), known={0: RIGHT})
    for correct in (0, 0, 0, 2):
        prompt_curriculum.begin(0)
        prompt_curriculum.commit([group(0, correct)])
    # 2 of 32: the first group is forgotten.
    assert prompt_curriculum.summary()["prompts"]["to_25"] == 1


# ---------------------------------------------------------------- what holds for any pass rates


rates = st.integers(0, 2**32 - 1)
floors = st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.9])


@settings(max_examples=12, deadline=None, phases=UNSHRUNK)
@given(
    n_prompts=st.integers(1, 10),
    per_step=st.integers(1, 10),
    floor=st.sampled_from([0.1, 0.3, 0.6]),
    seed=rates,
    shuffle=st.booleans(),
    kind=st.sampled_from(["band", "skip_solved"]),
)
def test_nothing_starves_and_every_step_is_full(
    n_prompts: int, per_step: int, floor: float, seed: int, shuffle: bool, kind: str
) -> None:
    per_step = min(per_step, n_prompts)
    rules = CurriculumRules(kind, solved_samples=8, low=0.25, high=0.75, floor=floor)  # pyright: ignore
    prompt_curriculum = curriculum(n_prompts, per_step, rules, shuffle=shuffle)
    bound = 2 * n_prompts / (1 - floor) + n_prompts / floor + 2 * per_step
    steps = int(2 * bound / per_step) + 3
    drawn = make_steps(
        prompt_curriculum,
        range(steps),
        lambda step, index: (0, 4, 8)[hash((seed, step // 7, index)) % 3],
    )
    assert all(len(set(step)) == per_step for step in drawn)
    flat = [index for step in drawn for index in step]
    for index in range(n_prompts):
        places = [
            -1,
            *(place for place, drawn_index in enumerate(flat) if drawn_index == index),
            len(flat),
        ]
        assert max(b - a for a, b in pairwise(places)) <= bound, (index, places)


@settings(max_examples=12, deadline=None, phases=UNSHRUNK)
@given(
    n_prompts=st.integers(3, 10),
    stop=st.integers(1, 12),
    seed=rates,
    weights=st.sampled_from([(), (0.5,), (2.0,)]),
    extra=st.integers(0, 2),
)
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(
    n_prompts: int, stop: int, seed: int, weights: tuple[float, ...], extra: int
) -> None:
    def correct_of(step: int, index: int) -> int:
        return (0, 3, 8)[hash((seed, step, index)) % 3]

    whole, cut, resumed = (
        curriculum(n_prompts, 2, shuffle=True, weights=weights) for _ in range(3)
    )
    expected = make_steps(whole, range(24), correct_of, extra)
    begun = make_steps(cut, range(stop), correct_of, extra)
    resumed.resume(cut.file())
    assert begun + make_steps(resumed, range(stop, 24), correct_of, extra) == expected
    assert resumed.file() == whole.file() and resumed.summary() == whole.summary()


@given(floor=floors, draws=st.integers(1, 500))
def test_the_floor_has_its_share_of_the_draws(floor: float, draws: int) -> None:
    share = sum(is_floor_draw(draw, floor) for draw in range(draws)) / draws
    assert abs(share - floor) <= 1 / draws


# ---------------------------------------------------------------- files


def test_a_curriculum_goes_on_in_another_order_after_a_rollback_and_loses_no_prompt_of_the_pass() -> (
    None
):
    order = PromptOrder(40, 4, 1, True)
    prompt_curriculum = PromptCurriculum(order, names(40), BAND, PromptHistory(4))
    before = make_steps(prompt_curriculum, range(3), lambda step, index: 4)
    saved = prompt_curriculum.file()
    as_planned = make_steps(prompt_curriculum, range(3, 10), lambda step, index: 4)
    order.roll_back([Rollback(1, step=3, draw_step=3)])
    prompt_curriculum.resume(saved)
    anew = make_steps(prompt_curriculum, range(3, 10), lambda step, index: 4)
    assert anew != as_planned and order.seed_at(2) == 1 != order.seed_at(3)
    flat = [[index for step in part for index in step] for part in (before, as_planned, anew)]
    assert sorted(flat[0] + flat[1]) == sorted(flat[0] + flat[2]) == list(range(40))
    resumed = PromptCurriculum(order, names(40), BAND, PromptHistory(4))
    resumed.resume(prompt_curriculum.file())
    assert make_steps(resumed, range(10, 14), lambda s, i: 4) == make_steps(
        prompt_curriculum, range(10, 14), lambda s, i: 4
    )


def write(path: Path, *rows: object) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def test_pass_rates_of_a_file_and_of_another_run_are_read(tmp_path: Path) -> None:
    plain = write(
        tmp_path / "plain.jsonl",
        {"query_id": "q1", "correct": 3, "sampled": 8, "source": "elsewhere"},
        {"prompt_id": "q2", "correct": 0, "sampled": 16},
        {"query_id": "unknown", "correct": 1, "sampled": 1},
    )
    history, line = read_history(plain, names(3), 4)
    assert [history.totals(index) for index in range(3)] == [(0, 0), (3, 8), (0, 16)]
    assert "2 of 3 prompts" in line and "1 rows of other prompts are left out" in line
    prompt_curriculum = curriculum(3, 1)
    make_steps(prompt_curriculum, range(6), lambda step, index: step)
    (tmp_path / "ours.jsonl").write_bytes(prompt_curriculum.file())
    run_history, _ = read_history(str(tmp_path / "ours.jsonl"), names(3), 4)
    resumed = curriculum(3, 1)
    resumed.resume(prompt_curriculum.file())
    assert [run_history.totals(i) for i in range(3)] == [
        resumed._history.totals(i) for i in range(3)
    ]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("{", "line 4"),
        ("[" * 100_000, "line 4"),
        ([1], "not an object"),
        ({"correct": 1, "sampled": 2}, "query_id"),
        ({"query_id": "q1", "correct": True, "sampled": 2}, "whole numbers"),
        ({"query_id": "q1", "correct": 3, "sampled": 2}, "3 right of 2"),
        ({"query_id": "q1", "groups": [[1, 2]] * 1001}, "1 to 1000 pairs"),
        ({"query_id": "q0", "correct": 1, "sampled": 2}, "twice"),
    ],
)
def test_a_row_that_is_none_is_refused_with_its_line(
    tmp_path: Path, row: object, told: str
) -> None:
    """Blank lines count."""
    path = write(
        tmp_path / "rates.jsonl", "", {"query_id": "q0", "correct": 1, "sampled": 2}, "  ", row
    )
    with pytest.raises(ValueError, match=r"data\.history_path: .*line 4 is no row") as refused:
        read_history(path, names(3), 4)
    assert told in str(refused.value)


def test_a_history_of_other_data_or_that_is_no_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rates.jsonl", {"query_id": "other", "correct": 1, "sampled": 2})
    with pytest.raises(ValueError, match="none of the 3 prompts"):
        read_history(path, names(3), 4)
    with pytest.raises(ValueError, match="cannot be read"):
        read_history(str(tmp_path / "absent"), names(3), 4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"data\.history_path: .*FIFO"):
        read_history(str(tmp_path / "pipe"), names(3), 4)


def damaged(content: bytes, change: Callable[[dict], object]) -> bytes:
    first, *rows = content.decode().splitlines()
    header = json.loads(first)
    change(header)
    return "\n".join([json.dumps(header), *rows]).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(version=9),
        lambda header: header["draws"].update(queue=[99]),
        lambda header: header["draws"].update(in_flight=[[0, 0]]),
    ],
)
def test_a_damaged_state_is_refused(change: Callable[[dict], object]) -> None:
    prompt_curriculum = curriculum(4, 2)
    make_steps(prompt_curriculum, range(3), lambda step, index: 4 * index)
    curriculum(4, 2).resume(prompt_curriculum.file())
    for content in (
        damaged(prompt_curriculum.file(), change),
        prompt_curriculum.file()[:20],
        b"",
        b"\xff",
    ):
        with pytest.raises(ValueError, match="is damaged"):
            curriculum(4, 2).resume(content)
