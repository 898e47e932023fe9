"""Divides the shared memory of a block of the halo kernel (halo_shared.cuh): panels, stages of input, and outputs.

This module knows builds, not volumes.
"""

from __future__ import annotations

from functools import lru_cache

from ...planning.scalars import round_up
from .build import SLAB, Build, Division, Input, Output
from .registers import batches_per_chunk

BARRIER_BYTES = 1024
SCRATCH_BYTES = 4 * 1024  # bytes per consumer through which stores pass
LOADER_BYTES = 5120  # bytes because loaders' tables have whole batches of all loaders
TURNED_BATCHES = 3  # batches of pieces of lines that a loader warp has in shared memory (kAtOnce in halo_turns.cuh)
TURNED_PIECE_BYTES, TURNED_NOTES_BYTES = 640, 256  # bytes of a piece in a batch, and of what lanes note of a batch
IMAGE_BUFFERS = 2  # buffers of images per consumer: one is filled while the other is emptied


def slot_bytes(build: Build) -> int:
    """Returns the bytes of a slot, which has room for the largest panel."""
    panel = build.halves * build.program.panel_fields * build.tile.outputs * build.part_bytes
    return round_up(panel, 1024)


def panel_bytes(build: Build) -> int:
    """Returns the bytes of all resident panels, or of all slots."""
    return build.tile_bytes if build.weights.resident else build.block.slots * slot_bytes(build)


def image_rows(build: Build) -> int:
    """Returns the number of output rows that are stored at a time: all rows of a position in an output plane."""
    return build.program.dimensions[1].fields


def long_run_buffers(build: Build) -> int:
    """Returns the number of buffers of images of long runs: two in float32, four in the smaller 16-bit types."""
    return 8 // build.item_bytes


def long_run_pitch(build: Build) -> int:
    """Returns the bytes of a channel in an image of long runs, with 16 bytes for the alignment of the run."""
    row = build.round_slabs * SLAB * build.geometry.stride[2] * build.item_bytes
    return row * image_rows(build) + 16


def _output_bytes(build: Build) -> int:
    """Returns the bytes through which outputs pass on their way to global memory."""
    outputs, slabs = build.tile.outputs, build.tile.slabs
    if build.output is Output.LONG_RUNS:
        return long_run_buffers(build) * outputs * long_run_pitch(build)
    if build.output is Output.IMAGES:
        image = image_rows(build) * (slabs * SLAB * build.geometry.stride[2] * build.item_bytes + 32)
        return build.block.consumers * IMAGE_BUFFERS * outputs * (round_up(image, 64) + 16)
    return 0 if build.input is Input.LINES else build.block.consumers * SCRATCH_BYTES


def _beside_stages(build: Build) -> int:
    """Returns the bytes of everything but stages and loaders' tables."""
    divided = build.division is Division.CONSUMERS
    sums = build.tile.slabs * build.columns * SLAB * 4 if divided else 0  # sums of one consumer for another
    return BARRIER_BYTES + sums + _output_bytes(build) + panel_bytes(build)


def arriving_bytes(build: Build) -> int:
    """Returns the bytes for batches of pieces of lines that loaders transpose, up to a multiple of 128 bytes."""
    if build.input is not Input.TURNED:
        return 0
    each = TURNED_BATCHES * (pieces_of_batch(build) * TURNED_PIECE_BYTES + TURNED_NOTES_BYTES)
    return round_up(build.loaders * each, 128) + 128


def pieces_of_batch(build: Build) -> int:
    """Returns the pieces of channels in a batch of vectors (kPieces in halo_vectors.cuh)."""
    pieces = multiplied_pieces(build)
    return 2 if pieces in (2, 6) else 4


def multiplied_pieces(build: Build) -> int:
    """Returns the pieces of 16 bytes of a part that are multiplied."""
    return build.part_bytes // 16 if build.chunks > 1 else 2 * build.steps


@lru_cache(maxsize=256)
def stage_rows(build: Build) -> int:
    """Returns the number of rows that fit a stage.

    Beside the stages, loaders' tables have 8 bytes per position; there are none if input arrives in lines.
    """
    left = build.block.shared_bytes - _beside_stages(build)
    row_bytes, stages = build.tile.row_bytes, build.block.stages
    if build.input is Input.LINES:
        return max(0, left // stages // 1024 * 1024 // row_bytes)
    left -= arriving_bytes(build) or LOADER_BYTES
    per_stage = left // (stages * build.halves * row_bytes + 8 * batches_per_chunk(build)) * row_bytes
    whole = max(1024, 32 * row_bytes) if build.input.copied else 1024  # a loader warp copies 32 rows per turn
    return max(0, per_stage // whole * whole // row_bytes)


def line_items(build: Build) -> int:
    """Returns the number of elements of a channel that fit a stage of lines."""
    return stage_rows(build) * build.program.parts


@lru_cache(maxsize=256)
def free_bytes(build: Build) -> int:
    """Returns the bytes for loaders' tables: what stages, panels and outputs leave."""
    stages = build.block.stages * build.halves * stage_rows(build) * build.tile.row_bytes
    return build.block.shared_bytes - _beside_stages(build) - stages - arriving_bytes(build)
