"""Profiles of chosen steps (`telemetry.profile_steps`), of torch's profiler on each rank.

profile/step-000005-rank-0.json.gz   for ui.perfetto.dev or chrome://tracing; the phases of the step are named
profile/step-000005-rank-0.md        seconds of the phases, and the operations that took longest
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, profile

from rlmath.config.run_files import PROFILE_FOLDER
from rlmath.distributed.phase_timers import PHASE_PREFIX

logger = logging.getLogger(__name__)

ROWS = 30
"""Operations of a table."""
NAME_CHARACTERS = 80


@dataclass(frozen=True)
class StepProfiler:
    steps: Collection[int]
    """Counted from 1."""
    output_dir: Path
    rank: int
    on_gpu: bool

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile step `number` around its work; do nothing where it is not to be profiled.

        What the disk refuses is a warning."""
        if number not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        with profile(activities=activities, acc_events=False) as profiler:
            yield
        try:
            self._write(profiler, number)
        except (OSError, RuntimeError) as error:
            logger.warning(
                "The profile of step %d of rank %d could not be written: %s",
                number,
                self.rank,
                error,
            )

    def _write(self, step_profile: profile, number: int) -> None:
        """Write a step's trace and table."""
        folder = self.output_dir / PROFILE_FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"step-{number:06d}-rank-{self.rank}.md"
        step_profile.export_chrome_trace(str(path.with_suffix(".json.gz")))
        path.write_text(
            profile_table(step_profile.key_averages(), number, self.rank, on_gpu=self.on_gpu),
            encoding="utf-8",
        )
        if self.rank == 0:
            logger.info("Profile of step %d: %s", number, path)


def profile_table(averages: EventList, number: int, rank: int, on_gpu: bool) -> str:
    """Torch's averages as Markdown.

    Phases are sorted by all their time, operations by their own, without callees."""
    phases = EventList(average for average in averages if average.key.startswith(PHASE_PREFIX))
    operations = EventList(
        average for average in averages if not average.key.startswith(PHASE_PREFIX)
    )
    own_time_column = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    tables = (
        ("Phases", phases.table(sort_by="cpu_time_total", row_limit=ROWS)),
        (
            "Operations",
            operations.table(
                sort_by=own_time_column, row_limit=ROWS, max_name_column_width=NAME_CHARACTERS
            ),
        ),
    )
    blocks = [f"## {title}\n\n```\n{table}\n```\n" for title, table in tables]
    return "\n".join([f"# Step {number}, rank {rank}\n", *blocks])
