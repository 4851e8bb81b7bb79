"""Run by test_logprob_kernels.py in processes that see Triton.

As a plugin of pytest it sends logits on a CPU through the kernels, in all test files of the
session; as a program it compiles them and prints what came of it."""

# Shape legend: T rows, V columns.

import json
import multiprocessing
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from rlmath.models import logprob_kernels
from rlmath.models.kernels import KERNEL_DEVICES
from rlmath.models.logprobs import vocab_parallel_logprobs
from tests.models.test_logprobs import check_shards, dense, loss, ours, random_logits, shard_of

KERNEL_DEVICES.add("cpu")

BLOCKS = logprob_kernels.SUMS_BLOCK + logprob_kernels.GRADIENT_BLOCK
GRADIENT_ERROR = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Relative. The interpreter loses a carry when it rounds to bfloat16."""


def compare(
    leaf_TV: Tensor, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], vocab_size: int
) -> None:
    """Values and gradients of a loss with both, in float64."""
    loss(*found[:2], "logprobs and entropy").backward()
    loss(*wanted[:2], "logprobs and entropy").backward()
    for mine_T, theirs_T in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(mine_T.double(), theirs_T, atol=2e-6, rtol=2e-6)
    error = {"atol": 3e-6, "rtol": GRADIENT_ERROR[leaf_TV.dtype]}
    torch.testing.assert_close(leaf_TV.grad[:, :vocab_size].double(), wanted[2].grad, **error)
    assert not leaf_TV.grad[:, vocab_size:].any()


def save_shard(rank: int, folder: Path) -> None:
    torch.save(shard_of(rank, dist.FileStore(str(folder / "store"), 2)), folder / str(rank))


def test_two_shards_give_what_the_whole_vocabulary_gives(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")
    ranks = [forked.Process(target=save_shard, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    check_shards(*(torch.load(tmp_path / str(rank)) for rank in range(2)))


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", GRADIENT_ERROR)
@pytest.mark.parametrize("V", [1, 2, 31, BLOCKS - 1, BLOCKS, BLOCKS + 3])
def test_sizes_beside_a_multiple_of_the_blocks(V: int, dtype: torch.dtype) -> None:
    """Rows lie apart; what is between them stays.

    In some rows tokens of every block are masked."""
    wide_TV, targets_T = random_logits(5, V + 9)
    wide_TV = wide_TV.to(dtype)
    targets_T = targets_T % V
    logits_TV = wide_TV[:, 2 : 2 + V]
    masked = tuple(column for column in (0, 7, V // 2, V - 1) if V > 31)
    masked_T = torch.arange(5) % 2 == 0
    masked_TN = torch.zeros(5, V, dtype=torch.bool)
    masked_TN[masked_T] = masked_TN[masked_T].index_fill(
        1, torch.tensor(masked, dtype=torch.int64), True
    )
    exact = dense(logits_TV, targets_T, 0.7, V, masked_TN)
    between_TV = wide_TV.clone()
    between_TV[:, 2 : 2 + V] = 0
    leaf_TV = logits_TV.detach().requires_grad_()
    outputs = vocab_parallel_logprobs(
        leaf_TV, targets_T, 0.7, V, dist.group.WORLD, masked_T, masked
    )
    compare(leaf_TV, outputs, exact, V)
    wide_TV[:, 2 : 2 + V] = 0
    assert torch.equal(wide_TV, between_TV)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", GRADIENT_ERROR)
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_extreme_logits(dtype: torch.dtype, temperature: float) -> None:
    """Seven rows of logits, whose padding is minus infinity.

    Alternately far apart, far down, far up, all equal, one that towers, and steps up and down from
    column to column."""
    steps_V = torch.arange(90.0)
    rows = [
        1e4 * (-1) ** steps_V,
        -1e4 + steps_V,
        1e4 - steps_V,
        0 * steps_V - 77,
        1e4 * (steps_V == 3),
    ]
    logits_TV = torch.stack([*rows, steps_V / 9, -steps_V / 9]).to(dtype)
    logits_TV[:, 88:] = -torch.inf
    targets_T = torch.tensor([0, 87, 1, 5, 3, 87, 0])
    *outputs, leaf_TV = ours(logits_TV, targets_T, temperature, 88)
    compare(leaf_TV, tuple(outputs), dense(logits_TV, targets_T, temperature, 88), 88)


@pytest.mark.usefixtures("group")
def test_rows_beyond_what_32_bits_count() -> None:
    """6 GiB of addresses, of which a few pages are touched."""
    far = torch.empty(3 * 2**30 + 64, dtype=torch.bfloat16).as_strided((4, 48), (2**30, 1))
    logits_TV, targets_T = random_logits(4, 48)
    leaf_TV = far.copy_(logits_TV).detach().requires_grad_()
    exact = dense(leaf_TV, targets_T, 0.9, 48)
    outputs = vocab_parallel_logprobs(leaf_TV, targets_T, 0.9, 48, dist.group.WORLD)
    compare(leaf_TV, outputs, exact, 48)


# ---------------------------------------------------------------- compiled for a GPU


class NoGPU:
    """A driver of Triton for a GPU that is not there; what is compiled is kept by device."""

    def __init__(self, architecture: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", architecture, 32)
        self.get_current_device = lambda: architecture
        self.get_current_stream = lambda device: 0


def launch_all(
    dtype: torch.dtype, masked_columns: tuple[int, ...], grads: list[Tensor | None]
) -> None:
    """Both kernels, as a step launches them: one vocabulary's shard, its last columns padding."""
    T = 4
    V = 37_984
    columns = 37_713
    logits_TV = torch.empty(T, V, dtype=dtype)
    targets_T1 = torch.zeros(T, 1, dtype=torch.int64)
    masked = (torch.zeros(T, dtype=torch.bool) if masked_columns else None, masked_columns)
    neg_max_T, sums_3T = logprob_kernels.shard_sums(logits_TV, columns, 0.7, targets_T1, *masked)
    row_sums = (neg_max_T, *sums_3T, torch.zeros(T, dtype=torch.bool), targets_T1)
    logprob_kernels.overwrite_with_gradient(logits_TV, columns, 0.7, row_sums, *grads, *masked)


def resources(compiled: CompiledKernel) -> dict[str, int]:
    """Registers and stack of a thread, and loads of 16 bytes, of the machine code."""
    Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "kernel.cubin"]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    counts = {
        name.lower(): int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)
    }
    return counts | {"wide_loads": compiled.asm["ptx"].count("ld.global.v4")}


def main() -> None:
    run = triton.JITFunction.run

    def only_compile(kernel: triton.JITFunction, *given: Any, **more: Any) -> None:
        compiled = run(kernel, *given, **more | {"warmup": True})
        print(json.dumps([*case, kernel.__name__, resources(compiled)], default=str))

    triton.JITFunction.run = only_compile
    grad_T = torch.ones(4)
    for case in (
        (torch.bfloat16, (), [grad_T, None], 90),
        (torch.bfloat16, (), [None, grad_T], 90),
        (torch.bfloat16, (), [None, None], 90),
        (torch.bfloat16, (), [grad_T, grad_T], 80),
        # Triton makes another program for a number that is 1.
        *(
            (dtype, masked, [grad_T, grad_T], 90)
            for dtype in GRADIENT_ERROR
            for masked in ((), (3,), (3, 5))
        ),
    ):
        triton.runtime.driver.set_active(NoGPU(case[-1]))
        launch_all(*case[:-1])


if __name__ == "__main__":
    main()
