"""Coefficients from runs whose true ones are known, and runs that nothing can be learned from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlmath.config.load import load_config, save_config
from rlmath.config.run_files import SWITCH_PHASES
from rlmath.config.schema import Config
from rlmath.models.hf_config import required_shape
from rlmath.planning.memory_fit import planned_target
from rlmath.planning.planner.calibration import (
    as_file,
    fit,
    phases_of,
    ranks_of_summary,
    read_coefficients,
    read_run,
)
from rlmath.planning.planner.step import StepPlan, batch_of, plan_step, step_inputs
from rlmath.planning.planner.work import (
    CPU_CORE,
    DEFAULTS,
    Cluster,
    Coefficients,
    Work,
    seconds_of,
    slower_by,
)
from tests.tiny_models import make_model_folder

STARTING = DEFAULTS["cpu"]
TRUE = slower_by(STARTING, {"flops_share": 1.7, "decode_step_seconds": 0.6, "message_seconds": 2.5})
"""Of the made-up machine that the runs here were on."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("timed") / "model", tied=True)


def settings(model: Path, *overrides: str) -> Config:
    given = ["run.output_dir=o", "data.train_path=t", f"model.path={model}", "run.device=cpu"]
    given += [
        "data.max_prompt_tokens=32",
        "rollout.max_new_tokens=64",
        "policy.max_tokens_per_microbatch=2048",
    ]
    return load_config([], [*given, *overrides])


def predicted(config: Config, ranks: int, coefficients: Coefficients) -> StepPlan:
    shape, _ = required_shape(config.model.path)
    cluster, batch = Cluster(CPU_CORE, 1, ranks), batch_of(config, 24, 16)
    return plan_step(step_inputs(config, shape, planned_target(config), cluster, batch), coefficients)


def write_run(folder: Path, config: Config, ranks: int, steps: int = 6) -> Path:
    """The folder of a run that took what `TRUE` says, its first two steps twice as long."""
    plan = predicted(config, ranks, TRUE)
    folder.mkdir(parents=True)
    save_config(config, folder / "config.yaml")
    (folder / "summary.json").write_text(json.dumps({"layout": plan.mesh.describe()}), encoding="utf-8")
    seconds = dict(plan.seconds)
    lengths = {
        "rollout/response_length": plan.batch.lengths.mean,
        "no_eos_ratio": plan.batch.lengths.truncated,
        "avg_prompt_len": plan.batch.prompt_tokens,
        "n_seqs": float(plan.batch.sequences),
    }
    rows = []
    for step in range(1, steps + 1):
        slow = 2.0 if step <= 2 else 1.0
        timers = {
            f"seconds/{name}": slow * value
            for name, value in seconds.items()
            if name not in ("other", "switch")
        }
        timers |= {f"seconds/{name}": slow * seconds["switch"] / 5 for name in SWITCH_PHASES}
        timers["seconds/step"] = slow * plan.step_seconds
        rows.append(json.dumps({"step": step, **lengths, **timers}))
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder / "metrics.jsonl"


def test_a_run_is_read_by_its_medians(model: Path, tmp_path: Path):
    config = settings(model, "parallel.tensor=2", "algorithm.n_minibatches=4")
    run = read_run(write_run(tmp_path / "run", config, 2))
    truth = predicted(config, 2, TRUE)
    assert run.cluster.ranks == 2 and run.steps == 4
    assert run.step_seconds == pytest.approx(truth.step_seconds)
    assert dict(run.seconds) == pytest.approx(dict(truth.seconds))
    assert run.batch.lengths.spread == pytest.approx(truth.batch.lengths.spread, rel=0.02)
    assert run.batch.tokens == pytest.approx(truth.batch.tokens, rel=1e-3)


