"""Runs a convolution with what follows it: the stages of a tail on this library's kernels, the rest in PyTorch.

Without gradients the convolution's kernel computes as much of the tail as it can (`Prepared.run`). With gradients it
stores its plain result z, which is saved, and passes over z compute the tail and its gradients (`Differentiable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_ops import executor, tail_executor
from ..torch_ops.checks import Convolution
from ..torch_ops.pytorch_ops import statistics_dtype
from .expressions import VALUE
from .gradients import backward
from .pointwise import rows_of
from .rounds import Launch, Reduction, Rounds
from .stages import Stages, Statistics, stages

Env = dict[fx.Node, Any]


@dataclass
class Prepared:
    """Holds the stages of a tail for one kind of call, and what was computed from captured tensors alone."""

    stages: Stages
    _seen: tuple[Any, ...] = ()  # weight, bias and captured tensors with their versions, when `_constant` was made
    _constant: Env = field(default_factory=dict)
    _folded: tuple[Tensor, Tensor | None] | None = None

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, extra: Sequence[Any] = ()
    ) -> Any:
        """Returns what the tail gives for the convolution's result."""
        s = self.stages
        env = self._start(weight, bias, convolution, extra)
        if self._folded is not None:
            weight, bias = self._folded
        if s.statistics is None:
            tail = "" if s.epilogue == VALUE else s.epilogue.cpp
            fed = executor.forward(input, weight, bias, convolution, keep=True, tail=tail)
        else:
            groups = s.statistics.groups
            fed, found = executor.forward_with_statistics(
                input, weight, bias, groups, 0.0, convolution, keep=True, tail=s.epilogue.cpp
            )
            env.update(means_and_variances(found, s.statistics))
        env[s.fed] = fed
        run_rounds(s.graph, s.rounds, s.fed, env)
        return outputs(s.graph, env)

    @cached_property
    def differentiable(self) -> Differentiable:
        """What calls with gradients run."""
        return Differentiable(self.stages.graph)

    def _start(self, weight: Tensor, bias: Tensor | None, convolution: Convolution, extra: Sequence[Any]) -> Env:
        """Returns the captured and passed tensors, and what is computed from captured tensors alone."""
        s, nodes = self.stages, self.stages.graph.graph.nodes
        captured = {node: getattr(s.graph, node.target) for node in nodes if node.op == "get_attr"}
        seen = _versions([weight, bias, *captured.values()])
        if seen is None or seen != self._seen:
            env: Env = dict(captured)
            _compute(s.constants, env)
            self._folded = None
            if s.affine.expression != VALUE:
                vectors = [env[node] for node in s.affine.vectors]
                self._folded = fold(weight, bias, convolution, s.affine.expression, vectors)
            self._seen, self._constant = seen or (), env
        env = dict(self._constant)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        env.update(zip(placeholders[1:], extra, strict=True))
        return env


