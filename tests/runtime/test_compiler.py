"""The compiler: what NVRTC gets to read, what comes out, and what is kept."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compile_everything
import pytest
from places import PYTHONPATH, ROOT

from tconv3d.planning.launch import Constants
from tconv3d.runtime import cache, compiler, sources

CONSTANTS: Constants = (("kThreads", 128), ("kMinBlocks", 2), ("kScale", 3), ("Scalar", "float"))

TINY = """
#pragma once
namespace tconv3d {
struct Args {
  float* x;
  int n;
};
template <class Config>
__device__ void run(const Args& args) {
  const int i = blockIdx.x * Config::kThreads + threadIdx.x;
  if (i < args.n) args.x[i] *= typename Config::Scalar(Config::kScale);
}
}  // namespace tconv3d
"""

# Keeps 300 numbers alive at once, and a table that is indexed at run time.
GREEDY = """
#pragma once
namespace tconv3d {
struct Args {
  float* x;
  int n;
};
template <class Config>
__device__ void run(const Args& args) {
  __shared__ float shared[Config::kThreads];
  float held[300];
  float local[Config::kLocal];
#pragma unroll
  for (int i = 0; i < 300; ++i) held[i] = args.x[i * args.n];
  for (int i = 0; i < Config::kLocal; ++i) local[i] = args.x[i];
  local[args.n] = 1.0f;
  shared[threadIdx.x] = local[args.x[0] > 0 ? 1 : 2];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 300; ++i) args.x[i * args.n + 1] = held[i] * shared[i % Config::kThreads];
}
}  // namespace tconv3d
"""

# Two matrix instructions on their way; their sums may be touched in between.
HASTY = """
#pragma once
namespace tconv3d {
struct Args {
  float* x;
  long long a, b;
};
__device__ void multiply(float (&sums)[4], long long a, long long b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "l"(a), "l"(b));
}
template <class Config>
__device__ void run(const Args& args) {
  float sums[4] = {};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  multiply(sums, args.a, args.b);
  if (Config::kTouched) sums[0] += 1.0f;
  multiply(sums, args.a + 2, args.b + 2);
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) args.x[4 * threadIdx.x + i] = sums[i];
}
}  // namespace tconv3d
"""


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of kernels and a cache of the test's own."""
    root = tmp_path / "kernels"
    root.mkdir()
    (root / "tiny.cuh").write_text(TINY)
    (root / "greedy.cuh").write_text(GREEDY)
    (root / "hasty.cuh").write_text(HASTY)
    monkeypatch.setattr(sources, "KERNELS", (root,))
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / "cache"))
    return root


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures NVRTC was asked for, in order."""
    asked: list[str] = []
    real: Callable[..., bytes] = compiler._build

    def counting(kernel: str, constants: Constants, unit: str, arch: str) -> bytes:
        asked.append(arch)
        return real(kernel, constants, unit, arch)

    monkeypatch.setattr(compiler, "_build", counting)
    return asked


# The translation unit


def test_the_translation_unit() -> None:
    constants: Constants = (
        ("kThreads", 128),
        ("kMinBlocks", 1),
        ("kWide", False),
        ("Scalar", "float"),
        ("kTap", (0, -1, 2)),
        ("kPhase", ((0, 1), (2, 3))),
    )
    assert compiler.translation_unit("plain", constants) == (
        '#include "plain.cuh"\n'
        "__constant__ constexpr int table_kTap[3] = {0, -1, 2};\n"
        "__constant__ constexpr int table_kPhase[2][2] = {{0, 1}, {2, 3}};\n"
        "struct Config {\n"
        "  static constexpr int kThreads = 128;\n"
        "  static constexpr int kMinBlocks = 1;\n"
        "  static constexpr bool kWide = false;\n"
        "  using Scalar = float;\n"
        "  static __device__ constexpr int kTap(int i) { return table_kTap[i]; }\n"
        "  static __device__ constexpr int kPhase(int i, int j) { return table_kPhase[i][j]; }\n"
        "};\n"
        'extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)\n'
        "tconv3d_kernel(const __grid_constant__ tconv3d::Args args) { tconv3d::run<Config>(args); }\n"
    )


def test_rows_of_a_table_have_one_length() -> None:
    with pytest.raises(ValueError, match=r"kPhase = \(\(0, 1\), \(2,\)\)"):
        compiler.translation_unit("direct", (("kPhase", ((0, 1), (2,))),))


def test_constants_have_their_values_in_the_kernel(kernels: Path) -> None:
    """Every kind of constant is asserted by the compiler itself, tables at compile time and at run time."""
    (kernels / "values.cuh").write_text("""
