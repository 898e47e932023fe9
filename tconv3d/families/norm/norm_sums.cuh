// First pass of GroupNorm's gradient: the sums of dy and of dy times the normalized x, for every channel and
// strip.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

template <class C>
__device__ void run(const Args& args) {
  sum_strip<C, false>(args, Sweep<C>(args.strips, blockIdx.x));
}

}  // namespace tconv3d
