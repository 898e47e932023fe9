"""Plans forward pass and input gradient on tensor cores by mma.sync (mma.cuh, mma_pack.cuh).

The kernels run on every GPU since compute capability 8.0. The planner chooses how the halo is copied to shared
memory, takes the build that the model predicts to be fastest, and makes its launches. If the channels of x are not
contiguous, a launch may first rewrite x as rows of channels (`rows` in this module).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import gcd, inf, prod

from ...planning import calibration, offers, tensor_cores
from ...planning.arguments import per_axis
from ...planning.geometry import Triple
from ...planning.launch import Constants, Launch
from ...planning.offers import Answer, Offer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, channels_last_strides, contiguous_strides, last_offset
from ...planning.repertoire import Repertoire, searched, typical_problems
from ...planning.scalars import INT32_MAX, SCALARS
from ...planning.side import Side
from ...planning.sums import Sum, add_parts
from ...planning.turning import channel_rows
from . import model, search
from .arguments import MMA, MMA_PACK
from .model import (
    HALVES,
    MULTIPLY_CYCLES,
    ODD_PAIRS,
    PAIRS,
    PIECES,
    WORDS,
    Build,
    Candidate,
    candidates,
    candidates_of,
)
from .work import MAX_SOURCES, Work

HAS_EPILOGUE = True
HOLDS_CHANNELS = True
LEAST_PAIRS = 32  # pairs of an input and an output channel of a group: fewer leave most of a product idle
PRODUCTS_PER_CYCLE = 1024 / MULTIPLY_CYCLES  # TF32 multiply-adds per cycle and multiprocessor, by the model
MAX_TAPS = 1024  # taps that the tables of a kernel hold
PACK_THREADS = 256  # threads per block of mma_pack
ALIGN = 256  # bytes to which a region of the workspace is aligned
MOMENT_BYTES = 16  # size of struct Moments<float> in bytes
PACK_ELEMENTS = 4096  # elements of the weight in the shared memory of a block of mma_pack


def why_not(problem: Problem, device: Device) -> str | None:
    """Returns why the family does not take a problem, or None if it does."""
    return why_never(problem, device) or _why_no_build(problem, device)


def why_never(problem: Problem, device: Device) -> str | None:
    """Returns a reason for refusal that is known without a search for a build, or None."""
    if problem.which not in (Pass.FORWARD, Pass.INPUT_GRAD):
        return "the kernel on mma.sync computes the forward pass and the input gradient"
    if refusal := tensor_cores.why_not(problem, device, tensor_cores.WARP, in_halves=True):
        return refusal
    if problem.batch == 0:
        return "there is nothing to compute"
    g = problem.geometry
    if min(g.in_per_group, g.out_per_group) < 4 and g.in_per_group * g.out_per_group < LEAST_PAIRS:
        return f"fewer than {LEAST_PAIRS} pairs of channels per group leave tensor cores idle"
    if g.taps > MAX_TAPS:
        return f"{g.taps} taps are more than the tables hold"
    return tensor_cores.why_not_halves(Side.of(problem).mean_terms, problem.loose) if _strict(problem) else None


def _strict(problem: Problem) -> bool:
    """Tells whether every product is computed as three TF32 products."""
    return problem.dtype == "float32" and not problem.tf32


def _why_no_build(problem: Problem, device: Device) -> str | None:
    found = chosen(problem, device)
    if found is None:
        return "no tile and its halo fit accumulators and shared memory"
    return why_too_far(found, problem)


def why_too_far(found: Candidate, problem: Problem) -> str | None:
    """Returns why a launch cannot have so large tensors, or None if it can."""
    if _halo_span(found) * problem.item_bytes > INT32_MAX:
        return "the offsets of a tile leave 32 bits"
    if found.grid > INT32_MAX:
        return "there are more blocks than a launch can have"
    return None


PASSES = (Pass.FORWARD, Pass.INPUT_GRAD)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    found: list[Answer] = offers.one_by_one(PASSES, "mma", wanted, device, why_never, work, plan)
    return [_with_bound(each, device) if isinstance(each, Offer) else each for each in found]


def _with_bound(offer: Offer, device: Device) -> Offer:
    """Returns the offer with a lower bound of its work, and with a higher price if the layer is narrow."""
    factor = offer.surcharge * calibration.narrow_surcharge(offer.problem)
    return replace(offer, least=least(offer.problem, device), surcharge=factor)


def least(problem: Problem, device: Device) -> calibration.Work:
    """Returns a lower bound of the work without the search for a build.

    A multiprocessor is busy with products and stores at the model's rates, and waits for one block at least.
    """
    rate, side = PRODUCTS_PER_CYCLE * 4 / problem.item_bytes / (3 if _strict(problem) else 1), Side.of(problem)
    size = problem.output_size if problem.which is Pass.FORWARD else problem.input_size
    written = problem.batch * prod(size) * (1 if problem.per_position else side.outs * problem.geometry.groups)
    products, stores = problem.flops / 2 / rate, written * problem.item_bytes / model.MEMORY_BYTES_PER_CYCLE
    busy = (products**model.TOGETHER + stores**model.TOGETHER) ** (1 / model.TOGETHER) / device.multiprocessors
    idle, hidden = model.BLOCK_CYCLES, 1.0 - model.OVERLAP
    return calibration.Work(2, search.ROUNDING * (busy + idle - hidden * min(busy, idle)))


def work(problem: Problem, device: Device) -> calibration.Work:
    """Returns the work of the launches as the model predicts it."""
    found = chosen(problem, device)
    if found is None or _why_no_build(problem, device):  # work that is never the cheapest
        return calibration.Work(2, inf)
    return calibration.Work(2, found.cycles(device))


def plan(problem: Problem, device: Device) -> Plan:
    found = chosen(problem, device)
    if found is None:
        raise ValueError(why_not(problem, device))
    return plan_of(found, problem)


def plan_of(found: Candidate, problem: Problem) -> Plan:
    packed = end = _packed_bytes(found)
    regions = []
    split = found.build.splits > 1
    sizes = {
        "rows": _rows_bytes(problem) if found.rows else 0,
        "moments": _moment_bytes(found),
        "parts": 4 * found.build.splits * _part(found) if split else 0,
    }
    for name, size in sizes.items():
        if size:
            start = -(-end // ALIGN) * ALIGN
            regions.append((name, start))
            end = start + size
    launches = [_pack(found), *([_rows(problem)] if found.rows else []), _main(found)]
    if split:
        sums = Sum("parts", "y", found.outputs, _part(found), found.build.splits)
        launches.append(add_parts([sums], problem.dtype, overlaps=False))
    if problem.which is Pass.INPUT_GRAD:
        names = {"x": "dy", "bias": "null", "y": "dx"}
        launches = [replace(each, pointers=tuple(names.get(p, p) for p in each.pointers)) for each in launches]
    items = f"{found.box.items} batch items x " if found.box.items > 1 else ""
    tile = f"{found.build}; boxes of {items}{' x '.join(map(str, found.box.tile))} positions"
    return Plan(
        "mma_ahead" if found.build.ahead else "mma_far" if found.build.lattices or found.build.crops else "mma",
        "tensor cores, any setting"
        + (", three TF32 products" if found.work.strict else "")
        + (", of rows of channels that are written first" if found.rows else ""),
        tuple(launches),
        end,
        tile,
        regions=tuple(regions),
        packed_bytes=packed if problem.which is Pass.FORWARD else 0,  # only forward passes reuse packed weights
        moments=_moments(found),
        preparing=2 if found.rows else 1,
    )


def _part(found: Candidate) -> int:
    """Returns the elements from one part of the sums to the next, a multiple of 4."""
    return -(-found.outputs // 4) * 4


def leaves_moments(problem: Problem) -> bool:
    """Tells whether the kernel stores the moments of its outputs for a norm that follows."""
    return problem.which is Pass.FORWARD and problem.norm is not None and not problem.has_operands


def _moment_band(found: Candidate) -> int:
    """Returns how many neighbouring output channels of a norm group and a warp share their moments: a power of 2."""
    p, tiles_n = found.work.side.problem, found.build.tiles_n
    if p.norm is None:
        return 1
    shared = gcd(p.geometry.out_channels // p.norm.groups, p.geometry.out_per_group, 8 * tiles_n)
    band = shared & -shared
    return band if tiles_n % 2 == 0 or tiles_n == 1 else min(band, 2)


def _moment_slots(found: Candidate) -> int:
    """Returns how many warps store moments of a band of channels of a batch item."""
    return prod(found.box.tiles[1:]) * len(found.work.phases) * found.build.warps_m


def _moments(found: Candidate) -> int:
    """Returns the moments that are stored for each norm group of a batch item."""
    p = found.work.side.problem
    if p.norm is None or not leaves_moments(p):
        return 0
    return p.geometry.out_channels // p.norm.groups // _moment_band(found) * _moment_slots(found)


def _moment_bytes(found: Candidate) -> int:
    p = found.work.side.problem
    return MOMENT_BYTES * p.batch * p.norm.groups * _moments(found) if p.norm else 0


def _read(problem: Problem) -> tuple[int, ...]:
    """Returns the shape of the tensor that the pass reads: x, or dy for the input gradient."""
    side = Side.of(problem)
    return (problem.batch, side.reduced * problem.geometry.groups, *side.x_size)


def _rows_bytes(problem: Problem) -> int:
    return prod(_read(problem)) * problem.item_bytes


def _rows(problem: Problem) -> Launch:
    batch, channels, *size = _read(problem)
    side = Side.of(problem)
    return channel_rows(
        problem.dtype, batch, channels, tuple(size), side.x, problem.aligned, already=False, hopper=False
    )


def copy_of(side: Side) -> int:
    """Returns the kind of copy of the halo to shared memory: PIECES, WORDS, HALVES, PAIRS or ODD_PAIRS."""
    p = side.problem
    item = 16 // p.item_bytes
    n, c, *rest = side.x
    if c == 1 and p.aligned and not any(v % item for v in (side.reduced, n, *rest)):
        return PIECES
    if p.item_bytes == 4:
        return WORDS
    if not p.aligned or side.x != contiguous_strides(_read(p)):
        return HALVES
    return ODD_PAIRS if side.x_size[2] % 2 else PAIRS


def _halo_span(found: Candidate) -> int:
    """Returns the largest offset in x from the start of a halo, in elements."""
    lines = (step * (extent - 1) for step, extent in zip(found.work.line_steps, found.box.halo, strict=True))
    places = (found.box.items - 1, 0, *lines)
    return sum(place * stride for place, stride in zip(places, found.work.side.x, strict=True))


# ---- The choice of a build.

Choice = tuple[Build, bool]  # a build, and whether x is first rewritten as rows of channels
_repertoire = Repertoire[tuple[object, ...], tuple[int, Triple], Choice]()


def forget() -> None:
    """Forgets all choices, so that the next volume of every layer counts as its first."""
    _own.cache_clear()
    _repertoire.forget()


def chosen(problem: Problem, device: Device) -> Candidate | None:
    """Returns a build of the layer's repertoire (few builds for all volumes) with its best box, or None."""
    choice = _repertoire.choose(
        layer_of(problem, device),
        (problem.batch, problem.input_size),
        lambda: _own(problem, device),
        lambda: (found for each in typical_problems(problem) if (found := _own(each, device)) is not None),
        lambda choice, _: found.cycles(device) if (found := best(problem, device, choice)) else inf,
    )
    return None if choice is None else best(problem, device, choice)


