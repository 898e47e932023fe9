// Weight gradient of layers with few input or few output channels, on tensor cores.
//
// One of the tensors x and dy has many channels (m), the other has few (s). Position q (geometry.py, Gather)
// reads m at step_out*q + phase and s at step_in*q + offset(tap), for every tap of the phase:
//
//   dw[many][few, tap] = sum over q of  m[step_out*q + phase(tap)][many] * s[step_in*q + offset(tap)][few]
//
// This is a matrix product with K = positions, a row for every channel of m, and a column for every pair of
// tap and channel of s: the taps fill columns that the few channels alone would leave idle.
//
// A block owns up to 16*kRowTiles rows and some tiles of 8 columns, and loops over tiles of positions
// (boxes of the volume). m is read once, in the caller's layout, straight into shared memory as
// [channel][phase] [position]; s is read as the small part that a tile's taps need (few_channels.cuh). Both
// are double-buffered, so that the copies of the next tile are in flight while a tile is multiplied. K may be
// permuted if both operands agree: a lane loads 16 bytes of neighbouring positions of m, and the matching
// positions of s shifted by its column's tap.
//
// Warps differ in their columns (kSets) or in their positions (kSlices, summed at the end in a fixed order).
// Every block writes a partial sum of its own (split-K), and reduce.cuh adds the partial sums in a fixed
// order.
#pragma once

#include "few_channels.cuh"

namespace tconv3d {

template <class C>
struct FewWeightGrad {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;
  using Operand = OperandOf<Scalar>;

  static constexpr int kLanes = 32, kWarps = C::kThreads / kLanes;
  static constexpr int kSlices = kWarps / C::kSets;
  static constexpr int kItemBytes = static_cast<int>(sizeof(Scalar));
  static constexpr int kWordItems = 4 / kItemBytes;  // operands per 32-bit register
  static constexpr int kRun = 16 / kItemBytes;       // neighbouring positions per lane
  static constexpr int kGroup = 4 * kRun;            // positions (K) of two mma instructions
  static constexpr int kBlockMany = 16 * C::kRowTiles;
  static constexpr int kBlocksMany = (C::kManyPerGroup + kBlockMany - 1) / kBlockMany;
  static constexpr int kBlockTiles = C::kSets * C::kWarpTiles;
  static constexpr int kBlocksColumns = (C::kTiles + kBlockTiles - 1) / kBlockTiles;
  static constexpr int kKinds = C::kGroups * kBlocksMany * kBlocksColumns;
  static constexpr int kVector = C::kVector > 0 ? C::kVector : 1;  // elements per copy of m

  // Shared memory holds the offset in s of every run of positions, then two buffers of m and two of s.
  static constexpr int kRuns = C::kRows / kRun;
  static constexpr int kBuffers = (kRuns + 3) / 4 * 4;                           // words before the buffers
  static constexpr int kManyWords = kBlockMany * C::kChannelPitch / kWordItems;  // words per buffer of m

  static_assert(kWarps % C::kSets == 0);
  static_assert(C::kRows % kGroup == 0);
  static_assert(C::kChannelPitch >= C::kPhases * C::kPhasePitch && C::kPhasePitch >= C::kRows);
  static_assert(C::kChannelPitch / kWordItems % 32 == 16 && C::kPhasePitch % kRun == 0,
                "loads of fragments without bank conflicts");
  static_assert(C::kVector == 0 || kVector * kItemBytes % 4 == 0, "copies move words");
  static_assert(kVector == 1 || C::kOutputStepW == 1, "neighbours of a phase are neighbours in memory");
  static constexpr int kSums = C::kRowTiles * C::kWarpTiles * 4;

  const Args& args;
  unsigned* shared;
  int lane, warp, set, slice;
  int group, first_many, first_tile;
  int column_place[C::kWarpTiles];  // offset of this lane's column in the part of s
  int phase_place[C::kWarpTiles];   // offset of the column's phase in a channel of m
  float sum[C::kRowTiles][C::kWarpTiles][4];

  __device__ __forceinline__ FewPart<C> part() const {
    const Scalar* first = static_cast<const Scalar*>(args.few) +
                          static_cast<long long>(group) * C::kReduced * args.few_strides.c;
    return FewPart<C>{args.tiles, args.few_size, args.few_strides, first};
  }
  __device__ __forceinline__ Scalar* many_at(int buffer) const {
    return reinterpret_cast<Scalar*>(shared + kBuffers + buffer * kManyWords);
  }
  __device__ __forceinline__ Scalar* part_at(int buffer) const {
    return reinterpret_cast<Scalar*>(shared + kBuffers + 2 * kManyWords) + buffer * part().items();
  }

  // The phase, tap and channel of s of a matrix column. A column that does not exist has the first tap of its
  // phase.
  struct Column {
    int phase, tap, few;
    bool exists;
  };
  __device__ __forceinline__ Column column_of(int tile, int column) const {
    const bool has_tile = tile < C::kTiles;
    const int known = has_tile ? tile : 0, f = C::kTilePhase(known);
    const int k = C::kTileColumn(known) + column;
    const int tap = C::kFirstTap(f) + k / C::kReduced;
    const bool exists = has_tile && tap < C::kFirstTap(f + 1);
    return Column{f, exists ? tap : C::kFirstTap(f), k % C::kReduced, exists};
  }

