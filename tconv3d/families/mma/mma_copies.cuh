// Copies operands to shared memory for the kernel on mma.sync (mma.cuh): the packed weight as it is, and the
// halo of x as slots of channels, for any layout of x.
//
// Where 16 bytes of channels are contiguous in memory, one asynchronous copy moves them as a piece. Otherwise
// channels are copied one by one: 4-byte numbers asynchronously, and 16-bit numbers through registers, two
// channels to a word and a few words at a time between products, because no asynchronous copy moves 2 bytes.
// Where 16-bit numbers are contiguous along w, they are copied by words of memory instead (mma_pairs.cuh).
#pragma once

#include "mma_tile.cuh"

namespace tconv3d {

// One position of a halo. Items are listed in the order of x.
struct MmaItem {
  unsigned from;  // offset in x from the halo's first position, in bytes
  unsigned
      place;  // bits 4 to 19: slot; a bit for each source that has the item inside x (unless kManySources)

  // Returns the slot in bytes from the start of a plane of pieces.
  __device__ __forceinline__ unsigned slot() const { return place & 0xFFFF0u; }
  // Returns the bit of a source: one of the upper 12 bits or, from source 12 on, of the lower 4.
  static __device__ __forceinline__ unsigned mask(int source) { return 1u << ((source + 20) % 32); }
};

template <class C>
struct MmaCopies {
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Scalar = typename C::Scalar;
  static constexpr bool kByPieces = C::kCopy == 0, kByWords = C::kCopy == 1, kByHalves = C::kCopy == 2;
  static constexpr int kWords = Layout::kChunkWords;
  static constexpr int kRowWords = C::kTaps * Layout::kTapWords;  // packed words of a row of taps
  static_assert(!kByWords || sizeof(Scalar) == 4, "words are floats");
  static_assert(!kByHalves || sizeof(Scalar) == 2, "halves of words have 16 bits");

  const Tile& tile;
  const MmaItem* items;
  int count;  // number of items

  __device__ __forceinline__ MmaCopies(const Tile& tile, const MmaItem* items)
      : tile(tile),
        items(items),
        count(tile.args.tile_n * tile.args.halo.d * tile.args.halo.h * tile.args.halo.w) {}

  // Tells whether a line of a source's halo lies inside x.
  __device__ __forceinline__ bool has_line(int source, int n, int d, int h) const {
    const Args& args = tile.args;
    const Extent start = tile.start(source);
    const int x_d = start.d + d * C::kLineStepD, x_h = start.h + h * C::kLineStepH;
    return tile.n + n < args.batch && x_d >= 0 && x_d < args.x_size.d && x_h >= 0 && x_h < args.x_size.h;
  }
  // Tells whether item (n, d, h, w) of a source's halo lies inside x.
  __device__ __forceinline__ bool is_inside(int source, int n, int d, int h, int w) const {
    const int x_w = tile.start(source).w + w * C::kLineStepW;
    return has_line(source, n, d, h) && x_w >= 0 && x_w < tile.args.x_size.w;
  }
  // Tells the same of item i of the list: returns 0 if it lies outside.
  __device__ __forceinline__ unsigned is_inside(const MmaItem& item, int i, int source) const {
    if constexpr (C::kManySources) {
      const Args& args = tile.args;
      const int line = divide(i, args.halo_w), sheet = divide(line, args.halo_h);
      const int n = divide(sheet, args.halo_d);
      return static_cast<unsigned>(
          is_inside(source, n, sheet - n * args.halo.d, line - sheet * args.halo.h, i - line * args.halo.w));
    } else {
      return item.place & MmaItem::mask(source);
    }
  }

  __device__ __forceinline__ void list_items(MmaItem* to) const {
    const Args& args = tile.args;
    for (int i = threadIdx.x; i < count; i += C::kThreads) {
      const int line = divide(i, args.halo_w), sheet = divide(line, args.halo_h);
      const int n = divide(sheet, args.halo_d), d = sheet - n * args.halo.d;
      const int h = line - sheet * args.halo.h, w = i - line * args.halo.w;
      unsigned place = static_cast<unsigned>(tile.slot(sheet, h, w));
      for (int source = 0; !C::kManySources && source < tile.sources; ++source)
        place |= is_inside(source, n, d, h, w) ? MmaItem::mask(source) : 0u;
      const long long from = n * args.x_strides.n + d * C::kLineStepD * args.x_strides.d +
                             h * C::kLineStepH * args.x_strides.h + w * C::kLineStepW * args.x_strides.w;
      to[i] = {static_cast<unsigned>(from) * static_cast<unsigned>(sizeof(Scalar)), place};
    }
  }

  // Returns this thread's first words of the packed weights of the block's first chunk and row of taps.
  __device__ __forceinline__ const unsigned* weights() const {
    const long long block = static_cast<long long>(tile.group) * Layout::kSlices + tile.slice;
    const long long tap =
        (block * Layout::kChunks + tile.first_chunk) * C::kAllTaps + tile.first_row * C::kTaps;
    return static_cast<const unsigned*>(tile.args.packed) + tap * Layout::kTapWords + 4 * threadIdx.x;
  }
  // Copies the packed weights of `rows` rows of taps. `from` has this thread's first words.
  __device__ __forceinline__ void copy_weights(unsigned* to, const unsigned* from, int rows) const {
    const int words = rows * kRowWords - 4 * static_cast<int>(threadIdx.x);
    constexpr int kMost = C::kRows * kRowWords, kAtOnce = 4 * C::kThreads;
#pragma unroll
    for (int i = 0; i < kMost; i += kAtOnce) {
      if ((C::kWholeSteps && i + kAtOnce <= kMost) || i < words)
        ptx::copy_words_once<4>(to + 4 * threadIdx.x + i, from + i, true);
    }
  }

