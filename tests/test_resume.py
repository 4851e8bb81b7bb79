"""A run that was interrupted goes on as if nothing had happened: the same metrics, bit for bit.

Those on several ranks are long; CI has `test_everything_on.py` (the same ranks) and
`test_end_to_end.py` (other ranks).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.forked_ranks import run_ranks
from tests.programs import TRAIN, rows, small_run

full = (pytest.mark.distributed, pytest.mark.full)

STEPS = 4
LONG_TAIL = ("rollout.group_size=2", "rollout.max_new_tokens=96", "rollout.slice_tokens=12")
"""Most completions need several slices, and in every round some of the small groups become
complete."""
LAYOUTS = {
    "TP2": ("parallel.tensor=2",),
    "DP2": ("parallel.tensor=1",),
    "PP2xVPP2": ("parallel.tensor=1", "parallel.pipeline=2", "parallel.virtual_pipeline=2"),
    "carry": (
        "parallel.tensor=1",
        "rollout.tail=carry",
        *LONG_TAIL,
        "algorithm.recompute_logprobs=true",
        "algorithm.importance_correction=token",
        "algorithm.importance_mask_high=5",
    ),
    "defer": ("parallel.tensor=1", "rollout.tail=defer", *LONG_TAIL),
    "float16": (
        "parallel.tensor=1",
        "policy.dtype=float16",
        "policy.head_dtype=float32",
        "optimizer.initial_loss_scale=4096",
        "optimizer.loss_scale_window=1",
    ),
}
ONE_RANK = {"defer on one rank": "defer", "float16 on one rank": "float16"}
LAYOUTS |= {name: LAYOUTS[layout] for name, layout in ONE_RANK.items()}
IN_FLIGHT = {"carry": "rollout/sequences_in_flight", "defer": "rollout/deferred_groups"}
"""The metric of what a step leaves unfinished, by layout."""
SETTINGS = (
    f"run.total_steps={STEPS}",
    "save.ckpt_freq_steps=1",
    f"save.keep_last={STEPS}",
    "save.save_freq_steps=3",
    "save.export_hf=true",
    "algorithm.kl_coef=0.05",
    "algorithm.epochs=2",
    "sync.probe_every=2",
    "selection.dynamic_sampling=reward",
    "selection.max_extra_prompts=4",
    "reward.function=short_is_good:reward",
    "telemetry.sample_groups_per_step=100",
)
"""The random model is never right, but it can learn to be short."""


def train(place: Path, folder: Path, layout: str, *more: str, ranks: int | None = None) -> str:
    """What the console said.

    The layout's ranks run, unless `ranks` is given."""
    settings = [*small_run(place, folder), *SETTINGS, *LAYOUTS[layout], *more]
    ranks = ranks or (1 if layout in ONE_RANK else 2)
    return run_ranks(ranks, [*TRAIN, *settings], path=place / "functions").stderr


def learned_prompts(folder: Path) -> list[list[str]]:
    """The prompts of the groups that each step took, in their order."""
    files = sorted((folder / "samples").glob("step-*.jsonl"))
    return [
        [json.loads(line)["prompt_id"] for line in file.read_text().splitlines()] for file in files
    ]


def interrupted_after(step: int, whole: Path, folder: Path) -> None:
    """What a run leaves that is killed while it makes the step after `step`."""
    shutil.copytree(whole, folder)
    for checkpoint in (folder / "checkpoints").iterdir():
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    shutil.copytree(
        folder / "checkpoints" / f"step-{step:06d}", folder / "checkpoints" / "step-000009.partial"
    )
    shutil.rmtree(folder / "hf_model")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')


def assert_goes_on_with_other_ranks(folder: Path, whole: Path) -> None:
    """A run of other ranks that begins after step 2 of `whole`."""
    assert [row["step"] for row in rows(folder)] == [row["step"] for row in rows(whole)]
    assert rows(folder)[:2] == rows(whole)[:2]
    # Sampled with the very same weights; what the next step samples may differ where sums are
    # rounded otherwise.
    row = rows(folder)[2]
    whole_row = rows(whole)[2]
    for name in ("task_reward", "n_valid_tokens", "train/learning_rate"):
        assert row[name] == pytest.approx(whole_row[name], rel=1e-6), name
    for name in ("train/grad_norm", "train/reference_kl"):
        assert row[name] == pytest.approx(whole_row[name], rel=1e-4), name


