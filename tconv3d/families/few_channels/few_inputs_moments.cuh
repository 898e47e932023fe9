// The moments of the outputs that few_inputs.cuh stores, for a norm that follows. They are computed from the
// accumulators.
//
// A unit is kMomentUnit neighbouring channels of one norm group. A lane computes mean and sum of squared
// deviations of its own values of each unit, whenever it stores a set of accumulators, and the lanes join
// these (lane_moments.cuh), so that each lane has few units in the end, over all positions of the warp. It
// keeps their moments over all tiles of a batch item in shared memory that no other thread uses.
//
// Every warp of a block stores moments of its own: [batch][units][slots]. Tiles of a batch item that a block
// takes are as far apart as there are such blocks, so that the first of them, counted from the batch item's
// first tile, is a number that no other block with the same channels has. It is the slot, with the warp, and
// no slot is left unused.
#pragma once

#include "few_channels.cuh"
#include "lane_moments.cuh"

namespace tconv3d {

// The configuration of the stores of sums that have been through the epilogue before.
template <class C>
struct FewFinished : C {
  using Epilogue = Identity;
};

template <class C>
struct FewMoments {
  static constexpr int kRun = C::kPairedTiles ? 4 : 2;  // neighbouring channels of a lane
  static constexpr int kWarps = C::kThreads / 32, kPasses = C::kBlockOut / (8 * C::kPassTiles);
  using Units = MomentUnits<C::kMomentUnit, kRun, C::kPassTiles * 8 / (4 * kRun)>;
  static constexpr int kUnits = Units::kUnits, kLeft = Units::kLeft;
  using Sums = float[C::kTogether][C::kRowTiles][C::kPassTiles][4];
  // Positions of which a lane has values: two of each row tile and phase.
  static constexpr int kPositions = 2 * C::kTogether * C::kRowTiles;
  static constexpr int kWords = C::kThreads * kPasses * kLeft * 4;  // words of shared memory for a block
  static_assert(C::kOutPerGroup % C::kMomentUnit == 0);

  // How many positions of a lane exist in every row tile: the first ones, along w. These are counts, because
  // NVRTC loses bits of a mask that is built bit by bit from tests (halo_moments.cuh).
  struct Existing {
    int of[C::kRowTiles];
    __device__ __forceinline__ bool has(int position) const {
      return position % (2 * C::kTogether) < of[position / (2 * C::kTogether)];
    }
    __device__ __forceinline__ int count() const {
      int all = 0;
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) all += of[m];
      return all;
    }
  };

  const Args& args;
  Moments<float>* kept;  // [pass][unit of a lane][thread]
  int warp, lane, group, first_out;

  static __device__ __forceinline__ void activate(Sums& sums) {
#pragma unroll
    for (int together = 0; together < C::kTogether; ++together) {
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int tile = 0; tile < C::kPassTiles; ++tile) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums[together][m][tile][i] = C::Epilogue::apply(sums[together][m][tile][i]);
        }
      }
    }
  }

  // Returns the lane's value of column `k` of a unit, at position (m * 2 + row) * kTogether + together.
  static __device__ __forceinline__ float value(const Sums& sums, int position, int unit, int k) {
    const int together = position % C::kTogether, row = position / C::kTogether % 2;
    const int m = position / C::kTogether / 2;
    const int block = Units::block(unit, k), e = Units::place(unit, k);
    return sums[together][m][block * kRun / 2 + e / 2][2 * row + e % 2];
  }

  __device__ __forceinline__ Moments<float>& own(int pass, int k) const {
    return kept[(pass * kLeft + k) * C::kThreads + static_cast<int>(threadIdx.x)];
  }

  // Begins the tile `index` of batch item n; `step` is the distance of the block's tiles. Nothing is kept in
  // registers from tile to tile, of which the products leave few.
  __device__ __forceinline__ void begin(int index, int step, int n) const {
    const int before = index < step ? -1 : tile_at(index - step, args.tiles).n;
    if (before == n) return;
    if (before >= 0) store(index, step, before);
    for (int i = 0; i < kPasses * kLeft; ++i) own(0, i) = {};
  }

  // Returns the lane's part of a unit. The sums of a unit are not read again, which frees their registers.
  static __device__ __forceinline__ MomentPart own_part(const Sums& sums, const Existing& existing,
                                                        float inverse, int unit) {
    MomentPart part = {0, 0};
#pragma unroll
    for (int position = 0; position < kPositions; ++position) {
#pragma unroll
      for (int k = 0; k < Units::kColumns; ++k) {
        if (existing.has(position)) part.mean += value(sums, position, unit, k);
      }
    }
    part.mean *= inverse;
#pragma unroll
    for (int position = 0; position < kPositions; ++position) {
#pragma unroll
      for (int k = 0; k < Units::kColumns; ++k) {
        const float deviation = value(sums, position, unit, k) - part.mean;
        if (existing.has(position)) part.squares += deviation * deviation;
      }
    }
    return part;
  }

  // Adds the values of a pass.
  __device__ __forceinline__ void add(const Sums& sums, const Existing& existing, int pass) const {
    const float values = static_cast<float>(existing.count() * Units::kColumns);
    const float inverse = values == 0 ? 0 : 1 / values;
    MomentPart parts[kUnits];
    static_for<kUnits>([&](auto unit) { parts[unit] = own_part(sums, existing, inverse, unit); });
    const float all = Units::join(parts, values, lane);
    if (all == 0) return;
#pragma unroll
    for (int k = 0; k < kLeft; ++k) {
      Moments<float> found = own(pass, k);
      found.add({all, parts[k].mean, 0, parts[k].squares});
      own(pass, k) = found;
    }
  }

  // Stores the moments of batch item n; `index` is any tile of the block.
  __device__ __forceinline__ void store(int index, int step, int n) const {
    const auto share = Units::share(lane);
    if (!share.speaks) return;
    const auto& by = args.tiles;
    const int tiles = static_cast<int>(by.by_d.divisor * by.by_h.divisor * by.by_w.divisor);
    const int rank = (index % step + step - n * tiles % step) % step;
    const int slot = rank * kWarps + warp;
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int k = 0; k < kLeft; ++k) {
        const int out = first_out + pass * C::kPassTiles * 8 + Units::column(share.first + k, lane);
        if (k >= share.some || out >= C::kOutPerGroup) continue;
        const int unit = (group * C::kOutPerGroup + out) / C::kMomentUnit;
        const long long row =
            static_cast<long long>(n) * (C::kGroups * C::kOutPerGroup / C::kMomentUnit) + unit;
        static_cast<Moments<float>*>(args.moments)[row * args.moment_slots + slot] = own(pass, k);
      }
    }
  }
};

}  // namespace tconv3d
