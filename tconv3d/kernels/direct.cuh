// The direct kernel: forward pass and input gradient by plain multiply-adds, for every setting and type.
//
// Both passes gather: output step_out*q + phase is the sum over channels r and taps j of
//   x[step_in*q + first_offset(phase) + j*offset_step] * w[tap]
// (geometry.py, Gather: the forward pass has `stride` phases, the input gradient has one and steps by
// `stride`).
//
// A thread owns kPositions positions q and kTile output channels; it owns all phases along w, so that one
// value of x, loaded once, feeds every tap that wants it. The phase along d and h is the block's. Weights
// wait in shared memory as [row = (tap d, tap h)][channel r][tap w][output channel], and are read as vectors;
// one such vector serves kPositions positions, which is what keeps shared memory out of the way of the
// multiply-adds. Neighbouring threads are neighbours along w, or, for channels-last tensors (kTilesPerBlock >
// 1), neighbouring tiles of output channels, so that loads and stores coalesce in either format.
#pragma once

#include "common.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* w;
  const void* bias;  // null: no bias
  void* y;
  Strides x_strides, y_strides;
  Strides
      w_strides;  // n: reduced channel (within its group), c: output channel (within its group), d, h, w: tap
  long long w_group_stride;
  long long positions;  // batch * grid.d * grid.h * grid.w
  Extent x_size, y_size;
  Extent grid;  // positions q per dimension
  Divider by_d, by_h, by_w;
};

template <class Config>
struct Direct {
  using C = Config;
  using Scalar = typename C::Scalar;
  using Acc = typename C::Acc;
  using Index = typename IndexType<C::kWide>::type;

  static constexpr int kTilesPerGroup = (C::kOutPerGroup + C::kTile - 1) / C::kTile;
  static constexpr int kPhasesPerThread = C::kUnrollW ? C::kPhasesW : 1;
  static constexpr int kPhaseBlocks = C::kPhasesD * C::kPhasesH * (C::kUnrollW ? 1 : C::kPhasesW);
  static constexpr int kRowStride = C::kStageChannels * C::kTapsW * C::kTilesPerBlock * C::kTile;
  static_assert(C::kStageChannels % C::kVector == 0, "a stage holds whole vectors of channels");

  const Args& args;
  Acc* weights;  // in shared memory
  int phase_d, phase_h, phase_w;
  int block_tile;  // first tile of the block
  int tile, group,
      out;  // this thread's tile within the block, its group and first output channel in the group
  bool tile_valid;
  Index n[C::kPositions];  // batch index; -1: no such position
  int qd[C::kPositions], qh[C::kPositions], qw[C::kPositions];
  unsigned w_valid[C::kPositions];  // bit i: load i along w lies inside x
  Acc sum[C::kPositions][kPhasesPerThread][C::kTile];

  static __device__ __forceinline__ Index x_stride_w(const Args& args) {
    return C::kUnitW ? 1 : static_cast<Index>(args.x_strides.w);
  }
  static __device__ __forceinline__ Index x_stride_c(const Args& args) {
    return C::kUnitC ? 1 : static_cast<Index>(args.x_strides.c);
  }

