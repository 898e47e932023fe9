"""tconv3d: transposed 3D convolution on CUDA kernels of its own, a drop-in for PyTorch's."""

from .backend import current_backend, use_backend
from .explain import Explanation, explain
from .functional import conv_transpose3d
from .modules import ConvTranspose3d

__all__ = ["ConvTranspose3d", "Explanation", "conv_transpose3d", "current_backend", "explain", "use_backend"]

__version__ = "0.1.0"
