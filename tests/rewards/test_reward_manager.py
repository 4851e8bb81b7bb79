"""The way from the settings to scores, as the rollout requests them."""

import threading
from dataclasses import replace
from typing import Literal

import pytest

from rlmath.algorithms.types import Completion, Prompt, RewardFailure, Score
from rlmath.config.schema import RewardConfig
from rlmath.rewards.reward_manager import (
    FailedSteps,
    RewardFunctionError,
    RewardManager,
    RewardWorkers,
    Trial,
    open_reward_workers,
    raise_if_every_call_failed,
    text_to_verify,
    try_reward_function,
)
from rlmath.rewards.several_rewards import MeasuredRows

LIMIT = 100


def prompt(text: str = "1+1=", more: str = "{}") -> Prompt:
    return Prompt("q1", text, (1,), ("\\boxed{2}",), "math", more)


def completion(text: str, tokens: int = 10, reason: str = "stop") -> Completion:
    return Completion(0, (5,) * tokens, (-1.0,) * tokens, text, reason, 0)


@pytest.fixture(scope="module")
def pool():
    with open_reward_workers(RewardConfig()) as workers:
        assert (
            workers.by_name["correctness"]
            .submit("\\boxed{\\sqrt{9}}", ("3",), "math")
            .result(60)
            .correct
        )  # the workers have started
        yield workers


def scores(pool: RewardWorkers, reward: RewardConfig, *asked: tuple[Prompt, Completion]):
    manager = RewardManager(pool, reward, LIMIT)
    for pair in asked:
        manager.submit(*pair)
    return manager.collect()


def test_scores_come_in_the_order_of_asking_and_once(pool):
    manager = RewardManager(pool, RewardConfig(), LIMIT)
    for text in ("\\boxed{\\sqrt{4}}", "\\boxed{3}", "2"):
        manager.submit(prompt(), completion(text))
    assert [(s.reward, s.correct, s.boxed, s.verdict) for s in manager.collect()] == [
        (5.0, True, True, "symbolic"),
        (-5.0, False, True, "number"),
        (-5.0, False, False, "no_answer"),
    ]
    assert manager.collect() == []


def test_scores_that_are_there_are_not_waited_for(tmp_path):
    """The second call goes on until then."""
    flag = tmp_path / "flag"
    (tmp_path / "own.py").write_text(
        "import os, time\n\ndef slow(completion, solutions, row):\n"
        f"    while 'wait' in completion and not os.path.exists({str(flag)!r}):\n"
        "        time.sleep(0.01)\n    return 1.0\n"
    )
    reward = RewardConfig(function=f"{tmp_path}/own.py:slow", workers=2, timeout_seconds=300.0)
    with open_reward_workers(reward) as workers:
        manager = RewardManager(workers, reward, 100)
        manager.submit(prompt(), completion("now"), "now")
        manager.wait()
        manager.submit(prompt(), completion("wait"), "wait")
        waiting = threading.Thread(target=manager.await_any, args=(600.0,))
        waiting.start()
        waiting.join(20)
        returned = not waiting.is_alive()
        flag.touch()
        manager.wait()
        waiting.join()
        assert returned
        assert [key for key, _ in manager.take_finished()] == ["now", "wait"]


def test_the_question_of_a_prompt_reaches_the_verifier(pool):
    question_prompt = replace(prompt(), question="How many apples are 1 and 1?")
    answers = (completion("\\boxed{2 apples}"), completion("\\boxed{2 pears}"))
    completion_scores = scores(
        pool,
        RewardConfig(),
        *((question_prompt, answer) for answer in answers),
        (prompt(), answers[0]),
    )
    assert [score.correct for score in completion_scores] == [True, False, False]
    assert question_prompt.row["question"] == "How many apples are 1 and 1?"
    assert prompt(more='{"question": "its own"}').row["question"] == "its own"


