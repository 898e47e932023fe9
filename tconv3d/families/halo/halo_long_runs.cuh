// How rows of outputs that begin at any address leave a block as few long runs (Output::kLongRuns). Such
// builds take input lines as they lie in memory (halo_lines.cuh), so that their producers have few loads to
// issue.
//
// A tile has whole lines, so that all rows of a channel in a plane of outputs are one run of memory,
// whichever consumer computes which part of it. Consumers write their sums to an image of the run in shared
// memory, which begins as many bytes past a multiple of 16 as the run does in global memory. The copy engine
// stores the whole 16-byte vectors of the image; lanes of the producers store the outputs at its two ends.
// The ends of runs are the most expensive for memory, because they write partial sectors: a run has two ends,
// whereas rows and parts of rows stored one by one would have eight.
//
// A buffer has the images of all channels of a plane. While producers empty one buffer, consumers fill
// another.
#pragma once

#include "halo_consumer.cuh"
#include "halo_words.cuh"

namespace tconv3d {

template <class Config>
struct HaloLongRuns {
  using Scalar = typename Config::Scalar;
  using Shared = HaloShared<Config>;
  using Stores = HaloStores<Config>;
  using Words = HaloWords<Config>;
  using Consumer = HaloConsumer<Config>;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;
  using Sums = typename HaloSums<Config>::Sums;

  static constexpr int kItem = sizeof(Scalar), kItems = 16 / kItem;
  static constexpr int kPitch = Config::kLongRunPitch;  // bytes from image to image
  static constexpr int kWarps = Shared::kLongRunWarps;
  static constexpr int kEnds = 2 * kItems;  // lanes that store the ends of one run

  // Returns the address of the run of the tile's first channel in output plane 0.
  static __device__ __forceinline__ unsigned char* first_run(const Args& args, const Place& at) {
    const int channel = at.first_group() * Config::kOut + at.first_out();
    return reinterpret_cast<unsigned char*>(static_cast<Scalar*>(args.y) + at.n * args.y_stride.n +
                                            channel * args.y_stride.c +
                                            Stores::offset(args, 0, at.h * Config::kStrideH, 0));
  }
  static __device__ __forceinline__ unsigned low(const unsigned char* address) {
    return static_cast<unsigned>(reinterpret_cast<unsigned long long>(address));
  }

  // ---- Consumers write images.

  static constexpr int kPlanes = Config::kStrideD;  // planes of outputs that are complete after a step
  static constexpr int kVectors = Config::kOutput == Output::kLongRuns
                                      ? Words::kPieces * Words::kVectors
                                      : 1;  // 16-byte vectors of a lane in a plane

  // With 16-bit outputs and odd lengths of rows and channels, rows and channels begin alternately at a 4-byte
  // word and in the middle of one, so that the first one decides for all.
  static constexpr bool kTwoKinds = kItem == 2 && Config::kStrideH % 2 == 0;
  static constexpr int kAnywhere = -1;

  // Outputs that are complete but not written yet. With 16-bit outputs they are written while the products of
  // the next step are in flight, if they fit into registers together with the sums: at most 160 registers.
  static constexpr int kKept = Config::kSlabs * HaloSums<Config>::kSums + kPlanes * kVectors * 4;
  static constexpr bool kLater = Config::kOutput == Output::kLongRuns && kItem == 2 && kKept <= 160;
  struct Waiting {
    uint4 words[kPlanes][kVectors];
    unsigned run[kPlanes];  // low address bits of the run of the first channel
    bool exists[kPlanes] = {};
  };
  static __device__ __forceinline__ void take(const Args& args, const Place& at, const Sums& sums, int plane,
                                              Waiting& waiting) {
    static_assert(Config::kStrideW == 2 && Config::kSlabs % Words::kWoven == 0, "16 bytes of a lane");
    const int d = plane * Config::kStrideD - Config::kPaddingD;
    const unsigned start = low(first_run(args, at));
    static_for<kPlanes>([&](auto phase) {
      constexpr int kPhase = decltype(phase)::value;
      waiting.exists[kPhase] = Stores::deep(args, at, d + kPhase);
      waiting.run[kPhase] = start + static_cast<unsigned>((d + kPhase) * args.y_stride.d) * kItem;
      static_for<kVectors>([&](auto i) {
        constexpr int kPiece = decltype(i)::value / Words::kVectors;
        uint4& words = waiting.words[kPhase][i];
        words = Words::template words<kPhase, decltype(i)::value % Words::kVectors, kPiece>(sums);
        if constexpr (kLater) {  // The outputs are rounded here, not when they are written.
          ptx::pin(words.x);
          ptx::pin(words.y);
          ptx::pin(words.z);
          ptx::pin(words.w);
        }
      });
    });
  }

