"""Writes references for what has none: the tasks, and layers by name or in the words of PyTorch's constructor."""

from __future__ import annotations

import inspect
import textwrap
from types import ModuleType

from .. import tasks
from ..bench.layers import Layer

TEXT = '''"""{title}"""


class Model(nn.Module):
    """{comment}"""

{constructor}
    def forward(self, x: Tensor) -> Tensor:
        return {call}


def get_inputs() -> list[Tensor]:
    return [torch.randn({shape})]


{get_init_inputs}
'''
CONSTRUCTOR = """    def __init__(
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
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation
        )
{norm_module}"""
_BLOCK = "self.group_norm(torch.relu(self.conv_transpose(x)))"


def of_task(name: str) -> str:
    """Returns the reference of a task: its constructor and inputs, on PyTorch's layers."""
    task = tasks.load(name)
    assert isinstance(task, ModuleType)
    constructor = inspect.getsource(task.Model.__init__).replace("self.Layer(", "nn.ConvTranspose3d(")
    has_norm = "nn.GroupNorm(" in constructor
    return TEXT.format(
        title=(task.__doc__ or "").strip().splitlines()[0],
        comment="The task's model. Parameters, their names and their first values are those of PyTorch's layers.",
        constructor=constructor,
        call=_BLOCK if has_norm else "self.conv_transpose3d(x)",
        shape=f"{task.SHAPE}",
        get_init_inputs=inspect.getsource(task.get_init_inputs).strip(),
    )


def of_layer(layer: Layer, name: str = "") -> str:
    """Returns the reference of a layer: PyTorch's constructor, with the groups of a norm behind the kernel."""
    attribute = "conv_transpose" if layer.norm_groups else "conv_transpose3d"
    what = "One transposed 3D convolution" + (", ReLU and GroupNorm" if layer.norm_groups else "")
    norm = "        self.group_norm = nn.GroupNorm(num_groups, out_channels)\n"
    channels, settings = list(layer.arguments.values())[:3], list(layer.arguments.values())[3:]
    values = [*channels, *([layer.norm_groups] if layer.norm_groups else []), *settings]
    inputs = f"def get_init_inputs() -> list[Any]:\n    return [{', '.join(map(repr, values))}]"
    return TEXT.format(
        title=f"{what}: {name}." if name else f"{what}.",
        comment="The parameters and their names are those of PyTorch's layers.",
        constructor=CONSTRUCTOR.format(
            attribute=attribute,
            norm_parameter="        num_groups: int,\n" if layer.norm_groups else "",
            norm_module=norm if layer.norm_groups else "",
        ),
        call=_BLOCK if layer.norm_groups else "self.conv_transpose3d(x)",
        shape=f"{layer.input_shape}",
        get_init_inputs=textwrap.dedent(inputs),
    )
