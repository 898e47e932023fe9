"""Finds the nodes of a graph that are pointwise functions of others, and writes them as expressions.

An element node has a number for every element of the convolution's result, [N, C, D, H, W] or a view of it that
keeps the order of elements. Its operands are element nodes, constants, and nodes that broadcast: vectors, which are
constant along a channel's volume, and whole tensors. This module knows graphs and shapes, no kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from .expressions import OPERATORS, VALUE, Expression, local, number, vector, whole

aten = torch.ops.aten

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_VIEWS = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.alias, aten.detach)

Shape = tuple[int, ...]


def meta(node: fx.Node) -> Any:
    """Returns an example of a node's value, or None for a number that is passed to a tail."""
    return node.meta.get("val")


def shape_of(node: fx.Node) -> Shape:
    return tuple(meta(node).shape)


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", node.target)


def name_of(node: fx.Node) -> str:
    packet = packet_of(node)
    return str(getattr(packet, "__name__", packet)).removeprefix("aten.")


def rows_of(shape: Shape, full: Shape) -> int | None:
    """Returns how many leading dimensions of a view of [N, C, D, H, W] are batch and channels, or None."""
    if prod(shape) != prod(full):
        return None
    for count in range(len(shape) + 1):
        if prod(shape[:count]) == full[0] * full[1]:
            return count
    return None


def is_view(node: fx.Node) -> bool:
    """Tells whether a node has the elements of its operand in the same order, possibly in another type."""
    if packet_of(node) in _VIEWS or packet_of(node) is aten.clone:
        return True
    if packet_of(node) is not aten._to_copy:
        return False
    source = meta(node.all_input_nodes[0])
    same = meta(node).device == source.device and meta(node).layout == source.layout
    return same and meta(node).dtype in FLOATS and source.dtype in (*FLOATS, torch.bool)


def aliases(*values: fx.Node) -> set[fx.Node]:
    """Returns nodes and their views."""
    found, waiting = set(values), list(values)
    while waiting:
        views = [each for each in waiting.pop().users if each.op == "call_function" and is_view(each)]
        found.update(views)
        waiting.extend(views)
    return found


_CONSTANTS: dict[Any, Callable[[fx.Node], Any]] = {
    aten.full: lambda node: node.args[1],
    aten.full_like: lambda node: node.args[1],
    aten.scalar_tensor: lambda node: node.args[0],
    **dict.fromkeys((aten.zeros, aten.zeros_like), lambda node: 0),
    **dict.fromkeys((aten.ones, aten.ones_like), lambda node: 1),
}


def constant(node: fx.Node) -> float | None:
    """Returns the number that all elements of a node have, or None."""
    find = _CONSTANTS.get(packet_of(node)) if node.op == "call_function" else None
    value = None if find is None else find(node)
    return value if isinstance(value, (int, float)) else None


def unexpanded(node: fx.Node) -> fx.Node:
    """Returns the node that a chain of `expand` repeats along new or single dimensions."""
    while node.op == "call_function" and packet_of(node) is aten.expand:
        node = node.all_input_nodes[0]
    return node


def is_vector(node: fx.Node, target: Shape, full: Shape) -> bool:
    """Tells whether a node that broadcasts to `target`, a view of `full`, is constant along a channel's volume."""
    rows, own = rows_of(target, full), shape_of(node)
    own = (1,) * (len(target) - len(own)) + own
    return rows is not None and len(own) == len(target) and all(size == 1 for size in own[rows:])


def is_expanded_vector(node: fx.Node, full: Shape) -> bool:
    """Tells whether a node repeats a vector along every channel's volume."""
    if node.op != "call_function" or packet_of(node) is not aten.expand or rows_of(shape_of(node), full) is None:
        return False
    return is_vector(unexpanded(node), shape_of(node), full)


