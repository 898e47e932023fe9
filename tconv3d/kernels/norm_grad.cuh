// Second pass of GroupNorm's gradient, and the ReLU's before it: the gradient of what went into the ReLU,
//
//   dz = x > 0 ? dy * (rstd * weight) + (x - mean) * slope + constant : 0,   x = relu(z)
//
// and its sum per channel, strip by strip: the gradient of a bias that was added to z.
#pragma once

#include "sweep.cuh"

namespace tconv3d {

struct Args {
  const void* dy;
  const void* x;             // what was normalized
  const void* statistics;    // [2][batch][norm groups]: means, then reciprocal deviations
  const void* coefficients;  // [2][batch][norm groups]: slopes, then constants
  const void* weight;        // per channel; null: one
  void* dz;
  void* sums;  // [batch][slots][channels]; null: not wanted
  Strips strips;
  int groups, per_group;  // norm groups, and channels of each
};

template <class C>
struct NormGrad {
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
  Scalar* dz;
  Acc mean[Sweep<C>::kOwn], scale[Sweep<C>::kOwn], slope[Sweep<C>::kOwn], constant[Sweep<C>::kOwn];
  Acc sums[Sweep<C>::kOwn][1];

  __device__ __forceinline__ void prepare(const Args& args, const Sweep<C>& sweep) {
    const long long norm_groups = static_cast<long long>(args.strips.batch) * args.groups;
    const Acc* statistics = static_cast<const Acc*>(args.statistics);
    const Acc* coefficients = static_cast<const Acc*>(args.coefficients);
#pragma unroll
    for (int i = 0; i < Sweep<C>::kOwn; ++i) {
      if (!sweep.exists) continue;
      const int channel = sweep.channel + i;
      const long long group = static_cast<long long>(sweep.n) * args.groups + channel / args.per_group;
      mean[i] = statistics[group];
      scale[i] = statistics[norm_groups + group];
      if (args.weight)
        scale[i] *= widen<Acc>(static_cast<const typename C::Parameter*>(args.weight)[channel]);
      slope[i] = coefficients[group];
      constant[i] = coefficients[norm_groups + group];
    }
  }
  template <int kCount>
  __device__ __forceinline__ Items<kCount> load(int at) const {
    return {load_vector<kCount>(dy + at), load_vector<kCount>(x + at)};
  }
  template <int kCount>
  __device__ __forceinline__ void use(int at, const Items<kCount>& items) {
    Vector<Scalar, kCount> results;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int own = C::kChannelsLast ? i : 0;
      const Acc value = widen<Acc>(items.x.at[i]);
      const Acc whole =
          widen<Acc>(items.dy.at[i]) * scale[own] + ((value - mean[own]) * slope[own] + constant[own]);
      const Acc passed = value <= Acc(0) ? Acc(0) : whole;  // NaN passes, as in PyTorch
      results.at[i] = Narrow<Scalar>::from(passed);
      sums[own][0] += passed;
    }
    *reinterpret_cast<Vector<Scalar, kCount>*>(dz + at) = results;
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  // From the end: what the first pass read last may still be in the cache.
  const Sweep<C> sweep(args.strips, gridDim.x - 1 - blockIdx.x);
  NormGrad<C> body{static_cast<const typename C::Gradient*>(args.dy) + sweep.start,
                   static_cast<const typename C::Scalar*>(args.x) + sweep.start,
                   static_cast<typename C::Scalar*>(args.dz) + sweep.start,
                   {},
                   {},
                   {},
                   {},
                   {}};
  body.prepare(args, sweep);
  sweep.run(body);
  if (args.sums == nullptr) return;
  sweep.add_up(body.sums, dynamic_shared<Acc>());
  if (!sweep.speaks) return;
  const long long row = static_cast<long long>(sweep.n) * args.strips.slots + sweep.slot;
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    static_cast<Acc*>(args.sums)[row * args.strips.channels + sweep.channel + i] = body.sums[i][0];
  }
}

}  // namespace tconv3d
