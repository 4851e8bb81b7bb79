"""Events of the log: what is written, what a resumed run keeps, and a disk that refuses."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmath.telemetry import events
from rlmath.telemetry.events import EventFile, event, read_events, take_back_events
from tests.disks import files_no_larger_than


@pytest.fixture
def log(tmp_path: Path) -> Iterator[logging.Logger]:
    logger = logging.getLogger("rlmath.test_events")
    handler = EventFile(tmp_path)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)


def rows(folder: Path) -> list[tuple]:
    event_rows = [
        json.loads(line)
        for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [(row["kind"], row["step"], row["text"]) for row in event_rows]


def test_warnings_and_lines_with_a_kind_are_events(log: logging.Logger, tmp_path: Path) -> None:
    log.info("Starting", extra=event("start"))
    log.info("not an event")
    log.info("step 3/9", extra=event("step", 3))
    log.warning("slow disk\x1b[2J %s", "x" * 5000)
    log.warning("Step 4, alert: cut", extra=event("alert", 4, text="cut"))
    try:
        raise OSError("lost")
    except OSError:
        log.exception("failed")
    start, slow, alert, failed = rows(tmp_path)
    assert start == ("start", None, "Starting") and alert == ("alert", 4, "cut")
    assert (
        slow[:2] == ("warning", 3)
        and slow[2].startswith("slow disk\\x1b[2J xxx")
        and len(slow[2]) == 1500
    )
    assert failed[:2] == ("error", 3) and "OSError: lost" in failed[2]


def test_a_resumed_run_keeps_what_was_until_its_step(log: logging.Logger, tmp_path: Path) -> None:
    log.info("Starting", extra=event("start"))
    log.info("a", extra=event("checkpoint", 2))
    log.info("b", extra=event("checkpoint", 4))
    log.error("c", extra=event("rollback", 5))
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"kind": 3}\n{"unfinished')
    assert sum(isinstance(row, ValueError) for row in read_events(tmp_path / "events.jsonl")) == 1
    take_back_events(tmp_path, 2, 4)
    assert rows(tmp_path) == [
        ("start", None, "Starting"),
        ("checkpoint", 2, "a"),
        ("rollback", 5, "c"),
        ("took back", 2, ""),
    ]


def test_events_are_bounded_and_a_disk_that_refuses_is_told_once(
    log: logging.Logger,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with files_no_larger_than(1):
        log.warning("one")
        log.warning("two")
    assert [
        record.getMessage()
        for record in caplog.records
        if "cannot be written" in record.getMessage()
    ] != []
    log.warning("three")
    assert not any("three" in line for line in (tmp_path / "events.jsonl").read_text().splitlines())
    monkeypatch.setattr(events, "MOST_EVENTS", 2)
    (tmp_path / "other").mkdir()
    handler = EventFile(tmp_path / "other")
    for number in range(5):
        handler.handle(logging.LogRecord("a", logging.WARNING, "", 0, f"{number}", None, None))
    assert [text for _, _, text in rows(tmp_path / "other")] == ["0", "1"]
