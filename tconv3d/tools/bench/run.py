"""Checks a set of layers, times them beside PyTorch's variants, and collects the results.

`bench` needs a GPU. `verify` checks without timing; without a GPU it uses the emulator, at reduced size, and so does
`bench_tails`, which measures layers together with what follows them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import tconv3d
from tconv3d import emulator
from tconv3d.api import fusing
from tconv3d.api.explanation import Explanation, PassExplanation
from tconv3d.planning.problem import Pass
from tconv3d.torch_ops import executor
from tconv3d.torch_ops.backend import Backend
from tconv3d.torch_ops.clock import Clock, Timer

from . import accuracy, ahead, cases, fused, models, rivals, tails
from .host import host_times
from .layers import Layer
from .precision import precision
from .results import PASSES, STEPS, ModelRow, Results, Row, describe_machine
from .timing import measure_ceilings
from .wide import Kind


@dataclass(frozen=True)
class Options:
    """Holds the options of a run."""

    kinds: Sequence[Kind] = (("tf32", "contiguous"),)  # what models are measured in; each layer comes with its kind
    backward: bool = False
    torch: bool = True  # also time PyTorch's variants
    host: bool = False  # also time the host's side of a call
    offers: bool = False  # PyTorch's operator is among the offers, which are timed at the first call
    budget_s: float = 0.15  # seconds for one timing
    seed: int | None = None  # seed of parameters and inputs; None draws a new one, which the results record
    command: str = ""  # command line of the run, recorded in the results
    way: str = "accelerate"  # what fuses tails, one of `cases.WAYS`


@dataclass(frozen=True)
class Place:
    """Says on which device and backend layers run, and how they are timed."""

    device: str
    backend: Backend
    clock: Timer | None  # None if nothing is timed


@dataclass(frozen=True)
class Source:
    """Holds a user's model, which is timed as a whole in addition to its layers."""

    spec: str
    model: nn.Module
    example_input: Any


class Work(NamedTuple):
    """Names a layer to measure, in one precision and layout, alone or with one of `tails.TAILS`."""

    name: str
    layer: Layer
    kind: Kind
    tail: str = ""


Keep = Callable[[Results], None]


def have_gpu() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


def bench(
    work: Sequence[Work],
    options: Options,
    console: Console,
    sources: Sequence[Source] = (),
    keep: Keep = lambda results: None,
) -> Results:
    """Checks and times the layers and models on the GPU."""
    if not have_gpu():
        raise RuntimeError(
            "bench measures on a CUDA GPU of compute capability 8.0 or newer, and none is visible. "
            "`tconv3d verify` checks the same layers without one"
        )
    place = Place("cuda", "auto" if options.offers else "cuda", Clock(options.budget_s))
    return measure(work, options, console, place, sources, keep)


def verify(work: Sequence[Work], options: Options, console: Console, keep: Keep = lambda results: None) -> Results:
    """Checks the output and all gradients: on the GPU, or at reduced size in the emulator."""
    options = replace(options, backward=True)
    if have_gpu():
        return measure(work, options, console, Place("cuda", "cuda", None), keep=keep)
    return _emulate("verify", work, options, console, keep)


def bench_tails(
    work: Sequence[Work], options: Options, console: Console, keep: Keep = lambda results: None
) -> Results:
    """Checks and times layers with their tails on the GPU; without one, checks them in the emulator."""
    if have_gpu():
        return bench(work, options, console, keep=keep)
    return _emulate("bench --tails", work, options, console, keep)


def _emulate(command: str, work: Sequence[Work], options: Options, console: Console, keep: Keep) -> Results:
    """Checks layers of reduced size in the emulator."""
    if not emulator.available():
        raise RuntimeError(f"{command} needs a CUDA GPU, or a C++ compiler for the emulator, and there is neither")
    reduced = [each._replace(layer=(tails.reduced if each.tail else Layer.reduced)(each.layer)) for each in work]
    return measure(reduced, options, console, Place("cpu", "emulator", None), keep=keep)


