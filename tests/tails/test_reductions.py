"""Reductions over channels and over parts of space in tails: values, gradients, and rules for ties and NaN."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import poisoned
from tail_checks import LAST, C, check_gradients, check_values, close, fused, moved, operand
from torch import Tensor, nn

import tconv3d
from tconv3d.families.norm import axis as axis_plan
from tconv3d.planning import planner
from tconv3d.tails.tracing import trace
from tconv3d.torch_ops import axis_executor

Z = Callable[[Tensor], Any]
TAILS: dict[str, Z] = {
    "softmax": lambda z: F.silu(z).softmax(1) * 2,
    "log-softmax": lambda z: F.log_softmax(z, 1),
    "log-sum-exp": lambda z: F.relu(torch.logsumexp(z, 1)),
    "sum over channels": lambda z: F.silu(z).sum(1, keepdim=True),
    "mean over channels": lambda z: torch.tanh(F.silu(z).mean(1)),
    "largest channel": lambda z: F.silu(z).amax(1),
    "largest channel and its index": lambda z: torch.max(z, 1),
    "index of the smallest channel": lambda z: z.argmin(1, keepdim=True),
    "norm over channels": lambda z: z / z.norm(dim=1, keepdim=True),
    "softmax over width": lambda z: z.softmax(-1),
    "mean over depth": lambda z: F.silu(z).mean(2),
    "sum over planes": lambda z: F.silu(z).sum((3, 4)),
    "largest of space": lambda z: F.silu(z).amax((2, 3, 4)) * 2,
    "adaptive max pool": lambda z: F.adaptive_max_pool3d(F.silu(z), 1),
    "softmax over space": lambda z: torch.clamp(z, -1, 1).flatten(2).softmax(2).view(z.shape) * z.numel(),
    "mean and deviation": lambda z: (z + z.mean((2, 3, 4), True)) / (z.std((2, 3, 4), keepdim=True) + 0.1),
    "variance over channels": lambda z: (z - z.mean(1, True)) * torch.rsqrt(z.var(1, False, keepdim=True) + 0.1),
    "normalized over channels": lambda z: F.normalize(torch.lerp(z, torch.tanh(z), 0.3), 1),
    "mean over channels, spread again": lambda z: (z.mean(1, True) + torch.arange(C).view(C, 1, 1, 1) / C).softmax(1),
    "of one number": lambda z: F.silu(z).logsumexp(1, True).max(1, True)[0].mean(1).neg(),
    "of one number, kept": lambda z: torch.tanh(z.sum(1, keepdim=True).sum(1, keepdim=True)).softmax(1) * z,
    "several in a row": lambda z: (z.softmax(1) * 3).log_softmax(-1).mean((2, 3, 4)),
}
KINDS = {
    "float32": (torch.float32, torch.contiguous_format),
    "bfloat16, channels last": (torch.bfloat16, LAST),
    "float16": (torch.float16, torch.contiguous_format),
    "float32, channels last": (torch.float32, LAST),
}


@pytest.fixture(autouse=True)
def in_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes reduce over channels here; `test_over_channels.py` has the kernels of convolutions that do."""
    monkeypatch.setattr(planner, "OVER_CHANNELS_PRICE", math.inf)
    planner.why_not_over_channels.cache_clear()
    yield
    planner.why_not_over_channels.cache_clear()


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension, or over channels in three of the ways in which networks write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(2)
        length = 9 if way == "last" else C
        self.weight, self.bias = (nn.Parameter(torch.randn(length, generator=random)) for _ in range(2))
        self.way = way

    def forward(self, z: Tensor) -> Tensor:
        if self.way == "last":
            return F.layer_norm(z, (9,), self.weight, self.bias)
        if self.way == "permuted":
            return F.layer_norm(z.permute(0, 2, 3, 4, 1), (C,), self.weight, self.bias).permute(0, 4, 1, 2, 3)
        if self.way == "transposed":
            return F.layer_norm(z.transpose(1, -1), (C,), self.weight, self.bias).transpose(-1, 1)
        mean = z.mean(1, keepdim=True)
        variance = (z - mean).pow(2).mean(1, keepdim=True)
        shape = (C, 1, 1, 1)
        return (z - mean) / torch.sqrt(variance + 1e-6) * self.weight.view(shape) + self.bias.view(shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TAILS)
