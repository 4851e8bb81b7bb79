"""The benchmark of asynchronous training: its completions, its figures by hand, its lines; and one run."""

from __future__ import annotations

import json
import statistics

import pytest

from rlmath.config.load import load_config
from rlmath.planning.checks import config_warnings, run_problems
from tests import programs
from tools.bench_async import CASES, COMMON, WAYS, Figures, figures, main, report

APART = {
    "seconds/step": 2.0,
    "seconds/wait_for_groups": 0.3,
    "seconds/sync_wait_for_engines": 0.1,
    "rollout/engine_busy_share": 0.5,
    "rollout/staleness": 1.5,
    "sync/latency_s": 0.25,
    "train/mfu": 0.4,
}
TURNS = {"seconds/step": 3.0, "seconds/rollout": 1.0, "train/mfu": 0.2}


def test_completions_are_as_long_as_their_case_says():
    even, tail = CASES["even"], CASES["tail"]
    assert {even.length(seed) for seed in range(50)} == {128}
    found = [tail.length(seed) for seed in range(20_000)]
    assert found[:50] == [tail.length(seed) for seed in range(50)]
    assert min(found) >= 1 and max(found) == 192
    # The mean's standard error is 0.35 tokens, that of the cut share 0.0012: four of each.
    assert statistics.fmean(found) == pytest.approx(0.3 * 192, abs=1.4)
    assert sum(one == 192 for one in found) / len(found) == pytest.approx(0.03, abs=0.005)


@pytest.mark.parametrize("way", list(WAYS))
def test_both_ways_can_start(way: str, tmp_path):
    paths = ["model.path=model", "data.train_path=train.jsonl", f"run.output_dir={tmp_path}"]
    config = load_config(["configs/demo.yaml"], [*paths, *COMMON, *WAYS[way]])
    assert run_problems(config, 2, None) == []
    assert [one for one in config_warnings(config) if "rollout." in one] == []


def test_figures_are_means_of_the_two_sides():
    found = figures([APART, APART | {"seconds/step": 4.0, "train/mfu": 0.6}])
    assert found.step_seconds == 3.0 and found.mfu == 0.5
    assert found.trainer_busy == pytest.approx(3.0 - 0.4)
    assert found.engine_busy == pytest.approx(0.5 * 3.0)
    assert (found.staleness, found.latency) == (1.5, 0.25)
    assert found.over_longest == pytest.approx(3.0 / 2.6)
    turns = figures([TURNS])
    assert (turns.step_seconds, turns.trainer_busy, turns.engine_busy) == (3.0, 2.0, 1.0)


def test_lines_are_medians_with_ratios_to_the_run_beside(capsys: pytest.CaptureFixture[str]):
    ours = [Figures(seconds, 1.8, 1.0, 1.0, 0.1, 0.4) for seconds in (2.0, 1.9, 4.0)]
    theirs = [Figures(seconds, 1.5, 1.0, 0.0, 0.0, 0.2) for seconds in (3.0, 3.8, 4.0)]
    report("even", ours, theirs)
    lines = {line["metric"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert all(line["bench"] == "async" and line["case"] == "even" for line in lines.values())
    over = lines["step_over_longest_phase"]
    assert (over["value"], over["ratio"]) == (pytest.approx(2.0 / 1.8), pytest.approx(1.8 / 2.0))
    assert (lines["step_seconds"]["value"], lines["step_seconds"]["ratio"]) == (2.0, 1.5)
    assert lines["colocated_step_seconds"]["value"] == 3.8
    assert (lines["train/mfu"]["value"], lines["train/mfu"]["ratio"]) == (0.4, 2.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cases", "hurry"], "invalid choice: 'hurry'"),
        (["--repeats", "0"], "--repeats 0: needed is at least 1"),
    ],
)
def test_mistakes_are_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.full
def test_trainer_and_engine_work_at_the_same_time():
    """One after the other, the two sides would take about twice the busier one's seconds."""
    printed = programs.run("tools/bench_async.py", "--quick", "--cases", "even", timeout=900).stdout
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    found = {row["metric"]: row["value"] for row in rows}
    assert 1.0 <= found["step_over_longest_phase"] < 1.5
    assert found["trainer_busy_share"] + found["engine_busy_share"] > 1.2
    assert 0 < found["staleness"] <= 2
