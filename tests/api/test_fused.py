"""ConvTranspose3d with ReLU, and with ReLU and GroupNorm: PyTorch's three layers in everything but the passes."""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import Layer, poisoned, to_tf32
from sanitizing import sanitized
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tconv3d
from tconv3d import emulator
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.norm import planner as norm_planner
from tconv3d.planning import planner
from tconv3d.torch_ops import executor, norm_executor
from tconv3d.torch_ops.backend import Backend

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}
T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
# Relative error of a whole tensor: its rounding, and in gradients what a rounded gradient does to sums.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Block:
    """A layer, and the GroupNorm behind its ReLU."""

    layer: Layer
    norm_groups: int
    affine: bool = True
    dtype: torch.dtype = torch.float32
    tf32: bool = False
    kernel: str = "direct"  # of the forward pass
    settings: dict[str, Any] = field(default_factory=dict)

    def module(self, device: str, dtype: torch.dtype | None = None) -> tconv3d.ConvTranspose3dReLUGroupNorm:
        l, kind = self.layer, self.dtype if dtype is None else dtype  # noqa: E741
        torch.manual_seed(2)
        block = tconv3d.ConvTranspose3dReLUGroupNorm(
            l.in_channels, l.out_channels, l.kernel, self.norm_groups, l.stride, l.padding, l.output_padding,
            l.groups, l.bias, l.dilation, affine=self.affine, **self.settings,
        )  # fmt: skip
        with torch.no_grad():
            for parameter in block.group_norm.parameters():
                parameter.normal_()
            block.conv_transpose.weight.copy_(to_tf32(block.conv_transpose.weight))
        return block.to(device, kind)

    def input(self, device: str, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        x = torch.randn(self.layer.batch, self.layer.in_channels, *self.layer.size)
        return to_tf32(x).to(device, self.dtype).contiguous(memory_format=memory_format)


BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
BLOCKS = {
    "plain": Block(Layer(4, 6, (3, 4, 5), T3), 2),
    "one group": Block(Layer(4, 6, (2, 3, 5), T3, T2, T1), 1),
    "one channel per group": Block(Layer(3, 5, (2, 3, 5), T2, T2), 5),
    "not affine": Block(Layer(4, 8, (3, 4, 5), T3), 4, affine=False),
    "no bias": Block(Layer(4, 6, (3, 2, 5), T3, bias=False), 3),
    "depthwise": Block(Layer(6, 6, (3, 3, 4), (4, 4, 4), T2, T1, groups=6), 2, kernel="depthwise"),
    "groups across the convolution's": Block(Layer(8, 12, (2, 3, 4), T3, T2, T1, groups=4), 2),
    "empty phases": Block(Layer(2, 4, (3, 3, 3), T3, T2, (0, 1, 2), T1, T2), 2),
    "float64": Block(Layer(3, 6, (3, 4, 5), T3, T2, T1), 3, dtype=F64),
    "long channels": Block(Layer(1, 2, (1, 40, 80), T1), 2),
    "many channels": Block(Layer(2, 1032, (1, 2, 2), T1), 4),
    "batch of many": Block(Layer(2, 4, (1, 1, 2), T2, batch=11), 4),
    "tensor cores": Block(Layer(16, 32, (3, 4, 5), T3), 4, tf32=True, kernel="halo"),
    "tensor cores, march": Block(Layer(32, 16, (4, 8, 9), T3, T2, T1), 16, dtype=BF16, kernel="halo"),
    "tensor cores, one group": Block(Layer(16, 24, (3, 4, 5), T2, T2), 1, dtype=F16, kernel="halo"),
    "tensor cores, 12 channels": Block(Layer(16, 36, (3, 4, 5), T3, groups=1), 3, tf32=True, kernel="halo"),
    "tensor cores, groups": Block(Layer(32, 32, (3, 4, 5), T3, T2, T1, groups=2), 8, dtype=BF16, kernel="halo"),
    "tensor cores, batch in a tile": Block(
        Layer(32, 16, (2, 2, 2), T3, T2, T1, batch=9), 4, dtype=BF16, kernel="halo"
    ),
    "few inputs": Block(Layer(2, 16, (3, 4, 5), T3, T2, T1), 4, tf32=True, kernel="few_inputs"),
    "few outputs": Block(Layer(16, 2, (3, 4, 5), T3), 1, tf32=True, kernel="few_outputs"),
}


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Inside of the fixture `ours`, which forbids it, and restores what was."""
    torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"  # type: ignore[attr-defined]
    yield
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]


def three_layers(block: tconv3d.ConvTranspose3dReLUGroupNorm) -> nn.Sequential:
    """PyTorch's layers with the block's parameters, in float64."""
    convolution = nn.ConvTranspose3d.__new__(nn.ConvTranspose3d)
    convolution.__dict__ = copy.deepcopy(block.conv_transpose).__dict__
    return nn.Sequential(convolution, nn.ReLU(), copy.deepcopy(block.group_norm)).double()


def errors(got: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs]


def run(module: nn.Module, x: Tensor, grad: Tensor | None = None) -> list[Tensor]:
    """The result, and the gradients of the input and of all parameters."""
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    grad = torch.ones_like(y) if grad is None else grad.to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [leaf, *module.parameters()], grad)]


# ---- against float64


@pytest.mark.parametrize(
    ("name", "memory_format"),
    [
        (name, form)
        for i, name in enumerate(BLOCKS)
        for form in (list(FORMATS) if i % 3 == 0 else [list(FORMATS)[i % 2]])
    ],
)
def test_result_and_gradients(name: str, memory_format: str, ours: str) -> None:
    block = BLOCKS[name]
    module, x = block.module(ours), block.input(ours, FORMATS[memory_format])
    exact = three_layers(module)
    reference = exact(x.double())
    grad = torch.randn(reference.shape, generator=torch.Generator().manual_seed(3)).to(ours, x.dtype)
    expected = run(exact, x.double(), grad.double())
    with tf32(block.tf32), poisoned():
        got = run(module, x, grad)
        again = run(module, x, grad)
        with torch.no_grad():
            in_place = module(x)
        problem = tconv3d.explain(module.conv_transpose, x)
    if ours == "cpu" or torch.cuda.get_device_capability() == (9, 0):
        lines = block.kernel == "depthwise" and memory_format == "channels last"
        assert problem.kernel == block.kernel + "_lines" * lines
    assert got[0].dtype == x.dtype
    assert got[0].stride() == module.conv_transpose(x).stride()
    # Tensor cores round the gradient that the norm leaves before they multiply with it.
    tolerance = [TOLERANCE[x.dtype]] + [1e-3 if block.tf32 else TOLERANCE[x.dtype]] * (len(got) - 1)
    found = errors(got, expected)
    assert all(e < t for e, t in zip(found, tolerance, strict=True)), found  # NaN is wrong too
    assert all(map(torch.equal, got, again)), "a second run has other bits"
    assert torch.equal(got[0], in_place)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", ["plain", "tensor cores", "few inputs", "few outputs", "depthwise", "float64"])
def test_relu_alone(name: str, memory_format: str, ours: str) -> None:
    block, layer = BLOCKS[name], BLOCKS[name].layer
    convolution = block.module(ours).conv_transpose
    fused = tconv3d.ConvTranspose3dReLU(
        layer.in_channels, layer.out_channels, layer.kernel, layer.stride, layer.padding, layer.output_padding,
        layer.groups, layer.bias, layer.dilation,
    ).to(ours, block.dtype)  # fmt: skip
    fused.load_state_dict(convolution.state_dict())
    x = block.input(ours, FORMATS[memory_format])
    with tf32(block.tf32), poisoned():
        plain = run(nn.Sequential(convolution, nn.ReLU()), x)
        got = run(fused, x)
        with torch.no_grad():
            assert torch.equal(fused(x), plain[0])
            single = fused(x[0])
    assert all(map(torch.equal, got, plain)), "the ReLU changes nothing but the passes"
    # Not the same bits: one item alone comes back contiguous, which may be another kernel's work.
    torch.testing.assert_close(single, tconv3d_relu(fused, x[:1], block.tf32)[0])
    assert (got[0] == 0).any() and (got[0] > 0).any()


def tconv3d_relu(layer: nn.ConvTranspose3d, x: Tensor, allowed: bool) -> Tensor:
    with tf32(allowed), torch.no_grad():
        settings: Any = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        return tconv3d.conv_transpose3d_relu(x, layer.weight, layer.bias, *settings)


@pytest.mark.parametrize("name", ["plain", "tensor cores", "few inputs", "few outputs", "depthwise", "float64"])
def test_nan_and_infinities_pass_as_in_pytorch(name: str, ours: str) -> None:
    block = BLOCKS[name]
    module, x = block.module(ours), block.input(ours)
    x[0, 0, 0, 0, 0], x[-1, 0, -1, -1, -1] = nan, inf
    with tf32(block.tf32):
        got = tconv3d_relu(module.conv_transpose, x, block.tf32)
        normed = module(x).detach()
    expected = torch.relu(three_layers(module)[0](x.double()))
    assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().any()
    assert torch.equal(got.isposinf(), expected.isposinf()) and got.isposinf().any()
    assert torch.equal(normed.isnan(), three_layers(module)(x.double()).isnan())


def test_statistics_survive_a_large_mean(ours: str) -> None:
    """Into the norm goes what comes in, with mean 1e4 and deviation 1: the error is not above PyTorch's float32."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, 16, 16, device=ours) + 1e4
    w = torch.eye(8, device=ours).view(8, 8, 1, 1, 1)
    exact = F.group_norm(x.double(), 4)
    theirs = errors([F.group_norm(x, 4)], [exact])[0]
    for memory_format in FORMATS.values():
        got = tconv3d.conv_transpose3d_relu_group_norm(x.contiguous(memory_format=memory_format), w, None, 4)
        assert errors([got], [exact])[0] <= theirs
    # On tensor cores: deviations that TF32 has, far from zero.
    rounded = to_tf32(torch.randn(2, 8, 8, 16, 16, device=ours) * 16 + 1e4)
    exact = F.group_norm(rounded.double(), 4)
    theirs = errors([F.group_norm(rounded, 4)], [exact])[0]
    with tf32(True):
        assert errors([tconv3d.conv_transpose3d_relu_group_norm(rounded, w, None, 4)], [exact])[0] <= theirs


def test_equal_values_and_one_value_per_group(ours: str) -> None:
    x, w = torch.full((2, 3, 2, 2, 2), 7.25, device=ours), torch.eye(3, device=ours).view(3, 3, 1, 1, 1)
    assert torch.equal(tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 3), torch.zeros_like(x))
    x = torch.randn(2, 3, 1, 1, 1, device=ours)
    got = tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 3, norm_bias=torch.arange(3.0, device=ours))
    assert torch.equal(got, torch.arange(3.0, device=ours).view(1, 3, 1, 1, 1).expand_as(x))


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_norm_with_one_parameter(which: str, ours: str) -> None:
    x, w = torch.randn(2, 2, 2, 3, 2, device=ours, dtype=F64), torch.randn(2, 4, 2, 2, 2, device=ours, dtype=F64)
    parameter = torch.randn(4, device=ours, dtype=F64, requires_grad=True)
    got = tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 2, **{f"norm_{which}": parameter})
    both = {"weight": torch.ones_like(parameter), "bias": torch.zeros_like(parameter), which: parameter}
    expected = F.group_norm(torch.relu(F.conv_transpose3d(x, w)), 2, **both)
    torch.testing.assert_close(got, expected)
    pairs = [torch.autograd.grad(result.pow(3).sum(), parameter) for result in (got, expected)]
    torch.testing.assert_close(*pairs)


