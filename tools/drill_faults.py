"""Disturb training runs and start them again; see whether they end as if nothing had happened.

    python tools/drill_faults.py --kills 100 --seed 1 --output outputs/drill
        [--chains tp2 carry ...] [--kinds kill ...]

A tiny random model learns arithmetic on two CPU ranks. In every chain one run is disturbed, and
started again by the very same command, until all its disturbances are done. Another one, with the
same settings and as many steps, is left undisturbed. Then

- the metrics of the two, but for times, are the same, row by row and bit by bit, and so are their
  models' tensors;
- where completions are carried or groups deferred, most steps of the undisturbed run have left some
  in flight; where rollbacks are allowed, it has made one;
- every disturbance ended the run with the right status, in bounded time, and lost at most a few
  steps, or the run went on by itself;
- no process and no half-written file or folder is left.

Prints a table, one JSON line per disturbance and the time of all; ends with 1 where something was
not so. `--quick`: six kinds in one chain. The kinds are in tools/drill_kinds.py. One start takes
some that the run survives, one that ends it, and some between it and the next start. A disk that
fills up needs root (a tmpfs is mounted); else file sizes are limited.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.run_files import EXPORT_FOLDER, VALIDATION_FILE
from rlmath.distributed.fault_tolerance.exit_codes import (
    FINISHED,
    SAVED_AND_STOPPED,
    clear_exit_status,
    read_exit_status,
)
from rlmath.run.recovery.rollbacks_file import read_rollbacks
from rlmath.telemetry.metrics_writer import without_times
from tools.drill_damage import own_disk
from tools.drill_kinds import KINDS, VALIDATE_EVERY, Program
from tools.drill_run import REPOSITORY, Attempt, metric_lines, start

START_SECONDS = 300.0
"""Time within which a run makes its first steps, on a busy machine too."""
END_SECONDS = 120.0
"""Time within which a disturbed run ends."""
STEP_SECONDS = 20.0
"""Time within which a step is made."""
MOST_LOST = 6
"""Steps that may be lost: those since the last save, one or two saves more where the newest are
damaged."""
STEPS_BEFORE = 4
"""A run that is ended has made up to so many steps, where the kind asks for one."""
STEPS_AFTER = 2
"""Steps that a run makes after a disturbance that it survives."""
STEPS_UNTIL_NOTHING_IS_LEFT = 12
"""Before its last steps a run draws no more groups than these can learn from."""
ENDLESS = 100_000
"""Steps of a run until all its disturbances are done."""
QUICK = ("kill-save", "sigterm", "bit-flip", "kill-sync", "disk-full", "kill-rollout")
NEEDS_DISK = ("disk-full", "no-inodes")


@dataclass(frozen=True)
class Chain:
    """The settings of one chain of disturbances."""

    program: Program
    tensor: int
    settings: tuple[str, ...] = ()
    steps_after: int = STEPS_AFTER
    """Steps from the last start to the run's end, of which only that start and the undisturbed run
    know."""
    in_flight: str | None = None
    """The metric of what a step leaves unfinished: where it is 0, a disturbance tries nothing that
    "wait" has not."""
    goes_back: bool = False
    """The run has rollbacks: without any, a disturbance meets none."""

    @property
    def command(self) -> list[str]:
        name = {"grpo": "demo", "sft": "demo_sft"}[self.program]
        return [f"launch/train_{self.program}.py", "--config", f"configs/{name}.yaml"]


LONG_TAIL = ("rollout.group_size=2", "rollout.max_new_tokens=96", "rollout.slice_tokens=12")
"""Settings with which most steps leave something in flight: completions of several slices, in small
groups, of which some are complete after each round."""

CHAINS: dict[str, Chain] = {
    # A random model never answers; what it is cut off at is told apart from the rest, so that it
    # learns.
    "tp2": Chain("grpo", 2, ("reward.mask_no_eos_with_zero=true",)),
    "tp1": Chain(
        "grpo",
        1,
        (
            "reward.function=tools.drill_kinds:reward",
            f"validation.every_steps={VALIDATE_EVERY}",
            "validation.paths=[{base}/data/heldout.jsonl]",
            "validation.batch_size=8",
        ),
    ),
    # Completions are carried from step to step.
    "carry": Chain(
        "grpo",
        1,
        (
            "reward.mask_no_eos_with_zero=true",
            "rollout.tail=carry",
            "rollout.max_staleness=2",
            *LONG_TAIL,
            "algorithm.recompute_logprobs=true",
            "algorithm.importance_correction=token",
            "algorithm.importance_mask_high=5",
        ),
        steps_after=STEPS_UNTIL_NOTHING_IS_LEFT,
        in_flight="rollout/sequences_in_flight",
    ),
    # Groups with long completions are deferred.
    "defer": Chain(
        "grpo",
        1,
        ("reward.mask_no_eos_with_zero=true", "rollout.tail=defer", *LONG_TAIL),
        steps_after=STEPS_UNTIL_NOTHING_IS_LEFT,
        in_flight="rollout/deferred_groups",
    ),
    # All that adds a model, a memory of earlier steps or another seed. The rewards of a random
    # model go up and down, and a small drop is taken for a collapse: it goes back several times.
    "signals": Chain(
        "grpo",
        1,
        (
            "reward.function=tools.drill_kinds:reward",
            "algorithm.advantage=gae",
            "critic.pretrain_steps=1",
            "teacher.path={base}/base",
            "teacher.with_rewards=true",
            "algorithm.kl_coef=0.05",
            "algorithm.reference_every_steps=3",
            "data.curriculum=band",
            "algorithm.rollback=1000",
            "algorithm.rollback_lr_factor=0.98",
            "algorithm.rollback_reward_drop=0.3",
            "algorithm.rollback_reward_steps=3",
            "memory.offload_critic=true",
            "memory.offload_teacher=true",
        ),
        goes_back=True,
    ),
    "sft": Chain("sft", 1, ("data.train_path={base}/data/worked.jsonl", "sft.eval_every_steps=7")),
}
"""Chains by name, as `--chains` takes them; two ranks each."""


@dataclass
class Outcome:
    """What came of a disturbance."""

    chain: str
    kind: str
    step: int
    """Steps that were done."""
    done: str
    """What was done to the run."""
    status: int | None
    """None: the run went on, or was not running."""
    last_words: str
    """The run's own last words."""
    end_seconds: float
    """From the disturbance to the end of the last process, or to the next step of a run that
    continues."""
    recovery_seconds: float = float("nan")
    """From the next start to its first new step."""
    lost_steps: int = -1


