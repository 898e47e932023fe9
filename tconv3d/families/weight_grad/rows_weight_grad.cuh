// The weight gradient of channels-last 16-bit tensors on Hopper's tensor cores (sm_90a):
//   dw[t][ci][co] = sum over n, i of  x[n][i][ci] * dy[n][stride*(i + shift(t)) + phase(t)][co]
//
// With the positions i as K this is a matrix product for every tap. A position's channels are a row of shared
// memory for both operands, and the tensor cores take rows as K ("transposed" operands), so tensors go from
// memory to the tensor cores as they are. dy is stored in one plane for each phase along w, so that the rows
// that neighbouring positions read are neighbours, and a tap's shift moves an operand by whole rows.
//
// A block owns 64 channels of the operand with the rows of the product (kRowsAreInput: x), kColumns channels
// of the other, and a set of taps that read the same planes of dy along d. It
// loops over its part of the volume in boxes of kBoxH x kBoxW positions of one plane:
//
//   producers, for each box:  copy its rows of x, and the rows of dy that the taps reach, to the next stage
//   consumers, for each box:  for 16 positions, for each of their taps:  sums[tap] += x (x) dy[shifted]
//
// Sixteen positions are 8 neighbours of two lines (or, where a box has an odd number of lines, 16
// neighbours). Partial sums of the parts are added by reduce.cuh in a fixed order. Rows outside the tensors
// are zero.
//
// The gradient of the bias (kBias) is one more product: own taps together reach every output once, so their
// rows of dy, multiplied with ones instead of x, add up to it.
#pragma once

#include "cursor.cuh"
#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

template <class C>
struct RowsWeightGrad {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;

  static constexpr int kRowBytes = 128, kRowChannels = 64, kPiece = 8;  // channels of 16 bytes
  static constexpr int kProducers = 128 * C::kProducers, kConsumerWarps = 4 * C::kConsumers;
  static constexpr int kBoxRows = C::kBoxH * C::kBoxW;
  static constexpr int kPlaneRows = C::kLinesY * C::kPitchY;  // rows of dy of one phase along w
  static constexpr int kRowsY = C::kPhasesW * kPlaneRows;
  static constexpr int kBytesX = kBoxRows * kRowBytes;
  static constexpr int kStageBytes = (kBytesX + kRowsY * kRowBytes + 1023) / 1024 * 1024;
  static constexpr int kSums = C::kColumns / 2;
  // Sums of the bias gradient: as many columns as the product has if dy is its columns, else a few.
  static constexpr int kBiasColumns = C::kRowsAreInput ? C::kColumns : 8, kBiasSums = kBiasColumns / 2;
  static constexpr int kOnesBytes = C::kBias ? 16 * kRowBytes : 0;  // 16 rows of ones
  static constexpr bool kPairsOfLines = C::kBoxH % 2 == 0;
  static_assert(C::kBoxW % (kPairsOfLines ? 8 : 16) == 0, "a box is a whole number of 16 positions");
  // Channels that a block has of x and of dy.
  static constexpr int kChannelsX = C::kRowsAreInput ? kRowChannels : C::kColumns;
  static constexpr int kChannelsY = C::kRowsAreInput ? C::kColumns : kRowChannels;

  // What a block computes, and its part of the volume.
  struct Block {
    int set, group, first_x, first_y, split;  // set of taps; first channels of x and dy within the group
    int begin, end;                           // boxes of the part

    static __device__ __forceinline__ Block make(const Args& args) {
      constexpr int kTilesX = (C::kInPerGroup + kChannelsX - 1) / kChannelsX;
      constexpr int kTilesY = (C::kOutPerGroup + kChannelsY - 1) / kChannelsY;
      constexpr int kKinds = C::kSets * kTilesX * kTilesY * C::kGroups;
      Block own;
      own.split = static_cast<int>(blockIdx.x) / kKinds;
      int kind = static_cast<int>(blockIdx.x) % kKinds;
      own.set = kind % C::kSets;
      kind /= C::kSets;
      own.first_y = kind % kTilesY * kChannelsY;
      kind /= kTilesY;
      own.first_x = kind % kTilesX * kChannelsX;
      own.group = kind / kTilesX;
      const Part<int> part(args.boxes, args.splits, own.split);
      own.begin = part.begin;
      own.end = part.end;
      return own;
    }
  };

