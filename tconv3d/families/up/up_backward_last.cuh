// All gradients of an up-convolution (kernel equal to stride, no padding) of channels-last tensors from one
// read of dy, on Hopper's tensor cores (sm_90a; TF32, float16, bfloat16). up_backward.cuh computes them for
// contiguous tensors.
//   dx[ci][q]      = sum over co, t of  w[ci][co][t] * dy[co][stride*q + t]
//   dw[ci][co][t]  = sum over q of      x[ci][q]     * dy[co][stride*q + t]
//   db[co]         = sum of dy[co]
//
// A row of dy is the elements of one position: its taps one after another, each with all output channels,
// which are contiguous in memory. A tile is 64 positions, a chunk 64 words of their rows (64 elements of
// TF32, 128 of 16-bit types). A block owns some input channels and a range of chunks, holds their weights in
// shared memory and their dw in registers, and loops over tiles:
//
//   producers     copy the chunks of a tile into a ring with cp.async, and x into another ring
//   input grad    one warpgroup: rows are positions, K is elements of dy's rows, columns are input channels
//   weight grad   two warpgroups that take alternate chunks: rows are elements of dy's rows, K is positions,
//                 columns are input channels. They first transpose x in place, and sum the dy that they load
//
// dy reaches the tensor cores through registers in both products. A piece is 16 bytes:
//   input grad    lane (g, t) of a warp loads pieces t of positions g and g + 8: operands of two K steps
//   weight grad   lane (g, t) loads from positions t, t + 4, ... the word (in TF32 two words) of elements 2g
//                 and 2g + 1, which are rows g and g + 8
// K may be permuted if both operands are: weights and x are stored in the order that follows from these
// loads. Positions are 72 words apart, which avoids bank conflicts in both access patterns (the input
// gradient takes positions 0, 2, 1, 3, ...).
//
// Partial sums (split-K) of dw, [input channel][tap][output channel], and of db are stored side by side and
// added by reduce_gradients.cuh in a fixed order. With several ranges of chunks, dx has partial sums as well.
#pragma once

#include "cursor.cuh"
#include "up_backward_block.cuh"

namespace tconv3d {

template <class C>
struct UpBackwardLast : UpBackwardBlock<C, Args, UpBackwardLast<C>> {
  using Block = UpBackwardBlock<C, Args, UpBackwardLast<C>>;
  using Block::args, Block::split, Block::range, Block::first_in, Block::warp, Block::lane, Block::weights;
  using Block::kConsumerWarps;
  using Block::kItem, Block::kPerWord, Block::kRounded, Block::kGroupsOfBlock, Block::kSums;
  using Block::meet, Block::rounded, Block::sum_of_quad;
  using Block::stages, Block::stages_x, Block::tables, Block::full, Block::empty, Block::barrier_x;
  using typename Block::Scalar, typename Block::Groups, typename Block::Loaded, typename Block::Batch;

  static constexpr int kTile = 64;                         // positions per tile
  static constexpr int kWords = 64, kPieces = kWords / 4;  // words and pieces of a position per chunk
  static constexpr int kPitch = kWords + 8;                // words from position to position in a stage
  static constexpr int kTaps = C::kKernelD * C::kKernelH * C::kKernelW;
  // A row of dy, and the weights of an input channel, have kRow elements, kWordsAll words.
  static constexpr int kRow = C::kOut * kTaps, kWordsAll = kRow / kPerWord;
  static constexpr int kWeightWords = C::kChunks * kWords;
  static constexpr int kStageBytes = 4 * kTile * kPitch;
  static constexpr int kStageXBytes = kItem * kTile * C::kColumns;
  static constexpr int kPlaces = 3;  // tiles whose Places are in shared memory
  static constexpr int kPlacesBytes = 16 * kPlaces * kTile,
                       kTableBytes = kPlacesBytes + 8 * C::kChunks * kPieces;
  // The third barrier: x was read for the transpose. The fourth: it is transposed.
  static constexpr int kBarriersX = 4;
  static constexpr int kSetBlocks = 1, kInputSlabs = 1, kBatches = kPieces / 4;
  static constexpr bool kPrefetched = true;
  // Slabs of 64 elements of dy's rows per chunk.
  static constexpr int kRowSlabs = kPerWord, kSteps = 8, kBiasSlabs = kRowSlabs;

  static_assert(C::kRanges * kWeightWords >= kWordsAll);
  static_assert(C::kOut * kItem % 16 == 0 && C::kIn * kItem % 16 == 0, "whole pieces");

  // Offsets of a position in the tensors, in elements; -1 if there is no such position.
  struct Place {
    long long dy, x;
  };

  Place* places;
  long long* pieces;  // offset of each piece of the range in dy from a position's first output, in elements

