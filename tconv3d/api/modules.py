"""`nn.Module` drop-ins: subclasses of PyTorch's layers with the arithmetic replaced, and a block of several layers.

Constructor, parameters, initialisation, `state_dict` and `extra_repr` are inherited, so checkpoints and model
definitions work unchanged. The block's children are layers for the same reason. This module calls `functional` and
knows nothing of kernels, devices or plans.

Every `forward` has a branch for TorchScript, which compiles that branch alone, and one for torch.fx (see `graphs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._jit_internal import is_scripting
from torch.fx import Proxy

from ..torch_ops import kept
from .functional import conv_transpose3d, conv_transpose3d_relu, conv_transpose3d_relu_group_norm
from .graphs import leaf, path_of, scripted_conv_transpose3d


def resolved_output_padding(
    layer: torch.nn.ConvTranspose3d, input: Tensor, output_size: list[int] | None
) -> tuple[int, ...]:
    """Returns the layer's output padding, or the output padding that gives `output_size` if the stride allows it."""
    if output_size is None:
        return layer.output_padding
    sizes: list[Any] = [layer.stride, layer.padding, layer.kernel_size, 3, layer.dilation]
    return tuple(layer._output_padding(input, output_size, *sizes))


def arguments(layer: torch.nn.ConvTranspose3d, input: Tensor, output_size: list[int] | None) -> tuple[Any, ...]:
    """Returns the arguments after `input` of a call of `functional`: the layer's parameters and settings."""
    if layer.padding_mode != "zeros":
        raise ValueError("Only `zeros` padding mode is supported for ConvTranspose3d")
    output_padding = resolved_output_padding(layer, input, output_size)
    return layer.weight, layer.bias, layer.stride, layer.padding, output_padding, layer.groups, layer.dilation


_Layer = TypeVar("_Layer", bound="ConvTranspose3d")


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """Runs `torch.nn.ConvTranspose3d` on this library's kernels, with the same constructor and parameters."""

    def train(self: _Layer, mode: bool = True) -> _Layer:
        """Switches between training and evaluation, and drops the packed weights of all layers.

        A training step may have written weights in ways that PyTorch's version counter misses (see `kept`).
        """
        kept.forget()
        return super().train(mode)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Takes an input (N, C_in, D, H, W) or (C_in, D, H, W). `output_size`: a size that the stride allows."""
        if is_scripting():
            result = self._scripted(input, output_size, False)
        elif isinstance(input, Proxy) and path_of(self, input):
            result = leaf(self, input, output_size)
        else:
            result = conv_transpose3d(input, *arguments(self, input, output_size))
        return result

    def _scripted(self, input: Tensor, output_size: list[int] | None, relu: bool) -> Tensor:
        """Runs the layer in TorchScript, which compiles this method."""
        stride, padding, kernel, dilation = self.stride, self.padding, self.kernel_size, self.dilation
        output_padding = self._output_padding(input, output_size, stride, padding, kernel, 3, dilation)  # type: ignore[arg-type]
        weight, bias, groups = self.weight, self.bias, self.groups
        return scripted_conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation, relu)  # type: ignore[arg-type]


class ConvTranspose3dReLU(ConvTranspose3d):
    """Runs `torch.nn.ConvTranspose3d` and a ReLU in one kernel, with the same constructor and parameters."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Takes an input (N, C_in, D, H, W) or (C_in, D, H, W). `output_size`: a size that the stride allows."""
        if is_scripting():
            result = self._scripted(input, output_size, True)
        elif isinstance(input, Proxy) and path_of(self, input):
            result = leaf(self, input, output_size)
        else:
            result = conv_transpose3d_relu(input, *arguments(self, input, output_size))
        return result


def convolve_relu_group_norm(
    convolution: torch.nn.ConvTranspose3d,
    norm: torch.nn.GroupNorm,
    input: Tensor,
    output_size: list[int] | None = None,
) -> Tensor:
    """Runs convolution, ReLU and GroupNorm in two passes over memory, with the parameters of two layers."""
    weight, bias, *settings = arguments(convolution, input, output_size)
    return conv_transpose3d_relu_group_norm(
        input, weight, bias, norm.num_groups, norm.weight, norm.bias, norm.eps, *settings
    )


class ConvTranspose3dReLUGroupNorm(torch.nn.Module):
    """Runs ConvTranspose3d, ReLU and GroupNorm in two passes over memory.

    The children `conv_transpose` and `group_norm` hold parameters and settings, so the `state_dict` is that of a
    model with these two layers. The children are not called, so hooks on them do not run.

    `groups` belongs to the convolution, `num_groups` to the norm.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        num_groups: int,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Sequence[int] = 1,
        padding_mode: str = "zeros",
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        settings: list[Any] = [stride, padding, output_padding, groups, bias, dilation, padding_mode, device, dtype]
        self.conv_transpose = ConvTranspose3d(in_channels, out_channels, kernel_size, *settings)  # type: ignore[arg-type]
        self.group_norm = torch.nn.GroupNorm(num_groups, out_channels, eps, affine, device=device, dtype=dtype)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Takes an input (N, C_in, D, H, W). `output_size`: a size that the stride allows."""
        if is_scripting():
            result = self.group_norm(torch.relu(self.conv_transpose(input, output_size)))
        elif isinstance(input, Proxy) and path_of(self, input):
            result = leaf(self, input, output_size)
        else:
            result = convolve_relu_group_norm(self.conv_transpose, self.group_norm, input, output_size)
        return result
