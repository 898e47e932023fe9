"""A small GPU without Hopper's instructions: the emulator stands for it, and `mma` computes all that it can."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from preferred import only, preferring

import tconv3d
from tconv3d.planning.problem import Device
from tconv3d.torch_ops import executor

AMPERE = Device("small Ampere", (8, 0), multiprocessors=4, shared_bytes=101376)


@contextlib.contextmanager
def on_ampere(device: Device = AMPERE, precision: str = "tf32") -> Iterator[None]:
    """The emulator stands for a GPU without Hopper's instructions, and mma.sync computes all that it can."""
    before = executor.EMULATED, torch.backends.cudnn.conv.fp32_precision
    executor.EMULATED, torch.backends.cudnn.conv.fp32_precision = device, precision
    try:
        with only("mma", "tensor_weight_grad", "direct"), preferring("mma"), tconv3d.use_backend("emulator"):
            yield
    finally:
        executor.EMULATED, torch.backends.cudnn.conv.fp32_precision = before
