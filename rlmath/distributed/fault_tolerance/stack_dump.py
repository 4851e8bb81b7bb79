"""Where every thread of this process is, as text."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

FOLDER = "stacks"
"""Where the run's folder holds the stacks of ranks that hung."""


def stacks_text() -> str:
    """The stacks of all Python threads, the main thread's first, innermost call last."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    parts = []
    for thread in threads:
        if thread.ident in frames:
            stack = "".join(traceback.format_stack(frames[thread.ident]))
            parts.append(f"Thread {thread.name}:\n{stack}")
    return "\n".join(parts)


def innermost_call() -> str:
    """ "all_reduce (distributed_c10d.py:2800)": what the main thread does now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere"
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def stacks_path(output_dir: str | Path, rank: int) -> Path:
    return Path(output_dir) / FOLDER / f"rank-{rank:05d}.txt"


def write_stacks(output_dir: str | Path, rank: int, heading: str) -> Path:
    """Write this process's stacks under a line that says why; the path. OSError where that cannot be."""
    path = stacks_path(output_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{heading}\n\n{stacks_text()}", encoding="utf-8")
    return path
