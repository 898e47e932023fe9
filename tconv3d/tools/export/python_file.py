"""Writes the exported Python file of a task or a layer from its operations."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ... import __version__
from .. import tasks
from ..bench.layers import Layer
from .cuda_source import cuda_source
from .host_source import function_names, host_source
from .passes import EPS, Operation

FILE = '''"""{title}

{settings}.
One file: PyTorch 2.9 or newer, nvcc and a C++ compiler are all it needs.

    model = ModelNew(*get_init_inputs()).cuda()
    y = model(*(x.cuda() for x in get_inputs()))

Written by tconv3d {version}:

    {command}

The kernels below are those that the library runs for this layer, with its constants filled in and what it does not
use left out. They are compiled when they are first needed, for the GPU at hand, by load_inline; PyTorch's own
operators compute nothing. The shape of the input is fixed. Types: {precisions}.
Layouts: {layout_names}. GPUs: compute capability 8.0 and up, 9.0 (Hopper) by its own instructions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.cpp_extension import load_inline

SHAPE = {shape}  # of the input: [N, C_in, D, H, W]
SETTINGS = {{
{layer_settings}}}
{norm_settings}DTYPES = ({dtypes})
LAYOUTS = {{{layouts}}}
DEVICE = "cuda"


{model}


def get_inputs() -> list[Tensor]:
    return [torch.randn(SHAPE)]


{get_init_inputs}


# ---- The operation, with its gradients.


{operation}


def check(x: Tensor, layer: nn.ConvTranspose3d) -> None:
    given = {{name: getattr(layer, name) for name in SETTINGS if name != "bias"}}
    given["bias"] = layer.bias is not None
    if given != SETTINGS:
        raise ValueError(f"this file was exported for {{SETTINGS}}, got {{given}}")
    if tuple(x.shape) != SHAPE:
        raise ValueError(f"this file was exported for inputs of shape {{SHAPE}}, got {{tuple(x.shape)}}")
    if x.device.type != DEVICE or layer.weight.device != x.device:
        found = f"{{x.device}} and {{layer.weight.device}}"
        raise ValueError(f"expected input and parameters on one {{DEVICE}} device, got {{found}}")


def layout_of(x: Tensor) -> str:
    last = not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)
    return "channels_last_3d" if last and "channels_last_3d" in LAYOUTS else next(iter(LAYOUTS))


def ready(tensor: Tensor, layout: str) -> Tensor:
    """The tensor as the kernels read it: in one of the layouts, at an address that is a multiple of 16 bytes."""
    tensor = written(tensor).contiguous(memory_format=LAYOUTS[layout])
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.preserve_format)


def dense(vector: Tensor) -> Tensor:
    return written(vector).contiguous()


def written(tensor: Tensor) -> Tensor:
    """The tensor with its elements in memory: PyTorch may have left out a minus sign (z.conj().imag) or zeros."""
    return tensor.clone() if tensor.is_neg() or tensor._is_zerotensor() else tensor


def check_types(*tensors: Tensor) -> None:
    if tensors[0].dtype not in DTYPES or len({{tensor.dtype for tensor in tensors}}) > 1:
        found = ", ".join(str(tensor.dtype) for tensor in tensors)
        raise TypeError(f"expected input and parameters of one type among {{DTYPES}}, got {{found}}")


def precision_of(dtype: torch.dtype) -> str:
    """float32 follows PyTorch's switch for convolutions, torch.backends.cudnn.conv.fp32_precision."""
    if dtype is torch.float32:
        return "tf32" if torch.backends.cudnn.conv.fp32_precision == "tf32" else "float32"
    return str(dtype).removeprefix("torch.")


def compiled(x: Tensor, layout: str) -> Any:
    return extension(x.get_device(), precision_of(x.dtype), layout)


