"""Declares the run-time arguments of the kernels that sweep over activations (see planning/arguments.py)."""

from __future__ import annotations

from ...planning.arguments import (
    CONST_POINTER,
    DIVIDER,
    DOUBLE,
    EXTENT,
    INT32,
    INT64,
    POINTER,
    Arguments,
    Array,
    Struct,
)

_STRIPS = Struct(
    "Strips",
    "Activations cut into strips, each with positions of one channel, or of a few where channels are neighbours.",
    volume=INT64("Positions of a batch item."),
    batch=INT32("Batch items."),
    channels=INT32("Channels."),
    slots=INT32("Strips that a channel of a batch item has."),
    length=INT32("Positions of a strip."),
)
_DY = CONST_POINTER("The gradient of what normalization gave.")
_X = CONST_POINTER("What was normalized, after its ReLU.")
_STATISTICS = CONST_POINTER("[2][batch][norm groups]: means, then reciprocal standard deviations.")
_WEIGHT = CONST_POINTER("The weight of the norm, one number per channel; null stands for ones.")
_DZ = POINTER("The gradient of what went into the ReLU, or null.")
_BIAS_SUMS = POINTER("Partial sums of the gradient of the convolution's bias, or null.")
_GROUPS = {
    "strips": _STRIPS("The strips of a sweep."),
    "groups": INT32("Norm groups of a batch item."),
    "per_group": INT32("Channels of a norm group."),
}

