"""Disturb a training run again and again, start it again, and see whether it ends as if nothing had been.

    python tools/drill_faults.py --kills 30 --ranks 2 --seed 1 --output outputs/drill [--steps N] [--kinds kill sigterm]

A tiny random model learns arithmetic on the CPU. For every layout (`--tensor-parallel`) one run is left in peace. A
second one, with the same settings, is disturbed, and started again by the very same command, until it has its steps.
Then

- its metrics, but for times, are those of the first, row by row and bit by bit;
- every disturbance ended it with the right status, in bounded time, and lost at most a few steps;
- no process and no half-written file or folder is left.

Prints a table and one JSON line per disturbance; ends with 1 where something was not so. `--quick`: six kinds in one
run. The kinds are in tools/drill_kinds.py. A disk that fills up needs root (a tmpfs is mounted); else file sizes are
limited.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.distributed.fault_tolerance.exit_codes import (
    FINISHED,
    SAVED_AND_STOPPED,
    clear_exit_status,
    read_exit_status,
)
from tools.drill_kinds import KINDS, mount_disk, unmount_disk
from tools.drill_run import REPOSITORY, Attempt, metric_lines, start

START_SECONDS = 300.0
"""By when a run, on a busy machine too, has made its first steps."""
END_SECONDS = 120.0
"""By when a disturbed run has ended."""
MOST_LOST = 4
"""Steps that may be lost: those since the last save, one more save where the newest is damaged."""
STEPS_PER_KILL = 5
QUICK = ("kill-save", "sigterm", "bit-flip", "kill-sync", "disk-full", "kill-rollout")
TIMES = ("seconds/", "tokens_per_second/", "memory/", "rollout/idle_share", "sync/", "saved")


@dataclass
class Outcome:
    """What came of a disturbance."""

    layout: str
    kind: str
    step: int
    """Steps that were done."""
    done: str
    """What was done to the run."""
    status: int
    told: str
    """The run's own last words."""
    end_seconds: float
    """From the disturbance to the end of the last process."""
    recovery_seconds: float = float("nan")
    """From the next start to its first new step."""
    lost_steps: int = -1


@dataclass(frozen=True)
class Drill:
    """The settings of one chain."""

    output: Path
    ranks: int
    tensor: int
    steps: int
    base: Path
    """Folder with `data/` and `base/`, the model."""

    @property
    def layout(self) -> str:
        return f"tp{self.tensor}-dp{self.ranks // self.tensor}"

    def overrides(self) -> list[str]:
        return [
            f"model.path={self.base}/base",
            f"data.train_path={self.base}/data/train.jsonl",
            f"run.total_steps={self.steps}",
            f"parallel.tensor={self.tensor}",
            "data.prompts_per_step=8",
            "optimizer.warmup_steps=1",
            "rollout.group_size=4",
            "rollout.cpu_kv_cache_gib=0.1",
            "rollout.progress_bar=false",
            "algorithm.n_minibatches=2",
            # A random model never answers; what it is cut off at is told apart from the rest, so that it learns.
            "reward.mask_no_eos_with_zero=true",
            "save.ckpt_freq_steps=1",
            "telemetry.tensorboard=false",
        ]

    def start(self, folder: Path) -> Attempt:
        """As launch/slurm does it: how an earlier start ended says nothing about this one."""
        clear_exit_status(folder / "run")
        return start(self.ranks, self.overrides(), folder / "run", self.output / f"{folder.name}.console.txt")


def make_base(folder: Path) -> None:
    """Problems and a random model, by the tools that users have."""
    data = ["tools/make_arithmetic.py", "--output", f"{folder}/data", "--train", "200", "--heldout", "20"]
    model = ["tools/make_tiny_model.py", "--output", f"{folder}/base"]
    for command in (data, model):
        subprocess.run([sys.executable, *command], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)


