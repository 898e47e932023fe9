// Code shared by the two kernels that compute all gradients of an up-convolution (up_backward.cuh,
// up_backward_last.cuh): the roles of warpgroups in a block, and the layout of matrix operands in shared
// memory.
#pragma once

#include "operands.cuh"
#include "ptx_hopper.cuh"

namespace tconv3d {

// Shared-memory layout of the weights and of x: a group is 8 input channels with one block of K each, 8
// swizzled vectors of 16 bytes.
template <class C>
struct UpBackwardGroups {
  using Scalar = typename C::Scalar;

  static constexpr int kBlockWords = 32;  // words of K in a swizzled 128-byte row
  static constexpr int kGroupsOfBlock = C::kColumns / 8;
  static constexpr int kPerWord = 4 / sizeof(Scalar);

  static __device__ __forceinline__ unsigned* group_at(unsigned char* operand, int block, int group) {
    return reinterpret_cast<unsigned*>(operand) + (block * kGroupsOfBlock + group) * 8 * kBlockWords;
  }
  static __device__ __forceinline__ unsigned* vector_at(unsigned* group, int row, int vector) {
    return group + row * kBlockWords + (vector ^ row) * 4;
  }

  // A warp copies one block of K, from word `first` on, of the weights of 8 input channels, from `channel`
  // on, with cp.async and in memory layout. The weight of an input channel has kWordsAll words.
  template <int kWordsAll>
  static __device__ __forceinline__ void copy(unsigned* group, const void* weight, int channel, int first,
                                              int lane) {
    constexpr int kPart = kWordsAll % 4 == 0 ? 4 : kWordsAll % 2 == 0 ? 2 : 1;  // words per copy
    // A weight may be a view into a flat buffer of parameters and have any alignment.
    const bool aligned = reinterpret_cast<unsigned long long>(weight) % (4 * kPart) == 0;
#pragma unroll
    for (int i = 0; i < 8 / kPart; ++i) {
      const int row = lane / 8 + i % 2 * 4, part = i / 2 * kPart;
      const int in = channel + row, word = first + lane % 8 * 4 + part;
      const bool inside = in < C::kIn && word < kWordsAll;
      const Scalar* const from = static_cast<const Scalar*>(weight) +
                                 (inside ? (in * static_cast<long long>(kWordsAll) + word) * kPerWord : 0);
      unsigned* const to = vector_at(group, row, lane % 8) + part;
      if (aligned) {
        ptx::copy_words_once<kPart>(to, from, inside);
      } else {
#pragma unroll
        for (int e = 0; e < kPart; ++e) {
          unsigned bits = raw(from[e * kPerWord]);
          if (kPerWord == 2) bits |= raw(from[e * kPerWord + 1]) << 16;
          to[e] = inside ? bits : 0u;
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ unsigned raw(Scalar value) {
    if constexpr (kPerWord == 1) {
      return ptx::float_to_bits(value);
    } else {
      return value.bits;
    }
  }
};

// One warpgroup copies, one computes the input gradient, and two share the weight gradient.

template <class Config, class Kernel>
__device__ __forceinline__ void take_roles(Kernel& kernel) {
  kernel.prepare();
  if (kernel.warp < 4) {
    ptx::keep_registers<Config::kProducerRegisters>();
    kernel.produce();
    return;
  }
  kernel.load_weights();
  if (kernel.warp < 8) {
    if constexpr (Config::kInputRegisters < 65536 / Config::kThreads) {  // fewer than at launch
      ptx::keep_registers<Config::kInputRegisters>();
    }
    kernel.input_grad();
  } else {
    ptx::claim_registers<Config::kWeightRegisters>();
    if (kernel.warp < 12) {
      kernel.template weight_grad<0>();
    } else {
      kernel.template weight_grad<1>();
    }
  }
}

}  // namespace tconv3d
