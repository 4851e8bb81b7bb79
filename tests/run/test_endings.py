"""What is said at the end of a run, and what the same command does then."""

from __future__ import annotations

import pytest

from rlmath.run.endings import END, Ending

GIVEN = {"step": 7, "steps": 8, "reason": "SIGTERM", "error": "why", "left": "nothing is left"}


@pytest.mark.parametrize(
    "kind", [kind for kind in END if kind not in ("finished", "cannot resume")]
)
def test_every_end_says_from_which_step_the_same_command_goes_on(kind: str) -> None:
    assert "the same command resumes after step 6" in Ending(END[kind], 6, **GIVEN).line
    assert "the same command starts from the beginning" in Ending(END[kind], None, **GIVEN).line
