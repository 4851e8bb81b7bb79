"""What is said at the end of a run, and what the same command does then."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlmath.config.load import load_config
from rlmath.distributed.fault_tolerance.exit_codes import read_exit_status
from rlmath.distributed.fault_tolerance.preemption import StopRequest
from rlmath.run.endings import END, Ending, conclude

GIVEN = {"step": 7, "steps": 8, "reason": "SIGTERM", "error": "why", "left": "nothing is left"}


@pytest.mark.parametrize(
    "kind", [kind for kind in END if kind not in ("finished", "cannot resume")]
)
def test_every_end_says_from_which_step_the_same_command_goes_on(kind: str) -> None:
    assert "the same command resumes after step 6" in Ending(END[kind], 6, **GIVEN).line
    assert "the same command starts from the beginning" in Ending(END[kind], None, **GIVEN).line


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("kind", END)
def test_every_end_but_the_good_one_is_told_and_all_are_written(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reporter tells of the good one."""
    caplog.set_level(logging.INFO)
    paths = [f"run.output_dir={tmp_path}", "model.path=m", "data.train_path=t"]
    config = load_config([], paths)
    ending = Ending(END[kind], 6, **GIVEN)
    stop = StopRequest(grace_seconds=1.0, output_dir=str(tmp_path), rank=0)
    assert conclude(ending, config, stop, rank=0) == ending.status
    assert (ending.line in caplog.text) == (kind != "finished")
    written = read_exit_status(tmp_path)
    assert written.status == ending.status
    assert written.message == ending.message.partition("\n")[0]
