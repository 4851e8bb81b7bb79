"""What a rank does about an error before anything else."""

from __future__ import annotations

import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.run.join import OnError


@pytest.mark.parametrize(
    ("rank", "ranks", "error", "level", "writes"),
    [
        (0, 1, RuntimeError("no memory"), logging.ERROR, True),
        (0, 2, RuntimeError("no memory"), logging.DEBUG, True),
        (1, 2, RuntimeError("no memory"), logging.DEBUG, False),
        (1, 2, ValueError("no number"), logging.ERROR, True),
    ],
    ids=["alone", "the first", "another", "another's own"],
)
def test_an_error_that_a_peer_may_have_caused_is_logged_quietly_and_writes_one_last_step(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    ranks: int,
    error: Exception,
    level: int,
    writes: bool,
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    reasons: list[str] = []
    trainer: Any = SimpleNamespace(write_last_step=reasons.append)
    on_error = OnError()
    on_error.trainer = trainer
    on_error(type(error), error, None)
    kind = type(error).__name__
    assert reasons == [f"failed on rank {rank}: {kind}: {error}"] * writes
    place = f"rank {rank} on {socket.gethostname()}"
    hint = f"{place} fails, as it does when another rank has ended: looking for the cause"
    cause = (level, f"{place} failed; the run ends: {kind}: {error}")
    hints = [(logging.WARNING, hint)] if level == logging.DEBUG else []
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [*hints, cause]


def test_without_an_error_or_before_the_trainer_is_built_no_step_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = ValueError("no model")
    OnError()(None, None, None)
    assert caplog.messages == []
    OnError()(ValueError, error, None)
    assert len(caplog.messages) == 1 and caplog.messages[0].endswith("ValueError: no model")
