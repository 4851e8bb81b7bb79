"""Run code as a model's call would be run, and print what the model would see.

rlmath sandbox first.py second.py      two calls of one completion, one after the other
echo 'print(6 * 7)' | rlmath sandbox
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rlmath.config.help import nearest_path
from rlmath.config.terminal import escape_terminal
from rlmath.sandbox.calls import ISOLATIONS, LEAST_OUTPUT, STATES, CallResult, Limits, PastCall
from rlmath.sandbox.sandboxes import Sandboxes

MISTAKE = 2
FAULT = 3


def main(argv: Sequence[str]) -> int:
    """Exit status 0 if every call ended well, 1 if the code of one did not.

    It is MISTAKE for a mistake on the command line, and FAULT if the machine was at fault."""
    escape_terminal()
    arguments = parse_arguments(argv)
    try:
        limits = limits_of(arguments)
        sources = [read_source(name) for name in arguments.files or ["-"]]
        sandboxes = Sandboxes(
            cores=1, sessions=1, limits=limits, isolation=arguments.isolation, state=arguments.state
        )
    except ValueError as error:
        print(f"rlmath sandbox: {error}", file=sys.stderr)
        return MISTAKE
    with sandboxes:
        try:
            results = run_calls(sandboxes, sources, arguments.seed)
        except (RuntimeError, ValueError) as error:
            print(f"rlmath sandbox: {error}", file=sys.stderr)
            return FAULT if isinstance(error, RuntimeError) else MISTAKE
    if any(outcome.is_infrastructure_fault for outcome in results):
        return FAULT
    return int(any(outcome.status != "ok" for outcome in results))


def limits_of(arguments: argparse.Namespace) -> Limits:
    """The limits of the options; ValueError that names the option of an impossible limit."""
    least = {"output_characters": LEAST_OUTPUT}
    for name in ("cpu_seconds", "completion_cpu_seconds", "memory_gib", "output_characters"):
        limit = getattr(arguments, name)
        if not 0 < limit < math.inf or limit < least.get(name, 0):
            needed = f"at least {least[name]}" if name in least else "a finite number above 0"
            raise ValueError(f"--{name.replace('_', '-')} is {limit}; needed: {needed}")
    return Limits(
        call_cpu_seconds=arguments.cpu_seconds,
        completion_cpu_seconds=max(arguments.cpu_seconds, arguments.completion_cpu_seconds),
        memory_bytes=math.ceil(arguments.memory_gib * 2**30),
        output_characters=arguments.output_characters,
    )


def run_calls(sandboxes: Sandboxes, sources: Sequence[str], seed: int) -> list[CallResult]:
    """Run calls of one completion, print each one's text, and what it took to standard error."""
    past_calls: list[PastCall] = []
    results = []
    for number, source in enumerate(sources, start=1):
        sandboxes.submit("command", source, seed, past_calls)
        ((_, outcome),) = sandboxes.wait()
        results.append(outcome)
        past_calls.append(outcome.as_past_call(source))
        print(
            outcome.text,
            end="" if outcome.text.endswith("\n") or not outcome.text else "\n",
            flush=True,
        )
        print(
            f"call {number}: {outcome.status}, {outcome.cpu_seconds:.3f} s of CPU time",
            file=sys.stderr,
        )
        if outcome.is_infrastructure_fault:
            break
    return results


def read_source(name: str) -> str:
    """A file's code, or that of standard input for "-".

    ValueError where it cannot be read."""
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f'there is no file "{name}".{nearest_path(Path(name))}') from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f'"{name}" cannot be read ({reason}); needed: a file of Python in UTF-8'
        ) from error


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    limits = Limits()
    parser = argparse.ArgumentParser(
        description="Run code as a model's call would be run, and print what the model would see.",
        epilog="Exit status: 0 all calls are ok, 1 one is not, 2 a mistake in the options, "
        "3 a fault of the machine.",
    )
    add = parser.add_argument
    add(
        "files",
        nargs="*",
        metavar="FILE",
        help="a call each, of one session; - (default): standard input",
    )
    add(
        "--isolation",
        choices=ISOLATIONS,
        default=ISOLATIONS[0],
        help="landlock (default): reads the interpreter's own files; preloaded: opens no file; "
        "none: only for code that you trust",
    )
    add(
        "--state", choices=STATES, default=STATES[0], help="fresh: calls know nothing of each other"
    )
    add("--seed", type=int, default=1, metavar="N", help="of random numbers (default: 1)")
    add(
        "--cpu-seconds",
        type=float,
        default=limits.call_cpu_seconds,
        metavar="S",
        help="a call (default: 5)",
    )
    add(
        "--completion-cpu-seconds",
        type=float,
        default=limits.completion_cpu_seconds,
        metavar="S",
        help="all calls (default: 30)",
    )
    add(
        "--memory-gib",
        type=float,
        default=limits.memory_bytes / 2**30,
        metavar="G",
        help="default: 1",
    )
    add(
        "--output-characters",
        type=int,
        default=limits.output_characters,
        metavar="N",
        help="shown of a call at most (default: 4096)",
    )
    return parser.parse_args(argv)
