"""Computes small tensors between passes with PyTorch, operator by operator.

Where one kernel can compute them together it does (`between.py`). This module knows nodes and tensors, no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_ops.pytorch_ops import statistics_dtype
from .axes import Reduction
from .pointwise import Shape, rows_of
from .stages import Statistics

aten = torch.ops.aten

Env = dict[fx.Node, Any]


def compute(nodes: Sequence[fx.Node], env: Env) -> None:
    """Computes nodes with PyTorch, in order; those that are known already are skipped."""
    for node in nodes:
        if node not in env:
            of, call = node.meta.get(_CALL, (None, None))
            if of is not node:  # a copy of a node brings the entry of the other
                call = _call_of(node)
                node.meta[_CALL] = node, call
            env[node] = call(env)


_CALL = "call"  # the entry of a node's `meta` with the node and what computes it


def _call_of(node: fx.Node) -> Callable[[Env], Any]:
    """Returns what computes a node from the values of others: `fx.node.map_arg` takes longer than most operators."""
    # The tensors of passes may have other strides than the traced ones, which `view` would depend on.
    target: Any = aten.reshape.default if node.target is aten.view.default else node.target
    args: Any = node.args
    if node.kwargs or any(isinstance(each, (tuple, list, dict, slice)) and _has_nodes(each) for each in args):

        def general(env: Env) -> Any:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: env[each])
            return target(*args, **kwargs)

        return general
    if len(args) > 0 and isinstance(args[0], fx.Node) and not any(isinstance(each, fx.Node) for each in args[1:]):
        first, rest = args[0], args[1:]
        return lambda env: target(env[first], *rest)
    places = [isinstance(each, fx.Node) for each in args]
    return lambda env: target(*[env[each] if known else each for each, known in zip(args, places, strict=True)])


def _has_nodes(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return bool(found)


def compute_ready(nodes: Sequence[fx.Node], env: Env) -> None:
    """Computes the nodes whose operands are all known."""
    for node in nodes:
        if node not in env and all(each in env for each in node.all_input_nodes):
            compute((node,), env)


def stacked(
    named: Sequence[tuple[fx.Node, Shape]], env: Env, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Returns vectors as passes read them, [number of vectors, N, C], for a result of this shape and type."""
    return torch.stack(rows_as_read(named, env, shape, dtype, device))


def rows_as_read(
    named: Sequence[tuple[fx.Node, Shape]], env: Env, shape: Shape, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Returns each of the vectors, [N, C], in the type of the statistics of a result of this shape and type."""
    rows = []
    for node, target in named:
        value, leading = env[node], rows_of(target, shape)
        assert leading is not None
        value = value.reshape((1,) * (len(target) - value.dim()) + tuple(value.shape))
        value = value.reshape(value.shape[:leading]).expand(target[:leading])
        rows.append(value.reshape(shape[:2]).to(device, statistics_dtype(dtype)))
    return rows


def finished(reduction: Reduction, total: Tensor) -> Tensor:
    """Returns a reduction with the shape and type of its node, out of the reductions of every channel, [N, C]."""
    like = reduction.node.meta["val"]
    leading = rows_of(reduction.viewed, (*total.shape, prod(reduction.viewed) // total.numel(), 1, 1))
    assert leading is not None
    total = total.reshape(reduction.viewed[:leading])
    reduced = [dim for dim in reduction.dims if dim < leading]
    if reduced and reduction.extreme:
        total = total.amax(reduced) if reduction.extreme == "Largest" else total.amin(reduced)
    elif reduced:
        total = total.sum(reduced)
    return (total / reduction.count).reshape(like.shape).to(like.dtype)


def means_and_variances(found: Tensor, statistics: Statistics) -> Env:
    """Returns what the `var_mean` nodes give, out of means and reciprocal deviations [2, N, groups]."""
    mean, deviation = found.double()
    variance = deviation.reciprocal().square()
    if statistics.over_batch:
        variance = variance.mean(0) + mean.var(0, correction=0)
        mean = mean.mean(0)
    env: Env = {}
    for node in statistics.nodes:
        shapes = node.meta["val"]
        env[node] = tuple(
            value.reshape(like.shape).to(like.dtype) for value, like in zip((variance, mean), shapes, strict=True)
        )
    return env
