"""Defines the layers that `hypothesis` draws."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st
from layers import Layer, Triple

from tconv3d.planning.geometry import Geometry

# An axis is a kernel size, a stride, a padding, a dilation, and an upper limit of the output padding.
axis = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(1, 2), st.integers(0, 2))


@st.composite
def small_layers(
    draw: st.DrawFn, most: Triple, in_channels: st.SearchStrategy[int], out_channels: st.SearchStrategy[int] | None
) -> Layer:
    """Draws a layer with a batch of one and a volume up to `most`; it is depthwise if `out_channels` is None."""
    axes = draw(st.tuples(axis, axis, axis))
    kernel, stride, padding, dilation, extra = (tuple(values) for values in zip(*axes, strict=True))
    output_padding = tuple(min(e, max(s, d) - 1) for e, s, d in zip(extra, stride, dilation, strict=True))
    size = draw(st.tuples(*(st.integers(1, each) for each in most)))
    ins = draw(in_channels)
    outs, groups = (ins, ins) if out_channels is None else (draw(out_channels), 1)
    layer = Layer(ins, outs, size, kernel, stride, padding, output_padding, dilation, groups, batch=1)  # type: ignore[arg-type]
    geometry = Geometry.make(ins, outs, layer.kernel, *layer.settings)
    assume(min(geometry.output_size(layer.size)) >= 1)
    return layer
