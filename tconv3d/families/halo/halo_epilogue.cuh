// The epilogue of the halo kernel where it has operands besides the sums (epilogue.cuh): which output each of
// a lane's accumulators is. All ways to store the outputs come after it, so that none of them knows operands.
//
// A lane goes through its runs of neighbouring outputs in portions: it loads the whole tensors of all runs of
// a portion before it uses the first. Vectors are loaded once for all positions of a row of sums.
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

  static constexpr int kWholes = OperandCounts<typename Config::Epilogue>::kWholes;
  static constexpr int kVectors = OperandCounts<typename Config::Epilogue>::kVectors;
  // Slabs whose positions are woven, and the neighbouring outputs that a lane has of them, in builds that
  // take lines of input as they lie in memory.
  static constexpr int kWoven = Shared::kWoven, kRun = 2 * kWoven * Config::kStrideW;
  static constexpr int kChannels = Config::kOutTile / 4;  // channels of a group that a lane has

  // Applies the epilogue to complete sums. A lane has two rows of a slab, and two columns of every 8.
  static __device__ __forceinline__ void apply(const Args& args, const Place& at,
                                               const Slab (&slabs)[Config::kSlabs], int plane, int warp,
                                               int lane, Sums& sums) {
    if constexpr (!Config::Epilogue::kHasOperands) {
      Accumulators::activate(sums);
    } else {
      ptx::renew(lane);  // Without this the compiler loads the vectors before the products, and keeps them.
      of_rows(args, at, slabs, plane, warp, lane, [&](auto slab, auto half, auto group, const Target& to) {
        float* const first = &sums[slab][group * (Layout::kGroupColumns / 2) + 2 * half];
        if constexpr (Config::kOutputUnitC) {
          along_channels<decltype(group)::value>(args, at, to, lane, first);
        } else {
          along_w<decltype(group)::value>(args, at, to, lane, first);
        }
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
      ptx::renew(lane);  // Without this the compiler loads the vectors before the products, and keeps them.
      constexpr int kPieces = Config::kSlabs / kWoven, kPortion = portion(kFields * kPieces, kRun);
      static_for<kChannels>([&](auto column) {
        constexpr int kColumn = decltype(column)::value, kSum = kColumn / 2 * 4 + kColumn % 2;
        const auto vectors =
            vectors_of<1>(args, at, 0, 0, Layout::channel_of(kColumn / 2, kColumn % 2, lane));
        in_portions<kFields * kPieces, kPortion>([&](auto start, auto count) {
          constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
          OutputRun runs[kRuns];
          ChannelVectors<Config, float, 1> same[kRuns];
          float own[kRuns][kRun];
          static_for<kRuns>([&](auto i) {
            constexpr int kSlab = (kStart + decltype(i)::value) % kPieces * kWoven,
                          kField = field((kStart + decltype(i)::value) / kPieces);
            same[i] = vectors;
            exchange<kSlab, kField, kSum>(sums, own[i], Int<false>{});
            runs[i] = run_of_pair<kField, kColumn>(args, at, pairs[kSlab], plane, lane);
          });
          finish_with<Config, false>(args, runs, same, own);
          static_for<kRuns>([&](auto i) {
            constexpr int kSlab = (kStart + decltype(i)::value) % kPieces * kWoven,
                          kField = field((kStart + decltype(i)::value) / kPieces);
            exchange<kSlab, kField, kSum>(sums, own[i], Int<true>{});
          });
        });
      });
    }
  }

  // Calls the whole tensors of a plane into L2. This comes before the products of the plane are waited for,
  // so that memory works at the same time as the tensor cores.
  static __device__ __forceinline__ void prefetch(const Args& args, const Place& at,
                                                  const Slab (&slabs)[Config::kSlabs], int plane, int warp,
                                                  int lane) {
    if constexpr (kWholes > 0) {
      ptx::renew(lane);  // Without this the compiler keeps every address until the sums are finished.
      of_rows(args, at, slabs, plane, warp, lane, [&](auto, auto, auto group, const Target& to) {
        constexpr int kGroup = decltype(group)::value;
        static_for<kFields>([&](auto which) {
          constexpr int kField = field(decltype(which)::value);
          if constexpr (Config::kOutputUnitC) {
            of_blocks([&](auto first) {
              constexpr int kFirst = decltype(first)::value;
              prefetch_run<Config, true, Layout::block_channels(kFirst)>(
                  args, run_of_channels<kGroup, kField, kFirst>(args, at, to, lane));
            });
          } else {
            static_for<kChannels>([&](auto column) {
              constexpr int kColumn = decltype(column)::value;
              prefetch_run<Config, false, kCountW>(args,
                                                   run_along_w<kGroup, kField, kColumn>(args, at, to, lane));
            });
          }
        });
      });
    }
  }
  template <class Pairs>
  static __device__ __forceinline__ void prefetch_pairs(const Args& args, const Place& at, const Pairs& pairs,
                                                        int plane, int lane) {
    if constexpr (kWholes > 0) {
      ptx::renew(lane);  // Without this the compiler keeps every address until the sums are finished.
      ptx::renew(plane);
      static_for<kFields * kChannels>([&](auto i) {
        constexpr int kField = field(decltype(i)::value / kChannels),
                      kColumn = decltype(i)::value % kChannels;
#pragma unroll
        for (int m = 0; m < Config::kSlabs; m += kWoven)
          prefetch_run<Config, false, kRun>(args,
                                            run_of_pair<kField, kColumn>(args, at, pairs[m], plane, lane));
      });
    }
  }

 private:
  // ---- The runs of a lane.

  // Whether a field is complete, and no field before it along w has its outputs in its own runs.
  static __device__ constexpr bool begins_run(int field) {
    return Accumulators::complete(field) &&
           (Config::kOutputUnitC || Config::kPartner(field) != Config::kStoredByPartner);
  }
  static __device__ constexpr int count_fields() {
    int count = 0;
    for (int i = 0; i < Config::kFields; ++i) count += begins_run(i);
    return count;
  }
  static constexpr int kFields = count_fields();  // fields that begin runs
  // Returns the field that begins runs as number `index` of these.
  static __device__ constexpr int field(int index) {
    int i = 0;
    for (; !begins_run(i) || index > 0; ++i) index -= begins_run(i);
    return i;
  }
  // Outputs along w of a run of a channel: with those of the next phase along w if that has a field.
  static constexpr int kCountW = Config::kPartner(field(0)) >= 0 ? 2 : 1;
  static __device__ constexpr int partner(int field) {
    return Config::kPartner(field) < 0 ? field : Config::kPartner(field);
  }

  // Words of whole tensors that a lane loads at once: fewer where it has many sums, and then half as many of
  // 16-bit numbers, which take a register each when they are widened.
  static constexpr int kItemBytes = static_cast<int>(sizeof(typename Config::Scalar));
  static constexpr int kWords = Config::kSlabs * Accumulators::kSums > 64 ? 4 * kItemBytes : 32;
  static __device__ constexpr int portion(int all, int outputs) {
    return portion_of<Config, kWords>(all, outputs);
  }

  // Calls body(slab, half, group, target) for all rows of sums that a lane has.
  template <class Body>
  static __device__ __forceinline__ void of_rows(const Args& args, const Place& at,
                                                 const Slab (&slabs)[Config::kSlabs], int plane, int warp,
                                                 int lane, const Body& body) {
    static_for<2 * Config::kSlabs>([&](auto i) {
      constexpr int kSlab = decltype(i)::value / 2, kHalf = decltype(i)::value % 2;
      const int row = 16 * warp + 8 * kHalf + Accumulators::row_of(lane);
      const Target to = Stores::target(args, at, slabs[kSlab], plane, row);
      static_for<Config::kGroupsPerTile>([&](auto group) { body(Int<kSlab>{}, Int<kHalf>{}, group, to); });
    });
  }
  // Calls body(first column) for the blocks of columns in which a lane has neighbouring channels.
  template <class Body>
  static __device__ __forceinline__ void of_blocks(const Body& body) {
    static_for<Config::kOutTile / 8>([&](auto columns) {
      constexpr int kFirst = 8 * decltype(columns)::value;
      if constexpr (Layout::block_start(kFirst) == kFirst) body(Int<kFirst>{});
    });
  }

  static __device__ __forceinline__ bool exists(const Args& args, const Place& at, const Target& to,
                                                int field) {
    return Stores::deep(args, at, to.d + Config::kField(field, 0)) && Stores::flat(args, to, field);
  }

  // Returns the run of neighbouring channels of a block, in one field of a position.
  template <int kGroup, int kField, int kFirst>
  static __device__ __forceinline__ OutputRun run_of_channels(const Args& args, const Place& at,
                                                              const Target& to, int lane) {
    const int place = Layout::channel_of(kFirst / 8, 0, lane), out = at.first_out() + place;
    return {at.n + to.n, (at.first_group() + kGroup) * Config::kOut + out,
            to.start + Stores::field_start(args, kGroup, kField) + place, 1,
            exists(args, at, to, kField) ? Config::kOut - out : 0};
  }
  // Returns the run of one channel: a field of a position and the next phase along w, if that has a field.
  template <int kGroup, int kField, int kColumn>
  static __device__ __forceinline__ OutputRun run_along_w(const Args& args, const Place& at, const Target& to,
                                                          int lane) {
    const int place = Layout::channel_of(kColumn / 2, kColumn % 2, lane), out = at.first_out() + place;
    const int left = args.output.w - to.w - Config::kField(kField, 2);
    const int present = Config::kPartner(kField) < 0 && left > 1 ? 1 : left;
    return {at.n + to.n, (at.first_group() + kGroup) * Config::kOut + out,
            to.start + Stores::field_start(args, kGroup, kField) + place * args.y_stride.c, 1,
            exists(args, at, to, kField) && out < Config::kOut ? present : 0};
  }
  // Returns the run of one channel of a pair of positions.
  template <int kField, int kColumn, class Pair>
  static __device__ __forceinline__ OutputRun run_of_pair(const Args& args, const Place& at, const Pair& pair,
                                                          int plane, int lane) {
    const int d = plane * Config::kStrideD - Config::kPaddingD;
    const int h = (at.h + pair.h) * Config::kStrideH, w = pair.w * Config::kStrideW;
    const int out = at.first_out() + Layout::channel_of(kColumn / 2, kColumn % 2, lane);
    const int channel = at.first_group() * Config::kOut + out;
    const bool exists = pair.exists && Stores::deep(args, at, d + Config::kField(kField, 0)) &&
                        h + Config::kField(kField, 1) < args.output.h && out < Config::kOut;
    const long long offset = at.n * args.y_stride.n + Stores::offset(args, d, h, w) +
                             channel * args.y_stride.c + Stores::field_start(args, 0, kField);
    return {at.n, channel, offset, 1, exists ? args.output.w - w : 0};
  }

  // Returns the vectors of a lane's channels from `place` in a tile's group on, of one of its batch items.
  template <int kCount>
  static __device__ __forceinline__ ChannelVectors<Config, float, kCount> vectors_of(const Args& args,
                                                                                     const Place& at, int n,
                                                                                     int group, int place) {
    const int out = at.first_out() + place;
    return ChannelVectors<Config, float, kCount>::load(args, at.n + n,
                                                       (at.first_group() + group) * Config::kOut + out,
                                                       at.n + n < args.batch ? Config::kOut - out : 0);
  }

  // ---- The sums of a lane. `first` is its first sum of a group in a row.

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

  // Finishes the channels that lie next to each other in memory, block by block.
  template <int kGroup>
  static __device__ __forceinline__ void along_channels(const Args& args, const Place& at, const Target& to,
                                                        int lane, float* first) {
    of_blocks([&](auto block) {
      constexpr int kFirst = decltype(block)::value, kOwn = Layout::block_channels(kFirst),
                    kPortion = portion(kFields, kOwn);
      const auto vectors = vectors_of<kOwn>(args, at, to.n, kGroup, Layout::channel_of(kFirst / 8, 0, lane));
      in_portions<kFields, kPortion>([&](auto start, auto count) {
        constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
        OutputRun runs[kRuns];
        ChannelVectors<Config, float, kOwn> same[kRuns];
        float own[kRuns][kOwn];
        static_for<kRuns>([&](auto i) {
          constexpr int kField = field(kStart + decltype(i)::value);
          const float* const sums = first + (kField * Config::kOutTile + kFirst) / 2;
          same[i] = vectors;
#pragma unroll
          for (int k = 0; k < kOwn; ++k) own[i][k] = sums[k / 2 * 4 + k % 2];
          runs[i] = run_of_channels<kGroup, kField, kFirst>(args, at, to, lane);
        });
        finish_with<Config, true, Config::kAlignedPairs ? Lie::kAsVector : Lie::kAnyhow>(args, runs, same,
                                                                                         own);
        static_for<kRuns>([&](auto i) {
          float* const sums = first + (field(kStart + decltype(i)::value) * Config::kOutTile + kFirst) / 2;
#pragma unroll
          for (int k = 0; k < kOwn; ++k) sums[k / 2 * 4 + k % 2] = own[i][k];
        });
      });
    });
  }

  // Finishes fields together with the next phase along w, if there is one, channel by channel.
  template <int kGroup>
  static __device__ __forceinline__ void along_w(const Args& args, const Place& at, const Target& to,
                                                 int lane, float* first) {
    constexpr int kCount = kCountW, kAll = kFields * kChannels;
    in_portions<kAll, portion(kAll, kCount)>([&](auto start, auto count) {
      constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
      constexpr int kFirst = kStart / kFields, kLast = (kStart + kRuns - 1) / kFields;
      ChannelVectors<Config, float, 1> vectors[kLast - kFirst + 1];
      static_for<kLast + 1, kFirst>([&](auto column) {
        const int place = Layout::channel_of(column / 2, column % 2, lane);
        vectors[column - kFirst] = vectors_of<1>(args, at, to.n, kGroup, place);
      });
      OutputRun runs[kRuns];
      ChannelVectors<Config, float, 1> same[kRuns];
      float own[kRuns][kCount];
      static_for<kRuns>([&](auto i) {
        constexpr int kColumn = (kStart + decltype(i)::value) / kFields,
                      kField = field((kStart + decltype(i)::value) % kFields);
        const float* const sums = first + kColumn / 2 * 4 + kColumn % 2;
        same[i] = vectors[kColumn - kFirst];
        own[i][kCount - 1] = sums[partner(kField) * Config::kOutTile / 2];
        own[i][0] = sums[kField * Config::kOutTile / 2];
        runs[i] = run_along_w<kGroup, kField, kColumn>(args, at, to, lane);
      });
      finish_with<Config, false>(args, runs, same, own);
      static_for<kRuns>([&](auto i) {
        constexpr int kColumn = (kStart + decltype(i)::value) / kFields,
                      kField = field((kStart + decltype(i)::value) % kFields);
        float* const sums = first + kColumn / 2 * 4 + kColumn % 2;
        sums[partner(kField) * Config::kOutTile / 2] = own[i][kCount - 1];
        sums[kField * Config::kOutTile / 2] = own[i][0];
      });
    });
  }
};

}  // namespace tconv3d
