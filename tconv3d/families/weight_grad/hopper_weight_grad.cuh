// The weight gradient on Hopper's tensor cores (sm_90a; TF32, float16, bfloat16):
//   dw[ci][co][t] = sum over n, i of  x[n][ci][i] * dy[n][co][stride*i + t*dilation - padding]
//
// With the positions i as K this is a matrix product: the rows are (tap, co), the columns ci. x is the same
// for all taps and goes to the tensor cores straight from shared memory; dy goes through registers, where a
// tap's shift along w selects other words, while shifts along d and h only change an address. A block owns a
// tile of channels and some taps, and loops over its part of the volume in steps, each a box of positions:
//
//   copying warps (kCopiers), for each step:
//     copy x[ci][box] to the next stage: K along 128-byte rows, swizzled
//     copy the sheets of dy (planes along d, with all that taps along h and w reach) that the previous step
//     did not load: the block advances along d, so a sheet is copied once for all taps along d
//
//   transposing warps (kTurners), for each step:
//     transpose x (see below), round it, hand it to the tensor cores
//
//   consumers, for each step, for each chunk of 16 words of K, for each of their tiles of 64 rows:
//     load the words of dy that the taps along w need, once
//     for each tap along w:  sums[tile][tap] += dy shifted by the tap  (x)  x
//
// A word is one TF32 number or two 16-bit ones. A segment is four words along w, and a chunk is four
// segments, one for each lane of a quad: words 2s and 2s + 1 of a lane's segment are columns lane%4 and
// lane%4 + 4 of K in step s of the chunk. K may be permuted if both operands are, so x is stored in this
// order. Rows g and g + 8 of a lane are two channels, a pair, which lie side by side in shared memory: one
// 16-byte load is one operand.
//
// This layout is for a stride of 1 along w, and for lines that are not whole words in memory: dy is then
// stored in one plane per phase, so that adjacent positions are adjacent for every tap. For other strides
// (kLines) the lines of dy are copied unchanged, in vectors, and consumers separate the phases: a lane loads,
// for each of its two channels, the vectors that the taps of its positions read, and assembles operands from
// them. Lines of x with half a segment are taken two at a time (kLinesAtOnce): they are contiguous in memory,
// so x is read as if its lines were twice as long, and only in dy does each half of a segment have its own
// line. Planes of dy have few vectors then, so a warp copies those of several planes at a time.
//
// Partial sums are stored side by side and added by reduce_taps.cuh in a fixed order; one may be the result.
//
// The bias gradient, the sum of dy, costs a few additions here: for each phase one tap reads position i's own
// output, and the rows of these taps see every output once. Consumers add these words before rounding.
//
// Both tensors are copied with cp.async where their words are whole in memory, so that many copies are in
// flight: x by segments where these are vectors in memory (kVectorsX), which are transposed in place when
// they have arrived. TF32 operands are rounded to nearest: x by the transposing warps, dy by the consumers
// when they load it. Elements outside the tensors are zero in both.
#pragma once

#include "cursor.cuh"
#include "operands.cuh"
#include "ptx_hopper.cuh"
#include "ring.cuh"

namespace tconv3d {

template <class C>
struct HopperWeightGrad {
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
  static constexpr int kPairs = C::kOutTile / 2;  // pair p is channels p and p + kPairs
  static constexpr int kRows = C::kRowsD * C::kRowsH;
  static constexpr int kSums = C::kColumns / 2;
  static constexpr int kProducerWarps = 4 * C::kProducers, kConsumerWarps = 4 * C::kConsumers;
  static constexpr int kTurners = C::kTurners, kCopiers = kProducerWarps - kTurners;
  static constexpr int kJobChannels = 8;
  static constexpr int kJobsX = C::kColumns / kJobChannels;         // jobs per row of K
  static constexpr int kSlotBlock = C::kLines ? 32 : 16;            // slots that a warp copies at a time
  static constexpr int kLinesY = C::kLines ? C::kOutTile : kPairs;  // lines per slot: channels, or pairs
  static constexpr int kJobsY = (kLinesY + C::kJobLines - 1) / C::kJobLines;
  static constexpr int kBlocksIn = (C::kInPerGroup + C::kColumns - 1) / C::kColumns;
  static constexpr int kBlocksOut = (C::kOutPerGroup + C::kOutTile - 1) / C::kOutTile;
  static constexpr int kKinds = C::kGroups * kBlocksIn * kBlocksOut * C::kKindsD * C::kKindsH;
  static constexpr long long kTapsAll = static_cast<long long>(C::kKernelD) * C::kKernelH * C::kKernelW;
  static constexpr int kLoadWords = C::kLines ? 4 : 2;  // words of one channel per load
  static constexpr int kSides = C::kLines ? 1 : 2;      // channels side by side in a line of dy
  static constexpr int kSegmentWords = C::kLines ? kSegment * C::kStrideW : kSegment;  // words of dy
  static constexpr int kStepH = C::kLinesAtOnce * C::kStrideH;  // outputs along h from line to line of x
  static constexpr bool kPlanesTogether = C::kLinesAtOnce > 1;  // the table of slots covers a group's planes
  static constexpr int kNowhere = 1 << 24;                      // a coordinate outside of every volume
  static constexpr int kNoPlace = -1;

