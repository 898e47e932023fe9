"""Defines what is compiled of the halo kernel (`Build`) and how run-time arguments cut a volume for it (`Tiling`).

The headers of halo.cuh and halo_layout.cuh explain most terms. A build on lines takes input lines as they lie in
memory (halo_lines.cuh). An image is a copy of outputs in shared memory, as they will lie in global memory
(halo_images.cuh, halo_joint.cuh). A portion is a range of a tile's chunks for split-K. A sheet is a plane of a halo.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import product
from math import gcd, prod
from operator import attrgetter
from typing import ClassVar, NamedTuple

from ...planning.geometry import Geometry, Triple
from ...planning.launch import Constants, Launch
from ...planning.problem import Strides
from ...planning.scalars import INT32_MAX, SCALARS
from ...planning.turning import channel_rows
from .arguments import PACK
from .job import Job
from .program import Program, Split, gather_program, programs

SLAB = 64  # positions of one matrix instruction, and thus of a slab
STEP_BYTES = 32  # bytes of K that one matrix instruction takes
BARRIER_BYTES = 1024
SCRATCH_BYTES = 4 * 1024  # bytes of shared memory per consumer through which stores pass
LOADER_BYTES = 5120  # bytes of shared memory because loaders' tables have whole batches of all loaders
PACKED_AT_ONCE = 2048  # most weights that a block of the packing kernel holds, so that all their loads are in flight
PACKING_BLOCKS = 600  # fewest blocks of the packing kernel if the weight is large: more than run at once
PACKING_THREADS = 128
REGISTERS = 65536  # registers of a multiprocessor
CONSUMER_REGISTERS = 80  # fewest registers of a consumer thread besides its accumulators
MANY_SUMS = 96  # accumulators of a consumer thread above which FEWER_REGISTERS applies beside two producer warpgroups
FEWER_REGISTERS = 64  # fewest registers of a consumer thread besides more than MANY_SUMS accumulators
PRODUCER_REGISTERS = 64  # registers of a producer thread with 16 elements in flight; consumers get the rest
STORE_CYCLES = 14  # cycles to store one accumulator, from the last product of a tile to the first of the next
MANY_REGISTERS = 104  # registers of a producer thread with 32 elements in flight
COPYING_REGISTERS = 40  # registers of a producer thread that issues asynchronous copies
LEAST_REGISTERS = 32  # fewest registers of a producer thread, beside three consumers
STRICT_CONSUMER_REGISTERS = 56  # fewest registers of a consumer thread besides accumulators in strict float32
STRICT_PRODUCER_REGISTERS = 88  # registers of a producer thread in strict float32, which splits values in two
VECTORS_OF_TURN = 4  # vectors that a loader stores together (kTogether in halo_vectors.cuh)
MAX_BESIDE = 1.2  # most elements that loads of whole vectors may fetch, as a multiple of the halo's elements
LINE_REGISTERS = 164  # most registers of a consumer thread for accumulators and operands: builds with more spill
REGISTER_SETS = 3  # sets of operands in a consumer's registers: one is loaded while two multiply
STORED_BY_PARTNER = -2
WITHOUT_PARTNER = -1
NOT_PACKED = -2  # marks a field that a panel of the packing kernel's table does not have


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    return ceil_div(value, multiple) * multiple


class Run(IntEnum):
    """The dimensions that a contiguous run of a weight's memory covers (`kRun` in pack.cuh has the same values)."""

    TAPS = 0
    COLUMN_TAPS = 1
    CHANNEL_TAPS = 2
    COLUMNS = 3
    CHANNELS = 4


@dataclass(frozen=True)
class VectorTurn:
    """The input vectors that a loader takes in one batch (BatchTransposed in halo_vectors.cuh)."""

    vectors: int
    shares: int  # batches for all channels of a chunk
    noted_bytes: int  # bytes of shared memory for the places of the vectors


@dataclass(frozen=True)
class VariantKind:
    """All variants that have the same numbers of shifts."""

    count: int
    panels: int
    cycles_per_slab: float  # tensor core cycles of a slab for all of K
    shared_cycles: float  # shared memory cycles for the operands of a slab for all of K
    panel_bytes: int  # bytes of all panels


