"""Timing candidates against each other by fake clocks: who is timed, how often, and what if one fails."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest
import torch

from tconv3d.torch_ops import clock, measuring
from tconv3d.torch_ops.measuring import BUDGET_MS, MOST_RUNS, Candidate, Run, Trial, race


class Bench:
    """A GPU whose candidates take the times that they are given, and whose host takes no time of its own."""

    def __init__(self, **milliseconds: float) -> None:
        self.times, self.now, self.running, self.runs = milliseconds, 0.0, "", list[str]()

    def candidates(self, expected: dict[str, float] | None = None) -> list[Candidate]:
        return [Candidate(name, self.prepare(name), (expected or {}).get(name, inf)) for name in self.times]

    def prepare(self, name: str) -> Callable[[], Run]:
        def run() -> None:
            self.running = name
            self.runs.append(name)

        return lambda: run

    def stopwatch(self, run: Run) -> float:
        run()
        ms = self.times[self.running]
        self.now += ms / 1e3
        return ms

    def race(self, expected: dict[str, float] | None = None, budget_ms: float = BUDGET_MS) -> dict[str, Trial]:
        trials = race(self.candidates(expected), self.stopwatch, False, budget_ms, seconds=lambda: self.now)
        return {trial.name: trial for trial in trials}


def test_everybody_is_timed_in_turn_and_the_median_counts() -> None:
    bench = Bench(ours=0.3, theirs=0.2, other=0.25)
    found = bench.race()
    assert {name: trial.ms for name, trial in found.items()} == {"ours": 0.3, "theirs": 0.2, "other": 0.25}
    assert [len(trial.times) for trial in found.values()] == [MOST_RUNS - 1] * 3
    assert bench.runs[6:12] == ["ours", "theirs", "other"] * 2


def test_who_is_far_behind_is_not_run_again() -> None:
    bench = Bench(ours=1.0, slow=1.6, hopeless=4.1)
    found = bench.race()
    assert len(found["ours"].times) == MOST_RUNS - 1
    assert bench.runs.count("slow") == 3 and found["slow"].ms == 1.6
    assert bench.runs.count("hopeless") == 2 and found["hopeless"].ms == 4.1


@pytest.mark.parametrize("late", ["ours", "theirs"])
def test_a_first_time_at_a_low_clock_rate_decides_nothing(late: str) -> None:
    """The first timed run of one candidate meets a GPU that has idled while something was compiled."""
    bench = Bench(ours=0.125, theirs=0.1)
    asleep = {late}

    def stopwatch(run: Run) -> float:
        ms = bench.stopwatch(run)
        if bench.running in asleep:
            asleep.discard(bench.running)
            return 3 * ms
        return ms

    ours, theirs = race(bench.candidates(), stopwatch, False, seconds=lambda: bench.now)
    assert (ours.ms, theirs.ms) == (0.125, 0.1)


@pytest.mark.parametrize("ms", [0.1, 3.0, 9.0, 20.0, 40.0])
def test_no_more_than_the_budget_is_spent(ms: float) -> None:
    bench = Bench(a=ms, b=ms, c=ms, d=ms)
    found = bench.race(dict.fromkeys("abcd", ms))
    assert ms * len(bench.runs) <= BUDGET_MS
    assert found["a"].times and len(bench.runs) >= 2
    for trial in found.values():
        assert trial.times or "no time left of 100 ms" in trial.why_not


@pytest.mark.parametrize("searches", [False, True])
def test_who_takes_longer_than_the_budget_runs_once_unless_it_searches(searches: bool) -> None:
    """The first run of PyTorch's operator may try algorithms, with `torch.backends.cudnn.benchmark`."""
    bench = Bench(ours=1.0, theirs=0.5)
    runs = bench.prepare("theirs")()

    def slow_at_first() -> None:
        runs()
        bench.now += 0.2 if bench.runs.count("theirs") == 1 else 0.0

    candidates = [*bench.candidates()[:1], Candidate("theirs", lambda: slow_at_first, 0.5, searches)]
    ours, theirs = race(candidates, bench.stopwatch, False, seconds=lambda: bench.now)
    assert (bench.runs.count("theirs"), theirs.ms) == ((MOST_RUNS + 1, 0.5) if searches else (1, 200.0))
    assert ours.ms == 1.0


def test_a_candidate_without_a_prediction_is_expected_to_take_as_long_as_the_best() -> None:
    found = Bench(first=30.0, second=30.0).race({"first": 30.0})
    assert found["first"].ms == 30 and not found["second"].times


def test_who_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(ours=1.0)

    def fails(error: Exception) -> Callable[[], Run]:
        def prepare() -> Run:
            raise error

        return prepare

    short = torch.OutOfMemoryError("CUDA out of memory.\nOf 2 available.")
    candidates = [
        Candidate("broken", fails(RuntimeError("no engine"))),
        Candidate("short", fails(short)),
        *bench.candidates(),
    ]
    broken, without, ours = race(candidates, bench.stopwatch, False, seconds=lambda: bench.now)
    assert (broken.why_not, broken.short_of_memory, broken.ms) == ("no engine", False, inf)
    assert (without.why_not, without.short_of_memory) == ("CUDA out of memory.", True)
    assert ours.ms == 1.0
    with pytest.raises(ZeroDivisionError):
        race([Candidate("bug", fails(ZeroDivisionError()))], bench.stopwatch, False)


def test_a_gpu_that_became_unusable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unusable() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail() -> float:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", unusable)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measuring.attempt("ours", fail, cuda=True)


@pytest.mark.parametrize(("launch_us", "flushes"), [(1, 1), (60, 3), (5000, clock.MAX_FLUSHES)])
def test_the_stopwatch_keeps_the_gpu_busy_while_the_host_launches(
    launch_us: float, flushes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of flushes follows from the launch before; the time is the one between the events."""
    log, now = list[str](), 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 7.0

    class Flush:
        def zero_(self) -> None:
            log.append("flush")

    def run() -> None:
        nonlocal now
        log.append("run")
        now += launch_us * 1e-6

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(clock, "L2_FLUSH_BYTES", 1)
    stopwatch = clock.Stopwatch(torch.device("cpu"))
    stopwatch.flush = Flush()  # type: ignore[assignment]
    assert stopwatch(run) == stopwatch(run) == 7.0
    once = ["event", "run", "event", "wait"]
    assert log == ["flush"] * 2 + once + ["flush"] * flushes + once
