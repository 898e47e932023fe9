"""`compile_ahead`: what it compiles is what calls launch, and then nothing is left to compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tconv3d
from tconv3d import emulator
from tconv3d.api.explain import launches
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.launch import Launch
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor, kept

needs_emulator = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")

LAYERS: dict[str, nn.Module] = {
    "up-convolution": tconv3d.ConvTranspose3d(16, 8, 2, stride=2),
    "with ReLU": tconv3d.ConvTranspose3dReLU(8, 8, 3, stride=2, padding=1),
    "with ReLU and norm": tconv3d.ConvTranspose3dReLUGroupNorm(8, 8, 3, num_groups=2, padding=1),
}


@needs_emulator
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_compiled_is_what_is_launched(
    name: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = LAYERS[name], torch.randn(1, 16 if name == "up-convolution" else 8, 4, 4, 8)
    x = x.contiguous(memory_format=layout)
    expected = {(each.kernel, each.constants) for each in launches(layer, x, executor.EMULATED)}
    launched: set[tuple[str, object]] = set()
    prepare = emulator.prepare

    def recording(launch: Launch) -> Callable[[tuple[int, ...]], None]:
        launched.add((launch.kernel, launch.constants))
        return prepare(launch)

    monkeypatch.setattr(emulator, "prepare", recording)
    executor.forget()
    kept.forget()
    with tconv3d.use_backend("emulator"):
        with torch.no_grad():
            for _ in range(3):  # the second keeps the packed weight, the third finds it
                layer(x)
        y = layer(x.requires_grad_())
        y.backward(torch.randn_like(y))
    assert launched == expected


def test_nothing_is_left_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core", reason="compiling needs cuda-core")
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path))
    layer, shapes = tconv3d.ConvTranspose3d(32, 4, 1), [(1, 32, 2, 3, 4), (1, 32, 40, 40, 40)]
    count = tconv3d.compile_ahead(layer, *shapes, gradients=False, gpu="H200")
    device = GPUS["H200"].device
    kernels = {(each.kernel, each.constants) for shape in shapes for each in launches(layer, shape, device)[:1]}
    assert count >= len(kernels) > 0
    monkeypatch.setattr(compiler, "_build", lambda *arguments: pytest.fail("compiled once more"))
    for kernel, constants in kernels:
        assert compiler.compile(kernel, constants, "sm_90a").cubin


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_must_be_named() -> None:
    with pytest.raises(RuntimeError, match="there is none: name one"):
        tconv3d.compile_ahead(LAYERS["with ReLU"], (1, 8, 4, 4, 4))
