// The input gradient of group_backward.cuh: warps that hold all weights in registers.
#pragma once

#include "group_backward_tiles.cuh"

namespace tconv3d {

template <class C>
struct GroupInputGrad : GroupTiles<C> {
  using Tiles = GroupTiles<C>;
  using Tiles::args, Tiles::bundle, Tiles::empty, Tiles::full;
  using Tiles::is_inside, Tiles::lane, Tiles::line_step;
  using Tiles::kHalves, Tiles::kLast, Tiles::kOperand, Tiles::kSlots, Tiles::kTaps, Tiles::kWeightLast;
  using Tiles::kWidth, Tiles::kWindow;
  using Tiles::offset_of, Tiles::operand, Tiles::release, Tiles::split, Tiles::task_at, Tiles::unit_at;
  using Tiles::window_at;
  using typename Tiles::Scalar, typename Tiles::Task, typename Tiles::Unit;

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
    Tiles::template for_each_line<kInside>(
        first,
        [&](auto l) {
          constexpr int kLine = decltype(l)::value;
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            Tiles::template load_window<kInside, false>(windows[half], unused,
                                                        from[half] + kLine * line_step(), word,
                                                        C::kOut % 4 == 0 || lane % 4 + 4 * half < C::kOut);
          }
        },
        [&](auto r, auto t_h) {
          Tiles::template for_each_tap<kPhase>([&](auto t_d) {
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
          if (!Tiles::template needed<kPhase>(task, q)) return;
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
            if constexpr (kSlot + 1 < Tiles::kSlots) {
              sum = sums[kSlot + 1][i / 4][i % 4];
            } else {
              sum = 0.0f;
            }
          }
        });
      }
    }
  }
};

}  // namespace tconv3d
