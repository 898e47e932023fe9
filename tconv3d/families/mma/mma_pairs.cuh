// Copies the halo of a dense 16-bit x that is contiguous along w to shared memory for the kernel on mma.sync
// (mma.cuh), through registers and by whole words of memory.
//
// A pair is two neighbouring positions of a line, of all 8 channels of a piece: one word of memory for each
// channel. Permutations of bytes turn the 8 words into the pieces of both positions, which are stored by 16
// bytes each. If all lines begin at an even element (kOddLines is false), pairs begin at an even element too,
// beside the halo's first position if need be. Otherwise a pair that begins in the middle of a word is cut
// out of two words. The other half of a word at the end of a line belongs to x too, because x is dense and
// begins at a multiple of 16 bytes; if x has an odd number of elements (kOddEnd), its last one is read alone.
#pragma once

#include "mma_copies.cuh"

namespace tconv3d {

// One pair of positions of a halo. Pairs are listed in the order of x.
struct alignas(16) MmaPair {
  unsigned from;   // offset in x from the halo's first position, in bytes
  unsigned place;  // as of an MmaItem: the slot of position w, and the sources that have the line inside x
  int w;  // an even position along w: the pair's first, or its second if pairs begin one before (`back`)
  int unused;

  __device__ __forceinline__ unsigned slot() const { return MmaItem{from, place}.slot(); }
};

template <class C>
struct MmaPairs {
  using Copies = MmaCopies<C>;
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Scalar = typename C::Scalar;
  static constexpr int kPieces = Tile::kPieces, kStep = C::kThreads / kPieces, kChannels = 8;
  static constexpr int kWordsOfPair = C::kOddLines ? 2 * kChannels : kChannels;
  static constexpr int kJobPairs = C::kJobPairs;
  static_assert(C::kCopy != 3 || C::kThreads / 32 % kPieces == 0, "a warp copies one piece");
  static_assert(C::kCopy != 3 || C::kLineStepW == 1, "neighbours in the halo are neighbours in memory");

  const Tile& tile;
  const Copies& copies;
  const MmaPair* pairs;
  int count;  // number of pairs

  __device__ __forceinline__ explicit MmaPairs(const Copies& copies)
      : tile(copies.tile),
        copies(copies),
        pairs(reinterpret_cast<const MmaPair*>(copies.items)),
        count(tile.args.tile_n * tile.args.halo.d * tile.args.halo.h * width()) {}

  // Returns the pairs of a line: one more than it has if its first position is in the middle of a word.
  __device__ __forceinline__ int width() const { return static_cast<int>(tile.args.pairs.divisor); }

  struct Line {
    int n, d, h, sheet;
  };
  __device__ __forceinline__ Line line_of(int line) const {
    const Args& args = tile.args;
    const int sheet = divide(line, args.halo_h), n = divide(sheet, args.halo_d);
    return {n, sheet - n * args.halo.d, line - sheet * args.halo.h, sheet};
  }

  __device__ __forceinline__ void list_pairs(MmaItem* items) const {
    const Args& args = tile.args;
    MmaPair* const to = reinterpret_cast<MmaPair*>(items);
    for (int i = threadIdx.x; i < count; i += C::kThreads) {
      const int number = divide(i, args.pairs), w = 2 * (i - number * width());
      const Line line = line_of(number);
      unsigned place = static_cast<unsigned>(tile.slot(line.sheet, line.h, w));
      for (int source = 0; !C::kManySources && source < tile.sources; ++source)
        place |= copies.has_line(source, line.n, line.d, line.h) ? MmaItem::mask(source) : 0u;
      const long long from = line.n * args.x_strides.n + line.d * C::kLineStepD * args.x_strides.d +
                             line.h * C::kLineStepH * args.x_strides.h + w;
      to[i] = {static_cast<unsigned>(from) * 2u, place, w, 0};
    }
  }

  using Address = unsigned long long;
  struct Jobs {
    unsigned char* to;
    Address from;  // address of the first channel of this thread's piece, at the halo's first position
    int source, next, count;
    int channels;  // channels of the piece that exist, at most 8; none if it is not positive
    int first_w;   // position along w of x of the halo's first position
    int back;      // positions by which pairs begin before even positions of the halo: 0 or 1
    unsigned words[kJobPairs][kWordsOfPair];
    unsigned masks[kJobPairs];      // bits of a word whose positions lie inside x (kOddLines)
    unsigned shifts[kJobPairs][2];  // bits before the pair in words of even and odd channels (kOddLines)
  };

