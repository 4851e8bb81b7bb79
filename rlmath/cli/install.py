"""Make a virtual environment from lock files, or install one of them into the present environment.

    rlmath install cpu                                                      # or gpu: into this environment
    python -m rlmath.cli.install .venv requirements/cpu.txt --project       # as `make` does it, from a checkout

An environment of the second kind is made anew unless its stamp equals the fingerprint of all that
went into it: the interpreter, the place, the lock files, this file and setup.py. The stamp is
written last, so an installation that was cut off is made anew.

Needs nothing but the standard library of Python 3.11 or 3.12.
"""

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlmath.config.shipped_files import PACKAGE, shipped

ROOT = PACKAGE.parent
TRANSFORMER_ENGINE = "transformer-engine"
"""Packages of the lock for GPUs that begin so are those of `policy.transformer_impl`."""
FROM_SOURCE = "transformer-engine-torch=="
"""A package of the lock for GPUs that compiles against the torch that is installed before it."""
WITHOUT_TRANSFORMER_ENGINE = "--without-transformer-engine"
LINE_SECONDS = 20.0
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    arguments = read_arguments()
    check_interpreter()
    with open(
        f"{arguments.environment}.lock", "w"
    ) as lock:  # a second `make` waits here, then finds all done
        fcntl.flock(lock, fcntl.LOCK_EX)
        needed_fingerprint = fingerprint(arguments)
        stamp = arguments.environment / ".stamp"
        runs = os.access(
            arguments.environment / "bin/python", os.X_OK
        )  # also false where the link's target is gone
        if not (runs and stamp.exists() and read(stamp) == needed_fingerprint):
            stamp.unlink(
                missing_ok=True
            )  # what a cut-off installation leaves must not pass for current
            install(arguments)
            stamp.write_text(needed_fingerprint, encoding="utf-8")


def command(argv: Sequence[str]) -> int:
    """`rlmath install`; exit status 0, SystemExit with a message where it fails."""
    parser = argparse.ArgumentParser(description="Install the versions that are proven together.")
    parser.add_argument(
        "device", choices=("cpu", "gpu"), help="which lock: that of CPUs or of NVIDIA GPUs"
    )
    parser.add_argument(
        WITHOUT_TRANSFORMER_ENGINE,
        action="store_true",
        help="gpu: compile nothing, in minutes instead of half an hour; runs then need "
        "policy.transformer_impl=local, which is slower",
    )
    arguments = parser.parse_args(argv)
    device = arguments.device
    check_interpreter()
    if sys.prefix == sys.base_prefix:
        fail(
            f"{sys.executable} is not in a virtual environment, and pip would change the system's "
            "packages. "
            "Make one: python3 -m venv env && env/bin/pip install path/to/rlmath && "
            "env/bin/rlmath install cpu"
        )
    if device == "gpu" and sys.version_info[:2] != (3, 12):
        fail(f"the lock for GPUs is for Python 3.12, this is {sys.version.split()[0]}")
    lock = shipped(f"requirements/{device}.txt")
    if device == "cpu":
        install_locks(sys.executable, [lock])
    else:
        install_gpu_lock(
            sys.executable, lock, with_transformer_engine=not arguments.without_transformer_engine
        )
    say("done; `rlmath doctor` says what there is")
    return 0


def install_gpu_lock(python: str, lock: Path, with_transformer_engine: bool) -> None:
    """Install the packages that come as binaries, then compile what needs the torch among them."""
    binaries, sources = gpu_pins(lock, with_transformer_engine)
    subject = f"{len(binaries)} packages of {lock.name}"
    say(f"installing {subject}")
    run(pip(python, "--only-binary", ":all:", *binaries), subject)
    for pin in sources:
        say(
            f"compiling {pin}, which took 26 minutes on two busy cores; "
            f"{WITHOUT_TRANSFORMER_ENGINE} does without"
        )
        build(pip(python, "--no-build-isolation", pin), pin)


def gpu_pins(lock: Path, with_transformer_engine: bool = True) -> tuple[list[str], list[str]]:
    """The packages of the lock for GPUs that come as binaries, and those that are compiled here."""
    pins = [line.split()[0] for line in read(lock).splitlines() if line and line[0] not in "# "]
    if not with_transformer_engine:
        pins = [pin for pin in pins if not pin.startswith(TRANSFORMER_ENGINE)]
    sources = [pin for pin in pins if pin.startswith(FROM_SOURCE)]
    return [pin for pin in pins if pin not in sources], sources


