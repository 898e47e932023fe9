// The epilogue of the halo kernel where it has operands besides the sums (epilogue.cuh): which output each of
// a lane's accumulators is. All ways to store the outputs come after it, so that none of them knows operands.
#pragma once

#include "halo_stores.cuh"

namespace tconv3d {

template <class Config>
struct HaloEpilogue {
  using Layout = HaloLayout<Config>;
  using Shared = HaloShared<Config>;
  using Stores = HaloStores<Config>;
  using Accumulators = HaloSums<Config>;
  using Place = typename Stores::Place;
  using Slab = typename Stores::Slab;
  using Target = typename Stores::Target;
  using Sums = typename Stores::Sums;

  // Slabs whose positions are woven, and the neighbouring outputs that a lane has of them, in builds that
  // take lines of input as they lie in memory.
  static constexpr int kWoven = Shared::kWoven, kRun = 2 * kWoven * Config::kStrideW;

  // Applies the epilogue to complete sums. A lane has two rows of a slab, and two columns of every 8.
  static __device__ __forceinline__ void apply(const Args& args, const Place& at,
                                               const Slab (&slabs)[Config::kSlabs], int plane, int warp,
                                               int lane, Sums& sums) {
    if constexpr (!Config::Epilogue::kHasOperands) {
      Accumulators::activate(sums);
    } else {
      static_for<2 * Config::kSlabs>([&](auto i) {
        constexpr int kSlab = decltype(i)::value / 2, kHalf = decltype(i)::value % 2;
        const int row = 16 * warp + 8 * kHalf + Accumulators::row_of(lane);
        const Target to = Stores::target(args, at, slabs[kSlab], plane, row);
        static_for<Config::kGroupsPerTile>([&](auto group) {
          constexpr int kGroup = decltype(group)::value;
          static_for<Config::kFields>([&](auto field) {
            constexpr int kField = decltype(field)::value;
            if constexpr (Accumulators::complete(kField)) {
              if constexpr (Config::kOutputUnitC) {
                along_channels<kGroup, kField>(args, at, to, lane, &sums[kSlab][2 * kHalf]);
              } else {
                along_w<kGroup, kField>(args, at, to, lane, &sums[kSlab][2 * kHalf]);
              }
            }
          });
        });
      });
    }
  }

  // Applies the epilogue where a lane's rows are pairs of neighbouring positions (halo_lines.cuh). With
  // 16-bit types two slabs are woven, so that their four positions are neighbours.
  template <class Pairs>
  static __device__ __forceinline__ void apply_to_pairs(const Args& args, const Place& at, const Pairs& pairs,
                                                        int plane, int lane, Sums& sums) {
    if constexpr (!Config::Epilogue::kHasOperands) {
      Accumulators::activate(sums);
    } else {
      const int d = plane * Config::kStrideD - Config::kPaddingD;
      static_for<Config::kSlabs / kWoven>([&](auto piece) {
        constexpr int kSlab = decltype(piece)::value * kWoven;
        const auto& pair = pairs[kSlab];
        const int h = (at.h + pair.h) * Config::kStrideH, w = pair.w * Config::kStrideW;
        const long long start = at.n * args.y_stride.n + Stores::offset(args, d, h, w);
        static_for<Config::kFields>([&](auto field) {
          constexpr int kField = decltype(field)::value, kPartner = Config::kPartner(kField);
          if constexpr (kPartner != Config::kStoredByPartner && Accumulators::complete(kField)) {
            const bool exists = pair.exists && Stores::deep(args, at, d + Config::kField(kField, 0)) &&
                                h + Config::kField(kField, 1) < args.output.h;
            static_for<Config::kOutTile / 4>([&](auto column) {
              constexpr int kColumn = decltype(column)::value, kSum = kColumn / 2 * 4 + kColumn % 2;
              const int out = at.first_out() + Layout::channel_of(kColumn / 2, kColumn % 2, lane);
              const int channel = at.first_group() * Config::kOut + out;
              float own[kRun];
              exchange<kSlab, kField, kSum>(sums, own, Int<false>{});
              const OutputRun run{at.n, channel,
                                  start + channel * args.y_stride.c + Stores::field_start(args, 0, kField), 1,
                                  exists && out < Config::kOut ? args.output.w - w : 0};
              finish<Config, false>(args, run, own);
              exchange<kSlab, kField, kSum>(sums, own, Int<true>{});
            });
          }
        });
      });
    }
  }

