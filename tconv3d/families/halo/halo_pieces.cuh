// Pieces of tiles (kSpread): the sums of some chunks of a tile, which a block of the halo kernel leaves as
// its lanes have them, slab by slab, and which another launch adds up and stores (halo_add.cuh).
#pragma once

#include "halo_sums.cuh"

namespace tconv3d {

template <class Config>
struct HaloPieces {
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;
  using Four = Vector<float, 4>;
  static constexpr int kFours = Accumulators::kSums / 4;  // of a lane, of a slab
  static_assert(Accumulators::kSums % 4 == 0, "whole vectors");

  // Where the sums of a thread of a consumer begin: those of neighbouring threads are neighbours.
  static __device__ __forceinline__ Four* place(const Args& args, int slab, int thread) {
    return static_cast<Four*>(args.left) + static_cast<long long>(slab) * (kFours * 128) + thread;
  }

  // `slab`: the first of the consumer's, among those of all pieces.
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

  // Adds a slab to the sums of one, or makes them its own.
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
