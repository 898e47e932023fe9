// Computes the moments of every channel of an activation, strip by strip (sweep.cuh), for layers whose
// convolution kernel does not compute them itself.
//
// The shift of a strip is the mean of kSamples of the strip's values of the channel, taken at even distances.
// It lies near the strip's mean, whatever that is, so that little cancels in the subtraction of squares: a
// sample that is far from all other values moves the shift by only 1 / kSamples of its distance.
#pragma once

#include "moments.cuh"
#include "sweep.cuh"

namespace tconv3d {

template <class C>
struct ChannelMoments {
  using Scalar = typename C::Scalar;
  using Acc = typename C::Acc;
  static constexpr int kSamples = 8;

  const Scalar* x;  // start of the strip, at the thread's first channel
  Acc shift[Sweep<C>::kOwn];
  Acc sums[Sweep<C>::kOwn][2];  // sums of the deviations from the shift, and of their squares

  // `pitch` is the distance between positions of the strip, in items.
  __device__ __forceinline__ void choose_shift(int positions, int pitch) {
#pragma unroll
    for (int k = 0; k < kSamples; ++k) {
      const int at = static_cast<int>(static_cast<long long>(positions) * k / kSamples) * pitch;
#pragma unroll
      for (int i = 0; i < Sweep<C>::kOwn; ++i) {
        shift[i] += widen<Acc>(x[at + i]) / kSamples;
      }
    }
  }

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
  if (sweep.exists) {
    moments.choose_shift(sweep.positions(args.strips), C::kChannelsLast ? args.strips.channels : 1);
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