@dataclass(frozen=True)
class Drill:
    """One chain, and where it runs."""

    name: str
    output: Path
    ranks: int
    base: Path
    """Folder with `data/` and `base/`, the model."""

    @property
    def chain(self) -> Chain:
        return CHAINS[self.name]

    def overrides(self) -> list[str]:
        """Overrides of every run of the chain."""
        common = [
            f"model.path={self.base}/base",
            "run.total_epochs=100000",
            f"parallel.tensor={self.chain.tensor}",
            "data.prompts_per_step=8",
            "optimizer.warmup_steps=1",
            "optimizer.decay=constant",  # so that a step does not depend on how many there will be
            "save.ckpt_freq_steps=1",
            "save.keep_last=3",
            "telemetry.tensorboard=false",
        ]
        grpo = [
            f"data.train_path={self.base}/data/train.jsonl",
            "rollout.group_size=4",
            "rollout.cpu_kv_cache_gib=0.1",
            "rollout.progress_bar=false",
            "algorithm.n_minibatches=2",
        ]
        chain_overrides = [
            override.replace("{base}", str(self.base)) for override in self.chain.settings
        ]
        return [*common, *(grpo if self.chain.program == "grpo" else ()), *chain_overrides]

    def start(self, folder: Path, steps: int, settings: Sequence[str] = ()) -> Attempt:
        """Start the program without the exit status of an earlier start, as launch/slurm does.

        How an earlier start ended says nothing about this one."""
        clear_exit_status(folder / "run")
        number = len(list(self.output.glob(f"{folder.name}-*.console.txt"))) + 1
        console = self.output / f"{folder.name}-{number:03d}.console.txt"
        overrides = [*self.overrides(), f"run.total_steps={steps}", *settings]
        return start(
            self.chain.command, self.ranks, overrides, output=folder / "run", console=console
        )


