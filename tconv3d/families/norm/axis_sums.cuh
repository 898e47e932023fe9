// What a pass along an axis (axis_pass.cuh) adds up over positions: kCount numbers for every place along the
// axis, in shared memory, and at the end in a slot of the block.
//
// - Rows: a thread has the same places along the axis in every row, and numbers of its own for them.
// - Columns: a warp has one number for every place, to which it adds the sum over its threads.
// Numbers are added in a fixed order.
#pragma once

#include "cursor.cuh"
#include "expression_list.cuh"

namespace tconv3d {

template <class C>
struct AxisSums {
  using Number = typename C::Acc;
  static constexpr int kCount = C::Sums::kCount;
  static constexpr int kStep =
      C::kLanes * C::kVector;  // rows: places along the axis that the lanes take at a time
  static constexpr int kWarps = C::kThreads / 32;

  Number* own;  // the numbers of all threads, in shared memory behind the columns that they hold
  int length;

  __device__ __forceinline__ AxisSums(int places, int held_bytes)
      : own(reinterpret_cast<Number*>(dynamic_shared<unsigned char>() + held_bytes)), length(places) {
    if constexpr (kCount > 0) {
      const int numbers =
          C::kRows ? (length + kStep - 1) / kStep * C::kThreads * C::kVector : kWarps * length;
      for (int i = threadIdx.x; i < numbers * kCount; i += C::kThreads) own[i] = Number(0);
      __syncthreads();
    }
  }

  // Rows: where a thread has number s of place l.
  __device__ __forceinline__ Number& of_thread(int l, int s, int thread) const {
    return own[((l / kStep * kCount + s) * C::kThreads + thread) * C::kVector + l % C::kVector];
  }
  // Columns: where a warp has number s of place l.
  __device__ __forceinline__ Number& of_warp(int l, int s, int warp) const {
    return own[(warp * length + l) * kCount + s];
  }

  // Adds the numbers of a thread's vector at place l of the axis.
  __device__ __forceinline__ void add(int l, const Number (&numbers)[C::kVector][kCount > 0 ? kCount : 1],
                                      bool exists) const {
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      if constexpr (C::kRows) {
#pragma unroll
        for (int v = 0; v < C::kVector; ++v) of_thread(l + v, s, threadIdx.x) += numbers[v][s];
      } else {
        Number sum = Number(0);
#pragma unroll
        for (int v = 0; v < C::kVector; ++v) sum += numbers[v][s];
        sum = warp_sum(exists ? sum : Number(0));
        if (threadIdx.x % 32 == 0) of_warp(l, s, threadIdx.x / 32) += sum;
      }
    }
  }

  // Stores the numbers of the block in its slot of [length][slots][kCount].
  __device__ __forceinline__ void store(Number* sums, int slots, int slot) const {
    __syncthreads();
    for (int i = threadIdx.x; i < length * kCount; i += C::kThreads) {
      const int l = i / kCount, s = i % kCount;
      Number sum = Number(0);
      if constexpr (C::kRows) {
        for (int thread = l % kStep / C::kVector; thread < C::kThreads; thread += C::kLanes)
          sum += of_thread(l, s, thread);
      } else {
        for (int warp = 0; warp < kWarps; ++warp) sum += of_warp(l, s, warp);
      }
      sums[(static_cast<long long>(l) * slots + slot) * kCount + s] = sum;
    }
  }
};

}  // namespace tconv3d
