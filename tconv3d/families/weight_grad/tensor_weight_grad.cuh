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

#include "cursor.cuh"
#include "tensor_weight_grad_bias.cuh"
#include "tensor_weight_grad_products.cuh"

namespace tconv3d {

template <class C>
struct TensorWeightGrad {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;

  static constexpr int kLanes = 32;
  static constexpr int kWarps = C::kThreads / kLanes;
  using Products = WeightGradProducts<C>;
  static constexpr bool kStrict = Products::kStrict;
  static constexpr int kPerWord = Products::kPerWord;
  static constexpr int kSegment = Products::kSegment;
  static constexpr int kSegmentsPerChunk = 4;  // segments per chunk, one for each lane of a quad
  static constexpr int kTileSums = Products::kTileSums;
  static constexpr ptx::Operand kOperand = Products::kOperand;

  static constexpr int kBlockIn = C::kHalfRows ? 8 : 16 * C::kTilesIn * C::kWarpsIn;
  static constexpr int kBlockOut = 8 * C::kTilesOut * C::kWarpsOut;
  static constexpr int kBlocksIn = (C::kInPerGroup + kBlockIn - 1) / kBlockIn;
  static constexpr int kBlocksOut = (C::kOutPerGroup + kBlockOut - 1) / kBlockOut;
  static constexpr int kRowBlocksD = (C::kKernelD + C::kRowsD - 1) / C::kRowsD;
  static constexpr int kRowBlocksH = (C::kKernelH + C::kRowsH - 1) / C::kRowsH;
  static constexpr int kKinds = kBlocksIn * kBlocksOut * kRowBlocksD * kRowBlocksH * C::kGroups;

  // Shared memory holds, in this order and counted in words: the Kind of the block, the table of slots
  // (what is copied where), the offsets of every segment's dy, then kStages buffers of
  // [channels of x][kPitchX], [channels of dy][kPitchY].
  static constexpr int kSlotsX = C::kSegments * kSegment;
  static constexpr int kSlotTable = 8;
  static constexpr int kSegmentTable = kSlotTable + 2 * (kSlotsX + C::kSlotsY);
  static constexpr int kBuffers = (kSegmentTable + C::kSegments + 3) / 4 * 4;
  static constexpr int kBufferY = kBlockIn * C::kPitchX;
  static constexpr int kBufferWords = kBufferY + kBlockOut * C::kPitchY;

  // How one of the two tensors is copied. A slot is kVector words of a channel, copied by one load; where
  // 16-bit elements are not word-aligned (C::kVectorX or C::kVectorY is 0) it is one word, copied by two
  // loads. A job is kLoads * kLaneChannels channels of kLaneSlots slots, copied by one warp.
  static constexpr int kLaneSlots = kLanes / C::kLaneChannels;
  template <bool kIsX>
  struct Side {
    static constexpr bool kElements = (kIsX ? C::kVectorX : C::kVectorY) == 0;
    static constexpr int kVector = kElements ? 1 : (kIsX ? C::kVectorX : C::kVectorY);
    static constexpr int kLoads = kIsX ? C::kLoadsX : C::kLoadsY;
    static constexpr int kRegisters = kLoads * (kElements ? kPerWord : kVector);
    static constexpr int kChannels = kIsX ? kBlockIn : kBlockOut;
    static constexpr int kJobChannels = C::kLaneChannels * kLoads;
    static constexpr int kJobs = (kChannels + kJobChannels - 1) / kJobChannels;  // jobs per block of slots
    static constexpr bool kWhole = kChannels % kJobChannels == 0;
    static constexpr int kPitch = kIsX ? C::kPitchX : C::kPitchY;
    static constexpr int kStepW = kIsX ? 1 : C::kStrideW / C::kStep;
    static constexpr int kLastInGroup = (kIsX ? C::kInPerGroup : C::kOutPerGroup) - 1;
    static_assert(kVector == 1 || kVector == 2 || kVector == 4);
    static_assert(kVector == 1 || kStepW == 1, "neighbours in a plane are neighbours in memory");
    static_assert(!kElements || kPerWord == 2);
  };
  static constexpr int kJobRegisters =
      Side<true>::kRegisters > Side<false>::kRegisters ? Side<true>::kRegisters : Side<false>::kRegisters;

