"""Tails that `hypothesis` draws, values and gradients against PyTorch in float64; and tails that cannot be fused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import expressions_in_pytorch
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tail_checks import LAST, C, fused, operand
from torch import Tensor, nn

import tconv3d

FULL = (2, C, 5, 7, 9)


class State(nn.Module):
    """What operators of generated tails capture."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(6)
        self.scale = nn.Parameter(torch.rand(C, 1, 1, 1, generator=random) + 0.5)
        self.shift = nn.Parameter(torch.randn(C, 1, 1, 1, generator=random))
        self.whole = nn.Parameter(torch.randn(FULL, generator=random))
        self.embedding = nn.Parameter(torch.randn((1, *FULL[1:]), generator=random))
        self.weights = nn.Parameter(torch.rand((2, 1, *FULL[2:]), generator=random) + 0.5)
        self.batch_norm = nn.BatchNorm3d(C)
        self.group_norm = nn.GroupNorm(2, C)
        self.prelu = nn.PReLU(C)
        self.register_buffer("mask", torch.rand(FULL, generator=random) > 0.5)


# Operators of one tensor, of the state, and of a style [N, C] and a residual that are passed to the tail.
Step = Callable[[Tensor, State, Tensor, Tensor], Tensor]
SPACE = (2, 3, 4)
STEPS: dict[str, Step] = {
    "silu": lambda y, s, v, r: F.silu(y),
    "gelu": lambda y, s, v, r: F.gelu(y),
    "elu": lambda y, s, v, r: F.elu(y, 0.7),
    "softplus": lambda y, s, v, r: F.softplus(y),
    "hardswish": lambda y, s, v, r: F.hardswish(y),
    "clamp": lambda y, s, v, r: y.clamp(-0.8, 0.9),
    "leaky relu in place": lambda y, s, v, r: F.leaky_relu(y + 0, 0.1, inplace=True),
    "prelu": lambda y, s, v, r: s.prelu(y),
    "exponential": lambda y, s, v, r: torch.exp(-y * y) + y,
    "logarithm": lambda y, s, v, r: torch.log1p(y.abs()),
    "power": lambda y, s, v, r: (y * y + 1) ** 0.3,
    "affine map": lambda y, s, v, r: y * s.scale + s.shift,
    "captured tensor": lambda y, s, v, r: torch.tanh(y + s.whole),
    "embedding": lambda y, s, v, r: F.relu(y + s.embedding),
    "weights of positions": lambda y, s, v, r: y * s.weights,
    "style": lambda y, s, v, r: y * (1 + v[..., None, None, None]),
    "residual": lambda y, s, v, r: F.relu(y + r),
    "gate": lambda y, s, v, r: y * torch.sigmoid(r) + F.silu(r),
    "choice": lambda y, s, v, r: torch.where(y > s.shift, y, 0.3 * r),
    "batch norm": lambda y, s, v, r: s.batch_norm(y),
    "group norm": lambda y, s, v, r: s.group_norm(y),
    "instance norm": lambda y, s, v, r: F.instance_norm(y),
    "centred": lambda y, s, v, r: y - y.mean(SPACE, keepdim=True),
    "squeezed": lambda y, s, v, r: y * torch.sigmoid(0.3 * y.mean(SPACE))[..., None, None, None],
    "largest": lambda y, s, v, r: y - y.amax(SPACE, keepdim=True),
    "softmax over channels": lambda y, s, v, r: y.softmax(1) * 3,
    "log-softmax over channels": lambda y, s, v, r: F.log_softmax(y, 1) + y,
    "centred over channels": lambda y, s, v, r: y - y.mean(1, keepdim=True),
    "both branches": lambda y, s, v, r: F.silu(y) + 0.5 * torch.tanh(y * s.scale),
    "view": lambda y, s, v, r: torch.sigmoid(y.flatten(2) * 2).view(y.shape),
    "PyTorch's part": lambda y, s, v, r: y.cumsum(3) * 0.3,
}
ENDS: dict[str, Step] = {
    "nothing": lambda y, s, v, r: y,
    "mean over space": lambda y, s, v, r: y.mean(SPACE),
    "sum per channel": lambda y, s, v, r: y.sum((0, *SPACE)),
    "log-sum-exp over channels": lambda y, s, v, r: torch.tanh(y.logsumexp(1)),
    "largest channel": lambda y, s, v, r: y.amax(1, keepdim=True),
    "mean of everything": lambda y, s, v, r: y.mean(),
}  # fmt: skip


class Generated(nn.Module):
    """A tail of named steps."""

    def __init__(self, steps: list[str], end: str) -> None:
        super().__init__()
        self.steps, self.end, self.state = steps, end, State()

    def forward(self, z: Tensor, style: Tensor, residual: Tensor) -> Tensor:
        for name in self.steps:
            z = STEPS[name](z, self.state, style, residual)
        return ENDS[self.end](z, self.state, style, residual)


