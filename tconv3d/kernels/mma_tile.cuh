// A block of the kernel on mma.sync (mma.cuh): which positions, channels, phases and taps it has, and the
// halo of x that they need.
//
// Along the innermost kUnrolled dimensions (none, w, hw or dhw) a block has all phases, and all taps are
// known at compile time. Along the others the phase is the block's, and the taps are rows: one tap along each
// of these dimensions.
//
// The halo is a box of x. Along w, where neighbouring positions q read x at a distance of kInputStepW, its
// lines are stored as kInputStepW planes, so that neighbouring positions read neighbouring slots whatever the
// stride is: that is what keeps the banks of shared memory apart.
#pragma once

#include "epilogue.cuh"
#include "mma_layout.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* packed;
  const void* bias;  // null: no bias
  void* y;
  Strides x_strides, y_strides;
  Extent x_size, y_size;
  Extent tile;      // positions q of a block
  Extent halo;      // positions of x that a block reads
  int plane, line;  // slots of a plane of a line, and of a line
  int slots;        // of the halo
  int store_lanes;  // lanes that share a line of y: a power of two, at most 32
  Divider tiles_d, tiles_h, tiles_w;
  Divider tile_h, tile_w;
  Divider halo_h, halo_w;
};

template <class C>
struct MmaTile {
  using Layout = MmaLayout<C>;
  using Scalar = typename C::Scalar;

  static constexpr bool kUnrollD = C::kUnrolled >= 3, kUnrollH = C::kUnrolled >= 2,
                        kUnrollW = C::kUnrolled >= 1;
  static constexpr int kBlockPhasesD = kUnrollD ? 1 : C::kPhasesD;
  static constexpr int kBlockPhasesH = kUnrollH ? 1 : C::kPhasesH;
  static constexpr int kBlockPhasesW = kUnrollW ? 1 : C::kPhasesW;
  static constexpr int kBlockPhases = kBlockPhasesD * kBlockPhasesH * kBlockPhasesW;
  static constexpr int kPositions = C::kWarpsM * C::kTilesM * 16;

  // A slot has a chunk of channels of a position. Its length is an odd number of times 16 bytes, so that rows
  // of 8 neighbouring slots lie in different banks.
  static constexpr int kSlotBytes = 4 * Layout::kChunkWords + 16;
  static_assert(kSlotBytes / 16 % 2 == 1, "an odd number of 16 bytes");

  const Args& args;
  int n, group, slice;
  int first_d, first_h, first_w;  // position q that the tile begins with
  int phase_d, phase_h, phase_w;  // the block's, along dimensions that are not unrolled
  int rows_d, rows_h, rows_w, rows;
  int first_tap;       // of the block's taps among the packed ones
  int x_d, x_h, x_w;   // position of x that the halo begins with; may be outside of x
  long long x_origin;  // its offset, of the group's first channel

  __device__ __forceinline__ explicit MmaTile(const Args& args) : args(args) {
    int block = blockIdx.x;
    const int phase = block % kBlockPhases;
    block /= kBlockPhases;
    slice = block % Layout::kSlices;
    block /= Layout::kSlices;
    group = block % C::kGroups;
    block /= C::kGroups;
    const int rest_w = divide(block, args.tiles_w), rest_h = divide(rest_w, args.tiles_h);
    n = divide(rest_h, args.tiles_d);
    first_w = (block - rest_w * static_cast<int>(args.tiles_w.divisor)) * args.tile.w;
    first_h = (rest_w - rest_h * static_cast<int>(args.tiles_h.divisor)) * args.tile.h;
    first_d = (rest_h - n * static_cast<int>(args.tiles_d.divisor)) * args.tile.d;

    phase_w = phase % kBlockPhasesW;
    phase_h = phase / kBlockPhasesW % kBlockPhasesH;
    phase_d = phase / (kBlockPhasesW * kBlockPhasesH);
    rows_d = kUnrollD ? 1 : C::kCountD(phase_d);
    rows_h = kUnrollH ? 1 : C::kCountH(phase_h);
    rows_w = kUnrollW ? 1 : C::kCountW(phase_w);
    rows = rows_d * rows_h * rows_w;
    first_tap = C::kFirstPacked(phase);

    x_d = first_d * C::kInputStepD + least_d();
    x_h = first_h * C::kInputStepH + least_h();
    x_w = first_w * C::kInputStepW + least_w();
    x_origin = n * args.x_strides.n + static_cast<long long>(group) * C::kReduced * args.x_strides.c +
               x_d * args.x_strides.d + x_h * args.x_strides.h + x_w * args.x_strides.w;
  }

