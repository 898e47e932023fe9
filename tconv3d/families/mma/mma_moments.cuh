// The moments of the outputs that the kernel on mma.sync stores (mma.cuh), for a norm layer that follows.
// They are computed from the accumulators, in registers, so that no pass over memory is needed for them.
//
// A band is kMomentBand neighbouring output channels of one norm group, all in one warp. Each warp stores the
// moments of each of its bands over its own positions of a batch item, all phases. The shift of the moments
// is one of the values themselves, the same for all lanes, so that lanes only add. The cancellation in the
// subtraction of squares is then bounded by the number of values, whatever their mean. The address of the
// moments depends on the tile, never on timing: [batch][bands][slots], so that the moments of a norm group
// are neighbours. A warp without outputs of a batch item stores moments of no values.
#pragma once

#include "mma_tile.cuh"
#include "moments.cuh"

namespace tconv3d {

template <class C>
struct MmaMoments {
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Sums = float[C::kPhases][C::kTilesM][C::kTilesN][4];
  static constexpr unsigned kAll = 0xFFFFFFFFu;

  static constexpr int kBand = C::kMomentBand;
  static constexpr int kBands = C::kGroups * C::kOuts / kBand;  // bands of all channels
  // A lane has kOwn neighbouring channels of a pair of tiles, or of a single tile (Layout::column).
  static constexpr int kOwn = C::kTilesN % 2 == 0 ? 4 : 2;
  static constexpr int kBandSums = kBand <= kOwn ? kBand : kBand <= 4 * kOwn ? kOwn : kBand / 4;
  static constexpr int kLaneBands = 2 * C::kTilesN / kBandSums;
  static constexpr int kSharing = kBand <= kOwn       ? 1
                                  : kBand <= 4 * kOwn ? kBand / kOwn
                                                      : 4;  // lanes of a band
  static_assert((kBand & (kBand - 1)) == 0 && C::kOuts % kBand == 0, "a band is inside a group or outside");
  static_assert(C::kTilesN * 8 % kBand == 0, "a band is inside a warp");
  static_assert(C::kTilesN % 2 == 0 || C::kTilesN == 1 || kBand <= 2, "pairs and a single tile differ");

  // Outputs of one channel of a lane, numbered (f * kTilesM + m) * 2 + half, of one batch item.
  static constexpr int kOutputs = 2 * C::kPhases * C::kTilesM;
  static_assert(kOutputs <= 64, "the outputs of a channel of a lane fit a mask");

  const Tile& tile;
  const Sums& sums;
  int warp_m, warp_n, lane;

  __device__ __forceinline__ unsigned long long outputs(int item) const {
    unsigned long long mask = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < C::kTilesM; ++m) {
        const auto at = tile.position(warp_m, half * 8 + lane / 4, m);
#pragma unroll
        for (int f = 0; f < C::kPhases; ++f) {
          const bool is = at.n == item && tile.output(at, f).exists;
          mask |= is ? 1ull << ((f * C::kTilesM + m) * 2 + half) : 0ull;
        }
      }
    }
    return mask;
  }

  // Returns value `i` of the lane, of an output: columns j * 2 + e, which are neighbours in their order.
  __device__ __forceinline__ float value(int output, int i) const {
    return sums[output / 2 / C::kTilesM][output / 2 % C::kTilesM][i / 2][output % 2 * 2 + i % 2];
  }

  // Chooses the shift of every band: a value that some lane stores, if there is one.
  __device__ __forceinline__ void choose_shifts(unsigned long long mask, float (&shifts)[kLaneBands]) const {
    bool chosen = false;
#pragma unroll
    for (int output = 0; output < kOutputs; ++output) {
      const unsigned lanes = __ballot_sync(kAll, static_cast<int>(mask >> output & 1));
      if (chosen || lanes == 0) continue;
      // The first lane of a position that has such an output, and of the lanes that share this lane's band.
      const int source = (__ffs(static_cast<int>(lanes)) - 1) / 4 * 4 + lane % 4 / kSharing * kSharing;
#pragma unroll
      for (int i = 0; i < kLaneBands; ++i)
        shifts[i] = __shfl_sync(kAll, value(output, i * kBandSums), source);
      chosen = true;
    }
  }

  __device__ __forceinline__ void store_item(int item) const {
    const unsigned long long mask = outputs(item);
    float shifts[kLaneBands] = {}, added[kLaneBands] = {}, squares[kLaneBands] = {};
    choose_shifts(mask, shifts);
#pragma unroll
    for (int output = 0; output < kOutputs; ++output) {
      if (!(mask >> output & 1)) continue;
#pragma unroll
      for (int i = 0; i < 2 * C::kTilesN; ++i) {
        const float deviation = value(output, i) - shifts[i / kBandSums];
        added[i / kBandSums] += deviation;
        squares[i / kBandSums] += deviation * deviation;
      }
    }
    int count = __popcll(mask);
#pragma unroll
    for (int distance = 16; distance >= 4; distance /= 2) count += __shfl_xor_sync(kAll, count, distance);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance < 4 && distance >= kSharing) continue;
#pragma unroll
      for (int i = 0; i < kLaneBands; ++i) {
        added[i] += __shfl_xor_sync(kAll, added[i], distance);
        squares[i] += __shfl_xor_sync(kAll, squares[i], distance);
      }
    }
    if (lane >= 4 || lane % kSharing != 0) return;
#pragma unroll
    for (int i = 0; i < kLaneBands; ++i) {
      const int first = i * kBandSums;  // the band's first value of this lane
      const int channel = (tile.slice * C::kWarpsN + warp_n) * C::kTilesN * 8 +
                          Layout::column(first / 2, lane * 2 + first % 2);
      if (channel >= C::kOuts) continue;
      const int band = (tile.group * C::kOuts + channel) / kBand;
      const long long row = static_cast<long long>(tile.n + item) * kBands + band;
      static_cast<Moments<float>*>(
          tile.args.left)[row * tile.args.moment_slots + tile.place * C::kWarpsM + warp_m] = {
          static_cast<float>(count * kBand), shifts[i], added[i], squares[i]};
    }
  }

  __device__ __forceinline__ void store() const {
    for (int item = 0; item < tile.args.tile_n && tile.n + item < tile.args.batch; ++item) store_item(item);
  }
};

}  // namespace tconv3d
