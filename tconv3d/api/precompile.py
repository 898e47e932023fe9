"""Provides `precompile`, which writes a model's kernels to one file, and `load_precompiled`, which reads it.

    tconv3d.precompile(model, (1, 1, 96, 96, 96), path="model.tconv3d", gpus=["H200", "A100"])    # where NVRTC is
    tconv3d.load_precompiled("model.tconv3d")                                                     # where it is not

The file (`runtime.packs` has its format) holds the compiled kernels of the model's transposed convolutions and the
planners' choices, for named GPUs and inputs. A process that has loaded it compiles nothing for these, and needs
neither NVRTC nor a writable cache. No GPU is needed to write it.

This module knows nothing of what a plan computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import emulator
from ..planning import gpus as known_gpus
from ..planning import planner, winners
from ..planning.launch import Constants, Launch
from ..planning.problem import Device
from ..runtime import cache, compiler, packs
from ..runtime.packs import Content
from ..torch_ops import executor
from ..torch_ops.checks import kind_of
from ..torch_ops.problems import DTYPES
from . import deployed
from .ahead import fill_cache_with
from .deployed import LAYOUTS, Deployed, Variant
from .explain import describe, find_gpu

EMULATOR = "emulator"  # names the emulator in place of a GPU
CHOICES = (".json", ".tuned", winners.SUFFIX)  # suffixes in the cache: planners' choices, and measured winners


@dataclass(frozen=True)
class Precompiled:
    """Describes a file of precompiled kernels: `str()` of it is for people."""

    path: Path
    kernels: int
    choices: int
    bytes: int
    contents: tuple[Content, ...]

    def __str__(self) -> str:
        head = f"{self.path}: {self.kernels} kernels and {self.choices} choices, {self.bytes / 1e6:.1f} MB"
        return "\n".join((head, *(f"  {content}" for content in self.contents)))


def precompile(
    model: nn.Module,
    *inputs: Any,
    path: str | os.PathLike[str],
    gpus: Sequence[str] | str | None = None,
    dtypes: Sequence[torch.dtype | str] | None = None,
    layouts: Sequence[str] | None = None,
    backward: bool = True,
    every_volume: bool = False,
) -> Precompiled:
    """Compiles the kernels of a model's transposed convolutions, and writes them to one file for other machines.

    >>> tconv3d.precompile(model, (1, 1, 96, 96, 96), path="model.tconv3d", gpus=["H200", "A100"])

    model: a model as it will run, after `accelerate` and `.to(memory_format=...)`, or one layer. PyTorch's
    `nn.ConvTranspose3d` counts as swapped. inputs: example inputs of the model: a tensor, a shape, a tuple of
    arguments or a mapping of keywords. Nothing is computed. The file serves these inputs in any order. With
    `every_volume` it also serves other volumes and batch sizes after one of these, which takes 10 to 40 CPU seconds
    per layer and pass.

    gpus: names or compute capabilities (`tconv3d.planning.gpus.GPUS`), with the number of multiprocessors if it is
    another than the listed one ("H100,114"), or "emulator". None means the GPU of this machine. dtypes: types that
    the layers compute in, such as torch.bfloat16 for autocast, or "tf32" and "float32" for float32 with and without
    rounding to TF32; None means the type of each layer's input in the model. torch.float32 means TF32 or not as
    PyTorch is set now. layouts: "contiguous", "channels_last_3d"; None means the layout that each layer's input has
    in the model. backward: include the gradients. For the GPU of this machine (`gpus=None`) the file also holds which
    offers won when they were timed here; they count where GPU, driver, CUDA, cuDNN and PyTorch are the same.
    """
    _check_arguments(model, inputs, dtypes, layouts)
    layers = deployed.layers_of(model, inputs)
    if not layers:
        raise ValueError("expected a model whose transposed convolutions the inputs reach, but no input reaches one")
    contents: list[Content] = []
    entries: dict[str, tuple[str, bytes]] = {}
    for device in _devices(gpus):
        with planner.aside(), cache.noting() as noted:
            planner.forget()
            calls = [each for layer in layers for each in deployed.variants(layer, dtypes, layouts, backward)]
            calls = [each for each in calls if _is_planned(each)]
            launches = {_kernel(launch): launch for launch in deployed.launches(calls, device)}
            others = deployed.launches_of_every_volume(calls, device) if every_volume else ()
            kernels = list(dict.fromkeys((*launches, *others)))
        contents += _contents(calls, device, backward, every_volume)
        choices = {name: payload for name, payload in noted.items() if name.endswith(CHOICES)}
        entries |= {name: ("a planner's choice", payload) for name, payload in choices.items()}
        entries |= {name: (what, payload) for name, what, payload in _compiled(kernels, device)}
    listed = [(name, what, payload) for name, (what, payload) in entries.items()]
    index = packs.write(Path(path), _version(), packs.fingerprint(), contents, listed)
    return _described(Path(path), index)


def load_precompiled(path: str | os.PathLike[str]) -> Precompiled:
    """Makes kernels and choices of a file that `precompile` wrote available to this process, before all others.

    Call it before the first call of the model. The environment variable TCONV3D_PRECOMPILED does the same for all
    processes that have it: it names files, separated like the paths in PATH. Raises a ValueError that says why if the
    file is damaged, is not such a file, or was written by a version with other kernels. What the file does not hold
    is compiled as before.
    """
    pack = packs.load(Path(path))
    return _described(pack.path, pack.index)


def _described(path: Path, index: packs.Index) -> Precompiled:
    choices = sum(entry.name.endswith(CHOICES) for entry in index.entries)
    return Precompiled(path, len(index.entries) - choices, choices, path.stat().st_size, index.contents)


def _version() -> str:
    import tconv3d  # not above, because the package imports this module

    return tconv3d.__version__


def _check_arguments(
    model: nn.Module, inputs: Sequence[Any], dtypes: Sequence[torch.dtype | str] | None, layouts: Sequence[str] | None
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be an nn.Module, but got {kind_of(model)}")
    if not inputs:
        raise TypeError("precompile() expected at least one input (a tensor or its shape) after the model")
    for dtype in dtypes or ():
        if dtype not in (*DTYPES, *deployed.PRECISIONS):
            known = (*map(str, DTYPES), *map(repr, deployed.PRECISIONS))
            raise ValueError(f"expected dtypes among {', '.join(known)}, but got {dtype!r}")
    for layout in layouts or ():
        if layout not in LAYOUTS:
            raise ValueError(f"expected layouts among {', '.join(map(repr, LAYOUTS))}, but got {layout!r}")


def _devices(gpus: Sequence[str] | str | None) -> list[Device]:
    if gpus is None:
        if not torch.cuda.is_available():
            raise RuntimeError("precompile compiles for the present GPU, and there is none: name one, gpus=['H200']")
        return [find_gpu(None, torch.empty(0))[0]]
    names = [gpus] if isinstance(gpus, str) else list(gpus)
    found = [executor.EMULATED if name == EMULATOR else known_gpus.device_named(name) for name in names]
    return list(dict.fromkeys(found))


def _is_planned(call: Variant) -> bool:
    """Tells whether the planner takes a layer; PyTorch's operator computes the others, which need no kernel."""
    try:
        planner.check_limits(call.forward)
    except planner.Refused:
        return False
    return True


