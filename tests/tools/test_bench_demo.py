import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.programs import ENVIRONMENT, REPOSITORY, end_family
from tools import bench_demo


def result(algorithm: str, seed: int, before: float, after: float) -> dict:
    return {"algorithm": algorithm, "seed": seed, "accuracy_before": before, "accuracy_after": after}


def test_the_summary_names_each_recipes_worst_seed_and_its_median(capsys):
    found = [result("grpo", 1, 0.25, 0.95), result("gspo", 1, 0.25, 0.9), result("grpo", 2, 0.5, 0.9)]
    found[0]["train_mfu"], found[2]["train_mfu"] = 0.25, None  # no step of the second one had an update
    bench_demo.report([*found, result("gspo", 2, 0.5, 0.6), result("gspo", 3, 0.3, 0.96)])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        assert list(line) == ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]
    assert [(line["case"], line["value"], line["baseline"], line["ratio"]) for line in lines] == [
        ("gspo, worst of 3 seeds: 2", 60.0, "before: 50.0", 1.2),
        ("gspo, median of 3 seeds", 90.0, "before: 30.0", 3.0),
        ("grpo, worst of 2 seeds: 2", 90.0, "before: 50.0", 1.8),
        ("grpo, median of 2 seeds", 92.5, "before: 37.5", 2.467),
        ("grpo", 0.25, None, None),
    ]


def test_a_stage_that_fails_is_told_and_the_others_are_measured_still(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert bench_demo.main(["--seeds", "7", "8", "--algorithms", "grpo", "--output", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    for seed, line in zip((7, 8), captured.err.splitlines(), strict=True):
        assert (
            line == f"bench_demo: grpo, seed {seed}: a stage ended with status 1; see {tmp_path / 'log.txt'}"
        )


@pytest.mark.full
def test_quick_measures_one_recipe_on_one_seed_and_again_only_prints_it(tmp_path, capsys):
    arguments = ["--quick", "--algorithms", "grpo", "--output", str(tmp_path)]
    assert bench_demo.main(arguments) == 0
    first = capsys.readouterr().out
    assert [json.loads(line)["case"] for line in first.splitlines()] == [
        "grpo, seed 101",
        "grpo, worst of 1 seeds: 101",
        "grpo, median of 1 seeds",
        "grpo",
    ]
    log = (tmp_path / "log.txt").read_text()
    assert "== Accuracy before" in log and "== Training (grpo)" in log
    assert bench_demo.main(arguments) == 0
    assert capsys.readouterr().out == first and (tmp_path / "log.txt").read_text() == log


WAITS = """
import signal, time
def save(*_):
    signal.signal(signal.SIGINT, lambda *_: print("again", flush=True))
    time.sleep(0.5)  # longer than Popen.wait waits for an interrupted program
    print("saving", flush=True)
    time.sleep(1.0)
    print("saved", flush=True)
    exit()
signal.signal(signal.SIGINT, save)
print("runs", flush=True)
time.sleep(60)
"""


def interrupted(code: str, first: str, *more: str) -> tuple[str, str, int]:
    """(stdout, stderr, exit status) of Python code that gets Ctrl-C with all that it has started when a line of its
    stdout is `first`, and again at each of the lines `more`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    places = {"cwd": REPOSITORY, "env": ENVIRONMENT, "process_group": 0}
    process, lines = subprocess.Popen([sys.executable, "-c", code], **places, **pipes), []
    try:
        for moment in (first, *more):
            while not lines or lines[-1] != moment:
                assert process.poll() is None
                lines.append(process.stdout.readline())
            os.killpg(process.pid, signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    finally:
        end_family(process)
    return "".join(lines) + printed, errors, process.returncode


@pytest.mark.parametrize(("again", "printed"), [((), ""), (("saving\n",), "again\n")])
def test_control_c_waits_for_the_program_that_runs_and_ends_without_a_traceback(again, printed):
    code = f"import sys\nfrom rlmath.cli import demo\ndemo.run('Training', [sys.executable, '-c', {WAITS!r}], None)\n"
    expected = (f"\n== Training\nruns\nsaving\n{printed}saved\n", "demo: interrupted in 'Training'\n", 130)
    assert interrupted(code, "runs\n", *again) == expected


def test_control_c_ends_all_measurements(tmp_path):
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\nsleep 0.3\necho one >> {tmp_path}/started\necho runs > /proc/$PPID/fd/1\nexec sleep 60\n"
    )
    program.chmod(0o755)
    code = (
        f"import sys\nfrom tools import bench_demo\nsys.executable = {str(program)!r}\n"
        f"sys.exit(bench_demo.main(['--seeds', '7', '8', '--output', {str(tmp_path / 'out')!r}]))\n"
    )
    printed, errors, status = interrupted(code, "runs\n")
    assert (printed, status) == ("runs\n", 130)
    assert errors == "bench_demo: interrupted; the same command resumes\n"
    assert (tmp_path / "started").read_text() == "one\n"
