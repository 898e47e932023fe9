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
// x that all its taps need to shared memory once, as slots: 16 bytes of channels of one position. For a tap,
// a warp's rows are the slots at the tap's offset: ldmatrix takes an address per row, so that any shift,
// stride, dilation or line end costs one addition. A window of fragments along w feeds every tap and
// phase that needs it (mma_tile.cuh). Weights are packed in the order of use (mma_layout.cuh), and are copied
// a few rows of taps at a time.
//
// Copies are asynchronous: the copies of a step (kRows rows of taps of a chunk) are issued kStages - 1 steps
// before its products, and a halo together with the first step that reads it. TF32 operands are rounded to
// nearest between shared memory and the tensor cores (kRounds), unless x was already rounded when it was
// rewritten as rows of channels; weights are rounded when they are packed. Strict float32 (kHalves == 2)
// computes every product as three TF32 products of split values (`Halves`): x is split after it is loaded
// from shared memory, weights when they are packed.
//
// With kSplits above 1, so many blocks share the input channels of a tile. Each stores its partial sums, in
// float32, and another launch adds them in a fixed order.
//
// Taps of a layer with dilation read a lattice of x: the positions of a block may be those of one class,
// whose halo has no more than that lattice (mma_tile.cuh). With kCrops, a block leaves out the steps of a
// chunk whose taps read zeros beyond x at every position of its tile, and with them their weights.
//
// With kResident, a block computes args.tiles_of_block tiles, one after the other, and all packed weights of
// its channels and phases stay in shared memory from the first tile on. Layers with few taps and channels
// read their weights for every tile otherwise, which are as many bytes as their halos. With kAhead, the
// copies go on from tile to tile: the last steps of a tile ask for the first halos of the next one, which
// arrive while outputs are stored. Outputs then have shared memory of their own, and halos two lists of
// items by turns.
#pragma once

#include "mma_channels.cuh"
#include "mma_copies.cuh"
#include "mma_moments.cuh"
#include "mma_pairs.cuh"
#include "mma_stores.cuh"
#include "mma_tile.cuh"

namespace tconv3d {

template <class C>
struct Mma {
  using Tile = MmaTile<C>;
  using Layout = typename Tile::Layout;
  using Scalar = typename C::Scalar;
  using Copies = MmaCopies<C>;
  using Pairs = MmaPairs<C>;
  using Stores = MmaStores<C>;
  static constexpr auto kOperand = OperandOf<Scalar>::kOperand;
  static constexpr int kRowWords = Copies::kRowWords, kStageWords = C::kRows * kRowWords;
  static constexpr int kTableInts = (C::kMostRows * C::kWindows + 3) / 4 * 4;
  static constexpr bool kByPairs = C::kCopy == 3, kThroughRegisters = kByPairs || Copies::kByHalves;
  static_assert(C::kThreads == 32 * C::kWarpsM * C::kWarpsN, "a warp for each part of the block's tile");
  static_assert(!C::kRounds || sizeof(Scalar) == 4, "only TF32 numbers are rounded");
  static_assert(C::kStages >= 2 && C::kHaloBuffers >= 2, "copies are a step ahead of products");
  static_assert(C::kSplits == 1 || !C::kResident, "resident weights are those of all chunks");
  static_assert(C::kResident || C::kWeightStages == C::kStages, "stages are used again");
  static_assert(!C::kCrops || (!C::kResident && C::kHaloBuffers >= C::kStages), "each step may begin a halo");
  static_assert(!C::kAhead || (C::kResident && C::kSplits == 1 && !kThroughRegisters),
                "copies are asynchronous");

  // A place in the loop over chunks and steps, with the indices of its buffers. `row` is the step's first row
  // of taps; `halo` is the buffer of the halo that the step reads.
  struct Cursor {
    int chunk = 0, step = 0, row = 0, stage = 0, halo = 0;
  };
  // The step whose copies are issued next, and this thread's first words of its packed weights; with kCrops,
  // of the weights of its chunk.
  struct Ahead : Cursor {
    const unsigned* weights;
  };

  // Pointers to the parts of the block's shared memory.
  struct Shared {
    int* table;           // offset in a halo of every window of every row of taps
    unsigned* weights;    // kWeightStages stages of packed weights
    MmaItem* items;       // list of the items (or pairs) of a halo
    unsigned char* halo;  // kHaloBuffers halos

    __device__ __forceinline__ explicit Shared(int list)
        : table(dynamic_shared<int>()),
          weights(dynamic_shared<unsigned>() + kTableInts),
          items(reinterpret_cast<MmaItem*>(weights + C::kWeightStages * kStageWords)),
          halo(reinterpret_cast<unsigned char*>(items) + (C::kAhead ? 2 : 1) * list) {}

