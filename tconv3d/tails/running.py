"""Runs a convolution with what follows it: the stages of a tail on this library's kernels, the rest in PyTorch.

The convolution's kernel computes as much of the tail as it can (`Prepared.run`). Calls that record gradients run
another way (`recording.py`), by the same rounds of passes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from ..families.norm.pool import Windows
from ..planning.planner import Refused
from ..planning.problem import contiguous_strides
from ..torch_ops import axis_executor, kept, pool_executor, tail_executor
from ..torch_ops.casting import below_autocast, stream_of
from ..torch_ops.checks import Convolution
from ..torch_ops.problems import Tail
from ..torch_ops.pytorch_ops import statistics_dtype
from ..torch_ops.runner import RUNNER, Runner
from .axes import AxisPass, padded
from .between import Between, Left, vectors_of
from .computing import Env, compute, finished, rows_as_read
from .expressions import VALUE
from .pointwise import aliases
from .pool_gradients import Gathered, GatherPass
from .pools import PoolPass
from .rounds import Divided, Pass, Rounds, Written
from .stages import Stages


@dataclass(frozen=True)
class _Made:
    """Holds what was computed from captured tensors alone, and from the weight."""

    seen: tuple[Any, ...] | None  # weight, bias and captured tensors as they were then; None if it must not be kept
    constant: Env
    folded: tuple[Tensor, Tensor | None] | None
    vectors: Tensor | None  # the vectors of the epilogue, if all come from captured tensors alone


@dataclass
class Prepared:
    """Holds the stages of a tail for one kind of call, and what was computed from captured tensors alone."""

    stages: Stages
    steady: frozenset[int] = frozenset()  # places of passed tensors that are treated as captured ones
    _behind: bool = False  # no kernel computes the first round over channels
    _made: _Made | None = None  # replaced as a whole, because other threads may run the same tail
    _between: Between = field(init=False)
    _ends: Ends = field(init=False)
    _gives_constants: bool = False  # a result comes from captured tensors alone: the caller may write to it

    def __post_init__(self) -> None:
        results = _output(self.stages.graph).all_input_nodes
        self._between = Between(self.stages.graph, self.stages.rounds)
        self._ends = Ends(self.stages.graph)
        self._gives_constants = not aliases(*self.stages.constants).isdisjoint(results)

    def run(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        extra: Sequence[Any],
        parameters: tuple[Tensor, Tensor | None],
        runner: Runner = RUNNER,
    ) -> Any:
        """Returns what the tail gives for the convolution's result.

        `parameters` are weight and bias before autocast has cast them.
        """
        with below_autocast(input):
            return self._run(input, weight, bias, convolution, extra, parameters, runner)

    def _run(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        extra: Sequence[Any],
        parameters: tuple[Tensor, Tensor | None],
        runner: Runner,
    ) -> Any:
        s = self.stages
        env, made = self._start(weight, bias, convolution, extra, parameters)
        if made.folded is not None:
            weight, bias = made.folded

        compute(s.early, env)
        tail, left = tail_of(s, env, made.vectors), Left()

        def convolve(input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution) -> Tensor:
            if s.statistics is None:
                used = None if s.epilogue == VALUE else tail
                return runner.forward(input, weight, bias, convolution, True, used)
            result, found = runner.forward_with_statistics(
                input, weight, bias, s.statistics.groups, convolution, True, tail
            )
            left.add_moments(found, s.statistics)
            return result

        inside = self._over_channels(input, weight, bias, convolution, tail, runner)
        if inside is not None:
            run_rounds(s.rounds, self._between, env, left, runner=runner, first=inside)
            return self._ends.results(env)
        if s.moved is None:
            env[s.fed] = convolve(input, weight, bias, convolution)
        else:
            env[s.fed] = s.moved.forward(input, weight, bias, convolve).to(s.fed.meta["val"].dtype)
        run_rounds(s.rounds, self._between, env, left, runner=runner)
        return self._ends.results(env)

    def _over_channels(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        tail: Tail,
        runner: Runner,
    ) -> Tensor | None:
        """Returns the result of the first round if the convolution's kernel computes it, over channels."""
        if self.stages.over_channels is None or self._behind:
            return None
        try:
            return runner.forward(input, weight, bias, convolution, True, self.stages.over_channels_of(tail))
        except Refused:
            self._behind = True
            return None

    def _start(
        self,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        extra: Sequence[Any],
        parameters: tuple[Tensor, Tensor | None],
    ) -> tuple[Env, _Made]:
        """Returns the captured and passed tensors, and what is computed from captured tensors alone."""
        s, placeholders = self.stages, self._ends.placeholders
        captured = {**self._ends.captured, **{placeholders[place]: extra[place] for place in self.steady}}
        lasting = [value for node, value in captured.items() if node not in s.buffers]
        tensors, stream = [*parameters, *lasting], stream_of(weight)
        made = self._made
        if made is None or not _unchanged(made.seen, tensors, stream) or kept.captured(parameters[0], stream):
            made = self._make(weight, bias, convolution, captured, _seen(tensors, stream, lambda _: self.forget()))
            self._made = made if made.seen is not None and not self._gives_constants else None
        return {**captured, **made.constant, **dict(zip(placeholders, extra, strict=True))}, made

    def _make(
        self,
        weight: Tensor,
        bias: Tensor | None,
        convolution: Convolution,
        captured: Env,
        seen: tuple[Any, ...] | None,
    ) -> _Made:
        s, env = self.stages, dict(captured)
        folded: tuple[Tensor, Tensor | None] | None = None
        vectors_kept: Tensor | None = None
        compute(s.constants, env)
        if s.affine.expression != VALUE:
            vectors = [env[node] for node in s.affine.vectors]
            folded = fold(weight, bias, convolution, s.affine.expression, vectors)
        if s.moved is not None:
            folded = s.moved.operands(*(folded or (weight, bias)))
        if s.vectors and all(node in env for node, _ in s.operands.vectors):
            vectors_kept = _side_by_side(s, env)
        return _Made(seen, {node: env[node] for node in s.constants}, folded, vectors_kept)

    def forget(self) -> None:
        """Drops what was computed from captured tensors and from the weight."""
        self._made = None


