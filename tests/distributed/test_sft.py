"""Supervised training on every layout against plain transformers with torch's AdamW."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlmath.data.sft_sequences import WrittenSequence
from tests.distributed import oracle, sft_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.distributed.sft_cases import BETAS, make_sequences, order_of
from tests.selection import keeping, matrix

pytestmark = [pytest.mark.parity, pytest.mark.distributed]

STEPS = 6
CLIP = 1.0
LR = 2e-3
SEQUENCES = make_sequences(20, seed=1)
HELD_OUT = make_sequences(5, seed=2)
ALONE = Case(optimizer="adam", lr=LR, clip_grad=CLIP)
LAYOUTS = [
    Case(tensor=2, pipeline=2, optimizer="adam", lr=LR, clip_grad=CLIP, max_tokens=64),
    Case(data=2, optimizer="adam", lr=LR, clip_grad=CLIP, max_tokens=48),
]
FULL_LAYOUTS = [
    Case(tensor=2, data=2, sequence=True, optimizer="adam", lr=LR, clip_grad=CLIP, max_tokens=64),
    Case(pipeline=2, virtual_pipeline=2, optimizer="adam", lr=LR, clip_grad=CLIP, max_tokens=64),
]
CURVE = ("train/loss", "train/grad_norm", "held_out/loss", "held_out/perplexity")


def curve(ranks: RankPool, folder: Path, case: Case) -> list[dict[str, float]]:
    """The curve that rank 0 reports; all ranks report the same."""
    curves = ranks.run(case.ranks, sft_cases.curve, folder, case, SEQUENCES, HELD_OUT, STEPS)
    for other in curves[1:]:
        assert [row.get("train/loss") for row in other] == [
            row.get("train/loss") for row in curves[0]
        ]
    return curves[0]


@pytest.fixture(scope="module")
def alone(ranks: RankPool, untied_model: Path) -> list[dict[str, float]]:
    return curve(ranks, untied_model, ALONE)


def loss_and_hits(
    model: torch.nn.Module, sequences: list[WrittenSequence]
) -> tuple[torch.Tensor, int, int]:
    """(sum of nats, tokens, tokens that are the likeliest) of what is learned, by sequence."""
    total = torch.zeros(())
    tokens = 0
    hits = 0
    for sequence in sequences:
        ids = torch.tensor(sequence.prompt_ids + sequence.completion_ids)
        logits = model(ids[None]).logits[0, len(sequence.prompt_ids) - 1 : -1]
        targets = torch.tensor(sequence.completion_ids)
        if sequence.learned is not None:
            learned = torch.tensor(sequence.learned)
            logits = logits[learned]
            targets = targets[learned]
        total = total + torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        tokens = tokens + len(targets)
        hits = hits + int((logits.argmax(-1) == targets).sum())
    return total, tokens, hits


@matrix
def test_the_curve_is_that_of_transformers_with_adamw(
    alone: list[dict[str, float]], untied_model: Path
) -> None:
    torch.set_num_threads(1)
    model = oracle.load(untied_model)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=1e-8, weight_decay=0.0
    )
    order = order_of(SEQUENCES)
    losses_and_norms = []
    with torch.no_grad():
        total, tokens, hits = loss_and_hits(model, HELD_OUT)
    assert alone[0]["held_out/loss"] == pytest.approx(float(total) / tokens, rel=1e-5)
    assert alone[0]["held_out/token_accuracy"] == pytest.approx(hits / tokens)
    for number in range(STEPS):
        epoch, indices = order.batch(number)
        assert epoch == number // 3
        total, tokens, _ = loss_and_hits(model, [SEQUENCES[index] for index in indices])
        optimizer.zero_grad()
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses_and_norms.append((float(total.detach()) / tokens, float(norm)))
    assert [row["train/loss"] for row in alone[1:]] == pytest.approx(
        [loss for loss, _ in losses_and_norms], rel=1e-5
    )
    assert [row["train/grad_norm"] for row in alone[1:]] == pytest.approx(
        [norm for _, norm in losses_and_norms], rel=1e-3
    )
    assert min(norm for _, norm in losses_and_norms) > CLIP, "or nothing would be clipped"
    assert losses_and_norms[-1][0] < losses_and_norms[0][0] - 0.2, "or the curve would be flat"
    with torch.no_grad():
        total, tokens, hits = loss_and_hits(model, HELD_OUT)
    assert alone[-1]["held_out/loss"] == pytest.approx(float(total) / tokens, rel=1e-5)
    assert alone[-1]["held_out/perplexity"] == pytest.approx(
        math.exp(float(total) / tokens), rel=1e-4
    )
    assert alone[-1]["held_out/token_accuracy"] == pytest.approx(hits / tokens)


@matrix
@pytest.mark.parametrize(
    "case",
    [
        *keeping(LAYOUTS, LAYOUTS[0], others=0),
        *(pytest.param(layout, marks=pytest.mark.full) for layout in FULL_LAYOUTS),
    ],
    ids=str,
)
def test_every_layout_has_the_curve_of_a_single_rank(
    ranks: RankPool, alone: list[dict[str, float]], untied_model: Path, case: Case
) -> None:
    rows = curve(ranks, untied_model, case)
    assert len(rows) == len(alone) == STEPS + 1
    for row, alone_row in zip(rows, alone, strict=True):
        assert row.keys() == alone_row.keys()
        for name in CURVE:
            if name in alone_row:
                assert row[name] == pytest.approx(
                    alone_row[name], rel=1e-5 if "loss" in name else 1e-3
                ), name
        for name in (
            "held_out/token_accuracy",
            "n_tokens",
            "n_valid_tokens",
            "train/learning_rate",
        ):
            assert row.get(name) == alone_row.get(name), name
    assert ["held_out/loss" in row for row in rows] == [
        True,
        False,
        True,
        False,
        True,
        False,
        True,
    ]
