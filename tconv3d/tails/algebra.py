"""Moves linear operators that follow a convolution into its weight and its input, where that saves work.

- A sum or mean over channels: the weight is summed over output channels, and one channel is left.
- A sum or mean over dimensions of space: every tap of the kernel meets a range of the input, so the input is summed
  over these ranges first, and the taps of a dimension become input channels, one per range. If all of space is
  summed, a matrix product is left.
- An average pool whose stride divides the convolution's: another transposed convolution, with a smaller stride.

The results differ from those of the operators in their written order by rounding alone. This module knows weights,
inputs and shapes, no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

import torch
from torch import Tensor, fx

from ..planning.geometry import Axis, Triple, valid_range
from ..torch_ops.checks import Convolution
from .expressions import OPERATORS
from .pointwise import inserted, meta, packet_of, shape_of
from .pools import windows_of

aten = torch.ops.aten

SPACE = (2, 3, 4)


@dataclass(frozen=True)
class Layer:
    """Describes a convolution and the volume of its input."""

    input_size: Triple
    kernel: Triple
    convolution: Convolution

    def settings(self, i: int) -> tuple[int, int, int, int]:
        """Returns stride, padding, output padding and dilation of a dimension."""
        stride, padding, extra, _, dilation = self.convolution
        return stride[i], padding[i], extra[i], dilation[i]

    @cached_property
    def outputs(self) -> Triple:
        axes = (Axis(self.kernel[i], *self.settings(i)) for i in range(3))
        d, h, w = (axis.output_size(self.input_size[i]) for i, axis in enumerate(axes))
        return d, h, w


class Moved(Protocol):
    """Describes another convolution that computes a linear operator of a convolution's result."""

    @property
    def text(self) -> str: ...

    def operands(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias of the other convolution; called once for given weights."""
        ...

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, convolve: Callable[..., Tensor]) -> Tensor:
        """Returns the result; `convolve(input, weight, bias, convolution)` is a transposed convolution."""
        ...


@dataclass(frozen=True)
class ChannelSum:
    """Sums over output channels."""

    layer: Layer
    factor: float

    @property
    def text(self) -> str:
        return f"the {_name(self.factor)} over channels"

    def operands(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        summed = (weight.double().sum(1, keepdim=True) * self.factor).to(weight.dtype)
        return summed, None if bias is None else (bias.double().sum().reshape(1) * self.factor).to(bias.dtype)

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, convolve: Callable[..., Tensor]) -> Tensor:
        stride, padding, extra, _, dilation = self.layer.convolution
        return convolve(input, weight, bias, (stride, padding, extra, 1, dilation))


@dataclass(frozen=True)
class SpaceSum:
    """Sums over dimensions of space: over `dims` of 2, 3 and 4."""

    layer: Layer
    dims: tuple[int, ...]
    factor: float

    @property
    def text(self) -> str:
        names = ", ".join(("depth", "height", "width")[dim - 2] for dim in self.dims)
        return f"the {_name(self.factor)} over {names}, from sums of the input"

    def ranges(self, dim: int) -> tuple[list[range], list[int]]:
        """Returns the ranges of the input that the taps of a dimension meet, and the range of every tap."""
        i = dim - 2
        stride, padding, _, dilation = self.layer.settings(i)
        size, out = self.layer.input_size[i], self.layer.outputs[i]
        of_taps = [valid_range(k * dilation - padding, stride, size, out) for k in range(self.layer.kernel[i])]
        distinct = list(dict.fromkeys(of_taps))
        return distinct, [distinct.index(each) for each in of_taps]

    def operands(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        summed = weight.double() * self.factor
        for dim in self.dims:
            distinct, of_taps = self.ranges(dim)
            shape = [len(distinct) if each == dim else size for each, size in enumerate(summed.shape)]
            index = torch.tensor(of_taps).to(weight.device)
            summed = summed.new_zeros(shape).index_add(dim, index, summed)
        rest = [dim for dim in SPACE if dim not in self.dims]
        kernel = [1 if dim in self.dims else summed.shape[dim] for dim in SPACE]
        summed = summed.permute(0, *self.dims, 1, *rest).reshape(-1, weight.shape[1], *kernel)
        kept = torch.promote_types(weight.dtype, torch.float32)
        summed = summed.to(torch.float64 if len(self.dims) == 3 else kept)
        count = prod(self.layer.outputs[dim - 2] for dim in self.dims) * self.factor
        return summed, None if bias is None else (bias.double() * count).to(summed.dtype)

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, convolve: Callable[..., Tensor]) -> Tensor:
        summed = _range_sums(input, self.dims, [self.ranges(dim)[0] for dim in self.dims])
        stride, padding, extra, groups, dilation = self.layer.convolution
        if len(self.dims) == 3:
            by_group = summed.reshape(input.shape[0], groups, -1).transpose(0, 1).double()
            found = (by_group @ weight.reshape(groups, by_group.shape[2], -1)).transpose(0, 1)
            found = found.reshape(input.shape[0], -1)
            return (found if bias is None else found + bias)[..., None, None, None]
        settings = [self._kept(*each) for each in ((stride, 1), (padding, 0), (extra, 0), (dilation, 1))]
        convolution = (*settings[:3], groups, settings[3])
        return convolve(summed.to(weight.dtype), weight, bias, convolution)

    def _kept(self, setting: Triple, summed: int) -> Triple:
        """Returns a setting of the convolution, with another value for dimensions that are summed."""
        d, h, w = (summed if dim in self.dims else setting[dim - 2] for dim in SPACE)
        return d, h, w


@dataclass(frozen=True)
class AveragePool:
    """Averages windows of `window` outputs at every `step`-th output, per dimension."""

    layer: Layer
    window: Triple
    step: Triple

    text = "an average pool"

    def axis(self, i: int) -> tuple[list[list[int]], int, int]:
        """Returns for every tap of the other convolution the taps whose weights it sums, its padding and its extra.

        Output j of the pool is the sum over inputs i and taps k, and over places t of the window, of x[i]*w[k] where
        j*step + t = i*stride - padding + k*dilation. So j - i*(stride/step) = (k*dilation - padding - t)/step is the
        index of a tap of the other convolution, from -padding' on.
        """
        stride, padding, _, dilation = self.layer.settings(i)
        found: dict[int, list[int]] = {}
        for k in range(self.layer.kernel[i]):
            for t in range(self.window[i]):
                place, rest = divmod(k * dilation - padding - t, self.step[i])
                if rest == 0:
                    found.setdefault(place, []).append(k)
        first, last = min([*found, 0]), max([*found, 0])
        size, wanted = self.layer.input_size[i], self.pooled(i)
        step = stride // self.step[i]
        while (extra := wanted - ((size - 1) * step + 2 * first + last - first + 1)) < 0:
            first -= 1  # a tap of zeros before the others crops one output behind them
        while extra >= max(step, 1):
            last, extra = last + 1, extra - 1
        return [found.get(place, []) for place in range(first, last + 1)], -first, extra

    def pooled(self, i: int) -> int:
        return (self.layer.outputs[i] - self.window[i]) // self.step[i] + 1

    @property
    def saves(self) -> bool:
        strides = self.layer.convolution[0]
        if any(strides[i] % self.step[i] or self.window[i] > self.layer.outputs[i] for i in range(3)):
            return False
        return prod(len(self.axis(i)[0]) for i in range(3)) <= prod(self.layer.kernel)

    def operands(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        summed = weight.double() / prod(self.window)
        for i in range(3):
            taps = self.axis(i)[0]
            counts = [[several.count(k) for k in range(self.layer.kernel[i])] for several in taps]
            spread = torch.tensor(counts, dtype=torch.float64).to(weight.device)
            summed = torch.movedim(torch.tensordot(summed, spread, dims=([i + 2], [1])), -1, i + 2)
        summed = summed.to(weight.dtype)
        if weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous():
            return summed.contiguous(memory_format=torch.channels_last_3d), bias
        return summed.contiguous(), bias

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, convolve: Callable[..., Tensor]) -> Tensor:
        stride, _, _, groups, _ = self.layer.convolution
        axes = [self.axis(i) for i in range(3)]
        steps = tuple(stride[i] // self.step[i] for i in range(3))
        return convolve(
            input, weight, bias, (steps, tuple(a[1] for a in axes), tuple(a[2] for a in axes), groups, (1, 1, 1))
        )


def _name(factor: float) -> str:
    return "sum" if factor == 1 else "mean"


def find(graph: fx.Graph, node: fx.Node, layer: Layer) -> tuple[fx.Node, Moved] | None:
    """Returns the one linear operator that uses a node, in a form with five dimensions, and what computes it."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    if (
        user.op != "call_function"
        or user.kwargs
        or shape_of(node) != tuple(meta(node).shape)
        or meta(node).dim() != 5
    ):
        return None
    if user.target in (aten.mean.dim, aten.sum.dim_IntList, aten.mean.default, aten.sum.default):
        return _sum(graph, user, layer)
    return _pool(user, layer) if packet_of(user) is aten.avg_pool3d else None


