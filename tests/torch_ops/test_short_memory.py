"""Where there is no memory for the parts of a sum: the sum is not split, and nobody sees an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from all_gradients import check, gradients, tensors
from layers import Layer
from torch import Tensor

from tconv3d.planning import planner
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import Pass
from tconv3d.torch_ops import executor
from tconv3d.torch_ops.problems import OperandAddresses, wanted_gradients

T1, T2, T3, T4 = ((n, n, n) for n in (1, 2, 3, 4))

# By who computes the gradients in the emulator.
LAYERS = {
    "unfold": Layer(40, 24, (2, 3, 4), T3, T2, T1, T1),
    "halo, hopper_weight_grad": Layer(16, 8, (8, 12, 16), T4, T2, T1, batch=3),
    "up_backward": Layer(16, 8, (8, 8, 16), T2, T2),
    "few_weight_grad": Layer(16, 1, (8, 8, 16), T4, T2, T1),
    "depthwise": Layer(4, 4, (8, 20, 20), T3, groups=4),
}


def refusing(times: int, asked: list[int]) -> Callable[..., Tensor]:
    """torch.empty on a GPU that has no room for the first workspaces."""
    original = torch.empty

    def empty(*size: Any, **settings: Any) -> Tensor:
        if settings.get("dtype") is torch.uint8:
            asked.append(size[0])
            if len(asked) <= times:
                raise torch.OutOfMemoryError
        return original(*size, **settings)

    return empty


@pytest.fixture
def tf32(ours: str) -> str:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    executor.forget()
    return ours


@pytest.mark.parametrize("name", LAYERS)
def test_sums_are_not_split(name: str, tf32: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "empty", refusing(1, asked))
    check(LAYERS[name], torch.float32, tf32)
    assert asked and asked[1:] < asked[:1]
    executor.forget()


def test_the_next_call_takes_what_there_is_room_for(tf32: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["halo, hopper_weight_grad"]
    operands, asked = tensors(layer, torch.float32, tf32), list[int]()
    first = gradients(layer, *operands)
    monkeypatch.setattr(torch, "empty", refusing(1, asked))
    gradients(layer, *operands)
    again = gradients(layer, *operands)
    assert asked[-1] == asked[0] and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_no_room_at_all_is_an_error_and_nothing_else(tf32: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["halo, hopper_weight_grad"]
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "empty", refusing(9, []))
        gradients(layer, *tensors(layer, torch.float32, tf32))
    check(layer, torch.float32, tf32)


def test_large_layers_need_little() -> None:
    """At most one part is left of what a sum over 16 million positions takes."""
    layer = Layer(64, 32, (64, 512, 512), T3, T2, T1, T1)
    x, w = (torch.empty(shape, device="meta") for shape in ((1, 64, *layer.size), (64, 32, *T3)))
    dy = torch.empty((1, 32, *(2 * n for n in layer.size)), device="meta")
    found = wanted_gradients(
        dy, x, w, (True, True, True), layer.size, layer.kernel, layer.settings, OperandAddresses()
    )
    problems = tuple(each[0] for each in found if each is not None)
    device = GPUS["H200"].device
    for which, part in ((Pass.WEIGHT_GRAD, 4 * w.numel()), (Pass.BIAS_GRAD, 4 * layer.out_channels)):
        plans = [planner.plan(next(p for p in problems if p.which is which), d) for d in (device, device.thrifty)]
        assert plans[0].workspace_bytes > part >= plans[1].workspace_bytes
