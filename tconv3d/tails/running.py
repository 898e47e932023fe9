"""Runs a convolution with what follows it: the stages of a tail on this library's kernels, the rest in PyTorch.

Gradients are not recorded here: the caller runs convolution and tail one after the other if any are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_ops import executor, tail_executor
from ..torch_ops.checks import Convolution
from ..torch_ops.pytorch_ops import statistics_dtype
from .expressions import VALUE
from .stages import Stages, Statistics, volume_of

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
            result = executor.forward(input, weight, bias, convolution, keep=True, tail=tail)
        else:
            groups = s.statistics.groups
            result, found = executor.forward_with_statistics(
                input, weight, bias, groups, 0.0, convolution, keep=True, tail=s.epilogue.cpp
            )
            env.update(_means_and_variances(found, s.statistics))
        self._compute(s.before, env)
        if s.computed != VALUE:
            wholes = [_like(result, env[node]) for node in s.wholes]
            vectors = self._vectors(s.vectors, env, result) if s.vectors else None
            dtype = s.last.meta["val"].dtype
            result = tail_executor.evaluate(result, s.computed.cpp, vectors, wholes, dtype)
        elif result.dtype is not s.last.meta["val"].dtype:
            result = result.to(s.last.meta["val"].dtype)
        env[s.last] = result
        self._compute(s.after, env)
        (output,) = (node for node in s.graph.graph.nodes if node.op == "output")
        return fx.node.map_arg(output.args[0], lambda node: env[node])

    def _start(self, weight: Tensor, bias: Tensor | None, convolution: Convolution, extra: Sequence[Any]) -> Env:
        """Returns the captured and passed tensors, and what is computed from captured tensors alone."""
        s, nodes = self.stages, self.stages.graph.graph.nodes
        captured = {node: getattr(s.graph, node.target) for node in nodes if node.op == "get_attr"}
        seen = _versions([weight, bias, *captured.values()])
        if seen is None or seen != self._seen:
            env: Env = dict(captured)
            self._compute([node for node in s.before if _is_constant(node, env)], env)
            self._folded = None
            if s.affine.expression != VALUE:
                vectors = [env[node] for node in s.affine.vectors]
                self._folded = fold(weight, bias, convolution, s.affine.expression, vectors)
            self._seen, self._constant = seen or (), env
        env = dict(self._constant)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        env.update(zip(placeholders[1:], extra, strict=True))
        return env

    def _compute(self, nodes: Sequence[fx.Node], env: Env) -> None:
        """Computes nodes with PyTorch, in order; those that are known already are skipped."""
        for node in nodes:
            if node not in env and node.op == "call_function":
                arguments = fx.node.map_arg((node.args, node.kwargs), lambda each: env[each])
                env[node] = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
            elif node not in env and node.op == "get_attr":
                env[node] = getattr(self.stages.graph, node.target)  # type: ignore[arg-type]

    def _vectors(self, nodes: Sequence[fx.Node], env: Env, like: Tensor) -> Tensor:
        """Returns vectors [number of vectors, N, C] as the kernel reads them."""
        shape = tuple(like.shape)
        rows = []
        for node in nodes:
            value, target = env[node], self.stages.shapes[node]
            leading = volume_of(target, shape)
            assert leading is not None
            value = value.reshape((1,) * (len(target) - value.dim()) + tuple(value.shape))
            value = value.reshape(value.shape[:leading]).expand(target[:leading])
            rows.append(value.reshape(shape[:2]).to(statistics_dtype(like.dtype)))
        return torch.stack(rows)


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


def _means_and_variances(found: Tensor, statistics: Statistics) -> Env:
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


def _is_constant(node: fx.Node, env: Env) -> bool:
    """Tells whether a node is computed from captured tensors alone, and notes it, since nodes come in order."""
    known = all(each in env or each.meta.get("tconv3d_constant", False) for each in node.all_input_nodes)
    node.meta["tconv3d_constant"] = known
    return known


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