def tail_of(stages: Stages, env: Env, vectors: Tensor | None = None) -> Tail:
    """Returns an epilogue with its operands, laid out as the convolution's result."""
    if not stages.vectors and not stages.operands.wholes:
        return stages.tail_alone
    if vectors is None and stages.vectors:
        vectors = _side_by_side(stages, env)
    # The kernel stores its result as it would store z, in whatever layout PyTorch's operators would return it.
    like = next(iter(stages.graph.graph.nodes)).meta["val"]
    wholes = tuple(_laid_out(env[node], like) for node in stages.operands.wholes)
    return Tail(stages.epilogue.cpp, vectors, len(stages.vectors), wholes, stages.reads)


def run_rounds(
    divided: Divided,
    between: Between,
    env: Env,
    left: Left,
    keep: bool = False,
    runner: Runner = RUNNER,
    first: Tensor | None = None,
) -> None:
    """Computes everything behind a value in `env`, whose tensor may be overwritten unless `keep` says otherwise.

    `left` holds the statistics that the convolution has left. `first` is what the only pass of the first round has
    written, if it has run already.
    """
    formed: Env = {}  # what passes have written, with five dimensions
    for number, each in enumerate(divided.rounds):
        if each.is_empty and not left.tensors:
            continue
        if number == 0 and first is not None:
            between.fill((0, 0), [], first, env, left, runner)
            _keep(each.passes[0], first, env, formed)
            continue
        x = formed[each.value] if each.value in formed else env[each.value]
        if axis_executor.is_channels_last(x) != each.channels_last:  # passes are planned for one layout
            x = x.contiguous(memory_format=torch.channels_last_3d if each.channels_last else torch.contiguous_format)
        kept = each is not divided.rounds[-1] or (keep and each.value is divided.rounds[0].value)
        kept = kept or between.needs_value_of(number)
        _run_round(number, each, x, env, formed, left, kept, between, runner)
    if not divided.rounds:
        left.finish(env)
    elif divided.rounds[-1].sums_last:
        between.fill((len(divided.rounds), 0), [], x, env, left, runner)
    compute(divided.left, env)


