// How the halo kernel's consumers store their sums: the addresses of the outputs of a position, and the ways
// to write them, along channels or, through scratch, along w.
#pragma once

#include "halo_shared.cuh"
#include "halo_sums.cuh"

namespace tconv3d {

template <class Config>
struct HaloStores {
  using Choices = HaloChoices<Config>;
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Written;
  using Tile = HaloTile<Config>;
  using Place = typename Tile::Place;
  using Slab = typename Tile::Slab;
  using Offset = typename Tile::Offset;
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;

  // The state of a warp that stores.
  struct Writer {
    int warp, lane;  // index of the warp in its warpgroup
    float* scratch;  // scratch of the warp
    int consumer;
    unsigned char* buffers;  // image buffers of the consumer
    int buffer = 0;          // image buffer that is filled next
  };

  // The outputs of one position of a slab: their coordinates, and the offset of phase 0.
  struct Target {
    bool exists;
    int n;  // index among the tile's batch items
    int d, h, w;
    long long start;  // offset of phase 0 in the tile's first channel, in elements
  };
  static __device__ __forceinline__ Target target(const Args& args, const Place& at, const Slab& slab,
                                                  int plane, int row_of_slab) {
    const int step = row_of_slab / 8 * args.group_rows + row_of_slab % 8;
    const int row = slab.row + step + at.start;
    const auto in = Tile::row_place(args, row);
    const int w = in.w, line = in.line, item = in.item;
    const int sheet = divide(line, args.halo_h), h = line - sheet * args.halo.h;
    const int n = Config::kMarch ? item + sheet : item;
    Target to;
    to.exists = slab.exists && slab.first + step < args.run && at.n + n < args.batch && w < args.tile.w &&
                h < args.tile.h && sheet < (Config::kMarch ? args.sheets : args.tile.d);
    to.n = n;
    to.d = Config::kMarch
               ? plane * Config::kStrideD - Config::kPaddingD
               : (Tile::first_sheet(args, at) + sheet) * Config::kStrideD + Config::kOffset(at.variant(), 0);
    to.h = (at.h + h) * Config::kStrideH + Config::kOffset(at.variant(), 1);
    to.w = (at.w + w) * Config::kStrideW + Config::kOffset(at.variant(), 2);
    const int channel = at.first_group() * Config::kOut + at.first_out();
    to.start = (at.n + n) * args.y_stride.n + channel * args.y_stride.c + offset(args, to.d, to.h, to.w);
    if constexpr (Config::kDivision == Division::kBlocks) to.start += at.portion * args.portion_pitch;
    return to;
  }

  static __device__ __forceinline__ Offset offset(const Args& args, int d, int h, int w) {
    return static_cast<Offset>(d) * static_cast<Offset>(args.y_stride.d) +
           static_cast<Offset>(h) * static_cast<Offset>(args.y_stride.h) +
           static_cast<Offset>(w) * static_cast<Offset>(args.y_stride.w);
  }
  // Returns the offset, in elements, of a field of one of the tile's groups from phase 0 of a position in the
  // tile's first channel.
  static __device__ __forceinline__ long long field_start(const Args& args, int group, int field) {
    return group * Config::kOut * args.y_stride.c +
           offset(args, Config::kField(field, 0), Config::kField(field, 1), Config::kField(field, 2));
  }

  // deep() and flat() return whether an output of a field exists and is this tile's to store: deep() along
  // depth, flat() along h and w.
  static __device__ __forceinline__ bool deep(const Args& args, const Place& at, int d) {
    return Config::kMarch ? d >= at.d && d < at.last_output : d < args.output.d;
  }
  static __device__ __forceinline__ bool flat(const Args& args, const Target& to, int field) {
    return to.exists && to.h + Config::kField(field, 1) < args.output.h &&
           to.w + Config::kField(field, 2) < args.output.w;
  }

