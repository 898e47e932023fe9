// The direct kernel: forward pass and input gradient by plain multiply-adds, for every geometry and type.
//
// Both passes gather: output step_out*q + phase is the sum over channels r and taps j of
//   x[step_in*q + first_offset(phase) + j*offset_step] * w[tap]
// (geometry.py, Gather: the forward pass has `stride` phases; the input gradient has one phase and steps by
// `stride`).
//
// A thread owns kPositions positions q and kTile output channels. Along the innermost kUnrolled dimensions
// (none, w, hw or dhw) it owns all phases, and all taps are known at compile time, so that a value of x is
// loaded once for all taps that need it. Along the other dimensions a block has one phase, and the taps are a
// loop over rows. Weights are staged in shared memory as [row][channel r][tap][output channel] and are read
// as vectors; one vector serves kPositions positions, so that shared memory does not limit the multiply-adds.
// Neighbouring threads are neighbours along w, or, for channels-last tensors (kTilesPerBlock > 1),
// neighbouring tiles of output channels, so that loads and stores coalesce in either format. Small volumes
// get smaller blocks: the number of threads is a run-time argument with the maximum kThreads.
//
// Strict float32 keeps the error of a long sum small (kChain > 0): after every kChain channels the sums are
// added to totals and start again from zero or, with kKeepsRest, from the rounding error of that addition
// (compensated summation).
#pragma once

#include "epilogue.cuh"

namespace tconv3d {

template <bool kLong>
struct MaskType {
  using type = unsigned;
};
template <>
struct MaskType<true> {
  using type = unsigned long long;
};

template <class C>
struct Direct {
  using Scalar = typename C::Scalar;
  using Acc = typename C::Acc;
  using Index = typename IndexType<C::kWide>::type;

  static constexpr bool kUnrollD = C::kUnrolled >= 3, kUnrollH = C::kUnrolled >= 2,
                        kUnrollW = C::kUnrolled >= 1;
  static constexpr int kTilesPerGroup = (C::kOutPerGroup + C::kTile - 1) / C::kTile;
  static constexpr int kTiles = C::kGroups * kTilesPerGroup;
  static constexpr int kBlockPhasesD = kUnrollD ? 1 : C::kPhasesD;
  static constexpr int kBlockPhasesH = kUnrollH ? 1 : C::kPhasesH;
  static constexpr int kBlockPhasesW = kUnrollW ? 1 : C::kPhasesW;
  static constexpr int kBlockPhases = kBlockPhasesD * kBlockPhasesH * kBlockPhasesW;
  static constexpr int kTapStride = C::kTilesPerBlock * C::kTile;  // from tap to tap in shared memory
  static constexpr int kChannelStride = C::kTaps * kTapStride;
  static constexpr int kRowStride = C::kStageChannels * kChannelStride;
  static_assert(C::kStageChannels % C::kVector == 0, "a stage holds whole vectors of channels");

  const Args& args;
  Acc* weights;                   // shared memory, [row][channel r][tap][output channel]
  int phase_d, phase_h, phase_w;  // phases of the block along dimensions that are not unrolled
  int rows_d, rows_h, rows_w;     // numbers of taps along dimensions that are not unrolled
  int block_tile;                 // first tile of the block
  int tile, group, out;           // tile within the block, group, first output channel within the group
  Index n[C::kPositions];         // batch index; -1: no such position
  int qd[C::kPositions], qh[C::kPositions], qw[C::kPositions];
  Acc sum[C::kPositions][C::kPhases][C::kTile];

  static constexpr bool kChained = C::kChain > 0;
  static_assert(!kChained || C::kChain % C::kVector == 0 || C::kVector % C::kChain == 0,
                "sums go to the totals after whole vectors, or after equal parts of one");
  Acc total[kChained ? C::kPositions : 1][C::kPhases][C::kTile];
  int chained;  // channels in `sum` since the last addition to `total`

  __device__ __forceinline__ Index x_stride_w() const {
    return C::kUnitW ? 1 : static_cast<Index>(args.x_strides.w);
  }
  __device__ __forceinline__ Index x_stride_c() const {
    return C::kUnitC ? 1 : static_cast<Index>(args.x_strides.c);
  }

