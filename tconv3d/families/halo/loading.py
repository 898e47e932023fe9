"""Decides how producers of the halo kernel load the halo of a tile through registers: by positions, pairs or vectors.

This module knows builds, tilings, sizes and strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd

from ...planning.scalars import ceil_div, round_up
from .build import Build, Input
from .job import Job
from .measured import CHOICES
from .shared_memory import free_bytes, multiplied_pieces, pieces_of_batch
from .tiling import Tiling

VECTORS_OF_TURN = 4  # vectors that a loader stores together (kTogether in halo_vectors.cuh)
MAX_BESIDE = CHOICES.beside


@dataclass(frozen=True)
class VectorTurn:
    """The input vectors that a loader takes in one batch (BatchTransposed in halo_vectors.cuh)."""

    vectors: int
    shares: int  # batches for all channels of a chunk
    noted_bytes: int  # bytes of shared memory for the places of the vectors


def whole_lines(build: Build, tiling: Tiling) -> bool:
    """Returns whether all halos have the same rows left and right of the input, which are then cleared only once.

    Asynchronous copies write such zeros with every halo, and input in lines has no such rows.
    """
    through_registers = build.input is Input.LOADED
    return tiling.tiles[3] == 1 and tiling.length == 0 and len(build.origins_w) == 1 and through_registers


def loaded_columns(build: Build, job: Job, tiling: Tiling) -> range:
    """Returns the columns of the halo that may have input; if input arrives in lines, the columns of positions."""
    if build.input is Input.LINES:
        return range(tiling.tile[2])
    if not whole_lines(build, tiling) or build.gather or tiling.items > 1:
        return range(tiling.halo[2])
    (origin,) = build.origins_w
    first = min(max(0, -origin), tiling.halo[2] - 1)
    return range(first, max(first + 1, min(tiling.halo[2], job.read_size[2] - origin)))


def loaded_rows(build: Build, job: Job, tiling: Tiling) -> int:
    if tiling.length:
        return tiling.rows
    return tiling.rows // tiling.halo[2] * len(loaded_columns(build, job, tiling))


def vectors(build: Build, job: Job, tiling: Tiling) -> int:
    """Returns the most vectors of 16 bytes along w that a line of the halo touches, or 0 if none are loaded."""
    step, items = build.program.read_step[2], 16 // build.item_bytes
    *outer, w = job.read
    if w != 1 or step != build.program.parts or tiling.items > 1 or build.item_bytes != 2 or build.input.copied:
        return 0
    turned = build.input is Input.TURNED
    if not job.aligned or (not turned and any(v % items for v in (*outer, job.read_size[2]))):
        return 0
    if tiling.length and (turned or not build.march):
        return 0
    tiles = product(range(tiling.tiles[3]), build.origins_w)
    starts = [(place * tiling.tile[2] + origin) * step for place, origin in tiles]
    spans = [(start, start + tiling.halo[2] * step) for start in starts]
    if whole_lines(build, tiling) or tiling.length:
        spans = [(max(0, start), min(end, job.read_size[2])) for start, end in spans]
    most = max(0, *(ceil_div(start % items + end - start, items) for start, end in spans))
    if turned:
        most = round_up(most, VECTORS_OF_TURN)  # a turn lies in one line
    elif most * items > MAX_BESIDE * tiling.halo[2] * step:
        return 0  # too many elements outside the halo would be loaded
    batches = vector_batches(build, all_vectors(build, tiling, most))
    noted = batches * build.loaders * vector_turn(build).noted_bytes
    return most if noted + 128 * (build.loaders + 1) <= free_bytes(build) else 0


def all_vectors(build: Build, tiling: Tiling, vectors: int) -> int:
    """Returns the most vectors that a tile touches if each line touches `vectors`.

    A run takes the vectors of its lines in sequence, from the first to the last that it touches.
    """
    if not tiling.length or not vectors:
        return vectors * tiling.lines
    line, items, (origin,) = tiling.halo[2], 16 // build.item_bytes, build.origins_w
    first = max(-origin, -(origin % items))  # column of the first vector's first element

    def vector(row: int) -> int:
        return row // line * vectors + min(max(0, row % line - first) // items, vectors)

    def first_of_turn(row: int) -> int:
        return vector(row) if vectors % VECTORS_OF_TURN else vector(row) // VECTORS_OF_TURN * VECTORS_OF_TURN

    starts = range(0, line, gcd(line, tiling.length))
    return max(vector(start + tiling.rows - 1) + 1 - first_of_turn(start) for start in starts)


def vector_turn(build: Build) -> VectorTurn:
    pieces = multiplied_pieces(build)
    if build.input is Input.TURNED:
        return VectorTurn(VECTORS_OF_TURN, pieces // pieces_of_batch(build), 160)
    turns = 4 // pieces_of_batch(build)
    return VectorTurn(turns * VECTORS_OF_TURN, pieces * turns // 4, turns * 160)


def vector_batches(build: Build, vectors: int) -> int:
    """Returns the number of batches in which a loader warp fills a stage with this number of vectors."""
    turn = vector_turn(build)
    return ceil_div(ceil_div(vectors, turn.vectors) * turn.shares, build.loaders)


def pairs(build: Build, job: Job, tiling: Tiling) -> bool:
    """Returns whether loads take two neighbours along w: pairs are aligned, and both inside or both outside."""
    *outer, w = job.read
    columns = loaded_columns(build, job, tiling)
    starts = [origin + columns.start for origin in build.origins_w]
    steps = (tiling.tile[2] if tiling.tiles[3] > 1 else 0, tiling.halo[2], len(columns), job.read_size[2])
    return (
        build.item_bytes == 2
        and not build.input.copied
        and w == 1
        and build.program.parts == build.program.read_step[2] == tiling.items == 1
        and job.aligned
        and not any(v % 2 for v in (*outer, *starts, *steps))
        and not vectors(build, job, tiling)
        and (build.march or not tiling.length)
    )


def vector_parts(job: Job, parts: int) -> bool:
    """Returns whether one load can take all parts of a position: they are aligned, and all inside or all outside."""
    *outer, w = job.read
    even = not any(v % parts for v in (*outer, job.read_size[2]))
    return parts in (2, 4) and w == 1 and job.aligned and even
