"""Plans for the gradients of wide layers on small volumes, as two plain matrix products (unfold.cuh,
unfolded_products.cuh).

dy, the gradient of the output, is unfolded: every triple of position, output channel and tap gets an element (as
im2col does). The unfolded dy takes memory and passes through the L2 cache; where positions are few and channels many,
plain matrix products gain more than this costs. If the unfolded dy would take too much memory, the volume is unfolded
band by band: some batch items, or some planes along d of one. The compiled constants depend on the layer, and on the
columns of a block and the channels that a block unfolds, which are chosen for the volume.

Terms: a panel is 32 words of every row of an operand, 128 bytes per row; a chunk is the 32 terms of one panel. A
portion is one block's share of the terms (split-K), whose sums form one part of the result. An image is the part of
dy in a block's shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import inf, prod

from ...planning import tensor_cores
from ...planning.calibration import Work
from ...planning.geometry import Geometry
from ...planning.launch import Launch, axis_constants, end_of_blocks
from ...planning.offers import Answer, Offer, Refusal, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, dense_strides
from ...planning.repertoire import Repertoire, searched
from ...planning.scalars import round_up
from ...planning.sums import Sum, add_parts
from ...planning.workspace import ALIGN, placed
from .arguments import UNFOLD, UNFOLDED_PRODUCTS
from .operands import ROW_BYTES, TERMS, UNFOLDING_BYTES, Band, Bands, Operands, Slices, bands_within

UNFOLD_THREADS = 256
CHANNELS = (1, 2, 4, 8)  # choices for the output channels of a block that unfolds
AT_ONCE = 2  # groups of 8 rows of a panel of x that a warp writes
IMAGE_BYTES = 100 * 1024  # most bytes of shared memory of a block that unfolds
REGISTERS = {2: (40, 232), 3: (40, 152)}  # registers per producer and consumer thread, by consumer warpgroups
MOST_COLUMNS = {2: 288, 3: 192}  # most columns of a block, by consumer warpgroups
COLUMNS = (64, 96, 128, 160, 192, 224, 256, 288)
MOST_STAGES, LEAST_STAGES = 6, 3
# Limits of the unfolded operands, in multiples of `Device.workspace_bytes`: the largest limit, and one that nearly
# fits the L2 cache.
ROOMS = (4, 1)
MOST_SUMMING = 8  # most blocks per multiprocessor of the launch that adds parts

# Costs of a multiprocessor in cycles at 1.755 GHz, fitted to 48 measured times on an H200 with a mean error of 9%.
BLOCK_CYCLES = 6000.0  # cycles per block of the products until the first panels arrive, and to store the sums
PRODUCTS = 800.0  # products of two numbers per cycle
L2_BYTES = 38.0  # bytes per cycle from the L2 cache
PART_BYTES = 18.0  # bytes of parts per cycle that are written and read again
MULTIPLYING_BYTES = 1368.0  # bytes of memory traffic per cycle of the whole GPU while multiplying
KEPT_BYTES = 40e6  # bytes of the unfolded dy that stay in the L2 cache
LAUNCH = 3500.0  # cycles per launch

Compiled = tuple[int, int, int]  # columns of the product for dx, of the product for dw, and consumer warpgroups
COMPILED: tuple[Compiled, ...] = tuple(
    (x, w, consumers)
    for consumers, most in MOST_COLUMNS.items()
    for x, w in product([n for n in COLUMNS if n <= most], repeat=2)
)


# Compiled constants are chosen from the layer's repertoire, so that a new volume seldom compiles a new kernel.
_channels = Repertoire[tuple[Geometry, Device], Operands, int]()
_compiled = Repertoire[tuple[Geometry, Device], Operands, Compiled]()


def forget() -> None:
    """Forgets all choices, so that the next volume of every layer counts as its first."""
    _channels.forget()
    _compiled.forget()
    for found in (bands_of, slices_of, tiling_of, _own_channels, _own_compiled):
        found.cache_clear()


@lru_cache(maxsize=1024)
def slices_of(volume: Operands, device: Device) -> Slices | None:
    """Returns the slices of the first band; None if no image fits shared memory."""
    bands = bands_of(volume, device)
    if not bands:
        return None
    band = bands[0]
    channels = _channels.choose(
        (volume.geometry, device),
        band.operands,
        lambda: _own_channels(band, device),
        lambda: (n for o in band.operands.typical(device) if (n := _own_channels(o.whole[0], device)) is not None),
        lambda channels, _: best.cycles(device) if (best := _best_slices(band, device, (channels,))) else inf,
    )
    return None if channels is None else _best_slices(band, device, (channels,))


@lru_cache(maxsize=1024)
def _own_channels(band: Band, device: Device) -> int | None:
    best = _best_slices(band, device, CHANNELS)
    return None if best is None else best.channels


def _best_slices(band: Band, device: Device, choices: tuple[int, ...]) -> Slices | None:
    """Returns the fastest slices of a band by the model. A band that ends inside a batch item has whole slices
    only."""
    o = band.operands
    d, h, _ = o.size
    planes = [n for n in range(1, d + 1) if band.last or d % n == 0]
    lines = [*(n for n in range(1, h) if h % n == 0), *(h * n for n in planes)]
    found = [Slices(o, channels, n) for channels in choices for n in lines]
    fitting = [slices for slices in found if slices.whole and slices.bytes <= IMAGE_BYTES]
    return min(fitting, key=lambda slices: slices.cycles(device), default=None)


@dataclass(frozen=True)
class Tiling:
    """Columns of a block and portions of the terms (split-K) for both products, and the number of consumer
    warpgroups."""

    columns_x: int
    columns_w: int
    portions_x: int = 1
    portions_w: int = 1
    consumers: int = 2

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    @property
    def stage_bytes(self) -> int:
        return (self.rows + max(self.columns_x, self.columns_w)) * ROW_BYTES

    def stages(self, device: Device) -> int:
        return min(MOST_STAGES, (device.shared_bytes - 256) // self.stage_bytes)

    def blocks(self, o: Operands) -> tuple[int, int]:
        ins = o.geometry.in_channels
        x = -(-ins // self.rows) * -(-o.columns_x // self.columns_x) * self.portions_x
        return x, -(-o.terms // self.rows) * -(-ins // self.columns_w) * self.portions_w

    def __str__(self) -> str:
        return (
            f"{self.rows} input channels x {self.columns_x} positions in {self.portions_x} portions, "
            f"{self.rows} terms x {self.columns_w} input channels in {self.portions_w}"
        )


def _block_cycles(rows: int, columns: int, used: int, chunks: int) -> float:
    """Predicts the cycles of a block of the products. `used` counts the rows of both operands that exist."""
    products = rows * columns * TERMS / PRODUCTS
    return chunks * max(products, used * ROW_BYTES / L2_BYTES) + BLOCK_CYCLES


def products_cycles(o: Operands, tiling: Tiling, device: Device) -> float:
    """Predicts the cycles of both products, without memory traffic."""
    rows, ins = tiling.rows, o.geometry.in_channels
    of_x, of_w = min(rows, ins) + min(tiling.columns_x, o.columns_x), min(rows, o.terms) + min(tiling.columns_w, ins)
    x = _block_cycles(rows, tiling.columns_x, of_x, -(-o.chunks_x // tiling.portions_x))
    w = _block_cycles(rows, tiling.columns_w, of_w, -(-o.chunks_w // tiling.portions_w))
    blocks_x, blocks_w = tiling.blocks(o)
    return end_of_blocks(x, blocks_x, w, blocks_w, device.multiprocessors)


def moving_cycles(o: Operands, tiling: Tiling) -> float:
    """Predicts the cycles of memory traffic for both products."""
    panels = o.regions
    moved = max(0.0, 2 * panels["position panels"] - KEPT_BYTES) + panels["x panels"] + o.x_bytes * tiling.portions_x
    return moved / MULTIPLYING_BYTES + BLOCK_CYCLES


def adding_cycles(o: Operands, tiling: Tiling, bands: int, device: Device) -> float:
    """Predicts the cycles of the launch that adds parts; 0 if there are none."""
    parts = _parts_bytes(o, tiling, bands)
    return LAUNCH + parts / (PART_BYTES * device.multiprocessors) if parts else 0.0


def _parts(o: Operands, tiling: Tiling, bands: int) -> list[tuple[str, int, int]]:
    """Returns name, number of elements and number of parts of every result that is computed in several parts."""
    g = o.geometry
    found = [
        ("dx", o.batch * g.in_channels * o.positions, tiling.portions_x),
        ("dw", g.in_channels * o.terms, tiling.portions_w * bands),
    ]
    return [(name, count, number) for name, count, number in found if number > 1]


def _parts_bytes(o: Operands, tiling: Tiling, bands: int) -> int:
    return sum(4 * count * number for _, count, number in _parts(o, tiling, bands))


@lru_cache(maxsize=1024)
def tiling_of(volume: Operands, device: Device) -> Tiling:
    """Returns the tiling that all bands of a volume share."""
    bands = bands_of(volume, device)
    first = bands[0].operands

    def cost(compiled: Compiled) -> float:
        tiling = _best_tiling(bands, device, (compiled,))
        return tiling_cycles(bands, tiling, device) if tiling else inf

    chosen = _compiled.choose(
        (volume.geometry, device),
        first,
        lambda: _own_compiled(bands, device),
        lambda: (own for o in first.typical(device) if (own := _own_compiled(o.whole, device)) is not None),
        lambda compiled, _: cost(compiled),
    )
    best = None if chosen is None else _best_tiling(bands, device, (chosen,))
    assert best is not None, "the tiling of what why_not_together() refuses"
    return best


@lru_cache(maxsize=1024)
def _own_compiled(bands: Bands, device: Device) -> Compiled | None:
    """Returns the best compiled constants for a volume, from the cache on disk if they have been searched before."""

    def search() -> Compiled | None:
        best = _best_tiling(bands, device, COMPILED)
        return None if best is None else (best.columns_x, best.columns_w, best.consumers)

    return searched(__name__, (bands, replace(device, name="")), Compiled | None, search)


def _best_tiling(bands: Bands, device: Device, choices: Iterable[Compiled]) -> Tiling | None:
    found = (
        tiling
        for columns_x, columns_w, consumers in choices
        for tiling in _portioned(bands, Tiling(columns_x, columns_w, consumers=consumers), device)
    )

    return min(found, key=lambda tiling: tiling_cycles(bands, tiling, device), default=None)


def tiling_cycles(bands: Bands, tiling: Tiling, device: Device) -> float:
    """Returns the cost by which a tiling is chosen. Memory traffic that takes longer than the products counts a
    quarter, since fewer cycles of multiprocessors help more than fewer bytes."""
    products = _of_all(bands, lambda o: products_cycles(o, tiling, device))
    longer = max(0.0, _of_all(bands, lambda o: moving_cycles(o, tiling)) - products)
    return products + longer / 4 + adding_cycles(bands[0].volume, tiling, len(bands), device)


def _of_all(bands: Bands, cycles: Callable[[Operands], float]) -> float:
    """Returns the sum of `cycles` over all bands, of which all but the last are counted like the first."""
    before = (len(bands) - 1) * cycles(bands[0].operands) if len(bands) > 1 else 0.0
    return before + cycles(bands[-1].operands)


def _portioned(bands: Bands, tiling: Tiling, device: Device) -> Iterator[Tiling]:
    """Yields the tiling with those numbers of portions that are worth trying and whose parts fit the workspace."""
    if tiling.stages(device) < LEAST_STAGES:
        return
    o = bands[0].operands
    x, w = tiling.blocks(o)
    for portions_w in _portions(w, o.chunks_w, device):
        left = max(device.multiprocessors - w * portions_w, 1)
        for portions_x in {*_portions(x, o.chunks_x, device), max(1, min(left // x, o.chunks_x))}:
            portioned = replace(tiling, portions_x=portions_x, portions_w=portions_w)
            if _parts_bytes(bands[0].volume, portioned, len(bands)) <= device.workspace_bytes:
                yield portioned


def _portions(blocks: int, chunks: int, device: Device) -> set[int]:
    """Returns numbers of portions worth trying: 1, and those with which blocks fill the GPU, a half or a third of
    it."""
    return {max(1, min(device.multiprocessors // (n * blocks), chunks)) for n in (1, 2, 3)} | {1}


def cycles(o: Operands, device: Device, bias: bool) -> float:
    """Predicts the cycles of the whole plan."""
    slices = slices_of(o, device)
    assert slices is not None, "cycles() of what why_not_together() refuses"
    return _cycles(bands_of(o, device), slices, tiling_of(o, device), device, bias)


def _cycles(bands: Bands, slices: Slices, tiling: Tiling, device: Device, bias: bool = False) -> float:
    def of_band(o: Operands) -> float:
        unfolding = replace(slices, operands=o).cycles_with(bias, device)
        return 2 * LAUNCH + unfolding + max(products_cycles(o, tiling, device), moving_cycles(o, tiling))

    return _of_all(bands, of_band) + adding_cycles(bands[0].volume, tiling, len(bands), device)


def least_cycles(o: Operands, device: Device) -> float:
    """Returns a lower bound of `cycles` that is cheap to compute."""
    products = 2 * o.geometry.in_channels * o.terms * o.batch * o.positions / (PRODUCTS * device.multiprocessors)
    return products + (o.bytes + o.x_bytes + 4 * o.outputs) / UNFOLDING_BYTES


@lru_cache(maxsize=1024)
def bands_of(o: Operands, device: Device) -> Bands:
    """Returns the bands with the least predicted time; an empty tuple if no bands fit."""
    costs: dict[Bands, float] = {}
    for bands in dict.fromkeys(bands_within(o, room * device.workspace_bytes) for room in ROOMS):
        channels = _own_channels(bands[0], device) if bands else None
        own = _own_compiled(bands, device) if channels else None
        if channels and own:
            slices, tiling = _best_slices(bands[0], device, (channels,)), _best_tiling(bands, device, (own,))
            assert slices is not None and tiling is not None
            costs[bands] = _cycles(bands, slices, tiling, device)
    return min(costs, key=lambda bands: costs[bands], default=())


# ---- The interface of the family to the planner.


def why_not_together(problems: Wanted, device: Device) -> str | None:
    if not {Pass.INPUT_GRAD, Pass.WEIGHT_GRAD} <= problems.keys():
        return "the gradients of input and weight are not both wanted"
    p, q = problems[Pass.INPUT_GRAD], problems[Pass.WEIGHT_GRAD]
    g = p.geometry
    if refusal := tensor_cores.why_not(p, device, tensor_cores.WARPGROUP):
        return refusal
    if p.dtype != "float32":
        return "16-bit types"
    if g.groups != 1:
        return "groups"
    x = dense_strides((p.batch, g.in_channels, *p.input_size))
    weight = dense_strides((g.in_channels, g.out_channels, *g.kernel))
    if (p.input, q.input, p.weight, q.weight) != (x, x, weight, weight):
        return "tensors are not contiguous"
    if p.output != dense_strides((p.batch, g.out_channels, *p.output_size)):
        return "dy is not contiguous"
    if not prod(p.output_size) * p.batch * prod(p.input_size):
        return "nothing to add"
    o = Operands(g, p.batch, p.input_size)
    bands = bands_within(o, ROOMS[0] * device.workspace_bytes)
    if not bands:
        return f"operands of a plane would take more than {ROOMS[0] * device.workspace_bytes / 2**20:.0f} MB"
    if _parts_bytes(o, Tiling(0, 0), len(bands)) > device.workspace_bytes:
        return f"parts of the weight's gradient would take more than {device.workspace_bytes >> 20} MB"
    if _own_channels(bands[0], device) is None:
        return "channels of dy are too large for shared memory"
    return None


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    if Pass.FORWARD in wanted:
        return []
    if refusal := why_not_together(wanted, device):
        return [Refusal("unfold", tuple(wanted), refusal)]
    p, bias = wanted[Pass.INPUT_GRAD], Pass.BIAS_GRAD in wanted
    o = Operands(p.geometry, p.batch, p.input_size)

    passes = (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD, *((Pass.BIAS_GRAD,) if bias else ()))
    return [
        Offer(
            "unfold",
            passes,
            p,
            device,
            lambda: Work(3, cycles(o, device, bias)),
            lambda: plan(wanted, device),
            least=Work(3, least_cycles(o, device)),  # The bound needs no search for a tiling.
        )
    ]


def plan(problems: Wanted, device: Device) -> Plan:
    p = problems[Pass.INPUT_GRAD]
    g, o = p.geometry, Operands(p.geometry, p.batch, p.input_size)
    tiling = tiling_of(o, device)
    bands, first, bias = bands_of(o, device), slices_of(o, device), Pass.BIAS_GRAD in problems
    assert first is not None, "a plan of what why_not_together() refuses"
    slices = [replace(first, operands=band.operands) for band in bands]
    counts = [band.items * each.count for band, each in zip(bands, slices, strict=True)]
    sums = [
        Sum(f"{name} parts", name, count, round_up(count, 4), number)
        for name, count, number in _parts(o, tiling, len(bands))
    ]
    if bias:
        sums.append(Sum("db parts", "db", g.out_channels, round_up(g.out_channels, 4), sum(counts)))
    end, regions = placed((*bands[0].operands.regions.items(), *((each.parts, each.bytes) for each in sums)))
    launches = []
    for i, band in enumerate(bands):
        launches.append(_unfold(p, band, slices[i], sum(counts[:i]), bias))
        launches.append(_products(band, tiling, i, [each.result for each in sums], device))
    if sums:
        launches.append(add_parts(sums, p.dtype, MOST_SUMMING * device.multiprocessors))
    return Plan(
        "unfold",
        "few positions: dy unfolded, two matrix products",
        tuple(launches),
        round_up(end, ALIGN),
        str(tiling) + (f", {len(bands)} bands of the volume" if len(bands) > 1 else ""),
        regions,
        passes=(Pass.INPUT_GRAD, Pass.WEIGHT_GRAD, *((Pass.BIAS_GRAD,) if bias else ())),
    )


def _unfold(p: Problem, band: Band, slices: Slices, first_slice: int, bias: bool) -> Launch:
    o, g = slices.operands, p.geometry
    of_x = -(-(-(-g.in_channels // 8) * o.chunks_w) // (UNFOLD_THREADS // 32 * AT_ONCE))
    return UNFOLD.launch(
        slices.blocks + of_x,
        UNFOLD_THREADS,
        (
            ("kIn", g.in_channels),
            ("kOut", g.out_channels),
            ("kChannels", slices.channels),
            ("kAtOnce", AT_ONCE),
            ("kBias", bias),
            *axis_constants(g.axes, "kernel", "stride", "padding", "dilation"),
        ),
        {"x_panels": "x panels", "position_panels": "position panels", "bias_parts": "db parts" if bias else "null"},
        shared_bytes=slices.bytes,
        image=slices.image,
        output=p.output_size,
        batch=o.batch,
        positions=o.positions,
        pitch=o.pitch,
        panel_rows=o.panel_rows,
        lines=slices.lines,
        slices=slices.count,
        unfolding=slices.blocks,
        first_item=band.first_item,
        first_line=band.first_line,
        item_positions=band.volume.positions,
        first_slice=first_slice,
        last=band.last,
        by_in_h=o.size[1],
        by_in_w=o.size[2],
        by_image_h=slices.image[1],
        by_image_w=slices.image[2],
        by_item_eighths=o.pitch // 8,
    )


def _products(band: Band, tiling: Tiling, index: int, parts: list[str], device: Device) -> Launch:
    """Returns the launch of both products of a band; `parts` names the results that are computed in several parts."""
    o, g = band.operands, band.volume.geometry
    blocks_x, blocks_w = tiling.blocks(o)
    stages = tiling.stages(device)
    return UNFOLDED_PRODUCTS.launch(
        blocks_x + blocks_w,
        128 * (tiling.consumers + 1),
        (
            ("kTerms", o.terms),
            ("kConsumers", tiling.consumers),
            ("kColumnsX", tiling.columns_x),
            ("kColumnsW", tiling.columns_w),
            ("kStages", stages),
            ("kProducerRegisters", REGISTERS[tiling.consumers][0]),
            ("kConsumerRegisters", REGISTERS[tiling.consumers][1]),
        ),
        {
            "position_panels": "position panels",
            "x_panels": "x panels",
            "dx": "dx parts" if "dx" in parts else "dx",
            "dw": "dw parts" if "dw" in parts else "dw",
        },
        shared_bytes=stages * (tiling.stage_bytes + 16),
        overlaps=True,
        dx_pitch=round_up(band.volume.batch * g.in_channels * band.volume.positions, 4),
        dw_pitch=round_up(g.in_channels * o.terms, 4),
        dx_first=band.first_column,
        rows=g.in_channels,
        positions=o.positions,
        pitch=o.pitch,
        item_positions=band.volume.positions,
        columns=o.columns_x,
        panel_rows=o.panel_rows,
        chunks_x=o.chunks_x,
        chunks_w=o.chunks_w,
        portions_x=tiling.portions_x,
        portions_w=tiling.portions_w,
        first_portion=tiling.portions_w * index,
        blocks_x=blocks_x,
        by_pitch=o.pitch,
    )
