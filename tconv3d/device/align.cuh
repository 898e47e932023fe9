// Copies a tensor of 16-bit elements, whose lines may have any length, to lines of whole vectors of 16 bytes.
// Every line of the copy ends with zeros.
//
// A thread writes some vectors of 8 elements, and loads all of them before it uses the first. The 8 elements
// of the source begin at any even address (any_address.cuh). Near the ends of the source, where an aligned
// vector could reach beyond it, elements are loaded one by one.
#pragma once

#include "any_address.cuh"

namespace tconv3d {

// Sets all but the first `count` elements of 16 bits to zero.
__device__ __forceinline__ void clear_behind(Words& words, int count) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (2 * i + 1 >= count) words.at[i] &= 2 * i < count ? 0xFFFFu : 0u;
  }
}

template <class C>
__device__ void run(const Args& args) {
  constexpr int kItems = 8, kAtOnce = C::kAtOnce;  // elements of a vector, vectors of a thread
  const auto* const source = static_cast<const unsigned char*>(args.source);
  const int start = static_cast<int>(blockIdx.x) * (C::kThreads * kAtOnce) + static_cast<int>(threadIdx.x);
  const unsigned char* from[kAtOnce];
  int count[kAtOnce];  // elements of the line from the vector's first on
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int index = start + i * C::kThreads;
    const int line = divide(index, args.by_line);
    const int column = (index - line * static_cast<int>(args.by_line.divisor)) * kItems;
    from[i] = source + 2 * (static_cast<long long>(line) * args.width + column);
    count[i] = index < args.vectors ? args.width - column : 0;
  }
  Words found[kAtOnce];
  // Vectors around an element begin at most 14 bytes before it and end at most 32 bytes behind its start.
  if (from[0] - source >= 14 && source + 2 * args.elements - from[kAtOnce - 1] >= 32) {
    TwoVectors around[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) around[i] = load_around(from[i]);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      found[i] = select<2>(around[i], offset_in_vector(from[i]));
      clear_behind(found[i], count[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) found[i] = load_elements<2>(from[i], count[i]);
  }
  auto* const target = static_cast<unsigned*>(args.target) + 4 * static_cast<long long>(start);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    if (start + i * C::kThreads < args.vectors) store_vector(target + 4 * i * C::kThreads, found[i]);
  }
}

}  // namespace tconv3d
