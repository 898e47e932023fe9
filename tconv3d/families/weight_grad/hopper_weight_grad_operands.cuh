// Operands of the weight gradient on Hopper (hopper_weight_grad.cuh): words of dy that a lane has loaded
// become operands of matrix instructions, and are added to the bias gradient.
#pragma once

#include "hopper_weight_grad_block.cuh"

namespace tconv3d {

template <class C>
struct HopperWeightOperands {
  using Block = HopperWeightBlock<C>;
  using Scalar = typename Block::Scalar;
  static constexpr int kPerWord = Block::kPerWord, kLoadWords = Block::kLoadWords;

  // Words of dy in operand order: word 2i of both channels of a pair, then word 2i + 1. Some are operands as
  // they are loaded (never with kLines), others are joined from loaded words.
  struct Fragments {
    unsigned loaded[C::kLines ? 1 : C::kLoads][4];
    unsigned joined[C::kJoins > 0 ? C::kJoins : 1][4];
  };
  // Returns the index of the load that has a word of a plane, or -1.
  static constexpr int load_of(int plane, int word) {
    for (int i = 0; i < C::kLoads; ++i) {
      if (C::kLoadPlane(i) == plane && C::kLoadWord(i) == word / kLoadWords * kLoadWords) return i;
    }
    return -1;
  }

  // Adds to `sum` the elements of a loaded word that are a position's own outputs.
  template <int kLoad, int kWord>
  static __device__ __forceinline__ void add_own(float& sum, unsigned word) {
    if constexpr (C::kBias) {
      constexpr int kWhich = C::kBiasWords(kLoad, kWord);
      if constexpr (kWhich != 0) sum += sum_of_elements<Scalar, kWhich>(word);
    }
  }

  // Loaded words of dy: with kLines separately for each channel of a pair, else interleaved for both.
  struct Loaded {
    Vector<unsigned, 4> words[C::kLines ? 2 : 1][C::kLoads];
    bool used;
  };

  // Makes operands from loaded words, and adds to the sums for the bias gradient.
  static __device__ __forceinline__ void join(Fragments& to, const Loaded& from, float (&bias)[2]) {
    if constexpr (C::kBias) {
      if (from.used) add_bias(from, bias);
    }
    if constexpr (C::kLines) {
      join_lines(to, from);
    } else {
      join_planes(to, from);
    }
  }
  static __device__ __forceinline__ void add_bias(const Loaded& from, float (&bias)[2]) {
    float sums[2] = {0.0f, 0.0f};  // short sums first, which limits the rounding error of the long ones
    static_for<C::kLoads>([&](auto i) {
      static_for<4>([&](auto e) {
        constexpr int kI = decltype(i)::value, kE = decltype(e)::value;
        if constexpr (C::kLines) {
          add_own<kI, kE>(sums[0], from.words[0][kI].at[kE]);
          add_own<kI, kE>(sums[1], from.words[C::kLines ? 1 : 0][kI].at[kE]);
        } else {
          add_own<kI, kE / 2>(sums[kE % 2], from.words[0][kI].at[kE]);
        }
      });
    });
    bias[0] += sums[0];
    bias[1] += sums[1];
  }

  static __device__ __forceinline__ void join_planes(Fragments& to, const Loaded& from) {
    static_for<C::kLoads>([&](auto i) {
      static_for<4>([&](auto e) {
        constexpr int kI = decltype(i)::value, kE = decltype(e)::value;
        to.loaded[kI][kE] = Block::rounded(from.words[0][kI].at[kE]);
      });
    });
    static_for<C::kJoins>([&](auto j) {
      constexpr int kJ = decltype(j)::value;
      static_for<4>([&](auto e) {
        constexpr int kE = decltype(e)::value, kPlane = C::kJoinPlane(kJ), kWord = C::kJoinWord(kJ) + kE / 2;
        constexpr int kLoad = load_of(kPlane, kWord);
        const unsigned word = to.loaded[kLoad][kWord % 2 * 2 + kE % 2];
        if constexpr (C::kJoinOdd(kJ) == 0) {
          to.joined[kJ][kE] = word;
        } else {
          constexpr int kNext = load_of(kPlane, kWord + 1);
          to.joined[kJ][kE] = word >> 16 | to.loaded[kNext][(kWord + 1) % 2 * 2 + kE % 2] << 16;
        }
      });
    });
  }

  // Joins operands from lines of dy, one channel of the pair after the other.
  static __device__ __forceinline__ void join_lines(Fragments& to, const Loaded& from) {
    static_for<2>([&](auto half) {
      static_for<C::kJoins>([&](auto j) {
        static_for<2>([&](auto k) {
          constexpr int kHalf = decltype(half)::value, kJ = decltype(j)::value, kK = decltype(k)::value;
          constexpr int kFirst = C::kJoinElement(kJ) + kK * kPerWord * C::kStrideW;
          to.joined[kJ][2 * kK + kHalf] =
              word_of<C::kJoinPlane(kJ), kFirst>(from.words[C::kLines ? kHalf : 0]);
        });
      });
    });
  }
  // Returns the operand word that begins with element kElement of a line; a second one is a stride further.
  template <int kLine, int kElement>
  static __device__ __forceinline__ unsigned word_of(const Vector<unsigned, 4> (&words)[C::kLoads]) {
    constexpr int kWord = kElement / kPerWord, kLast = kElement + (kPerWord - 1) * C::kStrideW;
    const unsigned first = words[load_of(kLine, kWord)].at[kWord % 4];
    if constexpr (kPerWord == 1) return Block::rounded(first);
    const unsigned last = words[load_of(kLine, kLast / 2)].at[kLast / 2 % 4];
    return (kElement % 2 ? first >> 16 : first & 0xFFFFu) | (kLast % 2 ? last & 0xFFFF0000u : last << 16);
  }
};

}  // namespace tconv3d