def test_batch_of_nothing(ours: str) -> None:
    module = BLOCKS["plain"].module(ours)
    got = run(module, torch.randn(0, 4, 3, 4, 5, device=ours))
    assert got[0].shape == (0, 6, 5, 6, 7)
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in got[2:])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one value": lambda g: g[0, 0, 0, 0, 0].expand_as(g),
    "transposed": lambda g: g.transpose(2, 4).contiguous().transpose(2, 4),
    "the other format": lambda g: g.contiguous(memory_format=torch.channels_last_3d),
    "of an odd address": lambda g: torch.cat([g.new_zeros(1), g.flatten()])[1:].view(g.shape),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_any_layout(name: str, ours: str) -> None:
    block = BLOCKS["plain"]
    module, x = block.module(ours), block.input(ours)
    grad = LAYOUTS[name](torch.randn(2, 6, 5, 6, 7, device=ours))
    found = errors(run(module, x, grad), run(three_layers(module), x.double(), grad.double()))
    assert max(found) < TOLERANCE[torch.float32], found


def norm_gradient(dy: Tensor, x: Tensor, groups: int, weight: Tensor) -> list[Tensor]:
    """Of a ReLU's result x, in float64: what `norm_executor.gradient` computes."""
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_(), torch.zeros_like(weight, dtype=F64)]
    y = F.group_norm(leaves[0], groups, leaves[1], leaves[2].requires_grad_())
    dx, dweight, dbias = torch.autograd.grad(y, leaves, dy.double())
    dz = dx * (x > 0)
    return [dz, torch.stack([dweight, dbias]), dz.sum((0, 2, 3, 4))]


