// The moments of the outputs that the halo kernel stores, for a norm layer that follows. They are computed
// from the accumulators, in registers.
//
// A band is kBand neighbouring output channels of one norm group. When a pass over a tile (or a march) is
// complete, each warp stores the moments of every band over its own positions, all slabs and fields. The
// shift of the moments is one of the values themselves, the same for all lanes, so that a value costs three
// instructions and lanes only add. The cancellation in the subtraction of squares is then bounded by the
// number of values, whatever their mean. The address of the moments depends on the tile, never on timing:
// [batch][bands][slots], so that moments of a norm group are neighbours.
#pragma once

#include "halo_stores.cuh"
#include "moments.cuh"

namespace tconv3d {

template <class Config>
struct HaloMoments {
  using Layout = HaloLayout<Config>;
  using Stores = HaloStores<Config>;
  using Accumulators = HaloSums<Config>;
  using Place = typename Stores::Place;
  using Slab = typename Stores::Slab;
  using Sums = typename Stores::Sums;

  static constexpr int kBand = Config::kMomentBand;
  static constexpr int kBands = Config::kGroups * Config::kOut / kBand;  // bands of all channels
  // Bands of which a lane has columns. A lane has two columns of every 8, which belong to one band or to two.
  static constexpr int kLaneBands = Config::kOutTile / (kBand == 1 ? 4 : kBand < 8 ? 8 : kBand);
  static constexpr int kBandSums = kBand == 1 ? 1 : kBand < 8 ? 2 : kBand / 4;  // columns of a band in a lane
  static_assert(kBand == 1 || kBand == 2 || kBand == 4 || kBand % 8 == 0, "a part of 8 columns, or whole 8s");
  static_assert(Config::kOut % kBand == 0 && Config::kOutTile % kBand == 0, "bands do not cross tiles");

  static constexpr int kTileBands = Config::kGroupsPerTile * kLaneBands;  // bands of a lane in a tile

  // Bit (2 * slab + half) * kFields + field of a mask says whether the lane stores this output, for one batch
  // item of the tile. A march tests the depth of an output for each plane.
  static constexpr int kBits = 2 * Config::kSlabs * Config::kFields;
  static_assert(kBits <= 64, "outputs of a lane's channel fit a mask");
  using Mask = typename Choose<(kBits > 32), unsigned long long, unsigned>::type;
  static constexpr unsigned kAll = 0xFFFFFFFFu;

  // Returns the mask of a lane's outputs. Each lane tests one of 32 positions, and a ballot tells the results
  // to all.
  static __device__ __forceinline__ Mask outputs(const Args& args, const Place& at,
                                                 const Slab (&slabs)[Config::kSlabs], int plane, int item,
                                                 int warp, int lane) {
    Mask mask = 0;
    static_for<(Config::kSlabs + 1) / 2>([&](auto two) {
      constexpr int kFirst = 2 * decltype(two)::value;
      constexpr int kSecond = kFirst + 1 < Config::kSlabs ? kFirst + 1 : kFirst;
      const Slab slab = lane < 16 ? slabs[kFirst] : slabs[kSecond];
      const auto to = Stores::target(args, at, slab, plane, 16 * warp + lane % 16);
      static_for<Config::kFields>([&](auto field) {
        constexpr int kField = decltype(field)::value;
        if constexpr (Accumulators::complete(kField)) {
          const bool deep = Config::kMarch || Stores::deep(args, at, to.d + Config::kField(kField, 0));
          const bool is = to.n == item && deep && Stores::flat(args, to, kField);
          const unsigned rows = __ballot_sync(kAll, is) >> (lane / 4);
#pragma unroll
          for (int half = 0; half < 2 * (kSecond - kFirst + 1); ++half) {
            mask |= static_cast<Mask>(rows >> 8 * half & 1)
                    << ((2 * kFirst + half) * Config::kFields + kField);
          }
        }
      });
    });
    return mask;
  }
  // Returns the bits of the complete fields that lie `depth` outputs behind a plane's first output.
  static __device__ constexpr Mask bits_of_depth(int depth) {
    Mask mask = 0;
    for (int bit = 0; bit < kBits; ++bit) {
      const int field = bit % Config::kFields;
      const bool is = Accumulators::complete(field) && Config::kField(field, 0) == depth;
      mask |= static_cast<Mask>(is) << bit;
    }
    return mask;
  }
  // One test for each depth selects a constant. Built bit by bit from the tests, the mask lost bits:
  // NVRTC 13.0 to 13.4 turned single bits into an instruction that writes another byte of the register.
  static __device__ __forceinline__ Mask outputs_of_plane(const Args& args, const Place& at, int plane) {
    Mask mask = 0;
    static_for<Config::kStrideD>([&](auto depth) {
      constexpr int kDepth = decltype(depth)::value;
      constexpr Mask kBitsOfDepth = bits_of_depth(kDepth);
      const int d = plane * Config::kStrideD - Config::kPaddingD + kDepth;
      mask |= Stores::deep(args, at, d) ? kBitsOfDepth : Mask(0);
    });
    return mask;
  }