  static_assert(kWarps * kLanes == C::kThreads);
  static_assert(kWarps == C::kWarpsRows * C::kWarpsIn * C::kWarpsOut * C::kSlices, "every warp has its part");
  static_assert(C::kWarpsRows * C::kRows >= C::kRowsD * C::kRowsH, "every row of taps has its warp");
  static_assert(!C::kHalfRows || (C::kTilesIn == 1 && C::kWarpsIn == 1 && C::kInPerGroup <= 8));
  static_assert(C::kPitchX % 32 == 16 && C::kPitchX >= kSlotsX, "fragment loads without bank conflicts");
  static_assert(C::kStep == 1 ? C::kPitchY % 32 == 16 : C::kPitchY % 8 == 4,
                "fragment loads of two channels without bank conflicts");
  static_assert(C::kPlane % 4 == 0 && C::kPitchY >= C::kPhases * C::kPlane);
  static_assert(C::kStep == 1 || (C::kStep == C::kStrideW && C::kPhases == 1 && C::kHalves == 1));
  static_assert(C::kSegments % kSegmentsPerChunk == 0);
  static_assert(C::kHooks >= 1 && (C::kAsync || C::kHooks <= C::kRows * C::kTilesOut), "jobs per chunk");
  static_assert((kOperand == ptx::Operand::kTf32) == (kPerWord == 1));
  static_assert(!C::kAsync || (!Side<true>::kElements && !Side<false>::kElements), "copies of whole words");
  static_assert(C::kStages == 2 || (C::kAsync && C::kStages == 3), "buffers: one computed, the rest copied");
  static_assert(C::kSharedBytes >= 4 * (kBuffers + C::kStages * kBufferWords));
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

  // The group, channels and taps of a block. They are in shared memory to leave registers for accumulators.
  struct Kind {
    int group, first_in, first_out, tap_d, tap_h;
  };
  static_assert(sizeof(Kind) <= 4 * kSlotTable);

  static __device__ __forceinline__ Kind kind() {
    // Blocks that share positions have consecutive indices, so that L2 serves what they share.
    int rest = static_cast<int>(blockIdx.x) % kKinds;
    Kind found;
    found.tap_h = rest % kRowBlocksH * C::kRowsH;
    rest /= kRowBlocksH;
    found.tap_d = rest % kRowBlocksD * C::kRowsD;
    rest /= kRowBlocksD;
    found.first_out = rest % kBlocksOut * kBlockOut;
    rest /= kBlocksOut;
    found.first_in = rest % kBlocksIn * kBlockIn;
    found.group = rest / kBlocksIn;
    return found;
  }

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
    if (threadIdx.x == 0) *reinterpret_cast<Kind*>(shared) = kind();
    const int plane_pitch = args.lines_h * args.line_pitch;
#pragma unroll
    for (int r = 0; r < C::kRows; ++r) {
      // Rows of taps past the block's last one repeat it, and their sums are never written.
      const int row = min(first_row + r, C::kRowsD * C::kRowsH - 1);
      row_words[r] =
          row / C::kRowsH * C::kDilationD * plane_pitch + row % C::kRowsH * C::kDilationH * args.line_pitch;
    }
  }

  // ---- The copy of a tile: slots and jobs.

  struct Tile {
    int n, d, h, w;  // batch item, and first position of the tile
  };
  struct Slot {
    int lines;  // the slot's d and h in the tile, 16 bits each
    int words;  // the slot's w in the tile (signed) and its offset in a channel of the buffer, 16 bits each
  };

  static __device__ __forceinline__ int pack(int low, int high) { return (low & 0xFFFF) | high << 16; }
  static __device__ __forceinline__ int low(int packed) {
    return static_cast<short>(static_cast<unsigned short>(packed & 0xFFFF));
  }
  static __device__ __forceinline__ int high(int packed) {
    return static_cast<int>(static_cast<unsigned>(packed) >> 16);
  }

