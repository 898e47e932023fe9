// Weights of an up-convolution whose tensors, weight too, are channels-last: output channels are neighbours.
//
// A block of columns (up_layouts.cuh) of a chunk of K takes as many bytes as they are in memory as it does in
// order. So a warp copies whole blocks to their place and puts them in order itself: it waits for its own
// copies, and for nobody else.
#pragma once

#include "epilogue.cuh"
#include "operands.cuh"

namespace tconv3d {

// kThreads: of the warps that share the work.
template <class C, class Layout, int kThreads>
struct UpWeightBlocks {
  using Scalar = typename Layout::Scalar;

  static constexpr int kWarps = kThreads / 32, kRowBytes = Layout::kRowBytes;
  static constexpr int kBlock = Layout::kBlock, kBlockBytes = kBlock * kRowBytes;
  static constexpr int kInRow = C::kColumns / kBlock;  // blocks of a chunk
  static constexpr int kBlocks = Layout::kChunks * kInRow, kOwn = (kBlocks + kWarps - 1) / kWarps;
  static constexpr int kPieces = kBlock * Layout::kItem / 16;  // of a channel, as it is in memory
  static constexpr int kRowsAtOnce = 32 / kPieces, kCopies = Layout::kStageItems / kRowsAtOnce;
  static constexpr int kWords = kBlock / Layout::kPerWord;  // columns, or pairs of them
  static constexpr int kUnits = kWords * 8 / 32;            // of a lane: 16 bytes of K of a word's columns

  static_assert(kPieces == 4 && kWords == 16, "64 bytes of a channel");

  const Layout& layout;
  unsigned char* weights;
  int warp, lane;  // of those that share the work

  // A warp's blocks, those of the first chunks first.
  __device__ __forceinline__ int block(int i) const { return warp + i * kWarps; }
  __device__ __forceinline__ bool exists(int i) const { return kBlocks % kWarps == 0 || block(i) < kBlocks; }
  __device__ __forceinline__ int first_channel(int i) const {
    return block(i) / kInRow * Layout::kStageItems;
  }
  __device__ __forceinline__ int first_column(int i) const { return block(i) % kInRow * kBlock; }

  // Where a channel's items wait to be put in order: those of one load, by half a warp each, lie in banks of
  // their own.
  static __device__ __forceinline__ int slot_of(int channel) {
    return Layout::kPerWord == 2 ? channel ^ channel / 2 % 2 : channel;
  }

  // Of its blocks, those from one on and before another.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void copy() const {
    // A weight may begin anywhere among other parameters.
    const bool aligned = reinterpret_cast<unsigned long long>(layout.args.weight) % 16 == 0;
    static_for<kTo - kFrom>([&](auto later) {
      constexpr int i = kFrom + decltype(later)::value;
      if (aligned && exists(i)) copy_block(i);
      ptx::copy_commit();
    });
    if (!aligned) {
#pragma unroll 1
      for (int i = kFrom; i < kTo; ++i) {
        if (exists(i)) load_block(i);
      }
    }
  }

  // Where 16 bytes of a channel wait to be put in order.
  __device__ __forceinline__ unsigned char* place_of(int number, int in, int piece) const {
    return weights + block(number) * kBlockBytes + slot_of(in) * (kPieces * 16) + piece * 16;
  }

  __device__ __forceinline__ void copy_block(int number) const {
    const int piece = lane % kPieces, row = lane / kPieces;
    const int channel = first_channel(number), column = first_column(number);
    const bool outs = layout.has_out(column, piece * Layout::kPieceItems);
    const Scalar* const from = layout.weight_of(channel + row, column) + piece * Layout::kPieceItems;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int in = row + i * kRowsAtOnce;
      const bool there = outs && (C::kIn % Layout::kStageItems == 0 || channel + in < C::kIn);
      const void* const source =
          there ? from + i * kRowsAtOnce * Layout::kInStride : static_cast<const Scalar*>(layout.args.weight);
      ptx::copy_words_once<4>(place_of(number, in, piece), source, there);
    }
  }
  // The same item by item, in few instructions.
  __device__ __forceinline__ void load_block(int number) const {
    const int channel = first_channel(number), column = first_column(number);
#pragma unroll 1
    for (int i = lane; i < Layout::kStageItems * kBlock; i += 32) {
      const int in = i / kBlock, item = i % kBlock;
      auto* const to = reinterpret_cast<Scalar*>(place_of(number, in, item / Layout::kPieceItems));
      const bool there = layout.has_out(column, item) && channel + in < C::kIn;
      to[item % Layout::kPieceItems] =
          there ? load_constant(layout.weight_of(channel + in, column) + item) : Scalar{};
    }
  }

  // Half a warp has a word's columns each; of its units, which 16 bytes of K.
  __device__ __forceinline__ int piece_of(int unit) const { return unit % 2 + unit / 2 * 4 + lane / 16 * 2; }

  __device__ __forceinline__ void order() const {
    static_for<kOwn>([&](auto i) {
      ptx::copy_wait<kOwn - 1 - decltype(i)::value>();
      __syncwarp();
      if (exists(i)) order_block(weights + block(i) * kBlockBytes);
    });
  }
  __device__ __forceinline__ void order_block(unsigned char* at) const {
    const int word = Layout::word_of(lane % 16);
    unsigned found[kUnits][Layout::kUnitItems];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < Layout::kUnitItems; ++i) {
        const int slot = slot_of(Layout::channel_of(piece_of(unit), i));
        found[unit][i] = reinterpret_cast<const unsigned*>(at)[slot * kWords + word];
      }
    }
    __syncwarp();  // what was loaded lies where others store
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int k = 0; k < Layout::kPerWord; ++k) {
        // Of two columns, lanes that store at once do not all have the first.
        const int which = Layout::kPerWord == 2 ? k ^ lane / 4 % 2 : 0;
        const int row = Layout::row_in_block(word * Layout::kPerWord + which);
        *reinterpret_cast<uint4*>(at + row * kRowBytes + (piece_of(unit) ^ row % 8) * 16) =
            Layout::unit_of(found[unit], which);
      }
    }
  }
};

}  // namespace tconv3d
