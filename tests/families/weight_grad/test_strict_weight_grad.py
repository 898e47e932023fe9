"""The weight gradient in strict float32 as three TF32 products, against float64: errors, special values, plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.nn.functional as F
from layers import Layer, passes
from preferred import only
from problems import A100, H200, problem
from torch import Tensor
from weight_gradients import tensors, weight_grad

from tconv3d.families.weight_grad import warps
from tconv3d.planning.offers import Offer, Refusal
from tconv3d.planning.problem import Pass
from tconv3d.runtime import compiler
from tconv3d.torch_ops import executor

T1, T2, T3 = (1, 1, 1), (2, 2, 2), (3, 3, 3)
LAYERS = {
    "groups of eight, rows shared by halves": Layer(16, 16, (3, 5, 10), T3, T2, T1, groups=2),
    "two tiles and a rest": Layer(40, 20, (2, 4, 9), T3, padding=T1),
    "groups of six and twelve": Layer(12, 24, (3, 4, 9), (2, 3, 4), (2, 1, 2), (0, 1, 1), groups=2),
}


@pytest.fixture(autouse=True)
def only_warps(ours: str) -> Iterator[str]:
    with only("tensor_weight_grad"):
        yield ours


def error(layer: Layer, x: Tensor, dy: Tensor) -> float:
    """Returns the norm of the error against float64, relative to the norm of the result."""
    w = torch.zeros(layer.in_channels, layer.out_channels // layer.groups, *layer.kernel, device=x.device).double()
    exact = passes(F.conv_transpose3d, [x.double(), w], layer.settings, dy.double())[1][1]
    return float((weight_grad(layer, x, dy).double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", LAYERS)
def test_errors_are_of_float32(name: str, only_warps: str) -> None:
    x, dy = tensors(LAYERS[name], torch.float32, only_warps)
    assert error(LAYERS[name], x, dy) < 1.6e-7  # 7.6e-8 for products, the rest for additions of tensor cores


def test_the_bias_in_the_same_pass(only_warps: str) -> None:
    layer = LAYERS["groups of eight, rows shared by halves"]
    x, dy = tensors(layer, torch.float32, only_warps)
    wanted = False, True, True
    db = executor.backward(dy, x, None, wanted, layer.size, layer.kernel, layer.settings)[2]
    assert db is not None
    exact = dy.double().sum((0, 2, 3, 4))
    assert float((db.double() - exact).norm() / exact.norm()) < 2e-7


def test_channels_last(only_warps: str) -> None:
    layer = LAYERS["two tiles and a rest"]
    x, dy = (t.to(memory_format=torch.channels_last_3d) for t in tensors(layer, torch.float32, only_warps))
    assert error(layer, x, dy) < 1.6e-7


def test_the_error_does_not_grow_with_the_number_of_positions(
    only_warps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compensation, the 1024 additions of each warp would make an error of 3e-7."""
    monkeypatch.setattr(warps, "_splits", lambda *_: 1)
    layer = Layer(8, 8, (1, 1, 131072), T1, batch=1)
    x, dy = (t.abs() for t in tensors(layer, torch.float32, only_warps))
    assert error(layer, x, dy) < 1.6e-7


@pytest.mark.parametrize("channels", [8, 16])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e-30, 3.4e38])
def test_special_values_reach_the_result(value: float, channels: int, only_warps: str) -> None:
    layer = Layer(channels, 8, (1, 1, 64), T1, batch=1)
    ones = torch.ones(1, channels, 1, 1, 64, device=only_warps)
    for place in (0, 1):  # the value is in x, then in dy
        x, dy = ones.clone(), torch.zeros(1, 8, 1, 1, 64, device=only_warps)
        dy[..., 5] = 1.0
        (x, dy)[place][0, 3, 0, 0, 5] = value
        got = weight_grad(layer, x, dy)[:, :, 0, 0, 0]
        row = got[3] if place == 0 else got[:, 3]
        assert row.isnan().all() if value != value else torch.allclose(row, torch.tensor(value), rtol=1e-6, atol=0.0)
        assert (got[4] if place == 0 else got[:, 4] == 1).all()


def test_the_price_is_that_of_more_tf32_products() -> None:
    """The work of strict float32 is larger by what it adds to that of TF32."""
    layer = Layer(32, 32, (32, 64, 128), T3, T2, T1, groups=4, batch=4)
    for device in (H200, A100):
        strict, tf32 = (problem(layer, Pass.WEIGHT_GRAD, tf32=allowed) for allowed in (False, True))
        ours, rounded = (warps.offer({p.which: p}, device)[0] for p in (strict, tf32))
        assert isinstance(ours, Offer) and isinstance(rounded, Offer)
        assert rounded.work().cycles < ours.work().cycles < 3 * rounded.work().cycles
        assert "three TF32 products" in ours.plan().why


def test_short_sums_are_refused() -> None:
    p = replace(problem(LAYERS["two tiles and a rest"], Pass.WEIGHT_GRAD, tf32=False), batch=1, input_size=(1, 4, 9))
    assert prod(p.input_size) < 48
    answer = warps.offer({p.which: p}, H200)[0]
    assert isinstance(answer, Refusal) and "sums of 36 terms" in answer.why


def test_the_kernel_compiles_for_compute_capability_8_0() -> None:
    """The oldest GPUs lack instructions that newer ones have, which only their assembler notices."""
    p = problem(LAYERS["two tiles and a rest"], Pass.WEIGHT_GRAD, tf32=False)
    launch = warps.plan(replace(p, batch=64), A100).launches[0]
    assert dict(launch.constants)["kHalves"] == 2
    assert compiler.compile(launch.kernel, launch.constants, "sm_80").cubin.startswith(b"\x7fELF")