class Differentiable:
    """Holds what a call with gradients needs: the tail as passes over z, and its gradients as passes over z."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        captured = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
        self.wanted = [each for each in {id(each): each for each in captured}.values() if each.requires_grad]
        plain = stages(graph, plain=True)
        gradient = None
        if plain is not None and not plain.rounds.left:
            taken = plain.statistics.nodes if plain.statistics is not None else ()
            self.reduced = (*taken, *plain.rounds.reductions)
            gradient = backward(plain.graph, self.wanted, self.reduced)
        self.possible = gradient is not None
        if plain is not None and gradient is not None:
            self.plain, self.gradient = plain, gradient

    def run(self, input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution) -> tuple[Tensor, ...]:
        """Returns the tail's result, z, and the sums, means and variances over space that the tail takes."""
        s = self.plain
        env: Env = {node: getattr(s.graph, node.target) for node in s.graph.graph.nodes if node.op == "get_attr"}
        if s.statistics is None:
            z = executor.forward(input, weight, bias, convolution)
        else:
            z, found = executor.forward_with_statistics(
                input, weight, bias, s.statistics.groups, 0.0, convolution, tail=VALUE.cpp
            )
            env.update(means_and_variances(found, s.statistics))
        env[s.fed] = z
        _compute(s.constants, env)
        run_rounds(s.graph, s.rounds, s.fed, env, keep=True)
        saved = [env[node] for node in self.reduced]
        flat = [tensor for each in saved for tensor in (each if isinstance(each, tuple) else (each,))]
        return outputs(s.graph, env), z, *flat

    def gradients(self, z: Tensor, grad: Tensor, saved: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the gradients of z and of the wanted captured tensors; `saved` is what `run` returned after z."""
        g = self.gradient
        env: Env = {node: getattr(g.graph, node.target) for node in g.graph.graph.nodes if node.op == "get_attr"}
        left = iter(saved)
        for node in g.saved:
            env[node] = (next(left), next(left)) if isinstance(node.meta["val"], (tuple, list)) else next(left)
        env[g.value], env[g.grad] = z, _like(z, grad)
        _compute(g.constants, env)
        run_rounds(g.graph, g.rounds, g.value, env, keep=True)
        found: list[Tensor | None] = list(outputs(g.graph, env))
        return found


def run_rounds(graph: fx.GraphModule, rounds: Rounds, value: fx.Node, env: Env, keep: bool = False) -> None:
    """Computes everything behind `value`, whose tensor may be overwritten unless `keep` says otherwise."""
    x = env[value]
    for each in rounds.sums:
        _compute_ready(rounds.small, env)
        expressions = tuple(expression.cpp for expression in each.launch.expressions)
        found = tail_executor.sums(x, expressions, *_operands(each.launch, env, x))
        for reduction, total in zip(each.reductions, found, strict=True):
            env[reduction.node] = _finished(reduction, total)
    _compute_ready(rounds.small, env)
    needed = {each for node in rounds.left for each in node.all_input_nodes} | set(_output(graph).all_input_nodes)
    for index, written in enumerate(rounds.written):
        overwrite = not keep and value not in needed and index == len(rounds.written) - 1
        operands = _operands(written.launch, env, x)
        dtype = written.node.meta["val"].dtype
        (expression,) = written.launch.expressions
        env[written.node] = tail_executor.evaluate(x, expression.cpp, *operands, dtype, overwrite)
    _compute(rounds.left, env)


def outputs(graph: fx.GraphModule, env: Env) -> Any:
    return fx.node.map_arg(_output(graph).args[0], lambda node: env[node])


def _output(graph: fx.GraphModule) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.op == "output")


def _compute(nodes: Sequence[fx.Node], env: Env) -> None:
    """Computes nodes with PyTorch, in order; those that are known already are skipped."""
    for node in nodes:
        if node not in env:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: env[each])
            env[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _compute_ready(nodes: Sequence[fx.Node], env: Env) -> None:
    """Computes the nodes whose operands are all known."""
    for node in nodes:
        if node not in env and all(each in env for each in node.all_input_nodes):
            _compute((node,), env)


def _operands(launch: Launch, env: Env, x: Tensor) -> tuple[Tensor | None, list[Tensor]]:
    """Returns vectors [number of vectors, N, C] and whole tensors as the kernels read them."""
    wholes = [_like(x, env[node]) for node in launch.wholes]
    if not launch.vectors:
        return None, wholes
    rows = []
    for node, target in launch.vectors:
        value, leading = env[node], rows_of(target, tuple(x.shape))
        assert leading is not None
        value = value.reshape((1,) * (len(target) - value.dim()) + tuple(value.shape))
        value = value.reshape(value.shape[:leading]).expand(target[:leading])
        rows.append(value.reshape(x.shape[:2]).to(statistics_dtype(x.dtype)))
    return torch.stack(rows), wholes


def _finished(reduction: Reduction, total: Tensor) -> Tensor:
    """Returns a sum or mean with the shape and type of its node, out of the sums of every channel, [N, C]."""
    like = reduction.node.meta["val"]
    leading = rows_of(reduction.viewed, (*total.shape, prod(reduction.viewed) // total.numel(), 1, 1))
    assert leading is not None
    total = total.reshape(reduction.viewed[:leading])
    reduced = [dim for dim in reduction.dims if dim < leading]
    if reduced:
        total = total.sum(reduced)
    return (total / reduction.count).reshape(like.shape).to(like.dtype)


def fold(
    weight: Tensor, bias: Tensor | None, convolution: Convolution, expression: Any, vectors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns weight and bias of the convolution whose result is an affine map of every output channel.

    The map is evaluated at 0 and at 1 in float64, which gives its offset and its factor.
    """
    groups = convolution[3]
    channels = weight.shape[1] * groups
    wide = [each.double().reshape(-1).expand(channels) for each in vectors]
    zero = torch.zeros(channels, dtype=torch.float64, device=weight.device)
    offset = expression.evaluate(zero, wide)
    factor = expression.evaluate(zero + 1, wide) - offset
    per_group = weight.shape[0] // groups
    factors = factor.reshape(groups, 1, -1).expand(groups, per_group, -1).reshape(weight.shape[0], -1)
    scaled = (weight.double() * factors[..., None, None, None]).to(weight.dtype)
    shifted = offset if bias is None else bias.double() * factor + offset
    if weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous():
        scaled = scaled.contiguous(memory_format=torch.channels_last_3d)
    return scaled, shifted.to(weight.dtype)


def means_and_variances(found: Tensor, statistics: Statistics) -> Env:
    """Returns what the `var_mean` nodes give, out of means and reciprocal deviations [2, N, groups]."""
    mean, deviation = found.double()
    variance = deviation.reciprocal().square()
    if statistics.over_batch:
        variance = variance.mean(0) + mean.var(0, correction=0)
        mean = mean.mean(0)
    env: Env = {}
    for node in statistics.nodes:
        shapes = node.meta["val"]
        env[node] = tuple(
            value.reshape(like.shape).to(like.dtype) for value, like in zip((variance, mean), shapes, strict=True)
        )
    return env


def _versions(tensors: Sequence[Tensor | None]) -> tuple[Any, ...] | None:
    """Returns what changes when one of the tensors is written, or None for tensors that do not count their writes."""
    if any(tensor is not None and tensor.is_inference() for tensor in tensors):
        return None
    return tuple(None if t is None else (id(t), t.data_ptr(), t._version) for t in tensors)


def _like(result: Tensor, whole: Tensor) -> Tensor:
    """Returns a whole tensor with the strides of the convolution's result, copied if it has others."""
    if whole.stride() == result.stride() and whole.device == result.device:
        return whole
    return torch.empty_strided(result.shape, result.stride(), dtype=whole.dtype, device=result.device).copy_(whole)
