// The weight gradient of depthwise layers (one channel in, one out, per group), by multiply-adds:
//   dw[c][t] = sum over n, i of  x[n][c][i] * dy[n][c][stride*i + t*dilation - padding]
//
// A thread owns one channel, one position i within the plane, and walks along depth (march.cuh) with all
// taps' sums in registers, and the last few values of x: what is loaded of dy serves every tap along depth.
// The block's sums are added in a fixed order and written as one part; reduce.cuh adds the parts. kBias: of
// dy itself the outputs of the position's own taps are added up, too.
#pragma once

#include "cursor.cuh"
#include "march.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* dy;
  void* parts;       // [splits][channels][kernel d][h][w]
  void* bias_parts;  // kBias: [splits][channels]
  March march;       // over dy
  Strides x_strides;
};

template <class C>
struct DepthwiseWeightGrad {
  using Scalar = typename C::Scalar;
  static constexpr int kLanes = 32, kWarps = C::kThreads / kLanes;
  static constexpr int kValues = (C::kTaps + kLanes - 1) / kLanes * kLanes;  // sums, padded to whole warps
  static_assert((kValues & (kValues - 1)) == 0, "halves of the sums can be exchanged");
  static_assert(!C::kChannelLanes, "a block has one channel");

  const Args& args;
  const Marcher<C> at;
  float sum[kValues];
  float window[C::kSlots];  // x at the positions that the step's planes of dy belong to
  float bias;

  __device__ __forceinline__ float load_x(int q) const {
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

  // The outputs of a plane that position `step` has, if it is one of the thread's.
  template <int kPlane>
  __device__ __forceinline__ void add_own(const Scalar (&values)[C::kLoads], int step) {
    if constexpr (C::kBias) {
      float own = 0.0f;
      static_for<C::kTaps>([&](auto t) {
        constexpr int kLoad = C::kTapLoad(t);
        if constexpr (C::kTapOwn(t) && C::kTapPlane(t) == kPlane) own += widen<float>(values[kLoad]);
      });
      if (step >= at.first && step < at.end) bias += own;
    }
  }

  // Adds the lanes' sums: a lane keeps half of its values and sends the other half, five times. It ends up
  // with kValues / 32 totals, beginning with the one that is returned.
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

  __device__ __forceinline__ void store() {
    float* const totals = dynamic_shared<float>();  // [warp][kValues]
    const int first = add_lanes();
#pragma unroll
    for (int i = 0; i < kValues / kLanes; ++i) totals[threadIdx.x / kLanes * kValues + first + i] = sum[i];
    __syncthreads();
    const int splits = static_cast<int>(args.march.by_blocks.divisor * args.march.by_parts.divisor);
    const long long split = at.n * static_cast<long long>(splits) +
                            at.part * static_cast<int>(args.march.by_blocks.divisor) + at.block;
    float* const parts = static_cast<float*>(args.parts) + (split * C::kGroups + at.channel) * C::kTaps;
    if constexpr (C::kBias) store_bias(split);
    for (int t = threadIdx.x; t < C::kTaps; t += C::kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) total += totals[warp * kValues + t];
      parts[C::kTapIndex(t)] = total;
    }
  }

  __device__ __forceinline__ void store_bias(long long split) const {
    float* const totals = dynamic_shared<float>() + kWarps * kValues;
    const float own = warp_sum(bias);
    if (threadIdx.x % kLanes == 0) totals[threadIdx.x / kLanes] = own;
    __syncthreads();
    if (threadIdx.x != 0) return;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += totals[warp];
    static_cast<float*>(args.bias_parts)[split * C::kGroups + at.channel] = total;
  }

  __device__ __forceinline__ void compute() {
    bias = 0.0f;
#pragma unroll
    for (int i = 0; i < kValues; ++i) sum[i] = 0.0f;
    Scalar values[2][C::kLoads];  // of one plane, and of the next, on its way
    int step = at.first + C::kFirstLag;
    at.load(step * C::kInputStepD, values[0]);
    // Slot s of the window belongs to position step - kEndLag + s.
#pragma unroll
    for (int slot = 0; slot < C::kSlots; ++slot) window[slot] = load_x(step - C::kEndLag + slot);
#pragma unroll 1  // registers are for sums
    for (; step < at.end + C::kEndLag; ++step) {
      const float next = load_x(step + 1 - C::kFirstLag);
      static_for<C::kInputStepD>([&](auto plane) {
        at.load(step * C::kInputStepD + plane + 1, values[1]);
        accumulate<plane>(values[0]);
        add_own<plane>(values[0], step);
#pragma unroll
        for (int i = 0; i < C::kLoads; ++i) values[0][i] = values[1][i];
      });
#pragma unroll
      for (int slot = 0; slot + 1 < C::kSlots; ++slot) window[slot] = window[slot + 1];
      window[C::kSlots - 1] = next;
    }
    store();
  }
};

template <class Config>
__device__ void run(const Args& args) {
  DepthwiseWeightGrad<Config> kernel{args, Marcher<Config>(args.march, args.dy)};
  kernel.compute();
}

}  // namespace tconv3d
