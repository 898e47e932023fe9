"""Finds what one pass computes from the gradient of a pool: the gradient of its operand, and functions of that.

This module knows graphs and shapes, no kernels.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from ..families.norm.pool import Windows
from ..planning.scalars import INT32_MAX
from .expressions import Expression, local
from .pointwise import FLOATS, Shape, Writer, is_pointwise, is_vector, meta, packet_of, shape_of
from .pools import as_triple

aten = torch.ops.aten


@dataclass(frozen=True)
class Gathered:
    """Describes the gradient of a pool: windows, the gradient of its result, and the places of largest elements."""

    windows: Windows
    grad: fx.Node
    indices: fx.Node | None


@dataclass(frozen=True)
class GatherPass:
    """Holds one pass that gathers the gradient of a pool, and its operands."""

    node: fx.Node
    pool: Gathered
    expression: Expression
    vectors: tuple[tuple[fx.Node, Shape], ...]
    wholes: tuple[fx.Node, ...]

    def shape(self, full: Shape) -> Shape:
        return full

    def __str__(self) -> str:
        return f"gradient of a pool with windows {self.pool.windows.size}, then {self.expression}"


@dataclass
class Gathers:
    """Sorts nodes into the gradient of one pool and pointwise functions of it."""

    full: Shape
    kind: torch.dtype
    gather: fx.Node | None = None
    late: dict[fx.Node, int] = field(default_factory=dict)  # with the number of passes before them

    def holds(self, node: fx.Node) -> bool:
        return node is self.gather or node in self.late

    def add(self, node: fx.Node, elements: Mapping[fx.Node, int], small: Container[fx.Node]) -> bool:
        """Takes a node that this pass can compute, and tells whether it did."""
        if packet_of(node) in (aten.avg_pool3d_backward, aten.max_pool3d_with_indices_backward):
            given = [each for each in (node.args[0], node.args[7]) if isinstance(each, fx.Node)]
            fits = self.gather is None and shape_of(node) == self.full and all(each in small for each in given)
            if fits and meta(given[0]).dtype in FLOATS and prod(self.full[2:]) <= INT32_MAX:
                self.gather = node
                return True
            return False
        if not any(self.holds(each) for each in node.all_input_nodes):
            return False

        def operand(each: fx.Node, shape: Shape) -> bool:
            value = each.meta.get("val")
            if each not in small or not isinstance(value, torch.Tensor):
                return False
            whole = shape_of(each) == shape == self.full and value.dtype is self.kind
            return whole or is_vector(each, shape, self.full)

        assert self.gather is not None
        everywhere = {**elements, **self.late, self.gather: 0}
        if not is_pointwise(node, everywhere, self.full, operand):
            return False
        self.late[node] = 0
        return True

    def program(self, node: fx.Node, starts: tuple[fx.Node, ...], elements: Mapping[fx.Node, int]) -> GatherPass:
        """Returns the pass that stores the gradient of the pool, or a function of it."""
        writer = self.writer(starts, elements)
        expression = writer.write(node)
        return GatherPass(node, self.pool, expression, tuple(writer.vectors), tuple(writer.wholes))

    def writer(self, starts: tuple[fx.Node, ...], elements: Mapping[fx.Node, int]) -> Writer:
        """Returns what writes functions of the gradient."""
        assert self.gather is not None
        names = {self.gather: local(0)}
        return Writer(self.full, starts[0], {**elements, **self.late}, names=names, locals=1, tensors=starts[1:])

    @property
    def pool(self) -> Gathered:
        gather = self.gather
        assert gather is not None
        size = as_triple(gather.args[2])
        step = as_triple(gather.args[3]) if gather.args[3] else size
        padding = as_triple(gather.args[4])
        grad, indices = gather.args[0], None
        assert isinstance(grad, fx.Node)
        if packet_of(gather) is aten.avg_pool3d_backward:
            windows = Windows(size, step, padding, (1, 1, 1), bool(gather.args[6]), gather.args[7] or 0)  # type: ignore[arg-type]
        else:
            windows = Windows(size, step, padding, as_triple(gather.args[5]))
            indices = gather.args[7]
        assert indices is None or isinstance(indices, fx.Node)
        return Gathered(windows, grad, indices)
