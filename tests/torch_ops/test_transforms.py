"""torch.func, batched gradients and forward-mode differentiation: on this library's kernels, against PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layers import Layer, to_tf32
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import tconv3d
from tconv3d.torch_ops import executor, norm_executor, pytorch_ops

F64 = torch.float64
LAYER = Layer(4, 6, (2, 2, 2), (2, 3, 2), (2, 1, 2), (1, 0, 0), (1, 0, 0), groups=2)
SMALL = Layer(2, 3, (2, 1, 2), (2, 2, 1), batch=1)  # has few elements, for Hessians
SIZE = 3  # size of a mapped dimension
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}
MAPPED = [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1) if x + w + b]  # input, weight, bias
BOTH = [(1, 0), (0, 1), (1, 1)]

Function = Callable[..., Any]


def call(layer: Layer, function: Function = tconv3d.conv_transpose3d) -> Function:
    """Returns the layer as a function of its operands alone."""
    return lambda x, w, b=None: function(x, w, b, *layer.settings)


def theirs(layer: Layer) -> Function:
    return call(layer, F.conv_transpose3d)


def loss(function: Function) -> Function:
    return lambda *operands: function(*operands).pow(2).sum()


def randn(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def mapped(
    operands: Sequence[Tensor], which: Sequence[int], seed: int
) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Returns operands, those in `which` SIZE times along any dimension, and the dimensions for `vmap`.

    Contiguous operands are mapped in contiguous memory, channels-last operands keep their channels last in memory.
    """
    random = torch.Generator().manual_seed(seed)
    found, dims = [], []
    for operand, is_mapped in zip(operands, which, strict=True):
        dim = int(torch.randint(operand.dim() + 1, (1,), generator=random)) if is_mapped else None
        many = torch.randn((SIZE, *operand.shape), generator=random, dtype=F64).to(operand)
        if operand.is_contiguous():
            many = many.movedim(0, dim or 0).contiguous()
        else:
            many = many.movedim(2, -1).contiguous().movedim(-1, 2).movedim(0, dim or 0)
        found.append(operand if dim is None else many)
        dims.append(dim)
    return found, tuple(dims)


def once(counted: dict[str, int], *names: str) -> None:
    assert counted == {name: int(name in names) for name in counted}


# ---- vmap


@pytest.mark.parametrize("which", MAPPED, ids=str)
def test_vmap(which: tuple[int, ...], ours: str, counted: dict[str, int]) -> None:
    for seed, memory_format in enumerate(FORMATS.values()):
        counted.update(dict.fromkeys(counted, 0))
        x, w, b = LAYER.operands(F64, ours, seed)
        operands, dims = mapped((x.contiguous(memory_format=memory_format), w, b), which, seed)
        out_dim = seed * 3
        got = vmap(call(LAYER), dims, out_dim)(*operands)
        once(counted, "forward")
        torch.testing.assert_close(got, vmap(theirs(LAYER), dims, out_dim)(*operands))


