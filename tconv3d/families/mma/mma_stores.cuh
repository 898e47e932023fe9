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
  using Out = typename C::Out;  // type of y, or float for partial sums
  using Sums = float[C::kPhases][C::kTilesM][C::kTilesN][4];

  const Tile& tile;
  int warp_m, warp_n, lane;
  Out* staged;  // shared memory for lines of outputs

  // Returns y or, if several blocks share the channels of a tile, this block's part of the sums.
  __device__ __forceinline__ Out* outputs() const {
    return static_cast<Out*>(tile.args.y) + (C::kSplits > 1 ? tile.split * tile.args.part : 0);
  }

  // Returns neighbouring sums as outputs; `to` is the address of the first output, `channel` its channel in
  // the group.
  template <bool kChannels, int kCount>
  __device__ __forceinline__ Vector<Out, kCount> finished(float (&sums)[kCount], const Out* to, int n,
                                                          int channel, int step, int present) const {
    // Otherwise mma.cuh has already applied the epilogue.
    if constexpr (!C::Epilogue::kLeavesMoments && !C::Epilogue::kOverChannels) {
      const long long offset = to - outputs();
      finish<C, kChannels>(tile.args, {n, tile.group * C::kOuts + channel, offset, step, present}, sums);
    }
    Vector<Out, kCount> values;
#pragma unroll
    for (int k = 0; k < kCount; ++k) values.at[k] = Narrow<Out>::from(sums[k]);
    return values;
  }

  // ---- Channels-last outputs.

  // Stores two or four neighbouring channels of an output of batch item n.
  template <int kCount>
  __device__ __forceinline__ void store_channels(Out* y, int n, int channel, float (&&sums)[kCount]) const {
    if constexpr (C::kVectorStores) {
      if (channel >= C::kOuts) return;
      store_vector(y + channel, finished<true>(sums, y + channel, n, channel, 1, kCount));
    } else {
      const auto values = finished<true>(sums, y + channel, n, channel, 1, C::kOuts - channel);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (channel + k < C::kOuts) y[channel + k] = values.at[k];
      }
    }
  }

  __device__ __forceinline__ void store_rows(const Sums& sums) const {
    const Strides& strides = tile.args.y_strides;
    const int first = (tile.slice * C::kWarpsN + warp_n) * C::kTilesN * 8;
    Out* const y = outputs() + static_cast<long long>(tile.group) * C::kOuts;
#pragma unroll
    for (int m = 0; m < C::kTilesM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto at = tile.position(warp_m, half * 8 + lane / 4, m);
#pragma unroll
        for (int f = 0; f < C::kPhases; ++f) {
          const auto to = tile.output(at, f);
          if (!to.exists) continue;
          Out* const row = y + to.n * strides.n + to.d * strides.d + to.h * strides.h + to.w * strides.w;
#pragma unroll
          for (int j = 0; j < C::kTilesN; j += 2) {
            const float (&left)[4] = sums[f][m][j];
            if (Layout::paired(j)) {
              const float (&right)[4] = sums[f][m][j + 1 < C::kTilesN ? j + 1 : j];
              store_channels<4>(row, to.n, first + j * 8 + lane % 4 * 4,
                                {left[2 * half], left[2 * half + 1], right[2 * half], right[2 * half + 1]});
            } else {
              store_channels<2>(row, to.n, first + j * 8 + lane % 4 * 2,
                                {left[2 * half], left[2 * half + 1]});
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
  static constexpr int kMostVector = 16 / static_cast<int>(sizeof(Out));
  static constexpr int kVector = kOwn % kMostVector == 0 ? kMostVector
                                 : kOwn % 4 == 0         ? 4
                                 : kOwn % 2 == 0         ? 2
                                                         : 1;

  // Returns the outputs of a channel from position `at` and phase f on, and then k further along the line.
  template <int kCount>
  __device__ __forceinline__ Vector<Out, kCount> finished_of_line(float (&sums)[kCount],
                                                                  const typename Tile::Position& at, int f,
                                                                  int k, int channel) const {
    const auto to = tile.output(at, f);
    const int w = to.w + k * kStepW, left = (tile.args.y_size.w - w + kStepW - 1) / kStepW;
    const Strides& strides = tile.args.y_strides;
    const Out* const y = outputs() + to.n * strides.n +
                         (static_cast<long long>(tile.group) * C::kOuts + channel) * strides.c +
                         to.d * strides.d + to.h * strides.h + w;
    return finished<false>(sums, y, to.n, channel, kStepW, to.exists && channel < C::kOuts ? left : 0);
  }

  template <int kFirst>
  __device__ __forceinline__ void put_together(const Sums& sums) const {
    const int lines = tile.args.tile_n * tile.args.tile.d * tile.args.tile.h;
    const auto first = tile.position(warp_m, lane / 4, 0), second = tile.position(warp_m, lane / 4 + 8, 0);
    static_for<C::kStoreTiles>([&](auto i) {
      constexpr int kTile = kFirst + decltype(i)::value;
      if constexpr (kTile < C::kTilesN) {
        Out* const to =
            staged + ((decltype(i)::value * C::kWarpsN + warp_n) * 8 + lane % 4 * 2) * tile.args.store_pitch;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const auto& at = e < 2 ? first : second;
          if (!at.exists) continue;
          Out* const line =
              to + e % 2 * tile.args.store_pitch +
              ((at.n * tile.args.tile.d + at.d) * tile.args.tile.h + at.h) * tile.args.store_line +
              at.w * kPhasesW;
#pragma unroll
          for (int f = 0; f < kOuter; ++f) {
#pragma unroll
            for (int k = 0; k < kOwn; k += kVector) {
              float some[kVector];
#pragma unroll
              for (int v = 0; v < kVector; ++v)
                some[v] = sums[f * kPhasesW + (k + v) % kPhasesW][(k + v) / kPhasesW][kTile][e];
              const int channel = (tile.slice * C::kWarpsN + warp_n) * C::kTilesN * 8 +
                                  Layout::column(kTile, lane % 4 * 2 + e % 2);
              *reinterpret_cast<Vector<Out, kVector>*>(line + f * lines * tile.args.store_line + k) =
                  finished_of_line(some, at, f * kPhasesW, k, channel);
            }
          }
        }
      }
    });
  }

  // Returns the output channel of a column in shared memory, or kOuts if there is none.
  __device__ __forceinline__ int channel_of(int column, int first_tile) const {
    const int place = column % 8, of_warp = column / 8 % C::kWarpsN;
    const int column_tile = first_tile + column / 8 / C::kWarpsN;
    const int channel =
        (tile.slice * C::kWarpsN + of_warp) * C::kTilesN * 8 + Layout::column(column_tile, place);
    return column < kAtOnce && column_tile < C::kTilesN && channel < C::kOuts ? channel : C::kOuts;
  }

  // A line of outputs of every column in shared memory, and the lanes that store it: `lanes` lanes share one
  // column, and the warp stores `columns` columns at a time.
  struct Line {
    Out* to;  // the line's first output, of the group's first channel
    const Out* from;
    int length, own, lanes, column, columns, first_tile;
  };

  // Stores a line by accesses of kWidth outputs each, which are aligned. Several columns are read from shared
  // memory before the first of them is stored.
  template <int kWidth>
  __device__ __forceinline__ void store_vectors(const Line& line) const {
    constexpr int kBatch = 4;
    const Args& args = tile.args;
    for (int i = kWidth * line.own; i < line.length; i += kWidth * line.lanes) {
#pragma unroll 1
      for (int k = line.column; k < kAtOnce; k += kBatch * line.columns) {
        Vector<Out, kWidth> values[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int column = k + b * line.columns < kAtOnce ? k + b * line.columns : k;
          values[b] = load_vector<kWidth>(line.from + column * args.store_pitch + i);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int channel = channel_of(k + b * line.columns, line.first_tile);
          if (channel < C::kOuts) store_vector(line.to + channel * args.y_strides.c + i * kStepW, values[b]);
        }
      }
    }
  }

  // Stores a line of 16-bit outputs that begins anywhere: two at once where they form one aligned word.
  __device__ __forceinline__ void store_pairs(const Line& line) const {
    for (int k = line.column; k < kAtOnce; k += line.columns) {
      const int channel = channel_of(k, line.first_tile);
      if (channel >= C::kOuts) continue;
      Out* const to = line.to + channel * tile.args.y_strides.c;
      const Out* const from = line.from + k * tile.args.store_pitch;
      const int odd = static_cast<int>(reinterpret_cast<unsigned long long>(to) / sizeof(Out) % 2);
      for (int i = 2 * line.own - odd; i < line.length; i += 2 * line.lanes) {
        if (i >= 0 && i + 1 < line.length) {
          store_vector(to + i, Vector<Out, 2>{from[i], from[i + 1]});
        } else {
          const int single = i < 0 ? 0 : i;
          to[single] = from[single];
        }
      }
    }
  }

  __device__ __forceinline__ void store_columns(int first_tile) const {
    const Args& args = tile.args;
    const int lines = args.tile_n * args.tile.d * args.tile.h, warp = threadIdx.x / 32;
    const int lanes = args.store_lanes, whole = args.tile.w * kPhasesW;
    for (int i = warp; i < lines * kOuter; i += C::kThreads / 32) {
      const int f = kOuter == 1 ? 0 : i / lines * kPhasesW, of_phase = kOuter == 1 ? i : i % lines;
      const auto at = tile.output(tile.on_line(of_phase, 0), f);
      if (!at.exists) continue;
      const int left = (args.y_size.w - at.w + kStepW - 1) / kStepW;
      const Line line{outputs() + at.n * args.y_strides.n +
                          static_cast<long long>(tile.group) * C::kOuts * args.y_strides.c +
                          at.d * args.y_strides.d + at.h * args.y_strides.h + at.w,
                      staged + i * args.store_line,
                      left < whole ? left : whole,
                      lane & (lanes - 1),
                      lanes,
                      lane / lanes,
                      32 / lanes,
                      first_tile};
      constexpr int kWide = kStepW == 1 ? kVector : 1, kHalf = kWide > 1 ? kWide / 2 : 1;
      if (kWide > 1 && args.store_width == kWide) {
        store_vectors<kWide>(line);
      } else if (kHalf > 1 && args.store_width == kHalf) {
        store_vectors<kHalf>(line);
      } else if constexpr (sizeof(Out) == 4 || kStepW > 1) {
        store_vectors<1>(line);
      } else {
        store_pairs(line);
      }
    }
  }

  __device__ __forceinline__ void store_lines(const Sums& sums) const {
    static_for<(C::kTilesN + C::kStoreTiles - 1) / C::kStoreTiles>([&](auto i) {
      constexpr int kFirst = decltype(i)::value * C::kStoreTiles;
      __syncthreads();  // no thread still reads this shared memory
      put_together<kFirst>(sums);
      __syncthreads();
      store_columns(kFirst);
    });
  }
};

}  // namespace tconv3d
