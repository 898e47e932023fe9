"""Launches a cubin on the caller's stream, through the CUDA driver.

    run = launcher.prepare(launch, device_index)     # compiles and loads the kernel, once per launch record
    run((x.data_ptr(), w.data_ptr()), stream)        # takes a few microseconds of host time

A launch never synchronizes and allocates nothing on the device, so it may be captured into a CUDA graph; any
thread may launch on any stream. Kernels are loaded without a context of their own (`CUkernel`) and run in the current
context, which is PyTorch's. If another device is current, the launch makes the right one current and restores the
other afterwards.

This module knows nothing of tensors or PyTorch: addresses and stream handles are integers.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..planning.launch import Constants, Launch
from . import compiler

Run: TypeAlias = Callable[[tuple[int, ...], int], None]
# A Pick selects the addresses of one launch from the addresses of all operands.
Pick: TypeAlias = Callable[[tuple[int, ...]], tuple[int, ...]]

_CUDA_12_4 = 12040  # the first driver with cuKernelGetParamInfo, and with graph capture of overlapping launches


class LaunchError(RuntimeError):
    """Says that a call of the CUDA driver failed, with the call, the reason and the kernel."""


@dataclass(frozen=True)
class DeviceProperties:
    """Holds the properties of a device that the choice of a kernel may depend on."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # maximum shared memory per block, with opt-in


@dataclass
class _Kernel:
    """Holds a kernel that is loaded on a device."""

    handle: Any  # the CUkernel, cast to the CUfunction that cuLaunchKernelEx takes
    device: Any  # CUdevice
    parameter_bytes: int | None  # the size of `Args`; None if the driver is too old to tell
    shared_bytes: int = 0  # dynamic shared memory per block that is allowed so far