  __device__ __forceinline__ UpBackwardLast(const Args& arguments)
      : Block(arguments),
        places(reinterpret_cast<Place*>(tables)),
        pieces(reinterpret_cast<long long*>(tables + kPlacesBytes)) {}

  __device__ __forceinline__ int first_word() const { return range * kWeightWords; }

  __device__ __forceinline__ void fill_tables() const {
    for (int i = static_cast<int>(threadIdx.x); i < C::kChunks * kPieces; i += C::kThreads) {
      const int element = min(first_word() + 4 * i, kWordsAll - 4) * kPerWord;
      const int tap = element / C::kOut, plane = tap / C::kKernelW;
      pieces[i] = element % C::kOut + tap % C::kKernelW * args.dy_strides.w +
                  plane / C::kKernelH * args.dy_strides.d + plane % C::kKernelH * args.dy_strides.h;
    }
  }

  template <int kSets>
  __device__ __forceinline__ void order_all_weights() const {
    __syncwarp();
    for (int i = warp - 4; i < kSets; i += kConsumerWarps) {
      order_weights(Groups::group_at(weights, i / kGroupsOfBlock, i % kGroupsOfBlock));
    }
  }
  // Transposes blocks of 4x4 words: a lane of the input gradient loads piece t of every four for two K steps,
  // so word e of piece t becomes word t of vector e.
  __device__ __forceinline__ void order_weights(unsigned* group) const {
    const int row = lane / 4, four = lane % 4 / 2 * 4, half = lane % 2 * 2;
    Vector<unsigned, 4> from[4], to[2];
#pragma unroll
    for (int t = 0; t < 4; ++t) from[t] = load_vector<4>(Groups::vector_at(group, row, four + t));
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      to[0].at[t] = rounded(half == 0 ? from[t].at[0] : from[t].at[2]);
      to[1].at[t] = rounded(half == 0 ? from[t].at[1] : from[t].at[3]);
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      *reinterpret_cast<Vector<unsigned, 4>*>(Groups::vector_at(group, row, four + half + e)) = to[e];
    }
    __syncwarp();
  }

  struct Position {
    long long n, d, h, w;
  };
  __device__ __forceinline__ Position find(int at) const {
    const int line = divide(at, args.by_w), rest = divide(line, args.by_h), n = divide(rest, args.by_d);
    return Position{n, rest - n * static_cast<int>(args.by_d.divisor),
                    line - rest * static_cast<int>(args.by_h.divisor),
                    at - line * static_cast<int>(args.by_w.divisor)};
  }
  static __device__ __forceinline__ long long offset(const Strides& strides, const Position& p, int step_d,
                                                     int step_h, int step_w) {
    return p.n * strides.n + p.d * step_d * strides.d + p.h * step_h * strides.h + p.w * step_w * strides.w;
  }

  // ---- Producers.

  // The first 64 producer threads find the Places of a tile's positions.
  __device__ __forceinline__ void find_places(int tile, Place* to) const {
    if (threadIdx.x >= kTile) return;
    const int at = tile * kTile + static_cast<int>(threadIdx.x);
    Place place{-1, -1};
    if (tile < args.tiles && at < args.positions) {
      const Position position = find(at);
      place.dy = offset(args.dy_strides, position, C::kKernelD, C::kKernelH, C::kKernelW);
      place.x = offset(args.x_strides, position, 1, 1, 1);
    }
    to[threadIdx.x] = place;
  }