  __device__ __forceinline__ void locate() {
    shared = dynamic_shared<unsigned>();
    lane = threadIdx.x % kLanes;
    warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / kLanes, 0);
    set = warp % C::kSets;
    slice = warp / C::kSets;
    int kind = static_cast<int>(blockIdx.x) % kKinds;
    first_tile = kind % kBlocksColumns * kBlockTiles + set * C::kWarpTiles;
    kind /= kBlocksColumns;
    first_many = kind % kBlocksMany * kBlockMany;
    group = kind / kBlocksMany;
#pragma unroll
    for (int j = 0; j < C::kWarpTiles; ++j) {
      // Columns that do not exist read the data of other columns, and are never written.
      const Column column = column_of(first_tile + j, lane / 4);
      column_place[j] = part().tap_place(column.tap, column.few);
      phase_place[j] = column.phase * C::kPhasePitch;
    }
  }

  // Writes the offsets at which runs of positions read s, and zeros for the padding positions of m behind the
  // tile.
  __device__ __forceinline__ void write_tables() {
    const Extent& tile = args.tiles.tile;
    const int used = tile.d * tile.h * tile.w;
    int* const runs = reinterpret_cast<int*>(shared);
    for (int i = threadIdx.x; i < kRuns; i += C::kThreads) {
      const int row = i * kRun, line = row / tile.w;
      runs[i] = row < used ? part().position_place(line / tile.h, line % tile.h, row - line * tile.w) : 0;
    }
    const int rest = (used + kGroup - 1) / kGroup * kGroup - used;
    for (int i = threadIdx.x; i < 2 * kBlockMany * C::kPhases * rest; i += C::kThreads) {
      const int row = i % rest, f = i / rest % C::kPhases, channel = i / rest / C::kPhases;
      many_at(channel /
              kBlockMany)[channel % kBlockMany * C::kChannelPitch + f * C::kPhasePitch + used + row] =
          Scalar{};
    }
  }

  // Copies one tile of m. A thread copies one vector position (or a few) of the tile, in several channels.
  __device__ __forceinline__ void copy_many(const TileOrigin& tile, Scalar* buffer) const {
    const Extent& shape = args.tiles.tile;
    const int lanes = 1 << args.copy_lanes_shift;
    const Scalar* sample =
        static_cast<const Scalar*>(args.many) + tile.n * args.many_strides.n +
        (static_cast<long long>(group) * C::kManyPerGroup + first_many) * args.many_strides.c;
    // Neighbouring threads copy neighbouring positions, or, channels-last, neighbouring channels first.
    const int thread = static_cast<int>(threadIdx.x) / C::kChannelLanes;
    const int first_channel =
        (thread >> args.copy_lanes_shift) * C::kChannelLanes + threadIdx.x % C::kChannelLanes;
    const int channel_step = (C::kThreads / C::kChannelLanes >> args.copy_lanes_shift) * C::kChannelLanes;
    for (int i = thread & (lanes - 1); i < args.tile_vectors; i += lanes) {
      const int line = divide(i, args.by_line_vectors), line_d = divide(line, args.by_tile_lines);
      const int line_h = line - line_d * static_cast<int>(args.by_tile_lines.divisor);
      const int place_w = (i - line * args.line_vectors) * kVector;
      const int d = tile.d * C::kOutputStepD + line_d, h = tile.h * C::kOutputStepH + line_h;
      const int w = tile.w * C::kOutputStepW + place_w;
      const bool inside = d < args.many_size.d && h < args.many_size.h && w < args.many_size.w;
      const int f =
          (line_d % C::kOutputStepD * C::kOutputStepH + line_h % C::kOutputStepH) * C::kOutputStepW +
          place_w % C::kOutputStepW;
      const int row = (line_d / C::kOutputStepD * shape.h + line_h / C::kOutputStepH) * shape.w +
                      place_w / C::kOutputStepW;
      const Index offset = inside ? d * static_cast<Index>(args.many_strides.d) +
                                        h * static_cast<Index>(args.many_strides.h) +
                                        w * static_cast<Index>(args.many_strides.w)
                                  : Index(0);
      const Index step = static_cast<Index>(args.many_strides.c);
      Scalar* to = buffer + f * C::kPhasePitch + row;
      TCONV3D_ASSUME(!inside || w + kVector <= args.many_size.w);
#pragma unroll 4
      for (int channel = first_channel; channel < kBlockMany; channel += channel_step) {
        const bool there =
            inside && (C::kManyPerGroup % kBlockMany == 0 || first_many + channel < C::kManyPerGroup);
        const Scalar* from = sample + (there ? offset + channel * step : Index(0));
        if constexpr (C::kVector > 0) {
          ptx::copy_words<kVector * kItemBytes / 4>(to + channel * C::kChannelPitch, from, there);
        } else {
          to[channel * C::kChannelPitch] = there ? load_constant(from) : Scalar{};
        }
      }
    }
  }

