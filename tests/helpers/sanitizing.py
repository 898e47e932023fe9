"""Sets up processes that run emulated kernels under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess

import pytest
from places import PYTHONPATH

from tconv3d import emulator


def sanitized(which: str = "address,undefined", debug: bool = True) -> dict[str, str]:
    """Returns the environment of a child process under sanitizers, or skips the test if the compiler has none.

    `debug` compiles without optimization, because optimizing the package's instrumented kernels takes minutes.
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