  // ---- The halo by asynchronous copies.

  // Returns the address of a channel of a halo's first position.
  __device__ __forceinline__ const unsigned char* address(long long origin, int channel) const {
    const long long along = C::kUnitC ? static_cast<long long>(channel) : channel * tile.args.x_strides.c;
    return reinterpret_cast<const unsigned char*>(static_cast<const Scalar*>(tile.args.x) + (origin + along));
  }

  // A thread copies one fixed word of the slots of every kItemsAtOnce-th item. Neighbouring threads have
  // neighbouring channels where these are contiguous in memory; else kTogether of them have neighbouring
  // positions, which are contiguous in memory. 8 positions of 4 words lie in different banks; with 16
  // positions of 2 words two lanes share a bank, but a warp reads half as many lines of memory.
  static constexpr int kItemsAtOnce = C::kThreads / kWords;
  static constexpr int kTogether = C::kThreads % (16 * kWords) == 0 ? 16 : 8;
  static_assert(C::kThreads % (8 * kWords) == 0 || C::kUnitC || kByPieces, "whole groups of 8 positions");
  static __device__ __forceinline__ int own_word() {
    const int thread = static_cast<int>(threadIdx.x);
    return C::kUnitC ? thread % kWords : thread / kTogether % kWords;
  }
  static __device__ __forceinline__ int own_item() {
    const int thread = static_cast<int>(threadIdx.x);
    return C::kUnitC ? thread / kWords : thread / (kTogether * kWords) * kTogether + thread % kTogether;
  }

  // Returns the place of this thread's word of a slot, in bytes from the start of the halo.
  __device__ __forceinline__ unsigned own_place() const {
    return static_cast<unsigned>(own_word() / 4 * tile.piece_bytes() + own_word() % 4 * 4);
  }

  __device__ __forceinline__ void copy_halo(unsigned char* to, int chunk, int source) const {
    const long long origin = tile.origin(source);
    if constexpr (kByPieces) {
      constexpr int kPieces = kWords / 4, kChannels = 4 * Layout::kPerWord;
      const int thread = static_cast<int>(threadIdx.x), piece = thread % kPieces;
      copy_items<kPieces>(ptx::shared_address(to) + piece * tile.piece_bytes(), origin,
                          chunk * Layout::kChunk + piece * kChannels, source, thread / kPieces);
    } else if constexpr (kByWords) {
      copy_items<kWords>(ptx::shared_address(to) + own_place(), origin, chunk * Layout::kChunk + own_word(),
                         source, own_item());
    }
  }

  // Copies one part (a piece or a word) of the slot of every item from `first` on, where kParts threads share
  // an item. The items of several copies are read before the first of these copies is issued.
  template <int kParts>
  __device__ __forceinline__ void copy_items(unsigned to, long long origin, int channel, int source,
                                             int first) const {
    constexpr int kBatch = 4, kStep = C::kThreads / kParts;
    long long from = reinterpret_cast<long long>(address(origin, channel));
    ptx::renew(from);  // Without this the compiler computes the address for each of the loops.
    const bool exists = C::kReduced % Layout::kChunk == 0 || channel < C::kReduced;
    int i = first;
#pragma unroll 1
    for (; i + (kBatch - 1) * kStep < count; i += kBatch * kStep) {
      MmaItem batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) batch[k] = items[i + k * kStep];
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
        copy_item(to, from, batch[k], exists ? is_inside(batch[k], i + k * kStep, source) : 0u);
    }
#pragma unroll 1
    for (; i < count; i += kStep) copy_item(to, from, items[i], exists ? is_inside(items[i], i, source) : 0u);
  }
  static __device__ __forceinline__ void copy_item(unsigned to, long long from, const MmaItem& item,
                                                   unsigned inside) {
    const void* const own = reinterpret_cast<const void*>(from + item.from);
    if constexpr (kByPieces) {
      ptx::copy_piece(to + item.slot(), own, inside);
    } else {
      ptx::copy_word(to + item.slot(), own, inside);
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
    const unsigned char* const from = address(jobs.origin, channel);
    const long long next = C::kUnitC ? 1 : tile.args.x_strides.c;
#pragma unroll
    for (int k = 0; k < kJobWords; ++k) {
      const int i = own_item() + (jobs.next * kJobWords + k) * kItemsAtOnce;
      const MmaItem item = items[i < count ? i : 0];
      const bool inside = i < count && is_inside(item, i, jobs.source) != 0;
      const Scalar* const low = reinterpret_cast<const Scalar*>(from + item.from);
      jobs.low[k] = jobs.high[k] = Scalar{};
      if (inside && channel < C::kReduced) jobs.low[k] = load_constant(low);
      if (inside && channel + 1 < C::kReduced) jobs.high[k] = load_constant(low + next);
    }
  }
  __device__ __forceinline__ void store_job(const Jobs& jobs) const {
#pragma unroll
    for (int k = 0; k < kJobWords; ++k) {
      const int i = own_item() + (jobs.next * kJobWords + k) * kItemsAtOnce;
      if (i < count)
        *reinterpret_cast<unsigned*>(jobs.to + items[i].slot() + own_place()) =
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
