"""launch/wait_for_nodes.py: the nodes are counted, and those that are missing are named."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from launch.wait_for_nodes import STORE_NAME, count_nodes, is_mine, main, report_to
from tests.programs import ENVIRONMENT, REPOSITORY, wait_for

ANOTHER = """import sys, socket
import launch.wait_for_nodes as program
socket.gethostname = lambda: "node07"
program.is_mine = lambda host: False
sys.exit(program.main())
"""
"""A node of another name, on the same machine."""


def test_all_nodes_come(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        options = ("--nnodes=2", f"--endpoint=127.0.0.1:{probe.getsockname()[1]}", "--seconds=300")
    other = subprocess.Popen(
        [sys.executable, "-c", ANOTHER, *options], cwd=REPOSITORY, env=ENVIRONMENT
    )
    try:
        assert main(options) == 0 and other.wait(60) == 0
    finally:
        other.kill()
        other.wait()
    assert capsys.readouterr().err == ""


@pytest.fixture
def head() -> dist.TCPStore:
    """The store of the first node."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def came(pool: ThreadPoolExecutor, head: dist.TCPStore) -> Future[str]:
    """What node07 is told, which has said that it is there."""
    node = dist.TCPStore("127.0.0.1", head.port, wait_for_workers=False)
    report = pool.submit(report_to, node, "node07", 300.0)
    wait_for(lambda: head.check([f"{STORE_NAME}/host/node07"]))
    return report


def test_a_node_that_never_comes_is_named_on_all_that_did(head: dist.TCPStore) -> None:
    with ThreadPoolExecutor() as pool:
        other = came(pool, head)
        message = count_nodes(head, "node06", 3, 0.0, ["node06", "node07", "node08"])
        assert other.result() == message
    assert (
        message == "the nodes are not all there after 0 s: 2 of 3 nodes are here; missing: node08"
    )


def test_a_wrong_endpoint_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--nnodes=2", "--endpoint=node01"])
    assert "needed: HEAD:PORT" in capsys.readouterr().err
    assert main(["--nnodes=2", "--endpoint=no-such-host.invalid:1234"]) == 1
    assert "does not reach no-such-host.invalid:1234" in capsys.readouterr().err


def test_a_node_knows_its_own_addresses() -> None:
    assert is_mine("127.0.0.1") and not is_mine("192.0.2.1")