def measure(
    work: Sequence[Work],
    options: Options,
    console: Console,
    place: Place,
    sources: Sequence[Source] = (),
    keep: Keep = lambda results: None,
) -> Results:
    """Measures every layer in every precision and layout, then the models. An interruption returns partial results.

    `keep` gets the results after each layer, so that they are not lost if the process is killed.
    """
    started = time.monotonic()
    options = replace(options, seed=_seed(options.seed))
    results = Results("bench" if place.clock else "verify", describe_machine(), _settings(options, place))
    steps: list[tuple[str, Callable[[], Any]]] = [
        (" ".join((each.name, each.tail, *each.kind)), functools.partial(_add_layer, results, each, options, place))
        for each in work
    ]
    steps += [
        (" ".join((source.spec, *kind)), functools.partial(_add_model, results, source, kind, options, place))
        for source in sources
        for kind in options.kinds
    ]
    try:
        if place.device == "cuda":
            _compile([(each.layer, *each.kind, each.tail) for each in work], options, console, results)
        with _progress(console) as progress:
            bar = progress.add_task("ceilings", total=len(steps))
            kinds = [each.kind for each in work] + [kind for kind in options.kinds if sources]
            _prepare(results, list(dict.fromkeys(kind[0] for kind in kinds)), options, place)
            for description, step in steps:
                progress.update(bar, description=description)
                step()
                _free(place)
                progress.advance(bar)
                results.seconds = time.monotonic() - started
                keep(results)
    except KeyboardInterrupt:
        results.interrupted = True
    results.seconds = time.monotonic() - started
    return results


def _compile(work: Sequence[ahead.Work], options: Options, console: Console, results: Results) -> None:
    """Compiles all kernels before the first timing."""
    if len(work) < ahead.WORTH_IT:
        return
    started = time.monotonic()
    passes = tuple(Pass) if options.backward else (Pass.FORWARD,)
    device = executor.device_of(torch.empty(0, device="cuda"))
    with _progress(console) as progress:
        bar = progress.add_task("planning and compiling", total=len(work))
        results.compiled = len(ahead.compile_all(work, passes, device, lambda: progress.advance(bar)))
    results.compile_s = time.monotonic() - started


def _prepare(results: Results, precisions: Sequence[str], options: Options, place: Place) -> None:
    """Measures the ceilings of the GPU and, if asked for, the host time of a call."""
    if place.clock is not None:
        results.ceilings = measure_ceilings(place.clock, precisions, place.device)
    if options.host:
        with tconv3d.use_backend(place.backend):
            results.host_us = host_times(place.device)


def _add_layer(results: Results, work: Work, options: Options, place: Place) -> None:
    name, layer, kind, tail = work
    results.rows += measure_layer(name, layer, kind, options, place, results.ceilings, tail)


def _add_model(results: Results, source: Source, kind: tuple[str, str], options: Options, place: Place) -> None:
    results.models.append(_measure_model(source, kind, options, place))


def measure_layer(
    name: str,
    layer: Layer,
    kind: tuple[str, str],
    options: Options,
    place: Place,
    ceilings: Mapping[str, float],
    tail: str = "",
) -> list[Row]:
    """Returns the rows of one layer in one precision and layout: one for each pass."""
    dtype, layout = kind
    passes = STEPS if tail else PASSES
    rows = [
        Row(name, str(layer), layer.as_dict(), layer.follow, dtype, layout, which, tail=tail)
        for which in (passes if options.backward else passes[:1])
    ]
    try:
        with precision(dtype):
            if tail:
                case = cases.build_with_tail(layer, tail, dtype, layout, place.device, options.way)
            else:
                case = cases.build(layer, dtype, layout, place.device)
            with tconv3d.use_backend(place.backend):
                explanation = tconv3d.explain(case.convolution, case.x)
            for row in rows:
                _describe(row, case, explanation, ceilings)
            _check(rows, case, place)
            if tail:
                _describe_tail(rows, case, place)
            if place.clock is not None:
                (_time_tail if tail else _time)(rows, case, options, place)
            if place.clock is not None and not tail:  # only now is it known who won where offers were timed
                with tconv3d.use_backend(place.backend), rivals.cudnn_benchmark(options.offers):
                    explanation = tconv3d.explain(case.convolution, case.x)
                for row in rows:
                    _describe(row, case, explanation, ceilings)
    except Exception as error:  # a layer that does not fit in memory must not stop the run
        for row in rows:
            row.failed = f"{type(error).__name__}: {error}"[:500]
    return rows


def _describe(row: Row, case: cases.Case, explanation: Explanation, ceilings: Mapping[str, float]) -> None:
    """Fills in the kernels of the pass, the work they do, and the floor of the time in milliseconds."""
    passes = _passes(explanation, row.which)
    _name_kernels(row, passes)
    if case.layer.follow and fusing.fused_base(case.ours) is not None:
        row.kernel = f"fused: {row.kernel}"
    row.flops = sum(each.flops for each in passes)
    row.bytes = moved_bytes(case, row.which)
    if ceilings:
        moving = row.bytes / (ceilings["copy_TBps"] * 1e9)
        computing = row.flops / (ceilings[f"{row.dtype}_TFLOPS"] * 1e9)
        row.floor_ms = max(moving, computing)
        row.bound_by = "memory" if moving >= computing else "arithmetic"