@dataclass
class Start:
    """The disturbances of one start, by name."""

    running: list[str] = field(default_factory=list)
    ending: str | None = None
    """None: it runs to its last step."""
    between: list[str] = field(default_factory=list)
    """Done to the folder after its end."""


def plan_starts(names: Sequence[str]) -> list[Start]:
    """The starts that take these disturbances.

    There is one for each disturbance that ends it, and the others are shared evenly among them. The
    last start runs to the end. ValueError where no kind ends a run that has made steps."""
    chosen = [(name, KINDS[name]) for name in names]
    starts = [
        Start(ending=name) for name, kind in chosen if not kind.survives and kind.place == "steps"
    ]
    exports = [Start(ending=name) for name, kind in chosen if kind.place == "export"]
    hosts = [start for start in starts if KINDS[str(start.ending)].rows]
    guests = [(name, kind) for name, kind in chosen if kind.survives]
    if guests and not hosts:
        raise ValueError(f"{guests[0][0]} needs a start that another kind ends: choose kill, too")
    for place in ("steps", "folder"):
        for number, name in enumerate(name for name, kind in guests if kind.place == place):
            host = hosts[number % len(hosts)]
            (host.running if place == "steps" else host.between).append(name)
    return [*starts, *exports, Start()]


def assign_kinds(kinds: Sequence[str], count: int, chains: Sequence[str]) -> dict[str, list[str]]:
    """So many disturbances, the kinds in turn.

    Each goes to the chain that has the fewest of those that it can happen in, and of this
    kind."""
    dealt: dict[str, list[str]] = {chain: [] for chain in chains}
    for number in range(count):
        name = kinds[number % len(kinds)]
        able = [chain for chain in chains if possible(name, chain)]
        chosen = min(able, key=lambda chain: (dealt[chain].count(name), len(dealt[chain])))
        dealt[chosen].append(name)
    return {chain: names for chain, names in dealt.items() if names}


def possible(name: str, chain: str) -> bool:
    if "validation" in name and not any(
        override.startswith("validation.") for override in CHAINS[chain].settings
    ):
        return False
    return CHAINS[chain].program in KINDS[name].programs


def make_base(folder: Path) -> None:
    """Problems and a random model, by the tools that users have."""
    sizes = ["--train", "200", "--heldout", "20", "--worked", "400"]
    data_command = ["-m", "rlmath.cli.make_arithmetic", "--output", f"{folder}/data", *sizes]
    model_command = ["-m", "rlmath.cli.make_tiny_model", "--output", f"{folder}/base"]
    for command in (data_command, model_command):
        subprocess.run(
            [sys.executable, *command], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
        )


def run_undisturbed(drill: Drill, steps: int) -> Path:
    """The folder of a run of so many steps that nobody disturbs."""
    folder = drill.output / "undisturbed"
    attempt = drill.start(folder, steps)
    attempt.launcher.wait(START_SECONDS + STEP_SECONDS * steps)
    leftovers = attempt.wait_gone(END_SECONDS)
    if attempt.launcher.returncode != 0 or leftovers:
        raise RuntimeError(
            f"the undisturbed run failed (left: {leftovers}):\n{attempt.console()[-3000:]}"
        )
    return folder / "run"


