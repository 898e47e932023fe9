"""The emulator itself, on kernels written for the purpose: each feature, and each kind of fault it must name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from probes import Kernel, ints, probe_source

from tconv3d import emulator
from tconv3d.planning.launch import Launch

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

ORDERS = ("forward", "reversed", "shuffled:1", "shuffled:2")


# Threads, blocks, memory.


@pytest.mark.parametrize("order", ORDERS)
def test_every_thread_of_every_block_runs_once(make: Callable[..., Kernel], order: str) -> None:
    y = torch.zeros(4, 3, 2, 40, dtype=torch.int32)
    make(
        """
        const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        args.a[block * blockDim.x + t] += 1 + block * 1000 + t;
        """,
        grid=(2, 3, 4),
        threads=40,
        order=order,
    )(y)
    expected = torch.arange(24).view(24, 1) * 1000 + torch.arange(40) + 1
    assert torch.equal(y.view(24, 40).long(), expected)


@pytest.mark.parametrize("threads", [1, 2, 31, 32, 33, 64, 100, 257, 1024])
@pytest.mark.parametrize("order", ["forward", "shuffled:3"])
def test_any_number_of_threads_reverses_an_array_in_shared_memory(
    make: Callable[..., Kernel], threads: int, order: str
) -> None:
    x, y = torch.arange(threads, dtype=torch.int32), ints(threads)
    make(
        """
        int* shared = reinterpret_cast<int*>(emulator::dynamic_shared());
        __shared__ int fixed[Config::kThreads];
        shared[t] = args.a[t];
        __syncthreads();
        fixed[t] = shared[blockDim.x - 1 - t];
        __syncthreads();
        args.b[t] = fixed[(t + 1) % blockDim.x];
        """,
        threads=threads,
        shared_bytes=4 * threads,
        order=order,
    )(x, y)
    assert torch.equal(y, x.flip(0).roll(-1))


def test_shared_memory_is_aligned_and_unwritten_at_the_start_of_every_block(make: Callable[..., Kernel]) -> None:
    y = torch.zeros(3, 3)
    make(
        """
        __shared__ float fixed[5];
        float* shared = reinterpret_cast<float*>(emulator::dynamic_shared());
        args.a[3 * blockIdx.x + 0] = fixed[2];
        args.a[3 * blockIdx.x + 1] = shared[24];
        args.a[3 * blockIdx.x + 2] = reinterpret_cast<unsigned long long>(shared) % 1024;
        fixed[2] = shared[24] = 1;
        """,
        grid=(3, 1, 1),
        threads=1,
        shared_bytes=100,
        type="float",
    )(y)
    assert y[:, :2].isnan().all()
    assert (y[:, 2] == 0).all()


def test_a_race_shows_as_a_difference_between_orders(make: Callable[..., Kernel]) -> None:
    """Thread t reads what thread t - 1 wrote, without a barrier between them."""
    results = set()
    for order in ORDERS:
        y = ints(64)
        make("__shared__ int s[64]; s[t] = t; args.a[t] = t ? s[t - 1] : 0;", threads=64, order=order)(y)
        results.add(tuple(y.tolist()))
    assert len(results) > 1


def test_functions_of_the_language(make: Callable[..., Kernel]) -> None:
    y = ints(8)
    make(
        """
        int i = 0;
        args.a[i++] = min(-1, 2) + max(3, 4);
        args.a[i++] = min(-1, 2u);  // as unsigned numbers
        args.a[i++] = max(-1LL, 5LL);
        args.a[i++] = static_cast<int>(8 * fmaf(0.5f, 3.0f, 0.25f) * max(0.5f, 2.0));
        args.a[i++] = __popc(0xF0u) + __ffs(8);
        args.a[i++] = sizeof(float4) + alignof(float4) + alignof(float2) + sizeof(uint3);
        const int4 v = make_int4(1, 2, 3, 4);
        args.a[i++] = v.x + 10 * v.y + 100 * v.z + 1000 * v.w;
        args.a[i++] = __ldg(args.a);
        """,
        threads=1,
    )(y)
    assert y.tolist() == [3, 2, 5, 28, 4 + 4, 16 + 16 + 8 + 12, 4321, 3]


# Barriers, votes, shuffles.


@pytest.mark.parametrize("order", ORDERS)
def test_a_reduction_over_many_barriers(make: Callable[..., Kernel], order: str) -> None:
    x, y = torch.randint(-99, 99, (5, 256), dtype=torch.int32), ints(5)
    make(
        """
        __shared__ int sums[256];
        sums[t] = args.a[blockIdx.x * 256 + t];
        __syncthreads();
        for (int half = 128; half > 0; half /= 2) {
          if (t < half) sums[t] += sums[t + half];
          __syncthreads();
        }
        if (t == 0) args.b[blockIdx.x] = sums[0];
        """,
        grid=(5, 1, 1),
        threads=256,
        order=order,
    )(x, y)
    assert torch.equal(y, x.sum(1, dtype=torch.int32))


def test_threads_that_returned_do_not_hold_up_a_barrier(make: Callable[..., Kernel]) -> None:
    for order in ORDERS:
        y = ints(64)
        make(
            """
            __shared__ int s[64];
            if (t >= 40) return;
            s[t] = t;
            __syncthreads();
            args.a[t] = s[39 - t];
            """,
            threads=64,
            order=order,
        )(y)
        assert y.tolist() == [*range(39, -1, -1), *[-7] * 24]


SHUFFLES = {
    "__shfl_sync(m, v, 5)": lambda i: 5,
    "__shfl_sync(m, v, t + 1)": lambda i: i // 32 * 32 + (i + 1) % 32,
    "__shfl_sync(m, v, 3, 8)": lambda i: i // 8 * 8 + 3,
    "__shfl_xor_sync(m, v, 6)": lambda i: i ^ 6,
    "__shfl_xor_sync(m, v, 8, 8)": lambda i: i ^ 8 if i & 8 else i,  # only from a lower segment
    "__shfl_up_sync(m, v, 2)": lambda i: i - 2 if i % 32 >= 2 else i,
    "__shfl_up_sync(m, v, 2, 4)": lambda i: i - 2 if i % 4 >= 2 else i,
}


@pytest.mark.parametrize("order", ["forward", "shuffled:4"])
def test_shuffles(make: Callable[..., Kernel], order: str) -> None:
    """All kinds, one after the other: fast lanes are at the next while slow ones still read the last."""
    y = ints(len(SHUFFLES), 64)
    statements = [f"args.a[{64 * i} + t] = {call};" for i, call in enumerate(SHUFFLES)]
    make("const unsigned m = 0xFFFFFFFFu; const int v = t;" + "\n".join(statements), threads=64, order=order)(y)
    for row, (call, source) in zip(y.tolist(), SHUFFLES.items(), strict=True):
        expected = [source(i) for i in range(64)]
        if call == "__shfl_sync(m, v, 5)":
            expected = [5] * 32 + [37] * 32
        assert row == expected, call


def test_shuffles_of_every_type(make: Callable[..., Kernel]) -> None:
    y = torch.zeros(32)
    make(
        """
        float sum = 0;
        sum += __shfl_xor_sync(~0u, static_cast<double>(t), 1);
        sum += __shfl_xor_sync(~0u, static_cast<float>(t), 1);
        sum += __shfl_xor_sync(~0u, static_cast<unsigned>(t), 1);
        sum += __shfl_xor_sync(~0u, static_cast<long long>(t) << 33, 1) >> 33;
        sum += __shfl_xor_sync(~0u, static_cast<unsigned long long>(t), 1);
        args.a[t] = sum;
        """,
        type="float",
    )(y)
    assert y.tolist() == [5.0 * (i ^ 1) for i in range(32)]


@pytest.mark.parametrize("order", ORDERS)
def test_halves_of_a_warp_shuffle_apart(make: Callable[..., Kernel], order: str) -> None:
    """Disjoint masks do not wait for each other; votes count the lanes of the mask alone."""
    y = ints(3, 32)
    make(
        """
        const unsigned mask = t < 16 ? 0x0000FFFFu : 0xFFFF0000u;
        int sum = t;
        for (int repeat = 0; repeat < (t < 16 ? 1 : 3); ++repeat)
          for (int o = 8; o > 0; o /= 2) sum += __shfl_xor_sync(mask, sum, o);
        args.a[t] = sum;
        args.a[32 + t] = __ballot_sync(mask, t % 4 == 0) == (0x11111111u & mask);
        __syncwarp();
        args.a[64 + t] = __any_sync(~0u, t == 3) * 2 + __any_sync(~0u, t == 32);
        """,
        order=order,
    )(y)
    assert y[0].tolist() == [120] * 16 + [376 * 256] * 16
    assert (y[1] == 1).all()
    assert (y[2] == 2).all()


def test_lanes_that_returned_do_not_hold_up_a_shuffle(make: Callable[..., Kernel]) -> None:
    for order in ORDERS:
        y = ints(48)
        make("if (t % 32 >= 10) return; args.a[t] = __shfl_xor_sync(~0u, t, 1);", threads=48, order=order)(y)
        assert y.tolist() == [t ^ 1 if t % 32 < 10 else -7 for t in range(48)]


# Building blocks for emulated instructions.


@pytest.mark.parametrize("order", ORDERS)
def test_wait_until_builds_a_ring_between_a_producer_and_consumers(make: Callable[..., Kernel], order: str) -> None:
    y = ints(3)
    make(
        """
        int* ring = reinterpret_cast<int*>(emulator::dynamic_shared());
        int &full = ring[0], &empty = ring[1], &value = ring[2];
        if (t == 0) full = 0, empty = 3;
        __syncthreads();
        if (t == 0) {
          for (int i = 1; i <= 10; ++i) {
            emulator::wait_until([&] { return empty == 3; }, "the ring to be empty");
            empty = 0, value = i, full += 1;
          }
        } else {
          int sum = 0;
          for (int i = 1; i <= 10; ++i) {
            emulator::wait_until([&] { return full == i; }, "the ring to be full");
            sum += value;
            empty += 1;
          }
          args.a[t - 1] = sum;
        }
        """,
        threads=4,
        shared_bytes=12,
        order=order,
    )(y)
    assert y.tolist() == [55, 55, 55]


def test_state_belongs_to_its_thread_or_block(make: Callable[..., Kernel]) -> None:
    y = ints(4, 2)
    make(
        """
        emulator::thread_state<Count>().n += 1;
        emulator::block_state<Count>().n += 10;
        __syncthreads();
        args.a[2 * blockIdx.x + t] = emulator::thread_state<Count>().n + emulator::block_state<Count>().n;
        """,
        grid=(4, 1, 1),
        threads=2,
        before="struct Count { int n = 0; };",
    )(y)
    assert (y == 21).all()


# Faults.


def test_a_deadlock_names_who_waits_where(make: Callable[..., Kernel]) -> None:
    kernel = make(
        """
        if (t == 70) return;
        if (t < 32) __syncthreads();
        else emulator::wait_until([] { return false; }, "a message that nobody sends");
        """,
        grid=(2, 1, 1),
        threads=80,
    )
    with pytest.raises(RuntimeError) as caught:
        kernel()
    text = str(caught.value)
    assert "deadlock in kernel probe" in text
    assert "block (0, 0, 0)" in text
    assert "threads 0-31 in __syncthreads at probe.cuh:14" in text
    assert "threads 32-69, 71-79 in a message that nobody sends at probe.cuh:15" in text
    assert "thread 70 ended" in text


def test_polling_for_ever_is_a_deadlock(make: Callable[..., Kernel]) -> None:
    kernel = make("volatile int* a = args.a; while (*a == 0) emulator::yield();", threads=2)
    with pytest.raises(RuntimeError, match=r"threads 0-1 in yield at probe.cuh"):
        kernel(torch.zeros(1, dtype=torch.int32))


def test_polling_until_another_thread_writes(make: Callable[..., Kernel]) -> None:
    y = torch.zeros(1, dtype=torch.int32)
    make("volatile int* a = args.a; if (t == 31) *a = 5; while (*a == 0) emulator::yield();")(y)
    assert y.item() == 5


FAULTS = {
    "diverged barrier": (
        "if (t < 8) {\n __syncthreads();\n } else {\n __syncthreads();\n }",
        r"diverged barrier.*probe.cuh:1\d.*probe.cuh:1\d",
    ),
    "foreign mask": ("if (t == 3) __syncwarp(1u);", r"lane 3 is not in its own mask 0x00000001"),
    "different masks": ("__shfl_sync(t < 16 ? ~0u : 0xFFFF0001u, t, 0);", r"different masks"),
    "different intrinsics": ("if (t < 16) __syncwarp(); else __ballot_sync(~0u, 1);", r"in __(syncwarp|ballot_sync)"),
    "missing lane": ("if (t != 4) __syncwarp();  else emulator::wait_until([] { return false; });", "deadlock"),
    "trap": ("if (t == 5) __trap();", r"__trap\(\) at probe.cuh:\d+.*block \(0, 0, 0\), thread \(5, 0, 0\)"),
    "null pointer": ("if (t == 6) args.c[0] = 1;", r"memory access.*thread \(6, 0, 0\)"),
    "division by zero": ("args.a[t] = 1 / (args.a[0] - args.a[0]);", r"division by zero"),
    "stack overflow": ("args.a[0] = deep(t);", r"more stack than a thread has"),
    "not shared": ("args.a[0] = __cvta_generic_to_shared(args.a);", r"is not an address in shared memory"),
    "a wait inside a predicate": (
        "int calls = 0; emulator::wait_until([&] { if (calls++ == 0) return false; __syncwarp(); return true; });",
        r"a predicate must not block \(__syncwarp",
    ),
}
DEEP = (
    "__device__ int deep(int n) { volatile char page[4096] = {}; return n < 0 ? 0 : deep(n + 1) + page[n % 4096]; }"
)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_an_error_and_not_the_end(make: Callable[..., Kernel], name: str) -> None:
    if name in ("null pointer", "division by zero", "stack overflow") and emulator._sanitizers():
        pytest.skip("the sanitizer ends the process first")
    body, message = FAULTS[name]
    y = torch.zeros(32, dtype=torch.int32)
    kernel = make(body, before=DEEP)
    for _ in range(2):  # the second time shows that the first left nothing behind
        with pytest.raises(RuntimeError, match="(?s)" + message):
            kernel(y)


def test_a_launch_after_a_failed_one_is_whole(make: Callable[..., Kernel]) -> None:
    kernel = make(
        "__syncthreads(); if (args.a[0] == 0 && t == 40) __trap(); __syncthreads(); args.b[t] = t;", threads=64
    )
    y = ints(64)
    with pytest.raises(RuntimeError, match="__trap"):
        kernel(torch.zeros(1, dtype=torch.int32), y)
    kernel(torch.ones(1, dtype=torch.int32), y)
    assert y.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 1, 1)}, "a grid of 0 x 1 x 1 blocks"),
        ({"shared_bytes": 300_000}, "300000 bytes of shared memory"),
        ({"threads": 1025}, "1025 threads"),
    ],
)
def test_a_launch_that_a_gpu_refuses(make: Callable[..., Kernel], change: dict[str, object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        make("", **change)()


def test_arguments_of_another_size_are_refused(tmp_path: Path) -> None:
    (tmp_path / "probe.cuh").write_text(probe_source(""))
    launch = Launch("probe", (("kThreads", 32), ("kMinBlocks", 1)), (1, 1, 1), 32, 0, ("a", "b"), b"")
    with pytest.raises(RuntimeError, match="Args has 32 bytes, the launch gives 16"):
        emulator.prepare(launch, kernels=tmp_path)((0, 0))


def test_a_header_is_part_of_the_kernels_that_include_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    build = emulator._build

    def counting(kernel: str, *rest: Any) -> bytes:
        built.append(kernel)
        return build(kernel, *rest)

    monkeypatch.setattr(emulator, "_build", counting)
    monkeypatch.setenv("TCONV3D_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "probe.cuh").write_text('#include "part.cuh"\n' + probe_source(""))
    launch = Launch("probe", (("kThreads", 32), ("kMinBlocks", 1)), (1, 1, 1), 32, 0, ("a", "b", "c"), bytes(8))
    for part, other in (("1", "1"), ("1", "2"), ("2", "2")):
        (tmp_path / "part.cuh").write_text(f"// {part}\n")
        (tmp_path / "other.cuh").write_text(f"// {other}\n")
        emulator.prepare(launch, kernels=tmp_path)((0, 0, 0))
    assert built == ["probe"] * 2


def test_a_source_that_does_not_compile_shows_the_compilers_words(make: Callable[..., Kernel]) -> None:
    with pytest.raises(RuntimeError, match=r"probe.cuh.*no_such_name"):
        make("no_such_name(t);")


def test_an_unknown_order_is_refused(make: Callable[..., Kernel]) -> None:
    with pytest.raises(ValueError, match="expected forward, reversed or shuffled:<seed>, got 'sideways'"):
        make("", order="sideways")()


def test_without_a_compiler_the_error_says_what_to_install(
    make: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not emulator.available()
    with pytest.raises(RuntimeError, match=r"install g\+\+, or name one in the variable CXX"):
        make("")


def test_several_python_threads_at_once(make: Callable[..., Kernel]) -> None:
    """Two kernels are launched from several OS threads: each launch has its own shared memory."""
    body = """
        __shared__ int s[64];
        for (int round = 0; round < 5; ++round) {
          s[t] = args.a[t] + round;
          __syncthreads();
          args.b[t] = s[63 - t];
          __syncthreads();
        }
        """
    kernels = [make(body, grid=(20, 1, 1), threads=64), make(body + "/* another */", grid=(20, 1, 1), threads=64)]
    wrong: list[int] = []

    def work(number: int) -> None:
        for round in range(10):
            x, y = torch.arange(64, dtype=torch.int32) + 1000 * number + round, ints(64)
            kernels[number % 2](x, y)
            if not torch.equal(y, x.flip(0) + 4):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# Sanitizers end the process with a report, so these run in children of a child process.


def test_machines_without_a_switch_in_assembly(make: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "_FLAGS", (*emulator._FLAGS, "-DEMULATOR_UCONTEXT"))
    x, y = torch.arange(64, dtype=torch.int32), ints(64)
    kernel = make("__shared__ int s[64]; s[t] = args.a[t]; __syncthreads(); args.b[t] = s[63 - t];", threads=64)
    kernel(x, y)
    assert torch.equal(y, x.flip(0))
    with pytest.raises(RuntimeError, match="deadlock"):
        make("if (t) __syncthreads(); else emulator::wait_until([] { return false; });")()


def test_debug_builds_run(make: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV3D_EMULATOR_DEBUG", "1")
    y = ints(32)
    make("__shared__ int s[32]; s[t] = t; __syncthreads(); args.a[t] = s[31 - t];")(y)
    assert y.tolist() == list(range(31, -1, -1))
