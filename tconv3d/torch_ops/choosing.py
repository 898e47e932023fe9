"""Chooses among the offers for a call: by prediction, or by timing the best few on the caller's tensors.

Offers are timed at the first call of a layer if `torch.backends.cudnn.benchmark` is on, which is PyTorch's own switch
for this, if nobody has calibrated the GPU, if the least predicted time is one that nobody has confirmed by measuring
(that of a kernel with derived rates, or PyTorch's), if PyTorch's predicted time is close to it, or if predictions for
that kernel are often far off and another is predicted to be that close. Otherwise the best kernels alone are timed
beside PyTorch's operator if that could be faster as far as predictions can tell. The winner is stored on disk
(`planning/winners.py`), so that later calls, in this and in other processes, take the same one and give the same
bits; `tune` stores winners too.

Nothing is timed while a CUDA graph is captured or if memory is short: then the prediction decides. Before a kernel is
timed, its result is compared with that of PyTorch's operator (`examining`); a kernel that is wrong does not win.

PyTorch's operator is one of the offers, unless the caller asked for this library's kernels (`use_backend("cuda")`) or
for deterministic algorithms.

This module knows offers and tensors, but not how a plan is launched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor

from ..families.pytorch.planner import KERNEL as PYTORCH
from ..planning import calibration, gpus, planner, winners
from ..planning.offers import Answer, Cover, Offer, Wanted, fastest, ranked
from ..planning.problem import Device, Plan
from ..planning.winners import Timing, Winner
from .backend import Backend, current_backend
from .clock import L2_FLUSH_BYTES, Stopwatch, Timer
from .examining import Examiner, Results, Theirs
from .measuring import BUDGET_MS, Candidate, Run, Trial, race

MEASURE = "TCONV3D_MEASURE"  # the environment variable with the initial choice of `measure_offers`
# PyTorch's operator is timed beside the three best covers if its predicted time is less than this many times that of
# the best one. Half of the predictions for it are right within a factor of 1.2 to 3.9, which depends on the kind (the
# typical errors in planning/rates).
CLOSE = 1.6
# PyTorch's operator is not timed beside kernels that are predicted to take less than this many times the floor. On
# an H200 it came as close as 1.23 times to the floor of a layer of the benchmark (relu_group_norm_conv in bfloat16).
NEAR_FLOOR = 1.15
# The best kernels are timed beside the next best if their predictions may be off by more than this factor, and the
# next best are predicted to be that close. Over 560 calls on an H200, half of which are timed by these two rules, the
# kernels that run take 0.3% longer than the fastest; by predictions alone 5%.
DOUBTFUL = 2.0
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

    - ``"auto"``: if `torch.backends.cudnn.benchmark` is on, or if the prediction for the layer is uncertain: on a GPU
      that has not been calibrated, and where a kernel that has not been measured could be the fastest. The default.
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


def measures(wanted: Wanted, offers: Sequence[Offer], device: Device, benchmark: bool, cuda: bool) -> bool:
    """Returns whether the offers for a call are timed at the first call of its layer."""
    return most_timed(wanted, offers, device, benchmark, cuda) > 0


def most_timed(wanted: Wanted, offers: Sequence[Offer], device: Device, benchmark: bool, cuda: bool) -> int:
    """Returns how many covers of this library's kernels are timed at a layer's first call; 0 if nothing is timed.

    One cover is timed if the only question is whether PyTorch's operator is faster.
    """
    if not _winners_count(cuda):
        return 0
    if when_measured() == "always" or benchmark or not calibration.calibrated(device):
        return BEST
    least = fastest(tuple(wanted), offers) or ()
    if any(offer.taken.surcharge > 1 for offer in least):
        return BEST
    predicted = sum(offer.microseconds for offer in least)
    theirs = [offer for offer in offers if offer.kernel == PYTORCH]
    if any(offer.microseconds < CLOSE * predicted for offer in theirs):
        return BEST
    doubt = max((calibration.doubt(each.kernel, each.rates, device) for each in least), default=1.0)
    if doubt > DOUBTFUL:
        ours = [each for each in offers if each.kernel != PYTORCH]
        covers = ranked(tuple(wanted), ours, 2, attrgetter("microseconds"), launching=False)
        if len(covers) > 1 and sum(offer.microseconds for offer in covers[1]) < doubt * predicted:
            return BEST
    return int(any(_could_be_faster(offer, predicted, wanted, device) for offer in theirs))


def _could_be_faster(theirs: Offer, predicted: float, wanted: Wanted, device: Device) -> bool:
    """Returns whether PyTorch's operator may take less time than kernels with this predicted time in microseconds.

    Predictions for it are wrong by factors, so that all but kernels near the floor are in doubt.
    """
    gpu = gpus.known(device)
    floor = 0.0 if gpu is None else 1e3 * max(gpu.floor_ms(problem) for problem in wanted.values())
    within = calibration.doubt(PYTORCH, theirs.rates, device)
    return predicted > NEAR_FLOOR * floor and theirs.microseconds < within * predicted


@dataclass(frozen=True)
class Call:
    """Holds what is needed of a call to time its offers. Timed runs write to memory of their own."""

    wanted: Wanted
    device: Device
    like: Tensor  # a tensor of the call, on its device
    prepare: Callable[[Plan], Run]  # compiles a plan and returns a function that runs it on the call's tensors
    theirs: Theirs  # runs PyTorch's operator on the call's tensors
    results: Callable[[], Results]  # returns what runs of plans write, in the order of PyTorch's results


class Choice(NamedTuple):
    """Holds the offers that were taken, and the measurement that decided, if one did."""

    cover: Cover
    answers: Sequence[Answer]
    winner: Winner | None = None


def plan(call: Call, settings: Settings) -> tuple[Plan, bool]:
    """Returns the plan of the offers that are taken, and whether later calls may reuse it.

    Raises `planner.Refused` for a layer beyond the limits of planning.
    """
    wanted, device, problems = call.wanted, call.device, tuple(call.wanted.values())
    for problem in problems:
        planner.check_limits(problem)
    cuda, final = call.like.is_cuda, True
    if _winners_count(cuda):
        with planner.meeting(wanted, device):
            offers = _offers(planner.answers(wanted, device, settings[1]))
            entry = _entry(wanted, device, offers, settings, cuda)
            winner = winners.find(entry)
            if winner is None and (most := most_timed(wanted, offers, device, settings[0], cuda)):
                final = not _capturing(call.like)  # a call outside of the capture measures
                winner = _measured_first(call, offers, entry, most) if final else None
            cover = None if winner is None else winners.cover_of(winner, offers)
            if cover is not None:
                return planner.plan_of(cover, wanted, device), True
    if len(problems) == 1:
        return planner.plan(problems[0], device, settings[1]), final
    return planner.plan_gradients(problems, device, settings[1]), final


def choice(wanted: Wanted, device: Device, settings: Settings, cuda: bool) -> Choice:
    """Returns the offers that a call would take now. Nothing is timed, but a stored winner counts.

    Must be called within `planner.meeting`.
    """
    answers = planner.answers(wanted, device, settings[1])
    offers = _offers(answers)
    winner = winners.find(_entry(wanted, device, offers, settings, cuda)) if _winners_count(cuda) else None
    cover = None if winner is None else winners.cover_of(winner, offers)
    if cover is not None:
        return Choice(cover, answers, winner)
    return Choice(planner.best(answers, wanted, device, 1)[0], answers)


def contending_plans(wanted: Wanted, device: Device) -> list[Plan]:
    """Returns the plans of our kernels that the first call on a GPU would time; none if it would time nothing."""
    if not wanted or not _winners_count(cuda=True):
        return []
    with planner.meeting(wanted, device):
        offers = _offers(planner.answers(wanted, device))
        most = most_timed(wanted, offers, device, circumstances(True)[0], cuda=True)
        covers = _contenders(wanted, device, offers, most) if most else []
        return [planner.plan_of(cover, wanted, device) for cover in covers] if len(covers) > 1 else []


def measure_all(call: Call, settings: Settings, most: int, clock: Timer, budget_ms: float) -> list[Trial]:
    """Times up to `most` covers of this library's kernels, the best by prediction first, and PyTorch's operator.

    The winner is stored in place of an earlier one. `tune` measures like this; `clock` takes a median itself.
    """
    wanted, device, cuda = call.wanted, call.device, call.like.is_cuda
    with planner.meeting(wanted, device):
        offers = _offers(planner.answers(wanted, device, settings[1]))
        covers = _contenders(wanted, device, offers, most)
        trials = race(_candidates(call, covers), clock, cuda, budget_ms, runs=1)
        winner = _winner(covers, trials, wanted, device)
        if winner is not None and winner.timings:
            winners.replace_with(_entry(wanted, device, offers, settings, cuda), winner)
    return trials


def _winners_count(cuda: bool) -> bool:
    """Returns whether stored winners are used: on a GPU, unless the user wants predictions alone."""
    return (cuda or _clock is not None) and when_measured() != "never"


def _offers(answers: Sequence[Answer]) -> list[Offer]:
    return [answer for answer in answers if isinstance(answer, Offer)]


def _entry(wanted: Wanted, device: Device, offers: Sequence[Offer], settings: Settings, cuda: bool) -> str:
    """Returns the name of the entry of a winner; PyTorch's times depend on `torch.backends.cudnn.benchmark`."""
    return winners.key(wanted, device, offers, (*versions(cuda), f"benchmark {settings[0]}"))


