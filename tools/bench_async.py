"""Asynchronous training (`rollout.ranks`) against engines that take turns with training, on two cores.

    python tools/bench_async.py [--quick] [--cases even tail] [--repeats 3]

Two ranks, each on a core of its own. Asynchronous: one trains, one has an engine. Colocated, the baseline: both do both
(TP1 x DP2, an engine each, `rollout.tail: wait`). A random Qwen2 of 0.6M parameters, 32 prompts x 8 completions a step,
one minibatch, the same decoupled loss on both sides; the two take turns, repeat by repeat.

- even: all completions have 128 tokens; training and generation take about as long on a core of their own.
- tail: lengths are log-normal as the planner's (mean 0.3 of 192 tokens, 3% cut off), and no engine step takes less than
  20 ms, as on a GPU, where a step takes about as long for few sequences as for many.

Prints one JSON object per figure: {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; of all steps but
the first four, medians over the repeats; `ratio` above 1 means better than the baseline.

- step_over_longest_phase: seconds of a step by the busy seconds of the busier side (1: nothing is waited for);
- step_seconds: mean (baseline: colocated);
- trainer_busy_share, engine_busy_share: of the time of the steps (0 to 1);
- staleness: steps between the weights that sampled a token and the step that learns from it, mean;
- weight_latency_seconds: from the end of the update to the first token under the new weights, mean;
- train/mfu: model FLOP utilisation of the update, median.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli import demo
from rlmath.config.terminal import escape_terminal
from rlmath.planning.planner.lengths import Lengths, lengths_measured
from rlmath.telemetry.metrics_writer import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
WARM_UP = 4
"""Steps that do not count: the first ones wait for engines that have just begun."""
STEP_SECONDS = 0.020
"""Least time of an engine step of the case "tail"."""
COMMON = (
    "run.device=cpu",
    "run.total_epochs=1000",
    "data.prompts_per_step=32",
    "rollout.group_size=8",
    "rollout.cpu_kv_cache_gib=0.5",
    "policy.max_tokens_per_microbatch=8192",
    "parallel.tensor=1",
    "optimizer.lr=1e-5",
    "optimizer.warmup_steps=0",
    "optimizer.decay=constant",
    "algorithm.n_minibatches=1",
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_correction=token",
    "algorithm.importance_mask_high=5",
    "algorithm.early_stop_ratio=null",
    "save.ckpt_freq_steps=null",
    "save.ckpt_freq_secs=null",
)
WAYS: Mapping[str, tuple[str, ...]] = {
    "asynchronous": ("rollout.ranks=1", "rollout.max_staleness=2"),
    "colocated": (),
}


@dataclass(frozen=True)
class Case:
    """How long completions are, and how fast engines at most."""

    longest: int
    exact: bool
    """Every completion has that many tokens."""
    step_seconds: float

    def length(self, seed: int) -> int:
        """Tokens of the completion of a request with this seed."""
        if self.exact:
            return self.longest
        score = random.Random(seed).gauss(0.0, 1.0)
        return round(lengths(self.longest).at(min(max(NormalDist().cdf(score), 1e-9), 1 - 1e-9)))


CASES = {"even": Case(128, True, 0.0), "tail": Case(192, False, STEP_SECONDS)}


@cache
def lengths(longest: int) -> Lengths:
    """Log-normal, with a mean of 0.3 of the longest and 3% cut off."""
    return lengths_measured(0.3 * longest, longest, 0.03)


@dataclass(frozen=True)
class Figures:
    """Of the steps of one run that count."""

    step_seconds: float
    trainer_busy: float
    """Seconds of a step."""
    engine_busy: float
    staleness: float
    latency: float
    mfu: float

    @property
    def over_longest(self) -> float:
        return self.step_seconds / max(self.trainer_busy, self.engine_busy)


# ---------------------------------------------------------------- a rank of the measured program


def run_rank(case: Case, arguments: Sequence[str]) -> int:
    """The trainer's program on a core of its own, whose completions have the case's lengths."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
    from launch.train_grpo import main
    from rlmath.rollout import generation, sampling

    requests_of, step = sampling.requests_of, sampling.RunningRequests.step

    def requests_of_length(*given: Any, **more: Any) -> list[sampling.Request]:
        made = [(request, case.length(request.seed)) for request in requests_of(*given, **more)]
        return [replace(one, min_new_tokens=tokens, max_new_tokens=tokens) for one, tokens in made]

    def paced(self: sampling.RunningRequests) -> list[sampling.RequestResult]:
        started = time.perf_counter()
        found = step(self)
        time.sleep(max(0.0, case.step_seconds - (time.perf_counter() - started)))
        # What ends at its case's length is complete, and not a slice.
        return [replace(one, finish_reason="stop") for one in found]

    sampling.requests_of = generation.requests_of = requests_of_length
    sampling.RunningRequests.step = paced
    return main(arguments)


