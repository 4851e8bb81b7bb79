"""The benchmark of a rollout's tail: its completions, its steps without engines, its lines; and one run."""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import replace

import pytest

from rlmath.algorithms.partial_rollouts import Flight, GroupInFlight, advance_carry, advance_defer
from rlmath.algorithms.types import NOTHING_SAMPLED, ScoredCompletion
from rlmath.config.schema import RolloutConfig
from rlmath.rollout.sampling import AllAtOnce, Load, RequestResult
from tests import programs
from tools.bench_tail import (
    CARRY,
    DEFER,
    GROUP_SIZE,
    NEVER_ENDS,
    OLDER,
    WAYS,
    Case,
    Completions,
    Figures,
    Paced,
    after_round,
    cases,
    cases_of,
    keep,
    main,
    make_rows,
    report_case,
    segments_of,
    tokens_of,
    whole_groups,
)

COMPLETIONS = Completions(longest=128)
CASE = Case(2, 32, 0.02, COMPLETIONS, warm_up=6, steps=4, repeats=1, tails=(CARRY, OLDER, DEFER))
FIGURES = Figures(
    seconds=10.0,
    steps=5,
    learned_tokens=4000,
    completions=100,
    rounds=5,
    engine_steps=500,
    filled=0.25,
    tail_share=0.9,
    tokens_in_flight=0.0,
    prefilled_again=0,
    discarded=0,
    staleness=0.0,
    largest_staleness=0,
    own_step_seconds=0.005,
)


def sampled(groups: list[GroupInFlight], slice_tokens: int, step: int) -> list[GroupInFlight]:
    """A round without engines, whose tokens are positions."""
    rows = make_rows(groups, COMPLETIONS, 1, slice_tokens)
    assert [request.key[0] for row in rows for request in row] == [
        p for p, row in enumerate(rows) for _ in row
    ]
    results = {}
    for request in (request for row in rows for request in row):
        assert request.min_new_tokens == request.max_new_tokens <= slice_tokens
        done = len(request.so_far)
        positions = range(done, done + request.max_new_tokens)
        results[request.key] = RequestResult(request.key, positions, [-1.0] * len(positions), "length")
    return after_round(groups, rows, results, COMPLETIONS, 1, step)


def completions(groups: list[GroupInFlight]) -> dict[tuple[int, int], list[int]]:
    """By draw and sample: the tokens."""
    return {
        (group.draw, g): list(sample.completion.token_ids)
        for group in groups
        for g, sample in enumerate(group.samples)
        if isinstance(sample, ScoredCompletion)
    }


@pytest.mark.parametrize("prompt_share", [0.0, 0.5])
def test_lengths_have_their_mean_and_share_that_is_cut_off(prompt_share: float) -> None:
    made = Completions(128, prompt_share)
    groups = [[made.length(1, draw, g) for g in range(GROUP_SIZE)] for draw in range(5000)]
    lengths = [length for group in groups for length in group]
    assert 1 <= min(lengths) <= 6
    assert max(lengths) == 128
    assert statistics.mean(lengths) == pytest.approx(0.3 * 128, rel=0.03)
    assert lengths.count(128) / len(lengths) == pytest.approx(0.03, abs=0.006)
    logs = [[math.log(min(length, 100)) for length in group] for group in groups]
    alike = statistics.correlation([group[0] for group in logs], [group[1] for group in logs])
    assert alike == pytest.approx(prompt_share, abs=0.05)


def test_every_repeat_has_other_completions_and_the_same_ones_again() -> None:
    one, again, other = ([COMPLETIONS.request(repeat, draw, 0) for draw in range(20)] for repeat in (1, 1, 2))
    assert one == again
    assert all(mine.seed != theirs.seed for mine, theirs in zip(one, other, strict=True))
    assert [request.max_new_tokens for request in one] != [request.max_new_tokens for request in other]


def test_a_step_that_waits_finishes_its_own_groups_in_one_round() -> None:
    groups = sampled(whole_groups(CASE, 3), 128, 3)
    assert [group.draw for group in groups] == list(range(48, 64))
    assert all(group.is_complete for group in groups)
    assert [segment.step for group in groups for segment in segments_of(group)] == [3] * 64


@pytest.mark.parametrize("tail", CASE.tails)
def test_all_ways_have_the_same_completions(tail: RolloutConfig) -> None:
    flight, learned = Flight(), []
    length = CASE.slice_tokens(tail)
    for step in range(6):
        more = flight, CASE.rules(tail), step, NEVER_ENDS, GROUP_SIZE
        if tail.tail == "carry":
            found = advance_carry(*more, lambda groups, step=step: sampled(groups, length, step), keep)
        else:
            found = advance_defer(
                *more, lambda groups, whole, step=step: sampled(groups, 128 if whole else length, step), keep
            )
        assert len(found.groups) == CASE.groups
        learned += found.groups
    tailed = completions(learned)
    assert len(tailed) == 6 * CASE.groups * GROUP_SIZE
    waited = completions(
        [group for step in range(11) for group in sampled(whole_groups(CASE, step), 128, step)]
    )
    assert tailed == {key: waited[key] for key in tailed}
    assert sum(map(tokens_of, learned)) == sum(map(len, tailed.values()))
    if tail.tail == "carry":
        assert any(len(segments_of(group)) > GROUP_SIZE for group in learned), "some were carried"
    else:
        assert any(group.deferred for group in learned)
        assert all(len(segments_of(group)) == GROUP_SIZE for group in learned), "each in one piece"


