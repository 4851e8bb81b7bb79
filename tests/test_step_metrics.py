import pytest

from rlmath.policy.learner import MinibatchResult
from rlmath.step_metrics import mismatch_metrics, pace_metrics, rollout_metrics, update_metrics
from rlmath.types import Completion, Prompt, Sample, Score, ScoredGroup

RIGHT = Score(5.0, True, "2", "string", True, (("steps", 4.0),))
WRONG = Score(-5.0, False, "3", "number", True)
LATE = Score(-5.0, False, "", "timeout")
BROKEN = Score(-5.0, False, "", "error")
SILENT = Score(-5.0, False, "", "no_answer")


def group(prompt_tokens: int, *answers: tuple[int, str, Score]) -> ScoredGroup:
    """A group of (tokens, finish reason, score)."""
    completions = tuple(
        Completion(g, (9,) * tokens, (-1.0,) * tokens, "", reason)
        for g, (tokens, reason, _) in enumerate(answers)
    )
    prompt = Prompt("q", "?", (1,) * prompt_tokens, ("2",), "math")
    return ScoredGroup(prompt, completions, tuple(score for _, _, score in answers))


GROUPS = [
    group(3, (2, "stop", RIGHT), (4, "length", WRONG)),
    group(5, (6, "length", LATE), (8, "stop", BROKEN)),
    group(4, (10, "stop", RIGHT), (10, "stop", SILENT)),
]
SAMPLES = [
    Sample(g.prompt.token_ids, c.token_ids, c.logprobs, advantage)
    for g, advantages in zip(GROUPS, ([1.0, -1.0], [0.0, 0.0], [0.5, -1.5]), strict=True)
    for c, advantage in zip(g.completions, advantages, strict=True)
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task_reward", (2 * 5 - 4 * 5) / 6),
        ("rollout/rewards", (2 * 5 - 4 * 5) / 6),
        ("rollout/accuracy", 2 / 6),
        ("rollout/response_length", 40 / 6),
        ("rollout/groups_with_contrast", 2 / 3),
        ("reward/failures", 2 / 6),
        ("reward/correct", 2 / 6),
        ("reward/boxed", 3 / 6),
        ("reward/truncated", 2 / 6),
        ("reward/verdict/string", 2 / 6),
        ("reward/verdict/timeout", 1 / 6),
        ("reward/verdict/choice", 0.0),
        ("reward/own/steps", 4.0),
        ("avg_seq_len", (2 * (3 + 5 + 4) + 40) / 6),
        ("avg_prompt_len", 24 / 6),
        ("no_eos_ratio", 2 / 6),
        ("n_seqs", 6.0),
        ("n_tokens", 64.0),
        ("n_valid_tokens", 40.0),
        ("advantage", (2 * 1 - 4 * 1 + 10 * 0.5 - 10 * 1.5) / 40),
    ],
)
def test_rollout_metrics_by_hand(name: str, value: float):
    assert rollout_metrics(GROUPS, SAMPLES)[name] == pytest.approx(value)


def minibatch(tokens: float, scale: float, norm: float, lr: float, why: str | None = None) -> MinibatchResult:
    """A minibatch whose sums are `scale` times 1, 2, 3, ..."""
    names = ("loss", "surrogate", "ratio", "clipped", "approx_kl", "reference_kl", "entropy", "mismatch")
    sums = {name: scale * number for number, name in enumerate(names, start=1)}
    return MinibatchResult(sums | {"tokens": tokens}, {"mismatch_max": scale}, norm, lr, why)


RESULTS = [
    minibatch(10.0, 1.0, norm=0.5, lr=0.1),
    minibatch(30.0, 5.0, norm=9.0, lr=0.2, why="mean importance ratio 6 is above 5"),
    minibatch(20.0, 6.0, norm=1.5, lr=0.3),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # sums of 1 + 6 = 7 times the column's number, over 30 tokens: the second was discarded
        ("actor_loss", 7 / 30),
        ("importance_weight", 21 / 30),
        ("actor_clip_ratio", 28 / 30),
        ("ppo_approx_kl", 35 / 30),
        ("train/reference_kl", 42 / 30),
        ("train/entropy_loss", 49 / 30),
        ("kl_reward", -0.14),
        ("final_reward", 2.0 - 0.14),
        ("train/grad_norm", 1.0),
        ("train/learning_rate", 0.3),
        ("train/early_stopped_minibatches", 1.0),
        ("train/minibatches", 3.0),
    ],
)
def test_update_metrics_are_means_over_the_tokens_that_were_learned_from(name: str, value: float):
    assert update_metrics(RESULTS, kl_coef=0.1, task_reward=2.0)[name] == pytest.approx(value)


def test_a_step_whose_minibatches_were_all_discarded_has_no_gradient_norm():
    metrics = update_metrics([RESULTS[1]], kl_coef=0.0, task_reward=2.0)
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["train/early_stopped_minibatches"] == metrics["train/minibatches"] == 1.0


def test_the_mismatch_over_all_minibatches_and_over_the_first():
    assert mismatch_metrics(RESULTS, only_first=False) == {
        "train/behaviour_logprob_diff": pytest.approx(12 * 8 / 60),
        "train/behaviour_logprob_diff_max": 6.0,
    }
    assert mismatch_metrics(RESULTS, only_first=True) == {
        "train/behaviour_logprob_diff": pytest.approx(0.8),
        "train/behaviour_logprob_diff_max": 1.0,
    }


def test_the_rollout_is_paced_by_what_it_sampled_and_the_rest_by_what_they_read():
    seconds = {"sync": 0.5, "rollout": 2.0, "update": 4.0, "reference": 0.0, "step": 8.0}
    assert pace_metrics(seconds, n_tokens=100.0, n_valid_tokens=60.0) == {
        "seconds/sync": 0.5,
        "seconds/rollout": 2.0,
        "seconds/update": 4.0,
        "seconds/reference": 0.0,
        "seconds/step": 8.0,
        "tokens_per_second/rollout": 30.0,
        "tokens_per_second/update": 25.0,
        "tokens_per_second/step": 12.5,
    }
