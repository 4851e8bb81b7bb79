"""Memory that ranks share: what one writes the others read, nothing stays behind, and where it cannot be, all know."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from rlmath.distributed.device import init_process_group, open_device
from tests import programs
from tests.distributed.rank_pool import RankPool
from tests.selection import matrix

pytestmark = pytest.mark.distributed

PID_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def write_and_read(sizes: list[int]) -> dict[str, Any]:
    """Every rank fills its own piece with its number; what each then finds in all pieces, and what stays open."""
    import torch.distributed as dist

    from rlmath.rollout.weight_sync.transport import share_memory

    init_process_group(open_device("cpu"), 60.0)
    rank, before, named = dist.get_rank(), open_files(), set(os.listdir("/dev/shm"))
    pieces = share_memory(sizes[rank])
    assert pieces is not None
    tensors = [torch.empty(0, dtype=torch.uint8).set_(piece) for piece in pieces]
    tensors[rank].fill_(rank + 1)
    dist.barrier()
    found = [(tensor.numel(), tensor.unique().tolist()) for tensor in tensors]
    dist.barrier()
    return {
        "found": found,
        "opened": open_files() - before,
        "named": sorted(set(os.listdir("/dev/shm")) - named),
    }


@pytest.mark.full
def test_every_rank_sees_what_each_has_written(ranks: RankPool) -> None:
    for report in ranks.run(2, write_and_read, [5000, 100_000]):
        assert report["found"] == [(5000, [1]), (100_000, [2])]
        assert report["opened"] == 0 and report["named"] == []


@pytest.mark.full
def test_nothing_to_share_is_no_error(ranks: RankPool) -> None:
    for report in ranks.run(2, write_and_read, [0, 10]):
        assert report["found"][1] == (10, [2])


def share_twice() -> list[list[int]]:
    """Two shares at once are two memories."""
    import torch.distributed as dist

    from rlmath.rollout.weight_sync.transport import share_memory

    init_process_group(open_device("cpu"), 60.0)
    both = [share_memory(64) for _ in range(2)]
    tensors = [[torch.empty(0, dtype=torch.uint8).set_(piece) for piece in pieces or ()] for pieces in both]
    for number, pieces in enumerate(tensors):
        pieces[dist.get_rank()].fill_(10 * (number + 1) + dist.get_rank())
    dist.barrier()
    found = [[int(piece[-1]) for piece in pieces] for pieces in tensors]
    dist.barrier()
    return found


@pytest.mark.full
def test_two_shares_do_not_meet(ranks: RankPool) -> None:
    assert ranks.run(2, share_twice) == [[[10, 11], [20, 21]]] * 2


def share_where_one_rank_may_not(limited: int) -> tuple[bool, int]:
    """Whether this rank got memory, where one may make no file of more than a page; and what stays open."""
    import torch.distributed as dist

    from rlmath.rollout.weight_sync.transport import share_memory

    init_process_group(open_device("cpu"), 60.0)
    before, (soft, hard) = open_files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        return share_memory(100_000) is not None, open_files() - before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@matrix
@pytest.mark.parametrize("limited", [0, 1])
def test_one_rank_without_memory_to_share_means_none_for_all(ranks: RankPool, limited: int) -> None:
    assert ranks.run(2, share_where_one_rank_may_not, limited) == [(False, 0)] * 2


SAME_NUMBER = 200
"""Files that every contained rank has open, so that the next one has the same number in all."""


def in_a_container(*command: str) -> list[str]:
    return [*PID_NAMESPACE, *command]


def can_be_contained() -> bool:
    try:
        return subprocess.run(in_a_container("true"), capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_be_contained(), reason="needs unshare, and user namespaces")
@matrix
def test_ranks_in_containers_of_their_own_share_nothing() -> None:
    """Both are process 1 of their container, with the same files open: neither may take its own for the other's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = in_a_container(sys.executable, "-m", "tests.rollout.weight_sync.test_transport")
    started = [
        subprocess.Popen(
            program,
            cwd=programs.REPOSITORY,
            env=programs.ENVIRONMENT
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    for out, _ in outputs:
        report = json.loads(out.splitlines()[-1])
        assert report == {"pid": 1, "shared": None}


def main() -> None:
    """One contained rank: what it finds in the other's memory, None where it has none."""
    import torch.distributed as dist

    from rlmath.rollout.weight_sync.transport import share_memory

    init_process_group(open_device("cpu"), 60.0)
    while os.dup(0) < SAME_NUMBER:
        pass
    pieces, shared = share_memory(64), None
    if pieces is not None:
        tensors = [torch.empty(0, dtype=torch.uint8).set_(piece) for piece in pieces]
        tensors[dist.get_rank()].fill_(dist.get_rank() + 1)
        dist.barrier()
        shared = [int(tensor[0]) for tensor in tensors]
        dist.barrier()
    print(json.dumps({"pid": os.getpid(), "shared": shared}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
