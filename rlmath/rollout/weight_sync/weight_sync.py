"""New weights for vLLM: from the policy's shards into the engines' parameters, in memory.

    WeightTransfer.run -> engine parameters written -> checksums, where they are due

`WeightTransfer` carries out a plan (`reshard_plan`) round by round: a rank copies what its own
shard holds and sends only what other ranks lack, in buckets. No rank ever holds a whole model
beside its shard, its engine's weights and the buckets.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.checkpoint.hf.lora_merge import kept_share
from rlmath.checkpoint.hf.weight_map import adapted_rules, adapter_weight, placed_tensors
from rlmath.checkpoint.hf.weights import local_adapter, local_parameter
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import NO_LORA, LoraConfig
from rlmath.distributed.device import Device, synchronize
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.engine_weights import EngineWeights
from rlmath.rollout.weight_sync.checksums import SyncChecksums
from rlmath.rollout.weight_sync.reshard_plan import (
    Copy,
    RankRound,
    SyncPlan,
    cells,
    plan_sync,
    rank_rounds,
)
from rlmath.rollout.weight_sync.shard_layouts import (
    TIED_HEAD,
    TrainingLayout,
    engine_adapters,
    parameter_key,
)
from rlmath.rollout.weight_sync.transport import Messages, SharedBuckets, run_rounds, share_memory


@dataclass(frozen=True)
class SyncReport:
    """What one sync did on this rank."""

    seconds: float
    packing_seconds: float
    """Part of `seconds` that vLLM spent packing matrices; 0 on GPU."""
    bytes_copied: int
    bytes_sent: int
    bytes_received: int
    kept_metrics: dict[str, float]
    """The metric "sync/lora_kept", where adapters were merged (`SourceMatrices.kept_metrics`)."""

    def metrics(self) -> dict[str, float]:
        """What the sync moved on this rank (GiB), and how long vLLM packed matrices (seconds)."""
        return {
            "sync/copied_gib": self.bytes_copied / 2**30,
            "sync/sent_gib": self.bytes_sent / 2**30,
            "sync/received_gib": self.bytes_received / 2**30,
            "seconds/sync_packing": self.packing_seconds,
        } | self.kept_metrics


@dataclass(frozen=True)
class RankTransfer:
    """One rank's part of a plan."""

    rounds: Sequence[RankRound]
    runs: Sequence[RoundRuns]
    """The copies of each round."""
    planned_rows: Mapping[str, int]
    """Rows of each of the engine's parameters that copies fill."""
    only: frozenset[str] | None
    """The policy's parameters that are copied; None: all."""
    travelling_rounds: int
    """Rounds in which anything travels between any ranks."""
    largest_bucket_bytes: int
    bytes_copied: int
    bytes_sent: int
    bytes_received: int


def rank_transfer(plan: SyncPlan, rank: int, only: Collection[str] | None) -> RankTransfer:
    """This rank's part of a plan, which may have hundreds of thousands of copies."""
    rounds = rank_rounds(plan, rank)
    return RankTransfer(
        rounds=rounds,
        runs=[runs_of_round(round_) for round_ in rounds],
        planned_rows=planned_rows(rounds),
        only=None if only is None else frozenset(only),
        travelling_rounds=len(plan.rounds),
        largest_bucket_bytes=plan.largest_bucket_bytes,
        bytes_copied=plan.bytes_copied(rank),
        bytes_sent=plan.bytes_sent(rank),
        bytes_received=plan.bytes_received(rank),
    )


