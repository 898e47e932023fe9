// Conversion of values from memory to operands of tensor cores.
#pragma once

#include "common.cuh"

namespace tconv3d {

// OperandOf<Scalar>::bits returns the bits that a matrix instruction takes for a number.
template <class Scalar>
struct OperandOf;
template <>
struct OperandOf<float> {
  static constexpr ptx::Operand kOperand = ptx::Operand::kTf32;
  // Tensor cores read the upper 19 bits, so adding half a unit of the last of these bits rounds to nearest,
  // ties away from zero. This takes two instructions, where the conversion instruction takes four. Infinities
  // and NaN are unchanged.
  static __device__ __forceinline__ unsigned bits(float value) {
    const float power = ptx::bits_to_float(ptx::float_to_bits(value) & 0xFF800000u);
    return ptx::float_to_bits(power * 0x1p-11f + value);
  }
};
// A float as a sum of two TF32 numbers, exact up to the last bit or two. The high half is never infinite: an
// infinite value is infinite in the low half alone, because infinity minus infinity would be NaN.
struct Halves {
  static __device__ __forceinline__ unsigned high(float value) {
    constexpr float kLargest = 0x1.FFCp127f;  // largest finite TF32 number
    return OperandOf<float>::bits(value > kLargest ? kLargest : value < -kLargest ? -kLargest : value);
  }
  static __device__ __forceinline__ unsigned low(float value) {
    return OperandOf<float>::bits(value - ptx::bits_to_float(high(value) & 0xFFFFE000u));
  }
};
template <>
struct OperandOf<Half> {
  static constexpr ptx::Operand kOperand = ptx::Operand::kFloat16;
  static __device__ __forceinline__ unsigned bits(Half value) { return value.bits; }
};
template <>
struct OperandOf<BFloat16> {
  static constexpr ptx::Operand kOperand = ptx::Operand::kBFloat16;
  static __device__ __forceinline__ unsigned bits(BFloat16 value) { return value.bits; }
};

// Sums the elements of a word that `kWhich` selects: 1 the first, 2 the second of a 16-bit type, 3 both.
template <class Scalar, int kWhich>
__device__ __forceinline__ float sum_of_elements(unsigned word) {
  if constexpr (sizeof(Scalar) == 4) {
    return kWhich != 0 ? ptx::bits_to_float(word) : 0.0f;
  } else {
    const Scalar first{static_cast<unsigned short>(word)}, second{static_cast<unsigned short>(word >> 16)};
    return (kWhich & 1 ? widen<float>(first) : 0.0f) + (kWhich & 2 ? widen<float>(second) : 0.0f);
  }
}

// Loads memory that nobody writes while the kernel runs.
__device__ __forceinline__ float load_constant(const float* address) { return __ldg(address); }
template <class Scalar>
__device__ __forceinline__ Scalar load_constant(const Scalar* address) {
  return Scalar{__ldg(&address->bits)};
}

}  // namespace tconv3d
