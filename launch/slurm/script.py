"""The script of a job: Slurm's options, the job's settings, and after them `job.sh`.

`job.sh` is the same for all jobs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.slurm.cluster import OUTPUT_MARK, seconds_of
from launch.slurm.programs import Program
from rlmath.config.shipped_files import INSTALLED

ROOT = Path(__file__).resolve().parents[2]
BODY = Path(__file__).with_name("job.sh")
SIGNAL_MARGIN_SECONDS = 60
"""Seconds by which Slurm signals earlier than `grace_seconds` before the limit.

After saving the ranks still have to end."""
MOST_SIGNAL_SECONDS = 65535
"""Slurm's bound of --signal."""
MOST_LINKS = 100
RUNTIMES = ("none", "pyxis", "docker")

RESERVED_OPTIONS = (
    *("--job-name", "--comment", "--chdir", "--output", "--error", "--open-mode"),
    *(
        "--nodes",
        "--ntasks",
        "--ntasks-per-node",
        "--tasks",
        "--tasks-per-node",
        "--gpus",
        "--gpus-per-node",
    ),
    *("--partition", "--time", "--signal", "--requeue", "--no-requeue"),
    *("--array", "--wrap", "--wait", "--test-only"),
)
"""Options of sbatch on which the checks, the queue's other jobs or the script rely.

--mem and --exclusive are not among them: a job may do with less than whole nodes."""

_PLAIN = re.compile(r"[\w./+=:@~,-]+", flags=re.ASCII)
"""What stands in a line of Slurm's options as it is."""
_NAME = re.compile(r"[\w.-]{1,64}", flags=re.ASCII)


@dataclass(frozen=True)
class Job:
    """A job as it is asked for."""

    program: Program
    name: str
    nodes: int
    gpus_per_node: int
    ranks_per_node: int
    workdir: Path
    """The folder that relative paths of the program start from."""
    logs: Path
    """The folder of the logs of the job and its nodes."""
    python: str
    """The Python that runs on the nodes, or in the container."""
    partition: str | None = None
    time: str | None = None
    continues: str = "no"
    """What becomes of a run that was stopped before its end: "no", "requeue" or "chain"."""
    links: int = 1
    """Jobs of a chain."""
    runtime: str = "none"
    """The program that starts the container: one of RUNTIMES."""
    image: str = ""
    mounts: tuple[Path, ...] = ()
    """Folders that a container sees, beside the repository and `workdir`."""
    slurm_options: tuple[str, ...] = ()
    """More options of sbatch, such as "--account=math"."""

    @property
    def signal_seconds(self) -> int:
        """How long before the time limit Slurm tells the run to save."""
        return self.program.grace_seconds + SIGNAL_MARGIN_SECONDS

    @property
    def seconds(self) -> float | None:
        """The time limit; None where none is given, or none that can be read.

        `job_problems` reports one that cannot be read."""
        try:
            return None if self.time is None else seconds_of(self.time)
        except ValueError:
            return None

    @property
    def roles(self) -> str:
        """Which nodes train and which generate, where they are not the same; else "".

        Nodes are counted from 1 in the order of their names, in which torchrun numbers them."""
        program = self.program
        on_node = self.ranks_per_node
        trainers = self.nodes * on_node - program.engine_ranks
        if not program.engine_ranks or trainers < 1:
            return ""
        training_nodes, shared_ranks = divmod(trainers, on_node)
        parts = [_span(1, training_nodes, "train")] if training_nodes else []
        if shared_ranks:
            parts.append(
                f"node {training_nodes + 1} does both ({shared_ranks} of its {on_node} ranks train)"
            )
        first_engine_node = training_nodes + 1 + bool(shared_ranks)
        parts += (
            [_span(first_engine_node, self.nodes, "generate")]
            if first_engine_node <= self.nodes
            else []
        )
        engines = range(trainers, self.nodes * on_node, program.engine_size)
        last_offset = program.engine_size - 1
        if program.engine_size <= on_node and any(
            rank // on_node != (rank + last_offset) // on_node for rank in engines
        ):
            parts.append("some engines have ranks on two nodes")
        return ", ".join(parts)

    @property
    def seen(self) -> tuple[Path, ...]:
        """The folders that a container sees."""
        return tuple(dict.fromkeys((ROOT, self.workdir, *self.mounts)))


