// How the halo kernel's loaders bring 16-bit input with lines of any length to a stage: asynchronous copies
// bring pieces of lines past the registers to shared memory, and the loaders transpose them from there.
//
// A line begins at any element of a vector of 16 bytes in memory. The vectors that contain it are copied as
// they lie, and a lane loads its values from where they begin among them. Copies of several batches are in
// flight and take no registers. A batch is some pieces of channels of one turn, four vectors of one line
// (halo_vectors.cuh).
#pragma once

#include "halo_vectors.cuh"

namespace tconv3d {

template <class Config>
struct HaloTurns {
  using Layout = HaloLayout<Config>;
  using Positions = HaloPositions<Config>;
  using Scalar = typename Config::Scalar;
  using Shared = HaloShared<Config>;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;
  using Offset = typename Tile::Offset;
  using Vectors = HaloVectors<Config>;
  using Transposed = BatchTransposed<Config>;

  static constexpr int kItems = 8, kTogether = Vectors::kTogether;  // values of a vector, vectors of a turn
  static constexpr int kTurns = 1, kPieces = Transposed::kPieces, kShares = Vectors::kUsedPieces / kPieces;
  static constexpr int kChannels = 8;                        // channels of a piece
  static constexpr int kChannelBytes = 16 * kTogether + 16;  // a vector more than a turn has
  static constexpr int kPieceBytes = kChannels * kChannelBytes;

  // The line of a turn, and for every lane the row of a matrix that it addresses in a stage.
  struct Turn {
    unsigned target[32];
    long long from;  // offset in bytes of the first vector, as in a Position; the line may begin behind it
    int left;        // values from the first vector on that are read
    int before;      // vectors before the line, which are zero
  };
  // What a lane must know of a batch when it has arrived.
  struct Note {
    unsigned target;
    int shift;  // bytes from the start of the copied vector to that of the lane's; 0 before a line
  };
  // A batch on its way.
  struct Arriving {
    unsigned char pieces[kPieces * kPieceBytes];
    Note notes[32];
  };
  static constexpr int kAtOnce = 3;  // batches of a warp: one is stored, others are on their way
  static constexpr int kArrivingStart = (Shared::kTableStart + 127) / 128 * 128;
  static constexpr int kBesideStart =
      (kArrivingStart + Shared::kLoaderWarps * kAtOnce * static_cast<int>(sizeof(Arriving)) + 127) / 128 *
      128;
  static constexpr int kSharedBytes =
      kBesideStart + 128 * Shared::kLoaderWarps;  // without the table of turns
  static_assert(sizeof(Arriving) % 16 == 0, "vectors are aligned");

  static __device__ __forceinline__ Turn* table() {
    return reinterpret_cast<Turn*>(dynamic_shared<unsigned char>() + kBesideStart +
                                   128 * Shared::kLoaderWarps);
  }
  static __device__ __forceinline__ int turns(const Args& args) {
    return (args.vectors + kTogether - 1) / kTogether * kShares;
  }

  static __device__ __forceinline__ void find(const Args& args, const Place& at, int source, int turn,
                                              int warp, int lane) {
    TCONV3D_ASSUME(args.by_vectors.divisor % kTogether == 0);  // a turn lies in one line
    unsigned own = lane;
    ptx::pin(own);  // keeps the compiler from holding derived values in registers from tile to tile
    const int first = turn / kShares * kTogether, line = divide(first, args.by_vectors);
    const int origin = at.variant() + source;
    const int start = (at.w + Config::kOrigin(origin, 2)) * Config::kReadStepW;
    const int w = (start & -kItems) + kItems * (first - line * static_cast<int>(args.by_vectors.divisor));
    const int sheet = divide(line, args.halo_h), h = line - sheet * args.halo.h;
    const int x_d =
        (at.d + Config::kOrigin(origin, 0) + sheet) * Config::kReadStepD + Config::kReadPhase(source, 0);
    const int x_h =
        (at.h + Config::kOrigin(origin, 1) + h) * Config::kReadStepH + Config::kReadPhase(source, 1);
    const int end = first < args.vectors ? args.halo.w * Config::kReadStepW : 0;
    const int q = own % 8 / 2, item = 2 * (own / 8 ^ q) + own % 2;
    const unsigned shared = ptx::shared_address(dynamic_shared<unsigned char>());
    typename Vectors::InputVector vector;
    vector.first_row = line * args.halo.w;
    vector.place = w + kItems * q - start;
    vector.end = end;
    Turn& to = table()[turn];
    to.target[own] =
        Vectors::item_start(args, vector, item, Transposed::kAbsolute | (shared + kBesideStart + 128 * warp));
    if (own == 0) {
      const bool inside =
          at.n < args.batch && Tile::inside(x_d, args.input.d) && Tile::inside(x_h, args.input.h);
      const Offset offset = static_cast<Offset>(x_d) * static_cast<Offset>(args.x_stride.d) +
                            static_cast<Offset>(x_h) * static_cast<Offset>(args.x_stride.h) + w;
      to.from = (at.n * args.x_stride.n + offset) * static_cast<int>(sizeof(Scalar));
      const int of_line = args.input.w - w, of_halo = end - (w - start);
      to.left = inside ? (of_line < of_halo ? of_line : of_halo) : 0;
      to.before = w < 0 ? -w / kItems : 0;
    }
  }

