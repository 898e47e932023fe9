// Moments (moments.cuh) of values that the lanes of a warp hold as accumulators of matrix instructions: means
// and squared deviations are computed in each lane, and joined in pairs of lanes.
//
// No sum is about a single value that could be far from all others, and the order of all steps is fixed, so
// that the results are bitwise reproducible.
#pragma once

#include "moments.cuh"

namespace tconv3d {

// Mean and sum of squared deviations of some values.
struct MomentPart {
  float mean, squares;
};

// How two sets of values are joined: the second set's share of all values, and what the squared distance of
// the means counts. An empty set may have any finite mean.
struct MomentJoint {
  float share, distance;

  __device__ __forceinline__ MomentJoint(float first, float second) {
    share = second == 0 ? 0 : second / (first + second);
    distance = first * share;
  }
  __device__ __forceinline__ MomentPart of(const MomentPart& first, const MomentPart& second) const {
    const float step = second.mean - first.mean;
    return {first.mean + step * share, first.squares + second.squares + step * distance * step};
  }
};

// The units of columns that have moments of their own. A unit is kUnit neighbouring columns. A lane has
// kOwnRun neighbouring columns of every block of 4 * kOwnRun columns, and the columns are kBlocks blocks.
template <int kUnit, int kOwnRun, int kBlocks>
struct MomentUnits {
  static constexpr unsigned kAll = 0xFFFFFFFFu;
  static constexpr int kRun = kOwnRun, kBlock = 4 * kRun;
  // A unit has kUnitBlocks blocks, or one, of which kSharing lanes have columns; a run has kParts units.
  static constexpr int kUnitBlocks = kUnit > kBlock ? kUnit / kBlock : 1;
  static constexpr int kUnitRun = kUnit < kRun ? kUnit : kRun, kParts = kRun / kUnitRun;
  static constexpr int kSharing = kUnit >= kBlock ? 4 : kUnit / kUnitRun;
  static constexpr int kUnits = kBlocks / kUnitBlocks * kParts;  // units of which a lane has columns
  static constexpr int kColumns = kUnitBlocks * kUnitRun;        // columns of a unit that a lane has
  static_assert(kBlocks % kUnitBlocks == 0 && kRun % kUnitRun == 0, "whole units");
  static_assert(kUnit % kBlock == 0 || kBlock % kUnit == 0, "a unit has whole blocks or is inside one");

  // Returns the block of the lane's column `k` of a unit, and the place of the column in the lane's run.
  static __device__ constexpr int block(int unit, int k) {
    return unit / kParts * kUnitBlocks + k / kUnitRun;
  }
  static __device__ constexpr int place(int unit, int k) { return unit % kParts * kUnitRun + k % kUnitRun; }

  // Returns the first column of a unit of a lane.
  static __device__ __forceinline__ int column(int unit, int lane) {
    const int first = unit / kParts * kUnitBlocks * kBlock;
    return kUnit >= kBlock ? first : first + (lane % 4 * kRun + unit % kParts * kUnitRun) / kUnit * kUnit;
  }

  // Two lanes that differ in a bit have values of the same units if the bit is one of their positions (or
  // rows of a matrix instruction), or of the columns of a unit.
  static constexpr bool joins(int distance) { return distance >= 4 || distance < kSharing; }
  // The units that a lane is left with.
  static constexpr int left(int count, int distance) {
    return distance == 0 ? count : left(joins(distance) ? (count + 1) / 2 : count, distance / 2);
  }
  static constexpr int kLeft = left(kUnits, 16);

  // Joins the parts of lanes that have values of the same units. In each step two lanes divide the units
  // between them. A lane gives the number of its values of each unit, and gets the number of all lanes.
  template <int kCount = kUnits, int kDistance = 16>
  static __device__ __forceinline__ float join(MomentPart (&parts)[kUnits], float values, int lane) {
    if constexpr (kDistance == 0) {
      return values;
    } else if constexpr (!joins(kDistance)) {
      return join<kCount, kDistance / 2>(parts, values, lane);
    } else {
      const float others = __shfl_xor_sync(kAll, values, kDistance);
      const MomentJoint both(values, others);
      const bool upper = (lane & kDistance) != 0;
      constexpr int kHalf = (kCount + 1) / 2;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        MomentPart mine = parts[i], given = mine;
        if constexpr (kCount > 1) {
          const bool there = i + kHalf < kCount;
          const MomentPart second = there ? parts[there ? i + kHalf : 0] : MomentPart{0, 0};
          mine = upper ? second : mine;
          given = upper ? given : second;
        }
        const MomentPart got = {__shfl_xor_sync(kAll, given.mean, kDistance),
                                __shfl_xor_sync(kAll, given.squares, kDistance)};
        parts[i] = both.of(mine, got);
      }
      return join<kHalf, kDistance / 2>(parts, values + others, lane);
    }
  }

  // The units of a lane, as join() leaves them: `first` and the following ones, `some` in all.
  struct Share {
    int first, some;
    bool speaks;  // whether no other lane has the same units
  };
  template <int kCount = kUnits, int kDistance = 16>
  static __device__ __forceinline__ Share share(int lane, Share of = {0, kUnits, true}) {
    if constexpr (kDistance == 0) {
      return of;
    } else if constexpr (!joins(kDistance)) {
      return share<kCount, kDistance / 2>(lane, of);
    } else {
      constexpr int kHalf = (kCount + 1) / 2;
      const bool upper = (lane & kDistance) != 0;
      if (kCount == 1) {
        of.speaks = of.speaks && !upper;
      } else if (upper) {
        of.first += kHalf;
        of.some -= kHalf;
      } else {
        of.some = min(of.some, kHalf);
      }
      return share<kHalf, kDistance / 2>(lane, of);
    }
  }
};

}  // namespace tconv3d
