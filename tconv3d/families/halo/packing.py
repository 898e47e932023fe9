"""Plans the kernel that packs a weight as panels, in the order in which tensor cores consume them (pack.cuh)."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from ...planning.geometry import Triple
from ...planning.launch import Launch
from ...planning.scalars import SCALARS, ceil_div
from .arguments import PACK
from .build import Build, Input
from .constants import layout_constants
from .job import Job
from .program import Program
from .storing import lane_channels

MOST_AT_ONCE = 2048  # most weights that a block holds, so that all their loads are in flight
LEAST_BLOCKS = 600  # fewest blocks if the weight is large: more than run at once
THREADS = 128
NOT_PACKED = -2  # marks a field that a panel of the table of taps does not have


class Run(IntEnum):
    """The dimensions that a contiguous run of a weight's memory covers (`kRun` in pack.cuh has the same values)."""

    TAPS = 0
    COLUMN_TAPS = 1
    CHANNEL_TAPS = 2
    COLUMNS = 3
    CHANNELS = 4


def pack(build: Build, job: Job) -> Launch:
    """Returns the launch that packs the weight of a job."""
    g = build.geometry
    run = _weight_run(build, job)
    channels = build.part_bytes // build.item_bytes
    parts = build.column_tiles // len(build.programs) * build.chunks
    columns, taps = _at_once(build, run, channels, parts)
    lines = build.halves * len(build.programs) * build.chunk_fields
    column_pitch = (taps * (channels + 1) + 30) // 32 * 32 + 1
    vector = 16 // build.item_bytes
    parameters = (*(job.weight[:1] + job.weight[2:]), job.weight_group, job.weight_tap, g.out_per_group)
    vectors = run == Run.COLUMNS and job.weight_aligned and not any(v % vector for v in parameters)
    staged = taps * channels * (columns + vector) * build.item_bytes if vectors else 4 * columns * column_pitch
    shared_bytes = staged + 4 * (2 * lines + 1)
    return PACK.launch(
        parts * (build.tile.outputs // columns) * ceil_div(g.taps, taps),
        THREADS,
        (
            ("Scalar", SCALARS[build.dtype]),
            *((f"kKernel{name}", size) for name, size in zip("DHW", g.kernel, strict=True)),
            ("kColumnsAtOnce", columns),
            ("kTapsAtOnce", taps),
            ("kColumnVectors", vectors),
            ("kRun", int(run)),
            ("kMerged", build.tile.merged),
            ("kLaneOrder", build.input is Input.IN_REGISTERS),
            ("kReversed", job.weight[4] < 0),
            ("kSharedBytes", shared_bytes),
            *layout_constants(build),
            ("kLaneChannels", lane_channels(build, job)),
            ("kTap", _table(build)),
            ("kNotPacked", NOT_PACKED),
        ),
        {"packed": "workspace"},
        shared_bytes=shared_bytes,
        min_blocks=8,
        stride=job.weight,
        group=job.weight_group,
        tap=job.weight_tap,
    )


def _weight_run(build: Build, job: Job) -> Run:
    """Returns which dimensions a contiguous run of the weight's memory covers."""
    g = build.geometry
    read, written, *taps = job.weight
    _, kernel_h, kernel_w = g.kernel
    steps = (kernel_h * kernel_w, kernel_w, 1)
    used = [(stride, step) for stride, step, size in zip(taps, steps, g.kernel, strict=True) if size > 1]
    flat = all(stride == step for stride, step in used) or all(stride == -step for stride, step in used)
    if build.tile.groups > 1 or build.tile.merged > 1:
        return Run.TAPS
    if flat and written == g.taps:
        return Run.COLUMN_TAPS
    if flat and read == g.taps:
        return Run.CHANNEL_TAPS
    return Run.COLUMNS if written == 1 else Run.CHANNELS if read == 1 else Run.TAPS


def _at_once(build: Build, run: Run, channels: int, parts: int) -> tuple[int, int]:
    """Returns the columns and the taps that a block packs; the weight has `parts` parts of `channels` channels."""
    outputs, taps = build.tile.outputs, build.geometry.taps
    if run == Run.COLUMNS:  # a block takes up to 32 columns of a few taps
        columns = max(n for n in (32, 16, 8) if outputs % n == 0)
        return columns, max(1, MOST_AT_ONCE // (columns * channels))
    counts = (n for n in (8, 4, 2) if n * taps * channels <= MOST_AT_ONCE)
    return max((n for n in counts if parts * outputs // n >= LEAST_BLOCKS), default=1), taps


def _table(build: Build) -> tuple[tuple[int, ...], ...]:
    """Returns the tap of every field of every panel, as its place in the kernel; -1 is a weight of zero."""
    _, kernel_h, kernel_w = build.geometry.kernel
    return tuple(
        tuple(-1 if tap is None else (tap[0] * kernel_h + tap[1]) * kernel_w + tap[2] for tap in taps)
        + (NOT_PACKED,) * (build.program.panel_fields - len(taps))
        for variant in build.programs
        for taps in _padded_taps(build, variant)
    )


def _padded_taps(build: Build, program: Program) -> Iterator[tuple[Triple | None, ...]]:
    """Yields the taps of each shift, and no taps for each unused shift that a pattern has room for."""
    taps = iter(program.taps)
    for shifts, room in zip(program.shifts, build.pattern_shifts, strict=True):
        yield from (next(taps) if i < len(shifts) else () for i in range(room))
