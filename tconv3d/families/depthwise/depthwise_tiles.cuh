// Forward pass and input gradient of depthwise layers and of layers with small groups, with large kernels, by
// multiply-adds.
//
// A thread owns one channel of y and a tile of kTileH x kTileW positions q of a plane, with all their phases
// along h and w. A block marches along depth; planes of x arrive in a ring in shared memory (slab.cuh). A
// product of a plane with the kKernelH x kKernelW weights of one tap along depth loads these weights into
// registers, then reads the rows of the plane one after another, each once: a weight serves all positions of
// the tile, and a value of x all taps along h and w that read it.
//
// If x has one plane for each position (kWindow is 1), the ring holds all planes that a position reads, and
// the sums of one output plane are in registers. If positions are several planes apart (the input gradient of
// a strided layer), these planes would not fit: each plane is then used once, for all taps along depth, and
// the sums of the kWindow positions along depth that it feeds are in registers. With kByRows, a thread takes
// one row of taps after another in a loop that is not unrolled: the weights of this row are in registers, for
// all taps along depth that read the plane, and it reads one row of the plane for each row of its tile. The
// loop has some 500 instructions, where all rows of taps unrolled have 6000.
//
// With kOwn 2 a thread has two neighbouring channels of channels-last tensors, whose values, weights and
// outputs it loads and stores together.
//
// With kGathers the tiles of a block span a line of a contiguous y, and the block's outputs of a plane leave
// through shared memory as runs of whole lines (whole_lines.cuh), wherever lines begin.
#pragma once

#include "epilogue.cuh"
#include "slab.cuh"
#include "whole_lines.cuh"

namespace tconv3d {

template <class C>
struct DepthwiseTiles {
  using Scalar = typename C::Scalar;

  struct Planes {  // Describes the planes of x in shared memory.
    using Scalar = typename C::Scalar;
    static constexpr bool kLast = C::kLast;
    static constexpr int kThreads = C::kThreads, kChannels = C::kChannelsX, kGrain = C::kGrain;
    static constexpr int kRows = (C::kTilesH * C::kTileH - 1) * C::kInputStepH + C::kSpanH;
    static constexpr int kCols = C::kBefore + (C::kTilesW * C::kTileW - 1) * C::kInputStepW + C::kSpanW;
    static constexpr int kPieces = C::kPieces, kStride = C::kPieceStride, kBefore = C::kBefore;
    static constexpr int kReads = (C::kTileW - 1) * C::kInputStepW + C::kSpanW;
    static constexpr int kSkewRows = C::kTileH * C::kInputStepH, kSkew = C::kSkew;
    static constexpr int kChannelSkew = C::kChannelSkew, kRawPieces = C::kRawPieces;
  };
  struct Outputs {  // Describes the outputs of a plane in shared memory.
    using Scalar = typename C::Scalar;
    static constexpr int kThreads = C::kThreads, kChannels = C::kChannels;
    static constexpr int kLines = C::kTilesH * C::kTileH * C::kPhasesH;
    static constexpr int kLine = C::kTileW * C::kPhasesW, kChunks = C::kTilesW;
    static constexpr int kTail = C::kTail > 0 ? C::kTail : kLine;
    static constexpr bool kAligned = C::kAlignedLines;
  };
  static constexpr int kRows = (C::kTileH - 1) * C::kInputStepH + C::kSpanH;  // rows that a thread reads
  static constexpr bool kRaw = C::kRawPieces > 0;  // planes arrive as they lie in memory
  // Elements of a plane as it lies in memory: [channel][row][piece].
  static constexpr int kRawSize =
      Planes::kChannels * Planes::kRows * C::kRawPieces * 16 / static_cast<int>(sizeof(Scalar));
  static constexpr int kRing = C::kWindow > 1 ? (kRaw ? 1 : 2) : C::kSpanD + C::kInputStepD;
  static_assert(!kRaw || C::kWindow > 1, "a plane is shifted once, and used once");
  static constexpr int kPhases = C::kPhasesH * C::kPhasesW;
  static constexpr int kOutputs = C::kTileH * C::kTileW * kPhases;  // outputs of a plane for one channel
  static constexpr int kSums = kOutputs * C::kOwn;                  // neighbouring channels are neighbours
  static constexpr int kLanes = C::kChannels / C::kOwn;             // threads of a tile
  static __device__ constexpr bool empty_phases() {
    for (int phase = 0; phase < C::kPhasesD; ++phase)
      if (C::kCountD(phase) == 0) return true;
    return false;
  }
  static constexpr bool kEmptyPhases = empty_phases();  // outputs of these planes are the bias
  static constexpr int kPlaneTaps = C::kKernelH * C::kKernelW;
  static constexpr int kRowPitch = C::kByRows ? (C::kKernelW + 3) / 4 * 4 : C::kKernelW;  // contiguous
  static constexpr int kWeightPitch = (C::kKernelH * kRowPitch + 3) / 4 * 4;  // floats of a tap along depth
  static constexpr int kChannelStep = C::kLast ? 1 : Slab<Planes>::kPlane;    // from channel to channel of x
  static_assert(C::kWindow > 1 || !C::kByRows, "a window of positions");
  static_assert(C::kOwn == 1 || (C::kLast && !C::kByRows && C::kOuts == 1 && C::kReduced == 1),
                "neighbouring channels of a thread are those of a depthwise layer");
  static_assert(C::kChannels % C::kOuts == 0 && C::kChannelsX == C::kChannels / C::kOuts * C::kReduced,
                "a block has whole groups");