  // Returns the lane's `i`th value of an output; a lane has kBandSums values of every band.
  template <int kBit>
  static __device__ __forceinline__ float value(const Sums& sums, int i) {
    constexpr int kHalfSlab = kBit / Config::kFields, kField = kBit % Config::kFields;
    const int group = i / (kLaneBands * kBandSums), column = i % (kLaneBands * kBandSums);
    const int field = group * Layout::kGroupColumns + kField * Config::kOutTile;
    return sums[kHalfSlab / 2][field / 2 + column / 2 * 4 + kHalfSlab % 2 * 2 + column % 2];
  }

  // The running moments of a lane's bands.
  struct Kept {
    Mask outputs = 0;
    int count = 0;  // values of each channel
    bool shifted = false;
    float shift[kTileBands] = {}, sum[kTileBands] = {}, squares[kTileBands] = {};
  };

  // Chooses the shift of every band: a value that some lane stores, if there is one.
  template <int kBit = 0>
  static __device__ __forceinline__ void choose_shifts(const Sums& sums, Mask mask, int lane, Kept& kept) {
    if constexpr (kBit < kBits) {
      if constexpr (Accumulators::complete(kBit % Config::kFields)) {
        const unsigned lanes = __ballot_sync(kAll, static_cast<int>(mask >> kBit & 1));
        if (lanes != 0) {
          // First lane of each four that holds columns of this lane's band.
          const int own = kBand < 4 ? lane % 4 : kBand == 4 ? lane % 4 / 2 * 2 : 0;
          const int source = (__ffs(static_cast<int>(lanes)) - 1) / 4 * 4 + own;
#pragma unroll
          for (int i = 0; i < kTileBands; ++i) {
            kept.shift[i] = __shfl_sync(kAll, value<kBit>(sums, i * kBandSums), source);
          }
          kept.shifted = true;
          return;
        }
      }
      choose_shifts<kBit + 1>(sums, mask, lane, kept);
    }
  }

  // Adds the values of a warp in kept.outputs, of one pass or plane.
  static __device__ __forceinline__ void add(const Args& args, const Place& at, const Sums& sums, int plane,
                                             int lane, Kept& kept) {
    const Mask mask = Config::kMarch ? kept.outputs & outputs_of_plane(args, at, plane) : kept.outputs;
    if (!kept.shifted) choose_shifts(sums, mask, lane, kept);
    kept.count += sizeof(Mask) == 8 ? __popcll(mask) : __popc(static_cast<unsigned>(mask));
    static_for<kBits>([&](auto bit) {
      constexpr int kBit = decltype(bit)::value;
      if constexpr (Accumulators::complete(kBit % Config::kFields)) {
        if (mask >> kBit & 1) {
#pragma unroll
          for (int i = 0; i < kTileBands * kBandSums; ++i) {
            const float deviation = value<kBit>(sums, i) - kept.shift[i / kBandSums];
            kept.sum[i / kBandSums] += deviation;
            kept.squares[i / kBandSums] += deviation * deviation;
          }
        }
      }
    });
  }

