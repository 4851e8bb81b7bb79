"""Patches `FileSystemWriterAsync`'s queue of results, and the reader of `TorchDistLoadShardedStrategy`.

Upstream: megatron-core 0.16.1 to 0.19.2. `filesystem_async._get_write_results_queue` (0.16) starts a manager process
for the queue in which a process that writes answers the rank. `torch._get_filesystem_reader` reads a checkpoint's
`.metadata` with plain pickle.
Why: our writer answers through a connection of its own (`rlmath.checkpoint.writer`), and the rank fills the queue
itself; a file from somebody else must not run code.
Can go: when Megatron-Core takes both as arguments.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any


def patch(reader: Callable[[Any], Any]) -> None:
    """For every device: give writers a queue within their process, and checkpoints the given kind of reader."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

    filesystem_async._get_write_results_queue = queue.Queue
    torch_strategies._get_filesystem_reader = lambda folder, *unused, **unused_too: reader(folder)
