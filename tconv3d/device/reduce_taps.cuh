// Adds the partial sums of split kernels, laid out as [taps][out][in], always in the same order, and writes
// them as a weight, [in][out][taps]. A row is one (out, tap), in the weight's order: a block transposes a
// tile of rows and input channels in shared memory, so that reads and writes are both contiguous. kSlices
// warps share the parts of a row. With kBias the last blocks add the partial sums of the bias gradient.
#pragma once

#include "common.cuh"

namespace tconv3d {

// Eight channels of a block, 32 threads each.
template <class C>
__device__ __forceinline__ void sum_bias(const Args& args, int block, float* sums) {
  constexpr int kChannels = 8, kThreads = 32;
  static_assert(C::kThreads == kChannels * kThreads);
  const int thread = static_cast<int>(threadIdx.x) / kChannels,
            of = static_cast<int>(threadIdx.x) % kChannels;
  const int channel = block * kChannels + of;
  float sum = 0.0f;
  if (channel < args.channels) {
    const float* const parts = static_cast<const float*>(args.bias_parts) + channel;
#pragma unroll 4
    for (int i = thread; i < args.bias_splits; i += kThreads) {
      sum += parts[static_cast<long long>(i) * args.channels];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (thread != 0 || channel >= args.channels) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads; ++i) sum += sums[i * kChannels + of];
  static_cast<typename C::Scalar*>(args.bias)[channel] = Narrow<typename C::Scalar>::from(sum);
}

template <class C>
__device__ void run(const Args& args) {
  // Warps that share the rows of a tile.
  constexpr int kLanes = 32, kWarps = C::kThreads / kLanes / C::kSlices;
  static_assert(C::kRows % kWarps == 0 && C::kThreads % C::kRows == 0);
  static_assert(C::kSlices * C::kRows >= 8, "room for the sums of a bias");
  // One extra word per row avoids bank conflicts of the transpose.
  __shared__ float tile[C::kSlices][C::kRows][kLanes + 1];
  const int rows = args.out * args.taps;
  const int row_tiles = (rows + C::kRows - 1) / C::kRows;
  const int first_row = static_cast<int>(blockIdx.x) % row_tiles * C::kRows;
  const int first_in = static_cast<int>(blockIdx.x) / row_tiles * kLanes;
  ptx::launch_dependents();
  ptx::wait_for_previous_launch();
  if constexpr (C::kBias) {
    if (first_in >= args.in) {
      const int in_tiles = (args.in + kLanes - 1) / kLanes;
      sum_bias<C>(args, static_cast<int>(blockIdx.x) - row_tiles * in_tiles, &tile[0][0][0]);
      return;
    }
  }
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const int slice = warp % C::kSlices, own_row = warp / C::kSlices;
  // A warp adds several rows at a time, so that many loads are in flight.
  constexpr int kOwn = C::kRows / kWarps;
  const int in = first_in + lane;
  const float* parts[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int row = min(first_row + i * kWarps + own_row, rows - 1), out = row / args.taps;
    parts[i] = static_cast<const float*>(args.parts) + slice * args.count +
               (static_cast<long long>(row - out * args.taps) * args.out + out) * args.in + in;
  }
  float sums[kOwn] = {};
  if (in < args.in) {
#pragma unroll 4
    for (int split = slice; split < args.splits; split += C::kSlices) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        sums[i] += *parts[i];
        parts[i] += C::kSlices * args.count;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) tile[slice][i * kWarps + own_row][lane] = sums[i];
  __syncthreads();
  const int local = static_cast<int>(threadIdx.x) % C::kRows, row = first_row + local;
  const int out = row / args.taps, tap = row - out * args.taps;
  if (row >= rows) return;
  for (int i = static_cast<int>(threadIdx.x) / C::kRows; i < kLanes; i += C::kThreads / C::kRows) {
    if (first_in + i >= args.in) break;
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < C::kSlices; ++from) sum += tile[from][local][i];
    static_cast<typename C::Scalar*>(
        args.result)[(first_in + i) * args.stride_in + out * args.stride_out + tap * args.stride_tap] =
        Narrow<typename C::Scalar>::from(sum);
  }
}

}  // namespace tconv3d