  __device__ __forceinline__ int slots_x() const {
    return args.tile.d * args.tile.h * args.tile.w * (kSegment / Side<true>::kVector);
  }
  __device__ __forceinline__ int line_slots() const {
    return (args.line_words + Side<false>::kVector - 1) / Side<false>::kVector * C::kPhases;
  }
  __device__ __forceinline__ int slots_y() const { return args.lines * line_slots(); }

  __device__ __forceinline__ void write_tables() {
    Slot* const slots = reinterpret_cast<Slot*>(shared + kSlotTable);
    const int line_slots_x = args.tile.w * (kSegment / Side<true>::kVector);
    for (int i = threadIdx.x; i < slots_x(); i += C::kThreads) {
      const int line = i / line_slots_x, word = i % line_slots_x * Side<true>::kVector;
      slots[i] =
          Slot{pack(line / args.tile.h, line % args.tile.h), pack(word * kPerWord, i * Side<true>::kVector)};
    }
    // Phases alternate as they do in memory, so that adjacent slots read adjacent elements.
    for (int i = threadIdx.x; i < slots_y(); i += C::kThreads) {
      const int line = i / line_slots(), phase = i % C::kPhases;
      const int word = i % line_slots() / C::kPhases * Side<false>::kVector;
      slots[kSlotsX + i] = Slot{pack(line / args.lines_h, line % args.lines_h),
                                pack(word * kPerWord * Side<false>::kStepW + C::kPlaneOffset(phase),
                                     phase * C::kPlane + line * args.line_pitch + word)};
    }
    int* const segments = reinterpret_cast<int*>(shared + kSegmentTable);
    for (int i = threadIdx.x; i < C::kSegments; i += C::kThreads) {
      const int line = i / args.tile.w;
      const int line_y = line / args.tile.h * C::kStrideD * args.lines_h + line % args.tile.h * C::kStrideH;
      const bool exists = i < args.tile.d * args.tile.h * args.tile.w;
      segments[i] = exists ? line_y * args.line_pitch + i % args.tile.w * kSegment * C::kStep : 0;
    }
  }

  __device__ __forceinline__ Tile tile_at(int index) const {
    const int rest_w = divide(index, args.by_w), rest_h = divide(rest_w, args.by_h);
    const int n = divide(rest_h, args.by_d);
    return Tile{n, (rest_h - n * static_cast<int>(args.by_d.divisor)) * args.tile.d,
                (rest_w - rest_h * static_cast<int>(args.by_h.divisor)) * args.tile.h,
                (index - rest_w * static_cast<int>(args.by_w.divisor)) * args.tile.w * kSegment * kPerWord};
  }

  // The state of a warp's share of the copy of one tile; job `index` is in flight.
  struct Copy {
    Tile tile;
    unsigned* to;
    int index, jobs_x, jobs;
    int slot_to;   // offset in the buffer in words; negative for a lane without a slot
    int channels;  // channels of the block from the lane's first one on
    unsigned values[kJobRegisters];
  };