  // The least offset from a position to what its taps read.
  static __device__ __forceinline__ int least(int first, int count, int step) {
    return step < 0 && count > 0 ? first + (count - 1) * step : first;
  }
  __device__ __forceinline__ int least_d() const {
    return kUnrollD ? C::kLeastLoadD : least(C::kFirstOffsetD(phase_d), rows_d, C::kOffsetStepD);
  }
  __device__ __forceinline__ int least_h() const {
    return kUnrollH ? C::kLeastLoadH : least(C::kFirstOffsetH(phase_h), rows_h, C::kOffsetStepH);
  }
  __device__ __forceinline__ int least_w() const {
    return kUnrollW ? C::kLeastLoadW : least(C::kFirstOffsetW(phase_w), rows_w, C::kOffsetStepW);
  }

  // The place of position (d, h, w) of the halo, in bytes from its beginning.
  __device__ __forceinline__ int slot(int d, int h, int w) const {
    return ((d * args.halo.h + h) * args.line + w % C::kInputStepW * args.plane + w / C::kInputStepW) *
           kSlotBytes;
  }

  // Where a load of a row of taps lies for the tile's first position.
  __device__ __forceinline__ int load_offset(int row, int load) const {
    const int row_w = rows_w == 1 ? 0 : row % rows_w, rest = rows_w == 1 ? row : row / rows_w;
    const int row_h = rest % rows_h, row_d = rest / rows_h;
    const int d = kUnrollD ? C::kLoadD(load) : C::kFirstOffsetD(phase_d) + row_d * C::kOffsetStepD;
    const int h = kUnrollH ? C::kLoadH(load) : C::kFirstOffsetH(phase_h) + row_h * C::kOffsetStepH;
    const int w = kUnrollW ? C::kLoadW(load) : C::kFirstOffsetW(phase_w) + row_w * C::kOffsetStepW;
    return slot(d - least_d(), h - least_h(), w - least_w());
  }

  // A position of the tile by its number; of numbers that the tile has not, the first position.
  struct Position {
    int d, h, w;
    bool exists;
  };
  __device__ __forceinline__ Position position(int number) const {
    const int line = divide(number, args.tile_w), sheet = divide(line, args.tile_h);
    if (sheet >= args.tile.d) return {0, 0, 0, false};
    return {sheet, line - sheet * args.tile.h, number - line * args.tile.w, true};
  }
  // What a position of the tile reads begins here, in bytes from the halo's beginning.
  __device__ __forceinline__ int base(int number) const {
    const Position at = position(number);
    return ((at.d * C::kInputStepD * args.halo.h + at.h * C::kInputStepH) * args.line + at.w) * kSlotBytes;
  }

  // The output of phase f at a position of the tile, and whether there is one.
  struct Output {
    int d, h, w;
    bool exists;
  };
  __device__ __forceinline__ Output output(const Position& at, int f) const {
    const int d = (first_d + at.d) * C::kOutputStepD + (kUnrollD ? C::kPhaseD(f) : phase_d);
    const int h = (first_h + at.h) * C::kOutputStepH + (kUnrollH ? C::kPhaseH(f) : phase_h);
    const int w = (first_w + at.w) * C::kOutputStepW + (kUnrollW ? C::kPhaseW(f) : phase_w);
    return {d, h, w, at.exists && d < args.y_size.d && h < args.y_size.h && w < args.y_size.w};
  }
};

}  // namespace tconv3d