@pytest.mark.parametrize(
    ("kernel", "shape", "groups", "kinds"),
    [
        ("norm_both", (6, 12, 5, 7, 61), 3, (torch.float32, torch.float32)),  # several units of a pass, odd volumes
        ("norm_both", (9, 8, 1, 3, 3), 8, (BF16, torch.float32)),  # one strip of a norm group
        ("norm_once", (5, 12, 5, 8, 60), 3, (torch.float32, torch.float32)),  # a channel's last chunk is shorter
        ("norm_once", (9, 8, 2, 4, 3), 8, (BF16, torch.float32)),  # less than a ring of them
        ("norm_once", (1, 20, 3, 10, 16), 5, (F16, F16)),
    ],
)
def test_both_passes_of_the_norms_gradient_in_one_launch(
    kernel: str, shape: tuple[int, ...], groups: int, kinds: tuple[torch.dtype, torch.dtype], ours: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As it is for tensors that L2 does not hold: against float64, and the same bits whatever is wanted."""
    torch.manual_seed(6)
    x, dy = torch.randn(shape, device=ours).relu().to(kinds[0]), torch.randn(shape, device=ours).to(kinds[1])
    weight = torch.randn(shape[1], device=ours)
    variance, mean = torch.var_mean(x.double().reshape(shape[0], groups, -1), 2, correction=0)
    statistics = torch.stack([mean, (variance + 1e-5).rsqrt()]).float()
    monkeypatch.setattr(norm_planner, "LEAST_BYTES", 0)
    monkeypatch.setattr(norm_planner, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(norm_planner, "MOST_STAGES", 6)
    monkeypatch.setattr(norm_planner, "KEPT_GROUPS", 1)
    monkeypatch.setattr(executor, "_tasks", {})
    norm_planner.plan_gradient.cache_clear()
    ran: list[str] = []
    make_task = executor.make_task
    monkeypatch.setattr(
        executor, "make_task", lambda plan, *rest: (ran.append(plan.kernel), make_task(plan, *rest))[1]
    )
    with poisoned():
        got, dz, parameters = (
            norm_executor.gradient(dy, x, statistics, weight, torch.float32, norm_planner.Wanted(*wanted))
            for wanted in ((True, True, True), (True, False, False), (False, True, False))
        )
    # What is not yet written is all ones, and so is one of the NaNs: it must arrive nevertheless.
    ones = torch.full(shape, -1, dtype=torch.int32, device=ours).view(torch.float32).to(kinds[1])
    everything = norm_planner.Wanted(True, True, True)
    spoiled = norm_executor.gradient(ones, x, statistics, weight, torch.float32, everything)
    assert all(each.isnan().any() for each in spoiled)
    norm_planner.plan_gradient.cache_clear()
    assert ran == [kernel, kernel, "norm_grad" if kernel == "norm_both" else kernel]
    found = errors(list(got), norm_gradient(dy, x, groups, weight))
    assert max(found) < TOLERANCE[kinds[0]], found
    assert torch.equal(dz[0], got[0]) and torch.equal(parameters[1], got[1])


# ---- derivatives as PyTorch's machinery asks for them


def tiny(affine: bool = True) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A block in float64 as a function of its operands."""
    torch.manual_seed(5)
    shapes = [(2, 2, 2, 1, 2), (2, 4, 2, 2, 1), (4,), *([(4,), (4,)] if affine else [])]
    operands = [torch.randn(shape, dtype=F64).requires_grad_() for shape in shapes]

    def function(x: Tensor, w: Tensor, b: Tensor, *norm: Tensor) -> Tensor:
        return tconv3d.conv_transpose3d_relu_group_norm(x, w, b, 2, *norm, stride=(1, 2, 1))

    return function, operands


@pytest.mark.parametrize("affine", [True, False])
def test_first_and_second_derivatives(affine: bool, ours: str) -> None:
    function, operands = tiny(affine)
    leaves = [operand.detach().to(ours).requires_grad_() for operand in operands]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_second_derivatives_of_relu(ours: str) -> None:
    _, (x, w, b, *_) = tiny()
    leaves = [operand.detach().to(ours).requires_grad_() for operand in (x, w, b)]
    assert torch.autograd.gradgradcheck(tconv3d.conv_transpose3d_relu, leaves)


@pytest.mark.parametrize("which", range(5), ids=["input", "weight", "bias", "norm weight", "norm bias"])
def test_only_the_gradients_that_are_asked_for(which: int, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, operands = tiny()
    leaves = [operand.detach().to(ours).requires_grad_() for operand in operands]
    exact = torch.autograd.grad(function(*leaves).pow(3).sum(), leaves)
    ran: list[str] = []
    names, backward = ("input_grad", "weight_grad", "bias_grad"), executor.backward

    def recording(*arguments: Any) -> list[Tensor | None]:
        ran.extend(name for name, wanted in zip(names, arguments[3], strict=True) if wanted)
        return backward(*arguments)

    monkeypatch.setattr(executor, "backward", recording)
    # `autograd.grad` asks for one of all, or one alone requires a gradient.
    for requiring in (set(range(5)), {which}):
        some = [leaf.detach().requires_grad_(i in requiring) for i, leaf in enumerate(leaves)]
        ran.clear()
        (got,) = torch.autograd.grad(function(*some).pow(3).sum(), some[which])
        assert ran == {0: ["input_grad"], 1: ["weight_grad"]}.get(which, [])
        assert torch.equal(got, exact[which])


def test_what_is_kept_for_the_backward_pass(ours: str) -> None:
    """The ReLU's result and the statistics beside the operands: not the norm's result."""
    block = BLOCKS["plain"]
    module, x = block.module(ours), block.input(ours).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        y = module(x)
    own = {t.data_ptr() for t in (x, *module.parameters())}
    new = [t for t in kept if t.data_ptr() not in own]
    assert sorted(t.numel() for t in new) == [2 * 2 * 2, y.numel()]
    assert y.data_ptr() not in {t.data_ptr() for t in kept}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_one_result_is_allocated(
    mode: Callable[[], Any], ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = BLOCKS["plain"]
    module, x = block.module(ours), block.input(ours)
    seen: list[tuple[Tensor, Tensor | None]] = []
    original = norm_executor.normalize

    def normalize(*arguments: Any) -> Tensor:
        seen.append((arguments[0], arguments[4]))
        return original(*arguments)

    monkeypatch.setattr(norm_executor, "normalize", normalize)
    with mode():
        y = module(x)
    ((source, out),) = seen
    assert out is source and y.data_ptr() == source.data_ptr() and y.grad_fn is None


def test_a_bias_may_change_before_the_backward_pass(ours: str) -> None:
    """As in PyTorch, which keeps weights and not biases."""
    function, operands = tiny()
    leaves = [operand.detach().to(ours).requires_grad_() for operand in operands]
    for which, fails in enumerate((True, True, False, True, False)):
        y = function(*leaves)
        with torch.no_grad():
            leaves[which].add_(1)
        if fails:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()


def test_a_retained_graph_gives_the_same_gradients_again(ours: str) -> None:
    function, operands = tiny()
    leaves = [operand.detach().to(ours).requires_grad_() for operand in operands]
    y = function(*leaves).pow(2).sum()
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, leaves)))


