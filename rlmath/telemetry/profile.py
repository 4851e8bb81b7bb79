"""Profiles of chosen steps (`telemetry.profile_steps`): what torch's profiler saw on each rank, as a trace and a table.

profile/step-000005-rank-0.json.gz   for ui.perfetto.dev or chrome://tracing; the phases of the step are named
profile/step-000005-rank-0.md        seconds of the phases, and the operations that took longest
"""

from __future__ import annotations

import gzip
import logging
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from rlmath.config.run_files import PROFILE_FOLDER
from rlmath.distributed.phase_timers import PHASE_PREFIX

logger = logging.getLogger(__name__)

ROWS = 30
"""Operations of a table."""
NAME_CHARACTERS = 80


@dataclass(frozen=True)
class StepProfiler:
    """Profiles the steps of a run on this rank."""

    steps: Collection[int]
    """Counted from 1."""
    output_dir: Path
    rank: int
    on_gpu: bool

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number`; nothing where it is not to be profiled. What the disk refuses is a warning."""
        if number not in self.steps:
            yield
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        with profile(activities=activities, acc_events=False) as found:
            yield
        try:
            self._write(found, number)
        except (OSError, RuntimeError) as error:
            logger.warning(
                "The profile of step %d of rank %d could not be written: %s", number, self.rank, error
            )

    def _write(self, found: profile, number: int) -> None:
        folder = self.output_dir / PROFILE_FOLDER
        folder.mkdir(exist_ok=True)
        stem = f"step-{number:06d}-rank-{self.rank}"
        plain, packed = folder / f"{stem}.json.tmp", folder / f"{stem}.json.gz.tmp"
        try:
            found.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target)
            packed.replace(folder / f"{stem}.json.gz")
        finally:
            for scratch in (plain, packed):
                scratch.unlink(missing_ok=True)
        table = profile_table(found.key_averages(), number, self.rank, self.on_gpu)
        (folder / f"{stem}.md").write_text(table, encoding="utf-8")
        if self.rank == 0:
            logger.info("Profile of step %d: %s", number, folder / f"{stem}.md")


def profile_table(averages: Sequence[Any], number: int, rank: int, on_gpu: bool) -> str:
    """Markdown of torch's averages by name: the phases, then the operations, both by their own time. Times of an
    operation are without those that it calls; of a phase with all that it holds. Milliseconds."""
    phases = [one for one in averages if one.key.startswith(PHASE_PREFIX)]
    others = [one for one in averages if not one.key.startswith(PHASE_PREFIX)]

    def own(one: Any) -> float:
        return one.self_device_time_total if on_gpu else one.self_cpu_time_total

    lines = [f"# Step {number}, rank {rank}", "", "| phase | ms | times |", "|---|---|---|"]
    for one in sorted(phases, key=lambda one: -one.cpu_time_total):
        lines.append(
            f"| {one.key.removeprefix(PHASE_PREFIX)} | {one.cpu_time_total / 1e3:,.1f} | {one.count} |"
        )
    total = sum(map(own, others)) or 1.0
    gpu = (" own GPU ms |", "---|") if on_gpu else ("", "")
    lines += ["", f"| operation |{gpu[0]} own CPU ms | share | times |", f"|---|{gpu[1]}---|---|---|"]
    for one in sorted(others, key=own, reverse=True)[:ROWS]:
        name = one.key[:NAME_CHARACTERS].replace("|", "\\|").replace("\n", " ")
        device = f" {one.self_device_time_total / 1e3:,.1f} |" if on_gpu else ""
        cpu = f"{one.self_cpu_time_total / 1e3:,.1f}"
        lines.append(f"| `{name}` |{device} {cpu} | {own(one) / total:.1%} | {one.count:,} |")
    device = "the GPU" if on_gpu else "this process's threads"
    lines += ["", f"{len(others):,} operations took {total / 1e3:,.1f} ms of {device} together.", ""]
    return "\n".join(lines)