@pytest.mark.parametrize("which", [(1, 0, 0), (1, 1, 1)], ids=str)
def test_vmap_keeps_channels_last(which: tuple[int, ...], ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    forward = executor.forward
    monkeypatch.setattr(executor, "forward", lambda *a: seen.append(a[0]) or forward(*a))  # type: ignore[func-returns-value]
    x, w, b = LAYER.operands(F64, ours)
    operands, dims = mapped((x.contiguous(memory_format=torch.channels_last_3d), w, b), which, seed=0)
    operands[0] = operands[0].movedim(dims[0], 0)  # type: ignore[arg-type]
    vmap(call(LAYER), (0, *dims[1:]))(*operands)
    assert seen[0].is_contiguous(memory_format=torch.channels_last_3d)
    assert (seen[0].data_ptr() == operands[0].data_ptr()) == (which == (1, 0, 0)), "an input alone is not copied"


@pytest.mark.parametrize("name", ["conv_transpose3d_input_grad", "conv_transpose3d_weight_grad"])
@pytest.mark.parametrize("which", BOTH, ids=str)
def test_vmap_of_gradients(name: str, which: tuple[int, ...], ours: str, counted: dict[str, int]) -> None:
    operator = getattr(torch.ops.tconv3d, name).default
    x, w, b = LAYER.operands(F64, ours)
    dy = torch.randn_like(theirs(LAYER)(x, w, b))
    other, size = (w, LAYER.size) if "input" in name else (x, LAYER.kernel)
    for memory_format in FORMATS.values():
        counted.update(dict.fromkeys(counted, 0))
        operands = dy.contiguous(memory_format=memory_format), other
        (first, second), dims = mapped(operands, which, seed=len(name))
        got = vmap(lambda a, b: operator(a, b, size, *LAYER.settings), dims)(first, second)
        once(counted, name.removeprefix("conv_transpose3d_"))
        with tconv3d.use_backend("torch"):
            each = [
                operator(*(t if d is None else t.select(d, i) for t, d in zip((first, second), dims, strict=True)),
                         size, *LAYER.settings)
                for i in range(SIZE)
            ]  # fmt: skip
        torch.testing.assert_close(got, torch.stack(each))


def test_vmap_of_bias_gradients(ours: str, counted: dict[str, int]) -> None:
    dy = randn((2, 6, SIZE, 2, 3, 4), 0).to(ours)
    got = vmap(torch.ops.tconv3d.conv_transpose3d_bias_grad, 2, 1)(dy)
    once(counted, "bias_grad")
    torch.testing.assert_close(got, dy.sum((0, 3, 4, 5)))


def test_nested_vmap(ours: str, counted: dict[str, int]) -> None:
    x, w, b = LAYER.operands(F64, ours)
    (xs, ws, bs), dims = mapped((x, w, b), (1, 1, 1), seed=1)

    def nested(function: Function) -> Tensor:
        inner = vmap(function, (None, dims[1], dims[2]))
        return vmap(inner, (dims[0], None, None), 1)(xs, ws, bs)

    got = nested(call(LAYER))
    once(counted, "forward")
    torch.testing.assert_close(got, nested(theirs(LAYER)))


def test_an_empty_batch_and_a_map_of_one_or_none(ours: str) -> None:
    x, w, b = LAYER.operands(F64, ours)
    nothing = vmap(call(LAYER), (0, None, None))(x.expand(0, *x.shape), w, b)
    assert nothing.shape == (0, *theirs(LAYER)(x, w, b).shape)
    for many in (x[:0].expand(2, *x[:0].shape), x[None]):
        got = vmap(call(LAYER), (0, None, None))(many, w, b)
        torch.testing.assert_close(got, vmap(theirs(LAYER), (0, None, None))(many, w, b))


def test_ensembles_of_layers(ours: str, counted: dict[str, int]) -> None:
    """Stacked parameters are mapped, one input goes to all: PyTorch's recipe for ensembles of models."""
    layers = [tconv3d.ConvTranspose3d(4, 6, 2, stride=2, dtype=F64, device=ours) for _ in range(SIZE)]
    parameters, buffers = stack_module_state(layers)  # type: ignore[arg-type]
    x = randn((2, 4, 2, 2, 2), 0).to(ours)
    got = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    once(counted, "forward")
    torch.testing.assert_close(got, torch.stack([layer(x) for layer in layers]))


# ---- gradients of torch.func


PRECISIONS = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_gradients_per_sample(
    precision: str, memory_format: str, ours: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample has a gradient of its own; the forward pass and every gradient of all samples are one call."""
    layer = Layer(8, 8, (2, 3, 4), (3, 3, 3), padding=(1, 1, 1), batch=SIZE)
    if precision == "tf32":
        torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]  # a fixture restores it
    operands = layer.operands(PRECISIONS[precision], ours)
    operands = [to_tf32(t) for t in operands] if precision == "tf32" else operands
    operands[0] = operands[0].contiguous(memory_format=FORMATS[memory_format])
    weights = to_tf32(randn((8, 2, 3, 4), 1).float()).to(operands[0])  # factors on the outputs in the loss

    def gradients(function: Function, weights: Tensor, operands: list[Tensor]) -> Any:
        def weighted(*operands: Tensor) -> Tensor:
            return (function(*operands) * weights).sum()

        return vmap(grad(weighted, (0, 1, 2)), (0, None, None))(*operands)

    got = gradients(call(layer), weights, operands)
    assert counted == dict.fromkeys(counted, 1)
    expected = gradients(theirs(layer), weights.double(), [t.double() for t in operands])
    for one, exact in zip(got, expected, strict=True):
        assert one.dtype == operands[0].dtype and one.shape == exact.shape
        unit = 2**-8 if precision == "bfloat16" else 1e-5
        assert float((one.double() - exact).abs().max()) < unit * float(exact.abs().max())


TRANSFORMS: dict[str, Callable[[Function, list[Tensor]], Any]] = {
    "grad": lambda f, a: grad(loss(f), (0, 1, 2))(*a),
    "grad of grad": lambda f, a: grad(lambda *b: grad(loss(f), 1)(*b).pow(2).sum(), (0, 1, 2))(*a),
    "vjp": lambda f, a: vjp(f, *a)[1](torch.ones_like(f(*a))),
    "jacrev": lambda f, a: jacrev(f, (0, 1, 2))(*a),
    "jacfwd": lambda f, a: jacfwd(f, (0, 1, 2))(*a),
    "jvp": lambda f, a: jvp(f, tuple(a), tuple(t.sin() for t in a)),
    "jvp of the bias": lambda f, a: jvp(lambda b: f(a[0], a[1], b), (a[2],), (a[2].sin(),)),
    "hessian": lambda f, a: hessian(loss(f), (0, 1, 2))(*a),
    "jacrev of jacfwd": lambda f, a: jacrev(jacfwd(loss(f), (0, 1)), (0, 1))(*a),
    "jacfwd of jacfwd": lambda f, a: jacfwd(jacfwd(loss(f), (0, 1)), (0, 1))(*a),
    "grad of vmap": lambda f, a: grad(lambda x: vmap(lambda w: f(x, w, a[2]))(a[1].expand(2, *a[1].shape)).sum())(
        a[0]
    ),
    "vmap of jvp": lambda f, a: vmap(lambda t: jvp(lambda x: f(x, *a[1:]), (a[0],), (t,)))(
        randn((3, *a[0].shape), 5)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name: str, ours: str, counted: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    transform = TRANSFORMS[name]
    for seed in (0, 1):
        operands = SMALL.operands(F64, ours, seed)
        expected = transform(theirs(SMALL), operands)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "conv_transpose3d", None)  # PyTorch's operator must not run
            got = transform(call(SMALL), operands)
        torch.testing.assert_close(got, expected)
    assert counted["forward"]


@pytest.mark.parametrize("name", ["conv_transpose3d", "conv_transpose3d_relu"])
def test_derivatives_of_all_kinds(name: str, ours: str) -> None:
    """PyTorch's own check: forward and reverse mode, batched and not, and forward over reverse."""
    function = call(SMALL, getattr(tconv3d, name))
    leaves = [operand.requires_grad_() for operand in SMALL.operands(F64, ours, seed=3)]
    kinds = {"check_batched_grad": True, "check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(function, leaves, **kinds)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True)


# ---- batched gradients and forward mode without torch.func


@pytest.mark.parametrize("memory_format", FORMATS)
def test_batched_gradients(memory_format: str, ours: str, counted: dict[str, int]) -> None:
    both = []
    for function in (call(LAYER), theirs(LAYER)):
        leaves = [operand.requires_grad_() for operand in LAYER.operands(F64, ours)]
        y = function(leaves[0].contiguous(memory_format=FORMATS[memory_format]), *leaves[1:])
        both.append(torch.autograd.grad(y, leaves, randn((SIZE, *y.shape), 1).to(ours), is_grads_batched=True))
    assert counted == dict.fromkeys(counted, 1)
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobians_and_hessians(strategy: str, ours: str, counted: dict[str, int]) -> None:
    from torch.autograd.functional import hessian as functional_hessian
    from torch.autograd.functional import jacobian

    operands = tuple(SMALL.operands(F64, ours))
    both = [
        (
            jacobian(function, operands, vectorize=True, strategy=strategy),
            functional_hessian(loss(function), operands, vectorize=True, outer_jacobian_strategy=strategy),
        )
        for function in (call(SMALL), theirs(SMALL))
    ]
    torch.testing.assert_close(*both)
    assert all(counted.values())


def test_forward_mode_with_gradients(ours: str, counted: dict[str, int]) -> None:
    """A tangent of a gradient, and a gradient of a tangent."""

    def both_orders(function: Function) -> Any:
        primals = [operand.requires_grad_() for operand in LAYER.operands(F64, ours)]
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(p, t) for p, t in zip(primals, LAYER.operands(F64, ours, 1), strict=True)]
            y = function(*duals)
            tangent = forward_ad.unpack_dual(y).tangent
            grads = torch.autograd.grad(y.pow(2).sum(), primals, create_graph=True)
            tangents = [forward_ad.unpack_dual(g).tangent.detach() for g in grads]
            return tangent.detach(), tangents, torch.autograd.grad(tangent.pow(2).sum(), primals[:2])

    got = both_orders(call(LAYER))
    assert all(counted.values())
    torch.testing.assert_close(got, both_orders(theirs(LAYER)))


def test_channels_last_and_16_bits_in_forward_mode(ours: str) -> None:
    layer = Layer(8, 8, (2, 3, 4), (3, 3, 3), padding=(1, 1, 1), batch=SIZE)
    primals, tangents = (layer.operands(torch.bfloat16, ours, seed) for seed in (0, 1))
    primals[0], tangents[0] = (t.contiguous(memory_format=torch.channels_last_3d) for t in (primals[0], tangents[0]))
    got = jvp(call(layer), tuple(primals), tuple(tangents))
    expected = jvp(theirs(layer), tuple(t.double() for t in primals), tuple(t.double() for t in tangents))
    for one, exact in zip(got, expected, strict=True):
        assert float((one.double() - exact).abs().max()) < 2**-7 * float(exact.abs().max())


# ---- fused operators

NORM_GROUPS = 3


def block(function: str = "ours", layer: Layer = LAYER) -> Function:
    def run(x: Tensor, w: Tensor, b: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        if function == "ours":
            return tconv3d.conv_transpose3d_relu_group_norm(x, w, b, NORM_GROUPS, gamma, beta, 1e-5, *layer.settings)
        return F.group_norm(torch.relu(F.conv_transpose3d(x, w, b, *layer.settings)), NORM_GROUPS, gamma, beta, 1e-5)

    return run


def block_operands(device: str, seed: int, layer: Layer = LAYER) -> list[Tensor]:
    vectors = [randn((layer.out_channels,), 10 * seed + i).to(device) for i in (1, 2)]
    return [*layer.operands(F64, device, seed), *vectors]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of the fused block that ran on this library's kernels."""
    names: list[str] = []
    for module, name in (
        (executor, "forward_with_statistics"),
        (norm_executor, "normalize"),
        (norm_executor, "gradient"),
    ):
        original = getattr(module, name)

        def run(*arguments: Any, _name: str = name, _original: Any = original, **keywords: Any) -> Any:
            names.append(_name)
            return _original(*arguments, **keywords)

        monkeypatch.setattr(module, name, run)
    return names


BLOCK_MAPPED = [(1, 0, 0, 0, 0), (0, 1, 1, 0, 0), (1, 1, 0, 1, 0), (0, 0, 0, 1, 1), (1, 1, 1, 1, 1)]


@pytest.mark.parametrize("which", BLOCK_MAPPED, ids=str)
def test_vmap_of_the_fused_block(which: tuple[int, ...], ours: str, launched: list[str]) -> None:
    for seed, memory_format in enumerate(FORMATS.values()):
        launched.clear()
        operands = block_operands(ours, seed)
        operands[0] = operands[0].contiguous(memory_format=memory_format)
        operands, dims = mapped(operands, which, seed)
        got = vmap(block(), dims, 2)(*operands)
        assert launched == ["forward_with_statistics", "normalize"]
        torch.testing.assert_close(got, vmap(block("theirs"), dims, 2)(*operands))


@pytest.mark.parametrize("which", MAPPED[::2], ids=str)
def test_vmap_of_the_fused_relu(which: tuple[int, ...], ours: str, counted: dict[str, int]) -> None:
    operands, dims = mapped(LAYER.operands(F64, ours), which, 4)
    got = vmap(call(LAYER, tconv3d.conv_transpose3d_relu), dims)(*operands)
    once(counted, "forward")
    torch.testing.assert_close(got, torch.relu(vmap(theirs(LAYER), dims)(*operands)))


BLOCK_TRANSFORMS: dict[str, Callable[[Function, list[Tensor]], Any]] = {
    "gradients per sample": lambda f, a: vmap(grad(loss(f), (0, 1, 2, 3, 4)), (0, *[None] * 4))(
        randn((SIZE, *a[0].shape), 7), *a[1:]
    ),
    "jacfwd": lambda f, a: jacfwd(f, (0, 2, 3))(*a),
    "hessian": lambda f, a: hessian(loss(f), (2, 3))(*a),
}


@pytest.mark.parametrize("name", BLOCK_TRANSFORMS)
def test_torch_func_of_the_fused_block(name: str, ours: str, counted: dict[str, int]) -> None:
    """The convolution and its ReLU run on this library's kernels, the norm's derivatives are PyTorch's."""
    transform, operands = BLOCK_TRANSFORMS[name], block_operands(ours, 1, SMALL)
    torch.testing.assert_close(transform(block(layer=SMALL), operands), transform(block("", SMALL), operands))
    assert counted["forward"]


@pytest.mark.parametrize("how", ["is_grads_batched", "vmap"])
def test_batched_gradients_of_the_fused_block(how: str, ours: str, launched: list[str]) -> None:
    both = []
    for function in (block(), block("theirs")):
        leaves = [operand.requires_grad_() for operand in block_operands(ours, 2)]
        y = function(*leaves)
        grads = randn((SIZE, *y.shape), 1).to(ours)
        if how == "vmap":
            both.append(vmap(lambda g: torch.autograd.grad(y, leaves, g, retain_graph=True))(grads))  # noqa: B023
        else:
            both.append(torch.autograd.grad(y, leaves, grads, is_grads_batched=True))
    assert launched == ["forward_with_statistics", "normalize", "gradient"]
    torch.testing.assert_close(*both)


# ---- with the compiler, and where PyTorch's operator runs


COMPILED: dict[str, Callable[[Function], Function]] = {
    "gradients per sample": lambda f: lambda x, w, b: vmap(grad(loss(f), (0, 1, 2)), (0, None, None))(x, w, b),
    "jvp": lambda f: lambda x, w, b: jvp(f, (x, w, b), (x.sin(), w.sin(), b.sin())),
    "hessian": lambda f: lambda x, w, b: hessian(lambda w: loss(f)(x, w, b))(w),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_transforms(name: str, ours: str, counted: dict[str, int]) -> None:
    torch._dynamo.reset()
    operands = SMALL.operands(F64, ours)
    transform = COMPILED[name]
    got = torch.compile(transform(call(SMALL)), backend="aot_eager", fullgraph=True)(*operands)
    assert counted["forward"]
    torch.testing.assert_close(got, transform(theirs(SMALL))(*operands))


def test_pytorchs_operator_under_transforms(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = SMALL.operands(F64, device)
    monkeypatch.setattr(pytorch_ops, "_warned", set())
    with tconv3d.use_backend("torch"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for transform in TRANSFORMS.values():
            expected = transform(theirs(SMALL), operands)
            torch.testing.assert_close(transform(call(SMALL), operands), expected)
            torch.testing.assert_close(transform(call(SMALL, torch.ops.tconv3d.conv_transpose3d), operands), expected)
