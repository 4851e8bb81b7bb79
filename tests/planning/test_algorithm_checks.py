"""What is told of the settings of algorithm and selection before a run starts."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlmath.algorithms.advantages import AdvantageKind, centred
from rlmath.algorithms.dynamic_sampling import Contrast
from rlmath.algorithms.importance_sampling import CorrectionLevel
from rlmath.algorithms.kl import KLKind
from rlmath.algorithms.losses import LossKind, NormalisationKind
from rlmath.config.help import all_settings
from rlmath.config.length_curriculum import with_longest_lengths
from rlmath.config.load import config_as_yaml, load_config, preset_settings
from rlmath.config.schema import Config
from rlmath.config.shipped_files import shipped
from rlmath.distributed.memory import total_bytes
from rlmath.planning.checks import (
    algorithm_problems,
    host_memory_problems,
    run_problems,
    value_problems,
)
from rlmath.planning.memory_fit import GIB
from rlmath.planning.reward_checks import reward_lines, reward_problems
from rlmath.planning.setting_tables import conflicts
from rlmath.planning.setting_warnings import config_warnings
from rlmath.rewards.schemes import raw_reward, reward_scale, scaled_reward
from rlmath.rollout.unfinished_rules import unfinished_rules
from rlmath.run.dry_run import preset_lines
from rlmath.run.recovery.resume import refused_changes
from tests.text_tables import rows

PATHS = ["run.output_dir=o", "model.path=m", "data.train_path=t"]

K1 = "algorithm.kl_estimator=k1"


def problems(*overrides: str) -> list[str]:
    config = load_config([], [*PATHS, *overrides])
    return [*algorithm_problems(config), *conflicts(config)]


def notes(*overrides: str) -> list[str]:
    return list(config_warnings(load_config([], [*PATHS, *overrides])))


def test_the_defaults_have_no_problem():
    assert problems() == [] and notes() == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.group_size=1", "algorithm.advantage=ppo", "data.prompts_per_step=4"],
        ["rollout.group_size=1", "algorithm.advantage=gae", "data.prompts_per_step=4"],
        ["algorithm.importance_correction=sequence", "algorithm.importance_cap=2"],
        [
            "algorithm.importance_mask_geometric_low=0.9",
            "algorithm.importance_mask_geometric_high=1.1",
        ],
        ["algorithm.importance_correction=token", "algorithm.importance_mask_binary_kl=0.1"],
        ["data.prompts_per_step=2", "rollout.group_size=2", "algorithm.n_minibatches=4"],
        ["selection.min_completion_tokens=5", "selection.max_completion_tokens=5"],
        ["selection.dynamic_sampling=accuracy", "selection.max_extra_prompts=100"],
        ["selection.resample_to=15", "rollout.group_size=16", "tools.format=fence"],
        ["algorithm.loss=gspo", "algorithm.clip_ratio=3e-4", "algorithm.n_minibatches=2"],
        ["algorithm.dual_clip=3", "algorithm.recompute_logprobs=false"],
        ["algorithm.kl_in=reward", "algorithm.kl_coef=0.1", "algorithm.advantage=ppo", K1],
    ],
)
def test_runs_that_can_start(overrides: list[str]):
    assert problems(*overrides) == [] and notes(*overrides) == []


CONFLICTS = f"""
lora.rank=8 algorithm.kl_coef=0.1 algorithm.reference_every_steps=5: algorithm.reference_every_steps is 5, and with
    lora.rank 8 the reference is the policy without its adapters, which stays what it is. Set the former to null, or
    lora.rank=0.
rollout.group_size=1: rollout.group_size is 1; algorithm.advantage="grpo" compares the completions of a group and
    needs at least 2. Raise it, or set algorithm.advantage to "ppo" or "gae".
algorithm.importance_correction=token algorithm.recompute_logprobs=false: Set algorithm.recompute_logprobs=true, or
    the former to null.
algorithm.importance_mask_binary_kl=0.1 algorithm.recompute_logprobs=false: algorithm.importance_mask_binary_kl:
    compared are recomputed log-probs with the engine's
algorithm.kl_ratio=token algorithm.kl_coef=0.1 algorithm.kl_in=reward {K1}: Set algorithm.kl_ratio=null, or
    algorithm.kl_in=loss.
algorithm.kl_ratio=token algorithm.kl_coef=0.1 algorithm.kl_estimator=k2: algorithm.kl_estimator is "k2", whose mean
    is no KL
algorithm.advantage=pass@k algorithm.pass_k=9 rollout.group_size=8: algorithm.pass_k is 9, above rollout.group_size 8
algorithm.advantage=maxrl algorithm.kl_in=reward algorithm.kl_coef=0.1 {K1}: which counts successes
algorithm.advantage=maxrl reward.length_penalty=0.1: which counts rewards above 0
algorithm.advantage=maxrl reward.overlong_buffer=64: reward.overlong_buffer would change nothing
algorithm.proximal_logprobs=interpolate algorithm.kl_cov_ratio=0.1 algorithm.epochs=2: clip_cov_ratio and kl_cov_ratio
    make that pass
