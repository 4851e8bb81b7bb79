"""The GPU path: bfloat16, nccl, vLLM's sleep mode.

Skips itself without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlmath.data.packing import MicroBatch, pack
from rlmath.distributed.device import open_device
from rlmath.distributed.tensor_offload import HostMemory, StorageSet
from rlmath.models.logprobs import vocab_parallel_logprobs
from rlmath.planning.checks import transformer_engine_problems
from tests.distributed import (
    engine_cases,
    gather_cases,
    offload_cases,
    oracle,
    partial_rollout_cases,
    policy_cases,
    switch_cases,
)
from tests.distributed.policy_cases import Case
from tests.distributed.rank_pool import RankPool
from tests.models.test_logprobs import dense, loss, random_logits
from tests.tiny_models import make_samples

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BF16_NATS = 0.05
"""Most by which log-probs in bfloat16 may differ from those in float32 (nats)."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Processes that have seen no CPU run, which imports no package for GPUs from then on."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def fresh_ranks() -> Iterator[RankPool]:
    """Processes of their own: on GPU an engine ends only with its process."""
    pool = RankPool()
    yield pool
    pool.close()


LOCAL = not torch.cuda.is_available() or bool(
    list(transformer_engine_problems("transformer_engine"))
)
"""Transformer Engine cannot be imported."""


def layers() -> list[Any]:
    """Local layers, and Transformer Engine's where it can be imported."""
    return [
        True,
        pytest.param(False, marks=pytest.mark.skipif(LOCAL, reason="no Transformer Engine")),
    ]


@pytest.mark.parametrize("local_layers", layers())
def test_logprobs_in_bfloat16_are_close_to_transformers(
    ranks: RankPool, untied_model: Path, local_layers: bool
) -> None:
    samples = make_samples(24)
    case = Case(device="cuda", local_layers=local_layers)
    (logprobs,) = ranks.run(1, policy_cases.logprobs, untied_model, case, samples)
    model = oracle.load(untied_model)
    with torch.no_grad():
        for index, sample in enumerate(samples):
            expected = oracle.completion_logprobs(model, sample)
            torch.testing.assert_close(
                torch.tensor(logprobs[index]), expected, atol=BF16_NATS, rtol=0
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [151_936, 5_003])
def test_kernels_give_the_textbooks_logprobs_entropy_and_gradient(
    dtype: torch.dtype, V: int
) -> None:
    pytest.importorskip("triton")
    logits_TV, targets_T = random_logits(12, V)
    masked_T, masked_TN = torch.arange(12) < 4, torch.zeros(12, V - 2, dtype=torch.bool)
    masked_TN[:4, [1, 4_999]] = True
    leaf_TV = logits_TV.to("cuda", dtype).requires_grad_()
    expected = dense(leaf_TV.detach().cpu(), targets_T % 4_000 + 2, 0.7, V - 2, masked_TN)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        arguments = (
            leaf_TV,
            (targets_T % 4_000 + 2).cuda(),
            0.7,
            V - 2,
            dist.group.WORLD,
            masked_T.cuda(),
        )
        computed = [
            values_T.cpu()
            for values_T in vocab_parallel_logprobs(*arguments, masked_tokens=(1, 4_999))
        ]
        loss(*computed, "logprobs and entropy").backward()
    finally:
        dist.destroy_process_group()
    loss(*expected[:2], "logprobs and entropy").backward()
    for mine_T, theirs_T in zip(computed, expected[:2], strict=True):
        torch.testing.assert_close(mine_T.double(), theirs_T, atol=1e-5, rtol=1e-5)
    error = {"atol": 1e-5, "rtol": max(1e-5, torch.finfo(dtype).eps)}
    torch.testing.assert_close(leaf_TV.grad[:, : V - 2].cpu().double(), expected[2].grad, **error)
    assert not leaf_TV.grad[:, V - 2 :].any()


@pytest.mark.parametrize("local_layers", layers())
@pytest.mark.parametrize(
    "change", [{"selective": True}, {"recompute": True}, {"overlap_grad_reduce": True}]
)
def test_recomputation_and_overlap_change_no_gradient(
    ranks: RankPool, untied_model: Path, local_layers: bool, change: dict[str, bool]
) -> None:
    samples = make_samples(24)
    plain = Case(device="cuda", local_layers=local_layers, max_tokens=64)
    (gradients,), (changed_gradients,) = (
        ranks.run(1, policy_cases.gradients, untied_model, case, samples)
        for case in (plain, replace(plain, **change))
    )
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            changed_gradients[name], gradient, rtol=0, atol=0.02 * float(gradient.abs().max())
        )


def test_gradients_are_added_up_by_the_product_itself() -> None:
    from megatron_patches.multi_tensor import add_product

    at = open_device("cuda").torch_device
    x, grad = (torch.randn(300, n, device=at).bfloat16() for n in (72, 40))
    total = torch.randn(40, 72, device=at)
    expected = total.double() + grad.double().t() @ x.double()
    add_product(x, grad, total)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_micro_batch_on_the_gpu_is_the_one_of_the_host() -> None:
    batch = pack(make_samples(6), range(6), 4)
    moved = batch.to(open_device("cuda").torch_device)
    for name in (field.name for field in fields(MicroBatch)):
        original, copy = getattr(batch, name), getattr(moved, name)
        if not isinstance(original, torch.Tensor):
            assert copy == original, name
            continue
        assert copy.device.type == "cuda" and copy.dtype == original.dtype, name
        assert torch.equal(copy.cpu(), original), name


