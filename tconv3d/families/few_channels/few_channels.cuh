// Code that the kernels for layers with few channels share: tiles of positions q, and the "part", the box of
// the few-channel tensor that the taps of one tile read, which is copied to shared memory.
//
// Position q and a tap read element step_in*q + offset(tap) of the few-channel tensor (geometry.py, Gather).
// In the part, the index of an element is the index of its position (position_place) plus the index of its
// tap and channel (tap_place), so that both are computed once for all tiles. Elements of the part outside the
// tensor are zero.
#pragma once

#include "operands.cuh"

namespace tconv3d {

struct TileOrigin {
  int n, d, h, w;  // batch index, and the tile's first position
};
__device__ __forceinline__ TileOrigin tile_at(int index, const Tiles& tiles) {
  const int rest_w = divide(index, tiles.by_w), rest_h = divide(rest_w, tiles.by_h);
  const int n = divide(rest_h, tiles.by_d);
  return TileOrigin{n, (rest_h - n * static_cast<int>(tiles.by_d.divisor)) * tiles.tile.d,
                    (rest_w - rest_h * static_cast<int>(tiles.by_h.divisor)) * tiles.tile.h,
                    (index - rest_w * static_cast<int>(tiles.by_w.divisor)) * tiles.tile.w};
}

// C has Scalar, kThreads, kWide, kReduced (the number of few channels), kInputStep, kOrigin (the first
// element that position 0 reads), kOffset of every tap of every phase counted from kOrigin, and kPartVector,
// the elements per copy: tiles and lines of the tensor are multiples of it, and 0 means that elements pass
// through registers one by one.
template <class C>
struct FewPart {
  using Scalar = typename C::Scalar;
  using Operand = OperandOf<Scalar>;
  using Index = typename IndexType<C::kWide>::type;
  static constexpr int kVector = C::kPartVector > 0 ? C::kPartVector : 1;
  // A part's lines begin kLead elements before the origin, at a vector boundary of the tensor.
  static constexpr int kLead = ((C::kOriginW % kVector) + kVector) % kVector;
  static_assert(C::kPartVector == 0 || kVector * sizeof(Scalar) % 4 == 0, "asynchronous copies move words");

  const Tiles& tiles;
  const Extent& size;      // size of the few-channel tensor
  const Strides& strides;  // strides of the few-channel tensor
  const Scalar* group;     // first channel of the block's group

  __device__ __forceinline__ int items() const {
    return C::kReduced * tiles.part.d * tiles.part.h * tiles.line_pitch;
  }

  // Returns the index in the part that a position of the tile contributes; tap_place has the rest.
  __device__ __forceinline__ int position_place(int d, int h, int w) const {
    return (d * C::kInputStepD * tiles.part.h + h * C::kInputStepH) * tiles.line_pitch + w * C::kInputStepW;
  }
  __device__ __forceinline__ int tap_place(int tap, int r) const {
    const int line = (r * tiles.part.d + C::kOffsetD(tap)) * tiles.part.h + C::kOffsetH(tap);
    return line * tiles.line_pitch + kLead + C::kOffsetW(tap);
  }

  // Calls body(line, vector of the line) for every vector that this thread copies.
  template <class Body>
  __device__ __forceinline__ void for_each_vector(Body&& body) const {
    const int vectors = C::kReduced * tiles.part.d * tiles.part.h * tiles.line_vectors;
    for (int i = threadIdx.x; i < vectors; i += C::kThreads) {
      const int line = divide(i, tiles.by_line_vectors);
      body(line, i - line * tiles.line_vectors);
    }
  }

  __device__ __forceinline__ void copy(const TileOrigin& tile, Scalar* part) const {
    const int first_d = tile.d * C::kInputStepD + C::kOriginD,
              first_h = tile.h * C::kInputStepH + C::kOriginH;
    const int first_w = tile.w * C::kInputStepW + C::kOriginW - kLead;
    const Scalar* sample = group + tile.n * strides.n;
    for_each_vector([&](int line, int vector) {
      const int rest = divide(line, tiles.part_by_h), r = divide(rest, tiles.part_by_d);
      const int h = first_h + line - rest * tiles.part.h, d = first_d + rest - r * tiles.part.d;
      const int w = first_w + vector * kVector;
      const bool inside = h >= 0 && h < size.h && d >= 0 && d < size.d && w >= 0 && w < size.w;
      const Index offset = r * static_cast<Index>(strides.c) + d * static_cast<Index>(strides.d) +
                           h * static_cast<Index>(strides.h) + w * static_cast<Index>(strides.w);
      const Scalar* from = sample + (inside ? offset : Index(0));
      Scalar* to = part + line * tiles.line_pitch + vector * kVector;
      if constexpr (C::kPartVector > 0) {
        TCONV3D_ASSUME(!inside || w + kVector <= size.w);
        ptx::copy_words<kVector * sizeof(Scalar) / 4>(to, from, inside);
      } else {
        *to = inside ? load_constant(from) : Scalar{};
      }
    });
  }

  // Rounds the elements that this thread has copied to the operand type of the tensor cores. All copies of
  // the thread must have completed.
  __device__ __forceinline__ void round(Scalar* part) const {
    if constexpr (sizeof(Scalar) == 4) {
      for_each_vector([&](int line, int vector) {
        auto* at =
            reinterpret_cast<Vector<Scalar, kVector>*>(part + line * tiles.line_pitch + vector * kVector);
        Vector<Scalar, kVector> values = *at;
#pragma unroll
        for (int i = 0; i < kVector; ++i) values.at[i] = ptx::bits_to_float(Operand::bits(values.at[i]));
        *at = values;
      });
    }
  }

  // Loads the operands at one index (32-bit types) or two indices (16-bit types) into one register of a
  // fragment. With kChecked, an index below zero stands for a zero operand.
  template <bool kChecked = false>
  static __device__ __forceinline__ unsigned operand(const Scalar* first, const int* places) {
    if constexpr (sizeof(Scalar) == 4) {
      return kChecked && places[0] < 0 ? 0u : ptx::float_to_bits(first[places[0]]);
    } else {
      const unsigned low = kChecked && places[0] < 0 ? 0u : first[places[0]].bits;
      const unsigned high = kChecked && places[1] < 0 ? 0u : first[places[1]].bits;
      return low | high << 16;
    }
  }
};

}  // namespace tconv3d