class Disturbed:
    """One run with all its disturbances: what came of each, and what was wrong."""

    def __init__(self, drill: Drill, rng: random.Random) -> None:
        self.drill = drill
        self.rng = rng
        self.folder = drill.output / "disturbed"
        self.outcomes: list[Outcome] = []
        self.problems: list[str] = []
        self.steps = ENDLESS

    def run(self, names: Sequence[str]) -> None:
        """Disturb it to its end.

        Stops early where a start ends before it is disturbed."""
        for planned_start in plan_starts(names):
            if self.steps == ENDLESS and (
                planned_start.ending is None or KINDS[planned_start.ending].place == "export"
            ):
                self.steps = self._steps_reached() + self.drill.chain.steps_after
            if not self._one_start(planned_start):
                return

    def _steps_reached(self) -> int:
        """The last step of any start.

        A rollback's steps are made by an undisturbed run only if it gets there."""
        diverged = [rollback.diverged_step for rollback in read_rollbacks(self.folder / "run")]
        return max([self._steps_done(), *diverged])

    def _steps_done(self) -> int:
        rows = metric_lines(self.folder / "run")
        return max((int(json.loads(row)["step"]) for row in rows), default=0)

    def _one_start(self, planned_start: Start) -> bool:
        ending = planned_start.ending
        settings = KINDS[ending].settings if ending else ()
        attempt = self.drill.start(self.folder, self.steps, settings)
        try:
            return self._disturb(attempt, planned_start)
        finally:
            attempt.wait_gone(0.0)  # nothing is there any more, unless this program fails

    def _disturb(self, attempt: Attempt, planned_start: Start) -> bool:
        """Disturb one start; returns whether the run ended as it should and the drill goes on."""
        ending = KINDS[planned_start.ending] if planned_start.ending else None
        steps_before = self._steps_done()
        started = time.monotonic()
        if ending is None or (ending.rows and ending.place == "steps"):
            rows = attempt.rows_or_end(1, START_SECONDS)
            self._note_recovery(rows, steps_before, time.monotonic() - started)
        for name in planned_start.running:
            if not self._survive(attempt, name):
                return False
        if ending is None:
            attempt.launcher.wait(START_SECONDS + STEP_SECONDS * self.steps)
            self.problems += [
                f"left at the end: {command}" for command in attempt.wait_gone(END_SECONDS)
            ]
            self.problems += ending_problems(self.folder / "run")
            return True
        return self._end(attempt, str(planned_start.ending), steps_before) and self._between(
            attempt, planned_start.between
        )

    def _survive(self, attempt: Attempt, name: str) -> bool:
        """Disturb a run that must go on."""
        kind = KINDS[name]
        attempt.rows_or_end(kind.rows, START_SECONDS)
        if not attempt.ended:
            kind.moment(attempt, self.rng)
        if not self._still_there(attempt, name):
            return False
        begun = time.monotonic()
        done = kind.disturb(attempt, self.rng)
        count = len(attempt.new_rows())
        attempt.rows_or_end(count + 1, START_SECONDS)
        seconds = time.monotonic() - begun
        attempt.rows_or_end(count + STEPS_AFTER, START_SECONDS)
        step = self._steps_done()
        self.outcomes.append(
            Outcome(
                self.drill.name,
                name,
                step,
                done=done,
                status=None,
                last_words="",
                end_seconds=seconds,
                recovery_seconds=seconds,
                lost_steps=0,
            )
        )
        tell(self.outcomes[-1])
        return self._still_there(attempt, name)

    def _still_there(self, attempt: Attempt, name: str) -> bool:
        if attempt.ended:
            attempt.wait_gone(END_SECONDS)
            exit_status = read_exit_status(self.folder / "run")
            self.problems.append(
                f"{name}: the run ended, status {exit_status.status}: {exit_status.message}"
            )
        return not attempt.ended

    def _end(self, attempt: Attempt, name: str, before: int) -> bool:
        """Disturb a run that ends from it."""
        kind = KINDS[name]
        run = self.folder / "run"
        if kind.rows and kind.place == "steps":
            attempt.rows_or_end(kind.rows + self.rng.randrange(STEPS_BEFORE), START_SECONDS)
        if not attempt.ended:
            kind.moment(attempt, self.rng)
        if attempt.ended and kind.place != "export":
            return self._still_there(attempt, name)
        moment = time.monotonic()
        done = kind.disturb(attempt, self.rng)
        leftovers = attempt.wait_gone(END_SECONDS)
        took = time.monotonic() - moment
        step = max([before, *(int(row["step"]) for row in attempt.new_rows())])
        exit_status = read_exit_status(run)
        if kind.place == "export":
            self._note_recovery(attempt.new_rows(), before, float("nan"))
        if kind.spoil:
            done = f"{done}; {kind.spoil(attempt, self.rng)}"
        self.outcomes.append(
            Outcome(
                self.drill.name,
                name,
                step,
                done=done,
                status=exit_status.status,
                last_words=exit_status.message,
                end_seconds=took,
            )
        )
        self.problems += [f"{name}: a process was left: {command}" for command in leftovers]
        if exit_status.status not in kind.statuses:
            self.problems.append(
                f"{name}: status {exit_status.status}, needed {kind.statuses}: "
                f"{exit_status.message}"
            )
        if kind.place == "export":
            self.outcomes[-1].lost_steps = 0  # that nothing is lost is seen at the end
        tell(self.outcomes[-1])
        return True

    def _between(self, attempt: Attempt, names: Sequence[str]) -> bool:
        for name in names:
            done = KINDS[name].disturb(attempt, self.rng)
            self.outcomes.append(
                Outcome(
                    self.drill.name,
                    name,
                    self._steps_done(),
                    done=done,
                    status=None,
                    last_words="",
                    end_seconds=0.0,
                )
            )
            tell(self.outcomes[-1])
        return True

    def _note_recovery(self, rows: list[dict[str, float]], before: int, seconds: float) -> None:
        """End the open recoveries at a start's first new step.

        There are several where a start was disturbed while it began."""
        for outcome in self.outcomes:
            if outcome.lost_steps < 0 and rows:
                outcome.recovery_seconds = seconds
                outcome.lost_steps = max(0, before - (max(1, int(rows[0]["step"])) - 1))