class WeightTransfer:
    """Writes the policy's weights into one engine, again and again.

    Building it is a collective, and so is `run`."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        layout: TrainingLayout,
        mesh: Mesh,
        device: Device,
        weights: EngineWeights,
        bucket_bytes: int,
        ranks_per_node: int | None = None,
        lora: LoraConfig = NO_LORA,
        keeps_weights: bool = False,
    ) -> None:
        """With `keeps_weights` the engine keeps what does not learn, which is sent once.

        `lora` says which adapters the policy has, and whether the engine holds them."""
        self._weights = weights
        self._device = device
        if device.kind == "cuda":
            # The first call of an NCCL group must be one that all its ranks make; not all of them
            # send.
            dist.all_reduce(torch.zeros(1, device=device.torch_device))
        adapters = engine_adapters(shape, lora)
        plan = partial(
            plan_sync,
            shape,
            layout,
            mesh,
            element_bytes=weights.dtype.itemsize,
            bucket_bytes=bucket_bytes,
            ranks_per_node=ranks_per_node,
            adapters=adapters,
        )
        whole_plan = plan()
        self._next = rank_transfer(whole_plan, mesh.rank, only=None)
        self._later = self._next
        if adapters and keeps_weights:
            learns = learning_parameters(shape, lora)
            self._later = rank_transfer(plan(only=learns), mesh.rank, only=learns)
        bucket = max(self._next.largest_bucket_bytes, self._later.largest_bucket_bytes)
        self._memory = None
        if device.kind == "cpu" and bucket:
            self._memory = share_memory(2 * bucket)
        self._bucket_elements = bucket // weights.dtype.itemsize
        self.lower_bound = whole_plan.lower_bound * len(cells(mesh, ranks_per_node))
        """Bytes that must travel between ranks in a sync of all weights."""
        self._sources = source_matrices(chunks, shape, lora)
        self._new_checksums = partial(
            SyncChecksums, shape, layout, mesh=mesh, device=device, adapters=adapters
        )

    @property
    def rounds(self) -> int:
        """Rounds of the next sync in which anything travels between any ranks."""
        return self._next.travelling_rounds

    @torch.no_grad()
    def run(self, check: bool = False) -> SyncReport:
        """Set the engine's weights to the policy's, in the engine's number format.

        With `check` both sides of what is written are compared by checksums. RuntimeError on all
        ranks where they differ."""
        started = time.perf_counter()
        transfer = self._next
        self._sources.kept.clear()
        checksums = self._new_checksums(only=transfer.only) if check else None
        if transfer.only is None:
            self._weights.begin(transfer.planned_rows)
        write = partial(self._finish_round, checksums)
        run_rounds(self._open_transport(), len(transfer.rounds), write)
        packing_seconds = self._weights.end()
        if checksums is not None:
            checksums.add_policy(self._sources.matrix, self._weights.dtype)
            if wrong := checksums.differing():
                raise RuntimeError(
                    f"after a weight sync {len(wrong)} tensors differ between the policy and the "
                    "engines: "
                    f"{'; '.join(wrong[:5])}. What is sampled from them is worthless; please "
                    "report this"
                )
        synchronize(self._device)
        self._next = self._later
        return SyncReport(
            seconds=time.perf_counter() - started,
            packing_seconds=packing_seconds,
            bytes_copied=transfer.bytes_copied,
            bytes_sent=transfer.bytes_sent,
            bytes_received=transfer.bytes_received,
            kept_metrics=self._sources.kept_metrics(),
        )

    def _open_transport(self) -> Messages | SharedBuckets:
        rounds = self._next.rounds
        dtype = self._weights.dtype
        if self._memory is None:
            return Messages(rounds, self._pack, dtype, at=self._device.torch_device)
        return SharedBuckets(
            rounds,
            self._pack,
            dtype,
            memory=self._memory,
            bucket_elements=self._bucket_elements,
        )

    def _finish_round(
        self, checksums: SyncChecksums | None, number: int, wait: Callable[[], Mapping[int, Tensor]]
    ) -> None:
        """Write a round's copies; parameters that need no other rank while its buckets travel."""
        round_ = self._next.rounds[number]
        local: dict[str, list[TensorRun]] = defaultdict(list)
        for run in self._next.runs[number].local:
            local[run.first.target_parameter].append(run)
        awaited = {copy.target_parameter for copies in round_.receives.values() for copy in copies}
        for name in round_.complete:
            if name not in awaited:
                self._complete(name, local[name], checksums)
        for peer, bucket in wait().items():
            unpack(bucket, self._next.runs[number].receives[peer], self._weights)
        for name in round_.complete:
            if name in awaited:
                self._complete(name, local[name], checksums)

    def _complete(
        self, name: str, runs: Sequence[TensorRun], checksums: SyncChecksums | None
    ) -> None:
        matrix = self._weights.matrix(name)
        self._sources.copy(runs, [run.target(matrix) for run in runs])
        if checksums is not None:
            checksums.add_engine(name, matrix)
        self._weights.complete(name)

    def _pack(self, number: int, peer: int, bucket: Tensor) -> None:
        pack(bucket, self._next.runs[number].sends[peer], self._sources)


# ---------------------------------------------------------------- copies