  // Writes a plane of outputs to its images. `pairs` are the pairs of positions of the slabs
  // (halo_lines.cuh).
  template <int kPhase, class Pairs>
  static __device__ __forceinline__ void write(const Args& args, Consumer& me, const Pairs& pairs,
                                               const Waiting& waiting) {
    if (!waiting.exists[kPhase]) return;
    ptx::barrier_wait(me.shared.image_empty(me.images.index), me.images.parity ^ 1);
    const unsigned image = ptx::shared_address(me.shared.image(me.images.index));
    const auto write_rows = [&](auto odd) {
      static_for<Words::kPieces * Config::kImageRows>([&](auto i) {
        constexpr int kPiece = decltype(i)::value / Config::kImageRows;
        constexpr int kRow = decltype(i)::value % Config::kImageRows;
        const auto& pair = pairs[kPiece * Words::kWoven];
        if (pair.exists)
          write_row<kPhase, kRow, kPiece, decltype(odd)::value>(args, me, waiting, pair, image);
      });
    };
    if (kTwoKinds && args.output.w % 2 != 0 && args.y_stride.c % 2 != 0) {
      if (waiting.run[kPhase] % 4 != 0) {
        write_rows(Int<1>{});
      } else {
        write_rows(Int<0>{});
      }
    } else {
      write_rows(Int<kAnywhere>{});
    }
    ptx::fence_async_proxy();
    ptx::barrier_arrive(me.shared.image_full(me.images.index));
    me.images.advance();
  }
  template <class Pairs>
  static __device__ __forceinline__ void write_all(const Args& args, Consumer& me, const Pairs& pairs,
                                                   Waiting& waiting) {
    static_for<kPlanes>([&](auto phase) {
      write<decltype(phase)::value>(args, me, pairs, waiting);
      waiting.exists[phase] = false;
    });
  }
  // Writes the planes that are due after turn kTurn of the kTurns turns of a step's products.
  template <int kTurn, int kTurns, class Pairs>
  static __device__ __forceinline__ void write_between(const Args& args, Consumer& me, const Pairs& pairs,
                                                       Waiting& waiting) {
    static_for<kPlanes>([&](auto phase) {
      constexpr int kPhase = decltype(phase)::value;
      if constexpr ((kPhase + 1) * kTurns / (kPlanes + 1) == kTurn) write<kPhase>(args, me, pairs, waiting);
    });
  }

  // ---- Producer warps store images: each warp has some channels.

  static __device__ __forceinline__ void store(const Args& args, const Shared& shared, int warp, int lane) {
    Ring<Config::kLongRunBuffers> images;
    for (auto work = Tile::Work::of_block(args); work.left(args); work.advance(args)) {
      const Place at = work.place(args);
      unsigned char* const y = first_run(args, at);
      const int below = args.output.h - at.h * Config::kStrideH, own = args.tile.h * Config::kStrideH;
      const int bytes = (own < below ? own : below) * args.output.w * kItem;
      const int left = Config::kOut - at.first_out();
      const int channels = left < Config::kOutTile ? left : Config::kOutTile;
      for (int plane = 0; plane < at.planes; ++plane) {
        const int d = (at.first_plane + plane) * Config::kStrideD - Config::kPaddingD;
        Words::for_each_plane(args, at, d, [&](auto phase) {
          unsigned char* const run = y + (d + phase) * args.y_stride.d * kItem;
          ptx::barrier_wait(shared.image_full(images.index), images.parity);
          const unsigned char* image = shared.image(images.index);
          static_assert(Config::kOutTile <= 32 * kWarps, "a run for each lane");
          const int channel = warp + kWarps * lane;
          if (channel < channels) {
            copy_vectors(run + channel * args.y_stride.c * kItem, image + channel * kPitch, bytes);
          }
          ptx::bulk_commit();
          for (int first = warp; first < channels; first += 32 / kEnds * kWarps) {
            const int ended = first + kWarps * (lane / kEnds);
            if (ended < channels) {
              store_end(run + ended * args.y_stride.c * kItem, image + ended * kPitch, bytes, lane % kEnds);
            }
          }
          ptx::bulk_wait_read();
          ptx::barrier_arrive(shared.image_empty(images.index));
          images.advance();
        });
      }
    }
  }

