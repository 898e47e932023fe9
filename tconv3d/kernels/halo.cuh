// Transposed 3D convolution on Hopper's tensor cores (sm_90a), forward pass and input gradient: one halo tile
// feeds all phases.
//
// The algorithm, for one tile of positions q and one tile of output channels:
//
//   for each chunk of input channels:
//     load the tile's input with its halo into shared memory, once: a row of channels per position
//     for each shift (a displacement of the input that some phases need):
//       accumulators of the phases it feeds  +=  rows of the tile, displaced by the shift  x  panel of the
//       shift
//   write stride*q + phase for all phases
//
// A displacement costs nothing: tensor cores read the rows in place, through a descriptor moved by whole
// rows. 64 positions, a slab, are 8 rows, and 8 such groups at any one pitch: 8 neighbours along w on 8
// lines, or 64 rows in sequence. Which, and how large the tile is, are run-time numbers: a new volume never
// recompiles.
//
// Marching (kMarch): the tile is flat, and its block walks along depth. The phases along depth become a
// window of output planes: input plane i feeds output planes i*stride - padding + tap*dilation through one
// wide instruction per in-plane shift, after which the window's first `stride` planes are complete and the
// window moves. This makes wide instructions out of few output channels, and reads each input plane once.
// A marching tile may be a run: the lines of all planes of that depth lie one after the other, and a tile is
// so many rows in sequence, wherever lines end. Then no slab is partly empty because a line is short.
//
// Input gradient: the sources are the phase planes of dy, a position has one field, and the loops are
//
//   for each source, for each chunk: load the halo; for each of the source's shifts: the products
//
// Who does what in a block: producers (the first warpgroups) fill a ring of halo stages, one warp of them a
// ring of weight panels with the copy engine (or, if all panels of the column tile fit, loads them once:
// kResident); consumers multiply and store. Blocks are persistent: while consumers store a tile, producers
// are at the next. Two blocks may be a pair (kClusterSize): they have the same column tile and neighbouring
// tiles, and each fetches half of every panel for both, so that panels come out of the cache half as often.
//
// The words (field, unit, panel, pattern, chunk, column tile) are explained in halo_layout.cuh.
#pragma once

#include "epilogue.cuh"
#include "halo_layout.cuh"
#include "halo_moments.cuh"

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

// A position in a ring of buffers, and the parity of its barriers' phase.
template <int kCount>
struct Ring {
  unsigned index = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1;
    }
  }
};

template <class Config>
struct Halo : HaloLayout<Config> {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Offset = typename IndexType<Config::kWide>::type;  // inside one channel's volume
  using Layout::kChunks;
  using Layout::kColumns;
  using Layout::kColumnTiles;

  static constexpr int kProducerThreads = 128 * Config::kProducers;
  static constexpr int kLoaderWarps = 4 * Config::kProducers - (Config::kResident ? 0 : 1);
  static constexpr int kConsumerWarps = 4 * Config::kConsumers;
  static constexpr bool kPaired = Config::kClusterSize == 2;
  static constexpr bool kStrict = Config::kHalves == 2;
  static_assert(Config::kThreads == kProducerThreads + 128 * Config::kConsumers, "whole warpgroups");

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

  // Shared memory: halo stages, panels, barriers, scratch, the loaders' tables.
  static constexpr int kHalfBytes = Config::kStageRows * Config::kRowBytes;
  static constexpr int kStageBytes = Config::kHalves * kHalfBytes;
  static constexpr int kPanelBytes =
      Config::kResident ? Layout::kTileBytes : Config::kSlots * Config::kSlotBytes;
  static constexpr int kRingBarriers = 2 * Config::kStages + (Config::kResident ? 1 : 2 * Config::kSlots);
  static constexpr int kBarriers = kRingBarriers + 2;

  // A warp's sums pass through scratch on their way to contiguous lines: 32 outputs of 8 channels, or 16 of
  // 16.
  static constexpr int kScratch = 256;                                               // floats of a warp
  static constexpr int kScratchBytes = Config::kOutputUnitC ? 0 : 4 * kScratch * 4;  // of a consumer
  static constexpr int kScratchStart =
      Config::kStages * kStageBytes + kPanelBytes + (8 * kBarriers + 15) / 16 * 16;
  static constexpr int kTableStart = kScratchStart + Config::kConsumers * kScratchBytes;

  // ---- producers: the halo

  // An input position of the halo: its row in the stage, and where it lies in memory (in bytes from the
  // tile's first plane and channel; negative: outside of the input, zero). Dividing its index into
  // coordinates takes longer than loading, so each lane does it once per tile, and keeps its positions in
  // shared memory.
  using Position = long long;
  static constexpr Position kNowhere = -1;
  static constexpr int kNoRow = 0x1FFF;
  static __device__ __forceinline__ int row_of(Position position) {
    return static_cast<int>(position) & kNoRow;
  }
  // How many of the parts are inside: those from the first on.
  static __device__ __forceinline__ int parts_of(Position position) {
    if constexpr (Config::kParts == 1) return position >= 0;
    return position < 0 ? 0 : static_cast<int>(position) >> 13 & 7;
  }
  static __device__ __forceinline__ long long bytes_of(Position position) { return position >> 16; }

  // By the position's index, w fastest: but for 8 batch items whose rows are neighbours, so that neighbouring
  // lanes store to different banks.
  static __device__ __forceinline__ Position position(const Args& args, const Place& at, int source,
                                                      int index) {
    const int place = (index >> args.near_bits) + at.start, near = index & ((1 << args.near_bits) - 1);
    const int line = divide(place, args.halo_w), w = place - line * args.halo.w;
    const int sheet = divide(line, args.halo_h), h = line - sheet * args.halo.h;
    const int far = divide(sheet, args.halo_d), d = sheet - far * args.halo.d;
    const int n = (far << args.near_bits) + near;
    const int origin = at.variant() + source;  // either has more than one
    const int x_d = Config::kMarch ? 0
                                   : (at.d + Config::kOrigin(origin, 0) + d) * Config::kReadStepD +
                                         Config::kReadPhase(source, 0);
    const int x_h =
        (at.h + Config::kOrigin(origin, 1) + h) * Config::kReadStepH + Config::kReadPhase(source, 1);
    const int x_w =
        (at.w + Config::kOrigin(origin, 2) + w) * Config::kReadStepW + Config::kReadPhase(source, 2);
    if (index >= args.rows) return kNowhere;
    const int row = args.items == 1 ? index : ((d * args.halo.h + h) * args.halo.w + w) * args.items + n;
    if (!(at.n + n < args.batch && inside(x_d, args.input.d) && inside(x_h, args.input.h) &&
          inside(x_w, args.input.w))) {
      return row - 65536;
    }
    const Offset offset = static_cast<Offset>(x_d) * static_cast<Offset>(args.x_stride.d) +
                          static_cast<Offset>(x_h) * static_cast<Offset>(args.x_stride.h) +
                          static_cast<Offset>(x_w) * static_cast<Offset>(args.x_stride.w);
    const long long items = (at.n + n) * args.x_stride.n + offset;
    const int left = args.input.w - x_w, parts = left < Config::kUsedParts ? left : Config::kUsedParts;
    return items * static_cast<long long>(sizeof(Scalar)) * 65536 + (parts << 13 | row);
  }
  static __device__ __forceinline__ bool inside(int i, int size) {
    return static_cast<unsigned>(i) < static_cast<unsigned>(size);
  }