  template <bool kIsX>
  __device__ __forceinline__ void issue_side(Copy& copy, int index) const {
    using S = Side<kIsX>;
    const Tile& tile = copy.tile;
    const Kind block = *reinterpret_cast<const Kind*>(shared);
    const Strides& strides = kIsX ? args.x_strides : args.dy_strides;
    const Extent& size = kIsX ? args.x_size : args.dy_size;
    const int slot_block = index / S::kJobs;
    const int slot = slot_block * kLaneSlots + lane / C::kLaneChannels;
    const int channel = (index - slot_block * S::kJobs) * S::kJobChannels + lane % C::kLaneChannels;
    const bool exists = slot < (kIsX ? slots_x() : slots_y());
    const Slot place =
        reinterpret_cast<const Slot*>(shared + kSlotTable)[(kIsX ? 0 : kSlotsX) + (exists ? slot : 0)];
    copy.channels = S::kChannels - channel;
    copy.slot_to = exists ? (kIsX ? 0 : kBufferY) + channel * S::kPitch + high(place.words) : -1;
    int d = tile.d, h = tile.h, w = tile.w;
    if (!kIsX) {
      d = d * C::kStrideD + block.tap_d * C::kDilationD - C::kPaddingD;
      h = h * C::kStrideH + block.tap_h * C::kDilationH - C::kPaddingH;
      w = w * C::kStrideW;
    }
    d += low(place.lines);
    h += high(place.lines);
    w += low(place.words);
    const bool line_inside = exists && d >= 0 && d < size.d && h >= 0 && h < size.h;
    // Channels past the group's last one read another channel again: their sums are never written. If
    // kAllInside is true, the channels of a job are all inside the group, or none is: blocks consist of whole
    // jobs, and so does the group.
    constexpr bool kAllInside = S::kWhole && (S::kLastInGroup + 1) % S::kJobChannels == 0;
    const int last = S::kLastInGroup - (kAllInside ? S::kJobChannels - 1 - lane % C::kLaneChannels : 0);
    const int in_group = min((kIsX ? block.first_in : block.first_out) + channel, last);
    const Index step = C::kLaneChannels * static_cast<Index>(strides.c);
    const Scalar* const from =
        static_cast<const Scalar*>(kIsX ? args.x : args.dy) +
        (tile.n * static_cast<Index>(strides.n) + d * static_cast<Index>(strides.d) +
         h * static_cast<Index>(strides.h) + w * static_cast<Index>(strides.w) +
         (block.group * (S::kLastInGroup + 1) + in_group) * static_cast<Index>(strides.c));
    constexpr int kElementLoads = S::kElements ? kPerWord : 1;
#pragma unroll
    for (int e = 0; e < kElementLoads; ++e) {
      // A vector is inside or outside the tensor as a whole.
      const int at = w + e * S::kStepW;
      const bool inside = line_inside && at >= 0 && at < size.w;
      TCONV3D_ASSUME(!inside || S::kElements || at + S::kVector * kPerWord <= size.w);
      const Scalar* element = from + e * S::kStepW * static_cast<Index>(strides.w);
      // Few addresses are live at a time with kAsync; otherwise loaded values need fixed registers.
      [[maybe_unused]] constexpr int kUnroll = C::kAsync ? 2 : S::kLoads;
#pragma unroll kUnroll
      for (int k = 0; k < S::kLoads; ++k) {
        if (k > 0 && (kAllInside || in_group + k * C::kLaneChannels <= last)) element += step;
        if constexpr (C::kAsync) {
          if (exists && (S::kWhole || k * C::kLaneChannels < copy.channels))
            ptx::copy_words<S::kVector>(copy.to + copy.slot_to + k * C::kLaneChannels * S::kPitch,
                                        inside ? element : args.x, inside);
        } else if constexpr (S::kElements) {
          copy.values[k * kPerWord + e] = inside ? element->bits : 0u;
        } else {
          Vector<unsigned, S::kVector> loaded{};
          if (inside) loaded = load_vector<S::kVector>(reinterpret_cast<const unsigned*>(element));
#pragma unroll
          for (int i = 0; i < S::kVector; ++i) copy.values[k * S::kVector + i] = loaded.at[i];
        }
      }
    }
  }

  template <bool kIsX>
  __device__ __forceinline__ void finish_side(const Copy& copy) const {
    using S = Side<kIsX>;
    if (copy.slot_to < 0) return;
#pragma unroll
    for (int k = 0; k < S::kLoads; ++k) {
      Vector<unsigned, S::kVector> words;
      if constexpr (S::kElements) {
        words.at[0] = copy.values[k * kPerWord] | copy.values[k * kPerWord + kPerWord - 1] << 16;
      } else {
#pragma unroll
        for (int i = 0; i < S::kVector; ++i) {
          const unsigned word = copy.values[k * S::kVector + i];
          words.at[i] = kPerWord == 1 ? Products::rounded(word) : word;
        }
      }
      if (S::kWhole || k * C::kLaneChannels < copy.channels)
        *reinterpret_cast<Vector<unsigned, S::kVector>*>(copy.to + copy.slot_to +
                                                         k * C::kLaneChannels * S::kPitch) = words;
    }
  }

