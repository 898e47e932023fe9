"""The gradients of wide 16-bit layers by gathered operands: against float64, and what their planner promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from all_gradients import check, gradients, tensors
from layers import Layer
from orders import check_orders
from preferred import joint_plan, preferring
from problems import A100, H200, problems

from tconv3d.families.gather import planner as gather
from tconv3d.planning import planner
from tconv3d.planning.problem import Pass, Problem, channels_last_strides
from tconv3d.runtime import compiler

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
BF16, FP16 = torch.bfloat16, torch.float16

# Channels, terms and positions that fill nothing, and ones that do.
LAYERS = {
    "whole tiles": Layer(64, 16, (2, 8, 8), T2, T2),
    "nothing whole": Layer(40, 24, (2, 3, 3), T3, T2, T1, T1),
    "two column tiles": Layer(328, 8, (1, 2, 3), (1, 2, 2), (2, 1, 2), batch=3),
    "two consumers": Layer(264, 8, (3, 3, 5), (1, 3, 2), (1, 2, 1), (0, 1, 1), batch=1),
    "dilated": Layer(8, 72, (3, 2, 4), (3, 2, 3), (1, 2, 3), (2, 0, 1), (0, 1, 1), (2, 3, 1)),
    "padding beyond the kernel": Layer(8, 8, (6, 6, 6), T2, T1, T3),
    "empty phases": Layer(16, 8, T3, T3, T2, (0, 1, 2), T1, T2),
    "one tap": Layer(24, 16, (3, 4, 5), T1),
    "one position": Layer(16, 16, T1, T3),
    "all bits but one": Layer(8, 8, (1, 1, 3), (1, 1, 29)),
}
WIDE = Layer(320, 320, (10, 10, 10), T3, T2, T1, T1)


@pytest.fixture
def gathered(ours: str) -> Iterator[str]:
    """Every layer that the kernel can compute goes to it, whether it wins or not."""
    if ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    with preferring("gather"):
        yield ours


def wanted_of(layer: Layer, **changes: object) -> dict[Pass, Problem]:
    """The problems of a backward pass in bfloat16."""
    found = {which: replace(problem, dtype="bfloat16") for which, problem in problems(layer).items()}
    return {which: replace(problem, **changes) for which, problem in found.items()}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, gathered: str) -> None:
    (plan,) = planner.gradient_plans(tuple(wanted_of(LAYERS[name]).values()), H200)
    assert plan.kernel == "gather"
    check(LAYERS[name], FP16 if name == "whole tiles" else BF16, gathered)


@pytest.mark.parametrize(
    ("name", "last"),
    [("nothing whole", "xwd"), ("two consumers", "xwd"), ("one tap", "xd"), ("dilated", "x"), ("dilated", "wd")],
)
def test_layouts(name: str, last: str, gathered: str) -> None:
    """Channels-last tensors are read where they lie, each by itself."""
    x, w, dy = tensors(LAYERS[name], BF16, gathered)
    w = w.clone()
    operands = (
        each.contiguous(memory_format=torch.channels_last_3d) if letter in last else each
        for letter, each in zip("xwd", (x, w, dy), strict=True)
    )
    check(LAYERS[name], BF16, gathered, tuple(operands))  # type: ignore[arg-type]


@pytest.mark.parametrize("portions", [(5, 1), (1, 1), (2, 2)], ids=str)
def test_portions(portions: tuple[int, int], gathered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = replace(LAYERS["nothing whole"], size=(4, 4, 5))
    tile = gather.tile_of(problems(layer)[Pass.INPUT_GRAD].geometry)
    tiling = replace(tile, portions_x=portions[0], portions_w=portions[1])
    monkeypatch.setattr(gather, "tiling_of", lambda p, device: tiling)
    check(layer, BF16, gathered)


def test_no_order_of_threads_changes_the_result(gathered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["nothing whole"]
    operands = tensors(layer, BF16, gathered)
    check_orders(gathered, monkeypatch, lambda: gradients(layer, *operands))


# ---- The planner's promises.


def test_what_it_refuses_and_why() -> None:
    assert gather.why_not_together(wanted_of(WIDE), H200) is None
    taken = wanted_of(WIDE)
    for refused, device, reason in (
        ({Pass.INPUT_GRAD: taken[Pass.INPUT_GRAD]}, H200, "both"),
        (problems(WIDE), H200, "16-bit"),
        (taken, A100, "9.0"),
        (taken, H200.thrifty, "copies"),
        (wanted_of(WIDE, batch=0), H200, "nothing"),
        (wanted_of(replace(WIDE, groups=2)), H200, "groups"),
        (wanted_of(replace(WIDE, out_channels=324)), H200, "multiples"),
        (wanted_of(replace(WIDE, size=(40, 40, 40))), H200, "L2"),
        (wanted_of(replace(WIDE, kernel=(12, 12, 12))), H200, "kernel"),
        (wanted_of(Layer(64, 8, (1, 1, 3), (1, 1, 30))), H200, "kernel"),
        (wanted_of(WIDE, aligned=False, output=channels_last_strides((2, 320, 20, 20, 20))), H200, "aligned"),
    ):
        assert reason in (gather.why_not_together(refused, device) or "")


def test_wide_layers_on_small_volumes_get_it() -> None:
    wanted = wanted_of(WIDE)
    (plan,) = planner.gradient_plans(tuple(wanted.values()), H200)
    assert plan.kernel == "gather" and set(plan.passes) == set(wanted)
    assert all(launch.shared_bytes <= H200.shared_bytes for launch in plan.launches)
    assert "gather" not in {
        each.kernel
        for each in planner.gradient_plans(tuple(wanted_of(Layer(64, 32, (32, 32, 32), T2, T2)).values()), H200)
    }


def test_a_new_volume_compiles_nothing() -> None:
    def compiled(layer: Layer) -> set[object]:
        plan = joint_plan(gather, wanted_of(layer), H200)
        return {(each.kernel, each.constants) for each in plan.launches}

    for batch, size in ((1, (4, 4, 4)), (7, (3, 7, 5))):
        assert compiled(replace(WIDE, batch=batch, size=size)) <= compiled(WIDE)


@pytest.mark.parametrize("channels", [320, 192])
def test_products_are_not_serialized(channels: int) -> None:
    plan = joint_plan(gather, wanted_of(replace(WIDE, in_channels=channels)), H200)
    made = compiler.compile(plan.launches[1].kernel, plan.launches[1].constants, "sm_90a")
    assert plan.launches[1].kernel == "gathered_products"
    assert not made.serialized and made.report.spill_stores == 0


def test_no_block_claims_registers_that_it_has_not() -> None:
    for consumers, (copying, multiplying) in gather.REGISTERS.items():
        threads = 128 * (consumers + 1)
        assert 128 * (copying + consumers * multiplying) <= 65536 // threads // 8 * 8 * threads
