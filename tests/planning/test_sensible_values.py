"""Numbers that are legal, and hardly what anybody means, are named before a run starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmath.config.help import all_settings
from rlmath.config.load import load_config
from rlmath.config.objectives import OBJECTIVES
from rlmath.config.shipped_files import shipped
from rlmath.planning.setting_warnings import config_warnings
from tests.text_tables import rows

PATHS = ["run.output_dir=o", "model.path=m", "data.train_path=t"]


def doubts(
    *overrides: str, files: list[Path] | None = None, parameters: int | None = None
) -> list[str]:
    config = load_config(files or [], [*PATHS, *overrides])
    return [
        text
        for text in config_warnings(config, parameters=parameters)
        if "hardly what you mean" in text
    ]


DOUBTFUL = """
optimizer.lr=1: optimizer.lr=1 is legal, and hardly what you mean: sensible is 1e-08 to 0.01
optimizer.lr=0.011: sensible is 1e-08 to 0.01
optimizer.lr=1e-10: sensible is 1e-08 to 0.01
optimizer.kind=sgd optimizer.distributed=false optimizer.lr=100: sensible is 1e-08 to 10
lora.rank=8 optimizer.lr=1: sensible is 1e-07 to 0.01
critic.lr=0.5: critic.lr=0.5 is legal
optimizer.weight_decay=2: sensible is 0 to 1
optimizer.adam_beta1=0.1: sensible is 0.5 to 0.99
optimizer.adam_beta2=0.1: sensible is 0.8 to 0.9999
optimizer.adam_eps=1: adam_eps=1
optimizer.clip_grad=1e-6: sensible is 0.001 to 100, or 0
lora.rank=4096 optimizer.lr=1e-5: lora.rank=4096
rollout.temperature=10: rollout.temperature=10 is legal, and hardly what you mean: sensible is 0.2 to 2
rollout.temperature=0.05: rollout.temperature=0.05
validation.temperature=5: validation.temperature=5
rollout.max_new_tokens=7: sensible is at least 8
rollout.group_size=5000: rollout.group_size=5000
algorithm.clip_ratio=0.9: algorithm.clip_ratio=0.9
algorithm.clip_ratio_high=5: algorithm.clip_ratio_high=5 is legal
algorithm.loss=gspo algorithm.clip_ratio_high=0.2: algorithm.clip_ratio_high=0.2
algorithm.loss=cispo algorithm.clip_ratio_high=50: algorithm.clip_ratio_high=50
algorithm.kl_coef=100: algorithm.kl_coef=100
algorithm.entropy_coef=1: algorithm.entropy_coef=1
algorithm.epochs=100: algorithm.epochs=100
algorithm.advantage_eps=1: algorithm.advantage_eps=1
algorithm.early_stop_ratio=1.0001: algorithm.early_stop_ratio=1.0001
reward.output_scaling=1e6: reward.output_scaling=1e+06
reward.format_penalty=1: reward.format_penalty=1
critic.gamma=0.5: critic.gamma=0.5
teacher.coef=1e4: teacher.coef=10000
reward.timeout_seconds=1e-9: at least 0.01
save.ckpt_freq_secs=1e-9: at least 1
"""


@pytest.mark.parametrize(("overrides", "told"), rows(DOUBTFUL))
def test_a_number_that_nobody_means_is_doubted(overrides: list[str], told: str) -> None:
    (doubt,) = doubts(*overrides)
    assert told in doubt


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.lr=0.01"],
        ["optimizer.clip_grad=0"],
        ["validation.temperature=0"],
        ["rollout.temperature=0.2"],
        ["algorithm.loss=cispo", "algorithm.clip_ratio=1", "algorithm.clip_ratio_high=5"],
        ["optimizer.kind=sgd", "optimizer.distributed=false", "optimizer.lr=1"],
    ],
)
def test_what_somebody_takes_is_not_doubted(overrides: list[str]) -> None:
    assert doubts(*overrides) == []


@pytest.mark.parametrize(
    ("parameters", "overrides", "most"),
    [
        (600_000, ["optimizer.lr=0.01"], None),
        (135_000_000, ["optimizer.lr=0.01"], "0.001"),
        (7_000_000_000, ["optimizer.lr=0.001"], "0.0001"),
        (7_000_000_000, ["optimizer.lr=2e-5"], None),
        (7_000_000_000, ["lora.rank=16", "optimizer.lr=0.001", "critic.lr=1e-6"], None),
        (7_000_000_000, ["lora.rank=16", "optimizer.lr=0.01"], "0.001"),
    ],
)
def test_a_larger_model_takes_a_lower_learning_rate(
    parameters: int, overrides: list[str], most: str | None
) -> None:
    messages = doubts(*overrides, parameters=parameters)
    if most is None:
        assert messages == []
    else:
        assert f"to {most}" in messages[0] and f"{parameters / 1e9:.3g} B parameters" in messages[0]


@pytest.mark.parametrize(
    "file", sorted(shipped("configs").rglob("*.yaml")), ids=lambda path: path.stem
)
def test_nothing_that_is_shipped_is_doubted(file: Path) -> None:
    assert doubts(files=[file]) == []


ANY_NUMBER = {
    "algorithm.clip_cov_low": "a covariance, in units of the advantage",
    "algorithm.clip_cov_high": "as the one before",
    "memory.gpu_gib": "what a GPU has",
    "memory.leak_threshold_mib": "a large one never warns",
    "optimizer.min_lr": "one above optimizer.lr is refused",
    "optimizer.initial_loss_scale": "halves and doubles by itself",
    "reward.function_failure": "in units of the user's own reward",
    "rollout.cpu_kv_cache_gib": "checked against the machine's memory",
    "rollout.kv_cache_gib": "checked against the GPU's memory",
    "telemetry.warn_importance_weight": "a large one never warns",
}


def unbounded() -> Iterator[str]:
    """Settings of fractions of which any size is legal."""
    for key, setting in all_settings().items():
        limits = setting.range
        if "float" in setting.type_name and limits and math.inf in (limits.high, -limits.low):
            yield key


def test_every_number_without_a_bound_has_a_sensible_one() -> None:
    """Every new setting is given a sensible bound, unless it is in ANY_NUMBER.

    ANY_NUMBER has the reason why any number is sensible. A setting of an objective is doubted where
    the objective is the loss."""
    readers = {
        f"algorithm.{name}": loss
        for loss, objective in OBJECTIVES.items()
        for name in objective.settings
    }
    lists = {key for key in unbounded() if all_settings()[key].type_name.startswith("list")}
    doubted = {
        key
        for key in unbounded()
        for extreme in ("1e20", "1e-20")
        if any(
            text.startswith(f"{key}=")
            for text in doubts(f"{key}={extreme}", f"algorithm.loss={readers.get(key, 'clip')}")
        )
    }
    assert set(unbounded()) - doubted - lists == set(ANY_NUMBER)
