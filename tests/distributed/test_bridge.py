"""Messages between ranks that train and ranks of engines.

Where one is lost, the others do not wait for it.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.programs import run

pytestmark = pytest.mark.distributed

SENT = [(rank, number) for rank in (2, 3) for number in range(3)]


@pytest.fixture(scope="module")
def told() -> dict[str, list[Any]]:
    """What each of four ranks reports, by behaviour."""
    return ast.literal_eval(run("-m", "tests.distributed.bridge_program", timeout=300).stdout)


@pytest.mark.parametrize("behaviour", ["closes", "closes lazily"])
def test_messages_come_in_order_however_long_they_take(
    told: dict[str, list[Any]], behaviour: str
) -> None:
    """Lazily: as in a run of many ranks."""
    assert told[behaviour] == [SENT, SENT, [], []]


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [("breaks off", "RuntimeError"), ("unreadable", "UnreadableMessageError")],
)
def test_what_is_no_whole_message_is_an_error_of_every_method(
    told: dict[str, list[Any]], behaviour: str, error: str
) -> None:
    expected = f"receive {error}; send {error}; close {error}; "
    assert told[behaviour][:2] == [expected] * 2
