"""Several named rewards.

Their values by real workers, what one that fails costs, and the sum of the others."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlmath.algorithms.types import Completion, Prompt, RewardFailure, Score, ScoredGroup
from rlmath.answers.verifier import Verdict
from rlmath.config.schema import RewardConfig
from rlmath.rewards.reward_manager import (
    RewardFunctionError,
    RewardManager,
    first_function_failure,
    open_reward_workers,
    raise_if_every_call_failed,
    try_reward_function,
)
from rlmath.rewards.several_rewards import RewardWorkers, rewards_of, score_of, summed_rewards
from rlmath.workers.function_calls import FunctionResult

LIMIT = 100
SHORT = {"boxed": False, "length": 1, "limit": 9, "truncated": False}
PROMPT = Prompt("q1", "1+1=", (1,), ("\\boxed{2}",), "math")
SOURCE = """
import os

def steps(completion, solutions, row):
    return completion.count("step"), {"correct": 2.0 - completion.count("wrong"), "pid": os.getpid()}

def breaks(completion, solutions, row):
    if "bad" in completion:
        raise KeyError("no such step")
    if "end" in completion:
        os._exit(3)
    return 1.0

def always_breaks(completion, solutions, row):
    return [][0]
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a file with functions."""
    path: Path = tmp_path_factory.mktemp("functions") / "rewards_of_mine.py"
    path.write_text(SOURCE)
    return str(path)


def completion(text: str, tokens: int = 10, reason: str = "stop", index: int = 0) -> Completion:
    return Completion(index, (5,) * tokens, (-1.0,) * tokens, text, reason, 0)  # pyright: ignore


@pytest.fixture(scope="module")
def pools(module: str) -> Iterator[RewardWorkers]:
    """Workers of every reward of these tests."""
    names = ("steps", "breaks")
    rewards = ["correctness", *(f"{name}={module}:{name}" for name in names)]
    with open_reward_workers(
        RewardConfig(rewards=rewards, timeout_seconds=1.5, workers=1)
    ) as workers:
        for name in names:
            workers.by_name[name].call("", [], {}).result(60)  # they have started
        yield workers


def scores(pools: RewardWorkers, reward: RewardConfig, *completions: Completion) -> list[Score]:
    """The completions' scores by those of the workers that the settings have."""
    workers = copy.copy(pools)
    known_workers = pools.by_name | {"": pools.by_name["steps"]}
    workers.by_name = {
        named_reward.name: known_workers[named_reward.name]
        for named_reward in rewards_of(reward)
        if named_reward.name in known_workers
    }
    manager = RewardManager(workers, reward, LIMIT)
    for answer in completions:
        manager.submit(PROMPT, answer)
    return manager.collect()


# ---------------------------------------------------------------- values


def test_every_reward_has_its_value_and_the_sum_is_scaled_as_the_scheme_says(pools: RewardWorkers):
    reward = RewardConfig(
        rewards=["correctness", "format", "length", "steps=m:steps"],
        weights=[1.0, 0.5, 0.2, 0.1],
        workers=1,
    )
    right_score, unboxed_score, wrong_score = scores(
        pools,
        reward,
        completion("step step \\boxed{2}", 25),
        completion("the answer is 2", 50),
        completion("step wrong \\boxed{3}", 100, "length"),
    )
    assert right_score.parts == (1.0, 1.0, 0.75, 2.0)
    assert right_score.reward == pytest.approx(5 * (1.0 + 0.5 + 0.2 * 0.75 + 0.1 * 2))
    assert (right_score.correct, right_score.boxed, right_score.verdict, right_score.extracted) == (
        True,
        True,
        "string",
        "2",
    )
    assert unboxed_score.parts == (-1.0, 0.0, 0.5, 0.0) and not unboxed_score.correct
    assert wrong_score.parts == (-1.0, 1.0, 0.0, 1.0) and wrong_score.failures == ()
    assert dict(wrong_score.metrics)["steps/correct"] == 1.0  # but the verifier says what is right
    assert not wrong_score.correct


