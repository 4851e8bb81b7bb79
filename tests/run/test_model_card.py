"""The card of an exported model: what it says, and what hostile text cannot do to it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import rlmath
from rlmath.config.hub import hub_ids, with_places
from rlmath.config.load import load_config
from rlmath.config.schema import Config
from rlmath.run.recovery.model_card import model_card


def config_of(folder: Path, *overrides: str) -> Config:
    plain = (
        f"run.output_dir={folder}/run",
        "model.path=models/tiny",
        "data.train_path=data/train.jsonl",
    )
    return load_config([], [*plain, *overrides])


def card_of(config: Config, steps: int = 3) -> str:
    return model_card(config, steps, 4).decode()


def front_of(card: str) -> dict:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match is not None
    return yaml.safe_load(match[1])


def settings_of(card: str) -> dict:
    match = re.search(r"\n(`{3,})yaml\n(.*)\n\1\n$", card, re.DOTALL)
    assert match is not None
    return yaml.safe_load(match[2])


def rows(folder: Path, name: str, *content: dict) -> None:
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / name).write_text("".join(f"{json.dumps(row)}\n" for row in content))


def test_a_card_says_base_data_settings_steps_and_what_was_measured(tmp_path: Path) -> None:
    rows(
        tmp_path,
        "metrics.jsonl",
        *(
            {"step": step, "task_reward": step - 2.5, "rollout/accuracy": step / 8}
            for step in (1, 2, 3, 4)
        ),
    )
    rows(
        tmp_path,
        "validation.jsonl",
        {"step": 0, "validation/accuracy": 0.25, "validation/aime24/accuracy": 0.25},
        {"step": 2, "validation/accuracy": 0.5, "validation/aime24/accuracy": 0.5},
        {"step": 4, "validation/accuracy": 0.75, "validation/aime24/accuracy": 0.75},
    )
    card = card_of(config_of(tmp_path, "optimizer.lr=0.002"))
    assert front_of(card) == {
        "base_model": "tiny",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlmath"],
    }
    assert (
        f"`tiny` by reinforcement learning with rlmath {rlmath.__version__}: 3 of 4 steps." in card
    )
    assert "- `data/train.jsonl`\n" in card
    assert "| mean reward | 1 | -1.5 | 3 | 0.5 |" in card
    assert "| accuracy of sampled answers | 1 | 0.125 | 3 | 0.375 |" in card
    assert "| `validation/aime24/accuracy` | 0 | 0.25 | 2 | 0.5 |" in card
    assert settings_of(card) == {
        "model": {"path": "models/tiny"},
        "data": {"train_path": "data/train.jsonl"},
        "optimizer": {"lr": 0.002},
    }


def test_a_card_of_adapters_says_the_same_of_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, "lora.rank=4")
    whole, adapters = (
        model_card(config, 3, 4, is_adapter=is_adapter).decode() for is_adapter in (False, True)
    )
    assert front_of(adapters) == front_of(whole) | {"library_name": "peft"}
    assert "\n# LoRA adapters of `tiny`, trained by rlmath\n" in adapters
    assert adapters.partition("\nTrained from")[2] == whole.partition("\nTrained from")[2] != ""


def test_a_card_has_the_licence_of_the_base_model(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    config = config_of(tmp_path, f"model.path={tmp_path}/base")
    (tmp_path / "base" / "README.md").write_text(
        "---\nlicense: apache-2.0\ntags: [x]\n---\n# Base\n"
    )
    assert front_of(card_of(config))["license"] == "apache-2.0"
    for content in (
        "no front matter",
        "---\n[\n---\n",
        "---\nlicense: [1]\n---\n",
        "---\n- 1\n---\n",
    ):
        (tmp_path / "base" / "README.md").write_text(content)
        assert "license" not in front_of(card_of(config))
    for unreadable in (b"---\nlicense: \xff\n---\n", b"---\n" + b"[" * 5000 + b"\n---\n"):
        (tmp_path / "base" / "README.md").write_bytes(unreadable)
        assert "license" not in front_of(card_of(config))


def test_folders_of_the_machine_are_no_part_of_a_card(tmp_path: Path) -> None:
    overrides = (
        "model.path=/home/jane doe/hub/models--Qwen--Qwen3-8B/snapshots/0123abc",
        "data.train_path=/home/jane doe/my data/train.jsonl",
        "data.more_train_paths=[/home/jane/b.jsonl,~/c.jsonl,../../jane/d.jsonl]",
        "data.system_prompt='see /home/jane/secret/e.txt'",
        "reward.function=/home/jane/rewards.py:short",
    )
    card = card_of(config_of(tmp_path, *overrides))
    assert "jane" not in card and "home" not in card and str(tmp_path) not in card
    assert front_of(card)["base_model"] == "Qwen/Qwen3-8B"
    assert settings_of(card)["data"] == {
        "train_path": "train.jsonl",
        "more_train_paths": ["b.jsonl", "c.jsonl", "d.jsonl"],
        "system_prompt": "see e.txt",
    }
    assert settings_of(card)["reward"] == {"function": "rewards.py:short"}


def test_models_and_data_of_the_hub_have_their_ids_in_a_card(tmp_path: Path) -> None:
    rows = "hf://datasets/org/rows/data/train.jsonl"
    config = config_of(tmp_path, "model.path=hf://org/model@main", f"data.train_path={rows}")
    pins = {hub_id: replace(hub_id, commit="1" * 40) for hub_id in hub_ids(config)}
    card = card_of(with_places(config, pins))
    assert front_of(card)["base_model"] == "org/model"
    address = f"hf://datasets/org/rows#{'1' * 40}/data/train.jsonl"
    assert f"- `{address}`" in card and settings_of(card)["data"] == {"train_path": address}


@pytest.mark.parametrize(
    "text",
    [
        "````\n# Not a setting\n```",
        "\n---\nlicense: mine\n---\n",
        "<script>alert(1)</script> | a ` b \x1b[2J \u202e",
        "a: [b, {c: 'd\"",
    ],
)
def test_hostile_text_stays_in_its_place(tmp_path: Path, text: str) -> None:
    config = config_of(
        tmp_path, f"data.system_prompt={json.dumps(text)}", f"model.path={json.dumps(text)}"
    )
    card = card_of(config)
    front = front_of(card)
    assert front.keys() == {"base_model", "library_name", "pipeline_tag", "tags"}
    system_prompt = settings_of(card)["data"]["system_prompt"]
    assert system_prompt == text
    *_, settings_block, fence, end = re.split(r"^(`{3,})(?:yaml)?$", card, flags=re.MULTILINE)
    assert fence not in settings_block and end == "\n", "or Markdown would end the block early"
    assert "\x1b" not in card and "\u202e" not in card
    lines = card.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        line
        for line in lines
        if re.fullmatch(r"# `[^`]*`, trained by rlmath|## (Data|Settings)", line)
    ]


def test_a_card_says_what_rounding_has_lost_of_the_adapters_and_what_to_take(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "lora.rank=4")
    whole, little, much = (
        model_card(config, 3, 4, kept=kept).decode() for kept in (0.9996, 0.96, 0.174)
    )
    assert whole == model_card(config, 3, 4).decode() and "rounded" not in whole.lower()
    text = "\n\nRounded, the model keeps 96% of what was learned; adapter/ has all of it.\n\n"
    assert text in little
    assert "keeps 17.4% of what was learned; adapter/ has all of it: use that, or export" in much


def test_a_card_tells_the_kind_of_training_by_the_metrics_of_its_folder(tmp_path: Path) -> None:
    """A model that is converted has the metrics of another folder than `run.output_dir`."""
    first_loss = {"step": 1, "held_out/loss": 3.0}
    rows(tmp_path, "metrics.jsonl", first_loss, {"step": 2, "held_out/loss": 2.0})
    config = config_of(tmp_path)
    card = card_of(config)
    assert "by supervised training with" in card and "| held-out loss | 1 | 3 | 2 | 2 |" in card
    (tmp_path / "other" / "run").mkdir(parents=True)
    rows(tmp_path / "other", "metrics.jsonl", {"step": 1, "task_reward": 0.5})
    elsewhere = model_card(config, 3, 4, output_dir=tmp_path / "other" / "run").decode()
    assert "by reinforcement learning with" in elsewhere
    assert "| mean reward | 1 | 0.5 | 1 | 0.5 |" in elsewhere and "held-out" not in elsewhere


def test_a_card_counts_steps_where_their_number_is_not_known(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert f"rlmath {rlmath.__version__}: 1 step.\n" in model_card(config, 1, None).decode()
    assert f"rlmath {rlmath.__version__}: 7 steps.\n" in model_card(config, 7, None).decode()


def test_a_card_measures_between_the_first_and_the_last_step_that_it_is_of(tmp_path: Path) -> None:
    """Each measure has its own first step, and none after the model's step counts."""
    rows(
        tmp_path,
        "metrics.jsonl",
        {"step": 0, "task_reward": 0.0},
        {"step": 1, "task_reward": 0.1},
        {"step": 2, "task_reward": 0.2, "rollout/accuracy": 0.5},
        {"step": 3, "task_reward": 0.3, "rollout/accuracy": 0.5},
        {"step": 4, "task_reward": 0.4, "rollout/accuracy": 0.5},
    )
    rows(
        tmp_path,
        "validation.jsonl",
        {"step": 1, "validation/a/accuracy": 0.1, "validation/seconds": 7.0},
        {"step": 3, "validation/a/accuracy": 0.2, "validation/b/accuracy": 0.3},
    )
    lines = [line for line in card_of(config_of(tmp_path)).splitlines() if line.startswith("| ")]
    assert lines == [
        "| measure | step | value | step | value |",
        "| mean reward | 1 | 0.1 | 3 | 0.3 |",
        "| accuracy of sampled answers | 2 | 0.5 | 3 | 0.5 |",
        "| `validation/a/accuracy` | 1 | 0.1 | 3 | 0.2 |",
        "| `validation/b/accuracy` | 3 | 0.3 | 3 | 0.3 |",
    ]


def test_settings_of_one_machine_are_no_part_of_a_card(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        "run.distributed_timeout_seconds=7",
        "run.hub_timeout_seconds=8",
        "run.seed=9",
    )
    card = card_of(config)
    assert settings_of(card)["run"] == {"seed": 9}


def test_a_licence_of_its_own_keeps_its_name_and_address(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    fields = {"license": "other", "license_name": "mine", "license_link": "LICENSE"}
    text = yaml.safe_dump(fields | {"language": "en"})
    (tmp_path / "base" / "README.md").write_text(f"---\n{text}---")
    front = front_of(card_of(config_of(tmp_path, f"model.path={tmp_path}/base")))
    assert {name: front.get(name) for name in (*fields, "language")} == fields | {"language": None}
