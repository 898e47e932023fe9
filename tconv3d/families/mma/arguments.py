"""Declares the run-time arguments of the kernels `mma` and `mma_pack` (see planning/arguments.py)."""

from __future__ import annotations

from ...planning.arguments import (
    CONST_POINTER,
    DIVIDER,
    EXTENT,
    INT32,
    INT64,
    POINTER,
    STRIDES,
    Arguments,
    fields_per_axis,
)

MMA_PACK = Arguments(
    "mma_pack",
    weight=CONST_POINTER("The weight."),
    packed=POINTER("The weight in the order in which warps load it as fragments (mma_layout.cuh)."),
    stride=STRIDES("Strides of the weight: n for the channel that is summed over, c for the one of y, then taps."),
    group=INT64("Elements of the weight from one group of channels to the next."),
)
MMA = Arguments(
    "mma",
    x=CONST_POINTER("The tensor that is read: the input, or dy for the input gradient."),
    packed=CONST_POINTER("The weight as the kernel `mma_pack` wrote it."),
    bias=CONST_POINTER("The bias, or null."),
    y=POINTER("The tensor that is written, or partial sums of it, each laid out like it."),
    left=POINTER("The moments of the outputs (mma_moments.cuh), or null."),
    x_strides=STRIDES("Strides of x."),
    y_strides=STRIDES("Strides of y."),
    x_size=EXTENT("Size of x."),
    y_size=EXTENT("Size of y."),
    x_elements=INT64("Elements of x from its first to its last one."),
    part=INT64("Elements from one part of the sums to the next (kSplits)."),
    batch=INT32("Batch items."),
    tiles_of_block=INT32("Tiles that a block computes one after the other (kResident)."),
    tile_n=INT32("Batch items of a tile."),
    tile=EXTENT("Positions q of a block along each dimension, of each of its batch items."),
    halo=EXTENT("Positions of x that a source has along each dimension, of each batch item of a block."),
    plane=INT32("Slots of a plane of a line of the halo."),
    line=INT32("Slots from one line of the halo to the next along h."),
    sheet=INT32("Slots from one line of the halo to the next along d."),
    slots=INT32("Slots of the halo."),
    list=INT32("Bytes of the list of the items or pairs of a halo, a multiple of 16."),
    store_line=INT32("Elements from one line of y to the next in shared memory."),
    store_pitch=INT32("Elements from one column of y to the next in shared memory."),
    store_lanes=INT32("Lanes that share a line of y: a power of two, at most 32."),
    store_width=INT32("Outputs of a line that one access stores: kVector or half of it if aligned, else 1."),
    moment_slots=INT64("Moments of each band of channels of a batch item."),
    **fields_per_axis("tiles", DIVIDER, "Divides by the tiles along {}."),
    tile_d=DIVIDER("Divides by tile.d."),
    tile_h=DIVIDER("Divides by tile.h."),
    blocks_w=DIVIDER("Divides by the groups of kTilesM positions that a tile has along w."),
    **fields_per_axis("halo", DIVIDER, "Divides by halo.{}."),
    pairs=DIVIDER("Divides by the pairs of a line of the halo."),
    **fields_per_axis("classes", DIVIDER, "Divides by the classes of positions along {}."),
)