  __device__ __forceinline__ void copy(int index, int buffer) const {
    const TileOrigin tile = tile_at(index, args.tiles);
    copy_many(tile, many_at(buffer));
    part().copy(tile, part_at(buffer));
    ptx::copy_commit();
  }

  // ---- The product.

  using Run = Vector<unsigned, 4>;  // words of kRun neighbouring positions

  // Loads this lane's rows (lane/4 and lane/4 + 8 of every row tile) at one run of positions.
  __device__ __forceinline__ void load_rows(const Scalar* many, int place, Run (&a)[C::kRowTiles][2]) const {
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = m * 16 + half * 8 + lane / 4;
        a[m][half] =
            load_vector<4>(reinterpret_cast<const unsigned*>(many + channel * C::kChannelPitch + place));
        if constexpr (kWordItems == 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][half].at[i] = Operand::bits(ptx::bits_to_float(a[m][half].at[i]));
        }
      }
    }
  }

  __device__ __forceinline__ Run load_column(const Scalar* few) const {
    Run b;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int places[kWordItems];
#pragma unroll
      for (int item = 0; item < kWordItems; ++item) places[item] = (i * kWordItems + item) * C::kInputStepW;
      b.at[i] = FewPart<C>::operand(few, places);
    }
    return b;
  }

  __device__ __forceinline__ void multiply(const Scalar* many, const Scalar* few) {
    const Extent& tile = args.tiles.tile;
    const int groups = (tile.d * tile.h * tile.w + kGroup - 1) / kGroup;
    for (int g = slice; g < groups; g += kSlices) {
      const int run = g * 4 + lane % 4;
      const Scalar* from = few + reinterpret_cast<const int*>(shared)[run];
      Run a[C::kRowTiles][2];
      if constexpr (C::kPhases == 1) load_rows(many, run * kRun, a);
#pragma unroll
      for (int j = 0; j < C::kWarpTiles; ++j) {
        if constexpr (C::kPhases > 1) load_rows(many, phase_place[j] + run * kRun, a);
        const Run b = load_column(from + column_place[j]);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const unsigned words[2] = {b.at[2 * step], b.at[2 * step + 1]};
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            const unsigned rows[4] = {a[m][0].at[2 * step], a[m][1].at[2 * step], a[m][0].at[2 * step + 1],
                                      a[m][1].at[2 * step + 1]};
            ptx::warp_multiply<Operand::kOperand>(sum[m][j], rows, words);
          }
        }
      }
    }
  }

  // ---- The result.

  // Adds up the sums of the slices, one slice after the other.
  __device__ __forceinline__ void add_slices() {
    float* const scratch = reinterpret_cast<float*>(shared + kBuffers) + (set * kLanes + lane) * kSums;
    float* const own = &sum[0][0][0];
    for (int s = 1; s < kSlices; ++s) {
      __syncthreads();
      if (slice == s) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) scratch[i] = own[i];
      }
      __syncthreads();
      if (slice == 0) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) own[i] += scratch[i];
      }
    }
  }

  __device__ __forceinline__ void store() const {
    constexpr long long kAll = static_cast<long long>(C::kGroups) * C::kManyPerGroup * C::kReduced * C::kTaps;
    float* parts = static_cast<float*>(args.parts) + blockIdx.x / kKinds * kAll + group * (kAll / C::kGroups);
#pragma unroll
    for (int j = 0; j < C::kWarpTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Column column = column_of(first_tile + j, lane % 4 * 2 + e);
        const int tap =
            (C::kTapD(column.tap) * C::kKernelH + C::kTapH(column.tap)) * C::kKernelW + C::kTapW(column.tap);
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int channel = first_many + m * 16 + half * 8 + lane / 4;
            if (column.exists && channel < C::kManyPerGroup)
              parts[channel * static_cast<long long>(C::kManyStride) + column.few * C::kFewStride + tap] =
                  sum[m][j][half * 2 + e];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void compute() {
    locate();
    write_tables();
#pragma unroll
    for (int i = 0; i < kSums; ++i) (&sum[0][0][0])[i] = 0.0f;
    const int step = gridDim.x / kKinds;
    int index = blockIdx.x / kKinds, buffer = 0;
    if (index < args.tiles.count) copy(index, buffer);
    for (; index < args.tiles.count; index += step) {
      ptx::copy_wait<0>();
      part().round(part_at(buffer));
      // The tile is visible to all threads from here on, and no thread still reads the other buffer.
      __syncthreads();
      if (index + step < args.tiles.count) copy(index + step, buffer ^ 1);
      multiply(many_at(buffer), part_at(buffer));
      buffer ^= 1;
    }
    add_slices();
    if (slice == 0) store();
  }
};

template <class Config>
__device__ void run(const Args& args) {
  FewWeightGrad<Config> kernel{args};
  kernel.compute();
}

}  // namespace tconv3d
