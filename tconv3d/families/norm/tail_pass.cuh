// One pass over activations that evaluates an expression of every element (expressions.cuh): what follows a
// convolution and cannot be computed from its sums alone. x and y may be the same tensor.
#pragma once

#include "tail_operands.cuh"

namespace tconv3d {

template <class C>
struct TailPass : TailOperands<C> {
  using Result = typename C::Result;

  Result* y;  // start of the strip, at the thread's first channel

  __device__ __forceinline__ TailPass(const Args& args, const Sweep<C>& sweep)
      : TailOperands<C>(args, sweep), y(static_cast<Result*>(args.y) + sweep.start) {}
  template <int kCount>
  __device__ __forceinline__ void use(int at,
                                      const typename TailOperands<C>::template Items<kCount>& items) const {
    Vector<Result, kCount> results;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      results.at[i] = Narrow<Result>::from(C::Expression::of(this->element(items, i)));
    *reinterpret_cast<Vector<Result, kCount>*>(y + at) = results;
  }
};

template <class C>
__device__ void run(const Args& args) {
  // In place, blocks go from the end to the beginning, because the data that was written last may still be in
  // L2.
  const int unit = args.x == args.y ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const Sweep<C> sweep(args.strips, unit);
  if (!sweep.exists) return;
  TailPass<C> pass(args, sweep);
  sweep.run(pass);
}

}  // namespace tconv3d
