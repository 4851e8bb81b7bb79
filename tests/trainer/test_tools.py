"""Completions with calls in a step: what is learned of them, and what is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.algorithms.dynamic_sampling import Selection, SelectionRules, choose, choose_all
from rlmath.algorithms.intervals import accuracy_interval
from rlmath.algorithms.types import (
    Completion,
    PartialCompletion,
    Prompt,
    Score,
    ScoredGroup,
    ToolCall,
    turn_tokens,
)
from rlmath.config.length_curriculum import measured_tools
from rlmath.config.load import load_config
from rlmath.config.schema import Config, SelectionConfig, ToolsConfig
from rlmath.data.dataset import ValidationFile
from rlmath.data.packing import pack
from rlmath.planning.setting_tables import conflicts, without_effect
from rlmath.rollout.called_completions import check_lost
from rlmath.rollout.work_queue import EngineUsage
from rlmath.telemetry.samples import SampleWriter, call_facts, read_samples, text_with_outputs
from rlmath.trainer.metrics import rollout_metrics
from rlmath.trainer.policy_update import make_samples
from rlmath.trainer.rollouts.synchronous import selection_rules
from rlmath.trainer.tool_metrics import tool_metrics, wait_metrics
from rlmath.trainer.validation import file_metrics
from rlmath.trainer.void_turns import void_rule, void_rule_of

TOOLS = ToolsConfig(format="fence")
CALL = ToolCall("print(2)", "2\n", "ok", position=6, seconds=0.5, cpu_seconds=0.1)
RIGHT = Score(1.0, True, "2", "string")
WRONG = Score(0.0, False, "", "no_answer")


def called(index: int, text: str, finish: str = "stop", status: str = "ok") -> Completion:
    """Four sampled tokens with a call, three given ones, and two sampled behind."""
    part = PartialCompletion().extended((7, 8, 9, 9), (-0.5,) * 4, policy_version=3, step=2)
    call = replace(CALL, status=status, seconds=float(index + 1), is_cut=status == "error")
    part = part.answered([call], (4, 5, 6)).extended((7, 1), (-0.25,) * 2, 3, step=2)
    return part.finished(index, text, finish)  # type: ignore[arg-type]


def plain(index: int, text: str, finish: str = "stop") -> Completion:
    part = PartialCompletion().extended((7, 8, 1), (-0.5,) * 3, policy_version=3, step=2)
    return part.finished(index, text, finish)  # type: ignore[arg-type]


ANSWERED = called(0, "I add\nso \\boxed{2}")
UNANSWERED = called(1, "I add\nso it is", status="error")
ANSWERED_EARLY = called(2, "\\boxed{2}\nso it", "length")
PLAIN = plain(3, "so \\boxed{2}")
CUT = plain(4, "so we", "length")
LOST = replace(called(5, "I add\n", "lost"), calls=(replace(CALL, status="lost"),))
COMPLETIONS = (ANSWERED, UNANSWERED, ANSWERED_EARLY, PLAIN, CUT, LOST)
SCORES = (RIGHT, WRONG, WRONG, RIGHT, WRONG, WRONG)
GROUP = ScoredGroup(Prompt("q", "?", (5,), solutions=("2",), task="math"), COMPLETIONS, SCORES)


def config_with(void_turns: str, tools: ToolsConfig = TOOLS) -> Config:
    return Config(tools=replace(tools, void_turns=void_turns))  # type: ignore[arg-type]


def test_given_tokens_have_no_log_prob_and_the_version_before_them() -> None:
    assert list(ANSWERED.token_ids) == [7, 8, 9, 9, 4, 5, 6, 7, 1]
    assert list(ANSWERED.logprobs) == [-0.5] * 4 + [0.0] * 3 + [-0.25] * 2
    assert ANSWERED.sampled == [True] * 4 + [False] * 3 + [True] * 2
    assert [(part.policy_version, part.step) for part in ANSWERED.segments] == [(3, 2)] * 3
    assert ANSWERED.n_sampled == 6 and turn_tokens(ANSWERED) == 2 and turn_tokens(PLAIN) == 3
    assert ANSWERED.turns == ["I add\n", "so \\boxed{2}"] and PLAIN.turns == ["so \\boxed{2}"]


@pytest.mark.parametrize(
    ("void_turns", "learned", "kept"),
    [
        ("mask", ["xxxx...xx", "xxxx...oo", "xxxx...oo", "xxx", "ooo"], (0, 1, 2, 3, 4)),
        ("keep", ["xxxx...xx", "xxxx...xx", "xxxx...xx", "xxx", "xxx"], (0, 1, 2, 3, 4)),
        ("drop", ["xxxx...xx", "xxx"], (0, 3)),
    ],
)
def test_void_turns_are_masked_dropped_or_kept(
    void_turns: str, learned: list[str], kept: tuple[int, ...]
) -> None:
    """Marks: x is learned, o sampled without weight, . written by others; what is lost leaves."""
    config = config_with(void_turns)
    choice = choose(GROUP, selection_rules(config))
    assert choice.samples == kept and choice.filtered.count("lost") == 1
    assert choice.filtered.count("void") == 5 - len(kept)
    learned_group = choice.learned(GROUP)
    rule = void_rule_of(config, "mask")
    advantages = [[1.0] * len(kept)]
    samples = make_samples([learned_group], advantages, is_void=rule)
    for number, marks in enumerate(learned):
        batch = pack(samples, [number], pad_to_multiple=1)
        signs = zip(batch.sampled_T.tolist()[1:], batch.learned_T.tolist()[1:], strict=True)
        text = "".join("x" if weight else "o" if sampled else "." for sampled, weight in signs)
        assert text == marks
        assert batch.loss_count == len(marks) - marks.count(".")


def test_without_tools_nothing_is_void_and_nothing_is_dropped() -> None:
    config = config_with("drop", ToolsConfig())
    assert selection_rules(config) == SelectionRules()
    assert void_rule_of(config, "drop") is None


def test_what_ends_by_itself_is_an_answer_to_functions() -> None:
    config = config_with("mask")
    config = replace(config, reward=replace(config.reward, function="own:reward"))
    rule = void_rule(config)
    void = [rule(GROUP.prompt, completion) for completion in COMPLETIONS[:5]]
    assert void == [False, False, True, False, True]


def test_calls_are_counted_with_their_outcomes() -> None:
    config = config_with("mask")
    selection = Selection([GROUP], choose_all([GROUP], selection_rules(config)), 1)
    metrics = tool_metrics(selection, void_rule(config), config.tools)
    assert metrics.pop("tools/status/ok") == 0.5
    assert metrics.pop("tools/status/error") == metrics.pop("tools/status/lost") == 0.25
    others = {name for name in metrics if name.startswith("tools/status/")}
    assert len(others) == 5 and not any(metrics.pop(name) for name in others)
    assert metrics == {
        "tools/calls_per_completion": 4 / 6,
        "tools/completions_with_calls": 4 / 6,
        "tools/given_tokens": 12 / 6,
        "tools/out_of_calls": 0.0,
        "tools/void_turns": 3 / 5,
        "tools/void_completions": 0.0,
        "tools/lost_completions": 1.0,
        "tools/accuracy_with_calls": 1 / 3,
        "tools/accuracy_without_calls": 0.5,
        "tools/outputs_cut": 0.25,
        "tools/wait_s": (1 + 2 + 3 + 0.5) / 4,
        "tools/wait_s_p99": 2.0,
    }


def test_the_share_that_waits_is_of_all_engines_seconds() -> None:
    """Two engines waited for 3 s of the 6 s and 4 s that they sampled, in two rollouts."""
    rounds = [
        [EngineUsage(4.0, 9, 0, fill=1.0, waiting_seconds=1.0), EngineUsage(3.0, 9, 0, fill=1.0)],
        [EngineUsage(2.0, 9, 0, fill=1.0, waiting_seconds=2.0), EngineUsage(1.0, 9, 0, fill=1.0)],
    ]
    assert wait_metrics(rounds, "tools") == {"tools/wait_share": 0.3}
    assert wait_metrics([], "tools") == {}


def test_lost_completions_say_nothing_of_the_model() -> None:
    """They are no part of rewards, lengths and accuracies, and functions of groups see none."""
    metrics = rollout_metrics([GROUP])
    assert metrics["task_reward"] == 2 / 5 and metrics["n_seqs"] == 5
    assert metrics["reward/verdict/no_answer"] == 3 / 5
    assert GROUP.judged.completions == COMPLETIONS[:5]
    assert GROUP.with_scores([RIGHT] * 5).scores == (*[RIGHT] * 5, WRONG)


def test_a_validation_counts_lost_completions_as_wrong_and_tells_them() -> None:
    """So that they make no model the best one."""
    lost = replace(GROUP, scores=(*SCORES[:5], RIGHT))
    metrics = file_metrics(ValidationFile("own", [GROUP.prompt], 0, unusable=()), [lost], samples=6)
    low, high = accuracy_interval([2 / 6], samples=6)
    assert metrics == {
        "validation/own/accuracy": 2 / 6,
        "validation/own/accuracy_low": low,
        "validation/own/accuracy_high": high,
        "validation/own/mean_tokens": (6 * 3 + 3 * 2) / 5,
        "validation/own/truncated": 2 / 5,
        "validation/own/lost": 1.0,
    }


def test_only_settings_that_change_answers_tell_measures_apart() -> None:
    more = replace(
        TOOLS, cores=9, sessions=9, isolation="preloaded", void_turns="drop", max_calls=9
    )
    assert measured_tools(replace(more, max_calls=TOOLS.max_calls)) == measured_tools(TOOLS)
    assert measured_tools(more) != measured_tools(TOOLS)
    assert measured_tools(ToolsConfig()) is None


@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_that_is_thought_is_none(thinks: bool) -> None:
    """A prompt or an earlier turn has opened a thinking section, as for the verifier."""
    rule = void_rule(config_with("mask"))
    prompt = replace(GROUP.prompt, text="?<think>" if thinks else "?")
    assert rule(prompt, PLAIN) is rule(prompt, ANSWERED) is thinks
    opened = replace(ANSWERED, text="<think>\nso \\boxed{2}")
    opened = replace(opened, calls=(replace(CALL, position=8),))
    assert rule(GROUP.prompt, opened)


def test_a_step_without_calls_has_no_shares_of_them() -> None:
    group = replace(GROUP, completions=(PLAIN, CUT), scores=(RIGHT, WRONG))
    rules = selection_rules(config_with("drop"))
    selection = Selection([group], choose_all([group], rules), 1)
    assert tool_metrics(selection, void_rule(config_with("drop")), TOOLS) == {
        "tools/calls_per_completion": 0.0,
        "tools/completions_with_calls": 0.0,
        "tools/given_tokens": 0.0,
        "tools/out_of_calls": 0.0,
        "tools/void_turns": 0.5,
        "tools/void_completions": 1.0,
        "tools/lost_completions": 0.0,
        "tools/accuracy_without_calls": 0.5,
    }


def test_failed_calls_are_told_before_and_after_resampling() -> None:
    """A fault of the machine is none of the model's."""
    failing = [called(g, "I add\nso \\boxed{2}", status="error") for g in range(3)]
    completions = (*failing, replace(ANSWERED, sample_index=3), replace(LOST, sample_index=4))
    scores = (RIGHT, RIGHT, WRONG, RIGHT, WRONG)
    group = replace(GROUP, completions=completions, scores=scores)
    config = replace(config_with("mask"), selection=SelectionConfig(resample_to=2))
    selection = Selection([group], choose_all([group], selection_rules(config)), 1)
    metrics = tool_metrics(selection, void_rule(config), config.tools)
    assert (metrics["tools/failed_calls"], metrics["tools/failed_calls_learned"]) == (0.75, 0.5)
    without = Selection([group], choose_all([group], SelectionRules()), 1)
    plain_metrics = tool_metrics(without, void_rule(config), config.tools)
    assert not any("failed_calls" in name for name in plain_metrics)