def test_the_fit_explains_every_phase_of_its_run(model: Path, tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", settings(model, "parallel.tensor=2"), 2))
    found = run.planned(fit([run], STARTING))
    assert dict(found.seconds) == pytest.approx(dict(run.seconds), rel=0.01, abs=2e-4)


def test_what_is_measured_twice_is_told_apart(model: Path, tmp_path: Path):
    """Runs of three layouts and batches tell the step of a fourth, and the coefficients that differ."""
    layouts = [("parallel.tensor=2", "data.prompts_per_step=16"), ("data.prompts_per_step=64",)]
    layouts.append(("parallel.pipeline=2", "data.prompts_per_step=256", "algorithm.n_minibatches=4"))
    runs = [
        read_run(write_run(tmp_path / str(number), settings(model, *layout), 2))
        for number, layout in enumerate(layouts)
    ]
    found = fit(runs, STARTING)
    other = settings(model, "parallel.tensor=2", "parallel.pipeline=2", "data.prompts_per_step=128")
    expected = predicted(other, 4, TRUE).step_seconds
    assert predicted(other, 4, found).step_seconds == pytest.approx(expected, rel=0.03)
    assert abs(predicted(other, 4, STARTING).step_seconds / expected - 1) > 0.1
    assert found.flops_share == pytest.approx(TRUE.flops_share, rel=0.15)


def test_what_no_run_has_stays_as_it_was(model: Path, tmp_path: Path):
    run = read_run(write_run(tmp_path / "run", settings(model), 1))
    assert fit([run], STARTING).link_share == STARTING.link_share


def test_time_that_no_phase_has_is_other():
    rows = [{"seconds/step": 10.0, "seconds/rollout": 4.0, "seconds/wake": 0.5, "seconds/validation": 3.0}]
    assert phases_of(rows) == {"switch": 0.5, "rollout": 4.0, "other": 2.5}
    # A step without validation is not shorter by that of the others.
    rows.append({"seconds/step": 7.0, "seconds/rollout": 4.0, "seconds/wake": 0.5})
    assert phases_of(rows)["other"] == 2.5


def test_a_run_is_read_where_it_was_and_not_where_the_plan_is(model: Path, tmp_path: Path):
    config = settings(model, "parallel.tensor=2")
    file = write_run(tmp_path / "run", config, 2)
    path = tmp_path / "run" / "config.yaml"
    assert read_run(file, "B200-180GB").cluster.machine.name == "CPU"
    for unnamed in ("memory.gpu=null", "memory.gpu_gib=80"):
        save_config(load_config([path], ["run.device=auto", unnamed]), path)
        assert read_run(file, "B200-180GB").cluster.machine.name == "B200-180GB"
    save_config(load_config([path], ["memory.gpu=H100-80GB", "memory.gpu_gib=null"]), path)
    assert read_run(file, "B200-180GB").cluster.machine.name == "H100-80GB"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("memory.gpu=H100", 'memory.gpu is "H100"'),
        ("parallel.tensor=3", "parallel.tensor is 3"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(model: Path, tmp_path: Path, override: str, told: str):
    file = write_run(tmp_path / "run", settings(model), 2)
    path = tmp_path / "run" / "config.yaml"
    save_config(load_config([path], [override]), path)
    with pytest.raises(ValueError) as error:
        read_run(file)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_seqs": -8}, "needed: at least 1"),
        ({"rollout/response_length": None}, "has no rollout/response_length; needed: a run of"),
    ],
)
def test_steps_that_no_run_has_are_refused(model: Path, tmp_path: Path, changes: dict, told: str):
    file = write_run(tmp_path / "run", settings(model), 1)
    rows = [json.loads(line) | changes for line in file.read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if value is not None} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    with pytest.raises(ValueError) as error:
        read_run(file)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("TP2 x PP1 x DP1, 2 engines of TP1", 2),
        ("TP2 x CP2 x PP3 x VPP2 x DP4 x EP2 x ETP2, 1 engine of TP48", 48),
    ],
)
def test_ranks_are_read_from_the_summary(tmp_path: Path, layout: str, ranks: int):
    (tmp_path / "summary.json").write_text(json.dumps({"layout": layout}), encoding="utf-8")
    assert ranks_of_summary(tmp_path) == ranks


@pytest.mark.parametrize("layout", ["", "TP2", "TP2 x PP1", "TP-1 x PP1 x DP1, 1 engine of TP1"])
def test_a_summary_that_tells_no_ranks_is_refused(tmp_path: Path, layout: str):
    (tmp_path / "summary.json").write_text(json.dumps({"layout": layout}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"set parallel\.data"):
        ranks_of_summary(tmp_path)


def test_runs_that_tell_nothing_are_refused(model: Path, tmp_path: Path):
    short = write_run(tmp_path / "short", settings(model), 1, steps=2)
    with pytest.raises(ValueError, match="has 2 steps; needed: more than 2"):
        read_run(short)
    (tmp_path / "short" / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"there is no config\.yaml"):
        read_run(short)
    broken = write_run(tmp_path / "broken", settings(model), 1)
    broken.write_text("not json\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not a line of metrics"):
        read_run(broken)


def test_coefficients_survive_their_file(tmp_path: Path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps(as_file(TRUE, "cpu", [])), encoding="utf-8")
    assert read_coefficients(file, "cpu") == TRUE
    with pytest.raises(ValueError, match='of kind "cpu"; this plan is for "cuda"'):
        read_coefficients(file, "cuda")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"flops_shar": 1.0}, 'no coefficient "flops_shar". Did you mean "flops_share"'),
        ({"flops_share": "1e3"}, "needed are numbers for flops_share"),
        ({"flops_share": 0}, "the coefficient flops_share is 0.0; needed: a number above 0"),
    ],
)
def test_wrong_coefficients_are_refused(tmp_path: Path, change: dict, told: str):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"kind": "cpu", "coefficients": asdict(TRUE) | change}), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        read_coefficients(file, "cpu")
    assert told in str(error.value)


def test_a_machine_that_is_slower_in_all_is_slower_by_that():
    work = Work(flops=1e9, memory=1e8, decode_steps=10, tokens=1000, steps=1)
    slow = slower_by(STARTING, dict.fromkeys(asdict(STARTING), 3.0))
    assert seconds_of(work, CPU_CORE, slow) == pytest.approx(3 * seconds_of(work, CPU_CORE, STARTING))
    faster = replace(CPU_CORE, flops=1e12)
    assert seconds_of(Work(flops=1e9), faster, STARTING) == pytest.approx(1e-3 / STARTING.flops_share)