 private:
  // Writes a lane's outputs of a row, for all its channels. kOdd is 1 if the run begins in the middle of a
  // 4-byte word and 0 if not; rows and channels then alternate. kAnywhere leaves the alignment to run time.
  template <int kPhase, int kRow, int kPiece, int kOdd, class Pair>
  static __device__ __forceinline__ void write_row(const Args& args, const Consumer& me,
                                                   const Waiting& waiting, const Pair& pair, unsigned image) {
    const int own = HaloLayout<Config>::channel_of(0, 0, me.lane);
    const int place = (pair.h * Config::kStrideH + kRow) * args.output.w + 2 * pair.w;
    // Whether no output of the vector lies past the end of the row.
    const bool whole = args.output.w - 2 * pair.w >= kItems;
    const unsigned channel_bytes = static_cast<unsigned>(args.y_stride.c) * kItem;
    const unsigned run = waiting.run[kPhase] + own * channel_bytes;
    image += own * kPitch + place * kItem;
    static_for<Words::kChannels>([&](auto i) {
      // If channels have odd volumes, the lanes of a warp write to different banks.
      constexpr int kChannel = decltype(i)::value;
      constexpr int kOut = kChannel / 2 * 8 + kChannel % 2 * (kItem == 4 ? 4 : 1);
      constexpr int kOwn = kOdd == kAnywhere ? kAnywhere : (kOdd + kRow + kOut) % 2;
      write_outputs<kOwn>(
          image + kOut * kPitch + (run + kOut * channel_bytes) % 16,
          waiting.words[kPhase][kPiece * Words::kVectors + kRow * Words::kChannels + kChannel], whole);
    });
  }
  // Writes the outputs of a vector to shared memory, at any multiple of an output's size, without branches.
  template <int kOdd>
  static __device__ __forceinline__ void write_outputs(unsigned to, const uint4& vector, bool whole) {
    if constexpr (kItem == 4) {
      ptx::store_shared_if(true, to, vector.x);
      ptx::store_shared_if(true, to + 4, vector.y);
      ptx::store_shared_if(true, to + 8, vector.z);
      ptx::store_shared_if(whole, to + 12, vector.w);
    } else if constexpr (kOdd == 0) {
      ptx::store_shared_if(true, to, vector.x);
      ptx::store_shared_if(true, to + 4, vector.y);
      ptx::store_shared_if(true, to + 8, vector.z);
      ptx::store_shared_if(whole, to + 12, vector.w);
      ptx::store_shared_if(!whole, to + 12, static_cast<unsigned short>(vector.w));
    } else if constexpr (kOdd == 1) {
      ptx::store_shared_if(true, to, static_cast<unsigned short>(vector.x));
      ptx::store_shared_if(true, to + 2, ptx::shifted(vector.x, vector.y, 16));
      ptx::store_shared_if(true, to + 6, ptx::shifted(vector.y, vector.z, 16));
      ptx::store_shared_if(true, to + 10, ptx::shifted(vector.z, vector.w, 16));
      ptx::store_shared_if(whole, to + 14, static_cast<unsigned short>(vector.w >> 16));
    } else {
      const bool odd = to % 4 != 0;
      const unsigned bits = odd ? 16 : 0, start = to + bits / 8;
      ptx::store_shared_if(true, start, ptx::shifted(vector.x, vector.y, bits));
      ptx::store_shared_if(true, start + 4, ptx::shifted(vector.y, vector.z, bits));
      ptx::store_shared_if(true, start + 8, ptx::shifted(vector.z, vector.w, bits));
      ptx::store_shared_if(whole && !odd, to + 12, vector.w);
      ptx::store_shared_if(odd || !whole, odd ? to : to + 12,
                           static_cast<unsigned short>(odd ? vector.x : vector.w));
      ptx::store_shared_if(whole && odd, to + 14, static_cast<unsigned short>(vector.w >> 16));
    }
  }

  // Stores the whole 16-byte vectors of a run.
  static __device__ __forceinline__ void copy_vectors(unsigned char* run, const unsigned char* image,
                                                      int bytes) {
    const int before = static_cast<int>(low(run) % 16), first = (before + 15) / 16 * 16;
    const int last = (before + bytes) / 16 * 16;
    if (first < last) ptx::bulk_store(run - before + first, ptx::shared_address(image + first), last - first);
  }
  // Stores one of the outputs before the first or after the last whole vector of a run.
  static __device__ __forceinline__ void store_end(unsigned char* run, const unsigned char* image, int bytes,
                                                   int number) {
    const int before = static_cast<int>(low(run) % 16), end = before + bytes, last = end / 16 * 16;
    const bool head = number < kItems;
    const int place = (head ? 0 : last) + number % kItems * kItem;
    const bool own = head ? before > 0 : before == 0 || last > 0;
    if (own && place >= before && place < end) {
      store_vector(reinterpret_cast<Scalar*>(run - before + place),
                   load_vector<1>(reinterpret_cast<const Scalar*>(image + place)));
    }
  }
};

}  // namespace tconv3d
