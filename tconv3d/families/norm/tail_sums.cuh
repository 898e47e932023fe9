// Sums of expressions of activations over the volume of every channel, in one pass that reads every operand
// once. The sums of a strip, added over its threads in a fixed order, go to a slot of the channel; whoever
// launches the kernel adds up the slots.
#pragma once

#include "expression_list.cuh"
#include "tail_operands.cuh"

namespace tconv3d {

template <class C>
struct TailSums : TailOperands<C> {
  using Acc = typename C::Acc;
  static constexpr int kSums = C::Expressions::kCount;

  Acc sums[Sweep<C>::kOwn][kSums] = {};

  __device__ __forceinline__ TailSums(const Args& args, const Sweep<C>& sweep)
      : TailOperands<C>(args, sweep) {}
  template <int kCount>
  __device__ __forceinline__ void use(int, const typename TailOperands<C>::template Items<kCount>& items) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      C::Expressions::template add<0>(sums[C::kChannelsLast ? i : 0], this->element(items, i));
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  const Sweep<C> sweep(args.strips, blockIdx.x);
  TailSums<C> tail(args, sweep);
  sweep.run(tail);
  sweep.add_up(tail.sums, dynamic_shared<Acc>());
  if (!sweep.speaks) return;
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    const long long row = static_cast<long long>(sweep.n) * args.strips.channels + sweep.channel + i;
    Acc* const to = static_cast<Acc*>(args.sums) + (row * args.strips.slots + sweep.slot) * tail.kSums;
#pragma unroll
    for (int s = 0; s < tail.kSums; ++s) to[s] = tail.sums[i][s];
  }
}

}  // namespace tconv3d
