// One pass that pools activations over windows of their volume, with pointwise expressions of every element
// before and of every result behind the pool. Windows may overlap, be dilated, and reach over the border.
// With kPlaces the pass stores the largest elements and, beside them, their places.
//
// A thread computes one result; with channels last it computes kVector neighbouring channels of one position.
// Neighbouring threads have neighbouring results, so that what windows share comes out of L1.
#pragma once

#include "axis_reductions.cuh"
#include "pool_operands.cuh"
#include "pool_windows.cuh"

namespace tconv3d {

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  using Result = typename C::Result;
  using Element = PoolElement<C, 0>;
  using Index = typename PoolPlace<C>::Index;
  static_assert(C::kChannelsLast || C::kVector == 1, "only neighbouring channels are a vector");
  // Whether places are few enough to unroll all loops.
  [[maybe_unused]] constexpr bool kFew = C::kWindowD * C::kWindowH * C::kWindowW <= 64;

  const Index at = static_cast<Index>(blockIdx.x) * C::kThreads + static_cast<Index>(threadIdx.x);
  if (at >= args.count) return;
  const PoolPlace<C> place(args, at, args.y_size);
  const long long row = place.row(args.channels);
  typename C::Way::template State<Acc> states[C::kVector];
#pragma unroll(kFew ? C::kWindowD : 1)
  for (int i = 0; i < C::kWindowD; ++i) {
    const int d = place.d * C::kStepD - C::kPaddingD + i * C::kDilationD;
#pragma unroll(kFew ? C::kWindowH : 1)
    for (int j = 0; j < C::kWindowH; ++j) {
      const int h = place.h * C::kStepH - C::kPaddingH + j * C::kDilationH;
      const bool inside = d >= 0 && d < args.x_size.d && h >= 0 && h < args.x_size.h;
#pragma unroll(kFew ? C::kWindowW : 1)
      for (int k = 0; k < C::kWindowW; ++k) {
        const int w = place.w * C::kStepW - C::kPaddingW + k * C::kDilationW;
        if (!inside || w < 0 || w >= args.x_size.w) continue;
        const int from = (d * args.x_size.h + h) * args.x_size.w + w;
        const PoolItems<Element, C, Args> items(args, place.index(args.x_size, args.channels, from));
#pragma unroll
        for (int v = 0; v < C::kVector; ++v) {
          Element element = pool_element<Element>(args, row + v);
          items.put(element, v);
          states[v].take(C::Before::of(element), from);
        }
      }
    }
  }
  Vector<Result, C::kVector> results;
  [[maybe_unused]] Vector<long long, C::kPlaces ? C::kVector : 1> places;
#pragma unroll
  for (int v = 0; v < C::kVector; ++v) {
    Element element = pool_element<Element>(args, row + v);
    if constexpr (C::kPlaces) {
      element.values[0] = states[v].best;
      places.at[v] = states[v].index;
    } else {
      element.values[0] = states[v].result();
    }
    if constexpr (C::kAverages)
      element.values[0] /= static_cast<Acc>(PoolDivisor<C>::of(place.d, place.h, place.w, args.x_size));
    results.at[v] = Narrow<Result>::from(C::After::of(element));
  }
  *reinterpret_cast<Vector<Result, C::kVector>*>(static_cast<Result*>(args.y) +
                                                 static_cast<long long>(at) * C::kVector) = results;
  if constexpr (C::kPlaces) {
    long long* const to = static_cast<long long*>(args.places) + static_cast<long long>(at) * C::kVector;
#pragma unroll
    for (int v = 0; v < C::kVector; ++v) to[v] = places.at[v];
  }
}

}  // namespace tconv3d