def _contenders(wanted: Wanted, device: Device, offers: Sequence[Offer], most: int) -> list[Cover]:
    """Returns the best covers of this library's kernels by prediction, with PyTorch's operator after the first.

    The cover with the least predicted time is among them, however uncertain its prediction is.
    """
    ours = [each for each in offers if each.kernel != PYTORCH]
    first, *others = planner.best(ours, wanted, device, most)
    # A family that finds no build has made an offer that takes an infinite time and has no plan.
    others = [cover for cover in others if not any(isinf(offer.microseconds) for offer in cover)]
    promising = fastest(tuple(wanted), ours)
    if promising is not None and promising not in (first, *others):
        others = [promising, *others][: most - 1]
    return [first, *((each,) for each in offers if each.kernel == PYTORCH), *others]


def _measured_first(call: Call, offers: Sequence[Offer], entry: str, most: int) -> Winner | None:
    """Times the best offers, and returns the winner, or None if memory is short or fewer than two could be timed.

    Up to `most` offers are covers of this library's kernels. The winner is stored unless another process has stored
    one, which then counts. A winner is not stored if memory was too short for one of the others.
    """
    wanted, device, like = call.wanted, call.device, call.like
    covers = _contenders(wanted, device, offers, most)
    if len(covers) < 2 or not _room(call):
        return None
    try:
        with torch.cuda.device(like.device) if like.is_cuda else contextlib.nullcontext(), torch.no_grad():
            stopwatch = _clock or Stopwatch(like.device)
            trials = race(_candidates(call, covers), stopwatch, like.is_cuda)
    except torch.OutOfMemoryError:  # there was no room for the memory that flushes the L2 cache
        return None
    winner = _winner(covers, trials, wanted, device)
    if winner is None or not winner.timings or any(trial.short_of_memory for trial in trials):
        return winner
    return winners.keep_first(entry, winner)


