// Split-K between the two consumers of a block of the halo kernel (Division::kConsumers): both have the same
// slabs, and take turns at the panels. At the end the second hands its sums to the first, which stores. For
// layers with few positions this makes twice as many tiles, each in half the time.
#pragma once

#include "halo_consumer.cuh"

namespace tconv3d {

template <class Config>
struct HaloDivided {
  using Shared = HaloShared<Config>;
  using Layout = HaloLayout<Config>;
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;
  using Consumer = HaloConsumer<Config>;

  // Returns whether the next panel is this consumer's; if not, its slot is skipped. The number of slots is
  // even, so that a consumer always uses the same slots and sees every phase of their barriers.
  static __device__ __forceinline__ bool own_panel(Consumer& me) {
    static_assert(Config::kWeights == Weights::kResident || (Config::kSlots % 2 == 0 && Config::kSlots > 2),
                  "slots of a consumer");
    if (me.turn++ % 2 == me.index) return true;
    if constexpr (Config::kWeights != Weights::kResident) me.slots.advance();
    return false;
  }

  // Adds the second consumer's sums to the first's, each warp to the warp of the same index. Every thread
  // arrives at the barriers for its own accesses. Returns true for the consumer that then has all sums.
  static __device__ __forceinline__ bool join(Consumer& me, Sums& sums) {
    static_assert(Config::kConsumers == 2, "one gives, one takes");
    const int thread = 32 * me.warp + me.lane;
    float* parts = reinterpret_cast<float*>(dynamic_shared<unsigned char>() + Shared::kPartStart) + thread;
    const unsigned given = me.shared.given(me.warp), taken = me.shared.taken(me.warp);
    constexpr int kCount = Config::kSlabs * Accumulators::kSums;
    if (me.index == 1) {
      ptx::barrier_wait(taken, me.join_parity ^ 1);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        parts[128 * i] = sums[i / Accumulators::kSums][i % Accumulators::kSums];
      ptx::barrier_arrive(given);
    } else {
      ptx::barrier_wait(given, me.join_parity);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        sums[i / Accumulators::kSums][i % Accumulators::kSums] += parts[128 * i];
      ptx::barrier_arrive(taken);
    }
    me.join_parity ^= 1;
    return me.index == 0;
  }
};

}  // namespace tconv3d
