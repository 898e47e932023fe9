// Weight gradient of depthwise layers (one input and one output channel per group), by multiply-adds:
//   dw[c][t] = sum over n, i of  x[n][c][i] * dy[n][c][stride*i + t*dilation - padding]
//
// A thread owns one channel and one position i within the plane, and walks along depth (march.cuh). Registers
// hold the sums of all taps and the last few values of x, so that a loaded value of dy serves every tap along
// depth. The sums of a block are added in a fixed order and written as one partial sum; reduce.cuh adds the
// partial sums. A block has one channel, or, channels-last, the neighbouring channels of neighbouring threads
// at several positions. Channels-last blocks go on to further patches of positions with the same channels,
// which leaves fewer partial sums. With kBias the kernel also sums dy for the bias gradient: a position adds
// the outputs of its own taps (kTapOwn).
#pragma once

#include "cursor.cuh"
#include "march.cuh"

namespace tconv3d {

template <class C>
struct DepthwiseWeightGrad {
  using Scalar = typename C::Scalar;
  static constexpr int kLanes = 32, kWarps = C::kThreads / kLanes;
  static constexpr int kValues = (C::kTaps + kLanes - 1) / kLanes * kLanes;  // sums, padded to whole warps
  static_assert((kValues & (kValues - 1)) == 0, "halves of the sums can be exchanged");

  const Args& args;
  float sum[kValues];
  float window[C::kSlots];  // values of x at the positions that the current planes of dy belong to
  float bias;

  __device__ __forceinline__ float load_x(const Marcher<C>& at, int q) const {
    if (!at.exists || q < at.first || q >= at.end) return 0.0f;
    return widen<float>(static_cast<const Scalar*>(
        args.x)[at.n * args.x_strides.n + at.channel * args.x_strides.c + q * args.x_strides.d +
                at.qh * args.x_strides.h + at.qw * args.x_strides.w]);
  }

  template <int kPlane>
  __device__ __forceinline__ void accumulate(const Scalar (&values)[C::kLoads]) {
    static_for<C::kTaps>([&](auto t) {
      constexpr int kSlot = C::kTapSlot(t), kLoad = C::kTapLoad(t);
      if constexpr (C::kTapPlane(t) == kPlane) sum[t] += window[kSlot] * widen<float>(values[kLoad]);
    });
  }

  // Adds the outputs of plane kPlane that belong to position `step` to the bias gradient, if the position is
  // in the thread's range.
  template <int kPlane>
  __device__ __forceinline__ void add_own(const Marcher<C>& at, const Scalar (&values)[C::kLoads], int step) {
    if constexpr (C::kBias) {
      float own = 0.0f;
      static_for<C::kTaps>([&](auto t) {
        constexpr int kLoad = C::kTapLoad(t);
        if constexpr (C::kTapOwn(t) && C::kTapPlane(t) == kPlane) own += widen<float>(values[kLoad]);
      });
      if (step >= at.first && step < at.end) bias += own;
    }
  }

  // Sums over the lanes of a warp: in each of five rounds a lane keeps one half of its values and sends the
  // other half. A lane ends up with kValues / 32 totals; the function returns the index of the first.
  __device__ __forceinline__ int add_lanes() {
    const int lane = threadIdx.x % kLanes;
    int first = 0;
#pragma unroll
    for (int distance = 16, count = kValues / 2; distance > 0; distance /= 2, count /= 2) {
      const bool upper = lane & distance;
      first += upper ? count : 0;
#pragma unroll
      for (int i = 0; i < kValues / 2; ++i) {
        if (i < count) {
          const float sent = upper ? sum[i] : sum[i + count];
          const float kept = upper ? sum[i + count] : sum[i];
          sum[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, distance);
        }
      }
    }
    return first;
  }

  // Stores the sums of a block whose threads all have one channel.
  __device__ __forceinline__ void store_channel(float* totals) {  // [warp][kValues]
    const int first = add_lanes();
#pragma unroll
    for (int i = 0; i < kValues / kLanes; ++i) totals[threadIdx.x / kLanes * kValues + first + i] = sum[i];
    __syncthreads();
    const Marcher<C> at(args.march, args.dy, blockIdx.x);
    const int splits = static_cast<int>(args.march.by_blocks.divisor * args.march.by_parts.divisor);
    const long long split = at.n * static_cast<long long>(splits) +
                            at.part * static_cast<int>(args.march.by_blocks.divisor) + at.block;
    float* const parts = static_cast<float*>(args.parts) + (split * C::kGroups + at.channel) * C::kTaps;
    if constexpr (C::kBias) store_bias(split, at.channel);
    for (int t = threadIdx.x; t < C::kTaps; t += C::kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) total += totals[warp * kValues + t];
      parts[C::kTapIndex(t)] = total;
    }
  }

