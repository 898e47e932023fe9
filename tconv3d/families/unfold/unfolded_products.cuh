// Both gradients of a small layer as plain matrix products with the dy that unfold.cuh has unfolded, on
// Hopper's tensor cores (sm_90a, TF32):
//   dx[ci][q]         = sum over (co, tap) of  weight[ci][co, tap]  * unfolded[q][co, tap]
//   dw[co, tap][ci]   = sum over q of          unfolded[q][co, tap] * x[ci][q]
//
// A block computes 64 rows for each of its consumers and a tile of columns of one of the products, over the
// whole K or a portion of it: with portions its sums are one of several partial results, each laid out like
// the result, which reduce_gradients.cuh adds. Producers load panels of 32 words of K of both operands into a
// ring. The second operand goes to the tensor cores straight from shared memory. The first one goes through
// registers: the weight, copied in its memory layout, is rounded there; the unfolded dy, whose rows are K of
// the second product, is loaded across its rows. The four lanes of a quad load every other position, which
// avoids bank conflicts, and x has its positions in the same order.
#pragma once

#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

template <class C>
struct UnfoldedProducts {
  static constexpr int kRows = 64 * C::kConsumers, kRowBytes = 128, kWords = 32;
  static constexpr int kTerms = C::kTerms, kTermChunks = (kTerms + kWords - 1) / kWords;
  static constexpr int kMostColumns = C::kColumnsX > C::kColumnsW ? C::kColumnsX : C::kColumnsW;
  static constexpr int kFirstBytes = kRows * kRowBytes, kStageBytes = kFirstBytes + kMostColumns * kRowBytes;
  static constexpr int kSteps = 4;  // K steps per row, 32 bytes each
  static_assert(C::kThreads == 128 * (C::kConsumers + 1));

  const Args& args;
  int warp, lane;
  unsigned stages, barriers;

