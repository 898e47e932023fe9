// Code that the depthwise kernels share: threads that own a position within a plane and walk along depth.
//
// Position q and a tap read plane step_in*q + offset(tap) of x (geometry.py, Gather). With offset =
// step_in*lag + plane, step j of the walk loads planes step_in*j + plane, 0 <= plane < step_in, once, and
// uses each for every tap along depth that reads it: for position q = j - lag.
//
// Threads need many registers, so that occupancy is low, and a thread has the loads of only one plane in
// flight: too little to hide the latency of memory. A thread therefore also prefetches the plane kAhead
// planes further into L2 (`call`).
#pragma once

#include "common.cuh"

namespace tconv3d {

// Blocks that share a patch of positions, each with other channels.
template <class C>
constexpr int channel_chunks() {
  return C::kChannelLanes > 0 ? (C::kGroups + C::kChannelLanes - 1) / C::kChannelLanes : 1;
}

// C has Scalar, kWide, kThreads, kGroups, kChannelLanes (neighbouring threads that have neighbouring
// channels; 0: threads are neighbours along w), kPatchW, kAhead, kInputStep, kStrideX (stride of x along w;
// 0: known at run time only), and kLoads with the offsets kLoadH and kLoadW.
template <class C>
struct Marcher {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;
  static_assert(C::kLoads <= 32, "the loads of a plane fit a mask");

  const March& march;
  const Scalar* x;                     // the thread's channel, at the first plane and the thread's position
  unsigned inside;                     // bit i: load i lies inside the plane
  int n, channel, qh, qw, first, end;  // location of the thread, and its range of positions along depth
  int block, part;
  bool exists;

  // `unit` numbers the batch item, the part along depth, and the channel or patch.
  __device__ __forceinline__ Marcher(const March& march, const void* tensor, int unit) : march(march) {
    const int rest = divide(unit, march.by_blocks);
    block = unit - rest * static_cast<int>(march.by_blocks.divisor);
    const int next = divide(rest, march.by_parts);
    part = rest - next * static_cast<int>(march.by_parts.divisor);
    if constexpr (C::kChannelLanes > 0) {
      locate_in_patch();
      n = next;
    } else {
      const int position = block * C::kThreads + static_cast<int>(threadIdx.x);
      qh = divide(position, march.by_w);
      qw = position - qh * march.grid.w;
      exists = qh < march.grid.h;
      channel = next % C::kGroups;
      n = next / C::kGroups;
    }
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

  // Locates a thread of a block that has several channels and a patch of positions, whose loads overlap.
  __device__ __forceinline__ void locate_in_patch() {
    constexpr int kChunks = channel_chunks<C>();
    constexpr int kPatchH = C::kThreads / C::kChannelLanes / C::kPatchW;
    const int patch = block / kChunks, own = static_cast<int>(threadIdx.x) / C::kChannelLanes;
    const int patch_h = divide(patch, march.by_w);
    const int patch_w = patch - patch_h * static_cast<int>(march.by_w.divisor);
    qh = patch_h * kPatchH + own / C::kPatchW;
    qw = patch_w * C::kPatchW + own % C::kPatchW;
    channel = block % kChunks * C::kChannelLanes + static_cast<int>(threadIdx.x) % C::kChannelLanes;
    exists = qh < march.grid.h && qw < march.grid.w && channel < C::kGroups;
    if (channel >= C::kGroups) channel = C::kGroups - 1;
  }

  __device__ __forceinline__ Index stride_w() const {
    return C::kStrideX > 0 ? Index(C::kStrideX) : static_cast<Index>(march.x_strides.w);
  }

  // Prefetches a plane of x into L2, except for the loads that another thread prefetches.
  __device__ __forceinline__ void call(int plane) const {
    if (plane < 0 || plane >= march.x_size.d) return;
    const Scalar* from = x + plane * march.x_strides.d;
    static_for<C::kCalls>([&](auto i) {
      constexpr int kLoad = C::kCallLoad(i), kH = C::kLoadH(kLoad), kW = C::kLoadW(kLoad);
      if (inside >> kLoad & 1)
        ptx::call_into_l2(from + kH * static_cast<Index>(march.x_strides.h) + kW * stride_w());
    });
  }

  // Loads the values of one plane that the thread's taps read. The values stay in memory format, because a
  // conversion would wait for the loads.
  __device__ __forceinline__ void load(int plane, Scalar (&values)[C::kLoads]) const {
    const bool there = plane >= 0 && plane < march.x_size.d;
    const Scalar* from = x + (there ? plane * march.x_strides.d : 0);
    static_for<C::kLoads>([&](auto i) {
      constexpr int kH = C::kLoadH(i), kW = C::kLoadW(i);
      const Scalar* line = from + kH * static_cast<Index>(march.x_strides.h);
      const Scalar* at = line + kW * stride_w();
      values[i] = Scalar{};
      if (there && (inside >> i & 1)) values[i] = *at;
    });
  }
};

}  // namespace tconv3d
