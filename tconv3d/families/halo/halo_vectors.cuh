// How the halo kernel's loaders bring 16-bit input to a stage by vectors along w, which the store to shared
// memory transposes.
#pragma once

#include "any_address.cuh"
#include "halo_positions.cuh"

namespace tconv3d {

// Input rows of 16-bit values that begin and end at multiples of 16 bytes are loaded by aligned vectors of 16
// bytes; values beside the halo are loaded too, and dropped. Where every tile has whole lines, rows of a
// stage left and right of the input are the same for all tiles: they are cleared at the start of the kernel,
// and nobody writes to them. In a run these rows are the same for all planes of a tile: they are cleared when
// the tile begins (`clear`). A run takes the vectors of its lines in sequence, from the first that it touches
// on. `place` is the index of a vector's first value in the halo's line.
template <class Config>
struct HaloVectors {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;
  using Offset = typename Tile::Offset;
  using Positions = HaloPositions<Config>;

  static constexpr int kVectorItems = Layout::kPieceItems;
  // Vectors that are stored together. They belong to one line if the vectors of a line are a multiple of this
  // number; their rows then lie in different banks.
  static constexpr int kTogether = 4;
  static_assert((Config::kReadStepW & (Config::kReadStepW - 1)) == 0, "whole vectors of phases");
  struct InputVector {
    long long from;  // offset in bytes, as in a Position
    int first_row, place, end;
  };
  static __device__ __forceinline__ InputVector input_vector(const Args& args, const Place& at, int source,
                                                             int index) {
    InputVector v;
    const int origin = at.variant() + source;
    const int start = (at.w + Config::kOrigin(origin, 2)) * Config::kReadStepW;
    const int first_w = (args.whole_lines || args.gaps) && start < 0 ? 0 : start & -kVectorItems;
    const int before = Config::kMarch ? divide(at.start, args.halo_w) : 0;  // lines before the run's first
    const int behind = (at.start - before * args.halo.w + start - first_w) / kVectorItems;
    const int in_each = static_cast<int>(args.by_vectors.divisor);
    const int first = behind < 0 ? 0 : behind < in_each ? behind : in_each;
    const int number = index + (in_each % kTogether == 0 ? first & -kTogether : first);
    const int line = divide(number, args.by_vectors);
    const int of_run = line + before;
    const int sheet = divide(of_run, args.halo_h), h = of_run - sheet * args.halo.h;
    const int x_d = Config::kMarch ? 0
                                   : (at.d + Config::kOrigin(origin, 0) + sheet) * Config::kReadStepD +
                                         Config::kReadPhase(source, 0);
    const int x_h =
        (at.h + Config::kOrigin(origin, 1) + h) * Config::kReadStepH + Config::kReadPhase(source, 1);
    const int x_w = first_w + kVectorItems * (number - line * in_each);
    v.first_row = of_run * args.halo.w - at.start;
    v.place = x_w - start;
    v.end = index < args.vectors ? args.halo.w * Config::kReadStepW : 0;
    const Offset offset = static_cast<Offset>(x_d) * static_cast<Offset>(args.x_stride.d) +
                          static_cast<Offset>(x_h) * static_cast<Offset>(args.x_stride.h) + x_w;
    const int n = Config::kMarch ? at.n + sheet : at.n;
    const bool read = v.place < v.end && n < args.batch && Tile::inside(x_d, args.input.d) &&
                      Tile::inside(x_h, args.input.h) && Tile::inside(x_w, args.input.w);
    v.from = read ? (n * args.x_stride.n + offset) * static_cast<int>(sizeof(Scalar)) : Positions::kNowhere;
    return v;
  }
  // Returns where a value of a vector begins in a stage. A value outside the halo goes to the 128 bytes from
  // `beside` on, into the banks that it would have in the stage, so that rows of a matrix have no bank
  // conflict.
  static __device__ __forceinline__ unsigned item_start(const Args& args, const InputVector& v, int item,
                                                        unsigned beside) {
    const int place = v.place + item;
    const int row = v.first_row + (place & -Config::kReadStepW) / Config::kReadStepW;
    const unsigned start =
        Positions::row_start(0, row) ^ 16 * (place & (Config::kReadStepW - 1)) * Layout::kPartPieces;
    return Tile::inside(place, v.end) && Tile::inside(row, args.rows) ? start : beside + start % 128;
  }
  // Clears the rows of a stage that lie between the lines of a run, where there is no input. All loaders call
  // it.
  static __device__ __forceinline__ void clear(const Args& args, int start, unsigned stage, int thread) {
#pragma unroll 1
    for (int row = thread; row < args.rows; row += 32 * HaloShared<Config>::kLoaderWarps) {
      const int line = divide(start + row, args.halo_w);
      const int w = start + row - line * args.halo.w + Config::kOrigin(0, 2);
      if (Tile::inside(w, args.input.w)) continue;
#pragma unroll
      for (int i = 0; i < Layout::kRowPieces; ++i) {
        ptx::store_shared(stage + row * Config::kRowBytes + 16 * i, make_uint4(0, 0, 0, 0));
      }
    }
    __syncwarp();
  }
  // Number of pieces that tensor cores read; only these are loaded. kWholePieces says whether all of their
  // values are channels.
  static constexpr int kUsedPieces = Layout::kChunks > 1 ? Layout::kPartPieces : 2 * Layout::kLastSteps;
  static constexpr bool kWholePieces =
      Layout::kDense &&
      Layout::kSlots % (Layout::kChunks > 1 ? Layout::kPartItems : Layout::kPieceItems * kUsedPieces) == 0;
  // The offset from a vector of channel 0 of the chunk to the vector of item `c` of a piece, and whether this
  // channel exists.
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
};

// A batch of 16-bit values, which the store transposes. In a turn, lane 4*c + q has channel c of a piece in
// vector q of the turn's four, two values to a register. A transposing store takes one register of every lane
// as a matrix whose rows, two from each vector, may lie anywhere; it writes 8 channels of a position to each
// row. Vectors give their registers to matrices in such an order that the rows of a matrix lie in different
// banks.
// A batch may have two turns, 128 bytes of a line or of two lines. The hardware serves 8 lanes at a time,
// which have two channels: they load one half of a cache line for one channel and the other half for the
// other, so that the halves come out of different banks of L1. Odd channels thus load the values of one turn
// in the other. Layers with 48 channels are 8% faster by this on an H200; 32 or 64 channels, which have four
// pieces in a turn, are up to 10% faster with one turn.
template <class Config>
struct BatchTransposed {
  using Vectors = HaloVectors<Config>;
  using Shared = HaloShared<Config>;
  using Place = typename HaloTile<Config>::Place;

