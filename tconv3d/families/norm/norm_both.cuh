// Both passes of GroupNorm's gradient in one launch, so that the second pass finds dy and x in the L2 cache.
//
// A norm group of one batch item (`group` counts over all batch items) has `units` blocks of work in each
// pass, and one more block computes its coefficients. Norm groups are processed from the last to the first.
// The first passes and the coefficients of `lag` groups come first; then blocks alternate between the first
// pass of a group and the second pass of the group `lag` groups earlier. A block waits until the numbers that
// it needs are written, which is rare if `lag` groups are more work than runs at a time.
//
// Blocks take turns in the order in which they start (an atomic counter). A block therefore waits only for
// blocks that have started before it, and the launch completes however few blocks fit the GPU.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

// What a block is to do.
struct Turn {
  bool second;  // second pass, else first
  int round, unit;

  __device__ __forceinline__ Turn(unsigned turn, unsigned units, unsigned lag) {
    const unsigned ahead = lag * units;  // turns before any second pass
    second = turn >= ahead && (turn - ahead) % 2 != 0;
    const unsigned one_by_one = turn < ahead ? turn : (turn - ahead) / 2 + (second ? 0 : ahead);
    round = static_cast<int>(one_by_one / units);
    unit = static_cast<int>(one_by_one % units);
  }
};

template <class C>
__device__ void run(const Args& args) {
  unsigned* shared = dynamic_shared<unsigned>();
  ptx::wait_for_previous_launch();
  if (threadIdx.x == 0) *shared = ptx::take_turn(static_cast<unsigned*>(args.turns));
  __syncthreads();
  const Turn turn(*shared, args.units + 1, args.lag);
  const int group = args.strips.batch * args.groups - 1 - turn.round;
  if (group < 0) return;
  const unsigned strips = static_cast<unsigned>(args.per_group) * args.strips.slots;
  const Sweep<C> sweep(args.strips, group * strips, strips, turn.unit);
  if (turn.unit == args.units) {
    __syncthreads();  // all threads have read `shared`
    if (!turn.second) find_coefficients<C, true>(args, group);
  } else if (turn.second) {
    grad_strip<C, true>(args, sweep);
  } else {
    sum_strip<C, true>(args, sweep);
  }
}

}  // namespace tconv3d
