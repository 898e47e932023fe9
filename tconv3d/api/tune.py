"""`tune` measures a layer's offers and builds on the present GPU, and stores the fastest in the disk cache.

The halo kernel can be compiled in many builds, and the planner chooses a build by a model of the hardware. `tune`
runs the builds that the model ranks best, checks them against the present build and times them. Then it times the
offers of all kernel families and PyTorch's operator, as a layer's first call may do (`torch_ops/choosing.py`), but
more of them and for longer. The stored build and the stored winner are used from then on, in this process and in all
processes that share the cache.

This module knows which kernel has several builds, but not what a build is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from ..families.halo import planner as halo_planner
from ..families.halo.candidates import Nominal
from ..families.halo.job import job_of
from ..families.halo.launches import HaloPlan
from ..planning import planner
from ..planning.problem import Device, Pass, Problem, last_offset
from ..torch_ops import checks, choosing, executor, ops, pytorch_ops
from ..torch_ops.checks import Convolution
from ..torch_ops.clock import Clock, Timer
from ..torch_ops.measuring import attempt
from .ahead import fill_cache
from .explain import call_of, problems_of
from .modules import ConvTranspose3dReLUGroupNorm

FASTER = 1.03  # minimum speedup of a new build: smaller ones may be noise, and the present build is already compiled
# Maximum error of a build, relative to the largest result: builds add products in different orders.
TOLERANCE = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}
BUDGET_S = 0.1  # seconds for one timing

MakeTask = Callable[..., executor.Task]


@dataclass(frozen=True)
class Trial:
    """Holds the result of one build, which is run once to check its result and is then timed."""

    build: str
    ms: float | None
    why_not: str = ""  # why the build was not timed


@dataclass(frozen=True)
class Tuned:
    """Holds what `tune` found for one pass; `str()` describes it in words."""

    name: str
    kernel: str
    trials: tuple[Trial, ...] = ()  # the present build first; empty if the kernel has a single build
    before_ms: float | None = None
    ms: float | None = None
    changed: bool = False
    what: str = "builds"  # what the trials are of: builds or offers

    def __str__(self) -> str:
        if not self.trials:
            return f"{self.name}: {self.kernel}, nothing to choose from"
        failed = [trial for trial in self.trials if trial.ms is None]
        if self.changed:
            text = f"{self.ms:.4g} ms instead of {self.before_ms:.4g} ms"
        else:
            text = f"{self.ms:.4g} ms, stays as it is"
        lines = [f"{self.name}: {self.kernel}, {text} ({len(self.trials)} {self.what} tried)"]
        return "\n".join(lines + [f"  not {trial.build}: {trial.why_not}" for trial in failed])


def tune(
    layer_or_input: torch.nn.ConvTranspose3d | ConvTranspose3dReLUGroupNorm | Tensor,
    *arguments: Any,
    gradients: bool = True,
    candidates: int = 8,
    offers: bool = True,
    report: Callable[[Tuned], object] | None = print,
    clock: Timer | None = None,
    **keywords: Any,
) -> list[Tuned]:
    """Measures builds and offers for a layer on this GPU and stores the fastest for this and all later processes.

    >>> tconv3d.tune(layer, input)                       # a layer; the input as a tensor or as its shape
    >>> tconv3d.tune(input, weight, bias, stride=2)      # the arguments of conv_transpose3d

    Tuning takes some seconds for each pass. The values of tensors do not matter: random tensors of the same shape,
    type and layout are used, in the type that `torch.autocast` casts to if it is enabled. A tuned build applies to
    all volumes of one size class (`tconv3d.planning.problem.KINDS`), so tune with a typical volume. `tconv3d.explain`
    says what was tuned; `tconv3d cache clear` and a new version of this library discard it.

    Tuning can change which build runs, so results before and after may differ in their last bits. Between two calls
    of `tune` results are as reproducible as without tuning.

    gradients: also tune the backward passes. candidates: number of builds that are tried besides the present one, and
    of offers. offers: also time the offers of other kernels and, unless `use_backend("cuda")` asks for this library's
    kernels, of PyTorch's operator. report: called with a `Tuned` for each pass, and for the offers of each call.
    clock: returns the milliseconds of a call; the default takes the median with a cold L2 cache.
    """
    checks.check_callable(report, "report", "tune")
    if checks.integer(candidates, "candidates", "tune") < 0:
        raise ValueError(f"tune() expected candidates to be at least 0, but got {candidates}")
    input, weight, bias, convolution = call_of(layer_or_input, *arguments, **keywords)
    device = weight.device
    if clock is None and device.type != "cuda":
        raise RuntimeError(f"tune measures on a GPU and expects CUDA tensors, but got a weight on {device}")
    like = torch.empty(0, dtype=input.dtype, device=device)
    if (reason := ops.why_not_ours(like)) is not None:
        raise RuntimeError(f"tune expects a call that runs these kernels, but this one does not: {reason}")
    input, weight, bias = (_under_autocast(operand, device.type) for operand in (input, weight, bias))
    problems = problems_of(input, weight, bias, convolution)
    like = like.to(input.dtype)
    found = []
    with torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext():
        timer = clock or Clock(BUDGET_S, str(like.device))
        for problem in problems if gradients else problems[:1]:
            found.append(tune_pass(problem, like, candidates, timer))
            if report is not None:
                report(found[-1])
        calls = {"forward": problems[:1], "backward": problems[1:] if gradients else []}
        for name, asked in calls.items() if offers else ():
            if asked:
                found.append(tune_offers(name, asked, convolution, like, candidates, timer))
                if report is not None:
                    report(found[-1])
    return found


def tune_offers(
    name: str, asked: Sequence[Problem], convolution: Convolution, like: Tensor, most: int, clock: Timer
) -> Tuned:
    """Times offers for a whole call, a forward pass or all gradients together, and stores the winner."""
    settings = choosing.circumstances(like.is_cuda)
    call = random_call(asked, convolution, like)
    trials = choosing.measure_all(call, settings, max(2, most), clock, 1e3 * BUDGET_S * 10 * (most + 2))
    best = min(trials, key=lambda trial: trial.ms)
    found = tuple(Trial(each.name, each.ms if each.times else None, each.why_not) for each in trials)
    if sum(bool(each.times) for each in trials) < 2:
        return Tuned(f"{name}, all offers", trials[0].name)
    executor.forget()
    before = trials[0].ms if trials[0].times else inf
    return Tuned(f"{name}, all offers", best.name, found, before, best.ms, best is not trials[0], "offers")


def random_call(asked: Sequence[Problem], convolution: Convolution, like: Tensor) -> choosing.Call:
    """Returns a call with random operands; only their shapes, types and memory layouts matter.

    `asked` is a forward pass, or one or several gradients that are not the bias's alone.
    """
    problem = next(each for each in asked if each.which is not Pass.BIAS_GRAD)
    g, wanted, random = problem.geometry, {each.which: each for each in asked}, Random(like)
    x_shape = (problem.batch, g.in_channels, *problem.input_size)
    w_shape = (g.in_channels, g.out_per_group, *g.kernel)
    y_shape = (problem.batch, g.out_channels, *problem.output_size)
    x = random(x_shape, wanted.get(Pass.WEIGHT_GRAD, problem).input)
    w = random(w_shape, wanted.get(Pass.INPUT_GRAD, problem).weight)
    if problem.which is Pass.FORWARD:
        bias = random((g.out_channels,), (1,)) if problem.bias else None
        addresses = (x.data_ptr(), w.data_ptr(), 0 if bias is None else bias.data_ptr())
        trials = executor.Trials(
            executor.OPERANDS[Pass.FORWARD], ((y_shape, problem.output),), like, addresses, keep=False
        )
        theirs: partial[Any] = partial(pytorch_ops.forward, x, w, bias, convolution)
    else:
        dy = random(y_shape, problem.output)
        dx, dw, db = (wanted.get(which) for which in (Pass.INPUT_GRAD, Pass.WEIGHT_GRAD, Pass.BIAS_GRAD))
        layouts = (
            None if dx is None else (x_shape, dx.input),
            None if dw is None else (w_shape, dw.weight),
            None if db is None else ((g.out_channels,), (1,)),
        )
        operands = tuple(tensor.data_ptr() for tensor in (dy, x, w))
        trials = executor.Trials(executor.BACKWARD, layouts, like, operands)
        asks = tuple(layout is not None for layout in layouts)
        theirs = partial(pytorch_ops.backward, dy, x, w, asks, problem.input_size, g.kernel, convolution)
    return choosing.Call(wanted, executor.device_of(like), like, trials.prepare, theirs, lambda: trials.results)


def _under_autocast(tensor: Any, kind: str) -> Any:
    """Returns an operand in the type that autocast gives it: a meta tensor if autocast would cast it."""
    if tensor is None or tensor.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to("meta", torch.get_autocast_dtype(kind))


def tune_pass(
    problem: Problem, like: Tensor, most: int, clock: Timer, make_task: MakeTask = executor.make_task
) -> Tuned:
    """Tunes one pass. `like` has the type and the device of the pass's tensors."""
    device = executor.device_of(like)
    name, kernel = problem.which.value, planner.plan(problem, device).kernel
    plans = contenders(problem, device, most)
    if not plans:
        return Tuned(name, kernel)
    if like.is_cuda:
        fill_cache((launch for plan in plans for launch in plan.launches), device)
    trials = measure(problem, plans, like, clock, make_task)
    best = min(range(len(plans)), key=lambda i: trials[i].ms or inf)
    before = after = trials[0].ms or inf
    if best > 0:  # both builds are timed again in a row, because a GPU's clock rate drifts
        before, after = (
            trial.ms or inf for trial in measure(problem, [plans[0], plans[best]], like, clock, make_task)
        )
    if before < FASTER * after:
        return Tuned(name, kernel, tuple(trials), before, before)
    size = "x".join(map(str, problem.input_size))
    measured = f"{after:.4g} ms instead of {before:.4g} ms for batch {problem.batch} of {size} on {device.name}"
    nominal = Nominal.of(job_of(problem))
    halo_planner.keep(nominal, device.shared_bytes, device.multiprocessors, plans[best].build, measured)
    executor.forget()
    return Tuned(name, kernel, tuple(trials), before, after, True)


