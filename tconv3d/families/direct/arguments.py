"""Declares the run-time arguments of the direct kernels and of the bias gradient (see planning/arguments.py)."""

from __future__ import annotations

from ...planning.arguments import (
    CONST_POINTER,
    DIVIDER,
    EXTENT,
    INT32,
    INT64,
    POINTER,
    STRIDES,
    WALK,
    Arguments,
    fields_per_axis,
)

DIRECT = Arguments(
    "direct",
    x=CONST_POINTER("The tensor that is read: the input, or dy for the input gradient."),
    w=CONST_POINTER("The weight."),
    bias=CONST_POINTER("The bias, or null."),
    y=POINTER("The tensor that is written: the output, or dx."),
    x_strides=STRIDES("Strides of x."),
    y_strides=STRIDES("Strides of y."),
    w_strides=STRIDES("Strides of w: n for the channel that is summed over, c for the one of y, d, h, w for taps."),
    w_group_stride=INT64("Elements of w from one group of channels to the next."),
    positions=INT64("Positions q in all: batch * grid.d * grid.h * grid.w."),
    x_size=EXTENT("Size of x."),
    y_size=EXTENT("Size of y."),
    grid=EXTENT("Positions q along each dimension."),
    **fields_per_axis("by", DIVIDER, "Divides by grid.{}."),
)
DIRECT_WEIGHT_GRAD = Arguments(
    "direct_weight_grad",
    x=CONST_POINTER("The input."),
    dy=CONST_POINTER("The gradient of the output."),
    parts=POINTER("Partial sums: [splits][in_channels][out_channels / groups][kernel d][h][w]."),
    bias=POINTER("The gradient of the bias, or null."),
    x_strides=STRIDES("Strides of x."),
    dy_strides=STRIDES("Strides of dy."),
    positions=INT64("Positions of x in all batch items."),
    warps=INT64("Warps for the weight in all: splits * units of channels * rows of taps."),
    dy_positions=INT64("Positions of dy in all batch items."),
    splits=INT32("Number of parts."),
    dy_size=EXTENT("Size of dy."),
    walk=WALK("A warp's walk over the positions of x."),
    dy_walk=WALK("A warp's walk over the positions of dy."),
)
CHANNEL_SUM = Arguments(
    "channel_sum",
    dy=CONST_POINTER("The gradient of the output."),
    parts=POINTER("Partial sums: [splits][channels]."),
    dy_strides=STRIDES("Strides of dy."),
    positions=INT64("Positions of dy in all batch items."),
    volume=INT64("Positions of a batch item."),
    splits=INT32("Number of parts."),
    channels=INT32("Channels of dy."),
    bundle_vectors=INT32(
        "Vectors of 16 bytes of a bundle, the fewest rows of channels that are whole vectors; or 0."
    ),
    bundle_rows=INT32("Rows of a bundle; or 0."),
    walk=WALK("A warp's walk over the positions of dy."),
)
