"""Compiles for GPUs, without needing one, the kernels that the tests ran in the emulator.

    python tests/helpers/compile_everything.py DIR CSV

DIR holds the kernels and constants that `conftest.py` recorded. Their types and switches are choices; numbers are
not. For Hopper, enough of each kernel are compiled that every two choices which one of them makes are made together
in one that is compiled: what does not compile nearly always depends on one or two choices. The sources have no code
for single other architectures, but the oldest lacks some instructions: it gets, for each kernel, type and strict
float32 of its own, the one with the most registers. The others get one of each kernel: one that
`tests/planning/test_gpus.py` planned for a GPU of that architecture, if it recorded any. `--all` compiles
everything for every architecture, which takes long.

CSV gets registers, spills, stack and shared memory of each. The script fails if a kernel does not compile, if the
compiler serializes matrix instructions, or if a kernel in NO_SPILLS spills more than SPILL_LIMIT bytes on Hopper.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import heapq
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tconv3d import emulator
from tconv3d.planning.launch import Constants
from tconv3d.runtime import compiler

HOPPER = "sm_90a"
OLDEST, OTHERS = ("sm_80",), ("sm_86", "sm_89", "sm_100a", "sm_120")
# Beginnings of the names of kernels that use wgmma, or prepare or finish the work of one that does.
HOPPER_ONLY = (
    *("halo", "hopper", "rows_weight_grad", "unfold", "gather", "up"),
    *("pack", "turn", "reduce_"),
)
# Kernels that need Hopper or newer, because their launches overlap the previous launch.
FROM_HOPPER, BEFORE_HOPPER = ("fill", "norm_both", "norm_once"), ("sm_80", "sm_86", "sm_89")
NO_SPILLS = ("direct", "direct_weight_grad", "channel_sum", "reduce", "mma", "mma_pack")
SPILL_LIMIT = 512  # bytes of spill loads and stores on Hopper: enough for a few values outside of inner loops
WORKERS = 2  # threads suffice, because NVRTC runs without Python's global lock


@dataclass(frozen=True)
class Kernel:
    name: str
    constants: Constants

    @property
    def choices(self) -> frozenset[object]:
        """Returns the kernel's name, types and switches, and every two of them."""
        made = [pair for pair in self.constants if isinstance(pair[1], (bool, str))]
        return frozenset((self.name, *some) for n in range(3) for some in itertools.combinations(made, n))

    @property
    def from_hopper(self) -> bool:
        """Says whether the kernel needs Hopper or newer, for launches that overlap or for the copy engine."""
        return self.name in FROM_HOPPER or ("kOverlaps", True) in self.constants or self.by_copy_engine

    @property
    def by_copy_engine(self) -> bool:
        """Says whether a kernel that has builds for all GPUs uses Hopper's copy engine."""
        return ("kHopper", True) in self.constants

    @property
    def family(self) -> tuple[object, ...]:
        """Returns the kernel, its types, the halves that strict float32 splits values into, and the copy engine.

        Expressions, which are types with arguments to the compiler, do not count.
        """

        def counts(name: str, value: object) -> bool:
            return "<" not in value if isinstance(value, str) else name in ("kHalves", "kHopper")

        return (self.name, *(pair for pair in self.constants if counts(*pair)))

    def __str__(self) -> str:
        plain = tuple(pair for pair in self.constants if not isinstance(pair[1], tuple))
        return f"{compiler.describe(self.name, plain)} {self.hash}"

    @property
    def hash(self) -> str:
        return hashlib.sha256(compiler.translation_unit(self.name, self.constants).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Outcome:
    kernel: Kernel
    arch: str
    report: compiler.Report | None
    error: str = ""
    serialized: str = ""  # the compiler's warning that it serializes matrix instructions


def recorded(directory: Path) -> list[Kernel]:
    files = sorted(directory.glob("launches-*.json"))
    found = {Kernel(name, _restored(constants)) for file in files for name, constants in json.loads(file.read_text())}
    return sorted(found, key=lambda kernel: (kernel.name, kernel.hash))


def planned(directory: Path) -> dict[str, list[Kernel]]:
    """Returns kernels that were planned for listed GPUs, by architecture; one of each name."""
    found: dict[str, dict[str, Kernel]] = defaultdict(dict)
    for file in sorted(directory.glob("planned-*.json")):
        text = json.loads(file.read_text())
        for name, constants in text["kernels"]:
            found[text["arch"]].setdefault(name, Kernel(name, _restored(constants)))
    return {arch: list(kernels.values()) for arch, kernels in found.items()}


def _restored(value: Any) -> Any:
    """Returns constants as they were before they were written as JSON, which has no tuples."""
    return tuple(map(_restored, value)) if isinstance(value, list) else value


def compile_one(kernel: Kernel, arch: str) -> Outcome:
    try:
        made = compiler.compile(kernel.name, kernel.constants, arch)
        return Outcome(kernel, arch, made.report, serialized=made.serialized)
    except Exception as error:  # no error may stop the other kernels
        return Outcome(kernel, arch, None, str(error))


def compile_all(work: list[tuple[Kernel, str]], label: str) -> list[Outcome]:
    outcomes = []
    with ThreadPoolExecutor(WORKERS) as pool:
        results = pool.map(lambda pair: compile_one(*pair), work)
        for outcome in progress(results, len(work), label):
            outcomes.append(outcome)
    return outcomes


def progress(items: Iterable[Outcome], count: int, label: str) -> Iterator[Outcome]:
    """Counts in one line on a terminal, and prints a line every ten seconds elsewhere."""
    terminal, start = sys.stdout.isatty(), time.monotonic()
    shown = start
    for done, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if done == count or now - shown > (0.1 if terminal else 10):
            end = "\r" if terminal and done < count else "\n"
            print(f"{label}: {done} of {count}, {now - start:.0f} s", end=end, flush=True)
            shown = now


def covering(kernels: list[Kernel]) -> list[Kernel]:
    """Returns few of the kernels that together have all of their choices, the kernel with most new choices first."""
    left = {kernel: kernel.choices for kernel in kernels}
    # A kernel never has more new choices than when they were last counted, so most counts need no update.
    waiting = [(-len(choices), i, kernel) for i, (kernel, choices) in enumerate(left.items())]
    heapq.heapify(waiting)
    made, kept = set[object](), list[Kernel]()
    while waiting:
        count, i, kernel = heapq.heappop(waiting)
        left[kernel] -= made
        if len(left[kernel]) == -count:
            made |= left[kernel]
            kept.append(kernel)
        elif left[kernel]:
            heapq.heappush(waiting, (-len(left[kernel]), i, kernel))
    return kept


def representatives(outcomes: list[Outcome], family: Callable[[Kernel], object]) -> list[Kernel]:
    """Returns for each family the kernel with the most registers, or one that did not compile."""
    by_family: dict[object, Outcome] = {}

    def registers(outcome: Outcome) -> float:
        return outcome.report.registers if outcome.report else float("inf")

    for outcome in outcomes:
        other = by_family.get(family(outcome.kernel))
        if other is None or registers(outcome) > registers(other):
            by_family[family(outcome.kernel)] = outcome
    return [outcome.kernel for outcome in by_family.values()]


def spilled(outcome: Outcome) -> int:
    return outcome.report.spill_loads + outcome.report.spill_stores if outcome.report else 0


def write_csv(outcomes: list[Outcome], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        columns = ("registers", "spill_loads", "spill_stores", "stack_bytes", "shared_bytes")
        writer.writerow(("kernel", "arch", *columns, "constants"))
        for outcome in outcomes:
            numbers = [getattr(outcome.report, column, "") for column in columns]
            writer.writerow((outcome.kernel.name, outcome.arch, *numbers, outcome.kernel.hash))


def summary(outcomes: list[Outcome]) -> str:
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.kernel.name, outcome.arch].append(outcome)
    lines = [f"{'kernel':20} {'arch':8} {'compiled':>8} {'registers':>10} {'spilling':>8} {'bytes at most':>13}"]
    for (name, arch), group in sorted(groups.items()):
        registers = [outcome.report.registers for outcome in group if outcome.report] or [0]
        spills = [spilled(outcome) for outcome in group]
        lines.append(
            f"{name:20} {arch:8} {sum(o.report is not None for o in group):8} "
            f"{min(registers):5}-{max(registers):<4} {sum(map(bool, spills)):8} {max(spills):13}"
        )
    return "\n".join(lines)


def faults(outcomes: list[Outcome]) -> list[str]:
    found = [
        f"{outcome.kernel} does not compile for {outcome.arch}:\n{outcome.error[:2000]}"
        for outcome in outcomes
        if outcome.report is None
    ]
    for outcome in outcomes:
        if outcome.serialized:
            found.append(f"{outcome.kernel} on {outcome.arch}: {outcome.serialized}")
        limited = outcome.arch == HOPPER and outcome.kernel.name in NO_SPILLS
        if limited and spilled(outcome) > SPILL_LIMIT:
            found.append(f"{outcome.kernel} spills {spilled(outcome)} bytes on {HOPPER}, allowed {SPILL_LIMIT}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--all", action="store_true", help="everything for every architecture")
    options = parser.parse_args()

    kernels = recorded(options.records)
    if not kernels:
        print(f"no launches were recorded in {options.records}")
        return 1 if emulator.available() else 0
    on_hopper = kernels if options.all else covering(kernels)
    print(f"{len(on_hopper)} of {len(kernels)} kernels are compiled for {HOPPER}")
    outcomes = compile_all([(kernel, HOPPER) for kernel in on_hopper], f"{compiler.version()}, {HOPPER}")
    generic = [outcome for outcome in outcomes if not outcome.kernel.name.startswith(HOPPER_ONLY)]
    of_type, of_kernel = (
        [outcome.kernel for outcome in generic] if options.all else representatives(generic, family)
        for family in (lambda kernel: kernel.family, lambda kernel: (kernel.name, kernel.by_copy_engine))
    )
    by_gpu = planned(options.records)
    work = [(kernel, arch) for arch in (*OLDEST, *OTHERS) for kernel in by_gpu.get(arch, [])]
    already = {(kernel.name, arch) for kernel, arch in work}
    work += [(kernel, arch) for kernel in of_type for arch in OLDEST]
    work += [(kernel, arch) for kernel in of_kernel for arch in OTHERS if (kernel.name, arch) not in already]
    work = [pair for pair in work if not (pair[0].from_hopper and pair[1] in BEFORE_HOPPER)]
    outcomes += compile_all(work, ", ".join((*OLDEST, *OTHERS)))

    write_csv(outcomes, options.csv)
    print(summary(outcomes))
    found = faults(outcomes)
    for fault in found[:5]:
        print(f"\n{fault}\n")
    print(f"{len(outcomes)} compiled, {len(found)} faults; the whole table is {options.csv}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
