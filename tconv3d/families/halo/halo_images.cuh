// How the halo kernel's consumers store rows of outputs that begin at any address (Output::kImages).
//
// A row of outputs whose length is no multiple of 16 bytes has no aligned vectors that a warp could store
// directly from its registers, and stores of single outputs are many and write partial sectors. Each
// consumer has a line of positions, or a part of one. It first writes its sums of all rows of an output
// plane, for every channel, to images in shared memory. An image is a copy of a row. The row's first aligned
// vector in global memory lies 16 bytes after the beginning of its image, so that vectors of the image are
// aligned as well. Two neighbouring phases are written together at a multiple of their joint size, so an
// image may lie one output further on: it is moved. The warps read vectors out of the images, move them back
// by one output where needed, and store them; single lanes store the few outputs at the two ends of a row.
//
// There are two buffers of images: while a warp reads one, others fill the next, and one barrier of the
// consumer for each plane keeps them apart.
#pragma once

#include "halo_stores.cuh"

namespace tconv3d {

template <class Config>
struct HaloImages {
  using Shared = HaloShared<Config>;
  using Stores = HaloStores<Config>;
  using Scalar = typename Config::Scalar;
  using Place = typename HaloTile<Config>::Place;
  using Slab = typename HaloTile<Config>::Slab;
  using Writer = typename Stores::Writer;
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;

  static constexpr int kItem = sizeof(Scalar);
  static constexpr int kVector = 16 / kItem;
  static constexpr int kPhases = Config::kStrideW;  // phases along w of a position, neighbours in memory
  // Phases that are written by one store to shared memory.
  static constexpr int kTogether = kPhases % 2 == 0 ? 2 : 1;
  static constexpr int kRows = Config::kImageRows;
  static constexpr int kPiece = Config::kSlabs * 64 * kPhases;  // outputs of a row that a consumer has

  // A load of a warp covers one image, or two if images have fewer than 32 vectors.
  static constexpr int kVectors = kPiece / kVector;       // vectors of 16 bytes in an image
  static constexpr int kLanes = kVectors < 32 ? 16 : 32;  // lanes that read one image
  static constexpr int kAtOnce = 32 / kLanes;             // images that a warp reads by one load
  static constexpr int kTurns = (kVectors + kLanes - 1) / kLanes;
  // Blocks of 4 * kAtOnce channels: the four warps read one block by one load each.
  static constexpr int kChannelBlocks = Config::kOutTile / (4 * kAtOnce);
  static constexpr int kLoads = kRows * kChannelBlocks * kTurns;
  static constexpr int kBatch = kTurns < 3 ? 4 : kTurns;  // loads in flight at once: whole images
  // The ends of an image are stored by kVector lanes, as many as a vector has outputs.
  static constexpr int kEnds = Config::kOutTile * kRows;
  static constexpr int kEndTurns = (kEnds * kVector + 127) / 128;

  // A consumer's part of a line of positions in a tile, with the addresses of the lane, computed once per
  // tile.
  struct Rows {
    bool exists;
    int d, h;               // coordinates of the first outputs
    int bytes;              // bytes of the consumer's part of a row
    unsigned before;        // negated low 32 bits of the address of the first row in the lane's first channel
    unsigned char* vector;  // address of the lane's part of the first row plus 15; rounded down to 16 bytes
                            // it is the lane's first vector
    int least;              // a vector is whole if `vector` is at least this many bytes past a multiple of 16
    unsigned char* end_start[kEndTurns];  // rows whose ends the lane stores
  };
  static __device__ __forceinline__ Rows rows(const Args& args, const Place& at, const Slab& first,
                                              const Writer& me) {
    const auto to = Stores::target(args, at, first, at.first_plane, 0);
    const int left = (args.tile.w - first.first) * kPhases, inside = args.output.w - to.w;
    const int some = left < kPiece ? left : kPiece;
    auto* start = reinterpret_cast<unsigned char*>(static_cast<Scalar*>(args.y) + to.start);
    Rows rows;
    rows.exists = to.exists && inside > 0;
    rows.d = to.d;
    rows.h = to.h;
    rows.bytes = (some < inside ? some : inside) * kItem;
    rows.before = 0u - low(start + Accumulators::first_column(me.lane) * channel_bytes(args));
    rows.vector =
        start + (me.warp * kAtOnce + me.lane / kLanes) * channel_bytes(args) + me.lane % kLanes * 16 + 15;
    rows.least = me.lane % kLanes * 16 + 31 - rows.bytes;
    ptx::pin(rows.before);
    ptx::pin(rows.vector);
#pragma unroll
    for (int i = 0; i < kEndTurns; ++i) {
      const int image = end_image(me, i), row = image / Config::kOutTile;
      rows.end_start[i] =
          start + (image - row * Config::kOutTile) * channel_bytes(args) + row * row_bytes(args);
      ptx::pin(rows.end_start[i]);
    }
    return rows;
  }