@functools.cache
def extension(device: int, precision: str, layout: str) -> Any:
    """The kernels for one GPU, precision and layout."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise RuntimeError(f"compute capability 8.0 or higher expected, got {{major}}.{{minor}}")
    hopper = (major, minor) == (9, 0)
    arch = "90a" if hopper else f"{{major}}{{minor}}"
    defines = [f"-DFOR_{{name.upper()}}" for name in (precision, layout, *(["hopper"] if hopper else []))]
    return load_inline(
        name=f"{name}_{{precision}}_{{layout}}_sm{{arch}}",
        cpp_sources=[CPP_SOURCE],
        cuda_sources=[CUDA_SOURCE],
        functions=[{functions}],
        extra_cflags=["-O2", *defines],
        extra_cuda_cflags=["-O3", "-std=c++20", f"-gencode=arch=compute_{{arch}},code=sm_{{arch}}", *defines],
        no_implicit_headers=True,
    )


# ---- The sources.

CPP_SOURCE = r"""
{cpp}"""

CUDA_SOURCE = r"""
{cuda}"""
'''

CONVOLUTION = '''def convolve(x: Tensor, layer: nn.ConvTranspose3d) -> Tensor:
    """layer(x), by the kernels of this file."""
    check(x, layer)
    tensors = [x, layer.weight{bias}]
    if torch.is_autocast_enabled(DEVICE):
        tensors = [tensor.to(torch.get_autocast_dtype(DEVICE)) for tensor in tensors]
    check_types(*tensors)
    return Convolution.apply(*tensors)


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor{bias_parameter}) -> Tensor:
        layout = layout_of(x)
        x, weight = ready(x, layout), ready(weight, layout)
        ctx.layout = layout
        ctx.save_for_backward(x, weight)
        return compiled(x, layout).forward(x, weight{bias_argument})

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = ready(dy, ctx.layout)
        kernels = compiled(dy, ctx.layout)
        wanted = ctx.needs_input_grad
{together}        return (
            kernels.input_grad(dy, weight) if wanted[0] else None,
            kernels.weight_grad(dy, x) if wanted[1] else None,
{bias_gradient}        )'''
BLOCK = '''def block(x: Tensor, layer: nn.ConvTranspose3d, norm: nn.GroupNorm) -> Tensor:
    """norm(relu(layer(x))), by the kernels of this file."""
    check(x, layer)
    given = {{name: getattr(norm, name) for name in NORM_SETTINGS}}
    if given != NORM_SETTINGS:
        raise ValueError(f"this file was exported for a GroupNorm of {{NORM_SETTINGS}}, got {{given}}")
    if torch.is_autocast_enabled(DEVICE):
        raise RuntimeError("this file does not know autocast: cast input and parameters to one type")
    tensors = [x, layer.weight{bias}, norm.weight, norm.bias]  # the norm's: scale and shift
    check_types(*tensors)
    return Block.apply(*tensors)


class Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor{bias_parameter}, scale: Tensor, shift: Tensor) -> Tensor:
        layout = layout_of(x)
        x, weight, scale, shift = ready(x, layout), ready(weight, layout), dense(scale), dense(shift)
        kernels = compiled(x, layout)
        hidden, statistics = kernels.forward(x, weight{bias_argument})  # after the ReLU
        if not any(ctx.needs_input_grad):
            return kernels.normalize_(hidden, statistics, scale, shift)
        ctx.layout = layout
        ctx.save_for_backward(x, weight, hidden, statistics, scale)
        return kernels.normalize(hidden, statistics, scale, shift)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, hidden, statistics, scale = ctx.saved_tensors
        dy = ready(dy, ctx.layout)
        kernels = compiled(dy, ctx.layout)
        # dz: of what went into the ReLU.
        dz, dparameters{dbias} = kernels.norm_grad(dy, hidden, statistics, scale)
        wanted = ctx.needs_input_grad
{together}        return (
            kernels.input_grad(dz, weight) if wanted[0] else None,
            kernels.weight_grad(dz, x) if wanted[1] else None,
{bias_gradient}            *dparameters,
        )'''

LAYER_CONSTRUCTOR = """    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
{norm_parameter}        stride: int | tuple[int, int, int] = 1,
        padding: int | tuple[int, int, int] = 0,
        output_padding: int | tuple[int, int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int, int] = 1,
    ) -> None:
        super().__init__()
        self.{attribute} = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            groups=groups,
            bias=bias,
            dilation=dilation,
        )
{norm_module}"""
MODEL = '''class ModelNew(nn.Module):
    """{comment}"""

{constructor}
    def forward(self, x: Tensor) -> Tensor:
        return {call}'''


def python_file(name: str, layer: Layer, operations: Sequence[Operation], command: str, emulated: bool) -> str:
    """Returns the text of the file; `name` is the name of a task or a layer."""
    dtypes = list(dict.fromkeys(v.precision for v in operations[0].plans if v.precision != "tf32"))
    layouts = list(dict.fromkeys(v.layout for v in operations[0].plans))
    task = tasks.load(name) if name in tasks.NAMES else None
    cuda, host = cuda_source(operations, emulated=emulated), host_source(operations)
    formats = {"contiguous": "torch.contiguous_format", "channels_last_3d": "torch.channels_last_3d"}
    return FILE.format(
        title=_title(name, layer, task),
        settings=_sentence(str(layer)),
        command=command,
        version=__version__,
        precisions=", ".join(dtypes),
        layout_names=", ".join(layouts),
        shape=layer.input_shape,
        layer_settings=_settings(layer),
        norm_settings=_norm_settings(layer),
        dtypes=", ".join(f"torch.{dtype}" for dtype in dtypes) + ("," if len(dtypes) == 1 else ""),
        layouts=", ".join(f'"{layout}": {formats[layout]}' for layout in layouts),
        model=_model(layer, task),
        get_init_inputs=_get_init_inputs(layer, task),
        operation=_operation(layer, any(each.name == "backward" for each in operations)),
        name=f"{name}_{hashlib.sha256((cuda + host).encode()).hexdigest()[:8]}",
        functions=", ".join(f'"{name}"' for name in function_names(operations)),
        cpp=host,
        cuda=cuda,
    )


def _title(name: str, layer: Layer, task: Any) -> str:
    if isinstance(task, ModuleType) and task.__doc__:
        return _sentence(task.__doc__.strip().splitlines()[0])
    what = "One transposed 3D convolution" + (", ReLU and GroupNorm" if layer.norm_groups else "")
    return f"{what}." if name == "layer" else f"{what}: {name}."


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _operation(layer: Layer, together: bool) -> str:
    """Writes the autograd function; with `together` it computes all gradients by one call if all are wanted."""
    if layer.norm_groups:
        gradient = "            dbias if wanted[2] else None,\n" if layer.bias else ""
        dbias = "dbias if wanted[2] else None, " if layer.bias else ""
        at_once = f"""        if wanted[0] and wanted[1]:
            return *kernels.backward(dz, x, weight), {dbias}*dparameters
