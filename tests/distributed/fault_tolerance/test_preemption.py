"""SIGINT, SIGTERM and SIGUSR1, however they come, lead to a saved checkpoint.

The exit status says so.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlmath.config.run_files import EXIT_STATUS_FILE
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    NOT_SAVED_IN_TIME,
    SAVED_AND_STOPPED,
    ExitStatus,
    read_exit_status,
)
from tests.distributed.fault_tolerance.runs import SIGNALS, Run, running
from tests.programs import ENVIRONMENT, REPOSITORY, end_family, family, wait_for
from tests.selection import matrix

END_SECONDS = 120.0

pytestmark = pytest.mark.distributed


def assert_saved(run: Run) -> None:
    assert run.ends_within(END_SECONDS) != 0, (
        "torchrun has no other status for ranks that ended with one"
    )
    first, second = run.saved_steps()
    assert first == second, "both ranks save after the same step"
    assert run.status().status == SAVED_AND_STOPPED, run.console()
    assert (
        json.loads((run.folder / EXIT_STATUS_FILE).read_text())["meaning"] == "stopped on request"
    )


def test_sigterm_to_a_plain_torchrun_saves(tmp_path: Path) -> None:
    with running(tmp_path / "run", "walk") as run:
        run.launcher.send_signal(signal.SIGTERM)
        assert_saved(run)
        assert "--shutdown-timeout=315" in run.console(), "the options that torchrun should have"
        assert (
            "stops, within 22.5 s (not run.stop_grace_seconds, 300: torchrun kills" in run.console()
        )
        assert (
            "if torchrun sent it because another rank has ended, nothing can be saved"
            in run.console()
        )


@matrix
def test_control_c_saves_and_a_second_one_ends_all_at_once(tmp_path: Path) -> None:
    """torchrun forwards the first as SIGINT, the second as SIGTERM."""
    with running(tmp_path / "first", "walk") as run:
        run.launcher.send_signal(signal.SIGINT)
        assert_saved(run)
        assert (
            "SIGINT (Ctrl-C): the run saves after this step and stops, within 22.5 s"
            in run.console()
        )
        assert "KeyboardInterrupt" not in run.console()
    with running(tmp_path / "second", "slow save") as run:
        everyone = family(run.launcher.pid)
        run.launcher.send_signal(signal.SIGINT)
        wait_for(lambda: "Ctrl-C again" in run.console())
        run.launcher.send_signal(signal.SIGINT)
        assert run.ends_within(END_SECONDS) != 0
        assert run.saved_steps() == [] and run.status().status == FAILURE
        assert run.console().count("ended at once by a second Ctrl-C") == 1
        assert not psutil.wait_procs(everyone, timeout=5)[1]


WAITS_IN_C = """
import ctypes, sys
from rlmath.distributed.fault_tolerance.preemption import end_at_interrupt
from rlmath.telemetry.console import setup_logging
setup_logging(int(sys.argv[1]))
end_at_interrupt(int(sys.argv[1]))
print("ready", flush=True)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)
"""
"""The second call never returns, not for a signal either."""


def test_control_c_while_a_program_starts_ends_it_without_a_traceback() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAITS_IN_C, str(rank)], cwd=REPOSITORY, env=ENVIRONMENT, **pipes
        )
        for rank in (0, 1)
    ]
    try:
        for process, lines in zip(ranks, (1, 0), strict=True):
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=END_SECONDS)
            assert process.returncode == FAILURE
            assert (
                errors.count("\n")
                == errors.count("the same command starts the run again\n")
                == lines
            )
    finally:
        for process in ranks:
            end_family(process)


def test_the_exit_status_is_written_where_the_stacks_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    program = (
        "import os, signal, sys, time\n"
        "from rlmath.distributed.fault_tolerance.preemption import StopRequest\n"
        "StopRequest(0.1, sys.argv[1], 0).install()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, check=False, timeout=300)
    assert ended.returncode == read_exit_status(tmp_path).status == NOT_SAVED_IN_TIME


def test_a_second_control_c_after_all_is_saved_keeps_the_exit_status(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "from rlmath.distributed.fault_tolerance.exit_codes import write_exit_status\n"
        "from rlmath.distributed.fault_tolerance.preemption import StopRequest\n"
        "stop = StopRequest(60.0, sys.argv[1], 0)\n"
        "stop.install()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "stop.done()\n"
        f"write_exit_status(sys.argv[1], {SAVED_AND_STOPPED}, 'after step 3')\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, cwd=REPOSITORY, env=ENVIRONMENT, check=False, timeout=300)
    assert ended.returncode == SAVED_AND_STOPPED
    assert read_exit_status(tmp_path) == ExitStatus(SAVED_AND_STOPPED, "after step 3")


ARRIVALS = """
import signal, sys
from rlmath.distributed.fault_tolerance.preemption import INTERRUPT, StopRequest
stop = StopRequest(60.0, sys.argv[1], 0)
for arrival in sys.argv[2:]:
    if arrival == "another rank's":
        stop.request(INTERRUPT)
    else:
        stop._arrived(signal.Signals[arrival])
