"""Divides a graph of element nodes, sums over space and small computations into launches.

    sums of expressions of z -> PyTorch computes small tensors -> sums that need these -> ... -> expressions of z

All sums over space that need no others are one pass over the tensors; so are, after it, the sums that need those, and
so on. At the end every node that somebody needs is one pass that writes it: an expression of the elements, a program
along an axis (`axes.py`), a pool (`pools.py`), or the gradient of a pool (`pool_gradients.py`). Small nodes (numbers
per channel, per batch item or fewer) are computed by PyTorch in between. What is none of these is held by a further
round, which begins at a tensor that exists by then; what no round can hold is left to PyTorch. This module knows
graphs and shapes, no kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from .axes import MOST_SUMS, REDUCTIONS, Axes, AxisPass, Reduction, reduction_of
from .expressions import Expression
from .pointwise import (
    FLOATS,
    Shape,
    Writer,
    aliases,
    is_expanded_vector,
    is_pointwise,
    is_vector,
    is_view,
    meta,
    name_of,
    packet_of,
    shape_of,
)
from .pool_gradients import Gathered, GatherPass, Gathers
from .pools import PoolPass, Pools
from .tracing import writes

aten = torch.ops.aten

MOST_WHOLE = 4  # whole tensors that a pass reads besides z (tail_pass.cuh, tail_sums.cuh)
MOST_VECTORS = 24  # vectors that a pass reads, each a register of every thread
MOST_LETTERS = 16000  # length of the C++ name of an expression


@dataclass(frozen=True)
class Launch:
    """Holds expressions that one pass evaluates, with the operands they name by index."""

    expressions: tuple[Expression, ...]
    vectors: tuple[tuple[fx.Node, Shape], ...]
    wholes: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Sums:
    """Holds the sums that one pass computes, or one extreme."""

    reductions: tuple[Reduction, ...]
    launch: Launch
    pool: Gathered | None = None  # the local number of the expressions is the gradient of this pool


@dataclass(frozen=True)
class Written:
    """Holds an element node that one pass writes."""

    node: fx.Node
    launch: Launch

    def shape(self, full: Shape) -> Shape:
        return full

    def __str__(self) -> str:
        return str(self.launch.expressions[0])


Pass = Written | AxisPass | PoolPass | GatherPass


@dataclass
class Rounds:
    """Holds the launches behind one tensor, the small nodes between them, and the nodes that are left."""

    value: fx.Node  # the tensor that every pass reads
    full: Shape  # shape of `value` with five dimensions
    channels_last: bool  # whether `value` is channels-last
    sums: tuple[Sums, ...]
    passes: tuple[Pass, ...]  # each writes a node
    small: tuple[fx.Node, ...]
    left: tuple[fx.Node, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.sums or self.passes or self.small)

    @property
    def ends(self) -> dict[fx.Node, Shape]:
        """The nodes that passes write, with their shapes of five dimensions."""
        places = [(each.places, each) for each in self.passes if isinstance(each, PoolPass)]
        written = [*((each.node, each) for each in self.passes), *places]
        return {node: each.shape(self.full) for node, each in written if node is not None}

    @property
    def computed(self) -> set[fx.Node]:
        """The nodes that exist after this round."""
        return {*self.ends, *self.small, *(each.node for each in self.reductions)}

    @property
    def sums_last(self) -> bool:
        """Tells whether a pass adds something up while it writes."""
        return any(isinstance(each, AxisPass) and bool(each.summed) for each in self.passes)

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reductions that passes compute, those that they add up while they write at last."""
        found = [reduction for each in self.sums for reduction in each.reductions]
        return (*found, *(each for one in self.passes if isinstance(one, AxisPass) for each in one.summed))


