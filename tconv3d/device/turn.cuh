// Transposes channels-last tensors to contiguous ones, or contiguous ones to channels-last: up to three
// tensors in a launch, each a batch of matrices that are transposed one by one.
//
// A block has a tile of one matrix: neighbouring threads read neighbouring columns and write neighbouring
// rows. In between the values pass through shared memory, whose rows are an odd number of words apart to
// avoid bank conflicts. Elements of 16 bits are moved in pairs if the matrices have an even number of rows.
#pragma once

#include "common.cuh"

namespace tconv3d {

template <class C>
struct Turn {
  static constexpr int kThreads = C::kThreads;
  static constexpr int kWords = C::kTileWords, kOwn = kWords / kThreads;  // words of a tile and of a thread
  static_assert(kWords % (2 * kThreads) == 0, "even shares");

  struct Tile {
    long long read, written;  // offsets of the matrix in elements
    long long row, column;
  };
  static __device__ __forceinline__ Tile tile_at(const Matrices& m, int block) {
    const int rest = block / m.tiles_of_columns;
    const long long item = rest / m.tiles_of_rows;
    return Tile{(item + m.first) * (m.rows * m.columns), item * (m.rows * m.columns),
                static_cast<long long>(rest % m.tiles_of_rows) << m.log_rows,
                static_cast<long long>(block % m.tiles_of_columns) << m.log_columns};
  }

  // Transposes a tile of elements of 32 or 16 bits, one element to a word of shared memory.
  template <class Bits>
  static __device__ __forceinline__ void turn(const Matrices& m, int block, const void* from, void* to,
                                              unsigned* staged) {
    const Tile tile = tile_at(m, block);
    const int pitch = (1 << m.log_columns) + 1, thread = static_cast<int>(threadIdx.x);
    const int size = 1 << (m.log_rows + m.log_columns);
    const Bits* const read = static_cast<const Bits*>(from) + tile.read;
    Bits values[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = i * kThreads + thread;
      const long long row = tile.row + (at >> m.log_columns);
      const long long column = tile.column + (at & ((1 << m.log_columns) - 1));
      const bool inside = at < size && row < m.rows && column < m.columns;
      values[i] = inside ? read[row * m.columns + column] : Bits{};
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = i * kThreads + thread;
      if (at < size) staged[(at >> m.log_columns) * pitch + (at & ((1 << m.log_columns) - 1))] = values[i];
    }
    __syncthreads();
    Bits* const written = static_cast<Bits*>(to) + tile.written;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = i * kThreads + thread;
      const int r = at & ((1 << m.log_rows) - 1), c = at >> m.log_rows;
      if (at < size && tile.row + r < m.rows && tile.column + c < m.columns) {
        written[(tile.column + c) * m.rows + tile.row + r] = static_cast<Bits>(staged[r * pitch + c]);
      }
    }
  }

  // Transposes a tile of words of two 16-bit elements: reads two columns of a row, and writes two rows of a
  // column. Where the number of columns is odd, every other row begins in the middle of a word: two columns
  // of such a row are joined from two words. An even number of rows makes the matrix a whole number of words,
  // so that all words with an element of the row lie inside of it.
  static __device__ __forceinline__ void turn_pairs(const Matrices& m, int block, const void* from, void* to,
                                                    unsigned* staged) {
    TCONV3D_ASSUME(m.rows % 2 == 0);
    const Tile tile = tile_at(m, block);
    const int log_words = m.log_columns - 1, mask = (1 << log_words) - 1;
    const int pitch = (1 << log_words) + 1, thread = static_cast<int>(threadIdx.x);
    const int size = 1 << (m.log_rows + log_words);
    const unsigned* const read = static_cast<const unsigned*>(from) + tile.read / 2;
    unsigned values[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = i * kThreads + thread;
      const long long row = tile.row + (at >> log_words), column = tile.column + 2 * (at & mask);
      const bool inside = at < size && row < m.rows && column < m.columns;
      const long long place = row * m.columns + column;
      values[i] = inside ? read[place / 2] : 0u;
      if (inside && place % 2 != 0) {
        const unsigned next = column + 1 < m.columns ? read[place / 2 + 1] : 0u;
        values[i] = values[i] >> 16 | next << 16;
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = i * kThreads + thread;
      if (at < size) staged[(at >> log_words) * pitch + (at & mask)] = values[i];
    }
    __syncthreads();
    unsigned* const written = static_cast<unsigned*>(to) + tile.written / 2;
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i) {
      const int at = i * kThreads + thread;
      const int r = (at & ((1 << (m.log_rows - 1)) - 1)) * 2, c = at >> (m.log_rows - 1);
      const long long row = tile.row + r, column = tile.column + 2 * c;
      if (2 * at >= size || row >= m.rows || column >= m.columns) continue;
      const unsigned one = staged[r * pitch + c], other = staged[(r + 1) * pitch + c];
      written[(column * m.rows + row) / 2] = (one & 0xFFFFu) | other << 16;
      if (column + 1 == m.columns) continue;
      written[((column + 1) * m.rows + row) / 2] = one >> 16 | (other & 0xFFFF0000u);
    }
  }

  static __device__ __forceinline__ void run(const Matrices& m, const void* from, void* to,
                                             unsigned* staged) {
    const int block = static_cast<int>(blockIdx.x) - m.first_block;
    if (block < 0 || block >= m.blocks) return;
    if constexpr (C::kItemBytes == 4) {
      turn<unsigned>(m, block, from, to, staged);
    } else if (m.pairs) {
      turn_pairs(m, block, from, to, staged);
    } else {
      turn<unsigned short>(m, block, from, to, staged);
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Tile = Turn<Config>;
  __shared__ unsigned staged[Config::kTileWords + Config::kMostRows];
  ptx::launch_dependents();
  ptx::wait_for_previous_launch();
  Tile::run(args.first, args.first_from, args.first_to, staged);
  Tile::run(args.second, args.second_from, args.second_to, staged);
  Tile::run(args.third, args.third_from, args.third_to, staged);
}

}  // namespace tconv3d
