// The input gradient of group_backward.cuh: warps that hold all weights in registers.
#pragma once

#include "group_backward_tiles.cuh"

namespace tconv3d {

template <class C>
struct GroupInputGrad : GroupTiles<C> {
  using Tiles = GroupTiles<C>;
  using Tiles::args, Tiles::bundle, Tiles::empty, Tiles::full;
  using Tiles::is_inside, Tiles::lane, Tiles::line_step;
  using Tiles::kLast, Tiles::kOperand, Tiles::kQuads, Tiles::kSlots, Tiles::kStrict, Tiles::kTaps;
  using Tiles::kWidth, Tiles::low_weights;
  using Tiles::offset_of, Tiles::operand, Tiles::release, Tiles::slice, Tiles::split, Tiles::task_at,
      Tiles::unit_at;
  using Tiles::weight_at, Tiles::window_at;
  using typename Tiles::Rings, typename Tiles::Scalar, typename Tiles::Task, typename Tiles::Unit,
      typename Tiles::Window;

  using InputSums = float[kSlots][C::kRows][4];

  // Taps along w whose products tensor cores add before ordinary additions, in strict float32: 32 terms.
  static constexpr int kTapsAtOnce = 4;

  // Loads the B operand of every tap; in strict float32 its high half.
  __device__ __forceinline__ void load_weights(unsigned (&to)[kTaps][2]) const {
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
#pragma unroll
      for (int t = 0; t < kTaps; ++t) to[t][quad] = operand(weight_at(t, lane, quad));
    }
  }

