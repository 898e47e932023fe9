// Forward pass and input gradient on tensor cores by mma.sync: for every GPU since compute capability 8.0,
// every geometry, TF32 and both 16-bit types, both memory layouts.
//
// Both passes gather: output step_out*q + phase is the sum over channels r and taps j of
//   x[step_in*q + first_offset(phase) + j*offset_step] * w[tap]
// (geometry.py, Gather: the forward pass has `stride` phases, the input gradient has one and steps by
// `stride`).
//
// A block owns a box of positions q (the rows of its matrix), a slice of output channels (the columns) and
// one or more phases, each with accumulators of its own. For a chunk of input channels it copies the halo of
// x that all its taps need to shared memory once, as slots: the chunk's channels of one position. For a tap,
// a warp's rows are the slots at the tap's offset: ldmatrix takes an address per row, so that any shift,
// stride, dilation or line end costs one addition. A window of fragments along w feeds every tap and
// phase that needs it (mma_tile.cuh). Weights are packed in the order of use (mma_layout.cuh), and are copied
// a few rows of taps at a time.
//
// Copies are asynchronous: the copies of a step (kRows rows of taps of a chunk) are issued kStages - 1 steps
// before its products, and a halo together with the first step that reads it. TF32 operands are rounded to
// nearest between shared memory and the tensor cores (kRounds), unless x was already rounded when it was
// rewritten as rows of channels; weights are rounded when they are packed.
#pragma once

#include "mma_copies.cuh"
#include "mma_stores.cuh"
#include "mma_tile.cuh"

namespace tconv3d {

template <class C>
struct Mma {
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Scalar = typename C::Scalar;
  using Copies = MmaCopies<C>;
  using Stores = MmaStores<C>;
  static constexpr auto kOperand = OperandOf<Scalar>::kOperand;
  static constexpr int kStageWords = C::kRows * C::kTaps * Layout::kTapWords;
  static constexpr int kTableInts = (C::kMostRows * C::kWindows + 3) / 4 * 4;
  static constexpr bool kThroughRegisters = Copies::kByHalves;
  static_assert(C::kThreads == 32 * C::kWarpsM * C::kWarpsN, "a warp for each part of the block's tile");
  static_assert(!C::kRounds || sizeof(Scalar) == 4, "only TF32 numbers are rounded");
  static_assert(C::kStages >= 2 && C::kHaloBuffers >= 2, "copies are a step ahead of products");

  // One step of the loop over chunks, sources and rows of taps, with the indices of its buffers.
  struct Step {
    int chunk, source, row, stage, halo;
  };

  // Pointers to the parts of the block's shared memory.
  struct Shared {
    int* table;           // offset in a halo of every window of every row of taps
    unsigned* weights;    // kStages stages of packed weights
    MmaItem* items;       // list of the items of a halo
    unsigned char* halo;  // kHaloBuffers halos

    __device__ __forceinline__ explicit Shared(int slots)
        : table(dynamic_shared<int>()),
          weights(dynamic_shared<unsigned>() + kTableInts),
          items(reinterpret_cast<MmaItem*>(weights + C::kStages * kStageWords)),
          halo(reinterpret_cast<unsigned char*>(items + (slots + 1) / 2 * 2)) {}
  };

  const Tile& tile;
  const Shared& shared;
  const Copies& copies;
  int warp_m, warp_n, lane, halo_bytes;
  // Shared-memory address that this lane's row of the first tile reads at offset 0 of the first halo.
  unsigned base;
  float sums[C::kPhases][C::kTilesM][C::kTilesN][4];
  typename Copies::Jobs jobs;

  __device__ __forceinline__ void prepare() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    warp_m = warp % C::kWarpsM;
    warp_n = warp / C::kWarpsM;
    halo_bytes = tile.args.slots * Tile::kSlotBytes;
    for (int i = threadIdx.x; i < tile.rows * C::kWindows; i += C::kThreads)
      shared.table[i] = tile.window_offset(i / C::kWindows, i % C::kWindows);
    copies.list_items(shared.items);
    base = ptx::shared_address(shared.halo) + lane / 16 * 16 + tile.base(tile.position(warp_m, lane % 16, 0));
    jobs.next = jobs.count = 0;
  }

