// Lists of expressions that a pass adds up, as types.
#pragma once

namespace tconv3d {

// The end of a list of expressions.
struct NoExpression {
  static constexpr int kCount = 0;
};

// An expression, and the expressions after it.
template <class First, class Rest>
struct ExpressionList {
  static constexpr int kCount = 1 + Rest::kCount;
  // Adds the values of the expressions to sums, from number kAt on.
  template <int kAt, class Acc, class Element>
  static __device__ __forceinline__ void add(Acc* sums, const Element& element) {
    sums[kAt] += First::of(element);
    if constexpr (Rest::kCount > 0) Rest::template add<kAt + 1>(sums, element);
  }
};

}  // namespace tconv3d
