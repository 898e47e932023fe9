// The copies of tensor_weight_grad.cuh: which channels and taps a block has, where they lie in shared memory,
// and which words each lane of a warp copies there.
#pragma once

#include "cursor.cuh"
#include "tensor_weight_grad_products.cuh"

namespace tconv3d {

template <class C>
struct WeightGradCopies {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;
  using Products = WeightGradProducts<C>;

  static constexpr int kLanes = 32;
  static constexpr int kWarps = C::kThreads / kLanes;
  static constexpr int kPerWord = Products::kPerWord;
  static constexpr int kSegment = Products::kSegment;
  static constexpr int kLines = C::kLinePairs ? 2 : 1;  // lines of x that a warp multiplies at a time

  static constexpr int kBlockIn = C::kHalfRows ? 8 : 16 * C::kTilesIn * C::kWarpsIn;
  static constexpr int kBlockOut = 8 * C::kTilesOut * C::kWarpsOut;
  static constexpr int kBlocksIn = (C::kInPerGroup + kBlockIn - 1) / kBlockIn;
  static constexpr int kBlocksOut = (C::kOutPerGroup + kBlockOut - 1) / kBlockOut;
  static constexpr int kRowBlocksD = (C::kKernelD + C::kRowsD - 1) / C::kRowsD;
  static constexpr int kRowBlocksH = (C::kKernelH + C::kRowsH - 1) / C::kRowsH;
  static constexpr int kKinds = kBlocksIn * kBlocksOut * kRowBlocksD * kRowBlocksH * C::kGroups;

  // Shared memory holds, in this order and counted in words: the Kind of the block, the table of slots
  // (what is copied where), the offset of every segment's dy (with kLinePairs: of the dy of every pair of
  // segments, and after it the two segments, 8 bits each), then kStages buffers of [channels of x][kPitchX],
  // [channels of dy][kPitchY].
  static constexpr int kSlotsX = C::kSegments * kSegment;
  static constexpr int kSlotTable = 8;
  static constexpr int kSegmentTable = kSlotTable + 2 * (kSlotsX + C::kSlotsY);
  static constexpr int kBuffers = (kSegmentTable + C::kSegments + 3) / 4 * 4;
  static constexpr int kBufferY = kBlockIn * C::kPitchX;
  static constexpr int kBufferWords = kBufferY + kBlockOut * C::kPitchY;

  // How one of the two tensors is copied. A slot is kVector words of a channel, copied by one load; where
  // 16-bit elements are not word-aligned (C::kVectorX or C::kVectorY is 0) it is one word, copied by two
  // loads. A job is kLoads * kLaneChannels channels of kLaneSlots slots, copied by one warp.
  template <bool kIsX>
  struct Side {
    static constexpr bool kElements = (kIsX ? C::kVectorX : C::kVectorY) == 0;
    static constexpr int kVector = kElements ? 1 : (kIsX ? C::kVectorX : C::kVectorY);
    static constexpr int kLoads = kIsX ? C::kLoadsX : C::kLoadsY;
    static constexpr int kLaneChannels = kIsX ? C::kLaneChannelsX : C::kLaneChannelsY;
    static constexpr int kLaneSlots = kLanes / kLaneChannels;
    static constexpr int kRegisters = kLoads * (kElements ? kPerWord : kVector);
    static constexpr int kChannels = kIsX ? kBlockIn : kBlockOut;
    static constexpr int kJobChannels = kLaneChannels * kLoads;
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

  static_assert(C::kPitchX % 32 == 16 && C::kPitchX >= kSlotsX, "fragment loads without bank conflicts");
  static_assert(!C::kLinePairs || (C::kSegments <= 256 && C::kPitchY < 65536), "a pair in one word");
  static_assert(C::kPlane % 4 == 0 && C::kPitchY >= C::kPhases * C::kPlane);
  static_assert(!C::kAsync || (!Side<true>::kElements && !Side<false>::kElements), "copies of whole words");
  static_assert(C::kStages == 2 || (C::kAsync && C::kStages == 3), "buffers: one computed, the rest copied");
  static_assert(C::kSharedBytes >= 4 * (kBuffers + C::kStages * kBufferWords));

  const Args& args;
  unsigned* shared;
  int lane, warp;

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

