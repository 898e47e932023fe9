// The division of the work of the kernel on mma.sync (mma.cuh), and the layout of the weight that is packed
// for it (mma_pack.cuh).
//
// A K step is 32 bytes of channels: 8 words of 4 bytes, each one TF32 number or two 16-bit numbers; or half
// of that, if a group has no more (kStepWords is 8 or 4). A chunk is kSteps K steps. A block owns kColumns
// output channels of one group (a slice): kTilesN tiles of 8 columns in each of kWarpsN warps.
//
// The packed weight is [group][slice][chunk][tap][K step][warp][fragments], where the taps of a block phase
// are neighbours in the order in which the kernel uses them. Strict float32 (kHalves == 2) has the fragments
// of the high halves of all values (`Halves`), and after them those of the low halves. Two neighbouring tiles
// of columns are packed as a pair, so that a lane loads its four words of both tiles by one access. The 16
// columns of a pair alternate between its tiles two by two, so that a lane also ends up with four
// neighbouring output channels.
#pragma once

#include "operands.cuh"

namespace tconv3d {

template <class C>
struct MmaLayout {
  using Scalar = typename C::Scalar;
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(Scalar));
  static constexpr int kChunkWords = C::kStepWords * C::kSteps;
  static constexpr int kChunk = kChunkWords * kPerWord;  // channels per chunk
  static constexpr int kChunks = (C::kReduced + kChunk - 1) / kChunk;
  static constexpr int kColumns = C::kWarpsN * C::kTilesN * 8;
  static constexpr int kSlices = (C::kOuts + kColumns - 1) / kColumns;
  static constexpr int kLaneWords = C::kStepWords / 4;  // words of a lane, of one tile of columns and K step
  static constexpr int kTileWords = 32 * kLaneWords;
  static constexpr int kHalfWords =
      C::kTilesN * kTileWords;  // words of one K step of one warp, of one half of the values
  static constexpr int kStripWords = C::kHalves * kHalfWords;
  static constexpr int kTapWords = C::kSteps * C::kWarpsN * kStripWords;
  static_assert(sizeof(Scalar) <= 4, "a K step has TF32 numbers or numbers of 16 bits");
  static_assert(C::kStepWords == 8 || (C::kStepWords == 4 && C::kSteps == 1),
                "half a K step is the only one");
  static_assert(C::kHalves == 1 || (C::kHalves == 2 && sizeof(Scalar) == 4), "two halves of a float");

  static constexpr bool paired(int tile) { return tile / 2 * 2 + 1 < C::kTilesN; }

  // Returns column `place` (0 to 7) of a warp's tile, counted from the warp's first column.
  static __device__ constexpr int column(int tile, int place) {
    return paired(tile) ? tile / 2 * 16 + place / 2 * 4 + tile % 2 * 2 + place % 2 : tile * 8 + place;
  }

  // Returns where a lane's words of a tile begin, counted from the strip's first word.
  static __device__ constexpr int fragment(int tile, int lane) {
    return paired(tile) ? tile / 2 * 2 * kTileWords + lane * 2 * kLaneWords + tile % 2 * kLaneWords
                        : tile * kTileWords + lane * kLaneWords;
  }
};

}  // namespace tconv3d
