"""ConvTranspose3d with ReLU, and with ReLU and GroupNorm: PyTorch's three layers in everything but the passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fused_blocks import BF16, BLOCKS, F64, FORMATS, T1, TOLERANCE, errors, run, tf32, three_layers
from layers import poisoned
from preferred import preferring
from torch import Tensor, nn

import tconv3d
from tconv3d.families.halo import planner as halo_planner
from tconv3d.planning import planner
from tconv3d.torch_ops import executor, norm_executor

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
    with tf32(block.tf32), preferring(block.kernel, f"{block.kernel}_lines"), poisoned():
        got = run(module, x, grad)
        again = run(module, x, grad)
        with torch.no_grad():
            in_place = module(x)
        problem = tconv3d.explain(module.conv_transpose, x)
    if ours == "cpu" or torch.cuda.get_device_capability() == (9, 0):
        lines = block.kernel == "depthwise" and memory_format == "channels last"
        assert problem.kernel in (block.kernel, block.kernel + "_lines" * lines)
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
        for kind, kernel in ((tconv3d.ConvTranspose3d, "halo"), (tconv3d.ConvTranspose3dReLU, "mma")):
            found = tconv3d.explain(kind(*arguments, dtype=BF16, device="meta"), (2, 64, 9, 9, 9), gpu="H200")
            assert found.kernel == kernel
        assert found.passes[0].passed_over["halo"] == "its kernel has no epilogue"
    finally:
        planner.plan.cache_clear()
