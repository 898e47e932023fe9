"""Times candidates that compute the same thing, within a limit of time. This module imports nothing but the clock.

A candidate is prepared (compiled, its results allocated) and run once before it is timed; neither counts as
measuring. A candidate whose run before takes longer than all timed runs may take is not run again. Then all
candidates run in turn, so that a GPU whose clock rate drifts treats them alike. A candidate that is much slower than
the best is not run again.

Compiling the next candidate leaves the GPU idle for up to seconds, after which its clock rate is low at first. The
first time of a candidate therefore only tells whether it can win at all, and does not count beside later ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

import torch

from .clock import Timer

BUDGET_MS = 100.0  # milliseconds for all timed runs of one call, and for the runs that warm up
MOST_RUNS = 10  # timed runs of a candidate, at most, the first included
HOPELESS = 1.5  # a candidate that took so many times the best is not run again
HOPELESS_AT_FIRST = 4.0  # likewise after the first time, which a low clock rate may have made several times as long

Run = Callable[[], object]


class WrongResult(RuntimeError):
    """Raised when a candidate is prepared whose result is wrong, so that it is not timed."""


@dataclass(frozen=True)
class Candidate:
    """Describes one way to compute something."""

    name: str
    prepare: Callable[[], Run]  # returns a function that runs once, or raises an error if there is none
    expected_ms: float = inf  # predicted milliseconds; infinite if there is no prediction
    searches: bool = False  # the first run may search for an algorithm, and so take far longer than others


@dataclass
class Trial:
    """Holds the times of one candidate, or the reason why there are none."""

    name: str
    times: list[float] = field(default_factory=list)  # milliseconds; the first one alone, or all behind the first
    why_not: str = ""
    short_of_memory: bool = False
    wrong: bool = False  # the candidate gave a wrong result

    @property
    def ms(self) -> float:
        """The median in milliseconds; infinite if the candidate was not timed."""
        return statistics.median(self.times) if self.times else inf


def attempt(name: str, time_it: Callable[[], float], cuda: bool) -> Trial:
    """Returns the first time of a candidate, or why there is none: an error, a wrong result, or too little memory.

    An error is raised if the GPU has become unusable.
    """
    try:
        return Trial(name, [time_it()])
    except RuntimeError as error:
        why, short = str(error).partition("\n")[0][:200], isinstance(error, torch.OutOfMemoryError)
        wrong = isinstance(error, WrongResult)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    return Trial(name, why_not=why, short_of_memory=short, wrong=wrong)


def race(
    candidates: Sequence[Candidate],
    stopwatch: Timer,
    cuda: bool,
    budget_ms: float = BUDGET_MS,
    runs: int = MOST_RUNS,
    seconds: Callable[[], float] = time.perf_counter,
) -> list[Trial]:
    """Returns a trial for each candidate, in the same order, after at most `runs` timed runs each.

    `stopwatch` returns the milliseconds of one run. `seconds` is the host's clock.
    """
    spent, trials, prepared = 0.0, list[Trial](), dict[int, Run]()

    def timed(run: Run) -> float:
        nonlocal spent
        started = seconds()
        ms = stopwatch(run)
        spent += 1e3 * (seconds() - started)
        return ms

    def first_time(number: int) -> float:
        nonlocal spent
        run = prepared[number] = candidates[number].prepare()
        started = seconds()
        run()
        if cuda:
            torch.cuda.synchronize()
        ms = 1e3 * (seconds() - started)
        if ms > budget_ms and not candidates[number].searches:
            spent += ms
            return ms
        ms = timed(run)
        spent += ms  # the run before took as long
        return ms

    for number, candidate in enumerate(candidates):
        best = min((trial.ms for trial in trials), default=inf)
        expected = candidate.expected_ms if isfinite(candidate.expected_ms) else best
        if isfinite(expected) and spent + 2 * expected > budget_ms:
            trials.append(Trial(candidate.name, why_not=f"there was no time left of {budget_ms:.0f} ms"))
            continue
        trials.append(attempt(candidate.name, lambda number=number: first_time(number), cuda))  # type: ignore[misc]
    for turn in range(runs - 1):
        most = min((trial.ms for trial in trials), default=inf) * (HOPELESS if turn else HOPELESS_AT_FIRST)
        for number, trial in enumerate(trials):
            if trial.times and trial.ms <= most and spent + trial.times[-1] <= budget_ms:
                ms = timed(prepared[number])
                trial.times = [*trial.times, ms] if turn else [ms]
    return trials
