// All gradients of an up-convolution (kernel equal to stride, no padding; two taps along w, or one or three
// in TF32) from one read of dy, on Hopper's tensor cores (sm_90a; TF32, float16, bfloat16). Every output
// belongs to one position q and one tap t:
//   dx[ci][q]      = sum over co, t of  w[ci][co][t] * dy[co][stride*q + t]
//   dw[ci][co][t]  = sum over q of      x[ci][q]     * dy[co][stride*q + t]
//   db[co]         = sum of dy[co]
//
// A row of dy is the elements of one (co, tap along d, tap along h): the taps along w of adjacent positions,
// contiguous as in memory. With two taps along w a tile is 128 words of every row and a chunk 32 rows of a
// tile; otherwise a tile is 64 positions and a chunk 64 rows. A block owns some input channels and a range of
// rows, holds their weights in shared memory and their dw in registers, and loops over tiles:
//
//   producers        copy the chunks of a tile into a ring with cp.async, and x into another ring
//   input grad       one warpgroup: rows are positions, K is (row, tap along w), columns are input channels
//   weight grad      two warpgroups that take alternate chunks: rows are (row, tap along w), K is positions,
//                    columns are input channels. They first round and reorder x in place, and sum the dy that
//                    they load: db
//
// dy reaches the tensor cores through registers in both products, so it stays in its memory layout in shared
// memory, and TF32 is rounded when it is loaded. With two taps along w, a piece of 16 bytes (two positions of
// TF32, four of 16-bit types, with both taps) is all that a lane needs of a row for one instruction:
//   input grad    lane (g, t) of a warp loads piece g of rows t and t + 4
//   weight grad   lane (g, t) of a warp loads pieces t and t + 4 of row g
// K may be permuted if both operands are: weights and x are stored in the order that follows from these
// loads. Rows are 136 words apart, which avoids bank conflicts in both access patterns (the weight gradient
// takes rows 0, 2, 1, 3, ...). With one or three taps along w, lanes load single words of one tap at a time:
//   input grad    positions g and g + 8 of rows 2t and 2t + 1
//   weight grad   positions t and t + 4 of rows g and g + 8
// and the distance of rows is a multiple of 32 words plus 4, which avoids bank conflicts too.
//
// Partial sums of dw and db (split-K) are stored side by side and added by reduce_gradients.cuh in a fixed
// order. With several ranges of rows, dx has partial sums as well.
#pragma once

#include "cursor.cuh"
#include "up_backward_block.cuh"

namespace tconv3d {

template <class C>
struct UpBackward : UpBackwardBlock<C, Args, UpBackward<C>> {
  using Block = UpBackwardBlock<C, Args, UpBackward<C>>;
  using Block::args, Block::split, Block::range, Block::first_in, Block::warp, Block::lane, Block::weights;
  using Block::kConsumerWarps, Block::kSharers;
  using Block::kItem, Block::kPerWord, Block::kRounded, Block::kBlockWords, Block::kGroupsOfBlock,
      Block::kSums;
  using Block::meet, Block::rounded, Block::sum_of_quad;
  using Block::stages, Block::stages_x, Block::tables, Block::full, Block::empty, Block::barrier_x;
  using typename Block::Scalar, typename Block::Groups, typename Block::Loaded, typename Block::Batch;

