// What a block of the halo kernel works at: a tile of positions and a column tile, and the slabs that
// consumers cut the tile into.
#pragma once

#include "halo_choices.cuh"
#include "halo_layout.cuh"

namespace tconv3d {

template <class Config>
struct HaloTile {
  using Layout = HaloLayout<Config>;
  using Offset = typename IndexType<Config::kWide>::type;  // offset inside one channel's volume

  // The current work of a block: a tile of positions and a column tile; marching: some planes of the tile.
  struct Place {
    int column_tile;
    int n, d, h, w;  // first batch item and position of the tile (marching: d is the first output plane)
    int first_plane, planes;  // steps of the march; one step if there is none
    int last_output;          // marching: one past the last output plane
    int tile;                 // index of the tile among those of a batch item
    int piece;                // marching: index of the piece of the tile
    int start;                // first row of a run
    int portion, portions;    // index and number of the portions of the tile's chunks
    int from, to;             // Division::kLastTiles: range of chunks of the tile
    int depths;               // Division::kLastTiles: planes of positions that the tile touches
    int share;                // Division::kLastTiles: share that the piece belongs to
    __device__ __forceinline__ int variant() const { return column_tile % Config::kVariants; }
    __device__ __forceinline__ int first_group() const { return Layout::first_group(column_tile); }
    __device__ __forceinline__ int first_out() const { return Layout::first_out(column_tile); }

    // Sets the portion of a unit of work and returns the tile; portions of a tile follow each other.
    __device__ __forceinline__ int take_portion(const Args& args, int unit) {
      if constexpr (Config::kDivision != Division::kBlocks) return unit;
      const int tile = unit / args.portions;
      portion = unit - tile * args.portions;
      portions = args.portions;
      return tile;
    }
    // The place has the chunks from first_chunk() to before end_chunk().
    __device__ __forceinline__ int first_chunk() const {
      if constexpr (Config::kDivision == Division::kLastTiles) return from;
      return Config::kDivision == Division::kBlocks ? portion * Layout::kChunks / portions : 0;
    }
    __device__ __forceinline__ int end_chunk() const {
      if constexpr (Config::kDivision == Division::kLastTiles) return to;
      return Config::kDivision == Division::kBlocks ? (portion + 1) * Layout::kChunks / portions
                                                    : Layout::kChunks;
    }
    // whole(): whether the place has all chunks of the tile. leads(): whether the other sums are added to its
    // sums, so that they start from the bias.
    __device__ __forceinline__ bool whole() const {
      return Config::kDivision != Division::kLastTiles || to - from == Layout::kChunks;
    }
    __device__ __forceinline__ bool leads() const {
      if constexpr (Config::kDivision == Division::kLastTiles) return from == 0;
      return Config::kDivision != Division::kBlocks || portion == 0;
    }
    // Returns where the partial sums of a piece go. A share has at most one piece that does not begin its
    // tile, its first, and at most one that begins but does not end its tile, its last.
    __device__ __forceinline__ int slot() const { return 2 * share + (from == 0 ? 1 : 0); }
  };

  // Division::kLastTiles: returns where a share begins in the sequence of chunks.
  static __device__ __forceinline__ int share_start(const Args& args, int share) {
    int left = share * args.share_cost, start = args.even;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Stretch& stretch = i == 0 ? args.first : i == 1 ? args.second : i == 2 ? args.third : args.fourth;
      const int whole = stretch.chunks * stretch.cost;
      if (left < whole) return start + left / stretch.cost;
      left -= whole;
      start += stretch.chunks;
    }
    return start;
  }

  // The sequence of places of a block. Blocks that march through neighbouring whole tiles in parallel share
  // cache lines of the input and at the ends of output lines. Shares of the rest let all blocks end together:
  // where a share begins inside a tile, two blocks compute the window's first planes.
  struct Work {
    int next;      // next tile, or plane of positions (kMarch), or chunk (Division::kLastTiles)
    int from = 0;  // Division::kLastTiles: first chunk of the share
    int to = 0;    // Division::kLastTiles: one past the last chunk of the share

