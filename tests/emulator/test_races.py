"""The emulator's race detector, on small kernels: each broken kernel is found, and its mended twin is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from probes import Kernel

from tconv3d import emulator
from tconv3d.runtime import sources

pytestmark = [
    pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler"),
    pytest.mark.skipif(bool(emulator._sanitizers()), reason="the race detector runs without other sanitizers"),
]


class Probe(NamedTuple):
    """A kernel in which `missing` is what makes it right, and how the detector describes the kernel without it."""

    body: str
    missing: str
    message: str
    threads: int = 64


SHARED = "unsigned char* shared = emulator::dynamic_shared(); int* words = reinterpret_cast<int*>(shared);"
# Barrier 0 lies at 2048 of shared memory and counts one arrival.
BARRIER = "if (t == 0) { ptx::barrier_init(2048, 1); ptx::fence_barrier_init(); } __syncthreads();"
PRODUCT = """
float sums[4] = {};
for (int i = t; i < 1024; i += 128) words[i] = 0;
FENCE
__syncthreads();
const unsigned long long a = ptx::matrix_descriptor<32>(0, 256), b = ptx::matrix_descriptor<32>(2048, 256);
ptx::matrix_fence();
ptx::MatrixMultiply<8>::issue<ptx::Operand::kFloat16>(sums, a, b);
ptx::matrix_commit();
"""
EITHER = "(reads|writes) .* (wrote|read) at"  # which access comes first depends on the order of threads
PROBES = {
    "read after write": Probe("words[t] = t; MISSING args.a[t] = words[63 - t];", "__syncthreads();", EITHER),
    "write after read": Probe(
        "words[t] = t; __syncthreads(); args.a[t] = words[63 - t]; MISSING words[t] = 1;", "__syncthreads();", EITHER
    ),
    "write after reads of many threads": Probe(
        "words[t] = t; __syncthreads(); args.a[t] = words[0]; MISSING if (t == 5) words[0] = 1;",
        "__syncthreads();",
        EITHER,
    ),
    "write after write": Probe("words[t] = t; MISSING words[63 - t] = t;", "__syncthreads();", "writes .* wrote"),
    "static shared memory": Probe(
        "__shared__ int fixed[64]; fixed[t] = t; MISSING args.a[t] = fixed[63 - t];",
        "__syncthreads();",
        "static shared memory",
    ),
    "lanes of a warp": Probe("words[t] = t; MISSING args.a[t] = words[t ^ 1];", "__syncwarp();", EITHER),
    "a shuffle is no memory barrier": Probe(
        "words[t] = t; __shfl_xor_sync(~0u, t, 1); MISSING args.a[t] = words[t ^ 1];", "__syncwarp();", EITHER
    ),
    "a barrier of warps is none of the block": Probe(
        "words[t] = t; __syncwarp(); MISSING args.a[t] = words[63 - t];", "__syncthreads();", EITHER
    ),
    "a matrix load": Probe(
        "words[t] = t; MISSING unsigned got[2]; ptx::load_matrices(got, 16u * (t % 16)); args.a[t] = got[0];",
        "__syncthreads();",
        EITHER,
    ),
    "an asynchronous copy that others read": Probe(
        "ptx::copy_words<1>(words + t, args.a + t, true); ptx::copy_commit(); MISSING __syncthreads();"
        "args.b[t] = words[63 - t]; ptx::copy_wait<0>();",
        "ptx::copy_wait<0>();",
        EITHER,
    ),
    "an asynchronous copy over what others read": Probe(
        "words[t] = t; __syncthreads(); args.b[t] = words[63 - t]; MISSING"
        " ptx::copy_words<1>(words + t, args.a + t, true); ptx::copy_commit(); ptx::copy_wait<0>();",
        "__syncthreads();",
        EITHER,
    ),
    "an mbarrier": Probe(
        BARRIER + "if (t == 0) { words[0] = 1; MISSING } ptx::barrier_wait(2048, ARRIVED); args.a[t] = words[0];",
        "ptx::barrier_arrive(2048);",
        EITHER,
    ),
    "a bulk copy": Probe(
        BARRIER + "if (t == 0) { ptx::barrier_arrive_expect(2048, 16); ptx::bulk_copy(0, args.a, 16, 2048); } MISSING"
        " args.b[t] = words[t % 4]; ptx::barrier_wait(2048, 0);",
        "ptx::barrier_wait(2048, 0);",
        EITHER,
    ),
    "a bulk copy over what others read": Probe(
        "words[t] = t; __syncthreads(); args.b[t] = words[t % 4];"
        + "if (t == 0) { ptx::barrier_init(2048, 1); ptx::fence_barrier_init(); } MISSING"
        " if (t == 0) { ptx::barrier_arrive_expect(2048, 16); ptx::bulk_copy(0, args.a, 16, 2048); }"
        " __syncthreads(); ptx::barrier_wait(2048, 0);",
        "__syncthreads();",
        EITHER,
    ),
    "a bulk store of what is not fenced": Probe(
        "words[t] = t; MISSING __syncthreads();"
        " if (t == 0) { ptx::bulk_store(args.b, 0, 256); ptx::bulk_commit(); ptx::bulk_wait_read(); }",
        "ptx::fence_async_proxy();",
        "async proxy, without fence.proxy.async",
    ),
    "a bulk store of what is overwritten": Probe(
        "words[t] = t; ptx::fence_async_proxy(); __syncthreads();"
        " if (t == 0) { ptx::bulk_store(args.b, 0, 256); ptx::bulk_commit(); MISSING }"
        " __syncthreads(); words[t] = 1; if (t == 0) ptx::bulk_wait_read();",
        "ptx::bulk_wait_read();",
        EITHER,
    ),
    "a matrix product of what is not fenced": Probe(
        PRODUCT.replace("FENCE", "MISSING") + "ptx::matrix_wait<0>(); if (sums[0]) args.a[t] = 1;",
        "ptx::fence_async_proxy();",
        "async proxy, without fence.proxy.async",
        128,
    ),
    "a matrix product whose operand is overwritten": Probe(
        PRODUCT.replace("FENCE", "ptx::fence_async_proxy();")
        + "MISSING __syncthreads(); words[t] = 1; ptx::fence_async_proxy(); __syncthreads(); ptx::matrix_wait<0>();"
        " if (sums[0]) args.a[t] = 1;",
        "ptx::matrix_wait<0>();",
        EITHER,
        128,
    ),
    "a warpgroup's barrier": Probe(
        "words[t] = t; MISSING args.a[t % 64] = words[t ^ 127];", "ptx::warpgroup_sync(1);", EITHER, 128
    ),
}


@pytest.fixture
def watched(make: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch) -> Callable[[Probe, str, str], Kernel]:
    """watched(probe, text, order) -> the kernel with `text` where it matters, run by the detector."""
    monkeypatch.setenv("TCONV3D_EMULATOR_RACES", "1")

    def watched(probe: Probe, text: str, order: str) -> Kernel:
        body = probe.body.replace("MISSING", text).replace("ARRIVED", "0" if text else "1")
        return make(
            f"{SHARED} {body}",
            threads=probe.threads,
            shared_bytes=4096,
            order=order,
            before=f'}}\n#include "{sources.find("ptx_hopper.cuh")}"\nnamespace tconv3d {{',
        )

    return watched


@pytest.mark.parametrize("order", ["forward", "reversed"])
@pytest.mark.parametrize("name", PROBES)
def test_a_race_is_found_in_whatever_order_threads_run(
    watched: Callable[[Probe, str, str], Kernel], name: str, order: str
) -> None:
    probe, memory = PROBES[name], torch.zeros(2, 64, dtype=torch.int32)
    watched(probe, probe.missing, order)(*memory)
    with pytest.raises(RuntimeError, match=f"race in .*?(?:{probe.message})"):
        watched(probe, "", order)(*memory)


def test_lanes_may_store_one_number_and_read_it_again(watched: Callable[[Probe, str, str], Kernel]) -> None:
    """Only the lanes that stored it may read it without a barrier."""
    memory = torch.zeros(64, dtype=torch.int32)
    watched(Probe("words[t / 8] = t / 8; args.a[t] = words[t / 8];", "", ""), "", "forward")(memory)
    assert memory.tolist() == [t // 8 for t in range(64)]
    with pytest.raises(RuntimeError, match="race in"):
        watched(Probe("words[t / 8] = t / 8; args.a[t] = words[t / 8 ^ 1];", "", ""), "", "forward")(memory)
    with pytest.raises(RuntimeError, match="race in"):  # lanes of two warps
        watched(Probe("words[0] = 1; args.a[t] = words[0];", "", ""), "", "forward")(memory)


def test_a_race_names_both_places(watched: Callable[[Probe, str, str], Kernel]) -> None:
    with pytest.raises(RuntimeError, match=r"writes at probe.cuh:\d+ what thread \d+ read at probe.cuh:\d+"):
        watched(PROBES["read after write"], "", "forward")(torch.zeros(64, dtype=torch.int32))
