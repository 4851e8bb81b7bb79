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
    (setting, *_), folder = case.our_layouts.values(), Path("folder")
    overrides = our_settings(folder / "run", folder / "model", folder / "data", case, setting)
    config = load_config([], overrides)
    peer_words = their_arguments(folder / "model", folder / "data", case, case.their_batches[0])
    peer_options = {
        key.removeprefix("--"): option for key, option in itertools.pairwise(peer_words)
    }
    assert ("--chat" in peer_words) == (config.data.template == "chat")
    assert config.optimizer.lr == 1e-5, "as in peer_trl.py"
    for key, expected in {
        "device": config.run.device,
        "prompts": config.data.prompts_per_step,
        "group": config.rollout.group_size,
        "min-new-tokens": config.rollout.min_new_tokens,
        "max-new-tokens": config.rollout.max_new_tokens,
        "optimizer-steps": config.algorithm.n_minibatches,
    }.items():
        assert peer_options[key] == str(expected), key
    assert int(peer_options["steps"]) + int(peer_options["warm-up"]) == config.run.total_steps
    assert (
        case.prompts * case.group % (case.ranks * case.optimizer_steps * case.their_batches[0]) == 0
    )


def test_questions_are_asked_alike_and_answers_boxed(tmp_path: Path) -> None:
    questions = tmp_path / "gsm8k.jsonl"
    questions.write_text(
        json.dumps({"question": "2 + 3?", "answer": "Add.\n#### 5"}), encoding="utf-8"
    )
    _, file = prepare(tmp_path, "G1", tmp_path, questions)
    (prompt,), _ = load_prompts(str(file), None, 100)
    assert prompt.text.startswith("2 + 3?\n") and prompt.solutions == ("\\boxed{5}",)


@pytest.mark.skipif(cuda_is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert (
        "torch finds no CUDA device. Use --device=cpu, or a GPU machine" in capsys.readouterr().err
    )