def pools_first(graph: fx.Graph) -> None:
    """Moves average pools, in place, before arithmetic with numbers that are constant along space.

    What is computed behind a pool, gradients of these numbers above all, is smaller than what is computed before it.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or packet_of(node) is not aten.avg_pool3d or meta(node).dim() != 5:
            continue
        windows, ceil_mode = windows_of(node)
        moves = not any(windows.padding) and not ceil_mode and not windows.divisor
        while moves and (place := _affine_operand(node.all_input_nodes[0])) is not None:
            (x,) = node.all_input_nodes
            with graph.inserting_before(node):
                pooled = inserted(graph, node.target, (x.args[place], *node.args[1:]), node.kwargs)
                result = inserted(graph, x.target, (*x.args[:place], pooled, *x.args[place + 1 :]), x.kwargs)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
            graph.erase_node(x)
            node = pooled


def _affine_operand(node: fx.Node) -> int | None:
    """Returns the place of a node's one volume, if a pool alone uses the node and it is affine in the volume.

    Its other operands are numbers that are constant along space.
    """
    if node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor) or len(node.users) > 1:
        return None
    whole = [i for i, each in enumerate(node.args) if isinstance(each, fx.Node) and _is_like(each, node)]
    rest = [meta(each) for each in node.all_input_nodes if not _is_like(each, node)]
    flat = all(isinstance(each, Tensor) and all(size == 1 for size in each.shape[-3:]) for each in rest)
    divides = node.target is aten.div.Tensor and whole != [0]
    return whole[0] if len(whole) == 1 and flat and not divides else None


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    return isinstance(meta(node), Tensor) and (meta(node).shape, meta(node).dtype) == (
        meta(other).shape,
        meta(other).dtype,
    )


def _sum(graph: fx.Graph, node: fx.Node, layer: Layer) -> tuple[fx.Node, Moved] | None:
    x = node.all_input_nodes[0]
    given = node.args[1] if len(node.args) > 1 else None
    keepdim = len(node.args) > 2 and bool(node.args[2])
    dims = sorted(dim % 5 for dim in given) if isinstance(given, (list, tuple)) and given else list(range(5))
    space = tuple(dim for dim in dims if dim in SPACE)
    moved, others = (space, [dim for dim in dims if dim < 2]) if space else ((1,), [dim for dim in dims if dim != 1])
    if (not space and 1 not in dims) or (others and len(space) < 3):
        return None
    mean = packet_of(node) is aten.mean
    factor = 1 / prod(shape_of(x)[dim] for dim in moved) if mean else 1.0
    target = aten.mean.dim if mean else aten.sum.dim_IntList
    with graph.inserting_before(node):
        first = inserted(graph, target, (x, list(moved), True))
        result = inserted(graph, target, (first, others, keepdim)) if others else first
        if shape_of(result) != shape_of(node):
            result = inserted(graph, aten.view.default, (result, list(shape_of(node))))
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    if result is not first and not others:
        _sink(graph, result)
    return first, SpaceSum(layer, space, factor) if space else ChannelSum(layer, factor)


def _sink(graph: fx.Graph, view: fx.Node) -> None:
    """Moves a view behind the pointwise functions of it alone, so that the convolution's kernel can compute them."""
    whole: dict[fx.Node, fx.Node] = {view: view.args[0]}  # type: ignore[dict-item]  # with five dimensions
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if node.op != "call_function" or packet_of(node) not in (*OPERATORS, aten._to_copy) or not inputs:
            continue
        if all(each in whole for each in inputs):
            with graph.inserting_before(node):
                args, options = fx.node.map_arg((node.args, node.kwargs), lambda each: whole[each])
                whole[node] = inserted(graph, node.target, args, options)
    for node, result in reversed(whole.items()):
        if any(user not in whole for user in node.users):
            with graph.inserting_before(node):
                again = inserted(graph, aten.view.default, (result, list(shape_of(node))))
            node.replace_all_uses_with(again, delete_user_cb=lambda user: user not in whole)
        graph.erase_node(node)


