"""Declares the run-time arguments of the depthwise kernels (see planning/arguments.py)."""

from __future__ import annotations

from ...planning.arguments import CONST_POINTER, DIVIDER, EXTENT, INT32, INT64, POINTER, STRIDES, Arguments, Struct

_MARCH = Struct(
    "March",
    "How threads walk over a volume along depth.",
    x_strides=STRIDES("Strides of the tensor that threads load while they walk."),
    x_size=EXTENT("Size of the tensor that threads load."),
    grid=EXTENT("Positions q along each dimension."),
    length=INT32("Positions along depth that a block walks."),
    batch=INT32("Batch items."),
    by_w=DIVIDER("Divides by the positions along w; by patches of them where neighbouring threads have channels."),
    by_blocks=DIVIDER("Divides by the blocks of a plane."),
    by_parts=DIVIDER("Divides by the parts that depth is cut into."),
)
DEPTHWISE = Arguments(
    "depthwise",
    x=CONST_POINTER("The tensor that is read: the input, or dy for the input gradient."),
    w=CONST_POINTER("The weight."),
    bias=CONST_POINTER("The bias, or null."),
    y=POINTER("The tensor that is written: the output, or dx."),
    march=_MARCH("The walk over x."),
    y_strides=STRIDES("Strides of y."),
    w_strides=STRIDES("Strides of w: n for the channel, d, h, w for taps."),
    y_size=EXTENT("Size of y."),
)
DEPTHWISE_WEIGHT_GRAD = Arguments(
    "depthwise_weight_grad",
    x=CONST_POINTER("The input."),
    dy=CONST_POINTER("The gradient of the output."),
    parts=POINTER("Partial sums: [splits][channels][kernel d][h][w]."),
    bias_parts=POINTER("Partial sums of the bias, [splits][channels]; null without kBias."),
    march=_MARCH("The walk over dy."),
    x_strides=STRIDES("Strides of x."),
    units=INT32("Pieces of work in all: blocks of a plane, parts of depth, batch items."),
)
DEPTHWISE_LINES = Arguments(
    "depthwise_lines",
    x=CONST_POINTER("The input."),
    w=CONST_POINTER("The weight."),
    bias=CONST_POINTER("The bias, or null."),
    y=POINTER("The output."),
    x_strides=STRIDES("Strides of x."),
    y_strides=STRIDES("Strides of y."),
    w_strides=STRIDES("Strides of w: n for the channel, d, h, w for taps."),
    x_size=EXTENT("Size of x."),
    y_size=EXTENT("Size of y."),
    length=INT32("Outputs along w of a unit."),
    units=INT32("Units of a chunk of channels: tiles of lines, times parts of a line, times batch items."),
    parts=DIVIDER("Divides by the parts of a line."),
    tiles_h=DIVIDER("Divides by the tiles of lines along h."),
    tiles_d=DIVIDER("Divides by the tiles of lines along d."),
)
_BLOCKS = {
    "length": INT32("Positions along depth that a block computes."),
    "by_w": DIVIDER("Divides by the blocks along w."),
    "by_h": DIVIDER("Divides by the blocks along h."),
    "by_parts": DIVIDER("Divides by the parts that depth is cut into."),
}
DEPTHWISE_TILES = Arguments(
    "depthwise_tiles",
    x=CONST_POINTER("The tensor that is read: the input, or dy for the input gradient."),
    w=CONST_POINTER("The weight."),
    bias=CONST_POINTER("The bias, or null."),
    y=POINTER("The tensor that is written: the output, or dx."),
    x_strides=STRIDES("Strides of x."),
    y_strides=STRIDES("Strides of y."),
    w_strides=STRIDES("Strides of w: n for channels of x, c for channels of y, d, h, w for taps."),
    w_group_stride=INT64("Elements from the weights of a group to the weights of the next."),
    x_size=EXTENT("Size of x."),
    y_size=EXTENT("Size of y."),
    grid=EXTENT("Positions q along each dimension."),
    **_BLOCKS,
)
DEPTHWISE_TILES_WEIGHT_GRAD = Arguments(
    "depthwise_tiles_weight_grad",
    x=CONST_POINTER("The input."),
    dy=CONST_POINTER("The gradient of the output."),
    parts=POINTER("Partial sums: [splits][channels][kernel d][h][w]."),
    bias_parts=POINTER("Partial sums of the bias, [splits][channels]; null without kBias."),
    x_strides=STRIDES("Strides of x."),
    dy_strides=STRIDES("Strides of dy."),
    x_size=EXTENT("Size of x."),
    dy_size=EXTENT("Size of dy."),
    **_BLOCKS,
)
