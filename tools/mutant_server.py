"""Sessions of pytest in children of a process that has already imported the tests' libraries.

`tools/mutant_sessions.py` starts this file in a copy of the project and writes a JSON line for each
session, with its `arguments` and whether it is `forked`; the answer is a line with its exit status,
negative for a signal.

A forked session is what `python -m pytest` would be if it had imported its libraries already:
torch, transformers and Megatron take seconds, most tests tenths of one. Which libraries, the plugin
in `tools/mutant_recorder.py` writes into the copy when a session's tests are collected, so the
first session imports all by itself. Modules of the project are never imported here: each session
reads them from the copy. Libraries are imported and nothing else, with one thread for OpenMP, since
a child has no thread but its own; once some library has started one, no session is forked any more.

A session that is not forked is a new process, for tests with ranks. Neither kind joins threads and
runs what is registered with `atexit` where it is forked: the status is the one that pytest ends
with.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

LIBRARIES = Path(".mutants/libraries")
OUTPUT = ".mutants/output"
STARTS_THREADS = ("pyarrow",)
"""Libraries that start a thread as they are imported."""
IMPORTED_LATE = {"_hypothesis_pytestplugin": "hypothesis"}
"""Library that a plugin of pytest imports at the end of each session, by plugin."""
SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl."""


def import_libraries() -> None:
    """Import what the last session's tests needed, in the order of their imports."""
    names = LIBRARIES.read_text().split() if LIBRARIES.exists() else []
    late = [IMPORTED_LATE[name] for name in names if name in IMPORTED_LATE]
    for name in (*names, *late):
        if name not in sys.modules and name.split(".")[0] not in STARTS_THREADS:
            with contextlib.suppress(
                Exception
            ):  # the session imports it again, and says what is wrong
                importlib.import_module(name)
    gc.freeze()


def has_threads() -> bool:
    """Whether this process has a thread besides this one, also one that Python does not know."""
    return len(os.listdir("/proc/self/task")) > 1


def run_session(arguments: Sequence[str], is_forked: bool, server: int) -> NoReturn:
    """Run pytest in this process, a new child of the server, and end it."""
    os.setsid()
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    if not is_forked:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    status = 1
    try:
        gc.enable()
        importlib.invalidate_caches()
        sys.argv = ["pytest", *arguments]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def main() -> None:
    requests = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[0] = os.getcwd()  # as with `python -m pytest`
    gc.disable()
    server = os.getpid()
    for line in requests:
        request = json.loads(line)
        if request["forked"]:
            import_libraries()
        is_forked = request["forked"] and not has_threads()
        if request["forked"] and not is_forked:
            print("A library has started a thread: this session is not forked", flush=True)
        child = os.fork()
        if child == 0:
            requests.close()
            answers.close()
            run_session(request["arguments"], is_forked, server)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


if __name__ == "__main__":
    main()
