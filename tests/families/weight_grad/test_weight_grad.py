"""The weight gradient on tensor cores against float64: types, formats, geometries, and what its planner promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from layers import TABLE, TRAPS, UNIT, Layer, poisoned
from orders import check_orders
from preferred import only
from problems import A100, H200
from torch import Tensor
from weight_gradients import check, tensors, weight_grad

from tconv3d.families.weight_grad import hopper as hopper_weight_grad_planner
from tconv3d.families.weight_grad import hopper_search, hopper_tiling, warps_tiling
from tconv3d.families.weight_grad import warps as weight_grad_planner
from tconv3d.planning import planner
from tconv3d.planning.geometry import Axis, Geometry
from tconv3d.planning.launch import Constants
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Device, Pass, Plan, Problem, bias_grad_problem, contiguous_strides
from tconv3d.planning.repertoire import TYPICAL
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

HALVES = [torch.float16, torch.bfloat16]
T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)

# Channels and sizes that fill no tile, and ones that do.
LAYERS = {
    "one tile": Layer(16, 8, (2, 3, 16), T3),
    "two tiles and a rest": Layer(40, 20, (2, 2, 9), T3, padding=T1),
    "up-convolution": Layer(20, 12, (2, 3, 8), T2, T2),
    "gan": Layer(16, 8, (3, 2, 6), (4, 4, 4), T2, T1),
    "groups of eight": Layer(16, 16, (2, 3, 10), T3, T2, T1, groups=2),
    "groups of twelve": Layer(24, 36, (2, 2, 5), (2, 3, 2), T2, groups=2),
    "five taps along w": Layer(16, 16, (3, 3, 20), (1, 5, 5), padding=(0, 2, 2)),
    "dilated beyond a window": Layer(16, 8, (2, 2, 24), (1, 2, 5), padding=(0, 0, 3), dilation=(1, 1, 4)),
    "more taps than one launch has": Layer(8, 8, (1, 2, 20), (1, 1, 19), padding=(0, 0, 7)),
    "narrow volume": Layer(16, 8, (5, 4, 2), T3, padding=T1, batch=3),
    "short lines": Layer(16, 8, (5, 4, 2), (3, 4, 4), T2, T1, batch=3),
    "many tiles": Layer(8, 8, (5, 9, 21), T3, padding=T1, batch=1),
    "two blocks of input channels": Layer(136, 8, (2, 3, 8), T2, T2),
}


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What planners that were changed here find is not for others."""
    monkeypatch.setattr(hopper_search, "searched", lambda name, settings, kind, search: search())


def clear_plans() -> None:
    planner.plan.cache_clear()
    hopper_search.tilings.cache_clear()
    hopper_weight_grad_planner.forget()


FAMILIES = {"warp": weight_grad_planner, "warpgroup": hopper_weight_grad_planner}
SEARCHES = {"warp": weight_grad_planner, "warpgroup": hopper_search}
KERNELS = {"warp": "tensor_weight_grad", "warpgroup": "hopper_weight_grad"}