def _passes(explanation: Explanation, which: str) -> list[PassExplanation]:
    """Returns the passes of the convolution that belong to a row; a training step has all of them."""
    return [
        each for each in explanation.passes if which == "step" or (each.name == "forward") == (which == "forward")
    ]


def _name_kernels(row: Row, passes: Sequence[PassExplanation]) -> None:
    row.kernel = ", ".join(dict.fromkeys(each.kernel for each in passes))
    row.tile = "; ".join(dict.fromkeys(each.tile for each in passes if each.tile))


def _describe_tail(rows: list[Row], case: cases.Case, place: Place) -> None:
    """Fills in what became of the tail, and the kernel of the forward pass that evaluates a part of it."""
    with tconv3d.use_backend(place.backend):
        explained = fused.explanation(case)
        for row in rows:
            row.fused = fused.words(case, row.which)
            if explained is not None and row.which == "forward":
                _name_kernels(row, _passes(explained, row.which))


def moved_bytes(case: cases.Case, which: str) -> int:
    """Counts the bytes of a pass that moves every tensor once.

    Forward reads the inputs (x, and a residual if there is one) and the parameters, and writes y, which is the result
    of the tail if there is one. Backward reads x, dy and the parameters and writes a gradient for each input and
    parameter. A training step does both.
    """
    x, y = case.x.numel(), case.output_shape.numel()
    inputs = sum(each.numel() for each in case.inputs)
    parameters = sum(parameter.numel() for parameter in case.theirs.parameters())
    forward, backward = inputs + y + parameters, x + inputs + y + 2 * parameters
    return case.x.element_size() * {"forward": forward, "backward": backward, "step": forward + backward}[which]


def _check(rows: list[Row], case: cases.Case, place: Place) -> None:
    with tconv3d.use_backend(place.backend):
        errors = accuracy.check(case, backward=len(rows) > 1)
        if case.tail and len(rows) > 1:  # calls that record no gradients run other kernels
            alone = accuracy.check(case, backward=False)
            errors = accuracy.Errors({**errors.ours, **alone.ours}, {**errors.theirs, **alone.theirs})
    for row in rows:
        row.error, row.torch_error = errors.of(row.which)
        row.right = accuracy.right(row.error, row.which, case)


def _time(rows: list[Row], case: cases.Case, options: Options, place: Place) -> None:
    assert place.clock is not None
    with tconv3d.use_backend(place.backend), rivals.cudnn_benchmark(options.offers):
        ours = rivals.time_passes(case.ours, case.ours, case.inputs, options.backward, place.clock)
    _time_rivals(rows, case, options, place)
    for row in rows:
        row.ours_ms = ours[row.which]


def _time_tail(rows: list[Row], case: cases.Case, options: Options, place: Place) -> None:
    """Times our convolution alone and our convolution with its tail in turns, and then PyTorch's variants."""
    assert place.clock is not None
    with tconv3d.use_backend(place.backend):
        alone, ours = rivals.time_in_turns((cases.plain(case), case), options.backward, place.clock)
    _time_rivals(rows, case, options, place)
    for row in rows:
        row.plain_ms, row.ours_ms = alone[row.which], ours[row.which]


def _time_rivals(rows: list[Row], case: cases.Case, options: Options, place: Place) -> None:
    assert place.clock is not None
    theirs, failed = rivals.time_variants(case, options.backward, place.clock) if options.torch else ({}, {})
    for row in rows:
        row.torch_ms, row.torch_failed = theirs.get(row.which, {}), dict(failed)


def _measure_model(source: Source, kind: tuple[str, str], options: Options, place: Place) -> ModelRow:
    assert place.clock is not None
    try:
        with tconv3d.use_backend(place.backend):
            return models.measure(
                source.spec, source.model, source.example_input, kind, options.backward, place.clock, place.device
            )
    except Exception as error:
        return ModelRow(source.spec, *kind, swapped=0, left=0, failed=f"{type(error).__name__}: {error}"[:500])


def _settings(options: Options, place: Place) -> dict[str, Any]:
    return {
        "command": options.command,
        "dtypes": sorted({kind[0] for kind in options.kinds}),
        "layouts": sorted({kind[1] for kind in options.kinds}),
        "backward": options.backward,
        "budget_s": options.budget_s,
        "seed": options.seed,
        "device": place.device,
        "backend": place.backend,
        "way": options.way,
    }


def _seed(wanted: int | None) -> int:
    seed = torch.seed() if wanted is None else wanted
    torch.manual_seed(seed)
    return seed


def _free(place: Place) -> None:
    gc.collect()
    if place.device == "cuda":
        with contextlib.suppress(RuntimeError):  # the row of a failed kernel already holds its error
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress
