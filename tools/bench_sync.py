"""Seconds until the engines have new weights, against gathering and reloading whole tensors.

    python tools/bench_sync.py [--quick]

Two ranks under torchrun, a random Qwen2 (50M parameters with --quick, 300M without), float32,
engines of vLLM's CPU backend. In the same run, taking turns:

- ours: `rlmath.rollout.weight_sync.weight_sync.WeightTransfer`;
- "gather and reload": every tensor is gathered whole on every rank (all-gather over tensor ranks,
  broadcast from its pipeline stage) and handed to vLLM's `reload_weights`, which keeps its part.

Both syncs have their matrices packed by vLLM's CPU backend; that time is measured where vLLM spends
it, reported apart ("packing_seconds") and taken off both. Where a layout moves nothing between
ranks in either way, the ratio is only for the record. Prints figures (tools/figures.py): medians,
of the slowest rank.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from transformers import Qwen2Config

from rlmath.checkpoint.hf.config_json import read_model_shape
from rlmath.checkpoint.hf.weights import stream_hf_tensors
from rlmath.cli.demo import one_thread, torchrun
from rlmath.cli.make_tiny_model import make_tokenizer
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import ParallelConfig, RolloutConfig
from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.device import Device, init_process_group, open_device
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.ranks import environment_rank, environment_world_size
from rlmath.models.megatron import (
    Recompute,
    build_chunks,
    start_megatron,
    stop_megatron,
    transformer_config,
)
from rlmath.rollout.engine import Engine
from rlmath.rollout.weight_sync.reshard_plan import bucket_bytes
from rlmath.rollout.weight_sync.shard_layouts import engine_shapes, training_layout
from rlmath.rollout.weight_sync.weight_sync import WeightTransfer
from tools.figures import print_figure

BUCKET_MIB = 64.0
SIZES = {"50M": (8, 640, 1760, 16_000), "300M": (16, 1152, 3136, 32_000)}
"""Layers, hidden size, feed-forward size, vocabulary."""


@dataclass(frozen=True)
class Case:
    name: str
    tensor: int
    pipeline: int
    engine_size: int


CASES = (
    Case("equal layouts, TP2 to engines of TP2", 2, 1, engine_size=2),
    Case("resharding, TP2 to engines of TP1", 2, 1, engine_size=1),
    Case("resharding, PP2 to engines of TP1", 1, 2, engine_size=1),
    Case("resharding, PP2 to engines of TP2", 1, 2, engine_size=2),
    Case("resharding, DP2 to engines of TP2 (nothing to gather)", 1, 1, engine_size=2),
    Case("equal layouts, DP2 to engines of TP1 (nothing to gather)", 1, 1, engine_size=1),
)


def make_folder(folder: Path, size: str) -> None:
    """What vLLM needs of a model without its weights: configuration and tokenizer."""
    layers, hidden, ffn, vocabulary = SIZES[size]
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="float32",
    ).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


# ---------------------------------------------------------------- one rank's work


class PackingClock:
    """Seconds that vLLM's CPU backend spends packing matrices, in whichever way they came."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seconds = 0.0
        methods = {
            id(method): method
            for method in (getattr(module, "quant_method", None) for module in model.modules())
            if method
        }
        for method in methods.values():
            method.process_weights_after_loading = self._timed(method.process_weights_after_loading)

    def _timed(self, work: Callable[..., None]) -> Callable[..., None]:
        def timed(layer: Any) -> None:
            started = time.perf_counter()
            work(layer)
            self.seconds += time.perf_counter() - started

        return timed


@dataclass
class Timings:
    """Timings of one way: the slowest rank's seconds in each repeat, with packing apart."""

    seconds: list[float]
    packing: list[float]

    def add(self, work: Callable[[], Any], clock: PackingClock) -> None:
        dist.barrier()
        packed = clock.seconds
        started = time.perf_counter()
        work()
        total = time.perf_counter() - started
        packed = clock.seconds - packed
        reports = all_gather_objects((total - packed, packed))
        self.seconds.append(max(sync_seconds for sync_seconds, _ in reports))
        self.packing.append(max(packing for _, packing in reports))


def build_policy(shape: ModelShape, mesh: Mesh, device: Device) -> list[torch.nn.Module]:
    """Model chunks with random weights."""
    config = transformer_config(
        shape, mesh, device, parallel=ParallelConfig(), recompute=Recompute()
    )
    chunks = build_chunks(shape, mesh, device, config)
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        parameter.data.normal_(std=0.02)
    return list(chunks)