def test_schemes_and_lengths_reach_the_reward(pool):
    settings = RewardConfig(
        scheme="mix", format_penalty=-0.3, overlong_buffer=20, overlong_penalty=1.0
    )
    completion_scores = scores(
        pool,
        settings,
        (prompt(), completion("\\boxed{2}", 90)),
        (prompt(), completion("two", 100, "length")),
    )
    assert [score.reward for score in completion_scores] == [0.5, -1.3]
    masked = RewardConfig(mask_no_eos_with_zero=True)
    assert (
        scores(pool, masked, (prompt(), completion("\\boxed{2}", 100, "length")))[0].reward == 0.0
    )


def test_thoughts_that_the_prompt_opens_do_not_count(pool):
    opened = prompt("1+1=<think>\n")
    completion_scores = scores(
        pool,
        RewardConfig(),
        (opened, completion("it is \\boxed{2}")),
        (opened, completion("maybe \\boxed{3}</think> \\boxed{2}")),
        (prompt("<think></think>1+1="), completion("it is \\boxed{2}")),
    )
    assert [score.correct for score in completion_scores] == [False, True, True]
    assert [score.boxed for score in completion_scores] == [False, True, True]
    assert text_to_verify("<think>a</think>", "b") == "b"


def test_a_function_of_the_users_replaces_verifier_and_scheme(tmp_path, monkeypatch):
    (tmp_path / "rewards_of_mine.py").write_text(
        "def level(completion, solutions, row):\n    return row['level'] / len(completion), {'n': "
        "1}\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = RewardConfig(
        function="rewards_of_mine:level", function_failure=-2.0, output_bias=1.0
    )
    with open_reward_workers(settings) as workers:
        good_score, bad_score = scores(
            workers,
            settings,
            (prompt("1+1=<think>\n", more='{"level": 6}'), completion("abc")),
            (prompt(more='{"level": 6}'), completion("")),
        )
    assert (good_score.reward, good_score.verdict, good_score.metrics, good_score.correct) == (
        1.0,
        "function",
        (("n", 1.0),),
        True,
    )
    assert (bad_score.reward, bad_score.verdict) == (-3.0, "error")
    assert "ZeroDivisionError" in bad_score.extracted


TRIED = """
from rlmath import verify

def one_argument(completion):
    return 1.0

def no_such_column(completion, solutions, row):
    return row["levle"]

def odd(completion, solutions, row):
    if len(completion) % 2:
        raise ValueError("odd")
    return float("{2}" in completion)

def bonus(completion, solutions, row):
    return 0.5 + ("{2}" in completion)

def measured(completion, solutions, row):
    return bonus(completion, solutions, row), {"correct": "{2}" in completion}

def within_a_library(completion, solutions, row):
    return verify(completion, solutions).correct

def usual_forms(completion, solutions, row):
    thoughts, _, answer = completion.partition("</think>")
    inner = answer.split("<answer>")[1].split("</answer>")[0]
    return float("\\\\boxed{2}" in inner and completion.split("####")[1].strip() == solutions[0] and row["level"] == 6)
"""


def try_named(
    tmp_path, monkeypatch, name: str, takes: Literal["completion", "group"] = "completion"
) -> Trial:
    (tmp_path / "tried.py").write_text(TRIED)
    monkeypatch.chdir(tmp_path)
    settings = RewardConfig(function=f"tried.py:{name}", function_takes=takes, timeout_seconds=30.0)
    return try_reward_function(settings, [prompt(more='{"level": 6}')])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("one_argument", "TypeError: one_argument() takes 1 positional argument but 3 were given"),
        ("no_such_column", "KeyError: 'levle'\n    File \""),
    ],
)
def test_a_function_that_fails_on_a_row_is_refused_with_the_reason(
    tmp_path, monkeypatch, name, reason
):
    with pytest.raises(
        ValueError, match=rf"reward.function tried.py:{name} fails on the first row"
    ) as error:
        try_named(tmp_path, monkeypatch, name)
    assert reason in str(error.value) and "'q1'" in str(error.value)
    assert "function(completion: str, solutions: list[str], row: dict)" in str(error.value)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("odd", "error"), ("usual_forms", "0"), ("bonus", "0.5"), ("measured", "0.5")],
)
def test_a_function_that_works_on_some_text_is_not(tmp_path, monkeypatch, name, wrong):
    """What it pays is shown; a wrong answer that would count as right is warned of."""
    trial = try_named(tmp_path, monkeypatch, name)
    right = "1.5" if wrong == "0.5" else "1"
    assert trial.lines == (
        f"reward.function=tried.py:{name} is called with each completion; tried: a right answer "
        f"gets {right}, a wrong "
        f"one {wrong}",
    )
    assert len(trial.warnings) == (name == "bonus")
    if trial.warnings:
        assert trial.warnings[0].startswith(
            "reward.function pays 0.5 for a wrong answer that was made up: dynamic "
        )


