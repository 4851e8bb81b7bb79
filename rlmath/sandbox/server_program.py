"""The program that the sandboxes' server runs in.

It imports numpy and sympy once, prepares what all sandboxes share, and serves (`server`).

    python -c BOOTSTRAP <folder of rlmath> <settings as JSON>
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterable, Sequence

from rlmath.sandbox import kernel
from rlmath.sandbox.calls import Limits
from rlmath.sandbox.frames import framed
from rlmath.sandbox.process import Confinement
from rlmath.sandbox.server import Server, ServerSettings
from rlmath.workers.process_tree import PAGE_BYTES

PRELOADED: Sequence[str] = (
    "bisect cmath collections copy datetime decimal fractions functools heapq inspect itertools "
    "json math operator re "
    "random statistics string textwrap time typing dataclasses numpy numpy.fft numpy.linalg "
    "numpy.polynomial "
    "numpy.random sympy sympy.abc sympy.combinatorics sympy.geometry sympy.ntheory sympy.stats"
).split()
"""Modules that sandboxes have from the start, where they are installed."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""All of the environment of the server and of its sandboxes."""


def main() -> None:
    """Prepare what all sandboxes share, then serve.

    `sys.argv` is the program, the folder of rlmath and the settings.
    """
    if kernel.fix_addresses():
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    folder, settings_json = sys.argv[1:]
    message = json.loads(settings_json)
    limits = Limits(**message.pop("limits"))
    descriptor = message.pop("socket")
    settings = ServerSettings(limits=limits, **message)
    # A cluster, Ctrl-C and torchrun send these signals to all processes of a job; only the leader
    # ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as control:
        try:
            control.set_inheritable(False)
            sys.path.remove(folder)
            _be_killed_first()
            os.environ.clear()
            os.environ.update(ENVIRONMENT)
            preload(settings.preload)
            confinement = prepare_confinement(settings)
        except Exception as error:
            control.sendall(
                framed(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
            )
            return
        gc.collect()
        gc.freeze()
        Server(control, settings, confinement).serve()


def _be_killed_first() -> None:
    """Have the largest sandbox killed, not the trainer, where the machine runs out of memory.

    Sandboxes inherit this from the server."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def preload(names: Iterable[str]) -> None:
    """Import modules that are installed, and use sympy once, so that its caches are filled."""
    # Filters that libraries set would show warnings that a notebook does not.
    with warnings.catch_warnings():
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    if (sympy := sys.modules.get("sympy")) is not None:
        x = sympy.Symbol("x")
        sympy.factorint(5040)
        sympy.solve(x**2 - 2, x)
        sympy.integrate(x**2, x)
        sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)


def prepare_confinement(settings: ServerSettings) -> Confinement:
    """The confinement of all sandboxes; OSError where the kernel refuses Landlock's rules."""
    uses_landlock = settings.isolation == "landlock"
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[0])
    return Confinement(
        limits=settings.limits,
        instructions=kernel.make_filter(settings.isolation),
        ruleset=kernel.make_ruleset(kernel.readable_paths()) if uses_landlock else None,
        address_space_bytes=pages * PAGE_BYTES + settings.limits.memory_bytes,
        null=os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC),
    )