  // A box: its batch item and first position, and the plane of dy that its taps read.
  struct Box {
    int n, d, h, w, plane;
    bool exists;  // whether the plane of dy exists; a box without one is skipped

    static __device__ __forceinline__ Box make(const Args& args, int set, int index) {
      Box box;
      const int line = divide(index, args.by_w), plane = divide(line, args.by_h);
      box.w = (index - line * static_cast<int>(args.by_w.divisor)) * C::kBoxW;
      box.h = (line - plane * static_cast<int>(args.by_h.divisor)) * C::kBoxH;
      box.n = divide(plane, args.by_d);
      box.d = plane - box.n * args.x_size.d;
      box.plane = (box.d + C::kShiftD(set)) * C::kStrideD + C::kPhaseD(set);
      box.exists = box.plane >= 0 && box.plane < args.dy_size.d;
      return box;
    }
  };

  static __device__ __forceinline__ unsigned swizzled(unsigned address) {
    return address ^ ((address >> 7 & 7u) << 4);
  }

  unsigned base;  // address of the first stage

  __device__ __forceinline__ unsigned stage(int i) const {
    return base + static_cast<unsigned>(i) * kStageBytes;
  }
  __device__ __forceinline__ unsigned ones() const { return base + C::kStages * kStageBytes; }
  __device__ __forceinline__ unsigned full(int i) const {
    return ones() + kOnesBytes + 8u * static_cast<unsigned>(i);
  }
  __device__ __forceinline__ unsigned empty(int i) const { return full(C::kStages + i); }

  __device__ __forceinline__ void start_barriers() const {
    for (int i = 0; i < C::kStages; ++i) {
      ptx::barrier_init(full(i), kProducers);
      ptx::barrier_init(empty(i), kConsumerWarps);
    }
    ptx::fence_barrier_init();
  }

  // Writes the rows of ones, two in a word, that the bias gradient multiplies with.
  static __device__ __forceinline__ void write_ones() {
    const unsigned one = OperandOf<Scalar>::bits(Narrow<Scalar>::from(1.0f));
    unsigned* const words = dynamic_shared<unsigned>() + C::kStages * kStageBytes / 4;
    for (int i = static_cast<int>(threadIdx.x); i < kOnesBytes / 4; i += C::kThreads)
      words[i] = one | one << 16;
    ptx::fence_async_proxy();
  }