  const Args& args;
  const Slab<Planes> slab;
  const SlabReader<Planes, C::kOwn> reader;
  // Weights in shared memory: [channel of y][of x][tap d][kWeightPitch], or [of x][tap d][taps h, w][of y].
  const float* weights;
  Scalar* raw;  // a plane as it lies in memory
  WholeLines<Outputs> lines;
  Scalar* run;           // the block's first output in plane 0 of its first channel
  int block_line;        // the block's first line of a plane
  int block_channel;     // the block's first channel
  int own_channel;       // the thread's channel, counted from the block's first
  Scalar* y;             // the thread's channel of the batch item
  int item;              // batch item
  int channel;           // the thread's channel of y
  bool works;            // the thread has a tile with positions inside y
  bool whole;            // all outputs of the tile are inside of a plane of y
  int q_h, q_w;          // first position of the thread's tile
  int first, end;        // positions along depth that the block computes
  float start[C::kOwn];  // initial value of the sums of a channel: the bias, or zero

  static __device__ __forceinline__ int sum_at(int q_h, int q_w, int phase_h, int phase_w) {
    return ((q_h * C::kPhasesH + phase_h) * C::kTileW + q_w) * C::kPhasesW + phase_w;
  }

  // Loads the weights of tap `tap` along depth, counted through the channels of x.
  __device__ __forceinline__ void load_weights(int tap, float (&weight)[kPlaneTaps * C::kOwn]) const {
    if constexpr (C::kLast) {
#pragma unroll
      for (int t = 0; t < kPlaneTaps; ++t) {
        const auto own = load_vector<C::kOwn>(weights + (tap * kPlaneTaps + t) * C::kChannels);
#pragma unroll
        for (int c = 0; c < C::kOwn; ++c) weight[t * C::kOwn + c] = own.at[c];
      }
    } else {
#pragma unroll
      for (int t = 0; t < kWeightPitch; t += 4) {
        const Vector<float, 4> four = load_vector<4>(weights + tap * kWeightPitch + t);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (t + i < kPlaneTaps) weight[t + i] = four.at[i];
      }
    }
  }

