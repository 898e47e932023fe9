// Pieces of tiles (Division::kLastTiles): the partial sums over some chunks of a tile. A block of the halo
// kernel stores them in the order of its lanes' accumulators, slab by slab, and another launch adds them up
// and stores the outputs (halo_add.cuh).
#pragma once

#include "halo_sums.cuh"

namespace tconv3d {

template <class Config>
struct HaloPieces {
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;
  using Four = Vector<float, 4>;
  static constexpr int kFours = Accumulators::kSums / 4;  // vectors of four sums that a lane has in a slab
  static_assert(Accumulators::kSums % 4 == 0, "whole vectors");

  // Returns where the sums of a consumer's thread begin; neighbouring threads have neighbouring vectors.
  static __device__ __forceinline__ Four* place(const Args& args, int slab, int thread) {
    return static_cast<Four*>(args.left) + static_cast<long long>(slab) * (kFours * 128) + thread;
  }

  // Stores the sums of a piece. `slab` is the consumer's first slab, counted over all pieces.
  static __device__ __forceinline__ void leave(const Args& args, int slab, int thread, const Sums& sums) {
#pragma unroll
    for (int m = 0; m < Config::kSlabs; ++m) {
      Four* const to = place(args, slab + m, thread);
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const float* from = &sums[m][4 * i];
        to[128 * i] = {from[0], from[1], from[2], from[3]};
      }
    }
  }

  // Adds a stored slab to the sums, or overwrites them with it (kAdds == false).
  template <bool kAdds>
  static __device__ __forceinline__ void take(const Args& args, int slab, int thread, Sums& sums) {
    static_assert(Config::kSlabs == 1, "one at a time");
    const Four* const from = place(args, slab, thread);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const Four four = from[128 * i];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& sum = sums[0][4 * i + e];
        sum = kAdds ? sum + four.at[e] : four.at[e];
      }
    }
  }
};

}  // namespace tconv3d
