"""FlopCounterMode and the profiler count this library's operators as they count PyTorch's."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from layers import Layer
from places import PYTHONPATH, ROOT
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import tconv3d

LAYERS = {
    "plain": Layer(2, 3, (2, 2, 2), (2, 2, 2), batch=1),
    "groups": Layer(4, 6, (2, 2, 2), (2, 3, 2), (2, 1, 2), (1, 0, 0), (1, 0, 0), groups=2),
}
MODULES = (tconv3d.ConvTranspose3d, tconv3d.ConvTranspose3dReLU, tconv3d.ConvTranspose3dReLUGroupNorm)


def module_of(kind: Any, layer: Layer, device: str) -> nn.Module:
    norm = {"num_groups": 3} if kind is tconv3d.ConvTranspose3dReLUGroupNorm else {}
    settings = dict(zip(("stride", "padding", "output_padding", "groups", "dilation"), layer.settings, strict=True))
    made: nn.Module = kind(
        layer.in_channels, layer.out_channels, layer.kernel, **norm, **settings, dtype=torch.float64, device=device
    )
    return made


def counts(module: nn.Module, x: Tensor, needs: bool) -> tuple[int, int]:
    """Returns the operations of a forward pass, and of a forward and a backward pass."""
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        module(x)
    with FlopCounterMode(display=False) as both:
        module(x.detach().requires_grad_(needs)).sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


@pytest.mark.parametrize("needs", [True, False], ids=["every gradient", "no input gradient"])
@pytest.mark.parametrize("name", LAYERS)
def test_flop_counter(name: str, needs: bool, ours: str) -> None:
    layer = LAYERS[name]
    x = layer.operands(torch.float64, ours)[0]
    for kind in MODULES:
        module = module_of(kind, layer, ours)
        got = counts(module, x, needs)
        with tconv3d.use_backend("torch"):
            expected = counts(module, x, needs)
        assert got == expected and 0 < got[0] < got[1]


def test_flop_counter_by_module(ours: str) -> None:
    model = tconv3d.accelerate(nn.Sequential(nn.ConvTranspose3d(2, 3, 2)).to(ours, torch.float64))
    x = LAYERS["plain"].operands(torch.float64, ours)[0]
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_flop_counts()["Sequential.0"] == {
        torch.ops.tconv3d.conv_transpose3d: 2 * x.numel() // 2 * 2 * 3 * 2**3
    }


def total(measured: profile) -> int:
    return sum(event.flops or 0 for event in measured.key_averages())


@pytest.mark.parametrize("kind", MODULES)
def test_profiler(kind: Any, ours: str) -> None:
    layer = LAYERS["groups"]
    module, x = module_of(kind, layer, ours), layer.operands(torch.float64, ours)[0]
    expected = counts(module, x, needs=True)
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as forward, torch.no_grad():
        module(x)
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as both:
        module(x.detach().requires_grad_()).sum().backward()
    pointwise = total_of_others(forward), total_of_others(both)
    assert (total(forward) - pointwise[0], total(both) - pointwise[1]) == expected
    with profile(activities=[ProfilerActivity.CPU]) as uncounted:
        module(x)
    assert total(uncounted) == 0


def total_of_others(measured: profile) -> int:
    """Returns what the profiler counts for additions and multiplications of PyTorch's own."""
    return sum(event.flops or 0 for event in measured.key_averages() if not event.key.startswith("tconv3d::"))


def test_importing_the_library_does_not_import_the_counter() -> None:
    """PyTorch's counter imports Triton. The library waits until somebody else imports the counter."""
    program = """
import sys, tconv3d, torch
assert "torch.utils.flop_counter" not in sys.modules
before = list(sys.meta_path)
from torch.utils.flop_counter import flop_registry
assert torch.ops.tconv3d.conv_transpose3d in flop_registry and len(sys.meta_path) == len(before) - 1
"""
    environment = {"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
