"""The fused block on mma.sync, whose kernel leaves the moments of its result for the norm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ampere import on_ampere
from fused_blocks import BF16, F16, FORMATS, T1, T2, T3, TOLERANCE, Block, errors, run, three_layers
from layers import Layer, poisoned
from mutants import kernel_from, mutate

import tconv3d
from tconv3d import emulator
from tconv3d.planning import gpus, planner
from tconv3d.planning.problem import Norm, Pass, Problem
from tconv3d.tools.bench.layers import LAYERS
from tconv3d.tools.bench.problems import problems_of_layer

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

BLOCKS = {
    "TF32": (Block(Layer(16, 32, (3, 4, 5), T3), 4, tf32=True), "contiguous"),
    "12 channels per norm group": (Block(Layer(8, 36, (3, 4, 5), T3, T2, T1), 3, dtype=BF16), "channels last"),
    "one channel per norm group": (Block(Layer(8, 8, (3, 3, 5), T3, T2, T1), 8, dtype=F16), "contiguous"),
    "several batch items": (Block(Layer(32, 16, (2, 2, 2), T3, T2, T1, batch=7), 2, dtype=BF16), "contiguous"),
    "one norm group": (Block(Layer(16, 24, (3, 4, 5), T3, (1, 2, 1), groups=2), 1, dtype=F16), "channels last"),
    "empty phases": (Block(Layer(8, 8, (3, 3, 3), T3, T2, (0, 1, 2), T1, T2), 2, dtype=F16), "contiguous"),
    "strict float32": (Block(Layer(8, 16, (3, 3, 4), T3), 4), "contiguous"),
}


def forward_error(block: Block, memory_format: str) -> float:
    """Returns the relative error of the block's result; in float32, the mean of some channels is far from 0."""
    module = block.module("cpu")
    if block.dtype is torch.float32:
        with torch.no_grad():
            module.conv_transpose.bias[::2] += 2
    x = block.input("cpu", FORMATS[memory_format])
    with on_ampere(precision="tf32" if block.tf32 else "ieee"), poisoned(), torch.no_grad():
        assert "mma" in str(tconv3d.explain(module, x))
        got, again = module(x), module(x)
    assert torch.equal(got, again), "a second run has other bits"
    return errors([got], [three_layers(module)(x.double()).detach()])[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_against_float64(name: str) -> None:
    block, memory_format = BLOCKS[name]
    assert forward_error(block, memory_format) < TOLERANCE[block.dtype]


def test_gradients_of_the_block() -> None:
    block, _ = BLOCKS["TF32"]
    module, x = block.module("cpu"), block.input("cpu")
    with on_ampere(), poisoned():
        got = run(module, x)
    found = errors(got, run(three_layers(module), x.double()))
    assert found[0] < 2e-6 and all(error < 1e-3 for error in found), found


@pytest.mark.parametrize("order", ["reversed", "shuffled:1"])
def test_the_order_of_threads_changes_no_bit(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    block, memory_format = BLOCKS["several batch items"]
    module, x = block.module("cpu"), block.input("cpu", FORMATS[memory_format])
    found = []
    for each in ("forward", order):
        monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", each)
        with on_ampere(), torch.no_grad():
            found.append(module(x))
    assert torch.equal(*found)


@pytest.mark.parametrize("gpu", ["A100", "L4", "B200"])
def test_no_pass_over_the_result_computes_moments(gpu: str) -> None:
    """Wide layers with a norm take `mma` on GPUs that are no Hopper, and then two launches: result and statistics."""
    problems = {each.which: each for each in problems_of_layer(LAYERS["relu_group_norm"], "bfloat16", "contiguous")}
    forward = problems[Pass.FORWARD]
    for groups in (1, 8, 128):
        plan = planner.plan(replace_norm(forward, groups), gpus.GPUS[gpu].device)
        kernels = [launch.kernel for launch in plan.launches]
        assert kernels[-2:] == ["mma", "statistics"] and "channel_moments" not in kernels
        assert plan.moments > 0 and plan.tile.endswith("leaves the moments of its result")


def replace_norm(problem: Problem, groups: int) -> Problem:
    return replace(problem, relu=True, norm=Norm(groups, 1e-5))


MUTANTS = {
    "outputs that do not exist": ("tile.output(at, f).exists", "true"),
    "the values of other batch items": ("at.n == item &&", ""),
    "lanes that share a band": ("if (distance < 4 && distance >= kSharing) continue;", "if (distance < 4) continue;"),
    "a shift that lanes do not share": ("lane % 4 / kSharing * kSharing", "lane % 4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, tmp_path: Path) -> None:
    text, replacement = MUTANTS[name]
    mutate("mma_moments", text, replacement, tmp_path / "kernels")
    block, memory_format = BLOCKS["several batch items"]
    with kernel_from(tmp_path / "kernels", "mma"):
        assert not forward_error(block, memory_format) < 2 * TOLERANCE[block.dtype]
