"""Asynchronous training: engines on ranks of their own, which sample while the others train."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlmath.config.schema import (
    AlgorithmConfig,
    DataConfig,
    LoraConfig,
    PolicyConfig,
    RewardConfig,
    RunConfig,
    SelectionConfig,
    StagesConfig,
    ToolsConfig,
    ValidationConfig,
)
from rlmath.data.tokenizer import completion_text, load_tokenizer
from tests.distributed import partial_rollout_cases as cases
from tests.distributed.async_cases import layout_of, run, with_engines
from tests.distributed.partial_rollout_cases import LONGEST, PER_STEP
from tests.distributed.rank_pool import RankPool
from tests.reward_by_hash import hash_of
from tests.selection import keeping, matrix
from tests.tool_models import make_script_model

pytestmark = pytest.mark.distributed

ADAPTERS = LoraConfig(rank=4, target="attention")


@pytest.fixture(scope="module")
def model(untied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases.uniform_model(untied_model, tmp_path_factory.mktemp("uniform") / "model")


def train(
    pool: RankPool, count: int, folder: Path, place: Path, steps: int, rollout: Any, **more: Any
) -> list[Any]:
    """The runs of the ranks that train, which are alike but for their samples' times."""
    runs = pool.run(count, run, folder, place, steps, rollout, more)
    return [rank_run for rank_run in runs if rank_run is not None]


def prompts_of(found: Any) -> list[str]:
    return [group.prompt.prompt_id for step in found.groups for group in step]


