// The bias gradient in tensor_weight_grad.cuh: the sum of dy, out of the words that own taps read.
//
// For each phase one tap, the own tap, reads output stride*i + phase for position i. Where own taps reach
// every output of any volume once, which the planner checks, their words of dy are every output once. Blocks
// that differ in their input channels add them in turn, tile by tile. In a block, the warps with the first
// input channels add them before they are rounded, each lane its own. A sum keeps what additions of whole
// chunks round off, so that its error does not grow with the number of positions.
#pragma once

#include "operands.cuh"

namespace tconv3d {

template <class C>
struct WeightGradBias {
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(typename C::Scalar));
  static constexpr int kSegment = 4;                           // words per segment
  static constexpr int kSharing = C::kWarpsRows * C::kSlices;  // warps of a block with the same channels

  unsigned own_rows;  // the warp's rows of own taps, as a bit mask; 0 in warps that add nothing
  unsigned rows;      // the rows whose dy is added in the present tile: own_rows or 0
  int turn;           // tiles until the block's next turn
  float sums[C::kTilesOut];
  float rests[C::kTilesOut];  // what the sums rounded off, and the additions of the present chunk

  // Tells whether a tap adds position i to one of the outputs from stride*i to stride*(i + 1) - 1, which are
  // the position's own.
  static constexpr __device__ bool is_own(int tap, int dilation, int padding, int stride) {
    const int at = tap * dilation - padding;
    return at >= 0 && at < stride;
  }

  // Returns which elements of a word of a window are outputs of the segment's own positions, as a bit mask.
  static constexpr __device__ int own_elements(int window, int word) {
    int mask = 0;
    for (int t = 0; t < C::kTaps; ++t) {
      const bool own = is_own(C::kTapW(t), C::kDilationW, C::kPaddingW, C::kStrideW);
      for (int i = 0; i < kSegment * kPerWord && own && C::kTapWindow(t) == window; ++i) {
        const int element = C::kTapOffset(t) + i * C::kStep;
        if (element / kPerWord == word) mask |= 1 << element % kPerWord;
      }
    }
    return mask;
  }

  // Prepares a warp whose rows of taps begin with row `first_row` of the block's. `tap_d` and `tap_h` are the
  // block's first taps; its turn is at tile `first_turn`.
  __device__ __forceinline__ void begin(int first_turn, bool adds, int tap_d, int tap_h, int first_row) {
    own_rows = rows = 0;
    turn = first_turn;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      const int row = first_row + r, d = tap_d + row / C::kRowsH, h = tap_h + row % C::kRowsH;
      const bool own = row < C::kRowsD * C::kRowsH && is_own(d, C::kDilationD, C::kPaddingD, C::kStrideD) &&
                       is_own(h, C::kDilationH, C::kPaddingH, C::kStrideH);
      if (adds && own) own_rows |= 1u << r;
    }
#pragma unroll
    for (int n = 0; n < C::kTilesOut; ++n) sums[n] = rests[n] = 0.0f;
  }

  template <int kBlocksIn>
  __device__ __forceinline__ void begin_tile() {
    rows = turn == 0 ? own_rows : 0;
    turn = (turn == 0 ? kBlocksIn : turn) - 1;
  }

  // Adds the own outputs of a tile of channels among four words of a window, from word kFirst on.
  template <int kWindow, int kFirst, int kOut>
  __device__ __forceinline__ void add(const Vector<unsigned, kSegment>& words) {
    static_for<kSegment>([&](auto i) {
      constexpr int kI = decltype(i)::value, kWhich = own_elements(kWindow, kFirst + kI);
      if constexpr (kWhich != 0) rests[kOut] += sum_of_elements<typename C::Scalar, kWhich>(words.at[kI]);
    });
  }

  __device__ __forceinline__ void end_chunk() {
    if (rows == 0) return;
#pragma unroll
    for (int n = 0; n < C::kTilesOut; ++n) ptx::add_with_rest(sums[n], rests[n], 1.0f);
  }

  // Adds the sums of a block's lanes and warps in a fixed order, and writes those of `channels` channels.
  // Warp `sharer` of those with the same channels leaves its own in `passed`, from channel `first` of the
  // block's kBlockOut on; a negative `first` is for warps that add nothing.
  template <int kBlockOut>
  __device__ __forceinline__ void store(float* passed, int sharer, int first, float* to, int channels) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int n = 0; n < C::kTilesOut; ++n) {
      float sum = sums[n] + rests[n];  // the lanes of a quad have the same channel at different positions
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
      if (first >= 0 && lane % 4 == 0) passed[sharer * kBlockOut + first + n * 8 + lane / 4] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < channels; i += C::kThreads) {
      float sum = 0.0f;
      for (int from = 0; from < kSharing; ++from) sum += passed[from * kBlockOut + i];
      to[i] = sum;
    }
  }
};

}  // namespace tconv3d
