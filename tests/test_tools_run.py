"""A run whose completions call Python: in training and validation, captured, and resumed.

The model follows a script, and only what it answers behind outputs can be right."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlmath.algorithms.types import PartialCompletion, turn_tokens
from rlmath.checkpoint.capture import read_capture
from rlmath.checkpoint.unfinished_groups import UNFINISHED, read_unfinished
from rlmath.data.tool_fences import FenceFormat
from rlmath.distributed.fault_tolerance.exit_codes import FAILURE, MISTAKE
from rlmath.replay.replay import find_capture
from tests.forked_ranks import replay, run_ranks
from tests.programs import TRAIN, metric_rows, rows, small_run
from tests.selection import keeping, matrix
from tests.test_everything_on import SPOILED
from tests.test_resume import interrupted_after
from tests.tool_models import (
    CODES,
    SIZE,
    make_chat_script_model,
    make_script_model,
    make_script_tokenizer,
)

STEPS = 2
PROMPTS = 3
GROUP = 8
LEARNED = 6
SETTINGS = f"""
data.prompts_per_step={PROMPTS} data.max_prompt_tokens=8 data.template=raw parallel.tensor=1
rollout.group_size={GROUP} rollout.max_new_tokens=30 optimizer.lr=1e-4
selection.resample_to={LEARNED}
tools.format=fence tools.max_calls=3 tools.max_output_tokens=64 tools.cores=1 tools.sessions=2
validation.every_steps=1 validation.samples=6 validation.before_training=false
telemetry.sample_groups_per_step=100 telemetry.capture_steps=[{STEPS}] save.ckpt_freq_steps=1
""".split()


def problem_rows(first: int, count: int) -> str:
    """Problems whose answers are 42, so that most are what the script answers."""
    rows = [
        {"prompt": f"{n}x7:", "task": "math", "query_id": f"q{n}", "solutions": ["\\boxed{42}"]}
        for n in range(first, first + count)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def train(
    place: Path,
    steps: int,
    *more: str,
    folder: str = "run",
    ranks: int = 1,
    program: Sequence[str] = TRAIN,
) -> str:
    """What the console said."""
    settings = [
        *small_run(place, place / folder),
        *SETTINGS,
        f"validation.paths=[{place}/held.jsonl]",
        f"run.total_steps={steps}",
        *more,
    ]
    return run_ranks(ranks, [*program, *settings]).stderr


def sampled(folder: Path, step: int) -> list[dict[str, Any]]:
    """The completions of a step's file of samples."""
    path = folder / "samples" / f"step-{step:06d}.jsonl"
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    return [completion for group in groups for completion in group["completions"]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data, the model, and the run."""
    place = tmp_path_factory.mktemp("tools")
    make_script_model(place / "base")
    (place / "data").mkdir()
    (place / "data" / "train.jsonl").write_text(problem_rows(10, 30))
    (place / "held.jsonl").write_text(problem_rows(50, 4))
    train(place, STEPS)
    return place


def test_calls_stand_in_the_samples_and_in_the_metrics(place: Path) -> None:
    folder = place / "run"
    metrics = metric_rows(folder)
    assert [row["step"] for row in metrics] == [1, 2]
    for step, row in enumerate(metrics, start=1):
        completions = sampled(folder, step)
        assert len(completions) == PROMPTS * GROUP
        calls = [call for completion in completions for call in completion.get("calls", ())]
        assert calls and all(completion["length"] <= 30 for completion in completions)
        for completion in completions:
            assert "output" not in completion["text"] and len(completion.get("calls", ())) <= 3
            assert completion["correct"] == ("\\boxed{42}" in completion["text"])
        assert row["tools/calls_per_completion"] == pytest.approx(len(calls) / len(completions))
        right = sum(completion["correct"] for completion in completions)
        calling = [completion for completion in completions if "calls" in completion]
        assert row["rollout/accuracy"] == pytest.approx(right / len(completions))
        assert row["tools/accuracy_with_calls"] == pytest.approx(
            sum(completion["correct"] for completion in calling) / len(calling)
        )
        for status in ("ok", "error", "lost"):
            share = sum(call["status"] == status for call in calls) / len(calls)
            assert row[f"tools/status/{status}"] == pytest.approx(share)
        assert 0 < row["tools/wait_share"] < 1
        assert row["tools/given_tokens"] > 0 and math.isfinite(row["train/grad_norm"])
        assert row["selection/filtered/oversampled"] == PROMPTS * (GROUP - LEARNED)


def test_validation_calls_tools_too(place: Path) -> None:
    """What the script answers stands behind outputs: without any, nothing would be right."""
    metrics = metric_rows(place / "run", "validation.jsonl")
    assert [row["step"] for row in metrics] == [1, 2]
    assert max(row["validation/held/accuracy"] for row in metrics) > 0
    assert all(row["validation/held/mean_tokens"] <= 30 for row in metrics)


def test_a_capture_has_the_calls_and_its_update_masks_void_turns(
    place: Path, tmp_path: Path
) -> None:
    """Turns without answer have weight as soon as `tools.void_turns` keeps them."""
    folder = place / "run"
    capture = read_capture(find_capture(folder, None))
    completions = [completion for group in capture.groups for completion in group.completions]
    samples = sampled(folder, STEPS)
    texts = [sample["text"] for sample in samples]
    assert [completion.text for completion in completions] == texts
    assert [[call.output for call in completion.calls] for completion in completions] == [
        [call["output"] for call in sample.get("calls", ())] for sample in samples
    ]
    codes = {call.code for completion in completions for call in completion.calls}
    assert codes & set(CODES)
    assert any(not completion.text.endswith("}") for completion in completions)
    comparison, _ = replay(1, folder, "--output", str(tmp_path / "mask"))
    assert comparison["same"]
    output = str(tmp_path / "keep")
    comparison, _ = replay(1, folder, "tools.void_turns=keep", "--output", output, expect=FAILURE)
    relative = [
        difference["relative"]
        for difference in comparison["differences"]
        if difference["name"] == "grad_norm"
    ]
    assert max(relative) > 0.01
    _, refusal = replay(1, folder, "--part", "rollout", expect=MISTAKE)
    assert "runs no code of a model's" in refusal


def test_a_resumed_run_calls_tools_again(place: Path) -> None:
    before = rows(place / "run")
    console = train(place, STEPS + 1, "tools.sessions=3")
    metrics = metric_rows(place / "run")
    assert "resum" in console.lower()
    assert rows(place / "run")[:STEPS] == before
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert metrics[-1]["tools/calls_per_completion"] > 0
    assert any("calls" in completion for completion in sampled(place / "run", STEPS + 1))


TAILS = {"carry": "rollout/sequences_in_flight", "defer": "rollout/deferred_groups"}
"""The metric of what a step leaves unfinished, by `rollout.tail`."""
KEPT = (("fence", "carry"), ("fence", "defer"))
"""Formats and tails that `make test` has."""
CHAT = (
    "tools.format=chat",
    "data.template=chat",
    "data.max_prompt_tokens=1000",
    "policy.max_tokens_per_microbatch=2048",
)
LONG_TAIL = (
    "rollout.group_size=2",
    "selection.resample_to=null",
    "rollout.slice_tokens=6",
    "rollout.max_staleness=3",
    "algorithm.recompute_logprobs=true",
    "algorithm.importance_correction=token",
    "algorithm.importance_mask_high=5",
    "save.keep_last=9",
    "telemetry.capture_steps=[]",
    "validation.every_steps=null",
    "validation.paths=[]",
)


@pytest.mark.parametrize(
    ("tool_format", "tail"),
    keeping(itertools.product(("fence", "chat"), TAILS), *KEPT),
)
def test_a_run_that_leaves_completions_with_calls_goes_on_bit_by_bit(
    place: Path, tool_format: str, tail: str
) -> None:
    """Killed after its first step; with "carry" calls are in flight, whose sessions come again."""
    settings = [f"rollout.tail={tail}", *LONG_TAIL]
    if tool_format == "chat":
        model = make_chat_script_model(place / "chat", positions=2048)
        settings += [f"model.path={model}", *CHAT]
    steps = 4
    go_on = partial(train, place, steps, *settings)
    whole = place / f"{tool_format}-{tail}"
    go_on(folder=whole.name)
    metrics = rows(whole)
    assert len(metrics) == steps and metrics[0][TAILS[tail]] > 0
    assert any(row["tools/calls_per_completion"] > 0 for row in metrics)
    content = (whole / "checkpoints" / "step-000001" / UNFINISHED).read_bytes()
    unfinished = read_unfinished(content, 2, SIZE, lambda *_: "")
    calls = [call for group in unfinished.groups for part in group.parts for call in part.calls]
    assert bool(calls) == (tail == "carry")
    assert all(call.ends_turn == (tool_format == "chat") for call in calls)
    resumed = place / f"{whole.name}-resumed"
    interrupted_after(1, whole, resumed)
    go_on(folder=resumed.name)
    assert rows(resumed) == metrics
    for step in (2, 3, 4):
        assert without_seconds(sampled(resumed, step)) == without_seconds(sampled(whole, step))


@matrix
def test_an_asynchronous_run_calls_and_goes_on_with_calls_in_flight(place: Path) -> None:
    """Killed with a completion at a call, which a resumed run executes again.

    Validation and weights come while completions wait. Every prompt is learned once."""
    steps = 4
    folder = place / "asynchronous"
    go_on = partial(
        train,
        place,
        steps,
        "rollout.ranks=1",
        "rollout.max_staleness=2",
        "algorithm.recompute_logprobs=true",
        "algorithm.importance_correction=token",
        "algorithm.importance_mask_high=5",
        "save.keep_last=9",
        "telemetry.capture_steps=[]",
        folder=folder.name,
        ranks=2,
    )
    go_on()
    before = rows(folder)
    tool_format = FenceFormat(make_script_tokenizer(), 64)
    at_calls = []
    for step in range(1, steps):
        content = (folder / "checkpoints" / f"step-{step:06d}" / UNFINISHED).read_bytes()
        groups = read_unfinished(content, GROUP, SIZE, lambda *_: "").groups
        parts = [part for group in groups for part in group.parts]
        turns = [list(part.token_ids[len(part.token_ids) - turn_tokens(part) :]) for part in parts]
        unfinished = [
            turn
            for turn, part in zip(turns, parts, strict=True)
            if isinstance(part, PartialCompletion) and tool_format.calls_in(turn)
        ]
        at_calls += [step] if unfinished else []
    last = max(at_calls)
    for step in range(last + 1, steps + 1):
        shutil.rmtree(folder / "checkpoints" / f"step-{step:06d}")
    go_on()
    assert rows(folder)[:last] == before[:last]
    prompt_ids = []
    for step, row in enumerate(metric_rows(folder), start=1):
        path = folder / "samples" / f"step-{step:06d}.jsonl"
        groups = [json.loads(line) for line in path.read_text().splitlines()]
        prompt_ids += [group["prompt_id"] for group in groups]
        assert row["tools/calls_per_completion"] > 0 and row["tools/lost_completions"] == 0
        assert row["rollout/staleness_max"] <= 2
    assert len(prompt_ids) == len(set(prompt_ids)) == steps * PROMPTS
    validated = metric_rows(folder, "validation.jsonl")
    assert [row["step"] for row in validated] == [1, 2, 3, 4]
    assert max(row["validation/held/accuracy"] for row in validated) > 0


def without_seconds(completions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The completions without what the clock makes of their calls."""
    return [
        completion
        | {
            "calls": [
                {name: fact for name, fact in call.items() if "seconds" not in name}
                for call in completion.get("calls", ())
            ]
        }
        for completion in completions
    ]


STAGE_LIMITS = (16, 16, 30, 30)
"""Most sampled tokens of a completion, by step."""
WITH_ALL = f"""
run.total_steps=null lora.rank=4 stages.steps=[2,2] stages.max_new_tokens=[{STAGE_LIMITS[0]},{STAGE_LIMITS[-1]}]
data.curriculum=skip_solved data.solved_samples=8 data.curriculum_floor=0.01
data.history_path={{place}}/rates.jsonl algorithm.rollback=1 save.keep_last=9
telemetry.capture_steps=[{len(STAGE_LIMITS)}]
""".split()


@pytest.mark.matrix
def test_calls_go_with_adapters_stages_a_curriculum_a_rollback_and_a_resume(
    place: Path, tmp_path: Path
) -> None:
    """The third step breaks the policy, and the run is killed once more after it."""
    steps = len(STAGE_LIMITS)
    solved = {f"q{n}" for n in range(10, 40, 2)}
    rates = [{"query_id": name, "correct": 8, "sampled": 8} for name in sorted(solved)]
    (place / "rates.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rates))
    settings = [setting.format(place=place) for setting in WITH_ALL]

    def train_with_all(folder: Path) -> str:
        return train(place, steps, *settings, folder=folder.name, program=SPOILED)

    whole = place / "all"
    console = train_with_all(whole)
    assert console.count("Rollback 1 of at most 1") == 1
    metrics = rows(whole)
    assert [row["step"] for row in metrics] == list(range(1, steps + 1))
    for step, limit in enumerate(STAGE_LIMITS, start=1):
        completions = sampled(whole, step)
        lengths = [completion["length"] for completion in completions]
        assert max(lengths) <= limit and sum("calls" in done for done in completions) > 0
        assert metrics[step - 1]["tools/calls_per_completion"] > 0
        assert not solved & prompt_ids(whole, step)
    assert max(done["length"] for done in sampled(whole, steps)) > STAGE_LIMITS[0]
    assert metrics[0]["history/skipped_share"] > 0
    comparison, _ = replay(1, whole, "--step", str(steps), "--output", str(tmp_path / "replay"))
    assert comparison["same"]
    resumed = place / "all-resumed"
    interrupted_after(3, whole, resumed)
    train_with_all(resumed)
    metrics_after_resume = rows(resumed)
    # The first sync of a process sends the model, too.
    sent_first = metrics_after_resume[-1].pop("sync/copied_gib")
    assert sent_first > 2 * metrics[-1].pop("sync/copied_gib")
    assert metrics_after_resume == metrics
    assert without_seconds(sampled(resumed, steps)) == without_seconds(sampled(whole, steps))


def prompt_ids(folder: Path, step: int) -> set[str]:
    """The prompts of a step's samples."""
    lines = (folder / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return {json.loads(line)["prompt_id"] for line in lines}