  static constexpr int kUsed = Vectors::kUsedPieces;
  static constexpr int kPieces = kUsed == 6 || kUsed < 4 ? 2 : 4, kTurns = 4 / kPieces;
  static constexpr int kShares = kUsed / kPieces;
  static constexpr bool kClears = Config::kMarch;
  static_assert(kUsed % kPieces == 0, "whole batches");
  uint4 raw[kTurns][kPieces];
  unsigned target[kTurns];
  int first_piece;

  // The sources and targets of a turn; target[lane] is the row of a matrix that the lane addresses.
  struct Turn {
    unsigned target[32];
    long long from[4];
  };
  // Marks an absolute address, for values beside the halo, instead of one relative to the stage.
  static constexpr unsigned kAbsolute = 0x80000000u;
  static constexpr int kBesideStart = (Shared::kTableStart + 127) / 128 * 128;  // 128 bytes of each warp
  static __device__ __forceinline__ Turn* table() {
    return reinterpret_cast<Turn*>(dynamic_shared<unsigned char>() + kBesideStart +
                                   128 * Shared::kLoaderWarps);
  }
  static constexpr int kVectors = kTurns * Vectors::kTogether;
  static __device__ __forceinline__ int turns(const Args& args) {
    return (args.vectors + kVectors - 1) / kVectors * kTurns * kShares;
  }
  // Returns the index of a batch among all batches of a stage, from its first turn.
  static __device__ __forceinline__ int batch_of(int turn, int warp) {
    return turn / (kTurns * Shared::kLoaderWarps) * Shared::kLoaderWarps + warp;
  }

  static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn,
                                              int warp, int lane) {
    unsigned own = lane;
    ptx::pin(own);  // keeps the compiler from holding derived values in registers from tile to tile
    const int q = own % 8 / 2, item = 2 * (own / 8 ^ q) + own % 2;
    const int first = batch_of(turn, warp) / kShares * kVectors;
    const int in_batch = turn / Shared::kLoaderWarps % kTurns * Vectors::kTogether;
    const auto vector = Vectors::input_vector(args, at, source, first + in_batch + q);
    const unsigned shared = ptx::shared_address(dynamic_shared<unsigned char>());
    Turn& to = table()[turn];
    to.target[own] =
        Vectors::item_start(args, vector, item, kAbsolute | (shared + kBesideStart + 128 * warp));
    if (own < 8 && own % 2 == 0) to.from[q] = vector.from;
  }
  __device__ __forceinline__ void load(const Args& args, const unsigned char* x, int chunk, unsigned turn,
                                       int lane) {
    first_piece = batch_of(turn, turn % Shared::kLoaderWarps) % kShares * kPieces;
#pragma unroll
    for (int t = 0; t < kTurns; ++t) {
      target[t] = table()[turn + t * Shared::kLoaderWarps].target[lane];
      const long long from =
          table()[turn + (kTurns == 2 ? t ^ lane / 4 % 2 : t) * Shared::kLoaderWarps].from[lane % 4];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const auto channel = Vectors::channel_offset(args, chunk, first_piece + i, lane / 4);
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
        const uint4 own = kTurns == 2 && lane & 4 ? raw[kTurns - 1 - t][i] : raw[t][i];
        ptx::store_transposed(start ^ 16 * (first_piece + i), by_matrix(own, lane));
      }
    }
  }
  // Returns the registers in the order of matrices: matrix m gets register m ^ q.
  static __device__ __forceinline__ uint4 by_matrix(uint4 raw, int lane) {
    const uint4 near = lane & 1 ? make_uint4(raw.y, raw.x, raw.w, raw.z) : raw;
    return lane & 2 ? make_uint4(near.z, near.w, near.x, near.y) : near;
  }
  static __device__ __forceinline__ uint4 load_16_bytes(const unsigned char* address, bool exists) {
    return exists ? ptx::load_calling(address) : make_uint4(0, 0, 0, 0);
  }
};

}  // namespace tconv3d
