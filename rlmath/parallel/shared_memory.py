"""Memory that all ranks of one machine see. It has no name in any file system: a killed rank leaves nothing behind."""

from __future__ import annotations

import os
import uuid

import torch

from rlmath.parallel.collectives import gather_objects


def share_memory(size: int) -> list[torch.UntypedStorage] | None:
    """By rank, `size` bytes of it (each may give another number), mapped by every rank. A collective.

    None, on all ranks alike, where that cannot be: ranks on several machines or in several containers, another user, no
    memory left.
    """
    fd, name = -1, f"rlmath-{uuid.uuid4().hex}"
    try:
        fd = os.memfd_create(name)
        os.posix_fallocate(fd, 0, max(size, 1))
        offer = (os.getpid(), fd, name, max(size, 1))
    except OSError:
        offer = None
    offers = gather_objects(offer)
    mapped = _map(offers)
    agreed = all(gather_objects(mapped is not None))
    if fd >= 0:
        os.close(fd)
    return mapped if agreed else None


def _map(offers: list[tuple[int, int, str, int] | None]) -> list[torch.UntypedStorage] | None:
    pieces = []
    for offer in offers:
        if offer is None:
            return None
        pid, fd, name, size = offer
        try:
            # In another container, or on another machine, the same numbers are another process's file, or none.
            path = f"/proc/{pid}/fd/{fd}"
            if not os.readlink(path).startswith(f"/memfd:{name}"):
                return None
            pieces.append(torch.UntypedStorage.from_file(path, shared=True, nbytes=size))
        except (OSError, RuntimeError):
            return None
    return pieces