  __device__ __forceinline__ void locate() {
    constexpr int kTileBlocks = (kTiles + C::kTilesPerBlock - 1) / C::kTilesPerBlock;
    int block = blockIdx.x;
    const int phase = block % kBlockPhases;
    block /= kBlockPhases;
    block_tile = block % kTileBlocks * C::kTilesPerBlock;
    const Index position_block = block / kTileBlocks;

    phase_w = phase % kBlockPhasesW;
    phase_h = phase / kBlockPhasesW % kBlockPhasesH;
    phase_d = phase / (kBlockPhasesW * kBlockPhasesH);
    rows_d = kUnrollD ? 1 : C::kCountD(phase_d);
    rows_h = kUnrollH ? 1 : C::kCountH(phase_h);
    rows_w = kUnrollW ? 1 : C::kCountW(phase_w);

    tile = threadIdx.x % C::kTilesPerBlock;
    group = (block_tile + tile) / kTilesPerGroup;
    out = (block_tile + tile) % kTilesPerGroup * C::kTile;

    const int lanes = blockDim.x / C::kTilesPerBlock;
    const Index first = position_block * (lanes * C::kPositions) + threadIdx.x / C::kTilesPerBlock;
#pragma unroll
    for (int p = 0; p < C::kPositions; ++p) {
      const Index position = first + p * lanes;
      const Index rest_w = divide(position, args.by_w);
      const Index rest_h = divide(rest_w, args.by_h);
      const Index rest_d = divide(rest_h, args.by_d);
      qw[p] = static_cast<int>(position - rest_w * args.grid.w);
      qh[p] = static_cast<int>(rest_w - rest_h * args.grid.h);
      qd[p] = static_cast<int>(rest_h - rest_d * args.grid.d);
      n[p] = block_tile + tile < kTiles && position < args.positions ? rest_d : -1;
    }
  }

  __device__ __forceinline__ void start_from_bias() {
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
#pragma unroll
    for (int o = 0; o < C::kTile; ++o) {
      const bool has_bias = bias != nullptr && block_tile + tile < kTiles && out + o < C::kOutPerGroup;
      const Acc start = has_bias ? widen<Acc>(bias[group * C::kOutPerGroup + out + o]) : Acc(0);
#pragma unroll
      for (int p = 0; p < C::kPositions; ++p) {
#pragma unroll
        for (int f = 0; f < C::kPhases; ++f) {
          sum[p][f][o] = kChained ? Acc(0) : start;
          if constexpr (kChained) total[p][f][o] = start;
        }
      }
    }
  }

  __device__ __forceinline__ void add_to_totals() {
    chained = 0;
#pragma unroll
    for (int p = 0; p < C::kPositions; ++p) {
#pragma unroll
      for (int f = 0; f < C::kPhases; ++f) {
#pragma unroll
        for (int o = 0; o < C::kTile; ++o) {
          const Acc before = total[p][f][o];
          total[p][f][o] += sum[p][f][o];
          const Acc rest = (before - total[p][f][o]) + sum[p][f][o];
          // A rest that is huge, infinite or NaN is dropped, so that an infinite total stays infinite.
          sum[p][f][o] = C::kKeepsRest && fabsf(rest) < 0x1p104f ? rest : 0.0f;
        }
      }
    }
  }

  // A row is one tap along each dimension that is not unrolled, counted among the taps of the block's phase.
  struct Row {
    int d, h, w;
  };
  __device__ __forceinline__ Row row_at(int index) const {
    return {index / (rows_w * rows_h), index / rows_w % rows_h, index % rows_w};
  }

  // Stages the weights of rows [first_row, first_row + rows) and channels [first_r, first_r + kStageChannels)
  // in shared memory.
  __device__ __forceinline__ void stage_weights(int first_row, int rows, int first_r) {
    const Scalar* w = static_cast<const Scalar*>(args.w);
    for (int i = threadIdx.x; i < rows * kRowStride; i += blockDim.x) {
      const int o = i % C::kTile, t = i / C::kTile % C::kTilesPerBlock, j = i / kTapStride % C::kTaps;
      const int r = first_r + i / kChannelStride % C::kStageChannels;
      const Row row = row_at(first_row + i / kRowStride);
      const int tap_d = kUnrollD ? C::kTapD(j) : C::kFirstTapD(phase_d) + row.d * C::kTapStepD;
      const int tap_h = kUnrollH ? C::kTapH(j) : C::kFirstTapH(phase_h) + row.h * C::kTapStepH;
      const int tap_w = kUnrollW ? C::kTapW(j) : C::kFirstTapW(phase_w) + row.w * C::kTapStepW;
      const int g = (block_tile + t) / kTilesPerGroup;
      const int channel = (block_tile + t) % kTilesPerGroup * C::kTile + o;
      const bool exists = g < C::kGroups && channel < C::kOutPerGroup && r < C::kReducedPerGroup;
      const long long at = g * args.w_group_stride + r * args.w_strides.n + channel * args.w_strides.c +
                           tap_d * args.w_strides.d + tap_h * args.w_strides.h + tap_w * args.w_strides.w;
      weights[i] = exists ? widen<Acc>(w[at]) : Acc(0);
    }
  }