def _kernel(launch: Launch) -> tuple[str, Constants]:
    return launch.kernel, launch.constants


def _compiled(kernels: Sequence[tuple[str, Constants]], device: Device) -> Iterator[tuple[str, str, bytes]]:
    """Yields name, description and payload of compiled kernels."""
    if device == executor.EMULATED:
        for kernel, constants in kernels:
            name, library = emulator.packed(kernel, constants)
            yield name, f"{kernel} for the emulator", library
        return
    arch = compiler.architecture(device.compiled_capability)
    fill_cache_with(kernels, device)
    for name, constants in kernels:
        described = f"{name} for {arch}, {compiler.identity()}"
        yield compiler.packed_name(name, constants, arch), described, compiler.entry(name, constants, arch)


def _contents(calls: Sequence[Variant], device: Device, backward: bool, every_volume: bool) -> Iterator[Content]:
    """Yields what is packed in words, one line for each layer, type and layout."""
    groups: dict[tuple[Deployed, str, str], list[str]] = {}
    for each in calls:
        dtype = f"{each.forward.dtype}{' as TF32' if each.forward.tf32 else ''}"
        groups.setdefault((each.layer, dtype, each.layout), []).append(each.shape)
    major, minor = device.capability
    gpu = f"{device.name} ({major}.{minor}, {device.multiprocessors} multiprocessors)"
    for (layer, dtype, layout), shapes in groups.items():
        geometry = next(each.forward.geometry for each in calls if each.layer is layer)
        text = describe(geometry, layer.convolution.bias is not None) + (", ReLU" if layer.relu else "")
        text += "" if layer.norm is None else f", GroupNorm of {layer.norm.num_groups} groups"
        volumes = f"inputs {', '.join(dict.fromkeys(shapes))}" + (" and after these others" if every_volume else "")
        passes = "forward and gradients" if backward else "forward"
        yield Content(gpu, f"{layer.name}: {text}", dtype, layout, passes, volumes)
