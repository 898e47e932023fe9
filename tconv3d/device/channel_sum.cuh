// Computes the bias gradient: the sum of dy over batch and volume for every channel.
//
// A warp sums one part of the positions alone. Its lanes take 32 neighbouring positions of one channel, in
// vectors of 16 bytes where the volume of a channel is one contiguous run (kDense), or, for channels-last
// tensors, one position of 32 neighbouring channels. Where a channels-last tensor is a dense matrix
// [positions][channels] (kRows), a block sums one part, in vectors of 16 bytes whatever the number of
// channels. reduce.cuh adds the parts in a fixed order. A single part is the gradient itself, of type Stored.
#pragma once

#include "cursor.cuh"
#include "long_sum.cuh"

namespace tconv3d {

// Adds the lane's share of a contiguous run.
template <class Acc, class Scalar, class Index>
__device__ __forceinline__ void add_run(LongSum<Acc>& sum, const Scalar* run, Index length, int lane) {
  constexpr int kLanes = 32, kItems = 16 / static_cast<int>(sizeof(Scalar));
  const int past = static_cast<int>(reinterpret_cast<unsigned long long>(run) / sizeof(Scalar) % kItems);
  const Index wanted = (kItems - past) % kItems, head = wanted < length ? wanted : length;
  const Index vectors = (length - head) / kItems;
  if (lane < head) sum.add(widen<Acc>(run[lane]));
  const Scalar* aligned = run + head;
#pragma unroll 4
  for (Index i = lane; i < vectors; i += kLanes) {
    const auto vector = load_vector<kItems>(aligned + i * kItems);
    Acc few = 0;
#pragma unroll
    for (int k = 0; k < kItems; ++k) few += widen<Acc>(vector.at[k]);
    sum.add(few);
  }
  const Index tail = head + vectors * kItems + lane;
  if (tail < length) sum.add(widen<Acc>(run[tail]));
}

// Sums one part of the dense matrix dy [positions][channels], read as vectors without regard to its rows. A
// bundle is the fewest rows that are whole vectors. Neighbouring threads have neighbouring vectors of a
// bundle, and then of the following bundles, so that each of a thread's elements is always of the same
// channel. The last block also adds the rows behind the last whole bundle.
template <class C>
__device__ void sum_rows(const Args& args) {
  using Scalar = typename C::Scalar;
  using Acc = typename C::Acc;
  using Index = typename IndexType<C::kWide>::type;
  using Stored = typename C::Stored;
  constexpr int kItems = 16 / static_cast<int>(sizeof(Scalar)), kAtOnce = 4, kMostLanes = 16;
  __shared__ Acc shared[C::kThreads * kItems];
  __shared__ Acc lane_sums[C::kThreads];
  const int columns = args.bundle_vectors, rows = args.bundle_rows, bundles = C::kThreads / columns;
  TCONV3D_ASSUME(columns * kItems == rows * args.channels && bundles > 0);
  const int own = static_cast<int>(threadIdx.x) / columns, column = static_cast<int>(threadIdx.x) % columns;
  const Index whole = static_cast<Index>(args.positions) / rows;
  const Part<Index> part(whole, args.splits, static_cast<int>(blockIdx.x));
  const Scalar* dy = static_cast<const Scalar*>(args.dy);
  if (own < bundles) {
    LongSum<Acc> sums[kItems];
    for (Index first = part.begin + own; first < part.end; first += kAtOnce * bundles) {
      Vector<Scalar, kItems> vectors[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Index bundle = first + i * bundles;
        vectors[i] = bundle < part.end ? load_vector<kItems>(dy + (bundle * columns + column) * kItems)
                                       : Vector<Scalar, kItems>{};
      }
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        Acc few = 0;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) few += widen<Acc>(vectors[i].at[k]);
        sums[k].add(few);
      }
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) shared[threadIdx.x * kItems + k] = sums[k].total;
  }
  __syncthreads();
  // Few channels have several lanes each, which share the sums of the bundles.
  const int most = C::kThreads / args.channels, lanes = most > kMostLanes ? kMostLanes : most < 1 ? 1 : most;
  const int lane = static_cast<int>(threadIdx.x) / args.channels;
  const auto sum_of = [&](int channel, int first_lane) {
    LongSum<Acc> sum;
    for (int first = first_lane * kAtOnce; first < bundles * rows; first += lanes * kAtOnce) {
      Acc few = 0;
#pragma unroll
      for (int i = first; i < first + kAtOnce; ++i)
        few += i < bundles * rows ? shared[i * args.channels + channel] : Acc(0);
      sum.add(few);
    }
    return sum.total;
  };
  if (lanes > 1 && lane < lanes)
    lane_sums[threadIdx.x] = sum_of(static_cast<int>(threadIdx.x) - lane * args.channels, lane);
  __syncthreads();
  const bool last = static_cast<int>(blockIdx.x) == args.splits - 1;
  Stored* parts = static_cast<Stored*>(args.parts) + static_cast<long long>(blockIdx.x) * args.channels;
  for (int channel = static_cast<int>(threadIdx.x); channel < args.channels; channel += C::kThreads) {
    LongSum<Acc> sum;
    if (lanes == 1) sum.add(sum_of(channel, 0));
    for (int other = 0; lanes > 1 && other < lanes; ++other)
      sum.add(lane_sums[other * args.channels + channel]);
    for (Index row = last ? whole * rows : static_cast<Index>(args.positions); row < args.positions; ++row)
      sum.add(widen<Acc>(dy[row * args.channels + channel]));
    parts[channel] = Narrow<Stored>::from(sum.total);
  }
}

