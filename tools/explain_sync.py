"""Explain the weight sync of a run: what every rank copies, sends and receives when new weights go to the engines, and
why something travels.

python tools/explain_sync.py --config configs/my.yaml parallel.tensor=2 rollout.tensor_parallel=1 run.device=cuda

With engines on ranks of their own (rollout.ranks) it is the plan of the first engine; the others get the same.

It prints the plan that the run itself follows: a GPU's with run.device=cuda or where memory.gpu or memory.gpu_gib names
one, the CPU's where there is no GPU. Of the model only config.json is read; no rank is started and no GPU is needed. It
exits with 2 where the settings have no plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.checkpoint.hf.weight_map import parameter_count, placed_tensors
from rlmath.cli.plan_memory import MISTAKE, NOT_NEEDED, checked_shape
from rlmath.config.load import load_config, make_parser
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.config.terminal import escape_terminal
from rlmath.distributed.mesh import Mesh
from rlmath.planning.memory_estimate import mesh_of
from rlmath.planning.memory_fit import planned_target
from rlmath.planning.parallelism import ranks_or_least
from rlmath.rollout.weight_sync.reshard_plan import Copy, SyncPlan, bucket_bytes, plan_own_ranks, plan_sync
from rlmath.rollout.weight_sync.shard_layouts import (
    ENGINE_VOCAB_MULTIPLE,
    Coordinates,
    TrainingLayout,
    training_blocks,
    training_layout,
)

GIB, MIB = 2**30, 2**20
FORMATS = {"cpu": ("float32", 4), "cuda": ("bfloat16", 2)}
"""By device: number format of the engine's weights, in which they travel, and its bytes."""


