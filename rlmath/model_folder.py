"""What a Hugging Face model folder holds, and everything that is wrong with it.

The files are somebody else's: nothing in them is trusted to be there, of the right type or of a sane size.
Only config.json and the headers of the safetensors files are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlmath.checkpoint.hf_tables import MODEL_TYPES, TABLES, hf_shapes, placed_tensors
from rlmath.model_shape import ModelShape
from rlmath.settings import nearest_path, nearest_word, raise_problems

_MAX_JSON_BYTES = 64 * 2**20
_MAX_LAYERS = 4096
_MAX_SIZE = 2**31 - 1
_DTYPES = ("float32", "bfloat16", "float16")


def read_model_shape(folder: Path) -> ModelShape:
    """The shape that config.json gives; ValueError that lists what is wrong with that file."""
    shape, problems = _read_shape(folder)
    raise_problems(f'the model "{folder}"', problems)
    assert shape is not None
    return shape


def inspect_model_folder(folder: Path) -> tuple[ModelShape | None, list[str]]:
    """The shape, None where config.json does not give one, and what is wrong with the folder."""
    if not folder.exists():
        return None, [f'model.path: there is no folder "{folder}".{nearest_path(folder)}']
    if not folder.is_dir():
        return None, [f'model.path: "{folder}" is not a folder. Give the folder that holds config.json.']
    shape, problems = _read_shape(folder)
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


# ---------------------------------------------------------------- config.json


def _read_shape(folder: Path) -> tuple[ModelShape | None, list[str]]:
    path = folder / "config.json"
    if not path.is_file():
        return None, [f'"{folder}" has no config.json. model.path needs the folder of a Hugging Face model.']
    try:
        values = _read_json(path)
    except ValueError as error:
        return None, [str(error)]
    architecture, problems = _architecture(path, values)
    if architecture is None:
        return None, problems
    fields = _Fields(path, values)
    shape = _shape_from(architecture, fields)
    unsupported = list(_unsupported(path, values, shape))
    return (None if fields.problems else shape), [*fields.problems, *unsupported]


def _architecture(path: Path, values: dict[str, Any]) -> tuple[str | None, list[str]]:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return None, [
            f'{path}: "architectures" is {names!r}; needed: a list such as ["{next(iter(TABLES))}"].'
        ]
    if names[0] not in TABLES:
        known = ", ".join(TABLES)
        hint = nearest_word(names[0], TABLES)
        return None, [f'{path}: the architecture "{names[0]}" is not supported; supported: {known}.{hint}']
    return names[0], []


def _shape_from(architecture: str, fields: _Fields) -> ModelShape:
    """The shape; whatever is missing or odd is noted in `fields.problems`, and is 1 here."""
    hidden_size, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if fields.values.get("head_dim") is None and hidden_size % num_heads:
        fields.note(f'"hidden_size" {hidden_size} is not a multiple of "num_attention_heads" {num_heads}')
    head_dim = fields.whole("head_dim", default=hidden_size // num_heads)
    num_kv_heads = num_heads
    if fields.values.get("num_key_value_heads", 0) is not None:
        num_kv_heads = fields.whole("num_key_value_heads")
    if num_heads % num_kv_heads:
        fields.note(
            f'"num_attention_heads" {num_heads} is not a multiple of "num_key_value_heads" {num_kv_heads}'
        )
    if head_dim % 2 and not fields.problems:
        fields.note(f"the head dimension is {head_dim}; rotary embeddings need an even one")
    return ModelShape(
        architecture=architecture,
        num_layers=fields.whole("num_hidden_layers", most=_MAX_LAYERS),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=fields.whole("intermediate_size"),
        vocab_size=fields.whole("vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        max_positions=fields.whole("max_position_embeddings"),
        rope_theta=fields.rope_theta(),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        attention_bias=True,
        torch_dtype=fields.dtype(),
    )


class _Fields:
    """Typed reading of config.json; what is wrong is collected in `problems` and read as 1."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values
        self.problems: list[str] = []

    def note(self, problem: str) -> None:
        self.problems.append(f"{self.path}: {problem}.")

    def whole(self, key: str, most: int = _MAX_SIZE, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        self.note(f'"{key}" is {self._shown(key)}; needed: a whole number from 1 to {most}')
        return 1

    def positive(self, key: str) -> float:
        return self._positive(self.values.get(key), key)

    def _positive(self, value: Any, key: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self.note(f'"{key}" is {self._shown(key, value)}; needed: a number above 0')
        return 1.0

    def flag(self, key: str) -> bool:
        """A switch that is off when it is not there, as in transformers."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.note(f'"{key}" is {value!r}; needed: true or false')
        return value is True

    def rope_theta(self) -> float:
        """In "rope_parameters" (transformers 5) or beside the other fields (transformers 4)."""
        inner = self.values.get("rope_parameters")
        if isinstance(inner, dict) and "rope_theta" in inner:
            return self._positive(inner["rope_theta"], "rope_theta")
        return self.positive("rope_theta")

    def dtype(self) -> str:
        """Under "dtype" (transformers 5) or "torch_dtype" (transformers 4)."""
        key = "dtype" if "dtype" in self.values else "torch_dtype"
        value = self.values.get(key) or "float32"
        if value not in _DTYPES:
            self.note(f'"{key}" is {value!r}; needed: one of {", ".join(_DTYPES)}')
        return str(value)

    def _shown(self, key: str, value: Any = None) -> str:
        value = self.values.get(key) if value is None else value
        return "missing" if value is None else repr(value)[:80]


def _unsupported(path: Path, values: dict[str, Any], shape: ModelShape) -> Iterator[str]:
    """What config.json asks for and this program does not compute."""
    wanted = MODEL_TYPES[shape.architecture]
    if values.get("model_type") != wanted:
        yield f'{path}: "model_type" is {values.get("model_type")!r}; {shape.architecture} needs "{wanted}".'
    if values.get("auto_map") is not None:
        yield f'{path}: "auto_map" asks for code of the model\'s own, which is never run. Take it out.'
    if values.get("hidden_act", "silu") != "silu":
        yield f'{path}: "hidden_act" is {values["hidden_act"]!r}; supported: "silu".'
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind not in (None, "default"):
            yield (
                f'{path}: "{key}" asks for {kind!r}; only plain rotary embeddings are supported. '
                f"Set it to null to train within the model's {shape.max_positions} positions."
            )
        if isinstance(rope, dict) and rope.get("partial_rotary_factor", 1.0) != 1.0:
            yield f'{path}: "partial_rotary_factor" is {rope["partial_rotary_factor"]!r}; supported: 1.0.'
    if values.get("quantization_config") is not None:
        yield (
            f'{path}: "quantization_config" says that the weights are quantized; training needs plain ones. '
            "Use the model's float32, bfloat16 or float16 release."
        )
    if _has_sliding_window(values, shape.num_layers):
        yield (
            f"{path}: a sliding window is in use; only full attention is supported. "
            'Set "use_sliding_window" to false, without "layer_types" of another kind.'
        )


def _has_sliding_window(values: dict[str, Any], num_layers: int) -> bool:
    kinds = values.get("layer_types")
    if isinstance(kinds, list):
        return any(kind != "full_attention" for kind in kinds)
    first = values.get("max_window_layers", 28)
    windowed = not isinstance(first, int) or first < num_layers
    return (
        bool(values.get("use_sliding_window")) and values.get("sliding_window", 4096) is not None and windowed
    )


# ---------------------------------------------------------------- weights


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
        weight_map = _read_json(index).get("weight_map")
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


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError that names the file."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError(f"larger than {_MAX_JSON_BYTES >> 20} MiB")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}. Copy or download it again.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}; needed: a JSON object.")
    return values
