"""Kernels with a fault that only a sanitizer sees: its report names the fault and the line."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from places import ROOT
from probes import Kernel, probe_source
from sanitizing import sanitized

from tconv3d import emulator

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

# name: (body, what the report says; nothing if there must be none)
SANITIZED = {
    "good": ("__shared__ int s[32]; s[t] = args.a[t]; __syncthreads(); args.a[t] = s[31 - t];", ""),
    "good after a failure": (
        "__syncthreads(); if (t == 9 && args.a[40] == 0) { args.a[40] = 1; __trap(); } __syncthreads();",
        "",
    ),
    "read past a tensor": ("if (t == 31) args.a[0] = args.a[48];", "heap-buffer-overflow"),
    "write past a tensor": ("if (t == 31) args.a[48] = 1;", "heap-buffer-overflow"),
    "write before a tensor": ("__syncthreads(); if (t == 0) args.a[-1] = 1;", "heap-buffer-overflow"),
    "read past shared memory": ("args.a[t] = shared[t == 31 ? 100 : 99];", "heap-buffer-overflow"),
    "write past shared memory": ("__syncthreads(); shared[t == 31 ? 100 : t] = 1;", "heap-buffer-overflow"),
    "past a local array": ("int local[4] = {}; __syncthreads(); args.a[0] = local[args.a[0] + 4];", "out of bounds"),
    "past a local array, by a pointer": (
        "int local[4] = {}; int* volatile p = local; __syncthreads(); args.a[0] = p[4];",
        "stack-buffer-overflow",
    ),
    "signed overflow": ("args.a[t] = 0x7FFFFFFF; args.a[t] += t + 1;", "signed integer overflow"),
    "shift": ("args.a[t] = 1 << (t + 1);", "shift exponent 32"),
    "misaligned vector": ("args.a[0] = reinterpret_cast<int4*>(args.a + 1)->x;", "misaligned address"),
}
CHILD = """
import os, struct, sys, json, tempfile
from pathlib import Path
import torch
from tconv3d import emulator
from tconv3d.planning.launch import Launch
results = {}
for name, source in json.load(sys.stdin).items():
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as log:
        Path(directory, "probe.cuh").write_text(source)
        child = os.fork()
        if child == 0:
            os.dup2(log.fileno(), 2)
            constants = (("kThreads", 32), ("kMinBlocks", 1))
            launch = Launch("probe", constants, (1, 1, 1), 32, 100, ("a", "b", "c"), struct.pack("q", 0))
            run = emulator.prepare(launch, kernels=Path(directory))
            # A tensor of its own allocation, so that red zones are next to it.
            x = torch.zeros(48, dtype=torch.int32)
            for attempt in range(2):
                try:
                    run((x.data_ptr(), 0, 0))
                except RuntimeError as error:
                    assert "__trap" in str(error)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log.seek(0)
        results[name] = status, log.read().decode()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def reports() -> dict[str, tuple[int, str]]:
    environment = sanitized(debug=False)
    pointer = "unsigned char* shared = emulator::dynamic_shared(); (void)shared;\n"
    sources = json.dumps({name: probe_source(pointer + body) for name, (body, _) in SANITIZED.items()})
    command = [sys.executable, "-c", CHILD]
    child = subprocess.run(command, input=sources, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    results: dict[str, tuple[int, str]] = json.loads(child.stdout)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", SANITIZED)
def test_sanitizers(reports: dict[str, tuple[int, str]], name: str) -> None:
    status, report = reports[name]
    expected = SANITIZED[name][1]
    if not expected:
        assert (status, report) == (0, "")
    else:
        assert status != 0
        assert expected in report
        assert "probe.cuh" in report


ALONE = """
import sys
from pathlib import Path
from tconv3d import emulator
from tconv3d.planning.launch import Launch
constants = (("kThreads", 32), ("kMinBlocks", 1))
launch = Launch("probe", constants, (1, 1, 1), 32, 0, ("a", "b", "c"), bytes(8))
emulator.prepare(launch, kernels=Path(sys.argv[1]))((0, 0, 0))
"""


def test_undefined_behaviour_without_preloading(tmp_path: Path) -> None:
    """UndefinedBehaviorSanitizer alone needs no preloaded library."""
    (tmp_path / "probe.cuh").write_text(probe_source("int n = 0x7FFFFFFF - 31 + t; n += 1; if (n == 5) __trap();"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TCONV3D_EMULATOR_SANITIZE": "undefined"}
    command = [sys.executable, "-c", ALONE, str(tmp_path)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode != 0
    assert "signed integer overflow: 2147483647 + 1" in child.stderr


def test_address_sanitizer_must_be_preloaded(make: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(ctypes.CDLL(None), "__asan_init"):
        pytest.skip("it is")
    monkeypatch.setenv("TCONV3D_EMULATOR_SANITIZE", "address")
    with pytest.raises(RuntimeError, match=r"AddressSanitizer is not loaded: start Python with LD_PRELOAD="):
        make("")
