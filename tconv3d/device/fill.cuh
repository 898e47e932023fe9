// Fills memory with all-ones words. Blocks of the next launch read all ones as "not written yet", and
// counters start from them at -1.
#pragma once

#include "common.cuh"

namespace tconv3d {

template <class C>
__device__ void run(const Args& args) {
  ptx::launch_dependents();
  const long long i = static_cast<long long>(blockIdx.x) * C::kThreads + threadIdx.x;
  if (i < args.count) static_cast<uint4*>(args.words)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

}  // namespace tconv3d
