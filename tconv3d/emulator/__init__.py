"""Runs the project's CUDA kernels on the CPU, from their own source, for tests and for debuggers.

    run = emulator.prepare(launch)      # compiles, or finds the library in the disk cache
    run((x.data_ptr(), w.data_ptr()))   # addresses of launch.pointers
    start = emulator.prepare_all([(launch, (0, 1)), ...])   # all launches of a call, some of which overlap

The host's C++ compiler builds the same translation unit that NVRTC gets, with `include/cuda_emulator.h`
included before it; the header explains how a launch runs. A deadlock, a diverged barrier, a memory fault, an access
that a GPU refuses (a misaligned vector, shared memory past its end) and whatever `emulator::fail` says become a
RuntimeError.

Environment:
    CXX                         the compiler (default: the first found of g++, c++ and clang++)
    TCONV3D_EMULATOR_ORDER      the order in which threads and blocks take turns: `forward`, `reversed`, or
                                `shuffled:<seed>`. A kernel whose result depends on the order has a race
    TCONV3D_EMULATOR_SANITIZE   `address,undefined`, or one of them. A finding ends the process with a report.
                                AddressSanitizer must be loaded when Python starts, so that tensors, too, have
                                red zones around them:
        LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \\
        ASAN_OPTIONS=detect_leaks=0 python ...
    TCONV3D_EMULATOR_RACES      1: fail at accesses to shared memory that no barrier orders, and at stores that tensor
                                cores or the copy engine read without a fence.proxy.async; races.h explains how
    TCONV3D_EMULATOR_DEBUG      1: no optimization and debug information, to step through a kernel:
        gdb --args python ..., then `break direct.cuh:40`

The emulator knows nothing of tensors, of geometry, or of which kernel is for what.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..planning.launch import Constants, Launch
from ..runtime import cache, compiler, packs, sources

_HERE = Path(__file__).parent
_INCLUDE = _HERE / "include"
_HEADER = _INCLUDE / "cuda_emulator.h"
_RUNTIME = _HERE / "runtime.cpp"

# Symbols are hidden because a template's static shared memory must not become one object of all libraries in the
# process. Strict aliasing is off because kernels read vectors out of arrays of scalars. Contraction to fused
# multiply-adds is off so that every CPU gives the same result.
_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-ftemplate-depth=200",  # NVRTC's limit
)
# A GPU faults where the address of a vector is no multiple of its size, and CPUs do not. The compiler therefore puts
# a check before every access whose type has an alignment above one byte, and before every index into an array of
# known length (static shared memory). compiler_checks.h has the handlers.
_CHECKS = ("-fsanitize=alignment,bounds", "-fno-sanitize-recover=alignment,bounds")
_ORDERS = {"forward": 0, "reversed": 1, "shuffled": 2}
_ERROR_BYTES = 16384
_Previous = ctypes.CFUNCTYPE(ctypes.c_int)  # runs the previous launch, and returns 0 if that succeeds
Run = Callable[..., None]

# This description of the kernel for the runtime follows the translation unit that NVRTC compiles.
_EPILOGUE = """
emulator::Kernel emulated_kernel = {{
    "{kernel}",
    [](const void* args) {{ {entry}(*static_cast<const tconv3d::Args*>(args)); }},
    sizeof(tconv3d::Args), alignof(tconv3d::Args), Config::kThreads}};
