// The halo kernel's loaders: producer warps that fill the ring of halo stages, batch after batch, across
// chunks, planes and tiles. A batch is the set of loads that a lane has in flight (halo_positions.cuh).
#pragma once

#include "halo_copies.cuh"
#include "halo_turns.cuh"

namespace tconv3d {

template <class Config>
struct HaloLoaders {
  using Choices = HaloChoices<Config>;
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Shared = HaloShared<Config>;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;

  using Copies = HaloCopies<Config>;
  using Batch = typename Choose<
      Choices::kCopiesRows, Copies,
      typename Choose<Config::kUnitC, BatchByChannel<Config>, BatchByPosition<Config>>::type>::type;
  // Whether the build may load the input by 16-byte vectors along w; args.vectors says whether a launch does.
  // Float32 input is loaded position by position, which is faster on an H200.
  static constexpr bool kMayHaveVectors =
      sizeof(Scalar) == 2 && !Config::kUnitC && !Choices::kCopiesRows && Config::kReadStepW == Config::kParts;

  // Whether the build may load two neighbouring positions at once; args.pairs says whether a launch does.
  static constexpr bool kMayHavePairs = sizeof(Scalar) == 2 && !Config::kUnitC && !Choices::kCopiesRows &&
                                        Config::kParts == 1 && Config::kReadStepW == 1 && Layout::kDense;

  // The table of positions, which lies behind everything else in shared memory.
  struct Table {
    static constexpr int kTurns = (Config::kStageRows + Batch::kRows - 1) / Batch::kRows * Batch::kShares;
    static constexpr int kRound = Shared::kLoaderWarps * Batch::kTurns;
    static constexpr int kSharedBytes =
        Shared::kTableStart + (kTurns + kRound - 1) / kRound * kRound * Batch::kRows * 8;
  };
  using Last = typename Choose<Config::kInput == Input::kTurned, HaloTurns<Config>, Table>::type;
  static_assert(Last::kSharedBytes <= Config::kSharedBytes, "the planner asked for too little shared memory");

  // The sequence of batches of a loader warp, across chunks, planes and tiles.
  template <class Batch>
  struct Course {
    int warp, lane, batches;
    typename Tile::Work work;
    int plane, source, chunk, batch, planes;
    int first_chunk = 0, end_chunk = Layout::kChunks;  // chunks of the place
    int run;                                           // first row of the place, if it is a run
    const unsigned char *plane_start, *x;  // addresses of the plane's first chunk and of the current chunk

    // Begins at the current place, or at the next one that has input. Returns false if there is none.
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
    // Fills the table of sources and targets for the turns of this warp.
    __device__ __forceinline__ void find(const Args& args) {
      const Place at = work.place(args);
      __syncwarp();  // Lanes that share a table entry must have read the previous tile's.
#pragma unroll 1
      for (int turn = warp; turn < batches * Batch::kTurns * Shared::kLoaderWarps;
           turn += Shared::kLoaderWarps) {
        Batch::find(args, at, source, turn, warp, lane);
      }
      __syncwarp();
      chunk = at.first_chunk();
      run = at.start;
      if constexpr (Choices::kDividesTiles) {
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
      if (++chunk < (Choices::kDividesTiles ? end_chunk : Layout::kChunks)) return true;
      chunk = Choices::kDividesTiles ? first_chunk : 0;
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
    // Loads the next batch, then stores the current one. Returns false if there is no next batch.
    const auto step = [&](const Batch& present, Batch& next) {
      const bool first = course.batch == 0, last = course.batch == course.batches - 1;
      if constexpr (Batch::kClears) {  // Only the first stages of a tile are cleared.
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
    // Two named batches instead of a copy, because a copy would wait for the loads in flight.
    Batch even, odd;
    course.load(args, even);
    while (step(even, odd) && step(odd, even)) {
    }
  }
  // Copies asynchronously: all copies of a stage are in flight at once, and copies of the next stage are
  // issued as soon as it is free. Copies arrive at the stage's barrier by themselves, unless the values have
  // to be rounded first.
  static __device__ __forceinline__ void copy(const Args& args, const Shared& shared, int warp, int lane) {
    if constexpr (Config::kInput == Input::kRewritten) ptx::wait_for_previous_launch();
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

  // Copies asynchronously and transposes what has arrived. A warp copies kAtOnce - 1 batches ahead, also of
  // the next chunks and tiles.
  static __device__ __forceinline__ void turn(const Args& args, const Shared& shared, int warp, int lane) {
    using Turns = HaloTurns<Config>;
    static_assert(!Config::kMarch && Layout::kDense, "channels are neighbours, and lines have no gaps");
    Ring<Config::kStages> ring;
    Course<Turns> course;
    course.warp = warp;
    course.lane = lane;
    course.batches = (Turns::turns(args) + Shared::kLoaderWarps - 1) / Shared::kLoaderWarps;
    course.work = Tile::Work::of_block(args);
    bool more = course.start(args);
    int ahead = 0, next = 0, present = 0;  // batches on their way, and the places of the next and the present
    const auto copy_next = [&]() {
      if (more) {
        Turns::copy(args, course.x, course.chunk, course.batch * Shared::kLoaderWarps + warp,
                    Turns::arriving(warp, next), lane);
        next = next + 1 == Turns::kAtOnce ? 0 : next + 1;
        ++ahead;
        more = course.advance(args);
      }
      ptx::copy_commit();
    };
    for (int i = 0; i < Turns::kAtOnce - 1; ++i) copy_next();
    for (int batch = 0; ahead > 0;) {
      ptx::copy_wait<Turns::kAtOnce - 2>();
      __syncwarp();  // other lanes' copies have arrived, and they have stored the previous batch
      copy_next();
      if (batch == 0) ptx::barrier_wait(shared.stage_empty(ring.index), ring.parity ^ 1);
      Turns::store(shared.stage(ring.index), batch * Shared::kLoaderWarps + warp,
                   Turns::arriving(warp, present), lane);
      present = present + 1 == Turns::kAtOnce ? 0 : present + 1;
      --ahead;
      if (++batch == course.batches) {
        batch = 0;
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(shared.stage_full(ring.index));
        ring.advance();
      }
    }
  }

  static __device__ __forceinline__ void load(const Args& args, const Shared& shared, int warp, int lane) {
    if constexpr (Config::kInput == Input::kTurned) {
      turn(args, shared, warp, lane);
      return;
    }
    if constexpr (Choices::kCopiesRows) {
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
    if constexpr (!Choices::kCopiesRows) load<Batch>(args, shared, warp, lane);
  }
};

}  // namespace tconv3d
