"""Names and geometries of the halo benches' layers and builds. Needs neither a GPU nor PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from layers import Layer

from tconv3d.geometry import Geometry, Triple
from tconv3d.halo_planner import Build


def triple(value: int | Triple) -> Triple:
    return (value, value, value) if isinstance(value, int) else value


def geometry_of(layer: Layer) -> Geometry:
    stride, padding, output_padding = (triple(v) for v in (layer.stride, layer.padding, layer.output_padding))
    return Geometry.make(
        layer.in_channels, layer.out_channels, triple(layer.kernel), stride, padding, output_padding, layer.groups,
        triple(layer.dilation),
    )  # fmt: skip


def describe(build: Build) -> str:
    panels = "resident" if build.resident else f"{build.slots} slots"
    apart = "".join(name for name, apart in zip("dhw", build.split, strict=True) if apart)
    how = "gather" if build.gather else "march" if build.march else f"split {apart}"
    return (
        f"{how}, {build.columns} columns (unit {build.program.unit} x {build.out_tile}), row {build.row_bytes}, "
        f"{build.slabs} slabs, {build.producers}+{build.consumers}, {build.stages} stages, {panels}"
    )
