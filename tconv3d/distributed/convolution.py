"""`conv_transpose3d` of a volume that is split along depth, height or width over the ranks of a mesh.

A pass starts the exchange of halos, convolves the rank's own rows meanwhile, straight from its shard into its result,
and then computes the few rows that need halos once more (`shards.py` says which). Every element of the result comes
from one kernel call with all its inputs, so that it has the bits that the same kernel computes in one process.

The backward pass exchanges rows of the output gradient alike. The gradients of weight and bias are sums over all
ranks in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..planning.geometry import Axis, Geometry
from ..torch_ops import checks, windows
from ..torch_ops.backend import Backend, current_backend, use_backend
from ..torch_ops.pytorch_ops import suggests_channels_last
from . import exchange
from .exchange import Neighbours, Pieces, memory_order, part, rows_outermost
from .placing import Placing, local_of, local_parameter, placed, placing_of, waited
from .reduction import ordered_sums, sum_dtype
from .shards import Block, BlockSlab, Box, block, volume


def conv_transpose3d(
    input: DTensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> DTensor:
    """Computes `tconv3d.conv_transpose3d` of a split volume, split like its input.

    input: (N, C_in, D, H, W), a DTensor with `Shard(2)`, `Shard(3)` or `Shard(4)` along one or several mesh
    dimensions (and perhaps `Shard(0)` along another). weight, bias: tensors that every rank has, or replicated
    DTensors; their gradients are summed over the mesh. Raises `ShardTooSmall` on every rank if a halo is larger than
    a shard.
    """
    placing = placing_of(input, "conv_transpose3d")
    weight_local = local_parameter(weight, "weight", placing)
    bias_local = local_parameter(bias, "bias", placing)
    checks.check_tensors(input, weight_local, bias_local)
    assert weight_local is not None
    local = local_of(input)
    local, weight_local, bias_local = _autocast(local, weight_local, bias_local)
    convolution = checks.convolution_of(stride, padding, output_padding, groups, dilation)
    checks.check_same_kind(local, weight_local, "Input", "weight")
    if bias_local is not None:
        checks.check_same_kind(local, bias_local, "Input", "bias")
    bias_shape = None if bias_local is None else tuple(bias_local.shape)
    geometry = _geometry(tuple(input.shape), tuple(weight_local.shape), bias_shape, convolution)
    call = _Call(geometry, tuple(input.shape[2:]), placing, current_backend())
    wanted = [each is not None and each.requires_grad for each in (local, weight_local, bias_local)]
    if torch.is_grad_enabled() and any(wanted):
        call.block(True)  # raises now if the backward pass would not fit
    result = _Convolve.apply(local, weight_local, bias_local, call)
    shape = (input.shape[0], geometry.out_channels, *geometry.output_size(call.input_size))
    last = placing.neighbours.channels_last or suggests_channels_last(weight_local)
    return placed(result, placing, shape, last)


@lru_cache(maxsize=1024)
def _geometry(
    input: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None, convolution: checks.Convolution
) -> Geometry:
    """Returns the geometry of a call by the shapes of its operands. Raises what one process would raise."""
    x, w, b = (None if shape is None else torch.empty(shape, device="meta") for shape in (input, weight, bias))
    assert x is not None and w is not None
    return checks.check_forward(x, w, b, convolution)


def _autocast(*tensors: Any) -> list[Any]:
    """Casts the operands as autocast casts those of convolutions, where it is enabled."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [each if each is None or each.dtype is torch.float64 else each.to(dtype) for each in tensors]


@dataclass(frozen=True)
class _Call:
    """Holds what a call's passes have in common."""

    geometry: Geometry
    input_size: tuple[int, ...]
    placing: Placing
    backend: Backend

    def block(self, backward: bool) -> Block:
        return block(self.geometry, self.input_size, self.placing.shards, self.placing.place, backward)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.save_for_backward(input if weight.requires_grad else None, weight if input.requires_grad else None)
        ctx.call, ctx.kernel = call, tuple(weight.shape[2:])
        here, groups = call.block(False), call.geometry.groups
        result = input.new_empty(0)

        def convolve_own_rows() -> None:
            nonlocal result
            result = windows.forward(input, weight, bias, here.axes, groups)

        def convolve_slab(slab: BlockSlab, sources: Tensor) -> None:
            computed = windows.forward(sources, weight, bias, slab.axes, groups)
            part(result, here.targets, slab.targets).copy_(part(computed, slab.computed, slab.targets))

        with_halos(here, input, call.placing.neighbours, convolve_own_rows, convolve_slab)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad = waited(grad)
        with use_backend(ctx.call.backend):
            return *_Gradients(ctx.call, grad, input, weight, ctx.kernel, ctx.needs_input_grad[:3]).compute(), None


