// Instructions of every GPU since Ampere as functions: numbers, shared and global memory, asynchronous copies
// and warp matrix products. Each function is one instruction, or one idiom, with a name. Inline assembly is
// in this file and in ptx_hopper.cuh alone. On the CPU the emulator provides the same functions
// (emulator/include/emulated_ptx.h).
#pragma once

#ifdef TCONV3D_EMULATOR
#include "emulated_ptx.h"
#else

namespace tconv3d::ptx {

__device__ __forceinline__ float bits_to_float(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned float_to_bits(float value) { return __float_as_uint(value); }

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short float_to_half(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ unsigned short float_to_bfloat16(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Converts two floats to two 16-bit numbers in one word, the first in its low half.
__device__ __forceinline__ unsigned floats_to_halves(float first, float second) {
  unsigned bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

__device__ __forceinline__ unsigned floats_to_bfloat16s(float first, float second) {
  unsigned bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// Returns the larger number, or NaN if either is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
  return larger;
}

// Returns the smaller number, or NaN if either is NaN.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(a), "f"(b));
  return smaller;
}

// Returns 2^x with a relative error of at most 2^-22, or zero if that is below 2^-126. Without this zero it
// would take three more instructions.
__device__ __forceinline__ float power_of_two(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// Computes total += scale * term and sets `term` to the rounding error, limited to finite values, so that an
// infinite total stays infinite. One block of assembly keeps few registers live. `min.xorsign` needs compute
// capability 8.6.
__device__ __forceinline__ void add_keeping_rest(float& total, float& term, float scale) {
  asm volatile(
      "{ .reg .f32 sum, rest;\n"
      "fma.rn.f32 sum, %1, %2, %0;\n"
      "sub.rn.f32 rest, %0, sum;\n"
      "fma.rn.f32 rest, %1, %2, rest;\n"
      "min.xorsign.abs.f32 %1, rest, 0f73800000;\n"  // 2^104 limits the rounding error
      "mov.f32 %0, sum; }"
      : "+f"(total), "+f"(term)
      : "f"(scale));
}

// Computes the same as add_keeping_rest on every GPU since compute capability 8.0, by one instruction more.
__device__ __forceinline__ void add_with_rest(float& total, float& term, float scale) {
  asm volatile(
      "{ .reg .f32 sum, rest, size;\n"
      "fma.rn.f32 sum, %1, %2, %0;\n"
      "sub.rn.f32 rest, %0, sum;\n"
      "fma.rn.f32 rest, %1, %2, rest;\n"
      "abs.f32 size, rest;\n"
      "min.f32 size, size, 0f73800000;\n"  // 2^104 limits the rounding error
      "copysign.f32 %1, rest, size;\n"
      "mov.f32 %0, sum; }"
      : "+f"(total), "+f"(term)
      : "f"(scale));
}

// ---- Shared memory, by addresses in the shared state space.

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared(unsigned address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
// Loads 8 bytes each time it is called: the compiler does not keep them in registers for a later call.
__device__ __forceinline__ uint2 load_shared_again(unsigned address) {
  uint2 value;
  asm volatile("ld.volatile.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}
__device__ __forceinline__ void store_shared(unsigned address, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

// Stores if the condition holds, without a branch.
__device__ __forceinline__ void store_shared_if(bool condition, unsigned address, unsigned value) {
  asm volatile(
      "{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %2, 0;\n"
      "@condition st.shared.b32 [%0], %1; }"
      :
      : "r"(address), "r"(value), "r"(condition ? 1u : 0u)
      : "memory");
}
__device__ __forceinline__ void store_shared_if(bool condition, unsigned address, unsigned short value) {
  asm volatile(
      "{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %2, 0;\n"
      "@condition st.shared.b16 [%0], %1; }"
      :
      : "r"(address), "h"(value), "r"(condition ? 1u : 0u)
      : "memory");
}

// Returns the low halves of two words, or the high halves, as one word.
__device__ __forceinline__ unsigned low_halves(unsigned first, unsigned second) {
  unsigned result;
  asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(result) : "r"(first), "r"(second));
  return result;
}
__device__ __forceinline__ unsigned high_halves(unsigned first, unsigned second) {
  unsigned result;
  asm("prmt.b32 %0, %1, %2, 0x7632;" : "=r"(result) : "r"(first), "r"(second));
  return result;
}

// Drops the lowest `bits` bits (at most 32) of a word and fills up with the lowest bits of the word after it.
__device__ __forceinline__ unsigned shifted(unsigned word, unsigned after, unsigned bits) {
  unsigned result;
  asm("shf.r.clamp.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(word), "r"(after), "r"(bits));
  return result;
}

// ---- Stores to global memory. The kernel must not read what it has written by these functions.

__device__ __forceinline__ void store_global(void* address, uint4 value) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}
__device__ __forceinline__ void store_global(void* address, uint2 value) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(value.x), "r"(value.y));
}
__device__ __forceinline__ void store_global(void* address, unsigned value) {
  asm volatile("st.global.b32 [%0], %1;" : : "l"(__cvta_generic_to_global(address)), "r"(value));
}
__device__ __forceinline__ void store_global(void* address, unsigned short value) {
  asm volatile("st.global.b16 [%0], %1;" : : "l"(__cvta_generic_to_global(address)), "h"(value));
}

// Stores if the condition holds, without a branch.
__device__ __forceinline__ void store_global_if(bool condition, void* address, uint4 value) {
  asm volatile(
      "{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %5, 0;\n"
      "@condition st.global.v4.b32 [%0], {%1, %2, %3, %4}; }"
      :
      : "l"(__cvta_generic_to_global(address)), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w),
        "r"(condition ? 1u : 0u));
}
__device__ __forceinline__ void store_global_if(bool condition, void* address, uint2 value) {
  asm volatile(
      "{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %3, 0;\n"
      "@condition st.global.v2.b32 [%0], {%1, %2}; }"
      :
      : "l"(__cvta_generic_to_global(address)), "r"(value.x), "r"(value.y), "r"(condition ? 1u : 0u));
}
__device__ __forceinline__ void store_global_if(bool condition, void* address, unsigned value) {
  asm volatile(
      "{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %2, 0;\n"
      "@condition st.global.b32 [%0], %1; }"
      :
      : "l"(__cvta_generic_to_global(address)), "r"(value), "r"(condition ? 1u : 0u));
}

// ---- Loads of global memory that nobody writes while the kernel runs. The compiler may move them.

// Loads if the condition holds, without a branch; otherwise the value stays, and the address may be any.
__device__ __forceinline__ void load_constant_if(bool condition, const void* address, uint4& value) {
  asm("{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %5, 0;\n"
      "@condition ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
      : "l"(__cvta_generic_to_global(address)), "r"(condition ? 1u : 0u));
}
__device__ __forceinline__ void load_constant_if(bool condition, const void* address, uint2& value) {
  asm("{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %3, 0;\n"
      "@condition ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
      : "+r"(value.x), "+r"(value.y)
      : "l"(__cvta_generic_to_global(address)), "r"(condition ? 1u : 0u));
}
__device__ __forceinline__ void load_constant_if(bool condition, const void* address, unsigned& value) {
  asm("{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %2, 0;\n"
      "@condition ld.global.nc.b32 %0, [%1]; }"
      : "+r"(value)
      : "l"(__cvta_generic_to_global(address)), "r"(condition ? 1u : 0u));
}
__device__ __forceinline__ void load_constant_if(bool condition, const void* address, unsigned short& value) {
  asm("{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %2, 0;\n"
      "@condition ld.global.nc.b16 %0, [%1]; }"
      : "+h"(value)
      : "l"(__cvta_generic_to_global(address)), "r"(condition ? 1u : 0u));
}

// ---- Streaming accesses to global memory (.cs) for data not needed again soon: caches evict it first.

__device__ __forceinline__ void store_passing(void* address, uint4 value) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w));
}
__device__ __forceinline__ void store_passing(void* address, uint2 value) {
  asm volatile("st.global.cs.v2.b32 [%0], {%1, %2};"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(value.x), "r"(value.y));
}
__device__ __forceinline__ void store_passing(void* address, unsigned value) {
  asm volatile("st.global.cs.b32 [%0], %1;" : : "l"(__cvta_generic_to_global(address)), "r"(value));
}
__device__ __forceinline__ void store_passing(void* address, unsigned short value) {
  asm volatile("st.global.cs.b16 [%0], %1;" : : "l"(__cvta_generic_to_global(address)), "h"(value));
}

__device__ __forceinline__ void load_passing(const void* address, uint4& value) {
  asm volatile("ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(address)));
}
__device__ __forceinline__ void load_passing(const void* address, uint2& value) {
  asm volatile("ld.global.cs.v2.b32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(__cvta_generic_to_global(address)));
}
__device__ __forceinline__ void load_passing(const void* address, unsigned& value) {
  asm volatile("ld.global.cs.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(address)));
}
__device__ __forceinline__ void load_passing(const void* address, unsigned short& value) {
  asm volatile("ld.global.cs.b16 %0, [%1];" : "=h"(value) : "l"(__cvta_generic_to_global(address)));
}

// ---- Words in global memory by which blocks communicate. All of them are all ones before the launch.

// Adds one to a counter and returns its new value: 0 for the first caller.
__device__ __forceinline__ unsigned take_turn(unsigned* turns) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(turns)));
  return before + 1;
}

// Takes a turn as take_turn does if fewer than `end` turns have been taken; otherwise returns `end`.
__device__ __forceinline__ unsigned take_turn_below(unsigned* turns, unsigned end) {
  unsigned last = *static_cast<volatile unsigned*>(turns);
  while (last + 1 < end) {
    const unsigned before = last;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;"
                 : "=r"(last)
                 : "l"(__cvta_generic_to_global(turns)), "r"(before), "r"(before + 1)
                 : "memory");
    if (last == before) return before + 1;
  }
  return end;
}

__device__ __forceinline__ unsigned turns_taken(const unsigned* turns) {
  unsigned last;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(last) : "l"(__cvta_generic_to_global(turns)));
  return last + 1;
}

