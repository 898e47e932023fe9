// Forward pass of layers with few input channels, and input gradient of layers with few output channels, on
// tensor cores.
//
// Both passes gather (geometry.py, Gather): output step_out*q + phase is the sum over channels r and the
// phase's taps of x[step_in*q + offset(tap)][r] * w[tap][r]. This is a matrix product with one row per
// position q, one column per output channel, and K = (tap, channel r). K is long enough for tensor cores
// because it runs over all taps of the phase.
//
// Writing the result dominates the time, so every output is written once, in whole sectors. A block owns a
// tile of positions (a box of the volume whose shape is a run-time argument) and up to kBlockOut output
// channels, and loops over tiles. The part of x that a tile reads (few_channels.cuh) is small. It is
// double-buffered in shared memory, so that the copy of the next part is in flight while a tile is computed.
// Fragments of the A operand are gathered from the part: the address of a word is the offset of its row plus
// the offset of its K index, and both are computed before the loop over tiles. Weights are staged in shared
// memory in fragment order.
//
// The two fragment rows of a lane are neighbours along w, and two phases along w are computed together: a
// lane stores 2 or 4 neighbouring outputs at once, and 8 lanes fill whole sectors. Where lines of outputs
// begin anywhere (kSpread), the lanes that have the same positions of several channels exchange outputs, so
// that neighbouring lanes store neighbouring outputs of one channel. For channels-last outputs, two column
// tiles share 16 channels so that a lane holds 4 neighbouring channels.
#pragma once

#include "epilogue.cuh"
#include "few_channels.cuh"
#include "few_inputs_moments.cuh"

namespace tconv3d {

template <class C>
struct FewInputs {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;
  using Operand = OperandOf<Scalar>;

  static constexpr int kLanes = 32, kWarps = C::kThreads / kLanes;
  static constexpr int kRows = kWarps * C::kRowTiles * 16;
  static constexpr int kItemBytes = static_cast<int>(sizeof(Scalar));
  static constexpr int kWordItems = 4 / kItemBytes;   // operands per 32-bit register
  static constexpr int kStepItems = 32 / kItemBytes;  // K of one mma instruction
  static constexpr int kSteps = C::kFirstStep(C::kPhases);
  static constexpr int kBlocksOut = (C::kOutPerGroup + C::kBlockOut - 1) / C::kBlockOut;
  static constexpr int kKinds = C::kGroups * kBlocksOut;  // distinct sets of output channels that blocks have
  static constexpr int kTiles = C::kBlockOut / 8;         // column tiles of 8 output channels
  static constexpr int kPasses = kTiles / C::kPassTiles;
  static_assert(C::kBlockOut % (8 * C::kPassTiles) == 0, "whole passes");
  static_assert(C::kPhases % C::kTogether == 0 && (C::kTogether == 1 || C::kOutputStepW == C::kTogether),
                "phases that are computed together are all those along w");

  // The moments for a norm are of the sums behind the epilogue, which then come to the stores finished.
  static constexpr bool kLeavesMoments = C::Epilogue::kLeavesMoments;
  using Stored = typename Choose<kLeavesMoments, FewFinished<C>, C>::type;
  static constexpr int moment_words() {
    if constexpr (kLeavesMoments) {
      return FewMoments<C>::kWords;
    } else {
      return 0;
    }
  }

  // Shared memory holds the weights as [step][column tile][lane][2], the offset of every K index in the
  // part of x, the bias, the moments of every thread if there are any, and two buffers for parts.
  static constexpr int kPlaces = kSteps * kTiles * kLanes * 2;
  static constexpr int kBias = kPlaces + kSteps * kStepItems;
  static constexpr int kMoments = (kBias + C::kBlockOut + 3) / 4 * 4;
  static constexpr int kParts = kMoments + moment_words();

  static_assert(!C::kPairedTiles || C::kPassTiles % 2 == 0, "a pass has both tiles of a pair");

  // Returns the output channel, counted from the block's first, of a column of a column tile.
  static __device__ __forceinline__ int channel_of(int tile, int column) {
    return C::kPairedTiles ? tile / 2 * 16 + column / 2 * 4 + tile % 2 * 2 + column % 2 : tile * 8 + column;
  }

  const Args& args;
  unsigned* shared;
  int lane, warp, group, first_out;
  int row_place[C::kRowTiles];  // offset in the part of the first of this lane's two rows
  // Positions of the lane's first rows in the tile; row_d < 0 marks a row that does not exist.
  int row_d[C::kRowTiles], row_h[C::kRowTiles], row_w[C::kRowTiles];
  float sum[C::kTogether][C::kRowTiles][C::kPassTiles][4];