def _pool(node: fx.Node, layer: Layer) -> tuple[fx.Node, Moved] | None:
    windows, ceil_mode = windows_of(node)
    if any(windows.padding) or ceil_mode or windows.divisor:
        return None
    moved = AveragePool(layer, windows.size, windows.step)
    return (node, moved) if moved.saves else None


def _range_sums(x: Tensor, dims: Sequence[int], ranges: Sequence[Sequence[range]]) -> Tensor:
    """Returns the sums of x over ranges of `dims`, as input channels: [N, C * number of ranges, ...], 1 in `dims`.

    What all ranges have in common is summed once, so that x is read once; nothing is subtracted.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    for dim, several in zip(dims, ranges, strict=True):
        core = range(max(each.start for each in several), min(each.stop for each in several))
        if not core:
            sums = [_sum_of(x, dim, each, kind) for each in several]
        else:
            middle = _sum_of(x, dim, core, kind)
            around = [(range(each.start, core.start), range(core.stop, each.stop)) for each in several]
            sums = [sum([_sum_of(x, dim, part, kind) for part in parts if part], middle) for parts in around]
        x, kind = torch.stack(sums, -1), torch.float64  # what is left is small
    extra = tuple(range(5, x.dim()))
    return x.permute(0, 1, *extra, 2, 3, 4).reshape(x.shape[0], -1, *x.shape[2:5])


def _sum_of(x: Tensor, dim: int, places: range, kind: torch.dtype) -> Tensor:
    return x.narrow(dim, places.start, len(places)).sum(dim, keepdim=True, dtype=kind)
