"""A whole GRPO run on one rank: what the settings make of every part.

Observed is what the engine is asked for, in training and in validation, and what the learner is.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlmath.algorithms.losses import Normalisation
from rlmath.checkpoint.retention import Retention
from rlmath.checkpoint.save_schedule import Frequency
from rlmath.models.logprobs import MinTokensMask
from rlmath.rollout.sampling import request_seed
from rlmath.run.divergence import RewardRule
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
    assert found["keeps"] == Retention(
        keep_last=13, keep_models=14, judged_after=11, always=frozenset({98})
    )
    assert found["saves"] == (Frequency(None, 53, None), Frequency(None, 54, None))


def test_what_is_asked_for_in_training_and_validation(found: dict[str, Any]) -> None:
    training = {"samples": 4, "temperature": 0.8, "top_p": 0.99, "min_new_tokens": 2}
    validating = {
        "samples": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "min_new_tokens": 0,
        "max_new_tokens": 7,
    }
    never = {"run_seed": 101, "step": -1}
    assert found["asked"]["collected"] == [
        (
            ["t0", "t1", "t2"],
            training | {"max_new_tokens": 24},
            {"run_seed": 101, "step": 0},
            "step 1/3",
        ),
        (
            ["t3", "t4", "t5"],
            training | {"max_new_tokens": 28},
            {"run_seed": 101, "step": 1},
            "step 2/3",
        ),
        (["v0", "v1", "v2"], validating, never, "validation held"),
        (["v3", "v4"], validating, never, "validation held"),
        (
            ["t6", "t7", "t8"],
            training | {"max_new_tokens": 28},
            {"run_seed": 101, "step": 2},
            "step 3/3",
        ),
        (["v0", "v1", "v2"], validating, never, "validation held"),
        (["v3", "v4"], validating, never, "validation held"),
    ]


def test_what_vllm_is_asked_for(found: dict[str, Any]) -> None:
    def wanted(name: str, n: int, g: int, step: int, most: int) -> tuple[Any, ...]:
        prompt = tuple(ord(character) - 32 + 3 for character in f"{n}+1=")
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


def test_minibatches_are_all_samples_once_an_epoch_and_others_each_step(
    found: dict[str, Any],
) -> None:
    learned = found["asked"]["learned"]
    assert len(learned) == UPDATES == found["updates"]
    by_step = [learned[start : start + PER_STEP] for start in range(0, UPDATES, PER_STEP)]
    for number, step in enumerate(by_step):
        for epoch in (step[: cases.MINIBATCHES], step[cases.MINIBATCHES :]):
            assert sorted(index for minibatch in epoch for index in minibatch[0]) == list(range(12))
            assert [len(minibatch[0]) for minibatch in epoch] == [4, 4, 4]
        most = cases.STAGE_TOKENS[0 if number == 0 else 1]
        for _, weights, no_old, no_reference, on_policy in step:
            assert weights == [pytest.approx(1 / most)]
            assert (no_old, no_reference, on_policy) == (False, False, False)
    cuts = [
        tuple(sorted(tuple(minibatch[0]) for minibatch in step[: cases.MINIBATCHES]))
        for step in by_step
    ]
    assert len(set(cuts)) == STEPS, "every step deals its samples anew"
    orders = [[minibatch[0] for minibatch in step] for step in by_step]
    assert any(order[: cases.MINIBATCHES] != order[cases.MINIBATCHES :] for order in orders)


def test_every_sample_is_learned_with_its_own_tokens_log_probs_and_advantage(
    found: dict[str, Any],
) -> None:
    counts = Counter()
    for step, index, tokens, advantages, logprobs in found["asked"]["samples"]:
        record = found["records"][step]
        group = record.groups[index // 4]
        completion = record.groups[index // 4].completions[index % 4]
        assert tokens == [*group.prompt.token_ids, *completion.token_ids]
        assert logprobs == pytest.approx(list(completion.logprobs))
        assert advantages == pytest.approx(
            [record.advantages[index // 4][index % 4]] * len(logprobs), abs=1e-6
        )
        counts[step, index] += 1
    assert counts == {(step, index): cases.EPOCHS for step in range(STEPS) for index in range(12)}