def layer_of(problem: Problem, device: Device) -> tuple[object, ...]:
    """Returns all that the choice of a build depends on besides the volume."""
    types = (problem.dtype, problem.tf32, problem.activation, problem.norm)
    kind = (problem.which, problem.geometry, *types, problem.input[1] == 1)
    return (*kind, problem.output[4] == 1, copy_of(Side.of(problem)), device)


@lru_cache(maxsize=1024)
def _own(problem: Problem, device: Device) -> Choice | None:
    """Returns the build that the model predicts to be fastest for this volume, or None."""
    settings = (plain(problem), replace(device, name=""))
    found: Choice | None = searched(__name__, settings, Choice | None, lambda: _fastest(*settings))
    return found


def plain(problem: Problem) -> Problem:
    """Returns a problem without what follows its sums: layers that differ in that alone share a search."""
    held = "all" if problem.channels else ""
    found = replace(problem, relu=False, tail="", tail_vectors=0, tail_wholes=0, norm=None)
    return replace(found, tail_reads=(), channels=held, per_position="")


def _fastest(problem: Problem, device: Device) -> Choice | None:
    found = search.fastest(sides(problem, device), problem.item_bytes, device)
    return None if found is None else (found.build, found.rows)


@lru_cache(maxsize=4096)
def best(problem: Problem, device: Device, choice: Choice) -> Candidate | None:
    """Returns a build with its predicted fastest box for the volume, or None if none fits."""
    build, rows = choice
    for side, copy, of_rows in sides(problem, device):
        if of_rows == rows:
            found = candidates_of(build, side, copy, problem.item_bytes, device, rows)
            return min(found, key=lambda candidate: candidate.cycles(device), default=None)
    return None


