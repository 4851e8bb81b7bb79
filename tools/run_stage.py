"""Run a stage of the Dockerfile in a root folder with chroot: the nearest proof of it where nothing builds images.

    debootstrap --variant=minbase bookworm /srv/root
    python tools/run_stage.py --stage cpu --root /srv/root            # what the stage does
    python tools/run_stage.py --stage cpu --root /srv/root --start    # then what starts in the image: its CMD

The folder stands for the image that the stage begins FROM. It needs root, and the folder's /proc, /sys, /dev and
network set up (docs/containers.md). What only an engine does is not proven by it: layers, isolation, COPY --from
another stage.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.terminal import escape_terminal
from tools.docker_files import Instruction, context_files, read_stages

REPOSITORY = Path(__file__).resolve().parents[1]
FIRST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOT_FOLDER = PurePosixPath("/")


@dataclass(frozen=True)
class State:
    """What the instructions so far have set for those that follow."""

    environment: dict[str, str] = field(default_factory=lambda: {"PATH": FIRST_PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    folder: PurePosixPath = ROOT_FOLDER
    user: str = "root"
    command: tuple[str, ...] = ()


def main() -> None:
    escape_terminal()
    args = read_arguments()
    try:
        stages = read_stages((args.context / "Dockerfile").read_text(encoding="utf-8"))
        if args.stage not in stages:
            fail(f"the Dockerfile has no stage {args.stage}; it has {', '.join(stages)}")
        instructions = stages[args.stage].instructions
        if args.start:
            sys.exit(start(instructions, args.root))
        run_stage(instructions, args.root, args.context)
    except (ValueError, OSError) as error:
        fail(str(error))
    except subprocess.CalledProcessError as error:
        fail(f"this ended with {error.returncode}: {shlex.join(error.cmd)}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", required=True, help="a stage of the Dockerfile")
    parser.add_argument("--root", type=Path, required=True, help="the folder that stands for its first image")
    parser.add_argument(
        "--context", type=Path, default=REPOSITORY, help="where the Dockerfile and its files are"
    )
    parser.add_argument("--start", action="store_true", help="run only its CMD, and end with its status")
    return parser.parse_args()


def run_stage(instructions: tuple[Instruction, ...], root: Path, context: Path) -> None:
    """Do what the instructions say, in `root`.

    Raises ValueError for an instruction that only an engine can do, CalledProcessError for a command that failed.
    """
    state = State()
    for instruction in instructions:
        print(f"run_stage: line {instruction.line}: {instruction.name} {instruction.text}", flush=True)
        if instruction.name == "RUN":
            command = (*state.shell, instruction.text)
            subprocess.run(inside(root, state, command), check=True)
        elif instruction.name == "COPY":
            copy(instruction, root, state.folder, context)
        else:
            state = changed(state, instruction)
            if instruction.name == "WORKDIR":
                on_disk(root, state.folder).mkdir(parents=True, exist_ok=True)


def start(instructions: tuple[Instruction, ...], root: Path) -> int:
    """Run the CMD as all that was set before asks for; returns its status."""
    state = State()
    for instruction in instructions:
        if instruction.name not in ("RUN", "COPY"):
            state = changed(state, instruction)
    if not state.command:
        raise ValueError("the stage has no CMD")
    state = replace(state, arguments={})  # an ARG is for building only
    return subprocess.run(inside(root, state, state.command)).returncode


def changed(state: State, instruction: Instruction) -> State:
    """The state after an instruction that only sets something."""
    known = state.arguments | state.environment
    text = instruction.text
    match instruction.name:
        case "ENV":
            return replace(state, environment=state.environment | assignments(instruction, known))
        case "ARG":
            return replace(state, arguments=state.arguments | assignments(instruction, known))
        case "SHELL":
            return replace(state, shell=words(instruction))
        case "CMD":
            return replace(state, command=words(instruction))
        case "WORKDIR":
            return replace(state, folder=state.folder / expand(text, known))
        case "USER":
            return replace(state, user=expand(text, known))
    raise ValueError(f"line {instruction.line}: {instruction.name} is not known here; an engine is needed")


def assignments(instruction: Instruction, known: dict[str, str]) -> dict[str, str]:
    """NAME=value pairs, with $NAME and ${NAME} of what was known before this instruction."""
    pairs = [part.partition("=") for part in shlex.split(instruction.text)]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(f"line {instruction.line}: {instruction.name} {instruction.text} needs NAME=value")
    return {name: expand(value, known) for name, _, value in pairs}


def expand(text: str, known: dict[str, str]) -> str:
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: known.get(match[1] or match[2], ""), text)


def words(instruction: Instruction) -> tuple[str, ...]:
    """The exec form, a JSON list of words."""
    try:
        return tuple(json.loads(instruction.text))
    except ValueError:
        raise ValueError(
            f'line {instruction.line}: {instruction.name} {instruction.text} is no list like ["make", "demo"]'
        ) from None


def inside(root: Path, state: State, command: tuple[str, ...]) -> list[str]:
    """The command line that runs `command` in the folder, as the state says and with no variable of this process."""
    variables = [f"{name}={value}" for name, value in (state.arguments | state.environment).items()]
    settled = ["/usr/bin/env", "-i", f"--chdir={state.folder}", *variables]
    return ["chroot", f"--userspec={state.user}", str(root), *settled, *command]


def on_disk(root: Path, path: PurePosixPath) -> Path:
    return root / path.relative_to(ROOT_FOLDER)


def copy(instruction: Instruction, root: Path, folder: PurePosixPath, context: Path) -> None:
    """COPY SOURCE... DESTINATION, from the context and through .dockerignore; all belong to root, as with Docker."""
    *sources, target = instruction.text.split()
    if not sources or instruction.text.startswith("--"):
        raise ValueError(f"line {instruction.line}: COPY {instruction.text} needs an engine")
    destination = on_disk(root, folder / target)
    many = len(sources) > 1 or target.endswith("/") or destination.is_dir()
    files = context_files(context)
    for source in sources:
        found = [path for path in files if path.is_relative_to(source)]
        if not found:
            raise ValueError(
                f"line {instruction.line}: COPY finds no {source}; is it missing, or in .dockerignore?"
            )
        for path in found:
            below = path.relative_to(source)
            if below == Path("."):
                below = Path(path.name) if many else below
            copy_file(context / path, destination / below)


def copy_file(source: Path, target: Path) -> None:
    """With its mode, which Docker keeps, too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def fail(text: str) -> None:
    sys.exit(f"run_stage: {text}")


if __name__ == "__main__":
    main()
