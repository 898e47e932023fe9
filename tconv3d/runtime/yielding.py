"""Work in a process that steps aside: free while its caller is quiet, in short slices while its caller is busy.

    yielding.run(source, share)      # in a new process; executes `source` and returns when that has ended

The lowest priority is not enough to go unnoticed. It decides who waits for a CPU, but a process on another CPU still
slows its caller down where both CPUs are threads of one core, or where a container counts the CPU time of all its
processes together; a virtual machine shows neither. So the work is done by a child process, and this one looks at how
much CPU time the caller takes: while that is more than `BUSY`, the child is stopped, except for slices of `SLICE_S`
that add up to `share` of the time.

The child ends with its caller, also where the caller is killed. This module imports nothing of the package, and
nothing that takes long, so that the child begins before there is anything to copy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

BUSY = 0.2  # CPU seconds that a caller takes in one second; from here on, it is busy
SLICE_S = 0.02  # seconds that the child works at a time beside a busy caller: about four steps of a small network
TICK_S = 0.05  # seconds between two looks at a quiet caller

_PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def run(source: str, share: float) -> None:
    """Executes a program's text in a child of the lowest priority, beside the process that started this one."""
    caller = os.getppid()
    os.nice(19)
    child = os.fork()
    if child == 0:
        _lowest_priority()
        _end_with_parent()
        exec(source, {"__name__": "__main__"})
    else:
        os.close(0)  # the child alone reads: when it has ended, the caller finds the pipe broken
        _oversee(child, caller, share)


def _lowest_priority() -> None:
    """Even below this process, which must be able to stop the child."""
    with contextlib.suppress(AttributeError, OSError):  # Linux alone has it; reading and writing files then wait too
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _end_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends: a process that is stopped cannot end by itself."""
    with contextlib.suppress(Exception):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _oversee(child: int, caller: int, share: float) -> None:
    """Returns when the child has ended, or when the caller has: then the child is killed."""
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
    """A function that tells whether a process has been busy since it was last asked. It is, if nobody knows."""
    before = time.monotonic(), cpu_seconds(process)

    def is_busy() -> bool:
        nonlocal before
        (then, used), now = before, (time.monotonic(), cpu_seconds(process))
        before = now
        return used is None or now[1] is None or now[1] - used >= BUSY * (now[0] - then)

    return is_busy


def cpu_seconds(process: int) -> float | None:
    """CPU time that all threads of a process have taken; None where the system does not say."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
