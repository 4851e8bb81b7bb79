"""Numbers that a run may have, and that hardly anybody means.

They are slips of the comma, or another setting's value. They are no errors, and are named at the
start. What is sensible covers, with room, what papers and trainers take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from rlmath.config.objectives import OBJECTIVES
from rlmath.config.schema import Config
from rlmath.planning.setting_rules import Condition, check_row


@dataclass(frozen=True)
class SensibleRange:
    """Range in which a setting means something, from `low` to `high`."""

    key: str
    low: float
    high: float = math.inf
    usual: str = ""
    """Usual values, as text."""
    zero: bool = False
    """Whether 0 is sensible, too: it turns something off."""
    when: Condition = field(default=lambda _config: [], repr=False)
    """Condition of the runs that the range is for; without one, all."""

    def __post_init__(self) -> None:
        check_row(self, self.when, keys=[self.key])

    def doubt(self, config: Config, note: str = "") -> str | None:
        """The problem of the setting's value.

        None where there is none, where it is not set, or where this is no such run."""
        number = attrgetter(self.key)(config)
        if number is None or self.low <= number <= self.high or (self.zero and number == 0):
            return None
        if not all(self.when(config)):
            return None
        sensible = (
            f"at least {self.low:g}" if self.high == math.inf else f"{self.low:g} to {self.high:g}"
        )
        off = ", or 0 for none" if self.zero else ""
        usual = f"; usual is {self.usual}" if self.usual else ""
        return (
            f"{self.key}={number:g} is legal, and hardly what you mean{note}: sensible is "
            f"{sensible}{off}{usual}."
        )


def loss_clips(config: Config) -> list[object]:
    """Whether the clip is what bounds the policy.

    Clip-Cov and KL-Cov bound it in the clip's place, which is set wide open for them."""
    algorithm = config.algorithm
    return [algorithm.loss == "clip", not algorithm.clip_cov_ratio, not algorithm.kl_cov_ratio]


def loss_is(kind: str) -> Condition:
    return lambda config: [config.algorithm.loss == kind]


def optimizer_is(kind: str) -> Condition:
    return lambda config: [config.optimizer.kind == kind]


