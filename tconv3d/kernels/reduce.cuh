// Adds the parts that split kernels leave, always in the same order, and writes the result in the caller's
// format. kLanes threads (1 or a warp) share one element: a warp where there are many parts and few elements.
#pragma once

#include "cursor.cuh"

namespace tconv3d {

struct Args {
  const void* parts;  // [splits][count]
  void* result;  // a tensor of walk.size with these strides; element i of a part is its i-th in (n, d, h, w)
  Strides strides;  // c is unused
  long long count;
  int splits;
  Walk walk;
};

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  static_assert(C::kLanes == 1 || C::kLanes == 32, "one thread or one warp to an element");
  const long long element = (static_cast<long long>(blockIdx.x) * C::kThreads + threadIdx.x) / C::kLanes;
  if (element >= args.count) return;
  const int lane = threadIdx.x % C::kLanes;
  const Acc* part = static_cast<const Acc*>(args.parts) + element;
  Acc sum = 0;
#pragma unroll 4
  for (int split = lane; split < args.splits; split += C::kLanes) sum += part[split * args.count];
  if constexpr (C::kLanes > 1) sum = warp_sum(sum);
  if (lane != 0) return;
  const Cursor<long long> i(element, args.walk);
  static_cast<typename C::Scalar*>(args.result)[i.n * args.strides.n + i.d * args.strides.d +
                                                i.h * args.strides.h + i.w * args.strides.w] =
      Narrow<typename C::Scalar>::from(sum);
}

}  // namespace tconv3d
