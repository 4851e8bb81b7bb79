"""The memory of the CPU engine's KV cache."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlmath.distributed.device import resident_bytes
from rlmath.rollout.engine import prepare_environment

prepare_environment("cpu")
# vLLM reads the environment when it is imported.
from vllm.v1.sample import sampler  # noqa: E402

from rlmath.rollout.cpu_worker import (  # noqa: E402
    PAGE_BYTES,
    _ZeroPages,
    apply_adapter_at_once,
    fill_with_zero_pages,
    gather_without_ranks,
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