def results(model: nn.Module, x: Tensor, passed: list[Tensor], record: bool) -> list[Tensor]:
    """Returns result, gradients and statistics of a call."""
    x, *passed = (each.detach().requires_grad_(record) for each in (x, *passed))
    with torch.set_grad_enabled(record):
        y = model(x, *passed)
    if not record:
        return [y, *model.buffers()]
    tensors = [x, *passed, *model.parameters()]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    found = torch.autograd.grad(y, tensors, grad, allow_unused=True)
    zeros = [torch.zeros_like(like) if each is None else each for each, like in zip(found, tensors, strict=True)]
    return [y.detach(), *zeros, *model.buffers()]


def compare(steps: list[str], end: str, last: bool, training: bool) -> None:
    dtype = torch.float64
    random = torch.Generator().manual_seed(4)
    passed = [torch.randn(shape, generator=random, dtype=dtype) for shape in ((2, C), FULL)]
    x = operand(dtype, LAST if last else torch.contiguous_format)
    model = fused(Generated(steps, end), dtype).train(training)
    for record in (False, True):
        plain = copy.deepcopy(model)
        with tconv3d.use_backend("torch"):
            expected = results(plain, x, passed, record)
        with tconv3d.use_backend("emulator"):
            found = results(model, x, passed, record)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)
        if not record:
            with tconv3d.use_backend("emulator"):
                why = model.report(x, *passed).why_not
            assert bool(why) == (training and steps.count("batch norm") > 1), why  # statistics are updated twice


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=5),
    st.sampled_from(sorted(ENDS)),
    st.booleans(),
    st.booleans(),
)
def test_generated_tails(steps: list[str], end: str, last: bool, training: bool) -> None:
    """How tails are divided into stages and passes: their expressions are evaluated by PyTorch in float64."""
    with pytest.MonkeyPatch.context() as patch:
        called = expressions_in_pytorch.install(patch)
        compare(steps, end, last, training)
        assert called or steps.count("batch norm") > 1


@settings(max_examples=2)
@given(st.lists(st.sampled_from(sorted(set(STEPS) - {"power"})), min_size=3, max_size=4))
def test_generated_tails_in_kernels(steps: list[str]) -> None:
    compare(steps, "nothing", last=False, training=True)


@pytest.mark.parametrize("step", sorted(STEPS))
def test_every_step_alone(step: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        expressions_in_pytorch.install(patch)
        compare([step], "nothing", last=step > "l", training=True)


# ---- tails that cannot be fused


def unfused(tail: Callable[..., Any], *passed: Any) -> tuple[tconv3d.FuseReport, Any]:
    """Returns the report of a tail, and the error that its call raises, if it raises one."""
    model, x = fused(tail), operand(torch.float32)
    with tconv3d.use_backend("emulator"):
        report = model.report(x, *passed)
        try:
            model(x, *passed)
        except Exception as error:
            return report, error
    return report, None


def test_control_flow_that_depends_on_values() -> None:
    report, error = unfused(lambda z: z if z.sum() > 0 else -z)
    assert report.why_not.startswith("the tail cannot be traced") and error is None
    report, error = unfused(lambda z: z * z.mean().item())
    assert report.why_not.startswith("the tail cannot be traced") and error is None


def test_a_tensor_that_does_not_broadcast() -> None:
    three = torch.ones(3)
    for tail, passed in ((lambda z: z + three, ()), (lambda z, r: z + r, (torch.ones(2, 3, 1, 1, 1),))):
        report, error = unfused(tail, *passed)
        assert "broadcast" in report.why_not
        assert isinstance(error, RuntimeError) and "must match the size" in str(error)


def test_a_tensor_on_another_device() -> None:
    elsewhere = torch.ones(C, 1, 1, 1, device="meta")
    for report, error in (unfused(lambda z: z * elsewhere), unfused(lambda z, r: z * r, elsewhere)):
        assert "device" in report.why_not and isinstance(error, RuntimeError) and "device" in str(error)


def test_a_tail_that_raises() -> None:
    def tail(z: Tensor) -> Tensor:
        raise KeyError("no such thing")

    report, error = unfused(tail)
    assert "KeyError" in report.why_not and isinstance(error, KeyError)


def test_a_tail_that_writes_to_a_passed_tensor() -> None:
    """The tensor is written to, once in each call."""
    residual = torch.zeros(FULL)
    report, error = unfused(lambda z, r: r.add_(1) + z, residual)
    assert "writes to a tensor that others can see" in report.why_not and error is None
    assert torch.equal(residual, torch.ones(FULL))
