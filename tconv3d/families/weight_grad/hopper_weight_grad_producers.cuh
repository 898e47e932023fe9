// The producer warps of the weight gradient on Hopper (hopper_weight_grad.cuh): copies of x and dy to shared
// memory, and the transpose and rounding of x.
#pragma once

#include "any_address.cuh"
#include "hopper_weight_grad_block.cuh"

namespace tconv3d {

template <class C>
struct HopperWeightProducers : HopperWeightBlock<C> {
  using Block = HopperWeightBlock<C>;
  using Block::args, Block::empty, Block::full, Block::in_group, Block::inside, Block::kind, Block::lane;
  using Block::kCopiers, Block::kJobChannels, Block::kJobsX, Block::kJobsY, Block::kPairs;
  using Block::kPerWord, Block::kPlanesTogether, Block::kRounded, Block::kRowSegments, Block::kRowWords;
  using Block::kRowsX, Block::kRowsY, Block::kSegment, Block::kSlotBlock, Block::kStepH, Block::kTurners;
  using Block::part, Block::ring, Block::rounded, Block::row_place, Block::row_segments, Block::run_at;
  using Block::segments;
  using Block::sheet_words, Block::slot_count, Block::slots, Block::stage_bytes, Block::stage_copied;
  using Block::stage_empty, Block::stage_full, Block::stages, Block::warp;
  using typename Block::Index, typename Block::Run, typename Block::Scalar, typename Block::Segment;
  using typename Block::Slot;

  // A job is 32 words of eight channels of x, or some words of several channels of dy: several words for each
  // lane, of which neighbours have adjacent words. A warp's jobs are consecutive, so that what it computes
  // for a row serves several jobs.

