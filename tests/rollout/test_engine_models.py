"""The classes of vLLM's, and ours, that engines sample with."""

from __future__ import annotations

import pytest
from vllm import ModelRegistry
from vllm.model_executor.models.interfaces import supports_lora

from rlmath.checkpoint.hf.weight_map import TABLES
from rlmath.rollout import engine_models


@pytest.mark.parametrize("architecture", TABLES)
def test_every_architecture_takes_adapters(architecture: str) -> None:
    own_class = getattr(engine_models, architecture, None)
    registered = ModelRegistry.models.get(architecture)
    assert supports_lora(own_class or registered.load_model_cls())
