// Copies operands to shared memory for the kernel on mma.sync (mma.cuh): the packed weight as it is, and the
// halo of x as slots of channels, for any layout of x.
//
// Where 16 bytes of channels are contiguous in memory, one asynchronous copy moves them as a piece. Otherwise
// channels are copied one by one: 4-byte numbers asynchronously, and 16-bit numbers through registers, two
// channels to a word and a few words at a time between products, because no asynchronous copy moves 2 bytes.
#pragma once

#include "mma_tile.cuh"

namespace tconv3d {

// One position of a halo. Items are listed in the order of x.
struct MmaItem {
  int from;        // offset in x from the halo's first position, in elements
  unsigned place;  // low 16 bits: slot, in units of 16 bytes; bit 16 + s: source s has the item inside x

  __device__ __forceinline__ unsigned slot() const { return (place & 0xFFFFu) * 16u; }
  __device__ __forceinline__ bool inside(int source) const { return place >> (16 + source) & 1u; }
};

template <class C>
struct MmaCopies {
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Scalar = typename C::Scalar;
  static constexpr bool kByPieces = C::kCopy == 0, kByWords = C::kCopy == 1, kByHalves = C::kCopy == 2;
  static constexpr int kWords = Layout::kChunkWords;
  static_assert(!kByWords || sizeof(Scalar) == 4, "words are floats");
  static_assert(!kByHalves || sizeof(Scalar) == 2, "halves of words have 16 bits");

  const Tile& tile;
  const MmaItem* items;
  int count;  // number of items

  __device__ __forceinline__ MmaCopies(const Tile& tile, const MmaItem* items)
      : tile(tile),
        items(items),
        count(tile.args.tile_n * tile.args.halo.d * tile.args.halo.h * tile.args.halo.w) {}

  __device__ __forceinline__ void list_items(MmaItem* to) const {
    const Args& args = tile.args;
    for (int i = threadIdx.x; i < count; i += C::kThreads) {
      const int line = divide(i, args.halo_w), sheet = divide(line, args.halo_h);
      const int n = divide(sheet, args.halo_d), d = sheet - n * args.halo.d;
      const int h = line - sheet * args.halo.h, w = i - line * args.halo.w;
      unsigned place = static_cast<unsigned>(tile.slot(sheet, h, w)) / 16u;
      for (int source = 0; source < tile.sources; ++source) {
        const Extent start = tile.start(source);
        const int x_d = start.d + d * C::kLineStepD, x_h = start.h + h * C::kLineStepH, x_w = start.w + w;
        const bool inside = tile.n + n < args.batch && x_d >= 0 && x_d < args.x_size.d && x_h >= 0 &&
                            x_h < args.x_size.h && x_w >= 0 && x_w < args.x_size.w;
        place |= static_cast<unsigned>(inside) << (16 + source);
      }
      const long long from = n * args.x_strides.n + d * C::kLineStepD * args.x_strides.d +
                             h * C::kLineStepH * args.x_strides.h + w * args.x_strides.w;
      to[i] = {static_cast<int>(from), place};
    }
  }

  // Copies the packed weights of `rows` rows of taps, from `row` on, which is counted from the block's first
  // row.
  __device__ __forceinline__ void copy_weights(unsigned* to, int chunk, int row, int rows) const {
    const long long block = static_cast<long long>(tile.group) * Layout::kSlices + tile.slice;
    const long long tap = (block * Layout::kChunks + chunk) * C::kAllTaps + (tile.first_row + row) * C::kTaps;
    const unsigned* from = static_cast<const unsigned*>(tile.args.packed) + tap * Layout::kTapWords;
    const int words = rows * C::kTaps * Layout::kTapWords;
#pragma unroll 2
    for (int i = 4 * threadIdx.x; i < words; i += 4 * C::kThreads)
      ptx::copy_words_once<4>(to + i, from + i, true);
  }

  // ---- The halo by asynchronous copies.

  __device__ __forceinline__ const Scalar* address(long long origin, int from, int channel) const {
    const long long along = C::kUnitC ? static_cast<long long>(channel) : channel * tile.args.x_strides.c;
    return static_cast<const Scalar*>(tile.args.x) + (origin + along + from);
  }