template <class C>
__device__ void run(const Args& args) {
  using Scalar = typename C::Scalar;
  using Acc = typename C::Acc;
  using Index = typename IndexType<C::kWide>::type;
  constexpr int kLanes = 32;
  if constexpr (C::kRows) {
    sum_rows<C>(args);
    return;
  }
  const int lane = threadIdx.x % kLanes;
  const long long warp = static_cast<long long>(blockIdx.x) * (C::kThreads / kLanes) + threadIdx.x / kLanes;
  const int units = C::kLanesArePositions ? args.channels : (args.channels + kLanes - 1) / kLanes;
  const int split = static_cast<int>(warp / units);
  const int unit = static_cast<int>(warp % units);
  const int channel = C::kLanesArePositions ? unit : unit * kLanes + lane;
  if (split >= args.splits || channel >= args.channels) return;

  const Scalar* dy = static_cast<const Scalar*>(args.dy) + channel * static_cast<Index>(args.dy_strides.c);
  const Part<Index> part(static_cast<Index>(args.positions), args.splits, split);
  LongSum<Acc> long_sum;
  if constexpr (C::kDense) {
    const Index volume = static_cast<Index>(args.volume);
    for (Index position = part.begin; position < part.end;) {
      const Index n = position / volume, offset = position - n * volume;
      const Index length = part.end - position < volume - offset ? part.end - position : volume - offset;
      add_run(long_sum, dy + (n * static_cast<Index>(args.dy_strides.n) + offset), length, lane);
      position += length;
    }
  } else {
    const Index first = part.begin + (C::kLanesArePositions ? lane : 0);
    Cursor<Index> i(first, args.walk);
#pragma unroll 4
    for (Index position = first; position < part.end; position += C::kLanesArePositions ? kLanes : 1) {
      const Index step_w = C::kUnitW ? 1 : static_cast<Index>(args.dy_strides.w);
      long_sum.add(widen<Acc>(
          dy[i.n * static_cast<Index>(args.dy_strides.n) + i.d * static_cast<Index>(args.dy_strides.d) +
             i.h * static_cast<Index>(args.dy_strides.h) + i.w * step_w]));
      i.advance(args.walk);
    }
  }
  Acc sum = long_sum.total;
  if constexpr (C::kLanesArePositions) sum = warp_sum(sum);
  if (!C::kLanesArePositions || lane == 0) {
    using Stored = typename C::Stored;
    static_cast<Stored*>(args.parts)[static_cast<long long>(split) * args.channels + channel] =
        Narrow<Stored>::from(sum);
  }
}

}  // namespace tconv3d