  static_assert(C::kThreads == 32 * (kProducerWarps + kConsumerWarps));
  static_assert(C::kOutTile % 2 == 0 && C::kColumns % 8 == 0 && C::kColumns <= 256);
  static_assert(8 * C::kRowTiles * kConsumerWarps >= kRows * kPairs, "every row has its warp");
  static_assert(C::kStages >= 3, "one is read, one arrives, one is on its way");
  static_assert(!(C::kElementsX || C::kElementsY) || kPerWord == 2);
  static_assert(C::kUnitCY ? C::kJobLines == kJobChannels : kLinesY % C::kJobLines == 0);
  static_assert(!C::kVectorsX || !(C::kElementsX || C::kUnitCX));
  static_assert(C::kLines ? C::kPlanesW == 1 && !C::kElementsY && !C::kUnitCY : C::kVectorY == 1);
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

  __device__ __forceinline__ HopperWeightGrad(const Args& arguments)
      : args(arguments),
        kind(find_kind()),
        part(arguments.steps, arguments.splits, static_cast<int>(blockIdx.x) / kKinds),
        warp(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0)),
        lane(static_cast<int>(threadIdx.x) % 32) {
    stages = dynamic_shared<unsigned char>();
    stage_bytes = row_segments() * C::kColumns * kRowBytes;
    ring = reinterpret_cast<unsigned*>(stages + C::kStages * stage_bytes);
    sheet_words = C::kOutTile / kSides * args.pair_pitch;
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
  __device__ __forceinline__ int slot_count() const {
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

  // ---- Producers. A job is 32 words of eight channels of x, or some words of several channels of dy:
  // several words for each lane. Lanes have adjacent words where w is contiguous, and adjacent channels where
  // channels are. A warp's jobs are consecutive, so that what it computes for a row serves several jobs.

  // Offset of a word in its channel, and whether its elements (first, second) are inside the tensor.
  struct Source {
    Index offset;
    bool first, second;
  };
  static __device__ __forceinline__ unsigned rounded(unsigned word) {
    return kRounded ? OperandOf<float>::bits(ptx::bits_to_float(word)) : word;
  }
  // Loads two 16-bit elements that are `step` apart as one word.
  static __device__ __forceinline__ unsigned load_elements(const Scalar* from, const Source& source,
                                                           Index step) {
    if constexpr (kPerWord == 2) {
      const unsigned low = source.first ? load_constant(from).bits : 0u;
      const unsigned high = source.second ? load_constant(from + step).bits : 0u;
      return low | high << 16;
    }
    return 0u;
  }

  __device__ __forceinline__ Source find_x(const Run& run, int step, const Segment& segment, int word) const {
    const int d = step * args.box.d + segment.d, h = run.h + segment.h,
              w = run.w + segment.w + word * kPerWord;
    const bool line = d < args.x_size.d && h < args.x_size.h;
    return Source{run.n * static_cast<Index>(args.x_strides.n) + d * static_cast<Index>(args.x_strides.d) +
                      (line ? h : 0) * static_cast<Index>(args.x_strides.h) +
                      w * static_cast<Index>(args.x_strides.w),
                  line && w < args.x_size.w, C::kElementsX && line && w + 1 < args.x_size.w};
  }
  // Channels past the last one read the last one again: their sums are never written.
  __device__ __forceinline__ const Scalar* x_of(const Source& source, int channel) const {
    constexpr bool kWhole = C::kInPerGroup % C::kColumns == 0;
    const int in_group = kWhole ? kind.first_in + channel : min(kind.first_in + channel, C::kInPerGroup - 1);
    const Index first = source.first ? source.offset : 0;
    return static_cast<const Scalar*>(args.x) +
           (first + (kind.group * C::kInPerGroup + in_group) * static_cast<Index>(args.x_strides.c));
  }

  // Address of a word of a job in a stage: a piece of 16 bytes is one word of each of four segments.
  __device__ __forceinline__ unsigned* place_x(int stage, int job, int row, int segment, int word) const {
    return reinterpret_cast<unsigned*>(stages + stage * stage_bytes) +
           (job * kJobChannels + row) * kRowWords + ((segment / 4 * 4 + word) ^ row) * 4 + segment % 4;
  }
  // Copies eight words of x, with cp.async if words are whole in memory.
  template <class FindWord, class FindSource, class FindChannel>
  __device__ __forceinline__ void copy_words_x(FindWord&& word, FindSource&& source,
                                               FindChannel&& channel) const {
    if constexpr (C::kElementsX) {
      unsigned words[kJobChannels];
#pragma unroll
      for (int k = 0; k < kJobChannels; ++k) {
        const Source found = source(k);
        words[k] = load_elements(x_of(found, channel(k)), found, static_cast<Index>(args.x_strides.w));
      }
#pragma unroll
      for (int k = 0; k < kJobChannels; ++k) *word(k) = words[k];
    } else {
#pragma unroll
      for (int k = 0; k < kJobChannels; ++k) {
        const Source found = source(k);
        ptx::copy_words<1>(word(k), x_of(found, channel(k)), found.first);
      }
    }
  }
  // Copies 16-byte vectors, each a segment of one channel, to where turn_x() stores the chunk's words.
  __device__ __forceinline__ void copy_vectors_x(int stage, int job, int end, const Source& source) const {
    constexpr int kRowsAtOnce = 32 / kRowSegments, kTimes = kJobChannels / kRowsAtOnce;
    const int segment = lane % kRowSegments, row = lane / kRowSegments;
    const long long stride = args.x_strides.c;
    int channel = job % kJobsX * kJobChannels + row;
    const Scalar* from = x_of(source, channel);
    unsigned* to[kTimes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      to[i] = place_x(stage, job, row + i * kRowsAtOnce, segment / 4 * 4, segment % 4);
    }
#pragma unroll 1
    for (; job < end; ++job) {
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        constexpr bool kWhole = C::kInPerGroup % C::kColumns == 0;
        ptx::copy_words_once<4>(to[i], from,
                                source.first && (kWhole || kind.first_in + channel < C::kInPerGroup));
        channel += kRowsAtOnce;
        from += kRowsAtOnce * stride;
        to[i] += kJobChannels * kRowWords;
      }
    }
  }
  __device__ __forceinline__ void copy_x(int stage, const Run& run, int step) const {
    const Part<int> own(row_segments() * kJobsX, kCopiers, warp);
    for (int job = own.begin; job < own.end;) {
      const int row_segment = job / kJobsX, end = min(own.end, (row_segment + 1) * kJobsX);
      const Segment* const found = segments + row_segment * kRowSegments;
      if constexpr (C::kVectorsX) {
        copy_vectors_x(stage, job, end, find_x(run, step, found[lane % kRowSegments], 0));
        job = end;
      } else if constexpr (C::kUnitCX) {
        const int row = lane / 4, channel = job % kJobsX * kJobChannels + row;
        copy_words_x([&](int k) { return place_x(stage, job, row, k / 4 * 4 + lane % 4, k % 4); },
                     [&](int k) { return find_x(run, step, found[k / 4 * 4 + lane % 4], k % 4); },
                     [&](int) { return channel; });
        ++job;
      } else {
        const Source source = find_x(run, step, found[lane / kSegment], lane % kSegment);
#pragma unroll 1
        for (; job < end; ++job) {
          const int channel = job % kJobsX * kJobChannels;
          copy_words_x([&](int k) { return place_x(stage, job, k, lane / kSegment, lane % kSegment); },
                       [&](int) { return source; }, [&](int k) { return channel + k; });
        }
      }
    }
    arrive<!C::kElementsX>(stage_copied(stage));
  }
  // Arrives at a barrier when the copies of this thread are complete.
  template <bool kPastRegisters>
  static __device__ __forceinline__ void arrive(unsigned barrier) {
    if constexpr (kPastRegisters) {
      ptx::copy_arrive(barrier);
    } else {
      ptx::barrier_arrive(barrier);
    }
  }

  // Transposes four segments in place: piece i becomes word i of each. A thread has a chunk of a channel.
  __device__ __forceinline__ void turn_x(int stage, const Part<int>& own) const {
    const int row = lane % kJobChannels, chunk = lane / kJobChannels % 2;
#pragma unroll 1
    for (int job = own.begin + lane / 16; job < own.end; job += 2) {
      Vector<unsigned, 4> segment[4], word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) segment[i] = load_vector<4>(place_x(stage, job, row, 4 * chunk, i));
#pragma unroll
      for (int i = 0; i < 16; ++i) word[i % 4].at[i / 4] = rounded(segment[i / 4].at[i % 4]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<Vector<unsigned, 4>*>(place_x(stage, job, row, 4 * chunk, i)) = word[i];
      }
    }
  }
  // Rounds the words of a stage in place.
  __device__ __forceinline__ void round_x(int stage, const Part<int>& own) const {
    constexpr int kVectors = kJobChannels * kRowWords / 4;
    Vector<unsigned, 4>* const vectors = reinterpret_cast<Vector<unsigned, 4>*>(stages + stage * stage_bytes);
#pragma unroll 4
    for (int i = own.begin * kVectors + lane; i < own.end * kVectors; i += 32) {
      Vector<unsigned, 4> words = vectors[i];
#pragma unroll
      for (int e = 0; e < 4; ++e) words.at[e] = rounded(words.at[e]);
      vectors[i] = words;
    }
  }
  // Tensor cores read x straight from shared memory, so it is transposed and TF32 is rounded here.
  __device__ __forceinline__ void deliver_x(int stage) const {
    const Part<int> own(row_segments() * kJobsX, kTurners, warp - kCopiers);
    if constexpr (C::kVectorsX) {
      turn_x(stage, own);
    } else if constexpr (kRounded) {
      round_x(stage, own);
    }
    ptx::fence_async_proxy();
    ptx::barrier_arrive(stage_full(stage));
  }

