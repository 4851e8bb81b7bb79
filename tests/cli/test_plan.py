"""rlmath plan: every recipe has a plan, more GPUs and shorter answers are faster."""

from __future__ import annotations

import json
import shutil
import sys
import typing
from pathlib import Path

import pytest

from rlmath.cli.demo import TOOL_WORDS
from rlmath.cli.plan import main
from rlmath.config.gpu_specs import GPUS, GpuName
from tests.selection import keeping
from tests.tiny_models import make_model_folder

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
RECIPES = sorted(
    str(path.relative_to(CONFIGS))
    for folder in ("areal", "rlinf", "simplerl")
    for path in (CONFIGS / folder).glob("*.yaml")
)
ALGORITHMS = sorted(f"algorithms/{path.name}" for path in (CONFIGS / "algorithms").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return (
        f"model.path={make_model_folder(tmp_path_factory.mktemp('planned') / 'model', tied=True)}"
    )


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict:
    assert main([*arguments, "--layouts", "0", "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "name",
    keeping(
        RECIPES,
        "areal/v0.1_1.5b_stages.yaml",
        "areal/32b_n16.yaml",
        "rlinf/grpo-7b.yaml",
        "simplerl/v2.yaml",
        others=0,
    ),
)
def test_every_recipe_has_a_plan(name: str, capsys: pytest.CaptureFixture[str]):
    plan = planned(capsys, "--config", str(CONFIGS / name), "--prompts", "50000")
    assert plan["problems"] == [] and plan["steps_per_epoch"] >= 40
    for stage in plan["stages"]:
        assert stage["step_seconds"] == pytest.approx(sum(stage["seconds"].values()))
        assert all(seconds > 0 for name, seconds in stage["seconds"].items() if name != "sync")


@pytest.mark.parametrize(
    "name",
    keeping(
        ALGORITHMS,
        "algorithms/dapo.yaml",
        "algorithms/critic.yaml",
        "algorithms/distill.yaml",
        others=0,
    ),
)
def test_the_demo_has_a_plan_with_every_algorithm(
    name: str, model: str, capsys: pytest.CaptureFixture[str]
):
    words = ["--config", str(CONFIGS / "demo.yaml"), "--config", str(CONFIGS / name)]
    words += [model, "run.device=cpu"]
    if name == "algorithms/tools.yaml":
        words += TOOL_WORDS
    plan = planned(capsys, *words)
    assert plan["cluster"]["machine"]["name"] == "CPU" and 0.1 < plan["step_seconds"] < 60


def test_the_whole_plan_as_text(capsys: pytest.CaptureFixture[str]):
    assert main(["--config", str(CONFIGS / "areal/1.5b_n16.yaml"), "--prompts", "106000"]) == 0
    out = capsys.readouterr().out
    for text in (
        "1.78 B parameters on 16 nodes of 8 H800-80GB, 400 Gbit/s each",
        "Planned memory of rank 0",
        "8,192 sequences, 128 + 8,294 tokens on average",
        "for the tail, with fewer completions than places",
        "An epoch has 207 steps",
        "Fastest by prediction:",
        "TP1 x PP1 x DP128, 128 engines of TP1  (as configured)",
    ):
        assert text in out


def test_lengths_that_were_not_checked_are_told(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Ten prompts, and five a step, are two steps an epoch, if none is too long."""
    rows = [json.dumps({"question": f"What is 1+{n}?", "answer": f"{n + 1}"}) for n in range(10)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows), encoding="utf-8")
    words = [
        "--config",
        str(CONFIGS / "demo.yaml"),
        model,
        "run.device=cpu",
        "data.prompts_per_step=5",
    ]
    words += ["--layouts", "0", f"data.train_path={tmp_path}/train.jsonl"]
    model_folder = Path(model.removeprefix("model.path="))
    notes = []
    monkeypatch.setitem(sys.modules, "transformers", None)
    for has_tokenizer in (True, False):
        folder = tmp_path / str(has_tokenizer)
        folder.mkdir()
        shutil.copy(model_folder / "config.json", folder)
        if has_tokenizer:
            (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
        assert main([*words, f"model.path={folder}"]) == 0
        out = capsys.readouterr().out
        assert "An epoch has 2 steps" in out
        notes += [line for line in out.splitlines() if "lengths were not checked" in line]
    assert [line.partition("checked: ")[2].partition(". ")[0] for line in notes] == [
        f'transformers is not installed, which reads the tokenizer of "{tmp_path}/True"',
        f'"{tmp_path}/False" has no tokenizer here',
    ]


def test_a_table_that_cannot_be_read_needs_the_number_of_its_rows(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    words = ["--config", str(CONFIGS / "demo.yaml"), model, "run.device=cpu", "--layouts", "0"]
    words += [f"data.train_path={tmp_path}/train.parquet"]
    assert main(words) == 2
    assert "their number by --prompts" in capsys.readouterr().err
    assert main([*words, "--prompts", "100000"]) == 0


DECOUPLED = ("--config", str(CONFIGS / "algorithms/decoupled.yaml"), "rollout.max_staleness=1")


@pytest.mark.parametrize(
    ("settings", "told", "least", "most"),
    [
        (("rollout.tail=carry", *DECOUPLED), "Predicted seconds:", 0.5, 0.8),
        (("rollout.tail=defer",), "Predicted seconds:", 0.5, 0.8),
        (
            ("parallel=d93+d35", *DECOUPLED),
            "Predicted seconds, of both sides at the same time:",
            0.5,
            1.2,
        ),
    ],
)
def test_a_step_that_does_not_wait_for_its_tail_has_an_estimate(
    settings: tuple[str, ...],
    told: str,
    least: float,
    most: float,
    capsys: pytest.CaptureFixture[str],
):
    recipe = ("--config", str(CONFIGS / "areal/1.5b_n16.yaml"))
    assert main([*recipe, *settings, "--layouts", "0"]) == 0
    assert told in capsys.readouterr().out
    waiting_plan = planned(capsys, *recipe)
    plan = planned(capsys, *recipe, *settings)
    assert least < plan["step_seconds"] / waiting_plan["step_seconds"] < most


def test_the_fastest_layout_comes_first(capsys: pytest.CaptureFixture[str]):
    assert main(["--config", str(CONFIGS / "areal/7b_n4.yaml"), "--layouts", "100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    seconds = [row["step_seconds"] for row in plan["layouts"]]
    assert len(seconds) > 10 and seconds == sorted(seconds)
    (configured_row,) = [
        row for row in plan["layouts"] if row["layout"] == "TP2 x PP1 x DP16, 32 engines of TP1"
    ]
    assert configured_row["step_seconds"] == pytest.approx(plan["step_seconds"])


@pytest.mark.parametrize(("wrong", "hint"), [("--gpu=H100", False), ("--run.seed=7", True)])
def test_dashes_are_told_of_where_an_option_is_unknown(
    capsys: pytest.CaptureFixture[str], wrong: str, hint: bool
):
    with pytest.raises(SystemExit):
        main([wrong])
    assert ("without dashes" in capsys.readouterr().err) is hint


@pytest.mark.parametrize(
    ("option", "value", "sign"),
    [
        ("--gpu", "H200-141GB", -1),
        ("--network-gbps", "10", 1),
        ("--mean-response-tokens", "16000", 1),
    ],
)
def test_a_faster_machine_and_shorter_answers_are_faster(
    capsys: pytest.CaptureFixture[str], option: str, value: str, sign: int
):
    words = ("--config", str(CONFIGS / "areal/7b_n16.yaml"))
    usual = planned(capsys, *words)
    other = planned(capsys, *words, option, value)
    assert sign * (other["step_seconds"] - usual["step_seconds"]) > 0


def test_what_tools_give_is_told_and_planned(model: str, capsys: pytest.CaptureFixture[str]):
    """One call of at most 64 tokens and 16 around them for each of 512 completions."""
    words = ["--config", str(CONFIGS / "demo.yaml"), model, "run.device=cpu", "parallel.tensor=1"]
    assert main([*words, *TOOL_WORDS, "--layouts", "0"]) == 0
    out = capsys.readouterr().out
    assert "512 sequences, 32 + 10 + 24 given tokens on average" in out
    assert " of it engines wait for tools" in out
    (plain_stage,) = planned(capsys, *words)["stages"]
    words += [*TOOL_WORDS, "--mean-given-tokens", "40", "--mean-calls", "1"]
    (stage,) = planned(capsys, *words)["stages"]
    assert stage["tokens"] - plain_stage["tokens"] == pytest.approx(512 * 40)
    for phase in ("rollout", "update"):
        assert stage["seconds"][phase] > plain_stage["seconds"][phase]
    assert stage["tool_seconds"] > plain_stage["tool_seconds"] == 0


def test_measured_coefficients_reach_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "mine.json"
    words = ("--config", str(CONFIGS / "areal/7b_n16.yaml"))
    file.write_text('{"kind": "cuda", "coefficients": {"step_seconds": 102}}', encoding="utf-8")
    usual = planned(capsys, *words)
    other = planned(capsys, *words, "--coefficients", str(file))
    assert other["step_seconds"] - usual["step_seconds"] == pytest.approx(100)


def test_what_does_not_fit_is_told_with_its_plan(capsys: pytest.CaptureFixture[str]):
    words = ["--config", str(CONFIGS / "areal/32b_n16.yaml"), "parallel=d128t1p1", "--layouts", "0"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "Predicted seconds:" in out and "memory: rank 0" in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["memory.gpu=null", "memory.gpu_gib=80"],
            "the speed of a GPU that has no name is not known",
        ),
        (["--nodes", "0"], "needed: at least 1 of each"),
        (["--mean-response-tokens", "30000"], "needed: from 1 to the longest, 27648"),
        (["--mean-prompt-tokens", "2000"], "needed: from 1 to data.max_prompt_tokens, 1024"),
        (["--gpus-per-node", "3"], "8 ranks do not fill nodes of 3"),
        (
            ["rollout.tail=carry", "algorithm.recompute_logprobs=true"],
            "algorithm.importance_mask_high=5 (or algorithm.importance_cap)",
        ),
        (["--coefficients", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["--config", str(CONFIGS / "areal/1.5b_n1.yaml"), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_every_gpu_that_memory_gpu_may_name_has_its_figures():
    assert tuple(GPUS) == typing.get_args(GpuName)