  // Adds up the moments of lanes that share bands: lanes with other positions, and with other columns of a
  // band. In each step two lanes divide their bands if the number is even, so that each adds up half of them.
  struct Share {
    int first = 0;       // first of the bands that this lane adds up
    bool speaks = true;  // whether this lane stores the sums
  };
  static constexpr bool adds(int distance) { return distance >= 4 || 2 * distance < kBand; }
  template <int kCount, int kDistance>
  static __device__ __forceinline__ void add_lanes(Kept& kept, Share& share, int lane) {
    const bool upper = lane & kDistance;
    if constexpr (kCount % 2 == 0) {
      constexpr int kHalf = kCount / 2;
      share.first += upper ? kHalf : 0;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        kept.shift[i] = upper ? kept.shift[i + kHalf] : kept.shift[i];
        halve(kept.sum[i], kept.sum[i + kHalf], upper, kDistance);
        halve(kept.squares[i], kept.squares[i + kHalf], upper, kDistance);
      }
    } else {
      share.speaks = share.speaks && !upper;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        kept.sum[i] += __shfl_xor_sync(kAll, kept.sum[i], kDistance);
        kept.squares[i] += __shfl_xor_sync(kAll, kept.squares[i], kDistance);
      }
    }
  }
  // Takes the upper or the lower of two sums, and adds the other lane's.
  static __device__ __forceinline__ void halve(float& lower, float upper, bool keep_upper, int distance) {
    const float given = keep_upper ? lower : upper;
    lower = (keep_upper ? upper : lower) + __shfl_xor_sync(kAll, given, distance);
  }

  // Adds up the lanes' running moments and stores them.
  template <int kCount = kTileBands, int kDistance = 16>
  static __device__ __forceinline__ void store(const Args& args, const Place& at, int n, long long slot,
                                               int lane, Kept& kept, Share share = {}) {
    if constexpr (kDistance > 0 && adds(kDistance)) {
      add_lanes<kCount, kDistance>(kept, share, lane);
      store<kCount % 2 == 0 ? kCount / 2 : kCount, kDistance / 2>(args, at, n, slot, lane, kept, share);
    } else if constexpr (kDistance > 0) {
      store<kCount, kDistance / 2>(args, at, n, slot, lane, kept, share);
    } else {
      int count = kept.count;
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        count += __shfl_xor_sync(kAll, count, distance);
      }
      if (!share.speaks) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int place = share.first + i, group = place / kLaneBands, lane_band = place % kLaneBands;
        int column = lane_band * kBand;
        if (kBand == 1) column = lane_band / 2 * 8 + Accumulators::first_column(lane) + lane_band % 2;
        if (kBand == 2 || kBand == 4)
          column = lane_band * 8 + Accumulators::first_column(lane) / kBand * kBand;
        const int out = at.first_out() + column;
        if (out >= Config::kOut) continue;
        const int band = ((at.first_group() + group) * Config::kOut + out) / kBand;
        const long long row = static_cast<long long>(n) * kBands + band;
        const Moments<float> moments{static_cast<float>(count * kBand), kept.shift[i], kept.sum[i],
                                     kept.squares[i]};
        static_cast<Moments<float>*>(args.left)[row * args.moment_slots + slot] = moments;
      }
    }
  }

  // Stores the moments of a pass over a tile that does not march.
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

  // A march has running moments for every batch item that its tile touches: one, or two if the tile is a run
  // across batch items. Few warps have outputs of both.
  struct Marching {
    Kept kept[2];

    __device__ __forceinline__ void start(const Args& args, const Place& at,
                                          const Slab (&slabs)[Config::kSlabs], int warp, int lane) {
      const int first = first_item(args, at), count = items(args, at, first);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i < count) kept[i].outputs = HaloMoments::outputs(args, at, slabs, 0, first + i, warp, lane);
      }
    }
    __device__ __forceinline__ void add(const Args& args, const Place& at, const Sums& sums, int plane,
                                        int lane) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (__any_sync(kAll, kept[i].outputs != 0)) HaloMoments::add(args, at, sums, plane, lane, kept[i]);
      }
    }
    __device__ __forceinline__ void store(const Args& args, const Place& at, int warp, int lane) {
      const int first = first_item(args, at), count = items(args, at, first);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (i >= count) continue;
        const long long slot = HaloMoments::slot(args, at, tile_of_item(args, at, first + i), 0, warp);
        HaloMoments::store(args, at, at.n + first + i, slot, lane, kept[i]);
      }
    }
  };
  static __device__ __forceinline__ int first_item(const Args& args, const Place& at) {
    return divide(divide(at.start, args.halo_w), args.halo_h);
  }
  static __device__ __forceinline__ int items(const Args& args, const Place& at, int first) {
    if (at.n + first >= args.batch) return 0;
    const bool two = args.sheets > 1 && (first + 1) * args.halo.h * args.halo.w < at.start + args.step_rows;
    return two && at.n + first + 1 < args.batch ? 2 : 1;
  }
  // Returns the tile's index among the tiles that touch the batch item.
  static __device__ __forceinline__ int tile_of_item(const Args& args, const Place& at, int item) {
    return args.sheets > 1 ? at.tile - item * args.halo.h * args.halo.w / args.step_rows : at.tile;
  }

  // Stores empty moments in unused slots. Batch items have different numbers of tiles, and shares cut tiles
  // into different numbers of pieces, so that some slots have no warp. A loader warp of the block that
  // marches through the end of the last tile (or piece) fills them.
  static __device__ __forceinline__ void leave_nothing(const Args& args, int lane) {
    using Work = typename HaloTile<Config>::Work;
    for (Work work = Work::of_block(args); work.left(args); work.advance(args)) {
      const Place at = work.place(args);
      if (at.last_output < args.output.d) continue;
      const int first = first_item(args, at), count = items(args, at, first);
      for (int item = first; item < first + count; ++item) {
        const int tile = tile_of_item(args, at, item);
        const bool goes_on = at.start + args.step_rows < (item + 1) * args.halo.h * args.halo.w;
        const bool last =
            args.sheets > 1 && (!goes_on || at.tile == static_cast<int>(args.tiles_h.divisor) - 1);
        const int end = (last ? args.item_tiles : tile + 1) * args.pieces;
        for (int piece = tile * args.pieces + at.piece + 1; piece < end; ++piece) {
          leave_nothing(args, at, at.n + item, piece, lane);
        }
      }
    }
  }
  static __device__ __forceinline__ void leave_nothing(const Args& args, const Place& at, int n, int piece,
                                                       int lane) {
    constexpr int kGroupBands = Config::kOutTile / kBand, kWarps = HaloShared<Config>::kConsumerWarps;
    for (int i = lane; i < Config::kGroupsPerTile * kGroupBands * kWarps; i += 32) {
      const int band = i / kWarps, group = at.first_group() + band / kGroupBands;
      const int out = at.first_out() + band % kGroupBands * kBand;
      const long long row = static_cast<long long>(n) * kBands + (group * Config::kOut + out) / kBand;
      const long long slot =
          (static_cast<long long>(piece) * Config::kVariants + at.variant()) * kWarps + i % kWarps;
      if (out < Config::kOut) static_cast<Moments<float>*>(args.left)[row * args.moment_slots + slot] = {};
    }
  }

  // Returns the slot of a warp's moments of a tile; the passes over a tile have neighbouring slots. A march
  // has one pass.
  static __device__ __forceinline__ long long slot(const Args& args, const Place& at, int tile, int pass,
                                                   int warp) {
    const long long place = Config::kMarch ? static_cast<long long>(tile) * args.pieces + at.piece : tile;
    const long long first = (place * Config::kVariants + at.variant()) * args.passes;
    return (first + pass) * HaloShared<Config>::kConsumerWarps + warp;
  }
};

}  // namespace tconv3d
