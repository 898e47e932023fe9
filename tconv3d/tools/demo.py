"""Runs the four reference tasks, checks them against float64, and prints their kernels, times and errors.

A GPU runs the tasks at full size, and PyTorch's times stand beside ours. Without a GPU the emulator executes the CUDA
kernels on the CPU at reduced size. This module uses only the public interface of the library and its clock.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import Tensor, nn

import tconv3d
from tconv3d.tools import tables, tasks
from tconv3d.torch_ops.clock import Clock

# Largest error allowed, as a fraction of the tensor's largest absolute value. TF32 rounds with a relative error of up
# to 2^-11, while a tap in a wrong place gives an error about as large as the values.
TOLERANCE = 2e-3
STEPS = ("forward", "backward")


@dataclass(frozen=True)
class Row:
    """Holds what the demonstration found for one pass of one task."""

    task: str
    shape: tuple[int, ...]
    step: str
    kernels: str
    milliseconds: float
    torch_milliseconds: float | None  # None in the emulator, whose times cannot be compared
    error: float

    @property
    def right(self) -> bool:
        return self.error <= TOLERANCE  # comparing with NaN gives False


@dataclass(frozen=True)
class Problem:
    """Holds PyTorch's model of a task, ours with equal parameters, an input and an output gradient."""

    model: nn.Module
    new: nn.Module
    x: Tensor
    grad: Tensor


def run(names: Sequence[str] = tasks.NAMES, console: Console | None = None) -> bool:
    """Runs the named tasks and prints the table. Returns True if every error is within the tolerance."""
    console = console or Console()
    gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
    rows: list[Row] = []
    with _progress(console) as progress:
        bar = progress.add_task("", total=len(names))
        for name in names:
            progress.update(bar, description=name)
            started = time.perf_counter()
            rows += on_gpu(name) if gpu else in_emulator(name)
            progress.console.print(f"{name}: {time.perf_counter() - started:.1f} s", markup=False)
            progress.advance(bar)
    _show(rows, gpu, console)
    wrong = [f"{row.task} {row.step}" for row in rows if not row.right]
    if wrong:
        console.print(f"[red]Not within {TOLERANCE:g} of float64: {', '.join(wrong)}[/red]")
    return not wrong


def in_emulator(name: str) -> list[Row]:
    """Runs one task at reduced size: the emulator executes the CUDA kernels on the CPU."""
    task = tasks.load(name)
    problem = _problem(task, task.REDUCED, "cpu")
    with tconv3d.use_backend("emulator"):
        results = _results(problem)
    return [
        Row(name, task.REDUCED, step, _kernels(problem, step), 1e3 * elapsed, None, error)
        for step, elapsed, error in zip(STEPS, results.seconds, _errors(problem, results), strict=True)
    ]


def on_gpu(name: str) -> list[Row]:
    """Runs one task at full size: checks the results, then times our model and PyTorch's on equal tensors."""
    task = tasks.load(name)
    problem = _problem(task, task.SHAPE, "cuda")
    with tconv3d.use_backend("cuda"):
        errors = _errors(problem, _results(problem))
        ours = _times(problem.new, problem)
    theirs = _times(problem.model, problem)
    return [
        Row(name, task.SHAPE, step, _kernels(problem, step), mine, other, error)
        for step, mine, other, error in zip(STEPS, ours, theirs, errors, strict=True)
    ]


def _problem(task: tasks.Task, shape: tuple[int, ...], device: str) -> Problem:
    torch.manual_seed(0)
    arguments = task.get_init_inputs()
    model, new = task.Model(*arguments).to(device), task.ModelNew(*arguments).to(device)
    new.load_state_dict(model.state_dict())
    (x,) = (tensor.to(device) for tensor in task.get_inputs(shape))
    with torch.device("meta"), torch.no_grad():
        output = task.Model(*arguments)(torch.empty(shape))
    return Problem(model, new, x.requires_grad_(), torch.randn(output.shape, device=device))


def _convolution(model: nn.Module) -> nn.ConvTranspose3d:
    (layer,) = (module for module in model.modules() if isinstance(module, nn.ConvTranspose3d))
    return layer


def _gradients(model: nn.Module, x: Tensor, y: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, [x, *model.parameters()], grad, retain_graph=True)


@dataclass(frozen=True)
class Results:
    """Holds what our model computed: output, gradients of input and parameters, seconds of each pass."""

    convolved: Tensor  # output of the convolution, before the layers that follow it
    output: Tensor
    gradients: tuple[Tensor, ...]
    seconds: tuple[float, float]


