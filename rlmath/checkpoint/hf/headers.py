"""The tensors of a Hugging Face folder, by the headers of its safetensors files and the index.

There are fingerprints of their contents, too. No tensor is read whole, except an output layer
beside tied embeddings, and for `content_digests`."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from rlmath.checkpoint.hf.weight_map import Rule, hf_tensors
from rlmath.config.files import (
    MAX_JSON_BYTES,
    open_regular,
    parse_json,
    read_json_object,
    read_regular,
    require_regular,
)
from rlmath.config.model_shape import ModelShape

FORMATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Number formats that a model may have: torch's name by the name in safetensors headers."""
NEEDED_FORMATS = (
    "needed: float32, bfloat16 or float16 (F32, BF16, F16). Save the model in one of them"
)
SINGLE_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
MAX_INDEX_BYTES = 64 * 2**20
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINGERPRINT_FORM = "2:"
"""The beginning of fingerprints of models; those of earlier releases have none."""
_CHUNK_BYTES = 2**24
_MAX_HEADER_BYTES = 10**8
"""Longest header, as in the safetensors library."""
_SAMPLE_BYTES = 2**12
_OLDER_SAMPLE_BYTES = 2**20


@dataclass(frozen=True)
class TensorHeader:
    shape: tuple[int, ...]
    dtype_name: str
    """The number format, "F32" or the like."""
    file: Path


@dataclass(frozen=True)
class TensorFormats:
    """Number formats of a model's tensors, by torch's names."""

    most: str
    """The format of most numbers."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Formats of tensors that have another one, by name."""

    def of(self, name: str) -> str:
        return self.others.get(name, self.most)

    def as_json(self) -> dict[str, str]:
        """Formats by name, with that of most numbers under ""."""
        return {"": self.most, **self.others}


def formats_from_json(values: Mapping[str, str]) -> TensorFormats | None:
    """The inverse of `TensorFormats.as_json`; None for nothing.

    ValueError for words that are no formats."""
    if not values:
        return None
    formats = {str(name): str(word) for name, word in values.items()}
    usual_format = formats.pop("", "")
    if not {usual_format, *formats.values()} <= {*FORMATS.values()}:
        raise ValueError(f"number formats {str(dict(values))[:80]}; {NEEDED_FORMATS}")
    return TensorFormats(usual_format, formats)


def source_formats(folder: Path) -> TensorFormats | None:
    """Number formats of a model's folder; None if neither weights nor config.json say them."""
    headers, _ = tensor_headers(folder) if folder.is_dir() else ({}, [])
    numbers: Counter[str] = Counter()
    for header in headers.values():
        if header.dtype_name in FORMATS:
            numbers[FORMATS[header.dtype_name]] += math.prod(header.shape)
    if numbers:
        ((usual_format, _),) = numbers.most_common(1)
        formats = {
            name: FORMATS.get(header.dtype_name, usual_format) for name, header in headers.items()
        }
        return TensorFormats(
            usual_format, {name: word for name, word in formats.items() if word != usual_format}
        )
    config = folder / "config.json"
    values = read_json_object(config) if config.is_file() else {}
    word = values.get("dtype") or values.get("torch_dtype")
    return TensorFormats(str(word)) if word in FORMATS.values() else None


def read_header(path: Path) -> dict[str, TensorHeader]:
    """All tensors of a safetensors file, by name.

    ValueError where it is no whole one."""
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
    """Problems of the weights of a folder whose config.json gives `shape` (None: not known)."""
    tensors, problems = tensor_headers(folder)
    return problems if problems or shape is None else list(tensor_problems(folder, shape, tensors))


def tensor_headers(folder: Path) -> tuple[dict[str, TensorHeader], list[str]]:
    """Headers of all tensors in the folder's safetensors files, by name, and problems.

    A tensor's header is its shape and number format."""
    files, problems = weight_files(folder)
    headers: dict[str, TensorHeader] = {}
    for file, promised in files.items():
        try:
            file_headers = read_header(file)
        except ValueError as error:
            problems.append(str(error))
            continue
        # With an index, tensors that it does not name are never read.
        headers |= {
            name: file_headers[name]
            for name in file_headers
            if name in promised or file.name == SINGLE_FILE
        }
        missing_names = sorted(promised - file_headers.keys())
        if missing_names:
            problems.append(
                f'"{file}" lacks {len(missing_names)} tensors that the index looks for there: '
                f"{', '.join(missing_names[:3])}. "
                "Copy or download the folder again."
            )
    return headers, problems


