// The tiles of group_backward.cuh, whose header comment explains the terms: the columns of positions that a
// block loops over, the stages of dy and x in shared memory, and the windows of dy that a lane loads. The
// producer and the warps of both gradients build on it.
#pragma once

#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

template <class C>
struct GroupTiles {
  using Scalar = typename C::Scalar;

  static constexpr int kItem = sizeof(Scalar);
  static constexpr int kWidth = 16;  // positions of a unit along w
  static constexpr int kTaps = C::kKernelD * C::kKernelH * C::kKernelW;
  static constexpr int kLines = C::kStrideH * (C::kRows - 1) + C::kDilationH * (C::kKernelH - 1) + 1;
  static constexpr int kWindow = C::kStrideW + C::kDilationW * (C::kKernelW - 1) + 1;
  static constexpr int kSlots = C::kMaxShiftD - C::kMinShiftD + 1;  // positions along d that a plane reaches
  static constexpr int kQuads = C::kOut > 4 ? 2 : 1;                // fours of output channels
  static constexpr int kConsumers = C::kInputWarps + C::kWeightWarps;
  static constexpr ptx::Operand kOperand = ptx::Operand::kTf32;
  static constexpr bool kLast = C::kLast, kWeightLast = C::kWeightLast;
  static constexpr bool kStrict = C::kHalves == 2;
  // Whether the copy engine copies the runs of contiguous tensors; else the producer's threads copy.
  static constexpr bool kBulk = C::kHopper && !kLast;
  // Elements in shared memory: the low halves of all weights, as lanes of the input gradient's warps take
  // them.
  static constexpr int kLowWeights = kStrict && C::kInputWarps > 0 ? 64 * kTaps : 0;
  static constexpr int kPieceX = C::kIn * kItem % 16 == 0 ? 16 : 8;  // bytes of a piece of x
  static constexpr int kPieces = C::kOut * kItem / 16,
                       kPiecesX = C::kIn * kItem / kPieceX;  // pieces of a cell
  static constexpr int kCell = (kPieces | 1) * 16 / kItem, kCellX = C::kIn;

  static_assert(!kLast || (C::kOut * kItem % 16 == 0 && C::kIn * kItem % 8 == 0), "whole pieces");
  static_assert(C::kSlices == 1 || (!kStrict && C::kIn == C::kInPerGroup), "slices of one group");
  static_assert(C::kIn <= 8 && C::kOut <= 8 && C::kThreads == 32 * (C::kProducers + kConsumers));

  struct Task {
    int n, h, begin, end;
  };
  // Where a warp is in the rings of dy and of x: at the stage that it copies or uses next. A warp of the
  // weight gradient uses the stages of x from `x`, that of the oldest position in use, up to `next_x`.
  struct Rings {
    Ring dy, x, next_x;
  };
  // Words of a line of dy as operands. In strict float32 they are high halves, and their low halves are
  // beside them.
  struct Window {
    unsigned high[kWindow];
    unsigned low[kStrict ? kWindow : 1];
  };

  const Args& args;
  int bundle, split, slice = 0;
  int warp, lane;
  unsigned char* stages;
  unsigned char* stages_x;
  unsigned barriers, low_weights;

  __device__ __forceinline__ GroupTiles(const Args& arguments)
      : args(arguments),
        bundle(static_cast<int>(blockIdx.x) % C::kBundles),
        split(static_cast<int>(blockIdx.x) / C::kBundles),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {
    constexpr int kBarriers = 16 * 2 * C::kMaxStages, kLowBytes = 4 * kLowWeights;
    barriers = ptx::shared_address(dynamic_shared<unsigned char>());
    low_weights = barriers + kBarriers;
    stages = dynamic_shared<unsigned char>() + kBarriers + kLowBytes;
    stages_x = stages + args.stages * stage_bytes();
  }

