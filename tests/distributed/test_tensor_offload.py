"""Storages that leave and come back.

The tests look at what stays valid, what is counted, and what an error leaves behind.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from rlmath.distributed.device import Device
from rlmath.distributed.tensor_offload import ALIGNMENT_BYTES, BLOCK_BYTES, HostMemory, StorageSet

CPU = Device("cpu", torch.device("cpu"), "gloo", torch.float32)
MIB = 2**20


def random_tensors(*sizes: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=draw) for size in sizes]


def on_device(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_what_is_kept_comes_back_bit_by_bit_in_the_same_tensors() -> None:
    tensors = [
        *random_tensors(1000, 1, 333),
        torch.tensor([7], dtype=torch.int64),
        torch.ones(3).bfloat16(),
    ]
    originals = [tensor.clone() for tensor in tensors]
    weights = StorageSet("weights", lambda: tensors, keep=True, device=CPU)
    size = (1000 + 1 + 333) * 4 + 8 + 3 * 2
    assert weights.nbytes == size and not weights.offloaded

    move = weights.offload()
    assert (move.name, move.bytes) == ("weights", size) and move.seconds > 0
    assert weights.offloaded and weights.nbytes == on_device(tensors) == 0
    assert weights._host.nbytes >= size

    back = weights.onload()
    assert (back.name, back.bytes) == ("weights", size) and back.seconds > 0
    assert not weights.offloaded and weights.nbytes == on_device(tensors) == size
    assert all(
        torch.equal(tensor, original) for tensor, original in zip(tensors, originals, strict=True)
    )


def test_what_is_given_up_comes_back_as_zeros_and_costs_no_host_memory() -> None:
    tensors = random_tensors(100, 50)
    dropped = StorageSet("gradients", lambda: tensors, keep=False, device=CPU)
    assert dropped.offload().bytes == 600
    assert on_device(tensors) == dropped._host.nbytes == 0
    assert dropped.onload().bytes == 600
    assert on_device(tensors) == 600 and not any(tensor.any() for tensor in tensors)


def test_views_of_one_storage_count_once_and_stay_views() -> None:
    (flat,) = random_tensors(100)
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.data = flat[10:30].view(4, 5)
    original = parameter.detach().clone()
    together = StorageSet("views", lambda: [parameter, flat[50:], flat], keep=True, device=CPU)
    assert together.offload().bytes == 400
    assert together.onload().bytes == 400
    assert torch.equal(parameter, original)
    flat[10] = 5.0
    assert parameter[0, 0] == 5.0


def test_a_storage_that_belongs_to_another_set_stays() -> None:
    included, excluded = random_tensors(10, 20)
    included_set = StorageSet(
        "ours", lambda: [included, excluded[3:]], True, CPU, exclude=lambda: [excluded[:2]]
    )
    assert included_set.offload().bytes == 40
    assert on_device([included]) == 0 and on_device([excluded]) == 80
    included_set.onload()


def test_tensors_on_another_device_stay_there() -> None:
    elsewhere = torch.empty(10, device="meta")
    (on_cpu,) = random_tensors(10)
    mixed = StorageSet("mixed", lambda: [on_cpu, elsewhere], keep=True, device=CPU)
    assert mixed.offload().bytes == 40
    mixed.onload()
    assert elsewhere.untyped_storage().nbytes() == 40


def test_tensors_made_later_leave_the_next_time() -> None:
    state: list[Tensor] = []
    growing = StorageSet("optimizer", lambda: state, keep=True, device=CPU)
    assert growing.offload().bytes == growing.onload().bytes == 0
    state += random_tensors(10)
    original = state[0].clone()
    assert growing.offload().bytes == growing.onload().bytes == 40
    assert torch.equal(state[0], original)


@pytest.mark.parametrize(
    ("offset", "size", "cut"),
    [
        (0, 10, [10]),
        (90, 30, [10, 20]),
        (100, 50, [50]),
        (20, BLOCK_BYTES + 180, [80, BLOCK_BYTES, 100]),
    ],
)
def test_pieces_of_host_memory_end_where_blocks_end(offset: int, size: int, cut: list[int]) -> None:
    host = HostMemory(pinned=False)
    host.reserve(100)
    host.reserve(BLOCK_BYTES + 300)
    assert [piece.numel() for piece in host.pieces(offset, size)] == cut


def test_a_storage_larger_than_a_block_comes_back_bit_by_bit() -> None:
    tensors = random_tensors(BLOCK_BYTES // 4 - 5, BLOCK_BYTES // 4 + 3, 10)
    originals = [tensor.clone() for tensor in tensors]
    large = StorageSet("large", lambda: tensors, keep=True, device=CPU)
    large.offload()
    assert 0 <= large._host.nbytes - (2 * BLOCK_BYTES + 32) < 2 * ALIGNMENT_BYTES
    large.onload()
    assert all(
        torch.equal(tensor, original) for tensor, original in zip(tensors, originals, strict=True)
    )
    assert large._host.nbytes == 0, "ordinary memory is cheap to take again"


@pytest.mark.parametrize("keep", [True, False])
def test_a_storage_that_cannot_be_given_up_costs_no_other_one_its_content(keep: bool) -> None:
    first, last = random_tensors(100, 50)
    stubborn = torch.from_numpy(np.ones(30))
    originals = [first.clone(), last.clone()]
    mixed = StorageSet("mixed", lambda: [first, stubborn, last], keep, CPU)
    with pytest.raises(RuntimeError, match="not resizable"):
        mixed.offload()
    assert mixed.offloaded and on_device([first]) == 0 and torch.equal(last, originals[1])
    mixed.onload()
    assert not mixed.offloaded and on_device([first, last]) == 600
    assert torch.equal(last, originals[1])
    assert torch.equal(first, originals[0] if keep else torch.zeros(100))


def test_want_of_memory_loses_nothing() -> None:
    code = (
        "import json, tests.distributed.test_tensor_offload as t; "
        "print(json.dumps(t.run_out_of_memory()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    for moment in ("offload", "onload"):
        assert "can't allocate memory" in report[f"error in {moment}"]
        assert report[f"away after {moment} failed"]
        assert report[f"whole after {moment}"]
    assert report["bytes after offload failed"] == 4 * 64 * MIB, "nothing was offloaded"
    assert report["bytes after onload failed"] == 2 * 64 * MIB, "two storages had memory again"


def run_out_of_memory() -> dict[str, object]:
    """Offload four storages of 64 MiB where there is room for two more.

    This needs a fresh process: elsewhere threads of old process groups may end meanwhile and make
    room."""
    tensors = random_tensors(*[16 * MIB] * 4)
    weights = StorageSet("weights", lambda: tensors, keep=True, device=CPU)
    report: dict[str, object] = {}

    def fail(moment: str) -> None:
        with room_for(150 * MIB):
            try:
                getattr(weights, moment)()
            except RuntimeError as error:
                report[f"error in {moment}"] = str(error)
        report[f"away after {moment} failed"] = weights.offloaded
        report[f"bytes after {moment} failed"] = weights.nbytes

    def restore(moment: str) -> None:
        weights.onload()
        originals = random_tensors(*[16 * MIB] * 4)
        whole = all(
            torch.equal(tensor, original)
            for tensor, original in zip(tensors, originals, strict=True)
        )
        report[f"whole after {moment}"] = whole and not weights.offloaded

    fail("offload")
    restore("offload")
    weights.offload()
    fail("onload")
    restore("onload")
    return report


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """This process may take only `size` more bytes of address space."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
