// Adds the partial sums of split kernels, always in the same order, and writes the result in the caller's
// format. Where there are many parts and few elements, kLanes threads share one element; neighbouring threads
// always have neighbouring elements.
#pragma once

#include "cursor.cuh"

namespace tconv3d {

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  static_assert(C::kThreads % C::kLanes == 0, "every element has its lanes");
  constexpr int kElements = C::kThreads / C::kLanes;  // elements of a block
  const int lane = static_cast<int>(threadIdx.x) / kElements;
  const long long element = static_cast<long long>(blockIdx.x) * kElements + threadIdx.x % kElements;
  const Acc* part = static_cast<const Acc*>(args.parts) + element;
  if constexpr (C::kOverlaps) ptx::wait_for_previous_launch();
  Acc sum = 0;
  if (element < args.count) {
#pragma unroll 4
    for (int split = lane; split < args.splits; split += C::kLanes) sum += part[split * args.count];
  }
  if constexpr (C::kLanes > 1) {
    Acc* sums = dynamic_shared<Acc>();
    sums[threadIdx.x] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < C::kLanes; ++i) sum += sums[i * kElements + threadIdx.x % kElements];
  }
  if (lane != 0 || element >= args.count) return;
  const Cursor<long long> i(element, args.walk);
  static_cast<typename C::Scalar*>(args.result)[i.n * args.strides.n + i.d * args.strides.d +
                                                i.h * args.strides.h + i.w * args.strides.w] =
      Narrow<typename C::Scalar>::from(sum);
}

}  // namespace tconv3d
