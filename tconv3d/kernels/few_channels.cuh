// What the kernels for few channels share: tiles of positions q, and the part of the tensor with few channels
// that the taps of a tile read, copied to shared memory.
//
// Position q and a tap read element step_in*q + offset(tap) of that tensor (geometry.py, Gather). In the copy
// the place of an element is the place of the position plus the place of (channel, tap), so both can be found
// once for all tiles. What lies outside the tensor is zero in the copy.
#pragma once

#include "operands.cuh"

namespace tconv3d {

struct Tiles {
  Extent tile;                   // positions of a tile
  Extent part;                   // lines that a tile reads along d and h, elements along w
  int line_pitch;                // of a line in shared memory, a multiple of 8 elements
  int count;                     // tiles in all
  Divider by_d, by_h, by_w;      // how many tiles the volume has
  Divider part_by_d, part_by_h;  // lines
};

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

// C: Scalar, kThreads, kReduced (the few channels), kInputStep, kOrigin (the first element that position 0
// reads) and, for each tap of every phase, kOffset from there.
template <class C>
struct FewPart {
  using Scalar = typename C::Scalar;
  using Operand = OperandOf<Scalar>;
  static constexpr int kLanes = 32, kWarps = C::kThreads / kLanes;
  static constexpr bool kAsync = sizeof(Scalar) == 4;  // asynchronous copies move words

  const Tiles& tiles;
  const Extent& size;      // of the tensor
  const Strides& strides;  // likewise
  const Scalar* group;     // the first channel of the block's group
  int lane, warp;

  __device__ __forceinline__ int items() const {
    return C::kReduced * tiles.part.d * tiles.part.h * tiles.line_pitch;
  }

  // Where the first tap's element of a position lies, given the position within the tile.
  __device__ __forceinline__ int position_place(int d, int h, int w) const {
    return (d * C::kInputStepD * tiles.part.h + h * C::kInputStepH) * tiles.line_pitch + w * C::kInputStepW;
  }
  __device__ __forceinline__ int tap_place(int tap, int r) const {
    const int line = (r * tiles.part.d + C::kOffsetD(tap)) * tiles.part.h + C::kOffsetH(tap);
    return line * tiles.line_pitch + C::kOffsetW(tap);
  }

  // body(address, inside or not, place in the part) for everything this thread copies: lines are the warp's,
  // elements of a line the lane's.
  template <class Body>
  __device__ __forceinline__ void for_each_item(const TileOrigin& tile, Body&& body) const {
    const int first_d = tile.d * C::kInputStepD + C::kOriginD,
              first_h = tile.h * C::kInputStepH + C::kOriginH;
    const int first_w = tile.w * C::kInputStepW + C::kOriginW;
    const Scalar* sample = group + tile.n * strides.n;
    const int lines = C::kReduced * tiles.part.d * tiles.part.h;
#pragma unroll 2
    for (int line = warp; line < lines; line += kWarps) {
      const int rest = divide(line, tiles.part_by_h), r = divide(rest, tiles.part_by_d);
      const int h = first_h + line - rest * tiles.part.h, d = first_d + rest - r * tiles.part.d;
      const bool inside = h >= 0 && h < size.h && d >= 0 && d < size.d;
      const Scalar* from =
          sample + r * strides.c + (inside ? d * strides.d : 0) + (inside ? h * strides.h : 0);
      for (int i = lane; i < tiles.part.w; i += kLanes) {
        const int w = first_w + i;
        const bool there = inside && w >= 0 && w < size.w;
        body(from + (there ? w * strides.w : 0), there, line * tiles.line_pitch + i);
      }
    }
  }

  __device__ __forceinline__ void copy(const TileOrigin& tile, Scalar* part) const {
    for_each_item(tile, [&](const Scalar* from, bool inside, int place) {
      if constexpr (kAsync) {
        ptx::copy_words<1>(part + place, from, inside);
      } else {
        part[place] = inside ? load_constant(from) : Scalar{};
      }
    });
  }

  // Rounds what this thread has copied to what tensor cores take, after its copies have finished.
  __device__ __forceinline__ void round(const TileOrigin& tile, Scalar* part) const {
    if constexpr (kAsync) {
      for_each_item(tile, [&](const Scalar*, bool, int place) {
        part[place] = ptx::bits_to_float(Operand::bits(part[place]));
      });
    }
  }

  // The operands at one or two places, as a register of a fragment. Places below zero hold zeros.
  static __device__ __forceinline__ unsigned operand(const Scalar* first, const int* places) {
    if constexpr (sizeof(Scalar) == 4) {
      return places[0] < 0 ? 0u : ptx::float_to_bits(first[places[0]]);
    } else {
      const unsigned low = places[0] < 0 ? 0u : first[places[0]].bits;
      const unsigned high = places[1] < 0 ? 0u : first[places[1]].bits;
      return low | high << 16;
    }
  }
};

}  // namespace tconv3d