  // Copies the kCount rows of a line to address `to` on. A lane has one piece of 16 bytes of every kRows-th
  // row: `from` is the first of them, `step` bytes before the next, at column w; the next is step_w columns
  // further. Rows outside of `end` columns become zero.
  template <int kPieces, int kCount>
  static __device__ __forceinline__ void copy_line(const char* from, long long step, int w, int step_w,
                                                   int end, unsigned to, int lane) {
    constexpr int kRows = 32 / kPieces;
    const int row = lane / kPieces, piece = lane % kPieces;
    if (row >= kRows) return;
    unsigned at = to + static_cast<unsigned>(row * kRowBytes + 16 * piece);
#pragma unroll
    for (int i = 0; i < kCount; i += kRows) {
      if (i + kRows <= kCount || i + row < kCount) {
        ptx::copy_piece(swizzled(at), from, static_cast<unsigned>(w) < static_cast<unsigned>(end));
      }
      at += kRows * kRowBytes;
      from += step;
      w += step_w;
    }
  }
  // Copies line `line` of the box of x.
  static __device__ __forceinline__ void copy_x(const Args& args, const Block& own, const Box& box, int line,
                                                unsigned to, int lane) {
    constexpr int kPieces = kChannelsX / kPiece, kRows = 32 / kPieces;
    const int h = box.h + line, w = box.w + lane / kPieces;
    const int channel = own.first_x + lane % kPieces * kPiece;
    const Index stride = static_cast<Index>(args.x_strides.w);
    const Scalar* x =
        static_cast<const Scalar*>(args.x) +
        (box.n * args.x_strides.n + box.d * args.x_strides.d +
         (h * static_cast<Index>(args.x_strides.h) + w * stride + (own.group * C::kInPerGroup + channel)));
    const bool exists = h < args.x_size.h && channel < C::kInPerGroup;
    copy_line<kPieces, C::kBoxW>(reinterpret_cast<const char*>(x), 2LL * kRows * stride, w, kRows,
                                 exists ? args.x_size.w : 0,
                                 to + static_cast<unsigned>(line * C::kBoxW * kRowBytes), lane);
  }
  // Copies the rows of line `line` and of one phase along w that the set's taps reach.
  static __device__ __forceinline__ void copy_y(const Args& args, const Block& own, const Box& box, int line,
                                                int which, unsigned to, int lane) {
    constexpr int kPieces = kChannelsY / kPiece, kRows = 32 / kPieces;
    const int h = box.h * C::kStrideH + C::kLineH(own.set, line);
    const int w = (box.w + C::kOriginW + lane / kPieces) * C::kStrideW + C::kPhaseW(which);
    const int channel = own.first_y + lane % kPieces * kPiece;
    const Index stride = static_cast<Index>(args.dy_strides.w);
    const Scalar* dy =
        static_cast<const Scalar*>(args.dy) +
        (box.n * args.dy_strides.n + box.plane * args.dy_strides.d +
         (h * static_cast<Index>(args.dy_strides.h) + w * stride + (own.group * C::kOutPerGroup + channel)));
    const bool exists = h >= 0 && h < args.dy_size.h && channel < C::kOutPerGroup;
    copy_line<kPieces, C::kPitchY>(
        reinterpret_cast<const char*>(dy), 2LL * kRows * C::kStrideW * stride, w, kRows * C::kStrideW,
        exists ? args.dy_size.w : 0,
        to + static_cast<unsigned>((which * kPlaneRows + line * C::kPitchY) * kRowBytes), lane);
  }
  // The lines of a box are shared out among the producers' warps.
  static __device__ __forceinline__ void copy(const Args& args, const Block& own, const Box& box, unsigned to,
                                              int warp, int lane) {
    const int jobs = C::kBoxH + C::kLineCount(own.set) * C::kPhasesW;
    for (int job = warp; job < jobs; job += kProducers / 32) {
      if (job < C::kBoxH) {
        copy_x(args, own, box, job, to, lane);
      } else {
        const int line = (job - C::kBoxH) / C::kPhasesW, which = (job - C::kBoxH) % C::kPhasesW;
        copy_y(args, own, box, line, which, to + kBytesX, lane);
      }
    }
  }

  // The copies of kAhead boxes are in flight while earlier boxes are handed to the consumers: a thread's
  // copies must be complete, and visible to the tensor cores, before it arrives. Consumers release a box when
  // they have the next one, so two stages are theirs.
  __device__ __forceinline__ void produce(const Args& args, int warp, int lane) const {
    constexpr int kAhead = C::kStages - 2;
    const Block own = Block::make(args);
    Ring next, handed;
    int waiting = 0;  // boxes that are copied and not handed over
    for (int i = own.begin; i < own.end; ++i) {
      const Box box = Box::make(args, own.set, i);
      if (!box.exists) continue;
      ptx::barrier_wait(empty(next.index), next.parity ^ 1u);
      copy(args, own, box, stage(next.index), warp, lane);
      ptx::copy_commit();
      next.advance(C::kStages);
      if (++waiting > kAhead) {
        ptx::copy_wait<kAhead>();
        ptx::fence_async_proxy();
        ptx::barrier_arrive(full(handed.index));
        handed.advance(C::kStages);
        --waiting;
      }
    }
    ptx::copy_wait<0>();
    ptx::fence_async_proxy();
    for (; waiting > 0; --waiting) {
      ptx::barrier_arrive(full(handed.index));
      handed.advance(C::kStages);
    }
  }

  // Whether a consumer of any set has exactly kOwn taps, of which the first kOnes count for the bias.
  template <int kOwn, int kOnes>
  static constexpr bool some_consumer_has() {
    for (int set = 0; set < C::kSets; ++set) {
      for (int consumer = 0; consumer < C::kConsumers; ++consumer) {
        if (C::kTapCount(set, consumer) == kOwn && C::kOnesCount(set, consumer) == kOnes) return true;
      }
    }
    return false;
  }

