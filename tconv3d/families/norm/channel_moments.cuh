// Computes the moments of every channel of an activation, strip by strip (sweep.cuh), for layers whose
// convolution kernel does not compute them itself.
//
// The shift of a strip is the strip's first value of the channel. Because the shift is one of the values
// themselves, the cancellation in the subtraction of squares is bounded by the strip's length, whatever the
// mean.
#pragma once

#include "moments.cuh"
#include "sweep.cuh"

namespace tconv3d {

template <class C>
struct ChannelMoments {
  using Scalar = typename C::Scalar;
  using Acc = typename C::Acc;

  const Scalar* x;  // start of the strip, at the thread's first channel
  Acc shift[Sweep<C>::kOwn];
  Acc sums[Sweep<C>::kOwn][2];  // sums of the deviations from the shift, and of their squares

  template <int kCount>
  __device__ __forceinline__ Vector<Scalar, kCount> load(int at) const {
    return load_vector<kCount>(x + at);
  }
  template <int kCount>
  __device__ __forceinline__ void use(int, const Vector<Scalar, kCount>& items) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int own = C::kChannelsLast ? i : 0;
      const Acc deviation = widen<Acc>(items.at[i]) - shift[own];
      sums[own][0] += deviation;
      sums[own][1] += deviation * deviation;
    }
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  const Sweep<C> sweep(args.strips, blockIdx.x);
  ChannelMoments<C> moments{static_cast<const typename C::Scalar*>(args.x) + sweep.start, {}, {}};
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    if (sweep.exists) moments.shift[i] = widen<Acc>(moments.x[i]);
  }
  sweep.run(moments);
  sweep.add_up(moments.sums, dynamic_shared<Acc>());
  if (!sweep.speaks) return;
  const Acc count = static_cast<Acc>(sweep.positions(args.strips));
  Moments<Acc>* to = static_cast<Moments<Acc>*>(args.moments);
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    const long long row = static_cast<long long>(sweep.n) * args.strips.channels + sweep.channel + i;
    to[row * args.strips.slots + sweep.slot] =
        Moments<Acc>{count, moments.shift[i], moments.sums[i][0], moments.sums[i][1]};
  }
}

}  // namespace tconv3d
