// Reductions along an axis, as types: how a thread takes numbers one after the other, and how the results of
// two threads are merged. A NaN wins every comparison, and of equal numbers the first one counts, as in
// PyTorch.
#pragma once

#include "expressions.cuh"

namespace tconv3d {

template <class Acc>
__device__ __forceinline__ Acc across_lanes(Acc value, int distance) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, distance);
}

struct Adding {
  template <class Acc>
  struct State {
    Acc sum = Acc(0);
    __device__ __forceinline__ void take(Acc value, int) { sum += value; }
    __device__ __forceinline__ void merge(int distance) { sum += across_lanes(sum, distance); }
    __device__ __forceinline__ Acc result() const { return sum; }
  };
};

// The extreme number and its index along the axis. kSign is 1 for the largest number and -1 for the smallest.
template <class Acc, int kSign>
struct Extreme {
  Acc best = Acc(0);
  int index = -1;  // -1: nothing was taken yet

  static __device__ __forceinline__ bool better(Acc a, Acc b) {
    if (b != b) return false;
    return a != a || (kSign > 0 ? a > b : a < b);
  }
  __device__ __forceinline__ void take(Acc value, int at) {
    if (index < 0 || better(value, best)) {
      best = value;
      index = at;
    }
  }
  __device__ __forceinline__ void merge(int distance) {
    const Acc other = across_lanes(best, distance);
    const int at = across_lanes(index, distance);
    const bool worse = index >= 0 && better(best, other);
    if (at >= 0 && !worse && (index < 0 || better(other, best) || at < index)) {
      best = other;
      index = at;
    }
  }
};

// The extreme number alone, which needs no index: one instruction for every number.
template <int kSign>
struct Finding {
  template <class Acc>
  struct State {
    Acc best = static_cast<Acc>(ptx::bits_to_float(kSign > 0 ? 0xFF800000u : 0x7F800000u));  // infinity
    __device__ __forceinline__ void take(Acc value, int) {
      best = kSign > 0 ? largest(best, value) : smallest(best, value);
    }
    __device__ __forceinline__ void merge(int distance) { take(across_lanes(best, distance), 0); }
    __device__ __forceinline__ Acc result() const { return best; }
  };
};
using FindingLargest = Finding<1>;
using FindingSmallest = Finding<-1>;

// The index of the extreme number; indices below 2^24 are exact in float32.
template <int kSign>
struct Locating {
  template <class Acc>
  struct State : Extreme<Acc, kSign> {
    __device__ __forceinline__ Acc result() const { return static_cast<Acc>(this->index); }
  };
};
using LocatingLargest = Locating<1>;
using LocatingSmallest = Locating<-1>;

}  // namespace tconv3d
