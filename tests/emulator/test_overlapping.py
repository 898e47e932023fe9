"""Launches that overlap the previous one: in the emulator they begin before it, so that a missing wait shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuzz import run
from fuzz.case import Case
from layers import Layer
from mutants import kernel_from, mutate_kernel
from preferred import forgetting
from probes import Kernel

from tconv3d import emulator
from tconv3d.runtime import sources

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

HEADER = f'}}\n#include "{sources.find("common.cuh")}"\nnamespace tconv3d {{'
WAIT = "ptx::wait_for_previous_launch();"


@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled:1"])
def test_a_wait_divides_what_comes_before_the_previous_launch(make: Callable[..., Kernel], order: str) -> None:
    """The only block reads a number before the previous launch writes it, and again afterwards."""
    body = f"args.a[t] = args.b[0]; __syncthreads(); if (t == 3) {WAIT} __syncthreads(); args.a[32 + t] = args.b[0];"
    kernel = make(body, before=HEADER, order=order)
    number, seen = torch.zeros(1, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    launches: list[int] = []
    for wanted in (5, 7):
        before = number.item()
        kernel(seen, number, previous=lambda wanted=wanted: launches.append(wanted) or number.fill_(wanted))
        assert seen.tolist() == [before] * 32 + [wanted] * 32
    assert launches == [5, 7]
    kernel(seen, number)
    assert seen.tolist() == [7] * 64


def test_every_block_waits(make: Callable[..., Kernel]) -> None:
    kernel = make(f"if (blockIdx.x == 0) {WAIT} args.a[t] = 1;", before=HEADER, grid=(2, 1, 1))
    with pytest.raises(RuntimeError, match=r"block \(1, 0, 0\) may end before the previous launch"):
        kernel(torch.zeros(32, dtype=torch.int32), previous=lambda: None)


def test_a_failure_of_the_previous_launch_is_the_failure(make: Callable[..., Kernel]) -> None:
    kernel = make(WAIT, before=HEADER)

    def fail() -> None:
        raise ValueError("the first launch")

    for _ in range(2):
        with pytest.raises(ValueError, match="the first launch"):
            kernel(previous=fail)


@pytest.mark.slow
def test_a_kernel_that_does_not_wait_is_found(tmp_path: Path) -> None:
    case = Case(Layer(16, 16, (3, 4, 14), (3, 3, 3), (1, 1, 1), (1, 1, 1), groups=4), "bfloat16", wanted=("weight",))
    mutate_kernel("reduce_gradients", WAIT, ";", tmp_path / "mutant")
    with forgetting():
        run.check(case, "cpu")
    found = pytest.raises(RuntimeError, match=r"kernel reduce_gradients.*may end before the previous launch")
    with forgetting(), kernel_from(tmp_path / "mutant", "reduce_gradients"), found:
        run.check(case, "cpu")
