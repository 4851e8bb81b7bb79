"""Converts between a Hugging Face folder and a Megatron-Core torch_dist checkpoint.

This takes one process, without Megatron.

Tensors are converted one by one: memory holds the current tensor (for fused ones also its parts),
never the model. All is checked before anything is written, into a partial folder that is renamed
when it is complete.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlmath.checkpoint.convert.adapters import base_model, lora_run, merged_tensors
from rlmath.checkpoint.convert.sources import RELEASE, TRACKER, check_output
from rlmath.checkpoint.convert.torch_dist_io import StateReader, StateWriter
from rlmath.checkpoint.convert.torch_dist_keys import (
    Stored,
    StoredRectangle,
    find_rectangles,
    listed,
    object_keys,
    stored_tensors,
    written_keys,
)
from rlmath.checkpoint.directory import METADATA_FILES
from rlmath.checkpoint.hf.headers import (
    ADAPTER_FILE,
    TensorFormats,
    tensor_headers,
    tensor_problems,
    unexpected_tensors,
)
from rlmath.checkpoint.hf.lora_merge import kept_share
from rlmath.checkpoint.hf.metadata_files import read_metadata_files
from rlmath.checkpoint.hf.peft import adapter_files
from rlmath.checkpoint.hf.weight_map import adapter_rules, hf_tensors, is_value_head
from rlmath.checkpoint.hf.weights import (
    DTYPE_NAMES,
    SHARD_BYTES,
    HFReader,
    SafetensorsWriter,
    all_finite,
    as_formats,
    fitting_dtype,
    not_finite,
    to_canonical,
    write_files,
    write_metadata_files,
)
from rlmath.config.help import raise_problems
from rlmath.config.model_shape import ModelShape
from rlmath.config.schema import Config
from rlmath.distributed.device import most_resident_bytes

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
DTYPES = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Values of --dtype."""


@dataclass(frozen=True)
class Converted:
    tensors: int
    """Number of Hugging Face tensors."""
    bytes: int
    dtype: torch.dtype
    kept: float = 1.0
    """The share of what adapters learned that the model has, merged and rounded."""

    def line(self, output: Path, seconds: float) -> str:
        """One line for people, with this process's largest memory so far."""
        numbers = str(self.dtype).removeprefix("torch.")
        return (
            f"Wrote {output}: {self.tensors} tensors in {numbers}, {self.bytes / 1e9:.3f} GB, in "
            f"{seconds:.1f} s; "
            f"peak memory {most_resident_bytes() / 1e9:.3f} GB"
        )


def hf_to_megatron(
    source: Path,
    shape: ModelShape,
    output: Path,
    tensor: int,
    pipeline: int,
    dtype: torch.dtype | None,
) -> Converted:
    """Write the checkpoint `output`/release, which can be loaded in any layout.

    Beside it are Megatron-LM's file that names it, and the model's metadata files under
    `output`/hf. The vocabulary is filled up to a multiple of `tensor`, and tensors are spread over
    `pipeline` files by their layers. `dtype` None: as in the source. ValueError for a mistake."""
    headers, problems = tensor_headers(source)
    unknown = listed(
        f"tensors are unknown to {shape.architecture}", unexpected_tensors(shape, headers)
    )
    problems += [] if problems else [*tensor_problems(source, shape, headers), *unknown]
    raise_problems(f"converting {source}", problems)
    reader = HFReader(source)
    names = hf_tensors(shape)
    formats = {_DTYPES[headers[name].dtype_name] for name in names} if dtype is None else {dtype}
    if len(formats) > 1:
        raise ValueError(f"{source} has several number formats; needed: one. Choose it by --dtype.")
    (dtype,) = formats
    with _fresh_folder(output, _elements(names.values()) * dtype.itemsize) as folder:
        state = folder / RELEASE
        state.mkdir()
        writer = StateWriter(state)
        for stored in stored_tensors(shape, tensor):
            placed = stored.placed
            rows = _rows(reader, stored, shape, tensor=tensor, dtype=dtype)
            stage = 0 if placed.rule.owner == "first" else pipeline - 1
            if placed.layer is not None:
                stage = placed.layer * pipeline // shape.num_layers
            for key in written_keys(stored, shape):
                writer.add(
                    stage,
                    key,
                    offset=(*stored.lead, *(0 for _ in stored.shape)),
                    global_shape=stored.global_shape,
                    part=rows,
                )
        for key in object_keys(shape):
            writer.add_object(0, key)
        writer.close()
        (folder / METADATA_FILES).mkdir()
        write_metadata_files(folder / METADATA_FILES, read_metadata_files(source), dtype)
        (folder / TRACKER).write_text(RELEASE, encoding="utf-8")
    return Converted(len(names), writer.bytes, dtype)


