"""Kernels that other volumes of a layer may need, compiled in the background.

    background.offer(problems, device)      # by the executor, when a call is planned

The first call of a layer compiles what its own volume needs. What volumes of other sizes may need (`repertoire`) is
then made by another process, of the lowest priority, that plans calls with volumes of all sizes and compiles into the
disk cache: a later call with one of them finds choice and cubin there. What is launched does not depend on it: a call
that comes before the process is done plans and compiles the same.

The work has a process of its own, because planning is Python and would hold up the caller's, and because a compiler
must not be in the middle of something when the caller's process ends. The caller writes what is to be made into a
pipe and has no thread that waits. While the caller is busy, the process works for `SHARE` of the time (`yielding`).
It never touches a GPU and does not import PyTorch; it ends when it is done, and at once when the process that started
it does. In a cache directory one works at a time. A layer that is done leaves an entry in the cache, and nobody
begins it again. A process that was interrupted leaves what it had compiled, and the next one goes on.

    TCONV3D_BACKGROUND      0: no such process is started.

Knows nothing of tensors, nor of kernels.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..planning import planner, repertoire
from ..planning.geometry import Triple
from ..planning.launch import Constants
from ..planning.problem import Device, Pass, Problem, Strides, channels_last_strides, contiguous_strides
from ..planning.repertoire import TYPICAL
from . import cache, compiler, plain, sources

try:
    import fcntl
except ImportError:  # not a POSIX system: nothing is compiled in the background
    fcntl = None  # type: ignore[assignment]

Problems = tuple[Problem, ...]  # of one call: a forward pass, or the gradients of a backward pass
Work = tuple[Problems, Device]
Kernel = tuple[str, Constants]
Cubes = Sequence[tuple[int, int]]  # batches and edges
Layout = Callable[[tuple[int, ...]], Strides]

LAYOUTS: tuple[Layout, ...] = (contiguous_strides, channels_last_strides, lambda shape: (0,) * 5)  # the last: of none

DELAY_S = 1.0  # seconds after the first offer: a program begins with several layers, and none of them is held up
SHARE = 0.05  # of the time that the process works while its caller is busy; it works freely beside a quiet caller
EDGES = (4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
BATCHES = (1, 2, 4, 16, 64)
MOST_POSITIONS = 2**22
RESTS = (0, 1, 2, 4)  # of lines, beside whole pieces of 16 bytes
LOCK, FAILURE = "background.lock", "background.log"  # in the cache directory


# ---- in the caller's process -------------------------------------------------------------------------------------


def offer(problems: Problems, device: Device) -> None:
    """A call was planned for the first time. Returns at once, whatever happens."""
    layer = (*(_layer_of(problem) for problem in problems), device)
    if layer in _offered:
        return
    _offered.add(layer)
    with contextlib.suppress(OSError, RuntimeError):  # there can be no more threads
        if _possible():
            _feeder.put((problems, device))


_offered: set[tuple[object, ...]] = set()


def _possible() -> bool:
    if os.environ.get("TCONV3D_BACKGROUND", "1") == "0" or fcntl is None:
        return False
    root = cache.place()
    if root is None or not os.access(root, os.W_OK):
        return False
    # Where Python is a part of another program, that is what would be started.
    return Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)


def _layer_of(problem: Problem) -> Problem:
    """The same for all volumes."""
    none = (0,) * 5
    return replace(problem, batch=0, input_size=(0, 0, 0), input=none, output=none)


class Feeder:
    """Hands what was offered to a process, and starts one where there is none.

    A thread does so `DELAY_S` after an offer and ends: while the process works, nothing of it runs in this one.
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
            with contextlib.suppress(Exception):  # no more processes, say: it costs time, never a result
                self._hand_over([work for work in found if not _is_done(work)])
            with self._lock:
                if not self._offers:
                    self._thread = None
                    return

    def _hand_over(self, found: list[Work]) -> None:
        """Writes to the process that is there; to a new one, if it has just ended or there is none."""
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
        """Nothing is started any more, and what was is ended."""
        with self._lock:
            self._ended = True
            if self._process is not None and self._lives():
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)


# The package's own `__init__` imports PyTorch, which takes longer than all else and is not needed.
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
    }
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[1]), _WORK, str(SHARE)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **settings},
        start_new_session=True,  # an interrupt from the keyboard is for the caller alone
    )


_feeder = Feeder()


@atexit.register
def _end() -> None:
    _feeder.end()


def _after_fork() -> None:
    """The process belongs to the parent."""
    global _feeder
    _feeder = Feeder()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def busy() -> bool:
    """Whether something that this process offered has not been made."""
    return _feeder.busy


def status() -> str:
    """What is being made, or what went wrong, for people; nothing, if there is nothing to say."""
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
    """What went wrong is forgotten."""
    if (root := cache.place()) is not None:
        with contextlib.suppress(OSError):
            (root / FAILURE).unlink()


# ---- in the process in the background ----------------------------------------------------------------------------


