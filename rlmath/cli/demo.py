"""The laptop demo: make data and a random model, teach it with SFT, train it with GRPO, show gains.

    rlmath demo [--seed 1] [--ranks 2] [--tensor-parallel 2] [--pipeline-parallel 1] [--algorithm
    grpo] [section.key=value ...]

It runs the same programs, one after the other, that a user would: rlmath.cli.make_arithmetic,
rlmath.cli.make_tiny_model, rlmath sft, rlmath train, which validates the model on held-out problems
before and after. Everything is written under outputs/demo; what an earlier demo left is moved to
outputs/demo.001, .002, ...
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlmath.config.help import counted, raise_problems, schema_problems
from rlmath.config.load import load_config, preset_settings
from rlmath.config.run_files import EXPORT_FOLDER, REPORT_FILE, VALIDATION_FILE
from rlmath.config.schema import RewardConfig
from rlmath.config.shipped_files import PACKAGE, shipped
from rlmath.config.terminal import escape_terminal
from rlmath.distributed.device_kind import gpu_count
from rlmath.distributed.fault_tolerance.exit_codes import MISTAKE
from rlmath.planning.machine_room import OVERSUBSCRIBE, refuse_crowding, this_machine
from rlmath.rewards.schemes import WRONG_ANSWER
from rlmath.telemetry.metrics_writer import read_metrics

ALGORITHMS = shipped("configs/algorithms")
GOOD_ACCURACY = 0.9
RLMATH = (sys.executable, "-P", "-m", "rlmath.cli.main")
LORA_RATES = ("optimizer.lr=2e-3", "optimizer.min_lr=1e-4")
"""Learning rates of the demo's adapters: ten times those of configs/demo.yaml."""
TOOLS = "tools"
"""The algorithm whose demo has products for problems."""
FEEDBACK = "feedback"
"""The algorithm whose demo has problems that are guessed at."""
OPERATIONS = {
    TOOLS: ["--operation", "multiply"],
    FEEDBACK: ["--operation", "guess"],
}
"""Options that make the problems of these demos; the others' are additions."""
TOOL_WORDS = ("tools.format=fence", "tools.max_calls=1", "tools.max_output_tokens=64")
"""Settings of the demo with a Python tool, in both of its trainings."""
EXPERTS = "experts"
"""The algorithm whose demo has a mixture of experts for a model."""
DEMO_EXPERTS = 8
"""Experts of each of its layers."""
EXPERT_WORDS = ("policy.dtype=bfloat16",)
"""Settings of the demo with experts: in float32 engine and policy round too much alike to differ."""
REWARD = f"reward.scheme={RewardConfig.scheme}"
"""The reward of every objective whose paper pays for right answers alone.

It is the same for all of them, so that their curves can be compared."""
MOST_RANKS = 2
"""Most ranks without --ranks; the supervised training never has more."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells give it."""


def child_environment() -> dict[str, str]:
    """The programs find this package; threads that wait do not spin."""
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]))
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return os.environ | quiet | {"PYTHONPATH": path}


def run(title: str, command: list[str], environment: dict[str, str]) -> None:
    """Run one program, which writes where this one does.

    Its failure ends the demo with its exit status. After Ctrl-C, which the terminal sends to the
    program too, wait for its end: it may save. Then end with INTERRUPTED."""
    print(f"\n== {title}", flush=True)
    started = time.perf_counter()
    places = {"env": environment, "stdout": sys.stdout, "stderr": sys.stderr}
    program = subprocess.Popen(command, **places)
    status = None
    interrupted = False
    while status is None:
        try:
            status = program.wait()
        except KeyboardInterrupt:
            interrupted = True
    if interrupted or status:
        outcome = "was interrupted" if interrupted else f"failed with status {status}"
        print(f"demo: {title!r} {outcome}: {' '.join(command)}", file=sys.stderr)
        raise SystemExit(INTERRUPTED if interrupted else status)
    print(f"   {time.perf_counter() - started:.1f} s", flush=True)


