"""Plain objects on every rank, whatever their sizes.

Groups connect ranks when they talk.
"""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlmath.distributed.collectives import gathered_bytes
from rlmath.distributed.device import FULLY_CONNECTED_RANKS, Device, init_process_group, open_device


def test_no_rank_sends_more_than_twice_what_there_is() -> None:
    for sizes in ([10] * 8, [10_000, *[4] * 511], [*range(1, 513)], [7]):
        _, sent = gathered_bytes(sizes)
        assert sum(sizes) <= sent <= 2 * sum(sizes)
    # Parts of one size are gathered as they are: a sum would send them twice.
    assert gathered_bytes([10] * 8) == (False, 80)
    assert gathered_bytes([10_000, *[4] * 511]) == (True, 2 * (10_000 + 4 * 511))


@pytest.mark.parametrize(("world_size", "told"), [(FULLY_CONNECTED_RANKS, None), (512, "1")])
def test_many_ranks_connect_when_needed(
    world_size: int, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "TORCH_GLOO_LAZY_INIT", ""
    )  # taken back after the test, whatever becomes of it
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    monkeypatch.setenv("RANK", "3")
    cpu = open_device("cpu")
    init_process_group(Device("cpu", cpu.torch_device, "fake", cpu.params_dtype), 60, FakeStore())
    try:
        assert dist.get_world_size() == world_size
        assert os.environ.get("TORCH_GLOO_LAZY_INIT") == told
    finally:
        dist.destroy_process_group()
