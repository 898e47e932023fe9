"""`parallelize` makes a model compute volumes that are split in space over the ranks of a mesh.

As in `accelerate`, a layer's class changes and nothing else: parameters, buffers, hooks and `state_dict` stay. The
new classes compute DTensors by the functions of this package, and plain tensors as before. Pointwise operations,
additions and concatenations along the channels are left to DTensor, which computes them shard by shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize

from ..api import modules as ours
from ..api.accelerate import rebased
from ..api.fusing import FusedSequential
from ..torch_ops import checks
from .convolution import conv_transpose3d
from .gathering import avg_pool3d, conv3d, max_pool3d
from .norms import batch_norm, group_norm, instance_norm
from .placing import local_of, placed, placing_of
from .reduction import replicated
from .shards import NAMES

Model = TypeVar("Model", bound=nn.Module)
Dimension = int | str  # 2, 3, 4, or "depth", "height", "width"


class CannotSplit(NotImplementedError):
    """Names the layers of a model that cannot compute a split volume, each with its reason."""

    def __init__(self, layers: Sequence[SplitLayer]) -> None:
        super().__init__("these layers cannot be split in space:\n" + "\n".join(f"  {layer}" for layer in layers))
        self.layers = tuple(layers)


@dataclass(frozen=True)
class SplitLayer:
    """Says what `parallelize` does to one layer, and why not if it does nothing."""

    place: str  # name of the layer in the model; "" is the model itself
    layer: str
    reason: str = ""  # why the layer cannot be split; "" if it can

    def __str__(self) -> str:
        return f"{self.place or '(the model itself)'}: {self.layer}{': ' if self.reason else ''}{self.reason}"


@dataclass(frozen=True)
class SplitReport:
    """Says what `parallelize` does to a model."""

    split: tuple[SplitLayer, ...]
    left: tuple[SplitLayer, ...]

    def __str__(self) -> str:
        head = f"{len(self.split)} layers compute split volumes, {len(self.left)} cannot"
        return "\n".join(
            [head, *(f"  split  {layer}" for layer in self.split), *(f"  left   {x}" for x in self.left)]
        )


# ---- layers


def _transposed(layer: nn.ConvTranspose3d, input: DTensor, output_size: list[int] | None) -> DTensor:
    return conv_transpose3d(input, *ours.arguments(layer, input, output_size))


class SplitConvTranspose3d(nn.ConvTranspose3d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input, output_size)
        return _transposed(self, input, output_size)


class SplitOurs(ours.ConvTranspose3d):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input, output_size)
        return _transposed(self, input, output_size)


class SplitOursReLU(ours.ConvTranspose3dReLU):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input, output_size)
        return _transposed(self, input, output_size).relu()


class SplitOursReLUGroupNorm(ours.ConvTranspose3dReLUGroupNorm):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input, output_size)
        norm = self.group_norm
        result: Any = _transposed(self.conv_transpose, input, output_size).relu()
        return group_norm(result, norm.num_groups, norm.weight, norm.bias, norm.eps)


class SplitConv3d(nn.Conv3d):
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input)
        return conv3d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class SplitMaxPool3d(nn.MaxPool3d):
    def forward(self, input: Tensor) -> Any:
        if not isinstance(input, DTensor):
            return super().forward(input)
        return max_pool3d(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class SplitAvgPool3d(nn.AvgPool3d):
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input)
        settings = (self.ceil_mode, self.count_include_pad, self.divisor_override)
        return avg_pool3d(input, self.kernel_size, self.stride, self.padding, *settings)


class SplitGroupNorm(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input)
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class SplitInstanceNorm3d(nn.InstanceNorm3d):
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input)
        return instance_norm(input, self.weight, self.bias, self.eps)


class SplitBatchNorm3d(nn.BatchNorm3d):
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        tracked = (self.running_mean, self.running_var)
        uses_batch = self.training or tracked == (None, None)
        kept = (None, None) if self.training and not self.track_running_stats else tracked
        return batch_norm(input, *kept, self.weight, self.bias, uses_batch, momentum, self.eps)


class SplitPReLU(nn.PReLU):
    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(input, DTensor):
            return super().forward(input)
        placing = placing_of(input, "prelu")
        weight = replicated(self.weight, placing.mesh, placing.summed)
        return placed(torch.prelu(local_of(input), weight), placing, input.shape)


_SPLIT: dict[type[nn.Module], type[nn.Module]] = {
    nn.ConvTranspose3d: SplitConvTranspose3d,
    ours.ConvTranspose3d: SplitOurs,
    ours.ConvTranspose3dReLU: SplitOursReLU,
    ours.ConvTranspose3dReLUGroupNorm: SplitOursReLUGroupNorm,
    nn.Conv3d: SplitConv3d,
    nn.MaxPool3d: SplitMaxPool3d,
    nn.AvgPool3d: SplitAvgPool3d,
    nn.GroupNorm: SplitGroupNorm,
    nn.InstanceNorm3d: SplitInstanceNorm3d,
    nn.BatchNorm3d: SplitBatchNorm3d,
    nn.PReLU: SplitPReLU,
}
_DONE = tuple(_SPLIT.values())

# Layers that DTensor computes element by element.
_POINTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
    nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
)  # fmt: skip
_CONTAINERS = (nn.Sequential, FusedSequential, nn.ModuleList, nn.ModuleDict)


def _why_left(layer: nn.Module) -> str | None:
    """Returns why a layer cannot compute a split volume, or None if it can."""
    kind = parametrize.type_before_parametrizations(layer)
    if isinstance(layer, _DONE) or kind in _POINTWISE or kind in _CONTAINERS:
        return None
    if kind in _SPLIT:
        return _why_settings(layer)
    for base in _SPLIT:
        if isinstance(layer, base):
            return f"it is a subclass of {base.__name__}, and what it changes would be lost"
    if kind in (nn.Softmax, nn.LogSoftmax):
        return None if layer.dim == 1 else f"it normalizes over dimension {layer.dim}, not over the channels (dim=1)"
    if isinstance(layer, (nn.Dropout, nn.Dropout3d)):
        return None if layer.p == 0 else "ranks would draw their own masks: set p=0"
    if kind.__module__.startswith("torch.nn.modules"):
        return "nothing is known about how to split it"
    if layer._parameters:
        return "it has parameters of its own, which its code would mix with split volumes"
    return None  # a module of the user: its code runs on DTensors


def _why_settings(layer: Any) -> str | None:
    """Returns why a layer of a known class cannot be split, or None if it can."""
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        return f"padding_mode={layer.padding_mode!r} reads rows of the volume's other end"
    if isinstance(layer, nn.MaxPool3d) and layer.return_indices:
        return "return_indices=True would return indices into shards"
    if isinstance(layer, nn.InstanceNorm3d) and layer.track_running_stats:
        return "track_running_stats=True is not supported for InstanceNorm3d"
    return None


# ---- whole models


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    dim: Dimension | Sequence[Dimension] = 2,
    *,
    report: Callable[[SplitReport], object] | None = None,
) -> Model:
    """Makes the model compute volumes that are split over a mesh, in place, and returns the model.

    `dim` is the tensor's dimension that the mesh splits: 2, 3 or 4, or "depth", "height" or "width"; one for each
    mesh dimension. The model then takes DTensors with that placement, and plain tensors (N, C, D, H, W) that every
    rank has, of which each rank takes its shard; it returns DTensors. Parameters and buffers become those of the
    mesh's first rank. Layers that cannot be split raise `CannotSplit`, which names all of them, before anything is
    changed.
    """
    checks.check_model(model, "parallelize")
    checks.check_callable(report, "report", "parallelize")
    placements = _placements(mesh, dim)
    found = plan_split(model)
    if report is not None:
        report(found)
    if found.left:
        raise CannotSplit(found.left)
    _broadcast(model, mesh)
    for layer in model.modules():
        kind = parametrize.type_before_parametrizations(layer)
        if kind in _SPLIT:
            layer.__class__ = rebased(type(layer), kind, _SPLIT[kind])
    model.register_forward_pre_hook(_ShardInputs(mesh, placements), with_kwargs=True, prepend=True)
    return model


def plan_split(model: nn.Module) -> SplitReport:
    """Returns what `parallelize` would do to the model, without changing it."""
    split, left = [], []
    for place, layer in model.named_modules():
        inside = isinstance(model.get_submodule(place.rpartition(".")[0]), ours.ConvTranspose3dReLUGroupNorm)
        if place and inside:
            continue  # the block computes its children's part itself
        kind = parametrize.type_before_parametrizations(layer)
        reason = _why_left(layer)
        if reason is not None:
            left.append(SplitLayer(place, kind.__name__, reason))
        elif kind in _SPLIT:
            split.append(SplitLayer(place, kind.__name__))
    return SplitReport(tuple(split), tuple(left))


def _placements(mesh: DeviceMesh, dim: Dimension | Sequence[Dimension]) -> tuple[Shard, ...]:
    dims = [dim] if isinstance(dim, (int, str)) else list(dim)
    if len(dims) != mesh.ndim:
        raise ValueError(f"expected one dimension for each of the mesh's {mesh.ndim} dimensions, got dim={dim!r}")
    numbers = [NAMES.index(each) + 2 if each in NAMES else each for each in dims]
    if any(each not in (2, 3, 4) for each in numbers) or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"expected dim to name depth, height or width (2, 3 or 4), each at most once, but got dim={dim!r}"
        )
    return tuple(Shard(int(each)) for each in numbers)


def _broadcast(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives all ranks the parameters and buffers of the mesh's first rank, as DistributedDataParallel does."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, DTensor):
            continue
        for mesh_dim in range(mesh.ndim):
            group = mesh.get_group(mesh_dim)
            dist.broadcast(tensor.detach(), dist.get_global_rank(group, 0), group)


@dataclass(frozen=True)
class _ShardInputs:
    """Turns a model's plain inputs (N, C, D, H, W) into DTensors, of which this rank holds its shard."""

    mesh: DeviceMesh
    placements: tuple[Shard, ...]

    def __call__(self, model: nn.Module, arguments: Any, keywords: Any) -> tuple[Any, Any]:
        return tuple(map(self._shard, arguments)), {key: self._shard(value) for key, value in keywords.items()}

    def _shard(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.dim() != 5:
            return value
        return shard(value, self.mesh, self.placements)


def shard(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Shard]) -> DTensor:
    """Returns the DTensor of a tensor that every rank has, without messages: each rank takes its shard."""
    whole = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, list(placements))