  static __device__ __forceinline__ int own_piece() { return static_cast<int>(threadIdx.x) / 32 % kPieces; }
  static __device__ __forceinline__ int own_pair() {
    return static_cast<int>(threadIdx.x) / (32 * kPieces) * 32 + static_cast<int>(threadIdx.x) % 32;
  }
  // Returns whether 0 <= w < size.
  static __device__ __forceinline__ bool is_in(int w, int size) {
    return static_cast<unsigned>(w) < static_cast<unsigned>(size);
  }

  // Tells whether a source has the line of pair i inside x.
  __device__ __forceinline__ bool has_line_of(const MmaPair& pair, int i, int source) const {
    if constexpr (C::kManySources) {
      const Line line = line_of(divide(i, tile.args.pairs));
      return copies.has_line(source, line.n, line.d, line.h);
    } else {
      return (pair.place & MmaItem::mask(source)) != 0;
    }
  }

  static __device__ __forceinline__ unsigned load_word(bool wanted, Address from) {
    return wanted ? __ldg(reinterpret_cast<const unsigned*>(from)) : 0u;
  }
  static __device__ __forceinline__ unsigned load_half(bool wanted, Address from) {
    return wanted ? load_constant(reinterpret_cast<const Scalar*>(from)).bits : 0u;
  }
  __device__ __forceinline__ Address stride() const {
    return static_cast<Address>(tile.args.x_strides.c) * 2;
  }

  // Returns by how many bytes an element lies behind the start of a word: 0 or 2. Channels have it in turns.
  static __device__ __forceinline__ unsigned behind(Address element) {
    return static_cast<unsigned>(element) & 2u;
  }

  // Loads the words of a pair that begins at any element: those that its first position lies in, and the next
  // words if it begins in the middle of a word. Each of these words has an element of the line.
  __device__ __forceinline__ void load_apart(Jobs& jobs, int j, bool low, bool high, Address from) const {
    constexpr int kSecond = kWordsOfPair - kChannels;
    unsigned (&words)[kWordsOfPair] = jobs.words[j];
    const unsigned shifts[2] = {behind(from), behind(from + stride())};
    jobs.masks[j] = (low ? 0xFFFFu : 0u) | (high ? 0xFFFF0000u : 0u);
    jobs.shifts[j][0] = 8 * shifts[0], jobs.shifts[j][1] = 8 * shifts[1];
    if constexpr (C::kOddEnd) {
      const Address end = reinterpret_cast<Address>(tile.args.x) + 2 * tile.args.x_elements;
      if (from + static_cast<Address>(jobs.channels - 1) * stride() + 6 > end) {
        load_end(jobs, j, low, high, from);
        return;
      }
    }
    // The addresses of the words of an even and of an odd channel.
    Address of_two[2] = {from - shifts[0], from + stride() - shifts[1]};
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      words[k] = load_word((low || (high && shifts[k % 2] == 0)) && exists(jobs, k), of_two[k % 2]);
      words[kSecond + k] = load_word(high && shifts[k % 2] != 0 && exists(jobs, k), of_two[k % 2] + 4);
      of_two[k % 2] += 2 * stride();
    }
  }
  // Loads the elements of a pair one by one, where a word might end behind x.
  __device__ __forceinline__ void load_end(Jobs& jobs, int j, bool low, bool high, Address from) const {
#pragma unroll
    for (int k = 0; k < kChannels; ++k, from += stride()) {
      const unsigned first = load_half(low && exists(jobs, k), from);
      const unsigned second = load_half(high && exists(jobs, k), from + 2);
      jobs.words[j][k] = jobs.shifts[j][k % 2] != 0 ? first << 16 : first | second << 16;
      jobs.words[j][kWordsOfPair - kChannels + k] = second;
    }
  }
  static __device__ __forceinline__ bool exists(const Jobs& jobs, int k) {
    return C::kReduced % kChannels == 0 || k < jobs.channels;
  }

