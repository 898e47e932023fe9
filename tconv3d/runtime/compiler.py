"""Kernel + constants -> cubin, with NVRTC through cuda-core. Needs no GPU, no CUDA toolkit, no host compiler.

A translation unit is the arguments of one kernel as its planner declared them (`planning.arguments`), the kernel's
header (`sources.KERNELS`), the constants as `struct Config`, and one `__global__` function, `ENTRY`. What was
compiled is kept in the disk cache together with the compiler's log, so that the report of registers and spills is
there for a cached cubin too. cuda is imported when first needed: the package imports without it.

Knows nothing of tensors, devices or streams, nor of what the constants mean.
"""

from __future__ import annotations

import functools
import io
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from ..planning import arguments
from ..planning.launch import Constant, Constants
from . import cache, sources

ENTRY = "tconv3d_kernel"

# "-v" makes ptxas report registers and spills. No fast math: division, denormals and rounding are IEEE's.
# Lambdas of device functions are device functions without saying so.
_OPTIONS: dict[str, object] = {"std": "c++20", "ptxas_options": "-v", "device_as_default_execution_space": True}
# With the environment variable TCONV3D_CHECKED, kernels check what they assume (TCONV3D_ASSUME in common.cuh), and
# tools see the lines of their sources. Such kernels have names of their own in the disk cache.
_CHECKED: dict[str, object] = {"define_macro": "TCONV3D_CHECKED", "lineinfo": True}

_WHEELS = {"12": "nvidia-cuda-nvrtc-cu12", "13": "nvidia-cuda-nvrtc"}  # by the major version of cuda-bindings

_importing = threading.Lock()  # while one thread imports cuda.core for the first time, another finds half of it


class MissingCompilerError(ImportError):
    """cuda-core or NVRTC is not installed."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel: a fault of the kernel or of the planner, never of the user's arguments."""


@dataclass(frozen=True)
class Report:
    """What ptxas says of a kernel. -1 where this version's log does not say it."""

    registers: int
    spill_loads: int  # bytes
    spill_stores: int  # bytes
    shared_bytes: int  # static
    stack_bytes: int


@dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture."""

    cubin: bytes
    log: str  # the compiler's, warnings included

    @property
    def report(self) -> Report:
        return report(self.log)

    @property
    def serialized(self) -> str:
        """What the compiler says where it lets each matrix instruction (wgmma) wait for the one before; else nothing.
        Results are right, and take up to twice as long."""
        return next((line for line in self.log.splitlines() if "wgmma" in line and "serialized" in line), "")


def architecture(capability: tuple[int, int]) -> str:
    """The name NVRTC has for a compute capability.

    From 9.0 to 11.x the tensor cores' own instructions exist only in the architecture-specific ("a") target.
    """
    major, minor = capability
    if major < 8:
        raise ValueError(f"compute capability 8.0 or higher expected, got {major}.{minor}")
    return f"sm_{major}{minor}{'a' if 9 <= major <= 11 else ''}"


def translation_unit(kernel: str, constants: Constants) -> str:
    """The source of one kernel with its constants compiled in."""
    definitions = [_define(name, value) for name, value in constants]
    taken = arguments.declared(kernel)
    return "\n".join(
        [
            *([taken.definitions.rstrip()] if taken else []),
            f'#include "{kernel}.cuh"',
            *(before for before, _ in definitions if before),
            "struct Config {",
            *(f"  {member}" for _, member in definitions),
            "};",
            'extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)',
            f"{ENTRY}(const __grid_constant__ tconv3d::Args args) {{ tconv3d::run<Config>(args); }}",
            "",
        ]
    )


def compile(kernel: str, constants: Constants, arch: str) -> Compiled:
    """The cubin of a kernel, out of the disk cache or out of NVRTC."""
    unit = translation_unit(kernel, constants)
    key = cache.key(sources.digest(sources.headers(kernel)), unit, arch, repr(options()), identity())
    entry = cache.get(key, ".cubin", lambda: _build(kernel, constants, unit, arch))
    log, cubin = _unpack(entry)
    return Compiled(cubin, log)


def options() -> dict[str, object]:
    """NVRTC's, but for the architecture."""
    return {**_OPTIONS, **(_CHECKED if os.environ.get("TCONV3D_CHECKED", "0") not in ("", "0") else {})}


@functools.cache
def identity() -> str:
    """Which compiler it is, for the names of cached cubins: the version of its wheel, because loading it takes longer
    than all else that a cached kernel needs. Without a wheel its own word."""
    try:
        major = metadata.version("cuda-bindings").split(".")[0]
        return f"NVRTC {metadata.version(_WHEELS[major])}"
    except (metadata.PackageNotFoundError, KeyError):
        return version()


