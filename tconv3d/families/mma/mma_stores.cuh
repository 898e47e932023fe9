// Stores the sums of the kernel on mma.sync (mma.cuh): epilogue, rounding, and stores to y.
//
// Where y is channels-last, a lane holds four neighbouring channels of a pair of tiles and stores them
// from its registers. Where y is contiguous along w, the lines of outputs, with the phases along w
// interleaved, are assembled in shared memory and stored by neighbouring lanes, at whatever address a line
// begins. With kAlongW, neighbouring lanes hold neighbouring outputs and store them from their registers.
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

  // Stores lines of outputs from registers: 8 lanes have neighbouring positions along w, all phases of each.
  __device__ __forceinline__ void store_directly(Sums& sums) const {
    static_assert(!C::kAlongW || (C::kTilesM == 1 && kStepW == 1 && C::kSplits == 1),
                  "outputs are neighbours");
    const Strides& strides = tile.args.y_strides;
    const int first = (tile.slice * C::kWarpsN + warp_n) * C::kTilesN * 8;
    Out* const y = outputs() + static_cast<long long>(tile.group) * C::kOuts * strides.c;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto at = tile.position(warp_m, half * 8 + lane / 4, 0);
#pragma unroll
      for (int f = 0; f < C::kPhases; f += kPhasesW) {
        const auto to = tile.output(at, f);
        if (!to.exists) continue;
        Out* const line = y + to.n * strides.n + to.d * strides.d + to.h * strides.h + to.w;
#pragma unroll
        for (int j = 0; j < C::kTilesN; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int channel = first + Layout::column(j, lane % 4 * 2 + e);
            if (channel >= C::kOuts) continue;
            float some[kPhasesW];
#pragma unroll
            for (int k = 0; k < kPhasesW; ++k) some[k] = sums[f + k][0][j][2 * half + e];
            Out* const own = line + channel * strides.c;
            const int left = tile.args.y_size.w - to.w;
            const auto values = finished<false>(some, own, to.n, channel, 1, left);
            if (kVector == kPhasesW && tile.args.store_width == kPhasesW) {
              store_vector(own, values);
            } else {
#pragma unroll
              for (int k = 0; k < kPhasesW; ++k) {
                if (k < left) own[k] = values.at[k];
              }
            }
          }
        }
      }
    }
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

  // Where a line of outputs lies in y: the offset of its first output, for the group's first channel, and the
  // number of its outputs, which is 0 for lines outside of y. Places are listed in shared memory once for
  // each tile, behind the columns, because finding one takes longer than storing a line.
  struct alignas(16) Place {
    long long offset;
    int length;
  };
  __device__ __forceinline__ Place* places() const {
    return reinterpret_cast<Place*>(staged + kAtOnce * tile.args.store_pitch);
  }

  __device__ __forceinline__ void list_places(int lines) const {
    const Args& args = tile.args;
    const int whole = args.tile.w * kPhasesW;
    for (int i = threadIdx.x; i < lines * kOuter; i += C::kThreads) {
      const int f = kOuter == 1 ? 0 : i / lines * kPhasesW, of_phase = kOuter == 1 ? i : i % lines;
      const auto at = tile.output(tile.on_line(of_phase, 0), f);
      const int left = (args.y_size.w - at.w + kStepW - 1) / kStepW;
      places()[i] = {at.n * args.y_strides.n + at.d * args.y_strides.d + at.h * args.y_strides.h + at.w,
                     !at.exists     ? 0
                     : left < whole ? left
                                    : whole};
    }
  }

  // Columns and lines that a lane stores together: several are read from shared memory before the first of
  // them is stored, because a warp waits for shared memory longer than it takes to store. `lanes` lanes share
  // a line of a column, of which this lane is number `own`.
  // Sums of columns that are stored later, if they are many, and moments leave no registers for two lines.
  static constexpr int kWaitingSums = 4 * C::kPhases * C::kTilesM * (C::kTilesN - C::kStoreTiles);
  static constexpr int kBatch = 4, kLines = kWaitingSums > 64 || C::Epilogue::kLeavesMoments ? 1 : 2;
  struct Columns {
    Out* to[kBatch];  // a column's channel in y, or null
    const Out* from[kBatch];
    int own, lanes;
  };

  // Stores the lines that begin at `lines` in each column by accesses of kWidth outputs, which are aligned.
  template <int kWidth>
  __device__ __forceinline__ void store_vectors(const Columns& columns, const Place (&places)[kLines],
                                                const int (&lines)[kLines]) const {
    const int longest = max(places[0].length, places[kLines - 1].length);
    for (int i = kWidth * columns.own; i < longest; i += kWidth * columns.lanes) {
      Vector<Out, kWidth> values[kLines][kBatch];
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (columns.to[b] != nullptr) values[l][b] = load_vector<kWidth>(columns.from[b] + lines[l] + i);
        }
      }
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
        if (i >= places[l].length) continue;
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (columns.to[b] != nullptr)
            store_vector(columns.to[b] + places[l].offset + i * kStepW, values[l][b]);
        }
      }
    }
  }

  // Stores a line of 16-bit outputs of each column that begins anywhere: two outputs at once where they form
  // one aligned word.
  __device__ __forceinline__ void store_pairs(const Columns& columns, const Place& place, int line) const {
    for (int i = 2 * columns.own; i <= place.length; i += 2 * columns.lanes) {
      Vector<Out, 2> values[kBatch];
      int first[kBatch];  // the first output of the word, or -1 if it lies before the line
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const auto address = reinterpret_cast<unsigned long long>(columns.to[b] + place.offset);
        first[b] = i - static_cast<int>(address / sizeof(Out) % 2);
        const int second = first[b] + 1 < place.length ? first[b] + 1 : place.length - 1;
        if (columns.to[b] == nullptr || place.length == 0) continue;
        const Out* const from = columns.from[b] + line;
        values[b] = {from[first[b] < 0 ? 0 : first[b] < place.length ? first[b] : second], from[second]};
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (columns.to[b] == nullptr || first[b] >= place.length) continue;
        Out* const to = columns.to[b] + place.offset;
        if (first[b] < 0) {
          if (place.length > 0) to[0] = values[b].at[1];
        } else if (first[b] + 1 < place.length) {
          store_vector(to + first[b], values[b]);
        } else {
          to[first[b]] = values[b].at[0];
        }
      }
    }
  }

  // Stores all lines of some columns; kWidth is 0 for pairs. Every warp has some lines.
  template <int kWidth>
  __device__ __forceinline__ void store_all_lines(const Columns& columns, int lines) const {
    constexpr int kWarps = C::kThreads / 32, kTogether = kWidth == 0 ? 1 : kLines;
    const int count = lines * kOuter, pitch = tile.args.store_line;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < count; i += kTogether * kWarps) {
      if constexpr (kWidth == 0) {
        store_pairs(columns, places()[i], i * pitch);
      } else {
        Place found[kLines];
        int starts[kLines];
#pragma unroll
        for (int l = 0; l < kLines; ++l) {
          const bool exists = i + l * kWarps < count;
          const int line = exists ? i + l * kWarps : i;
          found[l] = places()[line];
          if (!exists) found[l].length = 0;
          starts[l] = line * pitch;
        }
        store_vectors<kWidth>(columns, found, starts);
      }
    }
  }

  __device__ __forceinline__ void store_columns(int first_tile, int lines) const {
    const Args& args = tile.args;
    const int lanes = args.store_lanes, step = 32 / lanes;
    Out* const y = outputs() + static_cast<long long>(tile.group) * C::kOuts * args.y_strides.c;
#pragma unroll 1
    for (int k = lane / lanes; k < kAtOnce; k += kBatch * step) {
      Columns columns;
      columns.own = lane & (lanes - 1);
      columns.lanes = lanes;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int column = k + b * step, channel = channel_of(column, first_tile);
        columns.to[b] = channel < C::kOuts ? y + channel * args.y_strides.c : nullptr;
        columns.from[b] = staged + column * args.store_pitch;
      }
      constexpr int kWide = kStepW == 1 ? kVector : 1, kHalf = kWide > 1 ? kWide / 2 : 1;
      if (kWide > 1 && args.store_width == kWide) {
        store_all_lines<kWide>(columns, lines);
      } else if (kHalf > 1 && args.store_width == kHalf) {
        store_all_lines<kHalf>(columns, lines);
      } else {
        store_all_lines<sizeof(Out) == 4 || kStepW != 1 ? 1 : 0>(columns, lines);
      }
    }
  }

  __device__ __forceinline__ void store_lines(const Sums& sums) const {
    const int lines = tile.args.tile_n * tile.args.tile.d * tile.args.tile.h;
    static_for<(C::kTilesN + C::kStoreTiles - 1) / C::kStoreTiles>([&](auto i) {
      constexpr int kFirst = decltype(i)::value * C::kStoreTiles;
      __syncthreads();  // no thread still reads this shared memory
      if constexpr (kFirst == 0) list_places(lines);
      put_together<kFirst>(sums);
      __syncthreads();
      store_columns(kFirst, lines);
    });
  }
};

}  // namespace tconv3d
