// The block of the two kernels that compute all gradients of an up-convolution (up_backward.cuh for
// contiguous tensors, up_backward_last.cuh for channels-last ones): the roles of its warpgroups, its
// barriers, the layout of matrix operands in shared memory, and the loops over tiles and chunks of both
// products. A kernel, which derives from it, says how tensors are copied, how a lane loads operands out of
// them, and how sums are stored.
#pragma once

#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

// Shared-memory layout of the weights and of x: a group is 8 input channels with one block of K each, 8
// swizzled vectors of 16 bytes.
template <class C>
struct UpBackwardGroups {
  using Scalar = typename C::Scalar;

  static constexpr int kBlockWords = 32;  // words of K in a swizzled 128-byte row
  static constexpr int kGroupsOfBlock = C::kColumns / 8;
  static constexpr int kPerWord = 4 / sizeof(Scalar);

  static __device__ __forceinline__ unsigned* group_at(unsigned char* operand, int block, int group) {
    return reinterpret_cast<unsigned*>(operand) + (block * kGroupsOfBlock + group) * 8 * kBlockWords;
  }
  static __device__ __forceinline__ unsigned* vector_at(unsigned* group, int row, int vector) {
    return group + row * kBlockWords + (vector ^ row) * 4;
  }

  // A warp copies one block of K, from word `first` on, of the weights of 8 input channels, from `channel`
  // on, with cp.async and in memory layout. The weight of an input channel has kWordsAll words.
  template <int kWordsAll>
  static __device__ __forceinline__ void copy(unsigned* group, const void* weight, int channel, int first,
                                              int lane) {
    constexpr int kPart = kWordsAll % 4 == 0 ? 4 : kWordsAll % 2 == 0 ? 2 : 1;  // words per copy
    // A weight may be a view into a flat buffer of parameters and have any alignment.
    const bool aligned = reinterpret_cast<unsigned long long>(weight) % (4 * kPart) == 0;
#pragma unroll
    for (int i = 0; i < 8 / kPart; ++i) {
      const int row = lane / 8 + i % 2 * 4, part = i / 2 * kPart;
      const int in = channel + row, word = first + lane % 8 * 4 + part;
      const bool inside = in < C::kIn && word < kWordsAll;
      const Scalar* const from = static_cast<const Scalar*>(weight) +
                                 (inside ? (in * static_cast<long long>(kWordsAll) + word) * kPerWord : 0);
      unsigned* const to = vector_at(group, row, lane % 8) + part;
      if (aligned) {
        ptx::copy_words_once<kPart>(to, from, inside);
      } else {
#pragma unroll
        for (int e = 0; e < kPart; ++e) {
          unsigned bits = raw(from[e * kPerWord]);
          if (kPerWord == 2) bits |= raw(from[e * kPerWord + 1]) << 16;
          to[e] = inside ? bits : 0u;
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ unsigned raw(Scalar value) {
    if constexpr (kPerWord == 1) {
      return ptx::float_to_bits(value);
    } else {
      return value.bits;
    }
  }
};

// A kernel has these constants, and the functions that are called by way of kernel() and Kernel:
//   kWeightWords, kWordsAll   words of an input channel's weights: those that the block owns, and all
//   kSetBlocks                blocks of K of the weights that are reordered together
//   kStageBytes, kStageXBytes, kTableBytes   bytes of a stage of dy, of a stage of x, and of all tables
//   kBarriersX                barriers of a stage of x
//   kInputSlabs, kBatches     input gradient: slabs of 64 positions of a tile, batches of a chunk
//   kPrefetched               input gradient: whether registers suffice to load a batch ahead
//   kRowSlabs, kSteps         weight gradient: slabs of 64 rows of a chunk, K steps of all slabs together
//   kBiasSlabs                weight gradient: slabs whose sums for the bias are kept apart
template <class C, class Arguments, class Kernel>
struct UpBackwardBlock {
  using Scalar = typename C::Scalar;
  using Groups = UpBackwardGroups<C>;

  static constexpr int kItem = sizeof(Scalar), kPerWord = 4 / kItem;
  static constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
  static constexpr bool kRounded = kOperand == ptx::Operand::kTf32;
  static constexpr int kBlockWords = Groups::kBlockWords, kGroupsOfBlock = Groups::kGroupsOfBlock;
  static constexpr int kStepBytes = 32;
  static constexpr int kSums = C::kColumns / 2;
  static constexpr int kInTiles = (C::kIn + C::kColumns - 1) / C::kColumns;
  static constexpr int kKinds = kInTiles * C::kRanges;
  static constexpr int kConsumers = C::kThreads - 128, kConsumerWarps = kConsumers / 32;
  static constexpr int kSharers = 2;  // warpgroups that share the weight gradient

  static_assert(C::kThreads == 512 && C::kColumns % 8 == 0 && C::kStages >= 3 && C::kStagesX >= 2);

  const Arguments& args;
  int split, range, first_in;
  int warp, lane;
  unsigned char* stages_x;
  unsigned char* weights;
  unsigned* stages;
  unsigned char* tables;  // tables of the kernel
  unsigned barriers;

  __device__ __forceinline__ UpBackwardBlock(const Arguments& arguments)
      : args(arguments),
        split(static_cast<int>(blockIdx.x) / kKinds),
        range(static_cast<int>(blockIdx.x) % kKinds / kInTiles),
        first_in(static_cast<int>(blockIdx.x) % kInTiles * C::kColumns),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {
    weights = dynamic_shared<unsigned char>();
    stages_x = weights + 4 * Kernel::kWeightWords * C::kColumns;
    stages = reinterpret_cast<unsigned*>(stages_x + C::kStagesX * Kernel::kStageXBytes);
    tables = reinterpret_cast<unsigned char*>(stages + C::kStages * (Kernel::kStageBytes / 4));
    barriers = ptx::shared_address(tables + Kernel::kTableBytes);
  }

  __device__ __forceinline__ const Kernel& kernel() const { return static_cast<const Kernel&>(*this); }

  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 8 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + 8 * (C::kStages + stage); }
  // Barriers of a stage of x by `which`: 0 the stage has arrived, 1 it is free, the others are steps of the
  // kernel's reordering.
  __device__ __forceinline__ unsigned barrier_x(int which, int stage) const {
    return barriers + 8 * (2 * C::kStages + which * C::kStagesX + stage);
  }
  __device__ __forceinline__ unsigned weights_there() const { return barrier_x(Kernel::kBarriersX, 0); }

  // Every lane arrives for itself: it is as fast as one arrival per warp, and race checkers understand it.
  __device__ __forceinline__ void release(int stage) const { ptx::barrier_arrive(empty(stage)); }
  static __device__ __forceinline__ void meet(unsigned barrier, unsigned parity) {
    ptx::barrier_arrive(barrier);
    ptx::barrier_wait(barrier, parity);
  }

  static __device__ __forceinline__ unsigned rounded(unsigned word) {
    return kRounded ? OperandOf<float>::bits(ptx::bits_to_float(word)) : word;
  }

  // One warpgroup copies, one computes the input gradient, and two share the weight gradient.
  __device__ __forceinline__ void take_roles() const {
    prepare();
    if (warp < 4) {
      ptx::keep_registers<C::kProducerRegisters>();
      kernel().produce();
      return;
    }
    load_weights();
    if (warp < 8) {
      if constexpr (C::kInputRegisters < 65536 / C::kThreads) {  // fewer than at launch
        ptx::keep_registers<C::kInputRegisters>();
      }
      input_grad();
    } else {
      ptx::claim_registers<C::kWeightRegisters>();
      if (warp < 12) {
        weight_grad<0>();
      } else {
        weight_grad<1>();
      }
    }
  }

  __device__ __forceinline__ void prepare() const {
    kernel().fill_tables();
    if (threadIdx.x == 0) {
      for (int i = 0; i < C::kStages; ++i) {
        ptx::barrier_init(full(i), 128);
        ptx::barrier_init(empty(i), 256);
      }
      for (int i = 0; i < C::kStagesX; ++i) {
        ptx::barrier_init(barrier_x(0, i), 128);
        for (int which = 1; which < Kernel::kBarriersX; ++which) {
          ptx::barrier_init(barrier_x(which, i), 128 * kSharers);
        }
      }
      ptx::barrier_init(weights_there(), kConsumers);
      ptx::fence_barrier_init();
    }
    __syncthreads();
  }

  // Called by all consumers while the first tile is in flight. The weight of an input channel is one
  // contiguous run. A warp copies sets of kSetBlocks blocks of K, and reorders them when they have arrived.
  __device__ __forceinline__ void load_weights() const {
    constexpr int kSetBlocks = Kernel::kSetBlocks;
    constexpr int kSets = Kernel::kWeightWords / (kSetBlocks * kBlockWords) * kGroupsOfBlock;
    for (int i = warp - 4; i < kSets; i += kConsumerWarps) {
#pragma unroll
      for (int block = 0; block < kSetBlocks; ++block) {
        copy_weights(i / kGroupsOfBlock * kSetBlocks + block, i % kGroupsOfBlock);
      }
    }
    ptx::copy_commit();
    ptx::copy_wait<0>();
    kernel().template order_all_weights<kSets>();
    ptx::fence_async_proxy();
    ptx::barrier_arrive(weights_there());
  }
  __device__ __forceinline__ void copy_weights(int block, int group) const {
    Groups::template copy<Kernel::kWordsAll>(Groups::group_at(weights, block, group), args.weight,
                                             first_in + group * 8,
                                             range * Kernel::kWeightWords + block * kBlockWords, lane);
  }

  // ---- The input gradient. A batch is the A operands of two products, made from two vectors of a lane.

  struct Loaded {
    Vector<unsigned, 4> first, second;
  };
  struct Batch {
    unsigned words[2][4];
  };

  // With two slabs of positions, the products of a batch are one K step of both; otherwise they are two K
  // steps of one.
  template <int kSlabs>
  __device__ __forceinline__ void multiply_chunk(float (&sums)[kSlabs][kSums], Batch (&batches)[2],
                                                 const Ring& stage, unsigned long long b) const {
    constexpr bool kTwo = kSlabs == 2;
    const unsigned* const from = kernel().positions_of(stages + stage.index * (Kernel::kStageBytes / 4));
    // The next batch is loaded while products run, unless registers are too few for it (kPrefetched).
    Loaded loaded = kernel().load_positions(from, 0);
    static_for<Kernel::kBatches>([&](auto i) {
      constexpr int kI = decltype(i)::value;
      constexpr bool kLast = kI == Kernel::kBatches - 1;
      Batch& batch = batches[kI % 2];
      ptx::matrix_wait<1>();
      if constexpr (!Kernel::kPrefetched && kI > 0) loaded = kernel().load_positions(from, kI);
      Kernel::arrange(batch, loaded);
      if constexpr (Kernel::kPrefetched && !kLast) loaded = kernel().load_positions(from, kI + 1);
      if constexpr (kLast) release(stage.index);
      ptx::matrix_fence();
      static_for<2>([&](auto k) {
        constexpr int kK = decltype(k)::value, kStep = kTwo ? kI : 2 * kI + kK;
        ptx::MatrixMultiply<C::kColumns>::template issue<kOperand>(
            sums[kTwo ? kK : 0], batch.words[kK],
            ptx::advance(b, kStep / 4 * (C::kColumns * 128) + kStep % 4 * kStepBytes));
      });
      ptx::matrix_commit();
    });
  }

  __device__ __forceinline__ void input_grad() const {
    constexpr int kAll = Kernel::kInputSlabs * kSums;
    float sums[Kernel::kInputSlabs][kSums];
    Batch batches[2];
    Ring stage;
    const unsigned long long b = ptx::matrix_descriptor<128>(ptx::shared_address(weights), 8 * 128);
    ptx::barrier_wait(weights_there(), 0);
    for (int tile = split; tile < args.tiles; tile += args.splits) {
#pragma unroll
      for (int i = 0; i < kAll; ++i) {
        sums[i / kSums][i % kSums] = 0.0f;
        ptx::pin(sums[i / kSums][i % kSums]);
      }
#pragma unroll 1
      for (int chunk = 0; chunk < C::kChunks; ++chunk) {
        ptx::barrier_wait(full(stage.index), stage.parity);
        multiply_chunk(sums, batches, stage,
                       ptx::advance(b, chunk * (4 * (Kernel::kWeightWords / C::kChunks) * C::kColumns)));
        stage.advance(C::kStages);
      }
      ptx::matrix_wait<0>();
#pragma unroll
      for (int i = 0; i < kAll; ++i) ptx::pin(sums[i / kSums][i % kSums]);
      kernel().store_positions(sums, tile);
      __syncwarp();
    }
  }

  // ---- The weight and bias gradients. Warpgroup kWho of the two takes every other chunk; a chunk has
  // kRowSlabs slabs of 64 rows of the product, and kSteps steps of K of all slabs together.

  template <int kWho>
  __device__ __forceinline__ void weight_grad() const {
    constexpr int kOwn = (C::kChunks - kWho + kSharers - 1) / kSharers, kSome = kOwn > 0 ? kOwn : 1;
    constexpr int kDepth = 3;  // operands in registers
    constexpr int kSlabs = Kernel::kRowSlabs, kSteps = Kernel::kSteps;
    float sums[kSome][kSlabs][kSums], bias[kSome][Kernel::kBiasSlabs][2];
    unsigned steps[kDepth][4];
#pragma unroll
    for (int m = 0; m < kSome; ++m) {
#pragma unroll
      for (int i = 0; i < 2 * Kernel::kBiasSlabs; ++i) bias[m][i / 2][i % 2] = 0.0f;
#pragma unroll
      for (int i = 0; i < kSlabs * kSums; ++i) sums[m][i / kSums][i % kSums] = 0.0f;
    }
    Ring stage, stage_x;
    const unsigned* const first = kernel().rows_of(stages);
#pragma unroll 1
    for (int tile = split; tile < args.tiles; tile += args.splits) {
      const unsigned long long b = ptx::matrix_descriptor<128>(
          ptx::shared_address(stages_x) + stage_x.index * Kernel::kStageXBytes, 8 * 128);
      kernel().order_x(stage_x);
      static_for<C::kChunks>([&](auto c) {
        constexpr int kChunk = decltype(c)::value, kM = kChunk / kSharers;
        if constexpr (kChunk % kSharers == kWho) {
          ptx::barrier_wait(full(stage.index), stage.parity);
          const unsigned* const from = first + stage.index * (Kernel::kStageBytes / 4);
          static_for<kSteps>([&](auto i) {
            constexpr int kI = decltype(i)::value, kK = kI / kSlabs, kSlab = kI % kSlabs;
            auto& step = steps[(kM * kSteps + kI) % kDepth];
            ptx::matrix_wait<kDepth - 1>();
            Kernel::template load_step<kK, kSlab>(step, bias[kM], from);
            if constexpr (kI == kSteps - 1) release(stage.index);
            ptx::matrix_fence();
            ptx::MatrixMultiply<C::kColumns>::template issue<kOperand>(
                sums[kM][kSlab], step, ptx::advance(b, kK / 4 * (C::kColumns * 128) + kK % 4 * kStepBytes));
            ptx::matrix_commit();
          });
        }
        stage.advance(C::kStages);
      });
      ptx::matrix_wait<0>();
      ptx::barrier_arrive(barrier_x(1, stage_x.index));
      stage_x.advance(C::kStagesX);
    }
    if constexpr (kOwn > 0) {
#pragma unroll
      for (int m = 0; m < kOwn; ++m) kernel().store_chunk(sums[m], bias[m], m * kSharers + kWho);
    }
  }
  // Adds up what the lanes of a quad have of a row's sum for the bias gradient.
  static __device__ __forceinline__ float sum_of_quad(float sum) {
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    return sum + __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  }
};

}  // namespace tconv3d
