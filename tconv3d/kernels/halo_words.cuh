// How the halo kernel's consumers store rows of outputs that begin anywhere, straight out of the sums
// (kHanded): builds that take lines as they are in memory (halo_lines.cuh).
//
// Of a row a lane has 16 bytes in sequence, and the lane four further on has the next: two neighbouring
// positions with both phases along w, in 16 bits those of two slabs. In memory a vector of 16 bytes begins
// anywhere in these. So a lane hands what lies behind the last border of a vector to the next lane, and
// stores the one vector that holds its first output. From warp to warp this passes through shared memory:
// the last lanes of a warp leave their words there, and after one barrier for each plane the first of the
// next warp take them. Two buffers keep planes apart. Where a row begins or ends, or a consumer's part of it,
// parts of vectors are left: the lanes there leave their words of all rows and channels to the warp, whose
// lanes share these out among them, and store 8, 4 and 2 bytes at a time.
#pragma once

#include "halo_shared.cuh"
#include "halo_stores.cuh"

namespace tconv3d {

template <class Config>
struct HaloHanded {
  using Scalar = typename Config::Scalar;
  using Shared = HaloShared<Config>;
  using Stores = HaloStores<Config>;
  using Place = typename HaloTile<Config>::Place;
  using Writer = typename Stores::Writer;
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;

  static constexpr int kItem = sizeof(Scalar), kItems = 16 / kItem;
  static constexpr int kWoven = Shared::kWoven;  // slabs of a lane's vector
  static constexpr int kPieces = Config::kSlabs / kWoven;
  static constexpr int kChannels = Config::kOutTile / 4;           // of a lane
  static constexpr int kVectors = Config::kImageRows * kChannels;  // of a lane, of a plane of outputs
  static constexpr int kPlanes = Config::kStrideD;                 // that are complete
  static constexpr int kBatch = kVectors % 4 == 0 ? 4 : 2;         // that are stored together

  // What a lane has of a row: found once for a tile.
  struct Piece {
    bool starts, ends;  // nobody hands it anything, and takes what it would hand on
    int count;          // outputs
    unsigned edges;     // of the warp: first of four lanes that start or end
  };
  // `w`: its first position of the line.
  static __device__ __forceinline__ Piece piece(const Args& args, int w, int number, int warp, int lane) {
    const int left = args.output.w - 2 * w;
    Piece own;
    own.starts = w == 0 || (number == 0 && warp == 0 && lane < 4);
    own.ends = left <= kItems || (number == kPieces - 1 && warp == 3 && lane >= 28);
    own.count = left < kItems ? left : kItems;
    own.edges = 0;
    return own;
  }
  static __device__ __forceinline__ unsigned edges(const Args& args, const Piece& piece, bool exists) {
    const unsigned all = __ballot_sync(0xFFFFFFFFu, exists && (piece.starts || piece.ends));
    return args.vector == kItems ? 0 : all & 0x11111111u;
  }

