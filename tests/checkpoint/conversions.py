"""Helpers of the converters' tests."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlmath.checkpoint.convert.convert import hf_to_megatron, megatron_to_hf
from rlmath.checkpoint.convert.sources import find_megatron
from rlmath.checkpoint.convert.torch_dist_io import StateWriter
from rlmath.checkpoint.convert.torch_dist_keys import stored_adapters
from rlmath.checkpoint.hf.headers import model_fingerprint
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.checkpoint.hf.weight_map import adapter_rules
from rlmath.checkpoint.hf.weights import HFReader
from tests.tiny_models import shape_of

LARGE = 4 * 2**30
QKV = "decoder.layers.self_attention.linear_qkv.weight"
EMBEDDING = "embedding.word_embeddings.weight"
RANK = 3
ALPHA = 6.0


def to_megatron(
    source: Path, output: Path, tensor: int = 1, pipeline: int = 1, dtype: Any = None
) -> Path:
    """The torch_dist folder of a conversion."""
    hf_to_megatron(source, shape_of(source), output, tensor, pipeline, dtype)
    return find_megatron(output).state


def to_hf(
    state: Path, model: Path, output: Path, dtype: Any = None, shard_bytes: int = LARGE
) -> Path:
    megatron_to_hf(state, shape_of(model), read_metadata_files(model), output, dtype, shard_bytes)
    return output


def torch_reads(state: Path) -> dict[str, Tensor]:
    """Every tensor of a torch_dist folder, whole, as torch itself puts it together."""
    entries = FileSystemReader(state).read_metadata().state_dict_metadata
    into = {
        key: torch.full(metadata.size, 99.0, dtype=metadata.properties.dtype)
        for key, metadata in entries.items()
        if isinstance(metadata, TensorStorageMetadata)
    }
    dcp.load(into, checkpoint_id=state, no_dist=True)
    return into


def weights(folder: Path) -> dict[str, Tensor]:
    reader = HFReader(folder)
    return {name: reader.tensor(name) for name in reader.files}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def resave(state: Path, folder: Path, change: Any) -> Path:
    """The tensors of a checkpoint, changed, as torch saves them."""
    tensors = torch_reads(state)
    change(tensors)
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    return folder


def drop(key: str) -> Any:
    return lambda tensors: tensors.pop(key)


def put(key: str, *size: int) -> Any:
    return lambda tensors: tensors.update({key: torch.zeros(size)})


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def write_index(folder: Path, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    index_bytes = content if isinstance(content, bytes) else pickle.dumps(content)
    (folder / ".metadata").write_bytes(index_bytes)
    return folder


def in_bfloat16(model: Path, folder: Path) -> Path:
    """A copy of a model with its numbers in bfloat16."""
    shutil.copytree(model, folder)
    tensors = {name: tensor.bfloat16() for name, tensor in weights(model).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def lora_checkpoint(base: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The torch_dist folder of a LoRA run's checkpoint in `folder`, with small random adapters."""
    shape = shape_of(base)
    state = folder / "state"
    state.mkdir(parents=True)
    writer = StateWriter(state)
    generator = torch.Generator().manual_seed(8)
    for stored in stored_adapters(shape, adapter_rules(shape.architecture, RANK, "all")):
        size = 1e-4 if stored.keys[0].endswith("B") else 0.1
        part = (torch.randn(stored.shape, generator=generator) * size).to(dtype)
        writer.add(0, stored.keys[0], [0] * part.dim(), global_shape=stored.global_shape, part=part)
    writer.close()
    settings = f"{{run: {{output_dir: out}}, model: {{path: {base}}}, data: {{train_path: none}}, "
    settings += f"lora: {{rank: {RANK}, alpha: {ALPHA}}}}}\n"
    (folder / "config.yaml").write_text(settings)
    shutil.copytree(base, folder / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    numbers = dict.fromkeys("step epoch position updates syncs world_size".split(), 1)
    words = dict.fromkeys(["layout", "data_fingerprint"], "")
    lists = {"optimizer_tensors": [], "random_states": [], "versions": {}}
    progress = numbers | words | lists | {"model_fingerprint": model_fingerprint(base)}
    (folder / "progress.json").write_text(json.dumps(progress))
    return state
