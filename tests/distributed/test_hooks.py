"""Functions of the user's in a step: the same on all ranks, and what one that fails leaves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlmath.algorithms.types import ScoredGroup
from rlmath.data.micro_batches import forward_cost, training_cost
from tests.distributed import hook_cases
from tests.distributed.rank_pool import RankPool
from tests.selection import matrix
from tests.tiny_models import shape_of

pytestmark = pytest.mark.distributed

SOURCE = """
import os, pathlib, random
from rlmath import hooks

FAIL = pathlib.Path(__file__).with_name("fail")

@hooks.advantage("at_random")
def at_random(rewards, tokens):
    return [[random.SystemRandom().random() for _ in row] for row in rewards]

@hooks.advantage("wrong_shape")
def wrong_shape(rewards, tokens):
    return rewards[:1]

@hooks.advantage("per_token")
def per_token(rewards, tokens):
    if FAIL.exists():
        raise KeyError("no such column")
    return [[reward / count for reward, count in zip(*group)] for group in zip(rewards, tokens)]

@hooks.selection("longer")
def longer(group):
    return group.tokens[0] > 1 and group.row["level"] == 3 and group.texts[0] == "x" * group.tokens[0]

@hooks.selection("fails_on_three")
def fails_on_three(group):
    if group.tokens == [3]:
        os._exit(7)
    return group.rewards == [2.0]

@hooks.selection("even")
def even(group):
    return int(group.row["query_id"][1:]) % 2 == 0

@hooks.metric("fails")
def fails(groups):
    return groups[0].nothing

@hooks.metric("lengths")
def lengths(groups):
    return {"most": max(max(group.tokens) for group in groups), "groups": len(groups)}

@hooks.scorer("first_three")
def first_three(completion, solutions, row):
    return int(row["id"][1:]) < 3
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "step_functions.py").write_text(SOURCE)
    return folder


@matrix
def test_all_ranks_have_what_rank_0_computes(ranks: RankPool, place: Path) -> None:
    first, second = ranks.run(2, hook_cases.shared, f"{place}/step_functions.py")
    rank_dependent = {"metrics"}
    assert {key: first[key] for key in first.keys() - rank_dependent} == {
        key: second[key] for key in second.keys() - rank_dependent
    }
    first_call, second_call = first["random"]
    assert [len(row) for row in first_call] == [2, 1] and first_call != second_call
    assert first["kept"] == [False, True, True]
    assert first["metrics"] == [{"own/lengths/most": 3.0, "own/lengths/groups": 3.0}] * 2
    assert second["metrics"] == [{}, {}], "rank 0 alone logs them"
    assert first["wrong"].startswith(
        "algorithm.advantage wrong_shape failed: needed: lists of 2, 1 numbers, got 2; it "
        "returned [[1.0, 0.0]]"
    )
    assert (
        "selection.dynamic_sampling fails_on_three failed: its worker ended (exit code 7)"
        in first["fails"]
    )
    assert first["after"] == [False, True], "another worker is there for the next call"
    assert first["none"] == (None, None, {})


@pytest.fixture(scope="module")
def made(ranks: RankPool, untied_model: Path, place: Path) -> dict[str, Any]:
    return ranks.run(1, hook_cases.steps, untied_model, place, f"{place}/step_functions.py")[0]


def test_a_step_learns_with_the_advantages_of_the_groups_that_are_selected(
    made: dict[str, Any],
) -> None:
    """The function gets rewards less the length penalty.

    The penalty is 0.25 a token times the share of right ones, at least 1/3."""
    for record in (made["first"], made["again"]):
        learned = 0
        for group, row in zip(record.groups, record.advantages, strict=True):
            lengths = [len(completion.token_ids) for completion in group.completions]
            cost = 0.25 * max(sum(score.correct for score in group.scores), 1) / 3
            per_token = [
                (reward - cost * n) / n for reward, n in zip(group.rewards, lengths, strict=True)
            ]
            is_even = int(group.prompt.prompt_id[1:]) % 2 == 0
            is_learned = is_even and learned < 4
            learned += is_learned
            assert row == pytest.approx(per_token if is_learned else [0.0] * len(row))
        dropped = sum(int(group.prompt.prompt_id[1:]) % 2 for group in record.groups)
        assert record.metrics["selection/dropped/rule"] == dropped > 0
        assert record.metrics["selection/groups_learned"] == learned > 0
        assert record.metrics["own/lengths/groups"] == len(record.groups)
        lengths = [
            len(completion.token_ids) for group in record.groups for completion in group.completions
        ]
        assert record.metrics["own/lengths/most"] == max(lengths)
    assert made["left"] == [], "their workers end with the trainer"


