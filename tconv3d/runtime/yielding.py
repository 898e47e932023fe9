"""Runs work in a process that yields to its caller: freely while the caller is idle, in slices while it is busy.

    yielding.run(source, share)      # in a new process; executes `source` and returns when it has ended

The lowest priority alone does not keep the caller from slowing down. It decides which process waits for a CPU, but a
process on another CPU still slows the caller if both CPUs are threads of one core, or if a container limits the CPU
time of all its processes together; a virtual machine shows neither. Therefore a child process does the work, and its
parent watches how much CPU time the caller takes. While the caller takes `BUSY` or more, the child is stopped, except
for slices of `SLICE_S` that add up to the fraction `share` of the time.

The child ends with its caller, even if the caller is killed. This module imports nothing of the package and no slow
module, so that the child is forked before there is much memory to copy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

BUSY = 0.2  # CPU seconds per second from which on a caller counts as busy
SLICE_S = 0.02  # seconds that the child works at a time while the caller is busy
TICK_S = 0.05  # seconds between two checks of an idle caller

_PR_SET_PDEATHSIG = 1  # constant from Linux's <sys/prctl.h>


def run(source: str, share: float) -> None:
    """Executes Python source in a child of the lowest priority, and yields to the parent of this process."""
    caller = os.getppid()
    os.nice(19)
    child = os.fork()
    if child == 0:
        _lowest_priority()
        _end_with_parent()
        exec(source, {"__name__": "__main__"})
    else:
        os.close(0)  # only the child reads: the caller's pipe breaks when the child has ended
        _oversee(child, caller, share)


def _lowest_priority() -> None:
    """Gives the child a lower priority than this process, which must be able to stop the child."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has it; I/O gets the lowest priority too
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends, because a stopped process cannot end by itself."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _oversee(child: int, caller: int, share: float) -> None:
    """Returns when the child has ended; kills the child and returns when the caller has ended."""
    is_busy = _meter(caller)
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if os.getppid() != caller:
            os.kill(child, signal.SIGKILL)
            return
        if share < 1 and is_busy():
            os.kill(child, signal.SIGSTOP)
            time.sleep(SLICE_S * (1 / share - 1))
            os.kill(child, signal.SIGCONT)
            time.sleep(SLICE_S)
        else:
            time.sleep(TICK_S)


def _meter(process: int) -> Callable[[], bool]:
    """Returns a function that tells whether a process was busy since the last call; True if it is unknown."""
    before = time.monotonic(), cpu_seconds(process)

    def is_busy() -> bool:
        nonlocal before
        (then, used), now = before, (time.monotonic(), cpu_seconds(process))
        before = now
        return used is None or now[1] is None or now[1] - used >= BUSY * (now[0] - then)

    return is_busy


def cpu_seconds(process: int) -> float | None:
    """Returns the CPU seconds of all threads of a process, or None if the system does not tell."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
