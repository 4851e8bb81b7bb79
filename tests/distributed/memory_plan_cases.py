"""What the ranks do in the tests of the memory plan.

They measure the bytes of tensor storages, each counted once.
"""

from __future__ import annotations

import gc
import random
import shutil
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlmath.algorithms.types import Sample
from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.data.packing import MicroBatch, pack
from rlmath.planning.memory_estimate import Target, plan_rank
from tests.distributed.policy_cases import Case, Stage, build

FLOAT32_BYTES = 4
CPU = Target("cpu", "CPU", None, local_layers=True)


@dataclass(frozen=True)
class Layout:
    """A layout, and what of the policy's settings differs."""

    case: Case
    granularity: str | None = None
    method: str | None = None
    recompute_layers: int | None = None
    microbatches: int = 1
    sequence_tokens: int = 256
    """Tokens of every sequence; they divide `Case.max_tokens`."""

    def __str__(self) -> str:
        words = (self.granularity, self.method, self.recompute_layers)
        return "-".join([str(self.case), *(str(word) for word in words if word)])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _objects() -> list[Any]:
    """Everything that the collector knows.

    When an engine starts, vLLM freezes, and so hides, what is there."""
    gc.collect()
    gc.unfreeze()
    return gc.get_objects()


class StorageWatch(TorchDispatchMode):
    """Bytes of the tensor storages that are made while it is on: alive now, and at most.

    Every operation that torch runs passes here, also those of the backward pass; what was there
    before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        # Held, so that no new storage gets the address of an old one.
        self._before = {
            t.untyped_storage()._cdata: t.untyped_storage()
            for t in _objects()
            if isinstance(t, Tensor)
        }
        self._alive: dict[int, weakref.ref] = {}
        self.held = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        return out

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        size = storage.nbytes()
        if key in self._before or key in self._alive:
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.held += size
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int, size: int) -> None:
        del self._alive[key]
        self.held -= size


class SavedActivations:
    """Bytes of the storages that autograd keeps for backward passes.

    The methods are hooks of torch.autograd.graph."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._excluded = {p.untyped_storage()._cdata for p in parameters}
        self._saved: dict[int, tuple[weakref.ref, int]] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._excluded:
            self._saved[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return tensor

    def alive(self) -> int:
        return sum(size for storage, size in self._saved.values() if storage() is not None)


def _build(folder: Path, layout: Layout) -> Stage:
    policy = {
        "recompute_granularity": layout.granularity,
        "recompute_method": layout.method,
        "recompute_num_layers": layout.recompute_layers,
    }
    return build(folder, replace(layout.case, lr=1e-6), **policy)


def _batches(stage: Stage, layout: Layout) -> list[MicroBatch]:
    """Full micro-batches of random tokens."""
    draw = random.Random(0)
    length = layout.sequence_tokens

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, stage.shape.vocab_size) for _ in range(count))

    samples_per_batch = layout.case.max_tokens // length
    samples = [
        Sample(tokens(8), tokens(length - 8), (-7.6,) * (length - 8), draw.uniform(-1, 1))
        for _ in range(samples_per_batch * layout.microbatches)
    ]
    multiple = stage.mesh.tensor if layout.case.sequence else 1
    starts = range(0, len(samples), samples_per_batch)
    return [pack(samples, range(start, start + samples_per_batch), multiple) for start in starts]


def measure_training(folder: Path, layout: Layout) -> dict[str, Any]:
    """Measured and planned bytes of this rank.

    The passes are those of a second step, when Adam's state is there."""
    from rlmath.models.build import build_reference

    stage = _build(folder, layout)
    learner = stage.actor.learner
    batches = _batches(stage, layout)
    assert learner.learn(batches, None, None).discarded is None
    parameters = [p for chunk in stage.actor.chunks for p in chunk.parameters()]
    measured = {
        "parameters": storage_bytes(parameters),
        "gradients": storage_bytes(p.main_grad for p in parameters if p.requires_grad),
        "optimizer": _optimizer_bytes(learner.optimizer, parameters),
        "gather_buffer": _gather_buffer_bytes(),
    }
    with StorageWatch() as watch:
        learner.learn(batches, None, None)
    measured["update_pass"] = watch.peak
    with StorageWatch() as watch:
        learner.forward_backward.logprobs(batches)
    measured["logprobs_pass"] = watch.peak
    if layout.microbatches == 1:
        measured["activations"] = _saved_activations(stage, batches, parameters)
    if stage.config.algorithm.kl_coef:
        other = build_reference(
            stage.config, stage.shape, stage.mesh, stage.device, (1,), stage.actor
        )
        measured["reference"] = storage_bytes(
            p for chunk in other.chunks for p in chunk.parameters()
        )
    shapes = read_run_shapes(stage.config, stage.shape)
    plan = plan_rank(stage.config, shapes, stage.mesh, target=CPU)
    return {
        "measured": measured,
        "phases": {name: dict(parts) for name, parts in plan.phases.items()},
    }


def _optimizer_bytes(optimizer: Any, parameters: list[Tensor]) -> int:
    """State of the optimizer, and its own copies of parameters where it has any."""
    candidates = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        candidates += [p for group in part.optimizer.param_groups for p in group["params"]]
        candidates += [value for state in part.optimizer.state.values() for value in state.values()]
    known = {p.untyped_storage()._cdata for p in parameters}
    tensors = [
        t for t in candidates if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known
    ]
    return storage_bytes(tensors)


def _gather_buffer_bytes() -> int:
    from megatron.core import parallel_state

    return storage_bytes(parallel_state.get_global_memory_buffer().buffer.values())


def _saved_activations(stage: Stage, batches: list[MicroBatch], parameters: list[Tensor]) -> int:
    """Bytes that autograd keeps when the forward pass is over.

    The logits' own results are still to come."""
    saved = SavedActivations(parameters)
    forward_backward = stage.actor.forward_backward
    sizes = []

    def look(
        index: int, batch: MicroBatch, logits_TV: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        sizes.append(saved.alive())
        return logits_TV.sum(), torch.ones((), dtype=torch.int), {}

    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        forward_backward.run(batches, look, forward_only=False)
    forward_backward.zero_grad()
    return max(sizes, default=0)


def make_model(folder: Path, tokenizer_of: Path) -> Path:
    """A model in Hugging Face form, with 4 layers of 3.8 million parameters.

    It is large enough that no part is lost in the others' overheads."""
    import transformers

    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        rope_theta=10000.0,
        eos_token_id=1,
        bos_token_id=2,
        pad_token_id=0,
    )
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder / name)
    return folder
