from rlmath.rewards.schemes import correctness, score
from rlmath.rewards.verify import Verdict
from rlmath.types import Score

RIGHT = Verdict(True, "1/2", "symbolic")


def test_right_is_plus_five_and_all_else_minus_five():
    assert correctness(RIGHT) == 5.0
    for verdict in ("number", "no_answer", "too_long", "timeout", "error"):
        assert correctness(Verdict(False, "", verdict)) == -5.0


def test_the_two_rewards_can_be_chosen():
    assert correctness(RIGHT, correct=1.0, wrong=0.0) == 1.0
    assert correctness(Verdict(False, "", "timeout"), correct=1.0, wrong=0.0) == 0.0


def test_a_score_carries_the_verdict():
    assert score(RIGHT) == Score(reward=5.0, correct=True, extracted="1/2", verdict="symbolic")
    assert score(Verdict(False, "", "no_answer"), 1.0, -1.0) == Score(-1.0, False, "", "no_answer")
