"""The shape of a model by its Hugging Face config.json, and all that is wrong with the file.

The file is somebody else's: nothing in it is trusted to be there, of the right type or of a sane
size. Where a field may be left out, its value is the one that transformers takes. transformers' own
AutoConfig is not used: it has a default for nearly every field (a config.json without "vocab_size"
or "num_attention_heads" gets those of another model), takes sizes of 0 and unknown kinds of rotary
scaling, and stops at the first field of a wrong type.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlmath.checkpoint.hf.config_fields import Fields, shown
from rlmath.checkpoint.hf.config_positions import positions
from rlmath.checkpoint.hf.headers import weight_problems
from rlmath.checkpoint.hf.weight_map import (
    TABLES,
    VALUE_TABLES,
    has_experts,
    has_qk_norm,
    has_qkv_bias,
    has_value_head,
    model_type,
    value_architecture,
)
from rlmath.config.files import read_json_object
from rlmath.config.help import nearest_path, nearest_word, raise_problems
from rlmath.config.hub import PREFIX
from rlmath.config.model_shape import ModelShape
from rlmath.config.run_files import EXPORT_FOLDER, adapter_alone
from rlmath.config.shipped_files import shipped

_MAX_LAYERS = 4096
_MAX_EXPERTS = 4096
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w-]*(?:\.[\w-]+)*/[A-Za-z0-9][\w.-]*")
_OWN_FOLDERS = ("models", "model", "outputs", "output", "checkpoints", "weights", "runs", "data")
"""Names that people give to folders of their own; nobody on the hub has them."""
_WEIGHT_SUFFIXES = (".bin", ".pt", ".pth", ".gguf")
"""The weights of a model that has no index; beside an index it is read, and the index is not."""

_NOT_BUILT = {
    "Gemma": "no layer of Megatron's has its norms behind attention and network, nor its scalings",
    "Olmo": "no layer of Megatron's has its norms, behind attention and network alone and over "
    "all heads",
    "Phi3Small": "its attention is sparse by blocks",
    "PhiMoE": "its router is another one",
}
"""Why architectures that are often asked for are not supported, by how their names begin."""

PUBLISHED = shipped("configs/models")
"""<name of the model>.json, what gives the shape in a published config.json."""


TIED_BY_DEFAULT = ("SmolLM3ForCausalLM",)
"""Models whose output layer is the embedding unless config.json says otherwise.

