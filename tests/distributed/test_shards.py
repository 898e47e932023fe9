"""Rows that ranks own, need, send and receive, against loops over all taps; convolutions put together of slabs."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
from places import PYTHONPATH, ROOT

from tconv3d.distributed.shards import Block, ShardTooSmall, Split, block, chunk, volume
from tconv3d.planning.geometry import Axis, Geometry

# Kernel, stride, padding, output padding, dilation.
AXES = [
    Axis(*each)
    for each in (
        (4, 2, 1, 0, 1), (3, 1, 1, 0, 1), (3, 2, 1, 1, 1), (3, 2, 1, 0, 1), (2, 2, 0, 0, 1), (5, 2, 2, 1, 1),
        (3, 1, 2, 0, 2), (2, 3, 0, 2, 1), (1, 2, 0, 1, 1), (3, 3, 2, 1, 2), (4, 2, 4, 0, 1), (1, 1, 0, 0, 1),
        (2, 4, 0, 0, 1), (3, 1, 0, 0, 1), (1, 3, 1, 0, 1), (2, 2, 1, 1, 3),
    )
]  # fmt: skip
SPLITS = [
    split
    for axis, size, shards, backward in product(AXES, (5, 8, 9, 13, 24), (1, 2, 3, 4), (False, True))
    if (split := Split(axis, size, shards, backward)).target_size > 0 and split.source_size > 0
]


def read_by(split: Split, target: int) -> set[int]:
    """Returns the sources that a target reads, by the definition: output = input*stride - padding + tap*dilation."""
    axis = split.axis
    pairs = (
        (i, i * axis.stride - axis.padding + tap * axis.dilation)
        for i in range(split.size)
        for tap in range(axis.kernel)
    )
    outputs = axis.output_size(split.size)
    if split.backward:
        return {o for i, o in pairs if i == target and 0 <= o < outputs}
    return {i for i, o in pairs if o == target}


def test_rows_are_divided_as_torch_divides_them() -> None:
    import torch

    for size, shards in product((1, 2, 5, 8, 9, 17), (1, 2, 3, 4, 7)):
        theirs = [each.tolist() for each in torch.arange(size).chunk(shards)]
        ours = [list(chunk(size, shards, index)) for index in range(shards)]
        assert ours == theirs + [[]] * (shards - len(theirs))


def test_halos_and_slabs_are_what_the_taps_read() -> None:
    for split in SPLITS:
        for index in range(split.shards):
            own, targets = split.sources(index), split.targets(index)
            read = {target: read_by(split, target) for target in targets}
            needed = set().union(*read.values()) - set(own)
            before, after = split.halos(index)
            assert needed <= {*before, *after}
            for halo in (before, after):  # the first and the last row of a message have a reader
                assert not halo or {halo[0], halo[-1]} <= needed
            waiting = {target for target, rows in read.items() if rows - set(own)}
            slabs = split.slabs(index)
            assert waiting <= {target for slab in slabs for target in slab.targets}
            for slab in slabs:
                assert {slab.targets[0], slab.targets[-1]} <= waiting
                assert set().union(*(read[target] for target in slab.targets)) <= set(slab.sources)
                assert slab.computed[-len(slab.targets) :] == slab.targets
                assert split.window(slab.sources, slab.computed).padding == split.axis.padding


def convolved(axis: Axis, backward: bool, sources: list[int], weight: list[int], targets: int) -> list[int]:
    """Computes one dimension of a pass over a window, with integers."""
    found = [0] * targets
    for tap, factor in enumerate(weight):
        for i in range(targets if backward else len(sources)):
            o = i * axis.stride - axis.padding + tap * axis.dilation
            if backward and 0 <= o < len(sources):
                found[i] += factor * sources[o]
            elif not backward and 0 <= o < targets:
                found[o] += factor * sources[i]
    return found


def test_own_rows_and_slabs_make_up_the_whole_result() -> None:
    for split in SPLITS:
        if split.misfit is not None:
            continue
        weight = [tap * 7 + 3 for tap in range(split.axis.kernel)]
        volume = [row * row + 1 for row in range(split.source_size)]
        expected = convolved(split.axis, split.backward, volume, weight, split.target_size)
        for index in range(split.shards):
            own, targets = split.sources(index), split.targets(index)
            axis = split.window(own, targets)
            assert axis.output_size(len(targets if split.backward else own)) == len(
                own if split.backward else targets
            )
            found = convolved(axis, split.backward, [volume[row] for row in own], weight, len(targets))
            for slab in split.slabs(index):
                known = {*own, *(row for halo in slab.halos for row in halo)}
                rows = [volume[row] if row in known else -(10**9) for row in slab.sources]
                axis = split.window(slab.sources, slab.computed)
                computed = convolved(axis, split.backward, rows, weight, len(slab.computed))
                for target in slab.targets:
                    found[target - targets.start] = computed[target - slab.computed.start]
            assert found == expected[targets.start : targets.stop], split


def test_what_one_rank_sends_another_receives() -> None:
    geometry = Geometry(2, 3, 1, (AXES[0], AXES[1], AXES[2]))
    for backward, shards in product((False, True), ((2, 3, 1), (2, 2, 2), (1, 4, 2))):
        places = list(product(*map(range, shards)))
        blocks = {place: block(geometry, (8, 12, 8), shards, place, backward) for place in places}
        sent = {}
        for place, here in blocks.items():
            for dim in here.dims:
                for step, box in here.sends(dim).items():
                    to = tuple(index + step * (axis == dim) for axis, index in enumerate(place))
                    sent[place, to] = box
                    assert blocks[to].receives(dim)[-step] == box
        assert len(sent) == sum(len(here.receives(dim)) for here in blocks.values() for dim in here.dims)
        assert sum(map(volume, sent.values())) == sum(here.rows_sent for here in blocks.values())


def test_a_layer_of_a_u_net_sends_one_row_of_each_face() -> None:
    geometry = Geometry.make(8, 4, (4, 4, 4), (2, 2, 2), (1, 1, 1))
    inner = block(geometry, (32, 16, 16), (4, 1, 1), (1, 0, 0), False)
    assert inner.sends(0) == {-1: (range(8, 9), range(16), range(16)), 1: (range(15, 16), range(16), range(16))}
    assert inner.rows_sent == 2 * 16 * 16
    assert [slab.targets[0] for slab in inner.slabs(0)] == [range(16, 17), range(31, 32)]
    corner = block(geometry, (32, 16, 16), (2, 2, 1), (0, 0, 0), False)
    assert corner.rows_sent == 8 * 16 + (16 + 1) * 16  # along the height go the rows from along the depth too
    up = block(Geometry.make(8, 4, (2, 2, 2), (2, 2, 2)), (32, 16, 16), (4, 1, 1), (1, 0, 0), True)
    assert up.rows_sent == 0 and not list(up.slabs(0))


def test_a_shard_smaller_than_its_halo_is_refused_with_the_least_size() -> None:
    geometry = Geometry.make(1, 1, (7, 1, 1), padding=(3, 0, 0))
    with pytest.raises(
        ShardTooSmall, match=r"depth 8 .* 4 shards: shard 0 needs 3 input rows .* which has 2; the least"
    ) as error:
        block(geometry, (8, 4, 4), (4, 1, 1), (2, 0, 0), False)
    least = int(str(error.value).split()[-1])
    assert least == Split(geometry.axes[0], 8, 4).least_size == 9
    assert isinstance(block(geometry, (least, 4, 4), (4, 1, 1), (2, 0, 0), False), Block)
    assert block(geometry, (least, 4, 4), (4, 1, 1), (2, 0, 0), True)
    assert all(Split(Axis(7, 1, 3), size, 4).misfit is None for size in range(9, 40))


def test_importing_the_package_does_not_import_torchs_dtensors() -> None:
    code = (
        "import sys, tconv3d\n"
        "assert 'tconv3d.distributed' not in sys.modules\n"
        "assert tconv3d.distributed.parallelize and 'tconv3d.distributed' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHONPATH})
