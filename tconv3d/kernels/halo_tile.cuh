// The halo kernel's arguments, and what a block works at: a tile of positions and a column tile, and the
// slabs that consumers cut the tile into.
#pragma once

#include "halo_layout.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* packed;
  const void* bias;
  void* y;
  void* moments;  // null: none
  Strides x_stride, y_stride;
  Extent input, output;
  int batch;

  // The tile, chosen for this volume.
  Extent tile;       // positions per dimension (marching: output planes of depth)
  Extent halo;       // rows per dimension
  int items;         // batch items in a tile: neighbouring rows are the same position of neighbouring items
  int near_bits;     // of the number of items (at most 8) that neighbouring lanes load
  int rows;          // of the halo: the product
  int slabs;         // of 64 positions
  int sheets;        // marching: batch items whose lines follow each other
  int step_h;        // positions from tile to tile along h; runs: none,
  int step_rows;     // but rows
  int group_rows;    // from one group of 8 rows of a slab to the next
  int run;           // rows of a run that slabs along w cut into pieces: rows past its end belong to nobody
  Extent slab_step;  // rows from slab to slab
  int passes;        // of the consumers over the slabs
  int work;          // tiles times column tiles
  int vector;        // neighbouring outputs that a store takes (contiguous along w): 1, 2 or 16 bytes
  int vectors;       // of 16 bytes along w that the halo touches; none: it is loaded by positions
  Divider slabs_w, slabs_h, tiles_w, tiles_h, tiles_d, halo_w, halo_h, halo_d, by_items, by_vectors;
  Divider side_by_side;  // marching: tiles of one depth, of all batch items, in whole pairs

  long long moment_slots;  // moments of each band of channels that all tiles leave (halo_moments.cuh)
};

template <class Config>
struct HaloTile {
  using Layout = HaloLayout<Config>;
  using Offset = typename IndexType<Config::kWide>::type;  // inside one channel's volume
  static constexpr bool kPaired = Config::kClusterSize == 2;

  // One unit of work: a tile of positions and a column tile.
  struct Place {
    int column_tile;
    int n, d, h, w;  // the tile's first batch item and position (marching: d is the first output plane)
    int first_plane, planes;  // steps of the march; one if there is none
    int last_output;          // marching: one past the last output plane
    int tile;                 // its place among those of a batch item
    int start;                // of a run: its first row
    __device__ __forceinline__ int variant() const { return column_tile % Config::kVariants; }
    __device__ __forceinline__ int first_group() const { return Layout::first_group(column_tile); }
    __device__ __forceinline__ int first_out() const { return Layout::first_out(column_tile); }
  };

  static __device__ __forceinline__ Place place(const Args& args, int work) {
    Place at;
    const int unit = kPaired ? work / 2 : work, rank = kPaired ? work % 2 : 0;
    at.column_tile = unit % Layout::kColumnTiles;
    int rest = (kPaired ? 2 : 1) * (unit / Layout::kColumnTiles) + rank, d = 0;
    if constexpr (Config::kMarch) {  // the tiles of a pair have the same planes
      d = divide(rest, args.side_by_side);
      rest -= d * static_cast<int>(args.side_by_side.divisor);
    }
    int next = divide(rest, args.tiles_w);
    const int w = rest - next * static_cast<int>(args.tiles_w.divisor);
    rest = next;
    next = divide(rest, args.tiles_h);
    const int h = rest - next * static_cast<int>(args.tiles_h.divisor);
    if constexpr (!Config::kMarch) {
      rest = next;
      next = divide(rest, args.tiles_d);
      d = rest - next * static_cast<int>(args.tiles_d.divisor);
    }
    at.w = w * args.tile.w;
    at.h = h * args.step_h;
    at.start = Config::kMarch ? h * args.step_rows : 0;
    at.d = d * args.tile.d;
    at.n = next * args.items;  // past the batch: the second of a pair of which only one exists
    at.tile = static_cast<int>((d * args.tiles_h.divisor + h) * args.tiles_w.divisor) + w;
    at.first_plane = 0;
    at.planes = 1;
    at.last_output = 0;
    if constexpr (Config::kMarch) {
      // Plane i completes outputs [i*stride - padding, (i+1)*stride - padding), and feeds kWindow planes from
      // there.
      const int last = at.d + args.tile.d;
      at.last_output = last < args.output.d ? last : args.output.d;
      const int reach = at.d + Config::kPaddingD - (Config::kWindow - 1);
      at.first_plane = reach > 0 ? (reach + Config::kStrideD - 1) / Config::kStrideD : 0;
      at.planes = (at.last_output - 1 + Config::kPaddingD) / Config::kStrideD + 1 - at.first_plane;
    }
    return at;
  }

  // Planes of a march that have input; those after them only complete outputs.
  static __device__ __forceinline__ int fed_planes(const Args& args, const Place& at) {
    if constexpr (!Config::kMarch) return 1;
    const int left = args.input.d - at.first_plane;
    return left < at.planes ? (left < 0 ? 0 : left) : at.planes;
  }

  // 64 positions of a tile, the rows of one matrix instruction.
  struct Slab {
    bool exists;
    int first;  // place of its first row in the run
    int row;    // its first row in the stage
  };
  static __device__ __forceinline__ Slab slab(const Args& args, int index) {
    const int line = divide(index, args.slabs_w), w = index - line * static_cast<int>(args.slabs_w.divisor);
    const int sheet = divide(line, args.slabs_h), h = line - sheet * static_cast<int>(args.slabs_h.divisor);
    Slab s;
    s.exists = index < args.slabs;
    s.first = w * args.slab_step.w;
    s.row = s.exists ? s.first + h * args.slab_step.h + sheet * args.slab_step.d : 0;
    return s;
  }

  static __device__ __forceinline__ bool inside(int i, int size) {
    return static_cast<unsigned>(i) < static_cast<unsigned>(size);
  }
};

}  // namespace tconv3d
