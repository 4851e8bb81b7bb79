import math

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from rlmath.models import local_layers
from rlmath.models.local_layers import RMSNorm, swiglu


def draw(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def norm_of(width: int, dtype: torch.dtype = torch.float64) -> RMSNorm:
    config = TransformerConfig(
        num_layers=1, hidden_size=width, num_attention_heads=1, params_dtype=dtype
    )
    return RMSNorm(config, width, eps=1e-3)


@pytest.mark.parametrize("shape", [(5, 1, 6), (3, 2, 4)], ids=str)
def test_the_norm_is_torchs(shape: tuple[int, ...]):
    norm = norm_of(shape[-1])
    x = draw(*shape)
    with torch.no_grad():
        norm.weight.copy_(draw(shape[-1]))
    reference = F.rms_norm(x, shape[-1:], norm.weight, eps=1e-3)
    torch.testing.assert_close(norm(x), reference, rtol=1e-12, atol=1e-12)
    upstream = draw(*shape).detach()
    gradients, reference_gradients = (
        torch.autograd.grad(y, (x, norm.weight), upstream) for y in (norm(x), reference)
    )
    for gradient, expected in zip(gradients, reference_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_the_norm_of_a_permuted_tensor():
    norm = norm_of(4)
    x = draw(2, 3, 4)
    permuted = norm(x.transpose(0, 1))
    (gradient,) = torch.autograd.grad(permuted.transpose(0, 1).square().sum(), x)
    (expected,) = torch.autograd.grad(F.rms_norm(x, (4,), eps=1e-3).square().sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_the_norm_of_zeros_is_zero_and_its_gradient_finite():
    norm = norm_of(4)
    x = torch.zeros(2, 1, 4, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros_like(y))
    torch.testing.assert_close(gradient, torch.full_like(gradient, 1e-3**-0.5))


def test_the_norm_of_short_numbers_is_torchs_own():
    norm = norm_of(512, torch.bfloat16)
    x = draw(3, 1, 512).detach().bfloat16()
    assert torch.equal(norm(x), F.rms_norm(x, (512,), norm.weight, eps=1e-3))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate a tensor as a query, and its last head as a key."""
    query, key = local_layers.Rotate.apply(x, x[:, -1:], cos, sin)
    assert torch.equal(key, query[:, -1:]) and key.is_contiguous()
    return query


def test_swiglu_by_hand_and_by_finite_differences():
    x = torch.tensor([[math.log(3.0), 0.0, 2.0, 5.0]], dtype=torch.float64)
    # silu(ln 3) = ln 3 x 3/4, silu(0) = 0
    torch.testing.assert_close(
        swiglu(x), torch.tensor([[1.5 * math.log(3.0), 0.0]], dtype=torch.float64)
    )
    assert torch.autograd.gradcheck(swiglu, draw(4, 1, 6))


def test_a_rotation_by_hand_and_by_finite_differences():
    quarter = (
        torch.tensor([[[0.0]]], dtype=torch.float64),
        torch.tensor([[[1.0]]], dtype=torch.float64),
    )
    x = torch.tensor([[[2.0, 5.0]]], dtype=torch.float64)
    torch.testing.assert_close(
        rotate(x, *quarter), torch.tensor([[[-5.0, 2.0]]], dtype=torch.float64)
    )
    angles = draw(3, 1, 2).detach()
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles.cos(), angles.sin()), draw(3, 2, 4))
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles.cos(), angles.sin()), draw(3, 2, 7))
    longer = draw(3, 2, 7)
    turned = rotate(longer, angles.cos(), angles.sin())
    assert torch.equal(turned[..., 4:], longer[..., 4:]), "behind the rotated dims"
    assert torch.equal(turned[..., :4], rotate(longer[..., :4], angles.cos(), angles.sin()))


def test_a_part_of_a_larger_tensor_is_rotated():
    """Queries and keys come as views of one projection."""
    angles = draw(3, 1, 2).detach()
    whole = draw(3, 4, 4)
    part = rotate(whole[:, 1:3], angles.cos(), angles.sin())
    copied = rotate(whole[:, 1:3].clone(), angles.cos(), angles.sin())
    assert torch.equal(part, copied) and part.is_contiguous()