  __device__ __forceinline__ void issue(Copy& copy) const {
    if (copy.index < copy.jobs_x) {
      issue_side<true>(copy, copy.index);
    } else {
      issue_side<false>(copy, copy.index - copy.jobs_x);
    }
  }

  __device__ __forceinline__ void finish(const Copy& copy) const {
    if (C::kAsync) return;
    if (copy.index < copy.jobs_x) {
      finish_side<true>(copy);
    } else {
      finish_side<false>(copy);
    }
  }

  __device__ __forceinline__ void begin(Copy& copy, bool exists, int tile, unsigned* to) const {
    copy.tile = tile_at(exists ? tile : 0);
    copy.to = to;
    copy.index = warp;
    copy.jobs_x = (slots_x() + kLaneSlots - 1) / kLaneSlots * Side<true>::kJobs;
    copy.jobs = exists ? copy.jobs_x + (slots_y() + kLaneSlots - 1) / kLaneSlots * Side<false>::kJobs : 0;
    if (copy.index < copy.jobs) issue(copy);
  }

  // Finishes one job and issues the next.
  __device__ __forceinline__ void advance(Copy& copy) const {
    if (copy.index >= copy.jobs) return;
    finish(copy);
    copy.index += kWarps;
    if (copy.index < copy.jobs) issue(copy);
  }

  // ---- The arithmetic.

