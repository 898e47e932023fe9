"""Every pass of a few layers under AddressSanitizer and UndefinedBehaviorSanitizer, and in every order of threads.

The layers take turns in type and memory format, and together they run every kernel family. A finding of a sanitizer
ends its process, so that they run in a child.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from fuzz.families import favouring
from layers import TABLE, Layer, check, passes, to_tf32
from preferred import counted, preferring
from sanitizing import sanitized
from torch import Tensor

import tconv3d
from tconv3d import emulator
from tconv3d.planning import planner
from tconv3d.torch_ops import executor

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")]

CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last_3d
WIDE = Layer(16, 24, (2, 3, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1), batch=1)  # enough channels for tensor cores

UP = Layer(16, 24, (2, 3, 8), (2, 2, 2), (2, 2, 2), batch=1)
EVEN = Layer(16, 24, (2, 3, 8), (3, 3, 3), padding=(1, 1, 1), batch=1)  # lines of whole words

LAYERS: dict[str, tuple[Layer, torch.dtype, torch.memory_format]] = {
    "monai": (TABLE["monai"], torch.float32, CONTIGUOUS),
    "groups": (TABLE["groups"], torch.float16, CHANNELS_LAST),
    "small groups": (Layer(8, 6, (2, 2, 13), (2, 3, 3), groups=2, batch=1), torch.float16, CONTIGUOUS),
    "depthwise": (TABLE["depthwise"], torch.bfloat16, CHANNELS_LAST),
    "asymmetric": (TABLE["asymmetric"], torch.float64, CHANNELS_LAST),
    "up-convolution": (UP, torch.bfloat16, CONTIGUOUS),
    "up-convolution, channels last": (UP, torch.float16, CHANNELS_LAST),
    "up-convolution, gradients apart": (UP, torch.float32, CONTIGUOUS),
    "few positions": (WIDE, torch.float32, CONTIGUOUS),
    "few outputs": (Layer(8, 2, (2, 2, 4), (3, 3, 3), (2, 2, 2), batch=1), torch.float16, CONTIGUOUS),
    "wide": (WIDE, torch.float16, CONTIGUOUS),
    "wide, channels last": (WIDE, torch.bfloat16, CHANNELS_LAST),
    "rows of channels": (replace(WIDE, out_channels=32, bias=False), torch.bfloat16, CHANNELS_LAST),
    "wide, before Hopper": (WIDE, torch.float16, CONTIGUOUS),
    "even lines, before Hopper": (UP, torch.bfloat16, CONTIGUOUS),
    "wide, even lines": (EVEN, torch.bfloat16, CONTIGUOUS),
    "few positions, 16 bits": (WIDE, torch.bfloat16, CHANNELS_LAST),
    "wide, channels last in TF32": (replace(WIDE, out_channels=20), torch.float32, CHANNELS_LAST),
}
# Kernels that are to run, though they are predicted to win for larger layers.
PREFERRED = {
    "monai": ("depthwise_tiles_weight_grad",),
    "small groups": ("group_backward",),
    "depthwise": ("depthwise_lines", "depthwise"),
    "up-convolution": ("up", "up_backward"),
    "up-convolution, channels last": ("up", "up_backward_last"),
    "few outputs": ("few_outputs", "few_inputs", "few_weight_grad"),
    "wide": ("halo", "hopper_weight_grad"),
    "wide, channels last": ("halo", "turned"),
    "rows of channels": ("rows_weight_grad",),
    "wide, before Hopper": ("mma", "tensor_weight_grad"),
    "even lines, before Hopper": ("mma", "tensor_weight_grad"),
    "wide, even lines": ("halo", "hopper_weight_grad"),
    "few positions, 16 bits": ("gather",),
}
# Layers that run in TF32, and what the fuzz favours for them.
IN_TF32 = {"up-convolution, gradients apart": "up_grad", "few positions": "unfold", "wide, channels last in TF32": ""}
BEFORE_HOPPER = replace(executor.EMULATED, capability=(8, 0))


@contextlib.contextmanager
def emulated(name: str) -> Iterator[None]:
    """The machine that a layer is for, with nothing planned for another one."""
    before = torch.backends.cudnn.conv.fp32_precision, executor.EMULATED  # type: ignore[attr-defined]
    torch.backends.cudnn.conv.fp32_precision = "tf32" if name in IN_TF32 else "ieee"  # type: ignore[attr-defined]
    executor.EMULATED = BEFORE_HOPPER if "before Hopper" in name else before[1]
    try:
        with (
            tconv3d.use_backend("emulator"),
            preferring(*PREFERRED.get(name, ())),
            favouring(IN_TF32.get(name, "cheapest")),
        ):
            yield
    finally:
        torch.backends.cudnn.conv.fp32_precision, executor.EMULATED = before  # type: ignore[attr-defined]


def operands_of(name: str) -> list[Tensor]:
    layer, dtype, memory_format = LAYERS[name]
    x, *rest = (to_tf32(one) if name in IN_TF32 else one for one in layer.operands(dtype, "cpu"))
    return [x.to(memory_format=memory_format), *rest]


@pytest.mark.parametrize(
    "names", [list(LAYERS)[::2], pytest.param(list(LAYERS)[1::2], marks=pytest.mark.thorough)], ids=" and ".join
)
def test_sanitizers_find_nothing(names: list[str]) -> None:
    command = [sys.executable, __file__, *names]
    child = subprocess.run(command, env=sanitized(), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split("\n")[:-1] == [f"{name}: checked" for name in names]


@pytest.mark.parametrize("name", LAYERS)
def test_the_order_of_threads_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LAYERS[name][0].settings
    results = {}
    with emulated(name):
        for order in ("forward", "reversed", "shuffled:1"):
            monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", order)
            result, grads = passes(tconv3d.conv_transpose3d, operands_of(name), settings)
            results[order] = (result, *grads)
    for order in ("reversed", "shuffled:1"):
        assert all(map(torch.equal, results[order], results["forward"])), order


def test_the_layers_run_every_family() -> None:
    """A family that a later planner adds needs a layer here."""
    with counted() as plans:
        for name, (layer, _, _) in LAYERS.items():
            with emulated(name):
                passes(tconv3d.conv_transpose3d, operands_of(name), layer.settings)
    assert set(plans) == {name for name, _ in planner.FAMILIES}


def main() -> None:
    for name in sys.argv[1:]:
        layer, dtype, _ = LAYERS[name]
        with emulated(name):
            check(layer, dtype, "cpu", operands_of(name), tf32=name in IN_TF32)
            print(f"{name}: checked", flush=True)


if __name__ == "__main__":
    main()
