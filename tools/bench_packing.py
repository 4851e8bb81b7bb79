"""How well samples are packed into micro-batches and spread over ranks, against padding and first-fit.

    python tools/bench_packing.py [--quick]

Prints figures (tools/figures.py), each that of the worst minibatch of all draws:

- microbatches_over_bound: micro-batches per rank, divided by ceil(tokens / budget / ranks);
- flops_imbalance: (most - least) / mean of the ranks' FLOPs, forward and backward pass of DeepSeek-R1-Distill-Qwen-1.5B
  (for the ratio at least 0.01 percent);
- computed_per_token: tokens that go through the model per token of a sample, micro-batches filled up to a multiple of 8
  as for eight-way sequence parallelism;
- plan_seconds: time to plan all minibatches of 16,384 samples (median), without a baseline.

Last come the worst figures of all cases. The baselines deal the same minibatches round-robin to the ranks, in order of
arrival:

- "padding": every micro-batch has as many samples as fit the budget were all as long as the minibatch's longest, each
  padded to the longest of its micro-batch; padding costs FLOPs;
- "first-fit": every sample goes into its rank's first micro-batch with room; the rank with most micro-batches sets the
  number of all.

Lengths are those of 512 prompts with 16 answers each, drawn independently: the prompt log-normal with mean 106 and
sigma 0.5, 1,024 tokens at most, the answer log-normal and cut at the limit, its two parameters such that 12 percent are
cut and the mean of all is 7,900 tokens with the prompt. Limits are 16k, 24k and 28k new tokens, budgets the limit plus
4,096 tokens and twice that.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlmath.config.model_shape import ModelShape
from rlmath.data.seqlen_balancing import cut_minibatches, plan_minibatches, training_cost
from tools.figures import print_figure

MEAN_TOKENS = 7900.0
PROMPT_MEAN, PROMPT_SIGMA, PROMPT_LIMIT = 106.0, 0.5, 1024
CUT_SHARE = 0.12
PAD_TO_MULTIPLE = 8
SEED = 1
TIMED_SAMPLES = 16_384
COST = training_cost(
    ModelShape(
        architecture="Qwen2ForCausalLM",
        num_layers=28,
        hidden_size=1536,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        ffn_size=8960,
        vocab_size=151936,
        tied_embeddings=False,
        max_positions=131072,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        attention_bias=True,
        torch_dtype="bfloat16",
    )
)


@dataclass(frozen=True)
class Case:
    limit: int
    """New tokens at most."""
    max_tokens: int
    data_size: int
    n_minibatches: int

    def __str__(self) -> str:
        return (
            f"limit {self.limit}, budget {self.max_tokens}, "
            f"{self.data_size} ranks, {self.n_minibatches} minibatches"
        )


@dataclass(frozen=True)
class Figures:
    """Of one minibatch, or the worst of several."""

    microbatches_over_bound: float
    flops_imbalance: float
    computed_per_token: float


UNITS = {
    "microbatches_over_bound": "ratio",
    "flops_imbalance": "percent",
    "computed_per_token": "tokens/token",
}

Row = list[int]
"""Lengths of a micro-batch's samples as they are computed."""


# ---------------------------------------------------------------- lengths


def answer_distribution(limit: int) -> tuple[float, float]:
    """(mu, sigma) of the log-normal that has CUT_SHARE above `limit` and, cut there, the wanted mean.

    With mu = ln(limit) - z * sigma, z the normal quantile of 1 - CUT_SHARE, the mean of min(X, limit) is
    exp(mu + sigma^2 / 2) * Phi(z - sigma) + limit * CUT_SHARE, which falls as sigma grows.
    """
    normal = statistics.NormalDist()
    z = normal.inv_cdf(1 - CUT_SHARE)
    low, high = 0.01, 5.0
    for _ in range(60):
        sigma = (low + high) / 2
        below = math.exp(math.log(limit) - z * sigma + sigma**2 / 2) * normal.cdf(z - sigma)
        if below + limit * CUT_SHARE > MEAN_TOKENS - PROMPT_MEAN:
            low = sigma
        else:
            high = sigma
    return math.log(limit) - z * low, low


def draw_lengths(limit: int, count: int, seed: int) -> list[int]:
    """Tokens of `count` samples, prompt and answer."""
    draw = random.Random(seed)
    mu, sigma = answer_distribution(limit)
    prompt_mu = math.log(PROMPT_MEAN) - PROMPT_SIGMA**2 / 2
    lengths = []
    for _ in range(count):
        prompt = min(PROMPT_LIMIT, max(1, round(draw.lognormvariate(prompt_mu, PROMPT_SIGMA))))
        lengths.append(prompt + min(limit, max(1, round(draw.lognormvariate(mu, sigma)))))
    return lengths


# ---------------------------------------------------------------- three ways to make micro-batches


def ours(lengths: Sequence[int], case: Case) -> Iterator[list[list[Row]]]:
    """Micro-batches by rank, of every minibatch."""
    plan = plan_minibatches(
        lengths, case.n_minibatches, case.data_size, case.max_tokens, seed=SEED, cost=COST
    )
    for minibatch in plan:
        yield [[[lengths[i] for i in part] for part in rank] for rank in minibatch.microbatches_by_rank]


