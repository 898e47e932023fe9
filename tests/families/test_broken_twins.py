"""Breaks every kernel family on purpose: each family has a broken twin, and the checks of the fuzz must find it.

A twin is a kernel with one piece of its text replaced. Replacements drop a term, leave an output unwritten or take a
wrong value, and stay inside all tensors, so that the finding is a wrong number. The unbroken kernel passes the same
case in the same test, and the planner must have taken the family for it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from fuzz import run
from fuzz.case import Case, Memory
from layers import Layer
from mutants import kernel_from, mutate_kernel
from preferred import counted, forgetting

from tconv3d import emulator
from tconv3d.planning import planner

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")]

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
LAST = Memory("ndhwc")


class Twin(NamedTuple):
    """A family, the kernel of it that is broken, the text that is replaced, and the case that shows it."""

    family: str
    kernel: str
    text: str
    replacement: str
    case: Case


UP = Layer(16, 8, (2, 4, 8), T2, T2, batch=1, bias=False)
GROUPS = Layer(16, 16, (3, 4, 14), T3, T1, T1, groups=4, batch=1)
ODD = Layer(64, 96, (3, 5, 9), T3, T2, T1, batch=1)
SHIFTED = Layer(32, 24, (3, 4, 24), T3, T2, T1)
DEPTHWISE = Layer(6, 6, (3, 3, 4), (4, 4, 4), T2, T1, groups=6)
ODD_LINES = Layer(6, 6, (3, 3, 13), (5, 5, 5), T2, T2, groups=6)
GRADIENTS = ("input", "weight", "bias")
GATHERED = Case(Layer(40, 24, (2, 3, 3), T3, T2, T1, T1), "bfloat16", favoured="gather", wanted=GRADIENTS)
TWINS = (
    Twin("direct", "direct", "&& w + kW < args.x_size.w;", "&& w + kW + 1 < args.x_size.w;", Case(ODD, "float64")),
    Twin(
        "direct",
        "direct_weight_grad",
        "position < args.dy_positions;",
        "position + 1 < args.dy_positions;",
        Case(replace(ODD, in_channels=4, out_channels=5), favoured="direct_weight_bias", wanted=("weight", "bias")),
    ),
    Twin(
        "direct",
        "channel_sum",
        "last ? whole * rows",
        "last ? whole * rows + 1",
        Case(Layer(4, 5, (3, 3, 3), T3), wanted=("bias",), input=LAST, grad=LAST, at_end=False),
    ),
    Twin(
        "direct",
        "channel_sum",
        "first += lanes * kAtOnce",
        "first += (lanes + 1) * kAtOnce",
        Case(Layer(4, 5, (3, 3, 3), T3), wanted=("bias",), input=LAST, grad=LAST, at_end=False),
    ),
    Twin(
        "depthwise",
        "reduce",
        "args.more, block - blocks);",
        "args.more, block);",
        Case(replace(DEPTHWISE, size=(5, 6, 9)), wanted=("weight", "bias")),
    ),
    Twin("depthwise", "depthwise", "w + kW >= 0 &&", "w + kW > 0 &&", Case(DEPTHWISE)),
    Twin(
        "depthwise", "depthwise_weight_grad", "w + kW >= 0 &&", "w + kW > 0 &&", Case(DEPTHWISE, wanted=("weight",))
    ),
    Twin(
        "depthwise_tiles",
        "depthwise_tiles",
        "const bool inside = exists && static_cast",
        "const bool inside = exists && first_h + row > 0 && static_cast",
        Case(DEPTHWISE, favoured="depthwise_tiles", wanted=("input",)),
    ),
    Twin(
        "depthwise_tiles",
        "depthwise_tiles",
        "store(q * C::kPhasesD + phase, sum",
        "store(q * C::kPhasesD, sum",
        Case(DEPTHWISE, favoured="depthwise_tiles"),
    ),
    Twin(
        "depthwise_tiles",
        "depthwise_tiles",
        "weight[kTap][t_w] * values",
        "weight[kTap][0] * values",
        Case(DEPTHWISE, favoured="depthwise_rows", wanted=("input",)),
    ),
    Twin(
        "depthwise_tiles",
        "depthwise_tiles",
        "lines.put(to, values, last);",
        "lines.put(to, values, false);",
        Case(ODD_LINES, favoured="depthwise_gathered"),
    ),
    Twin(
        "depthwise_tiles",
        "depthwise_tiles",
        "at >= before && at < end",
        "at > before && at < end",
        Case(ODD_LINES, favoured="depthwise_gathered"),
    ),
    Twin(
        "depthwise_tiles",
        "depthwise_tiles",
        "address % 16);",
        "0u);",
        Case(ODD_LINES, "bfloat16", favoured="depthwise_gathered", wanted=("input",)),
    ),
    Twin(
        "depthwise_tiles_weight_grad",
        "depthwise_tiles_weight_grad",
        "if (before > 0) clear_first",
        "if (before > 2) clear_first",
        Case(ODD_LINES, "bfloat16", favoured="depthwise_teams", wanted=("weight",)),
    ),
    Twin(
        "depthwise_tiles",
        "depthwise_tiles",
        "weight[t * C::kOwn + c] = own.at[c];",
        "weight[t * C::kOwn + c] = own.at[0];",
        Case(ODD_LINES, favoured="depthwise_pairs", input=LAST),
    ),
    Twin(
        "depthwise_tiles_weight_grad",
        "depthwise_tiles_weight_grad",
        "plane >= first && plane < end",
        "plane > first && plane < end",
        Case(DEPTHWISE, wanted=("weight",), favoured="depthwise_tiles"),
    ),
    Twin(
        "depthwise_tiles_weight_grad",
        "depthwise_tiles_weight_grad",
        "x.read(x_planes[m], h,",
        "x.read(x_planes[0], h,",
        Case(DEPTHWISE, wanted=("weight",), favoured="depthwise_teams"),
    ),
    Twin(
        "depthwise_lines",
        "depthwise_lines",
        "x_d < args.x_size.d && x_h >= 0 &&",
        "x_d < args.x_size.d && x_h > 0 &&",
        Case(Layer(32, 32, (3, 3, 18), T3, T2, T1, T1, groups=32, batch=1), "bfloat16", input=LAST),
    ),
    Twin(
        "few_outputs",
        "few_outputs",
        "row < C::kHaloH * C::kLine && x_h >= 0",
        "row < C::kHaloH * C::kLine && x_h > 0",
        Case(Layer(16, 2, (3, 4, 8), T3, T2, T1, T1)),
    ),
    Twin(
        "few_inputs",
        "few_inputs",
        "h < args.y_size.h && w < args.y_size.w;",
        "h + 1 < args.y_size.h && w < args.y_size.w;",
        Case(Layer(4, 24, (3, 4, 8), T3, T2, T1)),
    ),
    Twin(
        "few_inputs",
        "few_inputs",
        "values[i] = upper ? got : low;",
        "values[i] = upper ? low : got;",
        Case(Layer(4, 24, (3, 4, 8), T3, T2, T1)),
    ),
    Twin(
        "few_weight_grad",
        "few_weight_grad",
        "d < args.many_size.d && h < args.many_size.h",
        "d < args.many_size.d && h + 1 < args.many_size.h",
        Case(Layer(4, 24, (3, 4, 8), T3, T2, T1), wanted=("weight",)),
    ),
    Twin(
        "group_backward",
        "group_backward",
        "(first + kLine < 0 ||",
        "(first + kLine <= 0 ||",
        Case(GROUPS, wanted=("input", "weight")),
    ),
    Twin(
        "group_backward",
        "group_backward",
        "ptx::copy_beginning(own + at, from + at, min(left - at, 16));",
        "ptx::copy_beginning(own + at, from + at, min(left - at, 12));",
        Case(GROUPS, plans="A100", wanted=("input", "weight")),
    ),
    Twin(
        "group_backward",
        "group_backward",
        "C::kSlices > 1 && slice > 0 && d < task.end",
        "C::kSlices > 1 && slice > 1 && d < task.end",
        Case(Layer(4, 24, (3, 4, 14), T3, T2, T1, batch=1), "bfloat16", wanted=("input",)),
    ),
    Twin(
        "halo",
        "halo",
        "(at.w + Config::kOrigin(origin, 2) + w) *",
        "(at.w + Config::kOrigin(origin, 2) + w + 1) *",
        Case(Layer(64, 32, (3, 5, 9), T3, T2, T1, batch=1), "bfloat16", input=LAST),
    ),
    Twin(
        "mma",
        "mma",
        "kShift = C::kTapShift(kTap)",
        "kShift = 0",
        Case(Layer(37, 8, (3, 5, 5), T3, padding=T1, batch=1), "float16", plans="A100"),
    ),
    Twin(
        "mma",
        "mma",
        "squares[i / kBandSums] += deviation * deviation;",
        "squares[i / kBandSums] += deviation;",
        Case(Layer(37, 8, (3, 5, 5), T3, padding=T1, batch=1), "float16", plans="A100", epilogue="norm"),
    ),
    Twin(
        "mma",
        "mma",
        "class_h * C::kClassOutputH +",
        "0 * C::kClassOutputH +",
        Case(Layer(8, 9, (3, 4, 5), T3, T2, T2, dilation=T3, batch=1), "float16", plans="A100", favoured="mma_far"),
    ),
    Twin(
        "mma",
        "mma",
        "return i < count &&",
        "return i + 1 < count &&",
        Case(
            Layer(12, 20, (2, 3, 4), (6, 5, 2), (1, 2, 1), (3, 1, 0), batch=1),
            "float16",
            plans="A100",
            favoured="mma_far",
        ),
    ),
    Twin(
        "unfold",
        "unfold",
        "d < args.output.d && 0 <= h",
        "d < args.output.d && 0 < h",
        Case(Layer(20, 11, (2, 3, 3), T3, T2, T1, T1), favoured="unfold", wanted=GRADIENTS),
    ),
    Twin(
        "unfold",
        "unfolded_products",
        "if (in + i % 2 < args.rows",
        "if (in + i % 2 + 1 < args.rows",
        Case(Layer(20, 11, (2, 3, 3), T3, T2, T1, T1), favoured="unfold", wanted=GRADIENTS),
    ),
    Twin(
        "gather",
        "gathered_products",
        "< static_cast<unsigned>(size)",
        "< static_cast<unsigned>(size - 1)",
        GATHERED,
    ),
    Twin(
        "gather",
        "gathered_products",
        "position + row < args.rows",
        "position + row + 1 < args.rows",
        GATHERED,
    ),
    Twin("up", "up", "bias[layout.out_of_sum(i)]", "bias[layout.out_of_sum(0)]", Case(replace(UP, bias=True))),
    Twin(
        "up_grad",
        "up_grad",
        "const bool inside = piece < args.pieces;",
        "const bool inside = piece + 1 < args.pieces;",
        Case(UP, favoured="up_grad", wanted=("input",)),
    ),
    Twin(
        "up_backward",
        "up_backward",
        "found.inside = at < args.pieces;",
        "found.inside = at + 1 < args.pieces;",
        Case(UP, favoured="up_backward", wanted=("input", "weight")),
    ),
    Twin(
        "up_backward_last",
        "up_backward_last",
        "if (tile < args.tiles && at < args.positions) {",
        "if (tile < args.tiles && at + 1 < args.positions) {",
        Case(UP, favoured="up_backward", wanted=("input", "weight"), input=LAST, grad=LAST),
    ),
    Twin(
        "hopper_weight_grad",
        "hopper_weight_grad",
        "const bool line = inside(h, args.dy_size.h);",
        "const bool line = h > 0 && inside(h, args.dy_size.h);",
        Case(ODD, wanted=("weight",)),
    ),
    Twin(
        "hopper_weight_grad",
        "hopper_weight_grad",
        "inside(d, args.dy_size.d) && inside(h, args.dy_size.h) ? args.dy_size.w : 0;",
        "inside(d, args.dy_size.d) && inside(h, args.dy_size.h) ? args.dy_size.w - 1 : 0;",
        Case(ODD, wanted=("weight",), input=LAST, grad=LAST),
    ),
    Twin(
        "halo",
        "halo",
        "q >= found.before ? shift : 0",
        "shift",
        Case(SHIFTED, "bfloat16", favoured="halo_turned", wanted=("input",)),
    ),
    Twin(
        "halo",
        "halo",
        "q == 0 && shift > 0 ? found.left",
        "q == 0 && shift > 8 ? found.left",
        Case(SHIFTED, "bfloat16", favoured="halo_turned", wanted=("input",)),
    ),
    Twin(
        "hopper_weight_grad",
        "hopper_weight_grad",
        "ptx::shifted(from[0], from[1], shift % 2 * 16)",
        "ptx::shifted(from[0], from[1], 0)",
        Case(SHIFTED, "bfloat16", wanted=("weight", "bias")),
    ),
    Twin(
        "hopper_weight_grad",
        "hopper_weight_grad",
        "return first + 2 * kWord < 0 ? 0u : word;",
        "return word;",
        Case(SHIFTED, "bfloat16", wanted=("weight",)),
    ),
    Twin(
        "rows_weight_grad",
        "rows_weight_grad",
        "h >= 0 && h < args.dy_size.h && channel < C::kOutPerGroup;",
        "h > 0 && h < args.dy_size.h && channel < C::kOutPerGroup;",
        Case(ODD, "bfloat16", favoured="rows", wanted=("weight",), input=LAST, grad=LAST),
    ),
    Twin(
        "rows_weight_grad",
        "rows_weight_grad",
        "own.first_y + i / 4 * 8 + 2 * lane + i % 2;",
        "own.first_y + i / 4 * 8 + 2 * lane;",
        Case(ODD, "bfloat16", favoured="rows", wanted=("weight", "bias"), input=LAST, grad=LAST),
    ),
    Twin(
        "tensor_weight_grad",
        "tensor_weight_grad",
        "d < size.d && h >= 0 && h < size.h;",
        "d < size.d && h > 0 && h < size.h;",
        Case(ODD, plans="A100", wanted=("weight",)),
    ),
    Twin(
        "tensor_weight_grad",
        "tensor_weight_grad",
        "return ptx::high_halves(window[kFirst / 2], window[kSecond / 2]);",
        "return ptx::low_halves(window[kFirst / 2], window[kSecond / 2]);",
        Case(UP, "bfloat16", plans="A100", wanted=("weight",)),
    ),
    Twin(
        "tensor_weight_grad",
        "tensor_weight_grad",
        "multiply_step<1>(rest, x[0][m], step, dy);",
        "",
        Case(Layer(64, 96, (3, 5, 9), T3, T2, T1), "float32", plans="A100", wanted=("weight",)),
    ),
    Twin(
        "tensor_weight_grad",
        "tensor_weight_grad",
        "return at >= 0 && at < stride;",
        "return at > 0 && at < stride;",
        Case(ODD, plans="A100", wanted=("weight", "bias")),
    ),
    Twin(
        "tensor_weight_grad",
        "tensor_weight_grad",
        "own |= own << 1;",
        "own |= own << 2;",
        Case(Layer(16, 8, (3, 4, 20), T3, T1, T1), plans="A100", wanted=("weight", "bias")),
    ),
    Twin(
        "tensor_weight_grad",
        "tensor_weight_grad",
        "exists ? first + width : first;",
        "first;",
        Case(Layer(16, 8, (3, 5, 16), T3, T1, T1), "bfloat16", plans="A100", wanted=("weight",)),
    ),
    Twin(
        "turned",
        "turn",
        "own[2].at[c], own[3].at[c]",
        "own[2].at[c], own[2].at[c]",
        Case(ODD, favoured="turned", wanted=("weight",), input=LAST, grad=LAST),
    ),
    Twin(
        "rows_weight_grad",
        "turn",
        "select<kItemBytes>(around[k], offset_in_vector(from(half + k)))",
        "select<kItemBytes>(around[k], 0)",
        Case(ODD, "bfloat16", favoured="to_rows", wanted=("weight",)),
    ),
    Twin(
        "tensor_weight_grad",
        "turn",
        "rows[k] = {};",
        "rows[k] = rows[0];",
        Case(ODD, "bfloat16", plans="A100", favoured="to_lines", wanted=("weight",), input=LAST, grad=LAST),
    ),
    Twin(
        "norm",
        "statistics",
        "squares[0] += part.squares + shift",
        "squares[0] += part.squares - shift",
        Case(Layer(16, 8, (3, 4, 8), T3), epilogue="norm"),
    ),
    Twin(
        "norm",
        "normalize",
        "- mean[own]) * scale[own]",
        "+ mean[own]) * scale[own]",
        Case(Layer(16, 8, (3, 4, 8), T3), epilogue="norm"),
    ),
)


def test_every_family_has_a_broken_twin() -> None:
    assert {twin.family for twin in TWINS} == {name for name, _ in planner.FAMILIES} | {"norm"}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: f"{twin.family}: {twin.kernel}")
def test_a_broken_twin_is_found(twin: Twin, tmp_path: Path) -> None:
    with forgetting(), counted() as families:
        run.check(twin.case, "cpu")
    assert twin.family == "norm" or families[twin.family], f"the planner took {dict(families)}"
    mutate_kernel(twin.kernel, twin.text, twin.replacement, tmp_path / "kernels")
    with forgetting(), kernel_from(tmp_path / "kernels", twin.kernel), pytest.raises(AssertionError, match="wrong"):
        run.check(twin.case, "cpu")


def first_and_others() -> list[object]:
    """Returns the twins; `make test-thorough` runs all, and `make test` the first of every family."""
    first = {twin.family: twin for twin in reversed(TWINS)}
    return [twin if twin is first[twin.family] else pytest.param(twin, marks=pytest.mark.thorough) for twin in TWINS]


@pytest.mark.parametrize("twin", first_and_others(), ids=lambda twin: f"{twin.family}: {twin.kernel}")
def test_the_unbroken_kernel_has_no_race(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executes the twin's case under the emulator's race detector."""
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")
    with forgetting():
        run.check(twin.case, "cpu")