def main() -> None:
    cache.LOCKING = False  # at this priority, nobody should have to wait for it
    root = cache.place()
    assert root is not None, "offered without a cache"
    try:
        with _alone(root) as report:
            for work in _handed_over():
                prepare(work, report)
        (root / FAILURE).unlink(missing_ok=True)
    except Exception:  # nobody listens: left where `status` finds it
        with contextlib.suppress(OSError):
            (root / FAILURE).write_text(traceback.format_exc())


def _handed_over() -> Iterator[Work]:
    """What the caller writes to the standard input, one line each, until there is no more to do."""
    rest, patience = b"", None  # the caller writes as soon as it has started this process
    while select.select([0], [], [], patience)[0] and (data := os.read(0, 65536)):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield plain.loads(line, Work)
        patience = 0.0
    os.close(0)  # what the caller writes now fails, and it starts another process


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[Callable[[str], None]]:
    """While this is the only one that works in a cache. Gives a function that says what is being done."""
    with open(root / LOCK, "a+b") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)

        def report(text: str) -> None:
            file.truncate(0)
            file.write(text.encode())
            file.flush()

        yield report
        file.truncate(0)


def prepare(work: Work, report: Callable[[str], None] = lambda text: None) -> None:
    """Compiles what calls like this one may launch with volumes of other sizes."""
    if _is_done(work):  # by another process, while this one waited
        return
    problems, device = work
    arch, seen = compiler.architecture(device.compiled_capability), set[Kernel]()

    def compile(calls: Iterable[Problems]) -> None:
        for kernel in (kernel for each in calls for kernel in _kernels(each, device)):
            if kernel not in seen:
                seen.add(kernel)
                report(f"{_describe(problems)}, kernel {len(seen)}")
                with contextlib.suppress(compiler.CompileError):  # it fails again where it is launched, and says so
                    compiler.compile(*kernel, arch)

    compile((problems, *others(problems)))
    planner.forget()
    with repertoire.typical_builds():  # those too that none of these volumes chose
        compile(others(problems, TYPICAL))
    planner.forget()
    cache.put(_done_key(work), ".done", json.dumps(len(seen)).encode())


def _kernels(problems: Problems, device: Device) -> Iterator[Kernel]:
    """As the executor plans a call."""
    try:
        alone = len(problems) == 1
        plan = planner.plan(problems[0], device) if alone else planner.plan_gradients(problems, device)
    except (NotImplementedError, ValueError):  # no kernel takes it
        return
    for each in (plan, plan.kept):
        for launch in each.launches if each else ():
            if min(launch.grid) > 0:
                yield launch.kernel, launch.constants


def _describe(problems: Problems) -> str:
    g = problems[0].geometry
    passes = ", ".join(problem.which.value for problem in problems)
    return f"{g.in_channels} to {g.out_channels} channels, kernel {'x'.join(map(str, g.kernel))}, {passes}"


def others(problems: Problems, cubes: Cubes | None = None) -> Iterator[Problems]:
    """The same call with volumes of all sizes, or of these."""
    if any(None in _layouts(problem) for problem in problems):
        return  # tensors that are parts of others: nobody knows of what
    main = problems[0]
    if main.which is Pass.BIAS_GRAD:  # the same kernel for all
        return
    found = volumes(main.batch, main.input_size, main.item_bytes)
    for batch, size in found if cubes is None else _like_cubes(cubes, main.item_bytes):
        if min(main.geometry.output_size(size)) > 0:
            yield tuple(_resized(problem, main, batch, size) for problem in problems)


def volumes(batch: int, size: Triple, item_bytes: int) -> Iterator[tuple[int, Triple]]:
    """Those that are likely first. Lines of them are multiples of 16 bytes, or not."""
    d, h, w = size
    found = [(each, size) for each in (1, 2, batch // 2, 2 * batch, 4, 8, 16) if each]
    found += [(each, (d, h, w - rest)) for rest in RESTS for each in (batch, 1) if w > rest]
    cubes = [*TYPICAL, *((each, edge) for edge in EDGES for each in BATCHES if each * edge**3 <= MOST_POSITIONS)]
    yield from dict.fromkeys((*found, *_like_cubes(cubes, item_bytes)))


def _like_cubes(cubes: Cubes, item_bytes: int) -> Iterator[tuple[int, Triple]]:
    """Cubes, and flatter volumes of about as many positions."""
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
    """Of input and output, which must be one of PyTorch's two."""
    return [
        next((layout for layout in LAYOUTS if strides == layout(shape)), None) for shape, strides in _sides(problem)
    ]


def _sides(problem: Problem) -> tuple[tuple[tuple[int, ...], Strides], ...]:
    """Shapes and strides of input and output."""
    g = problem.geometry
    x = (problem.batch, g.in_channels, *problem.input_size), problem.input
    y = (problem.batch, g.out_channels, *problem.output_size), problem.output
    return x, y


def _is_done(work: Work) -> bool:
    return cache.find(_done_key(work), ".done") is not None


def _done_key(work: Work) -> str:
    """Any family may have planned the layer: so the key covers all headers, and all modules that plan."""
    headers = sources.digest(sources.all_headers())
    return cache.key("background", headers, sources.program(__name__), compiler.identity(), repr(work))
