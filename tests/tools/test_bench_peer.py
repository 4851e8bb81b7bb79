"""What is told of two sides' runs, by hand; the runs themselves take an environment of TRL's."""

import itertools
import json
from pathlib import Path

import pytest

from rlmath.config.load import load_config
from rlmath.data.loader import load_prompts
from tools.bench_peer import (
    CASES,
    Measured,
    case_of,
    main,
    our_settings,
    prepare,
    report,
    their_arguments,
)
from tools.gpu_stages import has_transformer_engine

COLUMNS = ["bench", "case", "metric", "value", "unit", "baseline", "ratio"]
OURS = [
    Measured([2.0, 4.0], [1.0, 1.5], [800.0, 1600.0], mfu=0.5),
    Measured([3.0], [2.0], [1200.0], mfu=0.7),
]


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict]:
    """The lines by their metric."""
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(list(line) == COLUMNS and line["bench"] == "peer" for line in lines)
    return {line["metric"]: line for line in lines}


def test_figures_are_medians_over_the_steps_of_all_runs(capsys) -> None:
    report("P2", OURS, [Measured([6.0], [3.0], [1000.0])], completions=40)
    found = {key: (line["value"], line["baseline"], line["ratio"]) for key, line in printed(capsys).items()}
    assert found == {
        "step_seconds": (3.0, "TRL: 6.000 s", 2.0),
        "mfu of the update": (0.6, None, None),
        "generate_seconds": (1.5, "TRL: 3.000 s", 2.0),
        "completion_tokens_of_a_step": (1200.0, "TRL: 1000.000 tokens", 1.2),
        "mean_length": (30.0, "TRL: 25.000 tokens", 1.2),
        "completion_tokens_per_second": (400.0, "TRL: 166.667 tokens/s", 2.4),
    }


@pytest.mark.parametrize("name", CASES)
def test_both_sides_do_the_same_work(name: str) -> None:
    case = case_of(name, "cpu")
    (setting, *_), folder = case.ours.values(), Path("folder")
    overrides = our_settings(folder / "run", folder / "model", folder / "data", case, setting)
    ours = load_config([], overrides)
    theirs = their_arguments(folder / "model", folder / "data", case, case.theirs[0])
    given = {key.removeprefix("--"): value for key, value in itertools.pairwise(theirs)}
    assert ("--chat" in theirs) == (ours.data.template == "chat")
    assert ours.optimizer.lr == 1e-5, "as in peer_trl.py"
    for key, value in {
        "device": ours.run.device,
        "prompts": ours.data.prompts_per_step,
        "group": ours.rollout.group_size,
        "min-new-tokens": ours.rollout.min_new_tokens,
        "max-new-tokens": ours.rollout.max_new_tokens,
        "optimizer-steps": ours.algorithm.n_minibatches,
    }.items():
        assert given[key] == str(value), key
    assert int(given["steps"]) + int(given["warm-up"]) == ours.run.total_steps
    assert case.prompts * case.group % (case.ranks * case.optimizer_steps * case.theirs[0]) == 0


def test_on_a_gpu_ours_takes_the_layers_that_are_there() -> None:
    settings = our_settings(Path("run"), Path("model"), Path("data"), case_of("G1", "cuda"), ())
    layers = "transformer_engine" if has_transformer_engine() else "local"
    assert load_config([], settings).policy.transformer_impl == layers


def test_questions_are_asked_alike_and_answers_boxed(tmp_path: Path) -> None:
    data = tmp_path / "gsm8k.jsonl"
    data.write_text(json.dumps({"question": "2 + 3?", "answer": "Add.\n#### 5"}), encoding="utf-8")
    _, file = prepare(tmp_path, "G1", tmp_path, data)
    (prompt,), _ = load_prompts(str(file), None, 100)
    assert prompt.text.startswith("2 + 3?\n") and prompt.solutions == ("\\boxed{5}",)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--cases", "G1"], "G1 needs --model"), (["--device", "cuda", "--cases", "P1"], "G1 is the only case")],
)
def test_what_is_missing_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err
