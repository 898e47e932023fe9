// A consumer of the halo kernel: a warpgroup that multiplies and stores. Where it is in the rings of stages
// and slots, what it gives back to the producers, and how two of them keep apart.
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
  Ring<Config::kResident ? 1 : Config::kSlots> slots;
  Ring<Shared::kJointBuffers> images;
  int variant;  // of this tile
  int depth;    // its first position along d
  int depths;   // and how many (kSpread)
  int panel;    // of this tile (of this plane, when marching)
  unsigned lead_parity = 0, join_parity = 0;
  int turn = 0;  // panels so far

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

  // Which buffers the matrix instructions before the last committed group have finished with.
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

  // The second consumer begins a tile (or plane) when the first is kLead panels into it: so that one stores
  // while the other multiplies, where both would store at the same time, and leave the tensor cores idle.
  __device__ __forceinline__ void keep_behind() {
    panel = 0;
    if (Config::kLead == 0 || index == 0) return;
    ptx::barrier_wait(shared.ahead(), lead_parity);
    lead_parity ^= 1;
    __syncwarp();  // all lanes have passed: what follows lets the barrier move on
    if (this->lane == 0) ptx::barrier_arrive(shared.seen());
  }
  __device__ __forceinline__ void announce_lead() {
    if (Config::kLead == 0 || index != 0 || ++panel != Config::kLead) return;
    announce();
  }
  // A piece of a tile may have fewer panels than that.
  __device__ __forceinline__ void end_lead() {
    if (Config::kLead > 0 && index == 0 && panel < Config::kLead) announce();
  }
  __device__ __forceinline__ void announce() {
    ptx::barrier_wait(shared.seen(), lead_parity ^ 1);  // the lead before this
    lead_parity ^= 1;
    __syncwarp();
    if (this->lane == 0) ptx::barrier_arrive(shared.ahead());
  }
};

}  // namespace tconv3d
