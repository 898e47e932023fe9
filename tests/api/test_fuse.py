"""What follows a convolution, fused: values and gradients against float64, and what is left to PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import Layer, poisoned
from preferred import preferring
from torch import Tensor, nn

import tconv3d
from tconv3d.api.captures import captures
from tconv3d.api.fuse import FusedTail
from tconv3d.planning import planner
from tconv3d.torch_ops import tail_executor

C = 8
SIZE = (3, 4, 5)
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}


class Tail(nn.Module):
    """Parameters and buffers that tails capture, and one tail by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.batch_norm = nn.BatchNorm3d(C)
        self.group_norm = nn.GroupNorm(2, C)
        self.instance_norm = nn.InstanceNorm3d(C, affine=True)
        self.prelu = nn.PReLU(C)
        self.scale = nn.Parameter(torch.randn(C, 1, 1, 1))
        self.residual = nn.Parameter(torch.randn(2, C, 5, 7, 9))
        self.gain = nn.Parameter(torch.tensor(1.3))
        for norm in (self.batch_norm, self.group_norm, self.instance_norm):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        nn.init.normal_(self.batch_norm.running_mean)
        nn.init.uniform_(self.batch_norm.running_var, 0.5, 2.0)

    def forward(self, z: Tensor) -> Any:
        return TAILS[self.name](self, z)


TAILS: dict[str, Callable[[Tail, Tensor], Any]] = {
    "SiLU": lambda t, z: F.silu(z),
    "GELU": lambda t, z: F.gelu(z),
    "GELU by tanh": lambda t, z: F.gelu(z, approximate="tanh"),
    "Mish": lambda t, z: F.mish(z),
    "ELU": lambda t, z: F.elu(z, 0.7),
    "Softplus": lambda t, z: F.softplus(z),
    "Hardswish": lambda t, z: F.hardswish(z),
    "LeakyReLU in place": lambda t, z: F.leaky_relu_(z, 0.1),
    "PReLU": lambda t, z: t.prelu(z),
    "three in a row": lambda t, z: F.silu(F.silu(F.silu(z))),
    "clamp and affine": lambda t, z: z.clamp(-0.2, 0.5) * 2 + 1,
    "where, exp, log, pow": lambda t, z: torch.where(z > 0, torch.log1p(z**2), torch.exp(z)) / 3,
    "scale, residual, gain": lambda t, z: torch.sigmoid(z * t.scale + t.residual) * t.gain,
    "BatchNorm, LeakyReLU": lambda t, z: F.leaky_relu(t.batch_norm(z)),
    "InstanceNorm, LeakyReLU": lambda t, z: F.leaky_relu(t.instance_norm(z)),
    "GroupNorm, SiLU": lambda t, z: F.silu(t.group_norm(z)),
    "ReLU, GroupNorm": lambda t, z: t.group_norm(F.relu(z)),
    "norm after norm": lambda t, z: t.group_norm(F.silu(t.batch_norm(z))),
}


def module(name: str, dtype: torch.dtype, training: bool = True) -> FusedTail:
    torch.manual_seed(3)
    layer = nn.ConvTranspose3d(16, C, 3, stride=2, padding=1)
    return tconv3d.fuse(layer, Tail(name)).to(dtype).train(training)


def tensors(dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn((2, 16, *SIZE), generator=random).to(dtype).to(memory_format=FORMATS[layout])
    return x, torch.randn((2, C, 5, 7, 9), generator=random).to(dtype)


def results(model: nn.Module, x: Tensor, grad: Tensor | None, backend: str) -> dict[str, Tensor]:
    """Returns the result, and with `grad` all gradients and buffers after the call."""
    x = x.detach().requires_grad_(grad is not None)
    with tconv3d.use_backend(backend), torch.set_grad_enabled(grad is not None), poisoned():
        y = model(x)
        if grad is None:
            return {"result": y}
        y.backward(grad)
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"result": y.detach(), "input": x.grad, **named, **dict(model.named_buffers())}