def test_what_correctness_decides_is_not_warned_of(tmp_path, monkeypatch):
    (tmp_path / "tried.py").write_text(TRIED)
    monkeypatch.chdir(tmp_path)
    for names, warned in (
        (["format", "bonus=tried.py:bonus"], 1),
        (["correctness", "bonus=tried.py:bonus"], 0),
    ):
        trial = try_reward_function(RewardConfig(rewards=names), [prompt()])
        assert (len(trial.lines), len(trial.warnings)) == (1, warned)


def test_a_function_of_completions_that_is_given_groups_is_told_so_with_its_line(
    tmp_path, monkeypatch
):
    with pytest.raises(
        ValueError, match=r"It works so with reward\.function_takes: completion\. Set that"
    ) as error:
        try_named(tmp_path, monkeypatch, "within_a_library", takes="group")
    line = 1 + TRIED.splitlines().index("    return verify(completion, solutions).correct")
    assert f'tried.py", line {line}, in within_a_library' in str(error.value)


def test_without_a_function_nothing_is_tried():
    assert try_reward_function(RewardConfig(), [prompt()]) == Trial()


def test_a_function_gives_the_reward_and_the_verifier_the_accuracy(tmp_path, monkeypatch):
    """Every answer is paid, and one of two is right; the rows have a solution."""
    (tmp_path / "paid.py").write_text("def paid(completion, solutions, row):\n    return 0.1\n")
    monkeypatch.chdir(tmp_path)
    settings = RewardConfig(function="paid.py:paid", workers=1)
    pairs = [(prompt(), completion(f"\\boxed{{{answer}}}")) for answer in ("\\sqrt{4}", "3")]
    with open_reward_workers(settings, measured=MeasuredRows(training=True)) as workers:
        completion_scores = scores(workers, settings, *pairs)
        validated = RewardManager(workers, settings, LIMIT, validates=True)
        validated.submit(*pairs[0])
        (unmeasured,) = validated.collect()
    assert [
        (score.reward, score.correct, score.verified_correct) for score in completion_scores
    ] == [
        (0.1, True, True),
        (0.1, True, False),
    ]
    assert (unmeasured.reward, unmeasured.verified_correct) == (0.1, None)
    assert [score.verdict for score in completion_scores] == ["function", "function"]


GROUPS = """
import time

def ranks(completions, solutions, row):
    order = sorted(range(len(completions)), key=lambda g: len(completions[g]))
    return [(float(order.index(g)), {"size": len(completions)}) for g in range(len(completions))]

def few(completions, solutions, row):
    return [1.0] * (len(completions) - 1)

def not_a_number(completions, solutions, row):
    return [float("nan") if completion == "b" else 1.0 for completion in completions]

def one_number(completions, solutions, row):
    return 1.0

def by_text(completions, solutions, row):
    return {completion: 1.0 for completion in completions}

def slow(completions, solutions, row):
    time.sleep(60)

def memory(completions, solutions, row):
    return [len(bytearray(2**33)) for completion in completions]

def by_row(completions, solutions, row):
    return globals()[row["function"]](completions, solutions, row)
"""


