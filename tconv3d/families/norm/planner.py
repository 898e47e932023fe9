"""Plans GroupNorm after a convolution: its statistics, the normalization, and its gradient with the ReLU's.

The kernels are passes over dense activations (sweep.cuh) and small reductions between them. A pass divides
activations into strips; the sums of a strip go to one slot of its channel. The statistics are computed from moments
(count, sum and sum of squares of a set of values), which the convolution's kernel or a pass over its result writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ...planning.arguments import Arguments
from ...planning.launch import Constants, Launch
from ...planning.problem import ITEM_BYTES, Device, Plan, Problem, is_channels_last
from ...planning.scalars import SCALARS, accumulator, ceil_div, round_up
from ...planning.sums import reduce_parts
from ...planning.workspace import ALIGN, placed
from .arguments import (
    CHANNEL_MOMENTS,
    FILL,
    NORM_BOTH,
    NORM_COEFFICIENTS,
    NORM_GRAD,
    NORM_ONCE,
    NORM_SUMS,
    NORMALIZE,
    STATISTICS,
)

THREADS = 256  # per block
VECTORS_PER_THREAD = 8  # vectors of a strip per thread; fewer if multiprocessors would have no work
FLIGHT = 4  # loads of vectors that a thread has in flight (sweep.cuh)
STATISTICS_THREADS = (128, 512)  # threads per block for norm groups with fewer and with at least MANY_MOMENTS moments
MANY_MOMENTS = 1024
# norm_both.cuh computes both passes of the gradient in one launch.
BOTH_BLOCKS = 3  # blocks per multiprocessor
KEPT_BYTES = 21 << 20  # bytes of dy and x that L2 holds between the passes, chosen by measurement on an H200
LEAST_BYTES = 32 << 20  # bytes of dy and x up to which L2 holds them from one launch to the next
# norm_once.cuh reads dy and x once.
CONSUMERS = 16  # consumer warps per block
CHUNK_BYTES = 48 << 10  # bytes of dy and x per chunk: the finder warp takes 2 us per chunk on an H200
TABLE_BYTES = 4096  # bytes of shared memory for barriers and tables
MOST_STAGES = 16  # chunks in a block's shared memory, at most
MOST_UNITS = 1024  # chunks per norm group, at most
KEPT_GROUPS = 3  # norm groups that the shared memory of all blocks together must have room for


@dataclass(frozen=True)
class Activation:
    """Describes dense activations of one shape and format, such as the result of a convolution."""

    batch: int
    channels: int
    volume: int
    dtype: str
    channels_last: bool
    aligned: bool = True  # the addresses of all tensors are multiples of 16 bytes

    @property
    def vector(self) -> int:
        """Elements per load or store."""
        if not self.aligned:
            return 1
        most = 16 // ITEM_BYTES[self.dtype]
        return min(most, self.channels & -self.channels) if self.channels_last else most

    @property
    def bytes(self) -> int:
        return self.batch * self.channels * self.volume * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Strips:
    """Divides a sweep into strips: `struct Strips` of the kernels, and the number of blocks."""

    activation: Activation
    slots: int
    length: int
    blocks: int

    @classmethod
    def of(cls, a: Activation, device: Device, vectors_per_thread: int = VECTORS_PER_THREAD) -> Strips:
        rows = a.batch * a.channels
        if a.channels_last:
            vectors = ceil_div(a.channels, a.vector)
            across = min(vectors, THREADS)
            quantum, parallel = THREADS // across, a.batch * ceil_div(vectors, across) * (THREADS // 32)
        else:
            quantum, parallel = 32 * a.vector, rows
        wanted = ceil_div(device.multiprocessors * 64, max(parallel, 1))  # strips per channel that fill the GPU
        slots = max(
            ceil_div(a.volume, quantum * vectors_per_thread), min(wanted, ceil_div(a.volume, quantum * FLIGHT))
        )
        length = ceil_div(ceil_div(a.volume, slots), quantum) * quantum
        slots = ceil_div(a.volume, length)
        if a.channels_last:
            return cls(a, slots, length, a.batch * slots * ceil_div(vectors, across))
        return cls(a, slots, length, ceil_div(rows * slots, THREADS // 32))

    def launch(
        self,
        arguments: Arguments,
        sums: int,
        operands: Mapping[str, str],
        numbers: Mapping[str, Any],
        min_blocks: int = 2,
        **types: str,
    ) -> Launch:
        """Returns a launch of the kernel that `arguments` declares, which sums `sums` numbers per channel.

        `numbers` are the kernel's arguments other than pointers and strips, `types` the element types of the tensors
        other than the activation.
        """
        a = self.activation
        acc, acc_bytes = accumulator(a.dtype)
        constants: Constants = (
            ("Scalar", SCALARS[a.dtype]),
            ("Acc", acc),
            *((name, SCALARS[dtype]) for name, dtype in types.items()),
            ("kVector", a.vector),
            ("kChannelsLast", a.channels_last),
        )
        shared_bytes = THREADS * a.vector * sums * acc_bytes if a.channels_last else 0
        values = {"min_blocks": min_blocks, "strips": self.arguments, **numbers}
        return arguments.launch(self.blocks, THREADS, constants, operands, shared_bytes=shared_bytes, **values)

    @property
    def arguments(self) -> dict[str, int]:
        """The values of `struct Strips`."""
        a = self.activation
        sizes = {"volume": a.volume, "batch": a.batch, "channels": a.channels}
        return {**sizes, "slots": self.slots, "length": self.length}


# ---- Statistics of the convolution's result.


def with_statistics(plan: Plan, problem: Problem, device: Device) -> Plan:
    """Returns the plan of a convolution, extended by launches that compute the statistics of its result.

    A plan that leaves no moments is first extended by a pass over its result.
    """
    assert problem.norm is not None
    channels, groups = problem.geometry.out_channels, problem.norm.groups
    acc, acc_bytes = accumulator(problem.dtype)
    if plan.moments:
        plan = replace(plan, tile=f"{plan.tile}; leaves the moments of its result")
    else:
        last = is_channels_last(problem.output)
        activation = Activation(problem.batch, channels, prod(problem.output_size), problem.dtype, last)
        strips = Strips.of(activation, device)
        moments = "moments", problem.batch * channels * strips.slots * 4 * acc_bytes
        end, regions = placed([moments], plan.workspace_bytes)
        plan = replace(
            plan,
            launches=(*plan.launches, strips.launch(CHANNEL_MOMENTS, 2, {"x": "y"}, {})),
            workspace_bytes=end,
            regions=(*plan.regions, *regions),
            moments=channels // groups * strips.slots,
            tile=f"{plan.tile}; a pass over its result leaves the moments",
        )
    overlaps = device.capability >= (9, 0)
    threads = STATISTICS_THREADS[plan.moments >= MANY_MOMENTS]
    constants = ("kOverlaps", overlaps), ("Acc", acc)
    blocks, eps = problem.batch * groups, problem.norm.eps
    statistics = STATISTICS.launch(blocks, threads, constants, overlaps=overlaps, eps=eps, count=plan.moments)
    kept = None if plan.kept is None else with_statistics(plan.kept, problem, device)
    return replace(plan, launches=(*plan.launches, statistics), kept=kept)


# ---- Normalization and its gradient, as passes over memory.


@dataclass(frozen=True)
class NormProblem:
    """Describes GroupNorm of activations whose statistics are known."""

    activation: Activation
    result: str  # element type of y and dy
    parameter: str  # element type of weight and bias, if there are any
    groups: int

    @property
    def numbers(self) -> dict[str, Any]:
        """The numeric arguments that all kernels of the norm take, by name."""
        return {"groups": self.groups, "per_group": self.activation.channels // self.groups}


@lru_cache(maxsize=1024)
def plan_normalize(p: NormProblem, device: Device) -> Plan:
    strips = Strips.of(p.activation, device, FLIGHT)  # short strips, FLIGHT vectors per thread
    launch = strips.launch(
        NORMALIZE, 0, {}, p.numbers,
        min_blocks=2 if p.activation.channels_last else 4,  # resident blocks, which limit the registers per thread
        Result=p.result, Parameter=p.parameter,
    )  # fmt: skip
    return Plan("normalize", "one read and one write", (launch,), tile=_describe(strips))


@dataclass(frozen=True)
class Wanted:
    """Says which gradients are wanted: of the ReLU's input, the norm's parameters, the convolution's bias."""

    input: bool
    parameters: bool
    bias: bool