# ---------------------------------------------------------------- measuring


def measure(name: str, way: str, base: Path, output: Path, steps: int) -> Figures:
    """One run; its console is in `output`.txt."""
    case = CASES[name]
    command = [*demo.torchrun(2), "tools/bench_async.py", "--rank-of", name]
    command += ["--config", "configs/demo.yaml", f"run.output_dir={output}", f"run.total_steps={steps}"]
    command += [f"model.path={base / 'random'}", f"data.train_path={base / 'data' / 'train.jsonl'}"]
    command += [*COMMON, *WAYS[way], f"rollout.max_new_tokens={case.longest}"]
    with output.with_suffix(".txt").open("w", encoding="utf-8") as console:
        status = subprocess.run(
            command, cwd=REPOSITORY, env=demo.one_thread(), stdout=console, stderr=console
        ).returncode
    if status:
        sys.exit(f"the run {output.name} failed:\n{output.with_suffix('.txt').read_text()[-4000:]}")
    return figures(read_metrics(str(output))[WARM_UP:])


def figures(rows: Sequence[Mapping[str, float]]) -> Figures:
    """Means over rows of `metrics.jsonl`; of colocated runs the two sides are the parts of a step."""

    def mean(*names: str) -> float:
        return statistics.fmean(sum(row.get(name, 0.0) for name in names) for row in rows)

    step, apart = mean("seconds/step"), "seconds/wait_for_groups" in rows[0]
    waited = mean("seconds/wait_for_groups", "seconds/sync_wait_for_engines")
    return Figures(
        step_seconds=step,
        trainer_busy=step - waited if apart else step - mean("seconds/rollout"),
        engine_busy=mean("rollout/engine_busy_share") * step if apart else mean("seconds/rollout"),
        staleness=mean("rollout/staleness"),
        latency=mean("sync/latency_s"),
        mfu=statistics.median(row["train/mfu"] for row in rows),
    )


def report(name: str, ours: Sequence[Figures], theirs: Sequence[Figures]) -> None:
    """Medians over the repeats."""

    def line(metric: str, value: float, unit: str, baseline: str | None = None, ratio: float | None = None):
        row = {"bench": "async", "case": name, "metric": metric, "value": value, "unit": unit}
        print(json.dumps(row | {"baseline": baseline, "ratio": ratio}), flush=True)

    def median(found: Sequence[float]) -> float:
        return statistics.median(found)

    over = median([one.over_longest for one in ours])
    line("step_over_longest_phase", over, "ratio", "longest phase", 1 / over)
    ratios = [b.step_seconds / a.step_seconds for a, b in zip(ours, theirs, strict=True)]
    line("step_seconds", median([one.step_seconds for one in ours]), "s", "colocated", median(ratios))
    line("colocated_step_seconds", median([one.step_seconds for one in theirs]), "s")
    line("trainer_busy_share", median([one.trainer_busy / one.step_seconds for one in ours]), "share")
    line("engine_busy_share", median([one.engine_busy / one.step_seconds for one in ours]), "share")
    line("staleness", median([one.staleness for one in ours]), "steps")
    line("weight_latency_seconds", median([one.latency for one in ours]), "s")
    mfu, before = (median([one.mfu for one in found]) for found in (ours, theirs))
    line("train/mfu", mfu, "share", "colocated", mfu / before)


def main(arguments: Sequence[str] | None = None) -> int:
    escape_terminal()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["--rank-of"]:
        return run_rank(CASES[arguments[1]], arguments[2:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one repeat of few steps, at most five minutes")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args(arguments)
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: needed is at least 1")
    if (cores := len(os.sched_getaffinity(0))) < 2:
        parser.error(f"two ranks need a core each; this process may use {cores}.")
    steps, repeats = (WARM_UP + 6, 1) if given.quick else (WARM_UP + 16, given.repeats)
    with tempfile.TemporaryDirectory() as place:
        base = Path(place)
        for program, *more in (
            ("make_arithmetic.py", "--output", str(base / "data")),
            ("make_tiny_model.py", "--output", str(base / "random")),
        ):
            command = [sys.executable, f"tools/{program}", *more]
            subprocess.run(
                command, check=True, cwd=REPOSITORY, env=demo.child_environment(), stdout=sys.stderr
            )
        for name in given.cases:
            found: dict[str, list[Figures]] = {way: [] for way in WAYS}
            for repeat in range(repeats):
                for way in WAYS:
                    output = base / f"{name}-{way}-{repeat}"
                    found[way].append(measure(name, way, base, output, steps))
            report(name, found["asynchronous"], found["colocated"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