algorithm.clip_cov_ratio=2e-4 algorithm.kl_cov_ratio=2e-4: are two ways to hold the same tokens
data.prompts_per_step=2 rollout.group_size=2 algorithm.n_minibatches=5: gives 4 samples a step, which cannot fill 5
    minibatches
rollout.group_size=1 algorithm.advantage=ppo selection.dynamic_sampling=reward data.prompts_per_step=4: a completion
    alone has none
rollout.max_new_tokens=10 selection.min_completion_tokens=11: selection.min_completion_tokens is 11, above
    rollout.max_new_tokens 10
selection.min_completion_tokens=9 selection.max_completion_tokens=8: selection.max_completion_tokens is 8, below
    selection.min_completion_tokens 9
rollout.min_new_tokens=9 selection.max_completion_tokens=8: or rollout.min_new_tokens 9: every completion would be
    left out. Raise it.
selection.resample_to=8: selection.resample_to is 8, and tools.format is null: completions are chosen by their failed
    calls
selection.resample_to=16 rollout.group_size=16 tools.format=fence: selection.resample_to is 16, not below
    rollout.group_size 16
selection.resample_to=4 tools.format=fence algorithm.advantage=pass@k algorithm.pass_k=5: algorithm.pass_k is 5, above
    selection.resample_to 4
selection.resample_to=4 tools.format=fence data.prompts_per_step=2 algorithm.n_minibatches=9: data.prompts_per_step x
    selection.resample_to gives 8 samples a step
"""


@pytest.mark.parametrize(("overrides", "told"), rows(CONFLICTS))
def test_settings_that_do_not_fit_together(overrides: list[str], told: str):
    (problem,) = problems(*overrides)
    assert told in problem


WITHOUT_EFFECT = f"""
algorithm.importance_cap=2: importance_cap: no effect without
algorithm.importance_mask_low=0.5: importance_mask_low: no effect without
algorithm.loss=cispo algorithm.dual_clip=3 algorithm.epochs=2: no effect without
    algorithm.loss=clip,gspo,dppo_tv,dppo_kl
algorithm.loss=cispo algorithm.clip_ratio_high=0.3: algorithm.loss, algorithm.clip_ratio_high: no effect with
    algorithm.n_minibatches=1
algorithm.kl_cov_ratio=0.1: algorithm.kl_cov_ratio: no effect with algorithm.n_minibatches=1
algorithm.proximal_logprobs=interpolate algorithm.epochs=2: the ratio is to the engine's
algorithm.loss=gmpo algorithm.epochs=2: bounds the log of a token's ratio
algorithm.rollback=1 algorithm.rollback_reward_drop=0.5 stages.steps=[5] stages.max_new_tokens=[9]: stages change the
    length of completions
algorithm.rollback=1 algorithm.rollback_reward_drop=0.5 data.curriculum=band: skips prompts that the policy solves
algorithm.advantage=gae selection.dynamic_sampling=reward selection.max_extra_prompts=9: and could learn from them
algorithm.loss=gspo algorithm.epochs=2: clip_ratio=0.2 hardly ever clips the mean ratio
algorithm.importance_correction=token algorithm.importance_cap=5 algorithm.importance_mask_high=2:
    algorithm.importance_cap: no effect with algorithm.importance_mask_high
algorithm.kl_in=reward algorithm.kl_coef=0.1 {K1}: algorithm.advantage="grpo" divides by
algorithm.kl_in=reward algorithm.kl_coef=0.1 algorithm.kl_estimator=abs algorithm.advantage=ppo:
    algorithm.kl_estimator="abs" in the reward has no gradient of first order
selection.dynamic_sampling=accuracy selection.max_extra_prompts=9 reward.function=own:reward: return "correct", or
    take selection.dynamic_sampling=reward
