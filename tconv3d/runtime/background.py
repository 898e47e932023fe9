"""Compiles, in the background, the kernels that other volumes of a layer may need.

    background.offer(problems, device)      # the executor calls this when it plans a call for the first time

The first call of a layer compiles the kernels of its own volume. A process of the lowest priority then plans the call
with volumes of all other sizes (`repertoire`) and compiles their kernels into the disk cache, where later calls find
the planner's choice and the cubin. Which kernels are launched does not depend on the process: a call that comes early
plans and compiles the same kernels itself.

A separate process does the work, because planning in Python would hold the caller's GIL, and because no compiler must
be active when the caller's process ends. The caller writes the work into a pipe and needs no waiting thread. While
the caller is busy, the process works for the fraction `SHARE` of the time (`yielding`). The process never uses a GPU
and does not import PyTorch. It ends when all work is done, and immediately when the caller's process ends. One
process works per cache directory at a time. A finished layer leaves an entry in the cache, so that no process repeats
it. Kernels compiled by an interrupted process stay in the cache, and the next process continues from there.

    TCONV3D_BACKGROUND      0: no such process is started.

This module knows neither tensors nor kernels.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..planning import planner, repertoire
from ..planning.geometry import Triple
from ..planning.launch import Constants
from ..planning.problem import Device, Pass, Problem, Strides, channels_last_strides, contiguous_strides
from ..planning.repertoire import TYPICAL
from . import cache, compiler, packs, plain, sources

try:
    import fcntl
except ImportError:  # systems without POSIX locks compile nothing in the background
    fcntl = None  # type: ignore[assignment]

Problems = tuple[Problem, ...]  # the problems of one call: a forward pass, or the gradients of a backward pass
Work = tuple[Problems, Device]
Kernel = tuple[str, Constants]
Cubes = Sequence[tuple[int, int]]  # pairs of a batch size and an edge length in positions
Layout = Callable[[tuple[int, ...]], Strides]

# The last layout stands for a tensor that the pass does not use.
LAYOUTS: tuple[Layout, ...] = (contiguous_strides, channels_last_strides, lambda shape: (0,) * 5)

DELAY_S = 1.0  # seconds between an offer and the hand-over, so that the first calls of a program are not slowed down
SHARE = 0.05  # fraction of the time that the process works while its caller is busy
# The volumes that are planned have these edges (in positions) and batch sizes, and at most 2**22 positions in all.
EDGES = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
BATCHES = (1, 2, 4, 16, 64)
MOST_POSITIONS = 2**22
RESTS = (0, 1, 2, 4)  # elements by which lines (w) vary, so that not all are multiples of 16 bytes
LOCK, FAILURE = "background.lock", "background.log"  # file names in the cache directory


# ---- runs in the caller's process --------------------------------------------------------------------------------


def offer(problems: Problems, device: Device) -> None:
    """Takes a call that was planned for the first time, and returns at once without raising."""
    layer = (*(_layer_of(problem) for problem in problems), device)
    if layer in _offered:
        return
    _offered.add(layer)
    with contextlib.suppress(OSError, RuntimeError):  # the system may refuse a new thread
        if _possible():
            _feeder.put((problems, device))


_offered: set[tuple[object, ...]] = set()


def _possible() -> bool:
    if os.environ.get("TCONV3D_BACKGROUND", "1") == "0" or fcntl is None:
        return False
    root = cache.place()
    if root is None or not os.access(root, os.W_OK):
        return False
    # In a program that embeds Python, `sys.executable` may be the program itself, which must not be started.
    return Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)


def _layer_of(problem: Problem) -> Problem:
    """Returns the problem without its volume, which is equal for all volumes of a layer."""
    none = (0,) * 5
    return replace(problem, batch=0, input_size=(0, 0, 0), input=none, output=none)


class Feeder:
    """Hands offered calls to the background process, and starts the process if there is none.

    A thread does this `DELAY_S` after an offer and then ends, so that no thread waits while the process works.
    """

    def __init__(self) -> None:
        self._offers: list[Work] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    @property
    def busy(self) -> bool:
        return self._thread is not None or self._lives()

    def _lives(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def put(self, work: Work) -> None:
        with self._lock:
            if self._ended:
                return
            self._offers.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tconv3d background", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(DELAY_S)
            with self._lock:
                found, self._offers = self._offers, []
            with contextlib.suppress(Exception):  # a failure to start a process costs time, never a result
                self._hand_over([work for work in found if not _is_done(work)])
            with self._lock:
                if not self._offers:
                    self._thread = None
                    return

    def _hand_over(self, found: list[Work]) -> None:
        """Writes work to the running process, or to a new process if none runs or it has just ended."""
        text = "".join(f"{plain.dumps(work)}\n" for work in found).encode()
        for _ in range(2 if found else 0):
            with self._lock:
                if self._ended:
                    return
                if not self._lives():
                    self._process = start()
                process = self._process
            assert process is not None and process.stdin is not None
            try:
                process.stdin.write(text)
                process.stdin.flush()
                return
            except BrokenPipeError:
                process.wait()

    def end(self) -> None:
        """Ends the background process, and prevents that another one is started."""
        with self._lock:
            self._ended = True
            if self._process is not None and self._lives():
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)


# The program replaces the package's `__init__`, because it imports PyTorch, which is slow and not needed here.
_PROGRAM = (
    "import sys, types; package = types.ModuleType('tconv3d'); package.__path__ = sys.argv[1:2]; "
    "sys.modules['tconv3d'] = package; from tconv3d.runtime.yielding import run; run(sys.argv[2], float(sys.argv[3]))"
)
_WORK = "from tconv3d.runtime.background import main; main()"


def start() -> subprocess.Popen[bytes]:
    settings = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONSAFEPATH": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        packs.VARIABLE: os.pathsep.join(str(pack.path) for pack in packs.loaded()),
    }
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[1]), _WORK, str(SHARE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **settings},
        start_new_session=True,  # an interrupt from the keyboard must only reach the caller
    )


_feeder = Feeder()


@atexit.register
def _end() -> None:
    _feeder.end()


def _after_fork() -> None:
    """Gives a forked child a feeder of its own, because the background process belongs to the parent."""
    global _feeder
    _feeder = Feeder()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def busy() -> bool:
    """Tells whether work that this process offered is not finished."""
    return _feeder.busy


def status() -> str:
    """Says in words what is being compiled or what went wrong; an empty text means neither."""
    root = cache.place()
    if root is None or fcntl is None:
        return ""
    with contextlib.suppress(OSError), open(root / LOCK, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"compiling in the background: {file.read().decode(errors='replace') or 'about to begin'}"
    with contextlib.suppress(OSError, IndexError):
        reason = (root / FAILURE).read_text(errors="replace").strip().splitlines()[-1]
        return f"compiling in the background failed: {reason} ({root / FAILURE})"
    return ""


def clear() -> None:
    """Removes the report of the last failure."""
    if (root := cache.place()) is not None:
        with contextlib.suppress(OSError):
            (root / FAILURE).unlink()


# ---- runs in the background process ------------------------------------------------------------------------------


def main() -> None:
    cache.LOCKING = False  # no process should wait for one of the lowest priority
    root = cache.place()
    assert root is not None, "offered without a cache"
    try:
        with _alone(root) as report:
            for work in _handed_over():
                prepare(work, report)
        (root / FAILURE).unlink(missing_ok=True)
    except Exception:  # `status` reads the report from the file
        with contextlib.suppress(OSError):
            (root / FAILURE).write_text(traceback.format_exc())


def _handed_over() -> Iterator[Work]:
    """Yields the work that the caller writes to the standard input, one line each, until no more is there."""
    rest, patience = b"", None  # the first read waits: the caller writes as soon as it has started this process
    while select.select([0], [], [], patience)[0] and (data := os.read(0, 65536)):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield plain.loads(line, Work)
        patience = 0.0
    os.close(0)  # later writes of the caller fail, and it starts another process


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[Callable[[str], None]]:
    """Holds the lock of a cache directory, where one process works at a time; yields a progress function."""
    with open(root / LOCK, "a+b") as file:
        with contextlib.suppress(OSError):  # the file system may not support locks
            fcntl.flock(file, fcntl.LOCK_EX)

        def report(text: str) -> None:
            file.truncate(0)
            file.write(text.encode())
            file.flush()

        yield report
        file.truncate(0)


def prepare(work: Work, report: Callable[[str], None] = lambda text: None) -> None:
    """Compiles the kernels that calls of the same layer with volumes of other sizes may launch."""
    if _is_done(work):  # another process may have done it while this one waited
        return
    problems, device = work
    arch, seen = compiler.architecture(device.compiled_capability), set[Kernel]()
    for kernel in kernels(work):
        if kernel not in seen:
            seen.add(kernel)
            report(f"{_describe(problems)}, kernel {len(seen)}")
            with contextlib.suppress(compiler.CompileError):  # the launch fails again, with a message
                compiler.compile(*kernel, arch)
    cache.put(_done_key(work), ".done", json.dumps(len(seen)).encode())


def kernels(work: Work) -> Iterator[Kernel]:
    """Yields the kernels of a layer for volumes of all sizes, some repeatedly, if the given volume comes first."""
    problems, device = work
    for each in (problems, *others(problems)):
        yield from _kernels(each, device)
    planner.forget()
    with repertoire.typical_builds():  # also builds of typical volumes that none of the volumes chose
        for each in others(problems, TYPICAL):
            yield from _kernels(each, device)
    planner.forget()


def _kernels(problems: Problems, device: Device) -> Iterator[Kernel]:
    """Yields the kernels of a call, planned as the executor plans it."""
    try:
        alone = len(problems) == 1
        plan = planner.plan(problems[0], device) if alone else planner.plan_gradients(problems, device)
    except (NotImplementedError, ValueError):  # no kernel takes the problem
        return
    yield from ((launch.kernel, launch.constants) for launch in plan.every_launch)


def _describe(problems: Problems) -> str:
    g = problems[0].geometry
    passes = ", ".join(problem.which.value for problem in problems)
    return f"{g.in_channels} to {g.out_channels} channels, kernel {'x'.join(map(str, g.kernel))}, {passes}"


def others(problems: Problems, cubes: Cubes | None = None) -> Iterator[Problems]:
    """Yields the call with volumes of all sizes, or with volumes like the given cubes."""
    if any(None in _layouts(problem) for problem in problems):
        return  # strides of a slice do not follow from another volume's size
    main = problems[0]
    if main.which is Pass.BIAS_GRAD:  # one kernel serves all volumes
        return
    found = volumes(main.batch, main.input_size, main.item_bytes)
    for batch, size in found if cubes is None else _like_cubes(cubes, main.item_bytes):
        if min(main.geometry.output_size(size)) > 0:
            yield tuple(_resized(problem, main, batch, size) for problem in problems)


def volumes(batch: int, size: Triple, item_bytes: int) -> Iterator[tuple[int, Triple]]:
    """Yields batches and volumes, the likely ones first, with lines that are multiples of 16 bytes and others."""
    d, h, w = size
    found = [(each, size) for each in (1, 2, batch // 2, 2 * batch, 4, 8, 16) if each]
    found += [(each, (d, h, w - rest)) for rest in RESTS for each in (batch, 1) if w > rest]
    cubes = [*TYPICAL, *((each, edge) for edge in EDGES for each in BATCHES if each * edge**3 <= MOST_POSITIONS)]
    yield from dict.fromkeys((*found, *_like_cubes(cubes, item_bytes)))


def _like_cubes(cubes: Cubes, item_bytes: int) -> Iterator[tuple[int, Triple]]:
    """Yields cubes, and flatter volumes with about as many positions."""
    for batch, edge in dict.fromkeys(cubes):
        wide = max(edge, 16 // item_bytes)
        yield from ((batch, (edge, edge, wide + rest)) for rest in RESTS if rest < 16 // item_bytes)
        yield batch, (edge + 1, edge + 1, wide + 2)
        for rest in RESTS[:2]:
            yield batch, (edge // 2, edge, 2 * wide + rest)
            yield batch, (edge // 4, 2 * edge, 2 * wide + rest)


def _resized(problem: Problem, main: Problem, batch: int, size: Triple) -> Problem:
    if problem.which is Pass.BIAS_GRAD:
        size = main.geometry.output_size(size)
    changed = replace(problem, batch=batch, input_size=size)
    x, y = (layout(shape) for layout, (shape, _) in zip(_layouts(problem), _sides(changed), strict=True) if layout)
    return replace(changed, input=x, output=y)


def _layouts(problem: Problem) -> list[Layout | None]:
    """Returns the layouts of input and output: None if the layout is neither contiguous nor channels-last."""
    return [
        next((layout for layout in LAYOUTS if strides == layout(shape)), None) for shape, strides in _sides(problem)
    ]


def _sides(problem: Problem) -> tuple[tuple[tuple[int, ...], Strides], ...]:
    """Returns the shapes and strides of input and output."""
    g = problem.geometry
    x = (problem.batch, g.in_channels, *problem.input_size), problem.input
    y = (problem.batch, g.out_channels, *problem.output_size), problem.output
    return x, y


def _is_done(work: Work) -> bool:
    return cache.find(_done_key(work), ".done") is not None


def _done_key(work: Work) -> str:
    """Returns the cache key of a finished layer. Any family may plan it, so all headers and planners are covered."""
    headers = sources.digest(sources.all_headers())
    return cache.key("background", headers, sources.program(__name__), compiler.identity(), repr(work))