def padding(lengths: Sequence[int], case: Case) -> Iterator[list[list[Row]]]:
    for members in cut_minibatches(len(lengths), case.n_minibatches, SEED):
        size = case.max_tokens // max(lengths[i] for i in members)
        ranks = []
        for rank in range(case.data_size):
            mine = [lengths[i] for i in members[rank :: case.data_size]]
            parts = [mine[start : start + size] for start in range(0, len(mine), size)]
            ranks.append([[max(part)] * len(part) for part in parts])
        yield ranks


def first_fit(lengths: Sequence[int], case: Case) -> Iterator[list[list[Row]]]:
    for members in cut_minibatches(len(lengths), case.n_minibatches, SEED):
        dealt = ([lengths[i] for i in members[rank :: case.data_size]] for rank in range(case.data_size))
        yield [first_fit_rows(mine, case.max_tokens) for mine in dealt]


def first_fit_rows(lengths: Sequence[int], max_tokens: int) -> list[Row]:
    """
    >>> first_fit_rows([5, 6, 4, 3], 9)
    [[5, 4], [6, 3]]
    """
    rows: list[Row] = []
    rooms: list[int] = []
    for length in lengths:
        number = next((number for number, room in enumerate(rooms) if room >= length), len(rooms))
        if number == len(rows):
            rows.append([])
            rooms.append(max_tokens)
        rows[number].append(length)
        rooms[number] -= length
    return rows


# ---------------------------------------------------------------- figures


def measure(ranks: list[list[Row]], needed: int, max_tokens: int) -> Figures:
    """`needed` are the tokens of the minibatch's samples. A rank with fewer micro-batches fills up with empty ones."""
    count = max(len(rank) for rank in ranks)
    flops = [sum(COST.of(length) for row in rank for length in row) for rank in ranks]
    computed = sum(filled_up(sum(row)) for rank in ranks for row in rank)
    computed += sum(count - len(rank) for rank in ranks) * filled_up(0)
    return Figures(
        microbatches_over_bound=count / math.ceil(needed / max_tokens / len(ranks)),
        flops_imbalance=100 * (max(flops) - min(flops)) / statistics.mean(flops),
        computed_per_token=computed / needed,
    )


def filled_up(tokens: int) -> int:
    return max(1, math.ceil(tokens / PAD_TO_MULTIPLE)) * PAD_TO_MULTIPLE


def worst(figures: Sequence[Figures]) -> Figures:
    return Figures(*(max(getattr(one, name) for one in figures) for name in UNITS))


def compare(case: Case, n_samples: int, n_draws: int) -> dict[str, Figures]:
    """The worst figures of a case, by way."""
    found: dict[str, list[Figures]] = {"ours": [], "padding": [], "first-fit": []}
    for seed in range(SEED, SEED + n_draws):
        lengths = draw_lengths(case.limit, n_samples, seed)
        needed = [
            sum(lengths[i] for i in members)
            for members in cut_minibatches(n_samples, case.n_minibatches, SEED)
        ]
        for name, way in (("ours", ours), ("padding", padding), ("first-fit", first_fit)):
            for ranks, tokens in zip(way(lengths, case), needed, strict=True):
                found[name].append(measure(ranks, tokens, case.max_tokens))
    return {name: worst(figures) for name, figures in found.items()}


def plan_seconds(case: Case, repeats: int) -> float:
    lengths = draw_lengths(case.limit, TIMED_SAMPLES, SEED)
    durations = []
    for _ in range(repeats):
        started = time.perf_counter()
        plan_minibatches(lengths, case.n_minibatches, case.data_size, case.max_tokens, seed=SEED, cost=COST)
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


# ---------------------------------------------------------------- output


def report_case(case: Case, by_way: dict[str, Figures]) -> None:
    for metric, unit in UNITS.items():
        value = getattr(by_way["ours"], metric)
        for name in ("padding", "first-fit"):
            theirs = getattr(by_way[name], metric)
            told, ratio = f"{name}: {theirs:.4f}", theirs / max(value, 0.01)
            print_figure("packing", str(case), metric, value, unit, baseline=told, ratio=ratio)


def make_cases(quick: bool) -> list[Case]:
    return [
        Case(limit, times * (limit + 4096), data_size, n_minibatches)
        for limit in (16384, 24576, 28672)
        for times in ((1,) if quick else (1, 2))
        for data_size in ((8, 64) if quick else (8, 16, 32, 64))
        for n_minibatches in (1, 4)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one draw, fewer cases and repeats, within a minute"
    )
    quick = parser.parse_args(arguments).quick
    cases, n_samples = make_cases(quick), 512 * 16
    results = []
    for case in cases:
        by_way = compare(case, n_samples, n_draws=1 if quick else 3)
        results.append(by_way["ours"])
        report_case(case, by_way)
    seconds = []
    for case in cases:
        seconds.append(plan_seconds(case, repeats=1 if quick else 5))
        print_figure("packing", f"{case}, {TIMED_SAMPLES} samples", "plan_seconds", seconds[-1], "s")
    for metric, unit in UNITS.items():
        print_figure("packing", "worst of all", metric, getattr(worst(results), metric), unit)
    print_figure("packing", "worst of all", "plan_seconds", max(seconds), "s")


if __name__ == "__main__":
    main()
