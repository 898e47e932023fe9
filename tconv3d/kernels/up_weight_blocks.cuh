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
  static constexpr int kCopies = Layout::kStageItems * kPieces / 32;
  static constexpr int kWords = kBlock / Layout::kPerWord;  // columns, or pairs of them
  static constexpr int kUnits = kWords * 8 / 32;            // of a lane: 16 bytes of K of a word's columns

  static_assert(kPieces == 4 && kWords == 16, "64 bytes of a channel");

  const Layout& layout;
  unsigned char* weights;
  int warp, lane;  // of those that share the work

  // Blocks of the first chunks first.
  __device__ __forceinline__ unsigned char* block_at(int i) const {
    return weights + (warp + i * kWarps) * kBlockBytes;
  }
  static __device__ __forceinline__ bool exists(int block) {
    return kBlocks % kWarps == 0 || block < kBlocks;
  }

  // Where a channel's items wait to be put in order: those of one load, by half a warp each, lie in banks of
  // their own.
  static __device__ __forceinline__ int slot_of(int channel) {
    return Layout::kPerWord == 2 ? channel ^ channel / 2 % 2 : channel;
  }

  // Of its blocks, those from one on and before another.
  template <int kFrom, int kTo>
  __device__ __forceinline__ void copy() const {
    const bool aligned = reinterpret_cast<unsigned long long>(layout.args.weight) % 16 == 0;
    static_for<kTo - kFrom>([&](auto later) {
      constexpr int i = kFrom + decltype(later)::value;
      const int block = warp + i * kWarps;
      if (exists(block)) copy_block(block / kInRow, block % kInRow * kBlock, block_at(i), aligned);
      ptx::copy_commit();
    });
  }
  // A weight may begin anywhere among other parameters.
  __device__ __forceinline__ void copy_block(int chunk, int column, unsigned char* to, bool aligned) const {
    const int piece = lane % kPieces, first = lane / kPieces;
    const Scalar* const from =
        layout.weight_block(chunk * Layout::kStageItems + first, column) + piece * Layout::kPieceItems;
    const bool channels = layout.has_out(column, piece);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int in = first + i * (32 / kPieces);
      const bool there =
          channels && (C::kIn % Layout::kStageItems == 0 || chunk * Layout::kStageItems + in < C::kIn);
      const Scalar* const source = there ? from + i * (32 / kPieces) * Layout::kInStride
                                         : static_cast<const Scalar*>(layout.args.weight);
      Scalar* const target =
          reinterpret_cast<Scalar*>(to + slot_of(in) * (kPieces * 16)) + piece * Layout::kPieceItems;
      if (aligned) {
        ptx::copy_words_once<4>(target, source, there);
      } else {
#pragma unroll
        for (int k = 0; k < Layout::kPieceItems; ++k)
          target[k] = there ? load_constant(source + k) : Scalar{};
      }
    }
  }

  // Half a warp has a word's columns each; of its units, which 16 bytes of K.
  __device__ __forceinline__ int piece_of(int unit) const { return unit % 2 + unit / 2 * 4 + lane / 16 * 2; }

  __device__ __forceinline__ void order() const {
    static_for<kOwn>([&](auto i) {
      ptx::copy_wait<kOwn - 1 - decltype(i)::value>();
      __syncwarp();
      if (exists(warp + i * kWarps)) order_block(block_at(i));
    });
  }
  __device__ __forceinline__ void order_block(unsigned char* block) const {
    const int word = Layout::word_of(lane % 16);
    unsigned found[kUnits][Layout::kUnitItems];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < Layout::kUnitItems; ++i) {
        const int slot = slot_of(Layout::channel_of(piece_of(unit), i));
        found[unit][i] = reinterpret_cast<const unsigned*>(block)[slot * kWords + word];
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
        *reinterpret_cast<uint4*>(block + row * kRowBytes + (piece_of(unit) ^ row % 8) * 16) =
            Layout::unit_of(found[unit], which);
      }
    }
  }
};

}  // namespace tconv3d
