// A position in a ring of stages in shared memory.
#pragma once

namespace tconv3d {

// The index of the next stage, and the parity of the current phase of its barriers.
struct Ring {
  int index = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance(int count) {
    if (++index == count) {
      index = 0;
      parity ^= 1u;
    }
  }
};

}  // namespace tconv3d
