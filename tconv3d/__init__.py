"""tconv3d: transposed 3D convolution on CUDA kernels of its own, a drop-in for PyTorch's."""

from .accelerate import LayerSwap, SwapReport, accelerate, plan_swaps, restore
from .backend import current_backend, use_backend
from .explain import Explanation, explain
from .functional import conv_transpose3d
from .modules import ConvTranspose3d

__all__ = [
    "ConvTranspose3d",
    "Explanation",
    "LayerSwap",
    "SwapReport",
    "accelerate",
    "conv_transpose3d",
    "current_backend",
    "explain",
    "plan_swaps",
    "restore",
    "use_backend",
]

__version__ = "0.1.0"