  // Copies x in its memory layout: the channels of a position are contiguous.
  __device__ __forceinline__ void copy_x(const Place* from, Ring& stage) const {
    // A position has kOwn pieces of kItems elements.
    constexpr int kOwn = C::kColumns * kItem / 16, kItems = 16 / kItem;
    const Scalar* const x = static_cast<const Scalar*>(args.x);
    unsigned* const to = reinterpret_cast<unsigned*>(stages_x + stage.index * kStageXBytes);
    ptx::barrier_wait(barrier_x(1, stage.index), stage.parity ^ 1u);
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kOwn; i += 128) {
      const int in = first_in + i % kOwn * kItems;
      const long long place = from[i / kOwn].x;
      const bool inside = place >= 0 && in < C::kIn;
      ptx::copy_words_once<4>(to + 4 * i, x + (inside ? place + in : 0), inside);
    }
    ptx::copy_arrive(barrier_x(0, stage.index));
    stage.advance(C::kStagesX);
  }

  __device__ __forceinline__ void copy_chunk(const Ring& stage, int chunk, const Place* from) const {
    constexpr bool kWhole = C::kRanges * C::kChunks * kWords == kWordsAll;
    const int piece = static_cast<int>(threadIdx.x) % kPieces,
              first = static_cast<int>(threadIdx.x) / kPieces;
    const bool there = kWhole || first_word() + chunk * kWords + 4 * piece < kWordsAll;
    const Scalar* const dy = static_cast<const Scalar*>(args.dy) + pieces[chunk * kPieces + piece];
    unsigned* const to = stages + stage.index * (kStageBytes / 4) + first * kPitch + piece * 4;
    ptx::barrier_wait(empty(stage.index), stage.parity ^ 1u);
#pragma unroll
    for (int i = 0; i < kTile * kPieces / 128; ++i) {
      const long long place = from[first + i * (128 / kPieces)].dy;
      ptx::copy_words_once<4>(to + i * (128 / kPieces) * kPitch, dy + (place >= 0 ? place : 0),
                              there && place >= 0);
    }
    ptx::copy_arrive(full(stage.index));
  }

  // The x of the next tile is requested before the last chunk of the current one.
  __device__ __forceinline__ void produce() const {
    Ring stage, stage_x;
    Place* now = places;
    Place* next = places + kTile;
    Place* after = places + 2 * kTile;
    find_places(split, now);
    ptx::warpgroup_sync(1);
    if (split < args.tiles) copy_x(now, stage_x);
#pragma unroll 1
    for (int tile = split; tile < args.tiles; tile += args.splits) {
      find_places(tile + args.splits, next);
      ptx::warpgroup_sync(1);
#pragma unroll 1
      for (int chunk = 0; chunk < C::kChunks; ++chunk) {
        if (chunk == C::kChunks - 1 && tile + args.splits < args.tiles) copy_x(next, stage_x);
        copy_chunk(stage, chunk, now);
        stage.advance(C::kStages);
      }
      Place* const last = now;
      now = next;
      next = after;
      after = last;
    }
  }

  // ---- The input gradient.

  // First of this lane's two positions of a tile; the second is 8 further.
  __device__ __forceinline__ int position_of_lane() const {
    const int g = lane / 4;
    return warp % 4 * 16 + (g & 4) + (g & 1) * 2 + (g >> 1 & 1);
  }
  __device__ __forceinline__ const unsigned* positions_of(const unsigned* stage) const {
    return stage + position_of_lane() * kPitch + lane % 4 * 4;
  }
  static __device__ __forceinline__ Loaded load_positions(const unsigned* from, int batch) {
    return Loaded{load_vector<4>(from + 16 * batch), load_vector<4>(from + 16 * batch + 8 * kPitch)};
  }
  static __device__ __forceinline__ void arrange(Batch& to, const Loaded& from) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      to.words[k][0] = rounded(from.first.at[2 * k]);
      to.words[k][1] = rounded(from.second.at[2 * k]);
      to.words[k][2] = rounded(from.first.at[2 * k + 1]);
      to.words[k][3] = rounded(from.second.at[2 * k + 1]);
    }
  }

  // Stores dx, or partial sums of dx if there are several ranges.
  __device__ __forceinline__ void store_positions(const float (&sums)[1][kSums], int tile) const {
    using To = typename Choose<C::kRanges == 1, Scalar, float>::type;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = tile * kTile + position_of_lane() + 8 * half;
      if (at >= args.positions) continue;
      To* const to = static_cast<To*>(args.dx) + range * args.dx_pitch +
                     offset(args.dx_strides, find(at), 1, 1, 1) + first_in + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) {
        if (C::kIn % C::kColumns != 0 && first_in + 8 * j + lane % 4 * 2 >= C::kIn) continue;
        store_vector(to + 8 * j, Vector<To, 2>{Narrow<To>::from(sums[0][4 * j + 2 * half]),
                                               Narrow<To>::from(sums[0][4 * j + 2 * half + 1])});
      }
    }
  }

  // ---- The weight and bias gradients.

  // Loads the operand of one K step, two elements of dy's rows at the positions of the step, and adds the
  // elements to `sum`. The two elements are operand rows 8 apart.
  static __device__ __forceinline__ void load_elements(unsigned (&to)[4], float (&sum)[2],
                                                       const unsigned* from) {
    if constexpr (kRounded) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const auto both = load_vector<2>(from + 4 * k * kPitch);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sum[e] += ptx::bits_to_float(both.at[e]);
          to[2 * k + e] = rounded(both.at[e]);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const unsigned one = from[8 * k * kPitch], other = from[(8 * k + 4) * kPitch];
        to[2 * k] = (one & 0xFFFFu) | other << 16;
        to[2 * k + 1] = one >> 16 | (other & 0xFFFF0000u);
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[e] += half_of(to[2 * k + e], 0) + half_of(to[2 * k + e], 1);
      }
    }
  }
  static __device__ __forceinline__ float half_of(unsigned word, int which) {
    if constexpr (kRounded) {
      return ptx::bits_to_float(word);
    } else {
      return widen<float>(Scalar{static_cast<unsigned short>(word >> (16 * which) & 0xFFFFu)});
    }
  }

  // Transposes the x of a tile in place once it has arrived; all warps of the weight gradient share the work.
  // A lane makes a vector of K of one input channel, or of two for 16-bit types.
  __device__ __forceinline__ void order_x(const Ring& stage) const {
    constexpr int kChannels = kPerWord, kAtOnce = C::kColumns / kChannels;
    constexpr int kVectors = kTile * kItem / 16, kUnits = kAtOnce * kVectors, kOwn = (kUnits + 255) / 256;
    constexpr int kPositions = 16 / kItem;  // positions per vector
    unsigned char* const operand = stages_x + stage.index * kStageXBytes;
    const unsigned* const from = reinterpret_cast<const unsigned*>(operand);
    const int first = static_cast<int>(threadIdx.x) - (C::kThreads - 256);
    unsigned words[kOwn][kPositions];
    ptx::barrier_wait(barrier_x(0, stage.index), stage.parity);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int unit = first + 256 * i;
      if (kUnits % 256 != 0 && unit >= kUnits) continue;
#pragma unroll
      for (int k = 0; k < kPositions; ++k) {
        words[i][k] = from[(unit / kAtOnce * kPositions + k) * kAtOnce + unit % kAtOnce];
      }
    }
    meet(barrier_x(2, stage.index), stage.parity);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int unit = first + 256 * i, vector = unit / kAtOnce;
      if (kUnits % 256 != 0 && unit >= kUnits) continue;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const int in = unit % kAtOnce * kChannels + c;
        Vector<unsigned, 4> to;
