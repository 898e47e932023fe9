"""Traces a tail, the Python function of a convolution's result, to a graph of PyTorch's operators.

The tail runs once on a tensor without data. In-place operations become ordinary ones, and activations and norms become
arithmetic. Tensors that the tail captures (parameters, buffers, closures) are attributes of the graph and stay the
tail's own objects. This module knows nothing of kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten

Tail = Callable[..., Any]

# Operators that are replaced by arithmetic: activations, norms, and shorthands.
_REPLACED = (
    aten.silu, aten.gelu, aten.elu, aten.celu, aten.selu, aten.leaky_relu, aten.hardtanh, aten.hardswish,
    aten.hardsigmoid, aten.mish, aten.softplus, aten.log_sigmoid_forward, aten.softshrink, aten.hardshrink,
    aten.threshold, aten._prelu_kernel, aten.relu6, aten.addcmul, aten.addcdiv, aten.lerp, aten.square,
    aten.native_batch_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training, aten._native_batch_norm_legit_functional, aten.native_dropout,
)  # fmt: skip


def _group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    volume: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """GroupNorm as arithmetic: statistics of a view, and numbers that are constant along a channel's volume."""
    wide = torch.promote_types(input.dtype, torch.float32)
    rows = (batch, groups, channels // groups)
    viewed = input.reshape(*rows, volume).to(wide)
    variance, mean = (each[..., 0] for each in torch.var_mean(viewed, dim=[2, 3], correction=0, keepdim=True))
    rstd = torch.rsqrt(variance + eps)
    places = (batch, channels, *(1,) * (input.dim() - 2))
    shift, scale = (each.expand(rows).reshape(places) for each in (mean, rstd))
    result = (input - shift) * scale
    shape = (1, channels, *(1,) * (input.dim() - 2))
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(input.dtype), mean.view(batch, groups), rstd.view(batch, groups)


def _table() -> dict[Any, Any]:
    return {**get_decompositions(_REPLACED), aten.native_group_norm.default: _group_norm}


class CannotTrace(RuntimeError):
    """Says why a tail cannot be traced; the tail then runs in PyTorch."""


def trace(
    tail: Tail,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    extra: Sequence[Any] = (),
) -> fx.GraphModule:
    """Returns the graph of `tail(z, *extra)` for a z with this shape, layout, type and device."""

    def called(z: Tensor, *rest: Any) -> Any:  # without the defaults of the tail's own signature
        return tail(z, *rest)

    try:
        with torch.no_grad():
            with FakeTensorMode(allow_non_fake_inputs=True):
                z = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
            traced = make_fx(
                torch.func.functionalize(called),
                decomposition_table=_table(),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(z, *extra)
    except Exception as error:  # a user's function may raise anything
        raise CannotTrace(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    graph = traced.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == 1 + len(extra)
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or not _writes(node):
            continue
        if node.target is aten.copy_.default and node.args[0] is placeholders[0]:
            node.replace_all_uses_with(node.args[1])  # the written convolution's result is seen by nobody else
            graph.erase_node(node)
        else:
            raise CannotTrace(f"it writes to a tensor that others can see ({node.target})")
    graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
