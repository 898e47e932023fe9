// Forward pass with few output channels, on tensor cores: products first, shifts afterwards.
//
// With one output channel a matrix product over input channels has one column, and tensor cores would idle.
// But the product of x with the weights of all taps at once has a column for every tap:
//
//   c[position][tap, co]             = sum over ci of  x[position][ci] * w[ci][co][tap]
//   y[stride*q + phase][co]          = bias + sum over the phase's taps of  c[q - shift(tap)][tap, co]
//
// A block owns a tile of kTileH x kTileW positions q and walks along depth. Input plane i feeds output planes
// i*stride - padding + tap*dilation, a window of kWindow planes. The columns of c are (plane of the window,
// tap within the plane, co), so the accumulators of the product are that window: what an input plane adds to
// an output plane is added by the matrix instruction itself. After every input plane the window's first
// `stride` planes are complete. Their columns go to shared memory as [column][position], each thread adds up
// what its positions need and stores it, and the window moves.
//
// The tile of x with its halo comes in chunks of channels through a ring in shared memory, copied
// asynchronously in the caller's layout, kStages - 1 chunks ahead of the products, across planes. The sums
// and stores of a plane are done between the chunks of the next one, so that some warps store while others
// multiply.
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
  static constexpr int kPlaneColumns = kPlaneTaps * C::kOut;  // of one output plane
  static constexpr int kPositions = C::kTileH * C::kTileW;
  static constexpr int kHalo = C::kHaloH * C::kHaloW;
  static constexpr int kRows = kWarps * C::kRowTiles * 16;

  // The window's columns in groups of `stride` planes: a step of the walk completes the first group.
  static constexpr int kGroupColumns = C::kStrideD * kPlaneColumns;
  static constexpr int kGroupTiles = (kGroupColumns + 7) / 8;
  static constexpr int kGroups = (C::kWindow + C::kStrideD - 1) / C::kStrideD;
  static constexpr int kRestPlanes = C::kWindow - (kGroups - 1) * C::kStrideD;
  static constexpr int kTiles = (kGroups - 1) * kGroupTiles + (kRestPlanes * kPlaneColumns + 7) / 8;

  static constexpr int kItemBytes = static_cast<int>(sizeof(Scalar));
  static constexpr int kWordItems = 4 / kItemBytes;   // operands in a register
  static constexpr int kStepItems = 32 / kItemBytes;  // input channels of one instruction
  static constexpr int kChunkSteps = C::kChunk / kStepItems;
  static constexpr int kChunks = (C::kIn + C::kChunk - 1) / C::kChunk;
  static constexpr int kSteps = kChunks * kChunkSteps;

  // A stage of the ring: [channel][halo row][kRowItems], or, channels-last, [halo position][channel]. A
  // vector is what one copy moves; where kVector is 0, elements pass through registers one by one.
  static constexpr int kVector = C::kVector > 0 ? C::kVector : 1;
  static constexpr int kLead = C::kChannelsLast ? 0 : ((C::kOriginW % kVector) + kVector) % kVector;
  static constexpr int kRowVectors =
      C::kChannelsLast ? C::kChunk / kVector * C::kHaloW : (kLead + C::kHaloW + kVector - 1) / kVector;
  static constexpr int kRowItems = kRowVectors * kVector;
  static constexpr int kVectors = C::kHaloH * kRowVectors * (C::kChannelsLast ? 1 : C::kChunk);
  static constexpr int kCopies = (kVectors + C::kThreads - 1) / C::kThreads;
  static constexpr int kStageItems = C::kChannelsLast ? kHalo * C::kItemPitch : C::kChunk * C::kItemPitch;

  // Rounds in which the block's threads gather the outputs of a plane, done after the first kGatherChunks
  // chunks of the next plane: before the last one, whose products then overwrite the columns.
  static constexpr int kRounds = (C::kStrideD * kPositions + C::kThreads - 1) / C::kThreads;
  static constexpr int kGatherChunks = kChunks > 1 ? kChunks - 1 : 1;

  // What a thread copies of a chunk: found once where the registers allow, else every time.
  static constexpr int kKeptCopies = kCopies <= 8 ? kCopies : 0;
  struct Copy {
    Index from;  // offset in a chunk of a plane of x; -1: zeros
    int to;      // in a stage; -1: nothing
  };

  static_assert(C::kThreads % kLanes == 0, "whole warps");
  static_assert(kRows >= kHalo, "the warps' rows cover the halo");
  static_assert(C::kPitch >= kRows && C::kPitch % 32 == 4,
                "columns of c: room for all rows, and stores of fragments without bank conflicts");
  static_assert(C::kChunk % kStepItems == 0 && C::kChunk % kVector == 0, "whole steps and vectors");
  static_assert(C::kChannelsLast || (C::kItemPitch % 32 == 8 && C::kItemPitch >= C::kHaloH * kRowItems),
                "loads of fragments without bank conflicts");
  static_assert(!C::kChannelsLast || C::kItemPitch >= C::kChunk, "a row holds the channels of a chunk");
  static_assert(C::kVector == 0 || kVector * kItemBytes % 4 == 0, "copies move words");
  static_assert(C::kChannelsLast || C::kTileW % kVector == 0, "tiles begin where vectors do");
  static_assert(C::kStages >= 2);

  const Args& args;
  unsigned* weights;  // in shared memory: [step][column tile][lane][2], as the instruction wants them
  float* columns;     // in shared memory: [column][kPitch]
  Scalar* ring;       // in shared memory: [kStages][kStageItems]
  const Scalar* x;    // the first plane of the block's input
  int n, group, tile_h, tile_w, first_output, last_output, first_plane;
  int lane, warp;
  int rows[C::kRowTiles][2];  // where the rows of this lane's fragments lie in a stage
  Copy kept[kKeptCopies > 0 ? kKeptCopies : 1];
  int copy_stage, copy_chunk, copy_plane;  // of the next copy
  float sum[C::kRowTiles][kTiles][4];

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
    // Output d needs planes i with i*stride - padding <= d <= i*stride - padding + dilation*(kernel - 1), and
    // is stored with the last plane i that has i*stride - padding <= d, whether that feeds it or not.
    const int reach = first_output + C::kPaddingD - C::kDilationD * (C::kKernelD - 1);
    const int storing = (first_output + C::kPaddingD) / C::kStrideD;
    const int feeding = reach > 0 ? (reach + C::kStrideD - 1) / C::kStrideD : 0;
    first_plane = feeding < storing ? feeding : storing;
    x = static_cast<const Scalar*>(args.x) + n * args.x_strides.n +
        static_cast<long long>(group) * C::kIn * args.x_strides.c + first_plane * args.x_strides.d;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row_of(m) + 8 * half < kHalo ? row_of(m) + 8 * half : 0;
        rows[m][half] =
            C::kChannelsLast ? row * C::kItemPitch : row / C::kHaloW * kRowItems + kLead + row % C::kHaloW;
      }
    }
  }

  // The halo position of this lane's first row in the warp's m-th tile of 16 rows.
  __device__ __forceinline__ int row_of(int m) const { return (m * kWarps + warp) * 16 + lane / 4; }

  // ---- The ring.

  // The channel, within its chunk, of this thread's i-th vector.
  __device__ __forceinline__ int copy_channel(int i) const {
    const int vector = threadIdx.x + i * C::kThreads;
    return C::kChannelsLast ? vector % (C::kChunk / kVector) * kVector : vector / (C::kHaloH * kRowVectors);
  }

  __device__ __forceinline__ Copy copy_of(int i) const {
    const int vector = threadIdx.x + i * C::kThreads;
    const int h = vector / kRowVectors % C::kHaloH, place = vector % kRowVectors;
    const int channel = copy_channel(i);
    const int w = C::kChannelsLast ? place / (C::kChunk / kVector) : place * kVector - kLead;
    const int x_h = tile_h + C::kOriginH + h, x_w = tile_w + C::kOriginW + w;
    const bool inside = x_h >= 0 && x_h < args.x_size.h && x_w >= 0 && x_w < args.x_size.w;
    const int at = C::kChannelsLast ? (h * C::kHaloW + w) * C::kItemPitch + channel
                                    : channel * C::kItemPitch + h * kRowItems + place * kVector;
    const Index offset = channel * static_cast<Index>(args.x_strides.c) +
                         x_h * static_cast<Index>(args.x_strides.h) +
                         x_w * static_cast<Index>(args.x_strides.w);
    return Copy{inside ? offset : Index(-1), vector < kVectors ? at : -1};
  }

  __device__ __forceinline__ void start_ring() {
    copy_stage = copy_chunk = copy_plane = 0;
#pragma unroll
    for (int i = 0; i < kKeptCopies; ++i) kept[i] = copy_of(i);
  }

  // Copies the next chunk, if there is one. Every call is one group of copies.
  __device__ __forceinline__ void copy_next() {
    if (first_plane + copy_plane < args.x_size.d) {
      const Scalar* chunk = x + copy_plane * args.x_strides.d +
                            copy_chunk * static_cast<long long>(C::kChunk) * args.x_strides.c;
      Scalar* stage = ring + copy_stage * kStageItems;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const bool exists = C::kIn % C::kChunk == 0 || copy_channel(i) < C::kIn - copy_chunk * C::kChunk;
        const Copy copy = kKeptCopies > 0 ? kept[kKeptCopies > 0 ? i : 0] : copy_of(i);
        const bool inside = copy.from >= 0 && exists;
        if (copy.to < 0) continue;
        const Scalar* address = chunk + (inside ? copy.from : Index(0));
        if constexpr (C::kVector > 0) {
          ptx::copy_words<kVector * kItemBytes / 4>(stage + copy.to, address, inside);
        } else {
          stage[copy.to] = inside ? load_constant(address) : Scalar{};
        }
      }
    }
    ptx::copy_commit();
    copy_stage = copy_stage + 1 < C::kStages ? copy_stage + 1 : 0;
    if (++copy_chunk == kChunks) {
      copy_chunk = 0;
      ++copy_plane;
    }
  }

  // ---- The products.

  // A fragment's K: lane%4, in words, and 4 words further.
  __device__ __forceinline__ int channel_of(int step, int part) const {
    return step * kStepItems + (lane % 4 + 4 * part) * kWordItems;
  }

  // The tap along depth that feeds a plane of the window, -1 if none does.
  static __device__ __forceinline__ int depth_tap(int plane) {
    return plane % C::kDilationD == 0 && plane / C::kDilationD < C::kKernelD ? plane / C::kDilationD : -1;
  }

  __device__ __forceinline__ void stage_weights() {
    const Scalar* w =
        static_cast<const Scalar*>(args.w) + static_cast<long long>(group) * C::kIn * args.w_strides.n;
    for (int i = warp; i < kSteps * kTiles; i += kWarps) {
      const int step = i / kTiles, tile = i % kTiles;
      const int column = tile % kGroupTiles * 8 + lane / 4;
      const int plane = tile / kGroupTiles * C::kStrideD + column / kPlaneColumns;
      const int tap = column % kPlaneColumns / C::kOut, co = column % C::kOut;
      const int tap_d = depth_tap(plane);
      const bool exists = column < kGroupColumns && plane < C::kWindow && tap_d >= 0;
      const long long offset = co * args.w_strides.c + tap_d * args.w_strides.d +
                               tap / C::kKernelW * args.w_strides.h + tap % C::kKernelW * args.w_strides.w;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        unsigned bits = 0;
#pragma unroll
        for (int k = 0; k < kWordItems; ++k) {
          const int channel = channel_of(step, part) + k;
          if (exists && channel < C::kIn)
            bits |= Operand::bits(load_constant(w + offset + channel * args.w_strides.n)) << (16 * k);
        }
        weights[(i * kLanes + lane) * 2 + part] = bits;
      }
    }
  }

  // Operands of channel `channel` of a stage and, where a register holds two, the next.
  __device__ __forceinline__ unsigned operand(const Scalar* stage, int channel, int row) const {
    if constexpr (kWordItems == 1) {
      return Operand::bits(stage[C::kChannelsLast ? row + channel : channel * C::kItemPitch + row]);
    } else if constexpr (C::kChannelsLast) {
      return *reinterpret_cast<const unsigned*>(stage + row + channel);
    } else {
      const Scalar* at = stage + channel * C::kItemPitch + row;
      return at[0].bits | static_cast<unsigned>(at[C::kItemPitch].bits) << 16;
    }
  }

  // Adds a chunk of channels to the window.
  __device__ __forceinline__ void multiply(const Scalar* stage, int chunk) {
    const unsigned* chunk_weights = weights + chunk * (kChunkSteps * kTiles * kLanes * 2);
#pragma unroll
    for (int step = 0; step < kChunkSteps; ++step) {
      unsigned a[C::kRowTiles][4];
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i)  // row lane/4 or 8 further, K lane%4 or 4 words further
          a[m][i] = operand(stage, channel_of(step, i / 2), rows[m][i % 2]);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const auto b = load_vector<2>(chunk_weights + ((step * kTiles + tile) * kLanes + lane) * 2);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
          ptx::warp_multiply<Operand::kOperand>(sum[m][tile], a[m], b.at);
        }
      }
    }
  }

  // The columns of the complete planes go to shared memory, and the window moves on.
  __device__ __forceinline__ void exchange() {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int column = tile * 8 + lane % 4 * 2 + i % 2;
          if (tile < kGroupTiles) columns[column * C::kPitch + row_of(m) + i / 2 * 8] = sum[m][tile][i];
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          constexpr int kKept = kTiles - kGroupTiles;
          sum[m][tile][i] = tile < kKept ? sum[m][tile < kKept ? tile + kGroupTiles : 0][i] : 0.0f;
        }
      }
    }
  }

  // ---- The outputs.

  // One position of one complete plane: the sums of its taps, for all phases within the plane, stored.
  __device__ __forceinline__ void gather(int item, int plane) {
    const int j = item / kPositions, position = item % kPositions;
    const int qh = position / C::kTileW, qw = position % C::kTileW;
    const int d = plane * C::kStrideD - C::kPaddingD + j;
    if (j >= C::kStrideD || d < first_output || d >= last_output) return;
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
    float total[kPhases][C::kOut];
#pragma unroll
    for (int co = 0; co < C::kOut; ++co) {
      const float start = bias == nullptr ? 0.0f : widen<float>(load_constant(bias + group * C::kOut + co));
#pragma unroll
      for (int f = 0; f < kPhases; ++f) total[f][co] = start;
    }
    const float* own = columns + j * (kPlaneColumns * C::kPitch) + qh * C::kHaloW + qw;
    static_for<kPlaneTaps>([&](auto i) {
      constexpr int kPhase = C::kTapPhase(i), kOffset = C::kTapOffset(i);
#pragma unroll
      for (int co = 0; co < C::kOut; ++co) total[kPhase][co] += own[(i * C::kOut + co) * C::kPitch + kOffset];
    });
    store(total, d, (tile_h + qh) * C::kStrideH, (tile_w + qw) * C::kStrideW);
  }

  static __device__ __forceinline__ Scalar result(float total) {
    return Narrow<Scalar>::from(C::Epilogue::apply(total));
  }

  __device__ __forceinline__ void store(const float (&total)[kPhases][C::kOut], int d, int first_h,
                                        int first_w) {
    Scalar* y = static_cast<Scalar*>(args.y) + n * args.y_strides.n +
                static_cast<long long>(group) * C::kOut * args.y_strides.c + d * args.y_strides.d;
#pragma unroll
    for (int f = 0; f < kPhases; f += C::kPairs ? 2 : 1) {
      const int h = first_h + f / C::kStrideW, w = first_w + f % C::kStrideW;
      if (h >= args.y_size.h || w >= args.y_size.w) continue;
#pragma unroll
      for (int co = 0; co < C::kOut; ++co) {
        Scalar* at = y + co * args.y_strides.c + h * args.y_strides.h + w * args.y_strides.w;
        if constexpr (C::kPairs) {  // two phases along w, contiguous: neighbours
          const Vector<Scalar, 2> both{result(total[f][co]), result(total[f + 1][co])};
          const bool second = w + 1 < args.y_size.w;
          if (second && reinterpret_cast<unsigned long long>(at) % sizeof(both) == 0) {
            *reinterpret_cast<Vector<Scalar, 2>*>(at) = both;
          } else {
            at[0] = both.at[0];
            if (second) at[1] = both.at[1];
          }
        } else {
          *at = result(total[f][co]);
        }
      }
    }
  }

  // The rounds that belong to one chunk, of a plane whose columns are in shared memory.
  __device__ __forceinline__ void gather_rounds(int chunk, int step, int plane) {
    for (int round = chunk; round < kRounds; round += step) gather(threadIdx.x + round * C::kThreads, plane);
  }

  __device__ __forceinline__ void compute() {
    locate();
    start_ring();
    stage_weights();
#pragma unroll
    for (int i = 0; i < C::kStages - 1; ++i) copy_next();
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[m][tile][i] = 0.0f;
      }
    }
    const int last_plane = (last_output - 1 + C::kPaddingD) / C::kStrideD;
    int stage = 0;
    for (int plane = first_plane; plane <= last_plane; ++plane) {
      const bool waiting = plane > first_plane;  // the outputs of the plane before are still to be gathered
      if (plane < args.x_size.d) {
        for (int chunk = 0; chunk < kChunks; ++chunk) {
          ptx::copy_wait<C::kStages - 2>();
          __syncthreads();  // the stage is there for all, and all have left the one before
          copy_next();
          multiply(ring + stage * kStageItems, chunk);
          stage = stage + 1 < C::kStages ? stage + 1 : 0;
          if (waiting && chunk < kGatherChunks) gather_rounds(chunk, kGatherChunks, plane - 1);
        }
        if (kChunks == 1) __syncthreads();
      } else {  // planes past the input only complete outputs
        __syncthreads();
        if (waiting) gather_rounds(0, 1, plane - 1);
        __syncthreads();
      }
      exchange();
    }
    __syncthreads();
    gather_rounds(0, 1, last_plane);
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = FewOutputs<Config>;
  unsigned* shared = dynamic_shared<unsigned>();
  float* columns = reinterpret_cast<float*>(shared + Kernel::kSteps * Kernel::kTiles * 64);
  auto* ring = reinterpret_cast<typename Config::Scalar*>(columns + Kernel::kGroupTiles * 8 * Config::kPitch);
  Kernel kernel{args, shared, columns, ring};
  kernel.compute();
}

}  // namespace tconv3d
