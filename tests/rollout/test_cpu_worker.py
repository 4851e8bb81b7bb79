"""The CPU engine's worker: the memory of its KV cache, its adapters, and how it samples."""

# Shape legend: R requests of a step, T tokens, K columns of a matrix, V vocabulary.

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlmath.distributed.device import resident_bytes
from rlmath.rollout.engine import prepare_environment

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm.v1.sample import sampler  # noqa: E402
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402

from rlmath.rollout.cpu_worker import (  # noqa: E402
    PAGE_BYTES,
    RlmathCPUWorker,
    _ZeroPages,
    apply_adapter_at_once,
    fill_with_zero_pages,
    gather_without_ranks,
    noise_seeds,
)


@pytest.mark.parametrize("size", [0, 5, PAGE_BYTES, PAGE_BYTES + 1, 3 * PAGE_BYTES + 7, 8 * 2**20])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_cache_that_is_restored_is_zero_and_its_neighbours_are_not(size: int, offset: int):
    """What was there before may be no number, and 0 times it is none either."""
    block = torch.full((16 * 2**20,), 255, dtype=torch.uint8)
    start = -block.data_ptr() % PAGE_BYTES + PAGE_BYTES + offset
    before = resident_bytes()
    fill_with_zero_pages(block.data_ptr() + start, size)
    if size > 2**20:
        assert resident_bytes() < before - size / 2, "no memory is taken until it is used"
    assert block[start : start + size].eq(0).all()
    assert block[:start].eq(255).all() and block[start + size :].eq(255).all()


def test_a_new_cache_is_zero_and_takes_no_memory_until_it_is_used():
    block = torch.full((16 * 2**20,), 255, dtype=torch.uint8)
    del block  # the allocator may give out its memory again
    before = resident_bytes()
    with _ZeroPages():
        cache = torch.zeros(2**26, dtype=torch.int8)
        small = torch.zeros(3, 5)
    assert resident_bytes() < before + 2**23
    assert not cache.any() and not small.any() and small.shape == (3, 5)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as ranks have on CPU: several share a product in another way for each size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_what_an_adapter_adds_to_a_token_does_not_depend_on_the_others(one_thread: None):
    """A query, key and value of 32, 8 and 8 rows, of 64 columns, with an adapter of rank 8."""
    torch.manual_seed(0)
    weights = [torch.randn(rows, 64) for rows in (32, 8, 8)]
    matrices_a = [torch.randn(8, 64) for _ in weights]
    matrices_b = [torch.randn(len(weight), 8) for weight in weights]
    base = torch.randn(40, 48)
    quant_method = SimpleNamespace(apply=lambda layer, x_TK, bias: base[: len(x_TK)].clone())
    layer: Any = SimpleNamespace(
        lora_a_stacked=tuple(a[None, None] for a in matrices_a),
        lora_b_stacked=tuple(b[None, None] for b in matrices_b),
        base_layer=SimpleNamespace(quant_method=quant_method),
    )
    apply_adapter_at_once(layer)
    x_TK = torch.randn(40, 64)
    whole = layer.apply(x_TK)
    parts = [b @ a for a, b in zip(matrices_a, matrices_b, strict=True)]
    torch.testing.assert_close(whole, base + x_TK @ torch.cat(parts).t(), rtol=1e-4, atol=1e-4)
    for tokens in range(1, 40):
        assert torch.equal(layer.apply(x_TK[:tokens]), whole[:tokens]), tokens
    layer.lora_b_stacked[1].zero_()
    assert torch.equal(layer.apply(x_TK)[:, 32:40], base[:, 32:40]), "buffers are written in place"


