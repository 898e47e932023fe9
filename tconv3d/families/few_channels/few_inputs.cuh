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

  // Returns kRun neighbouring sums as outputs. `to` is the address of the first output.
  template <bool kChannels, int kRun>
  __device__ __forceinline__ Vector<Scalar, kRun> outputs(float (&sums)[kRun], const Scalar* to, int n,
                                                          int channel, long long step, int present) const {
    finish<Stored, kChannels>(args, {n, channel, to - static_cast<const Scalar*>(args.y), step, present},
                              sums);
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

  // Stores the outputs of this lane's two neighbouring positions in row tile m, for phases f to f + kTogether
  // - 1 and the channels of one pass.
  __device__ __forceinline__ void store_rows(const TileOrigin& tile, int m, int f, int pass) {
    constexpr int kPhasesHW = C::kOutputStepH * C::kOutputStepW;
    const int d = (tile.d + row_d[m]) * C::kOutputStepD + f / kPhasesHW;
    const int h = (tile.h + row_h[m]) * C::kOutputStepH + f / C::kOutputStepW % C::kOutputStepH;
    const int w = (tile.w + row_w[m]) * C::kOutputStepW + f % C::kOutputStepW;
    if (row_d[m] < 0 || d >= args.y_size.d || h >= args.y_size.h || w >= args.y_size.w) return;
    const int out = first_out + pass * C::kPassTiles * 8 + channel_of(0, lane % 4 * 2);
    const Index step_c = static_cast<Index>(args.y_strides.c), step_w = static_cast<Index>(args.y_strides.w);
    Scalar* y = static_cast<Scalar*>(args.y) + tile.n * static_cast<Index>(args.y_strides.n) +
                (group * C::kOutPerGroup + out) * step_c + d * static_cast<Index>(args.y_strides.d) +
                h * static_cast<Index>(args.y_strides.h) + w * step_w;
    if constexpr (C::kSpread) {
      store_spread(y, m, tile.n, out, args.y_size.w - w);
    } else if constexpr (C::kRunAlongW) {
      store_along_w(y, m, tile.n, out, args.y_size.w - w);
    } else {
      store_along_c(y, m, tile.n, out, args.y_size.w - w);
    }
  }

  // Stores outputs that are contiguous along w, of batch item n, from channel `out` of the group on. There is
  // one phase along w, or all phases along w are computed together.
  __device__ __forceinline__ void store_along_w(Scalar* y, int m, int n, int out, int room) {
    const int channels = C::kOutPerGroup - out;
    constexpr int kRun = 2 * C::kTogether;
    const Index step_c = static_cast<Index>(args.y_strides.c);
    const bool whole = room >= kRun && step_c % kRun == 0 &&
                       reinterpret_cast<unsigned long long>(y) % sizeof(Vector<Scalar, kRun>) == 0;
#pragma unroll
    for (int column = 0; column < C::kPassTiles; ++column) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool exists = C::kOutPerGroup % (8 * C::kPassTiles) == 0 || column * 8 + e < channels;
        float sums[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) sums[i] = sum[i % C::kTogether][m][column][i / C::kTogether * 2 + e];
        const int further = column * 8 + e;
        const auto values = outputs<false>(sums, y + further * step_c, n,
                                           group * C::kOutPerGroup + out + further, 1, exists ? room : 0);
        if (exists) store_run(y + (column * 8 + e) * step_c, values, whole, room);
      }
    }
  }

  // Stores outputs that are contiguous along w, in lines that begin anywhere. The 4 lanes of a quad have the
  // same positions, of the channels 0, 2, 4, 6 from the quad's first. After the exchange, a lane has output
  // `own` of all kRun channels of its neighbours.
  __device__ __forceinline__ void store_spread(Scalar* y, int m, int n, int out, int room) {
    constexpr int kRun = 2 * C::kTogether;
    const Index step_c = static_cast<Index>(args.y_strides.c);
    const int own = lane % kRun, first = out - 2 * own;
    y += own - 2 * own * step_c;
    const int channels = own < room ? C::kOutPerGroup - first : 0;
#pragma unroll
    for (int column = 0; column < C::kPassTiles; ++column) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float totals[kRun];
#pragma unroll
        for (int i = 0; i < kRun; ++i) totals[i] = sum[i % C::kTogether][m][column][i / C::kTogether * 2 + e];
        exchange(totals, 0xFu << (lane & ~3));
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          const int channel = column * 8 + e + 2 * i;
          float total[1] = {totals[i]};
          if (channel < channels) {
            Scalar* const to = y + channel * step_c;
            *to = outputs<false>(total, to, n, group * C::kOutPerGroup + first + channel, 1, 1).at[0];
          }
        }
      }
    }
  }

  // Stores two neighbouring channels at a time, or four out of a pair of column tiles.
  __device__ __forceinline__ void store_along_c(Scalar* y, int m, int n, int out, int room) {
    const int channels = C::kOutPerGroup - out;
    constexpr int kTilesAtOnce = C::kPairedTiles ? 2 : 1, kRun = 2 * kTilesAtOnce;
    const Index step_c = static_cast<Index>(args.y_strides.c), step_w = static_cast<Index>(args.y_strides.w);
    const bool aligned = C::kUnitC && step_w % kRun == 0 &&
                         reinterpret_cast<unsigned long long>(y) % sizeof(Vector<Scalar, kRun>) == 0;
#pragma unroll
    for (int column = 0; column < C::kPassTiles; column += kTilesAtOnce) {
#pragma unroll
      for (int i = 0; i < 2 * C::kTogether; ++i) {
        const int row = i / C::kTogether, together = i % C::kTogether;
        const int further = row * C::kOutputStepW + together, rest = channels - column * 8;
        if (further >= room || rest < 1) continue;
        float sums[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) sums[e] = sum[together][m][column + e / 2][2 * row + e % 2];
        Scalar* const at = y + column * 8 * step_c + further * step_w;
        const auto values =
            outputs<true>(sums, at, n, group * C::kOutPerGroup + out + column * 8, step_c, rest);
        if (aligned && rest >= kRun) {
          *reinterpret_cast<Vector<Scalar, kRun>*>(at) = values;
        } else {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            if (e < rest) at[e * step_c] = values.at[e];
          }
        }
      }
    }
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
