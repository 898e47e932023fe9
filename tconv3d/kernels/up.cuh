// The forward pass of an up-convolution (kernel equal to stride, no padding; two taps along w) on Hopper's
// tensor cores (sm_90a; TF32, float16, bfloat16). Every output has one position q and one tap t:
//   y[co][stride*q + t] = bias[co] + sum over ci of  x[ci][q] * w[ci][co][t]
// So it is one product: rows are positions, columns are (co, t) in the order of the weight, K is ci. It moves
// far more bytes than it multiplies numbers, and is arranged around them.
//
// A tile is 64 positions in sequence (or 128, two slabs), wherever lines end. A block owns some columns,
// keeps their weights in shared memory, and walks over tiles:
//
//   producers   copy x past the registers into a ring, channel by channel as it is in memory: a stage is the
//               channels that a swizzled row of weights has
//   consumers   two warpgroups, every other tile each: one multiplies while the other stores
//
// x goes to tensor cores through registers, so it need not be transposed, and is rounded to TF32 on the way.
// Rows of a product may be any positions: lane (g, t) of a warp has two neighbours, 2g and 2g + 1, as rows g
// and g + 8, loaded together; with two slabs of a 16-bit type, four. Of the sums it then has both taps along
// w of all: outputs in a row, one store, and the eight lanes with the same t fill whole lines.
#pragma once

#include "epilogue.cuh"
#include "operands.cuh"
#include "ring.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* weight;  // contiguous
  const void* bias;    // or null
  void* y;
  long long x_n, x_c;  // strides of x, whose positions are contiguous
  Strides y_strides;
  int positions;      // of a batch item
  int tiles, splits;  // tiles in all, and blocks that share them
  Divider by_tiles;   // of a batch item
  Divider by_h, by_w;
};

template <class C>
struct Up {
  using Scalar = typename C::Scalar;

  static constexpr int kItem = sizeof(Scalar), kPerWord = 4 / kItem;
  static constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
  static constexpr bool kRounded = kOperand == ptx::Operand::kTf32;
  static constexpr int kTile = 64 * C::kSlabs;                 // positions
  static constexpr int kLaneWords = C::kSlabs * 2 / kPerWord;  // of a channel: the positions of a lane
  static constexpr int kStepBytes = 32, kRowBytes = 128;
  static constexpr int kStepItems = kStepBytes / kItem, kStageItems = kRowBytes / kItem;  // channels
  static constexpr int kStageSteps = kRowBytes / kStepBytes;
  static constexpr int kSteps = (C::kIn + kStepItems - 1) / kStepItems;
  static constexpr int kChunks = (kSteps + kStageSteps - 1) / kStageSteps;  // stages that a tile takes
  // From channel to channel in a stage, in words: no load of an operand meets a bank twice.
  static constexpr int kPitch = kTile / kPerWord + 8 / kPerWord;
  static constexpr int kTaps = 2;  // along w
  static constexpr int kPlanes = C::kKernelD * C::kKernelH;
  static constexpr int kColumnsAll = C::kOut * kPlanes * kTaps;
  static constexpr int kColumnTiles = (kColumnsAll + C::kColumns - 1) / C::kColumns;
  static constexpr int kGroupOut = 4 / kPlanes;  // output channels of 8 columns
  static constexpr int kOutTile = C::kColumns / 8 * kGroupOut;
  static constexpr int kSums = C::kColumns / 2;
  static constexpr int kProducers = 128, kConsumers = 2;  // threads; warpgroups
  static constexpr int kWeightBytes = kChunks * C::kColumns * kRowBytes;
  static constexpr int kStageWords = kStageItems * kPitch;

  static_assert(C::kThreads == kProducers + 128 * kConsumers && C::kColumns % 8 == 0 && C::kStages >= 2);
  static_assert(C::kSlabs == 1 || (C::kSlabs == 2 && kPerWord == 2), "one store of 16 bytes at most");
  static_assert(C::kKernelW == kTaps && 4 % kPlanes == 0, "8 columns are whole output channels");

  const Args& args;
  int split, first_column;
  int warp, lane;
  unsigned char* weights;
  unsigned* stages;
  float* bias;
  unsigned barriers;

