"""A layout in one word stands for the keys of the section."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.config.load import layout_settings, load_config
from rlmath.config.schema import ParallelConfig, RolloutConfig
from rlmath.planning.parallelism import rank_problems

NEEDED = ["run.output_dir=o", "model.path=m", "data.train_path=t"]


def test_every_letter_names_its_size():
    assert list(layout_settings("d2t3p4c5e6").values()) == [2, 3, 4, 5, 6]
    assert list(layout_settings("m2").values()) == [None, 2, 1, 1, 1]


@pytest.mark.parametrize(
    "word", ["d2x3", "d2-t1", "2d", "d0", "d" + "9" * 5000, "fsdp:d4", "d4+", "d2+d2+d4"]
)
def test_a_word_that_is_no_layout_is_told(word: str):
    with pytest.raises(
        ValueError, match=r"needed: a layout such as d32t2p1 .* or its keys one by one"
    ):
        layout_settings(word)


@pytest.mark.parametrize("word", ["d2d3", "t2m3", "d2t2t1+d4"])
def test_a_size_that_is_given_twice_is_told(word: str):
    with pytest.raises(ValueError, match="needed: every size once"):
        layout_settings(word)


ENGINES = {"rollout.ranks": 24, "rollout.tensor_parallel": 2}


@pytest.mark.parametrize(
    "word",
    ["d12t2+d4p2", "d12t2p1c1e1+p2d4", "sglang.d12m2p1+d4m1p2", "vllm:d12t2 + megatron:d4p2"],
)
def test_two_parts_are_engines_of_their_own_and_training_in_that_order(word: str):
    training = {"data": 4, "tensor": 1, "pipeline": 2, "context": 1, "expert": 1}
    assert layout_settings(word) == ENGINES | {
        f"parallel.{name}": size for name, size in training.items()
    }


@pytest.mark.parametrize("word", ["t2+d4", "d2t2p2+d4"])
def test_engines_that_there_cannot_be_are_told(word: str):
    with pytest.raises(ValueError, match="needed before the plus sign: d, the number of engines"):
        layout_settings(word)


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
    with pytest.raises(ValueError, match=r"a\.yaml: .*needed: a layout"):
        load_config([tmp_path / "a.yaml"], NEEDED)


def test_a_data_size_that_the_ranks_do_not_make_is_told():
    (problem,) = rank_problems(ParallelConfig(data=4, tensor=2), 1, world_size=4)
    assert "parallel.data is 4" in problem and "Start 8" in problem
    assert not list(rank_problems(ParallelConfig(data=2, tensor=2), 1, world_size=4))
