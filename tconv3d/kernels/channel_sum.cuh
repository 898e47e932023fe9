// The bias gradient: the sum of dy over batch and volume for every channel.
//
// A warp works alone on one part of the positions. Its lanes are 32 neighbouring positions of one channel,
// or, for channels-last tensors, one position of 32 neighbouring channels. reduce.cuh adds the parts in a
// fixed order.
#pragma once

#include "cursor.cuh"

namespace tconv3d {

struct Args {
  const void* dy;
  void* parts;  // [splits][channels]
  Strides dy_strides;
  long long positions;
  int splits;
  int channels;
  Walk walk;
};

template <class C>
__device__ void run(const Args& args) {
  using Scalar = typename C::Scalar;
  using Acc = typename C::Acc;
  using Index = typename IndexType<C::kWide>::type;
  constexpr int kLanes = 32;
  const int lane = threadIdx.x % kLanes;
  const long long warp = static_cast<long long>(blockIdx.x) * (C::kThreads / kLanes) + threadIdx.x / kLanes;
  const int units = C::kLanesArePositions ? args.channels : (args.channels + kLanes - 1) / kLanes;
  const int split = static_cast<int>(warp / units);
  const int unit = static_cast<int>(warp % units);
  const int channel = C::kLanesArePositions ? unit : unit * kLanes + lane;
  if (split >= args.splits || channel >= args.channels) return;

  const Scalar* dy = static_cast<const Scalar*>(args.dy) + channel * static_cast<Index>(args.dy_strides.c);
  const Part<Index> part(static_cast<Index>(args.positions), args.splits, split);
  const Index first = part.begin + (C::kLanesArePositions ? lane : 0);
  Cursor<Index> i(first, args.walk);
  Acc sum = 0;
#pragma unroll 4
  for (Index position = first; position < part.end; position += C::kLanesArePositions ? kLanes : 1) {
    const Index step_w = C::kUnitW ? 1 : static_cast<Index>(args.dy_strides.w);
    sum += widen<Acc>(
        dy[i.n * static_cast<Index>(args.dy_strides.n) + i.d * static_cast<Index>(args.dy_strides.d) +
           i.h * static_cast<Index>(args.dy_strides.h) + i.w * step_w]);
    i.advance(args.walk);
  }
  if constexpr (C::kLanesArePositions) sum = warp_sum(sum);
  if (!C::kLanesArePositions || lane == 0) {
    static_cast<Acc*>(args.parts)[static_cast<long long>(split) * args.channels + channel] = sum;
  }
}

}  // namespace tconv3d
