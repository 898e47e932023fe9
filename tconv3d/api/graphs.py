"""What TorchScript and torch.fx see of the layers: a function that TorchScript compiles, and leaves of a graph.

This module knows the operators by name and nothing of how they are computed.
"""

from __future__ import annotations

from typing import Any, List, Optional  # noqa: UP035

import torch
from torch import Tensor, nn
from torch.fx import Proxy

# ---- TorchScript, which compiles these functions: it reads no newer syntax for types than this, and calls operators


def scripted_conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],  # noqa: UP045
    stride: List[int],  # noqa: UP006
    padding: List[int],  # noqa: UP006
    output_padding: List[int],  # noqa: UP006
    groups: int,
    dilation: List[int],  # noqa: UP006
    relu: bool,
) -> Tensor:
    batched = input if input.dim() == 5 else input.unsqueeze(0)
    if relu:
        result = torch.ops.tconv3d.conv_transpose3d_relu(
            batched, weight, bias, stride, padding, output_padding, groups, dilation
        )
    else:
        result = torch.ops.tconv3d.conv_transpose3d(
            batched, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return result if input.dim() == 5 else result.squeeze(0)


# ---- torch.fx


def path_of(layer: nn.Module, input: Proxy) -> str:
    """Returns the name of the layer in the model that torch.fx traces; "" if it is the model itself, or unknown."""
    paths: dict[nn.Module, str] = getattr(input.tracer, "submodule_paths", None) or {}
    return paths.get(layer, "")


def leaf(layer: nn.Module, input: Proxy, output_size: Any) -> Any:
    """Records a call of the layer in torch.fx's graph, which does not look into it, as with PyTorch's layers."""
    keywords = {} if output_size is None else {"output_size": output_size}
    return input.tracer.create_proxy("call_module", path_of(layer, input), (input,), keywords)
