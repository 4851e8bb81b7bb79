"""What of a teacher is refused before a run starts, and what is warned of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.checkpoint.hf.run_shapes import read_run_shapes
from rlmath.checkpoint.hf.weight_map import parameter_count
from rlmath.config.schema import (
    AlgorithmConfig,
    Config,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    PolicyConfig,
    RolloutConfig,
    SelectionConfig,
    TeacherConfig,
)
from rlmath.data.tokenizer import load_tokenizer
from rlmath.distributed.mesh import Mesh
from rlmath.planning.checks import run_problems
from rlmath.planning.memory_estimate import Target
from rlmath.planning.model_checks import check_teacher_tokenizer, teacher_folder_problems
from rlmath.planning.planner.step import recomputes_logprobs
from rlmath.planning.setting_warnings import config_warnings
from tests.planning.of_policy import problems_of_shapes, rank_plan
from tests.tiny_models import VOCAB, make_model_folder, shape_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of 6 layers, 6 heads in 3 groups and 64 positions.

    It has more rows than the policy."""
    shape = {
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 96,
    }
    place = tmp_path_factory.mktemp("teacher") / "teacher"
    return make_model_folder(place, vocab_size=VOCAB + 9, max_position_embeddings=64, **shape)


def config_of(folder: Path, model: Path, **sections: object) -> Config:
    data = replace(Config().data, max_prompt_tokens=16)
    base = Config(model=ModelConfig(str(model)), data=data, teacher=TeacherConfig(str(folder)))
    sections.setdefault("rollout", RolloutConfig(max_new_tokens=32))
    return replace(base, **sections)


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (
            ParallelConfig(tensor=2),
            "parallel.tensor is 2; it must divide the model's 3 key-value heads",
        ),
        (
            ParallelConfig(pipeline=4),
            "parallel.pipeline is 4; it must divide the 6 layers of the model",
        ),
        (
            ParallelConfig(pipeline=2, virtual_pipeline=2),
            "parallel.virtual_pipeline is 2; it must divide the 3 layers of a pipeline stage",
        ),
    ],
)
def test_a_teacher_that_the_layout_does_not_fit_is_refused_by_the_setting(
    folder: Path, tied_model: Path, parallel: ParallelConfig, told: str
) -> None:
    """The policy, of 4 layers and 4 heads in 2 groups, allows all of them."""
    shape = shape_of(tied_model)
    problems = problems_of_shapes(config_of(folder, tied_model, parallel=parallel), shape)
    assert len(problems) == 1 and problems[0].startswith(
        f"teacher.path, which has the layout of the policy: {told}"
    )
    assert (
        problems_of_shapes(
            replace(config_of(folder, tied_model, parallel=parallel), teacher=TeacherConfig()),
            shape,
        )
        == []
    )


def test_a_teacher_with_too_few_positions_or_no_folder_is_refused(
    folder: Path, tied_model: Path
) -> None:
    long = config_of(folder, tied_model, rollout=RolloutConfig(max_new_tokens=60))
    (problem,) = problems_of_shapes(long, shape_of(tied_model))
    assert "is 76; the model in teacher.path has 64 positions" in problem
    missing = config_of(folder.with_name("other"), tied_model)
    assert (
        "teacher.path: there is no folder" in problems_of_shapes(missing, shape_of(tied_model))[0]
    )
    assert "teacher.path: there is no folder" in teacher_folder_problems(missing.teacher)[0]
    assert teacher_folder_problems(config_of(folder, tied_model).teacher) == []


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (
            AlgorithmConfig(kl_coef=0.1, kl_in="reward"),
            'algorithm.kl_in is "reward" and teacher.with_rewards false',
        ),
        (
            AlgorithmConfig(advantage="gae"),
            'algorithm.advantage is "gae" and teacher.with_rewards false',
        ),
    ],
)
def test_what_needs_rewards_is_refused_where_the_teacher_alone_is_learned_from(
    folder: Path, tied_model: Path, algorithm: AlgorithmConfig, told: str
) -> None:
    config = config_of(folder, tied_model, algorithm=algorithm)
    assert [problem for problem in run_problems(config, 1, None) if problem.startswith(told)]
    both = replace(config, teacher=replace(config.teacher, with_rewards=True))
    assert [problem for problem in run_problems(both, 1, None) if problem.startswith(told)] == []


def test_a_group_of_one_may_learn_from_a_teacher_alone(folder: Path, tied_model: Path) -> None:
    rollout = RolloutConfig(max_new_tokens=32, group_size=1)
    teacher_only = config_of(folder, tied_model, rollout=rollout)
    both = replace(teacher_only, teacher=replace(teacher_only.teacher, with_rewards=True))
    problems_by_config = [
        [problem for problem in run_problems(c, 1, None) if "rollout.group_size is 1" in problem]
        for c in (teacher_only, both)
    ]
    assert [len(problems) for problems in problems_by_config] == [0, 1]


def test_settings_without_effect_are_told(folder: Path, tied_model: Path) -> None:
    without = Config(
        teacher=TeacherConfig(loss="full", coef=2.0), memory=MemoryConfig(offload_teacher=True)
    )
    warning = "memory.offload_teacher, teacher.loss, teacher.coef: no effect without teacher.path."
    assert warning in config_warnings(without)
    drops = config_of(folder, tied_model, selection=SelectionConfig(dynamic_sampling="accuracy"))
    assert [
        warning
        for warning in config_warnings(drops)
        if "the teacher would teach them, too" in warning
    ]
    moves = Config(algorithm=AlgorithmConfig(reference_every_steps=5))
    assert [
        warning
        for warning in config_warnings(moves)
        if warning.startswith("algorithm.reference_every_steps: no")
    ]


