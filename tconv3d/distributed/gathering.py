"""Layers of a split volume that PyTorch's own operators compute: convolutions and pools that gather neighbours.

A rank gathers the rows that its outputs read into one tensor: its own rows, the halos of its neighbours, and rows of
a fill value beyond the volume's border. The operator then runs on that tensor without padding. The backward pass
sends the halos' gradients back to the ranks that own the rows, which add them, neighbour by neighbour.

A plain convolution reads what the input gradient of a transposed convolution reads, so that `shards.Split` with
`backward=True` describes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..planning.geometry import Axis
from . import exchange
from .exchange import Neighbours, Pieces, part, rows_outermost
from .placing import Placing, local_of, local_parameter, placed, placing_of, waited
from .reduction import replicated
from .shards import NAMES, Block, Box, Split, shared

Triple = tuple[int, int, int]


def triple(value: int | Sequence[int]) -> Triple:
    d, h, w = (value,) * 3 if isinstance(value, int) else value
    return d, h, w


@lru_cache(maxsize=4096)
def gathering_block(
    size: tuple[int, ...],
    axes: tuple[tuple[int, int, int, int, bool], ...],
    shards: tuple[int, ...],
    place: tuple[int, ...],
) -> Block:
    """Returns a rank's part of an operator with these kernels, strides, paddings, dilations and ceil modes."""
    splits = []
    for sources, (kernel, stride, padding, dilation, ceil), count, name in zip(
        size, axes, shards, NAMES, strict=True
    ):
        reach = dilation * (kernel - 1) + 1
        span = sources + 2 * padding - reach
        targets = (-(-span // stride) if ceil else span // stride) + 1
        if ceil and (targets - 1) * stride >= sources + padding:
            targets -= 1  # PyTorch drops a last window that would begin behind the volume
        if targets < 1:
            raise RuntimeError(f"an input of {name} {sources} is smaller than the kernel, which reaches {reach} rows")
        uncropped = Axis(kernel, stride, padding, 0, dilation).output_size(targets)
        split = Split(Axis(kernel, stride, padding, sources - uncropped, dilation), targets, count, backward=True)
        split.check(name, transposed=False)
        splits.append(split)
    return Block(tuple(splits), place)


def read_box(here: Block) -> Box:
    """Returns the rows that the rank's targets read, also those beyond the border; no rows if it has no targets."""
    rows = []
    for split, targets in zip(here.splits, here.targets, strict=True):
        axis = split.axis
        start = targets.start * axis.stride - axis.padding
        stop = (targets.stop - 1) * axis.stride - axis.padding + axis.dilation * (axis.kernel - 1) + 1
        rows.append(range(start, stop) if targets else range(0))
    return tuple(rows)


def _extended(here: Block) -> Box:
    return tuple(split.extended(index) for split, index in zip(here.splits, here.place, strict=True))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, here: Block, neighbours: Neighbours, fill: float) -> Tensor:
        ctx.here, ctx.neighbours, ctx.own_shape = here, neighbours, own.shape
        last = neighbours.channels_last
        pieces = Pieces(last)
        pieces.add(here.sources, own)
        for stage in here.stages:
            dim = stage.dim
            halos = {step: (box, rows_outermost(own, box, dim, last)) for step, box in stage.receives.items()}
            order = exchange.memory_order(dim, last)
            receives = {step: tensor.permute(order) for step, (_, tensor) in halos.items()}
            sends = {step: pieces.gather(box, dim) for step, box in stage.sends.items()}
            exchange.start(neighbours, dim, sends, receives).wait()
            for box, tensor in halos.values():
                pieces.add(box, tensor)
        box = read_box(here)
        result = torch.full((*own.shape[:2], *map(len, box)), fill, dtype=own.dtype, device=own.device)
        if last:
            result = result.contiguous(memory_format=torch.channels_last_3d)
        pieces.copy_into(result, box)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad, last = waited(grad), ctx.neighbours.channels_last
        here, has, box = ctx.here, _extended(ctx.here), read_box(ctx.here)
        total = grad.new_zeros((*grad.shape[:2], *map(len, has)))
        both = shared(has, box)
        part(total, has, both).copy_(part(grad, box, both))
        for stage in reversed(here.stages):
            dim = stage.dim
            receives = {step: rows_outermost(total, sent, dim, last) for step, sent in stage.sends.items()}
            order = exchange.memory_order(dim, last)
            sends = {
                step: part(total, has, received).permute(order).contiguous()
                for step, received in stage.receives.items()
            }
            arriving = {step: tensor.permute(order) for step, tensor in receives.items()}
            exchange.start(ctx.neighbours, dim, sends, arriving).wait()
            for step, sent in stage.sends.items():
                part(total, has, sent).add_(receives[step])
        return part(total, has, here.sources), None, None, None


def _axes(
    kernel: Triple, stride: Triple, padding: Triple, dilation: Triple, ceil: bool = False
) -> tuple[tuple[int, int, int, int, bool], ...]:
    return tuple((*each, ceil) for each in zip(kernel, stride, padding, dilation, strict=True))


def _run(
    input: DTensor,
    function: str,
    axes: tuple[tuple[int, int, int, int, bool], ...],
    fill: float,
    channels: int,
    operator: Callable[[Tensor, Placing, Block], Tensor],
) -> DTensor:
    """Gathers the rows that this rank's outputs read, and runs an operator without padding on them."""
    placing = placing_of(input, function)
    here = gathering_block(tuple(input.shape[2:]), axes, placing.shards, placing.place)
    gathered = _Gather.apply(local_of(input), here, placing.neighbours, fill)
    local = operator(gathered, placing, here)
    shape = (input.shape[0], channels, *(split.target_size for split in here.splits))
    return placed(local, placing, shape)


def _empty(here: Block, channels: int, *tensors: Tensor | None) -> Tensor | None:
    """Returns the result of a rank without targets, which takes part in the backward pass; None if it has targets."""
    if all(map(len, here.targets)):
        return None
    present = [tensor for tensor in tensors if tensor is not None]
    anchor = sum((tensor.flatten()[:0].sum() for tensor in present), present[0].new_zeros(()))
    return present[0].new_zeros((present[0].shape[0], channels, *map(len, here.targets))) + anchor


def conv3d(
    input: DTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> DTensor:
    """Computes `torch.nn.functional.conv3d` of a split volume with PyTorch's operator."""
    kernel, steps, spread = triple(tuple(weight.shape[2:])), triple(stride), triple(dilation)
    if padding == "same":
        reach = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        if any(each % 2 for each in reach):
            raise NotImplementedError("conv3d of a split volume takes padding='same' for odd kernels alone")
        padding = [each // 2 for each in reach]
    pads = triple(0 if padding == "valid" else padding)  # type: ignore[arg-type]

    def convolve(gathered: Tensor, placing: Placing, here: Block) -> Tensor:
        parameters = [local_parameter(each, name, placing) for each, name in ((weight, "weight"), (bias, "bias"))]
        w, b = (None if each is None else replicated(each, placing.mesh, placing.summed) for each in parameters)
        assert w is not None
        empty = _empty(here, weight.shape[0], gathered, w, b)
        return F.conv3d(gathered, w, b, steps, 0, spread, groups) if empty is None else empty

    return _run(input, "conv3d", _axes(kernel, steps, pads, spread), 0.0, weight.shape[0], convolve)


def max_pool3d(
    input: DTensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> DTensor:
    """Computes `torch.nn.functional.max_pool3d` of a split volume with PyTorch's operator."""
    kernel, spread = triple(kernel_size), triple(dilation)
    steps = triple(kernel_size if stride is None else stride)

    def pool(gathered: Tensor, placing: Placing, here: Block) -> Tensor:
        empty = _empty(here, input.shape[1], gathered)
        return F.max_pool3d(gathered, kernel, steps, 0, spread) if empty is None else empty

    axes = _axes(kernel, steps, triple(padding), spread, ceil_mode)
    return _run(input, "max_pool3d", axes, -torch.inf, input.shape[1], pool)


def avg_pool3d(
    input: DTensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> DTensor:
    """Computes `torch.nn.functional.avg_pool3d` of a split volume with PyTorch's operator."""
    kernel, pads = triple(kernel_size), triple(padding)
    steps = triple(kernel_size if stride is None else stride)

    def pool(gathered: Tensor, placing: Placing, here: Block) -> Tensor:
        empty = _empty(here, input.shape[1], gathered)
        if empty is not None:
            return empty
        counts = [
            _counts(split, targets, count_include_pad)
            for split, targets in zip(here.splits, here.targets, strict=True)
        ]
        whole = all(set(count) == {extent} for count, extent in zip(counts, kernel, strict=True))
        if divisor_override or whole:
            return F.avg_pool3d(gathered, kernel, steps, 0, divisor_override=divisor_override or prod(kernel))
        d, h, w = (torch.tensor(c, dtype=gathered.dtype, device=gathered.device) for c in counts)
        return F.avg_pool3d(gathered, kernel, steps, 0, divisor_override=1) / (d[:, None, None] * h[:, None] * w)

    axes = _axes(kernel, steps, pads, (1, 1, 1), ceil_mode)
    return _run(input, "avg_pool3d", axes, 0.0, input.shape[1], pool)


def _counts(split: Split, targets: range, include_pad: bool) -> list[int]:
    """Returns how many rows each target's mean counts: those inside the volume, or inside its padded volume."""
    axis, size = split.axis, split.source_size
    pad = axis.padding if include_pad else 0
    found = []
    for target in targets:
        start = target * axis.stride - axis.padding
        stop = min(start + axis.kernel, size + axis.padding)
        found.append(min(stop, size + pad) - max(start, -pad))
    return found
