"""A convolution of 16 bits with a GroupNorm whose parameters are float32: the types of PyTorch's three layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tconv3d
from tconv3d.api.explain import find_gpu, launches

HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-2, torch.bfloat16: 2e-2, torch.float16: 4e-3}
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}


def layers(dtype: torch.dtype, affine: bool = True) -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(nn.ConvTranspose3d(4, 6, 3, stride=2), nn.ReLU(), nn.GroupNorm(2, 6, affine=affine))
    for parameter in model[2].parameters():
        nn.init.normal_(parameter)
    model[0].to(dtype)
    return model


def training_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    y = model(x)
    torch.manual_seed(6)
    grad = torch.randn(y.shape).to(y)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], grad)]


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", HALVES)
def test_result_and_gradients_as_of_the_three_layers(dtype: torch.dtype, memory_format: str, ours: str) -> None:
    x = torch.randn(2, 4, 2, 3, 4).to(dtype)
    expected = training_step(layers(dtype), x)
    exact = training_step(layers(dtype).double(), x.double())
    model = tconv3d.accelerate(layers(dtype)).to(ours)
    found = training_step(model, x.to(ours).contiguous(memory_format=FORMATS[memory_format]))
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert [t.dtype for t in found] == [dtype] * 4 + [torch.float32] * 2
    for mine, theirs in zip(found, exact, strict=True):
        assert relative_error(mine.cpu(), theirs) < TOLERANCE[mine.dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_without_gradients(dtype: torch.dtype, ours: str) -> None:
    x = torch.randn(2, 4, 2, 3, 4).to(dtype)
    exact = layers(dtype).double()(x.double()).detach()
    with torch.no_grad():
        y = tconv3d.accelerate(layers(dtype)).to(ours)(x.to(ours))
    assert y.dtype is dtype and relative_error(y.cpu(), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_gradients_keep_their_24_bits(dtype: torch.dtype, ours: str) -> None:
    """Sums of gradients, added up in float32 and not rounded to 16 bits, are exact in this case."""
    x, w = torch.zeros(1, 1, 2, 2, 2, dtype=dtype, device=ours), torch.zeros(1, 2, 1, 1, 1, dtype=dtype, device=ours)
    bias = torch.tensor([2.0**-12, 0.0], device=ours)
    grads = torch.full((1, 2, 2, 2, 2), 1 + 2.0**-7, device=ours, dtype=dtype)
    norm_weight, norm_bias = (torch.ones(2, device=ours, requires_grad=True), bias.requires_grad_())
    y = tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 2, norm_weight, norm_bias)
    assert y.flatten().tolist() == [2.0**-12] * 8 + [0.0] * 8
    (found,) = torch.autograd.grad(y, norm_bias, grads)
    assert found.tolist() == [float(grads[0, 0].double().sum()), float(grads[0, 1].double().sum())]


def test_second_derivatives(ours: str) -> None:
    x = torch.randn(1, 4, 2, 2, 3)

    def second(model: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        parameters = [x, *model.parameters()]
        first = torch.autograd.grad((model(x) ** 2).sum(), parameters, create_graph=True)
        return list(torch.autograd.grad(sum((g.double() ** 2).sum() for g in first), parameters))

    exact = second(layers(torch.bfloat16).double(), x.bfloat16().double())
    found = second(tconv3d.accelerate(layers(torch.bfloat16)).to(ours), x.to(ours).bfloat16())
    assert [t.dtype for t in found] == [torch.bfloat16] * 3 + [torch.float32] * 2
    for mine, theirs in zip(found, exact, strict=True):
        assert relative_error(mine.cpu(), theirs) < 0.1


def test_compiled(ours: str) -> None:
    x = torch.randn(1, 4, 2, 2, 3, device=ours, dtype=torch.bfloat16)
    model = tconv3d.accelerate(layers(torch.bfloat16)).to(ours)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(training_step(compiled, x), training_step(model, x), strict=True):
        assert mine.dtype is theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


MIXTURES = [
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float64, torch.float64),
    (torch.float64, torch.float32, torch.float32),
    (torch.bfloat16, torch.float16, torch.float16),
    (torch.bfloat16, torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize("types", MIXTURES, ids=lambda types: " ".join(str(t).removeprefix("torch.") for t in types))
def test_mixtures_that_pytorch_refuses(types: tuple[torch.dtype, ...], ours: str) -> None:
    x, w = (torch.ones(shape, dtype=types[0]) for shape in ((1, 2, 2, 2, 2), (2, 2, 1, 1, 1)))
    norm = [torch.ones(2, dtype=kind) for kind in types[1:]]
    with pytest.raises(RuntimeError):
        F.group_norm(F.conv_transpose3d(x, w), 1, *norm)
    x, w, *norm = (t.to(ours) for t in (x, w, *norm))
    with pytest.raises(RuntimeError, match="should be the same"):
        tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 1, *norm)


@pytest.mark.parametrize("dtype", HALVES)
def test_kernels_for_the_norm_are_planned_for_the_parameters_type(dtype: torch.dtype) -> None:
    block = tconv3d.ConvTranspose3dReLUGroupNorm(32, 32, 3, 8, dtype=dtype, device="meta")
    block.group_norm.float()
    x = torch.empty(1, 32, 8, 8, 8, device="meta", dtype=dtype)
    kinds = {dict(launch.constants).get("Parameter") for launch in launches(block, x, find_gpu("H200", x)[0])}
    assert kinds == {None, "float"}
