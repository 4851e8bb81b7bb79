"""KL to a teacher over the whole vocabulary, and its gradient, against the textbook in float64."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlmath.models import logprobs as module
from rlmath.models.logprobs import (
    MinTokensMask,
    TeacherRows,
    next_logprobs,
    vocab_parallel_logprobs,
)

# Shape legend: T packed tokens, V columns (real and padded), H hidden units of the teacher.

pytestmark = pytest.mark.usefixtures("process_group")

TEMPERATURE = 0.7
VOCAB = 37
ROWS = 23
HIDDEN = 11


def inputs(common: int) -> tuple[Tensor, Tensor, TeacherRows]:
    draw = torch.Generator().manual_seed(3)
    logits_TV = 3 * torch.randn(ROWS, VOCAB + 3, generator=draw)  # three columns of padding
    hidden_TH = torch.randn(ROWS, HIDDEN, generator=draw)
    head_VH = torch.randn(VOCAB + 3, HIDDEN, generator=draw)
    targets_T = torch.randint(0, common, (ROWS,), generator=draw)
    return logits_TV, targets_T, TeacherRows(hidden_TH, head_VH, common)


def dense(
    logits_TV: Tensor, targets_T: Tensor, teacher: TeacherRows, masked_T: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, KL and the leaf; the token 2 is masked in the rows of `masked_T`."""
    leaf = logits_TV[:, :VOCAB].double().requires_grad_()
    both = leaf, (teacher.hidden_TH @ teacher.head_VH.t()).double()
    scaled = [logits / TEMPERATURE for logits in both]
    if masked_T is not None:
        column = torch.arange(scaled[0].shape[1]) == 2
        scaled[0] = scaled[0].masked_fill(masked_T[:, None] & column, -1e30)
        column = torch.arange(scaled[1].shape[1]) == 2
        scaled[1] = scaled[1].masked_fill(masked_T[:, None] & column, -1e30)
    logprobs_T = torch.log_softmax(scaled[0], -1).gather(1, targets_T[:, None])[:, 0]
    student, taught = (torch.log_softmax(logits[:, : teacher.vocab_size], -1) for logits in scaled)
    return logprobs_T, (student.exp() * (student - taught)).sum(-1), leaf


@pytest.mark.parametrize("common", [VOCAB, VOCAB - 6])
@pytest.mark.parametrize("block_rows", [1, 5, 100])
def test_kl_and_its_gradient_are_those_of_the_textbook(
    monkeypatch: pytest.MonkeyPatch, common: int, block_rows: int
) -> None:
    monkeypatch.setitem(module.TEACHER_BLOCK_BYTES, "cpu", 4 * common * block_rows)
    logits_TV, targets_T, teacher = inputs(common)
    wanted_logprobs_T, wanted_kl_T, wanted_leaf = dense(logits_TV, targets_T, teacher)
    leaf_TV = logits_TV.clone().requires_grad_()
    logprobs_T, entropy_T, kl_T = vocab_parallel_logprobs(
        leaf_TV, targets_T, TEMPERATURE, VOCAB, dist.group.WORLD, teacher=teacher
    )
    torch.testing.assert_close(kl_T.double(), wanted_kl_T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs_T.double(), wanted_logprobs_T, atol=1e-5, rtol=1e-5)
    weights_T = torch.linspace(0, 2, ROWS)
    ((0.3 * logprobs_T - entropy_T.detach() + kl_T) * weights_T).sum().backward()
    ((0.3 * wanted_logprobs_T + wanted_kl_T) * weights_T.double()).sum().backward()
    torch.testing.assert_close(
        leaf_TV.grad[:, :VOCAB].double(), wanted_leaf.grad, atol=1e-5, rtol=1e-5
    )
    assert not leaf_TV.grad[:, VOCAB:].any() and not leaf_TV.grad[0].any()


def test_both_models_lack_the_tokens_that_the_engine_masks() -> None:
    logits_TV, targets_T, teacher = inputs(VOCAB)
    targets_T = targets_T.clamp(min=3)
    index_T = (
        torch.arange(ROWS) - 4
    )  # the completion begins at row 4; of its tokens the first 6 are masked
    masked_T = (index_T >= 0) & (index_T < 6)
    _, wanted_T, wanted_leaf = dense(logits_TV, targets_T, teacher, masked_T)
    leaf_TV = logits_TV.clone().requires_grad_()
    mask = MinTokensMask((2,), 6)
    kl_T = next_logprobs(
        leaf_TV, targets_T, index_T, TEMPERATURE, VOCAB, mask, dist.group.WORLD, teacher=teacher
    )[2]
    torch.testing.assert_close(kl_T.double(), wanted_T, atol=1e-5, rtol=1e-5)
    kl_T.sum().backward()
    wanted_T.sum().backward()
    torch.testing.assert_close(
        leaf_TV.grad[:, :VOCAB].double(), wanted_leaf.grad, atol=1e-5, rtol=1e-5
    )


def test_a_row_that_is_not_counted_gets_no_gradient_whatever_it_holds() -> None:
    logits_TV, targets_T, teacher = inputs(VOCAB)
    logits_TV[3] = float("nan")
    leaf_TV = logits_TV.requires_grad_()
    kl_T = vocab_parallel_logprobs(
        leaf_TV, targets_T, TEMPERATURE, VOCAB, dist.group.WORLD, teacher=teacher
    )[2]
    torch.where(torch.arange(ROWS) == 3, 0.0, kl_T).sum().backward()
    assert (
        not leaf_TV.grad[3].any() and leaf_TV.grad[4].any() and torch.isfinite(leaf_TV.grad).all()
    )