@dataclass
class Divided:
    """Holds the rounds of a graph, one after the other, and the nodes that are left to PyTorch."""

    rounds: tuple[Rounds, ...]
    left: tuple[fx.Node, ...]

    @property
    def reductions(self) -> tuple[fx.Node, ...]:
        """The sums and means over space that passes compute, in order."""
        return tuple(found.node for each in self.rounds for found in each.reductions)

    @property
    def left_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name_of(node) for node in self.left))

    @property
    def passes(self) -> tuple[str, ...]:
        """What every pass computes, for people."""
        found: list[str] = []
        for each in self.rounds:
            found += [f"reduces {', '.join(map(str, sums.launch.expressions))}" for sums in each.sums]
            found += map(str, each.passes)
        return tuple(found)


@dataclass
class _Sorted:
    """Sorts the nodes of a graph into element nodes, reductions, small nodes, nodes of an axis, and others."""

    full: Shape
    axes: Axes
    pools: Pools
    gathers: Gathers
    large: set[fx.Node]  # tensors that exist, of which PyTorch computes nothing but views
    elements: dict[fx.Node, int] = field(default_factory=dict)  # with the number of passes before them
    small: dict[fx.Node, int] = field(default_factory=dict)
    reductions: dict[fx.Node, tuple[Reduction, int]] = field(default_factory=dict)
    left: list[fx.Node] = field(default_factory=list)
    cut: fx.Node | None = None  # a late node of the axis that is written for later rounds

    def holds(self, node: fx.Node) -> bool:
        return node in self.elements or node in self.small or any(kind.holds(node) for kind in self.kinds)

    @property
    def kinds(self) -> tuple[Gathers, Pools, Axes]:
        """The passes that may end the round, in the order in which they are offered a node."""
        return self.gathers, self.pools, self.axes

    def add(self, node: fx.Node, kind: torch.dtype) -> None:
        inputs = node.all_input_nodes
        if any(not self.holds(each) for each in inputs):
            self.left.append(node)
            return
        used = [each for each in inputs if each in self.elements]
        along = [each for each in inputs if any(kind.holds(each) for kind in self.kinds)]
        if writes(node) and (used or along):
            self.left.append(node)
            return
        if (used or along) and self.axes.add_sum(node, self.elements):
            return
        levels = {**self.small, **self.gathers.late, **self.elements}
        level = max([*(levels.get(each, 0) for each in inputs), 0])
        if not along:
            if not used and is_expanded_vector(node, self.full):
                self.elements[node] = level
                return
            if not used and any(kind.add(node, self.elements, self.small) for kind in self.kinds):
                return
            if not used:
                self._add_small(node, level)
                return
            if is_pointwise(node, self.elements, self.full, lambda each, shape: self._operand(each, shape, kind)):
                self.elements[node] = level
                return
            if used and (reduction := reduction_of(node, self.full)) is not None and used == inputs:
                self.reductions[node] = reduction, level
                self.small[node] = level + 1
                return
        if along == inputs and self.gathers.holds(along[0]):
            found = reduction_of(node, self.full)
            if found is not None and not found.extreme:
                self.reductions[node], self.small[node] = (found, level), level + 1
                return
        if not any(kind.add(node, self.elements, self.small) for kind in self.kinds):
            self.left.append(node)
        elif node in self.gathers.late:
            self.gathers.late[node] = level

    def recomputable(self, node: fx.Node) -> Shape | None:
        """Returns the shape of a tensor that will exist and that a node is a pointwise function of, or None."""
        if node.op == "call_function" and (node in self.elements or node in self.gathers.late):
            return self.full
        if node in self.axes.late and self.cut not in (None, node) and not self._uses_positions(node):
            return self.full
        value = self.pools.pooled.get(node, node)
        return None if value is node else shape_of(value)

    def cut_axis(self) -> None:
        """Finds the node through which alone all late nodes that others need depend on numbers of positions.

        A pass along the axis writes it, and later rounds compute the others from it.
        """
        ends = {each for node in self.left for each in node.all_input_nodes if each in self.axes.late}
        for node in reversed(self.axes.late if len(ends) > 1 else ()):
            if shape_of(node) == self.full and meta(node).dtype is self.axes.kind and node.op == "call_function":
                self.cut = node
                if not any(self._uses_positions(each) for each in ends):
                    return
        self.cut = None

    def _uses_positions(self, node: fx.Node) -> bool:
        """Tells whether a late node depends on numbers of positions other than through the cut."""
        seen = {self.cut}
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if each in self.axes.positions or each in self.axes.placed:
                return True
            if each not in seen and each in self.axes.late:
                waiting.extend(each.all_input_nodes)
            seen.add(each)
        return False

    def _add_small(self, node: fx.Node, level: int) -> None:
        large = any(each in self.large for each in node.all_input_nodes)
        if large and not is_view(node):
            self.left.append(node)
            return
        self.small[node] = level
        if large:
            self.large.add(node)

    def _operand(self, node: fx.Node, shape: Shape, kind: torch.dtype) -> bool:
        value = node.meta.get("val")
        if node not in self.small or not isinstance(value, torch.Tensor):
            return False
        return is_vector(node, shape, self.full) or (
            shape_of(node) == shape == self.full and value.dtype in (kind, torch.bool)
        )


