"""Changes of Megatron-Core that let it run on CPU under gloo.

Some are for GPU, too: to write checkpoints (`checkpointing`), to send hidden states between
pipeline stages (`p2p_shapes`), to end the graphs of experts (`token_dispatcher`) and to start fewer
kernels (`multi_tensor`).

Covers megatron-core 0.16.1 and 0.19.2. torch itself stays untouched: vLLM lives in the same
process.
"""

from __future__ import annotations

_applied: set[str] = set()
"""Kinds of devices."""


def apply(device_kind: str) -> None:
    """Patch the loaded Megatron modules for "cpu" or "cuda".

    Safe to call more than once.

    Call it after the Megatron modules that are used were imported, and before anything of them is
    called.
    """
    if device_kind in _applied:
        return
    from megatron_patches import multi_tensor, token_dispatcher

    if not _applied:
        token_dispatcher.drop_graphs()
    _applied.add(device_kind)
    if device_kind != "cpu":
        multi_tensor.patch()
        return
    from megatron_patches import (
        clip_grads,
        language_module,
        linear,
        moe_utils,
        optimizer,
        tensor_parallel_random,
        torch_names,
    )

    torch_names.patch_loaded_modules()
    tensor_parallel_random.patch()
    optimizer.patch()
    clip_grads.patch()
    linear.patch()
    language_module.patch()
    moe_utils.patch()
    token_dispatcher.patch()
