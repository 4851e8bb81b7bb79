"""Both sides are asked for the same; the runs themselves take an environment of TRL's."""

import itertools
import json
from pathlib import Path

import pytest

from rlmath.config.load import load_config
from rlmath.data.loader import load_prompts
from rlmath.distributed.device_kind import cuda_is_available
from tools.bench_peer import CASES, case_of, main, our_settings, prepare, their_arguments


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


def test_questions_are_asked_alike_and_answers_boxed(tmp_path: Path) -> None:
    data = tmp_path / "gsm8k.jsonl"
    data.write_text(json.dumps({"question": "2 + 3?", "answer": "Add.\n#### 5"}), encoding="utf-8")
    _, file = prepare(tmp_path, "G1", tmp_path, data)
    (prompt,), _ = load_prompts(str(file), None, 100)
    assert prompt.text.startswith("2 + 3?\n") and prompt.solutions == ("\\boxed{5}",)


@pytest.mark.skipif(cuda_is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert (
        "torch finds no CUDA device. Use --device=cpu, or a GPU machine" in capsys.readouterr().err
    )
