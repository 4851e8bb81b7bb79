"""The CPU engine's sampler.

Noise that follows from seed and position draws from the exact distribution."""

# Shape legend: N draws, V vocabulary.

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rlmath.cli import make_tiny_model
from rlmath.rollout.engine import prepare_environment
from tests.programs import ENVIRONMENT, REPOSITORY
from tests.selection import matrix

prepare_environment("cpu")
from rlmath.rollout.cpu_worker import noise_seeds  # noqa: E402 - vLLM reads the environment when it is imported

SEEDS = 1_000
POSITIONS = 1_000
LOGITS_V = torch.linspace(-3.0, 2.0, 24)
REQUEST_SEEDS = {
    "from 0 on": np.arange(SEEDS, dtype=np.uint64),
    "63 bits": np.random.default_rng(5).integers(0, 2**63, SEEDS, dtype=np.uint64),
    "a multiple of the hash's step apart": np.arange(SEEDS, dtype=np.uint64)
    * np.uint64(0x9E3779B97F4A7C15),
}


def draws(seeds: np.ndarray, first_position: int) -> torch.Tensor:
    """A token for each seed and position [SEEDS, POSITIONS]."""
    positions = np.arange(first_position, first_position + POSITIONS)
    noise_N = noise_seeds(np.repeat(seeds, POSITIONS), np.tile(positions, len(seeds)))
    tokens_N = torch.ops._C.fused_gumbel_argmax(
        LOGITS_V.repeat(len(noise_N), 1), torch.from_numpy(noise_N)
    )
    return tokens_N.view(len(seeds), POSITIONS)


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The p-value of Pearson's chi-square test."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((counts.numel() - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic.double() / 2))


@pytest.mark.parametrize("name", REQUEST_SEEDS)
def test_a_million_draws_have_the_exact_distribution_alone_and_in_pairs(name: str) -> None:
    tokens = draws(REQUEST_SEEDS[name], 7)
    exact_V = LOGITS_V.double().softmax(-1)
    token_counts = torch.bincount(tokens.flatten(), minlength=len(exact_V))
    assert p_value(token_counts, tokens.numel() * exact_V) > 1e-4
    exact_VV = torch.outer(exact_V, exact_V).flatten()
    for first, second in (
        (tokens[:, 0::2], tokens[:, 1::2]),  # of one request, one after the other
        (tokens[0::2], tokens[1::2]),  # of two requests at the same position
        (tokens[:-1:2, :-1], tokens[1::2, 1:]),
    ):
        pairs = first.flatten() * len(exact_V) + second.flatten()
        counts = torch.bincount(pairs, minlength=len(exact_VV))
        assert p_value(counts, pairs.numel() * exact_VV) > 1e-4


def test_the_test_sees_a_distribution_that_is_a_little_off() -> None:
    tokens = draws(REQUEST_SEEDS["63 bits"], 7)
    other_V = (LOGITS_V.double() * 1.01).softmax(-1)
    assert (
        p_value(torch.bincount(tokens.flatten(), minlength=len(other_V)), tokens.numel() * other_V)
        < 1e-4
    )


@matrix
def test_all_tokens_of_an_engine_are_drawn_with_the_noise_of_their_seed_and_position(
    tmp_path: Path,
) -> None:
    """This holds for requests that were preempted, too.

    They are checked with transformers' logits, in a process of its own."""
    make_tiny_model.main(["--output", str(tmp_path / "model")])
    command = [sys.executable, "-m", "tests.rollout.sampled_tokens", str(tmp_path / "model")]
    process = subprocess.run(
        command, cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stderr[-4000:]
    counts = json.loads(process.stdout.splitlines()[-1])
    assert counts["tokens"] > 1_000 and counts["preemptions"] > 0 and counts["greedy"] > 100, counts
    assert counts["others"] <= 2, (
        f"ties of float32 apart, all tokens are the expected ones: {counts}"
    )
