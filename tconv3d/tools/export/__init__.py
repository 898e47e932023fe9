"""Implements `tconv3d export`: writes a layer's kernels as one Python file that does not need this library.

    text = export.export("large_volume")
    text = export.export_like(Path("reference.py").read_text(), forward_only=True)

`subjects` and `reference` say what the file's model is, `passes` what to compute and, by the planner, how. `headers`,
`syntax` and `program` read the kernels' headers, `trace` and `compute` follow what is compiled, `rewrite`, `purity`,
`parameters`, `specialise`, `comments` and `tidy` reduce the headers to that, and `cuda_source`, `host_source` and
`python_file` write the text.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import torch

from ...planning import gpus as known_gpus
from .. import tasks
from ..bench import layers
from . import chain, passes, python_file, reference, subjects
from .following import Following
from .passes import ANY, DEVICES, LAYOUTS, PRECISIONS, NotExportableError

__all__ = ["ANY", "DEVICES", "LAYOUTS", "PRECISIONS", "NotExportableError", "export", "export_like"]


def export(
    name_or_layer: str,
    dtypes: Sequence[str] = (),
    layouts: Sequence[str] = (),
    gpus: Sequence[str] = (),
    forward_only: bool = False,
    emulated: bool = False,
) -> str:
    """Returns the file for a task or a layer of `layers.LAYERS`, or for a layer written like PyTorch's constructor.

    `dtypes` are precisions of `PRECISIONS`, `layouts` are of `LAYOUTS` and `gpus` of `DEVICES`. By default the file
    holds float32 as PyTorch's switch for convolutions says (TF32 or not), contiguous tensors, and the GPU at hand or,
    without one, an H200. `emulated` uses the emulator's functions in place of inline assembly, for tests.
    """
    by_name = name_or_layer.strip().isidentifier()
    if name_or_layer in tasks.NAMES:
        text = subjects.of_task(name_or_layer)
    elif by_name:
        text = subjects.of_layer(layers.named([name_or_layer])[name_or_layer], name_or_layer)
    else:
        text = subjects.of_layer(layers.parse(name_or_layer))
    name = name_or_layer if by_name else "layer"
    command = command_line([name_or_layer], dtypes, layouts, gpus, forward_only)
    return export_like(text, dtypes, layouts, gpus, forward_only, command, name, emulated)


def command_line(
    what: Sequence[str], dtypes: Sequence[str], layouts: Sequence[str], gpus: Sequence[str], forward_only: bool
) -> str:
    """Returns the command that exports a layer, or a reference, as a file of these kinds."""
    words = ["tconv3d", "export", *what]
    for flag, given in (("dtype", dtypes), ("layout", layouts), ("gpu", gpus)):
        words += [f"--{flag}", *given] if given else []
    return shlex.join([*words, *(["--forward-only"] if forward_only else [])])


def export_like(
    text: str,
    dtypes: Sequence[str] = (),
    layouts: Sequence[str] = (),
    gpus: Sequence[str] = (),
    forward_only: bool = False,
    command: str = "tconv3d export --like reference.py",
    name: str = "model",
    emulated: bool = False,
    evaluated: bool = False,
) -> str:
    """Returns the file for a reference: a Python text that defines `Model`, `get_inputs` and `get_init_inputs`.

    By default the file holds the type and the layout of the convolution's input. `evaluated` exports the model in
    evaluation mode, in which a BatchNorm uses its running statistics. Other arguments are `export`'s.
    """
    found = reference.read(text, evaluated)
    chosen = passes.variants(
        dtypes or (precision_of(found.dtype),), layouts or (found.layout,), gpus or (gpu_at_hand(),)
    )
    following = found.following
    if isinstance(following, Following):
        made = chain.chain(found.layer, following, chosen, forward_only)
        if isinstance(made, chain.Chain):
            operations = chain.operations(made, found.layer, chosen, forward_only)
            return python_file.python_file(name, found, operations, command, emulated, made)
        following = made
    operations = passes.operations(found.layer, chosen, forward_only, found.eps)
    return python_file.python_file(name, found, operations, command, emulated, why_not=following or "")


def precision_of(dtype: torch.dtype) -> str:
    """Returns the precision in which PyTorch would convolve tensors of a type now."""
    name = str(dtype).removeprefix("torch.")
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    if name == "float32" and convolutions.fp32_precision == "tf32":
        return "tf32"
    if name not in PRECISIONS:
        raise NotExportableError(f"exported files compute in {', '.join(PRECISIONS)}, got an input of {name}")
    return name


def gpu_at_hand() -> str:
    """Returns the name of the GPU in this machine, or the default GPU of plans if there is none."""
    if not torch.cuda.is_available():
        return known_gpus.DEFAULT_GPU
    name = torch.cuda.get_device_name()
    capability = torch.cuda.get_device_capability()
    alike = [gpu for gpu in DEVICES if gpu != ANY and gpu in name]
    same = [gpu for gpu, device in DEVICES.items() if device.capability == capability and gpu != ANY]
    return (alike or same or [ANY])[0]