def contenders(problem: Problem, device: Device, most: int) -> list[HaloPlan]:
    """Returns the present build and the best others by the model, with their best tilings; none unless halo runs."""
    if planner.plan(problem, device).kernel != "halo":
        return []
    job = job_of(problem)
    present = halo_planner.plan_or_none(job, device)
    assert present is not None, "the planner has just planned it"
    others = [plan for plan in halo_planner.candidates(job, device, most + 1) if plan.build != present.build]
    return [present, *others[:most]]


def measure(
    problem: Problem,
    plans: Sequence[HaloPlan],
    like: Tensor,
    clock: Timer,
    make_task: MakeTask = executor.make_task,
) -> list[Trial]:
    """Times plans of one problem. The first plan is trusted; the results of the others must match its result.

    A plan that fails or gives a wrong result is not timed. An error is raised if the first plan fails, or if a plan
    leaves the GPU unusable.
    """
    bench = Bench(problem, like)
    names = executor.OPERANDS[problem.which]
    trials: list[Trial] = []
    for plan in plans:

        def checked_time(plan: HaloPlan = plan) -> float:
            task = make_task(halo_planner.plan_of(plan, problem), names, (), like)
            bench.check(task, TOLERANCE[problem.dtype])
            return clock(partial(bench.run, task))

        build = f"{plan.build}; tiles of {plan.tiling}"
        if not trials:
            trials.append(Trial(build, checked_time()))
            continue
        tried = attempt(build, checked_time, like.is_cuda)
        trials.append(Trial(build, tried.ms if tried.times else None, tried.why_not))
    return trials