  // Takes the A operand of a tap along w, or its low half: words of two adjacent positions.
  template <bool kLow, int kTap>
  static __device__ __forceinline__ void take_rows(unsigned (&a)[4], const Window (&windows)[kQuads]) {
    constexpr int kFirst = kTap * C::kDilationW, kSecond = kFirst + C::kStrideW;
    a[2] = a[3] = 0u;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const unsigned* const words = kLow ? windows[quad].low : windows[quad].high;
      a[2 * quad] = words[kFirst];
      a[2 * quad + 1] = words[kSecond];
    }
  }

  // Multiplies the windows of a line with all taps along w, from tap kFirst of the kernel on, as three TF32
  // products.
  template <int kFirst>
  __device__ __forceinline__ void multiply_halves(float (&sum)[4], const unsigned (&weights)[kTaps][2],
                                                  const Window (&windows)[kQuads]) const {
    static_for<(C::kKernelW + kTapsAtOnce - 1) / kTapsAtOnce>([&](auto i) {
      constexpr int kBegin = decltype(i)::value * kTapsAtOnce;
      constexpr int kCount = C::kKernelW - kBegin < kTapsAtOnce ? C::kKernelW - kBegin : kTapsAtOnce;
      float part[4] = {};
      unsigned high[4], low[4];
      static_for<kCount>([&](auto t) {
        constexpr int kTap = kBegin + decltype(t)::value;
        take_rows<false, kTap>(high, windows);
        take_rows<true, kTap>(low, windows);
        const uint2 loaded = ptx::load_shared_again(low_weights + ((kFirst + kTap) * 32 + lane) * 8);
        const unsigned low_weight[2] = {loaded.x, loaded.y};
        Tiles::multiply_small(part, high, low, weights[kFirst + kTap], low_weight);
      });
      static_for<kCount>([&](auto t) {
        constexpr int kTap = kBegin + decltype(t)::value;
        take_rows<false, kTap>(high, windows);
        ptx::warp_multiply<kOperand>(part, high, weights[kFirst + kTap]);
      });
      Tiles::add(sum, part);
    });
  }

  template <int kPhase, bool kInside>
  __device__ __forceinline__ void add_plane(InputSums& sums, const unsigned (&weights)[kTaps][2],
                                            const Task& task, const Unit& unit, int plane, int stage) const {
    const int first = C::kStrideH * unit.h - C::kPaddingH;
    const int word = C::kStrideW * (unit.w + lane / 4 * 2) - C::kPaddingW;
    const Scalar* from[kQuads];
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      from[quad] = window_at(stage, task, lane % 4 + 4 * quad, plane, first, unit.w + lane / 4 * 2);
    }
    Window windows[kQuads];
    float unused;
    Tiles::template for_each_line<kInside>(
        first,
        [&](auto l) {
          constexpr int kLine = decltype(l)::value;
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) {
            Tiles::template load_window<kInside, false>(windows[quad], unused,
                                                        from[quad] + kLine * line_step(), word,
                                                        C::kOut % 4 == 0 || lane % 4 + 4 * quad < C::kOut);
          }
        },
        [&](auto r, auto t_h) {
          Tiles::template for_each_tap<kPhase>([&](auto t_d) {
            constexpr int kRow = decltype(r)::value, kD = decltype(t_d)::value;
            constexpr int kFirstTap = (kD * C::kKernelH + decltype(t_h)::value) * C::kKernelW;
            constexpr int kSlot = C::kMaxShiftD - C::kShiftD(kD);
            if constexpr (kStrict) {
              multiply_halves<kFirstTap>(sums[kSlot][kRow], weights, windows);
            } else {
              static_for<C::kKernelW>([&](auto t_w) {
                unsigned a[4];
                take_rows<false, decltype(t_w)::value>(a, windows);
                ptx::warp_multiply<kOperand>(sums[kSlot][kRow], a, weights[kFirstTap + decltype(t_w)::value]);
              });
            }
          });
        });
  }

  // The sums of one slice of output channels after another, at the places of dx. In float32 this is dx
  // itself.
  __device__ __forceinline__ float* slice_sums() const {
    return static_cast<float*>(sizeof(Scalar) == 4 ? args.dx : args.dx_sums);
  }

  // Sets sums to those of earlier slices, which the same lane has stored, or to zero.
  __device__ __forceinline__ void start(float (&sums)[C::kRows][4], const Task& task, const Unit& unit,
                                        int d) const {
    const bool exists = C::kSlices > 1 && slice > 0 && d < task.end;
    const int w = unit.w + lane / 4 * 2, in = lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      const int h = unit.h + r;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[r][i] = 0.0f;
        if (exists && h < args.size.h && in + i % 2 < C::kIn && w + i / 2 < args.size.w) {
          sums[r][i] = slice_sums()[offset_of(args.dx_strides, task.n, bundle * C::kIn + in + i % 2, d, h) +
                                    (w + i / 2) * args.dx_strides.w];
        }
      }
    }
  }

  __device__ __forceinline__ void store_positions(const float (&sums)[C::kRows][4], const Task& task,
                                                  const Unit& unit, int d) const {
    if (sizeof(Scalar) != 4 && slice + 1 < C::kSlices) {
      store_positions(slice_sums(), sums, task, unit, d);
    } else {
      store_positions(static_cast<Scalar*>(args.dx), sums, task, unit, d);
    }
  }
  template <class Result>
  __device__ __forceinline__ void store_positions(Result* dx, const float (&sums)[C::kRows][4],
                                                  const Task& task, const Unit& unit, int d) const {
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
          Result* const to = dx + (w + e) * args.dx_strides.w +
                             offset_of(args.dx_strides, task.n, bundle * C::kIn + in, d, h);
          const Vector<Result, 2> both{Narrow<Result>::from(sums[r][2 * e]),
                                       Narrow<Result>::from(sums[r][2 * e + 1])};
          if constexpr (C::kSlices > 1) {  // start() reads what is stored, which store_vector() forbids
            store_pair<true>(to, both, true);
          } else {
            store_vector(to, both);
          }
          continue;
        }
        const int in = lane % 4 * 2 + e;
        if (h >= args.size.h || in >= C::kIn) continue;
        Result* const to = dx + w + offset_of(args.dx_strides, task.n, bundle * C::kIn + in, d, h);
        const Vector<Result, 2> both{Narrow<Result>::from(sums[r][e]), Narrow<Result>::from(sums[r][2 + e])};
        store_pair<false>(to, both, w + 1 < args.size.w);
      }
    }
  }

  __device__ __forceinline__ void input_grad(int index_of_unit, Rings& rings) const {
    const bool exists = index_of_unit < args.bands * args.chunks;
    unsigned weights[kTaps][2];
    load_weights(weights);
    Ring stage = rings.dy;
    for (int index = split; index < args.tasks; index += args.splits) {
      const Task task = task_at(index);
      const Unit unit = unit_at(task, index_of_unit);
      const bool inside = is_inside(unit.h, unit.w, kWidth);
      InputSums sums = {};
      start(sums[kSlots - 1], task, unit, exists ? task.begin : task.end);
      for (int q = task.begin + C::kMinShiftD; q < task.end + C::kMaxShiftD; ++q) {
        static_for<C::kStrideD>([&](auto phase) {
          constexpr int kPhase = decltype(phase)::value;
          if (!Tiles::template needed<kPhase>(task, q)) return;
          Tiles::wait(full(stage.index), stage.parity);
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
        static_for<kSlots - 1>([&](auto s) {
          constexpr int kSlot = decltype(s)::value;
#pragma unroll
          for (int i = 0; i < 4 * C::kRows; ++i) sums[kSlot][i / 4][i % 4] = sums[kSlot + 1][i / 4][i % 4];
        });
        start(sums[kSlots - 1], task, unit, exists ? q + 1 - C::kMinShiftD : task.end);
      }
    }
    if constexpr (C::kSlices > 1) rings.dy = stage;
  }
};

}  // namespace tconv3d