print("saves", flush=True)
"""


@pytest.mark.parametrize(
    ("arrivals", "saves"),
    [
        (("SIGINT", "SIGUSR1"), True),
        (("SIGUSR1", "SIGINT", "SIGTERM"), True),
        (("another rank's", "SIGINT"), True),
        (("another rank's", "SIGINT", "SIGTERM"), False),
        (("SIGINT", "SIGUSR1", "SIGINT"), False),
    ],
)
def test_only_a_second_control_c_of_this_process_ends_it_at_once(
    tmp_path: Path, arrivals: tuple[str, ...], saves: bool
) -> None:
    command = [sys.executable, "-c", ARRIVALS, str(tmp_path), *arrivals]
    ended = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout) == ((0, "saves\n") if saves else (FAILURE, ""))


INTERRUPTED_TWICE = """
import os, signal, sys, time
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.telemetry.console import setup_logging
rank = int(os.environ["RANK"])
setup_logging(rank)
stop = StopRequest(60.0, sys.argv[1], rank)
stop.install()
stop.in_steps, stop.saved_step = (True, 3) if sys.argv[2:] else (False, None)
for _ in range(2):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(2.0)
time.sleep(600)
"""


def test_control_c_on_another_node_is_logged_there_by_its_first_rank(tmp_path: Path) -> None:
    for place, lines in (
        ({"RANK": "2", "LOCAL_RANK": "0"}, 2),
        ({"RANK": "3", "LOCAL_RANK": "1"}, 0),
    ):
        command = [
            sys.executable,
            "-c",
            INTERRUPTED_TWICE,
            str(tmp_path / place["RANK"]),
            "in steps",
        ]
        variables = ENVIRONMENT | place
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == FAILURE and done.stderr.count("\n") == lines, done.stderr
        if lines:
            first, second = done.stderr.splitlines()
            assert (
                "rank 2 WARNING: SIGINT (Ctrl-C): the run saves after this step and stops, within "
                "60 s" in first
            )
            assert "rank 2 WARNING: The run was ended at once by a second Ctrl-C" in second
            assert second.endswith("the same command resumes after step 3")


def test_control_c_before_the_first_step_speaks_of_no_step(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED_TWICE, str(tmp_path)]
    variables = ENVIRONMENT | {"RANK": "2", "LOCAL_RANK": "0"}
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    first, second = done.stderr.splitlines()
    assert "the run stops before its next step, within 60 s" in first
    assert second.endswith("the same command starts from the beginning")


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)]
)
@matrix
def test_a_signal_to_one_rank_saves_on_all_and_a_second_one_does_no_harm(
    tmp_path: Path, number: int
) -> None:
    with running(tmp_path / "run", "walk") as run:
        os.kill(run.pid(1), number)
        os.kill(run.pid(1), signal.SIGTERM)
        assert_saved(run)


@matrix
def test_sigusr1_to_a_torchrun_that_handles_it_saves(tmp_path: Path) -> None:
    with running(tmp_path / "run", "walk", options=(SIGNALS, "--shutdown-timeout=315")) as run:
        run.launcher.send_signal(signal.SIGUSR1)
        assert_saved(run)
        assert "advice: None" in run.console()


@matrix
def test_a_killed_torchrun_leaves_ranks_that_save(tmp_path: Path) -> None:
    with running(tmp_path / "run", "walk") as run:
        run.launcher.kill()
        assert_saved(run)
        assert "torchrun (pid" in run.console()


@pytest.mark.full
def test_a_killed_torchrun_of_the_first_of_two_nodes_lets_short_steps_be_saved(
    tmp_path: Path,
) -> None:
    """The other node ends when it has missed the store for RECONNECT_SECONDS."""
    folder = tmp_path / "run"
    console = tmp_path / "console.txt"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        f"--master-port={port}",
    ]
    program = ["tests/distributed/fault_tolerance/rank_program.py", str(folder), "walk"]
    with console.open("w") as output:
        places = {"cwd": REPOSITORY, "env": ENVIRONMENT, "stdout": output, "stderr": output}
        nodes = [
            subprocess.Popen([sys.executable, *launcher, f"--node-rank={node}", *program], **places)
            for node in (0, 1)
        ]
    try:
        wait_for(lambda: Run(nodes[0], folder, console).step(1) >= 2)
        everyone = [process for node in nodes for process in family(node.pid)]
        nodes[0].kill()
        _, alive = psutil.wait_procs(everyone, timeout=END_SECONDS)
        assert not alive, console.read_text()
    finally:
        for node in nodes:
            end_family(node)
    run = Run(nodes[0], folder, console)
    log = console.read_text()
    first, second = run.saved_steps()
    assert run.status().status == SAVED_AND_STOPPED and first == second, log
    assert (
        log.count("the run's store with it: other nodes may end before the step is saved") == 1
    ), log
    assert log.count("saves after this step") == 1, log


@pytest.mark.full
def test_a_save_that_takes_too_long_is_ended_and_tells_where_it_is(tmp_path: Path) -> None:
    with running(tmp_path / "run", "slow save", "stop_grace_seconds=3") as run:
        run.launcher.send_signal(signal.SIGTERM)
        assert run.ends_within(END_SECONDS) != 0
        assert run.saved_steps() == []
        assert run.status().status == NOT_SAVED_IN_TIME
        assert "waits_for_ever" in (run.folder / "stacks" / "rank-00000.txt").read_text()


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ('{"status": 75, "message": "step 3"}', 75),
        ('{"status": 0, "message": ""}', 0),
        (None, 1),
        ("{", 1),
    ],
)
def test_the_status_program_ends_as_the_run_did(
    tmp_path: Path, left: str | None, expected: int
) -> None:
    if left is not None:
        (tmp_path / EXIT_STATUS_FILE).write_text(left)
    command = [sys.executable, "launch/exit_status.py", str(tmp_path)]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, check=False
    )
    assert done.returncode == expected, done.stderr
    nowhere = [*command[:2], str(tmp_path / "runs")]
    done = subprocess.run(
        nowhere, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, check=False, text=True
    )
    assert done.returncode == 1 and f'there is no folder "{tmp_path / "runs"}"' in done.stdout
