"""Modules of the user behind transposed convolutions: `accelerate` looks into their forwards.

Fused chains are counted (`count`), and their layers run one by one on the CPU.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoder_blocks import X
from torch import Tensor, nn

import tconv3d

C = 4


class Swish(nn.Module):
    """An activation of the user."""

    slope = 1.0

    def forward(self, y: Tensor) -> Tensor:
        return y * torch.sigmoid(self.slope * y)


class NormAct(nn.Module):
    """A norm and an activation, as decoders wrap them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(2, C), Swish()
        self.gain = 2.0

    def forward(self, y: Tensor, shift: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        y = self.act(self.norm(y)) * (self.gain * scale)
        return y if shift is None else y + shift


class Up(nn.Module):
    """A decoder's block; `inner` is what it calls behind the convolution."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.inner = nn.ConvTranspose3d(2, C, 2, stride=2), inner
        self.shift = nn.Parameter(torch.ones(C, 1, 1, 1))

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.up(x))


class WithArguments(Up):
    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.inner(self.up(x), self.shift, scale=3.0))


class Twice(Up):
    def forward(self, x: Tensor) -> Any:
        return self.inner.act(self.inner(self.up(x)))


class Chooses(NormAct):
    """Decides by values, so that its forward is not read."""

    def forward(self, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.norm(y) if y.mean() > 0 else y


class Residual(nn.Module):
    """A block with a convolution of its own, of which a chain holds the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = NormAct(), nn.Conv3d(C, C, 1)

    def forward(self, y: Tensor) -> Tensor:
        return torch.relu(self.conv(self.first(y)))


class Skips(Residual):
    """A block that reads its operand twice, so that no chain goes into it."""

    def forward(self, y: Tensor) -> Tensor:
        return y + self.conv(self.first(y))


class Pair(nn.Module):
    def forward(self, y: Tensor) -> tuple[Tensor, int]:
        return F.relu(y), 2


class TakesFirst(Up):
    def forward(self, x: Tensor) -> Any:
        y, factor = self.inner(self.up(x))
        return torch.tanh(y) * factor


def pair(model: nn.Module) -> tuple[Any, Any]:
    return tconv3d.accelerate(copy.deepcopy(model)), model


NORM_ACT = "conv -> group_norm -> mul -> sigmoid -> mul -> mul"
MODELS = {
    "norm and activation": (lambda: Up(NormAct()), [NORM_ACT]),
    "arguments": (lambda: WithArguments(NormAct()), [f"{NORM_ACT} -> add -> tanh"]),
    "a child called again": (lambda: Twice(NormAct()), [f"{NORM_ACT} -> mul -> sigmoid -> mul"]),
    "in sequences": (
        lambda: Up(nn.Sequential(NormAct(), nn.Sequential(Swish()))),
        [f"{NORM_ACT} -> mul -> sigmoid -> mul"],
    ),
    "a sequence with the convolution": (
        lambda: nn.Sequential(nn.ConvTranspose3d(2, C, 2), NormAct(), nn.Tanh()),
        [f"{NORM_ACT} -> tanh"],
    ),
    "a convolution behind": (lambda: Up(Residual()), [NORM_ACT]),
    "an operand that is read twice": (lambda: Up(Skips()), []),
    "a choice": (lambda: Up(Chooses()), []),
    "several results": (lambda: TakesFirst(Pair()), ["conv -> relu -> tanh -> mul"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_modules_of_the_user(name: str, count: list[str]) -> None:
    made, words = MODELS[name]
    torch.manual_seed(0)
    ours, plain = pair(made())
    torch.testing.assert_close(ours(X), plain(X))
    assert count == words
    expected = torch.autograd.grad(plain(X).square().sum(), list(plain.parameters()), allow_unused=True)
    found = torch.autograd.grad(ours(X).square().sum(), list(ours.parameters()), allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    assert count == words * 2
    assert list(ours.state_dict()) == list(plain.state_dict())


def test_changes_inside_are_noticed(count: list[str]) -> None:
    ours, plain = pair(Up(NormAct()))

    def check(fused: bool) -> None:
        before = len(count)
        torch.testing.assert_close(ours(X), plain(X))
        assert len(count) - before == fused

    check(True)
    for model in (ours, plain):
        model.inner.gain = 5.0
    check(True)
    for model in (ours, plain):
        model.inner.act = nn.Tanh()
    check(True)
    for model in (ours, plain):
        model.inner.norm = nn.GroupNorm(4, C)
    check(True)
    for model in (ours, plain):
        model.inner.act = Swish()
        model.inner.act.slope = 0.5
    check(True)
    seen: list[Any] = []
    handle = ours.inner.register_forward_hook(lambda module, args, output: seen.append(module))
    check(False)
    assert seen == [ours.inner]
    handle.remove()
    check(True)
    for model in (ours, plain):
        model.inner.forward = lambda y: y * 3
    check(False)


def test_a_module_that_replaces_its_children_is_no_part(count: list[str]) -> None:
    class Writes(NormAct):
        def forward(self, y: Tensor) -> Tensor:  # type: ignore[override]
            self.gain += 1.0
            return self.norm(y) * self.gain

    ours, plain = pair(Up(Writes()))
    for _ in range(3):
        torch.testing.assert_close(ours(X), plain(X))
    assert not count


def test_training_alone_can_change_a_forward(count: list[str]) -> None:
    class Trains(NormAct):
        def forward(self, y: Tensor) -> Tensor:  # type: ignore[override]
            return self.norm(y) if self.training else self.act(y)

    ours, plain = pair(Up(Trains()))
    for mode in (True, False, True):
        torch.testing.assert_close(ours.train(mode)(X), plain.train(mode)(X))
    assert count == ["conv -> group_norm", "conv -> mul -> sigmoid -> mul", "conv -> group_norm"]


def test_kernels_compute_what_a_module_of_the_user_does() -> None:
    torch.manual_seed(0)
    ours, plain = pair(Up(NormAct()))
    expected = plain(X)
    with tconv3d.use_backend("emulator"):
        torch.testing.assert_close(ours(X), expected, rtol=1e-4, atol=1e-4)
        assert "ChainBackward" in type(ours(X).grad_fn).__name__
