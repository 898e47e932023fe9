"""Runs a convolution with its tail so that gradients can be computed: a differentiable step, then PyTorch's part.

    z --passes--> boundary --PyTorch, recorded by autograd--> results

The convolution stores its plain result z, or a function of it from which all gradients can be computed (`head_for`),
which is saved. Passes over it compute the tail, or its beginning if PyTorch must run the rest; the tensors at the end
of this fused part are its boundary. The gradients of the fused part are passes over it as well (`gradients.py`). This
module knows graphs and tensors, no kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_ops.casting import below_autocast
from ..torch_ops.checks import Convolution
from ..torch_ops.problems import Tail
from ..torch_ops.runner import RUNNER, Runner
from .algebra import pools_first
from .between import Between, Left
from .computing import Env, compute
from .expressions import OPERATORS, VALUE
from .gradients import backward, head_for
from .pointwise import dependent, is_view, meta, name_of, packet_of
from .running import Ends, captured_in, run_rounds, tail_of, with_strides_of
from .stages import heads, stages
from .tracing import SWITCHES_GRADIENTS, copied, is_random, writes

MOST_CUTS = 4  # attempts to find a fused part whose gradients run in passes


@dataclass
class Part:
    """Holds the fused part of a tail as a graph of its own, and what follows it in the graph of the tail."""

    graph: fx.GraphModule  # takes what the tail takes, and returns the boundary as a tuple
    boundary: tuple[fx.Node, ...]  # nodes of the tail's graph
    rest: tuple[fx.Node, ...]  # nodes of the tail's graph, in order


class Differentiable:
    """Holds what calls with gradients need: the fused part as passes over z, its gradients, and what follows it."""

    def __init__(self, graph: fx.GraphModule, needed: Sequence[bool], stores_z: bool = True) -> None:
        """Takes the graph of a tail, and which of the tensors passed to it need gradients.

        Unless the convolution `stores_z`, its kernel may compute the beginning of the tail, and z is stored nowhere.
        """
        self.graph = copied(graph)
        pools_first(self.graph.graph)
        captured = captured_in(graph).values()
        self.wanted = [each for each in {id(each): each for each in captured}.values() if each.requires_grad]
        self.needed = tuple(needed)
        self._stores_z = stores_z
        self._switches = bool(graph.meta.get(SWITCHES_GRADIENTS))
        self.possible = not self._switches and self._found()

    def _found(self) -> bool:
        """Finds the largest fused part whose gradients run in passes, and tells whether there is one."""
        left: set[str] = {node.name for node in self.graph.graph.nodes if is_random(node)}
        for _ in range(MOST_CUTS):
            part = _part(self.graph, left)
            if part is None:
                break
            head = "" if self._stores_z else head_for(part.graph, self.wanted, self.needed, heads(part.graph))
            plain = stages(part.graph, plain=True, head=head)
            if plain.rounds.left:
                left |= {node.name for node in plain.rounds.left}
                continue
            taken = plain.statistics.nodes if plain.statistics is not None else ()
            gradient = backward(
                plain.differentiable, self.wanted, self.needed, (*taken, *plain.rounds.reductions), head
            )
            if gradient is not None:
                self.part, self.plain, self.gradient = part, plain, gradient
                self._ends, self._ends_forward, self._ends_backward = map(
                    Ends, (self.graph, plain.graph, gradient.graph)
                )
                self._forward = Between(plain.graph, plain.rounds, [node for node, _ in gradient.saved])
                self._backward = Between(gradient.graph, gradient.rounds, given=[node for _, node in gradient.saved])
                return True
            last = _last_of_passes(part.graph)
            if last is None:
                break
            left.add(last)
        return False

    @property
    def texts(self) -> tuple[str, ...]:
        """What the passes forward and backward compute and what PyTorch runs behind them, for people."""
        if self._switches:
            return ("the tail runs in PyTorch: it switches gradients off or on",)
        if not self.possible:
            return ("the tail runs in PyTorch: no part of it has gradients that are passes",)
        left = dict.fromkeys(name_of(node) for node in self.part.rest if not is_view(node))
        epilogue = self.plain.epilogue
        return (
            *(() if epilogue == VALUE else (f"forward in the convolution's kernel, for gradients too: {epilogue}",)),
            *(f"forward in one pass over its result: {text}" for text in self.plain.rounds.passes),
            *(f"backward in one pass over its result: {text}" for text in self.gradient.rounds.passes),
            *([f"forward and backward in PyTorch: {', '.join(left)}"] if left else []),
        )

    @property
    def reads_stored(self) -> bool:
        """Tells whether the gradients read what the convolution has stored."""
        return self.gradient.value is not None

    @property
    def read(self) -> list[Tensor]:
        """The captured tensors that the gradients read."""
        return list(self._ends_backward.captured.values())

    def run(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        passed: Sequence[Tensor],
        runner: Runner = RUNNER,
    ) -> tuple[tuple[Tensor, ...], Tensor, list[Tensor]]:
        """Returns the boundary; z, or what was stored in its place; and the sums, means and variances.

        The gradients need the last, and what was stored if `reads_stored`.
        """
        s = self.plain
        env = self._ends_forward.given(passed)
        left = Left()
        with below_autocast(input):
            compute(s.constants, env)
            compute(s.early, env)
            tail = Tail(VALUE.cpp) if s.epilogue == VALUE else tail_of(s, env)
            if s.statistics is None:
                used = None if s.epilogue == VALUE else tail
                u = runner.forward(input, weight, bias, convolution, False, used)
            else:
                u, found = runner.forward_with_statistics(
                    input, weight, bias, s.statistics.groups, convolution, False, tail
                )
                left.add_moments(found, s.statistics)
            env[s.fed] = u
            run_rounds(s.rounds, self._forward, env, left, keep=True, runner=runner)
        saved = [env[node] for node, _ in self.gradient.saved]
        flat = [tensor for each in saved for tensor in (each if isinstance(each, tuple) else (each,))]
        return self._ends_forward.results(env), u, flat

    def gradients(
        self,
        grads: Sequence[Tensor],
        saved: Sequence[Tensor | None],
        passed: Sequence[Tensor],
        runner: Runner = RUNNER,
    ) -> list[Tensor | None]:
        """Returns the gradients of z, of the wanted captured tensors and of the passed tensors that need one.

        `grads` are those of the boundary's floating-point tensors. `saved` is what `run` returned behind the
        boundary, or None in the place of a z that no gradient reads.
        """
        g, (z, *reduced) = self.gradient, saved
        env: Env = {**self._ends_backward.captured, **dict(zip(g.passed, passed, strict=True))}
        left = iter(reduced)
        for _, node in g.saved:
            env[node] = (next(left), next(left)) if isinstance(node.meta["val"], (tuple, list)) else next(left)
        if g.value is not None:
            env[g.value] = z
        like = g.like if z is None else z
        for node, grad in zip(g.grads, grads, strict=True):
            wanted = node.meta["val"]
            grad = grad if grad.dtype is wanted.dtype else grad.to(wanted.dtype)
            grad = grad if grad.shape == wanted.shape else grad.reshape(wanted.shape)
            env[node] = with_strides_of(like, grad) if grad.shape == like.shape else grad
        with below_autocast(grads[0]):
            compute(g.constants, env)
            run_rounds(g.rounds, self._backward, env, Left(), keep=True, runner=runner)
        found: list[Tensor | None] = list(self._ends_backward.results(env))
        return found

    def unfused(self, z: Tensor, passed: Sequence[Tensor], captured: dict[int, Tensor]) -> tuple[Tensor, ...]:
        """Computes the boundary from z in PyTorch, with others in the place of captured tensors (by their ids)."""
        graph = self.part.graph
        ends = Ends(graph)
        env = ends.given(passed)
        env.update({node: captured.get(id(each), each) for node, each in ends.captured.items()})
        env[next(iter(graph.graph.nodes))] = z
        nodes = [node for node in graph.graph.nodes if node.op == "call_function" and not writes(node)]
        with below_autocast(z):
            compute(nodes, env)
        found: tuple[Tensor, ...] = ends.results(env)
        return found

    def finish(self, boundary: Sequence[Tensor], passed: Sequence[Tensor]) -> Any:
        """Computes the tail's results from the boundary in PyTorch; autograd records it."""
        env = self._ends.given(passed)
        env.update(zip(self.part.boundary, boundary, strict=True))
        if self.part.rest:
            with below_autocast(boundary[0]):
                for node in self.part.rest:
                    with torch.set_grad_enabled(not writes(node)):
                        compute((node,), env)
        return self._ends.results(env)