  __device__ __forceinline__ FewPart<C> part() const {
    const Scalar* first =
        static_cast<const Scalar*>(args.x) + static_cast<long long>(group) * C::kReduced * args.x_strides.c;
    return FewPart<C>{args.tiles, args.x_size, args.x_strides, first};
  }
  __device__ __forceinline__ Scalar* part_at(int buffer) const {
    return reinterpret_cast<Scalar*>(shared + kParts) + buffer * part().items();
  }

  __device__ __forceinline__ void locate() {
    lane = threadIdx.x % kLanes;
    warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / kLanes, 0);
    const int kind = static_cast<int>(blockIdx.x) % kKinds;
    group = kind / kBlocksOut;
    first_out = kind % kBlocksOut * C::kBlockOut;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      const int row = (warp * C::kRowTiles + m) * 16 + lane / 4 * 2;
      const int line = row / args.tiles.tile.w;
      row_w[m] = row - line * args.tiles.tile.w;
      row_h[m] = line % args.tiles.tile.h;
      row_d[m] = line / args.tiles.tile.h < args.tiles.tile.d ? line / args.tiles.tile.h : -1;
      row_place[m] = part().position_place(row_d[m] < 0 ? 0 : row_d[m], row_h[m], row_w[m]);
    }
  }

  // ---- Weights, offsets of K indices, and bias in shared memory.

  // Returns the operand bits of K index k (tap and channel r) of phase f, where `w` points to the weights of
  // the output channel. The load is unconditional, so that many loads are in flight at once.
  __device__ __forceinline__ unsigned weight_bits(const Scalar* w, int f, int k, bool exists) const {
    const int last = C::kFirstTap(f + 1) - 1, own = C::kFirstTap(f) + k / C::kReduced;
    const int tap = min(own, last), r = k % C::kReduced;
    const Scalar value = load_constant(w + r * args.w_strides.n + C::kTapD(tap) * args.w_strides.d +
                                       C::kTapH(tap) * args.w_strides.h + C::kTapW(tap) * args.w_strides.w);
    return exists && own <= last ? Operand::bits(value) : 0u;
  }

  __device__ __forceinline__ void stage_weights() {
    const Scalar* w = static_cast<const Scalar*>(args.w) + group * args.w_group_stride;
    constexpr int kSharers =
        kTiles < kWarps ? kWarps / kTiles : 1;  // warps that share the K steps of a column tile
    for (int f = 0; f < C::kPhases; ++f) {
      const int first = C::kFirstStep(f), steps = C::kFirstStep(f + 1) - first;
      for (int i = warp; i < kTiles * kSharers; i += kWarps) {
        const int tile = i % kTiles, out = first_out + channel_of(tile, lane / 4);
        const bool exists = out < C::kOutPerGroup;
        const Scalar* const own = w + (exists ? out : 0) * args.w_strides.c;
#pragma unroll 4
        for (int step = i / kTiles; step < steps; step += kSharers) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            unsigned bits = 0;
#pragma unroll
            for (int item = 0; item < kWordItems; ++item) {
              const int k = step * kStepItems + (lane % 4 + 4 * part) * kWordItems + item;
              bits |= weight_bits(own, f, k, exists) << (16 * item);
            }
            shared[(((first + step) * kTiles + tile) * kLanes + lane) * 2 + part] = bits;
          }
        }
      }
      int* places = reinterpret_cast<int*>(shared) + kPlaces;
      for (int k = threadIdx.x; k < steps * kStepItems; k += C::kThreads) {
        const int tap = C::kFirstTap(f) + k / C::kReduced, r = k % C::kReduced;
        const bool exists = tap < C::kFirstTap(f + 1);
        places[first * kStepItems + k] = exists ? part().tap_place(tap, r) : -1;
      }
    }
    const Scalar* bias = static_cast<const Scalar*>(args.bias);
    for (int o = threadIdx.x; o < C::kBlockOut; o += C::kThreads) {
      const bool exists = bias != nullptr && first_out + o < C::kOutPerGroup;
      reinterpret_cast<float*>(shared)[kBias + o] =
          exists ? widen<float>(load_constant(bias + group * C::kOutPerGroup + first_out + o)) : 0.0f;
    }
  }

  // ---- The product.

  // Adds one K step to the sums of a phase, for the columns of one pass.
  template <bool kChecked>
  __device__ __forceinline__ void multiply_step(const Scalar* part, int step, int pass,
                                                float (&total)[C::kRowTiles][C::kPassTiles][4]) {
    unsigned a[C::kRowTiles][4];
    const int* places = reinterpret_cast<const int*>(shared) + kPlaces + step * kStepItems;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // half 0 is K word lane%4, half 1 is K word lane%4 + 4
      const auto k = load_vector<kWordItems>(places + (lane % 4 + 4 * half) * kWordItems);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        a[m][2 * half] = FewPart<C>::template operand<kChecked>(part + row_place[m], k.at);
        a[m][2 * half + 1] =
            FewPart<C>::template operand<kChecked>(part + row_place[m] + C::kInputStepW, k.at);
      }
    }
    const unsigned* weights = shared + ((step * kTiles + pass * C::kPassTiles) * kLanes + lane) * 2;
