"""Convolutions under autocast: which casts are made, which are kept, and what second derivatives see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mutants import kernel_from, mutate_kernel

import tconv3d
from tconv3d import emulator
from tconv3d.planning import casts
from tconv3d.planning.problem import Plan
from tconv3d.torch_ops import executor, kept


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


# ---- One launch that converts all small operands.


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the tasks that are prepared; what earlier tests prepared is forgotten."""
    executor.forget()
    found: list[str] = []
    make = executor.make_task

    def noted(plan: Plan, *rest: Any) -> executor.Task:
        found.append(plan.kernel)
        return make(plan, *rest)

    monkeypatch.setattr(executor, "make_task", noted)
    yield found
    executor.forget()


def by_operators(layer: tconv3d.ConvTranspose3d, x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Result and gradients by PyTorch's conversions, and this library's kernels for the type."""
    bias = None if layer.bias is None else layer.bias.to(dtype)
    y = tconv3d.conv_transpose3d(x.to(dtype), layer.weight.to(dtype), bias, stride=2)
    wanted = [each for each in (x, *layer.parameters()) if each.requires_grad]
    return [y, *torch.autograd.grad(y.float().square().sum(), wanted)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_one_launch_converts_all_operands(
    dtype: torch.dtype, needs_input: bool, bias: bool, ours: str, launched: list[str]
) -> None:
    """The bits are those of PyTorch's conversions, for numbers halfway between two, too, and for infinite ones."""
    torch.manual_seed(3)
    layer = tconv3d.ConvTranspose3d(5, 7, 3, stride=2, bias=bias, device=ours)
    x = torch.randn(1, 5, 3, 2, 3, device=ours)
    with torch.no_grad():
        layer.weight[0, 0, 0, 0, :3] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11])
        x[0, 0, 0, 0] = torch.tensor([2.0**-140, float("inf"), -0.0])
    x.requires_grad_(needs_input)
    for _ in range(2):
        with torch.autocast(ours, dtype=dtype):
            y = layer(x)
        assert y.dtype is dtype and launched.count("cast") == 1
        wanted = [each for each in (x, *layer.parameters()) if each.requires_grad]
        found = [y, *torch.autograd.grad(y.float().square().sum(), wanted)]
        for one, other in zip(found, by_operators(layer, x, dtype), strict=True):
            assert one.dtype is other.dtype and torch.equal(one.isnan(), other.isnan())
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
        with torch.no_grad():
            layer.weight.mul_(-1.5)  # the next region sees the new weight


def test_operands_that_one_launch_does_not_convert(ours: str, launched: list[str]) -> None:
    layer, x = layer_and_input(ours)
    strided = torch.randn(1, 4, 3, 2, 6, device=ours)[..., ::2]
    double = tconv3d.ConvTranspose3d(4, 6, 3, stride=2, device=ours)
    double.bias = torch.nn.Parameter(torch.randn(6, device=ours, dtype=torch.float16))
    with torch.autocast(ours, dtype=torch.bfloat16):
        for module, tensor in ((layer, strided), (double, x)):
            y = module(tensor)
            bias = module.bias.bfloat16() if module.bias is not None else None
            same = tconv3d.conv_transpose3d(tensor.bfloat16(), module.weight.bfloat16(), bias, stride=2)
            assert torch.equal(y, same)
    assert "cast" not in launched


def test_a_channels_last_input_stays_so(ours: str, launched: list[str]) -> None:
    layer, x = layer_and_input(ours)
    last = x.to(memory_format=torch.channels_last_3d)
    with torch.autocast(ours, dtype=torch.bfloat16):
        found = layer(last)
    assert found.is_contiguous(memory_format=torch.channels_last_3d) and launched.count("cast") == 1
    torch.testing.assert_close(found.double(), expected(layer, x), rtol=1e-2, atol=1e-2)


def test_settings_that_change_plans_are_noticed(ours: str, launched: list[str]) -> None:
    layer, x = layer_and_input(ours)
    for number in (1, 2):
        with torch.autocast(ours, dtype=torch.bfloat16):
            layer(x)
        assert launched.count("cast") == number
        executor.forget()


def test_a_conversion_has_no_race_and_writes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    if not emulator.available():
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    counts = (1500, 3, 1024)
    sources = [torch.randn(count) for count in counts]
    results = [torch.full((count + 8,), 7.0, dtype=torch.bfloat16) for count in counts]
    run = emulator.prepare(casts.cast(counts, "float32", "bfloat16"))
    run(tuple(each.data_ptr() for each in (*sources, *results)))
    for source, result in zip(sources, results, strict=True):
        assert torch.equal(result[:-8], source.bfloat16()) and (result[-8:] == 7).all()


@pytest.mark.slow
def test_a_broken_conversion_is_found(tmp_path: Path, ours: str, launched: list[str]) -> None:
    if ours == "cuda" or not emulator.available():
        pytest.skip("the emulator takes other headers")
    mutate_kernel("cast", "block - third)", "block - second)", tmp_path / "kernels")
    with kernel_from(tmp_path / "kernels", "cast"), pytest.raises(AssertionError):
        test_one_launch_converts_all_operands(torch.bfloat16, False, True, ours, launched)
