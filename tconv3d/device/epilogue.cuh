// Epilogues: operations on a finished sum before it is rounded and stored. The kernels of the forward pass
// take one of these structs as Config::Epilogue.
//
// An epilogue is an activation (`apply`): ReLU, or any expression. It says whether the kernel also stores the
// moments of its outputs (moments.cuh) for a norm layer that follows, which saves a pass over memory.
#pragma once

#include "common.cuh"
#include "expressions.cuh"

namespace tconv3d {

struct Identity {
  static constexpr bool kLeavesMoments = false;
  template <class Acc>
  static __device__ __forceinline__ Acc apply(Acc sum) {
    return sum;
  }
};

struct Relu {
  static constexpr bool kLeavesMoments = false;
  static __device__ __forceinline__ float apply(float sum) { return ptx::max_or_nan(sum, 0.0f); }
  static __device__ __forceinline__ double apply(double sum) { return sum < 0 ? 0 : sum; }  // NaN stays NaN
};

// Any expression (expressions.cuh) of the sum alone.
template <class Expression>
struct Evaluated {
  static constexpr bool kLeavesMoments = false;
  template <class Acc>
  static __device__ __forceinline__ Acc apply(Acc sum) {
    return Expression::of(OnlyValue<Acc>{sum});
  }
};

template <class Activation>
struct LeavingMoments : Activation {
  static constexpr bool kLeavesMoments = true;
};

}  // namespace tconv3d
