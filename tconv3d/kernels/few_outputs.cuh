// Forward pass with few output channels, on tensor cores: products first, shifts afterwards.
//
// With one output channel a matrix product over input channels has one column, and tensor cores would idle.
// But the product of x with the weights of all taps at once has a column for every tap:
//
//   c[position][tap, co]     = sum over ci of  x[position][ci] * w[ci][co][tap]         a plain matrix
//   product y[stride*q + phase][co]  = bias + sum over the phase's taps of  c[q - shift(tap)][tap, co]
//
// A block owns a tile of kTileH x kTileW positions q and walks along depth. For every input plane it computes
// c for the tile with its halo, leaves it in shared memory as [column][position], and each thread adds up
// what its own position needs. Along depth the sums are a window of output planes in registers: input plane i
// feeds output planes i*stride - padding + tap*dilation; after it the window's first `stride` planes are
// complete, are stored, and the window moves. Every input is read once (but for the halo), in the caller's
// layout, straight into fragments.
#pragma once

#include "epilogue.cuh"
#include "operands.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* w;
  const void* bias;  // null: no bias
  void* y;
  Strides x_strides, y_strides;
  Strides w_strides;  // n: input channel, c: output channel of the group, d, h, w: tap
  Extent x_size, y_size;
  int planes;  // output planes of a block
  int batch;
  Divider tiles_w, tiles_h, parts;
};

template <class C>
struct FewOutputs {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;
  using Operand = OperandOf<Scalar>;

  static constexpr int kLanes = 32, kWarps = C::kThreads / kLanes;
  static constexpr int kPhases = C::kStrideH * C::kStrideW;
  static constexpr int kPlaneTaps = C::kKernelH * C::kKernelW;
  static constexpr int kColumns = C::kKernelD * kPlaneTaps * C::kOut;
  static constexpr int kColumnTiles = (kColumns + 7) / 8;
  static constexpr int kStepItems =
      32 / static_cast<int>(sizeof(Scalar));  // input channels of one instruction
  static constexpr int kSteps = (C::kIn + kStepItems - 1) / kStepItems;
  static constexpr int kHalo = C::kHaloH * C::kHaloW;
  static constexpr int kWordItems = 4 / static_cast<int>(sizeof(Scalar));  // operands in a register
  static_assert(C::kThreads == C::kTileH * C::kTileW, "a thread for every position of the tile");
  static_assert(C::kThreads % kLanes == 0, "whole warps");
  static_assert(kWarps * C::kRowTiles * 16 >= kHalo, "the warps' rows cover the halo");
  static_assert(C::kPitch >= kWarps * C::kRowTiles * 16 && C::kPitch % 32 == 4,
                "columns of c: room for all rows, and stores of fragments without bank conflicts");

  const Args& args;
  unsigned* weights;  // in shared memory: [step][column tile][lane][2], as the instruction wants them
  float* columns;     // in shared memory: [column][kPitch]
  int n, group, tile_h, tile_w, first_output, last_output;
  int lane, warp;
  Index row_offset[C::kRowTiles]
                  [2];  // of the rows of this lane's fragments, within a plane of x; -1: outside
  float window[C::kWindow][kPhases][C::kOut];