def compare(name: str, dtype: torch.dtype, layout: str, training: bool, gradients: bool) -> None:
    model = module(name, dtype, training)
    x, grad = tensors(dtype, layout)
    given = grad if gradients else None
    exact = results(copy.deepcopy(model).double(), x.double(), None if given is None else given.double(), "torch")
    rival = results(copy.deepcopy(model), x, given, "torch")
    ours = results(model, x, given, "emulator")
    assert set(ours) == set(rival)
    for key, value in ours.items():
        assert value.dtype == rival[key].dtype and value.shape == rival[key].shape, key
        if not value.is_floating_point():
            assert torch.equal(value, rival[key]), key
            continue
        size = exact[key].norm().clamp_min(1e-6 * exact[key].numel() ** 0.5)
        errors = [((each[key].double() - exact[key]).norm() / size).item() for each in (ours, rival)]
        # In 16 bits one activation whose sign differs changes a gradient by 1% of its norm.
        unit = 1e-6 if dtype == torch.float32 else 2e-2 if gradients else 4e-3
        if key == "convolution.bias" and "Norm" in name and training:
            continue  # a norm removes what the bias adds, so that its gradient is 0 and its error is all there is
        assert errors[0] <= max(2 * errors[1], unit), (key, errors)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield


@pytest.mark.parametrize("name", TAILS)
def test_gradients_of_a_training_step(name: str) -> None:
    compare(name, torch.float32, "contiguous", training=True, gradients=True)


@pytest.mark.parametrize("name", ["SiLU", "scale, residual, gain", "BatchNorm, LeakyReLU", "GroupNorm, SiLU"])
def test_16_bits_channels_last(name: str) -> None:
    compare(name, torch.bfloat16, "channels last", training=True, gradients=name != "scale, residual, gain")
    compare(name, torch.bfloat16, "channels last", training=False, gradients=False)


@pytest.mark.parametrize("name", TAILS)
def test_values_without_gradients(name: str) -> None:
    compare(name, torch.float32, "channels last", training=False, gradients=False)