@functools.cache
def version() -> str:
    """The compiler's name and version."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # a missing package, or a missing libnvrtc
        raise missing(error) from error
    if int(status) != 0:
        raise MissingCompilerError(f"tconv3d: NVRTC is installed but does not start: {status}")
    return f"NVRTC {major}.{minor}"


def report(log: str) -> Report:
    """Reads the log of `ptxas -v`."""

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, log)]

    registers = numbers(r"Used (\d+) registers")
    if not registers:
        return Report(-1, -1, -1, -1, -1)
    return Report(  # sums and maxima, because a function that was not inlined has lines of its own
        registers=max(registers),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        shared_bytes=max(numbers(r"(\d+) bytes smem"), default=0),
        stack_bytes=max(numbers(r"(\d+) bytes (?:stack frame|cumulative stack size)"), default=0),
    )


def describe(kernel: str, constants: Constants) -> str:
    """A kernel and its constants in one line, for errors."""
    return f"{kernel}({', '.join(f'{name}={value}' for name, value in constants)})"


def missing(error: Exception) -> MissingCompilerError:
    """What to raise where cuda-core, its bindings or NVRTC cannot be imported."""
    return MissingCompilerError(
        "tconv3d compiles its CUDA kernels with cuda-core and NVRTC, which are not installed: "
        "`pip install tconv3d[cu13]` (or `tconv3d[cu12]` for a driver of CUDA 12). "
        f"The import said: {error}"
    )


def _define(name: str, value: Constant) -> tuple[str, str]:
    """One constant: what stands before `Config` (for a table; else nothing) and its member of `Config`."""
    if isinstance(value, bool):  # before int: a bool is one
        return "", f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return "", f"static constexpr {_integer([value])} {name} = {value};"
    if isinstance(value, str):
        return "", f"using {name} = {value};"
    rows = [row for row in value if isinstance(row, tuple)]
    if not rows:
        numbers = [number for number in value if isinstance(number, int)]
        return _table(name, numbers, (len(numbers),), _braces(map(str, numbers)), "int i", "[i]")
    if len(rows) != len(value) or len({len(row) for row in rows}) != 1:
        raise ValueError(f"the rows of a table have one length, got {name} = {value}")
    numbers = [number for row in rows for number in row]
    text = _braces(_braces(map(str, row)) for row in rows)
    return _table(name, numbers, (len(rows), len(rows[0])), text, "int i, int j", "[i][j]")


def _table(
    name: str, numbers: list[int], shape: tuple[int, ...], text: str, index: str, access: str
) -> tuple[str, str]:
    """An indexed constant: an array in constant memory that can also be read at compile time."""
    integer = _integer(numbers)
    extent = "".join(f"[{max(size, 1)}]" for size in shape)  # a table may be empty, an array may not
    return (
        f"__constant__ constexpr {integer} table_{name}{extent} = {text};",
        f"static __device__ constexpr {integer} {name}({index}) {{ return table_{name}{access}; }}",
    )


def _braces(items: Iterable[str]) -> str:
    return "{" + ", ".join(items) + "}"


def _integer(values: list[int]) -> str:
    return "int" if all(-(2**31) < value < 2**31 for value in values) else "long long"


def _build(kernel: str, constants: Constants, unit: str, arch: str) -> bytes:
    """Runs NVRTC; the payload of a cache entry."""
    version()  # raises if there is none
    try:
        with _importing:
            from cuda.core import Program, ProgramOptions
    except ImportError as error:
        raise missing(error) from error
    log = io.StringIO()
    try:
        places = [str(directory) for directory in sources.KERNELS]
        wanted = ProgramOptions(name=f"{kernel}.cu", arch=arch, include_path=places, **options())
        program = Program(unit, "c++", wanted)
        cubin = bytes(program.compile("cubin", logs=log).code)
        program.close()
    except Exception as error:  # cuda-core's error classes are not public; their text is NVRTC's log
        raise CompileError(
            f"{version()} cannot compile {describe(kernel, constants)} for {arch}:\n"
            f"{_clean(str(error))}\nThe translation unit:\n{unit}"
        ) from error
    return _pack(_clean(log.getvalue()), cubin)


def _clean(text: str) -> str:
    return text.replace("\0", "").strip()  # NVRTC's logs end in zero bytes


def _pack(log: str, cubin: bytes) -> bytes:
    text = log.encode()
    return len(text).to_bytes(4, "little") + text + cubin


def _unpack(entry: bytes) -> tuple[str, bytes]:
    end = 4 + int.from_bytes(entry[:4], "little")
    return entry[4:end].decode(), entry[end:]
