"""Declares the arguments of the kernels for up-convolutions, as planning/arguments.py describes."""

from __future__ import annotations

from ...planning.arguments import CONST_POINTER, DIVIDER, INT32, INT64, POINTER, STRIDES, Arguments, fields_per_axis

UP = Arguments(
    "up",
    x=CONST_POINTER("The input; null in up_pack."),
    weight=CONST_POINTER("The weight, or what up_pack made of it."),
    bias=CONST_POINTER("The bias, or null."),
    y=POINTER("The output; in up_pack the weight in the order of shared memory."),
    moments=POINTER("The moments of the outputs (up_moments.cuh), or null."),
    x_strides=STRIDES("Strides of x, whose positions are one run: d and h follow from w."),
    y_strides=STRIDES("Strides of y."),
    w_strides=STRIDES("Strides of the weight: n for the input channel, c for the output channel, w from tap to tap."),
    positions=INT32("Positions of a batch item."),
    tiles=INT32("Tiles of positions in all."),
    splits=INT32("Blocks that share the tiles."),
    moment_slots=INT32("Moments of each unit of columns of a batch item."),
    by_tiles=DIVIDER("Divides by the tiles of a batch item."),
    by_h=DIVIDER("Divides by the size of x along h."),
    by_w=DIVIDER("Divides by the size of x along w."),
)
UP_PACK = Arguments("up_pack", **UP.fields)
_BACKWARD = {
    "dy": CONST_POINTER("The gradient of the output."),
    "x": CONST_POINTER("The input."),
    "weight": CONST_POINTER("The weight, in the layout of dy."),
    "dx": POINTER("The gradient of the input, or its parts in float."),
    "parts": POINTER("Partial sums of the weight gradient: [splits], each like the weight."),
    "bias_parts": POINTER("Partial sums of the bias gradient: [splits][rows or taps], each like the bias; or null."),
    "dy_strides": STRIDES("Strides of dy."),
    "x_strides": STRIDES("Strides of x."),
    "dx_strides": STRIDES("Strides of dx."),
    "dx_pitch": INT64("Elements from one part of dx to the next."),
    "dw_pitch": INT64("Elements from one part of the weight gradient to the next."),
    "db_pitch": INT64("Elements from one part of the bias gradient to the next."),
    "tiles": INT32("Tiles of positions in all."),
    "splits": INT32("Blocks that share the tiles, each with a part of its own."),
}
UP_BACKWARD = Arguments(
    "up_backward",
    **_BACKWARD,
    pieces=INT32("Pieces of 16 bytes that a row of dy has in all."),
    vectors=INT32("Whether two pieces of x are always 16 bytes in a row."),
    by_d=DIVIDER("Divides by the size of x along d."),
    by_h=DIVIDER("Divides by the size of x along h."),
    by_w=DIVIDER("Divides by the pieces of a line of dy."),
)
UP_BACKWARD_LAST = Arguments(
    "up_backward_last",
    **_BACKWARD,
    positions=INT32("Positions of all batch items."),
    **fields_per_axis("by", DIVIDER, "Divides by the size of x along {}."),
)
UP_GRAD = Arguments(
    "up_grad",
    dy=CONST_POINTER("The gradient of the output."),
    packed=CONST_POINTER("The weight, or x, as up_grad_pack wrote it."),
    result=POINTER("The gradient of the input; or of the weight, or its parts, each like the weight."),
    bias_parts=POINTER("Partial sums of the bias gradient: [parts][taps of d and h], each like the bias; or null."),
    dy_strides=STRIDES("Strides of dy."),
    dx_strides=STRIDES("Strides of dx."),
    dw_pitch=INT64("Elements from one part of the weight gradient to the next."),
    db_pitch=INT64("Elements from one part of the bias gradient to the next."),
    tiles=INT32("Tiles of positions, or of rows of dy for the weight gradient."),
    sharers=INT32("Blocks that share the tiles of positions, or parts of K for the weight gradient."),
    pieces=INT32("Pieces of 16 bytes that a row of dy has in all."),
    chunks=INT32("Chunks of K of an item of work, an even number."),
    by_d=DIVIDER("Divides by the size of x along d."),
    by_h=DIVIDER("Divides by the size of x along h."),
    by_w=DIVIDER("Divides by the pieces of a line of dy."),
)
UP_GRAD_PACK = Arguments(
    "up_grad_pack",
    **{"from": CONST_POINTER("The weight or x: [item][channel][word], an even number of words side by side.")},
    to=POINTER("The operand in the order of shared memory: [tile of channels][chunk][channel][word]."),
    item_stride=INT64("Words from item to item."),
    channel_stride=INT64("Words from channel to channel."),
    pairs=INT32("Pairs of words of a channel in all items."),
    units=INT32("Units of 8 words of a channel in all."),
    vectors=INT32("Whether 8 words from a multiple of 8 on are of one item and 16 bytes aligned."),
    by_item=DIVIDER("Divides by the pairs of words of an item."),
    by_panel=DIVIDER("Divides by the units of a chunk."),
    by_chunks=DIVIDER("Divides by the chunks of a tile of channels."),
)
