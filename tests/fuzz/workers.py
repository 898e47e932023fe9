"""Processes that run cases. A case that ends its process, or never ends, is a finding like a wrong result.

A worker reads lines `[case, case, ...]` of JSON strings from its standard input and plans them as in a new process.
For every case it writes a line of JSON before the case starts, and one when it is done; it ends after a failure,
because a store out of bounds may have hit its own memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .case import Case, line, parse

TESTS = Path(__file__).parents[1]
MOST_BATCHES = 30  # of one process: every compiled kernel stays loaded
TIMEOUT = 120.0  # seconds for one case, in which it may compile a dozen kernels
REPORT_CHARACTERS = 2000  # of what a process that died wrote


@dataclass
class Outcome:
    """What became of the cases of one draw."""

    done: list[Case] = field(default_factory=list)
    failed: Case | None = None
    message: str = ""
    families: dict[str, int] = field(default_factory=dict)  # plans made by each kernel family


class Worker:
    """One process at a time, started when it is needed."""

    def __init__(self, device: str, environment: dict[str, str] | None = None) -> None:
        self._device = device
        self._environment = {**os.environ, "TCONV3D_BACKGROUND": "0", "OMP_NUM_THREADS": "1", **(environment or {})}
        self._environment["PYTHONPATH"] = os.pathsep.join((str(TESTS.parent), str(TESTS)))
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._left = 0

    def run(self, cases: list[Case], timeout: float = TIMEOUT) -> Outcome:
        """Every case in turn, until one fails. `timeout`: seconds for each."""
        process, outcome = self._started(), Outcome()
        self._left -= 1
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([line(case) for case in cases]) + "\n")
            process.stdin.flush()
        for message in self._messages(timeout, outcome):
            if "start" in message:
                outcome.failed = cases[message["start"]]
            elif "done" in message:
                outcome.done.append(cases[message["done"]])
                outcome.failed = None
            else:
                outcome.message, outcome.families = message.get("failure", ""), message["families"]
                break
        if outcome.message and outcome.failed is None:
            outcome.failed = cases[0]
        if outcome.failed is not None:
            self.stop()
        return outcome

    def _messages(self, timeout: float, outcome: Outcome) -> Iterator[dict[str, Any]]:
        while True:
            try:
                text = self._lines.get(timeout=timeout)
            except queue.Empty:
                outcome.message = f"no result after {timeout:.0f} s"
                return
            if text is None:
                outcome.message = self._death()
                return
            yield json.loads(text)

    def _death(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._errors.seek(0)
        return f"the process ended with {how}: {self._errors.read()[-REPORT_CHARACTERS:]}"

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._left <= 0:
            self.stop()
        if self._process is None:
            command = [sys.executable, "-m", "fuzz.workers", self._device]
            self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
            self._lines, self._left = queue.Queue(), MOST_BATCHES
            threading.Thread(target=_forward, args=(self._process, self._lines), daemon=True).start()
        return self._process

    def stop(self) -> None:
        """Ends the process and what it has started, compilers too."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._errors.close()
            self._process = None


def _forward(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        lines.put(text)
    lines.put(None)


# ---- the worker's side


def main() -> None:
    import torch

    from . import run
    from .families import counted

    torch.set_num_threads(1)
    device, out = sys.argv[1], os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what anybody prints is no message
    for text in sys.stdin:
        cases, answer = [parse(each) for each in json.loads(text)], {}
        run.forget()
        with counted() as families:
            for number, case in enumerate(cases):
                out.write(json.dumps({"start": number}) + "\n")
                try:
                    run.check(case, device)
                except Exception as error:
                    answer["failure"] = f"{type(error).__name__}: {error}"
                    break
                out.write(json.dumps({"done": number}) + "\n")
        out.write(json.dumps({**answer, "families": families}) + "\n")


if __name__ == "__main__":
    main()
