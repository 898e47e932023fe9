// The gradient of a pool, and a pointwise expression of it: a thread gathers for one element (with channels
// last: for kVector neighbouring channels) from all windows that contain it, always in the same order. The
// gathered number is the local number of the expression, whose value is the element that was pooled.
#pragma once

#include "pool_gather.cuh"
#include "pool_operands.cuh"

namespace tconv3d {

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  using Result = typename C::Result;
  using Element = PoolElement<C, 1>;
  using Index = typename PoolPlace<C>::Index;
  static_assert(C::kChannelsLast || C::kVector == 1, "only neighbouring channels are a vector");

  const Index at = static_cast<Index>(blockIdx.x) * C::kThreads + static_cast<Index>(threadIdx.x);
  if (at >= args.count) return;
  const PoolPlace<C> place(args, at, args.x_size);
  const int own = (place.d * args.x_size.h + place.h) * args.x_size.w + place.w;
  Acc sums[C::kVector] = {};
  gather_windows<C, C::kVector>(args, place.d, place.h, place.w, place.index(args.y_size, args.channels, 0),
                                C::kChannelsLast ? args.channels : 1, sums);
  const long long to = place.index(args.x_size, args.channels, own);
  const PoolItems<Element, C, Args> items(args, to);
  Vector<Result, C::kVector> results;
#pragma unroll
  for (int v = 0; v < C::kVector; ++v) {
    Element element = pool_element<Element>(args, place.row(args.channels) + v);
    items.put(element, v);
    element.number = sums[v];
    results.at[v] = Narrow<Result>::from(C::Expression::of(element));
  }
  *reinterpret_cast<Vector<Result, C::kVector>*>(static_cast<Result*>(args.y) + to) = results;
}

}  // namespace tconv3d
