"""Weight gradients of channels-last tensors that are written as contiguous ones first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from all_gradients import check, tensors
from layers import Layer
from preferred import preferring
from problems import H200, problems

from tconv3d.families.weight_grad import via_contiguous as turned_planner
from tconv3d.planning import planner
from tconv3d.planning.problem import Pass, Problem, Strides, channels_last_strides
from tconv3d.torch_ops import executor

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)

LAYERS = {"odd sizes": Layer(20, 11, (2, 3, 7), T3, T2, T1), "two by two": Layer(72, 16, (2, 3, 8), T3, T1, T1)}
CASES = [(torch.float32, "odd sizes"), (torch.bfloat16, "odd sizes"), (torch.float16, "two by two")]


@pytest.fixture
def always(ours: str) -> Iterator[str]:
    """Whatever can be turned is, whether that wins or not."""
    if ours != "cpu" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("warpgroup matrix instructions need compute capability 9.0")
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    with preferring("turned"):
        yield ours


def last(layer: Layer, dtype: str = "float32") -> tuple[Problem, ...]:
    """The gradients of channels-last tensors."""

    def strides(problem: Problem, channels: int, size: tuple[int, ...]) -> Strides:
        return channels_last_strides((problem.batch, channels, *size))

    found = problems(layer, dtype)
    for which, p in found.items():
        y = strides(p, layer.out_channels, p.output_size)
        x = p.input if which is Pass.BIAS_GRAD else strides(p, layer.in_channels, p.input_size)
        found[which] = replace(p, input=x, output=y)
    return tuple(found.values())


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=lambda value: str(value))
def test_against_float64(dtype: torch.dtype, name: str, always: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[name]
    if name == "odd sizes":  # the batch is taken one item at a time
        monkeypatch.setattr(turned_planner, "MAX_BYTES", 3000 * dtype.itemsize)
    plans = planner.gradient_plans(last(layer, str(dtype)[6:]), executor.EMULATED)
    assert plans[1].kernel == "turn + hopper_weight_grad"
    assert sum(launch.kernel == "turn" for launch in plans[1].launches) == (2 if name == "odd sizes" else 1)
    operands = [tensor.contiguous(memory_format=torch.channels_last_3d) for tensor in tensors(layer, dtype, always)]
    check(layer, dtype, always, (operands[0], operands[1], operands[2]))


def test_what_it_refuses_and_why(always: str) -> None:
    layer = Layer(64, 16, (32, 32, 32), T3, T2, T1, T1)
    _, taken, _ = last(layer)
    assert turned_planner.why_not(taken, H200) is None
    (plan,) = [plan for plan in planner.gradient_plans(last(layer), H200) if Pass.WEIGHT_GRAD in plan.passes]
    moved = 4 * layer.batch * (64 * 32**3 + 16 * 64**3)
    assert moved < plan.workspace_bytes < moved + 2**25 and plan.passes == (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)
    for refused, reason in (
        (problems(layer)[Pass.WEIGHT_GRAD], "not channels-last"),
        (last(layer)[0], "input_grad"),
        (replace(taken, dtype="float64"), "float64"),
        (replace(taken, tf32=False), "TF32"),
        (last(replace(layer, out_channels=2))[1], "enough products"),
        (last(replace(layer, size=(256, 256, 256)))[1], "MB"),
        (last(replace(layer, groups=32))[1], "contiguous tensors"),
    ):
        assert reason in (turned_planner.why_not(refused, H200) or "")