  static constexpr int kTaps = C::kKernelW;                      // taps along w
  static constexpr bool kPairs = kTaps == 2;                     // a piece has whole pairs of taps
  static constexpr int kRows = kPairs ? 32 : 64;                 // rows per chunk
  static constexpr int kPieces = kPairs ? 32 : 16 * kTaps;       // pieces per row of a tile
  static constexpr int kPitch = 4 * kPieces + (kPairs ? 8 : 4);  // words from row to row in a stage
  static constexpr int kPlanes = C::kKernelD * C::kKernelH;
  static constexpr int kRowsAll = C::kOut * kPlanes;
  static constexpr int kWordsAll = kRowsAll * kTaps / kPerWord;  // words of an input channel's weights
  static constexpr int kWeightWords = C::kChunks * kRows * kTaps / kPerWord;
  static constexpr int kStageBytes = 4 * kRows * kPitch;
  static constexpr int kStageXBytes = 4 * 2 * kBlockWords * C::kColumns;
  static constexpr int kTableBytes = 8 * C::kChunks * kRows;
  static constexpr int kBarriersX = 3;                     // the third: x is reordered
  static constexpr int kInputSlabs = kPerWord;             // slabs of 64 positions per tile
  static constexpr int kBatches = kPairs ? 4 : 4 * kTaps;  // per chunk
  static constexpr bool kPrefetched = kRounded;
  static constexpr int kRowSlabs = kPairs ? 1 : kTaps, kSteps = 8 * kRowSlabs, kBiasSlabs = 1;

  static_assert(C::kRanges * C::kChunks * kRows >= kRowsAll);
  static_assert(kPairs || (kRounded && (kTaps == 1 || kTaps == 3)));

  // Offsets of a piece of a tile in the tensors, in elements.
  struct Place {
    long long dy, x, dx;
    bool inside;
  };

  long long* rows;  // offset of each row in dy from a position's first output, in elements

  __device__ __forceinline__ UpBackward(const Args& arguments)
      : Block(arguments), rows(reinterpret_cast<long long*>(tables)) {}

  __device__ __forceinline__ int first_row() const { return range * C::kChunks * kRows; }

  __device__ __forceinline__ void fill_tables() const {
    for (int i = static_cast<int>(threadIdx.x); i < C::kChunks * kRows; i += C::kThreads) {
      const int row = min(first_row() + i, kRowsAll - 1), plane = row % kPlanes;
      rows[i] = row / kPlanes * args.dy_strides.c + plane / C::kKernelH * args.dy_strides.d +
                plane % C::kKernelH * args.dy_strides.h;
    }
  }

  // ---- Weights and x. A warp copies a group with cp.async in its memory layout and reorders it when it has
  // arrived: of every 8 words first the even-numbered ones, then the odd-numbered ones.

