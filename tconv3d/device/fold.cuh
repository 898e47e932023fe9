// Writes the outputs of an up-convolution whose kernel equals its stride as channels of its input positions
// (fold), or back (kBack).
//
// Each output belongs to one position and one tap. The folded tensor has, for every position, a channel for
// each pair of an output channel and a tap, so the layer is a convolution with kernel 1 on it. A thread moves
// the outputs of one position, one channel and one line of taps along w (a run): neighbours in memory.
// Neighbouring threads have neighbouring positions. Values are copied as bits.
#pragma once

#include "common.cuh"

namespace tconv3d {

// The offsets of a run in both tensors, in elements.
struct Run {
  long long whole, folded;
};

__device__ __forceinline__ Run run_of(const Args& args, int index, int length) {
  const int by_position = divide(index, args.by_positions);
  const int position = index - by_position * static_cast<int>(args.by_positions.divisor);
  const int by_taps = divide(by_position, args.by_lines);
  const int taps = by_position - by_taps * static_cast<int>(args.by_lines.divisor);
  const int n = divide(by_taps, args.by_channels);
  const int channel = by_taps - n * static_cast<int>(args.by_channels.divisor);
  const int line = divide(position, args.by_w), w = position - line * static_cast<int>(args.by_w.divisor);
  const int d = divide(line, args.by_h), h = line - d * static_cast<int>(args.by_h.divisor);
  const int tap_d = divide(taps, args.by_kernel_h);
  const int tap_h = taps - tap_d * static_cast<int>(args.by_kernel_h.divisor);
  Run run;
  run.whole = n * args.whole_strides.n + channel * args.whole_strides.c +
              (static_cast<long long>(d) * args.kernel_d + tap_d) * args.whole_strides.d +
              (static_cast<long long>(h) * args.by_kernel_h.divisor + tap_h) * args.whole_strides.h +
              static_cast<long long>(w) * length * args.whole_strides.w;
  run.folded = n * args.item + channel * args.channel + static_cast<long long>(taps) * length * args.tap +
               position * args.position;
  return run;
}

template <class C>
__device__ void run(const Args& args) {
  using Word = typename C::Word;
  constexpr int kAtOnce = C::kAtOnce;  // elements that are loaded and stored at once
  static_assert(C::kRun % kAtOnce == 0, "whole vectors");
  const long long index = static_cast<long long>(blockIdx.x) * C::kThreads + threadIdx.x;
  if (index >= args.runs) return;
  const Run at = run_of(args, static_cast<int>(index), C::kRun);
  const Word* from = static_cast<const Word*>(args.source) + (C::kBack ? at.folded : at.whole);
  Word* to = static_cast<Word*>(args.target) + (C::kBack ? at.whole : at.folded);
  const long long read = C::kBack ? args.tap : args.whole_strides.w;
  const long long write = C::kBack ? args.whole_strides.w : args.tap;
#pragma unroll 4
  for (int first = 0; first < C::kRun; first += kAtOnce) {
    Vector<Word, kAtOnce> words;
    if constexpr (C::kReadVectors) {
      words = load_vector<kAtOnce>(from + first);
    } else {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) words.at[k] = from[(first + k) * read];
    }
    if constexpr (C::kWriteVectors) {
      store_vector(to + first, words);
    } else {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) to[(first + k) * write] = words.at[k];
    }
  }
}

}  // namespace tconv3d
