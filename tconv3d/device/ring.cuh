// A ring of stages in shared memory, as one of its users walks through it.
#pragma once

namespace tconv3d {

// The stage that is next, and the parity of its barriers in this round.
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
