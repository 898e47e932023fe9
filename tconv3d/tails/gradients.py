"""Differentiates a tail: gradients of the convolution's result and of captured tensors, in a few passes.

PyTorch differentiates the traced graph; the graph of the gradients is divided into passes like the tail itself
(`rounds.py`). What cannot be divided into passes is left to PyTorch as a whole (`backward` returns None).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .expressions import OPERATORS
from .lowering import lower
from .pointwise import FLOATS, dependent, inserted, is_view, meta, packet_of, rows_of, shape_of
from .rounds import Divided, divide
from .tracing import copied, join_means, nothing_written, without_logging, writes

aten = torch.ops.aten

_MAY_BE_LEFT = (aten.sum, aten.mean, aten.view, aten.squeeze, aten.unsqueeze, aten._to_copy)  # sums for parameters
# Operators by which PyTorch's gradients overwrite a tensor that they have just made (a mask of a clamp, the gradient
# of a norm), with those that return a new tensor.
_OVERWRITING = {
    aten.logical_and_.default: aten.logical_and.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
}
# Operators whose derivatives PyTorch computes from their results.
_SAVE_RESULT = (
    aten.relu, aten.sigmoid, aten.tanh, aten.exp, aten.expm1, aten.sqrt, aten.rsqrt, aten.reciprocal,
)  # fmt: skip
_REPLACED = (aten.sigmoid_backward, aten.tanh_backward, aten.threshold_backward)


def _table() -> dict[Any, Any]:
    return {**get_decompositions(_REPLACED)}


@dataclass
class Backward:
    """Holds the passes that compute the gradients of a tail for one kind of call."""

    graph: fx.GraphModule  # outputs the gradients of z, of the wanted captured tensors and of the wanted passed ones
    like: Tensor  # z without its data
    value: fx.Node | None  # z, or what the convolution has stored in its place; None if no gradient reads it
    passed: tuple[fx.Node, ...]  # tensors that were passed to the tail
    grads: tuple[fx.Node, ...]  # the gradients of the tail's results
    saved: tuple[tuple[fx.Node, fx.Node], ...]  # reductions that the forward pass has computed: there, and here
    constants: tuple[fx.Node, ...]  # nodes that are computed from captured tensors alone, in order
    rounds: Divided

    @property
    def complete(self) -> bool:
        """Tells whether gradients flow to all tensors that want one, which they do not if the tail detaches them."""
        return None not in _results(self.graph)


def head_for(forward: fx.GraphModule, wanted: Sequence[Tensor], needed: Sequence[bool], heads: Sequence[str]) -> str:
    """Returns the first of `heads` from which all gradients can be computed without z, or "" if there is none.

    A head that the tail returns belongs to the caller, who may write to it. It is only taken if PyTorch's own
    derivative would save it, or if no gradient reads it.
    """
    found = _differentiated(forward, wanted, needed, heads) if heads else None
    if found is None:
        return ""
    graph, again = found
    returned = {node.name for node in _results(forward)}
    nodes = {node.name: node for node in forward.graph.nodes}
    z = next(iter(graph.graph.nodes))
    for name in heads:
        node = again[name]
        _compare_head(graph.graph, node)
        behind = _without(graph, node)
        if z in behind:
            continue
        if name not in returned or packet_of(nodes[name]) in _SAVE_RESULT or node not in behind:
            return name
    return ""


def _compare_head(graph: fx.Graph, head: fx.Node) -> None:
    """Asks for the sign of a LeakyReLU's result in the place of its operand's, which is the same, in place."""
    result = head
    while result.op == "call_function" and is_view(result):  # a cast to 16 bits, for example
        (result,) = result.all_input_nodes
    if result.target is not aten.where.self:
        return
    condition, x, scaled = result.args
    factor = scaled.args[1] if isinstance(scaled, fx.Node) and scaled.target is aten.mul.Tensor else None
    positive = isinstance(factor, float) and factor > 0 and scaled.args[0] is x  # type: ignore[union-attr]
    if not (positive and isinstance(condition, fx.Node) and condition.target is aten.gt.Scalar):
        return
    if condition.args == (x, 0):
        with graph.inserting_after(head):
            again = inserted(graph, aten.gt.Scalar, (head, 0))
        condition.replace_all_uses_with(again, delete_user_cb=lambda user: user is not result)


def _without(graph: fx.GraphModule, head: fx.Node) -> set[fx.Node]:
    """Returns the nodes that the gradients are computed from, as far as `head`."""
    found: set[fx.Node] = set()
    waiting = [each for each in _results(graph) if isinstance(each, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(() if node is head else node.all_input_nodes)
    return found


def backward(
    forward: fx.GraphModule,
    wanted: Sequence[Tensor],
    needed: Sequence[bool],
    reduced: Sequence[fx.Node],
    head: str = "",
) -> Backward | None:
    """Returns the passes for gradients of z, of `wanted` captured tensors and of `needed` passed ones, or None.

    `forward` is the graph of a tail that returns a tuple of tensors, before its reductions are lowered. `reduced` are
    the sums, means and variances over space that the forward pass computes, in the lowered graph; those that have
    their counterpart in `forward` need not be computed again. `head` is the node of `forward` that the convolution
    stores in the place of z, if it does.
    """
    found = _differentiated(forward, wanted, needed, [node.name for node in reduced] + [head] * bool(head))
    if found is None:
        return None
    graph, again = found
    if head:
        node = again.pop(head)
        _compare_head(graph.graph, node)
        node.replace_all_uses_with(next(iter(graph.graph.nodes)))
        graph.graph.eliminate_dead_code()
    present = set(graph.graph.nodes)
    saved = tuple((node, again[node.name]) for node in reduced if again.get(node.name) in present)
    join_means(graph.graph, (aten.detach.default, aten.alias.default))
    _expand_last(graph.graph)
    lower(graph.graph)
    _clean(graph)
    nodes = list(graph.graph.nodes)
    z, *given = [node for node in nodes if node.op == "placeholder"]
    passed, grads = tuple(given[: len(needed)]), tuple(given[len(needed) :])
    # A gradient takes the place of z if nobody reads z.
    value = z if z.users else next((each for each in grads if _alike(each, z)), z)
    saved = tuple(pair for pair in saved if pair[1] in nodes)
    moving = dependent(nodes, [z, *given])
    captured = [node for node in nodes if node not in moving and node.op != "output"]
    alike = [each for each in grads if each is not value and _alike(each, value)]
    alike += [each for each in passed if _alike(each, value) and _used_alone(each, nodes, [value, *grads])]
    small = [each for each in given if each not in (value, *alike)]
    known = dict.fromkeys([*captured, *(node for _, node in saved), *small])
    strides = meta(value).stride()
    last = strides[1] == 1 and strides[4] != 1
    divided = divide(graph.graph, value, tuple(alike), known, set(), last)
    if any(packet_of(node) not in _MAY_BE_LEFT for node in divided.left):
        return None
    stored = {*(node for _, node in saved), *(node for each in divided.rounds for node in each.computed)}
    if any(_is_rounded_extreme(node, value) for node in stored):
        return None
    constants = tuple(node for node in captured if node.op == "call_function")
    return Backward(graph, meta(z), value if value is z else None, passed, grads, saved, constants, divided)


def _alike(node: fx.Node, value: fx.Node) -> bool:
    return shape_of(node) == shape_of(value) and meta(node).dtype is meta(value).dtype


def _used_alone(node: fx.Node, nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> bool:
    """Tells whether something is computed from a passed tensor without z and the gradients."""
    mixed = dependent(nodes, others)
    return any(each not in mixed and not is_view(each) for each in dependent(nodes, [node]) - {node})


def _differentiated(
    forward: fx.GraphModule, wanted: Sequence[Tensor], needed: Sequence[bool], reduced: Sequence[str]
) -> tuple[fx.GraphModule, dict[str, fx.Node]] | None:
    """Returns the graph of the gradients for (z, passed tensors, gradients of the results), or None.

    With it come the nodes of the graph that compute what the nodes of `forward` with the names `reduced` compute.
    PyTorch cannot trace the gradients of every tail.
    """
    forward = _without_writes(forward)
    placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    places = [place for place, node in enumerate(placeholders) if isinstance(meta(node), Tensor)]
    results = [node for node in _results(forward) if meta(node).dtype in FLOATS]
    names = [node.name for node in forward.graph.nodes if node.name in set(reduced)]

    def gradients(*given: Tensor) -> tuple[list[Tensor | None], list[Any]]:
        with torch.enable_grad(), mode:
            tensors, grads = given[: len(places)], given[len(places) :]
            leaves = [
                each.detach().requires_grad_() if need else each
                for each, need in zip(tensors, (True, *needed), strict=True)
            ]
            values: list[Any] = [None] * len(placeholders)
            for place, leaf in zip(places, leaves, strict=True):
                values[place] = leaf
            env = _evaluated(forward, values)
            asked = [leaf for leaf, need in zip(leaves[1:], needed, strict=True) if need]
            outputs = [env[node.name] for node in results]
            pairs = zip(grads, outputs, strict=True)
            wide = [_like(grad, output).to(output.dtype) for grad, output in pairs]
            found = torch.autograd.grad(outputs, [leaves[0], *wanted, *asked], wide, allow_unused=True)
            return list(found), [env[name] for name in names]

    z = placeholders[0]
    likes = [(meta(placeholders[place]), meta(placeholders[place]).dtype) for place in places]
    likes += [(meta(z if _is_view_of(node, z) else node), _type_of_gradient(node, z)) for node in results]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            examples = [
                torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
                for like, dtype in likes
            ]
        with without_logging(), nothing_written() as mode:
            graph = make_fx(
                gradients,
                decomposition_table=_table(),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*examples)
    except RuntimeError:  # for example an operator without a derivative
        return None
    output = _output(graph)
    results_of: Any = output.args[0]
    found, values = results_of
    output.args = (found,)
    again = {
        name: value if isinstance(value, fx.Node) else value[0].all_input_nodes[0]  # means and variances are a pair
        for name, value in zip(names, values, strict=True)
    }
    return graph, again


def _like(grad: Tensor, output: Tensor) -> Tensor:
    return grad if grad.shape == output.shape else grad.reshape(output.shape)


def _type_of_gradient(result: fx.Node, z: fx.Node) -> torch.dtype:
    """Returns the type in which passes read the gradient of a result.

    Passes over z read whole tensors of z's type. The gradient of z is rounded to bfloat16 in any case, which has the
    range of float32, so the gradient of a float32 result may be rounded before; to float16 it could overflow.
    """
    narrow = meta(z).dtype is torch.bfloat16 and meta(result).dtype is torch.float32
    return torch.bfloat16 if narrow and _is_view_of(result, z) else meta(result).dtype


def _is_view_of(result: fx.Node, z: fx.Node) -> bool:
    """Tells whether a result has a number for every element of z, in the same order: passes read its gradient.

    Norms of single batch items return their result in a shape in which batch and channels are one dimension.
    """
    return rows_of(shape_of(result), shape_of(z)) is not None


def _evaluated(graph: fx.GraphModule, values: Sequence[Any]) -> dict[str, Any]:
    """Returns what the nodes of a graph compute, by their names."""
    env: dict[str, Any] = {}
    left = iter(values)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            env[node.name] = next(left)
        elif node.op == "get_attr":
            env[node.name] = getattr(graph, node.target)
        elif node.op == "call_function":
            args, options = fx.node.map_arg((node.args, node.kwargs), lambda each: env[each.name])
            env[node.name] = node.target(*args, **options)
    return env


def _output(graph: fx.GraphModule) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.op == "output")


def _results(graph: fx.GraphModule) -> tuple[fx.Node, ...]:
    results: Any = _output(graph).args[0]
    return tuple(results)


def _without_writes(graph: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy without writes to captured tensors, which belong to the forward pass."""
    graph = copied(graph)
    for node in reversed(list(graph.graph.nodes)):
        if node.op == "call_function" and writes(node) and not node.users:
            graph.graph.erase_node(node)
    return graph


