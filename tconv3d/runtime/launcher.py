"""Cubin + addresses -> the caller's stream, through the CUDA driver.

    run = launcher.prepare(launch, device_index)     # compiles, loads: once per launch record
    run((x.data_ptr(), w.data_ptr()), stream)        # a few microseconds of host time; nothing is rebuilt

A launch never synchronizes and allocates nothing on the device, so it may be captured into a CUDA graph; any
thread may launch on any stream. Kernels are loaded without a context of their own (`CUkernel`): they run in the
context that is current, which is PyTorch's, and where the current device is another one the launch makes the
right one current and restores it afterwards.

Knows nothing of tensors or of PyTorch: addresses and stream handles are integers.
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
Pick: TypeAlias = Callable[[tuple[int, ...]], tuple[int, ...]]  # of all addresses those of one launch

_PORTABLE_CLUSTER = 8  # blocks; a kernel must be allowed larger clusters one by one
_CUDA_12_4 = 12040  # the first driver that can be asked for a kernel's parameters, and captures launches that overlap


class LaunchError(RuntimeError):
    """The CUDA driver refused something; the message names the call, the reason and the kernel."""


@dataclass(frozen=True)
class DeviceProperties:
    """What the choice of a kernel may depend on."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int  # that one block can have, if it asks


@dataclass
class _Kernel:
    """A kernel loaded on a device."""

    handle: Any  # a CUkernel, as the CUfunction that launches take
    device: Any  # CUdevice
    parameter_bytes: int | None  # the size of `Args`; None if the driver is too old to say
    shared_bytes: int = 0  # the dynamic shared memory it is allowed so far


