"""Makes names of the halo kernel's builds and geometries of layers, for planner_check.py and halo_fit.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tconv3d.families.halo.build import Build, Division, Input, Output, Weights
from tconv3d.planning.geometry import Geometry
from tconv3d.tools.bench.layers import Layer


def geometry_of(layer: Layer) -> Geometry:
    return Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, *layer.settings)


def describe(build: Build) -> str:
    tile, block = build.tile, build.block
    panels = "resident" if build.weights.resident else f"{block.slots} slots"
    apart = "".join(name for name, apart in zip("dhw", build.split, strict=True) if apart)
    how = "gather" if build.gather else "march" if build.march else f"split {apart}"
    choices = (
        ("copied", build.input.copied),
        ("rewritten", build.input is Input.REWRITTEN),
        ("lines", build.input is Input.LINES),
        ("joint", build.output is Output.LONG_RUNS),
        ("in registers", build.input is Input.IN_REGISTERS),
        ("2 buffers", build.output is Output.IMAGES),
        ("fine", build.weights is Weights.SMALL_PANELS),
        ("divided", build.division is Division.CONSUMERS),
        ("portioned", build.division is Division.BLOCKS),
        (f"{tile.merged} groups as one", tile.merged > 1),
    )
    return (
        f"{how}, {build.columns} columns (unit {build.program.unit} x {tile.outputs}), row {tile.row_bytes}, "
        f"{tile.slabs} slabs, {block.producers}+{block.consumers}, {block.stages} stages, {panels}"
        + "".join(f", {name}" for name, holds in choices if holds)
    )
