"""Convolutions under autocast: which casts are made, which are kept, and what second derivatives see."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import tconv3d
from tconv3d.torch_ops import kept


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    kept.forget()
    yield
    kept.forget()


def layer_and_input(device: str) -> tuple[tconv3d.ConvTranspose3d, torch.Tensor]:
    torch.manual_seed(3)
    return tconv3d.ConvTranspose3d(4, 6, 3, stride=2, device=device), torch.randn(1, 4, 3, 2, 3, device=device)


def expected(layer: tconv3d.ConvTranspose3d, x: torch.Tensor) -> torch.Tensor:
    tensors = [tensor.detach().bfloat16().double() for tensor in (x, layer.weight, layer.bias)]
    return F.conv_transpose3d(*tensors, stride=2)


@pytest.mark.parametrize("inference", [False, True])
def test_casts_are_kept_until_the_weight_changes(inference: bool, ours: str) -> None:
    layer, x = layer_and_input(ours)
    quiet = torch.inference_mode if inference else torch.no_grad
    for _ in range(2):
        results = []
        for _ in range(3):
            with quiet(), torch.autocast(ours, dtype=torch.bfloat16):
                results.append(layer(x))
        assert id(layer.weight) in kept._kept and id(layer.bias) in kept._kept
        assert all(result.dtype is torch.bfloat16 and torch.equal(result, results[0]) for result in results)
        torch.testing.assert_close(results[0].double(), expected(layer, x), rtol=1e-2, atol=1e-2)
        with torch.no_grad():
            layer.weight.mul_(-1.5)
            layer.bias.add_(1)


def test_the_cast_of_a_kept_weight_is_packed_once(ours: str) -> None:
    layer, x = layer_and_input(ours)
    with torch.no_grad(), torch.autocast(ours, dtype=torch.bfloat16):
        for _ in range(2):
            layer(x)
        ((_, cast),) = kept._kept[id(layer.weight)].packs.values()
        for _ in range(2):
            layer(x)
    ((_, again),) = kept._kept[id(layer.weight)].packs.values()
    assert again is cast and cast.dtype is torch.bfloat16


def test_a_call_with_gradients_drops_the_casts(ours: str) -> None:
    layer, x = layer_and_input(ours)
    with torch.autocast(ours, dtype=torch.bfloat16):
        with torch.no_grad():
            for _ in range(2):
                layer(x)
        assert id(layer.weight) in kept._kept
        layer(x)
        assert id(layer.weight) not in kept._kept


def test_the_weight_may_change_before_the_backward_pass(ours: str) -> None:
    """Autocast differentiates the cast weight: an optimizer may write the weight before the backward pass."""
    layer, x = layer_and_input(ours)
    grads = []
    for changed in (False, True):
        leaf = x.clone().requires_grad_()
        with torch.autocast(ours, dtype=torch.bfloat16):
            result = layer(leaf)
        if changed:
            with torch.no_grad():
                layer.weight.zero_()
        grads.append(torch.autograd.grad(result.float().square().sum(), leaf)[0])
    assert torch.equal(*grads) and grads[0].dtype is torch.float32


def test_second_derivatives_reach_the_weight(ours: str) -> None:
    layer, x = layer_and_input(ours)
    leaf = x.clone().requires_grad_()
    with torch.autocast(ours, dtype=torch.bfloat16):
        result = layer(leaf)
    first = torch.autograd.grad(result.float().sum(), leaf, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), layer.weight)[0]
    weight = layer.weight.detach().double().requires_grad_()
    exact = x.double().requires_grad_()
    wanted = torch.autograd.grad(F.conv_transpose3d(exact, weight, stride=2).sum(), exact, create_graph=True)[0]
    wanted = torch.autograd.grad(wanted.square().sum(), weight)[0]
    assert second.dtype is torch.float32
    torch.testing.assert_close(second.double(), wanted, rtol=3e-2, atol=3e-2 * wanted.abs().max().item())


def test_second_derivatives_refuse_a_weight_that_changed(ours: str) -> None:
    layer, x = layer_and_input(ours)
    leaf = x.clone().requires_grad_()
    with torch.autocast(ours, dtype=torch.bfloat16):
        result = layer(leaf)
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(result.float().sum(), leaf, create_graph=True)


def test_a_frozen_weight_and_a_16_bit_weight(ours: str) -> None:
    layer, x = layer_and_input(ours)
    leaf = x.clone().requires_grad_()
    layer.requires_grad_(False)
    with torch.autocast(ours, dtype=torch.bfloat16):
        frozen = torch.autograd.grad(layer(leaf).float().sum(), leaf)[0]
        layer.bfloat16()
        rounded = torch.autograd.grad(layer(leaf).float().sum(), leaf)[0]
    assert torch.equal(frozen, rounded)
