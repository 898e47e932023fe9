"""The environment of processes that run emulated kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess

import pytest
from places import PYTHONPATH

from tconv3d import emulator


def sanitized(which: str = "address,undefined", debug: bool = True) -> dict[str, str]:
    """The environment of a child that runs under sanitizers. Skips the test where the compiler has none.

    `debug`: unoptimized, for kernels of the package: optimizing what sanitizers make of unrolled loops takes minutes.
    """
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [emulator._compiler(), f"-print-file-name={name}"]
        paths.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not all(map(os.path.isabs, paths)):
        pytest.skip("the compiler has no AddressSanitizer")
    return {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "LD_PRELOAD": " ".join(paths),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TCONV3D_EMULATOR_SANITIZE": which,
        "TCONV3D_EMULATOR_DEBUG": str(int(debug)),
    }
