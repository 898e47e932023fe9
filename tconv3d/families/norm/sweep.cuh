// A pass over dense activations of one shape and layout, in vectors of 16 bytes where addresses allow it.
//
// A strip is the part of a tensor that a thread passes over without changing its channels:
// - contiguous: a warp has a piece of one channel's volume, and neighbouring threads have neighbouring
//   vectors. A channel's volume may start at any address, so that a strip may have single items before and
//   behind its vectors.
// - channels-last: a block has a range of positions of one batch item; a thread has kVector neighbouring
//   channels, and goes over the positions of the range with a fixed stride.
// The sums of a strip, added over its threads in a fixed order, go to one slot of the channel.
#pragma once

#include "cursor.cuh"

namespace tconv3d {

// The widest word type that a vector of kBytes bytes is made of.
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

// Loads a vector with the cache hint that it is not needed again soon.
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
// Stores a vector with the cache hint that it is not needed again soon.
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
  static constexpr int kOwn = C::kChannelsLast ? kVector : 1;  // channels per thread
  static constexpr int kFlight = 4;                            // vectors whose loads are in flight at a time

  int n, channel, slot;  // location of the strip; `channel` is the thread's first
  bool exists;           // whether the thread has anything to do
  bool speaks;           // whether the thread writes the strip's sums
  long long start;       // index of the strip's first item, at the thread's first channel
  // Items counted from `start`: the thread's first vector, the distance to its next one, the end of the
  // vectors.
  int first, step, last;
  int head, tail;  // contiguous: single items before and behind the vectors
  int across;      // channels-last: threads per position

  // `unit` is the block, counted from either end of the grid.
  __device__ __forceinline__ Sweep(const Strips& strips, int unit) {
    if constexpr (C::kChannelsLast) {
      by_position(strips, unit);
    } else {
      by_channel(strips, 0, static_cast<unsigned>(strips.batch) * strips.channels * strips.slots, unit);
    }
    if (!exists) first = last = head = tail = 0;
  }

  // Contiguous tensors only: block `unit` of the blocks that process `count` strips from strip `begin` on.
  __device__ __forceinline__ Sweep(const Strips& strips, unsigned begin, unsigned count, unsigned unit) {
    static_assert(!C::kChannelsLast, "a strip would belong to several channels");
    by_channel(strips, begin, count, unit);
    if (!exists) first = last = head = tail = 0;
  }

  __device__ __forceinline__ void by_position(const Strips& strips, int unit) {
    const int vectors = (strips.channels + kVector - 1) / kVector;  // vectors per position
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

  // Returns the number of positions of the strip.
  __device__ __forceinline__ int positions(const Strips& strips) const {
    const long long left = strips.volume - static_cast<long long>(slot) * strips.length;
    return left < strips.length ? static_cast<int>(left) : strips.length;
  }

  // Calls `load<kCount>(at)`, which returns items, and `use<kCount>(at, items)` of Body for every vector of
  // the strip and every single item. Several vectors are loaded before they are used. x and y may be one
  // tensor.
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

  // Sums kSums numbers per channel over the threads of a strip, into the thread that `speaks`. `shared` has
  // room for the numbers of every thread of the block. All threads of the block must call it.
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
