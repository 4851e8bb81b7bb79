"""What the ranks do in the tests of LoRA's checkpoints and folders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlmath.algorithms.types import Sample
from rlmath.checkpoint.hf.headers import model_fingerprint
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from tests.distributed.policy_cases import LORA_ALPHA, LORA_RANK, Case, build, whole_tensors
from tests.distributed.store_cases import learn, open_store, progress

TOKENS = tuple(range(3, 19))


@dataclass(frozen=True)
class Trained:
    """A policy with adapters that has learned."""

    merged: dict[str, Tensor]
    adapters: dict[str, Tensor]


def save(model: Path, case: Case, samples: list[Sample], root: Path) -> Trained:
    """Two updates and a checkpoint, as a run makes it."""
    stage = build(model, case)
    for _ in range(2):
        learn(stage, samples)
    settings = (
        f"run: {{output_dir: out}}\nmodel: {{path: {model}}}\ndata: {{train_path: none}}\n"
        f"lora: {{rank: {LORA_RANK}, alpha: {LORA_ALPHA}, target: {case.lora}}}\n"
    )
    store = open_store(stage, root)
    store._metadata_files = read_metadata_files(model)
    done = replace(
        progress(2, 2, stage.mesh.world_size), model_fingerprint=model_fingerprint(model)
    )
    try:
        refused = store.start(done, True, settings)
        assert refused is None, refused
        assert not isinstance(store.finish(), str)
    finally:
        store.close()
    return Trained(whole_tensors(stage), whole_tensors(stage, adapters_alone=True))


def logits(model: Path, adapter: Path | None = None) -> Tensor:
    """Logits of TOKENS by transformers, or by PEFT where there is an adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        network = PeftModel.from_pretrained(network, str(adapter))
    with torch.no_grad():
        return network(torch.tensor([TOKENS])).logits
