"""Compares results and copies models, for tests of swapped and fused layers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from tconv3d import emulator

needs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or emulator.available()), reason="the emulator needs a C++ compiler"
)


def kinds(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Returns the output and the gradients of input and parameters."""
    x = x.detach().requires_grad_()
    y = model(x)
    torch.manual_seed(5)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(y, [x, *parameters], torch.randn(y.shape).to(y), allow_unused=True)
    return [y.detach(), *(g for g in found if g is not None)]


def assert_same_results(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


class Louder(nn.ConvTranspose3d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        return 2 * super().forward(input, output_size)


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    again: nn.Module = pickle.loads(pickle.dumps(model))
    return again


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again: nn.Module = torch.load(file, weights_only=False)
    return again
