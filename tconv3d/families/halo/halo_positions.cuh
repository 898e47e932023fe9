// How the halo kernel's loaders bring input to a stage, position by position.
//
// A batch is the set of loads that a lane has in flight: some pieces of the halo, as they lie in memory.
// While one batch is in flight, the previous one is converted and stored. In one turn, a warp takes kRows
// positions; a batch has kTurns turns, and kShares batches take all channels of a chunk. The kinds of
// batches, and the order in which a warp takes them, are in halo_loaders.cuh.
#pragma once

#include "halo_shared.cuh"
#include "halo_tile.cuh"

namespace tconv3d {

template <class Config>
struct HaloPositions {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;
  using Offset = typename Tile::Offset;

  // An input position of the halo: its row in the stage, and its offset in memory in bytes from the tile's
  // first plane and channel. A negative offset is a position outside the input, which is zero. Dividing an
  // index into coordinates takes longer than loading, so each lane does it once per tile, and stores its
  // positions in shared memory.
  using Position = long long;
  static constexpr Position kNowhere = -1;
  static constexpr int kNoRow = 0x1FFF;
  static __device__ __forceinline__ int row_of(Position position) {
    return static_cast<int>(position) & kNoRow;
  }
  // Returns how many parts are inside the input, counted from the first.
  static __device__ __forceinline__ int parts_of(Position position) {
    if constexpr (Config::kParts == 1) return position >= 0;
    return position < 0 ? 0 : static_cast<int>(position) >> 13 & 7;
  }
  static __device__ __forceinline__ long long bytes_of(Position position) { return position >> 16; }

  // Returns the position of an index, w fastest. Up to 8 batch items whose rows are neighbours run even
  // faster, so that neighbouring lanes store to different banks.
  static __device__ __forceinline__ Position position(const Args& args, const Place& at, int source,
                                                      int index) {
    if constexpr (Config::kDivision == Division::kLastTiles) {
      if (args.step_rows > 0) return position_of_run(args, at, index);
    }
    const int place = (index >> args.near_bits) + at.start, near = index & ((1 << args.near_bits) - 1);
    const int line = divide(place, args.by_columns);
    const int w = place - line * static_cast<int>(args.by_columns.divisor) + args.first_column;
    const int sheet = divide(line, args.halo_h), h = line - sheet * args.halo.h;
    const int far = divide(sheet, args.halo_d), d = sheet - far * args.halo.d;
    const int n = (far << args.near_bits) + near;
    // Origins are indexed by variant or by source: a build has several variants or several sources, never
    // both.
    const int origin = at.variant() + source;
    const int x_d = Config::kMarch ? 0
                                   : (at.d + Config::kOrigin(origin, 0) + d) * Config::kReadStepD +
                                         Config::kReadPhase(source, 0);
    const int x_h =
        (at.h + Config::kOrigin(origin, 1) + h) * Config::kReadStepH + Config::kReadPhase(source, 1);
    const int x_w =
        (at.w + Config::kOrigin(origin, 2) + w) * Config::kReadStepW + Config::kReadPhase(source, 2);
    if (index >= args.loaded) return kNowhere;
    const int far_item = divide(n, args.by_near), near_item = n - far_item * args.near;
    const int far_line = (d * args.halo.h + h) * static_cast<int>(args.by_far.divisor) + far_item;
    const int row = args.items == 1 ? line * args.halo.w + w - at.start
                                    : (far_line * args.halo.w + w) * args.near + near_item;
    if (!(at.n + n < args.batch && Tile::inside(x_d, args.input.d) && Tile::inside(x_h, args.input.h) &&
          Tile::inside(x_w, args.input.w))) {
      return row - 65536;
    }
    const Offset offset = static_cast<Offset>(x_d) * static_cast<Offset>(args.x_stride.d) +
                          static_cast<Offset>(x_h) * static_cast<Offset>(args.x_stride.h) +
                          static_cast<Offset>(x_w) * static_cast<Offset>(args.x_stride.w);
    const long long items = (at.n + n) * args.x_stride.n + offset;
    const int left = args.input.w - x_w, parts = left < Config::kUsedParts ? left : Config::kUsedParts;
    return items * static_cast<long long>(sizeof(Scalar)) * 65536 + (parts << 13 | row);
  }

