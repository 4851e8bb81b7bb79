"""The plan, applied to numbered tensors without any process group, and counted."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import LoraConfig
from rlmath.distributed.mesh import Mesh
from rlmath.rollout.weight_sync.reshard_plan import Copy, SyncPlan, plan_sync, rank_rounds
from rlmath.rollout.weight_sync.shard_layouts import (
    engine_adapters,
    engine_shapes,
    training_layout,
)
from tests.rollout.weight_sync.oracle import (
    EXPERTS,
    SMALL,
    Layout,
    engine_parameters,
    plan_of_all,
    training_parameters,
    whole_tensors,
)

FLOAT32 = 4
PP2 = ((0, 1), (2, 3))
PP4 = ((0,), (1,), (2,), (3,))
LAYOUTS = (
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(stages=PP2),
    Layout(stages=PP4),
    Layout(tensor=2, stages=PP2),
    Layout(data=2),
    Layout(data=2, tensor=2),
    Layout(data=2, stages=PP2),
    Layout(stages=((0,), (1, 2, 3)), first=1),
    Layout(stages=((0, 1, 2), (3,)), last=1),
    Layout(stages=((0, 2), (1, 3)), virtual=2),
    Layout(context=2),
    Layout(tensor=2, context=2, stages=PP2),
    Layout(tensor=4, stages=PP2),
)
MODELS = {
    "untied": SMALL,
    "tied": replace(SMALL, tied_embeddings=True),
    "qwen3": replace(
        SMALL, architecture="Qwen3ForCausalLM", head_dim=4, attention_bias=False, qk_norm=True
    ),
    "llama": replace(SMALL, architecture="LlamaForCausalLM", attention_bias=False),
    "phi3": replace(SMALL, architecture="Phi3ForCausalLM", attention_bias=False),
    "one rank of padding": replace(SMALL, vocab_size=30),
    "tied, one rank of padding": replace(SMALL, vocab_size=30, tied_embeddings=True),
}
MATRIX = [
    pytest.param(layout, size, id=f"{layout}-engines-of-{size}")
    for layout in LAYOUTS
    for size in (1, 2, 4, 8)
    if layout.ranks % size == 0
]
MODEL_MATRIX = [
    pytest.param(*case.values, model, id=f"{case.id}-{model}", marks=marks)
    for number, case in enumerate(MATRIX)
    for position, model in enumerate(MODELS)
    for marks in [() if (number + position) % len(MODELS) in (0, 3) else pytest.mark.full]
]
"""CI has two models on every layout and each model on some nine of them."""


def bytes_of(elements: int) -> int:
    return FLOAT32 * elements


@functools.cache
def plan_of(
    shape: ModelShape,
    layout: Layout,
    engine_size: int,
    bucket: int = 150,
    ranks_per_node: int | None = None,
) -> SyncPlan:
    """`bucket` in elements."""
    mesh = layout.mesh(engine_size)
    return plan_of_all(shape, layout.training(), mesh, FLOAT32, bytes_of(bucket), ranks_per_node)


@functools.lru_cache(maxsize=64)
def trained_on(shape: ModelShape, layout: Layout, rank: int) -> dict[str, Tensor]:
    """A rank's training parameters; they are to be read only, as everything that is cached here."""
    return training_parameters(shape, whole(shape), layout, rank)


@functools.lru_cache(maxsize=64)
def needed_by(shape: ModelShape, engine_size: int, part: int) -> dict[str, Tensor]:
    return engine_parameters(shape, whole(shape), engine_size, part)


whole = functools.lru_cache(maxsize=8)(whole_tensors)


def numbers_in(parameters: dict[str, Tensor]) -> frozenset[int]:
    return frozenset(
        itertools.chain(*(matrix.flatten().tolist() for matrix in parameters.values()))
    ) - {0}


@functools.cache
def held_numbers(shape: ModelShape, layout: Layout, rank: int) -> frozenset[int]:
    return numbers_in(trained_on(shape, layout, rank))


@functools.cache
def needed_numbers(shape: ModelShape, engine_size: int, part: int) -> frozenset[int]:
    return numbers_in(needed_by(shape, engine_size, part))


