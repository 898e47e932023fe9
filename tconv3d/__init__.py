"""tconv3d: transposed 3D convolution on CUDA kernels of its own, a drop-in for PyTorch's."""

import importlib
from typing import Any

import torch

from .api import compiling
from .api.accelerate import LayerSwap, SwapReport, accelerate, plan_swaps, restore
from .api.ahead import compile_ahead
from .api.explain import explain
from .api.explanation import Explanation
from .api.functional import conv_transpose3d, conv_transpose3d_relu, conv_transpose3d_relu_group_norm
from .api.fuse import FusedTail, FuseReport, fuse
from .api.modules import ConvTranspose3d, ConvTranspose3dReLU, ConvTranspose3dReLUGroupNorm
from .api.precompile import Precompiled, load_precompiled, precompile
from .api.tune import Tuned, tune
from .runtime import launcher
from .torch_ops import flops, subclasses
from .torch_ops.backend import current_backend, use_backend
from .torch_ops.choosing import measure_offers
from .torch_ops.decompositions import decompositions
from .torch_ops.kept import keep_weights
from .torch_ops.problems import allow_tf32_in_groups

__all__ = [
    "ConvTranspose3d",
    "ConvTranspose3dReLU",
    "ConvTranspose3dReLUGroupNorm",
    "Explanation",
    "FuseReport",
    "FusedTail",
    "LayerSwap",
    "Precompiled",
    "SwapReport",
    "Tuned",
    "accelerate",
    "allow_tf32_in_groups",
    "compile_ahead",
    "conv_transpose3d",
    "conv_transpose3d_relu",
    "conv_transpose3d_relu_group_norm",
    "current_backend",
    "decompositions",
    "explain",
    "fuse",
    "keep_weights",
    "load_precompiled",
    "measure_offers",
    "plan_swaps",
    "precompile",
    "restore",
    "tune",
    "use_backend",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports `tconv3d.distributed` when it is first asked for, because `torch.distributed.tensor` takes long."""
    if name == "distributed":
        return importlib.import_module(".distributed", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The operators' rules for DTensors are loaded when a program that has imported DTensors first calls an operator.
subclasses.when_imported("torch.distributed.tensor", lambda: importlib.import_module("tconv3d.distributed.rules"))

# Inductor calls this library's pass from the first compiled call of an operator on.
subclasses.when_imported("torch._inductor.config", compiling.install_pass)
flops.when_imported("torch._dynamo.backends.registry", compiling.register_backend)

if torch.version.cuda is not None:  # imports the launcher's modules now, not in the first call
    launcher.preload()