  __device__ __forceinline__ void start_from_bias() {
    const Scalar* const bias = static_cast<const Scalar*>(tile.args.bias);
    const int first = (tile.slice * C::kWarpsN + warp_n) * C::kTilesN * 8;
#pragma unroll
    for (int j = 0; j < C::kTilesN; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int channel = first + Layout::column(j, lane % 4 * 2 + e);
        const bool exists = bias != nullptr && channel < C::kOuts;
        const float start = exists ? widen<float>(bias[tile.group * C::kOuts + channel]) : 0.0f;
#pragma unroll
        for (int f = 0; f < C::kPhases; ++f) {
#pragma unroll
          for (int m = 0; m < C::kTilesM; ++m) sums[f][m][j][e] = sums[f][m][j][e + 2] = start;
        }
      }
    }
  }

  // ---- The pipeline.

  __device__ __forceinline__ void advance(Step& step) const {
    step.stage = step.stage + 1 == C::kStages ? 0 : step.stage + 1;
    step.row += C::kRows;
    if (step.row >= tile.end_row(step.source)) {
      step.row = tile.end_row(step.source);
      step.halo = step.halo + 1 == C::kHaloBuffers ? 0 : step.halo + 1;
      if (++step.source == tile.sources) {
        step.source = step.row = 0;
        ++step.chunk;
      }
    }
  }
  __device__ __forceinline__ bool begins_halo(const Step& step) const {
    return step.row == (step.source == 0 ? 0 : tile.end_row(step.source - 1));
  }
  __device__ __forceinline__ int rows_of(const Step& step) const {
    const int left = tile.end_row(step.source) - step.row;
    return left < C::kRows ? left : C::kRows;
  }

  // Issues the copies of a step, and commits them as one group.
  __device__ __forceinline__ void ask_for(const Step& step) {
    if (step.chunk < Layout::kChunks) {
      copies.copy_weights(shared.weights + step.stage * kStageWords, step.chunk, step.row, rows_of(step));
      if (!kThroughRegisters && begins_halo(step))
        copies.copy_halo(shared.halo + step.halo * halo_bytes, step.chunk, step.source);
    }
    ptx::copy_commit();
  }
  // Starts the copy of a halo through registers, which proceeds while the previous halo is multiplied.
  __device__ __forceinline__ void begin_jobs(const Step& step) {
    if constexpr (kThroughRegisters) {
      if (step.chunk < Layout::kChunks)
        copies.begin(jobs, shared.halo + step.halo * halo_bytes, step.chunk, step.source);
    }
  }
  __device__ __forceinline__ void finish_jobs() {
    if constexpr (kThroughRegisters) {
      while (jobs.next < jobs.count) copies.advance(jobs);
    }
  }
  __device__ __forceinline__ Step next_halo(Step step) const {
    step.row = tile.end_row(step.source);
    advance(step);
    return step;
  }

  // ---- The products.

  template <int kTap, int kFragments>
  __device__ __forceinline__ void multiply_tap(const unsigned (&a)[kFragments][4], const unsigned* strip) {
    unsigned b[C::kTilesN][2];
    static_for<C::kTilesN>([&](auto j) {
      constexpr int kTile = decltype(j)::value;
      if constexpr (!Layout::paired(kTile)) {
        const auto words = load_vector<2>(strip + Layout::fragment(kTile, 0) + 2 * lane);
        b[kTile][0] = words.at[0], b[kTile][1] = words.at[1];
      } else if constexpr (kTile % 2 == 0) {
        const auto words = load_vector<4>(strip + Layout::fragment(kTile, 0) + 4 * lane);
        b[kTile][0] = words.at[0], b[kTile][1] = words.at[1];
        b[kTile + 1][0] = words.at[2], b[kTile + 1][1] = words.at[3];
      }
    });
#pragma unroll
    for (int m = 0; m < C::kTilesM; ++m) {
#pragma unroll
      for (int j = 0; j < C::kTilesN; ++j)
        ptx::warp_multiply<kOperand>(sums[C::kTapPhase(kTap)][m][j], a[m + C::kTapShift(kTap)], b[j]);
    }
  }

  // Multiplies one K step of a window with all taps that read it.
  template <int kWindow, int kStep>
  __device__ __forceinline__ void multiply_window(unsigned offset, const unsigned* row) {
    constexpr int kFragments = C::kTilesM + C::kWindowSpan(kWindow);
    unsigned a[kFragments][4];
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      ptx::load_matrices(a[i], base + offset + i * Tile::kSlotBytes + 32 * kStep);
      if constexpr (C::kRounds) {
#pragma unroll
        for (int k = 0; k < 4; ++k) a[i][k] = OperandOf<float>::bits(ptx::bits_to_float(a[i][k]));
      }
    }
    static_for<C::kTaps>([&](auto tap) {
      constexpr int kTap = decltype(tap)::value;
      if constexpr (C::kTapWindow(kTap) == kWindow)
        multiply_tap<kTap>(
            a, row + kTap * Layout::kTapWords + (kStep * C::kWarpsN + warp_n) * Layout::kStripWords);
    });
  }

  __device__ __forceinline__ void multiply(const Step& step) {
    const int rows = rows_of(step);
    const unsigned buffer = step.halo * halo_bytes;
    const unsigned* row = shared.weights + step.stage * kStageWords;
#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      const int* const offsets = shared.table + (step.row + i) * C::kWindows;
      static_for<C::kWindows>([&](auto window) {
        const unsigned offset = buffer + static_cast<unsigned>(offsets[window]);
        static_for<C::kSteps>(
            [&](auto k) { multiply_window<decltype(window)::value, decltype(k)::value>(offset, row); });
      });
      row += C::kTaps * Layout::kTapWords;
      if constexpr (kThroughRegisters) copies.advance(jobs);
    }
  }

  __device__ __forceinline__ void compute() {
    prepare();
    start_from_bias();
    __syncthreads();  // the tables are visible to all threads
    // A block phase without taps outputs the bias alone.
    if (tile.rows > 0) {
      Step ahead{0, 0, 0, 0, 0}, current{0, 0, 0, 0, 0};
      begin_jobs(current);
      for (int i = 0; i < C::kStages - 1; ++i) {
        ask_for(ahead);
        advance(ahead);
      }
#pragma unroll 1
      while (current.chunk < Layout::kChunks) {
        const bool begins = kThroughRegisters && begins_halo(current);
        if (begins) finish_jobs();
        ptx::copy_wait<C::kStages - 2>();
        // The operands of this step are visible to all threads from here on, and no thread still
        // reads those of the previous step.
        __syncthreads();
        if (begins) begin_jobs(next_halo(current));
        ask_for(ahead);
        advance(ahead);
        multiply(current);
        advance(current);
      }
      ptx::copy_wait<0>();
    }
    const Stores stores{tile, warp_m, warp_n, lane};
    if constexpr (C::kLastOut) {
      stores.store_rows(sums);
    } else {
      stores.store_lines(sums);
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = Mma<Config>;
  const typename Kernel::Tile tile(args);
  const typename Kernel::Shared shared(args.slots);
  const typename Kernel::Copies copies(tile, shared.items);
  Kernel kernel{tile, shared, copies};
  kernel.compute();
}

}  // namespace tconv3d