// A word is written and read as a whole, so that no other memory access needs an order.
__device__ __forceinline__ void write_word(void* address, unsigned long long word) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" : : "l"(__cvta_generic_to_global(address)), "l"(word));
}
__device__ __forceinline__ unsigned long long look_at_word(const void* address) {
  unsigned long long word;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(__cvta_generic_to_global(address)));
  return word;
}
__device__ __forceinline__ unsigned long long read_when_written(const void* address) {
  unsigned long long word;
  do {
    word = look_at_word(address);
  } while (word == ~0ull);
  return word;
}

// ---- A number in shared memory that one thread of the block writes and another polls.

__device__ __forceinline__ void write_shared(int* address, int value) {
  *static_cast<volatile int*>(address) = value;
}
__device__ __forceinline__ int read_shared(const int* address) {
  return *static_cast<const volatile int*>(address);
}

// ---- Programmatic dependent launch (compute capability 9.0 and up).

// The next launch, if it may overlap, begins when all blocks have called this or have ended.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Waits until the previous launch, if this one overlaps it, has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_launch() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- Warp matrix instructions.

enum class Operand { kTf32, kFloat16, kBFloat16 };

// Loads four matrices of 8 rows of 16 bytes from shared memory: row r of matrix m lies at the 16-byte aligned
// address of lane 8*m + r. Lane 4*r + t gets word t of row r of matrix m in words[m].
__device__ __forceinline__ void load_matrices(unsigned (&words)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}