def ending_problems(run: Path) -> list[str]:
    """Scratch files that a finished run has left, and an exit status other than FINISHED."""
    problems = [f"{path.relative_to(run)} was left" for path in run.rglob("*") if is_scratch(path)]
    exit_status = read_exit_status(run)
    if exit_status.status != FINISHED:
        problems.append(
            f"the last start did not finish: status {exit_status.status}, {exit_status.message}"
        )
    return problems


def is_scratch(path: Path) -> bool:
    return path.name.endswith((".partial", ".tmp"))


def lost_too_much(outcomes: list[Outcome]) -> list[str]:
    """Outcomes that lost too many steps: runs that save before they end lose none, others few."""
    problems = []
    for outcome in outcomes:
        max_lost = 0 if outcome.status == SAVED_AND_STOPPED else MOST_LOST
        if not 0 <= outcome.lost_steps <= max_lost:
            problems.append(
                f"{outcome.kind} at step {outcome.step}: {outcome.lost_steps} steps lost, at most "
                f"{max_lost} may be"
            )
    return problems


# ------------------------------------------------------------ what the two runs must have in common


def run_differences(undisturbed: Path, disturbed: Path) -> list[str]:
    """The first differences between the metrics, the validations and the models of two runs."""
    undisturbed_rows, disturbed_rows = (
        [json.loads(line) for line in metric_lines(run)] for run in (undisturbed, disturbed)
    )
    texts = differences(undisturbed_rows, disturbed_rows)
    undisturbed_validations, disturbed_validations = (
        [json.loads(line) for line in metric_lines(run, VALIDATION_FILE)]
        for run in (undisturbed, disturbed)
    )
    texts += [
        f"{VALIDATION_FILE}: {difference}"
        for difference in row_differences(undisturbed_validations, disturbed_validations)
    ]
    return texts + model_differences(undisturbed / EXPORT_FOLDER, disturbed / EXPORT_FOLDER)