selection.resample_to=8 tools.format=fence reward.function=own:reward: selection.resample_to with reward.function
selection.dynamic_sampling=reward: samples none in their place
algorithm.kl_in=reward: no effect with algorithm.kl_coef=0
algorithm.kl_coef=0.1 {K1}: an expected gradient of 0
rollout.kv_cache_gib=2 rollout.memory_share=0.3: share: no effect with rollout.kv_cache_gib
selection.max_extra_prompts=4: no effect without selection.dynamic_sampling
reward.function_takes=group: no function of yours gives a reward
selection.drop_truncated=true reward.mask_no_eos_with_zero=true: no effect with selection.drop_truncated
"""


@pytest.mark.parametrize(("overrides", "told"), rows(WITHOUT_EFFECT))
def test_settings_without_effect_are_named(overrides: list[str], told: str):
    (note,) = notes(*overrides)
    assert told in note


@pytest.mark.parametrize(
    ("key", "kinds"),
    [
        (
            "algorithm.advantage",
            typing.Literal[AdvantageKind, "gae"],
        ),  # by the critic, token by token
        ("algorithm.loss", LossKind),
        ("algorithm.loss_normalisation", NormalisationKind),
        ("algorithm.importance_correction", CorrectionLevel),
        ("algorithm.kl_estimator", KLKind),
        ("algorithm.kl_ratio", CorrectionLevel),
        ("selection.dynamic_sampling", Contrast),
    ],
)
def test_the_words_of_the_settings_are_those_of_the_code(key: str, kinds: object):
    assert all_settings()[key].words == typing.get_args(kinds)


# ---------------------------------------------------------------- presets

PRESETS = all_settings()["algorithm.preset"].words


def test_presets_are_the_files_and_start_without_a_warning():
    assert list(PRESETS) == sorted(
        path.stem for path in shipped("configs/algorithms").glob("*.yaml")
    )
    for name in PRESETS:
        needed = {"distill": ["teacher.path=t"], "lora": ["optimizer.lr=1e-5"]}.get(name, [])
        config = load_config([], [*PATHS, f"algorithm.preset={name}", *needed])
        assert [*algorithm_problems(config), *conflicts(config), *value_problems(config)] == [], (
            name
        )
        assert config_warnings(config) == [], name


def test_a_preset_lies_below_files_and_command_line_wherever_it_is_named(tmp_path: Path):
    own_path = tmp_path / "own.yaml"
    saved = tmp_path / "saved.yaml"
    own_path.write_text("algorithm: {clip_ratio_high: 0.2, n_minibatches: 1, preset: top_entropy}")
    config = load_config([own_path], [*PATHS, "algorithm.n_minibatches=8"])
    assert (config.algorithm.n_minibatches, config.algorithm.clip_ratio_high) == (8, 0.2)
    assert list(preset_lines(config)) == [
        "Preset: top_entropy is configs/algorithms/top_entropy.yaml",
        "  algorithm.n_minibatches=4, here 8",
        "  algorithm.clip_ratio=0.2",
        "  algorithm.clip_ratio_high=0.28, here 0.2",
        "  selection.dynamic_sampling=accuracy",
        "  selection.max_extra_prompts=256",
        "  reward.scheme=plus_minus_one",
        "  reward.overlong_penalty=1.0",
        "  algorithm.top_entropy_share=0.2",
    ]
    saved.write_text(config_as_yaml(config))
    assert load_config([saved], []) == config and config.selection.max_extra_prompts == 256


FIVES = (5.0, -5.0)
PLUS_MINUS = (1.0, -1.0)
ZERO_ONE = (1.0, 0.0)
PAID = {
    **dict.fromkeys(
        "areal_ppo curriculum decoupled distill experts feedback kpop lora tools".split(),
        FIVES,
    ),
    **dict.fromkeys(("critic", "dapo", "top_entropy"), PLUS_MINUS),
    "simplerl": (1.0, -0.5),
}
"""What presets pay a right and a wrong answer, where that is not 1 and 0.

