"""Gradients by way of copies of dy that kernels read in vectors: the copies, results against float64, and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from layers import Layer, check, shifted
from preferred import forgetting, preferring
from problems import A100, H200, problems

from tconv3d import emulator
from tconv3d.planning import aligning, planner
from tconv3d.planning.problem import Pass
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


def test_lines_of_odd_length_are_copied_where_that_is_predicted_to_win() -> None:
    gradients = {w: p for w, p in problems(REPRESENTATIVE, "bfloat16").items() if w is not Pass.FORWARD}
    with forgetting():
        assert [offer.kernel for offer in planner.taken(gradients, H200)] == ["to_rows"]
        gradients = {w: p for w, p in problems(REPRESENTATIVE, "float32").items() if w is not Pass.FORWARD}
        assert not {offer.kernel for offer in planner.taken(gradients, H200)} & {"align", "to_rows"}


@pytest.mark.parametrize("device", [A100, H200], ids=["A100", "H200"])
def test_the_kernel_compiles_without_spills(device: object) -> None:
    pytest.importorskip("cuda.core", reason="compiling needs cuda-core")
    launch = aligning._launch(problems(REPRESENTATIVE, "bfloat16")[Pass.WEIGHT_GRAD])
    arch = "sm_80" if device is A100 else "sm_90a"
    report = compiler.compile(launch.kernel, launch.constants, arch).report
    assert report.spill_loads == report.spill_stores == report.stack_bytes == 0 < report.registers <= 64
