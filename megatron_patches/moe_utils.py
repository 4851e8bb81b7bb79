"""Patches the name `te_general_gemm` of `megatron.core.transformer.moe.moe_utils`.

Upstream: megatron-core 0.16.1 to 0.19.2 asks whether it is None, and defines it only where
Transformer Engine is installed. Why: without Transformer Engine the router raises NameError. Can
go: when Megatron-Core sets it to None in the import that fails.
"""

from __future__ import annotations


def patch() -> None:
    """Let the router multiply with torch where there is no Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