def weight_files(folder: Path, name: str = SINGLE_FILE) -> tuple[dict[Path, set[str]], list[str]]:
    """The safetensors files, each with the tensors that an index promises in it, and problems.

    `name` is the name of the file if there is only one."""
    single = folder / name
    index = folder / f"{name}.index.json"
    if single.is_file():
        return {single: set()}, []
    if not index.is_file():
        return {}, [
            f'"{folder}" has neither {name} nor {index.name}. Save the model as safetensors '
            "(save_pretrained) there."
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
            f"{index} names files outside of its folder ({names[0]!r}, ...); needed: plain file "
            "names."
        ]
    missing_names = [name for name in names if not os.path.isfile(folder / name)]
    if missing_names:
        return {}, [
            f"{index} names {len(names)} files, {len(missing_names)} are not there: "
            f"{', '.join(missing_names[:5])}. "
            "Copy or download them."
        ]
    promised: dict[Path, set[str]] = {folder / name: set() for name in names}
    for tensor, name in weight_map.items():
        promised[folder / str(name)].add(tensor)
    return promised, []


def tensor_problems(
    folder: Path,
    shape: ModelShape,
    headers: dict[str, TensorHeader],
    rules: tuple[Rule, ...] | None = None,
) -> Iterator[str]:
    """Problems of tensors that follow from config.json, or from other `rules` (adapters).

    They are missing, have another shape, or are not in floating-point numbers."""
    expected = hf_tensors(shape, rules)
    missing_names = [name for name in expected if name not in headers]
    if missing_names:
        names = ", ".join(missing_names[:3])
        yield (
            f'"{folder}": {len(missing_names)} of {len(expected)} tensors are not in the weights: '
            f"{names}."
        )
    wrong_names = [
        name for name in expected if name in headers and headers[name].shape != expected[name]
    ]
    for name in wrong_names[:3]:
        yield (
            f'"{folder}": {name} has shape {headers[name].shape}, config.json makes it '
            f"{expected[name]}."
        )
    wrong_names = [
        name for name in expected if name in headers and headers[name].dtype_name not in FORMATS
    ]
    note = f" {len(wrong_names) - 1} tensors more are like that." if len(wrong_names) > 1 else ""
    for name in wrong_names[:1]:
        yield (
            f"{name} in {headers[name].file} has numbers in {headers[name].dtype_name}; "
            f"{NEEDED_FORMATS}.{note}"
        )
    tied = shape.tied_embeddings and HEAD in headers and EMBEDDING in headers
    if tied and not _are_equal(headers, EMBEDDING, HEAD):
        yield (
            f'"{folder}": config.json says "tie_word_embeddings": true, and {HEAD} is another '
            f"tensor than {EMBEDDING}; "
            f'transformers takes it as it is. Set "tie_word_embeddings": false, or remove {HEAD} '
            "from the weights."
        )


def unexpected_tensors(shape: ModelShape, names: Iterable[str]) -> list[str]:
    """Tensors of a folder that fill no part of the model.

    Tables of positions, which old folders have, are not among them, nor is an output layer, which
    may be tied or have a value head in its place."""
    unknown_names = {*names} - {*hf_tensors(shape), HEAD}
    return sorted(name for name in unknown_names if not name.endswith("rotary_emb.inv_freq"))


def _are_equal(headers: Mapping[str, TensorHeader], first_name: str, second_name: str) -> bool:
    first = headers[first_name]
    second = headers[second_name]
    if (first.shape, first.dtype_name) != (second.shape, second.dtype_name):
        return False
    return all(
        first_chunk == second_chunk
        for first_chunk, second_chunk in itertools.zip_longest(
            _chunks(first.file, first_name), _chunks(second.file, second_name)
        )
    )


