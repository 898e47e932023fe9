"""Tails that permute dimensions: their norms, reductions and pointwise operators run in passes, as without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tail_checks import LAST, C, check_gradients, check_values, fused, operand
from torch import Tensor, nn

import tconv3d

BEHIND = (0, 2, 3, 4, 1)
BACK = (0, 4, 1, 2, 3)
SCALE = torch.linspace(0.5, 2, C)
WEIGHTS = torch.linspace(-1, 1, 630).view(2, 5, 7, 9, 1)
Z = Callable[[Tensor], Tensor]
TAILS: dict[str, Z] = {
    "pointwise": lambda z: (F.silu(z.permute(BEHIND) * SCALE + 1) / 2).permute(BACK),
    "of two tensors": lambda z: (z.permute(BEHIND) + torch.tanh(z).permute(BEHIND)).permute(BACK),
    "softmax": lambda z: z.permute(BEHIND).softmax(-1).permute(BACK),
    "mean": lambda z: F.silu(z).permute(BEHIND).mean(-1),
    "mean, kept": lambda z: (z.permute(BEHIND) - z.permute(BEHIND).mean(-1, True)).permute(BACK),
    "norm": lambda z: F.layer_norm(z.movedim(1, -1), (C,)).movedim(-1, 1) * z,
    "there and back": lambda z: F.silu(z.transpose(1, 2).permute(0, 2, 1, 3, 4)),
    "weights of positions": lambda z: (z.permute(BEHIND).contiguous() * WEIGHTS).softmax(-1).permute(BACK),
}


@pytest.mark.parametrize("name", TAILS)
def test_values_and_gradients(name: str) -> None:
    for layout in (torch.contiguous_format, LAST):
        x = operand(torch.float32, layout)
        report = check_values(fused(TAILS[name]), x)
        assert len(report.passes) <= 1 and not report.pytorch, report
        check_gradients(fused(TAILS[name]), x, 8)


def norm_last(z: Tensor) -> Tensor:
    return F.layer_norm(z.permute(BEHIND), (C,), SCALE)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_result_with_permuted_dimensions_stays_contiguous(recorded: bool) -> None:
    x = operand(torch.float32).requires_grad_(recorded)
    model = fused(norm_last)
    with torch.set_grad_enabled(recorded), tconv3d.use_backend("emulator"):
        y = model(x)
        assert model.report(x).passes
    assert y.is_contiguous()
    torch.testing.assert_close(y, norm_last(model.convolution(x)))


def test_what_cannot_be_straightened_runs_in_pytorch() -> None:
    def tail(z: Tensor) -> Tensor:
        tokens = F.silu(z).permute(BEHIND)
        return tokens.reshape(2, -1, C).cumsum(1) + tokens.flatten(1, 3)

    report = check_values(fused(tail), operand(torch.float32))
    assert report.kernel and "permute" in report.pytorch


class Block(nn.Module):
    """A convolution and a norm over channels that come last."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose3d(16, C, 2, 2)
        self.norm = nn.LayerNorm(C)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.up(x).permute(BEHIND)).permute(BACK))


def test_accelerate_finds_it() -> None:
    torch.manual_seed(1)
    model = Block()
    x = operand(torch.float32)
    expected = model(x)
    expected.square().sum().backward()
    wanted = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    reports: list[object] = []
    tconv3d.accelerate(model, report=reports.append)
    assert "conv -> layer_norm -> gelu" in str(reports[0])
    with tconv3d.use_backend("emulator"):
        y = model(x)
        y.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    for one, each in zip(wanted, model.parameters(), strict=True):
        torch.testing.assert_close(each.grad, one, rtol=1e-3, atol=1e-3)
