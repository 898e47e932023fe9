// Forward pass and input gradient of depthwise layers (one input and one output channel per group), by
// multiply-adds.
//
// A thread owns one channel and one position within the plane, and walks along depth (march.cuh). Registers
// hold all weights of the channel, and the sums of the positions along depth that the current planes feed: a
// window that moves on by one position per step. A value of x is therefore loaded once for all taps along
// depth, without shared memory. Neighbouring threads are neighbours along w, or, channels-last, neighbouring
// channels.
#pragma once

#include "epilogue.cuh"
#include "march.cuh"

namespace tconv3d {

template <class C>
struct Depthwise {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;

  const Args& args;
  const Marcher<C> at;
  float weight[C::kTaps];
  float start;         // initial value of a sum: the bias, or zero
  Scalar* y;           // the thread's channel, at its first output within a plane
  int left_h, left_w;  // remaining outputs of the plane from `y` on; 0: the thread stores nothing
  float sum[C::kSlots][C::kPhasesD][C::kPhases];

  __device__ __forceinline__ float load_weight(int channel, int t) const {
    const Strides& strides = args.w_strides;
    return widen<float>(
        static_cast<const Scalar*>(args.w)[channel * strides.n + C::kTapD(t) * strides.d +
                                           C::kTapH(t) * strides.h + C::kTapW(t) * strides.w]);
  }

  // Loads the weights where neighbouring threads have different channels, so that direct loads would not
  // coalesce. The weights pass through shared memory, which is filled in memory order (taps innermost).
  __device__ __forceinline__ void load_weights_of_channels(float* shared) {
    constexpr int kLanes = C::kChannelLanes > 0 ? C::kChannelLanes : 1, kPitch = C::kTaps | 1;
    const int first = at.block % channel_chunks<C>() * kLanes;
    for (int i = threadIdx.x; i < kLanes * C::kTaps; i += C::kThreads) {
      const int channel = i / C::kTaps, t = i % C::kTaps;
      if (first + channel < C::kGroups) shared[channel * kPitch + t] = load_weight(first + channel, t);
    }
    __syncthreads();
    const float* own = shared + (at.channel - first) * kPitch;
#pragma unroll
    for (int t = 0; t < C::kTaps; ++t) {
      weight[t] = own[t];
      ptx::keep(weight[t]);
    }
  }

  __device__ __forceinline__ void prepare() {
    if constexpr (C::kChannelLanes > 0) {
      load_weights_of_channels(dynamic_shared<float>());
    } else {
      static_for<C::kTaps>([&](auto t) { weight[t] = load_weight(at.channel, t); });
    }
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
    start = bias == nullptr ? 0.0f : widen<float>(bias[at.channel]);
    clear(0);
    const int first_h = at.qh * C::kOutputStepH, first_w = at.qw * C::kOutputStepW;
    y = static_cast<Scalar*>(args.y) + at.n * args.y_strides.n + at.channel * args.y_strides.c;
    left_h = at.exists ? args.y_size.h - first_h : 0;
    left_w = at.exists ? args.y_size.w - first_w : 0;
    if (at.exists) y += first_h * args.y_strides.h + first_w * args.y_strides.w;
  }

  __device__ __forceinline__ void clear(int first) {
#pragma unroll
    for (int slot = 0; slot < C::kSlots; ++slot) {
#pragma unroll
      for (int f = 0; f < C::kPhasesD * C::kPhases; ++f) {
        if (slot >= first) sum[slot][f / C::kPhases][f % C::kPhases] = start;
      }
    }
  }

  template <int kPlane>
  __device__ __forceinline__ void accumulate(const Scalar (&values)[C::kLoads]) {
    static_for<C::kTaps>([&](auto t) {
      constexpr int kSlot = C::kTapSlot(t), kPhaseD = C::kTapPhaseD(t), kPhase = C::kTapPhase(t);
      constexpr int kLoad = C::kTapLoad(t);
      if constexpr (C::kTapPlane(t) == kPlane)
        sum[kSlot][kPhaseD][kPhase] += weight[t] * widen<float>(values[kLoad]);
    });
  }

  // Returns kCount neighbouring sums as outputs; `to` is the address of the first output.
  template <int kCount>
  __device__ __forceinline__ Vector<Scalar, kCount> outputs(const float* values, const Scalar* to,
                                                            int present) const {
    float sums[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = values[i];
    const long long offset = to - static_cast<const Scalar*>(args.y);
    finish<C, false>(args, {at.n, at.channel, offset, 1, present}, sums);
    Vector<Scalar, kCount> found;
#pragma unroll
    for (int i = 0; i < kCount; ++i) found.at[i] = Narrow<Scalar>::from(sums[i]);
    return found;
  }

  // Stores the outputs that a step completes: for every phase along depth, the first position of its window.
  __device__ __forceinline__ void store(int step) const {
#pragma unroll
    for (int f = 0; f < C::kPhasesD * C::kPhases; f += C::kPairs ? 2 : 1) {
      const int q = step - C::kLastLag(f / C::kPhases), d = q * C::kOutputStepD + f / C::kPhases;
      if (q < at.first || q >= at.end) continue;
      const int h = f % C::kPhases / C::kOutputStepW, w = f % C::kOutputStepW;
      if (d >= args.y_size.d || h >= left_h || w >= left_w) continue;
      const Index stride_w = C::kStrideY > 0 ? Index(C::kStrideY) : static_cast<Index>(args.y_strides.w);
      Scalar* to = y + d * args.y_strides.d + h * static_cast<Index>(args.y_strides.h) + w * stride_w;
      const float* values = &sum[0][f / C::kPhases][f % C::kPhases];
      if constexpr (C::kPairs) {  // the outputs of two phases along w are neighbours in memory
        store_pair<C::kAligned>(to, outputs<2>(values, to, w + 1 < left_w ? 2 : 1), w + 1 < left_w);
      } else {
        *to = outputs<1>(values, to, 1).at[0];
      }
    }
  }

  __device__ __forceinline__ void move_window() {
#pragma unroll
    for (int slot = 0; slot + 1 < C::kSlots; ++slot) {
#pragma unroll
      for (int f = 0; f < C::kPhasesD * C::kPhases; ++f)
        sum[slot][f / C::kPhases][f % C::kPhases] = sum[slot + 1][f / C::kPhases][f % C::kPhases];
    }
    clear(C::kSlots - 1);
  }

  __device__ __forceinline__ void compute() {
    prepare();
    // Position q is fed by steps q + lag, where the lag runs from kFirstLag to kEndLag.
    Scalar values[2][C::kLoads];  // values of the current plane, and of the next one in flight
    int step = at.first + C::kFirstLag;
    at.load(step * C::kInputStepD, values[0]);
    for (int i = 1; i < C::kAhead; ++i) at.call(step * C::kInputStepD + i);
#pragma unroll 1  // leaves the registers to weights and sums
    for (; step < at.end + C::kEndLag; ++step) {
      static_for<C::kInputStepD>([&](auto plane) {
        at.load(step * C::kInputStepD + plane + 1, values[1]);
        at.call(step * C::kInputStepD + plane + C::kAhead);
        accumulate<plane>(values[0]);
#pragma unroll
        for (int i = 0; i < C::kLoads; ++i) values[0][i] = values[1][i];
      });
      store(step);
      move_window();
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  Depthwise<Config> kernel{args, Marcher<Config>(args.march, args.x, blockIdx.x)};
  kernel.compute();
}

}  // namespace tconv3d