CHANNEL_MOMENTS = Arguments(
    "channel_moments",
    x=CONST_POINTER("The activations."),
    moments=POINTER("Moments of every strip: [batch][channels][slots]."),
    strips=_STRIPS("The strips of a sweep."),
)
STATISTICS = Arguments(
    "statistics",
    moments=CONST_POINTER("Moments: [norm groups of all batch items][count]."),
    statistics=POINTER("[2][norm groups of all batch items]: means, then reciprocal standard deviations."),
    eps=DOUBLE("The number that is added to a variance before its square root is taken."),
    count=INT32("Moments of a norm group."),
)
NORMALIZE = Arguments(
    "normalize",
    x=CONST_POINTER("The activations."),
    statistics=_STATISTICS,
    weight=_WEIGHT,
    bias=CONST_POINTER("The bias of the norm, one number per channel; null stands for zeros."),
    y=POINTER("The normalized activations."),
    **_GROUPS,
)
_TAIL = {
    "vectors": CONST_POINTER("[vectors][batch][channels]: numbers that are constant along a channel's volume."),
    **{
        f"whole_{i}": CONST_POINTER("A further tensor of the shape and layout of the activations, or null.")
        for i in range(4)
    },
}
TAIL_PASS = Arguments(
    "tail_pass",
    x=CONST_POINTER("The activations."),
    y=POINTER("The value of the expression for every element of x."),
    **_TAIL,
    strips=_STRIPS("The strips of a sweep."),
)
TAIL_SUMS = Arguments(
    "tail_sums",
    x=CONST_POINTER("The activations."),
    sums=POINTER("[batch][channels][slots][expressions]: the sums of every strip."),
    **_TAIL,
    strips=_STRIPS("The strips of a sweep."),
)
AXIS_PASS = Arguments(
    "axis_pass",
    x=CONST_POINTER("The tensor, [outer][length][inner]."),
    y=POINTER("The result: of the shape of x, or [outer][inner]."),
    sums=POINTER("[batch or 1][length][slots][expressions]: the sums over the positions of every block, or null."),
    **_TAIL,
    placed=CONST_POINTER("[operands][outer][inner]: numbers that are constant along the axis."),
    along=CONST_POINTER("[operands][length]: numbers that depend on the place along the axis alone."),
    outer=INT64("Size of the dimensions before the axis."),
    inner=INT64("Size of the dimensions behind the axis."),
    lead=INT64(
        "Outer places of a batch item, or of a channel of it if channels are outer; if batch items are the "
        "axis, places of a channel."
    ),
    rows=INT64("Batch items times channels."),
    slots=INT64("Blocks that add up the positions of a batch item, or of all."),
    length=INT32("Length of the axis."),
    held_bytes=INT32("Shared memory that holds columns."),
    channels=INT32("Channels."),
)
_POOL = {
    "count": INT64("Elements that are written, or vectors of neighbouring channels if channels are last."),
    "x_size": EXTENT("The volume of the activations."),
    "y_size": EXTENT("The volume of the pooled activations."),
    "by_w": DIVIDER("Divides by the written elements along w."),
    "by_h": DIVIDER("Divides by the written elements along h."),
    "by_d": DIVIDER("Divides by the written elements along d."),
    "by_channels": DIVIDER("Divides by the vectors of channels of a position; 1 if channels are not last."),
    "batch": INT32("Batch items."),
    "channels": INT32("Channels."),
}
POOL_PASS = Arguments(
    "pool_pass",
    x=CONST_POINTER("The activations."),
    y=POINTER("The pooled activations, in the same layout."),
    places=POINTER("The place in its volume that every pooled activation is from, or null."),
    **_TAIL,
    **_POOL,
)
POOL_GRAD = Arguments(
    "pool_grad",
    x=CONST_POINTER("The activations."),
    y=POINTER("An expression of the activations and of the gradient of what was pooled."),
    **_TAIL,
    grad=CONST_POINTER("The gradient of the pooled activations, in the same layout."),
    indices=CONST_POINTER("The place in its volume that every pooled activation is from; null for averages."),
    **_POOL,
)
POOL_GRAD_SUMS = Arguments(
    "pool_grad_sums",
    x=CONST_POINTER("The activations."),
    sums=POINTER("[batch][channels][slots][expressions]: the sums of every strip."),
    **_TAIL,
    grad=CONST_POINTER("The gradient of the pooled activations, in the same layout."),
    indices=CONST_POINTER("The place in its volume that every pooled activation is from; null for averages."),
    strips=_STRIPS("The strips of a sweep."),
    x_size=EXTENT("The volume of the activations."),
    y_size=EXTENT("The volume of the pooled activations."),
    by_w=DIVIDER("Divides by the activations along w."),
    by_h=DIVIDER("Divides by the activations along h."),
)
NORM_SUMS = Arguments(
    "norm_sums",
    dy=_DY,
    x=_X,
    statistics=_STATISTICS,
    sums=POINTER("Two sums of every strip."),
    **_GROUPS,
)
NORM_COEFFICIENTS = Arguments(
    "norm_coefficients",
    sums=CONST_POINTER("Two sums of every strip."),
    statistics=_STATISTICS,
    weight=_WEIGHT,
    by_channel=POINTER("Partial gradients of the norm's weight and bias: [batch][2][channels]."),
    coefficients=POINTER("Two numbers of every norm group, from which the gradient follows."),
    **_GROUPS,
)
NORM_GRAD = Arguments(
    "norm_grad",
    dy=_DY,
    x=_X,
    statistics=_STATISTICS,
    coefficients=CONST_POINTER("Two numbers of every norm group, from which the gradient follows."),
    weight=_WEIGHT,
    dz=_DZ,
    bias_sums=_BIAS_SUMS,
    **_GROUPS,
)
NORM_BOTH = Arguments(
    "norm_both",
    dy=_DY,
    x=_X,
    statistics=_STATISTICS,
    weight=_WEIGHT,
    sums=POINTER("Two sums of every strip; all bits are ones until they are written."),
    coefficients=POINTER("Two numbers of every norm group; all bits are ones until they are written."),
    turns=POINTER("The counter from which blocks take turns; all bits are ones at first."),
    by_channel=POINTER("Partial gradients of the norm's weight and bias: [batch][2][channels]."),
    dz=_DZ,
    bias_sums=_BIAS_SUMS,
    **_GROUPS,
    units=INT32("Blocks of work of one pass over a norm group."),
    lag=INT32("Norm groups whose first pass comes before the second pass of the first of them."),
)
NORM_ONCE = Arguments(
    "norm_once",
    dy=_DY,
    x=_X,
    statistics=_STATISTICS,
    weight=_WEIGHT,
    sums=POINTER("Two sums of every strip; all bits are ones until they are written."),
    turns=POINTER("The counter from which blocks take turns; all bits are ones at first."),
    dparameters=POINTER("Gradients of the norm's weight and bias, [2][channels]; or null."),
    dz=_DZ,
    bias_sums=_BIAS_SUMS,
    **_GROUPS,
    stages=INT32("Chunks that a block has room for in shared memory."),
)
FILL = Arguments(
    "fill",
    words=POINTER("Memory whose bits all become ones, in words of 16 bytes."),
    count=INT64("How many words there are."),
)
MOST_TENSORS, MOST_NUMBERS, MOST_WORDS = 16, 32, 860  # together less than 4096 bytes, the most that a launch takes
NUMBERS = Arguments(
    "numbers",
    tensor_0=POINTER("Scratch: sums in float64, until later steps read them."),
    **{f"tensor_{i}": POINTER("A tensor that the program reads or writes, or null.") for i in range(1, MOST_TENSORS)},
    numbers=Array(DOUBLE, MOST_NUMBERS)("Constants of the program."),
    words=Array(INT32, MOST_WORDS)("The program: its steps with their instructions (numbers.py)."),
    steps=INT32("How many steps the program has."),
)
