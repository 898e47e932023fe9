// How operands come into shared memory for the kernel on mma.sync (mma.cuh): the weight as it was packed, and
// the halo of x as slots of channels, whatever the layout of x is.
//
// Where a piece of 16 bytes of channels lies in memory as a whole, it is copied so. Otherwise single channels
// are: words of 4 bytes asynchronously; numbers of 16 bits through registers, two channels to a word, a few
// at a time between products, for no asynchronous copy moves 2 bytes.
#pragma once

#include "mma_tile.cuh"

namespace tconv3d {

enum class MmaCopy { kPieces, kWords, kHalves };

// An item of a halo, in the order of x.
struct MmaItem {
  int from;        // where it lies in x, counted from the halo's first position
  unsigned place;  // low half: its slot, in units of 16 bytes; high half: a bit for each source that has it

  __device__ __forceinline__ unsigned slot() const { return (place & 0xFFFFu) * 16u; }
  __device__ __forceinline__ bool inside(int source) const { return place >> (16 + source) & 1u; }
};

template <class C>
struct MmaCopies {
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Scalar = typename C::Scalar;
  static constexpr MmaCopy kCopy = static_cast<MmaCopy>(C::kCopy);
  static constexpr int kWords = Layout::kChunkWords;
  static_assert(kCopy != MmaCopy::kWords || sizeof(Scalar) == 4, "words are floats");
  static_assert(kCopy != MmaCopy::kHalves || sizeof(Scalar) == 2, "halves of words have 16 bits");

  const Tile& tile;
  const MmaItem* items;
  int count;  // items

  __device__ __forceinline__ MmaCopies(const Tile& tile, const MmaItem* items)
      : tile(tile), items(items), count(tile.args.halo.d * tile.args.halo.h * tile.args.halo.w) {}

  __device__ __forceinline__ void list_items(MmaItem* to) const {
    const Args& args = tile.args;
    for (int i = threadIdx.x; i < count; i += C::kThreads) {
      const int line = divide(i, args.halo_w), d = divide(line, args.halo_h);
      const int h = line - d * args.halo.h, w = i - line * args.halo.w;
      unsigned place = static_cast<unsigned>(tile.slot(d, h, w)) / 16u;
      for (int source = 0; source < tile.sources; ++source) {
        const Extent start = tile.start(source);
        const int x_d = start.d + d * C::kLineStepD, x_h = start.h + h * C::kLineStepH, x_w = start.w + w;
        const bool inside = x_d >= 0 && x_d < args.x_size.d && x_h >= 0 && x_h < args.x_size.h && x_w >= 0 &&
                            x_w < args.x_size.w;
        place |= static_cast<unsigned>(inside) << (16 + source);
      }
      const long long from =
          d * C::kLineStepD * args.x_strides.d + h * C::kLineStepH * args.x_strides.h + w * args.x_strides.w;
      to[i] = {static_cast<int>(from), place};
    }
  }

  // Rows are counted from the block's first on.
  __device__ __forceinline__ void copy_weights(unsigned* to, int chunk, int row, int rows) const {
    const long long block = static_cast<long long>(tile.group) * Layout::kSlices + tile.slice;
    const long long tap = (block * Layout::kChunks + chunk) * C::kAllTaps + (tile.first_row + row) * C::kTaps;
    const unsigned* from = static_cast<const unsigned*>(tile.args.packed) + tap * Layout::kTapWords;
    const int words = rows * C::kTaps * Layout::kTapWords;
#pragma unroll 2
    for (int i = 4 * threadIdx.x; i < words; i += 4 * C::kThreads)
      ptx::copy_words_once<4>(to + i, from + i, true);
  }

  // ---- The halo, asynchronously.

  __device__ __forceinline__ const Scalar* address(long long origin, int from, int channel) const {
    const long long along = C::kUnitC ? static_cast<long long>(channel) : channel * tile.args.x_strides.c;
    return static_cast<const Scalar*>(tile.args.x) + (origin + along + from);
  }

