// The accumulators of a consumer of the halo kernel, outside of the matrix instructions: their initial
// values, the window of a march, the activation.
#pragma once

#include "epilogue.cuh"
#include "halo_tile.cuh"

namespace tconv3d {

template <class Config>
struct HaloSums {
  using Choices = HaloChoices<Config>;
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Place = typename HaloTile<Config>::Place;

  static constexpr int kSums = Layout::kColumns / 2;  // accumulators of one slab per thread
  using Sums = float[Config::kSlabs][kSums];

  // A lane has columns 2 * (lane % 4) and 2 * (lane % 4) + 1 of every 8 columns of a field.
  static __device__ __forceinline__ int first_column(int lane) { return lane % 4 * 2; }

  // Returns a lane's row of every 8. Where lanes load rows of 128 bytes themselves, lanes that load at the
  // same time are four rows apart, so that the swizzle puts them into different banks.
  static __device__ __forceinline__ int row_of(int lane) {
    const int row = lane / 4;
    return Config::kInput == Input::kInRegisters && Config::kRowBytes == 128 ? row % 2 * 4 + row / 2 : row;
  }

  // Returns a zero that the compiler cannot know to be one. Adding it to an initial value makes a new value.
  // A mere copy would be one value in two registers, and then the compiler would serialize matrix
  // instructions that could overlap.
  static __device__ __forceinline__ float nothing(const Args& args) {
    return ptx::bits_to_float(static_cast<unsigned>(args.batch >> 31));
  }

  // The initial values of sums: the bias of a lane's channels, loaded once per tile.
  struct Start {
    float at[Config::kGroupsPerTile][Config::kOutTile / 8][2];

    static __device__ __forceinline__ Start load(const Args& args, const Place& at, int lane) {
      Start start;
#pragma unroll
      for (int i = 0; i < Config::kGroupsPerTile * Config::kOutTile / 4; ++i) {
        const int group = i / (Config::kOutTile / 4), j = i / 2 % (Config::kOutTile / 8), e = i % 2;
        start.at[group][j][e] = bias(args, at, group, Layout::channel_of(j, e, lane));
      }
      return start;
    }
    static __device__ __forceinline__ float bias(const Args& args, const Place& at, int group, int out) {
      if constexpr (!Config::kBias) return 0.0f;
      if (!at.leads()) return 0.0f;
      if (at.first_out() + out >= Config::kOut) return 0.0f;
      const int channel = (at.first_group() + group) * Config::kOut + at.first_out() + out;
      return widen<float>(load_constant(static_cast<const Scalar*>(args.bias) + channel));
    }
  };
  // Where there are few channels, a lane keeps the bias of all tiles in registers, two channels to a word;
  // more than two consumers leave too few registers. A load at the beginning of a tile would wait for the
  // stores of the previous tile.
  static constexpr bool kKeepsBias =
      Config::kBias && Choices::kCopiesRows && Config::kWeights != Weights::kResident &&
      sizeof(Scalar) == 2 && Config::kGroups == 1 && Config::kOutTiles * Config::kOutTile <= 256 &&
      !Config::kMarch && Config::kDivision == Division::kNobody && Config::kConsumers == 2;
  struct Kept {
    static constexpr int kWords = Config::kOutTile / 8;
    unsigned words[Config::kOutTiles][kWords];