@lru_cache(maxsize=1024)
def plan_gradient(p: NormProblem, wanted: Wanted, device: Device) -> Plan:
    a = p.activation
    way = Once.of(p, device) or (Both.of(p, device) if wanted.input or wanted.bias else None)
    strips = Strips.of(a, device) if way is None else way.strips
    bias_slots = strips.slots * CONSUMERS if isinstance(way, Once) else strips.slots
    acc_bytes = accumulator(a.dtype)[1]
    rooms = {
        "sums": a.batch * a.channels * strips.slots * 2 * acc_bytes,
        "coefficients": 2 * a.batch * p.groups * acc_bytes,
        "turns": 4,
        "by_channel": a.batch * 2 * a.channels * acc_bytes,
        "bias_sums": a.batch * bias_slots * a.channels * acc_bytes if wanted.bias else 0,
    }
    end, regions = placed(rooms.items(), ALIGN)  # a workspace of 256 bytes exists even for a batch of 0
    launches = _passes(p, strips, wanted) if way is None else way.launches(p, wanted, dict(regions))
    overlaps = device.capability >= (9, 0)
    if wanted.parameters and not isinstance(way, Once):
        sizes, strides = (1, 1, 2 * a.channels), (0, 0, 1)
        of = p.parameter, 2 * a.channels, a.batch
        launches.append(reduce_parts(*of, "dparameters", sizes, strides, "by_channel", overlaps))
    if wanted.bias:
        sizes, strides = (1, 1, a.channels), (0, 0, 1)
        of = a.dtype, a.channels, a.batch * bias_slots
        launches.append(reduce_parts(*of, "dbias", sizes, strides, "bias_sums", overlaps))
    name, why = "norm_grad", "two reads of the gradient and of what was normalized, one write"
    if isinstance(way, Both):
        name, why = "norm_both", "one read of the gradient and of what was normalized, another out of L2, one write"
    if isinstance(way, Once):
        name, why = "norm_once", "one read of the gradient and of what was normalized, one write"
    return Plan(name, why, tuple(launches), round_up(end, ALIGN), _describe(strips), regions)


