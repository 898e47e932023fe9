"""Finds what one pass along an axis computes: reductions over channels or a part of space, and what uses them.

A position node has one number for every place that is left when the axis is taken away, for example the maximum over
channels. A late node has a number for every element and is computed from position nodes, for example a softmax. The
pass is written as a program: steps that each give one number per position, then the expression that is stored
(device/axis_program.cuh). This module knows graphs and shapes, no kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from ..torch_ops.axis_executor import is_one_axis
from .expressions import OPERATORS, Expression, local, number, whole
from .pointwise import (
    FLOATS,
    Shape,
    Writer,
    constant,
    is_pointwise,
    is_vector,
    is_view,
    meta,
    packet_of,
    rows_of,
    shape_of,
    unexpanded,
)

aten = torch.ops.aten

ALONG = 8  # the first index of operands that vary along the axis alone (axis_pass.cuh)
MOST_PLACED = 4  # operands that are constant along the axis
MOST_SUMS = 8  # sums that one pass computes
MOST_SUMMED = (
    1 << 12
)  # sums and places along the axis that fit into shared memory, a number of 8 bytes for each thread
MOST_STEPS = 32  # numbers of a position that are held in registers
MOST_LENGTH = 1 << 24  # longest axis, whose indices float32 counts

REDUCTIONS = {
    aten.sum: "Adding",
    aten.mean: "Adding",
    aten.amax: "FindingLargest",
    aten.amin: "FindingSmallest",
    aten.argmax: "LocatingLargest",
    aten.argmin: "LocatingSmallest",
}
Dims = frozenset[int]


@dataclass(frozen=True)
class Reduction:
    """Describes a sum, mean or extreme over space and perhaps batch items or channels, or over positions."""

    node: fx.Node
    viewed: Shape  # shape of the element node that is reduced
    dims: tuple[int, ...]
    mean: bool
    extreme: str = ""  # "Largest" or "Smallest" if it is no sum

    @property
    def count(self) -> int:
        return prod(self.viewed[dim] for dim in self.dims) if self.mean else 1


@dataclass(frozen=True)
class AxisPass:
    """Holds the program of one pass along an axis and its operands."""

    node: fx.Node
    dims: Dims
    each: bool  # the result has the shape of the tensor; otherwise one number per position
    program: Expression
    sweeps: int
    vectors: tuple[tuple[fx.Node, Shape], ...]
    wholes: tuple[fx.Node, ...]
    placed: tuple[fx.Node, ...]
    along: tuple[fx.Node, ...]
    # Sums over the positions, which the pass adds up while it writes: one number for every place along the axis, and
    # for every batch item if the axis is that of channels.
    summed: tuple[Reduction, ...] = ()
    sums: tuple[Expression, ...] = ()

    def shape(self, full: Shape) -> Shape:
        """Returns the shape of the result, with five dimensions."""
        return full if self.each else tuple(1 if dim in self.dims else size for dim, size in enumerate(full))

    def __str__(self) -> str:
        return f"{self.program}" + (f", and sums of {', '.join(map(str, self.sums))}" if self.sums else "")


def padded(shape: Shape) -> Shape:
    """Returns a shape with as many leading ones as it takes to broadcast to five dimensions."""
    return (1,) * (5 - len(shape)) + shape


@dataclass
class Axes:
    """Sorts nodes into position nodes and late nodes of one axis, which the first of them chooses."""

    full: Shape
    kind: torch.dtype  # element type of the tensors of this shape
    channels_last: bool
    dims: Dims | None = None
    positions: dict[fx.Node, None] = field(default_factory=dict)
    placed: dict[fx.Node, None] = field(default_factory=dict)  # tensors with one number per position
    late: dict[fx.Node, None] = field(default_factory=dict)
    summed: dict[fx.Node, Reduction] = field(default_factory=dict)  # sums over positions

    def holds(self, node: fx.Node) -> bool:
        return node in self.positions or node in self.late or node in self.summed

    @property
    def reduced(self) -> Shape:
        """The shape of the positions: 1 along the axis."""
        return tuple(1 if dim in (self.dims or ()) else size for dim, size in enumerate(self.full))

    def add(self, node: fx.Node, elements: Mapping[fx.Node, Any], small: Mapping[fx.Node, Any]) -> bool:
        """Takes a node that this pass can compute, and tells whether it did. `elements` are not late."""
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        return (
            self._reduction(node, elements)
            or self._position(node, elements, small)
            or self._expanded(node, small)
            or self._late(node, elements, small)
        )

    # ---- the four kinds of nodes

    def _reduction(self, node: fx.Node, elements: Mapping[fx.Node, Any]) -> bool:
        if packet_of(node) not in REDUCTIONS or len(node.all_input_nodes) != 1:
            return False
        (x,) = node.all_input_nodes
        dims = reduced_dims(node)
        if not (x in elements or x in self.late) or shape_of(x) != self.full or dims is None:
            return False
        if not self._choose(dims):
            return False
        self.positions[node] = None
        return True

    def _position(self, node: fx.Node, elements: Mapping[fx.Node, Any], small: Mapping[fx.Node, Any]) -> bool:
        """Takes a pointwise function or a view of position nodes, with or without dimensions of size 1."""
        inputs = node.all_input_nodes
        if not any(each in self.positions for each in inputs) or any(
            each in self._elements(elements) for each in inputs
        ):
            return False
        if self.dims is None or [s for s in shape_of(node) if s > 1] != [s for s in self.reduced if s > 1]:
            return False
        if not is_view(node):
            if packet_of(node) not in OPERATORS or set(node.kwargs) - {"alpha"}:
                return False
            for each in inputs:
                if each in self.positions and shape_of(each) == shape_of(node):
                    continue
                if constant(unexpanded(each)) is None and not self._given(each, shape_of(node), small):
                    return False
        self.positions[node] = None
        return True

    def _expanded(self, node: fx.Node, small: Mapping[fx.Node, Any]) -> bool:
        """Takes a position node that is repeated along the axis."""
        if node.op != "call_function" or packet_of(node) is not aten.expand or shape_of(node) != self.full:
            return False
        source = unexpanded(node)
        if source not in self.positions and not (source in small and self._is_placed(source)):
            return False
        if padded(shape_of(source)) != self.reduced:
            return False
        self.late[node] = None
        return True

    def _late(self, node: fx.Node, elements: Mapping[fx.Node, Any], small: Mapping[fx.Node, Any]) -> bool:
        """Takes a pointwise function of elements that uses position nodes, late nodes or operands of this axis."""

        def operand(each: fx.Node, shape: Shape) -> bool:
            return self._operand(each, shape, small)

        everywhere = self._elements(elements)
        if any(each in everywhere for each in node.all_input_nodes):
            if not is_pointwise(node, everywhere, self.full, operand):
                return False
        elif not self._joined(node, small):
            return False
        self.late[node] = None
        return True

    def _joined(self, node: fx.Node, small: Mapping[fx.Node, Any]) -> bool:
        """Tells whether a node is a pointwise function that joins positions and operands to the shape of elements."""
        inputs = node.all_input_nodes
        if packet_of(node) not in OPERATORS or set(node.kwargs) - {"alpha"} or shape_of(node) != self.full:
            return False
        if not any(each in self.positions for each in inputs):
            return False
        return all(constant(unexpanded(each)) is not None or self._operand(each, self.full, small) for each in inputs)

    def add_sum(self, node: fx.Node, elements: Mapping[fx.Node, Any]) -> bool:
        """Takes a sum over positions that the pass can add up while it writes, and tells whether it did."""
        inputs = node.all_input_nodes
        if not self.late or self.dims is None or len(inputs) != 1 or inputs[0] not in self._elements(elements):
            return False
        length = prod(self.full[dim] for dim in self.dims)
        if len(self.summed) == MOST_SUMS or length * MOST_SUMS > MOST_SUMMED:
            return False
        found = reduction_of(node, self.full) if self.dims == {1} else _over_positions(node, self.full, self.dims)
        if found is None or found.extreme:
            return False
        self.summed[node] = found
        return True

    # ---- operands

    def _elements(self, elements: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
        return {**elements, **self.late}

    def _given(self, node: fx.Node, shape: Shape, small: Mapping[fx.Node, Any]) -> bool:
        """Tells whether a tensor that exists may be used by a position node of this shape."""
        value = node.meta.get("val")
        if node not in small or not isinstance(value, torch.Tensor):
            return False
        if value.numel() == 1:
            return True
        if shape_of(node) != shape or value.dtype not in (*FLOATS, torch.bool):
            return False
        self.placed[node] = None
        return True

    def _operand(self, node: fx.Node, shape: Shape, small: Mapping[fx.Node, Any]) -> bool:
        value = node.meta.get("val")
        if shape != self.full or not isinstance(value, torch.Tensor):
            return False
        own = padded(shape_of(node))
        if node in self.positions:
            return own == self.reduced
        if node not in small or len(own) != 5:
            return False
        if own == self.full:
            return value.dtype in (self.kind, torch.bool) and value.dim() == 5
        if is_channel_vector(own, self.full) or self._is_along(own):
            return True
        return self._is_placed(node)

    def _is_along(self, own: Shape) -> bool:
        if self.dims is None:
            return False
        return all(size == (self.full[dim] if dim in self.dims else 1) for dim, size in enumerate(own))

    def _is_placed(self, node: fx.Node) -> bool:
        """Tells whether a tensor that exists has one number per position, and takes it as an operand."""
        value, own = meta(node), padded(shape_of(node))
        if value.dtype not in (*FLOATS, torch.bool) or is_channel_vector(own, self.full):
            return False
        single = frozenset(dim for dim in range(5) if own[dim] == 1 and self.full[dim] > 1)
        rest = all(own[dim] == self.full[dim] for dim in range(5) if dim not in single)
        if not rest or not single or not self._choose(single):
            return False
        self.placed[node] = None
        return True

    def _choose(self, dims: Dims) -> bool:
        """Tells whether the pass reduces over these dimensions; the first that asks chooses."""
        kept = frozenset(dim for dim in dims if self.full[dim] > 1) or frozenset(dims)
        if self.dims is not None:
            return kept == self.dims
        length = prod(self.full[dim] for dim in kept)
        if not is_one_axis(self.full, kept, self.channels_last) or length >= MOST_LENGTH:
            return False
        self.dims = kept
        return True

    # ---- programs

    def program(
        self,
        node: fx.Node,
        starts: tuple[fx.Node, ...],
        elements: Mapping[fx.Node, Any],
        summed: Sequence[Reduction] = (),
    ) -> AxisPass | None:
        """Returns the pass that stores a position node or a late node, or None if it has too many operands."""
        assert self.dims is not None
        needed = self._needed([node, *(each.node for each in summed)])
        placed = [each for each in self.placed if each in needed]
        steps = [each for each in self.positions if each in needed and not is_view(each)]
        count = sum(2 if packet_of(each) is aten.mean else 1 for each in steps)
        if len(placed) > MOST_PLACED or count > MOST_STEPS:
            return None
        writer = _AxisWriter(
            self.full,
            starts[0],
            self._elements(elements),
            locals=len(placed) + count,
            tensors=starts[1:],
            positions=self.positions,
        )
        for index, each in enumerate(placed):
            writer.names[each] = local(index)
        written, sweeps = self._steps(steps, writer, len(placed))
        each_element = node in self.late
        sums = tuple(writer.write(each.node.all_input_nodes[0]) for each in summed)
        final = Expression("EachElement" if each_element else "EachPosition", (writer.write(node),))
        all_steps = Expression("Done")
        for step in reversed(written):
            all_steps = Expression("Then", (step, all_steps))
        program = Expression("AxisProgram", (final, all_steps))
        return AxisPass(
            node,
            self.dims,
            each_element,
            program,
            sweeps + each_element,
            tuple(writer.vectors),
            tuple(writer.wholes),
            tuple(placed),
            tuple(writer.along),
            tuple(summed),
            sums,
        )

    def _steps(self, nodes: list[fx.Node], writer: _AxisWriter, first: int) -> tuple[list[Expression], int]:
        """Returns the steps that compute position nodes, and how many of them go along the axis."""
        steps: list[Expression] = []
        sweeps = 0
        for node in nodes:
            if packet_of(node) in REDUCTIONS:
                x = writer.write(node.all_input_nodes[0])
                steps.append(Expression("Reduced", (x,), numbers=(f"tconv3d::{REDUCTIONS[packet_of(node)]}",)))
                sweeps += 1
                if packet_of(node) is aten.mean:
                    length = number(prod(self.full[dim] for dim in self.dims or ()))
                    steps.append(
                        Expression("Bound", (Expression("Quotient", (local(first + len(steps) - 1), length)),))
                    )
            else:
                steps.append(Expression("Bound", (writer.write(node),)))
            writer.names[node] = local(first + len(steps) - 1)
        return steps, sweeps

    def _needed(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting.extend(each.all_input_nodes)
        return found


@dataclass
class _AxisWriter(Writer):
    """Writes expressions whose operands may be numbers of positions, or vary along the axis alone."""

    positions: Mapping[fx.Node, None] = field(default_factory=dict)
    along: list[fx.Node] = field(default_factory=list)

    def _tree(self, node: Any, names: dict[fx.Node, Expression], target: Shape = ()) -> Expression:
        if isinstance(node, fx.Node) and node not in names:
            source = unexpanded(node) if node not in self.positions else node
            if source in self.positions and source not in names and is_view(source):
                return self._tree(source.all_input_nodes[0], names, target)
            if source in names:
                return names[source]
            if source in self.positions:
                return self._operation(source, names)
        return super()._tree(node, names, target)

    def _operation(self, node: fx.Node, names: dict[fx.Node, Expression]) -> Expression:
        """Returns a pointwise function of position nodes."""
        shape = shape_of(node)
        operands = [None if each is None else self._tree(each, names, shape) for each in node.args]
        options = {name: self._tree(each, names, shape) for name, each in node.kwargs.items()}
        return OPERATORS[packet_of(node)](*operands, **options)

    def _leaf(self, node: fx.Node, target: Shape) -> Expression:
        own = padded(shape_of(node))
        if is_channel_vector(own, self.full) and node not in self.elements:
            target = self.full
        if node in self.elements or own == self.full or is_vector(node, target, self.full):
            return super()._leaf(node, target)
        if node not in self.along:
            self.along.append(node)
        return whole(ALONG + self.along.index(node))


def is_channel_vector(own: Shape, full: Shape) -> bool:
    """Tells whether a shape of five dimensions has at most one number per channel of a batch item."""
    return all(size == 1 for size in own[2:]) and all(a in (1, b) for a, b in zip(own[:2], full[:2], strict=True))


def reduced_dims(node: fx.Node) -> Dims | None:
    """Returns the dimensions that a reduction takes away; None if that is more than they and a type of its own."""
    count = meta(node.all_input_nodes[0]).dim()
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if given is None and packet_of(node) in (aten.argmax, aten.argmin):
        return None
    listed: Iterable[Any] = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return frozenset(dim % count for dim in listed) or frozenset(range(count))


def _over_positions(node: fx.Node, full: Shape, dims: Dims) -> Reduction | None:
    """Returns a sum or mean of an element node over all dimensions but those of an axis; else None."""
    if packet_of(node) not in (aten.sum, aten.mean) or shape_of(node.all_input_nodes[0]) != full:
        return None
    over = reduced_dims(node) or frozenset()
    if over & dims or any(size > 1 and dim not in over | dims for dim, size in enumerate(full)):
        return None
    return Reduction(node, full, tuple(sorted(over)), packet_of(node) is aten.mean)


def reduction_of(node: fx.Node, full: Shape) -> Reduction | None:
    """Returns a reduction of an element node over all of space, and of leading dimensions perhaps; else None."""
    packet = packet_of(node)
    extreme = {aten.amax: "Largest", aten.amin: "Smallest"}.get(packet, "")
    if (packet not in (aten.sum, aten.mean) and not extreme) or len(node.all_input_nodes) != 1:
        return None
    if not isinstance(node.meta.get("val"), torch.Tensor) or meta(node).dtype not in (*FLOATS, torch.int64):
        return None
    viewed = shape_of(node.all_input_nodes[0])
    rows = rows_of(viewed, full)
    given = node.args[1] if len(node.args) > 1 else None
    listed: list[Any] = list(given) if isinstance(given, (list, tuple)) else []
    dims = [dim % len(viewed) for dim in listed] or list(range(len(viewed)))
    if rows is None or any(dim not in dims and viewed[dim] > 1 for dim in range(rows, len(viewed))):
        return None
    return Reduction(node, viewed, tuple(sorted(dims)), packet is aten.mean, extreme)
