// What the halo kernel and the kernel that packs its weights agree on: names of the pieces, and where a
// weight lies.
//
// Per dimension, output stride*q + phase gathers x[q - shift(tap)]. All phases of a position q are computed
// together, so a shift (in three dimensions) is one displacement of the input that feeds certain phases.
// The input gradient is the same loop the other way round: position q gathers dy[phase][q + shift(tap)] from
// all phase planes of dy. The words:
//
// - field: the output channels of one phase, kOutTile neighbouring columns of the accumulators
// - unit: the neighbouring fields that one matrix instruction computes
// - source: what a halo is loaded from. The forward pass has one, x; the input gradient has the phase planes
//   along d and h of dy, one after the other, each with shifts of its own
// - part: the phases along w of a source lie side by side in a row, so that a load uses whole sectors. The
//   forward pass has one part
// - panel: the weights of one shift, kPartBytes of input channels for every column of the units it feeds
// - pattern: the shifts that feed the same units, one loop
// - chunk: as many input channels as a part holds. K is walked chunk by chunk, 32 bytes (a step) at a time
// - half: strict float32 (kHalves == 2) multiplies by three products of TF32 numbers. A value is the sum of a
//   high and a low half, each a TF32 number, and
//     x*w = low(x)*high(w) + high(x)*low(w) + high(x)*high(w)
//   So a stage has the rows of the high halves and then those of the low ones, and so has a panel
// - variant: phases computed by column tiles of their own. If they differ in more than where they read and
//   write, each variant has its own shifts (kOwnShifts), and the table room for as many as any has
// - column tile: one group (or several small ones) with kOutTile of its output channels, in one variant
//
// Packed weights: [column tile][source][chunk][pattern, shift in it][half][unit, field, channel: a
// row][kPartBytes, swizzled], in the order of consumption, so that a panel is one linear copy. Several small
// groups in one tile share the rows: each has its own steps of the part. With kInRegisters the channels of a
// row are in the order in which lanes have them (pack.cuh).
#pragma once

#include "operands.cuh"

namespace tconv3d {

template <class Config>
struct HaloLayout {
  using Scalar = typename Config::Scalar;
  static constexpr int kItemBytes = sizeof(Scalar);
  static constexpr int kPieceItems = 16 / kItemBytes;  // a piece: the 16 bytes that a swizzle moves as one
  static constexpr int kRowPieces = Config::kRowBytes / 16;
  static constexpr int kPartBytes = Config::kRowBytes / Config::kParts;
  static constexpr int kPartItems = kPartBytes / kItemBytes;
  static constexpr int kPartPieces = kPartBytes / 16;
  static constexpr int kStepItems = 32 / kItemBytes;
  static constexpr int kSlots =
      Config::kGroupsPerTile > 1 ? Config::kGroupsPerTile * Config::kGroupSlots : Config::kIn;
  static constexpr int kChunks = (kSlots + kPartItems - 1) / kPartItems;
  static constexpr int kColumnTiles =
      Config::kGroups / Config::kGroupsPerTile * Config::kOutTiles * Config::kVariants;
  static constexpr int kGroupColumns = Config::kFields * Config::kOutTile;
  static constexpr int kColumns = Config::kGroupsPerTile * kGroupColumns;

  static_assert(kItemBytes == 4 || kItemBytes == 2, "TF32 or 16-bit operands");
  static_assert(Config::kHalves == 1 || (Config::kHalves == 2 && kItemBytes == 4), "two halves of a float");
  static_assert(Config::kRowBytes == 128 || Config::kRowBytes == 64 || Config::kRowBytes == 32,
                "swizzled rows");
  static_assert(kPartBytes == 128 || kPartBytes == 64 || kPartBytes == 32, "swizzled panels");
  static_assert(Config::kSources == 1 || (Config::kPatterns == 1 && Config::kVariants == 1),
                "sources have their own shifts, and one pattern");
  static_assert(Config::kOutTile % 8 == 0, "a matrix instruction has a multiple of 8 columns");
  static_assert(Config::kLaneChannels >= 1 && (Config::kLaneChannels & (Config::kLaneChannels - 1)) == 0 &&
                    (Config::kLaneChannels <= 2 || Config::kOut % Config::kLaneChannels == 0),
                "whole vectors of a lane's channels");
  static_assert(kColumns <= 256, "accumulators of one slab");
  static_assert(Config::kGroups % Config::kGroupsPerTile == 0, "every tile has as many groups");
  static_assert(Config::kGroupsPerTile == 1 || (Config::kGroupSlots % kStepItems == 0 && kChunks == 1),
                "small groups have whole steps of one row");