  // Stores two neighbours in memory, by one access if the address is aligned.
  static __device__ __forceinline__ void store_pair(Scalar* address, float first, float second, bool both) {
    using Pair = Vector<Scalar, 2>;
    if (both && reinterpret_cast<unsigned long long>(address) % sizeof(Pair) == 0) {
      Pair pair;
      pair.at[0] = Narrow<Scalar>::from(first);
      pair.at[1] = Narrow<Scalar>::from(second);
      *reinterpret_cast<Pair*>(address) = pair;
    } else {
      *address = Narrow<Scalar>::from(first);
      if (both) address[1] = Narrow<Scalar>::from(second);
    }
  }

  // Stores kCount neighbouring channels of a lane, which has two of every 8 columns, if the condition holds.
  template <int kCount>
  static __device__ __forceinline__ void store_channels_if(bool condition, Scalar* y, const float* sums) {
    constexpr int kWords = kCount * static_cast<int>(sizeof(Scalar)) / 4;
    unsigned words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(Scalar) == 2) {
        words[i] = Narrow<Scalar>::two(sums[4 * i], sums[4 * i + 1]);
      } else {
        words[i] = ptx::float_to_bits(sums[i / 2 * 4 + i % 2]);
      }
    }
    if constexpr (kWords == 4) {
      ptx::store_global_if(condition, y, make_uint4(words[0], words[1], words[2], words[3]));
    } else if constexpr (kWords == 2) {
      ptx::store_global_if(condition, y, make_uint2(words[0], words[1]));
    } else {
      static_assert(kWords == 1, "an access of a power of two");
      ptx::store_global_if(condition, y, words[0]);
    }
  }

  // Stores one field of one position, whose phase 0 lies at `y`: a lane's channels, block by block.
  static __device__ __forceinline__ void store_field(const Args& args, const Place& at, const Target& to,
                                                     int lane, int group, int field, const float* sums,
                                                     Scalar* y) {
    // Bitwise & avoids the branches that the compiler makes of &&.
    const bool exists = to.exists & deep(args, at, to.d + Config::kField(field, 0)) &
                        (to.h + Config::kField(field, 1) < args.output.h) &
                        (to.w + Config::kField(field, 2) < args.output.w);
    y += field_start(args, group, field);
    static_for<Config::kOutTile / 8>([&](auto columns) {
      constexpr int kFirst = 8 * decltype(columns)::value, kOwn = Layout::block_channels(kFirst);
      if constexpr (Layout::block_start(kFirst) == kFirst) {
        const int out = at.first_out() + kFirst + lane % 4 * kOwn;
        const bool own = exists && (Config::kOut % Config::kOutTile == 0 || out < Config::kOut);
        Scalar* to_block = y + kFirst - lane % 4 * (Config::kLaneChannels - kOwn);
        if constexpr (Config::kAlignedPairs) {
          store_channels_if<kOwn>(own, to_block, sums + kFirst / 2);
        } else {
          const bool both = Config::kOut % 2 == 0 || out + 1 < Config::kOut;
          if (own) store_pair(to_block, sums[kFirst / 2], sums[kFirst / 2 + 1], both);
        }
      }
    });
  }

  // Stores outputs contiguous along channels: a lane stores its neighbouring channels directly.
  static __device__ __forceinline__ void store_by_channel(const Args& args, const Place& at, const Sums& sums,
                                                          const Slab (&slabs)[Config::kSlabs], int plane,
                                                          int warp, int lane) {
    static_for<Config::kSlabs>([&](auto m) {
      constexpr int kSlab = decltype(m)::value;
      static_for<2>([&](auto half) {
        constexpr int kHalf = decltype(half)::value;
        const Target to =
            target(args, at, slabs[kSlab], plane, 16 * warp + 8 * kHalf + Accumulators::row_of(lane));
        Scalar* y = static_cast<Scalar*>(args.y) + to.start + lane % 4 * Config::kLaneChannels;
        ptx::pin(y);  // Without this the compiler computes every address from args.y.
        static_for<Config::kGroupsPerTile>([&](auto group) {
          constexpr int kGroup = decltype(group)::value;
          constexpr int kFirst = kGroup * Layout::kGroupColumns / 2 + 2 * kHalf;
          static_for<Config::kFields>([&](auto field) {
            constexpr int kField = decltype(field)::value;
            if constexpr (Accumulators::complete(kField)) {
              store_field(args, at, to, lane, kGroup, kField,
                          &sums[kSlab][kFirst + kField * Config::kOutTile / 2], y);
            }
          });
        });
      });
    });
  }

  // Two phases along w of 16-bit outputs, where rows have an even length: a lane has both phases of a channel
  // in one 32-bit word, and 8 lanes have 8 neighbouring positions. They are stored directly: 32 bytes of a
  // channel, which is a sector.
  static constexpr bool kInPlace = Choices::kCopiesRows && !Config::kMarch && !Config::kOutputUnitC &&
                                   sizeof(Scalar) == 2 && Config::kPairs && Config::kStrideW == 2 &&
                                   Config::kPartner(0) >= 0;
  // A warp has two lines of positions. If these are near each other in memory (kExchanges), lanes exchange
  // half of their words, so that an access covers both lines of two channels instead of one line of four
  // channels: the time of an access grows with the number of cache lines it writes. kNear is the distance in
  // bytes up to which the exchange is faster, by measurement on an H200.
  static constexpr int kNear = 128;
  template <bool kExchanges>
  static __device__ __forceinline__ void store_in_place(const Args& args, const Place& at, const Writer& me,
                                                        const Sums& sums, const Slab (&slabs)[Config::kSlabs],
                                                        int plane) {
    constexpr bool kAll = Config::kOut % Config::kOutTile == 0;
    constexpr int kStoredLines = kExchanges ? 1 : 2;  // lines that a lane stores
    const int own = kExchanges ? me.lane % 4 / 2 * 4 : Accumulators::first_column(me.lane);
    const int left = Config::kOut - at.first_out() - own;
    static_for<kStoredLines * Config::kSlabs>([&](auto i) {
      constexpr int kSlab = decltype(i)::value / kStoredLines, kHalf = decltype(i)::value % kStoredLines;
      const int line = kExchanges ? me.lane % 2 : kHalf;
      const Target to = target(args, at, slabs[kSlab], plane, 16 * me.warp + 8 * line + me.lane / 4);
      static_for<Config::kFields>([&](auto field) {
        constexpr int kField = decltype(field)::value, kPartner = Config::kPartner(kField);
        if constexpr (kPartner >= 0) {
          const bool exists = deep(args, at, to.d + Config::kField(kField, 0)) && flat(args, to, kField);
          Scalar* y =
              static_cast<Scalar*>(args.y) + to.start + field_start(args, 0, kField) + own * args.y_stride.c;
          ptx::pin(y);  // Without this the compiler computes every address from args.y.
          const float* first = &sums[kSlab][kField * Config::kOutTile / 2 + 2 * kHalf];
          [[maybe_unused]] const float* second = &sums[kSlab][kPartner * Config::kOutTile / 2 + 2 * kHalf];
          const auto store = [&](int channel, unsigned word) {
            ptx::store_global_if(exists && (kAll || channel < left), further(args, y, channel), word);
          };
#pragma unroll
          for (int k = 0; k < Config::kOutTile / 4; ++k) {
            const int channel = k / 2 * 8 + k % 2, sum = k / 2 * 4 + k % 2;
            const unsigned word = Narrow<Scalar>::two(first[sum], second[sum]);
            if constexpr (kExchanges) {
              const unsigned below = Narrow<Scalar>::two(first[sum + 2], second[sum + 2]);
              const unsigned handed = __shfl_xor_sync(0xFFFFFFFFu, line == 0 ? below : word, 1);
              store(channel, line == 0 ? word : handed);
              store(channel + 2, line == 0 ? handed : below);  // the neighbouring lane's channel
            } else {
              store(channel, word);
            }
          }
        }
      });
    });
  }

  // Stores outputs contiguous along w through scratch, so that a store covers neighbours along w. The two
  // phases of a warp's 16 positions are 32 neighbours of 8 channels. If no field has a partner, two slabs are
  // stored together: 32 positions of 8 channels, neighbours if the slabs are woven, 8 rows of one after 8
  // rows of the other (build.py). One slab alone is 16 positions of 16 channels.
  template <int kVector>
  static __device__ __forceinline__ void store_by_position(const Args& args, const Place& at,
                                                           const Writer& me, const Sums& sums,
                                                           const Slab (&slabs)[Config::kSlabs], int plane) {
    constexpr int kTogether = Config::kSlabs % 2 == 0 && !has_partners() ? 2 : 1;
    static_for<Config::kSlabs / kTogether>([&](auto m) {
      constexpr int kSlab = kTogether * decltype(m)::value, kNext = kSlab + kTogether - 1;
      const int by_pair = Lines<2, kVector, 1>::position(me.lane);
      const int by_one = Lines<1, kVector, kTogether>::position(me.lane);
      const Slab slab = kTogether == 2 && by_one & 8 ? slabs[kNext] : slabs[kSlab];
      const int row = kTogether == 2 ? by_one / 16 * 8 + by_one % 8 : by_one;
      const Target to_pair = target(args, at, slabs[kSlab], plane, 16 * me.warp + by_pair);
      const Target to_one = target(args, at, slab, plane, 16 * me.warp + row);
      static_for<Config::kGroupsPerTile>([&](auto group) {
        constexpr int kGroup = decltype(group)::value;
        static_for<Config::kFields>([&](auto field) {
          constexpr int kField = decltype(field)::value, kPartner = Config::kPartner(kField);
          if constexpr (kPartner != Config::kStoredByPartner && Accumulators::complete(kField)) {
            constexpr int kFirst = kGroup * Layout::kGroupColumns / 2;
            const float* first = &sums[kSlab][kFirst + kField * Config::kOutTile / 2];
            if constexpr (kPartner >= 0) {
              [[maybe_unused]] const float* second = &sums[kSlab][kFirst + kPartner * Config::kOutTile / 2];
              Lines<2, kVector, 1>::store(args, at, me, to_pair, kGroup, kField, first, second);
            } else {
              [[maybe_unused]] const float* second = &sums[kNext][kFirst + kField * Config::kOutTile / 2];
              Lines<1, kVector, kTogether>::store(args, at, me, to_one, kGroup, kField, first, second);
            }
          }
        });
      });
    });
  }
  static __device__ constexpr bool has_partners() {
    for (int field = 0; field < Config::kFields; ++field) {
      if (Config::kPartner(field) >= 0) return true;
    }
    return false;
  }

  // Lines of kWidth outputs for each of 16 positions of kTogether slabs, stored kVector at a time. A line is
  // a row of scratch, and its outputs are swizzled so that neither writes nor reads have bank conflicts.
  // Lines of 32 outputs of 16 bits are packed in scratch, others are floats.
  template <int kWidth, int kVector, int kTogether>
  struct Lines {
    static constexpr int kLength = 16 * kWidth * kTogether;
    static constexpr bool kLong = kLength == 32, kPacked = kLong && sizeof(Scalar) == 2;
    static_assert(kLong || kLength == 16, "swizzled lines");
    static constexpr int kRowBytes = kLength * (kPacked ? 2 : 4);
    static constexpr int kRows = HaloShared<Config>::kScratch * 4 / kRowBytes;
    // Channels in scratch at a time.
    static constexpr int kChannels = kRows < Config::kOutTile ? kRows : Config::kOutTile;
    static constexpr int kLanes = kLength / kVector;  // lanes that store a channel
    static constexpr int kAtOnce = 32 / kLanes;       // channels that a warp stores by one access

    // Returns the (first) position, of the warp's 16 or 32, whose outputs a lane stores. Every 8 positions
    // belong to one slab.
    static __device__ __forceinline__ int position(int lane) { return lane % kLanes * kVector / kWidth; }

    // Returns the channel of a row. Lines of 32 are in the order of channels; of every 8 lines of 16 the even
    // channels come first.
    static __device__ constexpr int channel_of(int row) {
      return kLong ? row : row / 8 * 8 + row % 4 * 2 + row / 4 % 2;
    }

    // Returns where an output of a row lies, in bytes. Outputs of one vector, or of one row of a matrix, stay
    // neighbours.
    static __device__ __forceinline__ int place(int row, int output) {
      if constexpr (kPacked) {  // two rows are 128 bytes
        const int half = (row ^ row / 2) % 2, piece = output / 8 ^ row / 2 % 4;
        return row / 2 * 128 + half * 64 + piece * 16 + output % 8 * 2;
      } else {
        return (row * kLength + (output ^ (kLong ? row / 2 % 4 * 8 : row / 2 % 2 * 8))) * 4;
      }
    }
    template <class T>
    static __device__ __forceinline__ T* at(float* scratch, int row, int output) {
      return reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(scratch) + place(row, output));
    }

    // Writes a lane's sums of 8 channels, from row 8 * to on, at two positions of each slab. `second` holds
    // the partner's sums, or the next slab's.
    static __device__ __forceinline__ void write(float* scratch, int lane, int to, const float* first,
                                                 const float* second) {
      if constexpr (kPacked && kTogether == 2) {  // four matrices of 8 positions x 8 channels, transposed
        using Two = Narrow<Scalar>;
        const auto* row = at<unsigned char>(scratch, 8 * to + lane % 8, lane / 8 * 8);
        ptx::store_transposed(ptx::shared_address(row),
                              make_uint4(Two::two(first[0], first[1]), Two::two(second[0], second[1]),
                                         Two::two(first[2], first[3]), Two::two(second[2], second[3])));
      } else {
        const int row = 8 * to + (kLong ? Accumulators::first_column(lane) : lane % 4);  // row of e == 0
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int output = (8 * half * kTogether + lane / 4) * kWidth;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = 2 * half + e, own = row + e * (kLong ? 1 : 4);
            if constexpr (kPacked) {
              *at<unsigned>(scratch, own, output) = Narrow<Scalar>::two(first[i], second[i]);
            } else if constexpr (kWidth == 2) {
              *at<Vector<float, 2>>(scratch, own, output) = Vector<float, 2>{first[i], second[i]};
            } else {
              *at<float>(scratch, own, output) = first[i];
              if constexpr (kTogether == 2) *at<float>(scratch, own, output + 8) = second[i];
            }
          }
        }
      }
    }
    static __device__ __forceinline__ Vector<Scalar, kVector> read(float* scratch, int row, int output) {
      using Outputs = Vector<Scalar, kVector>;
      if constexpr (kPacked) {
        return *at<Outputs>(scratch, row, output);
      } else {
        constexpr int kRead = kVector < 4 ? kVector : 4;
        Outputs vector;
#pragma unroll
        for (int i = 0; i < kVector; i += kRead) {
          const auto some = load_vector<kRead>(at<float>(scratch, row, output) + i);
#pragma unroll
          for (int k = 0; k < kRead; ++k) vector.at[i + k] = Narrow<Scalar>::from(some.at[k]);
        }
        return vector;
      }
    }

    static __device__ __forceinline__ void store(const Args& args, const Place& at, const Writer& me,
                                                 const Target& to, int group, int field, const float* first,
                                                 const float* second) {
      const int h = to.h + Config::kField(field, 1), w = to.w + Config::kField(field, 2);
      const bool line = to.exists && deep(args, at, to.d + Config::kField(field, 0)) && h < args.output.h;
      const int output = me.lane % kLanes * kVector, phase = output % kWidth;  // phase of the first output
      const bool exists = line && w + phase < args.output.w;
      // A vector ends inside its row of outputs, or rows are contiguous in memory.
      TCONV3D_ASSUME(!exists || w + phase + kVector <= args.output.w ||
                     (Config::kStrideH == 1 && args.y_stride.h == args.output.w));
      const int row = me.lane / kLanes, own = channel_of(row);
      Scalar* y = static_cast<Scalar*>(args.y) + to.start + field_start(args, group, field) + phase +
                  own * args.y_stride.c;
      ptx::pin(y);  // Without this the compiler computes every address from args.y.
#pragma unroll
      for (int done = 0; done < Config::kOutTile; done += kChannels) {
        const int out = Config::kOut % Config::kOutTile == 0 ? 0 : Config::kOut - at.first_out();
        const int left = (out == 0 || out > Config::kOutTile ? Config::kOutTile : out) - done;
#pragma unroll
        for (int j = 0; j < kChannels / 8; ++j) {
          if (done + 8 * j < Config::kOutTile) {
            write(me.scratch, me.lane, j, first + (done / 2 + 4 * j), second + (done / 2 + 4 * j));
          }
        }
        __syncwarp();
        constexpr int kStores = (kChannels + kAtOnce - 1) / kAtOnce;
        Vector<Scalar, kVector> vectors[kStores];
#pragma unroll
        for (int i = 0; i < kStores; ++i) vectors[i] = read(me.scratch, row + i * kAtOnce, output);
        __syncwarp();  // The next lines may overwrite scratch now.
        if (!exists) continue;
#pragma unroll
        for (int i = 0; i < kStores; ++i) {
          const int channel = channel_of(i * kAtOnce);
          // Known at compile time for whole tiles.
          const bool all = left >= kChannels && kChannels % kAtOnce == 0;
          if (all || own + channel < left) store_vector(further(args, y, done + channel), vectors[i]);
        }
      }
    }
  };

  // Returns the address of the output `channels` channels further on. If a channel's volume fits 32 bits,
  // this is one instruction.
  static __device__ __forceinline__ Scalar* further(const Args& args, Scalar* y, int channels) {
    if constexpr (Config::kWide) return y + channels * args.y_stride.c;
    const unsigned long long stride = static_cast<unsigned>(args.y_stride.c);
    return reinterpret_cast<Scalar*>(reinterpret_cast<unsigned char*>(y) +
                                     stride * (channels * sizeof(Scalar)));
  }

  // A build with four ways to store recomputes values derived from the lane index for every plane in the
  // rarely used ways, because there are too few registers to hold them for all.
  static __device__ __forceinline__ Writer anew(const Writer& me) {
    unsigned lane = static_cast<unsigned>(me.lane);
    if constexpr (Config::kFours) ptx::pin(lane);
    return {me.warp, static_cast<int>(lane), me.scratch};
  }

  static __device__ __forceinline__ void store_outputs(const Args& args, const Place& at, const Writer& me,
                                                       const Sums& sums, const Slab (&slabs)[Config::kSlabs],
                                                       int plane) {
    constexpr int kLong = Config::kLongVectors ? 16 / static_cast<int>(sizeof(Scalar)) : 1;
    constexpr int kFour = Config::kFours ? 4 : 1;
    constexpr int kPair = Config::kPairs ? 2 : 1;
    if constexpr (kInPlace) {
      if (args.vector == 2) {
        // Builds with more than two slabs have the direct stores once: a second copy costs more time than the
        // exchange saves.
        if constexpr (Config::kSlabs <= 2) {
          const auto apart = Config::kStrideH * args.y_stride.h * static_cast<int>(sizeof(Scalar));
          if (apart <= kNear && args.items == 1) {
            return store_in_place<true>(args, at, me, sums, slabs, plane);
          }
        }
        return store_in_place<false>(args, at, me, sums, slabs, plane);
      }
    }
    if constexpr (Config::kOutputUnitC) {
      store_by_channel(args, at, sums, slabs, plane, me.warp, me.lane);
    } else if (kLong > 1 && args.vector == kLong) {
      store_by_position<kLong>(args, at, me, sums, slabs, plane);
    } else if (kFour > 1 && args.vector == kFour) {
      store_by_position<kFour>(args, at, me, sums, slabs, plane);
    } else if (kPair > 1 && args.vector == kPair) {
      store_by_position<kPair>(args, at, anew(me), sums, slabs, plane);
    } else {
      store_by_position<1>(args, at, anew(me), sums, slabs, plane);
    }
  }
};

}  // namespace tconv3d
