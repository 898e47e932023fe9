// The moments of the outputs that up.cuh stores, for a norm that follows. They are computed from the
// accumulators, in registers.
//
// A unit is kMomentUnit neighbouring columns (channels, if tensors are channels-last) of one norm group. For
// every tile, a lane computes mean and sum of squared deviations of its own values of each unit, and the
// lanes join these (lane_moments.cuh), so that each lane has few units in the end, over all positions of the
// warp. It keeps their sums over all tiles of a batch item relative to a shift, which is the mean of the
// first tile.
//
// Every consumer warp of a block stores moments of its own: [batch][units][slots]. Tiles of a batch item that
// a consumer takes are 2 * splits apart, so that the first of them, counted from the batch item's first tile,
// is a number that no other consumer of the same columns has. It is the slot, and no slot is left unused.
#pragma once

#include "lane_moments.cuh"
#include "up_layouts.cuh"

namespace tconv3d {

// The configuration of the stores of sums that have been through the epilogue before.
template <class C>
struct UpFinished : C {
  using Epilogue = Identity;
};

template <class C, class Layout>
struct UpMoments {
  using Sums = typename Layout::Sums;
  static constexpr int kRun = C::kLast ? Layout::kPieceItems : 2;  // neighbouring columns of a lane
  // Blocks of columns. Those of channels-last tensors that have the same channels of other taps repeat them.
  static constexpr int kBlocks = (C::kLast ? Layout::kOutTile : C::kColumns) / (4 * kRun);
  using Units = MomentUnits<C::kMomentUnit, kRun, kBlocks>;
  static constexpr int kUnits = Units::kUnits, kLeft = Units::kLeft;
  static constexpr int kEach = Layout::kSums / kUnits / 2;  // values of a unit and position in a lane
  static constexpr int kAllColumns = C::kLast ? C::kOut : C::kOut * Layout::kTaps;
  static constexpr int kTapTiles = C::kLast ? Layout::kTaps / C::kTapTile : 1;
  static_assert(kAllColumns % C::kMomentUnit == 0);

  const Layout& layout;
  const Args& args;
  int warp, lane;
  int item = -1, slot = 0;  // the batch item whose moments are kept, and their slot
  float count = 0;          // values of each unit
  float shift[kLeft], sum[kLeft], squares[kLeft];

  __device__ __forceinline__ UpMoments(const Layout& layout)
      : layout(layout), args(layout.args), warp(layout.warp % 4), lane(layout.lane) {}

  static __device__ __forceinline__ void activate(Sums& sums) {
#pragma unroll
    for (int i = 0; i < Layout::kSums; ++i) sums.at[i] = C::Epilogue::apply(sums.at[i]);
  }

  // Returns value k of a unit, of the lane's first or second position.
  static __device__ __forceinline__ float value(const Sums& sums, int unit, int half, int k) {
    const int own = k % Units::kColumns, repeat = k / Units::kColumns;
    const int block = repeat * kBlocks + Units::block(unit, own), e = Units::place(unit, own);
    return sums.at[4 * (block * kRun / 2 + e / 2) + 2 * half + e % 2];
  }
  static __device__ __forceinline__ MomentPart own(const Sums& sums, int unit, int half) {
    float added = 0, squared = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) added += value(sums, unit, half, k);
    const float mean = added * (1.0f / kEach);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const float deviation = value(sums, unit, half, k) - mean;
      squared += deviation * deviation;
    }
    return {mean, squared};
  }

  // Whether the lane's first or second position exists.
  __device__ __forceinline__ bool exists(int first, int half) const {
    if constexpr (C::kLast) {
      return first + layout.own_position(half) < args.positions;
    } else {
      return first + layout.own_position() < args.positions;
    }
  }

  // Adds the values of a tile, of which `first` is the first position.
  __device__ __forceinline__ void add(const Sums& sums, int tile, int n, int first) {
    if (n != item) {
      store();
      item = n;
      const int rank = tile - n * static_cast<int>(args.by_tiles.divisor);
      const int slots = static_cast<int>(args.moment_slots) / kTapTiles;
      slot = layout.kind % kTapTiles * slots + rank * 4 + warp;
      count = 0;
#pragma unroll
      for (int k = 0; k < kLeft; ++k) shift[k] = sum[k] = squares[k] = 0;
    }
    const bool there[2] = {exists(first, 0), exists(first, 1)};
    const float counts[2] = {there[0] ? kEach : 0.0f, there[1] ? kEach : 0.0f};
    const MomentJoint halves(counts[0], counts[1]);
    MomentPart parts[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      // What a position outside holds is not a value, and may be no number.
      const MomentPart upper = there[0] ? own(sums, unit, 0) : MomentPart{0, 0};
      const MomentPart lower = there[1] ? own(sums, unit, 1) : MomentPart{0, 0};
      parts[unit] = halves.of(upper, lower);
    }
    keep(parts, Units::join(parts, counts[0] + counts[1], lane));
  }
  __device__ __forceinline__ void keep(const MomentPart (&parts)[kUnits], float values) {
    if (values == 0) return;
#pragma unroll
    for (int k = 0; k < kLeft; ++k) {
      if (count == 0) shift[k] = parts[k].mean;
      const float step = parts[k].mean - shift[k];
      sum[k] += values * step;
      squares[k] += parts[k].squares + values * step * step;
    }
    count += values;
  }

  __device__ __forceinline__ int first_column() const {
    if constexpr (C::kLast) {
      return layout.out;
    } else {
      return layout.first_column;
    }
  }

  // Stores the moments of the batch item, if there is one.
  __device__ __forceinline__ void store() const {
    const auto share = Units::share(lane);
    if (item < 0 || !share.speaks) return;
#pragma unroll
    for (int k = 0; k < kLeft; ++k) {
      const int place = first_column() + Units::column(share.first + k, lane);
      if (k >= share.some || place >= kAllColumns) continue;
      const long long row =
          static_cast<long long>(item) * (kAllColumns / C::kMomentUnit) + place / C::kMomentUnit;
      static_cast<Moments<float>*>(args.moments)[row * args.moment_slots + slot] = {count, shift[k], sum[k],
                                                                                    squares[k]};
    }
  }
};

}  // namespace tconv3d
