// The halo kernel's weights: one producer thread copies panels to shared memory, either all of them once, or
// one after the other through a ring of slots.
//
// The previous launch packs the panels, and this kernel needs nothing else from it: halos are loaded without
// waiting for it. Every block has a thread here that waits, so that this launch ends after the previous one.
#pragma once

#include "halo_shared.cuh"
#include "halo_tile.cuh"

namespace tconv3d {

template <class Config>
struct HaloPanels {
  using Layout = HaloLayout<Config>;
  using Shared = HaloShared<Config>;
  using Tile = HaloTile<Config>;

  static __device__ __forceinline__ const unsigned char* packed(const Args& args, int column_tile) {
    return static_cast<const unsigned char*>(args.packed) + Layout::tile_start(column_tile);
  }

  // Loads all panels of the column tile, which is the same for all tiles of this block.
  static __device__ __forceinline__ void load_all(const Args& args, const Shared& shared) {
    constexpr int kCopy = 32 * 1024;
    const unsigned char* from = packed(args, static_cast<int>(blockIdx.x) % Layout::kColumnTiles);
    ptx::wait_for_previous_launch();
    ptx::barrier_arrive_expect(shared.panels_full(), Layout::kTileBytes);
    for (int done = 0; done < Layout::kTileBytes; done += kCopy) {
      const int bytes = Layout::kTileBytes - done < kCopy ? Layout::kTileBytes - done : kCopy;
      ptx::bulk_copy(shared.panels() + done, from + done, bytes, shared.panels_full());
    }
  }

  // Returns the size in bytes of all panels of a chunk in a variant.
  static __device__ __forceinline__ unsigned own_bytes(int variant, int source) {
    unsigned bytes = 0;
    for (int p = 0; p < Config::kPatterns; ++p) {
      bytes += Layout::own_shifts(variant, source, p) * Layout::panel_bytes(p);
    }
    return bytes;
  }

  static __device__ __forceinline__ void stream(const Args& args, const Shared& shared) {
    ptx::wait_for_previous_launch();
    Ring<Config::kSlots> ring;
    for (auto work = Tile::Work::of_block(args); work.left(args); work.advance(args)) {
      const auto at = work.place(args);
      const int rounds = Tile::fed_planes(args, at) * args.passes;
      for (int round = 0; round < rounds; ++round) {
        const unsigned char* from = packed(args, at.column_tile);
        for (int source = 0; source < Config::kSources; ++source) {
          const unsigned chunk_bytes = own_bytes(at.variant(), source);
          from += at.first_chunk() * chunk_bytes;
          for (int chunk = at.first_chunk(); chunk < at.end_chunk(); ++chunk) {
            for (int p = 0; p < Config::kPatterns; ++p) {
              const unsigned bytes = Layout::panel_bytes(p);
              int shifts = Layout::own_shifts(at.variant(), source, p);
              [[maybe_unused]] int after = 0;
              if constexpr (Config::kDivision == Division::kLastTiles) {
                const auto own = Tile::Shifts::of(args, at.d, at.depths, at.variant(), source, p);
                const int before = own.first - Layout::first_shift(source, p), count = own.end - own.first;
                from += before * bytes;
                after = shifts - before - count;
                shifts = count;
              }
              for (int s = 0; s < shifts; ++s, ring.advance(), from += bytes) {
                ptx::barrier_wait(shared.slot_empty(ring.index), ring.parity ^ 1);
                ptx::barrier_arrive_expect(shared.slot_full(ring.index), bytes);
                ptx::bulk_copy(shared.slot(ring.index), from, bytes, shared.slot_full(ring.index));
              }
              if constexpr (Config::kDivision == Division::kLastTiles) from += after * bytes;
            }
          }
          from += (Layout::kChunks - at.end_chunk()) * chunk_bytes;
        }
      }
    }
  }
};

}  // namespace tconv3d