  // Offset of a word in its channel, and whether its elements (first, second) are inside the tensor.
  struct Source {
    Index offset;
    bool first, second;
    int left = 0;  // with kShifted, elements from here to the end of the line
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
  // Copies a word of the eight channels of a job, with cp.async if words are whole in memory.
  __device__ __forceinline__ void copy_words_x(int stage, int job, const Source& source) const {
    const int channel = job % kJobsX * kJobChannels;
    const auto place = [&](int k) { return place_x(stage, job, k, lane / kSegment, lane % kSegment); };
    [[maybe_unused]] unsigned words[kJobChannels];
#pragma unroll
    for (int k = 0; k < kJobChannels; ++k) {
      if constexpr (C::kElementsX) {
        words[k] = load_elements(x_of(source, channel + k), source, static_cast<Index>(args.x_strides.w));
      } else {
        ptx::copy_words<1>(place(k), x_of(source, channel + k), source.first);
      }
    }
    if constexpr (C::kElementsX) {
#pragma unroll
      for (int k = 0; k < kJobChannels; ++k) *place(k) = words[k];
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
  // How the lanes of a warp divide rows of kChannels channels, kPieceWords at a time.
  template <int kChannels, int kPieceWords>
  struct RowLanes {
    static constexpr int kPiece = kPieceWords > 0 ? kPieceWords : 1, kPieces = kChannels / kPiece;
    // Lanes of a row: the fewest copies, then the most of one lane, which finds a row once for all of them.
    static constexpr int lanes() {
      int best = kPieces < 32 ? kPieces : 32;
      for (int lanes = 32; lanes >= 8; lanes /= 2) {
        if (lanes < kPieces && times(lanes) * (32 / best) <= times(best) * (32 / lanes)) best = lanes;
      }
      return best;
    }
    static constexpr int times(int lanes) { return (kPieces + lanes - 1) / lanes; }
    static constexpr int kLanes = lanes();
    static constexpr int kRows = 32 / kLanes;  // rows at a time; other lanes are idle
    // Rows of a lane that are in flight at once: more copies would take more registers than producers have.
    static constexpr int kAtOnce =
        times(kLanes) > 2 ? 1 : (C::kProducerRegisters < 64 ? 2 : 4) / times(kLanes);
    static __device__ __forceinline__ int row(int lane) { return lane / kLanes; }
    static __device__ __forceinline__ int channel(int lane) { return lane % kLanes * kPiece; }
    // Calls a function with the distance of each of a lane's pieces from its first one, in channels.
    template <class Copy>
    static __device__ __forceinline__ void for_each(int lane, Copy&& copy) {
#pragma unroll
      for (int i = 0; i < kPieces; i += kLanes) {
        if (i + kLanes <= kPieces || i + lane % kLanes < kPieces) copy(i * kPiece);
      }
    }
  };
  // Address of a channel of a job at one of the 32 positions of a row of K, before turn_rows() transposes the
  // job. Neighbouring jobs have neighbouring positions in other banks.
  __device__ __forceinline__ unsigned* row_x(int stage, unsigned job, unsigned position, int channel) const {
    return reinterpret_cast<unsigned*>(stages + stage * stage_bytes) + job * kJobChannels * kRowWords +
           (position ^ job % 4) * kJobChannels + channel;
  }
  // Copies rows of channels of x. A lane has one or several pieces of every kRows-th position.
  __device__ __forceinline__ void copy_rows_x(int stage, const Run& run, int step) const {
    using Lanes = RowLanes<C::kColumns, C::kPieceX>;
    constexpr int kAtOnce = Lanes::kAtOnce < 2 ? 1 : 2;
    const int channel = kind.first_in + Lanes::channel(lane);
    const unsigned count = static_cast<unsigned>(row_segments()) * kRowWords;
    const Scalar* const x = static_cast<const Scalar*>(args.x) + (kind.group * C::kInPerGroup + channel);
    if (Lanes::row(lane) >= Lanes::kRows) return;
#pragma unroll kAtOnce
    for (unsigned position = static_cast<unsigned>(warp * Lanes::kRows + Lanes::row(lane)); position < count;
         position += kCopiers * Lanes::kRows) {
      const Source source =
          find_x(run, step, segments[position / kSegment], static_cast<int>(position % kSegment));
      const Scalar* const from = x + source.offset;
      const unsigned job = position / kRowWords * kJobsX;
      Lanes::for_each(lane, [&](int further) {
        // Channels past the last one are zero: their sums are never written.
        const bool exists = source.first && channel + further < C::kInPerGroup;
        const int own = Lanes::channel(lane) + further;
        ptx::copy_words_once<Lanes::kPiece>(row_x(stage, job + static_cast<unsigned>(own / kJobChannels),
                                                  position % kRowWords, own % kJobChannels),
                                            from + further, exists);
      });
    }
  }
  __device__ __forceinline__ void copy_x(int stage, const Run& run, int step) const {
    if constexpr (kRowsX) {
      copy_rows_x(stage, run, step);
    } else {
      const Part<int> own(row_segments() * kJobsX, kCopiers, warp);
      for (int job = own.begin; job < own.end;) {
        const int row_segment = job / kJobsX, end = min(own.end, (row_segment + 1) * kJobsX);
        const Segment* const found = segments + row_segment * kRowSegments;
        if constexpr (C::kVectorsX) {
          copy_vectors_x(stage, job, end, find_x(run, step, found[lane % kRowSegments], 0));
          job = end;
        } else {
          const Source source = find_x(run, step, found[lane / kSegment], lane % kSegment);
#pragma unroll 1
          for (; job < end; ++job) copy_words_x(stage, job, source);
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
  // Transposes and rounds the rows of channels of each job in place. A lane has one channel at every fourth
  // position: two pieces of 16 bytes.
  __device__ __forceinline__ void turn_rows(int stage, const Part<int>& own) const {
    const int row = lane % kJobChannels, word = lane / kJobChannels;
#pragma unroll 1
    for (int job = own.begin; job < own.end; ++job) {
      const unsigned* const from = row_x(stage, static_cast<unsigned>(job), static_cast<unsigned>(word), row);
      Vector<unsigned, 4> pieces[2];
#pragma unroll
      for (int i = 0; i < kRowSegments; ++i) {
        pieces[i / 4].at[i % 4] = rounded(from[i * kSegment * kJobChannels]);
      }
      __syncwarp();  // every lane has read the job
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<Vector<unsigned, 4>*>(place_x(stage, job, row, 4 * i, word)) = pieces[i];
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
    } else if constexpr (kRowsX) {
      turn_rows(stage, own);
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
    // With kShifted, vectors begin up to a vector before w, which is a multiple of a vector.
    const int end = args.dy_size.w + (C::kShifted ? kVectorItems - 1 : 0);
    return Source{base + slot.offset, line && inside(w, end),
                  C::kElementsY && line && inside(w + C::kStrideW, args.dy_size.w), args.dy_size.w - w};
  }
  __device__ __forceinline__ Source at_depth(const Source& source, int d) const {
    const bool sheet = inside(d, args.dy_size.d);
    return Source{source.offset + d * static_cast<Index>(args.dy_strides.d), source.first && sheet,
                  source.second && sheet, source.left};
  }
  __device__ __forceinline__ const Scalar* dy_of(const Source& source, int channel) const {
    constexpr bool kWhole = C::kOutPerGroup % C::kOutTile == 0;
    const int in_group =
        kWhole ? kind.first_out + channel : min(kind.first_out + channel, C::kOutPerGroup - 1);
    const Index first = source.first || source.second ? source.offset : 0;
    return static_cast<const Scalar*>(args.dy) +
           (first + (kind.group * C::kOutPerGroup + in_group) * static_cast<Index>(args.dy_strides.c));
  }

  // Copies a group of sheets of rows of channels. A job is a line, with all phases along w if the positions
  // that a warp copies at a time are equally many of each phase, else with one.
  __device__ __forceinline__ void copy_rows(int group, const Run& run, int step) const {
    using Lanes = RowLanes<C::kOutTile, C::kPieceY>;
    constexpr int kTogether = Lanes::kRows % C::kPlanesW == 0 ? C::kPlanesW : 1;  // phases of a job
    constexpr int kParts = C::kPlanesW / kTogether, kStep = Lanes::kRows / kTogether;
    const int first = Lanes::row(lane) / kTogether, phase = Lanes::row(lane) % kTogether;
    const int begin = Lanes::row(lane) < Lanes::kRows ? first : args.line_words;
    const int channel = kind.first_out + Lanes::channel(lane);
    const Index stride = kStep * C::kStrideW * static_cast<Index>(args.dy_strides.w);
    const Scalar* const dy =
        static_cast<const Scalar*>(args.dy) +
        (run.n * static_cast<Index>(args.dy_strides.n) + kind.group * C::kOutPerGroup + channel);
    const int jobs = args.box.d * C::kPlanesD * C::kPlanesH * kParts * args.lines;
#pragma unroll 1
    for (int job = warp; job < jobs; job += kCopiers) {
      const int part = divide(job, args.by_jobs), line = job - part * args.lines;
      const int plane_w = part % kParts * kTogether + phase;
      const int plane_h = part / kParts % C::kPlanesH, plane = part / kParts / C::kPlanesH;
      const int d = (step * args.box.d + plane / C::kPlanesD) * C::kStrideD +
                    C::kPlaneOffsetD(kind.d, plane % C::kPlanesD);
      const int h = run.h * kStepH + line * C::kStrideH + C::kPlaneOffsetH(kind.h, plane_h);
      int w = (run.w + first) * C::kStrideW + C::kPlaneOffsetW(plane_w);
      const Scalar* from =
          dy + (d * static_cast<Index>(args.dy_strides.d) + h * static_cast<Index>(args.dy_strides.h) +
                w * static_cast<Index>(args.dy_strides.w));
      unsigned* const to = ring + group * args.box.d * sheet_words + in_group(plane) +
                           (plane_h * C::kPlanesW + plane_w) * args.plane_pitch + line * args.line_pitch +
                           Lanes::channel(lane);
      const int end = inside(d, args.dy_size.d) && inside(h, args.dy_size.h) ? args.dy_size.w : 0;
#pragma unroll Lanes::kAtOnce
      for (int position = begin; position < args.line_words; position += kStep) {
        Lanes::for_each(lane, [&](int further) {
          // Channels past the last one are zero: their sums are never written.
          const bool exists = inside(w, end) && channel + further < C::kOutPerGroup;
          ptx::copy_words_once<Lanes::kPiece>(to + row_place(position) + further, from + further, exists);
        });
        w += kStep * C::kStrideW;
        from += stride;
      }
    }
    arrive<true>(full(group));
  }
  __device__ __forceinline__ unsigned load_dy(const Scalar* from, const Source& source) const {
    return load_elements(from, source, C::kStrideW * static_cast<Index>(args.dy_strides.w));
  }
  // Copies the vector of memory that an element lies in, which is `left` bytes before the end of its line.
  // What lies behind the line becomes zero, and is not read; consumers do not take what lies before it. dy
  // begins with a whole vector. kNone copies zeros.
  static constexpr int kVectorItems = 8, kNone = -16;
  __device__ __forceinline__ void copy_around(unsigned* to, const Scalar* from, int left) const {
    const int before = static_cast<int>(offset_in_vector(from)), length = min(max(left + before, 0), 16);
    const auto vector = reinterpret_cast<unsigned long long>(from) & ~15ull;
    ptx::copy_beginning(to, reinterpret_cast<const void*>(vector), static_cast<unsigned>(length));
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
        } else if constexpr (C::kShifted) {
          copy_around(to + k * args.pair_pitch, dy + offset,
                      inside && source.first ? 2 * source.left : kNone);
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
      const int index = block * kSlotBlock + lane % kSlotBlock;
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
        if constexpr (kRowsY) {
          copy_rows(group.index, run, run.first + i);
        } else {
          copy_group(group.index, run, run.first + i);
        }
      }
      index += run.count;
    }
  }
};

}  // namespace tconv3d
