"""What the launcher of this rank, torchrun, does with signals, as far as a rank can see it."""

from __future__ import annotations

import os
import re
from pathlib import Path

WANTED_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_DEFAULT_SECONDS = 30.0
_TIMEOUT_FLAG = re.compile(r"--shutdown[-_]timeout(?:=|\0)(\d+)")


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def launcher_advice(grace_seconds: float) -> str | None:
    """How torchrun should be started so that a run can stop in order; None if it was.

    torchrun ends with signals that it does not handle, without a word to its ranks, and kills ranks that are still
    there some seconds (30) after it passed a signal on.
    """
    if not under_torchrun():
        return None
    handled = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
    patience = _shutdown_seconds()
    wanted = []
    if "SIGUSR1" not in handled:
        wanted.append(f"--signals-to-handle={','.join(WANTED_SIGNALS)}")
    if patience < grace_seconds:
        wanted.append(f"--shutdown-timeout={grace_seconds:.0f}")
    if not wanted:
        return None
    return (
        f"torchrun handles {','.join(handled)} and kills the ranks {patience:g} s after a signal; "
        f"run.stop_grace_seconds is {grace_seconds:g}. To save and stop in order on SIGTERM and SIGUSR1, start it with "
        f"{' '.join(wanted)}"
    )


def _shutdown_seconds() -> float:
    """How long the parent, torchrun, waits before it kills its ranks."""
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        command = ""
    flag = _TIMEOUT_FLAG.search(command)
    if flag:
        return float(flag.group(1))
    named = ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    return next((float(os.environ[name]) for name in named if name in os.environ), _DEFAULT_SECONDS)
