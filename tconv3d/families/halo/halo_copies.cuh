// How the halo kernel's loaders bring rows of channels to a stage past the registers: 16 bytes of a position
// at a time, by asynchronous copies.
//
// All copies of a stage are on their way at once, without a register for what they bring, so that a few warps
// suffice and consumers have the registers. What is copied are operands (kOperands: 16-bit types, or a
// tensor that the launch before this has rounded), or floats, which are rounded where they have arrived, or
// by consumers on their way to the instructions (kInRegisters).
//
// In a turn, a warp takes 32 rows, and kLanes neighbouring lanes one of them. Where a row comes from is
// looked up; where it goes to follows from the lane but for a number that is the same for all.
#pragma once

#include "halo_shared.cuh"
#include "halo_tile.cuh"

namespace tconv3d {

template <class Config>
struct HaloCopies {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;
  using Offset = typename Tile::Offset;

  static constexpr int kShares = 1, kTurns = 1, kRows = 32;
  static constexpr int kLanes = Layout::kRowPieces, kAtOnce = 32 / kLanes;  // rows of a copy
  static_assert(Layout::kDense || !Config::kCopied, "slots of a row are neighbouring channels");
  static_assert(Config::kStageRows % kRows == 0 || !Config::kCopied, "whole turns");

  // Where a row of the halo comes from.
  struct Source {
    unsigned pieces;  // of 16 bytes, from the tile's first plane and channel
    int parts;        // that are inside: those from the first on
  };
  static __device__ __forceinline__ Source* table() {
    return reinterpret_cast<Source*>(dynamic_shared<unsigned char>() + HaloShared<Config>::kTableStart);
  }
  static __device__ __forceinline__ int turns(const Args& args) { return (args.rows + kRows - 1) / kRows; }

  static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn, int,
                                              int lane) {
    table()[turn * kRows + lane] = find_row(args, at, source, turn * kRows + lane);
  }
  static __device__ __forceinline__ Source find_row(const Args& args, const Place& at, int source, int row) {
    if constexpr (Config::kSpread) {
      if (args.step_rows > 0) return find_row_of_run(args, at, row);
    }
    const auto in = Tile::row_place(args, row + at.start);
    const int w = in.w, line = in.line, item = in.item;
    const int sheet = divide(line, args.halo_h), h = line - sheet * args.halo.h;
    const int n = at.n + (Config::kMarch ? item + sheet : item);
    const int origin = at.variant() + source;  // either has more than one
    const int x_d = Config::kMarch ? 0
                                   : (at.d + Config::kOrigin(origin, 0) + sheet) * Config::kReadStepD +
                                         Config::kReadPhase(source, 0);
    const int x_h =
        (at.h + Config::kOrigin(origin, 1) + h) * Config::kReadStepH + Config::kReadPhase(source, 1);
    const int x_w =
        (at.w + Config::kOrigin(origin, 2) + w) * Config::kReadStepW + Config::kReadPhase(source, 2);
    const bool read = !Config::kOwnShifts || (sheet < args.tile.d + Config::kSpan(at.variant(), 0) &&
                                              h < args.tile.h + Config::kSpan(at.variant(), 1) &&
                                              w < args.tile.w + Config::kSpan(at.variant(), 2));
    const bool inside = read && row < args.rows && n < args.batch && Tile::inside(x_d, args.input.d) &&
                        Tile::inside(x_h, args.input.h) && Tile::inside(x_w, args.input.w);
    const long long offset = n * args.x_stride.n + static_cast<Offset>(x_d) * args.x_stride.d +
                             static_cast<Offset>(x_h) * args.x_stride.h +
                             static_cast<Offset>(x_w) * args.x_stride.w;
    const int left = args.input.w - x_w;
    Source found{0, 0};
    if (inside) {
      found.pieces = static_cast<unsigned>(offset / Layout::kPieceItems);
      found.parts = left < Config::kUsedParts ? left : Config::kUsedParts;
    }
    return found;
  }

  static __device__ __forceinline__ Source find_row_of_run(const Args& args, const Place& at, int row) {
    const auto from = Tile::run_input(args, at, row);
    if (!from.inside) return {0, 0};
    const long long offset = at.n * args.x_stride.n + static_cast<Offset>(from.d) * args.x_stride.d +
                             static_cast<Offset>(from.h) * args.x_stride.h +
                             static_cast<Offset>(from.w) * args.x_stride.w;
    return {static_cast<unsigned>(offset / Layout::kPieceItems), 1};
  }

  // A lane's place in the rows of a copy: where its piece goes in a turn, from the turn's first row on, for
  // even and odd copies: the swizzle repeats after 8 rows.
  struct Lane {
    int part, in_part;
    unsigned start[2];
    static __device__ __forceinline__ Lane of(int lane) {
      const int piece = lane % kLanes, row = lane / kLanes;
      Lane found;
      found.part = piece / Layout::kPartPieces;
      found.in_part = piece % Layout::kPartPieces;
      for (int i = 0; i < 2; ++i) {
        const int first = (row + i * kAtOnce) * Config::kRowBytes;
        found.start[i] = (Layout::template swizzle<Layout::kRowPieces>(first) ^ 16 * piece);
      }
      return found;
    }
    // Of copy i.
    __device__ __forceinline__ unsigned to(int i) const {
      return start[i % 2] + i / 2 * (2 * kAtOnce * Config::kRowBytes);
    }
  };
  static_assert(2 * kAtOnce * Config::kRowBytes % 1024 == 0, "the swizzle repeats");

  // `x`: the plane and the chunk; `stage`: its place in shared memory.
  static __device__ __forceinline__ void copy(const Args& args, const unsigned char* x, int chunk,
                                              unsigned stage, unsigned turn, const Lane& own, int lane) {
    static_assert(Config::kVectorInput, "a piece is whole or empty, and aligned");
    const bool exists = Layout::kWholeParts || Layout::channels(chunk, own.in_part).count > 0;
    const int part = exists ? own.part : Config::kUsedParts;  // one that is not inside
    if constexpr (Config::kParts > 1) x += own.part * args.x_stride.w * static_cast<int>(sizeof(Scalar));
    x += 16 * own.in_part;
    const Source* from = table() + turn * kRows + lane / kLanes;
    const unsigned to = stage + turn * (kRows * Config::kRowBytes);
    Source sources[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) sources[i] = from[i * kAtOnce];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const bool inside = part < sources[i].parts;
      ptx::copy_piece(to + own.to(i), x + 16ull * sources[i].pieces, inside);
    }
  }

  // Rounds what this lane has copied.
  static __device__ __forceinline__ void round(unsigned stage, unsigned turn, const Lane& own) {
    const unsigned to = stage + turn * (kRows * Config::kRowBytes);
    uint4 words[kLanes];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) words[i] = ptx::load_shared(to + own.to(i));
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      words[i].x = Layout::operand(ptx::bits_to_float(words[i].x), 0);
      words[i].y = Layout::operand(ptx::bits_to_float(words[i].y), 0);
      words[i].z = Layout::operand(ptx::bits_to_float(words[i].z), 0);
      words[i].w = Layout::operand(ptx::bits_to_float(words[i].w), 0);
      ptx::store_shared(to + own.to(i), words[i]);
    }
  }
};

}  // namespace tconv3d