def test_values(name: str, kind: str) -> None:
    dtype, layout = KINDS[kind]
    if "index" in name and dtype != torch.float32:
        pytest.skip("rounded results tie where exact ones do not")
    report = check_values(fused(TAILS[name], dtype), operand(dtype, layout))
    assert report.passes and not set(report.pytorch) - {"view", "mul", "div", "mean"}, report


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("way", ["last", "by hand", "permuted", "transposed"])
def test_layer_norm(way: str, layout: torch.memory_format) -> None:
    x = operand(torch.float32, layout)
    report = check_values(fused(LayerNorm(way)), x)
    assert len(report.passes) == 1 and not report.pytorch
    model = fused(nn.Sequential(LayerNorm(way), nn.SiLU()))
    check_gradients(model, x, 20)
    assert moved(model, x) == 5  # z read and the result written; z and a gradient read, and a gradient written


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("dims", [{0}, {1}, {4}, {3, 4}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_over_positions(
    dtype: torch.dtype, dims: set[int], layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several blocks add up x and x times the sum of its axis, for every place along the axis."""
    monkeypatch.setattr(axis_plan, "LEAST_UNITS", 1)  # so that few positions are enough
    x = torch.randn((3, 8, 9, 20, 40), generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x.contiguous(memory_format=layout)
    step = "tconv3d::Reduced<tconv3d::Adding, tconv3d::Value>"
    centred = "tconv3d::Difference<tconv3d::Value, tconv3d::Local<0>>"
    program = f"tconv3d::AxisProgram<tconv3d::EachElement<{centred}>, tconv3d::Then<{step}, tconv3d::Done>>"
    sums = ("tconv3d::Value", "tconv3d::Product<tconv3d::Value, tconv3d::Local<0>>")
    axis = frozenset(dims)
    with tconv3d.use_backend("emulator"), poisoned():
        y, found = axis_executor.run(x, axis, program, 2, True, None, (), None, None, dtype, False, sums=sums)
    wide = x.double()
    total = wide.sum(sorted(dims), keepdim=True)
    close(y, wide - total)
    assert found is not None and (found.shape[2] > 1 or dims == {3, 4})
    over = [dim for dim in range(dims == {1}, 5) if dim not in dims]
    for place, each in enumerate((wide, wide * total)):
        close(found.sum(2)[..., place], each.sum(over).reshape(found.shape[0], -1))


@pytest.mark.parametrize("name", [name for name in TAILS if "index" not in name and "adaptive" not in name])
def test_gradients(name: str) -> None:
    layout = LAST if len(name) % 2 else torch.contiguous_format
    check_gradients(fused(TAILS[name]), operand(torch.float32, layout), 4)


NORMED: dict[str, Callable[[nn.Module], Z]] = {
    "softmax": lambda norm: lambda z: norm(z).softmax(1),
    "activation and softmax": lambda norm: lambda z: F.silu(norm(z)).log_softmax(1),
    "log-sum-exp": lambda norm: lambda z: norm(z).logsumexp(1),
}


class Behind(nn.Module):
    """A norm, and what follows it over channels."""

    def __init__(self, norm: nn.Module, name: str) -> None:
        super().__init__()
        self.norm, self.name = norm, name

    def forward(self, z: Tensor) -> Any:
        return NORMED[self.name](self.norm)(z)


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, C), nn.BatchNorm3d(C)])
@pytest.mark.parametrize("name", NORMED)
def test_gradients_of_what_follows_a_norm(name: str, norm: nn.Module) -> None:
    """The gradient of what follows the norm is written once, by a pass along channels; the norm's passes read it."""
    # The gradient of the bias before a BatchNorm is 0, beside which the roundings of 16-bit numbers are large.
    wide = name == "softmax" or isinstance(norm, nn.BatchNorm3d)
    dtype, layout = (torch.float32, LAST) if wide else (torch.bfloat16, torch.contiguous_format)
    model, x = fused(Behind(copy.deepcopy(norm), name), dtype), operand(dtype, layout)
    check_gradients(model, x, 30 if dtype == torch.float32 else 12)
    with tconv3d.use_backend("emulator"):
        texts = model.report(x.requires_grad_()).gradients
    assert sum("backward in one pass" in text for text in texts) <= 4 and not any("PyTorch" in text for text in texts)


def test_reductions_of_one_number_are_no_passes() -> None:
    """What is left is the first reduction; the index of one number is asked for, so that it stays."""
    once, again = (
        fused(lambda z: z.logsumexp(1, True)),
        fused(lambda z: torch.max(z.logsumexp(1, True).sum(1, keepdim=True), 1)[0].unsqueeze(1).logsumexp(-4).neg()),
    )
    x = operand(torch.float32).requires_grad_()
    with tconv3d.use_backend("emulator"):
        passes = [model.report(x) for model in (once, again)]
    assert len(passes[0].passes) == len(passes[1].passes) == 1
    assert len(passes[0].gradients) == len(passes[1].gradients)
    check_gradients(again, x, 4)
    model = fused(lambda z: torch.max(z.mean(1, keepdim=True), 1)[1])
    assert check_values(model, operand(torch.float32)).passes


def test_gradients_in_16_bits() -> None:
    check_gradients(fused(TAILS["softmax"], torch.bfloat16), operand(torch.bfloat16, LAST), 2)
    check_gradients(fused(lambda z: torch.max(F.silu(z), 1)[0], torch.float16), operand(torch.float16), 20)


def test_an_extreme_that_16_bits_round_is_left_to_pytorch_when_it_is_differentiated() -> None:
    model = fused(lambda z: F.silu(z).amax((2, 3, 4)), torch.bfloat16)
    x = operand(torch.bfloat16).requires_grad_()
    with tconv3d.use_backend("emulator"):
        assert type(model(x).grad_fn).__name__ != "ChainBackward"


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("size", [3, 40, 264])
def test_channels_of_any_number(size: int, layout: torch.memory_format) -> None:
    """3 channels are no vector; 264 are more than 32 threads hold at once, and fill shared memory in columns."""
    check_values(fused(lambda z: z.softmax(1), channels=size), operand(torch.float32, layout))


@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_ties_and_nan(layout: torch.memory_format) -> None:
    """The first one of equal numbers counts, and a NaN is larger than all others."""
    random = torch.Generator().manual_seed(5)
    weight = torch.eye(16)[:, :, None, None, None]
    layer = nn.ConvTranspose3d(16, 16, 1, bias=False)
    layer.weight = nn.Parameter(weight.clone())
    x = torch.randint(0, 3, (2, 16, 3, 4, 5), generator=random).float().contiguous(memory_format=layout)
    tails: tuple[Z, ...] = (
        lambda z: torch.max(z, 1),
        lambda z: (z.argmin(1), z.argmax(-1)),
        lambda z: (torch.where(z > 1, torch.nan, z).argmax(1), torch.where(z > 1, torch.nan, z).amax(2)),
        lambda z: F.max_pool3d(z, 3, 2, 1, return_indices=True),
    )
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        for tail in tails:
            model = tconv3d.fuse(layer, tail)
            assert not model.report(x).pytorch
            for ours, exact in zip(model(x), tail(x), strict=True):
                assert torch.equal(ours.nan_to_num(-1.0), exact.nan_to_num(-1.0))
    for name in (lambda z: torch.max(z, 1)[0], lambda z: z.amax(1), lambda z: F.max_pool3d(z, 2)):
        ours, exact = x.clone().requires_grad_(), x.clone().requires_grad_()
        with tconv3d.use_backend("emulator"):
            tconv3d.fuse(layer, name)(ours).square().sum().backward()
        name(exact).square().sum().backward()
        assert torch.equal(ours.grad, exact.grad)


def test_results_are_the_same_from_run_to_run() -> None:
    x = operand(torch.float32)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        first, second = (fused(TAILS["several in a row"])(x) for _ in range(2))
    assert torch.equal(first, second)


def test_tensors_of_every_kind_ride_along() -> None:
    """A mask with one number per position, a vector per channel and a residual are read by the pass."""
    layer = fused(F.relu).convolution
    mask, scale, residual = torch.rand(2, 1, 5, 7, 9), torch.randn(C, 1, 1, 1), torch.randn(2, C, 5, 7, 9)
    model = tconv3d.fuse(layer, lambda z, m, s, r: ((z * s + r) * m).softmax(1) * m)
    x = operand(torch.float32)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        report = model.report(x, mask, scale, residual)
        ours = model(x, mask, scale, residual)
    z = F.conv_transpose3d(x, layer.weight, layer.bias, 2, 1)
    torch.testing.assert_close(ours, ((z * scale + residual) * mask).softmax(1) * mask)
    assert len(report.passes) == 1 and not report.pytorch


class Peak(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.amax((2, 3, 4))


@pytest.mark.parametrize("behind", [(), (nn.SiLU(), nn.InstanceNorm3d(32, affine=True))], ids=["", "another"])
@pytest.mark.parametrize("norm", [nn.BatchNorm3d(32), nn.GroupNorm(4, 32)], ids=["BatchNorm", "GroupNorm"])
def test_the_largest_normed_number_of_space_gets_the_gradient(norm: nn.Module, behind: tuple[nn.Module, ...]) -> None:
    """Gradients find it by comparing numbers with it, which must come out alike forward and backward."""
    model = fused(nn.Sequential(norm, *behind, Peak()), channels=32)
    check_gradients(model, operand(torch.float32), 10)  # the gradient of the convolution's bias is 0


def test_what_is_no_axis_is_left_to_pytorch() -> None:
    for tail in (lambda z: F.silu(z).amax((0, 2)), lambda z: F.silu(z).amax((1, 2)), lambda z: F.silu(z).argmax()):
        report = check_values(fused(tail), operand(torch.float32))
        assert report.pytorch in (("amax",), ("argmax",)) and not report.passes


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_by_cudnn_is_traced_like_any_other(training: bool) -> None:
    """PyTorch calls another operator for BatchNorm and InstanceNorm on a GPU, in float32 and float16."""
    weight, bias, mean, variance = torch.randn(C), torch.randn(C), torch.randn(C), torch.rand(C) + 0.5

    def on_gpu(z: Tensor) -> Tensor:
        found = torch.ops.aten.cudnn_batch_norm(z, weight, bias, mean, variance, training, 0.1, 1e-5)
        return F.leaky_relu(found[0])

    def as_usual(z: Tensor) -> Tensor:
        return F.leaky_relu(F.batch_norm(z, mean, variance, weight, bias, training, 0.1, 1e-5))

    shape, strides = (2, C, 5, 7, 9), (C * 315, 315, 63, 9, 1)
    texts = [
        str(trace(tail, shape, strides, torch.float32, torch.device("cpu")).graph) for tail in (on_gpu, as_usual)
    ]
    assert texts[0] == texts[1]
    assert "batch_norm" not in texts[0]