These are the defaults of transformers."""


def read_shape(
    folder: Path, option: str = "model.path", known: Collection[str] = tuple(TABLES)
) -> tuple[ModelShape | None, list[str]]:
    """The shape that a folder's config.json gives, None if it gives none, and the file's problems.

    `known` are the allowed architectures."""
    path = folder / "config.json"
    if not path.is_file():
        text = f'"{folder}" has no config.json. {option} needs the folder of a Hugging Face model.'
        inside = folder / EXPORT_FOLDER
        if (inside / "config.json").is_file():
            text += f' It is the folder of a run: give "{inside}".'
        if (adapter := adapter_alone(folder)) is not None:
            text += (
                f' Give the adapters (LoRA) in "{adapter}" as model.adapter_path, beside '
                "their model."
            )
        return None, [text]
    return read_shape_file(path, known)


def read_shape_file(
    path: Path, known: Collection[str] = tuple(TABLES)
) -> tuple[ModelShape | None, list[str]]:
    """The shape that a config.json of any name gives, and its problems, as `read_shape`."""
    try:
        values = read_json_object(path)
    except ValueError as error:
        return None, [str(error)]
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        problem = (
            f'{path}: "architectures" is {names!r}; needed: a list such as '
            f'["{next(iter(TABLES))}"].'
        )
        return None, [problem]
    architecture = names[0]
    if architecture not in known:
        listed = ", ".join(known)
        hint = nearest_word(architecture, known)
        reason = next(
            (f" ({text})" for name, text in _NOT_BUILT.items() if architecture.startswith(name)), ""
        )
        problem = (
            f'{path}: the architecture "{architecture}" is not supported{reason}; supported: '
            f"{listed}.{hint}"
        )
        return None, [problem]
    fields = Fields(path, values)
    shape = _shape_from(architecture, fields)
    return (None if fields.problems else shape), [
        *fields.problems,
        *_unsupported(path, values, shape),
    ]


def _shape_from(architecture: str, fields: Fields) -> ModelShape:
    """The shape; a missing or wrong field is noted in `fields.problems`, and is 1 here."""
    hidden_size = fields.whole("hidden_size")
    num_heads = fields.whole("num_attention_heads")
    # A Qwen3's head dim does not follow from its other sizes.
    head_dim = fields.whole(
        "head_dim", default=None if has_qk_norm(architecture) else hidden_size // num_heads
    )
    num_kv_heads = num_heads
    if fields.values.get("num_key_value_heads", 0) is not None:
        num_kv_heads = fields.whole("num_key_value_heads")
    if num_heads % num_kv_heads:
        fields.note(
            f'"num_attention_heads" {num_heads} is not a multiple of "num_key_value_heads" '
            f"{num_kv_heads}"
        )
    num_layers = fields.whole("num_hidden_layers", most=_MAX_LAYERS)
    return ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=fields.whole(
            "moe_intermediate_size" if has_experts(architecture) else "intermediate_size"
        ),
        vocab_size=fields.whole("vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", default=architecture in TIED_BY_DEFAULT)
        and not has_value_head(architecture),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        attention_bias=has_qkv_bias(architecture),
        torch_dtype=fields.dtype(),
        qk_norm=has_qk_norm(architecture),
        **positions(model_type(architecture), fields, num_layers, head_dim),
        **(_experts_from(fields) if has_experts(architecture) else {}),
    )


def _experts_from(fields: Fields) -> dict[str, Any]:
    """The fields of `ModelShape` that concern experts."""
    # transformers 5 writes "num_local_experts" where 4 has "num_experts".
    names = ("num_local_experts", "num_experts")
    key = next((name for name in names if fields.values.get(name) is not None), names[1])
    experts = fields.whole(key, most=_MAX_EXPERTS)
    picked = fields.whole("num_experts_per_tok", most=_MAX_EXPERTS)
    scaled = fields.flag("norm_topk_prob")
    if picked == 1 and scaled and not fields.problems:
        fields.note(
            '"num_experts_per_tok" is 1 and "norm_topk_prob" true: the router could learn nothing'
        )
    return {"num_experts": experts, "experts_per_token": picked, "norm_topk_prob": scaled}


def _unsupported(path: Path, values: dict[str, Any], shape: ModelShape) -> Iterator[str]:
    """Problems of a config.json that asks for computations which this program does not support."""
    needed_type = model_type(shape.architecture)
    if values.get("model_type") != needed_type:
        yield (
            f'{path}: "model_type" is {values.get("model_type")!r}; {shape.architecture} needs '
            f'"{needed_type}".'
        )
    auto_map = values.get("auto_map") or {}
    own_code = auto_map.get("AutoModelForCausalLM") if isinstance(auto_map, dict) else auto_map
    if own_code is not None and str(own_code).rpartition(".")[2] != shape.architecture:
        yield (
            f'{path}: "auto_map" asks for code of the model\'s own, {shown(own_code)}, which is '
            "never run. Take it out "
            f"where the model is a {shape.architecture} of transformers."
        )
    if values.get("hidden_act", "silu") != "silu":
        yield f'{path}: "hidden_act" is {values["hidden_act"]!r}; supported: "silu".'
    # A Qwen2 has biases whatever "attention_bias" is, the others only where it asks for them.
    for key in ("mlp_bias",) if shape.attention_bias else ("attention_bias", "mlp_bias"):
        if values.get(key) not in (None, False):
            yield (
                f'{path}: "{key}" is {values[key]!r}; a {shape.architecture} is supported without '
                "such biases only."
            )
    for key in ("dual_chunk_attention_config", "llama_4_scaling", "logit_scale"):
        if values.get(key) is not None:
            yield (
                f'{path}: "{key}" is read by vLLM, and not by transformers or this program. '
                "Take it out."
            )
    if values.get("quantization_config") is not None:
        yield (
            f'{path}: "quantization_config" says that the weights are quantized; training needs '
            "plain ones. "
            "Use the model's float32, bfloat16 or float16 release."
        )
    # Every layer must have experts. Nothing balances their load: "router_aux_loss_coef" is for
    # pretraining.
    for key, allowed in (("mlp_only_layers", (None, [])), ("decoder_sparse_step", (1,))):
        value = values.get(key, allowed[-1])
        if shape.num_experts and value not in allowed:
            yield (
                f'{path}: "{key}" is {value!r}; supported are models whose layers all have '
                "experts: needed is "
                f"{allowed[-1]}."
            )


# ------------------------------------------------------ the folder: config.json, weights, tokenizer


def read_model_shape(folder: Path, option: str = "model.path") -> ModelShape:
    """The shape that config.json gives; ValueError that lists what is wrong with it.

    `option` names the folder."""
    if not os.path.exists(folder):
        raise ValueError(missing_folder_problem(folder, option))
    return sound_shape(f'the model "{folder}"', *read_shape(folder, option))


def sound_shape(source: str, shape: ModelShape | None, problems: Sequence[str]) -> ModelShape:
    """The shape; ValueError that lists the problems where there are some."""
    raise_problems(source, list(problems))
    assert shape is not None
    return shape


def inspect_model_folder(
    folder: Path, option: str = "model.path"
) -> tuple[ModelShape | None, list[str]]:
    """The shape, None if config.json does not give one, and the folder's problems.

    `option` is the setting that names the folder."""
    shape, problems = _inspected(folder, option, tuple(TABLES))
    return shape, [*problems, *(_tokenizer_problems(folder) if folder.is_dir() else ())]


def _inspected(
    folder: Path, option: str, known: Collection[str]
) -> tuple[ModelShape | None, list[str]]:
    """The shape, and what is wrong with config.json and weights."""
    if not os.path.exists(folder):
        return None, [missing_folder_problem(folder, option)]
    if not folder.is_dir():
        return None, [
            f'{option}: "{folder}" is not a folder. Give the folder that holds config.json.'
        ]
    shape, problems = read_shape(folder, option, known)
    return shape, [*problems, *weight_problems(folder, shape)]


def critic_shape(start: ModelShape, policy: ModelShape) -> ModelShape:
    """The shape of the critic that starts from a model of shape `start`.

    It has a value head in place of the output layer, and a row of the embedding for every token
    that the policy has; rows that `start` lacks are zeros."""
    return replace(
        start,
        architecture=value_architecture(start.architecture),
        tied_embeddings=False,
        vocab_size=max(start.vocab_size, policy.vocab_size),
    )


def read_critic_shape(path: Path) -> ModelShape:
    """The shape that a critic's config.json gives; ValueError where it gives none."""
    return sound_shape(f'the critic "{path}"', *read_shape_file(path, tuple(VALUE_TABLES)))


