// Adds the partial sums of split kernels, always in the same order, and writes the results in the caller's
// format. A launch adds the parts of one result or of two: the first blocks belong to the first. Where there
// are many parts and few elements, several threads (kLanes, kMoreLanes) share one element; neighbouring
// threads always have neighbouring elements.
#pragma once

#include "cursor.cuh"

namespace tconv3d {

// Adds the parts of the elements that belong to a block, counted from the first block of the result.
template <class C, int kLanes>
__device__ __forceinline__ void add_parts(const void* parts, void* result, const Addition& addition,
                                          long long block) {
  using Acc = typename C::Acc;
  static_assert(C::kThreads % kLanes == 0, "every element has its lanes");
  constexpr int kElements = C::kThreads / kLanes;  // elements of a block
  const int lane = static_cast<int>(threadIdx.x) / kElements;
  const long long element = block * kElements + threadIdx.x % kElements;
  const Acc* part = static_cast<const Acc*>(parts) + element;
  Acc sum = 0;
  if (element < addition.count) {
#pragma unroll 4
    for (int split = lane; split < addition.splits; split += kLanes) sum += part[split * addition.count];
  }
  if constexpr (kLanes > 1) {
    Acc* sums = dynamic_shared<Acc>();
    sums[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sum += sums[i * kElements + threadIdx.x % kElements];
  }
  if (lane != 0 || element >= addition.count) return;
  const Cursor<long long> i(element, addition.walk);
  const Strides& strides = addition.strides;
  static_cast<typename C::Scalar*>(
      result)[i.n * strides.n + i.d * strides.d + i.h * strides.h + i.w * strides.w] =
      Narrow<typename C::Scalar>::from(sum);
}

template <class C>
__device__ void run(const Args& args) {
  if constexpr (C::kOverlaps) ptx::wait_for_previous_launch();
  constexpr int kElements = C::kThreads / C::kLanes;
  const long long block = blockIdx.x, blocks = (args.addition.count + kElements - 1) / kElements;
  if constexpr (C::kMoreLanes > 0) {
    if (block >= blocks) {
      add_parts<C, C::kMoreLanes>(args.more_parts, args.more_result, args.more, block - blocks);
      return;
    }
  }
  add_parts<C, C::kLanes>(args.parts, args.result, args.addition, block);
}

}  // namespace tconv3d