  // The positions of all warps, by turn: a warp reads what itself wrote.
  static __device__ __forceinline__ Position* positions() {
    return reinterpret_cast<Position*>(dynamic_shared<unsigned char>() + kTableStart);
  }
  template <class Batch>
  static __device__ __forceinline__ void find_positions(const Args& args, const Place& at, int source,
                                                        int turn, int lane) {
    const int row = Batch::row_in_turn(lane);
    positions()[turn * Batch::kRows + row] =
        position(args, at, source, turn / Batch::kShares * Batch::kRows + row);
  }
  template <class Batch>
  static __device__ __forceinline__ int turns_by_position(const Args& args) {
    return (args.rows + Batch::kRows - 1) / Batch::kRows * Batch::kShares;
  }

  // Where a row of the stage begins; piece i of it is at this address ^ 16 * i.
  static __device__ __forceinline__ unsigned row_start(unsigned stage, int row) {
    return stage + Layout::template swizzle<Layout::kRowPieces>(row * Config::kRowBytes);
  }

  // A batch is what a lane has in flight: some pieces of the halo, as they are in memory. While one batch is
  // on its way, the one before it is converted and stored. In a turn, a warp takes kRows positions; a batch
  // has kTurns, and kShares batches take all channels of a chunk.
  //
  // Contiguous along w (or any strides): a lane has a position, and gathers pieces of its channels: the same
  // channels of all parts, which are neighbours in memory.
  struct BatchByPosition {
    static constexpr int kFlight = 16 / Layout::kPieceItems / Config::kParts;  // two batches fill registers
    static constexpr int kAtLeast = kFlight < 1 ? 1 : kFlight;
    static constexpr int kPieces = Layout::kPartPieces < kAtLeast ? Layout::kPartPieces : kAtLeast;
    static constexpr int kShares = Layout::kPartPieces / kPieces;
    static constexpr int kRows = 32, kTurns = 1;
    struct Parts {
      Scalar at[Config::kUsedParts];
    };
    Parts raw[kPieces][Layout::kPieceItems];
    int row, first_piece;