def test_one_reward_of_weight_one_is_what_it_is_without_a_list(pools: RewardWorkers):
    """The reward is the verifier's, a scheme's or a function's.

    It has a bias, scaling, and penalties for length."""
    texts = (
        completion("step \\boxed{2}"),
        completion("\\boxed{3}", 95),
        completion("wrong wrong 2", 100, "length"),
        completion("\\boxed{\\sqrt{4}}", 80),
    )
    length = {"overlong_buffer": 20, "overlong_penalty": 0.7, "output_bias": 0.3}
    for plain_settings, listed_reward in (
        ({}, "correctness"),
        ({**length, "scheme": "mix", "format_penalty": -0.4}, "correctness"),
        ({**length, "output_scaling": 2.0, "mask_no_eos_with_zero": True}, "correctness"),
        ({**length, "function": "m:steps"}, "steps=m:steps"),
    ):
        list_settings = {**plain_settings, "function": None, "rewards": [listed_reward]}
        for plain_score, list_score in zip(
            scores(pools, RewardConfig(**plain_settings), *texts),
            scores(pools, RewardConfig(**list_settings), *texts),
            strict=True,
        ):
            assert (
                list_score.reward,
                list_score.correct,
                list_score.verdict,
                list_score.extracted,
                list_score.boxed,
            ) == (
                plain_score.reward,
                plain_score.correct,
                plain_score.verdict,
                plain_score.extracted,
                plain_score.boxed,
            )


def test_without_correctness_the_first_function_that_tells_says_what_is_right():
    settings = RewardConfig(rewards=["a=m:a", "b=m:b"])

    def correct(a: FunctionResult, b: FunctionResult) -> bool:
        return score_of(settings, {"a": a, "b": b}, **SHORT).correct

    reported = FunctionResult(-1.0, (("correct", 1.0),))
    failed = FunctionResult(0.0, failure="timeout")
    assert correct(FunctionResult(0.5), FunctionResult(-1.0)) and not correct(
        FunctionResult(0.0), FunctionResult(9.0)
    )
    assert correct(FunctionResult(0.0), reported) and correct(
        reported, FunctionResult(-1.0, (("correct", 0.0),))
    )
    assert correct(failed, reported) and not correct(failed, FunctionResult(1.0))


# ---------------------------------------------------------------- failures


def test_a_reward_that_fails_leaves_the_others_as_they_are(pools: RewardWorkers):
    reward = RewardConfig(
        rewards=["correctness", "breaks=m:breaks", "steps=m:steps"],
        weights=[1.0, 10.0, 0.1],
        output_scaling=1.0,
        workers=1,
    )
    failed_score, killed_score, fine_score = scores(
        pools,
        reward,
        completion("bad step \\boxed{2}"),
        completion("end step 3"),
        completion("\\boxed{2}"),
    )
    assert (
        failed_score.parts == (1.0, None, 1.0)
        and failed_score.reward == pytest.approx(1.1)
        and failed_score.correct
    )
    assert killed_score.parts == (-1.0, None, 1.0) and killed_score.reward == pytest.approx(-0.9)
    assert fine_score.parts == (1.0, 1.0, 0.0) and fine_score.failures == ()
    (failure,) = failed_score.failures
    assert (failure.name, failure.kind) == ("breaks", "error") and "KeyError" in failure.message
    assert pickle.loads(pickle.dumps(failed_score)) == failed_score


def test_an_answer_that_cannot_be_verified_is_wrong_and_told():
    results = {"correctness": Verdict(False, "x", "timeout"), "own": FunctionResult(2.0)}
    settings = RewardConfig(rewards=["correctness", "own=m:f"], output_scaling=1.0)
    score = score_of(settings, results, **SHORT)
    assert (score.parts, score.reward, score.correct, score.verdict) == (
        (-1.0, 2.0),
        1.0,
        False,
        "timeout",
    )
    assert score.failures == (RewardFailure("correctness", "timeout", ""),)


def group(*parts: tuple[float | None, ...], reasons: str = "") -> ScoredGroup:
    """Scores whose rewards are the sums of the first part and twice the second.

    A part that is None is left out of the sum."""
    completion_scores = []
    for row in parts:
        failures = tuple(
            RewardFailure(f"r{k}", "error", "") for k, value in enumerate(row) if value is None
        )
        reward = sum(w * v for w, v in zip((1.0, 2.0), row, strict=True) if v is not None)
        completion_scores.append(Score(reward, True, "", "function", parts=row, failures=failures))
    kinds = ["length" if c == "l" else "stop" for c in reasons.ljust(len(parts))]
    return ScoredGroup(
        PROMPT, tuple(completion("", reason=kind) for kind in kinds), tuple(completion_scores)
    )


