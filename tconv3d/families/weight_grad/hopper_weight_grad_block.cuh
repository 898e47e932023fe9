// A block of the weight gradient on Hopper (hopper_weight_grad.cuh): its channels and taps, its shared memory
// with tables and barriers, and the steps that it loops over. Producers and consumers build on it.
#pragma once

#include "cursor.cuh"
#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

template <class C>
struct HopperWeightBlock {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;

  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(Scalar));  // positions per word
  static constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
  static constexpr bool kRounded = kOperand == ptx::Operand::kTf32;
  static constexpr int kSegment = 4;      // words that a lane has of a chunk
  static constexpr int kRowWords = 32;    // words of K in a row of x
  static constexpr int kRowSegments = 8;  // segments in a row of x: two chunks
  static constexpr int kRowBytes = 128;
  static constexpr int kChunkBytes = 64;
  static constexpr int kStepBytes = 32;
  static constexpr int kPairs = C::kOutTile / 2;
  static constexpr int kRows = C::kRowsD * C::kRowsH;
  static constexpr int kSums = C::kColumns / 2;
  static constexpr int kProducerWarps = 4 * C::kProducers, kConsumerWarps = 4 * C::kConsumers;
  static constexpr int kTurners = C::kTurners, kCopiers = kProducerWarps - kTurners;
  static constexpr int kJobChannels = 8;
  static constexpr int kJobsX = C::kColumns / kJobChannels;  // jobs per row of K
  static constexpr int kSlotBlock = C::kLines ? 32 : 16;     // slots that a warp copies at a time
  static constexpr bool kRowsX = C::kPieceX > 0, kRowsY = C::kPieceY > 0;  // tensors of rows of channels
  static constexpr int kLinesY = C::kLines ? C::kOutTile : kPairs;  // lines per slot: channels, or pairs
  static constexpr int kJobsY = (kLinesY + C::kJobLines - 1) / C::kJobLines;
  static constexpr int kBlocksIn = (C::kInPerGroup + C::kColumns - 1) / C::kColumns;
  static constexpr int kBlocksOut = (C::kOutPerGroup + C::kOutTile - 1) / C::kOutTile;
  static constexpr int kKinds = C::kGroups * kBlocksIn * kBlocksOut * C::kKindsD * C::kKindsH;
  static constexpr long long kTapsAll = static_cast<long long>(C::kKernelD) * C::kKernelH * C::kKernelW;
  static constexpr int kLoadWords = C::kLines ? 4 : 2;        // words of one channel per load
  static constexpr int kSides = C::kLines || kRowsY ? 1 : 2;  // channels side by side in a line of dy
  // Rows of channels: with these words behind every segment, the segments of a quad's lanes, 8 or 24 of the
  // 32 banks apart, never share a bank.
  static constexpr int kSkew = C::kOutTile % 4 == 0 ? 8 : 0;
  static constexpr int kSegmentWords = kRowsY      ? kSegment * C::kOutTile + kSkew
                                       : C::kLines ? kSegment * C::kStrideW
                                                   : kSegment;  // words of dy
  static constexpr int kStepH = C::kLinesAtOnce * C::kStrideH;  // outputs along h from line to line of x
  static constexpr bool kPlanesTogether = C::kLinesAtOnce > 1;  // the table of slots covers a group's planes
  static constexpr int kNowhere = 1 << 24;                      // a coordinate outside of every volume
  static constexpr int kNoPlace = -1;

  static_assert(C::kThreads == 32 * (kProducerWarps + kConsumerWarps));
  static_assert(C::kOutTile % 2 == 0 && C::kColumns % 8 == 0 && C::kColumns <= 256);
  static_assert(8 * C::kRowTiles * kConsumerWarps >= kRows * kPairs, "every row has its warp");
  static_assert(C::kStages >= 3, "one is read, one arrives, one is on its way");
  static_assert(!(C::kElementsX || C::kElementsY) || kPerWord == 2);
  static_assert(kLinesY % C::kJobLines == 0);
  static_assert(!C::kVectorsX || !(C::kElementsX || kRowsX));
  static_assert(C::kLines ? C::kPlanesW == 1 && !C::kElementsY && !kRowsY : C::kVectorY == 1);
  static_assert(!(kRowsX || kRowsY) || kPerWord == 1, "a word has one channel");
  static_assert(!C::kShifted || (C::kLines && C::kVectorY == 4 && kPerWord == 2 && C::kLinesAtOnce == 1));
  static_assert(C::kLinesAtOnce == 1 || (C::kLinesAtOnce == 2 && C::kLines && !C::kWide));

  // The group, channels and taps of a block; blocks of all kinds loop over the same positions.
  struct Kind {
    int group, first_in, first_out, d, h;
  };
  // The source of a word (or vector) of dy, relative to the first one of the box's plane (or group of
  // planes), and its destination in shared memory.
  struct alignas(16) SlotOfPlane {
    Index offset;  // in global memory, in elements
    int place;
    short h, w;
  };
  struct alignas(16) SlotOfGroup {
    Index offset;
    int place;
    short h, w, d;
  };
  using Slot = typename Choose<kPlanesTogether, SlotOfGroup, SlotOfPlane>::type;
  static_assert(sizeof(Slot) == 16, "as the planner counts");
  // Four words of K: the offset of their dy in a sheet, and their position in the box.
  struct Segment {
    int place, d, h, w;
  };
  // Consecutive steps along d.
  struct Run {
    int n, h, w;
    int first, count;
  };

  const Args& args;
  Kind kind;
  Part<int> part;
  int warp, lane;
  unsigned char* stages;
  int stage_bytes;
  unsigned* ring;
  int sheet_words;
  Slot* slots;
  Segment* segments;
  unsigned barriers;

  __device__ __forceinline__ HopperWeightBlock(const Args& arguments)
      : args(arguments),
        kind(find_kind()),
        part(arguments.steps, arguments.splits, static_cast<int>(blockIdx.x) / kKinds),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {
    stages = dynamic_shared<unsigned char>();
    stage_bytes = row_segments() * C::kColumns * kRowBytes;
    ring = reinterpret_cast<unsigned*>(stages + C::kStages * stage_bytes);
    sheet_words = kRowsY ? C::kPlanesD * C::kPlanesH * C::kPlanesW * args.plane_pitch
                         : C::kOutTile / kSides * args.pair_pitch;
    slots = reinterpret_cast<Slot*>(ring + args.groups * args.box.d * sheet_words);
    segments = reinterpret_cast<Segment*>(slots + slot_count());
    barriers = ptx::shared_address(segments + row_segments() * kRowSegments);
  }

  static __device__ __forceinline__ Kind find_kind() {
    // Blocks that share positions have consecutive indices, so that L2 serves what they share.
    int rest = static_cast<int>(blockIdx.x) % kKinds;
    Kind found;
    found.h = rest % C::kKindsH;
    rest /= C::kKindsH;
    found.d = rest % C::kKindsD;
    rest /= C::kKindsD;
    found.first_out = rest % kBlocksOut * C::kOutTile;
    rest /= kBlocksOut;
    found.first_in = rest % kBlocksIn * C::kColumns;
    found.group = rest / kBlocksIn;
    return found;
  }

  __device__ __forceinline__ int segment_count() const { return args.box.d * args.box.h * args.box.w; }
  __device__ __forceinline__ int row_segments() const {
    return (segment_count() + kRowSegments - 1) / kRowSegments;
  }
  __device__ __forceinline__ int plane_slots() const { return C::kPlanesH * args.lines * line_slots(); }
  __device__ __forceinline__ int slot_count() const {  // rows of channels need no table
    if constexpr (kRowsY) return 0;
    return (kPlanesTogether ? args.box.d * C::kPlanesD : 1) * plane_slots();
  }
  __device__ __forceinline__ int line_slots() const { return C::kPlanesW * args.line_words / C::kVectorY; }
  __device__ __forceinline__ unsigned full(int group) const { return barriers + 8 * group; }
  __device__ __forceinline__ unsigned empty(int group) const { return barriers + 8 * (args.groups + group); }
  __device__ __forceinline__ unsigned stage_full(int stage) const {
    return barriers + 8 * (2 * args.groups + stage);
  }
  __device__ __forceinline__ unsigned stage_empty(int stage) const {
    return barriers + 8 * (2 * args.groups + C::kStages + stage);
  }
  __device__ __forceinline__ unsigned stage_copied(int stage) const {
    return barriers + 8 * (2 * args.groups + 2 * C::kStages + stage);
  }

  __device__ __forceinline__ void prepare() {
    for (int i = static_cast<int>(threadIdx.x); i < slot_count(); i += C::kThreads) {
      // Phases along w alternate as they do in memory, so that adjacent slots read adjacent elements.
      const int plane = kPlanesTogether ? i / plane_slots() : 0, in_plane = i - plane * plane_slots();
      const int line = in_plane / line_slots(), rest = in_plane % line_slots();
      const int plane_w = rest % C::kPlanesW, word = rest / C::kPlanesW * C::kVectorY;
      const int plane_h = line / args.lines, h = line % args.lines;
      Slot slot;
      slot.h = static_cast<short>(h * C::kStrideH + C::kPlaneOffsetH(kind.h, plane_h));
      slot.w =
          static_cast<short>(word * kPerWord * (C::kLines ? 1 : C::kStrideW) + C::kPlaneOffsetW(plane_w));
      slot.place =
          kSides * ((plane_h * C::kPlanesW + plane_w) * args.plane_pitch + h * args.line_pitch + word);
      slot.offset =
          slot.h * static_cast<Index>(args.dy_strides.h) + slot.w * static_cast<Index>(args.dy_strides.w);
      if constexpr (kPlanesTogether) {
        slot.d = static_cast<short>(plane / C::kPlanesD * C::kStrideD +
                                    C::kPlaneOffsetD(kind.d, plane % C::kPlanesD));
        slot.place += in_group(plane);
        slot.offset += slot.d * static_cast<Index>(args.dy_strides.d);
      }
      slots[i] = slot;
    }
    for (int i = static_cast<int>(threadIdx.x); i < row_segments() * kRowSegments; i += C::kThreads) {
      const int line = i / args.box.w, w = i % args.box.w;
      const int h = line % args.box.h;
      Segment segment{kSides * (h * C::kLinesAtOnce * args.line_pitch + w * kSegmentWords), line / args.box.h,
                      h, w * kSegment * kPerWord};
      if (i >= segment_count()) segment = Segment{kNoPlace, 0, kNowhere, 0};  // x is zero beyond the box
      segments[i] = segment;
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < args.groups; ++i) {
        ptx::barrier_init(full(i), 32 * kCopiers);
        ptx::barrier_init(empty(i), 32 * kConsumerWarps);
      }
      for (int i = 0; i < C::kStages; ++i) {
        ptx::barrier_init(stage_copied(i), 32 * kCopiers);
        ptx::barrier_init(stage_full(i), 32 * kTurners);
        ptx::barrier_init(stage_empty(i), 32 * kConsumerWarps);
      }
      ptx::fence_barrier_init();
    }
    __syncthreads();
  }

  // Offset of a position of dy in its line of rows of channels, in words.
  static __device__ constexpr int row_place(int position) {
    return position * C::kOutTile + static_cast<int>(static_cast<unsigned>(position) / kSegment) * kSkew;
  }
  // Channel of either half of a pair, in the block's tile.
  static __device__ constexpr int channel_of(int pair, int half) {
    return kRowsY ? 2 * pair + half : pair + half * kPairs;
  }

  // Offset of a plane of dy in its group, in words.
  __device__ __forceinline__ int in_group(int plane) const {
    return plane / C::kPlanesD * sheet_words +
           kSides * (plane % C::kPlanesD) * C::kPlanesH * C::kPlanesW * args.plane_pitch;
  }

  // Returns the steps from `index` on that are consecutive along d.
  __device__ __forceinline__ Run run_at(int index) const {
    const int column = divide(index, args.by_d), rest = divide(column, args.by_w),
              n = divide(rest, args.by_h);
    const int steps = static_cast<int>(args.by_d.divisor);
    Run run;
    run.n = n;
    run.h = (rest - n * static_cast<int>(args.by_h.divisor)) * args.box.h;
    run.w = (column - rest * static_cast<int>(args.by_w.divisor)) * args.box.w * kSegment * kPerWord;
    run.first = index - column * steps;
    run.count = min(steps - run.first, part.end - index);
    return run;
  }

  static __device__ __forceinline__ bool inside(int i, int size) {
    return static_cast<unsigned>(i) < static_cast<unsigned>(size);
  }

  static __device__ __forceinline__ unsigned rounded(unsigned word) {
    return kRounded ? OperandOf<float>::bits(ptx::bits_to_float(word)) : word;
  }
};

}  // namespace tconv3d
