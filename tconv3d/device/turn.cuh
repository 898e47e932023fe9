// Transposes channels-last tensors to contiguous ones, or contiguous ones to channels-last: up to three
// tensors in a launch, each a batch of matrices that are transposed one by one. Elements have 2 or 4 bytes.
//
// A thread transposes a small matrix in registers: it loads 16 bytes of each of 8 rows, and stores vectors of
// 16 bytes of each column. All loads are on their way before the first is used. A warp has a tile of such
// matrices, so that its lanes load and store neighbouring vectors. Where rows of the matrix that is read
// begin at any element, a thread loads the two aligned vectors around its elements (any_address.cuh). Where
// columns are written to any element, the warp passes them through shared memory and stores words, and single
// elements at both ends.
#pragma once

#include "any_address.cuh"

namespace tconv3d {

template <class C>
struct Turn {
  static constexpr int kItemBytes = C::kItemBytes, kItems = 16 / kItemBytes;  // elements of a vector
  static constexpr int kRows = 8, kVectors = kRows / kItems;  // rows of a thread, vectors of its columns
  static constexpr int kPerWord = 4 / kItemBytes, kWarps = C::kThreads / 32;
  static constexpr int kStagedWords = 32 * kRows * 4;  // words of a warp's tile
  static_assert(kItemBytes == 2 || kItemBytes == 4, "elements of 2 or 4 bytes");

  // The part of a matrix that a thread transposes. Its rows are kVectors groups of kItems neighbours.
  struct Own {
    int row, column, next_group;  // the first row and column; rows from group to group
    long long item;
    __device__ __forceinline__ int row_of(int k) const { return row + k / kItems * next_group + k % kItems; }
  };
  static __device__ __forceinline__ Own own_part(const Matrices& m, int tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32, rows_first = m.rows_first;
    const int rest = divide(tile, m.by_fast), fast = tile - rest * static_cast<int>(m.by_fast.divisor);
    const int item = divide(rest, m.by_slow), slow = rest - item * static_cast<int>(m.by_slow.divisor);
    const int lanes = 1 << m.log_lanes;
    return Own{(rows_first ? fast : slow) * (lanes * kRows) + lane % lanes * kItems,
               (rows_first ? slow : fast) * (32 / lanes * kItems) + (lane >> m.log_lanes) * kItems,
               lanes * kItems, item};
  }

  // Loads kItems elements of each of the thread's rows. A group of rows lies in one line. Threads past the
  // last row or column load the last ones, and elements past the end of a row have any value.
  static __device__ __forceinline__ void load(const Matrices& m, const void* tensor, const Own& own,
                                              Words (&found)[kRows]) {
    const auto* const begin = static_cast<const unsigned char*>(tensor);
    const int column = own.column < m.columns ? own.column : (m.columns - 1) & -kItems;
    const auto* const matrix = begin + ((own.item + m.first) * m.from_rows * m.columns + column) * kItemBytes;
    const unsigned pitch = static_cast<unsigned>(m.columns * kItemBytes);
    int row[kVectors],
        left[kVectors];  // first row of a group in the source, and rows to the line's end
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int first = own.row_of(v * kItems) < m.rows ? own.row_of(v * kItems) : m.rows - 1;
      const int line = divide(first, m.by_line);
      row[v] = first - line * m.gap;
      left[v] = (line + 1) * (static_cast<int>(m.by_line.divisor) - m.gap) - row[v];
    }
    const auto from = [&](int k) {
      const int last = left[k / kItems] - 1,
                own_row = row[k / kItems] + (k % kItems < last ? k % kItems : last);
      return matrix + static_cast<unsigned long long>(static_cast<unsigned>(own_row)) * pitch;
    };
    if ((offset_in_vector(begin) | pitch % 16) == 0) {
#pragma unroll
      for (int k = 0; k < kRows; ++k) found[k] = load_vector<4>(reinterpret_cast<const unsigned*>(from(k)));
      return;
    }
    // Vectors around an element begin less than 16 bytes before it and end at most 32 bytes behind its start.
    if (from(0) - begin >= 16 && begin + m.elements * kItemBytes - from(kRows - 1) >= 32) {
#pragma unroll
      for (int half = 0; half < kRows; half += kRows / 2) {
        TwoVectors around[kRows / 2];
#pragma unroll
        for (int k = 0; k < kRows / 2; ++k) around[k] = load_around(from(half + k));
#pragma unroll
        for (int k = 0; k < kRows / 2; ++k)
          found[half + k] = select<kItemBytes>(around[k], offset_in_vector(from(half + k)));
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k) found[k] = load_elements<kItemBytes>(from(k), m.columns - column);
  }

  // Clears the rows behind the end of a line.
  static __device__ __forceinline__ void clear_zeros(const Matrices& m, const Own& own,
                                                     Words (&rows)[kRows]) {
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      const int row = own.row_of(k), line = divide(own.row_of(k / kItems * kItems), m.by_line);
      if (row - line * static_cast<int>(m.by_line.divisor) >= static_cast<int>(m.by_line.divisor) - m.gap)
        rows[k] = {};
    }
  }

