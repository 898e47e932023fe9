"""Tails under autocast: values, types and gradients beside the same layers one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tail_checks import LAST, C, fused, operand
from torch import Tensor, nn

import tconv3d
from tconv3d.tails.tracing import trace

TAILS: dict[str, Callable[[], Callable[..., Any]]] = {
    "GroupNorm, SiLU": lambda: nn.Sequential(nn.GroupNorm(2, C), nn.SiLU()),
    "BatchNorm, ReLU": lambda: nn.Sequential(nn.BatchNorm3d(C), nn.ReLU()),
    "exp, log, pow": lambda: lambda z: torch.log1p(z.clamp(-2, 2).exp() + z.pow(2)),
    "softmax": lambda: lambda z: z.softmax(1),
    "average pool in float32": lambda: lambda z: F.avg_pool3d(F.silu(z), 2),
    "convolution behind": lambda: nn.Sequential(nn.SiLU(), nn.Conv3d(C, 3, 1)),
}
DTYPES = (torch.bfloat16, torch.float16)


def step(model: nn.Module, x: Tensor, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Returns result, gradients and buffers of a training step whose forward pass is under autocast."""
    x = x.clone().requires_grad_()
    with tconv3d.use_backend(backend):
        with torch.autocast("cpu", dtype):
            y = model(x)
        y.float().square().mean().backward()
    named = {name: each.grad for name, each in model.named_parameters()}
    return {"result": y.detach(), "input": x.grad, **named, **dict(model.named_buffers())}


@pytest.mark.parametrize("name", TAILS)
def test_a_training_step(name: str) -> None:
    dtype = DTYPES[len(name) % 2]
    model, x = fused(TAILS[name]()), operand(torch.float32, LAST)
    exact = step(copy.deepcopy(model).double(), x.double(), dtype, "torch")
    rival = step(copy.deepcopy(model), x, dtype, "torch")
    ours = step(model, x, dtype, "emulator")
    for key, value in ours.items():
        assert value.dtype == rival[key].dtype, key
        if not value.is_floating_point():
            assert torch.equal(value, rival[key]), key
            continue
        errors = [(each[key].double() - exact[key]).norm().item() for each in (ours, rival)]
        size = exact[key].norm().clamp_min(2e-2 * exact[key].numel() ** 0.5).item()
        assert errors[0] <= max(2 * errors[1], 1e-2 * size), (key, errors, size)


@pytest.mark.parametrize("name", TAILS)
def test_values_without_gradients(name: str) -> None:
    dtype = DTYPES[len(name) % 2]
    model, x = fused(TAILS[name]()).eval(), operand(torch.float32)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        with torch.autocast("cpu", dtype):
            report, first, again = model.report(x), model(x), model(x)
            expected = model.tail(model.convolution(x))
        assert not report.why_not and first.dtype == expected.dtype and torch.equal(first, again)
        torch.testing.assert_close(first, expected, rtol=3e-2, atol=2e-2)
        assert model(x).dtype == torch.float32  # a trace under autocast is not used without it
        model.convolution.weight.mul_(2)  # a kept cast of the weight is not used for another weight
        with torch.autocast("cpu", dtype):
            torch.testing.assert_close(model(x), model.tail(model.convolution(x)), rtol=3e-2, atol=2e-2)


def test_the_fused_part_is_recorded_as_one_node() -> None:
    model, x = fused(nn.Sequential(nn.GroupNorm(2, C), nn.SiLU())), operand(torch.float32)
    with tconv3d.use_backend("emulator"), torch.autocast("cpu", torch.bfloat16):
        assert type(model(x).grad_fn).__name__ == "ChainBackward"


def test_a_gradient_scaler() -> None:
    """Scaled gradients that are finite change the weights as unscaled ones do; infinite ones skip the step."""
    x = operand(torch.float32)
    weights = []
    for scale in (1.0, 2.0**10, 2.0**40):
        model = fused(nn.Sequential(nn.GroupNorm(2, C), nn.SiLU()))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with tconv3d.use_backend("emulator"):
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
        before = model.convolution.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        weights.append((before, model.convolution.weight.detach()))
    assert torch.equal(*weights[2]) and not torch.equal(*weights[0])
    torch.testing.assert_close(weights[1][1], weights[0][1], rtol=1e-3, atol=1e-4)


def test_autocast_of_a_gpu_is_traced_with_its_own_rules() -> None:
    """On a GPU autocast runs softmax in float32 and leaves its result so; no GPU is needed to trace it."""
    usual = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        shape = (2, C, 5, 7, 9)
        strides = torch.empty(shape).stride()
        graph = trace(lambda z: z.softmax(1), shape, strides, torch.bfloat16, torch.device("cuda")).graph
    finally:
        torch.set_autocast_enabled("cuda", usual[0])
        torch.set_autocast_dtype("cuda", usual[1])
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    assert result.meta["val"].dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tail_in_float32_behind_a_convolution_in_16_bits(dtype: torch.dtype) -> None:
    """Autocast runs norms so on a GPU. A gradient in float32 is rounded to bfloat16, but not to float16."""
    norm = nn.GroupNorm(2, C)
    model = fused(lambda z: F.silu(norm(z.float())))
    model.convolution.to(dtype)
    x = operand(dtype, LAST).requires_grad_()
    large = 1e5 if dtype == torch.float16 else 1.0  # more than float16 holds
    exact = copy.deepcopy(norm).double()
    layer = copy.deepcopy(model.convolution).double()
    wide = x.detach().double().requires_grad_()
    with tconv3d.use_backend("emulator"):
        report, y = model.report(x), model(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    grad[0, 0, 0, 0, 0] = large
    ours = torch.autograd.grad(y, [norm.weight, norm.bias, *([x] if large == 1 else [])], grad)
    plain = F.silu(exact(F.conv_transpose3d(wide, layer.weight, layer.bias, 2, 1)))
    wanted = torch.autograd.grad(plain, [exact.weight, exact.bias, *([wide] if large == 1 else [])], grad.double())
    for one, other in zip((y, *ours), (plain, *wanted), strict=True):
        assert (one.double() - other).norm() <= 1e-2 * other.norm()
    if dtype == torch.bfloat16:
        assert len([text for text in report.gradients if text.startswith("backward")]) == 2
        assert not any("in PyTorch" in text for text in report.gradients)
