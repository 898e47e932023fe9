// How the halo kernel's consumers store rows of outputs that begin anywhere: by the copy engine.
//
// A row of outputs that is no multiple of 16 bytes has no vectors that a warp could store, and stores of
// single outputs tear sectors at both of their ends. But whole rows of a plane follow each other in memory:
// they are a run. So where a consumer has a line of positions, it writes its sums of all rows of a plane, of
// every channel, to a buffer in shared memory as they will lie in memory: an image, placed so that its
// address and the tensor's agree modulo 16 bytes. The copy engine takes the whole vectors of each image,
// lanes store the few outputs that are left at its ends.
#pragma once

#include "halo_stores.cuh"

namespace tconv3d {

template <class Config>
struct HaloImages {
  using Layout = HaloLayout<Config>;
  using Shared = HaloShared<Config>;
  using Stores = HaloStores<Config>;
  using Scalar = typename Config::Scalar;
  using Place = typename HaloTile<Config>::Place;
  using Slab = typename HaloTile<Config>::Slab;
  using Writer = typename Stores::Writer;
  using Target = typename Stores::Target;
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;

  static constexpr int kItem = sizeof(Scalar);
  static constexpr int kVector = 16 / kItem;
  static constexpr int kPhases = Config::kStrideW;  // of a position, neighbours in memory
  // Two phases of every second pair of channels are written in the other order: else stores of even words
  // would meet in half of the banks.
  static constexpr bool kTurned = kPhases == 2 && kItem == 4;

  // What a consumer has of a plane: where its first row begins, and how many outputs of a row each slab has.
  struct Rows {
    Target to;
    int items[Config::kSlabs];
  };

  // The first column of a phase of a row: `field` is the row's first phase.
  static __device__ constexpr int column_of(int field, int phase) {
    for (int i = 0; i < Config::kFields; ++i) {
      const bool same = Config::kField(i, 0) == Config::kField(field, 0) &&
                        Config::kField(i, 1) == Config::kField(field, 1);
      if (same && Config::kField(i, 2) == phase) return i * Config::kOutTile;
    }
    return -1;
  }

  static __device__ __forceinline__ void store(const Args& args, const Place& at, Writer& me,
                                               const Sums& sums, const Slab (&slabs)[Config::kSlabs],
                                               int plane) {
    Rows rows;
    rows.to = Stores::target(args, at, slabs[0], plane, 0);
    if (!rows.to.exists) return;
#pragma unroll
    for (int m = 0; m < Config::kSlabs; ++m) rows.items[m] = args.output.w - slabs[m].first * kPhases;
    static_for<Config::kGroupsPerTile>([&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      static_for<Config::kFields>([&](auto field) {
        constexpr int kField = decltype(field)::value;
        constexpr bool kFirst = Config::kField(kField, 1) == 0 && Config::kField(kField, 2) == 0;
        if constexpr (kFirst && Accumulators::complete(kField)) {
          if (Stores::deep(args, at, rows.to.d + Config::kField(kField, 0))) {
            store_rows<kGroup, kField>(args, at, me, sums, rows);
          }
        }
      });
    });
  }

  // Before the block ends.
  static __device__ __forceinline__ void finish(int lane) {
    if (lane == 0) ptx::bulk_wait_read<0>();
  }

  // The rows of a plane, of all channels: kField is the first phase of the first row.
  template <int kGroup, int kField>
  static __device__ __forceinline__ void store_rows(const Args& args, const Place& at, Writer& me,
                                                    const Sums& sums, const Rows& rows) {
    unsigned char* buffer = me.buffers + me.buffer * Shared::kBufferBytes;
    Scalar* run = static_cast<Scalar*>(args.y) + Stores::field_start(args, kGroup, kField) + rows.to.start;
    const int left = args.output.h - rows.to.h, count = left < Config::kImageRows ? left : Config::kImageRows;
    if (me.lane == 0) ptx::bulk_wait_read<Config::kBuffers - 1>();  // what was in it last
    ptx::warpgroup_sync(1 + me.consumer);
    static_for<Config::kImageRows * Config::kSlabs>([&](auto i) {
      constexpr int kRow = decltype(i)::value / Config::kSlabs, kSlab = decltype(i)::value % Config::kSlabs;
      if (kRow < count)
        write<kGroup, row_further(kField, kRow), kSlab, kRow>(args, me, sums, rows, buffer, run);
    });
    ptx::fence_async_proxy();
    ptx::warpgroup_sync(1 + me.consumer);
    copy(args, at, me, run, buffer, count * args.output.w * kItem);
    me.buffer = me.buffer == Config::kBuffers - 1 ? 0 : me.buffer + 1;
  }
  // The first phase of the row so many further on in the same plane.
  static __device__ constexpr int row_further(int field, int rows) {
    for (int i = 0; i < Config::kFields; ++i) {
      if (Config::kField(i, 0) == Config::kField(field, 0) && Config::kField(i, 2) == 0 &&
          Config::kField(i, 1) == Config::kField(field, 1) + rows)
        return i;
    }
    return -1;
  }