  static constexpr int kUnitColumns = Config::kUnitFields * Config::kOutTile;
  static_assert(Config::kFields % Config::kUnitFields == 0 && kUnitColumns <= 256,
                "columns of an instruction");

  // Which column of a field an output channel is. Of every 8 columns a lane of the accumulators has two. So
  // that these are neighbours in memory where channels are (kLaneChannels > 2), the channels of a block of
  // columns are dealt out to the lanes in turn: so many neighbours to each. Blocks are as large as still fit
  // the field. Or (1) a lane has every fourth channel, as images of long runs want it (halo_joint.cuh).
  // So many of them a lane has of the block from this column on.
  static __device__ constexpr int block_channels(int first) {
    int own = Config::kLaneChannels;
    while (4 * own > Config::kOutTile - first) own /= 2;
    return own;
  }
  // A loop over sizes, not over blocks: the compiler knows its end, and a lane's channels are constants but
  // for the lane.
  static __device__ constexpr int block_start(int column) {
    int first = 0;
    for (int own = Config::kLaneChannels; own > 2; own /= 2) {
      const int size = 4 * own, end = first + (Config::kOutTile - first) / size * size;
      if (column < end) return column - (column - first) % size;
      first = end;
    }
    return column - (column - first) % 8;
  }
  static __device__ constexpr int column_of(int channel) {
    if (Config::kLaneChannels == 1) return channel / 8 * 8 + channel % 4 * 2 + channel / 4 % 2;
    if (Config::kLaneChannels == 2) return channel;
    const int first = block_start(channel), own = block_channels(first), place = channel - first;
    return first + place % own / 2 * 8 + place / own * 2 + place % 2;
  }
  // The channel of a lane's column 8 * j + 2 * (lane % 4) + e.
  static __device__ __forceinline__ int channel_of(int j, int e, int lane) {
    if constexpr (Config::kLaneChannels == 1) return 8 * j + 4 * e + lane % 4;
    const int first = block_start(8 * j), own = block_channels(first);
    return first + lane % 4 * own + (8 * j - first) / 4 + e;
  }

  static __device__ constexpr int units(int pattern) {
    return Config::kPatternUnit(pattern + 1) - Config::kPatternUnit(pattern);
  }
  static __device__ constexpr int half_rows(int pattern) { return units(pattern) * kUnitColumns; }
  static __device__ constexpr int panel_rows(int pattern) { return Config::kHalves * half_rows(pattern); }
  static __device__ constexpr int panel_bytes(int pattern) { return panel_rows(pattern) * kPartBytes; }
  // The shifts of a pattern, in a source: from `first_shift` on.
  static __device__ constexpr int first_shift(int source, int pattern) {
    return Config::kShiftRange(source * Config::kPatterns + pattern);
  }
  static __device__ constexpr int shifts(int source, int pattern) {
    return first_shift(source, pattern + 1) - first_shift(source, pattern);
  }
  // The same of a variant, if variants have their own; and where they stand in the table.
  static __device__ __forceinline__ int own_shifts(int variant, int source, int pattern) {
    return Config::kOwnShifts ? Config::kVariantShifts(variant * Config::kPatterns + pattern)
                              : shifts(source, pattern);
  }
  static __device__ __forceinline__ int shift_entry(int variant, int shift) {
    return Config::kOwnShifts ? variant * Config::kShiftRange(Config::kPatterns) + shift : shift;
  }
  // Rows of a source's chunk that lie before a pattern's panels.
  static __device__ constexpr int rows_before(int source, int pattern) {
    int rows = 0;
    for (int p = 0; p < pattern; ++p) rows += panel_rows(p) * shifts(source, p);
    return rows;
  }
  static __device__ constexpr int chunk_rows(int source) { return rows_before(source, Config::kPatterns); }
  // Where the panels of a chunk begin in those of the column tile.
  static __device__ __forceinline__ int chunk_start(int source, int chunk) {
    const int before = Config::kSources == 1 ? 0 : kChunks * first_shift(source, 0) * panel_bytes(0);
    return before + chunk * chunk_rows(source) * kPartBytes;
  }
  static __device__ constexpr int total_rows() {
    int rows = 0;
    for (int source = 0; source < Config::kSources; ++source) rows += chunk_rows(source);
    return rows;
  }
  static constexpr int kRows = total_rows();  // of one chunk of every source
  static constexpr int kTileBytes = kChunks * kRows * kPartBytes;