def differences(
    undisturbed: list[dict[str, float]], disturbed: list[dict[str, float]]
) -> list[str]:
    """Differences of metrics, as `row_differences`.

    Where the undisturbed run learned nothing, that is the one difference: equal metrics would say
    nothing."""
    if not any(row.get("train/grad_norm", 0.0) > 0 for row in undisturbed):
        return ["nothing was learned in the undisturbed run: equal metrics would say nothing"]
    return row_differences(undisturbed, disturbed)


def row_differences(
    undisturbed: list[dict[str, float]], disturbed: list[dict[str, float]]
) -> list[str]:
    """The first differences between rows of two runs.

    Numbers differ where they are not the same bit by bit; steps may also be missing or there
    twice."""
    steps = [[int(row["step"]) for row in rows] for rows in (undisturbed, disturbed)]
    if steps[0] != steps[1]:
        return [f"the steps are {steps[1]}, of the undisturbed run {steps[0]}"]
    pairs = [
        (without_times(a, "sync/"), without_times(b, "sync/"))
        for a, b in zip(undisturbed, disturbed, strict=True)
    ]
    texts = [
        f"step {a['step']}: {key} is {b.get(key)}, of the undisturbed run {a.get(key)}"
        for a, b in pairs
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]
    return texts[:5]


def unfinished_problems(metric: str, undisturbed: list[dict[str, float]]) -> list[str]:
    """The problem that nothing is in flight, by this metric, after half of a run's steps or more.

    The last step does not count: it always leaves nothing."""
    steps = undisturbed[:-1]
    unfinished_steps = sum(row.get(metric, 0.0) > 0 for row in steps)
    if 2 * unfinished_steps > len(steps):
        return []
    return [
        f"{metric} is above 0 after {unfinished_steps} of the undisturbed run's first {len(steps)} "
        "steps, and "
        "more than half are "
        "needed: too few disturbances meet anything in flight. In LONG_TAIL raise "
        "rollout.max_new_tokens, or lower "
        "rollout.slice_tokens or rollout.group_size"
    ]