@matrix
@pytest.mark.parametrize(
    ("count", "engine", "layout"),
    [
        pytest.param(2, {"ranks": 1}, {}, id="1 + 1", marks=pytest.mark.full),
        pytest.param(2, {"ranks": 1}, {"lora": ADAPTERS}, id="1 + 1, LoRA"),
        pytest.param(
            3,
            {"ranks": 2, "tensor_parallel": 2},
            {"lora": ADAPTERS},
            id="1 + TP2, LoRA",
            marks=pytest.mark.full,
        ),
        pytest.param(3, {"ranks": 1}, {"tensor": 2}, id="TP2 + 1", marks=pytest.mark.full),
        pytest.param(
            4, {"ranks": 2, "tensor_parallel": 2}, {"pipeline": 2}, id="PP2 + TP2", marks=matrix
        ),
        pytest.param(4, {"ranks": 2}, {}, id="DP2 + 2 engines", marks=pytest.mark.full),
    ],
)
def test_engines_of_their_own_have_the_policys_weights_and_every_prompt_is_learned_once(
    ranks: RankPool,
    model: Path,
    tmp_path: Path,
    count: int,
    engine: dict[str, int],
    layout: dict[str, Any],
) -> None:
    steps = 6
    rollout = with_engines(**engine)
    history, *other_histories = train(
        ranks, count, model, tmp_path, steps, rollout, **layout_of(**layout)
    )
    sent = [metrics["sync/sent_gib"] for metrics in history.metrics]
    assert len(set(sent[1:])) == 1 and (
        sent[1] < sent[0] if "lora" in layout else sent[1] == sent[0]
    )
    assert all(other_history.groups == history.groups for other_history in other_histories)
    assert [len(groups) for groups in history.groups] == [PER_STEP] * steps
    assert set(Counter(prompts_of(history)).values()) == {1}
    assert history.in_flight[-1] == []
    for number, metrics in enumerate(history.metrics):
        assert metrics["sync/probe_difference_max"] <= 1e-5
        assert metrics["rollout/staleness_max"] <= min(number, rollout.max_staleness)
    assert (
        max(metrics["rollout/staleness_max"] for metrics in history.metrics) >= 1
    )  # they did not wait


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param(layout_of(lora=ADAPTERS), marks=pytest.mark.full)],
    ids=["full", "LoRA"],
)
def test_with_staleness_0_a_run_is_the_synchronous_one_bit_by_bit(
    ranks: RankPool, model: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    rollout = with_engines(max_staleness=0, on_new_weights="finish")
    (apart,) = train(ranks, 2, model, tmp_path, 2, rollout, **more)
    (together,) = train(ranks, 1, model, tmp_path, 2, with_engines(ranks=0), **more)
    assert apart.groups == together.groups
    trained = [
        name for name in together.metrics[0] if name.startswith(("train/", "actor", "advantage"))
    ]
    compared = [name for name in trained if name != "train/mfu"]
    assert len(compared) > 8
    for apart_metrics, together_metrics in zip(apart.metrics, together.metrics, strict=True):
        assert {name: apart_metrics[name] for name in compared} == {
            name: together_metrics[name] for name in compared
        }
    assert together.metrics[0]["train/grad_norm"] > 0
    if more:
        assert max(metrics["sync/probe_difference_max"] for metrics in apart.metrics) <= 1e-5


@matrix
@pytest.mark.parametrize("on_new_weights", keeping(["recompute", "keep"], "keep"))
def test_interrupted_completions_go_on_with_the_new_weights(
    ranks: RankPool, model: Path, tmp_path: Path, on_new_weights: str
) -> None:
    rollout = with_engines(on_new_weights=on_new_weights)
    (history,) = train(
        ranks, 2, model, tmp_path, 8, rollout, score=True, paced=True, snapshots=True
    )
    completions = [c for step in history.groups for group in step for c in group.completions]
    assert sum(segment.tokens for c in completions for segment in c.segments) == sum(
        len(c.token_ids) for c in completions
    )
    assert all(c.policy_version == c.segments[-1].policy_version for c in completions)
    tokenizer = load_tokenizer(str(model))
    for group in (group for step in history.groups for group in step):
        texts = [
            completion_text(tokenizer, c.token_ids, c.finish_reason == "stop")
            for c in group.completions
        ]
        assert [c.text for c in group.completions] == texts
        judged = [hash_of(text, group.prompt.solutions) for text in texts]
        assert group.rewards == pytest.approx(judged), "the whole text has the reward"
    later = [index for c in completions for index, _ in enumerate(c.segments)]
    assert sum(index > 0 for index in later) >= 3, "hardly any completion was interrupted"
    assert max(history.left[:-1]) > 0 and history.left[-1] == 0, (
        "a checkpoint would have what the engine samples"
    )
    largest: dict[bool, float] = {False: 0.0, True: 0.0}
    for index, (sampled, scored) in zip(later, history.scored, strict=True):
        difference = max(abs(a - b) for a, b in zip(sampled, scored, strict=True))
        largest[index > 0] = max(largest[index > 0], difference)
    assert largest[False] <= 1e-5
    if on_new_weights == "recompute":
        assert largest[True] <= 1e-5  # the new weights have read the whole prefix
    else:
        assert largest[True] > 1e-4  # the prefix is as the old ones read it


@matrix
def test_no_engine_begins_more_sequences_than_it_is_told(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    """Groups of two: where one of two places is free, nothing begins.

    Where no engine reports there is no figure."""
    (history,) = train(ranks, 2, model, tmp_path, 4, with_engines(max_concurrent_sequences=2))
    name = "rollout/sequences_running"
    running = [metrics[name] for metrics in history.metrics[1:] if name in metrics]
    assert running and 1 < max(running) <= 2


@pytest.mark.full
def test_dropped_groups_are_replaced(ranks: RankPool, model: Path, tmp_path: Path) -> None:
    """Half of the groups have no contrast: a hash rewards, rounded to right and wrong."""
    selection = SelectionConfig(dynamic_sampling="accuracy", max_extra_prompts=4)
    (history,) = train(ranks, 2, model, tmp_path, 8, with_engines(), selection=selection)
    for metrics in history.metrics:
        learned = metrics["selection/groups_learned"]
        sampled = metrics["selection/groups_sampled"]
        assert learned == PER_STEP or sampled == PER_STEP + 4
    assert sum(metrics["selection/extra_prompts"] for metrics in history.metrics) > 0
    assert set(Counter(prompts_of(history)).values()) == {1}


@matrix
def test_a_function_of_whole_groups_is_called_when_an_engine_has_all_of_a_group(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    """Snapshots for a checkpoint are taken meanwhile.

    A validation has groups of its own."""
    held_out = tmp_path / "held_out.jsonl"
    row = {"prompt": "1+1=", "solutions": ["2"], "query_id": "h", "task": "math"}
    held_out.write_text(json.dumps(row) + "\n")
    sections = {
        "reward": RewardConfig(function="tests.reward_by_hash:of_group", function_takes="group"),
        "validation": ValidationConfig(
            every_steps=2, paths=[str(held_out)], max_new_tokens=8, samples=2
        ),
    }
    (history,) = train(ranks, 2, model, tmp_path, 4, with_engines(), snapshots=True, **sections)
    groups = [group for step in history.groups for group in step]
    assert len(groups) == 4 * PER_STEP
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            assert score.reward == hash_of(completion.text, group.prompt.solutions)
            assert score.verdict == "function"
    assert [bool(metrics) for metrics in history.validated] == [True, False, True, False]
    assert sum(history.left) > 0, "snapshots had groups in flight"


PLUGIN = """
from rlmath import hooks

@hooks.reward("digits")
def digits(completion, solutions, row):
    return sum(one.isdigit() for one in completion) / 10

@hooks.scorer("even")
def even(completion, solutions, row):
    return len(completion) % 2 == 0
"""


@matrix
def test_engines_are_given_every_setting_of_training_and_of_validation(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    """The settings are the same as for engines of training ranks.

    They are rewards of weights 1 and 3, a scorer by its name in a plugin, two updates a step, two
    length stages, and lengths and a template of validation's own."""
    (tmp_path / "own.py").write_text(PLUGIN)
    held_out = tmp_path / "held_out.jsonl"
    rows = [
        {"prompt": f"{n}+1=", "solutions": [str(n + 1)], "query_id": f"h{n}", "task": "math"}
        for n in range(6)
    ]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {
        "run": RunConfig(
            output_dir=str(tmp_path / "run"),
            total_epochs=6,
            seed=7,
            device="cpu",
            plugins=[str(tmp_path / "own.py")],
        ),
        "reward": RewardConfig(rewards=["length", "digits"], weights=[1.0, 3.0], workers=1),
        "algorithm": replace(AlgorithmConfig(), n_minibatches=2, early_stop_ratio=None),
        "validation": ValidationConfig(
            every_steps=2,
            paths=[str(held_out)],
            max_new_tokens=8,
            samples=3,
            scorer="even",
            template="raw",
        ),
    }
    stages = StagesConfig(steps=[3, 3], max_new_tokens=[24, LONGEST])
    rollout = with_engines(max_new_tokens=LONGEST // 2)  # without effect beside those of the stages
    (apart,) = train(ranks, 2, model, tmp_path, 6, rollout, stages=stages, **sections)
    completions = [[c for group in step for c in group.completions] for step in apart.groups]
    lengths = [[len(c.token_ids) for c in step] for step in completions]
    assert max(map(max, lengths[:3])) == 24 < max(map(max, lengths[3:]))
    assert apart.in_flight[2] == [] != apart.in_flight[1]
    for limit, step in zip([24] * 3 + [LONGEST] * 3, apart.groups, strict=True):
        pairs = [
            pair for group in step for pair in zip(group.completions, group.scores, strict=True)
        ]
        for completion, score in pairs:
            length_reward = 1 - len(completion.token_ids) / limit
            digits_reward = sum(map(str.isdigit, completion.text)) / 10
            assert score.reward == pytest.approx(1 * length_reward + 3 * digits_reward)
    for segment in (
        segment for step in completions for completion in step for segment in completion.segments
    ):
        assert segment.policy_version == 2 * segment.step, "two updates a step"
    assert [bool(metrics) for metrics in apart.validated] == [True, False, True, False, True, False]
    (together,) = train(ranks, 1, model, tmp_path, 1, with_engines(ranks=0), **sections)
    apart_metrics = apart.validated[0]
    together_metrics = together.validated[0]
    assert 0 < apart_metrics["validation/held_out/accuracy"] < 1
    assert {k: v for k, v in apart_metrics.items() if "seconds" not in k} == {
        k: v for k, v in together_metrics.items() if "seconds" not in k
    }


# ---------------------------------------------------------------- calls of tools


@pytest.fixture(scope="module")
def script_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_script_model(tmp_path_factory.mktemp("script"))


def tool_sections(place: Path) -> dict[str, Any]:
    """Sections of a run whose completions follow the script, with calls."""
    rows = [
        {"prompt": f"{n}x7:", "solutions": ["42"], "query_id": f"q{n}", "task": "math"}
        for n in range(10, 10 + cases.PROMPTS)
    ]
    path = place / "calls.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data": DataConfig(
            train_path=str(path), template="raw", prompts_per_step=PER_STEP, max_prompt_tokens=8
        ),
        "policy": PolicyConfig(max_tokens_per_microbatch=512),
        "tools": ToolsConfig(
            format="fence", max_calls=3, max_output_tokens=64, cores=1, sessions=4
        ),
    }


@matrix
@pytest.mark.parametrize(
    ("count", "engine"),
    [
        pytest.param(2, {"ranks": 1}, id="1"),
        pytest.param(3, {"ranks": 2, "tensor_parallel": 2}, id="TP2"),
    ],
)
def test_with_staleness_0_a_run_with_calls_is_the_synchronous_one(
    ranks: RankPool, script_model: Path, tmp_path: Path, count: int, engine: dict[str, int]
) -> None:
    """Bit by bit on engines of one rank; those of two have the same tokens, by other sums."""
    rollout = with_engines(max_staleness=0, on_new_weights="finish", group_size=4, **engine)
    sections = tool_sections(tmp_path)
    (apart,) = train(ranks, count, script_model, tmp_path, 2, rollout, **sections)
    together_rollout = with_engines(ranks=0, group_size=4)
    (together,) = train(ranks, 1, script_model, tmp_path, 2, together_rollout, **sections)
    calls = [
        [call for group in step for done in group.completions for call in done.calls]
        for step in together.groups
    ]
    assert all(len(step) > PER_STEP for step in calls)
    assert {call.status for step in calls for call in step} >= {"ok", "error"}
    if count == 2:
        assert apart.groups == together.groups
        name = "train/grad_norm"
        assert [m[name] for m in apart.metrics] == [m[name] for m in together.metrics]
    assert texts_and_calls(apart) == texts_and_calls(together)
    for metrics in apart.metrics:
        assert metrics["tools/calls_per_completion"] > 0


def texts_and_calls(history: Any) -> list[Any]:
    return [
        (done.text, list(done.token_ids), done.calls, done.finish_reason)
        for step in history.groups
        for group in step
        for done in group.completions
    ]


@matrix
@pytest.mark.parametrize("on_new_weights", ["recompute", "keep"])
def test_completions_that_wait_for_calls_go_on_with_the_new_weights(
    ranks: RankPool, script_model: Path, tmp_path: Path, on_new_weights: str
) -> None:
    """With "recompute" the new weights have read all before what they sample, outputs included."""
    rollout = with_engines(on_new_weights=on_new_weights, group_size=4)
    sections = tool_sections(tmp_path)
    (history,) = train(
        ranks, 2, script_model, tmp_path, 6, rollout, score=True, snapshots=True, **sections
    )
    completions = [done for step in history.groups for group in step for done in group.completions]
    assert any(call.status == "ok" for done in completions for call in done.calls)
    behind_a_call = 0
    for done in completions:
        for before, segment in itertools.pairwise(done.segments):
            if not segment.sampled:
                assert (segment.policy_version, segment.step) == (
                    before.policy_version,
                    before.step,
                ), "an output stands under the version of the token before it"
            behind_a_call += segment.sampled and (
                not before.sampled and segment.policy_version > before.policy_version
            )
    assert behind_a_call, "no completion waited for a call while new weights came"
    assert len(prompts_of(history)) == len(set(prompts_of(history))) == 6 * PER_STEP
    if on_new_weights == "recompute":
        differences = [
            max(abs(a - b) for a, b in zip(sampled, scored, strict=True))
            for sampled, scored in history.scored
        ]
        assert max(differences) <= 1e-4
    shares = [row["tools/wait_share"] for row in history.metrics if "tools/wait_share" in row]
    assert shares and 0 < max(shares) <= 1
