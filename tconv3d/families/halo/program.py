"""Derives the matrix instructions of the halo kernel: which shifts feed which phases, and the order of the columns.

They follow from the geometry alone. The header of halo_layout.cuh explains the terms field, unit, source, part,
panel, pattern and variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from math import prod

from ...planning.geometry import Axis, Triple
from ...planning.plain_data import once

MAX_COLUMNS = 256  # most columns of one matrix instruction, and of a slab's accumulators
MAX_PARTS = 4  # most phases along w that lie side by side in a row


@dataclass(frozen=True)
class Feed:
    """One tap of one dimension: input position q + offset feeds output `field` of position q.

    In the input gradient a position has one output, and `field` is the part of the row that the tap reads.
    """

    offset: int
    field: int
    tap: int


@dataclass(frozen=True)
class Dimension:
    """One dimension as a column tile sees it: with all its phases, or with the only phase that the tile computes."""

    feeds: tuple[Feed, ...]
    fields: int  # outputs per position
    offset: int  # output of field 0, relative to output stride*q

    @classmethod
    def whole(cls, axis: Axis) -> Dimension:
        feeds = tuple(Feed(-axis.shift(t), axis.phase(t), t) for t in range(axis.kernel))
        return cls(feeds, axis.stride, 0)

    @classmethod
    def phase(cls, axis: Axis, phase: int) -> Dimension:
        return cls(tuple(Feed(-axis.shift(t), 0, t) for t in axis.taps(phase)), 1, phase)

    @classmethod
    def marching(cls, axis: Axis) -> Dimension:
        """Returns depth for a march, where input plane i feeds outputs i*stride - padding + tap*dilation."""
        feeds = tuple(Feed(0, t * axis.dilation, t) for t in range(axis.kernel))
        return cls(feeds, max(axis.dilation * (axis.kernel - 1) + 1, axis.stride), 0)

    @classmethod
    def gathering(cls, axis: Axis, phases: Iterable[int]) -> Dimension:
        """Returns the taps that read the given phases of dy; each phase is a part."""
        feeds = tuple(Feed(axis.shift(t), part, t) for part, phase in enumerate(phases) for t in axis.taps(phase))
        return cls(feeds, 1, 0)

    @property
    def origin(self) -> int:
        return min((feed.offset for feed in self.feeds), default=0)

    @property
    def span(self) -> int:
        """The number of inputs that a halo has beyond the positions of its tile along this dimension."""
        return max((feed.offset for feed in self.feeds), default=0) - self.origin

    @property
    def shape(self) -> list[tuple[int, int]]:
        """The displacement and field of each tap. Dimensions of equal shape can use the same instructions."""
        return [(feed.offset - self.origin, feed.field) for feed in self.feeds]


Dimensions = tuple[Dimension, Dimension, Dimension]
Split = tuple[bool, bool, bool]  # for d, h and w: whether each phase is computed by column tiles of its own


def splittable(axis: Axis) -> bool:
    """Returns whether the phases of an axis differ only in where they read and write."""
    shapes = [sorted(Dimension.phase(axis, phase).shape) for phase in range(axis.stride)]
    return axis.stride > 1 and all(shape == shapes[0] for shape in shapes)


def separable(axis: Axis) -> bool:
    """Returns whether each phase of an axis can have column tiles of its own: every phase has at least one tap."""
    return axis.stride > 1 and all(axis.taps(phase) for phase in range(axis.stride))


def instruction_cycles(columns: int) -> float:
    """Returns the cycles of one matrix instruction of 32 bytes of K with both operands in shared memory.

    Tensor cores take columns / 2 cycles, and shared memory must deliver the operands (docs/performance/halo.md).
    """
    return max(columns / 2, operand_cycles(columns))


def operand_cycles(columns: int) -> float:
    """Returns the cycles for which a matrix instruction of 32 bytes of K occupies shared memory.

    It reads 64 rows of the first operand and the columns of the second, at 128 bytes per cycle.
    """
    return 16 + columns / 4


def register_cycles(columns: int) -> float:
    """Returns the cycles of one matrix instruction of 32 bytes of K with its first operand in registers."""
    return max(columns / 2 + 2, 14)


@dataclass(frozen=True)
class Program:
    """The matrix instructions of one chunk of channels, for any width of a field.

    The compiler serializes matrix instructions whose accumulators overlap only in part. The columns are therefore
    divided into units once, and every instruction computes one unit, with zero weights for the fields of the unit
    that its shift does not feed.
    """

    sources: tuple[Dimensions, ...]
    fields: tuple[Triple, ...]  # output offsets of each field along d, h and w, in the order of the columns
    unit: int  # number of fields that one instruction computes
    patterns: tuple[tuple[int, ...], ...]  # for each pattern: the units that its shifts feed
    shifts: tuple[tuple[Triple, ...], ...]  # for each source and pattern: displacements in the halo, and the part
    taps: tuple[tuple[Triple | None, ...], ...]  # for each shift: the tap of every field of the units it feeds
    phases: tuple[Triple, ...] = ((0, 0, 0),)  # for each source: its first element of the tensor along d, h and w
    read_step: Triple = (1, 1, 1)  # elements of the tensor from one element of a source to the next
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
        """Returns the program of an input gradient.

        Every phase plane along d and h is a source. Phases along w are parts of a row if there are at most
        `MAX_PARTS` of them, and sources otherwise.
        """
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

    @once
    def span(self) -> Triple:
        """The number of positions along each dimension by which a halo is larger than its tile."""
        return tuple(max(source[axis].span for source in self.sources) for axis in range(3))

    @property
    def parts(self) -> int:
        """The number of parts of a row: `used_parts`, rounded up to a power of two."""
        return 1 << (self.used_parts - 1).bit_length()

    @once
    def chunk_fields(self) -> int:
        """The number of fields in all panels of a chunk."""
        return sum(len(taps) for taps in self.taps)

    @property
    def panel_fields(self) -> int:
        """The number of fields in the largest panel."""
        return max((len(units) for units in self.patterns), default=0) * self.unit

    @once
    def instructions(self) -> int:
        """The number of matrix instructions for one slab and one step of 32 bytes of K."""
        units = [len(self.patterns[i % len(self.patterns)]) for i in range(len(self.shifts))]
        return sum(len(shifts) * count for shifts, count in zip(self.shifts, units, strict=True))

    def cycles(self, width: int, registers: bool = False) -> float:
        """Returns the tensor core cycles of one slab and one step of 32 bytes of K, for fields of `width` columns.

        `registers` says whether the first operand is in registers.
        """
        cycles = register_cycles if registers else instruction_cycles
        return self.instructions * cycles(self.unit * width)

    def shared_cycles(self, width: int) -> float:
        """Returns the shared memory cycles for the operands of one slab and one step of 32 bytes of K."""
        return self.instructions * operand_cycles(self.unit * width)


def _field_orders(counts: Triple) -> Iterator[tuple[Triple, ...]]:
    """Yields the orders of the phases that are tried: nested loops over the three dimensions, in any nesting."""
    for order in permutations(range(3)):
        fields = []
        for phases in product(*(range(counts[axis]) for axis in order)):
            by_axis = dict(zip(order, phases, strict=True))
            fields.append((by_axis[0], by_axis[1], by_axis[2]))
        yield tuple(fields)


@lru_cache(maxsize=256)
def gather_program(axes: tuple[Axis, Axis, Axis], march: bool = False) -> Program:
    """Returns the program of an input gradient. In a march, the fields are the planes of dx that one step feeds."""
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
    """Returns one program for each combination of the split dimensions' phases, programs with the most taps first.

    The programs have the same columns and differ in origins, offsets and taps; if phases have different numbers of
    taps, they differ in shifts too.

    The order of the columns and their division into units are the ones with the fewest cycles, then the fewest
    patterns, then the widest units, which read least from shared memory. `beside` is the overhead of each instruction
    in cycles; `registers` says whether the first operand is in registers; `fine` makes panels of one unit.
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
    cycles_of = register_cycles if registers else instruction_cycles
    units = [unit for unit in range(1, count + 1) if count % unit == 0 and unit * width <= MAX_COLUMNS]
    fields, unit = _cheapest(variants[0], orders, units, lambda unit: cycles_of(unit * width) + beside)
    return tuple(Program.make(dimensions, fields, unit, fine) for dimensions in variants)


def _cheapest(
    dimensions: Dimensions, orders: Iterable[tuple[Triple, ...]], units: list[int], cost: Callable[[int], float]
) -> tuple[tuple[Triple, ...], int]:
    """Returns the order of the fields, and the fields of a unit, that `programs` wants, without making programs.

    `cost` returns the cycles of an instruction for a unit.
    """
    fed: dict[Triple, list[Triple]] = {}
    for d, h, w in product(*(dimension.feeds for dimension in dimensions)):
        fed.setdefault((d.offset, h.offset, w.offset), []).append((d.field, h.field, w.field))
    found = []
    for fields in orders:
        place = {field: i for i, field in enumerate(fields)}
        places = [[place[field] for field in each] for each in fed.values()]
        for unit in units:
            patterns = [frozenset([i // unit for i in each]) for each in places]
            key = sum(map(len, patterns)) * cost(unit), len(set(patterns)), -unit
            found.append((key, fields, unit))
    _, fields, unit = min(found, key=lambda each: each[0])
    return fields, unit
