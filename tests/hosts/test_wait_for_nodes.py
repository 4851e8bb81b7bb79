"""launch/wait_for_nodes.py: the nodes are counted, and those that are missing are named."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launch.wait_for_nodes import is_mine, main
from tests.programs import ENVIRONMENT, REPOSITORY


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def others() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for one in started:
        one.kill()
        one.wait()


ANOTHER = """import sys, socket
import launch.wait_for_nodes as program
name = sys.argv.pop(1)
socket.gethostname = lambda: name
program.is_mine = lambda host: False
print("imported", flush=True)
sys.exit(program.main())
"""
"""A node of another name, on the same machine."""


def start_another(name: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ANOTHER, name, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = subprocess.Popen(command, cwd=REPOSITORY, env=ENVIRONMENT, text=True, **pipes)
    assert started.stdout.readline() == "imported\n"
    return started


def test_all_nodes_come(endpoint: str, others: list, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--nnodes=2", f"--endpoint={endpoint}", "--seconds=60")
    others.append(start_another("node07", *asked))
    assert main(asked) == 0
    assert others[0].wait(30) == 0
    assert capsys.readouterr().err == ""


def test_a_node_that_never_comes_is_named_on_all_that_did(
    endpoint: str, others: list, capsys: pytest.CaptureFixture[str]
) -> None:
    names = f"{socket.gethostname()},node07,node08"
    asked = ("--nnodes=3", f"--endpoint={endpoint}", "--seconds=6", f"--nodes={names}")
    others.append(start_another("node07", *asked))
    assert main(asked) == 1
    told = "the nodes are not all there after 6 s: 2 of 3 nodes are here; missing: node08\n"
    assert capsys.readouterr().err == told
    assert others[0].wait(30) == 1 and others[0].stderr.read() == told


def test_a_wrong_endpoint_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nnodes=2", "--endpoint=node01"]) == 2
    assert "needed: HEAD:PORT" in capsys.readouterr().err
    assert main(["--nnodes=2", "--endpoint=no-such-host.invalid:1234"]) == 1
    assert "does not reach no-such-host.invalid:1234" in capsys.readouterr().err


def test_a_node_knows_its_own_addresses() -> None:
    assert is_mine("127.0.0.1") and not is_mine("192.0.2.1")