# ---- modules: constructor, state, errors


def test_state_dict_of_the_three_layer_model_loads_and_saves() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv_transpose = nn.ConvTranspose3d(4, 6, 3, 2, 1, 1, 2)
            self.group_norm = nn.GroupNorm(3, 6)

    torch.manual_seed(1)
    plain = Plain()
    torch.manual_seed(1)
    block = tconv3d.ConvTranspose3dReLUGroupNorm(4, 6, 3, 3, stride=2, padding=1, output_padding=1, groups=2)
    assert list(block.state_dict()) == list(plain.state_dict())
    assert all(map(torch.equal, block.state_dict().values(), plain.state_dict().values())), "the same random numbers"
    nn.init.normal_(block.group_norm.weight)
    plain.load_state_dict(block.state_dict(), strict=True)
    other = tconv3d.ConvTranspose3dReLUGroupNorm(4, 6, 3, 3, stride=2, padding=1, output_padding=1, groups=2)
    other.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(1, 4, 2, 3, 2)
    expected = plain.group_norm(torch.relu(plain.conv_transpose(x)))
    torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(copy.deepcopy(other)(x, output_size=[4, 6, 4]), expected)


def test_constructor() -> None:
    block = tconv3d.ConvTranspose3dReLUGroupNorm(
        4, 6, (1, 2, 3), 3, (3, 1, 2), (0, 1, 1), (2, 0, 1), 2, False, (1, 2, 1), "zeros", 0.25, False, "meta", F64
    )
    convolution, norm = block.conv_transpose, block.group_norm
    assert type(convolution) is tconv3d.ConvTranspose3d and type(norm) is nn.GroupNorm
    assert convolution.extra_repr() == nn.ConvTranspose3d(
        4, 6, (1, 2, 3), (3, 1, 2), (0, 1, 1), (2, 0, 1), 2, False, (1, 2, 1)
    ).extra_repr()  # fmt: skip
    assert (norm.num_groups, norm.num_channels, norm.eps, norm.affine) == (3, 6, 0.25, False)
    assert convolution.weight.dtype == F64 and convolution.weight.is_meta
    with pytest.raises(ValueError, match="Only"):
        tconv3d.ConvTranspose3dReLUGroupNorm(4, 6, 1, 3, padding_mode="circular")


