"""Which settings a supervised run has, and what is told before it starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.config.help import all_settings
from rlmath.config.load import load_config
from rlmath.config.schema import Config, MemoryConfig, PolicyConfig, RolloutConfig
from rlmath.planning.checks import check_config, only_used, used_keys
from rlmath.planning.memory_estimate import Target, mesh_of
from rlmath.planning.memory_fit import GIB
from rlmath.planning.parallelism import planned_ranks
from rlmath.planning.setting_warnings import config_warnings
from rlmath.run.prepare import read_inputs
from tests.planning.of_policy import lines_at_start, problems_of_fit, rank_plans
from tests.tiny_models import shape_of

POSITIONS = 256
CPU = Target("cpu", "CPU", None, local_layers=True)


@pytest.fixture
def place(untied_model: Path, tmp_path: Path) -> list[str]:
    """Overrides on which nothing is wrong."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    return [
        f"run.output_dir={tmp_path}/out",
        "run.device=cpu",
        f"model.path={untied_model}",
        f"data.train_path={tmp_path}/train.jsonl",
        f"sft.max_sequence_tokens={POSITIONS}",
        f"policy.max_tokens_per_microbatch={POSITIONS}",
    ]


def problems(place: list[str], *overrides: str, world_size: int = 4) -> str:
    with pytest.raises(ValueError, match="with this run") as error:
        check_config(load_config([], [*place, *overrides]), world_size, "sft")
    return str(error.value)


def test_settings_without_effect_are_set_back_and_named() -> None:
    settings = Config(
        rollout=RolloutConfig(group_size=3, temperature=0.5),
        memory=MemoryConfig(gpu_gib=80.0),
        policy=PolicyConfig(routing_replay="old"),
    )
    config, unused = only_used(settings)
    assert unused == ["policy.routing_replay", "rollout.group_size", "rollout.temperature"]
    assert config == replace(settings, rollout=RolloutConfig(), policy=PolicyConfig())
    assert only_used(config) == (config, [])
    assert config_warnings(config, unused)[0].endswith(
        "training: policy.routing_replay, rollout.group_size, rollout.temperature."
    )
    assert config_warnings(config, []) == []


def test_every_setting_of_its_own_section_is_used() -> None:
    used = used_keys()
    assert set(used) < set(all_settings())
    assert {
        key for key in all_settings() if key.startswith(("sft.", "save.", "optimizer."))
    } <= set(used)
    assert not any(
        key.startswith(("rollout.", "reward.", "critic.", "teacher.", "stages.")) for key in used
    )
    chat = {
        "data.template",
        "data.chat_template",
        "data.chat_template_kwargs",
        "data.system_prompt",
    }
    assert chat <= set(used)
    assert {key for key in used if key.startswith("tools.")} == {
        "tools.format",
        "tools.max_output_tokens",
    }
    of_algorithm = {key for key in used if key.startswith("algorithm.")}
    assert of_algorithm == {"algorithm.rollback", "algorithm.rollback_lr_factor"}


def test_nothing_is_wrong_with_a_good_run(place: list[str], untied_model: Path) -> None:
    shapes = check_config(
        load_config([], [*place, "parallel.tensor=2", "parallel.pipeline=2"]), 4, "sft"
    )
    assert shapes.policy == shape_of(untied_model)
    assert shapes.critic is None and shapes.teacher is None


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("sft.max_sequence_tokens=257", "policy.max_tokens_per_microbatch=300"),
            "the model has 256 positions",
        ),
        (
            ("data.template=raw", "data.system_prompt=Be brief.", "data.chat_template=think"),
            'data.chat_template, data.system_prompt: data.template is "raw", which makes no '
            "conversation.",
        ),
        (("data.chat_template=none.jinja",), 'data.chat_template: there is no file "none.jinja"'),
        (
            ("policy.max_tokens_per_microbatch=255",),
            "a sequence of sft.max_sequence_tokens=256 tokens must fit",
        ),
        (("sft.held_out_share=1.0",), "sft.held_out_share is 1.0; needed:"),
        (
            ("sft.held_out_path=/nowhere/x.jsonl",),
            'sft.held_out_path: there is no file "/nowhere/x.jsonl"',
        ),
    ],
)
def test_what_cannot_run_is_told(place: list[str], overrides: tuple[str, ...], told: str) -> None:
    assert told in problems(place, *overrides)


@pytest.mark.parametrize(
    ("has_tokenizer", "cause"),
    [
        (True, "transformers is not installed, which reads the tokenizer of"),
        (False, "has no tokenizer here"),
    ],
)
def test_sequences_that_cannot_be_counted_are_told_with_the_cause(
    place: list[str],
    untied_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_tokenizer: bool,
    cause: str,
) -> None:
    shape = shape_of(untied_model)
    config = load_config([], [*place, f"model.path={tmp_path}"])
    if has_tokenizer:
        (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=f"cannot be counted: .*{cause}.*rlmath install cpu"):
        read_inputs(config, shape, "sft")


def test_memory_is_that_of_training_alone(place: list[str], untied_model: Path) -> None:
    """A GPU's plan has no engine and no reference in it.

    A GPU that is too small is refused with what to change."""
    config = load_config([], place)
    shape = shape_of(untied_model)
    target = Target("cuda", "a GPU", 4 * GIB, local_layers=False)
    (plan,), (whole,) = (
        rank_plans(config, shape, 1, target, "sft"),
        rank_plans(config, shape, 1, target),
    )
    assert list(plan.phases) == ["update"] and "engine_workspace" not in plan.phases["update"]
    assert plan.held("update") == whole.held("update") - whole.phases["update"].get(
        "engine_workspace", 0
    )
    assert "parameters" in plan.phases["update"] and lines_at_start(config, shape, 1, "sft")[
        0
    ].startswith("Planned memory")
    assert problems_of_fit(config, shape, 1, "sft") == []
    huge = [
        "sft.max_sequence_tokens=200",
        "policy.max_tokens_per_microbatch=9000000",
        "memory.gpu_gib=8",
    ]
    assert "Lower policy.max_tokens_per_microbatch (now 9000000" in problems(place, *huge)


def test_all_ranks_of_a_supervised_run_train_whatever_its_engines_would_have(
    place: list[str],
) -> None:
    settings = load_config([], [*place, "parallel=d2t2+d4"])
    config, unused = only_used(settings)
    assert unused == ["rollout.ranks", "rollout.tensor_parallel"]
    assert planned_ranks(settings.parallel, settings.rollout, None) == 8
    assert planned_ranks(config.parallel, config.rollout, None) == 4
    check_config(config, 4, "sft")
    assert mesh_of(config.parallel, config.rollout, 4, rank=3).data == 4
    (plan,) = rank_plans(config, shape_of(Path(config.model.path)), 4, CPU, "sft")
    assert list(plan.phases) == ["update"]
    assert "engine rank" not in " ".join(
        lines_at_start(config, shape_of(Path(config.model.path)), 4, "sft")
    )