  __device__ __forceinline__ UnfoldedProducts(const Args& args)
      : args(args),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {
    unsigned char* const shared = dynamic_shared<unsigned char>();
    stages = ptx::shared_address(shared);
    barriers = ptx::shared_address(shared + C::kStages * kStageBytes);
  }

  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + 8 * (C::kStages + stage); }

  // The work of a block: a tile of rows and columns, and a range of chunks of K.
  struct Job {
    bool input_grad;
    int row, column, columns;
    int begin, end, portion;
  };

  __device__ __forceinline__ Job job(int block) const {
    const bool x = block < args.blocks_x;
    const int row_tiles = ((x ? args.rows : kTerms) + kRows - 1) / kRows;
    const int columns = x ? C::kColumnsX : C::kColumnsW, all = x ? args.columns : args.rows;
    const int chunks = x ? args.chunks_x : args.chunks_w, portions = x ? args.portions_x : args.portions_w;
    const int own = x ? block : block - args.blocks_x, portion = own % portions, tile = own / portions;
    const int column = tile / row_tiles * columns;
    return {x,
            tile % row_tiles * kRows,
            column,
            min(columns, all - column),
            portion * chunks / portions,
            (portion + 1) * chunks / portions,
            portion};
  }

  __device__ __forceinline__ void prepare(const Job& job) const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < C::kStages; ++i) {
        ptx::barrier_init(full(i), job.input_grad ? 129 : 1);
        ptx::barrier_init(empty(i), C::kConsumers * 128);
      }
      ptx::fence_barrier_init();
    }
    __syncthreads();
    ptx::launch_dependents();
  }

  // ---- Producers.

  static __device__ __forceinline__ const char* panel(const void* panels, int all_rows, int chunk, int row) {
    return static_cast<const char*>(panels) + (static_cast<long long>(chunk) * all_rows + row) * kRowBytes;
  }

  // Loads the operands of the weight gradient: one thread issues all bulk copies.
  __device__ __forceinline__ void copy_panels(const Job& job) const {
    ptx::wait_for_previous_launch();
    if (threadIdx.x != 0) return;
    const int first = job.row / kWords, chunks = min(kRows / kWords, kTermChunks - first);
    Ring stage;
    for (int chunk = job.begin; chunk < job.end; ++chunk) {
      const unsigned to = stages + stage.index * kStageBytes, barrier = full(stage.index);
      ptx::barrier_wait(empty(stage.index), stage.parity ^ 1u);
      ptx::barrier_arrive_expect(barrier, (chunks * kWords + job.columns) * kRowBytes);
      ptx::bulk_copy(to + kFirstBytes, panel(args.x_panels, args.rows, chunk, job.column),
                     job.columns * kRowBytes, barrier);
      for (int i = 0; i < chunks; ++i) {
        ptx::bulk_copy(to + i * kWords * kRowBytes,
                       panel(args.position_panels, args.panel_rows, first + i, chunk * kWords),
                       kWords * kRowBytes, barrier);
      }
      stage.advance(C::kStages);
    }
  }

  // All producer threads copy the weight. The previous launch does not write it, so the first stages get it
  // before the wait for that launch.
  __device__ __forceinline__ void copy_weight(const Job& job, int chunk, int stage) const {
    const int thread = static_cast<int>(threadIdx.x), piece = thread % 8, row = thread / 8;
    const int term = chunk * kWords + piece * 4;
    const float* const weight = static_cast<const float*>(args.weight);
    const float* const from = weight + static_cast<long long>(job.row + row) * kTerms + term;
    float* const to =
        dynamic_shared<float>() + stage * (kStageBytes / 4) + row * kWords + (piece ^ (row % 8)) * 4;
    const auto all_rows = [&](auto&& copy) {
#pragma unroll
      for (int i = 0; i < kRows / 16; ++i) {
        copy(to + i * 16 * kWords, from + 16ll * i * kTerms, job.row + row + 16 * i < args.rows);
      }
    };
    if (kTerms % 4 == 0 && reinterpret_cast<unsigned long long>(weight) % 16 == 0) {
      all_rows([&](float* to, const float* from, bool exists) {
        const bool inside = exists && term < kTerms;
        ptx::copy_words_once<4>(to, inside ? from : weight, inside);
      });
    } else {
      all_rows([&](float* to, const float* from, bool exists) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool inside = exists && term + e < kTerms;
          ptx::copy_words<1>(to + e, inside ? from + e : weight, inside);
        }
      });
    }
    ptx::copy_arrive(full(stage));
  }

  __device__ __forceinline__ void copy_weight_and_panels(const Job& job) const {
    const int early = min(C::kStages, job.end - job.begin);
    for (int i = 0; i < early; ++i) copy_weight(job, job.begin + i, i);
    ptx::wait_for_previous_launch();
    Ring stage;
    for (int chunk = job.begin; chunk < job.end; ++chunk) {
      if (chunk - job.begin >= early) {
        ptx::barrier_wait(empty(stage.index), stage.parity ^ 1u);
        copy_weight(job, chunk, stage.index);
      }
      if (threadIdx.x == 0) {
        ptx::barrier_arrive_expect(full(stage.index), job.columns * kRowBytes);
        ptx::bulk_copy(stages + stage.index * kStageBytes + kFirstBytes,
                       panel(args.position_panels, args.panel_rows, chunk, job.column),
                       job.columns * kRowBytes, full(stage.index));
      }
      stage.advance(C::kStages);
    }
  }

  // ---- Consumers.

  // Rows and columns outside the result are computed from stale shared memory, and their sums are never
  // stored. load(stage, words) loads the first operand of all steps; next(sums) stores the next 8 columns.
  template <int kColumns, class Load, class Next>
  __device__ __forceinline__ void multiply(const Job& job, Load&& load, Next&& next) const {
    constexpr int kUnits = kColumns > 256 ? 2 : 1, kUnit = kColumns / kUnits;
    static_assert(kUnit * kUnits == kColumns && kUnit % 8 == 0);
    float sums[kUnits][kUnit / 2];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < kUnit / 2; ++i) {
        sums[unit][i] = 0.0f;
        ptx::pin(sums[unit][i]);
      }
    }
    Ring stage;
    for (int chunk = job.begin; chunk < job.end; ++chunk) {
      ptx::barrier_wait(full(stage.index), stage.parity);
      unsigned words[kSteps][4];
      load(dynamic_shared<float>() + stage.index * (kStageBytes / 4), words);
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) ptx::pin(words[i / 4][i % 4]);
      const auto second =
          ptx::matrix_descriptor<kRowBytes>(stages + stage.index * kStageBytes + kFirstBytes, 8 * kRowBytes);
      ptx::matrix_fence();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          ptx::MatrixMultiply<kUnit>::template issue<ptx::Operand::kTf32>(
              sums[unit], words[step], ptx::advance(second, step * 32 + unit * kUnit * kRowBytes));
        }
      }
      ptx::matrix_commit();
      ptx::matrix_wait<0>();
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) ptx::pin(words[i / 4][i % 4]);
      ptx::barrier_arrive(empty(stage.index));
      stage.advance(C::kStages);
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < kUnit / 2; ++i) ptx::pin(sums[unit][i]);
    }
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int i = 0; i < kUnit / 8; ++i) next(&sums[unit][4 * i]);
    }
  }

  // Row of a lane's first two accumulators within the block's tile; the next two are 8 rows further.
  __device__ __forceinline__ int first_row() const { return (warp / 4 - 1) * 64 + warp % 4 * 16 + lane / 4; }

  __device__ __forceinline__ void input_grad(const Job& job) const {
    const int row = job.row + first_row(), n = divide(job.column, args.by_pitch);
    const long long item = static_cast<long long>(args.rows) * args.item_positions;
    int left = job.columns, position = job.column - n * args.pitch + lane % 4 * 2;
    float* to = static_cast<float*>(args.dx) + args.dx_first + job.portion * args.dx_pitch + n * item +
                static_cast<long long>(row) * args.item_positions + position;
    const bool pairs = (args.positions | args.item_positions | static_cast<int>(args.dx_first)) % 2 == 0;
    const int own = first_row() * kWords + lane % 4;
    const auto load = [&](const float* stage, unsigned (&words)[kSteps][4]) {
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {
        const int piece = i / 4 * 2 + i % 4 / 2;
        const float value = stage[own + i % 2 * 8 * kWords + (piece ^ (lane / 4)) * 4];
        words[i / 4][i % 4] = OperandOf<float>::bits(value);
      }
    };
    multiply<C::kColumnsX>(job, load, [&](const float* sums) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (left <= 0 || position >= args.positions || row + 8 * k >= args.rows) break;
        float* const at = to + 8ll * k * args.item_positions;
        if (pairs) {
          ptx::store_global(at, uint2{ptx::float_to_bits(sums[2 * k]), ptx::float_to_bits(sums[2 * k + 1])});
        } else {
          at[0] = sums[2 * k];
          if (position + 1 < args.positions) at[1] = sums[2 * k + 1];
        }
      }
      left -= 8;
      position += 8;
      to += 8;
      if (position >= args.pitch) {  // continues in the next batch item
        position -= args.pitch;
        to += item - args.pitch;
      }
    });
  }

  __device__ __forceinline__ void weight_grad(const Job& job) const {
    const int term = job.row + first_row();
    int in = job.column + lane % 4 * 2;
    float* to = static_cast<float*>(args.dw) + (args.first_portion + job.portion) * args.dw_pitch +
                static_cast<long long>(in) * kTerms + term;
    // Offset in a stage, in words, of the lane's panel, first position and word within a piece.
    const int own = first_row() / kWords * kWords * kWords + lane % 4 * 2 * kWords + lane / 4 % 4;
    const int piece = first_row() % kWords / 4;
    const auto load = [&](const float* stage, unsigned (&words)[kSteps][4]) {
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) {
        const int odd = i % 4 / 2, own_piece = piece + i % 2 * 2;
        const float value = stage[own + (i / 4 * 8 + odd) * kWords + (own_piece ^ (lane % 4 * 2 + odd)) * 4];
        words[i / 4][i % 4] = ptx::float_to_bits(value);
      }
    };
    multiply<C::kColumnsW>(job, load, [&](const float* sums) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (in + i % 2 < args.rows && term + i / 2 * 8 < kTerms) to[i % 2 * kTerms + i / 2 * 8] = sums[i];
      }
      in += 8;
      to += 8ll * kTerms;
    });
  }
};

template <class C>
__device__ void run(const Args& args) {
  const UnfoldedProducts<C> products(args);
  const auto job = products.job(static_cast<int>(blockIdx.x));
  products.prepare(job);
  if (products.warp < 4) {
    ptx::keep_registers<C::kProducerRegisters>();
    if (job.input_grad) {
      products.copy_weight_and_panels(job);
    } else {
      products.copy_panels(job);
    }
  } else {
    ptx::claim_registers<C::kConsumerRegisters>();
    if (job.input_grad) {
      products.input_grad(job);
    } else {
      products.weight_grad(job);
    }
  }
}

}  // namespace tconv3d