  // Returns a position of a run that crosses planes (Division::kLastTiles): the halo has a sheet for every
  // displacement along d, which holds the run's rows displaced by this number of planes.
  static __device__ __forceinline__ Position position_of_run(const Args& args, const Place& at, int index) {
    if (index >= args.loaded) return kNowhere;
    const auto from = Tile::run_input(args, at, index);
    if (!from.used) return kNowhere;
    if (!from.inside) return index - 65536;
    const long long items = at.n * args.x_stride.n +
                            static_cast<Offset>(from.d) * static_cast<Offset>(args.x_stride.d) +
                            static_cast<Offset>(from.h) * static_cast<Offset>(args.x_stride.h) +
                            static_cast<Offset>(from.w) * static_cast<Offset>(args.x_stride.w);
    return items * static_cast<long long>(sizeof(Scalar)) * 65536 + (1 << 13 | index);
  }

  // The table of positions of all warps, by turn. A warp reads only entries that it wrote itself.
  static __device__ __forceinline__ Position* table() {
    return reinterpret_cast<Position*>(dynamic_shared<unsigned char>() + HaloShared<Config>::kTableStart);
  }
  template <class Batch>
  static __device__ __forceinline__ void find_positions(const Args& args, const Place& at, int source,
                                                        int turn, int lane) {
    const int row = Batch::row_in_turn(lane);
    table()[turn * Batch::kRows + row] =
        position(args, at, source, turn / Batch::kShares * Batch::kRows + row);
  }
  template <class Batch>
  static __device__ __forceinline__ int turns_by_position(const Args& args) {
    return (args.loaded + Batch::kRows - 1) / Batch::kRows * Batch::kShares;
  }

  // Returns where a row of the stage begins; piece i of the row is at this address ^ 16 * i.
  static __device__ __forceinline__ unsigned row_start(unsigned stage, int row) {
    return stage + Layout::template swizzle<Layout::kRowPieces>(row * Config::kRowBytes);
  }
};

// A batch of input contiguous along w (or with any strides): a lane has one position, and gathers pieces of
// channels, each channel from all parts, which are neighbours in memory.
template <class Config>
struct BatchByPosition {
  using Positions = HaloPositions<Config>;
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Place = typename HaloTile<Config>::Place;

  static constexpr int kFlight = Config::kInFlight / Layout::kPieceItems / Config::kParts;
  static constexpr int kAtLeast = kFlight < 1 ? 1 : kFlight;
  static constexpr int kPieces = Layout::kPartPieces < kAtLeast ? Layout::kPartPieces : kAtLeast;
  static constexpr int kShares = Layout::kPartPieces / kPieces;
  static constexpr int kRows = 32, kTurns = 1;
  static constexpr bool kClears = false;
  struct Parts {
    Scalar at[Config::kUsedParts];
  };
  Parts raw[kPieces][Layout::kPieceItems];
  int row, first_piece;

