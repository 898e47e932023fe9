"""Runs the passes on tensors: forward, and the gradients of input, weight and bias, each alone or together.

Tensors become a `Problem`, and the planner's `Plan` becomes a `Task`, run by the launcher (CUDA tensors) or the
emulator (CPU tensors). Tasks are cached by one key, so that a repeated call only allocates its result and launches.
Arguments are checked when a key is new; a known key implies that equal arguments were checked before.

Packed weights may be kept between calls without gradients (`kept`). Which offers run is decided when a key is new
(`choosing`); if PyTorch's operator is the one that is taken, the task says so and has no launches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..planning import gpus, planner, repertoire
from ..planning.geometry import Triple
from ..planning.launch import Launch
from ..planning.problem import Device, Norm, Pass, Plan, Problem
from ..runtime import background
from . import choosing, kept, problems, pytorch_ops
from .backend import Backend, current_backend
from .checks import Convolution
from .choosing import Settings
from .examining import Theirs
from .problems import Layout, OperandAddresses, Tail, tf32_of
from .pytorch_ops import statistics_dtype

EMULATED = Device("emulator", (9, 0), multiprocessors=4, shared_bytes=232448)
MAX_TASKS = 8192  # cached tasks, limited because some programs never repeat a shape

Addresses = tuple[int, ...]
Start = Callable[[Addresses, int], None]
Steps = list[tuple[Launch, tuple[int, ...]]]
Wanted = tuple[bool, ...]  # whether the gradients of input, weight and bias are wanted


@dataclass(frozen=True)
class Packing:
    """Prepares a plan whose first launch packs the weight, so that the launch can be skipped (see `kept`).

    The plan may differ from the plan of calls that keep no packed weight (`Plan.kept`).
    """

    number: int  # number of the packed layout: plans with equal packing launches share packed weights
    bytes: int  # size of the packed weight
    workspace_bytes: int  # size of the workspace without the packed weight
    regions: tuple[int, ...]  # offsets of regions in the workspace, in bytes
    prepare: Callable[[bool], Start]  # prepares all launches (True), or all but the first (False)

    @functools.cached_property
    def start_all(self) -> Start:
        return self.prepare(True)

    @functools.cached_property
    def start(self) -> Start:
        """Runs all launches but the packing launch; the first of them overlaps no previous launch."""
        return self.prepare(False)

    def launch(self, start: Start, like: Tensor, operands: Addresses, pack: kept.Pack, stream: int) -> None:
        """Runs `start` (`start_all` or `start` of this object) with the packed weight in separate memory, `pack`."""
        operands = (*operands, pack[0])
        if self.regions:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=like.device)
            first = workspace.data_ptr()
            operands = (*operands, *[first + region for region in self.regions])
        start(operands, stream)


@dataclass(frozen=True)
class Task:
    """Holds a plan that is ready to run: layouts of the results, workspace size, and prepared launches."""

    results: tuple[Layout | None, ...]  # layouts of the results; None for a gradient that is not wanted
    workspace_bytes: int
    start: Start  # runs all launches, given the addresses of all operands and the stream
    regions: tuple[int, ...] = ()  # offsets in bytes of workspace regions, which are operands too
    packing: Packing | None = None
    less: Callable[[], Task] | None = None  # makes a task with less workspace, for when memory is short
    theirs: bool = False  # there are no launches: PyTorch's operator computes the call

    def run(
        self,
        like: Tensor,
        addresses: Addresses,
        weight: Tensor | None = None,
        keep: bool = False,
        dtype: torch.dtype | None = None,
    ) -> list[Tensor | None]:
        """Allocates the results and launches with operands `addresses`, null, results, workspace (see `OPERANDS`)."""
        dtype, device = dtype or like.dtype, like.device
        results = [
            None if layout is None else torch.empty_strided(*layout, dtype=dtype, device=device)
            for layout in self.results
        ]
        operands = (*addresses, 0, *[0 if result is None else result.data_ptr() for result in results])
        self.launch(like, operands, weight, keep)
        return results

    def launch(self, like: Tensor, operands: Addresses, weight: Tensor | None = None, keep: bool = False) -> None:
        """Launches with the given operands, followed by the workspace and its regions.

        `weight` is the weight if the task reads one. With `keep` the packed weight may be kept, and the weight must
        be the second operand.
        """
        stream = torch._C._cuda_getCurrentRawStream(like.get_device()) if like.is_cuda else 0
        if weight is None or kept.captured(weight, stream):
            pass
        elif not keep:
            kept.packed_for_itself(weight)
        elif self.packing is not None:
            place = stream, self.packing.number
            pack = kept.find(weight, operands[1], place)
            if pack is not None:
                return self.packing.launch(self.packing.start, like, operands, pack, stream)
            promise = kept.promise(weight, operands[1], place, self.packing.bytes)
            if promise is not None:
                self.packing.launch(self.packing.start_all, like, operands, promise.pack, stream)
                return promise.keep()
        if self.workspace_bytes:
            try:
                workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=like.device)
            except torch.OutOfMemoryError:
                if self.less is None:
                    raise
                return self.less().launch(like, operands)
            start = workspace.data_ptr()
            operands = (*operands, start, *[start + region for region in self.regions])
        return self.start(operands, stream)

    def trial(self, like: Tensor, operands: Addresses, keep: bool) -> Callable[[], None]:
        """Returns a function that launches once, without packing the weight if calls with `keep` would not."""
        if not keep or self.packing is None:
            return lambda: self.launch(like, operands)
        packing = self.packing
        stream = torch._C._cuda_getCurrentRawStream(like.get_device()) if like.is_cuda else 0
        memory = torch.empty(packing.bytes, dtype=torch.uint8, device=like.device)
        pack = memory.data_ptr(), memory
        packing.launch(packing.start_all, like, operands, pack, stream)
        return lambda: packing.launch(packing.start, like, operands, pack, stream)


# Names that planners use for the operands of a pass alone, in the order of `Task.run` and `Task.launch`.
OPERANDS = {
    Pass.FORWARD: ("x", "weight", "bias", "null", "y", "workspace"),
    Pass.INPUT_GRAD: ("dy", "weight", "null", "dx", "workspace"),
    Pass.WEIGHT_GRAD: ("dy", "x", "null", "dw", "workspace"),
    Pass.BIAS_GRAD: ("dy", "null", "db", "workspace"),
}
ANY_CONVOLUTION = (1, 1, 1), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1)  # settings that the gradient of a bias ignores
BACKWARD = ("dy", "x", "weight", "null", "dx", "dw", "db", "workspace")
WITH_STATISTICS = ("x", "weight", "bias", "null", "y", "statistics", "workspace")

_tasks: dict[tuple[Any, ...], Task] = {}
_packings: dict[Launch, int] = {}  # number of a packed layout, by the launch that packs it
_numbers = itertools.count()


def known(key: tuple[Any, ...]) -> Task | None:
    return _tasks.get(key)


def remember(key: tuple[Any, ...], task: Task) -> Task:
    if len(_tasks) >= MAX_TASKS:
        _drop_tasks()
        _packings.clear()
    _tasks[key] = task
    return task


def forget() -> None:
    """Drops all cached plans and tasks, so that every call is planned anew."""
    planner.plan.cache_clear()
    repertoire.forget()
    _drop_tasks()


_generation = 0  # number of times that tasks were dropped


def _drop_tasks() -> None:
    global _generation
    _generation += 1
    _tasks.clear()


def generation() -> int:
    """Returns how often tasks were dropped: a task that somebody holds is out of date when the number has changed."""
    return _generation


choosing.on_change(_drop_tasks)


def _kind(tensor: Tensor | None, address: int) -> tuple[Any, ...] | None:
    """Returns the properties of a tensor that a plan or a check may depend on."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), address % 16, tensor.dtype, tensor.device


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _leave(refusal: planner.Refused, backend: Backend | None = None) -> None:
    """Reports that PyTorch's operator computes a call that the planner refuses."""
    pytorch_ops.leave(str(refusal), backend or current_backend(), stacklevel=5)


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    convolution: Convolution,
    relu: bool = False,
    keep: bool = False,
    tail: Tail | None = None,
    window: bool = False,
) -> Tensor:
    """Computes input [N, C_in, D, H, W], weight [C_in, C_out/groups, kD, kH, kW], bias [C_out] -> [N, C_out, ...].

    `keep`: no gradient is wanted, so that the packed weight may be kept. `tail`: what the kernel computes of the
    result; a call with one may raise `planner.Refused`. `window`: padding and output padding may be any integers
    (`Axis.window`).
    """
    x, w = input.data_ptr(), weight.data_ptr()
    try:
        task = _forward_task(input, x, weight, w, bias, convolution, relu, None, keep, tail, window)
    except planner.Refused as refusal:
        if tail is not None:
            raise
        _leave(refusal)
        return pytorch_ops.forward(input, weight, bias, convolution, relu)
    if task.theirs:
        return pytorch_ops.forward(input, weight, bias, convolution, relu)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    if tail is None:
        return _one(task.run(input, (x, w, _address(bias)), weight, keep))
    return _one(task.run(input, (x, w, _address(bias), *tail.addresses), weight, keep, tail.per_position))