"""


def available() -> bool:
    """Returns whether this machine has a C++ compiler, which kernels that are in no loaded pack need."""
    return _find_compiler() is not None


def prepare(launch: Launch, order: str | None = None, kernels: Path | None = None) -> Run:
    """Compiles the kernel of a launch, and returns a function that runs it on the addresses of `launch.pointers`.

    `order` replaces TCONV3D_EMULATOR_ORDER; `kernels`, one directory with all headers, replaces `sources.KERNELS`.
    The function's second argument, if there is one, runs the launch in front of this one; it is called when a block
    can do nothing more without that launch.
    """
    library = _load(launch.kernel, launch.constants, kernels)
    grid = (ctypes.c_uint * 3)(*launch.grid)
    pack = struct.Struct(f"={len(launch.pointers)}Q").pack

    def run(addresses: tuple[int, ...], previous: Callable[[], None] | None = None) -> None:
        failures: list[BaseException] = []

        def run_previous() -> int:
            try:
                assert previous is not None
                previous()
            except BaseException as failure:  # no exception passes through the emulator's own stack
                failures.append(failure)
            return len(failures)

        args = pack(*addresses) + launch.scalars
        number, seed = _parse_order(order or os.environ.get("TCONV3D_EMULATOR_ORDER", "forward"))
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        with _borrowed_stacks() as stacks:
            failed = library.emulator_launch(
                *(args, len(args), grid, launch.threads, launch.shared_bytes, number, seed),
                *(_Previous(run_previous) if previous else _Previous(), ctypes.byref(stacks), error, _ERROR_BYTES),
            )
        if failures:
            raise failures[0]
        if failed:
            raise RuntimeError(_with_lines(error.value.decode(errors="replace"), library._name))

    return run


_overlapping = (
    threading.Lock()
)  # a launch that another one overlaps runs within it, so that both libraries are locked


def prepare_all(
    steps: Sequence[tuple[Launch, tuple[int, ...]]], order: str | None = None
) -> Callable[[tuple[int, ...]], None]:
    """Returns a function that runs the launches of a call, each with the indices of its addresses among all operands.

    A launch that overlaps the previous one begins before it, so that a kernel which does not wait where it must finds
    results missing, or spoils what the previous launch still reads. A library runs only one launch at a time.
    """
    runs = [(prepare(launch, order) if order else prepare(launch), indices) for launch, indices in steps]
    kernels = [(launch.kernel, launch.constants) for launch, _ in steps]
    early = [i > 0 and launch.overlaps and kernels[i] not in kernels[:i] for i, (launch, _) in enumerate(steps)]

    def run_until(end: int, operands: tuple[int, ...]) -> None:
        if end == 0:
            return
        (run, indices), previous = runs[end - 1], functools.partial(run_until, end - 1, operands)
        addresses = tuple([operands[i] for i in indices])
        if early[end - 1]:
            run(addresses, previous)
        else:
            previous()
            run(addresses)

    def start(operands: tuple[int, ...]) -> None:
        with _overlapping if any(early) else contextlib.nullcontext():
            run_until(len(runs), operands)

    return start


def _with_lines(message: str, library: str) -> str:
    """Returns a message in which places of the library's code, written as <offset>, are lines of kernels."""
    addr2line = shutil.which("addr2line")
    if addr2line is None:
        return message

    def line(place: re.Match[str]) -> str:
        # The address is where a call returns to; the byte before it belongs to the call.
        found = _run(addr2line, "-i", "-e", library, hex(int(place[1], 16) - 1)).splitlines()
        names = [Path(text.partition(" ")[0]).name for text in found if "?" not in text]
        kernels = [name for name in names if ".cuh:" in name]
        return " in ".join((kernels or names)[:3]) or place[0]

    return re.sub(r"<(0x[0-9a-f]+)>", line, message)


def packed(kernel: str, constants: Constants) -> tuple[str, bytes]:
    """Returns the name and the payload of a kernel for a pack: a shared library of this system."""
    key, build = _entry(kernel, _unit(kernel, constants), None)
    return packed_name(kernel, constants), cache.get(key, ".so", build)


def _unit(kernel: str, constants: Constants) -> str:
    return compiler.translation_unit(kernel, constants) + _EPILOGUE.format(kernel=kernel, entry=compiler.ENTRY)


def packed_name(kernel: str, constants: Constants) -> str:
    """Returns the name of a kernel in a pack. No compiler is needed to know it, so it is not the cache's name."""
    unit = _unit(kernel, constants)
    places = (*sources.KERNELS, _INCLUDE)
    parts = (
        sources.digest(_sources(kernel, places)),
        unit,
        *_sanitizers(),
        *_races(),
        _debug() * "debug",
        platform.machine(),
    )
    return cache.key("packed", *parts) + ".so"


_stacks: list[int | None] = []  # free lists of fiber stacks, reused because mapping new ones is slow


@contextlib.contextmanager
def _borrowed_stacks() -> Iterator[ctypes.c_void_p]:
    try:
        stacks = ctypes.c_void_p(_stacks.pop())
    except IndexError:  # running launches use all lists
        stacks = ctypes.c_void_p(None)
    yield stacks
    _stacks.append(stacks.value)


def _parse_order(order: str) -> tuple[int, int]:
    name, _, seed = order.partition(":")
    if name not in _ORDERS or not (seed or "0").isdecimal():
        raise ValueError(f"order of emulation: expected forward, reversed or shuffled:<seed>, got {order!r}")
    return _ORDERS[name], int(seed or "0")


def _load(kernel: str, constants: Constants, kernels: Path | None) -> ctypes.CDLL:
    name = packed_name(kernel, constants) if kernels is None and packs.loaded() else ""
    if name and (found := packs.find(name)) is not None:
        return _open(cache.temporary(*os.path.splitext(name), found))
    key, build = _entry(kernel, _unit(kernel, constants), kernels)
    return _open(cache.path(key, ".so", build))


def _entry(kernel: str, unit: str, kernels: Path | None) -> tuple[str, Callable[[], bytes]]:
    """Returns the key of a kernel's library in the disk cache, and the function that builds it."""
    cxx, flags = _compiler(), _flags()
    places = (*(sources.KERNELS if kernels is None else (kernels,)), _INCLUDE)
    key = cache.key(sources.digest(_sources(kernel, places)), unit, _version(cxx), cxx, *flags, *_CHECKS, *_races())
    return key, lambda: _build(kernel, unit, places, cxx, flags)