    static __device__ __forceinline__ Work of_block(const Args& args) {
      if constexpr (Config::kDivision == Division::kLastTiles) {
        const int block = static_cast<int>(blockIdx.x), first = block * Layout::kChunks;
        const int from = share_start(args, block);
        return {first < args.even ? first : from, from, share_start(args, block + 1)};
      }
      if constexpr (!Config::kMarch) return {static_cast<int>(blockIdx.x)};
      const int first = share(args) * depth(args);
      return {first < args.even ? first : args.even + share(args) * args.share};
    }
    __device__ __forceinline__ bool left(const Args& args) const {
      if constexpr (Config::kDivision == Division::kLastTiles) return next < args.even || next < to;
      return turn() < end(args);
    }
    // Variants with their own shifts take different times: the longest come first, and the blocks that were
    // first in one round are last in the next.
    __device__ __forceinline__ int turn() const {
      if constexpr (!Config::kOwnShifts) return next;
      const int blocks = static_cast<int>(gridDim.x), round = next / blocks;
      return round % 2 == 0 ? next : (2 * round + 1) * blocks - 1 - next;
    }
    __device__ __forceinline__ void advance(const Args& args) {
      if constexpr (Config::kDivision == Division::kLastTiles) {
        if (next < args.even) {
          next += static_cast<int>(gridDim.x) * Layout::kChunks;
          if (next >= args.even) next = from;
        } else {
          next = (next / Layout::kChunks + 1) * Layout::kChunks;
        }
      } else if constexpr (!Config::kMarch) {
        next += static_cast<int>(gridDim.x);
      } else if (next < args.even) {
        next += static_cast<int>(gridDim.x) / args.beside * depth(args);
        if (next >= args.even) next = args.even + share(args) * args.share;
      } else {
        next = (divide(next, args.tiles_d) + 1) * depth(args);
      }
    }

    // Marching: the index of this block's share, and the number of planes of a tile.
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
        const int own =
            at.take_portion(args, Config::kDivision == Division::kLastTiles ? next / Layout::kChunks : next);
        if constexpr (Config::kDivision == Division::kLastTiles) {
          const int first = own * Layout::kChunks;
          at.share = static_cast<int>(blockIdx.x);
          at.from = next - first;
          at.to = next < args.even || to - first > Layout::kChunks ? Layout::kChunks : to - first;
        }
        rest = own / Layout::kColumnTiles;
        at.column_tile = own - rest * Layout::kColumnTiles;
        at.piece = 0;
      }
      if constexpr (Config::kDivision == Division::kLastTiles) {
        if (args.step_rows > 0) return run_place(args, at, rest);
      }
      int above = divide(rest, args.tiles_w);
      const int w = rest - above * static_cast<int>(args.tiles_w.divisor);
      rest = above;
      above = divide(rest, args.tiles_h);
      const int h = rest - above * static_cast<int>(args.tiles_h.divisor);
      if constexpr (Config::kDivision == Division::kLastTiles) {
        rest = above;
        d = divide(rest, args.tiles_n);
        above = rest - d * static_cast<int>(args.tiles_n.divisor);
        d = turned(d, args.first_tile, args.tiles_d);
        at.depths = args.tile.d;
      } else if constexpr (!Config::kMarch) {
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
        // Plane i completes outputs [i*stride - padding, (i+1)*stride - padding), and feeds kWindow output
        // planes from i*stride - padding on.
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

    static __device__ __forceinline__ int turned(int tile, int first, const Divider& tiles) {
      const int count = static_cast<int>(tiles.divisor);
      return tile + first < count ? tile + first : tile + first - count;
    }
    // Division::kLastTiles: returns the place of a tile that is a run of all lines of a batch item, wherever
    // lines and planes end.
    static __device__ __forceinline__ Place run_place(const Args& args, Place at, int tile) {
      const int run = divide(tile, args.tiles_n);
      at.n = tile - run * static_cast<int>(args.tiles_n.divisor);
      at.tile = turned(run, args.first_tile, args.tiles_h);
      at.start = at.tile * args.step_rows;
      at.h = at.w = 0;
      at.d = divide(divide(at.start, args.halo_w), args.halo_h);
      at.depths = divide(divide(at.start + args.step_rows - 1, args.halo_w), args.halo_h) - at.d + 1;
      at.first_plane = at.last_output = 0;
      at.planes = 1;
      return at;
    }
  };