SUM = RewardConfig(rewards=["correctness", "own=m:f"], weights=[1.0, 2.0], output_scaling=1.0)


def test_in_a_sum_a_reward_that_failed_counts_as_the_mean_of_its_group():
    assert summed_rewards(group((1.0, 0.5), (0.0, None), (1.0, 1.0)), SUM) == pytest.approx(
        [2.0, 1.5, 3.0]
    )
    assert summed_rewards(group((None, 0.5), (None, 1.0)), SUM) == [1.0, 2.0]  # no value to take
    assert summed_rewards(group((1.0, 0.5), (0.0, 1.0)), SUM) == [2.0, 2.0]
    scaled = RewardConfig(rewards=SUM.rewards, weights=SUM.weights, output_scaling=10.0)
    assert summed_rewards(group((1.0, 0.5), (0.0, None)), scaled) == pytest.approx([2.0, 10.0])
    masked = RewardConfig(
        rewards=SUM.rewards, weights=SUM.weights, output_scaling=1.0, mask_no_eos_with_zero=True
    )
    assert summed_rewards(group((1.0, 0.5), (0.0, None), reasons=" l"), masked) == [2.0, 0.0]
    assert summed_rewards(group((1.0, 0.5), (0.0, None)), RewardConfig()) == [2.0, 0.0]


@pytest.mark.parametrize(
    ("right", "wanted"),
    [
        ([True, True, False], [1.0 - 0.5 * 2 / 3, 1.0 - 0.25 * 2 / 3, -1.0]),  # 2 of 3 are right
        ([False, False, False], [-1.0 - 0.5 / 3, -1.0 - 0.25 / 3, -1.0]),  # 1 / 3 at least
    ],
)
def test_length_costs_more_where_a_prompt_is_easy(right: list[bool], wanted: list[float]):
    scores = [Score(1.0 if is_right else -1.0, is_right, "", "number") for is_right in right]
    completions = [replace(completion(""), token_ids=[7] * n) for n in (1000, 500, 0)]
    scored = ScoredGroup(PROMPT, tuple(completions), tuple(scores))
    assert summed_rewards(scored, RewardConfig(length_penalty=0.5)) == pytest.approx(wanted)


def test_a_function_that_failed_on_every_completion_ends_the_step_by_its_name():
    def scored(*kinds: tuple[str, str]) -> list[Score]:
        return [
            Score(
                0.0,
                True,
                "",
                "string",
                parts=(1.0, None),
                failures=tuple(
                    RewardFailure(n, k, "KeyError: 'x'\n  mine.py") for n, k in [kind] if k
                ),
            )
            for kind in kinds
        ]

    with pytest.raises(
        RewardFunctionError,
        match=r"reward.rewards: own failed on all of 2 completions: KeyError: 'x'",
    ):
        raise_if_every_call_failed(scored(("own", "error"), ("own", "error")))
    for kinds in (
        [("own", "error"), ("own", "timeout")],
        [("own", "error"), ("own", "")],
        [("correctness", "error")] * 2,
        [("own", "error"), ("other", "error")],
    ):
        raise_if_every_call_failed(scored(*kinds))
    failure = first_function_failure(
        [ScoredGroup(PROMPT, (), tuple(scored(("a", "timeout"), ("own", "error"))))]
    )
    assert failure is not None and failure.startswith("  own: KeyError: 'x'")


def test_every_function_is_tried_before_the_start(module: str):
    listed = RewardConfig(
        rewards=["correctness", f"steps={module}:steps", f"own={module}:always_breaks"]
    )
    with pytest.raises(
        ValueError, match=r"reward.rewards: own=.*always_breaks fails on the first row"
    ):
        try_reward_function(listed, [PROMPT])


def test_the_length_reward_is_bounded_and_falls_with_every_token():
    settings = RewardConfig(rewards=["length", "format"])
    values = [
        score_of(settings, {"m": FunctionResult(1.0)}, **SHORT | {"length": n, "limit": 8}).parts[0]
        for n in (0, 1, 4, 8, 12)
    ]
    assert values == [1.0, 0.875, 0.5, 0.0, 0.0]