def _span(first: int, last: int, does: str) -> str:
    return f"node {first} {does}s" if first == last else f"nodes {first}-{last} {does}"


def job_problems(job: Job) -> Iterator[str]:
    """What is wrong with a job, whatever Slurm says of it."""
    if job.nodes < 1:
        yield f"--nodes is {job.nodes}; needed: at least 1."
    if job.ranks_per_node < 1:
        yield (
            f"--ranks-per-node is {job.ranks_per_node}; needed: at least 1. Without GPUs "
            "(--gpus-per-node 0) it must "
            "be given."
        )
    if job.gpus_per_node < 0:
        yield f"--gpus-per-node is {job.gpus_per_node}; needed: at least 0."
    if 0 < job.gpus_per_node < job.ranks_per_node:
        yield (
            f"--ranks-per-node is {job.ranks_per_node} and --gpus-per-node {job.gpus_per_node}; "
            "every rank needs a GPU "
            "of its own. For a run on CPU give --gpus-per-node 0."
        )
    if job.continues != "no" and not job.program.goes_on:
        yield (
            'run.recover_mode is "disabled": every start of this job would begin anew. Without '
            "--requeue and --chain, "
            "or give run.recover_mode=auto (and another run.output_dir, to begin anew once)."
        )
    if not 1 <= job.links <= MOST_LINKS:
        yield f"--chain is {job.links}; needed: from 1 to {MOST_LINKS}."
    if not _NAME.fullmatch(job.name):
        yield f'--name is "{job.name}"; needed: at most 64 letters, digits, ".", "_" and "-".'
    yield from _plain_problems(job)
    yield from _time_problems(job)
    yield from _container_problems(job)


def _plain_problems(job: Job) -> Iterator[str]:
    """Slurm's options are lines of a file, where spaces, quotes and % mean something."""
    words = {
        "the run's folder": job.program.output,
        "the folder that you submit from": job.workdir,
        "the folder of logs": job.logs,
        "--partition": job.partition,
        "--time": job.time,
    }
    for subject, word in words.items():
        if word is not None and not _PLAIN.fullmatch(str(word)):
            yield (
                f'{subject} is "{word}"; for Slurm it may have only letters, digits and ._-+=:@,~/ '
                "in it. Give another."
            )
    for option in job.slurm_options:
        name = option.partition("=")[0]
        if not re.fullmatch(r"--[a-z][a-z-]+", name) or not option.isprintable() or " " in option:
            yield (
                f'--sbatch is "{option}"; needed: one option of sbatch without spaces, as in '
                "--sbatch=--account=math."
            )
        elif any(
            reserved.startswith(name) for reserved in RESERVED_OPTIONS
        ):  # sbatch takes "--sig" for "--signal"
            yield (
                f'--sbatch is "{option}", which the script sets itself or cannot have. Leave it '
                "out, or see --help."
            )


def _time_problems(job: Job) -> Iterator[str]:
    """Problems of the time limit, and of the time to save before it."""
    if job.signal_seconds > MOST_SIGNAL_SECONDS:
        yield (
            f"run.stop_grace_seconds is {job.program.grace_seconds}; Slurm can tell a run to save "
            "at most "
            f"{MOST_SIGNAL_SECONDS} s before its end. Lower it to "
            f"{MOST_SIGNAL_SECONDS - SIGNAL_MARGIN_SECONDS}."
        )
    if job.time is None:
        return
    try:
        seconds = seconds_of(job.time)
    except ValueError as error:
        yield str(error)
        return
    if seconds <= job.signal_seconds:
        yield (
            f"--time is {seconds:g} s, and the run is told to save {job.signal_seconds} s before "
            "its end "
            f"(run.stop_grace_seconds and {SIGNAL_MARGIN_SECONDS}): nothing is left to train in. "
            "Give more time, or "
            "lower run.stop_grace_seconds."
        )


