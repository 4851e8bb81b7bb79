"""Runs whose completions go on behind finished answers: with feedback, and in an environment.

The model gives one of three answers, whatever it is told; one of them is right. Rarely it says
something else around it, or does not end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlmath.checkpoint.capture import read_capture
from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished
from rlmath.distributed.fault_tolerance.exit_codes import MISTAKE
from rlmath.replay.replay import find_capture
from tests.forked_ranks import replay, run_ranks
from tests.programs import TRAIN, metric_rows, rows, small_run
from tests.selection import matrix
from tests.test_resume import interrupted_after
from tests.test_tools_run import problem_rows, sampled
from tests.tool_models import SIZE, make_answering_model

STEPS = 2
PROMPTS = 3
GROUP = 8
SETTINGS = f"""
data.prompts_per_step={PROMPTS} data.max_prompt_tokens=8 data.template=raw parallel.tensor=1
rollout.group_size={GROUP} rollout.max_new_tokens=6 optimizer.lr=1e-4
turns.max=3 turns.discount=0.5 turns.max_feedback_tokens=64
telemetry.sample_groups_per_step=100 telemetry.capture_steps=[{STEPS}] save.ckpt_freq_steps=1
validation.every_steps=1 validation.samples=6 validation.before_training=false
""".split()
ASYNCHRONOUS = ("rollout.ranks=1", "rollout.max_staleness=0")
WRONG = "The answer 41 is not right. Try again."
NO_ANSWER = "No final answer was found. Try again."
SOURCE = """
def hints(texts, row, turn):
    if row["query_id"] == "q12":
        raise RuntimeError("no licence")
    if "42" in texts[-1]:
        return None, {"turns": turn}
    return "A hint for " + row["query_id"]
"""


def train(place: Path, steps: int, more: Sequence[str], folder: str, ranks: int = 1) -> str:
    """What the console said."""
    settings = [
        *small_run(place, place / folder),
        *SETTINGS,
        f"validation.paths=[{place}/held.jsonl]",
        f"run.total_steps={steps}",
        *more,
    ]
    return run_ranks(ranks, [*TRAIN, *settings]).stderr


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, the model, and the run with feedback."""
    place = tmp_path_factory.mktemp("turns")
    make_answering_model(place / "base")
    (place / "data").mkdir()
    (place / "data" / "train.jsonl").write_text(problem_rows(11, 30))
    (place / "held.jsonl").write_text(problem_rows(50, 4))
    (place / "own.py").write_text(SOURCE)
    train(place, STEPS, ["turns.feedback=verdict"], folder="run")
    return place


def turns_of(completion: dict[str, Any]) -> list[str]:
    ends = [call["position"] for call in completion.get("calls", ())]
    starts = [0, *ends]
    return [
        completion["text"][start:end].removesuffix("\n")
        for start, end in zip(starts, [*ends, None], strict=True)
    ]


def test_wrong_answers_are_told_so_and_the_last_one_is_rewarded(place: Path) -> None:
    for step, row in enumerate(metric_rows(place / "run"), start=1):
        completions = sampled(place / "run", step)
        assert len(completions) == PROMPTS * GROUP
        first_right = corrected = 0
        for completion in completions:
            *before, last = turns_of(completion)
            calls = completion.get("calls", [])
            assert [call["output"] for call in calls] == [
                WRONG if "{41}" in turn else NO_ANSWER for turn in before
            ]
            assert {call["status"] for call in calls} <= {"feedback"}
            is_right = "\\boxed{42}" in last
            assert completion["correct"] == is_right
            assert completion["reward"] == (5.0 / 2 ** len(calls) if is_right else -5.0)
            is_cut = completion["finish_reason"] == "length"
            assert is_cut or is_right or len(calls) == 2 or completion["length"] == 6
            assert 2 * (len(calls) + 1) <= completion["length"] <= 6
            first_right += is_right and not calls
            corrected += is_right and bool(calls)
        n = len(completions)
        calls = sum(len(completion.get("calls", ())) for completion in completions)
        assert first_right and corrected
        assert row["turns/answers_per_completion"] == pytest.approx(1 + calls / n)
        assert row["turns/accuracy_first"] == pytest.approx(first_right / n)
        assert row["turns/corrected"] == pytest.approx(corrected / n)
        assert row["turns/accuracy"] == row["rollout/accuracy"]
        assert row["turns/accuracy"] == pytest.approx((first_right + corrected) / n)
        assert row["turns/lost_completions"] == 0 and math.isfinite(row["train/grad_norm"])
        assert row["turns/feedback_tokens"] > 30 * calls / n and 0 <= row["turns/wait_share"] < 1


def test_validation_is_of_first_answers(place: Path) -> None:
    """Most have two tokens; those with feedback would have four on average."""
    metrics = metric_rows(place / "run", "validation.jsonl")
    assert len(metrics) == 2
    assert all(2 <= row["validation/held/mean_tokens"] < 3 for row in metrics)


