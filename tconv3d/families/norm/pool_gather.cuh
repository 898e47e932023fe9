// The gradient of a pool at one place: what all windows that contain the place give to it.
#pragma once

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

// Adds the gradient of kWidth neighbouring channels at a place to `sums`, always in the same order. `first`
// is the index of the first window of the channels in the pooled tensor, and windows lie `pitch` apart.
template <class C, int kWidth, class Args>
__device__ __forceinline__ void gather_windows(const Args& args, int at_d, int at_h, int at_w,
                                               long long first, int pitch, typename C::Acc* sums) {
  using Acc = typename C::Acc;
  const int own = (at_d * args.x_size.h + at_h) * args.x_size.w + at_w;
  const PoolReach of_d(at_d, C::kWindowD, C::kStepD, C::kPaddingD, C::kDilationD, args.y_size.d);
  const PoolReach of_h(at_h, C::kWindowH, C::kStepH, C::kPaddingH, C::kDilationH, args.y_size.h);
  const PoolReach of_w(at_w, C::kWindowW, C::kStepW, C::kPaddingW, C::kDilationW, args.y_size.w);
  for (int d = of_d.first; d <= of_d.last; ++d) {
    for (int h = of_h.first; h <= of_h.last; ++h) {
      for (int w = of_w.first; w <= of_w.last; ++w) {
        const int window = (d * args.y_size.h + h) * args.y_size.w + w;
        const long long from = first + static_cast<long long>(window) * pitch;
        const auto grads = load_vector<kWidth>(static_cast<const typename C::Gradient*>(args.grad) + from);
        if constexpr (C::kAverages) {
          const Acc count = static_cast<Acc>(PoolDivisor<C>::of(d, h, w, args.x_size));
#pragma unroll
          for (int v = 0; v < kWidth; ++v) sums[v] += widen<Acc>(grads.at[v]) / count;
        } else {
          const auto chosen = load_vector<kWidth>(static_cast<const long long*>(args.indices) + from);
#pragma unroll
          for (int v = 0; v < kWidth; ++v)
            if (chosen.at[v] == own) sums[v] += widen<Acc>(grads.at[v]);
        }
      }
    }
  }
}

}  // namespace tconv3d