@pytest.fixture(params=SEARCHES)
def tensor_cores(request: pytest.FixtureRequest, ours: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that a family can compute goes to it, few channels too; another family does not stand in."""
    if ours != "cpu" and request.param == "warpgroup" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(SEARCHES[request.param], "MIN_EFFICIENCY", 0.0)
    monkeypatch.setattr(hopper_weight_grad_planner, "COPYING_IS_WORTH", 1e9)
    clear_plans()
    with only(KERNELS[request.param]):
        yield ours
    clear_plans()


warp_only = pytest.mark.parametrize("tensor_cores", ["warp"], indirect=True)
warpgroup_only = pytest.mark.parametrize("tensor_cores", ["warpgroup"], indirect=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for i, name in enumerate(LAYERS) for dtype in (torch.float32, HALVES[i % 2])],
    ids=str,
)
def test_against_float64(name: str, dtype: torch.dtype, tensor_cores: str) -> None:
    check(LAYERS[name], *tensors(LAYERS[name], dtype, tensor_cores))


@warp_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["two tiles and a rest", "groups of eight", "gan", "dilated beyond a window"])
def test_channels_last(name: str, dtype: torch.dtype, tensor_cores: str) -> None:
    x, dy = tensors(LAYERS[name], dtype, tensor_cores)
    last = torch.channels_last_3d
    check(LAYERS[name], x.to(memory_format=last), dy.to(memory_format=last))
    check(LAYERS[name], x, dy.to(memory_format=last))  # each its own


@pytest.mark.parametrize("name", [*list(TABLE)[::2], *TRAPS])
def test_every_geometry(name: str, tensor_cores: str) -> None:
    layer = (TABLE | TRAPS)[name]
    check(layer, *tensors(layer, torch.float32, tensor_cores))


@pytest.mark.parametrize("name", ["dilated", "large stride", "asymmetric", "empty phases", "tuples are (d, h, w)"])
def test_every_geometry_in_halves(name: str, tensor_cores: str) -> None:
    layer = (TABLE | TRAPS)[name]
    check(layer, *tensors(layer, torch.float16, tensor_cores))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_sliced_and_transposed_operands(dtype: torch.dtype, tensor_cores: str) -> None:
    layer = LAYERS["one tile"]
    x, dy = tensors(layer, dtype, tensor_cores)
    big = torch.full((3, 20, 4, 5, 40), float("nan"), dtype=dtype, device=tensor_cores)
    big[1:, 3:19, 1:3, 1:4, 5:37:2] = x
    turned = dy.permute(4, 2, 0, 1, 3).contiguous().permute(2, 3, 1, 4, 0)
    check(layer, big[1:, 3:19, 1:3, 1:4, 5:37:2], turned)
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device=tensor_cores)[1:].view(x.shape)  # one element off
    shifted.copy_(x)
    check(layer, shifted, dy)


def test_expanded_grad_output(tensor_cores: str) -> None:
    """`sum().backward()` hands down a gradient whose strides are all zero."""
    layer = LAYERS["one tile"]
    x, dy = tensors(layer, torch.float32, tensor_cores)
    check(layer, x, torch.ones((), device=tensor_cores).expand(dy.shape))


def test_offsets_beyond_32_bits(tensor_cores: str) -> None:
    layer = Layer(8, 8, (2, 3, 4), T3, T2, T1)
    x, dy = tensors(layer, torch.float16, tensor_cores)
    apart = 2**31 + 64
    reserved = torch.empty(apart + x[0].numel(), dtype=torch.float16, device=tensor_cores)
    far = reserved.as_strided(x.shape, (apart, *x.stride()[1:]))
    far.copy_(x)
    check(layer, far, dy)


def test_batch_zero(tensor_cores: str) -> None:
    layer = LAYERS["one tile"]
    x, dy = tensors(layer, torch.float32, tensor_cores)
    with pytest.raises(NotImplementedError, match="there is nothing to compute"):  # The direct family writes zeros.
        weight_grad(layer, x[:0], dy[:0])


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e-42, 3.4e38])
def test_special_values_reach_the_result(value: float, tensor_cores: str) -> None:
    layer = Layer(8, 8, (1, 1, 8), T1, batch=1)
    x, dy = torch.ones(1, 8, 1, 1, 8, device=tensor_cores), torch.zeros(1, 8, 1, 1, 8, device=tensor_cores)
    x[0, 3, 0, 0, 5], dy[0, :, 0, 0, 5] = value, 1.0
    # A NaN with every bit set is what CUDA's own arithmetic makes: rounding must not carry it into the sign.
    if value != value:
        x.view(torch.int32)[0, 3, 0, 0, 5] = 0x7FFFFFFF
    got = weight_grad(layer, x, dy)[3, :, 0, 0, 0]
    assert got.isnan().all() if value != value else torch.allclose(got, torch.tensor(value), rtol=1e-3, atol=1e-41)
    assert (weight_grad(layer, x, dy)[4] == 1).all()


@pytest.mark.parametrize("name", ["groups of eight", "many tiles"])
def test_bitwise_reproducible(name: str, tensor_cores: str) -> None:
    x, dy = tensors(LAYERS[name], torch.float32, tensor_cores)
    first = weight_grad(LAYERS[name], x, dy)
    assert all(torch.equal(weight_grad(LAYERS[name], x, dy), first) for _ in range(2))


@warp_only
@pytest.mark.parametrize("name", ["groups of eight", "gan"])
def test_both_ways_of_copying_agree_to_the_bit(name: str, tensor_cores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = tensors(LAYERS[name], torch.float32, tensor_cores)
    first = check(LAYERS[name], x, dy)
    original = weight_grad_planner.tiling_of

    def through_registers(layer: warps_tiling.Layer, device: Device) -> warps_tiling.Tiling:
        tiling = original(layer, device)
        assert tiling is not None and tiling.asynchronous
        return replace(tiling, stages=2, asynchronous=False)

    monkeypatch.setattr(weight_grad_planner, "tiling_of", through_registers)
    monkeypatch.setattr(executor, "_tasks", {})
    planner.plan.cache_clear()
    assert torch.equal(weight_grad(LAYERS[name], x, dy), first)


# Every way in which x and dy come to the warpgroup kernel: words or single elements, phases alone or in pairs.
ODD_AND_EVEN = {
    "even lines": Layer(16, 8, (3, 2, 8), T3, padding=T1),
    "odd lines": Layer(16, 8, (3, 2, 7), T3),
    "even lines of two phases": Layer(16, 8, (3, 2, 8), (2, 3, 4), T2, (0, 0, 1)),
    "odd lines of two phases": Layer(16, 8, (3, 2, 8), (2, 3, 4), T2, (0, 0, 1), (0, 0, 1)),
    "odd lines of three phases": Layer(16, 12, (2, 3, 8), (2, 3, 4), (2, 1, 3), (0, 1, 2)),
    "odd lines, one of two phases": Layer(16, 8, (3, 2, 8), (2, 3, 3), T2, (0, 0, 1), dilation=(1, 1, 2)),
    "odd lines in several boxes": Layer(8, 20, (2, 3, 73), (1, 3, 5), T2, (0, 1, 3), batch=3),
    "odd lines that begin far outside": Layer(8, 8, (1, 2, 16), (1, 1, 7), T2, (0, 0, 9), dilation=(1, 1, 3)),
    "one of two phases": Layer(16, 8, (3, 2, 8), (2, 3, 2), T2, (0, 0, 1), dilation=(1, 1, 2)),
    "three phases": Layer(16, 8, (3, 2, 8), (2, 3, 4), (1, 2, 3), (0, 0, 2)),
    "vectors of two": Layer(16, 8, (3, 2, 10), T3),
    "vectors of four": Layer(12, 8, (3, 2, 16), T3),
}


@warpgroup_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ODD_AND_EVEN)
def test_every_way_of_copying(name: str, dtype: torch.dtype, tensor_cores: str) -> None:
    check(ODD_AND_EVEN[name], *tensors(ODD_AND_EVEN[name], dtype, tensor_cores))


@warpgroup_only
@pytest.mark.parametrize(
    "name", ["odd lines of two phases", "odd lines of three phases", "odd lines, one of two phases"]
)
def test_lines_that_begin_anywhere_in_vectors(name: str, tensor_cores: str) -> None:
    """Vectors that contain a line of dy reach beyond it, but never beyond the tensor, and only of aligned tensors."""
    layer = ODD_AND_EVEN[name]
    assert hopper_layer(layer, torch.bfloat16).shifted_y and not hopper_layer(layer, torch.float32).shifted_y
    assert not hopper_weight_grad_planner.layer_of(replace(problem(layer, "bfloat16"), aligned=False)).shifted_y
    x, dy = tensors(layer, torch.bfloat16, tensor_cores)
    for apart in (0, 1, 5):  # odd and even distances from channel to channel, with NaN between channels
        n, c, d, h, w = dy.shape
        memory = torch.full((n, c, d * h * w + apart), float("nan"), dtype=dy.dtype, device=dy.device)
        view = memory.as_strided(dy.shape, (c * (d * h * w + apart), d * h * w + apart, h * w, w, 1))
        check(layer, x, view.copy_(dy))
    (found,) = hopper_weight_grad_planner.offer({Pass.WEIGHT_GRAD: problem(layer, "bfloat16")}, H200)
    assert isinstance(found, Offer) and found.surcharge > 1


@warpgroup_only
@pytest.mark.parametrize("name", ["gan", "groups of twelve", "two tiles and a rest"])
def test_every_tiling(name: str, tensor_cores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tiling for each depth of fragments and division of taps, in two types."""
    layer = LAYERS[name]
    for dtype in (torch.float32, torch.bfloat16):
        operands = tensors(layer, dtype, tensor_cores)
        device = executor.device_of(operands[0])
        seen = {}
        for tiling in hopper_search.tilings(hopper_layer(layer, dtype), device, 200):
            way = (tiling.depth, len(tiling.pieces), len(tiling.rows_d), min(tiling.row_tiles, 2))
            seen.setdefault(way, tiling)
        assert len(seen) >= 2
        original = hopper_weight_grad_planner.plan
        for tiling in list(seen.values())[:6]:
            with monkeypatch.context() as context:
                chosen = partial(original, tiling=tiling)
                context.setattr(hopper_weight_grad_planner, "plan", chosen)
                context.setattr(executor, "_tasks", {})
                planner.plan.cache_clear()
                check(layer, *operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["up-convolution", "gan", "groups of eight", "two blocks of input channels", "five taps along w"]
)
def test_the_bias_in_the_same_pass(name: str, dtype: torch.dtype, tensor_cores: str) -> None:
    layer = LAYERS[name]
    x, dy = tensors(layer, dtype, tensor_cores)

    def both() -> list[Tensor | None]:
        with poisoned():
            wanted = False, True, True
            return executor.backward(dy, x, None, wanted, layer.size, layer.kernel, layer.settings)[1:]

    dw, db = both()
    assert dw is not None and db is not None
    alone = weight_grad(layer, x, dy)  # alone, partial sums may be added in another order
    assert bool(((dw - alone).abs() <= 4 * UNIT[dtype] * alone.abs() + 1e-5).all())
    exact, largest = dy.double().sum((0, 2, 3, 4)), dy.double().abs().sum((0, 2, 3, 4))
    allowed = 4 * UNIT[torch.float32] * largest + UNIT[dtype] * exact.abs()
    assert bool(((db.double() - exact).abs() <= allowed).all())
    assert torch.equal(both()[1], db)


@warpgroup_only
@pytest.mark.parametrize(("width", "dtype"), [(2, torch.float32), (4, torch.bfloat16)], ids=str)
def test_lines_of_half_a_segment_are_taken_two_at_a_time(width: int, dtype: torch.dtype, tensor_cores: str) -> None:
    """Where they lie side by side: not of a slice."""
    layer = Layer(16, 8, (3, 4, width), (4, 3, 4), T2, T1)
    assert hopper_layer(layer, dtype).at_once == 2
    for other in (
        replace(layer, size=(3, 3, width)),
        replace(layer, size=(3, 4, 4 * width)),
        replace(layer, stride=T1),
    ):
        assert hopper_layer(other, dtype).at_once == 1
    x, dy = tensors(layer, dtype, tensor_cores)
    check(layer, x, dy)
    wide = torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)
    check(layer, wide[..., :width], dy)


