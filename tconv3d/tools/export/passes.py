"""Lists the operations of an exported file, and plans each operation for every variant.

A variant is a kind of GPU, a precision and a memory format. The planner gets the problems that the executor makes of
such tensors, so the exported kernels are the ones that the library runs. This module does not know source text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ...families.norm import planner as norm_planner
from ...families.norm.planner import Activation, NormProblem, Wanted
from ...planning.gpus import GPUS
from ...planning.launch import Constants
from ...planning.problem import Device, Norm, Pass, Plan, Problem, channels_last_strides, contiguous_strides
from ...torch_ops.executor import BACKWARD, OPERANDS, WITH_STATISTICS
from ...torch_ops.norm_executor import GRADIENT, NORMALIZE
from ..bench.layers import Layer
from ..bench.problems import problems_of_layer
from . import choices

ANY = "any"  # the name of the GPU whose plans run on every GPU of compute capability 8.0 or higher
# Devices that plans are made for. "any" has 101376 bytes of shared memory per block, the least that a GPU of compute
# capability 8.0 or higher offers.
DEVICES = {
    **{name: gpu.device for name, gpu in GPUS.items()},
    ANY: Device("compute capability 8.0 and up", (8, 0), GPUS["H200"].device.multiprocessors, 101376),
}
# The precisions of a file. Both of the first two take float32 tensors: TF32 products, or products of whole numbers.
PRECISIONS = ("tf32", "float32", "float16", "bfloat16")
LAYOUTS = ("contiguous", "channels_last_3d")
EPS = 1e-5  # default eps of PyTorch's GroupNorm
STRIDES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    "contiguous": contiguous_strides,
    "channels_last_3d": channels_last_strides,
}


class NotExportableError(ValueError):
    """Reports that a layer cannot be exported as one file."""


@dataclass(frozen=True)
class Variant:
    """Holds the kind of GPU, the precision and the memory format that an operation is compiled for."""

    gpu: str
    precision: str
    layout: str

    def __str__(self) -> str:
        gpu = "any GPU" if self.gpu == ANY else self.gpu
        return f"{gpu}, {self.precision}, {self.layout}"

    @property
    def dtype(self) -> str:
        """Returns the name of the type of the tensors."""
        return "float32" if self.precision == "tf32" else self.precision

    @property
    def macros(self) -> list[str]:
        """Returns the macros by which the source knows the variant."""
        return [macro(name) for name in (self.gpu, self.precision, self.layout)]


def macro(name: str) -> str:
    """Returns the macro that stands for a GPU, a precision or a layout."""
    return "FOR_" + name.upper().replace(" ", "_")


@dataclass(frozen=True)
class Result:
    """Describes a tensor that an operation writes. Volumes are in the variant's memory format."""

    name: str
    shape: tuple[int, ...]
    volume: bool = False
    dtype: str = ""  # empty means the type of the first operand
    strides: tuple[int, ...] = ()  # given if the result need not be contiguous or a volume


@dataclass(frozen=True)
class Operation:
    """Describes one function of the exported file: named operands, results, and a plan for each variant."""

    name: str
    operands: tuple[str, ...]
    results: tuple[Result, ...]
    plans: dict[Variant, Plan]
    in_place: bool = False  # whether the result may overwrite the first operand
    only_in_place: bool = False  # whether the result always overwrites the first operand
    note: str = ""  # what is computed besides the convolution, as an expression

    @property
    def has_workspace(self) -> bool:
        """Says whether a plan needs scratch memory."""
        return any(plan.workspace_bytes for plan in self.plans.values())


def variants_of(operations: Sequence[Operation]) -> list[Variant]:
    """Returns the variants of a file, in the order of its operations."""
    return list(dict.fromkeys(variant for operation in operations for variant in operation.plans))


def variants(precisions: Sequence[str], layouts: Sequence[str], gpus: Sequence[str]) -> list[Variant]:
    return [Variant(*choice) for choice in product(gpus, precisions, layouts)]


def operations(
    layer: Layer, chosen: Sequence[Variant], forward_only: bool = False, eps: float = EPS
) -> list[Operation]:
    """Returns the operations of a training step of the layer, or of its forward pass alone."""
    wanted = [Pass.INPUT_GRAD, Pass.WEIGHT_GRAD]
    if layer.norm_groups:
        forward = [_statistics(layer, chosen, eps), _normalize(layer, chosen)]
        forward += [] if forward_only else [_norm_grad(layer, chosen)]
    else:
        forward = [_pass(layer, Pass.FORWARD, chosen)]
        wanted += [Pass.BIAS_GRAD] if layer.bias else []
    if forward_only:
        return forward
    return [*forward, *(_pass(layer, which, chosen) for which in wanted), *_together(layer, wanted, chosen)]