  // Rows of a chunk of all variants before this one, and where the panels of a column tile begin.
  static __device__ constexpr int variant_rows(int variant) {
    if (!Config::kOwnShifts) return variant * kRows;
    int rows = 0;
    for (int v = 0; v < variant; ++v) {
      for (int p = 0; p < Config::kPatterns; ++p) {
        rows += panel_rows(p) * Config::kVariantShifts(v * Config::kPatterns + p);
      }
    }
    return rows;
  }
  static __device__ __forceinline__ long long tile_start(int column_tile) {
    const long long before = column_tile / Config::kVariants;
    constexpr int kAll = variant_rows(Config::kVariants);
    return (before * kAll + variant_rows(column_tile % Config::kVariants)) * (kChunks * kPartBytes);
  }

  // What a column tile computes; its variant is column_tile % kVariants.
  static __device__ __forceinline__ int first_group(int column_tile) {
    return column_tile / (Config::kVariants * Config::kOutTiles) * Config::kGroupsPerTile;
  }
  static __device__ __forceinline__ int first_out(int column_tile) {
    return column_tile / Config::kVariants % Config::kOutTiles * Config::kOutTile;
  }

  // Steps of a whole chunk, and of the last one.
  static constexpr int kPartSteps = kPartBytes / 32;
  static constexpr int kLastSteps = (kSlots - (kChunks - 1) * kPartItems + kStepItems - 1) / kStepItems;

  // The channels of a group that a piece of a part holds: `count` from `first` on, of the tile's group
  // `group`.
  struct Channels {
    int group, first, count;
  };
  static __device__ __forceinline__ Channels channels(int chunk, int piece) {
    const int slot = chunk * kPartItems + piece * kPieceItems;
    const int group = Config::kGroupsPerTile > 1 ? slot / Config::kGroupSlots : 0;
    const int first = slot - group * Config::kGroupSlots;
    const int left = group < Config::kGroupsPerTile ? Config::kIn - first : 0;
    return {group, first, left < 0 ? 0 : left < kPieceItems ? left : kPieceItems};
  }

  // Whether slot i of the chunks is channel i of the tile, and whether all slots are channels.
  static constexpr bool kDense = Config::kGroupsPerTile == 1 || Config::kGroupSlots == Config::kIn;
  static constexpr bool kWholeParts = kDense && kSlots % kPartItems == 0;

  // The bits that tensor cores take for a value, or for a half of it: the high one is 0.
  static __device__ __forceinline__ unsigned operand(Scalar value, int half) {
    if constexpr (Config::kHalves == 2) {
      return half == 0 ? Halves::high(value) : Halves::low(value);
    } else {
      return OperandOf<Scalar>::bits(value);
    }
  }

  // Where a byte of rows of so many pieces lies: the hardware's swizzle, a function of the address.
  template <int kPieces>
  static __device__ __forceinline__ int swizzle(int offset) {
    return offset ^ ((offset >> 7 & (kPieces - 1)) << 4);
  }
};

// 16 bytes of operands, collected one by one.
template <class Scalar>
struct Piece {
  static constexpr int kItems = 16 / sizeof(Scalar);
  unsigned words[4] = {0, 0, 0, 0};
  __device__ __forceinline__ void set_bits(int item, unsigned bits) {
    if constexpr (sizeof(Scalar) == 4) {
      words[item] = bits;
    } else {
      words[item / 2] |= bits << (16 * (item % 2));
    }
  }
  __device__ __forceinline__ uint4 vector() const {
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

}  // namespace tconv3d
