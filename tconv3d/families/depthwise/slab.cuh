// Planes of a tensor in shared memory, which the depthwise kernels of tiles.py march through.
//
// A slab is a part of one plane of a few channels: kRows lines of kCols elements, with the halo that the
// taps read. Elements outside the tensor are zero in the slab, so that nobody who reads it compares indices.
// Asynchronous copies of kGrain elements fill it. The element type is the tensor's.
//
// Contiguous tensors lie in the slab as [channel][row][column], and a thread reads a part of a row by vectors
// of 16 bytes (pieces). Neighbouring threads read pieces that are kStride pieces apart; the lowest bits of a
// piece's index are therefore mixed with higher ones, which keeps the threads of a quarter-warp in different
// banks. Channels-last tensors lie as [row][column][channel], and neighbouring threads read neighbouring
// channels.
#pragma once

#include "any_address.cuh"
#include "widen_two.cuh"

namespace tconv3d {

// Lines of any length that begin at any address (kRawPieces) arrive in two steps. Pieces of 16 bytes that
// contain them are copied as they lie in memory (`fetch`), and later shifted into the slab (`settle`).

// L has Scalar, kThreads, kLast (channels-last), kChannels, kRows, kCols (columns that are filled), kPieces
// (pieces of a row of a contiguous tensor), kGrain, kStride (a power of two), and kSkewRows and kSkew: after
// every kSkewRows rows kSkew elements are left out, and after every channel kChannelSkew, so that threads
// with different rows or channels use different banks. kRawPieces: pieces of 16 bytes that contain the
// columns of a row wherever it begins, or 0 if `fetch` is not used.
template <class L>
struct Slab {
  using Scalar = typename L::Scalar;
  static constexpr int kItem = static_cast<int>(sizeof(Scalar)), kPiece = 16 / kItem;  // elements of a piece
  static constexpr int kPitch = L::kLast ? L::kCols * L::kChannels : L::kPieces * kPiece;
  static constexpr int kPlane =
      L::kRows * kPitch + (L::kRows - 1) / L::kSkewRows * L::kSkew + L::kChannelSkew;
  // Elements from one plane to the next: planes begin at multiples of 16 bytes.
  static constexpr int kSize = ((L::kLast ? 1 : L::kChannels) * kPlane + kPiece - 1) / kPiece * kPiece;
  static_assert(L::kLast || L::kPieces % L::kStride == 0, "mixed pieces stay in their row");

  Scalar* shared;      // the first plane
  const Scalar* from;  // the tensor, at the batch item and the first channel
  const Strides& strides;
  const Extent& size;
  int channels;          // channels that exist, from the first one on
  int first_h, first_w;  // indices of the slab's first row and column in the tensor

  static __device__ __forceinline__ int mixed(int piece) { return piece ^ (piece / 8 % L::kStride); }
  static __device__ __forceinline__ int row_offset(int row) {
    return row * kPitch + row / L::kSkewRows * L::kSkew;
  }

  // Copies kGrain elements, or writes zeros if not `inside`: then `address` may be any.
  __device__ __forceinline__ void copy(Scalar* to, const Scalar* address, bool inside) const {
    constexpr int kBytes = L::kGrain * static_cast<int>(sizeof(Scalar));
    if constexpr (kBytes == 16) {
      ptx::copy_piece(ptx::shared_address(to), address, inside);
    } else if constexpr (kBytes == 4) {
      ptx::copy_word(ptx::shared_address(to), address, inside);
    } else if constexpr (kBytes == 8) {
      ptx::copy_words<2>(to, inside ? address : from, inside);
    } else {
      *to = inside ? *address : Scalar{};
    }
  }

  // How threads share kItems items of every line: a thread has an item of every kStep-th row, kTimes of them.
  template <int kItems>
  struct Items {
    static constexpr int kWidth = kItems < L::kThreads ? kItems : L::kThreads;
    static constexpr int kStep = L::kThreads / kWidth < L::kRows ? L::kThreads / kWidth : L::kRows;
    static constexpr int kTimes = (L::kRows + kStep - 1) / kStep;
    static constexpr int kUnrolled = kTimes < 6 ? kTimes : 4;
  };

