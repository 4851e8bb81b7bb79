"""Programs of several ranks on this machine: `rlmath train`, `sft`, `eval` and `replay`.

They need no command line of torchrun's.

`--ranks N` says how many; without it every GPU has one, and on CPU there are as many as the layout
takes at least. More than the machine has room for are refused, unless `--oversubscribe` asks for
them.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from rlmath.checkpoint.directory import complete_checkpoints
from rlmath.cli.program import main as run_program
from rlmath.config.help import raise_problems
from rlmath.config.load import load_config
from rlmath.config.run_files import CHECKPOINTS_FOLDER, EXIT_STATUS_FILE
from rlmath.config.schema import Kind, RunConfig
from rlmath.config.shipped_files import PACKAGE
from rlmath.distributed.device_kind import gpu_count
from rlmath.distributed.fault_tolerance.exit_codes import (
    AGAIN,
    FAILURE,
    MISTAKE,
    again_text,
    read_exit_status,
)
from rlmath.distributed.fault_tolerance.preemption import EXIT_SECONDS, WANTED_SIGNALS
from rlmath.distributed.memory import out_of_memory_kills
from rlmath.planning.checks import only_used
from rlmath.planning.machine_room import GIB, OVERSUBSCRIBE, Machine, refuse_crowding, this_machine
from rlmath.planning.memory_fit import host_bytes
from rlmath.planning.parallelism import ranks_or_least
from rlmath.run.command_line import program_parser
from rlmath.run.early_checks import early_problems
from rlmath.run.run_dir import sole_user

RANKS = "--ranks"
SIGNALS = f"--signals-to-handle={','.join(WANTED_SIGNALS)}"
"""The option by which torchrun passes on every signal that stops a run."""
BY_OTHERS = "what runs this job (a scheduler, its time limit), or kill -9"
LESS_MEMORY = (
    "Start fewer ranks, or give each less to hold: a smaller KV cache, micro-batches of "
    "fewer tokens."
)
IN_NATIVE_CODE = (
    "That is a crash in native code, of a library, or of a full /dev/shm (SIGBUS; see df /dev/shm)."
)
"""Texts about a rank that a signal has killed."""
ALONE = ("-h", "--help", "--dry-run")
"""Options with which a program prints something and ends: no ranks are started."""


def train(argv: Sequence[str]) -> int:
    """Exit status of the run (`exit_codes`)."""
    return _train("grpo", argv)


def sft(argv: Sequence[str]) -> int:
    """Exit status of the supervised training."""
    return _train("sft", argv)


def _train(program: Kind, argv: Sequence[str]) -> int:
    """Check the settings and launch the ranks of a training program; its exit status."""
    if any(word.partition("=")[0] in ALONE for word in argv):
        return run_program([program, *argv])
    try:
        ranks, words = take_ranks(argv)
        oversubscribe, words = take_oversubscribe(words)
        arguments = program_parser().parse_intermixed_args(words)
        config = load_config(arguments.config, arguments.overrides)
        used = only_used(config)[0] if program == "sft" else config
        planned_ranks = ranks_or_least(used.parallel, used.rollout, ranks)
        problems, shapes = early_problems(used, planned_ranks, program)
        raise_problems("this run", problems)
        output = Path(used.run.output_dir)
        with sole_user(output) if output.is_dir() else nullcontext():
            pass  # another run is not working there
        gpus = gpu_count(used.run.device)
        if ranks is None:
            ranks = gpus or ranks_or_least(used.parallel, used.rollout, None)
        if not oversubscribe:
            # A model on the hub has no shape yet.
            planned_bytes = (
                0 if gpus or shapes is None else host_bytes(used, shapes, ranks, program)
            )
            refuse_crowding(ranks, this_machine(gpus), planned_bytes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    command = ["-m", "rlmath.trainer", program, *words]
    status = launch(ranks, command, output, grace_seconds=used.run.stop_grace_seconds)
    if status not in (0, MISTAKE) and (
        line := _line_after(output, used.run.recover_mode == "disabled")
    ):
        print(line, file=sys.stderr)
    return status


def _line_after(output: Path, starts_over: bool) -> str | None:
    """The line on what the same command does next; None if the run's last line has said so.

    `output` is the folder that the run has left."""
    with suppress(ValueError):  # the folder or its checkpoints cannot be read
        if AGAIN in read_exit_status(output).message:
            return None
        checkpoints = [] if starts_over else complete_checkpoints(output / CHECKPOINTS_FOLDER)[0]
        text = again_text(checkpoints[0].step if checkpoints else None)
        return f"{text[0].upper()}{text[1:]} ({output})"
    return None


def evaluate(argv: Sequence[str]) -> int:
    """Exit status of the evaluation."""
    from rlmath.evals import command

    try:
        ranks, words = take_ranks(argv)
        oversubscribe, words = take_oversubscribe(words)
        arguments = command.parse(words)
        if arguments.compare:
            return command.main(words)
        plan, _ = command.plan_of(arguments), command.rollout_of(arguments)
        raise_problems("this evaluation", command.input_problems(plan))
        gpus = gpu_count(arguments.device)
        if ranks is None:
            ranks = gpus or arguments.tensor_parallel
        if not oversubscribe:
            refuse_crowding(
                ranks, this_machine(gpus), int(ranks * arguments.cpu_kv_cache_gib * GIB)
            )
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    program = ["-m", "rlmath.evals", *words]
    status = launch(ranks, program, arguments.output, grace_seconds=RunConfig().stop_grace_seconds)
    if status not in (0, MISTAKE) and AGAIN not in read_exit_status(arguments.output).message:
        print(f"{AGAIN.capitalize()} samples what is missing ({arguments.output})", file=sys.stderr)
    return status


def replay(argv: Sequence[str]) -> int:
    """Exit status of the replay: 0 if it gives the same, 3 if there is nothing to compare."""
    from rlmath.checkpoint.capture import read_capture
    from rlmath.replay import replay as program

    arguments = program.parse(argv)
    try:
        ranks, words = take_ranks(argv)
        oversubscribe, words = take_oversubscribe(words)
        folder = program.find_capture(arguments.run, arguments.step)
        machine = this_machine(gpu_count(RunConfig.device))
        if ranks is None:
            ranks = _ranks_of_replay(read_capture(folder).world_size, machine)
        if not oversubscribe:
            refuse_crowding(ranks, machine)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    return launch(
        ranks,
        ["-m", "rlmath.trainer", "replay", *words],
        None,
        grace_seconds=RunConfig().stop_grace_seconds,
    )


def _ranks_of_replay(captured: int, machine: Machine) -> int:
    """The number of ranks of a replay: as many as the run had.

    ValueError if this machine is too small for them."""
    if captured > machine.most_ranks:
        raise ValueError(
            f"the run had {captured} ranks, and this machine has {machine}. Say how many to use, "
            "and their layout: "
            f"{RANKS} 1 parallel.tensor=1 parallel.pipeline=1"
        )
    return captured


def take_ranks(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number of --ranks, None without it, and the other words.

    ValueError for what is no number."""
    words = list(argv)
    ranks = None
    for place, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == RANKS:
            if not equals and place + 1 < len(words):
                text = words.pop(place + 1)
            if not text.isdecimal() or not 0 < int(text) < 2**16:
                raise ValueError(f"{RANKS} is {text!r}; needed: a number of processes, at least 1")
            ranks = int(text)
            del words[place]
            break
    return ranks, words


