"""The matrix instructions of the halo kernel: which shifts feed which phases, and in which order columns stand.

Follows from the geometry alone (halo_layout.cuh explains the words).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import permutations, product
from math import prod

from ...planning.geometry import Axis, Triple

MAX_COLUMNS = 256  # of one matrix instruction, and of a slab's accumulators
MAX_PARTS = 4  # phases along w that lie side by side in a row


@dataclass(frozen=True)
class Feed:
    """One tap of one dimension: input position q + offset feeds output `field` of position q.

    When gathering, a position has one output, and `field` is the part of the row that is read.
    """

    offset: int
    field: int
    tap: int


@dataclass(frozen=True)
class Dimension:
    """One dimension as one column tile sees it: all phases of it, or the only one that the tile computes."""

    feeds: tuple[Feed, ...]
    fields: int  # outputs per position
    offset: int  # of field 0 from output stride*q

    @classmethod
    def whole(cls, axis: Axis) -> Dimension:
        feeds = tuple(Feed(-axis.shift(t), axis.phase(t), t) for t in range(axis.kernel))
        return cls(feeds, axis.stride, 0)

    @classmethod
    def phase(cls, axis: Axis, phase: int) -> Dimension:
        return cls(tuple(Feed(-axis.shift(t), 0, t) for t in axis.taps(phase)), 1, phase)

    @classmethod
    def marching(cls, axis: Axis) -> Dimension:
        """Depth when blocks walk along it: plane i feeds outputs i*stride - padding + tap*dilation."""
        feeds = tuple(Feed(0, t * axis.dilation, t) for t in range(axis.kernel))
        return cls(feeds, max(axis.dilation * (axis.kernel - 1) + 1, axis.stride), 0)

    @classmethod
    def gathering(cls, axis: Axis, phases: Iterable[int]) -> Dimension:
        """The taps that read certain phases of dy; each phase is a part."""
        feeds = tuple(Feed(axis.shift(t), part, t) for part, phase in enumerate(phases) for t in axis.taps(phase))
        return cls(feeds, 1, 0)

    @property
    def origin(self) -> int:
        return min((feed.offset for feed in self.feeds), default=0)

    @property
    def span(self) -> int:
        """How many more inputs than positions a line of the halo has."""
        return max((feed.offset for feed in self.feeds), default=0) - self.origin

    @property
    def shape(self) -> list[tuple[int, int]]:
        """What two dimensions must share for the same instructions to serve both."""
        return [(feed.offset - self.origin, feed.field) for feed in self.feeds]


Dimensions = tuple[Dimension, Dimension, Dimension]
Split = tuple[bool, bool, bool]  # which dimensions' phases are computed by column tiles of their own


def splittable(axis: Axis) -> bool:
    """Whether the phases differ only in where they read and write."""
    shapes = [sorted(Dimension.phase(axis, phase).shape) for phase in range(axis.stride)]
    return axis.stride > 1 and all(shape == shapes[0] for shape in shapes)


def separable(axis: Axis) -> bool:
    """Whether each phase can be computed by itself: it has taps, though maybe not as many as another."""
    return axis.stride > 1 and all(axis.taps(phase) for phase in range(axis.stride))


def instruction_cycles(columns: int) -> float:
    """Of one matrix instruction with both operands in shared memory, of 32 bytes of K: measured (docs)."""
    return max(columns / 2, operand_cycles(columns))


def operand_cycles(columns: int) -> float:
    """Of shared memory, for both operands of such an instruction: 64 rows and the columns."""
    return 16 + columns / 4


def register_cycles(columns: int) -> float:
    """The same where the first operand comes out of registers."""
    return max(columns / 2 + 2, 14)


@dataclass(frozen=True)
class Program:
    """The matrix instructions of one chunk of channels, for any width of a field.

    The compiler keeps matrix instructions apart (and waits between them) whose accumulators overlap in part, so the
    columns are divided into units once and for all, and an instruction computes one unit: with zero weights for those
    of its fields that the shift does not feed.
    """

    sources: tuple[Dimensions, ...]
    fields: tuple[Triple, ...]  # in the order of the columns: output offsets
    unit: int  # fields of one instruction
    patterns: tuple[tuple[int, ...], ...]  # the units that the shifts of a pattern feed
    shifts: tuple[tuple[Triple, ...], ...]  # of each source and pattern: displacements of the halo, and the part
    taps: tuple[tuple[Triple | None, ...], ...]  # of each shift: of every field of the units it feeds
    phases: tuple[Triple, ...] = ((0, 0, 0),)  # of each source: which elements of the tensor it has
    read_step: Triple = (1, 1, 1)  # from one of them to the next
    used_parts: int = 1

    @classmethod
    def make(cls, dimensions: Dimensions, fields: tuple[Triple, ...], unit: int, fine: bool = False) -> Program:
        place = {field: i for i, field in enumerate(fields)}
        fed: dict[Triple, dict[int, Triple]] = {}
        origin_d, origin_h, origin_w = (dimension.origin for dimension in dimensions)
        for d, h, w in product(*(dimension.feeds for dimension in dimensions)):
            shift = (d.offset - origin_d, h.offset - origin_h, w.offset - origin_w)
            fed.setdefault(shift, {})[place[d.field, h.field, w.field]] = (d.tap, h.tap, w.tap)
        by_pattern: dict[tuple[int, ...], list[tuple[Triple, tuple[Triple | None, ...]]]] = {}
        for displacement in sorted(fed):
            taps = fed[displacement]
            fed_units = sorted({field // unit for field in taps})
            for units in [(u,) for u in fed_units] if fine else [tuple(fed_units)]:
                panel = tuple(taps.get(u * unit + i) for u in units for i in range(unit))
                by_pattern.setdefault(units, []).append((displacement, panel))
        return cls(
            (dimensions,),
            fields,
            unit,
            tuple(by_pattern),
            tuple(tuple((*shift, 0) for shift, _ in shifts) for shifts in by_pattern.values()),
            tuple(taps for shifts in by_pattern.values() for _, taps in shifts),
        )

    @classmethod
    def gathering(cls, axes: tuple[Axis, Axis, Axis]) -> Program:
        """Of the input gradient: a source for every phase plane along d and h (and w, if a row cannot hold those)."""
        beside = axes[2].stride <= MAX_PARTS
        choices: list[list[Triple]] = [
            [(phase,) for phase in range(axis.stride) if axis.taps(phase)] for axis in axes
        ]
        if beside:
            choices[2] = [tuple(range(axes[2].stride))]
        sources, phases, shifts, taps = [], [], [], []
        for d_phases, h_phases, w_phases in product(*choices):
            d = Dimension.gathering(axes[0], d_phases)
            h = Dimension.gathering(axes[1], h_phases)
            w = Dimension.gathering(axes[2], w_phases)
            own = sorted(
                ((a.offset - d.origin, b.offset - h.origin, c.offset - w.origin, c.field), (a.tap, b.tap, c.tap))
                for a, b, c in product(d.feeds, h.feeds, w.feeds)
            )
            sources.append((d, h, w))
            phases.append((d_phases[0], h_phases[0], w_phases[0]))
            shifts.append(tuple(shift for shift, _ in own))
            taps += [(tap,) for _, tap in own]
        return cls(
            tuple(sources),
            ((0, 0, 0),),
            1,
            ((0,),),
            tuple(shifts),
            tuple(taps),
            tuple(phases),
            tuple(axis.stride for axis in axes),
            axes[2].stride if beside else 1,
        )

    @property
    def dimensions(self) -> Dimensions:
        return self.sources[0]

    @cached_property
    def span(self) -> Triple:
        """How much larger than a tile its halo is."""
        return tuple(max(source[axis].span for source in self.sources) for axis in range(3))

    @property
    def parts(self) -> int:
        """Into which a row is divided: a power of two."""
        return 1 << (self.used_parts - 1).bit_length()

    @cached_property
    def chunk_fields(self) -> int:
        """Fields of all panels of a chunk."""
        return sum(len(taps) for taps in self.taps)

    @property
    def panel_fields(self) -> int:
        """Of the largest panel."""
        return max((len(units) for units in self.patterns), default=0) * self.unit

    @cached_property
    def instructions(self) -> int:
        """Of one slab and one step."""
        units = [len(self.patterns[i % len(self.patterns)]) for i in range(len(self.shifts))]
        return sum(len(shifts) * count for shifts, count in zip(self.shifts, units, strict=True))

    def cycles(self, width: int, beside: float = 0.0, registers: bool = False) -> float:
        """Of one slab and one step of 32 bytes; `beside`: what each instruction costs beside its product;
        `registers`: whether its first operand comes out of these."""
        cycles = register_cycles if registers else instruction_cycles
        return self.instructions * (cycles(self.unit * width) + beside)

    def shared_cycles(self, width: int) -> float:
        """Of shared memory, for the operands of one slab and one step."""
        return self.instructions * operand_cycles(self.unit * width)


def _field_orders(counts: Triple) -> Iterator[tuple[Triple, ...]]:
    """Orders of the phases worth trying: nested loops."""
    for order in permutations(range(3)):
        fields = []
        for phases in product(*(range(counts[axis]) for axis in order)):
            by_axis = dict(zip(order, phases, strict=True))
            fields.append((by_axis[0], by_axis[1], by_axis[2]))
        yield tuple(fields)


@lru_cache(maxsize=256)
def gather_program(axes: tuple[Axis, Axis, Axis], march: bool = False) -> Program:
    """Marching: the fields are the planes of positions that those of one step of the march feed."""
    found = Program.gathering(axes)
    if not march:
        return found
    shifts = [axes[0].shift(tap) for tap in range(axes[0].kernel)]
    return replace(found, fields=tuple((plane, 0, 0) for plane in range(max(shifts) - min(shifts) + 1)))


@lru_cache(maxsize=256)
def programs(
    axes: tuple[Axis, Axis, Axis],
    march: bool,
    split: Split,
    width: int,
    beside: float = 0.0,
    fine: bool = False,
    registers: bool = False,
) -> tuple[Program, ...]:
    """One program for each combination of the split dimensions' phases, those with the most taps first: the same but
    for origins, offsets and taps, and, where phases have different numbers of these, shifts.

    Order and division of the columns are those with the cheapest instructions (`beside`: what each costs beside its
    product; `registers`: whether their first operand comes out of these); of such, the widest, which take least out
    of shared memory.
    """
    choices = [
        [Dimension.phase(axis, phase) for phase in range(axis.stride)] if apart else [Dimension.whole(axis)]
        for axis, apart in zip(axes, split, strict=True)
    ]
    if march:
        choices[0] = [Dimension.marching(axes[0])]
    variants = sorted(
        ((d, h, w) for d, h, w in product(*choices)), key=lambda each: -prod(len(axis.feeds) for axis in each)
    )
    d, h, w = variants[0]
    orders = dict.fromkeys(_field_orders((d.fields, h.fields, w.fields)))
    count = d.fields * h.fields * w.fields
    units = [unit for unit in range(1, count + 1) if count % unit == 0 and unit * width <= MAX_COLUMNS]
    candidates = [Program.make(variants[0], fields, unit) for fields, unit in product(orders, units)]
    best = min(candidates, key=lambda c: (c.cycles(width, beside, registers), len(c.patterns), -c.unit))
    return tuple(Program.make(dimensions, best.fields, best.unit, fine) for dimensions in variants)
