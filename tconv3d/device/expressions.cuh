// Expressions: pointwise operations as types, which are evaluated in registers.
//
// What follows a convolution is written as one type, for example Product<Value, Sigmoid<Value>> for SiLU. The
// planner names the type as a constant of the kernel, so that no source is generated. An expression has a
// function of(in), where `in` has a type Acc (float or double) and the functions value(), vector<i>() and
// whole<i>(): the number that the expression is a function of, operand i that is constant along a channel's
// volume, and the element of operand i that has the shape of the result.
//
// Comparisons are 1 or 0. Minima, maxima and clamps keep a NaN, as PyTorch's do.
//
// If In::kRounded, the operands come from products of TF32 or 16-bit numbers. Exponentials and sigmoids then
// use the hardware's exponential, whose relative error is at most 2^-16. Scale, shift, SiLU and clamp of an
// output take 10 instructions so, instead of 35, which would take longer than writing the output does.
#pragma once

#include "common.cuh"

namespace tconv3d {

struct Value {
  template <class In>
  static __device__ __forceinline__ auto of(const In& in) {
    return in.value();
  }
};

template <int kIndex>
struct Vectored {
  template <class In>
  static __device__ __forceinline__ auto of(const In& in) {
    return in.template vector<kIndex>();
  }
};

template <int kIndex>
struct Whole {
  template <class In>
  static __device__ __forceinline__ auto of(const In& in) {
    return in.template whole<kIndex>();
  }
};

// kMantissa * 2^kExponent, which is exact for every double.
template <long long kMantissa, int kExponent>
struct Number {
  static __device__ constexpr double number() {
    double value = static_cast<double>(kMantissa);
    for (int i = 0; i < kExponent; ++i) value *= 2.0;
    for (int i = 0; i > kExponent; --i) value *= 0.5;
    return value;
  }
  template <class In>
  static __device__ __forceinline__ auto of(const In&) {
    constexpr double kNumber = number();
    return static_cast<typename In::Acc>(kNumber);
  }
};

template <bool kNegative>
struct Infinity {
  template <class In>
  static __device__ __forceinline__ auto of(const In&) {
    const float huge = ptx::bits_to_float(0x7F800000u);
    return static_cast<typename In::Acc>(kNegative ? -huge : huge);
  }
};

// Every function once for float and once for double, under one name.
#define TCONV3D_MATH(name, single, precise)                            \
  __device__ __forceinline__ float name(float x) { return single(x); } \
  __device__ __forceinline__ double name(double x) { return precise(x); }
TCONV3D_MATH(exponential, ::expf, ::exp)
TCONV3D_MATH(exponential_minus_one, ::expm1f, ::expm1)
TCONV3D_MATH(logarithm, ::logf, ::log)
TCONV3D_MATH(logarithm_of_one_plus, ::log1pf, ::log1p)
TCONV3D_MATH(square_root, ::sqrtf, ::sqrt)
TCONV3D_MATH(hyperbolic_tangent, ::tanhf, ::tanh)
TCONV3D_MATH(error_function, ::erff, ::erf)
TCONV3D_MATH(absolute, ::fabsf, ::fabs)
TCONV3D_MATH(round_down, ::floorf, ::floor)
TCONV3D_MATH(round_up, ::ceilf, ::ceil)
TCONV3D_MATH(round_nearest, ::rintf, ::rint)
TCONV3D_MATH(sine, ::sinf, ::sin)
TCONV3D_MATH(cosine, ::cosf, ::cos)
__device__ __forceinline__ float largest(float a, float b) { return ptx::max_or_nan(a, b); }
__device__ __forceinline__ double largest(double a, double b) { return a != a || a > b ? a : b; }
__device__ __forceinline__ float smallest(float a, float b) { return ptx::min_or_nan(a, b); }
__device__ __forceinline__ double smallest(double a, double b) { return a != a || a < b ? a : b; }
template <bool kRounded, class Acc>
__device__ __forceinline__ Acc exponential_of(Acc x) {
  if constexpr (kRounded) {
    return __expf(x);
  } else {
    return exponential(x);
  }
}
template <bool kRounded, class Acc>
__device__ __forceinline__ Acc sigmoid_of(Acc x) {
  if constexpr (kRounded) {
    return __fdividef(1.0f, 1.0f + ptx::power_of_two(x * -1.442695041f));  // 1 / (1 + e^-x)
  } else {
    return Acc(1) / (Acc(1) + exponential(-x));
  }
}
__device__ __forceinline__ float power(float x, float y) { return ::powf(x, y); }
__device__ __forceinline__ double power(double x, double y) { return ::pow(x, y); }

// Functions of one operand x, and of two operands a and b, all of type Acc.
#define TCONV3D_UNARY(Name, result)                           \
  template <class X>                                          \
  struct Name {                                               \
    template <class In>                                       \
    static __device__ __forceinline__ auto of(const In& in) { \
      using Acc = typename In::Acc;                           \
      const Acc x = X::of(in);                                \
      return static_cast<Acc>(result);                        \
    }                                                         \
  };
#define TCONV3D_BINARY(Name, result)                          \
  template <class A, class B>                                 \
  struct Name {                                               \
    template <class In>                                       \
    static __device__ __forceinline__ auto of(const In& in) { \
      using Acc = typename In::Acc;                           \
      const Acc a = A::of(in), b = B::of(in);                 \
      return static_cast<Acc>(result);                        \
    }                                                         \
  };
TCONV3D_UNARY(Negative, -x)
TCONV3D_UNARY(Absolute, absolute(x))
TCONV3D_UNARY(Exponential, exponential_of<In::kRounded>(x))
TCONV3D_UNARY(ExponentialMinusOne, exponential_minus_one(x))
TCONV3D_UNARY(Logarithm, logarithm(x))
TCONV3D_UNARY(LogarithmOfOnePlus, logarithm_of_one_plus(x))
TCONV3D_UNARY(SquareRoot, square_root(x))
TCONV3D_UNARY(ReciprocalSquareRoot, Acc(1) / square_root(x))
TCONV3D_UNARY(Reciprocal, Acc(1) / x)
TCONV3D_UNARY(HyperbolicTangent, hyperbolic_tangent(x))
TCONV3D_UNARY(ErrorFunction, error_function(x))
TCONV3D_UNARY(Sigmoid, sigmoid_of<In::kRounded>(x))
TCONV3D_UNARY(RoundDown, round_down(x))
TCONV3D_UNARY(RoundUp, round_up(x))
TCONV3D_UNARY(RoundNearest, round_nearest(x))
TCONV3D_UNARY(Sine, sine(x))
TCONV3D_UNARY(Cosine, cosine(x))
TCONV3D_UNARY(Sign, x != x ? x : (x > Acc(0) ? Acc(1) : Acc(0)) - (x < Acc(0) ? Acc(1) : Acc(0)))
TCONV3D_UNARY(Not, x == Acc(0) ? Acc(1) : Acc(0))
TCONV3D_BINARY(Sum, a + b)
TCONV3D_BINARY(Difference, a - b)
TCONV3D_BINARY(Product, a* b)
TCONV3D_BINARY(Quotient, a / b)
TCONV3D_BINARY(Power, power(a, b))
TCONV3D_BINARY(Largest, largest(a, b))
TCONV3D_BINARY(Smallest, smallest(a, b))
TCONV3D_BINARY(Less, a < b ? Acc(1) : Acc(0))
TCONV3D_BINARY(LessOrEqual, a <= b ? Acc(1) : Acc(0))
TCONV3D_BINARY(Greater, a > b ? Acc(1) : Acc(0))
TCONV3D_BINARY(GreaterOrEqual, a >= b ? Acc(1) : Acc(0))
TCONV3D_BINARY(Equal, a == b ? Acc(1) : Acc(0))
TCONV3D_BINARY(NotEqual, a != b ? Acc(1) : Acc(0))
TCONV3D_BINARY(Both, a != Acc(0) && b != Acc(0) ? Acc(1) : Acc(0))
TCONV3D_BINARY(Either, a != Acc(0) || b != Acc(0) ? Acc(1) : Acc(0))

// `A` where the condition is not 0, else `B`.
template <class Condition, class A, class B>
struct Choice {
  template <class In>
  static __device__ __forceinline__ auto of(const In& in) {
    const auto a = A::of(in), b = B::of(in);
    return Condition::of(in) != 0 ? a : b;
  }
};

// The operands of an expression, and one more local number.
template <class In>
struct WithLocal {
  using Acc = typename In::Acc;
  static constexpr bool kRounded = In::kRounded;
  static constexpr int kLocals = In::kLocals + 1;
  const In& in;
  Acc number;
  __device__ __forceinline__ Acc value() const { return in.value(); }
  template <int kIndex>
  __device__ __forceinline__ Acc vector() const {
    return in.template vector<kIndex>();
  }
  template <int kIndex>
  __device__ __forceinline__ Acc whole() const {
    return in.template whole<kIndex>();
  }
  template <int kIndex>
  __device__ __forceinline__ Acc local() const {
    if constexpr (kIndex == In::kLocals) {
      return number;
    } else {
      return in.template local<kIndex>();
    }
  }
};

// Computes `First` once, as the next local number, and then `Rest`, which may use it several times.
template <class First, class Rest>
struct Let {
  template <class In>
  static __device__ __forceinline__ auto of(const In& in) {
    return Rest::of(WithLocal<In>{in, First::of(in)});
  }
};
template <int kIndex>
struct Local {
  template <class In>
  static __device__ __forceinline__ auto of(const In& in) {
    return in.template local<kIndex>();
  }
};

// A quotient by a local number, which mostly is one of several quotients by the same number, such as those of
// a softmax: the compiler computes the reciprocal once.
template <class A, int kIndex>
struct Quotient<A, Local<kIndex>> {
  template <class In>
  static __device__ __forceinline__ auto of(const In& in) {
    using Acc = typename In::Acc;
    const Acc a = A::of(in), b = in.template local<kIndex>();
    if constexpr (In::kRounded) {
      return a * (Acc(1) / b);
    } else {
      return a / b;
    }
  }
};

// The operands of an expression without vectors and whole tensors.
template <class Accumulator, bool kFromRounded>
struct OnlyValue {
  using Acc = Accumulator;
  static constexpr bool kRounded = kFromRounded;
  static constexpr int kLocals = 0;
  Acc sum;
  __device__ __forceinline__ Acc value() const { return sum; }
};

}  // namespace tconv3d
