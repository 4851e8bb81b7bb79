"""The process that writes a rank's part of a checkpoint while the rank continues training.

It is started as a program of its own, never forked: a rank holds process groups, engines and
perhaps CUDA, which a fork would copy. The rank copies its tensors into anonymous shared memory and
passes that on; the process writes, syncs the files to disk and returns checksums of what they then
hold.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from rlmath.checkpoint.directory import FileEntry, file_entry, write_error_text
from rlmath.distributed.device import release_freed_memory
from rlmath.distributed.fault_tolerance.preemption import SIGNALS
from rlmath.distributed.memory import available_bytes
from rlmath.distributed.process import end_with_parent, freeze_live_objects
from rlmath.distributed.ranks import local_world_size

_ALIGNMENT = 64
_PROGRAM = "import gc; gc.disable(); from rlmath.checkpoint.async_writer import main; main()"


@dataclass(frozen=True)
class Staged:
    """A tensor in the shared memory."""

    item: Any
    """torch's `WriteItem`: which part of which global tensor it is."""
    offset: int
    """Bytes."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class FileToWrite:
    """One file, by its path and its name in the checkpoint."""

    path: str
    key: str
    objects: list[tuple[Any, bytes]]
    tensors: list[Staged]


@dataclass(frozen=True)
class Written:
    """The result of a job: torch's `WriteResult` of every item, and the files; or an error."""

    results: list[Any]
    files: dict[str, FileEntry]
    error: str | None


def lacks_memory(buckets: Sequence[Any]) -> str | None:
    """Why this machine lacks memory for copies as large as this one's.

    Call it on all ranks before any copies."""
    release_freed_memory()
    size, _ = _lay_out(buckets)
    ranks = local_world_size() or 1
    if size * ranks <= available_bytes():
        return None
    return f"no memory for copies of {size / 2**30:.2f} GiB that {ranks} ranks of this machine save"


class WriterProcess:
    """The rank's end of the connection.

    One job at a time."""

    def __init__(self) -> None:
        rank_socket, writer_socket = socket.socketpair()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)
        }
        environment |= {
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with writer_socket, _blocked_stop_signals():
            # -P: a file of the current folder is no module
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    _PROGRAM,
                    str(writer_socket.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[writer_socket.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = Connection(rank_socket.detach())

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def submit(self, buckets: Sequence[Any]) -> None:
        """Copy what Megatron's writer wants written, and pass it on.

        The tensors may change as soon as this returns. OSError where the process does not accept
        it. Call `lacks_memory` before."""
        size, jobs = _lay_out(buckets)
        memory = os.memfd_create("rlmath-checkpoint")
        try:
            os.posix_fallocate(memory, 0, max(size, 1))
            _copy(buckets, jobs, memory)
            reduction.send_handle(self._connection, memory, self._process.pid)
            self._connection.send(jobs)
        finally:
            os.close(memory)

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether the result is there, or the process has ended."""
        return self._connection.poll(timeout)

    def result(self, waiting: Callable[[], None]) -> Written:
        """The result of the last job.

        Waits for it, and calls `waiting` while the process advances."""
        try:
            progress = self._done()
            while not self.ready(timeout=1.0):
                earlier_progress = progress
                progress = self._done()
                if progress != earlier_progress:
                    waiting()
            return self._connection.recv()
        except (EOFError, OSError) as error:
            return Written([], {}, f"the process that writes has ended ({type(error).__name__})")

    def _done(self) -> tuple[float, ...]:
        """Numbers that grow as long as the process computes or writes."""
        try:
            process = psutil.Process(self._process.pid)
            times = process.cpu_times()
            return times.user, times.system, float(process.io_counters().write_bytes)
        except psutil.Error:
            return ()

    def close(self) -> None:
        """End the process; a job in progress is aborted."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def _blocked_stop_signals() -> Iterator[None]:
    """Block the signals that ask a run to save and stop in processes that are started meanwhile.

    A process inherits the mask, so it never receives them, from its first moment. Slurm sends them
    to every process of a job step, and the rank needs its writer to save."""
    earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)


def _lay_out(buckets: Sequence[Any]) -> tuple[int, list[FileToWrite]]:
    """The number of bytes of all tensors, and the jobs with each tensor's offset."""
    offset = 0
    jobs = []
    for path, key, (objects, tensors) in buckets:
        staged = []
        for write_item, tensor in tensors:
            staged.append(Staged(write_item, offset, tuple(tensor.shape), tensor.dtype))
            offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        jobs.append(
            FileToWrite(
                str(path),
                key,
                [(write_item, buffer.getvalue()) for write_item, buffer in objects],
                tensors=staged,
            )
        )
    return offset, jobs


@torch.no_grad()
def _copy(buckets: Sequence[Any], jobs: Sequence[FileToWrite], memory: int) -> None:
    with mmap.mmap(memory, 0) as mapped:  # all of it
        for (_, _, (_, tensors)), job in zip(buckets, jobs, strict=True):
            for (_, tensor), staged in zip(tensors, job.tensors, strict=True):
                _view(mapped, staged).copy_(tensor)


def _view(mapped: mmap.mmap, staged: Staged) -> Tensor:
    count = math.prod(staged.shape)
    if count == 0:
        return torch.empty(staged.shape, dtype=staged.dtype)
    return torch.frombuffer(mapped, dtype=staged.dtype, count=count, offset=staged.offset).view(
        staged.shape
    )


# ---------------------------------------------------------------- the process


def main() -> None:
    """Write job after job, until the rank ends."""
    descriptor = int(sys.argv[1])
    parent = int(sys.argv[2])
    end_with_parent(parent)
    os.nice(10)
    torch.set_num_threads(1)
    freeze_live_objects()
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError, OSError):
        while True:
            memory = reduction.recv_handle(connection)
            connection.send(_write(connection.recv(), memory))


def _write(jobs: Sequence[FileToWrite], memory: int) -> Written:
    """Write the files from the shared memory; an error of any kind is in the result."""
    path = Path(jobs[0].path)
    try:
        # A private mapping: torch wants a buffer that it may write to.
        mapped = mmap.mmap(memory, 0, flags=mmap.MAP_PRIVATE)
        os.close(memory)
        results = []
        for job in jobs:
            path = Path(job.path)
            results += _write_file(job, mapped)
        return Written(results, {job.key: file_entry(Path(job.path)) for job in jobs}, None)
    except Exception as error:  # of any kind: the rank reports it
        return Written([], {}, write_error_text(error, path))


def _write_file(job: FileToWrite, mapped: mmap.mmap) -> list[Any]:
    """Write a file as Megatron's `FileSystemWriterAsync.write_preloaded_data` does.

    Megatron is not imported: that would take most of the time that this process needs to start."""
    # torch's, and as unstable as the name says; Megatron calls it as well.
    from torch.distributed.checkpoint import filesystem

    transforms = filesystem._StorageWriterTransforms()
    form = filesystem.SerializationFormat.TORCH_SAVE
    results = []
    with open(job.path, "wb") as stream:
        for write_item, content in job.objects:
            results.append(
                filesystem._write_item(
                    transforms,
                    stream,
                    io.BytesIO(content),
                    write_item=write_item,
                    storage_key=job.key,
                    serialization_format=form,
                )
            )
        for staged in job.tensors:
            view = _view(mapped, staged)
            results.append(
                filesystem._write_item(
                    transforms,
                    stream,
                    view,
                    write_item=staged.item,
                    storage_key=job.key,
                    serialization_format=form,
                )
            )
        stream.flush()
        os.fsync(stream.fileno())
    return results
