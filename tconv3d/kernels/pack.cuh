// Packs a weight for the halo kernel: every panel in the order in which tensor cores consume it, rounded to
// the operand type, swizzled, zero where there is no channel. A thread has 16 bytes of input
// channels of one output channel and goes through the taps: they are neighbours in the weight, so that every
// sector it reads serves it several times. The layout is in halo_layout.cuh.
#pragma once

#include "halo_layout.cuh"

namespace tconv3d {

struct Args {
  const void* weight;
  void* packed;
  Strides stride;        // of the weight: n is the reduced channel's, c the computed one's, then the taps'
  long long group, tap;  // from group to group; of tap 0 (the input gradient takes the taps in reverse)
};

template <class Config>
__device__ void run(const Args& args) {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  constexpr int kLines = Layout::kRows / Config::kOutTile;  // (source, pattern, shift, field) in a row
  int rest = static_cast<int>(blockIdx.x * Config::kThreads + threadIdx.x);
  const int piece = rest % Layout::kPartPieces;
  rest /= Layout::kPartPieces;
  const int column = rest % Config::kOutTile;
  rest /= Config::kOutTile;
  const int chunk = rest % Layout::kChunks, tile = rest / Layout::kChunks;
  if (tile >= Layout::kColumnTiles) return;

  const int out = Layout::first_out(tile) + column;
  const auto channels = Layout::channels(chunk, piece);
  const int group = Layout::first_group(tile) + channels.group;
  const Scalar* weights = static_cast<const Scalar*>(args.weight) + args.tap + group * args.group +
                          channels.first * args.stride.n + out * args.stride.c;
  unsigned char* panels =
      static_cast<unsigned char*>(args.packed) + static_cast<long long>(tile) * Layout::kTileBytes;
  const int first_tap = tile % Config::kVariants * Config::kShiftRange(Config::kSources * Config::kPatterns);

  const int share = (kLines + static_cast<int>(gridDim.y) - 1) / static_cast<int>(gridDim.y);
  const int first_line = static_cast<int>(blockIdx.y) * share;
  const int end_line = first_line + share < kLines ? first_line + share : kLines;
#pragma unroll 4
  for (int line = first_line; line < end_line; ++line) {
    int source = 0, shift = 0, field = 0, row = line * Config::kOutTile + column;
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
    const int tap = Config::kTap(first_tap + shift, field);
    Piece<Scalar> values;
    if (tap >= 0 && out < Config::kOut) {
      const int kw = tap % Config::kKernelW, kh = tap / Config::kKernelW % Config::kKernelH;
      const int kd = tap / Config::kKernelW / Config::kKernelH;
      const Scalar* first = weights + kd * args.stride.d + kh * args.stride.h + kw * args.stride.w;
#pragma unroll
      for (int i = 0; i < Layout::kPieceItems; ++i) {
        if (i < channels.count) values.set(i, load_constant(first + i * args.stride.n));
      }
    }
    const int at = Layout::chunk_start(source, chunk) + row * Layout::kPartBytes + piece * 16;
    *reinterpret_cast<uint4*>(panels + Layout::template swizzle<Layout::kPartPieces>(at)) = values.vector();
  }
}

}  // namespace tconv3d
