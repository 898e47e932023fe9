// Adds the partial sums that a kernel stored for several gradients, always in the same order, and writes the
// gradients. The parts of one gradient lie one after the other, each laid out like the result.
//
// A lane has four neighbouring elements. `slices` of the eight warps of a block share the parts of 128
// elements.
#pragma once

#include "common.cuh"

namespace tconv3d {

// One of three.
template <int kWhich, class T>
__device__ __forceinline__ const T& choose(const T& first, const T& second, const T& third) {
  if constexpr (kWhich == 0) return first;
  if constexpr (kWhich == 1) return second;
  return third;
}

template <class C>
__device__ void run(const Args& args) {
  using Scalar = typename C::Scalar;
  using Four = Vector<float, 4>;
  constexpr int kLanes = 32, kWarps = C::kThreads / kLanes;
  __shared__ Four sums[kWarps][kLanes];
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const int block = static_cast<int>(blockIdx.x);
  if constexpr (C::kOverlaps) ptx::wait_for_previous_launch();
  static_for<3>([&](auto which) {
    constexpr int kWhich = decltype(which)::value;
    const Gradient& gradient = choose<kWhich>(args.first, args.second, args.third);
    const void* const parts = choose<kWhich>(args.first_parts, args.second_parts, args.third_parts);
    void* const result = choose<kWhich>(args.first_result, args.second_result, args.third_result);
    const int local = block - gradient.first_block;
    if (local < 0 || local >= gradient.blocks) return;
    const int slice = warp % gradient.slices, groups = kWarps / gradient.slices;
    const long long first =
        4 * ((static_cast<long long>(local) * groups + warp / gradient.slices) * kLanes + lane);
    Four sum{};
    if (first < gradient.count) {
      const float* const from = static_cast<const float*>(parts) + first;
#pragma unroll 8
      for (int part = slice; part < gradient.parts; part += gradient.slices) {
        const Four values = load_vector<4>(from + part * gradient.pitch);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.at[e] += values.at[e];
      }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (slice != 0 || first >= gradient.count) return;
    for (int other = 1; other < gradient.slices; ++other) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.at[e] += sums[warp + other][lane].at[e];
    }
    Scalar* const to = static_cast<Scalar*>(result) + first;
    Vector<Scalar, 4> narrow;
#pragma unroll
    for (int e = 0; e < 4; ++e) narrow.at[e] = Narrow<Scalar>::from(sum.at[e]);
    if (gradient.count - first >= 4) {
      *reinterpret_cast<Vector<Scalar, 4>*>(to) = narrow;
    } else {
      for (int e = 0; e < gradient.count - first; ++e) to[e] = narrow.at[e];
    }
  });
}

}  // namespace tconv3d
