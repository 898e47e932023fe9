"""GroupNorm, InstanceNorm and BatchNorm of a split volume, whose statistics are those of the whole volume.

Every rank computes mean and sum of squared deviations of its own elements. The ranks exchange these few numbers and
combine them in the order of the ranks, so that all have equal statistics, to the bit. The backward pass exchanges the
two sums that the input's gradient needs, and sums the parameters' gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .placing import Placing, local_of, local_parameter, placed, placing_of, waited
from .reduction import gathered, ordered_sums, replicated, sum_dtype


@dataclass(frozen=True)
class Kind:
    """Describes which elements of a local tensor [N, C, D, H, W] share statistics, and which ranks have more of them.

    `shape` splits the channels, `dims` are the dimensions of that shape that statistics are computed over, and
    `channels` is the shape of a parameter [C] beside it.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    channels: tuple[int, ...]
    mesh: DeviceMesh
    sharing: tuple[int, ...]  # mesh dimensions whose ranks share statistics
    summed: tuple[int, ...]  # mesh dimensions whose ranks share parameters

    @property
    def parameter_dims(self) -> tuple[int, ...]:
        """The dimensions of `shape` that a parameter's gradient is summed over."""
        return tuple(dim for dim, extent in enumerate(self.channels) if extent == 1)

    @property
    def count(self) -> int:
        return prod(self.shape[dim] for dim in self.dims)


def group_kind(local: Tensor, groups: int, placing: Placing) -> Kind:
    n, c, *size = local.shape
    shape = (n, groups, c // groups, *size)
    return Kind(shape, (2, 3, 4, 5), (1, groups, c // groups, 1, 1, 1), placing.mesh, placing.spatial, placing.summed)


def batch_kind(local: Tensor, placing: Placing) -> Kind:
    channels = (1, local.shape[1], 1, 1, 1)
    return Kind(tuple(local.shape), (0, 2, 3, 4), channels, placing.mesh, placing.summed, placing.summed)


@dataclass(frozen=True)
class Statistics:
    """Holds means and variances in a shape that broadcasts with the elements, and how many elements each has."""

    mean: Tensor
    variance: Tensor
    count: int


def statistics(local: Tensor, kind: Kind) -> Statistics:
    """Returns the statistics of all ranks' elements, combined in the order of the ranks."""
    values = local.reshape(kind.shape).to(sum_dtype(local.dtype))
    if kind.count:
        mean = values.mean(kind.dims, keepdim=True)
        squares = (values - mean).square_().sum(kind.dims, keepdim=True)
    else:
        mean = squares = values.sum(kind.dims, keepdim=True)
    parts = gathered(torch.stack([mean, squares, torch.full_like(mean, kind.count)]), kind.mesh, kind.sharing)
    mean, squares, count = parts[0]
    for other_mean, other_squares, other_count in parts[1:]:
        total = (count + other_count).clamp(min=1)
        difference = other_mean - mean
        mean = mean + difference * (other_count / total)
        squares = squares + other_squares + difference.square() * (count * other_count / total)
        count = count + other_count
    number = int(count.flatten()[0]) if count.numel() else 0
    return Statistics(mean, squares / max(number, 1), number)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, weight: Tensor | None, bias: Tensor | None, kind: Kind, found: Statistics, eps: float
    ) -> Tensor:
        deviation = (found.variance + eps).rsqrt()
        ctx.save_for_backward(local, weight, found.mean, deviation)
        ctx.kind, ctx.count = kind, found.count
        result = (local.reshape(kind.shape).to(found.mean.dtype) - found.mean).mul_(deviation)
        if weight is not None:
            result.mul_(weight.view(kind.channels))
        if bias is not None:
            result.add_(bias.view(kind.channels))
        return result.to(local.dtype).reshape(local.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        local, weight, mean, deviation = ctx.saved_tensors
        kind: Kind = ctx.kind
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        normal = (local.reshape(kind.shape).to(mean.dtype) - mean).mul_(deviation)
        dy = waited(grad).reshape(kind.shape).to(mean.dtype)
        dw = (dy * normal).sum(kind.parameter_dims) if needs_weight else None
        db = dy.sum(kind.parameter_dims) if needs_bias else None
        dw, db = ordered_sums([dw, db], kind.mesh, kind.summed)
        dx = None
        if needs_input:
            if weight is not None:
                dy = dy * weight.view(kind.channels)
            both = [dy.sum(kind.dims, keepdim=True), (dy * normal).sum(kind.dims, keepdim=True)]
            first, second = ordered_sums(both, kind.mesh, kind.sharing)
            assert first is not None and second is not None
            inner = dy - first / ctx.count - normal.mul_(second / ctx.count)
            dx = inner.mul_(deviation).to(local.dtype).reshape(local.shape)
        shaped = [None if each is None else each.flatten().to(weight_dtype(weight, local)) for each in (dw, db)]
        return dx, *shaped, None, None, None


def weight_dtype(weight: Tensor | None, local: Tensor) -> torch.dtype:
    return local.dtype if weight is None else weight.dtype


def group_norm(
    input: DTensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> DTensor:
    """Computes `torch.nn.functional.group_norm` of a split volume."""
    placing = placing_of(input, "group_norm")
    if input.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        input = cast(DTensor, input.float())  # as autocast does
    local = local_of(input)
    kind = group_kind(local, num_groups, placing)
    found = statistics(local.detach(), kind)
    return placed(
        _Normalize.apply(local, *_parameters(weight, bias, placing), kind, found, eps), placing, input.shape
    )


def instance_norm(
    input: DTensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> DTensor:
    """Computes `torch.nn.functional.instance_norm` of a split volume with the statistics of the volume."""
    return group_norm(input, input.shape[1], weight, bias, eps)


def batch_norm(
    input: DTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> DTensor:
    """Computes `torch.nn.functional.batch_norm` of a split volume; running statistics change as in one process."""
    placing = placing_of(input, "batch_norm")
    local = local_of(input)
    parameters = _parameters(weight, bias, placing)
    if not training:
        w, b = (None if each is None else replicated(each, placing.mesh, placing.summed) for each in parameters)
        result = F.batch_norm(local, running_mean, running_var, w, b, False, momentum, eps)
        return placed(result, placing, input.shape)
    kind = batch_kind(local, placing)
    found = statistics(local.detach(), kind)
    if found.count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(found.mean.flatten().to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = found.variance.flatten() * (found.count / (found.count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return placed(_Normalize.apply(local, *parameters, kind, found, eps), placing, input.shape)


def _parameters(weight: Tensor | None, bias: Tensor | None, placing: Placing) -> tuple[Tensor | None, Tensor | None]:
    return local_parameter(weight, "weight", placing), local_parameter(bias, "bias", placing)
