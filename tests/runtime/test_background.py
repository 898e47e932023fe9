"""What is compiled in the background is what other volumes need, once, and nobody notices how."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT

from tconv3d import emulator
from tconv3d.api.explain import call_of, problems_of
from tconv3d.families.halo import planner as halo_planner
from tconv3d.planning import planner
from tconv3d.planning.gpus import GPUS
from tconv3d.planning.problem import KINDS, volume_kind
from tconv3d.runtime import background, cache, compiler, plain, yielding
from tconv3d.runtime.background import Kernel, Problems
from tconv3d.tools import cli
from tconv3d.tools.bench.layers import Layer, layer

H200 = GPUS["H200"].device
CONVOLUTION = layer(2, 8, 8, (8, 8, 8), 3, 1, 1)
pytestmark = pytest.mark.skipif(background.fcntl is None, reason="needs locks between processes")

# In place of NVRTC; who compiled what is written down. Few volumes, so that there is little to plan.
STUB = """
import os, time
from tconv3d.runtime import background, compiler
compiler.identity = lambda: "stub"
background.EDGES, background.BATCHES, background.TYPICAL = (4,), (1,), ((1, 4), (1, 12))
def build(kernel, constants, unit, arch):
    with open(os.environ["STUB_LOG"], "a") as log:
        log.write(f"{os.getpid()} {compiler.describe(kernel, constants)}\\n")
    time.sleep(float(os.environ.get("STUB_SLEEP", "0")))
    return compiler._pack("", b"a cubin")
compiler._build = build
"""


def problems(of: Layer, batch: int, size: tuple[int, int, int], last: bool = False) -> tuple[Problems, Problems]:
    """Returns the problems of the forward pass and those of the backward pass."""
    x = torch.empty(batch, of.in_channels, *size, device="meta")
    x = x.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)
    forward, *gradients = problems_of(*call_of(of.module(device="meta"), x))  # type: ignore[arg-type]
    return (forward,), tuple(gradients)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    monkeypatch.setattr(background, "_offered", set())
    monkeypatch.setattr(background, "_feeder", background.Feeder())
    monkeypatch.setattr(background, "DELAY_S", 0.0)
    monkeypatch.delenv("TCONV3D_BACKGROUND", raising=False)
    planner.forget()
    yield
    background._feeder.end()
    planner.forget()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache, and a compiler, of the test's own."""
    root = tmp_path / "cache" / cache.LAYOUT
    root.mkdir(mode=0o700, parents=True)
    program = tmp_path / "stub.py"
    program.write_text(STUB)
    monkeypatch.setattr(background, "_WORK", f"exec(open({str(program)!r}).read()); background.main()")
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(root.parent))
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(compiler, "identity", lambda: "stub")
    monkeypatch.setattr(background, "EDGES", (4,))
    monkeypatch.setattr(background, "BATCHES", (1,))
    monkeypatch.setattr(background, "TYPICAL", ((1, 4), (1, 12)))
    return root.parent


def built(own_cache: Path) -> list[tuple[str, str]]:
    """By which process, and what."""
    log = own_cache.parent / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(pid, what) for pid, _, what in (line.partition(" ") for line in lines)]


