"""Compiles a launch's kernel for a GPU that need not be there, for tests of registers and spills."""

from __future__ import annotations

import pytest

from tconv3d.planning.launch import Launch
from tconv3d.runtime import compiler


def report_of(launch: Launch, arch: str = "sm_90a") -> compiler.Report:
    """Returns what the compiler reports, or skips the test if NVRTC is not installed."""
    try:
        compiler.version()
    except compiler.MissingCompilerError as error:
        pytest.skip(str(error))
    return compiler.compile(launch.kernel, launch.constants, arch).report
