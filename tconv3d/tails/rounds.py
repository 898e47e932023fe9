"""Divides a graph of element nodes, sums over space and small computations into launches.

    sums of expressions of z -> PyTorch computes small tensors -> sums that need these -> ... -> expressions of z

All sums over space that need no others are one pass over the tensors; so are, after it, the sums that need those, and
so on. At the end every element node that somebody needs is one pass that writes it. Small nodes (numbers per channel,
per batch item or fewer) are computed by PyTorch in between. What is none of these is left to PyTorch, behind the last
pass. This module knows graphs and shapes, no kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from .expressions import Expression
from .pointwise import (
    FLOATS,
    Shape,
    Writer,
    is_expanded_vector,
    is_pointwise,
    is_vector,
    meta,
    name_of,
    packet_of,
    rows_of,
    shape_of,
)
from .tracing import writes

aten = torch.ops.aten

MOST_WHOLE = 4  # whole tensors that a pass reads besides z (tail_pass.cuh, tail_sums.cuh)
MOST_VECTORS = 24  # vectors that a pass reads, each a register of every thread
MOST_SUMS = 8  # sums that one pass computes
MOST_LETTERS = 16000  # length of the C++ name of an expression


@dataclass(frozen=True)
class Reduction:
    """Describes a sum or mean over space and possibly over batch items or channels."""

    node: fx.Node
    viewed: Shape  # shape of the element node that is summed
    dims: tuple[int, ...]
    mean: bool

    @property
    def count(self) -> int:
        return prod(self.viewed[dim] for dim in self.dims) if self.mean else 1


@dataclass(frozen=True)
class Launch:
    """Holds expressions that one pass evaluates, with the operands they name by index."""

    expressions: tuple[Expression, ...]
    vectors: tuple[tuple[fx.Node, Shape], ...]
    wholes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Sums:
    """Holds the sums that one pass computes."""

    reductions: tuple[Reduction, ...]
    launch: Launch


@dataclass(frozen=True)
class Written:
    """Holds an element node that one pass writes."""

    node: fx.Node
    launch: Launch


@dataclass
class Rounds:
    """Holds the launches of a graph, the small nodes between them, and the nodes that are left to PyTorch."""

    sums: tuple[Sums, ...]
    written: tuple[Written, ...]
    small: tuple[fx.Node, ...]
    left: tuple[fx.Node, ...]

    @property
    def reductions(self) -> tuple[fx.Node, ...]:
        """The sums and means that passes compute, in order."""
        return tuple(reduction.node for each in self.sums for reduction in each.reductions)

    @property
    def left_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name_of(node) for node in self.left))


@dataclass
class _Sorted:
    """Sorts the nodes of a graph into element nodes, reductions, small nodes, and nodes that are left."""

    full: Shape
    elements: dict[fx.Node, int] = field(default_factory=dict)  # with the number of passes before them
    small: dict[fx.Node, int] = field(default_factory=dict)
    reductions: dict[fx.Node, tuple[Reduction, int]] = field(default_factory=dict)
    left: list[fx.Node] = field(default_factory=list)

    def add(self, node: fx.Node, kind: torch.dtype) -> None:
        inputs = node.all_input_nodes
        if writes(node) and any(each in self.elements for each in inputs):
            self.left.append(node)
            return
        if any(each not in self.elements and each not in self.small for each in inputs):
            self.left.append(node)
            return
        level = max([*(self.elements.get(each, self.small.get(each, 0)) for each in inputs), 0])
        used = [each for each in inputs if each in self.elements]
        if not used and is_expanded_vector(node, self.full):
            self.elements[node] = level
        elif not used:
            self.small[node] = level
        elif is_pointwise(node, self.elements, self.full, lambda each, shape: self._operand(each, shape, kind)):
            self.elements[node] = level
        elif (reduction := _reduction(node, self.full)) is not None and used == inputs:
            self.reductions[node] = reduction, level
            self.small[node] = level + 1
        else:
            self.left.append(node)

    def _operand(self, node: fx.Node, shape: Shape, kind: torch.dtype) -> bool:
        value = node.meta.get("val")
        if node not in self.small or not isinstance(value, torch.Tensor):
            return False
        return is_vector(node, shape, self.full) or (shape_of(node) == shape == self.full and value.dtype is kind)


def rounds(
    graph: fx.Graph, value: fx.Node, wholes: Iterable[fx.Node], known: Mapping[fx.Node, Any], inside: set[fx.Node]
) -> Rounds | None:
    """Returns the launches behind `value`, the element node that every pass reads; None if operands are too many.

    `wholes` are further element nodes that exist already, `known` small nodes that exist already. `inside` are nodes
    that earlier stages compute and nobody else needs.
    """
    full, kind = shape_of(value), meta(value).dtype
    found = _Sorted(full, elements=dict.fromkeys((value, *wholes), 0), small=dict.fromkeys(known, 0))
    nodes = [node for node in graph.nodes if node.op == "call_function" and node not in inside]
    for node in nodes:
        if node not in found.elements and node not in found.small:
            found.add(node, kind)
    output = next(node for node in graph.nodes if node.op == "output")
    ends = {each for node in (*found.left, output) for each in node.all_input_nodes if each in found.elements}
    ends -= {value, *wholes}
    if any(shape_of(node) != full or meta(node).dtype not in FLOATS for node in ends):
        return None
    starts = (value, *wholes)
    effects = [node for node in nodes if writes(node)]
    needed = _needed([*ends, *found.left, *effects, output])
    sums = []
    for level in range(max((each for _, each in found.reductions.values()), default=-1) + 1):
        here = [each for each, at in found.reductions.values() if at == level and each.node in needed]
        for first in range(0, len(here), MOST_SUMS):
            some = tuple(here[first : first + MOST_SUMS])
            launch = _launch([each.node.all_input_nodes[0] for each in some], starts, found.elements, full)
            if launch is None:
                return None
            sums.append(Sums(some, launch))
    written = []
    for node in (each for each in nodes if each in ends):
        launch = _launch([node], starts, found.elements, full)
        if launch is None:
            return None
        written.append(Written(node, launch))
    small = tuple(node for node in nodes if node in found.small and node not in found.reductions and node in needed)
    return Rounds(tuple(sums), tuple(written), small, tuple(found.left))


def _launch(
    nodes: Iterable[fx.Node], starts: tuple[fx.Node, ...], elements: Mapping[fx.Node, int], full: Shape
) -> Launch | None:
    writer = Writer(full, starts[0], elements)
    writer.wholes.extend(starts[1:])
    expressions = tuple(writer.write(node) for node in nodes)
    if len(writer.wholes) > MOST_WHOLE or len(writer.vectors) > MOST_VECTORS:
        return None
    if any(len(expression.cpp) > MOST_LETTERS for expression in expressions):
        return None
    return Launch(expressions, tuple(writer.vectors), tuple(writer.wholes))


def _needed(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns the nodes and everything that they are computed from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _reduction(node: fx.Node, full: Shape) -> Reduction | None:
    """Returns a sum or mean of an element node over all of space, and of leading dimensions perhaps; else None."""
    packet = packet_of(node)
    if packet not in (aten.sum, aten.mean) or len(node.all_input_nodes) != 1:
        return None
    if not isinstance(node.meta.get("val"), torch.Tensor) or meta(node).dtype not in FLOATS:
        return None
    viewed = shape_of(node.all_input_nodes[0])
    rows = rows_of(viewed, full)
    given = node.args[1] if len(node.args) > 1 else None
    listed: list[Any] = list(given) if isinstance(given, (list, tuple)) else []
    dims = [dim % len(viewed) for dim in listed] or list(range(len(viewed)))
    if rows is None or not set(range(rows, len(viewed))) <= set(dims):
        return None
    return Reduction(node, viewed, tuple(sorted(dims)), packet is aten.mean)