def divide(
    graph: fx.Graph,
    value: fx.Node,
    wholes: tuple[fx.Node, ...],
    known: Mapping[fx.Node, Any],
    inside: set[fx.Node],
    channels_last: bool,
) -> Divided:
    """Returns the launches behind `value`, an element node with five dimensions that exists.

    `wholes` are further element nodes that exist already, `known` small nodes that exist already. `inside` are nodes
    that earlier stages compute and nobody else needs.
    """
    args = graph, value, wholes, known, inside, channels_last
    found = _divided(*args, deferring=True)
    return _divided(*args, deferring=False) if found.left else found


def _divided(
    graph: fx.Graph,
    value: fx.Node,
    wholes: tuple[fx.Node, ...],
    known: Mapping[fx.Node, Any],
    inside: set[fx.Node],
    channels_last: bool,
    deferring: bool,
) -> Divided:
    """Returns rounds one after the other, as long as there is anything that a pass can compute.

    With `deferring` a round writes no element node for later rounds, which can compute it again from the same tensor.
    """
    state = _State(graph, set(inside), dict(known), {value, *wholes}, channels_last, deferring)
    tensors: list[Start] = [((value, *wholes), shape_of(value))]  # where rounds may begin
    joined: list[Start] = []  # where rounds may begin at several tensors, read and written before
    found = [_rounds(state, *tensors[0])]
    while (each := found[-1]).left:
        state.inside |= {node for node in graph.nodes if node not in each.left}
        ends = [((node,), shape) for node, shape in each.ends.items() if meta(node).dtype in FLOATS]
        ends = [end for end in ends if _used(end[0][0], each.left)]
        tensors += ends
        joined += _joined(tensors[0], ends)
        state.large.update(each.ends)
        state.known.update(dict.fromkeys([*state.large, *each.computed]))
        state.large.update(aliases(*state.large) & state.known.keys())
        one = _first_useful(state, tensors)
        two = None if one is not None and not one.left else _first_useful(state, joined)
        if one is None or (two is not None and len(two.left) < len(one.left)):
            one = two
        if one is None:
            break
        found.append(one)
    return Divided(tuple(found), found[-1].left)


def _first_useful(state: _State, starts: list[Start]) -> Rounds | None:
    """Returns the round that begins at the latest of these tensors and computes anything."""
    following = (_rounds(state, *start) for start in reversed(starts))
    return next((one for one in following if one.ends or one.sums), None)


Start = tuple[tuple[fx.Node, ...], Shape]  # tensors of one shape that exist, where a round may begin


def _joined(first: Start, ends: Iterable[Start]) -> Iterator[Start]:
    """Yields the tensors of the first round together with those of their shape and type that a round has written."""
    (value, *wholes), shape = first
    more = [node for (node,), other in ends if other == shape and meta(node).dtype is meta(value).dtype]
    more = [node for node in more if meta(node).dim() == 5]
    if more and len(wholes) + len(more) <= MOST_WHOLE:
        yield (value, *wholes, *more), shape