  // find_dy() returns the source of a slot at depth 0, at_depth() moves it to another depth.
  __device__ __forceinline__ Source find_dy(const Run& run, Index base, const Slot& slot) const {
    const int h = run.h * kStepH + slot.h, w = run.w * C::kStrideW + slot.w;
    const bool line = inside(h, args.dy_size.h);
    return Source{base + slot.offset, line && inside(w, args.dy_size.w),
                  C::kElementsY && line && inside(w + C::kStrideW, args.dy_size.w)};
  }
  __device__ __forceinline__ Source at_depth(const Source& source, int d) const {
    const bool sheet = inside(d, args.dy_size.d);
    return Source{source.offset + d * static_cast<Index>(args.dy_strides.d), source.first && sheet,
                  source.second && sheet};
  }
  __device__ __forceinline__ const Scalar* dy_of(const Source& source, int channel) const {
    constexpr bool kWhole = C::kOutPerGroup % C::kOutTile == 0;
    const int in_group =
        kWhole ? kind.first_out + channel : min(kind.first_out + channel, C::kOutPerGroup - 1);
    const Index first = source.first || source.second ? source.offset : 0;
    return static_cast<const Scalar*>(args.dy) +
           (first + (kind.group * C::kOutPerGroup + in_group) * static_cast<Index>(args.dy_strides.c));
  }

