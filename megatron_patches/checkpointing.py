"""Patches the result queue of `FileSystemWriterAsync` and `TorchDistLoadShardedStrategy`'s reader.

Upstream: megatron-core 0.16.1 to 0.19.2. `filesystem_async._get_write_results_queue`, in 0.19
`get_write_results_queue`, starts a manager process for the queue in which a process that writes
answers the rank. `torch._get_filesystem_reader` reads a checkpoint's `.metadata` with plain pickle.
Why: our writer answers through a connection of its own (`rlmath.checkpoint.async_writer`); a file
from an unknown source must not run code. Can go: when Megatron-Core takes both as arguments.
"""

from __future__ import annotations

import inspect
import queue
from collections.abc import Callable
from typing import Any


def patch(reader: Callable[[Any], Any]) -> None:
    """Replace the writers' queue and the reader of checkpoints, on every device.

    Writers use a queue within their process, and checkpoints are read with `reader`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

    for name in ("_get_write_results_queue", "get_write_results_queue"):
        if hasattr(filesystem_async, name):
            setattr(filesystem_async, name, lambda *unused: queue.Queue())
    torch_strategies._get_filesystem_reader = lambda folder, *unused, **unused_too: reader(folder)


def start_save(strategy: Any, state: dict[str, Any], folder: str) -> Any:
    """Megatron's request for an asynchronous save by a strategy.

    0.19 asks by whose writer, and its default needs nvidia-resiliency-ext: here it is Megatron's
    own, as before."""
    by_whom = inspect.signature(strategy.async_save).parameters.get("async_strategy")
    return strategy.async_save(state, folder, *([] if by_whom is None else ["mcore"]))