@pytest.fixture(scope="module")
def whole_runs(arithmetic: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The undisturbed run of each layout, made when it is first asked for."""
    place = tmp_path_factory.mktemp("whole")
    functions = arithmetic / "functions"
    functions.mkdir()
    (functions / "short_is_good.py").write_text(
        "def reward(completion, solutions, row):\n    return -float(len(completion))\n"
    )

    class Runs(dict[str, Path]):
        def __missing__(self, layout: str) -> Path:
            train(arithmetic, place / layout, layout)
            self[layout] = place / layout
            return self[layout]

    return Runs()


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=() if layout in ONE_RANK else full) for layout in LAYOUTS],
)
def test_resumed_after_a_step_the_metrics_are_those_of_an_uninterrupted_run(
    arithmetic: Path, whole_runs: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    whole = whole_runs[layout]
    folder = tmp_path / "run"
    step = 2
    interrupted_after(step, whole, folder)
    console = train(arithmetic, folder, layout)
    assert f"step-{step:06d}, made on" in console
    assert rows(folder) == rows(whole) and len(rows(whole)) == STEPS
    assert all(row["train/grad_norm"] > 0 for row in rows(whole))
    in_flight = IN_FLIGHT.get(ONE_RANK.get(layout, layout))
    if in_flight is not None:
        assert rows(whole)[step - 1][in_flight] > 0, "nothing was in flight when it was killed"
    for name in ("model.safetensors", "config.json"):
        assert (folder / "hf_model" / name).read_bytes() == (whole / "hf_model" / name).read_bytes()
    assert sorted(p.name for p in (folder / "samples").iterdir()) == sorted(
        p.name for p in (whole / "samples").iterdir()
    )
    assert not list((folder / "checkpoints").glob("*.partial"))
    assert json.loads((folder / "exit_status.json").read_text())["status"] == 0


@pytest.mark.distributed
@pytest.mark.full
def test_a_run_goes_on_with_eight_ranks(
    arithmetic: Path, whole_runs: dict[str, Path], tmp_path: Path
) -> None:
    whole = whole_runs["TP2"]
    folder = tmp_path / "run"
    interrupted_after(2, whole, folder)
    train(arithmetic, folder, "TP2", ranks=8)
    assert_goes_on_with_other_ranks(folder, whole)


@pytest.mark.distributed
@pytest.mark.full
@pytest.mark.parametrize("tail", ["carry", "defer"])
def test_groups_in_flight_go_on_with_another_number_of_engines(
    arithmetic: Path, whole_runs: dict[str, Path], tmp_path: Path, tail: str
) -> None:
    """Two ranks make step 1, one rank the others.

    Then the run is taken back to step 2, and two ranks make the remaining ones: every step has the
    prompts of the undisturbed run, so that none is lost, and none comes twice."""
    whole = whole_runs[tail]
    one_rank_run = tmp_path / "one"
    two_rank_run = tmp_path / "two"
    interrupted_after(1, whole, one_rank_run)
    train(arithmetic, one_rank_run, tail, ranks=1)
    interrupted_after(2, one_rank_run, two_rank_run)
    train(arithmetic, two_rank_run, tail)
    assert all(row[IN_FLIGHT[tail]] > 0 for row in rows(whole)[:2])
    prompts = [prompt for step in learned_prompts(whole) for prompt in step]
    assert len(prompts) >= STEPS * 8 and len(set(prompts)) == len(prompts)
    for folder in (one_rank_run, two_rank_run):
        assert learned_prompts(folder) == learned_prompts(whole)
        for name in (
            "n_valid_tokens",
            "rollout/groups_in_flight",
            IN_FLIGHT[tail],
            "rollout/rounds",
        ):
            assert [row[name] for row in rows(folder)] == [row[name] for row in rows(whole)], name


@pytest.mark.parametrize("layout", ["defer on one rank", pytest.param("TP2", marks=full)])
def test_a_finished_run_is_left_as_it_is_and_can_be_made_longer(
    arithmetic: Path, whole_runs: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole_runs[layout], folder)
    before = rows(folder)
    model = (folder / "hf_model" / "model.safetensors").read_bytes()
    train(arithmetic, folder, layout)
    assert rows(folder) == before
    assert (folder / "hf_model" / "model.safetensors").read_bytes() == model
    longer = f"run.total_steps={STEPS + 1}"
    train(arithmetic, folder, layout, longer)
    assert rows(folder)[:STEPS] == before and len(rows(folder)) == STEPS + 1
