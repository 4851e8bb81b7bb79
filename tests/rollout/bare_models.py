"""Models that have parameters alone, for tests of what reads and writes these."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def model_with(shapes: Mapping[str, tuple[int, ...]], filled: float = 0.0) -> torch.nn.Module:
    """A model with parameters of these names and shapes, all of one number."""
    model = torch.nn.Module()
    for name, shape in shapes.items():
        path, _, attribute = name.rpartition(".")
        module = model
        for part in path.split("."):
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(attribute, torch.nn.Parameter(torch.full(shape, filled)))
    return model
