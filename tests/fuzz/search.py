"""Runs many draws on many workers, shrinks the failures, and makes the summary."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from . import draw, families
from .case import Case, line
from .shrink import CASE_TIMEOUT, SECONDS, kind_of, shrink
from .workers import Worker

PROGRESS = 500  # cases between two lines that say how far the search is
MOST_OF_A_KIND = 2  # most failures of one kind that are shrunk; others most likely have the same cause


@dataclass
class Failure:
    """Holds a failing case, which is the last of `cases`; its process had run the other cases of its layer before."""

    number: int  # number of the draw
    cases: list[Case]
    message: str

    @property
    def text(self) -> str:
        return ",\n    ".join(line(case) for case in self.cases) + f"\n        {self.message}"


@dataclass
class Search:
    """Runs a search. `cases` and `minutes` are limits, None means no limit; `plans` is passed to `draw.cases`."""

    seed: int
    device: str
    plans: tuple[str, ...] = ("", *draw.PLANS)
    cases: int | None = None
    minutes: float | None = None
    workers: int = 2
    shrinking: float = SECONDS  # seconds for each failure
    environment: dict[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        kinds = ("plans", "type", "epilogue", "family", "path")
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in kinds}
        self.run_cases = self.layers = 0
        self.failures: list[Failure] = []
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._started = time.monotonic()

    def run(self) -> None:
        """Draws and runs cases until a limit is reached, then shrinks the failures."""
        with ThreadPoolExecutor(self.workers) as threads:
            for done in [threads.submit(self._work) for _ in range(self.workers)]:
                done.result()
            kinds: Counter[str] = Counter()
            chosen = []
            for failure in self.failures:
                kinds[kind_of(failure.message)] += 1
                if kinds[kind_of(failure.message)] <= MOST_OF_A_KIND:
                    chosen.append(failure)
            for _ in threads.map(self._shrink, chosen):
                pass

    def _work(self) -> None:
        with Worker(self.device, self.environment) as worker:
            while not self._over():
                with self._lock:
                    number = next(self._numbers)
                    self.layers += 1
                cases = draw.cases(self.seed, number, self.plans)
                outcome = worker.run(cases)
                with self._lock:
                    self._count(outcome.done, outcome.families)
                    if outcome.failed is not None:
                        self._count([outcome.failed], {})
                        before = cases[: cases.index(outcome.failed)]
                        self.failures.append(Failure(number, [*before, outcome.failed], outcome.message))
                        self.say(f"draw {number} fails: {line(outcome.failed)}\n    {outcome.message}")

    def _over(self) -> bool:
        late = self.minutes is not None and time.monotonic() - self._started > 60 * self.minutes
        return late or (self.cases is not None and self.run_cases >= self.cases)

    def _count(self, cases: list[Case], plans: dict[str, int]) -> None:
        before, self.run_cases = self.run_cases, self.run_cases + len(cases)
        if before // PROGRESS < self.run_cases // PROGRESS:
            seconds = time.monotonic() - self._started
            self.say(f"{self.run_cases} cases in {seconds:.0f} s, {len(self.failures)} failures")
        for case in cases:
            self.counts["plans"][case.plans or self.device] += 1
            self.counts["type"][case.dtype] += 1
            self.counts["epilogue"][case.epilogue or "none"] += 1
        for name, count in plans.items():
            self.counts["family" if name in families.names() else "path"][name] += count

    def _shrink(self, failure: Failure) -> None:
        def fails(cases: list[Case]) -> str | None:
            outcome = worker.run(cases, CASE_TIMEOUT)
            return outcome.message if outcome.failed == cases[-1] else None

        with Worker(self.device, self.environment) as worker:
            failure.cases, failure.message = shrink(failure.cases, failure.message, fails, self.shrinking)
        self.say(f"draw {failure.number} shrunk:\n    {failure.text}")

    def summary(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "device": self.device,
            "cases": self.run_cases,
            "layers": self.layers,
            "seconds": round(time.monotonic() - self._started),
            **{name: dict(sorted(counts.items())) for name, counts in self.counts.items()},
            "families never reached": [name for name in families.names() if not self.counts["family"][name]],
            "paths never reached": [name for name in families.PATHS if not self.counts["path"][name]],
            "failures": [
                {"draw": each.number, "cases": [line(case) for case in each.cases], "message": each.message}
                for each in self.failures
            ],
        }
