"""Styles for PyTorch's `parallelize_module` that divide the channels of transposed convolutions between ranks.

    parallelize_module(decoder, mesh, {"up1": ColwiseParallel(), "up2": RowwiseParallel()})

PyTorch's own styles of these names know `nn.Linear` and `nn.Embedding`. A style says where parameters, input and
output of a layer lie; the operators' rules (`rules`) do the rest. This module must not know how an operator runs on
DTensors.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..api.modules import ConvTranspose3d, ConvTranspose3dReLUGroupNorm
from . import rules


class _ChannelStyle(ParallelStyle):
    """Divides the channels of a layer: `ConvTranspose3d`, `ConvTranspose3dReLU` or `ConvTranspose3dReLUGroupNorm`.

    `input_layouts` is the placement of an input that arrives as a plain tensor, `output_layouts` the placement that
    the output is given. With `use_local_output` (the default) the output is this rank's plain tensor.
    """

    split: ClassVar[str]  # the name of the split in `rules.SPLITS`
    input_placement: ClassVar[Placement]
    default_output: ClassVar[Placement]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or self.input_placement
        self.output_layouts = output_layouts or self.default_output
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        convolution = module.conv_transpose if isinstance(module, ConvTranspose3dReLUGroupNorm) else module
        self._check(module, convolution, device_mesh)
        prepare_output: Any = self._prepare_output  # PyTorch declares that the result is None, but uses it
        return distribute_module(module, device_mesh, self._divide, self._prepare_input, prepare_output)

    def _check(self, module: nn.Module, convolution: nn.Module, mesh: DeviceMesh) -> None:
        name, ranks = type(self).__name__, mesh.size()
        if mesh.ndim != 1:
            raise ValueError(f"{name} expected a mesh of 1 dimension, but got {mesh.ndim} dimensions")
        if not isinstance(convolution, ConvTranspose3d):
            advice = ": call tconv3d.accelerate(model) first" if isinstance(module, nn.ConvTranspose3d) else ""
            raise NotImplementedError(f"{name} expected a layer of tconv3d, but got {type(module).__name__}{advice}")
        counts = {"groups": convolution.groups, **self._divided(convolution)}
        if isinstance(module, ConvTranspose3dReLUGroupNorm):
            self._check_norm(ranks)
            counts["the GroupNorm's num_groups"] = module.group_norm.num_groups
        if (self.split == "groups") != (convolution.groups > 1):
            right = "GroupwiseParallel" if convolution.groups > 1 else "ColwiseParallel or RowwiseParallel"
            raise ValueError(f"{name} cannot divide a layer with groups={convolution.groups}: use {right}")
        for what, count in counts.items():
            if count % ranks and not (what == "groups" and count == 1):
                raise ValueError(f"{name} expected {what} to be divisible by {ranks} ranks, but got {count}")

    def _divided(self, convolution: ConvTranspose3d) -> dict[str, int]:
        return {"out_channels": convolution.out_channels}

    def _check_norm(self, ranks: int) -> None:
        """Raises if this style cannot divide a block with a GroupNorm."""

    def _divide(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        """Distributes the parameters that a module has itself."""
        places = rules.SPLITS[self.split]
        if isinstance(module, ConvTranspose3d):
            wanted = {"weight": places["w"], "bias": places["b"]}
        else:
            wanted = {"weight": places.get("v", Replicate()), "bias": places.get("v", Replicate())}
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = Replicate() if wanted[key].is_partial() else wanted[key]
            divided = distribute_tensor(parameter, mesh, [placement], src_data_rank=self.src_data_rank)
            module.register_parameter(key, nn.Parameter(divided, requires_grad=parameter.requires_grad))

    def _prepare_input(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        """Gives the first input of a layer the placement that the style needs."""
        input = inputs[0]
        if not isinstance(input, DTensor):
            input = DTensor.from_local(input, mesh, [self.input_layouts], run_check=False)
        return (input.redistribute(mesh, [self.input_placement]), *inputs[1:])

    def _prepare_output(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        placed: DTensor = output.redistribute(mesh, [self.output_layouts])
        return placed.to_local() if self.use_local_output else placed


class ColwiseParallel(_ChannelStyle):
    """Divides the output channels of a layer with groups=1. The input is replicated, the output is `Shard(1)`.

    A `ConvTranspose3dReLUGroupNorm` needs `num_groups` divisible by the number of ranks.
    """

    split = "output channels"
    input_placement = Replicate()
    default_output = Shard(1)


class RowwiseParallel(_ChannelStyle):
    """Divides the input channels of a layer with groups=1. The input is `Shard(1)`, the output is summed up.

    A `ConvTranspose3dReLUGroupNorm` is refused, because ReLU and GroupNorm need the sum over all ranks.
    """

    split = "input channels"
    input_placement = Shard(1)
    default_output = Replicate()

    def _divided(self, convolution: ConvTranspose3d) -> dict[str, int]:
        return {"in_channels": convolution.in_channels}

    def _check_norm(self, ranks: int) -> None:
        raise NotImplementedError(
            "RowwiseParallel cannot divide a ConvTranspose3dReLUGroupNorm: the convolution's result is a partial "
            "sum, which must be added up before ReLU and GroupNorm. Use ConvTranspose3d with RowwiseParallel, then "
            "ReLU and GroupNorm"
        )


class GroupwiseParallel(_ChannelStyle):
    """Divides the groups of a layer with groups > 1. Input and output are `Shard(1)`, and nothing is communicated."""

    split = "groups"
    input_placement = Shard(1)
    default_output = Shard(1)
