"""All gradients of an up-convolution from one reading of dy: against float64, and what its planner promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from all_gradients import check, check_special_value, gradients, tensors
from layers import Layer
from orders import check_orders
from preferred import joint_plan, preferring
from problems import A100, H200, geometry, problems
from torch import Tensor

from tconv3d import emulator
from tconv3d.families.up import backward as up
from tconv3d.families.up import backward_last as up_last
from tconv3d.planning import planner
from tconv3d.planning.problem import Pass, Problem, channels_last_strides
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor
from tconv3d.torch_ops import problems as operand_problems

T2 = (2, 2, 2)

# Channels and sizes that fill nothing, and ones that do.
LAYERS = {
    "pieces across lines": Layer(16, 8, (2, 4, 18), T2, T2),
    "nothing whole": Layer(20, 12, (3, 3, 12), T2, T2),
    "lines of two tiles": Layer(24, 20, (3, 5, 72), T2, T2, batch=1),
    "one along d, four along h": Layer(72, 7, (3, 3, 8), (1, 4, 2), (1, 4, 2)),
    "one tap": Layer(24, 70, (3, 5, 12), (1, 1, 1), (1, 1, 1), batch=3),
    "three taps": Layer(20, 13, (2, 5, 8), (3, 2, 3), (3, 2, 3)),
    "output padding": Layer(12, 9, (2, 3, 4), (2, 3, 2), (2, 3, 2), output_padding=(1, 2, 0), batch=3),
}
LAST_LAYERS = {
    "nothing whole": Layer(20, 12, (3, 3, 11), T2, T2),
    "one tap": Layer(24, 72, (3, 5, 12), (1, 1, 1), (1, 1, 1), batch=3),
    "contiguous weight": Layer(16, 24, (3, 4, 7), (1, 3, 2), (1, 3, 2), output_padding=(0, 2, 1)),
}
LAST_CASES = [(torch.float32, name) for name in LAST_LAYERS] + [(torch.bfloat16, "contiguous weight")]
HALVES = {torch.float16: ["nothing whole"], torch.bfloat16: ["lines of two tiles", "output padding"]}
CASES = [(torch.float32, name) for name in LAYERS] + [(dtype, name) for dtype in HALVES for name in HALVES[dtype]]


@pytest.fixture
def together(ours: str) -> Iterator[str]:
    """Every layer that the kernel can compute goes to it, whether it wins or not."""
    if ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    with preferring("up_backward", "up_backward_last"):
        yield ours


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=lambda value: str(value))
def test_against_float64(dtype: torch.dtype, name: str, together: str) -> None:
    check(LAYERS[name], dtype, together)


def last_tensors(name: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = tensors(LAST_LAYERS[name], dtype, device)
    last = torch.channels_last_3d
    w = w if name == "contiguous weight" else w.contiguous(memory_format=last)
    return x.contiguous(memory_format=last), w, dy.contiguous(memory_format=last)


@pytest.mark.parametrize(("dtype", "name"), LAST_CASES, ids=lambda value: str(value))
def test_channels_last(dtype: torch.dtype, name: str, together: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are equal to the last bit every time, whatever the order of threads."""
    layer, operands = LAST_LAYERS[name], last_tensors(name, dtype, together)
    x, w, dy = operands
    at = operand_problems.OperandAddresses(x.data_ptr(), w.data_ptr(), dy.data_ptr())
    wanted = True, True, False
    found = operand_problems.wanted_gradients(dy, x, w, wanted, layer.size, layer.kernel, layer.settings, at)
    plans = planner.gradient_plans(tuple(each[0] for each in found if each), executor.device_of(operands[0]))
    assert [plan.kernel for plan in plans] == ["up_backward_last"]
    first = check(layer, dtype, together, operands)
    if together == "cpu" and name == "nothing whole":
        original = emulator.prepare
        monkeypatch.setattr(emulator, "prepare", lambda launch: original(launch, "shuffled:1"))
        executor.forget()
        again = gradients(layer, *operands)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_ranges_of_rows(dtype: torch.dtype, together: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of dx are added afterwards: what a block has in registers is less than the weight."""
    made = up.Tiling(geometry(LAYERS["lines of two tiles"]), str(dtype)[6:], 16, 1, 3, 3, 2)
    monkeypatch.setattr(up, "tilings", lambda *_: [made])
    check(LAYERS["lines of two tiles"], dtype, together)
    layer = LAST_LAYERS["contiguous weight"]
    made = up_last.Tiling(geometry(layer), str(dtype)[6:], 8, 1, 3, 3, 2)
    monkeypatch.setattr(up_last, "tilings", lambda *_: [made])
    check(layer, dtype, together, last_tensors("contiguous weight", dtype, together))


def test_no_order_of_threads_changes_the_result(together: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["lines of two tiles"]
    operands = tensors(layer, torch.float32, together)
    check_orders(together, monkeypatch, lambda: gradients(layer, *operands))


def test_special_values_stay_in_their_channel(together: str) -> None:
    """A NaN reaches its own input position and its own output channel, through nothing that only fills a tile."""
    check_special_value(LAYERS["nothing whole"], together, (4, 1, 23), (2, 0, 11), (0, 1, 1))


# ---- The planner's promises.


UP = Layer(64, 32, (64, 64, 64), T2, T2)


def test_what_it_refuses_and_why() -> None:
    taken = problems(UP)
    assert up.why_not_together(taken, H200) is None

    def changed(**changes: object) -> dict[Pass, Problem]:
        return {which: replace(problem, **changes) for which, problem in taken.items()}  # type: ignore[arg-type]

    last = channels_last_strides((2, 32, 128, 128, 128))
    for refused, device, reason in (
        ({Pass.INPUT_GRAD: taken[Pass.INPUT_GRAD]}, H200, "both"),
        (changed(tf32=False), H200, "TF32"),
        (changed(dtype="float64"), H200, "float64"),
        (changed(output=last), H200, "pieces"),
        (changed(aligned=False), H200, "pieces"),
        (changed(batch=0), H200, "none"),
        (taken, A100, "9.0"),
        (problems(replace(UP, stride=(2, 2, 1))), H200, "stride"),
        (problems(replace(UP, padding=(1, 1, 1))), H200, "padding"),
        (problems(replace(UP, groups=2)), H200, "groups"),
        (problems(replace(UP, size=(8, 8, 9))), H200, "pieces"),
    ):
        assert reason in (up.why_not_together(refused, device) or "")


@pytest.mark.parametrize("channels", [(64, 32, 64), (128, 64, 32), (256, 128, 16), (320, 256, 8)], ids=str)
def test_a_decoder_gets_one_plan(channels: tuple[int, int, int]) -> None:
    inputs, outputs, side = channels
    wanted = problems(Layer(inputs, outputs, (side, side, side), T2, T2))
    assert len(planner.gradient_plans(tuple(wanted.values()), H200)) == 1
    plan = joint_plan(up, wanted, H200)
    assert set(plan.passes) == set(wanted)
    assert all(launch.shared_bytes <= H200.shared_bytes for launch in plan.launches)
    assert plan.workspace_bytes < 2**27


def test_output_padding_leaves_the_bias_to_others() -> None:
    wanted = problems(replace(UP, output_padding=(1, 0, 0)))
    plans = planner.gradient_plans(tuple(wanted.values()), H200)
    assert [plan.passes for plan in plans] == [(Pass.INPUT_GRAD, Pass.WEIGHT_GRAD), (Pass.BIAS_GRAD,)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_not_serialized(dtype: str) -> None:
    for layer in (UP, Layer(128, 64, (32, 32, 32), T2, T2)):
        plan = joint_plan(up, problems(layer, dtype), H200)
        made = compiler.compile("up_backward", plan.launches[0].constants, "sm_90a")
        assert not made.serialized and made.report.spill_stores <= 128