  __device__ __forceinline__ void locate() {
    constexpr int kTiles = C::kGroups * kTilesPerGroup;
    constexpr int kTileBlocks = (kTiles + C::kTilesPerBlock - 1) / C::kTilesPerBlock;
    int block = blockIdx.x;
    const int phase = block % kPhaseBlocks;
    block /= kPhaseBlocks;
    block_tile = block % kTileBlocks * C::kTilesPerBlock;
    const Index position_block = block / kTileBlocks;

    phase_h = phase % C::kPhasesH;
    phase_d = phase / C::kPhasesH % C::kPhasesD;
    phase_w = phase / (C::kPhasesH * C::kPhasesD);

    tile = threadIdx.x % C::kTilesPerBlock;
    tile_valid = block_tile + tile < kTiles;
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
      n[p] = tile_valid && position < args.positions ? rest_d : -1;
      w_valid[p] = 0;
      if constexpr (C::kUnrollW) {
        static_for<C::kLoads>([&](auto i) {
          const int at = qw[p] * C::kInputStepW + C::kLoadOffset(i);
          w_valid[p] |= static_cast<unsigned>(at >= 0 && at < args.x_size.w) << i;
        });
      }
    }
  }

  __device__ __forceinline__ void start_from_bias() {
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
#pragma unroll
    for (int o = 0; o < C::kTile; ++o) {
      const bool has_bias = bias != nullptr && tile_valid && out + o < C::kOutPerGroup;
      const Acc start = has_bias ? widen<Acc>(bias[group * C::kOutPerGroup + out + o]) : Acc(0);
#pragma unroll
      for (int p = 0; p < C::kPositions; ++p) {
#pragma unroll
        for (int f = 0; f < kPhasesPerThread; ++f) sum[p][f][o] = start;
      }
    }
  }

  // Rows [first_row, first_row + rows) of this block's phase and channels [first_r, first_r +
  // kStageChannels).
  __device__ __forceinline__ void stage_weights(int first_row, int rows, int first_r) {
    const Scalar* w = static_cast<const Scalar*>(args.w);
    for (int i = threadIdx.x; i < rows * kRowStride; i += blockDim.x) {
      int rest = i;
      const int o = rest % C::kTile;
      rest /= C::kTile;
      const int t = rest % C::kTilesPerBlock;
      rest /= C::kTilesPerBlock;
      const int j = rest % C::kTapsW;
      rest /= C::kTapsW;
      const int r = first_r + rest % C::kStageChannels;
      const int row = first_row + rest / C::kStageChannels;

      const int g = (block_tile + t) / kTilesPerGroup;
      const int channel = (block_tile + t) % kTilesPerGroup * C::kTile + o;
      const int count_h = C::kCountH(phase_h);
      const int tap_d = C::kFirstTapD(phase_d) + row / count_h * C::kTapStepD;
      const int tap_h = C::kFirstTapH(phase_h) + row % count_h * C::kTapStepH;
      int tap_w;
      bool exists = g < C::kGroups && channel < C::kOutPerGroup && r < C::kReducedPerGroup;
      if constexpr (C::kUnrollW) {
        tap_w = C::kTapIndex(j);
      } else {
        tap_w = C::kFirstTapW(phase_w) + j * C::kTapStepW;
        exists = exists && j < C::kCountW(phase_w);
      }
      const long long at = g * args.w_group_stride + r * args.w_strides.n + channel * args.w_strides.c +
                           tap_d * args.w_strides.d + tap_h * args.w_strides.h + tap_w * args.w_strides.w;
      weights[i] = exists ? widen<Acc>(w[at]) : Acc(0);
    }
  }

  __device__ __forceinline__ void add(int p, int f, Acc value, const Vector<Acc, C::kTile>& w) {
#pragma unroll
    for (int o = 0; o < C::kTile; ++o) sum[p][f][o] += value * w.at[o];
  }

  // One vector of channels of one row, all taps along w known at compile time.
  __device__ __forceinline__ void accumulate(const Scalar* const (&line)[C::kPositions],
                                             const bool (&inside)[C::kPositions], const Acc* w) {
    const Index step = x_stride_w(args);
    Acc value[C::kPositions][C::kLoads][C::kVector];
#pragma unroll
    for (int p = 0; p < C::kPositions; ++p) {
      static_for<C::kLoads>([&](auto i) {
        Vector<Scalar, C::kVector> loaded{};
        if (inside[p] && (w_valid[p] >> i & 1))
          loaded = load_vector<C::kVector>(line[p] + C::kLoadOffset(i) * step);
#pragma unroll
        for (int v = 0; v < C::kVector; ++v) value[p][i][v] = widen<Acc>(loaded.at[v]);
      });
    }
#pragma unroll
    for (int v = 0; v < C::kVector; ++v) {
      static_for<C::kTapsW>([&](auto j) {
        constexpr int kPhase = C::kTapPhase(j), kLoad = C::kTapLoad(j);
        const auto taps = load_vector<C::kTile>(w + (v * C::kTapsW + j) * (C::kTilesPerBlock * C::kTile));
#pragma unroll
        for (int p = 0; p < C::kPositions; ++p) add(p, kPhase, value[p][kLoad][v], taps);
      });
    }
  }

  // The same with the taps along w counted at run time: many taps or many phases.
  __device__ __forceinline__ void accumulate_counted(const Scalar* const (&line)[C::kPositions],
                                                     const bool (&inside)[C::kPositions], const Acc* w) {
    const Index step = x_stride_w(args);
    for (int j = 0; j < C::kCountW(phase_w); ++j) {
      const int offset = C::kFirstOffsetW(phase_w) + j * C::kOffsetStepW;
#pragma unroll
      for (int p = 0; p < C::kPositions; ++p) {
        const int at = qw[p] * C::kInputStepW + offset;
        Vector<Scalar, C::kVector> loaded{};
        if (inside[p] && at >= 0 && at < args.x_size.w)
          loaded = load_vector<C::kVector>(line[p] + offset * step);
#pragma unroll
        for (int v = 0; v < C::kVector; ++v) {
          add(p, 0, widen<Acc>(loaded.at[v]),
              load_vector<C::kTile>(w + (v * C::kTapsW + j) * (C::kTilesPerBlock * C::kTile)));
        }
      }
    }
  }

  // All staged channels of one row = (tap d, tap h).
  __device__ __forceinline__ void accumulate_row(int row, int first_r, const Acc* w) {
    const int count_h = C::kCountH(phase_h);
    const int offset_d = C::kFirstOffsetD(phase_d) + row / count_h * C::kOffsetStepD;
    const int offset_h = C::kFirstOffsetH(phase_h) + row % count_h * C::kOffsetStepH;
    const Scalar* line[C::kPositions];
    bool inside[C::kPositions];
#pragma unroll
    for (int p = 0; p < C::kPositions; ++p) {
      const int d = qd[p] * C::kInputStepD + offset_d, h = qh[p] * C::kInputStepH + offset_h;
      inside[p] = n[p] >= 0 && d >= 0 && d < args.x_size.d && h >= 0 && h < args.x_size.h;
      const Index channel = static_cast<Index>(group) * C::kReducedPerGroup + first_r;
      const Index at = n[p] * static_cast<Index>(args.x_strides.n) + channel * x_stride_c(args) +
                       d * static_cast<Index>(args.x_strides.d) + h * static_cast<Index>(args.x_strides.h) +
                       qw[p] * C::kInputStepW * x_stride_w(args);
      // Lines outside the tensor are never read; keep their addresses inside.
      line[p] = static_cast<const Scalar*>(args.x) + (inside[p] ? at : Index(0));
    }
    const int channels =
        C::kReducedPerGroup - first_r < C::kStageChannels ? C::kReducedPerGroup - first_r : C::kStageChannels;
    for (int r = 0; r < channels; r += C::kVector) {
      if constexpr (C::kUnrollW) {
        accumulate(line, inside, w);
      } else {
        accumulate_counted(line, inside, w);
      }
      w += C::kVector * C::kTapsW * C::kTilesPerBlock * C::kTile;
#pragma unroll
      for (int p = 0; p < C::kPositions; ++p) line[p] += inside[p] ? C::kVector * x_stride_c(args) : Index(0);
    }
  }

  __device__ __forceinline__ void store() {
    Scalar* y = static_cast<Scalar*>(args.y);
#pragma unroll
    for (int p = 0; p < C::kPositions; ++p) {
      const int d = qd[p] * C::kOutputStepD + phase_d, h = qh[p] * C::kOutputStepH + phase_h;
      if (n[p] < 0 || d >= args.y_size.d || h >= args.y_size.h) continue;
#pragma unroll
      for (int f = 0; f < kPhasesPerThread; ++f) {
        const int w = qw[p] * C::kOutputStepW + (C::kUnrollW ? f : phase_w);
        if (w >= args.y_size.w) continue;
        const Index channel = static_cast<Index>(group) * C::kOutPerGroup + out;
        Scalar* at = y + n[p] * static_cast<Index>(args.y_strides.n) +
                     channel * static_cast<Index>(args.y_strides.c) +
                     d * static_cast<Index>(args.y_strides.d) + h * static_cast<Index>(args.y_strides.h) +
                     w * static_cast<Index>(args.y_strides.w);
#pragma unroll
        for (int o = 0; o < C::kTile; o += C::kStoreVector) {
          Vector<Scalar, C::kStoreVector> values;
#pragma unroll
          for (int v = 0; v < C::kStoreVector; ++v) values.at[v] = Narrow<Scalar>::from(sum[p][f][o + v]);
          if (out + o < C::kOutPerGroup) {
            *reinterpret_cast<Vector<Scalar, C::kStoreVector>*>(
                at + o * static_cast<Index>(args.y_strides.c)) = values;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void compute() {
    locate();
    start_from_bias();
    const int rows = C::kCountD(phase_d) * C::kCountH(phase_h);
    for (int first_r = 0; first_r < C::kReducedPerGroup; first_r += C::kStageChannels) {
      for (int first_row = 0; first_row < rows; first_row += C::kStageRows) {
        const int staged = rows - first_row < C::kStageRows ? rows - first_row : C::kStageRows;
        __syncthreads();  // the last stage has been read
        stage_weights(first_row, staged, first_r);
        __syncthreads();
        for (int row = 0; row < staged; ++row) {
          accumulate_row(first_row + row, first_r, weights + row * kRowStride + tile * C::kTile);
        }
      }
    }
    store();
  }
};

template <class Config>
__device__ void run(const Args& args) {
  Direct<Config> kernel{args, dynamic_shared<typename Config::Acc>()};
  kernel.compute();
}

}  // namespace tconv3d
