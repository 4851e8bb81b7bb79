"""A process that the kernel ends with its parent, however that ends (Linux, prctl(2))."""

from __future__ import annotations

import ctypes
import os
import signal

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