  // Adds the products of a plane, from the thread's first row on, and the weights of tap `tap` along depth.
  __device__ __forceinline__ void add_plane(const Scalar* plane, int tap, float (&sum)[kSums]) const {
    float weight[kPlaneTaps * C::kOwn];
    load_weights(tap, weight);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float values[Planes::kReads * C::kOwn];
      reader.read(plane, row, values);
#pragma unroll
      for (int t_h = 0; t_h < C::kKernelH; ++t_h) {
        // The tap reads this row for position rest / kInputStepH of the tile, if that is one.
        const int rest = row - C::kReadH(t_h), h = rest / C::kInputStepH;
        if (rest < 0 || rest % C::kInputStepH != 0 || h >= C::kTileH) continue;
#pragma unroll
        for (int w = 0; w < C::kTileW; ++w) {
#pragma unroll
          for (int t_w = 0; t_w < C::kKernelW; ++t_w) {
            const int to = sum_at(h, w, C::kTapPhaseH(t_h), C::kTapPhaseW(t_w)) * C::kOwn;
            const int tap_at = (t_h * C::kKernelW + t_w) * C::kOwn;
            const int from = (w * C::kInputStepW + C::kReadW(t_w)) * C::kOwn;
#pragma unroll
            for (int c = 0; c < C::kOwn; ++c) sum[to + c] += weight[tap_at + c] * values[from + c];
          }
        }
      }
    }
  }

  // Elements from one output of a line to the next: known to the compiler unless it is neither 1 nor the
  // number of channels.
  __device__ __forceinline__ long long step_y() const { return C::kStepY > 0 ? C::kStepY : args.y_strides.w; }

  // Loads the weights of row `t_h` of tap `tap` along depth, counted through the channels of x.
  __device__ __forceinline__ void load_row_of_weights(int tap, int t_h, float (&weight)[C::kKernelW]) const {
    if constexpr (C::kLast) {
      const float* from = weights + (tap * kPlaneTaps + t_h * C::kKernelW) * C::kChannels;
#pragma unroll
      for (int t = 0; t < C::kKernelW; ++t) weight[t] = from[t * C::kChannels];
    } else {
      const float* from = weights + tap * kWeightPitch + t_h * kRowPitch;
#pragma unroll
      for (int t = 0; t < C::kKernelW; ++t) {
        const Vector<float, 4> four = load_vector<4>(from + t / 4 * 4);
        weight[t] = four.at[t % 4];
      }
    }
  }

  // Adds the products of plane kOfStep of a step, from the thread's first row on, and the weights of channel
  // `c` of x. Slot s of the sums belongs to position step - kLastLag + s.
  template <int kOfStep>
  __device__ __forceinline__ void add_rows(const Scalar* plane, int c,
                                           float (&sum)[C::kWindow][kSums]) const {
#pragma unroll 1
    for (int t_h = 0; t_h < C::kKernelH; ++t_h) {
      float weight[C::kKernelD][C::kKernelW];
      static_for<C::kKernelD>([&](auto tap) {
        constexpr int kTap = decltype(tap)::value;
        if constexpr (C::kTapPlane(kTap) == kOfStep)
          load_row_of_weights(c * C::kKernelD + kTap, t_h, weight[kTap]);
      });
#pragma unroll
      for (int h = 0; h < C::kTileH; ++h) {
        float values[Planes::kReads];
        reader.read(plane, h * C::kInputStepH + C::kReadH(t_h), values);
        static_for<C::kKernelD>([&](auto tap) {
          constexpr int kTap = decltype(tap)::value, kSlot = C::kLastLag - C::kTapLag(kTap);
          if constexpr (C::kTapPlane(kTap) == kOfStep) {
#pragma unroll
            for (int w = 0; w < C::kTileW; ++w) {
#pragma unroll
              for (int t_w = 0; t_w < C::kKernelW; ++t_w)
                sum[kSlot][sum_at(h, w, 0, 0)] +=
                    weight[kTap][t_w] * values[w * C::kInputStepW + C::kReadW(t_w)];
            }
          }
        });
      }
    }
  }

