"""`tconv3d export`: a layer's kernels as one Python file that needs nothing of this library.

    text = export.export("large_volume", dtypes=["float32"])

The rooms: `passes` (what to compute, and the planner's plans for it), `cxx` and `specialise` (the kernels' headers,
cut down to what these plans need), `cuda_source`, `host_source` and `python_file` (the text).
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
) -> str:
    """The file for a task or a layer of `layers.LAYERS`, or for a layer in the words of the constructor.

    `emulated`: with the emulator's functions in place of inline assembly, for tests.
    """
    by_name = name_or_layer.strip().isidentifier()
    layer = layers.named([name_or_layer])[name_or_layer] if by_name else layers.parse(name_or_layer)
    operations = passes.operations(layer, passes.variants(dtypes, layouts))
    name = name_or_layer if by_name else "layer"
    return python_file.python_file(name, layer, operations, command, emulated)