@dataclass
class _State:
    """Holds what is known before a round."""

    graph: fx.Graph
    inside: set[fx.Node]  # nodes that are computed already, or that nobody needs any more
    known: dict[fx.Node, Any]  # tensors that exist
    large: set[fx.Node]  # existing tensors that passes read or write as a whole
    channels_last: bool
    deferring: bool


def _used(node: fx.Node, by: Iterable[fx.Node]) -> bool:
    return any(node in each.all_input_nodes for each in by)


def _rounds(state: _State, starts: tuple[fx.Node, ...], full: Shape) -> Rounds:
    """Returns one round of launches. Nodes that turn out to have too many operands are left, and it begins again."""
    refused: set[fx.Node] = set()
    while True:
        found = _round(state, starts, full, refused)
        if isinstance(found, Rounds):
            return found
        refused |= found


def _round(state: _State, starts: tuple[fx.Node, ...], full: Shape, refused: set[fx.Node]) -> Rounds | set[fx.Node]:
    """Returns one round of launches that leaves `refused` nodes alone, or further nodes that it cannot write."""
    graph, kind = state.graph, meta(starts[0]).dtype
    seeds = dict.fromkeys(starts, 0)
    for node in graph.nodes:  # views of the tensors are no tensors of their own
        if node in state.known and node.op == "call_function" and is_view(node) and node.all_input_nodes[0] in seeds:
            seeds[node] = 0
    known = {node: 0 for node in state.known if node not in seeds}
    axes = Axes(full, kind, state.channels_last and full[1] > 1)
    found = _Sorted(full, axes, Pools(full), Gathers(full, kind), state.large - {*seeds}, seeds, known)
    nodes = [node for node in graph.nodes if node.op == "call_function" and node not in state.inside]
    for node in nodes:
        if node in refused:
            found.left.append(node)
        elif not found.holds(node):
            found.add(node, kind)
    output = next(node for node in graph.nodes if node.op == "output")
    ends = {each for node in (*found.left, output) for each in node.all_input_nodes}
    left = found.left
    if state.deferring:
        found.cut_axis()
        again = _recomputed(found, set(output.all_input_nodes))
        left = [node for node in nodes if node in again or node in set(found.left)]
        ends = {each for node in (*left, output) for each in node.all_input_nodes} - again
    ends -= {*starts, *state.known}
    held = [node for node in nodes if node in ends and node not in found.small and node not in axes.summed]
    held = [node for node in held if found.holds(node)]
    unfit = {node for node in held if not _writable(node) or _is_start(node, starts)}
    held = [node for node in held if node not in unfit]
    needed = _needed([*held, *left, *[node for node in nodes if writes(node)], output])
    sums: list[Sums] = []
    for some in _together([each for each in found.reductions.values() if each[0].node in needed]):
        inputs = [each.node.all_input_nodes[0] for each in some]
        gathered = any(map(found.gathers.holds, inputs))
        locals = int(bool(some[0].extreme))
        writer = found.gathers.writer(starts, found.elements) if gathered else None
        launch = _launch(inputs, starts, found.elements, full, locals, writer)
        if launch is None:
            unfit.update(each.node for each in some)
        else:
            sums.append(Sums(some, launch, found.gathers.pool if gathered else None))
    passes: list[Pass] = []
    summed = [each for each in axes.summed.values() if each.node in needed]
    with_sums = next((node for node in held if summed and node in axes.late), None)
    unfit.update(each.node for each in summed if with_sums is None)
    for node in held:
        one = _pass(node, found, starts, summed if node is with_sums else ())
        if one is None and node is with_sums:
            unfit.update(each.node for each in summed)
            continue
        if one is None:
            unfit.add(node)
        else:
            _add(one, passes)
    if unfit:
        return unfit
    small = tuple(node for node in nodes if node in found.small and node not in found.reductions and node in needed)
    return Rounds(starts[0], full, axes.channels_last, tuple(sums), tuple(passes), small, tuple(left))