class _Slot:
    """The memory one launch in flight needs. Two threads never use one slot at the same time."""

    __slots__ = ("arguments", "config", "parameters", "parameters_at", "stream")

    def __init__(self, launch: Launch, cluster: int, overlap: bool) -> None:
        data = bytes(8 * len(launch.pointers)) + launch.scalars
        # The driver copies sizeof(Args), which is rounded up to the alignment of its members.
        self.arguments = ctypes.create_string_buffer(data, -(-len(data) // 16) * 16 or 16)
        self.parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self.parameters_at = ctypes.addressof(self.parameters)
        self.config = _config(launch, cluster, overlap)
        self.stream = 0


def prepare(launch: Launch, device_index: int) -> Run:
    """Compiles and loads the launch's kernel; returns what launches it: `run(addresses, stream handle)`.

    `addresses` are those of `launch.pointers`, in order. Nothing is launched for an empty grid.
    """
    return _sequence([(launch, tuple)], device_index)


def prepare_all(steps: Sequence[tuple[Launch, Sequence[int]]], device_index: int) -> Run:
    """Several launches, one after another: `run(addresses, stream handle)`.

    `addresses` are those of all operands; a step is a launch and which operands its pointers are. A launch that
    overlaps the one before it begins early, if the device can: the first one never does, for nobody knows what it
    follows.
    """
    return _sequence([(launch, _picker(indices)) for launch, indices in steps], device_index)


def _picker(indices: Sequence[int]) -> Pick:
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda operands: tuple([operands[i] for i in indices])


def preload() -> None:
    """Imports what a first launch needs and takes longest, if it is there. Starts nothing."""
    with contextlib.suppress(ImportError, LaunchError):
        _driver()


@functools.cache
def device_properties(device_index: int) -> DeviceProperties:
    """The properties of a device, by the index PyTorch and the driver have for it."""
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
    """The function that a repeated call runs. Which device is current is asked once."""
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
    """What makes one launch on the current device: everything it needs is a local of this function."""
    overlap = follows and launch.overlaps and _overlapping(device_index)
    cluster = _cluster_size(launch)
    kernel = _kernel(device_index, launch.kernel, launch.constants)
    _check_arguments(launch, kernel)
    _allow(launch, kernel, cluster)
    driver = _driver()
    launch_kernel, new_stream, handle = driver.cuLaunchKernelEx, driver.CUstream, kernel.handle
    write = struct.Struct(f"{len(launch.pointers)}Q").pack_into
    slots: list[_Slot] = []

    def start(addresses: tuple[int, ...], stream: int) -> None:
        try:
            slot = slots.pop()  # popping and appending are atomic: no lock
        except IndexError:
            slot = _Slot(launch, cluster, overlap)
        write(slot.arguments, 0, *pick(addresses))
        if slot.stream != stream:
            slot.config.hStream = new_stream(stream)
            slot.stream = stream
        (status,) = launch_kernel(slot.config, handle, slot.parameters_at, 0)
        if status:
            raise _error("cuLaunchKernelEx", status, _describe(launch))
        slots.append(slot)  # the driver has copied the arguments

    return start


def _config(launch: Launch, cluster: int, overlap: bool) -> Any:
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = launch.shared_bytes
    config.hStream = driver.CUstream(0)
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster, 1, 1
        attributes.append(attribute)
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if attributes:
        config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


@functools.cache
def _overlapping(device_index: int) -> bool:
    """Whether launches can overlap: from compute capability 9.0 on, and in graphs too from CUDA 12.4 on."""
    version = _check(_driver().cuDriverGetVersion(), "cuDriverGetVersion")
    return device_properties(device_index).capability >= (9, 0) and version >= _CUDA_12_4


def _cluster_size(launch: Launch) -> int:
    """The blocks of a cluster, which lie along the grid's first axis."""
    cluster = dict(launch.constants).get("kClusterSize", 1)
    if not isinstance(cluster, int) or cluster < 1 or launch.grid[0] % cluster != 0:
        raise LaunchError(f"a grid of whole clusters of {cluster} blocks expected, got {_describe(launch)}")
    return cluster


def _check_arguments(launch: Launch, kernel: _Kernel) -> None:
    """What is packed must be what the kernel reads: anything else would read memory beyond the buffer."""
    packed = 8 * len(launch.pointers) + len(launch.scalars)
    expected = kernel.parameter_bytes
    if expected is not None and not expected - 16 < packed <= expected:  # Args may end in padding
        raise LaunchError(f"Args of {expected} bytes expected, got {packed} for {_describe(launch)}")


_lock = threading.Lock()
_kernels: dict[tuple[int, str, Constants], _Kernel] = {}


def _kernel(device_index: int, name: str, constants: Constants) -> _Kernel:
    """The kernel on a device: compiled and loaded at the first call."""
    key = (device_index, name, constants)
    if (kernel := _kernels.get(key)) is not None:
        return kernel
    arch = compiler.architecture(device_properties(device_index).capability)
    cubin = compiler.compile(name, constants, arch).cubin  # outside the lock: others may compile meanwhile
    with _lock:
        if key not in _kernels:
            _kernels[key] = _load(device_index, cubin, compiler.describe(name, constants))
        return _kernels[key]


def _load(device_index: int, cubin: bytes, what: str) -> _Kernel:
    """Puts a cubin on a device. Loads it whole: a launch under graph capture is no time for loading."""
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


def _allow(launch: Launch, kernel: _Kernel, cluster: int) -> None:
    """Raises the kernel's limits to what the launch needs: shared memory beyond 48 KB, large clusters."""
    driver = _driver()
    attributes = driver.CUfunction_attribute
    wanted = []
    if launch.shared_bytes > kernel.shared_bytes:
        wanted.append((attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared_bytes))
    if cluster > _PORTABLE_CLUSTER:
        wanted.append((attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
    with _lock:
        for attribute, value in wanted:
            handle = driver.CUkernel(int(kernel.handle))
            result = driver.cuKernelSetAttribute(attribute, value, handle, kernel.device)
            _check(result, "cuKernelSetAttribute", _describe(launch))
        kernel.shared_bytes = max(kernel.shared_bytes, launch.shared_bytes)


@functools.cache
def _device(index: int) -> tuple[Any, Any]:
    """A device and its primary context, the one PyTorch works in. It is retained for good."""
    driver = _driver()
    _check(driver.cuInit(0), "cuInit")
    device = _check(driver.cuDeviceGet(index), "cuDeviceGet", f"device {index}")
    return device, _check(driver.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain", f"device {index}")


@contextlib.contextmanager
def _current(context: Any) -> Iterator[None]:
    """Makes a context current for this thread, and restores the one before."""
    driver = _driver()
    _check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        _check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


@contextlib.contextmanager
def _capture_allowed() -> Iterator[None]:
    """Lets this thread load a kernel while it captures a graph: loading does not belong to any stream."""
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
    """The Python binding of the CUDA driver, imported when first needed."""
    try:
        from cuda.bindings import driver

        driver.cuDriverGetVersion()
    except ImportError as error:
        raise compiler.missing(error) from error
    except RuntimeError as error:
        raise LaunchError(f"tconv3d: the NVIDIA driver cannot be loaded: {error}") from error
    return driver


def _check(result: tuple[Any, ...], call: str, what: str = "") -> Any:
    """What a driver call returned, or its error."""
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
    return (
        f"compiled by {compiler.version()} for a driver of CUDA {version // 1000}.{version % 1000 // 10} "
        "(if that is the older one: update the driver, or install the extra of its CUDA major version)"
    )
