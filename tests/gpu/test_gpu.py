"""The GPU path: bfloat16, nccl, vLLM's sleep mode. Skips itself without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import engine_cases, oracle, policy_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.tiny_models import make_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BF16_NATS = 0.05
"""Most by which log-probs in bfloat16 may differ from those in float32 (nats)."""


def test_logprobs_in_bfloat16_are_close_to_transformers(ranks: RankPool, untied_model: Path) -> None:
    samples = make_samples(24)
    (found,) = ranks.run(1, policy_cases.logprobs, untied_model, Case(device="cuda"), samples)
    model = oracle.load(untied_model)
    with torch.no_grad():
        for index, sample in enumerate(samples):
            wanted = oracle.completion_logprobs(model, sample)
            torch.testing.assert_close(torch.tensor(found[index]), wanted, atol=BF16_NATS, rtol=0)


def test_the_engine_follows_the_policy_through_sleep_and_updates(ranks: RankPool, untied_model: Path) -> None:
    case = Case(device="cuda", optimizer="adam")
    (largest,) = ranks.run(1, engine_cases.mismatch_after_updates, untied_model, case, 1, 3)
    assert len(largest) == 4 and max(largest) < BF16_NATS


def test_a_discarded_minibatch_leaves_every_bit_on_the_gpu(ranks: RankPool, untied_model: Path) -> None:
    case = Case(device="cuda", optimizer="adam", early_stop_ratio=5.0, max_tokens=64)
    (report,) = ranks.run(1, policy_cases.discard, untied_model, case, make_samples(16, seed=4), "runaway")
    assert report["same"] and report["goes_on"]
