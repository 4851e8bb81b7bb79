"""Checkpoints: what is loaded is what was saved.

That holds on the same and on other layouts, whatever happened meanwhile.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlmath.checkpoint.directory import complete_checkpoints, content_entry, wrong_contents
from tests.distributed import store_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.store_cases import Outcome
from tests.distributed.test_parity import assert_close_together
from tests.selection import keeping, matrix
from tests.tiny_models import make_samples

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

SAMPLES = make_samples(12, seed=4, longest=40)


def adam(case: Case) -> Case:
    return replace(case, optimizer="adam", lr=1e-3)


def save(ranks: RankPool, folder: Path, case: Case, root: Path) -> list[Outcome]:
    return ranks.run(case.ranks, store_cases.save, folder, case, SAMPLES, root)


def load(ranks: RankPool, folder: Path, case: Case, root: Path) -> list[Outcome]:
    return ranks.run(case.ranks, store_cases.load, folder, case, SAMPLES, root)


SAME = [
    adam(Case(data=2)),
    adam(Case(tensor=2, sequence=True)),
    adam(Case(pipeline=2, virtual_pipeline=2)),
    Case(data=2, optimizer="sgd"),
    pytest.param(adam(Case(data=2, lora="all")), marks=matrix),
    adam(Case(pipeline=2, virtual_pipeline=2, lora="mlp")),
]


class Saved(dict[Case, tuple[Path, list[Outcome]]]):
    """Checkpoint and outcomes of a layout, made when they are first asked for."""

    def __init__(self, ranks: RankPool, folder: Path, place: Path) -> None:
        self._ranks = ranks
        self._folder = folder
        self._place = place

    def __missing__(self, case: Case) -> tuple[Path, list[Outcome]]:
        root = self._place / str(case)
        root.mkdir()
        self[case] = root, save(self._ranks, self._folder, case, root)
        return self[case]


@pytest.fixture(scope="module")
def saved_by(
    ranks: RankPool, untied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    return Saved(ranks, untied_model, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("case", keeping(SAME, SAME[0]), ids=str)
def test_on_the_same_layout_every_bit_comes_back_and_the_next_update_is_the_same(
    ranks: RankPool, untied_model: Path, saved_by: Saved, case: Case
) -> None:
    root, saved = saved_by[case]
    loaded = load(ranks, untied_model, case, root)
    for before, after in zip(saved, loaded, strict=True):
        assert before.state.keys() == after.state.keys() and len(before.state) > 20
        for name in before.state:
            assert torch.equal(before.state[name], after.state[name]), name
        for name in before.later:
            assert torch.equal(before.later[name], after.later[name]), name
        assert before.numbers == after.numbers


OTHERS = [
    ("untied", Case(data=2), [Case(), Case(tensor=2), Case(tensor=2, pipeline=2), Case(data=3)]),
    ("untied", Case(tensor=2, pipeline=2), [Case(), Case(data=2), Case(tensor=2, data=2)]),
    ("tied", Case(data=2), [Case(pipeline=2), Case(tensor=2, pipeline=2)]),
    ("tied", Case(pipeline=2), [Case(), Case(tensor=2)]),
    (
        "untied",
        Case(tensor=2, pipeline=2, sequence=True, lora="all"),
        [
            Case(lora="all"),
            Case(data=3, lora="all"),
            Case(pipeline=2, virtual_pipeline=2, lora="all"),
        ],
    ),
]


@matrix
@pytest.mark.parametrize(
    ("model", "made_on", "others"), keeping(OTHERS, OTHERS[0], OTHERS[4], others=0)
)
def test_a_checkpoint_loads_on_other_layouts_and_the_next_update_is_the_same_but_for_rounding(
    ranks: RankPool,
    untied_model: Path,
    tied_model: Path,
    tmp_path: Path,
    model: str,
    made_on: Case,
    others: list[Case],
) -> None:
    folder = untied_model if model == "untied" else tied_model
    saved = save(ranks, folder, adam(made_on), tmp_path)[0]
    for case in others:
        loaded = load(ranks, folder, adam(case), tmp_path)[0]
        for name, tensor in saved.weights.items():
            assert torch.equal(tensor, loaded.weights[name]), (str(case), name)
        assert_close_together(loaded.later, saved.later, 1e-6)


@matrix
def test_recovery_points_give_way_to_newer_ones_and_kept_models_stay(
    ranks: RankPool, untied_model: Path, tmp_path: Path
) -> None:
    steps = [(1, False), (2, True), (3, False), (4, False), (5, False)]
    ranks.run(1, store_cases.save_often, untied_model, adam(Case()), tmp_path, steps, 2)
    checkpoints, problems = complete_checkpoints(tmp_path)
    assert not problems
    good = (3, False)  # the best rewards were those up to step 3
    assert [(checkpoint.step, checkpoint.kept) for checkpoint in checkpoints] == [
        (5, False),
        (4, False),
        good,
        (2, True),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-{n:06d}" for n in range(2, 6)
    ]


@matrix
def test_signals_that_stop_a_run_do_not_end_its_writers(
    ranks: RankPool, untied_model: Path, tmp_path: Path
) -> None:
    saved = ranks.run(2, store_cases.signal_the_writers, untied_model, adam(Case(data=2)), tmp_path)
    assert saved == [[None, None]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]


@matrix
def test_a_writer_that_dies_costs_one_checkpoint(
    ranks: RankPool, untied_model: Path, tmp_path: Path
) -> None:
    errors = ranks.run(2, store_cases.lose_a_writer, untied_model, adam(Case(data=2)), tmp_path)
    for first, second in errors:
        assert first is not None and "rank 1" in first and "has ended" in first
        assert second is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_the_manifest_has_what_each_rank_wrote_whatever_the_first_rank_sees(
    ranks: RankPool, untied_model: Path, tmp_path: Path
) -> None:
    """The files of both ranks change on the disk, and then one is lost."""
    case = adam(Case(data=2))
    assert ranks.run(2, store_cases.save_beside, untied_model, case, tmp_path) == [None, None]
    ((checkpoint,), _) = complete_checkpoints(tmp_path)
    for rank in range(2):
        entry = checkpoint.files[f"routes-{rank:05d}"]
        assert entry == content_entry(b"%d" % rank * 1000)
    names = [name for name in checkpoint.files if name.startswith("routes")]
    assert wrong_contents(checkpoint, names) == [
        f"routes-{rank:05d} has other contents than were written (SHA-256 differs)"
        for rank in range(2)
    ]
    errors = ranks.run(2, store_cases.save_beside, untied_model, case, tmp_path / "second", 1)
    assert all(error is not None and "routes-00001" in error for error in errors)
    assert list((tmp_path / "second").iterdir()) == []


def test_every_file_is_in_the_manifest_and_as_large_as_its_tensors(saved_by: Saved) -> None:
    root, (saved, *_) = saved_by[adam(Case(data=2))]
    (checkpoint,), _ = complete_checkpoints(root)
    on_disk = {
        p.relative_to(checkpoint.folder).as_posix()
        for p in checkpoint.folder.rglob("*")
        if p.is_file()
    }
    assert on_disk - {"manifest.json"} == set(checkpoint.files)
    parameters = sum(tensor.nbytes for tensor in saved.weights.values())
    state_bytes = sum(
        file.size for name, file in checkpoint.files.items() if name.endswith(".distcp")
    )
    # Parameters and Adam's two moments of them, and some hundred bytes for each tensor.
    assert 3 * parameters < state_bytes < 3.6 * parameters
    assert json.loads((checkpoint.folder / "progress.json").read_text())["optimizer_tensors"] == [
        "exp_avg",
        "exp_avg_sq",
    ]
