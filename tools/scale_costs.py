"""What start and step cost a rank of N: the run's own code, called as if there were N ranks.

Each function gives figures by name. Counts and bytes are exact; seconds are those of this machine.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from unittest import mock

import torch.distributed as dist

from rlmath.checkpoint.hf.weight_map import Placed, placed_tensors, shard_shape
from rlmath.config.model_shape import ModelShape
from rlmath.data.seqlen_balancing import plan_minibatches, training_cost
from rlmath.distributed.fault_tolerance.failure import RankStatus, Shutdown
from rlmath.distributed.fault_tolerance.heartbeat import watched
from rlmath.distributed.mesh import Mesh
from rlmath.distributed.run_store import RunStore
from rlmath.rollout.weight_sync.reshard_plan import plan_cell, rank_rounds
from rlmath.rollout.weight_sync.shard_layouts import training_layout
from tools.scale_rollout import SEED, CountingStore, Figures, lengths

LARGE = ModelShape(
    "Qwen2ForCausalLM", 80, 8192, 64, 8, 128, 29568, 152064, False, 32768, 1e6, 1e-5, True, "bfloat16"
)
"""Qwen2.5-72B, on TP4 x PP2 with engines of 4 ranks."""
TENSOR, PIPELINE, ENGINE, NODE = 4, 2, 4, 8
BUCKET_BYTES = 64 * 2**20
MAX_TOKENS = 32_768


def large_mesh(ranks: int, rank: int = 0) -> Mesh:
    return Mesh(rank, ranks, TENSOR, PIPELINE, ENGINE)


@contextlib.contextmanager
def timed(found: Figures, name: str) -> Iterator[None]:
    """CPU seconds, which other programs on the machine hardly change."""
    started = time.process_time()
    yield
    found[name] = time.process_time() - started


# ---------------------------------------------------------------- start


def sync_plan(ranks: int, shape: ModelShape = LARGE) -> Figures:
    """The plan that the last rank makes for its weight syncs, and its own part of it."""
    mesh, found = large_mesh(ranks, ranks - 1), Figures()
    layout = training_layout(shape.num_layers, mesh, None, None)
    with timed(found, "sync_plan_seconds"):
        plan = plan_cell(shape, layout, mesh, 2, BUCKET_BYTES, NODE)
        rounds = rank_rounds(plan, mesh.rank)
    peers = {peer for one in rounds for peer in (*one.sends, *one.receives)}
    return found | {
        "sync_copies_planned": sum(map(len, (*plan.rounds, *plan.local.values()))),
        "sync_rounds": len(plan.rounds),
        "sync_peers": len(peers),
        "sync_bytes_received": plan.bytes_received(mesh.rank),
    }


def process_groups(ranks: int) -> Figures:
    """Megatron's groups: how many every rank is asked to make, in how many it is, and with how many peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from rlmath.distributed.device import open_device
    from rlmath.models.megatron import start_megatron, stop_megatron

    rank, made, found, new_group = ranks - 1, [], Figures(), dist.new_group

    def counted(*, ranks: Sequence[int], **how) -> object:
        made.append(list(ranks))
        return new_group(ranks=ranks, **how | {"backend": "fake"})

    device = open_device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    with mock.patch.object(dist, "new_group", counted), timed(found, "groups_seconds"):
        start_megatron(large_mesh(ranks, rank), device, SEED, 600.0)
    stop_megatron()
    dist.destroy_process_group()
    mine = [members for members in made if rank in members]
    return found | {
        "groups_made": len(made),
        "groups_joined": len(mine),
        "group_peers": len(set().union(*mine)) - 1,
    }


# ---------------------------------------------------------------- a step


def step_schedule(ranks: int, samples: int) -> Figures:
    """The step's schedule with as many data-parallel ranks as there are ranks, four minibatches."""
    found, cost = Figures(), training_cost(LARGE)
    with timed(found, "schedule_seconds"):
        plan_minibatches(lengths(samples), 4, ranks, MAX_TOKENS, seed=SEED, cost=cost)
    return found


# ---------------------------------------------------------------- heartbeat and checkpoint


def heartbeat(ranks: int) -> Figures:
    """What all hearts ask of the store in a beat, and what a rank asks once where a collective breaks."""
    home = f"{'0' * 36}/pid:[4026531836]"
    status = RankStatus(
        0, "node-0000.cluster", home, 4711, "123456789", "rollout", 31.5, 99, 999, 9999, False
    )
    store = CountingStore()
    signed = RunStore(store, f"rlmath/heartbeat/{'0' * 32}")
    for rank in range(ranks):
        signed.set(f"status/{rank}", asdict(replace(status, rank=rank)))
    size = store.bytes // ranks
    store.requests.clear()
    store.bytes = 0
    seen = [len(watched(rank, ranks, NODE)) for rank in range(ranks)]
    # A beat writes the own status, looks for the failure, reads the watched ranks' statuses, writes and reads progress.
    requests = sum(4 + count for count in seen)
    Shutdown("", 0, ranks).statuses(signed)
    return {
        "heart_requests_a_beat": requests,
        "heart_bytes_a_beat": sum(size * (1 + count) for count in seen),
        "failure_requests_of_a_rank": store.total,
        "failure_bytes_of_a_rank": store.bytes,
    }


def checkpoint(ranks: int, shape: ModelShape = LARGE) -> Figures:
    """Entries of a checkpoint's index, which rank 0 writes: rectangles of the parameters, and of Adam's two moments and
    the float32 parameters, which data-parallel ranks share out."""
    mesh = large_mesh(ranks)
    layout = training_layout(shape.num_layers, mesh, None, None)
    model = optimizer = 0
    for stage, layers in enumerate(layout.stages):
        sizes = [
            shard_shape(one.rule, shape, TENSOR)
            for one in placed_tensors(shape)
            if _on_stage(one, layers, stage)
        ]
        model += len(sizes)
        optimizer += 3 * _shared_out(sizes, mesh.data)
    return {"checkpoint_index_entries": TENSOR * (model + optimizer)}


def _on_stage(placed: Placed, layers: Sequence[int], stage: int) -> bool:
    owner = {"first": 0, "last": PIPELINE - 1}.get(placed.rule.owner)
    return placed.layer in layers if owner is None else owner == stage


def _shared_out(sizes: Sequence[tuple[int, ...]], data: int) -> int:
    """Rectangles of flattened tensors, one behind the other, that are cut into `data` equal parts."""
    from rlmath.checkpoint.sharded_state import rectangles

    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + math.prod(size))
    share = -(-starts[-1] // data)
    count = 0
    for start, size in zip(starts, sizes, strict=False):
        stop = start + math.prod(size)
        for part in range(start // share, -(-stop // share)):
            first, last = max(start, part * share), min(stop, (part + 1) * share)
            count += sum(1 for _ in rectangles(size, first - start, last - start))
    return count