def _winner(covers: Sequence[Cover], trials: Sequence[Trial], wanted: Wanted, device: Device) -> Winner | None:
    """Returns the fastest cover, or None if fewer than two were timed and the prediction may decide.

    It may not if a kernel's result was wrong. PyTorch's operator wins then, if nothing else was timed.
    """
    timed = sorted((trial.ms, number) for number, trial in enumerate(trials) if trial.times)
    wrong = [trial for trial in trials if trial.wrong]
    for trial in wrong:
        warnings.warn(
            f"tconv3d does not use the kernel {trial.name} for a layer, because {trial.why_not} "
            f"({_where(wanted, device)}). Please report this with the output of `tconv3d info`.",
            RuntimeWarning,
            stacklevel=2,
        )
    if len(timed) < 2 and not wrong:
        return None
    fastest = timed[0][1] if timed else next(i for i, cover in enumerate(covers) if cover[0].kernel == PYTORCH)
    timings = tuple(Timing(trials[number].name, 1e3 * ms) for ms, number in timed)
    return Winner(winners.parts(covers[fastest]), timings, _where(wanted, device))


def _candidates(call: Call, covers: Sequence[Cover]) -> list[Candidate]:
    """Returns the covers as candidates, whose results are examined if PyTorch's operator is one that can be timed."""
    theirs = [cover[0].microseconds / 1e3 for cover in covers if cover[0].kernel == PYTORCH]
    examined = any(isinf(expected) or 2 * expected <= BUDGET_MS for expected in theirs)
    examine = Examiner(call.results, call.theirs) if examined else None
    return [_candidate(call, cover, examine) for cover in covers]


def _candidate(call: Call, cover: Cover, examine: Examiner | None) -> Candidate:
    def prepare() -> Run:
        if cover[0].kernel == PYTORCH:
            return call.theirs
        run = call.prepare(planner.plan_of(cover, call.wanted, call.device))
        if examine is not None:
            examine(run)
        return run

    predicted = sum(offer.microseconds for offer in cover) / 1e3
    return Candidate(winners.name_of(cover), prepare, predicted, cover[0].kernel == PYTORCH and _benchmark())


def _where(wanted: Wanted, device: Device) -> str:
    problem = next(iter(wanted.values()))
    return f"{device.name} for batch {problem.batch} of {'x'.join(map(str, problem.input_size))}"


def _capturing(like: Tensor) -> bool:
    if not like.is_cuda:
        return False
    with torch.cuda.device(like.device):
        return torch.cuda.is_current_stream_capturing()


def _room(call: Call) -> bool:
    """Returns whether there is memory for three sets of results, a workspace and flushing the L2 cache.

    The results are those of a candidate, of PyTorch's operator as it is timed, and those that candidates are compared
    with.
    """
    if not call.like.is_cuda:
        return True
    results = sum(problem.bytes for problem in call.wanted.values())  # the operands are counted too
    return _free_bytes(call.like.device) >= 3 * results + call.device.workspace_bytes + L2_FLUSH_BYTES


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
