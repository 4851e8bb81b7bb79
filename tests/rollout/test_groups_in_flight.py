"""Groups of an engine between their first completion and their last score, with real workers."""

from __future__ import annotations

from pathlib import Path

from rlmath.algorithms.types import (
    NOTHING_SAMPLED,
    Completion,
    FinishReason,
    PartialCompletion,
    Prompt,
)
from rlmath.config.schema import RewardConfig
from rlmath.rewards.reward_manager import open_reward_workers
from rlmath.rollout.engine_messages import GroupDone
from rlmath.rollout.groups_in_flight import GroupsInFlight
from rlmath.rollout.sampling import Request

PROMPT = Prompt("q1", "1+1=", (1,), ("\\boxed{2}",), "math")
GROUP_REWARD = """
def most_different(completions, solutions, row):
    return [float(len(set(completions)))] * len(completions)
"""


def completion(index: int, text: str, reason: FinishReason = "stop") -> Completion:
    return Completion(index, (7,), (-0.5,), text, reason, policy_version=0)


def request(draw: int, index: int, so_far: PartialCompletion = NOTHING_SAMPLED) -> Request:
    return Request(
        (draw, index), (1,), seed=index, min_new_tokens=0, max_new_tokens=9, so_far=so_far
    )


def test_a_group_is_reported_once_when_all_its_completions_have_a_score() -> None:
    done: list[GroupDone] = []
    with open_reward_workers(RewardConfig()) as workers:
        groups = GroupsInFlight(workers, RewardConfig(), on_done=done.append)
        groups.expect_lengths(9)
        groups.add(4, PROMPT, [NOTHING_SAMPLED, NOTHING_SAMPLED])
        groups.add(5, PROMPT, [NOTHING_SAMPLED])
        groups.score(request(4, 1), completion(1, "\\boxed{2}"))
        partly = PartialCompletion((7,), (-0.5,))
        snapshot = groups.snapshot([request(4, 0, partly), request(5, 0)])
        assert snapshot[4][0] == partly and snapshot[4][1].score.correct
        assert snapshot[5] == (NOTHING_SAMPLED,) and done == []
        groups.score(request(4, 0), completion(0, "\\boxed{3}"))
        groups.finish_scored(wait=True)
        assert groups.queued_scores == 0 and list(groups) == [5]
    (report,) = done
    assert report.draw == 4 and [sample.score.correct for sample in report.samples] == [False, True]


def test_other_lengths_wait_for_the_scores_of_the_earlier_ones() -> None:
    done: list[GroupDone] = []
    reward = RewardConfig(overlong_buffer=4, overlong_penalty=1.0)
    with open_reward_workers(reward) as workers:
        groups = GroupsInFlight(workers, reward, on_done=done.append)
        for draw, most in enumerate((1, 4)):
            groups.expect_lengths(most)
            groups.add(draw, PROMPT, [NOTHING_SAMPLED])
            groups.score(request(draw, 0), completion(0, "\\boxed{2}"))
        assert [report.draw for report in done] == [0]
        groups.finish_scored(wait=True)
    short, long = (report.samples[0].score.reward for report in done)
    assert short < long  # a token is all of the first limit and a quarter of the second


def test_a_function_of_groups_gets_a_group_that_is_sampled_whole(tmp_path: Path) -> None:
    (tmp_path / "group_reward.py").write_text(GROUP_REWARD, encoding="utf-8")
    reward = RewardConfig(
        function=f"{tmp_path}/group_reward.py:most_different", function_takes="group"
    )
    done: list[GroupDone] = []
    with open_reward_workers(reward) as workers:
        groups = GroupsInFlight(workers, reward, on_done=done.append)
        groups.expect_lengths(9)
        groups.add(0, PROMPT, [NOTHING_SAMPLED, NOTHING_SAMPLED])
        groups.score(request(0, 0), completion(0, "a"))
        assert groups.queued_scores == 0
        groups.score(request(0, 1), completion(1, "b"))
        assert groups.queued_scores == 2
        groups.finish_scored(wait=True)
    assert [sample.score.reward for sample in done[0].samples] == [2.0, 2.0]


def test_a_function_of_groups_is_not_given_what_is_lost(tmp_path: Path) -> None:
    """A group of which nothing is left is done at once."""
    (tmp_path / "group_reward.py").write_text(GROUP_REWARD, encoding="utf-8")
    reward = RewardConfig(
        function=f"{tmp_path}/group_reward.py:most_different", function_takes="group"
    )
    done: list[GroupDone] = []
    with open_reward_workers(reward) as workers:
        groups = GroupsInFlight(workers, reward, on_done=done.append)
        groups.expect_lengths(9)
        groups.add(0, PROMPT, [NOTHING_SAMPLED] * 3)
        groups.add(1, PROMPT, [NOTHING_SAMPLED])
        groups.score(request(0, 2), completion(2, "b"))
        groups.score(request(0, 0), completion(0, "c", "lost"))
        groups.score(request(0, 1), completion(1, "a"))
        groups.score(request(1, 0), completion(0, "c", "lost"))
        assert [group.draw for group in done] == [1]
        groups.finish_scored(wait=True)
        assert list(groups) == []
    assert [group.draw for group in done] == [1, 0]
    rewards = [sample.score.reward for sample in done[1].samples if not sample.completion.is_lost]
    assert rewards == [2.0, 2.0]
