// Depthwise layers (one channel in, one out, per group): forward pass and input gradient, by multiply-adds.
//
// A thread owns one channel, one position within the plane, and walks along depth (march.cuh). Its weights
// wait in registers, all of them; so do the sums of the positions along depth that the planes at hand feed, a
// window that moves by one position every step. So a value of x is loaded once for all taps along depth, and
// shared memory is not needed.
#pragma once

#include "epilogue.cuh"
#include "march.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* w;
  const void* bias;  // null: no bias
  void* y;
  March march;
  Strides y_strides;
  Strides w_strides;  // n: channel; d, h, w: tap
  Extent y_size;
};

template <class C>
struct Depthwise {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;

  const Args& args;
  const Marcher<C> at;
  float weight[C::kTaps];
  float start;  // of a sum: the bias
  float sum[C::kSlots][C::kPhasesD][C::kPhases];

  __device__ __forceinline__ void prepare() {
    const Scalar* w = static_cast<const Scalar*>(args.w) + at.channel * args.w_strides.n;
    static_for<C::kTaps>([&](auto t) {
      constexpr int kD = C::kTapD(t), kH = C::kTapH(t), kW = C::kTapW(t);
      weight[t] = widen<float>(w[kD * args.w_strides.d + kH * args.w_strides.h + kW * args.w_strides.w]);
    });
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
    start = bias == nullptr ? 0.0f : widen<float>(bias[at.channel]);
    clear(0);
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
  __device__ __forceinline__ void accumulate(const float (&values)[C::kLoads]) {
    static_for<C::kTaps>([&](auto t) {
      constexpr int kSlot = C::kTapSlot(t), kPhaseD = C::kTapPhaseD(t), kPhase = C::kTapPhase(t);
      constexpr int kLoad = C::kTapLoad(t);
      if constexpr (C::kTapPlane(t) == kPlane) sum[kSlot][kPhaseD][kPhase] += weight[t] * values[kLoad];
    });
  }

  static __device__ __forceinline__ Scalar finish(float sum) {
    return Narrow<Scalar>::from(C::Epilogue::apply(sum));
  }

  // The outputs that a step completes: of every phase along depth, the first of its window.
  __device__ __forceinline__ void store(int step) const {
    if (!at.exists) return;
    Scalar* y = static_cast<Scalar*>(args.y) + at.n * args.y_strides.n + at.channel * args.y_strides.c;
    const int first_h = at.qh * C::kOutputStepH, first_w = at.qw * C::kOutputStepW;
#pragma unroll
    for (int f = 0; f < C::kPhasesD * C::kPhases; f += C::kPairs ? 2 : 1) {
      const int q = step - C::kLastLag(f / C::kPhases), d = q * C::kOutputStepD + f / C::kPhases;
      if (q < at.first || q >= at.end) continue;
      const int h = first_h + f % C::kPhases / C::kOutputStepW, w = first_w + f % C::kOutputStepW;
      if (d >= args.y_size.d || h >= args.y_size.h || w >= args.y_size.w) continue;
      Scalar* to = y + (d * static_cast<Index>(args.y_strides.d) + h * static_cast<Index>(args.y_strides.h) +
                        w * static_cast<Index>(args.y_strides.w));
      const float* values = &sum[0][f / C::kPhases][f % C::kPhases];
      if constexpr (C::kPairs) {  // two phases along w, contiguous: neighbours
        const Vector<Scalar, 2> both{finish(values[0]), finish(values[1])};
        const bool second = w + 1 < args.y_size.w;
        if (second && reinterpret_cast<unsigned long long>(to) % sizeof(both) == 0) {
          *reinterpret_cast<Vector<Scalar, 2>*>(to) = both;
        } else {
          to[0] = both.at[0];
          if (second) to[1] = both.at[1];
        }
      } else {
        *to = finish(values[0]);
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
    // Position q is fed by steps q + lag, from the least lag, kFirstLag, to the largest, kEndLag.
    float values[2][C::kLoads];  // of one plane, and of the next, on its way
    int step = at.first + C::kFirstLag;
    at.load(step * C::kInputStepD, values[0]);
#pragma unroll 1  // registers are for weights and sums
    for (; step < at.end + C::kEndLag; ++step) {
      static_for<C::kInputStepD>([&](auto plane) {
        at.load(step * C::kInputStepD + plane + 1, values[1]);
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
  Depthwise<Config> kernel{args, Marcher<Config>(args.march, args.x)};
  kernel.compute();
}

}  // namespace tconv3d
