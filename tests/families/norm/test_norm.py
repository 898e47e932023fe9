"""GroupNorm behind a convolution: statistics, gradients in one launch, sanitizers and orders of threads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from fused_blocks import BF16, BLOCKS, F16, F64, FORMATS, TOLERANCE, errors, run, tf32
from layers import poisoned, to_tf32
from sanitizing import sanitized
from torch import Tensor

import tconv3d
from tconv3d import emulator
from tconv3d.families.norm import planner as norm_planner
from tconv3d.torch_ops import executor, norm_executor


def check_statistics(x: Tensor, w: Tensor) -> None:
    """Compares the norm of x in both layouts with float64: the error is not above PyTorch's in float32."""
    exact = F.group_norm(x.double(), 4)
    theirs = errors([F.group_norm(x, 4)], [exact])[0]
    for memory_format in FORMATS.values():
        got = tconv3d.conv_transpose3d_relu_group_norm(x.contiguous(memory_format=memory_format), w, None, 4)
        assert errors([got], [exact])[0] <= theirs


def test_statistics_survive_a_large_mean(ours: str) -> None:
    """Into the norm goes what comes in, with mean 1e4 and deviation 1: the error is not above PyTorch's float32."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, 16, 16, device=ours) + 1e4
    w = torch.eye(8, device=ours).view(8, 8, 1, 1, 1)
    check_statistics(x, w)
    # On tensor cores: deviations that TF32 has, far from zero.
    rounded = to_tf32(torch.randn(2, 8, 8, 16, 16, device=ours) * 16 + 1e4)
    exact = F.group_norm(rounded.double(), 4)
    theirs = errors([F.group_norm(rounded, 4)], [exact])[0]
    with tf32(True):
        assert errors([tconv3d.conv_transpose3d_relu_group_norm(rounded, w, None, 4)], [exact])[0] <= theirs


def test_statistics_survive_a_first_value_far_from_the_mean(ours: str) -> None:
    """Every channel begins with a value 12 deviations from its mean: squares about it would be off by 5e-6."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 8, 16, 16, device=ours) + 20
    x[:, :, 0, 0, 0] = 32
    w = torch.eye(8, device=ours).view(8, 8, 1, 1, 1)
    check_statistics(x, w)


def test_equal_values_and_one_value_per_group(ours: str) -> None:
    x, w = torch.full((2, 3, 2, 2, 2), 7.25, device=ours), torch.eye(3, device=ours).view(3, 3, 1, 1, 1)
    assert torch.equal(tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 3), torch.zeros_like(x))
    x = torch.randn(2, 3, 1, 1, 1, device=ours)
    got = tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 3, norm_bias=torch.arange(3.0, device=ours))
    assert torch.equal(got, torch.arange(3.0, device=ours).view(1, 3, 1, 1, 1).expand_as(x))


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_norm_with_one_parameter(which: str, ours: str) -> None:
    x, w = torch.randn(2, 2, 2, 3, 2, device=ours, dtype=F64), torch.randn(2, 4, 2, 2, 2, device=ours, dtype=F64)
    parameter = torch.randn(4, device=ours, dtype=F64, requires_grad=True)
    got = tconv3d.conv_transpose3d_relu_group_norm(x, w, None, 2, **{f"norm_{which}": parameter})
    both = {"weight": torch.ones_like(parameter), "bias": torch.zeros_like(parameter), which: parameter}
    expected = F.group_norm(torch.relu(F.conv_transpose3d(x, w)), 2, **both)
    torch.testing.assert_close(got, expected)
    pairs = [torch.autograd.grad(result.pow(3).sum(), parameter) for result in (got, expected)]
    torch.testing.assert_close(*pairs)


def norm_gradient(dy: Tensor, x: Tensor, groups: int, weight: Tensor) -> list[Tensor]:
    """Returns in float64 what `norm_executor.gradient` computes for a ReLU's result x."""
    leaves = [x.double().requires_grad_(), weight.double().requires_grad_(), torch.zeros_like(weight, dtype=F64)]
    y = F.group_norm(leaves[0], groups, leaves[1], leaves[2].requires_grad_())
    dx, dweight, dbias = torch.autograd.grad(y, leaves, dy.double())
    dz = dx * (x > 0)
    return [dz, torch.stack([dweight, dbias]), dz.sum((0, 2, 3, 4))]