  // The rows of a plane of positions. `pairs`: of the slabs, with their pieces (halo_lines.cuh).
  template <class Pairs>
  static __device__ __forceinline__ void store(const Args& args, const Place& at, Writer& me,
                                               const Sums& sums, const Pairs& pairs, int plane) {
    static_assert(Config::kStrideW == 2 && Config::kSlabs % kWoven == 0, "16 bytes of a lane");
    static_assert(kPlanes * kVectors * 64 == Shared::kEdgeBytes, "four lanes of all rows and channels");
    const int d = plane * Config::kStrideD - Config::kPaddingD;
    unsigned char* left = me.buffers + me.buffer * Shared::kHandedBytes;
    me.buffer ^= 1;
    for_each_plane(args, at, d, [&](auto phase) {
      static_for<kPieces * kVectors>([&](auto i) {
        constexpr int kPiece = decltype(i)::value / kVectors, kVector = decltype(i)::value % kVectors;
        constexpr int kPhase = decltype(phase)::value;
        if (me.lane >= 28) {
          *reinterpret_cast<uint4*>(left + slot<kPhase, kVector>(kPiece * 4 + me.warp, me.lane)) =
              words<kPhase, kVector, kPiece>(sums);
        }
      });
    });
    ptx::warpgroup_sync(1 + me.consumer);
    const int channel =
        at.first_group() * Config::kOut + at.first_out() + Accumulators::first_column(me.lane);
    static_for<kPieces>([&](auto p) {
      constexpr int kPiece = decltype(p)::value;
      const auto& pair = pairs[kPiece * kWoven];
      const int h = (at.h + pair.h) * Config::kStrideH;
      Scalar* const y = static_cast<Scalar*>(args.y) + at.n * args.y_stride.n + channel * args.y_stride.c +
                        Stores::offset(args, d, h, 2 * pair.w);
      for_each_plane(args, at, d, [&](auto phase) {
        static_for<kVectors / kBatch>([&](auto batch) {
          constexpr int kFirst = decltype(batch)::value * kBatch;
          store_batch<decltype(phase)::value, kFirst, kPiece>(args, at, me, sums, pair, h, y, left);
        });
      });
    });
    static_for<kPieces>([&](auto p) { store_edges<decltype(p)::value>(args, at, me, sums, pairs, d); });
  }

  // The phases along depth that are complete and this tile's.
  template <class Body>
  static __device__ __forceinline__ void for_each_plane(const Args& args, const Place& at, int d,
                                                        Body&& body) {
    static_for<Config::kStrideD>([&](auto phase) {
      if (Stores::deep(args, at, d + phase)) body(phase);
    });
  }

  // A lane's 16 bytes of one row and channel.
  template <int kPhase, int kVector, int kPiece>
  static __device__ __forceinline__ uint4 words(const Sums& sums) {
    constexpr int kField = field_of(kPhase, kVector), kChannel = kVector % kChannels;
    constexpr int kSum = kChannel / 2 * 4 + kChannel % 2;
    constexpr int kFirst = kField * Config::kOutTile / 2 + kSum;
    constexpr int kSecond = Config::kPartner(kField) * Config::kOutTile / 2 + kSum;
    const auto& own = sums[kPiece * kWoven];
    if constexpr (kItem == 4) {
      return make_uint4(ptx::float_to_bits(own[kFirst]), ptx::float_to_bits(own[kSecond]),
                        ptx::float_to_bits(own[kFirst + 2]), ptx::float_to_bits(own[kSecond + 2]));
    } else {
      using Two = Narrow<Scalar>;
      const auto& next = sums[kPiece * kWoven + kWoven - 1];
      return make_uint4(Two::two(own[kFirst], own[kSecond]), Two::two(own[kFirst + 2], own[kSecond + 2]),
                        Two::two(next[kFirst], next[kSecond]), Two::two(next[kFirst + 2], next[kSecond + 2]));
    }
  }

 private:
  // The first phase of a vector's row.
  static __device__ constexpr int field_of(int phase, int vector) {
    for (int i = 0; i < Config::kFields; ++i) {
      if (Config::kField(i, 0) == phase && Config::kField(i, 1) == vector / kChannels &&
          Config::kField(i, 2) == 0) {
        return i;
      }
    }
    return -1;
  }

