// Adds the parts that split kernels leave as [taps][out][in], always in the same order, and writes them as a
// weight, [in][out][taps]: a block turns a tile of taps and input channels of one output channel in shared
// memory, so that reading and writing are both contiguous. kSlices warps share the parts of a tap. kBias: the
// last blocks add the parts of the bias's gradient.
#pragma once

#include "common.cuh"

namespace tconv3d {

struct Args {
  const void* parts;  // [splits][taps][out][in]
  void* result;
  const void* bias_parts;  // [bias_splits][channels]
  void* bias;
  long long stride_in, stride_out, stride_tap;
  long long count;  // of a part
  int splits, taps, out, in;
  int bias_splits, channels;
};

// Eight channels of a block, 32 threads each.
template <class C>
__device__ __forceinline__ void sum_bias(const Args& args, int block, float* sums) {
  constexpr int kChannels = 8, kThreads = 32;
  static_assert(C::kThreads == kChannels * kThreads);
  const int thread = static_cast<int>(threadIdx.x) / kChannels,
            of = static_cast<int>(threadIdx.x) % kChannels;
  const int channel = block * kChannels + of;
  float sum = 0.0f;
  if (channel < args.channels) {
    const float* const parts = static_cast<const float*>(args.bias_parts) + channel;
#pragma unroll 4
    for (int i = thread; i < args.bias_splits; i += kThreads) {
      sum += parts[static_cast<long long>(i) * args.channels];
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (thread != 0 || channel >= args.channels) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads; ++i) sum += sums[i * kChannels + of];
  static_cast<typename C::Scalar*>(args.bias)[channel] = Narrow<typename C::Scalar>::from(sum);
}

template <class C>
__device__ void run(const Args& args) {
  constexpr int kLanes = 32, kTapWarps = C::kThreads / kLanes / C::kSlices;
  static_assert(C::kTaps % kTapWarps == 0 && C::kThreads % C::kTaps == 0);
  static_assert(C::kSlices * C::kTaps >= 8, "room for the sums of a bias");
  __shared__ float tile[C::kSlices][C::kTaps][kLanes + 1];  // one word more: turning meets no bank twice
  const int tap_tiles = (args.taps + C::kTaps - 1) / C::kTaps, in_tiles = (args.in + kLanes - 1) / kLanes;
  const int first_tap = static_cast<int>(blockIdx.x) % tap_tiles * C::kTaps;
  const int rest = static_cast<int>(blockIdx.x) / tap_tiles;
  const int first_in = rest % in_tiles * kLanes, out = rest / in_tiles;
  ptx::wait_for_previous_launch();
  if constexpr (C::kBias) {
    if (out >= args.out) {
      sum_bias<C>(args, static_cast<int>(blockIdx.x) - tap_tiles * in_tiles * args.out, &tile[0][0][0]);
      return;
    }
  }
  const int warp = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  const int slice = warp % C::kSlices;
  // A warp's taps side by side, so that many loads are on their way.
  constexpr int kOwn = C::kTaps / kTapWarps;
  const int own_tap = warp / C::kSlices, in = first_in + lane, taps = args.taps - first_tap - own_tap;
  const long long between = static_cast<long long>(kTapWarps) * args.out * args.in;
  const float* const parts = static_cast<const float*>(args.parts) +
                             (static_cast<long long>(first_tap + own_tap) * args.out + out) * args.in + in;
  float sums[kOwn] = {};
  if (in < args.in) {
#pragma unroll 4
    for (int split = slice; split < args.splits; split += C::kSlices) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (i * kTapWarps < taps) sums[i] += parts[split * args.count + i * between];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) tile[slice][i * kTapWarps + own_tap][lane] = sums[i];
  __syncthreads();
  const int tap = static_cast<int>(threadIdx.x) % C::kTaps;
  for (int i = static_cast<int>(threadIdx.x) / C::kTaps; i < kLanes; i += C::kThreads / C::kTaps) {
    if (first_tap + tap >= args.taps || first_in + i >= args.in) continue;
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < C::kSlices; ++from) sum += tile[from][tap][i];
    static_cast<typename C::Scalar*>(args.result)[(first_in + i) * args.stride_in + out * args.stride_out +
                                                  (first_tap + tap) * args.stride_tap] =
        Narrow<typename C::Scalar>::from(sum);
  }
}

}  // namespace tconv3d
