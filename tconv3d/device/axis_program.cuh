// What one pass computes along an axis of a tensor, as a type: steps that each give one number per position,
// and what is stored at the end. Softmax is AxisProgram<EachElement<exp(x - m) / s>, Then<largest x, Then<sum
// of exp(x - m), Done>>>: a position is what remains when the axis is taken away, and m and s are its local
// numbers.
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

// The end of a list of steps.
struct Done {
  static constexpr int kCount = 0;
  static constexpr bool kReduces = false;
};

// A step, and the steps after it.
template <class Step, class Others>
struct Then {
  using First = Step;
  using Rest = Others;
  static constexpr int kCount = 1 + Rest::kCount;
  static constexpr bool kReduces = First::kReduces || Rest::kReduces;  // one of the steps reads the tensors
};

template <class Stored, class All>
struct AxisProgram {
  using Final = Stored;
  using Steps = All;
};

}  // namespace tconv3d
