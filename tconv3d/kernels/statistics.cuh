// Moments -> mean and reciprocal deviation of every norm group of every batch item. A block has one of them.
//
// Two passes over the moments (the mean first, then the squares about it), in float64, each sum in an order
// that depends on nothing but the number of moments: as exact as their own rounding, and bitwise the same
// from run to run.
#pragma once

#include "moments.cuh"

namespace tconv3d {

struct Args {
  const void* moments;  // [norm groups of all batch items][count]
  void* statistics;     // [2][norm groups of all batch items]: means, then reciprocal deviations
  double eps;
  int count;
};

template <class C>
__device__ __forceinline__ double block_sum(double value, double* shared) {
  constexpr int kWarps = C::kThreads / 32;
  value = warp_sum(value);
  __syncthreads();  // the last sum has been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp];
  return sum;
}

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  double* shared = dynamic_shared<double>();
  const Moments<Acc>* moments =
      static_cast<const Moments<Acc>*>(args.moments) + static_cast<long long>(blockIdx.x) * args.count;
  double values = 0, total = 0;
  if constexpr (C::kOverlaps) ptx::wait_for_previous_launch();
#pragma unroll 4
  for (int i = threadIdx.x; i < args.count; i += C::kThreads) {
    const Moments<Acc> part = moments[i];
    const double count = part.count;
    values += count;
    total += count * part.shift + part.sum;
  }
  values = block_sum<C>(values, shared);
  const double mean = block_sum<C>(total, shared) / values;
  double squares = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < args.count; i += C::kThreads) {
    const Moments<Acc> part = moments[i];
    const double shift = part.shift - mean;  // value - mean == (value - part.shift) + shift
    squares += part.squares + shift * (2 * static_cast<double>(part.sum) + part.count * shift);
  }
  squares = block_sum<C>(squares, shared);
  if (threadIdx.x != 0) return;
  const double variance = squares < 0 ? 0 : squares / values;  // NaN stays NaN
  Acc* result = static_cast<Acc*>(args.statistics);
  result[blockIdx.x] = static_cast<Acc>(mean);
  result[gridDim.x + blockIdx.x] = static_cast<Acc>(1 / sqrt(variance + args.eps));
}

}  // namespace tconv3d
