"""`nn.Module` drop-ins: subclasses of PyTorch's own, with the arithmetic replaced.

Constructor, parameters, initialisation, `state_dict` and `extra_repr` are inherited, so a checkpoint or a
model definition cannot tell the difference. Knows nothing of kernels, devices or plans: it calls
`functional`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .functional import conv_transpose3d


def resolved_output_padding(
    layer: torch.nn.ConvTranspose3d, input: Tensor, output_size: list[int] | None
) -> tuple[int, ...]:
    """The layer's own output padding, or the one that gives `output_size`: one of those the stride allows."""
    if output_size is None:
        return layer.output_padding
    sizes: list[Any] = [layer.stride, layer.padding, layer.kernel_size, 3, layer.dilation]
    return tuple(layer._output_padding(input, output_size, *sizes))


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` on this library's kernels: same constructor and parameters."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Input (N, C_in, D, H, W) or (C_in, D, H, W). `output_size`: one of those the stride allows."""
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose3d")
        output_padding = resolved_output_padding(self, input, output_size)
        return conv_transpose3d(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,  # type: ignore[arg-type]  # declared for all convolutions; "same" is for others
            output_padding,
            self.groups,
            self.dilation,
        )
