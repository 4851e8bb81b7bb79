"""Resident memory of training ranks that host an engine: over many cycles, and against the two lives apart.

    python tools/bench_memory.py [--quick]

Real programs: data and a random model made by the tools, then launch/train_grpo.py under torchrun on CPU, 2 ranks with
an engine each, for 200 cycles of sync, generate, sleep and update (64 with --quick). Every rank's memory is measured by
the program itself, after every phase; figures are from the cycles in which it releases what it has freed, one of 16.
For comparison, two processes that each lead one of the lives: one that trains without an engine, and one whose engine
has generated and then dropped weights and KV cache.

Prints one JSON object per figure: {"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; `ratio` above 1
means ours is better (less memory). Figures of rank 0.

- resident: after cycles' end, engine asleep, training memory back: median of the last 3 of these cycles, against that
  of 3 from the second on (one each with --quick);
- resident with what is kept for reuse: the most in any cycle;
- resident_in_training: the most in one of these cycles, at the end of an update, against the sum of the two lives
  apart;
- seconds: of the switch and the sync in a step (medians);
- train/mfu, rollout/mfu: as the trainer logs them (medians).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rlmath.config.run_files import METRICS_FILE

REPOSITORY = Path(__file__).resolve().parents[1]
SWITCH = ("offload", "wake", "sync", "wake_kv_cache", "sleep", "restore")
SETTINGS = (
    "data.prompts_per_step=16",
    "data.max_prompt_tokens=32",
    "rollout.group_size=8",
    "rollout.max_new_tokens=32",
    "rollout.progress_bar=false",
    "rollout.cpu_kv_cache_gib=0.25",
    "policy.max_tokens_per_microbatch=8192",
    "parallel.tensor=2",
    "run.total_epochs=100",
    "run.device=cpu",
)


def run(command: list[str], environment: dict[str, str]) -> str:
    """What a program printed; its failure is shown and ends the benchmark."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=REPOSITORY,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def make_inputs(folder: Path, environment: dict[str, str]) -> None:
    data = [
        "-m",
        "rlmath.cli.make_arithmetic",
        "--output",
        f"{folder}/data",
        "--train",
        "400",
        "--heldout",
        "20",
    ]
    run(data, environment)
    run(["-m", "rlmath.cli.make_tiny_model", "--output", f"{folder}/base"], environment)


def overrides(folder: Path, steps: int) -> list[str]:
    return [
        f"run.output_dir={folder}/run",
        f"model.path={folder}/base",
        f"data.train_path={folder}/data/train.jsonl",
        f"run.total_steps={steps}",
        *SETTINGS,
    ]


def train(folder: Path, cycles: int, environment: dict[str, str]) -> list[dict[str, float]]:
    """Metrics of every step of a run of 2 ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*launcher, "launch/train_grpo.py", *overrides(folder, cycles)], environment)
    lines = (folder / "run" / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# ---------------------------------------------------------------- one life alone


def alone(life: str, folder: Path) -> None:
    """Prints the resident bytes of a process, the rank's share of it being what a rank of the run has."""
    from rlmath.config.schema import Config, ModelConfig, PolicyConfig, RolloutConfig
    from rlmath.distributed.device import init_process_group, open_device, release_cached, resident_bytes
    from rlmath.distributed.mesh import Mesh
    from rlmath.models.hf_config import read_model_shape

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    device = open_device("cpu")
    init_process_group(device, 60.0)
    mesh, shape = Mesh(0, 1, 1, 1, 1), read_model_shape(folder / "base")
    config = Config(
        model=ModelConfig(path=f"{folder}/base"),
        policy=PolicyConfig(max_tokens_per_microbatch=8192),
        rollout=RolloutConfig(group_size=8, max_new_tokens=32, cpu_kv_cache_gib=0.25),
    )
    (train_alone if life == "training" else generate_alone)(config, shape, mesh, device)
    release_cached(device)
    print(json.dumps({"resident": resident_bytes()}))


