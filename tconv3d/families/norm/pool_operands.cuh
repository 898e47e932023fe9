// The operands of an expression in a pooling kernel: an element of the activations and of up to four tensors
// of their shape, vectors with one number per channel of a batch item, and kLocalCount local numbers.
#pragma once

#include "expressions.cuh"

namespace tconv3d {

template <class C, int kLocalCount>
struct PoolElement {
  using Acc = typename C::Acc;
  static constexpr bool kRounded = sizeof(typename C::Scalar) == 2;
  static constexpr int kLocals = kLocalCount;
  static constexpr int kTensors = C::kWholes + 1;

  const Acc* vectors;  // the numbers of the element's channel and batch item, `rows` apart
  long long rows;
  Acc values[kTensors];
  Acc number;  // the local number

  __device__ __forceinline__ Acc value() const { return values[0]; }
  template <int kIndex>
  __device__ __forceinline__ Acc vector() const {
    return vectors[kIndex * rows];
  }
  template <int kIndex>
  __device__ __forceinline__ Acc whole() const {
    return values[kIndex + 1];
  }
  template <int kIndex>
  __device__ __forceinline__ Acc local() const {
    static_assert(kIndex == 0 && kLocalCount == 1, "there is one local number at most");
    return number;
  }
};

// Element v of the vectors at index `from` of all tensors.
template <class Element, class C, class Args>
struct PoolItems {
  Vector<typename C::Scalar, C::kVector> of[Element::kTensors];

  __device__ __forceinline__ PoolItems(const Args& args, long long from) {
    const void* const tensors[] = {args.x, args.whole_0, args.whole_1, args.whole_2, args.whole_3};
#pragma unroll
    for (int t = 0; t < Element::kTensors; ++t)
      of[t] = load_vector<C::kVector>(static_cast<const typename C::Scalar*>(tensors[t]) + from);
  }
  __device__ __forceinline__ void put(Element& element, int v) const {
#pragma unroll
    for (int t = 0; t < Element::kTensors; ++t) element.values[t] = widen<typename C::Acc>(of[t].at[v]);
  }
};

template <class Element, class Args>
__device__ __forceinline__ Element pool_element(const Args& args, long long row) {
  const long long rows = static_cast<long long>(args.batch) * args.channels;
  return Element{static_cast<const typename Element::Acc*>(args.vectors) + row, rows, {}, {}};
}

}  // namespace tconv3d
