"""Decides how the halo kernel stores outputs: which builds can, and how many neighbours one store writes."""

from __future__ import annotations

from math import gcd

from ...planning.geometry import Triple
from .build import Build, Division, Input, Output
from .job import Job
from .tiling import Tiling

STORED_BY_PARTNER = -2  # marks a field whose outputs are stored together with those of another field
WITHOUT_PARTNER = -1  # marks a field whose outputs are stored alone


def can_store(build: Build, job: Job) -> bool:
    """Returns whether a build can store the job's outputs.

    Images are for rows that are no multiples of 16 bytes. Portions are for dense results without activation.
    """
    if build.input is Input.LINES:
        anywhere, dense = begins_anywhere(job), job.written[3] == job.written_size[2]
        long_runs = build.output is Output.LONG_RUNS
        way = dense and (anywhere or job.item_bytes == 2) if long_runs else not anywhere
        return has_lines(job) and way and job.norm is None
    if build.input is Input.IN_REGISTERS:
        # Rows that a previous launch has written are rounded already: rounding twice would add half a unit twice.
        return job.written_last and job.has_rows and not job.rows and job.norm is None
    if build.division is Division.BLOCKS:  # partial sums have the layout of the result: they are added one by one
        return job.dense and job.norm is None and job.activation == "tconv3d::Identity"
    if build.division is not Division.NOBODY and job.norm:
        return False  # moments need the complete sums of an output
    along_w = job.written[4] == 1 and not job.written_last
    return build.output is not Output.IMAGES or (along_w and any(v * build.item_bytes % 16 for v in _rows(job)))


def _rows(job: Job) -> tuple[int, ...]:
    """Returns the sizes that must be multiples of a vector for output rows to begin and end at multiples of it."""
    return (*job.written[:4], job.written_size[2])


def begins_anywhere(job: Job) -> bool:
    """Returns whether output rows begin or end at addresses that are no multiples of 16 bytes."""
    return not job.gather and any(v * job.item_bytes % 16 for v in _rows(job))


def has_lines(job: Job) -> bool:
    """Returns whether input can arrive in lines: the job's input lines can be copied as they lie in memory.

    Its output lines must allow stores of the outputs of two positions (four in 16-bit types), or be long runs.
    """
    *outer, line, one = job.read
    copied = one == 1 and line == job.read_size[2] and not any(v * job.item_bytes % 16 for v in (*outer, line))
    stride = 1 if job.gather else job.geometry.stride[2]
    positions, width = job.positions[2], job.written_size[2]
    if job.item_bytes == 2 or begins_anywhere(job):
        stored = stride == 2 and 0 <= stride * positions - width <= 1 and positions % (8 // job.item_bytes) == 0
    else:
        pairs = not any(v % 2 for v in _rows(job))  # one store has two positions of a line
        stored = stride * positions == width and pairs
    return copied and stored and job.written[4] == 1 and job.aligned


def stored_vectors(build: Build) -> dict[int, int]:
    """Returns the outputs of each vector that stores along w may use for some volume, with the vector's positions.

    A vector has 16 bytes or two outputs. Lines of tiles and of their halos must both be multiples of the positions,
    or be neighbours in memory, so that a plane is one long line. The latter holds for runs without padding, whose
    vectors may also have four outputs.
    """
    stride = 1 if build.gather else build.geometry.stride[2]
    if stride > 1 and (build.split[2] or stride % 2):
        return {}
    fours = build.march and stride == 1 and not any(axis.padding for axis in build.geometry.axes[1:])
    wide = (16 // build.written_bytes, 4) if fours else (16 // build.written_bytes,)
    found = {vector: max(1, vector // min(stride, 2)) for vector in (*wide, 2)}
    span = build.span[2]
    return {v: n for v, n in found.items() if (span % n == 0 or build.march) and (n == 1 or stride <= 2)}


def vector(build: Build, job: Job, tiling: Tiling) -> int:
    """Returns how many neighbouring outputs along w a store writes: rows begin and end at multiples of them."""
    width = job.written_size[2]
    lines: tuple[int, ...] = (tiling.tile[2], tiling.halo[2])
    rows = _rows(job)
    one_phase = job.gather or job.geometry.stride[1] == 1  # no rows of other phases lie between lines
    if tiling.length and lines == (width, width) and job.written[3] == width and one_phase:
        lines = tuple(height * width for height in (tiling.tile[1], tiling.halo[1]))
        rows = (*job.written[:3], *lines)
    for outputs, positions in stored_vectors(build).items() if job.written[4] == 1 else ():
        together = positions == 1 or (tiling.items == 1 and not any(line % positions for line in lines))
        if together and not any(row % outputs for row in rows):
            return outputs
    return 1


def in_place(build: Build) -> bool:
    """Returns whether both 16-bit phases along w are stored directly from registers (kInPlace in halo_stores.cuh)."""
    pairs = 2 in stored_vectors(build) and build.geometry.stride[2] == 2
    return pairs and build.input.copied and build.item_bytes == 2 and not (build.march or build.gather)


def lane_channels(build: Build, job: Job) -> int:
    """Returns the number of neighbouring output channels in a lane's sums.

    One store writes them to channels-last outputs: 16 bytes or less. Bands of moments have whole blocks of columns
    (block_channels in halo_layout.cuh).
    """
    if not job.written_last:
        return 1 if build.output is Output.LONG_RUNS and build.item_bytes == 4 else 2
    rows = (build.geometry.out_per_group, job.written[0], *job.written[2:])
    band, outputs = moment_band(build, job) if job.norm else 0, build.tile.outputs
    for own in (16 // build.written_bytes, 4):
        whole = 4 * own <= outputs and not any(v % own for v in rows)
        if whole and (band == 0 or (band % (4 * own) == 0 and outputs % (4 * own) == 0)):
            return own
    return 2


def moment_band(build: Build, job: Job) -> int:
    """Returns how many neighbouring output channels of a norm group and a tile share their moments."""
    if job.norm is None:
        return 1
    band = gcd(job.geometry.out_channels // job.norm.groups, build.geometry.out_per_group, build.tile.outputs)
    return band if band % 8 == 0 else band & -band


def partners(fields: tuple[Triple, ...], neighbours: bool) -> tuple[int, ...]:
    """Returns for each field the field with the next output along w, if one store writes both."""
    place = {field: i for i, field in enumerate(fields)}
    found = [WITHOUT_PARTNER] * len(fields)
    for (d, h, w), i in place.items():
        second = place.get((d, h, w + 1))
        if neighbours and w % 2 == 0 and second is not None:
            found[i], found[second] = second, STORED_BY_PARTNER
    return tuple(found)