 private:
  // Takes a lane's neighbouring outputs of one channel out of the sums, or puts them back (kBack).
  template <int kSlab, int kField, int kSum, int kBack>
  static __device__ __forceinline__ void exchange(Sums& sums, float (&own)[kRun], Int<kBack>) {
    constexpr int kPartner = Config::kPartner(kField);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int position = i / Config::kStrideW, field = i % Config::kStrideW == 0 ? kField : kPartner;
      float& sum = sums[kSlab + position / 2][field * Config::kOutTile / 2 + kSum + position % 2 * 2];
      if constexpr (kBack) {
        sum = own[i];
      } else {
        own[i] = sum;
      }
    }
  }

  static __device__ __forceinline__ bool exists(const Args& args, const Place& at, const Target& to,
                                                int field) {
    return Stores::deep(args, at, to.d + Config::kField(field, 0)) && Stores::flat(args, to, field);
  }

  // Finishes the channels of a field that lie next to each other in memory, block by block. `first` is the
  // lane's first sum in the row.
  template <int kGroup, int kField>
  static __device__ __forceinline__ void along_channels(const Args& args, const Place& at, const Target& to,
                                                        int lane, float* first) {
    float* const sums = first + (kGroup * Layout::kGroupColumns + kField * Config::kOutTile) / 2;
    const bool there = exists(args, at, to, kField);
    static_for<Config::kOutTile / 8>([&](auto columns) {
      constexpr int kFirst = 8 * decltype(columns)::value, kOwn = Layout::block_channels(kFirst);
      if constexpr (Layout::block_start(kFirst) == kFirst) {
        const int place = Layout::channel_of(kFirst / 8, 0, lane), out = at.first_out() + place;
        float own[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) own[i] = sums[kFirst / 2 + i / 2 * 4 + i % 2];
        const OutputRun run{at.n + to.n, (at.first_group() + kGroup) * Config::kOut + out,
                            to.start + Stores::field_start(args, kGroup, kField) + place, 1,
                            there ? Config::kOut - out : 0};
        finish<Config, true>(args, run, own);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) sums[kFirst / 2 + i / 2 * 4 + i % 2] = own[i];
      }
    });
  }

  // Finishes a field together with the next phase along w, if there is one, channel by channel.
  template <int kGroup, int kField>
  static __device__ __forceinline__ void along_w(const Args& args, const Place& at, const Target& to,
                                                 int lane, float* first) {
    constexpr int kPartner = Config::kPartner(kField), kCount = kPartner >= 0 ? 2 : 1;
    if constexpr (kPartner != Config::kStoredByPartner) {
      float* const sums = first + kGroup * Layout::kGroupColumns / 2;
      const bool there = exists(args, at, to, kField);
      const int present = args.output.w - to.w - Config::kField(kField, 2);
#pragma unroll
      for (int i = 0; i < Config::kOutTile / 4; ++i) {
        const int place = Layout::channel_of(i / 2, i % 2, lane), out = at.first_out() + place;
        float* const one = sums + kField * Config::kOutTile / 2 + i / 2 * 4 + i % 2;
        float* const next =
            sums + (kPartner < 0 ? kField : kPartner) * Config::kOutTile / 2 + i / 2 * 4 + i % 2;
        float own[kCount];
        own[kCount - 1] = *next;
        own[0] = *one;
        const OutputRun run{at.n + to.n, (at.first_group() + kGroup) * Config::kOut + out,
                            to.start + Stores::field_start(args, kGroup, kField) + place * args.y_stride.c, 1,
                            there && out < Config::kOut ? present : 0};
        finish<Config, false>(args, run, own);
        *next = own[kCount - 1];
        *one = own[0];
      }
    }
  }
};

}  // namespace tconv3d
