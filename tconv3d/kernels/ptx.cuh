// The one file with inline assembly: each function is one instruction (or one idiom) with a name.
// On the CPU the emulator provides the same functions (emulator/include/emulated_ptx.h).
#pragma once

#ifdef TCONV3D_EMULATOR
#include "emulated_ptx.h"
#else

namespace tconv3d::ptx {

__device__ __forceinline__ float bits_to_float(unsigned bits) { return __uint_as_float(bits); }

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

}  // namespace tconv3d::ptx

#endif