def test_metrics_are_reduced_by_gloo_beside_nccl(ranks: RankPool) -> None:
    expected = (["nccl", "gloo"], ({"third": 1 / 3}, {"largest": 1e-300}))
    assert ranks.run(1, gather_cases.metrics_beside_tensors, "cuda") == [expected]


def test_the_engine_draws_noise_at_once_and_flashinfer_reduces_nothing(
    fresh_ranks: RankPool, untied_model: Path
) -> None:
    (settings,) = fresh_ranks.run(1, engine_cases.engine_settings, untied_model, "cuda")
    assert settings == {
        "one kernel": True,
        "flashinfer reduces": False,
        "one kernel with a norm": False,
    }


def test_a_greedy_completion_in_slices_is_the_whole_one(
    fresh_ranks: RankPool, untied_model: Path, tmp_path: Path
) -> None:
    """Slices and the whole completion differ only where two tokens are about equally likely.

    A slice prefills what it continues, while the whole completion decoded it. In bfloat16 the two
    differ in the last bits, so that such tokens may change places. Larger logits make them few."""
    scale = 4
    model = partial_rollout_cases.with_scaled_logits(untied_model, tmp_path / "model", scale)
    (report,) = fresh_ranks.run(1, engine_cases.greedy_in_slices, model, "cuda", 5)
    whole, slices, ties = (report[name] for name in ("whole", "slices", "ties"))
    assert (
        whole.keys() == slices.keys() and sum(len(tokens) > 10 for tokens, _ in whole.values()) > 12
    )
    assert all(difference < scale * BF16_NATS for difference in ties.values()), ties
    untied = [key for key in whole if key not in ties]
    assert len(untied) > len(whole) / 4
    for key in untied:
        assert slices[key][0] == whole[key][0]
        assert slices[key][1] == pytest.approx(whole[key][1], abs=scale * BF16_NATS)


def test_the_engine_follows_the_policy_through_sleep_and_updates(
    ranks: RankPool, untied_model: Path
) -> None:
    case = Case(device="cuda", local_layers=LOCAL, optimizer="adam")
    (largest,) = ranks.run(1, engine_cases.mismatch_after_updates, untied_model, case, 1, 3)
    assert len(largest) == 4 and max(largest) < BF16_NATS


def test_engines_sample_with_the_weights_of_every_sync(
    fresh_ranks: RankPool, untied_model: Path
) -> None:
    """CUDA graphs captured before the first sync use the weights that later syncs wrote."""
    case = Case(device="cuda", local_layers=LOCAL, optimizer="adam", lr=0.01)
    (reports,) = fresh_ranks.run(1, switch_cases.cycles, untied_model, case, 1, 3)
    assert len(reports) == 3 and all(report["mismatch"] < 2 * BF16_NATS for report in reports)


def test_a_discarded_minibatch_leaves_every_bit_on_the_gpu(
    ranks: RankPool, untied_model: Path
) -> None:
    case = Case(
        device="cuda", local_layers=LOCAL, optimizer="adam", early_stop_ratio=5.0, max_tokens=64
    )
    (report,) = ranks.run(
        1, policy_cases.discard, untied_model, case, make_samples(16, seed=4), "runaway"
    )
    assert report["same"] and report["goes_on"]


def test_the_policy_leaves_the_gpu_and_comes_back_bit_by_bit(
    ranks: RankPool, untied_model: Path
) -> None:
    case = Case(device="cuda", local_layers=LOCAL, optimizer="adam", max_tokens=64)
    samples = make_samples(16, seed=4)
    (report,) = ranks.run(1, offload_cases.learn_around_an_offload, untied_model, case, samples)
    assert set(report["away"].values()) == {0} and report["again"] == report["here"]
    assert report["same"] and report["gradients not zero"] == []
    assert report["left"] == report["back"]
    assert report["left"]["gradients"] == 4 * report["buffers"]
    assert report["left"]["parameters"] == 2 * report["buffers"]
    # Float32 copies, and two moments of each.
    assert report["left"]["optimizer"] >= 12 * report["parameters"]


def test_what_leaves_gives_gpu_memory_up_and_waits_in_pinned_memory_that_is_used_again() -> None:
    device = open_device("cuda")
    tensors = [torch.randn(2**25, device="cuda"), torch.randn(1001, device="cuda").bfloat16()]
    contents = [tensor.cpu() for tensor in tensors]
    storage = StorageSet("weights", lambda: tensors, keep=True, device=device)
    allocated = torch.cuda.memory_allocated()
    left = storage.offload()
    assert left.bytes == 4 * 2**25 + 2 * 1001
    away, reserved = torch.cuda.memory_allocated(), storage._host.nbytes
    assert allocated - away >= left.bytes
    assert reserved >= left.bytes
    for _ in range(2):
        storage.onload()
        assert torch.cuda.memory_allocated() - away >= left.bytes
        assert storage._host.nbytes == reserved
        assert all(
            torch.equal(tensor.cpu(), other)
            for tensor, other in zip(tensors, contents, strict=True)
        )
        storage.offload()
    storage.onload()
    host = HostMemory(pinned=True)
    host.reserve(1000)
    assert all(piece.is_pinned() for piece in host.pieces(0, 1000))