  using Mask = typename MaskType<(C::kLoads > 32)>::type;
  static_assert(C::kLoads <= 64, "the loads of a row fit a mask");

  // The lines of x that a row reads at a thread's positions: where they start, and which loads lie inside x.
  struct Lines {
    const Scalar* at[C::kPositions];
    Mask inside[C::kPositions];  // bit i: load i lies inside x
  };
  __device__ __forceinline__ Lines lines_of(const Row& row, int first_r) const {
    Lines lines;
#pragma unroll
    for (int p = 0; p < C::kPositions; ++p) {
      const int d =
          qd[p] * C::kInputStepD + (kUnrollD ? 0 : C::kFirstOffsetD(phase_d) + row.d * C::kOffsetStepD);
      const int h =
          qh[p] * C::kInputStepH + (kUnrollH ? 0 : C::kFirstOffsetH(phase_h) + row.h * C::kOffsetStepH);
      const int w =
          qw[p] * C::kInputStepW + (kUnrollW ? 0 : C::kFirstOffsetW(phase_w) + row.w * C::kOffsetStepW);
      lines.inside[p] = 0;
      static_for<C::kLoads>([&](auto i) {
        constexpr int kD = C::kLoadD(i), kH = C::kLoadH(i), kW = C::kLoadW(i);
        const bool inside = n[p] >= 0 && d + kD >= 0 && d + kD < args.x_size.d && h + kH >= 0 &&
                            h + kH < args.x_size.h && w + kW >= 0 && w + kW < args.x_size.w;
        lines.inside[p] |= static_cast<Mask>(inside) << i;
      });
      const Index channel = static_cast<Index>(group) * C::kReducedPerGroup + first_r;
      const Index at = n[p] * static_cast<Index>(args.x_strides.n) + channel * x_stride_c() +
                       d * static_cast<Index>(args.x_strides.d) + h * static_cast<Index>(args.x_strides.h) +
                       w * x_stride_w();
      // A position without a load inside x reads nothing, and its address stays inside the tensor.
      lines.at[p] = static_cast<const Scalar*>(args.x) + (lines.inside[p] ? at : Index(0));
    }
    return lines;
  }

  // Accumulates one vector of channels of one row.
  __device__ __forceinline__ void accumulate(const Lines& lines, const Acc* w) {
    Acc value[C::kPositions][C::kLoads][C::kVector];
#pragma unroll
    for (int p = 0; p < C::kPositions; ++p) {
      static_for<C::kLoads>([&](auto i) {
        constexpr int kD = C::kLoadD(i), kH = C::kLoadH(i), kW = C::kLoadW(i);
        const Index offset = kD * static_cast<Index>(args.x_strides.d) +
                             kH * static_cast<Index>(args.x_strides.h) + kW * x_stride_w();
        Vector<Scalar, C::kVector> loaded{};
        if (lines.inside[p] >> i & 1) loaded = load_vector<C::kVector>(lines.at[p] + offset);
#pragma unroll
        for (int v = 0; v < C::kVector; ++v) value[p][i][v] = widen<Acc>(loaded.at[v]);
      });
    }
#pragma unroll
    for (int v = 0; v < C::kVector; ++v) {
      static_for<C::kTaps>([&](auto j) {
        constexpr int kPhase = C::kTapPhase(j), kLoad = C::kTapLoad(j);
        const auto tap = load_vector<C::kTile>(w + v * kChannelStride + j * kTapStride);
#pragma unroll
        for (int p = 0; p < C::kPositions; ++p) {
#pragma unroll
          for (int o = 0; o < C::kTile; ++o) sum[p][kPhase][o] += value[p][kLoad][v] * tap.at[o];
        }
      });
      if constexpr (kChained && C::kChain < C::kVector) {
        if ((v + 1) % C::kChain == 0) add_to_totals();
      }
    }
  }

  // Accumulates all staged channels of one row.
  __device__ __forceinline__ void accumulate_row(int row, int first_r, const Acc* w) {
    Lines lines = lines_of(row_at(row), first_r);
    const int rest = C::kReducedPerGroup - first_r;
    const int channels = rest < C::kStageChannels ? rest : C::kStageChannels;
    for (int r = 0; r < channels; r += C::kVector) {
      accumulate(lines, w);
      w += C::kVector * kChannelStride;
#pragma unroll
      for (int p = 0; p < C::kPositions; ++p)
        lines.at[p] += lines.inside[p] ? C::kVector * x_stride_c() : Index(0);
      if constexpr (kChained && C::kChain >= C::kVector) {
        if ((chained += C::kVector) == C::kChain) add_to_totals();
      }
    }
  }

