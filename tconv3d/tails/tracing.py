"""Traces a tail, the Python function of a convolution's result, to a graph of PyTorch's operators.

The tail runs once on a tensor without data. In-place operations become ordinary ones, and activations and norms
become arithmetic. Tensors that the tail captures (parameters, buffers, closures) are attributes of the graph and stay
the tail's own objects. This module knows nothing of kernels.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .permuting import straighten
from .pointwise import inserted, meta

aten = torch.ops.aten

LOWERED_FROM = "lowered_from"  # the entry of a node's `meta` that names the node whose replacement it is part of

Tail = Callable[..., Any]

# While PyTorch traces, it replaces methods of all modules, in all threads, and cannot trace in two threads at once.
one_at_a_time = threading.RLock()

STRIDES = "strides"  # the entry of a graph's `meta`: the strides of its result as PyTorch's operators return it
SWITCHES_GRADIENTS = "switches_gradients"  # the entry of a graph's `meta`: whether the tail contains `torch.no_grad`

# Operators that are replaced by arithmetic: activations, norms, and shorthands.
_REPLACED = (
    aten.silu, aten.gelu, aten.elu, aten.celu, aten.selu, aten.leaky_relu, aten.hardtanh, aten.hardswish,
    aten.hardsigmoid, aten.mish, aten.softplus, aten.log_sigmoid_forward, aten.softshrink, aten.hardshrink,
    aten.threshold, aten._prelu_kernel, aten.relu6, aten.addcmul, aten.addcdiv, aten.square,
    aten.native_batch_norm, aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training, aten._native_batch_norm_legit_functional,
    aten._batch_norm_with_update, aten._batch_norm_with_update_functional, aten._batch_norm_no_update,
    aten.cudnn_batch_norm,  # what a GPU runs for BatchNorm and InstanceNorm in float32 and float16
    aten.native_dropout,
)  # fmt: skip


# Operators of numbers and bits, with what they compute of truth values.
_LOGIC = {
    aten.add.Tensor: aten.logical_or.default,
    aten.bitwise_or.Tensor: aten.logical_or.default,
    aten.bitwise_and.Tensor: aten.logical_and.default,
    aten.bitwise_not.default: aten.logical_not.default,
}


def _group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    volume: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """GroupNorm as arithmetic: statistics of a view, and numbers that are constant along a channel's volume."""
    wide = torch.promote_types(input.dtype, torch.float32)
    rows = (batch, groups, channels // groups)
    viewed = input.reshape(*rows, volume).to(wide)
    variance, mean = (each.squeeze(3) for each in torch.var_mean(viewed, dim=[2, 3], correction=0, keepdim=True))
    rstd = torch.rsqrt(variance + eps)
    places = (batch, channels, *(1,) * (input.dim() - 2))
    shift, scale = (each.expand(rows).reshape(places) for each in (mean, rstd))
    result = (input - shift) * scale
    shape = (1, channels, *(1,) * (input.dim() - 2))
    if weight is not None:
        result = result * weight.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(input.dtype), mean.view(batch, groups), rstd.view(batch, groups)


def _layer_norm(
    input: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm as arithmetic: statistics of the last dimensions, and operands that vary along them alone."""
    dims = list(range(input.dim() - len(shape), input.dim()))
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    variance, mean = torch.var_mean(wide, dim=dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
    result = (wide - mean) * rstd
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result.to(input.dtype).contiguous(), mean, rstd  # PyTorch's operator returns no other layout


def _variance(
    input: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """A variance by the operator of norms, which the convolution's kernel can compute."""
    dims = list(range(input.dim())) if not dim else [each % input.dim() for each in dim]
    count = prod(input.shape[each] for each in dims)
    rest = count - (1 if correction is None else correction)
    found = torch.var_mean(input, dims, correction=0, keepdim=True)[0] * (count / rest if rest > 0 else inf)
    return found if keepdim else found.squeeze(dims)


def _deviation(input: Tensor, *dim: Sequence[int] | None, **options: Any) -> Tensor:
    """A standard deviation; where it is 0 so is its gradient, as in PyTorch."""
    variance = _variance(input, *dim, **options)
    return torch.where(variance == 0, 0.0, torch.where(variance == 0, 1.0, variance).sqrt())


def _lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    """An interpolation from the nearer end, as PyTorch computes it."""
    near, far = input + weight * (end - input), end - (end - input) * (1 - weight)
    if isinstance(weight, Tensor):
        return torch.where(weight.abs() < 0.5, near, far)
    return near if abs(weight) < 0.5 else far


def _table() -> dict[Any, Any]:
    own = {
        aten.native_group_norm.default: _group_norm,
        aten.native_layer_norm.default: _layer_norm,
        aten.var.correction: _variance,
        aten.std.correction: _deviation,
        aten.lerp.Scalar: _lerp,
        aten.lerp.Tensor: _lerp,
    }
    return {**get_decompositions(_REPLACED), **own}


class _Remembering(TorchDispatchMode):
    """Remembers tensors with data before an operator writes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            raise RuntimeError("it reads a number out of a tensor, which may be another one in the next call")
        if func._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor):
            with unset_fake_temporarily(), proxy_tensor.disable_proxy_modes_tracing():
                self.before.append((args[0], args[0].detach().clone()))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def nothing_written() -> Iterator[TorchDispatchMode]:
    """Gives a mode to trace under; captured tensors that were written meanwhile have their values again afterwards.

    While PyTorch traces, operators of captured tensors alone are computed, and writes to them are real. Other threads
    wait until it is their turn to trace.
    """
    mode = _Remembering()
    try:
        # Whoever counts or moves what autograd saves, a checkpoint for example, must not see the tensors of tracing.
        with one_at_a_time, torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield mode
    finally:
        with torch.no_grad():
            for tensor, value in reversed(mode.before):
                tensor.copy_(value)


_DATA: Any = Tensor.data  # a property, of which PyTorch's types know nothing
_DETACHING = (torch.detach, Tensor.detach, Tensor.detach_, _DATA.__get__)


class _Switches(TorchFunctionMode):
    """Notices what a graph of operators does not show: switches of gradients, and writes to what was detached."""

    seen = False

    def __init__(self) -> None:
        super().__init__()
        self._detached: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or func is torch._C._set_grad_enabled
        result = func(*args, **(kwargs or {}))
        if func in _DETACHING and torch._is_functional_tensor(result):
            self._detached.append((result, torch._functionalize_mutation_counter(result)))
        return result

    def check(self) -> None:
        """Raises an error if a tensor was written to that was detached before; gradients do not flow as values do."""
        if any(torch._functionalize_mutation_counter(each) != before for each, before in self._detached):
            raise RuntimeError("it writes to the memory of a tensor that it has detached")
        self._detached.clear()


class CannotTrace(RuntimeError):
    """Says why a tail cannot be traced; the tail then runs in PyTorch."""


@contextlib.contextmanager
def without_logging() -> Iterator[None]:
    """Keeps PyTorch from writing a traceback to its log if an operator cannot be traced, which a report names."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    usual, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = usual


@contextlib.contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Keeps autocast as it is, but for its cache, into which tensors without data would get."""
    usual = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(usual)


def _again(value: Any) -> Any:
    """Returns a tensor without data of the current mode for one of another mode, and any other value itself."""
    if not isinstance(value, FakeTensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def trace(
    tail: Tail,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    extra: Sequence[Any] = (),
    written: Container[int] = (),
) -> fx.GraphModule:
    """Returns the graph of `tail(z, *extra)` for a z with this shape, layout, type and device.

    Under autocast the casts that it makes are part of the graph. The tail may write to the arguments in `extra` whose
    places `written` lists, and to tensors that it captures.
    """

    if any(isinstance(each, (list, tuple, dict, set)) for each in extra):
        raise CannotTrace("an argument of the call holds others (a list, a tuple or a dictionary)")
    switches = _Switches()

    def called(z: Tensor, *rest: Any) -> Any:  # without the defaults of the tail's own signature
        with mode, switches:
            result = tail(z, *rest)
        switches.check()
        return result

    try:
        with torch.no_grad(), _uncached_autocast(), without_logging(), nothing_written() as mode:
            with FakeTensorMode(allow_non_fake_inputs=True):
                z = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device=device)
                extra = [_again(each) for each in extra]
            traced = make_fx(
                torch.func.functionalize(called),
                decomposition_table=_table(),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(z, *extra)
    except Exception as error:  # a user's function may raise anything
        raise CannotTrace(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    graph = traced.graph
    z, *passed = [node for node in graph.nodes if node.op == "placeholder"]
    assert len(passed) == len(extra)
    _settle_writes(graph, z, {node for place, node in enumerate(passed) if place in written})
    _drop_single(graph)
    join_means(graph)
    _name_logic(graph)
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    value = meta(result) if isinstance(result, fx.Node) else None
    traced.meta[STRIDES] = value.stride() if isinstance(value, Tensor) else None
    straighten(graph)
    graph.eliminate_dead_code()
    traced.recompile()
    traced.meta[SWITCHES_GRADIENTS] = switches.seen
    return traced


_OF_ONE_ITSELF = (
    aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default, aten.max.dim,
    aten.min.dim,
)  # fmt: skip


def _drop_single(graph: fx.Graph) -> None:
    """Replaces reductions along dimensions of size 1 by their operand, in place.

    Kernels' benchmarks and losses have them behind a reduction that keeps its dimension.
    """
    for node in list(graph.nodes):
        if node.target not in _OF_ONE_ITSELF or node.kwargs or not node.args[1:]:
            continue
        x, given = node.args[:2]
        pair = node.target in (aten.max.dim, aten.min.dim)
        if given is None or given == [] or (pair and any(user.args[1] and user.users for user in node.users)):
            continue
        like, count = x.meta["val"], x.meta["val"].dim()
        dims = [dim % count for dim in (given if isinstance(given, (list, tuple)) else [given])] if count else []
        result = node.meta["val"][0] if pair else node.meta["val"]
        if not dims or any(like.shape[dim] != 1 for dim in dims) or result.dtype is not like.dtype:
            continue
        with graph.inserting_before(node):
            kept = result.dim() == count
            single = inserted(graph, *((aten.alias.default, (x,)) if kept else (aten.squeeze.dims, (x, dims))))
        for each in list(node.users) if pair else [node]:  # users that take the index are used by nobody
            each.replace_all_uses_with(single)
            graph.erase_node(each)
        if pair:
            graph.erase_node(node)


def _name_logic(graph: fx.Graph) -> None:
    """Gives operators of truth values the names of logic, in place: a sum of two of them is 1 at most."""
    for node in graph.nodes:
        plain = not node.kwargs and all(isinstance(each, fx.Node) for each in node.args)
        if node.target in _LOGIC and plain and node.meta["val"].dtype is torch.bool:
            node.target = _LOGIC[node.target]


def _settle_writes(graph: fx.Graph, z: fx.Node, allowed: set[fx.Node]) -> None:
    """Leaves only writes to captured tensors and to `allowed` ones in a graph; raises `CannotTrace` for others.

    Nobody else sees the convolution's result, nor tensors that the tail has made.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function" or not writes(node):
            continue
        base = node.args[0]
        while base.op == "call_function" and base.target in (aten.alias.default, aten.detach.default):
            base = base.args[0]
        if base.op == "get_attr" or base in allowed:  # running statistics
            node.args = (base, *node.args[1:])
            if _is_read_later(base, node, order):
                raise CannotTrace("it reads or writes running statistics that it has written to before")
            continue
        value = base
        if node.target is aten.as_strided_.default and node.meta["val"].shape == base.meta["val"].shape:
            pass  # an adaptive pool gives its result the layout of its operand
        elif node.target is aten.copy_.default and (base is z or _is_new(base)) and _has_shape(base, node.args[1]):
            value, kind = node.args[1], base.meta["val"].dtype
            if value.meta["val"].dtype is not kind:  # running statistics in 16 bits
                with graph.inserting_before(node):
                    value = inserted(graph, aten._to_copy.default, (value,), {"dtype": kind})
                order[value] = order[node]
        else:
            raise CannotTrace(f"it writes to a tensor that others can see ({node.target})")
        node.replace_all_uses_with(value)
        base.replace_all_uses_with(value, delete_user_cb=lambda user, at=order[node]: order[user] > at)
        graph.erase_node(node)
    if any(node.op == "call_function" and writes(node) and _is_used_besides(node) for node in graph.nodes):
        raise CannotTrace("it uses running statistics for more than their new values")


def _is_read_later(base: fx.Node, write: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Tells whether a tensor from outside of the graph is used after a node has written to it."""
    later = [user for node in _same(base) for user in node.users if order[user] > order[write]]
    return any(user.users or (user.op == "call_function" and writes(user)) for user in later)


def _is_used_besides(write: fx.Node) -> bool:
    """Tells whether a tensor that a node overwrites is used for anything but what the node writes.

    Whoever runs the graph may then overwrite the tensor as soon as the new values are known.
    """
    readers = {user for node in _same(write.args[0]) for user in node.users} - {write}  # type: ignore[arg-type]
    waiting = list(readers)
    while waiting:
        node = waiting.pop()
        if node.op == "output" or writes(node):
            return True
        waiting += [user for user in node.users if user is not write and user not in readers]
        readers.update(node.users)
    return False


def _same(tensor: fx.Node) -> list[fx.Node]:
    """Returns the nodes that give a captured or passed tensor, which the graph may name several times."""
    if tensor.op != "get_attr":
        return [tensor]
    return [node for node in tensor.graph.nodes if node.op == "get_attr" and node.target == tensor.target]


def _is_new(node: fx.Node) -> bool:
    """Tells whether an operator returns a tensor in memory of its own."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and all(result.alias_info is None for result in schema.returns)


def _has_shape(one: fx.Node, other: Any) -> bool:
    return isinstance(other, fx.Node) and bool(one.meta["val"].shape == other.meta["val"].shape)


def copied(traced: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph of its own with the same captured tensors."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    return fx.GraphModule(traced, graph)


def join_means(graph: fx.Graph, past: Container[Any] = (aten.alias.default,)) -> None:
    """Replaces means by those that variances of the same numbers come with, in place.

    PyTorch's derivative of a variance takes the mean again, and tails often ask for both. Operators in `past` return
    the numbers that they take. In a graph that will be differentiated, a detached tensor must not be joined with the
    tensor itself, because no gradient flows through it.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    variances = {_reduced(node, past): node for node in reversed(order) if node.target is aten.var_mean.correction}
    for node in order:
        key = _reduced(node, past) if node.target is aten.mean.dim and not node.kwargs else None
        found = None if key is None else variances.get(key)
        if found is None or not found.kwargs.get("keepdim"):
            continue
        if order[found] > order[node]:
            found.args = node.args[:2]
            node.prepend(found)
            order[found] = order[node]
        with graph.inserting_before(node):
            mean = inserted(graph, operator.getitem, (found, 1))
            if node.args[2:] != (True,):
                mean = inserted(graph, aten.squeeze.dims, (mean, node.args[1]))
        node.replace_all_uses_with(mean)
        graph.erase_node(node)


def _reduced(node: fx.Node, past: Container[Any]) -> tuple[fx.Node, tuple[int, ...]] | None:
    """Returns what a mean or a variance is taken of: a tensor and its dimensions."""
    given: Any = node.args[:2]
    if len(given) < 2 or not given[1]:
        return None
    x, dims = given
    while x.target in past:
        x = x.args[0]
    return x, tuple(dim % x.meta["val"].dim() for dim in dims)


def without_variances(graph: fx.Graph, kept: Sequence[fx.Node], but: Container[str] = ()) -> None:
    """Replaces variances by means and by sums of squared deviations, in place.

    No gradient flows to the mean through the deviations, because their sum is zero. The nodes in `kept` and those
    named in `but` stay.
    """
    for node in list(graph.nodes):
        if node.target is not aten.var_mean.correction or node in kept or not node.kwargs.get("keepdim"):
            continue
        if node.name in but:
            continue
        (x, dims), correction = node.args, node.kwargs.get("correction", 1)
        count = prod(x.meta["val"].shape[dim] for dim in dims)
        with graph.inserting_before(node):
            mean = inserted(graph, aten.mean.dim, (x, dims, True))
            fixed = inserted(graph, aten.detach.default, (mean,))
            deviation = inserted(graph, aten.sub.Tensor, (x, fixed))
            square = inserted(graph, aten.mul.Tensor, (deviation, deviation))
            total = inserted(graph, aten.sum.dim_IntList, (square, dims, True))
            variance = inserted(graph, aten.div.Tensor, (total, max(count - correction, 0)))
        for part in (mean, fixed, deviation, square, total, variance):
            part.meta[LOWERED_FROM] = node.name
        for user in list(node.users):
            user.replace_all_uses_with((variance, mean)[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def is_random(node: fx.Node) -> bool:
    """Tells whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def writes(node: fx.Node) -> bool:
    """Tells whether an operator writes to one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
