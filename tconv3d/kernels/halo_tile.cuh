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
  Extent tile;       // positions per dimension (marching: all of depth)
  Extent halo;       // rows per dimension
  int items;         // batch items in a tile
  int near;          // of these, whose rows of a position are neighbours; others have lines of their own
  int near_bits;     // of the number of items (at most 8) that neighbouring lanes load
  int rows;          // of the halo: the product
  int slabs;         // of 64 positions
  int sheets;        // marching: batch items whose lines follow each other
  int step_h;        // positions from tile to tile along h; runs: none,
  int step_rows;     // but rows
  int group_rows;    // from one group of 8 rows of a slab to the next
  int run;           // rows of a run that slabs along w cut into pieces: rows past its end belong to nobody
  Extent slab_step;  // rows from slab to slab
  int flat_slabs;    // whether a slab has positions of one sheet
  int passes;        // of the consumers over the slabs
  int work;          // tiles times column tiles; marching: planes of all tiles that blocks side by side share
  int vector;        // neighbouring outputs that a store takes (contiguous along w): 1, 2 or 4, or 16 bytes
  int vectors;       // of 16 bytes along w that the halo touches; none: it is loaded by positions
  int whole_lines;   // whether every tile has whole lines: then what lies beside the input is not loaded:
  int pairs;         // whether positions are loaded by two along w
  int gaps;          // the same of runs, whose rows beside the input are cleared for every tile
  int first_column;  // of the halo's columns those from this one on are,
  int loaded;        // which makes so many positions (not vectors)
  Divider by_columns;
  Divider slabs_w, slabs_h, tiles_w, tiles_h, tiles_d, halo_w, halo_h, halo_d, by_near, by_far, by_vectors;

  // Marching: the planes of positions of all tiles are one sequence. Of its first part, blocks take whole
  // tiles in turn; the rest they divide into equal shares, wherever a tile ends.
  int even;         // planes of the first part
  int share;        // planes of a share
  int beside;       // column tiles that neighbouring blocks compute
  int pieces;       // into which shares cut a tile, at the most
  int item_tiles;   // that touch a batch item, at the most
  Divider in_turn;  // column tiles that a block computes one after the other

  long long moment_slots;  // moments of each band of channels that all tiles leave (halo_moments.cuh)

  // kPortioned: a tile's chunks are divided among blocks, and y are the sums of each portion.
  long long portion_pitch;  // of y, from portion to portion
  int portions;
};

template <class Config>
struct HaloTile {
  using Layout = HaloLayout<Config>;
  using Offset = typename IndexType<Config::kWide>::type;  // inside one channel's volume

  // What a block works at: a tile of positions and a column tile; marching: some planes of the tile.
  struct Place {
    int column_tile;
    int n, d, h, w;  // the tile's first batch item and position (marching: d is the first output plane)
    int first_plane, planes;  // steps of the march; one if there is none
    int last_output;          // marching: one past the last output plane
    int tile;                 // its place among those of a batch item
    int piece;                // marching: of the tile
    int start;                // of a run: its first row
    int portion, portions;    // of the tile's chunks
    __device__ __forceinline__ int variant() const { return column_tile % Config::kVariants; }
    __device__ __forceinline__ int first_group() const { return Layout::first_group(column_tile); }
    __device__ __forceinline__ int first_out() const { return Layout::first_out(column_tile); }

    // Portions of a tile follow each other. Returns the number of the tile.
    __device__ __forceinline__ int take_portion(const Args& args, int unit) {
      if constexpr (!Config::kPortioned) return unit;
      const int tile = unit / args.portions;
      portion = unit - tile * args.portions;
      portions = args.portions;
      return tile;
    }
    // The portion's chunks are those from the first to before the end.
    __device__ __forceinline__ int first_chunk() const {
      return Config::kPortioned ? portion * Layout::kChunks / portions : 0;
    }
    __device__ __forceinline__ int end_chunk() const {
      return Config::kPortioned ? (portion + 1) * Layout::kChunks / portions : Layout::kChunks;
    }
  };

  // The places of a block, one after the other. Blocks that march through whole tiles side by side meet in
  // the cache: what they load and where their lines end. Shares of the rest let all of them end at the same
  // time: where a share begins inside of a tile, the window's first planes are computed by two blocks.
  struct Work {
    int next;  // tile, or plane of positions

    static __device__ __forceinline__ Work of_block(const Args& args) {
      if constexpr (!Config::kMarch) return {static_cast<int>(blockIdx.x)};
      const int first = share(args) * depth(args);
      return {first < args.even ? first : args.even + share(args) * args.share};
    }
    __device__ __forceinline__ bool left(const Args& args) const { return turn() < end(args); }
    // Variants with shifts of their own take different times: those that take longest come first, and the
    // blocks that were first in one round are last in the next.
    __device__ __forceinline__ int turn() const {
      if constexpr (!Config::kOwnShifts) return next;
      const int blocks = static_cast<int>(gridDim.x), round = next / blocks;
      return round % 2 == 0 ? next : (2 * round + 1) * blocks - 1 - next;
    }
    __device__ __forceinline__ void advance(const Args& args) {
      if constexpr (!Config::kMarch) {
        next += static_cast<int>(gridDim.x);
      } else if (next < args.even) {
        next += static_cast<int>(gridDim.x) / args.beside * depth(args);
        if (next >= args.even) next = args.even + share(args) * args.share;
      } else {
        next = (divide(next, args.tiles_d) + 1) * depth(args);
      }
    }

