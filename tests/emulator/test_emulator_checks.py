"""Accesses that a GPU refuses and a CPU does not: each ends an emulated launch, and the message says where it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from probes import Kernel

from tconv3d import emulator
from tconv3d.runtime import compiler, sources

pytestmark = pytest.mark.skipif(not emulator.available(), reason="there is no C++ compiler")

SHARED = "unsigned char* const shared = emulator::dynamic_shared(); (void)shared; namespace ptx = tconv3d::ptx;"

# name: (body, what the error says). There are 1000 bytes of dynamic shared memory.
FAULTS = {
    "load of a vector": ("args.a[0] = reinterpret_cast<int4*>(args.a + 1)->x;", r"misaligned address.*probe.cuh:\d+"),
    "store of a vector": (
        "*reinterpret_cast<int2*>(args.a + 1) = int2{1, 2};",
        r"multiple of 8 bytes.*probe.cuh:\d+",
    ),
    "load of a vector out of shared memory": (
        "args.a[0] = reinterpret_cast<int4*>(shared + 8)->x;",
        r"misaligned address.*multiple of 16 bytes.*probe.cuh:\d+",
    ),
    "store of a word": ("*reinterpret_cast<int*>(shared + 2) = 1;", r"multiple of 4 bytes.*probe.cuh:\d+"),
    "load past dynamic shared memory": ("args.a[0] = shared[1024];", "memory access"),
    "load before dynamic shared memory": ("args.a[0] = shared[-4096];", "memory access"),
    "store past dynamic shared memory": ("if (t == 0) shared[1000] = 1;", "a store past the end of 1000 bytes"),
    "index of static shared memory": (
        "__shared__ int fixed[32]; fixed[t + (args.a[0] == 0)] = 1; args.a[1] = fixed[0];",
        r"index 32 is out of bounds of 'int \[32\]' at probe.cuh:\d+",
    ),
    "16 bytes past the end": ("ptx::load_shared(992);", "16 bytes at offset 992 of 1000 bytes of dynamic"),
    "misaligned load": ("ptx::load_shared(8);", "a 16-byte load from shared memory at 8"),
    "misaligned store": ("ptx::store_shared(8, uint4{});", "a 16-byte store to shared memory at 8"),
    "misaligned row of a matrix": ("ptx::store_transposed(8, uint4{});", "a row of a matrix stored"),
    "misaligned barrier": ("ptx::barrier_init(4, 1);", "a barrier in shared memory at 4"),
    "barrier past the end": ("ptx::barrier_init(1000, 1);", "8 bytes at offset 1000"),
    "asynchronous copy from anywhere": (
        "ptx::copy_words<4>(shared, args.a + 1, true);",
        "copy of 16 bytes that is not",
    ),
    "asynchronous copy past the end": ("ptx::copy_words<4>(shared + 992, args.a, true);", "16 bytes at offset 992"),
    "asynchronous copy to global memory": ("ptx::copy_words<1>(args.a, args.a, true);", "not an address in shared"),
    "bulk copy from anywhere": ("ptx::bulk_copy(0, args.a + 1, 16, 512);", "all must be multiples of 16"),
    "bulk copy past the end": ("ptx::bulk_copy(992, args.a, 16, 512);", "16 bytes at offset 992"),
    "bulk copy to anywhere": ("ptx::bulk_store(args.a + 1, 0, 16);", "all must be multiples of 16"),
    "bulk copy that nobody waits for": (
        "if (t == 0) { ptx::barrier_init(512, 1); ptx::barrier_arrive_expect(512, 16);"
        " ptx::bulk_copy(0, args.a, 16, 512); }",
        "a block ends while 1 bulk copies to its shared memory are in flight",
    ),
    "lanes in two warp instructions": (
        "if (t % 2) ptx::matrix_commit(); else ptx::matrix_wait<0>();",
        "lane [0-9]+ of the same mask is in matrix_",
    ),
    "matrices of a part of a warp": (
        "unsigned words[4]; if (t < 16) ptx::load_matrices(words, 0);  // the others have returned",
        "load_matrices in a warp that is not whole",
    ),
    "lanes at two places": (
        "unsigned words[4]; if (t < 16) ptx::load_matrices(words, 0); else ptx::load_matrices(words, 16);",
        "load_matrices: the lanes of a warp call it at several places, lane [0-9]+ at ",
    ),
    "more registers than there are": (
        "ptx::keep_registers<256>(); ptx::keep_registers<248>(); ptx::claim_registers<240>();",
        "claim_registers: 240 registers per thread, where a thread has 248",
    ),
    "barrier of no warpgroup": ("ptx::warpgroup_sync(16);", "hardware barrier 16: a warpgroup may have 1 to 15"),
    "store to global memory": ("ptx::store_global(args.a + 1, uint2{});", "a store of 8 bytes"),
    "assumption": ("TCONV3D_ASSUME(t < 5);", r"t < 5 does not hold at .*probe.cuh:\d+.*thread \(5, 0, 0\)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_access_that_a_gpu_refuses(make: Callable[..., Kernel], name: str) -> None:
    body, message = FAULTS[name]
    common, hopper = sources.find("common.cuh"), sources.find("ptx_hopper.cuh")
    kernel = make(
        SHARED + "\n" + body,
        shared_bytes=1000,
        before=f'}}\n#include "{common}"\n#include "{hopper}"\nnamespace tconv3d {{',
    )
    memory = torch.zeros(64, dtype=torch.int32)
    for _ in range(2):  # the second time shows that the first left nothing behind
        with pytest.raises(RuntimeError, match="(?s)" + message):
            kernel(memory)


def hopper_kernel(make: Callable[..., Kernel], body: str, threads: int) -> Kernel:
    before = f'}}\n#include "{sources.find("ptx_hopper.cuh")}"\nnamespace tconv3d {{'
    return make(SHARED + "\n" + body, threads=threads, shared_bytes=1024, before=before)


HOPPER = f'}}\n#include "{sources.find("ptx_hopper.cuh")}"\nnamespace tconv3d {{'


def test_registers_move_between_warpgroups_and_do_not_grow(make: Callable[..., Kernel]) -> None:
    """The threads of 4 warpgroups begin with 128 registers each: two may have 168 if two keep 88."""
    body = "if (t < 256) ptx::keep_registers<{}>(); else ptx::claim_registers<168>(); __syncthreads(); args.a[t] = t;"
    memory = torch.zeros(512, dtype=torch.int32)
    make(f"namespace ptx = tconv3d::ptx; {body.format(88)}", threads=512, before=HOPPER)(memory)
    assert memory.tolist() == list(range(512))
    for change, message in (
        (body.format(96), r"deadlock.*threads .* in claim_registers"),
        ("if (t < 32) ptx::keep_registers<88>();", "warps of a warpgroup have different registers"),
    ):
        kernel = make(f"namespace ptx = tconv3d::ptx; {change}", threads=512, before=HOPPER)
        with pytest.raises(RuntimeError, match="(?s)" + message):
            kernel(memory)


def test_two_warpgroups_do_not_share_a_barrier(make: Callable[..., Kernel]) -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    hopper_kernel(make, "ptx::warpgroup_sync(1 + t / 128);", 256)(memory)
    with pytest.raises(RuntimeError, match="warpgroups 0 and 1 meet at hardware barrier 1"):
        hopper_kernel(make, "if (t % 128 < 64) ptx::warpgroup_sync(1);", 256)(memory)


def test_a_bulk_copy_arrives_when_it_is_waited_for(make: Callable[..., Kernel]) -> None:
    """What is read before the wait is neither the old nor the new contents of shared memory."""
    kernel = hopper_kernel(
        make,
        "int* const words = reinterpret_cast<int*>(shared); if (t == 0) { words[0] = 1; ptx::barrier_init(512, 1);"
        " ptx::barrier_arrive_expect(512, 16); ptx::bulk_copy(0, args.a, 16, 512); args.b[0] = words[0];"
        " ptx::barrier_wait(512, 0); args.b[1] = words[0]; }",
        32,
    )
    source, result = torch.full((64,), 7, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    kernel(source, result)
    assert result[0] not in (1, 7) and result[1] == 7


@pytest.mark.parametrize(
    ("body", "change", "message"),
    [("__shared__ int large[13000]; large[t] = t; args.a[t] = large[0];", {}, "bytes of static shared memory")],
)
def test_a_launch_that_a_gpu_refuses(
    make: Callable[..., Kernel], body: str, change: dict[str, object], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        make(body, **change)(torch.zeros(32, dtype=torch.int32))


def test_kernels_that_check_what_they_assume_have_options_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compiler.options()
    monkeypatch.setenv("TCONV3D_CHECKED", "1")
    checked = compiler.options()
    assert checked["define_macro"] == "TCONV3D_CHECKED" and plain == compiler._OPTIONS
    assert repr(checked) != repr(plain)  # which is what the key of the disk cache has