  __device__ __forceinline__ Acc total_of(int p, int f, int o) const {
    return kChained ? total[kChained ? p : 0][f][o] : sum[p][f][o];
  }

  // Stores the outputs of one position, for every channel of the tile: of phase f (kPair == 1), or of phases
  // f and f + 1, which are neighbours along w (kPair == 2).
  template <int kPair>
  __device__ __forceinline__ void store_phase(int p, int f) {
    const int d = qd[p] * C::kOutputStepD + (kUnrollD ? C::kPhaseD(f) : phase_d);
    const int h = qh[p] * C::kOutputStepH + (kUnrollH ? C::kPhaseH(f) : phase_h);
    const int w = qw[p] * C::kOutputStepW + (kUnrollW ? C::kPhaseW(f) : phase_w);
    if (n[p] < 0 || d >= args.y_size.d || h >= args.y_size.h || w >= args.y_size.w) return;
    const Index channel = static_cast<Index>(group) * C::kOutPerGroup + out;
    const Index offset = n[p] * static_cast<Index>(args.y_strides.n) +
                         channel * static_cast<Index>(args.y_strides.c) +
                         d * static_cast<Index>(args.y_strides.d) + h * static_cast<Index>(args.y_strides.h) +
                         w * static_cast<Index>(args.y_strides.w);
    Scalar* y = static_cast<Scalar*>(args.y) + offset;
#pragma unroll
    for (int o = 0; o < C::kTile; o += C::kStoreVector) {
      if (out + o >= C::kOutPerGroup) continue;
      const Index step = o * static_cast<Index>(args.y_strides.c);
      if constexpr (kPair == 2) {
        Acc sums[2] = {total_of(p, f, o), total_of(p, f + 1, o)};
        const int present = w + 1 < args.y_size.w ? 2 : 1;
        finish<C, false>(args, {n[p], static_cast<int>(channel) + o, offset + step, 1, present}, sums);
        const Vector<Scalar, 2> both{Narrow<Scalar>::from(sums[0]), Narrow<Scalar>::from(sums[1])};
        if (w + 1 < args.y_size.w && (offset + step) % 2 == 0) {
          *reinterpret_cast<Vector<Scalar, 2>*>(y + step) = both;
        } else {
          y[step] = both.at[0];
          if (w + 1 < args.y_size.w) y[step + 1] = both.at[1];
        }
      } else {
        Acc sums[C::kStoreVector];
#pragma unroll
        for (int v = 0; v < C::kStoreVector; ++v) sums[v] = total_of(p, f, o + v);
        const OutputRun run{n[p], static_cast<int>(channel) + o, offset + step, args.y_strides.c,
                            C::kStoreVector};
        finish<C, true>(args, run, sums);
        Vector<Scalar, C::kStoreVector> values;
#pragma unroll
        for (int v = 0; v < C::kStoreVector; ++v) values.at[v] = Narrow<Scalar>::from(sums[v]);
        *reinterpret_cast<Vector<Scalar, C::kStoreVector>*>(y + step) = values;
      }
    }
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int p = 0; p < C::kPositions; ++p) {
      // Two phases along w of a tensor that is contiguous along w are neighbours in memory, and are stored as
      // a vector.
      constexpr int kPair = C::kPairs ? 2 : 1;
#pragma unroll
      for (int f = 0; f < C::kPhases; f += kPair) store_phase<kPair>(p, f);
    }
  }

  __device__ __forceinline__ void compute() {
    locate();
    start_from_bias();
    chained = 0;
    const int rows = rows_d * rows_h * rows_w;
    for (int first_r = 0; first_r < C::kReducedPerGroup; first_r += C::kStageChannels) {
      for (int first_row = 0; first_row < rows; first_row += C::kStageRows) {
        const int staged = rows - first_row < C::kStageRows ? rows - first_row : C::kStageRows;
        __syncthreads();  // all threads have read the previous stage
        stage_weights(first_row, staged, first_r);
        __syncthreads();
        for (int row = 0; row < staged; ++row) {
          accumulate_row(first_row + row, first_r, weights + row * kRowStride + tile * C::kTile);
        }
      }
    }
    if constexpr (kChained) add_to_totals();
    store();
  }
};

template <class Config>
__device__ void run(const Args& args) {
  Direct<Config> kernel{args, dynamic_shared<typename Config::Acc>()};
  kernel.compute();
}

}  // namespace tconv3d
