"""Cuts the graph of a tail into stages: what moves into the weight, what the convolution's kernel computes, the rest.

    z --affine map, linear operator--> a --epilogue--> u --rounds of sums and passes--> results

- A linear reduction or pool, with an affine map of every channel before it, makes another, smaller convolution of it
  (`algebra.py`).
- The epilogue is an expression of the sums, of vectors and of whole tensors that exist before the convolution. It is
  evaluated where the sums still are in registers.
- Means and variances of u over space or over norm groups come with the convolution (`Statistics`).
- What follows u is divided into passes (`rounds.py`).

a and u are bottlenecks: no later node needs anything that was computed before them. This module knows graphs and
shapes; it knows nothing of kernels or of the tensors of a call.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import fx

from ..planning.problem import Read
from ..planning.scalars import SCALARS
from ..torch_ops.problems import DTYPES, Tail
from .algebra import Layer, Moved, SpaceSum, find
from .axes import AxisPass, padded
from .combining import combine
from .expressions import Expression, vector
from .lowering import lower
from .pointwise import (
    FLOATS,
    Shape,
    Writer,
    aliases,
    dependent,
    is_pointwise,
    is_vector,
    is_view,
    meta,
    name_of,
    rows_of,
    shape_of,
)
from .rounds import MOST_LETTERS, MOST_WHOLE, Divided, Launch, divide
from .tracing import LOWERED_FROM, copied, is_random, without_variances, writes

aten = torch.ops.aten

MOST_VECTORS = 8  # vectors of an epilogue, each a register for every channel that a thread has in flight


@dataclass(frozen=True)
class Statistics:
    """Describes means and variances of u: over norm groups of channels of a batch item, or over channels of all."""

    groups: int
    over_batch: bool
    nodes: tuple[fx.Node, ...]  # the nodes that compute them, all for the same groups


@dataclass(frozen=True)
class Affine:
    """Holds an affine map of every channel as an expression with vectors; `VALUE` changes nothing."""

    expression: Expression
    vectors: tuple[fx.Node, ...]


@dataclass
class Stages:
    """Holds the stages of one tail for one shape and type."""

    graph: fx.GraphModule
    differentiable: fx.GraphModule  # the graph before reductions were lowered
    affine: Affine
    moved: Moved | None  # a linear operator behind the affine map that another convolution computes
    epilogue: Expression  # takes what these give
    vectors: tuple[Expression, ...]  # the vectors that it names by index, as expressions of those of `operands`
    operands: Launch  # the epilogue as it was traced, with the vectors and whole tensors that this one names by index
    early: tuple[fx.Node, ...]  # nodes that are computed from passed tensors before the convolution, in order
    fed: fx.Node  # u, which the convolution's kernel stores
    statistics: Statistics | None
    constants: tuple[fx.Node, ...]  # nodes that are computed from captured tensors alone, in order
    buffers: frozenset[fx.Node]  # captured tensors that the tail overwrites, on which no constant depends
    rounds: Divided
    # The first round if the convolution's kernel may compute it, of the channels of a position: one pass, of u alone.
    over_channels: AxisPass | None = None

    @cached_property
    def tail_alone(self) -> Tail:
        """The epilogue, if it names no vectors and no whole tensors."""
        return Tail(self.epilogue.cpp)

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """How the whole tensors of the epilogue lie in memory, if one of them lies otherwise than the result."""
        like, plain = meta(self.fed), Read(SCALARS[DTYPES[meta(self.fed).dtype]])
        found = []
        for node in self.operands.wholes:
            own = padded(shape_of(node))
            shared = [one == 1 < full for one, full in zip(own[:2], like.shape[:2], strict=True)]
            found.append(Read(SCALARS[DTYPES[_read_as(node, like.dtype)]], *shared))
        return tuple(found) if any(each != plain for each in found) else ()

    @property
    def in_pytorch(self) -> tuple[str, ...]:
        """The operators that PyTorch runs: on large operands before the convolution, and behind the fused part."""
        large = [
            node
            for node in self.early
            if not is_view(node) and any(_is_volume(each, self.graph) for each in (node, *node.all_input_nodes))
        ]
        return tuple(dict.fromkeys([*map(name_of, large), *self.rounds.left_names]))

    def over_channels_of(self, tail: Tail) -> Tail:
        """Returns the epilogue with the first round behind it, over channels."""
        one = self.over_channels
        assert one is not None
        return replace(tail, channels=one.program.cpp, per_position=None if one.each else meta(one.node).dtype)


def stages(
    graph: fx.GraphModule,
    exact_order: bool = False,
    plain: bool = False,
    layer: Layer | None = None,
    steady: Container[int] = (),
    head: str = "",
) -> Stages:
    """Returns the stages of a traced tail, whose first placeholder is z, [N, C, D, H, W].

    With `exact_order` no affine map moves into the weight; with `plain` the convolution stores z itself, or the node
    out of `heads` that `head` names. A linear
    reduction or pool of z may move into the convolution `layer`. `steady` are places of passed tensors that are
    treated as captured ones: what is computed from them alone is kept between calls. Reductions that no pass computes
    stay PyTorch's own operators.
    """
    whole: set[str] = set()  # names of nodes that are not lowered
    while True:
        found = _stages(copied(graph), exact_order, plain, whole, layer, steady, head)
        if found.moved is not None and any(_is_volume(node, found.graph) for node in found.rounds.left):
            layer = None  # PyTorch would spread the smaller result over a volume again
            continue
        split = {node.meta[LOWERED_FROM] for node in found.rounds.left if LOWERED_FROM in node.meta}
        if split <= whole:
            return found
        whole |= split


def _is_volume(node: fx.Node, graph: fx.GraphModule) -> bool:
    """Tells whether a node has as many numbers as the convolution's own result."""
    z, value = meta(next(iter(graph.graph.nodes))), meta(node)
    return isinstance(value, torch.Tensor) and value.numel() >= z.numel()


