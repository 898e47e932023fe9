"""The bias gradient of channels-last tensors, by vectors of channels and channel by channel, against float64."""

from __future__ import annotations

import pytest
import torch
from layers import UNIT

import tconv3d
from tconv3d import emulator
from tconv3d.families.direct import planner
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import bias_grad_problem, channels_last_strides
from tconv3d.torch_ops import executor

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not CUDA and not emulator.available(), reason="neither a GPU nor a C++ compiler")
SIZE = (3, 7, 11)


def channels_last(channels: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    shape = (2, channels, *SIZE)
    memory = torch.randn(2 * channels * 231 + offset, dtype=torch.float64).to(dtype)
    memory = memory.cuda() if CUDA else memory
    return memory[offset:].as_strided(shape, channels_last_strides(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("channels", "offset"),
    [(8, 0), (24, 0), (24, 1), (37, 0), (264, 0), (2056, 0), (2, 0), (12, 0), (53, 0), (131, 0), (250, 0)],
)
def test_sums_are_exact(channels: int, offset: int, dtype: torch.dtype) -> None:
    grad = channels_last(channels, dtype, offset)
    with tconv3d.use_backend("cuda" if CUDA else "emulator"):
        ours = executor.bias_grad(grad).cpu().double()
    values = grad.cpu().double()
    exact, largest = (each.sum((0, 2, 3, 4)) for each in (values, values.abs()))
    assert ((ours - exact).abs() <= UNIT[dtype] * exact.abs() + 8 * UNIT[torch.float32] * largest).all()


@pytest.mark.parametrize(
    ("channels", "dtype", "aligned", "rows"),
    [
        (24, "bfloat16", True, True),
        (24, "bfloat16", False, False),
        (20, "bfloat16", True, True),
        (53, "bfloat16", True, True),
        (257, "bfloat16", True, False),
        (257, "float32", True, False),
    ],
)
def test_vectors_are_for_aligned_rows_whose_bundles_fit_a_block(
    channels: int, dtype: str, aligned: bool, rows: bool
) -> None:
    strides = channels_last_strides((2, channels, *SIZE))
    problem = bias_grad_problem(2, channels, SIZE, dtype, strides, aligned)
    plan = planner.plan(problem, GPUS["H200"].device)
    assert dict(plan.launches[0].constants)["kRows"] is rows


def test_infinite_gradients_stay_infinite() -> None:
    grad = channels_last(8, torch.float32, 0)
    grad[0, 3, 0, 0, 0] = float("inf")
    with tconv3d.use_backend("cuda" if CUDA else "emulator"):
        found = executor.bias_grad(grad)
    assert found[3] == float("inf") and found.isfinite().sum() == 7


@pytest.mark.parametrize("channels", [4, 12, 37])
def test_equal_terms_leave_no_more_error_than_a_few_roundings(channels: int) -> None:
    """Added one by one, 462 equal float32 numbers leave a relative error of 2e-6 or more."""
    grad = channels_last(channels, torch.float32, 0)
    grad[:] = -0.33457
    with tconv3d.use_backend("cuda" if CUDA else "emulator"):
        ours = executor.bias_grad(grad).cpu().double()
    exact = grad.cpu().double().sum((0, 2, 3, 4))
    assert ((ours - exact).abs() <= 4 * UNIT[torch.float32] * exact.abs()).all()