    // The list of the items of a tile of the block.
    __device__ __forceinline__ MmaItem* items_of(int number, int list) const {
      return items + (C::kAhead ? number % 2 * (list / static_cast<int>(sizeof(MmaItem))) : 0);
    }
  };

  const Tile& tile;
  const Shared& shared;
  const Copies& copies;
  int number;     // the tile's among the block's
  int next_halo;  // with kAhead: the buffer of the halo that the tile's, later the next tile's, first step
                  // reads
  int warp_m, warp_n, lane, halo_bytes;
  // Shared-memory address that this lane's row of the first tile reads at offset 0 of the first halo.
  unsigned base;
  float sums[C::kPhases][C::kTilesM][C::kTilesN][4];
  typename Copies::Jobs jobs;
  typename Pairs::Jobs pair_jobs;

  __device__ __forceinline__ void prepare() {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    lane = static_cast<int>(threadIdx.x) % 32;
    warp_m = warp % C::kWarpsM;
    warp_n = warp / C::kWarpsM;
    halo_bytes = Tile::kPieces * tile.piece_bytes();
    for (int i = threadIdx.x; number == 0 && i < tile.rows * C::kWindows; i += C::kThreads)
      shared.table[i] = tile.window_offset(i / C::kWindows, i % C::kWindows);
    if constexpr (kByPairs) {
      Pairs(copies).list_pairs(shared.items);
    } else {
      if (!C::kAhead || number == 0) copies.list_items(shared.items);
      if constexpr (C::kAhead) {
        const Tile next(tile.args, number + 1);
        if (next.exists) copies_of(next).list_items(shared.items_of(number + 1, tile.args.list));
      }
    }
    base = ptx::shared_address(shared.halo) + lane / 16 * (Layout::kLaneWords - 1) * tile.piece_bytes() +
           tile.base(tile.position(warp_m, lane % 16, 0));
    jobs.next = jobs.count = pair_jobs.next = pair_jobs.count = 0;
  }