def sides(problem: Problem, device: Device) -> Iterator[tuple[Side, int, bool]]:
    """Yields x as it is and, where possible, x rewritten as rows of channels: side, kind of copy, whether rows.

    Rewriting rounds x, so that strict float32 cannot use it.
    """
    side, item = Side.of(problem), 16 // problem.item_bytes
    copy = copy_of(side)
    yield side, copy, False
    if _strict(problem):
        return
    if copy != PIECES and side.reduced % item == 0 and prod(side.x_size) <= INT32_MAX and device.workspace_bytes:
        yield replace(side, x=channels_last_strides(_read(problem))), PIECES, True


def _all(problem: Problem, device: Device) -> Iterator[Candidate]:
    """Yields every candidate that fits the device."""
    for side, copy, rows in sides(problem, device):
        yield from candidates(side, copy, problem.item_bytes, device, rows)


def predicted(problem: Problem, device: Device, most: int) -> list[Candidate]:
    """Returns the `most` predicted fastest builds, each with its fastest box."""
    found: dict[tuple[Build, bool], Candidate] = {}
    for each in _all(problem, device):
        other = found.get((each.build, each.rows))
        if other is None or each.cycles(device) < other.cycles(device):
            found[each.build, each.rows] = each
    return sorted(found.values(), key=lambda each: each.cycles(device))[:most]