class _Slot:
    """Holds the host memory of one launch call. Two threads never use one slot at the same time."""

    __slots__ = ("arguments", "config", "parameters", "parameters_at", "stream")

    def __init__(self, launch: Launch, overlap: bool) -> None:
        data = bytes(8 * len(launch.pointers)) + launch.scalars
        # The driver copies sizeof(Args) bytes, a multiple of the struct's alignment, which is at most 16 bytes.
        self.arguments = ctypes.create_string_buffer(data, -(-len(data) // 16) * 16 or 16)
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self.parameters_at = ctypes.addressof(self.parameters)
        self.config = _config(launch, overlap)
        self.stream = 0


def prepare(launch: Launch, device_index: int) -> Run:
    """Compiles and loads the kernel, and returns a function that launches it: `run(addresses, stream handle)`.

    `addresses` are the addresses of `launch.pointers`, in order. An empty grid launches nothing.
    """
    return _sequence([(launch, tuple)], device_index)


def prepare_all(steps: Sequence[tuple[Launch, Sequence[int]]], device_index: int) -> Run:
    """Prepares several launches and returns a function that runs them in order: `run(addresses, stream handle)`.

    `addresses` are the addresses of all operands; a step is a launch and the indices of its pointers among the
    operands. A launch with `overlaps` may begin before the previous one has ended, if the device supports it. The
    first launch never overlaps, because the preceding work on the stream is unknown.
    """
    return _sequence([(launch, _picker(indices)) for launch, indices in steps], device_index)


def _picker(indices: Sequence[int]) -> Pick:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda operands: tuple([operands[i] for i in indices])


def preload() -> None:
    """Imports the binding of the CUDA driver, the slowest part of a first launch, if it is installed."""
    with contextlib.suppress(ImportError, LaunchError):
        _driver()


@functools.cache
def device_properties(device_index: int) -> DeviceProperties:
    """Returns the properties of a device, given its index in PyTorch and the driver."""
    driver, (device, _) = _driver(), _device(device_index)
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        which = getattr(attributes, "CU_DEVICE_ATTRIBUTE_" + name)
        return int(_check(driver.cuDeviceGetAttribute(which, device), "cuDeviceGetAttribute"))

    name = _check(driver.cuDeviceGetName(256, device), "cuDeviceGetName")
    return DeviceProperties(
        name=name.split(b"\0")[0].decode(),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
    )


def _sequence(steps: Sequence[tuple[Launch, Pick]], device_index: int) -> Run:
    """Returns a function that runs all launches of a call, and asks once per call which device is current."""
    steps = [(launch, pick) for launch, pick in steps if 0 not in launch.grid]
    starts = [_starter(launch, pick, device_index, i > 0) for i, (launch, pick) in enumerate(steps)]
    if not starts:
        return lambda addresses, stream: None
    driver, (device, context) = _driver(), _device(device_index)
    current_device, wanted = driver.cuCtxGetDevice, int(device)

    def run(addresses: tuple[int, ...], stream: int) -> None:
        status, current = current_device()
        if not status and int(current) == wanted:
            for start in starts:
                start(addresses, stream)
        else:
            with _current(context):
                for start in starts:
                    start(addresses, stream)

    return run


def _starter(launch: Launch, pick: Pick, device_index: int, follows: bool) -> Run:
    """Returns a function that makes one launch on the current device, with all it needs in local variables."""
    overlap = follows and launch.overlaps and _overlapping(device_index)
    kernel = _kernel(device_index, launch.kernel, launch.constants)
    _check_arguments(launch, kernel)
    _allow(launch, kernel)
    driver = _driver()
    launch_kernel, new_stream, handle = driver.cuLaunchKernelEx, driver.CUstream, kernel.handle
    write = struct.Struct(f"{len(launch.pointers)}Q").pack_into
    slots: list[_Slot] = []

    def start(addresses: tuple[int, ...], stream: int) -> None:
        try:
            slot = slots.pop()  # needs no lock, because pop and append of a list are atomic
        except IndexError:
            slot = _Slot(launch, overlap)
        write(slot.arguments, 0, *pick(addresses))
        if slot.stream != stream:
            slot.config.hStream = new_stream(stream)
            slot.stream = stream
        (status,) = launch_kernel(slot.config, handle, slot.parameters_at, 0)
        if status:
            raise _error("cuLaunchKernelEx", status, _describe(launch))
        slots.append(slot)  # reusable, because the driver has copied the arguments

    return start


def _config(launch: Launch, overlap: bool) -> Any:
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = launch.shared_bytes
    config.hStream = driver.CUstream(0)
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
    config.numAttrs = int(overlap)
    return config


@functools.cache
def _overlapping(device_index: int) -> bool:
    """Tells whether launches can overlap: compute capability 9.0 and, for graph capture, CUDA 12.4 are needed."""
    version = _check(_driver().cuDriverGetVersion(), "cuDriverGetVersion")
    return device_properties(device_index).capability >= (9, 0) and version >= _CUDA_12_4


def _check_arguments(launch: Launch, kernel: _Kernel) -> None:
    """Raises unless the packed arguments have the size of `Args`: the driver would read beyond the buffer."""
    packed = 8 * len(launch.pointers) + len(launch.scalars)
    expected = kernel.parameter_bytes
    if expected is not None and not expected - 16 < packed <= expected:  # Args may end in up to 15 bytes of padding
        raise LaunchError(f"Args of {expected} bytes expected, got {packed} for {_describe(launch)}")


_lock = threading.Lock()
_kernels: dict[tuple[int, str, Constants], _Kernel] = {}


def _kernel(device_index: int, name: str, constants: Constants) -> _Kernel:
    """Returns a kernel on a device, compiled and loaded at the first call."""
    key = (device_index, name, constants)
    if (kernel := _kernels.get(key)) is not None:
        return kernel
    arch = compiler.architecture(device_properties(device_index).capability)
    cubin = compiler.compile(name, constants, arch).cubin  # outside the lock, so that other threads can compile
    with _lock:
        if key not in _kernels:
            _kernels[key] = _load(device_index, cubin, compiler.describe(name, constants))
        return _kernels[key]


def _load(device_index: int, cubin: bytes, what: str) -> _Kernel:
    """Loads a cubin on a device completely, because a launch under graph capture must not load code lazily."""
    driver, (device, context) = _driver(), _device(device_index)
    with _capture_allowed(), _current(context):
        result = driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0)
        if result[0]:
            raise _error("cuLibraryLoadData", result[0], f"{what}, {_versions()}")
        kernel = _check(driver.cuLibraryGetKernel(result[1], compiler.ENTRY.encode()), "cuLibraryGetKernel", what)
        function = _check(driver.cuKernelGetFunction(kernel), "cuKernelGetFunction", what)
        size = None
        if _check(driver.cuDriverGetVersion(), "cuDriverGetVersion") >= _CUDA_12_4:
            _check(driver.cuFuncLoad(function), "cuFuncLoad", what)
            _, size = _check(driver.cuKernelGetParamInfo(kernel, 0), "cuKernelGetParamInfo", what)
        return _Kernel(driver.CUfunction(int(kernel)), device, size)


def _allow(launch: Launch, kernel: _Kernel) -> None:
    """Raises the kernel's limit of dynamic shared memory to what the launch needs."""
    with _lock:
        if launch.shared_bytes <= kernel.shared_bytes:
            return
        driver = _driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        handle = driver.CUkernel(int(kernel.handle))
        result = driver.cuKernelSetAttribute(attribute, launch.shared_bytes, handle, kernel.device)
        _check(result, "cuKernelSetAttribute", _describe(launch))
        kernel.shared_bytes = launch.shared_bytes


@functools.cache
def _device(index: int) -> tuple[Any, Any]:
    """Returns a device and its primary context, which PyTorch uses too. The context is never released."""
    driver = _driver()
    _check(driver.cuInit(0), "cuInit")
    device = _check(driver.cuDeviceGet(index), "cuDeviceGet", f"device {index}")
    return device, _check(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain", f"device {index}")


@contextlib.contextmanager
def _current(context: Any) -> Iterator[None]:
    """Makes a context current for this thread, and restores the previous context afterwards."""
    driver = _driver()
    _check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        _check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


@contextlib.contextmanager
def _capture_allowed() -> Iterator[None]:
    """Lets this thread load a kernel during graph capture, since loading belongs to no stream."""
    driver = _driver()
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    exchange = driver.cuThreadExchangeStreamCaptureMode
    before = _check(exchange(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        _check(exchange(before), "cuThreadExchangeStreamCaptureMode")


@functools.cache
def _driver() -> Any:
    """Returns the Python binding of the CUDA driver, imported at first use."""
    try:
        from cuda.bindings import driver

        driver.cuDriverGetVersion()
    except ImportError as error:
        raise compiler.missing(error) from error
    except RuntimeError as error:
        raise LaunchError(f"tconv3d: the NVIDIA driver cannot be loaded: {error}") from error
    return driver


def _check(result: tuple[Any, ...], call: str, what: str = "") -> Any:
    """Returns the results of a driver call without its status, and raises if the call failed."""
    if result[0]:
        raise _error(call, result[0], what)
    return result[1] if len(result) == 2 else result[1:]


def _error(call: str, status: Any, what: str) -> LaunchError:
    driver = _driver()
    _, name = driver.cuGetErrorName(status)
    _, reason = driver.cuGetErrorString(status)
    text = f"{(name or b'unknown error').decode()} ({(reason or b'no description').decode()})"
    return LaunchError(f"tconv3d: {call} failed with {text}" + (f" for {what}" if what else ""))


def _describe(launch: Launch) -> str:
    return (
        f"{compiler.describe(launch.kernel, launch.constants)}, grid {launch.grid}, {launch.threads} threads, "
        f"{launch.shared_bytes} bytes of shared memory"
    )


def _versions() -> str:
    version = _check(_driver().cuDriverGetVersion(), "cuDriverGetVersion")
    try:
        compiled = f"compiled by {compiler.version()}"
    except compiler.MissingCompilerError:
        compiled = "from a pack"
    return (
        f"{compiled} for a driver of CUDA {version // 1000}.{version % 1000 // 10} "
        "(if that is the older one: update the driver, or install the extra of its CUDA major version)"
    )
