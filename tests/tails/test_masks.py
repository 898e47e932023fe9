"""Masks in tails: boolean tensors that are passed, captured or computed from such, as kernels read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import poisoned
from tail_checks import LAST, C, close, fused, operand
from torch import Tensor

import tconv3d
from tconv3d.tails import running

FULL, ONE = (2, C, 5, 7, 9), (2, 1, 5, 7, 9)
HELD = torch.arange(C).view(C, 1, 1, 1) % 3 == 0
TAILS: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "filled, softmax": (ONE, lambda z, m: z.masked_fill(m, -1e4).softmax(1)),
    "filled": (FULL, lambda z, m: F.silu(z.masked_fill(m, -1.0))),
    "chosen behind a norm": (FULL, lambda z, m: torch.where(m, F.group_norm(z, 2), 0.5 * z)),
    "chosen, the other way": (ONE, lambda z, m: torch.where(~m, z, torch.tanh(z)) * 2),
    "captured": ((), lambda z, m: torch.where(torch.logical_and(HELD, z > 0), z, 0.1 * z) * m),
    "softmax, filled": (ONE, lambda z, m: z.softmax(1).masked_fill(m, 0.0).amax(1)),
}
INSIDE = {"filled, softmax", "filled"}


def mask_of(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) > 0.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("name", TAILS)
def test_masks(name: str, layout: torch.memory_format, dtype: torch.dtype) -> None:
    shape, tail = TAILS[name]
    model, x, mask = fused(tail, dtype), operand(dtype, layout), mask_of(shape)
    exact = copy.deepcopy(model).double()
    factor = 20 if dtype is torch.float32 else 6
    with torch.no_grad(), tconv3d.use_backend("torch"):
        wanted = exact(x.double(), mask)
    with torch.no_grad(), tconv3d.use_backend("emulator"), poisoned():
        report, found = model.report(x, mask), model(x, mask)
    close(found, wanted, factor)
    if name in INSIDE:
        assert report.kernel and "masked_fill" not in report.pytorch, report
    grads = []
    for backend, network, operands in (("torch", exact, x.double()), ("emulator", model, x)):
        operands = operands.detach().requires_grad_()
        with tconv3d.use_backend(backend):
            y = network(operands, mask)
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype).to(y.dtype)
            grads.append(torch.autograd.grad(y, [operands, *network.parameters()], grad))
    for one, other in zip(grads[1], grads[0], strict=True):
        close(one, other, factor, 0.3)


def test_the_check_finds_a_mask_that_is_read_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_without_booleans", lambda whole, dtype: whole.to(dtype) * 0)
    with pytest.raises(AssertionError, match="error"):
        test_masks("filled, softmax", torch.contiguous_format, torch.float32)
