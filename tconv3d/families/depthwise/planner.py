"""Plans depthwise.cuh and depthwise_weight_grad.cuh: depthwise layers by threads that walk along depth.

At every step of a walk a thread loads `input_step` planes, which feed a window of positions along depth. A lag is the
number of steps from a position to the step that feeds it; a slot is an index in the window.

All types but float64 are computed in exact float32 arithmetic. The compile-time constants depend on the layer and the
memory format alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import isqrt, prod
from typing import Any

from ...planning import offers
from ...planning.calibration import Work
from ...planning.geometry import Triple
from ...planning.launch import Constants, axis_constants
from ...planning.offers import Answer, Wanted
from ...planning.problem import Device, Pass, Plan, Problem, Strides, is_channels_last
from ...planning.scalars import SCALARS, even_pairs, power_of_two_up
from ...planning.side import Side
from ...planning.sums import BIAS_PARTS, weight_sums
from .arguments import DEPTHWISE, DEPTHWISE_WEIGHT_GRAD
from .slabs import COPY, SECTOR, SMALL_STORE

HAS_EPILOGUE = True
THREADS = 128  # per block
REGISTERS = 65536  # per multiprocessor
MAX_REGISTERS = 200  # per thread
MAX_LOADS = 32  # loads of a thread per plane
# Multiply-adds that an H200 computes by these kernels in the time in which it copies a byte: it takes 277 us for 1e9
# of them, and copies 4.27 TB/s.
PRODUCTS_PER_BYTE = 0.845
AHEAD = 4  # planes from a thread's present plane to the plane that it prefetches into L2


@dataclass(frozen=True)
class Walk:
    """Lists the taps of a walk along depth: the plane of a step that each reads, and the slot that it feeds."""

    side: Side
    first_lag: int  # the least lag of all phases along depth
    last_lags: tuple[int, ...]  # the greatest lag of each phase along depth
    slots: int  # positions along depth that a step feeds, for the phase with most
    # Each tap is: tap index (d, h, w), plane of the step, slot, phase along d, phase within the plane, load index.
    taps: tuple[tuple[Triple, int, int, int, int, int], ...]
    loads: tuple[tuple[int, int], ...]  # offsets of each load along h and w, in elements

    @classmethod
    def of(cls, side: Side) -> Walk:
        d, h, w = side.gathers
        depth = [
            (d.tap(f, j), f, *divmod(d.offset(f, j), d.input_step))
            for f in range(d.phases)
            for j in range(d.count[f])
        ]
        plane = [
            ((h.tap(fh, jh), w.tap(fw, jw)), fh * w.phases + fw, (h.offset(fh, jh), w.offset(fw, jw)))
            for fh, fw in product(range(h.phases), range(w.phases))
            for jh, jw in product(range(h.count[fh]), range(w.count[fw]))
        ]
        # A phase without taps is stored too, as if it had one tap with lag 0.
        lags = [[lag for _, of, lag, _ in depth if of == f] or [0] for f in range(d.phases)]
        last = tuple(max(found) for found in lags)
        loads = sorted({offset for _, _, offset in plane})
        taps = tuple(
            ((tap_d, *tap), plane_of, last[phase_d] - lag, phase_d, phase, loads.index(offset))
            for (tap_d, phase_d, lag, plane_of), (tap, phase, offset) in product(depth, plane)
        )
        slots = max(max(found) - min(found) for found in lags) + 1
        return cls(side, min(map(min, lags)), last, slots, taps, tuple(loads))

    @property
    def phases(self) -> Triple:
        d, h, w = self.side.gathers
        return d.phases, h.phases, w.phases

    def registers(self, which: Pass) -> int:
        """Returns an estimate of the registers per thread."""
        if which is Pass.WEIGHT_GRAD:
            return -(-len(self.taps) // 32) * 32 + 2 * len(self.loads) + self.slots + 24
        problem = self.side.problem
        simple = problem.item_bytes == 4 and _known_stride(self.side.x, problem.geometry.groups) > 0
        # Registers for the sums of the window, and for the temporaries of a store.
        sums = (self.slots + (1 if _channel_lanes(self) else 4)) * prod(self.phases)
        return len(self.taps) + sums + 2 * len(self.loads) + (22 if simple else 40)

    def calls(self, every_position: bool) -> tuple[int, ...]:
        """Returns the loads that are prefetched into L2, so that all threads together cover x once.

        Threads that are neighbours along w (`every_position` is false) cover a line with one load each.
        """
        _, h, w = self.side.gathers
        width = w.input_step if every_position else 1
        found = [i for i, at in enumerate(self.loads) if 0 <= at[0] < h.input_step and 0 <= at[1] < width]
        return tuple(found or (0,))

    def constants(self, channel_lanes: int) -> Constants:
        side = self.side
        d, h, w = side.gathers
        calls = self.calls(channel_lanes > 0)
        return (
            ("kWide", side.wide),
            ("kStrideX", _known_stride(side.x, side.problem.geometry.groups)),
            ("kChannelLanes", channel_lanes),
            ("kPatchW", _patch(channel_lanes)[1]),
            ("kGroups", side.problem.geometry.groups),
            ("kAhead", AHEAD),
            ("kTaps", len(self.taps)),
            *((f"kTap{n}", tuple(tap[0][i] for tap in self.taps)) for i, n in enumerate("DHW")),
            ("kTapPlane", tuple(tap[1] for tap in self.taps)),
            ("kTapSlot", tuple(tap[2] for tap in self.taps)),
            ("kTapLoad", tuple(tap[5] for tap in self.taps)),
            ("kFirstLag", self.first_lag),
            ("kLastLag", self.last_lags),
            ("kEndLag", max(self.last_lags)),
            ("kSlots", self.slots),
            ("kLoads", len(self.loads)),
            ("kLoadH", tuple(offset[0] for offset in self.loads)),
            ("kLoadW", tuple(offset[1] for offset in self.loads)),
            ("kCalls", len(calls)),
            ("kCallLoad", calls),
            *axis_constants((d, h, w), "input_step"),
        )


def _walk(problem: Problem) -> Walk:
    """Returns the walk of a pass; the weight gradient walks over dy, as the input gradient does."""
    which = Pass.INPUT_GRAD if problem.which is Pass.WEIGHT_GRAD else problem.which
    return Walk.of(Side.of(replace(problem, which=which)))


def _channel_lanes(walk: Walk) -> int:
    """Returns how many neighbouring threads have neighbouring channels; 0 unless tensors are channels-last."""
    groups = walk.side.problem.geometry.groups
    return min(32, power_of_two_up(groups)) if is_channels_last(walk.side.y) else 0


def _patch(channel_lanes: int) -> tuple[int, int]:
    """Returns the positions of a block along h and w if neighbouring threads have neighbouring channels."""
    if channel_lanes == 0:
        return 1, 1
    positions = THREADS // channel_lanes
    w = power_of_two_up(isqrt(positions))
    return positions // w, w


def _known_stride(strides: Strides, groups: int) -> int:
    """Returns the stride along w if the memory format alone determines it, else 0."""
    return strides[4] if strides[4] in (1, groups) else 0


def why_not(problem: Problem, device: Device) -> str | None:
    g = problem.geometry
    if problem.which is Pass.BIAS_GRAD:
        return "it computes no bias gradients"
    if g.in_per_group != 1 or g.out_per_group != 1:
        return "more than one channel per group"
    if problem.dtype == "float64":
        return "it adds up in float32"
    if min(sum(gather.count) for axis in g.axes for gather in (axis.scatter,)) == 0:
        return "no tap reaches the output"
    walk = _walk(problem)
    if len(walk.loads) > MAX_LOADS or walk.registers(problem.which) > MAX_REGISTERS:
        return "the taps do not fit the registers"
    if walk.side.positions * g.groups >= 2**31:
        return "the volume is too large"
    if problem.which is Pass.WEIGHT_GRAD:
        if problem.bias and not g.own_taps_cover:
            return "no set of taps reads every output once, as a bias's gradient needs it"
        taps = -(-len(walk.taps) // 32)
        if taps & (taps - 1):
            return "the sums of the taps have no halves"
        blocks = 0 if _channel_lanes(walk) else -(-walk.side.grid[1] * walk.side.grid[2] // THREADS)
        if problem.batch * blocks * g.groups * g.taps * 4 > device.workspace_bytes:
            return "the parts do not fit the workspace"
    return None


def plan(problem: Problem, device: Device) -> Plan:
    walk = _walk(problem)
    g, side, channel_lanes = problem.geometry, walk.side, _channel_lanes(walk)
    depth, along_w = side.grid[0], side.grid[2]
    blocks = -(-side.grid[1] * side.grid[2] // THREADS)
    if channel_lanes:
        patch_h, patch_w = _patch(channel_lanes)
        along_w = -(-side.grid[2] // patch_w)
        blocks = -(-g.groups // channel_lanes) * -(-side.grid[1] // patch_h) * along_w
    flat = blocks * problem.batch * (1 if channel_lanes else g.groups)
    resident = max(1, REGISTERS // (walk.registers(problem.which) * THREADS))
    most = depth
    if problem.which is Pass.WEIGHT_GRAD and not channel_lanes:
        most = min(depth, device.workspace_bytes // (max(1, problem.batch) * blocks * g.groups * g.taps * 4))
    length = _length(depth, most, walk.slots, flat, device.multiprocessors * resident)
    parts = -(-depth // length)
    march = {
        "x_strides": side.x,
        "x_size": side.x_size,
        "grid": side.grid,
        "length": length,
        "batch": problem.batch,
        "by_w": along_w,
        "by_blocks": blocks,
        "by_parts": parts,
    }
    tile = f"each thread one position, walking {length} along depth"
    constants: Constants = (("Scalar", SCALARS[problem.dtype]), *walk.constants(channel_lanes))
    if problem.which is Pass.WEIGHT_GRAD:
        units, chunks = flat * parts, -(-g.groups // max(1, channel_lanes))
        grid = min(units, max(1, device.multiprocessors * resident // chunks) * chunks) if channel_lanes else units
        return _plan_weight_grad(problem, walk, constants, grid, resident, tile, march=march, units=units)
    _, h, w = side.gathers
    pairs = w.phases == 2 and side.y[4] == 1  # outputs of two phases are neighbours in memory
    launch = DEPTHWISE.launch(
        flat * parts,
        THREADS,
        (
            *constants,
            ("Epilogue", problem.activation),
            ("kTapPhaseD", tuple(tap[3] for tap in walk.taps)),
            ("kTapPhase", tuple(tap[4] for tap in walk.taps)),
            ("kPhasesD", walk.phases[0]),
            ("kPhases", h.phases * w.phases),
            *axis_constants(side.gathers, "output_step"),
            ("kStrideY", _known_stride(side.y, g.groups)),
            ("kPairs", pairs),
            ("kAligned", pairs and even_pairs(side.y, side.y_size)),
        ),
        side.operands,
        shared_bytes=4 * channel_lanes * (len(walk.taps) | 1),
        min_blocks=resident,
        march=march,
        y_strides=side.y,
        w_strides=problem.weight,
        y_size=side.y_size,
    )
    return Plan("depthwise", "multiply-adds, walking along depth", (launch,), tile=tile)


def _plan_weight_grad(
    p: Problem, walk: Walk, constants: Constants, grid: int, resident: int, tile: str, **values: Any
) -> Plan:
    g, channel_lanes = p.geometry, _channel_lanes(walk)
    splits = max(1, grid // -(-g.groups // max(1, channel_lanes)))
    taps = len(walk.taps)
    totals = (taps + 1) * (THREADS + 1) if channel_lanes else THREADS // 32 * (-(-taps // 32) * 32 + 1)
    main = DEPTHWISE_WEIGHT_GRAD.launch(
        grid,
        THREADS,
        (
            *constants,
            ("kTapIndex", tuple((t[0] * g.kernel[1] + t[1]) * g.kernel[2] + t[2] for t, *_ in walk.taps)),
            ("kBias", p.bias),
            ("kTapOwn", tuple(int(g.is_own(tap)) for tap, *_ in walk.taps)),
        ),
        {"parts": "workspace", "bias_parts": BIAS_PARTS if p.bias else "null"},
        shared_bytes=4 * totals,
        min_blocks=resident,
        x_strides=p.input,
        **values,
    )
    sums, why = weight_sums(p, [main], splits if grid else 0), "multiply-adds, walking along depth"
    tile = f"{tile}, {splits} parts"
    return Plan("depthwise_weight_grad", why, sums.launches, sums.bytes, tile, sums.regions)


PASSES = (Pass.FORWARD, Pass.INPUT_GRAD, Pass.WEIGHT_GRAD)  # passes that this family computes


def offer(wanted: Wanted, device: Device) -> list[Answer]:
    ask = "depthwise", wanted, device, why_not, work, plan
    return [*offers.one_by_one(PASSES, *ask), *offers.weight_with_bias(*ask)]


def work(problem: Problem, device: Device) -> Work:
    """Returns the work of the launches: their products, or as many as there is time for while tensors are moved."""
    launches = 2 + problem.bias if problem.which is Pass.WEIGHT_GRAD else 1
    moved = problem.bytes + (0 if problem.which is Pass.WEIGHT_GRAD else _lost_bytes(Side.of(problem)))
    return Work(launches, products=max(problem.flops / 2, moved * PRODUCTS_PER_BYTE))


def _lost_bytes(side: Side) -> float:
    """Returns how many bytes could be copied in the time that stores of single outputs take beyond their bytes.

    In lines of odd length, pairs of outputs are aligned in every second line. In the other lines neighbouring threads
    store every second output, so that a sector is reached by two stores, which fill a part of it each.
    """
    if side.gathers[2].phases != 2 or side.y[4] != 1 or even_pairs(side.y, side.y_size):
        return 0.0
    item = side.problem.item_bytes
    outputs = side.problem.batch * side.problem.geometry.groups * side.outs * prod(side.y_size)
    each = SMALL_STORE * 2 * item / SECTOR * COPY  # bytes in the time of a store
    return outputs / 2 * max(0.0, each - item)


def _length(depth: int, most: int, slots: int, flat: int, resident: int) -> int:
    """Returns the positions along depth per block that fill waves of blocks best, with few planes loaded twice."""

    def cost(parts: int) -> int:
        length = -(-depth // parts)
        return -(-flat * -(-depth // length) // resident) * (length + slots)

    return -(-depth // min(range(1, max(1, min(most, 64)) + 1), key=cost))
