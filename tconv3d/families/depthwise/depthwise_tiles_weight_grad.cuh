// Weight gradient of depthwise layers and of layers with small groups, with large kernels, by multiply-adds:
//   dw[c][o][t] = sum over n, i of  x[n][c][i] * dy[n][o][stride*i + t*dilation - padding]
// for all pairs of a channel c of x and a channel o of dy in the same group, which is one pair per channel in
// a depthwise layer. Channels, in names of this kernel, are pairs, numbered as in the weight.
//
// A block marches along depth. Step j has planes stride*j to stride*j + stride - 1 of dy, which arrive in a
// ring in shared memory, as the planes of x do (slab.cuh). Tap t along depth uses one plane of the step, and
// plane j - shift(t) of x. The block has kLanes threads for each team: up to kMembers taps along depth that
// use the same plane of dy. A thread owns one channel and a tile of kTileH x kTileW positions of the plane,
// and has the sums of its taps in registers, for all taps along h and w. It reads the rows of dy that these
// taps need once for the whole team, and a tile of x for each member.
//
// The sums of a block are added in a fixed order and written as one partial sum; reduce.cuh adds the partial
// sums. A single part is the gradient itself, of type Stored. With kBias the kernel also sums dy for the bias
// gradient: a position adds the outputs of its own taps, which are the taps with shift 0.
#pragma once

#include "slab.cuh"

namespace tconv3d {

template <class C>
struct DepthwiseTilesWeightGrad {
  using Scalar = typename C::Scalar;

  struct Gradients {  // Describes the planes of dy in shared memory.
    using Scalar = typename C::Scalar;
    static constexpr bool kLast = C::kLast;
    static constexpr int kThreads = C::kThreads, kChannels = C::kGroupsOfBlock * C::kOuts;
    static constexpr int kGrain = C::kGrain;
    static constexpr int kRows = (C::kTilesH * C::kRepeats * C::kTileH - 1) * C::kStrideH + C::kSpanH;
    static constexpr int kCols = C::kBefore + (C::kTilesW * C::kTileW - 1) * C::kStrideW + C::kSpanW;
    static constexpr int kPieces = C::kPieces, kStride = C::kPieceStride, kBefore = C::kBefore;
    static constexpr int kReads = (C::kTileW - 1) * C::kStrideW + C::kSpanW;
    static constexpr int kSkewRows = C::kTileH * C::kStrideH, kSkew = C::kSkew;
    static constexpr int kChannelSkew = C::kChannelSkew, kRawPieces = C::kRawPieces;
  };
  struct Inputs {  // Describes the planes of x in shared memory.
    using Scalar = typename C::Scalar;
    static constexpr bool kLast = C::kLast;
    static constexpr int kThreads = C::kThreads, kChannels = C::kGroupsOfBlock * C::kIns;
    static constexpr int kGrain = C::kGrainX;
    static constexpr int kRows = C::kTilesH * C::kRepeats * C::kTileH, kCols = C::kTilesW * C::kTileW;
    static constexpr int kPieces = C::kPiecesX, kStride = C::kPieceStrideX, kBefore = 0;
    static constexpr int kReads = C::kTileW;
    static constexpr int kSkewRows = C::kTileH, kSkew = C::kSkewX;
    static constexpr int kChannelSkew = C::kChannelSkewX, kRawPieces = 0;
  };
  static constexpr int kTiles = C::kTilesH * C::kTilesW;
  static constexpr int kPairs = C::kIns * C::kOuts;                        // pairs of a group
  static constexpr int kLanes = C::kThreads / C::kTeams;                   // threads of a team
  static constexpr int kRows = (C::kTileH - 1) * C::kStrideH + C::kSpanH;  // rows of dy that a thread reads
  static constexpr int kRing = C::kLastShift - C::kFirstShift + 2;         // planes of x
  static constexpr int kSums = C::kKernelH * C::kKernelW;                  // sums of a member
  static constexpr int kAllSums = C::kMembers * kSums;                     // sums of a thread
  static constexpr int kTotals = (kAllSums + (C::kBias ? 1 : 0)) | 1;      // floats of a thread's totals
  static constexpr int kBiasSums = 4;
  static constexpr bool kRaw = C::kRawPieces > 0;  // planes of dy arrive as they lie in memory
  // Elements of a plane of dy as it lies in memory: [channel][row][piece].
  static constexpr int kRawSize =
      Gradients::kChannels * Gradients::kRows * C::kRawPieces * 16 / static_cast<int>(sizeof(Scalar));
  // Elements of the planes of dy: of two steps, or of one step and as they lie in memory.
  static constexpr int kGradients =
      C::kStrideD * (Slab<Gradients>::kSize + (kRaw ? kRawSize : Slab<Gradients>::kSize));
  static_assert(C::kThreads % C::kTeams == 0 && kTiles * C::kChannels <= kLanes, "a thread has one team");