  // How far from a multiple of 16 bytes the run begins in a channel.
  static __device__ __forceinline__ int begin(const Args& args, const Scalar* run, int channel) {
    const auto address = static_cast<unsigned>(reinterpret_cast<unsigned long long>(run));
    return static_cast<int>((address + channel * static_cast<unsigned>(args.y_stride.c) * kItem) % 16);
  }

  // A lane's sums of one row and slab.
  template <int kGroup, int kField, int kSlab, int kRow>
  static __device__ __forceinline__ void write(const Args& args, const Writer& me, const Sums& sums,
                                               const Rows& rows, unsigned char* buffer, const Scalar* run) {
    constexpr int kFirst = kGroup * Layout::kGroupColumns / 2;
    const bool turned = kTurned && me.lane % 2 != 0;
    const int first = (16 * me.warp + me.lane / 4) * kPhases;  // of the slab's outputs
    const int left = rows.items[kSlab] - first, turn = turned ? 1 : 0;
    buffer += (kRow * args.output.w + kSlab * 64 * kPhases + first + turn) * kItem +
              Accumulators::first_column(me.lane) * Shared::kImagePitch;
#pragma unroll
    for (int i = 0; i < Config::kOutTile / 4; ++i) {
      const int j = i / 2, e = i % 2, channel = 8 * j + Accumulators::first_column(me.lane) + e;
      auto* image =
          reinterpret_cast<Scalar*>(buffer + (8 * j + e) * Shared::kImagePitch + begin(args, run, channel));
      Scalar* other = image + (turned ? -1 : 1);  // of two phases the second
      static_for<2 * kPhases>([&](auto output) {
        constexpr int kHalf = decltype(output)::value / kPhases, kPhase = decltype(output)::value % kPhases;
        constexpr int kOwn = column_of(kField, kPhase), kOther = column_of(kField, kTurned ? 1 - kPhase : 0);
        const int sum = kFirst + 4 * j + 2 * kHalf + e, place = 8 * kHalf * kPhases;
        const float value = turned ? sums[kSlab][sum + kOther / 2] : sums[kSlab][sum + kOwn / 2];
        if (place + (turned ? 1 - kPhase : kPhase) < left) {
          (kTurned && kPhase ? other : image + (kTurned ? 0 : kPhase))[place] = Narrow<Scalar>::from(value);
        }
      });
    }
  }

  // From the buffer to memory.
  static __device__ __forceinline__ void copy(const Args& args, const Place& at, const Writer& me,
                                              Scalar* run, const unsigned char* images, int bytes) {
    const int out = Config::kOut % Config::kOutTile == 0 ? Config::kOutTile : Config::kOut - at.first_out();
    const int channels = out < Config::kOutTile ? out : Config::kOutTile;
    if (me.lane == 0) {
      copy_vectors(args, me.warp, channels, run, ptx::shared_address(images), bytes);
      ptx::bulk_commit();
    }
    store_ends(args, 32 * me.warp + me.lane, channels, run, images, bytes);
  }

  // The same place of the run in a channel.
  static __device__ __forceinline__ unsigned char* in_channel(const Args& args, Scalar* run, int channel) {
    return reinterpret_cast<unsigned char*>(Stores::further(args, run, channel));
  }

  static __device__ __forceinline__ void copy_vectors(const Args& args, int warp, int channels, Scalar* run,
                                                      unsigned images, int bytes) {
#pragma unroll
    for (int i = 0; i < Config::kOutTile; i += 4) {
      const int channel = i + warp, start = begin(args, run, channel);
      const int first = start == 0 ? 0 : 16, end = (start + bytes) / 16 * 16;
      if (channel < channels && first < end) {
        ptx::bulk_store(in_channel(args, run, channel) - start + first,
                        images + channel * Shared::kImagePitch + first, end - first);
      }
    }
  }

  // The outputs that whole vectors leave.
  static __device__ __forceinline__ void store_ends(const Args& args, int thread, int channels, Scalar* run,
                                                    const unsigned char* images, int bytes) {
#pragma unroll
    for (int i = 0; i < Config::kOutTile * 2 * kVector; i += 128) {
      const int channel = (i + thread) / (2 * kVector), place = thread % (2 * kVector);
      const int start = begin(args, run, channel), first = start == 0 ? 0 : 16, end = start + bytes;
      const bool head = place < kVector;
      const int byte = head ? place * kItem : end / 16 * 16 + (place - kVector) * kItem;
      const bool left = head ? byte >= start && byte < first : byte >= first;
      if (channel < channels && left && byte < end) {
        *reinterpret_cast<Scalar*>(in_channel(args, run, channel) - start + byte) =
            *reinterpret_cast<const Scalar*>(images + channel * Shared::kImagePitch + byte);
      }
    }
  }
};

}  // namespace tconv3d