  __device__ __forceinline__ Copies copies_of(const Tile& next) const {
    return Copies(next, shared.items_of(number + 1, tile.args.list));
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

  __device__ __forceinline__ void advance(Cursor& at) const {
    at.stage = !C::kResident && at.stage + 1 == C::kStages ? 0 : at.stage + 1;
    if constexpr (C::kCrops) {
      const int next = tile.next_needed(at.step + 1);
      if (next < 0) ++at.chunk;
      at.step = next < 0 ? tile.first_needed() : next;
      at.row = tile.row_of(at.step);
    } else {
      at.row += tile.rows_of(at.step);
      if (++at.step == tile.steps) {
        at.step = at.row = 0;
        ++at.chunk;
      }
    }
    if (tile.begins_halo(at.step)) at.halo = at.halo + 1 == C::kHaloBuffers ? 0 : at.halo + 1;
  }

  // Issues the copies of a step, commits them as one group, and advances to the next step.
  __device__ __forceinline__ void ask_for(Ahead& at) {
    if (at.chunk < tile.last_chunk) {
      const int rows = tile.rows_of(at.step);
      if (!C::kResident || number == 0)
        copies.copy_weights(shared.weights + at.stage * kStageWords,
                            at.weights + (C::kCrops ? at.row * kRowWords : 0), rows);
      if (!kThroughRegisters && tile.begins_halo(at.step))
        copies.copy_halo(shared.halo + at.halo * halo_bytes, at.chunk, tile.source_of(at.step));
      if constexpr (!C::kCrops) at.weights += rows * kRowWords;
    } else if constexpr (C::kAhead) {
      const int chunk = at.chunk - tile.last_chunk;  // chunk of the next tile
      const Tile next(tile.args, number + 1);
      if (next.exists && tile.begins_halo(at.step))
        copies_of(next).copy_halo(shared.halo + at.halo * halo_bytes, chunk, tile.source_of(at.step));
      if (chunk == 0 && at.step == 0) next_halo = at.halo;
    }
    ptx::copy_commit();
    const int chunk = at.chunk;
    advance(at);
    // The weights of a chunk are followed by those of other block phases.
    if constexpr (C::kCrops) {
      if (at.chunk != chunk) at.weights += C::kAllTaps * Layout::kTapWords;
    } else if (Tile::kBlockPhases > 1 && at.step == 0) {
      at.weights += (C::kAllTaps - tile.rows * C::kTaps) * Layout::kTapWords;
    }
  }
  // Starts the copy of a halo through registers, which proceeds while the previous halo is multiplied.
  __device__ __forceinline__ void begin_jobs(int halo, int chunk, int source) {
    if (chunk >= tile.last_chunk) return;
    if constexpr (kByPairs) {
      Pairs(copies).begin(pair_jobs, shared.halo + halo * halo_bytes, chunk, source);
    } else if constexpr (kThroughRegisters) {
      copies.begin(jobs, shared.halo + halo * halo_bytes, chunk, source);
    }
  }
  __device__ __forceinline__ void begin_jobs_after(const Cursor& at) {
    const int halo = at.halo + 1 == C::kHaloBuffers ? 0 : at.halo + 1;
    if constexpr (C::kCrops) {
      const int next = tile.next_source(at.step);
      begin_jobs(halo, at.chunk + (next < 0 ? 1 : 0), tile.source_of(next < 0 ? tile.first_needed() : next));
      return;
    }
    const int source = tile.source_of(at.step) + 1;
    const bool last = source == tile.sources;
    begin_jobs(halo, at.chunk + (last ? 1 : 0), last ? 0 : source);
  }
  __device__ __forceinline__ void advance_jobs() {
    if constexpr (kByPairs) {
      Pairs(copies).advance(pair_jobs);
    } else if constexpr (kThroughRegisters) {
      copies.advance(jobs);
    }
  }
  __device__ __forceinline__ void finish_jobs() {
    while (kByPairs ? pair_jobs.next < pair_jobs.count : jobs.next < jobs.count) advance_jobs();
  }

  // ---- The products. A use is the product of a window's fragments, at one K step, with the weights of a
  // tap.

  struct Use {
    int row, window, step, tap;
    int unit;    // number of the window's fragments of this K step, counted over all rows
    bool first;  // no use before this one has the same unit
  };
  static constexpr int kRowUses = C::kTaps * C::kSteps;
  static constexpr Use use(int number) {
    const int row = number / kRowUses;
    int rest = number % kRowUses, window = 0, taps = C::kFirstUse(1);
    while (rest >= taps * C::kSteps) {
      rest -= taps * C::kSteps;
      ++window;
      taps = C::kFirstUse(window + 1) - C::kFirstUse(window);
    }
    const int step = rest / taps, own = rest % taps;
    const int unit = (row * C::kWindows + window) * C::kSteps + step;
    return {row, window, step, C::kUse(C::kFirstUse(window) + own), unit, own == 0};
  }
  static constexpr int most_fragments() {
    int most = 0;
    for (int i = 0; i < C::kWindows; ++i) most = C::kWindowSpan(i) > most ? C::kWindowSpan(i) : most;
    return C::kTilesM + most;
  }
  static constexpr int kLaneWords = Layout::kLaneWords;
  using Fragments = unsigned[most_fragments()][2 * kLaneWords];
  using Columns = unsigned[C::kHalves][C::kTilesN][kLaneWords];

  template <int kNumber>
  __device__ __forceinline__ void load_fragments(Fragments& a, const unsigned (&windows)[C::kWindows]) const {
    constexpr Use kUse = use(kNumber);
    const unsigned from = windows[kUse.window] + kLaneWords * kUse.step * tile.piece_bytes();
#pragma unroll
    for (int i = 0; i < C::kTilesM + C::kWindowSpan(kUse.window); ++i)
      ptx::load_matrices(a[i], from + i * Tile::kSlotBytes);
  }

  template <int kNumber>
  __device__ __forceinline__ void load_columns(Columns& b, const unsigned* weights) const {
    constexpr Use kUse = use(kNumber);
    const unsigned* const strip = weights + kUse.row * kRowWords + kUse.tap * Layout::kTapWords +
                                  kUse.step * C::kWarpsN * Layout::kStripWords;
    static_for<C::kHalves * C::kTilesN>([&](auto number) {
      constexpr int kHalf = decltype(number)::value / C::kTilesN,
                    kTile = decltype(number)::value % C::kTilesN;
      const unsigned* const from = strip + kHalf * Layout::kHalfWords + Layout::fragment(kTile, 0);
      if constexpr (!Layout::paired(kTile)) {
        const auto words = load_vector<kLaneWords>(from + kLaneWords * lane);
#pragma unroll
        for (int i = 0; i < kLaneWords; ++i) b[kHalf][kTile][i] = words.at[i];
      } else if constexpr (kTile % 2 == 0) {
        const auto words = load_vector<2 * kLaneWords>(from + 2 * kLaneWords * lane);
#pragma unroll
        for (int i = 0; i < 2 * kLaneWords; ++i)
          b[kHalf][kTile + i / kLaneWords][i % kLaneWords] = words.at[i];
      }
    });
  }

  // Turns the fragments of a unit into operands of tensor cores: rounds them, or splits them for strict
  // float32, where `a` then has the high halves.
  template <int kWindow>
  __device__ __forceinline__ void make_operands(Fragments& a, Fragments& low) const {
    if constexpr (C::kRounds || C::kHalves == 2) {
#pragma unroll
      for (int i = 0; i < C::kTilesM + C::kWindowSpan(kWindow); ++i) {
#pragma unroll
        for (int k = 0; k < 2 * kLaneWords; ++k) {
          const float value = ptx::bits_to_float(a[i][k]);
          if constexpr (C::kHalves == 2) {
            a[i][k] = Halves::high(value);
            low[i][k] = Halves::low(value);
          } else {
            a[i][k] = OperandOf<float>::bits(value);
          }
        }
      }
    }
  }

  template <int kTap>
  __device__ __forceinline__ void multiply_tap(const Fragments& a, const Fragments& low, const Columns& b) {
    constexpr int kShift = C::kTapShift(kTap), kPhase = C::kTapPhase(kTap);
#pragma unroll
    for (int m = 0; m < C::kTilesM; ++m) {
      if constexpr (C::kHalves == 2) {
        // Tensor cores round sums towards zero. They add the three products of 8 channels, the small ones
        // first; an ordinary addition, which rounds to nearest, adds the result to the sum.
        float part[C::kTilesN][4] = {};
#pragma unroll
        for (int j = 0; j < C::kTilesN; ++j) ptx::warp_multiply<kOperand>(part[j], low[m + kShift], b[0][j]);
#pragma unroll
        for (int j = 0; j < C::kTilesN; ++j) ptx::warp_multiply<kOperand>(part[j], a[m + kShift], b[1][j]);
#pragma unroll
        for (int j = 0; j < C::kTilesN; ++j) ptx::warp_multiply<kOperand>(part[j], a[m + kShift], b[0][j]);
#pragma unroll
        for (int j = 0; j < C::kTilesN; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[kPhase][m][j][e] += part[j][e];
        }
      } else {
#pragma unroll
        for (int j = 0; j < C::kTilesN; ++j)
          ptx::warp_multiply<kOperand>(sums[kPhase][m][j], a[m + kShift], b[0][j]);
      }
    }
  }

  __device__ __forceinline__ void find_windows(unsigned (&windows)[C::kWindows], unsigned halo,
                                               int row) const {
    static_for<C::kWindows>([&](auto window) {
      windows[window] = halo + static_cast<unsigned>(shared.table[row * C::kWindows + window]);
    });
  }

  // Multiplies kCount rows of taps. The operands of a use are loaded before the products of the use before
  // it, except for fragments in strict float32, which has no registers left for them.
  static constexpr bool kEarly = C::kHalves == 1;
  // Rows of taps are multiplied one by one if words are copied between them, and in strict float32.
  static constexpr bool kRowsTogether = kEarly && !kThroughRegisters;
  template <int kCount>
  __device__ __forceinline__ void multiply_rows(unsigned halo, int row, const unsigned* weights) {
    constexpr int kUses = kCount * kRowUses;
    unsigned windows[2][C::kWindows];
    Fragments a[2], low;  // `low` is used by strict float32 alone
    Columns b[2];
    find_windows(windows[0], halo, row);
    load_fragments<0>(a[0], windows[0]);
    load_columns<0>(b[0], weights);
    static_for<kUses>([&](auto number) {
      constexpr int kNow = decltype(number)::value, kNext = kNow + 1;
      constexpr Use kUse = use(kNow);
      if constexpr (kNow % kRowUses == 0 && kUse.row + 1 < kCount)
        find_windows(windows[(kUse.row + 1) % 2], halo, row + kUse.row + 1);
      if constexpr (kNext < kUses) {
        [[maybe_unused]] constexpr Use kAfter = use(kNext);
        if constexpr (kEarly && kAfter.first)
          load_fragments<kNext>(a[kAfter.unit % 2], windows[kAfter.row % 2]);
        load_columns<kNext>(b[kNext % 2], weights);
      }
      if constexpr (!kEarly && kNow > 0 && kUse.first)
        load_fragments<kNow>(a[kUse.unit % 2], windows[kUse.row % 2]);
      if constexpr (kUse.first) make_operands<kUse.window>(a[kUse.unit % 2], low);
      multiply_tap<kUse.tap>(a[kUse.unit % 2], low, b[kNow % 2]);
    });
  }

  __device__ __forceinline__ void multiply(const Cursor& at) {
    const int rows = tile.rows_of(at.step);
    const unsigned halo = base + at.halo * halo_bytes;
    const unsigned* weights = shared.weights + at.stage * kStageWords + warp_n * Layout::kStripWords;
    if constexpr (kRowsTogether) {
      if (rows == C::kRows) {
        multiply_rows<C::kRows>(halo, at.row, weights);
        return;
      }
    }
    if constexpr (!kRowsTogether || !C::kWholeSteps) {
#pragma unroll 1
      for (int i = 0; i < rows; ++i) {
        multiply_rows<1>(halo, at.row + i, weights + i * kRowWords);
        advance_jobs();
      }
    }
  }

  // Applies the epilogue to all sums; used if the moments of the results are stored too.
  __device__ __forceinline__ void apply_epilogue() {
#pragma unroll
    for (int f = 0; f < C::kPhases; ++f) {
#pragma unroll
      for (int m = 0; m < C::kTilesM; ++m) {
#pragma unroll
        for (int j = 0; j < C::kTilesN; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[f][m][j][e] = C::Epilogue::apply(sums[f][m][j][e]);
        }
      }
    }
  }

  __device__ __forceinline__ void compute() {
    prepare();
    if constexpr (OperandCounts<typename C::Epilogue>::kWholes > 0) {
      int own = lane;
      ptx::renew(own);  // Without this the compiler keeps every address until the sums are finished.
      Stores{tile, warp_m, warp_n, own, nullptr}.prefetch();
    }
    start_from_bias();
    __syncthreads();  // the tables are visible to all threads
    // A block phase without taps, or whose taps all lie beyond x, outputs the bias alone.
    if (tile.computes()) {
      Cursor current{tile.first_chunk};
      if constexpr (C::kCrops) current.step = tile.first_needed(), current.row = tile.row_of(current.step);
      current.halo = next_halo;
      Ahead ahead{current, copies.weights()};
      begin_jobs(0, tile.first_chunk, C::kCrops ? tile.source_of(current.step) : 0);
      for (int i = 0; i < C::kStages - 1; ++i) {
        if (C::kAhead && number > 0) {
          advance(ahead);  // the previous tile has asked for this step
        } else {
          ask_for(ahead);
        }
      }
#pragma unroll 1
      while (current.chunk < tile.last_chunk) {
        const bool begins = kThroughRegisters && tile.begins_halo(current.step);
        if (begins) finish_jobs();
        ptx::copy_wait<C::kStages - 2>();
        // The operands of this step are visible to all threads from here on, and no thread still
        // reads those of the previous step.
        __syncthreads();
        if (begins) begin_jobs_after(current);
        ask_for(ahead);
        multiply(current);
        advance(current);
      }
      if constexpr (!C::kAhead) ptx::copy_wait<0>();
    }
    if constexpr (C::Epilogue::kLeavesMoments) {
      apply_epilogue();
      MmaMoments<C>{tile, sums, warp_m, warp_n, lane}.store();
    }
    if constexpr (C::Epilogue::kOverChannels) {
      if (MmaChannels<C>{tile, warp_m, lane}.run(sums)) return;
    }
    // Stores do not pass through the shared memory of weights that the next tile needs.
    unsigned char* const staged = C::kAhead      ? shared.halo + C::kHaloBuffers * halo_bytes
                                  : C::kResident ? reinterpret_cast<unsigned char*>(shared.items)
                                                 : dynamic_shared<unsigned char>();
    const Stores stores{tile, warp_m, warp_n, lane, reinterpret_cast<typename C::Out*>(staged)};
    if constexpr (C::kLastOut) {
      stores.store_rows(sums);
    } else if constexpr (C::kAlongW) {
      stores.store_directly(sums);
    } else {
      stores.store_lines(sums);
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = Mma<Config>;
  const typename Kernel::Shared shared(args.list);
  const int tiles = Config::kResident ? args.tiles_of_block : 1;
  int halo = 0;
#pragma unroll 1
  for (int i = 0; i < tiles; ++i) {
    const typename Kernel::Tile tile(args, i);
    if (Config::kResident && !tile.exists) break;
    if (!Config::kAhead && i > 0) __syncthreads();  // no thread still reads the previous tile's shared memory
    const typename Kernel::Copies copies(tile, shared.items_of(i, args.list));
    Kernel kernel{tile, shared, copies, i, halo};
    kernel.compute();
    if constexpr (Config::kAhead) halo = kernel.next_halo;
  }
}

}  // namespace tconv3d