def source_of(copy: Copy, parameters: dict[str, Tensor]) -> Tensor:
    """What a copy carries, out of the parameters of the rank that sends it."""
    matrix = parameters[copy.source_parameter]
    rectangle = matrix[
        copy.source_row : copy.source_row + copy.rows, copy.source_col : copy.source_col + copy.cols
    ]
    assert rectangle.shape == (copy.rows, copy.cols), f"{copy} reaches out of its source"
    return rectangle


class Simulation:
    """All ranks of a sync in one process, through buckets as ranks with shared memory see them."""

    def __init__(self, shape: ModelShape, layout: Layout, engine_size: int, plan: SyncPlan) -> None:
        ranks = range(layout.ranks)
        self.held = [trained_on(shape, layout, rank) for rank in ranks]
        self.wanted = [needed_by(shape, engine_size, rank % engine_size) for rank in ranks]
        sizes = engine_shapes(shape, engine_size)
        self.engines = [
            {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
            for _ in ranks
        ]
        self.writes = [
            {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}
            for _ in ranks
        ]
        self.completed: list[list[str]] = [[] for _ in ranks]
        self.rounds = [rank_rounds(plan, rank) for rank in ranks]
        (count,) = {len(rounds) for rounds in self.rounds}
        for number in range(count):
            self._round(number)

    def _round(self, number: int) -> None:
        buckets = []
        for rank, rounds in enumerate(self.rounds):
            sent_copies = itertools.chain(*rounds[number].sends.values())
            parts = [source_of(copy, self.held[rank]).flatten() for copy in sent_copies]
            buckets.append(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64))
        for rank, rounds in enumerate(self.rounds):
            round_ = rounds[number]
            for peer, copies in round_.receives.items():
                offset = round_.offsets[peer]
                for copy in copies:
                    self._write(
                        rank,
                        copy,
                        buckets[peer][offset : offset + copy.elements].view(copy.rows, copy.cols),
                    )
                    offset += copy.elements
            for copy in round_.local:
                self._write(rank, copy, source_of(copy, self.held[rank]))
            for name in round_.complete:
                assert torch.equal(self.engines[rank][name], self.wanted[rank][name]), (
                    f"{name} of {rank}"
                )
                self.completed[rank].append(name)

    def _write(self, rank: int, copy: Copy, values: Tensor) -> None:
        assert copy.target_parameter not in self.completed[rank], (
            f"{copy} comes after its parameter is done"
        )
        assert copy.elements > 0, f"{copy} copies nothing"
        for kind, content in ((self.engines, values), (self.writes, 1)):
            matrix = kind[rank][copy.target_parameter]
            part = matrix[copy.target_row :, copy.target_col :][: copy.rows, : copy.cols]
            assert part.shape == (copy.rows, copy.cols), f"{copy} reaches out of its target"
            part += content

    def check(self) -> None:
        for rank, matrices in enumerate(self.wanted):
            assert self.engines[rank].keys() == matrices.keys()
            for name, matrix in matrices.items():
                assert torch.equal(self.engines[rank][name], matrix), f"{name} of rank {rank}"
                assert torch.equal(self.writes[rank][name], (matrix != 0).long()), (
                    f"{name} of rank {rank}"
                )
            with_content = [name for name, matrix in matrices.items() if matrix.any()]
            assert Counter(self.completed[rank]) == Counter(with_content)


@pytest.mark.parametrize(("layout", "engine_size", "model"), MODEL_MATRIX)
def test_every_engine_gets_each_element_once_and_in_its_place(
    layout: Layout, engine_size: int, model: str
) -> None:
    """A parameter is completed once, when all of it is written, and never written after that."""
    Simulation(
        MODELS[model], layout, engine_size, plan_of(MODELS[model], layout, engine_size)
    ).check()


