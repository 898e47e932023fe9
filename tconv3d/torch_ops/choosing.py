"""Chooses among the offers for a call: by prediction, or by timing the best few on the caller's tensors.

Offers are timed at the first call of a layer if `torch.backends.cudnn.benchmark` is on, which is PyTorch's own switch
for this, or if nobody has calibrated the GPU. The winner is stored on disk (`planning/winners.py`), so that later
calls, in this and in other processes, take the same one and give the same bits. Nothing is timed while a CUDA graph
is captured or if memory is short: then the prediction decides.

PyTorch's operator is one of the offers, unless the caller asked for this library's kernels (`use_backend("cuda")`) or
for deterministic algorithms.

This module knows offers and tensors, but not how a plan is launched.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from ..families.pytorch.planner import KERNEL as PYTORCH
from ..planning import calibration, planner, winners
from ..planning.offers import Answer, Cover, Offer, Wanted
from ..planning.problem import Device, Plan
from ..planning.winners import Timing, Winner
from .backend import Backend, current_backend
from .clock import L2_FLUSH_BYTES, Stopwatch, Timer
from .measuring import BUDGET_MS, Candidate, Run, race

MEASURE = "TCONV3D_MEASURE"  # the environment variable with the initial choice of `measure_offers`
BEST = 3  # covers of this library's kernels that are timed, besides PyTorch's operator

When = Literal["auto", "always", "never"]
_when: When | None = None  # what `measure_offers` was called with
_clock: Timer | None = None  # measures in place of a GPU's clock, for tests in the emulator

_benchmark, _deterministic = torch._C._get_cudnn_benchmark, torch._C._get_deterministic_algorithms
_cudnn_deterministic = torch._C._get_cudnn_deterministic


Settings: TypeAlias = tuple[bool, bool]  # torch.backends.cudnn.benchmark, and whether PyTorch may compute the call


def circumstances(cuda: bool, backend: Backend | None = None) -> Settings:
    """Returns the settings that a choice depends on, as part of the key of a call."""
    if not cuda:
        return (False, _clock is not None)
    return (
        _benchmark(),
        (backend or current_backend()) == "auto" and not (_deterministic() or _cudnn_deterministic()),
    )


def measure_offers(when: When) -> None:
    """Sets when offers are timed at a layer's first call, in all threads.

    - ``"auto"``: if `torch.backends.cudnn.benchmark` is on, or if the GPU has not been calibrated. The default.
    - ``"always"``: at every layer's first call on a GPU.
    - ``"never"``: predictions decide, and stored winners are not used.

    The environment variable TCONV3D_MEASURE has the same values. A call of this function discards the choices that
    this process has made, so that every layer's next call counts as its first.
    """
    global _when
    if when not in get_args(When):
        raise ValueError(f"measure_offers() expected 'auto', 'always' or 'never', but got {when!r}")
    _when = when
    for discard in _listeners:
        discard()


_listeners: list[Callable[[], None]] = []  # called when a setting changes that earlier choices depend on


def on_change(discard: Callable[[], None]) -> None:
    _listeners.append(discard)


def when_measured() -> When:
    """Returns the present choice of `measure_offers`."""
    if _when is not None:
        return _when
    said = os.environ.get(MEASURE, "auto") or "auto"
    if said not in get_args(When):
        raise ValueError(f"{MEASURE}: expected auto, always or never, got {said!r}")
    return said  # type: ignore[return-value]


@contextlib.contextmanager
def measured_by(clock: Timer) -> Iterator[None]:
    """Times offers in the emulator by an invented clock, with PyTorch's operator among them."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before


def measures(device: Device, benchmark: bool, cuda: bool) -> bool:
    """Returns whether offers are timed, or stored winners used, for calls on a device."""
    when = when_measured()
    if when == "never" or not (cuda or _clock is not None):
        return False
    return when == "always" or benchmark or not calibration.calibrated(device)


@dataclass(frozen=True)
class Call:
    """Holds what is needed of a call to time its offers. Timed runs write to memory of their own."""

    wanted: Wanted
    device: Device
    like: Tensor  # a tensor of the call, on its device
    prepare: Callable[[Plan], Run]  # compiles a plan and returns a function that runs it on the call's tensors
    theirs: Run  # runs PyTorch's operator on the call's tensors


class Choice(NamedTuple):
    """Holds the offers that were taken, and why."""

    cover: Cover
    answers: Sequence[Answer]
    winner: Winner | None = None  # the measurement that decided, if one did
    final: bool = True  # whether later calls may reuse the choice


def plan(call: Call, settings: Settings) -> tuple[Plan, bool]:
    """Returns the plan of the offers that are taken, and whether later calls may reuse it.

    Raises `planner.Refused` for a layer beyond the limits of planning.
    """
    benchmark, pytorch = settings
    if not measures(call.device, benchmark, call.like.is_cuda):
        problems = tuple(call.wanted.values())
        if len(problems) == 1:
            return planner.plan(problems[0], call.device, pytorch), True
        return planner.plan_gradients(problems, call.device, pytorch), True
    for problem in call.wanted.values():
        planner.check_limits(problem.geometry)
    with planner.meeting(call.wanted, call.device):
        choice = choose(call.wanted, call.device, settings, call.like.is_cuda, call)
        return planner.plan_of(choice.cover, call.wanted, call.device), choice.final


