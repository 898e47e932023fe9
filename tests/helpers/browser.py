"""Drives a headless browser through its DevTools protocol over a pipe, without a driver, a network or a port.

Tests read the console messages and requests of a page, and its document at any width and in either colour scheme.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
TIMEOUT = 60.0


def find() -> str | None:
    """Returns the path of a browser, or None if none is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@dataclass
class Page:
    """Holds a page, with its console errors and its requests so far."""

    send: Any
    load: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def run(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def reload_without_scripts(self) -> None:
        self.send("Emulation.setScriptExecutionDisabled", value=True)
        self.load("Page.reload")

    def screenshot(self, path: Path) -> None:
        """Writes a picture of the whole page, beyond the window too."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


class _Pipe:
    """Reads and writes messages of the protocol, which are JSON ended by a zero byte."""

    def __init__(self, reader: int, writer: int) -> None:
        self.reader, self.writer = reader, writer
        self.rest = b""

    def write(self, message: dict[str, Any]) -> None:
        os.write(self.writer, json.dumps(message).encode() + b"\0")

    def read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.reader], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            part = os.read(self.reader, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


class _Session:
    """Sends commands to one page, and sorts answers from events."""

    def __init__(self, pipe: _Pipe) -> None:
        self.pipe = pipe
        self.session = ""
        self.count = 0
        self.events: list[dict[str, Any]] = []
        self.page = Page(self.send, self.load)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        self.pipe.write({**message, "sessionId": self.session} if self.session else message)
        deadline = time.monotonic() + TIMEOUT
        while True:
            answer = self.pipe.read(deadline)
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def load(self, method: str, **parameters: Any) -> None:
        """Sends a command that loads a page, and waits until the page is loaded."""
        self.events.clear()
        self.send(method, **parameters)
        deadline = time.monotonic() + TIMEOUT
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._hear(self.pipe.read(deadline))

    def _hear(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        parameters = event.get("params", {})
        match event["method"]:
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.page.complaints.append(json.dumps(parameters["args"]))
            case "Runtime.exceptionThrown":
                self.page.complaints.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.page.complaints.append(json.dumps(parameters["entry"]))
            case "Network.requestWillBeSent":
                self.page.requests.append(parameters["request"]["url"])


@contextlib.contextmanager
def opened(file: Path, profile: Path) -> Iterator[Page]:
    """Yields the loaded page of a file. `profile` is a new, empty directory."""
    program = find()
    assert program is not None
    with _running(program, profile) as pipe:
        session = _Session(pipe)
        target = session.send("Target.createTarget", url="about:blank")["targetId"]
        session.session = session.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            session.send(f"{domain}.enable")
        session.page.resize(1200, 900)
        session.load("Page.navigate", url=file.absolute().as_uri())
        yield session.page


@contextlib.contextmanager
def _running(program: str, profile: Path) -> Iterator[_Pipe]:
    """Starts the browser as a process that reads commands from its descriptor 3 and answers on 4."""
    their_reader, our_writer = os.pipe()
    our_reader, their_writer = os.pipe()
    # Both descriptors are first copied to numbers from 20 on, so that dup2 to 3 does not close the one meant for 4.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 20) for descriptor in (their_reader, their_writer)]

    def arrange() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    browser = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(3, 4),
        preexec_fn=arrange,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for descriptor in (their_reader, their_writer, *high):
        os.close(descriptor)
    try:
        yield _Pipe(our_reader, our_writer)
    finally:
        for descriptor in (our_reader, our_writer):
            os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(browser.pid, signal.SIGKILL)  # the browser's session holds its children only
        browser.wait()
