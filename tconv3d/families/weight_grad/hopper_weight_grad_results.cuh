// Sums of the weight gradient on Hopper (hopper_weight_grad.cuh) leave the block: as partial sums, as the
// result if there is a single part, and as partial sums of the bias gradient.
#pragma once

#include "hopper_weight_grad_block.cuh"

namespace tconv3d {

template <class C>
struct HopperWeightResults : HopperWeightBlock<C> {
  using Block = HopperWeightBlock<C>;
  using Block::args, Block::kind, Block::lane, Block::stages, Block::warp;
  using Block::channel_of, Block::kTapsAll;
  using Block::kBlocksIn, Block::kJobChannels, Block::kKinds, Block::kPairs, Block::kRows, Block::kSums;

  // The sums of a consumer thread, and the places of dy that it reads.
  struct Consumer {
    float sums[C::kRowTiles][C::kTaps][kSums];
    int place[C::kRowTiles];  // offset of this lane's pair and row of taps in a sheet
    int sheet[C::kRowTiles];  // sheet that the row of taps reads, relative to the position's
    unsigned
        shift[C::kRowTiles];  // with kShifted, what the pair and the row of taps add to the shift of a line
    float bias[C::kRowTiles][2];
  };

  // Stores the sums for the bias gradient. The lanes of a quad have the same channels at different positions.
  __device__ __forceinline__ void store_bias(const Consumer& me, int consumer) const {
    constexpr int kOut = C::kGroups * C::kOutPerGroup;
    const int part = static_cast<int>(blockIdx.x) / kKinds * kBlocksIn + kind.first_in / C::kColumns;
    float* const parts =
        static_cast<float*>(args.bias_parts) + static_cast<long long>(part) * C::kBiasSlots * kOut;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const int index = ((r * C::kConsumers + consumer) * 4 + warp % 4) * 8 + lane / 4;
      const int row = index / kPairs, d = row / C::kRowsH, h = row % C::kRowsH;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = me.bias[r][half];
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        const int out = kind.first_out + channel_of(index % kPairs, half);
        if (lane % 4 != 0 || row >= kRows || out >= C::kOutPerGroup) continue;
        const int slot_d = C::kBiasSlotD(kind.d, d), slot_h = C::kBiasSlotH(kind.h, h);
        if (slot_d < 0 || slot_h < 0) continue;
        parts[(slot_d + slot_h + C::kBiasSlotW) * kOut + kind.group * C::kOutPerGroup + out] = sum;
      }
    }
  }

  // ---- A single part is written as the result: consumers stage their sums in shared memory, nearly in the
  // order of the result, then all warps write them.

  static constexpr int kTileTaps = kRows * C::kTaps;
  static constexpr int kTileElements = C::kOutTile * kTileTaps;  // elements per input channel
  // These pitches put adjacent output channels, and the input channels of a quad's lanes, in different banks.
  static constexpr int kOutPitch = kTileTaps + 1 - kTileTaps % 2;
  static constexpr int kInPitch = C::kOutTile * kOutPitch + (20 - C::kOutTile * kOutPitch % 16) % 16;

  // Called by the whole block. `lay_down` stages a consumer's sums; producers pass an empty function.
  template <class LayDown>
  __device__ __forceinline__ void store_result(LayDown&& lay_down) const {
    meet();  // the stages are no longer in use
    lay_down();
    meet();
    write_result();
  }
  static __device__ __forceinline__ void meet() { __syncthreads(); }
  __device__ __forceinline__ void lay_down(const Consumer& me, int consumer) const {
    float* const tile = reinterpret_cast<float*>(stages) + lane % 4 * 2 * kInPitch;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const int index = ((r * C::kConsumers + consumer) * 4 + warp % 4) * 8 + lane / 4;
      const int row = index / kPairs;
      if (row >= kRows) continue;
      float* const of_row = tile + row * C::kTaps;
      const int pair = index % kPairs;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float* const to = of_row + (i / 4 * 8 + i % 2) * kInPitch + channel_of(pair, i / 2 % 2) * kOutPitch;
#pragma unroll
        for (int t = 0; t < C::kTaps; ++t) to[t] = me.sums[r][t][i];
      }
    }
  }
  // A warp writes 32 elements of eight input channels at a time, so that their place is computed once.
  __device__ __forceinline__ void write_result() const {
    using Result = typename C::Scalar;
    constexpr int kChunks = (kTileElements + 31) / 32;
    constexpr bool kWhole = C::kInPerGroup % C::kColumns == 0;
    constexpr long long kInStep = C::kOutPerGroup * kTapsAll;
    for (int job = warp; job < kChunks * (C::kColumns / kJobChannels); job += C::kThreads / 32) {
      const int element = job % kChunks * 32 + lane, in = job / kChunks * kJobChannels;
      const int out = element / kTileTaps, tap = element % kTileTaps, row = tap / C::kTaps;
      const int d = row / C::kRowsH, h = row % C::kRowsH;
      if (element >= kTileElements || kind.first_out + out >= C::kOutPerGroup) continue;
      if (d >= C::kCountD(kind.d) || h >= C::kCountH(kind.h)) continue;
      const int place = (C::kTapD(kind.d, d) * C::kKernelH + C::kTapH(kind.h, h)) * C::kKernelW;
      const float* const from =
          reinterpret_cast<const float*>(stages) + in * kInPitch + out * kOutPitch + tap;
      Result* const to = static_cast<Result*>(args.result) +
                         (kind.group * C::kInPerGroup + kind.first_in + in) * kInStep +
                         (kind.first_out + out) * kTapsAll + place + C::kTapW(tap % C::kTaps);
#pragma unroll
      for (int i = 0; i < kJobChannels; ++i) {
        if (!kWhole && kind.first_in + in + i >= C::kInPerGroup) break;
        to[i * kInStep] = Narrow<Result>::from(from[i * kInPitch]);
      }
    }
  }

  __device__ __forceinline__ void store(const Consumer& me, int consumer) const {
    constexpr int kIn = C::kGroups * C::kInPerGroup;
    float* const parts = static_cast<float*>(args.parts) +
                         static_cast<int>(blockIdx.x) / kKinds * (kTapsAll * C::kOutPerGroup * kIn);
    const int in = kind.first_in + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const int index = ((r * C::kConsumers + consumer) * 4 + warp % 4) * 8 + lane / 4;
      const int row = index / kPairs, d = row / C::kRowsH, h = row % C::kRowsH;
      if (row >= kRows || d >= C::kCountD(kind.d) || h >= C::kCountH(kind.h)) continue;
      const int tap = (C::kTapD(kind.d, d) * C::kKernelH + C::kTapH(kind.h, h)) * C::kKernelW;
#pragma unroll
      for (int t = 0; t < C::kTaps; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int out = kind.first_out + channel_of(index % kPairs, half);
          if (out >= C::kOutPerGroup) continue;
          float* const to = parts +
                            (static_cast<long long>(tap + C::kTapW(t)) * C::kOutPerGroup + out) * kIn +
                            kind.group * C::kInPerGroup + in;
#pragma unroll
          for (int j = 0; j < C::kColumns / 8; ++j) {
            const float* const sums = &me.sums[r][t][4 * j + 2 * half];
            if constexpr (C::kInPerGroup % 2 == 0) {
              if (in + 8 * j < C::kInPerGroup) {
                *reinterpret_cast<Vector<float, 2>*>(to + 8 * j) = Vector<float, 2>{sums[0], sums[1]};
              }
            } else {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (in + 8 * j + e < C::kInPerGroup) to[8 * j + e] = sums[e];
              }
            }
          }
        }
      }
    }
  }
};

}  // namespace tconv3d
