"""Messages between ranks that train and ranks of engines: where one is lost, the others do not wait for it."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.programs import ENVIRONMENT, REPOSITORY
from tests.selection import keeping

pytestmark = pytest.mark.distributed

RANKS, SECONDS = 4, 300
SENT = str([(rank, number) for rank in (2, 3) for number in range(3)])


def printed_by_ranks(behaviour: str, **environment: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    module = "tests.distributed.bridge_program"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(port), behaviour],
            cwd=REPOSITORY,
            env=ENVIRONMENT | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        return [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize(
    "lazily", keeping([{}, {"TORCH_GLOO_LAZY_INIT": "1"}], {}), ids=["connected", "lazily"]
)
def test_messages_come_in_order_however_long_they_take(lazily: dict[str, str]) -> None:
    """Lazily: as in a run of many ranks."""
    trainers, engines = [f"received {SENT}\n"] * 2, ["received []\n"] * 2
    assert printed_by_ranks("closes", **lazily) == trainers + engines


@pytest.mark.parametrize(
    ("behaviour", "error"), [("breaks off", "RuntimeError"), ("unreadable", "UnreadableMessageError")]
)
def test_what_is_no_whole_message_is_an_error_of_every_method(behaviour: str, error: str) -> None:
    expected = f"receive {error}; send {error}; close {error}; "
    assert printed_by_ranks(behaviour)[:2] == [expected] * 2
