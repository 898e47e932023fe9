"""`explain` says what the executor does, without a GPU."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from layers import TABLE, check, poisoned

import tconv3d
from tconv3d.families.direct import planner as direct_planner
from tconv3d.planning import planner
from tconv3d.planning.problem import Device, Pass, Plan, Problem
from tconv3d.torch_ops import executor


def test_the_kernel_is_the_one_that_runs(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TABLE["groups"]
    operands = layer.operands(torch.float32, ours)
    plans: list[Plan] = []
    original = planner.plan

    def watching(*arguments: object) -> Plan:
        plans.append(original(*arguments))  # type: ignore[arg-type]
        return plans[-1]

    with monkeypatch.context() as patch:
        patch.setattr(executor.planner, "plan", watching)
        executor._tasks.clear()
        tconv3d.conv_transpose3d(*operands, *layer.settings)
    ran = plans[-1]
    found = tconv3d.explain(*operands, *layer.settings)
    assert (found.kernel, found.passes[0].tile) == (ran.kernel, ran.tile)
    assert found.here.startswith("these kernels")


class Together:
    """A family that takes the gradients of weight and bias together, and nothing alone."""

    @staticmethod
    def why_not(problem: Problem, device: Device) -> str:
        return "nothing alone"

    @staticmethod
    def plan_together(problems: dict[Pass, Problem], device: Device) -> Plan | None:
        taken = (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)
        if not problems.keys() >= set(taken):
            return None
        alone = [direct_planner.plan(problems[which], device) for which in taken]
        start = -(-alone[0].workspace_bytes // 256) * 256  # there the second has its scratch memory
        second = [
            replace(each, pointers=tuple("sums" if p == "workspace" else p for p in each.pointers))
            for each in alone[1].launches
        ]
        size, regions = start + alone[1].workspace_bytes, (("sums", start),)
        return Plan("both", "a test", (*alone[0].launches, *second), size, regions=regions, passes=taken)


def test_gradients_that_a_family_computes_together(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TABLE["plain"]
    monkeypatch.setattr(executor, "_tasks", {})
    monkeypatch.setattr(planner, "FAMILIES", (("both", Together), *planner.FAMILIES))
    operands = layer.operands(torch.float32, ours)
    _, dx, dw, db = tconv3d.explain(*operands, *layer.settings).passes
    assert not dx.together and dw.together == db.together == ("weight_grad", "bias_grad")
    assert (dx.kernel, dw.kernel, db.kernel) == ("direct", "both", "both")
    assert (dw.launches, db.launches, db.workspace_bytes) == (4, 0, 0)
    text = tconv3d.explain(*operands, *layer.settings).text
    assert "4 launches of weight_grad, bias_grad together" in text and "comes with weight_grad" in text
    check(layer, torch.float32, ours)
    (task,) = (task for key, task in executor._tasks.items() if key[0] == (True, True, True))
    assert task.workspace_bytes >= dw.workspace_bytes > 0 and len(task.regions) == 1


def test_gradients_together_are_those_alone(ours: str) -> None:
    """Every choice of gradients, in every bit."""
    layer = TABLE["monai"]
    x, w, _ = layer.operands(torch.float32, ours)
    dy = torch.randn_like(tconv3d.conv_transpose3d(x, w, None, *layer.settings))
    size, kernel, settings = layer.size, layer.kernel, layer.settings
    alone = (
        executor.input_grad(dy, w, size, settings),
        executor.weight_grad(dy, x, kernel, settings),
        executor.bias_grad(dy),
    )
    for wanted in itertools.product((False, True), repeat=3):
        if any(wanted):
            operands = x if wanted[1] else None, w if wanted[0] else None
            with poisoned():
                got = executor.backward(dy, *operands, wanted, size, kernel, settings)
            assert [each is not None for each in got] == list(wanted)
            assert all(a is None or torch.equal(a, b) for a, b in zip(got, alone, strict=True))


def test_forms_of_a_call_agree() -> None:
    layer = tconv3d.ConvTranspose3d(4, 6, 3, stride=2, padding=1, groups=2)
    x = torch.empty(2, 4, 5, 6, 7)
    by_layer = tconv3d.explain(layer, x, gpu="H200")
    by_shape = tconv3d.explain(layer, x.shape, gpu="H200")
    by_call = tconv3d.explain(x, layer.weight, layer.bias, stride=2, padding=1, groups=2, gpu="H200")
    assert by_layer.as_dict() == by_call.as_dict()
    assert by_shape.passes == by_layer.passes
    reference = torch.nn.functional.conv_transpose3d(x, layer.weight, None, 2, 1, 0, 2)
    assert by_layer.output_shape == tuple(reference.shape)
    assert tconv3d.explain(layer, x[0]).input_shape == (1, 4, 5, 6, 7)
    assert tconv3d.explain(layer, x, output_size=[10, 12, 14]).output_shape == (2, 6, 10, 12, 14)


def test_numbers() -> None:
    found = tconv3d.explain(tconv3d.ConvTranspose3d(3, 5, 2, stride=2), (2, 3, 4, 4, 4), gpu="H200")
    forward = found.passes[0]
    assert forward.flops == 2 * 2 * 3 * 5 * 8 * 64
    assert forward.bytes == 4 * (2 * 3 * 64 + 2 * 5 * 512 + 3 * 5 * 8 + 5)
    assert forward.floor_ms == pytest.approx(forward.bytes / 4.27e12 * 1e3)
    assert (found.taps, found.phases, found.empty_phases) == (8, 8, 0)
    assert [p.name for p in found.passes] == ["forward", "input_grad", "weight_grad", "bias_grad"]
    json.dumps(found.as_dict())


def test_the_packed_weight_that_is_kept_without_gradients() -> None:
    layer = tconv3d.ConvTranspose3d(32, 16, 3, padding=1, dtype=torch.bfloat16)
    found = tconv3d.explain(layer, (1, 32, 8, 8, 8), gpu="H200")
    forward, *gradients = found.passes
    assert forward.workspace_bytes >= forward.kept_bytes >= 2 * layer.weight.numel()
    assert not any(each.kept_bytes for each in gradients)
    assert f"{forward.kept_bytes / 1e6:.3g} MB of packed weight are kept" in str(found)


def test_empty_phases_and_shifts_are_named() -> None:
    text = str(tconv3d.explain(tconv3d.ConvTranspose3d(2, 2, 3, stride=2, dilation=2, padding=1), (1, 2, 3, 3, 3)))
    assert "7 of them empty" in text
    assert "phase 1: tap 0 shift -1, tap 1 shift +0, tap 2 shift +1" in text
    assert "phase 0: none" in text


def test_fallbacks_are_admitted() -> None:
    layer, x = tconv3d.ConvTranspose3d(2, 2, 2), torch.empty(1, 2, 3, 3, 3)
    assert tconv3d.explain(layer, x).here.startswith("PyTorch's operator (cpu")
    with tconv3d.use_backend("torch"):
        assert "use_backend" in tconv3d.explain(layer, x).here
    with tconv3d.use_backend("emulator"):
        assert tconv3d.explain(layer, x).here == "these kernels, in the emulator"
    with pytest.raises(NotImplementedError, match="PyTorch's operator runs dtype complex64"):
        tconv3d.explain(layer.to(torch.complex64), x.to(torch.complex64))


def test_bad_arguments() -> None:
    layer = tconv3d.ConvTranspose3d(2, 2, 2)
    with pytest.raises(ValueError, match=r"expected a GPU of .*H200.* got .Voodoo 2."):
        tconv3d.explain(layer, (1, 2, 3, 3, 3), gpu="Voodoo 2")
    with pytest.raises(RuntimeError, match="to have 2 channels, but got 3"):
        tconv3d.explain(layer, (1, 3, 3, 3, 3))
    assert "compute capability 8.0" in tconv3d.explain(layer, (1, 2, 3, 3, 3), gpu="8.0").gpu
