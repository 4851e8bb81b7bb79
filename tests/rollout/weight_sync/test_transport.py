"""Memory that ranks share.

What one writes the others read, nothing stays behind, and where it cannot be shared, all know."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys

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


def share_where_one_rank_may_not(limited: int) -> tuple[bool, int]:
    """Whether this rank got memory, and how many more files are open afterwards.

    The rank `limited` may make no file of more than a page."""
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
        return (
            subprocess.run(in_a_container("true"), capture_output=True, check=False).returncode == 0
        )
    except OSError:
        return False


@pytest.mark.skipif(not can_be_contained(), reason="needs unshare, and user namespaces")
@matrix
def test_ranks_in_containers_of_their_own_share_nothing() -> None:
    """Both are process 1 of their container, with the same files open.

    Neither may take its own for the other's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = in_a_container(sys.executable, "-m", "tests.rollout.weight_sync.test_transport")
    processes = [
        subprocess.Popen(
            program,
            cwd=programs.REPOSITORY,
            env=programs.ENVIRONMENT
            | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
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
    pieces = share_memory(64)
    shared = None
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