def _part(graph: fx.GraphModule, left: set[str]) -> Part | None:
    """Returns the part of a tail that no node named in `left` belongs to, or None if that is z alone."""
    nodes = list(graph.graph.nodes)
    z = nodes[0]
    moving = dependent(nodes, [z])
    late = dependent(nodes, [node for node in nodes if node.name in left])
    ends: dict[fx.Node, None] = {}
    rest: set[fx.Node] = {node for node in late if node.op == "call_function"}
    output = next(node for node in nodes if node.op == "output")
    waiting = [*rest, output]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each in rest or each in ends:
                continue
            if each in moving and isinstance(meta(each), Tensor) and not _is_mere_view(each):
                ends[each] = None
            elif each.op == "call_function":
                rest.add(each)
                waiting.append(each)
    boundary = tuple(node for node in nodes if node in ends)
    if boundary in ((), (z,)):
        return None
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.op != "output" and node not in late:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in boundary))
    part.eliminate_dead_code()
    rest -= {node for node in rest if writes(node) and node not in late}  # the fused part writes them
    return Part(fx.GraphModule(graph, part), boundary, tuple(node for node in nodes if node in rest))


def _is_mere_view(node: fx.Node) -> bool:
    return node.op == "call_function" and is_view(node) and meta(node).dtype is meta(node.all_input_nodes[0]).dtype


def _last_of_passes(graph: fx.GraphModule) -> str | None:
    """Returns the name of the last operator of z that is neither pointwise nor a view, or None."""
    nodes = list(graph.graph.nodes)
    moving = dependent(nodes, nodes[:1])
    pointwise = {*OPERATORS, operator.getitem}
    found = [node for node in nodes if node in moving and node.op == "call_function" and not is_view(node)]
    return next((node.name for node in reversed(found) if packet_of(node) not in pointwise), None)