  // Stores the outputs of plane `d` of y. kWhole promises that all outputs of the tile are inside of a plane.
  template <bool kWhole>
  __device__ __forceinline__ void store_tile(int d, const float (&sum)[kSums]) const {
    constexpr int kLine = C::kTileW * C::kPhasesW;  // outputs of a row of the tile
    const int from_w = q_w * C::kPhasesW;
    Scalar* to = y + d * args.y_strides.d + q_h * C::kPhasesH * args.y_strides.h + from_w * step_y();
#pragma unroll
    for (int i = 0; i < C::kTileH * C::kPhasesH; ++i) {
      if (!kWhole && q_h * C::kPhasesH + i >= args.y_size.h) return;
#pragma unroll
      for (int w = 0; w < kLine; w += C::kStored) {
        if (!kWhole && from_w + w >= args.y_size.w) break;
        Scalar* const at = to + w * step_y();
        // Neighbouring outputs of a line, or one output of neighbouring channels.
        constexpr int kTogether = C::kStored * C::kOwn;
        float values[kTogether];
#pragma unroll
        for (int v = 0; v < kTogether; ++v) values[v] = sum[(i * kLine + w) * C::kOwn + v];
        finish<C, (C::kOwn > 1)>(
            args, {item, channel, at - static_cast<Scalar*>(args.y), C::kOwn > 1 ? 1 : step_y(), kTogether},
            values);
        Vector<Scalar, kTogether> out;
#pragma unroll
        for (int v = 0; v < kTogether; ++v) out.at[v] = Narrow<Scalar>::from(values[v]);
        store_vector(at, out);
      }
      to += args.y_strides.h;
    }
  }

  // Puts the thread's outputs of plane `d` to shared memory. `plane` is the channel's run in global memory.
  __device__ __forceinline__ void put_tile(int d, const Scalar* plane, const float (&sum)[kSums]) const {
    constexpr int kLine = Outputs::kLine;
    const int width = args.y_size.w, from_w = q_w * C::kPhasesW;
    const bool last = from_w + kLine > width;
    TCONV3D_ASSUME(from_w + (last ? Outputs::kTail : kLine) <= width && C::kTilesW * kLine >= width);
    const int first_line = q_h * C::kPhasesH;
    Scalar* to = lines.start(own_channel, plane) + (first_line - block_line) * width + from_w;
    const Scalar* at = y + d * args.y_strides.d + first_line * args.y_strides.h + from_w;
#pragma unroll
    for (int i = 0; i < C::kTileH * C::kPhasesH; ++i) {
      float values[kLine];
#pragma unroll
      for (int w = 0; w < kLine; w += 4) {
        float four[4];
#pragma unroll
        for (int v = 0; v < 4; ++v) four[v] = sum[i * kLine + w + v];
        const int left = first_line + i < args.y_size.h ? width - from_w - w : 0;
        finish<C, false>(args, {item, channel, at + w - static_cast<Scalar*>(args.y), 1, left < 4 ? left : 4},
                         four);
#pragma unroll
        for (int v = 0; v < 4; ++v) values[w + v] = four[v];
      }
      lines.put(to, values, last);
      to += width;
      at += args.y_strides.h;
    }
  }

  // Stores the block's outputs of plane `d` of y, as one run of whole lines for each channel. All threads
  // call it. `again`: they have not met since they stored another plane.
  __device__ __forceinline__ void store_lines(int d, const float (&sum)[kSums], bool again) const {
    [[maybe_unused]] constexpr int kUnrolled =
        C::kChannels <= 4 ? C::kChannels : 1;  // read by a pragma alone
    Scalar* const plane = run + d * args.y_strides.d;
    if (again) __syncthreads();  // the outputs of the plane before have left
    if (works) put_tile(d, plane + own_channel * args.y_strides.c, sum);
    __syncthreads();
    const int left = args.y_size.h - block_line;
    const int count = (left < Outputs::kLines ? left : Outputs::kLines) * args.y_size.w;
#pragma unroll kUnrolled
    for (int c = 0; c < C::kChannels; ++c) {
      if (C::kOutChannels % C::kChannels == 0 || block_channel + c < C::kOutChannels)
        lines.store(c, plane + c * args.y_strides.c, count);
    }
  }

