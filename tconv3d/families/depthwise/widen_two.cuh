// Converts one of two neighbours of 16 bits, which were loaded as one word, to float32. A bfloat16 number
// takes one instruction in either half; the compiler takes two for the upper half if it is loaded as 16 bits.
#pragma once

#include "common.cuh"

namespace tconv3d {

template <class Scalar>
struct Widen;
template <>
struct Widen<Half> {
  static __device__ __forceinline__ float of(unsigned two, bool second) {
    return ptx::half_to_float(static_cast<unsigned short>(second ? two >> 16 : two));
  }
};
template <>
struct Widen<BFloat16> {
  static __device__ __forceinline__ float of(unsigned two, bool second) {
    return ptx::bits_to_float(second ? two & 0xFFFF0000u : two << 16);
  }
};

}  // namespace tconv3d
