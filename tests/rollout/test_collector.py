"""A rollout: engine, queue, reward workers and their scores, around a vLLM without a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from rlmath.algorithms.dynamic_sampling import Selection, choose_all
from rlmath.algorithms.types import (
    Completion,
    PartialCompletion,
    Prompt,
    Score,
    ScoredCompletion,
    ScoredGroup,
    Segment,
    scored_group,
)
from rlmath.config.schema import Config, RewardConfig, RolloutConfig, ToolsConfig
from rlmath.data.tool_formats import open_format
from rlmath.distributed.mesh import Mesh
from rlmath.rewards.reward_manager import (
    UNSCORED,
    RewardManager,
    RewardWorkers,
    open_reward_workers,
    open_scorer,
)
from rlmath.rollout.called_completions import CalledCompletions
from rlmath.rollout.collector import CollectGroups, Collector, Work
from rlmath.rollout.engine import Engine
from rlmath.rollout.sampling import (
    Key,
    RolloutSeed,
    SamplingSettings,
    group_requests,
    request_seed,
)
from rlmath.trainer.rollouts.synchronous import selection_rules
from rlmath.trainer.tool_metrics import tool_metrics
from rlmath.trainer.void_turns import void_rule
from rlmath.workers.hooks import Hook
from tests.disturbed_sandboxes import LosingSandboxes, open_light_sandboxes
from tests.reward_by_hash import hash_of
from tests.rollout.scripted_vllm import (
    PROMPT_IDS,
    TOKENIZER,
    logprob_of,
    scripted_engine,
    tokens_of,
)

pytestmark = pytest.mark.usefixtures("process_group")

SETTINGS = RolloutConfig(group_size=9, max_new_tokens=50, max_num_seqs=4, progress_bar=False)
SEED = RolloutSeed(7, 2)
MOST = 14
"""New tokens of a completion; one that begins with words is cut."""
SAMPLING = SamplingSettings(
    samples=3, temperature=0.7, top_p=0.9, min_new_tokens=2, max_new_tokens=MOST
)
PROMPTS = [
    Prompt(f"q-{n}", f"{n}+0=", PROMPT_IDS, (f"\\boxed{{{n % 3}}}",), task="math") for n in range(7)
]
OVERLONG = RewardConfig(overlong_buffer=6, overlong_penalty=1.0)
OF_GROUPS = RewardConfig(function="tests.reward_by_hash:of_group", function_takes="group")
MESH = Mesh(0, 1, 1, 1, engine_size=1)


def script(seed: int) -> list[int]:
    """One of three answers; behind words where the seed is odd."""
    words = "let me think about it: " if seed % 2 else ""
    return tokens_of(f"{words}\\boxed{{{seed % 3}}}")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine, _ = scripted_engine(
        monkeypatch, script, MESH, settings=SETTINGS, shapes={"norm.weight": (3, 1)}
    )
    engine.set_weight_version(5)
    return engine


@pytest.fixture(scope="module")
def verifier() -> Iterator[RewardWorkers]:
    with open_reward_workers(OVERLONG) as workers:
        yield workers


def collector_of(engine: Engine, reward: RewardConfig, pool: RewardWorkers) -> Collector:
    return Collector(engine, MESH, TOKENIZER, rollout=SETTINGS, reward=reward, pool=pool)


def test_groups_have_their_own_completions_and_scores_in_the_order_of_the_prompts(
    engine: Engine, verifier: RewardWorkers
) -> None:
    """Each token has the version and the step that sampled it, and the score the longest length."""
    collection = CollectGroups(PROMPTS, SAMPLING, SEED, "step 3")
    rollout = collector_of(engine, OVERLONG, verifier).collect(collection)
    assert [group.prompt for group in rollout.groups] == PROMPTS
    rewards = RewardManager(verifier, OVERLONG, MOST)
    for group in rollout.groups:
        for g, completion in enumerate(group.completions):
            seed = request_seed(7, 2, group.prompt.prompt_id, g)
            token_ids = script(seed)[:MOST]
            assert list(completion.token_ids) == token_ids and completion.sample_index == g
            positions = range(len(PROMPT_IDS), len(PROMPT_IDS) + len(token_ids))
            assert list(completion.logprobs) == [logprob_of(seed, at) for at in positions]
            assert completion.finish_reason == ("length" if seed % 2 else "stop")
            text_ids = token_ids if seed % 2 else token_ids[:-1]
            assert completion.text == TOKENIZER.decode(text_ids)
            assert completion.segments == (Segment(len(token_ids), 5, 2),)
            rewards.submit(group.prompt, completion)
    scores = [score for group in rollout.groups for score in group.scores]
    assert scores == rewards.collect()
    assert {score.correct for score in scores} == {True, False}
    (usage,) = rollout.engines
    assert usage.steps > 0 and 0 < usage.fill <= 1


def test_a_completion_that_is_continued_is_given_back_whole(
    engine: Engine, verifier: RewardWorkers
) -> None:
    """Sampled in two rounds or in one, it is the same; the version of its first tokens stays."""
    collector = collector_of(engine, OVERLONG, verifier)

    def sample(so_far: dict[Key, PartialCompletion], most: int | None) -> dict[Key, Completion]:
        rows = [
            [
                Work(
                    prompt,
                    replace(
                        request,
                        slice_tokens=most,
                        so_far=so_far.get(request.key, request.so_far),
                    ),
                )
                for request in requests
            ]
            for prompt, requests in zip(
                PROMPTS, group_requests(PROMPTS, SAMPLING, SEED), strict=True
            )
        ]
        sampled, _ = collector.sample(rows, MOST, step=2, title="")
        return {
            key: sample.completion if isinstance(sample, ScoredCompletion) else sample
            for key, sample in sampled.items()
        }

    whole = sample({}, None)
    begun = sample({}, 4)
    assert all(isinstance(part, PartialCompletion) for part in begun.values())
    engine.set_weight_version(6)
    continued = sample(begun, None)
    for key, completion in continued.items():
        assert list(completion.token_ids) == list(whole[key].token_ids)
        assert list(completion.logprobs) == list(whole[key].logprobs)
        assert completion.text == whole[key].text
        assert completion.segments == (
            Segment(4, 5, 2),
            Segment(len(completion.token_ids) - 4, 6, 2),
        )


@pytest.fixture(scope="module")
def hashing() -> Iterator[tuple[RewardWorkers, RewardWorkers]]:
    """Workers of a function of groups, and of a scorer by which every answer is wrong."""
    hook = Hook("scorer", "tests.reward_by_hash:wrong", "validation.scorer")
    with open_reward_workers(OF_GROUPS) as pool, open_scorer(hook, OF_GROUPS) as scorer:
        yield pool, scorer


@pytest.mark.parametrize("validates", [False, True])
def test_a_validation_is_scored_by_the_scorer_and_training_by_a_function_of_groups(
    engine: Engine, hashing: tuple[RewardWorkers, RewardWorkers], validates: bool
) -> None:
    pool, scorer = hashing
    collector = Collector(
        engine,
        MESH,
        TOKENIZER,
        rollout=SETTINGS,
        reward=OF_GROUPS,
        pool=pool,
        scorer=scorer,
        has_scorer=True,
    )
    sampling = replace(SAMPLING, samples=2)
    collection = CollectGroups(PROMPTS[:3], sampling, SEED, "", validates=validates)
    for group in collector.collect(collection).groups:
        by_hash = [
            hash_of(completion.text, group.prompt.solutions) for completion in group.completions
        ]
        assert group.rewards == pytest.approx([0.0, 0.0] if validates else by_hash)
        assert [score.verdict for score in group.scores] == ["function", "function"]


def test_a_function_of_groups_is_not_given_what_is_lost(
    engine: Engine, hashing: tuple[RewardWorkers, RewardWorkers]
) -> None:
    """It takes two completions; a third is lost, and so are all of another group."""
    collector = collector_of(engine, OF_GROUPS, hashing[0])
    completions = tuple(
        Completion(g, (7,), (-1.0,), text, finish_reason=reason, policy_version=0)
        for g, (text, reason) in enumerate([("a", "stop"), ("b", "lost"), ("c", "length")])
    )
    lost = Score(-1.0, False, "", "lost")
    some = ScoredGroup(PROMPTS[0], completions, (UNSCORED, lost, UNSCORED))
    none = ScoredGroup(PROMPTS[1], completions[1:2], (lost,))
    assert collector.score_groups([], MOST) == []
    scored, unscored = collector.score_groups([some, none], MOST)
    solutions = PROMPTS[0].solutions
    assert scored.rewards == pytest.approx([hash_of("a", solutions), -1.0, hash_of("c", solutions)])
    assert unscored == none


TOOLS = ToolsConfig(format="fence")
FORMAT = open_format(TOKENIZER, TOOLS)
CALL = "```python\n1\n```"
CALL_IDS = TOKENIZER(CALL, add_special_tokens=False)["input_ids"]
OUTPUT_TOKENS = len(FORMAT.outputs(CALL_IDS, FORMAT.calls_in(CALL_IDS), ["1\n"]).token_ids)


def calls_of(seed: int) -> int:
    """The calls of the completion of a seed."""
    return seed % 3


def calling_script(seed: int) -> list[int]:
    """Calls, with places for their outputs, and an answer."""
    answer = tokens_of("so \\boxed{1}")
    return [*(CALL_IDS + [0] * OUTPUT_TOKENS) * calls_of(seed), *answer]


@pytest.fixture
def losing_sandboxes() -> Iterator[LosingSandboxes]:
    with closing(LosingSandboxes(open_light_sandboxes(TOOLS))) as sandboxes:
        yield sandboxes


def test_lost_and_calling_completions_are_counted_where_a_user_looks(
    losing_sandboxes: LosingSandboxes,
    monkeypatch: pytest.MonkeyPatch,
    verifier: RewardWorkers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All first calls have a result, at the end of a slice; then a second call is lost.

    The console tells it beside those that called in the same round; the metrics count all."""
    engine, _ = scripted_engine(
        monkeypatch, calling_script, MESH, settings=SETTINGS, shapes={"norm.weight": (3, 1)}
    )
    engine.tools = CalledCompletions(TOOLS, FORMAT, losing_sandboxes)  # type: ignore[arg-type]
    collector = collector_of(engine, RewardConfig(), verifier)
    sampling = replace(SAMPLING, samples=5, max_new_tokens=99)
    rows = [
        [Work(prompt, replace(request, slice_tokens=len(CALL_IDS))) for request in requests]
        for prompt, requests in zip(PROMPTS, group_requests(PROMPTS, sampling, SEED), strict=True)
    ]
    begun, _ = collector.sample(rows, 99, step=2, title="")
    parts = {key: part for key, part in begun.items() if isinstance(part, PartialCompletion)}
    seeds = {work.request.key: work.request.seed for row in rows for work in row}
    twice = [key for key in parts if calls_of(seeds[key]) == 2]
    assert parts.keys() == {key for key, seed in seeds.items() if calls_of(seed)}
    assert "lost" not in caplog.text
    lost_row, lost_sample = twice[0]
    losing_sandboxes.losing.add(f"{lost_row}/{lost_sample}")
    further = [
        [
            Work(work.prompt, replace(work.request, so_far=parts[key], slice_tokens=None))
            for work in row
            if (key := work.request.key) in parts
        ]
        for row in rows
    ]
    ended, _ = collector.sample(further, 99, step=3, title="")
    assert f"1 of {len(twice)} completions with calls are lost" in caplog.text
    assert "killed from outside" in caplog.text and "They leave their groups" in caplog.text
    whole = begun | ended
    groups = [
        scored_group(prompt, [whole[row, g] for g in range(5)])  # type: ignore[misc]
        for row, prompt in enumerate(PROMPTS)
    ]
    config = Config(tools=TOOLS)
    selection = Selection(groups, choose_all(groups, selection_rules(config)), len(groups))
    metrics = tool_metrics(selection, void_rule(config), TOOLS)
    assert metrics["tools/completions_with_calls"] == len(parts) / len(seeds)
    assert metrics["tools/lost_completions"] == 1
    assert metrics["tools/status/lost"] == 1 / (len(parts) + len(twice))
    kept = [g for g in range(5) if g != lost_sample]
    assert list(selection.chosen[lost_row].samples) == kept