  __device__ __forceinline__ void store(int d, const float (&sum)[kSums], bool again) const {
    if (d >= args.y_size.d) return;
    if constexpr (C::kGathers) {
      store_lines(d, sum, again);
    } else if (whole) {
      store_tile<true>(d, sum);
    } else {
      store_tile<false>(d, sum);
    }
  }

  __device__ __forceinline__ void clear(float (&sum)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = start[i % C::kOwn];
  }

  // The ring holds all planes that a position reads: plane p of x is in place (p - origin) % kRing.
  __device__ __forceinline__ void march_over_positions() const {
    const int origin = first * C::kInputStepD + C::kMinD;
    slab.template fill<C::kSpanD>(origin, 0);
    ptx::copy_commit();
#pragma unroll 1
    for (int q = first; q < end; ++q) {
      ptx::copy_wait<0>();
      __syncthreads();
      if (q + 1 < end) {
#pragma unroll 1
        for (int p = 0; p < C::kInputStepD; ++p) {
          const int plane = q * C::kInputStepD + C::kMinD + C::kSpanD + p;
          slab.template fill<1>(plane, (plane - origin) % kRing);
        }
      }
      ptx::copy_commit();
      if (!C::kGathers && !works) continue;
#pragma unroll 1
      for (int phase = 0; phase < C::kPhasesD; ++phase) {
        float sum[kSums];
        clear(sum);
        if (kEmptyPhases && C::kCountD(phase) == 0) {
          store(q * C::kPhasesD + phase, sum, phase > 0);
          continue;
        }
        int j = 0;
#pragma unroll 1
        do {
          const int plane = q * C::kInputStepD + C::kFirstOffsetD(phase) + j * C::kOffsetStepD;
          const Scalar* from = slab.shared + (plane - origin) % kRing * Slab<Planes>::kSize;
          const int tap = C::kFirstTapD(phase) + j * C::kTapStepD;
#pragma unroll 1
          for (int c = 0; c < (works ? C::kReduced : 0); ++c)
            add_plane(from + reader.start + c * kChannelStep, c * C::kKernelD + tap, sum);
        } while (++j < C::kCountD(phase));
        store(q * C::kPhasesD + phase, sum, phase > 0);
      }
    }
  }

  // Every plane of x feeds a window of positions along depth. Step j has planes kInputStepD*j and the
  // following; tap t reads plane kTapPlane(t) of step q + kTapLag(t) for position q.
  __device__ __forceinline__ void march_over_planes() const {
    float sum[C::kWindow][kSums];  // slot s belongs to position step - kLastLag + s
#pragma unroll
    for (int slot = 0; slot < C::kWindow; ++slot) clear(sum[slot]);
    const int origin = (first + C::kFirstLag) * C::kInputStepD;
    const int last = (end - 1 + C::kLastLag) * C::kInputStepD + C::kInputStepD - 1;
    if constexpr (kRaw) {
      slab.fetch(origin, raw);
    } else {
      slab.template fill<1>(origin, 0);
    }
    ptx::copy_commit();
    int plane = origin;
#pragma unroll 1
    for (int step = first + C::kFirstLag; step < end + C::kLastLag; ++step) {
      static_for<C::kInputStepD>([&](auto of_step) {
        constexpr int kOfStep = decltype(of_step)::value;
        ptx::copy_wait<0>();
        __syncthreads();
        if constexpr (kRaw) {
          slab.settle(plane, raw, 0);
          __syncthreads();
          if (plane < last) slab.fetch(plane + 1, raw);
        } else {
          if (plane < last) slab.template fill<1>(plane + 1, (plane + 1 - origin) % 2);
        }
        ptx::copy_commit();
        const Scalar* from = slab.shared + (plane - origin) % kRing * Slab<Planes>::kSize;
#pragma unroll 1
        for (int c = 0; c < (works ? C::kReduced : 0); ++c) {
          if constexpr (C::kByRows) {
            static_assert(kPhases == 1, "positions have one output");
            add_rows<kOfStep>(from + reader.start + c * kChannelStep, c, sum);
            continue;
          }
          static_for<C::kKernelD>([&](auto tap) {
            constexpr int kTap = decltype(tap)::value, kSlot = C::kLastLag - C::kTapLag(kTap);
            if constexpr (!C::kByRows && C::kTapPlane(kTap) == kOfStep)
              add_plane(from + reader.start + c * kChannelStep, c * C::kKernelD + kTap, sum[kSlot]);
          });
        }
        ++plane;
      });
      const int q = step - C::kLastLag;
      if ((C::kGathers || works) && q >= first) store(q, sum[0], false);
#pragma unroll
      for (int slot = 0; slot + 1 < C::kWindow; ++slot) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) sum[slot][i] = sum[slot + 1][i];
      }
      clear(sum[C::kWindow - 1]);
    }
  }
};

