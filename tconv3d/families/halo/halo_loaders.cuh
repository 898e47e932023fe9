// The halo kernel's loaders: producer warps that fill the ring of halo stages, batch after batch, across
// chunks, planes and tiles.
#pragma once

#include "halo_copies.cuh"
#include "halo_vectors.cuh"

namespace tconv3d {

template <class Config>
struct HaloLoaders {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Shared = HaloShared<Config>;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;

  using Copies = HaloCopies<Config>;
  using Batch = typename Choose<
      Config::kCopied, Copies,
      typename Choose<Config::kUnitC, BatchByChannel<Config>, BatchByPosition<Config>>::type>::type;
  // Whether the input may be such that vectors can be loaded. Vectors of 32-bit items lost (measured).
  static constexpr bool kMayHaveVectors =
      sizeof(Scalar) == 2 && !Config::kUnitC && !Config::kCopied && Config::kReadStepW == Config::kParts;

  // The same of loads of two positions.
  static constexpr bool kMayHavePairs = sizeof(Scalar) == 2 && !Config::kUnitC && !Config::kCopied &&
                                        Config::kParts == 1 && Config::kReadStepW == 1 && Layout::kDense;

  static constexpr bool kPartly = Config::kPortioned || Config::kSpread;  // a place may have some chunks

  static constexpr int kTurns = (Config::kStageRows + Batch::kRows - 1) / Batch::kRows * Batch::kShares;
  static constexpr int kRound = Shared::kLoaderWarps * Batch::kTurns;
  static constexpr int kSharedBytes =
      Shared::kTableStart + (kTurns + kRound - 1) / kRound * kRound * Batch::kRows * 8;
  static_assert(kSharedBytes <= Config::kSharedBytes, "the planner asked for too little shared memory");

  // What a loader warp does, one batch after the other, across chunks, planes and tiles.
  template <class Batch>
  struct Course {
    int warp, lane, batches;
    typename Tile::Work work;
    int plane, source, chunk, batch, planes;
    int first_chunk = 0, end_chunk = Layout::kChunks;  // of the place
    int run;                                           // its first row, if it is one
    const unsigned char *plane_start, *x;              // of the plane's first chunk, of the chunk

    // At the present place, or the next one that has input.
    __device__ __forceinline__ bool start(const Args& args) {
      plane = source = batch = 0;
      for (; work.left(args); work.advance(args)) {
        planes = Tile::fed_planes(args, work.place(args));
        if (planes > 0) {
          find(args);
          return true;
        }
      }
      return false;
    }
    // Where the turns of this warp read and write.
    __device__ __forceinline__ void find(const Args& args) {
      const Place at = work.place(args);
      __syncwarp();  // lanes that share an entry have read the last tile's
#pragma unroll 1
      for (int turn = warp; turn < batches * Batch::kTurns * Shared::kLoaderWarps;
           turn += Shared::kLoaderWarps) {
        Batch::find(args, at, source, turn, warp, lane);
      }
      __syncwarp();
      chunk = at.first_chunk();
      run = at.start;
      if constexpr (kPartly) {
        first_chunk = chunk;
        end_chunk = at.end_chunk();
      }
      const long long first =
          (at.first_group() * Config::kIn + chunk * Layout::kPartItems) * args.x_stride.c +
          (Config::kMarch ? at.first_plane * args.x_stride.d : 0);
      x = plane_start = static_cast<const unsigned char*>(args.x) + first * static_cast<int>(sizeof(Scalar));
    }
    __device__ __forceinline__ bool advance(const Args& args) {
      if (++batch < batches) return true;
      batch = 0;
      if constexpr (Layout::kDense) {
        x += Layout::kPartItems * static_cast<int>(sizeof(Scalar)) * args.x_stride.c;
      }
      if (++chunk < (kPartly ? end_chunk : Layout::kChunks)) return true;
      chunk = kPartly ? first_chunk : 0;
      if constexpr (Config::kSources > 1) {
        if (++source < Config::kSources) {
          find(args);
          return true;
        }
      }
      x = plane_start += static_cast<int>(sizeof(Scalar)) * args.x_stride.d;
      if (++plane < planes) return true;
      work.advance(args);
      return start(args);
    }
    __device__ __forceinline__ void load(const Args& args, Batch& next) const {
      next.load(args, x, chunk, batch * Batch::kTurns * Shared::kLoaderWarps + warp, lane);
    }
  };

