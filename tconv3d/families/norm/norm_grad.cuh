// Second pass of GroupNorm's gradient, and the gradient of the ReLU before the norm.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

template <class C>
__device__ void run(const Args& args) {
  // Blocks go from the end to the beginning, because the data that the first pass read last may still be in
  // L2.
  grad_strip<C, false>(args, Sweep<C>(args.strips, gridDim.x - 1 - blockIdx.x));
}

}  // namespace tconv3d