def sampler_at(patch: pytest.MonkeyPatch, positions: list[int]) -> Any:
    """The function by which vLLM samples in our worker, with requests of so many tokens.

    vLLM's part of `init_device` opens process groups, and is left out."""
    patch.setattr(CPUWorker, "init_device", lambda worker: None)
    worker = object.__new__(RlmathCPUWorker)
    worker.parallel_config = SimpleNamespace(distributed_executor_backend="uni")
    topk_topp_sampler = SimpleNamespace()
    worker.model_runner = SimpleNamespace(
        sampler=SimpleNamespace(topk_topp_sampler=topk_topp_sampler),
        input_batch=SimpleNamespace(num_tokens_no_spec=np.array(positions)),
    )
    worker.init_device()
    return topk_topp_sampler.forward


def generators_of(seeds: dict[int, int]) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}


SEEDS = {0: 5, 1: 2**62 + 1, 2: 5, 3: 77}


def test_tokens_follow_from_seeds_and_positions_and_leave_the_process_its_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch has places that no request of the step is in."""
    positions = [9, 4, 4, 30, 8, 8]
    sample = sampler_at(monkeypatch, positions)
    logits_RV = torch.linspace(-1.0, 1.0, 200).repeat(4, 1)
    before = torch.get_rng_state()
    tokens_R, logprobs_RV = sample(logits_RV.clone(), generators_of(SEEDS), None, None)
    assert torch.equal(torch.get_rng_state(), before)
    noise_R = noise_seeds(np.array(list(SEEDS.values()), np.uint64), np.array(positions[:4]))
    expected_R = torch.ops._C.fused_gumbel_argmax(logits_RV.clone(), torch.from_numpy(noise_R))
    assert tokens_R.tolist() == expected_R.tolist() and len(set(tokens_R.tolist())) > 1
    torch.testing.assert_close(logprobs_RV, logits_RV.log_softmax(-1))


def test_a_request_without_a_seed_has_other_noise_at_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last of four has none, as a greedy one; the others keep their own."""
    sample = sampler_at(monkeypatch, [9, 4, 4, 30])
    logits_RV = torch.zeros(4, 1000)
    seeded = {row: SEEDS[row] for row in range(3)}
    draws = [sample(logits_RV.clone(), generators_of(seeded), None, None)[0] for _ in range(4)]
    assert len({tuple(tokens_R[:3].tolist()) for tokens_R in draws}) == 1
    assert len({int(tokens_R[3]) for tokens_R in draws}) > 1


def test_only_the_most_likely_tokens_are_drawn_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log-probs are those of what is drawn from; each request has its own limits."""
    sample = sampler_at(monkeypatch, [9, 4, 4, 30])
    logits_RV = torch.tensor([0.0, 3.0, 2.0, 1.0]).repeat(4, 1)
    top_k_R = torch.tensor([1, 2, 4, 4])
    top_p_R = torch.tensor([1.0, 1.0, 0.1, 1.0])
    _, logprobs_RV = sample(logits_RV, generators_of(SEEDS), top_k_R, top_p_R)
    assert logprobs_RV.isfinite().sum(-1).tolist() == [1, 2, 1, 4]
    torch.testing.assert_close(logprobs_RV.exp().sum(-1), torch.ones(4))


def test_nothing_of_the_sampler_is_compiled():
    """A compiled function would need a C++ compiler, and seconds, at the first token."""
    count = sampler.batched_count_greater_than
    assert not hasattr(count, "_torchdynamo_orig_callable")
    assert count(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[2.0]])).tolist() == [2]


def test_log_probs_without_ranks_are_those_of_vllm():
    logprobs_TV = torch.randn(5, 7).log_softmax(-1)
    token_ids_T = torch.tensor([6, 0, 3, 3, 1])
    gathered_logprobs = gather_without_ranks(logprobs_TV, 0, token_ids_T)
    vllm_logprobs = sampler.Sampler.gather_logprobs(logprobs_TV, 0, token_ids_T)
    for tensor, vllm_tensor in zip(gathered_logprobs[:2], vllm_logprobs[:2], strict=True):
        assert torch.equal(tensor, vllm_tensor) and tensor.dtype == vllm_tensor.dtype
    assert gathered_logprobs.selected_token_ranks.dtype == vllm_logprobs.selected_token_ranks.dtype
