// Writes the operands with which unfolded_products.cuh computes the gradients of a small layer as two plain
// matrix products: panels of 32 words of every row, rounded to TF32. A row of a panel is 128 bytes, swizzled
// by its index modulo 8, so that rows from any multiple of 8 on can be copied as one run of memory.
//
//   unfolded dy  rows q, words (co, tap): dy[co][stride*q + tap*dilation - padding]
//   x            rows ci, words q; of every 8 words the even-numbered ones come first
//
// The weight is read in its memory layout. A term is one (co, tap). A block unfolds kChannels output channels
// for a slice of the positions of a batch item: some planes, or some lines of one plane. Shared memory holds
// an image, all outputs that the slice reaches, with zeros outside dy. The offset of an element in the image
// is the sum of an offset of q and one of the term. Positions of a batch item are padded with zeros to a
// multiple of 8; the positions of all items and the terms are padded to whole panels. Partial sums of the
// bias gradient are computed too: each output is counted by one slice. Other blocks write x.
//
// A launch does this for a band of the volume: some batch items, or some planes of one.
#pragma once

#include "operands.cuh"

namespace tconv3d {

template <class C>
struct Unfold {
  static constexpr int kTaps = C::kKernelD * C::kKernelH * C::kKernelW;
  static constexpr int kTerms = C::kOut * kTaps, kTermPieces = (kTerms + 31) / 32 * 8;
  static constexpr int kOwnTerms = C::kChannels * kTaps;  // terms per block
  static constexpr int kGroups = (C::kOut + C::kChannels - 1) / C::kChannels;
  static constexpr int kWarps = C::kThreads / 32;
  static constexpr int kRest = 40;  // upper bound of the padding of positions and of terms
  static constexpr int kTermTable = kOwnTerms + kRest;
  static_assert(kOwnTerms % 4 == 0, "whole pieces");

  const Args& args;
  const int n, first_out, slice;
  const bool last_group;
  int own_positions;
  int* terms;   // offset of each term in the image; negative if there is no such term
  int* places;  // offset of each position in the image; negative if there is no such position
  unsigned* image;

  __device__ __forceinline__ Unfold(const Args& args, int n, int group, int slice)
      : args(args),
        n(n),
        first_out(group * C::kChannels),
        slice(slice),
        last_group(group == kGroups - 1),
        terms(dynamic_shared<int>()),
        places(terms + kTermTable) {
    const int whole = args.lines * static_cast<int>(args.by_in_w.divisor);
    own_positions = min(whole, args.positions - slice * whole);
    image = reinterpret_cast<unsigned*>(places + whole + kRest);
  }

  __device__ __forceinline__ int image_size() const { return args.image.d * args.image.h * args.image.w; }
  // Words from channel to channel in the image: odd, so that adjacent channels are in different banks.
  __device__ __forceinline__ int channel_pitch() const { return image_size() | 1; }

  __device__ __forceinline__ void prepare() const {
    const int size = channel_pitch();
    for (int i = threadIdx.x; i < kTermTable; i += C::kThreads) {
      const int channel = i / kTaps, tap = i % kTaps;
      const int kw = tap % C::kKernelW, kh = tap / C::kKernelW % C::kKernelH,
                kd = tap / (C::kKernelW * C::kKernelH);
      const bool exists = channel < C::kChannels && first_out + channel < C::kOut;
      const int line = kd * C::kDilationD * args.image.h + kh * C::kDilationH;
      terms[i] = exists ? channel * size + line * args.image.w + kw * C::kDilationW : -1;
    }
    const int end = args.lines * static_cast<int>(args.by_in_w.divisor) + kRest;
    for (int i = threadIdx.x; i < end; i += C::kThreads) {
      const int line = divide(i, args.by_in_w), plane = divide(line, args.by_in_h);
      const int w = i - line * static_cast<int>(args.by_in_w.divisor);
      const int h = line - plane * static_cast<int>(args.by_in_h.divisor);
      const int at = (plane * C::kStrideD * args.image.h + h * C::kStrideH) * args.image.w + w * C::kStrideW;
      places[i] = i < own_positions ? at : -1;
    }
  }