  static __device__ __forceinline__ int turns(const Args& args) {
    return Positions::template turns_by_position<BatchByPosition>(args);
  }
  static __device__ __forceinline__ int row_in_turn(int lane) { return lane; }
  static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn, int,
                                              int lane) {
    Positions::template find_positions<BatchByPosition>(args, at, source, turn, lane);
  }
  // Loads a batch. `x` points at the plane and the chunk. `turn` counts the turns of all warps.
  __device__ __forceinline__ void load(const Args& args, const unsigned char* x, int chunk, unsigned turn,
                                       int lane) {
    const auto from = Positions::table()[turn * kRows + lane];
    const long long stride = args.x_stride.c * static_cast<int>(sizeof(Scalar));
    row = Positions::row_of(from);
    first_piece = turn % kShares * kPieces;
    const unsigned char* address = x + Positions::bytes_of(from) + first_piece * Layout::kPieceItems * stride;
    const int left = Layout::kSlots - chunk * Layout::kPartItems - first_piece * Layout::kPieceItems;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto channels = Layout::channels(chunk, first_piece + i);
      if constexpr (!Layout::kDense) {
        address = x + Positions::bytes_of(from) + (channels.group * Config::kIn + channels.first) * stride;
      }
#pragma unroll
      for (int c = 0; c < Layout::kPieceItems; ++c, address += stride) {
        const bool exists = Layout::kWholeParts ? true
                            : Layout::kDense    ? i * Layout::kPieceItems + c < left
                                                : c < channels.count;
        raw[i][c] =
            gather(args, reinterpret_cast<const Scalar*>(address), exists ? Positions::parts_of(from) : 0);
      }
    }
  }
  static __device__ __forceinline__ Parts gather(const Args& args, const Scalar* x, int parts) {
    Parts found{};
    if constexpr (Config::kVectorParts) {  // all parts or none are inside, and aligned
      if (parts > 0) {
        const auto all = load_vector<Config::kUsedParts>(x);
#pragma unroll
        for (int p = 0; p < Config::kUsedParts; ++p) found.at[p] = all.at[p];
      }
    } else {
#pragma unroll
      for (int p = 0; p < Config::kUsedParts; ++p) {
        if (p < parts) found.at[p] = load_constant(x + p * args.x_stride.w);
      }
    }
    return found;
  }
  __device__ __forceinline__ void store(unsigned stage, int) const {
    if (row == Positions::kNoRow) return;
    const unsigned start = Positions::row_start(stage, row) ^ 16 * first_piece;
#pragma unroll
    for (int p = 0; p < Config::kUsedParts; ++p) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
#pragma unroll
        for (int half = 0; half < Config::kHalves; ++half) {
          Piece<Scalar> piece;
#pragma unroll
          for (int c = 0; c < Layout::kPieceItems; ++c) {
            piece.set_bits(c, Layout::operand(raw[i][c].at[p], half));
          }
          const unsigned address = start ^ 16 * (p * Layout::kPartPieces + i);
          ptx::store_shared(address + half * HaloShared<Config>::kHalfBytes, piece.vector());
        }
      }
    }
  }
};

// A batch of 16-bit input whose lines have an even length: a lane has two neighbouring positions, and gathers
// both by one 32-bit load.
template <class Config>
struct BatchByPair {
  using Positions = HaloPositions<Config>;
  using Layout = HaloLayout<Config>;
  using Place = typename HaloTile<Config>::Place;

  static constexpr int kPieces = Layout::kPartPieces < 2 ? 1 : 2;
  static constexpr int kShares = Layout::kPartPieces / kPieces;
  static constexpr int kRows = 32, kTurns = 1;  // pairs of rows
  static constexpr bool kClears = false;
  unsigned raw[kPieces][Layout::kPieceItems];
  int first_row, first_piece;

  static __device__ __forceinline__ int turns(const Args& args) {
    return (args.loaded + 2 * kRows - 1) / (2 * kRows) * kShares;
  }
  static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn, int,
                                              int lane) {
    Positions::table()[turn * kRows + lane] =
        Positions::position(args, at, source, 2 * (turn / kShares * kRows + lane));
  }
  __device__ __forceinline__ void load(const Args& args, const unsigned char* x, int chunk, unsigned turn,
                                       int lane) {
    const auto from = Positions::table()[turn * kRows + lane];
    first_row = Positions::row_of(from);
    first_piece = turn % kShares * kPieces;
    const long long stride = args.x_stride.c * 2;
    const unsigned char* address = x + Positions::bytes_of(from) + first_piece * Layout::kPieceItems * stride;
    const int left = Layout::kSlots - chunk * Layout::kPartItems - first_piece * Layout::kPieceItems;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int c = 0; c < Layout::kPieceItems; ++c, address += stride) {
        const bool exists = from >= 0 && (Layout::kWholeParts || i * Layout::kPieceItems + c < left);
        raw[i][c] = exists ? __ldg(reinterpret_cast<const unsigned*>(address)) : 0;
      }
    }
  }
  // Every other four lanes store their second position first, so that 8 lanes write to all banks.
  __device__ __forceinline__ void store(unsigned stage, int lane) const {
    if (first_row == Positions::kNoRow) return;
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
      const int second = lane / 4 % 2 ^ turn;
      const unsigned start = Positions::row_start(stage, first_row + second) ^ 16 * first_piece;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const unsigned (&items)[Layout::kPieceItems] = raw[i];
        ptx::store_shared(start ^ 16 * i,
                          make_uint4(two(items[0], items[1], second), two(items[2], items[3], second),
                                     two(items[4], items[5], second), two(items[6], items[7], second)));
      }
    }
  }
  // Returns the values of two channels at the first or at the second position.
  static __device__ __forceinline__ unsigned two(unsigned first, unsigned next, int second) {
    return second ? first >> 16 | (next & 0xFFFF0000u) : (first & 0xFFFFu) | next << 16;
  }
};

