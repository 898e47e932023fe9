"""Defines what one compilation of the halo kernel fixes (`Build`), and the sizes that follow from that directly.

A build answers four questions, each with a choice of its own: how input arrives (`Input`), how sums leave (`Output`),
who divides K (`Division`) and where weights live (`Weights`). halo_choices.cuh has the kernel's policies of the same
names. The other fields are the layer, what a tile computes (`Tile`) and what a block consists of (`Block`).

The headers of halo.cuh and halo_layout.cuh explain the terms: march, slab, stage, slot, chunk, part, panel, variant.
A line is an input line as it lies in memory (halo_lines.cuh). An image is a copy of outputs in shared memory, as they
will lie in global memory (halo_images.cuh). This module knows nothing of volumes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from math import gcd
from typing import Any

from ...planning.geometry import Geometry, Triple
from ...planning.plain_data import changed, once
from ...planning.scalars import ceil_div, round_up
from .measured import CHOICES
from .program import Program, Split, gather_program, programs

SLAB = 64  # positions of one matrix instruction, and thus of a slab
STEP_BYTES = 32  # bytes of K that one matrix instruction takes
MOST_PANELS = 4  # most panels whose sums are added to the totals at once in strict float32


# ---- the choices --------------------------------------------------------------------------------------------------


class Input(IntEnum):
    """How input arrives in the stages of a block."""

    LOADED = 0  # producers load it to registers, round it and store it to the stages
    COPIED = 1  # asynchronous copies bring rows of channels; producers round float32 in shared memory
    REWRITTEN = 2  # asynchronous copies bring rows of channels that a previous launch has rounded
    IN_REGISTERS = 3  # asynchronous copies bring rows; consumers round float32 (halo_registers.cuh)
    LINES = 4  # asynchronous copies bring lines as they lie in memory (halo_lines.cuh)
    TURNED = 5  # asynchronous copies bring pieces of lines, which producers transpose (halo_turns.cuh)

    def __init__(self, value: int) -> None:
        self.copied = value in (1, 2, 3)  # whether asynchronous copies bring rows of channels


class Output(IntEnum):
    """How sums leave the registers of consumers."""

    DIRECT = 0  # stores of lanes, for channels-last outputs also through a small scratch
    IMAGES = 1  # images of output rows, which may begin at any address (halo_images.cuh)
    LONG_RUNS = 2  # images of all output rows of a tile of lines, as long runs (halo_long_runs.cuh)


class Division(IntEnum):
    """Who divides K, the sum over input channels and taps (split-K)."""

    NOBODY = 0
    BLOCKS = 1  # blocks divide the chunks of every tile, and another launch adds up their portions
    LAST_TILES = 2  # blocks divide the chunks of the last tiles only, to end at the same time
    CONSUMERS = 3  # the consumers of a block have the same slabs and alternate at panels


class Holding(IntEnum):
    """Which output channels of a position a warp must hold for what follows the sums."""

    ANY = 0
    ALL = 1  # all channels
    REDUCED = 2  # all channels, of which one number is stored


class Weights(IntEnum):
    """Where the packed weights of a column tile live."""

    RESIDENT = 0  # all panels stay in shared memory
    STREAMED = 1  # panels pass through slots of shared memory
    SMALL_PANELS = 2  # panels of one unit each pass through slots of shared memory

    def __init__(self, value: int) -> None:
        self.resident = value == 0


@dataclass(frozen=True)
class Tile:
    """What one tile computes with one column tile."""

    groups: int  # groups of the geometry in a column tile
    outputs: int  # output channels of a group in a column tile
    slabs: int  # slabs per consumer
    row_bytes: int  # bytes of a row of channels in a stage
    merged: int = 1  # groups of the layer per group of the geometry, with zero weights from one to another


@dataclass(frozen=True)
class Block:
    """The warpgroups of a block, and the buffers between them."""

    consumers: int  # warpgroups that multiply
    producers: int  # warpgroups that load
    stages: int  # buffers of input
    slots: int  # buffers of streamed panels
    shared_bytes: int  # shared memory of the block


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
    gather: bool  # whether a position gathers from all phase planes of the read tensor (input gradient)
    dtype: str
    strict: bool  # whether each float32 product is three TF32 products
    march: bool  # whether a block walks along depth with a flat tile
    split: Split
    tile: Tile
    block: Block
    input: Input = Input.LOADED
    output: Output = Output.DIRECT
    division: Division = Division.NOBODY
    weights: Weights = Weights.RESIDENT

    @once
    def _hash(self) -> int:
        choices = (self.input, self.output, self.division, self.weights)
        return hash((self.geometry, self.march, self.split, self.tile, self.block, *choices))

    def __hash__(self) -> int:
        """Returns a hash that is computed once: a search looks the same build up in caches thousands of times."""
        return self._hash

    def but(self, **changes: Any) -> Build:
        """Returns the build with other values of some fields, which may also be fields of its tile or its block."""
        for name, part in (("tile", self.tile), ("block", self.block)):
            inner = {each: changes.pop(each) for each in list(changes) if each in part.__dataclass_fields__}
            if inner:
                changes[name] = changed(part, inner)
        return changed(self, changes)

    # ---- the program

    @once
    def programs(self) -> tuple[Program, ...]:
        """The program of each variant."""
        if self.gather:
            return (gather_program(self.geometry.axes, self.march),)
        fine = self.weights is Weights.SMALL_PANELS
        registers = self.input is Input.LINES and self.item_bytes == 2
        return programs(
            self.geometry.axes, self.march, self.split, self.tile.outputs, self.beside_instruction, fine, registers
        )

    @once
    def program(self) -> Program:
        return self.programs[0]

    @property
    def beside_instruction(self) -> float:
        """The overhead of a matrix instruction in cycles, by which the order of a march's columns is chosen.

        16-bit operands out of registers have no overhead.
        """
        if not self.march or (self.input is Input.LINES and self.item_bytes == 2):
            return 0.0
        many = self.item_bytes == 4 and self.geometry.in_per_group > self.step_items
        return CHOICES.instruction_many_channels if many else CHOICES.instruction

    @once
    def own_shifts(self) -> bool:
        """Whether variants have shifts of their own; each pattern then has room for the shifts of any variant."""
        return any(program.shifts != self.program.shifts for program in self.programs)

    @once
    def pattern_shifts(self) -> tuple[int, ...]:
        """For each source and pattern, the most shifts that any variant has."""
        return tuple(max(map(len, shifts)) for shifts in zip(*(p.shifts for p in self.programs), strict=True))

    @once
    def chunk_fields(self) -> int:
        """The number of fields in all panels of a chunk, with room for the most shifts of any variant."""
        p = self.program
        if not self.own_shifts:
            return p.chunk_fields
        return sum(n * len(units) * p.unit for n, units in zip(self.pattern_shifts, p.patterns, strict=True))

    @once
    def span(self) -> Triple:
        """The number of positions along each dimension by which a halo is larger than its tile."""
        return tuple(max(program.span[axis] for program in self.programs) for axis in range(3))

    @once
    def sheet_step(self) -> int:
        """The number of planes from one that some shift reads to the next: above 1 if the kernel is dilated."""
        return gcd(*(shift[0] for program in self.programs for shifts in program.shifts for shift in shifts)) or 1

    @once
    def origins_w(self) -> set[int]:
        """The first inputs of a halo's lines, relative to the tile, in all programs and sources."""
        return {dimensions[2].origin for program in self.programs for dimensions in program.sources}

    @property
    def torn(self) -> bool:
        """Whether neighbouring outputs along w come from different column tiles, which write partial sectors."""
        return self.split[2] and self.geometry.axes[2].stride > 1

    @once
    def kinds(self) -> tuple[VariantKind, ...]:
        """The kinds of variants, those with the most taps first."""
        counts = Counter(tuple(map(len, program.shifts)) for program in self.programs)
        first = {tuple(map(len, program.shifts)): program for program in reversed(self.programs)}
        width, registers = self.tile.outputs, self.input in (Input.LINES, Input.IN_REGISTERS)
        return tuple(
            VariantKind(
                counts[shifts],
                len(program.taps) * self.chunks,
                program.cycles(width, registers=registers) * self.steps,
                program.shared_cycles(width) * self.steps,
                self.chunks * self.halves * program.chunk_fields * width * self.part_bytes,
            )
            for shifts, program in sorted(first.items(), key=lambda item: -len(item[1].taps))
        )

    @once
    def depth_shifts(self) -> tuple[tuple[tuple[tuple[int, int], int], ...], int]:
        """Where panels read along d, and the planes that are read from one position to the next.

        The former are pairs of ((planes from a position to its input, phase along d), number of panels)."""
        found: Counter[tuple[int, int]] = Counter()
        p = self.program
        for i, shifts in enumerate(p.shifts):
            source = i // len(p.patterns)
            found.update((p.sources[source][0].origin + d, p.phases[source][0]) for d, *_ in shifts)
        return tuple(found.items()), p.read_step[0]

    # ---- marches

    @once
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

    @once
    def line_planes(self) -> int:
        """The number of planes that a step of a march reads if input arrives in lines."""
        return len({phase[0] for phase in self.program.phases})

    def lines_read(self, lines: int) -> int:
        """Returns the number of input lines that this number of lines of positions reads."""
        axis = self.geometry.axes[1]
        if self.gather:
            return (lines - 1) * axis.stride + axis.dilation * (axis.kernel - 1) + 1
        return lines + self.span[1]

    # ---- elements and K

    @once
    def item_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def written_bytes(self) -> int:
        """The bytes of an output as the kernel writes it."""
        return 4 if self.division is Division.BLOCKS else self.item_bytes

    @property
    def halves(self) -> int:
        """The number of TF32 numbers whose sum represents a value."""
        return 2 if self.strict else 1

    @property
    def step_items(self) -> int:
        return STEP_BYTES // self.item_bytes

    @property
    def group_slots(self) -> int:
        """The number of channels that a group takes in a row, with padding to whole steps."""
        return round_up(self.geometry.in_per_group, self.step_items)

    @once
    def channel_slots(self) -> int:
        return self.tile.groups * self.group_slots if self.tile.groups > 1 else self.geometry.in_per_group

    @once
    def part_bytes(self) -> int:
        return self.tile.row_bytes // self.program.parts

    @once
    def chunks(self) -> int:
        return ceil_div(self.channel_slots * self.item_bytes, self.part_bytes)

    @once
    def steps(self) -> int:
        """The number of steps in all chunks; strict float32 has three TF32 products for each product."""
        return (3 if self.strict else 1) * ceil_div(self.channel_slots, self.step_items)

    # ---- columns and panels

    @once
    def columns(self) -> int:
        return self.tile.groups * len(self.program.fields) * self.tile.outputs

    @once
    def out_tiles(self) -> int:
        return ceil_div(self.geometry.out_per_group, self.tile.outputs)

    def holds(self, holding: Holding) -> bool:
        """Tells whether a warp has complete sums of the channels, and stores them as what follows needs it."""
        if holding is Holding.ANY:
            return True
        whole = self.out_tiles == 1 and self.tile.groups == self.tile.merged == 1
        direct = holding is Holding.ALL or self.output is Output.DIRECT
        return whole and direct and self.division in (Division.NOBODY, Division.CONSUMERS)

    @once
    def column_tiles(self) -> int:
        return self.geometry.groups // self.tile.groups * self.out_tiles * len(self.programs)

    @property
    def sums(self) -> int:
        """The number of accumulators of a consumer thread; strict float32 has those of a panel and the totals."""
        return self.halves * self.tile.slabs * self.columns // 2

    @once
    def tile_bytes(self) -> int:
        """The bytes of all panels of one column tile."""
        return self.chunks * self.halves * self.chunk_fields * self.tile.outputs * self.part_bytes

    @property
    def packed_bytes(self) -> int:
        """The bytes of all panels of all column tiles."""
        return self.column_tiles // len(self.programs) * sum(kind.count * kind.panel_bytes for kind in self.kinds)

    @once
    def panels_at_once(self) -> int:
        """The number of panels whose sums are added to the totals at once in strict float32, with the fewest
        additions in all: panels of at most 32 input channels together, and panels that are left over alone."""
        if not self.strict or self.division is Division.CONSUMERS:
            return 1
        channels = min(self.part_bytes // self.item_bytes, self.group_slots)
        return min(range(1, max(1, min(MOST_PANELS, 32 // channels)) + 1), key=self._additions)

    @once
    def additions_per_panel(self) -> float:
        """The additions to the totals for each panel in strict float32."""
        return self._additions(self.panels_at_once) / sum(self.pattern_shifts)

    def _additions(self, at_once: int) -> int:
        return sum(n // at_once + n % at_once for n in self.pattern_shifts)

    # ---- work of a block

    @property
    def threads(self) -> int:
        return 128 * (self.block.producers + self.block.consumers)

    @property
    def loaders(self) -> int:
        """The number of warps that load the halo: one producer warp streams panels unless they are resident."""
        return 4 * self.block.producers - (0 if self.weights.resident else 1)

    @property
    def staged(self) -> bool:
        """Whether asynchronous copies fill more than two stages, outside of marches."""
        return self.input.copied and not self.march and self.block.stages > 2

    @once
    def stages_filled(self) -> int:
        """The number of stages that are filled for one tile, or for one plane of a march."""
        sources = self.line_planes if self.input is Input.LINES else len(self.program.sources)
        return self.chunks * sources

    @property
    def turns(self) -> int:
        """The number of consumers that alternate at the panels of the same slabs."""
        return self.block.consumers if self.division is Division.CONSUMERS else 1

    @once
    def round_slabs(self) -> int:
        """The number of slabs that all consumers compute at a time."""
        return self.tile.slabs * self.block.consumers // self.turns

    @once
    def max_passes(self) -> int:
        """The most passes over a tile: with several, the stages of all chunks must fit, and one to prefetch into."""
        once = self.march or self.division is not Division.NOBODY or self.block.stages <= self.stages_filled
        return 1 if once else 8

    @property
    def skips(self) -> bool:
        """Whether consumers skip the products of a slab with planes above or below the input."""
        few = self.input.copied or self.division is Division.LAST_TILES
        return few and not (self.weights.resident or self.march or self.strict)

    def __str__(self) -> str:
        apart = ", ".join(name for name, split in zip("dhw", self.split, strict=True) if split)
        phases = f"phases along {apart} apart" if apart else "phases together"
        way = "gathering" if self.gather else "marching along depth" if self.march else phases
        tile, block = self.tile, self.block
        long_runs = ", outputs stored as long runs" if self.output is Output.LONG_RUNS else ""
        words = [
            f"{way}, {self.columns} columns x {block.consumers} x {tile.slabs} slabs of {SLAB} positions, ",
            f"{block.stages} stages, {block.producers} producer warpgroup{'s' if block.producers > 1 else ''}, ",
            f"weights {'resident' if self.weights.resident else 'streamed'}",
            _ARRIVALS[self.input],
            long_runs,
            ", in small panels" if self.weights is Weights.SMALL_PANELS else "",
            _DIVISIONS[self.division],
            f", {tile.merged} groups as one" if tile.merged > 1 else "",
            ", stores through images" if self.output is Output.IMAGES else "",
            ", in portions" if self.division is Division.BLOCKS else "",
        ]
        return "".join(words)


_ARRIVALS = {
    Input.LOADED: "",
    Input.COPIED: ", input copied past registers",
    Input.REWRITTEN: ", input rounded and copied past registers",
    Input.IN_REGISTERS: ", input copied past registers, rounded by consumers",
    Input.LINES: ", input in lines as in memory",
    Input.TURNED: ", pieces of input lines copied past registers and transposed",
}
_DIVISIONS = {
    Division.NOBODY: "",
    Division.BLOCKS: "",
    Division.LAST_TILES: ", last tiles divided",
    Division.CONSUMERS: ", consumers divide K",
}