class Random:
    """Makes tensors of random values, of the type and on the device of `like`, without the caller's generator."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.generator = torch.Generator(like.device).manual_seed(0)

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        count = last_offset(shape, strides) + 1
        values = torch.randn(count, generator=self.generator, dtype=self.like.dtype, device=self.like.device)
        return values.as_strided(shape, strides)


class Bench:
    """Holds the operands of a pass, with random values, and the tensor for its result."""

    def __init__(self, problem: Problem, like: Tensor) -> None:
        g, forward, random = problem.geometry, problem.which is Pass.FORWARD, Random(like)
        inner = (problem.batch, g.in_channels, *problem.input_size), problem.input
        outer = (problem.batch, g.out_channels, *problem.output_size), problem.output
        read, (self.shape, self.strides) = (inner, outer) if forward else (outer, inner)
        self.like = like
        self.tensors = [random(*read), random((g.in_channels, g.out_per_group, *g.kernel), problem.weight)]
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        if forward:
            self.tensors.append(random((g.out_channels,), (1,)))
            addresses.append(self.tensors[-1].data_ptr() if problem.bias else 0)
        self.result = torch.empty_strided(self.shape, self.strides, dtype=like.dtype, device=like.device)
        self.reference: Tensor | None = None
        self.operands = (*addresses, 0, self.result.data_ptr())

    def run(self, task: executor.Task) -> None:
        task.launch(self.like, self.operands)

    def check(self, task: executor.Task, tolerance: float) -> None:
        """Raises if a result differs from the first task's by more than `tolerance` times the largest result."""
        self.result.fill_(float("nan"))  # elements that the task does not write must not match by chance
        self.run(task)
        if self.reference is None:
            self.reference = self.result.clone()
        pairs = zip(self.result, self.reference, strict=True)  # one batch item at a time, to save memory
        largest = torch.stack([torch.stack([(a - b).abs().max(), b.abs().max()]) for a, b in pairs])
        difference, scale = largest.float().amax(0).tolist()
        if not difference <= tolerance * scale:  # also catches NaN
            raise RuntimeError(f"its result is wrong: {difference:.1e} off where the largest is {scale:.1e}")