  // Which item and which word of its slot a thread has at its i-th turn. Neighbouring threads have
  // neighbouring channels where these are neighbours in memory; else 8 neighbouring positions of 4 words,
  // which lie in different banks.
  struct Word {
    int item, word;
  };
  static __device__ __forceinline__ Word word_at(int i) {
    if constexpr (C::kUnitC) {
      return {i / kWords, i % kWords};
    } else {
      return {i / (8 * kWords) * 8 + i % 8, i / 8 % kWords};
    }
  }
  __device__ __forceinline__ int words() const { return (C::kUnitC ? count : (count + 7) / 8 * 8) * kWords; }

  __device__ __forceinline__ void copy_halo(unsigned char* to, int chunk, int source) const {
    const long long origin = tile.origin(source);
    if constexpr (kCopy == MmaCopy::kPieces) {
      constexpr int kPieces = kWords / 4, kItems = 4 * Layout::kPerWord;
#pragma unroll 2
      for (int i = threadIdx.x; i < count * kPieces; i += C::kThreads) {
        const int piece = i % kPieces, channel = chunk * Layout::kChunk + piece * kItems;
        const MmaItem item = items[i / kPieces];
        const bool inside = item.inside(source) && channel < C::kReduced;
        ptx::copy_words_once<4>(to + item.slot() + 16 * piece,
                                inside ? address(origin, item.from, channel) : tile.args.x, inside);
      }
    } else if constexpr (kCopy == MmaCopy::kWords) {
#pragma unroll 2
      for (int i = threadIdx.x; i < words(); i += C::kThreads) {
        const Word at = word_at(i);
        if (at.item >= count) continue;
        const int channel = chunk * Layout::kChunk + at.word;
        const MmaItem item = items[at.item];
        const bool inside = item.inside(source) && channel < C::kReduced;
        ptx::copy_words<1>(to + item.slot() + 4 * at.word,
                           inside ? address(origin, item.from, channel) : tile.args.x, inside);
      }
    }
  }

  // ---- The halo through registers: jobs of a few words of each thread.

  static constexpr int kJobWords = 4;
  struct Jobs {
    unsigned char* to;
    long long origin;
    int source, chunk, next, count;
    Scalar low[kJobWords], high[kJobWords];
  };

  __device__ __forceinline__ void load_job(Jobs& jobs) const {
#pragma unroll
    for (int k = 0; k < kJobWords; ++k) {
      const Word at = word_at((jobs.next * kJobWords + k) * C::kThreads + threadIdx.x);
      const MmaItem item = items[at.item < count ? at.item : 0];
      const bool inside = at.item < count && item.inside(jobs.source);
      const int channel = jobs.chunk * Layout::kChunk + 2 * at.word;
      jobs.low[k] = jobs.high[k] = Scalar{};
      if (inside && channel < C::kReduced)
        jobs.low[k] = load_constant(address(jobs.origin, item.from, channel));
      if (inside && channel + 1 < C::kReduced)
        jobs.high[k] = load_constant(address(jobs.origin, item.from, channel + 1));
    }
  }
  __device__ __forceinline__ void store_job(const Jobs& jobs) const {
#pragma unroll
    for (int k = 0; k < kJobWords; ++k) {
      const Word at = word_at((jobs.next * kJobWords + k) * C::kThreads + threadIdx.x);
      if (at.item < count)
        *reinterpret_cast<unsigned*>(jobs.to + items[at.item].slot() + 4 * at.word) =
            static_cast<unsigned>(jobs.low[k].bits) | static_cast<unsigned>(jobs.high[k].bits) << 16;
    }
  }

  __device__ __forceinline__ void begin(Jobs& jobs, unsigned char* to, int chunk, int source) const {
    constexpr int kAtOnce = kJobWords * C::kThreads;
    jobs.to = to;
    jobs.origin = tile.origin(source);
    jobs.source = source;
    jobs.chunk = chunk;
    jobs.next = 0;
    jobs.count = (words() + kAtOnce - 1) / kAtOnce;
    load_job(jobs);
  }
  // One job done, the next one begun.
  __device__ __forceinline__ void advance(Jobs& jobs) const {
    if (jobs.next >= jobs.count) return;
    store_job(jobs);
    if (++jobs.next < jobs.count) load_job(jobs);
  }
};

}  // namespace tconv3d
