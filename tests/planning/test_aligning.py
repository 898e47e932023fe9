"""Gradients by way of copies of dy that kernels read in vectors: the copies, results against float64, and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fuzz import run
from fuzz.case import Case, Memory
from layers import Layer, check, shifted
from preferred import forgetting, preferring
from problems import A100, H200, problems

from tconv3d import emulator
from tconv3d.planning import aligning, planner
from tconv3d.planning.problem import Device, Pass, Problem, channels_last_strides
from tconv3d.runtime import compiler

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
needs_emulator = pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
REPRESENTATIVE = Layer(64, 96, (20, 40, 40), T3, T2, T1, batch=8)
LAYERS = {
    "stride two": Layer(16, 24, (3, 4, 8), T3, T2, T1),
    "one column of zeros": Layer(8, 16, (2, 3, 12), T3, T2, T1, batch=1),
    "seven columns of zeros": Layer(8, 16, (2, 3, 9), T3, T1, T1),
    "without a bias": Layer(16, 16, (2, 3, 6), (2, 3, 5), (1, 2, 2), (0, 1, 2), bias=False),
}


@needs_emulator
@pytest.mark.parametrize("width", [1, 7, 9, 15, 23])
@pytest.mark.parametrize("offset", [0, 1, 6])
def test_the_kernel_copies_lines_and_appends_zeros(width: int, offset: int) -> None:
    layer = Layer(4, 3, (2, 5, width), T1, batch=2)
    problem = problems(layer, "float16")[Pass.WEIGHT_GRAD]
    dy = torch.randint(-999, 999, aligning.shape_of(problem)).to(torch.float16)
    source = shifted(dy, offset)  # between NaNs, which must not be copied
    copy = torch.full(aligning.aligned_shape(problem), torch.nan, dtype=torch.float16)
    launch = aligning._launch(problem)
    emulator.prepare(launch)((source.data_ptr(), copy.data_ptr()))
    assert torch.equal(copy, F.pad(dy, (0, copy.shape[4] - width)))


@needs_emulator
@pytest.mark.parametrize(
    ("name", "dtype", "way", "copy"),
    [
        *(
            (name, dtype, "align", "align")
            for name, dtype in zip(LAYERS, (torch.bfloat16, torch.float16) * 2, strict=True)
        ),
        ("stride two", torch.bfloat16, "to_rows", "turn"),
        ("without a bias", torch.float16, "to_rows", "turn"),
    ],
)
def test_gradients_against_float64(
    name: str, dtype: torch.dtype, way: str, copy: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels: list[str] = []
    prepare = emulator.prepare
    monkeypatch.setattr(emulator, "prepare", lambda launch: kernels.append(launch.kernel) or prepare(launch))
    with preferring(way):
        check(LAYERS[name], dtype, ours)
    assert copy in kernels, kernels


ALL = ("input", "weight", "bias")
LAST = Memory("ndhwc")
CASES = {
    "odd lines on Hopper": Case(Layer(24, 16, (3, 3, 5), T3, T2, T1), "bfloat16", wanted=ALL[1:]),
    "odd lines": Case(Layer(9, 11, (3, 4, 4), (2, 3, 4), (1, 1, 2), T1, (0, 0, 1)), "float16", "A100", wanted=ALL),
    "strict float32 on Hopper": Case(Layer(20, 6, (2, 3, 7), T3, T1, T1), "float32", wanted=ALL[1:2]),
    "TF32 and groups": Case(Layer(16, 32, (2, 2, 9), T3, T2, T1, groups=2), "tf32", "A100", wanted=ALL[1:]),
    "rows for the input gradient": Case(Layer(8, 16, (2, 3, 5), T3, T2, T1), "bfloat16", wanted=ALL[:1]),
}


@needs_emulator
@pytest.mark.parametrize("name", CASES)
def test_gradients_by_transposed_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[str] = []
    prepare = emulator.prepare
    monkeypatch.setattr(emulator, "prepare", lambda launch: kernels.append(launch.kernel) or prepare(launch))
    case = replace(CASES[name], favoured="to_rows", at_end=False)
    if "rows" not in name:
        case = replace(case, favoured="to_lines", input=LAST, grad=LAST, at_end=True)
    with forgetting():
        run.check(case, "cpu")
    assert "turn" in kernels, kernels


def offers(layer: Layer, dtype: str, **changes: object) -> dict[str, str]:
    """Returns what kernels answer for a backward pass: the reason of a refusal, or "an offer"."""
    found = {w: replace(p, **changes) for w, p in problems(layer, dtype).items() if w is not Pass.FORWARD}  # type: ignore[arg-type]
    with forgetting():
        return {each.kernel: getattr(each, "why", "an offer") for each in planner.answers(found, H200)}


def test_which_layers_are_copied() -> None:
    small = LAYERS["stride two"]
    assert offers(small, "bfloat16")["align"] == offers(small, "float16")["align"] == "an offer"
    for layer, dtype in ((small, "float32"), (replace(small, output_padding=T1), "float16"), (small, "float64")):
        assert "align" not in offers(layer, dtype)
    assert "more than 512 MB" in offers(replace(REPRESENTATIVE, batch=16), "float16")["align"]
    gradients = {w: p for w, p in problems(small, "float16").items() if w is not Pass.FORWARD}
    with forgetting():
        refusals = aligning.answers(gradients, H200.thrifty, planner.taken, planner._in_turn)
    assert [getattr(each, "why", "an offer") for each in refusals] == ["memory is short"] * 2
    assert offers(small, "float16")["to_rows"] == "an offer"
    for channels in ({"in_channels": 12}, {"out_channels": 20}):  # no whole vectors of channels
        assert "to_rows" not in offers(replace(small, **channels), "float16")  # type: ignore[arg-type]
    views = {w: replace(p, output=tuple(2 * stride for stride in p.output)) for w, p in gradients.items()}
    assert aligning.answers(views, H200, planner.taken, planner._in_turn) == []


@pytest.mark.parametrize(
    ("way", "copy", "regions", "size"),
    [
        ("align", "align", {"dy": "aligned dy"}, 8 * 96 * 39 * 79 * 80 * 2),
        ("to_rows", "turn", {"dy": "dy as rows", "x": "x as rows"}, 8 * 96 * 39 * 79 * 79 * 2),
    ],
)
def test_every_launch_reads_the_copies(way: str, copy: str, regions: dict[str, str], size: int) -> None:
    gradients = {w: p for w, p in problems(REPRESENTATIVE, "bfloat16").items() if w is not Pass.FORWARD}
    with forgetting(), preferring(way):
        (plan,) = planner.plans_of(planner.taken(gradients, H200), gradients, H200)
    assert plan.launches[0].kernel == copy and not plan.launches[1].overlaps and set(plan.passes) == set(gradients)
    read = {name for launch in plan.launches[1:] for name in launch.pointers}
    places = dict(plan.regions)
    assert not read & set(regions) and set(regions.values()) <= read & set(places)
    ends = sorted([*places.values(), plan.workspace_bytes])
    start = places[regions["dy"]]
    assert min(end for end in ends if end > start) - start >= size


def last(layer: Layer, dtype: str) -> dict[Pass, Problem]:
    """Returns the gradients of channels-last tensors."""
    found = {w: p for w, p in problems(layer, dtype).items() if w is not Pass.FORWARD}
    for which, p in found.items():
        y = channels_last_strides((p.batch, layer.out_channels, *p.output_size))
        x = channels_last_strides((p.batch, layer.in_channels, *p.input_size))
        found[which] = replace(p, output=y, input=p.input if which is Pass.BIAS_GRAD else x)
    return found


@pytest.mark.parametrize(
    ("device", "dtype", "width", "copied"),
    [
        (H200, "bfloat16", 8, True),
        (H200, "float32", 8, False),  # TF32, for which the family "turned" copies
        (A100, "float32", 8, True),
        (A100, "float64", 8, False),
    ],
    ids=str,
)
def test_which_channels_last_gradients_are_copied(device: Device, dtype: str, width: int, copied: bool) -> None:
    wanted = last(Layer(32, 48, (4, 8, width), T3, T2, T1), dtype)
    with forgetting():
        found = {each.kernel: each for each in planner.answers(wanted, device)}
    assert ("to_lines" in found) is copied
    if copied:
        assert found["to_lines"].passes == (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)


def test_lines_of_odd_length_are_copied_where_that_is_predicted_to_win() -> None:
    """Kernels read the lines of aligned tensors as they lie; other tensors are copied."""
    gradients = {w: p for w, p in problems(REPRESENTATIVE, "bfloat16").items() if w is not Pass.FORWARD}
    unaligned = {which: replace(p, aligned=False) for which, p in gradients.items()}
    with forgetting():
        assert [offer.kernel for offer in planner.taken(gradients, H200)] == ["halo_turned", "hopper_weight_grad"]
        assert [offer.kernel for offer in planner.taken(unaligned, H200)] == ["to_rows"]
        gradients = {w: p for w, p in problems(REPRESENTATIVE, "float32").items() if w is not Pass.FORWARD}
        assert not {offer.kernel for offer in planner.taken(gradients, H200)} & {"align", "to_rows"}


@pytest.mark.parametrize("device", [A100, H200], ids=["A100", "H200"])
def test_the_kernel_compiles_without_spills(device: object) -> None:
    pytest.importorskip("cuda.core", reason="compiling needs cuda-core")
    launch = aligning._launch(problems(REPRESENTATIVE, "bfloat16")[Pass.WEIGHT_GRAD])
    arch = "sm_80" if device is A100 else "sm_90a"
    report = compiler.compile(launch.kernel, launch.constants, arch).report
    assert report.spill_loads == report.spill_stores == report.stack_bytes == 0 < report.registers <= 64
