"""Runs functions in groups of processes that are connected by gloo, for tests of torch.distributed.

A group's processes stay until the group is closed and execute one job after another, because starting Python and
PyTorch takes seconds. The processes are forked from a server process that has imported PyTorch and tconv3d once. They
find each other by a file, so no port is fixed. A job is a function of an importable module (a file of tests/helpers,
say); it is called on every rank with equal arguments, and its results are returned by pickling.

    with process_group(4) as group:
        by_rank = group.run(some_helper.function, argument)
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

TIMEOUT = 120.0  # seconds for one job, and for one collective operation of gloo

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor", "tconv3d"])


@dataclass(frozen=True)
class Outcome:
    """Holds what became of a job on one rank: its result, or an error's class, message and traceback in words."""

    rank: int
    value: Any = None
    error: str | None = None  # the class's name and the message, or that the process ended, or that it took too long
    trace: str = ""
    seconds: float = 0.0


class JobError(AssertionError):
    """Names every rank on which a job failed, with its traceback."""

    def __init__(self, function: str, failed: list[Outcome]) -> None:
        parts = [f"rank {outcome.rank}: {outcome.error}\n{outcome.trace}" for outcome in failed]
        super().__init__(f"{function} failed on {len(failed)} rank(s)\n" + "\n".join(parts))
        self.failed = failed


class Group:
    """Owns the processes of a group. `run` executes a job on all of them."""

    def __init__(self, size: int, timeout: float, directory: Path) -> None:
        self.size = size
        self.timeout = timeout
        self._connections: list[connection.Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            arguments = (theirs, rank, size, timeout, str(directory / "store"))
            process = _context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> list[Any]:
        """Calls the function on every rank and returns the results by rank. Raises `JobError` if a rank fails."""
        outcomes = self.outcomes(function, *arguments, timeout=timeout)
        failed = [outcome for outcome in outcomes if outcome.error is not None]
        if failed:
            raise JobError(function.__qualname__, failed)
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> list[Outcome]:
        """Calls the function on every rank and returns what became of it on each, errors included."""
        job = pickle.dumps((function, arguments))
        began = time.monotonic()
        deadline = began + (self.timeout if timeout is None else timeout) + 10.0
        found: dict[int, Outcome] = {}
        for rank, pipe in enumerate(self._connections):
            try:
                pipe.send_bytes(job)
            except OSError:
                found[rank] = self._ended(rank, began)
        while len(found) < self.size:
            waiting = {self._connections[rank]: rank for rank in range(self.size) if rank not in found}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                took = time.monotonic() - began
                for rank in waiting.values():
                    found[rank] = Outcome(rank, None, f"no answer within {took:.0f} s", "", took)
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                found[rank] = self._answer(rank, began)
        return [found[rank] for rank in range(self.size)]

    def kill(self, rank: int) -> None:
        """Ends the process of a rank at once, as the kernel does when memory is short."""
        self.processes[rank].kill()
        self.processes[rank].join()

    def close(self) -> None:
        """Ends all processes."""
        for pipe in self._connections:
            pipe.close()  # a process whose pipe is closed ends by itself
        for process in self.processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _answer(self, rank: int, began: float) -> Outcome:
        try:
            value, error, trace = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            return self._ended(rank, began)
        return Outcome(rank, value, error, trace, time.monotonic() - began)

    def _ended(self, rank: int, began: float) -> Outcome:
        self.processes[rank].join(5.0)
        code = self.processes[rank].exitcode
        return Outcome(rank, None, f"the process ended with exit code {code}", "", time.monotonic() - began)


@contextlib.contextmanager
def process_group(size: int, timeout: float = TIMEOUT) -> Iterator[Group]:
    """Starts `size` processes with gloo as the default process group, and ends them behind the block."""
    with tempfile.TemporaryDirectory() as directory:
        group = Group(size, timeout, Path(directory))
        try:
            yield group
        finally:
            group.close()


def _work(pipe: Any, rank: int, size: int, timeout: float, store: str) -> None:
    """Joins the process group and executes jobs until the pipe is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all processes are on this machine
    os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"] = str(rank), str(size), str(rank)
    # Groups that a mesh makes later have this limit too.
    dist.distributed_c10d.default_pg_timeout = timedelta(seconds=timeout)
    options = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **options)
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            break
        pipe.send_bytes(_execute(job))
    os._exit(0)  # without waiting for other ranks, which may be gone


def _execute(job: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(job)
        return pickle.dumps((function(*arguments), None, ""))
    except BaseException as error:  # whatever it is, the parent has to hear of it
        return pickle.dumps((None, f"{type(error).__name__}: {error}", traceback.format_exc()))