def _sources(kernel: str, places: tuple[Path, ...]) -> sources.Files:
    """Returns all files that a kernel's library is built from."""
    files = sources.headers(kernel, places) | sources.included(_HEADER.name, places)
    return files | sources.included(_RUNTIME.name, (_HERE, _INCLUDE))


@functools.cache
def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.emulator_launch.argtypes = [
        ctypes.c_char_p,
        ctypes.c_uint,
        ctypes.POINTER(ctypes.c_uint),
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_int,
        ctypes.c_ulonglong,
        _Previous,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_char_p,
        ctypes.c_size_t,
    ]
    return library


def _build(kernel: str, unit: str, places: tuple[Path, ...], cxx: str, flags: tuple[str, ...]) -> bytes:
    """Returns the bytes of a shared library with one kernel and the runtime."""
    with tempfile.TemporaryDirectory(prefix="tconv3d-emulator-") as name:
        directory = Path(name)
        source, compiled, runtime = (directory / name for name in (f"{kernel}.cpp", "kernel.o", "runtime.o"))
        library = directory / "kernel.so"
        source.write_text(unit)
        runtime.write_bytes(_runtime(cxx))
        includes: list[str | Path] = [*(f"-I{place}" for place in places), "-include", _HEADER]
        _run(cxx, *flags, *_races(), *_CHECKS, *includes, "-c", "-o", compiled, source)
        # The flags of the checks are left out here, because they would link a library with handlers of its own.
        _run(cxx, *flags, "-shared", "-o", library, compiled, runtime, "-lm")
        return library.read_bytes()


def _runtime(cxx: str) -> bytes:
    """Returns the object file of runtime.cpp, which is not sanitized but tells AddressSanitizer of its stacks."""
    defined = {"address": "-DEMULATOR_ASAN", "undefined": "-DEMULATOR_UBSAN"}
    flags = (*_FLAGS, "-O1", *(defined[name] for name in _sanitizers() if name in defined), *_races()[:1])
    files = sources.included(_HEADER.name, (_INCLUDE,)) | sources.included(_RUNTIME.name, (_HERE, _INCLUDE))
    key = cache.key(sources.digest(files), _version(cxx), cxx, *flags)

    def build() -> bytes:
        with tempfile.TemporaryDirectory(prefix="tconv3d-emulator-") as name:
            target = Path(name, "runtime.o")
            _run(cxx, *flags, "-include", _HEADER, "-c", "-o", target, _RUNTIME)
            return target.read_bytes()

    return cache.get(key, ".o", build)


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        line = shlex.join(str(part) for part in command)
        raise RuntimeError(f"the emulator's compiler failed:\n{line}\n{done.stderr}")
    return done.stdout


def _sanitizers() -> list[str]:
    return [name for name in os.environ.get("TCONV3D_EMULATOR_SANITIZE", "").split(",") if name]


def _debug() -> bool:
    return os.environ.get("TCONV3D_EMULATOR_DEBUG", "") not in ("", "0")


def _races() -> tuple[str, ...]:
    """Returns the flags of the race detector: the compiler reports every access to functions of races.h."""
    wanted = os.environ.get("TCONV3D_EMULATOR_RACES", "") not in ("", "0")
    return ("-DEMULATOR_RACES", "-fsanitize=thread", "-g1") if wanted else ()


def _flags() -> tuple[str, ...]:
    sanitizers = _sanitizers()
    # Compiling takes longer than running: -Og compiles in two thirds of the time of -O1, and kernels run as fast.
    flags = [*_FLAGS, *(("-O0", "-g3") if _debug() else ("-Og",))]
    if shutil.which("ld.gold"):  # links in 0.03 s instead of 0.08 s; a small kernel compiles in 0.2 s
        flags.append("-fuse-ld=gold")
    if sanitizers:
        flags += [f"-fsanitize={','.join(sanitizers)}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1"]
    if "address" in sanitizers and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise RuntimeError(
            "TCONV3D_EMULATOR_SANITIZE has 'address', but AddressSanitizer is not loaded: start Python "
            'with LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" '
            "ASAN_OPTIONS=detect_leaks=0"
        )
    return tuple(flags)


def _find_compiler() -> str | None:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def _compiler() -> str:
    if (path := _find_compiler()) is None:
        raise RuntimeError(
            "the emulator needs a C++ compiler and found none: install g++, or name one in the variable CXX"
            + "".join(f"; the kernel is not in the pack {pack.summary}" for pack in packs.loaded())
        )
    return path


@functools.cache
def _version(cxx: str) -> str:
    return _run(cxx, "--version")
