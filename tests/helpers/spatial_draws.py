"""Draws split volumes: a few layer settings, each with many sizes, meshes and split dimensions.

Compiling takes most of the time. Sizes are run-time arguments of a kernel, so that all volumes of a setting share
their kernels; only shards that divide unevenly need kernels with another padding.
"""

from __future__ import annotations

from random import Random

from layers import Layer
from spatial_cases import Case

from tconv3d.distributed.shards import ShardTooSmall, block
from tconv3d.planning.geometry import Geometry

# Kernel, stride, padding, output padding, dilation: equal in all split dimensions. Input and output channels, groups.
# Type, channels-last. Whether the other dimensions have a kernel of 1, so that kernels compile fast.
Setting = tuple[tuple[int, int, int, int, int], tuple[int, int, int], str, bool]

DIRECT: tuple[Setting, ...] = (
    ((4, 2, 1, 0, 1), (4, 3, 1), "float32", False),
    ((3, 1, 1, 0, 1), (3, 4, 1), "float32", True),
    ((3, 2, 1, 1, 1), (2, 4, 2), "float64", False),
    ((3, 2, 1, 0, 1), (4, 2, 1), "tf32", False),
    ((2, 2, 0, 0, 1), (4, 4, 1), "bfloat16", True),
    ((3, 1, 0, 0, 1), (3, 3, 3), "float16", False),
    ((5, 2, 2, 1, 1), (2, 2, 1), "float32", False),
    ((3, 1, 2, 0, 2), (2, 3, 1), "float32", False),
    ((2, 3, 0, 2, 1), (2, 2, 1), "float64", True),
    ((1, 2, 0, 1, 1), (3, 2, 1), "float32", False),
    ((3, 3, 2, 1, 2), (2, 2, 2), "bfloat16", False),
    ((4, 2, 4, 0, 1), (2, 3, 1), "float32", False),
)
TENSOR_CORES: tuple[Setting, ...] = (
    ((4, 2, 1, 0, 1), (16, 16, 1), "tf32", False),
    ((3, 1, 1, 0, 1), (16, 8, 1), "bfloat16", True),
)
SPLIT = ((2, 3), (3, 4), (4, 2))  # dimensions that a setting's volumes are split along: the first, or both
MESHES = ((2,), (3,), (4,), (2, 2))


def cases(settings: tuple[Setting, ...], each: int, seed: int = 0) -> list[Case]:
    """Returns `each` cases of every setting. All of them fit: no halo is larger than the neighbouring shard."""
    found: list[Case] = []
    for number, setting in enumerate(settings):
        found += _cases(setting, each, SPLIT[number % len(SPLIT)], Random(f"{seed} {number}"))
    return found


def _cases(setting: Setting, count: int, split: tuple[int, int], random: Random) -> list[Case]:
    axis, channels, dtype, channels_last = setting
    found: list[Case] = []
    while len(found) < count:
        shards = MESHES[len(found) % len(MESHES)]
        dims = split[: len(shards)]
        case = _case(random, axis, channels, dtype, channels_last, split, shards, dims, len(found))
        if case is not None:
            found.append(case)
    return found


def _case(
    random: Random,
    axis: tuple[int, int, int, int, int],
    channels: tuple[int, int, int],
    dtype: str,
    channels_last: bool,
    split: tuple[int, int],
    shards: tuple[int, ...],
    dims: tuple[int, ...],
    seed: int,
) -> Case | None:
    axes = [axis if dim in split else (1, 1, 0, 0, 1) for dim in (2, 3, 4)]
    size = [random.randint(2, 4) for _ in range(3)]
    for dim in split:
        size[dim - 2] = random.randint(3, 6)
    for dim, count in zip(dims, shards, strict=True):
        even = random.random() < 0.6
        size[dim - 2] = count * random.randint(2, 4) if even else random.randint(2 * count - 1, 4 * count)
    kernel, stride, padding, output_padding, dilation = zip(*axes, strict=True)
    ins, outs, groups = channels
    layer = Layer(
        ins, outs, tuple(size), kernel, stride, padding, output_padding, dilation, groups,
        batch=random.choice((1, 2)), bias=random.random() < 0.7,
    )  # fmt: skip
    geometry = Geometry.make(ins, outs, layer.kernel, *layer.settings)
    counts = [1, 1, 1]
    for dim, count in zip(dims, shards, strict=True):
        counts[dim - 2] = count
    if min(geometry.output_size(layer.size)) < 1:
        return None
    try:
        for backward in (False, True):
            block(geometry, layer.size, tuple(counts), (0, 0, 0), backward)
    except ShardTooSmall:
        return None
    return Case(layer, shards, dims, dtype, channels_last, seed)