// A batch of input contiguous along channels: neighbouring lanes have neighbouring pieces of a position.
template <class Config>
struct BatchByChannel {
  using Positions = HaloPositions<Config>;
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Place = typename HaloTile<Config>::Place;

  static constexpr int kShares = 1, kTurns = 4, kRows = 32 / Layout::kRowPieces;
  static constexpr bool kClears = false;
  uint4 raw[kTurns];
  int row[kTurns], piece;

  static __device__ __forceinline__ int turns(const Args& args) {
    return Positions::template turns_by_position<BatchByChannel>(args);
  }
  static __device__ __forceinline__ int row_in_turn(int lane) { return lane / Layout::kRowPieces; }
  static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn, int,
                                              int lane) {
    Positions::template find_positions<BatchByChannel>(args, at, source, turn, lane);
  }
  __device__ __forceinline__ void load(const Args& args, const unsigned char* x, int chunk, unsigned turn,
                                       int lane) {
    piece = lane % Layout::kRowPieces;
    const int part = piece / Layout::kPartPieces, in_part = piece % Layout::kPartPieces;
    const auto channels = Layout::channels(chunk, in_part);
    const int first =
        Layout::kDense ? in_part * Layout::kPieceItems : channels.group * Config::kIn + channels.first;
    x += (first + (Config::kParts > 1 ? part * args.x_stride.w : 0)) * static_cast<int>(sizeof(Scalar));
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const auto from =
          Positions::table()[(turn + i * HaloShared<Config>::kLoaderWarps) * kRows + row_in_turn(lane)];
      row[i] = Positions::row_of(from);
      const int count = Layout::kWholeParts ? Layout::kPieceItems : channels.count;
      const bool inside = part < Positions::parts_of(from);
      raw[i] = gather(reinterpret_cast<const Scalar*>(x + Positions::bytes_of(from)), inside ? count : 0);
    }
  }
  static __device__ __forceinline__ uint4 gather(const Scalar* x, int count) {
    if constexpr (Config::kVectorInput) {  // a piece is whole or empty, and aligned
      return count == 0 ? make_uint4(0, 0, 0, 0) : __ldg(reinterpret_cast<const uint4*>(x));
    } else {
      Vector<Scalar, Layout::kPieceItems> items{};
#pragma unroll
      for (int c = 0; c < Layout::kPieceItems; ++c) {
        if (c < count) items.at[c] = load_constant(x + c);
      }
      return *reinterpret_cast<const uint4*>(&items);
    }
  }
  // Converts 16 bytes from memory to the operands that tensor cores take.
  static __device__ __forceinline__ uint4 to_operands(uint4 raw, int half) {
    if constexpr (sizeof(Scalar) == 4) {
      raw.x = Layout::operand(ptx::bits_to_float(raw.x), half);
      raw.y = Layout::operand(ptx::bits_to_float(raw.y), half);
      raw.z = Layout::operand(ptx::bits_to_float(raw.z), half);
      raw.w = Layout::operand(ptx::bits_to_float(raw.w), half);
    }
    return raw;
  }
  __device__ __forceinline__ void store(unsigned stage, int) const {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (row[i] == Positions::kNoRow) continue;
      const unsigned address = Positions::row_start(stage, row[i]) ^ 16 * piece;
#pragma unroll
      for (int half = 0; half < Config::kHalves; ++half) {
        ptx::store_shared(address + half * HaloShared<Config>::kHalfBytes, to_operands(raw[i], half));
      }
    }
  }
};

}  // namespace tconv3d