def _add(one: Pass, passes: list[Pass]) -> None:
    """Adds a pass to others, or lets one of them write what it writes."""
    for place, each in enumerate(passes):
        if isinstance(each, PoolPass) and isinstance(one, PoolPass):
            both = each.with_places(one) or one.with_places(each)
            if both is not None:
                passes[place] = both
                return
    passes.append(one)


def _recomputed(found: _Sorted, outputs: set[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that later rounds need and can compute again, as pointwise functions of tensors."""
    again: set[fx.Node] = set()
    waiting = list(found.left)
    while waiting:
        user = waiting.pop()
        for each in user.all_input_nodes:
            domain = found.recomputable(each)
            if domain is not None and each not in again and each not in outputs and _may_follow(user, domain):
                again.add(each)
                waiting.append(each)
    return again


def _may_follow(node: fx.Node, domain: Shape) -> bool:
    """Tells whether a round at a tensor of shape `domain` may compute a node: in this shape, or reduced."""
    value = node.meta.get("val")
    return packet_of(node) in REDUCTIONS or (isinstance(value, torch.Tensor) and value.numel() == prod(domain))


def _writable(node: fx.Node) -> bool:
    """Tells whether a node is a tensor of a type that passes write."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (*FLOATS, torch.int64)


def _is_start(node: fx.Node, starts: tuple[fx.Node, ...]) -> bool:
    """Tells whether a node is a view of a tensor that exists, in its type."""
    kind = meta(node).dtype
    while node not in starts and is_view(node) and meta(node).dtype is kind:
        (node,) = node.all_input_nodes
    return node in starts and meta(node).dtype is kind


def _pass(node: fx.Node, found: _Sorted, starts: tuple[fx.Node, ...], summed: Sequence[Reduction]) -> Pass | None:
    """Returns the pass that writes a node and adds up sums, or None if it has too many operands."""
    if found.gathers.holds(node):
        gather = found.gathers.program(node, starts, found.elements)
        return gather if _fits(gather.wholes, gather.vectors, (gather.expression,)) else None
    if found.pools.holds(node):
        pool = found.pools.program(node, starts, found.elements)
        return pool if _fits(pool.wholes, pool.vectors, (pool.before, pool.after)) else None
    if found.axes.holds(node):
        axis = found.axes.program(node, starts, found.elements, summed)
        return axis if axis is not None and _fits(axis.wholes, axis.vectors, (axis.program, *axis.sums)) else None
    launch = _launch([node], starts, found.elements, found.full)
    return Written(node, launch) if launch is not None and meta(node).dtype in FLOATS else None


def _together(reductions: Iterable[tuple[Reduction, int]]) -> Iterator[tuple[Reduction, ...]]:
    """Yields the reductions that one pass computes together, in the order of their levels."""
    levels: dict[int, list[Reduction]] = {}
    for reduction, level in reductions:
        levels.setdefault(level, []).append(reduction)
    for level in sorted(levels):
        sums = [each for each in levels[level] if not each.extreme]
        yield from (tuple(sums[first : first + MOST_SUMS]) for first in range(0, len(sums), MOST_SUMS))
        yield from ((each,) for each in levels[level] if each.extreme)


def _fits(wholes: Sized, vectors: Sized, expressions: Iterable[Expression]) -> bool:
    """Tells whether a kernel can be compiled with so many operands and such expressions."""
    if len(wholes) > MOST_WHOLE or len(vectors) > MOST_VECTORS:
        return False
    return all(len(expression.cpp) <= MOST_LETTERS for expression in expressions)


def _launch(
    nodes: Iterable[fx.Node],
    starts: tuple[fx.Node, ...],
    elements: Mapping[fx.Node, int],
    full: Shape,
    locals: int = 0,
    writer: Writer | None = None,
) -> Launch | None:
    writer = writer or Writer(full, starts[0], elements, locals=locals, tensors=starts[1:])
    expressions = tuple(writer.write(node) for node in nodes)
    if not _fits(writer.wholes, writer.vectors, expressions):
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
