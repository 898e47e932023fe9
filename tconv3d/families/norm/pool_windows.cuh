// What pools and their gradients share: where a thread's element is, and how many places a window has.
#pragma once

#include "common.cuh"

namespace tconv3d {

// The location of an element or of a vector of neighbouring channels, in a tensor whose volume is [size].
template <class C>
struct PoolPlace {
  using Index = typename IndexType<C::kWide>::type;

  int d, h, w;
  long long item;  // batch item; or batch item * channels + channel if channels are not last
  int channel;     // first channel of the vector; 0 if channels are not last

  template <class Args>
  __device__ __forceinline__ PoolPlace(const Args& args, Index at, const Extent& size) {
    const Index position = divide(at, args.by_channels);
    const Index line = divide(position, args.by_w);
    const Index plane = divide(line, args.by_h);
    const Index outer = divide(plane, args.by_d);
    channel = static_cast<int>(at - position * static_cast<Index>(args.by_channels.divisor)) * C::kVector;
    w = static_cast<int>(position - line * size.w);
    h = static_cast<int>(line - plane * size.h);
    d = static_cast<int>(plane - outer * size.d);
    item = outer;
  }

  // Batch item * channels + channel, of the first channel of the vector.
  __device__ __forceinline__ long long row(int channels) const {
    return C::kChannelsLast ? item * channels + channel : item;
  }
  // The index of the vector at a place of a volume of this size.
  __device__ __forceinline__ long long index(const Extent& size, int channels, int place) const {
    const long long position = item * (static_cast<long long>(size.d) * size.h * size.w) + place;
    return C::kChannelsLast ? position * channels + channel : position;
  }
};

// The number that the sum of a window is divided by, as PyTorch counts: windows end at the padded border.
template <class C>
struct PoolDivisor {
  static __device__ __forceinline__ int places(int first, int window, int size, int padding) {
    const int most = C::kCountsPadding ? size + padding : size;
    const int last = first + window < most ? first + window : most;
    return last - (C::kCountsPadding || first > 0 ? first : 0);
  }
  static __device__ __forceinline__ int of(int d, int h, int w, const Extent& size) {
    if constexpr (C::kDivisor != 0) return C::kDivisor;
    return places(d * C::kStepD - C::kPaddingD, C::kWindowD, size.d, C::kPaddingD) *
           places(h * C::kStepH - C::kPaddingH, C::kWindowH, size.h, C::kPaddingH) *
           places(w * C::kStepW - C::kPaddingW, C::kWindowW, size.w, C::kPaddingW);
  }
};

}  // namespace tconv3d
