// The producer warps of the weight gradient on Hopper (hopper_weight_grad.cuh): copies of x and dy to shared
// memory, and the transpose and rounding of x.
#pragma once

#include "hopper_weight_grad_block.cuh"

namespace tconv3d {

template <class C>
struct HopperWeightProducers : HopperWeightBlock<C> {
  using Block = HopperWeightBlock<C>;
  using Block::args, Block::empty, Block::full, Block::in_group, Block::inside, Block::kind, Block::lane;
  using Block::kCopiers, Block::kJobChannels, Block::kJobsX, Block::kJobsY, Block::kPairs;
  using Block::kPerWord, Block::kPlanesTogether, Block::kRounded, Block::kRowSegments, Block::kRowWords;
  using Block::kSegment, Block::kSlotBlock, Block::kStepH, Block::kTurners;
  using Block::part, Block::ring, Block::rounded, Block::row_segments, Block::run_at, Block::segments;
  using Block::sheet_words, Block::slot_count, Block::slots, Block::stage_bytes, Block::stage_copied;
  using Block::stage_empty, Block::stage_full, Block::stages, Block::warp;
  using typename Block::Index, typename Block::Run, typename Block::Scalar, typename Block::Segment;
  using typename Block::Slot;

  // A job is 32 words of eight channels of x, or some words of several channels of dy: several words for each
  // lane. Lanes have adjacent words where w is contiguous, and adjacent channels where channels are. A warp's
  // jobs are consecutive, so that what it computes for a row serves several jobs.

  // Offset of a word in its channel, and whether its elements (first, second) are inside the tensor.
  struct Source {
    Index offset;
    bool first, second;
  };
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
};

}  // namespace tconv3d
