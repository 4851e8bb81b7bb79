"""Patches `FileSystemWriterAsync`'s queue of results, `TorchCommonSaveStrategy.save_common`, and the reader of
`TorchDistLoadShardedStrategy`.

Upstream: megatron-core 0.16.1 to 0.19.2. `filesystem_async._get_write_results_queue` (0.16) starts a manager process
for the queue in which a process that writes answers the rank. `save_common` writes on rank 0 between collectives.
`torch._get_filesystem_reader` reads a checkpoint's `.metadata` with plain pickle.
Why: our writer answers through a connection of its own (`rlmath.checkpoint.async_writer`); a full disk must not leave
the other ranks waiting, so `rlmath.checkpoint.manager` writes the common part where it can return the error; a
file from an unknown source must not run code.
Can go: when Megatron-Core takes all three as arguments.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from typing import Any


def patch(reader: Callable[[Any], Any]) -> None:
    """For every device: writers use a queue within their process, and checkpoints are read with `reader`."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies

    filesystem_async._get_write_results_queue = queue.Queue
    torch_strategies._get_filesystem_reader = lambda folder, *unused, **unused_too: reader(folder)


@contextlib.contextmanager
def common_part_left_out() -> Iterator[None]:
    """Inside, a save does not write what is common to all ranks; the caller does."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    original = TorchCommonSaveStrategy.save_common
    TorchCommonSaveStrategy.save_common = lambda self, common_state_dict, checkpoint_dir: None
    try:
        yield
    finally:
        TorchCommonSaveStrategy.save_common = original
