"""Runs a convolution with its tail so that gradients can be computed: a differentiable step, then PyTorch's part.

    z --passes--> boundary --PyTorch, recorded by autograd--> results

The convolution stores its plain result z, which is saved. Passes over z compute the tail, or its beginning if PyTorch
must run the rest; the tensors at the end of this fused part are its boundary. The gradients of the fused part are
passes over z as well (`gradients.py`). This module knows graphs and tensors, no kernels.
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
from .gradients import backward
from .pointwise import dependent, is_view, meta, name_of, packet_of
from .running import captured_in, outputs, run_rounds, with_strides_of
from .stages import stages
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

    def __init__(self, graph: fx.GraphModule, needed: Sequence[bool]) -> None:
        """Takes the graph of a tail, and which of the tensors passed to it need gradients."""
        self.graph = copied(graph)
        pools_first(self.graph.graph)
        captured = captured_in(graph).values()
        self.wanted = [each for each in {id(each): each for each in captured}.values() if each.requires_grad]
        self.needed = tuple(needed)
        self._switches = bool(graph.meta.get(SWITCHES_GRADIENTS))
        self.possible = not self._switches and self._found()

    def _found(self) -> bool:
        """Finds the largest fused part whose gradients run in passes, and tells whether there is one."""
        left: set[str] = {node.name for node in self.graph.graph.nodes if is_random(node)}
        for _ in range(MOST_CUTS):
            part = _part(self.graph, left)
            if part is None:
                break
            plain = stages(part.graph, plain=True)
            if plain.rounds.left:
                left |= {node.name for node in plain.rounds.left}
                continue
            taken = plain.statistics.nodes if plain.statistics is not None else ()
            gradient = backward(plain.differentiable, self.wanted, self.needed, (*taken, *plain.rounds.reductions))
            if gradient is not None:
                self.part, self.plain, self.gradient = part, plain, gradient
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
        return (
            *(f"forward in one pass over the plain result: {text}" for text in self.plain.rounds.passes),
            *(f"backward in one pass over the plain result: {text}" for text in self.gradient.rounds.passes),
            *([f"forward and backward in PyTorch: {', '.join(left)}"] if left else []),
        )

    @property
    def read(self) -> list[Tensor]:
        """The captured tensors that the gradients read."""
        return list(captured_in(self.gradient.graph).values())

    def run(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        passed: Sequence[Tensor],
        runner: Runner = RUNNER,
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Returns the boundary; and what the gradients need: z, and the sums, means and variances that were taken."""
        s = self.plain
        env: Env = {**captured_in(s.graph), **_given(s.graph, passed)}
        left = Left()
        with below_autocast(input):
            if s.statistics is None:
                z = runner.forward(input, weight, bias, convolution, False, None)
            else:
                z, found = runner.forward_with_statistics(
                    input, weight, bias, s.statistics.groups, convolution, False, Tail(VALUE.cpp)
                )
                left.add_moments(found, s.statistics)
            env[s.fed] = z
            compute(s.constants, env)
            run_rounds(s.rounds, self._forward, env, left, keep=True, runner=runner)
        saved = [env[node] for node, _ in self.gradient.saved]
        flat = [tensor for each in saved for tensor in (each if isinstance(each, tuple) else (each,))]
        return outputs(s.graph, env), [z, *flat]

    def gradients(
        self,
        grads: Sequence[Tensor],
        saved: Sequence[Tensor],
        passed: Sequence[Tensor],
        runner: Runner = RUNNER,
    ) -> list[Tensor | None]:
        """Returns the gradients of z, of the wanted captured tensors and of the passed tensors that need one.

        `grads` are those of the boundary's floating-point tensors; `saved` is what `run` returned.
        """
        g, (z, *reduced) = self.gradient, saved
        env: Env = {**captured_in(g.graph), **dict(zip(g.passed, passed, strict=True))}
        left = iter(reduced)
        for _, node in g.saved:
            env[node] = (next(left), next(left)) if isinstance(node.meta["val"], (tuple, list)) else next(left)
        env[g.value] = z
        for node, grad in zip(g.grads, grads, strict=True):
            grad = grad.to(node.meta["val"].dtype)
            env[node] = with_strides_of(z, grad) if grad.shape == z.shape else grad
        with below_autocast(z):
            compute(g.constants, env)
            run_rounds(g.rounds, self._backward, env, Left(), keep=True, runner=runner)
        found: list[Tensor | None] = list(outputs(g.graph, env))
        return found

    def unfused(self, z: Tensor, passed: Sequence[Tensor], captured: dict[int, Tensor]) -> tuple[Tensor, ...]:
        """Computes the boundary from z in PyTorch, with others in the place of captured tensors (by their ids)."""
        graph = self.part.graph
        env: Env = {node: captured.get(id(each), each) for node, each in captured_in(graph).items()}
        env.update(_given(graph, passed))
        env[next(iter(graph.graph.nodes))] = z
        nodes = [node for node in graph.graph.nodes if node.op == "call_function" and not writes(node)]
        with below_autocast(z):
            compute(nodes, env)
        found: tuple[Tensor, ...] = outputs(graph, env)
        return found

    def finish(self, boundary: Sequence[Tensor], passed: Sequence[Tensor]) -> Any:
        """Computes the tail's results from the boundary in PyTorch; autograd records it."""
        env: Env = dict(zip(self.part.boundary, boundary, strict=True))
        if self.part.rest:
            env.update({**captured_in(self.graph), **_given(self.graph, passed)})
            with below_autocast(boundary[0]):
                for node in self.part.rest:
                    with torch.set_grad_enabled(not writes(node)):
                        compute((node,), env)
        else:
            env.update(_given(self.graph, passed))
        return outputs(self.graph, env)


def _given(graph: fx.GraphModule, passed: Sequence[Tensor]) -> Env:
    """Returns the passed tensors by their placeholders."""
    _, *placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return dict(zip([node for node in placeholders if isinstance(meta(node), Tensor)], passed, strict=True))


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