def leave_in_peace(drill: Drill) -> list[dict[str, float]]:
    """The rows of a run that nobody disturbs."""
    folder = drill.output / "peace"
    attempt = drill.start(folder)
    attempt.launcher.wait(START_SECONDS + 20 * drill.steps)
    left = attempt.wait_gone(END_SECONDS)
    if attempt.launcher.returncode != 0 or left:
        raise RuntimeError(f"the undisturbed run failed (left: {left}):\n{attempt.console()[-3000:]}")
    return [json.loads(line) for line in metric_lines(folder / "run")]


def disturb(drill: Drill, kinds: list[str], rng: random.Random) -> tuple[list[Outcome], list[str]]:
    """One run with all those disturbances, to its end: what came of each, and what was wrong."""
    folder, outcomes, problems = drill.output / "disturbed", [], []
    for name in [*kinds, None]:
        kind = KINDS[name] if name else None
        before = int(json.loads(([*metric_lines(folder / "run")] or ['{"step": 0}'])[-1])["step"])
        started = time.monotonic()
        attempt = drill.start(folder)
        if kind is None or kind.rows is not None:
            rows = attempt.rows_or_end(1, START_SECONDS)
            note_recovery(outcomes, rows, before, time.monotonic() - started)
        if kind is None:
            attempt.launcher.wait(START_SECONDS + 20 * drill.steps)
            problems += [f"left at the end: {one}" for one in attempt.wait_gone(END_SECONDS)]
            return outcomes, problems + ending_problems(folder / "run")
        if kind.rows is not None:
            attempt.rows_or_end(kind.rows, START_SECONDS)
        if attempt.ended:
            problems.append(f"{name}: the run ended before it was disturbed; see {attempt.console_path}")
            return outcomes, problems
        done, moment = kind.act(attempt, rng), time.monotonic()
        left = attempt.wait_gone(END_SECONDS)
        took = time.monotonic() - moment
        step = max([before, *(int(row["step"]) for row in attempt.new_rows())])
        said = read_exit_status(folder / "run")
        if kind.spoil:
            done = f"{done}; {kind.spoil(folder / 'run', rng)}"
        outcomes.append(Outcome(drill.layout, name or "", step, done, said.status, said.message, took))
        problems += [f"{name}: a process was left: {one}" for one in left]
        if said.status not in kind.statuses:
            problems.append(f"{name}: status {said.status}, needed {kind.statuses}: {said.message}")
        tell(outcomes[-1])
    raise AssertionError("the last attempt returns")


def note_recovery(outcomes: list[Outcome], rows: list[dict[str, float]], before: int, seconds: float) -> None:
    """A start's first new step ends the recoveries that were open; several, where one was disturbed while it began."""
    for outcome in outcomes:
        if outcome.lost_steps < 0 and rows:
            outcome.recovery_seconds = seconds
            outcome.lost_steps = max(0, before - (int(rows[0]["step"]) - 1))


def ending_problems(run: Path) -> list[str]:
    """What a finished run must not have left, and must have."""
    found = [f"{path.relative_to(run)} was left" for path in run.rglob("*") if is_scratch(path)]
    said = read_exit_status(run)
    if said.status != FINISHED:
        found.append(f"the last start did not finish: status {said.status}, {said.message}")
    return found


def is_scratch(path: Path) -> bool:
    return path.name.endswith((".partial", ".tmp"))


def lost_too_much(outcomes: list[Outcome]) -> list[str]:
    """Runs that save before they end lose nothing; the others little."""
    found = []
    for one in outcomes:
        most = 0 if one.status == SAVED_AND_STOPPED else MOST_LOST
        if not 0 <= one.lost_steps <= most:
            found.append(f"{one.kind} at step {one.step}: {one.lost_steps} steps lost, at most {most} may be")
    return found


def without_times(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if not key.startswith(TIMES) and "memory" not in key}


