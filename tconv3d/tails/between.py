"""Computes the small tensors between the launches of a run: what passes read besides volumes, and small results.

A gap lies before each pass that sums, and before the passes that write. One kernel computes all that a gap must give
(`numbers.py`): vectors of the passes behind it, results of the graph, and new running statistics. Nodes that no
program can compute are left to PyTorch, one operator after the other, and so is every gap where a runner asks for it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_ops import number_executor
from ..torch_ops.pytorch_ops import statistics_dtype
from ..torch_ops.runner import Runner
from .axes import AxisPass, Reduction
from .computing import Env, compute_ready, finished, means_and_variances, stacked
from .numbers import Assembled, Assembler, CannotAssemble, Made, Moments, Sums
from .pointwise import aliases, meta, packet_of
from .pool_gradients import Gathered, GatherPass
from .rounds import Divided, Pass, Written
from .stages import Statistics
from .tracing import writes

aten = torch.ops.aten

MOMENTS = "moments"
MOST_NUMBERS = 1 << 17  # numbers of a tensor that programs read
_EXTREMES = (aten.amax, aten.amin)
_EQUALITIES = (aten.eq, aten.ne, aten.ge, aten.le)  # operators that tell equal numbers from others
Vectors = tuple[tuple[fx.Node, tuple[int, ...]], ...]


@dataclass
class Left:
    """Holds what passes and the convolution have left of one run, of which no node was computed yet."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[fx.Node, Sums] = field(default_factory=dict)
    moments: dict[fx.Node, Moments] = field(default_factory=dict)

    def add_moments(self, found: Tensor, statistics: Statistics) -> None:
        """Notes the statistics of the convolution's result, [2, N, groups]."""
        _, batch, groups = found.shape
        self.tensors[MOMENTS] = found
        for node in statistics.nodes:
            self.moments[node] = Moments(MOMENTS, (2, batch, groups), found.dtype, statistics)

    def add_sums(self, name: str, found: Tensor, reductions: Sequence[Reduction]) -> None:
        """Notes the sums of every strip of a pass, [N, C, slots, sums]."""
        self.tensors[name] = found
        batch, channels, slots, count = found.shape
        for place, each in enumerate(reductions):
            self.sums[each.node] = Sums(name, (batch, channels, slots, count), found.dtype, each, place)

    def add_axis_sums(self, name: str, found: Tensor, one: AxisPass, env: Env) -> None:
        """Notes what a pass along an axis has added up: [N, C, slots, sums], or [1, length, slots, sums]."""
        if one.dims == {1}:
            self.add_sums(name, found, one.summed)
            return
        totals = found[0].sum(1, dtype=torch.float64)
        for place, each in enumerate(one.summed):
            like = each.node.meta["val"]
            env[each.node] = (totals[:, place] / each.count).reshape(like.shape).to(like.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what was left: a pass sums in more strips where an address is no multiple of 16 bytes."""
        return tuple(tuple(each.shape) for each in self.tensors.values())

    def finish(self, env: Env) -> None:
        """Computes with PyTorch what the nodes give, for a gap that PyTorch computes."""
        for node, each in self.sums.items():
            if node not in env:
                total = self.tensors[each.name][..., each.place].sum(2, dtype=torch.float64)
                env[node] = finished(each.reduction, total)
        if any(node not in env for node in self.moments):
            (statistics,) = {each.statistics for each in self.moments.values()}
            env.update(means_and_variances(self.tensors[MOMENTS], statistics))


class Between:
    """Computes the gaps of one divided graph.

    `saved` are nodes that the caller needs after the run, `given` nodes that an earlier run has saved.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        divided: Divided,
        saved: Collection[fx.Node] = (),
        given: Collection[fx.Node] = (),
    ) -> None:
        self._divided = divided
        self._compares = _compares_extremes(graph, divided, saved, given)
        output = next(node for node in graph.graph.nodes if node.op == "output")
        self._outside = {*saved, *output.all_input_nodes}
        self._outside |= {each for node in divided.left for each in node.all_input_nodes}
        self._outside |= {each for one in divided.rounds for launch in one.passes for each in _read_alone(launch)}
        self._outside |= {each for one in divided.rounds for sums in one.sums for each in sums.launch.wholes}
        pools = [sums.pool for one in divided.rounds for sums in one.sums if sums.pool is not None]
        self._outside |= {each for pool in pools for each in _of_pool(pool)}
        self._programs: dict[Any, tuple[Assembled, ...] | None] = {}  # by gap and shapes of what was left
        results = set(output.all_input_nodes)
        self._values = [
            bool({*results, *(each for node in one.left for each in node.all_input_nodes)} & aliases(one.value))
            for one in divided.rounds
        ]
        # PyTorch computes what reads large tensors: views of residuals, for example, or their sums. It also takes one
        # of several tensors that exist.
        self._apart = [
            node
            for one in divided.rounds
            for node in one.small
            if node.target is operator.getitem or any(_is_large(each) for each in node.all_input_nodes)
        ]

    def needs_value_of(self, number: int) -> bool:
        """Tells whether anything but its passes reads the tensor that a round begins at."""
        return self._values[number]

    def fill(
        self, at: tuple[int, int], launches: Sequence[Vectors], x: Tensor, env: Env, left: Left, runner: Runner
    ) -> list[Tensor | None]:
        """Computes the gap `at` (the round, and the sums of it that follow), and returns the vectors of each launch.

        x is the tensor that the passes behind the gap read.
        """
        if self._compares or not runner.runs_programs:
            return self._with_pytorch(at, launches, x, env, left)
        compute_ready([node for node in self._apart if node not in left.moments], env)
        key = at, left.shapes
        if key not in self._programs:
            self._programs[key] = self._assembled(at, launches, x, env, left)
        programs = self._programs[key]
        sources = None if programs is None else [_sources(each, env, left, x) for each in programs]
        if programs is None or sources is None or any(tensors is None for tensors in sources):
            return self._with_pytorch(at, launches, x, env, left)
        dtype = statistics_dtype(x.dtype)
        stacks = [x.new_empty((len(each), *x.shape[:2]), dtype=dtype) if each else None for each in launches]
        for number, (found, tensors) in enumerate(zip(programs, sources, strict=True)):
            assert tensors is not None
            results = [] if number else [each for each in stacks if each is not None]
            made = [x.new_empty(like.shape, dtype=like.dtype) for like in map(_like, found.made)]
            written = [env[node.args[0]] for node in found.written]  # type: ignore[index]
            scratch = x.new_empty(max(found.scratch, 1), dtype=torch.float64)
            if found.program.steps:
                number_executor.run(found.program, x, (scratch, *tensors, *results, *made, *written), runner)
            for node, tensor in zip(found.written, written, strict=True):
                env[node] = tensor
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)
            parts = dict(zip(found.made, made, strict=True))
            for node, part in found.made:
                env[node] = parts[node, None] if part is None else (parts[node, 0], parts[node, 1])
        return stacks

    def _small(self, at: tuple[int, int]) -> list[fx.Node]:
        """Returns the small nodes of the rounds up to this one."""
        return [node for one in self._divided.rounds[: at[0] + 1] for node in one.small]

    def _with_pytorch(
        self, at: tuple[int, int], launches: Sequence[Vectors], x: Tensor, env: Env, left: Left
    ) -> list[Tensor | None]:
        left.finish(env)
        compute_ready(self._small(at), env)
        return [stacked(each, env, tuple(x.shape), x.dtype, x.device) if each else None for each in launches]

    def _assembled(
        self, at: tuple[int, int], launches: Sequence[Vectors], x: Tensor, env: Env, left: Left
    ) -> tuple[Assembled, ...] | None:
        """Returns the programs of a gap, the first of which gives all vectors, or None if PyTorch must compute it."""
        ready: dict[fx.Node, None] = dict.fromkeys([*left.sums, *left.moments])
        for node in self._small(at):
            if node not in env and all(each in env or each in ready for each in node.all_input_nodes):
                ready[node] = None
        known = {node: value for node, value in env.items() if isinstance(value, Tensor) and value.device == x.device}
        made: list[Made] = []
        for node in ready:
            if node in self._outside and node not in env:
                made += [(node, 0), (node, 1)] if node in left.moments else [(node, None)]
        written = [node for node in ready if node.op == "call_function" and writes(node)]
        stacks = [each for each in launches if each]

        def assembled(stacks: Sequence[Vectors], made: Sequence[Made], written: Sequence[fx.Node]) -> Assembled:
            assembler = Assembler(tuple(ready), known, left.sums, left.moments)
            shapes = [tuple(x.shape)] * len(stacks)
            return assembler.assembled(stacks, shapes, statistics_dtype(x.dtype), made, written)

        if not (stacks or made or written):
            return ()
        try:
            return (assembled(stacks, made, written),)
        except CannotAssemble:
            pass
        try:  # several programs have room for more together
            rest = [assembled((), made, ())] if made else []
            return (assembled(stacks, (), ()), *rest, *([assembled((), (), written)] if written else []))
        except CannotAssemble:
            return None


