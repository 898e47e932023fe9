"""Vectors of an epilogue that are combined before its kernel runs (tconv3d/tails/combining.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from layers import poisoned
from preferred import only
from tail_checks import LAST, close
from torch import Tensor, nn

import tconv3d
from tconv3d.tails.combining import combine
from tconv3d.tails.expressions import VALUE, Expression, number, vector
from tconv3d.tools.bench.precision import precision


def made(name: str, *operands: Expression) -> Expression:
    return Expression(name, operands)


V = [vector(i) for i in range(4)]
BATCH_NORM = made("Sum", made("Product", made("Product", made("Difference", VALUE, V[0]), V[1]), V[2]), V[3])
SCALED = made("Sum", made("Product", VALUE, V[0]), V[1])
HALF = number(0.5)
CASES = {
    # What is combined; the expressions with and without a sum before the product, as people read them.
    "batch norm": (
        BATCH_NORM,
        "Sum<Product<Value, Vectored<0>>, Vectored<1>>",
        "Sum<Product<Sum<Value, Vectored<0>>, Vectored<1>>, Vectored<2>>",
    ),
    "nothing to combine": (SCALED, str(SCALED), str(SCALED)),
    "numbers alone": (
        made("Sum", made("Product", VALUE, HALF), HALF),
        *2 * ("Sum<Product<Value, Number<1, -1>>, Number<1, -1>>",),
    ),
    "numbers join vectors": (
        made("Product", made("Quotient", made("Negative", VALUE), V[0]), HALF),
        *2 * ("Product<Value, Vectored<0>>",),
    ),
    "a vector less": (
        made("Sum", made("Sum", VALUE, V[0]), made("Product", V[0], V[1])),
        "Sum<Value, Vectored<0>>",
        "Sum<Value, Vectored<0>>",
    ),
    "a vector more": (  # (x + v) * v would take two vectors as x * v + v * v
        made("Product", made("Sum", VALUE, V[0]), V[0]),
        *2 * ("Product<Sum<Value, Vectored<0>>, Vectored<0>>",),
    ),
    "between other operators": (
        made(
            "Largest",
            made("Product", made("Product", made("Absolute", VALUE), V[0]), V[1]),
            made("Difference", V[2], V[3]),
        ),
        *2 * ("Largest<Product<Absolute<Value>, Vectored<0>>, Vectored<1>>",),
    ),
    "reversed difference": (
        made("Product", made("Difference", V[0], VALUE), V[1]),
        "Sum<Product<Value, Vectored<0>>, Vectored<1>>",
        "Sum<Product<Value, Vectored<0>>, Vectored<1>>",
    ),
    "a quotient by the value": (made("Quotient", V[0], VALUE), *2 * ("Quotient<Vectored<0>, Value>",)),
}


def computed(expression: Expression, x: Tensor, vectors: list[Tensor]) -> Tensor:
    """Computes an expression in float64."""
    others: dict[str, Callable[..., Tensor]] = {"Largest": torch.maximum, "Absolute": torch.abs}
    if expression.name in others:
        return others[expression.name](*(computed(each, x, vectors) for each in expression.operands))
    if not expression.operands:
        return expression.evaluate(x, vectors)
    inner = [computed(each, x, vectors) for each in expression.operands]
    leaves = tuple(vector(i) for i in range(len(inner)))
    return Expression(expression.name, leaves).evaluate(x, inner)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("short", [True, False])
def test_combined_expressions_compute_the_same(name: str, short: bool) -> None:
    expression, *expected = CASES[name]
    found, vectors = combine(expression, short)
    assert str(found) == expected[not short]
    torch.manual_seed(3)
    x, *old = torch.randn(5, 50, dtype=torch.float64)
    new = [each.evaluate(x, old) for each in vectors]
    assert torch.allclose(computed(found, x, new), computed(expression, x, old), rtol=1e-12, atol=1e-12)


def batch_norm(channels: int) -> nn.BatchNorm3d:
    norm = nn.BatchNorm3d(channels).eval()
    for each in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert each is not None
        each.data = torch.rand(channels) + 0.5
    return norm


# Kernel, type of the layer, layout, input and output channels, kernel size, vectors of an inference BatchNorm.
BLOCKS = {
    "halo": ("halo", "tf32", torch.contiguous_format, 16, 24, 3, 3),
    "halo, channels last": ("halo", "bfloat16", LAST, 16, 24, 3, 2),
    "few_inputs": ("few_inputs", "tf32", torch.contiguous_format, 3, 24, 3, 3),
    "few_inputs, channels last": ("few_inputs", "float16", LAST, 3, 24, 3, 2),
    "up": ("up", "bfloat16", torch.contiguous_format, 16, 24, 2, 2),
    "up, channels last": ("up", "tf32", LAST, 16, 24, 2, 3),
    "mma": ("mma", "tf32", torch.contiguous_format, 16, 12, 3, 3),
    "mma, channels last": ("mma", "bfloat16", LAST, 16, 24, 3, 2),
    "direct": ("direct", "float64", torch.contiguous_format, 3, 5, 3, 3),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("residual", [False, True])
def test_inference_batch_norm_reads_few_vectors(name: str, residual: bool) -> None:
    kernel, kind, layout, channels_in, channels, size, count = BLOCKS[name]
    torch.manual_seed(4)
    layer = nn.ConvTranspose3d(channels_in, channels, size, stride=2, padding=size // 3)
    layer.weight.data = torch.randint(-2, 3, layer.weight.shape) / 8.0  # all types hold every sum
    norm = batch_norm(channels)
    layer.bias.data = torch.randint(-2, 3, (channels,)) / 8.0
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    x = torch.randint(-2, 3, (2, channels_in, 3, 4, 6)).double()
    z = layer.double()(x).detach()
    layer, norm = (each.to(dtype).to(memory_format=layout) for each in (layer, norm))  # type: ignore[call-overload]
    other = torch.randn(z.shape).to(dtype).to(memory_format=layout)
    extra = (other,) if residual else ()

    def tail(z: Tensor, *others: Tensor) -> Tensor:
        return F.leaky_relu(norm(z) + sum(others), 0.2)

    block = tconv3d.fuse(layer, tail)
    given = x.to(dtype).to(memory_format=layout)
    with torch.no_grad(), only(kernel), precision(kind), tconv3d.use_backend("emulator"), poisoned():
        report, ours = block.report(given, *extra), block(given, *extra)
    assert f"Vectored<{count - 1}>" in report.kernel and f"Vectored<{count}>" not in report.kernel
    norm.double()
    close(ours, tail(z, *(each.double() for each in extra)).detach())


def test_passed_vectors_and_exact_orders_are_not_combined() -> None:
    layer = nn.ConvTranspose3d(3, 4, 2, stride=2)
    x, vectors = torch.randn(1, 3, 2, 2, 2), torch.randn(4, 1, 4, 1, 1, 1)

    def tail(z: Tensor, *given: Tensor) -> Tensor:
        mean, factor, weight, bias = given or vectors
        return F.relu((z - mean) * factor * weight + bias)

    with torch.no_grad(), tconv3d.use_backend("emulator"):
        assert "Vectored<3>" not in tconv3d.fuse(layer, tail).report(x).kernel
        assert "Vectored<3>" in tconv3d.fuse(layer, tail, exact_order=True).report(x).kernel
        assert "Vectored<3>" in tconv3d.fuse(layer, tail).report(x, *vectors).kernel