def take_oversubscribe(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether OVERSUBSCRIBE is among the words, and the others."""
    return OVERSUBSCRIBE in argv, [word for word in argv if word != OVERSUBSCRIBE]


def launch(ranks: int, command: Sequence[str], output: Path | None, grace_seconds: float) -> int:
    """Run Python with the words of a program under torchrun; the program's exit status.

    Torchrun leaves the ranks `grace_seconds` to save after a signal. The exit status is the one
    that the program has left in its folder `output`, else that of the rank that failed first. Ranks
    that a signal has killed are named on stderr, with what to do."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are the parallelism
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in list(logging.root.manager.loggerDict):  # each has a level of its own
        if name.startswith(("torch.distributed.elastic", "torch.distributed.run")):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # ranks say themselves why they end
    # torchrun reads it as its option, and ranks inherit it: they need to know how long they may
    # save.
    os.environ["PET_SHUTDOWN_TIMEOUT"] = str(math.ceil(grace_seconds + EXIT_SECONDS))
    if Path.cwd() == PACKAGE.parent:  # a checkout that is not installed
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")])
        )
    written_before = _written(output)
    out_of_memory_before = out_of_memory_kills()
    try:
        # -P: `python -m` would put the current folder first, where random.py takes the place of
        # Python's.
        python = ["--no-python", sys.executable, "-P", "-u"]
        run(parse_args(["--standalone", f"--nproc-per-node={ranks}", SIGNALS, *python, *command]))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else FAILURE
        killed = {
            rank: (end.pid, -end.exitcode)
            for rank, end in error.failures.items()
            if end.exitcode < 0
        }
        print(
            killed_text(killed, out_of_memory_before, out_of_memory_kills()),
            end="",
            file=sys.stderr,
        )
    except SignalException as stopped:
        status = 128 + int(stopped.sigval)
    else:
        return 0
    if output is None or status == MISTAKE or _written(output) == written_before:
        return status  # what the folder has is of an earlier start
    return read_exit_status(output).status or status


def killed_text(
    killed: Mapping[int, tuple[int, int]], kills_before: int | None, kills: int | None
) -> str:
    """The text about ranks that signals have killed; "" if there are none.

    `killed` has process and signal of every such rank. Those that torchrun ended because of others
    (SIGTERM) do not count. `kills_before` and `kills` are results of `out_of_memory_kills`."""
    lines = []
    signals = {number for _, number in killed.values()} - {signal.SIGTERM}
    for rank, (pid, number) in sorted(killed.items()):
        if number in signals:
            lines.append(f"rank {rank} (pid {pid}) was killed by {signal_name(number)}.")
    if signal.SIGKILL in signals:
        if kills is None or kills_before is None:
            lines.append(
                f"That may be the kernel, for want of memory (see dmesg), {BY_OTHERS}. "
                f"{LESS_MEMORY}"
            )
        elif kills > kills_before:
            lines.append(
                f"Memory ran out: the kernel has killed {kills - kills_before} for it. "
                f"{LESS_MEMORY}"
            )
        else:
            lines.append(
                "The kernel has killed no process for want of memory meanwhile: it was "
                f"{BY_OTHERS}."
            )
    if signals - {signal.SIGKILL}:
        lines.append(IN_NATIVE_CODE)
    return "".join(f"{line}\n" for line in lines)


def signal_name(number: int) -> str:
    """A signal's name; most real-time signals have only a number.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _written(output: Path | None) -> tuple[int, int] | None:
    """Time and inode of the exit status in a folder, which a program changes when it ends."""
    if output is None or not (output / EXIT_STATUS_FILE).exists():
        return None
    file_status = (output / EXIT_STATUS_FILE).stat()
    return file_status.st_mtime_ns, file_status.st_ino