def _stages(
    graph: fx.GraphModule,
    exact_order: bool,
    plain: bool,
    whole: set[str],
    layer: Layer | None,
    steady: Container[int],
    head_name: str,
) -> Stages:
    nodes = list(graph.graph.nodes)
    z, *given_to = [node for node in nodes if node.op == "placeholder"]
    passed = [node for place, node in enumerate(given_to) if place not in steady]
    shape = shape_of(z)
    effects = [node for node in nodes if node.op == "call_function" and (writes(node) or is_random(node))]
    overwritten = {node.args[0].target for node in effects if writes(node) and node.args[0].op == "get_attr"}
    buffers = [node for node in nodes if node.op == "get_attr" and node.target in overwritten]
    moving = dependent(nodes, [z, *passed, *effects]) | dependent(nodes, buffers)
    captured = [node for node in nodes if node not in moving and node.op != "output"]
    affine = _Head(z, nodes, shape, set() if exact_order else set(captured))
    a, moved = z, None
    if layer is not None and not plain and not exact_order:
        a, moved = affine.moved(graph.graph, layer)
    start = a if moved is None else moved[0]
    if moved is not None:
        nodes, shape = list(graph.graph.nodes), shape_of(start)
    product = moved is not None and isinstance(moved[1], SpaceSum) and len(moved[1].dims) == 3
    given = [node for node in dependent(nodes, passed) if node not in dependent(nodes, [z, *effects])]
    head = _Head(start, nodes, shape, {*captured, *given} if moved is None else set(), wholes=True)
    if plain:
        u = next((node for node in nodes if node.name == head_name), start)
    else:
        u = start if product else head.last_of_kernel()
    found = None if product else _statistics(u, nodes, shape)
    operands = head.written(u)
    epilogue, vectors = operands.expressions[0], tuple(map(vector, range(len(operands.vectors))))
    if not (exact_order or plain) and all(
        node in captured for node, _ in operands.vectors
    ):  # otherwise every call would combine
        epilogue, vectors = combine(epilogue, meta(u).dtype.itemsize == 2)
    asked = _ancestors([*(node for node, _ in operands.vectors), *operands.wholes])
    early = [node for node in nodes if node in given and node in asked and node.op == "call_function"]
    unlowered = {*whole, *(node.name for node in (*captured, *early))}  # PyTorch computes the last two
    without_variances(graph.graph, found.nodes if found else (), unlowered)
    graph.recompile()
    differentiable = copied(graph)
    lower(graph.graph, unlowered)
    graph.recompile()
    nodes = list(graph.graph.nodes)
    captured, early = ([node for node in each if node in set(nodes)] for each in (captured, early))
    known = dict.fromkeys([*captured, *buffers, *passed, *(found.nodes if found else ())])
    writer = Writer(shape_of(z), z, affine.elements)
    folded = writer.write(a, shared=False)
    inside = (affine.ancestors(a) | head.ancestors(u)) - {u}
    if product:  # numbers per channel, which PyTorch computes with
        rest = [node for node in nodes if node.op == "call_function" and node not in {*inside, *known, u}]
        divided = Divided((), tuple(rest))
    else:
        strides = meta(z).stride()
        divided = divide(graph.graph, u, (), known, inside, strides[1] == 1 and strides[4] != 1)
    return Stages(
        graph,
        differentiable,
        Affine(folded, tuple(node for node, _ in writer.vectors)),
        None if moved is None else moved[1],
        epilogue,
        vectors,
        operands,
        tuple(early),
        u,
        found,
        tuple(node for node in captured if node.op == "call_function"),
        frozenset(buffers),
        divided,
        None if found or moved else _over_channels(u, divided, nodes),
    )


