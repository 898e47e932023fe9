"""Runs cases in processes. A case that kills its process, or never ends, is a failure like a wrong result.

A worker reads lines `[case, case, ...]` of JSON strings from its standard input and forks a child for each line, so
that no line depends on earlier ones. The child writes a line of JSON before a case starts, and one when the case is
done, and ends after a failure. The worker itself never uses a GPU, so that its forked children can.
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
from dataclasses import dataclass, field
from typing import Any, TextIO

from places import PYTHONPATH

from .case import Case, line, parse

TIMEOUT = 120.0  # seconds for one case, enough to compile a dozen kernels
REPORT_CHARACTERS = 2000  # length of the reported end of a dead process's error output


@dataclass
class Outcome:
    """Holds the outcome of the cases of one draw."""

    done: list[Case] = field(default_factory=list)
    failed: Case | None = None
    message: str = ""
    families: dict[str, int] = field(default_factory=dict)  # number of plans by kernel family, and by `PATHS`


class Worker:
    """Controls a process that is started when it is needed, and again after a case had to be stopped."""

    def __init__(self, device: str, environment: dict[str, str] | None = None, module: str = "fuzz.workers") -> None:
        self._command = [sys.executable, "-m", module, device]
        self._environment = {**os.environ, "TCONV3D_BACKGROUND": "0", "OMP_NUM_THREADS": "1", **(environment or {})}
        paths = PYTHONPATH, self._environment.get("PYTHONPATH", "")
        self._environment["PYTHONPATH"] = os.pathsep.join(paths)
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, cases: list[Case], timeout: float = TIMEOUT) -> Outcome:
        """Runs the cases one after another until one fails. `timeout` is in seconds for each case."""
        process, outcome = self._started(), Outcome(failed=cases[0])
        assert process.stdin is not None
        process.stdin.write(json.dumps([line(case) for case in cases]) + "\n")
        process.stdin.flush()
        while True:
            try:
                message: dict[str, Any] = json.loads(self._lines.get(timeout=timeout))
            except queue.Empty:
                outcome.message = f"no result after {timeout:.0f} s"
                self.stop()
                return outcome
            if "start" in message:
                outcome.failed = cases[message["start"]]
            elif "done" in message:
                outcome.done.append(cases[message["done"]])
                outcome.failed = None
            elif "families" in message:
                outcome.families, outcome.message = message["families"], message["failure"]
            else:
                outcome.message = outcome.message or message["death"]
                if self._process is not None and self._process.poll() is not None:
                    self.stop()
                return outcome

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._lines = queue.Queue()
            threading.Thread(target=_forward, args=(self._process, self._lines), daemon=True).start()
            self._lines.get()  # waits until PyTorch is imported, which time-outs do not count
        return self._process

    def stop(self) -> None:
        """Ends the process and all processes it has started, such as compilers."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def _forward(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        lines.put(text)
    lines.put(json.dumps({"death": "the worker ended"}))


# ---- the worker process


def main() -> None:
    import torch

    from . import run  # noqa: F401  (children find it imported)

    torch.set_num_threads(1)
    device, out = sys.argv[1], os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of other code goes to stderr, not between the messages
    out.write(json.dumps("ready") + "\n")
    for text in sys.stdin:
        with tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(errors.fileno(), 2)
                _run_all([parse(each) for each in json.loads(text)], device, out)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            errors.seek(0)
            report = errors.read()[-REPORT_CHARACTERS:]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        out.write(json.dumps({"death": f"the process ended with {how}: {report}" if code else ""}) + "\n")


def _run_all(cases: list[Case], device: str, out: TextIO) -> None:
    from preferred import counted

    from . import run
    from .families import paths_of

    failure = ""
    with counted(paths_of) as families:
        for number, case in enumerate(cases):
            out.write(json.dumps({"start": number}) + "\n")
            try:
                run.check(case, device)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
                break
            out.write(json.dumps({"done": number}) + "\n")
    out.write(json.dumps({"failure": failure, "families": families}) + "\n")


if __name__ == "__main__":
    main()