def set_aside(folder: Path) -> None:
    """Move what an earlier demo left to the next free numbered name."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number:03d}")).exists():
        number += 1
    folder.rename(target)
    print(f"The earlier demo is kept in {target}")


def torchrun(ranks: int) -> list[str]:
    """The start of a command that runs so many ranks on this machine."""
    return [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]


def one_thread() -> dict[str, str]:
    """The environment of programs of several ranks: one computing thread for each rank."""
    return child_environment() | {"OMP_NUM_THREADS": "1"}


def teach(folder: Path, seed: int, algorithm: str) -> None:
    """Train the random model on worked solutions.

    There is one data-parallel rank for each of two cores (or one on a machine with one GPU),
    whatever the layout of the later training: every seed has one base model."""
    ranks = min(fitting_ranks(gpu_count("auto")), os.cpu_count() or 1)
    command = [*RLMATH, "sft", "--ranks", str(ranks)]
    command += ["--config", str(shipped("configs/demo_sft.yaml"))]
    command += [
        f"run.output_dir={folder / 'sft'}",
        f"run.seed={seed}",
        f"model.path={folder / 'random'}",
    ]
    command += [f"data.train_path={folder / 'data' / 'worked.jsonl'}"]
    command += [f"sft.held_out_path={folder / 'data' / 'worked_heldout.jsonl'}"]
    title = "Supervised training: a tiny model that can add but slips"
    if algorithm == TOOLS:
        command += [*TOOL_WORDS, "sft.max_sequence_tokens=96"]
        title = "Supervised training: a tiny model that guesses products, and calls Python at times"
    elif algorithm == FEEDBACK:
        command.append("sft.max_sequence_tokens=96")
        title = "Supervised training: a tiny model that guesses, and guesses again"
    run(title, command, one_thread())
    shutil.copytree(folder / "sft" / EXPORT_FOLDER, folder / "base")


def make_base(folder: Path, seed: int, algorithm: str = "grpo") -> None:
    """Make data, a random model and the base model, in `data`, `random` and `base`.

    The base model is the random one after supervised training, for the demo of an algorithm."""
    experts = DEMO_EXPERTS if algorithm == EXPERTS else 0
    for title, program, part, options in (
        ("Arithmetic problems", "make_arithmetic", "data", OPERATIONS.get(algorithm, [])),
        ("A tiny random model", "make_tiny_model", "random", ["--experts", str(experts)]),
    ):
        words = ["--output", str(folder / part), "--seed", str(seed), *options]
        run(
            title,
            [sys.executable, "-P", "-m", f"rlmath.cli.{program}", *words],
            child_environment(),
        )
    teach(folder, seed, algorithm)


def training_words(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """Config files and settings of the training run of `folder`'s base model."""
    data_folder = folder / "data"
    words = ["--config", str(shipped("configs/demo.yaml"))]
    words += ["--config", str(ALGORITHMS / f"{arguments.algorithm}.yaml")]
    words += [
        f"run.output_dir={folder / 'run'}",
        f"run.seed={arguments.seed}",
        f"model.path={folder / 'base'}",
    ]
    words += [f"data.train_path={data_folder / 'train.jsonl'}"]
    words += [
        f"parallel.tensor={arguments.tensor_parallel}",
        f"parallel.pipeline={arguments.pipeline_parallel}",
    ]
    words += [f"validation.paths=[{json.dumps(str(data_folder / 'heldout.jsonl'))}]"]
    if preset_settings(arguments.algorithm).get("reward.scheme") in WRONG_ANSWER:
        words.append(REWARD)
    if arguments.algorithm == "lora":  # its file leaves the learning rate to the model's size
        words += LORA_RATES
    if arguments.algorithm == TOOLS:
        words += [*TOOL_WORDS, "rollout.max_new_tokens=48"]
    if arguments.algorithm == EXPERTS:
        words += EXPERT_WORDS
    if arguments.algorithm == FEEDBACK:
        words.append("turns.max_feedback_tokens=64")
    return [
        *words,
        "validation.every_steps=1000",
        "validation.temperature=1",
        "validation.top_p=1",
        *arguments.overrides,
    ]


def train(folder: Path, arguments: argparse.Namespace) -> Path:
    """The training run of `folder`'s base model, and its folder.

    Before and after, every held-out problem is answered once at temperature 1."""
    command = [
        *RLMATH,
        "train",
        "--ranks",
        str(arguments.ranks),
        *training_words(folder, arguments),
    ]
    command += [OVERSUBSCRIBE] * arguments.oversubscribe
    layout = f"TP{arguments.tensor_parallel} x PP{arguments.pipeline_parallel}"
    run(
        f"Training ({arguments.algorithm}) on {counted(arguments.ranks, 'rank')}, {layout}",
        command,
        one_thread(),
    )
    return folder / "run"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a tiny model with GRPO on this machine's CPU."
    )
    add = parser.add_argument
    overrides_help = "settings that are to differ in the training with GRPO"
    add("overrides", nargs="*", metavar="section.key=value", help=overrides_help)
    names = sorted(path.stem for path in ALGORITHMS.glob("*.yaml"))
    add("--seed", type=int, default=1, help="of data, model and training (default: 1)")
    add("--ranks", type=int, help="processes (default: 2; 1 on a machine with one GPU)")
    add("--tensor-parallel", type=int, help="of the training layout (default: 2; 1 on one rank)")
    add("--pipeline-parallel", type=int, default=1, help="of the training layout (default: 1)")
    algorithm_help = f"one of {', '.join(names)} (default: grpo)"
    add("--algorithm", choices=names, default="grpo", metavar="NAME", help=algorithm_help)
    add("--output", type=Path, default=Path("outputs/demo"), help="folder (default: outputs/demo)")
    started_help = (
        "when the user began, in seconds since 1970: the seconds with installation are told, too"
    )
    add("--started-at", type=float, help=started_help)
    add(
        OVERSUBSCRIBE,
        action="store_true",
        help="start more processes than this machine has room for",
    )
    return parser.parse_intermixed_args(argv)