def _passes(p: NormProblem, strips: Strips, wanted: Wanted) -> list[Launch]:
    """Returns the launches of the gradient with one launch per pass."""
    sums = strips.launch(NORM_SUMS, 2, {}, p.numbers, Gradient=p.result)
    coefficients = NORM_COEFFICIENTS.launch(
        p.activation.batch * p.groups,
        THREADS,
        (("Acc", accumulator(p.activation.dtype)[0]), ("Parameter", SCALARS[p.parameter])),
        shared_bytes=THREADS // 32 * 16,
        strips=strips.arguments,
        **p.numbers,
    )
    if not (wanted.input or wanted.bias):
        return [sums, coefficients]
    grad = strips.launch(NORM_GRAD, 1, _bias_sums(wanted), p.numbers, Gradient=p.result, Parameter=p.parameter)
    return [sums, coefficients, grad]


def _bias_sums(wanted: Wanted) -> dict[str, str]:
    return {} if wanted.bias else {"bias_sums": "null"}


def _fill(regions: dict[str, int]) -> Launch:
    """Returns the launch that fills the memory through which blocks communicate with ones: "not yet written"."""
    words = (regions["by_channel"] - regions["sums"]) // 16
    return FILL.launch(ceil_div(words, THREADS), THREADS, (), {"words": "sums"}, count=words)


