"""Reward functions of a user's, run by real workers."""

import sys
from pathlib import Path

import pytest

from rlmath.workers.fork_server import MAX_PRINTED_LINES
from rlmath.workers.hooks import code_fingerprint, function_problem
from rlmath.workers.worker_pool import WorkerPool
from tests.programs import wait_for
from tests.workers.test_worker_pool import is_alive

SOURCE = """
import os, sys

def by_length(completion, solutions, row):
    return -abs(len(completion) - int(solutions[0])), {"level": row["level"], "id": len(row["query_id"])}

def plain(completion, solutions, row):
    return len(completion)

def broken(completion, solutions, row):
    return 1 / len(completion)

def not_a_number(completion, solutions, row):
    return float("nan")

def echo(completion, solutions, row):
    return 1.0, {row["name"]: 2.0}

def huge(completion, solutions, row):
    return (float(completion), {"size": 1e308})

def leaves(completion, solutions, row):
    raise SystemExit("no licence")

def greedy(completion, solutions, row):
    return float(len(bytearray(2**34)))

def deep(completion, solutions, row):
    return helper(row)

def helper(row):
    return row["levle"]

def talks(completion, solutions, row):
    print("\\x1b[2Jseen", completion)
    for number in range(int(completion)):
        print("line", number)
    sys.stderr.write("no end of line")
    return 1.0

def by_row(completion, solutions, row):
    return globals()[row["function"]](completion, solutions, row)

NUMBER = 5
"""
ROW = {"query_id": "q17", "level": 3}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with my_rewards.py in it."""
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    (tmp_path / "breaks.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_number_and_metrics_come_back(folder):
    with WorkerPool(1, 30.0, function="my_rewards:by_length") as pool:
        function_result = pool.call("four", ["6"], ROW).result(60)
    assert (function_result.reward, function_result.metrics, function_result.failure) == (
        -2.0,
        (("level", 3.0), ("id", 3.0)),
        None,
    )


def test_what_is_no_reward_is_a_failure(folder):
    with WorkerPool(1, 30.0, function="my_rewards:by_row") as pool:
        for name, completion, message in (
            ("broken", "", "ZeroDivisionError: division by zero"),
            ("not_a_number", "x", "it returned nan"),
            ("greedy", "x", "MemoryError"),
            ("leaves", "x", "SystemExit: no licence"),
            (
                "huge",
                "1e308",
                "the reward must be a number from -1e+30 to 1e+30; it returned (1e+308,",
            ),
        ):
            function_result = pool.call(completion, ["6"], ROW | {"function": name}).result(60)
            assert function_result.failure == "error", name
            assert message in function_result.message


def test_a_failure_has_the_last_lines_of_its_traceback(folder):
    with WorkerPool(1, 30.0, function="my_rewards:deep") as pool:
        first, *trace = pool.call("x", [], ROW).result(60).message.splitlines()
    assert first == "KeyError: 'levle'"
    assert [line.strip() for line in trace if "File" in line] == [
        f'File "{folder}/my_rewards.py", line {SOURCE[: SOURCE.index(text)].count(chr(10)) + 1}, '
        f"in {name}"
        for text, name in (("return helper", "deep"), ('return row["levle"]', "helper"))
    ]


def test_what_a_function_prints_is_logged_bounded_and_without_control_characters(folder, caplog):
    caplog.set_level("INFO")
    with WorkerPool(1, 30.0, function="my_rewards:talks") as pool:
        assert pool.call("1", [], ROW).result(60).reward == 1.0
        assert pool.call("100", [], ROW).result(60).reward == 1.0
    messages = [record.getMessage() for record in caplog.records if "prints" in record.getMessage()]
    assert messages[:3] == [
        "reward.function prints: \\x1b[2Jseen 1",
        "reward.function prints: line 0",
        "reward.function prints: no end of line\\x1b[2Jseen 100",
    ]
    assert len(messages) == MAX_PRINTED_LINES + 1
    assert messages[-1].startswith(
        f"reward.function prints: {104 - MAX_PRINTED_LINES} more lines, which are left out"
    )


def test_a_function_that_prints_without_end_is_ended_by_its_limit(folder, caplog):
    caplog.set_level("INFO")
    (folder / "chatty.py").write_text(
        "def reward(*_):\n    while True:\n        print('x' * 1000)\n"
    )
    with WorkerPool(1, 1.0, function="chatty:reward") as pool:
        assert pool.call("x", [], ROW).result(60).failure == "timeout"
    assert len(caplog.records) <= MAX_PRINTED_LINES + 1


def test_a_file_can_be_named_and_finds_the_modules_beside_it(folder, tmp_path_factory, monkeypatch):
    (folder / "mine").mkdir()
    (folder / "mine" / "beside.py").write_text("WEIGHT = 3.0\n")
    (folder / "mine" / "json.py").write_text(
        "from beside import WEIGHT\ndef steps(completion, solutions, row):\n    return WEIGHT\n"
    )
    for spec in ("mine/json.py:steps", f"{folder}/mine/json.py:steps"):
        assert function_problem(spec) is None
        with WorkerPool(1, 30.0, function=spec) as pool:
            assert pool.call("x", [], ROW).result(60).reward == 3.0
    assert "has no function 'step'" in function_problem("mine/json.py:step")
    assert "mine/jsn.py" in function_problem("mine/jsn.py:steps")


def test_the_fingerprint_is_that_of_the_functions_file_and_imports_nothing(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "package" / "inner.py").write_text("def f(): ...\n")
    before = code_fingerprint("package.inner:f")
    assert len(before) == 16 and before == code_fingerprint("package/inner.py:f")
    assert code_fingerprint("my_rewards:plain") not in ("", before)
    (folder / "package" / "inner.py").write_text("def f(): return 1\n")
    assert code_fingerprint("package.inner:f") != before
    assert [
        code_fingerprint(spec) for spec in (None, "no_such:f", "no.py:f", "breaks.at:f", "nonsense")
    ] == [""] * 5
    assert "package" not in sys.modules


def test_names_are_checked_as_values_are(folder):
    validity = {
        "\ud800": False,
        "\x1b[2J": False,
        "a\nb": False,
        "": False,
        " ": False,
        "x" * 101: False,
        "\u202ex": False,
    }
    validity |= {"x" * 100: True, "Länge in Wörtern": True, "a/b": True, "字": True}
    with WorkerPool(1, 30.0, function="my_rewards:echo") as pool:
        futures = {name: pool.call("x", [], {"name": name}) for name in validity}
        results_by_name = {name: future.result(60) for name, future in futures.items()}
    for name, is_good in validity.items():
        assert results_by_name[name].metrics == (((name, 2.0),) if is_good else ())
        assert is_good or "must be 1 to 100 printable characters" in results_by_name[name].message
        assert results_by_name[name].message.isprintable()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("my_rewards.plain", 'needed: "package.module:name"'),
        ("my_reward:plain", "importing 'my_reward' failed (ModuleNotFoundError"),
        ("my_rewards:plan", "'my_rewards' has no function 'plan'. Did you mean \"plain\""),
        ("my_rewards:NUMBER", "'my_rewards' has no function 'NUMBER'"),
        ("breaks:plain", "importing 'breaks' failed (RuntimeError: no licence)"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_refused_with_the_reason(folder, spec, reason):
    problem = function_problem(spec)
    assert problem is not None
    assert problem.startswith("reward.function") and reason in problem
    assert "breaks" not in sys.modules


def test_a_pool_whose_function_cannot_be_loaded_raises_the_reason(folder):
    with WorkerPool(1, 5.0, function="breaks:plain") as pool:
        with pytest.raises(RuntimeError, match=r"reward\.function: importing 'breaks' failed"):
            pool.call("x", [], ROW).result(60)


def test_a_wrong_file_name_and_a_line_that_is_no_python_are_named(folder):
    (folder / "wrong.py").write_text("def plain(text)\n    return 1\n")
    problem = function_problem("my_reward.py:plain") or ""
    assert problem == 'reward.function: there is no file "my_reward.py". There is "my_rewards.py".'
    assert "line 1): def plain(text))" in (function_problem("wrong.py:plain") or "")


def test_what_a_module_starts_does_not_hold_the_check_up(folder):
    """A thread that is no daemon, and a process that inherits the streams."""
    source = (
        "import subprocess, threading, time\nthreading.Thread(target=time.sleep, "
        "args=(9999,)).start()\n"
    )
    source += "open('pid', 'w').write(str(subprocess.Popen(['sleep', '9999']).pid))\n"
    (folder / "starts.py").write_text(source + SOURCE)
    assert function_problem("starts:plain") is None
    started_pid = int((folder / "pid").read_text())
    wait_for(lambda: not is_alive(started_pid))


def test_a_module_that_ignores_the_ends_of_its_children_is_served(folder):
    source = (
        "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\ndef dies(*_):\n   "
        " os._exit(3)\n"
    )
    (folder / "ignores.py").write_text(source)
    with WorkerPool(1, 30.0, function="ignores:dies") as pool:
        messages = [pool.call("x", [], ROW).result(60).message for _ in range(4)]
    assert messages == ["its worker ended (exit code 3)"] * 4
