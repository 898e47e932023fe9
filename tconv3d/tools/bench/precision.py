"""Lists the precisions of the benchmark, and sets PyTorch's switches for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

DTYPES = {
    "tf32": torch.float32,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
# Largest accepted relative error of a whole tensor against float64: a few roundings of a product or of the result.
TOLERANCE = {"tf32": 1e-3, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1e-2, "float64": 1e-13}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last_3d": torch.channels_last_3d}


def in_layout(module: nn.Module, layout: str) -> nn.Module:
    """Converts the five-dimensional parameters of a module to a memory format, in place, and returns the module.

    `nn.Module.to` would refuse a module that also has four-dimensional parameters.
    """
    for parameter in module.parameters():
        if parameter.dim() == 5:
            parameter.data = parameter.data.contiguous(memory_format=LAYOUTS[layout])
    return module


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """Makes convolutions and matrix products of float32 tensors run in TF32 for "tf32", else in strict float32."""
    convolution, product = torch.backends.cudnn.conv, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = convolution.fp32_precision, product.fp32_precision
    convolution.fp32_precision = product.fp32_precision = "tf32" if name == "tf32" else "ieee"
    try:
        yield
    finally:
        convolution.fp32_precision, product.fp32_precision = before