Presets with AReaL's fives are AReaL's own, or say nothing of rewards."""


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_pays_what_its_paper_pays(name: str):
    reward = load_config([], [*PATHS, f"algorithm.preset={name}"]).reward
    facts = {"verified": True, "length": 8, "limit": 64, "truncated": False}
    paid = tuple(
        scaled_reward(reward, raw_reward(reward, right, True), **facts) for right in (True, False)
    )
    assert paid == PAID.get(name, ZERO_ONE)


def test_a_wrong_answer_of_full_length_gets_minus_two_of_dapo():
    reward = load_config([], [*PATHS, "algorithm.preset=dapo", "reward.overlong_buffer=16"]).reward
    at_limit = {"verified": True, "length": 64, "limit": 64, "truncated": True}
    assert scaled_reward(reward, raw_reward(reward, False, False), **at_limit) == -2.0
    assert scaled_reward(reward, raw_reward(reward, True, True), **at_limit) == 0.0


def test_advantages_of_dr_grpo_are_those_of_its_paper():
    reward = load_config([], [*PATHS, "algorithm.preset=dr_grpo"]).reward
    rewards = [
        raw_reward(reward, right, True) * reward_scale(reward, True) for right in (1, 0, 0, 0)
    ]
    assert centred(torch.tensor(rewards)).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_a_function_of_the_users_is_paid_as_it_says_whatever_the_preset():
    for name in PRESETS:
        reward = load_config(
            [], [*PATHS, f"algorithm.preset={name}", "reward.function=own:reward"]
        ).reward
        facts = {"verified": False, "length": 8, "limit": 64, "truncated": False}
        assert scaled_reward(reward, 0.25, **facts) == 0.25, name
    dapo_notes = notes("algorithm.preset=dapo", "reward.rewards=[mine=a.b:c]")
    assert not any("reward.scheme" in note for note in dapo_notes)


@pytest.mark.parametrize(
    ("name", "prompts", "extra"),
    [
        ("dapo", 4, 8),
        ("dapo", 128, 256),
        ("top_entropy", 10, 20),
        ("curriculum", 4, 4),
        ("curriculum", 128, 128),
    ],
)
def test_extra_prompts_of_a_preset_are_a_multiple_of_the_batch(name: str, prompts: int, extra: int):
    overrides = [*PATHS, f"algorithm.preset={name}", f"data.prompts_per_step={prompts}"]
    assert load_config([], overrides).selection.max_extra_prompts == extra
    assert (
        load_config([], [*overrides, "selection.max_extra_prompts=3"]).selection.max_extra_prompts
        == 3
    )


def test_a_preset_has_its_multiples_also_where_the_folder_is_named_after_a_setting():
    """The folder is resolved before the preset is read: a run may have recorded one there."""
    overrides = ["run.output_dir=o${run.seed}", *PATHS[1:], "run.seed=7", "data.prompts_per_step=4"]
    config = load_config([], [*overrides, "algorithm.preset=dapo"])
    assert (config.run.output_dir, config.selection.max_extra_prompts) == ("o7", 8)


def test_no_number_of_a_preset_is_a_count_of_prompts_or_tokens():
    """A number that is right for one batch or one length is wrong for others: it is a multiple."""
    counts = (
        "data.",
        "rollout.",
        "selection.max_",
        "selection.min_",
        "reward.overlong_buffer",
        "policy.max_",
    )
    for name in PRESETS:
        for key, value in preset_settings(name).items():
            assert (
                not key.startswith(counts) or not isinstance(value, int) or isinstance(value, bool)
            ), (
                name,
                key,
            )


REWARD_LINES = """
algorithm.preset=dapo reward.overlong_buffer=16 rollout.max_new_tokens=64: Rewards: -1 to 1
    (reward.scheme=plus_minus_one: right 1, wrong -1) | less at most 1 for length, in the last 16 of 64 tokens
    (reward.overlong_buffer)
algorithm.kl_coef=0: Rewards: -5 to 5 (reward.scheme=correctness: right 5, wrong -5)
algorithm.preset=dr_grpo reward.length_penalty=0.1 rollout.max_new_tokens=2000: Rewards: 0 to 1
    (reward.scheme=zero_one: right 1, wrong 0) | less at most 0.2 for length: reward.length_penalty 0.1 x 2,000 tokens
    / 1,000, where all of the group are right
reward.scheme=independent reward.format_penalty=-0.3 reward.mask_no_eos_with_zero=true rollout.max_new_tokens=64:
    Rewards: -0.5 to 1 (reward.scheme=independent: right 1, right without a box 0.5, wrong -0.5, wrong without a box
    -0.3) | 0 where the completion is cut off at 64 tokens (reward.mask_no_eos_with_zero)
algorithm.preset=areal_ppo rollout.max_new_tokens=1000: Rewards: -5 to 5 (reward.scheme=correctness: right 5, wrong -5)
    | less algorithm.kl_coef 0.001 for each nat of KL to the reference: 0.1 for 1,000 tokens of 0.1 nats each
reward.function=own:reward reward.output_bias=1 reward.output_scaling=2: Rewards: what reward.function returns, less
    reward.output_bias 1, times 2
reward.rewards=[correctness,format,length] reward.weights=[1,0.5,-0.1] reward.output_scaling=1: Rewards: -1.1 to 1.5
    (the weighted sum of reward.rewards)