SENSIBLE = (
    SensibleRange("optimizer.lr", 1e-8, 10, when=optimizer_is("sgd")),
    SensibleRange("optimizer.weight_decay", 0, 1, "0 to 0.1"),
    SensibleRange("optimizer.adam_beta1", 0.5, 0.99, "0.9"),
    SensibleRange("optimizer.adam_beta2", 0.8, 0.9999, "0.95 to 0.999"),
    SensibleRange("optimizer.adam_eps", 1e-16, 1e-3, "1e-8"),
    SensibleRange("optimizer.clip_grad", 1e-3, 100, "1", zero=True),
    SensibleRange("lora.rank", 0, 512, "8 to 64"),
    SensibleRange("lora.alpha", 1, 2048, "16 to 64"),
    SensibleRange("rollout.temperature", 0.2, 2, "0.6 to 1.2"),
    SensibleRange("rollout.max_new_tokens", 8),
    SensibleRange("rollout.group_size", 1, 1024, "8 to 64"),
    SensibleRange("rollout.max_staleness", 0, 64, "1 to 8"),
    SensibleRange("validation.temperature", 0, 2, "0 to 1"),
    SensibleRange("sync.probe_threshold", 1e-6, 5, "0.2"),
    SensibleRange("reward.output_scaling", 1e-3, 100, "1 to 5"),
    SensibleRange("reward.output_bias", -10, 10, "0"),
    SensibleRange("reward.format_penalty", -10, 0, "-1"),
    SensibleRange("reward.length_penalty", 0, 10, "up to 1"),
    SensibleRange("reward.overlong_penalty", 0, 10, "1"),
    SensibleRange("reward.timeout_seconds", 0.01),
    SensibleRange("algorithm.advantage_eps", 0, 0.1, "1e-6"),
    SensibleRange("algorithm.n_minibatches", 1, 256, "1 to 16"),
    SensibleRange("algorithm.epochs", 1, 16, "1 to 4"),
    SensibleRange("algorithm.clip_ratio", 1e-2, 0.6, "0.2", when=loss_clips),
    SensibleRange("algorithm.clip_ratio_high", 1e-2, 2, "0.2 to 0.4", when=loss_clips),
    SensibleRange("algorithm.dual_clip", 1.2, 100, "3"),
    *(
        SensibleRange(
            f"algorithm.{usual_range.name}",
            usual_range.low,
            usual_range.high,
            usual=usual_range.usual,
            when=loss_is(loss),
        )
        for loss, objective in OBJECTIVES.items()
        for usual_range in objective.ranges
    ),
    SensibleRange("algorithm.off_policy_mask", 1e-3, 10, "0.5"),
    SensibleRange("algorithm.importance_cap", 1, 100, "2 to 10"),
    SensibleRange("algorithm.importance_mask_high", 1.1, 100, "2 to 10"),
    SensibleRange("algorithm.importance_mask_geometric_high", 1.0001, 10, "1.001 to 1.1"),
    SensibleRange("algorithm.importance_mask_binary_kl", 1e-6, 10, "0.05"),
    SensibleRange("algorithm.kl_coef", 0, 1, "0.001 to 0.1"),
    SensibleRange("algorithm.entropy_coef", 0, 0.1, "0.001 to 0.01"),
    SensibleRange("algorithm.entropy_target", 1e-2, 5, "0.2"),
    SensibleRange("algorithm.entropy_delta", 1e-5, 0.1, "0.005"),
    SensibleRange("algorithm.top_entropy_share", 1e-2, 1, "0.2"),
    SensibleRange("algorithm.clip_cov_ratio", 1e-6, 0.1, "2e-4"),
    SensibleRange("algorithm.kl_cov_ratio", 1e-6, 0.1, "2e-4 to 2e-3"),
    SensibleRange("algorithm.kl_cov_coef", 1e-3, 100, "1"),
    SensibleRange("algorithm.early_stop_ratio", 1.01, 100, "5"),
    SensibleRange("algorithm.early_stop_ratio_low", 0, 0.99),
    SensibleRange("algorithm.early_stop_kl", 1e-5, 10, "0.01 to 0.1"),
    SensibleRange("algorithm.rollback_reward_drop", 1e-2, 10, "0.5"),
    SensibleRange("critic.epochs", 1, 16, "1 to 4"),
    SensibleRange("critic.clip", 1e-2, 100),
    SensibleRange("critic.gamma", 0.9, 1, "1"),
    SensibleRange("critic.policy_length_alpha", 1e-4, 10, "0.05"),
    SensibleRange("teacher.coef", 1e-3, 100, "1"),
    SensibleRange("save.ckpt_freq_secs", 1),
    SensibleRange("save.save_freq_secs", 1),
)
"""Fewer than 8 tokens hold no \\boxed{...}, and a checkpoint takes longer than part of a second."""

LEARNING_RATES = ((1_000_000_000, 1e-4), (100_000_000, 1e-3), (0, 1e-2))
"""AdamW's largest sensible learning rates of full training, for models of at least so many
parameters."""
LEAST_LEARNING_RATE = 1e-8
ADAPTERS = 10
"""Factor by which LoRA's learning rates are above those of full training, up to 1e-2."""


def doubtful_values(config: Config, parameters: int | None = None) -> Iterator[str]:
    """A sentence on every number that is hardly meant.

    `parameters` are those of the model, if it is known."""
    note = f" for a model of {parameters / 1e9:.3g} B parameters" if parameters is not None else ""
    for sensible in learning_rates(parameters, adapters=config.lora.rank > 0):
        if (doubt := sensible.doubt(config, note)) is not None:
            yield doubt
    for sensible in SENSIBLE:
        if (doubt := sensible.doubt(config)) is not None:
            yield doubt


def learning_rates(parameters: int | None, adapters: bool) -> Iterator[SensibleRange]:
    """Sensible ranges of AdamW's learning rates.

    They depend on the model's size and on what learns of it: all weights, or adapters."""
    highest_rate = next(rate for least, rate in LEARNING_RATES if (parameters or 0) >= least)
    most_of_all = LEARNING_RATES[-1][1]
    times = ADAPTERS if adapters else 1
    usual = "1e-6 to 2e-5 for 1 B to 70 B"
    if adapters:
        usual = "1e-5 to 1e-4 of adapters, for 1 B to 70 B"
    yield SensibleRange(
        "optimizer.lr",
        times * LEAST_LEARNING_RATE,
        min(times * highest_rate, most_of_all),
        usual,
        when=optimizer_is("adam"),
    )
    yield SensibleRange("critic.lr", LEAST_LEARNING_RATE, highest_rate, when=optimizer_is("adam"))
