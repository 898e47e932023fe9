"""Plans for the gradients of wide 16-bit layers as two matrix products of gathered operands (gathered_products.cuh).

The products read dy, the gradient of the output, as if it were unfolded (as im2col does), and gather its rows where
they lie: the channels of an output position are neighbours in memory if tensors are channels-last. Contiguous tensors
are transposed by a launch before, and the gradient of the weight, which is contiguous, by one behind. The tile of a
block depends on the layer alone. Only the numbers of portions depend on the volume, and they are not compiled in.

Terms: a chunk is 64 terms of K. A portion is one block's share of the chunks (split-K), whose sums form one part of
the result. "Turned" means transposed between contiguous and channels-last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from ...planning import calibration, tensor_cores
from ...planning.calibration import Work
from ...planning.geometry import Geometry
from ...planning.launch import Launch, axis_constants, end_of_blocks
from ...planning.offers import Answer, Offer, Refusal, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, Strides, contiguous_strides, dense_strides
from ...planning.scalars import SCALARS, round_up
from ...planning.sums import Sum, add_parts
from ...planning.turning import TURNED_BYTES, Turning, channels_last, turn, turning
from ...planning.workspace import ALIGN, placed
from .arguments import GATHERED_PRODUCTS

CHUNK = 64  # numbers of K
ROW_BYTES = 128  # bytes of a row of a chunk
PLACE_BYTES = 8  # bytes of shared memory for the place of a row
MOST_TAPS = 31  # largest sum of the kernel's three sizes: a place has a bit for every tap, and bit 31 is 0
PIECE = 8  # channels that are copied at once
MOST_COLUMNS = 320  # input channels of a block: 160 sums for each consumer thread
NARROW = 192  # input channels up to which a block has three consumer warpgroups, else two
REGISTERS = {2: (72, 216), 3: (56, 152)}  # registers per producer and consumer thread, by consumer warpgroups
MOST_STAGES = 6
MOST_GATHERED = 40e6  # most bytes of dy: it stays in the L2 cache while its rows are gathered for each tap
MOST_TURNED = 4  # most bytes of copies, in multiples of `Device.workspace_bytes`
MOST_ROWS = 2**27  # most positions of x
MOST_OUT = 2**14  # most output channels: a block of the bias gradient has a sum for each in shared memory
PORTIONS = (*range(1, 13), 16, 24, 32)  # choices for the numbers of portions
BIAS_POSITIONS = 128  # least positions of dy for a block that adds them up
MOST_SUMMING = 8  # most blocks per multiprocessor of the launch that adds parts

# Costs of a multiprocessor in cycles at 1.755 GHz. Nobody has measured this kernel. They are those of the kernel
# unfolded_products in TF32, which was measured on an H200 and has the same tiles: a chunk has the same bytes and
# takes the tensor cores as many cycles.
BLOCK_CYCLES = 6000.0  # cycles per block until the first chunk arrives, and to store the sums
PRODUCTS = 1600.0  # products of two numbers per cycle
L2_BYTES = 38.0  # bytes per cycle from the L2 cache
PART_BYTES = 18.0  # bytes of parts per cycle that are written and read again
BIAS_BYTES, BIAS_CYCLES = 14.0, 2000.0  # bytes of dy per cycle for the bias gradient, and cycles of a block
LAUNCH = 3500.0  # cycles per launch


@dataclass(frozen=True)
class Tiling:
    """The rows and columns of a block, which are compiled in, and the portions of both products (split-K)."""

    columns: int
    consumers: int
    portions_x: int = 1
    portions_w: int = 1

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * ROW_BYTES

    def stages(self, device: Device) -> int:
        return min(MOST_STAGES, (device.shared_bytes - PLACE_BYTES * self.rows) // (self.stage_bytes + 16))

    def shared_bytes(self, device: Device) -> int:
        return self.stages(device) * (self.stage_bytes + 16) + PLACE_BYTES * self.rows

    def blocks(self, p: Problem) -> tuple[int, int]:
        g, rows = p.geometry, p.batch * prod(p.input_size)
        columns = -(-g.in_channels // self.columns)
        x = -(-rows // self.rows) * columns * self.portions_x
        return x, -(-g.out_channels * g.taps // self.rows) * columns * self.portions_w

    def __str__(self) -> str:
        return (
            f"{self.rows} positions x {self.columns} input channels in {self.portions_x} portions, "
            f"{self.rows} terms x {self.columns} input channels in {self.portions_w}"
        )


def tile_of(g: Geometry) -> Tiling:
    """Returns the tiling with the fewest tiles along the input channels, without portions."""
    tiles = -(-g.in_channels // MOST_COLUMNS)
    columns = round_up(-(-g.in_channels // tiles), 64)
    return Tiling(columns, 3 if columns <= NARROW else 2)


def products_cycles(p: Problem, tiling: Tiling, device: Device) -> float:
    """Predicts the cycles of both products."""
    g = p.geometry
    used = min(tiling.columns, g.in_channels)
    chunk = max(tiling.rows * tiling.columns * CHUNK / PRODUCTS, (tiling.rows + used) * ROW_BYTES / L2_BYTES)
    chunks_x, chunks_w = _chunks(p)
    first, second = -(-chunks_x // tiling.portions_x) * chunk, -(-chunks_w // tiling.portions_w) * chunk
    x, w = tiling.blocks(p)
    return end_of_blocks(first + BLOCK_CYCLES, x, second + BLOCK_CYCLES, w, device.multiprocessors)


def _chunks(p: Problem) -> tuple[int, int]:
    """Returns the chunks that the products for dx and for dw add up."""
    g = p.geometry
    return -(-g.out_channels * g.taps // CHUNK), -(-p.batch * prod(p.input_size) // CHUNK)


def _parts(p: Problem, tiling: Tiling) -> dict[str, tuple[int, int]]:
    """Returns the elements and the number of parts of each gradient that is computed in several parts."""
    g = p.geometry
    found = {
        "dx": (p.batch * g.in_channels * prod(p.input_size), tiling.portions_x),
        "dw": (g.in_channels * g.out_channels * g.taps, tiling.portions_w),
    }
    return {name: each for name, each in found.items() if each[1] > 1}


def _parts_bytes(p: Problem, tiling: Tiling) -> int:
    return sum(4 * count * number for count, number in _parts(p, tiling).values())


def _adding_cycles(p: Problem, tiling: Tiling, device: Device) -> float:
    return _parts_bytes(p, tiling) / (PART_BYTES * device.multiprocessors)


@lru_cache(maxsize=1024)
def tiling_of(p: Problem, device: Device) -> Tiling:
    """Returns the tiling with the least predicted time whose parts fit the workspace."""
    tile, (chunks_x, chunks_w) = tile_of(p.geometry), _chunks(p)
    found = [
        replace(tile, portions_x=x, portions_w=w)
        for x, w in product(PORTIONS, PORTIONS)
        if x <= chunks_x and w <= chunks_w
    ]
    fitting = [each for each in found if _parts_bytes(p, each) <= device.workspace_bytes]
    return min(fitting, key=lambda each: products_cycles(p, each, device) + _adding_cycles(p, each, device))


@dataclass(frozen=True)
class Turned:
    """The operands of the products, and the launches that turn tensors before and behind them."""

    names: dict[str, str]  # by tensor: its operand
    before: list[Turning]
    behind: list[Turning]

    @staticmethod
    def of(problems: Wanted) -> Turned:
        p = problems[Pass.INPUT_GRAD]
        g = p.geometry
        names, before = dict[str, str](), list[Turning]()
        for name, strides, shape, _ in _tensors(problems):
            names[name] = name
            if not _as_rows(strides, shape):
                names[name] = f"turned {name}"
                before.append(turning(name, names[name], shape, p.item_bytes, back=True))
        names["dw"] = "dw" if g.taps == 1 else "turned dw"
        behind = [] if g.taps == 1 else [turning("turned dw", "dw", _weight_shape(g), p.item_bytes)]
        return Turned(names, before, behind)

    def bytes(self) -> dict[str, int]:
        """Returns the sizes of the copies by their names."""
        sizes = {each.to: each.count * each.item_bytes for each in self.before}
        return sizes | {each.from_: each.count * each.item_bytes for each in self.behind}

    def cycles(self, device: Device) -> float:
        moved = sum(each.moved_bytes for each in (*self.before, *self.behind))
        launches = bool(self.before) + bool(self.behind)
        return moved / (TURNED_BYTES * device.multiprocessors) + LAUNCH * launches


def _tensors(problems: Wanted) -> list[tuple[str, Strides, tuple[int, ...], bool]]:
    """Returns name, strides and shape of each tensor that is read, and whether its address is a multiple of 16."""
    p, q = problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]
    g = p.geometry
    return [
        ("dy", p.output, (p.batch, g.out_channels, *p.output_size), p.aligned),
        ("x", q.input, (p.batch, g.in_channels, *p.input_size), q.aligned),
        ("weight", p.weight, _weight_shape(g), p.weight_aligned),
    ]


def _weight_shape(g: Geometry) -> tuple[int, ...]:
    return (g.in_channels, g.out_channels, *g.kernel)


def _as_rows(strides: Strides, shape: tuple[int, ...]) -> bool:
    """Tells whether the channels of a position are neighbours in memory, and positions follow each other."""
    single = prod(shape[2:]) == 1 and strides[:2] == dense_strides(shape)[:2]
    return channels_last(strides, shape) or single


def cycles(problems: Wanted, device: Device) -> float:
    """Predicts the cycles of the whole plan."""
    p, bias = problems[Pass.INPUT_GRAD], Pass.BIAS_GRAD in problems
    tiling = tiling_of(p, device)
    found = LAUNCH + products_cycles(p, tiling, device) + Turned.of(problems).cycles(device)
    if bias:
        dy = p.item_bytes * p.batch * p.geometry.out_channels * prod(p.output_size)
        found += BIAS_CYCLES + dy / (BIAS_BYTES * device.multiprocessors)
    if bias or _parts(p, tiling):
        found += LAUNCH + _adding_cycles(p, tiling, device)
    return found


# ---- The interface of the family to the planner.


def why_not_together(problems: Wanted, device: Device) -> str | None:
    if not {Pass.INPUT_GRAD, Pass.WEIGHT_GRAD} <= problems.keys():
        return "the gradients of input and weight are not both wanted"
    p, q = problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]
    g = p.geometry
    if p.item_bytes != 2:
        return "it is for 16-bit types"
    if refusal := tensor_cores.why_not(p, device, tensor_cores.WARPGROUP):
        return refusal
    if g.groups != 1:
        return "groups"
    if sum(g.kernel) > MOST_TAPS:
        return f"the sizes of the kernel add up to more than {MOST_TAPS}"
    if g.in_channels % PIECE or g.out_channels % PIECE:
        return f"channels are no multiples of {PIECE}"
    positions, outputs = p.batch * prod(p.input_size), p.batch * prod(p.output_size)
    if not positions * outputs:
        return "nothing to add"
    if g.out_channels > MOST_OUT:
        return f"more than {MOST_OUT} output channels"
    if positions > MOST_ROWS or outputs * g.out_channels * p.item_bytes > MOST_GATHERED:
        return "dy is too large for the L2 cache"
    for _, strides, shape, aligned in _tensors(problems):
        if not aligned and _as_rows(strides, shape):
            return "positions are not aligned pieces of 16 bytes"
        if not _as_rows(strides, shape) and strides != contiguous_strides(shape):
            return "tensors are neither contiguous nor channels-last"
    x = (p.batch, g.in_channels, *p.input_size)
    if not _as_rows(p.input, x) and p.input != contiguous_strides(x):
        return "the gradient of the input is neither contiguous nor channels-last"
    if q.weight != dense_strides(_weight_shape(g)):
        return "the gradient of the weight is not contiguous"
    if sum(Turned.of(problems).bytes().values()) > MOST_TURNED * device.workspace_bytes:
        return f"copies would take more than {MOST_TURNED * device.workspace_bytes >> 20} MB"
    return None


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    if Pass.FORWARD in wanted:
        return []
    if refusal := why_not_together(wanted, device):
        return [Refusal("gather", tuple(wanted), refusal)]
    p = wanted[Pass.INPUT_GRAD]
    return [
        Offer(
            "gather",
            _passes(wanted),
            p,
            device,
            lambda: Work(1, cycles(wanted, device)),
            lambda: plan(wanted, device),
            surcharge=calibration.surcharge("gather", device, calibration.kind_of(p)),
        )
    ]


def _passes(wanted: Wanted) -> tuple[Pass, ...]:
    return (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD, *((Pass.BIAS_GRAD,) if Pass.BIAS_GRAD in wanted else ()))


def plan(problems: Wanted, device: Device) -> Plan:
    p, turned = problems[Pass.INPUT_GRAD], Turned.of(problems)
    tiling = tiling_of(p, device)
    outputs = p.batch * prod(p.output_size)
    bias_blocks = min(device.multiprocessors, -(-outputs // BIAS_POSITIONS)) if Pass.BIAS_GRAD in problems else 0
    results = {"dx": "dx", "dw": turned.names["dw"], "db": "db"}
    sums = [
        Sum(f"{name} parts", results[name], count, round_up(count, 4), number)
        for name, (count, number) in _parts(p, tiling).items()
    ]
    if bias_blocks:
        count = p.geometry.out_channels
        sums.append(Sum("db parts", "db", count, round_up(count, 4), bias_blocks))
    end, regions = placed((*turned.bytes().items(), *((each.parts, each.bytes) for each in sums)))
    launches = [_products(p, problems[Pass.WEIGHT_GRAD], tiling, turned, {s.result: s.parts for s in sums}, device)]
    if turned.before:
        launches.insert(0, turn(turned.before, overlaps=False))
    if sums:
        launches.append(add_parts(sums, p.dtype, MOST_SUMMING * device.multiprocessors))
    if turned.behind:
        launches.append(turn(turned.behind, overlaps=True))
    return Plan(
        "gather",
        "few positions: two matrix products that gather rows of dy",
        tuple(launches),
        round_up(end, ALIGN),
        str(tiling),
        regions,
        passes=_passes(problems),
    )


def _products(
    p: Problem, q: Problem, tiling: Tiling, turned: Turned, parts: dict[str, str], device: Device
) -> Launch:
    g, (d, h, w) = p.geometry, p.input_size
    blocks_x, blocks_w = tiling.blocks(p)
    outputs, dw = p.batch * prod(p.output_size), turned.names["dw"]
    bias_blocks = min(device.multiprocessors, -(-outputs // BIAS_POSITIONS)) if "db" in parts else 0
    return GATHERED_PRODUCTS.launch(
        blocks_x + blocks_w + bias_blocks,
        128 * (tiling.consumers + 1),
        (
            ("Scalar", SCALARS[p.dtype]),
            ("kIn", g.in_channels),
            ("kOut", g.out_channels),
            ("kLastX", _as_rows(p.input, (p.batch, g.in_channels, d, h, w))),
            ("kConsumers", tiling.consumers),
            ("kColumns", tiling.columns),
            ("kStages", tiling.stages(device)),
            ("kProducerRegisters", REGISTERS[tiling.consumers][0]),
            ("kConsumerRegisters", REGISTERS[tiling.consumers][1]),
            *axis_constants(g.axes, "kernel", "stride", "padding", "dilation"),
        ),
        {
            **{name: turned.names[name] for name in ("dy", "x", "weight")},
            "dx": parts.get("dx", "dx"),
            "dw": parts.get(dw, dw),
            "bias_parts": parts.get("db", "null"),
        },
        shared_bytes=tiling.shared_bytes(device),
        overlaps=bool(turned.before),
        dx_pitch=round_up(p.batch * g.in_channels * d * h * w, 4),
        dw_pitch=round_up(g.in_channels * g.out_channels * g.taps, 4),
        output=p.output_size,
        rows=p.batch * d * h * w,
        outputs=outputs,
        portions_x=tiling.portions_x,
        portions_w=tiling.portions_w,
        blocks_x=blocks_x,
        blocks_w=blocks_w,
        bias_blocks=bias_blocks,
        by_volume=d * h * w,
        by_in_d=d,
        by_in_h=h,
        by_in_w=w,
    )
