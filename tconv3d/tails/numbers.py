"""Assembles programs that compute the small nodes between two passes (families/norm/numbers.py).

    what a pass has summed, statistics, parameters -> program -> vectors of the next passes, gradients, buffers

A node is evaluated where it is used: an instruction computes one element of it, for the index of a step. Which
element of an operand that needs is found by running the node's own views and broadcasts on indices, and is then
described by sizes and strides (`_levels`). Sums become steps of their own. This module knows graphs and shapes, no
kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, fx

from ..families.norm.numbers import (
    FIRST_OPERATION,
    LOAD,
    NUMBER,
    OPERATIONS,
    REGISTERS,
    STORE,
    THREADS,
    TYPES,
    Program,
)
from .axes import Reduction
from .expressions import OPERATORS, Expression, local, number
from .pointwise import Shape, constant, is_view, meta, packet_of, rows_of, shape_of
from .stages import Statistics

aten = torch.ops.aten

MOST_WORK = 1 << 20  # instructions that the threads of the block interpret together: about 50 us on an H200
_CODES = {name: FIRST_OPERATION + place for place, name in enumerate(OPERATIONS)}
_TYPES = {getattr(torch, name): place for place, name in enumerate(TYPES)}
# Operators that give elements of their operand in another order or shape.
_MOVING = (aten.expand, aten.permute, aten.transpose, aten.t, aten.select, aten.slice, aten.repeat)

# Operators that overwrite their first operand, with what they write.
_IN_PLACE = {aten.add_: OPERATORS[aten.add], aten.mul_: OPERATORS[aten.mul], aten.sub_: OPERATORS[aten.sub]}


class CannotAssemble(Exception):
    """Says that PyTorch must compute the nodes."""


@dataclass(frozen=True)
class Sums:
    """Describes what a pass has summed: [N, C, slots, sums], of which a reduction is number `place`."""

    name: str  # what the tensor is called in the run
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    reduction: Reduction
    place: int


@dataclass(frozen=True)
class Moments:
    """Describes means and reciprocal deviations of norm groups: [2, N, groups]."""

    name: str  # what the tensor is called in the run
    shape: tuple[int, int, int]
    dtype: torch.dtype
    statistics: Statistics


Made = tuple[fx.Node, int | None]  # a node, or one of the two tensors of a node with variances and means
Source = fx.Node | str  # a tensor that exists: a node of the graph, or the name of one that is none


@dataclass(frozen=True)
class Assembled:
    """Holds a program and what its tensors are, in order: scratch, sources, results, and overwritten tensors."""

    program: Program
    sources: tuple[tuple[Source, torch.dtype], ...]
    scratch: int  # numbers of float64 that it holds
    made: tuple[Made, ...]  # results behind the vectors of passes
    written: tuple[fx.Node, ...]  # nodes that overwrite their first operand, a captured tensor


Levels = tuple[int, tuple[tuple[int, int], ...]]  # an offset, and sizes and strides, the innermost first


def _levels(places: Tensor) -> Levels:
    """Describes a list of places by sizes and strides."""
    if not len(places):
        raise CannotAssemble
    base = int(places[0])
    rest, found = places - base, list[tuple[int, int]]()
    while len(rest) > 1:
        stride = int(rest[1])
        breaks = (rest[1:] - rest[:-1] != stride).nonzero()
        size = gcd(int(breaks[0]) + 1 if len(breaks) else len(rest), len(rest))
        if size == 1 or len(found) > 5:
            raise CannotAssemble
        found.append((size, stride))
        rest = rest[::size]
    indices, again = torch.arange(len(places), device="cpu"), torch.full_like(places, base)
    for size, stride in found:
        again += indices % size * stride
        indices = indices // size
    if not torch.equal(again, places):
        raise CannotAssemble
    while found and found[-1][1] == 0:
        found.pop()
    return base, tuple(found)


def _indices(shape: Sequence[int]) -> Tensor:
    return torch.arange(prod(shape), device="cpu").reshape(tuple(shape))


@dataclass
class _Step:
    """Collects the instructions of a step, and the registers of what it has computed."""

    count: int
    extent: int = 0
    words: list[int] = field(default_factory=list)
    instructions: int = 0
    registers: int = 0
    known: dict[Any, int] = field(default_factory=dict)
    loaded: dict[Source, set[Levels]] = field(default_factory=dict)

    def register(self) -> int:
        if self.registers == REGISTERS:
            raise CannotAssemble
        self.registers += 1
        return self.registers - 1

    def add(self, code: int, register: int, operand: int, more: int = 0, *rest: int) -> None:
        if max(code, register, operand, more) > 255:
            raise CannotAssemble
        word = code | register << 8 | operand << 16 | more << 24
        self.words += [word - (1 << 32) if word >= 1 << 31 else word, *rest]
        self.instructions += 1

    @property
    def indices(self) -> Tensor:
        return torch.arange(self.count * max(self.extent, 1), device="cpu")

    @property
    def work(self) -> int:
        return self.count * max(self.extent, 1) * self.instructions


class Assembler:
    """Assembles the program of one gap between passes.

    `nodes` are computed; `known` are tensors that exist, `sums` and `moments` say which nodes are found in what
    passes and the convolution have left.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        known: Mapping[fx.Node, Tensor],
        sums: Mapping[fx.Node, Sums],
        moments: Mapping[fx.Node, Moments],
    ) -> None:
        self._nodes, self._known, self._sums, self._moments = set(nodes), known, sums, moments
        self._steps: list[tuple[_Step, tuple[int, int, int]]] = []  # with threads, result and divisor, base
        self._numbers: list[float] = []
        self._sources: dict[Source, torch.dtype] = {}
        self._scratch = 0
        self._added: dict[Any, int] = {}  # places of sums in scratch

    # ---- what a program gives

    def assembled(
        self,
        stacks: Sequence[Sequence[tuple[fx.Node, Shape]]],
        full: Sequence[Shape],
        dtype: torch.dtype,
        made: Sequence[Made],
        writes: Sequence[fx.Node],
    ) -> Assembled:
        """Returns the program. `stacks` are vectors of passes over tensors of the shapes `full`, in type `dtype`.

        The nodes in `writes` overwrite captured tensors, after everything else.
        """
        ends: list[_Step] = []
        results: list[tuple[_Step, int, torch.dtype, int, int]] = []  # step, register, type, result, base

        def step_of(count: int) -> _Step:
            """Returns a step that has room for more results with this many elements."""
            found = next((each for each in reversed(ends) if each.count == count), None)
            if found is None or found.registers > REGISTERS // 2:
                ends.append(found := _Step(count))
            return found

        for place, (stack, shape) in enumerate(zip(stacks, full, strict=True)):
            rows = prod(shape[:2])
            for row, (node, target) in enumerate(stack):
                step = step_of(rows)
                register = self._value(step, node, _indices_of_vector(node, target, shape))
                results.append((step, register, dtype, place, row * rows))
        for place, (node, part) in enumerate(made, len(stacks)):
            like = meta(node) if part is None else meta(node)[part]
            if not isinstance(like, Tensor):
                raise CannotAssemble
            step = step_of(like.numel())
            if part is None:
                register = self._value(step, node, step.indices)
            else:
                register = self._moment(step, node, part, step.indices)
            results.append((step, register, like.dtype, place, 0))
        buffers = [self._known.get(node.args[0]) for node in writes]  # type: ignore[arg-type]
        for place, (node, buffer) in enumerate(zip(writes, buffers, strict=True), len(stacks) + len(made)):
            if buffer is None or not buffer.is_contiguous():
                raise CannotAssemble
            ends.append(step := _Step(buffer.numel()))
            results.append((step, self._overwriting(step, node), buffer.dtype, place, 0))
            own = _levels(step.indices)
            for source, found in step.loaded.items():  # what a thread overwrites may be read by this thread alone
                tensor = self._known.get(source)  # type: ignore[arg-type]
                if any(tensor is each for each in buffers) and not (tensor is buffer and found == {own}):
                    raise CannotAssemble
        first = 1 + len(self._sources)
        for step, register, kind, place, base in results:
            levels = () if step.count == 1 else (step.count, 1)
            step.add(STORE, register, first + place, _type(kind), len(levels) // 2, base, *levels)
        self._steps += [(step, (0, 0, 0)) for step in ends]
        words = [
            word
            for step, numbers in self._steps
            for word in (step.count, step.extent, len(step.words), *numbers, *step.words)
        ]
        tensors = first + len(stacks) + len(made) + len(writes)
        program = Program(tuple(words), tuple(self._numbers), len(self._steps), tensors)
        if not program.fits or sum(step.work for step, _ in self._steps) > MOST_WORK:
            raise CannotAssemble
        return Assembled(program, tuple(self._sources.items()), self._scratch, tuple(made), tuple(writes))

    # ---- elements of nodes

    def _value(self, step: _Step, node: Any, at: Tensor) -> int:
        """Returns the register with the elements `at` of a node, one for every index of the step."""
        if not isinstance(node, fx.Node):
            return self._number(step, node)
        key = node, _levels(at)
        if key not in step.known:
            step.known[key] = self._computed(step, node, at)
        return step.known[key]

    def _computed(self, step: _Step, node: fx.Node, at: Tensor) -> int:
        if node in self._sums:
            return self._load_sum(step, node, self._finish, at)
        if (tensor := self._known.get(node)) is not None:
            return self._load(step, node, tensor.dtype, at)
        if (value := constant(node)) is not None:
            return self._number(step, value)
        if node not in self._nodes or node.op != "call_function" or not isinstance(meta(node), Tensor):
            raise CannotAssemble
        packet, inputs = packet_of(node), node.all_input_nodes
        if node.target is operator.getitem:
            return self._moment(step, inputs[0], node.args[1], at)
        if is_view(node) or (packet is aten._to_copy and _keeps_numbers(node)):
            return self._value(step, inputs[0], at)
        if packet in _MOVING:
            target: Any = node.target
            moved = target(_indices(shape_of(inputs[0])), *node.args[1:], **node.kwargs)
            return self._value(step, inputs[0], moved.reshape(-1)[at])
        if packet in (aten.sum, aten.mean):
            return self._load_sum(step, node, self._add_up, at)
        if packet not in OPERATORS or set(node.kwargs) - {"alpha"}:
            raise CannotAssemble
        return self._operation(step, node, at)

    def _overwriting(self, step: _Step, node: fx.Node) -> int:
        """Returns the register with what a node writes to its first operand."""
        packet = packet_of(node)
        if (
            packet is aten.copy_
            and isinstance(node.args[1], fx.Node)
            and meta(node.args[1]).shape == meta(node).shape
        ):
            return self._value(step, node.args[1], step.indices)
        if packet not in _IN_PLACE or set(node.kwargs) - {"alpha"}:
            raise CannotAssemble
        return self._operation(step, node, step.indices, _IN_PLACE[packet])

    def _operation(self, step: _Step, node: fx.Node, at: Tensor, build: Any = None) -> int:
        registers: list[int] = []

        def operand(value: Any) -> Expression | None:
            if value is None or not isinstance(value, fx.Node):
                return None if value is None else number(value)
            places = _indices(shape_of(value)).expand(shape_of(node)).reshape(-1)[at]
            registers.append(self._value(step, value, places))
            return local(len(registers) - 1)

        options = {name: operand(each) for name, each in node.kwargs.items()}
        tree = (build or OPERATORS[packet_of(node)])(*(operand(each) for each in node.args), **options)
        return self._evaluate(step, tree, registers)

    def _evaluate(self, step: _Step, tree: Expression, registers: Sequence[int]) -> int:
        """Returns the register with what an expression of registers gives."""
        if tree.name == "Local":
            return registers[int(tree.numbers[0])]
        if tree.name == "Number":
            return self._number(step, float(int(tree.numbers[0])) * 2.0 ** int(tree.numbers[1]))
        if tree.name == "Infinity":
            return self._number(step, -torch.inf if tree.numbers[0] == "true" else torch.inf)
        if tree.name == "Power":
            tree = _as_products(*tree.operands)
        if tree.name not in _CODES:
            raise CannotAssemble
        return self._apply(step, tree.name, *(self._evaluate(step, each, registers) for each in tree.operands))

    def _apply(self, step: _Step, name: str, *operands: int) -> int:
        key = name, operands
        if key not in step.known:
            register = step.known[key] = step.register()
            first, second, third = (*operands, 0, 0)[:3]
            step.add(_CODES[name], register, first, second, third)
        return step.known[key]

    def _number(self, step: _Step, value: float) -> int:
        key = "number", float(value)
        if key not in step.known:
            register = step.known[key] = step.register()
            step.add(NUMBER, register, self._constant(float(value)))
        return step.known[key]

    def _constant(self, value: float) -> int:
        if value != value:
            raise CannotAssemble
        if value not in self._numbers:
            self._numbers.append(value)
        return self._numbers.index(value)

    def _load(self, step: _Step, source: Source, dtype: torch.dtype, at: Tensor) -> int:
        self._sources.setdefault(source, dtype)
        step.loaded.setdefault(source, set()).add(_levels(at))
        return self._loaded(step, 1 + list(self._sources).index(source), dtype, at)

    def _loaded(self, step: _Step, place: int, dtype: torch.dtype, at: Tensor) -> int:
        base, levels = _levels(at)
        key = "load", place, base, levels
        if key not in step.known:
            register = step.known[key] = step.register()
            rest = [each for level in levels for each in level]
            step.add(LOAD, register, place, _type(dtype), len(levels), base, *rest)
        return step.known[key]

    # ---- sums

    def _load_sum(self, step: _Step, key: Any, add: Any, at: Tensor) -> int:
        """Loads sums from scratch, which a step before this one computes."""
        if key not in self._added:
            self._added[key] = add(key)
        return self._loaded(step, 0, torch.float64, at + self._added[key])

    def _total(self, step: _Step, register: int, divisor: float) -> int:
        """Adds a step to the program that sums a register, and returns where in scratch its sums begin."""
        base, self._scratch = self._scratch, self._scratch + step.count
        most = max(32, THREADS // step.count)
        team = 32
        while 2 * team <= min(most, THREADS, step.extent):
            team *= 2
        self._steps.append((step, (team, register | self._constant(divisor) << 8, base)))
        return base

    def _add_up(self, node: fx.Node) -> int:
        """Sums a small node over some of its dimensions."""
        (source,) = node.all_input_nodes
        shape = shape_of(source)
        given = node.args[1] if len(node.args) > 1 else None
        listed: Any = given if isinstance(given, (list, tuple)) else []
        reduced = sorted({dim % len(shape) for dim in listed}) or list(range(len(shape)))
        kept = [dim for dim in range(len(shape)) if dim not in reduced]
        extent = prod(shape[dim] for dim in reduced)
        if not shape or 0 in shape:
            raise CannotAssemble
        step = _Step(prod(shape) // extent, extent)
        places = _indices(shape).permute(*kept, *reduced).reshape(-1)
        register = self._value(step, source, places)
        return self._total(step, register, extent if packet_of(node) is aten.mean else 1)

    def _finish(self, node: fx.Node) -> int:
        """Sums what a pass has left of a reduction: slots, and leading dimensions perhaps."""
        found = self._sums[node]
        batch, channels, slots, _ = found.shape
        reduction = found.reduction
        leading = rows_of(reduction.viewed, (batch, channels, prod(reduction.viewed) // (batch * channels), 1, 1))
        if leading is None:
            raise CannotAssemble
        places = _indices(found.shape)[..., found.place].reshape(*reduction.viewed[:leading], slots)
        reduced = [dim for dim in reduction.dims if dim < leading]
        kept = [dim for dim in range(leading) if dim not in reduced]
        count = prod(reduction.viewed[dim] for dim in kept)
        step = _Step(count, places.numel() // count)
        places = places.permute(*kept, *reduced, leading).reshape(-1)
        register = self._load(step, found.name, found.dtype, places)
        return self._total(step, register, reduction.count)

    # ---- statistics that the convolution has left

    def _moment(self, step: _Step, node: fx.Node, which: Any, at: Tensor) -> int:
        """Returns the register with variances (0) or means (1) of the convolution's result."""
        if node not in self._moments:
            raise CannotAssemble
        found = self._moments[node]
        if found.statistics.over_batch:
            return self._load_sum(step, (found.name, which), self._over_batch, at)
        return self._variance(step, found, at) if which == 0 else self._load(step, found.name, found.dtype, at)

    def _variance(self, step: _Step, found: Moments, at: Tensor) -> int:
        """Returns the register with the variance of norm groups, out of reciprocal deviations."""
        deviation = self._load(step, found.name, found.dtype, at + prod(found.shape[1:]))
        return self._apply(step, "Reciprocal", self._apply(step, "Product", deviation, deviation))

    def _over_batch(self, key: tuple[str, int]) -> int:
        """Averages means over batch items; or variances, to which those of the means are added."""
        name, which = key
        found = next(each for each in self._moments.values() if each.name == name)
        _, batch, groups = found.shape
        step = _Step(groups, batch)
        places = _indices((batch, groups)).T.reshape(-1)
        register = self._load(step, name, found.dtype, places)
        if which == 0:
            mean = self._load_sum(step, (name, 1), self._over_batch, step.indices // batch)
            deviation = self._apply(step, "Difference", register, mean)
            square = self._apply(step, "Product", deviation, deviation)
            register = self._apply(step, "Sum", square, self._variance(step, found, places))
        return self._total(step, register, batch)


def _as_products(base: Expression, exponent: Expression) -> Expression:
    """Returns a power with a small exponent, a multiple of 1/2, as products; gradients of norms have such powers."""
    if exponent.name != "Number":
        raise CannotAssemble
    value = float(int(exponent.numbers[0])) * 2.0 ** int(exponent.numbers[1])
    whole, half = divmod(abs(value), 1)
    if half not in (0, 0.5) or whole > 4:
        raise CannotAssemble
    factors = [base] * int(whole) + [Expression("SquareRoot", (base,))] * (half > 0)
    result = factors[0] if factors else number(1)
    for factor in factors[1:]:
        result = Expression("Product", (result, factor))
    return Expression("Reciprocal", (result,)) if value < 0 else result


def _type(dtype: torch.dtype) -> int:
    if dtype not in _TYPES:
        raise CannotAssemble
    return _TYPES[dtype]


def _keeps_numbers(node: fx.Node) -> bool:
    """Tells whether a cast changes no number but by rounding."""
    old, new = meta(node.all_input_nodes[0]).dtype, meta(node).dtype
    return old in _TYPES and new in _TYPES and (new.is_floating_point or new is old)


def _indices_of_vector(node: fx.Node, target: Shape, full: Shape) -> Tensor:
    """Returns which element of a vector belongs to each channel of each batch item."""
    own, leading = shape_of(node), rows_of(target, full)
    assert leading is not None
    places = _indices(own).reshape((1,) * (len(target) - len(own)) + own)
    return places.reshape(places.shape[:leading]).expand(target[:leading]).reshape(-1)
