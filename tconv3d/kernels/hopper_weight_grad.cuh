// The weight gradient on Hopper's tensor cores (sm_90a; TF32, float16, bfloat16):
//   dw[ci][co][t] = sum over n, i of  x[n][ci][i] * dy[n][co][stride*i + t*dilation - padding]
//
// With the positions i as K this is a matrix product: the rows are (tap, co), the columns ci. x is the same
// for all taps and goes to tensor cores straight out of shared memory; dy goes through registers, where a
// tap's shift along w selects other words, and shifts along d and h are an address. A block owns a tile of
// channels and some taps, and walks over its part of the volume in steps, each a box of positions:
//
//   producers, for each step:
//     copy x[ci][box] to the next stage: K along 128-byte rows, swizzled
//     copy the sheets of dy (all taps along h and w reach) that the step before did not have: along d the
//     block marches, so a sheet is copied once for all taps along d
//
//   consumers, for each step, for each chunk of 16 words of K, for each of their tiles of 64 rows:
//     load the words of dy that the taps along w need, once
//     for each tap along w:  sums[tile][tap] += dy shifted by the tap  (x)  x
//
// A word is one TF32 number or two 16-bit ones. Four words along w are a segment, and a chunk is four
// segments, one for each lane of a quad: of what a lane has, words 2s and 2s + 1 are columns lane%4 and
// lane%4 + 4 of K in step s of the chunk. K may be permuted at will if both operands are, so x is stored in
// that order. Lane g's rows g and g + 8 are two channels, a pair, that lie side by side in shared memory: one
// 16-byte load is one operand.
//
// dy is stored in one plane per phase, so that neighbouring positions are neighbours for every tap. Parts are
// written side by side and added by reduce.cuh in a fixed order.
#pragma once

#include "cursor.cuh"
#include "operands.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* dy;
  void* parts;  // [splits][taps][out_channels / groups][in_channels]
  Strides x_strides, dy_strides;
  Extent x_size, dy_size;
  Extent box;  // positions along d and h, segments along w
  int steps;   // boxes of the volume
  int splits;
  int ahead;                 // groups of sheets, box.d each, that a step needs beyond its own
  int groups;                // that the ring of sheets has
  int lines;                 // of a plane of dy
  int line_words;            // words of a line that taps reach
  int line_pitch;            // from line to line, in words of one channel
  int plane_pitch;           // from plane to plane, likewise
  int pair_pitch;            // from pair to pair, in words
  Divider by_d, by_h, by_w;  // how many boxes the volume has
  Divider by_jobs;           // of one plane of dy along d
};