def build(command: list[str], pin: str) -> None:
    """Run the command of pip that compiles a package, telling how many files are compiled."""
    with tempfile.TemporaryDirectory() as place:
        settings = {
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
            "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
            "TMPDIR": place,
        }

        def compiled() -> str:
            files = [name for _, _, names in os.walk(place) for name in names]
            count = sum(name.endswith(".o") for name in files)
            return f", {count} file{'s' if count != 1 else ''} compiled"

        if call(command, pin, progress=compiled, env=os.environ | settings):
            fail_of(command)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path, help="the folder to make")
    parser.add_argument("locks", type=Path, nargs="+", help="lock files; a later one wins")
    parser.add_argument(
        "--project", action="store_true", help="also install this repository, editable"
    )
    arguments = parser.parse_args()
    arguments.environment = arguments.environment.absolute()
    return arguments


def check_interpreter() -> None:
    interpreter = f"{sys.executable} is Python {sys.version.split()[0]} on {sys.platform}"
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        fail(
            f"{interpreter}; Python 3.11 or 3.12 is needed. Name one: make "
            "PYTHON=/path/to/python3.11 ..."
        )
    if sys.platform != "linux":
        fail(
            f"{interpreter}; vLLM's CPU build exists for Linux only. Use a Linux machine or "
            "container."
        )
    if not (find_spec("venv") and find_spec("ensurepip")):
        minor = sys.version_info.minor
        fail(
            f"{interpreter}, without its venv module. On Debian or Ubuntu: apt-get install "
            f"python3.{minor}-venv"
        )


def fingerprint(arguments: argparse.Namespace) -> str:
    """Hash of everything that decides what the environment holds."""
    files = [Path(__file__), *arguments.locks]
    if arguments.project:
        files.append(ROOT / "setup.py")
    digest = hashlib.sha256()
    for part in (
        sys.version,
        os.uname().machine,
        str(arguments.environment),
        str(ROOT),
        *map(read, files),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def install(arguments: argparse.Namespace) -> None:
    say(f"making {arguments.environment.name} with {sys.executable}")
    run([sys.executable, "-m", "venv", "--clear", str(arguments.environment)])
    python = str(arguments.environment / "bin/python")
    install_locks(python, arguments.locks)
    if arguments.project:
        run(pip(python, "--no-build-isolation", "--editable", str(ROOT)))
    say(f"{arguments.environment.name} is ready")


def install_locks(python: str, locks: list[Path]) -> None:
    """Install torch alone, then the packages of all locks.

    Torch comes from pip's own sources or else from PyTorch's index of CPU builds: if that index
    cannot be reached, naming it makes pip retry for every package. The locks say what fits
    together: packages' own requirements, also those about Python versions, are ignored."""
    pins = [
        line.split()[0]
        for lock in locks
        for line in read(lock).splitlines()
        if line.startswith("torch==")
    ]
    if pins:
        say(f"installing {pins[-1]}, the first and largest part")
        with tempfile.TemporaryFile("w+", errors="replace") as messages:
            if call(pip(python, pins[-1]), pins[-1], stderr=messages):
                messages.seek(0)
                say(f"pip's own sources say: {messages.read().strip()}\nasking {TORCH_CPU_INDEX}")
                run(pip(python, "--index-url", TORCH_CPU_INDEX, pins[-1]), pins[-1])
    for lock in locks:
        say(f"installing {lock_line(lock)}")
        run(pip(python, "--ignore-requires-python", "-r", str(lock)), lock_line(lock))


def pip(python: str, *arguments: str) -> list[str]:
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "-qq"]
    return [python, "-m", "pip", "install", *options, *arguments]


def run(command: list[str], subject: str = "packages") -> None:
    if call(command, subject):
        fail_of(command)


def fail_of(command: list[str]) -> None:
    fail(f"this failed: {' '.join(command)}")


def call(
    command: list[str], subject: str, progress: Callable[[], str] = str, **outputs: Any
) -> int:
    """Run a command; its exit status.

    Every LINE_SECONDS a line says that it is still running, and its `progress`."""
    started = time.monotonic()
    process = subprocess.Popen(command, **outputs)
    while True:
        try:
            return process.wait(LINE_SECONDS)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - started
            say(f"still installing {subject}, {seconds:.0f} s so far{progress()}")


def lock_line(lock: Path) -> str:
    """The number of packages of a lock and its name, for people."""
    count = sum("==" in line[:80] and line[0] != "#" for line in read(lock).splitlines())
    return f"the {count} packages of {lock.name}"


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


def fail(text: str) -> None:
    sys.exit(f"install: {text}")


if __name__ == "__main__":
    main()
