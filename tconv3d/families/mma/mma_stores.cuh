// Stores the sums of the kernel on mma.sync (mma.cuh): epilogue, rounding, and stores to y.
//
// Where y is channels-last, a lane holds four neighbouring channels of a pair of tiles and stores them
// from its registers. Where y is contiguous along w, the lines of outputs, with the phases along w
// interleaved, are assembled in shared memory and stored by neighbouring lanes, at whatever address a line
// begins.
#pragma once

#include "mma_tile.cuh"

namespace tconv3d {

template <class C>
struct MmaStores {
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Scalar = typename C::Scalar;
  using Sums = float[C::kPhases][C::kTilesM][C::kTilesN][4];

  const Tile& tile;
  int warp_m, warp_n, lane;

  static __device__ __forceinline__ Scalar finished(float sum) {
    return Narrow<Scalar>::from(C::Epilogue::apply(sum));
  }

  // ---- Channels-last outputs.

  // Stores two or four neighbouring channels of an output.
  template <int kCount>
  __device__ __forceinline__ void store_channels(Scalar* y, int channel, const float (&sums)[kCount]) const {
    if constexpr (C::kVectorStores) {
      if (channel >= C::kOuts) return;
      Vector<Scalar, kCount> values;
#pragma unroll
      for (int k = 0; k < kCount; ++k) values.at[k] = finished(sums[k]);
      store_vector(y + channel, values);
    } else {
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (channel + k < C::kOuts) y[channel + k] = finished(sums[k]);
      }
    }
  }