  // Copies eight pairs at a time where channels are contiguous: a lane copies several words of one channel.
  __device__ __forceinline__ void copy_pairs(unsigned* to, const Run& run, Index base, int index, int d,
                                             int first_pair, int jobs) const {
    const int half = lane % 2, slots_left = (slot_count() - index + 1) / 2;
#pragma unroll 1
    for (int job = 0; job < jobs; ++job) {
      const int pair = first_pair + job * kJobChannels + lane / 4;
      if (pair >= kPairs) break;
      const auto source = [&](int k) { return at_depth(find_dy(run, base, slots[index + 2 * k]), d); };
      const auto place = [&](int k) {
        return to + pair * args.pair_pitch + slots[index + 2 * k].place + half;
      };
      if constexpr (C::kElementsY) {
        unsigned words[kJobChannels];
#pragma unroll
        for (int k = 0; k < kJobChannels; ++k) {
          if (k >= slots_left) break;
          const Source found = source(k);
          words[k] = load_dy(dy_of(found, half * kPairs + pair), found);
        }
#pragma unroll
        for (int k = 0; k < kJobChannels; ++k) {
          if (k >= slots_left) break;
          *place(k) = words[k];
        }
      } else {
#pragma unroll
        for (int k = 0; k < kJobChannels; ++k) {
          if (k >= slots_left) break;
          const Source found = source(k);
          ptx::copy_words<1>(place(k), dy_of(found, half * kPairs + pair), found.first);
        }
      }
    }
  }
  __device__ __forceinline__ unsigned load_dy(const Scalar* from, const Source& source) const {
    return load_elements(from, source, C::kStrideW * static_cast<Index>(args.dy_strides.w));
  }
  // A lane copies a vector of several channels, or a word of several pairs (a half warp for each side).
  __device__ __forceinline__ void copy_line(unsigned* to, const Source& source, int first_line,
                                            int jobs) const {
    constexpr bool kWhole = C::kOutPerGroup % C::kOutTile == 0;
    const int half = lane / kSlotBlock, channel = half * kPairs + first_line;
    const Index stride = static_cast<Index>(args.dy_strides.c);
    const Scalar* const dy = static_cast<const Scalar*>(args.dy);
    Index offset = dy_of(source, channel) - dy;
    to += first_line * args.pair_pitch + half;
    // Channels past the last one are zero: their sums are never written.
    int left = kWhole ? 0 : C::kOutPerGroup - kind.first_out - channel;
#pragma unroll 1
    for (; jobs > 0; --jobs) {
      [[maybe_unused]] unsigned words[C::kJobLines];
#pragma unroll
      for (int k = 0; k < C::kJobLines; ++k) {
        const bool inside = kWhole || k < left;
        if constexpr (C::kElementsY) {
          words[k] = load_dy(dy + offset, Source{0, inside && source.first, inside && source.second});
        } else {
          ptx::copy_words<C::kVectorY>(to + k * args.pair_pitch, dy + offset, inside && source.first);
        }
        offset += stride;
      }
      if constexpr (C::kElementsY) {
#pragma unroll
        for (int k = 0; k < C::kJobLines; ++k) to[k * args.pair_pitch] = words[k];
      }
      to += C::kJobLines * args.pair_pitch;
      left -= C::kJobLines;
    }
  }

  // Copies a group of sheets: loops over blocks of slots, planes along d, and the lines of a job. A lane
  // computes the address of its slot once for all planes and lines.
  __device__ __forceinline__ void copy_group(int group, const Run& run, int step) const {
    const int jobs_of_block = static_cast<int>(args.by_jobs.divisor), count = slot_count();
    const Part<int> own((count + kSlotBlock - 1) / kSlotBlock * jobs_of_block, kCopiers, warp);
    const Index base = run.n * static_cast<Index>(args.dy_strides.n) +
                       run.h * kStepH * static_cast<Index>(args.dy_strides.h) +
                       run.w * C::kStrideW * static_cast<Index>(args.dy_strides.w);
    for (int job = own.begin; job < own.end;) {
      const int block = divide(job, args.by_jobs), first_job = block * jobs_of_block;
      const int end = min(own.end, first_job + jobs_of_block);
      const int index = block * kSlotBlock + (C::kUnitCY ? lane / 2 % 2 : lane % kSlotBlock);
      const Slot slot = slots[min(index, count - 1)];
      const Source line = find_dy(run, base, slot);
      while (job < end) {
        // An iteration does the jobs of one plane.
        const int plane = (job - first_job) / kJobsY, last = min(end, first_job + (plane + 1) * kJobsY);
        const int first_line = (job - first_job) % kJobsY * C::kJobLines, jobs = last - job;
        const int first_d = step * args.box.d * C::kStrideD;
        const int d =
            first_d + plane / C::kPlanesD * C::kStrideD + C::kPlaneOffsetD(kind.d, plane % C::kPlanesD);
        unsigned* const to = ring + group * args.box.d * sheet_words + in_group(plane);
        if constexpr (kPlanesTogether) {
          Source source = at_depth(line, first_d);
          source.first = line.first && inside(first_d + slot.d, args.dy_size.d);
          if (index < count) copy_line(to + slot.place, source, first_line, jobs);
        } else if constexpr (C::kUnitCY) {
          copy_pairs(to, run, base, index, d, first_line, jobs);
        } else if (index < count) {
          copy_line(to + slot.place, at_depth(line, d), first_line, jobs);
        }
        job = last;
      }
    }
    arrive<!C::kElementsY>(full(group));
  }

