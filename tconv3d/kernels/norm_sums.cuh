// First pass of GroupNorm's gradient: for every channel, strip by strip, the sums of dy and of dy times the
// normalized x.
#pragma once

#include "sweep.cuh"

namespace tconv3d {

struct Args {
  const void* dy;
  const void* x;           // what was normalized
  const void* statistics;  // [2][batch][norm groups]: means, then reciprocal deviations
  void* sums;              // [batch][channels][slots] pairs
  Strips strips;
  int groups, per_group;  // norm groups, and channels of each
};

template <class C>
struct NormSums {
  using Scalar = typename C::Scalar;
  using Gradient = typename C::Gradient;
  using Acc = typename C::Acc;
  template <int kCount>
  struct Items {
    Vector<Gradient, kCount> dy;
    Vector<Scalar, kCount> x;
  };

  const Gradient* dy;  // the strip's
  const Scalar* x;
  Acc mean[Sweep<C>::kOwn];
  Acc sums[Sweep<C>::kOwn][2];  // of dy, of dy * (x - mean)

  template <int kCount>
  __device__ __forceinline__ Items<kCount> load(int at) const {
    return {load_vector<kCount>(dy + at), load_vector<kCount>(x + at)};
  }
  template <int kCount>
  __device__ __forceinline__ void use(int, const Items<kCount>& items) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int own = C::kChannelsLast ? i : 0;
      const Acc gradient = widen<Acc>(items.dy.at[i]);
      sums[own][0] += gradient;
      sums[own][1] += gradient * (widen<Acc>(items.x.at[i]) - mean[own]);
    }
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  const Sweep<C> sweep(args.strips, blockIdx.x);
  NormSums<C> body{static_cast<const typename C::Gradient*>(args.dy) + sweep.start,
                   static_cast<const typename C::Scalar*>(args.x) + sweep.start,
                   {},
                   {}};
  const Acc* means = static_cast<const Acc*>(args.statistics);
  const Acc* rstds = means + static_cast<long long>(args.strips.batch) * args.groups;
  const auto group = [&](int i) {
    return static_cast<long long>(sweep.n) * args.groups + (sweep.channel + i) / args.per_group;
  };
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    if (sweep.exists) body.mean[i] = means[group(i)];
  }
  sweep.run(body);
  sweep.add_up(body.sums, dynamic_shared<Acc>());
  if (!sweep.speaks) return;
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    const long long row = static_cast<long long>(sweep.n) * args.strips.channels + sweep.channel + i;
    static_cast<Vector<Acc, 2>*>(args.sums)[row * args.strips.slots + sweep.slot] =
        Vector<Acc, 2>{body.sums[i][0], body.sums[i][1] * rstds[group(i)]};
  }
}

}  // namespace tconv3d