  __device__ __forceinline__ void locate() {
    lane = threadIdx.x % kLanes;
    warp = threadIdx.x / kLanes;
    int rest = blockIdx.x;
    int next = divide(rest, args.tiles_w);
    tile_w = (rest - next * static_cast<int>(args.tiles_w.divisor)) * C::kTileW;
    rest = next;
    next = divide(rest, args.tiles_h);
    tile_h = (rest - next * static_cast<int>(args.tiles_h.divisor)) * C::kTileH;
    rest = next;
    next = divide(rest, args.parts);
    first_output = (rest - next * static_cast<int>(args.parts.divisor)) * args.planes;
    last_output = args.y_size.d - first_output < args.planes ? args.y_size.d : first_output + args.planes;
    n = next % args.batch;
    group = next / args.batch;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m) + 8 * half;
        const int h = tile_h + C::kOriginH + row / C::kHaloW, w = tile_w + C::kOriginW + row % C::kHaloW;
        const bool inside = row < kHalo && h >= 0 && h < args.x_size.h && w >= 0 && w < args.x_size.w;
        const Index step_w = C::kUnitW ? 1 : static_cast<Index>(args.x_strides.w);
        row_offset[m][half] = inside ? h * static_cast<Index>(args.x_strides.h) + w * step_w : -1;
      }
    }
  }

  // The halo position of this lane's first row in the warp's m-th tile of 16 rows.
  __device__ __forceinline__ int row_of(int m) const { return (m * kWarps + warp) * 16 + lane / 4; }

  // Operands of input channels `first` and, where a register holds two, the next.
  static __device__ __forceinline__ unsigned word(const Scalar* address, long long stride, int first,
                                                  bool valid) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kWordItems; ++i) {
      if (valid && first + i < C::kIn) bits |= Operand::bits(load_constant(address + i * stride)) << (16 * i);
    }
    return bits;
  }

  // A fragment's K: lane%4, in words, and 4 words further.
  __device__ __forceinline__ int channel_of(int step, int part) const {
    return step * kStepItems + (lane % 4 + 4 * part) * kWordItems;
  }

  __device__ __forceinline__ void stage_weights() {
    const Scalar* w =
        static_cast<const Scalar*>(args.w) + static_cast<long long>(group) * C::kIn * args.w_strides.n;
    for (int i = warp; i < kSteps * kColumnTiles; i += kWarps) {
      const int step = i / kColumnTiles, column = i % kColumnTiles * 8 + lane / 4;
      const int co = column % C::kOut, tap = column / C::kOut;
      const long long offset = co * args.w_strides.c + tap / kPlaneTaps * args.w_strides.d +
                               tap / C::kKernelW % C::kKernelH * args.w_strides.h +
                               tap % C::kKernelW * args.w_strides.w;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int channel = channel_of(step, part);
        weights[(i * kLanes + lane) * 2 + part] =
            word(w + offset + channel * args.w_strides.n, args.w_strides.n, channel, column < kColumns);
      }
    }
  }

  __device__ __forceinline__ void start_window(int first) {
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
#pragma unroll
    for (int co = 0; co < C::kOut; ++co) {
      const float start = bias == nullptr ? 0.0f : widen<float>(load_constant(bias + group * C::kOut + co));
#pragma unroll
      for (int j = 0; j < C::kWindow; ++j) {
#pragma unroll
        for (int f = 0; f < kPhases; ++f) {
          if (j >= first) window[j][f][co] = start;
        }
      }
    }
  }

  // c of one input plane, for the tile and its halo.
  __device__ __forceinline__ void multiply(int plane) {
    const Scalar* x = static_cast<const Scalar*>(args.x) + n * args.x_strides.n +
                      static_cast<long long>(group) * C::kIn * args.x_strides.c + plane * args.x_strides.d;
    float sum[C::kRowTiles][kColumnTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned a[C::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // row lane/4 or 8 further, K lane%4 or 4 words further
          const Index row = row_offset[m][i % 2];
          const int channel = channel_of(step, i / 2);
          a[m][i] = word(x + (row < 0 ? Index(0) : row) + channel * args.x_strides.c, args.x_strides.c,
                         channel, row >= 0);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kColumnTiles; ++tile) {
        const auto b = load_vector<2>(weights + ((step * kColumnTiles + tile) * kLanes + lane) * 2);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::warp_multiply<Operand::kOperand>(sum[m][tile], a[m], b.at);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int tile = 0; tile < kColumnTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = tile * 8 + lane % 4 * 2 + i % 2;
          columns[column * C::kPitch + row_of(m) + i / 2 * 8] = sum[m][tile][i];
        }
      }
    }
  }

  // What this thread's position needs of c, for every output plane of the window that the plane feeds.
  __device__ __forceinline__ void gather() {
    const float* own = columns + threadIdx.x / C::kTileW * C::kHaloW + threadIdx.x % C::kTileW;
#pragma unroll
    for (int t = 0; t < C::kKernelD; ++t) {
      static_for<kPlaneTaps>([&](auto i) {
        constexpr int kPhase = C::kTapPhase(i), kOffset = C::kTapOffset(i);
#pragma unroll
        for (int co = 0; co < C::kOut; ++co) {
          window[t * C::kDilationD][kPhase][co] +=
              own[((t * kPlaneTaps + i) * C::kOut + co) * C::kPitch + kOffset];
        }
      });
    }
  }

  __device__ __forceinline__ Scalar result(int j, int f, int co) const {
    return Narrow<Scalar>::from(C::Epilogue::apply(window[j][f][co]));
  }

  __device__ __forceinline__ void store(int plane) {
    const int qh = tile_h + static_cast<int>(threadIdx.x) / C::kTileW;
    const int qw = tile_w + static_cast<int>(threadIdx.x) % C::kTileW;
    Scalar* y = static_cast<Scalar*>(args.y) + n * args.y_strides.n +
                static_cast<long long>(group) * C::kOut * args.y_strides.c;
#pragma unroll
    for (int j = 0; j < C::kStrideD; ++j) {
      const int d = plane * C::kStrideD - C::kPaddingD + j;
      if (d < first_output || d >= last_output) continue;
#pragma unroll
      for (int f = 0; f < kPhases; f += C::kPairs ? 2 : 1) {
        const int h = qh * C::kStrideH + f / C::kStrideW, w = qw * C::kStrideW + f % C::kStrideW;
        if (h >= args.y_size.h || w >= args.y_size.w) continue;
#pragma unroll
        for (int co = 0; co < C::kOut; ++co) {
          Scalar* at =
              y + co * args.y_strides.c + d * args.y_strides.d + h * args.y_strides.h + w * args.y_strides.w;
          if constexpr (C::kPairs) {  // two phases along w, contiguous: neighbours
            const Vector<Scalar, 2> both{result(j, f, co), result(j, f + 1, co)};
            const bool second = w + 1 < args.y_size.w;
            if (second && reinterpret_cast<unsigned long long>(at) % sizeof(both) == 0) {
              *reinterpret_cast<Vector<Scalar, 2>*>(at) = both;
            } else {
              at[0] = both.at[0];
              if (second) at[1] = both.at[1];
            }
          } else {
            *at = result(j, f, co);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void move_window() {
    constexpr int kKept = C::kWindow - C::kStrideD;
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
#pragma unroll
      for (int f = 0; f < kPhases; ++f) {
#pragma unroll
        for (int co = 0; co < C::kOut; ++co) window[j][f][co] = window[j + C::kStrideD][f][co];
      }
    }
    start_window(kKept);
  }

  __device__ __forceinline__ void compute() {
    locate();
    stage_weights();
    start_window(0);
    __syncthreads();
    // Output d needs planes i with i*stride - padding <= d <= i*stride - padding + dilation*(kernel - 1).
    const int reach = first_output + C::kPaddingD - C::kDilationD * (C::kKernelD - 1);
    const int first_plane = reach > 0 ? (reach + C::kStrideD - 1) / C::kStrideD : 0;
    const int last_plane = (last_output - 1 + C::kPaddingD) / C::kStrideD;
    for (int plane = first_plane; plane <= last_plane; ++plane) {
      if (plane < args.x_size.d) {  // planes past the input only complete outputs
        multiply(plane);
        __syncthreads();
        gather();
        __syncthreads();
      }
      store(plane);
      move_window();
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = FewOutputs<Config>;
  unsigned* shared = dynamic_shared<unsigned>();
  float* columns = reinterpret_cast<float*>(shared + Kernel::kSteps * Kernel::kColumnTiles * 64);
  Kernel kernel{args, shared, columns};
  kernel.compute();
}

}  // namespace tconv3d