    // Marching: which share is this block's, and planes of a tile.
    static __device__ __forceinline__ int share(const Args& args) {
      return static_cast<int>(blockIdx.x) / args.beside;
    }
    static __device__ __forceinline__ int depth(const Args& args) {
      return static_cast<int>(args.tiles_d.divisor);
    }
    static __device__ __forceinline__ int end(const Args& args) {
      const int end = args.even + (share(args) + 1) * args.share;
      return Config::kMarch && end < args.work ? end : args.work;
    }

    __device__ __forceinline__ Place place(const Args& args) const {
      Place at;
      at.portion = 0;
      at.portions = 1;
      int rest, d = 0;
      if constexpr (Config::kMarch) {
        const int tile = divide(next, args.tiles_d), turns = static_cast<int>(args.in_turn.divisor);
        d = next - tile * depth(args);
        rest = divide(tile, args.in_turn);
        const int beside = static_cast<int>(blockIdx.x) % args.beside;
        at.column_tile = beside * turns + tile - rest * turns;
        at.piece = next < args.even ? 0 : share(args) - (tile * depth(args) - args.even) / args.share;
      } else if constexpr (Config::kOwnShifts) {
        constexpr int kTiles = Layout::kColumnTiles / Config::kVariants;
        const int each = args.work / Config::kVariants, unit = turn();
        const int variant = unit / each, own = at.take_portion(args, unit - variant * each);
        rest = own / kTiles;
        at.column_tile = (own - rest * kTiles) * Config::kVariants + variant;
        at.piece = 0;
      } else {
        const int own = at.take_portion(args, next);
        rest = own / Layout::kColumnTiles;
        at.column_tile = own - rest * Layout::kColumnTiles;
        at.piece = 0;
      }
      int above = divide(rest, args.tiles_w);
      const int w = rest - above * static_cast<int>(args.tiles_w.divisor);
      rest = above;
      above = divide(rest, args.tiles_h);
      const int h = rest - above * static_cast<int>(args.tiles_h.divisor);
      if constexpr (!Config::kMarch) {
        rest = above;
        above = divide(rest, args.tiles_d);
        d = rest - above * static_cast<int>(args.tiles_d.divisor);
      }
      at.w = w * args.tile.w;
      at.h = h * args.step_h;
      at.start = Config::kMarch ? h * args.step_rows : 0;
      at.n = above * args.items;
      at.tile = h * static_cast<int>(args.tiles_w.divisor) + w;
      at.first_plane = 0;
      at.planes = 1;
      at.last_output = 0;
      if constexpr (Config::kMarch) {
        // Plane i completes outputs [i*stride - padding, (i+1)*stride - padding), and feeds kWindow planes
        // from there.
        at.d = d * Config::kStrideD;
        const int last = at.d + (end(args) - next) * Config::kStrideD;
        at.last_output = last < args.output.d ? last : args.output.d;
        const int reach = at.d + Config::kPaddingD - (Config::kWindow - 1);
        at.first_plane = reach > 0 ? (reach + Config::kStrideD - 1) / Config::kStrideD : 0;
        at.planes = (at.last_output - 1 + Config::kPaddingD) / Config::kStrideD + 1 - at.first_plane;
      } else {
        at.d = d * args.tile.d;
        at.tile += d * static_cast<int>(args.tiles_h.divisor * args.tiles_w.divisor);
      }
      return at;
    }
  };

  // Planes of a march that have input; those after them only complete outputs.
  static __device__ __forceinline__ int fed_planes(const Args& args, const Place& at) {
    if constexpr (!Config::kMarch) return 1;
    const int left = (args.input.d + Config::kReadStepD - 1) / Config::kReadStepD - at.first_plane;
    return left < at.planes ? (left < 0 ? 0 : left) : at.planes;
  }

  // Rows of a stage lie in this order: lines (sheets, then h), batch items that are not near, w, near items.
  struct RowPlace {
    int line, item, w;
  };
  static __device__ __forceinline__ RowPlace row_place(const Args& args, int row) {
    const int position = divide(row, args.by_near), near = row - position * args.near;
    const int far_line = divide(position, args.halo_w), line = divide(far_line, args.by_far);
    const int far = far_line - line * static_cast<int>(args.by_far.divisor);
    return {line, far * args.near + near, position - far_line * args.halo.w};
  }

  // 64 positions of a tile, the rows of one matrix instruction.
  struct Slab {
    bool exists;
    int first;  // place of its first row in the run
    int row;    // its first row in the stage
    int sheet;  // the (first) sheet of the tile that it has positions of
  };
  static __device__ __forceinline__ Slab slab(const Args& args, int index) {
    const int line = divide(index, args.slabs_w), w = index - line * static_cast<int>(args.slabs_w.divisor);
    const int sheet = divide(line, args.slabs_h), h = line - sheet * static_cast<int>(args.slabs_h.divisor);
    Slab s;
    s.exists = index < args.slabs;
    s.first = w * args.slab_step.w;
    s.sheet = sheet;
    s.row = s.exists ? s.first + h * args.slab_step.h + sheet * args.slab_step.d : 0;
    return s;
  }

  static __device__ __forceinline__ bool inside(int i, int size) {
    return static_cast<unsigned>(i) < static_cast<unsigned>(size);
  }
};

}  // namespace tconv3d
