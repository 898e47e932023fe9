"""Moves permutations of dimensions behind pointwise operators and reductions, so that they meet and vanish.

A norm over channels is often written for channels that come last: `norm(z.permute(0, 2, 3, 4, 1)).permute(0, 4, 1, 2,
3)`. In the order of the convolution's result it is a norm over the second dimension, which one pass computes. This
module knows graphs and operators, no kernels.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .expressions import OPERATORS
from .pointwise import inserted, meta, packet_of, shape_of

aten = torch.ops.aten

_REDUCTIONS = (aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean)  # take several dimensions
_SOFTMAXES = (aten._softmax, aten._log_softmax)
_COPIES = (aten.clone, aten._to_copy)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
Order = tuple[int, ...]  # which dimension of its operand each dimension of a permutation is


def straighten(graph: fx.Graph) -> None:
    """Moves all permutations of a graph as far back as they can go, in place.

    A contiguous result stays contiguous if its dimensions are permuted, because a caller may ask for a view of it.
    """
    moving = _Moving(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if _order(node) is not None:
            moving.join(node)
        elif any(isinstance(each, fx.Node) and _order(each) is not None for each in node.args):
            if packet_of(node) in OPERATORS or packet_of(node) in _COPIES:
                moving.behind_pointwise(node)
            elif packet_of(node) in _REDUCTIONS or packet_of(node) in _SOFTMAXES:
                moving.behind_reduction(node)
    moving.finish()


def _order(node: fx.Node) -> Order | None:
    """Returns the order of a permutation; None if a node is none."""
    if node.target not in (aten.permute.default, aten.transpose.int):
        return None
    source, *given = node.args
    order: list[Any] = list(range(meta(source).dim()))  # type: ignore[arg-type]
    if node.target is aten.permute.default:
        (dims,) = given
        return tuple(order[dim] for dim in dims)  # type: ignore[union-attr, index]
    one, other = given
    order[one], order[other] = order[other], order[one]  # type: ignore[index]
    return tuple(order)


def _is_contiguous(node: fx.Node) -> bool:
    return isinstance(meta(node), torch.Tensor) and meta(node).is_contiguous()


class _Moving:
    """Replaces nodes of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.output = next(node for node in graph.nodes if node.op == "output")
        self.contiguous = {node for node in self.output.all_input_nodes if _is_contiguous(node)}

    def replace(self, node: fx.Node, new: fx.Node) -> None:
        if node in self.contiguous:
            self.contiguous.add(new)
        for user in list(node.users):
            if user.target in _VIEWS:
                user.target = aten.reshape.default
        node.replace_all_uses_with(new)

    def finish(self) -> None:
        """Makes results contiguous that were so."""
        for node in self.output.all_input_nodes:
            if _order(node) is not None and node in self.contiguous and not _is_contiguous(node):
                with self.graph.inserting_before(self.output):
                    options = {"memory_format": torch.contiguous_format}
                    self.output.replace_input_with(node, inserted(self.graph, aten.clone.default, (node,), options))

    def permuted(self, node: fx.Node, order: Order) -> fx.Node:
        if order == tuple(range(len(order))):
            return node
        return inserted(self.graph, aten.permute.default, (node, list(order)))

    def join(self, node: fx.Node) -> None:
        """Replaces a permutation of a permutation by one of the first operand, or by that itself."""
        source, order = node.args[0], _order(node)
        assert isinstance(source, fx.Node) and order is not None
        first = _order(source)
        with self.graph.inserting_before(node):
            if first is not None:
                self.replace(node, self.permuted(source.args[0], tuple(first[dim] for dim in order)))  # type: ignore[arg-type]
            elif order == tuple(range(len(order))):
                self.replace(node, source)

    def behind_pointwise(self, node: fx.Node) -> None:
        full = shape_of(node)
        orders = [_order(each) for each in node.args if isinstance(each, fx.Node) and shape_of(each) == full]
        order = next((each for each in orders if each is not None), None)
        if order is None:
            return
        back = tuple(order.index(dim) for dim in range(len(order)))

        def straight(each: Any) -> Any:
            if not isinstance(each, fx.Node) or meta(each).numel() == 1:
                return each
            if _order(each) == order:
                return each.args[0]
            shape = (1,) * (len(full) - len(shape_of(each))) + shape_of(each)
            if sum(size > 1 for size in shape) <= 1:
                return inserted(self.graph, aten.view.default, (each, [shape[dim] for dim in back]))
            wide = each if shape == shape_of(each) else inserted(self.graph, aten.view.default, (each, list(shape)))
            return self.permuted(wide, back)

        options = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
        with self.graph.inserting_before(node):
            result = inserted(self.graph, node.target, tuple(map(straight, node.args)), options)
            self.replace(node, self.permuted(result, order))

    def behind_reduction(self, node: fx.Node) -> None:
        source, *given = node.args
        order = _order(source) if isinstance(source, fx.Node) else None
        softmax, pair = packet_of(node) in _SOFTMAXES, packet_of(node) is aten.var_mean
        if order is None or not given or given[0] in (None, []):
            return
        listed: Any = given[0] if isinstance(given[0], (list, tuple)) else [given[0]]
        dims = [order[dim] for dim in listed]
        keeps = softmax or (node.kwargs.get("keepdim", False) if pair else given[1:2] == [True])
        if not keeps:
            left = [each for place, each in enumerate(order) if place not in {dim % len(order) for dim in listed}]
            order = tuple(sorted(left).index(each) for each in left)
        rest = (dims[0], *given[1:]) if softmax else (dims, *given[1:])
        with self.graph.inserting_before(node):
            result = inserted(self.graph, node.target, (source.args[0], *rest), node.kwargs)  # type: ignore[union-attr]
            for user in list(node.users) if pair else [node]:
                part = inserted(self.graph, operator.getitem, (result, user.args[1])) if pair else result
                self.replace(user, self.permuted(part, order))