algorithm.preset=gdpo: Rewards: each of the list is normalised in its own group (reward.combine=gdpo)
algorithm.preset=distill teacher.path=t: Rewards: none is learned from (teacher.with_rewards=false)
"""


def paid(config: Config) -> Iterator[str]:
    """What a plan says of the rewards of these settings."""
    longest = with_longest_lengths(config).rollout.max_new_tokens
    return reward_lines(config.reward, config.algorithm, config.teacher, longest=longest)


@pytest.mark.parametrize(("overrides", "told"), rows(REWARD_LINES))
def test_a_plan_says_what_is_paid_and_the_largest_penalties(overrides: list[str], told: str):
    lines = paid(load_config([], [*PATHS, *overrides]))
    assert " | ".join(line.strip() for line in lines) == told


def recorded_run(folder: Path, *overrides: str) -> Config:
    """The settings that an earlier run wrote, with AReaL's fives and extra prompts in numbers.

    The run has a checkpoint."""
    (folder / "checkpoints" / "step-000003").mkdir(parents=True)
    paths = [f"run.output_dir={folder}", *PATHS[1:]]
    earlier = ["reward.scheme=correctness", "selection.max_extra_prompts=256", *overrides]
    recorded = load_config(
        [], [*paths, "algorithm.preset=dapo", "data.prompts_per_step=4", *earlier]
    )
    (folder / "config.yaml").write_text(config_as_yaml(recorded))
    return recorded


def test_a_run_that_resumes_keeps_what_it_recorded_of_its_preset(tmp_path: Path):
    recorded = recorded_run(tmp_path / "run")
    overrides = [
        f"run.output_dir={tmp_path / 'run'}",
        *PATHS[1:],
        "algorithm.preset=dapo",
        "data.prompts_per_step=4",
    ]
    resumed = load_config([], overrides)
    assert resumed == recorded and refused_changes(recorded, resumed) == []
    assert config_warnings(resumed) == [
        f"algorithm.preset=dapo: kept as the run in {tmp_path / 'run'} has recorded it: "
        "selection.max_extra_prompts=256 (the preset has 8), reward.scheme=correctness (the "
        "preset has plus_minus_one)"
    ]
    (line,) = paid(resumed)
    assert line == "Rewards: -5 to 5 (reward.scheme=correctness: right 5, wrong -5)"


@pytest.mark.parametrize(
    "override",
    [
        "run.recover_mode=disabled",
        "run.output_dir=elsewhere",
        "algorithm.preset=top_entropy",
        "reward.scheme=plus_minus_one",
    ],
)
def test_what_is_recorded_counts_for_the_same_preset_and_a_run_that_resumes(
    tmp_path: Path, override: str
):
    recorded_run(tmp_path / "run")
    overrides = [
        f"run.output_dir={tmp_path / 'run'}",
        *PATHS[1:],
        "algorithm.preset=dapo",
        override,
    ]
    assert load_config([], overrides).reward.scheme == "plus_minus_one"


def test_a_run_that_begins_anew_takes_the_preset_whatever_an_earlier_start_recorded(tmp_path: Path):
    """The earlier start ended before its first checkpoint, or within it."""
    recorded_run(tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    overrides = [f"run.output_dir={tmp_path / 'run'}", *PATHS[1:], "algorithm.preset=dapo"]
    (folder / "step-000003").rename(folder / "step-000003.partial")
    assert load_config([], overrides).reward.scheme == "plus_minus_one"


@pytest.mark.parametrize("key", ["run.output_dir", "run.recover_mode"])
def test_with_a_preset_a_variable_that_is_not_set_is_named_with_its_key(key: str):
    with pytest.raises(
        ValueError, match=f'^"{key}" got .*cannot be resolved: the environment variable NO_SUCH'
    ):
        load_config([], [*PATHS, "algorithm.preset=dapo", f"{key}=${{oc.env:NO_SUCH_VARIABLE}}"])


def test_a_saved_file_without_a_setting_of_today_has_its_default_and_not_the_presets(
    tmp_path: Path,
):
    recorded = config_as_yaml(recorded_run(tmp_path / "run"))
    (tmp_path / "old.yaml").write_text(recorded.replace("  scheme: correctness\n", ""))
    assert load_config([tmp_path / "old.yaml"], [], saved=True).reward.scheme == "correctness"


def test_another_loss_than_the_presets_is_refused():
    (problem,) = problems("algorithm.preset=gspo", "algorithm.loss=clip")
    assert (
        'algorithm.preset is "gspo", whose algorithm.loss is "gspo", and yours is "clip"' in problem
    )


# ---------------------------------------------------------------- partial rollouts

CARRY = [
    "rollout.tail=carry",
    "algorithm.importance_correction=token",
    "algorithm.importance_mask_high=5",
]


def carry_problems(*overrides: str) -> list[str]:
    return [
        problem
        for problem in run_problems(load_config([], [*PATHS, *overrides]), 1, None)
        if "rollout." in problem
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        CARRY,
        [*CARRY[:2], "algorithm.importance_cap=2"],
        [
            *CARRY,
            "data.prompts_per_step=4",
            "rollout.max_groups_in_flight=12",
            "rollout.max_staleness=2",
        ],
        [
            *CARRY,
            "data.prompts_per_step=4",
            "rollout.max_groups_in_flight=4",
            "rollout.slice_tokens=100",
        ],
        ["rollout.tail=carry", "rollout.max_staleness=0"],
        ["rollout.tail=defer", "algorithm.recompute_logprobs=false"],
        ["rollout.tail=carry", "rollout.max_staleness=0", "algorithm.recompute_logprobs=false"],
        ["rollout.tail=carry", "rollout.max_staleness=2", "algorithm.recompute_logprobs=false"],
    ],
)
def test_partial_rollouts_that_can_start(overrides: list[str]) -> None:
    assert carry_problems(*overrides) == []


WRONG_PARTIAL_ROLLOUTS = """
rollout.tail=carry: algorithm.importance_mask_high=5 (or algorithm.importance_cap)
rollout.tail=carry algorithm.importance_correction=token: the ratio to recomputed log-probs leaves that uncorrected
rollout.tail=carry algorithm.importance_mask_high=5: algorithm.importance_correction=token
rollout.tail=carry algorithm.importance_correction=token algorithm.importance_mask_high=5 data.prompts_per_step=4
    rollout.max_groups_in_flight=9: rollout.max_groups_in_flight is 9; needed: from data.prompts_per_step, 4,
