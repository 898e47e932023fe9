"""Cuts the graph of a tail into stages: what moves into the weight, what the convolution's kernel computes, the rest.

    z --affine map--> a --epilogue--> u --rounds of sums and passes--> results

- An affine map of every channel (inference BatchNorm, a scale) moves into weight and bias.
- The epilogue is an expression of the sums alone, and is evaluated where they still are in registers.
- Means and variances of u over space or over norm groups come with the convolution (`Statistics`).
- What follows u is divided into passes (`rounds.py`).

a and u are bottlenecks: no later node needs anything that was computed before them. This module knows graphs and
shapes; it knows nothing of kernels or of the tensors of a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from .expressions import Expression
from .pointwise import Shape, Writer, dependent, is_pointwise, is_vector, is_view, meta, rows_of, shape_of
from .rounds import Rounds, rounds
from .tracing import copied, without_variances, writes

aten = torch.ops.aten


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
    affine: Affine
    epilogue: Expression  # takes what the affine map gives
    fed: fx.Node  # u, which the convolution's kernel stores
    statistics: Statistics | None
    constants: tuple[fx.Node, ...]  # nodes that are computed from captured tensors alone, in order
    rounds: Rounds


def stages(graph: fx.GraphModule, exact_order: bool = False, plain: bool = False) -> Stages | None:
    """Returns the stages of a traced tail, whose first placeholder is z, [N, C, D, H, W]; None if it has no fit.

    With `exact_order` no affine map moves into the weight; with `plain` the convolution stores z itself.
    """
    graph = copied(graph)
    nodes = list(graph.graph.nodes)
    z, *passed = [node for node in nodes if node.op == "placeholder"]
    shape = shape_of(z)
    effects = [node for node in nodes if node.op == "call_function" and writes(node)]
    moving = dependent(nodes, [z, *passed, *effects])
    captured = [node for node in nodes if node not in moving and node.op != "output"]
    affine = _Head(z, nodes, shape, set() if exact_order else set(captured))
    a = z if plain else affine.last_affine()
    head = _Head(a, nodes, shape, set())
    u = z if plain else head.bottlenecks()[-1]
    found = _statistics(u, nodes, shape)
    without_variances(graph.graph, found.nodes if found else ())
    graph.recompile()
    nodes = list(graph.graph.nodes)
    known = dict.fromkeys([*captured, *passed, *(found.nodes if found else ())])
    writer = Writer(shape, z, affine.elements)
    folded = writer.write(a, shared=False)
    inside = (affine.ancestors(a) | head.ancestors(u)) - {u}
    divided = rounds(graph.graph, u, (), known, inside)
    if divided is None:
        return None
    return Stages(
        graph,
        Affine(folded, tuple(node for node, _ in writer.vectors)),
        Writer(shape, a, head.elements).write(u),
        u,
        found,
        tuple(node for node in captured if node.op == "call_function"),
        divided,
    )


class _Head:
    """Collects the nodes that are pointwise functions of one node, with vectors out of `known` as operands."""

    def __init__(self, start: fx.Node, nodes: list[fx.Node], shape: Shape, known: set[fx.Node]) -> None:
        self.start, self.shape = start, shape
        self.elements: dict[fx.Node, None] = {start: None}
        after = dependent(nodes, [start])

        def operand(node: fx.Node, target: Shape) -> bool:
            fits = node in known and isinstance(meta(node), torch.Tensor) and is_vector(node, target, shape)
            return fits and target == shape and (meta(node).dim() < 5 or shape_of(node)[0] == 1)

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

    def last_affine(self) -> fx.Node:
        """Returns the last bottleneck that is an affine map of the start and uses a vector."""
        for node in reversed(self.bottlenecks()):
            writer = Writer(self.shape, self.start, self.elements)
            if writer.write(node, shared=False).degree in (0, 1) and writer.vectors:
                return node
        return self.start


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
