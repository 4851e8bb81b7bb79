"""Triton kernels: sums over a vocabulary shard, and the gradient over its logits, in one pass each.

They do what `logprobs.py` does by torch's operations in chunks, and read each logit from memory
once a pass (backward: write it once). Beside the logits they hold a few numbers a row. Logits may
be float32, bfloat16 or float16 and are computed with in float32; rows may lie apart, but a row is
contiguous. The tests run both kernels in Triton's interpreter and compile them for GPUs that are
not there (tests/models/test_logprob_kernels.py).
"""

# Shape legend: T packed tokens, V columns of this rank's vocabulary shard.

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

SUMS_BLOCK = 2048
GRADIENT_BLOCK = 4096
WARPS = 8
"""Columns that a program works on at a time, and its warps of 32 threads.

Compiled for an H100, with masked tokens: 59 registers a thread forward and 62 backward (48
without), none spilled."""

LN2 = tl.constexpr(math.log(2))
NO_MAXIMUM = tl.constexpr(-1e30)
"""Largest logit where no token can be sampled: finite, so that 0 times it is 0."""
NO_LOGIT = tl.constexpr(-2e30)
"""Stands for the logit of a token that cannot be sampled: below every maximum."""


def shard_sums(
    logits_TV: Tensor,
    columns: int,
    temperature: float,
    column_T1: Tensor,
    masked_T: Tensor | None,
    masked_columns: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Minus the largest logit of every row over its first `columns`, and three sums (float32).

    With b the logits less the largest one, in bits, the sums are the mass, sum of 2^b, the moment,
    sum of b 2^b, and b of the target at `column_T1`. In the rows of `masked_T` the
    `masked_columns` count as if they were not there. A row without any token has -1e30 for its
    largest logit, and sums of 0."""
    T, V = logits_TV.shape
    neg_max_T = torch.empty(T, dtype=torch.float32, device=logits_TV.device)
    sums_3T = torch.empty(3, T, dtype=torch.float32, device=logits_TV.device)
    if T:
        listed_columns, masked_number = _listed(masked_columns, logits_TV.device)
        _sums_kernel[(T,)](
            logits_TV,
            stride=_row_stride(logits_TV),
            width=V,
            columns=columns,
            bits=_bits(temperature),
            target_column=column_T1,
            masked_rows=masked_T,
            masked_columns=listed_columns,
            masked_number=masked_number,
            neg_max=neg_max_T,
            sums=sums_3T,
            BLOCK=SUMS_BLOCK,
            num_warps=WARPS,
        )
    return neg_max_T, sums_3T


def overwrite_with_gradient(
    logits_TV: Tensor,
    columns: int,
    temperature: float,
    row_sums: tuple[Tensor, ...],
    grad_logprobs_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    masked_T: Tensor | None,
    masked_columns: tuple[int, ...],
) -> None:
    """Turn logits into their gradient, 0 in columns that are padding or masked.

    `row_sums` are those of `logprobs._RowSums`, with the maximum as `shard_sums` has it. A row
    whose incoming gradients are all 0 gets exactly 0, and its logits are not read."""
    T, V = logits_TV.shape
    if T:
        listed_columns, masked_number = _listed(masked_columns, logits_TV.device)
        neg_max_T, mass_T, logprobs_T, entropy_T, mine_T, column_T1 = (
            tensor.contiguous() for tensor in row_sums
        )
        _gradient_kernel[(T * triton.cdiv(V, GRADIENT_BLOCK),)](
            logits_TV,
            stride=_row_stride(logits_TV),
            width=V,
            columns=columns,
            temperature=temperature,
            bits=_bits(temperature),
            neg_max=neg_max_T,
            mass=mass_T,
            logprobs=logprobs_T,
            entropy=entropy_T,
            mine=mine_T,
            target_column=column_T1,
            grad_logprobs=grad_logprobs_T
            if grad_logprobs_T is None
            else grad_logprobs_T.contiguous(),
            grad_entropy=grad_entropy_T if grad_entropy_T is None else grad_entropy_T.contiguous(),
            masked_rows=masked_T,
            masked_columns=listed_columns,
            masked_number=masked_number,
            BLOCK=GRADIENT_BLOCK,
            num_warps=WARPS,
        )
    # So that autograd refuses to read the logits once more, as after an operation of torch in
    # place.
    torch.autograd.graph.increment_version(logits_TV)


def _bits(temperature: float) -> float:
    """The factor from a logit to an exponent of 2."""
    return 1 / (temperature * math.log(2))


def _row_stride(logits_TV: Tensor) -> int:
    assert logits_TV.stride(1) == 1, logits_TV.stride()
    return logits_TV.stride(0)


@lru_cache(maxsize=16)
def _listed(columns: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, int]:
    """The columns on the device, and their number.

    Kept, since the host waits for the device to copy them."""
    return (torch.tensor(columns, dtype=torch.int32, device=device) if columns else None), len(
        columns
    )


# ---------------------------------------------------------------- kernels


@triton.jit
def _sums_kernel(
    logits,
    stride,
    width,
    columns,
    bits,
    target_column,
    masked_rows,
    masked_columns,
    masked_number,
    neg_max,
    sums,
    BLOCK: tl.constexpr,
):
    """One program for each row.

    Every lane keeps the maximum, mass and moment of its own columns."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    if masked_rows is not None:
        number = tl.where(tl.load(masked_rows + row), masked_number, 0)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), NO_MAXIMUM, tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        # By the width, a multiple of 16 as a rule, so that a thread's columns are loaded together.
        logit = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
        counts = column < columns
        if masked_rows is not None:
            counts &= ~_among(column, masked_columns, number)
        logit = tl.where(counts, logit, NO_LOGIT)
        # One power for both: of the logit below the maximum so far, or of that maximum below the
        # logit.
        above = (logit - top) * bits
        power = tl.exp2(-tl.abs(above))
        rises = above > 0
        moment = tl.where(rises, (moment - above * mass) * power, moment + above * power)
        mass = tl.where(rises, mass * power + 1, mass + power)
        top = tl.where(rises, logit, top)
    row_top = tl.max(top, 0)
    above = (top - row_top) * bits
    power = tl.exp2(above)
    column = tl.load(target_column + row)
    target = (tl.load(logits + column).to(tl.float32) - row_top) * bits
    if masked_rows is not None:
        target = tl.where(_among(column, masked_columns, number), NO_MAXIMUM, target)
    tl.store(neg_max + row, -row_top)
    rows = tl.num_programs(0).to(tl.int64)
    tl.store(sums + row, tl.sum(mass * power, 0))
    tl.store(sums + rows + row, tl.sum((moment + above * mass) * power, 0))
    tl.store(sums + 2 * rows + row, target)