@dataclass(frozen=True)
class TensorRun:
    """Copies of one tensor that are made in one operation.

    They are equal rectangles at equal distances, as the heads of a layer's queries lie in
    Megatron's matrix."""

    first: Copy
    count: int
    source_step: int
    target_step: int
    """Rows of source and target from one rectangle to the next."""

    @property
    def elements(self) -> int:
        return self.count * self.first.elements

    def source(self, matrix: Tensor) -> Tensor:
        """[count, rows, cols], a view of the policy's `matrix`."""
        return self._rectangles(
            matrix, self.first.source_row, self.first.source_col, step=self.source_step
        )

    def target(self, matrix: Tensor) -> Tensor:
        """[count, rows, cols], a view of the engine's parameter `matrix`."""
        return self._rectangles(
            matrix, self.first.target_row, self.first.target_col, step=self.target_step
        )

    def _rectangles(self, matrix: Tensor, row: int, col: int, step: int) -> Tensor:
        copy = self.first
        row_stride, column_stride = matrix.stride()
        assert row + (self.count - 1) * step + copy.rows <= len(matrix), copy
        assert col + copy.cols <= matrix.shape[1], copy
        corner = matrix.storage_offset() + row * row_stride + col * column_stride
        return matrix.as_strided(
            (self.count, copy.rows, copy.cols),
            (step * row_stride, row_stride, column_stride),
            corner,
        )


def runs_of(copies: Sequence[Copy]) -> list[TensorRun]:
    """The copies as runs, in the same order."""
    runs = []
    start = 0
    while start < len(copies):
        stop = start + 1
        steps = None
        while (
            stop < len(copies)
            and (next_steps := _steps(copies[stop - 1], copies[stop])) is not None
        ):
            if steps is not None and next_steps != steps:
                break
            steps = next_steps
            stop += 1
        source_step, target_step = steps or (0, 0)
        runs.append(
            TensorRun(
                copies[start],
                count=stop - start,
                source_step=source_step,
                target_step=target_step,
            )
        )
        start = stop
    return runs


def _steps(previous: Copy, following: Copy) -> tuple[int, int] | None:
    """Rows from a rectangle to the following one, in source and target.

    None where one operation cannot copy both."""
    source_step = following.source_row - previous.source_row
    target_step = following.target_row - previous.target_row
    moved = previous._replace(
        row=following.row, source_row=following.source_row, target_row=following.target_row
    )
    # One view has rectangles in ascending order that do not overlap.
    apart = min(source_step, target_step) >= previous.rows
    return (source_step, target_step) if moved == following and apart else None


@dataclass(frozen=True)
class RoundRuns:
    """The copies of one round on one rank, as runs."""

    local: list[TensorRun]
    sends: dict[int, list[TensorRun]]
    """Runs for each receiving rank."""
    receives: dict[int, list[TensorRun]]
    """Runs from each sending rank."""


def runs_of_round(round_: RankRound) -> RoundRuns:
    """The copies of a rank's round as runs."""

    def by_peer(copies_by_peer: Mapping[int, Sequence[Copy]]) -> dict[int, list[TensorRun]]:
        return {peer: runs_of(copies) for peer, copies in copies_by_peer.items()}

    return RoundRuns(runs_of(round_.local), by_peer(round_.sends), by_peer(round_.receives))


def planned_rows(rounds: Sequence[RankRound]) -> dict[str, int]:
    """Rows of each of the engine's parameters that copies fill."""
    rows: dict[str, int] = defaultdict(int)
    for round_ in rounds:
        for copy in (*round_.local, *chain(*round_.receives.values())):
            name = copy.target_parameter
            rows[name] = max(rows[name], copy.target_row + copy.rows)
    return dict(rows)


def pack(bucket: Tensor, runs: Sequence[TensorRun], sources: SourceMatrices) -> None:
    """Write the sources of runs one after the other into a bucket."""
    sources.copy(runs, _bucket_parts(bucket, runs))


def unpack(bucket: Tensor, runs: Sequence[TensorRun], weights: EngineWeights) -> None:
    """Write what `pack` has put into a bucket into the engine's weights."""
    targets = [run.target(weights.matrix(run.first.target_parameter)) for run in runs]
    copy_all(zip(targets, _bucket_parts(bucket, runs), strict=True))


