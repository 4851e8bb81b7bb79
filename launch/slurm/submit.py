"""Submit a run to Slurm: check it, write its script, put it into the queue.

rlmath submit --config my.yaml --nodes 16 --partition gpu parallel.tensor=4
rlmath submit --program sft --config my_sft.yaml --nodes 2
rlmath submit --program evaluate --nodes 2 -- --model outputs/first \\
    --benchmarks aime24 --data-dir data/benchmarks --output outputs/eval

Paths begin at the folder it is called from. --dry-run prints the script;
docs/clusters.md says what a job does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launch.slurm import cluster
from launch.slurm.programs import evaluation, training
from launch.slurm.script import RUNTIMES, Job, job_problems, script_text
from rlmath.config.help import raise_problems
from rlmath.config.terminal import escape_terminal
from rlmath.distributed.fault_tolerance.exit_codes import MISTAKE, clear_exit_status

LOGS = Path("outputs") / "slurm"


def main(argv: Sequence[str] | None = None) -> int:
    """0, or MISTAKE where nothing was queued."""
    escape_terminal()
    command_line = parse(sys.argv[1:] if argv is None else argv)
    try:
        job = job_of(command_line)
        raise_problems(
            "this job",
            [*job.program.problems, *job_problems(job), *slurm_problems(job, command_line.dry_run)],
        )
        text = script_text(job)
        if command_line.dry_run:
            print(text, end="")
            return 0
        script = write_script(job, text)
        numbers = cluster.submit(script, job.links)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    tell(job, script, numbers)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; what stands behind "--" is the program's, and so are overrides."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="rlmath submit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--program", default="grpo", choices=("grpo", "sft", "evaluate"), help="default grpo")
    add(
        "--config",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="YAML file; later files win",
    )
    add("overrides", nargs="*", metavar="key.sub=value", help="settings that win over the files'")
    add("--dry-run", action="store_true", help="check, print the script, queue nothing")
    of_slurm = parser.add_argument_group("what Slurm is told")
    add = of_slurm.add_argument
    add("--nodes", type=int, default=1, help="default 1")
    add(
        "--gpus-per-node",
        type=int,
        default=8,
        help="each with a rank (default 8); 0: a job without GPUs",
    )
    add("--partition", help="one, or several as a,b; default: Slurm's")
    add(
        "--time",
        help="limit, as in 90 (minutes), 12:00:00, 2-00 (days-hours); default: the partition's",
    )
    add("--name", help='of the job; default: "rlmath-" and the name of the run\'s folder')
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="more: --sbatch=--account=math",
    )
    add = of_slurm.add_mutually_exclusive_group().add_argument
    add("--requeue", action="store_true", help="a run that was stopped is queued again and goes on")
    add(
        "--chain",
        type=int,
        metavar="N",
        help="N jobs, one after another, each goes on from the last",
    )
    add = parser.add_argument_group("what runs on the nodes").add_argument
    add("--ranks-per-node", type=int, help="default: as many as GPUs")
    add("--python", help="default: the one that runs this program, in a container python3")
    add("--container", default="", metavar="IMAGE", help="run in this image, with --runtime")
    add("--runtime", default="none", choices=RUNTIMES, help="what starts containers (default none)")
    add(
        "--mount",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder that containers see",
    )
    command_line = parser.parse_intermixed_args(list(argv[:cut]))
    program_words = list(argv[cut + 1 :])
    if command_line.program == "evaluate":
        if command_line.config or command_line.overrides:
            parser.error(
                "an evaluation has no --config and no overrides; give its own options behind --"
            )
        command_line.program_words = program_words
    else:
        command_line.overrides += program_words
    return command_line


def job_of(command_line: argparse.Namespace) -> Job:
    """ValueError where settings cannot be loaded."""
    ranks_per_node = (
        command_line.gpus_per_node
        if command_line.ranks_per_node is None
        else command_line.ranks_per_node
    )
    ranks = max(1, command_line.nodes * ranks_per_node)
    if command_line.program == "evaluate":
        program = evaluation(command_line.program_words, ranks)
    else:
        program = training(command_line.program, command_line.config, command_line.overrides, ranks)
    name = command_line.name or f"rlmath-{program.output.name}"
    continues = (
        "requeue" if command_line.requeue else "chain" if command_line.chain is not None else "no"
    )
    return Job(
        program,
        name,
        command_line.nodes,
        gpus_per_node=command_line.gpus_per_node,
        ranks_per_node=ranks_per_node,
        workdir=Path.cwd(),
        logs=Path.cwd() / LOGS / name,
        python=command_line.python
        or (sys.executable if command_line.runtime == "none" else "python3"),
        partition=command_line.partition or os.environ.get("SBATCH_PARTITION") or None,
        time=command_line.time,
        continues=continues,
        links=1 if command_line.chain is None else command_line.chain,
        runtime=command_line.runtime,
        image=command_line.container,
        mounts=tuple(path.absolute() for path in command_line.mount),
        slurm_options=tuple(command_line.sbatch),
    )


def slurm_problems(job: Job, dry_run: bool) -> list[str]:
    """What Slurm has against it.

    A dry run does without Slurm where there is none, or none that answers."""
    if not cluster.slurm_is_here():
        if dry_run:
            print(
                "There is no sbatch here: partition and queue are not looked at.", file=sys.stderr
            )
            return []
        return [
            "there is no sbatch here. Submit from a machine of the cluster, or look at the script "
            "by --dry-run."
        ]
    need = cluster.Need(job.nodes, job.gpus_per_node, job.seconds, job.signal_seconds)
    try:
        problems = cluster.partition_problems(job.partition, cluster.partitions(), need)
        return [*problems, *cluster.queue_problems(job.name, job.program.output)]
    except ValueError as error:
        if dry_run:
            print(f"Partition and queue are not looked at: {error}", file=sys.stderr)
            return []
        return [str(error)]


def write_script(job: Job, text: str) -> Path:
    """Write the script into the folder of the job's logs and return its path.

    The exit status of an earlier run is forgotten, because later links of a chain look at it."""
    path = job.logs / "job.sh"
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        clear_exit_status(job.program.output)
    except OSError as error:
        raise ValueError(
            f"the job's script cannot be written: {error}. Submit from another folder."
        ) from error
    return path


def tell(job: Job, script: Path, numbers: Sequence[str]) -> None:
    """Print where the jobs, their script, logs and output are."""
    jobs = " ".join(numbers)
    print(f"Queued as job {jobs}" + (", each after the one before" if len(numbers) > 1 else ""))
    if job.roles:
        print(f"  ranks   {job.roles}")
    print(
        f"  script  {script}\n  log     {job.logs}/{numbers[0]}.out\n  nodes   "
        f"{job.logs}/{numbers[0]}/"
    )
    print(f"  output  {job.program.output}\n  cancel  scancel {jobs}")


if __name__ == "__main__":
    sys.exit(main())
