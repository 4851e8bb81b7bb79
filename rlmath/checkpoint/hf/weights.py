"""Hugging Face weights: loaded into a sharded Megatron model, streamed from it, and written.

Every direction passes tensor by tensor, by the rules of `weight_map`: at most one tensor is whole
at a time. The writer writes each as it comes, block by block, and the header last, into space
reserved at the start of the file: its memory is one block (safetensors' own `save_file` needs all
tensors of a file at once).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlmath.checkpoint.directory import PARTIAL, remove, set_aside
from rlmath.checkpoint.hf import weight_map
from rlmath.checkpoint.hf.headers import (
    ADAPTER_FILE,
    FORMATS,
    NEEDED_FORMATS,
    SINGLE_FILE,
    TensorFormats,
    read_header,
    unexpected_tensors,
    weight_files,
)
from rlmath.checkpoint.hf.lora_merge import kept_share, merged_dtype
from rlmath.checkpoint.hf.weight_map import (
    Placed,
    Rule,
    canonical_shape,
    placed_tensors,
)
from rlmath.config.files import require_regular
from rlmath.config.model_shape import ModelShape
from rlmath.distributed.collectives import all_gather_objects
from rlmath.distributed.mesh import Mesh

SHARD_BYTES = 4 * 2**30
"""Most bytes of one exported safetensors file."""
HEADER_BYTES = 2**18
"""Space for the header of one file, some 2,000 tensors; then the next file begins.

Spaces pad the header, as is allowed."""
DTYPE_NAMES: dict[torch.dtype, str] = {
    getattr(torch, dtype): name for name, dtype in FORMATS.items()
}
"""Names of number formats in safetensors headers."""
logger = logging.getLogger(__name__)

_MOST_SHOWN = 5
"""Tensors named in an error."""
_BLOCK = 2**22
"""Elements converted and written at a time."""


# ---------------------------------------------------------------- reading a folder


class HFReader:
    """Random access to the tensors of a Hugging Face folder.

    It has one safetensors file of this name, or an index."""

    def __init__(self, folder: str | Path, name: str = SINGLE_FILE) -> None:
        self.folder = Path(folder)
        promised, problems = weight_files(self.folder, name)
        if problems:
            raise ValueError(problems[0])
        self.files = {
            name: file.name
            for file, names in promised.items()
            for name in names or read_header(file)
        }
        """The file of every tensor, by the tensor's name."""

    def tensor(self, name: str) -> Tensor:
        """One tensor, read from disk now.

        ValueError where it is not there or has no floating-point numbers."""
        path = self.folder / self.files[name]
        require_regular(path)
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{name} cannot be read from {path} ({error})") from error
        if tensor.dtype not in DTYPE_NAMES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{name} in {path} has numbers in {kind}; {NEEDED_FORMATS}")
        return tensor


