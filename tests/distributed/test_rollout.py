"""Rollouts by engines that draw their work.

The result is the same whoever drew what, and nothing is left behind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlmath.algorithms.types import Segment
from rlmath.data.tokenizer import completion_text, load_tokenizer
from tests.distributed import rollout_cases
from tests.distributed.rank_pool import RankPool
from tests.distributed.rollout_cases import PROMPTS, ROLLOUT, SEEDS, SLICE
from tests.reward_by_hash import hash_of
from tests.selection import matrix

pytestmark = pytest.mark.distributed
COUNTS = [9, 1, 0, 9]
"""Prompts of the rollouts; fewer than engines, and none, as dynamic sampling may have it."""


class Collected:
    """What the ranks report of an engine or several, each number of them run once."""

    def __init__(self, ranks: RankPool, model: Path) -> None:
        self._ranks = ranks
        self._model = model
        self._reports: dict[tuple[int, int], list[dict]] = {}

    def by(self, engines: int, engine_size: int = 1) -> list[dict]:
        key = engines, engine_size
        if key not in self._reports:
            world_size = engines * engine_size
            self._reports[key] = self._ranks.run(
                world_size, rollout_cases.collected, self._model, engine_size, COUNTS
            )
        return self._reports[key]


@pytest.fixture(scope="module")
def collected(ranks: RankPool, untied_model: Path) -> Collected:
    return Collected(ranks, untied_model)


@pytest.fixture(scope="module")
def alone(collected: Collected) -> dict:
    return collected.by(1)[0]


def test_groups_are_whole_and_in_the_order_of_the_prompts(alone: dict) -> None:
    for count, groups in zip(COUNTS, alone["groups"], strict=True):
        assert [group.prompt for group in groups] == PROMPTS[:count]
        for group in groups:
            assert [c.sample_index for c in group.completions] == list(range(ROLLOUT.group_size))
            assert {c.policy_version for c in group.completions} == {3}
            assert all(c.segments == (Segment(len(c.token_ids), 3, 0),) for c in group.completions)
            assert len(group.scores) == ROLLOUT.group_size
    first, *_, repeated = alone["groups"]
    assert first == repeated
    lengths = [len(c.token_ids) for group in first for c in group.completions]
    assert min(lengths) < max(lengths)


@pytest.mark.parametrize("engines", [2, pytest.param(4, marks=pytest.mark.full)])
def test_what_is_collected_does_not_depend_on_who_drew_it(
    collected: Collected, alone: dict, engines: int
) -> None:
    for report in collected.by(engines):
        assert report["groups"] == alone["groups"] and report["hashed"] == alone["hashed"]
        assert [len(usages) for usages in report["engines"]] == [engines] * len(COUNTS)
        assert report["new_keys"] == 0


@pytest.mark.parametrize(
    ("engines", "engine_size"), [(1, 1), (2, 1), pytest.param(1, 2, marks=matrix)]
)
def test_every_completion_has_its_own_reward_and_its_own_prompts_solutions(
    collected: Collected, untied_model: Path, engines: int, engine_size: int
) -> None:
    """The reward is a hash of the text and of the solutions that it was scored against."""
    tokenizer = load_tokenizer(str(untied_model))
    groups_by_seed = collected.by(engines, engine_size)[-1]["hashed"]
    assert groups_by_seed.keys() == SEEDS.keys()
    rewards = set()
    for groups in groups_by_seed.values():
        assert [group.prompt for group in groups] == PROMPTS
        for group, prompt in zip(groups, PROMPTS, strict=True):
            for completion, score in zip(group.completions, group.scores, strict=True):
                text = completion_text(
                    tokenizer, completion.token_ids, completion.finish_reason == "stop"
                )
                assert completion.text == text
                assert score.reward == hash_of(text, prompt.solutions)
                assert score.metrics == (("row", hash_of(prompt.prompt_id, prompt.solutions)),)
                assert (score.verdict, score.correct) == ("function", score.reward > 0)
                rewards.add(score.reward)
    assert len(rewards) > 3 * len(PROMPTS) * ROLLOUT.group_size * 0.9, (
        "else a mix-up would not be seen"
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("engine_size", [1, pytest.param(2, marks=matrix)], ids=["TP1", "TP2"])
def test_a_completion_in_slices_is_the_whole_one(
    collected: Collected, engine_size: int, temperature: float
) -> None:
    for report in collected.by(1, engine_size):
        whole, slices = report["slices"][temperature]
        assert len(whole) == len(PROMPTS) and whole.keys() == slices.keys()
        for key, (tokens, logprobs) in whole.items():
            assert slices[key][0] == tokens
            assert slices[key][1] == pytest.approx(logprobs, abs=1e-5)
        assert sum(len(tokens) > 2 * SLICE for tokens, _ in whole.values()) > len(PROMPTS) / 3
        assert len({tuple(tokens) for tokens, _ in whole.values()}) > len(PROMPTS) / 2


@pytest.mark.parametrize("engine_size", [1, pytest.param(2, marks=matrix)])
def test_completions_go_on_where_they_were_interrupted(
    collected: Collected, untied_model: Path, engine_size: int
) -> None:
    """Weights come twice: while the completions go on, and while they are interrupted."""
    tokenizer = load_tokenizer(str(untied_model))
    reports = collected.by(1, engine_size)
    for rank, report in enumerate(reports):
        interrupted = report["interrupted"]
        assert interrupted.ended.keys() == interrupted.whole.keys() and interrupted.left == 0
        assert interrupted.scored == (interrupted.ended if rank == 0 else {})
        tokens = {key: list(completion.token_ids) for key, completion in interrupted.ended.items()}
        assert tokens == {
            key: list(completion.token_ids) for key, completion in interrupted.whole.items()
        }
        assert interrupted.usage.new_tokens == sum(map(len, tokens.values()))
        assert interrupted.usage.steps == max(map(len, tokens.values()))
        assert (
            interrupted.held == {key: 7 for key in tokens if len(tokens[key]) > 7}
            and len(interrupted.held) > 1
        )
        for key, completion in interrupted.ended.items():
            length = len(tokens[key])
            stopped = tokens[key][-1] == tokenizer.eos_token_id
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert stopped or length == ROLLOUT.max_new_tokens
            whole = [Segment(4, 3, 0), Segment(3, 4, 1), Segment(length - 7, 5, 2)]
            assert length <= 7 or completion.segments == tuple(whole)
            assert completion.policy_version == completion.segments[-1].policy_version
            assert completion.logprobs == pytest.approx(interrupted.whole[key].logprobs, abs=1e-5)
            text = completion_text(tokenizer, tokens[key], stopped)
            assert completion.text == (text if rank == 0 else "")
        assert interrupted.given_up == "vLLM ended a completion with 'abort', unfinished"


@matrix
@pytest.mark.parametrize(
    ("ranks_in_all", "engine_size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)]
)
def test_the_ranks_of_an_engine_draw_alike(
    collected: Collected, ranks_in_all: int, engine_size: int
) -> None:
    reports = collected.by(ranks_in_all // engine_size, engine_size)
    assert all(report["groups"] == reports[0]["groups"] for report in reports)
    assert reports[0]["groups"][0] == reports[0]["groups"][3]
    assert all(report["new_keys"] == 0 for report in reports)
