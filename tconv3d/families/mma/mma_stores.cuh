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

  // Applies the epilogue to runs of neighbouring sums, unless mma.cuh has already done so.
  template <bool kChannels, int kRuns, int kCount>
  __device__ __forceinline__ void finish_all(const OutputRun (&runs)[kRuns],
                                             float (&sums)[kRuns][kCount]) const {
    if constexpr (!C::Epilogue::kLeavesMoments && !C::Epilogue::kOverChannels)
      finish_runs<C, kChannels, kChannels && C::kVectorStores ? Lie::kAsVector : Lie::kAnyhow>(tile.args,
                                                                                               runs, sums);
  }
  template <int kCount>
  static __device__ __forceinline__ Vector<Out, kCount> narrowed(const float (&sums)[kCount]) {
    Vector<Out, kCount> values;
#pragma unroll
    for (int k = 0; k < kCount; ++k) values.at[k] = Narrow<Out>::from(sums[k]);
    return values;
  }

  // Returns how many of `all` runs are a portion. Without operands these are kTogether runs, which exist
  // together: one branch for all of them.
  template <int kTogether>
  static __device__ constexpr int portion(int all, int outputs) {
    return C::Epilogue::kHasOperands ? portion_of<C>(all, outputs) : kTogether;
  }

  // Calls the whole tensors of a tile into L2.
  __device__ __forceinline__ void prefetch() const {
    if constexpr (OperandCounts<typename C::Epilogue>::kWholes > 0) {
#pragma unroll
      for (int i = 0; i < 2 * C::kTilesM; ++i) {
        const auto at = tile.position(warp_m, i % 2 * 8 + lane / 4, i / 2);
        // Where outputs are contiguous along w, runs of neighbouring tiles m follow each other.
        if (!C::kLastOut && !C::kAlongW && i > 1) break;
#pragma unroll
        for (int f = 0; f < C::kPhases; f += C::kLastOut ? 1 : kPhasesW) {
#pragma unroll
          for (int j = 0; j < 2 * C::kTilesN; ++j) {
            if constexpr (C::kLastOut) {
              if (j % 2 == 0 && (!Layout::paired(j / 2) || j % 4 == 0))
                prefetch_run<C, true, 4>(tile.args,
                                         run_of_channels(tile.output(at, f), channel_of_tile(j / 2)));
            } else {
              prefetch_run<C, false, kOwn>(tile.args, run_of_line(at, f, 0, channel_of_tile(j / 2) + j % 2));
            }
          }
        }
      }
    }
  }
  // Returns the channel, in the group, of the first of a lane's columns in a tile of columns.
  __device__ __forceinline__ int channel_of_tile(int column_tile) const {
    return (tile.slice * C::kWarpsN + warp_n) * C::kTilesN * 8 + Layout::column(column_tile, lane % 4 * 2);
  }

  // ---- Channels-last outputs.

  // Returns the neighbouring channels of an output, from `channel` in the group on.
  __device__ __forceinline__ OutputRun run_of_channels(const typename Tile::Output& to, int channel) const {
    const Strides& strides = tile.args.y_strides;
    const int first = tile.group * C::kOuts + channel;
    return {to.n, first, to.n * strides.n + to.d * strides.d + to.h * strides.h + to.w * strides.w + first, 1,
            to.exists ? C::kOuts - channel : 0};
  }

  // Stores neighbouring channels of outputs of all phases: two of a tile of columns, or four of a pair of
  // tiles. A phase has kPerPhase of these runs, from a tile on.
  template <int kCount, int kPerPhase>
  __device__ __forceinline__ void store_channels(const Sums& sums, int m, int half, int first_tile) const {
    constexpr int kAll = C::kPhases * kPerPhase;
    const auto at = tile.position(warp_m, half * 8 + lane / 4, m);
    in_portions<kAll, portion<kPerPhase>(kAll, kCount)>([&](auto start, auto count) {
      constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
      OutputRun runs[kRuns];
      float own[kRuns][kCount];
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const int f = (kStart + r) / kPerPhase, j = first_tile + (kStart + r) % kPerPhase * 2;
        runs[r] = run_of_channels(tile.output(at, f), channel_of_tile(j));
#pragma unroll
        for (int k = 0; k < kCount; ++k) own[r][k] = sums[f][m][j + k / 2][2 * half + k % 2];
      }
      // Without this branch the compiler loads all vectors at once, and keeps them.
      bool any = false;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) any = any || runs[r].present > 0;
      if (!any) return;
      finish_all<true>(runs, own);
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        Out* const to = outputs() + runs[r].offset;
        const auto values = narrowed(own[r]);
        if constexpr (C::kVectorStores) {
          if (runs[r].present > 0) store_vector(to, values);
        } else {
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            if (k < runs[r].present) to[k] = values.at[k];
          }
        }
      }
    });
  }

  __device__ __forceinline__ void store_rows(const Sums& sums) const {
    constexpr int kPairs = C::kTilesN / 2;
#pragma unroll
    for (int m = 0; m < C::kTilesM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kPairs > 0) store_channels<4, kPairs>(sums, m, half, 0);
        if constexpr (C::kTilesN % 2 == 1) store_channels<2, 1>(sums, m, half, C::kTilesN - 1);
      }
    }
  }

  // ---- Outputs that are contiguous along w.

  // A line in shared memory interleaves kPhasesW phases along w; neighbours in it lie kStepW outputs apart in
  // y. Phases of a class of positions are no neighbours.
  static constexpr int kPhasesW = Tile::kUnrollW && C::kClassesW == 1 ? C::kPhasesW : 1;
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
  __device__ __forceinline__ OutputRun run_of_line(const typename Tile::Position& at, int f, int k,
                                                   int channel) const {
    const auto to = tile.output(at, f);
    const int w = to.w + k * kStepW, left = (tile.args.y_size.w - w + kStepW - 1) / kStepW;
    const Strides& strides = tile.args.y_strides;
    const int first = tile.group * C::kOuts + channel;
    return {to.n, first,
            to.n * strides.n + static_cast<long long>(first) * strides.c + to.d * strides.d +
                to.h * strides.h + w,
            kStepW, to.exists && channel < C::kOuts ? left : 0};
  }

  // Lines of outputs that are stored from registers: 8 lanes have neighbouring positions along w, all phases
  // of each. A lane has kLineOutputs outputs of each of its two channels of a tile of columns: of two
  // positions.
  static constexpr int kLineOutputs = 2 * kPhasesW;

  // Applies the epilogue to all sums of these lines, in place.
  __device__ __forceinline__ void finish_lines(Sums& sums) const {
    constexpr int kAll = 2 * C::kTilesN;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto at = tile.position(warp_m, half * 8 + lane / 4, 0);
#pragma unroll
      for (int f = 0; f < C::kPhases; f += kPhasesW) {
        if (!tile.output(at, f).exists) continue;
        in_portions<kAll, portion_of<C>(kAll, kPhasesW)>([&](auto start, auto count) {
          constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
          OutputRun runs[kRuns];
          float own[kRuns][kPhasesW];
#pragma unroll
          for (int r = 0; r < kRuns; ++r) {
            const int j = (kStart + r) / 2, e = (kStart + r) % 2;
            runs[r] = run_of_line(at, f, 0, channel_of_tile(j) + e);
#pragma unroll
            for (int k = 0; k < kPhasesW; ++k) own[r][k] = sums[f + k][0][j][2 * half + e];
          }
          finish_all<false>(runs, own);
#pragma unroll
          for (int r = 0; r < kRuns; ++r) {
#pragma unroll
            for (int k = 0; k < kPhasesW; ++k)
              sums[f + k][0][(kStart + r) / 2][2 * half + (kStart + r) % 2] = own[r][k];
          }
        });
      }
    }
  }

  // Stores the outputs of a position and channel, all phases along w, by one access.
  __device__ __forceinline__ void store_wide_lines(const Sums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto at = tile.position(warp_m, half * 8 + lane / 4, 0);
#pragma unroll
      for (int f = 0; f < C::kPhases; f += kPhasesW) {
#pragma unroll
        for (int r = 0; r < 2 * C::kTilesN; ++r) {
          const OutputRun run = run_of_line(at, f, 0, channel_of_tile(r / 2) + r % 2);
          float own[kPhasesW];
#pragma unroll
          for (int k = 0; k < kPhasesW; ++k) own[k] = sums[f + k][0][r / 2][2 * half + r % 2];
          if (run.present > 0) store_vector(outputs() + run.offset, narrowed(own));
        }
      }
    }
  }

  // Transposes 4 values of each of the 4 lanes of a quad: lane q then has value q of every lane, in their
  // order.
  __device__ __forceinline__ void turn_quad(float (&values)[4]) const {
    static_for<2>([&](auto bit) {
      constexpr int kStep = decltype(bit)::value + 1;  // 1, then 2
      const bool upper = (lane & kStep) != 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int low = kStep == 1 ? 2 * i : i;
        const float got = __shfl_xor_sync(0xFFFFFFFFu, upper ? values[low] : values[low + kStep], kStep);
        if (upper) {
          values[low] = got;
        } else {
          values[low + kStep] = got;
        }
      }
    });
  }

  // Stores outputs one by one, at any address. The lanes of a quad pass each other their outputs, so that an
  // access of a warp has up to 32 neighbours of a line, and fills the sectors that it touches.
  __device__ __forceinline__ void store_turned_lines(const Sums& sums) const {
    const typename Tile::Position both[2] = {tile.position(warp_m, lane / 4, 0),
                                             tile.position(warp_m, 8 + lane / 4, 0)};
#pragma unroll
    for (int f = 0; f < C::kPhases; f += kPhasesW) {
#pragma unroll
      for (int j = 0; j < C::kTilesN; ++j) {
#pragma unroll
        for (int i = 0; i < 2 * kLineOutputs; i += 4) {
          float values[4];
#pragma unroll
          for (int v = 0; v < 4; ++v) {
            const int of_channel = (i + v) % kLineOutputs, e = (i + v) / kLineOutputs;
            values[v] = sums[f + of_channel % kPhasesW][0][j][of_channel / kPhasesW * 2 + e];
          }
          turn_quad(values);
          const int own = i + lane % 4, of_channel = own % kLineOutputs, e = own / kLineOutputs;
          const typename Tile::Position& at = of_channel / kPhasesW == 0 ? both[0] : both[1];
          // The channel of the quad's first lane, from which those of the others follow at equal distances.
          const int channel = (tile.slice * C::kWarpsN + warp_n) * C::kTilesN * 8 + Layout::column(j, e);
          const int apart = Layout::column(j, 2) - Layout::column(j, 0);
          const OutputRun run = run_of_line(at, f, of_channel % kPhasesW, channel);
          Out* to = outputs() + run.offset;
#pragma unroll
          for (int r = 0; r < 4; ++r, to += apart * tile.args.y_strides.c) {
            if (run.present > 0 && channel + r * apart < C::kOuts) *to = Narrow<Out>::from(values[r]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store_directly(Sums& sums) const {
    static_assert(!C::kAlongW || (C::kTilesM == 1 && kStepW == 1 && C::kSplits == 1),
                  "outputs are neighbours");
    finish_lines(sums);
    if (kVector == kPhasesW && kPhasesW > 1 && tile.args.store_width == kPhasesW) {
      store_wide_lines(sums);
    } else {
      store_turned_lines(sums);
    }
  }

  template <int kFirst>
  __device__ __forceinline__ void put_together(const Sums& sums) const {
    constexpr int kVectors = kOwn / kVector, kAll = 4 * kOuter * kVectors;
    const int lines = tile.args.tile_n * tile.args.tile.d * tile.args.tile.h;
    const auto first = tile.position(warp_m, lane / 4, 0), second = tile.position(warp_m, lane / 4 + 8, 0);
    const auto start_of = [&](const typename Tile::Position& at) {
      return ((at.n * tile.args.tile.d + at.d) * tile.args.tile.h + at.h) * tile.args.store_line +
             at.w * kPhasesW;
    };
    static_for<C::kStoreTiles>([&](auto i) {
      constexpr int kTile = kFirst + decltype(i)::value;
      if constexpr (kTile < C::kTilesN) {
        Out* const to =
            staged + ((decltype(i)::value * C::kWarpsN + warp_n) * 8 + lane % 4 * 2) * tile.args.store_pitch;
        // A lane has outputs of two positions, of two channels each, in all outer phases.
        in_portions<kAll, portion<kOuter * kVectors>(kAll, kVector)>([&](auto start, auto count) {
          constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
          OutputRun runs[kRuns];
          float own[kRuns][kVector];
#pragma unroll
          for (int r = 0; r < kRuns; ++r) {
            const int e = (kStart + r) / (kOuter * kVectors), f = (kStart + r) / kVectors % kOuter * kPhasesW;
            const int k = (kStart + r) % kVectors * kVector;
            runs[r] = run_of_line(e < 2 ? first : second, f, k, channel_of_tile(kTile) + e % 2);
#pragma unroll
            for (int v = 0; v < kVector; ++v)
              own[r][v] = sums[f + (k + v) % kPhasesW][(k + v) / kPhasesW][kTile][e];
          }
          finish_all<false>(runs, own);
#pragma unroll
          for (int r = 0; r < kRuns; ++r) {
            const int e = (kStart + r) / (kOuter * kVectors), f = (kStart + r) / kVectors % kOuter;
            const auto& at = e < 2 ? first : second;
            if (!at.exists) continue;
            Out* const line =
                to + e % 2 * tile.args.store_pitch + start_of(at) + f * lines * tile.args.store_line;
            *reinterpret_cast<Vector<Out, kVector>*>(line + (kStart + r) % kVectors * kVector) =
                narrowed(own[r]);
          }
        });
      }
    });
  }

  // Returns the output channel of a column in shared memory, or kOuts if there is none.
  __device__ __forceinline__ int channel_of(unsigned column, unsigned first_tile) const {
    const unsigned place = column % 8, of_warp = column / 8 % C::kWarpsN;
    const unsigned column_tile = first_tile + column / 8 / C::kWarpsN;
    const int channel = (tile.slice * C::kWarpsN + static_cast<int>(of_warp)) * C::kTilesN * 8 +
                        Layout::column(static_cast<int>(column_tile), static_cast<int>(place));
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
    unsigned long long to[kBatch];  // address of a column's channel in y
    const Out* from[kBatch];
    unsigned exist;  // a bit for each column that exists
    int own, lanes;

    __device__ __forceinline__ bool has(int b) const { return (exist >> b & 1u) != 0; }
    __device__ __forceinline__ Out* place(int b, long long offset) const {
      return reinterpret_cast<Out*>(to[b] + offset * static_cast<int>(sizeof(Out)));
    }
  };

  // Stores the lines that begin at `lines` in each column by accesses of kWidth outputs, which are aligned.
  template <int kWidth>
  __device__ __forceinline__ void store_vectors(const Columns& columns, const Place (&places)[kLines],
                                                const int (&lines)[kLines]) const {
    const int longest = max(places[0].length, places[kLines - 1].length);
#pragma unroll 1
    for (int i = kWidth * columns.own; i < longest; i += kWidth * columns.lanes) {
      Vector<Out, kWidth> values[kLines][kBatch];
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
        int at = lines[l] + i;
        ptx::renew(at);  // Without this the compiler computes an address for each line and column first.
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (columns.has(b)) values[l][b] = load_vector<kWidth>(columns.from[b] + at);
        }
      }
#pragma unroll
      for (int l = 0; l < kLines; ++l) {
        if (i >= places[l].length) continue;
        long long at = (places[l].offset + i * kStepW) * static_cast<int>(sizeof(Out));
        ptx::renew(at);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (columns.has(b)) store_vector(reinterpret_cast<Out*>(columns.to[b] + at), values[l][b]);
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
        const auto address = reinterpret_cast<unsigned long long>(columns.place(b, place.offset));
        first[b] = i - static_cast<int>(address / sizeof(Out) % 2);
        const int second = first[b] + 1 < place.length ? first[b] + 1 : place.length - 1;
        if (!columns.has(b) || place.length == 0) continue;
        const Out* const from = columns.from[b] + line;
        values[b] = {from[first[b] < 0 ? 0 : first[b] < place.length ? first[b] : second], from[second]};
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (!columns.has(b) || first[b] >= place.length) continue;
        Out* const to = columns.place(b, place.offset);
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
    const int lanes = args.store_lanes, places = __ffs(lanes) - 1, step = 32 >> places;  // a power of 2
    Out* const y = outputs() + static_cast<long long>(tile.group) * C::kOuts * args.y_strides.c;
#pragma unroll 1
    for (int k = lane >> places; k < kAtOnce; k += kBatch * step) {
      Columns columns;
      columns.own = lane & (lanes - 1);
      columns.lanes = lanes;
      columns.exist = 0;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int column = k + b * step, channel = channel_of(column, first_tile);
        columns.exist |= static_cast<unsigned>(channel < C::kOuts) << b;
        columns.to[b] = reinterpret_cast<unsigned long long>(y + channel * args.y_strides.c);
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
