"""Writes down what a convolution with its tail computes: launches of kernels, and PyTorch's operators between them.

    found = Recording(variant, operations, {"x": x, "weight": weight})
    found.run(lambda: prepared.run(x, weight, None, convolution, runner=found))
    found.steps      # in order, with the tensors by number

The tensors have shapes but no data. The library's own functions run on them (`tails/running.py`), so that an exported
file launches what the library launches. This module does not know text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ...planning import planner
from ...planning.problem import Device, Norm, Pass, Plan, Problem
from ...torch_ops import problems
from ...torch_ops.checks import Convolution
from ...torch_ops.executor import OPERANDS, WITH_STATISTICS
from ...torch_ops.problems import RESULT_TYPES, OperandAddresses, Tail, tf32_level
from ...torch_ops.pytorch_ops import statistics_dtype
from ...torch_ops.runner import Runner
from . import choices
from .formulas import formula
from .passes import DEVICES, STRIDES, Operation, Result, Variant

aten = torch.ops.aten

# What the operation of a pass is called in the file, by its kernel.
NAMES = {
    "tail_pass": "pointwise",
    "tail_sums": "sums",
    "axis_pass": "along_axis",
    "pool_pass": "pool",
    "pool_grad": "pool_grad",
    "pool_grad_sums": "pool_grad_sums",
}


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor of a recording."""

    number: int


@dataclass(frozen=True)
class Step:
    """Describes one operator of PyTorch, or one operation of the file, with `Ref` in place of tensors."""

    target: Any
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    results: tuple[Ref, ...]
    writes: tuple[Ref, ...] = ()  # operands that it overwrites

    @property
    def refs(self) -> list[Ref]:
        """The tensors that it reads."""
        return list(_refs((self.args, dict(self.options))))


