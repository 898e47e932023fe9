// A walk over the positions (n, d, h, w) of a volume in steps of fixed length, without a division per step.
#pragma once

#include "common.cuh"

namespace tconv3d {

// The bounds and the step of a walk. The step is written as digits (n, d, h, w) in the mixed base of the
// volume's size, so that each digit is below its size.
struct Walk {
  Extent size;
  Extent step;
  int step_n;
  Divider by_d, by_h, by_w;
};

template <class Index>
struct Cursor {
  int n, d, h, w;

  __device__ __forceinline__ Cursor(Index position, const Walk& walk) {
    const Index rest_w = divide(position, walk.by_w);
    const Index rest_h = divide(rest_w, walk.by_h);
    n = static_cast<int>(divide(rest_h, walk.by_d));
    w = static_cast<int>(position - rest_w * walk.size.w);
    h = static_cast<int>(rest_w - rest_h * walk.size.h);
    d = static_cast<int>(rest_h - static_cast<Index>(n) * walk.size.d);
  }

  __device__ __forceinline__ void advance(const Walk& walk) {
    w += walk.step.w;
    h += walk.step.h;
    d += walk.step.d;
    n += walk.step_n;
    if (w >= walk.size.w) {
      w -= walk.size.w;
      ++h;
    }
    if (h >= walk.size.h) {
      h -= walk.size.h;
      ++d;
    }
    if (d >= walk.size.d) {
      d -= walk.size.d;
      ++n;
    }
  }
};

// The part [begin, end) of `total` that belongs to split `split` of `splits`.
template <class Index>
struct Part {
  Index begin, end;

  __device__ __forceinline__ Part(Index total, int splits, int split) {
    const Index length = (total + splits - 1) / splits;
    begin = length * split < total ? length * split : total;
    end = total - begin < length ? total : begin + length;
  }
};

// Returns the sum over the lanes of a warp to every lane, always added in the same order.
template <class Acc>
__device__ __forceinline__ Acc warp_sum(Acc value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
  return value;
}

}  // namespace tconv3d
