// A lane's part of rows of outputs, in builds that take input lines as they lie in memory (halo_lines.cuh):
// 16 contiguous bytes of a row and channel. They hold two neighbouring positions with both phases along w;
// with 16-bit types, two such pairs of positions from two slabs.
#pragma once

#include "halo_shared.cuh"
#include "halo_stores.cuh"

namespace tconv3d {

template <class Config>
struct HaloWords {
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
  static constexpr int kChannels = Config::kOutTile / 4;           // channels of a lane
  static constexpr int kVectors = Config::kImageRows * kChannels;  // vectors of a lane in a plane of outputs

  // Stores the outputs of a plane of positions, where rows begin and end at multiples of 16 bytes. `pairs`
  // are the pairs of positions of the slabs (halo_lines.cuh).
  template <class Pairs>
  static __device__ __forceinline__ void store(const Args& args, const Place& at, const Writer& me,
                                               const Sums& sums, const Pairs& pairs, int plane) {
    static_assert(Config::kStrideW == 2 && Config::kSlabs % kWoven == 0, "16 bytes of a lane");
    const int d = plane * Config::kStrideD - Config::kPaddingD;
    const int first = at.first_out() + Accumulators::first_column(me.lane);
    static_for<kPieces>([&](auto p) {
      constexpr int kPiece = decltype(p)::value;
      const auto& pair = pairs[kPiece * kWoven];
      const int h = (at.h + pair.h) * Config::kStrideH;
      Scalar* const y = static_cast<Scalar*>(args.y) + at.n * args.y_stride.n +
                        (at.first_group() * Config::kOut + first) * args.y_stride.c +
                        Stores::offset(args, d, h, 2 * pair.w);
      for_each_plane(args, at, d, [&](auto phase) {
        static_for<kVectors>([&](auto vector) {
          constexpr int kPhase = decltype(phase)::value, kVector = decltype(vector)::value;
          constexpr int kChannel = kVector % kChannels, kOut = kChannel / 2 * 8 + kChannel % 2;
          const bool exists = pair.exists && h + kVector / kChannels < args.output.h &&
                              (Config::kOut % Config::kOutTile == 0 || first + kOut < Config::kOut);
          Scalar* line = y + Stores::field_start(args, 0, field_of(kPhase, kVector));
          ptx::store_global_if(exists, reinterpret_cast<unsigned char*>(Stores::further(args, line, kOut)),
                               words<kPhase, kVector, kPiece>(sums));
        });
      });
    });
  }

  // Calls `body` with each phase along depth that is complete and this tile's to store.
  template <class Body>
  static __device__ __forceinline__ void for_each_plane(const Args& args, const Place& at, int d,
                                                        Body&& body) {
    static_for<Config::kStrideD>([&](auto phase) {
      if (Stores::deep(args, at, d + phase)) body(phase);
    });
  }

  // Returns a lane's 16 bytes of one row and channel.
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
  // Returns the first phase of a vector's row.
  static __device__ constexpr int field_of(int phase, int vector) {
    for (int i = 0; i < Config::kFields; ++i) {
      if (Config::kField(i, 0) == phase && Config::kField(i, 1) == vector / kChannels &&
          Config::kField(i, 2) == 0) {
        return i;
      }
    }
    return -1;
  }
};

}  // namespace tconv3d
