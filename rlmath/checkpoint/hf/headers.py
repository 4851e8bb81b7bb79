"""Which tensors a Hugging Face folder has: the headers of its safetensors files, and the index. No tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlmath.config.files import read_json_object, require_regular

FORMATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Number formats that a model may have: torch's name by the name in safetensors headers."""
NEEDED_FORMATS = "needed: float32, bfloat16 or float16 (F32, BF16, F16). Save the model in one of them"
MAX_INDEX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TensorHeader:
    """A tensor, from a safetensors header."""

    shape: tuple[int, ...]
    dtype_name: str
    """The number format, "F32" or the like."""
    file: Path


def read_header(path: Path) -> dict[str, TensorHeader]:
    """All tensors of a safetensors file, by name. ValueError where it is no whole one."""
    try:
        require_regular(path)
        with safe_open(path, framework="np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: TensorHeader(tuple(part.get_shape()), part.get_dtype(), path)
                for name, part in parts.items()
            }
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f'"{path}" is not a whole safetensors file ({error}). Copy or download it again.'
        ) from error


def format_problems(names: Iterable[str], held: Mapping[str, TensorHeader]) -> list[str]:
    """A sentence for each of the first tensors whose numbers are no plain floating-point ones."""
    odd = [name for name in names if name in held and held[name].dtype_name not in FORMATS]
    more = f" {len(odd) - 1} tensors more are like that." if len(odd) > 1 else ""
    return [
        f"{name} in {held[name].file} has numbers in {held[name].dtype_name}; {NEEDED_FORMATS}.{more}"
        for name in odd[:1]
    ]


def weight_files(folder: Path) -> dict[str, str]:
    """The file of every tensor, by the tensor's name. ValueError where there is no whole index."""
    single = folder / "model.safetensors"
    if single.is_file():  # as transformers does where there is an index, too
        return dict.fromkeys(read_header(single), single.name)
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise ValueError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
    found = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f'{index}: "weight_map" is missing or empty; needed: file name by tensor name.')
    return found
