// Sums of expressions of activations and of the gradient of a pool of them, over the volume of every channel:
// what the gradient of a norm before the pool needs. The gradient of an element is gathered where it is used
// (pool_gather.cuh), and is the local number of the expressions. The sums of a strip go to a slot of the
// channel, as in tail_sums.cuh.
#pragma once

#include "expression_list.cuh"
#include "pool_gather.cuh"
#include "tail_operands.cuh"

namespace tconv3d {

template <class C>
struct PoolGradSums : TailOperands<C> {
  using Acc = typename C::Acc;
  using Operands = TailOperands<C>;
  static constexpr int kSums = C::Expressions::kCount;

  struct Element : Operands::Element {
    static constexpr int kLocals = 1;
    Acc number;
    template <int kIndex>
    __device__ __forceinline__ Acc local() const {
      static_assert(kIndex == 0, "there is one local number");
      return number;
    }
  };

  const Args& args;
  int before;       // positions of the volume before the strip
  long long first;  // index of the first window of the thread's channels
  Acc sums[Sweep<C>::kOwn][kSums] = {};

  __device__ __forceinline__ PoolGradSums(const Args& all, const Sweep<C>& sweep)
      : Operands(all, sweep), args(all), before(sweep.slot * all.strips.length) {
    const long long windows = static_cast<long long>(all.y_size.d) * all.y_size.h * all.y_size.w;
    first = C::kChannelsLast
                ? sweep.n * windows * all.strips.channels + sweep.channel
                : (static_cast<long long>(sweep.n) * all.strips.channels + sweep.channel) * windows;
  }

  template <int kWidth>
  __device__ __forceinline__ void gather(int position, Acc* numbers) const {
    const int line = divide(position, args.by_w), plane = divide(line, args.by_h);
    gather_windows<C, kWidth>(args, plane, line - plane * args.x_size.h, position - line * args.x_size.w,
                              first, C::kChannelsLast ? args.strips.channels : 1, numbers);
  }

  template <int kCount>
  __device__ __forceinline__ void use(int at, const typename Operands::template Items<kCount>& items) {
    Acc numbers[kCount] = {};
    if constexpr (C::kChannelsLast) {
      gather<kCount>(before + at / args.strips.channels, numbers);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) gather<1>(before + at + i, numbers + i);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Element element = {this->element(items, i), numbers[i]};
      C::Expressions::template add<0>(sums[C::kChannelsLast ? i : 0], element);
    }
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  const Sweep<C> sweep(args.strips, blockIdx.x);
  PoolGradSums<C> tail(args, sweep);
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
