"""Cuts the graph of a tail into stages: what the convolution's kernel computes, one pass, and what PyTorch computes.

    z --epilogue--> u --statistics, pass--> v --PyTorch--> result

- The epilogue is an expression of the sums alone, and is evaluated where they still are in registers.
- Statistics are means and variances of u over space (instance norm, group norm) or over space and batch (batch norm).
  What is computed from them and from captured tensors is small, and PyTorch computes it.
- The pass is an expression of u, of vectors (one number per channel and batch item) and of whole tensors.

u and v are bottlenecks: no later node needs anything that was computed before them. This module knows graphs and
shapes; it knows nothing of kernels or of the tensors of a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from .expressions import OPERATORS, VALUE, Expression, number, then, vector, whole

aten = torch.ops.aten

MOST_WHOLE = 4  # whole tensors that a pass reads (tail_pass.cuh)
MOST_VECTORS = 16  # vectors that a pass reads, each a register or more of every thread
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOVED = (aten.view, aten.reshape, aten._unsafe_view, aten.unsqueeze, aten.squeeze)


@dataclass(frozen=True)
class Statistics:
    """Describes means and variances of u: over norm groups of channels of a batch item, or over channels of all."""

    groups: int
    over_batch: bool
    nodes: tuple[fx.Node, ...]  # the nodes that compute them, all for the same groups


@dataclass(frozen=True)
class Affine:
    """Holds an affine map of every channel, as an expression with vectors; `VALUE` is the map that changes nothing."""

    expression: Expression
    vectors: tuple[fx.Node, ...]


@dataclass
class Stages:
    """Holds the stages of one tail for one shape and type."""

    graph: fx.GraphModule
    first: fx.Node  # z
    affine: Affine  # moves into the weight and the bias
    epilogue: Expression  # of what the affine map gives
    fed: fx.Node  # u, which the convolution's kernel stores
    statistics: Statistics | None
    computed: Expression  # of u; `VALUE` if there is no pass
    vectors: tuple[fx.Node, ...]
    wholes: tuple[fx.Node, ...]
    last: fx.Node  # v
    before: tuple[fx.Node, ...] = ()  # small nodes that PyTorch computes before the pass
    after: tuple[fx.Node, ...] = ()  # nodes that PyTorch computes after the pass
    shapes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)  # the shape that a vector broadcasts to

    @property
    def left(self) -> tuple[str, ...]:
        """The operators behind the fused part, which run in PyTorch."""
        return tuple(dict.fromkeys(_name(node) for node in self.after if node.op == "call_function"))


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).removeprefix("aten.")


def stages(graph: fx.GraphModule, exact_order: bool = False) -> Stages:
    """Returns the stages of a traced tail. The first placeholder of the graph is z, [N, C, D, H, W].

    With `exact_order` no affine map moves into the weight.
    """
    nodes = list(graph.graph.nodes)
    z = next(node for node in nodes if node.op == "placeholder")
    shape, dtype = tuple(_meta(z).shape), _meta(z).dtype
    dependent = _dependent(nodes, {z})
    captured = set(nodes) - dependent - {node for node in nodes if node.op == "placeholder"}
    affine = _Region(z, shape, dependent, known=set() if exact_order else captured).grow(nodes)
    a = affine.affine_bottleneck(dtype)
    epilogue = _Region(a, shape, _dependent(nodes, {a})).grow(nodes)
    u = epilogue.bottleneck(dtype)
    found = _statistics(u, nodes, shape)
    consumed = _only_for(nodes, set(found.nodes)) if found else set()
    free = _dependent(nodes, {u}, stopping=consumed)
    known = (set(nodes) - dependent) | (_dependent(nodes, consumed) - free)
    region = _Region(u, shape, free, consumed=consumed, known=known).grow(nodes)
    v = region.bottleneck(None)
    if v is u and found is not None:  # statistics that no pass uses are PyTorch's to compute
        found, consumed = None, set()
    folded, evaluated, computed = affine.expression(a), epilogue.expression(u), region.expression(v)
    inside = affine.ancestors(a) | epilogue.ancestors(u) | region.ancestors(v) | consumed
    needed = _needed([*affine.vectors, *region.vectors, *region.wholes]) - inside
    rest = [node for node in nodes if node not in inside and node.op not in ("placeholder", "output")]
    return Stages(
        graph, z, Affine(folded, tuple(affine.vectors)), evaluated, u, found, computed,
        tuple(region.vectors), tuple(region.wholes), v,
        before=tuple(node for node in rest if node in needed),
        after=tuple(node for node in rest if node not in needed),
        shapes={**region.shapes, **affine.shapes},
    )  # fmt: skip


def _only_for(nodes: list[fx.Node], users: set[fx.Node]) -> set[fx.Node]:
    """Returns nodes, and those that nothing else uses."""
    found = set(users)
    for node in reversed(nodes):
        if node.users and all(user in found for user in node.users) and node.op == "call_function":
            found.add(node)
    return found


def _meta(node: fx.Node) -> Any:
    return node.meta["val"]


def _dependent(nodes: Iterable[fx.Node], start: set[fx.Node], stopping: set[fx.Node] = frozenset()) -> set[fx.Node]:  # type: ignore[assignment]
    """Returns the nodes that depend on one of `start`, these included; the search does not go through `stopping`."""
    found = set(start)
    for node in nodes:
        if node not in stopping and any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


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


def volume_of(shape: tuple[int, ...], whole_shape: tuple[int, ...]) -> int | None:
    """Returns how many leading dimensions of a view of [N, C, D, H, W] are batch and channels, or None.

    Views keep the order of elements, so that leading dimensions with N * C elements are batch and channels.
    """
    rows = whole_shape[0] * whole_shape[1]
    if prod(shape) != prod(whole_shape):
        return None
    for count in range(len(shape) + 1):
        if prod(shape[:count]) == rows and prod(shape[count:]) == prod(whole_shape[2:]):
            return count
    return None


@dataclass
class _Region:
    """Collects the nodes that are pointwise functions of one node."""

    start: fx.Node
    shape: tuple[int, ...]
    dependent: set[fx.Node]  # nodes that depend on the start
    consumed: set[fx.Node] = field(default_factory=set)  # nodes that use the start and are computed elsewhere
    known: set[fx.Node] = field(default_factory=set)  # nodes that may be vectors or whole tensors
    held: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)  # pointwise nodes, and those they use
    vectors: list[fx.Node] = field(default_factory=list)
    wholes: list[fx.Node] = field(default_factory=list)
    shapes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)  # the shape that a vector broadcasts to

    def grow(self, nodes: Iterable[fx.Node]) -> _Region:
        self.held[self.start] = ()
        for node in nodes:
            if node in self.dependent and node is not self.start and node not in self.consumed:
                self._hold(node)
        return self

    def _hold(self, node: fx.Node) -> None:
        """Adds a node if it is a pointwise function of nodes in the region."""
        if node.op != "call_function":
            return
        value = _meta(node)
        if not isinstance(value, torch.Tensor) or volume_of(tuple(value.shape), self.shape) is None:
            return
        packet = getattr(node.target, "overloadpacket", None)
        inputs = tuple(each for each in node.all_input_nodes if each in self.dependent)
        if not inputs or any(each not in self.held for each in inputs):
            return
        if packet in _MOVED or (packet is aten._to_copy and _only_type(node)):
            self.held[node] = inputs
            return
        build = OPERATORS.get(packet)
        if build is None or (node.kwargs and set(node.kwargs) - {"alpha"} and packet is not aten.clone):
            return
        # All operands that are functions of the start must have the node's own order of dimensions.
        if any(tuple(_meta(each).shape) != tuple(value.shape) for each in inputs):
            return
        if all(each in inputs or self._operand(each, tuple(value.shape)) for each in node.all_input_nodes):
            self.held[node] = inputs

    def _operand(self, node: fx.Node, shape: tuple[int, ...]) -> bool:
        """Tells whether a node that does not depend on the start can be an operand, and notes the shape it gets."""
        value = _meta(node)
        if node not in self.known or not isinstance(value, torch.Tensor):
            return False
        if self.shapes.setdefault(node, shape) != shape:
            return False
        return self._is_vector(node) or (
            tuple(value.shape) == self.shape == shape and value.dtype is _meta(self.start).dtype
        )

    def _is_vector(self, node: fx.Node) -> bool:
        """Tells whether an operand is constant along every channel's volume."""
        shape = self.shapes[node]
        rows = volume_of(shape, self.shape)
        own = (1,) * (len(shape) - _meta(node).dim()) + tuple(_meta(node).shape)
        return rows is not None and len(own) == len(shape) and all(size == 1 for size in own[rows:])

    def ancestors(self, node: fx.Node) -> set[fx.Node]:
        """Returns the nodes of the region that a node of it is computed from, and the node itself."""
        found, waiting = set(), [node]
        while waiting:
            each = waiting.pop()
            if each not in found:
                found.add(each)
                waiting.extend(self.held[each])
        return found

    def bottlenecks(self, dtype: torch.dtype | None) -> list[fx.Node]:
        """Returns the nodes through which everything that is computed before them is used, in order."""
        found = []
        for node in self.held:
            value = _meta(node)
            if node is not self.start and (
                tuple(value.shape) != self.shape
                or (value.dtype is not dtype if dtype is not None else value.dtype not in _FLOATS)
            ):
                continue
            inside = self.ancestors(node)
            users = {user for each in inside if each is not node for user in each.users} - self.consumed
            if users <= inside:
                found.append(node)
        return found

    def bottleneck(self, dtype: torch.dtype | None) -> fx.Node:
        """Returns the last bottleneck of a type (any floating-point type if None) whose operands a pass can read."""
        for node in reversed(self.bottlenecks(dtype)):
            used = {each for n in self.ancestors(node) for each in n.all_input_nodes if each not in self.dependent}
            vectors = [each for each in used if each in self.shapes and self._is_vector(each)]
            wholes = [each for each in used if each in self.shapes and not self._is_vector(each)]
            if len(vectors) <= MOST_VECTORS and len(wholes) <= MOST_WHOLE:
                return node
        raise AssertionError("the start is a bottleneck of its own region")

    def affine_bottleneck(self, dtype: torch.dtype) -> fx.Node:
        """Returns the last bottleneck of a type that is an affine map of the start, equal for all batch items."""
        for node in reversed(self.bottlenecks(dtype)):
            operands = {
                each for n in self.ancestors(node) for each in n.all_input_nodes if each not in self.dependent
            }
            if not all(self._is_vector(each) and self._same_for_batch(each) for each in operands):
                continue
            trial = replace(self, vectors=[], wholes=[])
            if trial.expression(node).degree in (0, 1) and operands:
                return node
        return self.start

    def _same_for_batch(self, node: fx.Node) -> bool:
        shape = self.shapes[node]
        return shape == self.shape and (_meta(node).dim() < 5 or _meta(node).shape[0] == 1)

    def expression(self, node: fx.Node) -> Expression:
        """Returns a node as an expression of the start; everything between two bottlenecks is computed once."""
        inside = self.ancestors(node)
        cuts = [each for each in self.bottlenecks(None) if each in inside and each is not self.start]
        result, previous = VALUE, self.start
        for cut in cuts:
            result = then(result, self._between(previous, cut))
            previous = cut
        return result

    def _between(self, start: fx.Node, node: Any) -> Expression:
        if not isinstance(node, fx.Node):
            return number(node)
        if node is start:
            return VALUE
        if node not in self.held:
            return self._leaf(node)
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        if packet in _MOVED or packet in (aten._to_copy, aten.clone):
            return self._between(start, node.args[0])
        operands = [None if each is None else self._between(start, each) for each in node.args]
        options = {name: self._between(start, each) for name, each in node.kwargs.items()}
        return OPERATORS[packet](*operands, **options)

    def _leaf(self, node: fx.Node) -> Expression:
        """Returns the expression of an operand, which gets the next index when it is first used."""
        listed, make = (self.vectors, vector) if self._is_vector(node) else (self.wholes, whole)
        if node not in listed:
            listed.append(node)
        return make(listed.index(node))