def megatron_to_hf(
    state: Path,
    shape: ModelShape,
    metadata_files: Mapping[str, bytes],
    output: Path,
    dtype: torch.dtype | TensorFormats | None,
    shard_bytes: int = SHARD_BYTES,
    model: str = "",
    base: Path | None = None,
) -> Converted:
    """Write a model of a torch_dist folder as safetensors of up to `shard_bytes` each.

    Its metadata files are written beside them. Only the model's tensors are read: the policy's, or
    those whose keys begin with `model` and a point. `dtype` may be one of each tensor; None: as in
    the checkpoint, and bfloat16 for a bfloat16 critic, whose head is float32. Adapters are merged
    into the model in `base`, by default that of their run's `model.path`. ValueError for a
    mistake."""
    reader = StateReader(state, f"{model}." if model else "")
    if model and not reader.tensors:
        raise ValueError(
            f"{state} has no {model}: the run had none, or made this checkpoint before it had one."
        )
    run = lora_run(reader)
    if run is None and base is not None:
        raise ValueError(f"{state} has no adapters (LoRA) to merge into {base}. Leave --base out.")
    if run is not None:
        base = base_model(reader, run, shape, base=base)
    formats = dtype if isinstance(dtype, TensorFormats) else None
    chosen = dtype if isinstance(dtype, torch.dtype) else None
    rectangles, stored_dtype, written_dtype = _rectangles_and_formats(
        reader, shape, run, dtype=chosen
    )
    tensors = _tensors(reader, rectangles, shape)
    formats = formats or as_formats(written_dtype)
    sums = list[Tensor]()
    if run is not None:
        assert base is not None
        tensors = merged_tensors(
            dict(tensors),
            run,
            shape,
            base=base,
            dtype=stored_dtype,
            sums=sums,
            written=formats,
        )
    finite = ((name, _finite(name, weight, written_dtype, state)) for name, weight in tensors)
    converted = _write_hf(
        finite, shape, metadata_files, output=output, formats=formats, shard_bytes=shard_bytes
    )
    return replace(converted, kept=kept_share(sums, over_ranks=False))


def begun_model_to_hf(
    run: Config, shape: ModelShape, output: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES
) -> Converted:
    """Write the model that a run with `model.adapter_path` begins with in `dtype`.

    ValueError for a mistake."""
    base = Path(run.model.path)
    reader = HFReader(run.model.adapter_path or "", ADAPTER_FILE)
    rules = adapter_rules(shape.architecture, run.lora.rank, run.lora.target)
    adapters = {name: reader.tensor(name).to(dtype) for name in hf_tensors(shape, rules)}
    tensors = merged_tensors(adapters, run, shape, base=base, dtype=dtype, sums=[])
    metadata = read_metadata_files(base)
    formats = as_formats(dtype)
    return _write_hf(
        tensors, shape, metadata, output=output, formats=formats, shard_bytes=shard_bytes
    )


def _write_hf(
    tensors: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    metadata_files: Mapping[str, bytes],
    *,
    output: Path,
    formats: TensorFormats,
    shard_bytes: int,
) -> Converted:
    """Write a model's tensors as safetensors beside its metadata files."""
    names = hf_tensors(shape)
    dtype = getattr(torch, formats.most)
    size = sum(
        math.prod(axes) * getattr(torch, formats.of(name)).itemsize for name, axes in names.items()
    )
    with _fresh_folder(output, size) as folder:
        with SafetensorsWriter(folder, shard_bytes) as writer:
            for name, weight in tensors:
                writer.add(name, weight, fitting_dtype(name, weight, formats))
        write_metadata_files(folder, metadata_files, dtype)
    return Converted(len(names), writer.bytes, dtype)


