"""Squeeze-and-excitation: a chain holds the small layers of means by which channels are scaled."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tail_checks import C, operand
from torch import Tensor, fx, nn

import tconv3d
from tconv3d.api import compiling


class Linear(nn.Module):
    """A block that squeezes by a pool and a view, with its layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool3d(1)
        self.layers = nn.Sequential(nn.Linear(C, 2), nn.ReLU(inplace=True), nn.Linear(2, C), nn.Sigmoid())

    def forward(self, y: Tensor) -> Tensor:
        batch, channels = y.shape[:2]
        gate = self.layers(self.pool(y).view(batch, channels))
        return y * gate.view(batch, channels, 1, 1, 1)


class Convolutions(nn.Module):
    """A block that squeezes by a mean, with convolutions of one position."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(C, 2, 1), nn.Conv3d(2, C, 1)

    def forward(self, y: Tensor) -> Tensor:
        gate = self.second(F.silu(self.first(y.mean((2, 3, 4), keepdim=True))))
        return y * torch.sigmoid(gate)


class Decoder(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.gate = nn.ConvTranspose3d(16, C, 2, 2), nn.InstanceNorm3d(C, affine=True), gate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(F.silu(self.norm(self.up(x))))


class Head(Decoder):
    """A classifier: what is squeezed scales nothing, so that PyTorch runs it as before."""

    def forward(self, x: Tensor) -> Tensor:
        return self.gate.second(self.gate.first(F.silu(self.up(x)).mean((2, 3, 4), keepdim=True)))


def plainly(module: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Tensor]:
    compiling.fuse_chains(module.graph, all_convolutions=True)
    module.recompile()
    return torch._dynamo.lookup_backend("aot_eager")(module, examples)  # type: ignore[call-arg,arg-type]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gate", [Linear, Convolutions])
def test_a_gate_is_found(gate: type[nn.Module], compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    model = Decoder(gate())
    exact = copy.deepcopy(model).double()
    x = operand(torch.float32)
    wide = exact(x.double())
    wide.square().sum().backward()
    if compiled:
        torch._dynamo.reset()
        caplog.set_level("INFO", logger="tconv3d.compile")
        run = torch.compile(model, backend=plainly, fullgraph=True)
    else:
        reports: list[object] = []
        run = tconv3d.accelerate(model, report=reports.append)
        assert "-> mul" in str(reports[0])
    with tconv3d.use_backend("emulator"):
        y = run(x)
        y.square().sum().backward()
    if compiled:
        assert "-> mul: fused" in caplog.messages[-1]
    torch.testing.assert_close(y.double(), wide, rtol=1e-4, atol=1e-5)
    for one, other in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-3, atol=1e-3)


def test_a_classifier_ends_the_chain() -> None:
    model = Head(Convolutions())
    reports: list[object] = []
    tconv3d.accelerate(model, report=reports.append)
    assert "conv -> silu -> mean" in str(reports[0]) and "mean -> conv" not in str(reports[0])