// Loads the weights of the block's channels into shared memory, taps innermost in global memory.
template <class C>
__device__ __forceinline__ void stage_weights(const Args& args, int first_channel, float* weights) {
  constexpr int kPlaneTaps = C::kKernelH * C::kKernelW, kTaps = C::kKernelD * kPlaneTaps;
  constexpr int kPitch = DepthwiseTiles<C>::kWeightPitch, kOfChannel = C::kReduced * kTaps;
  const auto* w = static_cast<const typename C::Scalar*>(args.w);
  for (int i = threadIdx.x; i < C::kChannels * kOfChannel; i += C::kThreads) {
    const int channel = i / kOfChannel, of_channel = i % kOfChannel, line = of_channel / kPlaneTaps;
    const int y = first_channel + channel, x = line / C::kKernelD, d = line % C::kKernelD;
    const int in_plane = of_channel % kPlaneTaps;
    if (y >= C::kOutChannels) break;
    const float value = widen<float>(
        w[y / C::kOuts * args.w_group_stride + x * args.w_strides.n + y % C::kOuts * args.w_strides.c +
          d * args.w_strides.d + in_plane / C::kKernelW * args.w_strides.h +
          in_plane % C::kKernelW * args.w_strides.w]);
    weights[C::kLast ? of_channel * C::kChannels + channel
                     : (channel * C::kReduced * C::kKernelD + line) * kPitch +
                           in_plane / C::kKernelW * DepthwiseTiles<C>::kRowPitch + in_plane % C::kKernelW] =
        value;
  }
}

