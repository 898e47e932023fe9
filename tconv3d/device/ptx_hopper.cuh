// Instructions that Hopper has and Ampere has not as functions: barriers that count bytes, bulk copies,
// registers that move between warpgroups, and warpgroup matrix products (sm_90a). ptx.cuh has the
// instructions of all GPUs. On the CPU the emulator provides the same functions
// (emulator/include/emulated_ptx_hopper.h).
#pragma once

#include "ptx.cuh"

#ifdef TCONV3D_EMULATOR
#include "emulated_ptx_hopper.h"
#else

namespace tconv3d::ptx {

// Makes this thread's ordinary stores to shared memory visible to tensor cores and the copy engine (after a
// barrier between the threads).
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Barriers in shared memory (mbarrier), beside those functions that ptx.cuh has. All arrivals and all
// expected bytes complete a phase; a waiter names the parity of the phase that it waits for.

// Must be called after all barrier_init, before other threads use the barriers; a __syncthreads must follow.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Returns whether the phase with this parity is complete, without waiting.
__device__ __forceinline__ bool barrier_complete(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits until one of two phases is complete, and returns whether it is the first.
__device__ __forceinline__ bool barrier_wait_either(unsigned first, unsigned first_parity, unsigned second,
                                                    unsigned second_parity) {
  unsigned which;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mov.u32 %0, 1;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "@done bra finished;\n"
      "mov.u32 %0, 0;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%3], %4;\n"
      "@done bra finished;\n"
      "nanosleep.u32 40;\n"  // leaves the scheduler to other warps for 40 ns
      "bra again;\n"
      "finished:\n"
      "}"
      : "=&r"(which)
      : "r"(first), "r"(first_parity), "r"(second), "r"(second_parity)
      : "memory");
  return which != 0;
}

// Returns true in one lane of a converged warp. The compiler knows that it is one lane, and makes no loop
// over lanes for its bulk copies.
__device__ __forceinline__ bool elected(int) {
  unsigned own;
  asm volatile(
      "{\n"
      ".reg .pred own;\n"
      "elect.sync _|own, 0xFFFFFFFF;\n"
      "selp.u32 %0, 1, 0, own;\n"
      "}"
      : "=r"(own));
  return own != 0;
}

// The copy engine copies `bytes` (a multiple of 16) from global to shared memory, counted at a barrier.
__device__ __forceinline__ void bulk_copy(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The copy engine copies `bytes` (a multiple of 16) from shared to global memory. bulk_commit() groups the
// copies since the last commit; bulk_wait_read() waits until the sources of all groups have been read.
__device__ __forceinline__ void bulk_store(void* to, unsigned from, unsigned bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
      "r"(from), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Synchronizes the 128 threads of a warpgroup, with their writes. `which`: hardware barrier 1 to 15.
__device__ __forceinline__ void warpgroup_sync(int which) {
  asm volatile("bar.sync %0, 128;" ::"r"(which) : "memory");
}

// ---- Registers move between warpgroups: every warp of a warpgroup must call these functions.

template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Warpgroup matrix instructions (sm_90a).

// Describes an operand in shared memory: rows of kRowBytes with K along the row, swizzled as a function of
// the address. Groups of 8 contiguous rows are `group_bytes` apart.
template <int kRowBytes>
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned address, unsigned group_bytes) {
  static_assert(kRowBytes == 128 || kRowBytes == 64 || kRowBytes == 32, "swizzles exist for these rows");
  constexpr unsigned long long kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return static_cast<unsigned long long>((address & 0x3FFFFu) >> 4) | 1ull << 16 |
         static_cast<unsigned long long>(group_bytes >> 4) << 32 | kSwizzle << 62;
}

// Describes an operand whose rows of 128 bytes in shared memory are K: 64 numbers of every row, the next 64
// `columns_bytes` further on (the leading dimension byte offset of PTX), and so on. Groups of 8 rows are
// `group_bytes` apart (its stride dimension byte offset).
__device__ __forceinline__ unsigned long long matrix_descriptor_of_rows(unsigned address,
                                                                        unsigned group_bytes,
                                                                        unsigned columns_bytes) {
  return static_cast<unsigned long long>((address & 0x3FFFFu) >> 4) |
         static_cast<unsigned long long>(columns_bytes >> 4) << 16 |
         static_cast<unsigned long long>(group_bytes >> 4) << 32 | 1ull << 62;
}

// Returns the descriptor of the operand `bytes` further on.
__device__ __forceinline__ unsigned long long advance(unsigned long long descriptor, unsigned bytes) {
  return descriptor + (bytes >> 4);
}

// Forces a value into a register at this point: it is neither computed later nor copied from elsewhere.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
__device__ __forceinline__ void pin(unsigned& value) { asm volatile("" : "+r"(value)::"memory"); }
template <class T>
__device__ __forceinline__ void pin(T*& pointer) {
  asm volatile("" : "+l"(pointer)::"memory");
}

__device__ __forceinline__ void matrix_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void matrix_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending committed groups of matrix instructions are unfinished.
template <int kPending>
__device__ __forceinline__ void matrix_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// MatrixMultiply<N>::issue<operand>(sums, a, b) adds 64 rows of A times N rows of B, 32 bytes of each, to
// `sums`. A thread has N / 2 sums: 4 for every 8 columns, at rows lane/4 and lane/4 + 8 of the warp's 16,
// columns 2*(lane%4) and the next. A is a descriptor, or four words per lane in registers, laid out as in
// warp_multiply for the warp's 16 rows; these registers must not change before matrix_wait.
// issue_rows<operand>(sums, a, b) takes 16-bit operands whose rows in shared memory are K: 16 rows of each,
// in two groups of 8, with 64 numbers of A and N of B along rows of 128 bytes.
template <int kColumns>
struct MatrixMultiply;

// clang-format off
#define TCONV3D_NAMES_8 "%0, %1, %2, %3"
#define TCONV3D_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define TCONV3D_NAMES_16 TCONV3D_NAMES_8 ", %4, %5, %6, %7"
#define TCONV3D_SUMS_16 TCONV3D_SUMS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define TCONV3D_NAMES_24 TCONV3D_NAMES_16 ", %8, %9, %10, %11"
#define TCONV3D_SUMS_24 TCONV3D_SUMS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define TCONV3D_NAMES_32 TCONV3D_NAMES_24 ", %12, %13, %14, %15"
#define TCONV3D_SUMS_32 TCONV3D_SUMS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define TCONV3D_NAMES_40 TCONV3D_NAMES_32 ", %16, %17, %18, %19"
#define TCONV3D_SUMS_40 TCONV3D_SUMS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define TCONV3D_NAMES_48 TCONV3D_NAMES_40 ", %20, %21, %22, %23"
#define TCONV3D_SUMS_48 TCONV3D_SUMS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define TCONV3D_NAMES_56 TCONV3D_NAMES_48 ", %24, %25, %26, %27"
#define TCONV3D_SUMS_56 TCONV3D_SUMS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define TCONV3D_NAMES_64 TCONV3D_NAMES_56 ", %28, %29, %30, %31"
#define TCONV3D_SUMS_64 TCONV3D_SUMS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TCONV3D_NAMES_72 TCONV3D_NAMES_64 ", %32, %33, %34, %35"
#define TCONV3D_SUMS_72 TCONV3D_SUMS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define TCONV3D_NAMES_80 TCONV3D_NAMES_72 ", %36, %37, %38, %39"
#define TCONV3D_SUMS_80 TCONV3D_SUMS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define TCONV3D_NAMES_88 TCONV3D_NAMES_80 ", %40, %41, %42, %43"
#define TCONV3D_SUMS_88 TCONV3D_SUMS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define TCONV3D_NAMES_96 TCONV3D_NAMES_88 ", %44, %45, %46, %47"
#define TCONV3D_SUMS_96 TCONV3D_SUMS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define TCONV3D_NAMES_104 TCONV3D_NAMES_96 ", %48, %49, %50, %51"
#define TCONV3D_SUMS_104 TCONV3D_SUMS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define TCONV3D_NAMES_112 TCONV3D_NAMES_104 ", %52, %53, %54, %55"
#define TCONV3D_SUMS_112 TCONV3D_SUMS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define TCONV3D_NAMES_120 TCONV3D_NAMES_112 ", %56, %57, %58, %59"
#define TCONV3D_SUMS_120 TCONV3D_SUMS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define TCONV3D_NAMES_128 TCONV3D_NAMES_120 ", %60, %61, %62, %63"
#define TCONV3D_SUMS_128 TCONV3D_SUMS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TCONV3D_NAMES_136 TCONV3D_NAMES_128 ", %64, %65, %66, %67"
#define TCONV3D_SUMS_136 TCONV3D_SUMS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define TCONV3D_NAMES_144 TCONV3D_NAMES_136 ", %68, %69, %70, %71"
#define TCONV3D_SUMS_144 TCONV3D_SUMS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define TCONV3D_NAMES_152 TCONV3D_NAMES_144 ", %72, %73, %74, %75"
#define TCONV3D_SUMS_152 TCONV3D_SUMS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define TCONV3D_NAMES_160 TCONV3D_NAMES_152 ", %76, %77, %78, %79"
#define TCONV3D_SUMS_160 TCONV3D_SUMS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define TCONV3D_NAMES_168 TCONV3D_NAMES_160 ", %80, %81, %82, %83"
#define TCONV3D_SUMS_168 TCONV3D_SUMS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define TCONV3D_NAMES_176 TCONV3D_NAMES_168 ", %84, %85, %86, %87"
#define TCONV3D_SUMS_176 TCONV3D_SUMS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define TCONV3D_NAMES_184 TCONV3D_NAMES_176 ", %88, %89, %90, %91"
#define TCONV3D_SUMS_184 TCONV3D_SUMS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define TCONV3D_NAMES_192 TCONV3D_NAMES_184 ", %92, %93, %94, %95"
#define TCONV3D_SUMS_192 TCONV3D_SUMS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define TCONV3D_NAMES_200 TCONV3D_NAMES_192 ", %96, %97, %98, %99"
#define TCONV3D_SUMS_200 TCONV3D_SUMS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define TCONV3D_NAMES_208 TCONV3D_NAMES_200 ", %100, %101, %102, %103"
#define TCONV3D_SUMS_208 TCONV3D_SUMS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define TCONV3D_NAMES_216 TCONV3D_NAMES_208 ", %104, %105, %106, %107"
#define TCONV3D_SUMS_216 TCONV3D_SUMS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define TCONV3D_NAMES_224 TCONV3D_NAMES_216 ", %108, %109, %110, %111"
#define TCONV3D_SUMS_224 TCONV3D_SUMS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define TCONV3D_NAMES_232 TCONV3D_NAMES_224 ", %112, %113, %114, %115"
#define TCONV3D_SUMS_232 TCONV3D_SUMS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define TCONV3D_NAMES_240 TCONV3D_NAMES_232 ", %116, %117, %118, %119"
#define TCONV3D_SUMS_240 TCONV3D_SUMS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define TCONV3D_NAMES_248 TCONV3D_NAMES_240 ", %120, %121, %122, %123"
#define TCONV3D_SUMS_248 TCONV3D_SUMS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define TCONV3D_NAMES_256 TCONV3D_NAMES_248 ", %124, %125, %126, %127"
#define TCONV3D_SUMS_256 TCONV3D_SUMS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// clang-format on

#define TCONV3D_ISSUE(N, OPERANDS, SHAPE, FLAGS, ...)                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" TCONV3D_NAMES_##N "}, " OPERANDS FLAGS \
               : TCONV3D_SUMS_##N                                                                       \
               : __VA_ARGS__)
#define TCONV3D_ISSUE_ANY(N, OPERANDS, A_FLAG, ...)                                          \
  if constexpr (kOperand == Operand::kTf32) {                                                \
    TCONV3D_ISSUE(N, OPERANDS, "k8.f32.tf32.tf32", ", 1, 1, 1;", __VA_ARGS__);               \
  } else if constexpr (kOperand == Operand::kFloat16) {                                      \
    TCONV3D_ISSUE(N, OPERANDS, "k16.f32.f16.f16", ", 1, 1, 1" A_FLAG ", 0;", __VA_ARGS__);   \
  } else {                                                                                   \
    TCONV3D_ISSUE(N, OPERANDS, "k16.f32.bf16.bf16", ", 1, 1, 1" A_FLAG ", 0;", __VA_ARGS__); \
  }
#define TCONV3D_MATRIX_MULTIPLY(N, A, B, C, D, E)                                                          \
  template <>                                                                                              \
  struct MatrixMultiply<N> {                                                                               \
    template <Operand kOperand>                                                                            \
    static __device__ __forceinline__ void issue(float* d, unsigned long long a, unsigned long long b) {   \
      TCONV3D_ISSUE_ANY(N, "%" #A ", %" #B, ", 0", "l"(a), "l"(b))                                         \
    }                                                                                                      \
    template <Operand kOperand>                                                                            \
    static __device__ __forceinline__ void issue(float* d, const unsigned (&a)[4], unsigned long long b) { \
      TCONV3D_ISSUE_ANY(N, "{%" #A ", %" #B ", %" #C ", %" #D "}, %" #E, "", "r"(a[0]), "r"(a[1]),         \
                        "r"(a[2]), "r"(a[3]), "l"(b))                                                      \
    }                                                                                                      \
    template <Operand kOperand>                                                                            \
    static __device__ __forceinline__ void issue_rows(float* d, unsigned long long a,                      \
                                                      unsigned long long b) {                              \
      static_assert(kOperand != Operand::kTf32, "rows of 32-bit numbers cannot be K");                     \
      if constexpr (kOperand == Operand::kFloat16) {                                                       \
        TCONV3D_ISSUE(N, "%" #A ", %" #B, "k16.f32.f16.f16", ", 1, 1, 1, 1, 1;", "l"(a), "l"(b));          \
      } else {                                                                                             \
        TCONV3D_ISSUE(N, "%" #A ", %" #B, "k16.f32.bf16.bf16", ", 1, 1, 1, 1, 1;", "l"(a), "l"(b));        \
      }                                                                                                    \
    }                                                                                                      \
  }

// clang-format off
TCONV3D_MATRIX_MULTIPLY(8, 4, 5, 6, 7, 8);
TCONV3D_MATRIX_MULTIPLY(16, 8, 9, 10, 11, 12);
TCONV3D_MATRIX_MULTIPLY(24, 12, 13, 14, 15, 16);
TCONV3D_MATRIX_MULTIPLY(32, 16, 17, 18, 19, 20);
TCONV3D_MATRIX_MULTIPLY(40, 20, 21, 22, 23, 24);
TCONV3D_MATRIX_MULTIPLY(48, 24, 25, 26, 27, 28);
TCONV3D_MATRIX_MULTIPLY(56, 28, 29, 30, 31, 32);
TCONV3D_MATRIX_MULTIPLY(64, 32, 33, 34, 35, 36);
TCONV3D_MATRIX_MULTIPLY(72, 36, 37, 38, 39, 40);
TCONV3D_MATRIX_MULTIPLY(80, 40, 41, 42, 43, 44);
TCONV3D_MATRIX_MULTIPLY(88, 44, 45, 46, 47, 48);
TCONV3D_MATRIX_MULTIPLY(96, 48, 49, 50, 51, 52);
TCONV3D_MATRIX_MULTIPLY(104, 52, 53, 54, 55, 56);
TCONV3D_MATRIX_MULTIPLY(112, 56, 57, 58, 59, 60);
TCONV3D_MATRIX_MULTIPLY(120, 60, 61, 62, 63, 64);
TCONV3D_MATRIX_MULTIPLY(128, 64, 65, 66, 67, 68);
TCONV3D_MATRIX_MULTIPLY(136, 68, 69, 70, 71, 72);
TCONV3D_MATRIX_MULTIPLY(144, 72, 73, 74, 75, 76);
TCONV3D_MATRIX_MULTIPLY(152, 76, 77, 78, 79, 80);
TCONV3D_MATRIX_MULTIPLY(160, 80, 81, 82, 83, 84);
TCONV3D_MATRIX_MULTIPLY(168, 84, 85, 86, 87, 88);
TCONV3D_MATRIX_MULTIPLY(176, 88, 89, 90, 91, 92);
TCONV3D_MATRIX_MULTIPLY(184, 92, 93, 94, 95, 96);
TCONV3D_MATRIX_MULTIPLY(192, 96, 97, 98, 99, 100);
TCONV3D_MATRIX_MULTIPLY(200, 100, 101, 102, 103, 104);
TCONV3D_MATRIX_MULTIPLY(208, 104, 105, 106, 107, 108);
TCONV3D_MATRIX_MULTIPLY(216, 108, 109, 110, 111, 112);
TCONV3D_MATRIX_MULTIPLY(224, 112, 113, 114, 115, 116);
TCONV3D_MATRIX_MULTIPLY(232, 116, 117, 118, 119, 120);
TCONV3D_MATRIX_MULTIPLY(240, 120, 121, 122, 123, 124);
TCONV3D_MATRIX_MULTIPLY(248, 124, 125, 126, 127, 128);
TCONV3D_MATRIX_MULTIPLY(256, 128, 129, 130, 131, 132);
// clang-format on

}  // namespace tconv3d::ptx

#endif
