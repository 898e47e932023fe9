"""Assembles the launches of a plan: the halo kernel, the kernels that prepare its operands, and the final sum.

This module knows builds and tilings, not how they are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...planning.arguments import per_axis
from ...planning.launch import Launch
from ...planning.problem import Device, Strides
from ...planning.scalars import ceil_div, round_up
from ...planning.sums import Sum, add_parts
from ...planning.turning import channel_rows
from . import loading
from .arguments import HALO
from .build import SLAB, Build, Division
from .constants import constants
from .job import Job
from .packing import pack
from .shared_memory import SCRATCH_BYTES
from .spread import NOT_SPREAD, Spread
from .storing import moment_band, vector
from .tiling import Shares, Tiling


@dataclass(frozen=True)
class HaloPlan:
    """The launches by which the halo kernel solves a problem, and the sizes of their buffers in the workspace.

    `pack` writes `packed_bytes` bytes, which depend on the weight alone.
    """

    build: Build
    tiling: Tiling
    pack: Launch
    packed_bytes: int
    main: Launch
    cycles: float  # predicted time of all launches, in cycles
    rows: Launch | None = None  # launch that writes the read tensor as rows of channels
    rows_bytes: int = 0
    moments: int = 0  # number of moments that the kernel stores for each norm group of a batch item
    sum: Launch | None = None  # split-K: launch that adds up the partial sums
    portions_bytes: int = 0

    @property
    def launches(self) -> tuple[Launch, ...]:
        """All launches, in the order in which they run."""
        return tuple(launch for launch in (self.pack, self.rows, self.main, self.sum) if launch is not None)

    @property
    def preparing(self) -> int:
        """The number of launches before `main`, which prepare its operands."""
        return 1 if self.rows is None else 2


def assemble(build: Build, tiling: Tiling, job: Job, device: Device, cost: float = 0.0) -> HaloPlan:
    """Returns the plan for a build and a tiling; `cost` is its predicted time in cycles."""
    given = job.as_merged(build.tile.merged)
    job = given.arriving(build.input)
    main = _main(build, tiling, job, device.multiprocessors)
    bands = build.geometry.out_channels // moment_band(build, job)
    slots = _moment_slots(build, tiling, tiling.shares(build, device.multiprocessors))
    moments = slots * bands // job.norm.groups if job.norm else 0
    rows = _rows_launch(job, given.read, given.aligned) if job.rows else None
    rows_bytes = job.read_bytes if rows else 0
    plan = HaloPlan(build, tiling, pack(build, job), build.packed_bytes, main, cost, rows, rows_bytes, moments)
    if build.division is Division.LAST_TILES:
        pieces_bytes = 2 * main.grid[0] * 4 * build.round_slabs * SLAB * build.columns
        return replace(plan, sum=_sum_of_pieces(build, main), portions_bytes=pieces_bytes)
    if build.division is not Division.BLOCKS:
        return plan
    pitch = _portion_pitch(job)
    added = add_parts([Sum("portions", "y", job.written_count, pitch, tiling.portions)], job.dtype)
    return replace(plan, sum=added, portions_bytes=4 * tiling.portions * pitch)


def _main(build: Build, tiling: Tiling, job: Job, multiprocessors: int) -> Launch:
    last_tiles = build.division is Division.LAST_TILES
    spread = tiling.spread(build, job, multiprocessors) if last_tiles else NOT_SPREAD
    return Launch(
        kernel="halo",
        constants=constants(build, job),
        grid=(spread.blocks if last_tiles else tiling.blocks(build, multiprocessors), 1, 1),
        threads=build.threads,
        shared_bytes=build.block.shared_bytes,
        pointers=HALO.pointers(
            x="rows" if job.rows else "x",
            packed="workspace",
            bias="bias",
            y="portions" if build.division is Division.BLOCKS else "y",
            left="moments" if job.norm else "portions" if last_tiles else "null",
        ),
        scalars=_scalars(build, tiling, job, tiling.shares(build, multiprocessors), spread),
        overlaps=True,
    )


def _sum_of_pieces(build: Build, main: Launch) -> Launch:
    """Returns the launch that adds up and stores the tiles that blocks of the main launch have divided among them.

    It is the main launch's kernel with kAdds, in blocks of one consumer.
    """
    roles = {"kAdds": True, "kThreads": 128, "kProducers": 0, "kConsumers": 1, "kSlabs": 1}
    return replace(
        main,
        constants=tuple((name, roles.get(name, value)) for name, value in main.constants),
        grid=(max(1, main.grid[0] - 1), build.round_slabs, 1),
        threads=128,
        shared_bytes=SCRATCH_BYTES,
        pointers=HALO.pointers(x="null", packed="null", bias="null", y="y", left="portions"),
    )


def _scalars(build: Build, tiling: Tiling, job: Job, shares: Shares, spread: Spread) -> bytes:
    """Returns the packed arguments of the halo kernel that follow its pointers."""
    _, tiles_d, tiles_h, tiles_w = tiling.tiles
    vectors, columns = loading.vectors(build, job, tiling), loading.loaded_columns(build, job, tiling)
    last_tiles = build.division is Division.LAST_TILES
    return HALO.pack(
        x_stride=job.read,
        y_stride=job.written,
        input=job.read_size,
        output=job.written_size,
        batch=job.batch,
        tile=tiling.tile,
        halo=tiling.halo,
        items=tiling.items,
        near=tiling.near,
        near_bits=tiling.near_bits,
        rows=tiling.rows,
        slabs=tiling.slabs,
        sheets=tiling.sheets,
        step_h=0 if tiling.length else tiling.tile[1],
        step_rows=tiling.length,
        group_rows=tiling.group_rows,
        run=tiling.run,
        slab_step=tiling.slab_step,
        flat_slabs=tiling.flat,
        passes=ceil_div(tiling.slabs, build.round_slabs),
        work=spread.chunks if last_tiles else shares.planes if build.march else tiling.work(build),
        vector=vector(build, job, tiling),
        vectors=loading.all_vectors(build, tiling, vectors),
        whole_lines=loading.whole_lines(build, tiling),
        pairs=loading.pairs(build, job, tiling),
        gaps=vectors > 0 and tiling.length > 0,
        first_column=columns.start,
        loaded=loading.loaded_rows(build, job, tiling),
        by_columns=len(columns),
        slabs_w=tiling.slabs_w,
        slabs_h=tiling.slabs_h,
        tiles_w=tiles_w,
        tiles_h=tiles_h,
        tiles_d=tiling.tile[0] if build.march else tiles_d,
        **per_axis("halo", tiling.halo),
        by_near=tiling.near,
        by_far=tiling.items // tiling.near,
        by_vectors=vectors,
        even=spread.even if last_tiles else shares.even,
        share=shares.share,
        beside=shares.beside,
        pieces=shares.pieces,
        item_tiles=tiling.item_tiles,
        in_turn=shares.in_turn,
        moment_slots=_moment_slots(build, tiling, shares),
        portion_pitch=_portion_pitch(job),
        portions=tiling.portions,
        share_cost=spread.cost,
        shares=spread.blocks,
        first_tile=spread.first_tile,
        sheet_rows=tiling.sheet_rows,
        by_sheet=tiling.sheet_rows * tiling.sheet_step,
        tiles_n=tiling.tiles[0],
        **dict(zip(("first", "second", "third", "fourth"), spread.stretches, strict=True)),
    )


def _rows_launch(job: Job, read: Strides, aligned: bool) -> Launch:
    """Returns the launch that writes the tensor that a job reads, which has these strides, as rows of channels."""
    already = replace(job, read=read, aligned=aligned).has_rows
    return channel_rows(job.dtype, job.batch, job.geometry.in_channels, job.read_size, read, aligned, already)


def _portion_pitch(job: Job) -> int:
    """Returns the elements from the partial sums of one portion to those of the next, a multiple of 4."""
    return round_up(job.written_count, 4)


def _moment_slots(build: Build, tiling: Tiling, shares: Shares) -> int:
    """Returns how many moments are stored for a band of channels of a batch item.

    Every consumer warp stores one for each pass over a tile or, in a march, for each piece of a tile.
    """
    passes = ceil_div(tiling.slabs, build.tile.slabs * build.block.consumers)
    pieces = shares.pieces if build.march else 1
    return tiling.item_tiles * pieces * len(build.programs) * passes * 4 * build.block.consumers
