// The products of a chunk in tensor_weight_grad.cuh: how words become operands, and what matrix instructions
// add.
//
// Strict float32 (kHalves == 2) computes a product of two values, each the sum of two TF32 numbers
// (`Halves`), as low*high + high*low + high*high. Tensor cores round every sum towards zero, so that they add
// only the 16 positions of a chunk, the small products first. Such a sum is added to its total by additions
// that round to nearest, and the rounding error of each addition is the value that the next chunk's sum
// starts from. With at most 8 input channels, half of the rows of a matrix instruction would be idle: the
// rows 0 to 7 then hold the high halves of x and the rows 8 to 15 the low halves, so that two instructions
// compute three products.
#pragma once

#include "operands.cuh"

namespace tconv3d {

template <class C>
struct WeightGradProducts {
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(typename C::Scalar));  // positions per word
  static constexpr int kSegment = 4;                      // words per segment: one 16-byte load
  static constexpr int kSteps = 2;                        // K steps (matrix instructions) per chunk
  static constexpr int kWindow = C::kStep == 1 ? 8 : 16;  // most words per window
  static constexpr ptx::Operand kOperand = static_cast<ptx::Operand>(C::kOperand);
  static constexpr bool kStrict = C::kHalves == 2;
  static constexpr bool kSharedRows = kStrict && C::kHalfRows;  // rows of high and of low halves of x
  static constexpr int kTileSums = kSharedRows ? 2 : 4;         // sums of a matrix tile that a thread holds
  static_assert(C::kHalves == 1 || (kStrict && C::kAsync), "words are split when they are loaded");
  static_assert(C::kStep == 1 || C::kStep == 2, "elements of dy from one position to the next");

  // Rounds a float to TF32. The result is a new register, so that the compiler rounds each word into the
  // place where matrix instructions want it.
  static __device__ __forceinline__ unsigned rounded(unsigned bits) {
    return OperandOf<float>::bits(ptx::bits_to_float(bits));
  }

  using Segment = Vector<unsigned, kSegment>;

  // Makes operands of the words of a loaded segment.
  static __device__ __forceinline__ void to_operands(unsigned* words, const Segment& loaded) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i)
      words[i] = C::kAsync && kPerWord == 1 ? rounded(loaded.at[i]) : loaded.at[i];
  }
  // Loads a segment of x. `zero` is 0, which the compiler does not know: it computes each word of 16-bit
  // numbers into the register where matrix instructions want it, once for all of them. A plain load leaves
  // the words of a segment in four registers in a row, and each instruction would move its own.
  static __device__ __forceinline__ void load_rows(unsigned* words, const unsigned* from, unsigned zero) {
    to_operands(words, load_vector<kSegment>(from));
#pragma unroll
    for (int i = 0; i < kSegment; ++i) words[i] = kPerWord == 2 ? words[i] | zero : words[i];
  }

  // Splits a segment of strict float32 values into their high and low halves. A low half is not rounded:
  // tensor cores ignore its last bit, which is as near to the value as the number above.
  static __device__ __forceinline__ void to_halves(unsigned* high, unsigned* low, const Segment& loaded) {
#pragma unroll
    for (int i = 0; i < kSegment; ++i) {
      const float value = ptx::bits_to_float(loaded.at[i]);
      high[i] = Halves::high(value);
      low[i] = ptx::float_to_bits(value - ptx::bits_to_float(high[i] & 0xFFFFE000u));
    }
  }

  // Returns the operand of word kWord of x: elements of a window, kStep apart, from element kOffset on.
  template <int kWord, int kOffset>
  static __device__ __forceinline__ unsigned shifted(const unsigned (&window)[kWindow]) {
    constexpr int kFirst = kOffset + kWord * kPerWord * C::kStep;
    constexpr int kSecond = kFirst + (kPerWord - 1) * C::kStep;
    if constexpr (kPerWord == 1 || (kFirst % 2 == 0 && kSecond == kFirst + 1)) {
      return window[kFirst / kPerWord];
    } else if constexpr (kFirst % 2 == 0) {
      return ptx::low_halves(window[kFirst / 2], window[kSecond / 2]);
    } else if constexpr (kSecond % 2 == 1) {
      return ptx::high_halves(window[kFirst / 2], window[kSecond / 2]);
    } else {
      return window[kFirst / 2] >> 16 | window[kSecond / 2] << 16;
    }
  }

  // The operands of a chunk: the fragments of x, and of dy for one tap. Strict float32 has two of each, high
  // and low halves; with kSharedRows, the fragments of x hold the high halves in rows 0 to 7 and the low
  // halves in rows 8 to 15.
  using FragmentsX = unsigned[kStrict && !kSharedRows ? 2 : 1][C::kTilesIn][2][kSegment];
  using FragmentsY = unsigned[C::kHalves][kSteps][2];

  template <int kHalf>
  static __device__ __forceinline__ void multiply_step(float (&sum)[4], const unsigned (&x)[2][kSegment],
                                                       int step, const FragmentsY& dy) {
    const unsigned a[4] = {x[0][2 * step], x[1][2 * step], x[0][2 * step + 1], x[1][2 * step + 1]};
    ptx::warp_multiply<kOperand>(sum, a, dy[kHalf][step]);
  }

  // Adds a chunk's products of split values to the totals: three products for each, the small ones first.
  static __device__ __forceinline__ void multiply_halves(float (&total)[kTileSums], float (&rest)[kTileSums],
                                                         const FragmentsX& x, int m, const FragmentsY& dy) {
    if constexpr (kSharedRows) {
      // Both halves of the rows have the high halves of x, because a product of two low halves would make
      // infinity times zero of an infinite value.
      float small[4] = {rest[0], rest[1], 0.0f, 0.0f}, large[4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const unsigned* const high = x[0][m][0];
        const unsigned a[4] = {high[2 * step], high[2 * step], high[2 * step + 1], high[2 * step + 1]};
        ptx::warp_multiply<kOperand>(small, a, dy[1][step]);
        multiply_step<0>(large, x[0][m], step, dy);
      }
#pragma unroll
      for (int e = 0; e < kTileSums; ++e) rest[e] = small[e] + large[e + 2] + large[e];
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        multiply_step<0>(rest, x[1][m], step, dy);
        multiply_step<1>(rest, x[0][m], step, dy);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) multiply_step<0>(rest, x[0][m], step, dy);
    }
#pragma unroll
    for (int e = 0; e < kTileSums; ++e) ptx::add_with_rest(total[e], rest[e], 1.0f);
  }
};

}  // namespace tconv3d
