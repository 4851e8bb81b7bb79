"""Ranges of flattened tensors as rectangles."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rlmath.checkpoint.sharded_state import rectangles

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
