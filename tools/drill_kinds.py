"""What a drill does to a run.

Each kind is a moment, and what is done then to its processes, its disk or its files."""

from __future__ import annotations

import contextlib
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from rlmath.checkpoint.directory import PARTIAL, complete_checkpoints
from rlmath.config.run_files import CHECKPOINTS_FOLDER, EXIT_STATUS_FILE, EXPORT_FOLDER
from rlmath.distributed.fault_tolerance.exit_codes import (
    FAILURE,
    FINISHED,
    NOT_SAVED_IN_TIME,
    SAVED_AND_STOPPED,
)
from tools import drill_damage as damage
from tools.drill_damage import NOT_SAVED, SAVE_SECONDS, wait_for_refusal, wait_for_save
from tools.drill_run import Attempt, rank_name, wait_for

Moment = Callable[[Attempt, random.Random], None]
"""Waits for it."""
Disturbance = Callable[[Attempt, random.Random], str]
"""Does it; says what was done."""
Program = Literal["grpo", "sft"]

VALIDATE_EVERY = 3
"""Steps between validations, in the chain that has some."""
PAUSE_SECONDS = 3.0
SILENCE_SECONDS = 15
"""The heartbeat's limit where a rank is stopped for longer."""


@dataclass(frozen=True)
class Kind:
    """A disturbance."""

    moment: Moment
    disturb: Disturbance
    statuses: tuple[int, ...] = (FAILURE,)
    """Statuses that the run may end with. Empty: it must go on by itself."""
    rows: int = 1
    """Steps that the run makes before. 0: it is disturbed while it starts."""
    spoil: Disturbance | None = None
    """What is done to the folder after the run has ended."""
    programs: tuple[Program, ...] = ("grpo", "sft")
    settings: tuple[str, ...] = ()
    """Settings of the start that is disturbed."""
    place: Literal["steps", "export", "folder"] = "steps"
    """"export": while the model is written after the last step. "folder": between two starts,
    beside another kind."""

    @property
    def survives(self) -> bool:
        return not self.statuses


def reward(completion: str, solutions: Sequence[str], row: Mapping[str, object]) -> float:
    """A reward function that a random model gets something from, and never learns.

    A group without an answer still has contrast."""
    return float(sum(completion.encode()) % 5)


# ---------------------------------------------------------------- moments


def at_once(attempt: Attempt, rng: random.Random) -> None:
    pass


def _step_seconds(attempt: Attempt) -> float:
    """Seconds of its quickest step: the first ones compile and warm up."""
    return min(row.get("seconds/step", 1.0) for row in attempt.new_rows())


def any_time(attempt: Attempt, rng: random.Random) -> None:
    time.sleep(rng.uniform(0.0, 2.0) * _step_seconds(attempt))


def while_starting(attempt: Attempt, rng: random.Random) -> None:
    time.sleep(rng.uniform(0.5, 12.0))


def _wait_for_claim(attempt: Attempt) -> None:
    """Wait until what an earlier start has left unfinished is gone."""
    title = "Settings that are not at their defaults"
    wait_for(
        lambda: attempt.ended or title in attempt.console(), 300.0, "the settings on the console"
    )


def while_loading(attempt: Attempt, rng: random.Random) -> None:
    """Wait until the folder is this start's, and up to 3 s more, while it loads."""
    _wait_for_claim(attempt)
    time.sleep(rng.uniform(0.0, 3.0))


def with_checkpoints(attempt: Attempt, rng: random.Random) -> None:
    """Wait until three checkpoints are complete, so that two may be damaged, and some time more."""
    folder = attempt.output / CHECKPOINTS_FOLDER
    wait_for(
        lambda: attempt.ended or len(complete_checkpoints(folder)[0]) >= 3,
        SAVE_SECONDS,
        "3 checkpoints",
    )
    any_time(attempt, rng)


def in_save(attempt: Attempt, rng: random.Random) -> None:
    wait_for_save(attempt, rng)
    time.sleep(rng.uniform(0.0, 0.08))


def in_phase(phase: str) -> Moment:
    """The moment at which the next step is in that phase.

    Rows say how long phases take, and when a step ends."""
    earlier_phases = {
        "sync": (),
        "validation": ("sync",),
        "rollout": ("sync",),
        "update": ("sync", "rollout"),
    }[phase]

    def moment(attempt: Attempt, rng: random.Random) -> None:
        count = len(attempt.new_rows())
        last_step = int(attempt.new_rows()[-1]["step"])
        if phase == "validation":
            count += (VALIDATE_EVERY - last_step - 1) % VALIDATE_EVERY
        rows = attempt.rows_or_end(count + 1, SAVE_SECONDS)
        start = sum(rows[-1].get(f"seconds/{name}", 0.0) for name in ("save", *earlier_phases))
        durations = [
            row[f"seconds/{phase}"] for row in rows if row.get(f"seconds/{phase}", 0.0) > 0.0
        ]
        time.sleep(start + rng.random() * (durations[-1] if durations else 0.1))

    return moment


