import os
import subprocess
import sys

import pytest
import torch

from rlmath.distributed.device import held_bytes, open_device, release_cached, resident_bytes
from rlmath.distributed.device_kind import resolve_kind


@pytest.mark.parametrize(("there", "kind"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch, there: bool, kind: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert resolve_kind("auto") == kind


def test_the_cpu_computes_in_float32_with_one_thread_over_gloo():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        device = open_device("cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert (device.kind, device.backend, device.params_dtype) == ("cpu", "gloo", torch.float32)
    assert device.torch_device == torch.device("cpu")


def test_resident_memory_sees_what_is_taken():
    release_cached(open_device("cpu"))
    before = resident_bytes()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert resident_bytes() - before > 48 * 2**20
    assert held_bytes(open_device("cpu")) > block.nbytes


KEEPS = """
import torch
from rlmath.distributed.device import open_device, release_cached, resident_bytes

device, held = open_device("cpu"), []
for size in (64, 48):
    before = resident_bytes()
    block = torch.ones(size * 2**20, dtype=torch.uint8)
    del block
    held.append(resident_bytes() - before)
release_cached(device)
print(*held, resident_bytes() - before)
"""


def test_freed_memory_is_kept_until_it_is_released():
    """The program has a process of its own, which has freed nothing yet."""
    ran = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, check=True)
    first, reused, released = (int(word) / 2**20 for word in ran.stdout.split())
    assert first > 48 and abs(reused) < 16, "used again"
    assert released < -48


def test_the_most_memory_is_this_programs_own():
    """A large parent does not count; `ru_maxrss` of the child would have it."""
    block = bytearray(os.urandom(1)) * 600_000_000
    code = (
        "from rlmath.distributed import device as d; print(d.most_resident_bytes(), "
        "d.resident_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    most, resident = map(int, done.stdout.split())
    assert resident * 0.9 < most < resident + 200_000_000 and len(block) == 600_000_000