def heads(graph: fx.GraphModule) -> tuple[str, ...]:
    """Returns the nodes that the convolution may store for its gradients in the place of z, by name, the last first.

    They are bottlenecks that the kernel computes from z and from tensors that exist, without other operators.
    """
    nodes = list(graph.graph.nodes)
    z = nodes[0]
    exist = {node for node in nodes[1:] if node.op in ("placeholder", "get_attr")}
    for node in nodes:
        if node.op == "call_function" and is_view(node) and node.all_input_nodes[0] in exist:
            exist.add(node)
    head = _Head(z, nodes, shape_of(z), exist, wholes=True)
    return tuple(node.name for node in reversed(head.bottlenecks()) if node is not z and head.fits_kernel(node))


def _over_channels(u: fx.Node, divided: Divided, nodes: list[fx.Node]) -> AxisPass | None:
    """Returns the first round if it is one pass over channels that reads u alone, and nobody else reads u."""
    first = divided.rounds[0]
    if first.sums or len(first.passes) != 1 or not isinstance(one := first.passes[0], AxisPass):
        return None
    if one.dims != {1} or one.vectors or one.wholes or one.placed or one.along or one.summed:
        return None
    needed = {each for node in (*first.left, nodes[-1]) for each in node.all_input_nodes}
    needed |= {each.value for each in divided.rounds[1:]}
    if needed & aliases(u) or (one.each and meta(one.node).dtype is not meta(u).dtype):
        return None
    return one


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Returns nodes and what they are computed from."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