  // Returns the first output channel that the block computes now, and the place of one in its group.
  __device__ __forceinline__ int first_out() const { return (bundle * C::kSlices + slice) * C::kOut; }
  __device__ __forceinline__ int out_in_group(int out) const {
    return (slice * C::kOut + out) % C::kOutPerGroup;
  }

  // Returns the number of lines of dy that a tile needs.
  __device__ __forceinline__ int tile_lines() const {
    return kLines + C::kStrideH * C::kRows * (args.bands - 1);
  }
  __device__ __forceinline__ int stage_bytes() const {
    return kLast ? tile_lines() * C::kStrideW * args.pitch : C::kOut * args.pitch;
  }
  __device__ __forceinline__ int stage_x_bytes() const {
    return kLast ? args.bands * C::kRows * args.pitch_x : C::kIn * args.pitch_x;
  }
  __device__ __forceinline__ unsigned full(int stage) const { return barriers + 32 * stage; }
  __device__ __forceinline__ unsigned empty(int stage) const { return barriers + 32 * stage + 8; }
  __device__ __forceinline__ unsigned full_x(int stage) const { return barriers + 32 * stage + 16; }
  __device__ __forceinline__ unsigned empty_x(int stage) const { return barriers + 32 * stage + 24; }

  __device__ __forceinline__ void prepare() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < C::kMaxStages; ++i) {
        ptx::barrier_init(full(i), kBulk ? C::kOut : 32 * C::kProducers);
        ptx::barrier_init(empty(i), kConsumers);
        ptx::barrier_init(full_x(i), kBulk ? C::kIn : 32 * C::kProducers);
        ptx::barrier_init(empty_x(i), max(1, C::kWeightWarps));
      }
      if constexpr (C::kHopper) ptx::fence_barrier_init();
    }
    if constexpr (kLowWeights > 0) {
      for (int i = threadIdx.x; i < kLowWeights; i += C::kThreads) {
        reinterpret_cast<unsigned*>(stages)[i - kLowWeights] =
            low_operand(weight_at(i / 64, i / 2 % 32, i % 2));
      }
    }
    __syncthreads();
  }

  // Returns an element of the B operand of a tap, whose rows are co and whose columns are ci.
  __device__ __forceinline__ float weight_at(int tap, int of_lane, int quad) const {
    const int in = of_lane / 4, out = of_lane % 4 + 4 * quad;
    if (in >= C::kIn || out >= C::kOut || in / C::kInPerGroup != out / C::kOutPerGroup) return 0.0f;
    const int channel = (bundle * C::kIn + in) * C::kOutPerGroup;
    const int first =
        kWeightLast ? channel * kTaps + out_in_group(out) : (channel + out_in_group(out)) * kTaps;
    const Scalar* const from = static_cast<const Scalar*>(args.weight) + first;
    return widen<float>(load_constant(from + tap * (kWeightLast ? C::kOutPerGroup : 1)));
  }

  __device__ __forceinline__ Task task_at(int index) const {
    const int rest = divide(index, args.by_columns), n = divide(rest, args.by_segments);
    const int begin = (rest - n * static_cast<int>(args.by_segments.divisor)) * args.length;
    const int column = index - rest * static_cast<int>(args.by_columns.divisor);
    return Task{n, column * args.bands * C::kRows, begin, min(begin + args.length, args.size.d)};
  }

  // Whether a plane of dy exists and contributes to the column.
  template <int kPhase>
  __device__ __forceinline__ bool needed(const Task& task, int q) const {
    bool found = false;
    static_for<C::kKernelD>([&](auto t) {
      constexpr int kT = decltype(t)::value;
      if constexpr (C::kPhaseD(kT) == kPhase) {
        const int i = q - C::kShiftD(kT);
        found = found || (i >= task.begin && i < task.end);
      }
    });
    const int plane = C::kStrideD * q + kPhase;
    return found && plane >= 0 && plane < args.dy_size.d;
  }

  __device__ __forceinline__ int first_line(const Task& task) const {
    return C::kStrideH * task.h - C::kPaddingH;
  }
  __device__ __forceinline__ long long offset_of(const Strides& strides, int n, int c, int d, int h) const {
    return n * strides.n + c * strides.c + d * strides.d + h * strides.h;
  }
  // Distance of a run from the preceding multiple of 16 bytes, in bytes, equal in memory and in a stage.
  __device__ __forceinline__ int skipped(const Strides& strides, int n, int c, int d, int h) const {
    if (kLast) return 0;
    return static_cast<int>(static_cast<unsigned>(offset_of(strides, n, c, d, h)) * kItem & 15u);
  }

  // ---- Consumers.

  // Returns the operand of a value. 16-bit values are exact in TF32 and need no rounding. In strict float32
  // the high half is the value itself: tensor cores read its upper 19 bits.
  static __device__ __forceinline__ unsigned operand(float value) {
    return kItem == 4 && !kStrict ? OperandOf<float>::bits(value) : ptx::float_to_bits(value);
  }

  // Returns the rest of a value as its low half, in three instructions. It has the sign of the value, because
  // the high half is rounded towards zero, and is a unit of the value's last place larger. Twice this unit is
  // about what a sum of products otherwise lacks: the products of two low halves, the last bits of low
  // halves, which tensor cores ignore, and what they round off. Because a low half is neither zero nor of the
  // other sign, an infinite value times both halves of a number is infinite. The minimum replaces NaN, the
  // low half of an infinite value.
  static __device__ __forceinline__ float low_half(float value) {
    const float high = ptx::bits_to_float(ptx::float_to_bits(value) & 0xFFFFE000u);
    return fminf(fmaf(value, 1.0f + 0x1p-23f, -high), 0x1p118f);
  }
  // Rounds a low half to nearest: for values that are used more often than they are split.
  static __device__ __forceinline__ unsigned low_operand(float value) {
    return OperandOf<float>::bits(low_half(value));
  }

  // Adds the product of values in strict float32 to a sum of tensor cores: three TF32 products, small ones
  // first.
  static __device__ __forceinline__ void multiply_small(float (&sum)[4], const unsigned (&high_a)[4],
                                                        const unsigned (&low_a)[4],
                                                        const unsigned (&high_b)[2],
                                                        const unsigned (&low_b)[2]) {
    ptx::warp_multiply<kOperand>(sum, low_a, high_b);
    ptx::warp_multiply<kOperand>(sum, high_a, low_b);
  }
  static __device__ __forceinline__ void add(float (&sum)[4], const float (&part)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += part[i];
  }

  // Whether a tap of one of two adjacent positions reads this word of a window.
  static constexpr bool word_used(int word) {
    for (int t = 0; t < C::kKernelW; ++t) {
      if (word == t * C::kDilationW || word == C::kStrideW + t * C::kDilationW) return true;
    }
    return false;
  }
  static constexpr bool line_used(int line) {
    for (int r = 0; r < C::kRows; ++r) {
      for (int t = 0; t < C::kKernelH; ++t) {
        if (line == C::kStrideH * r + t * C::kDilationH) return true;
      }
    }
    return false;
  }

  // Distances in a stage of dy, in elements: line_step() from line to line, windows_apart() between the
  // windows of two positions, word_at() from the first word of a window to word kWord.
  __device__ __forceinline__ int line_step() const {
    return kLast ? C::kStrideW * args.pitch / kItem : args.dy_size.w;
  }
  static __device__ __forceinline__ int windows_apart(int positions) {
    return positions * (kLast ? kCell : C::kStrideW);
  }
  template <int kWord>
  __device__ __forceinline__ int word_at() const {
    if constexpr (kLast) return kWord % C::kStrideW * (args.pitch / kItem) + kWord / C::kStrideW * kCell;
    return kWord;
  }
  // First word of a position's window in a stage; before the stage if the word is outside dy.
  __device__ __forceinline__ const Scalar* window_at(int stage, const Task& task, int c, int plane, int line,
                                                     int position) const {
    const int from = max(first_line(task), 0);
    const int skip = skipped(args.dy_strides, task.n, first_out() + c, plane, from);
    const int first = windows_apart(position) - (kLast ? 0 : C::kPaddingW);
    const int at = ((line - from) * line_step() + first) * kItem;
    const int channel = c * (kLast ? kItem : args.pitch);
    return reinterpret_cast<const Scalar*>(stages + (stage * stage_bytes() + channel + skip + at));
  }

  // Loads a window; with kSum, also adds the two positions' own outputs to `sum`.
  template <bool kInside, bool kSum>
  __device__ __forceinline__ void load_window(Window& to, float& sum, const Scalar* from, int word,
                                              bool exists) const {
    static_for<kWindow>([&](auto j) {
      constexpr int kJ = decltype(j)::value;
      if constexpr (word_used(kJ)) {
        constexpr bool kSure = kInside && kJ >= C::kPaddingW && kJ < kWindow - C::kPaddingW;
        const bool inside = kSure || static_cast<unsigned>(word + kJ) < static_cast<unsigned>(args.dy_size.w);
        const float value = exists && inside ? widen<float>(from[word_at<kJ>()]) : 0.0f;
        to.high[kJ] = operand(value);
        if constexpr (kStrict) to.low[kJ] = ptx::float_to_bits(low_half(value));
        if constexpr (kSum && kJ >= C::kPaddingW && kJ < C::kPaddingW + 2 * C::kStrideW) sum += value;
      }
    });
  }

  // Calls begin(line) for the lines that a band uses in dy, and body(row, tap along h) for all that read it.
  template <bool kInside, class Begin, class Body>
  __device__ __forceinline__ void for_each_line(int first, Begin&& begin, Body&& body) const {
    static_for<kLines>([&](auto l) {
      constexpr int kLine = decltype(l)::value;
      if constexpr (line_used(kLine)) {
        if (!kInside && (first + kLine < 0 || first + kLine >= args.dy_size.h)) return;
        begin(l);
        static_for<C::kRows>([&](auto r) {
          static_for<C::kKernelH>([&](auto t) {
            constexpr int kR = decltype(r)::value, kT = decltype(t)::value;
            if constexpr (kLine == C::kStrideH * kR + C::kDilationH * kT) body(r, t);
          });
        });
      }
    });
  }

  // Whether `width` positions of a band's lines and all lines that they reach are inside the tensors
  // (kInside). Only words that padding can put outside need a check then.
  __device__ __forceinline__ bool is_inside(int h, int w, int width) const {
    const int line = C::kStrideH * h - C::kPaddingH;
    return line >= 0 && line + kLines <= args.dy_size.h && h + C::kRows <= args.size.h &&
           w + width <= args.size.w;
  }

  template <int kPhase, class Body>
  static __device__ __forceinline__ void for_each_tap(Body&& body) {
    static_for<C::kKernelD>([&](auto t) {
      constexpr int kT = decltype(t)::value;
      if constexpr (C::kPhaseD(kT) == kPhase) body(t);
    });
  }

  static __device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    if constexpr (C::kHopper) {
      ptx::barrier_wait(barrier, parity);
    } else {
      ptx::barrier_poll(barrier, parity);
    }
  }
  __device__ __forceinline__ void release(unsigned barrier) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(barrier);
  }

  // First line and first position of a unit: 16 positions (8 in the weight gradient) of kRows lines.
  struct Unit {
    int h, w;
  };
  __device__ __forceinline__ Unit unit_at(const Task& task, int index) const {
    const int band = divide(index, args.by_chunks), chunk = index - band * args.chunks;
    return Unit{task.h + band * C::kRows, chunk * kWidth};
  }

  // Synchronizes all warps of the block, whatever their role.
  static __device__ __forceinline__ void meet() { __syncthreads(); }
};

}  // namespace tconv3d