def test_what_has_begun_is_a_row_of_its_own_and_a_new_group_one_row() -> None:
    new = GroupInFlight(1, 0, (NOTHING_SAMPLED,) * GROUP_SIZE)
    lengths = [COMPLETIONS.length(1, 0, g) for g in range(GROUP_SIZE)]
    (begun,) = sampled([replace(new, draw=0)], min(lengths), 0)
    left = [g for g in range(GROUP_SIZE) if lengths[g] > min(lengths)]
    rows = make_rows([begun, new], COMPLETIONS, 1, 16)
    assert [[request.key for request in row] for row in rows] == [
        *([(p, g)] for p, g in enumerate(left)),
        [(len(left), g) for g in range(GROUP_SIZE)],
    ]
    whole = COMPLETIONS.request(1, 0, left[0])
    first = rows[0][0]
    assert list(first.so_far) == list(range(min(lengths)))
    assert first.token_ids == whole.token_ids
    assert first.seed == whole.seed
    assert first.max_new_tokens == first.min_new_tokens == min(16, lengths[left[0]] - min(lengths))


def test_a_step_that_waits_has_a_place_for_every_completion() -> None:
    for quick in (True, False):
        for case in cases(quick, cores=2):
            assert case.groups * GROUP_SIZE <= case.engines * case.places
            assert case.warm_up >= 2 + max((tail.max_staleness for tail in case.tails), default=0)
        assert {tail.tail for case in cases(quick, cores=2) for tail in case.tails} == {"carry", "defer"}
        assert {case.engines for case in cases(quick, cores=2)} == {2, 4}


def test_engines_run_at_full_speed_only_where_each_has_a_core() -> None:
    unpaced = [[case.engines for case in cases(False, cores) if not case.step_seconds] for cores in (1, 2, 8)]
    assert unpaced == [[], [2, 2], [2, 2]]


def test_every_engine_step_takes_its_time_the_last_one_too() -> None:
    request = COMPLETIONS.request(1, 0, 0)
    paced, started = Paced(AllAtOnce([request]), 0.02), time.perf_counter()
    assert paced.pop(Load(0, 0)) == [request]
    assert time.perf_counter() - started < 0.02, "no step has been made"
    paced.pop(Load(1, 0))
    paced.pop(Load(0, 0))
    assert time.perf_counter() - started >= 0.04
    assert len(paced.own_seconds) == 2
    assert max(paced.own_seconds) < 0.02


def test_figures_are_medians_against_wait(capsys: pytest.CaptureFixture[str]) -> None:
    carry = replace(
        FIGURES,
        seconds=5.0,
        learned_tokens=3960,
        rounds=10,
        engine_steps=220,
        filled=0.5,
        tail_share=0.6,
        tokens_in_flight=900.0,
        prefilled_again=1980,
        discarded=396,
        staleness=0.8,
        largest_staleness=2,
        own_step_seconds=0.004,
    )
    slow = replace(carry, seconds=9.9, largest_staleness=1)
    report_case("case", 0.02, [(FIGURES, carry), (FIGURES, slow), (FIGURES, carry)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        assert list(line) == ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]
        assert (line["bench"], line["case"]) == ("tail", "case")
    assert {line["metric"]: (line["value"], line["ratio"]) for line in lines} == {
        "learned_tokens_per_second": (792.0, 1.98),
        "least_speedup": (1.0, 1.0),
        "learned_tokens_per_engine_step": (18.0, 2.25),
        "rollout_seconds": (1.0, 2.0),
        "engine_steps": (44.0, 2.273),
        "filled": (0.5, 2.0),
        "tail_share": (0.6, 1.5),
        "learned_length": (39.6, 0.99),
        "rounds": (2.0, None),
        "tokens_in_flight": (900.0, None),
        "prefilled_again": (0.5, None),
        "discarded": (0.1, None),
        "staleness": (0.8, None),
        "largest_staleness": (2, None),
        "own_step_seconds": (0.004, 5.0),
    }
    assert lines[0]["baseline"] == "wait: 400.0000"


def test_without_a_pace_there_is_nothing_to_compare_a_step_with(capsys: pytest.CaptureFixture[str]) -> None:
    report_case("case", 0.0, [(FIGURES, FIGURES)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "own_step_seconds" not in {line["metric"] for line in lines}
    assert {line["ratio"] for line in lines} == {1.0, None}


def test_a_case_names_its_settings() -> None:
    assert CASE.named(OLDER) == (
        "2 engines of 32 places, paced at 20 ms, 16 groups of 4 a step, at most 128 tokens; carry, slices of 26, "
        "staleness 4, 80 groups in flight"
    )
    alike = replace(CASE, places=64, completions=Completions(96, 0.5))
    assert alike.named(DEFER) == (
        "2 engines of 64 places, paced at 20 ms, 16 groups of 4 a step, at most 96 tokens, 50% of the variance of log "
        "lengths by prompt; defer, slices of 48"
    )


def test_help_names_quick(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--quick" in capsys.readouterr().out


@pytest.mark.distributed
@pytest.mark.full
def test_carrying_and_deferring_learn_more_tokens_of_the_same_completions() -> None:
    printed = programs.run("tools/bench_tail.py", "--quick", timeout=600).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len({row["case"] for row in rows}) == 2
    ratios = {(row["case"], row["metric"]): row["ratio"] for row in rows}
    for case in {row["case"] for row in rows}:
        least = 1.4 if "carry" in case else 1.2
        assert ratios[case, "learned_tokens_per_engine_step"] > least
        assert ratios[case, "learned_length"] == pytest.approx(1, abs=0.05)


def test_ways_that_are_not_named_are_left_out() -> None:
    for way in WAYS:
        assert {tail.tail for case in cases_of([way], quick=False) for tail in case.tails} == {way}