rollout.tail=carry algorithm.importance_correction=token algorithm.importance_mask_high=5 data.prompts_per_step=4
    rollout.max_groups_in_flight=3: 4 x 2 = 8, since more could not all be learned in time
"""


@pytest.mark.parametrize(("overrides", "told"), rows(WRONG_PARTIAL_ROLLOUTS))
def test_partial_rollouts_that_would_be_wrong(overrides: list[str], told: str) -> None:
    assert any(told in problem for problem in carry_problems(*overrides))


def test_settings_of_partial_rollouts_without_effect_are_told() -> None:
    def told(*overrides: str) -> list[str]:
        warnings = config_warnings(load_config([], [*PATHS, *overrides]))
        return [warning for warning in warnings if "rollout." in warning]

    assert told() == told(*CARRY, "rollout.slice_tokens=100") == []
    assert told("rollout.slice_tokens=100", "rollout.max_staleness=3") == [
        "rollout.max_staleness: no effect without rollout.tail=carry and without rollout.ranks.",
        "rollout.slice_tokens: no effect with rollout.tail=wait.",
    ]
    assert told("rollout.tail=defer", "rollout.slice_tokens=100") == []
    assert told(
        "rollout.tail=defer", "rollout.max_staleness=3", "rollout.max_groups_in_flight=200"
    ) == [
        "rollout.max_staleness: no effect without rollout.tail=carry and without rollout.ranks.",
        "rollout.max_groups_in_flight: no effect without rollout.tail=carry.",
    ]
    assert (
        "some steps have more of the short"
        in told("rollout.tail=defer", "algorithm.advantage=reinforce++")[0]
    )
    assert (
        "with rollout.max_staleness=1" in told("rollout.tail=defer", "algorithm.advantage=ppo")[0]
    )
    for advantage in ("ppo", "reinforce++"):
        uneven = told(*CARRY, f"algorithm.advantage={advantage}", "rollout.max_staleness=2")
        assert (
            len(uneven) == 1
            and "rollout.max_staleness=2 some steps have more of the short" in uneven[0]
        )
        assert told(*CARRY, f"algorithm.advantage={advantage}") == []
    assert told(*CARRY, "rollout.max_staleness=2") == []
    assert (
        "nothing is deferred"
        in told("rollout.tail=defer", "rollout.max_new_tokens=64", "rollout.slice_tokens=64")[0]
    )
    assert "carries nothing" in told(*CARRY, "rollout.max_staleness=0")[0]
    clipped = told(
        "rollout.tail=carry", "rollout.max_staleness=2", "algorithm.recompute_logprobs=false"
    )
    assert "the loss clips the ratio to the versions that sampled the tokens" in clipped[0]
    assert told(*CARRY, "rollout.max_new_tokens=64", "rollout.slice_tokens=64") == [], (
        "a step samples for two"
    )


@pytest.mark.parametrize(("every_steps", "is_refused"), [("null", True), ("1", False)])
def test_conversations_of_validation_count_where_the_run_validates(
    every_steps: str, is_refused: bool
):
    overrides = ["data.template=raw", "data.system_prompt=Be brief.", "validation.template=chat"]
    overrides += ["validation.paths=[v.jsonl]", f"validation.every_steps={every_steps}"]
    problems = run_problems(load_config([], [*PATHS, *overrides]), 1, None)
    assert any("makes no conversation" in problem for problem in problems) == is_refused


# ---------------------------------------------------------------- engines on ranks of their own

OWN_RANKS = ["rollout.ranks=1", *CARRY[1:]]


def own_problems(*overrides: str) -> list[str]:
    return run_problems(load_config([], [*PATHS, *overrides]), 2, None)


@pytest.mark.parametrize(
    "overrides",
    [
        OWN_RANKS,
        [
            *OWN_RANKS[:2],
            "algorithm.importance_cap=2",
            "rollout.on_new_weights=keep",
            "rollout.max_staleness=8",
        ],
        ["rollout.ranks=1", "rollout.max_staleness=0"],
        ["rollout.ranks=1", "rollout.max_staleness=4", "algorithm.recompute_logprobs=false"],
        [
            "rollout.ranks=1",
            "rollout.max_staleness=0",
            "rollout.on_new_weights=finish",
            "sync.probe_every=2",
        ],
    ],
)
def test_asynchronous_runs_that_can_start(overrides: list[str]) -> None:
    assert own_problems(*overrides) == []


WRONG_ASYNCHRONOUS_RUNS = """
rollout.ranks=1: rollout.ranks is 1 and rollout.max_staleness 1: older versions of the policy sample a part
rollout.ranks=1 rollout.on_new_weights=finish: algorithm.importance_correction=token
rollout.ranks=1 algorithm.importance_correction=token: algorithm.importance_mask_high=5 (or algorithm.importance_cap)
rollout.ranks=1 algorithm.importance_correction=token algorithm.importance_mask_high=5 rollout.tail=carry:
    rollout.tail is "carry" and rollout.ranks 1: engines on ranks of their