@dataclass(frozen=True)
class Once:
    """Plans norm_once.cuh: both passes in one launch, data held in shared memory until the sums are known."""

    strips: Strips  # each strip is a chunk, the unit of a bulk copy
    stages: int  # chunks in the ring of a block
    blocks: int

    @classmethod
    def of(cls, p: NormProblem, device: Device) -> Once | None:
        a = p.activation
        item_bytes = ITEM_BYTES[a.dtype] + ITEM_BYTES[p.result]
        aligned = a.vector > 1 and a.volume % a.vector == 0
        if a.batch * a.channels * a.volume * item_bytes <= LEAST_BYTES or a.channels_last or not aligned:
            return None
        if device.capability < (9, 0) or a.dtype == "float64":
            return None
        slots = ceil_div(a.volume * item_bytes, CHUNK_BYTES)
        length = ceil_div(ceil_div(a.volume, slots), a.vector) * a.vector
        slots = ceil_div(a.volume, length)
        stages = min((device.shared_bytes - TABLE_BYTES) // (length * item_bytes), MOST_STAGES)
        units, blocks = a.channels // p.groups * slots, device.multiprocessors
        if units > min(MOST_UNITS, blocks * stages // KEPT_GROUPS):
            return None
        return cls(Strips(a, slots, length, blocks), stages, blocks)

    def launches(self, p: NormProblem, wanted: Wanted, regions: dict[str, int]) -> list[Launch]:
        a, strips = p.activation, self.strips
        item_bytes = ITEM_BYTES[a.dtype] + ITEM_BYTES[p.result]
        threads = 32 * (3 + CONSUMERS)
        once = NORM_ONCE.launch(
            self.blocks,
            threads,
            (
                ("kConsumers", CONSUMERS),
                ("kTableBytes", TABLE_BYTES),
                ("Scalar", SCALARS[a.dtype]),
                ("Acc", accumulator(a.dtype)[0]),
                ("Gradient", SCALARS[p.result]),
                ("Parameter", SCALARS[p.parameter]),
                ("kVector", a.vector),
                ("kChannelsLast", False),
            ),
            _bias_sums(wanted),
            shared_bytes=TABLE_BYTES + self.stages * strips.length * item_bytes,
            overlaps=True,
            strips=strips.arguments,
            **p.numbers,
            stages=self.stages,
        )
        return [_fill(regions), once]


@dataclass(frozen=True)
class Both:
    """Plans norm_both.cuh: both passes in one launch, where L2 holds all norm groups between their passes."""

    strips: Strips
    units: int  # blocks per pass of a norm group
    lag: int  # norm groups whose first pass runs before the second pass of the first of them

    @classmethod
    def of(cls, p: NormProblem, device: Device) -> Both | None:
        a = p.activation
        item_bytes = ITEM_BYTES[a.dtype] + ITEM_BYTES[p.result]
        group_bytes = a.channels // p.groups * a.volume * item_bytes
        if a.batch * p.groups * group_bytes <= LEAST_BYTES or a.channels_last or a.dtype == "float64":
            return None
        if device.capability < (9, 0):
            return None
        strips = Strips.of(a, device)
        units = ceil_div(a.channels // p.groups * strips.slots, THREADS // 32)
        rounds = ceil_div(device.multiprocessors * BOTH_BLOCKS, 2 * units)  # norm groups in flight, per pass
        lag = min(KEPT_BYTES // group_bytes, 1 + 2 * rounds)
        return cls(strips, units, lag) if lag > rounds else None

    def launches(self, p: NormProblem, wanted: Wanted, regions: dict[str, int]) -> list[Launch]:
        numbers = {**p.numbers, "units": self.units, "lag": self.lag}
        types = {"Gradient": p.result, "Parameter": p.parameter}
        both = self.strips.launch(NORM_BOTH, 2, _bias_sums(wanted), numbers, BOTH_BLOCKS, **types)
        blocks = (self.units + 1) * (self.lag + 2 * p.activation.batch * p.groups)
        return [_fill(regions), replace(both, grid=(blocks, 1, 1), shared_bytes=THREADS // 32 * 16, overlaps=True)]


def _describe(strips: Strips) -> str:
    a = strips.activation
    unit = "positions of a block" if a.channels_last else "values of a warp"
    return f"strips of {strips.length} {unit}, vectors of {a.vector}"