@pytest.mark.parametrize("groups", [4, 0])
def test_bad_group_counts_raise_as_in_pytorch(groups: int, ours: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError)) as expected:
        nn.GroupNorm(groups, 6)
    with pytest.raises(type(expected.value)) as got:
        tconv3d.ConvTranspose3dReLUGroupNorm(4, 6, 3, groups)
    assert str(got.value) == str(expected.value)
    x, w = torch.randn(1, 4, 2, 2, 2, device=ours), torch.randn(4, 6, 1, 1, 1, device=ours)
    with pytest.raises(RuntimeError, match=r"num_groups|num groups"):
        tconv3d.conv_transpose3d_relu_group_norm(x, w, None, groups)
    with pytest.raises(RuntimeError, match=r"num_groups|num groups"):
        torch.ops.tconv3d.conv_transpose3d_relu_group_norm(
            x, w, None, None, None, groups, 1e-5, x.dtype, T1, (0,) * 3, (0,) * 3, 1, T1
        )


def test_one_value_per_group_raises_as_in_pytorch(ours: str) -> None:
    x, w = torch.randn(1, 3, 1, 1, 1, device=ours), torch.randn(3, 4, 1, 1, 1, device=ours)
    with pytest.raises(ValueError) as expected:
        F.group_norm(F.conv_transpose3d(x, w), 4)
    with pytest.raises(ValueError) as got:
        tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 4)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        ({"norm_weight": torch.ones(3)}, r"norm_weight to be a vector .* \[3\] and 4 channels"),
        ({"norm_bias": torch.ones(4, 1)}, r"norm_bias to be a vector .* \[4, 1\]"),
        ({"norm_weight": torch.ones(4, dtype=F64)}, "float32.* norm_weight type .*float64"),
        ({"norm_weight": 1.0}, "norm_weight to be a Tensor, but got .* float"),
        ({"num_groups": 2.0}, "num_groups to be an integer"),
    ],
)
def test_what_is_no_norm(norm: dict[str, Any], words: str, ours: str) -> None:
    x, w = torch.randn(1, 3, 2, 2, 2, device=ours), torch.randn(3, 4, 1, 1, 1, device=ours)
    moved = {k: v.to(ours) if isinstance(v, Tensor) else v for k, v in {"num_groups": 2, **norm}.items()}
    with pytest.raises((RuntimeError, TypeError), match=words):
        tconv3d.conv_transpose3d_relu_group_norm(x, w, None, **moved)


