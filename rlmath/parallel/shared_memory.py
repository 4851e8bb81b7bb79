"""Memory that all ranks of one machine see. It has no name in any file system: a killed rank leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from rlmath.parallel.collectives import gather_objects

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def share_memory(size: int) -> list[torch.UntypedStorage] | None:
    """By rank, `size` bytes of it (each may give another number), mapped by every rank. A collective.

    None, on all ranks alike, where that cannot be: ranks on several machines or in several containers, another user, no
    memory left.
    """
    fd = -1
    try:
        fd = os.memfd_create("rlmath")
        os.posix_fallocate(fd, 0, max(size, 1))
        offer = (_machine(), os.getpid(), fd, max(size, 1))
    except OSError:
        offer = None
    offers = gather_objects(offer)
    mapped = _map(offers)
    agreed = all(gather_objects(mapped is not None))
    if fd >= 0:
        os.close(fd)
    return mapped if agreed else None


def _machine() -> str:
    return _BOOT.read_text(encoding="ascii").strip()


def _map(offers: list[tuple[str, int, int, int] | None]) -> list[torch.UntypedStorage] | None:
    mine = offers[dist.get_rank()]
    pieces = []
    for offer in offers:
        if mine is None or offer is None or offer[0] != mine[0]:
            return None
        _, pid, fd, size = offer
        try:
            path = f"/proc/{pid}/fd/{fd}"
            if not Path(path).readlink().name.startswith("memfd:rlmath"):
                return None
            pieces.append(torch.UntypedStorage.from_file(path, shared=True, nbytes=size))
        except (OSError, RuntimeError):
            return None
    return pieces