  __device__ __forceinline__ void store_bias(long long split, int channel) const {
    float* const totals = dynamic_shared<float>() + kWarps * kValues;
    const float own = warp_sum(bias);
    if (threadIdx.x % kLanes == 0) totals[threadIdx.x / kLanes] = own;
    __syncthreads();
    if (threadIdx.x != 0) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += totals[warp];
    static_cast<float*>(args.bias_parts)[split * C::kGroups + channel] = total;
  }

  // Stores the sums of a block whose neighbouring threads have neighbouring channels.
  __device__ __forceinline__ void store_channels(float* totals) {  // [taps, then bias][kThreads + 1]
#pragma unroll
    for (int t = 0; t < C::kTaps; ++t) totals[t * (C::kThreads + 1) + threadIdx.x] = sum[t];
    if constexpr (C::kBias) totals[C::kTaps * (C::kThreads + 1) + threadIdx.x] = bias;
    __syncthreads();
    constexpr int kSums = C::kTaps + (C::kBias ? 1 : 0);  // sums per channel
    constexpr int kChunks = channel_chunks<C>();
    const int split = blockIdx.x / kChunks, first = blockIdx.x % kChunks * C::kChannelLanes;
    float* const parts =
        static_cast<float*>(args.parts) + (static_cast<long long>(split) * C::kGroups + first) * C::kTaps;
    for (int i = threadIdx.x; i < C::kChannelLanes * kSums; i += C::kThreads) {
      const int t = i % kSums, channel = i / kSums;
      if (first + channel >= C::kGroups) break;
      float total = 0.0f;
#pragma unroll
      for (int thread = 0; thread < C::kThreads; thread += C::kChannelLanes > 0 ? C::kChannelLanes : 1)
        total += totals[t * (C::kThreads + 1) + thread + channel];
      if (t < C::kTaps) {
        parts[channel * C::kTaps + C::kTapIndex(t)] = total;
      } else {
        static_cast<float*>(args.bias_parts)[static_cast<long long>(split) * C::kGroups + first + channel] =
            total;
      }
    }
  }

  __device__ __forceinline__ void walk(const Marcher<C>& at) {
    Scalar values[2][C::kLoads];  // values of the current plane, and of the next one in flight
    int step = at.first + C::kFirstLag;
    at.load(step * C::kInputStepD, values[0]);
    for (int i = 1; i < C::kAhead; ++i) at.call(step * C::kInputStepD + i);
    // Slot s of the window belongs to position step - kEndLag + s.
#pragma unroll
    for (int slot = 0; slot < C::kSlots; ++slot) window[slot] = load_x(at, step - C::kEndLag + slot);
#pragma unroll 1  // leaves the registers to the sums
    for (; step < at.end + C::kEndLag; ++step) {
      const float next = load_x(at, step + 1 - C::kFirstLag);
      static_for<C::kInputStepD>([&](auto plane) {
        at.load(step * C::kInputStepD + plane + 1, values[1]);
        at.call(step * C::kInputStepD + plane + C::kAhead);
        accumulate<plane>(values[0]);
        add_own<plane>(at, values[0], step);
#pragma unroll
        for (int i = 0; i < C::kLoads; ++i) values[0][i] = values[1][i];
      });
#pragma unroll
      for (int slot = 0; slot + 1 < C::kSlots; ++slot) window[slot] = window[slot + 1];
      window[C::kSlots - 1] = next;
    }
  }

  __device__ __forceinline__ void compute() {
    bias = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < args.units; unit += gridDim.x)
      walk(Marcher<C>(args.march, args.dy, unit));
    if constexpr (C::kChannelLanes > 0) {
      store_channels(dynamic_shared<float>());
    } else {
      store_channel(dynamic_shared<float>());
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  DepthwiseWeightGrad<Config> kernel{args};
  kernel.compute();
}

}  // namespace tconv3d