  // Copies dy into the image. A thread computes an address once for all channels, and all copies are in
  // flight at once.
  __device__ __forceinline__ void copy() const {
    const int size = image_size(), first_line = args.first_line + slice * args.lines,
              first_plane = divide(first_line, args.by_in_h);
    const int first_d = first_plane * C::kStrideD - C::kPaddingD;
    const int first_h =
        (first_line - first_plane * static_cast<int>(args.by_in_h.divisor)) * C::kStrideH - C::kPaddingH;
    const long long outputs = static_cast<long long>(args.output.d) * args.output.h * args.output.w;
    const float* const dy = static_cast<const float*>(args.dy) +
                            (static_cast<long long>(args.first_item + n) * C::kOut + first_out) * outputs;
    for (int i = threadIdx.x; i < size; i += C::kThreads) {
      const int line = divide(i, args.by_image_w), plane = divide(line, args.by_image_h);
      const int w = i - line * args.image.w - C::kPaddingW, h = line - plane * args.image.h + first_h;
      const int d = plane + first_d;
      const bool inside =
          0 <= d && d < args.output.d && 0 <= h && h < args.output.h && 0 <= w && w < args.output.w;
      const float* const from = dy + (inside ? (d * args.output.h + h) * args.output.w + w : 0);
#pragma unroll
      for (int channel = 0; channel < C::kChannels; ++channel) {
        if (C::kOut % C::kChannels != 0 && first_out + channel >= C::kOut) break;
        ptx::copy_words<1>(image + channel * channel_pitch() + i, from + channel * outputs, inside);
      }
    }
    ptx::copy_commit();
  }

  // Every thread rounds the words that it has copied, and sums the outputs that this slice counts for the
  // bias gradient.
  __device__ __forceinline__ void round() const {
    const int size = image_size(), in_h = static_cast<int>(args.by_in_h.divisor);
    const bool planes = args.lines >= in_h;  // the slice is whole planes, else lines of one plane
    const bool last_h = planes || (slice + 1) * args.lines % in_h == 0;
    const bool last_d = args.last && slice >= args.slices - (planes ? 1 : in_h / args.lines);
    const int end_h = last_h ? args.image.h : C::kPaddingH + args.lines * C::kStrideH;
    const int end_d = last_d ? args.image.d : C::kPaddingD + (planes ? args.lines / in_h : 1) * C::kStrideD;
    const int begin = C::kPaddingD * args.image.h * args.image.w, end = end_d * args.image.h * args.image.w;
    float sums[C::kChannels] = {};
    ptx::copy_wait<0>();
    for (int i = threadIdx.x; i < size; i += C::kThreads) {
      bool counts = C::kBias && begin <= i && i < end;
      if (C::kBias && !planes) {
        const int line = divide(i, args.by_image_w), h = line - divide(line, args.by_image_h) * args.image.h;
        counts = counts && C::kPaddingH <= h && h < end_h;
      }
#pragma unroll
      for (int channel = 0; channel < C::kChannels; ++channel) {
        if (C::kOut % C::kChannels != 0 && first_out + channel >= C::kOut) break;
        unsigned& own = image[channel * channel_pitch() + i];
        const float value = ptx::bits_to_float(own);
        if (counts) sums[channel] += value;
        own = OperandOf<float>::bits(value);
      }
    }
    if constexpr (C::kBias) add_up(sums);
  }