  // Rounds and reorders a group of x. Without pairs of taps, positions keep their order.
  __device__ __forceinline__ void order(unsigned* group) const {
    const int row = lane / 4, vector = lane % 4 * 2;
    unsigned* const to[2] = {Groups::vector_at(group, row, vector),
                             Groups::vector_at(group, row, vector + 1)};
    const Vector<unsigned, 4> from[2] = {load_vector<4>(to[0]), load_vector<4>(to[1])};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      Vector<unsigned, 4> words;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        words.at[e] = rounded(kPairs ? from[e / 2].at[e % 2 * 2 + k] : from[k].at[e]);
      }
      *reinterpret_cast<Vector<unsigned, 4>*>(to[k]) = words;
    }
  }
  // Number of blocks of K that hold whole sets of 8 words of every tap. order_weights() reorders these sets:
  // for each tap first the even-numbered words, then the odd-numbered ones.
  static constexpr int kSetBlocks = kTaps == 3 ? 3 : 1;

  __device__ __forceinline__ void order_weights(unsigned* group) const {
    constexpr int kVectors = 2 * kSetBlocks;  // vectors per lane
    const int row = lane / 4;
    unsigned* to[kVectors];
    unsigned words[4 * kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = lane % 4 * kVectors + i;
      to[i] = Groups::vector_at(group + vector / 8 * (C::kColumns * kBlockWords), row, vector % 8);
      const auto loaded = load_vector<4>(to[i]);
#pragma unroll
      for (int e = 0; e < 4; ++e) words[4 * i + e] = rounded(loaded.at[e]);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Vector<unsigned, 4> ordered;
#pragma unroll
      for (int e = 0; e < 4; ++e) ordered.at[e] = words[(2 * e + i % 2) * kSetBlocks + i / 2];
      *reinterpret_cast<Vector<unsigned, 4>*>(to[i]) = ordered;
    }
  }

  template <int kSets>
  __device__ __forceinline__ void order_all_weights() const {
    if constexpr (kRounded) {  // 16-bit words hold both taps and need no reordering
      __syncwarp();
#pragma unroll 2
      for (int i = warp - 4; i < kSets; i += kConsumerWarps) {
        order_weights(Groups::group_at(weights, i / kGroupsOfBlock * kSetBlocks, i % kGroupsOfBlock));
      }
    }
  }

  // Locates a piece of a tile. Pieces are numbered along w through all lines of the batch.
  __device__ __forceinline__ Place find(int tile, int piece) const {
    const int at = tile * kPieces + piece;
    const int line = divide(at, args.by_w), rest = divide(line, args.by_h), n = divide(rest, args.by_d);
    const long long w = at - line * static_cast<int>(args.by_w.divisor);
    const long long h = line - rest * static_cast<int>(args.by_h.divisor);
    const long long d = rest - n * static_cast<int>(args.by_d.divisor);
    Place found;
    found.inside = at < args.pieces;
    found.dy = n * args.dy_strides.n + d * C::kKernelD * args.dy_strides.d +
               h * C::kKernelH * args.dy_strides.h + w * (16 / kItem);
    // First position whose first tap is in the piece.
    const long long position = w * (16 / kItem) / kTaps;
    found.x = n * args.x_strides.n + d * args.x_strides.d + h * args.x_strides.h + position;
    found.dx = n * args.dx_strides.n + d * args.dx_strides.d + h * args.dx_strides.h + position;
    return found;
  }

  // ---- Producers.

  // A warp copies half of K of x, and every other group of 8 input channels.
  __device__ __forceinline__ void copy_x(int tile, Ring& stage) const {
    const int vector = warp % 2 * 8 + lane % 8;
    const Place first = find(tile, vector * kTaps);
    const Place second = kPairs && !args.vectors ? find(tile, vector * kTaps + 1) : first;
    int in = first_in + warp / 2 * 8 + lane / 8;
    unsigned* to = Groups::group_at(stages_x + stage.index * kStageXBytes, warp % 2, warp / 2);
    ptx::barrier_wait(barrier_x(1, stage.index), stage.parity ^ 1u);
#pragma unroll 1
    for (int group = warp / 2; group < kGroupsOfBlock; group += 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        copy_vector_of_x(Groups::vector_at(to, lane / 8 + half * 4, lane % 8), in + half * 4, first, second);
      }
      in += 16;
      to += 16 * kBlockWords;
    }
    ptx::copy_arrive(barrier_x(0, stage.index));
    stage.advance(C::kStagesX);
  }
  __device__ __forceinline__ void copy_vector_of_x(unsigned* to, int in, const Place& first,
                                                   const Place& second) const {
    const Scalar* const x = static_cast<const Scalar*>(args.x);
    const bool inside[2] = {in < C::kIn && first.inside, in < C::kIn && second.inside};
    const long long channel = in * args.x_strides.c;
    if (!kPairs || args.vectors) {
      ptx::copy_words_once<4>(to, x + (inside[0] ? channel + first.x : 0), inside[0]);
    } else {
      ptx::copy_words<2>(to, x + (inside[0] ? channel + first.x : 0), inside[0]);
      ptx::copy_words<2>(to + 2, x + (inside[1] ? channel + second.x : 0), inside[1]);
    }
  }
  // A warp copies kCopyRows rows at once, by kCopies copies of 32 pieces.
  static constexpr int kCopyRows = kPairs ? 1 : 2, kCopies = kCopyRows * kPieces / 32;

  struct Copies {
    Place at[kCopies];
  };
  __device__ __forceinline__ Copies find_all(int tile) const {
    Copies found;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) found.at[i] = find(tile, (lane + 32 * i) % kPieces);
    return found;
  }

  __device__ __forceinline__ void copy_chunk(const Ring& stage, int chunk, const Copies& copies) const {
    constexpr int kOwn = kRows / 4, kAtOnce = kCopies == 1 ? 4 : 2;  // own rows; offsets loaded at once
    constexpr bool kWhole = C::kRanges * C::kChunks * kRows == kRowsAll;
    const Scalar* const dy = static_cast<const Scalar*>(args.dy);
    unsigned* const to = stages + stage.index * (kStageBytes / 4) + warp * kOwn * kPitch;
#pragma unroll
    for (int begin = 0; begin < kOwn; begin += kAtOnce * kCopyRows) {
      long long offsets[kAtOnce][kCopies];
      const int first = chunk * kRows + warp * kOwn + begin;
#pragma unroll
      for (int i = 0; i < kAtOnce * kCopies; ++i) {
        const int row = i / kCopies * kCopyRows + (lane + 32 * (i % kCopies)) / kPieces;
        offsets[i / kCopies][i % kCopies] = rows[first + row];
      }
      if (begin == 0) ptx::barrier_wait(empty(stage.index), stage.parity ^ 1u);
#pragma unroll
      for (int i = 0; i < kAtOnce * kCopies; ++i) {
        const Place& place = copies.at[i % kCopies];
        const int piece = lane + 32 * (i % kCopies), row = i / kCopies * kCopyRows + piece / kPieces;
        const bool inside = place.inside && (kWhole || first_row() + first + row < kRowsAll);
        // A piece outside the tensor has the address of position 0, whose rows are all inside.
        ptx::copy_words_once<4>(to + (begin + row) * kPitch + piece % kPieces * 4,
                                dy + (place.inside ? place.dy : 0) + offsets[i / kCopies][i % kCopies],
                                inside);
      }
    }
    ptx::copy_arrive(full(stage.index));
  }

  // x is requested kEarly chunks before the first chunk of its tile: as early as its stage is certain to be
  // empty, but 4 chunks at most.
  static constexpr int kLag = C::kChunks * (C::kStagesX - 1) - C::kStages;
  static constexpr int kEarly = kLag < 0 ? 0 : kLag < 4 ? kLag : 4;

  __device__ __forceinline__ void produce() const {
    // kEarly is kTilesEarly whole tiles minus kChunkEarly chunks.
    constexpr int kTilesEarly = (kEarly + C::kChunks - 1) / C::kChunks;
    constexpr int kChunkEarly = kTilesEarly * C::kChunks - kEarly;
    Ring stage, stage_x;
#pragma unroll 1
    for (int i = 0; i < kTilesEarly; ++i) {
      if (split + i * args.splits < args.tiles) copy_x(split + i * args.splits, stage_x);
    }
#pragma unroll 1
    for (int tile = split; tile < args.tiles; tile += args.splits) {
      const Copies copies = find_all(tile);
      const int next = tile + kTilesEarly * args.splits;
#pragma unroll 1
      for (int chunk = 0; chunk < C::kChunks; ++chunk) {
        if (chunk == kChunkEarly && next < args.tiles) copy_x(next, stage_x);
        copy_chunk(stage, chunk, copies);
        stage.advance(C::kStages);
      }
    }
  }

  // ---- The input gradient. A batch is two pieces: two K steps of TF32, or one K step of two slabs of a
  // 16-bit type.

  static __device__ __forceinline__ const unsigned* positions_of(const unsigned* stage) { return stage; }
  __device__ __forceinline__ Loaded load_positions(const unsigned* stage, int batch) const {
    const int position = warp % 4 * 16 + lane / 4;
    if constexpr (kPairs) {
      const unsigned* const from = stage + (batch * 8 + lane % 4) * kPitch + position_piece() * 4;
      return Loaded{load_vector<4>(from), load_vector<4>(from + 4 * kPitch)};
    }
    Loaded loaded;
#pragma unroll
    for (int e = 0; e < 8; ++e) {  // two K steps, each 8 rows of one tap
      const int step = 2 * batch + e / 4, row = step / kTaps * 8 + lane % 4 * 2 + e % 4 / 2;
      const unsigned word = stage[row * kPitch + (position + e % 2 * 8) * kTaps + step % kTaps];
      (e < 4 ? loaded.first : loaded.second).at[e % 4] = word;
    }
    return loaded;
  }
  __device__ __forceinline__ int position_piece() const { return warp % 4 * 8 + lane / 4; }
  static __device__ __forceinline__ void arrange(Batch& to, const Loaded& from) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (!kPairs) {
        to.words[0][e] = rounded(from.first.at[e]);
        to.words[1][e] = rounded(from.second.at[e]);
      } else if constexpr (kRounded) {  // the two taps of a position are 4 apart in K
        to.words[0][e] = rounded(from.first.at[e % 2 * 2 + e / 2]);
        to.words[1][e] = rounded(from.second.at[e % 2 * 2 + e / 2]);
      } else {
        to.words[e / 2][e % 2] = from.first.at[e];
        to.words[e / 2][2 + e % 2] = from.second.at[e];
      }
    }
  }

  // Stores dx, or partial sums of dx if there are several ranges.
  __device__ __forceinline__ void store_positions(const float (&sums)[kInputSlabs][kSums], int tile) const {
    if constexpr (kPairs) {
      const Place place = find(tile, position_piece());
      if (place.inside) store_columns<2 * kInputSlabs>(sums, 0, place.dx);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int position = warp % 4 * 16 + half * 8 + lane / 4;
        const Place place = find(tile, position / 4 * kTaps);
        if (place.inside) store_columns<1>(sums, half, place.dx + position % 4);
      }
    }
  }
  // Stores kCount adjacent positions, from a lane's position `first` on, of all columns.
  template <int kCount>
  __device__ __forceinline__ void store_columns(const float (&sums)[kInputSlabs][kSums], int first,
                                                long long at) const {
    using To = typename Choose<C::kRanges == 1, Scalar, float>::type;
    To* const to = static_cast<To*>(args.dx) + range * args.dx_pitch + at;
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int in = first_in + 8 * j + lane % 4 * 2 + e;
        if (C::kIn % C::kColumns != 0 && in >= C::kIn) continue;
        Vector<To, kCount> values;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          values.at[k] = Narrow<To>::from(sums[k / 2][4 * j + (first + k) % 2 * 2 + e]);
        }
        *reinterpret_cast<Vector<To, kCount>*>(to + in * args.dx_strides.c) = values;
      }
    }
  }

  // ---- The weight and bias gradients.

  static __device__ __forceinline__ float add(const Vector<unsigned, 4>& words) {
    float halves[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kRounded) {
        halves[i] = ptx::bits_to_float(words.at[2 * i]) + ptx::bits_to_float(words.at[2 * i + 1]);
      } else {
        float sums[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const unsigned word = words.at[2 * i + k];
          sums[k] = widen<float>(Scalar{static_cast<unsigned short>(word & 0xFFFFu)}) +
                    widen<float>(Scalar{static_cast<unsigned short>(word >> 16)});
        }
        halves[i] = sums[0] + sums[1];
      }
    }
    return halves[0] + halves[1];
  }

  static __device__ __forceinline__ void load_row(unsigned (&to)[4], float& sum, const unsigned* from) {
    const auto words = load_vector<4>(from);
    sum += add(words);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kRounded) {
        to[e] = rounded(words.at[e]);
      } else {
        const unsigned low = words.at[e / 2 * 2], high = words.at[e / 2 * 2 + 1];
        to[e] = e % 2 == 0 ? (low & 0xFFFFu) | high << 16 : low >> 16 | (high & 0xFFFF0000u);
      }
    }
  }

  // Loads two rows, 8 apart, at two positions, 4 apart, of one tap.
  static __device__ __forceinline__ void load_rows(unsigned (&to)[4], float (&sum)[2], const unsigned* from) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const unsigned word = from[e % 2 * 8 * kPitch + e / 2 * 4 * kTaps];
      sum[e % 2] += ptx::bits_to_float(word);
      to[e] = rounded(word);
    }
  }

  // Row of a chunk that this lane has, or the first of its two rows (the second is 8 further).
  __device__ __forceinline__ int row_of_lane() const {
    const int g = lane / 4;
    if (!kPairs) return warp % 4 * 16 + g;
    return warp % 4 * 8 + (g & 4) + (g & 1) * 2 + (g >> 1 & 1);
  }

  // Reorders the x of a tile once it has arrived; all warps of the weight gradient share the groups.
  __device__ __forceinline__ void order_x(const Ring& stage) const {
    ptx::barrier_wait(barrier_x(0, stage.index), stage.parity);
#pragma unroll
    for (int i = 0; i < 2 * kGroupsOfBlock; i += 4 * kSharers) {
      const int group = i + warp - 8;
      if (2 * kGroupsOfBlock % (4 * kSharers) == 0 || group < 2 * kGroupsOfBlock) {
        order(Groups::group_at(stages_x + stage.index * kStageXBytes, 0, group));
      }
    }
    ptx::fence_async_proxy();
    meet(barrier_x(2, stage.index), stage.parity);
  }

  // First word of this lane in a stage.
  __device__ __forceinline__ const unsigned* rows_of(const unsigned* stage) const {
    return stage + row_of_lane() * kPitch + lane % 4 * (kPairs ? 4 : kTaps);
  }
  template <int kK, int kTap>
  static __device__ __forceinline__ void load_step(unsigned (&to)[4], float (&bias)[1][2],
                                                   const unsigned* from) {
    if constexpr (kPairs) {
      load_row(to, bias[0][0], from + 16 * kK);
    } else {
      load_rows(to, bias[0], from + 8 * kK * kTaps + kTap);
    }
  }

  __device__ __forceinline__ void store_chunk(const float (&sums)[kRowSlabs][kSums],
                                              const float (&bias)[1][2], int chunk) const {
    const int row = first_row() + chunk * kRows + row_of_lane();
    if constexpr (kPairs) {
      store_bias(bias[0][0], row);
      if (row < kRowsAll) store_row<2>(sums[0], 0, row * kTaps);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_bias(bias[0][half], row + 8 * half);
        if (row + 8 * half >= kRowsAll) continue;
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) store_row<1>(sums[tap], half, (row + 8 * half) * kTaps + tap);
      }
    }
  }
  __device__ __forceinline__ void store_bias(float sum, int row) const {
    sum = sum_of_quad(sum);
    if (row >= kRowsAll || args.bias_parts == nullptr || first_in != 0 || lane % 4 != 0) return;
    const int out = row / kPlanes, plane = row % kPlanes;
    static_cast<float*>(args.bias_parts)[(split * kPlanes + plane) * args.db_pitch + out] = sum;
  }
  // Stores kCount (one or both) of a lane's two rows of the product.
  template <int kCount>
  __device__ __forceinline__ void store_row(const float (&sums)[kSums], int first, int at) const {
    float* const to = static_cast<float*>(args.parts) + split * args.dw_pitch + at;
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int in = first_in + 8 * j + lane % 4 * 2 + e;
        if (C::kIn % C::kColumns != 0 && in >= C::kIn) continue;
        Vector<float, kCount> values;
#pragma unroll
        for (int k = 0; k < kCount; ++k) values.at[k] = sums[4 * j + (first + k) * 2 + e];
        *reinterpret_cast<Vector<float, kCount>*>(to + in * static_cast<long long>(kRowsAll * kTaps)) =
            values;
      }
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  ptx::launch_dependents();
  UpBackward<Config>(args).take_roles();
}

}  // namespace tconv3d
