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

struct Strips {
  long long volume;  // positions
  int batch, channels;
  int slots;   // strips of a channel (of one batch item)
  int length;  // positions of a strip
};

// Of tensors whose addresses are multiples of 16 bytes, or one by one: items of [begin, end) at a vector's
// place, zero for the others.
template <int kVector, class Scalar>
__device__ __forceinline__ Vector<Scalar, kVector> load_items(const void* tensor, long long at,
                                                              long long begin, long long end) {
  const Scalar* address = static_cast<const Scalar*>(tensor) + at;
  if (at >= begin && at + kVector <= end) return load_vector<kVector>(address);
  Vector<Scalar, kVector> items{};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (at + i >= begin && at + i < end) items.at[i] = address[i];
  }
  return items;
}
template <int kVector, class Scalar>
__device__ __forceinline__ void store_items(void* tensor, long long at, long long begin, long long end,
                                            const Vector<Scalar, kVector>& items) {
  Scalar* address = static_cast<Scalar*>(tensor) + at;
  if (at >= begin && at + kVector <= end) {
    *reinterpret_cast<Vector<Scalar, kVector>*>(address) = items;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (at + i >= begin && at + i < end) address[i] = items.at[i];
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
  long long begin, end;   // items that belong to the strip, or to its batch item
  long long first, step;  // a thread's first vector, and from one to the next
  long long origin;       // the item of `channel` at the strip's first position
  int across;             // channels-last: threads of a position

  // `unit` is the block, counted from either end.
  __device__ __forceinline__ Sweep(const Strips& strips, int unit) {
    const long long volume = strips.volume;
    if constexpr (C::kChannelsLast) {
      const int vectors = (strips.channels + kVector - 1) / kVector;  // of a position
      across = vectors < C::kThreads ? vectors : C::kThreads;
      const int blocks = (vectors + across - 1) / across, lanes = C::kThreads / across;
      const int place = threadIdx.x % across + unit % blocks * across, lane = threadIdx.x / across;
      slot = unit / blocks % strips.slots;
      n = unit / blocks / strips.slots;
      channel = place * kVector;
      exists = place < vectors && lane < lanes;
      speaks = exists && lane == 0;
      const long long last = static_cast<long long>(slot + 1) * strips.length;
      begin = n * volume * strips.channels;
      end = begin + (last < volume ? last : volume) * strips.channels;
      origin = begin + static_cast<long long>(slot) * strips.length * strips.channels + channel;
      first = origin + static_cast<long long>(lane) * strips.channels;
      step = static_cast<long long>(lanes) * strips.channels;
    } else {
      const int lane = threadIdx.x % 32;
      const long long warp = static_cast<long long>(unit) * (C::kThreads / 32) + threadIdx.x / 32;
      const long long row = warp / strips.slots;
      slot = static_cast<int>(warp % strips.slots);
      n = static_cast<int>(row / strips.channels);
      channel = static_cast<int>(row % strips.channels);
      exists = n < strips.batch;
      speaks = exists && lane == 0;
      const long long last = static_cast<long long>(slot + 1) * strips.length;
      begin = row * volume + static_cast<long long>(slot) * strips.length;
      end = row * volume + (last < volume ? last : volume);
      origin = begin;
      across = 0;
      first = begin / kVector * kVector + lane * kVector;
      step = 32 * kVector;
    }
    if (!exists) first = end;
  }

  // Body: `Items load(at)` for every vector of the strip, then `use(at, items)`.
  template <class Body>
  __device__ __forceinline__ void run(Body& body) const {
    for (long long at = first; at < end; at += kFlight * step) {
      typename Body::Items items[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (at + i * step < end) items[i] = body.load(at + i * step);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        if (at + i * step < end) body.use(at + i * step, items[i]);
      }
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