def critic_config_file(folder: Path, shape: ModelShape) -> bytes:
    """The config.json of a critic of this shape that started from the model in a folder."""
    values = read_json_object(folder / "config.json") | {
        "architectures": [shape.architecture],
        "tie_word_embeddings": False,
        "vocab_size": shape.vocab_size,
        "id2label": {"0": "value"},
        "label2id": {"value": 0},
    }
    return (json.dumps(values, indent=2) + "\n").encode()


def inspect_critic_folder(folder: Path, policy: ModelShape) -> tuple[ModelShape | None, list[str]]:
    """`critic_shape` of the model in a folder, with or without a value head, and its problems."""
    start, problems = _inspected(folder, "critic.path", (*TABLES, *VALUE_TABLES))
    return (None if start is None else critic_shape(start, policy)), problems


def check_loadable(folder: Path) -> None:
    """ValueError that lists the problems of weights and tokenizer of a folder with a config.json.

    The model may be of a kind that this program does not train: then the shapes of its tensors are
    not known."""
    shape, unsupported = read_shape(folder)
    problems = weight_problems(folder, None if unsupported else shape)
    raise_problems(f'the model "{folder}"', [*problems, *_tokenizer_problems(folder)])


def _tokenizer_problems(folder: Path) -> Iterator[str]:
    has_vocabulary = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not has_vocabulary and not (folder / "tokenizer.json").is_file():
        yield (
            f'"{folder}" has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt. '
            "Copy the tokenizer files of the model there."
        )