def is_pointwise(
    node: fx.Node, elements: Container[fx.Node], full: Shape, operand: Callable[[fx.Node, Shape], bool]
) -> bool:
    """Tells whether a node is a pointwise function of element nodes; `operand` says which others it may use."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or rows_of(shape_of(node), full) is None:
        return False
    used = [each for each in node.all_input_nodes if each in elements]
    if not used:
        return False
    if is_view(node):
        return True
    if packet_of(node) not in OPERATORS or set(node.kwargs) - {"alpha"}:
        return False
    shape = shape_of(node)
    if any(shape_of(each) != shape for each in used):
        return False
    others = [unexpanded(each) for each in node.all_input_nodes if each not in elements]
    return all(constant(each) is not None or operand(each, shape) for each in others)


@dataclass
class Writer:
    """Writes element nodes as expressions of one launch, and lists the vectors and whole tensors they use."""

    full: Shape
    value: fx.Node  # the node that is `Value`
    elements: Container[fx.Node]
    wholes: list[fx.Node] = field(default_factory=list)
    vectors: list[tuple[fx.Node, Shape]] = field(default_factory=list)  # with the shape that they broadcast to
    kind: torch.dtype | None = None  # type that whole tensors must have; None if any may be listed
    names: dict[fx.Node, Expression] = field(default_factory=dict)  # nodes whose expressions are known
    locals: int = 0  # local numbers that exist before the expression binds its own
    tensors: Collection[fx.Node] = ()  # elements that are whole tensors, which exist

    def write(self, node: fx.Node, shared: bool = True) -> Expression:
        """Returns a node as an expression. With `shared`, what is used several times is computed once."""
        order = _inside(node, self.elements, {self.value, *self.tensors})
        uses = Counter(
            self._source(each) for n in order if not is_view(n) for each in n.args if isinstance(each, fx.Node)
        )
        end = self._source(node)
        several = [
            n for n in order if shared and not is_view(n) and uses[n] > 1 and n is not end and n not in self.names
        ]
        names = dict(self.names)
        bound: list[Expression] = []
        for each in several:
            bound.append(self._tree(each, names))
            names[each] = local(self.locals + len(bound) - 1)
        result = self._tree(node, names)
        for first in reversed(bound):
            result = Expression("Let", (first, result))
        return result

    def _source(self, node: fx.Node) -> fx.Node:
        """Returns the node whose elements a chain of views has."""
        while node is not self.value and node in self.elements and node not in self.tensors and is_view(node):
            node = node.all_input_nodes[0]
        return node

    def _tree(self, node: Any, names: dict[fx.Node, Expression], target: Shape = ()) -> Expression:
        if not isinstance(node, fx.Node):
            return number(node)
        if node is self.value:
            return VALUE
        if node in names:
            return names[node]
        if node not in self.elements and (value := constant(unexpanded(node))) is not None:
            return number(value)
        if node not in self.elements or node.op == "placeholder" or node in self.tensors:
            return self._leaf(node if node in self.elements else unexpanded(node), target)
        if is_expanded_vector(node, self.full):
            return self._leaf(unexpanded(node), shape_of(node))
        if is_view(node):
            return self._tree(node.all_input_nodes[0], names, target)
        shape = shape_of(node)
        operands = [None if each is None else self._tree(each, names, shape) for each in node.args]
        options = {name: self._tree(each, names, shape) for name, each in node.kwargs.items()}
        return OPERATORS[packet_of(node)](*operands, **options)

    def _leaf(self, node: fx.Node, target: Shape) -> Expression:
        """Returns the expression of an operand, which gets the next index when it is first used."""
        if node not in self.elements and is_vector(node, target, self.full):
            if (node, target) not in self.vectors:
                self.vectors.append((node, target))
            return vector(self.vectors.index((node, target)))
        if node not in self.wholes:
            self.wholes.append(node)
        return whole(self.wholes.index(node))


def _inside(node: fx.Node, elements: Container[fx.Node], starts: Container[fx.Node]) -> list[fx.Node]:
    """Returns the element nodes that a node is computed from and the node itself, in the order of the graph."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in found or each in starts or each not in elements or each.op == "placeholder":
            continue
        found.add(each)
        waiting.extend(each.all_input_nodes)
    return [each for each in node.graph.nodes if each in found]


def inserted(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], options: Mapping[str, Any] | None = None
) -> fx.Node:
    """Inserts an operator with its shape and type."""
    node = graph.call_function(target, args, dict(options or {}))
    values = fx.node.map_arg(args, lambda each: each.meta["val"])
    with next(value for value in tree_leaves(values) if isinstance(value, FakeTensor)).fake_mode:
        node.meta["val"] = target(*values, **(options or {}))
    return node


def dependent(nodes: Iterable[fx.Node], start: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that depend on one of `start`, these included."""
    found = set(start)
    for node in nodes:
        if any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found
