// Adds up the pieces of tiles that blocks of the halo kernel divided among them (Division::kLastTiles), in
// the order of their chunks, and stores the outputs as the halo kernel would have.
//
// The grid has one block for every share but the last (blockIdx.x) and every slab (blockIdx.y). A block takes
// the tile that its share begins and does not end.
#pragma once

#include "halo_epilogue.cuh"
#include "halo_pieces.cuh"

namespace tconv3d {

template <class Config>
struct HaloAdding {
  using Layout = HaloLayout<Config>;
  using Tile = HaloTile<Config>;
  using Pieces = HaloPieces<Config>;
  using Accumulators = HaloSums<Config>;
  using Stores = HaloStores<Config>;
  using Shared = HaloShared<Config>;

  static __device__ __forceinline__ void add(const Args& args) {
    const int thread = static_cast<int>(threadIdx.x), share = static_cast<int>(blockIdx.x);
    const int slab = static_cast<int>(blockIdx.y), slabs = static_cast<int>(gridDim.y);
    const int end = Tile::share_start(args, share + 1), tile = end / Layout::kChunks;
    const int first = tile * Layout::kChunks, last = first + Layout::kChunks;
    ptx::wait_for_previous_launch();
    // A block returns if its share ends at the end of a tile, or if an earlier share began the tile.
    if (end == first || Tile::share_start(args, share) > first) return;

    typename Accumulators::Sums sums;
    Pieces::template take<false>(args, (2 * share + 1) * slabs + slab, thread, sums);
    for (int other = share + 1, start = end; other < args.shares && start < last; ++other) {
      const int next = Tile::share_start(args, other + 1);
      if (next > start) Pieces::template take<true>(args, 2 * other * slabs + slab, thread, sums);
      start = next;
    }
    const typename Tile::Work work{first, first, last};
    const auto at = work.place(args);
    const typename Tile::Slab own[1] = {Tile::slab(args, slab)};
    typename Stores::Writer me;
    me.warp = thread / 32;
    me.lane = thread % 32;
    me.scratch = dynamic_shared<float>() + me.warp * Shared::kScratch;
    HaloEpilogue<Config>::apply(args, at, own, 0, me.warp, me.lane, sums);
    Stores::store_outputs(args, at, me, sums, own, 0);
  }
};

}  // namespace tconv3d
