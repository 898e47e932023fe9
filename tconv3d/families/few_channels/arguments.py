"""Declares the run-time arguments of the kernels for few channels (see planning/arguments.py)."""

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
    Struct,
    fields_per_axis,
)

_TILES = Struct(
    "Tiles",
    "A volume cut into tiles of positions, and what a tile reads of the tensor with few channels.",
    tile=EXTENT("Positions of a tile."),
    part=EXTENT("What a tile reads: lines along d and h, elements along w."),
    line_pitch=INT32("Elements from line to line in shared memory, a multiple of 8."),
    line_vectors=INT32("Copies of a line."),
    count=INT32("Tiles in all."),
    **fields_per_axis("by", DIVIDER, "Divides by the tiles of the volume along {}."),
    part_by_d=DIVIDER("Divides by part.d."),
    part_by_h=DIVIDER("Divides by part.h."),
    by_line_vectors=DIVIDER("Divides by line_vectors."),
)
FEW_INPUTS = Arguments(
    "few_inputs",
    x=CONST_POINTER("The tensor with few channels: the input, or dy for the input gradient."),
    w=CONST_POINTER("The weight."),
    bias=CONST_POINTER("The bias, or null."),
    y=POINTER("The tensor that is written: the output, or dx."),
    moments=POINTER("The moments of the outputs (few_inputs_moments.cuh), or null."),
    x_strides=STRIDES("Strides of x."),
    y_strides=STRIDES("Strides of y."),
    w_strides=STRIDES("Strides of w: n for the channel that is summed over, c for the one of y, d, h, w for taps."),
    w_group_stride=INT64("Elements of w from one group of channels to the next."),
    x_size=EXTENT("Size of x."),
    y_size=EXTENT("Size of y."),
    moment_slots=INT32("Moments of each unit of channels of a batch item."),
    tiles=_TILES("The tiles of positions."),
)
FEW_OUTPUTS = Arguments(
    "few_outputs",
    x=CONST_POINTER("The input."),
    w=CONST_POINTER("The weight."),
    bias=CONST_POINTER("The bias, or null."),
    y=POINTER("The output."),
    x_strides=STRIDES("Strides of x."),
    y_strides=STRIDES("Strides of y."),
    w_strides=STRIDES("Strides of w: n for the input channel, c for the output channel in its group, then taps."),
    x_size=EXTENT("Size of x."),
    y_size=EXTENT("Size of y."),
    planes=INT32("Output planes that a block computes."),
    batch=INT32("Batch items."),
    tiles_w=DIVIDER("Divides by the tiles of positions along w."),
    tiles_h=DIVIDER("Divides by the tiles of positions along h."),
    parts=DIVIDER("Divides by the parts that depth is cut into."),
)
FEW_WEIGHT_GRAD = Arguments(
    "few_weight_grad",
    many=CONST_POINTER("The tensor with many channels, x or dy."),
    few=CONST_POINTER("The tensor with few channels, dy or x."),
    parts=POINTER("Partial sums: [splits][in_channels][out_channels / groups][kernel d][h][w]."),
    many_strides=STRIDES("Strides of `many`."),
    few_strides=STRIDES("Strides of `few`."),
    many_size=EXTENT("Size of `many`."),
    few_size=EXTENT("Size of `few`."),
    tiles=_TILES("The tiles of positions."),
    line_vectors=INT32("Copies of a line of `many`."),
    tile_vectors=INT32("Copies of all lines that a tile has of a channel of `many`."),
    copy_lanes_shift=INT32("Binary logarithm of the threads that copy a channel of `many` at a time."),
    by_line_vectors=DIVIDER("Divides by line_vectors."),
    by_tile_lines=DIVIDER("Divides by the lines that a tile has of `many` along h."),
)
