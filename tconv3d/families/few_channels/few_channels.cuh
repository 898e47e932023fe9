// What the kernels for few channels share: tiles of positions q, and the part of the tensor with few channels
// that the taps of a tile read, copied to shared memory.
//
// Position q and a tap read element step_in*q + offset(tap) of that tensor (geometry.py, Gather). In the copy
// the place of an element is the place of the position plus the place of (channel, tap), so both can be found
// once for all tiles. What lies outside the tensor is zero in the copy.
#pragma once

#include "operands.cuh"

namespace tconv3d {

struct TileOrigin {
  int n, d, h, w;  // batch index and first position
};
__device__ __forceinline__ TileOrigin tile_at(int index, const Tiles& tiles) {
  const int rest_w = divide(index, tiles.by_w), rest_h = divide(rest_w, tiles.by_h);
  const int n = divide(rest_h, tiles.by_d);
  return TileOrigin{n, (rest_h - n * static_cast<int>(tiles.by_d.divisor)) * tiles.tile.d,
                    (rest_w - rest_h * static_cast<int>(tiles.by_h.divisor)) * tiles.tile.h,
                    (index - rest_w * static_cast<int>(tiles.by_w.divisor)) * tiles.tile.w};
}

// C: Scalar, kThreads, kWide, kReduced (the few channels), kInputStep, kOrigin (the first element that
// position 0 reads) and, for each tap of every phase, kOffset from there; kPartVector elements that one copy
// moves (0: elements pass through registers one by one), which tiles and lines of the tensor are multiples
// of.
template <class C>
struct FewPart {
  using Scalar = typename C::Scalar;
  using Operand = OperandOf<Scalar>;
  using Index = typename IndexType<C::kWide>::type;
  static constexpr int kVector = C::kPartVector > 0 ? C::kPartVector : 1;
  static constexpr int kLead = ((C::kOriginW % kVector) + kVector) % kVector;  // from a vector's beginning
  static_assert(C::kPartVector == 0 || kVector * sizeof(Scalar) % 4 == 0, "asynchronous copies move words");

  const Tiles& tiles;
  const Extent& size;      // of the tensor
  const Strides& strides;  // likewise
  const Scalar* group;     // the first channel of the block's group

  __device__ __forceinline__ int items() const {
    return C::kReduced * tiles.part.d * tiles.part.h * tiles.line_pitch;
  }

  // Where the first tap's element of a position lies, given the position within the tile.
  __device__ __forceinline__ int position_place(int d, int h, int w) const {
    return (d * C::kInputStepD * tiles.part.h + h * C::kInputStepH) * tiles.line_pitch + w * C::kInputStepW;
  }
  __device__ __forceinline__ int tap_place(int tap, int r) const {
    const int line = (r * tiles.part.d + C::kOffsetD(tap)) * tiles.part.h + C::kOffsetH(tap);
    return line * tiles.line_pitch + kLead + C::kOffsetW(tap);
  }

  // body(line, vector of the line) for everything this thread copies.
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

  // Rounds what this thread has copied to what tensor cores take, after its copies have finished.
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

  // The operands at one or two places, as a register of a fragment. Where it is checked, places below zero
  // hold zeros.
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
