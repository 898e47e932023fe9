"""What vectors of memory assume, where it is nearly true: odd widths, widths of 4 mod 8, tensors at any address.

Results lie between guards. The emulator faults where a GPU would, and where what a kernel states does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from halo_cases import (
    APART,
    D_H_APART,
    DEVICE,
    FLAT,
    IMAGES,
    LINES,
    LONG_RUNS,
    MARCH,
    PORTIONED,
    STREAMED,
    TOLERANCE,
    Case,
    Tensors,
    build_for,
)
from layers import Layer, check, guarded, passes, shifted, to_tf32

import tconv3d
from tconv3d import emulator
from tconv3d.families.halo import planner as halo_planner
from tconv3d.families.halo.build import Build
from tconv3d.families.halo.job import Job, job_of
from tconv3d.families.halo.storing import can_store, vector
from tconv3d.families.halo.tiling import Tiling, tilings
from tconv3d.planning.gpus import GPUS
from tconv3d.torch_ops import executor

pytestmark = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")

LAST = torch.channels_last_3d


@pytest.fixture(params=["H200", "A100"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whose plans the emulator runs, with TF32."""
    name: str = request.param
    monkeypatch.setattr(executor, "EMULATED", GPUS[name].device)
    before = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    executor._tasks.clear()
    with tconv3d.use_backend("emulator"):
        yield name
    torch.backends.cudnn.conv.fp32_precision = before  # type: ignore[attr-defined]
    executor._tasks.clear()


def operands_of(layer: Layer, dtype: torch.dtype) -> list[torch.Tensor]:
    """Whose products on tensor cores are exact."""
    operands = layer.operands(dtype, "cpu")
    return [to_tf32(operand) for operand in operands] if dtype == torch.float32 else operands


# Along w: kernel, padding, output padding. An odd input then has an output of 2W - 2 or 2W + 2.
ODD_TO_EVEN = ((2, 1, 0), (3, 0, 1), (3, 2, 1), (4, 0, 0), (4, 2, 0), (5, 1, 1), (6, 1, 0))


