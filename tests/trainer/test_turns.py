"""Completions with several answers in a step: what is rewarded, counted, shown and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from rlmath.algorithms.dynamic_sampling import Selection, choose
from rlmath.algorithms.partial_rollouts import UnfinishedGroup, UnfinishedGroups
from rlmath.algorithms.types import (
    FEEDBACK,
    Completion,
    PartialCompletion,
    Prompt,
    Score,
    ScoredCompletion,
    ScoredGroup,
    ToolCall,
)
from rlmath.checkpoint.unfinished_groups import read_unfinished, write_unfinished
from rlmath.cli.samples import format_group
from rlmath.config.length_curriculum import engine_length, sequence_text, unsampled_limit
from rlmath.config.load import load_config
from rlmath.config.schema import Config, RewardConfig, TurnsConfig
from rlmath.data.packing import pack
from rlmath.evals.command import parse, plan_of
from rlmath.planning.setting_tables import conflicts, without_effect
from rlmath.rewards.reward_manager import RewardManager, open_reward_workers
from rlmath.telemetry.samples import SampleWriter, read_samples
from rlmath.trainer.policy_update import make_samples
from rlmath.trainer.rollouts.synchronous import selection_rules, unscored
from rlmath.trainer.turn_metrics import turn_metrics
from rlmath.trainer.validation import _measure

CALL = ToolCall("", "No.", FEEDBACK, position=10, seconds=2.0)
FIRST = "\\boxed{2}\n"
RIGHT = Score(1.0, True, "42", "string")
WRONG = Score(-1.0, False, "41", "number")
PROMPT = Prompt("q", "?", (5,), solutions=("42",), task="math")


def retried(index: int, last: str, finish: str = "stop", call: ToolCall = CALL) -> Completion:
    """Three sampled tokens, two of feedback, and two sampled behind."""
    part = PartialCompletion().extended((7, 8, 1), (-0.5,) * 3, policy_version=3, step=2)
    part = part.answered([call], (4, 5)).extended((7, 1), (-0.25,) * 2, 3, step=2)
    part = replace(part, figures=(("level", 1.0), ("level", 2.0), ("tries", 5.0)))
    return part.finished(index, FIRST + last, finish)  # type: ignore[arg-type]


def at_once(index: int, text: str) -> Completion:
    part = PartialCompletion().extended((7, 8, 1), (-0.5,) * 3, policy_version=3, step=2)
    return part.finished(index, text, "stop")


CORRECTED = retried(0, "\\boxed{42}")
STILL_WRONG = retried(1, "\\boxed{41}", call=replace(CALL, is_cut=True, seconds=4.0))
FIRST_RIGHT = at_once(2, "\\boxed{42}")
LOST = retried(3, "", "lost", call=replace(CALL, status="lost", output="no licence"))
GROUP = ScoredGroup(
    PROMPT, (CORRECTED, STILL_WRONG, FIRST_RIGHT, LOST), (RIGHT, WRONG, RIGHT, WRONG)
)


@pytest.mark.parametrize("scheme", ["correctness", "zero_one"])
def test_the_reward_is_that_of_the_last_answer_less_the_discount(scheme: str) -> None:
    """A reward below 0 stays: a wrong answer does not cost less for a retry."""
    reward = RewardConfig(scheme=scheme)
    with open_reward_workers(reward) as workers:
        rewards = RewardManager(workers, reward, 99, discount=0.5)
        right_first = retried(4, "\\boxed{41}")
        right_first = replace(right_first, text=right_first.text.replace("{2}", "{42}"))
        for number, completion in enumerate((CORRECTED, STILL_WRONG, FIRST_RIGHT, right_first)):
            rewards.submit(PROMPT, completion, number)
        scores = rewards.collect()
    right, wrong = (5.0, -5.0) if scheme == "correctness" else (1.0, 0.0)
    assert [score.reward for score in scores] == [right / 2, wrong, right, wrong]
    assert [score.correct for score in scores] == [True, False, True, False]


@pytest.mark.parametrize("takes", ["completion", "group"])
def test_functions_judge_the_last_answer(
    tmp_path: Path, takes: Literal["completion", "group"]
) -> None:
    """A function of groups does, too: in an environment it may take them."""
    (tmp_path / "own.py").write_text(
        "def completion(text, solutions, row):\n    return float(len(text))\n"
        "def group(texts, solutions, row):\n    return list(map(len, texts))\n"
    )
    reward = RewardConfig(function=f"{tmp_path}/own.py:{takes}", function_takes=takes)
    with open_reward_workers(reward) as workers:
        rewards = RewardManager(workers, reward, 99)
        if takes == "group":
            rewards.submit_group(PROMPT, [CORRECTED, FIRST_RIGHT])
        else:
            for completion in (CORRECTED, FIRST_RIGHT):
                rewards.submit(PROMPT, completion)
        assert [score.reward for score in rewards.collect()] == [len("\\boxed{42}")] * 2


def test_feedback_has_no_weight_and_a_lost_completion_leaves_its_group() -> None:
    choice = choose(GROUP, selection_rules(Config()))
    assert choice.samples == (0, 1, 2) and choice.filtered == ("lost",)
    samples = make_samples([choice.learned(GROUP)], [[1.0] * 3])
    batch = pack(samples, [0], pad_to_multiple=1)
    assert batch.sampled_T.tolist()[1:] == [True, True, True, False, False, True, True]
    assert batch.loss_count == 5


def test_metrics_of_answers_and_figures() -> None:
    rules = selection_rules(Config())
    selection = Selection([GROUP], [choose(GROUP, rules)], 1)
    metrics = turn_metrics(selection, is_judged=True)
    assert metrics == {
        "turns/answers_per_completion": pytest.approx(5 / 3),
        "turns/accuracy": pytest.approx(2 / 3),
        "turns/accuracy_first": pytest.approx(1 / 3),
        "turns/corrected": pytest.approx(1 / 3),
        "turns/feedback_tokens": 1.5,
        "turns/feedback_cut": 0.5,
        "turns/lost_completions": 1.0,
        "turns/wait_s": 3.0,
        "environment/level": 1.5,
        "environment/tries": 5.0,
    }
    in_environment = turn_metrics(selection, is_judged=False)
    assert metrics.items() - in_environment.items() == {
        (name, metrics[name]) for name in ("turns/accuracy_first", "turns/corrected")
    }


def test_first_and_corrected_answers_are_those_that_ended_their_completions() -> None:
    """A function rewards, and the verifier, which finds all wrong, measures the accuracy."""
    scores = tuple(replace(score, verified_correct=False) for score in GROUP.scores)
    group = replace(GROUP, scores=scores)
    selection = Selection([group], [choose(group, selection_rules(Config()))], 1)
    metrics = turn_metrics(selection, is_judged=True)
    assert metrics["turns/accuracy"] == 0
    assert metrics["turns/accuracy_first"] == pytest.approx(1 / 3)
    assert metrics["turns/corrected"] == pytest.approx(1 / 3)


def test_what_another_reward_function_has_called_wrong_is_sampled_anew() -> None:
    """None of its completions has ended."""
    begun = PartialCompletion().extended((7, 1), (-0.5,) * 2, policy_version=3, step=2)
    group = UnfinishedGroup(7, 2, (begun, begun))
    assert unscored(group, 4) is group
    told = replace(group, samples=(begun, begun.answered([CALL], (4,))))
    assert unscored(told, 4) == replace(told.nothing_sampled(told.deferred), first_step=4)


def test_a_checkpoint_keeps_feedback_and_figures() -> None:
    part = PartialCompletion().extended((7, 1), (-0.5,) * 2, policy_version=3, step=2)
    part = replace(part.answered([CALL], (4,)), figures=(("level", 1.0),))
    group = UnfinishedGroup(
        7, 2, (part, ScoredCompletion(replace(CORRECTED, sample_index=1), RIGHT))
    )
    content = write_unfinished(UnfinishedGroups([group], 8, 0.0))
    read = read_unfinished(content, 2, 100, lambda *_: "")
    (partial, done) = read.groups[0].samples
    assert isinstance(partial, PartialCompletion) and isinstance(done, ScoredCompletion)
    assert (partial.calls, partial.figures) == (part.calls, part.figures)
    assert (done.completion.calls, done.completion.figures) == (CORRECTED.calls, CORRECTED.figures)
    spoiled = content.replace(b'["level", 1.0]', b'["level", NaN]')
    with pytest.raises(ValueError, match="a figure is not finite"):
        read_unfinished(spoiled, 2, 100, lambda *_: "")


def test_samples_show_feedback_in_its_place(tmp_path: Path) -> None:
    SampleWriter(str(tmp_path), 1).write(1, [GROUP], [[1.0] * 4])
    ((_, row),) = read_samples(tmp_path / "samples" / "step-000001.jsonl")
    assert isinstance(row, dict)
    text = format_group(row, "step-000001")
    assert "5 tokens, answer 2, stop" in text and "3 tokens, stop" in text
    assert (
        "          | \\boxed{2}\nfeedback  > feedback, 2.00 s\n          > No.\n"
        "          | \\boxed{42}\n" in text
    )
    assert "output    > lost, 2.00 s" in text
    calls = (CALL, *LOST.calls)
    lost = ScoredGroup(PROMPT, (replace(LOST, calls=calls),), (WRONG,))
    SampleWriter(str(tmp_path), 1).write(2, [lost], [[1.0]])
    ((_, row),) = read_samples(tmp_path / "samples" / "step-000002.jsonl")
    assert isinstance(row, dict)
    text = format_group(row, "step-000002")
    assert "answer 2, lost" in text and "feedback  > lost, 2.00 s" in text


PATHS = ["run.output_dir=o", "model.path=m", "data.train_path=t"]
FUNCTION = "environment.function=own.py:hints"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["turns.feedback=verdict", FUNCTION], "are both set"),
        (["turns.feedback=' '"], "turns.feedback is empty"),
        (["turns.feedback=verdict", "tools.format=fence"], 'tools.format is "fence", and turns'),
        ([FUNCTION, "rollout.ranks=2"], "rollout.ranks is 2, and turns.feedback or environment"),
        ([FUNCTION, "policy.routing_replay=engine"], "routes of completions with several turns"),
        (
            ["turns.feedback=No.", "reward.function=o:f", "reward.function_takes=group"],
            "each answer is judged as soon",
        ),
        (
            ["turns.feedback=No.", "turns.discount=0.5", "reward.combine=gdpo"],
            "turns.discount is 0.5",
        ),
        ([FUNCTION, "turns.discount=0.5", "reward.combine=gdpo"], "turns.discount is 0.5"),
    ],
)
def test_what_turns_do_not_go_with_is_refused(overrides: list[str], told: str) -> None:
    assert any(told in text for text in conflicts(load_config([], [*PATHS, *overrides])))
    assert not any(told in text for text in conflicts(load_config([], [*PATHS, overrides[0]]))) or (
        len(overrides) == 1
    )


def test_settings_without_turns_have_no_effect() -> None:
    config = load_config([], [*PATHS, "turns.max=3", "environment.workers=2"])
    texts = list(without_effect(config, ["turns.max", "environment.workers"]))
    assert texts == [
        "turns.max: no effect without turns.feedback and without environment.function.",
        "environment.workers: no effect without environment.function.",
    ]


def test_the_engine_has_room_for_what_is_told() -> None:
    config = load_config([], [*PATHS, "rollout.max_new_tokens=700", "data.max_prompt_tokens=1000"])
    turns = TurnsConfig(feedback="verdict", max=3, max_feedback_tokens=100)
    longer = replace(config, turns=turns)
    assert unsampled_limit(longer) == 2 * 164 and engine_length(longer) == 1700 + 328
    assert sequence_text(longer).endswith("+ (turns.max - 1) x (turns.max_feedback_tokens + 64)")
    assert sequence_text(longer, keys=False) == "1000 + 700 + 328"
    assert engine_length(replace(config, turns=replace(turns, feedback=None))) == 1700


def test_a_measure_in_an_environment_is_none_without_it(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def hints(texts, row, turn):\n    return None\n")
    config = load_config([], [*PATHS, f"environment.function={tmp_path}/own.py:hints"])
    assert _measure(config)["environment"]["max"] == 2
    feedback = load_config([], [*PATHS, "turns.feedback=verdict"])
    assert _measure(feedback) == _measure(load_config([], PATHS)), "validation has no feedback"


def test_an_evaluation_of_a_model_in_an_environment_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "hf_model").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"run: {{output_dir: {folder}}}\nmodel: {{path: m}}\ndata: {{train_path: t}}\n"
        "environment: {function: 'own.py:hints'}\n"
    )
    words = ["--model", str(folder / "hf_model"), "--benchmarks", "x", "--data-dir", str(tmp_path)]
    with pytest.raises(ValueError, match=r"has environment\.function, which an evaluation"):
        plan_of(parse([*words, "--output", str(tmp_path / "out")]))