def test_unbatched_input_is_what_the_three_layers_make_of_it(ours: str) -> None:
    """GroupNorm knows no unbatched input: it takes the channels for the batch, and depth for the channels."""
    x, w = torch.randn(3, 4, 2, 2, device=ours, dtype=F64), torch.randn(3, 6, 1, 2, 2, device=ours, dtype=F64)
    expected = F.group_norm(torch.relu(F.conv_transpose3d(x, w)), 2)
    torch.testing.assert_close(tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 2), expected)
    module = BLOCKS["plain"].module(ours)
    single = torch.randn(4, 3, 4, 5, device=ours)
    with pytest.raises(RuntimeError) as theirs:
        three_layers(module)(single.double())
    with pytest.raises(RuntimeError) as mine:
        module(single)
    assert str(mine.value) == str(theirs.value)


@pytest.mark.parametrize("training", [True, False])
def test_training_and_eval_are_alike(training: bool, ours: str) -> None:
    block = BLOCKS["plain"]
    module, x = block.module(ours), block.input(ours)
    assert torch.equal(module.train(training)(x), module.train(not training)(x))


# ---- backends


def test_pytorchs_backend_runs_pytorchs_operators(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(planner, "plan", refuse)
    block = BLOCKS["plain"]
    module, x = block.module(device), block.input(device)
    with tconv3d.use_backend("torch"):
        got = run(module, x)
        explanation = tconv3d.explain(module, x) if device == "cuda" else None
        with torch.no_grad():
            through_the_operator = torch.compile(module, backend="eager", fullgraph=True)(x)
    assert explanation is None or "PyTorch's operator" in explanation.here
    expected = run(three_layers(module), x.double())
    assert max(errors(got, expected)) < 1e-4
    assert max(errors([through_the_operator], expected[:1])) < 1e-4


def test_a_backward_pass_runs_on_the_backend_of_its_forward_pass(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    original = norm_executor.gradient
    monkeypatch.setattr(norm_executor, "gradient", lambda *a: (ran.append("ours"), original(*a))[1])
    function, operands = tiny()
    leaves = [operand.detach().to(device).requires_grad_() for operand in operands]
    with tconv3d.use_backend("cuda" if device == "cuda" else "emulator"):
        y = function(*leaves)
    with tconv3d.use_backend("torch"):
        y.sum().backward()
    assert ran == ["ours"]


# ---- explain


def test_explain_says_who_leaves_the_moments() -> None:
    wide = tconv3d.ConvTranspose3dReLUGroupNorm(64, 128, 3, 8, bias=False, dtype=BF16, device="meta")
    found = tconv3d.explain(wide, (2, 64, 16, 16, 16), gpu="H200")
    assert [each.name for each in found.passes] == ["forward", "normalize", "norm_grad", "input_grad", "weight_grad"]
    assert found.kernel == "halo" and found.passes[0].tile.endswith("leaves the moments of its result")
    assert "ReLU, GroupNorm of 8 groups" in found.layer and found.passes[1].floor_ms is not None
    exact = tconv3d.ConvTranspose3dReLUGroupNorm(6, 8, 3, 2, affine=False, dtype=F64, device="meta")
    found = tconv3d.explain(exact, (2, 6, 4, 4, 4), gpu="H200")
    assert found.kernel == "direct" and found.passes[0].tile.endswith("a pass over its result leaves the moments")
    assert found.layer.endswith("not affine") and "normalize: normalize" in str(found)
    relu = tconv3d.ConvTranspose3dReLU(64, 128, 3, dtype=BF16, device="meta")
    found = tconv3d.explain(relu, (2, 64, 16, 16, 16), gpu="H200")
    assert found.kernel == "halo" and found.layer.endswith("ReLU") and found.passes[0].launches == 2


def test_kernels_without_an_epilogue_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halo_planner, "HAS_EPILOGUE", False)
    planner.plan.cache_clear()
    try:
        arguments: tuple[Any, ...] = (64, 128, 3)
        for kind, kernel in ((tconv3d.ConvTranspose3d, "halo"), (tconv3d.ConvTranspose3dReLU, "direct")):
            found = tconv3d.explain(kind(*arguments, dtype=BF16, device="meta"), (2, 64, 9, 9, 9), gpu="H200")
            assert found.kernel == kernel
        assert found.passes[0].passed_over["halo"] == "its kernel has no epilogue for a ReLU"
    finally:
        planner.plan.cache_clear()


# ---- torch.library, torch.compile, autocast, CUDA graphs

STEPS = ("conv_transpose3d_relu_statistics", "normalize", "relu_group_norm_grad")


def operator_call(name: str, device: str, memory_format: torch.memory_format) -> tuple[Any, tuple[Any, ...]]:
    layer = Layer(4, 6, (3, 2, 3), (3, 2, 3), (2, 1, 2), (1, 0, 1), (1, 0, 0), groups=2)
    x, w, b = layer.operands(torch.float32, device)
    x = x.contiguous(memory_format=memory_format)
    y = torch.relu(F.conv_transpose3d(x, w, b, *layer.settings)).contiguous(memory_format=memory_format)
    gamma, beta = torch.randn(6, device=device), torch.randn(6, device=device)
    statistics = torch.stack([y.view(2, 3, -1).mean(2), y.view(2, 3, -1).std(2)]) if y.is_contiguous() else None
    if statistics is None:
        statistics = torch.rand(2, 2, 3, device=device) + 0.5
    leaves = [t.detach().requires_grad_() for t in (x, w, b, gamma, beta)]
    arguments: dict[str, tuple[Any, ...]] = {
        "conv_transpose3d_relu": (*leaves[:3], *layer.settings),
        "conv_transpose3d_relu_group_norm": (*leaves, 3, 1e-5, torch.float32, *layer.settings),
        "conv_transpose3d_relu_statistics": (x, w, b, 3, 1e-5, *layer.settings),
        "normalize": (y, statistics, gamma, beta, torch.float32),
        "relu_group_norm_grad": (torch.randn_like(y), y, statistics, gamma, torch.float32, (True, True, True)),
    }
    return getattr(torch.ops.tconv3d, name).default, arguments[name]


OPERATORS = ("conv_transpose3d_relu", "conv_transpose3d_relu_group_norm", *STEPS)


@pytest.fixture(params=["ours", "default"])
def backend(request: pytest.FixtureRequest, device: str) -> Any:
    """Our kernels, and what a user gets who chooses nothing."""
    chosen: Backend = "auto" if request.param == "default" else "cuda" if device == "cuda" else "emulator"
    with tconv3d.use_backend(chosen), torch.backends.cudnn.flags(allow_tf32=False):
        yield chosen


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck(name: str, backend: Backend, device: str) -> None:
    operator, arguments = operator_call(name, device, torch.contiguous_format)
    results = torch.library.opcheck(operator, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_and_strides_without_data(name: str, memory_format: str, backend: Backend, device: str) -> None:
    operator, arguments = operator_call(name, device, FORMATS[memory_format])
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    real, fake = ((found,) if isinstance(found, Tensor) else found for found in (real, fake))
    assert [(t.shape, t.stride(), t.dtype) for t in fake] == [(t.shape, t.stride(), t.dtype) for t in real]


def test_operators_compute_the_same_on_both_backends(device: str) -> None:
    for name in OPERATORS:
        operator, arguments = operator_call(name, device, torch.contiguous_format)
        found = []
        for chosen in ("torch", "cuda" if device == "cuda" else "emulator"):
            with tconv3d.use_backend(chosen), torch.backends.cudnn.flags(allow_tf32=False):  # type: ignore[arg-type]
                found.append(operator(*arguments))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_compile(memory_format: str, backend: Backend, device: str) -> None:
    torch._dynamo.reset()
    block = BLOCKS["plain"]
    module, x = block.module(device), block.input(device, FORMATS[memory_format])
    compiled: Any = torch.compile(nn.Sequential(module, nn.Tanh()), fullgraph=True, backend="aot_eager")
    got = run_with(compiled, module, x)
    expected = run(nn.Sequential(three_layers(module), nn.Tanh()), x.double())
    assert max(errors(got, expected)) < 1e-5
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), got[0])


