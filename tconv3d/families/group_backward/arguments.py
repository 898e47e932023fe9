"""Declares the arguments of the kernel for the gradients of small groups, as planning/arguments.py describes."""

from __future__ import annotations

from ...planning.arguments import CONST_POINTER, DIVIDER, EXTENT, INT32, INT64, POINTER, STRIDES, Arguments

GROUP_BACKWARD = Arguments(
    "group_backward",
    dy=CONST_POINTER("The gradient of the output."),
    x=CONST_POINTER("The input; null without the weight gradient."),
    weight=CONST_POINTER("The weight, contiguous or channels-last; null without the input gradient."),
    dx=POINTER("The gradient of the input, or null."),
    dx_sums=POINTER("Sums in float32 at the places of dx, for 16-bit layers with several slices; or null."),
    parts=POINTER("Partial sums of the weight gradient, [splits], each like the weight; or null."),
    bias_parts=POINTER("Partial sums of the bias gradient, [splits], each like the bias; or null."),
    dy_strides=STRIDES("Strides of dy, whose lines (or rows of channels) lie one after another."),
    x_strides=STRIDES("Strides of x, whose lines (or rows of channels) lie one after another."),
    dx_strides=STRIDES("Strides of dx, whose lines (or rows of channels) lie one after another."),
    dy_count=INT64("Elements of dy."),
    x_count=INT64("Elements of x."),
    dw_pitch=INT64("Elements from one part of the weight gradient to the next."),
    db_pitch=INT64("Elements from one part of the bias gradient to the next."),
    size=EXTENT("Size of x."),
    dy_size=EXTENT("Size of dy."),
    tasks=INT32("Columns of tiles in all, of which blocks take one after another."),
    splits=INT32("Blocks that share the columns of a bundle of groups, each with a part of its own."),
    length=INT32("Positions along d of a column."),
    bands=INT32("Bands of kRows lines that a tile has."),
    chunks=INT32("Chunks of 16 positions that a line has."),
    pitch=INT32("Bytes of a stage from channel to channel; with kLast, from phase to phase of a line of dy."),
    pitch_x=INT32("Bytes of a stage of x from channel to channel; with kLast, from line to line."),
    stages=INT32("Stages of the ring of dy."),
    stages_x=INT32("Stages of the ring of x."),
    by_columns=DIVIDER("Divides by the columns along h."),
    by_segments=DIVIDER("Divides by the columns along d."),
    by_chunks=DIVIDER("Divides by `chunks`."),
)
