// Forward pass of depthwise layers (one input and one output channel per group) on channels-last tensors, by
// multiply-adds.
//
// A thread owns kVector neighbouring channels of one line of outputs, and walks along w. Column i of x feeds
// outputs i*stride - padding + tap*dilation, a window of kWindow outputs whose sums are in registers. After
// each column the first `stride` outputs of the window are complete and are stored, and the window moves on.
// The phases of a line of outputs along d and h decide which lines of x feed it. All threads have kRows such
// lines, as many as the phase with most taps needs, and skip those that their own phase lacks. A thread holds
// the weights of its own lines only, so that vectors of weights fit the registers.
//
// Blocks are persistent: a block stages the weights of its channels in shared memory once and processes one
// tile of lines after another. Lines of a tile are neighbours along d and h, so that they share most of their
// loads.
#pragma once

#include "epilogue.cuh"
#include "widen_two.cuh"

namespace tconv3d {

template <class C>
struct DepthwiseLines {
  using Scalar = typename C::Scalar;
  using Floats = Vector<float, C::kVector>;
  static constexpr int kWords = C::kVector * static_cast<int>(sizeof(Scalar)) / 4;
  using Values = Vector<unsigned, kWords>;  // numbers of a thread's channels, in memory format

  static constexpr int kRows = C::kRowsD * C::kRowsH;  // lines of x that feed a line of outputs
  static constexpr unsigned kAllRows = kRows < 32 ? (1u << kRows) - 1 : ~0u;
  static constexpr int kTaps = C::kKernelD * C::kKernelH * C::kKernelW;
  static constexpr int kChannels = C::kLanes * C::kVector;  // channels per block
  static constexpr int kChunks = (C::kGroups + kChannels - 1) / kChannels;
  static constexpr int kReach = C::kDilationW * (C::kKernelW - 1);
  static constexpr int kWindow = kReach + 1 > C::kStrideW ? kReach + 1 : C::kStrideW;
  static constexpr int kPitch = kChannels + 4;  // floats from tap to tap of the weights in shared memory
  // One thread prefetches a sector of 32 bytes.
  static constexpr int kCalledItems = 32 / static_cast<int>(sizeof(Scalar));
  static_assert(C::kGroups % C::kVector == 0 && kPitch % C::kVector == 0, "whole vectors");
  static_assert(C::kLanes * C::kTileD * C::kTileH <= C::kThreads, "a thread has one line");
  static_assert(kRows <= 32, "lines fit a mask");

  const Args& args;
  float* weights;          // shared memory, [tap][kPitch]
  int chunk, lane, own;    // chunk of channels, vector of the chunk, line of the tile
  const Scalar* x[kRows];  // lines of x that feed the thread's line, at the thread's channels
  unsigned inside;         // bit r: line r lies inside x
  const Scalar* called;    // line of x that this thread prefetches into L2; null: none
  Scalar* y;               // line of outputs, at the thread's channels
  int item;                // batch item of the line
  int first, end;          // range of the thread's outputs along w, empty if there is nothing to do
  Floats start;            // initial value of the sums: the bias, or zero
  Floats weight[kRows][C::kKernelW];
  Floats sum[kWindow];

  __device__ __forceinline__ int first_channel() const { return (chunk * C::kLanes + lane) * C::kVector; }
  __device__ __forceinline__ long long stride_x() const {
    return C::kStrideX > 0 ? C::kStrideX : args.x_strides.w;
  }
  __device__ __forceinline__ long long stride_y() const {
    return C::kStrideY > 0 ? C::kStrideY : args.y_strides.w;
  }