@dataclass(frozen=True)
class Explained:
    """A plan with all that went into it."""

    config: Config
    shape: ModelShape
    mesh: Mesh
    """Of the training ranks."""
    layout: TrainingLayout
    plan: SyncPlan
    device: str
    bucket_bytes: int
    ranks_per_node: int | None

    @property
    def ranks(self) -> range:
        """Those of the plan: all that train, and where engines have ranks of their own, those of the first engine."""
        return range(self.mesh.world_size + (self.mesh.engine_size if self.mesh.engine_ranks else 0))

    def stage(self, rank: int) -> int | None:
        """Pipeline stage; None for a rank that does not train."""
        return replace(self.mesh, rank=rank).pipeline_rank if rank < self.mesh.world_size else None

    def engine(self, rank: int) -> int | None:
        """Engine that a rank is part of; None for none."""
        if not self.mesh.engine_ranks:
            return rank // self.mesh.engine_size
        return 0 if rank >= self.mesh.world_size else None


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or MISTAKE."""
    escape_terminal()
    parser = make_parser("Explain the weight sync of a run.")
    parser.add_argument(
        "--ranks", type=int, help="ranks of the run; without it those of parallel.data, else the least"
    )
    parser.add_argument("--ranks-per-node", type=int, help="without it all ranks are on one node")
    parser.add_argument("--json", action="store_true", help="print plain data, in bytes")
    given = parser.parse_intermixed_args(argv)
    try:
        explained = explain(given)
    except ValueError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    print(json.dumps(as_data(explained), indent=2) if given.json else as_text(explained))
    return 0


def explain(given: argparse.Namespace) -> Explained:
    """The plan of the run that the command line tells; ValueError for settings that no run could have."""
    if given.ranks_per_node is not None and given.ranks_per_node < 1:
        raise ValueError(f"--ranks-per-node is {given.ranks_per_node}; needed: at least 1.")
    config = load_config(given.config, given.overrides, stand_ins=NOT_NEEDED)
    ranks = ranks_or_least(config, given.ranks)
    shape = checked_shape(config, ranks)
    # With run.device=cuda no GPU need be there, nor named.
    device = "cuda" if config.run.device == "cuda" else planned_target(config).kind
    parallel, mesh = config.parallel, mesh_of(config, ranks, rank=0)
    layout = training_layout(shape.num_layers, mesh, parallel.first_stage_layers, parallel.last_stage_layers)
    bucket, node = bucket_bytes(config.sync.bucket_mib, device, ranks), given.ranks_per_node
    if mesh.engine_ranks:
        engine = range(mesh.world_size, mesh.world_size + mesh.engine_size)
        plan = plan_own_ranks(shape, layout, mesh, engine, FORMATS[device][1], bucket)
    else:
        plan = plan_sync(shape, layout, mesh, FORMATS[device][1], bucket, node)
    return Explained(config, shape, mesh, layout, plan, device, bucket, node)


# ---------------------------------------------------------------- what the plan moves


@dataclass(frozen=True)
class Moved:
    """Bytes by rank, and what travels by its reason."""

    copied: list[int]
    sent: list[int]
    received: list[int]
    reasons: dict[str, int]
    between_nodes: int


def count(explained: Explained) -> Moved:
    """One walk over the plan: it may have hundreds of thousands of copies."""
    plan, ranks = explained.plan, explained.ranks
    node = explained.ranks_per_node or len(ranks)
    copied = [sum(copy.elements for copy in plan.local.get(rank, ())) for rank in ranks]
    sent, received, reasons, between = Counter(), Counter(), Counter(), 0
    reason_of = _Reasons(explained)
    for copies in plan.rounds:
        for copy in copies:
            sent[copy.source] += copy.elements
            received[copy.target] += copy.elements
            reasons[reason_of(copy)] += copy.elements
            between += copy.elements if copy.source // node != copy.target // node else 0
    size = plan.element_bytes
    return Moved(
        [size * elements for elements in copied],
        [size * sent[rank] for rank in ranks],
        [size * received[rank] for rank in ranks],
        {reason: size * reasons[reason] for reason in REASONS if reasons[reason]},
        size * between,
    )


REASONS = {
    "own": "engines have ranks of their own",
    "stages": "other pipeline stages train these layers, and every engine needs all of them",
    "experts": "training shares the experts of a layer over {expert}, and every engine needs all of them",
    "split": "training splits tensors over {tensor}, engines over {engine}: other ranks of the stage hold the rest",
    "vocabulary": "Megatron fills the vocabulary of {vocab} up to a multiple of {tensor}, vLLM to one of {multiple}: "
    "the borders between ranks lie elsewhere",
}
"""Why something travels."""


class _Reasons:
    """Why a copy travels, seen from its target."""

    def __init__(self, explained: Explained) -> None:
        self._mesh = explained.mesh
        shape, layout = explained.shape, explained.layout
        self._of_stage = [
            {
                block.tensor
                for expert in range(layout.expert)
                for block in training_blocks(shape, layout, Coordinates(0, stage, expert))
            }
            for stage in range(len(layout.stages))
        ]
        self._vocab = {placed.hf_names[0] for placed in placed_tensors(shape) if placed.rule.form == "vocab"}
        self._experts = {
            name
            for p in placed_tensors(shape)
            if p.expert is not None and layout.expert > 1
            for name in p.hf_names
        }
        self._stage_of = [
            replace(self._mesh, rank=rank).pipeline_rank for rank in range(self._mesh.world_size)
        ]

    def __call__(self, copy: Copy) -> str:
        if self._mesh.engine_ranks:
            return "own"
        if copy.tensor not in self._of_stage[self._stage_of[copy.target]]:
            return "stages"
        if copy.tensor in self._experts:
            return "experts"
        same_split = self._mesh.tensor == self._mesh.engine_size
        return "vocabulary" if same_split and copy.tensor in self._vocab else "split"


# ---------------------------------------------------------------- what is printed


def as_data(explained: Explained) -> dict[str, Any]:
    """Plain data; sizes in bytes."""
    plan, mesh, moved = explained.plan, explained.mesh, count(explained)
    by_rank = [
        {
            "rank": rank,
            "stage": explained.stage(rank),
            "tensor_rank": None if explained.stage(rank) is None else rank % mesh.tensor,
            "engine": explained.engine(rank),
            "engine_part": None if explained.engine(rank) is None else _part(explained, rank),
            "copied": moved.copied[rank],
            "sent": moved.sent[rank],
            "received": moved.received[rank],
        }
        for rank in explained.ranks
    ]
    return {
        "device": explained.device,
        "element_bytes": plan.element_bytes,
        "layout": mesh.describe(),
        "stages": [list(layers) for layers in explained.layout.stages],
        "ranks": by_rank,
        "rounds": len(plan.rounds),
        "bucket": explained.bucket_bytes,
        "largest_bucket": plan.largest_bucket_bytes,
        "copied": sum(moved.copied),
        "sent": sum(moved.sent),
        "lower_bound": plan.lower_bound,
        "reasons": moved.reasons,
        "between_nodes": moved.between_nodes,
    }


def _part(explained: Explained, rank: int) -> int:
    mesh = explained.mesh
    return (rank - mesh.world_size if mesh.engine_ranks else rank) % mesh.engine_size


def as_text(explained: Explained) -> str:
    """The layouts in words, a table of ranks, the totals, and the reasons."""
    moved = count(explained)
    return "\n".join([*_layouts(explained), "", *_table(explained, moved), "", *_totals(explained, moved)])


def _layouts(explained: Explained) -> list[str]:
    mesh, (number_format, _) = explained.mesh, FORMATS[explained.device]
    stages = "; ".join(
        f"stage {stage}: {_spans(layers)}" for stage, layers in enumerate(explained.layout.stages)
    )
    return [
        f"{explained.config.model.path}: {parameter_count(explained.shape) / 1e9:.3g} B parameters on "
        f"{_ranks(mesh.world_size + mesh.engine_ranks)}, {mesh.describe()}",
        f"Training splits every tensor over {_ranks(mesh.tensor)}; layers by pipeline stage: {stages}.",
        f"Each engine has the whole model, split over {_ranks(mesh.engine_size)}, in {number_format}.",
    ]


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _spans(numbers: Sequence[int]) -> str:
    """
    >>> _spans((0, 1, 2, 6, 8, 9))
    '0-2, 6, 8-9'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _table(explained: Explained, moved: Moved) -> list[str]:
    lines = [f"{'rank':>5}{'stage':>7}{'engine':>8}{'copied':>10}{'sent':>10}{'received':>10}   (GiB)"]
    for rank, sizes in enumerate(zip(moved.copied, moved.sent, moved.received, strict=True)):
        places = ["-" if at is None else at for at in (explained.stage(rank), explained.engine(rank))]
        cells = "".join(f"{size / GIB:>10.3f}" for size in sizes)
        lines.append(f"{rank:>5}{places[0]:>7}{places[1]:>8}{cells}")
    if explained.mesh.engine_ranks:
        lines.append(
            f"For the first of {explained.mesh.num_engines} engines; each of the others gets the same."
        )
    return lines


