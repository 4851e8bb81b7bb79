"""Products of linear layers on CPU against float64."""

from __future__ import annotations

import pytest
import torch

from rlmath.distributed import cpu_matmul
from rlmath.distributed.cpu_matmul import linear, uses_onednn, weight_gradient

LARGE = (1024, 128, 256)
"""T, K and N whose product is oneDNN's."""


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN also on processors on which it is not faster."""
    monkeypatch.setattr(cpu_matmul, "ONEDNN_IS_FASTER", True)


def tensors(
    T: int, K: int, N: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(T, K), torch.randn(N, K), torch.randn(N), torch.randn(T, N)


@pytest.mark.parametrize(
    "sizes", [LARGE, (3, 4, 5), (1000, 160, 1), (1, 5000, 4000), (2049, 101, 99)]
)
def test_products_equal_those_in_float64(sizes: tuple[int, int, int]) -> None:
    T, K, N = sizes
    x, weight, bias, grad = tensors(*sizes)
    assert uses_onednn(x, N) == (T * K * N >= cpu_matmul.LEAST_MULTIPLICATIONS)
    for product, expected in (
        (linear(x, weight), x.double() @ weight.double().t()),
        (linear(x, weight, bias), x.double() @ weight.double().t() + bias.double()),
        (linear(grad, weight.t()), grad.double() @ weight.double()),
        (weight_gradient(grad, x), grad.double().t() @ x.double()),
    ):
        assert product.shape == expected.shape and product.dtype == torch.float32
        # Sums of 5,000 products in the order of AVX2's 8 lanes are off by 1.1e-6.
        assert (product - expected).norm() <= 3e-6 * expected.norm(), (
            "float32 has 24 bits, bfloat16 8"
        )


def test_more_dimensions_and_strides() -> None:
    x, weight, _, grad = tensors(*LARGE)
    turned = x.view(512, 2, 128).transpose(0, 1)
    doubled = torch.cat((grad, grad), 1)[:, ::2]
    for product, expected in (
        (linear(turned, weight), turned.double() @ weight.double().t()),
        (weight_gradient(doubled, x), doubled.double().t() @ x.double()),
    ):
        assert (
            product.shape == expected.shape
            and (product - expected).norm() <= 1e-6 * expected.norm()
        )


def test_the_same_product_again_has_the_same_bits() -> None:
    x, weight, _, grad = tensors(*LARGE)
    for _ in range(3):
        assert torch.equal(linear(x, weight), linear(x.clone(), weight.clone()))
        assert torch.equal(weight_gradient(grad, x), weight_gradient(grad.clone(), x.clone()))


def test_other_number_formats_are_torchs() -> None:
    x, weight, _, _ = (tensor.double() for tensor in tensors(*LARGE))
    assert not uses_onednn(x, 256) and torch.equal(
        linear(x, weight), torch.nn.functional.linear(x, weight)
    )


@pytest.mark.parametrize(
    ("vendor", "flags", "faster"),
    [
        ("AuthenticAMD", "avx2 avx512f", True),
        ("AuthenticAMD", "avx2", False),
        ("GenuineIntel", "avx512f", False),
    ],
)
def test_onednn_is_for_processors_whose_avx512_mkl_does_not_use(
    vendor: str, flags: str, faster: bool
) -> None:
    assert cpu_matmul.mkl_lacks_avx512(f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n") == faster


def test_where_it_is_not_faster_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "ONEDNN_IS_FASTER", False)
    x, weight, bias, grad = tensors(*LARGE)
    assert not uses_onednn(x, 256)
    assert torch.equal(linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    assert torch.equal(weight_gradient(grad, x), grad.t() @ x)


def test_in_bfloat16_products_of_more_dimensions_are_those_of_two() -> None:
    x, weight, bias, _ = (tensor.bfloat16() for tensor in tensors(*LARGE))
    rows = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(linear(x.view(512, 2, 128), weight, bias), rows.view(512, 2, -1))
