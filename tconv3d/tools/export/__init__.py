"""Implements `tconv3d export`: writes a layer's kernels as one Python file that does not need this library.

    text = export.export("large_volume", dtypes=["float32"])

`passes` says what to compute and asks the planner for plans, `cxx` and `specialise` reduce the kernels' headers to
what these plans need, and `cuda_source`, `host_source` and `python_file` write the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..bench import layers
from . import passes, python_file
from .passes import LAYOUTS, PRECISIONS, NotExportableError

__all__ = ["LAYOUTS", "PRECISIONS", "NotExportableError", "export"]


def export(
    name_or_layer: str,
    dtypes: Sequence[str] = tuple(PRECISIONS),
    layouts: Sequence[str] = LAYOUTS,
    command: str = "tconv3d export",
    emulated: bool = False,
    gpu: str | None = None,
) -> str:
    """Returns the file for a layer of `layers.LAYERS`, or for a layer written like PyTorch's constructor.

    `gpu` names the GPU to plan for; the default is an H200, and for all other compute capabilities than 9.0 what fits
    the smallest of them. `emulated` uses the emulator's functions in place of inline assembly, for tests.
    """
    by_name = name_or_layer.strip().isidentifier()
    layer = layers.named([name_or_layer])[name_or_layer] if by_name else layers.parse(name_or_layer)
    operations = passes.operations(layer, passes.variants(dtypes, layouts, gpu))
    name = name_or_layer if by_name else "layer"
    return python_file.python_file(name, layer, operations, command, emulated)
