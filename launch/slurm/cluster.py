"""What Slurm says of partitions and of its queue, and how it is given a job."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmath.config.help import nearest_word

ANSWER_SECONDS = 60.0
"""How long a command of Slurm may take."""
OVERRIDES = (
    *("PARTITION", "TIMELIMIT", "SIGNAL", "REQUEUE", "NO_REQUEUE", "JOB_NAME", "COMMENT", "OPEN_MODE"),
    *("OUTPUT", "ERROR", "ARRAY_INX", "GPUS", "GPUS_PER_NODE", "WAIT"),
)
"""Of the environment's SBATCH_ variables those that would win over what a script says, and was checked."""
OUTPUT_MARK = "rlmath:"
"""A job's comment is this and the folder that it writes."""

_GPUS = re.compile(r"gpu(?::[^:,()]+)?:(\d+)")


@dataclass(frozen=True)
class Partition:
    """A partition, as far as it decides what may be submitted to it."""

    name: str
    default: bool
    up: bool
    limit_seconds: float
    """Of a job; infinity where there is none."""
    most_nodes: float
    """Of a job; infinity where there is no bound but their number."""
    nodes_of_gpus: tuple[tuple[int, int], ...]
    """How many nodes have how many GPUs: ((2, 8), (4, 0)) are two with eight and four with none."""

    def nodes(self, gpus: int = 0) -> int:
        """Those that have at least so many GPUs."""
        return sum(number for number, there in self.nodes_of_gpus if there >= gpus)


def slurm_is_here() -> bool:
    return shutil.which("sbatch") is not None


def partitions() -> list[Partition]:
    """All that Slurm shows; ValueError where it does not answer."""
    lines = _ask("sinfo", "--noheader", "--all", "--format=%P|%a|%l|%s|%D|%G").splitlines()
    found: dict[str, Partition] = {}
    for line in lines:
        fields = line.strip().split("|", 5)
        if len(fields) == 6 and fields[4].isdecimal():
            one = _partition(*fields)
            before = found[one.name].nodes_of_gpus if one.name in found else ()
            found[one.name] = Partition(**vars(one) | {"nodes_of_gpus": (*before, *one.nodes_of_gpus)})
    return list(found.values())


def _partition(name: str, available: str, limit: str, sizes: str, number: str, resources: str) -> Partition:
    """A line of sinfo: "gpu*|up|1-00:00:00|1-infinite|16|gpu:h100:8(S:0-1)"."""
    most = sizes.rpartition("-")[2]
    try:
        seconds = seconds_of(limit)
    except ValueError:  # "n/a"
        seconds = float("inf")
    gpus = sum(int(one) for one in _GPUS.findall(resources))
    return Partition(
        name.removesuffix("*"),
        name.endswith("*"),
        available == "up",
        seconds,
        int(most) if most.isdecimal() else float("inf"),
        ((int(number), gpus),),
    )


def seconds_of(time: str) -> float:
    """Slurm's spelling of a duration: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]],
    or "infinite". ValueError for anything else, as of the option --time.

    >>> seconds_of("1-12"), seconds_of("90"), seconds_of("1:30")
    (129600.0, 5400.0, 90.0)
    """
    if time.lower() in ("infinite", "unlimited"):
        return float("inf")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time, flags=re.ASCII)
    if match is None:
        raise ValueError(
            f'--time is "{time}"; needed: minutes, hours:minutes:seconds or days-hours, as in 90, 12:00:00 and 2-00'
        )
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        units = (60, 1)
    else:
        units = (3600, 60, 1)
    return float(int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False)))


def partition_problems(
    name: str | None,
    nodes: int,
    gpus: int,
    seconds: float | None,
    least_seconds: float,
    known: Sequence[Partition],
) -> list[str]:
    """Why a job cannot be in the partition (None: Slurm's default one), or in any of several ("a,b"). Without `seconds`
    it may take as long as the partition allows, which must be more than `least_seconds`."""
    names = name.split(",") if name is not None else [None]
    if unknown := [problem for one in names for problem in _name_problems(one, known)]:
        return unknown
    found = [
        [*_state_problems(one, known), *_size_problems(one, nodes, gpus, seconds, least_seconds)]
        for one in known
        if one.name in names or (name is None and one.default)
    ]
    return [] if [] in found else list(itertools.chain(*found))


