"""A whole GRPO run on one rank: what the settings make of every part, what is asked of the engine in training and in
validation, and metrics by hand from what was sampled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlmath.algorithms.losses import Normalisation
from rlmath.algorithms.types import ScoredGroup
from rlmath.checkpoint.manager import Retention
from rlmath.models.logprobs import MinTokensMask
from rlmath.rollout.sampling import request_seed
from rlmath.run.divergence import RewardRule
from rlmath.run.recovery.save_schedule import Frequency
from tests.distributed import grpo_settings_cases as cases
from tests.distributed.rank_pool import RankPool

pytestmark = pytest.mark.distributed

STOP = 1
"""The tokenizer's end of sequence."""
STEPS = sum(cases.STEPS)
PER_STEP = cases.MINIBATCHES * cases.EPOCHS
UPDATES = STEPS * PER_STEP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grpo_settings")


@pytest.fixture(scope="module")
def found(ranks: RankPool, tied_model: Path, folder: Path) -> dict[str, Any]:
    return ranks.run(1, cases.whole_run, tied_model, folder)[0]


def test_every_part_is_built_as_the_settings_say(
    found: dict[str, Any], tied_model: Path, folder: Path
) -> None:
    min_tokens_mask = MinTokensMask((STOP,), 2)
    assert found["built"] == {
        "steps": [(0, 1), (1, 2)],
        "order": {"n_prompts": 9, "prompts_per_step": 3, "seed": 101, "shuffle": False},
        "updates": (cases.WARM_UP, 3 * 3 * 2),
        "engine": {
            "max_model_len": 13 + 28,
            "seed": 0,
            "logprobs_mode": "processed_logprobs",
            "enforce_eager": True,
            "dtype": "torch.float32",
            "max_num_seqs": 6,
            "max_num_batched_tokens": 70,
            "kv_cache_memory_bytes": 2**26,
            "tensor_parallel_size": 1,
        },
        "temperatures": (0.8, 0.8),
        "min_tokens_mask": (min_tokens_mask, min_tokens_mask),
        "offloaded": ("parameters", "reference"),
        "monitor": (4097 * 2**20, True),
        "reward": cases.settings(tied_model, folder).reward,
        "progress": (True, True),
        # The first stage's context, less one token for vLLM's own.
        "probe": [13 + 24 - 1] * 4,
        "probe_temperature": 1.0,
        # By length stage.
        "updaters": [(Normalisation("constant", 24), 90), (Normalisation("constant", 28), 130)],
    }


def test_when_it_diverges_and_which_steps_are_profiled(found: dict[str, Any], folder: Path) -> None:
    assert found["diverges"] == (8, RewardRule(drop=50.0, steps=11))
    profiles = {path.name.partition("-rank")[0] for path in (folder / "run" / "profile").iterdir()}
    assert profiles == {"step-000002"}
    assert found["watched"] == [record.metrics["task_reward"] for record in found["records"]]


def test_what_is_saved_and_what_stays(found: dict[str, Any]) -> None:
    assert found["keeps"] == Retention(keep_last=13, keep_models=14, judged_after=11, always=frozenset({98}))
    assert found["saves"] == (Frequency(None, 53, None), Frequency(None, 54, None))


def test_what_is_asked_for_in_training_and_validation(found: dict[str, Any]) -> None:
    training = {"samples": 4, "temperature": 0.8, "top_p": 0.99, "min_new_tokens": 2}
    validating = {"samples": 2, "temperature": 0.5, "top_p": 0.9, "min_new_tokens": 0, "max_new_tokens": 7}
    never = {"run_seed": 101, "step": -1}
    assert found["asked"]["collected"] == [
        (["t0", "t1", "t2"], training | {"max_new_tokens": 24}, {"run_seed": 101, "step": 0}, "step 1/3"),
        (["t3", "t4", "t5"], training | {"max_new_tokens": 28}, {"run_seed": 101, "step": 1}, "step 2/3"),
        (["v0", "v1", "v2"], validating, never, "validation held"),
        (["v3", "v4"], validating, never, "validation held"),
        (["t6", "t7", "t8"], training | {"max_new_tokens": 28}, {"run_seed": 101, "step": 2}, "step 3/3"),
        (["v0", "v1", "v2"], validating, never, "validation held"),
        (["v3", "v4"], validating, never, "validation held"),
    ]


