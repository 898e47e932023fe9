"""Finds what one pooling pass computes: a pool of element nodes, and pointwise functions of its result.

This module knows graphs and shapes, no kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from ..families.norm.pool import Windows
from ..planning.geometry import Triple
from ..planning.scalars import INT32_MAX
from .axes import is_channel_vector, padded
from .expressions import Expression
from .pointwise import FLOATS, Shape, Writer, is_pointwise, meta, packet_of, shape_of

aten = torch.ops.aten

_DEFAULTS: dict[Any, tuple[Any, ...]] = {
    aten.avg_pool3d: (None, None, [], 0, False, True, None),
    aten.max_pool3d_with_indices: (None, None, [], 0, 1, False),
}
MOST_PLACES = 1 << 24  # most positions of a volume in which a pass finds the places of maxima: float32 counts them


@dataclass(frozen=True)
class PoolPass:
    """Holds one pooling pass and its operands."""

    node: fx.Node
    windows: Windows
    size: Triple
    way: str
    averages: bool
    before: Expression
    after: Expression
    vectors: tuple[tuple[fx.Node, Shape], ...]
    wholes: tuple[fx.Node, ...]
    places: fx.Node | None = None  # the places of the largest elements, which the pass writes beside them

    def shape(self, full: Shape) -> Shape:
        return (*full[:2], *self.size)

    def with_places(self, other: PoolPass) -> PoolPass | None:
        """Returns the pass that writes what another one writes, too: the places of these largest elements."""
        ways = self.way, other.way
        same = (self.windows, self.before, self.wholes) == (other.windows, other.before, other.wholes)
        same = same and self.vectors[: len(other.vectors)] == other.vectors
        if ways != ("FindingLargest", "LocatingLargest") or self.places is not None or not same:
            return None
        return replace(self, way=other.way, places=other.node)

    def __str__(self) -> str:
        largest = "index of the largest" if self.way == "LocatingLargest" else "largest"
        name = "average" if self.averages else largest if self.places is None else "largest and its index"
        return f"{name} of windows {self.windows.size} of {self.before}, then {self.after}"


@dataclass
class Pools:
    """Sorts nodes into pools of element nodes, and pointwise functions of one pool each."""

    full: Shape
    pools: dict[fx.Node, None] = field(default_factory=dict)
    pooled: dict[fx.Node, fx.Node] = field(default_factory=dict)  # results, each with the node that is `Value`

    def holds(self, node: fx.Node) -> bool:
        return node in self.pools or node in self.pooled

    def add(self, node: fx.Node, elements: Container[fx.Node], small: Container[fx.Node]) -> bool:
        """Takes a node that a pooling pass can compute, and tells whether it did."""
        inputs = node.all_input_nodes
        if packet_of(node) in _DEFAULTS and inputs[0] in elements and shape_of(inputs[0]) == self.full:
            places = any(each.target is operator.getitem and each.args[1] == 1 for each in node.users)
            if prod(self.full[2:]) > (MOST_PLACES if places else INT32_MAX):
                return False
            self.pools[node] = None
            if packet_of(node) is aten.avg_pool3d:
                self.pooled[node] = node
            return True
        if node.target is operator.getitem and inputs[0] in self.pools:
            self.pooled[node] = node
            return True
        return self._pointwise(node, small)

    def _pointwise(self, node: fx.Node, small: Container[fx.Node]) -> bool:
        values = {self.pooled[each] for each in node.all_input_nodes if each in self.pooled}
        if len(values) != 1:
            return False
        (value,) = values
        full = shape_of(value)

        def operand(each: fx.Node, shape: Shape) -> bool:
            fits = each in small and isinstance(each.meta.get("val"), torch.Tensor)
            return fits and shape == full and is_channel_vector(padded(shape_of(each)), full)

        if meta(value).dtype not in FLOATS or not is_pointwise(node, self.pooled, full, operand):
            return False
        self.pooled[node] = value
        return True

    def program(self, node: fx.Node, starts: tuple[fx.Node, ...], elements: Mapping[fx.Node, Any]) -> PoolPass:
        """Returns the pass that stores the result of a pool, or a function of it."""
        value = self.pooled[node]
        pool = value if value in self.pools else value.all_input_nodes[0]
        before = Writer(self.full, starts[0], elements, tensors=starts[1:])
        first = before.write(pool.all_input_nodes[0])
        after = _After(shape_of(value), value, self.pooled, vectors=before.vectors, full_before=self.full)
        last = after.write(node)
        averages = packet_of(pool) is aten.avg_pool3d
        index = not averages and value.args[1] == 1
        way = "Adding" if averages else "LocatingLargest" if index else "FindingLargest"
        _, _, d, h, w = shape_of(value)
        windows, _ = windows_of(pool)
        operands = tuple(before.vectors), tuple(before.wholes)
        return PoolPass(node, windows, (d, h, w), way, averages, first, last, *operands)


@dataclass
class _After(Writer):
    """Writes functions of a pool's result, whose vectors are listed with those of the elements before the pool."""

    full_before: Shape = ()

    def _leaf(self, node: fx.Node, target: Shape) -> Expression:
        first = (node, self.full_before)
        if first not in self.vectors:
            self.vectors.append(first)
        return Expression("Vectored", numbers=(str(self.vectors.index(first)),))


def windows_of(pool: fx.Node) -> tuple[Windows, bool]:
    """Returns the windows of a pool, and whether they may begin before and end behind the padded border."""
    given: tuple[Any, ...] = (*pool.args, *_DEFAULTS[packet_of(pool)][len(pool.args) :])
    size = as_triple(given[1])
    step = as_triple(given[2]) if given[2] else size
    if packet_of(pool) is aten.avg_pool3d:
        windows = Windows(size, step, as_triple(given[3]), counts_padding=bool(given[5]), divisor=given[6] or 0)
        return windows, bool(given[4])
    return Windows(size, step, as_triple(given[3]), as_triple(given[4])), bool(given[5])


def as_triple(value: Any) -> Triple:
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    d, h, w = listed * 3 if len(listed) == 1 else listed
    return d, h, w