// Loads two matrices of 8 rows of 16 bytes: row r of matrix m lies at the address of lane 8*m + r.
__device__ __forceinline__ void load_matrices(unsigned (&words)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(address)
               : "memory");
}

// Multiplies 16 rows of A with 8 columns of B over 32 bytes of K, and adds to `sum`. With g = lane/4 and t =
// lane%4, a lane has rows g and g + 8 of A at word t of K (a[0], a[1]) and at word t + 4 (a[2], a[3]), column
// g of B at words t and t + 4, and the sums of rows g and g + 8 at columns 2t and 2t + 1. A word is a TF32
// number or two 16-bit numbers.
template <Operand kOperand>
__device__ __forceinline__ void warp_multiply(float (&sum)[4], const unsigned (&a)[4],
                                              const unsigned (&b)[2]) {
  if constexpr (kOperand == Operand::kTf32) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (kOperand == Operand::kFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Multiplies 16 rows of A with 8 columns of B over 16 bytes of K, and adds to `sum`. A lane has word t of K
// of rows g and g + 8 of A and of column g of B.
template <Operand kOperand>
__device__ __forceinline__ void warp_multiply(float (&sum)[4], const unsigned (&a)[2],
                                              const unsigned (&b)[1]) {
  if constexpr (kOperand == Operand::kTf32) {
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  } else if constexpr (kOperand == Operand::kFloat16) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
  }
}

// Stores four transposed 8x8 matrices of 16-bit numbers. Lane 4*c + q has rows 2*q and 2*q + 1 of column c of
// matrix m in word m; row r of matrix m goes to the 16-byte aligned address that lane 8*m + r gives.
__device__ __forceinline__ void store_transposed(unsigned address, uint4 words) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

// Makes the compiler keep a value in a register, instead of loading it again where it is needed.
__device__ __forceinline__ void keep(float& value) { asm volatile("" : "+f"(value)); }

// Makes the compiler compute what depends on a value after this point again, instead of keeping what it has
// computed before, and not earlier.
__device__ __forceinline__ void renew(int& value) { asm volatile("" : "+r"(value)); }
__device__ __forceinline__ void renew(long long& value) { asm volatile("" : "+l"(value)); }

// Prefetches the cache line at this address into L2.
__device__ __forceinline__ void call_into_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Prefetches the cache line at this address into L2 if the condition holds; otherwise it may be any address.
__device__ __forceinline__ void call_into_l2_if(bool condition, const void* address) {
  asm volatile(
      "{ .reg .pred condition;\n"
      "setp.ne.u32 condition, %1, 0;\n"
      "@condition prefetch.global.L2 [%0]; }" ::"l"(__cvta_generic_to_global(address)),
      "r"(condition ? 1u : 0u));
}

// Loads 16 bytes that the kernel does not write, and prefetches 256 bytes around them into L2.
__device__ __forceinline__ uint4 load_calling(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L2::256B.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(__cvta_generic_to_global(address)));
  return value;
}

