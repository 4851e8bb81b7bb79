"""What a rank does about an error before anything else, and which settings a start tells."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.config.load import config_as_yaml, load_config
from rlmath.config.run_files import LOG_FILE
from rlmath.config.schema import Kind
from rlmath.run.join import OnError, log_settings


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


# ---------------------------------------------------------------- settings


@pytest.fixture
def handlers_as_before() -> Iterator[None]:
    """Log files that a test opens are closed after it."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
        handler.close()


@pytest.mark.usefixtures("handlers_as_before")
@pytest.mark.parametrize(("kind", "is_told"), [("grpo", True), ("sft", False)])
def test_the_console_has_what_is_changed_and_the_log_file_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Kind, is_told: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    paths = [f"run.output_dir={tmp_path}", "model.path=m", "data.train_path=t"]
    changes = [
        "run.seed=1",
        "data.prompts_per_step=8",
        "sft.held_out_share=0",
        "sft.eval_every_steps=3",
    ]
    config = load_config([], [*paths, *changes])
    log_settings(config, kind)
    (settings,) = (
        record.getMessage() for record in caplog.records if record.levelno == logging.INFO
    )
    first, *lines = settings.splitlines()
    assert first == "Settings that are not at their defaults; all are in config.yaml:"
    supervised = "  sft: held_out_share=0.0, eval_every_steps=3"
    assert (supervised in lines) == (not is_told)
    assert [line for line in lines if line != supervised] == [
        f"  run: output_dir={tmp_path}",
        "  model: path=m",
        "  data: train_path=t, prompts_per_step=8",
    ]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    unused = "Without effect in a GRPO run: sft.held_out_share=0.0, sft.eval_every_steps=3"
    assert warnings == [unused] * is_told
    debug = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    assert f"The settings of this run:\n{config_as_yaml(config)}" in debug
    assert "prompts_per_step: 8" in (tmp_path / LOG_FILE).read_text()


@pytest.mark.usefixtures("handlers_as_before")
def test_a_log_file_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "a file"
    folder.touch()
    paths = [f"run.output_dir={folder}", "model.path=m", "data.train_path=t"]
    log_settings(load_config([], paths), "grpo")
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno > logging.INFO)
    assert warning.startswith(f"{folder}/") and "The run continues without it" in warning
