"""Contract of the fp8 products: each row of both factors has its own scale, and a product is that of the rounded
factors, forward and backward.

The rounding is written out here in float64; torch's own fp8 product runs on the CPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eagle3_train import fp8

OUT, IN = 48, 32


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """bf16, with rows and columns of very different size."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    rows = 10.0 ** torch.randint(-4, 3, (shape[0], 1), generator=generator)
    columns = 2.0 ** torch.randint(-3, 4, (1, shape[1]), generator=generator)
    return (values * rows * columns).bfloat16()


def rounded(values: Tensor, dim: int) -> Tensor:
    """What remains, in float64, of values that share a scale along `dim`: the largest is 448."""
    scale = values.double().abs().amax(dim, keepdim=True) / 448
    return (values.double() / scale).to(torch.float8_e4m3fn).double() * scale


def restored(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0].double() * pair[1].double()


def far_by_row(one: Tensor, other: Tensor) -> float:
    """The largest distance of a row as a share of the second's."""
    return float(((one.double() - other).norm(dim=1) / other.double().norm(dim=1)).max())


# ---- rounding


def test_a_row_keeps_three_bits_of_every_value_and_its_own_range() -> None:
    values = drawn(64, 96)
    quantised, scale = fp8.by_row(values)
    assert (quantised.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scale.shape == (64, 1)
    error = (restored((quantised, scale)) - values.double()).abs()
    # Half of a step of 1/8, or below the smallest normal number half of 2**-9.
    assert bool((error <= torch.maximum(values.double().abs() / 16, scale.double() * 2**-10) * 1.001).all())
    assert bool((quantised.float().abs().amax(1) == 448).all())


def test_a_column_is_a_row_of_the_transpose() -> None:
    values = drawn(64, 96)
    quantised, scale = fp8.by_column(values)
    expected, of_rows = fp8.by_row(values.t().contiguous())
    assert torch.equal(quantised.float(), expected.float())
    assert torch.equal(scale, of_rows)


@pytest.mark.parametrize(("rows", "padded"), [(1, 16), (15, 16), (16, 16), (17, 32), (100, 112)])
def test_columns_are_padded_with_zeros_to_what_the_hardware_takes(rows: int, padded: int) -> None:
    values = drawn(rows, 32)
    quantised, scale = fp8.by_column(values)
    assert quantised.shape == (32, padded)
    assert not quantised[:, rows:].float().any()
    torch.testing.assert_close(restored((quantised, scale))[:, :rows], rounded(values, 0).t(), rtol=1e-6, atol=0)


def test_a_row_of_zeros_stays_zero() -> None:
    values = drawn(4, 32)
    values[1] = 0
    quantised, scale = fp8.by_row(values)
    assert bool(quantised.float().isfinite().all() & scale.isfinite().all())
    assert not restored((quantised, scale))[1].any()
    quantised, scale = fp8.by_column(values.t())
    assert not restored((quantised, scale))[1].any()


def test_gradients_as_small_as_a_long_packs_keep_their_bits() -> None:
    """A mean over 16,384 tokens of values near 1e-7."""
    values = torch.randn(8, 64).bfloat16() * 1e-11
    assert far_by_row(restored(fp8.by_row(values)), values) < 0.04


# ---- products


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a weight and a gradient of their product."""
    return drawn(rows, IN, seed=1), drawn(OUT, IN, seed=2), drawn(rows, OUT, seed=3)


@pytest.mark.parametrize("rows", [1, 7, 16, 50])
def test_products_are_those_of_the_rounded_factors(rows: int) -> None:
    given, plain, gradient = inputs(rows)
    given.requires_grad_()
    plain.requires_grad_()
    out = fp8.linear(given, fp8.Weight.of(plain))
    of_rows, of_weight = torch.autograd.grad(out, [given, plain], gradient)
    assert out.dtype == of_rows.dtype == of_weight.dtype == torch.bfloat16
    x, w, g = given.detach(), plain.detach(), gradient
    assert far_by_row(out.detach(), rounded(x, 1) @ rounded(w, 1).t()) < 0.005
    assert far_by_row(of_rows, rounded(g, 1) @ rounded(w, 0)) < 0.005
    assert far_by_row(of_weight, rounded(g, 0).t() @ rounded(x, 0)) < 0.005


def test_products_are_near_those_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(5)
    given, plain, gradient = (
        torch.randn(shape, generator=generator).bfloat16().requires_grad_()
        for shape in ((50, IN), (OUT, IN), (50, OUT))
    )
    ours, theirs = fp8.linear(given, fp8.Weight.of(plain)), nn.functional.linear(given, plain)
    for one, other in zip(
        (ours, *torch.autograd.grad(ours, [given, plain], gradient)),
        (theirs, *torch.autograd.grad(theirs, [given, plain], gradient)),
        strict=True,
    ):
        assert float((one.detach().float() - other.detach().float()).norm() / other.detach().float().norm()) < 0.05


@pytest.mark.parametrize(("of_rows", "of_weight"), [(True, True), (True, False), (False, True), (False, False)])
def test_only_the_products_that_are_asked_for_are_made(
    of_rows: bool, of_weight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    product = fp8._product
    monkeypatch.setattr(fp8, "_product", lambda *factors: made.append(1) or product(*factors))
    given, plain, gradient = inputs(16)
    out = fp8.linear(given.requires_grad_(of_rows), fp8.Weight.of(plain.requires_grad_(of_weight)))
    assert len(made) == 1
    assert out.requires_grad == (of_rows or of_weight)
    if out.requires_grad:
        out.backward(gradient)
    assert len(made) == 1 + of_rows + of_weight
    assert (given.grad is not None, plain.grad is not None) == (of_rows, of_weight)


def test_factors_lie_row_by_row_whatever_the_gradient_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the GPU's kernel asks; a CPU takes any layout."""
    product = fp8._product

    def checked(*factors: tuple[Tensor, Tensor]) -> Tensor:
        assert all(part.is_contiguous() for factor in factors for part in factor)
        return product(*factors)

    monkeypatch.setattr(fp8, "_product", checked)
    given, plain, gradient = inputs(20)
    factors = [given.requires_grad_(), plain.requires_grad_()]
    out = fp8.linear(given, fp8.Weight.of(plain))
    first = torch.autograd.grad(out, factors, gradient, retain_graph=True)
    second = torch.autograd.grad(out, factors, gradient.t().contiguous().t())
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
