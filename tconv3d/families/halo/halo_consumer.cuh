// A consumer of the halo kernel is a warpgroup that multiplies and stores. This file has its positions in the
// rings of stages and slots, the release of buffers to the producers, and the lead of the first consumer over
// the second.
#pragma once

#include "halo_shared.cuh"
#include "halo_stores.cuh"

namespace tconv3d {

template <class Config>
struct HaloConsumer : HaloStores<Config>::Writer {
  using Shared = HaloShared<Config>;

  Shared shared;
  int index;
  Ring<Config::kStages> stages;
  Ring<Config::kWeights == Weights::kResident ? 1 : Config::kSlots> slots;
  Ring<Config::kLongRunBuffers> images;
  int variant;  // variant of the tile at hand
  int depth;    // first position of the tile along d
  int depths;   // Division::kLastTiles: planes of positions that the tile touches
  int panel;    // panels multiplied so far in this tile (when marching, in this plane)
  int chunks;   // Division::kLastTiles: chunks multiplied so far in this piece of a tile
  unsigned lead_parity = 0, join_parity = 0;
  int turn = 0;  // panels seen by this consumer since the kernel began

  static __device__ __forceinline__ HaloConsumer make(const Shared& shared, int index, int warp, int lane) {
    HaloConsumer me;
    me.warp = warp;
    me.lane = lane;
    me.scratch = shared.scratch(index, warp);
    me.consumer = index;
    me.buffers = shared.buffers(index);
    me.shared = shared;
    me.index = index;
    return me;
  }

  // Buffers that the matrix instructions before the last committed group have finished reading.
  struct Finished {
    static constexpr unsigned kNone = 0xFFFFFFFFu;
    unsigned slot = kNone, stage = kNone;
  };
  Finished finished;

  __device__ __forceinline__ void release() {
    const int lane = this->lane;
    if (lane == 0 && finished.stage != Finished::kNone)
      ptx::barrier_arrive(shared.stage_empty(finished.stage));
    if (lane == 0 && finished.slot != Finished::kNone) ptx::barrier_arrive(shared.slot_empty(finished.slot));
    finished = {};
  }

  // The second consumer begins a tile (or plane) when the first is kLead panels into it, so that one stores
  // while the other multiplies. Otherwise both would store at the same time, and the tensor cores would be
  // idle.
  __device__ __forceinline__ void keep_behind() {
    panel = chunks = 0;
    if (Config::kLead == 0 || index == 0) return;
    ptx::barrier_wait(shared.ahead(), lead_parity);
    lead_parity ^= 1;
    __syncwarp();  // All lanes must pass the wait before the arrival lets the barrier begin its next phase.
    if (this->lane == 0) ptx::barrier_arrive(shared.seen());
  }
  __device__ __forceinline__ void announce_lead() {
    if (Config::kLead == 0 || index != 0 || ++panel != Config::kLead) return;
    announce();
  }
  // Announces the lead at the end of a piece of a tile that has fewer than kLead panels.
  __device__ __forceinline__ void end_lead() {
    if (Config::kLead == 0 || index != 0 || panel >= Config::kLead) return;
    announce();
    panel = Config::kLead;
  }
  // Called after every chunk. At the borders of the volume a chunk has few panels; the lead then ends before
  // the first consumer needs a stage that the second, which has not begun, must release.
  __device__ __forceinline__ void limit_lead() {
    if (Config::kLead > 0 && ++chunks == Config::kStages - 1) end_lead();
  }
  __device__ __forceinline__ void announce() {
    // The second consumer must have seen the previous lead.
    ptx::barrier_wait(shared.seen(), lead_parity ^ 1);
    lead_parity ^= 1;
    __syncwarp();
    if (this->lane == 0) ptx::barrier_arrive(shared.ahead());
  }
};

}  // namespace tconv3d
