"""The command `rlmath`: one word for each program.

rlmath train --config my.yaml run.total_steps=10
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import rlmath
from rlmath.config.help import nearest_word
from rlmath.config.shipped_files import shipped
from rlmath.config.terminal import ends_with_its_reader, escape_terminal

MISTAKE = 2
TORCH = ("torch", "transformers", "safetensors", "tokenizers")
RUN = (*TORCH, "vllm", "megatron.core")
"""Modules that a program imports beside those which every installation has."""


@dataclass(frozen=True)
class Command:
    """A word after `rlmath`."""

    name: str
    summary: str
    function: str
    """`module:function` of `rlmath.cli`.

    It takes the rest of the command line and returns the exit status."""
    needs: tuple[str, ...] = ()


COMMANDS = (
    Command(
        "demo",
        "train a tiny model on this machine's CPU and show what it learned",
        "demo:main",
        RUN,
    ),
    Command("train", "train a model with GRPO on this machine", "train:train", RUN),
    Command("sft", "train a model on written solutions on this machine", "train:sft", RUN),
    Command(
        "eval", "evaluate a model on benchmarks, or compare evaluations", "train:evaluate", RUN
    ),
    Command("replay", "make a captured step of a run again, and compare", "train:replay", RUN),
    Command(
        "convert", "Hugging Face models to Megatron-Core checkpoints, and back", "convert:main", RUN
    ),
    Command("plan", "predict the seconds of a step on a cluster", "plan:main"),
    Command("plan-memory", "plan the memory of a run, part by part", "plan_memory:main"),
    Command("submit", "submit a run or an evaluation to Slurm", "main:submit", TORCH),
    Command("report", "one HTML page of runs: curves, settings, warnings, samples", "report:main"),
    Command("samples", "show the sampled groups of a run", "samples:main"),
    Command("verify", "verify the answers of a file", "verify_answers:main"),
    Command("sandbox", "run code as a model's call would be run", "sandbox:main"),
    Command("doctor", "what is installed, what is missing, on which machine", "doctor:main"),
    Command(
        "install", "install the versions that are proven together: cpu or gpu", "install:command"
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status of the program.

    It is MISTAKE for a word that is no command or a missing package, and 0 if the reader of the
    output has gone."""
    escape_terminal()
    with ends_with_its_reader():
        return _main(argv)
    return 0


def _main(argv: Sequence[str] | None) -> int:
    """Find the command of the first word and run it with the others; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else MISTAKE
    if words[0] == "--version":
        print(f"rlmath {rlmath.__version__}")
        return 0
    command = next((command for command in COMMANDS if command.name == words[0]), None)
    if command is None:
        hint = nearest_word(words[0], [command.name for command in COMMANDS])
        print(f'rlmath: there is no command "{words[0]}".{hint}\n\n{usage()}', file=sys.stderr)
        return MISTAKE
    asks = {"-h", "--help"} & set(words)
    missing = [] if asks else [name for name in command.needs if not is_installed(name)]
    if missing:
        print(missing_text(command.name, missing), file=sys.stderr)
        return MISTAKE
    module, function = command.function.split(":")
    sys.argv = [f"rlmath {command.name}", *words[1:]]  # argparse's usage has its first word
    run = getattr(importlib.import_module(f"rlmath.cli.{module}"), function)
    try:
        return run(words[1:])
    except KeyboardInterrupt:
        print(f"rlmath {command.name}: interrupted", file=sys.stderr)
        return 130


def submit(argv: Sequence[str]) -> int:
    """Exit status of launch/slurm/submit.py, which is also a program of its own."""
    sys.argv[1:] = argv
    try:
        runpy.run_path(str(shipped("launch/slurm/submit.py")), run_name="__main__")
    except SystemExit as system_exit:
        return (
            system_exit.code
            if isinstance(system_exit.code, int)
            else int(system_exit.code is not None)
        )
    return 0


USAGE = """usage: rlmath COMMAND ...

Reinforcement learning of mathematical reasoning.

{commands}

rlmath COMMAND --help describes one.
On a cluster: torchrun ... -m rlmath.trainer, or rlmath submit"""


def usage() -> str:
    return USAGE.format(
        commands="\n".join(f"  {command.name:<11} {command.summary}" for command in COMMANDS)
    )


def is_installed(module: str) -> bool:
    """Whether it is found; nothing but its parent package is imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def missing_text(command: str, missing: Sequence[str]) -> str:
    return (
        f"rlmath {command} needs {', '.join(missing)}.\n"
        f"{sys.executable} does not have them.\n"
        "`rlmath install cpu` (4 GB) or `rlmath install gpu` installs the versions that are\n"
        "proven together, in a virtual environment; `rlmath doctor` says what there is."
    )


if __name__ == "__main__":
    sys.exit(main())
