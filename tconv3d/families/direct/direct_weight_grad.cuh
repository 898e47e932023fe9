// Weight gradient by plain multiply-adds, for every geometry and type:
//   dw[ci][co][t] = sum over n, i of  x[n][ci][i] * dy[n][co][stride*i + t*dilation - padding]
//
// A warp works alone. It owns one row of taps (t_d, t_h and kTapsW taps along w) and a tile of kTileIn x
// kTileOut channels, whose sums are in registers, and loops over its part of the positions i. The 32 lanes
// are 32 neighbouring positions (a sum over the lanes ends the loop), or, for channels-last tensors, 32
// neighbouring channel tiles at one position. Warps of a block share their positions and differ in their
// taps, so that L1 serves their common loads. Every split writes a partial sum (split-K), and reduce.cuh adds
// the partial sums in a fixed order. A single split writes the gradient itself, of type Stored.
//
// With kBias, which small volumes have, there is one split, and further warps sum dy for the gradient of the
// bias, each one channel.
#pragma once

#include "cursor.cuh"
#include "long_sum.cuh"

namespace tconv3d {

template <class C>
struct WeightGrad {
  using Scalar = typename C::Scalar;
  using Acc = typename C::Acc;
  using Index = typename IndexType<C::kWide>::type;

  static constexpr int kLanes = 32;
  static constexpr int kTilesIn = (C::kInPerGroup + C::kTileIn - 1) / C::kTileIn;
  static constexpr int kTilesOut = (C::kOutPerGroup + C::kTileOut - 1) / C::kTileOut;
  static constexpr int kTiles = C::kGroups * kTilesIn * kTilesOut;
  static constexpr int kUnits = C::kLanesArePositions ? kTiles : (kTiles + kLanes - 1) / kLanes;
  static constexpr int kPiecesW = (C::kKernelW + C::kTapsW - 1) / C::kTapsW;
  static constexpr int kRows = C::kKernelD * C::kKernelH * kPiecesW;

  const Args& args;
  int lane, split, tap_d, tap_h, tap_w;
  int tile, group, in, out;  // channel tile, group, first channels within the group
  Acc sum[C::kTileIn][C::kTileOut][C::kTapsW];

  __device__ __forceinline__ void locate(long long warp) {
    const int row = static_cast<int>(warp % kRows);
    warp /= kRows;
    const int unit = static_cast<int>(warp % kUnits);
    split = static_cast<int>(warp / kUnits);
    tap_w = row % kPiecesW * C::kTapsW;
    tap_h = row / kPiecesW % C::kKernelH;
    tap_d = row / kPiecesW / C::kKernelH;
    tile = C::kLanesArePositions ? unit : unit * kLanes + lane;
    // Lanes past the last tile repeat the last tile and write nothing.
    const int known = tile < kTiles ? tile : kTiles - 1;
    out = known % kTilesOut * C::kTileOut;
    in = known / kTilesOut % kTilesIn * C::kTileIn;
    group = known / (kTilesOut * kTilesIn);
  }

  static __device__ __forceinline__ int at_most(int value, int limit) {
    return value < limit ? value : limit;
  }

  __device__ __forceinline__ void add_position(const Cursor<Index>& i) {
    const int d = i.d * C::kStrideD + tap_d * C::kDilationD - C::kPaddingD;
    const int h = i.h * C::kStrideH + tap_h * C::kDilationH - C::kPaddingH;
    if (d < 0 || d >= args.dy_size.d || h < 0 || h >= args.dy_size.h) return;
    const int first_w = i.w * C::kStrideW + tap_w * C::kDilationW - C::kPaddingW;
    const Index x_step_w = C::kUnitW ? 1 : static_cast<Index>(args.x_strides.w);
    const Index dy_step_w = C::kUnitW ? 1 : static_cast<Index>(args.dy_strides.w);
    const Scalar* x = static_cast<const Scalar*>(args.x) + i.n * static_cast<Index>(args.x_strides.n) +
                      i.d * static_cast<Index>(args.x_strides.d) +
                      i.h * static_cast<Index>(args.x_strides.h) + i.w * x_step_w;
    const Scalar* dy = static_cast<const Scalar*>(args.dy) + i.n * static_cast<Index>(args.dy_strides.n) +
                       d * static_cast<Index>(args.dy_strides.d) + h * static_cast<Index>(args.dy_strides.h) +
                       first_w * dy_step_w;
    Acc x_value[C::kTileIn], dy_value[C::kTileOut][C::kTapsW];
    // Channels past the group's last channel read the last one again, and their sums are never written.
#pragma unroll
    for (int a = 0; a < C::kTileIn; ++a) {
      const int channel = group * C::kInPerGroup + at_most(in + a, C::kInPerGroup - 1);
      x_value[a] = widen<Acc>(x[channel * static_cast<Index>(args.x_strides.c)]);
    }
#pragma unroll
    for (int b = 0; b < C::kTileOut; ++b) {
      const int channel = group * C::kOutPerGroup + at_most(out + b, C::kOutPerGroup - 1);
      const Scalar* line = dy + channel * static_cast<Index>(args.dy_strides.c);
#pragma unroll
      for (int t = 0; t < C::kTapsW; ++t) {
        const int w = first_w + t * C::kDilationW;
        const bool inside = w >= 0 && w < args.dy_size.w;
        dy_value[b][t] = inside ? widen<Acc>(line[t * C::kDilationW * dy_step_w]) : Acc(0);
      }
    }
#pragma unroll
    for (int a = 0; a < C::kTileIn; ++a) {
#pragma unroll
      for (int b = 0; b < C::kTileOut; ++b) {
#pragma unroll
        for (int t = 0; t < C::kTapsW; ++t) sum[a][b][t] += x_value[a] * dy_value[b][t];
      }
    }
  }