  const Args& args;
  const Slab<Gradients> gradients;
  const Slab<Inputs> inputs;
  const SlabReader<Gradients> dy;
  const SlabReader<Inputs> x;
  bool works;      // the thread has a tile
  bool adds_bias;  // the thread adds its channel of dy to the bias gradient: one of those that read the
                   // channel
  int team;        // the thread's team of taps along depth
  int first, end;  // planes of x of the block
  float sum[C::kMembers][kSums];
  float bias[kBiasSums];  // several sums, so that an addition does not wait for the previous one

  // Adds the products of a tile for a team of kCount taps: the planes of x and dy from the thread's first row
  // on. kOwn: the positions also add the outputs of their own taps to the bias gradient.
  template <bool kOwn, int kCount>
  __device__ __forceinline__ void add_tile(const Scalar* const (&x_planes)[C::kMembers],
                                           const Scalar* dy_plane) {
    float values_x[kCount][C::kTileH][C::kTileW];
#pragma unroll
    for (int m = 0; m < kCount; ++m) {
#pragma unroll
      for (int h = 0; h < C::kTileH; ++h) x.read(x_planes[m], h, values_x[m][h]);
    }
    static_for<kRows>([&](auto row) {
      constexpr int kRow = decltype(row)::value;
      float values[Gradients::kReads];
      dy.read(dy_plane, kRow, values);
      static_for<C::kKernelH>([&](auto tap_h) {
        // Tap kTap reads row kRow for position kRest / kStrideH of the tile, if that is one.
        constexpr int kTap = decltype(tap_h)::value, kRest = kRow - kTap * C::kDilationH;
        if constexpr (kRest >= 0 && kRest % C::kStrideH == 0 && kRest / C::kStrideH < C::kTileH) {
#pragma unroll
          for (int m = 0; m < kCount; ++m) add_row<kTap>(values_x[m][kRest / C::kStrideH], values, sum[m]);
          if constexpr (kOwn && C::kOwnH(kTap)) add_own(values);
        }
      });
    });
  }

  // Adds the products of a row of x and a row of dy to a member's sums of the taps (h, w) with h = kTap.
  template <int kTap>
  static __device__ __forceinline__ void add_row(const float (&values_x)[C::kTileW],
                                                 const float (&values)[Gradients::kReads],
                                                 float (&sum)[kSums]) {
#pragma unroll
    for (int w = 0; w < C::kTileW; ++w) {
#pragma unroll
      for (int t = 0; t < C::kKernelW; ++t)
        sum[kTap * C::kKernelW + t] += values_x[w] * values[w * C::kStrideW + t * C::kDilationW];
    }
  }

  __device__ __forceinline__ void add_own(const float (&values)[Gradients::kReads]) {
    static_for<C::kKernelW>([&](auto tap_w) {
      constexpr int kTap = decltype(tap_w)::value;
      if constexpr (C::kOwnW(kTap)) {
#pragma unroll
        for (int w = 0; w < C::kTileW; ++w)
          bias[w % kBiasSums] += values[w * C::kStrideW + kTap * C::kDilationW];
      }
    });
  }

  // Returns where plane `p` of a step lies as it does in memory.
  __device__ __forceinline__ Scalar* raw_plane(int p) const {
    return gradients.shared + C::kStrideD * Slab<Gradients>::kSize + p * kRawSize;
  }

  // Begins to copy the planes of step `step`: its planes of dy, and the plane of x that is new in this step.
  __device__ __forceinline__ void fill(int step, int number) const {
    if constexpr (kRaw) {
#pragma unroll
      for (int p = 0; p < C::kStrideD; ++p) gradients.fetch(step * C::kStrideD + p, raw_plane(p));
    } else {
      gradients.template fill<C::kStrideD>(step * C::kStrideD, number % 2 * C::kStrideD);
    }
    const int plane = step - C::kFirstShift;
    if (plane < end) inputs.template fill<1>(plane, number % kRing);
    ptx::copy_commit();
  }

