"""What a Hugging Face model folder holds, and everything that is wrong with it.

The files are somebody else's: nothing in them is trusted to be there, of the right type or of a sane size.
Only config.json and the headers of the safetensors files are read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlmath.checkpoint.hf_tables import hf_shapes, placed_tensors
from rlmath.data.json_files import read_json_object
from rlmath.model_config import read_shape
from rlmath.model_shape import ModelShape
from rlmath.settings import nearest_path, raise_problems

_MAX_INDEX_BYTES = 64 * 2**20


def read_model_shape(folder: Path) -> ModelShape:
    """The shape that config.json gives; ValueError that lists what is wrong with that file."""
    shape, problems = read_shape(folder)
    raise_problems(f'the model "{folder}"', problems)
    assert shape is not None
    return shape


def inspect_model_folder(folder: Path) -> tuple[ModelShape | None, list[str]]:
    """The shape, None where config.json does not give one, and what is wrong with the folder."""
    if not os.path.exists(folder):
        return None, [f'model.path: there is no folder "{folder}".{nearest_path(folder)}']
    if not folder.is_dir():
        return None, [f'model.path: "{folder}" is not a folder. Give the folder that holds config.json.']
    shape, problems = read_shape(folder)
    tensors, weight_problems = _tensor_shapes(folder)
    problems += weight_problems
    if shape is not None and not weight_problems:
        problems += _tensor_problems(folder, shape, tensors)
    has_tokenizer = (folder / "tokenizer.json").is_file() or all(
        (folder / name).is_file() for name in ("vocab.json", "merges.txt")
    )
    if not has_tokenizer:
        problems.append(
            f'"{folder}" has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt. '
            "Copy the tokenizer files of the model there."
        )
    return shape, problems


def _tensor_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Shape by name of every tensor in the folder's safetensors files, from their headers."""
    files, problems = _weight_files(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file, promised in files.items():
        try:
            with safe_open(file, framework="numpy") as opened:
                held = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            problems.append(f'"{file}" is not a whole safetensors file ({error}). Copy or download it again.')
            continue
        shapes |= held
        absent = sorted(promised - held.keys())
        if absent:
            problems.append(
                f'"{file}" lacks {len(absent)} tensors that the index looks for there: {", ".join(absent[:3])}. '
                "Copy or download the folder again."
            )
    return shapes, problems


def _weight_files(folder: Path) -> tuple[dict[Path, set[str]], list[str]]:
    """The safetensors files, each with the tensors that an index promises in it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {single: set()}, []
    if not index.is_file():
        others = sorted(path.name for path in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.safetensors")
        )
        there = (
            f" There is {', '.join(others[:3])}: save it as safetensors (transformers' save_pretrained)."
            if others
            else ""
        )
        return {}, [f'"{folder}" has neither model.safetensors nor model.safetensors.index.json.{there}']
    try:
        weight_map = read_json_object(index, _MAX_INDEX_BYTES).get("weight_map")
    except ValueError as error:
        return {}, [str(error)]
    if not isinstance(weight_map, dict) or not weight_map:
        return {}, [f'{index}: "weight_map" is missing or empty; needed: file name by tensor name.']
    names = sorted({str(name) for name in weight_map.values()})
    if any(Path(name).name != name for name in names):
        return {}, [
            f"{index} names files outside of its folder ({names[0]!r}, ...); needed: plain file names."
        ]
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        return {}, [
            f"{index} names {len(names)} files, {len(absent)} are not there: {', '.join(absent[:5])}. "
            "Copy or download them."
        ]
    promised: dict[Path, set[str]] = {folder / name: set() for name in names}
    for tensor, name in weight_map.items():
        promised[folder / str(name)].add(tensor)
    return promised, []


def _tensor_problems(folder: Path, shape: ModelShape, found: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Tensors that config.json makes one expect, and that are not there or have another shape."""
    expected = {
        name: wanted
        for placed in placed_tensors(shape)
        for name, wanted in zip(placed.hf_names, hf_shapes(placed.rule, shape), strict=True)
    }
    absent = [name for name in expected if name not in found]
    if absent:
        names = ", ".join(absent[:3])
        yield f'"{folder}": {len(absent)} of {len(expected)} tensors are not in the weights: {names}.'
    odd = [name for name in expected if name in found and found[name] != expected[name]]
    for name in odd[:3]:
        yield f'"{folder}": {name} has shape {found[name]}, config.json makes it {expected[name]}.'