def _run_round(
    number: int,
    rounds: Rounds,
    x: Tensor,
    env: Env,
    formed: Env,
    left: Left,
    keep: bool,
    between: Between,
    runner: Runner,
) -> None:
    for place, each in enumerate(rounds.sums):
        (vectors,) = between.fill((number, place), [each.launch.vectors], x, env, left, runner)
        expressions = tuple(expression.cpp for expression in each.launch.expressions)
        wholes = [_as_read(x, formed[node] if node in formed else env[node]) for node in each.launch.wholes]
        if extreme := each.reductions[0].extreme:
            (found,) = axis_executor.extreme(x, extreme, expressions[0], vectors, wholes, runner)
            env[each.reductions[0].node] = finished(each.reductions[0], found)
        elif each.pool is not None:
            pool = _tensors_of(each.pool, env)
            parts = pool_executor.gradient_sums(x, *pool, expressions, vectors, wholes, runner)
            left.add_sums(f"sums {number} {place}", parts, each.reductions)
        else:
            parts = tail_executor.sums(x, expressions, vectors, wholes, runner)
            left.add_sums(f"sums {number} {place}", parts, each.reductions)
    at = number, len(rounds.sums)
    every = between.fill(at, [vectors_of(one) for one in rounds.passes], x, env, left, runner)
    for one, vectors in zip(rounds.passes, every, strict=True):
        overwrite = not keep and one is rounds.passes[-1]
        y, more = _run_pass(one, x, vectors, env, formed, overwrite, runner)
        _keep(one, y, env, formed)
        if more is not None and isinstance(one, AxisPass):
            left.add_axis_sums(f"sums along {number}", more, one, env)
        elif isinstance(one, PoolPass) and one.places is not None:
            env[one.places] = more


def _keep(one: Pass, y: Tensor, env: Env, formed: Env) -> None:
    """Notes what a pass has written, with five dimensions and with the shape of its node."""
    shape = one.node.meta["val"].shape
    formed[one.node], env[one.node] = y, y if y.shape == shape else y.reshape(shape)


def _run_pass(
    one: Pass, x: Tensor, vectors: Tensor | None, env: Env, formed: Env, overwrite: bool, runner: Runner
) -> tuple[Tensor, Tensor | None]:
    dtype = one.node.meta["val"].dtype
    listed = one.launch.wholes if isinstance(one, Written) else one.wholes
    wholes = [_as_read(x, formed[node] if node in formed else env[node]) for node in listed]
    if isinstance(one, Written):
        expression = one.launch.expressions[0].cpp
        return tail_executor.evaluate(x, expression, vectors, wholes, dtype, overwrite, runner), None
    if isinstance(one, PoolPass):
        how = one.windows, one.size, one.way, one.averages, one.before.cpp, one.after.cpp
        return pool_executor.run(x, *how, vectors, wholes, dtype, runner, one.places is not None)
    if isinstance(one, GatherPass):
        pool = _tensors_of(one.pool, env)
        return pool_executor.gradient(x, *pool, one.expression.cpp, vectors, wholes, dtype, runner), None
    program = one.program.cpp, one.sweeps, one.each
    sides = _placed(one, env, x), _along(one, env, x)
    sums = tuple(each.cpp for each in one.sums)
    return axis_executor.run(x, one.dims, *program, vectors, wholes, *sides, dtype, overwrite, runner, sums)


def _tensors_of(pool: Gathered, env: Env) -> tuple[Tensor, Tensor | None, Windows]:
    return env[pool.grad], None if pool.indices is None else env[pool.indices], pool.windows