  // Begins to copy plane `plane` as it lies in memory to `raw`. All threads call it.
  __device__ __forceinline__ void fetch(int plane, Scalar* raw) const {
    using Own = Items<L::kRawPieces>;
    [[maybe_unused]] constexpr int kUnrolled = Own::kUnrolled;  // read by a pragma alone
    const int thread = static_cast<int>(threadIdx.x), first_row = thread / Own::kWidth;
    if (first_row >= Own::kStep) return;
    const bool there = static_cast<unsigned>(plane) < static_cast<unsigned>(size.d);
    const char* const valid = reinterpret_cast<const char*>(from - offset_in_vector(from) / kItem);
    const Scalar* const first = from + plane * strides.d + (first_h + first_row) * strides.h + first_w;
#pragma unroll 1
    for (int piece = thread % Own::kWidth; piece < L::kRawPieces; piece += Own::kWidth) {
      // Bytes from the piece to the end of the line, and from the beginning of the line to the piece's end,
      // if the slab's first column lies at a multiple of 16 bytes.
      const int left = (size.w - first_w) * kItem - 16 * piece, done = first_w * kItem + 16 * piece + 16;
      const char* start = reinterpret_cast<const char*>(first) + 16 * piece;
      unsigned to = ptx::shared_address(raw + (first_row * L::kRawPieces + piece) * kPiece);
#pragma unroll 1
      for (int channel = 0; channel < L::kChannels; ++channel) {
        const char* address = start;
        const bool exists = there && channel < channels;
#pragma unroll kUnrolled
        for (int i = 0; i < Own::kTimes; ++i) {
          const int row = first_row + i * Own::kStep;
          if ((i + 1) * Own::kStep > L::kRows && row >= L::kRows) break;
          const int offset = static_cast<int>(offset_in_vector(address)), rest = left + offset;
          const bool inside = exists && rest > 0 && done > offset &&
                              static_cast<unsigned>(first_h + row) < static_cast<unsigned>(size.h);
          ptx::copy_beginning_once(to + i * Own::kStep * L::kRawPieces * 16,
                                   inside ? address - offset : valid, inside ? rest < 16 ? rest : 16 : 0);
          address += Own::kStep * strides.h * kItem;
        }
        start += strides.c * kItem;
        to += L::kRows * L::kRawPieces * 16;
      }
    }
  }

  // Shifts plane `plane` from `raw` to place `slot`. All threads call it, after all copies are there.
  __device__ __forceinline__ void settle(int plane, const Scalar* raw, int slot) const {
    constexpr int kPieces = (L::kCols + kPiece - 1) / kPiece;
    using Own = Items<kPieces>;
    [[maybe_unused]] constexpr int kUnrolled = Own::kUnrolled;  // read by a pragma alone
    const int thread = static_cast<int>(threadIdx.x), first_row = thread / Own::kWidth;
    if (first_row >= Own::kStep) return;
    const Scalar* const first = from + plane * strides.d + (first_h + first_row) * strides.h + first_w;
#pragma unroll 1
    for (int piece = thread % Own::kWidth; piece < kPieces; piece += Own::kWidth) {
      // The lower half of an address, of which the lowest bits are used.
      auto start = static_cast<unsigned>(reinterpret_cast<unsigned long long>(first));
      const Scalar* at = raw + (first_row * L::kRawPieces + piece) * kPiece;
      Scalar* to = shared + slot * kSize + mixed(piece) * kPiece;
      const int before = -(first_w + piece * kPiece);  // elements in front of the line, which are zero
#pragma unroll 1
      for (int channel = 0; channel < L::kChannels; ++channel) {
        unsigned address = start;
#pragma unroll kUnrolled
        for (int i = 0; i < Own::kTimes; ++i) {
          const int row = first_row + i * Own::kStep;
          if ((i + 1) * Own::kStep > L::kRows && row >= L::kRows) break;
          const auto* const words =
              reinterpret_cast<const unsigned*>(at + i * Own::kStep * L::kRawPieces * kPiece);
          Words found = select<kItem>({load_vector<4>(words), load_vector<4>(words + 4)}, address % 16);
          if (before > 0) clear_first(found, before);
          *reinterpret_cast<Words*>(to + row_offset(row)) = found;
          address += Own::kStep * static_cast<unsigned>(strides.h) * kItem;
        }
        start += static_cast<unsigned>(strides.c) * kItem;
        at += L::kRows * L::kRawPieces * kPiece;
        to += kPlane;
      }
    }
  }