  // Copying warps load groups of sheets and stages of x. Other warps transpose x that has arrived, because
  // the proxy fence waits for all copies that its own thread has in flight.
  __device__ __forceinline__ void produce() const {
    if (warp < kCopiers) {
      copy();
    } else {
      Ring stage;
#pragma unroll 1
      for (int i = part.begin; i < part.end; ++i, stage.advance(C::kStages)) {
        ptx::barrier_wait(stage_copied(stage.index), stage.parity);
        deliver_x(stage.index);
      }
    }
  }
  __device__ __forceinline__ void copy() const {
    Ring group, stage;
    for (int index = part.begin; index < part.end;) {
      const Run run = run_at(index);
#pragma unroll 1
      for (int i = 0; i < run.count + args.ahead; ++i, group.advance(args.groups)) {
        if (i >= args.ahead) {
          ptx::barrier_wait(stage_empty(stage.index), stage.parity ^ 1u);
          copy_x(stage.index, run, run.first + i - args.ahead);
          stage.advance(C::kStages);
        }
        ptx::barrier_wait(empty(group.index), group.parity ^ 1u);
        copy_group(group.index, run, run.first + i);
      }
      index += run.count;
    }
  }

  // ---- Consumers.

  // Words of dy in operand order: word 2i of both channels of a pair, then word 2i + 1. Some are operands as
  // they are loaded (never with kLines), others are joined from loaded words.
  struct Fragments {
    unsigned loaded[C::kLines ? 1 : C::kLoads][4];
    unsigned joined[C::kJoins > 0 ? C::kJoins : 1][4];
  };
  // Returns the index of the load that has a word of a plane, or -1.
  static constexpr int load_of(int plane, int word) {
    for (int i = 0; i < C::kLoads; ++i) {
      if (C::kLoadPlane(i) == plane && C::kLoadWord(i) == word / kLoadWords * kLoadWords) return i;
    }
    return -1;
  }

  struct Consumer {
    float sums[C::kRowTiles][C::kTaps][kSums];
    int place[C::kRowTiles];  // offset of this lane's pair and row of taps in a sheet
    int sheet[C::kRowTiles];  // sheet that the row of taps reads, relative to the position's
    float bias[C::kRowTiles][2];
  };
  // The place of a lane's words of a chunk in the ring, and whether the lane's segment exists.
  struct Place {
    unsigned word;  // offset in the ring
    bool used;
  };

