"""Declares the arguments of the kernel of gathered products, as planning/arguments.py describes."""

from __future__ import annotations

from ...planning.arguments import CONST_POINTER, DIVIDER, EXTENT, INT32, INT64, POINTER, Arguments

GATHERED_PRODUCTS = Arguments(
    "gathered_products",
    dy=CONST_POINTER("The gradient of the output, channels-last."),
    x=CONST_POINTER("The input, channels-last."),
    weight=CONST_POINTER("The weight, channels-last: taps before output channels."),
    dx=POINTER("The gradient of the input, or its parts."),
    dw=POINTER("The gradient of the weight, channels-last, or its parts."),
    bias_parts=POINTER("Parts of the bias gradient, each like the bias; or null."),
    dx_pitch=INT64("Elements from one part of dx to the next."),
    dw_pitch=INT64("Elements from one part of dw to the next."),
    output=EXTENT("Size of dy."),
    rows=INT32("Positions of x in all batch items."),
    outputs=INT32("Positions of dy in all batch items."),
    portions_x=INT32("Portions that the terms of dx are divided into (split-K)."),
    portions_w=INT32("Portions that the positions of dw are divided into (split-K)."),
    blocks_x=INT32("Blocks that compute dx, the first ones."),
    blocks_w=INT32("Blocks that compute dw, the next ones; those behind them add up dy."),
    bias_blocks=INT32("Blocks that add up dy."),
    by_volume=DIVIDER("Divides by the positions of a batch item."),
    by_in_d=DIVIDER("Divides by the size of x along d."),
    by_in_h=DIVIDER("Divides by the size of x along h."),
    by_in_w=DIVIDER("Divides by the size of x along w."),
)