  __device__ __forceinline__ void store() {
    constexpr long long kTaps = static_cast<long long>(C::kKernelD) * C::kKernelH * C::kKernelW;
    constexpr long long kSize = C::kGroups * C::kInPerGroup * C::kOutPerGroup * kTaps;
    using Stored = typename C::Stored;
    Stored* parts = static_cast<Stored*>(args.parts) + split * kSize;
#pragma unroll
    for (int a = 0; a < C::kTileIn; ++a) {
#pragma unroll
      for (int b = 0; b < C::kTileOut; ++b) {
#pragma unroll
        for (int t = 0; t < C::kTapsW; ++t) {
          const Acc total = C::kLanesArePositions ? warp_sum(sum[a][b][t]) : sum[a][b][t];
          constexpr int kWriters = C::kLanesArePositions ? kLanes : 1;
          const bool writer = !C::kLanesArePositions || lane == (a * C::kTileOut + b + t) % kWriters;
          const bool exists = tile < kTiles && in + a < C::kInPerGroup && out + b < C::kOutPerGroup &&
                              tap_w + t < C::kKernelW;
          const long long channels =
              static_cast<long long>(group * C::kInPerGroup + in + a) * C::kOutPerGroup + out + b;
          const long long tap = (tap_d * C::kKernelH + tap_h) * C::kKernelW + tap_w + t;
          if (writer && exists) parts[channels * kTaps + tap] = Narrow<Stored>::from(total);
        }
      }
    }
  }

  // Sums one channel of dy over batch and volume, if the block has a warp for it.
  __device__ __forceinline__ void sum_channel(long long channel) {
    if (channel >= C::kGroups * C::kOutPerGroup) return;
    const Scalar* dy = static_cast<const Scalar*>(args.dy) +
                       static_cast<Index>(channel) * static_cast<Index>(args.dy_strides.c);
    LongSum<Acc> sum;
    Cursor<Index> i(lane, args.dy_walk);
#pragma unroll 4
    for (int position = lane; position < args.dy_positions; position += kLanes) {
      sum.add(widen<Acc>(
          dy[i.n * static_cast<Index>(args.dy_strides.n) + i.d * static_cast<Index>(args.dy_strides.d) +
             i.h * static_cast<Index>(args.dy_strides.h) + i.w * static_cast<Index>(args.dy_strides.w)]));
      i.advance(args.dy_walk);
    }
    const Acc total = warp_sum(sum.total);
    using Stored = typename C::Stored;
    if (lane == 0) static_cast<Stored*>(args.bias)[channel] = Narrow<Stored>::from(total);
  }

  __device__ __forceinline__ void compute() {
    lane = threadIdx.x % kLanes;
    const long long warp = static_cast<long long>(blockIdx.x) * (C::kThreads / kLanes) + threadIdx.x / kLanes;
    if (warp >= args.warps) {
      if constexpr (C::kBias) sum_channel(warp - args.warps);
      return;
    }
    locate(warp);
#pragma unroll
    for (int a = 0; a < C::kTileIn; ++a) {
#pragma unroll
      for (int b = 0; b < C::kTileOut; ++b) {
#pragma unroll
        for (int t = 0; t < C::kTapsW; ++t) sum[a][b][t] = 0;
      }
    }
    const Part<Index> part(static_cast<Index>(args.positions), args.splits, split);
    const int step = C::kLanesArePositions ? kLanes : 1;
    const Index first = part.begin + (C::kLanesArePositions ? lane : 0);
    Cursor<Index> i(first, args.walk);
    for (Index position = first; position < part.end; position += step) {
      add_position(i);
      i.advance(args.walk);
    }
    store();
  }
};

template <class Config>
__device__ void run(const Args& args) {
  WeightGrad<Config> kernel{args};
  kernel.compute();
}

}  // namespace tconv3d