def run_with(call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    y = call(leaf)
    return [y.detach(), *torch.autograd.grad(y.sum(), [leaf, *module.parameters()])]


def test_compile_once_for_all_sizes(backend: Backend, device: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    module = BLOCKS["plain"].module(device)
    compiled: Any = torch.compile(module, fullgraph=True, backend=counter)
    for batch, *size in ((2, 3, 4, 5), (3, 4, 4, 6), (5, 2, 7, 3)):
        x = torch.randn(batch, 4, *size, device=device)
        for dim in (0, 2, 3, 4):
            torch._dynamo.mark_dynamic(x, dim)
        torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_autocast(dtype: torch.dtype, ours: str) -> None:
    """Types as the three layers have them: the norm is float32 on CUDA, and the convolution's on the CPU."""
    block = BLOCKS["plain"]
    module, x = block.module(ours), block.input(ours)
    layers = nn.Sequential(module.conv_transpose, nn.ReLU(), module.group_norm)
    with torch.autocast(ours, dtype):
        got = run(module, x)
        with tconv3d.use_backend("torch"):
            expected = run(layers, x)
        relu = tconv3d.conv_transpose3d_relu(x, module.conv_transpose.weight)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    assert got[0].dtype == (torch.float32 if ours == "cuda" else dtype) and relu.dtype == dtype
    assert max(errors(got, [t.double() for t in expected])) < 2 * TOLERANCE[dtype]


def test_a_norm_in_float32_of_a_half_precision_convolution(ours: str) -> None:
    """What autocast asks for on CUDA, here too: three types in one block."""
    x, w, b = Layer(16, 8, (3, 4, 5), T3).operands(F16, ours)
    gamma, beta = torch.randn(8, device=ours), torch.randn(8, device=ours)
    leaves = [t.detach().requires_grad_() for t in (x, w, b, gamma, beta)]
    settings = (T1, (0, 0, 0), (0, 0, 0), 1, T1)
    y = torch.ops.tconv3d.conv_transpose3d_relu_group_norm(*leaves, 2, 1e-5, torch.float32, *settings)
    assert y.dtype == torch.float32
    grad = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, grad)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    reference = F.group_norm(torch.relu(F.conv_transpose3d(*exact[:3])), 2, *exact[3:])
    expected = torch.autograd.grad(reference, exact, grad.double())
    assert [t.dtype for t in got] == [t.dtype for t in leaves]
    assert max(errors([y.detach(), *got], [reference.detach(), *expected])) < TOLERANCE[F16]
    with torch.no_grad():
        again = torch.ops.tconv3d.conv_transpose3d_relu_group_norm(*leaves, 2, 1e-5, torch.float32, *settings)
    assert torch.equal(again, y)


@CUDA
def test_graph_capture_and_replay(ours: str) -> None:
    block = BLOCKS["plain"]
    module, x = block.module(ours), block.input(ours)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(module, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(module, x)
    for _ in range(2):
        x.copy_(block.input(ours))
        graph.replay()
        assert all(map(torch.equal, captured, run(module, x)))


@CUDA
def test_peak_memory_of_a_training_step(ours: str) -> None:
    block = Block(Layer(16, 32, (48, 48, 48), T3), 8)
    module, x = block.module(ours), block.input(ours)
    layers = nn.Sequential(nn.ConvTranspose3d(16, 32, 3), nn.ReLU(), nn.GroupNorm(8, 32)).to(ours)
    peaks = []
    for model in (module, layers):
        run(model, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(model, x)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= peaks[1] * 1.01, peaks


# ---- under sanitizers, and in every order of threads

ORDERED = ("one channel per group", "tensor cores, groups", "tensor cores, march")
SANITIZED = ("one channel per group", "tensor cores, march")  # of those on tensor cores one: compiling takes a minute


def all_passes(name: str) -> list[Tensor]:
    """In the emulator, in both formats."""
    block = BLOCKS[name]
    torch.manual_seed(4)
    module, x = block.module("cpu"), block.input("cpu")
    with tconv3d.use_backend("emulator"):
        return [t for form in FORMATS.values() for t in run(module, x.contiguous(memory_format=form))]


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
def test_sanitizers_find_nothing() -> None:
    child = subprocess.run([sys.executable, __file__], env=sanitized(), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split("\n")[:-1] == [f"{name}: run" for name in SANITIZED]


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_threads_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for order in ("forward", "reversed", "shuffled:1"):
        monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", order)
        monkeypatch.setattr(executor, "_tasks", {})
        results.append(all_passes(name))
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


if __name__ == "__main__":
    for each in SANITIZED:
        all_passes(each)
        print(f"{each}: run", flush=True)
