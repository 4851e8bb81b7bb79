"""What the ranks do in the tests of the converters.

Megatron loads what was converted, and saves what is to be converted.
"""

from __future__ import annotations

from multiprocessing import current_process
from pathlib import Path
from unittest import mock

import torch

from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from tests.distributed.policy_cases import Case, build
from tests.distributed.store_cases import SETTINGS, open_store, progress


def differing(model: Path, state: Path, case: Case) -> tuple[int, list[str]]:
    """Let Megatron itself load a converted checkpoint into a model that was emptied.

    Returns how many parameters this rank has, and those that then differ from what
    `load_hf_weights` gave."""
    from megatron.core import dist_checkpointing

    count = 0
    differ = []
    for chunk in build(model, case).actor.chunks:
        weights = {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}
        for parameter in chunk.parameters():
            parameter.data.fill_(99.0)
        loaded = dist_checkpointing.load(
            chunk.sharded_state_dict(),
            str(state),
            validate_access_integrity=case.virtual_pipeline == 1,
        )
        count += len(weights)
        differ += [
            name for name, weight in weights.items() if not torch.equal(loaded[name], weight)
        ]
    return count, differ


def save_plainly(model: Path, folder: Path, case: Case) -> None:
    """A checkpoint of the model alone, by Megatron's `save`.

    It asks for the GPU in places that ours does not reach, and starts processes, which those of a
    rank pool may not."""
    from megatron.core import dist_checkpointing

    chunks = build(model, case).actor.chunks
    states = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}
    folder.mkdir(exist_ok=True)
    with (
        mock.patch.object(torch.cuda, "synchronize", return_value=None),
        mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
        mock.patch.dict(current_process()._config, daemon=False),  # type: ignore[attr-defined]
    ):
        try:
            dist_checkpointing.save(states, str(folder))
        finally:
            _end_manager()


def _end_manager() -> None:
    """End the process that Megatron's `save` starts for a queue.

    Megatron keeps it as long as this process lives: it would outlive a rank that is killed."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue, filesystem_async._results_queue = filesystem_async._results_queue, None
    if queue is not None:
        queue._manager.shutdown()


def save_ours(model: Path, root: Path, case: Case) -> None:
    """A checkpoint of ours, with the optimizer's state and the random states."""
    stage = build(model, case)
    store = open_store(stage, root)
    store._metadata_files = read_metadata_files(model)
    try:
        failed = store.start(progress(1, 0, stage.mesh.world_size), True, SETTINGS)
        assert failed is None, failed
        saved = store.finish()
        assert not isinstance(saved, str), saved
    finally:
        store.close()