def _chunks(path: Path, name: str) -> Iterator[bytes]:
    """The bytes of one tensor of a safetensors file, some MiB at a time."""
    with open_regular(path) as file:
        _, places = _header(file)
        start, end = places[name]
        file.seek(start)
        for remaining_bytes in range(end - start, 0, -_CHUNK_BYTES):
            yield file.read(min(remaining_bytes, _CHUNK_BYTES))


def _header(file: BinaryIO) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """The header of a safetensors file as bytes, and by name the start and end of each tensor.

    Such a file is an 8-byte length, the header, and all tensors one after another. ValueError if
    it is none."""
    size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ValueError(f"its header has {size} bytes")
    header = file.read(size)
    base = 8 + size
    places = {}
    try:
        for name, tensor_header in parse_json(header.decode()).items():
            if name != "__metadata__":
                start, end = map(int, tensor_header["data_offsets"])
                if not 0 <= start <= end < 2**62:
                    raise ValueError(f"{name[:80]!r} lies at {start} to {end}")
                places[name] = (base + start, base + end)
    except (AttributeError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"its header names no tensors ({error})") from error
    return header, places


# ---------------------------------------------------------------- fingerprints


def model_fingerprint(folder: str | Path, config: str = "config.json") -> str:
    """Fingerprint of a Hugging Face folder; it begins with FINGERPRINT_FORM.

    It is made of config.json (`config`: its name, for adapters), and of the safetensors files'
    names, headers, and the first, middle and last 4 KiB of every tensor; of a file without a header
    all bytes count. The same model has the same fingerprint in another place, and another one after
    training."""
    digest = hashlib.sha256(read_regular(Path(folder) / config, MAX_JSON_BYTES))
    for path in sorted(Path(folder).glob("*.safetensors")):
        with open_regular(path) as file:
            digest.update(f"{path.name}:{os.fstat(file.fileno()).st_size}".encode())
            for block in _sampled_bytes(file):
                digest.update(block)
    return f"{FINGERPRINT_FORM}{digest.hexdigest()[:16]}"


def _sampled_bytes(file: BinaryIO) -> Iterator[bytes]:
    """The bytes of a safetensors file that its model's fingerprint is made of."""
    try:
        header, places = _header(file)
    except ValueError:
        file.seek(0)
        yield from iter(lambda: file.read(_CHUNK_BYTES), b"")
        return
    yield header
    for start, end in sorted(places.values()):
        middle = (start + end - _SAMPLE_BYTES) // 2
        for place in sorted({start, max(start, middle), max(start, end - _SAMPLE_BYTES)}):
            file.seek(place)
            yield file.read(max(0, min(_SAMPLE_BYTES, end - place)))


def older_model_fingerprint(folder: str | Path, config: str = "config.json") -> str:
    """The fingerprint that `model_fingerprint` gave before it had a form.

    The first and last MiB of every file with weights count."""
    digest = hashlib.sha256(read_regular(Path(folder) / config, MAX_JSON_BYTES))
    for path in sorted(Path(folder).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with open_regular(path) as file:
            digest.update(file.read(_OLDER_SAMPLE_BYTES))
            file.seek(max(0, size - _OLDER_SAMPLE_BYTES))
            digest.update(file.read(_OLDER_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def fingerprint_to_compare(
    recorded: str, fingerprint: str, folder: str | Path, config: str = "config.json"
) -> str:
    """The fingerprint of a folder that can be compared with a recorded one.

    It is `fingerprint`, the folder's `model_fingerprint`, or the older form if that was
    recorded."""
    is_older = recorded != "" and not recorded.startswith(FINGERPRINT_FORM)
    if is_older and fingerprint.startswith(FINGERPRINT_FORM):
        return older_model_fingerprint(folder, config)
    return fingerprint


def content_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of all bytes of every tensor in the folder's safetensors files, by its name.

    ValueError where one cannot be read."""
    headers, problems = tensor_headers(folder)
    if problems:
        raise ValueError(" ".join(problems))
    digests = {}
    for name, header in sorted(headers.items()):
        digest = hashlib.sha256(f"{header.dtype_name} {header.shape}".encode())
        for block in _chunks(header.file, name):
            digest.update(block)
        digests[name] = digest.hexdigest()
    return digests
