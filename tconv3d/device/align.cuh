// Copies a tensor of 16-bit elements, whose lines may have any length, to lines of whole vectors of 16 bytes.
// Every line of the copy ends with zeros.
//
// A thread writes vectors of 8 elements. The 8 elements of the source begin at any even address, so the
// thread loads the two aligned vectors that contain them and selects among their words and half words. Near
// the ends of the source, where an aligned vector would reach beyond it, elements are loaded one by one.
#pragma once

#include "common.cuh"

namespace tconv3d {

struct AlignedLines {
  static constexpr int kItems = 8, kWords = 4;  // 16-bit elements and words of a vector

  // The words of two neighbouring vectors, from `shift` bytes behind their start on.
  static __device__ __forceinline__ Vector<unsigned, kWords> select(const unsigned (&words)[2 * kWords],
                                                                    unsigned shift) {
    unsigned by_two[6], by_one[5];
#pragma unroll
    for (int i = 0; i < 6; ++i) by_two[i] = (shift & 8) != 0 ? words[i + 2] : words[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) by_one[i] = (shift & 4) != 0 ? by_two[i + 1] : by_two[i];
    Vector<unsigned, kWords> found;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      found.at[i] = (shift & 2) != 0 ? by_one[i] >> 16 | by_one[i + 1] << 16 : by_one[i];
    }
    return found;
  }

  // The 8 elements from `first` on, of which the last may lie outside the source or in the next line.
  static __device__ __forceinline__ Vector<unsigned, kWords> load(const unsigned short* source,
                                                                  long long first, long long elements) {
    const unsigned short* const at = source + first;
    const unsigned shift = static_cast<unsigned>(reinterpret_cast<unsigned long long>(at) % 16);
    const long long before = shift / 2;  // elements from the first aligned vector's start on
    if (first >= before && first - before + 2 * kItems <= elements) {
      const unsigned* const aligned = reinterpret_cast<const unsigned*>(at - before);
      const auto low = load_vector<kWords>(aligned), high = load_vector<kWords>(aligned + kWords);
      unsigned words[2 * kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[i] = low.at[i];
        words[i + kWords] = high.at[i];
      }
      return select(words, shift);
    }
    Vector<unsigned, kWords> found;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const unsigned low = first + 2 * i < elements ? at[2 * i] : 0u;
      const unsigned high = first + 2 * i + 1 < elements ? at[2 * i + 1] : 0u;
      found.at[i] = low | high << 16;
    }
    return found;
  }

  // Sets all but the first `count` elements to zero.
  static __device__ __forceinline__ void clear(Vector<unsigned, kWords>& words, int count) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (2 * i + 1 >= count) words.at[i] &= 2 * i < count ? 0xFFFFu : 0u;
    }
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Lines = AlignedLines;
  const unsigned short* const source = static_cast<const unsigned short*>(args.source);
  const int start = static_cast<int>(blockIdx.x) * (C::kThreads * C::kAtOnce) + static_cast<int>(threadIdx.x);
  Vector<unsigned, Lines::kWords> found[C::kAtOnce];
#pragma unroll
  for (int i = 0; i < C::kAtOnce; ++i) {
    const int index = start + i * C::kThreads;
    if (index >= args.vectors) continue;
    const int line = divide(index, args.by_line);
    const int column = (index - line * static_cast<int>(args.by_line.divisor)) * Lines::kItems;
    found[i] = Lines::load(source, static_cast<long long>(line) * args.width + column, args.elements);
    Lines::clear(found[i], args.width - column);
  }
#pragma unroll
  for (int i = 0; i < C::kAtOnce; ++i) {
    const int index = start + i * C::kThreads;
    if (index >= args.vectors) continue;
    store_vector(static_cast<unsigned*>(args.target) + static_cast<long long>(index) * Lines::kWords,
                 found[i]);
  }
}

}  // namespace tconv3d
