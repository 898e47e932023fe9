// Both passes of GroupNorm's gradient in one launch, so that the second finds dy and x in the L2 cache.
//
// The passes of a norm group (of one batch item; `group` of all of them) are `units` blocks of work each, and
// one more finds its coefficients. They are done in this order, groups counted from the last one: the first
// passes of `lag` groups and their coefficients; then, block by block in turns, those of a group and the
// second pass of the one `lag` before it. Whoever needs a number waits until it is there: hardly ever, if
// `lag` groups are more than what runs at a time.
//
// Blocks take turns in the order in which they start. So whatever a block waits for is the work of one that
// has started, and waits for nothing later: however few blocks fit the GPU, they come to their end.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

// What a block is to do.
struct Turn {
  bool second;  // pass
  int round, unit;

  __device__ __forceinline__ Turn(unsigned turn, unsigned units, unsigned lag) {
    const unsigned ahead = lag * units;  // units of first passes before any of a second one
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
    __syncthreads();  // `shared` has been read
    if (!turn.second) find_coefficients<C, true>(args, group);
  } else if (turn.second) {
    grad_strip<C, true>(args, sweep);
  } else {
    sum_strip<C, true>(args, sweep);
  }
}

}  // namespace tconv3d
