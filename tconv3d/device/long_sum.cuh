// A sum of many values whose error does not grow with their number.
#pragma once

#include "common.cuh"

namespace tconv3d {

// Every addition's rounding error is added to the next value (compensated summation).
template <class Acc>
struct LongSum {
  Acc total = 0, rest = 0;

  __device__ __forceinline__ void add(Acc value) {
    const Acc before = total;
    value += rest;
    total += value;
    rest = (before - total) + value;
    // A rest that is NaN, because the total is infinite, is dropped, so that an infinite total stays
    // infinite.
    if (!(rest - rest == 0)) rest = 0;
  }
};

}  // namespace tconv3d
