// The weight gradient of group_backward.cuh, and the bias gradient: warps that hold the sums of all taps in
// registers.
#pragma once

#include "group_backward_tiles.cuh"

namespace tconv3d {

template <class C>
struct GroupWeightGrad : GroupTiles<C> {
  using Tiles = GroupTiles<C>;
  using Tiles::args, Tiles::bundle, Tiles::empty, Tiles::empty_x, Tiles::first_line;
  using Tiles::full, Tiles::full_x, Tiles::is_inside, Tiles::lane, Tiles::line_step;
  using Tiles::kCellX, Tiles::kItem, Tiles::kLast, Tiles::kOperand, Tiles::kStrict;
  using Tiles::kTaps, Tiles::kWidth;
  using Tiles::meet, Tiles::operand, Tiles::release, Tiles::skipped, Tiles::split;
  using Tiles::stage_x_bytes, Tiles::stages, Tiles::stages_x, Tiles::task_at, Tiles::window_at;
  using Tiles::windows_apart;
  using typename Tiles::Rings, typename Tiles::Scalar, typename Tiles::Task, typename Tiles::Unit,
      typename Tiles::Window;

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
  // x of two adjacent positions, by tap of the phase and line, and low halves of it. One extra tap is zero.
  template <int kPhase>
  struct Positions {
    unsigned at[taps_of(kPhase) + 1][C::kRows][2];
    unsigned low[kStrict ? taps_of(kPhase) + 1 : 1][C::kRows][2];
  };