  // Writes zeros to the place after the ring of x. A member reads them whose plane is outside of the block's
  // part while another member's is inside.
  __device__ __forceinline__ void clear_spare() const {
    if constexpr (C::kMembers > 1) {
      for (int i = threadIdx.x; i < Slab<Inputs>::kSize; i += C::kThreads)
        inputs.shared[kRing * Slab<Inputs>::kSize + i] = Scalar{};
    }
  }

  __device__ __forceinline__ void march() {
    clear_spare();
    fill(first + C::kFirstShift, 0);
    int number = 0;
#pragma unroll 1
    for (int step = first + C::kFirstShift; step < end + C::kLastShift; ++step, ++number) {
      ptx::copy_wait<0>();
      __syncthreads();
      if constexpr (kRaw) {
#pragma unroll
        for (int p = 0; p < C::kStrideD; ++p) gradients.settle(step * C::kStrideD + p, raw_plane(p), p);
        __syncthreads();
      }
      if (step + 1 < end + C::kLastShift) fill(step + 1, number + 1);
      if (!works) continue;
      const Scalar* x_planes[C::kMembers];
      bool any = false, own = false;
#pragma unroll
      for (int m = 0; m < C::kMembers; ++m) {
        const int shift = C::kShift(team * C::kMembers + m), plane = step - shift;
        const bool inside = plane >= first && plane < end;
        x_planes[m] =
            inputs.shared + (inside ? (plane - first) % kRing : kRing) * Slab<Inputs>::kSize + x.start;
        any |= inside && m < C::kTeamSize(team);
        own |= inside && m < C::kTeamSize(team) && shift == 0;
      }
      if (!any) continue;
      const Scalar* dy_plane =
          gradients.shared +
          ((kRaw ? 0 : number % 2 * C::kStrideD) + C::kTeamPhase(team)) * Slab<Gradients>::kSize + dy.start;
      static_for<C::kMembers>([&](auto member) {
        constexpr int kCount = decltype(member)::value + 1;
        if constexpr (C::kHasTeamOf(decltype(member)::value)) {
          if (C::kTeamSize(team) == kCount) add_tiles<kCount>(x_planes, dy_plane, own && adds_bias);
        }
      });
    }
  }

  // Adds the products of all tiles of the thread with these planes.
  template <int kCount>
  __device__ __forceinline__ void add_tiles(const Scalar* (&x_planes)[C::kMembers], const Scalar* dy_plane,
                                            bool own) {
#pragma unroll 1
    for (int repeat = 0; repeat < C::kRepeats; ++repeat) {
      if (C::kBias && own) {
        add_tile<C::kBias, kCount>(x_planes, dy_plane);
      } else {
        add_tile<false, kCount>(x_planes, dy_plane);
      }
#pragma unroll
      for (int m = 0; m < C::kMembers; ++m) x_planes[m] += Slab<Inputs>::row_offset(C::kTilesH * C::kTileH);
      dy_plane += Slab<Gradients>::row_offset(C::kTilesH * C::kTileH * C::kStrideH);
    }
  }

  // Adds the sums of the threads that have the same channel and tap, and stores them.
  __device__ __forceinline__ void store(float* totals, int first_group, long long split) const {
    __syncthreads();
    float* own = totals + threadIdx.x * kTotals;
#pragma unroll
    for (int i = 0; i < kAllSums; ++i) own[i] = sum[i / kSums][i % kSums];
    if constexpr (C::kBias) own[kAllSums] = (bias[0] + bias[1]) + (bias[2] + bias[3]);
    __syncthreads();
    constexpr int kTaps = C::kKernelD * kSums;
    const int groups =
        C::kGroups - first_group < C::kGroupsOfBlock ? C::kGroups - first_group : C::kGroupsOfBlock;
    using Stored = typename C::Stored;
    Stored* parts = static_cast<Stored*>(args.parts) + (split * C::kGroups + first_group) * kPairs * kTaps;
    for (int i = threadIdx.x; i < groups * kPairs * kTaps; i += C::kThreads) {
      const int place = C::kPlaceOfTap(i % kTaps / kSums);  // team, and member of it
      parts[i] = Narrow<Stored>::from(
          total(totals, i / kTaps, place / C::kMembers, place % C::kMembers * kSums + i % kSums));
    }
    if constexpr (C::kBias) {
      Stored* bias_parts =
          static_cast<Stored*>(args.bias_parts) + (split * C::kGroups + first_group) * C::kOuts;
      for (int i = threadIdx.x; i < groups * C::kOuts; i += C::kThreads) {
        float all = 0.0f;
        const int channel =
            i / C::kOuts * kPairs + i % C::kOuts;  // the pair with the group's first channel of x
        for (int t = 0; t < C::kTeams; ++t) all += total(totals, channel, t, kAllSums);
        bias_parts[i] = Narrow<Stored>::from(all);
      }
    }
  }

