// The moments of what the halo kernel stores, for a norm that follows: taken of the accumulators, in
// registers.
//
// A band is kBand neighbouring output channels of one norm group. When a pass over a tile is complete, each
// warp leaves the moments of every band over its own positions, all slabs and fields: the mean first, then
// deviations from it. A march adds up its planes' moments first. Where they go follows from the tile, never
// from timing: [batch][bands][slots], so that the moments of a norm group are neighbours.
#pragma once

#include "halo_layout.cuh"
#include "moments.cuh"

namespace tconv3d {

template <class Config, class Kernel, class Args>
struct HaloMoments {
  using Place = typename Kernel::Place;
  using Slab = typename Kernel::Slab;
  using Sums = typename Kernel::Sums;

  static constexpr int kBand = Config::kMomentBand;
  static constexpr int kBands = Config::kGroups * Config::kOut / kBand;  // of all channels
  // A lane has two columns of every 8: of one band, or of two.
  static constexpr int kLaneBands = Config::kOutTile / (kBand == 1 ? 4 : kBand < 8 ? 8 : kBand);
  static constexpr int kBandSums = kBand == 1 ? 1 : kBand < 8 ? 2 : kBand / 4;  // columns of a band in a lane
  static_assert(kBand == 1 || kBand == 2 || kBand == 4 || kBand % 8 == 0, "a part of 8 columns, or whole 8s");
  static_assert(Config::kOut % kBand == 0 && Config::kOutTile % kBand == 0, "bands do not cross tiles");

  static constexpr int kTileBands = Config::kGroupsPerTile * kLaneBands;  // of a lane

