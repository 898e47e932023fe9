"""Draws a layer, and a few cases of it that mostly share their compiled kernels.

Compiling takes most of the time. All cases of a draw therefore share type, device, epilogue and two sets of memory
layouts; volume, batch, offsets, gaps between rows, wanted gradients and order of threads differ from case to case.
All randomness comes from one `random.Random`: a seed and a number give the same cases everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from random import Random
from typing import Any

from layers import Layer, Triple

from tconv3d.planning.geometry import Geometry
from tconv3d.planning.problem import ITEM_BYTES

from .case import DIMENSIONS, GRADIENTS, PLAIN, RESIDUALS, TAILS, Case, Memory
from .families import FAVOURED

CASES = 12  # cases of one draw
MOST_TAPS = 75  # most taps of a layer: kernels with more take seconds to compile
PRODUCTS = (1_000_000, 4_000_000, 16_000_000)  # limits on the products of a pass; the emulator does 50 million per s
MOST_ELEMENTS = 150_000  # most elements of input or output
DTYPES = ("tf32", "tf32", "float16", "bfloat16", "float32", "float64")
PLANS = ("H200", "A100", "RTX 4090", "B200")
# Kinds of layers with their draw weights: any layer, and kinds for which there are special kernel families, mostly
# with dense tensors of one layout at multiples of 16 bytes. These are up-convolutions, few channels on a side, small
# groups, rows of whole vectors of channels, depthwise layers, and taps that reach far (dilation, much padding).
KINDS = {"any": 12, "up": 4, "few": 4, "groups": 2, "rows": 2, "depthwise": 4, "far": 2}
# Epilogues with their draw weights.
EPILOGUES = {"": 5, "relu": 2, "norm": 4, "tail": 4, "silu": 1, "softmax": 1, "largest": 1}
WIDTH = 12  # least width of layers with small groups; narrower ones go to other families

# Kernel, stride, padding, output padding, dilation of layers that networks have, equal in all dimensions.
USUAL = (
    (3, 2, 1, 1, 1),
    (3, 2, 1, 0, 1),
    (4, 2, 1, 0, 1),
    (3, 1, 1, 0, 1),
    (5, 2, 2, 1, 1),
    (3, 1, 2, 0, 2),
    (1, 1, 0, 0, 1),
)
Axis = tuple[int, int, int, int, int]


def cases(seed: int, number: int, plans: tuple[str, ...] = ("", *PLANS), count: int = CASES) -> list[Case]:
    """Returns the cases of draw `number`. About 60% are for the device, others for one of `plans[1:]`."""
    random = Random(f"{seed}:{number}")
    kind = random.choices(list(KINDS), list(KINDS.values()))[0]
    favours = {name: favour for name, favour in FAVOURED.items() if not favour.kinds or kind in favour.kinds}
    favoured = random.choices(list(favours), [favour.weight for favour in favours.values()])[0]
    dtypes, forced = favours[favoured].dtypes, favours[favoured].plans or plans[1:]
    # The emulator's own device is a Hopper GPU.
    here = len(plans) == 1 or ("H200" in forced and random.random() < 0.64)
    dtype = random.choice(dtypes or (DTYPES if kind in ("any", "far") else DTYPES[:4]))
    layer = _layer(random, kind)
    epilogue = random.choices(list(EPILOGUES), list(EPILOGUES.values()))[0]
    if dtype == "float32" and epilogue == "norm":
        layer = replace(
            layer, bias=True
        )  # The bias keeps sums away from 0, where a ReLU's mask would be left to chance.
    base = Case(
        layer,
        dtype=dtype,
        plans="" if here else random.choice(forced),
        favoured=favoured,
        epilogue=epilogue,
        norm_groups=random.choice([n for n in range(1, layer.out_channels + 1) if layer.out_channels % n == 0]),
        affine=random.random() < 0.8,
        **(_operands(random, dtype) if epilogue in TAILS else {}),
    )
    possible = [name for name in GRADIENTS if has(base, name)]
    subsets = [
        tuple(n for n, b in zip(possible, bits, strict=True) if b) for bits in product((0, 1), repeat=len(possible))
    ]
    # Kernels run programs over channels in calls without gradients.
    wanted = [(), tuple(possible), random.choice(subsets)] if epilogue not in TAILS[1:] else [(), (), ()]
    views = [_views(random) if kind == "any" else _dense_views(random) for _ in range(2)]
    return [_case(random, base, wanted, views, kind != "any") for _ in range(count)]


def _operands(random: Random, dtype: str) -> dict[str, Any]:
    """Draws what a tail reads besides the result of the convolution."""
    vectors, wholes = random.choice((0, 1, 1, 1, 2, 3, 5, 8)), random.choice((0, 1, 1, 1, 2, 3, 4))
    residuals = random.choices(RESIDUALS, (5, 1, 1, 1), k=max(wholes, 1 - vectors))
    other = random.choice(("", "", "bfloat16", "float16")) if dtype in ("tf32", "float32") else ""
    return {"vector_count": vectors, "residuals": tuple(residuals), "residual_type": other if residuals else ""}


def has(case: Case, name: str) -> bool:
    """Says whether the case has a tensor of this name, whose gradient can be asked for."""
    if name.startswith("norm"):
        return case.epilogue == "norm" and case.affine
    return name != "bias" or case.layer.bias


# ---- layers


def _layer(random: Random, of: str) -> Layer:
    """Draws a layer with the smallest volume it can have; each case draws its own size and batch."""
    while True:
        axes = _axes(random, of)
        kernel, stride, padding, extra, dilation = zip(*axes, strict=True)
        ins, outs, groups = _channels(random, of)
        d, h, w = (_least_size(*axis) for axis in axes)
        size = (d, h, max(w, WIDTH) if of == "groups" else w)
        bias = random.random() < 0.7
        layer = Layer(ins, outs, size, kernel, stride, padding, extra, dilation, groups, 1, bias)  # type: ignore[arg-type]
        if prod(kernel) <= MOST_TAPS and fits(Case(layer), min(PRODUCTS)):
            return layer


def _least_size(kernel: int, stride: int, padding: int, extra: int, dilation: int) -> int:
    """Returns the smallest input size that gives at least two outputs, because a norm of one element is refused."""
    return max(1, 1 + -(-(1 + 2 * padding - dilation * (kernel - 1) - extra) // stride))


def _axes(random: Random, of: str) -> list[Axis]:
    kind = random.random()
    if of == "up" or (of == "any" and kind < 0.1):  # up-convolution: every output has one tap
        sizes = (*random.choices((1, 2, 3, 4), k=2), random.choice((2, 2, 1, 3)))
        return [(size, size, 0, random.randrange(size) if random.random() < 0.1 else 0, 1) for size in sizes]
    if of == "groups" or (of != "far" and kind < 0.45):
        return [random.choice(USUAL)] * 3
    return [_axis(random, far=of == "far") for _ in range(3)]


def _axis(random: Random, far: bool = False) -> Axis:
    kernel = random.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7))
    stride = random.choice((1, 1, 2, 2, 2, 3, 4))
    dilation = random.choice((1, 2, 2, 3, 4) if far else (1, 1, 1, 1, 2, 3))
    reach = dilation * (kernel - 1)
    padding = random.choice((0, reach // 2, random.randint(0, reach), random.randint(0, reach + 2)))
    return kernel, stride, padding, random.randrange(max(stride, dilation)), dilation


def _channels(random: Random, of: str) -> tuple[int, int, int]:
    """Draws input channels, output channels and groups."""
    if of == "up":
        return 8 * random.randint(1, 10), 8 * random.randint(1, 10), 1
    if of == "few":
        groups, few = random.choice((1, 1, 1, 2)), random.randint(1, 4)
        many = max(random.choice((random.randint(8, 40), 8 * random.randint(1, 6))), 4 * few)
        ins, outs = random.choice(((few, many), (few, many), (many, few)))
        return groups * ins, groups * outs, groups
    if of == "groups":
        groups = 2 * random.randint(1, 4)
        return groups * random.choice((2, 3, 4, 8)), groups * random.choice((2, 4, 5, 8)), groups
    if of == "depthwise":
        groups = random.choice((2, 3, 5, 8, 16, 24, 32, 33, 40))
        return groups, groups * random.choice((1, 1, 1, 2, 3)), groups
    if of == "rows":
        return 16 + 8 * random.randint(0, 10), 32 + 8 * random.randint(0, 8), 1
    kind = random.random()
    if kind < 0.1:  # depthwise layer
        groups = random.choice((1, 2, 3, 5, 8, 16, 24, 32, 33))
        return groups, groups * random.choice((1, 1, 2, 3)), groups
    if kind < 0.2:
        groups, ins, outs = random.randint(2, 6), random.randint(1, 16), random.randint(1, 16)
        return groups * ins, groups * outs, groups
    return _width(random), _width(random), 1


def _width(random: Random) -> int:
    return random.choice(
        (random.randint(1, 4), random.randint(1, 16), random.randint(5, 40), random.randint(17, 96))
        + 2 * (8 * random.randint(1, 6), 16 * random.randint(1, 6))
    )


# ---- memory layouts


def _dense_views(random: Random) -> dict[str, Memory]:
    """Draws dense memory layouts, with one order of dimensions for input and gradient."""
    order = random.choice((DIMENSIONS, "ndhwc"))
    weight = random.choice((DIMENSIONS, order))
    return {"input": Memory(order), "weight": Memory(weight), "grad": Memory(order), "vectors": PLAIN}


def _views(random: Random) -> dict[str, Memory]:
    """Draws the memory layouts of input, weight, gradient and vectors, which kernels may be compiled for."""
    last = random.random() < 0.4
    found = {}
    for name in ("input", "weight", "grad"):
        usual = "ndhwc" if last == (random.random() < 0.9) else DIMENSIONS
        found[name] = Memory(usual)
        if random.random() < 0.2:
            found[name] = _unusual(random, usual)
    vector = random.choices((PLAIN, Memory(step=2), Memory(expanded="n")), (8, 1, 1))[0]
    return {**found, "vectors": vector}


def _unusual(random: Random, usual: str) -> Memory:
    kind = random.choice(("transposed", "step", "expanded", "all"))
    if kind == "transposed":
        return Memory("".join(random.sample(DIMENSIONS, 5)))
    if kind == "step":
        return Memory(usual, step=random.choice((2, 3)))
    if kind == "expanded":
        return Memory(usual, expanded=random.choice(("n", "c", "d", "h", "w", "dhw", "nhw")))
    return Memory(usual, expanded=DIMENSIONS)  # all strides are 0, as in the gradient of a sum


def _moved(random: Random, memory: Memory, dtype: str) -> Memory:
    """Draws another offset, and sometimes gaps after some dimensions, for a memory layout."""
    item = ITEM_BYTES["float32" if dtype == "tf32" else dtype]
    offset = random.choice((0, 0, 0, random.randrange(16 // item)))
    if random.random() < 0.75:
        return replace(memory, offset=offset)
    gaps = [0] * 5
    gaps[random.randrange(5)] = random.choice((1, 2, 3, 4, 8, 16))
    gaps[random.randrange(5)] += random.choice((0, 0, 1, 8))
    return replace(memory, offset=offset, gaps=tuple(gaps))  # type: ignore[arg-type]


# ---- cases


def _case(
    random: Random, base: Case, wanted: list[tuple[str, ...]], views: list[dict[str, Memory]], dense: bool
) -> Case:
    # Kernels have the operands of a tail in calls without gradients.
    chosen = random.choices(wanted, (8, 3, 3) if base.epilogue in TAILS else (2, 3, 3))[0]
    memory = random.choice(views)
    if not dense or random.random() < 0.2:
        memory = {name: _moved(random, each, base.dtype) for name, each in memory.items()}
    case = replace(
        base,
        wanted=chosen,
        calls=1 if chosen else random.choice((1, 3)),
        short=bool(chosen) and base.epilogue != "norm" and random.random() < 0.04,
        at_end=random.random() < 0.6,
        order=random.choice(("forward", "reversed", f"shuffled:{random.randrange(1000)}")),
        seed=random.randrange(1 << 20),
        **memory,
    )
    most, least = random.choice(PRODUCTS), base.layer.size
    batch = random.choices((0, 1, 2, 3, 5), (1, 20, 10, 4, 1))[0]
    size = [max(pair) for pair in zip(_size(random), least, strict=True)]
    while not fits(sized := case.with_layer(size=tuple(size), batch=batch), most):
        at = random.choice((0, 0, 1, 1, 2, 3))
        if at == 3:
            batch = min(batch, 1)
        else:
            size[at] = max(least[at], size[at] - 1 - size[at] // 4)
    return sized


def _size(random: Random) -> Triple:
    w = random.choice(
        (
            random.randint(1, 8),
            random.randint(5, 35),
            random.randint(5, 70),
            random.choice((8, 16, 32, 64)) + random.choice((-1, 0, 0, 1)),
        )
    )
    most = 4 if w > 33 else 9
    return random.randint(1, most), random.randint(1, most), w


def fits(case: Case, most: int = max(PRODUCTS)) -> bool:
    """Says whether a case is legal, and has at most `most` products and MOST_ELEMENTS elements."""
    layer = case.layer
    try:
        geometry = Geometry.make(layer.in_channels, layer.out_channels, layer.kernel, *layer.settings)
    except (RuntimeError, ValueError):
        return False
    output = geometry.output_size(layer.size)
    if min(output) < 1 or (case.epilogue == "norm" and prod(output) == 1):
        return False
    products = (
        max(1, layer.batch) * prod(layer.size) * layer.in_channels * geometry.out_per_group * prod(layer.kernel)
    )
    elements = max(1, layer.batch) * max(layer.in_channels * prod(layer.size), layer.out_channels * prod(output))
    return products <= most and elements <= MOST_ELEMENTS