@pytest.mark.parametrize(
    "family", [name for name, family in planner.FAMILIES if getattr(family, "HAS_EPILOGUE", False)]
)
def test_every_kernel_with_an_epilogue_evaluates_expressions(family: str) -> None:
    """An expression that is not 0 at 0 shows outputs that a kernel fills without its epilogue."""
    layers = {
        "up": Layer(16, 8, (2, 4, 8), (2, 2, 2), (2, 2, 2)),
        "few_outputs": Layer(16, 2, (3, 4, 8), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
        "few_inputs": Layer(4, 24, (3, 4, 8), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
        "depthwise": Layer(6, 6, (3, 3, 4), (4, 4, 4), (2, 2, 2), (1, 1, 1), groups=6),
        "depthwise_lines": Layer(32, 32, (3, 3, 18), (3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), groups=32),
        "depthwise_tiles": Layer(6, 6, (3, 3, 6), (5, 5, 5), (2, 2, 2), (2, 2, 2), (1, 1, 1), groups=6),
        "halo": Layer(32, 32, (3, 5, 9), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
        "mma": Layer(32, 24, (3, 4, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1)),
        "direct": Layer(2, 3, (3, 3, 3), (1, 1, 1), (2, 2, 2), bias=False),
    }
    chosen = layers[family]
    dtype = torch.float32 if family == "direct" else torch.bfloat16
    convolution = nn.ConvTranspose3d(
        chosen.in_channels, chosen.out_channels, chosen.kernel, chosen.stride, chosen.padding, chosen.output_padding,
        chosen.groups, chosen.bias,
    ).to(dtype)  # fmt: skip
    x = chosen.operands(dtype, "cpu")[0]
    if family == "depthwise_lines":
        x = x.to(memory_format=torch.channels_last_3d)
    model = tconv3d.fuse(convolution, torch.sigmoid)
    with preferring(family), torch.no_grad(), tconv3d.use_backend("emulator"):
        explained = str(tconv3d.explain(convolution, x))
        ours = model(x)
    assert family in explained
    exact = torch.sigmoid(copy.deepcopy(convolution).double()(x.double()))
    assert (ours.double() - exact).abs().max() <= (1e-6 if dtype == torch.float32 else 4e-3)


def test_the_passes_of_a_step_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """GroupNorm and SiLU take one pass forward, and two backward: one for the sums and one for the gradient."""
    launched: list[str] = []
    for name in ("evaluate", "sums"):
        usual = getattr(tail_executor, name)
        monkeypatch.setattr(
            tail_executor, name, lambda *a, usual=usual, name=name: launched.append(name) or usual(*a)
        )
    model = module("GroupNorm, SiLU", torch.float32)
    x, grad = tensors(torch.float32, "contiguous")
    results(model, x, grad, "emulator")
    assert launched == ["evaluate", "sums", "evaluate"]


def test_results_are_the_same_from_run_to_run() -> None:
    x, grad = tensors(torch.float32, "contiguous")
    first, second = (results(module("GroupNorm, SiLU", torch.float32), x, grad, "emulator") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- what is fused, and what is not


def report(tail: Callable[..., Any], *extra: Any, **options: Any) -> tconv3d.FuseReport:
    model = tconv3d.fuse(nn.ConvTranspose3d(16, C, 3, stride=2, padding=1).eval(), tail, **options)
    with tconv3d.use_backend("emulator"):
        return model.report(torch.randn(2, 16, *SIZE), *extra)


def test_vectors_and_residuals_are_read_by_the_kernel() -> None:
    norm = nn.BatchNorm3d(C).eval()
    found = report(lambda z: F.relu(norm(z)))
    assert "Vectored<2>" in found.kernel and not found.weight and not found.passes and not found.pytorch
    residual, style = torch.randn(2, C, 5, 7, 9), torch.randn(2, C)
    found = report(lambda z, r, s: F.silu(z * (1 + s[..., None, None, None]) + 2 * r), residual, style)
    assert "Whole<0>" in found.kernel and not found.passes
    assert "in the convolution's kernel" in str(found)


def test_what_cannot_be_held_is_named() -> None:
    found = report(lambda z: F.relu(z).cumsum(2).softmax(1))
    assert "Largest" in found.kernel and found.pytorch == ("cumsum", "_softmax")


def test_a_tail_with_control_flow_runs_unfused_and_says_why() -> None:
    def tail(z: Tensor) -> Tensor:
        return z if z.sum() > 0 else -z

    found = report(tail)
    assert found.why_not.startswith("the tail cannot be traced")
    model = tconv3d.fuse(nn.ConvTranspose3d(16, C, 3), tail)
    x = torch.randn(1, 16, *SIZE)
    with tconv3d.use_backend("emulator"), torch.no_grad():
        torch.testing.assert_close(model(x), tail(model.convolution(x)))


def test_a_tail_that_does_not_broadcast_raises_what_it_raises() -> None:
    model = tconv3d.fuse(nn.ConvTranspose3d(16, C, 3), lambda z: z + torch.ones(3))
    with tconv3d.use_backend("emulator"), torch.no_grad(), pytest.raises(RuntimeError, match="must match the size"):
        model(torch.randn(1, 16, *SIZE))


def test_passed_tensors_and_whole_residuals() -> None:
    layer = nn.ConvTranspose3d(16, C, 3, stride=2, padding=1)
    model = tconv3d.fuse(layer, lambda z, residual, factor: F.relu(z + residual) * factor)
    x, residual = torch.randn(2, 16, *SIZE), torch.randn(2, C, 5, 7, 9)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        for factor in (torch.randn(2, C, 1, 1, 1), torch.randn(C, 1, 1, 1)):
            expected = F.relu(F.conv_transpose3d(x, layer.weight, layer.bias, 2, 1) + residual) * factor
            torch.testing.assert_close(model(x, residual, factor), expected)


def test_a_changed_weight_or_statistic_is_seen() -> None:
    norm = nn.BatchNorm3d(C).eval()
    layer = nn.ConvTranspose3d(16, C, 3, stride=2, padding=1)
    model = tconv3d.fuse(layer, norm)
    x = torch.randn(2, 16, *SIZE)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        for change in (lambda: None, lambda: layer.weight.mul_(2), lambda: norm.running_mean.add_(1)):
            change()
            torch.testing.assert_close(model(x), norm(layer(x)), rtol=1e-4, atol=1e-5)
        norm.weight = nn.Parameter(torch.full((C,), 3.0))
        torch.testing.assert_close(model(x), norm(layer(x)), rtol=1e-4, atol=1e-5)


def test_settings_of_a_tails_module_are_seen() -> None:
    model = tconv3d.fuse(nn.ConvTranspose3d(16, C, 3, stride=2, padding=1), nn.LeakyReLU(0.1))
    x = torch.randn(2, 16, *SIZE)
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        model(x)
        model.tail.negative_slope = 0.7
        torch.testing.assert_close(model(x), model.tail(model.convolution(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["parameter", "buffer", "eps", "mode", "module", "assigned", "number", "hook"])
def test_what_a_function_captures_may_be_replaced(change: str) -> None:
    norm, layer, slope = nn.BatchNorm3d(C).eval(), nn.ConvTranspose3d(16, C, 3, stride=2, padding=1), 0.1
    model, heard = tconv3d.fuse(layer, lambda z: F.leaky_relu(norm(z), slope)), []
    x, _ = tensors(torch.float32, "contiguous")
    with torch.no_grad(), tconv3d.use_backend("emulator"):
        model(x)
        if change == "parameter":
            norm.weight = nn.Parameter(torch.rand(C) + 2)
        elif change == "buffer":
            norm.running_mean = torch.rand(C) + 2
        elif change == "eps":
            norm.eps = 0.5
        elif change == "mode":
            norm.train()
        elif change == "module":
            norm = nn.BatchNorm3d(C, eps=0.5).eval()
        elif change == "assigned":
            norm.load_state_dict({key: value * 2 + 1 for key, value in norm.state_dict().items()}, assign=True)
        elif change == "number":
            slope = 0.5
        else:
            norm.register_forward_hook(lambda *_: heard.append(1))
        reference = copy.deepcopy(norm).double()
        ours = model(x)
        assert heard or change != "hook"
        exact = F.leaky_relu(reference(copy.deepcopy(layer).double()(x.double())), slope)
    assert (ours.double() - exact).norm() <= 1e-6 * exact.norm()
    for one, other in zip(norm.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double())


def test_a_function_of_a_model_captures_the_children_it_names() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.ConvTranspose3d(16, C, 3, stride=2, padding=1), nn.GroupNorm(2, C)
            self.other = nn.Linear(2, 2)
            self.blocks = [tconv3d.fuse(self.up, lambda z: F.relu(self.norm(z))), tconv3d.fuse(self.up, self.tail)]

        def tail(self, z: Tensor) -> Tensor:
            return F.relu(self.norm(z))

    model = Model()
    for block in model.blocks:
        assert [each for each in captures(block.tail) if isinstance(each, nn.Module)] == [model, model.norm]


def test_a_call_with_gradients_forgets_what_was_computed_from_a_norm() -> None:
    model = module("BatchNorm, LeakyReLU", torch.float32, training=False)
    x, _ = tensors(torch.float32, "contiguous")
    norm = model.tail.batch_norm
    with tconv3d.use_backend("emulator"):
        for _ in range(2):
            with torch.no_grad():
                model(x)
        norm.weight.data.mul_(3)  # which PyTorch does not count
        model(x.requires_grad_()).sum().backward()
        with torch.no_grad():
            ours = model(x)
    with torch.no_grad(), tconv3d.use_backend("torch"):
        exact = copy.deepcopy(model).double()(x.double())
    assert (ours.double() - exact).norm() <= 1e-6 * exact.norm()


def test_a_number_that_is_read_out_of_a_tensor_is_not_traced() -> None:
    """A BatchNorm without momentum averages over its calls, whose number is a tensor."""
    found = report(nn.BatchNorm3d(C, momentum=None))
    assert "reads a number out of a tensor" in found.why_not


def test_hooks_and_second_derivatives_see_every_layer() -> None:
    model = module("SiLU", torch.float64)
    x = tensors(torch.float64, "contiguous")[0][:1].requires_grad_()
    with tconv3d.use_backend("emulator"):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        plain = F.silu(F.conv_transpose3d(x, model.convolution.weight, model.convolution.bias, 2, 1))
        (expected,) = torch.autograd.grad(plain.square().sum(), x, create_graph=True)
        torch.testing.assert_close(second, torch.autograd.grad(expected.sum(), x)[0])
        seen: list[nn.Module] = []
        model.tail.register_forward_hook(lambda module, *_: seen.append(module))
        model(x)
    assert seen == [model.tail]


def test_a_profiler_shows_what_runs_fused() -> None:
    model = tconv3d.accelerate(nn.Sequential(nn.ConvTranspose3d(2, 4, 2), nn.SiLU()))
    block = tconv3d.fuse(nn.ConvTranspose3d(2, 4, 2), F.silu)
    x = torch.randn(1, 2, 2, 2, 2)
    with tconv3d.use_backend("emulator"), torch.no_grad():
        model(x)
        with torch.profiler.profile() as seen:
            model(x)
            block(x)
    assert {"tconv3d::conv -> silu", "tconv3d::fused"} <= {event.key for event in seen.key_averages()}


def test_batched_gradients() -> None:
    model = module("GroupNorm, SiLU", torch.float64)
    x = tensors(torch.float64, "contiguous")[0][:1].requires_grad_()
    operands = [x, *model.parameters()]
    with tconv3d.use_backend("emulator"):
        y = model(x)
        grads = torch.stack([torch.ones_like(y), y.detach()])
        found = torch.autograd.grad(y, operands, grads, is_grads_batched=True, retain_graph=True, allow_unused=True)
        for index, grad in enumerate(grads):
            expected = torch.autograd.grad(y, operands, grad, retain_graph=True, allow_unused=True)
            for one, other in zip(found, expected, strict=True):
                if other is not None:
                    torch.testing.assert_close(one[index], other)


def test_a_weight_that_is_computed_is_computed_once_per_call() -> None:
    class Doubled(nn.Module):
        calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            self.calls += 1
            return 2 * weight

    layer, doubled = nn.ConvTranspose3d(2, 4, 2), Doubled()
    nn.utils.parametrize.register_parametrization(layer, "weight", doubled)
    block, x = tconv3d.fuse(layer, F.relu), torch.randn(1, 2, 2, 2, 2)
    with tconv3d.use_backend("emulator"):
        for _ in range(2):
            doubled.calls = 0
            y = block(x)
            assert doubled.calls == 1
    torch.testing.assert_close(y, F.relu(layer(x)))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"expected an nn.ConvTranspose3d, got Linear"):
        tconv3d.fuse(nn.Linear(2, 2), F.relu)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tail"):
        tconv3d.fuse(nn.ConvTranspose3d(2, 2, 1), 3)  # type: ignore[arg-type]
    with tconv3d.use_backend("emulator"), pytest.raises(TypeError, match="must be Tensor, not int"):
        tconv3d.fuse(nn.ConvTranspose3d(2, 2, 1), F.relu)(3)
