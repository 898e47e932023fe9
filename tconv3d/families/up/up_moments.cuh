// The moments of the outputs that up.cuh stores, for a norm that follows. They are computed from the
// accumulators, in registers.
//
// A unit is kMomentUnit neighbouring columns (channels, if tensors are channels-last) of one norm group. For
// every tile, a lane computes mean and sum of squared deviations of its own values of each unit. Lanes then
// join these in pairs: in each step two lanes divide the units among them, so that in the end each lane has
// few units, over all positions of the warp. It keeps their sums over all tiles of a batch item relative to a
// shift, which is the mean of the first tile. No value is ever subtracted from one that is far away because
// of a single value, and nothing depends on timing.
//
// Every consumer warp of a block stores moments of its own: [batch][units][slots]. Tiles of a batch item that
// a consumer takes are 2 * splits apart, so that the first of them, counted from the batch item's first tile,
// is a number that no other consumer of the same columns has. It is the slot, and no slot is left unused.
#pragma once

#include "moments.cuh"
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
  static constexpr unsigned kAll = 0xFFFFFFFFu;
  static constexpr int kUnit = C::kMomentUnit;

  // A lane has kRun neighbouring columns of every block of kBlock, of two positions. Blocks of channels-last
  // tensors that have the same channels of other taps repeat the units.
  static constexpr int kRun = C::kLast ? Layout::kPieceItems : 2, kBlock = 4 * kRun;
  static constexpr int kDistinct = (C::kLast ? Layout::kOutTile : C::kColumns) / kBlock;
  // A unit has kUnitBlocks blocks, or one, of which kSharing lanes have columns; a run has kParts units.
  static constexpr int kUnitBlocks = kUnit / kBlock > 1 ? kUnit / kBlock : 1;
  static constexpr int kUnitRun = kUnit < kRun ? kUnit : kRun, kParts = kRun / kUnitRun;
  static constexpr int kSharing = kUnit >= kBlock ? 4 : kUnit / kUnitRun;
  static constexpr int kUnits = kDistinct / kUnitBlocks * kParts;  // units of which a lane has values
  static constexpr int kEach = Layout::kSums / kUnits / 2;         // values of a unit and position in a lane
  static constexpr int kAllColumns = C::kLast ? C::kOut : C::kOut * Layout::kTaps;
  static constexpr int kTapTiles = C::kLast ? Layout::kTaps / C::kTapTile : 1;
  static_assert(kDistinct % kUnitBlocks == 0 && kRun % kUnitRun == 0 && kAllColumns % kUnit == 0);
  static_assert(kUnit % kBlock == 0 || kBlock % kUnit == 0, "a unit has whole blocks or is inside one");

  // Mean and sum of squared deviations of some values.
  struct Part {
    float mean, squares;
  };
  // How two sets of values are joined: the second set's share of all values, and what a squared distance of
  // the means counts.
  struct Joint {
    float share, distance;

    __device__ __forceinline__ Joint(float first, float second) {
      share = second == 0 ? 0 : second / (first + second);
      distance = first * share;
    }
    __device__ __forceinline__ Part of(const Part& first, const Part& second) const {
      const float step = second.mean - first.mean;
      return {first.mean + step * share, first.squares + second.squares + step * distance * step};
    }
  };

  // Two lanes that differ in a bit have values of the same units if the bit is one of their positions, or of
  // the columns of a unit.
  static constexpr bool joins(int distance) { return distance >= 4 || distance < kSharing; }
  // The units that a lane has in the end.
  static constexpr int left(int count, int distance) {
    return distance == 0 ? count : left(joins(distance) ? (count + 1) / 2 : count, distance / 2);
  }
  static constexpr int kLeft = left(kUnits, 16);

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
    const int repeat = k / (kUnitBlocks * kUnitRun);
    const int block = repeat * kDistinct + unit / kParts * kUnitBlocks + k / kUnitRun % kUnitBlocks;
    const int e = unit % kParts * kUnitRun + k % kUnitRun;
    return sums.at[4 * (block * kRun / 2 + e / 2) + 2 * half + e % 2];
  }
  static __device__ __forceinline__ Part own(const Sums& sums, int unit, int half) {
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
    const Joint halves(counts[0], counts[1]);
    Part parts[kUnits];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      // What a position outside holds is not a value, and may be no number.
      const Part upper = there[0] ? own(sums, unit, 0) : Part{0, 0};
      const Part lower = there[1] ? own(sums, unit, 1) : Part{0, 0};
      parts[unit] = halves.of(upper, lower);
    }
    join<kUnits, 16>(parts, counts[0] + counts[1]);
  }

  // Joins the parts of lanes that have values of the same units, then adds what the lane is left with.
  template <int kCount, int kDistance>
  __device__ __forceinline__ void join(Part (&parts)[kUnits], float values) {
    if constexpr (kDistance > 0 && joins(kDistance)) {
      const float others = __shfl_xor_sync(kAll, values, kDistance);
      const Joint both(values, others);
      const bool upper = (lane & kDistance) != 0;
      constexpr int kHalf = (kCount + 1) / 2;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        Part mine = parts[i], given = mine;
        if constexpr (kCount > 1) {
          const Part second = i + kHalf < kCount ? parts[i + kHalf < kCount ? i + kHalf : 0] : Part{0, 0};
          mine = upper ? second : mine;
          given = upper ? given : second;
        }
        const Part got = {__shfl_xor_sync(kAll, given.mean, kDistance),
                          __shfl_xor_sync(kAll, given.squares, kDistance)};
        parts[i] = both.of(mine, got);
      }
      join<kHalf, kDistance / 2>(parts, values + others);
    } else if constexpr (kDistance > 0) {
      join<kCount, kDistance / 2>(parts, values);
    } else {
      keep(parts, values);
    }
  }
  __device__ __forceinline__ void keep(const Part (&parts)[kUnits], float values) {
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

  // The units of a lane, as join() leaves them: `first` and the following ones, `some` in all.
  struct Share {
    int first, some;
    bool speaks;  // whether no other lane stores the same units
  };
  template <int kCount, int kDistance>
  __device__ __forceinline__ Share share_of(Share share) const {
    if constexpr (kDistance == 0) {
      return share;
    } else if constexpr (!joins(kDistance)) {
      return share_of<kCount, kDistance / 2>(share);
    } else {
      constexpr int kHalf = (kCount + 1) / 2;
      const bool upper = (lane & kDistance) != 0;
      if (kCount == 1) {
        share.speaks = share.speaks && !upper;
      } else if (upper) {
        share.first += kHalf;
        share.some -= kHalf;
      } else {
        share.some = min(share.some, kHalf);
      }
      return share_of<kHalf, kDistance / 2>(share);
    }
  }

  // Returns the first column of a unit of the lane, counted from the block's first.
  __device__ __forceinline__ int column(int unit) const {
    const int block = unit / kParts * kUnitBlocks * kBlock;
    return kUnit >= kBlock ? block : block + (lane % 4 * kRun + unit % kParts * kUnitRun) / kUnit * kUnit;
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
    const Share share = share_of<kUnits, 16>({0, kUnits, true});
    if (item < 0 || !share.speaks) return;
#pragma unroll
    for (int k = 0; k < kLeft; ++k) {
      const int place = first_column() + column(share.first + k);
      if (k >= share.some || place >= kAllColumns) continue;
      const long long row = static_cast<long long>(item) * (kAllColumns / kUnit) + place / kUnit;
      static_cast<Moments<float>*>(args.moments)[row * args.moment_slots + slot] = {count, shift[k], sum[k],
                                                                                    squares[k]};
    }
  }
};

}  // namespace tconv3d
