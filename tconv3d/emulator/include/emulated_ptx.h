// What kernels/ptx.cuh provides on a GPU, in plain C++ for the emulator: same names, same results.
#pragma once

#include <cstdint>
#include <cstring>

namespace tconv3d::ptx {

inline float bits_to_float(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float half_to_float(unsigned short bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16;
  const std::uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bits_to_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x0400u) return bits_to_float(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -subnormal : subnormal;
}

// Round to nearest even, as cvt.rn does.
inline unsigned short float_to_half(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7FFFu;
  if (magnitude >= 0x47800000u) return static_cast<unsigned short>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 aligns the subnormal half's last place with the float's.
    const std::uint32_t aligned = float_to_bits(bits_to_float(magnitude) + 0.5f);
    return static_cast<unsigned short>(sign | (aligned - 0x3F000000u));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<unsigned short>(sign | ((magnitude + 0xFFFu + odd - 0x38000000u) >> 13));
}

inline unsigned short float_to_bfloat16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
  return static_cast<unsigned short>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace tconv3d::ptx
