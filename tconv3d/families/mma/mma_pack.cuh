// Packs a weight for the kernel on mma.sync: in the order in which warps load it as fragments
// (mma_layout.cuh), rounded to the operand type, with zeros where there is no channel.
//
// A block takes one chunk of input channels, the columns of one warp and kTapsAtOnce taps. Taps are
// contiguous in the weight (or output channels, if it is channels-last), but not in a fragment. Elements
// therefore pass through shared memory, so that global reads and writes both coalesce.
#pragma once

#include "mma_layout.cuh"

namespace tconv3d {

template <class C>
struct MmaPack {
  using Layout = MmaLayout<C>;
  using Scalar = typename C::Scalar;
  static constexpr int kStrip = C::kTilesN * 8, kTapsAtOnce = C::kTapsAtOnce;
  static constexpr int kPieces = (C::kAllTaps + kTapsAtOnce - 1) / kTapsAtOnce;
  static constexpr int kItems = Layout::kChunk * kStrip * kTapsAtOnce;
  static constexpr int kTapPitch = Layout::kChunk * kStrip + 1;  // elements from tap to tap in shared memory
  static_assert(C::kSharedBytes >= static_cast<int>(sizeof(Scalar)) * kTapPitch * kTapsAtOnce,
                "room for the elements");

  const Args& args;
  Scalar* staged;
  int group, first_column, chunk, first_tap;

  __device__ __forceinline__ void read() const {
    const Scalar* weight = static_cast<const Scalar*>(args.weight) + group * args.group;
#pragma unroll 16
    for (int i = threadIdx.x; i < kItems; i += C::kThreads) {
      // Taps vary fastest (kTapsInner), or columns do.
      const int tap = C::kTapsInner ? i % kTapsAtOnce : i / (kStrip * Layout::kChunk);
      const int rest = C::kTapsInner ? i / kTapsAtOnce : i % (kStrip * Layout::kChunk);
      const int column = rest % kStrip, row = rest / kStrip;
      const int in = chunk * Layout::kChunk + row, out = first_column + column;
      const bool exists = in < C::kReduced && out < C::kOuts && first_tap + tap < C::kAllTaps;
      Scalar value{};
      if (exists) {
        const int at = C::kOrder(first_tap + tap);
        const int kw = at % C::kKernelW, kh = at / C::kKernelW % C::kKernelH;
        const int kd = at / C::kKernelW / C::kKernelH;
        value = load_constant(weight + in * args.stride.n + out * args.stride.c + kd * args.stride.d +
                              kh * args.stride.h + kw * args.stride.w);
      }
      staged[tap * kTapPitch + row * kStrip + column] = value;
    }
  }

  __device__ __forceinline__ void write(unsigned* strips) const {
    constexpr int kWords = C::kSteps * Layout::kStripWords;  // words per tap
#pragma unroll 4
    for (int i = threadIdx.x; i < kWords * kTapsAtOnce; i += C::kThreads) {
      const int tap = i / kWords, step = i % kWords / Layout::kStripWords;
      const int half = i % Layout::kStripWords / Layout::kHalfWords, word = i % Layout::kHalfWords;
      if (first_tap + tap >= C::kAllTaps) break;
      constexpr int kLane = Layout::kLaneWords, kTile = Layout::kTileWords;
      const bool pair = Layout::paired(word / kTile);
      const int lane = pair ? word % (2 * kTile) / (2 * kLane) : word % kTile / kLane;
      const int tile = pair ? word / (2 * kTile) * 2 + word % (2 * kLane) / kLane : word / kTile;
      const int row = (step * C::kStepWords + lane % 4 + word % kLane * 4) * Layout::kPerWord;
      const Scalar* from = staged + tap * kTapPitch + row * kStrip + Layout::column(tile, lane / 4);
      unsigned bits;
      if constexpr (C::kHalves == 2) {
        bits = half == 0 ? Halves::high(from[0]) : Halves::low(from[0]);
      } else {
        bits = OperandOf<Scalar>::bits(from[0]);
      }
      if constexpr (Layout::kPerWord == 2) bits |= OperandOf<Scalar>::bits(from[kStrip]) << 16;
      strips[tap * Layout::kTapWords + step * C::kWarpsN * Layout::kStripWords + i % Layout::kStripWords] =
          bits;
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Pack = MmaPack<Config>;
  using Layout = typename Pack::Layout;
  int block = blockIdx.x;
  const int piece = block % Pack::kPieces;
  block /= Pack::kPieces;
  const int warp = block % Config::kWarpsN;
  block /= Config::kWarpsN;
  const int chunk = block % Layout::kChunks;
  block /= Layout::kChunks;  // from here on, `block` is slice + kSlices * group
  const int slice = block % Layout::kSlices;
  const Pack pack{args,
                  dynamic_shared<typename Config::Scalar>(),
                  block / Layout::kSlices,
                  slice * Layout::kColumns + warp * Pack::kStrip,
                  chunk,
                  piece * Config::kTapsAtOnce};
  pack.read();
  __syncthreads();
  const long long tap = (static_cast<long long>(block) * Layout::kChunks + chunk) * Config::kAllTaps;
  pack.write(static_cast<unsigned*>(args.packed) + (tap + pack.first_tap) * Layout::kTapWords +
             warp * Layout::kStripWords);
}

}  // namespace tconv3d