def _is_rounded_extreme(node: fx.Node, value: fx.Node) -> bool:
    """Tells whether a node is an extreme in 16 bits of numbers that passes compute in float32.

    The gradient of an extreme compares it with these numbers, none of which need be equal to a rounded one.
    """
    if packet_of(node) not in (aten.amax, aten.amin) or meta(node).dtype not in (torch.float16, torch.bfloat16):
        return False
    (source,) = node.all_input_nodes
    while source is not value and is_view(source):
        (source,) = source.all_input_nodes
    return source is not value


def _expand_last(graph: fx.Graph) -> None:
    """Moves functions of one expanded tensor before the expansion, in place: a mean's gradient is one of a number."""
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if packet_of(node) not in OPERATORS or len(inputs) != 1 or packet_of(inputs[0]) is not aten.expand:
            continue
        if any(packet_of(user) in (aten.view, aten._unsafe_view) for user in node.users):
            continue  # a view asks for the strides of a tensor that is not expanded
        source, *sizes = inputs[0].args
        with graph.inserting_before(node):
            args = tuple(source if each is inputs[0] else each for each in node.args)
            result = inserted(graph, aten.expand.default, (inserted(graph, node.target, args, node.kwargs), *sizes))
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _clean(graph: fx.GraphModule) -> None:
    """Removes what no gradient needs, and operators that overwrite a tensor of the graph."""
    for node in graph.graph.nodes:
        if node.target in _OVERWRITING:
            node.target = _OVERWRITING[node.target]
    graph.graph.eliminate_dead_code()
    graph.recompile()
