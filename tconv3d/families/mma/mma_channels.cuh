// What the kernel on mma.sync (mma.cuh) computes over the channels of a position. A warp holds all channels
// of its positions: the four lanes of a row of a tile have two columns each of every tile of 8 columns.
#pragma once

#include "mma_tile.cuh"
#include "over_channels.cuh"

namespace tconv3d {

template <class C>
struct MmaChannels {
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Channels = ChannelProgram<C>;
  using Sums = float[C::kPhases][C::kTilesM][C::kTilesN][4];
  static_assert(C::kWarpsN == 1 && Layout::kSlices == 1 && C::kGroups == 1, "a warp holds all channels");

  const Tile& tile;
  int warp_m, lane;

  // Applies the epilogue to all sums, in place. It stores the result if that has one number per position, and
  // tells whether it did.
  __device__ __forceinline__ bool run(Sums& sums) const {
    const Strides& strides = tile.args.y_strides;
#pragma unroll
    for (int m = 0; m < C::kTilesM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto at = tile.position(warp_m, half * 8 + lane / 4, m);
#pragma unroll
        for (int f = 0; f < C::kPhases; ++f) {
          const auto to = tile.output(at, f);
          const long long offset = to.n * strides.n + to.d * strides.d + to.h * strides.h + to.w * strides.w;
          float own[2 * C::kTilesN];
#pragma unroll
          for (int i = 0; i < 2 * C::kTilesN; ++i) own[i] = sums[f][m][i / 2][2 * half + i % 2];
          apply(own, to.n, offset, to.exists);
          Channels::template run<4>(own, C::kOuts, [&](int i) { return channel(i); });
          if constexpr (C::Epilogue::kOnePerPosition) {
            if (to.exists && lane % 4 == 0)
              Channels::template store_number<C::kLastOut>(tile.args.y, offset, to.n, strides.c, C::kOuts,
                                                           own[0]);
          } else {
#pragma unroll
            for (int i = 0; i < 2 * C::kTilesN; ++i) sums[f][m][i / 2][2 * half + i % 2] = own[i];
          }
        }
      }
    }
    return C::Epilogue::kOnePerPosition;
  }

 private:
  // Returns the channel of the lane's i-th sum of a position.
  __device__ __forceinline__ int channel(int i) const { return Layout::column(i / 2, lane % 4 * 2 + i % 2); }

  // Applies the pointwise part to the lane's sums of a position, two neighbouring channels at a time.
  __device__ __forceinline__ void apply(float (&own)[2 * C::kTilesN], int n, long long offset,
                                        bool exists) const {
#pragma unroll
    for (int i = 0; i < 2 * C::kTilesN; i += 2) {
      const int first = channel(i);
      const long long step = tile.args.y_strides.c;
      float two[2] = {own[i], own[i + 1]};
      finish<C, true>(tile.args, {n, first, offset + first * step, step, exists ? C::kOuts - first : 0}, two);
      own[i] = two[0];
      own[i + 1] = two[1];
    }
  }
};

}  // namespace tconv3d