namespace tconv3d {
struct Args { long long* x; int n; };
template <class, class> constexpr bool same = false;
template <class T> constexpr bool same<T, T> = true;
template <class Config> __device__ void run(const Args& args) {
  static_assert(Config::kYes && !Config::kNo);
  static_assert(Config::kBig == 1LL << 40 && Config::kNegative == -7);
  static_assert(Config::kRow(2) == -3 && Config::kGrid(1, 2) == 6 && Config::kLong(1) == 1LL << 33);
  static_assert(same<typename Config::Scalar, double>);
  static_assert(sizeof(Config::kEmpty(0)) == 4);
  args.x[0] = Config::kRow(args.n) + Config::kGrid(args.n, args.n);
}
}""")
    constants: Constants = (
        ("kThreads", 32),
        ("kMinBlocks", 1),
        ("kYes", True),
        ("kNo", False),
        ("kBig", 1 << 40),
        ("kNegative", -7),
        ("kRow", (1, 2, -3)),
        ("kGrid", ((1, 2, 3), (4, 5, 6))),
        ("kLong", (0, 1 << 33)),
        ("kEmpty", ()),
        ("Scalar", "double"),
    )
    assert compiler.compile("values", constants, "sm_80").cubin.startswith(b"\x7fELF")


# Architectures


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120"),
    ],
)
def test_architecture_names(capability: tuple[int, int], name: str) -> None:
    assert compiler.architecture(capability) == name


def test_old_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"8\.0 or higher expected, got 7\.5"):
        compiler.architecture((7, 5))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"])
def test_every_architecture_compiles_without_a_gpu(arch: str) -> None:
    compiled = compiler.compile("tiny", CONSTANTS, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiler.ENTRY.encode() in compiled.cubin
    assert f"'{arch}'" in compiled.log
    assert 0 < compiled.report.registers < 32
    assert (compiled.report.spill_loads, compiled.report.spill_stores) == (0, 0)


# The report


def test_the_report_of_a_kernel_that_spills(builds: list[str]) -> None:
    constants: Constants = (("kThreads", 1024), ("kMinBlocks", 1), ("kLocal", 64))
    report = compiler.compile("greedy", constants, "sm_90a").report
    assert report.registers == 64  # all that 1024 threads can have
    assert report.spill_loads > 0
    assert report.spill_stores > 0
    assert report.shared_bytes >= 4096
    assert report.stack_bytes >= 256
    assert compiler.compile("greedy", constants, "sm_90a").report == report  # out of the cache
    assert builds == ["sm_90a"]


def test_the_report_adds_functions_that_are_not_inlined() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tconv3d_kernel' for 'sm_90a'
ptxas info    : Function properties for tconv3d_kernel
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 3 barriers, 24 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Function properties for helper
    16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""
    assert compiler.report(log) == compiler.Report(168, 20, 12, 1024, 24)


@pytest.mark.parametrize("touched", [False, True])
def test_matrix_instructions_that_wait_for_each_other_are_found(touched: bool) -> None:
    constants: Constants = (("kThreads", 128), ("kMinBlocks", 1), ("kTouched", touched))
    outcome = compile_everything.compile_one(compile_everything.Kernel("hasty", constants), "sm_90a")
    assert bool(outcome.serialized) == touched
    assert len(compile_everything.faults([outcome])) == touched


def test_a_log_of_another_kind_is_no_error() -> None:
    assert compiler.report("all went well") == compiler.Report(-1, -1, -1, -1, -1)


# Errors


def test_a_kernel_that_does_not_compile(kernels: Path) -> None:
    (kernels / "wrong.cuh").write_text('#include "missing.cuh"')
    with pytest.raises(compiler.CompileError) as caught:
        compiler.compile("wrong", CONSTANTS, "sm_90a")
    message = str(caught.value)
    assert 'open source file "missing.cuh"' in message
    assert "wrong(kThreads=128, kMinBlocks=2, kScale=3, Scalar=float) for sm_90a" in message
    assert compiler.version() in message
    assert cache.size().entries == 0


def test_an_architecture_nvrtc_does_not_know() -> None:
    with pytest.raises(compiler.CompileError, match="gpu-architecture"):
        compiler.compile("tiny", CONSTANTS, "sm_77")


def test_kernels_get_no_toolkit_headers(kernels: Path) -> None:
    (kernels / "toolkit.cuh").write_text("#include <cuda_fp16.h>")
    with pytest.raises(compiler.CompileError, match=r"cuda_fp16\.h"):
        compiler.compile("toolkit", CONSTANTS, "sm_80")


@pytest.mark.parametrize("missing", ["cuda.core", "cuda.bindings"])
def test_without_cuda_the_error_says_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    compiler.version.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"pip install tconv3d\[cu13\]"):
            compiler.compile("tiny", CONSTANTS, "sm_80")
    finally:
        compiler.version.cache_clear()


def test_without_libnvrtc_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def absent() -> Any:
        raise RuntimeError("libnvrtc.so.13 was not found")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    compiler.version.cache_clear()
    try:
        with pytest.raises(compiler.MissingCompilerError, match=r"pip install tconv3d\[cu13\].*libnvrtc"):
            compiler.compile("tiny", CONSTANTS, "sm_80")
    finally:
        compiler.version.cache_clear()


def test_a_cached_kernel_does_not_load_the_compiler(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compile("tiny", CONSTANTS, "sm_80")
    monkeypatch.setattr(compiler, "version", lambda: pytest.fail("the compiler was loaded"))
    assert compiler.compile("tiny", CONSTANTS, "sm_80") == first


def test_the_package_imports_without_cuda() -> None:
    script = """