def in_export(attempt: Attempt, rng: random.Random) -> None:
    _wait_for_claim(attempt)
    partial = attempt.output / f"{EXPORT_FOLDER}{PARTIAL}"
    wait_for(lambda: attempt.ended or partial.exists(), 300.0, "the export", look_seconds=0.0)


# ---------------------------------------------------------------- what is done to processes


def kill_a_rank(attempt: Attempt, rng: random.Random) -> str:
    return attempt.kill_a_rank(rng)


def kill_all(attempt: Attempt, rng: random.Random) -> str:
    """Kill every process at once, as when a node is lost."""
    return signal_all(signal.SIGKILL)(attempt, rng)


def signal_launcher(number: signal.Signals, times: int = 1) -> Disturbance:
    def disturb(attempt: Attempt, rng: random.Random) -> str:
        for _ in range(times):
            attempt.launcher.send_signal(number)
            time.sleep(0.2 if times > 1 else 0.0)
        return f"torchrun, {number.name}" + (f", {times} times" if times > 1 else "")

    return disturb


def signal_a_rank(number: signal.Signals) -> Disturbance:
    def disturb(attempt: Attempt, rng: random.Random) -> str:
        victim = rng.choice(attempt.ranks())
        name = rank_name(victim)
        victim.send_signal(number)
        return f"{name}, {number.name}"

    return disturb