#pragma unroll
    for (int tile = 0; tile < C::kPassTiles; ++tile) {
      const auto b = load_vector<2>(weights + tile * kLanes * 2);
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
        ptx::warp_multiply<Operand::kOperand>(total[m][tile], a[m], b.at);
    }
  }

  // Adds all K steps of phase f to `total`. Only the last step of a phase can have K indices without a tap,
  // so that only the last step is checked.
  __device__ __forceinline__ void multiply(const Scalar* part, int f, int pass,
                                           float (&total)[C::kRowTiles][C::kPassTiles][4]) {
    const int items = (C::kFirstTap(f + 1) - C::kFirstTap(f)) * C::kReduced;
    const int first = C::kFirstStep(f), last = first + items / kStepItems;
#pragma unroll 2
    for (int step = first; step < last; ++step) multiply_step<false>(part, step, pass, total);
    if (C::kRagged && items % kStepItems != 0) multiply_step<true>(part, last, pass, total);
  }

  __device__ __forceinline__ void start_from_bias(int pass) {
#pragma unroll
    for (int tile = 0; tile < C::kPassTiles; ++tile) {
      const float* bias = reinterpret_cast<const float*>(shared) + kBias;
      const auto start = load_vector<2>(bias + channel_of(pass * C::kPassTiles + tile, lane % 4 * 2));
#pragma unroll
      for (int together = 0; together < C::kTogether; ++together) {
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[together][m][tile][i] = start.at[i % 2];
        }
      }
    }
  }

  // ---- The outputs.

  template <int kRun>
  static __device__ __forceinline__ Vector<Scalar, kRun> narrowed(const float (&sums)[kRun]) {
    Vector<Scalar, kRun> values;
#pragma unroll
    for (int i = 0; i < kRun; ++i) values.at[i] = Narrow<Scalar>::from(sums[i]);
    return values;
  }

  // Stores kRun neighbouring outputs of a channel: as one vector if `whole`, else the first `count` of them
  // one by one.
  template <int kRun>
  static __device__ __forceinline__ void store_run(Scalar* y, const Vector<Scalar, kRun>& values, bool whole,
                                                   int count) {
    if (whole) {
      *reinterpret_cast<Vector<Scalar, kRun>*>(y) = values;
    } else {
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if (i < count) y[i] = values.at[i];
      }
    }
  }

  // Transposes kRun x kRun values among kRun neighbouring lanes: lane i gets value i of every lane, in the
  // order of the lanes. `lanes` is the mask of the lanes that take part.
  template <int kRun>
  __device__ __forceinline__ void exchange(float (&values)[kRun], unsigned lanes) const {
#pragma unroll
    for (int distance = 1; distance < kRun; distance *= 2) {
      const bool upper = (lane & distance) != 0;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if ((i & distance) != 0) continue;
        const float low = values[i], high = values[i + distance];
        const float got = __shfl_xor_sync(lanes, upper ? low : high, distance);
        values[i] = upper ? got : low;
        values[i + distance] = upper ? high : got;
      }
    }
  }

  // This lane's two neighbouring positions in row tile m, in a phase: the offset of the first output from the
  // first channel of a pass on, and how many outputs the line has from there on.
  struct Rows {
    bool exist;
    int n, out, room;
    Index offset;
  };
  __device__ __forceinline__ Rows rows(const TileOrigin& tile, int m, int f, int pass, int lane) const {
    constexpr int kPhasesHW = C::kOutputStepH * C::kOutputStepW;
    const int d = (tile.d + row_d[m]) * C::kOutputStepD + f / kPhasesHW;
    const int h = (tile.h + row_h[m]) * C::kOutputStepH + f / C::kOutputStepW % C::kOutputStepH;
    const int w = (tile.w + row_w[m]) * C::kOutputStepW + f % C::kOutputStepW;
    const bool exist = row_d[m] >= 0 && d < args.y_size.d && h < args.y_size.h && w < args.y_size.w;
    const int out = first_out + pass * C::kPassTiles * 8 + channel_of(0, lane % 4 * 2);
    const Index offset = tile.n * static_cast<Index>(args.y_strides.n) +
                         (group * C::kOutPerGroup + out) * static_cast<Index>(args.y_strides.c) +
                         d * static_cast<Index>(args.y_strides.d) + h * static_cast<Index>(args.y_strides.h) +
                         w * static_cast<Index>(args.y_strides.w);
    return {exist, tile.n, out, args.y_size.w - w, offset};
  }

  // Whether a lane's channel, so many behind its first, exists.
  static __device__ __forceinline__ bool has_channel(int out, int further) {
    // The last block may have passes without a channel even if the channels of a group are whole passes.
    return C::kOutPerGroup % C::kBlockOut == 0 || out + further < C::kOutPerGroup;
  }

  // The outputs of one channel, contiguous along w: number `which` of those of a lane.
  static constexpr int kRunW = 2 * C::kTogether;
  __device__ __forceinline__ OutputRun run_along_w(const Rows& at, int which) const {
    const int further = which / 2 * 8 + which % 2;
    return {at.n, group * C::kOutPerGroup + at.out + further,
            at.offset + static_cast<long long>(further) * static_cast<Index>(args.y_strides.c), 1,
            at.exist && has_channel(at.out, further) ? at.room : 0};
  }
  // Neighbouring channels, two or four out of a pair of column tiles, of a lane's output i from a column tile
  // on.
  static constexpr int kTilesAtOnce = C::kPairedTiles ? 2 : 1, kRunC = 2 * kTilesAtOnce;
  __device__ __forceinline__ OutputRun run_along_c(const Rows& at, int column, int i) const {
    const Index step_c = static_cast<Index>(args.y_strides.c), step_w = static_cast<Index>(args.y_strides.w);
    const int further = i / C::kTogether * C::kOutputStepW + i % C::kTogether;
    const int rest = C::kOutPerGroup - at.out - column * 8;
    return {at.n, group * C::kOutPerGroup + at.out + column * 8,
            static_cast<long long>(at.offset) + column * 8 * step_c + further * step_w, step_c,
            at.exist && further < at.room && rest > 0 ? rest : 0};
  }

  // Calls the whole tensors of the outputs of a pass into L2. This comes before the products, so that memory
  // works at the same time as the tensor cores.
  __device__ __forceinline__ void prefetch(const TileOrigin& tile, int f, int pass) const {
    if constexpr (OperandCounts<typename Stored::Epilogue>::kWholes > 0) {
      int own = lane;
      ptx::renew(own);  // Without this the compiler keeps every address until the sums are finished.
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m) {
        const Rows at = rows(tile, m, f, pass, own);
        if constexpr (C::kSpread || C::kRunAlongW) {
#pragma unroll
          for (int i = 0; i < 2 * C::kPassTiles; ++i)
            prefetch_run<Stored, false, kRunW>(args, run_along_w(at, i));
        } else {
#pragma unroll
          for (int i = 0; i < C::kPassTiles / kTilesAtOnce * kRunW; ++i)
            prefetch_run<Stored, true, kRunC>(args, run_along_c(at, i / kRunW * kTilesAtOnce, i % kRunW));
        }
      }
    }
  }

  // Stores the outputs of this lane's two neighbouring positions in row tile m, for phases f to f + kTogether
  // - 1 and the channels of one pass.
  __device__ __forceinline__ void store_rows(const TileOrigin& tile, int m, int f, int pass) {
    const Rows at = rows(tile, m, f, pass, lane);
    if (!at.exist) return;
    if constexpr (C::kSpread) {
      store_spread(at, m);
    } else if constexpr (C::kRunAlongW) {
      store_along_w(at, m);
    } else {
      store_along_c(at, m);
    }
  }

  // Returns how many of `all` runs are a portion: fewer if their vectors take registers too. 16-bit operands
  // take twice as many when they are widened.
  static __device__ constexpr int portion(int all, int outputs) {
    using Counts = OperandCounts<typename Stored::Epilogue>;
    constexpr bool kMany = kItemBytes == 2 && Counts::kVectors > 0 && Counts::kWholes > 0;
    return portion_of<Stored, (kMany ? 8 : 16)>(Counts::kVectors > 2 ? (all + 1) / 2 : all, outputs);
  }

  // Returns a lane's sums of one channel that are contiguous along w.
  __device__ __forceinline__ void take_along_w(int m, int which, float (&sums)[kRunW]) const {
#pragma unroll
    for (int i = 0; i < kRunW; ++i)
      sums[i] = sum[i % C::kTogether][m][which / 2][i / C::kTogether * 2 + which % 2];
  }

  // Stores outputs that are contiguous along w. There is one phase along w, or all phases along w are
  // computed together.
  __device__ __forceinline__ void store_along_w(const Rows& first, int m) const {
    constexpr int kAll = 2 * C::kPassTiles;
    Scalar* const y = static_cast<Scalar*>(args.y);
    const Index step_c = static_cast<Index>(args.y_strides.c);
    const bool whole =
        first.room >= kRunW && step_c % kRunW == 0 &&
        reinterpret_cast<unsigned long long>(y + first.offset) % sizeof(Vector<Scalar, kRunW>) == 0;
    in_portions<kAll, portion(kAll, kRunW)>([&](auto start, auto count) {
      constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
      OutputRun runs[kRuns];
      float sums[kRuns][kRunW];
      Rows at = first;
      // Without this the compiler loads all vectors at once, and keeps them.
      if constexpr (OperandCounts<typename Stored::Epilogue>::kVectors > 0) ptx::renew(at.n);
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        runs[r] = run_along_w(at, kStart + r);
        take_along_w(m, kStart + r, sums[r]);
      }
      finish_runs<Stored, false>(args, runs, sums);
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const int further = (kStart + r) / 2 * 8 + (kStart + r) % 2;
        if (has_channel(at.out, further))
          store_run(y + at.offset + further * step_c, narrowed(sums[r]), whole, at.room);
      }
    });
  }

  // Stores outputs that are contiguous along w, in lines that begin anywhere. The 4 lanes of a quad have the
  // same positions, of the channels 0, 2, 4, 6 from the quad's first. After the exchange, a lane has output
  // `own` of all kRunW channels of its neighbours.
  __device__ __forceinline__ void store_spread(const Rows& at, int m) const {
    constexpr int kAll = 2 * C::kPassTiles;
    const Index step_c = static_cast<Index>(args.y_strides.c);
    const int own = lane % kRunW, first = at.out - 2 * own;
    Scalar* const y = static_cast<Scalar*>(args.y);
    const long long offset = static_cast<long long>(at.offset) + own - 2 * own * step_c;
    const int channels = own < at.room ? C::kOutPerGroup - first : 0;
    in_portions<kAll, portion(kAll, kRunW)>([&](auto start, auto count) {
      constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value * kRunW;
      OutputRun runs[kRuns];
      float sums[kRuns][1];
#pragma unroll
      for (int i = 0; i < kRuns / kRunW; ++i) {
        float totals[kRunW];
        take_along_w(m, kStart + i, totals);
        exchange(totals, 0xFu << (lane & ~3));
#pragma unroll
        for (int k = 0; k < kRunW; ++k) {
          const int channel = (kStart + i) / 2 * 8 + (kStart + i) % 2 + 2 * k;
          sums[i * kRunW + k][0] = totals[k];
          runs[i * kRunW + k] = {at.n, group * C::kOutPerGroup + first + channel,
                                 offset + static_cast<long long>(channel) * step_c, 1,
                                 channel < channels ? 1 : 0};
        }
      }
      finish_runs<Stored, false>(args, runs, sums);
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        if (runs[r].present > 0) y[runs[r].offset] = Narrow<Scalar>::from(sums[r][0]);
      }
    });
  }

  // Stores two neighbouring channels at a time, or four out of a pair of column tiles.
  __device__ __forceinline__ void store_along_c(const Rows& at, int m) const {
    constexpr int kPortion = portion(kRunW, kRunC);
    Scalar* const y = static_cast<Scalar*>(args.y);
    const Index step_w = static_cast<Index>(args.y_strides.w);
    const bool aligned =
        C::kUnitC && step_w % kRunC == 0 &&
        reinterpret_cast<unsigned long long>(y + at.offset) % sizeof(Vector<Scalar, kRunC>) == 0;
    in_portions<C::kPassTiles / kTilesAtOnce * kRunW, kPortion>([&](auto start, auto count) {
      constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
      OutputRun runs[kRuns];
      float sums[kRuns][kRunC];
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const int column = (kStart + r) / kRunW * kTilesAtOnce, i = (kStart + r) % kRunW;
        runs[r] = run_along_c(at, column, i);
#pragma unroll
        for (int e = 0; e < kRunC; ++e)
          sums[r][e] = sum[i % C::kTogether][m][column + e / 2][i / C::kTogether * 2 + e % 2];
      }
      finish_runs<Stored, true>(args, runs, sums);
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const int rest = runs[r].present;
        Scalar* const to = y + runs[r].offset;
        const auto values = narrowed(sums[r]);
        if (aligned && rest >= kRunC) {
          *reinterpret_cast<Vector<Scalar, kRunC>*>(to) = values;
        } else {
#pragma unroll
          for (int e = 0; e < kRunC; ++e) {
            if (e < rest) to[e * runs[r].step] = values.at[e];
          }
        }
      }
    });
  }

  // Returns how many of the lane's positions of every row tile exist, for phases f to f + kTogether - 1. The
  // tile is looked up again, which takes no registers before.
  __device__ __forceinline__ auto existing(int index, int f) const {
    const TileOrigin tile = tile_at(index, args.tiles);
    constexpr int kPhasesHW = C::kOutputStepH * C::kOutputStepW;
    typename FewMoments<C>::Existing found;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m) {
      const int d = (tile.d + row_d[m]) * C::kOutputStepD + f / kPhasesHW;
      const int h = (tile.h + row_h[m]) * C::kOutputStepH + f / C::kOutputStepW % C::kOutputStepH;
      const int w = (tile.w + row_w[m]) * C::kOutputStepW + f % C::kOutputStepW;
      const bool line = row_d[m] >= 0 && d < args.y_size.d && h < args.y_size.h;
      const int room = line ? args.y_size.w - w : 0;
      found.of[m] = 0;
#pragma unroll
      for (int i = 0; i < 2 * C::kTogether; ++i) {
        const int further = i / C::kTogether * C::kOutputStepW + i % C::kTogether;
        found.of[m] += further < room ? 1 : 0;
      }
    }
    return found;
  }
  __device__ __forceinline__ auto own_moments() const {
    if constexpr (kLeavesMoments) {
      auto* const kept = reinterpret_cast<Moments<float>*>(shared + kMoments);
      return FewMoments<C>{args, kept, warp, lane, group, first_out};
    } else {
      return 0;
    }
  }

  __device__ __forceinline__ void copy(int index, int buffer) const {
    part().copy(tile_at(index, args.tiles), part_at(buffer));
    ptx::copy_commit();
  }

  __device__ __forceinline__ void compute() {
    shared = dynamic_shared<unsigned>();
    locate();
    stage_weights();
    const int step = gridDim.x / kKinds;
    int index = blockIdx.x / kKinds, buffer = 0;
    if (index < args.tiles.count) copy(index, buffer);
    const auto moments = own_moments();
    for (; index < args.tiles.count; index += step) {
      const TileOrigin tile = tile_at(index, args.tiles);
      const Scalar* copied = part_at(buffer);
      ptx::copy_wait<0>();
      part().round(part_at(buffer));
      // The part is visible to all threads from here on, and no thread still reads the other buffer.
      __syncthreads();
      buffer ^= 1;
      if (index + step < args.tiles.count) copy(index + step, buffer);
      if constexpr (kLeavesMoments) moments.begin(index, step, tile.n);
      for (int f = 0; f < C::kPhases; f += C::kTogether) {
        for (int pass = 0; pass < kPasses; ++pass) {
          prefetch(tile, f, pass);
          start_from_bias(pass);
#pragma unroll
          for (int together = 0; together < C::kTogether; ++together)
            multiply(copied, f + together, pass, sum[together]);
          if constexpr (kLeavesMoments) moments.activate(sum);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) store_rows(tile, m, f, pass);
          if constexpr (kLeavesMoments) moments.add(sum, existing(index, f), pass);
        }
      }
    }
    if constexpr (kLeavesMoments) moments.store(index, step, tile_at(index - step, args.tiles).n);
  }
};

template <class Config>
__device__ void run(const Args& args) {
  FewInputs<Config> kernel{args};
  kernel.compute();
}

}  // namespace tconv3d