  // Multiplies one row of taps with one tile of output channels. `adds` says whether the lane adds dy.
  template <int kRow, int kOut>
  __device__ __forceinline__ void multiply(const typename Products::FragmentsX& x, const unsigned* dy,
                                           bool adds) {
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
              Products::multiply_halves(sums[kRow][kT][m][kOut], rests[kRow][kT][m][kOut], x, m, b);
          } else {
#pragma unroll
            for (int step = 0; step < Products::kSteps; ++step) {
#pragma unroll
              for (int m = 0; m < C::kTilesIn; ++m)
                Products::template multiply_step<0>(sums[kRow][kT][m][kOut], x[0][m], step, b);
            }
          }
        }
      });
    });
  }

  // Computes one chunk, and advances the copy of a later tile in between.
  __device__ __forceinline__ void compute_chunk(int chunk, const unsigned* buffer, Copy& copy) {
    // Asynchronous copies are issued before registers hold fragments.
    if constexpr (C::kAsync) {
#pragma unroll 1
      for (int i = 0; i < C::kHooks; ++i) advance(copy);
    }
    const int segment = chunk * kSegmentsPerChunk + lane % 4;
    const int in = (warp_in * C::kTilesIn * 16 + lane / 4) * C::kPitchX + segment * kSegment;
    const int segment_words = reinterpret_cast<const int*>(shared + kSegmentTable)[segment];
    const unsigned* const dy =
        buffer + kBufferY + (warp_out * C::kTilesOut * 8 + lane / 4) * C::kPitchY + segment_words;
    typename Products::FragmentsX x;
    const unsigned zero = static_cast<unsigned>(args.tiles) >> 31;
#pragma unroll
    for (int m = 0; m < C::kTilesIn; ++m) {
      const unsigned* const from = buffer + in + 16 * m * C::kPitchX;
      if constexpr (Products::kSharedRows) {
        Products::to_halves(x[0][m][0], x[0][m][1], load_vector<kSegment>(from));
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const unsigned* const row = from + (C::kHalfRows ? 0 : 8 * half) * C::kPitchX;
          if constexpr (kStrict) {
            Products::to_halves(x[0][m][half], x[1][m][half], load_vector<kSegment>(row));
          } else {
            Products::load_rows(x[0][m][half], row, zero);
          }
        }
      }
    }
    // Segments beyond the tile read dy of others.
    const unsigned own = C::kBias && segment < args.tile.d * args.tile.h * args.tile.w ? bias.rows : 0u;
    constexpr int kParts = C::kRows * C::kTilesOut;
    static_for<kParts>([&](auto part) {
      constexpr int kPart = decltype(part)::value, kRow = kPart / C::kTilesOut;
      multiply<kRow, kPart % C::kTilesOut>(x, dy + row_words[kRow], (own >> kRow & 1) != 0);
      if constexpr (!C::kAsync && (kPart + 1) * C::kHooks % kParts < C::kHooks) advance(copy);
    });
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
    const Kind block = kind();
    const int split = static_cast<int>(blockIdx.x) / kKinds;
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
    static_assert(WeightGradBias<C>::kSharing * kBlockOut <= C::kStages * kBufferWords);
    const Kind block = kind();
    const int split = static_cast<int>(blockIdx.x) / kKinds;
    const int rows = block.tap_d / C::kRowsD * kRowBlocksH + block.tap_h / C::kRowsH;
    const int slot = C::kBiasSlot + rows * kBlocksIn + block.first_in / kBlockIn;
    const long long row = (split * C::kBiasSlots + slot) * C::kGroups + block.group;
    bias.template store<kBlockOut>(
        reinterpret_cast<float*>(buffer_of(0)), slice * C::kWarpsRows + first_row / C::kRows,
        warp_in == 0 ? warp_out * C::kTilesOut * 8 : -1,
        static_cast<float*>(args.bias_parts) + row * C::kOutPerGroup + block.first_out,
        min(kBlockOut, C::kOutPerGroup - block.first_out));
  }

  __device__ __forceinline__ void compute() {
    locate();
    for_each_sum([&](float& sum, int r, int t, int m, int n, int e) {
      sum = 0.0f;
      if constexpr (kStrict) rests[r][t][m][n][e] = 0.0f;
    });
    write_tables();
    if constexpr (C::kBias) {
      const Kind block = kind();
      bias.begin(block.first_in / kBlockIn, warp_in == 0, block.tap_d, block.tap_h, first_row);
    }
    const Part<int> part(args.tiles, args.splits, static_cast<int>(blockIdx.x) / kKinds);
    const int chunks = (args.tile.d * args.tile.h * args.tile.w + kSegmentsPerChunk - 1) / kSegmentsPerChunk;
    // The last chunk may have segments beyond the tile: x is zero there, whatever dy is.
    for (int i = threadIdx.x; i < C::kStages * kBufferWords; i += C::kThreads) shared[kBuffers + i] = 0u;
    __syncthreads();
    Copy copy;
    // The copies of the first tiles do not overlap with arithmetic.
    for (int ahead = 0; ahead < C::kStages - 1; ++ahead) {
      const int index = part.begin + ahead;
      begin(copy, index < part.end, index, buffer_of(ahead));
      while (copy.index < copy.jobs) advance(copy);
      if (C::kAsync) ptx::copy_commit();
    }
    if (C::kAsync) ptx::copy_wait<C::kStages - 2>();
    __syncthreads();
    int current = 0;
    for (int index = part.begin; index < part.end; ++index) {
      const int ahead = index + C::kStages - 1;
      const int free = current == 0 ? C::kStages - 1 : current - 1;
      begin(copy, ahead < part.end, ahead, buffer_of(free));
      if constexpr (C::kBias) bias.template begin_tile<kBlocksIn>();
      for (int chunk = slice; chunk < chunks; chunk += C::kSlices) {
        compute_chunk(chunk, buffer_of(current), copy);
        if constexpr (C::kBias) bias.end_chunk();
      }
      while (copy.index < copy.jobs) advance(copy);
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
    return shared + kBuffers + index * kBufferWords;
  }
};

template <class Config>
__device__ void run(const Args& args) {
  TensorWeightGrad<Config> kernel{args};
  kernel.compute();
}

}  // namespace tconv3d
