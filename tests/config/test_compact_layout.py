"""A layout in one word stands for the keys of the section."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.config.load import compact_layout, load_config
from rlmath.config.schema import ParallelConfig
from rlmath.trainer.preflight.parallelism import rank_problems

NEEDED = ["run.output_dir=o", "model.path=m", "data.train_path=t"]


def test_every_letter_names_its_size():
    assert compact_layout("d2t3p4c5e6") == {"data": 2, "tensor": 3, "pipeline": 4, "context": 5, "expert": 6}
    assert compact_layout("m2") == {"data": None, "tensor": 2, "pipeline": 1, "context": 1, "expert": 1}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("d2x3", 'no size "x"'),
        ("d2d3", "data size is given twice"),
        ("t2m3", "tensor size is given twice"),
        ("d0", "data size is 0"),
        ("d2-t1", "one by one"),
        ("2d", "one by one"),
        ("d" + "9" * 5000, "data size is"),
    ],
)
def test_a_word_that_is_no_layout_is_told(word: str, told: str):
    with pytest.raises(ValueError, match=told):
        compact_layout(word)


def test_files_and_the_command_line_take_it_and_later_keys_win(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("parallel: d32t2p1\n")
    assert load_config([tmp_path / "a.yaml"], NEEDED).parallel == ParallelConfig(data=32, tensor=2)
    overridden = load_config([tmp_path / "a.yaml"], [*NEEDED, "parallel=d4p2", "parallel.sequence=true"])
    assert overridden.parallel == ParallelConfig(data=4, pipeline=2, sequence=True)


def test_a_data_size_that_the_ranks_do_not_make_is_told():
    (problem,) = rank_problems(ParallelConfig(data=4, tensor=2), 1, world_size=4)
    assert "parallel.data is 4" in problem and "Start 8" in problem
    assert not list(rank_problems(ParallelConfig(data=2, tensor=2), 1, world_size=4))
