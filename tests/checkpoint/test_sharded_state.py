"""Ranges of flattened tensors as rectangles, states of optimizers and of random generators."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch import Tensor

from rlmath.checkpoint.sharded_state import (
    MASTER,
    Piece,
    held_by,
    make_room,
    optimizer_pieces,
    random_states,
    rectangles,
    restore_random_states,
)
from rlmath.distributed.device import Device

SHAPES = [(7,), (1,), (4, 5), (1, 6), (6, 1), (3, 4, 5), (2, 1, 3, 2), (1, 1, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rectangles_hold_each_element_of_the_range_once_and_in_order(
    shape: tuple[int, ...],
) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            elements = []
            for offset, size in rectangles(shape, start, stop):
                slices = tuple(
                    slice(begin, begin + length) for begin, length in zip(offset, size, strict=True)
                )
                part = numbers[slices]
                assert part.shape == size
                assert part.is_contiguous() or part.numel() == 1
                elements += part.flatten().tolist()
            assert elements == list(range(start, stop)), (start, stop)


def test_a_range_of_a_matrix_is_three_rectangles_at_most() -> None:
    draw = random.Random(1)
    counts = []
    for _ in range(500):
        shape = (draw.randint(1, 50), draw.randint(1, 50))
        start, stop = sorted(draw.randint(0, math.prod(shape)) for _ in range(2))
        counts.append(len(list(rectangles(shape, start, stop))))
    assert max(counts) == 3


MOMENTS = ("exp_avg", "exp_avg_sq")


def parameters_of(seed: int = 1) -> list[Tensor]:
    """A matrix, and a parameter of a single number, as large as the count of steps."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, generator=generator), torch.randn(1, generator=generator)]


def adam_over(parameters: Sequence[Tensor], steps: int = 0) -> Any:
    """An Adam that has made steps, as Megatron has it."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    part = SimpleNamespace(optimizer=optimizer)
    for number in range(steps):
        step(part, parameters, number)
    return part


def step(part: Any, parameters: Sequence[Tensor], number: int) -> None:
    """A step with gradients that depend on its number."""
    for parameter in parameters:
        parameter.grad = torch.linspace(-1.0, 1.0, parameter.numel()).view(parameter.shape) + number
    part.optimizer.step()


def test_an_optimizer_that_loads_a_state_goes_on_as_the_one_that_had_it() -> None:
    """A chain of optimizers may have one without parameters on this rank."""
    parameters = parameters_of()
    part = adam_over(parameters, steps=3)
    copies = [parameter.clone() for parameter in parameters]
    loading_part = adam_over(copies)
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=None), loading_part])
    make_room(chain, MOMENTS, steps=3)
    for new, old in zip(held_by(chain), held_by(part), strict=True):
        assert new.tensors().keys() == old.tensors().keys() == set(MOMENTS)
        assert not any(tensor.any() for tensor in new.tensors().values())
        for name, tensor in new.tensors().items():
            tensor.copy_(old.tensors()[name])
    step(part, parameters, 3)
    step(loading_part, copies, 3)
    for parameter, copy in zip(parameters, copies, strict=True):
        assert torch.equal(parameter, copy)


def test_a_state_without_moments_makes_the_next_step_a_first_one() -> None:
    parameters = parameters_of()
    part = adam_over(parameters, steps=3)
    copies = [parameter.clone() for parameter in parameters]
    make_room(part, (), steps=0)
    step(part, parameters, 7)
    step(adam_over(copies), copies, 7)
    for parameter, copy in zip(parameters, copies, strict=True):
        assert torch.equal(parameter, copy)


def test_the_optimizer_of_a_bfloat16_model_has_float32_copies_of_its_parameters() -> None:
    weight, norm = parameters_of()
    main = weight.clone()
    weight = weight.bfloat16()
    part = adam_over([main, norm], steps=1)
    part.float16_groups = [[weight]]
    part.fp32_from_float16_groups = [[main]]
    of_weight, of_norm = held_by(part)
    assert of_weight.parameter is weight and of_norm.parameter is norm
    assert of_weight.tensors().keys() == {*MOMENTS, MASTER}
    assert of_norm.tensors().keys() == set(MOMENTS)
    pieces = [
        Piece(
            parameter,
            0,
            ShardedTensor.from_rank_offsets(key, parameter, (0, 1, 2), replica_id=(0, 0, 5)),
        )
        for key, parameter in (("weight", weight), ("norm", norm))
    ]
    sharded = optimizer_pieces(part, pieces, ("exp_avg", MASTER))
    state = part.optimizer.state
    expected = {
        "optimizer.state.exp_avg.weight": (state[main]["exp_avg"], (6, 4), (3, 0)),
        "optimizer.state.param.weight": (main, (6, 4), (3, 0)),
        "optimizer.state.exp_avg.norm": (state[norm]["exp_avg"], (2,), (1,)),
    }
    assert {tensor.key for tensor in sharded} == expected.keys()
    for tensor in sharded:
        data, global_shape, global_offset = expected[tensor.key]
        assert torch.equal(tensor.data, data) and tensor.data.data_ptr() == data.data_ptr()
        assert (tuple(tensor.global_shape), tuple(tensor.global_offset)) == (
            global_shape,
            global_offset,
        )
        assert tensor.replica_id == (0, 0, 5), "all data-parallel ranks hold the same"


@pytest.mark.parametrize("has_spare", [False, True])
def test_random_generators_go_on_where_their_states_were_taken(has_spare: bool) -> None:
    """Two of them draw normal numbers in pairs, and may have one to spare."""
    device = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
    random.seed(4)
    numpy.random.seed(4)
    torch.manual_seed(4)
    if has_spare:
        draws()
    states = random_states(device)
    expected = draws()
    assert draws() != expected
    restore_random_states(states, device)
    assert draws() == expected


def draws() -> list[float]:
    """Numbers of each generator, one normal number of each kind among them."""
    return [
        random.gauss(0.0, 1.0),
        random.random(),
        float(numpy.random.standard_normal()),
        float(numpy.random.random_sample()),
        *torch.rand(3).tolist(),
    ]
