"""Steps and memory with low-rank adapters beside those of full training, in turns.

Engines hold the adapters, or have them merged into their weights (`lora.engine`). All runs have the
same model, lengths and batch.

    python tools/bench_lora.py [--sizes 9.5M 100M] [--ranks 8 64] [--rounds 2] [--quick]

One rank and one thread on CPU, random weights, 64 new tokens of every completion, one optimizer
step of micro-batches of 2,048 tokens. Prints figures (tools/figures.py), medians of the measured
steps of all rounds, and the most resident memory of a whole run's rank, engine included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.cli import demo
from rlmath.config.run_files import METRICS_FILE
from tools.bench_peer import REPOSITORY, Case, our_settings, prepare
from tools.figures import print_figure
from tools.gpu_setup import random_model

CASES = {
    size: Case(
        f"{size}, {prompts} x 8 x 64 tokens",
        prompts,
        (64, 64),
        optimizer_steps=1,
        warm_up=1,
        steps=2,
        our_layouts={},
        their_batches=(),
        ranks=1,
    )
    for size, prompts in {"9.5M": 16, "100M": 4}.items()
}
PARTS = ("step", "rollout", "update", "sync")
FULL = ()
"""The settings of full training."""


def settings_of(rank: int, engine: str) -> tuple[str, ...]:
    """The settings of a run with adapters of this rank."""
    return f"lora.rank={rank}", f"lora.engine={engine}"


def run(
    place: Path, model: Path, data: Path, case: Case, settings: Sequence[str]
) -> list[dict[str, float]]:
    """Seconds of PARTS of every measured step, tokens sampled a second ("tokens").

    "synced" is what a sync copies and sends (MiB), "memory" that of the run (GiB). SystemExit where
    it failed."""
    output = Path(tempfile.mkdtemp(dir=place))
    # alike rewards teach nothing
    reward = f"reward.function={REPOSITORY / 'tools' / 'peer_reward.py'}:early_letters"
    overrides = (*settings, "policy.max_tokens_per_microbatch=2048", reward)
    arguments = our_settings(output, model, data, case=case, overrides=overrides)
    command = [*demo.torchrun(case.ranks), "launch/train_grpo.py", *arguments]
    with (place / "console.txt").open("w", encoding="utf-8") as console:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=demo.one_thread(), stdout=console, stderr=console
        )
        _, status, used = os.wait4(process.pid, 0)  # of the largest of its processes
    if status:
        raise SystemExit((place / "console.txt").read_text(encoding="utf-8")[-4000:])
    rows = map(
        json.loads, (output / METRICS_FILE).read_text(encoding="utf-8").splitlines()[case.warm_up :]
    )
    new_tokens = case.prompts * case.group * case.new_tokens[1]
    return [
        {part: row[f"seconds/{part}"] for part in PARTS}
        | {
            "tokens": new_tokens / row["seconds/rollout"],
            "synced": 1024 * (row["sync/copied_gib"] + row["sync/sent_gib"]),
            "memory": used.ru_maxrss / 2**20,
        }
        for row in rows
    ]


UNITS = dict.fromkeys(PARTS, "s") | {"tokens": "tokens/s", "synced": "MiB", "memory": "GiB"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[8], help="of the adapters")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side (default 2)")
    parser.add_argument("--quick", action="store_true", help="9.5M only, one round")
    arguments = parser.parse_args(argv)
    adapted = [
        settings_of(rank, engine) for rank in arguments.ranks for engine in ("merged", "adapters")
    ]
    for size in ["9.5M"] if arguments.quick else arguments.sizes:
        steps_of: dict[tuple[str, ...], list[dict[str, float]]] = {
            settings: [] for settings in (FULL, *adapted)
        }
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            model, (_, data_file) = random_model(place, size), prepare(place, "P1")
            for _ in range(1 if arguments.quick else arguments.rounds):
                for settings, steps in steps_of.items():
                    steps += run(place, model, data_file, case=CASES[size], settings=settings)
        medians = {
            settings: {name: statistics.median(step[name] for step in steps) for name in UNITS}
            for settings, steps in steps_of.items()
        }
        for settings in adapted:
            for name, unit in UNITS.items():
                full_median = medians[FULL][name]
                median = medians[settings][name]
                ratio = median / full_median if name == "tokens" else full_median / median
                print_figure(
                    "lora",
                    f"{CASES[size].title}, {' '.join(settings)}",
                    name,
                    value=median,
                    unit=unit,
                    baseline=f"full training: {full_median:.3g} {unit}",
                    ratio=ratio,
                )


if __name__ == "__main__":
    main()