  // Adds the sums of all threads in a fixed order, so that the result is reproducible.
  __device__ __forceinline__ void add_up(float (&sums)[C::kChannels]) const {
    __shared__ float of_warps[kWarps][C::kChannels];
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int channel = 0; channel < C::kChannels; ++channel) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        sums[channel] += __shfl_xor_sync(0xFFFFFFFFu, sums[channel], step);
      }
      if (lane == 0) of_warps[warp][channel] = sums[channel];
    }
    __syncthreads();
    const int channel = static_cast<int>(threadIdx.x);
    if (channel >= C::kChannels || first_out + channel >= C::kOut) return;
    float sum = 0.0f;
    for (int i = 0; i < kWarps; ++i) sum += of_warps[i][channel];
    constexpr int kPitch = (C::kOut + 3) / 4 * 4;
    const int part = args.first_slice + n * args.slices + slice;
    static_cast<float*>(args.bias_parts)[part * kPitch + first_out + channel] = sum;
  }

  // Writes the panels: a thread has one piece (four terms) and loops over positions.
  __device__ __forceinline__ void write() const {
    const int first_piece = first_out * kTaps / 4,
              count = last_group ? kTermPieces - first_piece : kOwnTerms / 4;
    const int first = n * args.pitch + slice * args.lines * static_cast<int>(args.by_in_w.divisor);
    const int end = slice < args.slices - 1 ? first + own_positions
                    : n < args.batch - 1    ? (n + 1) * args.pitch
                                            : args.panel_rows;
    const int at_once = count < C::kThreads ? count : C::kThreads;
    const int thread = static_cast<int>(threadIdx.x);
    const int walker = thread / at_once, walkers = C::kThreads / at_once;
    if (walker >= walkers) return;
    for (int piece = thread % at_once; piece < count; piece += at_once) {
      int at[4];
      unsigned mask[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int place = terms[4 * piece + e];
        at[e] = place < 0 ? 0 : place;
        mask[e] = place < 0 ? 0u : ~0u;
      }
      const int which = (first_piece + piece) % 8;
      unsigned* const to = static_cast<unsigned*>(args.position_panels) +
                           static_cast<long long>((first_piece + piece) / 8) * args.panel_rows * 32;
#pragma unroll 4
      for (int row = first + walker; row < end; row += walkers) {
        const int place = places[row - first];
        uint4 words{};
        if (place >= 0) {
          const unsigned* const from = image + place;
          words = {from[at[0]] & mask[0], from[at[1]] & mask[1], from[at[2]] & mask[2],
                   from[at[3]] & mask[3]};
        }
        ptx::store_global(to + row * 32 + (which ^ (row % 8)) * 4, words);
      }
    }
  }

  __device__ __forceinline__ void run() const {
    copy();
    prepare();
    round();
    __syncthreads();
    write();
  }
};

// A warp writes 8 rows of a panel of x at a time, a lane 8 adjacent words of one row.
template <class C>
__device__ __forceinline__ void write_x(const Args& args, int block) {
  constexpr int kWarps = C::kThreads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int chunks = args.panel_rows / 32, first = (block * kWarps + warp) * C::kAtOnce;
  const int skipped = args.first_line * static_cast<int>(args.by_in_w.divisor);
  const bool vectors = (args.positions | args.item_positions | skipped) % 4 == 0 &&
                       reinterpret_cast<unsigned long long>(args.x) % 16 == 0;
  float values[C::kAtOnce][8];
#pragma unroll
  for (int i = 0; i < C::kAtOnce; ++i) {
    const int group = (first + i) / chunks, row = group * 8 + lane / 4;
    const int eighth = (first + i - group * chunks) * 4 + lane % 4,
              item = divide(eighth, args.by_item_eighths);
    const int at = (eighth - item * static_cast<int>(args.by_item_eighths.divisor)) * 8;
    const bool inside = row < C::kIn && item < args.batch;
    const float* const source =
        static_cast<const float*>(args.x) +
        (static_cast<long long>(args.first_item + item) * C::kIn + row) * args.item_positions + skipped + at;
    if (vectors) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector<float, 4> four{};
        if (inside && at + 4 * half < args.positions) four = load_vector<4>(source + 4 * half);
#pragma unroll
        for (int e = 0; e < 4; ++e) values[i][4 * half + e] = four.at[e];
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) values[i][e] = inside && at + e < args.positions ? source[e] : 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < C::kAtOnce; ++i) {
    const int group = (first + i) / chunks, row = group * 8 + lane / 4;
    if (row >= C::kIn) continue;
    unsigned* const to = static_cast<unsigned*>(args.x_panels) +
                         (static_cast<long long>(first + i - group * chunks) * C::kIn + row) * 32;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      ptx::store_global(
          to + ((lane % 4 * 2 + odd) ^ (row % 8)) * 4,
          uint4{OperandOf<float>::bits(values[i][odd]), OperandOf<float>::bits(values[i][odd + 2]),
                OperandOf<float>::bits(values[i][odd + 4]), OperandOf<float>::bits(values[i][odd + 6])});
    }
  }
}

template <class C>
__device__ void run(const Args& args) {
  const int block = static_cast<int>(blockIdx.x);
  ptx::launch_dependents();
  if (block < args.unfolding) {
    const int place = block / args.slices;
    Unfold<C>(args, place / Unfold<C>::kGroups, place % Unfold<C>::kGroups, block % args.slices).run();
  } else {
    write_x<C>(args, block - args.unfolding);
  }
}

}  // namespace tconv3d
