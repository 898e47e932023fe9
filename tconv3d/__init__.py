"""tconv3d: transposed 3D convolution on CUDA kernels of its own, a drop-in for PyTorch's."""

import torch

from .api.accelerate import LayerSwap, SwapReport, accelerate, plan_swaps, restore
from .api.ahead import compile_ahead
from .api.explain import Explanation, explain
from .api.functional import conv_transpose3d, conv_transpose3d_relu, conv_transpose3d_relu_group_norm
from .api.modules import ConvTranspose3d, ConvTranspose3dReLU, ConvTranspose3dReLUGroupNorm
from .api.precompile import Precompiled, load_precompiled, precompile
from .api.tune import Tuned, tune
from .runtime import launcher
from .torch_ops.backend import current_backend, use_backend
from .torch_ops.kept import keep_weights

__all__ = [
    "ConvTranspose3d",
    "ConvTranspose3dReLU",
    "ConvTranspose3dReLUGroupNorm",
    "Explanation",
    "LayerSwap",
    "Precompiled",
    "SwapReport",
    "Tuned",
    "accelerate",
    "compile_ahead",
    "conv_transpose3d",
    "conv_transpose3d_relu",
    "conv_transpose3d_relu_group_norm",
    "current_backend",
    "explain",
    "keep_weights",
    "load_precompiled",
    "plan_swaps",
    "precompile",
    "restore",
    "tune",
    "use_backend",
]

__version__ = "0.1.0"

if torch.version.cuda is not None:  # imports the launcher's modules now, not in the first call
    launcher.preload()
