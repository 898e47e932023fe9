// Loads 16 bytes that begin at any element: the two aligned vectors that contain them are loaded, and words
// and half words are selected among theirs.
#pragma once

#include "common.cuh"

namespace tconv3d {

using Words = Vector<unsigned, 4>;  // 16 bytes

struct TwoVectors {
  Words low, high;
};

// Returns the offset of an address in its aligned vector, in bytes.
__device__ __forceinline__ unsigned offset_in_vector(const void* address) {
  return static_cast<unsigned>(reinterpret_cast<unsigned long long>(address)) & 15u;
}

// Loads the aligned vector that an address lies in and the next one.
__device__ __forceinline__ TwoVectors load_around(const unsigned char* address) {
  const auto* const aligned = reinterpret_cast<const unsigned*>(address - offset_in_vector(address));
  return {load_vector<4>(aligned), load_vector<4>(aligned + 4)};
}

// Returns the 16 bytes that begin `offset` bytes after the start of two vectors; `offset` is less than 16 and
// a multiple of kItemBytes, which is 2 or 4.
template <int kItemBytes>
__device__ __forceinline__ Words select(const TwoVectors& from, unsigned offset) {
  unsigned by_two[6], by_one[5];
  Words found;
#pragma unroll
  for (int i = 0; i < 6; ++i) {
    const unsigned word = i < 4 ? from.low.at[i % 4] : from.high.at[i % 4];
    const unsigned other = i < 2 ? from.low.at[i + 2] : from.high.at[i - 2];
    by_two[i] = (offset & 8u) != 0 ? other : word;
  }
#pragma unroll
  for (int i = 0; i < 5; ++i) by_one[i] = (offset & 4u) != 0 ? by_two[i + 1] : by_two[i];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    found.at[i] = kItemBytes == 4 ? by_one[i] : ptx::shifted(by_one[i], by_one[i + 1], offset % 4 * 8);
  return found;
}

// Loads the first `count` elements of 2 or 4 bytes from an address on, one by one, and zeros for the others.
template <int kItemBytes>
__device__ __forceinline__ Words load_elements(const unsigned char* address, int count) {
  Words found;
  if constexpr (kItemBytes == 4) {
    const auto* const from = reinterpret_cast<const unsigned*>(address);
#pragma unroll
    for (int i = 0; i < 4; ++i) found.at[i] = i < count ? from[i] : 0u;
  } else {
    const auto* const from = reinterpret_cast<const unsigned short*>(address);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned low = 2 * i < count ? from[2 * i] : 0u, high = 2 * i + 1 < count ? from[2 * i + 1] : 0u;
      found.at[i] = low | high << 16;
    }
  }
  return found;
}

}  // namespace tconv3d
