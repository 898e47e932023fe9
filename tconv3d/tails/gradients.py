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

from .lowering import lower
from .pointwise import FLOATS, dependent, is_view, meta, packet_of, shape_of
from .rounds import Divided, divide
from .tracing import nothing_written, writes

aten = torch.ops.aten

_MAY_BE_LEFT = (aten.sum, aten.mean, aten.view, aten.squeeze, aten.unsqueeze, aten._to_copy)  # sums for parameters
# Operators by which PyTorch's gradients overwrite a tensor that they have just made (a mask of a clamp, the gradient
# of a norm), with those that return a new tensor.
_OVERWRITING = {
    aten.logical_and_.default: aten.logical_and.default,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
}
_REPLACED = (aten.sigmoid_backward, aten.tanh_backward, aten.threshold_backward)


def _table() -> dict[Any, Any]:
    return {**get_decompositions(_REPLACED)}


@dataclass
class Backward:
    """Holds the passes that compute the gradients of a tail for one kind of call."""

    graph: fx.GraphModule  # outputs the gradients of z and of the wanted captured tensors
    value: fx.Node  # z
    grad: fx.Node  # the gradient of the tail's result
    saved: tuple[fx.Node, ...]  # reductions that the forward pass has computed, in the order of its own
    constants: tuple[fx.Node, ...]  # nodes that are computed from captured tensors alone, in order
    rounds: Divided


def backward(
    forward: fx.GraphModule, lowered: fx.Graph, wanted: Sequence[Tensor], reduced: Sequence[fx.Node]
) -> Backward | None:
    """Returns the passes for the gradients of z and of the `wanted` captured tensors, or None if there are none.

    `forward` is the graph of a tail of z alone that returns one floating-point tensor, and `lowered` the graph in
    which its reductions are lowered. `reduced` are the sums, means and variances over space of `lowered`, which need
    not be computed again.
    """
    result = next(node for node in forward.graph.nodes if node.op == "output").args[0]
    z, *passed = [node for node in forward.graph.nodes if node.op == "placeholder"]
    if passed or not isinstance(result, fx.Node) or meta(result).dtype not in FLOATS:
        return None
    graph = _differentiated(forward, meta(z), meta(result), wanted)
    if graph is None:
        return None
    lower(graph.graph)
    # The graph begins with the operators of the tail, in their order.
    kinds = {node.target for node in reduced}
    order = [node for node in lowered.nodes if node.target in kinds]
    again = dict(zip(order, [node for node in graph.graph.nodes if node.target in kinds], strict=False))
    if any(node not in again for node in reduced):
        return None
    taken = [again[node] for node in reduced]
    if any(str(a.meta["val"]) != str(b.meta["val"]) for a, b in zip(taken, reduced, strict=True)):
        return None
    _clean(graph)
    nodes = list(graph.graph.nodes)
    value, grad = [node for node in nodes if node.op == "placeholder"]
    captured = [node for node in nodes if node not in dependent(nodes, [value, grad]) and node.op != "output"]
    known = dict.fromkeys([*captured, *(node for node in taken if node in nodes)])
    alike = shape_of(grad) == shape_of(value) and meta(grad).dtype is meta(value).dtype
    strides = meta(z).stride()
    last = strides[1] == 1 and strides[4] != 1
    divided = divide(
        graph.graph, value, (grad,) if alike else (), known if alike else {**known, grad: None}, set(), last
    )
    if any(packet_of(node) not in _MAY_BE_LEFT for node in divided.left):
        return None
    stored = {*taken, *(node for each in divided.rounds for node in each.computed)}
    if any(_is_rounded_extreme(node, value) for node in stored):
        return None
    constants = tuple(node for node in captured if node.op == "call_function")
    return Backward(graph, value, grad, tuple(taken), constants, divided)


def _differentiated(forward: fx.GraphModule, z: Any, result: Any, wanted: Sequence[Tensor]) -> fx.GraphModule | None:
    """Returns the graph of the gradients for (z, gradient of the result), or None if PyTorch cannot trace it."""

    def gradients(z: Tensor, grad: Tensor) -> list[Tensor | None]:
        with torch.enable_grad(), mode:
            leaf = z.detach().requires_grad_()
            return list(torch.autograd.grad(forward(leaf), [leaf, *wanted], grad, allow_unused=True))

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            examples = [
                torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
                for like in (z, result)
            ]
        with nothing_written() as mode:
            graph = make_fx(
                gradients,
                decomposition_table=_table(),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*examples)
    except RuntimeError:  # for example an operator without a derivative
        return None
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


def _clean(graph: fx.GraphModule) -> None:
    """Removes what no gradient needs; writes to captured tensors are the forward pass's."""
    for node in reversed(list(graph.graph.nodes)):
        if node.target in _OVERWRITING:
            node.target = _OVERWRITING[node.target]
        elif node.op == "call_function" and writes(node) and node.args[0].op == "get_attr" and not node.users:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