  static __device__ __forceinline__ Arriving& arriving(int warp, int number) {
    return reinterpret_cast<Arriving*>(dynamic_shared<unsigned char>() +
                                       kArrivingStart)[warp * kAtOnce + number];
  }
  static __device__ __forceinline__ int first_piece(int turn) { return turn % kShares * kPieces; }

  // Copies a batch. Lane 4 * c + q has vector q of channel c of each piece, and lane 4 * c also the vector
  // behind the turn, which has values of the turn unless the line begins with a whole vector. Vectors before
  // the line are zeros, which is why they are not shifted.
  static __device__ __forceinline__ void copy(const Args& args, const unsigned char* x, int chunk, int turn,
                                              Arriving& to, int lane) {
    const Turn& found = table()[turn];
    const int c = lane / kTogether, q = lane % kTogether;
    const unsigned char* const channel_start = x + found.from;
    const int shift =
        static_cast<int>(offset_in_vector(channel_start + Vectors::channel_offset(args, chunk, 0, c).bytes));
    const int values = found.left > 0 && q >= found.before ? found.left - kItems * q : -kItems;
    const int behind = found.left > 0 && q == 0 && shift > 0 ? found.left - kItems * kTogether : -kItems;
    to.notes[lane] = {found.target[lane], q >= found.before ? shift : 0};
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto channel = Vectors::channel_offset(args, chunk, first_piece(turn) + i, c);
      const unsigned char* const from = channel_start + channel.bytes + (16 * q - shift);
      unsigned char* const piece = to.pieces + i * kPieceBytes + c * kChannelBytes;
      ptx::copy_beginning(piece + 16 * q, from, channel.exists ? bytes_of(values, shift) : 0);
      if (q == 0) {
        ptx::copy_beginning(piece + 16 * kTogether, from + 16 * kTogether,
                            channel.exists ? bytes_of(behind, shift) : 0);
      }
    }
  }
  // Returns the bytes of a vector in memory that hold values: they begin `shift` bytes before `values`
  // values.
  static __device__ __forceinline__ unsigned bytes_of(int values, int shift) {
    return static_cast<unsigned>(min(max(2 * values + shift, 0), 16));
  }

  // Stores a batch that has arrived.
  static __device__ __forceinline__ void store(unsigned stage, int turn, const Arriving& from, int lane) {
    const Note note = from.notes[lane];
    const unsigned start =
        note.target & Transposed::kAbsolute ? note.target & ~Transposed::kAbsolute : stage + note.target;
    const int c = lane / kTogether, q = lane % kTogether;
    const unsigned bits = note.shift % 4 * 8;
    const unsigned char* const own = from.pieces + c * kChannelBytes + 16 * q + note.shift / 4 * 4;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const auto* const words = reinterpret_cast<const unsigned*>(own + i * kPieceBytes);
      uint4 values =
          make_uint4(ptx::shifted(words[0], words[1], bits), ptx::shifted(words[1], words[2], bits),
                     ptx::shifted(words[2], words[3], bits), ptx::shifted(words[3], words[4], bits));
      ptx::store_transposed(start ^ 16 * (first_piece(turn) + i), Transposed::by_matrix(values, lane));
    }
  }
};

}  // namespace tconv3d
