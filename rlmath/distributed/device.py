"""Differences between CPU and GPU: process-group backend, number format, placement, memory."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from rlmath.config.schema import Config
from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.device_kind import (
    DeviceKind,
    NumberFormat,
    number_format,
    resolve_kind,
    set_cuda_defaults,
)
from rlmath.distributed.process import never_import
from rlmath.distributed.ranks import environment_rank, environment_world_size

GPU_PACKAGES = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")
"""Packages whose optimizer and norms of gradients Megatron takes, where they can be imported, for
tensors on the CPU, too, which ends in an illegal memory access."""
FULLY_CONNECTED_RANKS = 32
"""Up to so many ranks, gloo connects every rank with every other one at the start, which detects a
dead rank soonest. Beyond, it connects only those that communicate: the full mesh of 512 ranks would
take 520,000 requests and 1.1 GB through the run's one store, and more for every large group."""


@dataclass(frozen=True)
class Device:
    kind: DeviceKind
    torch_device: torch.device
    backend: str
    """Process-group backend as `init_process_group` reads it; both have gloo for plain objects."""
    params_dtype: torch.dtype
    """Number format of parameters and activations."""
    local_layers: bool = True
    """Whether models have Megatron's local layers with our norm and attention.

    Else they have Transformer Engine's."""
    head_dtype: torch.dtype | None = None
    """Number format of logits, and of the engine's; None: `params_dtype`."""


def prepare_imports(kind: DeviceKind) -> None:
    """Call it before Megatron and vLLM are imported.

    On CPU they then import no package for GPUs, and what they mark for `torch.compile`, a few small
    functions, runs as it is: compiling takes longer than it ever saves."""
    if kind == "cpu":
        never_import(GPU_PACKAGES)
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def run_device(config: Config) -> Device:
    """The device of this rank, as the settings of its run have it."""
    policy = config.policy
    return open_device(
        config.run.device, policy.transformer_impl == "local", policy.dtype, policy.head_dtype
    )


def open_device(
    requested: str,
    local_layers: bool = True,
    dtype: NumberFormat | Literal["auto"] = "auto",
    head_dtype: NumberFormat | None = None,
) -> Device:
    """The device of this rank; on GPU it is made torch's current one.

    On CPU the layers of models are always local, and every rank computes with one thread: ranks are
    the parallelism."""
    kind = resolve_kind(requested)
    params_dtype = getattr(torch, number_format(dtype, kind))
    logits = None if head_dtype is None else getattr(torch, head_dtype)
    if kind == "cpu":
        prepare_imports("cpu")
        torch.set_num_threads(1)
        # oneDNN and torch's layer above it each cache the code generated for the last shapes, 1024
        # of them by default. The shapes of packs and batches keep changing: over a hundred steps
        # that is 250 MB, and saves next to nothing.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
        _keep_freed_memory()
        return Device("cpu", torch.device("cpu"), "gloo", params_dtype, head_dtype=logits)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"this rank is number {local_rank} of its node, which has {torch.cuda.device_count()} "
            "GPUs; "
            "start at most one rank per GPU (torchrun --nproc-per-node)"
        )
    set_cuda_defaults()
    torch.cuda.set_device(local_rank)
    at = torch.device("cuda", local_rank)
    return Device(
        "cuda",
        at,
        "cpu:gloo,cuda:nccl",
        params_dtype=params_dtype,
        local_layers=local_layers,
        head_dtype=logits,
    )


SHARED_GPU = (
    "ranks share a GPU, and rollout.kv_cache_gib (of an evaluation --kv-cache-gib) is null: vLLM "
    "would measure the "
    "memory that is free while the other ranks take theirs. Set it to the size of one rank's KV "
    "cache (GiB)"
)


def gpu_name() -> str:
    """The UUID of this rank's GPU, which no other GPU has."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def ranks_share_gpus() -> bool:
    """GPU: whether two ranks of the process group have the same one.

    A collective."""
    gpus = all_gather_objects(gpu_name())
    return len(set(gpus)) < len(gpus)


def let_gloo_connect_lazily() -> None:
    """Make gloo connect two ranks only when they first communicate, in a run of many ranks.

    Call it before any group is made."""
    if environment_world_size() > FULLY_CONNECTED_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def init_process_group(
    device: Device,
    timeout_seconds: float,
    store: dist.Store | None = None,
    place: tuple[int, int] | None = None,
) -> None:
    """Join the run's process group.

    A collective that waits longer than the timeout ends the rank with an error. `store` is where
    all ranks find each other, by `Rendezvous.group_store`; None: from the launcher's environment.
    `place` is (rank, number of ranks) in a group of some of the run's ranks; None: of all."""
    let_gloo_connect_lazily()
    timeout = timedelta(seconds=timeout_seconds)
    if store is None:
        dist.init_process_group(device.backend, timeout=timeout)
        return
    rank, world_size = place or (environment_rank(), environment_world_size())
    dist.init_process_group(
        device.backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )


def resident_bytes() -> int:
    """Resident memory of this process (bytes)."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def most_resident_bytes() -> int:
    """Most resident memory that this program had (bytes).

    Not `ru_maxrss`, which counts what its starter held, too."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def held_bytes(device: Device) -> int:
    """Bytes that this rank holds: reserved by torch's allocator on GPU, resident on CPU."""
    if device.kind == "cuda":
        return torch.cuda.memory_reserved(device.torch_device)
    return resident_bytes()


def synchronize(device: Device) -> None:
    """Wait until the device has finished all work; on CPU it always has."""
    if device.kind == "cuda":
        torch.cuda.synchronize(device.torch_device)


def finish_computation(device: Device) -> None:
    """Wait until the device has finished this thread's stream.

    Overlapping collectives have streams of their own."""
    if device.kind == "cuda":
        torch.cuda.current_stream(device.torch_device).synchronize()


def device_bytes(device: Device) -> int:
    """Bytes in use on this rank's device: by all programs on GPU, by this process on CPU."""
    if device.kind == "cuda":
        free, total = torch.cuda.mem_get_info(device.torch_device)
        return total - free
    return resident_bytes()


def release_cached(device: Device) -> None:
    """Return to the system what allocators have cached."""
    if device.kind == "cuda":
        torch.cuda.empty_cache()
    else:
        release_freed_memory()


def release_freed_memory() -> None:
    """Return to the system the host memory that this process has freed."""
    if _TRIM is not None:
        _TRIM(0)


def _keep_freed_memory() -> None:
    """Let glibc keep up to 2 GiB of freed memory until `release_cached`.

    Clearing pages that are mapped anew takes a third of the time of a large product. Blocks above
    256 MiB (32 with glibc before 2.35) are still mapped anew."""
    if _MALLOPT is not None:
        _MALLOPT(_M_MMAP_THRESHOLD, 2**28) or _MALLOPT(_M_MMAP_THRESHOLD, 2**25)
        _MALLOPT(_M_TRIM_THRESHOLD, 2**31 - 1)


_TRIM, _MALLOPT = (getattr(ctypes.CDLL(None), name, None) for name in ("malloc_trim", "mallopt"))
"""glibc's; other C libraries have none."""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""glibc's malloc.h."""
