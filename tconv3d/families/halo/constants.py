"""Lists the constants with which the halo kernel is compiled for a build and a job (`Config` in its headers)."""

from __future__ import annotations

from collections.abc import Iterable

from ...planning.launch import Constants
from ...planning.scalars import INT32_MAX, SCALARS
from .build import Build, Division, Input, Output, Weights
from .job import Job
from .loading import vector_parts
from .measured import CHOICES
from .registers import in_flight, line_sets, line_turns, per_thread, row_sets
from .shared_memory import IMAGE_BUFFERS, image_rows, long_run_buffers, long_run_pitch, slot_bytes, stage_rows
from .storing import STORED_BY_PARTNER, in_place, lane_channels, moment_band, partners, stored_vectors


def constants(build: Build, job: Job) -> Constants:
    """Returns all constants of the halo kernel."""
    g, p = build.geometry, build.program
    producer, consumer = per_thread(build)
    lines, in_registers = build.input is Input.LINES, build.input is Input.IN_REGISTERS
    return (
        ("kThreads", build.threads),
        ("kMinBlocks", 1),
        ("Scalar", SCALARS[build.dtype]),
        ("Written", "float" if build.division is Division.BLOCKS else SCALARS[build.dtype]),
        ("kInput", int(Input.REWRITTEN if job.rows else build.input)),
        ("kOutput", int(build.output)),
        ("kDivision", int(build.division)),
        ("kWeights", int(build.weights)),
        ("kAdds", False),
        ("Epilogue", f"tconv3d::LeavingMoments<{job.activation}>" if job.norm else job.activation),
        ("kMomentBand", moment_band(build, job)),
        ("kWide", _wide(job)),
        ("kBias", job.bias),
        ("kUnitC", job.read_last),
        ("kVectorInput", job.vector_input),
        ("kVectorParts", vector_parts(job, p.used_parts)),
        ("kOutputUnitC", job.written_last),
        ("kAlignedPairs", not any(v % 2 for v in (g.out_per_group, job.written[0], *job.written[2:]))),
        ("kProducers", build.block.producers),
        ("kConsumers", build.block.consumers),
        ("kProducerRegisters", producer),
        ("kConsumerRegisters", consumer),
        ("kInFlight", in_flight(build)),
        ("kStages", build.block.stages),
        ("kStageRows", stage_rows(build)),
        ("kSlots", build.block.slots),
        ("kSlotBytes", slot_bytes(build)),
        ("kSharedBytes", build.block.shared_bytes),
        ("kSlabs", build.tile.slabs),
        ("kLead", lead(build)),
        ("kUnrolledShifts", _unrolled_shifts(build)),
        ("kSheetStep", build.sheet_step),
        ("kImageBuffers", IMAGE_BUFFERS),
        ("kLongRunBuffers", long_run_buffers(build)),
        ("kLongRunPitch", long_run_pitch(build)),
        ("kOperandSets", line_sets(build)[0] if lines else row_sets(build) if in_registers else 1),
        ("kStepsAtOnce", line_sets(build)[1] if lines else 1),
        ("kGather", build.gather),
        ("kImageRows", image_rows(build)),
        *layout_constants(build),
        ("kLaneChannels", lane_channels(build, job)),
        ("kField", p.fields),
        ("kLongVectors", 16 // build.written_bytes in stored_vectors(build)),
        ("kFours", 4 in stored_vectors(build) and build.written_bytes == 2),
        ("kPairs", 2 in stored_vectors(build)),
        ("kPartner", partners(p.fields, job.written[4] == 1)),
        ("kStoredByPartner", STORED_BY_PARTNER),
        *_program_constants(build),
        ("kMarch", build.march),
        ("kPaddingD", build.march_padding),
        ("kWindow", build.window),
    )


def _program_constants(build: Build) -> Constants:
    """Returns what the kernel multiplies: where shifts lead, and which elements positions read and write."""
    p = build.program
    origins = p.sources if build.gather else [v.dimensions for v in build.programs]
    written_step = (1, 1, 1) if build.gather else build.geometry.stride
    return (
        ("kShift", _shift_table(build)),
        ("kSpan", tuple(program.span for program in build.programs)),
        ("kStrideD", written_step[0]),
        ("kStrideH", written_step[1]),
        ("kStrideW", written_step[2]),
        ("kUsedParts", p.used_parts),
        ("kReadStepD", p.read_step[0]),
        ("kReadStepH", p.read_step[1]),
        ("kReadStepW", p.read_step[2]),
        ("kReadPhase", p.phases),
        ("kOrigin", tuple(tuple(d.origin for d in dimensions) for dimensions in origins)),
        ("kOffset", tuple(tuple(d.offset for d in v.dimensions) for v in build.programs)),
    )


def layout_constants(build: Build) -> Constants:
    """Returns the constants that the halo kernel and the packing kernel share."""
    g, p = build.geometry, build.program
    return (
        ("kHalves", build.halves),
        ("kPanelsAtOnce", build.panels_at_once),
        ("kGroups", g.groups),
        ("kIn", g.in_per_group),
        ("kOut", g.out_per_group),
        ("kGroupsPerTile", build.tile.groups),
        ("kGroupSlots", build.group_slots),
        ("kOutTile", build.tile.outputs),
        ("kOutTiles", build.out_tiles),
        ("kVariants", len(build.programs)),
        ("kRowBytes", build.tile.row_bytes),
        ("kParts", p.parts),
        ("kSources", len(p.sources)),
        ("kFields", len(p.fields)),
        ("kPatterns", len(p.patterns)),
        ("kUnitFields", p.unit),
        ("kPatternUnit", _running(len(units) for units in p.patterns)),
        ("kShiftRange", _running(build.pattern_shifts)),
        ("kUnit", tuple(unit for units in p.patterns for unit in units)),
        ("kOwnShifts", build.own_shifts),
        ("kVariantShifts", tuple(len(shifts) for program in build.programs for shifts in program.shifts)),
    )


def lead(build: Build) -> int:
    """Returns the number of panels by which the first of two consumers precedes the second (halo_consumer.cuh).

    The lead takes about as long as storing, and is at most half of a tile: a whole tile costs 13%. There is no lead
    where 16-bit outputs are stored through images (any lead costs 3 to 6%) or in place (1 to 3%), nor for float32
    outputs in long runs; for 16-bit outputs in long runs one panel is 3% faster. The first consumer must reach its
    lead without stages and slots that the second has not released; `limit_lead` sees to that where the borders of the
    volume leave fewer panels than are counted here.
    """
    block, long_runs = build.block, build.output is Output.LONG_RUNS
    least = min(sum(map(len, program.shifts)) for program in build.programs)
    of_sources = [len(shifts) for shifts in build.program.shifts] if build.gather else [least]
    if build.input is Input.LINES:
        of_sources = [line_turns(build)]
    panels = sum(of_sources) * build.chunks
    quick = long_runs if build.item_bytes == 4 else build.output is Output.IMAGES or in_place(build)
    if block.consumers != 2 or panels == 0 or build.division is Division.CONSUMERS or quick:
        return 0
    if long_runs:
        return 1
    stored = build.sums * (build.march_step / build.window if build.march else 1)
    wanted = CHOICES.store_cycles * stored * panels / (build.kinds[0].cycles_per_slab * build.tile.slabs)
    least = panels if build.division is Division.NOBODY else sum(of_sources)  # a block may have one chunk of a tile
    ready = panels if build.weights.resident else block.slots - 2
    most = min(min(of_sources) * (block.stages - 1), least // 2, ready)
    return max(0, min(round(wanted + 0.5), most))


def _unrolled_shifts(build: Build) -> int:
    """Returns the number of shifts by which the loop of a streaming build is unrolled.

    It is faster for 16-bit types, but slower if two slabs have several patterns, or if panels are small.
    """
    whole = build.division is not Division.BLOCKS and build.weights is not Weights.SMALL_PANELS
    forward = build.skips and build.item_bytes == 2 and whole and not build.gather
    return 8 if forward and (build.tile.slabs == 1 or len(build.program.patterns) == 1) else 1


def _shift_table(build: Build) -> tuple[tuple[int, ...], ...]:
    """Returns the shifts of one variant, or of all if they have their own, padded to the room of each pattern."""
    return tuple(
        (*shifts, *((0, 0, 0, 0),) * (room - len(shifts)))[i]
        for program in (build.programs if build.own_shifts else build.programs[:1])
        for shifts, room in zip(program.shifts, build.pattern_shifts, strict=True)
        for i in range(room)
    )


def _running(counts: Iterable[int]) -> tuple[int, ...]:
    """Returns 0 and the sum of the counts up to each of them."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return tuple(sums)


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
