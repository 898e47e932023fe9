"""`explain` says what the executor does, without a GPU."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layers import TABLE, check, poisoned
from preferred import forgetting, preferring
from problems import H200
from torch import Tensor

import tconv3d
from tconv3d.api.explain import call_of, problems_of
from tconv3d.families.direct import planner as direct_planner
from tconv3d.planning import planner
from tconv3d.planning.calibration import Work
from tconv3d.planning.offers import Answer, Offer, Refusal, Wanted
from tconv3d.planning.problem import Device, Pass, Plan, Problem
from tconv3d.tools.bench.layers import LAYERS as BENCHMARK
from tconv3d.tools.bench.layers import Layer
from tconv3d.torch_ops import executor
from tconv3d.torch_ops.checks import Convolution


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

    taken = (Pass.WEIGHT_GRAD, Pass.BIAS_GRAD)

    @classmethod
    def offer(cls, wanted: Wanted, device: Device) -> list[Answer]:
        if not wanted.keys() >= set(cls.taken):
            return [Refusal("both", tuple(wanted), "nothing alone")]
        problem, make = wanted[Pass.WEIGHT_GRAD], partial(cls.plan, wanted, device)
        return [Offer("both", cls.taken, problem, device, lambda: Work(4), make)]

    @classmethod
    def plan(cls, wanted: Wanted, device: Device) -> Plan:
        alone = [direct_planner.plan(wanted[which], device) for which in cls.taken]
        start = -(-alone[0].workspace_bytes // 256) * 256  # there the second has its scratch memory
        second = [
            replace(each, pointers=tuple("sums" if p == "workspace" else p for p in each.pointers))
            for each in alone[1].launches
        ]
        size, regions = start + alone[1].workspace_bytes, (("sums", start),)
        return Plan("both", "a test", (*alone[0].launches, *second), size, regions=regions)


def test_gradients_that_a_family_computes_together(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "FAMILIES", (("both", Together), *planner.FAMILIES))
    with preferring("both", "direct"):
        check_both_together(ours)


def check_both_together(ours: str) -> None:
    layer = replace(TABLE["plain"], size=(8, 9, 9))  # so large that both sums have several parts
    operands = layer.operands(torch.float32, ours)
    _, dx, dw, db = tconv3d.explain(*operands, *layer.settings).passes
    assert not dx.together and dw.together == db.together == ("weight_grad", "bias_grad")
    assert (dw.kernel, db.kernel) == ("both", "both") and dx.kernel != "both"
    assert (dw.launches, db.launches, db.workspace_bytes) == (4, 0, 0)
    text = tconv3d.explain(*operands, *layer.settings).text
    assert "4 launches of weight_grad, bias_grad together" in text and "comes with weight_grad" in text
    check(layer, torch.float32, ours)
    (task,) = (task for key, task in executor._tasks.items() if key[0] == (True, True, True))
    assert task.workspace_bytes >= dw.workspace_bytes > 0 and len(task.regions) == 1


def test_gradients_together_are_those_alone(ours: str) -> None:
    """Every choice of gradients, in every bit, where the same kernels compute them."""
    with preferring("direct", "direct_weight_grad", "channel_sum"):
        check_every_choice_of_gradients(ours)


def check_every_choice_of_gradients(ours: str) -> None:
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


KINDS = [
    (torch.float32, torch.contiguous_format),
    (torch.float32, torch.channels_last_3d),
    (torch.bfloat16, torch.contiguous_format),
]


@pytest.mark.parametrize(("dtype", "layout"), KINDS, ids=str)
@pytest.mark.parametrize("name", BENCHMARK)
def test_the_executor_asks_for_the_problems_that_are_explained(
    name: str, dtype: torch.dtype, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer of the benchmark, at aligned addresses: the same problems, and the kernels that are planned."""
    x, w, b = operands_on_meta(BENCHMARK[name], dtype, layout)
    settings = (*BENCHMARK[name].settings,)
    asked = asked_by_the_executor(x, w, b, settings, monkeypatch)
    assert problems_of(*call_of(x, w, b, *settings)) == asked
    with planner.aside():
        forward = planner.plan(asked[0], H200).kernel
        gradients = planner.gradient_plans(tuple(asked[1:]), H200)
    planned = {Pass.FORWARD.value: forward, **{each.value: plan.kernel for plan in gradients for each in plan.passes}}
    assert {each.name: each.kernel for each in tconv3d.explain(x, w, b, *settings, gpu="H200").passes} == planned


