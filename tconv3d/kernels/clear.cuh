// Zeros, for counters that blocks share.
#pragma once

#include "common.cuh"

namespace tconv3d {

struct Args {
  void* words;
  int count;
};

template <class C>
__device__ void run(const Args& args) {
  for (int i = threadIdx.x; i < args.count; i += C::kThreads) static_cast<unsigned*>(args.words)[i] = 0;
}

}  // namespace tconv3d
