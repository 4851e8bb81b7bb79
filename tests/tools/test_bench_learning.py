"""What the ways to treat a rollout's tail learn: figures by hand, curves of real metrics files, mistakes; one run."""

from __future__ import annotations

import json
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.cli import demo
from rlmath.config.load import load_config
from rlmath.telemetry.metrics_writer import MetricsWriter
from tools import bench_learning
from tools.bench_learning import WAYS, Learned, curve_of, draw_picture, read_learned, report

COLUMNS = ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]


def learned(final: float, seconds: float = 2.0, length: float = 20.0) -> Learned:
    """A run of four steps, the last of which takes five times as long; 1000 tokens each, and an MFU of 0.8 by the
    seconds, but for the last."""
    slow = [seconds] * 3 + [5 * seconds]
    return Learned({0: 0.25, 4: final}, slow, [1000.0] * 4, [length] * 4, [0.8 / seconds] * 3 + [0.01])


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    """The lines by their metric."""
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(line) == COLUMNS and line["bench"] == "learning" for line in lines)
    assert len({line["metric"] for line in lines}) == len(lines)
    return {line["metric"]: line for line in lines}


def write_run(folder: Path, seconds: list[float], validated: dict[int, float]) -> Path:
    """A run's files; the validation after some steps is made in the step that follows, and takes 0.5 s."""
    writer = MetricsWriter(str(folder), tensorboard=False)
    for step, value in enumerate(seconds, start=1):
        row = {"n_valid_tokens": 1000.0 * step, "rollout/response_length": 20.0 + step}
        row |= {"train/mfu": 0.1 * step} if step != 2 else {}  # the second makes no update
        made = {"seconds/validation": 0.5} if step - 1 in validated else {}
        writer.write(step, row | made | {"seconds/step": value + sum(made.values())})
    for step, value in validated.items():
        accuracies = {"validation/accuracy": value, "validation/heldout/accuracy": value}
        writer.write_validation(step, accuracies | {"validation/heldout/truncated": 0.0})
    writer.close()
    return folder


def test_figures_are_means_and_medians_against_wait(capsys: pytest.CaptureFixture[str]) -> None:
    wait = [learned(0.90), learned(0.92, seconds=4.0), learned(0.94)]
    carry = [learned(0.93, 1.0, 19.0), learned(0.95, 1.0), learned(0.97, 0.5)]
    report("carry2", carry, wait)
    lines = printed(capsys)
    # Variances of 0.0004 by 3 seeds, on both sides: the difference of 0.03 has a standard error of 0.01633.
    case = "carry2, 3 seeds, after 4 steps, difference of +1.8 standard errors"
    expected = {
        "accuracy": (case, 0.95, "", "wait: 0.9200", 1.033),
        "length": ("carry2, 3 seeds", 19.6667, "tokens", "wait: 20.0000", 0.983),
        "step_seconds": ("carry2, 3 seeds", 2.0, "s", "wait: 4.0000", 2.0),  # the long steps count, too
        # 4000 tokens in 8 s, and in 16 s with "wait".
        "learned_tokens_per_second": ("carry2, 3 seeds", 500.0, "tokens/s", "wait: 250.0000", 2.0),
        "train/mfu": ("carry2, 3 seeds", 0.8, "of the ceiling", "wait: 0.4000", 2.0),
    }
    assert {metric: tuple(line[key] for key in COLUMNS if key not in ("bench", "metric")) for metric, line in
            lines.items()} == expected  # fmt: skip


def test_of_one_seed_and_of_seeds_that_do_not_differ_there_is_no_standard_error(capsys) -> None:
    report("defer", [learned(0.5)], [learned(0.8)])
    cases = ["defer, 1 seed, after 4 steps", *["defer, 1 seed"] * 4]
    assert [line["case"] for line in printed(capsys).values()] == cases
    report("defer", [learned(0.5)] * 2, [learned(0.8)] * 2)
    assert printed(capsys)["accuracy"]["case"] == "defer, 2 seeds, after 4 steps"


def test_a_way_that_learned_less_has_a_negative_difference(capsys) -> None:
    report("defer", [learned(0.5), learned(0.7)], [learned(0.8), learned(0.8)])
    line = printed(capsys)["accuracy"]
    # A variance of 0.02 by 2 seeds on one side: 0.1.
    assert line["case"] == "defer, 2 seeds, after 4 steps, difference of -2.0 standard errors"
    assert line["ratio"] == 0.75