  // Some vectors of a plane, all of them on their way from lane to lane at the same time.
  template <int kPhase, int kFirst, int kPiece, class Pair>
  static __device__ __forceinline__ void store_batch(const Args& args, const Place& at, const Writer& me,
                                                     const Sums& sums, const Pair& pair, int h, Scalar* y,
                                                     const unsigned char* left) {
    uint4 own[kBatch], before[kBatch];
    Scalar* start[kBatch];
    bool exists[kBatch];
    static_for<kBatch>([&](auto i) {
      constexpr int kVector = kFirst + decltype(i)::value, kField = field_of(kPhase, kVector);
      constexpr int kChannel = kVector % kChannels, kOut = kChannel / 2 * 8 + kChannel % 2;
      own[i] = words<kPhase, kVector, kPiece>(sums);
      before[i] = handed(me, own[i], left + slot<kPhase, kVector>(kPiece * 4 + me.warp - 1, me.lane),
                         kPiece * 4 + me.warp > 0);
      const int out = at.first_out() + Accumulators::first_column(me.lane) + kOut;
      exists[i] = pair.exists && h + Config::kField(kField, 1) < args.output.h &&
                  (Config::kOut % Config::kOutTile == 0 || out < Config::kOut);
      start[i] = Stores::further(args, y + Stores::field_start(args, 0, kField), kOut);
    });
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const unsigned bytes = beside(start[i]);
      const bool whole = bytes == 0 ? pair.piece.count == kItems : !pair.piece.starts;
      ptx::store_global_if(exists[i] && whole, reinterpret_cast<unsigned char*>(start[i]) - bytes,
                           joined(before[i], own[i], bytes));
    }
  }

  // The parts of vectors where a row starts or ends, of every four lanes that have the same part of it.
  template <int kPiece, class Pairs>
  static __device__ __forceinline__ void store_edges(const Args& args, const Place& at, const Writer& me,
                                                     const Sums& sums, const Pairs& pairs, int d) {
    const auto& pair = pairs[kPiece * kWoven];
    unsigned char* left = me.buffers + 2 * Shared::kHandedBytes + me.warp * Shared::kEdgeBytes;
#pragma unroll 1
    for (unsigned edges = pair.piece.edges; edges != 0; edges &= edges - 1) {
      const int lane = __ffs(static_cast<int>(edges)) - 1;
      if (me.lane / 4 * 4 == lane) {
        static_for<kPlanes * kVectors>([&](auto i) {
          constexpr int kPhase = decltype(i)::value / kVectors, kVector = decltype(i)::value % kVectors;
          *reinterpret_cast<uint4*>(left + decltype(i)::value * 64 + me.lane % 4 * 16) =
              words<kPhase, kVector, kPiece>(sums);
        });
      }
      __syncwarp();
      const int h = __shfl_sync(0xFFFFFFFFu, pair.h, lane), w = __shfl_sync(0xFFFFFFFFu, pair.w, lane);
      const Piece piece = HaloHanded::piece(args, w, kPiece, me.warp, lane);
#pragma unroll
      for (int turn = 0; turn < (kPlanes * kVectors * 4 + 31) / 32; ++turn) {
        const int own = turn * 32 + me.lane;
        if (own < kPlanes * kVectors * 4) {
          const uint4 words = *reinterpret_cast<const uint4*>(left + own * 16);
          store_edge(args, at, piece, words, d, (at.h + h) * Config::kStrideH, w, own / 4, own % 4);
        }
      }
      __syncwarp();
    }
  }
  static __device__ __forceinline__ void store_edge(const Args& args, const Place& at, const Piece& piece,
                                                    const uint4& own, int d, int h, int w, int vector,
                                                    int lane) {
    const int in_plane = vector % kVectors, channel = in_plane % kChannels;
    d += vector / kVectors;
    h += in_plane / kChannels;
    const int out = at.first_out() + Accumulators::first_column(lane) + channel / 2 * 8 + channel % 2;
    if (!Stores::deep(args, at, d) || h >= args.output.h || out >= Config::kOut) return;
    Scalar* start = static_cast<Scalar*>(args.y) + at.n * args.y_stride.n +
                    (at.first_group() * Config::kOut + out) * args.y_stride.c +
                    Stores::offset(args, d, h, 2 * w);
    const unsigned bytes = beside(start), missing = (kItems - piece.count) * kItem;
    const uint4 turned = joined(own, own, bytes);
    auto* to = reinterpret_cast<unsigned char*>(start) - bytes;
    if (piece.starts && bytes != 0) store_suffix(to, turned, bytes);
    if (piece.ends && (bytes != 0 || missing != 0)) {
      store_prefix(bytes == 0 ? to : to + 16, turned, (bytes == 0 ? 16 : bytes) - missing);
    }
  }