  // A thread copies one fixed word of the slots of every kItemsAtOnce-th item. Neighbouring threads have
  // neighbouring channels where these are contiguous in memory; else they have 8 neighbouring positions of 4
  // words, which lie in different banks.
  static constexpr int kItemsAtOnce = C::kThreads / kWords;
  static_assert(C::kThreads % (8 * kWords) == 0 || C::kUnitC || kByPieces, "whole groups of 8 positions");
  static __device__ __forceinline__ int own_word() {
    const int thread = static_cast<int>(threadIdx.x);
    return C::kUnitC ? thread % kWords : thread / 8 % kWords;
  }
  static __device__ __forceinline__ int own_item() {
    const int thread = static_cast<int>(threadIdx.x);
    return C::kUnitC ? thread / kWords : thread / (8 * kWords) * 8 + thread % 8;
  }

  __device__ __forceinline__ void copy_halo(unsigned char* to, int chunk, int source) const {
    const long long origin = tile.origin(source);
    if constexpr (kByPieces) {
      constexpr int kPieces = kWords / 4, kChannels = 4 * Layout::kPerWord;
      const int piece = static_cast<int>(threadIdx.x) % kPieces;
      const int channel = chunk * Layout::kChunk + piece * kChannels;
      const Scalar* const from = address(origin, 0, channel);
      const unsigned start = ptx::shared_address(to) + 16 * piece;
#pragma unroll 4
      for (int i = static_cast<int>(threadIdx.x) / kPieces; i < count; i += C::kThreads / kPieces) {
        const MmaItem item = items[i];
        ptx::copy_piece(start + item.slot(), from + item.from, item.inside(source) && channel < C::kReduced);
      }
    } else if constexpr (kByWords) {
      const int channel = chunk * Layout::kChunk + own_word();
      const Scalar* const from = address(origin, 0, channel);
      const unsigned start = ptx::shared_address(to) + 4 * own_word();
#pragma unroll 4
      for (int i = own_item(); i < count; i += kItemsAtOnce) {
        const MmaItem item = items[i];
        ptx::copy_word(start + item.slot(), from + item.from, item.inside(source) && channel < C::kReduced);
      }
    }
  }

  // ---- The halo through registers: a job is kJobWords words of each thread.

  static constexpr int kJobWords = 4;
  struct Jobs {
    unsigned char* to;
    long long origin;
    int source, chunk, next, count;
    Scalar low[kJobWords], high[kJobWords];
  };

  __device__ __forceinline__ void load_job(Jobs& jobs) const {
    const int channel = jobs.chunk * Layout::kChunk + 2 * own_word();
    const Scalar* const from = address(jobs.origin, 0, channel);
    const long long next = C::kUnitC ? 1 : tile.args.x_strides.c;
#pragma unroll
    for (int k = 0; k < kJobWords; ++k) {
      const int i = own_item() + (jobs.next * kJobWords + k) * kItemsAtOnce;
      const MmaItem item = items[i < count ? i : 0];
      const bool inside = i < count && item.inside(jobs.source);
      jobs.low[k] = jobs.high[k] = Scalar{};
      if (inside && channel < C::kReduced) jobs.low[k] = load_constant(from + item.from);
      if (inside && channel + 1 < C::kReduced) jobs.high[k] = load_constant(from + item.from + next);
    }
  }
  __device__ __forceinline__ void store_job(const Jobs& jobs) const {
#pragma unroll
    for (int k = 0; k < kJobWords; ++k) {
      const int i = own_item() + (jobs.next * kJobWords + k) * kItemsAtOnce;
      if (i < count)
        *reinterpret_cast<unsigned*>(jobs.to + items[i].slot() + 4 * own_word()) =
            static_cast<unsigned>(jobs.low[k].bits) | static_cast<unsigned>(jobs.high[k].bits) << 16;
    }
  }

  __device__ __forceinline__ void begin(Jobs& jobs, unsigned char* to, int chunk, int source) const {
    constexpr int kAtOnce = kJobWords * kItemsAtOnce;
    jobs.to = to;
    jobs.origin = tile.origin(source);
    jobs.source = source;
    jobs.chunk = chunk;
    jobs.next = 0;
    jobs.count = (count + kAtOnce - 1) / kAtOnce;
    load_job(jobs);
  }
  // Stores the words of the current job and starts the loads of the next one.
  __device__ __forceinline__ void advance(Jobs& jobs) const {
    if (jobs.next >= jobs.count) return;
    store_job(jobs);
    if (++jobs.next < jobs.count) load_job(jobs);
  }
};

}  // namespace tconv3d