def missing_folder_problem(folder: Path, option: str = "model.path") -> str:
    """The problem that the folder which `option` names is missing, and what to do.

    For a name of the hub it says how the model is downloaded."""
    name = hub_name(folder)
    if name is None:
        return f'{option}: there is no folder "{folder}".{nearest_path(folder)}'
    place = f"models/{folder.name}"
    return (
        f'{option}: there is no folder "{folder}". It looks like a name of the Hugging Face hub, '
        "which is written "
        f'{PREFIX}{name}. Give that, or run "hf download {name} --local-dir {place}" and give '
        f"{option} {place}."
    )


def hub_name(folder: Path) -> str | None:
    """The name on the hub that a missing path must be, such as Qwen/Qwen2.5-0.5B.

    None if it may be a folder."""
    name = str(folder)
    is_one = _HUB_NAME.fullmatch(name) and folder.parts[0].lower() not in _OWN_FOLDERS
    return name if is_one and not os.path.exists(folder.parent) else None


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights.

    A folder without them has the config.json, and perhaps the tokenizer, of a model that lies
    elsewhere."""
    names = os.listdir(folder) if os.access(folder, os.R_OK) else []
    return any(name.endswith(_WEIGHT_SUFFIXES) or ".safetensors" in name for name in names)


# ---------------------------------------------------------------- a model that is not there


@dataclass(frozen=True)
class PlannedShape:
    """A model's shape, as far as it is known, and where it is from."""

    shape: ModelShape | None
    problems: list[str]
    note: str
    """A line for the console about a shape that is not the folder's own; else ""."""


def planned_shape(model_path: str, option: str = "model.path") -> PlannedShape:
    """The shape of the folder's config.json, or the published one if there is no such folder.

    Weights and tokenizer need not be there. `option` names the folder."""
    folder = Path(model_path)
    if os.path.exists(folder):
        return PlannedShape(*read_shape(folder, option), "")
    published = published_names()
    if folder.name in published:
        file = PUBLISHED / f"{folder.name}.json"
        note = (
            f'There is no folder "{folder}": planned with the published shape of {folder.name}, '
            f"configs/models/{file.name}."
        )
        return PlannedShape(*read_shape_file(file), note)
    names = (
        f" Shapes are known of {', '.join(published)}.{nearest_word(folder.name, published)}"
        if published
        else ""
    )
    problem = f'{option}: there is no folder "{folder}".{nearest_path(folder)}{names}'
    return PlannedShape(None, [problem], "")


def required_shape(model_path: str) -> tuple[ModelShape, str]:
    """The shape and its note; ValueError that lists the model's problems."""
    planned = planned_shape(model_path)
    return sound_shape(f'the model "{model_path}"', planned.shape, planned.problems), planned.note


def published_names() -> list[str]:
    """Models whose shape is in configs/models."""
    return sorted(path.name.removesuffix(".json") for path in PUBLISHED.glob("*.json"))