template <class C>
__device__ void run(const Args& args) {
  using Kernel = DepthwiseTiles<C>;
  using Scalar = typename C::Scalar;
  using Planes = typename Kernel::Planes;
  constexpr int kChunks = (C::kOutChannels + C::kChannels - 1) / C::kChannels;
  constexpr int kTiles = C::kTilesH * C::kTilesW;
  // The block's place: chunk of channels (fastest), tile along w, tile along h, part of depth, batch item.
  int rest = static_cast<int>(blockIdx.x) / kChunks;
  const int first_channel = static_cast<int>(blockIdx.x) % kChunks * C::kChannels;
  int next = divide(rest, args.by_w);
  const int block_w = rest - next * static_cast<int>(args.by_w.divisor);
  rest = next;
  next = divide(rest, args.by_h);
  const int block_h = rest - next * static_cast<int>(args.by_h.divisor);
  const int n = divide(next, args.by_parts);
  const int part = next - n * static_cast<int>(args.by_parts.divisor);
  // The thread's place: if channels are neighbours in memory, they are the fastest digit. Then come tiles
  // along h (kDown), which the skew of the slab puts in different banks, or along w.
  const int thread = static_cast<int>(threadIdx.x) < kTiles * Kernel::kLanes ? threadIdx.x : 0;
  const int channel = C::kLast ? thread % Kernel::kLanes * C::kOwn : thread / kTiles;
  const int tile = C::kLast ? thread / Kernel::kLanes : thread % kTiles;
  const int tile_h = C::kDown ? tile % C::kTilesH : tile / C::kTilesW;
  const int tile_w = C::kDown ? tile / C::kTilesH : tile % C::kTilesW;
  const int block_q_h = block_h * C::kTilesH * C::kTileH, block_q_w = block_w * C::kTilesW * C::kTileW;

  Scalar* const shared = dynamic_shared<Scalar>();
  float* const weights = reinterpret_cast<float*>(shared + Kernel::kRing * Slab<Planes>::kSize);
  stage_weights<C>(args, first_channel, weights);
  const int first_x = first_channel / C::kOuts * C::kReduced;  // the block's first channel of x
  const Scalar* from = static_cast<const Scalar*>(args.x) + n * args.x_strides.n + first_x * args.x_strides.c;
  const Slab<Planes> slab{shared,
                          from,
                          args.x_strides,
                          args.x_size,
                          C::kOutChannels / C::kOuts * C::kReduced - first_x,
                          block_q_h * C::kInputStepH + C::kMinH,
                          block_q_w * C::kInputStepW + C::kMinW - C::kBefore};
  Kernel kernel{
      args, slab,
      SlabReader<Planes, C::kOwn>(channel / C::kOuts * C::kReduced, tile_h * C::kTileH * C::kInputStepH,
                                  tile_w * C::kTileW * C::kInputStepW)};
  kernel.weights = weights + channel * (C::kLast ? 1 : C::kReduced * C::kKernelD * Kernel::kWeightPitch);
  kernel.q_h = block_q_h + tile_h * C::kTileH;
  kernel.q_w = block_q_w + tile_w * C::kTileW;
  kernel.works = static_cast<int>(threadIdx.x) < kTiles * Kernel::kLanes &&
                 first_channel + channel < C::kOutChannels && kernel.q_h < args.grid.h &&
                 kernel.q_w < args.grid.w;
  kernel.whole = (kernel.q_h + C::kTileH) * C::kPhasesH <= args.y_size.h &&
                 (kernel.q_w + C::kTileW) * C::kPhasesW <= args.y_size.w;
  kernel.first = part * args.length;
  kernel.end = args.grid.d - kernel.first < args.length ? args.grid.d : kernel.first + args.length;
  const auto* bias = static_cast<const Scalar*>(args.bias);
#pragma unroll
  for (int c = 0; c < C::kOwn; ++c)
    kernel.start[c] =
        bias == nullptr || !kernel.works ? 0.0f : widen<float>(bias[first_channel + channel + c]);
  kernel.item = n;
  kernel.channel = first_channel + channel;
  if constexpr (C::kGathers) {
    constexpr int kWeights =  // floats
        C::kLast ? 0 : C::kChannels * C::kReduced * C::kKernelD * Kernel::kWeightPitch;
    static_assert(!C::kLast, "lines of a channel are runs of memory");
    TCONV3D_ASSUME(args.y_strides.w == 1 && args.y_strides.h == args.y_size.w);
    kernel.raw = reinterpret_cast<Scalar*>(weights + kWeights);
    kernel.lines.shared = kernel.raw + Kernel::kRawSize;
    kernel.block_line = block_q_h * C::kPhasesH;
    kernel.block_channel = first_channel;
    kernel.own_channel = channel;
    kernel.run = static_cast<Scalar*>(args.y) + n * args.y_strides.n + first_channel * args.y_strides.c +
                 kernel.block_line * args.y_strides.h;
  }
  kernel.y =
      static_cast<Scalar*>(args.y) + n * args.y_strides.n + (first_channel + channel) * args.y_strides.c;
  if constexpr (C::kWindow > 1) {
    kernel.march_over_planes();
  } else {
    kernel.march_over_positions();
  }
}

}  // namespace tconv3d