    static __device__ __forceinline__ Kept load(const Args& args, int lane) {
      Kept kept;
#pragma unroll
      for (int i = 0; i < Config::kOutTiles * kWords; ++i) {
        const int tile = i / kWords, j = i % kWords, first = tile * Config::kOutTile;
        unsigned& word = kept.words[tile][j];
        word = bits(args, first + Layout::channel_of(j, 0, lane)) |
               bits(args, first + Layout::channel_of(j, 1, lane)) << 16;
        ptx::pin(word);
      }
      return kept;
    }
    static __device__ __forceinline__ unsigned bits(const Args& args, int out) {
      if (out >= Config::kOut) return 0;
      return load_constant(static_cast<const Scalar*>(args.bias) + out).bits;
    }
    __device__ __forceinline__ Start of(const Place& at) const {
      Start start;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        unsigned word = words[0][j];
#pragma unroll
        for (int tile = 1; tile < Config::kOutTiles; ++tile) {
          if (at.first_out() == tile * Config::kOutTile) word = words[tile][j];
        }
        start.at[0][j][0] = widen<float>(Scalar{static_cast<unsigned short>(word)});
        start.at[0][j][1] = widen<float>(Scalar{static_cast<unsigned short>(word >> 16)});
      }
      return start;
    }
  };
  static __device__ __forceinline__ void start_fields(const Args& args, const Start& start, Sums& sums) {
    static_for<Config::kFields>([&](auto field) { start_field<decltype(field)::value>(args, start, sums); });
  }
  template <int kField>
  static __device__ __forceinline__ void start_field(const Args& args, const Start& start, Sums& sums) {
#pragma unroll
    for (int i = 0; i < Config::kGroupsPerTile * Config::kOutTile / 4; ++i) {
      const int group = i / (Config::kOutTile / 4), j = i / 2 % (Config::kOutTile / 8), e = i % 2;
      const float value = start.at[group][j][e] + nothing(args);
      const int column = group * Layout::kGroupColumns + kField * Config::kOutTile + 8 * j;
#pragma unroll
      for (int m = 0; m < Config::kSlabs; ++m) {
        sums[m][column / 2 + e] = value;
        sums[m][column / 2 + 2 + e] = value;
        // The value is computed now, and not once more when it is needed.
        if constexpr (Config::kOutput == Output::kImages) {
          ptx::pin(sums[m][column / 2 + e]);
          ptx::pin(sums[m][column / 2 + 2 + e]);
        }
      }
    }
  }

  // Moves the window after a plane of a march, whose first output planes are stored. Every field takes the
  // sums of the field kStrideD planes further on; earlier planes come first, so that sums are read before
  // they are overwritten.
  static __device__ __forceinline__ void move_window(const Args& args, const Start& start, Sums& sums) {
    static_assert(Config::kGroupsPerTile == 1, "a march has one group");
    static_for<Config::kWindow * Config::kFields>([&](auto turn) {
      constexpr int kField = decltype(turn)::value % Config::kFields;
      if constexpr (Config::kField(kField, 0) == decltype(turn)::value / Config::kFields) {
        constexpr int kFrom = further(kField);
        if constexpr (kFrom < 0) {
          start_field<kField>(args, start, sums);
        } else {
#pragma unroll
          for (int i = 0; i < Config::kSlabs * Config::kOutTile / 2; ++i) {
            const int m = i / (Config::kOutTile / 2), sum = i % (Config::kOutTile / 2);
            sums[m][kField * Config::kOutTile / 2 + sum] =
                sums[m][kFrom * Config::kOutTile / 2 + sum] + nothing(args);
          }
        }
      }
    });
  }
  // Returns the field that becomes this one when the window moves, or -1 if the new field is not in the
  // window yet.
  static __device__ constexpr int further(int field) {
    for (int i = 0; i < Config::kFields; ++i) {
      if (Config::kField(i, 0) == Config::kField(field, 0) + Config::kStrideD &&
          Config::kField(i, 1) == Config::kField(field, 1) &&
          Config::kField(i, 2) == Config::kField(field, 2))
        return i;
    }
    return -1;
  }

  // Whether the sums of a field are complete: a march stores the window's first kStrideD planes.
  static __device__ constexpr bool complete(int field) {
    return !Config::kMarch || Config::kField(field, 0) < Config::kStrideD;
  }

  // Applies the activation to the sums that are complete.
  static __device__ __forceinline__ void activate(Sums& sums) {
    static_for<Config::kFields>([&](auto field) {
      constexpr int kField = decltype(field)::value;
      if constexpr (complete(kField)) {
#pragma unroll
        for (int m = 0; m < Config::kSlabs; ++m) {
#pragma unroll
          for (int group = 0; group < Config::kGroupsPerTile; ++group) {
            float* first = &sums[m][(group * Layout::kGroupColumns + kField * Config::kOutTile) / 2];
#pragma unroll
            for (int i = 0; i < Config::kOutTile / 2; ++i) first[i] = Config::Epilogue::apply(first[i]);
          }
        }
      }
    });
  }

  // Keeps the compiler from moving operations on the sums between matrix instructions in flight.
  static __device__ __forceinline__ void pin(Sums& sums) {
#pragma unroll
    for (int m = 0; m < Config::kSlabs; ++m) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) ptx::pin(sums[m][i]);
    }
  }
};

}  // namespace tconv3d
