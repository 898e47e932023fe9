// The gradients of a layer with small groups (at most 8 channels in and out) from one read of dy, on Hopper
// (sm_90; TF32, and 16-bit types, whose values TF32 represents exactly):
//   dx[ci][i]      = sum over co, t of  w[ci][co][t] * dy[co][stride*i + t*dilation - padding]
//   dw[ci][co][t]  = sum over i of      x[ci][i]     * dy[co][stride*i + t*dilation - padding]
//   db[co]         = sum of dy[co], if it is wanted and every output belongs to a position (kBias)
//
// With so few channels the time is that of moving dy: every element is read from global memory once, by few
// instructions, and from shared memory once for each gradient, for all its taps. A block owns a bundle of
// groups (at most 8 channels in and out; weights between groups are zero) and loops over columns: a tile of
// whole lines of positions, some of them along h, from one position to another along d.
//
//   producer       a warp (several with kLast). It copies the lines of dy that a plane of the tile needs, one
//                  bulk copy for each channel, to a stage of a ring, and those of x to another ring
//   input grad     warps with 16 positions of kRows lines each. Rows are positions, K is co, columns are ci.
//                  They hold all weights in registers, and accumulators for as many positions along d as a
//                  plane of dy contributes to
//   weight grad    warps that take 8 positions of kRows lines in turn. Rows are two taps along w and co, K is
//                  positions, columns are ci. Accumulators of all taps stay in registers until the end. These
//                  warps also sum the outputs that belong to the positions: db
//
// A plane of dy (output stride*q + phase along d) is used for all taps of its phase at once: tap t adds to dx
// at position q - shift(t), or is multiplied with x there. A lane loads a window of a line: all words that
// the taps of two adjacent positions reach, so that the lanes of a warp are two strides apart. Lines outside
// dy are skipped, words outside dy are zero.
//
// Runs may begin at any address: copies begin at the preceding multiple of 16 bytes. With a stride of 2 and
// an odd distance between channels, the windows of four channels begin in different banks.
//
// For channels-last tensors (kLast) the producers copy a bundle's part of every position, pieces of 16 bytes,
// with cp.async into a cell. In a line of dy, cells of one phase along w are consecutive, so that a word of a
// window is at a constant distance from the first one; cells of dy are an odd number of pieces apart, which
// avoids bank conflicts.
//
// Partial sums of dw and db are written side by side and added by reduce_gradients.cuh in a fixed order.
#pragma once

#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

template <class C>
struct GroupBackward {
  using Scalar = typename C::Scalar;

  static constexpr int kItem = sizeof(Scalar);
  static constexpr int kWidth = 16;  // positions of a unit along w
  static constexpr int kTaps = C::kKernelD * C::kKernelH * C::kKernelW;
  static constexpr int kLines = C::kStrideH * (C::kRows - 1) + C::kDilationH * (C::kKernelH - 1) + 1;
  static constexpr int kWindow = C::kStrideW + C::kDilationW * (C::kKernelW - 1) + 1;
  static constexpr int kSlots = C::kMaxShiftD - C::kMinShiftD + 1;  // positions along d that a plane reaches
  static constexpr int kHalves = C::kOut > 4 ? 2 : 1;               // halves of K that have channels
  static constexpr int kConsumers = C::kInputWarps + C::kWeightWarps;
  static constexpr ptx::Operand kOperand = ptx::Operand::kTf32;
  static constexpr bool kLast = C::kLast, kWeightLast = C::kWeightLast;
  static constexpr int kPieces = C::kOut * kItem / 16, kPiecesX = C::kIn * kItem / 16;  // pieces of a cell
  static constexpr int kCell = (kPieces | 1) * 16 / kItem, kCellX = C::kIn;

  static_assert(!kLast || (C::kOut * kItem % 16 == 0 && C::kIn * kItem % 16 == 0), "whole pieces");
  static_assert(C::kIn <= 8 && C::kOut <= 8 && C::kThreads == 32 * (C::kProducers + kConsumers));

  struct Task {
    int n, h, begin, end;
  };