def test_a_capture_has_the_feedback_and_its_update_is_made_again(
    place: Path, tmp_path: Path
) -> None:
    folder = place / "run"
    capture = read_capture(find_capture(folder, None))
    completions = [completion for group in capture.groups for completion in group.completions]
    assert [completion.text for completion in completions] == [
        sample["text"] for sample in sampled(folder, STEPS)
    ]
    assert any(completion.retries == 2 for completion in completions)
    comparison, _ = replay(1, folder, "--output", str(tmp_path / "again"))
    assert comparison["same"]
    _, refusal = replay(1, folder, "--part", "rollout", expect=MISTAKE)
    assert "a replay answers no turns" in refusal


def test_an_environment_answers_turns_in_training_and_validation(place: Path) -> None:
    """The function fails for one prompt; its completions leave their groups and are told of."""
    (place / "some.jsonl").write_text(problem_rows(10, 30))
    console = train(
        place,
        1,
        [
            f"environment.function={place}/own.py:hints",
            f"data.train_path={place}/some.jsonl",
            "data.prompts_per_step=30",
            "data.shuffle=false",
            "rollout.group_size=3",
            "telemetry.capture_steps=[]",
        ],
        folder="environment",
    )
    assert "RuntimeError: no licence" in console
    folder = place / "environment"
    (row,) = metric_rows(folder)
    completions = sampled(folder, 1)
    lost = [completion for completion in completions if completion["finish_reason"] == "lost"]
    assert 1 <= len(lost) == row["turns/lost_completions"] <= 3
    assert row["n_seqs"] == len(completions) - len(lost)
    assert f"{len(lost)} of 90 completions are lost, as environment.function failed" in console
    calls = [
        call
        for completion in completions
        if completion not in lost
        for call in completion.get("calls", ())
    ]
    assert calls and all(call["output"].startswith("A hint for q") for call in calls)
    assert "turns/accuracy_first" not in row and 1 < row["environment/turns"] < 3
    (validated,) = metric_rows(folder, "validation.jsonl")
    assert validated["validation/held/mean_tokens"] > 3, "first answers have two tokens"


LONG_TAIL = (
    "turns.feedback=verdict",
    "rollout.tail=carry",
    "rollout.group_size=2",
    "rollout.max_new_tokens=12",
    "rollout.slice_tokens=2",
    "turns.max=5",
    "policy.max_tokens_per_microbatch=1024",
    "rollout.max_staleness=3",
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_correction=token",
    "algorithm.importance_mask_high=5",
    "save.keep_last=9",
    "telemetry.capture_steps=[]",
    "validation.every_steps=null",
    "validation.paths=[]",
)


@matrix
def test_a_run_that_leaves_completions_with_feedback_goes_on_bit_by_bit(place: Path) -> None:
    """Killed after its first step, with feedback in flight."""
    steps = 4
    whole = place / "carry"
    train(place, steps, LONG_TAIL, folder=whole.name)
    metrics = rows(whole)
    assert metrics[0]["rollout/sequences_in_flight"] > 0
    content = (whole / "checkpoints" / "step-000001" / UNFINISHED).read_bytes()
    unfinished = read_unfinished(content, 2, SIZE, lambda *_: "")
    assert any(part.calls for group in unfinished.groups for part in group.parts)
    resumed = place / "resumed"
    interrupted_after(1, whole, resumed)
    train(place, steps, LONG_TAIL, folder=resumed.name)
    assert rows(resumed) == metrics


def told(folder: Path, step: int) -> list[tuple[Any, ...]]:
    """What was said and told in a step, whatever the clock and the order of groups."""
    return sorted(
        (done["text"], done["length"], done["reward"], *(call["output"] for call in done["calls"]))
        for done in ({"calls": []} | completion for completion in sampled(folder, step))
    )


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["feedback", "environment"])
def test_engines_of_their_own_without_staleness_sample_what_the_synchronous_run_does(
    place: Path, kind: str
) -> None:
    """The second step has new weights."""
    settings = {
        "feedback": ["turns.feedback=verdict"],
        "environment": [f"environment.function={place}/own.py:hints"],
    }[kind]
    folders = {0: place / "run", 1: place / f"{kind}-asynchronous"}
    if kind == "environment":
        folders[0] = place / "environment-synchronous"
        train(place, STEPS, settings, folder=folders[0].name)
    train(place, STEPS, [*settings, *ASYNCHRONOUS], folder=folders[1].name, ranks=2)
    for step in range(1, STEPS + 1):
        assert told(folders[1], step) == told(folders[0], step)
    synchronous, asynchronous = (metric_rows(folder)[-1] for folder in folders.values())
    for name in ("turns/answers_per_completion", "turns/accuracy", "turns/feedback_tokens"):
        assert asynchronous[name] == synchronous[name]
    assert asynchronous["turns/answers_per_completion"] > 1
