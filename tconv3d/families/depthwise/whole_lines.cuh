// Outputs of a contiguous tensor that leave a block as runs of whole lines, gathered in shared memory.
//
// A thread has kLine neighbouring outputs of a line, so that stores of its own would reach a part of a sector
// of 32 bytes each, and only single elements where lines have odd length. Where the tiles of a block span a
// line, the lines of a channel are one run of memory. It lies in shared memory as it will lie in global
// memory, with the offset that its first element has in its aligned vector, so that vectors of 16 bytes move
// from there to neighbouring addresses, whatever the length of a line is.
#pragma once

#include "common.cuh"

namespace tconv3d {

// L has Scalar, kThreads, kChannels, kLines (the most lines of a run), kLine (outputs of a thread in a line),
// kChunks (threads that share a line), kTail (outputs of the last of them that exist), and kAligned: all
// lines begin at multiples of 16 bytes.
template <class L>
struct WholeLines {
  using Scalar = typename L::Scalar;
  static constexpr int kItem = static_cast<int>(sizeof(Scalar)), kPiece = 16 / kItem;
  // Elements from channel to channel: a run, and the offset of its first element.
  static constexpr int kPitch = (L::kLines * L::kLine * L::kChunks + kPiece - 1) / kPiece * kPiece + kPiece;
  // Vectors that each thread loads of a channel, and elements in all: some are loaded behind the last
  // channel.
  static constexpr int kTimes = (kPitch / kPiece + L::kThreads - 1) / L::kThreads;
  static constexpr int kSize = (L::kChannels - 1) * kPitch + (kTimes * L::kThreads + 1) * kPiece;
  static_assert(L::kLine % 4 == 0 && L::kTail > 0 && L::kTail <= L::kLine, "threads have vectors of a line");

  Scalar* shared;

  // Returns the offset of a run's first element in its aligned vector, in elements.
  static __device__ __forceinline__ int offset_of(const Scalar* run) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(run) % 16) / kItem;
  }

  // Returns where element 0 of a channel's run lies in shared memory.
  __device__ __forceinline__ Scalar* start(int channel, const Scalar* run) const {
    return shared + channel * kPitch + offset_of(run);
  }

  static __device__ __forceinline__ void put_pair(Scalar* to, float first, float second) {
    if constexpr (kItem == 4) {
      *reinterpret_cast<Vector<float, 2>*>(to) = {first, second};
    } else {
      *reinterpret_cast<unsigned*>(to) = Narrow<Scalar>::two(first, second);
    }
  }

  // Puts a thread's outputs of a line, by pairs. kFirst: the first output that begins a pair.
  template <int kFirst>
  static __device__ __forceinline__ void put_pairs(Scalar* to, const float (&values)[L::kLine], bool last) {
    if constexpr (kFirst == 1) to[0] = Narrow<Scalar>::from(values[0]);
#pragma unroll
    for (int i = kFirst; i < L::kLine; i += 2) {
      const bool pair = i + 1 < L::kLine;
      if (i + 1 < L::kTail || (pair && !last)) {
        put_pair(to + i, values[i], values[pair ? i + 1 : i]);
      } else if (i < L::kTail || !last) {
        to[i] = Narrow<Scalar>::from(values[i]);
      }
    }
  }

  // Puts a thread's outputs of a line. `last`: the thread is the last that has outputs of the line.
  static __device__ __forceinline__ void put(Scalar* to, const float (&values)[L::kLine], bool last) {
    if constexpr (L::kAligned) {
      constexpr int kWide = L::kLine % kPiece == 0 ? kPiece : 4;
      static_assert(L::kTail % kWide == 0, "lines have whole vectors");
#pragma unroll
      for (int i = 0; i < L::kLine; i += kWide) {
        Vector<Scalar, kWide> vector;
#pragma unroll
        for (int v = 0; v < kWide; ++v) vector.at[v] = Narrow<Scalar>::from(values[i + v]);
        if (i < L::kTail || !last) *reinterpret_cast<Vector<Scalar, kWide>*>(to + i) = vector;
      }
    } else if (reinterpret_cast<unsigned long long>(to) % (2 * kItem) == 0) {
      put_pairs<0>(to, values, last);
    } else {
      put_pairs<1>(to, values, last);
    }
  }

  // Stores the `count` elements of a channel's run. All threads call it.
  __device__ __forceinline__ void store(int channel, Scalar* run, int count) const {
    const auto before = static_cast<unsigned>(offset_of(run)), end = before + static_cast<unsigned>(count);
    const unsigned thread = threadIdx.x;
    // Vectors that end inside of the run, and this thread's first one of those that begin there too.
    const unsigned vectors = end / kPiece, first = thread + (before > 0 ? 1 : 0);
    const Scalar* const from = shared + channel * kPitch;
    Scalar* const to = run - before;  // a multiple of 16 bytes, in front of which nothing is stored
    const Scalar* const own_from = from + first * kPiece;
    Scalar* const own_to = to + first * kPiece;
    Vector<Scalar, kPiece> vector[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) vector[i] = load_vector<kPiece>(own_from + i * L::kThreads * kPiece);
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      ptx::store_global_if(first + i * L::kThreads < vectors, own_to + i * L::kThreads * kPiece,
                           *reinterpret_cast<uint4*>(&vector[i]));
    }
    if (L::kAligned || thread >= 2 * kPiece) return;
    // The vectors at both ends, of which only some elements are the run's.
    const unsigned at = thread < kPiece ? thread : vectors * kPiece + thread - kPiece;
    const bool own = thread < kPiece ? before > 0 : vectors > 0 || before == 0;
    if (own && at >= before && at < end) to[at] = from[at];
  }
};

}  // namespace tconv3d
