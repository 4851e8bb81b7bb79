"""What Slurm says of partitions and of its queue, and how it is given a job."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmath.config.help import nearest_word

ANSWER_SECONDS = 60.0
"""How long a command of Slurm may take."""
OVERRIDES = (
    *(
        "PARTITION",
        "TIMELIMIT",
        "SIGNAL",
        "REQUEUE",
        "NO_REQUEUE",
        "JOB_NAME",
        "COMMENT",
        "OPEN_MODE",
    ),
    *("OUTPUT", "ERROR", "ARRAY_INX", "GPUS", "GPUS_PER_NODE", "WAIT"),
)
"""SBATCH_ variables of the environment that would win over the checked script."""
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
    """Time limit of a job; infinity where there is none."""
    most_nodes: float
    """Most nodes of a job; infinity where only their number is a bound."""
    nodes_of_gpus: tuple[tuple[int, int], ...]
    """How many nodes have how many GPUs: ((2, 8), (4, 0)) are two with eight and four with none."""

    def nodes(self, gpus: int = 0) -> int:
        """The number of nodes that have at least so many GPUs."""
        return sum(number for number, gpus_there in self.nodes_of_gpus if gpus_there >= gpus)


def slurm_is_here() -> bool:
    return shutil.which("sbatch") is not None


def partitions() -> list[Partition]:
    """All that Slurm shows; ValueError where it does not answer."""
    partition_by_name: dict[str, Partition] = {}
    for line in _ask("sinfo", "--noheader", "--all", "--format=%P|%a|%l|%s|%D|%G").splitlines():
        partition = _partition(line)
        nodes_before = (
            partition_by_name[partition.name].nodes_of_gpus
            if partition.name in partition_by_name
            else ()
        )
        partition_by_name[partition.name] = replace(
            partition, nodes_of_gpus=(*nodes_before, *partition.nodes_of_gpus)
        )
    return list(partition_by_name.values())


def _partition(line: str) -> Partition:
    """The partition of a line of sinfo, for nodes that are alike.

    Such a line is "gpu*|up|1-00:00:00|1-infinite|16|gpu:h100:8(S:0-1)"."""
    name, available, limit, sizes, number, resources = line.strip().split("|", 5)
    max_nodes = sizes.rpartition("-")[2]
    gpus = sum(int(count) for count in _GPUS.findall(resources))
    return Partition(
        name.removesuffix("*"),
        default=name.endswith("*"),
        up=available == "up",
        limit_seconds=float("inf") if limit == "n/a" else seconds_of(limit),
        most_nodes=int(max_nodes) if max_nodes.isdecimal() else float("inf"),
        nodes_of_gpus=((int(number), gpus),),
    )


def seconds_of(time: str) -> float:
    """Read Slurm's spelling of a duration, as its option --time takes it.

    It is minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]], or
    "infinite"; ValueError for anything else.

    >>> seconds_of("1-12"), seconds_of("90"), seconds_of("1:30")
    (129600.0, 5400.0, 90.0)
    """
    if time.lower() in ("infinite", "unlimited"):
        return float("inf")
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time, flags=re.ASCII)
    if match is None:
        raise ValueError(
            f'--time is "{time}"; needed: minutes, hours:minutes:seconds or days-hours, as in 90, '
            "12:00:00 and 2-00"
        )
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        units = (60, 1)
    else:
        units = (3600, 60, 1)
    return float(
        int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False))
    )


@dataclass(frozen=True)
class Need:
    """What a job needs of its partition."""

    nodes: int
    gpus: int
    """GPUs of every node."""
    seconds: float | None
    """Its time limit; None: as long as the partition allows."""
    signal_seconds: float
    """How long before its end it is told to save."""


def partition_problems(names: str | None, known: Sequence[Partition], need: Need) -> list[str]:
    """Problems of a job in the partition (None: Slurm's default one), or in several ("a,b")."""
    if names is None:
        chosen = [partition for partition in known if partition.default]
        if not chosen:
            return [f"Slurm has no default partition; give --partition, one of: {_names(known)}."]
    else:
        unknown = [
            name for name in names.split(",") if name not in [partition.name for partition in known]
        ]
        if unknown:
            near = {
                name: nearest_word(name, (partition.name for partition in known))
                for name in unknown
            }
            known_names = _names(known)
            return [
                f'There is no partition "{name}"; there are: {known_names}.{near[name]}'
                for name in unknown
            ]
        chosen = [partition for partition in known if partition.name in names.split(",")]
    up = _names([partition for partition in known if partition.up])
    problems_by_partition = [list(_problems_in(partition, up, need)) for partition in chosen]
    return (
        []
        if [] in problems_by_partition
        else list(itertools.chain.from_iterable(problems_by_partition))
    )


def _names(known: Sequence[Partition]) -> str:
    return ", ".join(partition.name for partition in known) or "none"


def _problems_in(partition: Partition, up: str, need: Need) -> Iterator[str]:
    """Problems of a job in this partition; `up` names those that are up."""
    nodes = need.nodes
    gpus = need.gpus
    limit = need.seconds
    least = need.signal_seconds
    if not partition.up:
        yield f'--partition "{partition.name}" is not up. These are: {up}.'
    if nodes > min(partition.nodes(), partition.most_nodes):
        bound = (
            f" and allows a job {partition.most_nodes:g}"
            if partition.most_nodes < partition.nodes()
            else ""
        )
        yield (
            f'--nodes is {nodes}; the partition "{partition.name}" has {partition.nodes()}{bound}. Give '
            "fewer, or another "
            "partition."
        )
    elif nodes > partition.nodes(gpus):
        yield (
            f'--gpus-per-node is {gpus} and --nodes is {nodes}; in the partition "{partition.name}" '
            f"{partition.nodes(gpus)} of "
            f"{partition.nodes()} nodes have as many. Give fewer, or another partition."
        )
    if limit is not None and limit > partition.limit_seconds:
        yield (
            f'--time is {limit / 60:g} minutes; the partition "{partition.name}" allows '
            f"{partition.limit_seconds / 60:g}. Give "
            "less, with --chain or --requeue for what is longer."
        )
    if limit is None and partition.limit_seconds <= least:
        yield (
            f'the partition "{partition.name}" ends a job after {partition.limit_seconds:g} s, and the run is '
            "told to save "
            f"{least:g} s before its end: nothing is left to work in. Give another partition, or "
            "(in training) "
            "lower run.stop_grace_seconds."
        )


def queue_problems(name: str, output: Path) -> list[str]:
    """Problems of a job of this name that writes this folder with other jobs.

    ValueError where Slurm does not answer."""
    named = _ask(
        "squeue", "--noheader", "--all", "--me", f"--name={name}", "--format=%A %T"
    ).splitlines()
    comments = _ask("squeue", "--noheader", "--all", "--format=%A %k").splitlines()
    jobs = (line.strip().partition(" ") for line in comments)
    writing = [number for number, _, comment in jobs if comment == f"{OUTPUT_MARK}{output}"]
    return [
        f"{problem}: {', '.join(map(str.strip, met_jobs[:5]))}. Wait for it, cancel it (scancel), "
        "or give "
        f"{alternative}."
        for problem, met_jobs, alternative in (
            (f'a job of yours is named "{name}" already', named, "--name"),
            (f'"{output}" is what another job writes', writing, "another folder"),
        )
        if met_jobs
    ]


def submit(script: Path, links: int) -> list[str]:
    """Submit the script and return the numbers of the jobs.

    There is one job, or a chain where each begins when the one before has ended, however that was.
    ValueError where Slurm refuses; nothing is queued then."""
    numbers: list[str] = []
    for link in range(1, links + 1):
        dependency = [f"--dependency=afterany:{numbers[-1]}"] if numbers else []
        try:
            answer = _ask("sbatch", "--parsable", *dependency, str(script), str(link))
        except ValueError as error:
            for number in numbers:
                _ask("scancel", number)
            raise ValueError(f"{error}\nNothing is queued.") from error
        numbers.append(answer.strip().partition(";")[0])
    return numbers


def _ask(command: str, *arguments: str) -> str:
    """The output of a command of Slurm; ValueError where it fails or does not answer."""
    overrides = [f"SBATCH_{name}" for name in OVERRIDES]
    try:
        process = subprocess.run(
            [command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            env={name: value for name, value in os.environ.items() if name not in overrides},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{command} does not answer: {error}") from error
    if process.returncode:
        raise ValueError(
            f"{command} says: {process.stderr.strip() or f'status {process.returncode}'}"
        )
    return process.stdout
