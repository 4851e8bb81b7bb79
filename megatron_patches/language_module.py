"""Patches `LanguageModule.setup_embeddings_and_output_layer`.

Upstream: megatron-core 0.16.1 to 0.19.2 moves a tied embedding to the GPU with `weight.data.cuda()`
before its two copies, on the first and the last pipeline stage, are made equal. Why: on CPU the
call raises, so that tied embeddings could not be trained with pipeline parallelism. Can go: when
Megatron-Core uses the parameter's own device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def _stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


def patch() -> None:
    """Let tied embeddings stay on the CPU while they are set up."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    set_up = LanguageModule.setup_embeddings_and_output_layer

    @functools.wraps(set_up)
    def on_cpu(self: Any) -> None:
        torch.Tensor.cuda = _stay
        try:
            set_up(self)
        finally:
            del torch.Tensor.cuda  # what it hid is inherited

    LanguageModule.setup_embeddings_and_output_layer = on_cpu
