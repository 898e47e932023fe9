// The weight gradient on tensor cores (TF32, float16, bfloat16; compute capability 8.0 and up):
//   dw[ci][co][t] = sum over n, i of  x[n][ci][i] * dy[n][co][stride*i + t*dilation - padding]
//
// For one tap this is a matrix product with the positions i as its K dimension: rows ci, columns co. A block
// owns a tile of channels and some rows of taps (t_d, t_h; all taps along w) and loops over its positions:
//
//   for each tile of positions (a box of the volume, w in segments of four 32-bit words):
//     copy x[ci][positions] and dy[co][positions the taps reach] to shared memory, w along a row;
//     dy in one plane per phase of w, so that adjacent positions are adjacent for every tap, or with
//     kStep == 2 as whole lines, whose phases alternate
//
//     for each chunk of four segments, one for each lane of a quad:
//       load the fragments of x, once for all taps
//
//       for each row of taps, for each window of dy (two adjacent segments, for several taps):
//         for each tap of the window:  sums[tap] += x (x) dy shifted by the tap, out of registers
//
// Whole lines are copied by wide accesses, 16-bit numbers asynchronously too, and the words of both phases
// are in registers: TF32 takes every other register, 16-bit types join halves of two.
//
// K may be permuted if both operands are: a lane takes a whole segment (one 16-byte load) where the
// instruction wants separate columns, so a tap's shift along w selects other registers of the same window
// (for 16-bit types an odd shift joins halves of two registers). Shifts along d and h change the address of
// the window.
//
// With kLinePairs, a chunk has segments of two neighbouring lines of x. The warp's rows are then neighbours
// along h, and the lines read all but two of their lines of dy together, which are loaded once.
//
// While a tile is computed, a later one is prefetched in jobs (some channels of 32 words) that a warp issues
// between parts of the arithmetic: loads into registers, which are rounded and stored to the other buffer one
// part later; or (kAsync, whole words only) cp.async copies, which are rounded when fragments are loaded.
//
// Warps of a block differ in their rows of taps, their channels, or their chunks (kSlices, added at the end
// in a fixed order). Partial sums (split-K) are written side by side and added by another launch in a fixed
// order.
//
// With kBias, some warps add dy for the bias gradient too (tensor_weight_grad_bias.cuh).
#pragma once

#include "tensor_weight_grad_bias.cuh"
#include "tensor_weight_grad_copies.cuh"

namespace tconv3d {

template <class C>
struct TensorWeightGrad {
  using Copies = WeightGradCopies<C>;
  using Copy = typename Copies::Copy;
  using Kind = typename Copies::Kind;

  static constexpr int kLanes = 32;
  static constexpr int kWarps = C::kThreads / kLanes, kSchedulers = 4;
  using Products = WeightGradProducts<C>;
  static constexpr bool kStrict = Products::kStrict;
  static constexpr int kPerWord = Products::kPerWord;
  static constexpr int kSegment = Products::kSegment;
  static constexpr int kSegmentsPerChunk = 4;    // segments per chunk, one for each lane of a quad
  static constexpr int kLines = Copies::kLines;  // lines of x of a chunk
  static constexpr int kTileSums = Products::kTileSums;
  static constexpr ptx::Operand kOperand = Products::kOperand;