def of_groups(folder, function: str, **settings: object) -> RewardConfig:
    (folder / "of_groups.py").write_text(GROUPS)
    return RewardConfig(
        function=f"{folder}/of_groups.py:{function}",
        function_takes="group",
        function_failure=-2.0,
        workers=1,
        **settings,
    )


@pytest.fixture(scope="module")
def workers_of_groups(tmp_path_factory):
    """Call the function that the prompt's row names."""
    reward = of_groups(tmp_path_factory.mktemp("of_groups"), "by_row", timeout_seconds=30.0)
    with open_reward_workers(reward, measured=MeasuredRows(training=True)) as workers:
        yield workers, reward


def group_scores(workers: RewardWorkers, reward: RewardConfig, function: str) -> list[Score]:
    manager = RewardManager(workers, reward, LIMIT)
    group = [
        completion(text, tokens) for text, tokens in (("aaa", 10), ("b", 100), ("\\boxed{2}", 10))
    ]
    manager.submit_group(prompt(more=f'{{"function": "{function}"}}'), group, key="g")
    manager.wait()
    ((key, completion_scores),) = manager.take_finished()
    assert key == "g" and len(completion_scores) == 3
    return completion_scores


def test_a_function_of_groups_is_called_once_with_all_completions(workers_of_groups):
    workers, reward = workers_of_groups
    completion_scores = group_scores(
        workers, replace(reward, output_bias=1.0, overlong_buffer=20), "ranks"
    )
    assert [score.reward for score in completion_scores] == [0.0, -2.0, 1.0], (
        "less the bias, and less 1 for 100 tokens"
    )
    assert [score.metrics for score in completion_scores] == [(("size", 3.0),)] * 3
    assert [(score.correct, score.verified_correct) for score in completion_scores] == [
        (True, False),
        (False, False),
        (True, True),
    ]


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (
            "few",
            "needed: 3 rewards, one for each completion of the group, got 2; it returned [1.0, "
            "1.0]",
        ),
        ("not_a_number", "the reward must be a number from -1e+30 to 1e+30"),
        ("one_number", "needed: a list of numbers, one for each completion, in their order"),
        ("by_text", "needed: a list of numbers, one for each completion, in their order"),
        ("memory", "MemoryError"),
    ],
)
def test_a_group_whose_call_fails_is_paid_as_completions_that_failed(
    workers_of_groups, function, told
):
    completion_scores = group_scores(*workers_of_groups, function)
    assert [(score.reward, score.verdict) for score in completion_scores] == [(-2.0, "error")] * 3
    assert all(score.extracted.startswith(told) for score in completion_scores), completion_scores[
        0
    ].extracted


def test_a_group_whose_call_is_late_is_paid_as_completions_that_are(tmp_path):
    reward = of_groups(tmp_path, "slow", timeout_seconds=1.0)
    with open_reward_workers(reward) as workers:
        completion_scores = group_scores(workers, reward, "slow")
    assert [(score.reward, score.verdict, score.extracted) for score in completion_scores] == [
        (-2.0, "timeout", "timeout")
    ] * 3


def test_several_rewards_may_be_functions_of_groups(tmp_path):
    (tmp_path / "of_groups.py").write_text(GROUPS)
    names = [
        "correctness",
        f"rank={tmp_path}/of_groups.py:ranks",
        f"few={tmp_path}/of_groups.py:few",
    ]
    reward = RewardConfig(
        rewards=names,
        weights=[1.0, 0.5, 3.0],
        function_takes="group",
        output_scaling=1.0,
        workers=1,
    )
    with open_reward_workers(reward) as workers:
        manager = RewardManager(workers, reward, LIMIT)
        manager.submit_group(prompt(), [completion("\\boxed{2}"), completion("3")])
        completion_scores = manager.collect()
    assert [score.parts for score in completion_scores] == [(1.0, 1.0, None), (-1.0, 0.0, None)]
    assert [score.reward for score in completion_scores] == [1.5, -1.0]
    assert [(failure.name, failure.kind) for failure in completion_scores[0].failures] == [
        ("few", "error")
    ]
    assert completion_scores[0].metrics == (("rank/size", 2.0),)


