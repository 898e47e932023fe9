// What the depthwise kernels share: threads that own a position within a plane and walk along depth.
//
// Position q and a tap read plane step_in*q + offset(tap) of x (geometry.py, Gather). With
// offset = step_in*lag + plane, step j of the walk loads planes step_in*j + plane, 0 <= plane < step_in,
// once, and uses each for every tap along depth that reads it: for position q = j - lag.
#pragma once

#include "common.cuh"

namespace tconv3d {

struct March {
  Strides x_strides;
  Extent x_size;
  Extent grid;  // positions q per dimension
  int length;   // positions along depth of a block
  int batch;
  Divider by_w, by_blocks, by_parts;  // grid.w; blocks of positions within a plane; parts along depth
};

// C: Scalar, kWide, kThreads, kGroups, kChannelLanes, kInputStep, kLoads with their offsets kLoadH and
// kLoadW.
template <class C>
struct Marcher {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;
  static_assert(C::kLoads <= 32, "the loads of a plane fit a mask");

  const March& march;
  const Scalar* x;                     // the thread's channel, at the first plane and the thread's position
  unsigned inside;                     // bit i: load i lies inside the plane
  int n, channel, qh, qw, first, end;  // of the thread: where it is, and which positions along depth it has
  int block, part;
  bool exists;

  // Neighbouring threads are neighbours along w, or, channels-last, neighbouring channels.
  __device__ __forceinline__ Marcher(const March& march, const void* tensor) : march(march) {
    int rest = divide(static_cast<int>(blockIdx.x), march.by_blocks);
    block = static_cast<int>(blockIdx.x) - rest * static_cast<int>(march.by_blocks.divisor);
    const int next = divide(rest, march.by_parts);
    part = rest - next * static_cast<int>(march.by_parts.divisor);
    const int thread = block * C::kThreads + static_cast<int>(threadIdx.x);
    const int position = C::kChannelLanes ? thread / C::kGroups : thread;
    channel = C::kChannelLanes ? thread % C::kGroups : next % C::kGroups;
    n = C::kChannelLanes ? next : next / C::kGroups;
    qh = divide(position, march.by_w);
    qw = position - qh * march.grid.w;
    exists = qh < march.grid.h;
    first = part * march.length;
    end = march.grid.d - first < march.length ? march.grid.d : first + march.length;
    inside = 0;
    const int h = qh * C::kInputStepH, w = qw * C::kInputStepW;
    static_for<C::kLoads>([&](auto i) {
      constexpr int kH = C::kLoadH(i), kW = C::kLoadW(i);
      const bool there =
          exists && h + kH >= 0 && h + kH < march.x_size.h && w + kW >= 0 && w + kW < march.x_size.w;
      inside |= static_cast<unsigned>(there) << i;
    });
    x = static_cast<const Scalar*>(tensor) + n * march.x_strides.n + channel * march.x_strides.c;
    if (exists) x += h * march.x_strides.h + w * march.x_strides.w;
  }

  // The values of one plane that the thread's taps read, as they are in memory: a conversion would wait for
  // them.
  __device__ __forceinline__ void load(int plane, Scalar (&values)[C::kLoads]) const {
    const bool there = plane >= 0 && plane < march.x_size.d;
    const Scalar* from = x + (there ? plane * march.x_strides.d : 0);
    static_for<C::kLoads>([&](auto i) {
      constexpr int kH = C::kLoadH(i), kW = C::kLoadW(i);
      const Scalar* line = from + kH * static_cast<Index>(march.x_strides.h);
      const Scalar* at = line + kW * (C::kUnitW ? Index(1) : static_cast<Index>(march.x_strides.w));
      values[i] = Scalar{};
      if (there && (inside >> i & 1)) values[i] = *at;
    });
  }
};

}  // namespace tconv3d
