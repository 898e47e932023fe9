"""The transpose between channels-last and contiguous tensors: every alignment, tiny sizes, slices of the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fuzz.guards import Guards

from tconv3d import emulator
from tconv3d.planning import turning
from tconv3d.planning.problem import channels_last_strides, contiguous_strides
from tconv3d.runtime import compiler

# Channels, positions, and how many elements after a multiple of 16 bytes the source and the target begin.
MATRICES = (
    (8, 16, 0, 0),
    (32, 64, 0, 0),
    (40, 45, 0, 0),
    (96, 333, 0, 0),
    (24, 130, 0, 2),
    (3, 600, 0, 0),
    (5, 7, 1, 0),
    (16, 27, 3, 5),
    (100, 8, 0, 1),
    (1, 9, 2, 0),
    (33, 1, 0, 3),
)


@pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("at_end", [True, False])
def test_matrices_of_all_sizes_and_alignments(dtype: torch.dtype, back: bool, at_end: bool) -> None:
    """Tensors lie between guard pages, so that a vector outside of them is a fault. Three go in one launch."""
    for i in range(len(MATRICES)):
        guards, turnings, sources, targets = Guards("cpu", at_end), [], [], []
        for number, (channels, positions, from_, to) in enumerate((MATRICES[i - 2], MATRICES[i - 1], MATRICES[i])):
            items, first = 1 + number % 2, number
            shape = (items + first, channels, 1, 1, positions)
            layouts = (contiguous_strides, channels_last_strides)[:: 1 if back else -1]
            sources.append(guards.place("source", shape, layouts[0](shape), dtype, from_))
            targets.append(guards.place("target", (items, *shape[1:]), layouts[1]((items, *shape[1:])), dtype, to))
            sources[-1].copy_(torch.randint(-99, 99, shape))
            each = turning.turning(f"from {number}", f"to {number}", shape, dtype.itemsize, back)
            turnings.append(replace(each, items=items, first=first))
        launch = turning.turn(turnings, overlaps=False)
        emulator.prepare(launch)(tuple(each.data_ptr() for each in (*sources, *targets)))
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            assert torch.equal(source[number:], target), (MATRICES[i - 2 + number], number)
        assert guards.damage() is None


@pytest.mark.skipif(not emulator.available(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [3, 16, 72])
@pytest.mark.parametrize("width", [1, 5, 9, 79])
def test_zeros_follow_lines_up_to_whole_vectors(dtype: torch.dtype, channels: int, width: int) -> None:
    shape, columns = (2, channels, 2, 3, width), -width % (16 // dtype.itemsize)
    guards = Guards("cpu", at_end=True)
    source = guards.place("source", shape, channels_last_strides(shape), dtype)
    target = guards.place(
        "target", (*shape[:4], width + columns), contiguous_strides((*shape[:4], width + columns)), dtype
    )
    source.copy_(torch.randint(-99, 99, shape))
    each = turning.turning("source", "target", shape, dtype.itemsize, whole=True)
    assert each.written_bytes == target.nbytes
    emulator.prepare(turning.turn([each], overlaps=False))((source.data_ptr(), 0, 0, target.data_ptr(), 0, 0))
    assert torch.equal(target, F.pad(source, (0, columns))) and guards.damage() is None


@pytest.mark.parametrize("shape", [(1, 2**12, 2**3, 2**8, 2**8), (1, 3, 2**10, 2**8, 2**10)])
@pytest.mark.parametrize("back", [True, False])
def test_every_tile_of_a_large_tensor_is_counted(shape: tuple[int, ...], back: bool) -> None:
    each = turning.turning("from", "to", shape, 2, back)
    (rows, columns), tiles = each.tile, each.tiles
    assert rows * columns == 32 * 8 * 8 and tiles[0] * rows >= each.rows and tiles[1] * columns >= each.columns
    assert each.blocks * turning.THREADS // 32 >= tiles[0] * tiles[1]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_the_kernel_compiles_without_spills(item_bytes: int, arch: str) -> None:
    pytest.importorskip("cuda.core", reason="compiling needs cuda-core")
    each = turning.turning("from", "to", (2, 96, 3, 5, 7), item_bytes)
    launch = turning.turn([each], overlaps=False, hopper=arch == "sm_90a")
    report = compiler.compile(launch.kernel, launch.constants, arch).report
    assert report.spill_loads == report.spill_stores == report.stack_bytes == 0 < report.registers <= 96