@dataclass(frozen=True)
class Build:
    """The choices that one compilation of the kernel fixes."""

    geometry: Geometry
    gather: bool
    dtype: str
    march: bool
    split: Split
    groups_per_tile: int
    out_tile: int
    row_bytes: int
    slabs: int  # slabs per consumer
    consumers: int
    producers: int
    stages: int
    resident: bool
    slots: int
    shared_bytes: int
    strict: bool = False  # whether each float32 product is three TF32 products
    copied: bool = False  # whether asynchronous copies bring rows of channels to the stages
    rewritten: bool = False  # whether a previous launch rounds the rows of channels that are copied
    buffers: int = 0  # image buffers per consumer, for output rows that begin at any address; 0 without images
    lines: bool = False  # whether stages hold input lines as they lie in memory (halo_lines.cuh)
    joint: bool = False  # whether a build on lines stores outputs as long runs from any address (halo_joint.cuh)
    in_registers: bool = False  # whether consumers round copied float32 values (halo_registers.cuh)
    portioned: bool = False  # split-K of all tiles: whether blocks divide their chunks and store partial sums
    fine: bool = False  # whether every panel has one unit
    divided: bool = False  # split-K in a block: whether two consumers have the same slabs and alternate at panels
    spread: bool = False  # split-K of the last tiles: whether blocks divide their chunks, to end at the same time
    merged: int = 1  # groups of the layer per group of `geometry`, with zero weights from one to another

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The program of each variant."""
        if self.gather:
            return (gather_program(self.geometry.axes, self.march),)
        registers = self.lines and self.item_bytes == 2
        return programs(
            self.geometry.axes, self.march, self.split, self.out_tile, self.beside_instruction, self.fine, registers
        )

    @cached_property
    def window(self) -> int:
        """The number of output planes that one step of a march feeds."""
        return len(self.program.fields) if self.gather else self.program.dimensions[0].fields

    @property
    def march_step(self) -> int:
        """The number of output planes that a step of a march completes."""
        return 1 if self.gather else self.geometry.axes[0].stride

    @property
    def march_padding(self) -> int:
        """The padding p of a march: the first output plane that step i feeds is i * march_step - p."""
        axis = self.geometry.axes[0]
        return max(map(axis.shift, range(axis.kernel))) if self.gather else axis.padding

    @property
    def beside_instruction(self) -> float:
        """The overhead of a matrix instruction in cycles, by which the order of a march's columns is chosen.

        The values were chosen by measurement on an H200; 16-bit operands out of registers have no overhead."""
        if not self.march or (self.lines and self.item_bytes == 2):
            return 0.0
        return 8.0 if self.item_bytes == 4 and self.geometry.in_per_group > self.step_items else 14.0

    @property
    def program(self) -> Program:
        return self.programs[0]

    @cached_property
    def own_shifts(self) -> bool:
        """Whether variants have shifts of their own; each pattern then has room for the shifts of any variant."""
        return any(program.shifts != self.program.shifts for program in self.programs)

    @cached_property
    def pattern_shifts(self) -> tuple[int, ...]:
        """For each source and pattern, the most shifts that any variant has."""
        return tuple(max(map(len, shifts)) for shifts in zip(*(p.shifts for p in self.programs), strict=True))

    @cached_property
    def chunk_fields(self) -> int:
        """The number of fields in all panels of a chunk, with room for the most shifts of any variant."""
        p = self.program
        if not self.own_shifts:
            return p.chunk_fields
        return sum(n * len(units) * p.unit for n, units in zip(self.pattern_shifts, p.patterns, strict=True))

    @cached_property
    def span(self) -> Triple:
        """The number of positions along each dimension by which a halo is larger than its tile."""
        return tuple(max(program.span[axis] for program in self.programs) for axis in range(3))

    @cached_property
    def sheet_step(self) -> int:
        """The number of planes from one that some shift reads to the next: above 1 if the kernel is dilated."""
        return gcd(*(shift[0] for program in self.programs for shifts in program.shifts for shift in shifts)) or 1

    @property
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def written_bytes(self) -> int:
        """The bytes of an output as the kernel writes it."""
        return 4 if self.portioned else self.item_bytes

    @property
    def can_be_portioned(self) -> bool:
        return not (self.march or self.resident or self.buffers or self.lines) and self.chunks > 1

    @property
    def can_be_spread(self) -> bool:
        return self.can_be_portioned and not (self.strict or self.own_shifts or self.portioned or self.divided)

    @property
    def halves(self) -> int:
        """The number of TF32 numbers whose sum represents a value."""
        return 2 if self.strict else 1

    @property
    def terms(self) -> int:
        """The number of TF32 products per product: in strict float32 low x high, high x low and high x high."""
        return 3 if self.strict else 1

    @property
    def step_items(self) -> int:
        return STEP_BYTES // self.item_bytes

    @property
    def group_slots(self) -> int:
        """The number of channels that a group takes in a row, with padding to whole steps."""
        return round_up(self.geometry.in_per_group, self.step_items)

    @cached_property
    def channel_slots(self) -> int:
        return self.groups_per_tile * self.group_slots if self.groups_per_tile > 1 else self.geometry.in_per_group

    @property
    def part_bytes(self) -> int:
        return self.row_bytes // self.program.parts

    @cached_property
    def chunks(self) -> int:
        return ceil_div(self.channel_slots * self.item_bytes, self.part_bytes)

    @property
    def full_chunks(self) -> int:
        """The number of chunks that fill all steps of a row."""
        return self.channel_slots * self.item_bytes // self.part_bytes

    @property
    def staged(self) -> bool:
        """Whether asynchronous copies fill more than two stages, outside of marches."""
        return self.copied and not self.march and self.stages > 2

    @property
    def stages_filled(self) -> int:
        """The number of stages that are filled for one tile, or for one plane of a march."""
        return self.chunks * (self.line_planes if self.lines else len(self.program.sources))

    @cached_property
    def line_planes(self) -> int:
        """The number of planes that a step of a march reads in a build on lines."""
        return len({phase[0] for phase in self.program.phases})

    @cached_property
    def steps(self) -> int:
        """The number of steps in all chunks and terms."""
        return self.terms * ceil_div(self.channel_slots, self.step_items)

    @cached_property
    def columns(self) -> int:
        return self.groups_per_tile * len(self.program.fields) * self.out_tile

    @cached_property
    def out_tiles(self) -> int:
        return ceil_div(self.geometry.out_per_group, self.out_tile)

    @cached_property
    def column_tiles(self) -> int:
        return self.geometry.groups // self.groups_per_tile * self.out_tiles * len(self.programs)

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the panels of one chunk of every source."""
        return self.halves * self.chunk_fields * self.out_tile * self.part_bytes

    @cached_property
    def tile_bytes(self) -> int:
        """The bytes of all panels of one column tile."""
        return self.chunks * self.chunk_bytes

    @property
    def packed_bytes(self) -> int:
        """The bytes of all panels of all column tiles."""
        return self.column_tiles // len(self.programs) * sum(kind.count * kind.panel_bytes for kind in self.kinds)

    @cached_property
    def slot_bytes(self) -> int:
        return round_up(self.halves * self.program.panel_fields * self.out_tile * self.part_bytes, 1024)

    @cached_property
    def panel_bytes(self) -> int:
        return self.tile_bytes if self.resident else self.slots * self.slot_bytes

    @cached_property
    def round_slabs(self) -> int:
        """The number of slabs that all consumers compute at a time."""
        return self.slabs * self.consumers // self.turns

    @property
    def turns(self) -> int:
        """The number of consumers that alternate at the panels of the same slabs."""
        return self.consumers if self.divided else 1

    @property
    def image_rows(self) -> int:
        """The number of output rows that are stored at a time: all rows of a position in an output plane."""
        return self.program.dimensions[1].fields

    @property
    def reserved_bytes(self) -> int:
        """The bytes of shared memory for barriers, and for sums between registers and memory (halo_shared.cuh)."""
        image = self.image_rows * (self.slabs * SLAB * self.geometry.stride[2] * self.item_bytes + 32)
        images = self.buffers * self.out_tile * (round_up(image, 64) + 16)
        part = self.slabs * self.columns * SLAB * 4 if self.divided else 0
        scratch = 0 if self.lines else images or SCRATCH_BYTES
        return BARRIER_BYTES + part + self.consumers * scratch + self.joint_bytes

    @property
    def woven(self) -> int:
        """The number of slabs that share every few positions in sequence in a build on lines (halo_lines.cuh)."""
        return 4 // self.item_bytes

    @property
    def joint_bytes(self) -> int:
        """The bytes of the images of long runs in all buffers (halo_joint.cuh)."""
        return self.joint_buffers * self.out_tile * self.joint_pitch if self.joint else 0

    @property
    def joint_buffers(self) -> int:
        """The number of buffers of images of long runs: two in float32, four in the smaller 16-bit types."""
        return 8 // self.item_bytes

    @property
    def joint_pitch(self) -> int:
        """The bytes of a channel in a buffer of images of long runs, with 16 bytes for the alignment of the run."""
        return self.round_slabs * SLAB * self.image_rows * self.geometry.stride[2] * self.item_bytes + 16

    @cached_property
    def stage_rows(self) -> int:
        """The number of rows that fit a stage, with 8 bytes per position in the loaders' tables (none with lines)."""
        left = self.shared_bytes - self.reserved_bytes - self.panel_bytes
        if self.lines:
            return max(0, left // self.stages // 1024 * 1024 // self.row_bytes)
        left -= LOADER_BYTES
        per_stage = left // (self.stages * self.halves * self.row_bytes + 8 * self.shares) * self.row_bytes
        whole = max(1024, 32 * self.row_bytes) if self.copied else 1024  # a loader warp copies 32 rows per turn
        return max(0, per_stage // whole * whole // self.row_bytes)

    @cached_property
    def shares(self) -> int:
        """The number of batches in which a loader takes all channels of a chunk."""
        if self.copied:
            return 1
        in_flight = max(1, self.in_flight * self.item_bytes // 16 // self.program.parts)
        return max(1, self.part_bytes // 16 // in_flight)

    @property
    def in_flight(self) -> int:
        """The number of elements in a batch that a loader's lane has in flight; registers hold two batches.

        One producer warpgroup has more registers per thread, which are used in float32 input gradients."""
        few = self.producers == 1 and self.item_bytes == 4
        return 32 if few and self.gather and not (self.march or self.copied or self.strict) else 16

    @property
    def loaders(self) -> int:
        """The number of warps that load the halo: one producer warp streams panels unless they are resident."""
        return 4 * self.producers - (0 if self.resident else 1)

    @property
    def sums(self) -> int:
        """The number of accumulators of a consumer thread; strict float32 has those of a panel and the totals."""
        return self.halves * self.slabs * self.columns // 2

    @property
    def panels_at_once(self) -> int:
        """The number of panels whose sums are added to the totals at once in strict float32: 32 input channels."""
        return 2 if self.strict and self.part_bytes <= 64 and not self.divided else 1

    @property
    def threads(self) -> int:
        return 128 * (self.producers + self.consumers)

    @property
    def registers(self) -> tuple[int, int]:
        """The registers of a producer thread and of a consumer thread, in all what the kernel starts with."""
        start = REGISTERS // self.threads // 8 * 8
        total = start * self.threads // 128
        beside = STRICT_CONSUMER_REGISTERS if self.strict else CONSUMER_REGISTERS
        loading = STRICT_PRODUCER_REGISTERS if self.strict else PRODUCER_REGISTERS
        if self.copied or self.lines:
            loading = COPYING_REGISTERS
        elif self.in_flight > 16:
            loading = MANY_REGISTERS
        if self.producers > 1 and self.sums > MANY_SUMS and not self.strict:
            beside = FEWER_REGISTERS
        needed = round_up(self.sums + beside, 8)
        spare = (total - loading * self.producers) // self.consumers // 8 * 8
        most = (total - LEAST_REGISTERS * self.producers) // self.consumers // 8 * 8
        consumer = min(max(needed, spare), most, 232)
        left = total - self.consumers * consumer
        return min(left // self.producers // 8 * 8, start), max(consumer, start)

    @cached_property
    def kinds(self) -> tuple[VariantKind, ...]:
        """The kinds of variants, those with the most taps first."""
        counts = Counter(tuple(map(len, program.shifts)) for program in self.programs)
        first = {tuple(map(len, program.shifts)): program for program in reversed(self.programs)}
        return tuple(
            VariantKind(
                counts[shifts],
                len(program.taps) * self.chunks,
                program.cycles(self.out_tile, registers=self.lines or self.in_registers) * self.steps,
                program.shared_cycles(self.out_tile) * self.steps,
                self.chunks * self.halves * program.chunk_fields * self.out_tile * self.part_bytes,
            )
            for shifts, program in sorted(first.items(), key=lambda item: -len(item[1].taps))
        )

    @property
    def cycles_per_slab(self) -> float:
        """The tensor core cycles of a slab for all of K (of one plane of a march), in the slowest kind of variant."""
        return self.kinds[0].cycles_per_slab

    @cached_property
    def lead(self) -> int:
        """The number of panels by which the first of two consumers precedes the second (kLead in halo_consumer.cuh).

        The lead takes about as long as storing, and is at most half of a tile: a whole tile costs 13%. There is no
        lead where 16-bit outputs are stored through images (any lead costs 3 to 6%) or in place (1 to 3%), nor for
        float32 outputs in long runs; for 16-bit outputs in long runs one panel is 3% faster. The first consumer must
        reach its lead without stages and slots that the second has not released.
        """
        p = self.program
        stored = self.sums * (self.march_step / self.window if self.march else 1)
        least = min(sum(map(len, program.shifts)) for program in self.programs)
        of_sources = [len(shifts) for shifts in p.shifts] if self.gather else [least]
        if self.lines:
            of_sources = [self.line_turns]
        panels = sum(of_sources) * self.chunks
        quick = self.joint if self.item_bytes == 4 else self.buffers or self.in_place
        if self.consumers != 2 or panels == 0 or self.divided or quick:
            return 0
        if self.joint:
            return 1
        wanted = STORE_CYCLES * stored * panels / (self.cycles_per_slab * self.slabs)
        least = sum(of_sources) if self.portioned or self.spread else panels  # a block may have one chunk of a tile
        most = min(min(of_sources) * (self.stages - 1), least // 2, panels if self.resident else self.slots - 2)
        return max(0, min(round(wanted + 0.5), most))

    @property
    def in_place(self) -> bool:
        """Whether both 16-bit phases along w are stored directly from registers (kInPlace in halo_stores.cuh)."""
        pairs = 2 in self.stored_vectors and self.geometry.stride[2] == 2
        return pairs and self.copied and self.item_bytes == 2 and not (self.march or self.gather)

    def lines_read(self, lines: int) -> int:
        """Returns the number of input lines that this number of lines of positions reads."""
        axis = self.geometry.axes[1]
        if self.gather:
            return (lines - 1) * axis.stride + axis.dilation * (axis.kernel - 1) + 1
        return lines + self.span[1]

    @cached_property
    def line_sets(self) -> tuple[int, int]:
        """The number of operand sets in registers and the steps of each set, in a build on lines.

        Both are 0 if registers do not suffice for two sets: the compiler would serialize the products."""
        axis = self.geometry.axes[2]
        shifts = (axis.dilation * (axis.kernel - 1) if self.gather else self.span[2]) + 1
        words = shifts + (axis.stride if self.gather else 1)
        for sets, steps in ((3, 2), (2, 2), (3, 1), (2, 1)):
            coming = 2 * words if shifts > 1 else 0  # words that become the operands of all shifts
            if self.sums + self.slabs * steps * (sets * 4 * shifts + coming) <= LINE_REGISTERS:
                return sets, steps
        return 0, 0

    @property
    def register_sets(self) -> int:
        """The number of operand sets that consumers load out of rows of channels; 0 if registers do not suffice."""
        words = self.slabs * self.row_bytes // 8  # registers of a set
        return REGISTER_SETS if self.sums + REGISTER_SETS * words <= LINE_REGISTERS else 0

    @property
    def line_turns(self) -> int:
        """The number of turns in which the last chunk of lines is multiplied (halo_lines.cuh)."""
        steps = self.steps - (self.chunks - 1) * (self.part_bytes // STEP_BYTES)
        return self.lines_read(1) * ceil_div(steps, self.line_sets[1])

    @property
    def line_loads(self) -> int:
        """The number of operand loads for one step of a march in a build on lines, all of which are unrolled."""
        return self.slabs * self.steps * self.lines_read(1) * self.line_planes

    @property
    def line_words(self) -> int:
        """The number of elements of a channel that fit a stage of lines."""
        return self.stage_rows * self.program.parts

    @cached_property
    def _depth_shifts(self) -> tuple[tuple[tuple[int, int], int], ...]:
        """Pairs of ((planes from a position to its input, phase along d), number of panels that read there)."""
        found: Counter[tuple[int, int]] = Counter()
        p = self.program
        for i, shifts in enumerate(p.shifts):
            source = i // len(p.patterns)
            found.update((p.sources[source][0].origin + d, p.phases[source][0]) for d, *_ in shifts)
        return tuple(found.items())

    def needed_panels(self, planes: range, size: int) -> float:
        """Returns the fraction of panels by which any of these planes of positions reads inside `size` planes."""
        return _needed_panels(self._depth_shifts, self.program.read_step[0], planes, size)

    @property
    def skips(self) -> bool:
        """Whether consumers skip the products of a slab with planes above or below the input."""
        return (self.copied or self.spread) and not (self.resident or self.march or self.strict)

    @property
    def unrolled_shifts(self) -> int:
        """The number of shifts by which the loop of a streaming build is unrolled.

        It is faster for 16-bit types, but slower if two slabs have several patterns, or if panels are small."""
        forward = self.skips and self.item_bytes == 2 and not (self.gather or self.portioned or self.fine)
        return 8 if forward and (self.slabs == 1 or len(self.program.patterns) == 1) else 1

    @property
    def torn(self) -> bool:
        """Whether neighbouring outputs along w come from different column tiles, which write partial sectors."""
        return self.split[2] and self.geometry.axes[2].stride > 1

    @cached_property
    def max_passes(self) -> int:
        """The most passes over a tile: with several, the stages of all chunks must fit, and one to prefetch into."""
        return (
            1
            if self.march or self.portioned or self.spread or self.divided or self.stages <= self.stages_filled
            else 8
        )

    def __str__(self) -> str:
        apart = ", ".join(name for name, split in zip("dhw", self.split, strict=True) if split)
        phases = f"phases along {apart} apart" if apart else "phases together"
        way = "gathering" if self.gather else "marching along depth" if self.march else phases
        panels = "weights resident" if self.resident else "weights streamed"
        if self.copied:
            panels += f", input {'rounded and ' if self.rewritten else ''}copied past registers"
        if self.lines:
            panels += f", input in lines as in memory{', outputs stored as long runs' if self.joint else ''}"
        if self.in_registers:
            panels += ", rounded by consumers"
        if self.fine:
            panels += ", in small panels"
        if self.divided:
            panels += ", consumers divide K"
        if self.spread:
            panels += ", last tiles divided"
        if self.merged > 1:
            panels += f", {self.merged} groups as one"
        stores = ", stores through images" if self.buffers else ", in portions" if self.portioned else ""
        return (
            f"{way}, {self.columns} columns x {self.consumers} x {self.slabs} slabs of {SLAB} positions, "
            f"{self.stages} stages, {self.producers} producer warpgroup{'s' if self.producers > 1 else ''}, "
            f"{panels}{stores}"
        )

    def constants(self, job: Job) -> Constants:
        g, p = self.geometry, self.program
        origins = p.sources if self.gather else [v.dimensions for v in self.programs]
        written_step = (1, 1, 1) if self.gather else g.stride
        producer, consumer = self.registers
        return (
            ("kThreads", self.threads),
            ("kMinBlocks", 1),
            ("Scalar", SCALARS[self.dtype]),
            ("Written", "float" if self.portioned else SCALARS[self.dtype]),
            ("kPortioned", self.portioned),
            ("kSpread", self.spread),
            ("kAdds", False),
            ("Epilogue", f"tconv3d::LeavingMoments<{job.activation}>" if job.norm else job.activation),
            ("kMomentBand", moment_band(self, job)),
            ("kWide", _wide(job)),
            ("kBias", job.bias),
            ("kUnitC", job.read_last),
            ("kVectorInput", job.vector_input),
            ("kCopied", self.copied),
            ("kOperands", job.rows or self.item_bytes == 2),
            ("kAfterRows", job.rows),
            ("kVectorParts", _vector_parts(job, p.used_parts)),
            ("kOutputUnitC", job.written_last),
            ("kAlignedPairs", not any(v % 2 for v in (g.out_per_group, job.written[0], *job.written[2:]))),
            ("kProducers", self.producers),
            ("kConsumers", self.consumers),
            ("kProducerRegisters", producer),
            ("kConsumerRegisters", consumer),
            ("kInFlight", self.in_flight),
            ("kStages", self.stages),
            ("kStageRows", self.stage_rows),
            ("kResident", self.resident),
            ("kSlots", self.slots),
            ("kSlotBytes", self.slot_bytes),
            ("kSharedBytes", self.shared_bytes),
            ("kSlabs", self.slabs),
            ("kLead", self.lead),
            ("kUnrolledShifts", self.unrolled_shifts),
            ("kSheetStep", self.sheet_step),
            ("kDivided", self.divided),
            ("kBuffers", self.buffers),
            ("kLines", self.lines),
            ("kJoint", self.joint),
            ("kJointBuffers", self.joint_buffers),
            ("kJointPitch", self.joint_pitch),
            ("kOperandSets", self.line_sets[0] if self.lines else self.register_sets if self.in_registers else 1),
            ("kStepsAtOnce", self.line_sets[1] if self.lines else 1),
            ("kGather", self.gather),
            ("kImageRows", self.image_rows),
            *self.layout_constants,
            ("kLaneChannels", self.lane_channels(job)),
            ("kField", p.fields),
            ("kLongVectors", 16 // self.written_bytes in self.stored_vectors),
            ("kFours", 4 in self.stored_vectors and self.written_bytes == 2),
            ("kPairs", 2 in self.stored_vectors),
            ("kPartner", _partners(p.fields, job.written[4] == 1)),
            ("kStoredByPartner", STORED_BY_PARTNER),
            ("kShift", self._shift_table),
            ("kSpan", tuple(program.span for program in self.programs)),
            ("kStrideD", written_step[0]),
            ("kStrideH", written_step[1]),
            ("kStrideW", written_step[2]),
            ("kUsedParts", p.used_parts),
            ("kReadStepD", p.read_step[0]),
            ("kReadStepH", p.read_step[1]),
            ("kReadStepW", p.read_step[2]),
            ("kReadPhase", p.phases),
            ("kOrigin", tuple(tuple(d.origin for d in dimensions) for dimensions in origins)),
            ("kOffset", tuple(tuple(d.offset for d in v.dimensions) for v in self.programs)),
            ("kMarch", self.march),
            ("kPaddingD", self.march_padding),
            ("kWindow", self.window),
        )

    @property
    def _shift_table(self) -> tuple[tuple[int, ...], ...]:
        """The shifts of one variant, or of all if they have their own, padded to the room of each pattern."""
        return tuple(
            (*shifts, *((0, 0, 0, 0),) * (room - len(shifts)))[i]
            for program in (self.programs if self.own_shifts else self.programs[:1])
            for shifts, room in zip(program.shifts, self.pattern_shifts, strict=True)
            for i in range(room)
        )

    @property
    def stored_vectors(self) -> dict[int, int]:
        """Maps the outputs of each vector that stores along w may use for some volume to the vector's positions.

        A vector has 16 bytes or two outputs. Lines of tiles and of their halos must both be multiples of the
        positions, or be neighbours in memory, so that a plane is one long line. The latter holds for runs without
        padding, whose vectors may also have four outputs.
        """
        stride = 1 if self.gather else self.geometry.stride[2]
        if stride > 1 and (self.split[2] or stride % 2):
            return {}
        fours = self.march and stride == 1 and not any(axis.padding for axis in self.geometry.axes[1:])
        wide = (16 // self.written_bytes, 4) if fours else (16 // self.written_bytes,)
        found = {vector: max(1, vector // min(stride, 2)) for vector in (*wide, 2)}
        span = self.span[2]
        return {v: n for v, n in found.items() if (span % n == 0 or self.march) and (n == 1 or stride <= 2)}

    def lane_channels(self, job: Job) -> int:
        """Returns the number of neighbouring output channels in a lane's sums.

        One store writes them to channels-last outputs: 16 bytes or less. Bands of moments have whole blocks of
        columns (block_channels in halo_layout.cuh)."""
        if not job.written_last:
            return 1 if self.joint and self.item_bytes == 4 else 2
        rows = (self.geometry.out_per_group, job.written[0], *job.written[2:])
        band = moment_band(self, job) if job.norm else 0
        for own in (16 // self.written_bytes, 4):
            whole = 4 * own <= self.out_tile and not any(v % own for v in rows)
            if whole and (band == 0 or (band % (4 * own) == 0 and self.out_tile % (4 * own) == 0)):
                return own
        return 2

    def stores(self, job: Job) -> bool:
        """Returns whether this build can store the job's outputs.

        Images are for rows that are no multiples of 16 bytes. Portions are for dense results without activation."""
        if self.lines:
            anywhere, dense = _begins_anywhere(job), job.written[3] == job.written_size[2]
            way = dense and (anywhere or job.item_bytes == 2) if self.joint else not anywhere
            return has_lines(job) and way and job.norm is None
        if self.in_registers:
            # Rows that a previous launch has written are rounded already: rounding twice would add half a unit twice.
            return job.written_last and job.has_rows and not job.rows and job.norm is None
        if self.portioned:  # partial sums have the layout of the result, and are added element by element
            return job.dense and job.norm is None and job.activation == "tconv3d::Identity"
        if (self.divided or self.spread) and job.norm:
            return False  # moments need the complete sums of an output
        along_w = job.written[4] == 1 and not job.written_last
        return not self.buffers or (along_w and any(v * self.item_bytes % 16 for v in _rows(job)))

    def vector(self, job: Job, tiling: Tiling) -> int:
        """Returns how many neighbouring outputs along w a store writes: rows begin and end at multiples of them."""
        width = job.written_size[2]
        lines: tuple[int, ...] = (tiling.tile[2], tiling.halo[2])
        rows = _rows(job)
        one_phase = job.gather or job.geometry.stride[1] == 1  # no rows of other phases lie between lines
        if tiling.length and lines == (width, width) and job.written[3] == width and one_phase:
            lines = tuple(height * width for height in (tiling.tile[1], tiling.halo[1]))
            rows = (*job.written[:3], *lines)
        for vector, positions in self.stored_vectors.items() if job.written[4] == 1 else ():
            together = positions == 1 or (tiling.items == 1 and not any(line % positions for line in lines))
            if together and not any(row % vector for row in rows):
                return vector
        return 1

    @cached_property
    def origins_w(self) -> set[int]:
        """The first inputs of a halo's lines, relative to the tile, in all programs and sources."""
        return {dimensions[2].origin for program in self.programs for dimensions in program.sources}

    def whole_lines(self, tiling: Tiling) -> bool:
        """Returns whether all halos have the same rows left and right of the input, which are then cleared only once.

        Asynchronous copies write such zeros with every halo, and builds on lines have no such rows."""
        loaded = not (self.lines or self.copied)
        return tiling.tiles[3] == 1 and tiling.length == 0 and len(self.origins_w) == 1 and loaded

    def loaded_columns(self, job: Job, tiling: Tiling) -> range:
        """Returns the columns of the halo that may have input; in builds on lines the columns of positions."""
        if self.lines:
            return range(tiling.tile[2])
        if not self.whole_lines(tiling) or self.gather or self.copied or tiling.items > 1:
            return range(tiling.halo[2])
        (origin,) = self.origins_w
        first = min(max(0, -origin), tiling.halo[2] - 1)
        return range(first, max(first + 1, min(tiling.halo[2], job.read_size[2] - origin)))

    def loaded_rows(self, job: Job, tiling: Tiling) -> int:
        return (
            tiling.rows // tiling.halo[2] * len(self.loaded_columns(job, tiling))
            if not tiling.length
            else tiling.rows
        )

    def vectors(self, job: Job, tiling: Tiling) -> int:
        """Returns the most vectors of 16 bytes along w that a line of the halo touches, or 0 if none are loaded."""
        step, items = self.program.read_step[2], 16 // self.item_bytes
        *outer, w = job.read
        if w != 1 or step != self.program.parts or tiling.items > 1 or self.item_bytes != 2 or self.copied:
            return 0
        if not job.aligned or any(v % items for v in (*outer, job.read_size[2])):
            return 0
        if tiling.length and not self.march:
            return 0
        tiles = product(range(tiling.tiles[3]), self.origins_w)
        starts = [(place * tiling.tile[2] + origin) * step for place, origin in tiles]
        spans = [(start, start + tiling.halo[2] * step) for start in starts]
        if self.whole_lines(tiling) or tiling.length:
            spans = [(max(0, start), min(end, job.read_size[2])) for start, end in spans]
        vectors = max(0, *(ceil_div(start % items + end - start, items) for start, end in spans))
        if vectors * items > MAX_BESIDE * tiling.halo[2] * step:
            return 0  # too many elements outside the halo would be loaded
        noted = self.vector_batches(self.all_vectors(tiling, vectors)) * self.loaders * self.vector_turn.noted_bytes
        stages = self.stages * self.halves * self.stage_rows * self.row_bytes
        room = self.shared_bytes - self.reserved_bytes - self.panel_bytes - stages
        return vectors if noted + 128 * (self.loaders + 1) <= room else 0

    def pairs(self, job: Job, tiling: Tiling) -> bool:
        """Returns whether loads take two neighbours along w: pairs are aligned, and both inside or both outside."""
        *outer, w = job.read
        columns = self.loaded_columns(job, tiling)
        starts = [origin + columns.start for origin in self.origins_w]
        steps = (tiling.tile[2] if tiling.tiles[3] > 1 else 0, tiling.halo[2], len(columns), job.read_size[2])
        return (
            self.item_bytes == 2
            and not self.copied
            and w == 1
            and self.program.parts == self.program.read_step[2] == tiling.items == 1
            and job.aligned
            and not any(v % 2 for v in (*outer, *starts, *steps))
            and not self.vectors(job, tiling)
            and (self.march or not tiling.length)
        )

    def all_vectors(self, tiling: Tiling, vectors: int) -> int:
        """Returns the most vectors that a tile touches if each line touches `vectors`.

        A run takes the vectors of its lines in sequence, from the first to the last that it touches."""
        if not tiling.length or not vectors:
            return vectors * tiling.lines
        line, items, (origin,) = tiling.halo[2], 16 // self.item_bytes, self.origins_w
        first = max(-origin, -(origin % items))  # column of the first vector's first element

        def vector(row: int) -> int:
            return row // line * vectors + min(max(0, row % line - first) // items, vectors)

        def first_of_turn(row: int) -> int:
            return vector(row) if vectors % VECTORS_OF_TURN else vector(row) // VECTORS_OF_TURN * VECTORS_OF_TURN

        starts = range(0, line, gcd(line, tiling.length))
        return max(vector(start + tiling.rows - 1) + 1 - first_of_turn(start) for start in starts)

    @property
    def vector_turn(self) -> VectorTurn:
        pieces = self.part_bytes // 16 if self.chunks > 1 else 2 * self.steps  # multiplied pieces of 16 bytes
        turns = 2 if pieces in (2, 6) else 1
        return VectorTurn(turns * VECTORS_OF_TURN, pieces * turns // 4, turns * 160)

    def vector_batches(self, vectors: int) -> int:
        """Returns the number of batches in which a loader warp fills a stage with this number of vectors."""
        turn = self.vector_turn
        return ceil_div(ceil_div(vectors, turn.vectors) * turn.shares, self.loaders)

    @property
    def layout_constants(self) -> Constants:
        """The constants that the halo kernel and the packing kernel share."""
        g, p = self.geometry, self.program
        return (
            ("kInRegisters", self.in_registers),
            ("kHalves", self.halves),
            ("kPanelsAtOnce", self.panels_at_once),
            ("kGroups", g.groups),
            ("kIn", g.in_per_group),
            ("kOut", g.out_per_group),
            ("kGroupsPerTile", self.groups_per_tile),
            ("kGroupSlots", self.group_slots),
            ("kOutTile", self.out_tile),
            ("kOutTiles", self.out_tiles),
            ("kVariants", len(self.programs)),
            ("kRowBytes", self.row_bytes),
            ("kParts", p.parts),
            ("kSources", len(p.sources)),
            ("kFields", len(p.fields)),
            ("kPatterns", len(p.patterns)),
            ("kUnitFields", p.unit),
            ("kPatternUnit", _running(len(units) for units in p.patterns)),
            ("kShiftRange", _running(self.pattern_shifts)),
            ("kUnit", tuple(unit for units in p.patterns for unit in units)),
            ("kOwnShifts", self.own_shifts),
            ("kVariantShifts", tuple(len(shifts) for program in self.programs for shifts in program.shifts)),
        )

    def _padded_taps(self, program: Program) -> Iterator[tuple[Triple | None, ...]]:
        """Yields the taps of each shift, and no taps for each unused shift that a pattern has room for."""
        taps = iter(program.taps)
        for shifts, room in zip(program.shifts, self.pattern_shifts, strict=True):
            yield from (next(taps) if i < len(shifts) else () for i in range(room))

    def _weight_run(self, job: Job) -> Run:
        """Returns which dimensions a contiguous run of the weight's memory covers."""
        g = self.geometry
        read, written, *taps = job.weight
        _, kernel_h, kernel_w = g.kernel
        steps = (kernel_h * kernel_w, kernel_w, 1)
        used = [(stride, step) for stride, step, size in zip(taps, steps, g.kernel, strict=True) if size > 1]
        flat = all(stride == step for stride, step in used) or all(stride == -step for stride, step in used)
        if self.groups_per_tile > 1 or self.merged > 1:
            return Run.TAPS
        if flat and written == g.taps:
            return Run.COLUMN_TAPS
        if flat and read == g.taps:
            return Run.CHANNEL_TAPS
        return Run.COLUMNS if written == 1 else Run.CHANNELS if read == 1 else Run.TAPS

    def pack(self, job: Job) -> Launch:
        g, p = self.geometry, self.program
        _, kernel_h, kernel_w = g.kernel
        table = tuple(
            tuple(-1 if tap is None else (tap[0] * kernel_h + tap[1]) * kernel_w + tap[2] for tap in taps)
            + (NOT_PACKED,) * (p.panel_fields - len(taps))
            for variant in self.programs
            for taps in self._padded_taps(variant)
        )
        run = self._weight_run(job)
        channels, parts = self.part_bytes // self.item_bytes, self.column_tiles // len(self.programs) * self.chunks
        if run == Run.COLUMNS:  # a block takes up to 32 columns of a few taps
            columns = max(n for n in (32, 16, 8) if self.out_tile % n == 0)
            taps = max(1, PACKED_AT_ONCE // (columns * channels))
        else:
            taps = g.taps
            fits = [
                n
                for n in (8, 4, 2)
                if n * taps * channels <= PACKED_AT_ONCE and parts * self.out_tile // n >= PACKING_BLOCKS
            ]
            columns = max(fits, default=1)
        lines = self.halves * len(self.programs) * self.chunk_fields
        column_pitch = (taps * (channels + 1) + 30) // 32 * 32 + 1
        vector = 16 // self.item_bytes
        parameters = (*(job.weight[:1] + job.weight[2:]), job.weight_group, job.weight_tap, g.out_per_group)
        vectors = run == Run.COLUMNS and job.weight_aligned and not any(v % vector for v in parameters)
        staged = taps * channels * (columns + vector) * self.item_bytes if vectors else 4 * columns * column_pitch
        shared_bytes = staged + 4 * (2 * lines + 1)
        threads = PACKING_THREADS
        return Launch(
            kernel="pack",
            constants=(
                ("kThreads", threads),
                ("kMinBlocks", 8),
                ("Scalar", SCALARS[self.dtype]),
                *((f"kKernel{name}", size) for name, size in zip("DHW", g.kernel, strict=True)),
                ("kColumnsAtOnce", columns),
                ("kTapsAtOnce", taps),
                ("kColumnVectors", vectors),
                ("kRun", int(run)),
                ("kMerged", self.merged),
                ("kReversed", job.weight[4] < 0),
                ("kSharedBytes", shared_bytes),
                *self.layout_constants,
                ("kLaneChannels", self.lane_channels(job)),
                ("kTap", table),
                ("kNotPacked", NOT_PACKED),
            ),
            grid=(parts * (self.out_tile // columns) * ceil_div(g.taps, taps), 1, 1),
            threads=threads,
            shared_bytes=shared_bytes,
            pointers=PACK.pointers(weight="weight", packed="workspace"),
            scalars=PACK.pack(stride=job.weight, group=job.weight_group, tap=job.weight_tap),
        )


@lru_cache(maxsize=4096)  # a search asks for equal planes with hundreds of builds
def _needed_panels(shifts: tuple[tuple[tuple[int, int], int], ...], step: int, planes: range, size: int) -> float:
    needed = (n for (shift, phase), n in shifts if any(0 <= (q + shift) * step + phase < size for q in planes))
    return sum(needed) / sum(n for _, n in shifts)


def rows_launch(job: Job, read: Strides, aligned: bool) -> Launch:
    """Returns the launch that writes the tensor that a job reads, which has these strides, as rows of channels."""
    already = replace(job, read=read, aligned=aligned).has_rows
    return channel_rows(job.dtype, job.batch, job.geometry.in_channels, job.read_size, read, aligned, already)


def moment_band(build: Build, job: Job) -> int:
    """Returns how many neighbouring output channels of a norm group and a tile share their moments."""
    if job.norm is None:
        return 1
    band = gcd(job.geometry.out_channels // job.norm.groups, build.geometry.out_per_group, build.out_tile)
    return band if band % 8 == 0 else band & -band


def _running(counts: Iterable[int]) -> tuple[int, ...]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return tuple(sums)


def _partners(fields: tuple[Triple, ...], neighbours: bool) -> tuple[int, ...]:
    """Returns for each field the field with the next output along w, if one store writes both."""
    place = {field: i for i, field in enumerate(fields)}
    partners = [WITHOUT_PARTNER] * len(fields)
    for (d, h, w), i in place.items():
        second = place.get((d, h, w + 1))
        if neighbours and w % 2 == 0 and second is not None:
            partners[i], partners[second] = second, STORED_BY_PARTNER
    return tuple(partners)


def _rows(job: Job) -> tuple[int, ...]:
    """Returns the sizes that must be multiples of a vector for output rows to begin and end at multiples of it."""
    return (*job.written[:4], job.written_size[2])


def has_lines(job: Job) -> bool:
    """Returns whether builds on lines can take the job: its input lines can be copied as they lie in memory.

    Its output lines must allow stores of the outputs of two positions (four in 16-bit types), or be long runs."""
    *outer, line, one = job.read
    copied = one == 1 and line == job.read_size[2] and not any(v * job.item_bytes % 16 for v in (*outer, line))
    stride = 1 if job.gather else job.geometry.stride[2]
    positions, width = job.positions[2], job.written_size[2]
    if job.item_bytes == 2 or _begins_anywhere(job):
        stored = stride == 2 and 0 <= stride * positions - width <= 1 and positions % (8 // job.item_bytes) == 0
    else:
        pairs = not any(v % 2 for v in _rows(job))  # one store has two positions of a line
        stored = stride * positions == width and pairs
    return copied and stored and job.written[4] == 1 and job.aligned


def _begins_anywhere(job: Job) -> bool:
    """Returns whether output rows begin or end at addresses that are no multiples of 16 bytes."""
    return not job.gather and any(v * job.item_bytes % 16 for v in _rows(job))


def _wide(job: Job) -> bool:
    """Returns whether an offset inside one channel's volume, or to the next channel, may exceed 32 bits."""
    axes = job.geometry.axes
    reach = [
        size + 2 * axis.kernel * axis.dilation + axis.padding + 64 * axis.stride
        for size, axis in zip(job.read_size, axes, strict=True)
    ]
    last = [size + 64 * axis.stride for size, axis in zip(job.written_size, axes, strict=True)]
    x = sum(size * stride for size, stride in zip(reach, job.read[2:], strict=True))
    y = sum(size * stride for size, stride in zip(last, job.written[2:], strict=True))
    return max(x, y, job.read[1]) > INT32_MAX


def _vector_parts(job: Job, parts: int) -> bool:
    """Returns whether one load can take all parts of a position: they are aligned, and all inside or all outside."""
    *outer, w = job.read
    even = not any(v % parts for v in (*outer, job.read_size[2]))
    return parts in (2, 4) and w == 1 and job.aligned and even


@dataclass(frozen=True)
class Shares:
    """How the planes of a march are divided among blocks (halo_tile.cuh)."""

    planes: int  # planes of all tiles in sequence
    even: int  # planes of the tiles that are not divided
    share: int  # planes of a share, one block's part of the tiles that are divided; 0 if none are
    count: int  # number of shares
    beside: int  # column tiles that neighbouring blocks compute at the same time
    in_turn: int  # column tiles that one block computes one after the other
    pieces: int  # most pieces into which shares cut a tile


@dataclass(frozen=True)
class Spread:
    """How blocks divide the chunks of the last tiles (halo_tile.cuh).

    The unit of cost is 1/WHOLE of the cost of a chunk that skips no products."""

    WHOLE: ClassVar[int] = 240

    even: int  # chunks of the tiles that are not divided
    blocks: int
    cost: int  # cost of a share, one block's part of the tiles that are divided
    first_tile: int  # index along d, or of the run, of the tile with which the sequence of tiles begins
    stretches: tuple[tuple[int, int], ...]  # for the tiles that are divided: numbers of chunks, and the cost of each

    @property
    def chunks(self) -> int:
        """The number of chunks of all tiles."""
        return self.even + sum(chunks for chunks, _ in self.stretches)

    @property
    def busiest(self) -> float:
        """The time of the busiest block, in chunks that skip no products."""
        return self.even / self.blocks + (self.cost + self.WHOLE) / self.WHOLE


MAX_STRETCHES = 4
CHUNK = 0.2  # fraction of a chunk's cost that does not depend on the panels that it skips
NOT_SPREAD = Spread(0, 0, 0, 0, ((0, 0),) * MAX_STRETCHES)


@dataclass(frozen=True)
class Tiling:
    """The cut of a volume into tiles, and of a tile's positions into slabs (arguments.py explains the numbers)."""

    tile: Triple  # positions of a tile; in a march all of depth
    halo: Triple
    items: int  # batch items per tile
    near: int  # batch items of a tile whose rows of one position are neighbours
    tiles: tuple[int, int, int, int]  # number of tiles along the batch, d, h and w
    slabs: int
    slabs_w: int
    slabs_h: int
    group_rows: int
    slab_step: Triple
    run: int
    length: int = 0  # rows of a tile that is a run of lines in sequence; 0 if tiles are boxes
    sheets: int = 1  # batch items whose lines follow each other in a run
    reach: int = 0  # rows behind a run that its positions read
    shared: bool = False  # whether the blocks of a march divide the last tiles, to end at the same time
    portions: int = 1  # blocks that divide the chunks of a tile
    sheet_step: int = 1  # planes from one sheet of a run's halo to the next

    @property
    def rows(self) -> int:
        return self.halo[0] * (self.length + self.reach) if self.length else prod(self.halo) * self.items

    @property
    def lines(self) -> int:
        """The number of lines of a halo, or the most lines that the halo of a run touches."""
        return ceil_div(self.rows - 1, self.halo[2]) + 1 if self.length else prod(self.halo[:2])

    @property
    def item_tiles(self) -> int:
        """The most tiles that touch a batch item."""
        return (self.halo[1] * self.halo[2] - 2) // self.length + 2 if self.sheets > 1 else prod(self.tiles[1:])

    @property
    def flat(self) -> bool:
        """Whether every slab has the positions of a single plane."""
        sheet = self.halo[1] * self.halo[2] * self.items
        return self.length == 0 and self.slab_step[0] == sheet

    @property
    def near_bits(self) -> int:
        """The binary logarithm of the number of batch items, at most 8, that neighbouring lanes load."""
        return min(self.items, 8).bit_length() - 1

    @cached_property
    def count(self) -> int:
        return prod(self.tiles)

    def work(self, build: Build) -> int:
        """Returns tiles times column tiles times portions, the units of work outside of marches."""
        return self.count * build.column_tiles * self.portions

    def portion(self, build: Build) -> float:
        """Returns the largest fraction of a tile's chunks that a block has."""
        return ceil_div(build.chunks, self.portions) / build.chunks

    def blocks(self, build: Build, multiprocessors: int) -> int:
        if build.march:
            shares = self.shares(build, multiprocessors)
            return shares.count * shares.beside
        blocks = max(min(self.work(build), multiprocessors), 1)
        if build.resident:  # every block has the panels of a single column tile
            blocks = max(blocks // build.column_tiles, 1) * build.column_tiles
        return blocks

    def shares(self, build: Build, multiprocessors: int) -> Shares:
        """Returns how blocks divide a march."""
        columns, depth = build.column_tiles, self.tile[0]
        divisors = [columns] if build.resident else [n for n in range(1, columns + 1) if columns % n == 0]
        beside = max(divisors, key=lambda n: (multiprocessors // n * n, n))
        tiles = self.count * (columns // beside)
        count = max(1, multiprocessors // beside)
        if not self.shared:
            count = min(count, tiles)
        even = tiles // count * count if self.shared else round_up(tiles, count)
        rest = max(0, tiles - even) * depth
        share = max(1, ceil_div(rest, count))
        if even == 0:
            count = ceil_div(rest, share)
        pieces = (depth - 2) // share + 2 if rest and depth > 1 else 1
        return Shares(tiles * depth, even * depth, share if rest else 0, count, beside, columns // beside, pieces)

    def chunk_costs(self, build: Build, job: Job) -> list[float]:
        """Returns the cost of a chunk in each tile along d, or each run, as a fraction of one that skips no products.

        A panel counts if any position of the tile needs it: consumers that skip it wait for the others."""
        depths = self._depths()
        needed = {planes: build.needed_panels(planes, job.read_size[0]) for planes in set(depths)}
        return [CHUNK + (1 - CHUNK) * needed[planes] for planes in depths]

    def _depths(self) -> list[range]:
        """Returns the planes of positions of each tile along d, or of each run."""
        if not self.length:
            return [range(tile * self.tile[0], (tile + 1) * self.tile[0]) for tile in range(self.tiles[1])]
        plane = self.halo[1] * self.halo[2]
        starts = range(0, self.tiles[2] * self.length, self.length)
        return [range(start // plane, (start + self.length - 1) // plane + 1) for start in starts]

    @property
    def sheet_rows(self) -> int:
        """The number of rows of the halo from one plane to the next."""
        if self.length:
            return (self.length + self.reach) // self.sheet_step
        return self.halo[1] * self.halo[2] * self.items

    def spread(self, build: Build, job: Job, multiprocessors: int) -> Spread:
        """Returns how blocks divide the chunks of all tiles; the cheaper tiles at the ends of depth come last."""
        costs = [max(1, round(Spread.WHOLE * cost)) for cost in self.chunk_costs(build, job)]
        first = costs.index(max(costs))
        chunks = self.count // len(costs) * build.column_tiles * build.chunks
        stretches: list[tuple[int, int]] = []
        for cost in costs[first:] + costs[:first]:
            before = stretches[-1] if stretches else (0, cost)
            if before[1] == cost:
                stretches[-1:] = [(before[0] + chunks, cost)]
            elif len(stretches) < MAX_STRETCHES:
                stretches.append((chunks, cost))
            else:  # there is no room for another stretch: the last one gets the average cost
                all_chunks = before[0] + chunks
                stretches[-1] = (all_chunks, max(1, round((before[0] * before[1] + chunks * cost) / all_chunks)))
        total = sum(n * cost for n, cost in stretches)
        blocks = min(multiprocessors, ceil_div(total, stretches[0][1]))
        round_chunks = blocks * build.chunks
        rounds = min(stretches[0][0] // round_chunks, total // (round_chunks * stretches[0][1]))
        even = rounds * round_chunks
        stretches[0] = (stretches[0][0] - even, stretches[0][1])
        rest = sum(n * cost for n, cost in stretches)
        stretches += [(0, 1)] * (MAX_STRETCHES - len(stretches))
        return Spread(even, blocks, max(1, ceil_div(rest, blocks)), first, tuple(stretches))

    def __str__(self) -> str:
        shared = ", shared" if self.shared else ""
        if self.length:
            through = ", through the batch" if self.sheets > 1 else ", through depth" if self.halo[0] > 1 else ""
            return f"{self.tile[0]}x{self.length} in sequence{through}{shared}"
        items = f" of {self.items} batch items" if self.items > 1 else ""
        portions = f", {self.portions} portions" if self.portions > 1 else ""
        return "x".join(map(str, self.tile)) + items + portions + shared


def _slab_layouts(tile: Triple, halo: Triple, items: int) -> Iterator[tuple[int, int, int, int, int, Triple, int]]:
    """Yields ways to cut a tile into slabs: (near items, slabs, slabs_w, slabs_h, group_rows, slab_step, run)."""
    depth, height, width = tile
    _, halo_h, halo_w = halo
    line, sheet = halo_w * items, halo_h * halo_w * items
    everything = INT32_MAX
    near = 8 // width
    if width * near == 8 and items % (8 * near) == 0:  # slabs of one line of 8 groups of near items
        across = items // (8 * near)
        step = (sheet, line, 8 * halo_w * near)
        yield near, depth * height * across, across, height, halo_w * near, step, everything
    elif width * near == 8 and items % near == 0 and height * (items // near) % 8 == 0:  # slabs of 8 lines
        across = height * (items // near) // 8
        yield near, depth * across, across, 1, halo_w * near, (sheet, 0, 8 * halo_w * near), everything
    if width * items % 8 == 0:
        across = width * items // 8
        if height % 8 == 0 or depth == 1:  # slabs of 8 rows on each of 8 lines
            down = ceil_div(height, 8)
            yield items, depth * down * across, across, down, line, (sheet, 8 * line, 8), everything
        if depth % 8 == 0 and sheet < 2**14:  # slabs of 8 rows on each of 8 planes
            yield items, depth // 8 * height * across, across, height, sheet, (8 * sheet, line, 8), everything
    # Slabs of 64 rows in sequence may lie in a line, in a plane, or anywhere in the halo.
    run = width * items
    yield items, depth * height * ceil_div(run, SLAB), ceil_div(run, SLAB), height, 8, (sheet, line, SLAB), run
    run = (height - 1) * line + width * items
    yield items, depth * ceil_div(run, SLAB), ceil_div(run, SLAB), 1, 8, (sheet, 0, SLAB), run
    run = (depth - 1) * sheet + (height - 1) * line + width * items
    yield items, ceil_div(run, SLAB), ceil_div(run, SLAB), 1, 8, (0, 0, SLAB), run


def _extents(size: int, fixed: Iterable[int]) -> list[int]:
    """Returns the candidates for a tile's extent along a dimension of `size` positions."""
    even = {ceil_div(size, parts) for parts in range(1, 9)}
    return sorted(even | {value for value in fixed if value < size + 7})


def _runs(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterator[Tiling]:
    """Yields tilings of a march into runs of the lines of a plane, of one batch item or of all in sequence."""
    if build.buffers:
        return  # images need slabs that end where lines end
    _, height, width = positions
    pitch = _pitches(build, positions, read_size)
    line, sheet = pitch[2], pitch[1] * pitch[2]
    length = SLAB * build.round_slabs
    _, span_h, span_w = build.program.span
    reach = span_h * line + span_w
    if length + reach > build.stage_rows:
        return
    for sheets in {1, batch}:
        rows = (sheets - 1) * sheet + (height - 1) * line + width
        if rows + length + reach > INT32_MAX // 2:
            continue
        tiles = (batch // sheets, 1, ceil_div(rows, length), 1)
        yield _run(build, positions, (1, pitch[1], pitch[2]), tiles, sheets, reach)


def _pitches(build: Build, positions: Triple, read_size: Triple) -> list[int]:
    """Returns the planes of a batch item, the lines of a plane and the rows of a line in a run, with zeros between.

    The zeros behind a line are also the zeros before the next line; planes and batch items share zeros likewise."""
    return [
        extent
        + dimension.span
        - min(max(0, -dimension.origin), max(0, extent + dimension.span + dimension.origin - size))
        for extent, dimension, size in zip(positions, build.program.dimensions, read_size, strict=True)
    ]


def _run(
    build: Build, positions: Triple, halo: Triple, tiles: tuple[int, int, int, int], sheets: int, reach: int
) -> Tiling:
    # Two slabs alternate every 8 rows, so that a warp has 32 rows in sequence.
    woven = build.slabs % 2 == 0
    across, down, group, step = (
        (2, build.round_slabs // 2, 16, (0, 2 * SLAB, 8)) if woven else (build.round_slabs, 1, 8, (0, 0, SLAB))
    )
    return Tiling(
        positions, halo, 1, 1, tiles, build.round_slabs, across, down, group,
        step, INT32_MAX, SLAB * build.round_slabs, sheets, reach,
    )  # fmt: skip


def _deep_runs(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterator[Tiling]:
    """Yields tilings into runs of all lines of a batch item, wherever lines and planes end.

    The halo of such a run has a sheet for every displacement along d."""
    if build.gather or len(build.programs) > 1:
        return
    _, height, width = _pitches(build, positions, read_size)
    span_d, span_h, span_w = build.span
    length, step = SLAB * build.round_slabs, build.sheet_step
    reach = round_up(length + span_h * width + span_w, step) - length  # rows of a sheet are a multiple of step
    rows = ((positions[0] - 1) * height + positions[1] - 1) * width + positions[2]
    sheets = span_d // step + 1
    if sheets * (length + reach) > build.stage_rows or rows + length + reach > INT32_MAX // 2:
        return
    tiling = _run(build, positions, (sheets, height, width), (batch, 1, ceil_div(rows, length), 1), 1, reach)
    yield replace(tiling, sheet_step=step)


def tilings(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterable[Tiling]:
    """Returns all tilings of the volume that fit the build's stages."""
    if build.spread:
        return [*_deep_runs(build, batch, positions, read_size), *_boxes(build, batch, positions)]
    if not build.march:
        return _boxes(build, batch, positions)
    if build.lines:
        found = [*_whole_lines(build, batch, positions, read_size)]
    else:
        found = [*_runs(build, batch, positions, read_size), *_boxes(build, batch, positions)]
    return [each for tiling in found for each in (tiling, replace(tiling, shared=True))]


def _whole_lines(build: Build, batch: int, positions: Triple, read_size: Triple) -> Iterator[Tiling]:
    """Yields tilings of a march into tiles of whole lines, whose positions are rows in sequence."""
    depth, height, width = positions
    most = build.round_slabs * SLAB // width
    for lines in {ceil_div(height, parts) for parts in range(ceil_div(height, max(1, most)), height + 1)}:
        halo = (1, build.lines_read(lines), read_size[2])
        if lines > most or channel_pitch(prod(halo), build.item_bytes) > build.line_words:
            continue
        slabs = ceil_div(lines * width, SLAB)
        tiles = (batch, 1, ceil_div(height, lines), 1)
        yield Tiling(
            (depth, lines, width), halo, 1, 1, tiles, slabs, slabs, 1, 8, (0, 0, SLAB), lines * width
        )  # fmt: skip


def channel_pitch(items: int, item_bytes: int) -> int:
    """Returns the elements from one channel to the next in a stage of lines (`pitch` in halo_lines.cuh)."""
    in_word = 4 // item_bytes
    beside = 8 // in_word
    return in_word * ((items // in_word + 31 - beside) // 32 * 32 + beside)


def forget_boxes() -> None:
    """Clears the cached boxes, which many builds of a search share, at the end of the search."""
    _fitting_boxes.cache_clear()
    _all_boxes.cache_clear()


class _Boxes(NamedTuple):
    """The parameters of boxes except for the size of a stage. Many builds of a search have equal parameters."""

    march: bool
    span: Triple
    slabs: int
    per_round: int
    max_passes: int
    images: bool
    item_bytes: int
    batch: int
    positions: Triple


def _boxes(build: Build, batch: int, positions: Triple) -> tuple[Tiling, ...]:
    """Returns the tilings into boxes of positions."""
    slabs = build.slabs, build.round_slabs, build.max_passes
    boxes = _Boxes(build.march, build.span, *slabs, build.buffers > 0, build.item_bytes, batch, positions)
    return _fitting_boxes(boxes, build.stage_rows)


@lru_cache(maxsize=128)
def _fitting_boxes(boxes: _Boxes, stage_rows: int) -> tuple[Tiling, ...]:
    """Returns the boxes that fit a stage, each cut in the first of the ways with the fewest slabs."""
    found = []
    for rows, ways in _all_boxes(boxes):
        fitting = [tiling for last, tiling in ways if last < stage_rows] if rows <= stage_rows else []
        if fitting:
            found.append(min(fitting, key=attrgetter("slabs")))
    return tuple(found)


@lru_cache(maxsize=16)
def _all_boxes(boxes: _Boxes) -> list[tuple[int, list[tuple[int, Tiling]]]]:
    """Returns for each box the rows of its halo and the ways to cut the box, each with the last row that it reads."""
    march, span, slabs_together, per_round, max_passes, images, item_bytes, batch, positions = boxes
    span_d, span_h, span_w = span
    small = prod(positions) < 512
    items_options = [i for i in (1, 2, 4, 8, 16, 32, 64) if i == 1 or (small and i < 2 * batch)]
    depths = [1] if march else _extents(positions[0], (1, 2, 3, 4, 6, 8))
    limit = per_round * SLAB * max_passes
    least = min(SLAB * per_round // 2, prod(positions) * batch // 256)  # smaller tiles are mostly overhead
    found = []
    for items, depth, height, width in product(
        items_options,
        depths,
        _extents(positions[1], (1, 2, 4, 8, 16, 24, 32)),
        _extents(positions[2], (8, 16, 24, 32)),
    ):
        volume = depth * height * width * items
        if volume > limit or (volume < least and (depth, height, width) != positions):
            continue
        halo = (1 if march else depth + span_d, height + span_h, width + span_w)
        across = (ceil_div(positions[1], height), ceil_div(positions[2], width))
        line, sheet = halo[2] * items, halo[1] * halo[2] * items
        displacement = (0 if march else span_d) * sheet + span_h * line
        deep = positions[0] if march else depth
        tiles = (ceil_div(batch, items), ceil_div(positions[0], deep), *across)
        ways: list[tuple[int, Tiling]] = []
        for near, slabs, slabs_w, slabs_h, group_rows, step, run in _slab_layouts(
            (depth, height, width), halo, items
        ):
            if slabs > per_round * max_passes:
                continue
            # A consumer stores a whole line through images or, with 16-bit types, a part of a line: parts are slower
            # in float32.
            in_line = slabs_w == slabs_together or (slabs_w % slabs_together == 0 and item_bytes == 2)
            if images and (run != width or items > 1 or not in_line):
                continue
            sheets = ceil_div(slabs, slabs_w * slabs_h)
            last = (sheets - 1) * step[0] + (slabs_h - 1) * step[1] + (slabs_w - 1) * step[2] + 7 * group_rows + 7
            last += displacement + span_w * near
            if any(reached <= last and tiling.slabs <= slabs for reached, tiling in ways):
                continue  # a previous way has no more slabs, and fits wherever this way fits
            tiling = Tiling(
                (deep, height, width), halo, items, near, tiles, slabs, slabs_w, slabs_h, group_rows, step, run
            )
            ways.append((last, tiling))
        if ways:
            found.append((prod(halo) * items, ways))
    return found