def _results(problem: Problem) -> Results:
    started = time.perf_counter()
    y = problem.new(problem.x)
    middle = time.perf_counter()
    gradients = _gradients(problem.new, problem.x, y, problem.grad)
    seconds = middle - started, time.perf_counter() - middle
    return Results(_convolved(problem), y.detach(), gradients, seconds)


def _convolved(problem: Problem) -> Tensor:
    """Runs our convolution alone; its output equals the one inside the block, where the same kernel computes it."""
    layer = _convolution(problem.new)
    padding: Any = layer.padding  # PyTorch also declares texts such as "same", for other convolutions
    with torch.no_grad():
        return tconv3d.conv_transpose3d(
            problem.x,
            layer.weight,
            layer.bias,
            layer.stride,
            padding,
            layer.output_padding,
            layer.groups,
            layer.dilation,
        )


def _exact(problem: Problem, convolved: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Computes output and gradients with PyTorch in float64, one sample at a time to need less memory.

    The gradients are evaluated at the output of our convolution (`convolved`): the derivative of ReLU jumps at zero,
    and rounding decides on which side of zero a value lies.
    """
    model = copy.deepcopy(problem.model).double()
    outputs, input_gradients, parameter_gradients = [], [], []
    for x, grad, value in zip(problem.x.detach().split(1), problem.grad.split(1), convolved.split(1), strict=True):
        x = x.double().requires_grad_()
        outputs.append(model(x).detach())
        hook = _convolution(model).register_forward_hook(lambda _, __, y, value=value: value + y - y.detach())
        dx, *rest = _gradients(model, x, model(x), grad.double())
        hook.remove()
        input_gradients.append(dx)
        parameter_gradients.append(rest)
    summed = [torch.stack(parts).sum(0) for parts in zip(*parameter_gradients, strict=True)]
    return torch.cat(outputs), [torch.cat(input_gradients), *summed]


def _errors(problem: Problem, results: Results) -> tuple[float, float]:
    """Returns the error (see `_error`) of the output, and the largest error of a gradient."""
    output, gradients = _exact(problem, results.convolved)
    backward = [_error(*pair) for pair in zip(results.gradients, gradients, strict=True)]
    return _error(results.output, output), float(torch.tensor(backward).max())  # Tensor.max() does not ignore a NaN


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result - exact).abs().max() / exact.abs().max())


def _times(model: nn.Module, problem: Problem) -> tuple[float, float]:
    """Returns the milliseconds of the forward and of the backward pass."""
    clock = Clock()
    with torch.no_grad():
        forward = clock(lambda: model(problem.x))
    y = model(problem.x)
    return forward, clock(lambda: _gradients(model, problem.x, y, problem.grad))


def _kernels(problem: Problem, step: str) -> str:
    """Returns the names of the kernels that a task runs in one pass."""
    new = problem.new
    block = new if isinstance(new, tconv3d.ConvTranspose3dReLUGroupNorm) else _convolution(new)
    passes = tconv3d.explain(block, problem.x).passes
    names = (found.kernel for found in passes if (found.name == "forward") == (step == "forward"))
    return ", ".join(dict.fromkeys(names))  # each name once, in the order of the launches


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<18}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _show(rows: Sequence[Row], gpu: bool, console: Console) -> None:
    place = torch.cuda.get_device_name() if gpu else "the CPU, through the emulator, at reduced size"
    found = []
    for row in rows:
        numbers = [f"{row.milliseconds:.3f}" if gpu else f"{row.milliseconds:.0f}"]
        if row.torch_milliseconds is not None:
            numbers += [f"{row.torch_milliseconds:.3f}", f"{row.torch_milliseconds / row.milliseconds:.1f}x"]
        numbers.append(f"[{'green' if row.right else 'red'}]{row.error:.1e}[/]")
        size = "x".join(map(str, row.shape))
        found.append(tables.Row(row.task, (size, row.step), Text(row.kernels), tuple(numbers)))
    numbers = ["ms", "PyTorch ms", "ratio", "error"] if gpu else ["ms", "error"]
    headings = tables.Headings("task", ("input", "pass"), "kernels", tuple(numbers))
    tables.show(f"The reference tasks on {place}", _caption(gpu), headings, found, console)


def _caption(gpu: bool) -> str:
    times = "ms: median, L2 flushed" if gpu else "ms: with compiling, where it was needed"
    return f"float32. {times}. error: largest difference from PyTorch in float64, as a part of the largest value."