@triton.jit
def _gradient_kernel(
    logits,
    stride,
    width,
    columns,
    temperature,
    bits,
    neg_max,
    mass,
    logprobs,
    entropy,
    mine,
    target_column,
    grad_logprobs,
    grad_entropy,
    masked_rows,
    masked_columns,
    masked_number,
    BLOCK: tl.constexpr,
):
    """One program for each block of each row.

    The formula is that of `logprobs._overwrite_with_gradient`."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * stride + column
    pull, spread = 0.0, 0.0
    if grad_logprobs is not None:
        pull = tl.load(grad_logprobs + row) / temperature
    if grad_entropy is not None:
        spread = tl.load(grad_entropy + row) / temperature
    counts = column < columns
    if masked_rows is not None:
        number = tl.where(tl.load(masked_rows + row), masked_number, 0)
        counts &= ~_among(column, masked_columns, number)
    gradient = tl.zeros((BLOCK,), tl.float32)
    if (pull != 0) | (spread != 0):
        row_mass, row_entropy = tl.load(mass + row), tl.load(entropy + row)
        row_logprob = tl.load(logprobs + row)
        logit = tl.load(place, mask=column < width, other=0.0).to(tl.float32)
        b = (logit + tl.load(neg_max + row)) * bits
        factor = -pull / row_mass
        # The log-prob knows 1 - p no better than to float32's digits of 1: a series would add none.
        target_gradient = (1 - tl.exp(row_logprob)) * pull
        if grad_entropy is not None:
            factor += spread * (tl.log(row_mass) - row_entropy - LN2 * b) / row_mass
            target_gradient -= tl.exp(row_logprob) * (row_logprob + row_entropy) * spread
        gradient = factor * tl.exp2(b)
        is_target = (column == tl.load(target_column + row)) & tl.load(mine + row)
        gradient = tl.where(is_target, target_gradient, gradient)
        gradient = tl.where(counts, gradient, 0.0)
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=column < width)


@triton.jit
def _among(column, listed, number):
    """Whether each column is among the first `number` of those listed."""
    is_listed = column < 0
    for at in range(number):
        is_listed |= column == tl.load(listed + at)
    return is_listed