  __device__ __forceinline__ void write_tables() const {
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
    unsigned* const segments = shared + kSegmentTable;
    const int width = args.tile.w, count = args.tile.d * args.tile.h * width;
    for (int i = threadIdx.x; i < C::kSegments; i += C::kThreads) {
      const bool exists = i < count / kLines;
      // Segments beyond the tile are zero.
      const int first = !exists ? count : kLines == 2 ? i + i / width * width : i;
      const int line = first / width, second = exists ? first + width : first;
      const int line_y = line / args.tile.h * C::kStrideD * args.lines_h + line % args.tile.h * C::kStrideH;
      const int words_y = exists ? line_y * args.line_pitch + first % width * kSegment * C::kStep : 0;
      segments[i] = kLines == 2 ? static_cast<unsigned>(words_y << 16 | second << 8 | first)
                                : static_cast<unsigned>(words_y);
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
    // Neighbouring lanes have neighbours in memory.
    const int lane_channel = C::kChannelsLast ? lane % S::kLaneChannels : lane / S::kLaneSlots;
    const int slot =
        slot_block * S::kLaneSlots + (C::kChannelsLast ? lane / S::kLaneChannels : lane % S::kLaneSlots);
    const int channel = (index - slot_block * S::kJobs) * S::kJobChannels + lane_channel;
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
    const int last = S::kLastInGroup - (kAllInside ? S::kJobChannels - 1 - lane_channel : 0);
    const int in_group = min((kIsX ? block.first_in : block.first_out) + channel, last);
    const Index step = S::kLaneChannels * static_cast<Index>(strides.c);
    const Scalar* const from =
        static_cast<const Scalar*>(kIsX ? args.x : args.dy) +
        (tile.n * static_cast<Index>(strides.n) + d * static_cast<Index>(strides.d) +
         h * static_cast<Index>(strides.h) + w * static_cast<Index>(strides.w) +
         (block.group * (S::kLastInGroup + 1) + in_group) * static_cast<Index>(strides.c));
    if constexpr (C::kAsync) {
      // A vector is inside or outside the tensor as a whole.
      const bool inside = line_inside && w >= 0 && w < size.w;
      TCONV3D_ASSUME(!inside || w + S::kVector * kPerWord <= size.w);
      const Scalar* element = inside ? from : static_cast<const Scalar*>(args.x);
      const Index own_step = inside ? step : 0;
#pragma unroll
      for (int k = 0; k < S::kLoads; ++k) {
        if (k > 0 && (kAllInside || in_group + k * S::kLaneChannels <= last)) element += own_step;
        if (exists && (S::kWhole || k * S::kLaneChannels < copy.channels))
          ptx::copy_words<S::kVector>(copy.to + copy.slot_to + k * S::kLaneChannels * S::kPitch, element,
                                      inside);
      }
      return;
    }
    constexpr int kElementLoads = S::kElements ? kPerWord : 1;
#pragma unroll
    for (int e = 0; e < kElementLoads; ++e) {
      const int at = w + e * S::kStepW;
      const bool inside = line_inside && at >= 0 && at < size.w;
      TCONV3D_ASSUME(!inside || S::kElements || at + S::kVector * kPerWord <= size.w);
      const Scalar* element = from + e * S::kStepW * static_cast<Index>(strides.w);
      // Loaded values need fixed registers.
#pragma unroll
      for (int k = 0; k < S::kLoads; ++k) {
        if (k > 0 && (kAllInside || in_group + k * S::kLaneChannels <= last)) element += step;
        if constexpr (S::kElements) {
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
      if (S::kWhole || k * S::kLaneChannels < copy.channels)
        *reinterpret_cast<Vector<unsigned, S::kVector>*>(copy.to + copy.slot_to +
                                                         k * S::kLaneChannels * S::kPitch) = words;
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
    if (copy.index < copy.jobs_x) {
      finish_side<true>(copy);
    } else {
      finish_side<false>(copy);
    }
  }

  template <bool kIsX>
  static __device__ __forceinline__ int jobs_of(int slots) {
    using S = Side<kIsX>;
    return (slots + S::kLaneSlots - 1) / S::kLaneSlots * S::kJobs;
  }

  __device__ __forceinline__ void begin(Copy& copy, bool exists, int tile, unsigned* to) const {
    copy.tile = tile_at(exists ? tile : 0);
    copy.to = to;
    copy.index = warp;
    copy.jobs_x = jobs_of<true>(slots_x());
    copy.jobs = exists ? copy.jobs_x + jobs_of<false>(slots_y()) : 0;
    if (!C::kAsync && copy.index < copy.jobs) issue(copy);
  }

  // Issues one job; or finishes one that was issued before, and issues the next.
  __device__ __forceinline__ void advance(Copy& copy) const {
    if (copy.index >= copy.jobs) return;
    if constexpr (C::kAsync) {
      issue(copy);
      copy.index += kWarps;
      return;
    }
    finish(copy);
    copy.index += kWarps;
    if (copy.index < copy.jobs) issue(copy);
  }
};

}  // namespace tconv3d