class _Head:
    """Collects the nodes that are pointwise functions of one node, with vectors out of `known` as operands.

    With `wholes` vectors may differ between batch items, and tensors that broadcast to the node's shape are operands
    too; without it, vectors have one number per channel.
    """

    def __init__(
        self, start: fx.Node, nodes: list[fx.Node], shape: Shape, known: set[fx.Node], wholes: bool = False
    ) -> None:
        self.start, self.shape = start, shape
        self.elements: dict[fx.Node, None] = {start: None}
        after = dependent(nodes, [start])

        def operand(node: fx.Node, target: Shape) -> bool:
            if node not in known or not isinstance(node.meta.get("val"), torch.Tensor):
                return False
            if is_vector(node, target, shape):
                return wholes or (target == shape and (meta(node).dim() < 5 or shape_of(node)[0] == 1))
            return wholes and target == shape and _is_readable(node, start)

        for node in nodes:
            inputs = [each for each in node.all_input_nodes if each in after]
            known_all = bool(inputs) and all(each in self.elements for each in inputs)
            if node is not start and known_all and is_pointwise(node, self.elements, shape, operand):
                self.elements[node] = None

    def ancestors(self, node: fx.Node) -> set[fx.Node]:
        """Returns the nodes that a node is computed from, from the start on, and the node itself."""
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if each not in found and each in self.elements:
                found.add(each)
                waiting.extend(each.all_input_nodes)
        return found

    def bottlenecks(self) -> list[fx.Node]:
        """Returns the nodes of the start's type through which alone the nodes before them are used, in order."""
        found = []
        for node in self.elements:
            inside = self.ancestors(node)
            users = {user for each in inside if each is not node for user in each.users}
            fits = shape_of(node) == self.shape and meta(node).dtype is meta(self.start).dtype
            if (fits or node is self.start) and users <= inside:
                found.append(node)
        return found

    def moved(self, graph: fx.Graph, layer: Layer) -> tuple[fx.Node, tuple[fx.Node, Moved] | None]:
        """Returns the last bottleneck that is an affine map and has a linear operator behind it that can be moved."""
        for node in reversed(self.bottlenecks()):
            if Writer(self.shape, self.start, self.elements).write(node, shared=False).degree not in (0, 1):
                continue
            found = find(graph, node, layer)
            if found is not None:
                return node, found
        return self.start, None

    def written(self, node: fx.Node) -> Launch:
        """Returns a node as an expression of the start and of its operands."""
        writer = Writer(self.shape, self.start, self.elements)
        expression = writer.write(node)
        return Launch((expression,), tuple(writer.vectors), tuple(writer.wholes))

    def last_of_kernel(self) -> fx.Node:
        """Returns the last bottleneck that has no more operands than an epilogue takes."""
        return next((node for node in reversed(self.bottlenecks()) if self.fits_kernel(node)), self.start)

    def fits_kernel(self, node: fx.Node) -> bool:
        """Tells whether a node has no more operands than an epilogue takes."""
        found = self.written(node)
        short = len(found.expressions[0].cpp) <= MOST_LETTERS
        return short and len(found.wholes) <= MOST_WHOLE and len(found.vectors) <= MOST_VECTORS


def _read_as(node: fx.Node, dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which an epilogue reads a tensor: masks are read as numbers of the result's type."""
    found: torch.dtype = meta(node).dtype
    return dtype if found is torch.bool else found


def _is_readable(node: fx.Node, start: fx.Node) -> bool:
    """Tells whether an epilogue can read a tensor: one number for every position, for all channels or all items."""
    own, full = padded(shape_of(node)), shape_of(start)
    kinds = {_read_as(node, meta(start).dtype), meta(start).dtype}
    if not kinds <= set(FLOATS) or (torch.float64 in kinds and len(kinds) > 1) or len(own) != 5:
        return False
    return own[2:] == full[2:] and all(one in (1, size) for one, size in zip(own[:2], full[:2], strict=True))


# ---- statistics


def _statistics(u: fx.Node, nodes: list[fx.Node], shape: Shape) -> Statistics | None:
    """Returns the means and variances that the tail takes of u, if all have the same groups."""
    same = {u}  # u in other views and types
    found: list[tuple[fx.Node, tuple[int, bool]]] = []
    for node in nodes:
        if node.op != "call_function" or not node.all_input_nodes or node.all_input_nodes[0] not in same:
            continue
        if is_view(node):
            same.add(node)
        elif node.target is aten.var_mean.correction and node.kwargs.get("correction") == 0:
            kind = _groups(shape_of(node.args[0]), node.args[1], shape)  # type: ignore[arg-type]
            if kind is None:
                return None
            found.append((node, kind))
    if not found or len({kind for _, kind in found}) != 1:
        return None
    groups, over_batch = found[0][1]
    return Statistics(groups, over_batch, tuple(node for node, _ in found))


def _groups(viewed: Shape, dims: list[int], shape: Shape) -> tuple[int, bool] | None:
    """Returns the norm groups of a reduction of a view over `dims`, and whether the batch is reduced too."""
    rows = rows_of(viewed, shape)
    reduced = {dim % len(viewed) for dim in dims}
    if rows is None or not set(range(rows, len(viewed))) <= reduced:
        return None
    batch, channels = shape[:2]
    if viewed == shape and reduced == {0, 2, 3, 4}:
        return channels, batch > 1
    if viewed == (1, batch * channels, *shape[2:]) and 1 not in reduced:
        return channels, False
    kept = set(range(rows)) - reduced
    sizes = [viewed[dim] for dim in sorted(kept)]
    if sizes and kept == set(range(len(kept))) and sizes[0] == batch:
        return prod(sizes) // batch, False  # the leading dimensions are kept: batch items and their norm groups
    return None