  __device__ __forceinline__ void locate(Consumer& me, int consumer) const {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const int index =
          min(((r * C::kConsumers + consumer) * 4 + warp % 4) * 8 + lane / 4, kRows * kPairs - 1);
      const int row = index / kPairs, pair = index % kPairs;
      const int d = min(row / C::kRowsH, C::kCountD(kind.d) - 1),
                h = min(row % C::kRowsH, C::kCountH(kind.h) - 1);
      const int plane = (C::kPlaneD(kind.d, d) * C::kPlanesH + C::kPlaneH(kind.h, h)) * C::kPlanesW;
      me.place[r] = pair * args.pair_pitch +
                    kSides * (plane * args.plane_pitch + C::kShiftH(kind.h, h) * args.line_pitch);
      me.sheet[r] = C::kShiftD(kind.d, d);
    }
  }

  // Finds a lane's words of a chunk for row tile r. `first_sheet` is the first sheet of the step.
  __device__ __forceinline__ Place find(const Consumer& me, int r, int chunk, int first_sheet) const {
    const Segment& segment = segments[4 * chunk + lane % 4];
    const int sheets = args.groups * args.box.d;
    int sheet = first_sheet + segment.d + me.sheet[r];
    if (sheet >= sheets) sheet -= sheets;
    return Place{static_cast<unsigned>(sheet * sheet_words + me.place[r] + max(segment.place, 0)),
                 segment.place != kNoPlace};
  }

  // Sums the elements of a word that `kWhich` selects: 1 the first, 2 the second of a 16-bit type, 3 both.
  template <int kWhich>
  static __device__ __forceinline__ float sum_of(unsigned word) {
    if constexpr (kPerWord == 1) {
      return kWhich != 0 ? ptx::bits_to_float(word) : 0.0f;
    } else {
      const Scalar first{static_cast<unsigned short>(word)}, second{static_cast<unsigned short>(word >> 16)};
      return (kWhich & 1 ? widen<float>(first) : 0.0f) + (kWhich & 2 ? widen<float>(second) : 0.0f);
    }
  }

  // Adds to `sum` the elements of a loaded word that are a position's own outputs.
  template <int kLoad, int kWord>
  static __device__ __forceinline__ void add_own(float& sum, unsigned word) {
    if constexpr (C::kBias) {
      constexpr int kWhich = C::kBiasWords(kLoad, kWord);
      if constexpr (kWhich != 0) sum += sum_of<kWhich>(word);
    }
  }

  // Loaded words of dy: with kLines separately for each channel of a pair, else interleaved for both.
  struct Loaded {
    Vector<unsigned, 4> words[C::kLines ? 2 : 1][C::kLoads];
    bool used;
  };
  __device__ __forceinline__ void load(Loaded& to, const Place& from, bool with_bias) const {
    const unsigned* const words = ring + from.word;
    to.used = from.used && with_bias;
    static_for<C::kLoads>([&](auto i) {
      constexpr int kI = decltype(i)::value;
      if constexpr (C::kLines) {
        const unsigned* const line = words + C::kLoadPlane(kI) * args.line_pitch + C::kLoadWord(kI);
        to.words[0][kI] = load_vector<4>(line);
        to.words[1][kI] = load_vector<4>(line + kPairs * args.pair_pitch);
      } else {
        to.words[0][kI] =
            load_vector<4>(words + 2 * (C::kLoadPlane(kI) * args.plane_pitch + C::kLoadWord(kI)));
      }
    });
  }

  // Makes operands from loaded words, and adds to the sums for the bias gradient.
  static __device__ __forceinline__ void join(Fragments& to, const Loaded& from, float (&bias)[2]) {
    if constexpr (C::kBias) {
      if (from.used) add_bias(from, bias);
    }
    if constexpr (C::kLines) {
      join_lines(to, from);
    } else {
      join_planes(to, from);
    }
  }
  static __device__ __forceinline__ void add_bias(const Loaded& from, float (&bias)[2]) {
    float sums[2] = {0.0f, 0.0f};  // short sums first, which limits the rounding error of the long ones
    static_for<C::kLoads>([&](auto i) {
      static_for<4>([&](auto e) {
        constexpr int kI = decltype(i)::value, kE = decltype(e)::value;
        if constexpr (C::kLines) {
          add_own<kI, kE>(sums[0], from.words[0][kI].at[kE]);
          add_own<kI, kE>(sums[1], from.words[C::kLines ? 1 : 0][kI].at[kE]);
        } else {
          add_own<kI, kE / 2>(sums[kE % 2], from.words[0][kI].at[kE]);
        }
      });
    });
    bias[0] += sums[0];
    bias[1] += sums[1];
  }

  static __device__ __forceinline__ void join_planes(Fragments& to, const Loaded& from) {
    static_for<C::kLoads>([&](auto i) {
      static_for<4>([&](auto e) {
        constexpr int kI = decltype(i)::value, kE = decltype(e)::value;
        to.loaded[kI][kE] = rounded(from.words[0][kI].at[kE]);
      });
    });
    static_for<C::kJoins>([&](auto j) {
      constexpr int kJ = decltype(j)::value;
      static_for<4>([&](auto e) {
        constexpr int kE = decltype(e)::value, kPlane = C::kJoinPlane(kJ), kWord = C::kJoinWord(kJ) + kE / 2;
        constexpr int kLoad = load_of(kPlane, kWord);
        const unsigned word = to.loaded[kLoad][kWord % 2 * 2 + kE % 2];
        if constexpr (C::kJoinOdd(kJ) == 0) {
          to.joined[kJ][kE] = word;
        } else {
          constexpr int kNext = load_of(kPlane, kWord + 1);
          to.joined[kJ][kE] = word >> 16 | to.loaded[kNext][(kWord + 1) % 2 * 2 + kE % 2] << 16;
        }
      });
    });
  }

  // Joins operands from lines of dy, one channel of the pair after the other.
  static __device__ __forceinline__ void join_lines(Fragments& to, const Loaded& from) {
    static_for<2>([&](auto half) {
      static_for<C::kJoins>([&](auto j) {
        static_for<2>([&](auto k) {
          constexpr int kHalf = decltype(half)::value, kJ = decltype(j)::value, kK = decltype(k)::value;
          constexpr int kFirst = C::kJoinElement(kJ) + kK * kPerWord * C::kStrideW;
          to.joined[kJ][2 * kK + kHalf] =
              word_of<C::kJoinPlane(kJ), kFirst>(from.words[C::kLines ? kHalf : 0]);
        });
      });
    });
  }
  // Returns the operand word that begins with element kElement of a line; a second one is a stride further.
  template <int kLine, int kElement>
  static __device__ __forceinline__ unsigned word_of(const Vector<unsigned, 4> (&words)[C::kLoads]) {
    constexpr int kWord = kElement / kPerWord, kLast = kElement + (kPerWord - 1) * C::kStrideW;
    const unsigned first = words[load_of(kLine, kWord)].at[kWord % 4];
    if constexpr (kPerWord == 1) return rounded(first);
    const unsigned last = words[load_of(kLine, kLast / 2)].at[kLast / 2 % 4];
    return (kElement % 2 ? first >> 16 : first & 0xFFFFu) | (kLast % 2 ? last & 0xFFFF0000u : last << 16);
  }

  template <int kRowTile>
  __device__ __forceinline__ void multiply(Consumer& me, const Fragments& a, unsigned long long b) const {
    ptx::matrix_fence();
    static_for<2>([&](auto s) {
      constexpr int kStep = decltype(s)::value;
      static_for<C::kTaps>([&](auto t) {
        constexpr int kTap = decltype(t)::value, kOperandIndex = C::kOperandOf(kTap, kStep);
        const auto& operand = kOperandIndex >= 0 ? a.loaded[kOperandIndex >= 0 ? kOperandIndex : 0]
                                                 : a.joined[kOperandIndex < 0 ? -1 - kOperandIndex : 0];
        ptx::MatrixMultiply<C::kColumns>::template issue<kOperand>(me.sums[kRowTile][kTap], operand,
                                                                   ptx::advance(b, kStep * kStepBytes));
      });
    });
    ptx::matrix_commit();
  }

  // The group and stage that products in flight may still read when a step ends. They are released in the
  // next step, after its first products are issued.
  struct Held {
    int group = -1, stage = 0;  // group is -1 if nothing is held
  };
  __device__ __forceinline__ void give_back(Held& held) const {
    if (held.group < 0) return;
    ptx::barrier_arrive(empty(held.group));
    ptx::barrier_arrive(stage_empty(held.stage));
    held.group = -1;
  }

  // Finds the words of an item, which is one chunk and one row tile; row tiles vary fastest. Items past the
  // last one use the last chunk.
  __device__ __forceinline__ Place find_item(const Consumer& me, int row, int item, int first_sheet) const {
    const int chunk = min(2 * row + item / C::kRowTiles, 2 * row_segments() - 1);
    return find(me, item % C::kRowTiles, chunk, first_sheet);
  }

  // Multiplies one row of K, two chunks, for all row tiles. While products run, the words of the next item
  // are loaded (`ahead`), and the place of the item after it (`next`) is computed; with two sets of operands
  // (kDepth is 2), loaded words also become operands meanwhile. The caller has prepared the first item.
  __device__ __forceinline__ void multiply_row(Consumer& me, Fragments (&operands)[C::kDepth], int row,
                                               unsigned long long b, int first_sheet, Loaded& ahead,
                                               Place& next, bool with_bias, Held& before) const {
    constexpr int kItems = 2 * C::kRowTiles;
    static_for<kItems>([&](auto item) {
      constexpr int kItem = decltype(item)::value, kNext = kItem + 1, kTile = kItem % C::kRowTiles;
      const bool more = kNext < kItems || row + 1 < row_segments();
      if constexpr (C::kDepth == 1) {
        join(operands[0], ahead, me.bias[kTile]);
        if (more) load(ahead, next, with_bias);
      } else {
        // The place is computed before the products, to load its words as soon as operands are free.
        next = find_item(me, row, kNext, first_sheet);
        ptx::pin(next.word);
      }
      multiply<kTile>(me, operands[kItem % C::kDepth], ptx::advance(b, kItem / C::kRowTiles * kChunkBytes));
      if constexpr (C::kDepth == 1) next = find_item(me, row, kNext + 1, first_sheet);
      ptx::matrix_wait<C::kDepth - 1>();
      if constexpr (C::kDepth == 2) {
        if (kItem == 0 && row == 0) give_back(before);
        if (more) load(ahead, next, with_bias);
        if (more) join(operands[kNext % C::kDepth], ahead, me.bias[kNext % C::kRowTiles]);
      }
    });
  }

  // `before` is what the previous step still holds.
  __device__ __forceinline__ void multiply_step(Consumer& me, Fragments (&operands)[C::kDepth], int stage,
                                                int group, bool with_bias, Held& before) const {
    const unsigned x = ptx::shared_address(stages + stage * stage_bytes);
    const int first_sheet = group * args.box.d;
    Loaded ahead;
    load(ahead, find_item(me, 0, 0, first_sheet), with_bias);
    Place next = find_item(me, 0, 1, first_sheet);
    if constexpr (C::kDepth == 2) join(operands[0], ahead, me.bias[0]);
#pragma unroll 1
    for (int row = 0; row < row_segments(); ++row) {
      multiply_row(me, operands, row,
                   ptx::matrix_descriptor<kRowBytes>(x + row * C::kColumns * kRowBytes, 8 * kRowBytes),
                   first_sheet, ahead, next, with_bias, before);
    }
  }

  __device__ __forceinline__ void consume(int consumer) const {
    Consumer me;
    locate(me, consumer);
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      me.bias[r][0] = me.bias[r][1] = 0.0f;
#pragma unroll
      for (int t = 0; t < C::kTaps; ++t) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) me.sums[r][t][i] = 0.0f;
      }
    }
    Ring group, arriving, stage;  // arriving: the last group that the step needs
    Held held;
    Fragments operands[C::kDepth];  // a step's last operands are still read when the next one begins
    // Blocks that share outputs take turns at summing them: this is the number of steps until the next turn.
    int until_bias = kind.first_in / C::kColumns;
    for (int index = part.begin; index < part.end;) {
      const Run run = run_at(index);
      for (int i = 0; i < args.ahead; ++i) arriving.advance(args.groups);
#pragma unroll 1
      for (int step = 0; step < run.count; ++step) {
        // Producers deliver in order: when this group has arrived, all earlier ones have.
        ptx::barrier_wait(full(arriving.index), arriving.parity);
        ptx::barrier_wait(stage_full(stage.index), stage.parity);
        multiply_step(me, operands, stage.index, group.index, until_bias == 0, held);
        until_bias = (until_bias == 0 ? kBlocksIn : until_bias) - 1;
        held = Held{group.index, stage.index};
        if constexpr (C::kDepth == 1) give_back(held);  // no products are in flight
        group.advance(args.groups);
        arriving.advance(args.groups);
        stage.advance(C::kStages);
      }
      ptx::matrix_wait<0>();
      give_back(held);
      // These groups were only needed by the last step of the run.
      for (int i = 0; i < args.ahead; ++i) {
        ptx::barrier_arrive(empty(group.index));
        group.advance(args.groups);
      }
      index += run.count;
    }
    ptx::wait_for_previous_launch();  // the previous launch may still read the memory of the parts
    if constexpr (C::kBias) store_bias(me, consumer);
    if (args.result == nullptr) {
      store(me, consumer);
    } else {
      store_result([&] { lay_down(me, consumer); });
    }
  }

  // Stores the sums for the bias gradient. The lanes of a quad have the same channels at different positions.
  __device__ __forceinline__ void store_bias(const Consumer& me, int consumer) const {
    constexpr int kOut = C::kGroups * C::kOutPerGroup;
    const int part = static_cast<int>(blockIdx.x) / kKinds * kBlocksIn + kind.first_in / C::kColumns;
    float* const parts =
        static_cast<float*>(args.bias_parts) + static_cast<long long>(part) * C::kBiasSlots * kOut;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const int index = ((r * C::kConsumers + consumer) * 4 + warp % 4) * 8 + lane / 4;
      const int row = index / kPairs, d = row / C::kRowsH, h = row % C::kRowsH;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = me.bias[r][half];
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        const int out = kind.first_out + index % kPairs + half * kPairs;
        if (lane % 4 != 0 || row >= kRows || out >= C::kOutPerGroup) continue;
        const int slot_d = C::kBiasSlotD(kind.d, d), slot_h = C::kBiasSlotH(kind.h, h);
        if (slot_d < 0 || slot_h < 0) continue;
        parts[(slot_d + slot_h + C::kBiasSlotW) * kOut + kind.group * C::kOutPerGroup + out] = sum;
      }
    }
  }

  // ---- A single part is written as the result: consumers stage their sums in shared memory, nearly in the
  // order of the result, then all warps write them.

  static constexpr int kTileTaps = kRows * C::kTaps;
  static constexpr int kTileElements = C::kOutTile * kTileTaps;  // elements per input channel
  // These pitches put adjacent output channels, and the input channels of a quad's lanes, in different banks.
  static constexpr int kOutPitch = kTileTaps + 1 - kTileTaps % 2;
  static constexpr int kInPitch = C::kOutTile * kOutPitch + (20 - C::kOutTile * kOutPitch % 16) % 16;

  // Called by the whole block. `lay_down` stages a consumer's sums; producers pass an empty function.
  template <class LayDown>
  __device__ __forceinline__ void store_result(LayDown&& lay_down) const {
    meet();  // the stages are no longer in use
    lay_down();
    meet();
    write_result();
  }
  static __device__ __forceinline__ void meet() { __syncthreads(); }
  __device__ __forceinline__ void lay_down(const Consumer& me, int consumer) const {
    float* const tile = reinterpret_cast<float*>(stages) + lane % 4 * 2 * kInPitch;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const int index = ((r * C::kConsumers + consumer) * 4 + warp % 4) * 8 + lane / 4;
      const int row = index / kPairs;
      if (row >= kRows) continue;
      float* const of_row = tile + index % kPairs * kOutPitch + row * C::kTaps;
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float* const to = of_row + (i / 4 * 8 + i % 2) * kInPitch + i / 2 % 2 * kPairs * kOutPitch;
#pragma unroll
        for (int t = 0; t < C::kTaps; ++t) to[t] = me.sums[r][t][i];
      }
    }
  }
  // A warp writes 32 elements of eight input channels at a time, so that their place is computed once.
  __device__ __forceinline__ void write_result() const {
    using Result = typename C::Scalar;
    constexpr int kChunks = (kTileElements + 31) / 32;
    constexpr bool kWhole = C::kInPerGroup % C::kColumns == 0;
    constexpr long long kInStep = C::kOutPerGroup * kTapsAll;
    for (int job = warp; job < kChunks * (C::kColumns / kJobChannels); job += C::kThreads / 32) {
      const int element = job % kChunks * 32 + lane, in = job / kChunks * kJobChannels;
      const int out = element / kTileTaps, tap = element % kTileTaps, row = tap / C::kTaps;
      const int d = row / C::kRowsH, h = row % C::kRowsH;
      if (element >= kTileElements || kind.first_out + out >= C::kOutPerGroup) continue;
      if (d >= C::kCountD(kind.d) || h >= C::kCountH(kind.h)) continue;
      const int place = (C::kTapD(kind.d, d) * C::kKernelH + C::kTapH(kind.h, h)) * C::kKernelW;
      const float* const from =
          reinterpret_cast<const float*>(stages) + in * kInPitch + out * kOutPitch + tap;
      Result* const to = static_cast<Result*>(args.result) +
                         (kind.group * C::kInPerGroup + kind.first_in + in) * kInStep +
                         (kind.first_out + out) * kTapsAll + place + C::kTapW(tap % C::kTaps);
#pragma unroll
      for (int i = 0; i < kJobChannels; ++i) {
        if (!kWhole && kind.first_in + in + i >= C::kInPerGroup) break;
        to[i * kInStep] = Narrow<Result>::from(from[i * kInPitch]);
      }
    }
  }

  __device__ __forceinline__ void store(const Consumer& me, int consumer) const {
    constexpr int kIn = C::kGroups * C::kInPerGroup;
    float* const parts = static_cast<float*>(args.parts) +
                         static_cast<int>(blockIdx.x) / kKinds * (kTapsAll * C::kOutPerGroup * kIn);
    const int in = kind.first_in + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const int index = ((r * C::kConsumers + consumer) * 4 + warp % 4) * 8 + lane / 4;
      const int row = index / kPairs, d = row / C::kRowsH, h = row % C::kRowsH;
      if (row >= kRows || d >= C::kCountD(kind.d) || h >= C::kCountH(kind.h)) continue;
      const int tap = (C::kTapD(kind.d, d) * C::kKernelH + C::kTapH(kind.h, h)) * C::kKernelW;
#pragma unroll
      for (int t = 0; t < C::kTaps; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int out = kind.first_out + index % kPairs + half * kPairs;
          if (out >= C::kOutPerGroup) continue;
          float* const to = parts +
                            (static_cast<long long>(tap + C::kTapW(t)) * C::kOutPerGroup + out) * kIn +
                            kind.group * C::kInPerGroup + in;
#pragma unroll
          for (int j = 0; j < C::kColumns / 8; ++j) {
            const float* const sums = &me.sums[r][t][4 * j + 2 * half];
            if constexpr (C::kInPerGroup % 2 == 0) {
              if (in + 8 * j < C::kInPerGroup) {
                *reinterpret_cast<Vector<float, 2>*>(to + 8 * j) = Vector<float, 2>{sums[0], sums[1]};
              }
            } else {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                if (in + 8 * j + e < C::kInPerGroup) to[8 * j + e] = sums[e];
              }
            }
          }
        }
      }
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  ptx::launch_dependents();
  HopperWeightGrad<Config> kernel(args);
  kernel.prepare();
  if (kernel.warp < kernel.kProducerWarps) {
    ptx::keep_registers<Config::kProducerRegisters>();
    kernel.produce();
    ptx::wait_for_previous_launch();
    if (args.result != nullptr) kernel.store_result([] {});
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    kernel.consume(kernel.warp / 4 - Config::kProducers);
  }
}

}  // namespace tconv3d