  __device__ __forceinline__ void load_job(Jobs& jobs) const {
#pragma unroll
    for (int j = 0; j < kJobPairs; ++j) {
      const int i = own_pair() + (jobs.next * kJobPairs + j) * kStep;
      const MmaPair pair = pairs[i < count ? i : 0];
      const int w = jobs.first_w + pair.w - jobs.back, width = tile.args.x_size.w;
      const bool line = i < count && jobs.channels > 0 && has_line_of(pair, i, jobs.source);
      Address from = jobs.from + pair.from;
      if constexpr (C::kOddLines) {
        load_apart(jobs, j, line && is_in(w, width), line && is_in(w + 1, width), from);
      } else {  // either both positions lie inside x or none does
#pragma unroll
        for (int k = 0; k < kChannels; ++k, from += stride())
          jobs.words[j][k] = load_word(line && is_in(w, width) && exists(jobs, k), from);
      }
    }
  }

  // Returns the slot of the pair's position that is not at w, in bytes from the start of a plane of pieces.
  __device__ __forceinline__ int other_slot(const Jobs& jobs, const MmaPair& pair) const {
    const int own = static_cast<int>(pair.slot());
    if constexpr (C::kInputStepW == 1) return own + 16 - 32 * jobs.back;
    if constexpr (C::kInputStepW == 2) return own + (tile.args.plane - jobs.back) * 16;
    return own + tile.slot(0, 0, pair.w + 1 - 2 * jobs.back) - tile.slot(0, 0, pair.w);
  }
  // Returns the word of a pair and channel k, with zeros outside of x.
  static __device__ __forceinline__ unsigned word(const Jobs& jobs, int j, int k) {
    const unsigned (&words)[kWordsOfPair] = jobs.words[j];
    if constexpr (!C::kOddLines) return words[k];
    return __funnelshift_r(words[k], words[kWordsOfPair - kChannels + k], jobs.shifts[j][k % 2]) &
           jobs.masks[j];
  }
  __device__ __forceinline__ void store_job(const Jobs& jobs) const {
#pragma unroll
    for (int j = 0; j < kJobPairs; ++j) {
      const int i = own_pair() + (jobs.next * kJobPairs + j) * kStep;
      unsigned low[4], high[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const unsigned first = word(jobs, j, 2 * k), second = word(jobs, j, 2 * k + 1);
        low[k] = ptx::low_halves(first, second);
        high[k] = ptx::high_halves(first, second);
      }
      const MmaPair pair = pairs[i < count ? i : 0];
      const int w = pair.w - jobs.back, own = static_cast<int>(pair.slot());
      const int other = other_slot(jobs, pair);
      if (i < count && is_in(w, tile.args.halo.w))
        *reinterpret_cast<uint4*>(jobs.to + (jobs.back != 0 ? other : own)) = {low[0], low[1], low[2],
                                                                               low[3]};
      if (i < count && is_in(w + 1, tile.args.halo.w))
        *reinterpret_cast<uint4*>(jobs.to + (jobs.back != 0 ? own : other)) = {high[0], high[1], high[2],
                                                                               high[3]};
    }
  }

  __device__ __forceinline__ void begin(Jobs& jobs, unsigned char* to, int chunk, int source) const {
    const int channel = chunk * Layout::kChunk + own_piece() * kChannels;
    jobs.to = to + own_piece() * tile.piece_bytes();
    jobs.channels = C::kReduced - channel < kChannels ? C::kReduced - channel : kChannels;
    jobs.source = source;
    jobs.first_w = tile.start(source).w;
    jobs.back = C::kOddLines ? 0 : jobs.first_w & 1;
    jobs.from = reinterpret_cast<Address>(tile.args.x) +
                2 * static_cast<Address>(tile.origin(source) - jobs.back) + channel * stride();
    jobs.next = 0;
    jobs.count = (count + kJobPairs * kStep - 1) / (kJobPairs * kStep);
    load_job(jobs);
  }
  // Stores the pairs of the current job and starts the loads of the next one.
  __device__ __forceinline__ void advance(Jobs& jobs) const {
    if (jobs.next >= jobs.count) return;
    store_job(jobs);
    if (++jobs.next < jobs.count) load_job(jobs);
  }
};

}  // namespace tconv3d
