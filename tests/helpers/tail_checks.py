"""Compares a convolution fused with its tail, in the emulator, with float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from layers import poisoned
from torch import Tensor, fx, nn

import tconv3d
from tconv3d.api.fuse import FusedTail
from tconv3d.tails.pools import PoolPass

C = 8  # channels of the convolution's result
LAST = torch.channels_last_3d
# Error of a norm, relative to the norm: some units in the last place of the type.
UNITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}

Tail = Callable[..., Any]


def fused(tail: Tail, dtype: torch.dtype = torch.float32, channels: int = C, **options: Any) -> FusedTail:
    torch.manual_seed(3)
    layer = nn.ConvTranspose3d(16, channels, 3, stride=2, padding=1)
    return tconv3d.fuse(layer, tail, **options).to(dtype)


def operand(dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Returns an input whose result is [2, channels, 5, 7, 9]: odd rows."""
    random = torch.Generator().manual_seed(1)
    return torch.randn((2, 16, 3, 4, 5), generator=random).to(dtype).to(memory_format=layout)


def close(ours: Tensor, exact: Tensor, factor: float = 1.0, least: float = 1e-9) -> None:
    """Checks a result against the same in float64; results that are no floating-point numbers must be equal.

    Errors are relative to the norm of the result, or to that of numbers of size `least` if it is smaller.
    """
    assert ours.shape == exact.shape
    if not ours.is_floating_point():
        assert torch.equal(ours, exact)
        return
    size = exact.norm().clamp_min(least * exact.numel() ** 0.5)
    error = ((ours.double() - exact).norm() / size).item()
    assert error <= factor * UNITS[ours.dtype], f"error {error:.1e} of {tuple(ours.shape)}, {ours.dtype}"


def check_values(model: FusedTail, x: Tensor, factor: float = 1.0) -> tconv3d.FuseReport:
    """Compares the values of a call without gradients with float64, and returns what was fused."""
    with torch.no_grad(), tconv3d.use_backend("torch"):
        exact = copy.deepcopy(model).double()(x.double())
    with torch.no_grad(), tconv3d.use_backend("emulator"), poisoned():
        report, ours = model.report(x), model(x)
    for one, other in zip(_listed(ours), _listed(exact), strict=True):
        close(one, other, factor)
    return report


def check_gradients(model: FusedTail, x: Tensor, factor: float = 1.0) -> None:
    """Compares the gradients of input and parameters with float64; the whole tail must run in passes."""
    reference = copy.deepcopy(model).double()
    wide = x.double().requires_grad_()
    with tconv3d.use_backend("torch"):
        exact = reference(wide)
        grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype)
        wanted = torch.autograd.grad(exact, [wide, *reference.parameters()], grad.double())
    x = x.detach().requires_grad_()
    with tconv3d.use_backend("emulator"), poisoned():
        ours = model(x)
        assert type(ours.grad_fn).__name__ == "ChainBackward", "the tail runs in PyTorch"
        found = torch.autograd.grad(ours, [x, *model.parameters()], grad)
    for one, other in zip((ours.detach(), *found), (exact.detach(), *wanted), strict=True):
        close(one, other, factor, 0.3)  # the gradient of what a norm or a softmax removes is 0


def moved(model: FusedTail, x: Tensor) -> float:
    """Returns what the passes of a training step read and write, in volumes of the convolution's result.

    Its statistics and its own kernels do not count, and PyTorch must run nothing of the size of a volume.
    """
    with tconv3d.use_backend("emulator"):
        model.report(x.requires_grad_())
    (kind,) = model._kinds._met.values()
    (recorded,) = kind._recorded.values()
    z = next(iter(recorded.plain.graph.graph.nodes))
    found = 0.0
    for divided in (recorded.plain.rounds, recorded.gradient.rounds):
        assert all(_bytes(node) * 8 <= _bytes(z) for node in divided.left)
        for one in divided.rounds:
            for each in (*one.sums, *one.passes):
                found += _bytes_of_pass(each, one.value)
    return found / _bytes(z)


def _bytes(node: fx.Node) -> int:
    value: Tensor = node.meta["val"]
    return value.numel() * value.element_size()


def _bytes_of_pass(one: Any, value: fx.Node) -> int:
    launch = getattr(one, "launch", one)
    nodes = [*launch.wholes, *getattr(one, "placed", ())]
    nodes += [getattr(one, name, None) for name in ("node", "places")]
    nodes += [getattr(getattr(one, "pool", None), name, None) for name in ("grad", "indices")]
    if isinstance(one, PoolPass) or "Value" in str(getattr(launch, "expressions", one)):
        nodes.append(value)
    return sum(_bytes(node) for node in nodes if node is not None)


def _listed(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