  static_assert(kWarps * kLanes == C::kThreads);
  static_assert(kWarps == C::kWarpsRows * C::kWarpsIn * C::kWarpsOut * C::kSlices, "every warp has its part");
  static_assert(C::kWarpsRows * C::kRows >= C::kRowsD * C::kRowsH, "every row of taps has its warp");
  static_assert(!C::kHalfRows || (C::kTilesIn == 1 && C::kWarpsIn == 1 && C::kInPerGroup <= 8));
  static_assert(C::kStep == 1 ? C::kPitchY % 32 == 16 : C::kPitchY % 8 == 4,
                "fragment loads of two channels without bank conflicts");
  static_assert(C::kStep == 1 || (C::kStep == C::kStrideW && C::kPhases == 1 && C::kHalves == 1));
  static_assert(C::kSegments % (kLines * kSegmentsPerChunk) == 0);
  static_assert(!C::kLinePairs ||
                    (C::kAsync && !kStrict && C::kStrideH == 1 && C::kDilationH == 1 &&
                     C::kRowsH % C::kRows == 0 && C::kWarpsRows * C::kRows == C::kRowsD * C::kRowsH),
                "the rows of a warp are neighbours along h, and so are the lines of dy that they read");
  static_assert(C::kHooks >= 1 && (C::kAsync || C::kHooks <= C::kRows * C::kTilesOut), "jobs per chunk");
  static_assert((kOperand == ptx::Operand::kTf32) == (kPerWord == 1));
  static constexpr int kSums = C::kRows * C::kTaps * C::kTilesIn * C::kTilesOut * kTileSums;
  static_assert(C::kSlices == 1 || C::kSharedBytes >= 4 * kSums * kLanes * (kWarps / C::kSlices),
                "the sums of a slice pass through shared memory");

  const Args& args;
  unsigned* shared;
  int lane, warp, slice, warp_in, warp_out;
  int first_row;            // first row of taps of the warp, among the block's
  int row_words[C::kRows];  // offsets of the warp's rows of taps in a plane of dy, in words
  float sums[C::kRows][C::kTaps][C::kTilesIn][C::kTilesOut][kTileSums];
  // In strict float32, what the last additions to `sums` have rounded off.
  float rests[kStrict ? C::kRows : 1][C::kTaps][C::kTilesIn][C::kTilesOut][kTileSums];
  WeightGradBias<C> bias;