@pytest.mark.parametrize(
    ("kernel", "shape", "groups", "kinds"),
    [
        ("norm_both", (6, 12, 5, 7, 61), 3, (torch.float32, torch.float32)),  # several units of a pass, odd volumes
        ("norm_both", (9, 8, 1, 3, 3), 8, (BF16, torch.float32)),  # one strip of a norm group
        ("norm_once", (5, 12, 5, 8, 60), 3, (torch.float32, torch.float32)),  # a channel's last chunk is shorter
        ("norm_once", (9, 8, 2, 4, 3), 8, (BF16, torch.float32)),  # less than a ring of them
        ("norm_once", (1, 20, 3, 10, 16), 5, (F16, F16)),
    ],
)
def test_both_passes_of_the_norms_gradient_in_one_launch(
    kernel: str, shape: tuple[int, ...], groups: int, kinds: tuple[torch.dtype, torch.dtype], ours: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As it is for tensors that L2 does not hold: against float64, and the same bits whatever is wanted."""
    torch.manual_seed(6)
    x, dy = torch.randn(shape, device=ours).relu().to(kinds[0]), torch.randn(shape, device=ours).to(kinds[1])
    weight = torch.randn(shape[1], device=ours)
    variance, mean = torch.var_mean(x.double().reshape(shape[0], groups, -1), 2, correction=0)
    statistics = torch.stack([mean, (variance + 1e-5).rsqrt()]).float()
    monkeypatch.setattr(norm_planner, "LEAST_BYTES", 0)
    monkeypatch.setattr(norm_planner, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(norm_planner, "MOST_STAGES", 6)
    monkeypatch.setattr(norm_planner, "KEPT_GROUPS", 1)
    monkeypatch.setattr(executor, "_tasks", {})
    norm_planner.plan_gradient.cache_clear()
    ran: list[str] = []
    make_task = executor.make_task
    monkeypatch.setattr(
        executor, "make_task", lambda plan, *rest: (ran.append(plan.kernel), make_task(plan, *rest))[1]
    )
    with poisoned():
        got, dz, parameters = (
            norm_executor.gradient(dy, x, statistics, weight, torch.float32, norm_planner.Wanted(*wanted))
            for wanted in ((True, True, True), (True, False, False), (False, True, False))
        )
    # What is not yet written is all ones, and so is one of the NaNs: it must arrive nevertheless.
    ones = torch.full(shape, -1, dtype=torch.int32, device=ours).view(torch.float32).to(kinds[1])
    everything = norm_planner.Wanted(True, True, True)
    spoiled = norm_executor.gradient(ones, x, statistics, weight, torch.float32, everything)
    assert all(each.isnan().any() for each in spoiled)
    norm_planner.plan_gradient.cache_clear()
    assert ran == [kernel, kernel, "norm_grad" if kernel == "norm_both" else kernel]
    found = errors(list(got), norm_gradient(dy, x, groups, weight))
    assert max(found) < TOLERANCE[kinds[0]], found
    assert torch.equal(dz[0], got[0]) and torch.equal(parameters[1], got[1])


ORDERED = ("one channel per group", "tensor cores, groups", "tensor cores, march")
SANITIZED = ("one channel per group", "tensor cores, march")  # one on tensor cores: compiling takes a minute


def all_passes(name: str) -> list[Tensor]:
    """In the emulator, in both formats."""
    block = BLOCKS[name]
    torch.manual_seed(4)
    module, x = block.module("cpu"), block.input("cpu")
    with tconv3d.use_backend("emulator"):
        return [t for form in FORMATS.values() for t in run(module, x.contiguous(memory_format=form))]


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.thorough
def test_sanitizers_find_nothing() -> None:
    child = subprocess.run([sys.executable, __file__], env=sanitized(), capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split("\n")[:-1] == [f"{name}: run" for name in SANITIZED]


@pytest.mark.slow
@pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")
@pytest.mark.parametrize("name", ORDERED)
def test_the_order_of_threads_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for order in ("forward", "reversed", "shuffled:1"):
        monkeypatch.setenv("TCONV3D_EMULATOR_ORDER", order)
        monkeypatch.setattr(executor, "_tasks", {})
        results.append(all_passes(name))
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


if __name__ == "__main__":
    for each in SANITIZED:
        all_passes(each)
        print(f"{each}: run", flush=True)
