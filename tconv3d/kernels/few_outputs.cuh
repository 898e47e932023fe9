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
// The rows of the product are the positions of the tile and its halo, in lines of kLineW. No row is another
// warp's business: a warp copies its own rows of x, asynchronously and in the caller's layout, in chunks of
// channels, into a ring of its own, kStages - 1 chunks ahead of its products and across planes. So warps wait
// for each other only where columns change hands, twice a plane. Between, half of them first gather the
// outputs of the plane before and then multiply, the others the other way round.
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
  static constexpr int kHalo = C::kHaloH * C::kLineW;
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

  // A stage of a warp's ring: [channel][row], or, channels-last, [row][channel]. A vector is what one copy
  // moves; where kVector is 0, elements pass through registers one by one. A tile of 16 rows is copied in
  // rounds, every lane one vector.
  static constexpr int kVector = C::kVector > 0 ? C::kVector : 1;
  static constexpr int kLead = C::kChannelsLast ? 0 : ((C::kOriginW % kVector) + kVector) % kVector;
  static constexpr int kRowVectors = C::kChannelsLast ? C::kChunk / kVector : 16 / kVector;  // in a row
  static constexpr int kRoundRows = kLanes / kRowVectors;  // of channels, or, channels-last, of positions
  static constexpr int kCopyRounds = (C::kChannelsLast ? 16 : C::kChunk) / kRoundRows;
  static constexpr int kStageItems = (C::kChannelsLast ? 16 * C::kRowTiles : C::kChunk) * C::kItemPitch;

  // Rounds in which the block's threads gather the outputs of a plane.
  static constexpr int kRounds = (C::kStrideD * kPositions + C::kThreads - 1) / C::kThreads;

  static_assert(C::kThreads % kLanes == 0, "whole warps");
  static_assert(C::kLineW % 16 == 0 && kRows >= kHalo, "lines are whole tiles of rows, and all have a warp");
  static_assert(C::kWholeLines
                    ? C::kTileW == C::kLineW && C::kOriginW == 0
                    : kLead + C::kHaloW <= C::kLineW && (C::kChannelsLast || C::kTileW % kVector == 0),
                "a line holds what the tile's taps read, from a vector's beginning");
  static_assert(C::kPitch >= kRows && C::kPitch % 32 == 4,
                "columns of c: room for all rows, and stores of fragments without bank conflicts");
  static_assert(C::kChunk % kStepItems == 0 && C::kChunk % kVector == 0, "whole steps and vectors");
  static_assert(kRoundRows * kRowVectors == kLanes &&
                    kCopyRounds * kRoundRows * kRowVectors * kVector == 16 * C::kChunk,
                "lanes share a tile evenly");
  static_assert(C::kChannelsLast ? C::kItemPitch >= C::kChunk
                                 : C::kItemPitch % 16 == 8 && C::kItemPitch >= 16 * C::kRowTiles,
                "loads of fragments without bank conflicts");
  static_assert(C::kVector == 0 || kVector * kItemBytes % 4 == 0, "copies move words");
  static_assert(C::kStages >= 2);

  const Args& args;
  unsigned* weights;  // in shared memory: [step][column tile][lane][2], as the instruction wants them
  float* columns;     // in shared memory: [column][kPitch]
  Scalar* ring;       // in shared memory, this warp's: [kStages][kStageItems]
  const Scalar* x;    // the first plane of the block's input, this lane's channel in a round of copies
  int n, group, tile_h, tile_w, first_output, last_output, first_plane;
  int lane, warp;
  Index from[C::kRowTiles];  // what this lane copies of a tile of rows: offset in a plane of x, -1: zeros
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
  }

  // The first row of the warp's m-th tile of 16.
  __device__ __forceinline__ int tile_row(int m) const { return (warp * C::kRowTiles + m) * 16; }

  // ---- The ring.

  __device__ __forceinline__ int copy_channel(int round) const {  // of this lane, within its chunk
    return C::kChannelsLast ? lane % kRowVectors * kVector : lane / kRowVectors + round * kRoundRows;
  }

  __device__ __forceinline__ void start_ring() {
    copy_stage = copy_chunk = copy_plane = 0;
    x = static_cast<const Scalar*>(args.x) + n * args.x_strides.n +
        (static_cast<long long>(group) * C::kIn + copy_channel(0)) * args.x_strides.c +
        first_plane * args.x_strides.d;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      const int h = tile_h + C::kOriginH + tile_row(m) / C::kLineW;
      const int w = copy_w(m, 0);
      const bool inside = tile_row(m) < kHalo && h >= 0 && h < args.x_size.h &&
                          (C::kChannelsLast || (w >= 0 && w < args.x_size.w));
      from[m] = inside ? h * static_cast<Index>(args.x_strides.h) +
                             (C::kChannelsLast ? Index(0) : w * static_cast<Index>(args.x_strides.w))
                       : Index(-1);
    }
  }

  // Where along w this lane's vector of a tile of rows begins.
  __device__ __forceinline__ int copy_w(int m, int round) const {
    const int first = tile_w + C::kOriginW - kLead + tile_row(m) % C::kLineW;
    return first +
           (C::kChannelsLast ? lane / kRowVectors + round * kRoundRows : lane % kRowVectors * kVector);
  }

  // Copies the next chunk of the warp's rows, if there is one. Every call is one group of copies.
  __device__ __forceinline__ void copy_next() {
    if (first_plane + copy_plane < args.x_size.d) {
      const Scalar* chunk = x + copy_plane * args.x_strides.d +
                            copy_chunk * static_cast<long long>(C::kChunk) * args.x_strides.c;
      Scalar* stage = ring + copy_stage * kStageItems;
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
        for (int round = 0; round < kCopyRounds; ++round) {
          const int w = copy_w(m, round);
          const bool exists =
              C::kIn % C::kChunk == 0 || copy_channel(round) < C::kIn - copy_chunk * C::kChunk;
          const bool inside = from[m] >= 0 && exists && (!C::kChannelsLast || (w >= 0 && w < args.x_size.w));
          const Index further = C::kChannelsLast ? w * static_cast<Index>(args.x_strides.w)
                                                 : round * kRoundRows * static_cast<Index>(args.x_strides.c);
          // Where there is nothing to copy, any valid address: the tensor's first.
          const Scalar* address = inside ? chunk + (from[m] + further) : static_cast<const Scalar*>(args.x);
          const int row =
              C::kChannelsLast ? lane / kRowVectors + round * kRoundRows : lane % kRowVectors * kVector;
          Scalar* to = stage + (C::kChannelsLast ? (m * 16 + row) * C::kItemPitch + copy_channel(round)
                                                 : copy_channel(round) * C::kItemPitch + m * 16 + row);
          if constexpr (C::kVector > 0) {
            ptx::copy_words<kVector * kItemBytes / 4>(to, address, inside);
          } else {
            *to = inside ? load_constant(address) : Scalar{};
          }
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
        for (int i = 0; i < 4; ++i) {  // row lane/4 or 8 further, K lane%4 or 4 words further
          const int row = m * 16 + lane / 4 + i % 2 * 8;
          a[m][i] = operand(stage, channel_of(step, i / 2), C::kChannelsLast ? row * C::kItemPitch : row);
        }
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
          if (tile < kGroupTiles)
            columns[column * C::kPitch + tile_row(m) + lane / 4 + i / 2 * 8] = sum[m][tile][i];
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
    const float* own = columns + j * (kPlaneColumns * C::kPitch) + qh * C::kLineW + qw + kLead;
    static_for<kPlaneTaps>([&](auto i) {
      constexpr int kPhase = C::kTapPhase(i), kShift = C::kTapShiftW(i);
      constexpr int kOffset = C::kTapShiftH(i) * C::kLineW + kShift;
      // Whole lines have no halo: past their ends there are zeros.
      const bool inside = !C::kWholeLines || (qw + kShift >= 0 && qw + kShift < C::kLineW);
#pragma unroll
      for (int co = 0; co < C::kOut; ++co) {
        const float* at = own + (i * C::kOut + co) * C::kPitch + kOffset;
        total[kPhase][co] += inside ? *at : 0.0f;
      }
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
          store_pair<C::kAligned>(at, both, w + 1 < args.y_size.w);
        } else {
          *at = result(total[f][co]);
        }
      }
    }
  }

  __device__ __forceinline__ void gather_plane(int plane) {
#pragma unroll 1  // registers are for the window
    for (int round = 0; round < kRounds; ++round) gather(threadIdx.x + round * C::kThreads, plane);
  }

  __device__ __forceinline__ void multiply_plane(int& stage) {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ptx::copy_wait<C::kStages - 2>();
      __syncwarp();  // the stage is there for all lanes, and all have left the one before
      copy_next();
      multiply(ring + stage * kStageItems, chunk);
      stage = stage + 1 < C::kStages ? stage + 1 : 0;
    }
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
    const bool gathers_first = warp / 4 % 2 == 0;  // a scheduler has every fourth warp
    int stage = 0;
    __syncthreads();
    for (int plane = first_plane; plane <= last_plane; ++plane) {
      const bool waiting = plane > first_plane;  // the outputs of the plane before are still to be gathered
      if (waiting && gathers_first) gather_plane(plane - 1);
      if (plane < args.x_size.d) multiply_plane(stage);  // planes past the input only complete outputs
      if (waiting && !gathers_first) gather_plane(plane - 1);
      __syncthreads();  // the columns have been read
      exchange();
      __syncthreads();
    }
    gather_plane(last_plane);
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Kernel = FewOutputs<Config>;
  unsigned* shared = dynamic_shared<unsigned>();
  float* columns = reinterpret_cast<float*>(shared + Kernel::kSteps * Kernel::kTiles * 64);
  auto* rings =
      reinterpret_cast<typename Config::Scalar*>(columns + Kernel::kGroupTiles * 8 * Config::kPitch);
  const int warp = static_cast<int>(threadIdx.x) / Kernel::kLanes;
  Kernel kernel{args, shared, columns, rings + warp * (Config::kStages * Kernel::kStageItems)};
  kernel.compute();
}

}  // namespace tconv3d