  __device__ __forceinline__ void locate() {
    shared = dynamic_shared<unsigned>();
    lane = threadIdx.x % kLanes;
    // The shuffle lets the compiler know that the value is uniform in a warp, so that values derived from it
    // are computed once per warp.
    warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / kLanes, 0);
    int rest = warp;
    warp_out = rest % C::kWarpsOut;
    rest /= C::kWarpsOut;
    warp_in = rest % C::kWarpsIn;
    rest /= C::kWarpsIn;
    first_row = rest % C::kWarpsRows * C::kRows;
    slice = rest / C::kWarpsRows;
    if (threadIdx.x == 0) *reinterpret_cast<Kind*>(shared) = Copies::kind();
    const int plane_pitch = args.lines_h * args.line_pitch;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      // Rows of taps past the block's last one repeat it, and their sums are never written.
      const int row = min(first_row + r, C::kRowsD * C::kRowsH - 1);
      row_words[r] =
          row / C::kRowsH * C::kDilationD * plane_pitch + row % C::kRowsH * C::kDilationH * args.line_pitch;
    }
  }

  // ---- The arithmetic.

  // Multiplies the lines of x with a line of dy, of one tile of output channels: for the first line of x it
  // is that of row kLine of taps, for the second that of the row before. `adds` says whether the lane adds
  // dy.
  template <int kLine, int kOut>
  __device__ __forceinline__ void multiply(const typename Products::FragmentsX (&x)[kLines],
                                           const unsigned* dy, bool adds) {
    static_for<C::kWindows>([&](auto v) {
      constexpr int kV = decltype(v)::value;
      constexpr int kPlace = C::kWindowPhase(kV) * C::kPlane + C::kWindowStart(kV);
      const unsigned* const from = dy + kOut * 8 * C::kPitchY + kPlace;
      unsigned window[C::kHalves][Products::kWindow];
      static_for<C::kWindowWords(kV) / kSegment>([&](auto i) {
        constexpr int kFirst = decltype(i)::value * kSegment;
        const auto loaded = load_vector<kSegment>(from + kFirst);
        if constexpr (C::kBias) {
          if (adds) bias.template add<kV, kFirst, kOut>(loaded);
        }
        if constexpr (kStrict) {
          Products::to_halves(window[0] + kFirst, window[1] + kFirst, loaded);
        } else {
          Products::to_operands(window[0] + kFirst, loaded);
        }
      });
      static_for<C::kTaps>([&](auto t) {
        constexpr int kT = decltype(t)::value;
        if constexpr (C::kTapWindow(kT) == kV) {
          constexpr int kOffset = C::kTapOffset(kT);
          typename Products::FragmentsY b;
#pragma unroll
          for (int half = 0; half < C::kHalves; ++half) {
            b[half][0][0] = Products::template shifted<0, kOffset>(window[half]);
            b[half][0][1] = Products::template shifted<1, kOffset>(window[half]);
            b[half][1][0] = Products::template shifted<2, kOffset>(window[half]);
            b[half][1][1] = Products::template shifted<3, kOffset>(window[half]);
          }
          if constexpr (kStrict) {
#pragma unroll
            for (int m = 0; m < C::kTilesIn; ++m)
              Products::multiply_halves(sums[kLine][kT][m][kOut], rests[kLine][kT][m][kOut], x[0], m, b);
          } else {
            static_for<Products::kSteps * kLines>([&](auto i) {
              constexpr int kStep = decltype(i)::value / kLines, kOf = decltype(i)::value % kLines;
              if constexpr (kLine >= kOf && kLine - kOf < C::kRows) {
#pragma unroll
                for (int m = 0; m < C::kTilesIn; ++m)
                  Products::template multiply_step<0>(sums[kLine - kOf][kT][m][kOut], x[kOf][0][m], kStep, b);
              }
            });
          }
        }
      });
    });
  }

  // Computes the warp's chunks of a tile. Asynchronous copies are issued between chunks, when registers hold
  // no fragments. The warps of a scheduler take turns: some begin with copies and the others with a chunk, so
  // that tensor cores do not wait while addresses are computed.
  __device__ __forceinline__ void compute_chunks(int chunks, const unsigned* buffer, const Copies& copies,
                                                 Copy& copy) {
    bool copying = C::kAsync && warp / kSchedulers % 2 == 0;
    for (int chunk = slice; chunk < chunks;) {
      if (copying) {
#pragma unroll 1
        for (int i = 0; i < C::kHooks; ++i) copies.advance(copy);
      } else {
        compute_chunk(chunk, buffer, copies, copy);
        if constexpr (C::kBias) bias.end_chunk();
        chunk += C::kSlices;
      }
      copying = C::kAsync && !copying;
    }
  }

  // Computes one chunk, and advances the copy of a later tile in between if it goes through registers.
  __device__ __forceinline__ void compute_chunk(int chunk, const unsigned* buffer, const Copies& copies,
                                                Copy& copy) {
    const int place = chunk * kSegmentsPerChunk + lane % 4;  // a segment's number, or a pair's
    const unsigned segment = (shared + Copies::kSegmentTable)[place];
    const unsigned* const x_channel = buffer + (warp_in * C::kTilesIn * 16 + lane / 4) * C::kPitchX;
    const unsigned* const dy = buffer + Copies::kBufferY +
                               (warp_out * C::kTilesOut * 8 + lane / 4) * C::kPitchY +
                               (C::kLinePairs ? segment >> 16 : segment);
    typename Products::FragmentsX x[kLines];
    const unsigned zero = static_cast<unsigned>(args.tiles) >> 31;
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
      const int words = C::kLinePairs ? static_cast<int>(segment >> 8 * l & 0xFFu) : place;
      load_line(x[l], x_channel + words * kSegment, zero);
    }
    // Segments beyond the tile read dy of others.
    const int places = args.tile.d * args.tile.h * args.tile.w / kLines;
    unsigned own = C::kBias && place < places ? bias.rows : 0u;
    if (C::kLinePairs) own |= own << 1;
    constexpr int kParts = (C::kRows + kLines - 1) * C::kTilesOut;
    static_for<kParts>([&](auto part) {
      constexpr int kPart = decltype(part)::value, kLine = kPart / C::kTilesOut;
      const int words = C::kLinePairs ? row_words[0] + kLine * args.line_pitch : row_words[kLine];
      multiply<kLine, kPart % C::kTilesOut>(x, dy + words, (own >> kLine & 1) != 0);
      if constexpr (!C::kAsync && (kPart + 1) * C::kHooks % kParts < C::kHooks) copies.advance(copy);
    });
  }

  // Loads the fragments of a chunk of a line of x, whose words in the lane's first channel are `from`.
  __device__ __forceinline__ void load_line(typename Products::FragmentsX& x, const unsigned* from,
                                            unsigned zero) const {
#pragma unroll
    for (int m = 0; m < C::kTilesIn; ++m) {
      const unsigned* const channel = from + 16 * m * C::kPitchX;
      if constexpr (Products::kSharedRows) {
        Products::to_halves(x[0][m][0], x[0][m][1], load_vector<kSegment>(channel));
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned* const row = channel + (C::kHalfRows ? 0 : 8 * half) * C::kPitchX;
          if constexpr (kStrict) {
            Products::to_halves(x[0][m][half], x[1][m][half], load_vector<kSegment>(row));
          } else {
            Products::load_rows(x[0][m][half], row, zero);
          }
        }
      }
    }
  }

  // ---- The epilogue: slices are added, and the first slice's warps write the sums.

  template <class Body>
  __device__ __forceinline__ void for_each_sum(Body&& body) {
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
#pragma unroll
      for (int t = 0; t < C::kTaps; ++t) {
#pragma unroll
        for (int m = 0; m < C::kTilesIn; ++m) {
#pragma unroll
          for (int n = 0; n < C::kTilesOut; ++n) {
#pragma unroll
            for (int e = 0; e < kTileSums; ++e) body(sums[r][t][m][n][e], r, t, m, n, e);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add_slices() {
    constexpr int kThreadsPerSlice = C::kThreads / C::kSlices;
    float* const passed = reinterpret_cast<float*>(shared) + threadIdx.x % kThreadsPerSlice;
    for (int from = 1; from < C::kSlices; ++from) {
      __syncthreads();
      if (slice == from) {
        int i = 0;
        for_each_sum([&](float& sum, int, int, int, int, int) { passed[i++ * kThreadsPerSlice] = sum; });
      }
      __syncthreads();
      if (slice == 0) {
        int i = 0;
        for_each_sum([&](float& sum, int, int, int, int, int) { sum += passed[i++ * kThreadsPerSlice]; });
      }
    }
  }

  __device__ __forceinline__ void store() {
    constexpr long long kTapsAll = static_cast<long long>(C::kKernelD) * C::kKernelH * C::kKernelW;
    constexpr long long kSize =
        static_cast<long long>(C::kGroups) * C::kInPerGroup * C::kOutPerGroup * kTapsAll;
    const Kind block = Copies::kind();
    const int split = static_cast<int>(blockIdx.x) / Copies::kKinds;
    float* const parts = static_cast<float*>(args.parts) + split * kSize;
    const int in = block.first_in + warp_in * C::kTilesIn * 16 + lane / 4;
    const int out = block.first_out + warp_out * C::kTilesOut * 8 + lane % 4 * 2;
    for_each_sum([&](float& sum, int r, int t, int m, int n, int e) {
      const int row = first_row + r;
      const int d = block.tap_d + row / C::kRowsH, h = block.tap_h + row % C::kRowsH;
      const int ci = in + 16 * m + e / 2 * 8, co = out + 8 * n + e % 2;
      const bool exists = row < C::kRowsD * C::kRowsH && d < C::kKernelD && h < C::kKernelH &&
                          !(C::kHalfRows && e >= 2) && ci < C::kInPerGroup && co < C::kOutPerGroup;
      const long long channels =
          static_cast<long long>(block.group * C::kInPerGroup + ci) * C::kOutPerGroup + co;
      if (exists) parts[channels * kTapsAll + (d * C::kKernelH + h) * C::kKernelW + C::kTapW(t)] = sum;
    });
  }

  // Writes the sums for the bias gradient by way of the buffers, when they are free.
  __device__ __forceinline__ void store_bias() {
    static_assert(WeightGradBias<C>::kSharing * Copies::kBlockOut <= C::kStages * Copies::kBufferWords);
    const Kind block = Copies::kind();
    const int split = static_cast<int>(blockIdx.x) / Copies::kKinds;
    const int rows = block.tap_d / C::kRowsD * Copies::kRowBlocksH + block.tap_h / C::kRowsH;
    const int slot = C::kBiasSlot + rows * Copies::kBlocksIn + block.first_in / Copies::kBlockIn;
    const long long row = (split * C::kBiasSlots + slot) * C::kGroups + block.group;
    bias.template store<Copies::kBlockOut>(
        reinterpret_cast<float*>(buffer_of(0)), slice * C::kWarpsRows + first_row / C::kRows,
        warp_in == 0 ? warp_out * C::kTilesOut * 8 : -1,
        static_cast<float*>(args.bias_parts) + row * C::kOutPerGroup + block.first_out,
        min(Copies::kBlockOut, C::kOutPerGroup - block.first_out));
  }

  __device__ __forceinline__ void compute() {
    locate();
    for_each_sum([&](float& sum, int r, int t, int m, int n, int e) {
      sum = 0.0f;
      if constexpr (kStrict) rests[r][t][m][n][e] = 0.0f;
    });
    const Copies copies{args, shared, lane, warp};
    copies.write_tables();
    if constexpr (C::kBias) {
      const Kind block = Copies::kind();
      bias.begin(block.first_in / Copies::kBlockIn, warp_in == 0, block.tap_d, block.tap_h, first_row);
    }
    const Part<int> part(args.tiles, args.splits, static_cast<int>(blockIdx.x) / Copies::kKinds);
    constexpr int kOfChunk = kLines * kSegmentsPerChunk;
    const int chunks = (args.tile.d * args.tile.h * args.tile.w + kOfChunk - 1) / kOfChunk;
    // The last chunk may have segments beyond the tile: x is zero there, whatever dy is.
    for (int i = threadIdx.x; i < C::kStages * Copies::kBufferWords; i += C::kThreads)
      shared[Copies::kBuffers + i] = 0u;
    __syncthreads();
    Copy copy;
    // The copies of the first tiles do not overlap with arithmetic.
    for (int ahead = 0; ahead < C::kStages - 1; ++ahead) {
      const int index = part.begin + ahead;
      copies.begin(copy, index < part.end, index, buffer_of(ahead));
      while (copy.index < copy.jobs) copies.advance(copy);
      if (C::kAsync) ptx::copy_commit();
    }
    if (C::kAsync) ptx::copy_wait<C::kStages - 2>();
    __syncthreads();
    int current = 0;
    for (int index = part.begin; index < part.end; ++index) {
      const int ahead = index + C::kStages - 1;
      const int free = current == 0 ? C::kStages - 1 : current - 1;
      copies.begin(copy, ahead < part.end, ahead, buffer_of(free));
      if constexpr (C::kBias) bias.template begin_tile<Copies::kBlocksIn>();
      compute_chunks(chunks, buffer_of(current), copies, copy);
      while (copy.index < copy.jobs) copies.advance(copy);
      if (C::kAsync) {
        ptx::copy_commit();
        ptx::copy_wait<C::kStages - 2>();
      }
      __syncthreads();
      current = current + 1 == C::kStages ? 0 : current + 1;
    }
    if constexpr (C::kBias) store_bias();
    add_slices();
    if (slice == 0) store();
  }

  __device__ __forceinline__ unsigned* buffer_of(int index) const {
    return shared + Copies::kBuffers + index * Copies::kBufferWords;
  }
};

template <class Config>
__device__ void run(const Args& args) {
  TensorWeightGrad<Config> kernel{args};
  kernel.compute();
}

}  // namespace tconv3d
