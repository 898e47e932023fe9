// What the halo kernel and the kernel that packs its weights agree on: terms, and where a weight lies in the
// packed tensor.
//
// Per dimension, output stride*q + phase gathers x[q - shift(tap)]. All phases of a position q are computed
// together, so a shift (in three dimensions) is one displacement of the input that feeds certain phases. The
// input gradient is the adjoint loop: position q gathers dy[phase][q + shift(tap)] from all phase planes of
// dy. The terms:
//
// - field: the output channels of one phase, kOutTile neighbouring columns of the accumulators
// - unit: the neighbouring fields that one matrix instruction computes
// - source: the tensor part that a halo is loaded from. The forward pass has one, x; the input gradient has
//   the phase planes along d and h of dy, one after the other, each with its own shifts
// - part: the phases along w of a source lie side by side in a row, so that a load uses whole sectors. The
//   forward pass has one part
// - panel: the weights of one shift, kPartBytes of input channels for every column of the units it feeds
// - pattern: the shifts that feed the same units, one loop
// - chunk: as many input channels as a part holds. K is walked chunk by chunk, 32 bytes (a step) at a time
// - half: strict float32 (kHalves == 2) multiplies by three products of TF32 numbers. A value is the sum of a
//   high and a low half, each a TF32 number, and
//     x*w = low(x)*high(w) + high(x)*low(w) + high(x)*high(w)
//   So a stage has the rows of the high halves and then those of the low ones, and so has a panel
// - variant: phases computed by column tiles of their own. If variants differ in more than where they read
//   and write, each variant has its own shifts (kOwnShifts), and the table has room for the largest number of
//   shifts
// - column tile: one group (or several small ones) with kOutTile of its output channels, in one variant
//
// Packed weights: [column tile][source][chunk][pattern, shift in it][half][unit, field, channel: a
// row][kPartBytes, swizzled], in the order of consumption, so that a panel is one linear copy. Several small
// groups in one tile share the rows: each has its own steps of the part. With Input::kInRegisters the
// channels of a row are in the order in which lanes hold them (pack.cuh).
#pragma once

#include "operands.cuh"
#include "ptx_hopper.cuh"

namespace tconv3d {

template <class Config>
struct HaloLayout {
  using Scalar = typename Config::Scalar;
  static constexpr int kItemBytes = sizeof(Scalar);
  static constexpr int kPieceItems = 16 / kItemBytes;  // A piece is 16 bytes, the unit of a swizzle.
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

  // The output channels of a field are mapped to its columns as follows. A lane's accumulators hold two of
  // every 8 columns. For channels-last outputs (kLaneChannels > 2) each lane gets neighbouring channels of a
  // block of columns; blocks are as large as still fit the field. For kLaneChannels == 1 a lane has every
  // fourth channel, as the images of long runs need it (halo_long_runs.cuh).
  //
  // block_channels() returns how many neighbouring channels a lane has in the block that begins at column
  // `first`.
  static __device__ constexpr int block_channels(int first) {
    int own = Config::kLaneChannels;
    while (4 * own > Config::kOutTile - first) own /= 2;
    return own;
  }
  // Returns the first column of the block that holds `column`. The loop runs over block sizes, not over
  // blocks, so that the compiler knows its end and a lane's channels are constants but for the lane.
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
  // Returns the channel of a lane's column 8 * j + 2 * (lane % 4) + e.
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
  // The shifts of a pattern in a source are those from first_shift(source, pattern) to before
  // first_shift(source, pattern + 1).
  static __device__ constexpr int first_shift(int source, int pattern) {
    return Config::kShiftRange(source * Config::kPatterns + pattern);
  }
  static __device__ constexpr int shifts(int source, int pattern) {
    return first_shift(source, pattern + 1) - first_shift(source, pattern);
  }
  // Returns the number of a variant's shifts in a pattern, and the place of a shift in the table. Without
  // kOwnShifts all variants share both.
  static __device__ __forceinline__ int own_shifts(int variant, int source, int pattern) {
    return Config::kOwnShifts ? Config::kVariantShifts(variant * Config::kPatterns + pattern)
                              : shifts(source, pattern);
  }
  static __device__ __forceinline__ int shift_entry(int variant, int shift) {
    return Config::kOwnShifts ? variant * Config::kShiftRange(Config::kPatterns) + shift : shift;
  }
  // Returns the number of rows of a source's chunk that lie before a pattern's panels.
  static __device__ constexpr int rows_before(int source, int pattern) {
    int rows = 0;
    for (int p = 0; p < pattern; ++p) rows += panel_rows(p) * shifts(source, p);
    return rows;
  }
  static __device__ constexpr int chunk_rows(int source) { return rows_before(source, Config::kPatterns); }
  // Returns where the panels of a chunk begin, in bytes from the first panel of the column tile.
  static __device__ __forceinline__ int chunk_start(int source, int chunk) {
    const int before = Config::kSources == 1 ? 0 : kChunks * first_shift(source, 0) * panel_bytes(0);
    return before + chunk * chunk_rows(source) * kPartBytes;
  }
  static __device__ constexpr int total_rows() {
    int rows = 0;
    for (int source = 0; source < Config::kSources; ++source) rows += chunk_rows(source);
    return rows;
  }
  static constexpr int kRows = total_rows();  // rows of one chunk of every source
  static constexpr int kTileBytes = kChunks * kRows * kPartBytes;

  // Returns the number of rows of one chunk in all variants before this one; tile_start() returns where the
  // panels of a column tile begin, in bytes.
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

  // Return the first group and the first output channel of a column tile. The variant of a column tile is
  // column_tile % kVariants.
  static __device__ __forceinline__ int first_group(int column_tile) {
    return column_tile / (Config::kVariants * Config::kOutTiles) * Config::kGroupsPerTile;
  }
  static __device__ __forceinline__ int first_out(int column_tile) {
    return column_tile / Config::kVariants % Config::kOutTiles * Config::kOutTile;
  }

  // Number of 32-byte steps of K in a whole chunk, and in the last chunk.
  static constexpr int kPartSteps = kPartBytes / 32;
  static constexpr int kLastSteps = (kSlots - (kChunks - 1) * kPartItems + kStepItems - 1) / kStepItems;

  // The channels that a piece of a part holds: `count` channels from `first` on, in the tile's group `group`.
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

  // kDense: slot i of the chunks is channel i of the tile. kWholeParts: every slot also holds a channel.
  static constexpr bool kDense = Config::kGroupsPerTile == 1 || Config::kGroupSlots == Config::kIn;
  static constexpr bool kWholeParts = kDense && kSlots % kPartItems == 0;

  // Returns the bits that tensor cores take for a value, or for its high (0) or low (1) half.
  static __device__ __forceinline__ unsigned operand(Scalar value, int half) {
    if constexpr (Config::kHalves == 2) {
      return half == 0 ? Halves::high(value) : Halves::low(value);
    } else {
      return OperandOf<Scalar>::bits(value);
    }
  }

  // Returns where a byte of rows of kPieces pieces lies: the hardware's swizzle, a function of the address.
  template <int kPieces>
  static __device__ __forceinline__ int swizzle(int offset) {
    return offset ^ ((offset >> 7 & (kPieces - 1)) << 4);
  }
};

// 16 bytes of operands, collected element by element.
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
