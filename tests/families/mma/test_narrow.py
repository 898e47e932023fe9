"""Layers with one to three channels on a side, computed by `mma` and `halo` with most of an instruction idle."""

from __future__ import annotations

import pytest
from fuzz import run
from fuzz.case import Case, Memory
from fuzz.families import paths_of
from layers import Layer
from preferred import counted, forgetting
from problems import A100, H200, problem

from tconv3d import emulator
from tconv3d.families.halo import planner as halo
from tconv3d.families.mma import planner as mma
from tconv3d.planning.problem import Pass

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
LAST = Memory("ndhwc")
GRADIENT = ("input",)
ONE_IN = Layer(1, 64, (2, 3, 9), T3, T2, T1, T1)
ONE_OUT = Layer(64, 1, (2, 3, 5), T3, T2, T1, T1)
TWO_IN = Layer(2, 36, (2, 4, 7), (3, 2, 3), (1, 2, 2), T1)
THREE_OUT = Layer(24, 3, (3, 3, 6), T3, T1, T1)
GROUPS = Layer(6, 48, (2, 3, 6), T3, T2, T1, groups=2)
LAYERS = {
    "one input, TF32": (ONE_IN, "tf32", Memory()),
    "one input, channels last": (ONE_IN, "bfloat16", LAST),
    "one output, TF32": (ONE_OUT, "tf32", Memory()),
    "one output, channels last": (ONE_OUT, "float16", LAST),
    "one output, float32": (ONE_OUT, "float32", Memory()),
    "two inputs, float16": (TWO_IN, "float16", Memory()),
    "two inputs, channels last": (TWO_IN, "tf32", LAST),
    "three outputs, bfloat16": (THREE_OUT, "bfloat16", Memory()),
    "three outputs, channels last": (THREE_OUT, "tf32", LAST),
    "three inputs per group": (GROUPS, "tf32", Memory()),
}
CALLS = {
    "plain": {},
    "input gradient": {"wanted": GRADIENT},
    "moments": {"epilogue": "norm"},
    "operands": {"epilogue": "tail", "vector_count": 2, "residuals": ("whole", "channel")},
}


@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kernel, gpu", [("mma", "A100"), ("halo", "H200")])
def test_against_float64(kernel: str, gpu: str, name: str, call: str) -> None:
    layer, dtype, memory = LAYERS[name]
    case = Case(layer, dtype, gpu, kernel, input=memory, weight=memory, grad=memory, **CALLS[call])  # type: ignore[arg-type]
    with forgetting(), counted(paths_of) as counts:
        run.check(case, "cpu")
    assert counts[f"{kernel}, narrow"]


def test_fewer_pairs_are_refused() -> None:
    for ins, outs in ((1, 31), (31, 1), (3, 10)):
        assert "fewer than 32 pairs" in (mma.why_not(problem(Layer(ins, outs, T3, T3), Pass.FORWARD), A100) or "")
    for ins, outs in ((1, 63), (21, 3), (7, 9)):
        assert "fewer than 64 pairs" in (halo.why_not(problem(Layer(ins, outs, T3, T3), Pass.FORWARD), H200) or "")
    assert mma.why_not(problem(Layer(1, 32, T3, T3), Pass.FORWARD), A100) is None
    assert halo.why_not(problem(Layer(1, 64, T3, T3), Pass.FORWARD), H200) is None
