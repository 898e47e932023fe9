// Code that the kernels of GroupNorm's gradient, and of the ReLU's before it, share. They process strips
// (sweep.cuh).
//
//   dx = rstd * (dy * weight - S/M - xhat * T/M),   S = sum of weight * dy,  T = sum of weight * dy * xhat
//      = dy * (rstd * weight) + (x - mean) * slope + constant
//
// Both sums run over the M values of a norm group. A first pass over dy and x computes the sums, a small step
// computes slope and constant, and a second pass computes dx. The input of the ReLU has the gradient dz = dx
// where x > 0, else zero. The arguments have the same names in all kernels:
//
//   dy, x, dz     dense activations; x is the input of the norm
//   statistics    [2][batch][norm groups]: means, then reciprocal deviations
//   weight        per channel; null: one
//   sums          [batch][channels][slots] pairs: sum of dy, sum of dy * xhat
//   by_channel    [batch][2][channels]: sum of dy * xhat (weight gradient), sum of dy (bias gradient)
//   coefficients  [batch][norm groups] pairs: slope, constant
//   bias_sums     [batch][slots][channels]: sum of dz, the gradient of a bias added to z; null: not wanted
//   groups        number of norm groups
//   per_group     channels per norm group
#pragma once

#include "sweep.cuh"

namespace tconv3d {

// Writes a pair of sums or coefficients. With kAtOnce, other blocks poll for the pair, whose bits are all
// ones until it is written, so that it is written as one 64-bit word.
template <bool kAtOnce, class Acc>
__device__ __forceinline__ void write_pair(Vector<Acc, 2>* to, const Vector<Acc, 2>& pair) {
  if constexpr (kAtOnce) {
    static_assert(sizeof(Acc) == 4, "a pair is one word");
    const unsigned long long word = static_cast<unsigned long long>(ptx::float_to_bits(pair.at[1])) << 32 |
                                    ptx::float_to_bits(pair.at[0]);
    // Two NaNs whose bits are all ones would look as if not written, so that two other NaNs replace them.
    ptx::write_word(to, word == ~0ull ? word >> 1 : word);
  } else {
    *to = pair;
  }
}
// Reads a pair of sums or coefficients. With kAtOnce, waits until it is written.
template <bool kAtOnce, class Acc>
__device__ __forceinline__ Vector<Acc, 2> read_pair(const Vector<Acc, 2>* from) {
  if constexpr (kAtOnce) {
    const unsigned long long word = ptx::read_when_written(from);
    return {ptx::bits_to_float(static_cast<unsigned>(word)),
            ptx::bits_to_float(static_cast<unsigned>(word >> 32))};
  } else {
    return *from;
  }
}

template <class C, int kCount>
struct NormItems {
  Vector<typename C::Gradient, kCount> dy;
  Vector<typename C::Scalar, kCount> x;
};

// The first pass over the strip of a thread.
template <class C>
struct NormSums {
  using Scalar = typename C::Scalar;
  using Gradient = typename C::Gradient;
  using Acc = typename C::Acc;

  const Gradient* dy;  // start of the strip, at the thread's first channel
  const Scalar* x;
  Acc mean[Sweep<C>::kOwn];
  Acc sums[Sweep<C>::kOwn][2] = {};  // sums of dy, and of dy * (x - mean)

  template <int kCount>
  __device__ __forceinline__ NormItems<C, kCount> load(int at) const {
    return {load_vector<kCount>(dy + at), load_vector<kCount>(x + at)};
  }
  template <int kCount>
  __device__ __forceinline__ void use(int, const NormItems<C, kCount>& items) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int own = C::kChannelsLast ? i : 0;
      const Acc gradient = widen<Acc>(items.dy.at[i]);
      sums[own][0] += gradient;
      sums[own][1] += gradient * (widen<Acc>(items.x.at[i]) - mean[own]);
    }
  }
};

// Computes and writes the sums of this block's strips.
template <class C, bool kAtOnce, class Args>
__device__ __forceinline__ void sum_strip(const Args& args, const Sweep<C>& sweep) {
  using Acc = typename C::Acc;
  NormSums<C> body{static_cast<const typename C::Gradient*>(args.dy) + sweep.start,
                   static_cast<const typename C::Scalar*>(args.x) + sweep.start};
  const Acc* means = static_cast<const Acc*>(args.statistics);
  const Acc* rstds = means + static_cast<long long>(args.strips.batch) * args.groups;
  const auto group = [&](int i) {
    return static_cast<long long>(sweep.n) * args.groups + (sweep.channel + i) / args.per_group;
  };
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    if (sweep.exists) body.mean[i] = means[group(i)];
  }
  sweep.run(body);
  sweep.add_up(body.sums, dynamic_shared<Acc>());
  if (!sweep.speaks) return;
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    const long long row = static_cast<long long>(sweep.n) * args.strips.channels + sweep.channel + i;
    write_pair<kAtOnce>(static_cast<Vector<Acc, 2>*>(args.sums) + row * args.strips.slots + sweep.slot,
                        Vector<Acc, 2>{body.sums[i][0], body.sums[i][1] * rstds[group(i)]});
  }
}