def edited(folder: Path, place: Path, change: object) -> Path:
    """A copy of a folder's tokenizer, changed."""
    place.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (place / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        content = json.loads((place / name).read_text(encoding="utf-8"))
        change(name, content)  # type: ignore[operator]
        (place / name).write_text(json.dumps(content), encoding="utf-8")
    return place


def test_the_same_tokenizer_is_taken_and_the_token_that_differs_is_named(
    folder: Path, tied_model: Path, tmp_path: Path
) -> None:
    policy_tokenizer = load_tokenizer(str(tied_model))
    assert check_teacher_tokenizer(str(folder), policy_tokenizer, str(tied_model)) == ()

    def swap(name: str, content: dict) -> None:
        if name == "tokenizer.json":
            vocab = content["model"]["vocab"]
            vocab["A"], vocab["B"] = vocab["B"], vocab["A"]

    with pytest.raises(
        ValueError, match=r"token \d+ is 'B' in the teacher's and 'A' in the policy's"
    ):
        check_teacher_tokenizer(
            str(edited(folder, tmp_path / "swapped", swap)), policy_tokenizer, str(tied_model)
        )

    def special(name: str, content: dict) -> None:
        if name == "tokenizer.json":
            (pad,) = (token for token in content["added_tokens"] if token["content"] == "<pad>")
            pad.update(id=5, content="!", special=True)
            pad["content"] = next(
                text for text, number in content["model"]["vocab"].items() if number == 5
            )

    other = edited(folder, tmp_path / "special", special)
    with pytest.raises(
        ValueError, match=r"token \d+ is .* in the teacher's and .* in the policy's"
    ):
        check_teacher_tokenizer(str(other), policy_tokenizer, str(tied_model))


def test_a_teacher_that_ends_otherwise_is_warned_of(
    folder: Path, tied_model: Path, tmp_path: Path
) -> None:
    def end(name: str, content: dict) -> None:
        if name == "tokenizer_config.json":
            content["eos_token"] = "<pad>"

    policy_tokenizer = load_tokenizer(str(tied_model))
    other = edited(folder, tmp_path / "end", end)
    (warning,) = check_teacher_tokenizer(str(other), policy_tokenizer, str(tied_model))
    assert warning.startswith("the policy ends with '<eos>' and the teacher with '<pad>'")


def test_the_plan_has_the_teacher_where_it_is_held(folder: Path, tied_model: Path) -> None:
    """The second of two stages has the output layer: V x H = 101 x 96 elements of 2 bytes."""
    gpu = Target("cuda", "any", 80 * 2**30, local_layers=True)
    shape = shape_of(tied_model)
    parallel = ParallelConfig(pipeline=2)
    config = config_of(
        folder, tied_model, parallel=parallel, policy=PolicyConfig(max_tokens_per_microbatch=512)
    )
    for offload in (False, True):
        for loss in ("advantage", "full"):
            full = replace(
                config,
                teacher=replace(config.teacher, loss=loss),
                memory=MemoryConfig(offload_teacher=offload),
            )
            plan = rank_plan(full, shape, Mesh(1, 2, 1, 2, 1), gpu)
            holding = {phase for phase, parts in plan.phases.items() if "teacher" in parts}
            heads = {phase for phase, parts in plan.phases.items() if "teacher_head" in parts}
            every = {"sync", "generate", "logprobs", "teacher", "update"}
            assert holding == ({"teacher"} if offload else every)
            assert heads == (
                set() if loss == "advantage" else {"teacher", "update"} if offload else every
            )
            assert plan.part("teacher_head") == (2 * VOCAB * 96 if loss == "full" else 0)
            assert ("logits" in plan.phases["teacher"]) == (loss == "advantage")
    full = replace(config, teacher=replace(config.teacher, loss="full"))
    teacher_shape = read_run_shapes(config, shape).teacher
    first, last = (rank_plan(full, shape, Mesh(rank, 2, 1, 2, 1), gpu) for rank in (0, 1))
    assert first.part("teacher_head") == 0 and teacher_shape is not None
    teacher_bytes = sum(
        plan.part(part) for plan in (first, last) for part in ("teacher", "teacher_head")
    )
    assert teacher_bytes == 2 * parameter_count(replace(teacher_shape, vocab_size=VOCAB))
    advantage_working = rank_plan(config, shape, Mesh(1, 2, 1, 2, 1), gpu).phases["update"][
        "working"
    ]
    assert last.phases["update"]["working"] > advantage_working + 2 * 512 * 96, (
        "its hidden states, and blocks of its logits"
    )


def test_a_teacher_in_the_advantages_needs_the_policys_log_probs_first(
    folder: Path, tied_model: Path
) -> None:
    config = config_of(folder, tied_model)
    full = replace(config, teacher=replace(config.teacher, loss="full"))
    assert recomputes_logprobs(config.algorithm, config.on_policy)
    assert not recomputes_logprobs(full.algorithm, full.on_policy)
    policy = shape_of(tied_model)
    shape = read_run_shapes(config, policy).teacher
    assert shape is not None and shape.vocab_size == VOCAB + 9
    assert read_run_shapes(Config(), policy).teacher is None
