"""Which tensors a Hugging Face folder has: the headers of its safetensors files, and the index. No tensor is read but
an output layer beside tied embeddings."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlmath.checkpoint.hf.weight_map import Rule, hf_tensors
from rlmath.config.files import read_json_object, require_regular
from rlmath.config.model_shape import ModelShape

FORMATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Number formats that a model may have: torch's name by the name in safetensors headers."""
NEEDED_FORMATS = "needed: float32, bfloat16 or float16 (F32, BF16, F16). Save the model in one of them"
SINGLE_FILE, ADAPTER_FILE = "model.safetensors", "adapter_model.safetensors"
MAX_INDEX_BYTES = 64 * 2**20
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_CHUNK_BYTES = 2**24
_SAMPLE_BYTES = 2**20


@dataclass(frozen=True)
class TensorHeader:
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


def weight_problems(folder: Path, shape: ModelShape | None) -> list[str]:
    """What is wrong with the weights of a folder whose config.json gives `shape`; None: it is not known."""
    tensors, problems = tensor_headers(folder)
    return problems if problems or shape is None else list(tensor_problems(folder, shape, tensors))


def tensor_headers(folder: Path) -> tuple[dict[str, TensorHeader], list[str]]:
    """Shape and number format by name of every tensor in the folder's safetensors files, from their headers."""
    files, problems = weight_files(folder)
    headers: dict[str, TensorHeader] = {}
    for file, promised in files.items():
        try:
            held = read_header(file)
        except ValueError as error:
            problems.append(str(error))
            continue
        # Where there is an index, a tensor that it does not name is never read.
        headers |= {name: held[name] for name in held if name in promised or file.name == SINGLE_FILE}
        absent = sorted(promised - held.keys())
        if absent:
            problems.append(
                f'"{file}" lacks {len(absent)} tensors that the index looks for there: {", ".join(absent[:3])}. '
                "Copy or download the folder again."
            )
    return headers, problems


def weight_files(folder: Path, name: str = SINGLE_FILE) -> tuple[dict[Path, set[str]], list[str]]:
    """The safetensors files, each with the tensors that an index promises in it; `name` is that of the only one."""
    single, index = folder / name, folder / f"{name}.index.json"
    if single.is_file():
        return {single: set()}, []
    if not index.is_file():
        return {}, [
            f'"{folder}" has neither {name} nor {index.name}. Save the model as safetensors (save_pretrained) there.'
        ]
    try:
        weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    except ValueError as error:
        return {}, [str(error)]
    if not isinstance(weight_map, dict) or not weight_map:
        return {}, [f'{index}: "weight_map" is missing or empty; needed: file name by tensor name.']
    names = sorted({str(name) for name in weight_map.values()})
    if any(Path(name).name != name for name in names):
        return {}, [
            f"{index} names files outside of its folder ({names[0]!r}, ...); needed: plain file names."
        ]
    absent = [name for name in names if not os.path.isfile(folder / name)]
    if absent:
        return {}, [
            f"{index} names {len(names)} files, {len(absent)} are not there: {', '.join(absent[:5])}. "
            "Copy or download them."
        ]
    promised: dict[Path, set[str]] = {folder / name: set() for name in names}
    for tensor, name in weight_map.items():
        promised[folder / str(name)].add(tensor)
    return promised, []


def tensor_problems(
    folder: Path, shape: ModelShape, found: dict[str, TensorHeader], rules: tuple[Rule, ...] | None = None
) -> Iterator[str]:
    """Tensors that config.json makes one expect, of the model or of other `rules` (its adapters), and that are not
    there, have another shape, or are not in floating-point numbers."""
    expected = hf_tensors(shape, rules)
    absent = [name for name in expected if name not in found]
    if absent:
        names = ", ".join(absent[:3])
        yield f'"{folder}": {len(absent)} of {len(expected)} tensors are not in the weights: {names}.'
    odd = [name for name in expected if name in found and found[name].shape != expected[name]]
    for name in odd[:3]:
        yield f'"{folder}": {name} has shape {found[name].shape}, config.json makes it {expected[name]}.'
    odd = [name for name in expected if name in found and found[name].dtype_name not in FORMATS]
    more = f" {len(odd) - 1} tensors more are like that." if len(odd) > 1 else ""
    for name in odd[:1]:
        yield f"{name} in {found[name].file} has numbers in {found[name].dtype_name}; {NEEDED_FORMATS}.{more}"
    tied = shape.tied_embeddings and HEAD in found and EMBEDDING in found
    if tied and not _are_equal(found[EMBEDDING], found[HEAD], EMBEDDING, HEAD):
        yield (
            f'"{folder}": config.json says "tie_word_embeddings": true, and {HEAD} is another tensor than {EMBEDDING}; '
            f'transformers takes it as it is. Set "tie_word_embeddings": false, or remove {HEAD} from the weights.'
        )


def unexpected_tensors(shape: ModelShape, names: Iterable[str]) -> list[str]:
    """Tensors of a folder that nothing of the model is filled with; not tables of positions, which old folders have,
    and not an output layer, which may be tied or have a value head in its place."""
    others = {*names} - {*hf_tensors(shape), HEAD}
    return sorted(name for name in others if not name.endswith("rotary_emb.inv_freq"))


def _are_equal(first: TensorHeader, second: TensorHeader, *names: str) -> bool:
    if (first.shape, first.dtype_name) != (second.shape, second.dtype_name):
        return False
    parts = (_chunks(one.file, name) for one, name in zip((first, second), names, strict=True))
    return all(one == other for one, other in itertools.zip_longest(*parts))


def _chunks(path: Path, name: str) -> Iterator[bytes]:
    """The bytes of one tensor of a safetensors file: an 8-byte length, the header, all tensors one behind the other."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + start)
        for left in range(end - start, 0, -_CHUNK_BYTES):
            yield file.read(min(left, _CHUNK_BYTES))


def model_fingerprint(folder: str | Path, config: str = "config.json") -> str:
    """Of a Hugging Face folder: its config.json (`config`: its name, of adapters), and names, sizes, first and last MiB
    of its weight files. It is the same for the same model in another place, and another one after training."""
    digest = hashlib.sha256((Path(folder) / config).read_bytes())
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
