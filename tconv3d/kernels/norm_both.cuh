// Both passes of GroupNorm's gradient in one launch, so that the second finds dy and x in the L2 cache.
//
// The passes of a norm group (of one batch item; `group` of all of them) are `units` of work each, a strip
// for every warp of a block. They are done in this order, groups counted from the last one: the first passes
// of `lag` groups; then, unit by unit in turns, the first pass of a group and the second pass of the one
// `lag` before it. The warp that finishes the first pass of a channel adds up its sums, the one that finishes
// a group finds its coefficients, and second passes wait for them: hardly ever, if `lag` groups are more than
// what runs at a time.
//
// Blocks take turns in the order in which they ask. So whatever a warp waits for is the work of an earlier
// turn, whose block has started and waits for nothing later: however few blocks fit the GPU, they come to
// their end.
#pragma once

#include "norm_passes.cuh"

namespace tconv3d {

struct Args {
  const void *dy, *x, *statistics, *weight;
  void *sums, *by_channel, *coefficients, *dz, *bias_sums;
  void* counters;  // zeros: turns taken; strips done of each channel; channels done of each group, its flag
  Strips strips;
  int groups, per_group;
  int units, lag;
};

// What a block is to do.
struct Turn {
  bool second;  // pass
  int round, unit;

  __device__ __forceinline__ Turn(unsigned turn, unsigned units, unsigned lag) {
    const unsigned ahead = lag * units;  // first passes before any second one
    second = turn >= ahead && (turn - ahead) % 2 != 0;
    const unsigned one_by_one = turn < ahead ? turn : (turn - ahead) / 2 + (second ? 0 : ahead);
    round = static_cast<int>(one_by_one / units);
    unit = static_cast<int>(one_by_one % units);
  }
};

// Whether this warp is the last of `count` to come here. It then knows what the others knew.
__device__ __forceinline__ bool last_to_come(unsigned* counter, int count) {
  __syncwarp();
  unsigned before = 0;
  if (threadIdx.x % 32 == 0) before = ptx::count_up(counter);
  before = __shfl_sync(0xFFFFFFFFu, before, 0);
  __syncwarp();
  return before + 1 == static_cast<unsigned>(count);
}

template <class C>
__device__ __forceinline__ Sweep<C> sweep_of(const Args& args, int group, int unit) {
  const unsigned strips = static_cast<unsigned>(args.per_group) * args.strips.slots;
  return Sweep<C>(args.strips, group * strips, strips, unit);
}

struct Counters {
  unsigned *turns, *channels, *groups, *ready;

  __device__ __forceinline__ explicit Counters(const Args& args) {
    turns = static_cast<unsigned*>(args.counters);
    channels = turns + 1;
    groups = channels + args.strips.batch * args.strips.channels;
    ready = groups + args.strips.batch * args.groups;
  }
};

template <class C>
__device__ __forceinline__ void first_pass(const Args& args, int group, int unit) {
  const Counters counters(args);
  const Sweep<C> sweep = sweep_of<C>(args, group, unit);
  sum_strip<C>(args, sweep);
  if (!sweep.exists) return;
  const int channel = sweep.n * args.strips.channels + sweep.channel;
  if (!last_to_come(counters.channels + channel, args.strips.slots)) return;
  add_up_channel<C>(args, sweep.n, sweep.channel);
  if (!last_to_come(counters.groups + group, args.per_group)) return;
  find_coefficients<C>(args, group);
  if (threadIdx.x % 32 == 0) ptx::raise_flag(counters.ready + group);
}

template <class C>
__device__ __forceinline__ void second_pass(const Args& args, int group, int unit) {
  if (threadIdx.x % 32 == 0) ptx::wait_for_flag(Counters(args).ready + group);
  __syncwarp();
  grad_strip<C, true>(args, sweep_of<C>(args, group, unit));
}

// Does the work of a turn. False: there is none, nor after it.
template <class C>
__device__ __forceinline__ bool take(const Args& args, unsigned number) {
  const int all_groups = args.strips.batch * args.groups;
  const Turn turn(number, args.units, args.lag);
  if (turn.round >= all_groups) return !turn.second;
  const int group = all_groups - 1 - turn.round;
  const Args* same = &args;
  if (turn.second) {
    ptx::pin(same);  // the compiler must not merge the passes' loops: that takes registers
    second_pass<C>(*same, group, turn.unit);
  } else {
    first_pass<C>(*same, group, turn.unit);
  }
  return true;
}

template <class C>
__device__ void run(const Args& args) {
  unsigned* shared = dynamic_shared<unsigned>();  // a turn and the next one
  const Counters counters(args);
  ptx::wait_for_previous_launch();
  if (threadIdx.x == 0) shared[0] = ptx::take_turn(counters.turns);
  __syncthreads();
  for (int i = 0;; ++i) {
    unsigned next = 0;
    if (threadIdx.x == 0) next = ptx::take_turn(counters.turns);  // on its way while this one is done
    if (!take<C>(args, shared[i % 2])) return;
    if (threadIdx.x == 0) shared[(i + 1) % 2] = next;
    __syncthreads();
  }
}

}  // namespace tconv3d