#pragma unroll
        for (int e = 0; e < 4; ++e) to.at[e] = word_of(words[i], e, c);
        *reinterpret_cast<Vector<unsigned, 4>*>(
            Groups::vector_at(Groups::group_at(operand, vector / 8, in / 8), in % 8, vector % 8)) = to;
      }
    }
    ptx::fence_async_proxy();
    meet(barrier_x(3, stage.index), stage.parity);
  }
  // Returns word e of a vector of K: position e, or for 16-bit types positions e and e + 4 of one of two
  // channels.
  template <int kCount>
  static __device__ __forceinline__ unsigned word_of(const unsigned (&words)[kCount], int e, int channel) {
    if constexpr (kRounded) {
      return rounded(words[e]);
    } else {
      const unsigned one = words[e], other = words[e + 4];
      return channel == 0 ? (one & 0xFFFFu) | other << 16 : one >> 16 | (other & 0xFFFF0000u);
    }
  }
  // Offset of this lane's two elements from the beginning of a slab, in words.
  __device__ __forceinline__ int word_of_lane() const {
    return warp % 4 * (16 / kPerWord) + lane / 4 * (2 / kPerWord);
  }

  __device__ __forceinline__ const unsigned* rows_of(const unsigned* stage) const {
    return stage + lane % 4 * kPitch + word_of_lane();
  }
  template <int kK, int kSlab>
  static __device__ __forceinline__ void load_step(unsigned (&to)[4], float (&bias)[kRowSlabs][2],
                                                   const unsigned* from) {
    constexpr int kStepPositions = 8 * kPerWord;
    load_elements(to, bias[kSlab], from + kK * kStepPositions * kPitch + kSlab * 32);
  }

  __device__ __forceinline__ void store_chunk(const float (&sums)[kRowSlabs][kSums],
                                              const float (&bias)[kRowSlabs][2], int chunk) const {
#pragma unroll
    for (int slab = 0; slab < kRowSlabs; ++slab) {
      const int word = first_word() + chunk * kWords + slab * 32;
      store_slab(sums[slab], bias[slab], (word + word_of_lane()) * kPerWord);
    }
  }
  // `element` is the index of the first of two elements in dy's row.
  __device__ __forceinline__ void store_slab(const float (&sums)[kSums], const float (&bias)[2],
                                             int element) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float sum = sum_of_quad(bias[e]);
      if (element >= kRow || args.bias_parts == nullptr || first_in != 0 || lane % 4 != 0) continue;
      const int tap = (element + e) / C::kOut, out = (element + e) % C::kOut;
      static_cast<float*>(args.bias_parts)[(split * kTaps + tap) * args.db_pitch + out] = sum;
    }
    if (element >= kRow) return;
    float* const to = static_cast<float*>(args.parts) + split * args.dw_pitch + element;
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int in = first_in + 8 * j + lane % 4 * 2 + e;
        if (C::kIn % C::kColumns != 0 && in >= C::kIn) continue;
        store_vector(to + in * static_cast<long long>(kRow),
                     Vector<float, 2>{sums[4 * j + e], sums[4 * j + 2 + e]});
      }
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  ptx::launch_dependents();
  UpBackwardLast<Config>(args).take_roles();
}

}  // namespace tconv3d
