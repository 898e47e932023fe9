// Both passes of GroupNorm's gradient in one launch, so that the second finds dy and x in the L2 cache.
//
// The passes of a norm group (of one batch item; `group` of all of them) are `units` blocks of work each.
// They are done in this order, groups counted from the last one: the first passes of `lag` groups; then, unit
// by unit in turns, the first pass of a group and the second pass of the one `lag` before it. The block that
// finishes a first pass finds the group's coefficients, and second passes wait for them: hardly ever, if
// `lag` groups are more than what runs at a time.
//
// A block takes its work in the order in which blocks start. So whatever it waits for is done by blocks that
// have started, and wait for nothing that comes later: however few fit the GPU, they come to their end.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

struct Args {
  const void *dy, *x, *statistics, *weight;
  void *sums, *by_channel, *coefficients, *dz, *bias_sums;
  void* counters;  // zeros: blocks that started; first passes done of each group; whether it has coefficients
  Strips strips;
  int groups, per_group;
  int units, lag;
};

// What a block is to do, by its turn.
struct Turn {
  bool second;  // pass
  int round, unit;

  __device__ __forceinline__ Turn(unsigned turn, unsigned units, unsigned lag) {
    second = turn >= lag * units && (turn - lag * units) % 2;
    const unsigned first_passes =
        turn < lag * units ? turn : (turn - lag * units) / 2 + (second ? 0 : lag * units);
    round = static_cast<int>(first_passes / units);
    unit = static_cast<int>(first_passes % units);
  }
};

template <class C>
__device__ void run(const Args& args) {
  unsigned* shared = dynamic_shared<unsigned>();
  unsigned* started = static_cast<unsigned*>(args.counters);
  const int all_groups = args.strips.batch * args.groups;
  ptx::wait_for_previous_launch();
  if (threadIdx.x == 0) *shared = ptx::count_up(started);
  __syncthreads();
  const Turn turn(*shared, args.units, args.lag);
  if (turn.round >= all_groups) return;
  const int group = all_groups - 1 - turn.round;
  unsigned *done = started + 1 + group, *ready = done + all_groups;
  const unsigned strips = static_cast<unsigned>(args.per_group) * args.strips.slots;
  const Sweep<C> sweep(args.strips, group * strips, strips, turn.unit);
  if (turn.second) {
    if (threadIdx.x == 0) ptx::wait_for_flag(ready);
    __syncthreads();
    grad_strip<C>(args, sweep);
    return;
  }
  sum_strip<C>(args, sweep);
  __syncthreads();
  if (threadIdx.x == 0) *shared = ptx::count_up(done);
  __syncthreads();
  if (*shared + 1 != static_cast<unsigned>(args.units)) return;
  __syncthreads();  // `shared` has been read
  find_coefficients<C>(args, group);
  if (threadIdx.x == 0) ptx::raise_flag(ready);
}

}  // namespace tconv3d