def _bucket_parts(bucket: Tensor, runs: Sequence[TensorRun]) -> list[Tensor]:
    parts = bucket.split([run.elements for run in runs])
    return [
        part.view(run.count, run.first.rows, run.first.cols)
        for part, run in zip(parts, runs, strict=True)
    ]


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each source into its target: all pairs without gaps in one operation.

    Each pair with gaps has its own operation: a single one among the others would make torch copy
    all of them one by one."""
    dense_targets, dense_sources = [], []
    for target, source in pairs:
        if target.is_contiguous() and source.is_contiguous():
            dense_targets.append(target)
            dense_sources.append(source)
        else:
            target.copy_(source)
    if dense_targets:
        torch._foreach_copy_(dense_targets, dense_sources)


@dataclass(frozen=True)
class SourceMatrices:
    """This rank's shard as matrices by the plan's names.

    What an engine gets of a matrix is made at each reading."""

    parameters: Mapping[str, Tensor]
    """Views that stay valid: Megatron updates parameters in place."""
    merging: Mapping[str, Any] = field(default_factory=dict)
    """The `models.lora.Adapter` of each parameter into which one is merged."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """The factor of each B of an adapter that engines hold."""
    merges: bool = False
    """Whether any rank of the policy merges adapters."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """How much of its update each merged matrix has (`merged_weight`)."""

    def matrix(self, name: str) -> Tensor:
        matrix = self.parameters[name]
        if name in self.merging:
            matrix, self.kept[name] = self.merging[name].merged(matrix)
        return self.scales[name] * matrix if name in self.scales else matrix

    def kept_metrics(self) -> dict[str, float]:
        """The share of the adapters' updates that merged matrices have, on all ranks.

        Empty where nothing is merged; else a collective."""
        return {"sync/lora_kept": kept_share(self.kept.values())} if self.merges else {}

    def copy(self, runs: Sequence[TensorRun], targets: Sequence[Tensor]) -> None:
        """Copy the sources of runs into `targets`.

        One matrix that is made for it is held at a time; runs that read the same one should follow
        one another."""
        plain: list[tuple[Tensor, Tensor]] = []
        pairs = zip(runs, targets, strict=True)
        for name, group in groupby(pairs, lambda pair: pair[0].first.source_parameter):
            if name in self.merging or name in self.scales:
                copy_all(_with_sources(group, self.matrix(name)))
            else:
                plain += _with_sources(group, self.matrix(name))
        copy_all(plain)


def _with_sources(
    pairs: Iterable[tuple[TensorRun, Tensor]], matrix: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    return ((target, run.source(matrix)) for run, target in pairs)


def source_matrices(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, lora: LoraConfig
) -> SourceMatrices:
    """The matrices of the policy's chunks on this rank, and of the adapters that engines hold."""
    adapters = engine_adapters(shape, lora)
    parameters = {}
    merging = {}
    for placed in chain(placed_tensors(shape), placed_tensors(shape, adapters)):
        parameter = local_parameter(chunks, placed)
        if parameter is not None:
            parameters[parameter_key(placed)] = _as_matrix(parameter)
        if not adapters and (adapter := local_adapter(chunks, placed)) is not None:
            merging[parameter_key(placed)] = adapter
    head = getattr(getattr(chunks[-1], "output_layer", None), "weight", None)
    if shape.tied_embeddings and head is not None:
        parameters[TIED_HEAD] = _as_matrix(head)
    keys = [parameter_key(placed) for placed in placed_tensors(shape, adapters)]
    scales = {key: lora.alpha / lora.rank for key in keys if adapter_weight(key)[1] == "B"}
    merges = lora.rank > 0 and not adapters
    return SourceMatrices(parameters, merging, scales, merges=merges)


def learning_parameters(shape: ModelShape, lora: LoraConfig) -> set[str]:
    """The policy's parameters that a sync must send again, by the plan's names, with LoRA.

    They are the adapters that engines hold, or else the matrices that have one."""
    rules = engine_adapters(shape, lora) or adapted_rules(shape.architecture, lora.target)
    return {parameter_key(placed) for placed in placed_tensors(shape, rules)}


def _as_matrix(parameter: Tensor) -> Tensor:
    """A view with as many columns as the last axis has; of a vector, with one."""
    matrix = parameter.data if parameter.dim() > 1 else parameter.data[:, None]
    return matrix.flatten(0, -2)
