// GroupNorm with known statistics: y = (x - mean) * rstd * weight + bias, in one read and one write. x and y
// may be the same tensor, and may differ in type.
#pragma once

#include "sweep.cuh"

namespace tconv3d {

template <class C>
struct Normalize {
  using Scalar = typename C::Scalar;
  using Result = typename C::Result;
  using Acc = typename C::Acc;

  const Scalar* x;  // start of the strip, at the thread's first channel
  Result* y;
  Acc mean[Sweep<C>::kOwn], scale[Sweep<C>::kOwn], bias[Sweep<C>::kOwn];

  __device__ __forceinline__ void prepare(const Args& args, const Sweep<C>& sweep) {
    const Acc* means = static_cast<const Acc*>(args.statistics);
    const Acc* rstds = means + static_cast<long long>(args.strips.batch) * args.groups;
#pragma unroll
    for (int i = 0; i < Sweep<C>::kOwn; ++i) {
      const int channel = sweep.channel + i;
      const long long group = static_cast<long long>(sweep.n) * args.groups + channel / args.per_group;
      mean[i] = means[group];
      scale[i] = rstds[group];
      bias[i] = 0;
      if (args.weight)
        scale[i] *= widen<Acc>(static_cast<const typename C::Parameter*>(args.weight)[channel]);
      if (args.bias) bias[i] = widen<Acc>(static_cast<const typename C::Parameter*>(args.bias)[channel]);
    }
  }
  template <int kCount>
  __device__ __forceinline__ Vector<Scalar, kCount> load(int at) const {
    return load_vector<kCount>(x + at);
  }
  template <int kCount>
  __device__ __forceinline__ void use(int at, const Vector<Scalar, kCount>& items) const {
    Vector<Result, kCount> results;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int own = C::kChannelsLast ? i : 0;
      results.at[i] = Narrow<Result>::from((widen<Acc>(items.at[i]) - mean[own]) * scale[own] + bias[own]);
    }
    *reinterpret_cast<Vector<Result, kCount>*>(y + at) = results;
  }
};

template <class C>
__device__ void run(const Args& args) {
  // In place, blocks go from the end to the beginning, because the data that was written last may still be in
  // L2. Otherwise the end comes last, because the gradient begins there.
  const int unit = args.x == args.y ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const Sweep<C> sweep(args.strips, unit);
  if (!sweep.exists) return;
  Normalize<C> normalize{static_cast<const typename C::Scalar*>(args.x) + sweep.start,
                         static_cast<typename C::Result*>(args.y) + sweep.start,
                         {},
                         {},
                         {}};
  normalize.prepare(args, sweep);
  sweep.run(normalize);
}

}  // namespace tconv3d