@pytest.mark.parametrize(("layout", "engine_size", "model"), MODEL_MATRIX)
def test_what_travels_is_what_the_target_lacks_and_no_more(
    layout: Layout, engine_size: int, model: str
) -> None:
    shape = MODELS[model]
    plan = plan_of(shape, layout, engine_size)
    for rank in range(layout.ranks):
        needed = needed_numbers(shape, engine_size, rank % engine_size)
        held_elements = held_numbers(shape, layout, rank)
        assert plan.missing[rank] == len(needed - held_elements)
        assert plan.bytes_received(rank) == bytes_of(len(needed - held_elements))
        assert plan.bytes_copied(rank) == bytes_of(len(needed & held_elements))
        assert all(copy.source == copy.target == rank for copy in plan.local[rank])
    assert all(copy.source != copy.target for copies in plan.rounds for copy in copies)
    assert sum(map(plan.bytes_sent, range(layout.ranks))) == plan.lower_bound


@pytest.mark.parametrize("bucket", [1, 40, 150, 10**6])
@pytest.mark.parametrize(("layout", "engine_size"), MATRIX)
def test_no_rank_sends_or_receives_more_than_a_bucket_in_a_round(
    layout: Layout, engine_size: int, bucket: int
) -> None:
    """Only a single row that is longer than a bucket is more."""
    plan = plan_of(SMALL, layout, engine_size, bucket)
    largest = 0
    for copies in plan.rounds:
        assert copies, "a round in which nobody sends anything"
        for side in ("source", "target"):
            for rank in {getattr(copy, side) for copy in copies}:
                rank_copies = [copy for copy in copies if getattr(copy, side) == rank]
                total = sum(copy.elements for copy in rank_copies)
                assert total <= bucket or (len(rank_copies) == 1 and rank_copies[0].rows == 1)
                largest = max(largest, total) if side == "source" else largest
    assert plan.largest_bucket_bytes == bytes_of(largest)


@pytest.mark.parametrize(("layout", "engine_size"), MATRIX)
def test_both_ends_of_a_pair_list_the_same_copies_in_the_same_order(
    layout: Layout, engine_size: int
) -> None:
    plan = plan_of(SMALL, layout, engine_size)
    by_rank = [rank_rounds(plan, rank) for rank in range(layout.ranks)]
    for rounds in zip(*by_rank, strict=True):
        for sender, receiver in itertools.permutations(range(layout.ranks), 2):
            sent_copies = rounds[sender].sends.get(receiver, ())
            assert rounds[receiver].receives.get(sender, ()) == sent_copies
            if sent_copies:
                copies_to_lower_ranks = [
                    copies for to, copies in rounds[sender].sends.items() if to < receiver
                ]
                before = sum(copy.elements for copies in copies_to_lower_ranks for copy in copies)
                assert rounds[receiver].offsets[sender] == before
            else:
                assert sender not in rounds[receiver].offsets


@pytest.mark.parametrize(("layout", "engine_size", "model"), MODEL_MATRIX)
def test_ranks_that_hold_the_same_share_the_sending(
    layout: Layout, engine_size: int, model: str
) -> None:
    """They share it to within one slice, the unit in which they take turns."""
    plan = plan_of(MODELS[model], layout, engine_size)
    slices = [bytes_of(copy.elements) for copies in plan.rounds for copy in copies]
    by_content: dict[frozenset[int], list[int]] = {}
    for rank in range(layout.ranks):
        held_elements = held_numbers(MODELS[model], layout, rank)
        by_content.setdefault(held_elements, []).append(plan.bytes_sent(rank))
    for bytes_sent in by_content.values():
        assert max(bytes_sent) - min(bytes_sent) <= max(slices, default=0)


@pytest.mark.parametrize("ranks_per_node", [2, 4])
@pytest.mark.parametrize(
    "layout",
    [Layout(data=2, tensor=2), Layout(data=4, tensor=2), Layout(tensor=2, stages=PP2, data=2)],
    ids=str,
)
def test_what_the_own_node_holds_never_comes_from_another(
    layout: Layout, ranks_per_node: int
) -> None:
    shape = MODELS["untied"]
    plan = plan_of(shape, layout, 1, ranks_per_node=ranks_per_node)
    across = 0
    for copy in itertools.chain(*plan.rounds):
        tensor = whole(shape)[copy.tensor]
        number = int(tensor[copy.row, copy.col] if tensor.dim() == 2 else tensor[copy.row])
        node = copy.target // ranks_per_node
        near = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        if any(number in held_numbers(shape, layout, rank) for rank in near):
            assert copy.source in near
        else:
            across += 1
    # A node has both halves of every tensor, but only one pipeline stage.
    assert (across > 0) == (len(layout.stages) > 1)


