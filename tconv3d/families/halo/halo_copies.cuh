// How the halo kernel's loaders bring rows of channels to a stage past the registers: by asynchronous copies
// (cp.async) of 16 bytes of a position.
//
// All copies of a stage are in flight at once and take no registers for their data, so that a few warps
// suffice and consumers get the registers. The copied data are operands as tensor cores take them (kOperands:
// 16-bit types, or a tensor that the previous launch has rounded), or float32 values. Loaders round float32
// values in shared memory after they have arrived; with Input::kInRegisters consumers round them on the way
// to the matrix instructions.
//
// In one turn, a warp takes 32 rows, and kLanes neighbouring lanes copy one row. The source of a row is
// looked up in a table; its target is a constant of the lane plus an offset that is the same for all lanes.
#pragma once

#include "halo_shared.cuh"
#include "halo_tile.cuh"

namespace tconv3d {

template <class Config>
struct HaloCopies {
  using Choices = HaloChoices<Config>;
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;
  using Offset = typename Tile::Offset;

  static constexpr int kShares = 1, kTurns = 1, kRows = 32;
  // kLanes lanes copy a row, and a warp copies kAtOnce rows by one instruction.
  static constexpr int kLanes = Layout::kRowPieces, kAtOnce = 32 / kLanes;
  static_assert(Layout::kDense || !Choices::kCopiesRows, "slots of a row are neighbouring channels");
  static_assert(Config::kStageRows % kRows == 0 || !Choices::kCopiesRows, "whole turns");

  // The source of a row of the halo.
  struct Source {
    unsigned pieces;  // offset in pieces of 16 bytes from the tile's first plane and channel
    int parts;        // number of parts inside the input, counted from the first
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
    if constexpr (Config::kDivision == Division::kLastTiles) {
      if (args.step_rows > 0) return find_row_of_run(args, at, row);
    }
    const auto in = Tile::row_place(args, row + at.start);
    const int w = in.w, line = in.line, item = in.item;
    const int sheet = divide(line, args.halo_h), h = line - sheet * args.halo.h;
    const int n = at.n + (Config::kMarch ? item + sheet : item);
    // Origins are indexed by variant or by source: a build has several variants or several sources, never
    // both.
    const int origin = at.variant() + source;
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

  // A lane's targets in a turn, relative to the turn's first row: start[0] for copies with an even number and
  // start[1] for odd ones, since the swizzle repeats after 8 rows.
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
    // Returns the offset of the lane's target in copy i, in bytes from the turn's first row.
    __device__ __forceinline__ unsigned to(int i) const {
      return start[i % 2] + i / 2 * (2 * kAtOnce * Config::kRowBytes);
    }
  };
  static_assert(2 * kAtOnce * Config::kRowBytes % 1024 == 0, "the swizzle repeats");

  // Copies a turn's rows. `x` points at the plane and the chunk; `stage` is an address in shared memory.
  static __device__ __forceinline__ void copy(const Args& args, const unsigned char* x, int chunk,
                                              unsigned stage, unsigned turn, const Lane& own, int lane) {
    static_assert(Config::kVectorInput, "a piece is whole or empty, and aligned");
    const bool exists = Layout::kWholeParts || Layout::channels(chunk, own.in_part).count > 0;
    // kUsedParts stands for a part outside the input.
    const int part = exists ? own.part : Config::kUsedParts;
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

  // Rounds the values that this lane has copied to operands, in place.
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