rollout.ranks=1 algorithm.importance_correction=token algorithm.importance_mask_high=5 rollout.tail=defer: Set
    rollout.tail=wait, or rollout.ranks=0.
rollout.ranks=1 algorithm.importance_correction=token algorithm.importance_mask_high=5 sync.checksum_every=5: Set
    sync.checksum_every=0; sync.probe_every compares log-probs
rollout.ranks=1 algorithm.importance_correction=token algorithm.importance_mask_high=5 parallel.tensor=2: does not
    divide the 1 rank that trains
rollout.ranks=2: none is left to train
rollout.ranks=1 algorithm.importance_correction=token algorithm.importance_mask_high=5
    rollout.max_concurrent_sequences=7 rollout.group_size=8: an engine begins whole groups. Set it to 8 or more.
"""


@pytest.mark.parametrize(("overrides", "told"), rows(WRONG_ASYNCHRONOUS_RUNS))
def test_asynchronous_runs_that_would_be_wrong(overrides: list[str], told: str) -> None:
    assert any(told in problem for problem in own_problems(*overrides))


def test_settings_without_effect_beside_or_without_ranks_of_the_engines_are_told() -> None:
    def told(*overrides: str) -> list[str]:
        warnings = config_warnings(load_config([], [*PATHS, *overrides]))
        return [warning for warning in warnings if "rollout." in warning]

    assert (
        told(*OWN_RANKS)
        == told(*OWN_RANKS, "rollout.max_staleness=3", "rollout.on_new_weights=keep")
        == []
    )
    assert told("rollout.on_new_weights=keep", "rollout.max_concurrent_sequences=8") == [
        "rollout.on_new_weights, rollout.max_concurrent_sequences: no effect with rollout.ranks=0."
    ]
    few = load_config(
        [], [*PATHS, *OWN_RANKS, "rollout.max_groups_in_flight=1", "data.prompts_per_step=4"]
    )
    assert unfinished_rules(few).max_groups == 8, "or the run would wait for ever"
    assert told(*OWN_RANKS, "rollout.slice_tokens=100", "rollout.max_groups_in_flight=300") == [
        "rollout.slice_tokens: no effect with rollout.tail=wait.",
        "rollout.max_groups_in_flight: no effect without rollout.tail=carry.",
    ]
    no_turns = told(*OWN_RANKS, "memory.offload_gradients=false", "memory.offload_parameters=true")
    assert no_turns == [
        "memory.offload_gradients, memory.offload_parameters: no effect with rollout.ranks: no "
        "engine takes "
        "turns with training on the same memory."
    ]
    assert told(*OWN_RANKS, "memory.offload_reference=true", "algorithm.kl_coef=0.1") == []
    assert (
        "nothing is being sampled"
        in told("rollout.ranks=1", "rollout.max_staleness=0", "rollout.on_new_weights=keep")[0]
    )


def test_only_ranks_with_an_engine_need_a_cache_on_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(rank: int, *overrides: str) -> list[str]:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank % 4}.items():
            monkeypatch.setenv(name, str(value))
        config = load_config([], [*PATHS, f"rollout.cpu_kv_cache_gib={cache}", *overrides])
        return list(host_memory_problems(config.rollout))

    # two nodes of four ranks; 0.3 of the memory for one cache: three fit, four do not
    cache = 0.3 * total_bytes() / GIB
    monkeypatch.setattr("rlmath.planning.checks.available_bytes", total_bytes)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "for each of the 4 ranks" in told(0)[0] and "for each of the 4 ranks" in told(5)[0]
    assert (
        told(1, "rollout.ranks=3") == told(5, "rollout.ranks=3") == told(2, "rollout.ranks=4") == []
    )
    assert "for each of the 4 ranks" in told(6, "rollout.ranks=4")[0]
    assert (
        "for each of the 4 ranks" in told(4, "rollout.ranks=6")[0]
        and told(0, "rollout.ranks=6") == []
    )
    cache = 1.1 * total_bytes() / GIB
    assert told(0, "rollout.ranks=4") == [] and "Lower it" in told(4, "rollout.ranks=1")[0]


# ---------------------------------------------------------------- several rewards

LIST = ["reward.rewards=[correctness,length]", "reward.combine=gdpo"]


def reward_told(*overrides: str) -> list[str]:
    config = load_config([], [*PATHS, *overrides])
    limit = config.rollout.max_new_tokens
    return [*reward_problems(config.reward, limit, config.run.plugins), *conflicts(config)]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        LIST,
        [
            "reward.rewards=[correctness,format,length]",
            "reward.weights=[1,0.2,-1]",
            "algorithm.advantage=rloo",
        ],
        [
            "reward.rewards=['mine=no.such:f']",
            "reward.mask_no_eos_with_zero=true",
            "reward.overlong_buffer=8",
        ],
        [*LIST, "algorithm.kl_coef=0.1"],
        [*LIST, "algorithm.kl_in=reward"],
    ],
)
def test_rewards_that_a_run_can_have(overrides: list[str]):
    assert reward_told(*overrides) == []


REWARD_CONFLICTS = """
reward.combine=gdpo: reward.combine is for the rewards of reward.rewards, which is empty
reward.weights=[1]: reward.weights is for the rewards
reward.rewards=[correctness,lenght]: reward.rewards has 'lenght'; needed: correctness, format, length
reward.rewards=[correctness,'Own=m:f']: before = stands a name
reward.rewards=[correctness,'length=m:f']: before = stands a name
reward.rewards=[correctness,'verdict=m:f']: none of correctness, format, length, correct, boxed
reward.rewards=[correctness,'own=']: after it a function
reward.rewards=[correctness,correctness]: reward.rewards has 'correctness' more than once
reward.rewards=[format,length]: neither correctness nor a function of yours
reward.rewards=[correctness,length] reward.weights=[1]: a number for each of the 2 rewards
reward.rewards=[correctness,length] reward.weights=[0,0]: reward.weights is [0.0, 0.0]; needed
reward.rewards=[correctness] reward.function=m:f: as "mine=m:f", and set reward.function=null
reward.rewards=['f0=m:f','f1=m:f','f2=m:f','f3=m:f','f4=m:f','f5=m:f','f6=m:f','f7=m:f','f8=m:f']: has 9 functions; at
    most 8
