// A pass over dense activations of one shape and format, in vectors of 16 bytes where addresses allow it.
//
// A strip is what a thread goes over without changing its channels:
// - contiguous: a warp has a piece of one channel's volume; a thread's vectors are neighbours along it. A
//   channel's volume may start anywhere, so the first and the last vector of a strip may belong to it in
//   part.
// - channels-last: a block has a range of one batch item's positions; a thread has kVector neighbouring
//   channels, and every so many of the positions.
// A strip's sums, added over its threads in a fixed order, go to a slot of its channel.
#pragma once

#include "cursor.cuh"

namespace tconv3d {

// The widest word that a vector is made of.
template <int kBytes>
struct Word {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<2> {
  using type = unsigned short;
};

// A vector that is not needed again soon.
template <int N, class T>
__device__ __forceinline__ Vector<T, N> load_passing(const T* address) {
  using Part = typename Word<sizeof(Vector<T, N>)>::type;
  Vector<T, N> vector;
  Part* parts = reinterpret_cast<Part*>(&vector);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(vector) / sizeof(Part)); ++i) {
    ptx::load_passing(reinterpret_cast<const Part*>(address) + i, parts[i]);
  }
  return vector;
}
template <class T, int N>
__device__ __forceinline__ void store_passing(T* address, const Vector<T, N>& vector) {
  using Part = typename Word<sizeof(vector)>::type;
  const Part* parts = reinterpret_cast<const Part*>(&vector);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(vector) / sizeof(Part)); ++i) {
    ptx::store_passing(reinterpret_cast<Part*>(address) + i, parts[i]);
  }
}

template <class C>
struct Sweep {
  static constexpr int kVector = C::kVector;
  static constexpr int kOwn = C::kChannelsLast ? kVector : 1;  // channels of a thread
  static constexpr int kFlight = 4;                            // vectors on their way at a time

  int n, channel, slot;   // of the strip; `channel` is the first of this thread
  bool exists;            // whether the thread has anything to do
  bool speaks;            // whether it reports the strip's sums
  long long start;        // the strip's first item, or its first of the thread's channels
  int first, step, last;  // items from there: a thread's first vector, from one to the next, the vectors' end
  int head, tail;         // contiguous: single items before the vectors, and behind them
  int across;             // channels-last: threads of a position

  // `unit` is the block, counted from either end.
  __device__ __forceinline__ Sweep(const Strips& strips, int unit) {
    if constexpr (C::kChannelsLast) {
      by_position(strips, unit);
    } else {
      by_channel(strips, 0, static_cast<unsigned>(strips.batch) * strips.channels * strips.slots, unit);
    }
    if (!exists) first = last = head = tail = 0;
  }

  // Contiguous: block `unit` of those that `count` strips take, the first of which is `begin` of all.
  __device__ __forceinline__ Sweep(const Strips& strips, unsigned begin, unsigned count, unsigned unit) {
    static_assert(!C::kChannelsLast, "a strip would belong to several channels");
    by_channel(strips, begin, count, unit);
    if (!exists) first = last = head = tail = 0;
  }

  __device__ __forceinline__ void by_position(const Strips& strips, int unit) {
    const int vectors = (strips.channels + kVector - 1) / kVector;  // of a position
    across = vectors < C::kThreads ? vectors : C::kThreads;
    const int blocks = (vectors + across - 1) / across, lanes = C::kThreads / across;
    const int place = threadIdx.x % across + unit % blocks * across, lane = threadIdx.x / across;
    slot = unit / blocks % strips.slots;
    n = unit / blocks / strips.slots;
    channel = place * kVector;
    exists = place < vectors && lane < lanes;
    speaks = exists && lane == 0;
    start = (n * strips.volume + static_cast<long long>(slot) * strips.length) * strips.channels + channel;
    first = lane * strips.channels;
    step = lanes * strips.channels;
    last = positions(strips) * strips.channels;
    head = tail = 0;
  }

  __device__ __forceinline__ void by_channel(const Strips& strips, unsigned begin, unsigned count,
                                             unsigned unit) {
    const int lane = threadIdx.x % 32;
    const unsigned own = unit * (C::kThreads / 32) + threadIdx.x / 32, strip = begin + own;
    const unsigned row = strip / strips.slots;
    slot = static_cast<int>(strip % strips.slots);
    n = static_cast<int>(row / strips.channels);
    channel = static_cast<int>(row % strips.channels);
    exists = own < count;
    speaks = exists && lane == 0;
    start = row * strips.volume + static_cast<long long>(slot) * strips.length;
    const int items = positions(strips), before = static_cast<int>(-start & (kVector - 1));
    head = before < items ? before : items;
    last = head + (items - head) / kVector * kVector;
    tail = items - last;
    first = head + lane * kVector;
    step = 32 * kVector;
    across = 0;
  }

  // Of the strip.
  __device__ __forceinline__ int positions(const Strips& strips) const {
    const long long left = strips.volume - static_cast<long long>(slot) * strips.length;
    return left < strips.length ? static_cast<int>(left) : strips.length;
  }

  // For every vector of the strip, and every single item: Body has `load<kCount>(at)`, which returns items,
  // and `use<kCount>(at, items)`. Loads of several vectors come before their use: x and y may be one tensor.
  template <class Body>
  __device__ __forceinline__ void run(Body& body) const {
    using Items = decltype(body.template load<kVector>(0));
    for (int at = first; at < last; at += kFlight * step) {
      Items items[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (at + i * step < last) items[i] = body.template load<kVector>(at + i * step);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (at + i * step < last) body.template use<kVector>(at + i * step, items[i]);
      }
    }
    if constexpr (!C::kChannelsLast && kVector > 1) {
      const int lane = threadIdx.x % 32;
      if (lane < head) body.template use<1>(lane, body.template load<1>(lane));
      if (lane < tail) body.template use<1>(last + lane, body.template load<1>(last + lane));
    }
  }

  // The sum of a strip's threads, of kSums numbers for each of their channels: in the thread that speaks.
  // `shared` has room for as many of every thread of the block. All threads must call it.
  template <int kSums, class Acc>
  __device__ __forceinline__ void add_up(Acc (&sums)[kOwn][kSums], Acc* shared) const {
    if constexpr (C::kChannelsLast) {
      constexpr int kAll = kOwn * kSums;
      Acc* own = shared + threadIdx.x * kAll;
#pragma unroll
      for (int i = 0; i < kAll; ++i) own[i] = sums[i / kSums][i % kSums];
      __syncthreads();
      if (!speaks) return;
      for (int thread = threadIdx.x + across; thread < C::kThreads; thread += across) {
#pragma unroll
        for (int i = 0; i < kAll; ++i) sums[i / kSums][i % kSums] += shared[thread * kAll + i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[0][i] = warp_sum(sums[0][i]);
    }
  }
};

}  // namespace tconv3d