@dataclass
class _Gradients:
    """Computes the wanted gradients of the rank's input, and those of weight and bias as sums over all ranks."""

    call: _Call
    grad: Tensor
    input: Tensor | None
    weight: Tensor | None
    kernel: tuple[int, ...]
    wanted: tuple[bool, ...]  # the gradients of input, weight and bias
    input_grad: Tensor | None = None
    weight_grad: Tensor | None = None  # the part that the rank's own inputs give, in the type of sums

    def compute(self) -> tuple[Tensor | None, ...]:
        here = self.call.block(True)
        if self.wanted[0] or self.wanted[1]:
            with_halos(here, self.grad, self.call.placing.neighbours, self._own_rows, self._slab)
        total = [self.weight_grad if self.wanted[1] else None, None]
        if self.wanted[1] and total[0] is None:
            shape = (self.call.geometry.in_channels, self.call.geometry.out_per_group, *self.kernel)
            total[0] = self.grad.new_zeros(shape, dtype=sum_dtype(self.grad.dtype))
        if self.wanted[2]:
            total[1] = windows.bias_grad(self.grad).to(sum_dtype(self.grad.dtype))
        sums = ordered_sums(total, self.call.placing.mesh, self.call.placing.summed)
        return self.input_grad, *(None if each is None else each.to(self.grad.dtype) for each in sums)

    def _own_rows(self) -> None:
        here = self.call.block(True)
        wanted = (self.wanted[0], self.wanted[1])
        self.input_grad, weight_grad = self._backward(self.grad, self.input, wanted, here.targets, here.axes)
        if self.wanted[0] and self.input_grad is None:
            shape = (self.grad.shape[0], self.call.geometry.in_channels, *map(len, here.targets))
            self.input_grad = self.grad.new_zeros(shape)
        self._add(weight_grad)

    def _slab(self, slab: BlockSlab, sources: Tensor) -> None:
        here = self.call.block(True)
        if self.input_grad is not None:
            computed, _ = self._backward(sources, None, (True, False), slab.computed, slab.axes)
            if computed is not None:
                part(self.input_grad, here.targets, slab.targets).copy_(part(computed, slab.computed, slab.targets))
        for halo, readers, axes in zip(slab.halos, slab.readers, slab.reader_axes, strict=True):
            if self.wanted[1]:
                assert self.input is not None
                dy, x = part(sources, slab.sources, halo), part(self.input, here.targets, readers)
                self._add(self._backward(dy, x, (False, True), readers, axes)[1])

    def _backward(
        self, dy: Tensor, x: Tensor | None, wanted: tuple[bool, bool], targets: Box, axes: tuple[Axis, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        size = tuple(map(len, targets))
        return windows.backward(dy, x, self.weight, wanted, size, self.kernel, axes, self.call.geometry.groups)

    def _add(self, weight_grad: Tensor | None) -> None:
        if weight_grad is None:
            return
        term = weight_grad.to(sum_dtype(weight_grad.dtype))
        self.weight_grad = term if self.weight_grad is None else self.weight_grad.add_(term)


def with_halos(
    here: Block,
    own: Tensor,
    neighbours: Neighbours,
    meanwhile: Callable[[], None],
    completed: Callable[[BlockSlab, Tensor], None],
) -> None:
    """Exchanges halos around the rank's own sources, calls `meanwhile` once, and `completed` for every slab.

    `meanwhile` runs while the first messages are in flight; a slab is handed over, with the buffer of its sources,
    while the messages of the next dimension are in flight.
    """
    channels_last = neighbours.channels_last
    pieces = Pieces(channels_last)
    pieces.add(here.sources, own)
    started = False
    ready: list[tuple[BlockSlab, Tensor]] = []
    for stage in here.stages:
        slabs = [(slab, _buffer(slab, pieces, own)) for slab in stage.slabs]
        arriving = {box: part(buffer, slab.sources, box) for slab, buffer in slabs for box in slab.halos}
        order = memory_order(stage.dim, channels_last)
        receives = {step: arriving[box].permute(order) for step, box in stage.receives.items()}
        sends = {step: pieces.gather(box, stage.dim) for step, box in stage.sends.items()}
        flight = exchange.start(neighbours, stage.dim, sends, receives)
        if not started:
            meanwhile()
            started = True
        for each in ready:
            completed(*each)
        flight.wait()
        for box, tensor in arriving.items():
            pieces.add(box, tensor)
        ready = slabs
    if not started:
        meanwhile()
    for each in ready:
        completed(*each)


def _buffer(slab: BlockSlab, pieces: Pieces, own: Tensor) -> Tensor:
    """Returns the buffer of a slab's sources, with all rows but those that are to arrive in it."""
    buffer = rows_outermost(own, slab.sources, slab.dim, pieces.channels_last)
    if volume(slab.sources) > pieces.known(slab.sources) + sum(map(volume, slab.halos)):
        buffer.zero_()  # some rows have no reader among the targets
    pieces.copy_into(buffer, slab.sources)
    return buffer
