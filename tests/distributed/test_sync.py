"""Weights that travel between real ranks, compared with the policy's whole tensors bit by bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import checksum_cases, sync_cases
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.selection import keeping, matrix

pytestmark = pytest.mark.distributed

TWO = [
    Case(tensor=2),
    Case(pipeline=2),
    Case(data=2),
    Case(pipeline=2, first_stage_layers=1),
    Case(pipeline=2, last_stage_layers=1),
    Case(pipeline=2, virtual_pipeline=2),
]
FOUR = [
    Case(tensor=2, pipeline=2),
    Case(tensor=2, data=2),
    Case(pipeline=2, data=2, optimizer="adam"),
    Case(pipeline=4),
]


SHARED = False
SENT = True
SIZES = {2: (1, 2), 4: (1, 2, 4)}
FIRST = (2, False, torch.float32, SHARED)
SECOND = (2, False, torch.bfloat16, SENT)


def _variant(count: int, tied: bool, dtype: torch.dtype, messages: bool) -> Any:
    words = (
        f"{count}-ranks",
        "tied" if tied else "untied",
        str(dtype)[6:],
        "sent" if messages else "shared",
    )
    by_default = {FIRST: (), SECOND: matrix}
    marks = by_default.get((count, tied, dtype, messages), pytest.mark.full)
    return pytest.param(count, tied, dtype, messages, marks=marks, id="-".join(words))


FORMATS = (torch.float32, torch.bfloat16)
MATRIX = [
    _variant(*each) for each in itertools.product((2, 4), (False, True), FORMATS, (SHARED, SENT))
]


@pytest.mark.parametrize(("count", "tied", "dtype", "messages"), MATRIX)
def test_every_engine_has_the_policys_weights_after_every_sync(
    ranks: RankPool,
    untied_model: Path,
    tied_model: Path,
    count: int,
    tied: bool,
    dtype: torch.dtype,
    messages: bool,
) -> None:
    """Three syncs with an update of the policy between them, in many rounds, in every layout."""
    folder = tied_model if tied else untied_model
    cases = {2: TWO, 4: FOUR}[count]
    check_syncs(
        ranks.run(count, sync_cases.transfer, folder, cases, SIZES[count], dtype, messages),
        messages,
    )


ADAPTED = [
    Case(lora="all"),
    Case(tensor=2, lora="all"),
    Case(tensor=2, sequence=True, lora="mlp"),
    Case(pipeline=2, virtual_pipeline=2, lora="attention"),
    Case(pipeline=2, lora="all"),
]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_engines_that_hold_adapters_get_these_alone_after_the_first_sync(
    ranks: RankPool, tied_model: Path, dtype: str
) -> None:
    """Whatever the layouts of both sides, and with zeros where buffers are padded."""
    for count in (1, 2):
        cases = [replace(case, dtype=dtype) for case in ADAPTED if case.ranks == count]
        sizes = (1,) if count == 1 else (1, 2)
        by_rank = ranks.run(
            count, sync_cases.adapters_alone, tied_model, cases, sizes, getattr(torch, dtype)
        )
        for reports in by_rank:
            for report in reports:
                assert report["first"] == [], report["case"]
                assert report["second"] == ["model.norm.weight"], report["case"]
                whole, adapters = report["moved"]
                assert 0 < adapters < report["adapters"] < whole / 2, report["case"]


@pytest.mark.parametrize(
    ("dtype", "messages"),
    [("float32", SHARED), pytest.param("bfloat16", SENT, marks=pytest.mark.full)],
)
def test_engines_get_the_base_with_adapters_merged_as_one_process_would(
    ranks: RankPool, tied_model: Path, dtype: str, messages: bool
) -> None:
    """To the bit, whatever the layouts of both sides; what has no adapter stays as it was."""
    for count in (1, 2):
        cases = [
            replace(case, dtype=dtype, lora_engine="merged")
            for case in ADAPTED
            if case.ranks == count
        ]
        sizes = (1,) if count == 1 else (1, 2)
        arguments = (tied_model, cases, sizes, getattr(torch, dtype), messages)
        check_syncs(ranks.run(count, sync_cases.transfer, *arguments), messages)


def check_syncs(by_rank: list[list[dict[str, Any]]], messages: bool) -> None:
    """Check what every rank reports (`sync_cases.transfer`)."""
    for reports in zip(*by_rank, strict=True):
        first = reports[0]
        assert all(report["wrong"] == [] and report["moved"] for report in reports), first["case"]
        assert sum(report["sent"] for report in reports) == first["lower bound"], first["case"]
        if first["lower bound"]:
            assert {r["through"] for r in reports} == {"Messages" if messages else "SharedBuckets"}
            assert 0 < first["bucket"] <= 40_000
            assert first["rounds"] * first["bucket"] * len(reports) >= first["lower bound"]


@matrix
@pytest.mark.parametrize(
    "case", keeping([Case(pipeline=2), Case(tensor=2)], Case(tensor=2), others=0), ids=str
)
def test_vllms_own_model_gets_what_it_would_load_into_the_memory_that_it_has(
    ranks: RankPool, untied_model: Path, case: Case
) -> None:
    """CUDA graphs read parameters where they were when they were captured."""
    for report in ranks.run(2, sync_cases.into_vllms_own_model, untied_model, case):
        assert report.pop("parameters") > 10
        assert report == {"unlike the checkpoint": [], "wrong": [], "elsewhere": []}


@matrix
def test_one_rank_that_cannot_share_memory_makes_all_send_messages(
    ranks: RankPool, untied_model: Path
) -> None:
    reports = ranks.run(
        2, sync_cases.without_shared_memory_on_one_rank, untied_model, Case(pipeline=2)
    )
    assert reports == [("Messages", []), ("Messages", [])]


@pytest.mark.full
@pytest.mark.parametrize("messages", [False, True], ids=["shared-memory", "messages"])
@pytest.mark.parametrize(
    ("case", "engine_size"),
    keeping(
        [
            *((Case(pipeline=2), 1), (Case(tensor=2), 1), (Case(pipeline=2), 2), (Case(data=2), 1)),
            (Case(pipeline=2, lora="all", lora_engine="merged"), 1),
        ],
        (Case(pipeline=2), 1),
    ),
    ids=lambda value: str(value),
)
def test_a_sync_takes_no_more_memory_than_its_buckets(
    ranks: RankPool, untied_model: Path, case: Case, engine_size: int, messages: bool
) -> None:
    """A sync takes two buckets to send and two to receive, none of which stay.

    Where they are shared it takes two for every rank, which stay, and the byte of a barrier. With
    LoRA one matrix is merged at a time."""
    for report in ranks.run(2, sync_cases.extra_bytes, untied_model, case, engine_size, messages):
        assert report["bucket"] <= 40_000 and report["received"] <= 40_000 < report["model"] / 40
        sending = 2 * report["bucket"]
        most = report["merging"]
        most += sending + 2 * report["received"] if messages else 2 * sending + 1
        assert report["peak"] <= most
        assert report["left"] <= (0 if messages else 2 * sending)


QKV = "model.layers.1.self_attn.qkv_proj.weight"
NORM = "model.layers.3.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


@matrix
@pytest.mark.parametrize("dtype", keeping(FORMATS, torch.bfloat16, others=0), ids=str)
def test_damage_to_an_engines_weights_is_found_and_named(
    ranks: RankPool, untied_model: Path, dtype: torch.dtype
) -> None:
    """Two engines of two ranks: rank 3 is the second one of engine 1."""
    query, key = (f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qk")
    damages = {
        ("bit", QKV, 0): [f"{key} in engine 0"],
        ("bit", DOWN, 1): [f"{DOWN} in engine 0"],
        ("rows", QKV, 3): [f"{query} in engine 1"],
        ("slice", EMBEDDING, 2): [f"{EMBEDDING} in engine 1"],
        ("slice", EMBEDDING, 3): [f"{EMBEDDING} in engine 1"],
        ("rows", NORM, 2): [f"{NORM} in engine 1"],
    }
    arguments = (untied_model, Case(tensor=2, pipeline=2), 2, dtype, list(damages))
    for names in ranks.run(4, checksum_cases.spoiled, *arguments):
        assert dict(zip(damages, names, strict=True)) == damages


@matrix
def test_a_replica_that_went_astray_ends_every_rank_with_the_tensor_and_the_engine(
    ranks: RankPool, untied_model: Path
) -> None:
    """Engines copy from their own rank's shard.

    They are compared with the first replica's."""
    reports = ranks.run(2, checksum_cases.replica_astray, untied_model, Case(data=2), 1, 1)
    for report in reports:
        assert "1 tensors differ" in report["error"]
        assert "model.layers.2.mlp.down_proj.weight in engine 1" in report["error"]
