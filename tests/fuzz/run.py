"""Runs one case: makes its tensors between guards, runs the call and its backward pass, and checks everything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
import torch.nn.functional as F
from layers import assert_right, to_tf32
from torch import Tensor

import tconv3d
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.gpus import GPUS
from tconv3d.tools.bench.precision import precision
from tconv3d.torch_ops import executor, kept

from .case import DIMENSIONS, PLAIN, TAILS, Case
from .families import favouring
from .guards import Guards
from .reference import EPS, FACTOR, expected, residual_shape, result_type, with_operands


def check(case: Case, device: str) -> None:
    """Runs a case and raises an error if anything is wrong. `device` "cpu" uses the emulator, "cuda" a GPU."""
    guards = Guards(device, case.at_end)
    operands = {name: _placed(guards, case, name, shape) for name, shape in _shapes(case).items()}
    exact = {name: tensor.cpu().double() for name, tensor in operands.items()}
    grad, exact_grad = operands.pop("grad", None), exact.pop("grad", None)
    guards.seal()
    try:
        with _settings(case, device):
            found = _run(case, guards, operands, grad)
    finally:
        kept.forget()
    damage = guards.damage()
    assert damage is None, damage
    result = found["result"].detach().cpu().double()
    for name, (values, allowed) in expected(case, exact, exact_grad, result).items():
        ours = found[name].detach()
        assert ours.dtype == result_type(case), f"{name}: the type is {ours.dtype}"
        assert_right("result" if name == "result" else f"gradient of {name}", ours.cpu(), values, allowed)


def _shapes(case: Case) -> dict[str, tuple[int, ...]]:
    layer = case.layer
    vector = (layer.out_channels,)
    shapes: dict[str, tuple[int, ...]] = {
        "input": (layer.batch, layer.in_channels, *layer.size),
        "weight": (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel),
    }
    if layer.bias:
        shapes["bias"] = vector
    if case.epilogue == "norm" and case.affine:
        shapes |= {"norm_weight": vector, "norm_bias": vector}
    geometry = Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, *layer.settings)
    output = (layer.batch, layer.out_channels, *geometry.output_size(layer.size))
    if case.epilogue in TAILS:
        shapes |= {f"vector {i}": (*output[:2], 1, 1, 1) for i in range(case.vector_count)}
        shapes |= {f"residual {i}": residual_shape(kind, output) for i, kind in enumerate(case.residuals)}
    if case.wanted:
        shapes["grad"] = output
    return shapes


def _placed(guards: Guards, case: Case, name: str, shape: tuple[int, ...]) -> Tensor:
    """Makes a tensor with random values; elements along a dimension of stride 0 share one value."""
    kind = name.partition(" ")[0]
    views = {"input": case.input, "weight": case.weight, "grad": case.grad, "residual": case.grad, "vector": PLAIN}
    memory = views.get(kind, case.vectors)
    strides = memory.strides(shape)
    dimensions = DIMENSIONS if len(shape) == 5 else memory.expanded
    own = tuple(1 if stride == 0 and dimensions else size for size, stride in zip(shape, strides, strict=True))
    other = kind == "residual" and case.residual_type
    dtype = getattr(torch, case.residual_type) if other else result_type(case)
    tensor = guards.place(name, own, strides, dtype, memory.offset)
    tensor.copy_(_values(case, name, own))
    return tensor.expand(shape) if own != shape else tensor


def _values(case: Case, name: str, shape: tuple[int, ...]) -> Tensor:
    random = torch.Generator().manual_seed((case.seed << 32) + crc32(name.encode()))
    if name == FACTOR:  # powers of two, with which a product is exact
        return torch.pow(2.0, torch.randint(-2, 3, shape, generator=random))
    if case.epilogue == "norm":  # numbers with few bits make every sum of the convolution exact in float32
        values = torch.randint(-8, 9, shape, generator=random) / 8
        # Strict float32 may be three TF32 products, which leave 1e-7 where a sum is exactly 0: a ReLU's mask would
        # depend on that. With an odd 1/128 in the bias no sum is 0.
        return values + 1 / 128 if case.dtype == "float32" and name == "bias" else values
    values = torch.randn(shape, generator=random)
    return to_tf32(values) if case.dtype == "tf32" and len(shape) == 5 else values


@contextlib.contextmanager
def _settings(case: Case, device: str) -> Iterator[None]:
    """Sets PyTorch's precision, the GPU to plan for, limits of planners, and the emulator's order of threads."""
    gpu = GPUS[case.plans].device if case.plans else executor.EMULATED
    tconv3d.allow_tf32_in_groups()  # "tf32" is TF32 for layers with groups too
    with (
        precision(case.dtype),
        favouring(case.favoured),
        patch.object(executor, "EMULATED", gpu),
        patch.dict(os.environ, {"TCONV3D_EMULATOR_ORDER": case.order}),
        tconv3d.use_backend("emulator" if device == "cpu" else "cuda"),
    ):
        yield


def _run(case: Case, guards: Guards, operands: dict[str, Tensor], grad: Tensor | None) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().requires_grad_(name in case.wanted) for name, tensor in operands.items()}
    with guards.around_results():
        for _ in range(case.calls):
            result = _function(case)(leaves)
    found = {"result": result}
    if grad is not None:
        with guards.around_results(case.short):
            grads = torch.autograd.grad(result, [leaves[name] for name in case.wanted], grad)
        found |= dict(zip(case.wanted, grads, strict=True))
    if result.is_cuda:
        torch.cuda.synchronize()
    return found


def _function(case: Case) -> Callable[[dict[str, Tensor]], Tensor]:
    settings: tuple[Any, ...] = case.layer.settings

    def call(leaves: dict[str, Tensor]) -> Tensor:
        operands = leaves["input"], leaves["weight"], leaves.get("bias")
        if case.epilogue == "norm":
            norm = case.norm_groups, leaves.get("norm_weight"), leaves.get("norm_bias"), EPS
            return tconv3d.conv_transpose3d_relu_group_norm(*operands, *norm, *settings)
        if case.epilogue == "relu":
            return tconv3d.conv_transpose3d_relu(*operands, *settings)
        if case.epilogue in TAILS:
            return _fused(case, leaves)
        return tconv3d.conv_transpose3d(*operands, *settings)

    return call


def _fused(case: Case, leaves: dict[str, Tensor]) -> Tensor:
    """Runs a layer with the case's own tensors as parameters, and a tail with two passed tensors."""
    layer = case.layer
    kernel, stride, padding, extra = layer.kernel, layer.stride, layer.padding, layer.output_padding
    settings: tuple[Any, ...] = (kernel, stride, padding, extra, layer.groups, layer.bias, layer.dilation)
    convolution = tconv3d.ConvTranspose3d(layer.in_channels, layer.out_channels, *settings, device="meta")  # type: ignore[misc]
    # `fuse` reads `weight` and `bias` of the layer, which need not be parameters.
    convolution._parameters.clear()
    convolution.weight, convolution.bias = leaves["weight"], leaves.get("bias")
    over_channels: dict[str, Callable[[Tensor], Tensor]] = {
        "tail": lambda u: u,
        "silu": F.silu,
        "softmax": lambda u: u.softmax(1),
        "largest": lambda u: u.amax(1, keepdim=True),
    }
    passed = [name for name in leaves if name.startswith(("vector", "residual"))]

    def tail(z: Tensor, *operands: Tensor) -> Tensor:
        return over_channels[case.epilogue](with_operands(z, dict(zip(passed, operands, strict=True))))

    block = tconv3d.fuse(convolution, tail)
    result = block(leaves["input"], *(leaves[name] for name in passed))
    assert isinstance(result, Tensor)
    return result
