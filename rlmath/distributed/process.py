"""Python's garbage collector and a program's start.

What a training program imports is 700,000 objects that stay. Looking for garbage among them, over and over while they
come, takes a third of the time of importing them, half a second in every full collection later, and two seconds at the
program's end. So the programs in `launch/` start with `gc.disable()`, and call `freeze_live_objects` later.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal


def freeze_live_objects() -> None:
    """Call it when what is there will stay: no collection looks at it again. From here on garbage is collected, also
    where it was not before. May be called again, when more has come."""
    gc.collect()
    gc.freeze()
    gc.enable()


def skip_collection_at_exit() -> None:
    """Call it last: what is there goes with the process, the interpreter need not look through it."""
    gc.freeze()


_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int) -> None:
    """From now on this process is killed when its parent, or the parent's thread that started it, ends. Where `parent`,
    its process id, is gone already, this process ends now."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Take `end_with_parent` back."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)