def test_what_vllm_is_asked_for(found: dict[str, Any]) -> None:
    def wanted(name: str, n: int, g: int, step: int, most: int) -> tuple[Any, ...]:
        prompt = tuple(ord(one) - 32 + 3 for one in f"{n}+1=")
        how = {"temperature": 0.8, "top_p": 0.99, "top_k": 60, "max_tokens": most, "min_tokens": 2}
        if name == "v":
            how |= {"temperature": 0.5, "top_p": 0.9, "min_tokens": 0}
        return prompt, how | {"seed": request_seed(101, step, f"{name}{n}", g), "logprobs": 0}

    expected = [
        *(wanted("t", n, g, n // 3, 24 if n < 3 else 28) for n in range(9) for g in range(4)),
        *(wanted("v", n, g, -1, 7) for n in range(5) for g in range(2) for _ in range(2)),
    ]

    def key(one: tuple[Any, ...]) -> int:
        return one[1]["seed"]

    assert sorted(found["asked"]["vllm"], key=key) == sorted(expected, key=key)


def test_syncs_are_checked_and_probed_as_often_as_asked(found: dict[str, Any]) -> None:
    assert found["asked"]["checks"] == [True, False, True, False]
    assert found["asked"]["probes"] == [0, 3]
    probed = ["sync/probe_difference" in record.metrics for record in found["records"]]
    assert probed == [True, False, False]


def test_the_engine_knows_the_updates_of_its_weights_and_tells_of_waiting_for_scores(
    found: dict[str, Any],
) -> None:
    assert found["asked"]["versions"] == [PER_STEP * step for step in range(STEPS + 1)]
    assert found["asked"]["waiting"] == [True] * len(found["asked"]["collected"])


def test_minibatches_are_all_samples_once_an_epoch_and_others_each_step(found: dict[str, Any]) -> None:
    learned = found["asked"]["learned"]
    assert len(learned) == UPDATES == found["updates"]
    by_step = [learned[start : start + PER_STEP] for start in range(0, UPDATES, PER_STEP)]
    for number, step in enumerate(by_step):
        for epoch in (step[: cases.MINIBATCHES], step[cases.MINIBATCHES :]):
            assert sorted(index for one in epoch for index in one[0]) == list(range(12))
            assert [len(one[0]) for one in epoch] == [4, 4, 4]
        most = cases.STAGE_TOKENS[0 if number == 0 else 1]
        for _, weights, no_old, no_reference, on_policy in step:
            assert weights == [pytest.approx(1 / most)]
            assert (no_old, no_reference, on_policy) == (False, False, False)
    cuts = [tuple(sorted(tuple(one[0]) for one in step[: cases.MINIBATCHES])) for step in by_step]
    assert len(set(cuts)) == STEPS, "every step deals its samples anew"
    orders = [[one[0] for one in step] for step in by_step]
    assert any(order[: cases.MINIBATCHES] != order[cases.MINIBATCHES :] for order in orders)


def groups_of(found: dict[str, Any], step: int) -> list[ScoredGroup]:
    return found["records"][step].groups


@pytest.mark.parametrize("step", range(STEPS))
def test_metrics_of_a_rollout_by_hand(found: dict[str, Any], step: int) -> None:
    most = cases.STAGE_TOKENS[0 if step == 0 else 1]
    metrics, groups = found["records"][step].metrics, groups_of(found, step)
    completions = [one for group in groups for one in group.completions]
    lengths = [len(one.token_ids) for one in completions]
    ended = [one.token_ids[-1] == STOP for one in completions]
    assert [one.finish_reason for one in completions] == ["stop" if end else "length" for end in ended]
    assert all(end or length == most for end, length in zip(ended, lengths, strict=True))
    rewards = [-5.0 - 0.5 * max(0, length - (most - 10)) / 10 for length in lengths]
    assert [score.reward for group in groups for score in group.scores] == pytest.approx(rewards)
    versions = {one.policy_version for one in completions}
    assert versions == {step * PER_STEP}
    expected = {
        "n_seqs": 12.0,
        "n_valid_tokens": sum(lengths),
        "n_tokens": sum(lengths) + 12 * 4,
        "avg_prompt_len": 4.0,
        "avg_seq_len": sum(lengths) / 12 + 4,
        "rollout/response_length": sum(lengths) / 12,
        "no_eos_ratio": 1 - sum(ended) / 12,
        "reward/truncated": 1 - sum(ended) / 12,
        "rollout/policy_version": step * PER_STEP,
        "task_reward": sum(rewards) / 12,
        "rollout/rewards": sum(rewards) / 12,
        "rollout/accuracy": 0.0,
        "reward/correct": 0.0,
        "rollout/groups_with_contrast": sum(
            len({score.reward for score in group.scores}) > 1 for group in groups
        )
        / 3,
        "rollout/idle_share": 0.0,
        "rollout/idle_share_max": 0.0,
        "rollout/idle_share/engine_0": 0.0,
        "stage": 1.0 if step == 0 else 2.0,
        "rollout/max_new_tokens": most,
        "train/minibatches": PER_STEP,
        "train/early_stopped_minibatches": 0.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    verdicts = Counter(score.verdict for group in groups for score in group.scores)
    for kind, count in verdicts.items():
        assert metrics[f"reward/verdict/{kind}"] == pytest.approx(count / 12)


def test_some_completions_end_and_some_are_cut_off(found: dict[str, Any]) -> None:
    ratios = [record.metrics["no_eos_ratio"] for record in found["records"]]
    assert max(ratios) > 0 and min(ratios) < 1


def test_the_learning_rate_that_a_step_reports_is_that_of_its_last_update(found: dict[str, Any]) -> None:
    def rate(update: int) -> float:
        if update <= cases.WARM_UP:
            return cases.RATE * (update + 1) / (cases.WARM_UP + 1)
        left = (UPDATES - update) / (UPDATES - cases.WARM_UP)
        return cases.LEAST + (cases.RATE - cases.LEAST) * left

    expected = [rate((step + 1) * PER_STEP - 1) for step in range(STEPS)]
    reported = [record.metrics["train/learning_rate"] for record in found["records"]]
    assert reported == pytest.approx(expected, rel=1e-9)


def test_advantages_are_the_distance_from_the_mean_of_the_others(found: dict[str, Any]) -> None:
    for record in found["records"]:
        for group, row in zip(record.groups, record.advantages, strict=True):
            total = sum(group.rewards)
            assert row == pytest.approx([one - (total - one) / 3 for one in group.rewards], abs=1e-6)


def test_every_sample_is_learned_with_its_own_tokens_log_probs_and_advantage(found: dict[str, Any]) -> None:
    seen = Counter()
    for step, index, tokens, advantages, logprobs in found["asked"]["samples"]:
        record = found["records"][step]
        group, completion = record.groups[index // 4], record.groups[index // 4].completions[index % 4]
        assert tokens == [*group.prompt.token_ids, *completion.token_ids]
        assert logprobs == pytest.approx(list(completion.logprobs))
        assert advantages == pytest.approx(
            [record.advantages[index // 4][index % 4]] * len(logprobs), abs=1e-6
        )
        seen[step, index] += 1
    assert seen == {(step, index): cases.EPOCHS for step in range(STEPS) for index in range(12)}


def test_a_validation_belongs_to_the_weights_after_its_steps(found: dict[str, Any], folder: Path) -> None:
    assert [record.validation is None for record in found["records"]] == [True, True, False]
    measured = found["records"][2].validation
    assert measured.step == 2
    assert set(measured.metrics) == {
        "validation/held/accuracy",
        "validation/held/mean_tokens",
        "validation/held/truncated",
        "validation/accuracy",
        "validation/seconds",
    }
    assert measured.metrics["validation/accuracy"] == measured.metrics["validation/held/accuracy"]
    rows = [json.loads(line) for line in (folder / "run" / "validation.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 3]
    assert rows[0] == pytest.approx({"step": 2} | measured.metrics)


def test_what_the_run_writes_is_what_its_steps_returned(found: dict[str, Any], folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.pop("step") for row in rows] == [1, 2, 3]
    for row, record in zip(rows, found["records"], strict=True):
        assert {name: row[name] for name in record.metrics} == pytest.approx(record.metrics)
        assert row["memory_gib"] > 0 and "seconds/save" in row
    for step in range(STEPS):
        path = folder / "run" / "samples" / f"step-{step + 1:06d}.jsonl"
        assert len(path.read_text().splitlines()) == 2
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["completion_tokens"] == sum(row["n_valid_tokens"] for row in rows)
