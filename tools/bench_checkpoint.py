"""How long training stands still for a checkpoint: written in the background, against written while training waits.

    python tools/bench_checkpoint.py [--quick] [--folder DIR]

Two ranks under torchrun, tensor parallel 2, a random Qwen2 (20M parameters with --quick, 150M without), float32 with
Adam: 12 bytes a parameter. Both ways save the same state with the same program, taking turns:

- "in the background": training stands still until every rank's copy is made, and once more, after the files are
  written, until the manifest is;
- "while training waits": from the start of the save to the complete checkpoint, `save.background: false`;
- "torch.save": every rank writes its parameters and moments with torch.save and forces them to disk: what the disk
  takes, without metadata and checksums.

Loading a checkpoint is timed, too, and checking its files against the manifest. Prints one JSON object per figure:
{"bench", "case", "metric", "value", "unit", "baseline", "ratio"}; `ratio` above 1 means ours is better. Values are
medians, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlmath.checkpoint.directory import Progress, complete_checkpoints, read_progress, wrong_contents
from rlmath.checkpoint.manager import CheckpointManager, Retention, load_checkpoint
from rlmath.checkpoint.sharded_state import POLICY, SavedModel
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config, OptimizerConfig, ParallelConfig
from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.device import Device, init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.models.megatron import (
    Recompute,
    build_chunks,
    start_megatron,
    transformer_config,
    wrap_for_training,
)
from rlmath.models.offload import optimizer_tensors
from rlmath.models.optimizer import build_optimizer

REPOSITORY = Path(__file__).resolve().parents[1]
RANKS = 2
SIZES = {"20M": (8, 384, 1024, 8_000), "150M": (12, 896, 2432, 32_000)}
"""Layers, hidden size, feed-forward size, vocabulary."""


class Bench:
    """One rank's model, and its checkpoints under `root`."""

    def __init__(self, size: str, root: Path) -> None:
        self.device = open_device("cpu")
        init_process_group(self.device, 600.0)
        self.mesh = Mesh(environment_rank(), environment_world_size(), RANKS, 1, engine_size=1)
        start_megatron(self.mesh, self.device, seed=1, timeout_seconds=600.0)
        self.chunks, self.optimizer = _train_once(size, self.mesh, self.device)
        self.models = [SavedModel(POLICY, self.chunks, self.optimizer)]
        self.root = root
        self.store = CheckpointManager(
            root, lambda: self.models, self.device, {}, Retention(keep_last=1, keep_models=None)
        )
        self.store.warm_up()
        self.step = 0

    def _start(self) -> None:
        self.step += 1
        progress = Progress(self.step, 0, 0, 1, 0, "", RANKS, (), (), "", "", {})
        failed = self.store.start(progress, False, "run: {}\n")
        assert failed is None, failed.error

    def _finish(self) -> None:
        saved = self.store.finish()
        assert saved.error is None, saved.error

    def in_background(self) -> float:
        still = self._timed(self._start)
        while any(all_gather_objects(not self.store.written)):
            time.sleep(0.05)  # training
        return still + self._timed(self._finish)

    def waiting(self) -> float:
        return self._timed(lambda: (self._start(), self._finish()))

    def plainly(self) -> float:
        tensors = [p.detach() for chunk in self.chunks for p in chunk.parameters()]
        tensors += optimizer_tensors(self.optimizer)

        def save() -> None:
            with (self.root / f"plain-{self.mesh.rank}").open("wb") as file:
                torch.save(tensors, file)
                file.flush()
                os.fsync(file.fileno())

        return self._timed(save)

    def checking(self) -> float:
        (checkpoint,), _ = complete_checkpoints(self.root)
        mine = sorted(checkpoint.files)[self.mesh.rank :: RANKS]
        return self._timed(lambda: wrong_contents(checkpoint, mine))

    def loading(self) -> float:
        (checkpoint,), _ = complete_checkpoints(self.root)
        progress = read_progress(checkpoint.folder)
        return self._timed(lambda: load_checkpoint(self.models, self.device, checkpoint, progress))

    def size_gib(self) -> float:
        (checkpoint,), _ = complete_checkpoints(self.root)
        return sum(entry.size for entry in checkpoint.files.values()) / 2**30

    def _timed(self, work: Callable[[], Any]) -> float:
        """Seconds of the slowest rank."""
        dist.barrier()
        started = time.perf_counter()
        work()
        return max(all_gather_objects(time.perf_counter() - started))


def _train_once(size: str, mesh: Mesh, device: Device) -> tuple[list[Any], Any]:
    """A random model, and an optimizer that has stepped once, so that it has its state."""
    layers, hidden, ffn, vocabulary = SIZES[size]
    shape = ModelShape(
        "Qwen2ForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=hidden // 64,
        num_kv_heads=2,
        head_dim=64,
        ffn_size=ffn,
        vocab_size=vocabulary,
        tied_embeddings=False,
        max_positions=256,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        attention_bias=True,
        torch_dtype="float32",
    )
    config = Config(parallel=ParallelConfig(tensor=RANKS), optimizer=OptimizerConfig(lr=1e-4))
    megatron = transformer_config(shape, mesh, device, config.parallel, Recompute())
    chunks = build_chunks(shape, mesh, device, megatron)
    torch.manual_seed(mesh.rank)
    with torch.no_grad():
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.normal_(0, 0.02)
    wrapped = wrap_for_training(chunks, megatron, config.optimizer.distributed)
    optimizer = build_optimizer(config.optimizer, wrapped, device)
    with torch.no_grad():
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.main_grad.normal_(0, 1e-3)
    optimizer.step()
    return chunks, optimizer


def report(
    case: str, metric: str, value: float, unit: str, baseline: str | None, other: float | None
) -> None:
    ratio = None if other is None else round(other / value, 3)
    row = {"bench": "checkpoint", "case": case, "metric": metric, "value": round(value, 5), "unit": unit}
    print(json.dumps(row | {"baseline": baseline, "ratio": ratio}), flush=True)


def work(size: str, root: Path, repeats: int) -> None:
    """What every rank does."""
    bench = Bench(size, root)
    ways = {
        "in the background": bench.in_background,
        "while training waits": bench.waiting,
        "torch.save": bench.plainly,
    }
    for way in ways.values():
        way()  # the first of each makes plans and grows files
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            seconds[name].append(way())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    checking = statistics.median(bench.checking() for _ in range(repeats))
    loading = statistics.median(bench.loading() for _ in range(repeats))
    gib = bench.size_gib()
    bench.store.close()
    if bench.mesh.rank:
        return
    case, waiting = f"{size} parameters, TP2", "while training waits"
    background = "in the background"
    report(case, "standing_still", median[background], "s", waiting, median[waiting])
    report(case, "whole_save", median[waiting], "s", "torch.save", median["torch.save"])
    report(case, "loading", loading, "s", None, None)
    report(case, "checking", checking, "s", None, None)
    report(case, "checkpoint_size", gib, "GiB", None, None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer repeats")
    parser.add_argument(
        "--folder", type=Path, help="where to write, on the disk to measure (default: the system's)"
    )
    arguments = parser.parse_args()
    size, repeats = ("20M", 3) if arguments.quick else ("150M", 5)
    if "RANK" in os.environ:
        work(size, arguments.folder, repeats)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += [__file__, "--folder", root, *(["--quick"] if arguments.quick else [])]
        path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