def _pass(layer: Layer, which: Pass, chosen: Sequence[Variant]) -> Operation:
    """Returns the operation of one pass: forward, or the gradient of input, weight or bias."""
    *operands, _, _, _ = OPERANDS[which]  # the last three are an unused operand, the result and the workspace
    plans = {v: _plan([problem(layer, which, v)], v) for v in chosen}
    return Operation(which.value, _given(layer, operands), (_result(layer, which),), plans)


def _result(layer: Layer, which: Pass) -> Result:
    results = {
        "y": Result("y", layer.output_shape, volume=True),
        "dx": Result("dx", layer.input_shape, volume=True),
        "dw": Result("dw", layer.weight_shape),
        "db": Result("db", (layer.out_channels,)),
    }
    return results[OPERANDS[which][-2]]


def _together(layer: Layer, wanted: Sequence[Pass], chosen: Sequence[Variant]) -> list[Operation]:
    """Returns one operation for all gradients if other kernels compute them than each alone, else no operation."""
    problems = {v: [problem(layer, which, v) for which in wanted] for v in chosen}
    plans = {v: _plan(p, v) for v, p in problems.items()}
    if all(_kernels(plans[v]) == _kernels(*(_plan([each], v) for each in p)) for v, p in problems.items()):
        return []
    operands = BACKWARD[: BACKWARD.index("null")]
    return [Operation("backward", operands, tuple(_result(layer, which) for which in wanted), plans)]


def _plan(problems: Sequence[Problem], variant: Variant) -> Plan:
    return choices.plan(problems, DEVICES[variant.gpu], variant.precision)


def _kernels(*plans: Plan) -> set[tuple[str, Constants, tuple[int, int, int]]]:
    """Returns what runs: launches with other places in memory are the same kernels."""
    return {(launch.kernel, launch.constants, launch.grid) for plan in plans for launch in plan.launches}


def _given(layer: Layer, operands: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in operands if layer.bias or name != "bias")


# ---- blocks with ReLU and GroupNorm: the convolution also writes the statistics, and normalizing is an operation


def _statistics(layer: Layer, chosen: Sequence[Variant], eps: float) -> Operation:
    *operands, _, _, statistics, _ = WITH_STATISTICS
    norm = Norm(layer.norm_groups, eps)
    problems = {v: replace(problem(layer, Pass.FORWARD, v), relu=True, norm=norm) for v in chosen}
    plans = {v: _plan([p], v) for v, p in problems.items()}
    shape = (2, layer.batch, layer.norm_groups)
    results = Result("y", layer.output_shape, volume=True), Result(statistics, shape, dtype="float32")
    return Operation("forward", _given(layer, operands), results, plans)


def _normalize(layer: Layer, chosen: Sequence[Variant]) -> Operation:
    *operands, _, _ = NORMALIZE
    plans = {v: norm_planner.plan_normalize(norm_problem(layer, v), DEVICES[v.gpu]) for v in chosen}
    result = Result("y", layer.output_shape, volume=True)
    return Operation("normalize", tuple(operands), (result,), plans, in_place=True)


def _norm_grad(layer: Layer, chosen: Sequence[Variant]) -> Operation:
    operands = GRADIENT[: GRADIENT.index("null")]
    wanted = Wanted(input=True, parameters=True, bias=layer.bias)
    plans = {v: norm_planner.plan_gradient(norm_problem(layer, v), wanted, DEVICES[v.gpu]) for v in chosen}
    results = [Result("dz", layer.output_shape, volume=True), Result("dparameters", (2, layer.out_channels))]
    results += [Result("dbias", (layer.out_channels,))] if layer.bias else []
    return Operation("norm_grad", operands, tuple(results), plans)


def norm_problem(layer: Layer, variant: Variant) -> NormProblem:
    last = variant.layout == "channels_last_3d"
    size = prod(layer.output_shape[2:])
    activation = Activation(layer.batch, layer.out_channels, size, variant.dtype, last)
    return NormProblem(activation, variant.dtype, variant.dtype, layer.norm_groups)


# ---- convolutions


def problem(layer: Layer, which: Pass, variant: Variant) -> Problem:
    """Returns the problem that the executor makes of tensors in the variant's memory format."""
    found = problems_of_layer(layer, variant.precision, variant.layout)
    return next(each for each in found if each.which is which)