def choose(wanted: Wanted, device: Device, settings: Settings, cuda: bool, call: Call | None = None) -> Choice:
    """Returns the offers that are taken for a call.

    Without `call` nothing is timed, but a stored winner counts: `explain` asks like this.
    """
    benchmark, pytorch = settings
    answers = planner.answers(wanted, device, pytorch)
    offers = [answer for answer in answers if isinstance(answer, Offer)]
    if measures(device, benchmark, cuda):
        entry = winners.key(wanted, device, offers, (*versions(cuda), f"benchmark {benchmark}"))
        winner = winners.find(entry)
        cover = None if winner is None else winners.cover_of(winner, offers)
        if cover is not None:
            return Choice(cover, answers, winner)
        if call is not None and _capturing(call.like):
            return Choice(_predicted(answers, wanted, device), answers, final=False)
        if call is not None and (won := _measure(call, answers, BEST, BUDGET_MS)) is not None:
            found, complete = won
            winner = winners.keep_first(entry, found) if complete else found
            cover = winners.cover_of(winner, offers)
            if cover is not None:
                return Choice(cover, answers, winner)
    return Choice(_predicted(answers, wanted, device), answers)


def measure_all(call: Call, settings: Settings, most: int, budget_ms: float) -> Winner | None:
    """Times up to `most` covers and PyTorch's operator, and stores the winner in place of an earlier one.

    `tune` measures like this. Returns None if fewer than two could be timed.
    """
    benchmark, pytorch = settings
    with planner.meeting(call.wanted, call.device):
        answers = planner.answers(call.wanted, call.device, pytorch)
        offers = [answer for answer in answers if isinstance(answer, Offer)]
        found = _measure(call, answers, most, budget_ms)
        if found is None:
            return None
        cuda = call.like.is_cuda
        entry = winners.key(call.wanted, call.device, offers, (*versions(cuda), f"benchmark {benchmark}"))
        winners.replace_with(entry, found[0])
        return found[0]


def _predicted(answers: Sequence[Answer], wanted: Wanted, device: Device) -> Cover:
    return planner.best(answers, wanted, device, 1)[0]


def _measure(call: Call, answers: Sequence[Answer], most: int, budget_ms: float) -> tuple[Winner, bool] | None:
    """Returns the winner among the best covers and PyTorch's operator, and whether all could be timed.

    Returns None if there is no room in memory, or if fewer than two could be timed.
    """
    wanted, device, cuda = call.wanted, call.device, call.like.is_cuda
    ours = [answer for answer in answers if answer.kernel != PYTORCH]
    theirs = [(answer,) for answer in answers if isinstance(answer, Offer) and answer.kernel == PYTORCH]
    first, *others = planner.best(ours, wanted, device, most)
    covers = [first, *theirs, *others]
    if len(covers) < 2 or not _room(call):
        return None
    candidates = [_candidate(call, cover) for cover in covers]
    try:
        with torch.cuda.device(call.like.device) if cuda else contextlib.nullcontext(), torch.no_grad():
            trials = race(candidates, _clock or Stopwatch(call.like.device), cuda, budget_ms)
    except torch.OutOfMemoryError:  # there was no room for the memory that flushes the L2 cache
        return None
    timed = sorted((trial.ms, number) for number, trial in enumerate(trials) if trial.times)
    if len(timed) < 2:
        return None
    timings = tuple(Timing(trials[number].name, 1e3 * ms) for ms, number in timed)
    winner = Winner(winners.parts(covers[timed[0][1]]), timings, _where(wanted, device))
    return winner, not any(trial.short_of_memory for trial in trials)


def _candidate(call: Call, cover: Cover) -> Candidate:
    def prepare() -> Run:
        if cover[0].kernel == PYTORCH:
            return call.theirs
        return call.prepare(planner.plan_of(cover, call.wanted, call.device))

    return Candidate(winners.name_of(cover), prepare, sum(offer.microseconds for offer in cover) / 1e3)


def _where(wanted: Wanted, device: Device) -> str:
    problem = next(iter(wanted.values()))
    return f"{device.name} for batch {problem.batch} of {'x'.join(map(str, problem.input_size))}"


def _capturing(like: Tensor) -> bool:
    if not like.is_cuda:
        return False
    with torch.cuda.device(like.device):
        return torch.cuda.is_current_stream_capturing()


def _room(call: Call) -> bool:
    """Returns whether there is memory for the results of two candidates, a workspace and flushing the L2 cache."""
    if not call.like.is_cuda:
        return True
    results = sum(problem.bytes for problem in call.wanted.values())  # the operands are counted too
    return _free_bytes(call.like.device) >= 2 * results + call.device.workspace_bytes + L2_FLUSH_BYTES


def _free_bytes(device: torch.device) -> int:
    """Returns the free memory of a GPU, including what PyTorch's allocator holds without using it."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@functools.cache
def versions(cuda: bool) -> tuple[str, ...]:
    """Returns the versions that times depend on, besides this library's: PyTorch, CUDA, cuDNN and the driver."""
    if not cuda:
        return (torch.__version__, "no GPU")
    driver = Path("/proc/driver/nvidia/version")
    return (
        torch.__version__,
        str(torch.version.cuda),
        str(torch.backends.cudnn.version()),
        driver.read_text() if driver.is_file() else "unknown driver",
    )


def why_no_pytorch(cuda: bool, backend: Backend) -> str | None:
    """Returns why PyTorch's operator makes no offer, or None if it makes one."""
    if backend not in ("auto", "torch"):
        return f'use_backend("{backend}") asks for this library\'s kernels'
    if cuda and (_deterministic() or _cudnn_deterministic()):
        return "deterministic algorithms are asked for, and PyTorch's operator may not be deterministic"
    return None