  // Stores the outputs of the plane of positions that is `plane` planes after the first.
  static __device__ __forceinline__ void store(const Args& args, const Place& at, Writer& me,
                                               const Sums& sums, const Rows& rows, int plane) {
    if (!rows.exists) return;
    const int d = rows.d + plane * Config::kStrideD;
    static_for<Config::kGroupsPerTile>([&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      static_for<Config::kFields>([&](auto field) {
        constexpr int kField = decltype(field)::value;
        constexpr bool kFirst = Config::kField(kField, 1) == 0 && Config::kField(kField, 2) == 0;
        if constexpr (kFirst && Accumulators::complete(kField)) {
          if (Stores::deep(args, at, d + Config::kField(kField, 0))) {
            const long long further =
                plane * (Config::kStrideD * args.y_stride.d) + Stores::field_start(args, kGroup, kField);
            store_plane<kGroup, kField>(args, at, me, sums, rows, further * kItem);
          }
        }
      });
    });
  }

 private:
  static __device__ __forceinline__ long long channel_bytes(const Args& args) {
    return args.y_stride.c * kItem;
  }
  static __device__ __forceinline__ long long row_bytes(const Args& args) { return args.y_stride.h * kItem; }
  static __device__ __forceinline__ unsigned low(const unsigned char* address) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(address));
  }

  // Stores the rows of a plane of outputs, for all channels, `further` bytes after the tile's first row.
  // kField is the first phase of the plane's first row.
  template <int kGroup, int kField>
  static __device__ __forceinline__ void store_plane(const Args& args, const Place& at, Writer& me,
                                                     const Sums& sums, const Rows& rows, long long further) {
    static_assert(Config::kImageBuffers == 2, "one is read, one written");
    static_assert(kVectors >= 16 && Config::kOutTile % (4 * kAtOnce) == 0, "lanes have a part of an image");
    unsigned char* images = me.buffers + me.buffer * Shared::kBufferBytes;
    me.buffer ^= 1;
    static_for<kRows>([&](auto row) {
      constexpr int kRow = decltype(row)::value;
      write<kGroup, row_further(kField, kRow), kRow>(args, me, sums, rows, images, further);
    });
    ptx::warpgroup_sync(1 + me.consumer);
    const int channels = Config::kOut % Config::kOutTile == 0 ? 0 : Config::kOut - at.first_out();
    store_vectors(args, me, rows, images, further, channels);
    store_ends(args, me, rows, images, further, channels);
  }
  // Returns the first phase of the row that is `rows` rows further on in the same plane.
  static __device__ constexpr int row_further(int field, int rows) {
    return field_of(Config::kField(field, 0), Config::kField(field, 1) + rows, 0);
  }
  static __device__ constexpr int field_of(int d, int h, int w) {
    for (int i = 0; i < Config::kFields; ++i) {
      if (Config::kField(i, 0) == d && Config::kField(i, 1) == h && Config::kField(i, 2) == w) return i;
    }
    return -1;
  }

  // Writes a lane's sums of one row to the images. kField is the row's first phase.
  template <int kGroup, int kField, int kRow>
  static __device__ __forceinline__ void write(const Args& args, const Writer& me, const Sums& sums,
                                               const Rows& rows, unsigned char* images, long long further) {
    constexpr int kFirst = kGroup * HaloLayout<Config>::kGroupColumns / 2;
    unsigned char* own = images + Accumulators::first_column(me.lane) * Shared::kImagePitch +
                         (16 * me.warp + me.lane / 4) * kPhases * kItem;
    static_for<Config::kOutTile / 4>([&](auto i) {
      // Channels from the lane's first one.
      constexpr int kNext = decltype(i)::value / 2 * 8 + decltype(i)::value % 2;
      constexpr int kSum = kFirst + decltype(i)::value / 2 * 4 + decltype(i)::value % 2;
      constexpr int kStart = kNext * Shared::kImagePitch + kRow * Shared::kRowPitch + 16;
      const unsigned before =
          rows.before - static_cast<unsigned>(further + kRow * row_bytes(args) + kNext * channel_bytes(args));
      unsigned char* image = own - (before & (16 - kTogether * kItem));
      static_for<Config::kSlabs * 2 * kPhases / kTogether>([&](auto o) {
        constexpr int kPhase = decltype(o)::value * kTogether % kPhases;
        constexpr int kHalf = decltype(o)::value * kTogether / kPhases % 2;
        constexpr int kSlab = decltype(o)::value * kTogether / kPhases / 2;
        constexpr int kPlace = (64 * kSlab + 8 * kHalf) * kPhases + kPhase;
        write_together<kField, kPhase>(image + (kStart + kPlace * kItem), &sums[kSlab][kSum + 2 * kHalf]);
      });
    });
  }
  template <int kField, int kPhase>
  static __device__ __forceinline__ void write_together(unsigned char* to, const float* sums) {
    constexpr int kOwn = field_of(Config::kField(kField, 0), Config::kField(kField, 1), kPhase);
    const float first = sums[kOwn * Config::kOutTile / 2];
    if constexpr (kTogether == 1) {
      *reinterpret_cast<Scalar*>(to) = Narrow<Scalar>::from(first);
    } else {
      constexpr int kNext = field_of(Config::kField(kField, 0), Config::kField(kField, 1), kPhase + 1);
      const float second = sums[kNext * Config::kOutTile / 2];
      if constexpr (kItem == 2) {
        *reinterpret_cast<unsigned*>(to) = Narrow<Scalar>::two(first, second);
      } else {
        *reinterpret_cast<Vector<float, 2>*>(to) = Vector<float, 2>{first, second};
      }
    }
  }

  // Returns a vector as it lies in the tensor, from a vector of an image. `after` is the word behind it in
  // the image, `start` the low bits of the row's address.
  static __device__ __forceinline__ uint4 moved_back(uint4 w, unsigned after, unsigned start) {
    const unsigned bits = 8 * (start & kItem);
    return make_uint4(ptx::shifted(w.x, w.y, bits), ptx::shifted(w.y, w.z, bits),
                      ptx::shifted(w.z, w.w, bits), ptx::shifted(w.w, after, bits));
  }
  static __device__ __forceinline__ void store_vectors(const Args& args, const Writer& me, const Rows& rows,
                                                       const unsigned char* images, long long further,
                                                       int channels) {
    const int first = me.warp * kAtOnce + me.lane / kLanes, place = me.lane % kLanes;
    const unsigned char* from = images + first * Shared::kImagePitch + place * 16 + 16;
#pragma unroll
    for (int done = 0; done < kLoads; done += kBatch) {
      uint4 vectors[kBatch];
#pragma unroll
      for (int i = done; i < done + kBatch && i < kLoads; ++i) {
        const int turn = i % kTurns, block = i / kTurns % kChannelBlocks, row = i / kTurns / kChannelBlocks;
        vectors[i - done] = *reinterpret_cast<const uint4*>(
            from + row * Shared::kRowPitch + turn * kLanes * 16 + block * 4 * kAtOnce * Shared::kImagePitch);
      }
#pragma unroll
      for (int i = done; i < done + kBatch && i < kLoads; ++i) {
        const int turn = i % kTurns, block = i / kTurns % kChannelBlocks, row = i / kTurns / kChannelBlocks;
        unsigned char* behind =
            rows.vector + (further + row * row_bytes(args) + block * 4 * kAtOnce * channel_bytes(args));
        const int beside = static_cast<int>(low(behind) % 16);
        const bool whole = beside >= rows.least + turn * kLanes * 16 && row < args.output.h - rows.h;
        const bool exists = whole && (channels == 0 || first + block * 4 * kAtOnce < channels);
        uint4 vector = vectors[i - done];
        if constexpr (kTogether == 2) {
          // Each lane needs the next lane's first word; the last lane needs the first lane's word of the next
          // turn.
          const bool wraps = turn + 1 < kTurns && place == 0;
          const unsigned word = wraps ? vectors[(i - done + 1) % kBatch].x : vector.x;
          const unsigned after = __shfl_sync(0xFFFFFFFFu, word, (me.lane + 1) % kLanes, kLanes);
          vector = moved_back(vector, after, low(behind) + 1);
        }
        ptx::store_global_if(exists, behind - beside + turn * kLanes * 16, vector);
      }
    }
  }

  // Single lanes store the outputs before the first and after the last whole vector of a row, mostly no more
  // than one vector has.
  static __device__ __forceinline__ int end_image(const Writer& me, int turn) {
    return (turn * 128 + 32 * me.warp + me.lane) / kVector;
  }
  static __device__ __forceinline__ void store_ends(const Args& args, const Writer& me, const Rows& rows,
                                                    const unsigned char* images, long long further,
                                                    int channels) {
#pragma unroll
    for (int i = 0; i < kEndTurns; ++i) {
      const int image = end_image(me, i), row = image / Config::kOutTile;
      const int channel = image - row * Config::kOutTile;
      unsigned char* start = rows.end_start[i] + further;
      const int before = static_cast<int>(0u - low(start)) & 15;  // bytes before the first vector
      const int head = before < rows.bytes ? before : rows.bytes;
      const int ends = head + ((rows.bytes - head) & 15);
      const int moved = kTogether == 2 ? before & kItem : 0;
      const unsigned char* from =
          images + channel * Shared::kImagePitch + row * Shared::kRowPitch + 16 + moved - before;
      const bool exists = row < kRows && row < args.output.h - rows.h;
      if (!exists || (channels != 0 && channel >= channels)) continue;
#pragma unroll 1
      for (int byte = me.lane % kVector * kItem; byte < ends; byte += 16) {
        const int place = byte < head ? byte : byte + rows.bytes - ends;
        store_vector(reinterpret_cast<Scalar*>(start + place),
                     load_vector<1>(reinterpret_cast<const Scalar*>(from + place)));
      }
    }
  }
};

}  // namespace tconv3d