def test_accuracies_before_the_last_are_told_too(capsys) -> None:
    early = [
        Learned({0: 0.25, 10: value, 20: 0.75, 25: 1.0}, [1.0], [1.0], [1.0], []) for value in (0.5, 0.25)
    ]
    report("carry4", early[1:], early[:1])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["metric"] == "learned_tokens_per_second", "without an update there is no MFU"
    lines = lines[:3]
    assert [(line["case"], line["ratio"]) for line in lines] == [
        ("carry4, 1 seed, after 10 steps", 0.5),
        ("carry4, 1 seed, after 20 steps", 1.0),
        ("carry4, 1 seed, after 25 steps", 1.0),
    ]
    assert [line["metric"] for line in lines] == ["accuracy"] * 3


def test_wait_is_not_compared_with_itself(capsys) -> None:
    wait = [learned(0.8), learned(0.9)]
    report("wait", wait, wait)
    lines = printed(capsys)
    assert {line["case"] for line in lines.values()} == {"wait, 2 seeds", "wait, 2 seeds, after 4 steps"}
    assert {line["ratio"] for line in lines.values()} == {1.0}


def test_a_base_that_answers_nothing_has_no_ratio(capsys) -> None:
    report("carry1", [learned(0.1)], [learned(0.0)])
    line = printed(capsys)["accuracy"]
    assert (line["value"], line["baseline"], line["ratio"]) == (0.1, "wait: 0.0000", None)


def test_a_run_is_read_from_its_files_without_the_seconds_of_validation(tmp_path: Path) -> None:
    run = read_learned(write_run(tmp_path, [2.0, 3.0, 4.0], {0: 0.25, 2: 0.5, 3: 0.75}))
    assert run.accuracy == {0: 0.25, 2: 0.5, 3: 0.75}
    assert run.seconds == pytest.approx([2.0, 3.0, 4.0])
    assert run.tokens == [1000.0, 2000.0, 3000.0]
    assert run.lengths == [21.0, 22.0, 23.0]
    assert run.mfu == pytest.approx([0.1, 0.3])


def test_a_curve_is_the_mean_of_the_seeds_in_seconds_and_accuracy(tmp_path: Path) -> None:
    one = write_run(tmp_path / "1", [10.0, 20.0, 30.0], {0: 0.25, 2: 0.5, 3: 0.75})
    other = write_run(tmp_path / "2", [20.0, 30.0, 40.0], {0: 0.35, 2: 0.7, 3: 0.85})
    curve = curve_of("defer", [read_learned(one), read_learned(other)])
    assert curve.label == "defer"
    assert [second for second, _ in curve.points] == [0, 40, 75]
    assert [value for _, value in curve.points] == pytest.approx([30.0, 60.0, 80.0])


def test_the_picture_has_a_curve_for_every_way_over_seconds(tmp_path: Path) -> None:
    found = {way: [learned(0.75, seconds)] for way, seconds in (("wait", 5.0), ("carry1", 2.5))}
    path = tmp_path / "new" / "picture.svg"
    draw_picture(path, found)
    picture = ET.fromstring(path.read_text(encoding="utf-8"))
    namespace = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in picture.iter(f"{namespace}text")]
    assert {"seconds of training", "held-out accuracy (%)", "wait", "carry1"} <= set(texts)
    assert "step" not in texts
    lines = [line.get("points").split() for line in picture.iter(f"{namespace}polyline")]
    # 0 to 40 s lie at 76 to 736; 25 to 75% are at ticks of 20 to 80 by 10.
    assert [[point.split(",")[0] for point in line] for line in lines] == [
        ["76.00", "736.00"],
        ["76.00", "406.00"],
    ]
    assert lines[0][0].split(",")[1] == lines[1][0].split(",")[1]
    first = path.read_bytes()
    draw_picture(path, found)
    assert path.read_bytes() == first


