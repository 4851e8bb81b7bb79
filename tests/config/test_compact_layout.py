"""A layout in one word stands for the keys of the section."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.config.load import compact_layout, layout_settings, load_config
from rlmath.config.schema import ParallelConfig, RolloutConfig
from rlmath.planning.parallelism import rank_problems

NEEDED = ["run.output_dir=o", "model.path=m", "data.train_path=t"]


def test_every_letter_names_its_size():
    assert compact_layout("d2t3p4c5e6") == {"data": 2, "tensor": 3, "pipeline": 4, "context": 5, "expert": 6}
    assert compact_layout("m2") == {"data": None, "tensor": 2, "pipeline": 1, "context": 1, "expert": 1}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("d2x3", 'no size "x"'),
        ("d2d3", "data size is given twice"),
        ("d2-t1", "one by one"),
        ("2d", "one by one"),
        ("d" + "9" * 5000, "data size is"),
    ],
)
def test_a_word_that_is_no_layout_is_told(word: str, told: str):
    with pytest.raises(ValueError, match=told):
        compact_layout(word)


ENGINES = {"rollout.ranks": 24, "rollout.tensor_parallel": 2}


@pytest.mark.parametrize(
    "word", ["d12t2+d4p2", "d12t2p1c1e1+p2d4", "sglang.d12m2p1+d4m1p2", "vllm:d12t2 + megatron:d4p2"]
)
def test_two_parts_are_engines_of_their_own_and_training_in_that_order(word: str):
    training = {"data": 4, "tensor": 1, "pipeline": 2, "context": 1, "expert": 1}
    assert layout_settings(word) == ENGINES | {f"parallel.{name}": size for name, size in training.items()}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("d2+d2+d4", 'got "d2+d2+d4", with 2 plus signs; needed: one'),
        (
            "t2+d4",
            'the part before the plus sign, "t2", must have d, the number of engines. Write d12t2 for 12',
        ),
        ("d2t2p2+d4", 'the part before the plus sign, "d2t2p2", has pipeline 2'),
        ("d4+", 'got "d4+"; needed: generation before the plus sign and training behind it'),
        ("fsdp:d4", "needed: a layout such as d32t2p1"),
    ],
)
def test_two_parts_that_make_no_layout_are_told(word: str, told: str):
    with pytest.raises(ValueError) as error:
        layout_settings(word)
    assert told in str(error.value)


def test_files_and_the_command_line_take_two_parts_and_later_keys_win(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("parallel: d12t2+d4\nrollout:\n  group_size: 8\n")
    config = load_config([tmp_path / "a.yaml"], NEEDED)
    assert config.parallel == ParallelConfig(data=4)
    assert config.rollout == RolloutConfig(ranks=24, tensor_parallel=2, group_size=8)
    config = load_config([tmp_path / "a.yaml"], [*NEEDED, "parallel=d1t2+d4t2", "rollout.ranks=4"])
    assert config.parallel == ParallelConfig(data=4, tensor=2)
    assert (config.rollout.ranks, config.rollout.tensor_parallel) == (4, 2)
    # without a plus sign the word says nothing of the engines
    assert load_config([tmp_path / "a.yaml"], [*NEEDED, "parallel=d8"]).rollout.ranks == 24
    (tmp_path / "a.yaml").write_text("parallel: d12+d4+d1\n")
    with pytest.raises(ValueError, match=r"a\.yaml: .*2 plus signs"):
        load_config([tmp_path / "a.yaml"], NEEDED)


def test_a_data_size_that_the_ranks_do_not_make_is_told():
    (problem,) = rank_problems(ParallelConfig(data=4, tensor=2), 1, world_size=4)
    assert "parallel.data is 4" in problem and "Start 8" in problem
    assert not list(rank_problems(ParallelConfig(data=2, tensor=2), 1, world_size=4))