  // Where the words of the last lane of a warp's piece lie.
  template <int kPhase, int kVector>
  static __device__ __forceinline__ int slot(int piece, int lane) {
    return (((kPhase * kVectors + kVector) * kPieces * 4 + piece) * 4 + lane % 4) * 16;
  }

  // The words of the lane before.
  static __device__ __forceinline__ uint4 handed(const Writer& me, const uint4& own,
                                                 const unsigned char* from, bool by_warp) {
    const int before = (me.lane + 28) % 32;
    uint4 words = make_uint4(kItem == 2 ? __shfl_sync(0xFFFFFFFFu, own.x, before) : 0u,
                             __shfl_sync(0xFFFFFFFFu, own.y, before), __shfl_sync(0xFFFFFFFFu, own.z, before),
                             __shfl_sync(0xFFFFFFFFu, own.w, before));
    if (me.lane < 4 && by_warp) words = *reinterpret_cast<const uint4*>(from);
    return words;
  }

  // The 16 bytes that begin so many before the second vector.
  static __device__ __forceinline__ uint4 joined(const uint4& a, const uint4& b, unsigned beside) {
    const bool two = beside & 8, one = beside & 4;
    const unsigned m0 = two ? a.x : a.z, m1 = two ? a.y : a.w, m2 = two ? a.z : b.x, m3 = two ? a.w : b.y,
                   m4 = two ? b.x : b.z, m5 = two ? b.y : b.w;
    const uint4 whole = make_uint4(one ? m1 : m2, one ? m2 : m3, one ? m3 : m4, one ? m4 : m5);
    if constexpr (kItem == 4) return whole;
    const unsigned first = one ? m0 : m1, bits = 32 - 8 * (beside & 2);
    return make_uint4(ptx::shifted(first, whole.x, bits), ptx::shifted(whole.x, whole.y, bits),
                      ptx::shifted(whole.y, whole.z, bits), ptx::shifted(whole.z, whole.w, bits));
  }

  // Bytes of the vector that holds an output which lie before it.
  static __device__ __forceinline__ unsigned beside(const Scalar* output) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(output)) % 16;
  }
  static __device__ __forceinline__ unsigned word_of(const uint4& vector, unsigned byte) {
    const unsigned low = byte & 4 ? vector.y : vector.x, high = byte & 4 ? vector.w : vector.z;
    return byte & 8 ? high : low;
  }
  // From so many bytes on, and as many from the beginning.
  static __device__ __forceinline__ void store_suffix(unsigned char* to, const uint4& vector, unsigned from) {
    if constexpr (kItem == 2) {
      if (from & 2) ptx::store_global(to + from, static_cast<unsigned short>(word_of(vector, from) >> 16));
      from += from & 2;
    }
    if (from & 4) ptx::store_global(to + from, word_of(vector, from));
    if (from > 0 && from <= 8) ptx::store_global(to + 8, make_uint2(vector.z, vector.w));
  }
  static __device__ __forceinline__ void store_prefix(unsigned char* to, const uint4& vector,
                                                      unsigned bytes) {
    if (bytes & 8) ptx::store_global(to, make_uint2(vector.x, vector.y));
    if (bytes & 4) ptx::store_global(to + (bytes & 8), word_of(vector, bytes & 8));
    if constexpr (kItem == 2) {
      const unsigned last = bytes & 12;
      if (bytes & 2) ptx::store_global(to + last, static_cast<unsigned short>(word_of(vector, last)));
    }
  }
};

}  // namespace tconv3d
