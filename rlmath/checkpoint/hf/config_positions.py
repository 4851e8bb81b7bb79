"""Positions by a config.json: rotary embeddings, their stretching, and sliding windows.

Both forms are read, "rope_parameters" of transformers 5 and "rope_theta" with "rope_scaling" of
transformers 4. What transformers and vLLM read differently is refused: the engine would not sample
from the model that is trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlmath.checkpoint.hf.config_fields import Fields, shown
from rlmath.config.model_shape import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
)

_FULL = "full_attention"
_SLIDING = "sliding_attention"


def positions(model_type: str, fields: Fields, num_layers: int, head_dim: int) -> dict[str, Any]:
    """The fields of `ModelShape` that concern positions.

    Anything wrong or not supported is noted in `fields`."""
    max_positions = fields.whole("max_position_embeddings")
    rotary_dim = _rotary_dim(model_type, fields, head_dim)
    scaling = _rope_scaling(model_type, fields, rotary_dim or head_dim)
    if isinstance(scaling, LongRopeScaling):
        max_positions = min(max_positions, _original_positions(fields))
    return {
        "max_positions": max_positions,
        "rope_theta": _rope_theta(fields),
        "rope_scaling": scaling,
        "rotary_dim": rotary_dim,
        "no_rope_layers": _no_rope_layers(fields, num_layers) if model_type == "smollm3" else (),
        **_windows(model_type, fields, num_layers, max_positions),
    }


# ---------------------------------------------------------------- rotary embeddings


_KINDS = ("default", "linear", "llama3", "yarn")
_PHI3_KINDS = ("default", "longrope")
_DYNAMIC = (
    " While a text grows, transformers changes the angles of all its tokens, and vLLM never does."
)


def _rope_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings that count.

    As in transformers, those under the older name hide those under the newer."""
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(values.get(key), dict) and values[key]:
            return values[key]
    return {}


def _rope_theta(fields: Fields) -> float:
    rope = _rope_settings(fields.values)
    return fields.positive("rope_theta", rope if "rope_theta" in rope else None)


def _rope_kind(rope: Any) -> Any:
    return rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope


def _rope_scaling(model_type: str, fields: Fields, rotary_dim: int) -> RopeScaling | None:
    """The scaling of rotary embeddings; None if they are plain."""
    kinds = _PHI3_KINDS if model_type == "phi3" else _KINDS
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.values.get(key)
        kind = _rope_kind(rope)
        if kind is not None and kind not in (kinds if isinstance(rope, dict) else ("default",)):
            fields.note(
                f'"{key}" asks for {shown(kind)}; supported of a {model_type}: settings of the '
                "type "
                f"{', '.join(kinds)}.{_DYNAMIC if kind == 'dynamic' else ''} Set it to null to "
                "train within the "
                "original positions, or take another type"
            )
        if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):
            fields.note(
                f'"{key}" differs from layer to layer; supported are settings that all layers share'
            )
    rope = _rope_settings(fields.values)
    match None if fields.problems else _rope_kind(rope):
        case "linear":
            return _linear(fields, rope)
        case "llama3":
            return _llama3(fields, rope)
        case "yarn":
            return _yarn(fields, rope)
        case "longrope":
            return _longrope(fields, rope, rotary_dim)
    return None


def _original_positions(fields: Fields) -> int:
    """Longest sequence before rotary embeddings were stretched.

    It stands beside the rotary settings (Phi-3), or among them."""
    key = "original_max_position_embeddings"
    values = fields.values
    default = 4096
    if key not in values and values.get("model_type") != "phi3":
        default = values.get("max_position_embeddings")
        values = _rope_settings(values)
    return fields.whole(key, default=default, values=values)


def _linear(fields: Fields, rope: dict[str, Any]) -> LinearScaling:
    factor = fields.positive("factor", rope)
    if not fields.problems and not isinstance(rope["factor"], float):
        fields.note(f'"factor" is {rope["factor"]}; vLLM takes it with a point only: {factor}')
    return LinearScaling(factor)


