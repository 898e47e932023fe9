"""Ranks that start together with an empty cache: one compiles each kernel, and nobody waits for a rank that dies."""

from __future__ import annotations

from pathlib import Path

import cold_start
import pytest
from process_groups import process_group

from tconv3d import emulator

pytestmark = pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")


def lines(directory: Path) -> list[str]:
    return (directory / "compiled").read_text().splitlines()


def test_ranks_compile_each_kernel_once(tmp_path: Path) -> None:
    with process_group(4) as four:
        counts = four.run(cold_start.first_call, str(tmp_path))
    kernels = lines(tmp_path)
    assert len(kernels) == len(set(kernels)) == sum(counts) > 0


def test_a_rank_that_dies_while_it_compiles_is_not_waited_for(tmp_path: Path) -> None:
    with process_group(3) as three:
        outcomes = three.outcomes(cold_start.first_call, str(tmp_path), 0, timeout=60)
    assert [outcome.error for outcome in outcomes] == ["the process ended with exit code -9", None, None]
    kernels = lines(tmp_path)
    assert kernels.count(kernels[0]) == 2, "one of the other ranks compiles what the dead rank began"
    assert len(kernels) == len(set(kernels)) + 1
