"""Asynchronous training: engines on ranks of their own, which sample while the others train."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import partial_rollout_cases as cases
from tests.distributed.async_cases import layout_of, run, with_engines
from tests.distributed.partial_rollout_cases import PER_STEP
from tests.distributed.rank_pool import RankPool
from tests.selection import matrix

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def model(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.uniform_model(untied_model, tmp_path_factory.mktemp("uniform") / "model")


def train(
    pool: RankPool, count: int, folder: Path, place: Path, steps: int, rollout: Any, **more: Any
) -> list[Any]:
    """The runs of the ranks that train, which are alike but for their samples' times."""
    found = pool.run(count, run, folder, place, steps, rollout, more)
    return [one for one in found if one is not None]


def prompts_of(found: Any) -> list[str]:
    return [group.prompt.prompt_id for step in found.groups for group in step]


@pytest.mark.parametrize(
    ("count", "engine", "layout"),
    [
        pytest.param(2, {"ranks": 1}, {}, id="1 + 1"),
        pytest.param(3, {"ranks": 1}, {"tensor": 2}, id="TP2 + 1", marks=matrix),
        pytest.param(4, {"ranks": 2, "tensor_parallel": 2}, {"pipeline": 2}, id="PP2 + TP2"),
        pytest.param(4, {"ranks": 2}, {}, id="DP2 + 2 engines", marks=matrix),
    ],
)
def test_engines_of_their_own_have_the_policys_weights_and_every_prompt_is_learned_once(
    ranks: RankPool, model: Path, tmp_path: Path, count: int, engine: dict[str, int], layout: dict[str, int]
) -> None:
    steps, rollout = 6, with_engines(**engine)
    found, *others = train(ranks, count, model, tmp_path, steps, rollout, **layout_of(**layout))
    assert all(one.groups == found.groups for one in others)
    assert [len(groups) for groups in found.groups] == [PER_STEP] * steps
    assert set(Counter(prompts_of(found)).values()) == {1}
    assert found.in_flight[-1] == []
    for number, metrics in enumerate(found.metrics):
        assert metrics["sync/probe_difference_max"] <= 1e-5
        assert metrics["rollout/staleness_max"] <= min(number, rollout.max_staleness)
    assert max(metrics["rollout/staleness_max"] for metrics in found.metrics) >= 1  # they did not wait


def test_with_staleness_0_a_run_is_the_synchronous_one_bit_by_bit(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    rollout = with_engines(max_staleness=0, on_new_weights="finish")
    (apart,) = train(ranks, 2, model, tmp_path, 4, rollout)
    (together,) = train(ranks, 1, model, tmp_path, 4, with_engines(ranks=0))
    assert apart.groups == together.groups
    trained = [name for name in together.metrics[0] if name.startswith(("train/", "actor", "advantage"))]
    compared = [name for name in trained if name != "train/mfu"]
    assert len(compared) > 8
    for ours, theirs in zip(apart.metrics, together.metrics, strict=True):
        assert {name: ours[name] for name in compared} == {name: theirs[name] for name in compared}
    assert together.metrics[0]["train/grad_norm"] > 0