// Computes the coefficients between the passes: a block adds the sums of the channels of one norm group
// (`group` counts over all batch items), in an order that depends on their number only.
template <class C, bool kAtOnce, class Args>
__device__ __forceinline__ void find_coefficients(const Args& args, int group) {
  using Acc = typename C::Acc;
  constexpr int kWarps = C::kThreads / 32;
  double* shared = dynamic_shared<double>();
  const Strips& strips = args.strips;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n = group / args.groups, first = group % args.groups * args.per_group;
  Acc* by_channel = static_cast<Acc*>(args.by_channel) + static_cast<long long>(n) * 2 * strips.channels;
  double all[2] = {0, 0};  // weighted sums of this warp's channels
  for (int channel = first + warp; channel < first + args.per_group; channel += kWarps) {
    const long long row = static_cast<long long>(n) * strips.channels + channel;
    const Vector<Acc, 2>* parts = static_cast<const Vector<Acc, 2>*>(args.sums) + row * strips.slots;
    double own[2] = {0, 0};
    for (int i = lane; i < strips.slots; i += 32) {
      const Vector<Acc, 2> part = read_pair<kAtOnce>(parts + i);
      own[0] += part.at[0];
      own[1] += part.at[1];
    }
    own[0] = warp_sum(own[0]);
    own[1] = warp_sum(own[1]);
    if (lane == 0) {
      by_channel[channel] = static_cast<Acc>(own[1]);
      by_channel[strips.channels + channel] = static_cast<Acc>(own[0]);
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
  const long long norm_groups = static_cast<long long>(strips.batch) * args.groups;
  const double rstd = static_cast<const Acc*>(args.statistics)[norm_groups + group];
  const double values = static_cast<double>(strips.volume) * args.per_group;
  write_pair<kAtOnce>(static_cast<Vector<Acc, 2>*>(args.coefficients) + group,
                      Vector<Acc, 2>{static_cast<Acc>(-rstd * rstd * all[1] / values),
                                     static_cast<Acc>(-rstd * all[0] / values)});
}

// The second pass over the strip of a thread. With kAtOnce, first passes run at the same time and their
// tensors are to stay in L2, so that this pass loads and stores with streaming cache hints. With kKept, dy
// and x are in shared memory.
template <class C, bool kAtOnce, bool kKept = false>
struct NormGrad {
  using Scalar = typename C::Scalar;
  using Gradient = typename C::Gradient;
  using Acc = typename C::Acc;

  const Gradient* dy;  // start of the strip, at the thread's first channel
  const Scalar* x;
  Scalar* dz;
  Acc mean[Sweep<C>::kOwn], scale[Sweep<C>::kOwn], slope[Sweep<C>::kOwn], constant[Sweep<C>::kOwn];
  Acc sums[Sweep<C>::kOwn][1] = {};

  template <class Args>
  __device__ __forceinline__ void prepare(const Args& args, const Sweep<C>& sweep) {
    const long long norm_groups = static_cast<long long>(args.strips.batch) * args.groups;
    const Acc* statistics = static_cast<const Acc*>(args.statistics);
    const Vector<Acc, 2>* coefficients = static_cast<const Vector<Acc, 2>*>(args.coefficients);
#pragma unroll
    for (int i = 0; i < Sweep<C>::kOwn; ++i) {
      if (!sweep.exists) continue;
      const int channel = sweep.channel + i;
      const long long group = static_cast<long long>(sweep.n) * args.groups + channel / args.per_group;
      mean[i] = statistics[group];
      scale[i] = statistics[norm_groups + group];
      if (args.weight)
        scale[i] *= widen<Acc>(static_cast<const typename C::Parameter*>(args.weight)[channel]);
      const Vector<Acc, 2> pair = read_pair<kAtOnce>(coefficients + group);
      slope[i] = pair.at[0];
      constant[i] = pair.at[1];
    }
  }
  template <int kCount>
  __device__ __forceinline__ NormItems<C, kCount> load(int at) const {
    if constexpr (kAtOnce) return {load_passing<kCount>(dy + at), load_passing<kCount>(x + at)};
    return {load_vector<kCount>(dy + at), load_vector<kCount>(x + at)};
  }
  template <int kCount>
  __device__ __forceinline__ void use(int at, const NormItems<C, kCount>& items) {
    Vector<Scalar, kCount> results;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int own = C::kChannelsLast ? i : 0;
      const Acc value = widen<Acc>(items.x.at[i]);
      const Acc whole =
          widen<Acc>(items.dy.at[i]) * scale[own] + ((value - mean[own]) * slope[own] + constant[own]);
      const Acc passed = value <= Acc(0) ? Acc(0) : whole;  // a NaN passes, as in PyTorch
      results.at[i] = Narrow<Scalar>::from(passed);
      sums[own][0] += passed;
    }
    if constexpr (kAtOnce || kKept) {
      store_passing(dz + at, results);
    } else {
      *reinterpret_cast<Vector<Scalar, kCount>*>(dz + at) = results;
    }
  }
};

// Computes and writes dz of this block's strips, and the sums of dz.
template <class C, bool kAtOnce, class Args>
__device__ __forceinline__ void grad_strip(const Args& args, const Sweep<C>& sweep) {
  using Acc = typename C::Acc;
  NormGrad<C, kAtOnce> body{static_cast<const typename C::Gradient*>(args.dy) + sweep.start,
                            static_cast<const typename C::Scalar*>(args.x) + sweep.start,
                            static_cast<typename C::Scalar*>(args.dz) + sweep.start};
  body.prepare(args, sweep);
  sweep.run(body);
  if (args.bias_sums == nullptr) return;
  sweep.add_up(body.sums, dynamic_shared<Acc>());
  if (!sweep.speaks) return;
  const long long row = static_cast<long long>(sweep.n) * args.strips.slots + sweep.slot;
#pragma unroll
  for (int i = 0; i < Sweep<C>::kOwn; ++i) {
    static_cast<Acc*>(args.bias_sums)[row * args.strips.channels + sweep.channel + i] = body.sums[i][0];
  }
}

}  // namespace tconv3d