def test_the_figures_of_a_step_are_those_of_what_was_sampled_and_of_what_is_learned_from(
    made: dict[str, Any], untied_model: Path
) -> None:
    """The selection drops groups: what is sampled has more tokens than what is learned from.

    Two epochs read the latter twice."""

    def read_tokens(groups: Sequence[ScoredGroup]) -> list[int]:
        return [
            len(group.prompt.token_ids) + len(completion.token_ids)
            for group in groups
            for completion in group.completions
        ]

    shape = shape_of(untied_model)
    forward = forward_cost(shape)
    trained = training_cost(shape)
    for record in (made["first"], made["again"]):
        metrics = record.metrics
        sampled = record.groups
        is_even = [int(group.prompt.prompt_id[1:]) % 2 == 0 for group in sampled]
        learned = list(itertools.compress(sampled, is_even))[:4]
        assert len(learned) < len(sampled)
        new_tokens = [len(c.token_ids) for group in sampled for c in group.completions]
        learned_tokens = [len(c.token_ids) for group in learned for c in group.completions]
        rewards = [reward for group in sampled for reward in group.rewards]
        rows = [row for row in record.advantages if any(row)]
        weighed = zip(itertools.chain.from_iterable(rows), learned_tokens, strict=True)
        expected = {
            "n_seqs": len(new_tokens),
            "n_tokens": sum(read_tokens(sampled)),
            "n_valid_tokens": sum(new_tokens),
            "avg_seq_len": sum(read_tokens(sampled)) / len(new_tokens),
            "avg_prompt_len": sum(len(group.prompt.token_ids) for group in sampled) / len(sampled),
            "rollout/response_length": sum(new_tokens) / len(new_tokens),
            "task_reward": sum(rewards) / len(rewards),
            "rollout/policy_version": 0 if record is made["first"] else 6,
            "selection/groups_sampled": len(sampled),
            "selection/extra_prompts": len(sampled) - 4,
            "advantage": sum(a * n for a, n in weighed) / sum(learned_tokens),
            "train/minibatches": 6,
            "train/teaching_groups": len(learned) / len(sampled),
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        paced = {
            "rollout": sum(new_tokens),
            "logprobs": sum(read_tokens(learned)),
            "update": 2 * sum(read_tokens(learned)),
            "step": sum(read_tokens(sampled)),
        }
        for phase, tokens in paced.items():
            rate = metrics[f"tokens_per_second/{phase}"]
            assert rate * metrics[f"seconds/{phase}"] == pytest.approx(tokens), phase
        per_second = metrics["tokens_per_second/learned"]
        assert per_second * metrics["seconds/step"] == pytest.approx(sum(learned_tokens))
        again = sum(2 * forward.of(len(group.prompt.token_ids)) for group in sampled)
        sampling = sum(map(forward.of, read_tokens(sampled))) - again
        training = 2 * sum(map(trained.of, read_tokens(learned)))
        flops = [
            metrics[f"{part}/mfu"] * metrics[f"seconds/{phase}"]
            for part, phase in (("rollout", "rollout"), ("train", "update"))
        ]
        assert flops[0] / flops[1] == pytest.approx(sampling / training)


def test_validation_counts_as_right_what_the_scorer_says(made: dict[str, Any]) -> None:
    assert made["first"].validation.metrics["validation/held/accuracy"] == 3 / 8
    assert made["first"].metrics["rollout/reward_positive"] != 3 / 8, "training has its own reward"


def test_an_advantage_that_fails_leaves_the_run_as_before_its_step(made: dict[str, Any]) -> None:
    assert made["failed"].startswith(
        "algorithm.advantage per_token failed: KeyError: 'no such column'"
    )
    assert made["after"] == made["before"]