@pytest.mark.parametrize("machine", ["H200"], indirect=True)
@pytest.mark.parametrize(("kernel", "padding", "output_padding"), ODD_TO_EVEN)
def test_input_gradients_of_odd_widths(kernel: int, padding: int, output_padding: int, machine: str) -> None:
    """Lines of the output gradient are whole vectors, those of the input's are not even whole pairs."""
    layer = Layer(32, 16, (2, 4, 15), (3, 3, kernel), (2, 2, 2), (1, 1, padding), (1, 1, output_padding), batch=1)
    x, weight, _ = operands_of(layer, torch.float32)
    exact = x.double().requires_grad_()
    y = F.conv_transpose3d(exact, weight.double(), None, *layer.settings)
    grad = to_tf32(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
    with guarded():
        found = executor.input_grad(grad, weight, layer.size, layer.settings)
    (expected,) = torch.autograd.grad(y, exact, grad.double())
    assert (found.double() - expected).norm() < 1e-6 * expected.norm()


# Rows of 4 mod 8 outputs that follow each other in planes, but not in the phase of a line: stride 2 or 3 along h.
FOUR_MOD_EIGHT = (
    Layer(32, 32, (3, 7, 9), (2, 3, 4), (2, 2, 1), (0, 0, 0), (0, 1, 0), batch=1),
    Layer(17, 16, (4, 7, 3), (1, 3, 2), (3, 3, 1), (0, 0, 0), (0, 1, 0)),
    Layer(16, 16, (2, 4, 10), (1, 2, 3), (1, 2, 1), batch=1),
)


@pytest.mark.parametrize("layer", FOUR_MOD_EIGHT)
def test_rows_of_4_mod_8_outputs(layer: Layer) -> None:
    with guarded(), tconv3d.use_backend("emulator"):
        check(layer, torch.float16, "cpu", forward_only=True)


# ---- Every way to store of the halo kernel, with rows of every length.

STORES = {
    "flat": Case(16, 8, (2, 3, 1), 3, 2, 1, 1, build=FLAT),
    "flat, stride 1": Case(16, 12, (2, 3, 1), 3, 1, 1, build=FLAT),
    "march": Case(16, 8, (2, 3, 1), 3, 1, 1, build=MARCH),
    "march, stride 2 along h": Case(16, 8, (2, 3, 1), (2, 3, 2), (1, 2, 1), build={**MARCH, "slabs": 2}),
    "march, stride 2 along w": Case(16, 8, (2, 3, 1), (2, 2, 3), (1, 1, 2), (0, 0, 1), build=MARCH),
    "march, lines": Case(16, 8, (2, 3, 1), 3, 2, 1, 1, build=LINES),
    "march, long runs": Case(16, 8, (2, 3, 1), 3, 2, 1, build=LONG_RUNS),
    "march, images": Case(16, 8, (2, 3, 1), 3, 2, 1, build={**MARCH, **IMAGES}),
    "phases apart": Case(20, 8, (2, 3, 1), 4, 2, 1, build=APART),
    "copied, in place": Case(64, 16, (2, 3, 1), 4, 2, 1, build={**D_H_APART, **STREAMED}),
    "portions": Case(72, 16, (2, 3, 1), 3, 1, 1, build={**FLAT, **STREAMED, **PORTIONED, "row_bytes": 64}),
    "channels last": Case(16, 8, (2, 3, 1), 3, 2, 1, channels_last=True, build=FLAT),
    "channels last, odd channels": Case(16, 9, (2, 3, 1), 3, 2, 1, channels_last=True, build=FLAT),
}
WIDTHS = (1, 3, 4, 5, 7, 8, 12, 20)


def kinds_of(build: Build, job: Job, batch: int) -> dict[tuple[int, bool, bool], Tiling]:
    """Tilings that differ in what a store takes, in whether lines follow each other, in whether they are cut."""
    found = tilings(build, batch, job.positions, job.read_size)
    return {(vector(build, job, tiling), tiling.length > 0, tiling.tiles[3] > 1): tiling for tiling in found}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", STORES)
def test_every_way_to_store_rows_of_every_length(name: str, dtype: str) -> None:
    if "in place" in name and dtype == "float32":
        return  # they are words of two 16-bit outputs
    stored = set()
    for width in WIDTHS:
        case = replace(STORES[name], size=(2, 3, width), dtype=dtype)
        tensors = Tensors(case)
        try:
            build = build_for(case)
        except AssertionError:  # lines of this width have no such build
            continue
        job = job_of(tensors.problem)
        read = job.arriving(build.input)
        for kind, tiling in kinds_of(build, read, case.batch).items() if can_store(build, job) else ():
            with guarded():
                tensors.y = torch.empty_strided(tensors.y.shape, tensors.y.stride(), dtype=tensors.y.dtype)
                tensors.run(halo_planner.assemble(build, tiling, job, DEVICE))
            assert tensors.error < TOLERANCE[dtype], (width, tiling)
            stored.add(kind)
    assert stored


# ---- Tensors at any address.

ANYWHERE = {
    "halo": Layer(16, 24, (2, 3, 8), (3, 3, 3), (2, 2, 2), (1, 1, 1), batch=1),
    "up": Layer(16, 24, (2, 3, 8), (2, 2, 2), (2, 2, 2), batch=1),
    "few outputs": Layer(16, 2, (2, 3, 8), (3, 3, 3), (2, 2, 2), batch=1),
    "few inputs": Layer(2, 16, (2, 3, 8), (3, 3, 3), (2, 2, 2), batch=1),
    "depthwise": Layer(16, 16, (2, 3, 8), (3, 3, 3), (2, 2, 2), groups=16, batch=1),
    "groups": Layer(16, 16, (2, 3, 16), (3, 3, 3), (2, 2, 2), groups=4, batch=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("machine", "which"), [("H200", "weight"), ("H200", "all"), ("A100", "all")], indirect=["machine"]
)
@pytest.mark.parametrize("name", ANYWHERE)
def test_tensors_at_any_address(name: str, which: str, dtype: torch.dtype, machine: str) -> None:
    layer = ANYWHERE[name]
    for form, elements in ((torch.contiguous_format, 1), (LAST, 2)) if which == "weight" else ((LAST, 1),):
        x, weight, bias = operands_of(layer, dtype)
        x, weight = x.to(memory_format=form), weight.to(memory_format=form)
        moved = [
            shifted(operand, elements) if which in (each, "all") else operand
            for each, operand in (("input", x), ("weight", weight), ("bias", bias))
        ]
        with guarded():
            check(layer, dtype, "cpu", moved, tf32=dtype == torch.float32)


@pytest.mark.parametrize("machine", ["H200"], indirect=True)
@pytest.mark.parametrize("name", ["halo", "up", "groups"])
def test_an_output_gradient_at_any_address(name: str, machine: str) -> None:
    layer = ANYWHERE[name]
    operands = operands_of(layer, torch.float16)
    result, expected = passes(tconv3d.conv_transpose3d, operands, layer.settings)
    with guarded():
        grad = shifted(torch.ones_like(result), 3)
        _, found = passes(tconv3d.conv_transpose3d, operands, layer.settings, grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-2)


# ---- Rows of channels whose copies are narrower than 16 bytes.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [13, 22, 27])
def test_few_outputs_of_any_number_of_channels_last(channels: int, dtype: torch.dtype, machine: str) -> None:
    layer = Layer(channels, 2, (3, 5, 9), (3, 3, 3), (2, 2, 2), (1, 1, 1), batch=1)
    x, *others = operands_of(layer, dtype)
    with guarded():
        check(layer, dtype, "cpu", [x.to(memory_format=LAST), *others], forward_only=True)
