from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlmath.models import logprobs as module
from rlmath.models.logprobs import (
    MinTokensMask,
    next_logprobs,
    shift_to_tokens,
    vocab_parallel_logprobs,
)

# Shape legend: T packed tokens, V columns (real and padded), N real columns.

CLOSE = {"atol": 1e-6, "rtol": 1e-6}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def dense(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperature: float,
    vocab_size: int,
    masked_TN: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and the leaf that gradients arrive at, in float64 and by the textbook."""
    leaf_TN = logits_TV.detach()[:, :vocab_size].double().requires_grad_()
    scaled_TN = leaf_TN / temperature
    if masked_TN is not None:
        scaled_TN = scaled_TN.masked_fill(masked_TN, -1e30)
    all_TN = torch.log_softmax(scaled_TN, -1)
    return all_TN.gather(1, targets_T[:, None])[:, 0], -(all_TN.exp() * all_TN).sum(-1), leaf_TN


def ours(logits_TV: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and the leaf that gradients arrive at; the leaf owns its logits."""
    leaf_TV = logits_TV.clone().requires_grad_()
    logprobs_T, entropy_T = vocab_parallel_logprobs(leaf_TV, *args, dist.group.WORLD, **kwargs)
    return logprobs_T, entropy_T, leaf_TV


def loss(logprobs_T: Tensor, entropy_T: Tensor, parts: str) -> Tensor:
    """A sum in which every row has weights of its own, negative ones among them."""
    weights_T = torch.linspace(-1, 2, len(logprobs_T), dtype=logprobs_T.dtype)
    return sum(
        (value_T * weight_T).sum()
        for name, value_T, weight_T in (
            ("logprobs", logprobs_T, weights_T),
            ("entropy", entropy_T, weights_T.flip(0)),
        )
        if name in parts
    )


def random_logits(T: int, V: int, spread: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(T, V, generator=draw) * spread, torch.randint(0, V, (T,), generator=draw)


def halves() -> tuple[Tensor, Tensor]:
    """Logits of which two rows have their mass in different halves of the vocabulary.

    The last columns are padding."""
    logits_TV, targets_T = random_logits(7, 100)
    logits_TV[:, 97:] = -torch.inf
    logits_TV[1, 70] = 1e4
    logits_TV[2, 5] = -7e3
    logits_TV[2, 1] = 9e3
    return logits_TV, targets_T % 97


def shard_of(rank: int = -1, store: dist.Store | None = None) -> list[Tensor]:
    """Log-probs, entropy and gradient of one of two ranks with a half of the vocabulary each.

    The rank is that of the environment if none is given."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    logits_TV, targets_T = halves()
    leaf_TV = logits_TV.chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    masked = {"masked_T": torch.arange(7) < 3, "masked_tokens": (2, 60)}
    outputs = vocab_parallel_logprobs(leaf_TV, targets_T, 0.4, 97, dist.group.WORLD, **masked)
    loss(*outputs, "logprobs and entropy").backward()
    return [*(output.detach() for output in outputs), leaf_TV.grad]


def check_shards(first: list[Tensor], second: list[Tensor]) -> None:
    """Two shards give what the whole vocabulary gives."""
    masked_TN = torch.zeros(7, 97, dtype=torch.bool)
    masked_TN[:3, [2, 60]] = True
    exact = dense(*halves(), 0.4, 97, masked_TN)
    loss(*exact[:2], "logprobs and entropy").backward()
    for mine_T, other_T, theirs_T in zip(first[:2], second[:2], exact[:2], strict=True):
        assert torch.equal(mine_T, other_T)
        torch.testing.assert_close(mine_T, theirs_T.float(), **CLOSE)
    grad_TV = torch.cat((first[2], second[2]), 1)
    torch.testing.assert_close(grad_TV[:, :97], exact[2].grad.float(), **CLOSE)
    assert not grad_TV[:, 97:].any()


@pytest.fixture
def chunk_rows(monkeypatch: pytest.MonkeyPatch):
    """Sets how many rows of so many columns make a chunk."""
    return lambda rows, columns: monkeypatch.setitem(module.CHUNK_BYTES, "cpu", 4 * rows * columns)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_shape_chunk_and_temperature_agrees_with_the_dense_formula(data: st.DataObject) -> None:
    T = data.draw(st.integers(1, 9))
    N = data.draw(st.integers(1, 300))
    padding = data.draw(st.integers(0, 3))
    parts = data.draw(st.sampled_from(["logprobs", "entropy", "logprobs and entropy"]))
    temperature = data.draw(st.floats(0.2, 3.0))
    logits_TV, targets_T = random_logits(
        T, N + padding, data.draw(st.sampled_from([1e-3, 1.0, 20.0])), T + N
    )
    targets_T %= N
    logits_TV += data.draw(st.sampled_from([-300.0, 0.0, 90.0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.CHUNK_BYTES, "cpu", data.draw(st.integers(1, 4 * T * N + 8)))
        outputs = ours(logits_TV, targets_T, temperature, N)
        exact = dense(logits_TV, targets_T, temperature, N)
        loss(*outputs[:2], parts).backward()
        loss(*exact[:2], parts).backward()
    tolerance = {"atol": 2e-6 / temperature, "rtol": 2e-6}
    torch.testing.assert_close(outputs[0], exact[0].float(), **tolerance)
    torch.testing.assert_close(outputs[1], exact[1].float(), **tolerance)
    torch.testing.assert_close(outputs[2].grad[:, :N], exact[2].grad.float(), **tolerance)
    assert not outputs[2].grad[:, N:].any()


def test_flat_rows_have_the_logarithm_of_the_vocabulary_as_entropy() -> None:
    logprobs_T, entropy_T, leaf_TV = ours(
        torch.full((2, 151_936), 7.3), torch.tensor([0, 5]), 0.8, 151_665
    )
    expected_T = torch.full((2,), 151_665.0).double().log()
    torch.testing.assert_close(entropy_T, expected_T.float(), atol=0, rtol=1e-6)
    torch.testing.assert_close(logprobs_T, -expected_T.float(), atol=0, rtol=1e-6)
    entropy_T.sum().backward()
    assert leaf_TV.grad.abs().max() < 1e-11


def test_a_peaked_row_keeps_its_small_entropy_and_its_gradient() -> None:
    logits_TV = torch.zeros(1, 1000)
    logits_TV[0, 3] = 20.0
    outputs, exact = (f(logits_TV, torch.tensor([3]), 1.0, 1000) for f in (ours, dense))
    assert exact[1].item() == pytest.approx(4.3e-5, rel=0.02)
    torch.testing.assert_close(outputs[1], exact[1].float(), atol=3e-7, rtol=0)
    torch.testing.assert_close(outputs[0], exact[0].float(), atol=3e-7, rtol=0)
    loss(*outputs[:2], "logprobs").backward()
    loss(*exact[:2], "logprobs").backward()
    error_TV = (outputs[2].grad - exact[2].grad).abs()
    assert error_TV[0, 3] < 3e-7
    assert error_TV.max() == error_TV[0, 3] and error_TV.sort().values[0, -2] < 1e-14


@pytest.mark.parametrize("padding", [1e4, torch.inf, torch.nan])
def test_padded_columns_have_no_probability_and_no_gradient_whatever_they_hold(
    padding: float,
) -> None:
    logits_TV, targets_T = random_logits(6, 50)
    clean = ours(logits_TV, targets_T, 0.9, 50)
    padded = ours(torch.cat((logits_TV, torch.full((6, 5), padding)), 1), targets_T, 0.9, 50)
    for outputs in (clean, padded):
        loss(*outputs[:2], "logprobs and entropy").backward()
    assert torch.equal(padded[0], clean[0]) and torch.equal(padded[1], clean[1])
    assert torch.equal(padded[2].grad[:, :50], clean[2].grad)
    assert not padded[2].grad[:, 50:].any()


def test_a_shard_of_padding_alone_works() -> None:
    logits_TV = torch.full((3, 4), torch.nan, requires_grad=True)
    logprobs_T, entropy_T = vocab_parallel_logprobs(
        logits_TV, torch.tensor([0, 1, 2]), 1.0, 0, dist.group.WORLD
    )
    (logprobs_T.sum() + entropy_T.sum()).backward()
    assert torch.equal(logits_TV.grad, torch.zeros(3, 4))


@pytest.mark.parametrize("parts", ["logprobs", "logprobs and entropy"])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_logits_of_16_bits_give_float32_results_and_a_gradient_rounded_once(
    parts: str, dtype: torch.dtype, rounding: float
) -> None:
    logits_TV, targets_T = random_logits(9, 200, spread=6.0)
    logits_TV = logits_TV.to(dtype)
    targets_T %= 190
    outputs = ours(logits_TV, targets_T, 0.8, 190)
    exact = dense(logits_TV, targets_T, 0.8, 190)
    loss(*outputs[:2], parts).backward()
    loss(*exact[:2], parts).backward()
    assert outputs[0].dtype == outputs[1].dtype == torch.float32
    torch.testing.assert_close(outputs[0], exact[0].float(), **CLOSE)
    torch.testing.assert_close(outputs[1], exact[1].float(), **CLOSE)
    grad_TN = outputs[2].grad[:, :190].double()
    torch.testing.assert_close(grad_TN, exact[2].grad, atol=1e-7, rtol=rounding)


def test_masked_tokens_have_no_probability_in_their_rows_even_where_they_tower() -> None:
    logits_TV, targets_T = random_logits(8, 40)
    targets_T %= 30
    logits_TV[:, 35] = 1e4
    masked_T = torch.arange(8) < 5
    logits_TV[~masked_T, 35] = 1.0
    masked_TN = torch.zeros(8, 38, dtype=torch.bool)
    masked_TN[:5, [33, 35]] = True
    masked = {"masked_T": masked_T, "masked_tokens": (33, 35, 39)}
    assert torch.all(
        (ours(logits_TV, 0 * targets_T + 33, 0.7, 38, **masked)[0] < -1e29) == masked_T
    )
    outputs = ours(logits_TV, targets_T, 0.7, 38, **masked)
    exact = dense(logits_TV, targets_T, 0.7, 38, masked_TN)
    loss(*outputs[:2], "logprobs and entropy").backward()
    loss(*exact[:2], "logprobs and entropy").backward()
    torch.testing.assert_close(outputs[0], exact[0].float(), **CLOSE)
    torch.testing.assert_close(outputs[1], exact[1].float(), **CLOSE)
    torch.testing.assert_close(outputs[2].grad[:, :38], exact[2].grad.float(), **CLOSE)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_incoming_gradient_get_exactly_zero_even_from_bad_logits(
    bad: float, rows: int, chunk_rows
) -> None:
    chunk_rows(rows, 20)
    logits_TV, targets_T = random_logits(9, 20)
    idle_T = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
    broken_TV = logits_TV.clone()
    broken_TV[idle_T] = bad
    results = []
    for logits in (logits_TV, broken_TV):
        logprobs_T, entropy_T, leaf_TV = ours(logits, targets_T, 0.8, 20)
        (logprobs_T[~idle_T].sum() + 0.1 * entropy_T[~idle_T].sum()).backward()
        results.append(leaf_TV.grad)
    assert not results[1][idle_T].any()
    assert results[1][~idle_T].any(-1).all()
    assert torch.equal(results[0], results[1])


def test_a_row_with_bad_logits_that_counts_has_a_bad_gradient() -> None:
    logits_TV, targets_T = random_logits(3, 20)
    logits_TV[1, 4] = torch.nan
    logprobs_T, _, leaf_TV = ours(logits_TV, targets_T, 1.0, 20)
    logprobs_T.sum().backward()
    assert leaf_TV.grad[1].isnan().all()
    assert torch.isfinite(leaf_TV.grad[[0, 2]]).all()


def test_the_gradient_lies_in_the_storage_of_the_logits() -> None:
    logits_TV, targets_T = random_logits(5, 12)
    leaf_TV = logits_TV.clone().requires_grad_()
    seen = []
    activations_TV = leaf_TV * 1.0
    activations_TV.register_hook(lambda grad: seen.append(grad.data_ptr()))
    logprobs_T, entropy_T = vocab_parallel_logprobs(
        activations_TV, targets_T, 1.0, 12, dist.group.WORLD
    )
    (logprobs_T.sum() + entropy_T.sum()).backward()
    assert seen == [activations_TV.data_ptr()]
    assert torch.equal(activations_TV, leaf_TV.grad)
    assert torch.equal(leaf_TV, logits_TV)


@pytest.mark.parametrize("T", [1, 5])
def test_a_second_backward_pass_is_an_error(T: int) -> None:
    logits_TV, targets_T = random_logits(T, 12)
    logprobs_T, entropy_T, _ = ours(logits_TV, targets_T, 1.0, 12)
    logprobs_T.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        entropy_T.sum().backward()


def test_a_gradient_of_the_gradient_is_refused() -> None:
    logits_TV, targets_T = random_logits(3, 6)
    logprobs_T, _, leaf_TV = ours(logits_TV, targets_T, 1.0, 6)
    (grad_TV,) = torch.autograd.grad(logprobs_T.square().sum(), leaf_TV, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad_TV.sum().backward()


def test_without_gradients_the_logits_stay_as_they_are() -> None:
    logits_TV, targets_T = random_logits(5, 12)
    before_TV = logits_TV.clone()
    logprobs_T, entropy_T = vocab_parallel_logprobs(logits_TV, targets_T, 0.5, 11, dist.group.WORLD)
    assert torch.equal(logits_TV, before_TV)
    assert not logprobs_T.requires_grad and not entropy_T.requires_grad


def packed_logprobs(
    logits_TV: Tensor,
    token_ids_T: Tensor,
    completion_index_T: Tensor,
    temperature: float,
    vocab_size: int,
    min_tokens_mask: MinTokensMask,
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the packed tokens themselves."""

    def of_next(tokens_T: Tensor, index_T: Tensor) -> tuple[Tensor, Tensor]:
        return next_logprobs(
            logits_TV, tokens_T, index_T, temperature, vocab_size, min_tokens_mask, dist.group.WORLD
        )

    return shift_to_tokens(of_next, token_ids_T, completion_index_T)


def test_packed_tokens_are_predicted_by_the_row_before_them() -> None:
    logits_TV, token_ids_T = random_logits(10, 30)
    completion_index_T = torch.tensor([-1, -1, 0, 1, 2, -1, 0, 1, -1, 0])
    leaf_TV = logits_TV.clone().requires_grad_()
    logprobs_T, entropy_T = packed_logprobs(
        leaf_TV, token_ids_T, completion_index_T, 0.7, 28, MinTokensMask((3, 27), 2)
    )
    masked_TN = torch.zeros(9, 28, dtype=torch.bool)
    for row in (1, 2, 5, 6, 8):
        masked_TN[row, [3, 27]] = True
    targets_T = token_ids_T[1:]
    exact = dense(logits_TV[:-1], targets_T, 0.7, 28, masked_TN)
    torch.testing.assert_close(logprobs_T[1:], exact[0].float(), **CLOSE)
    torch.testing.assert_close(entropy_T[1:], exact[1].float(), **CLOSE)
    assert logprobs_T[0] == 0 and entropy_T[0] == 0
    loss(logprobs_T[1:], entropy_T[1:], "logprobs and entropy").backward()
    loss(*exact[:2], "logprobs and entropy").backward()
    torch.testing.assert_close(leaf_TV.grad[:-1, :28], exact[2].grad.float(), **CLOSE)
    assert not leaf_TV.grad[-1].any()
    assert leaf_TV.grad.data_ptr() == leaf_TV.data_ptr()


def test_the_last_row_of_a_pack_may_hold_anything() -> None:
    logits_TV, token_ids_T = random_logits(4, 6)
    logits_TV[-1] = torch.nan
    leaf_TV = logits_TV.requires_grad_()
    logprobs_T, entropy_T = packed_logprobs(
        leaf_TV, token_ids_T, torch.arange(4), 1.0, 6, MinTokensMask()
    )
    assert torch.isfinite(logprobs_T).all() and torch.isfinite(entropy_T).all()
    (logprobs_T.sum() + entropy_T.sum()).backward()
    assert torch.isfinite(leaf_TV.grad).all() and not leaf_TV.grad[-1].any()
