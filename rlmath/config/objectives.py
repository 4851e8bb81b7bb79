"""The objectives that `algorithm.loss` names: their settings, and what checks know about them.

What an objective needs stands here and in `algorithms.losses`, which has its formula; its preset is
configs/algorithms/NAME.yaml. docs/algorithm.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlmath.config.setting_types import PositiveFloat, PositiveFraction, Range

FIRST_RATIO = "Before the first update the ratio is 1."
RatioAboveOne = Annotated[float, Range(1, open_low=True, why=FIRST_RATIO)]

LossKind = Literal["clip", "gspo", "cispo", "gmpo", "sapo", "dppo_tv", "dppo_kl"]


@dataclass(frozen=True)
class ObjectiveSettings:
    """The objective and its settings, which are a part of `AlgorithmConfig`."""

    loss: LossKind = "clip"
    """"clip": PPO's clipped surrogate on single tokens; "gspo": on whole completions; "cispo":
    clipped weights of the policy gradient; "gmpo": geometric mean of clipped ratios
    (arXiv:2507.20673); "sapo": a soft gate (arXiv:2511.20347); "dppo_tv", "dppo_kl": masks by total
    variation or KL of the token (arXiv:2602.04879)."""
    clip_ratio: PositiveFraction = 0.2
    """The importance ratio is clipped below 1 - clip_ratio, and above 1 + clip_ratio where
    clip_ratio_high is null. Of loss=gmpo the bounds are of the ratio's log, of dppo_tv and dppo_kl
    of the divergence."""
    clip_ratio_high: PositiveFloat | None = None
    """The importance ratio is clipped above 1 + clip_ratio_high (DAPO's clip-higher). null:
    clip_ratio."""
    dual_clip: RatioAboveOne | None = None
    """Largest importance ratio that counts where the advantage is negative, with loss=dppo_*
    whatever it is (AReaL: c_clip, verl: clip_ratio_c). null: no bound."""
    sapo_temperature_pos: PositiveFloat = 1.0
    """loss=sapo: temperature of the gate where the advantage is above 0 (arXiv:2511.20347)."""
    sapo_temperature_neg: PositiveFloat = 1.05
    """loss=sapo: temperature of the gate where it is not: a larger one shuts it sooner
    (arXiv:2511.20347)."""


@dataclass(frozen=True)
class UsualRange:
    """Range in which a setting means something with an objective: other values are doubted."""

    name: str
    low: float
    high: float
    usual: str
    """Usual values, as text."""


@dataclass(frozen=True)
class Objective:
    """What checks know about an objective, beside the types of its settings."""

    settings: Sequence[str]
    """Names of the settings that it reads: others have no effect with it."""
    ranges: Sequence[UsualRange] = ()
    doubts: Mapping[str, Callable[[ObjectiveSettings], list[object]]] = field(default_factory=dict)
    """Doubtful combinations: what the user reads, and the conditions that must all hold.

    They are like `Doubt.text` and `Rule.when` in `planning.setting_rules`."""
    clips_whole_completions: bool = False
    """Whether a clip takes all tokens of a completion, so that large shares are usual."""


BOUNDS = ("clip_ratio", "clip_ratio_high")
DPPO = Objective([*BOUNDS, "dual_clip"], [UsualRange("clip_ratio_high", 1e-4, 1, usual="0.15")])

OBJECTIVES: Mapping[LossKind, Objective] = {
    "clip": Objective([*BOUNDS, "dual_clip"]),
    "gspo": Objective(
        [*BOUNDS, "dual_clip"],
        [UsualRange("clip_ratio_high", 1e-5, 0.1, usual="4e-4")],
        {
            "algorithm.clip_ratio={algorithm.clip_ratio:g} hardly ever clips the mean ratio of a "
            "completion; GSPO's paper has 3e-4, and 4e-4 for algorithm.clip_ratio_high.": (
                lambda settings: [settings.clip_ratio > 0.01]
            )
        },
        clips_whole_completions=True,
    ),
    "cispo": Objective(BOUNDS, [UsualRange("clip_ratio_high", 1e-2, 10, usual="0.3 to 5")]),
    "gmpo": Objective(
        BOUNDS,
        [UsualRange("clip_ratio_high", 1e-2, 2, usual="0.4")],
        {
            "algorithm.clip_ratio=0.2 bounds the log of a token's ratio with "
            "algorithm.loss=gmpo; its paper has 0.4.": (
                lambda settings: [settings.clip_ratio == 0.2, not settings.clip_ratio_high]
            )
        },
    ),
    "sapo": Objective(
        ["sapo_temperature_pos", "sapo_temperature_neg"],
        [
            UsualRange("sapo_temperature_pos", 0.1, 10, usual="1"),
            UsualRange("sapo_temperature_neg", 0.1, 10, usual="1.05"),
        ],
    ),
    "dppo_tv": DPPO,
    "dppo_kl": DPPO,
}
"""Every objective by its word."""
