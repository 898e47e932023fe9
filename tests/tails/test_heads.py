"""Calls that record gradients and store what gradients need in the place of the convolution's plain result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import poisoned
from tail_checks import LAST, C, close, fused, operand
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tconv3d
from tconv3d.api.fuse import FusedTail
from tconv3d.tails import recording

FULL = (2, C, 5, 7, 9)
BIAS = torch.linspace(-1, 1, C).view(C, 1, 1, 1)
# Tails whose beginning the convolution's kernel computes, with the shapes of what is passed to them.
STORED: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "relu": ((), F.relu),
    "sigmoid": ((), torch.sigmoid),
    "tanh of a sum": ((FULL,), lambda z, r: torch.tanh(z + r)),
    "relu with a bias, norm": ((), lambda z: F.silu(F.group_norm(F.relu(z + BIAS.to(z.dtype)), 2))),
    "residual, norm": ((FULL,), lambda z, r: F.relu(F.group_norm(z + r, 2))),
    "residual of one channel": (((2, 1, 5, 7, 9),), lambda z, r: F.relu(z + r).softmax(1)),
    "leaky relu, norm": ((), lambda z: F.instance_norm(F.leaky_relu(z, 0.2))),
    "leaky relu, pool": ((), lambda z: F.avg_pool3d(F.leaky_relu(z, 0.01), 2)),
    "exponential, sum": ((), lambda z: torch.exp(-z).sum(1)),
    "sum": ((FULL,), lambda z, r: z + r),
}
# Tails whose gradients need the plain result, or whose result somebody else may write to.
PLAIN: dict[str, Callable[[Tensor], Any]] = {
    "silu": F.silu,
    "leaky relu": lambda z: F.leaky_relu(z, 0.2),
    "falling leaky relu": lambda z: F.instance_norm(F.leaky_relu(z, -0.2)),
    "clamp, norm": lambda z: F.group_norm(torch.clamp(z, -0.5, 0.5), 2),
    "two functions": lambda z: torch.relu(z) + torch.cos(z),
}
INSIDE = "in the convolution's kernel, for gradients too"


def step(model: nn.Module, x: Tensor, passed: list[Tensor], backend: str) -> list[Tensor]:
    with tconv3d.use_backend(backend), poisoned():
        y = model(x, *passed)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, [x, *passed, *model.parameters()], grad)]


def check(model: FusedTail, x: Tensor, passed: list[Tensor], factor: float, inside: bool) -> None:
    wide = [each.detach().double().requires_grad_() for each in (x, *passed)]
    wanted = step(copy.deepcopy(model).double(), wide[0], wide[1:], "torch")
    found = step(model, x, passed, "emulator")
    with tconv3d.use_backend("emulator"):
        texts = model.report(x, *passed).gradients
    assert any(INSIDE in text for text in texts) == inside, texts
    for one, other in zip(found, wanted, strict=True):
        close(one, other, factor, 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STORED)
def test_what_is_stored(name: str, dtype: torch.dtype) -> None:
    shapes, tail = STORED[name]
    layout = LAST if len(name) % 2 else torch.contiguous_format
    random = torch.Generator().manual_seed(7)
    passed = [torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes]
    factor = 20 if dtype is torch.float32 else 6
    check(fused(tail, dtype), operand(dtype, layout).requires_grad_(), passed, factor, True)


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_stored_as_it_is(name: str) -> None:
    check(fused(PLAIN[name]), operand(torch.float32).requires_grad_(), [], 20, False)


def test_the_check_finds_a_head_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign of SiLU's operand is not that of its result, and neither is the operand itself."""
    model = fused(lambda z: F.instance_norm(F.silu(z)))
    check(model, operand(torch.float32).requires_grad_(), [], 20, False)
    monkeypatch.setattr(recording, "head_for", lambda graph, wanted, needed, heads: heads[-1])
    with pytest.raises(AssertionError, match="error"):
        check(fused(model.tail), operand(torch.float32).requires_grad_(), [], 20, True)


def saved_volumes(model: FusedTail, x: Tensor, *passed: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the result of a call, and the tensors of its size that autograd saves."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with tconv3d.use_backend("emulator"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x, *passed)
    return y, [each for each in saved if each.shape == y.shape and each.dtype is y.dtype]


def test_no_volume_is_saved_beside_the_result() -> None:
    x, residual = operand(torch.float32), torch.randn(FULL, requires_grad=True)
    y, saved = saved_volumes(fused(F.relu), x)
    assert [each.data_ptr() for each in saved] == [y.data_ptr()]
    _, saved = saved_volumes(fused(lambda z, r: z + r), x, residual)
    assert [each.data_ptr() for each in saved] == [residual.data_ptr()]
    _, saved = saved_volumes(fused(F.silu), x)
    assert len(saved) == 1


def test_results_are_written_to_as_behind_pytorchs_layers() -> None:
    """Whoever writes to a result gets an error where PyTorch's layers raise one, and right gradients elsewhere."""
    x, residual = operand(torch.float32).requires_grad_(), torch.randn(FULL)
    tails: dict[str, tuple[Any, bool]] = {
        "relu": (F.relu, True),
        "leaky relu": (lambda z: F.leaky_relu(z, 0.2), False),
        "sum": (lambda z: z + residual, False),
    }
    for tail, refused in tails.values():
        found = []
        for backend in ("torch", "emulator"):
            model = fused(tail)
            with tconv3d.use_backend(backend):
                y = model(x)
                y.mul_(2.0)
                if refused:
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        torch.autograd.grad(y.sum(), x)
                    continue
                found += torch.autograd.grad(y.square().sum(), x)
        if found:
            torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["relu", "tanh of a sum", "sum"])
def test_second_derivatives_and_checkpoints(name: str) -> None:
    shapes, tail = STORED[name]
    passed = [torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in shapes]
    found = []
    for backend in ("torch", "emulator"):
        for again in (False, True):
            model, x = fused(tail), operand(torch.float32).requires_grad_()
            with tconv3d.use_backend(backend):
                y = checkpoint(model, x, *passed, use_reentrant=False) if again else model(x, *passed)
                (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=not again)
                second = () if again else torch.autograd.grad(first.square().sum(), model.convolution.weight)
            found.append((first.detach(), *second))
    for ours, theirs in ((found[2], found[0]), (found[3], found[1])):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
