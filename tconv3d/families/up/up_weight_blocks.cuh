// Loads the weights of an up-convolution whose tensors, including the weight, are channels-last: output
// channels are contiguous.
//
// A block of columns (up_layouts.cuh) of a chunk of K takes equally many bytes in memory layout and in
// operand order. A warp therefore copies whole blocks to their place and reorders them there: it waits only
// for copies of its own.
#pragma once

#include "epilogue.cuh"
#include "operands.cuh"

namespace tconv3d {

// kThreads is the number of threads that share the work.
template <class C, class Layout, int kThreads>
struct UpWeightBlocks {
  using Scalar = typename Layout::Scalar;

  static constexpr int kWarps = kThreads / 32, kRowBytes = Layout::kRowBytes;
  static constexpr int kBlock = Layout::kBlock, kBlockBytes = kBlock * kRowBytes;
  static constexpr int kInRow = C::kColumns / kBlock;  // blocks per chunk
  static constexpr int kBlocks = Layout::kChunks * kInRow, kOwn = (kBlocks + kWarps - 1) / kWarps;
  // A block has kPieces pieces of 16 bytes of each input channel.
  static constexpr int kPieces = kBlock * Layout::kItem / 16;
  static constexpr int kRowsAtOnce = 32 / kPieces, kCopies = Layout::kStageItems / kRowsAtOnce;
  // A block has kWords words of each input channel: columns, or pairs of 16-bit columns.
  static constexpr int kWords = kBlock / Layout::kPerWord;
  static constexpr int kUnits = kWords * 8 / 32;  // units per lane, each 16 bytes of K of a word's columns

  static_assert(kPieces == 4 && kWords == 16, "64 bytes of a channel");

  const Layout& layout;
  unsigned char* weights;
  int warp, lane;  // warp: index among the warps that share the work

  // Index of the warp's i-th block; blocks of the first chunks come first.
  __device__ __forceinline__ int block(int i) const { return warp + i * kWarps; }
  __device__ __forceinline__ bool exists(int i) const { return kBlocks % kWarps == 0 || block(i) < kBlocks; }
  __device__ __forceinline__ int first_channel(int i) const {
    return block(i) / kInRow * Layout::kStageItems;
  }
  __device__ __forceinline__ int first_column(int i) const { return block(i) % kInRow * kBlock; }

  // Slot of an input channel before the reordering, chosen so that the two half warps of a load use different
  // banks.
  static __device__ __forceinline__ int slot_of(int channel) {
    return Layout::kPerWord == 2 ? channel ^ channel / 2 % 2 : channel;
  }

  // Copies the warp's blocks kFrom to kTo - 1.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void copy() const {
    // A weight may be a view into a flat buffer of parameters and have any alignment.
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

  // Address of 16 bytes of an input channel before the reordering.
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
  // Loads a block element by element, for weights that are not aligned to 16 bytes.
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

  // Piece (16 bytes of K) of a lane's unit. The 16 lanes of a half warp have the 16 words of a block; the two
  // half warps have different pieces.
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
    __syncwarp();  // all lanes have loaded before any lane overwrites the block
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int k = 0; k < Layout::kPerWord; ++k) {
        // Half of the lanes store the second column of a pair first, which avoids bank conflicts.
        const int which = Layout::kPerWord == 2 ? k ^ lane / 4 % 2 : 0;
        const int row = Layout::row_in_block(word * Layout::kPerWord + which);
        *reinterpret_cast<uint4*>(at + row * kRowBytes + (piece_of(unit) ^ row % 8) * 16) =
            Layout::unit_of(found[unit], which);
      }
    }
  }
};

}  // namespace tconv3d