@contextmanager
def laid_out(case: Case, device: Device) -> Iterator[Mesh]:
    mesh = Mesh(
        environment_rank(),
        environment_world_size(),
        case.tensor,
        pipeline=case.pipeline,
        engine_size=case.engine_size,
    )
    start_megatron(mesh, device, seed=1, timeout_seconds=600.0)
    yield mesh
    stop_megatron()


def gather_and_reload(
    chunks: list[torch.nn.Module], shape: ModelShape, mesh: Mesh, engine: Engine
) -> None:
    """Gather every tensor whole and have vLLM reload it: the baseline.

    A collective must be consumed to its end on every rank, whatever vLLM leaves of it."""
    tensors = stream_hf_tensors(chunks, shape, mesh)
    engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
    collections.deque(tensors, maxlen=0)


def measure(
    case: Case, shape: ModelShape, engine: Engine, clock: PackingClock, repeats: int
) -> None:
    """Measure the sync and the baseline of a layout in turns, and report them."""
    device = open_device("cpu")
    with laid_out(case, device) as mesh:
        chunks = build_policy(shape, mesh, device)
        layout = training_layout(shape.num_layers, mesh)
        sync = WeightTransfer(
            chunks,
            shape,
            layout,
            mesh=mesh,
            device=device,
            weights=engine.weights,
            bucket_bytes=bucket_bytes(BUCKET_MIB, device.kind, mesh.world_size),
        )
        report = sync.run(check=True)
        gather_and_reload(chunks, shape, mesh, engine)
        our_timings = Timings([], [])
        baseline_timings = Timings([], [])
        for repeat in range(repeats):
            turns = [
                (our_timings, lambda: sync.run()),
                (baseline_timings, lambda: gather_and_reload(chunks, shape, mesh, engine)),
            ]
            for timings, work in turns if repeat % 2 else reversed(turns):
                timings.add(work, clock)
        sent = sum(all_gather_objects(report.bytes_sent))
        if mesh.rank == 0:
            tell(
                case, shape, our_timings, theirs=baseline_timings, sent=sent, bound=sync.lower_bound
            )


def tell(
    case: Case, shape: ModelShape, ours: Timings, theirs: Timings, sent: int, bound: int
) -> None:
    """Print the figures of a layout."""
    name = f"{case.name}, {sum_parameters(shape) / 1e6:.0f}M"
    our_seconds = statistics.median(ours.seconds)
    baseline_seconds = statistics.median(theirs.seconds)
    for metric, value, baseline, ratio in (
        ("sync_seconds", our_seconds, "gather and reload", baseline_seconds / our_seconds),
        ("sync_seconds", baseline_seconds, "gather and reload itself", 1.0),
        ("packing_seconds", statistics.median(ours.packing), None, None),
        ("packing_seconds of the baseline", statistics.median(theirs.packing), None, None),
    ):
        print_figure("sync", name, metric, value=value, unit="s", baseline=baseline, ratio=ratio)
    ratio = bound / sent if sent else None
    print_figure(
        "sync", name, "bytes_sent", value=sent, unit="bytes", baseline="lower bound", ratio=ratio
    )


def sum_parameters(shape: ModelShape) -> int:
    return sum(rows * cols for rows, cols in engine_shapes(shape, 1).values())


def rank_main(folder: Path, engine_size: int, repeats: int) -> None:
    """Run all cases with engines of one size, on every rank under torchrun."""
    device = open_device("cpu")
    init_process_group(device, 600.0)
    shape = read_model_shape(folder)
    mesh = Mesh(
        environment_rank(), environment_world_size(), 1, pipeline=1, engine_size=engine_size
    )
    settings = RolloutConfig(cpu_kv_cache_gib=0.05, progress_bar=False)
    engine = Engine(
        str(folder),
        settings,
        64,
        mesh=mesh,
        device=device,
        weight_shapes=engine_shapes(shape, engine_size),
    )
    (model,) = engine._llm.collective_rpc(lambda worker: worker.get_model())
    clock = PackingClock(model)
    for case in CASES:
        if case.engine_size == engine_size:
            measure(case, shape, engine, clock=clock, repeats=repeats)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer repeats")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--engine-size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 7
    if arguments.rank_of is not None:
        rank_main(arguments.rank_of, arguments.engine_size, repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_folder(Path(folder), "50M" if arguments.quick else "300M")
        for engine_size in (2, 1):
            command = [
                *torchrun(2),
                __file__,
                "--rank-of",
                folder,
                "--engine-size",
                str(engine_size),
            ]
            command += ["--quick"] if arguments.quick else []
            subprocess.run(command, env=one_thread(), check=True)


if __name__ == "__main__":
    main()