def _refs(value: Any) -> Iterable[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _refs(each)
    elif isinstance(value, dict):
        yield from _refs(list(value.values()))


def _replaced(value: Any, same: Mapping[Ref, Ref]) -> Any:
    return tree_map(
        lambda each: same.get(each, each) if isinstance(each, Ref) else each,
        value,
        is_leaf=lambda each: isinstance(each, Ref),
    )


@dataclass
class Operations:
    """Collects the operations of a file; recordings that launch the same share one."""

    variant: Variant
    found: dict[tuple[Any, ...], Operation] = field(default_factory=dict)
    ways: dict[str, set[bool]] = field(
        default_factory=dict
    )  # whether operations, by name, run in place, or not, or both

    def add(
        self, name: str, operands: tuple[str, ...], results: tuple[Result, ...], plan: Plan, note: str, over: bool
    ) -> Operation:
        key = operands, results, plan.launches
        if key not in self.found:
            names = (name, *(f"{name}_{i}" for i in range(2, 100)))
            free = next(each for each in names if each not in self.ways)
            self.found[key] = Operation(free, operands, results, {self.variant: plan}, note=note)
        found = self.found[key]
        self.ways.setdefault(found.name, set()).add(over)
        return found

    @property
    def all(self) -> list[Operation]:
        return [
            replace(
                each, in_place=self.ways[each.name] == {True, False}, only_in_place=self.ways[each.name] == {True}
            )
            for each in self.found.values()
        ]


class Recording(Runner):
    """Records a run on tensors without data; `inputs` are the tensors that the recorded function takes, by name."""

    runs_programs = False  # a file is read by people: operators of PyTorch say more than a program

    def __init__(self, operations: Operations, inputs: Mapping[str, Tensor]) -> None:
        self.operations, self.variant = operations, operations.variant
        self.tensors: list[Tensor] = []  # by number, held so that no two have the same identity
        self.numbers: dict[int, Ref] = {}
        self.steps: list[Step] = []
        self.inputs = {self.ref(tensor): name for name, tensor in inputs.items()}
        self.constants: dict[Ref, Tensor] = {}  # tensors with data that the recorded code makes
        self.results: Any = None
        self.paused = False  # what PyTorch runs now is not part of the run: offers are timed

    def ref(self, tensor: Tensor) -> Ref:
        found = self.numbers.get(id(tensor))
        if found is None:
            found = self.numbers[id(tensor)] = Ref(len(self.tensors))
            self.tensors.append(tensor)
        return found

    def tensor(self, ref: Ref) -> Tensor:
        return self.tensors[ref.number]

    def run(self, function: Callable[[], Any]) -> None:
        """Records a function of the inputs; `results` then has what it returned, with `Ref` in place of tensors."""
        with torch.no_grad(), _Watching(self):
            found = function()
        self.results = self._named(found)
        self._keep_needed()
        self._keep_different()

    def _named(self, value: Any) -> Any:
        return tree_map(lambda each: self.ref(each) if isinstance(each, Tensor) else each, value)

    def add_operator(self, target: Any, args: tuple[Any, ...], options: dict[str, Any], found: Any) -> None:
        """Notes an operator of PyTorch that has run."""
        if self.paused:
            return
        if target is aten.lift_fresh.default:  # what torch.tensor calls on the numbers it got
            self.constants[self.ref(found)] = args[0]
            return
        mutated = target._schema.is_mutable
        listed = found if isinstance(found, (tuple, list)) else (found,)
        results = tuple(self.ref(each) for each in listed if isinstance(each, Tensor))
        writes = (self.ref(args[0]),) if mutated else ()
        self.steps.append(Step(target, self._named(args), self._named(options), results, writes))

    def _keep_needed(self) -> None:
        """Drops steps whose results nobody needs, or which an operation allocates itself."""
        needed = set(_refs(self.results))
        kept: list[Step] = []
        for step in reversed(self.steps):
            if step.writes or any(ref in needed for ref in step.results):
                needed -= set(step.results)
                needed.update(step.refs)
                kept.append(step)
        self.steps = kept[::-1]

    def _keep_different(self) -> None:
        """Drops steps that compute again what a step before them has computed."""
        written = {ref for step in self.steps for ref in step.writes}
        same: dict[Ref, Ref] = {}
        seen: dict[str, Step] = {}
        kept: list[Step] = []
        for step in self.steps:
            step = replace(step, args=_replaced(step.args, same), options=_replaced(dict(step.options), same))
            known = seen.get(key := repr((step.target, step.args, step.options)))
            if known is not None:
                same.update(zip(step.results, known.results, strict=True))
                continue
            if not isinstance(step.target, Operation) and not written & {*step.refs, *step.results}:
                seen[key] = step
            kept.append(step)
        self.steps, self.results = kept, _replaced(self.results, same)

    # ---- what a runner does

    def device_of(self, x: Tensor) -> Device:
        return DEVICES[self.variant.gpu]

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        keep: bool,
        tail: Tail | None,
    ) -> Tensor:
        asked = problems.forward(input, weight, bias, convolution, OperandAddresses(), tail=tail)
        return self._convolution(asked, (input, weight, bias), OPERANDS[Pass.FORWARD], tail)[0]

    def forward_with_statistics(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: int,
        convolution: Convolution,
        keep: bool,
        tail: Tail,
    ) -> tuple[Tensor, Tensor]:
        norm = Norm(groups, 0.0)
        asked = problems.forward(input, weight, bias, convolution, OperandAddresses(), norm=norm, tail=tail)
        statistics = input.new_empty((2, input.shape[0], groups), dtype=statistics_dtype(input.dtype))
        found = self._convolution(asked, (input, weight, bias), WITH_STATISTICS, tail, statistics)
        return found[0], found[1]

    def _convolution(
        self,
        asked: tuple[Problem, problems.Layout],
        given: tuple[Tensor | None, ...],
        names: tuple[str, ...],
        tail: Tail | None,
        *statistics: Tensor,
    ) -> tuple[Tensor, ...]:
        problem, layout = asked
        problem = problem.allowing(tf32_level(self.variant.precision == "tf32"))
        x, weight = given[:2]
        assert x is not None and weight is not None
        dtype = x.dtype if tail is None else tail.per_position or x.dtype
        y = torch.empty_strided(*layout, dtype=dtype, device=x.device)
        operands: tuple[Tensor | None, ...] = given
        note = ""
        if tail is not None:
            names = tail.among(names)
            planner.check_over_channels(problem, DEVICES[self.variant.gpu])
            note = ", then ".join(formula(each) for each in (tail.expression, tail.channels) if each)
            operands = (*given, *((tail.vectors, *tail.wholes) if tail.has_operands else ()))
        self.paused = True
        plan = choices.plan([problem], DEVICES[self.variant.gpu], self.variant.precision)
        self.paused = False
        plain = tail is None and not statistics and {self.ref(x), self.ref(weight)} <= set(self.inputs)
        note = "" if note == "z" else note
        self._add("forward" if plain else "fused_forward", plan, names, (*operands, None, y, *statistics), note)
        return y, *statistics

    def launch(
        self,
        key: tuple[Any, ...],
        plan: Callable[[], Plan],
        names: tuple[str, ...],
        x: Tensor,
        operands: Sequence[Tensor | None],
    ) -> None:
        found = plan()
        types = ("Expression", "Expressions", "Program", "Before", "After")
        told = [formula(str(value)) for name, value in found.launches[0].constants if name in types]
        note = ", then ".join(each for each in told if len(each) > 1)  # one letter is an operand as it is
        self._add(NAMES[found.kernel], found, names, operands, note)

    def _add(
        self, name: str, plan: Plan, names: tuple[str, ...], operands: Sequence[Tensor | None], note: str
    ) -> None:
        """Adds the launches of a plan; operands behind "null" are results."""
        border = names.index("null")
        given = {key: each for key, each in zip(names[:border], operands, strict=False) if each is not None}
        written = dict(zip(names[border + 1 :], operands[border + 1 :], strict=False))
        over = any(result is each for result in written.values() for each in given.values())
        kind = next(iter(given.values())).dtype
        results = tuple(self._result(key, each, kind) for key, each in written.items() if each is not None)
        operation = self.operations.add(name, tuple(given), results, plan, note, over)
        made = tuple(self.ref(each) for each in written.values() if each is not None)
        args = tuple(self.ref(each) for each in given.values())
        self.steps.append(Step(operation, args, {}, made, made if over else ()))

    def _result(self, name: str, tensor: Tensor, kind: torch.dtype) -> Result:
        """Describes a result; its strides are left out if it is contiguous, or a volume in the memory format."""
        shape, dtype = tuple(tensor.shape), "" if tensor.dtype is kind else RESULT_TYPES[tensor.dtype]
        if tensor.dim() == 5 and tensor.stride() == STRIDES[self.variant.layout](shape):
            return Result(name, shape, volume=True, dtype=dtype)
        strides = () if tensor.is_contiguous() else tensor.stride()
        return Result(name, shape, dtype=dtype, strides=strides)


class _Watching(TorchDispatchMode):
    """Tells a recording of every operator that PyTorch runs."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.recording.add_operator(func, args, kwargs or {}, found)
        return found