# ---- The launches.


def _packed_order(work: Work) -> tuple[int, ...]:
    """Returns the indices of all taps in the order in which blocks use them."""
    kernel = work.side.problem.geometry.kernel
    order = []
    for row in work.rows:
        for _, _, tap in work.inner.taps:
            d, h, w = (*row.taps, *tap[work.outer_count :])
            order.append((d * kernel[1] + h) * kernel[2] + w)
    return tuple(order)


def _source_tables(work: Work) -> Constants:
    """Returns tables of sources and rows of taps (mma_tile.cuh): first source of a phase, first row of a source."""
    first_source = (0, *accumulate(len(phase) for phase in work.phases))
    first_row = (0, *accumulate(len(source.rows) for source in work.sources))
    places, least = [row.place for row in work.rows], [source.least for source in work.sources]
    return (
        ("kFirstSource", first_source),
        ("kFirstRow", first_row),
        *((f"kLeast{axis}", tuple(each[i] for each in least)) for i, axis in enumerate("DHW")),
        *((f"kRow{axis}", tuple(each[i] for each in places)) for i, axis in enumerate("DHW")),
        *((f"kLineStep{axis}", step) for axis, step in zip("DHW", work.line_steps, strict=True)),
    )


def _step_tables(found: Candidate) -> Constants:
    """Returns tables of the steps of a chunk (mma_tile.cuh): rows of taps, source in its phase, whether first.

    Blocks that leave steps out also need the first row of taps of every step, and the first step of every source.
    """
    steps, first, most = [], [0], found.build.rows
    for phase in found.work.phases:
        for number, source in enumerate(phase):
            rows = len(source.rows)
            steps += [(min(most, rows - row), number, int(row == 0)) for row in range(0, rows, most)]
        first.append(len(steps))
    counts, numbers, begins = zip(*steps, strict=True) if steps else ((), (), ())
    of_source = (-(-len(source.rows) // most) for source in found.work.sources)
    cropping: Constants = (("kStepRow", (0, *accumulate(counts))), ("kSourceStep", (0, *accumulate(of_source))))
    return (
        ("kCrops", found.build.crops),
        *(cropping if found.build.crops else ()),
        ("kRows", most),
        ("kWholeSteps", all(count == most for count in counts)),
        ("kMostSources", max(map(len, found.work.phases))),
        ("kManySources", max(map(len, found.work.phases)) > MAX_SOURCES),
        ("kFirstStep", tuple(first)),
        ("kStepRows", counts),
        ("kStepSource", numbers),
        ("kStepBegins", begins),
    )


def _window_tables(work: Work) -> Constants:
    """Returns tables of the inner taps (phase, window, shift in the window) and of the windows (place, span)."""
    windows = {tap: (i, shift) for i, window in enumerate(work.windows) for tap, shift in window.taps}
    taps = range(len(work.inner.taps))
    return (
        ("kPhases", len(work.inner.phases)),
        ("kTaps", len(taps)),
        ("kWindows", len(work.windows)),
        ("kTapPhase", tuple(phase for phase, _, _ in work.inner.taps)),
        ("kTapWindow", tuple(windows[tap][0] for tap in taps)),
        ("kTapShift", tuple(windows[tap][1] for tap in taps)),
        ("kWindowSpan", tuple(window.span for window in work.windows)),
        ("kUse", tuple(tap for window in work.windows for tap, _ in window.taps)),
        ("kFirstUse", (0, *accumulate(len(window.taps) for window in work.windows))),
        *((f"kWindow{axis}", tuple(w.place[i] for w in work.windows)) for i, axis in enumerate("DHW")),
        *(
            (f"kPhase{axis}", tuple(classes.start(phase[i]) for phase in work.inner.phases))
            for i, (axis, classes) in enumerate(zip("DHW", work.classes, strict=True))
        ),
    )


def _layout_constants(found: Candidate) -> Constants:
    """Returns the constants that `mma` and `mma_pack` must agree on."""
    side, build = found.work.side, found.build
    return (
        ("Scalar", SCALARS[side.problem.dtype]),
        ("kGroups", side.problem.geometry.groups),
        ("kHalves", found.halves),
        ("kReduced", side.reduced),
        ("kOuts", side.outs),
        ("kSteps", build.steps),
        ("kStepWords", found.work.step_bytes // 4),
        ("kTilesN", build.tiles_n),
        ("kWarpsN", build.warps_n),
    )


def _packed_bytes(found: Candidate) -> int:
    order = _packed_order(found.work)
    g = found.work.side.problem.geometry
    return g.groups * found.slices * found.chunks * len(order) * found.tap_bytes


def _pack(found: Candidate) -> Launch:
    side, build = found.work.side, found.build
    p, g = side.problem, side.problem.geometry
    order = _packed_order(found.work)
    strip = 8 * build.tiles_n
    taps_at_once = max(1, min(len(order), PACK_ELEMENTS // (strip * found.chunk)))
    pieces = -(-len(order) // taps_at_once)
    shared = p.item_bytes * taps_at_once * (strip * found.chunk + 1)
    return Launch(
        kernel="mma_pack",
        constants=(
            ("kThreads", PACK_THREADS),
            ("kMinBlocks", 1),
            *_layout_constants(found),
            ("kAllTaps", len(order)),
            ("kOrder", order),
            ("kTapsAtOnce", taps_at_once),
            ("kTapsInner", side.weight[1] != 1),
            ("kSharedBytes", shared),
            ("kKernelH", g.kernel[1]),
            ("kKernelW", g.kernel[2]),
        ),
        grid=(g.groups * found.slices * found.chunks * build.warps_n * pieces, 1, 1),
        threads=PACK_THREADS,
        shared_bytes=shared,
        pointers=MMA_PACK.pointers(weight="weight", packed="workspace"),
        scalars=MMA_PACK.pack(stride=side.weight, group=g.in_per_group * p.weight[0]),
    )


def _store_width(found: Candidate) -> int:
    """Returns how many outputs of a contiguous line one access stores: 1 unless every line begins at a multiple.

    The result is kVector of mma_stores.cuh, half of it or 1: the largest that divides the width and strides of y.
    """
    side, most = found.work.side, found.store_vector
    if side.gathers[2].output_step != found.store_phases:  # neighbours in shared memory are not neighbours in y
        return 1
    n, c, d, h, w = side.y
    for width in (most, most // 2):
        if width > 1 and w == 1 and not any(v % width for v in (n, c, d, h, side.y_size[2])):
            return width
    return 1


def _store_lanes(found: Candidate) -> int:
    """Returns how many lanes store a line of y: its number of accesses, rounded up to a power of two, at most 32."""
    each = max(_store_width(found), 4 // found.out_bytes)
    accesses = -(-found.box.tile[2] * found.store_phases // each)
    lanes = 1
    while lanes < min(accesses, 32):
        lanes *= 2
    return lanes


def _main(found: Candidate) -> Launch:
    side, build, work = found.work.side, found.build, found.work
    p = side.problem
    vector_stores = side.y[1] == 1 and side.outs % 4 == 0
    constants: Constants = (
        ("kThreads", build.threads),
        ("kMinBlocks", build.blocks),
        ("Epilogue", f"tconv3d::LeavingMoments<{p.activation}>" if leaves_moments(p) else p.activation),
        ("kMomentBand", _moment_band(found)),
        *_layout_constants(found),
        ("kUnrolled", build.unrolled),
        ("kSplits", build.splits),
        ("Out", SCALARS["float32" if build.splits > 1 else p.dtype]),
        ("kTilesM", build.tiles_m),
        ("kWarpsM", build.warps_m),
        ("kMostRows", work.most_rows),
        ("kStages", build.stages),
        ("kWeightStages", found.weight_stages),
        ("kResident", build.resident),
        ("kAhead", build.ahead),
        ("kAlongW", build.along),
        ("kHaloBuffers", found.halo_buffers),
        ("kCopy", min(found.copy, PAIRS)),
        ("kOddLines", found.copy == ODD_PAIRS),
        ("kOddEnd", found.copy == ODD_PAIRS and prod(_read(p)) % 2 == 1),
        ("kJobPairs", found.job_pairs),
        ("kRounds", found.rounds),
        ("kUnitC", side.x[1] == 1),
        ("kLastOut", side.y[4] != 1),
        ("kVectorStores", vector_stores),
        ("kStoreTiles", found.store_tiles),
        ("kAllTaps", len(work.rows) * len(work.inner.taps)),
        *_source_tables(work),
        *_step_tables(found),
        *_window_tables(work),
        *(
            (f"k{name}{axis}", getattr(gather, attribute))
            for axis, gather in zip("DHW", side.gathers, strict=True)
            for name, attribute in (("Phases", "phases"), ("InputStep", "input_step"), ("OutputStep", "output_step"))
        ),
        *(
            (f"k{name}{axis}", getattr(classes, attribute))
            for axis, classes in zip("DHW", work.classes, strict=True)
            for name, attribute in (("Classes", "number"), ("ClassInput", "x_step"), ("ClassOutput", "y_step"))
        ),
        ("kMayPrecede", any(classes.precedes for classes in work.classes)),
    )
    return Launch(
        kernel="mma",
        constants=constants,
        grid=(found.grid, 1, 1),
        threads=build.threads,
        shared_bytes=found.shared_bytes,
        pointers=MMA.pointers(
            x="rows" if found.rows else "x",
            packed="workspace",
            bias="bias",
            y="parts" if build.splits > 1 else "y",
            left="moments" if leaves_moments(p) else "null",
        ),
        scalars=_scalars(found),
    )


def _scalars(found: Candidate) -> bytes:
    """Returns the bytes of the kernel's arguments after its pointers."""
    side, box = found.work.side, found.box
    tile_d, tile_h, tile_w = box.tile
    return MMA.pack(
        x_strides=side.x,
        y_strides=side.y,
        x_size=side.x_size,
        y_size=side.y_size,
        x_elements=last_offset(_read(side.problem), side.x) + 1,
        part=_part(found),
        batch=side.problem.batch,
        tiles_of_block=found.tiles_of_block,
        tile_n=box.items,
        tile=box.tile,
        halo=box.halo,
        plane=box.plane,
        line=box.line,
        sheet=box.sheet,
        slots=box.slots,
        list=found.list_bytes,
        store_line=found.store_line,
        store_pitch=found.store_pitch,
        store_lanes=_store_lanes(found),
        store_width=_store_width(found),
        moment_slots=_moment_slots(found),
        **per_axis("tiles", box.tiles[1:]),
        tile_d=tile_d,
        tile_h=tile_h,
        blocks_w=tile_w // (16 if found.build.along else found.build.tiles_m),
        **per_axis("halo", box.halo),
        pairs=box.line_pairs,
        **per_axis("classes", [classes.present for classes in found.work.classes]),
    )