def _llama3(fields: Fields, rope: dict[str, Any]) -> Llama3Scaling:
    factor, low_factor, high_factor = (
        fields.positive(name, rope) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if high_factor <= low_factor and not fields.problems:
        fields.note(
            f'"high_freq_factor" is {high_factor}; needed: more than "low_freq_factor", '
            f"{low_factor}"
        )
    return Llama3Scaling(
        factor, low_factor, high_factor, original_max_positions=_original_positions(fields)
    )


def _yarn(fields: Fields, rope: dict[str, Any]) -> YarnScaling:
    factor = fields.positive("factor", rope)
    original = _original_positions(fields)
    beta_fast = fields.positive("beta_fast", rope, 32.0)
    beta_slow = fields.positive("beta_slow", rope, 1.0)
    scales = [
        fields.positive(name, rope) for name in ("mscale", "mscale_all_dim") if rope.get(name)
    ]
    if rope.get("attention_factor") is not None:
        magnitude = fields.positive("attention_factor", rope)
    elif len(scales) == 2:
        magnitude = _yarn_magnitude(factor, scales[0]) / _yarn_magnitude(factor, scales[1])
    else:
        magnitude = _yarn_magnitude(factor, 1.0)
    longest = fields.whole("max_position_embeddings")
    theta = _rope_theta(fields)
    if longest > factor * original and not fields.problems:
        fields.note(
            f'"max_position_embeddings" is {longest}; YaRN reaches "factor" {factor:g} x '
            f"{original} original "
            "positions, and so far goes vLLM's table. Lower it, or raise the factor"
        )
    if theta <= 1 and not fields.problems:
        fields.note(f'"rope_theta" is {theta}; YaRN needs more than 1')
    truncate = fields.flag("truncate", rope, default=True)
    return YarnScaling(
        factor,
        beta_fast,
        beta_slow,
        original_max_positions=original,
        attention_factor=magnitude,
        truncate=truncate,
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(fields: Fields, rope: dict[str, Any], rotary_dim: int) -> LongRopeScaling:
    original = _original_positions(fields)
    longest = fields.whole("max_position_embeddings")
    factor = max(1.0, longest / original)
    magnitude = (
        math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    )
    for key, computed in (("factor", factor), ("attention_factor", magnitude)):
        if rope.get(key) is not None and not math.isclose(
            fields.positive(key, rope), computed, rel_tol=1e-6
        ):
            fields.note(
                f'"{key}" of longrope is {rope[key]}; vLLM computes {computed:g}. Take it out'
            )
    for key in ("short_mscale", "long_mscale"):
        if rope.get(key) is not None:
            fields.note(
                f'"{key}" of longrope is read by vLLM, and not by transformers. Take it out'
            )
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        fields.note(
            f'"short_factor" is {shown(factors)}; needed: a list of {rotary_dim // 2} numbers'
        )
        factors = []
    numbers = tuple(fields.positive("short_factor", {"short_factor": factor}) for factor in factors)
    return LongRopeScaling(numbers, magnitude, longest)


def _rotary_dim(model_type: str, fields: Fields, head_dim: int) -> int | None:
    """Dimensions of a head that are rotated; None: all."""
    key = "partial_rotary_factor"
    shares = [settings.get(key) for settings in (_rope_settings(fields.values), fields.values)]
    share = next((share for share in shares if share is not None), 1.0)
    if share == 1.0:
        return None
    if model_type != "phi3":
        fields.note(
            f'"{key}" is {shown(share)}; of a {model_type}, all of a head is rotated: needed is 1.0'
        )
        return None
    dim = int(head_dim * min(1.0, fields.positive(key, {key: share})))
    if not fields.problems and (dim % 2 or not 0 < dim < head_dim):
        fields.note(f'"{key}" is {share}; needed: an even number of the {head_dim} dims of a head')
    return dim


def _no_rope_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Layers that do not rotate: those of 0 in "no_rope_layers", or every fourth one."""
    flags = fields.values.get("no_rope_layers")
    if flags is None:
        interval = fields.whole("no_rope_layer_interval", default=4)
        return tuple(range(interval - 1, num_layers, interval))
    if (
        not isinstance(flags, list)
        or len(flags) != num_layers
        or not all(flag in (0, 1) for flag in flags)
    ):
        fields.note(
            f'"no_rope_layers" is {shown(flags)}; needed: 1 or 0 for each of {num_layers} layers'
        )
        return ()
    return tuple(layer for layer, flag in enumerate(flags) if not flag)


# ---------------------------------------------------------------- sliding windows


@dataclass(frozen=True)
class _Windows:
    """The sliding windows of models of a type."""

    default: int | None
    """The window of transformers if config.json has none."""
    has_switch: bool = False
    """Whether there is a window only with "use_sliding_window"."""
    by_layer: bool = False
    """Whether some layers alone have it: those of "layer_types", or from "max_window_layers" on."""


_WINDOWS = {
    "qwen2": _Windows(4096, has_switch=True, by_layer=True),
    "qwen3": _Windows(4096, has_switch=True, by_layer=True),
    "qwen3_moe": _Windows(4096, has_switch=True),
    "mistral": _Windows(4096),
    "phi3": _Windows(None),
}
"""The windows by `model_type`."""
_NO_WINDOWS = _Windows(None)
"""Models of other types: those of transformers have none."""


def _windows(
    model_type: str, fields: Fields, num_layers: int, max_positions: int
) -> dict[str, Any]:
    """The window, where it is shorter than the longest text, and the layers without one."""
    windows = _WINDOWS.get(model_type, _NO_WINDOWS)
    kinds = _layer_kinds(fields, num_layers)
    is_off = (windows.has_switch or model_type == "smollm3") and not fields.flag(
        "use_sliding_window"
    )
    if is_off or fields.values.get("sliding_window", windows.default) is None:
        if kinds and _SLIDING in kinds:
            fields.note(f'"layer_types" has "{_SLIDING}", and there is no sliding window in use')
        return {}
    window = fields.whole("sliding_window", default=windows.default)
    is_shorter = window < max_positions
    if is_shorter and windows is _NO_WINDOWS:
        fields.note(
            f'"sliding_window" is {window}; a {model_type} of transformers has none, and one of '
            "vLLM's would. Needed: "
            f"null, or as many as there are positions ({max_positions})"
        )
    if is_shorter and not windows.by_layer and kinds and _FULL in kinds:
        fields.note(
            f'"layer_types" has "{_FULL}" beside "sliding_window" {window}: a {model_type} of '
            "transformers has the "
            "window in all layers, one of vLLM's not. Take out one of the two"
        )
    if windows.by_layer and kinds is None:
        first_layer = fields.whole("max_window_layers", default=28, least=0)
        kinds = [_SLIDING if layer >= first_layer else _FULL for layer in range(num_layers)]
    full = tuple(
        layer for layer in range(num_layers) if windows.by_layer and kinds and kinds[layer] == _FULL
    )
    if len(full) == num_layers:
        return {}
    return {"sliding_window": window if is_shorter else None, "full_attention_layers": full}


def _layer_kinds(fields: Fields, num_layers: int) -> list[str] | None:
    """The attention of every layer; None where config.json does not say."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        return None
    if (
        isinstance(kinds, list)
        and len(kinds) == num_layers
        and all(k in (_FULL, _SLIDING) for k in kinds)
    ):
        return kinds
    fields.note(
        f'"layer_types" is {shown(kinds)}; needed: "{_FULL}" or "{_SLIDING}" for each of '
        f"{num_layers} layers"
    )
    return None