@pytest.mark.parametrize(
    ("name", "takes"), [("ranks", "completion"), ("few", "group"), ("one_number", "group")]
)
def test_a_function_that_takes_something_else_is_refused_before_the_start(tmp_path, name, takes):
    (tmp_path / "of_groups.py").write_text(GROUPS)
    settings = RewardConfig(function=f"{tmp_path}/of_groups.py:{name}", function_takes=takes)
    with pytest.raises(ValueError, match=r"fails on the first row of the training data") as error:
        try_reward_function(settings, [prompt()])
    needed_parameter = "completions: list[str]" if takes == "group" else "completion: str"
    assert needed_parameter in str(error.value)
    hint = "It works so with reward.function_takes: group. Set that"
    assert (hint in str(error.value)) == (name == "ranks")


def test_a_function_of_groups_that_works_starts(tmp_path):
    (tmp_path / "of_groups.py").write_text(GROUPS)
    settings = RewardConfig(function=f"{tmp_path}/of_groups.py:ranks", function_takes="group")
    (line,) = try_reward_function(settings, [prompt()]).lines
    assert ":ranks is called with all completions of a prompt; tried: a right answer gets " in line


def test_where_the_verifier_gives_the_reward_it_gives_the_accuracy(pool):
    completion_scores = scores(
        pool, RewardConfig(), *[(prompt(), completion(f"\\boxed{{{answer}}}")) for answer in (2, 3)]
    )
    assert [score.verified_correct for score in completion_scores] == [True, False]


def test_a_function_that_is_late_on_every_call_of_two_steps_ends_the_run():
    steps = FailedSteps(timeout_seconds=2.5)
    steps.check(scores_of("timeout", "timeout"))
    with pytest.raises(RewardFunctionError) as error:
        steps.check(scores_of("timeout", "error"))
    assert str(error.value) == (
        "reward.function failed on all completions of two steps in a row: on 1 of 2 it took more "
        "than "
        "reward.timeout_seconds=2.5. Nothing is learned from such a step. Make it faster, or raise "
        "reward.timeout_seconds."
    )


def test_one_call_that_works_between_them_lets_a_run_go_on():
    steps = FailedSteps(timeout_seconds=2.5)
    for kinds in (
        ("timeout", "timeout"),
        ("timeout", "function"),
        ("timeout", "timeout"),
        ("function", "error"),
    ):
        steps.check(scores_of(*kinds))


def test_each_of_several_functions_is_looked_at_by_itself():
    def step(**kinds: str) -> list[Score]:
        failures = tuple(RewardFailure(name, kind, "") for name, kind in kinds.items())
        return [Score(1.0, True, "", "string", parts=(1.0, None), failures=failures)] * 2

    steps = FailedSteps(timeout_seconds=1.0)
    for kinds in (
        {"slow": "timeout"},
        {"other": "timeout"},
        {"correctness": "timeout"},
        {"correctness": "timeout"},
    ):
        steps.check(step(**kinds))
    steps.check(step(slow="timeout"))
    with pytest.raises(
        RewardFunctionError, match=r"^reward.rewards: slow failed on all completions of two steps"
    ):
        steps.check(step(slow="timeout", correctness="timeout"))


def scores_of(*kinds: str) -> list[Score]:
    extracted = {
        "error": "KeyError: 'x'\n  File \"mine.py\", line 2, in reward\x1b[2J",
        "timeout": "timeout",
    }
    return [Score(0.0, False, extracted.get(kind, ""), kind) for kind in kinds]


def test_a_step_of_which_every_call_failed_has_no_rewards():
    with pytest.raises(
        RewardFunctionError, match=r"failed on all of 2 completions: KeyError: 'x'\n"
    ) as error:
        raise_if_every_call_failed(scores_of("error", "error"))
    assert str(error.value).endswith("in reward\\x1b[2J")
    for kinds in (("error", "timeout"), ("timeout", "timeout"), ("error", "function"), ()):
        raise_if_every_call_failed(scores_of(*kinds))