import sys
sys.modules |= dict.fromkeys(["cuda", "cuda.core", "cuda.bindings"])
from tconv3d.runtime import compiler, launcher
launcher.preload()
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


# The cache


def test_a_kernel_is_compiled_once(builds: list[str]) -> None:
    first = compiler.compile("tiny", CONSTANTS, "sm_80")
    assert compiler.compile("tiny", CONSTANTS, "sm_80") == first
    assert builds == ["sm_80"]


def test_whatever_the_cubin_depends_on_is_in_the_key(
    kernels: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.compile("tiny", CONSTANTS, "sm_80")
    compiler.compile("tiny", CONSTANTS, "sm_86")
    compiler.compile("tiny", (*CONSTANTS, ("kExtra", 1)), "sm_80")
    monkeypatch.setattr(compiler, "identity", lambda: "NVRTC 99.0")
    compiler.compile("tiny", CONSTANTS, "sm_80")
    monkeypatch.setattr(compiler, "_OPTIONS", {**compiler._OPTIONS, "std": "c++17"})
    compiler.compile("tiny", CONSTANTS, "sm_80")
    (kernels / "tiny.cuh").write_text('#include "part.cuh"\n' + TINY)
    (kernels / "part.cuh").write_text("// a part of it\n")
    compiler.compile("tiny", CONSTANTS, "sm_80")
    (kernels / "part.cuh").write_text("// a part of it, changed\n")
    compiler.compile("tiny", CONSTANTS, "sm_80")
    assert len(builds) == 7
    assert cache.size().entries == 7


def test_editing_a_header_recompiles_what_includes_it_and_nothing_else(kernels: Path, builds: list[str]) -> None:
    (kernels / "turn.cuh").write_text("// a part of one\n")
    (kernels / "turning.cuh").write_text('#include "turn.cuh"\n' + TINY)
    for _ in range(2):
        for kernel in ("tiny", "turning"):
            compiler.compile(kernel, CONSTANTS, "sm_80")
    assert len(builds) == 2
    (kernels / "turn.cuh").write_text("// a part of one, and larger\n")
    for kernel in ("tiny", "turning"):
        compiler.compile(kernel, CONSTANTS, "sm_80")
    assert len(builds) == 3


def test_headers_may_lie_in_several_directories(
    kernels: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernels / "part.cuh").write_text("// in a directory of its own later\n")
    (kernels / "tiny.cuh").write_text('#include "part.cuh"\n' + TINY)
    first = compiler.compile("tiny", CONSTANTS, "sm_80")
    device = kernels.parent / "device"
    device.mkdir()
    (kernels / "part.cuh").rename(device / "part.cuh")
    monkeypatch.setattr(sources, "KERNELS", (kernels, device))
    assert compiler.compile("tiny", CONSTANTS, "sm_80") == first and len(builds) == 1, "no key changes"
    compiler.compile("tiny", CONSTANTS, "sm_86")  # and the compiler finds it
    assert len(builds) == 2


def test_a_damaged_cubin_is_compiled_again(builds: list[str]) -> None:
    first = compiler.compile("tiny", CONSTANTS, "sm_80")
    root = cache.place()
    assert root is not None
    (file,) = root.glob("*.cubin")
    file.write_bytes(file.read_bytes()[:-100])
    assert compiler.compile("tiny", CONSTANTS, "sm_80").cubin == first.cubin
    assert len(builds) == 2


def test_threads_compile_one_kernel_once(builds: list[str]) -> None:
    results: list[compiler.Compiled] = []
    threads = [
        threading.Thread(target=lambda: results.append(compiler.compile("tiny", CONSTANTS, "sm_80")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == results[:1] * 4
    assert builds == ["sm_80"]


# ---- what make test runs after the tests


def test_few_kernels_have_all_pairs_of_choices_of_many() -> None:
    switches = [f"kSwitch{i}" for i in range(6)]
    kernels = [
        compile_everything.Kernel(name, (("kNumber", 7), *zip(switches, values, strict=True)))
        for name in ("one", "other")
        for values in itertools.product((False, True), repeat=len(switches))
    ]
    kept = compile_everything.covering(kernels)
    together = {(kernel.name, a, b) for kernel in kept for a in kernel.constants[1:] for b in kernel.constants[1:]}
    # Each of the two kernels has 12 values alone, and 4 pairs of values for every two switches in either order.
    assert len(together) == 2 * (12 + 6 * 5 * 4)
    assert set(kept) < set(kernels) and len(kept) <= 20 < len(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("lanes, status", [(32, 0), (3, 1)])
def test_compile_everything_fails_for_a_kernel_that_does_not_compile(lanes: int, status: int, tmp_path: Path) -> None:
    pytest.importorskip("cuda.core")
    types = [["Scalar", "float"], ["Acc", "float"]]
    sharing = [["kLanes", lanes], ["kMoreLanes", 0], ["kOverlaps", False]]
    record = [["reduce", [["kThreads", 256], ["kMinBlocks", 1], *types, *sharing]]]
    (tmp_path / "launches-main.json").write_text(json.dumps(record))
    table = tmp_path / "registers.csv"
    command = [sys.executable, compile_everything.__file__, str(tmp_path), str(table)]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == status, child.stdout + child.stderr
    assert ("does not compile" in child.stdout) == bool(status)
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    assert {row[1] for row in rows} == {"sm_90a", "sm_80", "sm_86", "sm_89", "sm_100a", "sm_120"}
    assert all((int(row[2]) > 0) if row[2] else status for row in rows)
