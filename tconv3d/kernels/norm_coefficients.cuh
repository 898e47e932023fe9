// Between the two passes of GroupNorm's gradient: a block has one norm group of one batch item.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

struct Args {
  const void *sums, *statistics, *weight;
  void *by_channel, *coefficients;
  Strips strips;
  int groups, per_group;
};

template <class C>
__device__ void run(const Args& args) {
  const int n = blockIdx.x / args.groups, first = blockIdx.x % args.groups * args.per_group;
  const int warp = threadIdx.x / 32;
  for (int channel = warp; channel < args.per_group; channel += C::kThreads / 32) {
    add_up_channel<C>(args, n, first + channel);
  }
  __syncthreads();
  if (warp == 0) find_coefficients<C>(args, blockIdx.x);
}

}  // namespace tconv3d
