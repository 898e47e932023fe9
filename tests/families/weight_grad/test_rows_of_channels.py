"""Weight gradients of TF32 tensors that the warpgroup kernel copies as rows of channels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from layers import UNIT, Layer, poisoned
from preferred import only
from problems import H200, problems
from torch import Tensor
from weight_gradients import check, tensors, weight_grad

from tconv3d import emulator
from tconv3d.families.weight_grad import hopper, hopper_model, hopper_search
from tconv3d.planning import planner
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Pass, Problem, channels_last_strides
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)

# Layers with the words of a copy of x and of dy.
LAYERS = {
    "odd rows": (Layer(16, 24, (2, 3, 9), T3, T2, T1), (4, 4)),
    "pieces of one": (Layer(37, 13, (2, 3, 6), (2, 3, 2), (1, 2, 2)), (1, 1)),
    "pieces of two": (Layer(20, 14, (3, 2, 11), (3, 1, 3), (2, 1, 1), (1, 0, 1)), (4, 2)),
    "groups": (Layer(24, 20, (2, 3, 5), (2, 3, 4), T2, (0, 1, 1), groups=2), (4, 2)),
    "three phases, dilated": (Layer(8, 12, (2, 2, 17), (1, 2, 4), (1, 2, 3), (0, 0, 2), dilation=(1, 1, 2)), (4, 4)),
    "more pieces than lanes": (Layer(136, 8, (1, 2, 5), (1, 1, 2), padding=(0, 0, 1)), (4, 4)),
}


@pytest.fixture(autouse=True)
def rows(ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(hopper_search, "searched", lambda name, settings, kind, search: search())
    monkeypatch.setattr(hopper_search, "MIN_EFFICIENCY", 0.0)
    for forget in (planner.plan.cache_clear, hopper_search.tilings.cache_clear, hopper.forget):
        forget()
    with only("hopper_weight_grad"):
        yield ours
    hopper_search.tilings.cache_clear()
    hopper.forget()


def last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last_3d)


def surrounded(tensor: Tensor, before: int, after: int) -> Tensor:
    """A view of some channels of a channels-last tensor whose other channels are NaN."""
    n, channels, *size = tensor.shape
    wide = last(torch.full((n, before + channels + after, *size), float("nan"), device=tensor.device))
    wide[:, before : before + channels] = tensor
    return wide[:, before : before + channels]


def problem(layer: Layer, dtype: str = "float32") -> Problem:
    p = problems(layer, dtype)[Pass.WEIGHT_GRAD]
    x = channels_last_strides((p.batch, layer.in_channels, *p.input_size))
    return replace(p, input=x, output=channels_last_strides((p.batch, layer.out_channels, *p.output_size)))


@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, rows: str) -> None:
    layer, pieces = LAYERS[name]
    found = hopper.layer_of(problem(layer))
    assert (found.piece_x, found.piece_y) == pieces
    x, dy = tensors(layer, torch.float32, rows)
    check(layer, last(x), last(dy))


def test_each_tensor_alone_and_views_of_channels(rows: str) -> None:
    layer, _ = LAYERS["odd rows"]
    x, dy = tensors(layer, torch.float32, rows)
    check(layer, last(x), dy)
    check(layer, x, last(dy))
    check(layer, surrounded(x, 4, 0), surrounded(dy, 0, 8))  # whole pieces of four
    check(layer, surrounded(x, 1, 2), surrounded(dy, 3, 4))  # pieces of one


@pytest.mark.parametrize("name", ["odd rows", "groups"])
def test_the_bias_in_the_same_pass_and_every_bit_again(name: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = LAYERS[name]
    x, dy = map(last, tensors(layer, torch.float32, rows))

    def both() -> list[Tensor | None]:
        with poisoned():
            wanted = False, True, True
            return executor.backward(dy, x, None, wanted, layer.size, layer.kernel, layer.settings)[1:]

    dw, db = both()
    assert dw is not None and db is not None
    assert torch.equal(dw, weight_grad(layer, x, dy))
    exact, largest = dy.double().sum((0, 2, 3, 4)), dy.double().abs().sum((0, 2, 3, 4))
    assert bool(((db.double() - exact).abs() <= UNIT[torch.float32] * (4 * largest + exact.abs())).all())
    if rows == "cpu":
        original = emulator.prepare
        monkeypatch.setattr(emulator, "prepare", lambda launch: original(launch, "shuffled:3"))
        monkeypatch.setattr(executor, "_tasks", {})
    again = both()
    assert again[0] is not None and torch.equal(again[0], dw) and torch.equal(again[1], db)


def test_what_it_refuses() -> None:
    """A word of 16-bit elements would have two channels."""
    layer = Layer(64, 96, (20, 40, 40), T3, T2, T1, batch=8)
    assert "two channels" in (hopper.why_not(problem(layer, "bfloat16"), H200) or "")
    p = problem(layer)
    (offer,) = hopper.offer({p.which: p}, H200)
    assert isinstance(offer, Offer)


@pytest.mark.parametrize("pieces", [1, 3, 7, 8, 10, 16, 18, 32, 34, 64, 100])
def test_the_model_counts_the_copies_of_rows(pieces: int) -> None:
    """No fewer copies than full warps would make, and no more than a lane for each piece would."""
    at_once, copies = hopper_model.row_copies(pieces)
    assert at_once * pieces <= 32 * copies
    assert copies / at_once <= (1 / (32 // pieces) if pieces <= 32 else -(-pieces // 32))


@pytest.mark.parametrize(
    "layer",
    [Layer(64, 96, (20, 40, 40), T3, T2, T1, batch=8), Layer(37, 53, (19, 23, 29), (4, 3, 2), (1, 2, 2), batch=3)],
    ids=["odd rows", "odd everything"],
)
def test_compiles_without_spills(layer: Layer) -> None:
    try:
        compiler.version()
    except compiler.MissingCompilerError:
        pytest.skip("NVRTC is not installed")
    for bias in (False, True):
        main = hopper.plan(replace(problem(layer), bias=bias), H200).launches[0]
        compiled = compiler.compile(main.kernel, main.constants, compiler.architecture(H200.capability))
        assert compiled.report.spill_stores == 0 and compiled.report.stack_bytes == 0
        assert not compiled.serialized
