"""The forward pass with few output channels on tensor cores, against float64."""

from __future__ import annotations

import pytest
import torch
from layers import Layer, check, to_tf32

import tconv3d

T3, T2, T1 = (3, 3, 3), (2, 2, 2), (1, 1, 1)

LAYERS = {
    "gan": Layer(64, 1, (4, 5, 18), (4, 4, 4), T2, T1),
    "monai": Layer(32, 2, (4, 9, 5), T3, T2, T1, T1),
    "stride one": Layer(12, 1, (3, 4, 5), T3, bias=False),
    "several tiles and parts": Layer(8, 1, (30, 11, 19), (2, 3, 3), T1, (0, 1, 1), batch=1),
    "groups, stride beyond kernel": Layer(16, 2, (3, 4, 5), (2, 2, 3), (3, 2, 1), (1, 0, 0), (1, 1, 0), (1, 1, 2), 2),
    "odd channels": Layer(17, 3, (3, 4, 5), (2, 2, 3), (1, 2, 2), T1),
    "empty phases": Layer(8, 2, (3, 4, 5), T3, T2, (3, 2, 2), T1, T2),
    "flat": Layer(16, 4, (9, 4, 5), (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "padding beyond the kernel": Layer(8, 1, (7, 7, 7), T2, T1, T3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_against_float64(name: str, dtype: torch.dtype, ours: str) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    operands = LAYERS[name].operands(dtype, ours)
    if dtype == torch.float32:  # products of such numbers are exact
        operands = [to_tf32(operand) for operand in operands]
    assert tconv3d.explain(*operands[:2], None, *LAYERS[name].settings, gpu="H200").kernel == "few_outputs"
    check(LAYERS[name], dtype, ours, operands, forward_only=True)


def test_channels_last(ours: str) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    operands = [to_tf32(operand) for operand in LAYERS["monai"].operands(torch.float32, ours)]
    operands[0] = operands[0].to(memory_format=torch.channels_last_3d)
    check(LAYERS["monai"], torch.float32, ours, operands, forward_only=True)


def test_float32_is_rounded_to_nearest(ours: str) -> None:
    """Inputs halfway and more above a TF32 number go up: truncation would lose half a unit on average."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    x = torch.full((1, 8, 2, 2, 2), 1 + 3 * 2**-12, device=ours)
    w = torch.ones(8, 1, 1, 1, 1, device=ours)
    assert torch.equal(tconv3d.conv_transpose3d(x, w), torch.full((1, 1, 2, 2, 2), 8 * (1 + 2**-10), device=ours))