// ---- Asynchronous copies (cp.async): 1, 2 or 4 words from global to shared memory.

// Copies words, or writes zeros if not `inside`; `from` must be a valid address even then.
template <int kWords>
__device__ __forceinline__ void copy_words(void* to, const void* from, bool inside) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(4 * kWords), "r"(inside ? 4 * kWords : 0)
               : "memory");
}

// Copies words that are read only once, or writes zeros if not `inside`: copies of 16 bytes bypass L1.
template <int kWords>
__device__ __forceinline__ void copy_words_once(void* to, const void* from, bool inside) {
  if constexpr (kWords == 4) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(inside ? 16 : 0)
                 : "memory");
  } else {
    copy_words<kWords>(to, from, inside);
  }
}

// Copies the first `bytes` of 16 bytes, at most 16, and writes zeros behind them: other bytes are not read.
__device__ __forceinline__ void copy_beginning(void* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
}

// Copies words, or writes zeros if not `inside`: copies of 16 bytes prefetch their 128-byte line into L2.
template <int kWords>
__device__ __forceinline__ void copy_words_of_line(void* to, const void* from, bool inside) {
  if constexpr (kWords == 4) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(inside ? 16 : 0)
                 : "memory");
  } else {
    copy_words<kWords>(to, from, inside);
  }
}

// Copies 16 bytes, or writes zeros if `inside` is 0: then nothing is read, and `from` may be any address.
__device__ __forceinline__ void copy_piece(unsigned to, const void* from, unsigned inside) {
  asm volatile(
      "{ .reg .pred outside; setp.eq.u32 outside, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, outside; "
      "}" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(inside)
      : "memory");
}

// Copies 4 bytes, or writes zero if `inside` is 0: then nothing is read, and `from` may be any address.
__device__ __forceinline__ void copy_word(unsigned to, const void* from, unsigned inside) {
  asm volatile(
      "{ .reg .pred outside; setp.eq.u32 outside, %2, 0; cp.async.ca.shared.global [%0], [%1], 4, outside; "
      "}" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(inside)
      : "memory");
}

// Copies the first `bytes` of 16 bytes that are read only once, and writes zeros behind them: other bytes are
// not read. The copy bypasses L1 and prefetches the 128-byte line into L2.
__device__ __forceinline__ void copy_beginning_once(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending committed groups of this thread's asynchronous copies are in flight.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Barriers in shared memory (mbarrier). `count` arrivals complete a phase; a waiter names the parity of
// the phase that it waits for.

__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Arrives at a barrier when all asynchronous copies that this thread has issued are complete.
__device__ __forceinline__ void copy_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for a phase by looking again and again, on every GPU. From Hopper on, barrier_wait() sleeps
// meanwhile.
__device__ __forceinline__ void barrier_poll(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "nanosleep.u32 20;\n"  // leaves the scheduler to other warps for 20 ns
      "bra again;\n"
      "finished:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace tconv3d::ptx

#endif
