// The operands of expressions of activations: the activations x, up to four further tensors of the shape and
// memory layout of x, and vectors, which have one number for each channel of each batch item. A thread loads
// its numbers of the vectors once.
#pragma once

#include "expressions.cuh"
#include "sweep.cuh"

namespace tconv3d {

template <class C>
struct TailOperands {
  using Scalar = typename C::Scalar;
  using Number = typename C::Acc;
  static constexpr int kVectors = C::kVectors > 0 ? C::kVectors : 1;
  static constexpr int kTensors = C::kWholes + 1;  // x and the further tensors

  template <int kCount>
  struct Items {
    Vector<Scalar, kCount> of[kTensors];
  };

  // The operands of an expression for one element.
  struct Element {
    using Acc = typename C::Acc;
    static constexpr bool kRounded = sizeof(Scalar) == 2;
    static constexpr int kLocals = 0;
    const Acc* numbers;
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
  Number numbers[Sweep<C>::kOwn][kVectors];

  __device__ __forceinline__ TailOperands(const Args& args, const Sweep<C>& sweep) {
    const void* const tensors[] = {args.x, args.whole_0, args.whole_1, args.whole_2, args.whole_3};
#pragma unroll
    for (int t = 0; t < kTensors; ++t) from[t] = static_cast<const Scalar*>(tensors[t]) + sweep.start;
    const long long rows = static_cast<long long>(args.strips.batch) * args.strips.channels;
#pragma unroll
    for (int i = 0; i < Sweep<C>::kOwn; ++i) {
      const long long row = static_cast<long long>(sweep.n) * args.strips.channels + sweep.channel + i;
#pragma unroll
      for (int v = 0; v < C::kVectors; ++v)
        if (sweep.exists) numbers[i][v] = static_cast<const Number*>(args.vectors)[v * rows + row];
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
  __device__ __forceinline__ Element element(const Items<kCount>& items, int i) const {
    Element element;
    element.numbers = numbers[C::kChannelsLast ? i : 0];
#pragma unroll
    for (int t = 0; t < kTensors; ++t) element.values[t] = widen<typename C::Acc>(items.of[t].at[i]);
    return element;
  }
};

}  // namespace tconv3d