@pytest.mark.parametrize("way", list(WAYS))
def test_a_way_differs_in_what_it_is_named_after_alone(way: str) -> None:
    kind, staleness, clip = re.fullmatch(r"([a-z]+)(\d?)(_clip)?", way).groups()
    files = [Path("configs/demo.yaml"), demo.ALGORITHMS / "decoupled.yaml"]
    paths = ["model.path=model", "data.train_path=train.jsonl", "run.output_dir=output"]
    config, wait = (load_config(files, [*paths, *WAYS[name]]) for name in (way, "wait"))
    assert config.rollout.max_staleness == int(staleness or wait.rollout.max_staleness)
    assert config.rollout.tail == (kind if kind in ("carry", "defer") else "wait")
    assert config.rollout.ranks == (kind == "async")
    named = {name: getattr(wait.rollout, name) for name in ("tail", "max_staleness", "ranks")}
    assert replace(config.rollout, **named) == wait.rollout
    assert (config.algorithm.recompute_logprobs, config.algorithm.importance_correction) == (
        (False, None) if clip else (True, "token")
    )
    assert replace(config, rollout=wait.rollout, algorithm=wait.algorithm) == wait


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "0"], "--steps 0: needed is at least 1"),
        (["--seeds", "1", "-1"], "--seeds -1: needed is at least 0"),
        (["--picture", "curve.jpg"], "--picture curve.jpg: needed is a name that ends in .svg or .png"),
        (["--ways", "hurry"], "invalid choice: 'hurry'"),
        (["--output", "FILE"], "it is a file; name a folder"),
    ],
)
def test_mistakes_are_named_before_anything_is_made(tmp_path: Path, capsys, arguments, text: str) -> None:
    taken, output = tmp_path / "taken", tmp_path / "output"
    taken.write_text("")
    arguments = [str(taken) if argument == "FILE" else argument for argument in arguments]
    with pytest.raises(SystemExit) as ended:
        bench_learning.main(["--output", str(output), *arguments])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
    assert not output.exists()


def test_a_stage_that_fails_is_told_with_the_place_of_its_output(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert bench_learning.main(["--output", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    told = f"wait, seed 1: a stage ended with status 1; see {tmp_path / 'log.txt'}"
    assert captured.err == f"bench_learning: {told}\n"
    assert "'Arithmetic problems' failed with status 1" in (tmp_path / "log.txt").read_text()


def without_programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs only write what their training would have written; returns the titles of all that was to be run."""
    titles: list[str] = []

    def run(title: str, command: list[str], environment: dict[str, str]) -> None:
        titles.append(title)
        for argument in command:
            name, _, value = argument.partition("=")
            if name == "run.output_dir" and title.startswith("Supervised"):
                (Path(value) / "hf_model").mkdir(parents=True)
            elif name == "run.output_dir":
                write_run(Path(value), [2.0, 2.0], {0: 0.25, 2: 0.5})

    monkeypatch.setattr(demo, "run", run)
    return titles


def test_results_are_kept_and_those_of_other_settings_are_made_again(tmp_path, capsys, monkeypatch) -> None:
    titles = without_programs(monkeypatch)
    arguments = ["--output", str(tmp_path), "--ways", "defer", "--seeds", "1", "2", "1", "--steps", "2"]
    assert bench_learning.main(arguments) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 10, "five figures of wait and of defer"
    assert titles[:2] == ["Arithmetic problems", "A tiny random model"]
    assert titles[3:] == [f"{way}, seed {seed}" for seed in (1, 2) for way in ("wait", "defer")]
    titles.clear()
    assert bench_learning.main(arguments) == 0
    assert capsys.readouterr().out == first and titles == []
    monkeypatch.setitem(bench_learning.WAYS, "defer", ("rollout.tail=defer", "rollout.slice_tokens=40"))
    assert bench_learning.main(arguments) == 0
    assert titles == ["defer, seed 1", "defer, seed 2"]
    titles.clear()
    monkeypatch.setattr(bench_learning, "LONG_SHARE", 0.2)
    assert bench_learning.main(arguments) == 0
    assert len(titles) == 7, "another base model, and all runs"


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_quick_trains_wait_and_carry_and_again_only_prints_them(tmp_path: Path, capsys) -> None:
    picture = tmp_path / "curve.svg"
    arguments = ["--quick", "--output", str(tmp_path / "out"), "--picture", str(picture)]
    assert bench_learning.main(arguments) == 0
    first = capsys.readouterr().out
    lines = [json.loads(line) for line in first.splitlines()]
    metrics = ("accuracy", "length", "step_seconds", "learned_tokens_per_second", "train/mfu")
    assert [(line["case"], line["metric"]) for line in lines] == [
        (f"{way}, 1 seed" + (", after 6 steps" if metric == "accuracy" else ""), metric)
        for way in ("wait", "carry1")
        for metric in metrics
    ]
    assert picture.is_file()
    log = (tmp_path / "out" / "log.txt").read_text()
    assert bench_learning.main(arguments) == 0
    assert capsys.readouterr().out == first
    assert (tmp_path / "out" / "log.txt").read_text() == log
