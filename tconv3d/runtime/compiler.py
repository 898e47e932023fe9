"""Compiles a kernel with its constants to a cubin, with NVRTC through cuda-core.

Neither a GPU, nor a CUDA toolkit, nor a host compiler is needed.

A translation unit is the arguments of one kernel as its planner declared them (`planning.arguments`), the kernel's
header (`sources.KERNELS`), the constants as `struct Config`, and one `__global__` function, `ENTRY`. What was
compiled is kept in the disk cache together with the compiler's log, so that the report of registers and spills is
there for a cached cubin too. cuda is imported when first needed: the package imports without it.

This module knows nothing of tensors, devices or streams, nor of what the constants mean.
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
from . import cache, packs, sources

ENTRY = "tconv3d_kernel"
MOST_LISTED = 20  # contents of a pack that an error message lists

# "-v" makes ptxas report registers and spills. Fast math is off: division, denormals and rounding follow IEEE 754.
# `device_as_default_execution_space` makes lambdas in device functions device functions without an annotation.
_OPTIONS: dict[str, object] = {"std": "c++20", "ptxas_options": "-v", "device_as_default_execution_space": True}
# If the environment variable TCONV3D_CHECKED is set, kernels check their assumptions (TCONV3D_ASSUME in common.cuh)
# and contain line information for tools. The options are part of the cache key, so both variants can be cached.
_CHECKED: dict[str, object] = {"define_macro": "TCONV3D_CHECKED", "lineinfo": True}

_WHEELS = {"12": "nvidia-cuda-nvrtc-cu12", "13": "nvidia-cuda-nvrtc"}  # the key is the major version of cuda-bindings

_importing = threading.Lock()  # cuda.core is not ready for a second thread while the first imports it


class MissingCompilerError(ImportError):
    """Says that cuda-core or NVRTC is not installed."""


class CompileError(RuntimeError):
    """Says that NVRTC rejected a kernel, which is a bug of the kernel or the planner, never a user's mistake."""


@dataclass(frozen=True)
class Report:
    """Holds what ptxas reports about a kernel; all fields are -1 if the log has no report."""

    registers: int  # registers per thread
    spill_loads: int  # bytes per thread
    spill_stores: int  # bytes per thread
    shared_bytes: int  # static shared memory per block, in bytes
    stack_bytes: int  # stack per thread, in bytes


@dataclass(frozen=True)
class Compiled:
    """Holds a kernel compiled for one architecture."""

    cubin: bytes
    log: str  # the compiler's messages, warnings included

    @property
    def report(self) -> Report:
        return report(self.log)

    @property
    def serialized(self) -> str:
        """The compiler's warning that it serialized matrix instructions (wgmma), or "" if it did not.

        Results of a serialized kernel are correct but take up to twice as long.
        """
        return next((line for line in self.log.splitlines() if "wgmma" in line and "serialized" in line), "")


def architecture(capability: tuple[int, int]) -> str:
    """Returns NVRTC's name for a compute capability.

    From 9.0 to 11.x some tensor-core instructions exist only in the architecture-specific ("a") target.
    """
    major, minor = capability
    if major < 8:
        raise ValueError(f"compute capability 8.0 or higher expected, got {major}.{minor}")
    return f"sm_{major}{minor}{'a' if 9 <= major <= 11 else ''}"


def translation_unit(kernel: str, constants: Constants) -> str:
    """Returns the source of one kernel with its constants as `Config`."""
    definitions = [_define(name, value) for name, value in constants]
    taken = arguments.declared(kernel, constants)
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
    """Returns a compiled kernel from a loaded pack, from the disk cache or from NVRTC."""
    log, cubin = _unpack(entry(kernel, constants, arch))
    return Compiled(cubin, log)


def entry(kernel: str, constants: Constants, arch: str) -> bytes:
    """Returns a compiled kernel and its log as the payload of an entry, for the cache and for packs."""
    if packs.loaded() and (packed := packs.find(packed_name(kernel, constants, arch))) is not None:
        return packed
    unit = translation_unit(kernel, constants)
    try:
        key = cache.key(sources.digest(sources.headers(kernel)), unit, arch, repr(options()), identity())
        return cache.get(key, ".cubin", lambda: _build(kernel, constants, unit, arch))
    except MissingCompilerError as error:
        raise _not_packed(error, describe(kernel, constants), arch) from error


