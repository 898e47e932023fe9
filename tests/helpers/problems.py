"""Makes problems for planners from the layers of tests, and names the GPUs that they are planned for."""

from __future__ import annotations

from layers import Layer

from tconv3d.planning.geometry import Geometry
from tconv3d.planning.problem import Device, Pass, Problem, bias_grad_problem, contiguous_strides

H200 = Device("H200", (9, 0), 132, 232448)
A100 = Device("A100", (8, 0), 108, 166912)


def geometry(layer: Layer) -> Geometry:
    settings = (layer.padding, layer.output_padding, layer.groups, layer.dilation)
    return Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, layer.stride, *settings)


def problem(
    layer: Layer, which: Pass, dtype: str = "float32", tf32: bool = True, size: tuple[int, ...] | None = None
) -> Problem:
    g = geometry(layer)
    size = size or layer.size
    shapes = (
        (layer.batch, layer.in_channels, *size),
        (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel),
        (layer.batch, layer.out_channels, *g.output_size(size)),
    )
    x, w, y = (contiguous_strides(shape) for shape in shapes)
    return Problem(which, g, layer.batch, size, dtype, x, w, y, tf32=tf32)


def problems(layer: Layer, dtype: str = "float32") -> dict[Pass, Problem]:
    """Returns the problems of the three gradients of a layer."""
    g = geometry(layer)
    out = g.output_size(layer.size)
    shapes = ((layer.batch, g.in_channels, *layer.size), (g.in_channels, g.out_per_group, *layer.kernel))
    x, w, y = map(contiguous_strides, (*shapes, (layer.batch, g.out_channels, *out)))
    both = (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)
    found = {which: Problem(which, g, layer.batch, layer.size, dtype, x, w, y, tf32=True) for which in both}
    return found | {Pass.BIAS_GRAD: bias_grad_problem(layer.batch, g.out_channels, out, dtype, y)}
