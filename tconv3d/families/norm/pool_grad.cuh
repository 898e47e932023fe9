// The gradient of a pool, and a pointwise expression of it: a thread gathers for one element (with channels
// last: for kVector neighbouring channels) from all windows that contain it, always in the same order. The
// gathered number is the local number of the expression, whose value is the element that was pooled.
#pragma once

#include "pool_operands.cuh"
#include "pool_windows.cuh"

namespace tconv3d {

// The windows [first, last] of one dimension that reach a place.
struct PoolReach {
  int first, last;
  __device__ __forceinline__ PoolReach(int place, int window, int step, int padding, int dilation,
                                       int count) {
    const int before = place + padding - (window - 1) * dilation;
    first = before > 0 ? (before + step - 1) / step : 0;
    last = (place + padding) / step;
    if (last >= count) last = count - 1;
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  using Result = typename C::Result;
  using Gradient = typename C::Gradient;
  using Element = PoolElement<C, 1>;
  using Index = typename PoolPlace<C>::Index;
  static_assert(C::kChannelsLast || C::kVector == 1, "only neighbouring channels are a vector");

  const Index at = static_cast<Index>(blockIdx.x) * C::kThreads + static_cast<Index>(threadIdx.x);
  if (at >= args.count) return;
  const PoolPlace<C> place(args, at, args.x_size);
  const int own = (place.d * args.x_size.h + place.h) * args.x_size.w + place.w;
  const PoolReach of_d(place.d, C::kWindowD, C::kStepD, C::kPaddingD, C::kDilationD, args.y_size.d);
  const PoolReach of_h(place.h, C::kWindowH, C::kStepH, C::kPaddingH, C::kDilationH, args.y_size.h);
  const PoolReach of_w(place.w, C::kWindowW, C::kStepW, C::kPaddingW, C::kDilationW, args.y_size.w);
  Acc sums[C::kVector] = {};
  for (int d = of_d.first; d <= of_d.last; ++d) {
    for (int h = of_h.first; h <= of_h.last; ++h) {
      for (int w = of_w.first; w <= of_w.last; ++w) {
        const int window = (d * args.y_size.h + h) * args.y_size.w + w;
        const long long from = place.index(args.y_size, args.channels, window);
        const auto grads = load_vector<C::kVector>(static_cast<const Gradient*>(args.grad) + from);
        if constexpr (C::kAverages) {
          const Acc count = static_cast<Acc>(PoolDivisor<C>::of(d, h, w, args.x_size));
#pragma unroll
          for (int v = 0; v < C::kVector; ++v) sums[v] += widen<Acc>(grads.at[v]) / count;
        } else {
          const auto chosen = load_vector<C::kVector>(static_cast<const long long*>(args.indices) + from);
#pragma unroll
          for (int v = 0; v < C::kVector; ++v)
            if (chosen.at[v] == own) sums[v] += widen<Acc>(grads.at[v]);
        }
      }
    }
  }
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
