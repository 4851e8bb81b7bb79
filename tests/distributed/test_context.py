"""Context-parallel ranks against transformers.

A stand-in takes the place of Transformer Engine's attention (see `context_cases`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed import context_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parity import SAMPLES, check_gradients, check_logprobs, check_update
from tests.selection import matrix

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

CONTEXT = Case(context=2, max_tokens=64)


@matrix
def test_logprobs_equal_those_of_transformers(ranks: RankPool, untied_model: Path) -> None:
    check_logprobs(ranks, untied_model, CONTEXT, SAMPLES, context_cases)


@matrix
def test_gradients_equal_those_of_transformers(
    ranks: RankPool, untied_model: Path, tied_model: Path
) -> None:
    check_gradients(ranks, untied_model, CONTEXT, context_cases)
    check_gradients(ranks, tied_model, CONTEXT, context_cases)


@matrix
def test_one_update_equals_that_of_torch(ranks: RankPool, untied_model: Path) -> None:
    check_update(ranks, untied_model, replace(CONTEXT, kl_coef=0.3), 1e-5, context_cases)
    check_update(ranks, untied_model, replace(CONTEXT, optimizer="adam"), 1e-3, context_cases)