def signal_all(number: signal.Signals) -> Disturbance:
    """A disturbance that sends every process of the run the signal, as a service manager does."""

    def disturb(attempt: Attempt, rng: random.Random) -> str:
        processes = attempt.processes()
        _send(processes, number)
        return f"{len(processes)} processes, {number.name}"

    return disturb


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextlib.contextmanager
def _stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    _send(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(processes, signal.SIGCONT)


def pause(whom: Literal["a rank", "torchrun", "all"]) -> Disturbance:
    """Stopped for PAUSE_SECONDS, as a debugger or a suspended machine does it."""

    def disturb(attempt: Attempt, rng: random.Random) -> str:
        chosen = {
            "a rank": lambda: [rng.choice(attempt.ranks())],
            "torchrun": lambda: [psutil.Process(attempt.launcher.pid)],
            "all": attempt.processes,
        }[whom]()
        with _stopped(chosen):
            time.sleep(PAUSE_SECONDS)
        return f"{whom} stopped for {PAUSE_SECONDS:g} s"

    return disturb


def stop_for_too_long(attempt: Attempt, rng: random.Random) -> str:
    """A rank stands still until the others have ended the run for it."""
    victim = rng.choice(attempt.ranks())
    status = attempt.output / EXIT_STATUS_FILE
    with _stopped([victim]):
        wait_for(status.exists, SILENCE_SECONDS + 60.0, "the end of the run")
    return f"{rank_name(victim)} stopped for more than {SILENCE_SECONDS} s"


def _those_with(attempt: Attempt, word: str) -> list[psutil.Process]:
    processes = [process for process in attempt.processes() if word in " ".join(process.cmdline())]
    assert processes, f"no process of the run has {word} in its command"
    return processes


def kill_reward_workers() -> Disturbance:
    """A disturbance that kills the workers that score answers, of one rank.

    Ranks stand still meanwhile, so that no answer is being scored."""

    def disturb(attempt: Attempt, rng: random.Random) -> str:
        servers = [
            process
            for process in _those_with(attempt, "workers.fork_server")
            if process.parent() in attempt.ranks()
        ]
        server = rng.choice(servers)
        name = rank_name(server)
        with _stopped(attempt.ranks()):
            time.sleep(0.3)
            victims = server.children()
            _send(victims, signal.SIGKILL)
        return f"{len(victims)} workers of {name}"

    return disturb


def kill_a_writer(attempt: Attempt, rng: random.Random) -> str:
    victim = rng.choice(_those_with(attempt, "async_writer"))
    name = rank_name(victim)
    victim.kill()
    return f"the writer of {name}"


def take_memory(attempt: Attempt, rng: random.Random) -> str:
    """Give a rank no more memory; kill it if it goes on without saving."""
    victim = rng.choice(attempt.ranks())
    warnings = attempt.console().count(NOT_SAVED)
    name = rank_name(victim)
    victim.rlimit(resource.RLIMIT_AS, (victim.memory_info().vms, resource.RLIM_INFINITY))
    wait_for_refusal(attempt, warnings)
    if attempt.ended:
        return f"no memory for {name}, the run ended by itself"
    victim.kill()
    return f"no memory for {name}, the run went on, killed"


# ---------------------------------------------------------------- the table

_STOPS = (SAVED_AND_STOPPED,)
_GRPO: tuple[Program, ...] = ("grpo",)
_SURVIVES = ()


def _between(disturb: Disturbance) -> Kind:
    return Kind(at_once, disturb, _SURVIVES, place="folder")


def _damaged(spoil: Disturbance) -> Kind:
    return Kind(with_checkpoints, kill_a_rank, spoil=spoil)


KINDS: dict[str, Kind] = {
    # the run ends, and the next start resumes
    "kill": Kind(any_time, kill_a_rank),
    "kill-start": Kind(while_starting, kill_a_rank, rows=0),
    "kill-load": Kind(while_loading, kill_a_rank, rows=0),
    "kill-save": Kind(in_save, kill_a_rank),
    "kill-sync": Kind(in_phase("sync"), kill_a_rank, programs=_GRPO),
    "kill-rollout": Kind(in_phase("rollout"), kill_a_rank, programs=_GRPO),
    "kill-update": Kind(in_phase("update"), kill_a_rank),
    "kill-validation": Kind(in_phase("validation"), kill_a_rank, programs=_GRPO),
    "kill-launcher": Kind(any_time, signal_launcher(signal.SIGKILL), _STOPS),
    "kill-all": Kind(any_time, kill_all),
    "kill-all-save": Kind(in_save, kill_all),
    "segfault": Kind(any_time, signal_a_rank(signal.SIGSEGV)),
    "no-memory": Kind(any_time, take_memory),
    "stopped": Kind(
        any_time, stop_for_too_long, settings=(f"run.heartbeat_timeout_seconds={SILENCE_SECONDS}",)
    ),
    "sigterm": Kind(any_time, signal_launcher(signal.SIGTERM), _STOPS),
    "sigterm-start": Kind(
        while_starting, signal_launcher(signal.SIGTERM), (*_STOPS, FAILURE), rows=0
    ),
    "sigterm-save": Kind(in_save, signal_launcher(signal.SIGTERM), _STOPS),
    "sigterm-validation": Kind(
        in_phase("validation"), signal_launcher(signal.SIGTERM), _STOPS, programs=_GRPO
    ),
    "sigterm-rank": Kind(any_time, signal_a_rank(signal.SIGTERM), _STOPS),
    "sigterm-all": Kind(any_time, signal_all(signal.SIGTERM), _STOPS),
    "sigterm-twice": Kind(any_time, signal_launcher(signal.SIGTERM, times=2), (*_STOPS, FAILURE)),
    "sigterm-late": Kind(
        any_time,
        signal_launcher(signal.SIGTERM),
        (NOT_SAVED_IN_TIME,),
        settings=("run.stop_grace_seconds=0.01",),
    ),
    "sigusr1": Kind(any_time, signal_a_rank(signal.SIGUSR1), _STOPS),
    "sigint": Kind(any_time, signal_launcher(signal.SIGINT), _STOPS),
    "sighup": Kind(any_time, signal_launcher(signal.SIGHUP)),
    "disk-full": Kind(at_once, damage.fill_disk, spoil=damage.free_disk),
    "bit-flip": _damaged(damage.flip_a_bit),
    "two-damaged": _damaged(damage.damage_two),
    "kill-export": Kind(in_export, kill_all, (FAILURE, FINISHED), place="export"),
    "sigterm-export": Kind(in_export, signal_launcher(signal.SIGTERM), (FINISHED,), place="export"),
    # the run continues by itself
    "pause-rank": Kind(any_time, pause("a rank"), _SURVIVES),
    "pause-launcher": Kind(any_time, pause("torchrun"), _SURVIVES),
    "pause-all": Kind(any_time, pause("all"), _SURVIVES),
    "kill-reward-workers": Kind(any_time, kill_reward_workers(), _SURVIVES, programs=_GRPO),
    "kill-writer": Kind(any_time, kill_a_writer, _SURVIVES),
    "kill-writer-save": Kind(in_save, kill_a_writer, _SURVIVES),
    "read-only": Kind(at_once, damage.make_checkpoints_read_only, _SURVIVES),
    "no-inodes": Kind(at_once, damage.use_up_inodes, _SURVIVES),
    "checkpoints-gone": Kind(any_time, damage.remove_checkpoints, _SURVIVES),
    # between two starts
    "looks-finished": _between(damage.pretend_end),
    "config-lost": _between(damage.lose_config),
    "moved": _between(damage.move_folder),
    "samples-gone": _between(damage.remove_samples),
}
"""Kinds by name, as `--kinds` takes them."""
