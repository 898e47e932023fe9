"""Exported files have the kernels that the library runs on the GPU at hand, which the emulator stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tconv3d
from tconv3d import emulator
from tconv3d.planning import planner, winners
from tconv3d.planning.offers import Offer
from tconv3d.planning.problem import Pass, Problem
from tconv3d.tools.bench import layers
from tconv3d.tools.bench.problems import problems_of_layer
from tconv3d.tools.export import choices, passes, recording
from tconv3d.torch_ops import choosing, executor
from tconv3d.torch_ops.clock import Timer

pytestmark = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")

LAYER = layers.parse("8, 8, kernel_size=2, stride=2, size=4")
Stored = dict[str, winners.Winner]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Stored:
    """The winners, none at first. The GPU at hand is the emulator, and every offer is timed."""
    found: Stored = {}
    monkeypatch.setattr(winners, "find", found.get)
    monkeypatch.setattr(winners, "keep_first", found.setdefault)
    monkeypatch.setattr(choices, "at_hand", lambda device: torch.empty(0))
    monkeypatch.setattr(choosing, "_when", "always")
    executor.forget()
    return found


def problems(*passes: Pass) -> list[Problem]:
    return [each for each in problems_of_layer(LAYER, "tf32", "contiguous") if each.which in passes]


def clock(*milliseconds: float) -> Timer:
    """Returns a clock that gives the candidates these times, in the order in which they are first timed."""
    known: dict[int, tuple[Callable[[], Any], float]] = {}
    left = iter(milliseconds)

    def time(run: Callable[[], Any]) -> float:
        if id(run) not in known:
            known[id(run)] = run, next(left)
        return known[id(run)][1]

    return time


def never(run: Callable[[], Any]) -> float:
    pytest.fail("something was timed")


@pytest.mark.parametrize("passes", [(Pass.FORWARD,), (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)])
def test_a_file_has_the_kernels_that_were_fastest(passes: tuple[Pass, ...], stored: Stored) -> None:
    asked, device = problems(*passes), executor.EMULATED
    predicted = planner.plan_gradients(tuple(asked), device) if len(asked) > 1 else planner.plan(asked[0], device)
    with tconv3d.use_backend("emulator"):
        with choosing.measured_by(clock(3.0, 2.0, 1.0, 4.0)):  # our best, PyTorch's operator, our other kernels
            chosen = choices.plan(asked, device, "tf32")
        with choosing.measured_by(never):
            again = choices.plan(asked, device, "tf32")
    assert len(stored) == 1
    assert chosen.launches == again.launches
    assert {each.kernel for each in chosen.launches} != {each.kernel for each in predicted.launches}


def test_the_library_takes_what_the_export_has_measured(stored: Stored) -> None:
    module, x = LAYER.module(torch.float32, "cpu"), LAYER.input(torch.float32, "cpu")
    with tconv3d.use_backend("emulator"), torch.no_grad():
        with choosing.measured_by(clock(3.0, 2.0, 1.0, 4.0)):
            choices.plan(problems(Pass.FORWARD), executor.EMULATED, "tf32")
        with choosing.measured_by(never):
            tconv3d.accelerate(module)(x)
    assert len(stored) == 1


def test_predictions_decide_where_pytorch_wins(stored: Stored) -> None:
    (forward,) = problems(Pass.FORWARD)
    with tconv3d.use_backend("emulator"), choosing.measured_by(clock(3.0, 1.0, 2.0, 4.0)):
        chosen = choices.plan([forward], executor.EMULATED, "tf32")
    assert chosen.launches == planner.plan(forward, executor.EMULATED).launches


def test_nothing_is_timed_for_another_gpu(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    (forward,) = problems(Pass.FORWARD)
    monkeypatch.setattr(choices, "at_hand", lambda device: None)
    with tconv3d.use_backend("emulator"), choosing.measured_by(never):
        chosen = choices.plan([forward], executor.EMULATED, "tf32")
    assert chosen.launches == planner.plan(forward, executor.EMULATED).launches


def test_the_gpu_at_hand_may_have_another_name_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's own name is longer than the one that the command takes."""
    empty, gpu = torch.empty(0), passes.DEVICES["H200"]
    assert torch.cuda.is_available() or choices.at_hand(gpu) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch, "empty", lambda *size, device: empty)
        patch.setattr(executor, "device_of", lambda tensor: replace(gpu, name="NVIDIA H200"))
        assert choices.at_hand(gpu) is empty
        assert choices.at_hand(passes.DEVICES["A100"]) is None


def test_what_is_timed_while_a_chain_is_recorded_is_no_part_of_the_chain(stored: Stored) -> None:
    """The convolution alone is timed, on random tensors that PyTorch's operators make."""
    operations = recording.Operations(passes.Variant("H200", "tf32", "contiguous"))
    x, weight = (torch.empty(shape, device="meta") for shape in (LAYER.input_shape, LAYER.weight_shape))
    recorded = recording.Recording(operations, {"x": x, "weight": weight})
    settings = LAYER.settings
    with tconv3d.use_backend("emulator"), choosing.measured_by(clock(3.0, 2.0, 1.0, 4.0)):
        recorded.run(lambda: recorded.forward(x, weight, None, settings, False, None))
    assert len(stored) == 1
    assert [step.target for step in recorded.steps] == operations.all


@pytest.mark.parametrize("follows", [{"relu": True}, {"tail": "tconv3d::Relu"}])
def test_what_follows_is_not_timed_but_a_stored_winner_counts(follows: dict[str, Any], stored: Stored) -> None:
    device = executor.EMULATED
    (problem,) = (replace(each, **follows) for each in problems(Pass.FORWARD))
    wanted = {problem.which: problem}
    with tconv3d.use_backend("emulator"), choosing.measured_by(never):
        before = choices.plan([problem], device, "tf32")
        with planner.meeting(wanted, device):
            # PyTorch's operator computes no tail, so that it makes no offer for one.
            offers = [each for each in planner.answers(wanted, device, not problem.tail) if isinstance(each, Offer)]
            _, slower, *_ = planner.best([each for each in offers if each.kernel != "pytorch"], wanted, device, 2)
            entry = choosing._entry(wanted, device, offers, (False, not problem.tail), cuda=False)
        timing = winners.Timing(winners.name_of(slower), 1.0)
        stored[entry] = winners.Winner(winners.parts(slower), (timing,), "a test")
        after = choices.plan([problem], device, "tf32")
    assert after.kernel == slower[0].kernel != before.kernel