def _compares_extremes(
    graph: fx.GraphModule, divided: Divided, saved: Collection[fx.Node], given: Collection[fx.Node]
) -> bool:
    """Tells whether numbers are compared with an extreme of them, perhaps in another run, as gradients are.

    One of them must be equal to it. So the vectors that they are computed with must be rounded alike in all gaps of
    both runs, which PyTorch's operators do; a program rounds what it stores alone.
    """
    if any(packet_of(node) in _EXTREMES for node in given):
        return True
    found = {each.node for one in divided.rounds for sums in one.sums for each in sums.reductions if each.extreme}
    compared = any(packet_of(node) in _EQUALITIES for node in graph.graph.nodes)
    return bool(found) and (compared or not found.isdisjoint(saved))


def _is_large(node: fx.Node) -> bool:
    return isinstance(meta(node), Tensor) and meta(node).numel() > MOST_NUMBERS


def _like(made: Made) -> Any:
    node, part = made
    return node.meta["val"] if part is None else node.meta["val"][part]


def _sources(found: Assembled, env: Mapping[fx.Node, Any], left: Left, x: Tensor) -> list[Tensor] | None:
    """Returns the tensors that a program reads, or None if one of them is of another kind than before."""
    tensors: list[Tensor] = []
    for source, dtype in found.sources:
        value = left.tensors[source] if isinstance(source, str) else env[source]
        if value.dtype is not dtype or value.device != x.device:
            return None
        tensors.append(value.contiguous())
    if any(not env[node.args[0]].is_contiguous() for node in found.written):  # type: ignore[index]
        return None
    return tensors


def vectors_of(one: Pass) -> Vectors:
    """Returns the vectors of a pass that writes."""
    return tuple(one.launch.vectors if isinstance(one, Written) else one.vectors)


def _read_alone(one: Pass) -> list[fx.Node]:
    """Returns the small nodes that a pass reads as tensors of their own."""
    if isinstance(one, Written):
        return list(one.launch.wholes)
    found = list(one.wholes)
    if isinstance(one, AxisPass):
        found += [*one.placed, *one.along]
    if isinstance(one, GatherPass):
        found += _of_pool(one.pool)
    return found


def _of_pool(pool: Gathered) -> list[fx.Node]:
    return [pool.grad, *(() if pool.indices is None else (pool.indices,))]
