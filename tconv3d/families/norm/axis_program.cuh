// What one pass computes along an axis of a tensor, as a type: steps that each give one number per position,
// and what is stored at the end. Softmax is AxisProgram<EachElement<exp(x - m) / s>, largest x, sum of
// exp(x - m)>: a position is what remains when the axis is taken away, and m and s are its local numbers.
#pragma once

#include "axis_reductions.cuh"
#include "expressions.cuh"

namespace tconv3d {

// A step that reduces an expression of the elements along the axis.
template <class How, class Expression>
struct Reduced {
  static constexpr bool kReduces = true;
  using Way = How;
  using Of = Expression;
};

// A step that computes a number of a position from the steps before it.
template <class Expression>
struct Bound {
  static constexpr bool kReduces = false;
  using Of = Expression;
};

// The result has the shape of the tensor.
template <class Expression>
struct EachElement {
  static constexpr bool kEach = true;
  using Of = Expression;
};

// The result has one number per position.
template <class Expression>
struct EachPosition {
  static constexpr bool kEach = false;
  using Of = Expression;
};

template <int kIndex, class First, class... Rest>
struct StepAt {
  using type = typename StepAt<kIndex - 1, Rest...>::type;
};
template <class First, class... Rest>
struct StepAt<0, First, Rest...> {
  using type = First;
};

template <class Stored, class... Steps>
struct AxisProgram {
  using Final = Stored;
  static constexpr int kSteps = sizeof...(Steps);
  template <int kIndex>
  using At = typename StepAt<kIndex, Steps..., void>::type;

  // Whether no step before `step` reduces, so that step `step` is the first one that reads the tensors.
  static __device__ constexpr bool reads_first(int step) {
    const bool reduces[] = {Steps::kReduces..., false};
    for (int i = 0; i < step; ++i) {
      if (reduces[i]) return false;
    }
    return true;
  }
};

}  // namespace tconv3d