def test_completions_without_a_call_left_are_counted() -> None:
    cut = called(0, "I add\n```python\n1\n```", "length")
    group = replace(GROUP, completions=(cut, CUT), scores=(WRONG, WRONG))
    selection = Selection([group], choose_all([group], SelectionRules()), 1)
    assert (
        tool_metrics(selection, void_rule(config_with("mask")), TOOLS)["tools/out_of_calls"] == 0.5
    )


def test_few_lost_completions_are_told_and_many_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_lost(["killed"] * 4, calling=8, outcome="They leave")
    assert "4 of 8 completions with calls are lost" in caplog.text
    assert "killed. They leave" in caplog.text
    caplog.clear()
    check_lost(["KeyError: 'a\x1b'\n  own.py, line 4"], calling=8, outcome="It leaves")
    assert "The first: KeyError: 'a\\x1b'. It leaves" in caplog.text
    caplog.clear()
    check_lost(["killed"] * 10, calling=50, outcome="", tells=False)
    check_lost([], calling=1, outcome="")
    assert not caplog.text
    with pytest.raises(RuntimeError, match=r"10 of 49 completions with calls are lost.*killed"):
        check_lost(["killed"] * 10, calling=49, outcome="", tells=False)


def test_samples_have_calls_where_they_stand(tmp_path: Path) -> None:
    SampleWriter(str(tmp_path), 1).write(1, [GROUP], [[0.0] * 6])
    ((_, row),) = read_samples(tmp_path / "samples" / "step-000001.jsonl")
    assert isinstance(row, dict)
    first, second, *_ = row["completions"]
    assert [text for _, text in text_with_outputs(first)] == ["I add\n", "2\n", "so \\boxed{2}"]
    assert first["text"] == ANSWERED.text and first["length"] == 6
    assert first["segments"] == [[6, ANSWERED.policy_version]], "sampled tokens"
    assert call_facts(first["calls"][0]) == "ok, 1.00 s"
    assert call_facts(second["calls"][0]) == "error, 2.00 s, cut"
    assert "calls" not in row["completions"][3]


def test_what_tools_do_not_go_with_is_refused() -> None:
    paths = ["run.output_dir=o", "model.path=m", "data.train_path=t"]
    longer = [*paths, "tools.call_cpu_seconds=31"]
    assert any(
        "tools.call_cpu_seconds is 31, above" in text
        for text in conflicts(load_config([], [*longer, "tools.format=fence"]))
    )
    assert not any("tools" in text for text in conflicts(load_config([], longer)))
    assert "tools.max_calls: no effect without tools.format." in without_effect(
        load_config([], [*paths, "tools.max_calls=2"]), ["tools.max_calls"]
    )