@pytest.mark.parametrize("odd", ["input", "weight"])
def test_a_view_at_an_odd_address_is_explained_as_it_is_run(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TABLE["plain"]
    x, w, b = layer.operands(torch.float32, "cpu")

    def moved(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)

    x, w = (moved(x), w) if odd == "input" else (x, moved(w))
    found = problems_of(*call_of(x, w, b, *layer.settings))
    assert found == asked_by_the_executor(x, w, b, layer.settings, monkeypatch)
    unaligned = {"input": [False, True, False], "weight": [True, True, True]}[odd]
    assert [each.aligned for each in found[:3]] == unaligned
    assert [each.weight_aligned for each in found[:2]] == [odd == "input"] * 2


VIEWS = {
    "every second element": lambda x: x.repeat_interleave(2, 4)[..., ::2],
    "one batch item for all": lambda x: x[:1].expand(x.shape),
    "another order of dimensions": lambda x: x.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_explained_with_their_strides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = TABLE["plain"]
    x, w, b = layer.operands(torch.float32, "cpu")
    x, w = VIEWS[name](x), VIEWS[name](w)
    found = problems_of(*call_of(x, w, b, *layer.settings))
    assert (found[0].input, found[0].weight) == (x.stride(), w.stride())
    assert found == asked_by_the_executor(x, w, b, layer.settings, monkeypatch)


def operands_on_meta(layer: Layer, dtype: torch.dtype, layout: torch.memory_format) -> list[Tensor | None]:
    shapes = (layer.input_shape, layer.weight_shape)
    x, w = (torch.empty(shape, dtype=dtype, device="meta", memory_format=layout) for shape in shapes)
    return [x, w, torch.empty(layer.out_channels, dtype=dtype, device="meta") if layer.bias else None]


class Asked(Exception):
    """Stands for a plan: nothing is launched."""


def asked_by_the_executor(
    x: Tensor, w: Tensor, b: Tensor | None, settings: Convolution, monkeypatch: pytest.MonkeyPatch
) -> list[Problem]:
    """The problems that the executor plans for a forward and a backward pass."""
    found: list[Problem] = []

    def asking(problems: Problem | tuple[Problem, ...], *rest: object) -> Plan:
        found.extend(problems if isinstance(problems, tuple) else (problems,))
        raise Asked

    with forgetting(), monkeypatch.context() as patch:
        patch.setattr(executor.planner, "plan", asking)
        patch.setattr(executor.planner, "plan_gradients", asking)
        with pytest.raises(Asked):
            executor.forward(x, w, b, settings)
        size, kernel, channels = found[0].input_size, found[0].geometry.kernel, found[0].geometry.out_channels
        shape = (x.shape[0], channels, *found[0].output_size)
        dy = torch.empty_strided(shape, found[0].output, dtype=x.dtype, device=x.device)
        with pytest.raises(Asked):
            executor.backward(dy, x, w, (True, True, b is not None), size, kernel, settings)
    return found


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


# ---- blocks with a tail


def block(tail: Any) -> tconv3d.FusedTail:
    return tconv3d.fuse(torch.nn.ConvTranspose3d(32, 16, 3, stride=2, padding=1), tail)


def test_a_tail_is_part_of_the_plan() -> None:
    """The plan is that of a forward pass with the epilogue; a kernel that has no epilogue is passed over."""
    norm = torch.nn.GroupNorm(4, 16)
    found = tconv3d.explain(block(lambda z: norm(torch.relu(z))), (1, 32, 8, 8, 8), gpu="H200")
    assert found.layer.endswith(", tail") and found.passes[0].name == "forward"
    text = str(found)
    assert "tail, in the convolution's kernel: Largest<Value, Number<0, 0>>" in text
    assert "tail, statistics of its result: of 4 norm groups" in text and "tail, in one pass over its result" in text
    assert "tail, if gradients are recorded, backward in one pass over its result: reduces" in text
    assert found.as_dict()["tail"] == found.tail


def test_what_a_tail_takes_is_given_behind_the_input() -> None:
    residual = torch.empty(1, 16, 15, 15, 15, device="meta")
    found = tconv3d.explain(block(lambda z, r: torch.sigmoid(z) + r), (1, 32, 8, 8, 8), residual, gpu="A100")
    assert found.tail[0] == "in the convolution's kernel: Sum<Sigmoid<Value>, Whole<0>>"
    assert found.passes[0].bytes > tconv3d.explain(block(torch.sigmoid), (1, 32, 8, 8, 8), gpu="A100").passes[0].bytes


def test_a_tail_that_moves_into_the_convolution() -> None:
    """A mean over channels leaves a convolution to one channel, and a mean over space leaves none."""
    whole = tconv3d.explain(block(torch.relu), (1, 32, 8, 8, 8), gpu="H200").passes[0]
    mean = tconv3d.explain(block(lambda z: z.mean(1)), (1, 32, 8, 8, 8), gpu="H200")
    assert mean.passes[0].name == "forward" and 16 * mean.passes[0].flops == whole.flops
    assert mean.tail[0] == "in the weight: the mean over channels"
    none = tconv3d.explain(block(lambda z: z.mean((2, 3, 4))), (1, 32, 8, 8, 8), gpu="H200")
    assert none.passes[0].name == "input_grad"


def test_a_tail_that_cannot_be_fused_says_why() -> None:
    found = tconv3d.explain(block(lambda z: z if z.sum() > 0 else -z), (1, 32, 8, 8, 8), gpu="H200")
    assert found.tail[0].startswith("not fused: the tail cannot be traced")
    partly = tconv3d.explain(block(lambda z: torch.tanh(z).cumsum(2)), (1, 32, 8, 8, 8), gpu="H200")
    assert "in PyTorch: cumsum" in partly.tail
    assert "if gradients are recorded, forward and backward in PyTorch: cumsum" in partly.tail