  template <class Batch>
  static __device__ __forceinline__ void load(const Args& args, const Shared& shared, int warp, int lane) {
    constexpr int kAtOnce = Shared::kLoaderWarps * Batch::kTurns;
    Ring<Config::kStages> ring;
    Course<Batch> course;
    course.warp = warp;
    course.lane = lane;
    course.batches = (Batch::turns(args) + kAtOnce - 1) / kAtOnce;
    course.work = Tile::Work::of_block(args);
    if (!course.start(args)) return;
    // Loads the next batch, then stores the present one. False: there is no next.
    const auto step = [&](const Batch& present, Batch& next) {
      const bool first = course.batch == 0, last = course.batch == course.batches - 1;
      if constexpr (Batch::kClears) {  // the stages that a tile begins with
        if (first && args.gaps && course.plane * Layout::kChunks + course.chunk < Config::kStages) {
          ptx::barrier_wait(shared.stage_empty(ring.index), ring.parity ^ 1);
          HaloVectors<Config>::clear(args, course.run, shared.stage(ring.index), 32 * warp + lane);
        }
      }
      const bool more = course.advance(args);
      if (more) course.load(args, next);
      if (first) ptx::barrier_wait(shared.stage_empty(ring.index), ring.parity ^ 1);
      present.store(shared.stage(ring.index), lane);
      if (last) {
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared.stage_full(ring.index));
        ring.advance();
      }
      return more;
    };
    Batch even, odd;  // two names, so that nothing is copied while it is on its way
    course.load(args, even);
    while (step(even, odd) && step(odd, even)) {
    }
  }
  // All copies of a stage are on their way at once, and those of the next one as soon as it is free: they
  // arrive at its barrier by themselves, unless something has to be rounded first.
  static __device__ __forceinline__ void copy(const Args& args, const Shared& shared, int warp, int lane) {
    if constexpr (Config::kAfterRows) ptx::wait_for_previous_launch();
    Ring<Config::kStages> ring;
    const auto own = Copies::Lane::of(lane);
    Course<Copies> course;
    course.warp = warp;
    course.lane = lane;
    course.batches = (Copies::turns(args) + Shared::kLoaderWarps - 1) / Shared::kLoaderWarps;
    const int own_turns = (Copies::turns(args) - warp + Shared::kLoaderWarps - 1) / Shared::kLoaderWarps;
    course.work = Tile::Work::of_block(args);
    for (bool more = course.start(args); more; ring.advance()) {
      const unsigned stage = shared.stage(ring.index);
      ptx::barrier_wait(shared.stage_empty(ring.index), ring.parity ^ 1);
#pragma unroll 1
      for (int i = 0; i < own_turns; ++i) {
        Copies::copy(args, course.x, course.chunk, stage, i * Shared::kLoaderWarps + warp, own, lane);
      }
      if constexpr (Shared::kCopiesArrive) {
        ptx::copy_arrive(shared.stage_full(ring.index));
      } else {
        ptx::copy_commit();
        ptx::copy_wait<0>();
#pragma unroll 1
        for (int i = 0; i < own_turns; ++i) {
          Copies::round(stage, i * Shared::kLoaderWarps + warp, own);
        }
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared.stage_full(ring.index));
      }
      course.batch = course.batches - 1;
      more = course.advance(args);
    }
  }

  static __device__ __forceinline__ void load(const Args& args, const Shared& shared, int warp, int lane) {
    if constexpr (Config::kCopied) {
      copy(args, shared, warp, lane);
      return;
    }
    if constexpr (kMayHaveVectors) {
      if (args.vectors > 0) {
        load<BatchTransposed<Config>>(args, shared, warp, lane);
        return;
      }
    }
    if constexpr (kMayHavePairs) {
      if (args.pairs) {
        load<BatchByPair<Config>>(args, shared, warp, lane);
        return;
      }
    }
    if constexpr (!Config::kCopied) load<Batch>(args, shared, warp, lane);
  }
};

}  // namespace tconv3d
