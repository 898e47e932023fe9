// Computes the coefficients between the two passes of GroupNorm's gradient. A block has one norm group of one
// batch item.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

template <class C>
__device__ void run(const Args& args) {
  find_coefficients<C, false>(args, blockIdx.x);
}

}  // namespace tconv3d
