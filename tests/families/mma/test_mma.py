"""Forward pass and input gradient on mma.sync: planned for GPUs that are no Hopper, run in the emulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import isfinite
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ampere import AMPERE, on_ampere
from generated import small_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import T1, T3, Layer, check, passes, poisoned, to_tf32
from mutants import kernel_from, mutate
from preferred import kernels_of
from torch import Tensor

import tconv3d
from tconv3d import emulator
from tconv3d.families.mma import model as mma_model
from tconv3d.families.mma import planner as mma_planner
from tconv3d.families.mma.work import Work
from tconv3d.planning import gpus, planner
from tconv3d.planning.geometry import Geometry
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Pass, Problem, channels_last_strides, contiguous_strides
from tconv3d.planning.side import Side
from tconv3d.tools.bench.layers import LAYERS as BENCH
from tconv3d.torch_ops import executor

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last_3d

LAYERS = {
    "plain, odd lines": Layer(8, 12, (3, 4, 5), T3),
    "channels of no whole piece": Layer(5, 7, (3, 3, 6), T3, (2, 2, 2), T1, T1, batch=1),
    "up-convolution": Layer(16, 24, (2, 3, 8), (2, 2, 2), (2, 2, 2)),
    "gan": Layer(12, 20, (3, 3, 4), (4, 4, 4), (2, 2, 2), T1, batch=1),
    "groups": Layer(16, 32, (2, 3, 4), T3, (2, 2, 2), T1, groups=4),
    "asymmetric": Layer(4, 9, (2, 4, 5), (3, 5, 1), (1, 2, 3), (1, 2, 0), (0, 1, 2)),
    "dilated, empty phases": Layer(6, 8, (3, 3, 4), T3, (2, 2, 2), (0, 1, 2), T1, (2, 2, 2), batch=1),
    "large stride": Layer(4, 6, (2, 2, 3), T3, (1, 3, 7), (0, 1, 1), (0, 2, 4), batch=1),
    "large stride, no source of its own": Layer(4, 5, (2, 2, 2), (2, 3, 2), (5, 5, 2), batch=1),
    "wide kernel": Layer(4, 4, (1, 2, 9), (1, 2, 15), T1, (0, 0, 5), batch=1),
    "padding crops whole taps": Layer(4, 4, (3, 3, 3), (5, 5, 5), T1, (3, 3, 3), batch=1),
    "many channels": Layer(72, 70, (2, 2, 4), (2, 2, 2), T1, batch=1, bias=False),
    "single voxel": Layer(4, 4, T1, T3, (2, 2, 2)),
    "several batch items to a tile": Layer(16, 8, (2, 2, 3), T3, (2, 2, 2), T1, batch=7),
}


def operands_of(layer: Layer, dtype: torch.dtype, memory_format: torch.memory_format) -> list[Tensor]:
    found = layer.operands(dtype, "cpu")
    x, *rest = (to_tf32(each) for each in found) if dtype is torch.float32 else found
    return [x.to(memory_format=memory_format), *rest]


def checked(layer: Layer, dtype: torch.dtype, operands: list[Tensor]) -> None:
    check(layer, dtype, "cpu", operands, tf32=dtype is torch.float32)


@pytest.mark.parametrize("memory_format", [CONTIGUOUS, CHANNELS_LAST], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_every_element_against_float64(name: str, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    with on_ampere():
        checked(LAYERS[name], dtype, operands_of(LAYERS[name], dtype, memory_format))


FAR = {
    "forward": Layer(12, 8, (2, 1, 5), (4, 7, 4), (2, 1, 1), (5, 3, 3), (3, 1, 0), (5, 2, 3), batch=1),
    "input gradient": Layer(4, 4, (9, 5, 3), (1, 3, 2), (5, 5, 2), (0, 4, 0), (4, 3, 0), (1, 5, 1), batch=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAR)
def test_taps_that_reach_far_have_a_halo_each(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, plan_of = [], mma_planner.plan_of
    monkeypatch.setattr(mma_planner, "plan_of", lambda *given: tiles.append(plan_of(*given).tile) or plan_of(*given))
    with on_ampere():
        checked(FAR[name], dtype, operands_of(FAR[name], dtype, CONTIGUOUS))
    assert len(tiles) == 2 and any("a halo for each tap" in tile for tile in tiles)


@pytest.mark.slow
@settings(max_examples=25)
@given(data=st.data())
def test_every_geometry_gets_an_offer(data: st.DataObject) -> None:
    """Four or more channels per group on both sides are all that the family asks for."""
    groups, five = data.draw(st.sampled_from((1, 2, 4))), st.integers(1, 5)
    ins, outs = (groups * data.draw(st.sampled_from((4, 7, 16, 33))) for _ in range(2))
    kernel, stride, dilation, size = (data.draw(st.tuples(five, five, five)) for _ in range(4))
    padding = tuple(d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True))
    geometry = Geometry.make(ins, outs, kernel, stride, padding, (0, 0, 0), groups, dilation)
    batch, strides = data.draw(five), data.draw(st.sampled_from((contiguous_strides, channels_last_strides)))
    x, y = strides((batch, ins, *size)), strides((batch, outs, *geometry.output_size(size)))
    weight = contiguous_strides((ins, outs // groups, *kernel))
    for which, dtype in product((Pass.FORWARD, Pass.INPUT_GRAD), ("float32", "bfloat16")):
        problem = Problem(which, geometry, batch, size, dtype, x, weight, y, tf32=dtype == "float32")
        (answer,) = mma_planner.offer({which: problem}, AMPERE)
        assert isinstance(answer, Offer) and isfinite(answer.microseconds), (answer, problem)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    layer=small_layers((3, 3, 5), st.integers(4, 20), st.integers(4, 20)),
    dtype=st.sampled_from(DTYPES),
    last=st.booleans(),
)
def test_generated_geometries(layer: Layer, dtype: torch.dtype, last: bool) -> None:
    with on_ampere():
        checked(layer, dtype, operands_of(layer, dtype, CHANNELS_LAST if last else CONTIGUOUS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [CONTIGUOUS, CHANNELS_LAST], ids=["contiguous", "channels last"])
def test_views_that_begin_anywhere(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """One element into a tensor: no address but an element's own is a multiple of anything."""
    layer = Layer(8, 8, (2, 3, 6), T3, (2, 2, 2), T1, batch=1)
    x, *rest = operands_of(layer, dtype, memory_format)
    view = torch.empty(x.numel() + 1, dtype=dtype)[1:].as_strided(x.shape, x.stride()).copy_(x)
    apart = torch.empty(1, 8, 2, 3, 13, dtype=dtype)[..., 1::2].copy_(x)  # no stride is 1
    with on_ampere():
        for each in (view, apart):
            checked(layer, dtype, [each, *rest])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_input_that_is_written_as_rows_of_channels_first(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma_model, "LAUNCH_CYCLES", -1e9)  # as if it took no time
    monkeypatch.setattr(mma_planner, "searched", lambda name, settings, kind, search: search())
    monkeypatch.setattr(mma_planner, "forget", lambda: None)  # nothing is remembered
    monkeypatch.setattr(mma_planner, "_own", mma_planner._own.__wrapped__)
    layer = Layer(16, 24, (3, 3, 5), T3, (2, 2, 2), T1)
    plans: list[str] = []
    make = executor.make_task
    monkeypatch.setattr(executor, "make_task", lambda plan, *given: plans.append(plan.why) or make(plan, *given))
    with on_ampere():
        checked(layer, dtype, operands_of(layer, dtype, CONTIGUOUS))
    assert len(plans) == 2 and all("written first" in why for why in plans)