@settings(max_examples=15, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 3]),
    engine_size=st.sampled_from([1, 2, 4, 8]),
    vocab=st.integers(1, 200),
    tied=st.booleans(),
    bucket=st.integers(1, 2000),
    ranks_per_node=st.sampled_from([None, 1, 2, 3, 8]),
)
def test_any_layout_fills_every_engine(
    tensor: int,
    pipeline: int,
    data: int,
    engine_size: int,
    vocab: int,
    tied: bool,
    bucket: int,
    ranks_per_node: int | None,
) -> None:
    assume(tensor * pipeline * data <= 16)
    stages = {1: ((0, 1, 2, 3),), 2: PP2, 4: PP4}[pipeline]
    layout = Layout(tensor=tensor, stages=stages, data=data)
    if layout.ranks % engine_size:
        engine_size = 1
    shape = replace(SMALL, vocab_size=vocab, tied_embeddings=tied)
    plan = plan_of(shape, layout, engine_size, bucket, ranks_per_node)
    Simulation(shape, layout, engine_size, plan).check()
    assert sum(map(plan.bytes_sent, range(layout.ranks))) == plan.lower_bound


@settings(max_examples=20, deadline=None)
@given(
    tensor=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2, 4]),
    expert=st.sampled_from([1, 2, 4]),
    expert_tensor=st.sampled_from([1, 2]),
    engine_size=st.sampled_from([1, 2, 4]),
    bucket=st.integers(1, 2000),
)
def test_experts_on_any_ranks_fill_every_engine(
    tensor: int,
    pipeline: int,
    data: int,
    expert: int,
    expert_tensor: int,
    engine_size: int,
    bucket: int,
) -> None:
    assume(tensor * data % (expert * expert_tensor) == 0)
    layout = Layout(
        tensor=tensor,
        stages={1: ((0, 1, 2, 3),), 2: PP2}[pipeline],
        data=data,
        expert=expert,
        expert_tensor=expert_tensor,
    )
    if layout.ranks % engine_size:
        engine_size = 1
    plan = plan_of(EXPERTS, layout, engine_size, bucket)
    Simulation(EXPERTS, layout, engine_size, plan).check()
    assert sum(map(plan.bytes_sent, range(layout.ranks))) == plan.lower_bound


@pytest.mark.parametrize("target", ["all", "attention", "mlp"])
def test_the_adapters_that_engines_hold_are_planned_with_the_model(target: str) -> None:
    adapters = engine_adapters(SMALL, LoraConfig(rank=4, target=target))
    mesh = Layout(tensor=2, stages=PP2).mesh(2)
    layout = training_layout(SMALL.num_layers, mesh)
    plan = plan_sync(
        SMALL, layout, mesh, element_bytes=FLOAT32, bucket_bytes=bytes_of(150), adapters=adapters
    )
    for rank in range(mesh.world_size):
        names = [name for round_ in rank_rounds(plan, rank) for name in round_.complete]
        assert Counter(names) == Counter(engine_shapes(SMALL, 2, adapters).keys())
    assert len(names) > len(engine_shapes(SMALL, 2))


@pytest.mark.parametrize("engine_size", [8, pytest.param(4, marks=pytest.mark.full)])
def test_a_model_of_32_billion_parameters_is_planned_for_128_ranks(engine_size: int) -> None:
    shape = ModelShape(
        "Qwen2ForCausalLM",
        64,
        5120,
        40,
        8,
        128,
        27648,
        152064,
        False,
        32768,
        1e6,
        1e-6,
        True,
        "bfloat16",
    )
    mesh = Mesh(127, 128, 8, 4, engine_size)
    bucket = 64 * 2**20
    plan = plan_sync(shape, training_layout(64, mesh), mesh, 2, bucket, ranks_per_node=8)
    assert sum(map(plan.bytes_sent, plan.local)) == plan.lower_bound > 0
    assert plan.largest_bucket_bytes <= bucket
    completed_names = [name for round_ in rank_rounds(plan, 127) for name in round_.complete]
    assert Counter(completed_names) == Counter(engine_shapes(shape, engine_size).keys())
