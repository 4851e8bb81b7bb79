"""What a checksum tells apart, and that it may be made in parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlmath.rollout.weight_sync.checksums import MASK, rectangle_checksum

FORMATS = [torch.float32, torch.bfloat16]


def checksum(matrix: Tensor) -> int:
    return rectangle_checksum(matrix, 0, 0, matrix.shape[1])


def random_matrix(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def swapped(matrix: Tensor, one: int, other: int) -> Tensor:
    order = list(range(len(matrix)))
    order[one], order[other] = other, one
    return matrix[order]


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    row=st.integers(0, 12),
    col=st.integers(0, 12),
    dtype=st.sampled_from(FORMATS),
)
def test_the_parts_of_a_tensor_add_up_to_the_whole(
    rows: int, cols: int, row: int, col: int, dtype: torch.dtype
) -> None:
    matrix = random_matrix(rows, cols, dtype)
    row = min(row, rows)
    col = min(col, cols)
    corners = ((0, 0, row, col), (0, col, row, cols), (row, 0, rows, col), (row, col, rows, cols))
    total = sum(
        rectangle_checksum(matrix[top:bottom, left:right], top, left, cols)
        for top, left, bottom, right in corners
        if top < bottom and left < right
    )
    assert total & MASK == checksum(matrix)


def test_a_matrix_of_more_elements_than_are_worked_on_at_a_time_is_counted_whole() -> None:
    matrix = random_matrix(1500, 1000, torch.bfloat16)
    upper = rectangle_checksum(matrix[:700], 0, 0, 1000)
    assert (upper + rectangle_checksum(matrix[700:], 700, 0, 1000)) & MASK == checksum(matrix)
    wider = random_matrix(2, 2**20 + 3, torch.bfloat16)
    left = rectangle_checksum(wider[:, :5], 0, 0, 2**20 + 3)
    assert (left + rectangle_checksum(wider[:, 5:], 0, 5, 2**20 + 3)) & MASK == checksum(wider)


def test_a_view_counts_as_its_copy() -> None:
    matrix = random_matrix(6, 8, torch.float32)
    assert checksum(matrix.t()) == checksum(matrix.t().contiguous())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_every_single_bit_counts_wherever_it_is(dtype: torch.dtype) -> None:
    matrix = random_matrix(4, 8, dtype)
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    checksums = {checksum(matrix)}
    for place in range(32):
        for bit in range(8 * matrix.element_size()):
            other = matrix.clone()
            # A shift into the sign is a negative number.
            mask = torch.tensor(1, dtype=whole).bitwise_left_shift(bit)
            other.view(whole).view(-1)[place] ^= mask
            checksums.add(checksum(other))
    assert len(checksums) == 1 + 32 * 8 * matrix.element_size()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", [(8, 8), (32, 1), (64, 32), (5, 7)], ids=str)
def test_the_opposite_sign_everywhere_shows(size: tuple[int, int], dtype: torch.dtype) -> None:
    for matrix in (torch.ones(size, dtype=dtype), random_matrix(*size, dtype).abs()):
        assert checksum(-matrix) != checksum(matrix)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("distance", [1, 16, 256, 2048, 4096])
def test_swapped_rows_show_at_any_distance(dtype: torch.dtype, distance: int) -> None:
    """Values are as checkpoints have them: bfloat16, also where the engine computes in float32."""
    width = 4096
    for seed in range(20):
        rows = random_matrix(2, width, torch.bfloat16, seed).to(dtype)
        right, wrong = (
            sum(rectangle_checksum(values[n : n + 1], n * distance, 0, width) for n in range(2))
            & MASK
            for values in (rows, swapped(rows, 0, 1))
        )
        assert right != wrong, f"seed {seed}"


def test_zeros_of_either_sign_differ() -> None:
    """Bits are compared, not numbers."""
    assert checksum(torch.zeros(3, 3)) != checksum(-torch.zeros(3, 3))
