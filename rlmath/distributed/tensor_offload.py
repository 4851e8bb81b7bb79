"""Offloads tensors from the device and onloads them while every tensor stays the same object.

A tensor is a view of a storage. Freeing the storage's memory and allocating it again later keeps
all views valid: the parameters, what an optimizer or a flat buffer holds of them, and slices of
either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from rlmath.distributed.device import Device, synchronize

Tensors = Callable[[], Iterable[Tensor]]
"""Returns the current tensors: an optimizer creates its state at the first step."""
BLOCK_BYTES = 64 * 2**20
"""Size of one piece of host memory.

Torch may round pinned memory up to a power of two: in pieces of such a size, only the last one
costs more than it holds."""
ALIGNMENT_BYTES = 512
"""Every storage starts at a multiple of this on the host, as on the device.

So copies run at full speed."""


@dataclass(frozen=True)
class OffloadStats:
    """Bytes and seconds of one `offload` or `onload`."""

    name: str
    bytes: int
    """Freed or allocated on the device; copied where the set is kept."""
    seconds: float
    """Wall time with the copies; the first time on GPU, pinning the host memory too."""


@dataclass(frozen=True)
class _HostCopy:
    """An offloaded storage: complete on the host from `offset` on (bytes), or dropped."""

    storage: UntypedStorage
    size: int
    offset: int


class HostMemory:
    """Host memory that grows in blocks and is reused: pinning costs more time than copying."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._blocks: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Reserved now (bytes)."""
        return sum(block.numel() for block in self._blocks)

    def reserve(self, size: int) -> None:
        """Grow to `size` bytes, where it is smaller."""
        while self.nbytes < size:
            missing = min(size - self.nbytes, BLOCK_BYTES)
            self._blocks.append(torch.empty(missing, dtype=torch.uint8, pin_memory=self._pinned))

    def pieces(self, offset: int, size: int) -> Iterator[Tensor]:
        """The bytes from `offset` on, in order, cut where blocks end."""
        for block in self._blocks:
            piece = block[offset : offset + size]
            offset = max(offset - block.numel(), 0)
            size = size - piece.numel()
            if piece.numel():
                yield piece

    def release(self) -> None:
        self._blocks.clear()


class StorageSet:
    """The storages behind some tensors: on the device, or offloaded.

    With `keep` their content is copied to host memory (pinned on GPU, where it stays reserved for
    the next time); without, it is dropped, and `onload` fills them with zeros. Storages behind the
    tensors of `exclude` belong to other sets, and those on another device are not touched.

    The memory returns to torch's allocator (`torch.cuda.empty_cache` returns it to the device).
    After an error in `offload` or `onload`, such as want of memory, each storage is complete on the
    device or on the host, and `onload` may be called as often as needed.
    """

    def __init__(
        self, name: str, tensors: Tensors, keep: bool, device: Device, exclude: Tensors = tuple
    ) -> None:
        self.name = name
        self._keep = keep
        self._device = device
        self._tensors = tensors
        self._exclude = exclude
        self._host = HostMemory(pinned=device.kind == "cuda")
        self._copies: list[_HostCopy] = []
        self._offloaded = False

    @property
    def offloaded(self) -> bool:
        """Whether the set is offloaded.

        It is from the start of `offload`, even one that fails, to the end of an `onload` that
        succeeds."""
        return self._offloaded

    @property
    def nbytes(self) -> int:
        """Bytes that the set holds on the device now."""
        return sum(storage.nbytes() for storage in self._storages())

    @property
    def freed_bytes(self) -> int:
        """Bytes that offloading would free.

        On CPU these are none if the content is kept, as that is in the same memory."""
        return 0 if self._keep and self._device.kind == "cpu" else self.nbytes

    def offload(self) -> OffloadStats:
        """Copy the content to the host where it is kept, and free the storages' memory."""
        assert not self._offloaded, f"{self.name} is offloaded already"
        self._offloaded = True
        start = self._finish_device_work()
        copies = self._host_layout()
        if self._keep:
            self._host.reserve(copies[-1].offset + copies[-1].size if copies else 0)
            for copy in copies:
                for device_part, host_part in self._paired(copy):
                    host_part.copy_(device_part, non_blocking=True)
            self._finish_device_work()
        for copy in copies:
            self._copies.append(copy)
            copy.storage.resize_(0)
        return OffloadStats(
            self.name, sum(copy.size for copy in copies), time.perf_counter() - start
        )

    def onload(self) -> OffloadStats:
        """Allocate the memory again and fill it with the content, or with zeros."""
        assert self._offloaded, f"{self.name} is not offloaded"
        start = self._finish_device_work()
        for copy in self._copies:
            if copy.storage.nbytes() != copy.size:
                copy.storage.resize_(copy.size)
            if self._keep:
                for device_part, host_part in self._paired(copy):
                    device_part.copy_(host_part, non_blocking=True)
            else:
                _bytes_of(copy.storage).zero_()
        end = self._finish_device_work()
        stats = OffloadStats(self.name, sum(copy.size for copy in self._copies), end - start)
        self._copies.clear()
        self._offloaded = False
        if self._device.kind == "cpu":
            self._host.release()
        return stats

    def _storages(self) -> list[UntypedStorage]:
        excluded = {tensor.untyped_storage()._cdata for tensor in self._exclude()}
        storages = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self._tensors()
        }
        place = self._device.torch_device
        return [
            storage
            for key, storage in storages.items()
            if key not in excluded and storage.device == place
        ]

    def _host_layout(self) -> list[_HostCopy]:
        """The storages, one behind the other in host memory."""
        layout = []
        offset = 0
        for storage in self._storages():
            layout.append(_HostCopy(storage, storage.nbytes(), offset))
            offset += -(-storage.nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return layout

    def _paired(self, copy: _HostCopy) -> Iterator[tuple[Tensor, Tensor]]:
        """Pieces of a storage, each with its place on the host."""
        content = _bytes_of(copy.storage)
        start = 0
        for piece in self._host.pieces(copy.offset, copy.size):
            yield content[start : start + piece.numel()], piece
            start += piece.numel()

    def _finish_device_work(self) -> float:
        """Wait for everything that was started on the device; returns the time then (seconds)."""
        synchronize(self._device)
        return time.perf_counter()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
