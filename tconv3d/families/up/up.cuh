// The forward pass of an up-convolution (kernel equal to stride, no padding) on Hopper's tensor cores
// (sm_90a; TF32, float16, bfloat16). Every output has one position q and one tap t:
//   y[co][stride*q + t] = bias[co] + sum over ci of  x[ci][q] * w[ci][co][t]
// The pass is one GEMM: rows are positions, columns are (co, t), K is ci. It is bound by memory bandwidth, so
// the kernel is arranged around the traffic of x and y.
//
// A tile is 64 consecutive positions, which may span several lines of the volume. A block owns some columns,
// holds their weights in shared memory, and loops over tiles:
//
//   producers   copy x in its memory layout into a ring of stages with cp.async; a stage has as many channels
//               as a swizzled 128-byte row of weights
//   consumers   two warpgroups that take alternate tiles: one multiplies while the other stores
//
// x reaches the tensor cores through registers, so it need not be transposed. Code that depends on the memory
// layout of the tensors is in up_layouts.cuh. Packed weights (kPacked) were reordered by up_pack.cuh in an
// earlier launch: bulk copies load them chunk by chunk, and products begin when the first chunk has arrived.
#pragma once

#include "ptx_hopper.cuh"
#include "ring.cuh"
#include "up_layouts.cuh"
#include "up_moments.cuh"
#include "up_weight_blocks.cuh"

namespace tconv3d {

template <class C>
struct Up {
  static constexpr bool kLeavesMoments = C::Epilogue::kLeavesMoments;
  using Stored = typename Choose<kLeavesMoments, UpFinished<C>, C>::type;
  using Layout = typename Choose<C::kLast, UpChannelsLast<Stored>, UpContiguous<Stored>>::type;
  using Scalar = typename Layout::Scalar;
  using Step = typename Layout::Step;
  using Sums = typename Layout::Sums;

  static constexpr int kRowBytes = Layout::kRowBytes, kStepBytes = Layout::kStepBytes;
  static constexpr int kStageSteps = Layout::kStageSteps, kSteps = Layout::kSteps, kSums = Layout::kSums;
  static constexpr int kChunks = (kSteps + kStageSteps - 1) / kStageSteps;  // stages of x per tile
  static constexpr int kProducers = Layout::kProducers, kConsumers = Layout::kConsumers;
  static constexpr int kWeightBytes = kChunks * C::kColumns * kRowBytes;
  static constexpr int kStageBytes = 4 * C::kStages * Layout::kStageWords;

  static_assert(C::kThreads == kProducers + 128 * kConsumers && C::kColumns % 8 == 0 && C::kStages >= 2);

  const Args& args;
  int split, warp, lane;
  Layout layout;
  unsigned char* weights;
  unsigned* stages;
  float* bias;
  unsigned barriers;