def _totals(explained: Explained, moved: Moved) -> list[str]:
    plan, mesh = explained.plan, explained.mesh
    rounds = "1 round" if len(plan.rounds) == 1 else f"{len(plan.rounds)} rounds"
    copied = f"{sum(moved.copied) / GIB:.3f} GiB are copied from the ranks' own shards."
    if not plan.rounds:
        return [copied, "Nothing travels: every rank holds what its engine needs."]
    lines = [
        copied,
        f"{sum(moved.sent) / GIB:.3f} GiB travel in {rounds} of at most "
        f"{plan.largest_bucket_bytes / MIB:.3g} MiB a rank; no plan can do with less than "
        f"{plan.lower_bound / GIB:.3f} GiB.",
    ]
    words = {
        "tensor": _ranks(mesh.tensor),
        "engine": _ranks(mesh.engine_size),
        "expert": _ranks(mesh.expert),
        "vocab": explained.shape.vocab_size,
        "multiple": ENGINE_VOCAB_MULTIPLE,
    }
    for reason, size in moved.reasons.items():
        words["tensor"] = mesh.tensor if reason == "vocabulary" else _ranks(mesh.tensor)
        lines.append(f"  {size / GIB:.3f} GiB because {REASONS[reason].format(**words)}.")
    if explained.ranks_per_node is not None:
        lines.append(f"  {moved.between_nodes / GIB:.3f} GiB of it between nodes.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
