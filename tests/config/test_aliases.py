"""What a user is told of other trainers' names, names without their section, and typing errors."""

from __future__ import annotations

import argparse

import pytest

import rlmath
from rlmath.config.aliases import ALIASES, NO_KEY, TRAINERS
from rlmath.config.help import all_settings, help_text, keys_in, unknown_key_text
from rlmath.config.load import load_config, make_parser
from rlmath.run.command_line import program_parser
from tests.config.coming_from import PAGE, with_tables

GIVEN = ["run.output_dir=o", "model.path=m", "data.train_path=t"]


@pytest.mark.parametrize(
    ("written", "setting"),
    [
        ("rollout.num_generations", "rollout.group_size"),
        ("num_generations", "rollout.group_size"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("grpo.num_generations_per_prompt", "rollout.group_size"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("data.max_response_length", "rollout.max_new_tokens"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.lr"),
        ("critic.optimizer.lr", "critic.lr"),
        ("data.train_batch_size", "data.prompts_per_step"),
        ("sft.epochs", "run.total_epochs"),
        ("trainer.total_epochs", "run.total_epochs"),
        ("num_iterations", "algorithm.epochs"),
        ("max_steps", "run.total_steps"),
        ("actor.path", "model.path"),
        ("beta", "algorithm.kl_coef"),
        ("epsilon", "algorithm.clip_ratio"),
        ("epsilon-high", "algorithm.clip_ratio_high"),
        ("actor.eps_clip", "algorithm.clip_ratio"),
        ("+trainer.save_freq", "save.save_freq_steps"),
        ("ROLLOUT_N", "rollout.group_size"),
        ("data.path", "data.train_path"),
    ],
)
def test_a_name_of_another_trainer_names_our_setting_and_never_sets_it(
    written: str, setting: str
) -> None:
    with pytest.raises(ValueError, match=f'unknown key "{written}"'.replace("+", r"\+")) as caught:
        load_config([], [*GIVEN, f"{written}=3"])
    message = str(caught.value).partition(f'unknown key "{written}"')[2]
    assert f"corresponds to {setting}" in message and "did you mean" not in message


def test_where_units_differ_the_conversion_is_told() -> None:
    message = unknown_key_text("per_device_train_batch_size")
    assert (
        "data.prompts_per_step = this x devices x steps_per_generation / num_generations" in message
    )
    assert "in steps, not in updates" in unknown_key_text("max_steps")
    assert "the opposite" in unknown_key_text("rollout.enforce_eager")
    assert "has no key: sampling is always vLLM's" in unknown_key_text("use_vllm")


def test_a_name_in_no_or_the_wrong_section_is_found_in_every_section_that_has_it() -> None:
    assert unknown_key_text("lr") == 'unknown key "lr", did you mean "optimizer.lr" or "critic.lr"?'
    assert unknown_key_text("rollout.kl_coef").endswith('did you mean "algorithm.kl_coef"?')
    assert unknown_key_text("temperature").endswith(
        '"rollout.temperature" or "validation.temperature"?'
    )


@pytest.mark.parametrize(
    ("slip", "key"),
    [
        ("rollout.grop_size", "rollout.group_size"),
        ("rollout.group_szie", "rollout.group_size"),
        ("optimiser.lr", "optimizer.lr"),
        ("algo.kl_coef", "algorithm.kl_coef"),
        ("algorithm.entropy_coeff", "algorithm.entropy_coef"),
        ("optimiser", "optimizer"),
        ("group_siz", "rollout.group_size"),
        ("validaton.batch_size", "validation.batch_size"),
        ("algoritm.epochs", "algorithm.epochs"),
        ("stage.steps", "stages.steps"),
    ],
)
def test_a_slip_of_the_hand_is_guessed(slip: str, key: str) -> None:
    assert unknown_key_text(slip) == f'unknown key "{slip}", did you mean "{key}"?'


@pytest.mark.parametrize(
    "key", ["rollout.max_len", "run.dir", "reward.model", "data.columns", "policy.layers"]
)
def test_what_is_near_to_nothing_gets_no_guess(key: str) -> None:
    section = key.partition(".")[0]
    assert (
        unknown_key_text(key)
        == f'unknown key "{key}". --help {section} lists the settings of {section}.'
    )


def test_the_help_of_a_name_shows_our_settings() -> None:
    assert "  algorithm.kl_coef  (float, at least 0; default 0.0)\n" in help_text("kl_coef", 80)
    both = help_text("lr", 80)
    assert "  optimizer.lr  (float" in both and "  critic.lr  (float" in both
    text = help_text("learning_rate", 80)
    assert text.startswith("TRL's learning_rate corresponds to optimizer.lr.\n\nSettings, ")
    assert "  optimizer.lr  (float" in text and "critic.lr " not in text
    assert "  rollout.group_size  (int" in help_text("num_generations", 80)
    assert help_text("use_vllm", 80) == "TRL's use_vllm has no key: sampling is always vLLM's."
    assert max(map(len, help_text("per_device_train_batch_size", 80).splitlines())) <= 80
    with pytest.raises(
        ValueError, match=r'no setting "group_siz"\. Did you mean "rollout\.group_size"\?'
    ):
        help_text("group_siz")
    with pytest.raises(
        ValueError,
        match=r'"group"\. Settings with it in their names: data\.history_groups, rollout',
    ):
        help_text("group")
    with pytest.raises(
        ValueError, match=r'"nucleus"\. Settings with it in their texts: rollout\.top_p, '
    ):
        help_text("nucleus")
    with pytest.raises(ValueError, match=r"rollout\.group_size: without effect in this program"):
        help_text("num_generations", keys=["optimizer.lr"])


def test_an_option_of_another_trainer_is_answered_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser("").parse_intermixed_args(["--learning_rate", "1e-5", "--nothing_like_it=3"])
    stderr = capsys.readouterr().err
    assert (
        "\n--learning_rate: TRL's learning_rate corresponds to optimizer.lr.\nSettings are written"
        in stderr
    )
    assert isinstance(make_parser(""), argparse.ArgumentParser)
    with pytest.raises(SystemExit):
        program_parser().parse_intermixed_args(["--rank", "64", "--dry_run"])
    stderr = capsys.readouterr().err
    assert (
        "\n--rank: did you mean --ranks?\n--dry_run: did you mean --dry-run?\nSettings are"
        in stderr
    )
    with pytest.raises(
        ValueError, match=r"load_config: unknown key \"learning_rate\"\. TRL's learning_rate"
    ):
        rlmath.load_config(learning_rate=1e-5)  # pyright: ignore[reportArgumentType]


def test_every_alias_leads_to_settings_that_exist_and_is_none_itself() -> None:
    for alias in ALIASES:
        assert keys_in(alias) or alias.answer.startswith((NO_KEY, "`parallel: ")), alias
        assert alias.name not in all_settings(), alias
    assert {"TRL", "verl", "AReaL", "NeMo-RL", "RLinf", "SimpleRL"} < set(TRAINERS)


def test_the_page_has_the_tables_of_the_program() -> None:
    """`python -m tests.config.coming_from` writes them into it anew."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page)
    assert page.count("\n| `") == len(ALIASES)