  // Strict float32 adds up sums of kUnitsAtOnce units (some more, since it counts between planes) by
  // compensated additions, so that the error does not grow with the number of positions. The totals, and what
  // these additions round off, are in local memory: there are no registers left. Volatile, they do not
  // displace values in use.
  static constexpr int kUnitsAtOnce = 16, kTotals = kStrict ? kSums + 1 : 1;
  struct Totals {
    volatile float total[kTotals], rest[kTotals];
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
          const float value = plane.exists[i] && inside ? widen<float>(plane.x[i][at]) : 0.0f;
          to.at[i][r][e] = operand(value);
          if constexpr (kStrict) to.low[i][r][e] = Tiles::low_operand(value);
        }
      }
    });
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      to.at[taps_of(kPhase)][r][0] = to.at[taps_of(kPhase)][r][1] = 0u;
      if constexpr (kStrict) to.low[taps_of(kPhase)][r][0] = to.low[taps_of(kPhase)][r][1] = 0u;
    }
  }

  // Multiplies operands, or their halves, and adds the product to the sums of a product.
  static __device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&high_a)[4],
                                                  const unsigned (&low_a)[4], const unsigned (&high_b)[2],
                                                  const unsigned (&low_b)[2]) {
    if constexpr (kStrict) {
      float part[4] = {};
      Tiles::multiply_small(part, high_a, low_a, high_b, low_b);
      ptx::warp_multiply<kOperand>(part, high_a, high_b);
      Tiles::add(sum, part);
    } else {
      ptx::warp_multiply<kOperand>(sum, high_a, high_b);
    }
  }

  // Fragments that hold two taps of x (rows), or one tap of dy (columns).
  template <int kPhase, int kRow, int kPair>
  static __device__ __forceinline__ void take_x(unsigned (&a)[4],
                                                const unsigned (&x)[taps_of(kPhase) + 1][C::kRows][2]) {
    const auto &one = x[2 * kPair][kRow], &other = x[2 * kPair + 1][kRow];
    a[0] = one[0], a[1] = other[0], a[2] = one[1], a[3] = other[1];
  }
  template <int kWord>
  static __device__ __forceinline__ void take_columns(unsigned (&b)[2], const unsigned* words) {
    b[0] = words[kWord], b[1] = words[kWord + C::kStrideW];
  }
  // Fragment that holds two taps of dy along w (rows), of which the second may not exist.
  template <int kPair>
  static __device__ __forceinline__ void take_rows(unsigned (&a)[4], const unsigned* words) {
    constexpr int kWord = 2 * kPair * C::kDilationW, kSecond = kWord + C::kDilationW;
    a[0] = words[kWord], a[2] = words[kWord + C::kStrideW], a[1] = a[3] = 0u;
    if constexpr (2 * kPair + 1 < C::kKernelW) a[1] = words[kSecond], a[3] = words[kSecond + C::kStrideW];
  }

  // Multiplies one line of dy with the row of positions that reads it at tap kH.
  template <int kPhase, int kH, int kRow>
  static __device__ __forceinline__ void multiply_line(WeightSums& sums, const Window& window,
                                                       const Positions<kPhase>& x) {
    constexpr int kFirst = products_before(kPhase), kTaps = taps_of(kPhase);
    unsigned a[4], low_a[4], b[2], low_b[2];
    if constexpr (rows_are_x(kPhase)) {
      static_for<half_up(kTaps)>([&](auto pair) {
        constexpr int kPair = decltype(pair)::value;
        take_x<kPhase, kRow, kPair>(a, x.at);
        if constexpr (kStrict) take_x<kPhase, kRow, kPair>(low_a, x.low);
        static_for<C::kKernelW>([&](auto t) {
          constexpr int kWord = decltype(t)::value * C::kDilationW;
          take_columns<kWord>(b, window.high);
          if constexpr (kStrict) take_columns<kWord>(low_b, window.low);
          multiply(sums[kFirst + (kPair * C::kKernelH + kH) * C::kKernelW + decltype(t)::value], a, low_a, b,
                   low_b);
        });
      });
    } else {
      constexpr int kPairs = half_up(C::kKernelW);
      static_for<kTaps * kPairs>([&](auto i) {
        constexpr int kTap = decltype(i)::value / kPairs, kPair = decltype(i)::value % kPairs;
        take_rows<kPair>(a, window.high);
        if constexpr (kStrict) {
          take_rows<kPair>(low_a, window.low);
          low_b[0] = x.low[kTap][kRow][0], low_b[1] = x.low[kTap][kRow][1];
        }
        multiply(sums[kFirst + (kTap * C::kKernelH + kH) * kPairs + kPair], a, low_a, x.at[kTap][kRow],
                 low_b);
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
    Window window;
    Tiles::template for_each_line<kInside>(
        first,
        [&](auto l) {
          constexpr int kLine = decltype(l)::value;
          constexpr bool kOwn = kLine >= C::kPaddingH && kLine < C::kPaddingH + C::kRows * C::kStrideH;
          Tiles::template load_window<kInside, C::kBias && kOwn>(window, sum, from + kLine * line_step(),
                                                                 word, C::kOut == 8 || lane / 4 < C::kOut);
        },
        [&](auto r, auto t) {
          multiply_line<kPhase, decltype(t)::value, decltype(r)::value>(sums, window, positions);
        });
  }

  // Adds the sums of all taps and of the bias to the totals, and clears them.
  static __device__ __forceinline__ void add_to_totals(Totals& to, WeightSums& sums, float& bias) {
    constexpr int kAtOnce = 12;  // totals that are loaded together
    static_for<(kTotals + kAtOnce - 1) / kAtOnce>([&](auto block) {
      constexpr int kFrom = decltype(block)::value * kAtOnce;
      constexpr int kCount = kTotals - kFrom < kAtOnce ? kTotals - kFrom : kAtOnce;
      float total[kCount], rest[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) total[i] = to.total[kFrom + i], rest[i] = to.rest[kFrom + i];
      static_for<kCount>([&](auto i) {
        constexpr int kI = decltype(i)::value, kSum = kFrom + kI;
        float& sum = kSum < kSums ? sums[kSum / 4 % kProducts][kSum % 4] : bias;
        rest[kI] += sum;
        ptx::add_with_rest(total[kI], rest[kI], 1.0f);
        sum = 0.0f;
      });
#pragma unroll
      for (int i = 0; i < kCount; ++i) to.total[kFrom + i] = total[i], to.rest[kFrom + i] = rest[i];
    });
  }

  __device__ __forceinline__ void weight_grad(int first_unit, Rings& rings) const {
    WeightSums sums = {};
    float bias = 0.0f;
    Totals totals;
    int units = 0;  // units in the sums, which are not in the totals yet
    if constexpr (kStrict) {
      for (int i = 0; i < kTotals; ++i) totals.total[i] = totals.rest[i] = 0.0f;
    }
    // A warp continues in the next plane where it stopped, so that all warps get equal numbers of units.
    Unit unit{0, first_unit * 8};
    const int width = args.chunks * kWidth, lines = args.bands * C::kRows;
    Ring stage = rings.dy, stage_x = rings.x, next_x = rings.next_x;
    for (int index = split; index < args.tasks; index += args.splits) {
      const Task task = task_at(index);
      for (int q = task.begin + C::kMinShiftD; q < task.end + C::kMaxShiftD; ++q) {
        if (q - C::kMinShiftD < task.end) {
          Tiles::wait(full_x(next_x.index), next_x.parity);
          next_x.advance(args.stages_x);
        }
        static_for<C::kStrideD>([&](auto phase) {
          constexpr int kPhase = decltype(phase)::value;
          if (!Tiles::template needed<kPhase>(task, q)) return;
          Tiles::wait(full(stage.index), stage.parity);
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
            ++units;
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
        if (kStrict && units >= kUnitsAtOnce) {
          add_to_totals(totals, sums, bias);
          units = 0;
        }
      }
    }
    if constexpr (C::kSlices > 1) rings = Rings{stage, stage_x, next_x};
    if constexpr (kStrict) {
      add_to_totals(totals, sums, bias);
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i / 4][i % 4] = totals.total[i];
      bias = totals.total[kSums];
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
      const int channels = (bundle * C::kIn + in) * C::kOutPerGroup + Tiles::out_in_group(out);
      static_cast<float*>(args.parts)[split * args.dw_pitch + static_cast<long long>(channels) * kTaps +
                                      (d * C::kKernelH + kProduct.h) * C::kKernelW + w] = sum;
    });
    if (C::kBias && threadIdx.x < C::kOut) {
      float sum = 0.0f;
#pragma unroll
      for (int from = 0; from < C::kWeightWarps; ++from) sum += passed_bias()[from * 8 + threadIdx.x];
      static_cast<float*>(args.bias_parts)[split * args.db_pitch + Tiles::first_out() + threadIdx.x] = sum;
    }
  }
};

}  // namespace tconv3d