  static __device__ __forceinline__ float value(const Values& values, int v) {
    if constexpr (sizeof(Scalar) == 4) {
      return ptx::bits_to_float(values.at[v]);
    } else {
      return Widen<Scalar>::of(values.at[v / 2], v % 2 == 1);
    }
  }
  // Returns the sums of an output at `to`, all channels of the thread, in memory format.
  __device__ __forceinline__ Values results(Floats sums, const Scalar* to) const {
    const long long offset = to - static_cast<const Scalar*>(args.y);
    finish<C, true>(args, {item, first_channel(), offset, 1, C::kVector}, sums.at);
    Values out;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(Scalar) == 4) {
        out.at[i] = ptx::float_to_bits(sums.at[i]);
      } else {
        out.at[i] = Narrow<Scalar>::two(sums.at[2 * i], sums.at[2 * i + 1]);
      }
    }
    return out;
  }

  // Loads the weights of the block's channels into shared memory and the bias into registers. Global memory
  // is read in memory order (taps innermost); shared memory has channels innermost.
  __device__ __forceinline__ void stage_weights() {
    const Scalar* w = static_cast<const Scalar*>(args.w);
    for (int i = threadIdx.x; i < kChannels * kTaps; i += C::kThreads) {
      const int channel = i / kTaps, tap = i % kTaps;
      const int tap_w = tap % C::kKernelW, line = tap / C::kKernelW;
      const long long offset = line / C::kKernelH * args.w_strides.d + line % C::kKernelH * args.w_strides.h +
                               tap_w * args.w_strides.w;
      const int of_all = chunk * kChannels + channel;
      if (of_all < C::kGroups)
        weights[tap * kPitch + channel] = widen<float>(w[of_all * args.w_strides.n + offset]);
    }
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
    const bool exists = bias != nullptr && first_channel() < C::kGroups;
#pragma unroll
    for (int v = 0; v < C::kVector; ++v)
      start.at[v] = exists ? widen<float>(bias[first_channel() + v]) : 0.0f;
  }

  // Finds the thread's line of outputs, and the lines of x that feed it, for one unit of work.
  __device__ __forceinline__ void locate(int unit) {
    int next = divide(unit, args.parts);
    const int part = unit - next * static_cast<int>(args.parts.divisor);
    int rest = next;
    next = divide(rest, args.tiles_h);
    const int tile_h = rest - next * static_cast<int>(args.tiles_h.divisor);
    rest = next;
    const int n = divide(rest, args.tiles_d);
    const int tile_d = rest - n * static_cast<int>(args.tiles_d.divisor);
    const int d = tile_d * C::kTileD + own / C::kTileH, h = tile_h * C::kTileH + own % C::kTileH;
    const bool exists =
        own < C::kTileD * C::kTileH && first_channel() < C::kGroups && d < args.y_size.d && h < args.y_size.h;
    first = part * args.length;
    end = args.y_size.w - first < args.length ? args.y_size.w : first + args.length;
    if (!exists) end = first;
    item = n;
    y = static_cast<Scalar*>(args.y) + n * args.y_strides.n;
    if (exists) y += d * args.y_strides.d + h * args.y_strides.h + first_channel();
    find_lines(n, d, h, exists);
  }

  // Finds the lines of x that feed output line (d, h), and loads their weights.
  __device__ __forceinline__ void find_lines(int n, int d, int h, bool exists) {
    const int q_d = d / C::kStrideD, phase_d = d % C::kStrideD;
    const int q_h = h / C::kStrideH, phase_h = h % C::kStrideH;
    const Scalar* item = static_cast<const Scalar*>(args.x) + n * args.x_strides.n;
    const bool calls = exists && phase_d == 0 && phase_h == 0 && q_d < args.x_size.d && q_h < args.x_size.h &&
                       lane * C::kVector % kCalledItems == 0;
    called = calls ? item + q_d * args.x_strides.d + q_h * args.x_strides.h + first_channel() : nullptr;
    inside = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int j_d = r / C::kRowsH, j_h = r % C::kRowsH;
      const bool taps = exists && j_d < C::kCountD(phase_d) && j_h < C::kCountH(phase_h);
      const int x_d = q_d + C::kFirstOffsetD(phase_d) + j_d * C::kOffsetStepD;
      const int x_h = q_h + C::kFirstOffsetH(phase_h) + j_h * C::kOffsetStepH;
      const bool there = taps && x_d >= 0 && x_d < args.x_size.d && x_h >= 0 && x_h < args.x_size.h;
      inside |= static_cast<unsigned>(there) << r;
      x[r] = there ? item + x_d * args.x_strides.d + x_h * args.x_strides.h + first_channel() : item;
      const int tap = ((C::kFirstTapD(phase_d) + j_d * C::kTapStepD) * C::kKernelH + C::kFirstTapH(phase_h) +
                       j_h * C::kTapStepH) *
                      C::kKernelW;
#pragma unroll
      for (int t = 0; t < C::kKernelW; ++t) {
        weight[r][t] = Floats{};
        if (taps) weight[r][t] = load_vector<C::kVector>(weights + (tap + t) * kPitch + lane * C::kVector);
#pragma unroll
        for (int v = 0; v < C::kVector; ++v) ptx::keep(weight[r][t].at[v]);
      }
    }
  }

  // Loads `column` of every line, which lies `behind` columns after the lines' pointers. kWhole promises that
  // the column and all lines exist.
  template <bool kWhole>
  __device__ __forceinline__ void load(int column, int behind, Values (&values)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!kWhole) values[r] = Values{};
      if (kWhole || (column < args.x_size.w && (inside >> r & 1)))
        values[r] = load_vector<kWords>(reinterpret_cast<const unsigned*>(x[r] + behind * stride_x()));
    }
  }
  __device__ __forceinline__ void call(int column) const {
    if (called != nullptr && column < args.x_size.w) ptx::call_into_l2(called + column * stride_x());
  }

  __device__ __forceinline__ void accumulate(const Values (&values)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int v = 0; v < C::kVector; ++v) {
        const float one = value(values[r], v);
#pragma unroll
        for (int t = 0; t < C::kKernelW; ++t) sum[t * C::kDilationW].at[v] += weight[r][t].at[v] * one;
      }
    }
  }

  // Stores the `stride` outputs that a column completes, from output `w` on, and moves the window on. kWhole
  // promises that all of these outputs are the thread's.
  template <bool kWhole>
  __device__ __forceinline__ void store(Scalar* to, int w) {
#pragma unroll
    for (int j = 0; j < C::kStrideW; ++j) {
      if (kWhole || (w + j >= first && w + j < end))
        store_vector(reinterpret_cast<unsigned*>(to + j * stride_y()), results(sum[j], to + j * stride_y()));
    }
#pragma unroll
    for (int s = 0; s < kWindow; ++s)
      sum[s] = s + C::kStrideW < kWindow ? sum[s + C::kStrideW < kWindow ? s + C::kStrideW : 0] : start;
  }

  // Processes kAhead columns, whose values are in registers, and loads the following kAhead columns.
  template <bool kWhole>
  __device__ __forceinline__ void step(int column, Scalar* to, Values (&values)[C::kAhead][kRows]) {
    static_for<C::kAhead>([&](auto i) {
      accumulate(values[i]);
      load<kWhole>(column + i + C::kAhead, i, values[i]);
      call(column + i + C::kCalled);
      store<kWhole>(to + i * C::kStrideW * stride_y(), (column + i) * C::kStrideW - C::kPaddingW);
    });
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] += C::kAhead * stride_x();
  }

  // Output w sums columns i with i*stride - padding <= w <= i*stride - padding + kReach. It is stored after
  // the last column i with i*stride - padding <= w, even if no tap leads from i to w.
  __device__ __forceinline__ void walk() {
    const int reach = first + C::kPaddingW - kReach;
    const int storing = (first + C::kPaddingW) / C::kStrideW;
    const int feeding = reach > 0 ? (reach + C::kStrideW - 1) / C::kStrideW : 0;
    int column = feeding < storing ? feeding : storing;
    const int last = end > first ? (end - 1 + C::kPaddingW) / C::kStrideW : -1;
    // A step that begins at a column from `whole` to `last_whole` needs no bounds checks: all of its outputs
    // are the thread's, and all of its loads lie inside x.
    const int whole = (first + C::kPaddingW + C::kStrideW - 1) / C::kStrideW;
    int last_whole = (end + C::kPaddingW) / C::kStrideW - C::kAhead;
    if (last_whole > args.x_size.w - 2 * C::kAhead) last_whole = args.x_size.w - 2 * C::kAhead;
    if (inside != kAllRows) last_whole = -1;
    Values values[C::kAhead][kRows];
#pragma unroll
    for (int s = 0; s < kWindow; ++s) sum[s] = start;
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] += column * stride_x();
#pragma unroll
    for (int i = 0; i < C::kAhead; ++i) load<false>(column + i, i, values[i]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] += C::kAhead * stride_x();
    for (int i = C::kAhead; i < C::kCalled; ++i) call(column + i);
    Scalar* to = y + (column * C::kStrideW - C::kPaddingW) * stride_y();
#pragma unroll 1
    for (; column <= last; column += C::kAhead) {
      if (column >= whole && column <= last_whole) {
        step<true>(column, to, values);
      } else {
        step<false>(column, to, values);
      }
      to += C::kAhead * C::kStrideW * stride_y();
    }
  }

  __device__ __forceinline__ void compute() {
    stage_weights();
    __syncthreads();
    for (int unit = blockIdx.x / kChunks; unit < args.units; unit += gridDim.x / kChunks) {
      locate(unit);
      walk();
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = DepthwiseLines<Config>;
  Kernel kernel{args, dynamic_shared<float>()};
  kernel.chunk = static_cast<int>(blockIdx.x) % Kernel::kChunks;
  kernel.lane = static_cast<int>(threadIdx.x) % Config::kLanes;
  kernel.own = static_cast<int>(threadIdx.x) / Config::kLanes;
  kernel.compute();
}

}  // namespace tconv3d