def _container_problems(job: Job) -> Iterator[str]:
    """Problems of the container, and of what it sees."""
    if job.runtime != "none" and INSTALLED.is_dir():
        yield (
            f"--runtime {job.runtime} runs the code of a checkout in the container, and here "
            "rlmath is installed as a "
            "package. Submit from a checkout, with python launch/slurm/submit.py."
        )
    if (job.runtime == "none") != (job.image == ""):
        yield (
            f'--runtime is "{job.runtime}" and --container is "{job.image}"; a container needs an '
            "image and --runtime "
            "pyxis or docker, a job without one neither."
        )
    if job.image.startswith("-") or not job.image.isprintable():
        yield f'--container is "{job.image}"; needed: the name or file of an image.'
    if job.runtime == "none":
        return
    for path in (job.program.output, job.logs, *job.program.reads):
        if not any(path.is_relative_to(folder) for folder in job.seen):
            folders_text = ", ".join(map(str, job.seen))
            yield (
                f'"{path}" is outside of what the container sees ({folders_text}). Add --mount '
                "with a folder that it is in."
            )
    if Path("/") in job.seen:
        yield "--mount / would hide the image itself. Give the folders of data and models."
    for folder in job.seen:
        if set(str(folder)) & set(":,"):
            yield f'"{folder}" cannot be mounted: there is a ":" or "," in it. Give another folder.'


def script_text(job: Job) -> str:
    """The whole script."""
    options = "".join(f"#SBATCH {option}\n" for option in _slurm_options(job))
    settings = "".join(f"{name}={value}\n" for name, value in _settings(job).items())
    body = BODY.read_text(encoding="utf-8")
    roles = f"# {job.roles}\n\n" if job.roles else ""
    return f"#!/usr/bin/env bash\n{options}\n{roles}# shellcheck disable=SC2034\n{settings}\n{body}"


def _slurm_options(job: Job) -> Iterator[str]:
    """Options of sbatch, as lines of the script have them."""
    yield f"--job-name={job.name}"
    yield f"--comment={OUTPUT_MARK}{job.program.output}"
    yield f"--nodes={job.nodes}"
    yield "--ntasks-per-node=1"
    yield "--exclusive"
    yield "--mem=0"  # all that the nodes have
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if job.partition is not None:
        yield f"--partition={job.partition}"
    if job.time is not None:
        yield f"--time={job.time}"
    yield f"--chdir={job.workdir}"
    yield f"--output={job.logs}/%j.out"
    yield "--open-mode=append"
    yield f"--signal=USR1@{job.signal_seconds}"
    # Slurm itself queues a job again whose node has failed; of a chain the next link goes on.
    yield "--requeue" if job.continues == "requeue" else "--no-requeue"
    yield from job.slurm_options


def _settings(job: Job) -> dict[str, str]:
    """Bash's variables, quoted."""
    words = {
        "name": job.name,
        "program": ROOT / "launch" / job.program.file,
        "root": ROOT,
        "workdir": job.workdir,
        "output": job.program.output,
        "logs": job.logs,
        "python": job.python,
        "ranks_per_node": job.ranks_per_node,
        "grace_seconds": job.program.grace_seconds,
        "wait_seconds": job.program.wait_seconds,
        "runtime": job.runtime,
        "image": job.image,
        "continues": job.continues,
        "links": job.links,
    }
    arrays = {
        "arguments": job.program.arguments,
        "work_files": job.program.work_files,
        "mounts": job.seen,
    }
    quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
    return quoted | {name: f"({shlex.join(map(str, words))})" for name, words in arrays.items()}
