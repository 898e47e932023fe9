"""The launcher: what the CUDA driver is told. Without a GPU the real binding runs on `fake_driver.cpp`."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tconv3d.planning.launch import Constants, Launch
from tconv3d.runtime import compiler, launcher, sources

PACKAGE = Path(launcher.__file__).parents[1]
CONSTANTS: Constants = (("kThreads", 128), ("kMinBlocks", 1))

ADD = """
namespace tconv3d {
struct Args {
  float* x;
  const float* y;
  int n;
};
template <class Config>
__device__ void run(const Args& args) {
  const int i = blockIdx.x * Config::kThreads + threadIdx.x;
  if (i < args.n) args.x[i] += args.y[i];
}
}  // namespace tconv3d
"""

# Loads the launcher without the package's front door: that imports PyTorch, which takes seconds.
PREAMBLE = f"""
import os, sys, threading, types
package = types.ModuleType("tconv3d")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["tconv3d"] = package
from dataclasses import replace
from pathlib import Path
from tconv3d.runtime import compiler, launcher, sources
from tconv3d.planning.launch import Launch

sources.KERNELS = (Path(os.environ["KERNELS"]),)
LAUNCH = Launch("add", {CONSTANTS!r}, (7, 5, 3), 128, 0, ("x", "y"), b"\\x11\\x22\\x33\\x44")

def with_constants(**constants):
    return replace(LAUNCH, constants=LAUNCH.constants + tuple(constants.items()))

def raises(function, *arguments):
    try:
        function(*arguments)
    except launcher.LaunchError as error:
        return str(error)
    raise AssertionError("nothing was raised")