def adapters_to_hf(
    state: Path,
    shape: ModelShape,
    output: Path,
    dtype: torch.dtype | None,
    card: Mapping[str, bytes],
) -> Converted:
    """Write the adapters of a LoRA run's checkpoint as a folder of PEFT's.

    `card` is the file of their card, if any. ValueError for a mistake."""
    reader = StateReader(state)
    run = lora_run(reader)
    if run is None:
        raise ValueError(
            f"{state} has no adapters: it is not of a run with lora.rank. Leave --adapter out."
        )
    rectangles, _, dtype = _rectangles_and_formats(reader, shape, run, dtype)
    tensors = {
        name: _finite(name, weight, dtype, state).to(dtype).contiguous()
        for name, weight in _tensors(reader, rectangles, shape)
    }
    size = sum(weight.nbytes for weight in tensors.values())
    with _fresh_folder(output, size) as folder:
        write_files(
            folder, adapter_files(tensors, run.lora, shape, base=run.model.path) | dict(card)
        )
    return Converted(len(tensors), size, dtype)


def _tensors(
    reader: StateReader, rectangles: Iterable[StoredRectangle], shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    return (named for rectangle in rectangles for named in rectangle.tensors(reader, shape))


def _rectangles_and_formats(
    reader: StateReader, shape: ModelShape, run: Config | None, dtype: torch.dtype | None
) -> tuple[list[StoredRectangle], torch.dtype, torch.dtype]:
    """The rectangles of a model's tensors in a checkpoint, its number format, and the one to write.

    With a LoRA `run` they are those of its adapters."""
    state = reader.folder
    rules = None
    if run is not None:
        rules = adapter_rules(shape.architecture, run.lora.rank, run.lora.target)
    rectangles = find_rectangles(reader, shape, rules)
    model_rectangles = [
        rectangle for rectangle in rectangles if not is_value_head(rectangle.stored.placed.rule)
    ]
    formats = {reader.tensors[rectangle.key].properties.dtype for rectangle in model_rectangles}
    words = ", ".join(
        sorted(str(stored_format).removeprefix("torch.") for stored_format in formats)
    )
    if not formats <= set(_DTYPES.values()):
        raise ValueError(f"{state} has numbers in {words}; needed: float32, bfloat16 or float16.")
    if dtype is None and len(formats) > 1:
        raise ValueError(
            f"{state} has numbers in {words}; needed: one format. Choose it by --dtype."
        )
    stored_dtype = next(iter(formats))
    return rectangles, stored_dtype, dtype or stored_dtype


def _finite(name: str, weight: Tensor, dtype: torch.dtype, state: Path) -> Tensor:
    if not all_finite(weight, dtype):
        raise ValueError(
            f"{state}: {name} has numbers that are NaN, infinite or too large for {dtype}. "
            "Convert an earlier "
            "checkpoint of that run."
        )
    return weight


# ---------------------------------------------------------------- from Hugging Face


def _rows(
    reader: HFReader, stored: Stored, shape: ModelShape, tensor: int, dtype: torch.dtype
) -> Tensor:
    """One tensor as it is stored, with its leading axes."""
    weights = [reader.tensor(name) for name in stored.placed.hf_names]
    for name, weight in zip(stored.placed.hf_names, weights, strict=True):
        if not all_finite(weight, dtype):
            raise_problems("the weights", list(not_finite(reader, {name: weight}, dtype)))
    canonical = to_canonical(stored.placed.rule, weights, shape, tensor)
    return canonical.to(dtype).reshape(*(1 for _ in stored.lead), *stored.shape)


# ---------------------------------------------------------------- both


@contextmanager
def _fresh_folder(output: Path, needed: int) -> Iterator[Path]:
    """A partial folder that is renamed to `output` at the end and removed on an error.

    `needed`: bytes on disk."""
    check_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output.parent).free
    if free < needed:
        raise ValueError(
            f"the disk of {output} has {free / 1e9:.2f} GB free; needed: {needed / 1e9:.2f} GB. "
            "Free some, or change --output."
        )
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if output.is_dir():
            output.rmdir()
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _elements(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(size) for size in shapes)