  __device__ __forceinline__ Up(const Args& arguments)
      : args(arguments),
        split(static_cast<int>(blockIdx.x) / Layout::kKinds),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32),
        layout(arguments, warp, lane, static_cast<int>(blockIdx.x) % Layout::kKinds,
               reinterpret_cast<long long*>(dynamic_shared<unsigned char>() + kWeightBytes + kStageBytes)) {
    weights = dynamic_shared<unsigned char>();
    stages = reinterpret_cast<unsigned*>(weights + kWeightBytes);
    bias = reinterpret_cast<float*>(weights + kWeightBytes + kStageBytes + 8 * Layout::kTable);
    barriers = ptx::shared_address(bias + (Layout::kOutTile + 1) / 2 * 2);
  }

  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + 8 * (C::kStages + stage); }
  // The barrier of a consumer's turn, at which the other consumer arrives when it has used the stages of its
  // tile. Before its turn a consumer could mistake an older round of these stages for its own, because
  // barriers tell rounds apart by parity only.
  __device__ __forceinline__ unsigned turn(int who) const { return barriers + 8 * (2 * C::kStages + who); }
  __device__ __forceinline__ unsigned consumers_there() const {
    return barriers + 8 * (2 * C::kStages + kConsumers);
  }
  __device__ __forceinline__ unsigned weights_there(int chunk) const {
    return consumers_there() + 8 * (1 + chunk);
  }

  // One producer thread initializes the barriers while consumers issue the copies of unpacked weights. With
  // kByBlocks only each warp's first block is requested here and the others later, so that x does not wait
  // until all weight copies are issued.
  __device__ __forceinline__ void prepare() const {
    if (!C::kPacked && warp >= kProducers / 32) copy_weights();
    if (threadIdx.x == 0) {
      for (int i = 0; i < C::kStages; ++i) {
        ptx::barrier_init(full(i), kProducers);
        ptx::barrier_init(empty(i), 128);
      }
      for (int i = 0; i < kConsumers; ++i) ptx::barrier_init(turn(i), 4);
      ptx::barrier_init(consumers_there(), 128 * kConsumers);
      for (int i = 0; i < (C::kPacked ? kChunks : 0); ++i) ptx::barrier_init(weights_there(i), 1);
      ptx::fence_barrier_init();
    }
    __syncthreads();
  }

  // Returns the first position of a tile within its batch item.
  __device__ __forceinline__ int first_position(int tile, int n) const {
    return (tile - n * static_cast<int>(args.by_tiles.divisor)) * Layout::kTile;
  }

  __device__ __forceinline__ void produce() const {
    Ring stage;
#pragma unroll 1
    for (int tile = split; tile < args.tiles; tile += args.splits) {
      const int n = divide(tile, args.by_tiles);
      const auto source = layout.source(n, first_position(tile, n));
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        ptx::barrier_wait(empty(stage.index), stage.parity ^ 1u);
        layout.copy(stages + stage.index * Layout::kStageWords, source, chunk);
        ptx::copy_arrive(full(stage.index));
        stage.advance(C::kStages);
      }
    }
  }

  // ---- Consumers, before the loop over tiles: weights are loaded while the first tiles are in flight. All
  // are copied at once in their memory layout and then reordered in place: channels-last weights by blocks,
  // each by the warp that copied it; other weights, [channel][column], by all consumers chunk by chunk. A
  // unit is 16 bytes of K of one column, or of two columns for 16-bit types.

  static constexpr int kThreads = 128 * kConsumers;  // consumer threads
  static constexpr bool kByBlocks = C::kLast && C::kWeightLast;
  static constexpr int kChunkBytes = C::kColumns * kRowBytes;
  static constexpr int kUnitColumns = C::kColumns / Layout::kPerWord;
  // kUnits is the number of units of a chunk, kOwnUnits that of a consumer thread.
  static constexpr int kUnits = kUnitColumns * 8, kOwnUnits = (kUnits + kThreads - 1) / kThreads;
  // Chunks are copied in kGroups groups, each of which is waited for as a whole.
  static constexpr int kGroups = kChunks < 8 ? kChunks : 8;
  static constexpr int group_of(int chunk) { return chunk * kGroups / kChunks; }

  struct Unit {
    unsigned words[Layout::kUnitItems];
  };

  __device__ __forceinline__ int own() const { return static_cast<int>(threadIdx.x) - kProducers; }

  __device__ __forceinline__ auto weight_blocks() const {
    return UpWeightBlocks<C, Layout, kThreads>{layout, weights, warp - kProducers / 32, lane};
  }

  __device__ __forceinline__ void copy_weights() const {
    if constexpr (kByBlocks) {
      weight_blocks().template copy<0, 1>();
    } else {
      copy_chunks();
    }
  }
  __device__ __forceinline__ void copy_chunks() const {
    static_for<kChunks>([&](auto chunk) {
      copy_chunk(chunk);
      if constexpr (group_of(chunk.value + 1) != group_of(chunk.value)) ptx::copy_commit();
    });
  }
  __device__ __forceinline__ void copy_chunk(int chunk) const {
    constexpr int kItems = Layout::kWeightPiece / Layout::kItem, kPieces = C::kColumns / kItems;
    // A weight may be a view into a flat buffer of parameters and have any alignment.
    const bool aligned = reinterpret_cast<unsigned long long>(args.weight) % Layout::kWeightPiece == 0;
    Scalar* const raw = reinterpret_cast<Scalar*>(weights + chunk * kChunkBytes);
    for (int i = own(); i < Layout::kStageItems * kPieces; i += kThreads) {
      const int in = i / kPieces, column = i % kPieces * kItems;
      const Scalar* const from = layout.weight_at(chunk * Layout::kStageItems + in, column);
      Scalar* const to = raw + in * C::kColumns + column;
      if (Layout::kWeightPiece >= 4 && aligned) {
        constexpr int kWords = Layout::kWeightPiece >= 4 ? Layout::kWeightPiece / 4 : 1;
        ptx::copy_words_once<kWords>(to, from == nullptr ? args.weight : from, from != nullptr);
      } else {
#pragma unroll
        for (int k = 0; k < kItems; ++k) to[k] = from == nullptr ? Scalar{} : load_constant(from + k);
      }
    }
  }
  // Consecutive units are consecutive columns. If these are not consecutive rows of the operand (kNeighbours
  // is false), each takes a different piece, which avoids bank conflicts in the stores.
  static __device__ __forceinline__ int piece_of(int unit) {
    return Layout::kNeighbours ? unit / kUnitColumns : (unit / kUnitColumns + unit % kUnitColumns) % 8;
  }
  __device__ __forceinline__ Unit load_unit(int chunk, int unit) const {
    const unsigned* const raw =
        reinterpret_cast<const unsigned*>(weights + chunk * kChunkBytes) + unit % kUnitColumns;
    const int piece = piece_of(unit);
    Unit found;
#pragma unroll
    for (int i = 0; i < Layout::kUnitItems; ++i) {
      found.words[i] = raw[Layout::channel_of(piece, i) * kUnitColumns];
    }
    return found;
  }
  __device__ __forceinline__ void store_unit(const Unit& from, int chunk, int unit) const {
#pragma unroll
    for (int k = 0; k < Layout::kPerWord; ++k) {
      const int row = Layout::row_of(unit % kUnitColumns * Layout::kPerWord + k), piece = piece_of(unit);
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Layout::kRounded) {
          words[i] = Layout::rounded(from.words[i]);
        } else {
          words[i] = Layout::pair(from.words[2 * i], from.words[2 * i + 1], k);
        }
      }
      *reinterpret_cast<uint4*>(weights + chunk * kChunkBytes + row * kRowBytes + (piece ^ row % 8) * 16) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }

  // Synchronizes all consumers. `number` counts the calls; its parity selects the phase of the barrier.
  __device__ __forceinline__ void meet(int number) const {
    ptx::barrier_arrive(consumers_there());
    ptx::barrier_wait(consumers_there(), static_cast<unsigned>(number) % 2u);
  }

  __device__ __forceinline__ float bias_of(int i) const {
    const int out = layout.first_out() + i;
    const bool there = args.bias != nullptr && out < C::kOut;
    return there ? widen<float>(static_cast<const Scalar*>(args.bias)[out]) : 0.0f;
  }

  __device__ __forceinline__ void load_bias() const {
    for (int i = own(); i < Layout::kOutTile; i += kThreads) bias[i] = bias_of(i);
    layout.fill_table(own(), kThreads);
  }

  // Issues the bulk copies of all chunks of packed weights.
  __device__ __forceinline__ void request_weights() const {
    const unsigned char* const from =
        static_cast<const unsigned char*>(args.weight) + static_cast<long long>(layout.kind) * kWeightBytes;
    ptx::wait_for_previous_launch();
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ptx::barrier_arrive_expect(weights_there(chunk), kChunkBytes);
      ptx::bulk_copy(ptx::shared_address(weights) + chunk * kChunkBytes, from + chunk * kChunkBytes,
                     kChunkBytes, weights_there(chunk));
    }
  }
  __device__ __forceinline__ void take_weights() const {
    if (own() == 0) request_weights();
    load_bias();
    meet(0);
  }

  __device__ __forceinline__ void order_weights() const {
    if constexpr (kByBlocks) {
      order_blocks();
    } else {
      load_bias();
      order_chunks();
    }
    ptx::fence_async_proxy();
    meet(kByBlocks ? 0 : kChunks + 1);
  }
  __device__ __forceinline__ void order_blocks() const {
    static_assert(Layout::kOutTile <= kThreads && Layout::kTable == 0);
    const bool has_bias = own() < Layout::kOutTile;
    const float value = has_bias ? bias_of(own()) : 0.0f;  // loaded before the weight copies queue up
    weight_blocks().template copy<1, UpWeightBlocks<C, Layout, kThreads>::kOwn>();
    if (has_bias) bias[own()] = value;
    weight_blocks().order();
  }
  __device__ __forceinline__ void order_chunks() const {
    ptx::copy_wait<kGroups - 1>();
    meet(0);
    static_for<kChunks>([&](auto chunk) {
      constexpr int kNext = decltype(chunk)::value + 1;
      Unit units[kOwnUnits];
#pragma unroll
      for (int i = 0; i < kOwnUnits; ++i) {
        const int unit = own() + i * kThreads;
        if (kUnits % kThreads == 0 || unit < kUnits) units[i] = load_unit(chunk, unit);
      }
      if constexpr (kNext < kChunks) ptx::copy_wait<kGroups - 1 - group_of(kNext)>();
      meet(kNext);  // this chunk is in registers, and the next one has arrived
#pragma unroll
      for (int i = 0; i < kOwnUnits; ++i) {
        const int unit = own() + i * kThreads;
        if (kUnits % kThreads == 0 || unit < kUnits) store_unit(units[i], chunk, unit);
      }
    });
  }

  // ---- Consumers, in the loop over tiles.

  template <int kCount>
  __device__ __forceinline__ void multiply_chunk(Sums& sums, Step (&steps)[kStageSteps], const Ring& stage,
                                                 unsigned long long b, int chunk) const {
    ptx::barrier_wait(full(stage.index), stage.parity);
    if constexpr (C::kPacked) ptx::barrier_wait(weights_there(chunk), 0);  // weights arrive once: parity 0
    ptx::matrix_wait<1>();  // the register operand that is overwritten next is no longer read
    layout.template load<kCount>(steps, stages + stage.index * Layout::kStageWords);
    ptx::barrier_arrive(empty(stage.index));
    // All operands are loaded before the first product.
#pragma unroll
    for (int i = 0; i < kCount * 4; ++i) ptx::pin(steps[i / 4].at[i % 4]);
    ptx::matrix_fence();
    static_for<kCount>([&](auto i) {
      ptx::MatrixMultiply<C::kColumns>::template issue<Layout::kOperand>(sums.at, steps[i].at,
                                                                         ptx::advance(b, i * kStepBytes));
    });
    ptx::matrix_commit();
  }

  // Advances the ring past the other consumer's tile.
  static __device__ __forceinline__ void skip_tile(Ring& stage) {
    stage.index += kChunks % C::kStages;
    stage.parity ^= static_cast<unsigned>(kChunks / C::kStages % 2);
    if (stage.index >= C::kStages) {
      stage.index -= C::kStages;
      stage.parity ^= 1u;
    }
  }

  // Number of leading chunks of a tile whose stages the other consumer's preceding tile does not use: a
  // consumer may take them before its turn. It is 0 with many tiles, so that one consumer multiplies while
  // the other stores.
  static constexpr int kAhead = C::kFewTiles && C::kStages > kChunks
                                    ? (C::kStages - kChunks < kChunks ? C::kStages - kChunks : kChunks)
                                    : 0;

  // Multiplies all of K of a tile, and passes the turn to the other consumer when all products are issued.
  __device__ __forceinline__ void multiply(Sums& sums, Ring& stage, int who, unsigned parity) const {
    Step steps[2][kStageSteps];
    const unsigned long long b =
        ptx::matrix_descriptor<kRowBytes>(ptx::shared_address(weights), 8 * kRowBytes);
    static_for<kChunks>([&](auto chunk) {
      constexpr int kChunk = decltype(chunk)::value, kLeft = kSteps - kChunk * kStageSteps;
      if constexpr (kChunk == kAhead) ptx::barrier_wait(turn(who), parity);
      multiply_chunk<(kLeft < kStageSteps ? kLeft : kStageSteps)>(
          sums, steps[kChunk % 2], stage, ptx::advance(b, kChunk * kChunkBytes), kChunk);
      stage.advance(C::kStages);
    });
    if constexpr (kAhead == kChunks) {
      ptx::barrier_wait(turn(who), parity);
      // A lane that sees its turn only after it was passed on could miss the phase of the barrier.
      __syncwarp();
    }
    if (lane == 0) ptx::barrier_arrive(turn(1 - who));
    skip_tile(stage);
    ptx::matrix_wait<0>();
  }

  __device__ __forceinline__ void consume() const {
    const int who = warp / 4 - 1;
    Sums sums;
    Ring stage;
    auto moments = own_moments();
    unsigned parity = who == 0 ? 1 : 0;  // consumer 0 has the first turn without waiting
    if (who == 1) skip_tile(stage);
#pragma unroll 1
    for (int tile = split + who * args.splits; tile < args.tiles; tile += kConsumers * args.splits) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        sums.at[i] = bias[layout.out_of_sum(i)];
        ptx::pin(sums.at[i]);
      }
      const int n = divide(tile, args.by_tiles);
      layout.prefetch(n, first_position(tile, n));  // memory works at the same time as the tensor cores
      multiply(sums, stage, who, parity);
      parity ^= 1u;
#pragma unroll
      for (int i = 0; i < kSums; ++i) ptx::pin(sums.at[i]);
      if constexpr (kLeavesMoments) moments.activate(sums);
      layout.store(sums, n, first_position(tile, n));
      __syncwarp();
      if constexpr (kLeavesMoments) moments.add(sums, tile, n, first_position(tile, n));
    }
    if constexpr (kLeavesMoments) moments.store();
  }
  __device__ __forceinline__ auto own_moments() const {
    if constexpr (kLeavesMoments) {
      return UpMoments<C, Layout>(layout);
    } else {
      return Int<0>{};
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  Up<Config> kernel(args);
  kernel.prepare();
  if (kernel.warp < 4) {
    ptx::keep_registers<Config::kProducerRegisters>();
    kernel.produce();
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    if constexpr (Config::kPacked) {
      kernel.take_weights();
    } else {
      kernel.order_weights();
    }
    kernel.consume();
  }
}

}  // namespace tconv3d