def raises_any(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")

def mark(text):
    with open(os.environ["FAKE_CUDA_LOG"], "a") as log:
        log.write(f"# {{text}}\\n")

driver = launcher._driver()
def set_current(device):
    driver.cuCtxPushCurrent(launcher._device(device)[1])
"""


class Fake:
    """Runs scripts on the fake driver."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "kernels").mkdir()
        (root / "kernels" / "add.cuh").write_text(ADD)
        source = Path(__file__).with_name("fake_driver.cpp")
        library = root / "libcuda.so.1"
        command = ["g++", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
        subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
        self.environment = os.environ | {
            "LD_LIBRARY_PATH": f"{root}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "TCONV3D_CACHE_DIR": str(root / "cache"),
            "KERNELS": str(root / "kernels"),
            "FAKE_CUDA_LOG": str(root / "log"),
        }

    def run(self, script: str, **environment: str) -> list[str]:
        """The calls a script makes, each a line: the call's name and what it got."""
        log = self.root / "log"
        log.write_text("")
        command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(script)]
        done = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return Fake(tmp_path_factory.mktemp("fake"))


def values(line: str) -> dict[str, str]:
    """What a call got, by name."""
    return dict(item.split("=") for item in line.split()[1:])


def named(lines: list[str], call: str) -> list[dict[str, str]]:
    return [values(line) for line in lines if line.split()[0] == call]


def after(lines: list[str], mark: str) -> list[str]:
    return lines[lines.index(f"# {mark}") + 1 :]


def packed(x: int, y: int) -> str:
    """The bytes of Args: two pointers, the scalar, and the padding at the end."""
    return (struct.pack("QQ", x, y) + b"\x11\x22\x33\x44" + bytes(4)).hex()


# What a launch is


def test_a_launch_reaches_the_driver_whole(fake: Fake) -> None:
    lines = fake.run("""
        set_current(0)
        launcher.prepare(replace(LAUNCH, shared_bytes=1000), 0)((0x7F0000001000, 2**63 + 1), 77)
    """)
    (launched,) = named(lines, "cuLaunchKernelEx")
    assert launched == {
        "kernel": "0",
        "device": "0",
        "grid": "7,5,3",
        "block": "128,1,1",
        "shared": "1000",
        "stream": "77",
        "attributes": "0",
        "overlap": "0",
        "args": packed(0x7F0000001000, 2**63 + 1),
        "torn": "0",
        "extra": "0",
    }
    assert named(lines, "cuLibraryGetKernel") == [{"name": compiler.ENTRY}]
    assert named(lines, "cuLibraryLoadData")[0]["elf"] == "1"


def test_a_repeated_launch_is_one_question_and_one_launch(fake: Fake) -> None:
    """So it does not synchronize, load or allocate, and may be captured."""
    lines = fake.run("""
        set_current(0)
        run = launcher.prepare(LAUNCH, 0)
        run((1, 2), 5)
        mark("again")
        run((3, 4), 5)
        run((5, 6), 0)
    """)
    again = after(lines, "again")
    assert [line.split()[0] for line in again] == ["cuCtxGetDevice", "cuLaunchKernelEx"] * 2
    assert [(call["args"], call["stream"]) for call in named(again, "cuLaunchKernelEx")] == [
        (packed(3, 4), "5"),
        (packed(5, 6), "0"),
    ]


def test_a_sequence_is_one_question_and_its_launches(fake: Fake) -> None:
    lines = fake.run("""
        set_current(1)
        other = with_constants(kOther=1)
        nothing = replace(LAUNCH, kernel="absent", grid=(0, 1, 1))
        run = launcher.prepare_all([(LAUNCH, (2, 0)), (nothing, (0, 0)), (other, (1, 1))], 1)
        mark("run")
        run((10, 11, 12), 5)
        assert "out of range" in str(raises_any(run, (10, 11), 5))
    """)
    ran = after(lines, "run")
    assert [line.split()[0] for line in ran[:3]] == ["cuCtxGetDevice", "cuLaunchKernelEx", "cuLaunchKernelEx"]
    found = [(call["kernel"], call["args"], call["stream"]) for call in named(ran, "cuLaunchKernelEx")]
    assert found == [("0", packed(12, 10), "5"), ("1", packed(11, 11), "5")]


def test_a_kernel_is_loaded_whole_and_once_for_each_device(fake: Fake) -> None:
    lines = fake.run("""
        for device in (0, 1, 0, 1):
            launcher.prepare(LAUNCH, device)
            launcher.prepare(replace(LAUNCH, grid=(1, 1, 1), scalars=bytes(4)), device)
        launcher.prepare(with_constants(kOther=1), 0)
    """)
    assert len(named(lines, "cuLibraryLoadData")) == 3
    assert [call["function"] for call in named(lines, "cuFuncLoad")] == ["0", "1", "2"]


def test_loading_under_capture_is_allowed_and_the_mode_restored(fake: Fake) -> None:
    lines = fake.run("launcher.prepare(LAUNCH, 0)")
    assert named(lines, "cuLibraryLoadData")[0]["mode"] == "2"  # relaxed
    assert [call["mode"] for call in named(lines, "cuThreadExchangeStreamCaptureMode")] == ["2", "0"]


def test_an_empty_grid_asks_nothing_of_the_driver(fake: Fake) -> None:
    lines = fake.run("""
        mark("empty")
        for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
            launcher.prepare(replace(LAUNCH, kernel="absent", grid=grid), 0)((1, 2), 0)
    """)
    assert after(lines, "empty") == []


def test_the_shared_memory_limit_is_raised_and_never_lowered(fake: Fake) -> None:
    lines = fake.run("""
        for size in (0, 100_000, 50_000, 100_000, 200_000):
            launcher.prepare(replace(LAUNCH, shared_bytes=size), 1)
    """)
    assert named(lines, "cuKernelSetAttribute") == [
        {"attribute": "8", "value": size, "kernel": "0", "device": "1"} for size in ("100000", "200000")
    ]


def test_launches_that_overlap(fake: Fake) -> None:
    script = """
        set_current(0)
        early = replace(LAUNCH, overlaps=True)
        run = launcher.prepare_all([(early, (0, 0)), (LAUNCH, (1, 1)), (early, (2, 2))], 0)
        run((1, 2, 3), 0)
        launcher.prepare(early, 0)((1, 2), 0)
    """
    launched = [(call["overlap"], call["attributes"]) for call in named(fake.run(script), "cuLaunchKernelEx")]
    # Not the first one of a sequence: it would overlap what somebody else launched.
    assert launched == [("0", "0"), ("0", "0"), ("1", "1"), ("0", "0")]
    before = named(fake.run(script, FAKE_CUDA_VERSION="12020"), "cuLaunchKernelEx")
    assert {call["overlap"] for call in before} == {"0"}


# Devices and threads


def test_another_current_device_is_restored(fake: Fake) -> None:
    lines = fake.run("""
        set_current(0)
        run = launcher.prepare(LAUNCH, 1)
        mark("launch")
        run((1, 2), 0)
        assert int(driver.cuCtxGetDevice()[1]) == 0
    """)
    launch = after(lines, "launch")
    assert named(launch, "cuLaunchKernelEx")[0]["device"] == "1"
    assert named(launch, "cuCtxPushCurrent") == [{"device": "1"}]
    assert len(named(launch, "cuCtxPopCurrent")) == 1


def test_a_thread_without_a_context(fake: Fake) -> None:
    lines = fake.run("""
        run = launcher.prepare(LAUNCH, 0)
        thread = threading.Thread(target=run, args=((1, 2), 0))
        thread.start()
        thread.join()
    """)
    assert [call["device"] for call in named(lines, "cuLaunchKernelEx")] == ["0"]


def test_threads_do_not_share_argument_buffers(fake: Fake) -> None:
    lines = fake.run("""
        run = launcher.prepare(LAUNCH, 0)
        def work(number):
            set_current(0)
            for i in range(100):
                run((number, 1000 * number + i), 100 + number)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        mark("alone")  # with the buffers that the threads left
        set_current(0)
        for stream in (5, 6, 7): run((1, 2), stream)
    """)
    alone = named(after(lines, "alone"), "cuLaunchKernelEx")
    assert [(call["stream"], call["args"]) for call in alone] == [(s, packed(1, 2)) for s in "567"]
    launched = named(lines, "cuLaunchKernelEx")[:-3]
    expected = {(str(100 + n), packed(n, 1000 * n + i)) for n in range(1, 9) for i in range(100)}
    assert len(launched) == len(expected)
    assert {(call["stream"], call["args"]) for call in launched} == expected
    assert {call["torn"] for call in launched} == {"0"}


def test_device_properties(fake: Fake) -> None:
    lines = fake.run("""
        expected = launcher.DeviceProperties("Fake GPU", (9, 0), 132, 232448)
        assert launcher.device_properties(0) == expected, launcher.device_properties(0)
        mark("again")
        launcher.device_properties(0)
    """)
    assert after(lines, "again") == []


# Errors


def test_every_refusal_of_the_driver_is_an_error_that_names_the_call(fake: Fake) -> None:
    fake.run("""
        first = launcher.prepare(LAUNCH, 0)  # the libraries of the binding are loaded without a failure
        for call in (
            "cuInit cuDeviceGet cuDeviceGetName cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuCtxPushCurrent "
            "cuCtxPopCurrent cuThreadExchangeStreamCaptureMode cuLibraryLoadData cuLibraryGetKernel "
            "cuKernelGetFunction cuFuncLoad cuKernelGetParamInfo cuKernelSetAttribute cuLaunchKernelEx"
        ).split():
            launcher._kernels.clear()
            launcher._device.cache_clear()
            launcher.device_properties.cache_clear()
            os.environ["FAKE_CUDA_FAIL"] = f"{call}:719"
            error = raises(lambda: launcher.prepare(replace(LAUNCH, shared_bytes=60_000), 0)((1, 2), 0))
            assert f"{call} failed with CUDA_ERROR_FAKE (made up, code 719)" in error, error
            if call.startswith(("cuLibrary", "cuKernel", "cuFunc", "cuLaunch")):
                assert "add(kThreads=128, kMinBlocks=1)" in error, error
        assert "grid (7, 5, 3), 128 threads, 60000 bytes of shared memory" in error, error
        del os.environ["FAKE_CUDA_FAIL"]
    """)


def test_a_launch_after_a_failed_one_works(fake: Fake) -> None:
    lines = fake.run("""
        run = launcher.prepare(LAUNCH, 0)
        os.environ["FAKE_CUDA_FAIL"] = "cuLaunchKernelEx:1"
        raises(run, (1, 2), 0)
        del os.environ["FAKE_CUDA_FAIL"]
        mark("again")
        run((3, 4), 0)
        assert driver.cuCtxGetDevice()[0] == 201  # no context was left behind
    """)
    assert named(after(lines, "again"), "cuLaunchKernelEx")[0]["args"] == packed(3, 4)


def test_a_driver_that_cannot_load_what_the_compiler_made(fake: Fake) -> None:
    fake.run(
        """
        error = raises(launcher.prepare, LAUNCH, 0)
        assert "cuLibraryLoadData" in error and compiler.version() in error, error
        assert "driver of CUDA 12.4" in error and "update the driver" in error, error
        """,
        FAKE_CUDA_FAIL="cuLibraryLoadData:222",
        FAKE_CUDA_VERSION="12040",
    )


# Kernels of packs


WITHOUT_NVRTC = """
sys.modules["cuda.bindings.nvrtc"] = sys.modules["cuda.core"] = None
compiler.metadata = types.SimpleNamespace(version=lambda name: {}[name], PackageNotFoundError=KeyError)
"""


def test_a_packed_cubin_is_launched_without_a_compiler_and_without_a_cache(fake: Fake) -> None:
    pack, cubin = fake.root / "add.tconv3d", fake.root / "add.cubin"
    fake.run(f"""
        from tconv3d.runtime import packs
        arch = compiler.architecture(launcher.device_properties(0).capability)
        name, entry = (f("add", LAUNCH.constants, arch) for f in (compiler.packed_name, compiler.entry))
        packs.write(Path({str(pack)!r}), "0", packs.fingerprint(), [], [(name, "add", entry)])
        Path({str(cubin)!r}).write_bytes(compiler.compile("add", LAUNCH.constants, arch).cubin)
    """)
    nowhere = {"TCONV3D_CACHE_DIR": "/proc/no/such/place", "FAKE_CUDA_CODE": str(cubin)}
    lines = fake.run(
        WITHOUT_NVRTC + "set_current(0); launcher.prepare(LAUNCH, 0)((1, 2), 0)",
        TCONV3D_PRECOMPILED=str(pack),
        **nowhere,
    )
    assert [each["expected"] for each in named(lines, "cuLibraryLoadData")] == ["1"]
    assert named(lines, "cuLaunchKernelEx")[0]["args"] == packed(1, 2)


def test_without_a_compiler_the_error_names_the_packs(fake: Fake) -> None:
    pack = fake.root / "other.tconv3d"
    script = f"""
        from tconv3d.runtime import packs
        content = packs.Content("H200", "the last layer", "float32", "contiguous", "forward", "inputs 1x2x3x4x5")
        packs.write(Path({str(pack)!r}), "0", packs.fingerprint(), [content], [])
        packs.load(Path({str(pack)!r}))
        error = str(raises_any(launcher.prepare, LAUNCH, 0))
        assert "pip install" in error and {str(pack)!r} in error and "tconv3d.precompile" in error, error
        assert "H200: the last layer, float32, contiguous, forward, inputs 1x2x3x4x5" in error, error
    """
    fake.run(WITHOUT_NVRTC + textwrap.dedent(script), TCONV3D_CACHE_DIR="/proc/no/such/place")


def test_a_driver_that_cannot_be_asked_for_parameters(fake: Fake) -> None:
    lines = fake.run("set_current(0); launcher.prepare(LAUNCH, 0)((1, 2), 0)", FAKE_CUDA_VERSION="12020")
    assert named(lines, "cuFuncLoad") == named(lines, "cuKernelGetParamInfo") == []
    assert len(named(lines, "cuLaunchKernelEx")) == 1


@pytest.mark.parametrize("size", ["40", "16"])
def test_arguments_of_another_size_than_the_kernels(fake: Fake, size: str) -> None:
    fake.run(
        """
        error = raises(launcher.prepare, LAUNCH, 0)
        assert f"Args of {os.environ['FAKE_CUDA_ARGS_BYTES']} bytes expected, got 20 for add(" in error, error
        """,
        FAKE_CUDA_ARGS_BYTES=size,
    )


def test_a_missing_address_is_an_error(fake: Fake) -> None:
    lines = fake.run("""
        run = launcher.prepare(LAUNCH, 0)
        error = raises_any(run, (1,), 0)
        assert "expected" in str(error), error
    """)
    assert named(lines, "cuLaunchKernelEx") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(launcher.LaunchError, match="the NVIDIA driver cannot be loaded"):
        launcher.device_properties(0)


# On a GPU


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    (tmp_path / "add.cuh").write_text(ADD)
    monkeypatch.setattr(sources, "KERNELS", (tmp_path,))
    monkeypatch.setattr(launcher, "_kernels", {})
    yield Launch("add", CONSTANTS, (8, 1, 1), 128, 0, ("x", "y"), struct.pack("i", 1000))


@needs_gpu
def test_a_kernel_runs_on_the_callers_stream(add: Launch) -> None:
    x, y = torch.zeros(1024, device="cuda"), torch.arange(1024.0, device="cuda")
    torch.cuda.synchronize()
    run = launcher.prepare(add, x.get_device())
    stream = torch.cuda.Stream()
    run((x.data_ptr(), y.data_ptr()), torch.cuda.current_stream().cuda_stream)
    stream.wait_stream(torch.cuda.current_stream())
    run((x.data_ptr(), y.data_ptr()), stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(x[:1000], 2 * y[:1000])
    assert not x[1000:].any()


@needs_gpu
def test_a_kernel_is_loaded_and_captured_under_capture(add: Launch) -> None:
    x, y = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run = launcher.prepare(add, x.get_device())
        run((x.data_ptr(), y.data_ptr()), torch.cuda.current_stream().cuda_stream)
    assert not x.any()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert (x[:1000] == 3).all()


@needs_gpu
def test_a_fresh_thread_can_launch(add: Launch) -> None:
    x, y = torch.zeros(1024, device="cuda"), torch.ones(1024, device="cuda")
    run = launcher.prepare(add, x.get_device())
    torch.cuda.synchronize()
    thread = threading.Thread(target=run, args=((x.data_ptr(), y.data_ptr()), 0))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert (x[:1000] == 1).all()


@needs_gpu
def test_device_properties_are_pytorchs(add: Launch) -> None:
    ours, theirs = launcher.device_properties(0), torch.cuda.get_device_properties(0)
    assert ours.name == theirs.name
    assert ours.capability == (theirs.major, theirs.minor)
    assert ours.multiprocessors == theirs.multi_processor_count
    assert ours.shared_bytes == theirs.shared_memory_per_block_optin  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_kernel_runs_on_a_device_that_is_not_current(add: Launch) -> None:
    x, y = torch.zeros(1024, device="cuda:1"), torch.ones(1024, device="cuda:1")
    torch.cuda.synchronize(1)
    run = launcher.prepare(add, 1)
    run((x.data_ptr(), y.data_ptr()), 0)
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert (x[:1000] == 1).all()