def train_alone(config, shape, mesh, device) -> None:
    """Updates on packs as large as the run's."""
    import random

    from rlmath.algorithms.types import Sample
    from rlmath.data.packing import pack
    from rlmath.models.build import build_actor
    from rlmath.models.megatron import start_megatron

    start_megatron(mesh, device, 1, 60.0)
    actor = build_actor(config, shape, mesh, device, 10, (1,))
    draw = random.Random(0)
    for _ in range(10):
        tokens = [tuple(draw.randrange(3, shape.vocab_size) for _ in range(24)) for _ in range(128)]
        samples = [Sample(ids[:6], ids[6:], (-4.5,) * 18, draw.uniform(-1, 1)) for ids in tokens]
        actor.learner.learn([pack(samples, range(len(samples)), 1)], None, None)


def generate_alone(config, shape, mesh, device) -> None:
    """An engine that has generated and dropped its weights and KV cache."""
    from rlmath.rollout.engine import Engine
    from rlmath.rollout.sampling import Request
    from rlmath.rollout.weight_sync.shard_layouts import engine_shapes

    engine = Engine(config.model.path, config.rollout, 64, mesh, device, engine_shapes(shape, 1))
    requests = [Request((p, 0), (5, 6, 7, 8), p, 32, 32) for p in range(128)]
    assert sum(1 for _ in engine.generate(requests)) == len(requests)
    engine.memory.sleep()


# ---------------------------------------------------------------- figures


def line(
    case: str, metric: str, value: float, unit: str, baseline: str | None = None, ratio: float | None = None
) -> None:
    fields = {
        "bench": "memory",
        "case": case,
        "metric": metric,
        "value": float(f"{value:.5g}"),
        "unit": unit,
        "baseline": baseline,
        "ratio": None if ratio is None else round(ratio, 4),
    }
    print(json.dumps(fields), flush=True)


def tell(metrics: list[dict[str, float]], window: int, lives: dict[str, float]) -> None:
    """`window`: the cycles of a median of memory."""
    from rlmath.rollout.memory_switch import CPU_COMPARES_EVERY

    case = f"{len(metrics)} cycles, 2 ranks, 0.6M parameters"
    compared = metrics[CPU_COMPARES_EVERY - 1 :: CPU_COMPARES_EVERY]
    held = [m["memory/after_restore_gib"] for m in compared]
    early, late = statistics.median(held[1:][:window]), statistics.median(held[-window:])
    line(case, "resident", late, "GiB", f"from cycle {2 * CPU_COMPARES_EVERY} on", early / late)
    most, apart = max(m["memory_gib"] for m in compared), sum(lives.values())
    line(case, "resident with what is kept for reuse", max(m["memory_gib"] for m in metrics), "GiB")
    for life, gib in lives.items():
        line(case, f"resident of {life} alone", gib, "GiB")
    line(case, "resident_in_training", most, "GiB", "the two lives apart", apart / most)
    for phase in SWITCH:
        seconds = statistics.median(m[f"seconds/{phase}"] for m in metrics)
        line(case, f"seconds of {phase}", seconds, "s")
    line(case, "seconds of a step", statistics.median(m["seconds/step"] for m in metrics), "s")
    for name in ("train/mfu", "rollout/mfu"):
        line(case, name, statistics.median(m[name] for m in metrics), "of the ceiling")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="64 cycles")
    parser.add_argument("--alone", choices=("training", "generation"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone is not None:
        alone(args.alone, args.folder)
        return
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder, environment)
        metrics = train(folder, 64 if args.quick else 200, environment)
        lives = {}
        for life in ("training", "generation"):
            printed = run([__file__, "--alone", life, "--folder", name], environment)
            lives[life] = json.loads(printed.splitlines()[-1])["resident"] / 2**30
    tell(metrics, 1 if args.quick else 3, lives)


if __name__ == "__main__":
    main()