  // The numbers of taps are compile-time constants in the loop over boxes: a branch around a matrix
  // instruction may make the compiler copy sums between instructions, and then it serializes them.
  __device__ __forceinline__ void consume(const Args& args, int consumer, int warp, int lane) const {
    const Block own = Block::make(args);
    const int taps = C::kTapCount(own.set, consumer), ones = C::kOnesCount(own.set, consumer);
    static_for<C::kTaps + 1>([&](auto count) {
      static_for<decltype(count)::value + 1>([&](auto of_ones) {
        constexpr int kOwn = decltype(count)::value, kOnes = decltype(of_ones)::value;
        if constexpr (some_consumer_has<kOwn, kOnes>()) {
          if (taps == kOwn && ones == kOnes) consume_taps<kOwn, kOnes>(args, own, consumer, warp, lane);
        }
      });
    });
  }
  template <int kOwn, int kOnes>
  __device__ __forceinline__ void consume_taps(const Args& args, const Block& own, int consumer, int warp,
                                               int lane) const {
    constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
    constexpr int kArray = kOwn > 0 ? kOwn : 1;  // a consumer without taps only releases the stages
    float sums[kArray][kSums];
#pragma unroll
    for (int t = 0; t < kArray; ++t) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[t][i] = 0.0f;
    }
    float bias[kBiasSums];
#pragma unroll
    for (int i = 0; i < kBiasSums; ++i) bias[i] = 0.0f;
    unsigned shift[kArray];  // bytes from the start of dy in a stage to the first row that a tap reads
#pragma unroll
    for (int t = 0; t < kOwn; ++t) {
      shift[t] = static_cast<unsigned>(C::kTapRow(own.set, consumer * C::kTaps + t) * kRowBytes);
    }
    Ring now;
    int before = -1;  // the stage whose products may still be running
#pragma unroll 1  // an unrolled loop would copy sums between products, and the compiler would serialize them
    for (int i = own.begin; i < own.end; ++i) {
      if (!Box::make(args, own.set, i).exists) continue;
      ptx::barrier_wait(full(now.index), now.parity);
      multiply<kOperand, kOwn, kOnes>(sums, bias, shift, stage(now.index), ones());
      ptx::matrix_wait<1>();
      release(before, lane);
      before = now.index;
      now.advance(C::kStages);
    }
    ptx::matrix_wait<0>();
    release(before, lane);
#pragma unroll
    for (int t = 0; t < kOwn; ++t) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) ptx::pin(sums[t][k]);
    }
    if constexpr (C::kBias) {
#pragma unroll
      for (int k = 0; k < kBiasSums; ++k) ptx::pin(bias[k]);
      store_bias(args, own, consumer, bias, warp, lane);
    }
    static_for<kOwn>([&](auto t) {
      store(args, own, C::kTapIndex(own.set, consumer * C::kTaps + t), sums[t], warp, lane);
    });
  }
  __device__ __forceinline__ void release(int before, int lane) const {
    __syncwarp();
    if (before >= 0 && lane == 0) ptx::barrier_arrive(empty(before));
  }

  template <ptx::Operand kOperand, int kOwn, int kOnes, int kArray>
  static __device__ __forceinline__ void multiply(float (&sums)[kArray][kSums], float (&bias)[kBiasSums],
                                                  const unsigned (&shift)[kArray], unsigned x,
                                                  unsigned ones) {
    constexpr unsigned kGroupX = (kPairsOfLines ? C::kBoxW : 8) * kRowBytes;
    constexpr unsigned kGroupY = (kPairsOfLines ? C::kPitchY : 8) * kRowBytes;
    constexpr int kLines = kPairsOfLines ? 2 : 1, kNeighbours = kPairsOfLines ? 8 : 16;
    ptx::matrix_fence();
#pragma unroll
    for (int h = 0; h < C::kBoxH; h += kLines) {
#pragma unroll
      for (int w = 0; w < C::kBoxW; w += kNeighbours) {
        const unsigned long long rows_x =
            ptx::matrix_descriptor<kRowBytes>(x + (h * C::kBoxW + w) * kRowBytes, kGroupX);
        const unsigned y = x + kBytesX + (h * C::kPitchY + w) * kRowBytes;
        static_for<kOwn>([&](auto t) {
          const unsigned long long rows_y = ptx::matrix_descriptor<kRowBytes>(y + shift[t], kGroupY);
          using Multiply = ptx::MatrixMultiply<C::kColumns>;
          if constexpr (C::kRowsAreInput) {
            Multiply::template issue_rows<kOperand>(sums[t], rows_x, rows_y);
          } else {
            Multiply::template issue_rows<kOperand>(sums[t], rows_y, rows_x);
          }
        });
        static_for<kOnes>([&](auto t) {
          const unsigned long long rows_y = ptx::matrix_descriptor<kRowBytes>(y + shift[t], kGroupY);
          const unsigned long long rows_of_ones = ptx::matrix_descriptor<kRowBytes>(ones, 8 * kRowBytes);
          using Multiply = ptx::MatrixMultiply<kBiasColumns>;
          if constexpr (C::kRowsAreInput) {
            Multiply::template issue_rows<kOperand>(bias, rows_of_ones, rows_y);
          } else {
            Multiply::template issue_rows<kOperand>(bias, rows_y, rows_of_ones);
          }
        });
      }
    }
    ptx::matrix_commit();
  }

  // Stores a consumer's sums of the bias to their part, [splits][sets][consumers][channels of dy]. Blocks
  // with other channels of x have the same sums.
  static __device__ __forceinline__ void store_bias(const Args& args, const Block& own, int consumer,
                                                    const float (&bias)[kBiasSums], int warp, int lane) {
    if (own.first_x != 0) return;
    const long long index =
        (static_cast<long long>(own.split) * C::kSets + own.set) * C::kConsumers + consumer;
    float* const part = static_cast<float*>(args.bias_parts) + index * (C::kGroups * C::kOutPerGroup) +
                        own.group * C::kOutPerGroup;
    if constexpr (C::kRowsAreInput) {  // all rows of the product are the same
      if (warp != 0 || lane >= 4) return;
#pragma unroll
      for (int i = 0; i < kBiasSums; ++i) {
        const int channel = own.first_y + i / 4 * 8 + 2 * lane + i % 2;
        if (i % 4 < 2 && channel < C::kOutPerGroup) part[channel] = bias[i];
      }
    } else {  // all columns are the same
      if (lane % 4 != 0) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = own.first_y + 16 * warp + 8 * half + lane / 4;
        if (channel < C::kOutPerGroup) part[channel] = bias[2 * half];
      }
    }
  }

  // Stores the sums of a tap to its part, [taps][channels of the product's rows][channels of its columns].
  static __device__ __forceinline__ void store(const Args& args, const Block& own, int tap,
                                               const float (&sums)[kSums], int warp, int lane) {
    constexpr int kRowsAll = C::kRowsAreInput ? C::kGroups * C::kInPerGroup : C::kOutPerGroup;
    constexpr int kRowsEach = C::kRowsAreInput ? C::kInPerGroup : C::kOutPerGroup;
    constexpr int kColumnsAll = C::kRowsAreInput ? C::kOutPerGroup : C::kInPerGroup;
    const int first_row = C::kRowsAreInput ? own.first_x : own.first_y;
    const int first_column = C::kRowsAreInput ? own.first_y : own.first_x;
    float* const part =
        static_cast<float*>(args.parts) + (static_cast<long long>(own.split) * C::kTapsAll + tap) *
                                              (static_cast<long long>(kRowsAll) * kColumnsAll);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * warp + 8 * half + lane / 4;
      float* const to = part + static_cast<long long>(own.group * kRowsEach + row) * kColumnsAll;
#pragma unroll
      for (int k = 0; k < C::kColumns / 8; ++k) {
        const int column = first_column + 8 * k + 2 * (lane % 4);
        if (row < kRowsEach && column < kColumnsAll) {
          *reinterpret_cast<float2*>(to + column) = {sums[4 * k + 2 * half], sums[4 * k + 2 * half + 1]};
        }
      }
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = RowsWeightGrad<Config>;
  const Kernel kernel{ptx::shared_address(dynamic_shared<unsigned char>())};
  const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) kernel.start_barriers();
  if constexpr (Config::kBias) Kernel::write_ones();
  __syncthreads();
  if (threadIdx.x < Kernel::kProducers) {
    ptx::keep_registers<Config::kProducerRegisters>();
    kernel.produce(args, warp, lane);
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    kernel.consume(args, warp / 4 - Config::kProducers, warp % 4, lane);
  }
}

}  // namespace tconv3d
