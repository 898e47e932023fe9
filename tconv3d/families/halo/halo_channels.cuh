// What the halo kernel computes over the channels of a position. A warp holds all channels of its positions:
// the four lanes of a row have two columns each of every 8 columns of a field.
#pragma once

#include "halo_stores.cuh"
#include "over_channels.cuh"

namespace tconv3d {

template <class Config>
struct HaloChannels {
  using Layout = HaloLayout<Config>;
  using Stores = HaloStores<Config>;
  using Accumulators = HaloSums<Config>;
  using Place = typename Stores::Place;
  using Slab = typename Stores::Slab;
  using Target = typename Stores::Target;
  using Sums = typename Stores::Sums;
  using Channels = ChannelProgram<Config>;
  static constexpr int kOwn = Config::kOutTile / 4;  // sums of a lane for one position
  static_assert(Config::kGroupsPerTile == 1 && Config::kOutTiles == 1 && Config::kGroups == 1,
                "a warp holds all channels");
  static_assert(Config::kDivision == Division::kNobody || Config::kDivision == Division::kConsumers,
                "sums are complete");
  static_assert(!Config::Epilogue::kOnePerPosition || Config::kOutput == Output::kDirect,
                "no producer waits for outputs");

  // Runs the program on all complete sums, in place, and stores the result if that has one number per
  // position.
  static __device__ __forceinline__ void run(const Args& args, const Place& at,
                                             const Slab (&slabs)[Config::kSlabs], int plane, int warp,
                                             int lane, Sums& sums) {
    run(args, at, lane, sums, [&](int slab, int half) {
      return Stores::target(args, at, slabs[slab], plane, 16 * warp + 8 * half + Accumulators::row_of(lane));
    });
  }

  // Runs the program where a lane's rows are pairs of neighbouring positions (halo_lines.cuh).
  template <class Pairs>
  static __device__ __forceinline__ void run_on_pairs(const Args& args, const Place& at, const Pairs& pairs,
                                                      int plane, int lane, Sums& sums) {
    run(args, at, lane, sums, [&](int slab, int half) {
      Target to;
      to.exists = pairs[slab].exists;
      to.n = 0;
      to.d = plane * Config::kStrideD - Config::kPaddingD;
      to.h = (at.h + pairs[slab].h) * Config::kStrideH;
      to.w = (pairs[slab].w + half) * Config::kStrideW;
      to.start = at.n * args.y_stride.n + Stores::offset(args, to.d, to.h, to.w);
      return to;
    });
  }

 private:
  template <class TargetOf>
  static __device__ __forceinline__ void run(const Args& args, const Place& at, int lane, Sums& sums,
                                             const TargetOf& target_of) {
    static_for<2 * Config::kSlabs>([&](auto i) {
      constexpr int kSlab = decltype(i)::value / 2, kHalf = decltype(i)::value % 2;
      [[maybe_unused]] Target to;
      if constexpr (Config::Epilogue::kOnePerPosition) to = target_of(kSlab, kHalf);
      static_for<Config::kFields>([&](auto field) {
        constexpr int kField = decltype(field)::value;
        if constexpr (Accumulators::complete(kField)) {
          float* const first = &sums[kSlab][kField * Config::kOutTile / 2 + 2 * kHalf];
          float own[kOwn];
#pragma unroll
          for (int c = 0; c < kOwn; ++c) own[c] = first[c / 2 * 4 + c % 2];
          Channels::template run<4>(own, Config::kOut,
                                    [&](int c) { return Layout::channel_of(c / 2, c % 2, lane); });
          if constexpr (Config::Epilogue::kOnePerPosition) {
            const bool exists =
                Stores::deep(args, at, to.d + Config::kField(kField, 0)) && Stores::flat(args, to, kField);
            if (exists && lane % 4 == 0)
              Channels::template store_number<Config::kOutputUnitC>(
                  args.y, to.start + Stores::field_start(args, 0, kField), at.n + to.n, args.y_stride.c,
                  Config::kOut, own[0]);
          } else {
#pragma unroll
            for (int c = 0; c < kOwn; ++c) first[c / 2 * 4 + c % 2] = own[c];
          }
        }
      });
    });
  }
};

}  // namespace tconv3d
