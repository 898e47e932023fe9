// Computes mean and reciprocal deviation of every norm group of every batch item from moments. A block has
// one norm group of one batch item.
//
// Two passes over the moments (the mean first, then the squares about it) sum in float64, in an order that
// depends on the number of moments only. The result is as exact as the rounding of the moments, and bitwise
// reproducible.
#pragma once

#include "moments.cuh"

namespace tconv3d {

// The sums over all threads, of each of several numbers. `shared` has room for as many of every warp, which
// nobody reads any more.
template <class C, int kCount>
__device__ __forceinline__ void block_sum(double (&values)[kCount], double (*shared)[kCount]) {
  constexpr int kWarps = C::kThreads / 32;
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = warp_sum(values[i]);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32][i] = values[i];
    values[i] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += shared[warp][i];
  }
}

// Calls body(part) for the moments that this thread sums. The loads of kFlight moments are in flight at a
// time.
template <class C, class Acc, class Body>
__device__ __forceinline__ void for_own(const Moments<Acc>* moments, int count, const Body& body) {
  constexpr int kFlight = 4;
  for (int first = threadIdx.x; first < count; first += kFlight * C::kThreads) {
    Moments<Acc> parts[kFlight];
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      if (first + i * C::kThreads < count) parts[i] = moments[first + i * C::kThreads];
    }
#pragma unroll
    for (int i = 0; i < kFlight; ++i) {
      if (first + i * C::kThreads < count) body(parts[i]);
    }
  }
}

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  __shared__ double first[C::kThreads / 32][2], second[C::kThreads / 32][1];
  const Moments<Acc>* moments =
      static_cast<const Moments<Acc>*>(args.moments) + static_cast<long long>(blockIdx.x) * args.count;
  double sums[2] = {0, 0};  // number of values, and their sum
  if constexpr (C::kOverlaps) ptx::wait_for_previous_launch();
  for_own<C>(moments, args.count, [&](const Moments<Acc>& part) {
    const double count = part.count;
    sums[0] += count;
    sums[1] += count * part.shift + part.sum;
  });
  block_sum<C>(sums, first);
  const double mean = sums[1] / sums[0];
  double squares[1] = {0};
  for_own<C>(moments, args.count, [&](const Moments<Acc>& part) {
    const double shift = part.shift - mean;  // value - mean == (value - part.shift) + shift
    squares[0] += part.squares + shift * (2 * static_cast<double>(part.sum) + part.count * shift);
  });
  block_sum<C>(squares, second);
  if (threadIdx.x != 0) return;
  const double variance = squares[0] < 0 ? 0 : squares[0] / sums[0];  // a NaN stays a NaN
  Acc* result = static_cast<Acc*>(args.statistics);
  result[blockIdx.x] = static_cast<Acc>(mean);
  result[gridDim.x + blockIdx.x] = static_cast<Acc>(1 / sqrt(variance + args.eps));
}

}  // namespace tconv3d