@warpgroup_only
@pytest.mark.parametrize("splits", [1, 3, 8, 21])
def test_any_number_of_parts(splits: int, tensor_cores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parts than steps too: some have nothing to add."""
    monkeypatch.setattr(hopper_weight_grad_planner, "splits_of", lambda *_: splits)
    for name, slices in (("two tiles and a rest", 1), ("groups of twelve", 8), ("five taps along w", 2)):
        monkeypatch.setattr(hopper_weight_grad_planner, "_slices", lambda *_, slices=slices: slices)
        check(LAYERS[name], *tensors(LAYERS[name], torch.float32, tensor_cores))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_no_order_of_threads_changes_the_result(
    dtype: torch.dtype, tensor_cores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS["many tiles"]
    x, dy = tensors(layer, dtype, tensor_cores)
    check_orders(tensor_cores, monkeypatch, lambda: [weight_grad(layer, x, dy)])


# ---- The planner's promises.


def problem(layer: Layer, dtype: str = "float32", tf32: bool = True, size: tuple[int, ...] | None = None) -> Problem:
    geometry = Geometry.make(
        layer.in_channels,
        layer.out_channels,
        layer.kernel,
        layer.stride,
        layer.padding,
        layer.output_padding,
        layer.groups,
        layer.dilation,
    )
    size = size or layer.size
    shapes = (
        (layer.batch, layer.in_channels, *size),
        (layer.in_channels, layer.out_channels // layer.groups, *layer.kernel),
        (layer.batch, layer.out_channels, *geometry.output_size(size)),
    )
    x, w, y = (contiguous_strides(shape) for shape in shapes)
    return Problem(Pass.WEIGHT_GRAD, geometry, layer.batch, size, dtype, x, w, y, tf32=tf32)


def hopper_layer(layer: Layer, dtype: torch.dtype) -> hopper_tiling.Layer:
    return hopper_weight_grad_planner.layer_of(problem(layer, str(dtype).removeprefix("torch.")))


def test_what_the_warpgroup_kernel_refuses_and_why() -> None:
    taken = problem(Layer(64, 32, (4, 4, 16), T3))
    assert hopper_weight_grad_planner.why_not(taken, H200) is None
    assert planner.plan(taken, H200).kernel == "hopper_weight_grad"
    assert any(each.kernel == "tensor_weight_grad" for each in weight_grad_planner.offer({taken.which: taken}, A100))
    for refused, device, reason in (
        (replace(taken, which=Pass.FORWARD), H200, "pass"),
        (replace(taken, tf32=False), H200, "TF32"),
        (replace(taken, dtype="float64"), H200, "float64"),
        (taken, A100, "9.0"),
        (taken, replace(H200, capability=(10, 0)), "9.0"),
        (problem(Layer(1, 1, (4, 4, 4), T3)), H200, "products"),
        (problem(Layer(64, 32, (4, 4, 9000), (1, 1, 2), dilation=(1, 1, 8000))), H200, "reach"),
        (problem(Layer(64, 32, (4, 4, 2**21), T3)), H200, "long"),
        (replace(problem(Layer(32, 32, (32, 64, 128), T3, T2, T1), "float16"), aligned=False), H200, "copying"),
    ):
        assert reason in (hopper_weight_grad_planner.why_not(refused, device) or "")


def test_what_it_refuses_and_why() -> None:
    taken = problem(LAYERS["one tile"])
    assert weight_grad_planner.why_not(taken, H200) is None
    assert weight_grad_planner.why_not(taken, A100) is None
    for refused, device, reason in (
        (replace(taken, which=Pass.FORWARD), H200, "pass"),
        (replace(taken, tf32=False, batch=1, input_size=(1, 3, 15)), H200, "sums of 45 terms"),
        (replace(taken, dtype="float64"), H200, "float64"),
        (taken, replace(A100, capability=(7, 5)), "8.0"),
        (problem(Layer(4, 1, (4, 4, 4), T3)), H200, "channels"),
        (problem(Layer(16, 8, (4, 4, 9000), (1, 1, 2), dilation=(1, 1, 8000))), H200, "reach"),
    ):
        assert reason in (weight_grad_planner.why_not(refused, device) or "")


def constants(plan: Plan) -> list[Constants]:
    return [launch.constants for launch in plan.launches]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stride", [T1, T2], ids=str)
def test_a_new_volume_or_batch_compiles_nothing(family: str, stride: tuple[int, int, int]) -> None:
    """But what typical volumes need."""
    layer = Layer(48, 24, (24, 24, 24), T3, stride, batch=2)

    def planned(size: tuple[int, int, int], batch: int) -> set[Constants]:
        return {*constants(FAMILIES[family].plan(problem(replace(layer, batch=batch), size=size), H200))}

    have: set[Constants] = set()
    for n, edge in TYPICAL:
        clear_plans()
        have |= planned((edge, edge, edge), n)
    clear_plans()
    have |= planned(layer.size, layer.batch)
    for size, batch in (((12, 32, 64), 1), ((1, 1, 9000), 1), ((7, 64, 32), 3), ((3, 8, 4), 1), ((60, 64, 96), 2)):
        assert planned(size, batch) <= have


BOTH = [("warp", H200), ("warp", A100), ("warpgroup", H200)]


@pytest.mark.parametrize(("family", "device"), BOTH, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("name", LAYERS)
def test_plans_stay_within_bounds(name: str, family: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_search, "MIN_EFFICIENCY", 0.0)
    clear_plans()
    layer = replace(LAYERS[name], size=(64, 64, 64), batch=16)
    for dtype in ("float32", "float16"):
        plan = FAMILIES[family].plan(problem(layer, dtype), device)
        assert plan.workspace_bytes <= device.workspace_bytes
        assert all(launch.shared_bytes <= device.shared_bytes for launch in plan.launches)
        assert "parts" in plan.tile


@pytest.mark.parametrize("name", ["one tile", "gan", "groups of eight", "five taps along w"])
def test_compiles_without_spills(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        compiler.version()
    except compiler.MissingCompilerError:
        pytest.skip("NVRTC is not installed")
    monkeypatch.setattr(hopper_search, "MIN_EFFICIENCY", 0.0)
    clear_plans()
    for family, device in BOTH:
        main = FAMILIES[family].plan(problem(LAYERS[name]), device).launches[0]
        compiled = compiler.compile(main.kernel, main.constants, compiler.architecture(device.capability))
        assert compiled.report.spill_stores == 0 and compiled.report.stack_bytes == 0
        assert not compiled.serialized


def test_windows_cover_every_tap_once() -> None:
    for kernel, stride, padding, dilation in ((3, 1, 0, 1), (4, 2, 1, 1), (5, 3, 4, 2), (7, 1, 3, 5), (2, 4, 0, 2)):
        axis = Axis(kernel, stride, padding, 0, dilation)
        for per_word, vector in ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 8)):
            planes = warps_tiling.Planes.of(axis, range(kernel), per_word, vector)
            assert stride > 1 or planes.offsets[0] % vector == 0
            found = {}
            for window in planes.windows:
                for tap, shift in window.taps:
                    assert tap not in found and 0 <= shift <= 4 * per_word
                    found[tap] = planes.offsets[window.plane] + stride * (window.start * per_word + shift)
            assert found == {tap: tap * dilation - padding for tap in range(kernel)}


def test_windows_of_whole_lines_cover_every_tap_once() -> None:
    for kernel, padding, dilation in ((2, 0, 1), (3, 1, 1), (4, 1, 1), (5, 2, 3), (8, 3, 1)):
        axis = Axis(kernel, 2, padding, 0, dilation)
        for per_word, vector in ((1, 1), (1, 4), (2, 1), (2, 2), (2, 8)):
            planes = warps_tiling.Planes.whole(axis, range(kernel), per_word, vector)
            assert planes.offsets[0] % vector == 0
            found = {}
            for window, words in zip(planes.windows, planes.window_words, strict=True):
                assert window.start % 4 == 0 and words in (8, 12, 16)
                for tap, shift in window.taps:
                    last = shift + 2 * (4 * per_word - 1)  # the element that the lane's last position reads
                    assert tap not in found and shift >= 0 and last < words * per_word
                    found[tap] = planes.offsets[0] + window.start * per_word + shift
            assert found == {tap: tap * dilation - padding for tap in range(kernel)}


def test_copies_of_16_bit_tensors_are_asynchronous() -> None:
    """Registers hold 16-bit elements on their way only where they come one by one: odd rows and channels last."""
    for layer, asynchronous in (
        (Layer(64, 32, (8, 8, 16), T2, T2), True),
        (Layer(64, 32, (8, 8, 16), T3, T2), False),
    ):
        plan = weight_grad_planner.plan(replace(problem(layer), dtype="bfloat16", tf32=False), A100)
        constants = dict(plan.launches[0].constants)
        assert constants["kAsync"] is asynchronous and constants["kStep"] == 2 and constants["kPhases"] == 1


def test_who_adds_up_the_bias() -> None:
    """The weight's kernel where its own taps read every output once, else a kernel for it alone."""
    for layer, together in ((Layer(64, 32, (8, 8, 16), T2, T2), True), (Layer(64, 32, (8, 8, 16), T3), False)):
        weight = problem(layer)
        size = weight.output_size
        asked = weight, bias_grad_problem(layer.batch, layer.out_channels, size, "float32", weight.output)
        plans = [plan.kernel for plan in planner.gradient_plans(asked, H200)]
        assert plans == ["hopper_weight_grad"] + ["channel_sum"] * (not together)


def test_an_input_gradient_packs_its_weight_first() -> None:
    """The weight's gradient is computed between, in a workspace of its own."""
    weight = problem(Layer(64, 32, (16, 32, 32), T3, T2, T1))
    both = replace(weight, which=Pass.INPUT_GRAD), weight
    packs = planner.plan(both[0], H200)
    plan = planner.plan_gradients(both, H200)
    assert [launch.kernel for launch in plan.launches] == ["pack", "hopper_weight_grad", "reduce_taps", "halo"]
    start = dict(plan.regions)["workspace of weight_grad"]
    assert packs.workspace_bytes <= start == plan.workspace_bytes - planner.plan(weight, H200).workspace_bytes
    assert not any(launch.pointers.count("workspace") for launch in plan.launches[1:3])


def test_no_block_claims_registers_that_it_has_not() -> None:
    for share in hopper_tiling.SHARES:
        given = 65536 // share.threads // 8 * 8 * share.threads  # when it starts
        claimed = 128 * (share.consumers * share.consumer + share.producers * share.producer)
        assert claimed <= given