  const Args& args;
  int bundle, split;
  int warp, lane;
  unsigned char* stages;
  unsigned char* stages_x;
  unsigned barriers;

  __device__ __forceinline__ GroupBackward(const Args& arguments)
      : args(arguments),
        bundle(static_cast<int>(blockIdx.x) % C::kBundles),
        split(static_cast<int>(blockIdx.x) / C::kBundles),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {
    constexpr int kBarriers = 16 * 2 * C::kMaxStages;
    barriers = ptx::shared_address(dynamic_shared<unsigned char>());
    stages = dynamic_shared<unsigned char>() + kBarriers;
    stages_x = stages + args.stages * stage_bytes();
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
        ptx::barrier_init(full(i), kLast ? 32 * C::kProducers : C::kOut);
        ptx::barrier_init(empty(i), kConsumers);
        ptx::barrier_init(full_x(i), kLast ? 32 * C::kProducers : C::kIn);
        ptx::barrier_init(empty_x(i), max(1, C::kWeightWarps));
      }
      ptx::fence_barrier_init();
    }
    __syncthreads();
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

  // ---- The producer.

  // Copies a run of a tensor by a bulk copy, extended to multiples of 16 bytes at both ends. The bulk copy
  // must not read past the tensor's last multiple of 16 bytes: the lane copies the elements beyond it itself.
  __device__ __forceinline__ void copy(unsigned char* to, const void* tensor, long long first, int count,
                                       long long all, unsigned barrier) const {
    const long long begin = first * kItem / 16 * 16, end = (first + count) * kItem;
    const long long last = min((end + 15) / 16 * 16, all * kItem / 16 * 16);
    for (long long at = max(last, first * kItem); at < end; at += kItem) {
      *reinterpret_cast<Scalar*>(to + (at - begin)) =
          *reinterpret_cast<const Scalar*>(static_cast<const unsigned char*>(tensor) + at);
    }
    const unsigned bytes = static_cast<unsigned>(max(last - begin, 0ll));
    ptx::barrier_arrive_expect(barrier, bytes);
    if (bytes > 0) {
      ptx::bulk_copy(ptx::shared_address(to), static_cast<const unsigned char*>(tensor) + begin, bytes,
                     barrier);
    }
  }

  // Copies a bundle's pieces of the positions of a line. to_of(position) returns the address of a cell.
  template <int kPieces, class To>
  __device__ __forceinline__ void copy_cells(const void* tensor, long long first, int width, long long step,
                                             To&& to_of) const {
    const int piece = lane % kPieces;
    const unsigned char* from = static_cast<const unsigned char*>(tensor) + first * kItem + 16 * piece;
    from += lane / kPieces * (step * kItem);
#pragma unroll 4
    for (int w = lane / kPieces; w < width; w += 32 / kPieces) {
      ptx::copy_words_of_line<4>(to_of(w) + 16 * piece, from, true);
      from += 32 / kPieces * (step * kItem);
    }
  }

  // Byte offset of the cell of a position within a line of dy in a stage.
  __device__ __forceinline__ int cell_at(int w) const {
    const int from_padding = w + C::kPaddingW;
    return from_padding % C::kStrideW * args.pitch + from_padding / C::kStrideW * (kCell * kItem);
  }

  __device__ __forceinline__ void copy_plane(const Task& task, int plane, int stage) const {
    const int first = first_line(task), from = max(first, 0);
    const int lines = min(first + kLines + C::kStrideH * C::kRows * (args.bands - 1), args.dy_size.h) - from;
    if constexpr (kLast) {
      for (int line = warp; line < lines; line += C::kProducers) {
        unsigned char* const to = stages + stage * stage_bytes() + line * (C::kStrideW * args.pitch);
        copy_cells<kPieces>(args.dy, offset_of(args.dy_strides, task.n, bundle * C::kOut, plane, from + line),
                            args.dy_size.w, args.dy_strides.w, [&](int w) { return to + cell_at(w); });
      }
      ptx::copy_arrive(full(stage));
    } else if (lane < C::kOut) {
      copy(stages + stage * stage_bytes() + lane * args.pitch, args.dy,
           offset_of(args.dy_strides, task.n, bundle * C::kOut + lane, plane, from),
           max(lines, 0) * args.dy_size.w, args.dy_count, full(stage));
    }
  }

  __device__ __forceinline__ void copy_x(const Task& task, int plane, int stage) const {
    const int lines = min(args.bands * C::kRows, args.size.h - task.h);
    if constexpr (kLast) {
      for (int line = warp; line < lines; line += C::kProducers) {
        unsigned char* const to = stages_x + stage * stage_x_bytes() + line * args.pitch_x;
        copy_cells<kPiecesX>(args.x, offset_of(args.x_strides, task.n, bundle * C::kIn, plane, task.h + line),
                             args.size.w, args.x_strides.w, [&](int w) { return to + w * (kCellX * kItem); });
      }
      ptx::copy_arrive(full_x(stage));
    } else if (lane < C::kIn) {
      copy(stages_x + stage * stage_x_bytes() + lane * args.pitch_x, args.x,
           offset_of(args.x_strides, task.n, bundle * C::kIn + lane, plane, task.h), lines * args.size.w,
           args.x_count, full_x(stage));
    }
  }

  __device__ __forceinline__ void produce() const {
    Ring stage, stage_x;
    for (int index = split; index < args.tasks; index += args.splits) {
      const Task task = task_at(index);
      for (int q = task.begin + C::kMinShiftD; q < task.end + C::kMaxShiftD; ++q) {
        if (C::kWeightWarps > 0 && q - C::kMinShiftD < task.end) {
          ptx::barrier_wait(empty_x(stage_x.index), stage_x.parity ^ 1u);
          copy_x(task, q - C::kMinShiftD, stage_x.index);
          stage_x.advance(args.stages_x);
        }
        static_for<C::kStrideD>([&](auto phase) {
          constexpr int kPhase = decltype(phase)::value;
          if (!needed<kPhase>(task, q)) return;
          ptx::barrier_wait(empty(stage.index), stage.parity ^ 1u);
          copy_plane(task, C::kStrideD * q + kPhase, stage.index);
          stage.advance(args.stages);
        });
      }
    }
  }

  // ---- Consumers.

  // 16-bit values are exact in TF32 and need no rounding.
  static __device__ __forceinline__ unsigned operand(float value) {
    return kItem == 4 ? OperandOf<float>::bits(value) : ptx::float_to_bits(value);
  }
  static __device__ __forceinline__ unsigned operand(Half value) { return operand(widen<float>(value)); }
  static __device__ __forceinline__ unsigned operand(BFloat16 value) { return operand(widen<float>(value)); }

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
    const int skip = skipped(args.dy_strides, task.n, bundle * C::kOut + c, plane, from);
    const int first = windows_apart(position) - (kLast ? 0 : C::kPaddingW);
    const int at = ((line - from) * line_step() + first) * kItem;
    const int channel = c * (kLast ? kItem : args.pitch);
    return reinterpret_cast<const Scalar*>(stages + (stage * stage_bytes() + channel + skip + at));
  }

  // Loads a window; with kSum, also adds the two positions' own outputs to `sum`.
  template <bool kInside, bool kSum>
  __device__ __forceinline__ void load_window(unsigned (&to)[kWindow], float& sum, const Scalar* from,
                                              int word, bool exists) const {
    static_for<kWindow>([&](auto j) {
      constexpr int kJ = decltype(j)::value;
      if constexpr (word_used(kJ)) {
        constexpr bool kSure = kInside && kJ >= C::kPaddingW && kJ < kWindow - C::kPaddingW;
        const bool inside = kSure || static_cast<unsigned>(word + kJ) < static_cast<unsigned>(args.dy_size.w);
        const float value = exists && inside ? widen<float>(from[word_at<kJ>()]) : 0.0f;
        to[kJ] = operand(value);
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

  __device__ __forceinline__ void release(unsigned barrier) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(barrier);
  }

  // ---- The input gradient.

  using InputSums = float[kSlots][C::kRows][4];

  // Loads the B operand of every tap: rows co, columns ci.
  __device__ __forceinline__ void load_weights(unsigned (&to)[kTaps][2]) const {
    const int in = lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int out = lane % 4 + 4 * half;
      const bool exists = in < C::kIn && out < C::kOut && in / C::kInPerGroup == out / C::kOutPerGroup;
      const int at =
          ((bundle * C::kIn + in) * C::kOutPerGroup + (kWeightLast ? 0 : out % C::kOutPerGroup)) * kTaps;
      const Scalar* const from =
          static_cast<const Scalar*>(args.weight) + (at + (kWeightLast ? out % C::kOutPerGroup : 0));
#pragma unroll
      for (int t = 0; t < kTaps; ++t) {
        to[t][half] = exists ? operand(load_constant(from + t * (kWeightLast ? C::kOutPerGroup : 1))) : 0u;
      }
    }
  }

  // First line and first position of a unit: 16 positions (8 in the weight gradient) of kRows lines.
  struct Unit {
    int h, w;
  };
  __device__ __forceinline__ Unit unit_at(const Task& task, int index) const {
    const int band = divide(index, args.by_chunks), chunk = index - band * args.chunks;
    return Unit{task.h + band * C::kRows, chunk * kWidth};
  }

  template <int kPhase, bool kInside>
  __device__ __forceinline__ void add_plane(InputSums& sums, const unsigned (&weights)[kTaps][2],
                                            const Task& task, const Unit& unit, int plane, int stage) const {
    const int first = C::kStrideH * unit.h - C::kPaddingH;
    const int word = C::kStrideW * (unit.w + lane / 4 * 2) - C::kPaddingW;
    const Scalar* from[kHalves];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      from[half] = window_at(stage, task, lane % 4 + 4 * half, plane, first, unit.w + lane / 4 * 2);
    }
    unsigned windows[2][kWindow];
    float unused;
    for_each_line<kInside>(
        first,
        [&](auto l) {
          constexpr int kLine = decltype(l)::value;
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            load_window<kInside, false>(windows[half], unused, from[half] + kLine * line_step(), word,
                                        C::kOut % 4 == 0 || lane % 4 + 4 * half < C::kOut);
          }
        },
        [&](auto r, auto t_h) {
          for_each_tap<kPhase>([&](auto t_d) {
            constexpr int kRow = decltype(r)::value, kD = decltype(t_d)::value;
            constexpr int kFirstTap = (kD * C::kKernelH + decltype(t_h)::value) * C::kKernelW;
            constexpr int kSlot = C::kMaxShiftD - C::kShiftD(kD);
            static_for<C::kKernelW>([&](auto t_w) {
              constexpr int kTap = decltype(t_w)::value;
              constexpr int kFirst = kTap * C::kDilationW, kSecond = kFirst + C::kStrideW;
              unsigned a[4] = {windows[0][kFirst], windows[0][kSecond], 0u, 0u};
              if constexpr (kHalves == 2) {
                a[2] = windows[1][kFirst];
                a[3] = windows[1][kSecond];
              }
              ptx::warp_multiply<kOperand>(sums[kSlot][kRow], a, weights[kFirstTap + kTap]);
            });
          });
        });
  }

  __device__ __forceinline__ void store_positions(const float (&sums)[C::kRows][4], const Task& task,
                                                  const Unit& unit, int d) const {
    const int w = unit.w + lane / 4 * 2;
    if (w >= args.size.w) return;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      const int h = unit.h + r;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if constexpr (kLast) {  // two channels of one position
          const int in = lane % 4 * 2;
          if (h >= args.size.h || in >= C::kIn || w + e >= args.size.w) continue;
          store_vector(static_cast<Scalar*>(args.dx) + (w + e) * args.dx_strides.w +
                           offset_of(args.dx_strides, task.n, bundle * C::kIn + in, d, h),
                       Vector<Scalar, 2>{Narrow<Scalar>::from(sums[r][2 * e]),
                                         Narrow<Scalar>::from(sums[r][2 * e + 1])});
          continue;
        }
        const int in = lane % 4 * 2 + e;
        if (h >= args.size.h || in >= C::kIn) continue;
        Scalar* const to = static_cast<Scalar*>(args.dx) + w +
                           offset_of(args.dx_strides, task.n, bundle * C::kIn + in, d, h);
        const Vector<Scalar, 2> both{Narrow<Scalar>::from(sums[r][e]), Narrow<Scalar>::from(sums[r][2 + e])};
        store_pair<false>(to, both, w + 1 < args.size.w);
      }
    }
  }

  __device__ __forceinline__ void input_grad(int index_of_unit) const {
    const bool exists = index_of_unit < args.bands * args.chunks;
    unsigned weights[kTaps][2];
    load_weights(weights);
    Ring stage;
    for (int index = split; index < args.tasks; index += args.splits) {
      const Task task = task_at(index);
      const Unit unit = unit_at(task, index_of_unit);
      const bool inside = is_inside(unit.h, unit.w, kWidth);
      InputSums sums = {};
      for (int q = task.begin + C::kMinShiftD; q < task.end + C::kMaxShiftD; ++q) {
        static_for<C::kStrideD>([&](auto phase) {
          constexpr int kPhase = decltype(phase)::value;
          if (!needed<kPhase>(task, q)) return;
          ptx::barrier_wait(full(stage.index), stage.parity);
          const int plane = C::kStrideD * q + kPhase;
          if (exists && inside) {
            add_plane<kPhase, true>(sums, weights, task, unit, plane, stage.index);
          } else if (exists) {
            add_plane<kPhase, false>(sums, weights, task, unit, plane, stage.index);
          }
          release(empty(stage.index));
          stage.advance(args.stages);
        });
        const int done = q - C::kMaxShiftD;
        if (exists && done >= task.begin) store_positions(sums[0], task, unit, done);
        static_for<kSlots>([&](auto s) {
          constexpr int kSlot = decltype(s)::value;
#pragma unroll
          for (int i = 0; i < 4 * C::kRows; ++i) {
            float& sum = sums[kSlot][i / 4][i % 4];
            if constexpr (kSlot + 1 < kSlots) {
              sum = sums[kSlot + 1][i / 4][i % 4];
            } else {
              sum = 0.0f;
            }
          }
        });
      }
    }
  }

  // ---- The weight gradient.

  // Matrix instructions have 16 rows, which are filled in the way that needs fewer products in a phase: two
  // taps along w times 8 output channels of dy, with input channels as columns; or (rows_are_x) two taps
  // along d times 8 input channels of x, with output channels as columns.
  static constexpr int taps_of(int phase) {
    int count = 0;
    for (int t = 0; t < C::kKernelD; ++t) count += C::kPhaseD(t) == phase;
    return count;
  }
  static constexpr int tap_of(int phase, int index) {  // -1 if there are fewer taps
    for (int t = 0; t < C::kKernelD; ++t) {
      if (C::kPhaseD(t) == phase && index-- == 0) return t;
    }
    return -1;
  }
  static constexpr int half_up(int count) { return (count + 1) / 2; }
  static constexpr bool rows_are_x(int phase) {
    return half_up(taps_of(phase)) * C::kKernelW < taps_of(phase) * half_up(C::kKernelW);
  }
  static constexpr int products_of(int phase) {
    const int taps = taps_of(phase);
    return C::kKernelH * (rows_are_x(phase) ? half_up(taps) * C::kKernelW : taps * half_up(C::kKernelW));
  }
  static constexpr int products_before(int phase) {
    int count = 0;
    for (int i = 0; i < phase; ++i) count += products_of(i);
    return count;
  }
  static constexpr int kProducts = products_before(C::kStrideD), kSums = 4 * kProducts;

  // The taps of a product's first and last 8 rows; -1 if these rows are unused.
  struct Product {
    bool rows_are_x;
    int d[2], h, w[2];
  };
  static constexpr Product product_at(int index) {
    int phase = 0;
    while (index >= products_before(phase + 1)) ++phase;
    index -= products_before(phase);
    const bool of_x = rows_are_x(phase);
    const int steps = of_x ? C::kKernelW : half_up(C::kKernelW), last = index % steps;
    const int h = index / steps % C::kKernelH, first = index / steps / C::kKernelH;
    if (of_x) return Product{true, {tap_of(phase, 2 * first), tap_of(phase, 2 * first + 1)}, h, {last, last}};
    const int second = 2 * last + 1 < C::kKernelW ? 2 * last + 1 : -1, d = tap_of(phase, first);
    return Product{false, {d, d}, h, {2 * last, second}};
  }

  using WeightSums = float[kProducts][4];
  // x of two adjacent positions, by tap of the phase and line. One extra tap at the end is zero.
  template <int kPhase>
  struct Positions {
    unsigned at[taps_of(kPhase) + 1][C::kRows][2];
  };

  // Addresses that a lane reads for a plane: its channel of dy, and x at the positions along d that the
  // phase's taps combine with the plane, each from the tile's first line and position on.
  template <int kPhase>
  struct Plane {
    const Scalar* dy;
    const Scalar* x[taps_of(kPhase) > 0 ? taps_of(kPhase) : 1];
    bool exists[taps_of(kPhase) > 0 ? taps_of(kPhase) : 1];
  };
  template <int kPhase>
  __device__ __forceinline__ Plane<kPhase> plane_at(const Task& task, int q, int stage,
                                                    const Ring& stage_x) const {
    Plane<kPhase> found;
    const int in = lane / 4, oldest = max(q - C::kMaxShiftD, task.begin);
    found.dy = window_at(stage, task, lane / 4, C::kStrideD * q + kPhase, first_line(task), lane % 4 * 2);
    static_for<taps_of(kPhase)>([&](auto i) {
      const int d = q - C::kShiftD(tap_of(kPhase, decltype(i)::value));
      // Stages of x are in order, starting from that of the oldest position in use.
      const int later = stage_x.index + d - oldest;
      const int stage_of_d = later - (later >= args.stages_x ? args.stages_x : 0);
      const int skip = skipped(args.x_strides, task.n, bundle * C::kIn + in, d, task.h);
      found.exists[i] = d >= task.begin && d < task.end && in < C::kIn;
      const int channel = in * (kLast ? kItem : args.pitch_x);
      found.x[i] =
          reinterpret_cast<const Scalar*>(stages_x + (stage_of_d * stage_x_bytes() + channel + skip)) +
          lane % 4 * 2 * kPositionX;
    });
    return found;
  }

  // load_positions() loads x for all taps of a phase; positions outside the tile or the tensor are zero.
  static constexpr int kPositionX = kLast ? kCellX : 1;  // elements from position to position of x
  template <int kPhase, bool kInside>
  __device__ __forceinline__ void load_positions(Positions<kPhase>& to, const Plane<kPhase>& plane,
                                                 const Task& task, const Unit& unit) const {
    const int w = unit.w + lane % 4 * 2, offset = (unit.h - task.h) * args.size.w + unit.w;
    static_for<taps_of(kPhase)>([&](auto i) {
#pragma unroll
      for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool inside = kInside || (unit.h + r < args.size.h && w + e < args.size.w);
          const int at = (offset + r * args.size.w + e) * kPositionX;
          to.at[i][r][e] = plane.exists[i] && inside ? operand(plane.x[i][at]) : 0u;
        }
      }
    });
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) to.at[taps_of(kPhase)][r][0] = to.at[taps_of(kPhase)][r][1] = 0u;
  }

  // Multiplies one line of dy with the row of positions that reads it at tap kH.
  template <int kPhase, int kH, int kRow>
  static __device__ __forceinline__ void multiply_line(WeightSums& sums, const unsigned (&window)[kWindow],
                                                       const Positions<kPhase>& x) {
    constexpr int kFirst = products_before(kPhase), kTaps = taps_of(kPhase);
    if constexpr (rows_are_x(kPhase)) {
      static_for<half_up(kTaps)>([&](auto pair) {
        constexpr int kPair = decltype(pair)::value;
        const auto& one = x.at[2 * kPair][kRow];
        const auto& other = x.at[2 * kPair + 1][kRow];
        const unsigned a[4] = {one[0], other[0], one[1], other[1]};
        static_for<C::kKernelW>([&](auto t) {
          constexpr int kWord = decltype(t)::value * C::kDilationW;
          const unsigned b[2] = {window[kWord], window[kWord + C::kStrideW]};
          ptx::warp_multiply<kOperand>(
              sums[kFirst + (kPair * C::kKernelH + kH) * C::kKernelW + decltype(t)::value], a, b);
        });
      });
    } else {
      constexpr int kPairs = half_up(C::kKernelW);
      static_for<kTaps * kPairs>([&](auto i) {
        constexpr int kTap = decltype(i)::value / kPairs, kPair = decltype(i)::value % kPairs;
        constexpr int kWord = 2 * kPair * C::kDilationW, kSecond = kWord + C::kDilationW;
        unsigned a[4] = {window[kWord], 0u, window[kWord + C::kStrideW], 0u};
        if constexpr (2 * kPair + 1 < C::kKernelW) {
          a[1] = window[kSecond];
          a[3] = window[kSecond + C::kStrideW];
        }
        ptx::warp_multiply<kOperand>(sums[kFirst + (kTap * C::kKernelH + kH) * kPairs + kPair], a,
                                     x.at[kTap][kRow]);
      });
    }
  }

  // Multiplies a plane of dy with a unit of 8 positions of kRows lines.
  template <int kPhase, bool kInside>
  __device__ __forceinline__ void multiply_plane(WeightSums& sums, float& sum, const Task& task,
                                                 const Unit& unit, const Plane<kPhase>& plane) const {
    const int first = C::kStrideH * unit.h - C::kPaddingH;
    const int word = C::kStrideW * (unit.w + lane % 4 * 2) - C::kPaddingW;
    Positions<kPhase> positions;
    load_positions<kPhase, kInside>(positions, plane, task, unit);
    const Scalar* const from =
        plane.dy + (C::kStrideH * (unit.h - task.h) * line_step() + windows_apart(unit.w));
    unsigned window[kWindow];
    for_each_line<kInside>(
        first,
        [&](auto l) {
          constexpr int kLine = decltype(l)::value;
          constexpr bool kOwn = kLine >= C::kPaddingH && kLine < C::kPaddingH + C::kRows * C::kStrideH;
          load_window<kInside, C::kBias && kOwn>(window, sum, from + kLine * line_step(), word,
                                                 C::kOut == 8 || lane / 4 < C::kOut);
        },
        [&](auto r, auto t) {
          multiply_line<kPhase, decltype(t)::value, decltype(r)::value>(sums, window, positions);
        });
  }

  __device__ __forceinline__ void weight_grad(int first_unit) const {
    WeightSums sums = {};
    float bias = 0.0f;
    // A warp continues in the next plane where it stopped, so that all warps get equal numbers of units.
    Unit unit{0, first_unit * 8};
    const int width = args.chunks * kWidth, lines = args.bands * C::kRows;
    Ring stage, stage_x, next_x;  // stage_x: that of the oldest position in use
    for (int index = split; index < args.tasks; index += args.splits) {
      const Task task = task_at(index);
      for (int q = task.begin + C::kMinShiftD; q < task.end + C::kMaxShiftD; ++q) {
        if (q - C::kMinShiftD < task.end) {
          ptx::barrier_wait(full_x(next_x.index), next_x.parity);
          next_x.advance(args.stages_x);
        }
        static_for<C::kStrideD>([&](auto phase) {
          constexpr int kPhase = decltype(phase)::value;
          if (!needed<kPhase>(task, q)) return;
          ptx::barrier_wait(full(stage.index), stage.parity);
          float sum = 0.0f;
          const Plane<kPhase> plane = plane_at<kPhase>(task, q, stage.index, stage_x);
#pragma unroll 1
          while (true) {
            for (; unit.w >= width; unit.w -= width) unit.h += C::kRows;
            if (unit.h >= lines) break;
            const Unit here{task.h + unit.h, unit.w};
            if (is_inside(here.h, here.w, 8)) {
              multiply_plane<kPhase, true>(sums, sum, task, here, plane);
            } else {
              multiply_plane<kPhase, false>(sums, sum, task, here, plane);
            }
            unit.w += C::kWeightWarps * 8;
          }
          unit.h -= lines;
          if (C::kBias && q >= task.begin && q < task.end) bias += sum;  // other columns count the rest
          release(empty(stage.index));
          stage.advance(args.stages);
        });
        if (q - C::kMaxShiftD >= task.begin) {
          release(empty_x(stage_x.index));
          stage_x.advance(args.stages_x);
        }
      }
    }
    // Accumulators are passed to all warps through the memory of the stages, which is free after meet().
    meet();
    float* const passed = reinterpret_cast<float*>(stages) + first_unit * kSums * 32 + lane;
#pragma unroll
    for (int i = 0; i < kSums; ++i) passed[i * 32] = sums[i / 4][i % 4];
    if constexpr (C::kBias) {
      bias += __shfl_xor_sync(0xFFFFFFFFu, bias, 1);
      bias += __shfl_xor_sync(0xFFFFFFFFu, bias, 2);
      if (lane % 4 == 0) passed_bias()[first_unit * 8 + lane / 4] = bias;
    }
  }

  __device__ __forceinline__ float* passed_bias() const {
    return reinterpret_cast<float*>(stages) + C::kWeightWarps * kSums * 32;
  }

  // Synchronizes all warps of the block, whatever their role.
  static __device__ __forceinline__ void meet() { __syncthreads(); }

  // Adds the accumulators of the warps in the order of the warps, and stores them.
  __device__ __forceinline__ void store_weights() const {
    constexpr int kAtOnce = C::kThreads / 128;
    const int thread = static_cast<int>(threadIdx.x), g = thread % 32 / 4, e = thread / 32 % 4;
    const int column = thread % 4 * 2 + e % 2, half = e / 2;
    static_for<kProducts>([&](auto p) {
      constexpr Product kProduct = product_at(decltype(p)::value);
      if (thread / 128 != decltype(p)::value % kAtOnce) return;
      const float* const passed =
          reinterpret_cast<const float*>(stages) + (decltype(p)::value * 4 + e) * 32 + thread % 32;
      float sum = 0.0f;
#pragma unroll
      for (int from = 0; from < C::kWeightWarps; ++from) sum += passed[from * kSums * 32];
      const int in = kProduct.rows_are_x ? g : column, out = kProduct.rows_are_x ? column : g;
      const int d = half ? kProduct.d[1] : kProduct.d[0], w = half ? kProduct.w[1] : kProduct.w[0];
      if (d < 0 || w < 0 || in >= C::kIn || out >= C::kOut) return;
      if (in / C::kInPerGroup != out / C::kOutPerGroup) return;
      const int channels = (bundle * C::kIn + in) * C::kOutPerGroup + out % C::kOutPerGroup;
      static_cast<float*>(args.parts)[split * args.dw_pitch + static_cast<long long>(channels) * kTaps +
                                      (d * C::kKernelH + kProduct.h) * C::kKernelW + w] = sum;
    });
    if (C::kBias && threadIdx.x < C::kOut) {
      float sum = 0.0f;
#pragma unroll
      for (int from = 0; from < C::kWeightWarps; ++from) sum += passed_bias()[from * 8 + threadIdx.x];
      static_cast<float*>(args.bias_parts)[split * args.db_pitch + bundle * C::kOut + threadIdx.x] = sum;
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  ptx::launch_dependents();
  GroupBackward<Config> kernel(args);
  kernel.prepare();
  constexpr int kFirst = Config::kProducers, kFirstOfWeight = kFirst + Config::kInputWarps;
  if (kernel.warp < kFirst) {
    kernel.produce();
  } else if (kernel.warp < kFirstOfWeight) {
    if constexpr (Config::kInputWarps > 0) kernel.input_grad(kernel.warp - kFirst);
  }
  if constexpr (Config::kWeightWarps > 0) {
    if (kernel.warp >= kFirstOfWeight) {
      kernel.weight_grad(kernel.warp - kFirstOfWeight);
    } else {
      kernel.meet();
    }
    kernel.meet();
    kernel.store_weights();
  }
}

}  // namespace tconv3d