def differences(peace: list[dict[str, float]], disturbed: list[dict[str, float]]) -> list[str]:
    """The first numbers that are not the same, bit by bit, and steps that are missing or there twice."""
    if not any(row["train/grad_norm"] > 0 for row in peace):
        return ["nothing was learned in peace: equal metrics would say nothing"]
    steps = [[int(row["step"]) for row in rows] for rows in (peace, disturbed)]
    if steps[0] != steps[1]:
        return [f"the steps are {steps[1]}, in peace {steps[0]}"]
    pairs = [(without_times(a), without_times(b)) for a, b in zip(peace, disturbed, strict=True)]
    found = [
        f"step {a['step']}: {key} is {b.get(key)}, in peace {a.get(key)}"
        for a, b in pairs
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]
    return found[:5]


def tell(outcome: Outcome) -> None:
    print(
        f"{outcome.kind}, step {outcome.step}: {outcome.done}; status {outcome.status} after "
        f"{outcome.end_seconds:.1f} s: {outcome.told}",
        flush=True,
    )


def print_table(outcomes: list[Outcome]) -> None:
    print(
        f"\n{'layout':9} {'kind':14} {'step':>4} {'status':>6} {'end s':>6} {'recovery s':>10} {'steps lost':>10}"
    )
    for one in outcomes:
        print(
            f"{one.layout:9} {one.kind:14} {one.step:4} {one.status:6} {one.end_seconds:6.1f} "
            f"{one.recovery_seconds:10.1f} {one.lost_steps:10}"
        )
    for one in outcomes:
        print(json.dumps({"drill": "faults", **asdict(one)}))


def run_layout(drill: Drill, kinds: list[str], rng: random.Random) -> tuple[list[Outcome], list[str]]:
    """Both runs of a layout."""
    drill.output.mkdir(parents=True)
    folder = drill.output / "disturbed"
    mounted = "disk-full" in kinds and mount_disk(folder)
    try:
        peace = leave_in_peace(drill)
        outcomes, problems = disturb(drill, kinds, rng)
        rows = [json.loads(line) for line in metric_lines(folder / "run")]
        problems += differences(peace, rows) + lost_too_much(outcomes)
    finally:
        if mounted:
            shutil.copytree(folder, drill.output / "disturbed.kept", dirs_exist_ok=True)
            unmount_disk(folder)
    return outcomes, [f"{drill.layout}: {one}" for one in problems]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Disturb training runs and see whether they recover.")
    parser.add_argument("--output", type=Path, default=Path("outputs/drill"), help="a new folder")
    parser.add_argument("--kills", type=int, default=30, help="disturbances in all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[2, 1], help="a layout for each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--steps", type=int, help=f"of every run; default: {STEPS_PER_KILL} per disturbance, and 2"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--quick", action="store_true", help="six kinds, one layout")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kinds, arguments.kills, arguments.tensor_parallel = list(QUICK), len(QUICK), [2]
    if arguments.output.exists():
        parser.error(f"--output {arguments.output} is there already; give a new folder")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    output, rng = arguments.output.resolve(), random.Random(arguments.seed)
    output.mkdir(parents=True)
    make_base(output)
    outcomes: list[Outcome] = []
    problems: list[str] = []
    layouts = arguments.tensor_parallel
    for number, tensor in enumerate(layouts):
        share = arguments.kills // len(layouts) + (number < arguments.kills % len(layouts))
        first = len(outcomes)
        kinds = [arguments.kinds[(first + k) % len(arguments.kinds)] for k in range(share)]
        steps = arguments.steps or STEPS_PER_KILL * share + 2
        drill = Drill(output / f"tp{tensor}", arguments.ranks, tensor, steps, output)
        more, wrong = run_layout(drill, kinds, rng)
        outcomes, problems = outcomes + more, problems + wrong
    print_table(outcomes)
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return 1 if problems or len(outcomes) != arguments.kills else 0


if __name__ == "__main__":
    sys.exit(main())
