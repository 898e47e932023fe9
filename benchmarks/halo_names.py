"""Makes names of the halo kernel's builds and geometries of layers, for planner_check.py and halo_fit.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.families.halo.build import Build
from tconv3d.planning.geometry import Geometry
from tconv3d.tools.bench.layers import Layer


def geometry_of(layer: Layer) -> Geometry:
    return Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, *layer.settings)


def describe(build: Build) -> str:
    panels = "resident" if build.resident else f"{build.slots} slots"
    apart = "".join(name for name, apart in zip("dhw", build.split, strict=True) if apart)
    how = "gather" if build.gather else "march" if build.march else f"split {apart}"
    return (
        f"{how}, {build.columns} columns (unit {build.program.unit} x {build.out_tile}), row {build.row_bytes}, "
        f"{build.slabs} slabs, {build.producers}+{build.consumers}, {build.stages} stages, {panels}"
        f"{', copied' if build.copied else ''}{', rewritten' if build.rewritten else ''}"
        f"{', lines' if build.lines else ''}{', joint' if build.joint else ''}"
        f"{', in registers' if build.in_registers else ''}"
        f"{f', {build.buffers} buffers' if build.buffers else ''}"
        f"{', fine' if build.fine else ''}{', divided' if build.divided else ''}"
        f"{', portioned' if build.portioned else ''}{f', {build.merged} groups as one' if build.merged > 1 else ''}"
    )