@pytest.mark.parametrize(
    "name, memory_format, passes_of_mma",
    [
        ("plain, odd lines", CONTIGUOUS, 2),
        ("gan", CHANNELS_LAST, 2),
        ("many channels", CONTIGUOUS, 2),
        ("groups", CHANNELS_LAST, 1),  # an output is the sum of 18 products on the average: multiply-adds
    ],
)
def test_strict_float32_is_three_products(
    name: str, memory_format: torch.memory_format, passes_of_mma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, plans = LAYERS[name], []
    x, *rest = layer.operands(torch.float32, "cpu")
    operands = [x.to(memory_format=memory_format), *rest]
    make = executor.make_task
    monkeypatch.setattr(executor, "make_task", lambda plan, *given: plans.append(plan.why) or make(plan, *given))
    with on_ampere(precision="ieee"):
        check(layer, torch.float32, "cpu", operands)
        result, _ = passes(tconv3d.conv_transpose3d, operands, layer.settings, forward_only=True)
    assert len(plans) == passes_of_mma and all("three TF32 products" in why for why in plans)
    doubles = [each.double() for each in operands]
    exact, _ = passes(F.conv_transpose3d, doubles, layer.settings, forward_only=True)
    assert (result - exact).norm() / exact.norm() < 2e-7


@pytest.mark.parametrize("shared_bytes", [49152, 101376, 166912, 232448])
@pytest.mark.parametrize("multiprocessors", [1, 132])
def test_tiles_for_other_devices(shared_bytes: int, multiprocessors: int) -> None:
    device = replace(AMPERE, shared_bytes=shared_bytes, multiprocessors=multiprocessors)
    layer = Layer(40, 24, (4, 5, 6), (4, 4, 4), (2, 2, 2), T1, batch=1)
    with on_ampere(device):
        checked(layer, torch.float16, operands_of(layer, torch.float16, CONTIGUOUS))


def test_a_relu_and_the_statistics_after_it() -> None:
    layer = LAYERS["gan"]
    x, weight, bias = operands_of(layer, torch.float32, CONTIGUOUS)
    with on_ampere(), poisoned():
        got = tconv3d.conv_transpose3d_relu(x, weight, bias, *layer.settings)
        fused, statistics = executor.forward_with_statistics(x, weight, bias, 4, 1e-5, layer.settings)
    exact = F.conv_transpose3d(x.double(), weight.double(), bias.double(), *layer.settings).relu()
    assert (got - exact).abs().max() < 1e-4 and torch.equal(got, fused)
    mean = exact.reshape(1, 4, -1).mean(2)
    assert (statistics[0] - mean).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("memory_format", [CONTIGUOUS, CHANNELS_LAST], ids=["contiguous", "channels last"])
def test_the_order_of_threads_changes_no_bit(
    dtype: torch.dtype, memory_format: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(40, 24, (2, 3, 5), T3, (2, 2, 2), T1, batch=1)
    results = {}
    for order in ("forward", "reversed", "shuffled:1", "shuffled:2"):
        monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", order)
        with on_ampere():
            result, grads = passes(tconv3d.conv_transpose3d, operands_of(layer, dtype, memory_format), layer.settings)
        results[order] = (result, grads[0])
    assert all(all(map(torch.equal, each, results["forward"])) for each in results.values())


# ---- what is planned for which GPU


def problem_of(name: str, which: Pass, dtype: str, last: bool) -> Problem:
    layer = BENCH[name]
    geometry = Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, *layer.settings)
    strides = channels_last_strides if last else contiguous_strides
    x, y, w = strides(layer.input_shape), strides(layer.output_shape), contiguous_strides(layer.weight_shape)
    return Problem(which, geometry, layer.batch, layer.size, dtype, x, w, y, layer.bias, tf32=dtype == "float32")


@pytest.mark.parametrize("gpu", ["A100", "L40S", "B200"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plans_fit_the_gpu(gpu: str, dtype: str) -> None:
    device = gpus.GPUS[gpu].device
    for name in ("gan_256_128_8", "large_volume", "grouped_strided", "nnunet_64_32_64", "monai_64_16_32"):
        for which in (Pass.FORWARD, Pass.INPUT_GRAD):
            problem = problem_of(name, which, dtype, last=False)
            if name in ("gan_256_128_8", "large_volume"):
                assert kernels_of({which: problem}, device) == {which: "mma"}, name
            for launch in mma_planner.plan(problem, device).launches:
                assert launch.shared_bytes <= device.shared_bytes and launch.threads <= 1024


def test_refusals_say_why() -> None:
    problem = problem_of("gan_256_128_8", Pass.FORWARD, "float32", last=False)
    a100 = gpus.GPUS["A100"].device
    assert mma_planner.why_not(problem, a100) is None
    for refused, device, words in (
        (problem, replace(a100, capability=(7, 5)), "8.0"),
        (replace(problem, tf32=False, geometry=Geometry.make(8, 8, (1, 2, 2))), a100, "sums of 32 terms"),
        (replace(problem, which=Pass.WEIGHT_GRAD), a100, "input gradient"),
        (replace(problem, batch=0), a100, "nothing to compute"),
        (replace(problem, geometry=Geometry.make(31, 1, T3)), a100, "fewer than 32 pairs"),
        (replace(problem, geometry=Geometry.make(8, 8, (11, 11, 11))), a100, "1331 taps"),
        (replace(problem, input=(2**40, 1, 2**31, 2**30, 8)), a100, "32 bits"),
    ):
        assert words in (mma_planner.why_not(refused, device) or ""), words


def test_a_new_volume_does_not_recompile() -> None:
    """What is compiled for a layer's first volume and two typical ones is what other volumes get."""
    planner.forget()
    a100 = gpus.GPUS["A100"].device
    first = problem_of("monai_64_16_32", Pass.FORWARD, "float32", last=False)
    found = set()
    for size in ((32, 32, 32), (30, 31, 33), (34, 36, 30), (28, 28, 28), (40, 33, 29)):
        x, y = (4, 64, *size), (4, 16, *first.geometry.output_size(size))
        input, output = contiguous_strides(x), contiguous_strides(y)
        plan = planner.plan(replace(first, input_size=size, input=input, output=output), a100)
        found.add(plan.launches[-1].constants)
    assert plan.kernel == "mma" and len(found) <= 3
    planner.forget()


def test_small_volumes_share_a_tile() -> None:
    problem = problem_of("gan_512_256_4", Pass.FORWARD, "float32", last=False)
    assert "batch items" in mma_planner.plan(problem, gpus.GPUS["A100"].device).tile


def test_an_input_gradient_has_a_source_for_each_phase_of_dy() -> None:
    problem = problem_of("gan_256_128_8", Pass.INPUT_GRAD, "float32", last=False)
    work = Work(Side.of(problem), 1)
    assert len(work.sources) == 4 and all(len(source.rows) == 4 for source in work.sources)
    assert sorted(window.span for window in work.windows) == [1, 1]
    assert work.line_steps == (2, 2, 1) and work.reach == (1, 1, 3)


@pytest.mark.parametrize(
    "name, dtype, expected", [("grouped_strided", "bfloat16", 16), ("grouped_strided_g1", "bfloat16", 32)]
)
def test_few_channels_of_a_group_take_short_matrix_instructions(name: str, dtype: str, expected: int) -> None:
    for which in (Pass.FORWARD, Pass.INPUT_GRAD):
        (found,) = mma_planner.predicted(problem_of(name, which, dtype, last=True), gpus.GPUS["A100"].device, 1)
        assert found.work.step_bytes == expected and found.chunk * 2 == expected * found.build.steps


def test_fragments_are_loaded_without_bank_conflicts() -> None:
    """The 8 rows of 16 bytes that ldmatrix reads at a time lie in 8 different groups of 4 banks."""
    for name in ("relu_group_norm_conv", "monai_64_16_32"):
        for which in (Pass.FORWARD, Pass.INPUT_GRAD):
            problem = problem_of(name, which, "float32", last=True)
            for found in mma_planner.predicted(problem, gpus.GPUS["A100"].device, 4):
                box, (step_d, step_h, _) = found.box, found.work.halo_steps
                lines = product(range(box.tile[0]), range(box.tile[1]))  # lines of the box in the first batch item
                slots = [d * step_d * box.sheet + h * step_h * box.line for d, h in lines]
                for first in range(len(slots) - 7):
                    assert len({slot % 8 for slot in slots[first : first + 8]}) == 8, (name, which, box)


@pytest.mark.parametrize("told, expected", [("A100", (8, 0)), ("8.0", (8, 0)), ("L40S,80", (8, 9)), ("", (9, 0))])
def test_being_another_gpu(told: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.AS, told)
    h200 = gpus.GPUS["H200"].device
    device = gpus.as_told(h200)
    assert device.capability == expected and device.compiled_capability == (9, 0)
    assert device.multiprocessors == (80 if "80" in told else 132)
    assert device.shared_bytes == {(8, 0): 166912, (8, 9): 101376, (9, 0): 232448}[expected]


def test_being_no_gpu_that_anybody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ("Voodoo 2", "A100,many"):
        monkeypatch.setenv(gpus.AS, told)
        with pytest.raises(ValueError, match="expected a GPU"):
            gpus.as_told(gpus.GPUS["H200"].device)


# ---- kernels broken on purpose

MUTANTS = {
    "a line beside the halo's": (
        "mma_tile",
        "C::kRowH(first_row + row) + C::kWindowH(window)",
        "C::kWindowH(window)",
    ),
    "a neighbour's window": ("mma", "kShift = C::kTapShift(kTap)", "kShift = 0"),
    "the row of taps before": ("mma", "windows[kAfter.row % 2]", "windows[0]"),
    "the weights of this tap": ("mma", "load_columns<kNext>(b[kNext % 2]", "load_columns<kNow>(b[kNext % 2]"),
    "channels after the last": ("mma_copies", "if (inside && channel + 1 < C::kReduced)", "if (inside)"),
    "no bound of the halo": ("mma_copies", "x_w >= 0 && x_w < tile", "x_w < tile"),
    "a step too early": ("mma", "ptx::copy_wait<C::kStages - 2>();", "ptx::copy_wait<C::kStages - 1>();"),
    "the words of a longer step": ("mma_pack", "word % kTile / kLane;", "word % kTile / 2;"),
    "half of a pair": ("mma_stores", "to[first[b]] = values[b].at[0];", "(void)first;"),
}
# Mutants in a layer whose halo is copied asynchronously, so that several rows of taps are multiplied at once.
IN_TF32 = ("the row of taps before",)
# Mutants in a layer with so few channels per group that matrix instructions take 16 bytes of them.
IN_GROUPS = ("the words of a longer step",)
# Mutants in a layer whose halo is copied element by element: its input is a view of some channels of a tensor.
IN_VIEWS = ("channels after the last", "no bound of the halo")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, text, replacement = MUTANTS[name]
    mutate(file, text, replacement, tmp_path / "kernels")
    monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", "shuffled:1")
    layer = LAYERS["groups"] if name in IN_GROUPS else Layer(37, 8, (3, 5, 5), T3, padding=T1, batch=1)
    found = pytest.raises(AssertionError, match="elements wrong")
    dtype = torch.float32 if name in IN_TF32 else torch.float16
    with on_ampere(), kernel_from(tmp_path / "kernels", "mma_pack" if file == "mma_pack" else "mma"), found:
        x, *rest = operands_of(layer, dtype, CONTIGUOUS)
        if name in IN_VIEWS:
            more = torch.full((1, layer.in_channels + 1, *layer.size), torch.nan, dtype=dtype)
            x = more[:, :-1].copy_(x)
        check(layer, dtype, "cpu", [x, *rest], forward_only=True)