  // Over the lanes that share a band: those of other positions, and of its other columns.
  template <int kCount>
  static __device__ __forceinline__ void add_lanes(float (&values)[kCount]) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance < 4 && 2 * distance >= kBand) continue;
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] += __shfl_xor_sync(0xFFFFFFFFu, values[i], distance);
    }
  }

  // Bit (2 * slab + half) * kFields + field: whether the lane stores that output, of the tile's `item`th
  // batch item. Along depth a march has to ask for each plane anew.
  using Mask = unsigned long long;
  static_assert(2 * Config::kSlabs * Config::kFields <= 64, "outputs of a lane's channel fit a mask");
  static __device__ __forceinline__ Mask outputs(const Args& args, const Place& at,
                                                 const Slab (&slabs)[Config::kSlabs], int plane, int item,
                                                 int warp, int lane) {
    Mask mask = 0;
    static_for<2 * Config::kSlabs>([&](auto half_slab) {
      constexpr int kHalfSlab = decltype(half_slab)::value;
      const int row = 16 * warp + 8 * (kHalfSlab % 2) + lane / 4;
      const auto to = Kernel::target(args, at, slabs[kHalfSlab / 2], plane, row);
      static_for<Config::kFields>([&](auto field) {
        constexpr int kField = decltype(field)::value;
        if constexpr (Kernel::complete(kField)) {
          const bool deep = Config::kMarch || Kernel::deep(args, at, to.d + Config::kField(kField, 0));
          const bool is = to.n == item && deep && Kernel::flat(args, to, kField);
          mask |= static_cast<Mask>(is) << (kHalfSlab * Config::kFields + kField);
        }
      });
    });
    return mask;
  }
  static __device__ __forceinline__ Mask outputs_of_plane(const Args& args, const Place& at, int plane) {
    Mask mask = 0;
    static_for<2 * Config::kSlabs * Config::kFields>([&](auto bit) {
      constexpr int kBit = decltype(bit)::value, kField = kBit % Config::kFields;
      if constexpr (Kernel::complete(kField)) {
        const int d = plane * Config::kStrideD - Config::kPaddingD + Config::kField(kField, 0);
        mask |= static_cast<Mask>(Kernel::deep(args, at, d)) << kBit;
      }
    });
    return mask;
  }

  // Calls f(i, value, is) for all values of bands kFirst + i; `is`: whether the lane stores it.
  template <int kFirst, int kCount, class Function>
  static __device__ __forceinline__ void for_bands(const Sums& sums, Mask mask, Function&& f) {
    static_for<2 * Config::kSlabs * Config::kFields>([&](auto bit) {
      constexpr int kBit = decltype(bit)::value;
      constexpr int kHalfSlab = kBit / Config::kFields, kField = kBit % Config::kFields;
      if constexpr (Kernel::complete(kField)) {
        const bool is = mask >> kBit & 1;
#pragma unroll
        for (int i = 0; i < kCount * kBandSums; ++i) {
          const int group = (kFirst * kBandSums + i) / (kLaneBands * kBandSums);
          const int column =
              (kFirst * kBandSums + i) % (kLaneBands * kBandSums);  // of the lane's: two of every 8
          const int field = group * Kernel::Layout::kGroupColumns + kField * Config::kOutTile;
          const float sum = sums[kHalfSlab / 2][field / 2 + column / 2 * 4 + kHalfSlab % 2 * 2 + column % 2];
          f(i / kBandSums, Config::Epilogue::apply(sum), is);
        }
      }
    });
  }

  // The moments of a warp's bands, each band's in one of the lanes that share it.
  static constexpr int kSharers = kBand < 4 ? 8 : kBand == 4 ? 16 : 32;
  static constexpr int kKept = (kTileBands + kSharers - 1) / kSharers;
  static __device__ __forceinline__ int place_among_sharers(int lane) {
    return kBand < 4 ? lane / 4 : kBand == 4 ? lane / 4 * 2 + lane % 2 : lane;
  }
  struct Kept {
    Mask outputs;
    Moments<float> moments[kKept] = {};
    __device__ __forceinline__ void add(int band, int lane, const Moments<float>& more) {
      if (place_among_sharers(lane) == band % kSharers) moments[band / kSharers].add(more);
    }
  };

  // Adds what a warp stores of kept.outputs, in one pass or plane.
  static __device__ __forceinline__ void add(const Args& args, const Place& at, const Sums& sums, int plane,
                                             int lane, Kept& kept) {
    const Mask mask = Config::kMarch ? kept.outputs & outputs_of_plane(args, at, plane) : kept.outputs;
    int count = __popcll(mask);  // of each channel: of this lane, then of the warp
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      count += __shfl_xor_sync(0xFFFFFFFFu, count, distance);
    }
    if (count == 0) return;
    constexpr int kAtOnce = kTileBands < 4 ? kTileBands : 4;
    static_for<(kTileBands + kAtOnce - 1) / kAtOnce>([&](auto part) {
      constexpr int kFirst = decltype(part)::value * kAtOnce;
      constexpr int kCount = kTileBands - kFirst < kAtOnce ? kTileBands - kFirst : kAtOnce;
      add_bands<kFirst, kCount>(sums, mask, static_cast<float>(count * kBand), lane, kept);
    });
  }

  // Several bands together, so that their shuffles overlap.
  template <int kFirst, int kCount>
  static __device__ __forceinline__ void add_bands(const Sums& sums, Mask mask, float count, int lane,
                                                   Kept& kept) {
    float shift[kCount] = {}, sum[kCount] = {}, squares[kCount] = {};
    for_bands<kFirst, kCount>(sums, mask,
                              [&](int i, float value, bool is) { shift[i] += is ? value : 0.0f; });
    add_lanes(shift);
    const float share = 1 / count;
#pragma unroll
    for (int i = 0; i < kCount; ++i) shift[i] *= share;  // the mean, but for rounding
    for_bands<kFirst, kCount>(sums, mask, [&](int i, float value, bool is) {
      const float deviation = is ? value - shift[i] : 0.0f;
      sum[i] += deviation;
      squares[i] += deviation * deviation;
    });
    add_lanes(sum);
    add_lanes(squares);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      kept.add(kFirst + i, lane, Moments<float>{count, shift[i], sum[i], squares[i]});
    }
  }

  static __device__ __forceinline__ void store(const Args& args, const Place& at, int n, long long slot,
                                               int lane, const Kept& kept) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      const int place = i * kSharers + place_among_sharers(lane);
      if (place >= kTileBands) continue;
      const int group = place / kLaneBands, lane_band = place % kLaneBands;
      int column = lane_band * kBand;
      if (kBand == 1) column = lane_band / 2 * 8 + Kernel::first_column(lane) + lane_band % 2;
      if (kBand == 2 || kBand == 4) column = lane_band * 8 + Kernel::first_column(lane) / kBand * kBand;
      const int out = at.first_out() + column;
      if (out >= Config::kOut) continue;
      const int band = ((at.first_group() + group) * Config::kOut + out) / kBand;
      const long long row = static_cast<long long>(n) * kBands + band;
      static_cast<Moments<float>*>(args.moments)[row * args.moment_slots + slot] = kept.moments[i];
    }
  }

  // Of a pass that is complete in itself.
  static __device__ __forceinline__ void leave(const Args& args, const Place& at, const Sums& sums,
                                               const Slab (&slabs)[Config::kSlabs], long long slot, int warp,
                                               int lane) {
    for (int item = 0; item < args.items && at.n + item < args.batch; ++item) {
      Kept kept;
      kept.outputs = outputs(args, at, slabs, 0, item, warp, lane);
      add(args, at, sums, 0, lane, kept);
      store(args, at, at.n + item, slot, lane, kept);
    }
  }

  // Where a warp's moments of a tile go; the passes over it follow each other.
  static __device__ __forceinline__ long long slot(const Args& args, const Place& at, int pass, int warp) {
    const long long first =
        (static_cast<long long>(at.tile) * Config::kVariants + at.variant()) * args.passes;
    return (first + pass) * Kernel::kConsumerWarps + warp;
  }
};

}  // namespace tconv3d