def _one(results: list[Tensor | None]) -> Tensor:
    result = results[0]
    assert result is not None
    return result


def forward_with_statistics(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: int,
    eps: float,
    convolution: Convolution,
    keep: bool = False,
    tail: Tail | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the ReLU of the forward pass, and its statistics [2, N, groups]: means and reciprocal deviations.

    `tail`: what takes the place of the ReLU; a call with one may raise `planner.Refused`.
    """
    x, w = input.data_ptr(), weight.data_ptr()
    try:
        task = _forward_task(input, x, weight, w, bias, convolution, tail is None, Norm(groups, eps), keep, tail)
    except planner.Refused as refusal:
        if tail is not None:
            raise
        _leave(refusal)
        return pytorch_ops.forward_with_statistics(input, weight, bias, groups, eps, convolution)
    if task.theirs:
        return pytorch_ops.forward_with_statistics(input, weight, bias, groups, eps, convolution)
    (layout,) = task.results
    assert layout is not None
    result = torch.empty_strided(*layout, dtype=input.dtype, device=input.device)
    statistics = input.new_empty((2, input.shape[0], groups), dtype=statistics_dtype(input.dtype))
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    further = () if tail is None else tail.addresses
    operands = (x, w, _address(bias), *further, 0, result.data_ptr(), statistics.data_ptr())
    task.launch(input, operands, weight, keep)
    return result, statistics


def _forward_task(
    input: Tensor,
    x: int,
    weight: Tensor,
    w: int,
    bias: Tensor | None,
    convolution: Convolution,
    relu: bool,
    norm: Norm | None,
    keep: bool,
    tail: Tail | None = None,
    window: bool = False,
) -> Task:
    """Returns the task of a forward pass; `x` and `w` are the addresses of input and weight.

    PyTorch's operator is no offer for a call with a tail, which it does not compute, nor for a window of a layer,
    whose bits must be those of the whole layer.
    """
    kind = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device)
    settings = choosing.circumstances(input.is_cuda)
    if tail is not None or window:
        settings = settings[0], False
    # Written out instead of by `_kind`, because every call makes this key: calling functions takes 0.5 us.
    key = (
        Pass.FORWARD, input.dtype, input.device, tf32_of(input), settings, input.shape, input.stride(), x % 16,
        weight.shape, weight.stride(), w % 16, weight.dtype, weight.device, kind, convolution, relu, norm,
        None if tail is None else tail.kind, window,
    )  # fmt: skip
    task = _tasks.get(key)
    if task is not None:
        return task
    at = OperandAddresses(x, w)
    problem, layout = problems.forward(input, weight, bias, convolution, at, relu, norm, tail, window)
    names = WITH_STATISTICS if norm is not None else OPERANDS[Pass.FORWARD]
    dense = None if bias is None else bias.contiguous()
    addresses: Addresses = (x, w, _address(dense))
    if tail is not None:
        planner.check_over_channels(problem, device_of(input))
        names, addresses = tail.among(names), (*addresses, *tail.addresses)
    statistics = None if norm is None else ((2, input.shape[0], norm.groups), statistics_dtype(input.dtype))

    if norm is None:
        theirs: Theirs = functools.partial(pytorch_ops.forward, input, weight, bias, convolution, relu)
    else:
        described = norm.groups, norm.eps, convolution
        theirs = functools.partial(pytorch_ops.forward_with_statistics, input, weight, bias, *described)
    dtype = None if tail is None else tail.per_position
    trials = Trials(names, (layout,), input, addresses, keep, statistics, dtype)
    return _decide(key, {problem.which: problem}, trials, theirs, settings)


def final_forward_task(
    input: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution, relu: bool
) -> Task | None:
    """Returns the task of all forward passes of such operands with gradients.

    The result is None if the choice is not final, or if PyTorch's operator computes the pass.
    """
    try:
        task = _forward_task(input, input.data_ptr(), weight, weight.data_ptr(), bias, convolution, relu, None, False)
    except planner.Refused:
        return None
    return task if not task.theirs and any(each is task for each in _tasks.values()) else None


class Trials:
    """Makes runs of plans on a call's operands, for timing; the results have memory of their own, once for all."""

    def __init__(
        self,
        names: tuple[str, ...],
        layouts: tuple[Layout | None, ...],
        like: Tensor,
        addresses: Addresses,
        keep: bool = False,
        statistics: tuple[tuple[int, ...], torch.dtype] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.names, self.layouts, self.like, self.addresses, self.keep = names, layouts, like, addresses, keep
        self.dtype = dtype or like.dtype  # type of the results
        self.statistics = statistics  # shape and type of the statistics, a further result

    @functools.cached_property
    def results(self) -> list[Tensor | None]:
        found = [
            None if layout is None else torch.empty_strided(*layout, dtype=self.dtype, device=self.like.device)
            for layout in self.layouts
        ]
        if self.statistics is not None:
            found.append(self.like.new_empty(self.statistics[0], dtype=self.statistics[1]))
        return found

    def prepare(self, plan: Plan) -> Callable[[], None]:
        task = make_task(plan, self.names, self.layouts, self.like)
        operands = (*self.addresses, 0, *(_address(result) for result in self.results))
        return task.trial(self.like, operands, self.keep)


def _decide(
    key: tuple[Any, ...],
    wanted: dict[Pass, Problem],
    trials: Trials,
    theirs: Theirs,
    settings: Settings,
    thrifty: Callable[[Device], Plan] | None = None,
) -> Task:
    """Returns the task of the offers that are taken for a new key.

    `thrifty` makes the plan that takes over if memory is short.
    """
    like, device = trials.like, device_of(trials.like)
    call = choosing.Call(wanted, device, like, trials.prepare, theirs, lambda: trials.results)
    plan, final = choosing.plan(call, settings)
    if plan.aten:
        task = Task(trials.layouts, 0, _nothing, theirs=True)
    else:
        task = make_task(plan, trials.names, trials.layouts, like)
        if thrifty is not None:
            names, layouts, empty = trials.names, trials.layouts, like.new_empty(0)
            less = functools.cache(lambda: make_task(thrifty(device.thrifty), names, layouts, empty))
            task = replace(task, less=less)
        if like.is_cuda:  # kernels that volumes of other sizes will need are compiled in the background
            background.offer(tuple(wanted.values()), device)
    return remember(key, task) if final else task


def _nothing(operands: Addresses, stream: int) -> None:
    """Stands for the launches of a task that PyTorch's operator computes."""
    raise AssertionError("PyTorch's operator computes this call")


def input_grad(grad_output: Tensor, weight: Tensor, input_size: Triple, convolution: Convolution) -> Tensor:
    """Computes grad_output [N, C_out, oD, oH, oW] -> [N, C_in, *input_size]."""
    wanted = True, False, False
    return _one(backward(grad_output, None, weight, wanted, input_size, weight.shape, convolution)[:1])


def weight_grad(grad_output: Tensor, input: Tensor, kernel: Triple, convolution: Convolution) -> Tensor:
    """Computes grad_output [N, C_out, oD, oH, oW], input [N, C_in, D, H, W] -> [C_in, C_out/groups, *kernel]."""
    return _one(backward(grad_output, input, None, (False, True, False), input.shape, kernel, convolution)[1:2])


def bias_grad(grad_output: Tensor) -> Tensor:
    """Computes grad_output [N, C_out, oD, oH, oW] -> [C_out]."""
    return _one(backward(grad_output, None, None, (False, False, True), (), (), ANY_CONVOLUTION)[2:])


def backward(
    grad_output: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    wanted: Wanted,
    input_size: Sequence[int],
    kernel: Sequence[int],
    convolution: Convolution,
    backend: Backend | None = None,
) -> list[Tensor | None]:
    """Computes the wanted gradients of input, weight and bias together, with one key and one workspace.

    The last three numbers of `input_size` and `kernel` count, so that whole shapes may be given.
    The weight's gradient needs `input`, and the input's gradient needs `weight`; either may be None if not needed.
    `backend` is the forward pass's, because autograd may run this in another thread; by default the present one.
    """
    dy, x, w = grad_output.data_ptr(), _address(input), _address(weight)
    settings = choosing.circumstances(grad_output.is_cuda, backend)
    key = (
        wanted, grad_output.dtype, grad_output.device, tf32_of(grad_output), settings, grad_output.shape,
        grad_output.stride(), dy % 16, _kind(input, x), _kind(weight, w), input_size, kernel, convolution,
    )  # fmt: skip
    task = _tasks.get(key)
    if task is None:
        call = grad_output, input, weight, wanted, tuple(input_size)[-3:], tuple(kernel)[-3:], convolution
        found = problems.wanted_gradients(*call, OperandAddresses(x, w, dy))
        asked = tuple([each[0] for each in found if each is not None])
        layouts = tuple([None if each is None else each[1] for each in found])
        trials = Trials(BACKWARD, layouts, grad_output, (dy, x, w))
        thrifty = functools.partial(planner.plan_gradients, asked)
        theirs = functools.partial(pytorch_ops.backward, *call)
        try:
            task = _decide(key, {each.which: each for each in asked}, trials, theirs, settings, thrifty)
        except planner.Refused as refusal:
            _leave(refusal, backend)
            return theirs()
    if task.theirs:
        sizes = tuple(input_size)[-3:], tuple(kernel)[-3:]
        return pytorch_ops.backward(grad_output, input, weight, wanted, *sizes, convolution)
    return task.run(grad_output, (dy, x, w), weight)


def make_task(plan: Plan, names: tuple[str, ...], results: tuple[Layout | None, ...], like: Tensor) -> Task:
    """Prepares a plan; `names` are the names of the operands in the order in which the task gets them."""
    start, regions = _prepare_steps(_steps(plan, names), like), tuple(start for _, start in plan.regions)
    return Task(results, plan.workspace_bytes, start, regions, _packing(plan.kept or plan, names, like))


def _steps(plan: Plan, names: tuple[str, ...]) -> Steps:
    """Returns the launches of a plan, each with the indices of its operands."""
    names = (*names, *(name for name, _ in plan.regions))
    return [
        (launch, tuple(names.index(name) for name in launch.pointers))
        for launch in plan.launches
        if min(launch.grid) > 0  # a batch of 0 has launches with an empty grid
    ]


def _packing(plan: Plan, names: tuple[str, ...], like: Tensor) -> Packing | None:
    steps, regions = _steps(plan, names), [start for _, start in plan.regions]
    if not plan.packed_bytes or not steps:
        return None
    first = min(regions, default=plan.workspace_bytes)
    empty = like.new_empty(0)
    return Packing(
        number=_packings.setdefault(steps[0][0], next(_numbers)),
        bytes=plan.packed_bytes,
        workspace_bytes=plan.workspace_bytes - first,
        regions=tuple(region - first for region in regions),
        prepare=lambda first: _prepare_steps(steps if first else steps[1:], empty),
    )


def _prepare_steps(steps: Steps, like: Tensor) -> Start:
    """Returns a function that runs all steps on a GPU or in the emulator, depending on the device of `like`."""
    if like.is_cuda:
        from ..runtime import launcher

        return launcher.prepare_all(steps, like.get_device())
    from .. import emulator

    run = emulator.prepare_all(steps)
    return lambda operands, stream: run(operands)


def device_of(tensor: Tensor) -> Device:
    """Returns the device that calls on a tensor are planned for: a GPU, the emulator, or what TCONV3D_AS says."""
    return _cuda_device(tensor.get_device()) if tensor.is_cuda else gpus.as_told(EMULATED)


def is_present(device: Device) -> bool:
    """Returns whether a device is one of this machine's GPUs, as `device_of` describes them."""
    return torch.cuda.is_available() and any(_cuda_device(i) is device for i in range(torch.cuda.device_count()))


@functools.cache
def _cuda_device(index: int) -> Device:
    from ..runtime import launcher

    found = launcher.device_properties(index)
    return gpus.as_told(Device(found.name, found.capability, found.multiprocessors, found.shared_bytes))
