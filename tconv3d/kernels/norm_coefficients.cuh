// Between the two passes of GroupNorm's gradient. A block has one norm group of one batch item: it adds up
// the first pass's sums of its channels, and leaves what the second pass multiplies with:
//
//   dx = rstd * (dy * weight - S/M - xhat * T/M),   S = sum of weight * dy,  T = sum of weight * dy * xhat
//      = dy * (rstd * weight) + (x - mean) * slope + constant
//
// with both sums over the M values of the norm group.
#pragma once

#include "cursor.cuh"

namespace tconv3d {

struct Args {
  const void* sums;        // [batch][channels][slots] pairs: of dy, of dy * xhat
  const void* statistics;  // [2][batch][norm groups]: means, then reciprocal deviations
  const void* weight;      // per channel; null: one
  void* by_channel;        // [batch][2][channels]: of dy * xhat (the weight's gradient), of dy (the bias's)
  void* coefficients;      // [2][batch][norm groups]: slopes, then constants
  long long volume;
  int batch, channels, slots, groups, per_group;
};

template <class C>
__device__ void run(const Args& args) {
  using Acc = typename C::Acc;
  constexpr int kWarps = C::kThreads / 32;
  double* shared = dynamic_shared<double>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n = blockIdx.x / args.groups, first = blockIdx.x % args.groups * args.per_group;
  Acc* by_channel = static_cast<Acc*>(args.by_channel) + static_cast<long long>(n) * 2 * args.channels;
  double all[2] = {0, 0};  // of this warp's channels
  for (int channel = first + warp; channel < first + args.per_group; channel += kWarps) {
    const long long row = static_cast<long long>(n) * args.channels + channel;
    const Vector<Acc, 2>* parts = static_cast<const Vector<Acc, 2>*>(args.sums) + row * args.slots;
    double own[2] = {0, 0};
    for (int i = lane; i < args.slots; i += 32) {
      own[0] += parts[i].at[0];
      own[1] += parts[i].at[1];
    }
    own[0] = warp_sum(own[0]);
    own[1] = warp_sum(own[1]);
    if (lane == 0) {
      by_channel[channel] = static_cast<Acc>(own[1]);
      by_channel[args.channels + channel] = static_cast<Acc>(own[0]);
    }
    const double weight =
        args.weight ? widen<double>(static_cast<const typename C::Parameter*>(args.weight)[channel]) : 1.0;
    all[0] += weight * own[0];
    all[1] += weight * own[1];
  }
  if (lane == 0) {
    shared[2 * warp] = all[0];
    shared[2 * warp + 1] = all[1];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int other = 1; other < kWarps; ++other) {
    all[0] += shared[2 * other];
    all[1] += shared[2 * other + 1];
  }
  const long long norm_groups = static_cast<long long>(args.batch) * args.groups;
  const double rstd = static_cast<const Acc*>(args.statistics)[norm_groups + blockIdx.x];
  const double values = static_cast<double>(args.volume) * args.per_group;
  Acc* coefficients = static_cast<Acc*>(args.coefficients);
  coefficients[blockIdx.x] = static_cast<Acc>(-rstd * rstd * all[1] / values);
  coefficients[norm_groups + blockIdx.x] = static_cast<Acc>(-rstd * all[0] / values);
}

}  // namespace tconv3d