def _name_problems(name: str | None, known: Sequence[Partition]) -> Iterator[str]:
    if any(one.default if name is None else one.name == name for one in known):
        return
    names = ", ".join(one.name for one in known) or "none"
    if name is None:
        yield f"Slurm has no default partition; give --partition, one of: {names}."
    else:
        yield f'There is no partition "{name}"; there are: {names}.{nearest_word(name, (p.name for p in known))}'


def _state_problems(one: Partition, known: Sequence[Partition]) -> Iterator[str]:
    if not one.up:
        others = ", ".join(p.name for p in known if p.up) or "none"
        yield f'--partition "{one.name}" is not up. These are: {others}.'


def _size_problems(
    one: Partition, nodes: int, gpus: int, seconds: float | None, least_seconds: float
) -> Iterator[str]:
    if nodes > min(one.nodes(), one.most_nodes):
        bound = f" and allows a job {one.most_nodes:g}" if one.most_nodes < one.nodes() else ""
        yield (
            f'--nodes is {nodes}; the partition "{one.name}" has {one.nodes()}{bound}. Give fewer, or another '
            "partition."
        )
    elif nodes > one.nodes(gpus):
        yield (
            f'--gpus-per-node is {gpus} and --nodes is {nodes}; in the partition "{one.name}" {one.nodes(gpus)} of '
            f"{one.nodes()} nodes have as many. Give fewer, or another partition."
        )
    if seconds is not None and seconds > one.limit_seconds:
        yield (
            f'--time is {seconds / 60:g} minutes; the partition "{one.name}" allows {one.limit_seconds / 60:g}. Give '
            "less, with --chain or --requeue for what is longer."
        )
    if seconds is None and one.limit_seconds <= least_seconds:
        yield (
            f'the partition "{one.name}" ends a job after {one.limit_seconds:g} s, and the run is told to save '
            f"{least_seconds:g} s before its end: nothing is left to work in. Give another partition, or (in training) "
            "lower run.stop_grace_seconds."
        )


def queue_problems(name: str, output: Path) -> list[str]:
    """Why a job of this name that writes this folder would meet another one. ValueError where Slurm does not answer."""
    named = _ask("squeue", "--noheader", "--all", "--me", f"--name={name}", "--format=%A %T").splitlines()
    comments = _ask("squeue", "--noheader", "--all", "--format=%A %k").splitlines()
    mark = f"{OUTPUT_MARK}{output}"
    same_folder = [
        number for number, _, text in (line.strip().partition(" ") for line in comments) if text == mark
    ]
    problems = []
    if named:
        problems.append(
            f'a job of yours is named "{name}" already: {_shown(named)}. Wait for it, cancel it (scancel), or give '
            "--name."
        )
    if same_folder:
        problems.append(
            f'"{output}" is what another job writes: {_shown(same_folder)}. Wait for it, cancel it (scancel), or give '
            "another folder."
        )
    return problems


def _shown(jobs: Sequence[str]) -> str:
    return ", ".join(job.strip() for job in jobs[:5]) + (", ..." if len(jobs) > 5 else "")


def submit(script: Path, links: int) -> list[str]:
    """The numbers of the jobs: one, or a chain where each begins when the one before has ended, however that was.
    ValueError where Slurm refuses; nothing is queued then."""
    numbers: list[str] = []
    for link in range(1, links + 1):
        after = [f"--dependency=afterany:{numbers[-1]}"] if numbers else []
        try:
            said = _ask("sbatch", "--parsable", *after, str(script), str(link))
        except ValueError as error:
            cancel(numbers)
            raise ValueError(f"{error}\nNothing is queued.") from error
        numbers.append(said.strip().partition(";")[0])
    return numbers


def cancel(numbers: Iterable[str]) -> None:
    for number in numbers:
        _ask("scancel", number)


def _ask(*command: str) -> str:
    overrides = [f"SBATCH_{name}" for name in OVERRIDES]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            env={name: value for name, value in os.environ.items() if name not in overrides},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{command[0]} does not answer: {error}") from error
    if done.returncode:
        raise ValueError(f"{command[0]} says: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