    static __device__ __forceinline__ int turns(const Args& args) {
      return turns_by_position<BatchByPosition>(args);
    }
    static __device__ __forceinline__ int row_in_turn(int lane) { return lane; }
    static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn, int,
                                                int lane) {
      find_positions<BatchByPosition>(args, at, source, turn, lane);
    }
    // `x`: the plane and the chunk. `turn` counts those of all warps.
    __device__ __forceinline__ void load(const Args& args, const unsigned char* x, int chunk, unsigned turn,
                                         int lane) {
      const Position from = positions()[turn * kRows + lane];
      const long long stride = args.x_stride.c * static_cast<int>(sizeof(Scalar));
      row = row_of(from);
      first_piece = turn % kShares * kPieces;
      const unsigned char* address = x + bytes_of(from) + first_piece * Layout::kPieceItems * stride;
      const int left = Layout::kSlots - chunk * Layout::kPartItems - first_piece * Layout::kPieceItems;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const auto channels = Layout::channels(chunk, first_piece + i);
        if constexpr (!Layout::kDense) {
          address = x + bytes_of(from) + (channels.group * Config::kIn + channels.first) * stride;
        }
#pragma unroll
        for (int c = 0; c < Layout::kPieceItems; ++c, address += stride) {
          const bool exists = Layout::kWholeParts ? true
                              : Layout::kDense    ? i * Layout::kPieceItems + c < left
                                                  : c < channels.count;
          raw[i][c] = gather(args, reinterpret_cast<const Scalar*>(address), exists ? parts_of(from) : 0);
        }
      }
    }
    static __device__ __forceinline__ Parts gather(const Args& args, const Scalar* x, int parts) {
      Parts found{};
      if constexpr (Config::kVectorParts) {  // all or none, and aligned
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
      if (row == kNoRow) return;
      const unsigned start = row_start(stage, row) ^ 16 * first_piece;
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
            ptx::store_shared(address + half * kHalfBytes, piece.vector());
          }
        }
      }
    }
  };

  // Contiguous along channels: neighbouring lanes have neighbouring pieces of a position.
  struct BatchByChannel {
    static constexpr int kShares = 1, kTurns = 4, kRows = 32 / Layout::kRowPieces;
    uint4 raw[kTurns];
    int row[kTurns], piece;

    static __device__ __forceinline__ int turns(const Args& args) {
      return turns_by_position<BatchByChannel>(args);
    }
    static __device__ __forceinline__ int row_in_turn(int lane) { return lane / Layout::kRowPieces; }
    static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn, int,
                                                int lane) {
      find_positions<BatchByChannel>(args, at, source, turn, lane);
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
        const Position from = positions()[(turn + i * kLoaderWarps) * kRows + row_in_turn(lane)];
        row[i] = row_of(from);
        const int count = Layout::kWholeParts ? Layout::kPieceItems : channels.count;
        const bool inside = part < parts_of(from);
        raw[i] = gather(reinterpret_cast<const Scalar*>(x + bytes_of(from)), inside ? count : 0);
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
    // 16 bytes as they are in memory -> as tensor cores want them.
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
        if (row[i] == kNoRow) continue;
        const unsigned address = row_start(stage, row[i]) ^ 16 * piece;
#pragma unroll
        for (int half = 0; half < Config::kHalves; ++half) {
          ptx::store_shared(address + half * kHalfBytes, to_operands(raw[i], half));
        }
      }
    }
  };

  // Rows of 16-bit items that begin and end at multiples of 16 bytes are loaded by vectors of 16 bytes, on
  // such boundaries: items beside the halo come along, and are dropped. `place`: of the first item in the
  // halo's line.
  static constexpr int kVectorItems = Layout::kPieceItems;
  struct InputVector {
    long long from;  // in bytes, as of a position
    int first_row, place, end;
  };
  static __device__ __forceinline__ InputVector input_vector(const Args& args, const Place& at, int source,
                                                             int index) {
    InputVector v;
    const int line = divide(index, args.by_vectors);
    const int of_run = Config::kMarch ? line + divide(at.start, args.halo_w) : line;
    const int sheet = divide(of_run, args.halo_h), h = of_run - sheet * args.halo.h;
    const int origin = at.variant() + source;
    const int x_d = Config::kMarch ? 0
                                   : (at.d + Config::kOrigin(origin, 0) + sheet) * Config::kReadStepD +
                                         Config::kReadPhase(source, 0);
    const int x_h =
        (at.h + Config::kOrigin(origin, 1) + h) * Config::kReadStepH + Config::kReadPhase(source, 1);
    const int start = (at.w + Config::kOrigin(origin, 2)) * Config::kReadStepW;
    const int in_line = index - line * static_cast<int>(args.by_vectors.divisor);
    const int x_w = (start & -kVectorItems) + kVectorItems * in_line;
    v.first_row = of_run * args.halo.w - at.start;
    v.place = x_w - start;
    v.end = index < args.vectors ? args.halo.w * Config::kReadStepW : 0;
    const Offset offset = static_cast<Offset>(x_d) * static_cast<Offset>(args.x_stride.d) +
                          static_cast<Offset>(x_h) * static_cast<Offset>(args.x_stride.h) + x_w;
    const int n = Config::kMarch ? at.n + sheet : at.n;
    const bool read = v.place < v.end && n < args.batch && inside(x_d, args.input.d) &&
                      inside(x_h, args.input.h) && inside(x_w, args.input.w);
    v.from = read ? (n * args.x_stride.n + offset) * static_cast<int>(sizeof(Scalar)) : kNowhere;
    return v;
  }
  // Where an item of a vector begins in a stage, or `beside` if it is not in the halo.
  static __device__ __forceinline__ unsigned item_start(const Args& args, const InputVector& v, int item,
                                                        unsigned beside) {
    const int place = v.place + item;
    const int row = v.first_row + place / Config::kReadStepW;
    return inside(place, v.end) && inside(row, args.rows)
               ? row_start(0, row) ^ 16 * (place % Config::kReadStepW * Layout::kPartPieces)
               : beside;
  }
  // Pieces that tensor cores read: only these are loaded. And whether all of their items are channels.
  static constexpr int kUsedPieces = kChunks > 1 ? Layout::kPartPieces : 2 * Layout::kLastSteps;
  static constexpr bool kWholePieces =
      Layout::kDense &&
      Layout::kSlots % (kChunks > 1 ? Layout::kPartItems : Layout::kPieceItems * kUsedPieces) == 0;
  // From a vector of channel 0 of the chunk to that of item `c` of a piece, and whether there is one.
  struct ChannelOffset {
    long long bytes;
    bool exists;
  };
  static __device__ __forceinline__ ChannelOffset channel_offset(const Args& args, int chunk, int piece,
                                                                 int c) {
    const long long stride = args.x_stride.c * static_cast<int>(sizeof(Scalar));
    if constexpr (kWholePieces) return {(piece * Layout::kPieceItems + c) * stride, true};
    const auto channels = Layout::channels(chunk, piece);
    const int channel =
        Layout::kDense ? piece * Layout::kPieceItems + c : channels.group * Config::kIn + channels.first + c;
    return {channel * stride, c < channels.count};
  }

  // Of 16-bit items: the store transposes. In a turn, lane 4*c + q has channel c of a piece in vector q of
  // the turn's four, two items to a register. The store takes a register of every lane for a matrix whose
  // rows, two from each vector, may lie anywhere: it writes 8 channels of a position to each. Which register
  // a vector gives to which matrix is such that the rows of a matrix lie in different banks.
  struct BatchTransposed {
    static constexpr int kPieces = kUsedPieces == 6 ? 3 : kUsedPieces < 4 ? kUsedPieces : 4;
    static constexpr int kShares = kUsedPieces / kPieces, kTurns = 4 / kPieces;
    static_assert(kUsedPieces % kPieces == 0 && (kShares == 1 || kTurns == 1), "whole batches");
    uint4 raw[kTurns][kPieces];
    unsigned target[kTurns];
    int first_piece;

    // What a turn reads and writes; of each lane the row of a matrix that it addresses.
    struct Turn {
      unsigned target[32];
      long long from[4];
    };
    static constexpr unsigned kAbsolute = 0x80000000u;  // not in the stage: for items beside the halo
    static constexpr int kBesideStart = (kTableStart + 127) / 128 * 128;  // 128 bytes of each warp
    static __device__ __forceinline__ Turn* table() {
      return reinterpret_cast<Turn*>(dynamic_shared<unsigned char>() + kBesideStart + 128 * kLoaderWarps);
    }
    static __device__ __forceinline__ int turns(const Args& args) { return (args.vectors + 3) / 4 * kShares; }

    static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn,
                                                int warp, int lane) {
      unsigned own = lane;
      ptx::pin(own);  // nothing of this is kept in registers from tile to tile
      const int q = own % 8 / 2, item = 2 * (own / 8 ^ q) + own % 2;
      const InputVector vector = input_vector(args, at, source, turn / kShares * 4 + q);
      const unsigned shared = ptx::shared_address(dynamic_shared<unsigned char>());
      Turn& to = table()[turn];
      to.target[own] = item_start(args, vector, item, kAbsolute | (shared + kBesideStart + 128 * warp));
      if (own < 8 && own % 2 == 0) to.from[q] = vector.from;
    }
    __device__ __forceinline__ void load(const Args& args, const unsigned char* x, int chunk, unsigned turn,
                                         int lane) {
      first_piece = turn % kShares * kPieces;
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
        const Turn& at = table()[turn + t * kLoaderWarps];
        const long long from = at.from[lane % 4];
        target[t] = at.target[lane];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const auto channel = channel_offset(args, chunk, first_piece + i, lane / 4);
          raw[t][i] = load_16_bytes(x + from + channel.bytes, channel.exists && from >= 0);
        }
      }
    }
    __device__ __forceinline__ void store(unsigned stage, int lane) const {
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
        const unsigned start = target[t] & kAbsolute ? target[t] & ~kAbsolute : stage + target[t];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          ptx::store_transposed(start ^ 16 * (first_piece + i), by_matrix(raw[t][i], lane));
        }
      }
    }
    // Matrix m gets register m ^ q.
    static __device__ __forceinline__ uint4 by_matrix(uint4 raw, int lane) {
      const uint4 near = lane & 1 ? make_uint4(raw.y, raw.x, raw.w, raw.z) : raw;
      return lane & 2 ? make_uint4(near.z, near.w, near.x, near.y) : near;
    }
  };

  static __device__ __forceinline__ uint4 load_16_bytes(const unsigned char* address, bool exists) {
    return exists ? __ldg(reinterpret_cast<const uint4*>(address)) : make_uint4(0, 0, 0, 0);
  }

  using Batch = typename Choose<Config::kUnitC, BatchByChannel, BatchByPosition>::type;
  // Whether the input may be such that vectors can be loaded. Vectors of 32-bit items lost (measured).
  static constexpr bool kMayHaveVectors =
      sizeof(Scalar) == 2 && !Config::kUnitC && Config::kReadStepW == Config::kParts;

  static constexpr int kTurns = (Config::kStageRows + Batch::kRows - 1) / Batch::kRows * Batch::kShares;
  static constexpr int kRound = kLoaderWarps * Batch::kTurns;
  static constexpr int kSharedBytes =
      kTableStart + (kTurns + kRound - 1) / kRound * kRound * Batch::kRows * 8;
  static_assert(kSharedBytes <= Config::kSharedBytes, "the planner asked for too little shared memory");
  static_assert(kHalfBytes % 1024 == 0 && kPanelBytes % 8 == 0, "swizzles start at multiples of 1024");
  static_assert(Config::kResident || Config::kSlotBytes % 1024 == 0, "swizzles start at multiples of 1024");

  struct Shared {
    unsigned base;
    __device__ __forceinline__ unsigned stage(unsigned i) const { return base + i * kStageBytes; }
    __device__ __forceinline__ unsigned panels() const { return base + Config::kStages * kStageBytes; }
    __device__ __forceinline__ unsigned slot(unsigned i) const { return panels() + i * Config::kSlotBytes; }
    __device__ __forceinline__ unsigned barrier(unsigned i) const { return panels() + kPanelBytes + 8 * i; }
    __device__ __forceinline__ unsigned stage_full(unsigned i) const { return barrier(i); }
    __device__ __forceinline__ unsigned stage_empty(unsigned i) const { return barrier(Config::kStages + i); }
    // The first consumer is ahead, the second has seen it.
    __device__ __forceinline__ unsigned ahead() const { return barrier(kRingBarriers); }
    __device__ __forceinline__ unsigned seen() const { return barrier(kRingBarriers + 1); }
    __device__ __forceinline__ unsigned panels_full() const { return barrier(2 * Config::kStages); }
    __device__ __forceinline__ unsigned slot_full(unsigned i) const {
      return barrier(2 * Config::kStages + i);
    }
    __device__ __forceinline__ unsigned slot_empty(unsigned i) const {
      return barrier(2 * Config::kStages + Config::kSlots + i);
    }
  };

  static __device__ __forceinline__ Place place(const Args& args, int work) {
    Place at;
    const int unit = kPaired ? work / 2 : work, rank = kPaired ? work % 2 : 0;
    at.column_tile = unit % kColumnTiles;
    int rest = (kPaired ? 2 : 1) * (unit / kColumnTiles) + rank, d = 0;
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

  // What a loader warp does, one batch after the other, across chunks, planes and tiles.
  template <class Batch>
  struct Course {
    int warp, lane, batches;
    int work, plane, source, chunk, batch, planes;
    const unsigned char *plane_start, *x;  // of the plane, of the chunk

    __device__ __forceinline__ bool start(const Args& args, int from) {
      plane = source = chunk = batch = 0;
      for (work = from; work < args.work; work += gridDim.x) {
        planes = fed_planes(args, place(args, work));
        if (planes > 0) {
          find(args);
          return true;
        }
      }
      return false;
    }
    // Where the turns of this warp read and write.
    __device__ __forceinline__ void find(const Args& args) {
      const Place at = place(args, work);
      __syncwarp();  // lanes that share an entry have read the last tile's
#pragma unroll 1
      for (int turn = warp; turn < batches * Batch::kTurns * kLoaderWarps; turn += kLoaderWarps) {
        Batch::find(args, at, source, turn, warp, lane);
      }
      __syncwarp();
      const long long first = at.first_group() * Config::kIn * args.x_stride.c +
                              (Config::kMarch ? at.first_plane * args.x_stride.d : 0);
      x = plane_start = static_cast<const unsigned char*>(args.x) + first * static_cast<int>(sizeof(Scalar));
    }
    __device__ __forceinline__ bool advance(const Args& args) {
      if (++batch < batches) return true;
      batch = 0;
      if constexpr (Layout::kDense) {
        x += Layout::kPartItems * static_cast<int>(sizeof(Scalar)) * args.x_stride.c;
      }
      if (++chunk < kChunks) return true;
      chunk = 0;
      if constexpr (Config::kSources > 1) {
        if (++source < Config::kSources) {
          find(args);
          return true;
        }
      }
      x = plane_start += static_cast<int>(sizeof(Scalar)) * args.x_stride.d;
      if (++plane < planes) return true;
      return start(args, work + gridDim.x);
    }
    __device__ __forceinline__ void load(const Args& args, Batch& next) const {
      next.load(args, x, chunk, batch * Batch::kTurns * kLoaderWarps + warp, lane);
    }
  };

  template <class Batch>
  static __device__ __forceinline__ void load_halos(const Args& args, const Shared& shared, int warp,
                                                    int lane) {
    constexpr int kAtOnce = kLoaderWarps * Batch::kTurns;
    Ring<Config::kStages> ring;
    Course<Batch> course;
    course.warp = warp;
    course.lane = lane;
    course.batches = (Batch::turns(args) + kAtOnce - 1) / kAtOnce;
    if (!course.start(args, blockIdx.x)) return;
    // Loads the next batch, then stores the present one. False: there is no next.
    const auto step = [&](const Batch& present, Batch& next) {
      const bool first = course.batch == 0, last = course.batch == course.batches - 1;
      const bool more = course.advance(args);
      if (more) course.load(args, next);
      if (first) ptx::barrier_wait(shared.stage_empty(ring.index), ring.parity ^ 1);
      present.store(shared.stage(ring.index), lane);
      if (last) {
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared.stage_full(ring.index));
        ring.advance();
      }
      return more;
    };
    Batch even, odd;  // two names, so that nothing is copied while it is on its way
    course.load(args, even);
    while (step(even, odd) && step(odd, even)) {
    }
  }
  static __device__ __forceinline__ void load_halos(const Args& args, const Shared& shared, int warp,
                                                    int lane) {
    if constexpr (kMayHaveVectors) {
      if (args.vectors > 0) {
        load_halos<BatchTransposed>(args, shared, warp, lane);
        return;
      }
    }
    load_halos<Batch>(args, shared, warp, lane);
  }

  // ---- producers: the panels

  static __device__ __forceinline__ const unsigned char* packed(const Args& args, int column_tile) {
    return static_cast<const unsigned char*>(args.packed) +
           static_cast<long long>(column_tile) * Layout::kTileBytes;
  }

  // Panels are what the launch before has packed, and all that this kernel needs of it: halos are loaded
  // without waiting for it. Every block has a thread here, so this launch ends after that one.

  // All panels of the column tile, which is the same for all work of this block.
  static __device__ __forceinline__ void load_resident_panels(const Args& args, const Shared& shared) {
    constexpr int kCopy = 32 * 1024;
    const unsigned char* from = packed(args, blockIdx.x % kColumnTiles);
    ptx::wait_for_previous_launch();
    ptx::barrier_arrive_expect(shared.panels_full(), Layout::kTileBytes);
    for (int done = 0; done < Layout::kTileBytes; done += kCopy) {
      const int bytes = Layout::kTileBytes - done < kCopy ? Layout::kTileBytes - done : kCopy;
      ptx::bulk_copy(shared.panels() + done, from + done, bytes, shared.panels_full());
    }
  }

  static __device__ __forceinline__ void fetch_panel(const Shared& shared, unsigned slot,
                                                     const unsigned char* from, unsigned bytes) {
    if constexpr (kPaired) {
      const unsigned half = bytes / 2, start = ptx::cluster_rank() * half;
      ptx::bulk_copy_to_cluster(shared.slot(slot) + start, from + start, half, shared.slot_full(slot), 3);
    } else {
      ptx::bulk_copy(shared.slot(slot), from, bytes, shared.slot_full(slot));
    }
  }

  static __device__ __forceinline__ void stream_panels(const Args& args, const Shared& shared) {
    ptx::wait_for_previous_launch();
    Ring<Config::kSlots> ring;
    for (int work = blockIdx.x; work < args.work; work += gridDim.x) {
      const Place at = place(args, work);
      const int rounds = fed_planes(args, at) * args.passes;
      for (int round = 0; round < rounds; ++round) {
        const unsigned char* from = packed(args, at.column_tile);
        for (int chunk = 0; chunk < Config::kSources * kChunks; ++chunk) {
          const int source = Config::kSources == 1 ? 0 : chunk / kChunks;
          for (int p = 0; p < Config::kPatterns; ++p) {
            const unsigned bytes = Layout::panel_bytes(p);
            for (int s = 0; s < Layout::shifts(source, p); ++s, ring.advance(), from += bytes) {
              ptx::barrier_wait(shared.slot_empty(ring.index), ring.parity ^ 1);
              ptx::barrier_arrive_expect(shared.slot_full(ring.index), bytes);
              fetch_panel(shared, ring.index, from, bytes);
            }
          }
        }
      }
    }
  }

  // ---- consumers

  static constexpr int kSums = kColumns / 2;  // registers of one slab
  using Sums = float[Config::kSlabs][kSums];

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

  // Which buffers the matrix instructions before the last committed group have finished with.
  struct Finished {
    static constexpr unsigned kNone = 0xFFFFFFFFu;
    unsigned slot = kNone, stage = kNone;
    __device__ __forceinline__ void release(const Shared& shared, int lane) {
      if (lane == 0 && stage != kNone) ptx::barrier_arrive(shared.stage_empty(stage));
      if constexpr (kPaired) {  // both blocks write to the slot
        if (lane < 2 && slot != kNone) ptx::barrier_arrive_in(shared.slot_empty(slot), lane);
      } else {
        if (lane == 0 && slot != kNone) ptx::barrier_arrive(shared.slot_empty(slot));
      }
      slot = stage = kNone;
    }
  };

  struct Consumer {
    Shared shared;
    int index, lane;
    Ring<Config::kStages> stages;
    Ring<Config::kResident ? 1 : Config::kSlots> slots;
    Finished finished;
    int warp;        // in the warpgroup
    float* scratch;  // of the warp
    int panel;       // of this tile (of this plane, when marching)
    unsigned lead_parity = 0;
  };

  // The second consumer begins a tile (or plane) when the first is kLead panels into it: so that one stores
  // while the other multiplies, where both would store at the same time, and leave the tensor cores idle.
  static __device__ __forceinline__ void keep_behind(Consumer& me) {
    me.panel = 0;
    if (Config::kLead == 0 || me.index == 0) return;
    ptx::barrier_wait(me.shared.ahead(), me.lead_parity);
    me.lead_parity ^= 1;
    __syncwarp();  // all lanes have passed: what follows lets the barrier move on
    if (me.lane == 0) ptx::barrier_arrive(me.shared.seen());
  }
  static __device__ __forceinline__ void announce_lead(Consumer& me) {
    if (Config::kLead == 0 || me.index != 0 || ++me.panel != Config::kLead) return;
    ptx::barrier_wait(me.shared.seen(), me.lead_parity ^ 1);  // the lead before this
    me.lead_parity ^= 1;
    __syncwarp();
    if (me.lane == 0) ptx::barrier_arrive(me.shared.ahead());
  }

  // The products of one panel: all units that its shift feeds, all slabs, all steps of the chunk.
  template <int kPattern, int kSteps>
  static __device__ __forceinline__ void multiply_panel(Sums& sums,
                                                        const unsigned long long (&a)[Config::kSlabs],
                                                        unsigned long long b, unsigned displacement) {
    constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
    static_for<Config::kGroupsPerTile>([&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      constexpr int kFirstStep = kGroup * Config::kGroupSlots / Layout::kStepItems;
      constexpr int kGroupSteps =
          Config::kGroupsPerTile > 1 ? Config::kGroupSlots / Layout::kStepItems : kSteps;
#pragma unroll
      for (int step = 0; step < kGroupSteps; ++step) {
        const unsigned k = 32 * (kFirstStep + step);
        static_for<Layout::units(kPattern)>([&](auto u) {
          constexpr int kPlace = decltype(u)::value;  // of the unit in the panel
          constexpr int kUnit = Config::kUnit(Config::kPatternUnit(kPattern) + kPlace);
          constexpr int kFirst = kGroup * Layout::kGroupColumns + kUnit * Layout::kUnitColumns;
          const unsigned long long panel =
              ptx::advance(b, kPlace * Layout::kUnitColumns * Layout::kPartBytes + k);
          static_for<Config::kSlabs>([&](auto m) {
            constexpr int kSlab = decltype(m)::value;
            ptx::MatrixMultiply<Layout::kUnitColumns>::template issue<kOperand>(
                &sums[kSlab][kFirst / 2], ptx::advance(a[kSlab], displacement + k), panel);
          });
        });
      }
    });
  }

  // Strict float32: the three products of a panel, the small ones first.
  template <int kPattern, int kSteps>
  static __device__ __forceinline__ void multiply_halves(Sums& sums,
                                                         const unsigned long long (&a)[Config::kSlabs],
                                                         unsigned long long b, unsigned displacement) {
    const unsigned long long low = ptx::advance(b, Layout::half_rows(kPattern) * Layout::kPartBytes);
    multiply_panel<kPattern, kSteps>(sums, a, b, displacement + kHalfBytes);
    multiply_panel<kPattern, kSteps>(sums, a, low, displacement);
    multiply_panel<kPattern, kSteps>(sums, a, b, displacement);
  }

  // Tensor cores round every sum towards zero, so that a long chain of products drifts. Strict float32 adds
  // the sums of each panel, of the units it feeds, to totals, by additions that round to nearest. What they
  // round off is what the sums of the next panel start from.
  template <int kPattern>
  static __device__ __forceinline__ void add_to_totals(Sums& totals, Sums& sums) {
    static_for<Config::kSlabs * Config::kGroupsPerTile * Layout::units(kPattern)>([&](auto i) {
      constexpr int kIndex = decltype(i)::value, kUnits = Layout::units(kPattern);
      constexpr int kSlab = kIndex / kUnits / Config::kGroupsPerTile;
      constexpr int kGroup = kIndex / kUnits % Config::kGroupsPerTile;
      constexpr int kUnit = Config::kUnit(Config::kPatternUnit(kPattern) + kIndex % kUnits);
      constexpr int kFirst = (kGroup * Layout::kGroupColumns + kUnit * Layout::kUnitColumns) / 2;
#pragma unroll
      for (int k = kFirst; k < kFirst + Layout::kUnitColumns / 2; ++k) {
        ptx::add_keeping_rest(totals[kSlab][k], sums[kSlab][k]);
      }
    });
  }

  // The compiler must not move what happens to the sums into the matrix instructions' way.
  static __device__ __forceinline__ void pin(Sums& sums) {
#pragma unroll
    for (int m = 0; m < Config::kSlabs; ++m) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) ptx::pin(sums[m][i]);
    }
  }

  // Adds chunks of a source, of so many steps, to the sums. The last panel's products may be unfinished in
  // the end. Strict float32: to the totals, which are other registers.
  template <int kSteps>
  static __device__ __forceinline__ void multiply_chunks(const Args& args, Consumer& me, Sums& totals,
                                                         Sums& sums, const Slab (&slabs)[Config::kSlabs],
                                                         int source, int first, int end, bool last_pass) {
    const unsigned group_bytes = args.group_rows * Config::kRowBytes;
    const int line = args.halo.w * args.items, sheet = args.halo.h * line;
    for (int chunk = first; chunk < end; ++chunk, me.stages.advance()) {
      ptx::barrier_wait(me.shared.stage_full(me.stages.index), me.stages.parity);
      const unsigned stage = me.shared.stage(me.stages.index);
      unsigned long long a[Config::kSlabs];
#pragma unroll
      for (int m = 0; m < Config::kSlabs; ++m) {
        a[m] =
            ptx::matrix_descriptor<Config::kRowBytes>(stage + slabs[m].row * Config::kRowBytes, group_bytes);
      }
      static_for<Config::kPatterns>([&](auto p) {
        constexpr int kPattern = decltype(p)::value;
        const int first_shift = Layout::first_shift(source, kPattern);
        const int last_shift = Layout::first_shift(source, kPattern + 1);
#pragma unroll 1
        for (int shift = first_shift; shift < last_shift; ++shift) {
          unsigned panel;
          if constexpr (Config::kResident) {
            panel = me.shared.panels() + Layout::chunk_start(source, chunk) +
                    Layout::rows_before(source, kPattern) * Layout::kPartBytes +
                    (shift - first_shift) * Layout::panel_bytes(kPattern);
          } else {
            panel = me.shared.slot(me.slots.index);
            ptx::barrier_wait(me.shared.slot_full(me.slots.index), me.slots.parity);
          }
          const int rows = Config::kShift(shift, 0) * sheet + Config::kShift(shift, 1) * line +
                           Config::kShift(shift, 2) * args.items;
          ptx::matrix_fence();
          const auto b = ptx::matrix_descriptor<Layout::kPartBytes>(panel, 8 * Layout::kPartBytes);
          const unsigned displacement =
              rows * Config::kRowBytes + Config::kShift(shift, 3) * Layout::kPartBytes;
          if constexpr (kStrict) {
            multiply_halves<kPattern, kSteps>(sums, a, b, displacement);
          } else {
            multiply_panel<kPattern, kSteps>(sums, a, b, displacement);
          }
          ptx::matrix_commit();
          ptx::matrix_wait<kStrict ? 0 : 1>();
          me.finished.release(me.shared, me.lane);
          announce_lead(me);
          if constexpr (!Config::kResident) {
            me.finished.slot = me.slots.index;
            me.slots.advance();
          }
          if constexpr (kStrict) {
            me.finished.release(me.shared, me.lane);
            pin(sums);
            add_to_totals<kPattern>(totals, sums);
          }
        }
      });
      if (last_pass) me.finished.stage = me.stages.index;
    }
  }

  // Adds all chunks of the tile (of the plane, when marching) to the totals.
  static __device__ __forceinline__ void multiply(const Args& args, Consumer& me, Sums& totals,
                                                  const Slab (&slabs)[Config::kSlabs], bool last_pass) {
    if constexpr (kStrict) {
      Sums sums;
#pragma unroll
      for (int m = 0; m < Config::kSlabs; ++m) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[m][i] = nothing(args);
      }
      multiply_sources(args, me, totals, sums, slabs, last_pass);
    } else {
      multiply_sources(args, me, totals, totals, slabs, last_pass);
    }
  }
  static __device__ __forceinline__ void multiply_sources(const Args& args, Consumer& me, Sums& totals,
                                                          Sums& sums, const Slab (&slabs)[Config::kSlabs],
                                                          bool last_pass) {
    constexpr int kFull = Layout::kLastSteps == Layout::kPartSteps ? kChunks : kChunks - 1;
    pin(sums);
    keep_behind(me);
#pragma unroll 1
    for (int source = 0; source < Config::kSources; ++source) {
      if constexpr (kFull > 0) {
        multiply_chunks<Layout::kPartSteps>(args, me, totals, sums, slabs, source, 0, kFull, last_pass);
      }
      if constexpr (kFull < kChunks) {
        multiply_chunks<Layout::kLastSteps>(args, me, totals, sums, slabs, source, kFull, kChunks, last_pass);
      }
    }
    ptx::matrix_wait<0>();
    pin(sums);
    me.finished.release(me.shared, me.lane);
  }

  // A lane's columns of a field: 2*(lane%4) and the next, in every 8.
  static __device__ __forceinline__ int first_column(int lane) { return lane % 4 * 2; }

  // A zero that the compiler cannot know, to add to a value that becomes a sum. Of a mere copy it thinks that
  // it is one value in two places, and then keeps matrix instructions apart that could overlap.
  static __device__ __forceinline__ float nothing(const Args& args) {
    return ptx::bits_to_float(static_cast<unsigned>(args.batch >> 31));
  }

  // What a field's sums start from.
  static __device__ __forceinline__ float bias(const Args& args, const Place& at, int group, int out) {
    if constexpr (!Config::kBias) return 0.0f;
    if (at.first_out() + out >= Config::kOut) return 0.0f;
    const int channel = (at.first_group() + group) * Config::kOut + at.first_out() + out;
    return widen<float>(load_constant(static_cast<const Scalar*>(args.bias) + channel));
  }
  static __device__ __forceinline__ void start_fields(const Args& args, const Place& at, Sums& sums, int lane,
                                                      int first_field) {
#pragma unroll
    for (int group = 0; group < Config::kGroupsPerTile; ++group) {
#pragma unroll
      for (int j = 0; j < Config::kOutTile / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float value = bias(args, at, group, 8 * j + first_column(lane) + e) + nothing(args);
#pragma unroll
          for (int field = 0; field < Config::kFields; ++field) {
            if (field < first_field) continue;
            const int column = group * Layout::kGroupColumns + field * Config::kOutTile + 8 * j;
#pragma unroll
            for (int m = 0; m < Config::kSlabs; ++m) {
              sums[m][column / 2 + e] = value;
              sums[m][column / 2 + 2 + e] = value;
            }
          }
        }
      }
    }
  }

  // After a plane of a march: its first output planes are stored, the window moves on.
  static __device__ __forceinline__ void move_window(const Args& args, const Place& at, Sums& sums,
                                                     int lane) {
    constexpr int kStored = Config::kStrideD * Config::kSheetFields;
    constexpr int kKept = Config::kFields - kStored;
    static_assert(Config::kGroupsPerTile == 1, "a march has one group");
#pragma unroll
    for (int m = 0; m < Config::kSlabs; ++m) {
#pragma unroll
      for (int i = 0; i < kKept * Config::kOutTile / 2; ++i) {
        sums[m][i] = sums[m][i + kStored * Config::kOutTile / 2] + nothing(args);
      }
    }
    start_fields(args, at, sums, lane, kKept);
  }

  // The outputs of one position of a slab: which, and where phase 0 of them lies.
  struct Target {
    bool exists;
    int n;  // of the tile's batch items
    int d, h, w;
    long long start;  // in the tile's first channel
  };
  static __device__ __forceinline__ Target target(const Args& args, const Place& at, const Slab& slab,
                                                  int plane, int row_of_slab) {
    const int step = row_of_slab / 8 * args.group_rows + row_of_slab % 8;
    const int row = slab.row + step + at.start;
    const int position = divide(row, args.by_items), item = row - position * args.items;
    const int line = divide(position, args.halo_w), w = position - line * args.halo.w;
    const int sheet = divide(line, args.halo_h), h = line - sheet * args.halo.h;
    const int n = Config::kMarch ? item + sheet : item;
    Target to;
    to.exists = slab.exists && slab.first + step < args.run && at.n + n < args.batch && w < args.tile.w &&
                h < args.tile.h && sheet < (Config::kMarch ? args.sheets : args.tile.d);
    to.n = n;
    to.d = Config::kMarch ? plane * Config::kStrideD - Config::kPaddingD
                          : (at.d + sheet) * Config::kStrideD + Config::kOffset(at.variant(), 0);
    to.h = (at.h + h) * Config::kStrideH + Config::kOffset(at.variant(), 1);
    to.w = (at.w + w) * Config::kStrideW + Config::kOffset(at.variant(), 2);
    const int channel = at.first_group() * Config::kOut + at.first_out();
    to.start = (at.n + n) * args.y_stride.n + channel * args.y_stride.c + offset(args, to.d, to.h, to.w);
    return to;
  }

  static __device__ __forceinline__ Offset offset(const Args& args, int d, int h, int w) {
    return static_cast<Offset>(d) * static_cast<Offset>(args.y_stride.d) +
           static_cast<Offset>(h) * static_cast<Offset>(args.y_stride.h) +
           static_cast<Offset>(w) * static_cast<Offset>(args.y_stride.w);
  }
  // From phase 0 of a position in the tile's first channel to a field of one of the tile's groups.
  static __device__ __forceinline__ long long field_start(const Args& args, int group, int field) {
    return group * Config::kOut * args.y_stride.c +
           offset(args, Config::kField(field, 0), Config::kField(field, 1), Config::kField(field, 2));
  }

  // Whether the output of a field is one, and this tile's to store: along depth, and otherwise.
  static __device__ __forceinline__ bool deep(const Args& args, const Place& at, int d) {
    return Config::kMarch ? d >= at.d && d < at.last_output : d < args.output.d;
  }
  static __device__ __forceinline__ bool flat(const Args& args, const Target& to, int field) {
    return to.exists && to.h + Config::kField(field, 1) < args.output.h &&
           to.w + Config::kField(field, 2) < args.output.w;
  }
  // A march stores the window's first planes.
  static __device__ constexpr bool complete(int field) {
    return !Config::kMarch || Config::kField(field, 0) < Config::kStrideD;
  }

  // Two neighbours in memory, by one access if the address allows it.
  static __device__ __forceinline__ void store_pair(Scalar* address, float first, float second, bool both) {
    using Pair = Vector<Scalar, 2>;
    if (both && reinterpret_cast<unsigned long long>(address) % sizeof(Pair) == 0) {
      Pair pair;
      pair.at[0] = Narrow<Scalar>::from(first);
      pair.at[1] = Narrow<Scalar>::from(second);
      *reinterpret_cast<Pair*>(address) = pair;
    } else {
      *address = Narrow<Scalar>::from(first);
      if (both) address[1] = Narrow<Scalar>::from(second);
    }
  }

  // One field of one position: a lane's channels.
  static __device__ __forceinline__ void store_field(const Args& args, const Place& at, const Target& to,
                                                     int lane, int group, int field, const float* sums) {
    if (!(deep(args, at, to.d + Config::kField(field, 0)) && flat(args, to, field))) return;
    const int out = at.first_out() + first_column(lane);
    Scalar* y =
        static_cast<Scalar*>(args.y) + to.start + field_start(args, group, field) + first_column(lane);
#pragma unroll
    for (int j = 0; j < Config::kOutTile / 8; ++j, y += 8) {
      if (Config::kOut % Config::kOutTile && out + 8 * j >= Config::kOut) break;
      const bool both = Config::kOut % 2 == 0 || out + 8 * j + 1 < Config::kOut;
      store_pair(y, sums[4 * j], sums[4 * j + 1], both);
    }
  }

  // Contiguous along channels: a lane stores its pairs of channels where they are.
  static __device__ __forceinline__ void store_by_channel(const Args& args, const Place& at, const Sums& sums,
                                                          const Slab (&slabs)[Config::kSlabs], int plane,
                                                          int warp, int lane) {
    static_for<Config::kSlabs>([&](auto m) {
      constexpr int kSlab = decltype(m)::value;
      static_for<2>([&](auto half) {
        constexpr int kHalf = decltype(half)::value;
        const Target to = target(args, at, slabs[kSlab], plane, 16 * warp + 8 * kHalf + lane / 4);
        static_for<Config::kGroupsPerTile>([&](auto group) {
          constexpr int kGroup = decltype(group)::value;
          constexpr int kFirst = kGroup * Layout::kGroupColumns / 2 + 2 * kHalf;
          static_for<Config::kFields>([&](auto field) {
            constexpr int kField = decltype(field)::value;
            if constexpr (complete(kField)) {
              store_field(args, at, to, lane, kGroup, kField,
                          &sums[kSlab][kFirst + kField * Config::kOutTile / 2]);
            }
          });
        });
      });
    });
  }

  // Contiguous along w: through scratch, so that a store covers neighbours along w. The two phases of a
  // warp's 16 positions are 32 neighbours of 8 channels; where a field has no partner, 16 positions of 16
  // channels.
  template <int kVector>
  static __device__ __forceinline__ void store_by_position(const Args& args, const Place& at,
                                                           const Consumer& me, const Sums& sums,
                                                           const Slab (&slabs)[Config::kSlabs], int plane) {
    static_for<Config::kSlabs>([&](auto m) {
      constexpr int kSlab = decltype(m)::value;
      const int row = 16 * me.warp;
      const Target by_pair =
          target(args, at, slabs[kSlab], plane, row + Lines<2, kVector>::position(me.lane));
      const Target by_one = target(args, at, slabs[kSlab], plane, row + Lines<1, kVector>::position(me.lane));
      static_for<Config::kGroupsPerTile>([&](auto group) {
        constexpr int kGroup = decltype(group)::value;
        static_for<Config::kFields>([&](auto field) {
          constexpr int kField = decltype(field)::value, kPartner = Config::kPartner(kField);
          if constexpr (kPartner != Config::kStoredByPartner && complete(kField)) {
            constexpr int kFirst = kGroup * Layout::kGroupColumns / 2, kWidth = kPartner >= 0 ? 2 : 1;
            const float* first = &sums[kSlab][kFirst + kField * Config::kOutTile / 2];
            const float* second =
                &sums[kSlab][kFirst + (kPartner >= 0 ? kPartner : kField) * Config::kOutTile / 2];
            Lines<kWidth, kVector>::store(args, at, me, kWidth == 2 ? by_pair : by_one, kGroup, kField, first,
                                          second);
          }
        });
      });
    });
  }

  // Lines of kWidth outputs for each of 16 positions, stored kVector at a time. In scratch a line is a row,
  // and its outputs are swizzled so that neither writing nor reading meets itself.
  template <int kWidth, int kVector>
  struct Lines {
    static constexpr int kLength = 16 * kWidth, kRows = kScratch / kLength;
    static constexpr int kChannels = kRows < Config::kOutTile ? kRows : Config::kOutTile;  // at a time
    static constexpr int kLanes = kLength / kVector;  // that store a channel
    static constexpr int kAtOnce = 32 / kLanes;       // channels

    // The (first) position, of the warp's 16, whose outputs a lane stores.
    static __device__ __forceinline__ int position(int lane) { return lane % kLanes * kVector / kWidth; }

    // Lines of 32: in the order of the channels. Lines of 16: of every 8 channels the even ones first.
    static __device__ constexpr int channel_of(int row) {
      return kWidth == 2 ? row : row / 8 * 8 + row % 4 * 2 + row / 4 % 2;
    }
    static __device__ __forceinline__ int swizzle(int row) {
      return kWidth == 2 ? row / 2 % 4 * 8 : row / 2 % 2 * 8;
    }

    // A lane's sums of 8 channels and two positions.
    static __device__ __forceinline__ void write(float* scratch, int lane, int j, const float* first,
                                                 const float* second) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * j + 2 * half + e, place = (8 * half + lane / 4) * kWidth;
          const int row = kWidth == 2 ? first_column(lane) : lane % 4;  // of e == 0
          float* to = scratch + row * kLength + (place ^ swizzle(row)) + e * (kWidth == 2 ? 1 : 4) * kLength;
          if constexpr (kWidth == 2) {
            *reinterpret_cast<Vector<float, 2>*>(to) = Vector<float, 2>{first[i], second[i]};
          } else {
            *to = first[i];
          }
        }
      }
    }

    static __device__ __forceinline__ void store(const Args& args, const Place& at, const Consumer& me,
                                                 const Target& to, int group, int field, const float* first,
                                                 const float* second) {
      const int h = to.h + Config::kField(field, 1), w = to.w + Config::kField(field, 2);
      const bool line = to.exists && deep(args, at, to.d + Config::kField(field, 0)) && h < args.output.h;
      const int phase = me.lane % kLanes * kVector % kWidth;  // of the first output
      const bool exists = line && w + phase < args.output.w;
      const int row = me.lane / kLanes, own = channel_of(row);
      Scalar* y = static_cast<Scalar*>(args.y) + to.start + field_start(args, group, field) + phase +
                  own * args.y_stride.c;
      ptx::pin(y);  // else the compiler begins at args.y for every store
      const float* from = me.scratch + row * kLength;
#pragma unroll
      for (int done = 0; done < Config::kOutTile; done += kChannels) {
        const int out = Config::kOut % Config::kOutTile == 0 ? 0 : Config::kOut - at.first_out();
        const int left = (out == 0 || out > Config::kOutTile ? Config::kOutTile : out) - done;
#pragma unroll
        for (int j = 0; j < kChannels / 8; ++j) {
          if (done + 8 * j < Config::kOutTile) {
            write(me.scratch + 8 * j * kLength, me.lane, done / 8 + j, first, second);
          }
        }
        __syncwarp();
        constexpr int kStores = (kChannels + kAtOnce - 1) / kAtOnce;
        Vector<Scalar, kVector> vectors[kStores];
#pragma unroll
        for (int i = 0; i < kStores; ++i) {
          const int place = me.lane % kLanes * kVector ^ swizzle(row + i * kAtOnce);
          vectors[i] = read(from + i * kAtOnce * kLength + place);
        }
        __syncwarp();  // the next lines may be written
        if (!exists) continue;
#pragma unroll
        for (int i = 0; i < kStores; ++i) {
          const int channel = channel_of(i * kAtOnce);
          const bool all = left >= kChannels && kChannels % kAtOnce == 0;  // for whole tiles: at compile time
          if (all || own + channel < left) store_vector(further(args, y, done + channel), vectors[i]);
        }
      }
    }
    static __device__ __forceinline__ Vector<Scalar, kVector> read(const float* from) {
      constexpr int kRead = kVector < 4 ? kVector : 4;
      Vector<Scalar, kVector> vector;
#pragma unroll
      for (int i = 0; i < kVector; i += kRead) {
        const auto some = load_vector<kRead>(from + i);
#pragma unroll
        for (int k = 0; k < kRead; ++k) vector.at[i + k] = Narrow<Scalar>::from(some.at[k]);
      }
      return vector;
    }
  };

  // The same output so many channels further on: where 32 bits hold a channel's volume, by one instruction.
  static __device__ __forceinline__ Scalar* further(const Args& args, Scalar* y, int channels) {
    if constexpr (Config::kWide) return y + channels * args.y_stride.c;
    const unsigned long long stride = static_cast<unsigned>(args.y_stride.c);
    return reinterpret_cast<Scalar*>(reinterpret_cast<unsigned char*>(y) +
                                     stride * (channels * sizeof(Scalar)));
  }

  static __device__ __forceinline__ void store_outputs(const Args& args, const Place& at, const Consumer& me,
                                                       const Sums& sums, const Slab (&slabs)[Config::kSlabs],
                                                       int plane) {
    constexpr int kLong = Config::kLongVectors ? 16 / static_cast<int>(sizeof(Scalar)) : 1;
    constexpr int kPair = Config::kPairs ? 2 : 1;
    if constexpr (Config::kOutputUnitC) {
      store_by_channel(args, at, sums, slabs, plane, me.warp, me.lane);
    } else if (kLong > 1 && args.vector == kLong) {
      store_by_position<kLong>(args, at, me, sums, slabs, plane);
    } else if (kPair > 1 && args.vector == kPair) {
      store_by_position<kPair>(args, at, me, sums, slabs, plane);
    } else {
      store_by_position<1>(args, at, me, sums, slabs, plane);
    }
  }

  // Applies the activation to the sums that are complete.
  static __device__ __forceinline__ void activate(Sums& sums) {
    static_for<Config::kFields>([&](auto field) {
      constexpr int kField = decltype(field)::value;
      if constexpr (complete(kField)) {
#pragma unroll
        for (int m = 0; m < Config::kSlabs; ++m) {
#pragma unroll
          for (int group = 0; group < Config::kGroupsPerTile; ++group) {
            float* first = &sums[m][(group * Layout::kGroupColumns + kField * Config::kOutTile) / 2];
#pragma unroll
            for (int i = 0; i < Config::kOutTile / 2; ++i) first[i] = Config::Epilogue::apply(first[i]);
          }
        }
      }
    });
  }

  static __device__ __forceinline__ void consume(const Args& args, const Shared& shared, int consumer,
                                                 int warp, int lane) {
    using AllMoments = HaloMoments<Config, Halo, Args>;
    Consumer me;
    me.shared = shared;
    me.index = consumer;
    me.lane = lane;
    me.warp = warp;
    me.scratch = reinterpret_cast<float*>(dynamic_shared<unsigned char>() + kScratchStart +
                                          consumer * kScratchBytes + warp * (kScratchBytes / 4));
    Sums sums;
    if constexpr (Config::kResident) ptx::barrier_wait(shared.panels_full(), 0);
    for (int work = blockIdx.x; work < args.work; work += gridDim.x) {
      const Place at = place(args, work);
      const Ring<Config::kStages> first_stage = me.stages;
      for (int pass = 0; pass < args.passes; ++pass) {
        me.stages = first_stage;
        Slab slabs[Config::kSlabs];
#pragma unroll
        for (int m = 0; m < Config::kSlabs; ++m) {
          slabs[m] = slab(args, (pass * Config::kConsumers + consumer) * Config::kSlabs + m);
        }
        start_fields(args, at, sums, lane, 0);
        const int fed = fed_planes(args, at);
        typename AllMoments::Kept moments;
        if constexpr (Config::Epilogue::kLeavesMoments && Config::kMarch) {
          moments.outputs = AllMoments::outputs(args, at, slabs, 0, 0, warp, lane);
        }
        for (int plane = 0; plane < at.planes; ++plane) {
          if (!Config::kMarch || plane < fed) multiply(args, me, sums, slabs, pass == args.passes - 1);
          activate(sums);
          store_outputs(args, at, me, sums, slabs, at.first_plane + plane);
          if constexpr (Config::Epilogue::kLeavesMoments) {
            const long long slot = AllMoments::slot(args, at, pass, 4 * consumer + warp);
            if constexpr (Config::kMarch) {
              AllMoments::add(args, at, sums, at.first_plane + plane, lane, moments);
              if (plane == at.planes - 1 && at.n < args.batch)
                AllMoments::store(args, at, at.n, slot, lane, moments);
            } else {
              AllMoments::leave(args, at, sums, slabs, slot, warp, lane);
            }
          }
          if constexpr (Config::kMarch) move_window(args, at, sums, lane);
        }
      }
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = Halo<Config>;
  const typename Kernel::Shared shared{ptx::shared_address(dynamic_shared<unsigned char>())};
  // Lane 0's, so that the compiler knows it to be the same for all lanes: what follows from it, above all
  // where operands lie, then is in uniform registers, as matrix instructions want it.
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::barrier_init(shared.stage_full(i), Kernel::kLoaderWarps);
      ptx::barrier_init(shared.stage_empty(i), Kernel::kConsumerWarps);
    }
    if constexpr (Config::kResident) {
      ptx::barrier_init(shared.panels_full(), 1);
    } else {
      for (int i = 0; i < Config::kSlots; ++i) {
        ptx::barrier_init(shared.slot_full(i), 1);
        ptx::barrier_init(shared.slot_empty(i), Config::kClusterSize * Kernel::kConsumerWarps);
      }
    }
    ptx::barrier_init(shared.ahead(), 4);
    ptx::barrier_init(shared.seen(), 4);
    ptx::fence_barrier_init();
  }
  if constexpr (Kernel::kPaired) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }

  if (threadIdx.x < Kernel::kProducerThreads) {
    ptx::keep_registers<Config::kProducerRegisters>();
    if constexpr (Config::kResident) {
      if (threadIdx.x == 0) Kernel::load_resident_panels(args, shared);
      Kernel::load_halos(args, shared, warp, lane);
    } else if (warp == 0) {
      if (lane == 0) Kernel::stream_panels(args, shared);
    } else {
      Kernel::load_halos(args, shared, warp - 1, lane);
    }
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    Kernel::consume(args, shared, (warp - Kernel::kProducerThreads / 32) / 4, warp % 4, lane);
  }
  if constexpr (Kernel::kPaired) ptx::cluster_sync();  // until the other no longer writes here
}

}  // namespace tconv3d
