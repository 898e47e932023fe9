"""Operators on DTensors: every way to split a call gives the results of one process, or an error in words."""

from __future__ import annotations

import subprocess
import sys

import pytest
import sharded_calls
from places import ROOT
from process_groups import Group

# What the message for each call of `sharded_calls.messages` must say.
MESSAGES = {
    "split in space": ("NotImplementedError", "split in space (S(2))", "Use tconv3d.distributed"),
    "split in space, for statistics": ("NotImplementedError", "split in space (S(4))", "Use tconv3d.distributed"),
    "split norm groups": ("NotImplementedError", "2 groups of 2 channels", "4 ranks"),
    "partial sums before the norm": ("NotImplementedError", "partial sum", "before ReLU and GroupNorm"),
    "a plain weight": ("RuntimeError", "expected all tensors to be DTensors", "[4, 4, 3, 3, 3]"),
    "a plain input": ("RuntimeError", "DTensor"),
    "two meshes": ("RuntimeError", "expected all DTensors on one DeviceMesh"),
    "wrong channels": ("RuntimeError", "to have 8 channels, but got 7"),
    "a layer of PyTorch": ("NotImplementedError", "call tconv3d.accelerate(model) first"),
    "another layer": ("NotImplementedError", "Conv3d"),
    "too few channels": ("ValueError", "out_channels", "4 ranks", "got 6"),
    "groups by columns": ("ValueError", "use GroupwiseParallel"),
    "no groups": ("ValueError", "use ColwiseParallel or RowwiseParallel"),
    "norm groups of a block": ("ValueError", "num_groups", "got 2"),
    "rows of a block": ("NotImplementedError", "partial sum"),
}


@pytest.mark.parametrize("groups", [1, 4])
def test_every_placement_of_the_operands(four_ranks: Group, groups: int) -> None:
    assert four_ranks.run(sharded_calls.every_placement, groups) == [48 * 1] * 4


def test_meshes_with_two_dimensions(four_ranks: Group) -> None:
    four_ranks.run(sharded_calls.two_mesh_dimensions, 40)


def test_the_fused_block(four_ranks: Group) -> None:
    found = four_ranks.run(sharded_calls.fused_blocks)[0]
    # Placements of the result, and of the gradients of input, weight, bias, and the norm's weight and bias.
    assert found["batch 1 1"] == ("S(0)", "S(0)", "P", "P", "P", "P")
    assert found["output channels 1 1"] == ("S(1)", "P", "S(1)", "S(0)", "S(0)", "S(0)")
    assert found["groups 2 2"] == ("R S(1)", "R S(1)", "R S(0)", "R S(0)", "R S(0)", "R S(0)")


def test_this_librarys_kernels(four_ranks: Group) -> None:
    found = four_ranks.run(sharded_calls.on_the_kernels)[0]
    assert found["batch, output channels"] == ("S(0) S(1)", "S(0) P", "P S(1)", "P S(0)")


def test_layers_divided_by_styles(four_ranks: Group) -> None:
    four_ranks.run(sharded_calls.parallelized_module)


def test_messages(four_ranks: Group) -> None:
    by_rank = four_ranks.run(sharded_calls.messages)
    assert all(found == by_rank[0] for found in by_rank), "all ranks raise alike, so that none waits for another"
    assert by_rank[0].keys() == MESSAGES.keys()
    for name, parts in MESSAGES.items():
        assert all(part in by_rank[0][name] for part in parts), f"{name}: {by_rank[0][name]}"


def test_importing_the_package_does_not_import_dtensors() -> None:
    code = (
        "import sys, tconv3d; print('torch.distributed.tensor' in sys.modules, 'tconv3d.distributed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
