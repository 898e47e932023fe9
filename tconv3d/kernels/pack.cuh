// Packs a weight for the halo kernel: every panel in the order in which tensor cores consume it, rounded to
// the operand type, swizzled, zero where there is no channel. The layout is in halo_layout.cuh.
//
// In the weight, taps are neighbours; in a panel, input channels are. So a block takes a chunk of input
// channels and kColumns output channels with all their taps: it reads them tap by tap into shared memory, and
// writes them channel by channel, for every variant and panel that wants them.
#pragma once

#include "halo_layout.cuh"

namespace tconv3d {

struct Args {
  const void* weight;
  void* packed;
  Strides stride;        // of the weight: n is the reduced channel's, c the computed one's, then the taps'
  long long group, tap;  // from group to group; of tap 0 (the input gradient may take the taps in reverse)
};

template <class Config>
struct Pack {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  static constexpr int kTaps = Config::kKernelD * Config::kKernelH * Config::kKernelW;
  static constexpr int kColumns = Config::kColumnsAtOnce;
  static constexpr int kPitch = Layout::kPartItems + 1;  // of a tap: neither writing nor reading meets itself
  static constexpr int kLines = Layout::kRows / Config::kOutTile;  // (source, pattern, shift, field) in a row
  static constexpr int kShifts = Config::kShiftRange(Config::kSources * Config::kPatterns);
  static_assert(Config::kOutTile % kColumns == 0, "whole parts of a column tile");
  static_assert(Config::kSharedBytes >= 4 * kColumns * kTaps * kPitch, "room for the taps");

  const Args& args;
  unsigned* staged;  // [column][tap][input channel, of the part's]
  int tile, chunk, first_column;

  __device__ __forceinline__ void stage() {
    constexpr int kItems = kTaps * kColumns * Layout::kPartItems;
#pragma unroll 8
    for (int i = threadIdx.x; i < kItems; i += Config::kThreads) {
      const int tap = i % kTaps, column = i / kTaps % kColumns, slot = i / (kTaps * kColumns);
      const auto channels = Layout::channels(chunk, slot / Layout::kPieceItems);
      const int item = slot % Layout::kPieceItems, out = Layout::first_out(tile) + first_column + column;
      const int kw = tap % Config::kKernelW, kh = tap / Config::kKernelW % Config::kKernelH;
      const int kd = tap / Config::kKernelW / Config::kKernelH;
      unsigned bits = 0;
      if (item < channels.count && out < Config::kOut) {
        const Scalar* from = static_cast<const Scalar*>(args.weight) + args.tap +
                             (Layout::first_group(tile) + channels.group) * args.group +
                             (channels.first + item) * args.stride.n + out * args.stride.c +
                             kd * args.stride.d + kh * args.stride.h + kw * args.stride.w;
        bits = OperandOf<Scalar>::bits(load_constant(from));
      }
      staged[(column * kTaps + tap) * kPitch + slot] = bits;
    }
  }

  // A line of panel rows: which tap a field of it has, and where it lies in the panels of the column tile.
  struct Line {
    int tap, row, start;
  };
  __device__ __forceinline__ Line line_of(int variant, int line) const {
    int source = 0, shift = 0, field = 0, row = line * Config::kOutTile;
    if constexpr (Config::kSources == 1) {
#pragma unroll
      for (int p = 0; p < Config::kPatterns; ++p) {
        const int fields = Layout::panel_rows(p) / Config::kOutTile;
        const int local = line - Layout::rows_before(0, p) / Config::kOutTile;
        if (local >= 0 && local < fields * Layout::shifts(0, p)) {
          shift = Layout::first_shift(0, p) + local / fields;
          field = local % fields;
        }
      }
    } else {
      constexpr int kPanelFields = Layout::panel_rows(0) / Config::kOutTile;
      shift = line / kPanelFields;
      field = line % kPanelFields;
      while (shift >= Layout::first_shift(source + 1, 0)) ++source;
      row -= Layout::first_shift(source, 0) * Layout::panel_rows(0);
    }
    return {Config::kTap(variant * kShifts + shift, field), row, Layout::chunk_start(source, chunk)};
  }

  __device__ __forceinline__ void write() const {
    constexpr int kPieces = Config::kVariants * kLines * kColumns * Layout::kPartPieces;
    for (int i = threadIdx.x; i < kPieces; i += Config::kThreads) {
      const int piece = i % Layout::kPartPieces, column = i / Layout::kPartPieces % kColumns;
      const int rest = i / (Layout::kPartPieces * kColumns), variant = rest / kLines;
      const Line line = line_of(variant, rest % kLines);
      Piece<Scalar> values;
      if (line.tap >= 0) {
        const unsigned* from = staged + (column * kTaps + line.tap) * kPitch + piece * Layout::kPieceItems;
#pragma unroll
        for (int k = 0; k < Layout::kPieceItems; ++k) values.set_bits(k, from[k]);
      }
      const int at = line.start + (line.row + first_column + column) * Layout::kPartBytes + piece * 16;
      unsigned char* panels = static_cast<unsigned char*>(args.packed) +
                              static_cast<long long>(tile + variant) * Layout::kTileBytes;
      *reinterpret_cast<uint4*>(panels + Layout::template swizzle<Layout::kPartPieces>(at)) = values.vector();
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Layout = HaloLayout<Config>;
  constexpr int kParts = Config::kOutTile / Config::kColumnsAtOnce;
  const int block = static_cast<int>(blockIdx.x), rest = block / kParts;
  Pack<Config> pack{args, dynamic_shared<unsigned>(), rest / Layout::kChunks * Config::kVariants,
                    rest % Layout::kChunks, block % kParts * Config::kColumnsAtOnce};
  pack.stage();
  __syncthreads();
  pack.write();
}

}  // namespace tconv3d