  static __device__ __forceinline__ float total(float* totals, int channel, int team, int index) {
    float all = 0.0f;
    for (int tile = 0; tile < kTiles; ++tile) {
      const int lane = C::kLast ? tile * C::kChannels + channel : channel * kTiles + tile;
      all += totals[(team * kLanes + lane) * kTotals + index];
    }
    return all;
  }
};

template <class C>
__device__ void run(const Args& args) {
  using Kernel = DepthwiseTilesWeightGrad<C>;
  using Scalar = typename C::Scalar;
  using Gradients = typename Kernel::Gradients;
  using Inputs = typename Kernel::Inputs;
  constexpr int kChunks = (C::kGroups + C::kGroupsOfBlock - 1) / C::kGroupsOfBlock;
  // The block's place: chunk of channels (fastest), tile along w, tile along h, part of depth, batch item.
  const long long split = blockIdx.x / kChunks;
  const int first_group = static_cast<int>(blockIdx.x) % kChunks * C::kGroupsOfBlock;
  int rest = static_cast<int>(split);
  int next = divide(rest, args.by_w);
  const int block_w = rest - next * static_cast<int>(args.by_w.divisor);
  rest = next;
  next = divide(rest, args.by_h);
  const int block_h = rest - next * static_cast<int>(args.by_h.divisor);
  const int n = divide(next, args.by_parts);
  const int part = next - n * static_cast<int>(args.by_parts.divisor);
  const int lane = static_cast<int>(threadIdx.x) % Kernel::kLanes;
  const bool works = lane < Kernel::kTiles * C::kChannels;
  const int channel = !works ? 0 : C::kLast ? lane % C::kChannels : lane / Kernel::kTiles;
  const int tile = !works ? 0 : C::kLast ? lane / C::kChannels : lane % Kernel::kTiles;
  const int tile_h = (C::kLast ? tile % C::kTilesH : tile / C::kTilesW) * C::kTileH;
  const int tile_w = (C::kLast ? tile / C::kTilesH : tile % C::kTilesW) * C::kTileW;
  const int q_h = block_h * C::kTilesH * C::kRepeats * C::kTileH, q_w = block_w * C::kTilesW * C::kTileW;

  Scalar* const shared = dynamic_shared<Scalar>();
  const auto* dy = static_cast<const Scalar*>(args.dy) + n * args.dy_strides.n;
  const auto* x = static_cast<const Scalar*>(args.x) + n * args.x_strides.n;
  const int groups = C::kGroups - first_group, group = channel / Kernel::kPairs;
  const int of_x = group * C::kIns + channel % Kernel::kPairs / C::kOuts,
            of_dy = group * C::kOuts + channel % C::kOuts;
  const Slab<Gradients> gradients{shared,
                                  dy + first_group * C::kOuts * args.dy_strides.c,
                                  args.dy_strides,
                                  args.dy_size,
                                  groups * C::kOuts,
                                  q_h * C::kStrideH - C::kPaddingH,
                                  q_w * C::kStrideW - C::kPaddingW - C::kBefore};
  const Slab<Inputs> inputs{shared + Kernel::kGradients,
                            x + first_group * C::kIns * args.x_strides.c,
                            args.x_strides,
                            args.x_size,
                            groups * C::kIns,
                            q_h,
                            q_w};
  Kernel kernel{args, gradients, inputs,
                SlabReader<Gradients>(of_dy, tile_h * C::kStrideH, tile_w * C::kStrideW),
                SlabReader<Inputs>(of_x, tile_h, tile_w)};
  kernel.works = works;
  kernel.adds_bias = channel % Kernel::kPairs < C::kOuts;
  kernel.team = static_cast<int>(threadIdx.x) / Kernel::kLanes;
  kernel.first = part * args.length;
  kernel.end = args.x_size.d - kernel.first < args.length ? args.x_size.d : kernel.first + args.length;
#pragma unroll
  for (int i = 0; i < Kernel::kAllSums; ++i) kernel.sum[i / Kernel::kSums][i % Kernel::kSums] = 0.0f;
#pragma unroll
  for (int i = 0; i < Kernel::kBiasSums; ++i) kernel.bias[i] = 0.0f;
  kernel.march();
  kernel.store(dynamic_shared<float>(), first_group, split);
}

}  // namespace tconv3d
