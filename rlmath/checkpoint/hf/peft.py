"""LoRA adapters as PEFT's folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmath.checkpoint.hf.headers import (
    ADAPTER_FILE,
    model_fingerprint,
    read_header,
    tensor_problems,
)
from rlmath.checkpoint.hf.weight_map import BUFFER_RANKS, adapter_rules, hf_tensors
from rlmath.config.files import read_json_object
from rlmath.config.help import nearest_path
from rlmath.config.hub import is_hub_id, parse_hub_id
from rlmath.config.model_shape import ModelShape
from rlmath.config.run_files import ADAPTER_CONFIG
from rlmath.config.schema import LoraConfig
from rlmath.config.terminal import visible

if TYPE_CHECKING:
    from torch import Tensor

_SAME_MODEL = """
auto_mapping base_model_name_or_path eva_config exclude_modules inference_mode init_lora_weights layers_pattern
layers_to_transform lora_alpha lora_dropout megatron_core peft_type peft_version qalora_group_size r revision
runtime_config target_modules task_type
""".split()
"""Fields whose value does not change what the tensors mean, or is compared.

Any other field must be off."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of values of `init_lora_weights` that change weights of the base model, too."""


def adapter_files(
    tensors: Mapping[str, Tensor], lora: LoraConfig, shape: ModelShape, base: str
) -> dict[str, bytes]:
    """The files of a folder with the adapters that `lora` makes for a model, by name.

    `base` is the model's `model.path`, or its id on the hub."""
    from safetensors.torch import save

    hub = parse_hub_id(base, "model.path") if is_hub_id(base) else None
    values: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": os.path.abspath(base) if hub is None else hub.repo,
        "revision": None if hub is None else hub.commit or hub.revision or None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(_modules(lora, shape)),
        "bias": "none",
        "inference_mode": True,
    }
    config = (json.dumps(values, indent=2) + "\n").encode()
    return {ADAPTER_CONFIG: config, ADAPTER_FILE: save(dict(tensors), metadata={"format": "pt"})}


def _modules(lora: LoraConfig, shape: ModelShape) -> set[str]:
    """Names of the adapted linear layers, without what stands before them."""
    rules = adapter_rules(shape.architecture, lora.rank, lora.target)
    return {name.split(".")[-3] for rule in rules for name in rule.hf}


def adapter_problems(folder: Path, lora: LoraConfig, shape: ModelShape) -> Iterator[str]:
    """Why training cannot begin with the folder that `model.adapter_path` names.

    Reads headers, no tensor."""
    setting = f'model.adapter_path "{folder}"'
    if not folder.is_dir():
        yield f"{setting}: there is no such folder.{nearest_path(folder)}"
        return
    if not (folder / ADAPTER_FILE).is_file():
        yield (
            f"{setting} has no {ADAPTER_FILE}. Give a folder that PEFT's save_pretrained wrote "
            "(no pickle, .bin)."
        )
        return
    try:
        config = read_json_object(folder / ADAPTER_CONFIG)
        headers = read_header(folder / ADAPTER_FILE)
    except ValueError as error:
        yield f"model.adapter_path: {error}"
        return
    problems = list(_config_problems(config, lora, shape))
    if not problems:  # else the tensors differ, too
        rules = adapter_rules(shape.architecture, lora.rank, lora.target)
        problems += tensor_problems(folder, shape, headers, rules)
        if unknown_names := sorted({*headers} - {*hf_tensors(shape, rules)}):
            first_names = ", ".join(unknown_names[:3])
            problems.append(
                f"{len(unknown_names)} tensors of {ADAPTER_FILE} are no adapters of this model: "
                f"{first_names}."
            )
    for problem in problems:
        yield f"{setting}: {problem}"


def engine_problems(folder: Path, shape: ModelShape) -> Iterator[str]:
    """Why an engine cannot take the adapters of a PEFT folder, which any tool may have made.

    They may be of some matrices alone. Reads headers, no tensor."""
    try:
        config = read_json_object(folder / ADAPTER_CONFIG)
        headers = read_header(folder / ADAPTER_FILE)
    except ValueError as error:
        yield str(error)
        return
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if (
        config.get("peft_type") != "LORA"
        or type(rank) is not int
        or not 1 <= rank <= BUFFER_RANKS[-1]
    ):
        yield (
            f'"{folder}": "peft_type" is {config.get("peft_type")!r} and "r" is {rank!r}; needed: '
            f'"LORA" and a rank from 1 to {BUFFER_RANKS[-1]}.'
        )
        return
    if type(alpha) not in (int, float) or not abs(alpha) <= sys.float_info.max:
        yield f'"{folder}": "lora_alpha" is {alpha!r:.40}; needed: a finite number.'
    if not config.get("target_modules"):
        yield (
            f'"{folder}": "target_modules" in {ADAPTER_CONFIG} is missing or empty; needed: the '
            "names of the layers that have adapters."
        )
    for problem in _unsupported_fields(config):
        yield f'"{folder}": {problem}'
    expected = hf_tensors(shape, adapter_rules(shape.architecture, rank, "all"))
    wrong_names = [
        name
        for name, header in sorted(headers.items())
        if header.shape != expected.get(name) or _other_matrix(name) not in headers
    ]
    if wrong_names or not headers:
        yield (
            f'"{folder}": {len(wrong_names)} of {len(headers)} tensors are no A and B of rank '
            f"{rank} for a matrix of this model: {', '.join(wrong_names[:3])}."
        )