def waited(for_what: Callable[[], object], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if for_what():
            return True
        time.sleep(0.02)
    return False


def done(of: Layer = CONVOLUTION) -> bool:
    return all(background._is_done((each, H200)) for each in problems(of, of.batch, of.size)[:1])


# ---- which volumes


@pytest.mark.parametrize("item_bytes", [2, 4, 8])
def test_volumes_are_of_all_kinds_and_lines_of_all_lengths(item_bytes: int) -> None:
    found = list(background.volumes(3, (5, 9, 30), item_bytes))
    assert found[0] == (1, (5, 9, 30)) and (3, (5, 9, 29)) in found
    assert len(found) == len(set(found))
    whole = 16 // item_bytes
    for kind in range(len(KINDS) + 1):
        widths = [w for batch, (d, h, w) in found if volume_kind(batch * d * h * w) == kind]
        assert {w % whole == 0 for w in widths} == {w % 2 for w in widths} or whole <= 2
        assert {min(w & -w, whole) for w in widths} == {2**n for n in range(whole.bit_length())}


@pytest.mark.parametrize("last", [False, True])
def test_other_volumes_are_calls_as_pytorch_would_make_them(last: bool) -> None:
    for which in (0, 1):
        given = problems(CONVOLUTION, 2, (8, 8, 8), last)[which]
        for other in list(background.others(given))[::40]:
            size = next(problem.input_size for problem in other)
            assert other == problems(CONVOLUTION, other[0].batch, size, last)[which]


def test_parts_of_other_tensors_have_no_other_volumes() -> None:
    (forward,), _ = problems(CONVOLUTION, 2, (8, 8, 8))
    strides = (2 * forward.input[0], *forward.input[1:])
    assert not list(background.others((type(forward)(**{**vars(forward), "input": strides}),)))


# ---- what is compiled


@functools.cache
def known() -> set[Kernel]:
    """What is compiled for a layer, without compiling it."""
    found: set[Kernel] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile", lambda kernel, constants, arch: found.add((kernel, constants)))
        patch.setattr(cache, "put", lambda *_: None)
        patch.setattr(background, "_is_done", lambda work: False)
        for each in problems(CONVOLUTION, CONVOLUTION.batch, CONVOLUTION.size):
            background.prepare((each, H200))
    return found


edges = st.integers(3, 90)


@pytest.mark.thorough
@settings(max_examples=3)
@given(batch=st.sampled_from((1, 2, 3, 8)), d=edges, h=edges, w=edges)
def test_nothing_is_left_to_compile(batch: int, d: int, h: int, w: int) -> None:
    have = known()
    planner.forget()
    for first in problems(CONVOLUTION, CONVOLUTION.batch, CONVOLUTION.size):
        list(background._kernels(first, H200))
    for other in problems(CONVOLUTION, batch, (d, h, w)):
        assert set(background._kernels(other, H200)) <= have


def test_a_process_compiles_what_calls_will_ask_for(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = problems(CONVOLUTION, 2, (8, 8, 8))
    background.offer(first, H200)
    assert background.busy()
    assert waited(lambda: not background.busy())
    assert done() and background.status() == ""
    process = background._feeder._process
    assert process is not None and process.returncode == 0, "it is not left as a zombie"
    assert len(built(own_cache)) == len({what for _, what in built(own_cache)}) > 1
    monkeypatch.setattr(compiler, "_build", lambda *_: pytest.fail("compiled once more"))
    monkeypatch.setattr(halo_planner, "_search", lambda *_: pytest.fail("searched once more"))
    for batch, size in ((2, (8, 8, 8)), (1, (8, 8, 8)), (1, (4, 4, 5)), (2, (3, 5, 6)), (1, (12, 12, 12))):
        for kernel in background._kernels(problems(CONVOLUTION, batch, size)[0], H200):
            assert compiler.compile(*kernel, "sm_90a").cubin == b"a cubin"
    background._offered.clear()
    background.offer(first, H200)
    assert waited(lambda: not background.busy())
    assert background._feeder._process is process, "a layer that is done is not begun again"


def test_the_process_has_neither_pytorch_nor_a_gpu(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = own_cache.parent / "seen"
    facts = "'torch' in sys.modules, os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE"
    ends = f"; import os, sys; open({str(seen)!r}, 'w').write(str(({facts})))"
    monkeypatch.setattr(background, "_WORK", background._WORK + ends)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    background.offer(problems(CONVOLUTION, 2, (8, 8, 8))[0], H200)
    assert waited(seen.exists) and waited(seen.read_text)
    assert seen.read_text() == "(False, 19, True)"


def test_two_at_once_compile_everything_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SLEEP", "0.02")
    feeders = [background.Feeder() for _ in range(2)]
    for feeder in feeders:
        feeder.put((problems(CONVOLUTION, 2, (8, 8, 8))[0], H200))
    assert waited(lambda: not any(feeder.busy for feeder in feeders))
    processes, kernels = zip(*built(own_cache), strict=True)
    assert len(set(processes)) == 1 and len(set(kernels)) == len(kernels)
    assert done()


def test_a_process_that_was_killed_is_taken_up(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SLEEP", "0.5")
    work = problems(CONVOLUTION, 2, (8, 8, 8))[0], H200
    background._feeder.put(work)
    assert waited(lambda: len(built(own_cache)) >= 2)
    process = background._feeder._process
    assert process is not None
    assert background.status().startswith("compiling in the background: 8 to 8 channels, kernel 3x3x3, forward")
    process.kill()
    assert waited(lambda: not background.busy()) and not done()
    monkeypatch.setenv("STUB_SLEEP", "0")
    background._feeder.put(work)
    assert waited(lambda: not background.busy()) and done()
    complete = [what for _, what in built(own_cache)]
    assert len(complete) - len(set(complete)) == 1  # what was being compiled


PARENT = """
import sys, time
from tconv3d.runtime import background, plain
background._WORK = sys.argv[1]
background.DELAY_S = 0.0
background._feeder.put(plain.loads(open(sys.argv[2]).read(), background.Work))
while background._feeder._process is None: time.sleep(0.01)
print(background._feeder._process.pid, flush=True)
{}
"""


@pytest.mark.parametrize("ending", ["killed", "ends", "killed, with a child"])
def test_it_ends_with_the_process_that_started_it(
    ending: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_SLEEP", "100")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    work = own_cache.parent / "work"
    work.write_text(plain.dumps((problems(CONVOLUTION, 2, (8, 8, 8))[0], H200)))
    log = own_cache.parent / "log"
    log.touch()
    until = f"while not __import__('os').path.getsize({str(log)!r}): time.sleep(0.01)\n"
    last = {
        "killed": "time.sleep(100)",
        "ends": "",
        "killed, with a child": "import os\nif os.fork() == 0: os.close(1)\ntime.sleep(20)",
    }[ending]
    command = [sys.executable, "-c", PARENT.format(until + last), background._WORK, str(work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert waited(lambda: built(own_cache))
        started = time.monotonic()
        if ending != "ends":
            parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert time.monotonic() - started < 5.0, "nobody waits for the compiler"
    worker = int(built(own_cache)[0][0])
    assert worker != pid
    assert waited(lambda: not _runs(pid) and not _runs(worker), 10.0)


def test_a_later_offer_goes_to_the_process_that_works(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SLEEP", "0.1")
    forward, backward = problems(CONVOLUTION, 2, (8, 8, 8))
    background.offer(forward, H200)
    assert waited(lambda: built(own_cache))
    background.offer(backward, H200)
    assert waited(lambda: not background.busy())
    assert all(background._is_done((each, H200)) for each in (forward, backward))
    assert len({process for process, _ in built(own_cache)}) == 1


def test_an_offer_to_a_process_that_ends_starts_another(own_cache: Path) -> None:
    forward, backward = problems(CONVOLUTION, 2, (8, 8, 8))
    background.offer(forward, H200)
    assert waited(done)  # it is about to end, or has
    background.offer(backward, H200)
    assert waited(lambda: not background.busy())
    assert background._is_done((backward, H200))


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False


# ---- it is not felt


def test_the_caller_has_no_thread_while_it_works(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_SLEEP", "100")
    background.offer(problems(CONVOLUTION, 2, (8, 8, 8))[0], H200)
    assert waited(lambda: built(own_cache))
    assert background.busy()
    assert "tconv3d background" not in {thread.name for thread in threading.enumerate()}


SPIN = """
import os
with open({!r}, "w") as file:
    file.write(str(os.getpid()))
while True:
    pass
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A process that takes all CPU time it gets, beside this one."""
    marker = tmp_path / "pid"
    monkeypatch.setattr(background, "_WORK", SPIN.format(str(marker)))
    process = background.start()
    assert waited(marker.exists) and waited(marker.read_text)
    yield int(marker.read_text())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_it_steps_aside_while_the_caller_is_busy(worker: int) -> None:
    assert stopped(worker, lambda: spin_for(0.01)) > 0.8


def test_it_is_not_held_up_beside_a_quiet_caller(worker: int) -> None:
    spin_for(0.5)
    time.sleep(1.0)  # until it is seen that the caller is quiet
    # Other threads of the test process may be busy for a moment: 0.19 was seen. Beside a busy caller it is above 0.8.
    assert stopped(worker, lambda: time.sleep(0.01)) < 0.5


def stopped(process: int, meanwhile: Callable[[], object]) -> float:
    """The part of the time that a process is stopped in. Time that it waits for a CPU does not count."""
    for _ in range(50):  # until it has been noticed
        meanwhile()
    states = []
    for _ in range(200):
        meanwhile()
        states.append(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0])
    return states.count("T") / len(states)


def spin_for(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_caller_that_cannot_be_examined_counts_as_busy() -> None:
    assert yielding.cpu_seconds(2**30) is None
    assert yielding._meter(2**30)()


@pytest.mark.skipif(not emulator.available(), reason="the emulator needs a C++ compiler")
@pytest.mark.thorough
def test_what_it_costs_is_measured(tmp_path: Path) -> None:
    """The script with which the figures of the documents are measured, for an instant and in the emulator."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "background_check.py"), "--seconds", "0.3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--json", str(figures)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert list(found) == ["before", "during", "after", "unrestrained", "beside a loop", "at the end"]
    assert all(row["median_ms"] > 0 for row in found.values()) and "unrestrained" in done.stdout
    assert found["during"]["other_cpu_s_per_s"] > 0, "the network's layers are compiled"


# ---- when nothing is


def test_not_if_the_user_does_not_want_it(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_BACKGROUND", "0")
    background.offer(problems(CONVOLUTION, 2, (8, 8, 8))[0], H200)
    assert not background.busy()


def test_not_if_the_cache_cannot_be_written(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own_cache / "file").touch()
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(own_cache / "file" / "cache"))
    background.offer(problems(CONVOLUTION, 2, (8, 8, 8))[0], H200)
    assert not background.busy()


@pytest.mark.parametrize("program", ["", "/usr/bin/uwsgi"])
def test_not_if_python_is_part_of_another_program(
    program: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    background.offer(problems(CONVOLUTION, 2, (8, 8, 8))[0], H200)
    assert not background.busy()


def test_a_layer_is_offered_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offers: list[object] = []
    monkeypatch.setattr(background._feeder, "put", offers.append)
    for batch, size in ((2, (8, 8, 8)), (1, (8, 8, 8)), (2, (9, 4, 4))):
        background.offer(problems(CONVOLUTION, batch, size)[0], H200)
    assert len(offers) == 1
    background.offer(problems(CONVOLUTION, 2, (8, 8, 8))[1], H200)
    assert len(offers) == 2


def test_a_failure_is_told_to_those_who_ask(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "def fails(*_): raise OSError('no space left')\nbackground.prepare = fails\n"
    (own_cache.parent / "stub.py").write_text(STUB + fails)
    background.offer(problems(CONVOLUTION, 2, (8, 8, 8))[0], H200)
    assert waited(lambda: not background.busy()) and not done()
    assert "failed: OSError: no space left" in background.status()
    assert cli.main(["cache"]) == 0
    assert "no space left" in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0
    assert background.status() == ""


def test_nobody_waits_for_what_it_compiles(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have little of a busy machine."""
    monkeypatch.setenv("STUB_SLEEP", "100")
    first, _ = problems(CONVOLUTION, 2, (8, 8, 8))
    background.offer(first, H200)
    assert waited(lambda: built(own_cache))
    monkeypatch.setattr(compiler, "_build", lambda *_: compiler._pack("", b"our own"))
    kernel = next(background._kernels(first, H200))
    assert compiler.describe(*kernel) == built(own_cache)[0][1]
    started = time.monotonic()
    assert compiler.compile(*kernel, "sm_90a").cubin == b"our own"
    assert time.monotonic() - started < 5.0


def test_where_nothing_was_started_there_is_nothing_to_say(own_cache: Path) -> None:
    assert background.status() == ""
    (own_cache / cache.LAYOUT / background.LOCK).touch()
    assert background.status() == ""


def test_interrupts_are_for_the_caller(own_cache: Path) -> None:
    process = background.start()
    assert os.getsid(process.pid) == process.pid
    process.kill()
    process.communicate()
