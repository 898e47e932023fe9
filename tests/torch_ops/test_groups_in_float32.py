"""Layers with strided or narrow groups are computed in float32 where TF32 is allowed, in every pass."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from layers import Layer
from preferred import counted, forgetting, preferring
from problems import A100, H200, problem
from torch import Tensor

import tconv3d
from tconv3d.planning.problem import NO_TF32, TF32, TF32_AS_PYTORCH, Pass
from tconv3d.tools.bench.layers import Layer as Exported
from tconv3d.tools.export import passes as export
from tconv3d.torch_ops import executor, problems
from tconv3d.torch_ops.problems import OperandAddresses

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
STRIDED = Layer(16, 16, (3, 5, 10), T3, T2, T1, groups=2)
UNGROUPED = Layer(16, 16, (3, 5, 10), T3, T2, T1)
WIDE = Layer(24, 48, (3, 4, 12), T3, padding=T1, groups=2)  # PyTorch computes wide groups with stride 1 in TF32
LAYERS = {
    "groups of eight": STRIDED,
    "stride 1, few outputs per group": Layer(40, 16, (3, 4, 12), T3, padding=T1, groups=2),
    "up-convolution, groups of six and three": Layer(12, 6, (3, 4, 9), T2, T2, groups=2),
}


@pytest.fixture(autouse=True)
def tf32_is_allowed(ours: str) -> Iterator[None]:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    tconv3d.allow_tf32_in_groups(False)
    yield


def passes(layer: Layer, operands: list[Tensor]) -> list[Tensor]:
    """Returns the result and the gradients of input, weight and bias."""
    leaves = [t.detach().requires_grad_() for t in operands]
    function = F.conv_transpose3d if leaves[0].dtype == torch.float64 else tconv3d.conv_transpose3d
    y = function(*leaves, *layer.settings)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]


def errors(layer: Layer, device: str) -> list[float]:
    operands = layer.operands(torch.float32, device)
    found = zip(passes(layer, operands), passes(layer, [t.double() for t in operands]), strict=True)
    return [float((got.double() - exact).norm() / exact.norm()) for got, exact in found]


@pytest.mark.parametrize("name", LAYERS)
def test_errors_of_all_passes_are_of_float32(name: str, ours: str) -> None:
    """A bias gradient, which is a sum of positive and negative numbers, may lose a few bits more."""
    with patch.object(executor, "EMULATED", A100), forgetting():
        *found, bias = errors(LAYERS[name], ours)
    assert max(found) < 2.5e-7 and bias < 1e-6


def test_errors_on_hopper_s_tensor_cores(ours: str) -> None:
    """Sums of 37 terms, which strict float32 leaves to multiply-adds, may be three TF32 products here."""
    with patch.object(executor, "EMULATED", H200), preferring("halo", "tensor_weight_grad"), counted() as families:
        assert max(errors(STRIDED, ours)) < 2.5e-7
    assert families["halo"] and families["tensor_weight_grad"]


def test_tf32_on_purpose(ours: str) -> None:
    """The switch holds for the next call, although the layer was planned before."""
    assert max(errors(STRIDED, ours)) < 1e-6
    tconv3d.allow_tf32_in_groups()
    assert max(errors(STRIDED, ours)) > 1e-4
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert max(errors(STRIDED, ours)) < 1e-6


def test_the_rule() -> None:
    def precision(layer: Layer, allowed: int, dtype: str = "float32") -> tuple[bool, bool]:
        found = [problem(layer, which, dtype).allowing(allowed) for which in list(Pass)[:3]]
        assert len({(p.tf32, p.loose) for p in found}) == 1
        return found[0].tf32, found[0].loose

    for layer in (UNGROUPED, WIDE):
        assert precision(layer, TF32_AS_PYTORCH) == precision(layer, TF32) == (True, False)
    for layer in LAYERS.values():
        assert precision(layer, TF32_AS_PYTORCH) == (False, True)
        assert precision(layer, TF32) == (True, False)
    for layer in (UNGROUPED, WIDE, STRIDED):
        assert precision(layer, NO_TF32) == precision(layer, TF32_AS_PYTORCH, "bfloat16") == (False, False)


@pytest.mark.parametrize("in_groups", [False, True])
def test_exported_files_agree_with_calls(in_groups: bool) -> None:
    tconv3d.allow_tf32_in_groups(in_groups)
    x, w, bias = STRIDED.operands(torch.float32, "meta")
    call, _ = problems.forward(x, w, bias, STRIDED.settings, OperandAddresses())
    layer = Exported(STRIDED.batch, 16, 16, STRIDED.size, T3, T2, T1, groups=2)
    exported = export.problem(layer, Pass.FORWARD, export.Variant("H200", "tf32", "contiguous"))
    assert exported == call and call.loose is not in_groups


def test_explain_says_why() -> None:
    operands = STRIDED.operands(torch.float32, "meta")
    text = str(tconv3d.explain(*operands, *STRIDED.settings, gpu="H200"))
    assert "float32 products: TF32 is allowed, but PyTorch computes layers with such groups in float32" in text
    ungrouped = tconv3d.explain(*UNGROUPED.operands(torch.float32, "meta"), *UNGROUPED.settings, gpu="H200")
    assert "TF32 products allowed" in str(ungrouped)