template <class C>
struct HopperWeightGrad {
  using Scalar = typename C::Scalar;
  using Index = typename IndexType<C::kWide>::type;

  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(Scalar));  // positions
  static constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
  static constexpr bool kRounded = kOperand == ptx::Operand::kTf32;
  static constexpr int kSegment = 4;      // words: what a lane has of a chunk
  static constexpr int kRowWords = 32;    // of K in a row of x
  static constexpr int kRowSegments = 8;  // two chunks
  static constexpr int kRowBytes = 128;
  static constexpr int kChunkBytes = 64;
  static constexpr int kStepBytes = 32;
  static constexpr int kPairs = C::kOutTile / 2;  // channels p and p + kPairs
  static constexpr int kRows = C::kRowsD * C::kRowsH;
  static constexpr int kSums = C::kColumns / 2;
  static constexpr int kProducerWarps = 4 * C::kProducers, kConsumerWarps = 4 * C::kConsumers;
  static constexpr int kWarpsY = kProducerWarps - C::kWarpsX;  // that copy dy
  static constexpr int kJobChannels = 8;
  static constexpr int kAhead = 3;                           // jobs that a producer has in registers
  static constexpr int kJobsX = C::kColumns / kJobChannels;  // per row segment
  // dy comes by words, past the registers (or by 16-bit elements, through them): 16 slots of one word, eight
  // pairs to a job. Or by vectors through registers: 32 slots of a vector, which has kSlotWords words of
  // each plane, of one or two pairs.
  static constexpr bool kVectors = C::kVectorY > 1, kThroughRegisters = kVectors || C::kElementsY;
  static constexpr int kSlotWords = C::kStrideW == 1 ? C::kVectorY : C::kVectorY / 2;
  static constexpr int kSlotPlanes = kVectors ? 1 : C::kPlanesW;
  static constexpr int kJobSlots = kVectors ? 32 : 16, kJobPairs = kVectors ? 4 / C::kVectorY : 8;
  static constexpr int kJobsY = (kPairs + kJobPairs - 1) / kJobPairs;  // per kJobSlots
  static constexpr int kBlocksIn = (C::kInPerGroup + C::kColumns - 1) / C::kColumns;
  static constexpr int kBlocksOut = (C::kOutPerGroup + C::kOutTile - 1) / C::kOutTile;
  static constexpr int kKinds = C::kGroups * kBlocksIn * kBlocksOut * C::kKindsD * C::kKindsH;
  static constexpr long long kTapsAll = static_cast<long long>(C::kKernelD) * C::kKernelH * C::kKernelW;
  static constexpr int kNowhere = 1 << 24;  // a coordinate outside of every volume

  static_assert(C::kThreads == 32 * (kProducerWarps + kConsumerWarps));
  static_assert(C::kOutTile % 2 == 0 && C::kColumns % 8 == 0 && C::kColumns <= 256);
  static_assert(8 * C::kRowTiles * kConsumerWarps >= kRows * kPairs, "every row has its warp");
  static_assert(C::kStages >= 2);
  static_assert(!(C::kElementsX || C::kElementsY) || kPerWord == 2);
  static_assert(!kVectors || (C::kStrideW <= 2 && !C::kUnitCY && !C::kElementsY), "neighbours in memory");
  static_assert(C::kVectorX == 1 || !(C::kElementsX || C::kUnitCX), "words that are neighbours in memory");

  // What distinguishes blocks that walk over the same positions.
  struct Kind {
    int group, first_in, first_out, d, h;
  };
  // Where a word of a plane of dy comes from, relative to the box's first, and where it goes.
  struct Slot {
    short h, w;
    int place;
  };
  // Four words of K: where their dy begins, and where in the box they are.
  struct Segment {
    int place, d, h, w;
  };
  // Steps along d, one after the other.
  struct Run {
    int n, h, w;
    int first, count;
  };
  struct Ring {
    int index = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance(int count) {
      if (++index == count) {
        index = 0;
        parity ^= 1u;
      }
    }
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
    sheet_words = kPairs * args.pair_pitch;
    slots = reinterpret_cast<Slot*>(ring + args.groups * args.box.d * sheet_words);
    segments = reinterpret_cast<Segment*>(slots + (most_slots() + 1) / 2 * 2);
    barriers = ptx::shared_address(segments + row_segments() * kRowSegments);
  }

  static __device__ __forceinline__ Kind find_kind() {
    // Blocks that share positions follow each other, so that L2 serves what they share.
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
  __device__ __forceinline__ int line_slots() const {
    return kVectors ? args.line_words / kSlotWords : kSlotPlanes * args.line_words;
  }
  // Of a plane along d: for the kind that has most, and for this one.
  __device__ __forceinline__ int most_slots() const { return C::kPlanesH * args.lines * line_slots(); }
  __device__ __forceinline__ int slot_count() const {
    return C::kPlanesCountH(kind.h) * args.lines * line_slots();
  }
  __device__ __forceinline__ unsigned full(int group) const { return barriers + 8 * group; }
  __device__ __forceinline__ unsigned empty(int group) const { return barriers + 8 * (args.groups + group); }
  __device__ __forceinline__ unsigned stage_full(int stage) const {
    return barriers + 8 * (2 * args.groups + stage);
  }
  __device__ __forceinline__ unsigned stage_empty(int stage) const {
    return barriers + 8 * (2 * args.groups + C::kStages + stage);
  }

  __device__ __forceinline__ void prepare() {
    const int line_slots = this->line_slots();
    for (int i = static_cast<int>(threadIdx.x); i < slot_count(); i += C::kThreads) {
      // Phases along w alternate as they do in memory.
      const int line = i / line_slots, rest = i % line_slots;
      const int plane_w = rest % kSlotPlanes, word = rest / kSlotPlanes * (kVectors ? kSlotWords : 1);
      const int plane_h = line / args.lines, h = line % args.lines;
      Slot slot;
      slot.h = static_cast<short>(h * C::kStrideH + C::kPlaneOffsetH(kind.h, plane_h));
      slot.w = static_cast<short>(word * kPerWord * C::kStrideW + C::kPlaneOffsetW(plane_w) -
                                  (kVectors ? C::kPhaseW(0) : 0));
      slot.place = (plane_h * C::kPlanesW + plane_w) * args.plane_pitch + h * args.line_pitch + word;
      slots[i] = slot;
    }
    for (int i = static_cast<int>(threadIdx.x); i < row_segments() * kRowSegments; i += C::kThreads) {
      const int line = i / args.box.w, w = i % args.box.w;
      Segment segment{2 * (line % args.box.h * args.line_pitch + w * kSegment), line / args.box.h,
                      line % args.box.h, w * kSegment * kPerWord};
      if (i >= segment_count()) segment = Segment{0, 0, kNowhere, 0};  // x is zero there
      segments[i] = segment;
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < args.groups; ++i) {
        ptx::barrier_init(full(i), 32 * kWarpsY);
        ptx::barrier_init(empty(i), kConsumerWarps);
      }
      for (int i = 0; i < C::kStages; ++i) {
        ptx::barrier_init(stage_full(i), C::kWarpsX);
        ptx::barrier_init(stage_empty(i), kConsumerWarps);
      }
      ptx::fence_barrier_init();
    }
    __syncthreads();
  }

  // The steps from `index` on that follow each other along d.
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

  // ---- Producers. A job is 32 words of eight channels of x, or 16 words of eight pairs of dy: eight words
  // of each lane. Where w is contiguous, lanes have neighbouring words; where channels are, neighbouring
  // channels.

  // Where a word comes from; of a 16-bit one, whether its two elements are inside.
  struct Source {
    const Scalar* from;
    bool first, second;
  };
  static __device__ __forceinline__ unsigned load_elements(const Source& source, Index step) {
    if constexpr (kPerWord == 2) {
      const unsigned low = source.first ? load_constant(source.from).bits : 0u;
      const unsigned high = source.second ? load_constant(source.from + step).bits : 0u;
      return low | high << 16;
    }
    return 0u;
  }

  static __device__ __forceinline__ unsigned rounded(unsigned word) {
    return kRounded ? OperandOf<float>::bits(ptx::bits_to_float(word)) : word;
  }

  // Channels past the last read it again: their sums are never written.
  __device__ __forceinline__ Source find_x(const Run& run, int step, const Segment& segment, int word,
                                           int channel) const {
    const int d = step * args.box.d + segment.d, h = run.h + segment.h,
              w = run.w + segment.w + word * kPerWord;
    const bool line = d < args.x_size.d && h < args.x_size.h;
    Source source{static_cast<const Scalar*>(args.x), line && w < args.x_size.w,
                  C::kElementsX && line && w + 1 < args.x_size.w};
    if (source.first) {
      const int in_group = min(kind.first_in + channel, C::kInPerGroup - 1);
      source.from += run.n * static_cast<Index>(args.x_strides.n) + d * static_cast<Index>(args.x_strides.d) +
                     h * static_cast<Index>(args.x_strides.h) + w * static_cast<Index>(args.x_strides.w) +
                     (kind.group * C::kInPerGroup + in_group) * static_cast<Index>(args.x_strides.c);
    }
    return source;
  }

  // x passes through registers: tensor cores take it as it lies in shared memory, so it must be rounded.
  struct JobX {
    // A lane has kLoadsX times kVectorX words: of channels kVectorX apart, or (channels contiguous) one
    // word each of all eight segments' words.
    static constexpr int kLoadsX = kJobChannels / C::kVectorX, kSlots = kRowWords / C::kVectorX;
    unsigned words[kJobChannels];
  };
  __device__ __forceinline__ void load_x(JobX& to, const Run& run, int step, int job) const {
    const int row_segment = job / kJobsX, channel = job % kJobsX * kJobChannels;
    const Segment* const found = segments + row_segment * kRowSegments;
    const Index between = static_cast<Index>(args.x_strides.w);
    if constexpr (C::kUnitCX) {
#pragma unroll
      for (int k = 0; k < kJobChannels; ++k) {
        const Source source = find_x(run, step, found[k / 4 * 4 + lane % 4], k % 4, channel + lane / 4);
        if constexpr (C::kElementsX) {
          to.words[k] = load_elements(source, between);
        } else {
          to.words[k] = source.first ? __ldg(reinterpret_cast<const unsigned*>(source.from)) : 0u;
        }
      }
    } else {
      const int word = lane % JobX::kSlots * C::kVectorX, own = channel + lane / JobX::kSlots;
      Source source = find_x(run, step, found[word / kSegment], word % kSegment, own);
#pragma unroll
      for (int i = 0; i < JobX::kLoadsX; ++i) {
        if constexpr (C::kElementsX) {
          to.words[i] = load_elements(source, between);
        } else {
          Vector<unsigned, C::kVectorX> loaded{};
          if (source.first) loaded = load_vector<C::kVectorX>(reinterpret_cast<const unsigned*>(source.from));
#pragma unroll
          for (int e = 0; e < C::kVectorX; ++e) to.words[i * C::kVectorX + e] = loaded.at[e];
        }
        const bool more = kind.first_in + own + (i + 1) * C::kVectorX < C::kInPerGroup;
        if (source.first && more) source.from += C::kVectorX * args.x_strides.c;
      }
    }
  }
  __device__ __forceinline__ void store_x(const JobX& from, int stage, int job) const {
    const int row_segment = job / kJobsX, channel = job % kJobsX * kJobChannels;
    unsigned* const to = reinterpret_cast<unsigned*>(stages + stage * stage_bytes) +
                         (row_segment * C::kColumns + channel) * kRowWords;
#pragma unroll
    for (int k = 0; k < kJobChannels; ++k) {
      // A piece of 16 bytes is one word of each of four segments.
      const int word = lane % JobX::kSlots * C::kVectorX + k % C::kVectorX;
      const int segment = C::kUnitCX ? k / 4 * 4 + lane % 4 : word / kSegment;
      const int row = C::kUnitCX ? lane / 4 : k / C::kVectorX * C::kVectorX + lane / JobX::kSlots;
      const int piece = segment / 4 * 4 + (C::kUnitCX ? k : word) % kSegment;
      to[row * kRowWords + (piece ^ row) * 4 + segment % 4] = rounded(from.words[k]);
    }
  }

  __device__ __forceinline__ Source find_dy(const Run& run, int d, const Slot& slot, int channel) const {
    const int h = run.h * C::kStrideH + slot.h, w = run.w * C::kStrideW + slot.w;
    const bool line = inside(d, args.dy_size.d) && inside(h, args.dy_size.h);
    Source source{static_cast<const Scalar*>(args.dy), line && inside(w, args.dy_size.w),
                  C::kElementsY && line && inside(w + C::kStrideW, args.dy_size.w)};
    if (source.first || source.second) {
      const int in_group = min(kind.first_out + channel, C::kOutPerGroup - 1);
      source.from += run.n * static_cast<Index>(args.dy_strides.n) +
                     d * static_cast<Index>(args.dy_strides.d) + h * static_cast<Index>(args.dy_strides.h) +
                     w * static_cast<Index>(args.dy_strides.w) +
                     (kind.group * C::kOutPerGroup + in_group) * static_cast<Index>(args.dy_strides.c);
    }
    return source;
  }

  // Where a job of a group of sheets has its words, and from which plane they come.
  struct PlaceY {
    unsigned* to;
    int d, first_slot, pair;
  };
  __device__ __forceinline__ PlaceY place_y(int job, int group, int step) const {
    const int planes = C::kPlanesCountD(kind.d);
    const int plane = divide(job, args.by_jobs), rest = job - plane * static_cast<int>(args.by_jobs.divisor);
    const int sheet = plane / planes, plane_d = plane % planes, pair = rest % kJobsY * kJobPairs;
    unsigned* const to = ring + (group * args.box.d + sheet) * sheet_words + pair * args.pair_pitch +
                         2 * plane_d * C::kPlanesH * C::kPlanesW * args.plane_pitch;
    const int d = (step * args.box.d + sheet) * C::kStrideD + C::kPlaneOffsetD(kind.d, plane_d);
    return PlaceY{to, d, rest / kJobsY * kJobSlots, pair};
  }
  __device__ __forceinline__ int jobs_y() const {
    return args.box.d * C::kPlanesCountD(kind.d) * static_cast<int>(args.by_jobs.divisor);
  }

  // Calls body(word in shared memory, source) for a lane's eight words.
  template <class Body>
  __device__ __forceinline__ void for_words_y(const PlaceY& place, const Run& run, Body&& body) const {
    const int count = slot_count();
    if constexpr (C::kUnitCY) {
      const int own = lane / 4, half = lane % 2, first = place.first_slot + lane / 2 % 2;
      if (place.pair + own >= kPairs) return;
      static_for<kJobChannels>([&](auto k) {
        if (first + 2 * k >= count) return;
        const Slot slot = slots[first + 2 * k];
        body(k, place.to + own * args.pair_pitch + 2 * slot.place + half,
             find_dy(run, place.d, slot, half * kPairs + place.pair + own));
      });
    } else {
      const int index = place.first_slot + lane % 16, half = lane / 16, first = half * kPairs + place.pair;
      if (index >= count) return;
      const Slot slot = slots[index];
      unsigned* to = place.to + 2 * slot.place + half;
      Source source = find_dy(run, place.d, slot, first);
      static_for<kJobChannels>([&](auto k) {
        if (kPairs % kJobChannels != 0 && place.pair + k >= kPairs) return;
        body(k, to, source);
        to += args.pair_pitch;
        const bool more = kind.first_out + first + k + 1 < C::kOutPerGroup;
        if ((source.first || source.second) && more) source.from += args.dy_strides.c;
      });
    }
  }

  struct JobY {
    unsigned words[kJobChannels];  // kVectors: [pair][channel of the pair][kVectorY]
  };
  __device__ __forceinline__ void load_y(JobY& to, const Run& run, int step, int job) const {
    const PlaceY place = place_y(job, 0, step);
    if constexpr (kVectors) {
      const int index = place.first_slot + lane;
      if (index >= slot_count()) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Source source = find_dy(run, place.d, slots[index], half * kPairs + place.pair);
#pragma unroll
        for (int j = 0; j < kJobPairs; ++j) {
          Vector<unsigned, C::kVectorY> loaded{};
          if (source.first) loaded = load_vector<C::kVectorY>(reinterpret_cast<const unsigned*>(source.from));
#pragma unroll
          for (int i = 0; i < C::kVectorY; ++i) to.words[(2 * j + half) * C::kVectorY + i] = loaded.at[i];
          const bool more = kind.first_out + half * kPairs + place.pair + j + 1 < C::kOutPerGroup;
          if (source.first && more) source.from += args.dy_strides.c;
        }
      }
    } else {
      for_words_y(place, run, [&](auto k, unsigned*, const Source& source) {
        to.words[k] = load_elements(source, C::kStrideW * static_cast<Index>(args.dy_strides.w));
      });
    }
  }

  // Word `word` of a plane, out of the words of a vector.
  template <int kPlane, int kWord>
  static __device__ __forceinline__ unsigned word_of_plane(const unsigned* vector) {
    if constexpr (C::kStrideW == 1) {
      return rounded(vector[kWord]);
    } else if constexpr (kPerWord == 1) {
      return rounded(vector[2 * kWord + C::kPhaseW(kPlane)]);
    } else if constexpr (C::kPhaseW(kPlane) == 0) {
      return (vector[2 * kWord] & 0xFFFFu) | vector[2 * kWord + 1] << 16;
    } else {
      return vector[2 * kWord] >> 16 | (vector[2 * kWord + 1] & 0xFFFF0000u);
    }
  }
  __device__ __forceinline__ void store_y(const JobY& from, int group, const Run& run, int job) const {
    const PlaceY place = place_y(job, group, 0);
    if constexpr (kVectors) {
      const int index = place.first_slot + lane;
      if (index >= slot_count()) return;
      constexpr int kTogether = kSlotWords < 2 ? 1 : 2;  // words of both channels in one store
      unsigned* const first = place.to + 2 * slots[index].place;
      static_for<kJobPairs>([&](auto j) {
        constexpr int kJ = decltype(j)::value;
        if (place.pair + kJ >= kPairs) return;
        static_for<C::kPlanesW>([&](auto p) {
          static_for<kSlotWords / kTogether>([&](auto i) {
            constexpr int kP = decltype(p)::value, kFirst = decltype(i)::value * kTogether;
            const unsigned* const one = from.words + 2 * kJ * C::kVectorY;
            const unsigned* const other = one + C::kVectorY;
            Vector<unsigned, 2 * kTogether> words;
            words.at[0] = word_of_plane<kP, kFirst>(one);
            words.at[1] = word_of_plane<kP, kFirst>(other);
            if constexpr (kTogether == 2) {
              words.at[2] = word_of_plane<kP, kFirst + 1>(one);
              words.at[3] = word_of_plane<kP, kFirst + 1>(other);
            }
            *reinterpret_cast<Vector<unsigned, 2 * kTogether>*>(first + kJ * args.pair_pitch +
                                                                2 * (kP * args.plane_pitch + kFirst)) = words;
          });
        });
      });
    } else {
      for_words_y(place, run, [&](auto k, unsigned* to, const Source&) { to[0] = from.words[k]; });
    }
  }

  // ---- What a producer warp does, job after job: of x steps, of dy deliveries (a group of sheets; a run
  // begins with those that its first step needs beyond its own).

  struct CourseX {
    int index, job;
    __device__ __forceinline__ void advance(int first_job, int jobs) {
      job += C::kWarpsX;
      if (job < jobs) return;
      job = first_job;
      ++index;
    }
  };

  // Registers hold what is on its way: kAhead jobs, across steps.
  __device__ __forceinline__ void produce_x() const {
    const int jobs = row_segments() * kJobsX;
    CourseX loads{part.begin, warp}, stores{part.begin, warp};
    JobX buffers[kAhead];
    Ring stage;
    const auto load = [&](JobX& to) {
      if (loads.index >= part.end) return;
      const Run run = run_at(loads.index);
      if (loads.job < jobs) load_x(to, run, run.first, loads.job);
      loads.advance(warp, jobs);
    };
    static_for<kAhead>([&](auto i) { load(buffers[i]); });
    while (stores.index < part.end) {
      static_for<kAhead>([&](auto i) {
        if (stores.index >= part.end) return;
        if (stores.job == warp) ptx::barrier_wait(stage_empty(stage.index), stage.parity ^ 1u);
        if (stores.job < jobs) store_x(buffers[i], stage.index, stores.job);
        if (stores.job + C::kWarpsX >= jobs) {
          ptx::fence_async_proxy();
          __syncwarp();
          if (lane == 0) ptx::barrier_arrive(stage_full(stage.index));
          stage.advance(C::kStages);
        }
        stores.advance(warp, jobs);
        load(buffers[i]);
      });
    }
  }

  struct CourseY {
    int index, delivery, job;
    Run run;
    __device__ __forceinline__ CourseY(const HopperWeightGrad& kernel, int first_job)
        : index(kernel.part.begin), delivery(0), job(first_job), run(kernel.run_at(index)) {}
    __device__ __forceinline__ int step() const { return run.first + delivery; }
    // False: the last delivery is over.
    __device__ __forceinline__ bool advance(const HopperWeightGrad& kernel, int first_job, int jobs) {
      job += kWarpsY;
      if (job < jobs) return true;
      job = first_job;
      return next_delivery(kernel);
    }
    __device__ __forceinline__ bool next_delivery(const HopperWeightGrad& kernel) {
      if (++delivery < run.count + kernel.args.ahead) return true;
      delivery = 0;
      index += run.count;
      if (index >= kernel.part.end) return false;
      run = kernel.run_at(index);
      return true;
    }
  };

  __device__ __forceinline__ void produce_y() const {
    if (part.begin >= part.end) return;
    if constexpr (kThroughRegisters) {
      pass_y();
    } else {
      copy_y();
    }
  }

  __device__ __forceinline__ void copy_y() const {
    const int own = warp - C::kWarpsX, jobs = jobs_y();
    Ring group;
    CourseY course(*this, own);
    do {
      ptx::barrier_wait(empty(group.index), group.parity ^ 1u);
      for (int job = own; job < jobs; job += kWarpsY) {
        for_words_y(place_y(job, group.index, course.step()), course.run,
                    [&](auto, unsigned* to, const Source& source) {
                      ptx::copy_words<1>(to, source.from, source.first);
                    });
      }
      ptx::copy_arrive(full(group.index));
      group.advance(args.groups);
    } while (course.next_delivery(*this));
  }

  __device__ __forceinline__ void pass_y() const {
    const int own = warp - C::kWarpsX, jobs = jobs_y();
    CourseY loads(*this, own);
    JobY buffers[kAhead];
    bool more = true;
    int waiting = 0, job = own;  // jobs in registers, and the first of them
    Ring group;
    const auto load = [&](JobY& to) {
      if (!more) return;
      if (loads.job < jobs) load_y(to, loads.run, loads.step(), loads.job);
      more = loads.advance(*this, own, jobs);
      ++waiting;
    };
    static_for<kAhead>([&](auto i) { load(buffers[i]); });
    while (waiting > 0) {
      static_for<kAhead>([&](auto i) {
        if (waiting == 0) return;
        if (job == own) ptx::barrier_wait(empty(group.index), group.parity ^ 1u);
        if (job < jobs) store_y(buffers[i], group.index, loads.run, job);
        job += kWarpsY;
        if (job >= jobs) {
          ptx::barrier_arrive(full(group.index));
          group.advance(args.groups);
          job = own;
        }
        --waiting;
        load(buffers[i]);
      });
    }
  }

  // ---- Consumers.

  // Words of dy as tensor cores want them: word 2i of both channels of a pair, then word 2i + 1.
  struct Fragments {
    unsigned loaded[C::kLoads][4];
    unsigned joined[C::kJoins > 0 ? C::kJoins : 1][4];
  };
  // Which of the loaded has a word of a plane.
  static constexpr int load_of(int plane, int word) {
    for (int i = 0; i < C::kLoads; ++i) {
      if (C::kLoadPlane(i) == plane && C::kLoadWord(i) == word / 2 * 2) return i;
    }
    return -1;
  }

  struct Consumer {
    float sums[C::kRowTiles][C::kTaps][kSums];
    int place[C::kRowTiles];  // of this lane's pair and row of taps in a sheet
    int sheet[C::kRowTiles];  // that the row of taps reads, relative to the position's
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
      me.place[r] =
          pair * args.pair_pitch + 2 * (plane * args.plane_pitch + C::kShiftH(kind.h, h) * args.line_pitch);
      me.sheet[r] = C::kShiftD(kind.d, d);
    }
  }

  // Where this lane's words of a chunk begin, for row tile r. `first_sheet`: that of the step.
  __device__ __forceinline__ const unsigned* find(const Consumer& me, int r, int chunk,
                                                  int first_sheet) const {
    const Segment& segment = segments[4 * chunk + lane % 4];
    const int sheets = args.groups * args.box.d;
    int sheet = first_sheet + segment.d + me.sheet[r];
    if (sheet >= sheets) sheet -= sheets;
    return ring + sheet * sheet_words + me.place[r] + segment.place;
  }

  __device__ __forceinline__ void load(Fragments& to, const unsigned* from) const {
    static_for<C::kLoads>([&](auto i) {
      constexpr int kI = decltype(i)::value;
      const Vector<unsigned, 4> words =
          load_vector<4>(from + 2 * (C::kLoadPlane(kI) * args.plane_pitch + C::kLoadWord(kI)));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        to.loaded[kI][e] = kVectors ? words.at[e] : rounded(words.at[e]);
      }
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

  // One row of K, two chunks, for all row tiles; `from` is where the first one's words are, and then where
  // the next row's are. With two sets of fragments, the next are loaded while products run (the first are
  // there already); with one, at least they have been found.
  __device__ __forceinline__ void multiply_row(Consumer& me, Fragments (&fragments)[C::kDepth], int row,
                                               unsigned long long b, int first_sheet,
                                               const unsigned*& from) const {
    constexpr int kItems = 2 * C::kRowTiles;
    static_for<kItems>([&](auto item) {
      constexpr int kItem = decltype(item)::value, kNext = kItem + 1;
      Fragments& present = fragments[kItem % C::kDepth];
      if constexpr (C::kDepth == 1) load(present, from);
      multiply<kItem % C::kRowTiles>(me, present, ptx::advance(b, kItem / C::kRowTiles * kChunkBytes));
      const bool more = kNext < kItems || row + 1 < row_segments();
      if (more) from = find(me, kNext % C::kRowTiles, 2 * row + kNext / C::kRowTiles, first_sheet);
      ptx::matrix_wait<C::kDepth - 1>();
      if (C::kDepth == 2 && more) load(fragments[kNext % C::kDepth], from);
    });
  }

  __device__ __forceinline__ void multiply_step(Consumer& me, int stage, int group) const {
    const unsigned x = ptx::shared_address(stages + stage * stage_bytes);
    const int first_sheet = group * args.box.d;
    const unsigned* from = find(me, 0, 0, first_sheet);
    Fragments fragments[C::kDepth];
    if constexpr (C::kDepth == 2) load(fragments[0], from);
#pragma unroll 1
    for (int row = 0; row < row_segments(); ++row) {
      multiply_row(me, fragments, row,
                   ptx::matrix_descriptor<kRowBytes>(x + row * C::kColumns * kRowBytes, 8 * kRowBytes),
                   first_sheet, from);
    }
    ptx::matrix_wait<0>();
  }

  __device__ __forceinline__ void consume(int consumer) const {
    Consumer me;
    locate(me, consumer);
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
#pragma unroll
      for (int t = 0; t < C::kTaps; ++t) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) me.sums[r][t][i] = 0.0f;
      }
    }
    Ring group, arriving, stage;  // of the step; of the last group that it needs
    for (int index = part.begin; index < part.end;) {
      const Run run = run_at(index);
      for (int i = 0; i < args.ahead; ++i) arriving.advance(args.groups);
#pragma unroll 1
      for (int step = 0; step < run.count; ++step) {
        // Producers deliver in order: with this group, all before it are there.
        ptx::barrier_wait(full(arriving.index), arriving.parity);
        ptx::barrier_wait(stage_full(stage.index), stage.parity);
        multiply_step(me, stage.index, group.index);
        __syncwarp();
        if (lane == 0) {
          ptx::barrier_arrive(empty(group.index));
          ptx::barrier_arrive(stage_empty(stage.index));
        }
        group.advance(args.groups);
        arriving.advance(args.groups);
        stage.advance(C::kStages);
      }
      // The groups that only this run's last step needed.
      for (int i = 0; i < args.ahead; ++i) {
        if (lane == 0) ptx::barrier_arrive(empty(group.index));
        group.advance(args.groups);
      }
      index += run.count;
    }
    store(me, consumer);
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
  HopperWeightGrad<Config> kernel(args);
  kernel.prepare();
  if (kernel.warp < kernel.kProducerWarps) {
    ptx::keep_registers<Config::kProducerRegisters>();
    if (kernel.warp < Config::kWarpsX) {
      kernel.produce_x();
    } else {
      kernel.produce_y();
    }
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    kernel.consume(kernel.warp / 4 - Config::kProducers);
  }
}

}  // namespace tconv3d