  // Returns how many planes of a march have input; later planes only complete outputs.
  static __device__ __forceinline__ int fed_planes(const Args& args, const Place& at) {
    if constexpr (!Config::kMarch) return 1;
    const int left = (args.input.d + Config::kReadStepD - 1) / Config::kReadStepD - at.first_plane;
    return left < at.planes ? (left < 0 ? 0 : left) : at.planes;
  }

  // Rows of a stage lie in this order: lines (sheets, then h), batch items that are not near, w, near batch
  // items.
  struct RowPlace {
    int line, item, w;
  };
  static __device__ __forceinline__ RowPlace row_place(const Args& args, int row) {
    const int position = divide(row, args.by_near), near = row - position * args.near;
    const int far_line = divide(position, args.halo_w), line = divide(far_line, args.by_far);
    const int far = far_line - line * static_cast<int>(args.by_far.divisor);
    return {line, far * args.near + near, position - far_line * args.halo.w};
  }

  // Division::kLastTiles: the shifts of a pattern in a source by which some positions of a tile at this depth
  // read planes inside the input, or one shift if there are none. Panels of other shifts are neither loaded
  // nor multiplied. The shifts are a range, because a pattern's shifts are in the order of d.
  struct Shifts {
    int first, end;
    static __device__ __forceinline__ Shifts of(const Args& args, int depth, int depths, int variant,
                                                int source, int pattern) {
      const int start = Layout::first_shift(source, pattern);
      Shifts found{start, start + Layout::own_shifts(variant, source, pattern)};
      // Origins are indexed by variant or by source: a build has several variants or several sources, never
      // both.
      const int origin = depth + Config::kOrigin(variant + source, 0);
      const int left = args.input.d - Config::kReadPhase(source, 0) + Config::kReadStepD - 1;
      const int planes = left < 0 ? 0 : left / Config::kReadStepD;
      while (found.end - found.first > 1 && plane(variant, found.end - 1) + origin >= planes) --found.end;
      while (found.end - found.first > 1 && plane(variant, found.first) + origin + depths <= 0) ++found.first;
      return found;
    }
    static __device__ __forceinline__ int plane(int variant, int shift) {
      return Config::kShift(Layout::shift_entry(variant, shift), 0);
    }
  };

  // Division::kLastTiles: the input coordinates of a row of a run's halo, and whether a product uses its
  // sheet.
  struct RunInput {
    int d, h, w;
    bool inside, used;
  };
  static __device__ __forceinline__ RunInput run_input(const Args& args, const Place& at, int row) {
    // Dilation skips planes: a run has a sheet for every kSheetStep-th plane only.
    const int shift = divide(row, args.by_sheet) * Config::kSheetStep;
    const int place = row - shift * args.sheet_rows + at.start;
    const int line = divide(place, args.halo_w), sheet = divide(line, args.halo_h);
    const int variant = at.variant();
    RunInput found;
    found.d = sheet + shift + Config::kOrigin(variant, 0);
    found.h = line - sheet * args.halo.h + Config::kOrigin(variant, 1);
    found.w = place - line * args.halo.w + Config::kOrigin(variant, 2);
    found.used = false;
    for (int pattern = 0; pattern < Config::kPatterns; ++pattern) {
      const auto own = Shifts::of(args, at.d, at.depths, variant, 0, pattern);
      found.used |=
          shift >= Shifts::plane(variant, own.first) && shift <= Shifts::plane(variant, own.end - 1);
    }
    found.inside = row < args.rows && inside(found.d, args.input.d) && inside(found.h, args.input.h) &&
                   inside(found.w, args.input.w);
    return found;
  }

  // Returns the plane of positions from which the rows of a tile are counted: plane 0 for a run
  // (Division::kLastTiles).
  static __device__ __forceinline__ int first_sheet(const Args& args, const Place& at) {
    return Config::kDivision == Division::kLastTiles && args.step_rows > 0 ? 0 : at.d;
  }

  // A slab is 64 positions of a tile, the rows of one matrix instruction.
  struct Slab {
    bool exists;
    int first;  // index of the slab's first row in the run
    int row;    // first row of the slab in the stage
    int sheet;  // (first) sheet of the tile that the slab has positions of
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