def _only_type(node: fx.Node) -> bool:
    """Tells whether a copy changes nothing but the type, from a floating-point or boolean type to floating point."""
    kinds = (*_FLOATS, torch.bool)
    given = {name for name, value in node.kwargs.items() if value is not None and name != "memory_format"}
    return given <= {"dtype"} and _meta(node).dtype in _FLOATS and _meta(node.all_input_nodes[0]).dtype in kinds


# ---- statistics


def _statistics(u: fx.Node, nodes: list[fx.Node], shape: tuple[int, ...]) -> Statistics | None:
    """Returns the means and variances that the tail takes of u, if all have the same groups."""
    same = {u}  # u in other views and types
    found: list[tuple[fx.Node, tuple[int, bool]]] = []
    for node in nodes:
        if node.op != "call_function" or not node.all_input_nodes or node.all_input_nodes[0] not in same:
            continue
        packet = getattr(node.target, "overloadpacket", None)
        if packet in (*_MOVED, aten.clone) or (packet is aten._to_copy and _only_type(node)):
            same.add(node)
        elif node.target is aten.var_mean.correction and node.kwargs.get("correction") == 0:
            kind = _groups(tuple(_meta(node.args[0]).shape), node.args[1], shape)  # type: ignore[union-attr, arg-type]
            if kind is None:
                return None
            found.append((node, kind))
    if not found or len({kind for _, kind in found}) != 1:
        return None
    groups, over_batch = found[0][1]
    return Statistics(groups, over_batch, tuple(node for node, _ in found))


def _groups(viewed: tuple[int, ...], dims: list[int], shape: tuple[int, ...]) -> tuple[int, bool] | None:
    """Returns the norm groups of a reduction of a view over `dims`, and whether the batch is reduced too."""
    rows = volume_of(viewed, shape)
    reduced = {dim % len(viewed) for dim in dims}
    if rows is None or not set(range(rows, len(viewed))) <= reduced:
        return None
    batch, channels = shape[:2]
    kept = [viewed[dim] for dim in range(rows) if dim not in reduced]
    if viewed[:2] == (batch, channels) and rows == 2 and 0 in reduced and 1 not in reduced:
        return channels, batch > 1
    if viewed == (1, batch * channels, *shape[2:]) and 1 not in reduced:
        return channels, False
    leading = set(range(rows)) - reduced
    if leading == set(range(len(leading))) and kept and kept[0] == batch and batch * channels % prod(kept) == 0:
        return prod(kept) // batch, False  # leading dimensions are kept: batch items and their norm groups
    return None