def _other_matrix(name: str) -> str:
    """The name of B for that of A, and the other way round."""
    other = {"A": "B", "B": "A"}
    return re.sub(r"(?<=\.lora_)[AB](?=\.)", lambda matrix: other[matrix[0]], name)


def base_folder(folder: Path) -> Path:
    """The folder of the model that a PEFT folder's adapters belong to.

    ValueError where it is not on this machine."""
    named = read_json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not (Path(named) / "config.json").is_file():
        raise ValueError(
            f'"{folder}" has adapters (LoRA) without their model: "base_model_name_or_path" in its '
            f"{ADAPTER_CONFIG} is {visible(str(named))!r:.200}, and that is no folder of a model "
            "here. Put such a folder there, or edit that field to name a local folder of the "
            "model; or give the folder of the adapters' run or a whole model (PEFT: "
            "merge_and_unload)."
        )
    return Path(named)


def other_base_warnings(adapter: str | None, model: str) -> Iterator[str]:
    """A warning if the folder `adapter` (`model.adapter_path`) names another base than `model`.

    There is none if that base is known to be a copy of `model`, which is `model.path`."""
    if adapter is None:
        return
    try:
        named = read_json_object(Path(adapter) / ADAPTER_CONFIG).get("base_model_name_or_path")
    except ValueError:
        return  # `adapter_problems` says so
    if not isinstance(named, str) or not named or _names_of(named) & _names_of(model):
        return
    folder = Path(named)
    with suppress(OSError, ValueError):
        is_here = (folder / "config.json").is_file() and (Path(model) / "config.json").is_file()
        if is_here and model_fingerprint(folder) == model_fingerprint(model):
            return
    yield (
        f'model.adapter_path "{adapter}" has adapters that were trained on '
        f"{visible(named)!r:.200}, and model.path is "
        f'"{model}": on another model of the same shapes they mean nothing. Go on only where both '
        "are the same model."
    )


def _names_of(model: str) -> set[str]:
    """Names of a model by its path or its id on the hub.

    They are the last part and, for a path in the hub's cache, that of the id.

    >>> sorted(_names_of("/home/me/models--Qwen--Qwen3-8B/snapshots/0123/")), _names_of("hf://Qwen/qwen3-8b@main")
    (['0123', 'qwen3-8b'], {'qwen3-8b'})
    """
    text = re.sub(r"@.*", "", model) if is_hub_id(model) else model
    parts = [part for part in text.casefold().split("/") if part not in ("", ".")]
    cached = [part.rpartition("--")[2] for part in parts if part.startswith("models--")]
    return {*parts[-1:], *cached}


def _config_problems(config: dict[str, Any], lora: LoraConfig, shape: ModelShape) -> Iterator[str]:
    """Fields of an adapter_config.json that differ from the run's settings or are not supported."""
    modules = config.get("target_modules")
    needed_modules = _modules(lora, shape)
    names = (
        {str(name).split(".")[-1] for name in modules}
        if isinstance(modules, list)
        else needed_modules
    )
    for field, stated, expected in (
        ("peft_type", config.get("peft_type"), "LORA"),
        ("r", config.get("r"), lora.rank),
        ("lora_alpha", config.get("lora_alpha"), lora.alpha),
        ("target_modules", sorted(names), sorted(needed_modules)),
    ):
        if stated != expected:
            yield (
                f'"{field}" is {stated!r}; needed, by lora.rank, lora.alpha and lora.target: '
                f"{expected!r}."
            )
    yield from _unsupported_fields(config)


def _unsupported_fields(config: dict[str, Any]) -> Iterator[str]:
    """Fields of an adapter_config.json that are not supported."""
    for field, value in sorted(config.items()):
        if value and value != "none" and field not in _SAME_MODEL:
            yield (
                f'"{field}" is {json.dumps(value):.80}, which is not supported: needed is an '
                "adapter without it."
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        yield (
            f'"init_lora_weights" is "{start}", which changes the weights of the model, too: '
            "needed is an adapter for "
            "the model as it is."
        )