def captured_in(graph: fx.GraphModule) -> Env:
    """Returns the captured tensors of a graph."""
    return {node: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"}


class Ends:
    """Holds where tensors enter and leave a graph that no longer changes, found once for all calls."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.captured = captured_in(graph)
        _, *self.placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._tensors = [node for node in self.placeholders if isinstance(node.meta.get("val"), Tensor)]
        found: Any = _output(graph).args[0]
        self._results = found
        self._are_nodes = isinstance(found, (tuple, list)) and all(isinstance(each, fx.Node) for each in found)

    def given(self, passed: Sequence[Tensor]) -> Env:
        """Returns the captured tensors, and the passed ones by their placeholders."""
        return {**self.captured, **dict(zip(self._tensors, passed, strict=True))}

    def results(self, env: Env) -> Any:
        """Returns what the graph returns."""
        if isinstance(self._results, fx.Node):
            return env[self._results]
        if self._are_nodes:
            return tuple([env[node] for node in self._results])
        return fx.node.map_arg(self._results, lambda node: env[node])


def _output(graph: fx.GraphModule) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.op == "output")


def _side_by_side(stages: Stages, env: Env) -> Tensor:
    """Returns the vectors of an epilogue, [N, C, numbers of a channel]: the vectors and what fills a power of two."""
    like, vectors = stages.fed.meta["val"], stages.vectors
    combined = any(each.name != "Vectored" for each in vectors)
    kind = torch.float64 if combined else like.dtype
    rows = rows_as_read(stages.operands.vectors, env, tuple(like.shape), kind, like.device)
    if combined:
        rows = [each.evaluate(rows[0], rows).to(statistics_dtype(like.dtype)) for each in vectors]
    return torch.stack([*rows, *rows[:1] * ((1 << (len(rows) - 1).bit_length()) - len(rows))], dim=-1)


def _placed(each: AxisPass, env: Env, x: Tensor) -> Tensor | None:
    """Returns operands with one number per position, [number of operands, positions in the order of memory]."""
    if not each.placed:
        return None
    shape = [1 if dim in each.dims else size for dim, size in enumerate(x.shape)]
    order = axis_executor.memory_order(x)
    kind = statistics_dtype(x.dtype)
    return torch.stack([env[node].reshape(shape).permute(order).reshape(-1).to(kind) for node in each.placed])


def _along(each: AxisPass, env: Env, x: Tensor) -> Tensor | None:
    """Returns operands that vary along the axis alone, [number of operands, length]."""
    if not each.along:
        return None
    return torch.stack([env[node].reshape(-1).to(statistics_dtype(x.dtype)) for node in each.along])


def fold(
    weight: Tensor, bias: Tensor | None, convolution: Convolution, expression: Any, vectors: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns weight and bias of the convolution whose result is an affine map of every output channel.

    The map is evaluated at 0 and at 1 in float64, which gives its offset and its factor.
    """
    groups = convolution[3]
    channels = weight.shape[1] * groups
    wide = [each.double().reshape(-1).expand(channels) for each in vectors]
    zero = torch.zeros(channels, dtype=torch.float64, device=weight.device)
    offset = expression.evaluate(zero, wide)
    factor = expression.evaluate(zero + 1, wide) - offset
    per_group = weight.shape[0] // groups
    factors = factor.reshape(groups, 1, -1).expand(groups, per_group, -1).reshape(weight.shape[0], -1)
    scaled = (weight.double() * factors[..., None, None, None]).to(weight.dtype)
    shifted = offset if bias is None else bias.double() * factor + offset
    if weight.is_contiguous(memory_format=torch.channels_last_3d) and not weight.is_contiguous():
        scaled = scaled.contiguous(memory_format=torch.channels_last_3d)
    return scaled, shifted.to(weight.dtype)


def _seen(tensors: Sequence[Tensor | None], stream: int, gone: Callable[[object], None]) -> tuple[Any, ...] | None:
    """Returns what tells whether tensors were written to or replaced, or None if that cannot be told.

    `gone` is called when one of the tensors no longer exists. What is computed on a stream is used on that one alone.
    """
    if not all(tensor is None or kept.may_be_kept(tensor, stream) for tensor in tensors):
        return None
    kept.watch_optimizers()
    versions = (None if t is None else (weakref.ref(t, gone), t.data_ptr(), t._version) for t in tensors)
    return kept.forgotten(), stream, *versions


def _unchanged(seen: tuple[Any, ...] | None, tensors: Sequence[Tensor | None], stream: int) -> bool:
    """Tells whether these are the tensors that `_seen` has seen, with the same contents."""
    if seen is None or seen[:2] != (kept.forgotten(), stream):
        return False
    for before, now in zip(seen[2:], tensors, strict=True):
        if before is None or now is None:
            if before is not now:
                return False
        elif before[0]() is not now or before[1] != now.data_ptr() or before[2] != now._version:
            return False
    return True


def _laid_out(whole: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor as the epilogue reads it, copied if it lies otherwise or at no multiple of 16 bytes.

    It has the strides of `like`, also if it has one batch item; with one channel it is dense.
    """
    whole = _without_booleans(whole, like.dtype)
    shape = padded(tuple(whole.shape))
    one = shape[1] == 1 < like.shape[1]
    strides = contiguous_strides(shape) if one else like.stride()
    placed = all(
        size == 1 or own == wanted for size, own, wanted in zip(shape, whole.stride(), strides, strict=False)
    )
    if whole.dim() == 5 and placed and whole.data_ptr() % 16 == 0:
        return whole
    return torch.empty_strided(shape, strides, dtype=whole.dtype, device=whole.device).copy_(whole)


def _without_booleans(whole: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a mask as numbers 0 and 1 of a type that kernels read, and any other tensor itself."""
    return whole.to(dtype) if whole.dtype is torch.bool else whole


def _as_read(x: Tensor, whole: Tensor) -> Tensor:
    """Returns a whole tensor as passes over x read it."""
    return with_strides_of(x, _without_booleans(whole, x.dtype))


def with_strides_of(result: Tensor, whole: Tensor) -> Tensor:
    """Returns a whole tensor with the strides of the convolution's result, copied if it has others."""
    if whole.stride() == result.stride() and whole.device == result.device:
        return whole
    return torch.empty_strided(result.shape, result.stride(), dtype=whole.dtype, device=result.device).copy_(whole)