  // Makes the first `count` elements of a piece zero.
  static __device__ __forceinline__ void clear_first(Words& words, int count) {
    constexpr int kOfWord = 4 / kItem;  // elements
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i + 1) * kOfWord <= count) {
        words.at[i] = 0;
      } else if (kOfWord == 2 && 2 * i < count) {
        words.at[i] &= 0xFFFF0000u;
      }
    }
  }

  // Begins to copy plane `plane` of the tensor to place `slot` of the ring, and plane + 1 to slot + 1, and so
  // on. All threads call it. A thread copies the same part of every kStep-th row, so that it compares most
  // indices once for all its rows.
  template <int kPlanes>
  __device__ __forceinline__ void fill(int plane, int slot) const {
    constexpr int kInner = L::kLast ? L::kChannels / L::kGrain : 1;  // copies of a column
    // Copies of a row.
    constexpr int kItems = L::kLast ? L::kCols * kInner : (L::kCols + L::kGrain - 1) / L::kGrain;
    constexpr int kWidth = kItems < L::kThreads ? kItems : L::kThreads, kStep = L::kThreads / kWidth;
    constexpr int kTimes = (L::kRows + kStep - 1) / kStep;
    [[maybe_unused]] constexpr int kUnrolled = kTimes < 8 ? kTimes : 4;  // read by a pragma alone
    const int thread = static_cast<int>(threadIdx.x), first_row = thread / kWidth;
    if (first_row >= kStep) return;
    const Scalar* first = from + plane * strides.d + (first_h + first_row) * strides.h;
#pragma unroll 1
    for (int item = thread % kWidth; item < kItems; item += kWidth) {
      const int column = L::kLast ? item / kInner : item * L::kGrain, w = first_w + column;
      const int channel = L::kLast ? item % kInner * L::kGrain : 0;
      const bool there = static_cast<unsigned>(w) < static_cast<unsigned>(size.w) &&
                         (kPlanes > 1 || static_cast<unsigned>(plane) < static_cast<unsigned>(size.d));
      const Scalar* start = first + channel + w * strides.w;
      Scalar* to = shared + slot * kSize;
      to += L::kLast ? item * L::kGrain : mixed(column / kPiece) * kPiece + column % kPiece;
#pragma unroll 1
      for (int outer = 0; outer < (L::kLast ? 1 : L::kChannels); ++outer) {
        const Scalar* address = start;
        const bool exists = there && channel + outer < channels;
#pragma unroll kUnrolled
        for (int i = 0; i < kTimes; ++i) {
          const int row = first_row + i * kStep;
          if ((i + 1) * kStep > L::kRows && row >= L::kRows) break;
          const bool inside = exists && static_cast<unsigned>(first_h + row) < static_cast<unsigned>(size.h);
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) {
            const bool in_depth =
                kPlanes == 1 || static_cast<unsigned>(plane + p) < static_cast<unsigned>(size.d);
            copy(to + row_offset(row) + p * kSize, address + p * strides.d, inside && in_depth);
          }
          address += kStep * strides.h;
        }
        start += strides.c;
        to += kPlane;
      }
    }
  }
};

// Where a thread reads a slab: its channel, its first row, and its first column. kOwn: neighbouring channels
// that the thread reads, of which it has several only if the tensor is channels-last.
template <class L, int kOwn = 1>
struct SlabReader {
  using Scalar = typename L::Scalar;
  using Whole = Slab<L>;
  static constexpr int kFirst = L::kLast ? 0 : L::kBefore;  // columns that a thread reads and does not need
  static constexpr int kVectors = L::kLast ? 1 : (kFirst + L::kReads + Whole::kPiece - 1) / Whole::kPiece;

  static_assert(kOwn == 1 || L::kLast, "channels of a contiguous tensor are planes");

  int start;         // elements from the beginning of a plane to the thread's first row
  int at[kVectors];  // elements from the beginning of a row to each of the thread's pieces, or to its column

  // `row` is the thread's first row, a multiple of L::kSkewRows; `column` its first column.
  __device__ __forceinline__ SlabReader(int channel, int row, int column) {
    start = Whole::row_offset(row) + (L::kLast ? channel : channel * Whole::kPlane);
    if constexpr (L::kLast) {
      at[0] = column * L::kChannels;
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) at[v] = Whole::mixed(column / Whole::kPiece + v) * Whole::kPiece;
    }
  }

  // Reads kReads elements of row `row`, which is counted from the thread's first row, `first`, and known to
  // the compiler; element i of channel c becomes value i * kOwn + c.
  __device__ __forceinline__ void read(const Scalar* first, int row,
                                       float (&values)[L::kReads * kOwn]) const {
    const Scalar* line = first + Whole::row_offset(row);
    if constexpr (kOwn == 2) {
#pragma unroll
      for (int i = 0; i < L::kReads; ++i) {
        const Scalar* const both = line + at[0] + i * L::kChannels;
        if constexpr (sizeof(Scalar) == 4) {
          const Vector<float, 2> two = load_vector<2>(both);
          values[2 * i] = two.at[0];
          values[2 * i + 1] = two.at[1];
        } else {
          const unsigned two = *reinterpret_cast<const unsigned*>(both);
          values[2 * i] = Widen<Scalar>::of(two, false);
          values[2 * i + 1] = Widen<Scalar>::of(two, true);
        }
      }
    } else if constexpr (L::kLast) {
#pragma unroll
      for (int i = 0; i < L::kReads; ++i) values[i] = widen<float>(line[at[0] + i * L::kChannels]);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const Vector<unsigned, 4> piece = load_vector<4>(reinterpret_cast<const unsigned*>(line + at[v]));
#pragma unroll
        for (int e = 0; e < Whole::kPiece; ++e) {
          const int i = v * Whole::kPiece + e - kFirst;
          if (i < 0 || i >= L::kReads) continue;
          if constexpr (sizeof(Scalar) == 4) {
            values[i] = ptx::bits_to_float(piece.at[e]);
          } else {
            values[i] = Widen<Scalar>::of(piece.at[e / 2], e % 2 == 1);
          }
        }
      }
    }
  }
};

}  // namespace tconv3d