  __device__ __forceinline__ void store_rows(const Sums& sums) const {
    const Strides& strides = tile.args.y_strides;
    const int first = (tile.slice * C::kWarpsN + warp_n) * C::kTilesN * 8;
    Scalar* const y = static_cast<Scalar*>(tile.args.y) + static_cast<long long>(tile.group) * C::kOuts;
#pragma unroll
    for (int m = 0; m < C::kTilesM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto at = tile.position(warp_m, half * 8 + lane / 4, m);
#pragma unroll
        for (int f = 0; f < C::kPhases; ++f) {
          const auto to = tile.output(at, f);
          if (!to.exists) continue;
          Scalar* const row = y + to.n * strides.n + to.d * strides.d + to.h * strides.h + to.w * strides.w;
#pragma unroll
          for (int j = 0; j < C::kTilesN; j += 2) {
            const float (&left)[4] = sums[f][m][j];
            if (Layout::paired(j)) {
              const float (&right)[4] = sums[f][m][j + 1 < C::kTilesN ? j + 1 : j];
              store_channels<4>(row, first + j * 8 + lane % 4 * 4,
                                {left[2 * half], left[2 * half + 1], right[2 * half], right[2 * half + 1]});
            } else {
              store_channels<2>(row, first + j * 8 + lane % 4 * 2, {left[2 * half], left[2 * half + 1]});
            }
          }
        }
      }
    }
  }

  // ---- Outputs that are contiguous along w.

  // A line in shared memory interleaves kPhasesW phases along w; neighbours in it lie kStepW outputs apart in
  // y.
  static constexpr int kPhasesW = Tile::kUnrollW ? C::kPhasesW : 1;
  static constexpr int kStepW = C::kOutputStepW / kPhasesW;
  static constexpr int kOuter = C::kPhases / kPhasesW;
  static constexpr int kAtOnce = C::kStoreTiles * C::kWarpsN * 8;  // columns in shared memory at a time

  // A lane has kOwn neighbouring outputs of a line, and writes kVector of them to shared memory at a time.
  static constexpr int kOwn = C::kTilesM * kPhasesW;
  static constexpr int kMostVector = 16 / static_cast<int>(sizeof(Scalar));
  static constexpr int kVector = kOwn % kMostVector == 0 ? kMostVector
                                 : kOwn % 4 == 0         ? 4
                                 : kOwn % 2 == 0         ? 2
                                                         : 1;

  template <int kFirst>
  __device__ __forceinline__ void put_together(const Sums& sums, Scalar* staged) const {
    const int lines = tile.args.tile_n * tile.args.tile.d * tile.args.tile.h;
    const auto first = tile.position(warp_m, lane / 4, 0), second = tile.position(warp_m, lane / 4 + 8, 0);
    static_for<C::kStoreTiles>([&](auto i) {
      constexpr int kTile = kFirst + decltype(i)::value;
      if constexpr (kTile < C::kTilesN) {
        Scalar* const to =
            staged + ((decltype(i)::value * C::kWarpsN + warp_n) * 8 + lane % 4 * 2) * tile.args.store_pitch;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const auto& at = e < 2 ? first : second;
          if (!at.exists) continue;
          Scalar* const line =
              to + e % 2 * tile.args.store_pitch +
              ((at.n * tile.args.tile.d + at.d) * tile.args.tile.h + at.h) * tile.args.store_line +
              at.w * kPhasesW;
#pragma unroll
          for (int f = 0; f < kOuter; ++f) {
#pragma unroll
            for (int k = 0; k < kOwn; k += kVector) {
              Vector<Scalar, kVector> values;
#pragma unroll
              for (int v = 0; v < kVector; ++v)
                values.at[v] =
                    finished(sums[f * kPhasesW + (k + v) % kPhasesW][(k + v) / kPhasesW][kTile][e]);
              *reinterpret_cast<Vector<Scalar, kVector>*>(line + f * lines * tile.args.store_line + k) =
                  values;
            }
          }
        }
      }
    });
  }

  // Stores one line of one channel, by store_lanes lanes.
  __device__ __forceinline__ void store_line(Scalar* to, const Scalar* from, int length, int own) const {
    const int lanes = tile.args.store_lanes;
    if constexpr (Layout::kPerWord == 1 || kStepW > 1) {
      for (int i = own; i < length; i += lanes) to[i * kStepW] = from[i];
    } else {
      // Two 16-bit outputs are stored at once where they form one aligned word of memory.
      const int odd = static_cast<int>(reinterpret_cast<unsigned long long>(to) / sizeof(Scalar) % 2);
      for (int i = 2 * own - odd; i < length; i += 2 * lanes) {
        if (i >= 0 && i + 1 < length) {
          store_vector(to + i, Vector<Scalar, 2>{from[i], from[i + 1]});
        } else {
          const int single = i < 0 ? 0 : i;
          to[single] = from[single];
        }
      }
    }
  }

  __device__ __forceinline__ void store_columns(const Scalar* staged, int first_tile) const {
    const Args& args = tile.args;
    const int lines = args.tile_n * args.tile.d * args.tile.h, warp = threadIdx.x / 32,
              group_lanes = args.store_lanes;
    const int own = lane & (group_lanes - 1), group = lane / group_lanes, groups = 32 / group_lanes;
    const int whole = args.tile.w * kPhasesW;
    for (int i = warp; i < lines * kOuter; i += C::kThreads / 32) {
      const int f = kOuter == 1 ? 0 : i / lines * kPhasesW, line = kOuter == 1 ? i : i % lines;
      const auto at = tile.output(tile.on_line(line, 0), f);
      if (!at.exists) continue;
      const int left = (args.y_size.w - at.w + kStepW - 1) / kStepW, length = left < whole ? left : whole;
      Scalar* const y = static_cast<Scalar*>(args.y) + at.n * args.y_strides.n +
                        static_cast<long long>(tile.group) * C::kOuts * args.y_strides.c +
                        at.d * args.y_strides.d + at.h * args.y_strides.h + at.w;
      const Scalar* const from = staged + i * args.store_line;
      for (int k = group; k < kAtOnce; k += groups) {
        const int place = k % 8, of_warp = k / 8 % C::kWarpsN, column_tile = first_tile + k / 8 / C::kWarpsN;
        const int channel =
            (tile.slice * C::kWarpsN + of_warp) * C::kTilesN * 8 + Layout::column(column_tile, place);
        if (column_tile < C::kTilesN && channel < C::kOuts)
          store_line(y + channel * args.y_strides.c, from + k * args.store_pitch, length, own);
      }
    }
  }

  __device__ __forceinline__ void store_lines(const Sums& sums) const {
    Scalar* const staged = dynamic_shared<Scalar>();
    static_for<(C::kTilesN + C::kStoreTiles - 1) / C::kStoreTiles>([&](auto i) {
      constexpr int kFirst = decltype(i)::value * C::kStoreTiles;
      __syncthreads();  // no thread still reads this shared memory
      put_together<kFirst>(sums, staged);
      __syncthreads();
      store_columns(staged, kFirst);
    });
  }
};

}  // namespace tconv3d
