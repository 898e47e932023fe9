// Converts up to three tensors to another type, element by element in the order of memory. Results are
// rounded to the nearest number, as PyTorch's `to` rounds them. The first blocks belong to the first tensor.
#pragma once

#include "common.cuh"

namespace tconv3d {

// Converts the elements of one block of a tensor.
template <class C>
__device__ __forceinline__ void cast_block(const void* from, void* to, long long count, long long block) {
  using From = typename C::From;
  using To = typename C::To;
  const long long first = block * C::kThreads * C::kItems + threadIdx.x;
#pragma unroll
  for (int item = 0; item < C::kItems; ++item) {
    const long long i = first + item * C::kThreads;
    if (i < count)
      static_cast<To*>(to)[i] = Narrow<To>::from(widen<float>(static_cast<const From*>(from)[i]));
  }
}

template <class C>
__device__ void run(const Args& args) {
  const long long block = blockIdx.x, second = args.first_blocks, third = second + args.second_blocks;
  if (block < second) {
    cast_block<C>(args.first, args.first_result, args.first_count, block);
  } else if (block < third) {
    cast_block<C>(args.second, args.second_result, args.second_count, block - second);
  } else {
    cast_block<C>(args.third, args.third_result, args.third_count, block - third);
  }
}

}  // namespace tconv3d
