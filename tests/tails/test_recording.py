"""Calls that record gradients: passed and captured tensors, tails that PyTorch runs in part, and what is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import poisoned
from mutants import kernel_from, mutate
from tail_checks import LAST, C, close, fused, operand
from torch import Tensor, nn

import tconv3d
from tconv3d.api.fuse import FusedTail
from tconv3d.tails.pointwise import is_view

FULL = (2, C, 5, 7, 9)
RATES = torch.linspace(0.1, 2, C).view(C, 1, 1, 1)
PASSED: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Tensor]]] = {
    "residual": ((FULL,), lambda z, r: F.relu(z + r)),
    "function of a residual": ((FULL,), lambda z, r: F.silu(r) * z + torch.tanh(r)),
    "style": (((2, C), (C,)), lambda z, s, b: F.silu(z * (1 + s[..., None, None, None]) + b.view(C, 1, 1, 1))),
    "mask and number": (((2, 1, 5, 7, 9), ()), lambda z, m, n: (z * m).softmax(1) * n),
    "residual behind a norm": ((FULL,), lambda z, r: F.leaky_relu(F.instance_norm(z) + r)),
    "residual of one item": (((C, 5, 7, 9), (2, C)), lambda z, r, s: torch.sigmoid(z * s[..., None, None, None]) * r),
    "softmax of the batch": (((1, C, 5, 7, 9),), lambda z, r: F.softmax(F.group_norm(z + r, 2), 0)),
}


def node_names(result: Tensor) -> set[str]:
    """Returns the names of the nodes of autograd's graph behind a tensor."""
    found: set[Any] = set()
    waiting = [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(each for each, _ in node.next_functions)
    return {type(node).__name__ for node in found}


def check(model: FusedTail, x: Tensor, passed: list[Tensor], factor: float = 4, chained: bool = True) -> Tensor:
    """Compares values, gradients and buffers of one training step with float64, and returns the result."""

    def step(model: nn.Module, x: Tensor, passed: list[Tensor], backend: str) -> tuple[Tensor, list[Tensor]]:
        with tconv3d.use_backend(backend), poisoned():
            y = model(x, *passed)
            grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(y.dtype)
            asked = [each for each in (x, *passed, *model.parameters()) if each.requires_grad]
            return y, [*torch.autograd.grad(y, asked, grad), *model.buffers()]

    wide = [each.detach().double().requires_grad_(each.requires_grad) for each in (x, *passed)]
    exact, wanted = step(copy.deepcopy(model).double(), wide[0], wide[1:], "torch")
    ours, found = step(model, x, passed, "emulator")
    assert ("ChainBackward" in node_names(ours)) == chained
    assert not any(buffer.requires_grad for buffer in model.buffers())
    for one, other in zip((ours.detach(), *found), (exact.detach(), *wanted), strict=True):
        close(one, other, factor, 0.3)
    return ours


@pytest.mark.parametrize("name", PASSED)
def test_gradients_of_passed_tensors(name: str) -> None:
    shapes, tail = PASSED[name]
    random = torch.Generator().manual_seed(7)
    layout = LAST if len(name) % 2 else torch.contiguous_format
    passed = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
    check(fused(tail), operand(torch.float32, layout).requires_grad_(), passed, 20)


def test_the_check_finds_numbers_of_another_channel(tmp_path: Path) -> None:
    shapes, tail = PASSED["residual of one item"]
    passed = [torch.randn(shape).requires_grad_() for shape in shapes]
    model = fused(lambda z, *more: tail(z, *more) * 3)  # no other test has prepared its kernels
    mutate("axis_pass", "(l + v - at) * args.channels + channel", "(l + v - at) * args.channels", tmp_path / "mutant")
    with kernel_from(tmp_path / "mutant", "axis_pass"), pytest.raises(AssertionError, match="error"):
        check(model, operand(torch.float32).requires_grad_(), passed, 20)


def test_only_tensors_that_need_a_gradient_get_one() -> None:
    residual, scale = torch.randn(FULL, requires_grad=True), torch.randn(C, 1, 1, 1)
    for residual_needs, scale_needs in ((True, False), (False, True), (False, False)):
        passed = [residual.detach().requires_grad_(residual_needs), scale.detach().requires_grad_(scale_needs)]
        check(fused(lambda z, r, s: F.silu(z * s + r)), operand(torch.float32), passed)
    model = fused(lambda z, r, s: F.silu(z * s + r)).requires_grad_(False)
    check(model, operand(torch.float32), [residual, scale])


def test_a_residual_in_16_bits() -> None:
    residual = torch.randn(FULL).bfloat16().requires_grad_()
    check(fused(lambda z, r: F.silu(z + r), torch.bfloat16), operand(torch.bfloat16, LAST), [residual], 2)


def test_captured_tensors_need_be_no_parameters() -> None:
    """A leaf, and a tensor that was computed from another one."""
    random = torch.Generator().manual_seed(4)
    leaf, base = (torch.randn(C, 1, 1, 1, generator=random).requires_grad_() for _ in range(2))
    scale = base.exp()
    x = operand(torch.float32)
    model = fused(lambda z: F.silu(z * scale + leaf))
    with tconv3d.use_backend("emulator"):
        y = model(x)
        ours = torch.autograd.grad(y.square().sum(), [leaf, base])
    assert "ChainBackward" in node_names(y)
    plain = F.silu(F.conv_transpose3d(x, model.convolution.weight, model.convolution.bias, 2, 1) * base.exp() + leaf)
    for one, other in zip(ours, torch.autograd.grad(plain.square().sum(), [leaf, base]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_parameter_that_is_frozen_at_first_trains_later() -> None:
    model = fused(nn.Sequential(nn.GroupNorm(2, C), nn.SiLU()))
    for frozen in (True, False):
        model.tail.requires_grad_(not frozen)
        check(model, operand(torch.float32), [], 10)


def test_what_is_saved() -> None:
    """The convolution's result, the passed tensor, what the convolution's own gradients need, and numbers."""
    model = fused(lambda z, r: F.silu(F.group_norm(z, 2) + torch.tanh(r)) * 2)
    x, residual = operand(torch.float32).requires_grad_(), torch.randn(FULL, requires_grad=True)
    sizes: list[int] = []
    with tconv3d.use_backend("emulator"):
        model(x, residual)  # traces the tail and its gradients, on tensors without data
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            y = model(x, residual)
        own = [x.numel(), model.convolution.weight.numel(), model.convolution.bias.numel()]
        assert sorted(size for size in sizes if size > 2 * C) == sorted([*own[:2], residual.numel(), y.numel()])


def test_second_derivatives_with_a_residual_that_depends_on_the_input() -> None:
    layer = nn.ConvTranspose3d(4, 4, 3, padding=1).double()
    model = tconv3d.fuse(layer, lambda z, r: F.silu(z + r) * z)
    x = torch.randn(1, 4, 3, 4, 5, dtype=torch.float64, requires_grad=True)

    def second(run: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(run(x, x * x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, layer.weight])

    with tconv3d.use_backend("emulator"):
        ours = second(model)
    expected = second(lambda x, r: F.silu((z := F.conv_transpose3d(x, layer.weight, layer.bias, 1, 1)) + r) * z)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_second_derivatives_update_running_statistics_once() -> None:
    norm = nn.BatchNorm3d(C)
    model = fused(nn.Sequential(norm, nn.SiLU()))
    x = operand(torch.float32).requires_grad_()
    with tconv3d.use_backend("emulator"):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.sum().backward()
    assert norm.num_batches_tracked == 1


# ---- tails that PyTorch runs in part


class Partly(nn.Module):
    """A norm and an activation, and then operators that no pass computes, with a parameter of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm3d(C)
        self.following = nn.Conv3d(C, 3, 1)

    def forward(self, z: Tensor, shift: Tensor) -> Tensor:
        return self.following(F.silu(self.norm(z))) * shift + shift.exp()


def test_the_fused_part_of_a_tail_is_one_step() -> None:
    model = fused(Partly())
    shift = torch.randn(3, 1, 1, 1, generator=torch.Generator().manual_seed(5)).requires_grad_()
    ours = check(model, operand(torch.float32).requires_grad_(), [shift], 20)
    assert {"ChainBackward", "ConvolutionBackward0"} <= node_names(ours)
    assert not any("Sigmoid" in name or "BatchNorm" in name for name in node_names(ours))
    assert model.tail.norm.num_batches_tracked == 1


def test_several_tensors_reach_what_pytorch_runs() -> None:
    """The convolution's result itself is one of them, another one is no floating-point tensor."""

    def tail(z: Tensor) -> Tensor:
        y = F.silu(z)
        return torch.cat([z.cumsum(2), y.flip(2), y.mean(1, keepdim=True) * y.argmax(1, keepdim=True)], 1)

    check(fused(tail), operand(torch.float32).requires_grad_(), [], 20)


def test_an_extreme_that_16_bits_round_ends_the_fused_part() -> None:
    model = fused(lambda z: F.silu(F.group_norm(z, 2)).amax((2, 3, 4)), torch.bfloat16)
    x = operand(torch.bfloat16).requires_grad_()
    with tconv3d.use_backend("emulator"):
        names = node_names(model(x))
    assert {"ChainBackward", "AmaxBackward0"} <= names and not any("Sigmoid" in name for name in names)


def test_nothing_to_fuse() -> None:
    check(fused(lambda z: z.cumsum(2)), operand(torch.float32).requires_grad_(), [], chained=False)


def test_dropout_in_training() -> None:
    model = fused(nn.Sequential(nn.SiLU(), nn.Dropout(0.5), nn.Tanh()))
    x = operand(torch.float32).requires_grad_()
    with tconv3d.use_backend("emulator"):
        first, second = model(x), model(x)
        assert not torch.equal(first, second) and "ChainBackward" in node_names(first)
        with torch.no_grad():
            assert not torch.equal(model(x), model(x))
    dropped = (first == 0).float().mean()
    assert 0.4 < dropped < 0.6
    z = F.conv_transpose3d(x, model.convolution.weight, model.convolution.bias, 2, 1)
    plain = torch.tanh(F.silu(z) * 2 * (first != 0))
    torch.testing.assert_close(first, plain, rtol=1e-4, atol=1e-5)
    ours, expected = (torch.autograd.grad(y.square().sum(), x)[0] for y in (first, plain))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_random_numbers_of_a_tail_are_drawn_in_every_call() -> None:
    model = fused(lambda z: z * torch.rand(C, 1, 1, 1))
    x = operand(torch.float32)
    with tconv3d.use_backend("emulator"):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                assert not torch.equal(model(x), model(x))


def test_a_tail_that_switches_gradients_off_is_differentiated_by_pytorch() -> None:
    def tail(z: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(z)
        return F.silu(z) * gate

    check(fused(tail), operand(torch.float32).requires_grad_(), [], chained=False)
    check(fused(lambda z: F.silu(z) * torch.sigmoid(z).detach()), operand(torch.float32).requires_grad_(), [])


@pytest.mark.parametrize(
    ("tail", "pytorch"),
    [
        (lambda z, r, s: z * F.instance_norm(r), ("var_mean", "sub", "mul")),
        (lambda z, r, s: F.silu(z) * s.std(2)[..., None, None, None], ()),
        (lambda z, r, s: z.sigmoid() * (RATES / RATES.norm()) + RATES.softmax(0), ()),
    ],
)
def test_pytorch_reduces_tensors_that_the_kernel_takes(tail: Callable[..., Tensor], pytorch: tuple[str, ...]) -> None:
    """The report names PyTorch's operators unless all their tensors are small."""
    model, x, passed = fused(tail), operand(torch.float32), [torch.rand(FULL), torch.rand(2, C, 3)]
    with torch.no_grad(), tconv3d.use_backend("torch"):
        exact = copy.deepcopy(model).double()(x.double(), *(each.double() for each in passed))
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        close(model(x, *passed), exact, 2)
        assert model.report(x, *passed).pytorch == pytorch


def test_a_caller_may_write_to_results() -> None:
    model, x = fused(lambda z: (z.relu(), RATES.exp().view(C))), operand(torch.float32)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        for _ in range(2):
            rates = model(x)[1]
            assert torch.equal(rates, RATES.exp().view(C))
            rates.zero_()


@pytest.mark.parametrize(
    "tail",
    [
        lambda z: (z - z.detach().mean((2, 3, 4), keepdim=True)) * z.var((2, 3, 4), keepdim=True),
        lambda z: (z - z.mean((2, 3, 4), keepdim=True)) / (1 + z.detach().var((2, 3, 4), keepdim=True)) + z,
    ],
)
def test_no_gradient_flows_through_a_detached_mean_or_variance(tail: Callable[[Tensor], Tensor]) -> None:
    """Passes take means and variances of equal numbers at once, but not those of a tensor and its detached alias."""
    check(fused(tail), operand(torch.float32).requires_grad_(), [])


def _through_data(z: Tensor) -> Tensor:
    z.data.mul_(2)
    return z * 3


def _in_place(z: Tensor) -> Tensor:
    y = z * 2
    F.relu(y.detach(), inplace=True)
    return y + z.cos()


@pytest.mark.parametrize("tail", [_through_data, _in_place])
def test_writes_to_a_detached_tensor_are_left_to_pytorch(tail: Callable[[Tensor], Tensor]) -> None:
    """Values change, and gradients flow as if they had not."""
    model, x = fused(tail), operand(torch.float32).requires_grad_()
    check(model, x, [], chained=False)
    with tconv3d.use_backend("emulator"):
        assert "detached" in model.report(x).why_not


def test_the_gradient_of_a_deviation_of_zero_is_zero() -> None:
    model = fused(lambda z: (z * 0).std((2, 3, 4)) + z.mean((2, 3, 4)))
    check(model, operand(torch.float32).requires_grad_(), [])


def test_pytorch_computes_no_volume_between_passes() -> None:
    """Views of tensors that passes have written are large as well, and a mean is taken once."""
    tail = nn.Sequential(nn.BatchNorm3d(C), nn.SiLU(), nn.AvgPool3d(2), nn.AvgPool3d(2))
    model, x = fused(tail), operand(torch.float32).requires_grad_()
    check(model, x, [], 20)
    (kind,) = model._kinds._met.values()
    (recorded,) = kind._recorded.values()
    rounds = recorded.gradient.rounds.rounds
    small = [node for each in rounds for node in each.small if node.op == "call_function" and not is_view(node)]
    assert small and all(node.meta["val"].numel() <= 2 * C for node in small if isinstance(node.meta["val"], Tensor))
    assert sum(len(each.sums) for each in rounds) == 1


def test_a_list_of_tensors_is_passed_on_unfused() -> None:
    model = fused(lambda z, several: z + several[0])
    x, residual = operand(torch.float32), torch.randn(FULL)
    with tconv3d.use_backend("emulator"), torch.no_grad():
        torch.testing.assert_close(model(x, [residual]), model.convolution(x) + residual)
        assert "holds others" in model.report(x, [residual]).why_not