def model_differences(undisturbed: Path, disturbed: Path) -> list[str]:
    """Tensors of two Hugging Face folders that are not the same, bit by bit.

    One that is missing differs."""
    import torch
    from safetensors.torch import load_file

    tensors = [
        {
            name: tensor
            for path in sorted(model.glob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        for model in (undisturbed, disturbed)
    ]
    if not tensors[0]:
        return [f"{undisturbed} has no tensors"]

    def bits(model: dict[str, torch.Tensor], name: str) -> tuple[object, ...] | None:
        tensor = model.get(name)
        return (
            None
            if tensor is None
            else (
                tensor.dtype,
                tensor.shape,
                tensor.contiguous().view(torch.uint8).numpy().tobytes(),
            )
        )

    names = sorted(tensors[0].keys() | tensors[1].keys())
    return [
        f"the tensor {name} differs"
        for name in names
        if bits(tensors[0], name) != bits(tensors[1], name)
    ][:5]


# ---------------------------------------------------------------- the program


def tell(outcome: Outcome) -> None:
    ended = "continues" if outcome.status is None else f"status {outcome.status}"
    print(
        f"{outcome.chain}: {outcome.kind}, step {outcome.step}: {outcome.done}; {ended} after "
        f"{outcome.end_seconds:.1f} s: {outcome.last_words[:300]}",
        flush=True,
    )


def print_table(outcomes: list[Outcome], seconds: float) -> None:
    """Print a row and a JSON line for each disturbance."""
    print(
        f"\n{'chain':6} {'kind':18} {'step':>4} {'status':>7} {'end s':>6} {'recovery s':>10} "
        f"{'steps lost':>10}"
    )
    for outcome in outcomes:
        status = "continues" if outcome.status is None else outcome.status
        print(
            f"{outcome.chain:6} {outcome.kind:18} {outcome.step:4} {status!s:>7} "
            f"{outcome.end_seconds:6.1f} "
            f"{outcome.recovery_seconds:10.1f} {outcome.lost_steps:10}"
        )
    for outcome in outcomes:
        print(json.dumps({"drill": "faults", **asdict(outcome)}))
    each = seconds / max(1, len(outcomes))
    kinds = len({outcome.kind for outcome in outcomes})
    print(
        f"\n{len(outcomes)} disturbances of {kinds} kinds took {seconds:.0f} s, {each:.1f} s each"
    )


def run_chain(
    drill: Drill, names: list[str], rng: random.Random
) -> tuple[list[Outcome], list[str]]:
    """Both runs of a chain."""
    drill.output.mkdir(parents=True)
    disturbed = Disturbed(drill, rng)
    needs_disk = any(name in NEEDS_DISK for name in names)
    with own_disk(disturbed.folder, needs_disk, drill.output / "disturbed.kept"):
        disturbed.run(names)
        problems = disturbed.problems
        if len(disturbed.outcomes) == len(names):
            undisturbed = run_undisturbed(drill, disturbed.steps)
            if drill.chain.in_flight is not None:
                rows = [json.loads(line) for line in metric_lines(undisturbed)]
                problems += unfinished_problems(drill.chain.in_flight, rows)
            if drill.chain.goes_back and not read_rollbacks(undisturbed):
                problems.append(
                    "the undisturbed run made no rollback: raise --kills, so that it is longer"
                )
            problems += run_differences(undisturbed, disturbed.folder / "run") + lost_too_much(
                disturbed.outcomes
            )
    return disturbed.outcomes, [f"{drill.name}: {problem}" for problem in problems]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Disturb training runs and see whether they recover."
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/drill"), help="a new folder")
    parser.add_argument("--kills", type=int, help="disturbances in all; default: one of each kind")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--chains", nargs="+", choices=CHAINS, default=list(CHAINS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        metavar="KIND",
        help=f"default: all that can happen in the chains, of {', '.join(KINDS)}",
    )
    parser.add_argument("--quick", action="store_true", help="six kinds, one chain")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.kinds = list(QUICK)
        arguments.kills = len(QUICK)
        arguments.chains = ["tp2"]
    can_happen = [
        name for name in KINDS if any(possible(name, chain) for chain in arguments.chains)
    ]
    arguments.kinds = arguments.kinds or can_happen
    arguments.kills = arguments.kills or len(arguments.kinds)
    for name in arguments.kinds:
        if name not in can_happen:
            parser.error(f"--kinds {name} cannot happen in --chains {' '.join(arguments.chains)}")
    if arguments.output.exists():
        parser.error(f"--output {arguments.output} is there already; give a new folder")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    output = arguments.output.resolve()
    rng = random.Random(arguments.seed)
    started = time.monotonic()
    output.mkdir(parents=True)
    make_base(output)
    outcomes: list[Outcome] = []
    problems: list[str] = []
    for name, kinds in assign_kinds(arguments.kinds, arguments.kills, arguments.chains).items():
        drill = Drill(name, output / name, arguments.ranks, base=output)
        new_outcomes, new_problems = run_chain(drill, kinds, rng)
        outcomes = outcomes + new_outcomes
        problems = problems + new_problems
    print_table(outcomes, time.monotonic() - started)
    for problem in problems:
        print(f"WRONG: {problem}", file=sys.stderr)
    return 1 if problems or len(outcomes) != arguments.kills else 0


if __name__ == "__main__":
    sys.exit(main())