  __device__ __forceinline__ Up(const Args& arguments)
      : args(arguments),
        split(static_cast<int>(blockIdx.x) / kColumnTiles),
        first_column(static_cast<int>(blockIdx.x) % kColumnTiles * C::kColumns),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {
    weights = dynamic_shared<unsigned char>();
    stages = reinterpret_cast<unsigned*>(weights + kWeightBytes);
    bias = reinterpret_cast<float*>(stages + C::kStages * kStageWords);
    barriers = ptx::shared_address(bias + (kOutTile + 1) / 2 * 2);
  }

  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + 8 * (C::kStages + stage); }
  // A consumer's turn to take stages: not before it is, the parity of a stage's barrier tells its rounds
  // apart.
  __device__ __forceinline__ unsigned turn(int who) const { return barriers + 8 * (2 * C::kStages + who); }
  __device__ __forceinline__ unsigned weights_there() const {
    return barriers + 8 * (2 * C::kStages + kConsumers);
  }
  __device__ __forceinline__ int first_out() const { return first_column / 8 * kGroupOut; }

  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < C::kStages; ++i) {
        ptx::barrier_init(full(i), kProducers);
        ptx::barrier_init(empty(i), 4);
      }
      for (int i = 0; i < kConsumers; ++i) ptx::barrier_init(turn(i), 4);
      ptx::barrier_init(weights_there(), 128 * kConsumers);
      ptx::fence_barrier_init();
    }
    __syncthreads();
  }

  // ---- Producers: a thread has the same piece of 16 bytes of every channel that it copies.

  __device__ __forceinline__ void copy_chunk(int stage, int chunk, const Scalar* from, bool inside) const {
    constexpr int kPieces = kTile * kItem / 16, kRowsAtOnce = kProducers / kPieces;
    const int row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces;
    unsigned* const to = stages + stage * kStageWords + row * kPitch + piece * 4;
    const int first = chunk * kStageItems + row;
#pragma unroll
    for (int i = 0; i < kStageItems / kRowsAtOnce; ++i) {
      const int in = first + i * kRowsAtOnce;
      const bool there = inside && (C::kIn % kStageItems == 0 || in < C::kIn);
      ptx::copy_words_once<4>(to + i * kRowsAtOnce * kPitch, there ? from + in * args.x_c : from, there);
    }
    ptx::copy_arrive(full(stage));
  }

  __device__ __forceinline__ void produce() const {
    constexpr int kPieces = kTile * kItem / 16;
    const int own = static_cast<int>(threadIdx.x) % kPieces * (16 / kItem);
    Ring stage;
#pragma unroll 1
    for (int tile = split; tile < args.tiles; tile += args.splits) {
      const int n = divide(tile, args.by_tiles);
      const int position = (tile - n * static_cast<int>(args.by_tiles.divisor)) * kTile + own;
      const bool inside = position < args.positions;
      const Scalar* const from = static_cast<const Scalar*>(args.x) + n * args.x_n + (inside ? position : 0);
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        ptx::barrier_wait(empty(stage.index), stage.parity ^ 1u);
        copy_chunk(stage.index, chunk, from, inside);
        stage.advance(C::kStages);
      }
    }
  }

  // ---- Consumers, before the walk: weights, while the first tiles are on their way. A unit is 16 bytes of
  // K of one column, or of two of a 16-bit type: neighbouring threads read neighbouring columns.

  struct Unit {
    unsigned words[4 * kPerWord];  // one for each channel
  };
  static constexpr int kUnitColumns = C::kColumns / kPerWord;
  static constexpr int kUnits = kUnitColumns * kSteps * 2;

  // A weight may begin anywhere among other parameters.
  __device__ __forceinline__ unsigned load_word(const Scalar* from) const {
    if (kPerWord == 1 || reinterpret_cast<unsigned long long>(args.weight) % 4 == 0) {
      return __ldg(reinterpret_cast<const unsigned*>(from));
    }
    return OperandOf<Scalar>::bits(load_constant(from)) | OperandOf<Scalar>::bits(load_constant(from + 1))
                                                              << 16;
  }
  __device__ __forceinline__ Unit load_unit(int unit) const {
    constexpr int kRowWords = kColumnsAll / kPerWord;
    const int column = first_column / kPerWord + unit % kUnitColumns;
    const int in = unit / kUnitColumns * (4 * kPerWord);
    const Scalar* const from = static_cast<const Scalar*>(args.weight) +
                               (in * static_cast<long long>(kRowWords) + column) * kPerWord;
    const bool inside = unit < kUnits && column < kRowWords;
    Unit found;
#pragma unroll
    for (int i = 0; i < 4 * kPerWord; ++i) {
      const bool there = inside && (C::kIn % kStepItems == 0 || in + i < C::kIn);
      found.words[i] = there ? load_word(from + i * (kRowWords * kPerWord)) : 0u;
    }
    return found;
  }
  __device__ __forceinline__ void store_unit(const Unit& from, int unit) const {
    if (unit >= kUnits) return;
    const int column = unit % kUnitColumns * kPerWord, piece = unit / kUnitColumns;
#pragma unroll
    for (int k = 0; k < kPerWord; ++k) {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kRounded) {
          words[i] = rounded(from.words[i]);
        } else {
          words[i] = pair(from.words[2 * i], from.words[2 * i + 1], k);
        }
      }
      const int row = column + k;
      *reinterpret_cast<uint4*>(weights + (piece / 8 * C::kColumns + row) * kRowBytes +
                                (piece % 8 ^ row % 8) * 16) = uint4{words[0], words[1], words[2], words[3]};
    }
  }
  __device__ __forceinline__ void load_weights() const {
    constexpr int kAtOnce = 16 / kPerWord, kThreads = 128 * kConsumers;
    const int own = static_cast<int>(threadIdx.x) - kProducers;
#pragma unroll 1
    for (int first = own; first < kUnits; first += kAtOnce * kThreads) {
      Unit units[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) units[i] = load_unit(first + i * kThreads);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) store_unit(units[i], first + i * kThreads);
    }
    for (int i = own; i < kOutTile; i += kThreads) {
      const bool there = args.bias != nullptr && first_out() + i < C::kOut;
      bias[i] = there ? widen<float>(static_cast<const Scalar*>(args.bias)[first_out() + i]) : 0.0f;
    }
    ptx::fence_async_proxy();
    ptx::barrier_arrive(weights_there());
    ptx::barrier_wait(weights_there(), 0);
  }

  // ---- Consumers, walking.

  static __device__ __forceinline__ unsigned rounded(unsigned word) {
    return OperandOf<float>::bits(ptx::bits_to_float(word));
  }
  // Half `which` of each of two words.
  static __device__ __forceinline__ unsigned pair(unsigned low, unsigned high, int which) {
    return which == 0 ? (low & 0xFFFFu) | high << 16 : low >> 16 | (high & 0xFFFF0000u);
  }

  // The sums of a lane, and the operand of one step.
  struct Sums {
    float at[C::kSlabs][kSums];
  };
  struct Step {
    unsigned at[C::kSlabs][4];
  };

  // `from`: this lane's positions of the step's first channel.
  __device__ __forceinline__ void load_step(Step& to, const unsigned* from) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if constexpr (kRounded) {
        const auto both = load_vector<kLaneWords>(from + (lane % 4 + 4 * k) * kPitch);
        to.at[0][2 * k] = rounded(both.at[0]);
        to.at[0][2 * k + 1] = rounded(both.at[1]);
      } else {
        const unsigned* const channel = from + (lane % 4 * 2 + 8 * k) * kPitch;
        const auto low = load_vector<kLaneWords>(channel), high = load_vector<kLaneWords>(channel + kPitch);
#pragma unroll
        for (int slab = 0; slab < C::kSlabs; ++slab) {
          to.at[slab][2 * k] = pair(low.at[slab], high.at[slab], 0);
          to.at[slab][2 * k + 1] = pair(low.at[slab], high.at[slab], 1);
        }
      }
    }
  }

  // Where this lane's first position is in a tile.
  __device__ __forceinline__ int own_position() const { return (warp % 4 * 8 + lane / 4) * (2 * C::kSlabs); }

  template <int kCount>
  __device__ __forceinline__ void multiply_chunk(Sums& sums, Step (&steps)[kStageSteps], const Ring& stage,
                                                 unsigned long long b) const {
    const unsigned* const from = stages + stage.index * kStageWords + own_position() / kPerWord;
    ptx::barrier_wait(full(stage.index), stage.parity);
    ptx::matrix_wait<1>();  // of two operands in registers, the one that is next is free
    static_for<kCount>([&](auto i) { load_step(steps[i], from + i * kStepItems * kPitch); });
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(empty(stage.index));
#pragma unroll
    for (int i = 0; i < kCount * C::kSlabs * 4; ++i) {  // before the first product, all of them
      ptx::pin(steps[i / (C::kSlabs * 4)].at[i / 4 % C::kSlabs][i % 4]);
    }
    ptx::matrix_fence();
    static_for<kCount * C::kSlabs>([&](auto i) {
      constexpr int kStep = decltype(i)::value / C::kSlabs, kSlab = decltype(i)::value % C::kSlabs;
      ptx::MatrixMultiply<C::kColumns>::template issue<kOperand>(sums.at[kSlab], steps[kStep].at[kSlab],
                                                                 ptx::advance(b, kStep * kStepBytes));
    });
    ptx::matrix_commit();
  }

  // Past the other consumer's tile.
  static __device__ __forceinline__ void skip_tile(Ring& stage) {
    stage.index += kChunks % C::kStages;
    stage.parity ^= static_cast<unsigned>(kChunks / C::kStages % 2);
    if (stage.index >= C::kStages) {
      stage.index -= C::kStages;
      stage.parity ^= 1u;
    }
  }

  // All of K; the stages of the next tile are then the other consumer's.
  __device__ __forceinline__ void multiply(Sums& sums, Ring& stage, int who) const {
    Step steps[2][kStageSteps];
    const unsigned long long b =
        ptx::matrix_descriptor<kRowBytes>(ptx::shared_address(weights), 8 * kRowBytes);
    static_for<kChunks>([&](auto chunk) {
      constexpr int kChunk = decltype(chunk)::value;
      constexpr int kCount =
          kSteps - kChunk * kStageSteps < kStageSteps ? kSteps - kChunk * kStageSteps : kStageSteps;
      multiply_chunk<kCount>(sums, steps[kChunk % 2], stage,
                             ptx::advance(b, kChunk * C::kColumns * kRowBytes));
      stage.advance(C::kStages);
    });
    if (lane == 0) ptx::barrier_arrive(turn(1 - who));
    skip_tile(stage);
    ptx::matrix_wait<0>();
  }

  // Of each 8 columns a lane has both taps along w of an output channel, in a plane (taps along d and h).
  __device__ __forceinline__ void store(const Sums& sums, int tile) const {
    const int n = divide(tile, args.by_tiles);
    const int position = (tile - n * static_cast<int>(args.by_tiles.divisor)) * kTile + own_position();
    if (position >= args.positions) return;
    const int line = divide(position, args.by_w), d = divide(line, args.by_h);
    const int h = line - d * static_cast<int>(args.by_h.divisor);
    const int w = position - line * static_cast<int>(args.by_w.divisor);
    const int plane = lane % 4 % kPlanes, out = first_out() + lane % 4 / kPlanes;
    Scalar* to = static_cast<Scalar*>(args.y) + n * args.y_strides.n + out * args.y_strides.c +
                 (static_cast<long long>(d) * C::kKernelD + plane / C::kKernelH) * args.y_strides.d +
                 (static_cast<long long>(h) * C::kKernelH + plane % C::kKernelH) * args.y_strides.h +
                 w * kTaps;
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j) {
      if (kColumnsAll % C::kColumns != 0 && out + j * kGroupOut >= C::kOut) break;
      Vector<Scalar, 4 * C::kSlabs> values;
#pragma unroll
      for (int e = 0; e < 4 * C::kSlabs; ++e) {
        values.at[e] = Narrow<Scalar>::from(C::Epilogue::apply(sums.at[e / 4][4 * j + e % 4]));
      }
      store_vector(to, values);
      to += kGroupOut * args.y_strides.c;
    }
  }

  __device__ __forceinline__ void consume() const {
    const int who = warp / 4 - 1;
    Sums sums;
    Ring stage;
    unsigned parity = who == 0 ? 1 : 0;  // the first tile is the first consumer's at once
    if (who == 1) skip_tile(stage);
#pragma unroll 1
    for (int tile = split + who * args.splits; tile < args.tiles; tile += kConsumers * args.splits) {
#pragma unroll
      for (int i = 0; i < C::kSlabs * kSums; ++i) {
        float& sum = sums.at[i / kSums][i % kSums];
        sum = bias[i % kSums / 4 * kGroupOut + lane % 4 / kPlanes];
        ptx::pin(sum);
      }
      ptx::barrier_wait(turn(who), parity);
      parity ^= 1u;
      multiply(sums, stage, who);
#pragma unroll
      for (int i = 0; i < C::kSlabs * kSums; ++i) ptx::pin(sums.at[i / kSums][i % kSums]);
      store(sums, tile);
      __syncwarp();
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
    kernel.load_weights();
    kernel.consume();
  }
}

}  // namespace tconv3d
