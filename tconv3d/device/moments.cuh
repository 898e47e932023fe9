// The moments of some values: their number, and their sums relative to a shift close to their mean.
//
// A plain sum of squares loses the variance of values whose mean is large. Deviations from a shift near the
// mean do not, and neither does any combination of moments with different shifts (statistics.cuh).
#pragma once

#include "cursor.cuh"

namespace tconv3d {

template <class Acc>
struct alignas(16) Moments {
  Acc count, shift;
  Acc sum, squares;  // sums of value - shift and of its square

  // Adds moments of other values, which have another shift: value - shift == (value - other.shift) + step.
  __device__ __forceinline__ void add(const Moments& other) {
    if (count == 0) shift = other.shift;
    const Acc step = other.shift - shift;
    count += other.count;
    sum += other.sum + other.count * step;
    squares += other.squares + step * (2 * other.sum + other.count * step);
  }
};

}  // namespace tconv3d