def all_finite(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Whether a tensor has neither NaN nor infinity, also when rounded to `dtype`.

    The result is one bool on its device. This is one pass without a copy, in a tenth of the time of
    isfinite; the extremes of a tensor with a NaN are NaN."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    extremes = torch.stack(torch.aminmax(tensor))
    return extremes.to(dtype or tensor.dtype).isfinite().all()


# ---------------------------------------------------------------- canonical tensors


def to_canonical(rule: Rule, tensors: Sequence[Tensor], shape: ModelShape, tensor: int) -> Tensor:
    """Hugging Face tensors, in the order of `rule.hf`, as one canonical tensor."""
    target = canonical_shape(rule, shape, tensor)
    if len(rule.hf) == 1 and rule.form in ("qkv", "gate_up"):
        tensors = tensors[0].split(weight_map.part_rows(rule, shape))
    if rule.form == "vocab":
        (weight,) = tensors
        return torch.nn.functional.pad(weight, (0, 0, 0, target[0] - weight.shape[0]))
    if rule.form == "qkv":
        G, _, D, *other_axes = target
        return torch.cat([part.reshape(G, -1, D, *other_axes) for part in tensors], dim=1)
    if rule.form in weight_map.STACKED:
        return torch.stack(list(tensors))
    return tensors[0]


def from_canonical(rule: Rule, full: Tensor, shape: ModelShape) -> list[Tensor]:
    """The inverse of `to_canonical`: Hugging Face tensors in the order of `rule.hf`."""
    if rule.form == "vocab":
        return [full[: shape.vocab_size]]
    parts = [full]
    if rule.form == "qkv":
        heads_per_group = shape.num_heads // shape.num_kv_heads
        by_head = full.split((heads_per_group, 1, 1), dim=1)
        parts = [part.reshape(-1, *full.shape[3:]) for part in by_head]
    elif rule.form in weight_map.STACKED:
        parts = list(full)
    return parts if len(rule.hf) == len(parts) else [torch.cat(parts)]


def shard(rule: Rule, full: Tensor, tensor_rank: int, tensor: int) -> Tensor:
    """A tensor-parallel rank's part of a canonical tensor (still in canonical axes)."""
    if rule.split_axis is None:
        return full
    return full.chunk(tensor, dim=rule.split_axis)[tensor_rank]


def join(rule: Rule, shards: Sequence[Tensor]) -> Tensor:
    """The canonical tensor of all tensor-parallel ranks' parts."""
    return shards[0] if rule.split_axis is None else torch.cat(list(shards), dim=rule.split_axis)


# ---------------------------------------------------------------- loading a sharded model


@torch.no_grad()
def load_hf_weights(
    chunks: Sequence[torch.nn.Module],
    folder: str | Path,
    shape: ModelShape,
    mesh: Mesh,
    option: str = "model.path",
    rules: tuple[Rule, ...] | None = None,
) -> None:
    """Fill this rank's shard of a Megatron model from a Hugging Face folder, tensor by tensor.

    The setting `option` names the folder; with the `rules` of the model's adapters it is one of
    PEFT's, and fills these. A value head that the folder does not have stays as it is. If an
    embedding has more rows than `shape`, the first are taken; missing ones are 0. A collective.
    ValueError, on all ranks alike, if any of them finds a tensor that cannot be read or has a
    number that is not finite, in the file or in the model's own format."""
    problems: list[str] = []
    try:
        reader = HFReader(folder, SINGLE_FILE if rules is None else ADAPTER_FILE)
        for placed in placed_tensors(shape, rules):
            if not weight_map.is_value_head(placed.rule) or reader.files.keys() >= {
                *placed.hf_names
            }:
                problems += _fill(
                    local_parameter(chunks, placed), reader, placed, shape=shape, mesh=mesh
                )
        if rules is None and shape.tied_embeddings and mesh.is_last_stage and mesh.pipeline > 1:
            embedding = next(iter(placed_tensors(shape)))
            problems += _fill(
                chunks[-1].output_layer.weight, reader, embedding, shape=shape, mesh=mesh
            )
        unknown_names = (
            unexpected_tensors(shape, reader.files) if rules is None and mesh.rank == 0 else []
        )
        if unknown_names:
            text = (
                "%s: %d tensors are no part of the model that config.json describes and are "
                "left out: %s"
            )
            logger.warning(text, option, len(unknown_names), ", ".join(unknown_names[:3]))
    except (OSError, ValueError) as error:
        problems.append(str(error))
    all_problems = dict.fromkeys(
        problem for rank_problems in all_gather_objects(problems) for problem in rank_problems
    )
    if all_problems:
        ending = (
            f"; and {len(all_problems) - _MOST_SHOWN} tensors more"
            if len(all_problems) > _MOST_SHOWN
            else ""
        )
        raise ValueError(
            f"the weights in {option} cannot be used: "
            f"{'; '.join(list(all_problems)[:_MOST_SHOWN])}{ending}. "
            "Copy or download the model again, or give another."
        )


def _fill(
    parameter: Tensor | None, reader: HFReader, placed: Placed, shape: ModelShape, mesh: Mesh
) -> Iterator[str]:
    """Fill this rank's parameter, if it has one.

    Yields sentences about tensors that are not finite in this rank's shard."""
    if parameter is None:
        return
    tensors = [reader.tensor(name) for name in placed.hf_names]
    full = to_canonical(placed.rule, tensors, shape, mesh.tensor)
    local_shard = shard(placed.rule, full, *sharing_ranks(placed, mesh))
    parameter.copy_(local_shard.reshape(parameter.shape))
    if not all_finite(parameter):
        yield from not_finite(
            reader, dict(zip(placed.hf_names, tensors, strict=True)), parameter.dtype
        )


def not_finite(
    reader: HFReader, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[str]:
    """A sentence for each of the tensors that has NaN or infinity, or gets one as `dtype`."""
    for name, tensor in tensors.items():
        if not all_finite(tensor, dtype):
            path = reader.folder / reader.files[name]
            kind = str(dtype).removeprefix("torch.")
            yield f"{name} in {path} has numbers that are NaN, infinite or too large for {kind}"


def held_layers(chunk: torch.nn.Module) -> list[int]:
    """Numbers in the model, from 0, of the layers that a model chunk holds, in its own order."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


def local_parameter(chunks: Sequence[torch.nn.Module], placed: Placed) -> Tensor | None:
    """This rank's parameter for a placed tensor, None where other ranks own it."""
    owner = _local_owner(chunks, placed)
    if owner is None:
        return None
    module, name = owner
    return getattr(module, name)


def local_weight(
    chunks: Sequence[torch.nn.Module], placed: Placed, written: torch.dtype | None = None
) -> Tensor | None:
    """The weight in effect: `local_parameter` with its adapter, if any, merged.

    See `models.lora.Adapter.merged`."""
    parameter = local_parameter(chunks, placed)
    adapter = local_adapter(chunks, placed)
    if parameter is None or adapter is None:
        return parameter
    return adapter.merged(parameter, written)[0]


@torch.no_grad()
def lora_kept(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, written: TensorFormats
) -> float:
    """The share of the adapters' updates that the model has, merged and rounded to `written`.

    A collective."""
    sums = []
    for placed in placed_tensors(shape):
        if (adapter := local_adapter(chunks, placed)) is not None:
            weight = local_parameter(chunks, placed)
            sums.append(adapter.merged(weight, widest_format(placed, written))[1])
    return kept_share(sums)


def local_adapter(chunks: Sequence[torch.nn.Module], placed: Placed) -> Any:
    """The adapter of this rank's parameter for a placed tensor; None if it has none.

    It is a `models.lora.Adapter`."""
    module, name = _local_owner(chunks, placed) or (None, "")
    return getattr(module, "adapter", None) if name == "weight" else None


def _local_owner(
    chunks: Sequence[torch.nn.Module], placed: Placed
) -> tuple[torch.nn.Module, str] | None:
    """The module of this rank that has a placed tensor, and its name there."""
    for chunk in chunks:
        numbers = _numbers_in(chunk, placed)
        for template in placed.rule.megatron if numbers is not None else ():
            path, _, name = template.format(**numbers).rpartition(".")
            try:
                module = chunk.get_submodule(path)
            except AttributeError:
                continue
            if getattr(module, name, None) is not None:
                return module, name
    return None


def _numbers_in(chunk: torch.nn.Module, placed: Placed) -> dict[str, int] | None:
    """The numbers that `{m}` and `{x}` stand for in a chunk's names.

    None if the chunk does not have the layer or the expert."""
    if placed.layer is None:
        return {}
    layers = held_layers(chunk)
    if placed.layer not in layers:
        return None
    numbers = {"m": layers.index(placed.layer)}
    if placed.expert is not None:
        experts = chunk.decoder.layers[numbers["m"]].mlp.local_expert_indices
        if placed.expert not in experts:
            return None
        numbers["x"] = experts.index(placed.expert)
    return numbers


def sharing_ranks(placed: Placed, mesh: Mesh) -> tuple[int, int]:
    """This rank's number among those that share a tensor's `split_axis`, and how many they are."""
    if placed.expert is None:
        return mesh.tensor_rank, mesh.tensor
    return mesh.expert_tensor_rank, mesh.expert_tensor


# ---------------------------------------------------------------- streaming a sharded model


@torch.no_grad()
def stream_hf_tensors(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    mesh: Mesh,
    rules: tuple[Rule, ...] | None = None,
    written: TensorFormats | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Every whole Hugging Face tensor of a sharded model, on every rank, one after another.

    Adapters are merged, and rounded once to the formats `written` (None: the policy's); with the
    `rules` of the adapters, these are streamed instead. A collective: all ranks must consume it to
    its end. At most one tensor is whole at a time."""
    from megatron.core import parallel_state  # conversions do without

    pipeline = parallel_state.get_pipeline_model_parallel_group()
    pipeline_ranks = dist.get_process_group_ranks(pipeline)
    any_parameter = next(chunks[0].parameters())
    stages = layer_stages(chunks, mesh, pipeline)
    for placed in placed_tensors(shape, rules):
        owner = {"first": 0, "last": mesh.pipeline - 1}.get(placed.rule.owner)
        owner = stages[placed.layer] if placed.layer is not None else owner
        rounded = None if written is None else widest_format(placed, written)
        held = any_parameter.new_empty(0, dtype=merged_dtype(rounded))
        if owner == mesh.pipeline_rank:
            weight = local_weight(chunks, placed, rounded)
            full = _gather(weight, held, placed, shape=shape, mesh=mesh)
        else:
            full = held.new_empty(weight_map.canonical_shape(placed.rule, shape, mesh.tensor))
        if mesh.pipeline > 1:
            dist.broadcast(full, src=pipeline_ranks[owner], group=pipeline)
        yield from zip(placed.hf_names, from_canonical(placed.rule, full, shape), strict=True)


def widest_format(placed: Placed, formats: TensorFormats) -> torch.dtype:
    """The number format that has all numbers of a placed tensor's Hugging Face tensors."""
    dtypes = (getattr(torch, formats.of(name)) for name in placed.hf_names)
    return reduce(torch.promote_types, dtypes)


def _gather(
    parameter: Tensor | None, held: Tensor, placed: Placed, shape: ModelShape, mesh: Mesh
) -> Tensor:
    """A whole tensor, on all ranks of the stage that owns it, with the format and device of `held`.

    Only an expert's tensors may lie on some of these ranks alone."""
    from megatron.core import parallel_state

    _, size = sharing_ranks(placed, mesh)
    part_shape = weight_map.shard_shape(placed.rule, shape, size)
    local_shard = (
        held.new_empty(part_shape)
        if parameter is None
        else parameter.data.reshape(part_shape).to(held.dtype)
    )
    local_shard = local_shard.contiguous()
    if placed.expert is not None and mesh.expert > 1:
        owner = placed.expert // (shape.num_experts // mesh.expert)
        group = parallel_state.get_expert_model_parallel_group()
        dist.broadcast(local_shard, dist.get_process_group_ranks(group)[owner], group)
    else:
        assert parameter is not None, f"this stage should own {placed.hf_names}"
    if size == 1 or placed.rule.split_axis is None:
        return local_shard
    shards = [torch.empty_like(local_shard) for _ in range(size)]
    group = parallel_state.get_tensor_model_parallel_group()
    if placed.expert is not None:
        group = parallel_state.get_expert_tensor_parallel_group()
    dist.all_gather(shards, local_shard, group=group)
    return join(placed.rule, shards)


def layer_stages(
    chunks: Sequence[torch.nn.Module], mesh: Mesh, pipeline_group: dist.ProcessGroup
) -> dict[int, int]:
    """The pipeline stage of every layer, as the stages themselves report it."""
    local_layers = [layer for chunk in chunks for layer in held_layers(chunk)]
    layers_by_stage = [local_layers] * mesh.pipeline
    if mesh.pipeline > 1:
        dist.all_gather_object(layers_by_stage, local_layers, group=pipeline_group)
    return {layer: stage for stage, layers in enumerate(layers_by_stage) for layer in layers}


# ---------------------------------------------------------------- writing a folder


def write_hf_folder(
    tensors: Iterator[tuple[str, Tensor]],
    metadata_files: Mapping[str, bytes],
    output: Path,
    dtype: torch.dtype | TensorFormats,
    writes: bool,
) -> None:
    """Write a Hugging Face model: the streamed weights as safetensors, and its `metadata_files`.

    Weights are written in one format or that of each tensor; a tensor that float16 cannot hold
    keeps its own. All ranks consume the stream; the one with `writes` writes, into a partial folder
    that is renamed when complete. Files hold up to SHARD_BYTES. OSError on that rank on a disk
    error; the stream is still consumed, and the partial folder removed."""
    if not writes:
        for _ in tensors:
            pass
        return
    partial_folder = output.with_name(output.name + PARTIAL)
    try:
        remove(partial_folder)
        partial_folder.mkdir(parents=True)
        formats = as_formats(dtype)
        with SafetensorsWriter(partial_folder, SHARD_BYTES) as files:
            for name, tensor in tensors:
                files.add(name, tensor, fitting_dtype(name, tensor, formats))
        write_metadata_files(partial_folder, metadata_files, getattr(torch, formats.most))
        # What has the final name is renamed first: an incomplete model never has it.
        before = set_aside(output, f".before{PARTIAL}") if output.exists() else None
        partial_folder.rename(output)
        if before is not None:
            remove(before)
    except OSError as error:
        for _ in tensors:  # a collective: the others wait for it
            pass
        remove(partial_folder)
        if error.filename is None:
            error.filename = str(partial_folder)
        raise


def as_formats(dtype: torch.dtype | TensorFormats) -> TensorFormats:
    """One format of all tensors, where it is one."""
    return (
        dtype
        if isinstance(dtype, TensorFormats)
        else TensorFormats(str(dtype).removeprefix("torch."))
    )


def fitting_dtype(name: str, tensor: Tensor, formats: TensorFormats) -> torch.dtype:
    """The format to write a tensor in.

    It is the tensor's own if float16 cannot hold all its numbers, which is logged."""
    dtype = getattr(torch, formats.of(name))
    if dtype == torch.float16 != tensor.dtype and not all_finite(tensor, dtype):
        logger.warning(
            "%s has numbers that are too large for float16, and is exported as it is", name
        )
        return tensor.dtype
    return dtype


def write_metadata_files(
    folder: Path, metadata_files: Mapping[str, bytes], dtype: torch.dtype
) -> None:
    """Write a model's configuration and tokenizer files.

    If config.json is among them, it gets the weights' number format."""
    write_files(folder, metadata_files)
    path = folder / "config.json"
    if path.name not in metadata_files:
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers 5 reads "dtype", earlier releases "torch_dtype".
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


class SafetensorsWriter:
    """Writes a model's weights into a folder, in bounded files named as on the Hub.

    They are complete when its `with` ends."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._files: list[list[str]] = []
        self._open: _File | None = None
        self.bytes = 0
        """Size of the numbers written so far."""

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Append one tensor as `dtype` (float32, bfloat16 or float16); it may be on any device."""
        if self._open is None or not self._open.has_room(
            name, tensor, dtype, most=self._shard_bytes
        ):
            self._close_file()
            self._open = _File(self._folder / f"part-{len(self._files)}")
            self._files.append([])
        self._open.add(name, tensor, dtype)
        self._files[-1].append(name)
        self.bytes += tensor.numel() * dtype.itemsize

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._complete()
        finally:
            if self._open is not None:
                self._open.file.close()

    def _complete(self) -> None:
        """Give the files their final names and, if there are several, write the index."""
        self._close_file()
        count = len(self._files)
        file_of = {}
        for number, names in enumerate(self._files):
            name = (
                f"model-{number + 1:05d}-of-{count:05d}.safetensors"
                if count > 1
                else "model.safetensors"
            )
            (self._folder / f"part-{number}").rename(self._folder / name)
            file_of |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.bytes}, "weight_map": file_of}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _close_file(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


class _File:
    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("wb", buffering=0)
        self.file.seek(8 + HEADER_BYTES)  # the first 8 bytes are the header's length
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(json.dumps(self._header))
        self._size = 0

    def has_room(self, name: str, tensor: Tensor, dtype: torch.dtype, most: int) -> bool:
        """Whether a tensor fits; one of wider numbers must start at a multiple of their width."""
        size = tensor.numel() * dtype.itemsize
        entry_bytes = len(json.dumps({name: self._entry(tensor, dtype)}))
        fits = self._size + size <= most and self._header_bytes + entry_bytes <= HEADER_BYTES
        return fits and self._size % dtype.itemsize == 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        entry = self._entry(tensor, dtype)
        for block in tensor.detach().contiguous().view(-1).split(_BLOCK):
            # A copy: `numpy` makes a storage impossible to resize, which offloading a parameter on
            # CPU needs.
            host = block.to("cpu", dtype, copy=True)
            _write(self.file, memoryview(host.view(torch.uint8).numpy()))
        self._header[name] = entry
        self._header_bytes += len(json.dumps({name: entry}))
        self._size += tensor.numel() * dtype.itemsize

    def _entry(self, tensor: Tensor, dtype: torch.dtype) -> dict[str, object]:
        offsets = [self._size, self._size + tensor.numel() * dtype.itemsize]
        return {"dtype": DTYPE_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": offsets}

    def close(self) -> None:
        header = json.dumps(self._header).encode().ljust(HEADER_BYTES)
        self.file.seek(0)
        _write(self.file, memoryview(len(header).to_bytes(8, "little") + header))
        self.file.close()


def _write(file: BinaryIO, content: memoryview) -> None:
    """Write all of it: one call may write less."""
    while content:
        content = content[file.write(content) :]