def fitting_ranks(gpus: int) -> int:
    """Ranks of a demo on a machine with so many GPUs (0: on the CPU), each with its own GPU.

    >>> fitting_ranks(0), fitting_ranks(1), fitting_ranks(8)
    (2, 1, 2)
    """
    return min(MOST_RANKS, gpus or MOST_RANKS)


def fill_layout(arguments: argparse.Namespace, gpus: int) -> None:
    """Fill in the ranks and the tensor parallelism that the command line leaves open.

    They are those for a machine with so many GPUs (`fitting_ranks`). ValueError if the layout does
    not fit the ranks, or they do not fit the machine."""
    if arguments.ranks is None:
        arguments.ranks = fitting_ranks(gpus)
    if arguments.tensor_parallel is None:
        arguments.tensor_parallel = 1 if arguments.ranks == 1 else 2
    sizes = arguments.tensor_parallel, arguments.pipeline_parallel
    if arguments.ranks < 1 or min(sizes) < 1 or arguments.ranks % math.prod(sizes):
        raise ValueError(
            f"--ranks is {arguments.ranks}; needed: a multiple of TP x PP = "
            f"{' x '.join(map(str, sizes))}"
        )
    if gpus and arguments.algorithm == EXPERTS:
        raise ValueError(
            "--algorithm experts replays what the engine chose, which is not there for GPUs yet; "
            "hide them: CUDA_VISIBLE_DEVICES= rlmath demo --algorithm experts"
        )
    if not arguments.oversubscribe:
        refuse_crowding(arguments.ranks, this_machine(gpus))


def check_overrides(folder: Path, arguments: argparse.Namespace) -> None:
    """ValueError for settings on the command line that the training would refuse, minutes later."""
    config = load_config(
        [shipped("configs/demo.yaml"), ALGORITHMS / f"{arguments.algorithm}.yaml"],
        [word for word in training_words(folder, arguments) if "=" in word],
    )
    raise_problems("the settings", schema_problems(config))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, 2 on a mistake of the user's, or that of the stage that failed."""
    escape_terminal()
    started = time.time()
    arguments = parse(argv)
    folder = arguments.output.resolve()
    try:
        fill_layout(arguments, gpu_count("auto"))
        check_overrides(folder, arguments)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return MISTAKE
    if folder.exists():
        set_aside(folder)
    folder.mkdir(parents=True)
    make_base(folder, arguments.seed, arguments.algorithm)
    run_dir = train(folder, arguments)
    before, *_, after = read_metrics(str(run_dir), VALIDATION_FILE)
    name = "validation/accuracy"
    place = os.path.relpath(run_dir)
    end_time = time.time()
    print(f"\nThe trained model: {place}/{EXPORT_FOLDER}")
    print(f"Read samples:      {Path(sys.executable).with_name('rlmath')} samples {place}\n")
    print(
        f"Held-out accuracy, sampled at temperature 1, went from {before[name]:.1%} to "
        f"{after[name]:.1%} in "
        f"{after['step']:.0f} steps ({end_time - started:.0f} s without installation)."
    )
    steps = read_metrics(str(run_dir))
    if arguments.algorithm == TOOLS:
        calls = "tools/calls_per_completion"
        print(
            f"Calls of Python a completion: {steps[0][calls]:.2f} in the first step, "
            f"{steps[-1][calls]:.2f} in the last."
        )
    if arguments.algorithm == FEEDBACK:
        for row, place_of_step in ((steps[0], "first"), (steps[-1], "last")):
            print(
                f"Right in the {place_of_step} step: {row['turns/accuracy_first']:.1%} of first answers, "
                f"{row['turns/accuracy']:.1%} of last answers."
            )
    good_steps = [row["step"] for row in steps if row["rollout/accuracy"] >= GOOD_ACCURACY]
    if good_steps:
        print(f"Step {good_steps[0]:.0f} was the first with {GOOD_ACCURACY:.0%} right answers.")
    if arguments.started_at is not None:
        print(f"With installation it took {end_time - arguments.started_at:.0f} s.")
    print(f"Open {place}/{REPORT_FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
