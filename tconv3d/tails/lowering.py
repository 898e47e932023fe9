"""Replaces operators of PyTorch's graphs that reduce along dimensions by maxima, sums and arithmetic, in place.

Softmax becomes a maximum, a sum of exponentials and a quotient; the derivatives of such operators likewise. The
arithmetic is written in float32 at least, so that it keeps its precision where PyTorch runs it. The tail is
differentiated before it is lowered, because PyTorch's own derivatives need fewer operations. This module knows graphs
and operators, no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import fx

from .pointwise import FLOATS, inserted, meta, packet_of, shape_of
from .tracing import LOWERED_FROM

aten = torch.ops.aten

NUMBERS = "numbers"  # the entry of a captured constant's `meta` with its values on the CPU


def lower(graph: fx.Graph, but: Container[str] = ()) -> None:
    """Replaces what `LOWERED` names where an operand has a volume or rows of one, but no nodes named in `but`."""
    for node in list(graph.nodes):
        if node.op != "call_function" or packet_of(node) not in LOWERED or node.name in but:
            continue
        x = node.args[0]
        if not isinstance(x, fx.Node) or meta(x).dim() < 3 or meta(x).dtype not in FLOATS:
            continue
        with graph.inserting_before(node):
            LOWERED[packet_of(node)](_Lowering(graph, node.name), node)
        for unused in (*[user for user in node.users if not user.users and user.op != "output"], node):
            if not unused.users:  # other nodes that nobody uses stay, because their order is compared
                graph.erase_node(unused)


class _Lowering:
    """Inserts operators before a node, and replaces the node by what they give."""

    def __init__(self, graph: fx.Graph, name: str) -> None:
        self.graph, self.name = graph, name

    def __call__(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        if target in (aten.amax.default, aten.sum.dim_IntList) and len(args) == 3 and args[2]:
            x, dims, _ = args
            if all(shape_of(x)[dim] == 1 for dim in dims):  # the only number is its own maximum, and the sum
                return x
        node = inserted(self.graph, target, args, options)
        node.meta[LOWERED_FROM] = self.name
        return node

    def constant(self, values: torch.Tensor, dim: int, like: fx.Node) -> fx.Node:
        """Returns a captured tensor of five dimensions with numbers along one of them."""
        module = self.graph.owning_module
        assert module is not None
        shape = [len(values) if each == dim else 1 for each in range(5)]
        module.register_buffer(name := f"{self.name}_places", values.to(meta(like).device).reshape(shape))
        node = self.graph.get_attr(name)
        node.meta["val"], node.meta[NUMBERS] = getattr(module, name), values.reshape(shape)
        return node

    def wide(self, x: fx.Node) -> fx.Node:
        """Returns x in float32 or float64."""
        dtype = torch.promote_types(meta(x).dtype, torch.float32)
        return x if dtype is meta(x).dtype else self(aten._to_copy.default, x, dtype=dtype)

    def replace(self, node: fx.Node, result: fx.Node) -> None:
        """Replaces a node by a result, in the node's type and shape."""
        like = meta(node)
        if meta(result).dtype is not like.dtype:
            result = self(aten._to_copy.default, result, dtype=like.dtype)
        if shape_of(result) != tuple(like.shape):
            result = self(aten.view.default, result, list(like.shape))
        node.replace_all_uses_with(result)

    def shifted(self, x: fx.Node, dims: list[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Returns x minus its maximum, the maximum (0 if it is infinite), and the sum of exponentials."""
        largest = self(aten.amax.default, x, dims, True)
        infinite = self(aten.eq.Scalar, self(aten.abs.default, largest), float("inf"))
        shift = self(aten.where.ScalarSelf, infinite, 0.0, largest)
        difference = self(aten.sub.Tensor, x, shift)
        total = self(aten.sum.dim_IntList, self(aten.exp.default, difference), dims, True)
        return difference, shift, total


def _dims(node: fx.Node, given: Any) -> list[int]:
    """Returns the dimensions of a reduction of the node's first operand, from 0 on; all if none are given."""
    count = meta(node.args[0]).dim()  # type: ignore[arg-type]
    listed = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return sorted(dim % count for dim in listed) or list(range(count))


def _option(node: fx.Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _softmax(new: _Lowering, node: fx.Node) -> None:
    x = new.wide(node.args[0])  # type: ignore[arg-type]
    largest = new(aten.amax.default, x, [node.args[1]], True)
    exponential = new(aten.exp.default, new(aten.sub.Tensor, x, largest))
    total = new(aten.sum.dim_IntList, exponential, [node.args[1]], True)
    new.replace(node, new(aten.div.Tensor, exponential, total))


def _log_softmax(new: _Lowering, node: fx.Node) -> None:
    x = new.wide(node.args[0])  # type: ignore[arg-type]
    difference = new(aten.sub.Tensor, x, new(aten.amax.default, x, [node.args[1]], True))
    total = new(aten.sum.dim_IntList, new(aten.exp.default, difference), [node.args[1]], True)
    new.replace(node, new(aten.sub.Tensor, difference, new(aten.log.default, total)))


def _logsumexp(new: _Lowering, node: fx.Node) -> None:
    x = new.wide(node.args[0])  # type: ignore[arg-type]
    _, shift, total = new.shifted(x, _dims(node, node.args[1]))
    new.replace(node, new(aten.add.Tensor, new(aten.log.default, total), shift))


def _softmax_backward(new: _Lowering, node: fx.Node) -> None:
    grad, output, dim, _ = node.args
    product = new(aten.mul.Tensor, new.wide(grad), new.wide(output))  # type: ignore[arg-type]
    total = new(aten.sum.dim_IntList, product, [dim], True)
    new.replace(node, new(aten.sub.Tensor, product, new(aten.mul.Tensor, new.wide(output), total)))  # type: ignore[arg-type]


def _log_softmax_backward(new: _Lowering, node: fx.Node) -> None:
    grad, output, dim, _ = node.args
    wide = new.wide(grad)  # type: ignore[arg-type]
    total = new(aten.sum.dim_IntList, wide, [dim], True)
    likely = new(aten.exp.default, new.wide(output))  # type: ignore[arg-type]
    new.replace(node, new(aten.sub.Tensor, wide, new(aten.mul.Tensor, likely, total)))


def _extreme(values: Any, indices: Any) -> Callable[[_Lowering, fx.Node], None]:
    """Returns the rule for `max` and `min` along a dimension, which give values and indices."""

    def replace(new: _Lowering, node: fx.Node) -> None:
        if len(node.args) < 2:
            return
        x, dim, keepdim = node.args[0], node.args[1], _option(node, 2, "keepdim", False)
        for user in list(node.users):
            taken = new(indices, x, dim, keepdim) if user.args[1] else new(values, x, [dim], keepdim)
            user.replace_all_uses_with(taken)
            node.graph.erase_node(user)

    return replace


def _adaptive_max_pool(new: _Lowering, node: fx.Node) -> None:
    if any(size != 1 for size in node.args[1]) or any(user.args[1] != 0 for user in node.users):  # type: ignore[union-attr]
        return
    (value,) = node.users
    value.replace_all_uses_with(new(aten.amax.default, node.args[0], [-3, -2, -1], True))


def _vector_norm(new: _Lowering, node: fx.Node) -> None:
    order = _option(node, 1, "ord", 2)
    if order not in (1, 2) or node.kwargs.get("dtype") is not None:
        return
    x = new.wide(node.args[0])  # type: ignore[arg-type]
    power = new(aten.mul.Tensor, x, x) if order == 2 else new(aten.abs.default, x)
    total = new(aten.sum.dim_IntList, power, _dims(node, _option(node, 2, "dim", None)), True)
    new.replace(node, new(aten.sqrt.default, total) if order == 2 else total)


def _scatter(new: _Lowering, node: fx.Node) -> None:
    """Replaces the derivative of `max` along a dimension: a gradient at the index of the maximum, 0 elsewhere."""
    zeros, dim, index, source = node.args
    if not isinstance(zeros, fx.Node) or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return
    if packet_of(zeros) is not aten.new_zeros or shape_of(index)[dim] != 1 or shape_of(index) != shape_of(source):  # type: ignore[arg-type]
        return
    places = new.constant(torch.arange(shape_of(zeros)[dim]), dim % 5, source)
    new.replace(node, new(aten.where.ScalarOther, new(aten.eq.Tensor, places, index), source, 0.0))


LOWERED: dict[Any, Callable[[_Lowering, fx.Node], None]] = {
    aten._softmax: _softmax,
    aten._log_softmax: _log_softmax,
    aten.logsumexp: _logsumexp,
    aten._softmax_backward_data: _softmax_backward,
    aten._log_softmax_backward_data: _log_softmax_backward,
    aten.max: _extreme(aten.amax.default, aten.argmax.default),
    aten.min: _extreme(aten.amin.default, aten.argmin.default),
    aten.adaptive_max_pool3d: _adaptive_max_pool,
    aten.linalg_vector_norm: _vector_norm,
    aten.scatter: _scatter,
}
