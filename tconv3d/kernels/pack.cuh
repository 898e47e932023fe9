// Packs a weight for the halo kernel: every panel in the order in which tensor cores consume it, rounded to
// the operand type, swizzled, zero where there is no channel. One thread makes one 16-byte piece. The layout
// is in halo_layout.cuh.
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
  const int index = static_cast<int>(blockIdx.x * Config::kThreads + threadIdx.x);
  const int piece = index % Layout::kRowPieces;
  const int row = index / Layout::kRowPieces % Layout::kChunkRows;
  const int chunk = index / Layout::kRowPieces / Layout::kChunkRows % Layout::kChunks;
  const int tile = index / Layout::kRowPieces / Layout::kChunkRows / Layout::kChunks;
  if (tile >= Layout::kColumnTiles) return;

  // Which shift and which of the fields it feeds: panels have the rows of their pattern.
  int shift = 0, field = 0;
#pragma unroll
  for (int p = 0; p < Config::kPatterns; ++p) {
    const int local = row - Layout::rows_before(p);
    if (local >= 0 && local < Layout::panel_rows(p) * Layout::shifts(p)) {
      shift = Config::kPatternShift(p) + local / Layout::panel_rows(p);
      field = local % Layout::panel_rows(p) / Config::kOutTile;
    }
  }
  const int tap =
      Config::kTap(tile % Config::kVariants * Config::kPatternShift(Config::kPatterns) + shift, field);
  const int out = Layout::first_out(tile) + row % Config::kOutTile;
  const auto channels = Layout::channels(chunk, piece);
  const int group = Layout::first_group(tile) + channels.group;

  Piece<Scalar> values;
  if (tap >= 0 && out < Config::kOut) {
    const int kw = tap % Config::kKernelW, kh = tap / Config::kKernelW % Config::kKernelH;
    const int kd = tap / Config::kKernelW / Config::kKernelH;
    const Scalar* source = static_cast<const Scalar*>(args.weight) + args.tap + group * args.group +
                           channels.first * args.stride.n + out * args.stride.c + kd * args.stride.d +
                           kh * args.stride.h + kw * args.stride.w;
#pragma unroll
    for (int i = 0; i < Layout::kPieceItems; ++i) {
      if (i < channels.count) values.set(i, load_constant(source + i * args.stride.n));
    }
  }
  unsigned char* panels = static_cast<unsigned char*>(args.packed) +
                          (static_cast<long long>(tile) * Layout::kChunks + chunk) * Layout::kChunkBytes;
  *reinterpret_cast<uint4*>(panels + Layout::swizzle(row * Config::kRowBytes + piece * 16)) = values.vector();
}

}  // namespace tconv3d