def packed_name(kernel: str, constants: Constants, arch: str) -> str:
    """Returns the name of a kernel in a pack. No compiler is needed to know it, so it is not the cache's name."""
    unit = translation_unit(kernel, constants)
    parts = ("packed", sources.digest(sources.headers(kernel)), unit, arch, repr(options()))
    return cache.key(*parts) + ".cubin"


def _not_packed(error: MissingCompilerError, what: str, arch: str) -> MissingCompilerError:
    """Returns the error with what the loaded packs hold, if there are packs."""
    found = packs.loaded()
    if not found:
        return error
    listed = [f"{pack.path}:\n{pack.described(MOST_LISTED)}" for pack in found]
    return MissingCompilerError(
        f"{error}\nThe loaded packs do not hold this kernel for {arch}. They hold kernels for these layers and "
        "volumes; write a pack with tconv3d.precompile that names this one too:\n" + "\n".join(listed) + f"\nThe "
        f"kernel is {what}"
    )


def options() -> dict[str, object]:
    """Returns the options for NVRTC without the architecture."""
    return {**_OPTIONS, **(_CHECKED if os.environ.get("TCONV3D_CHECKED", "0") not in ("", "0") else {})}


@functools.cache
def identity() -> str:
    """Returns the compiler's version for cache keys, taken from its wheel, or from NVRTC itself if there is no wheel.

    The wheel is asked first, because loading NVRTC takes longer than everything else that a cached kernel needs.
    """
    try:
        major = metadata.version("cuda-bindings").split(".")[0]
        return f"NVRTC {metadata.version(_WHEELS[major])}"
    except (metadata.PackageNotFoundError, KeyError):
        return version()


@functools.cache
def version() -> str:
    """Returns the compiler's name and version."""
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
    return Report(  # sums and maxima, because every function that was not inlined has its own lines
        registers=max(registers),
        spill_loads=sum(numbers(r"(\d+) bytes spill loads")),
        spill_stores=sum(numbers(r"(\d+) bytes spill stores")),
        shared_bytes=max(numbers(r"(\d+) bytes smem"), default=0),
        stack_bytes=max(numbers(r"(\d+) bytes (?:stack frame|cumulative stack size)"), default=0),
    )


def describe(kernel: str, constants: Constants) -> str:
    """Describes a kernel and its constants in one line, for error messages."""
    return f"{kernel}({', '.join(f'{name}={value}' for name, value in constants)})"


def missing(error: Exception) -> MissingCompilerError:
    """Returns the error to raise if cuda-core, its bindings or NVRTC cannot be imported."""
    return MissingCompilerError(
        "tconv3d compiles its CUDA kernels with cuda-core and NVRTC, which are not installed: "
        "`pip install tconv3d[cu13]` (or `tconv3d[cu12]` for a driver of CUDA 12). "
        f"The import said: {error}"
    )


def _define(name: str, value: Constant) -> tuple[str, str]:
    """Returns the text before `Config` (empty unless the constant is a table) and the member of `Config`."""
    if isinstance(value, bool):  # tested before int, because bool is a subclass of int
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
    """Defines a table as an array in constant memory that can also be read at compile time."""
    integer = _integer(numbers)
    extent = "".join(f"[{max(size, 1)}]" for size in shape)  # an empty table becomes an array of one element
    return (
        f"__constant__ constexpr {integer} table_{name}{extent} = {text};",
        f"static __device__ constexpr {integer} {name}({index}) {{ return table_{name}{access}; }}",
    )


def _braces(items: Iterable[str]) -> str:
    return "{" + ", ".join(items) + "}"


def _integer(values: list[int]) -> str:
    return "int" if all(-(2**31) < value < 2**31 for value in values) else "long long"


def _build(kernel: str, constants: Constants, unit: str, arch: str) -> bytes:
    """Runs NVRTC and returns the payload of a cache entry."""
    version()  # raises if NVRTC is missing
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