  // Returns vector v of column c of the thread's rows.
  static __device__ __forceinline__ uint4 column_of(const Words (&rows)[kRows], int c, int v) {
    const Words* const own = rows + v * kItems;
    if constexpr (kItemBytes == 4) {
      return make_uint4(own[0].at[c], own[1].at[c], own[2].at[c], own[3].at[c]);
    } else {
      unsigned words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned one = own[2 * i].at[c / 2], other = own[2 * i + 1].at[c / 2];
        words[i] = c % 2 == 0 ? ptx::low_halves(one, other) : ptx::high_halves(one, other);
      }
      return make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Stores columns that begin at multiples of 16 bytes.
  static __device__ __forceinline__ void store(const Matrices& m, void* tensor, const Own& own,
                                               const Words (&rows)[kRows]) {
    auto* to = static_cast<unsigned char*>(tensor) +
               ((own.item * m.columns + own.column) * m.rows + own.row) * kItemBytes;
    const long long pitch = static_cast<long long>(m.rows) * kItemBytes;
#pragma unroll
    for (int c = 0; c < kItems; ++c) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (own.column + c < m.columns && own.row_of(v * kItems) < m.rows) {
          ptx::store_global(to + v * own.next_group * kItemBytes, column_of(rows, c, v));
        }
      }
      to += pitch;
    }
  }

  // Stores a word of a column, or the part of it before `left` elements of the column end. A column that
  // begins in the middle of a word is stored from its second element on in words, and word 0 stores the
  // first.
  static __device__ __forceinline__ void store_word(unsigned char* to, const unsigned* staged, int word,
                                                    int left) {
    const int first = word * kPerWord;
    if (kPerWord == 2 && offset_in_vector(to) / 2 % 2 != 0) {
      const bool whole = first + 3 <= left;
      const unsigned value = *staged, after = whole ? staged[1] : 0u;
      if (whole) ptx::store_global(to + 2, ptx::shifted(value, after, 16));
      if (!whole && first + 1 < left) ptx::store_global(to + 2, static_cast<unsigned short>(value >> 16));
      if (word == 0) ptx::store_global(to, static_cast<unsigned short>(value));
    } else {
      const unsigned value = *staged;
      if (first + kPerWord <= left) ptx::store_global(to, value);
      if (kPerWord == 2 && first + 1 == left) ptx::store_global(to, static_cast<unsigned short>(value));
    }
  }

  // Stores columns that begin at any element. The warp's tile lies in `staged`, column by column.
  static __device__ __forceinline__ void store_anywhere(const Matrices& m, void* tensor, const Own& own,
                                                        const Words (&rows)[kRows], unsigned* staged) {
    const int lane = static_cast<int>(threadIdx.x) % 32, lanes = 1 << m.log_lanes;
    const int row_lane = lane % lanes, column_lane = lane >> m.log_lanes;
    const int log_words = m.log_lanes + (kItemBytes == 4 ? 3 : 2),
              words = 1 << log_words;  // words per column
    const unsigned own_words = ptx::shared_address(staged) + row_lane * 16;
#pragma unroll
    for (int c = 0; c < kItems; ++c) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int at = ((column_lane * kItems + c) << log_words) + v * lanes * 4;
        ptx::store_shared(own_words + 4 * at, column_of(rows, c, v));
      }
    }
    __syncwarp();
    const int first_row = own.row - row_lane * kItems, first_column = own.column - column_lane * kItems;
    const int left = m.rows - first_row < words * kPerWord ? m.rows - first_row : words * kPerWord;
    const int columns =
        m.columns - first_column < 32 / lanes * kItems ? m.columns - first_column : 32 / lanes * kItems;
    const int together = words < 32 ? 32 >> log_words : 1;  // columns that the warp stores at once
    const long long step = static_cast<long long>(together) * m.rows * kItemBytes;
    const int first = lane >> log_words;
    auto* const begin = static_cast<unsigned char*>(tensor) +
                        ((own.item * m.columns + first_column + first) * m.rows + first_row) * kItemBytes;
    for (int word = lane & (words - 1); word < words; word += 32) {
      unsigned char* to = begin + 4 * word;
      const unsigned* from = staged + (first << log_words) + word;
#pragma unroll 4
      for (int c = first; c < columns; c += together) {
        store_word(to, from, word, left);
        to += step;
        from += together << log_words;
      }
    }
  }

  static __device__ __forceinline__ void run(const Matrices& m, const void* from, void* to,
                                             unsigned* staged) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int tile = (static_cast<int>(blockIdx.x) - m.first_block) * kWarps + warp;
    if (tile < 0 || tile >= m.tiles) return;
    const Own own = own_part(m, tile);
    Words rows[kRows];
    load(m, from, own, rows);
    if (m.gap != 0) clear_zeros(m, own, rows);
    if ((offset_in_vector(to) | m.rows * kItemBytes % 16) == 0) {
      store(m, to, own, rows);
    } else {
      store_anywhere(m, to, own, rows, staged + warp * kStagedWords);
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Tile = Turn<Config>;
  alignas(16) __shared__ unsigned staged[Tile::kWarps * Tile::kStagedWords];
  if constexpr (Config::kOverlaps) {
    ptx::launch_dependents();
    ptx::wait_for_previous_launch();
  }
  Tile::run(args.first, args.first_from, args.first_to, staged);
  Tile::run(args.second, args.second_from, args.second_to, staged);
  Tile::run(args.third, args.third_from, args.third_to, staged);
}

}  // namespace tconv3d
