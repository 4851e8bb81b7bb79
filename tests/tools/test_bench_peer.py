"""What is told of two sides' runs, by hand; the runs themselves take an environment of TRL's."""

import json

import pytest

from tools.bench_peer import Measured, cut_off, report, report_learning

COLUMNS = ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]
OURS = [
    Measured([2.0, 4.0], [1.0, 1.5], [800.0, 1600.0], mfu=0.5),
    Measured([3.0], [2.0], [1200.0], mfu=0.7),
]


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    """The lines by their metric."""
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(line) == COLUMNS and line["bench"] == "peer" for line in lines)
    return {line["metric"]: line for line in lines}


def test_figures_are_medians_over_the_steps_of_all_runs(capsys) -> None:
    report("P2", OURS, [Measured([6.0], [3.0], [1000.0])], completions=40)
    found = {key: (line["value"], line["baseline"], line["ratio"]) for key, line in printed(capsys).items()}
    assert found == {
        "step_seconds": (3.0, "TRL: 6.000 s", 2.0),
        "mfu of the update": (0.6, None, None),
        "generate_seconds": (1.5, "TRL: 3.000 s", 2.0),
        "completion_tokens_of_a_step": (1200.0, "TRL: 1000.000 tokens", 1.2),
        "mean_length": (30.0, "TRL: 25.000 tokens", 1.2),
        "completion_tokens_per_second": (400.0, "TRL: 166.667 tokens/s", 2.4),
    }


def test_of_a_peer_that_was_stopped_there_are_seconds_alone_and_ours_have_their_lengths(capsys) -> None:
    report("P4", OURS, [cut_off(420.0)], completions=40)
    found = {key: (line["value"], line["baseline"], line["ratio"]) for key, line in printed(capsys).items()}
    assert found == {
        "step_seconds": (3.0, "TRL: more than 420.000 s", 140.0),
        "mfu of the update": (0.6, None, None),
        "completion_tokens_of_a_step": (1200.0, None, None),
        "mean_length": (30.0, None, None),
    }


def test_what_is_learned_comes_with_the_mfu_of_our_updates(capsys) -> None:
    ours = [Measured([1.0], [1.0], [1.0], mfu, accuracy=[0.1, *[0.5] * 4]) for mfu in (0.25, 0.75)]
    theirs = [Measured([1.0], [1.0], [1.0], accuracy=[share] * 5) for share in (0.2, 0.4)]
    report_learning("P3", ours, [*theirs, cut_off(300.0)])
    lines = printed(capsys)
    assert list(lines) == ["accuracy", "mfu of the update"]
    assert lines["accuracy"]["case"] == "P3; steps 1 to 5"
    assert (lines["accuracy"]["value"], lines["accuracy"]["ratio"]) == (0.42, 1.4)
    # Variances of 0 and 0.02 by 2 seeds each: the difference of 0.12 has a standard error of 0.1.
    assert lines["accuracy"]["baseline"] == "TRL: difference of +1.2 standard errors; 0.300 "
    assert (lines["mfu of the update"]["value"], lines["mfu of the update"]["ratio"]) == (0.5, None)
