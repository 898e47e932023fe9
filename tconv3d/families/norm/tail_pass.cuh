// One pass over activations that evaluates an expression of every element (expressions.cuh): what follows a
// convolution and cannot be computed from its sums alone. x and y may be the same tensor.
//
// The expression may use up to four further tensors of the shape and memory layout of x, and vectors, which
// have one number for each channel of each batch item. A thread loads its numbers of the vectors once.
#pragma once

#include "expressions.cuh"
#include "sweep.cuh"

namespace tconv3d {

template <class C>
struct TailPass {
  using Scalar = typename C::Scalar;
  using Result = typename C::Result;
  static constexpr int kVectors = C::kVectors > 0 ? C::kVectors : 1;
  static constexpr int kTensors = C::kWholes + 1;  // x and the further tensors

  template <int kCount>
  struct Items {
    Vector<Scalar, kCount> of[kTensors];
  };

  // The operands of the expression for one element.
  struct Element {
    using Acc = typename C::Acc;
    Acc numbers[kVectors];
    Acc values[kTensors];
    __device__ __forceinline__ Acc value() const { return values[0]; }
    template <int kIndex>
    __device__ __forceinline__ Acc vector() const {
      return numbers[kIndex];
    }
    template <int kIndex>
    __device__ __forceinline__ Acc whole() const {
      return values[kIndex + 1];
    }
  };

  const Scalar* from[kTensors];  // start of the strip in every tensor, at the thread's first channel
  Result* y;
  typename C::Acc numbers[Sweep<C>::kOwn][kVectors];

  __device__ __forceinline__ TailPass(const Args& args, const Sweep<C>& sweep) {
    const void* const tensors[] = {args.x, args.whole_0, args.whole_1, args.whole_2, args.whole_3};
#pragma unroll
    for (int t = 0; t < kTensors; ++t) from[t] = static_cast<const Scalar*>(tensors[t]) + sweep.start;
    y = static_cast<Result*>(args.y) + sweep.start;
    const long long rows = static_cast<long long>(args.strips.batch) * args.strips.channels;
#pragma unroll
    for (int i = 0; i < Sweep<C>::kOwn; ++i) {
      const long long row = static_cast<long long>(sweep.n) * args.strips.channels + sweep.channel + i;
#pragma unroll
      for (int v = 0; v < C::kVectors; ++v)
        numbers[i][v] = static_cast<const typename C::Acc*>(args.vectors)[v * rows + row];
    }
  }
  template <int kCount>
  __device__ __forceinline__ Items<kCount> load(int at) const {
    Items<kCount> items;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) items.of[t] = load_vector<kCount>(from[t] + at);
    return items;
  }
  template <int kCount>
  __device__ __forceinline__ void use(int at, const Items<kCount>& items) const {
    Vector<Result, kCount> results;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Element element;
#pragma unroll
      for (int v = 0; v < C::kVectors; ++v) element.numbers[v] = numbers[C::kChannelsLast ? i : 0][v];
#pragma unroll
      for (int t = 0; t < kTensors; ++t) element.values[t] = widen<typename C::Acc>(items.of[t].at[i]);
      results.at[i] = Narrow<Result>::from(C::Expression::of(element));
    }
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