"""
    else:
        gradient = "            kernels.bias_grad(dy) if wanted[2] else None,\n" if layer.bias else ""
        at_once = """        if all(wanted):
            return kernels.backward(dy, x, weight)
"""
    return (BLOCK if layer.norm_groups else CONVOLUTION).format(
        bias=", layer.bias" if layer.bias else "",
        bias_parameter=", bias: Tensor" if layer.bias else "",
        bias_argument=", dense(bias)" if layer.bias else "",
        bias_gradient=gradient,
        together=at_once if together else "",
        dbias=", dbias" if layer.bias else "",
    )


def _settings(layer: Layer) -> str:
    values = {
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "kernel_size": layer.kernel,
        "stride": layer.stride,
        "padding": layer.padding,
        "output_padding": layer.output_padding,
        "groups": layer.groups,
        "dilation": layer.dilation,
        "bias": layer.bias,
    }
    return "".join(f'    "{name}": {value!r},\n' for name, value in values.items())


def _norm_settings(layer: Layer) -> str:
    if not layer.norm_groups:
        return ""
    channels = layer.out_channels
    values = f'"num_groups": {layer.norm_groups}, "num_channels": {channels}, "eps": {EPS}, "affine": True'
    return f"NORM_SETTINGS = {{{values}}}\n"


def _model(layer: Layer, task: Any) -> str:
    """Writes the class `ModelNew`, with the constructor of the task's model if there is a task."""
    if task is None:
        attribute, norm = ("conv_transpose", "group_norm") if layer.norm_groups else ("conv_transpose3d", "")
        constructor = LAYER_CONSTRUCTOR.format(
            attribute=attribute,
            norm_parameter="        num_groups: int,\n" if norm else "",
            norm_module=f"        self.{norm} = nn.GroupNorm(num_groups, out_channels)\n" if norm else "",
        )
        comment = "The parameters and their names are those of PyTorch's layers."
    else:
        source = inspect.getsource(task.Model.__init__)
        constructor = source.replace("self.Layer(", "nn.ConvTranspose3d(")
        attribute, norm = (_attribute(constructor, kind) for kind in ("ConvTranspose3d", "GroupNorm"))
        comment = "The task's model. Parameters, their names and their first values are those of PyTorch's layers."
    call = f"block(x, self.{attribute}, self.{norm})" if norm else f"convolve(x, self.{attribute})"
    return MODEL.format(comment=comment, constructor=constructor, call=call)


def _attribute(constructor: str, kind: str) -> str:
    """Returns the attribute to which a constructor assigns its layer of some kind, or an empty text without one."""
    found = re.search(rf"self\.(\w+) = nn\.{kind}\(", constructor)
    return found.group(1) if found else ""


def _get_init_inputs(layer: Layer, task: Any) -> str:
    if task is not None:
        return inspect.getsource(task.get_init_inputs).strip()
    values = (
        *(layer.in_channels, layer.out_channels, layer.kernel),
        *((layer.norm_groups,) if layer.norm_groups else ()),
        *(layer.stride, layer.padding, layer.output_padding, layer.groups, layer.bias, layer.dilation),
    )
    return f"def get_init_inputs() -> list[Any]:\n    return [{', '.join(map(repr, values))}]"
