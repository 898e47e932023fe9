// Second pass of GroupNorm's gradient, and the ReLU's before it.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

template <class C>
__device__ void run(const Args& args) {
  // From the end: what the first pass read last may still be in the cache.
  grad_strip<C, false>(args, Sweep<C>(args.strips, gridDim.x - 1 - blockIdx.x));
}

}  // namespace tconv3d