reward.rewards=[correctness,length] reward.combine=gdpo algorithm.advantage=rloo: Set algorithm.advantage="grpo", or
    reward.combine=sum
reward.rewards=[correctness,length] reward.combine=gdpo algorithm.kl_in=reward algorithm.kl_coef=0.1: Set
    algorithm.kl_in="loss"
reward.rewards=[correctness,length] reward.combine=gdpo reward.mask_no_eos_with_zero=true:
    reward.mask_no_eos_with_zero changes the sum
reward.rewards=[correctness,length] reward.combine=gdpo reward.overlong_buffer=8: reward.overlong_buffer changes the
    sum
"""


@pytest.mark.parametrize(("overrides", "told"), rows(REWARD_CONFLICTS))
def test_rewards_that_do_not_fit_together(overrides: list[str], told: str):
    (problem,) = reward_told(*overrides)
    assert told in problem


REWARDS_WITHOUT_EFFECT = """
reward.rewards=[correctness] reward.function_failure=-1: reward.function_failure: no effect with reward.rewards
reward.rewards=[mine=a.b:c] reward.scheme=mix: reward.scheme: no effect with reward.rewards that do not list
    correctness
reward.rewards=[correctness,length] reward.combine=gdpo reward.output_scaling=2: reward.output_scaling: no effect with
    reward.combine=gdpo: every reward
reward.rewards=[correctness,length] reward.combine=gdpo reward.output_bias=0.5: reward.output_bias: no effect with
    reward.combine=gdpo: every reward
"""


@pytest.mark.parametrize(("overrides", "told"), rows(REWARDS_WITHOUT_EFFECT))
def test_what_has_no_effect_beside_several_rewards_is_noted(overrides: list[str], told: str):
    (note,) = notes(*overrides)
    assert told in note
    by_accuracy = ("selection.dynamic_sampling=accuracy", "selection.max_extra_prompts=9")
    (note,) = notes("reward.rewards=['mine=m:f']", *by_accuracy)
    assert '"accuracy" with reward.rewards: mine: an answer counts as right' in note
    assert notes("reward.rewards=[correctness,'mine=m:f']", *by_accuracy) == []


def test_every_function_of_the_list_is_looked_for():
    config = load_config(
        [], [*PATHS, "reward.rewards=['a=math:sqrt','b=json:dumbs','c=no_such_module:f']"]
    )
    messages = [message for message in run_problems(config, 1, None) if "reward." in message]
    assert (
        len(messages) == 2
        and "'json' has no function 'dumbs'" in messages[0]
        and "no_such_module" in messages[1]
    )
