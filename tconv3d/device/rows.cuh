// Writes a tensor as rows of channels, one row for each position in the order of the volume, with values
// rounded to operands of tensor cores. The halo kernel can copy such rows to shared memory without passing
// them through registers.
//
// A block has 128 bytes of the channels of some positions. Neighbouring threads read neighbouring positions
// and write neighbouring channels; in between the values pass through shared memory. If 16-bit types are
// aligned so that 8 positions of a channel can be loaded at once, the store to shared memory transposes them.
// A tensor that has rows of channels already is only rounded.
#pragma once

#include "operands.cuh"

namespace tconv3d {

template <class Config>
struct Rows {
  using Scalar = typename Config::Scalar;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kItems = 16 / static_cast<int>(sizeof(Scalar));  // elements of a 16-byte piece
  static constexpr int kChannels = 8 * kItems, kPositions = Config::kPositions;
  // Words from position to position, odd to avoid bank conflicts.
  static constexpr int kPitch = kChannels + 1;
  static constexpr int kTiles = (Config::kAllChannels + kChannels - 1) / kChannels;
  static constexpr int kAtOnce = Config::kPairs ? 2 : 1;
  static constexpr int kLoads = kChannels * kPositions / kThreads / kAtOnce;
  static_assert(kThreads % kPositions == 0 && kChannels * kPositions % kThreads == 0, "even shares");
  static_assert(Config::kSharedBytes >= (Config::kVectors ? 128 : 4 * kPitch) * kPositions,
                "room for the positions");

  static __device__ __forceinline__ long long offset(const Args& args, long long position) {
    const int line = divide(static_cast<int>(position), args.by_w);
    const int sheet = divide(line, args.by_h);
    const int w = static_cast<int>(position) - line * static_cast<int>(args.by_w.divisor);
    const int h = line - sheet * static_cast<int>(args.by_h.divisor);
    return sheet * args.stride.d + h * args.stride.h + w * args.stride.w;
  }

  // Reads values into shared memory as operand bits, by position and channel. A thread loads kAtOnce
  // neighbouring positions of some channels.
  static __device__ __forceinline__ void read(const Args& args, unsigned* staged, int n, long long first,
                                              int first_channel) {
    constexpr int kOwn = kPositions / kAtOnce;  // threads of a channel
    const int own = static_cast<int>(threadIdx.x) % kOwn * kAtOnce;
    const int channel = static_cast<int>(threadIdx.x) / kOwn;
    if (first + own >= args.volume) return;
    const Scalar* x = static_cast<const Scalar*>(args.x) + n * args.stride.n + offset(args, first + own) +
                      (first_channel + channel) * args.stride.c;
    constexpr int kStep = kThreads / kOwn;
    Vector<Scalar, kAtOnce> values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      values[i] = {};
      if (first_channel + channel + i * kStep < Config::kAllChannels)
        values[i] = load_vector<kAtOnce>(x + i * kStep * args.stride.c);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        staged[(own + k) * kPitch + channel + i * kStep] = OperandOf<Scalar>::bits(values[i].at[k]);
      }
    }
  }

  static __device__ __forceinline__ void write(const Args& args, const unsigned* staged, int n,
                                               long long first, int first_channel) {
    Scalar* rows = static_cast<Scalar*>(args.rows) + (n * args.volume + first) * Config::kAllChannels;
    for (int i = threadIdx.x; i < 8 * kPositions; i += kThreads) {
      const int position = i / 8, channel = i % 8 * kItems;
      if (first + position >= args.volume || first_channel + channel >= Config::kAllChannels) continue;
      Vector<Scalar, kItems> piece;
      const unsigned* from = staged + position * kPitch + channel;
#pragma unroll
      for (int k = 0; k < kItems; ++k) piece.at[k] = to_scalar(from[k]);
      store_vector(rows + static_cast<long long>(position) * Config::kAllChannels + first_channel + channel,
                   piece);
    }
  }
  // Reads vectors of 8 positions of a channel. A warp loads 8 channels and 32 positions at a time: lane 4*c +
  // q has positions 8*q to 8*q + 7 of channel c, two in a word. So word k of all lanes is a matrix of the
  // positions 2*k and 2*k + 1 of each 8, by channels, and the transposing store writes it to rows of 8
  // pieces.
  static constexpr int kTurns = kChannels / 8 * (kPositions / 32), kWarps = kThreads / 32;
  static __device__ __forceinline__ void read_vectors(const Args& args, int n, long long first,
                                                      int first_channel) {
    static_assert(!Config::kVectors || kTurns % kWarps == 0, "even shares");
    const unsigned staged = ptx::shared_address(dynamic_shared<unsigned char>());
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    uint4 vectors[kTurns / kWarps];
#pragma unroll
    for (int i = 0; i < kTurns / kWarps; ++i) {
      const int turn = i * kWarps + warp, channel = turn % (kChannels / 8) * 8 + lane / 4;
      const long long position = first + turn / (kChannels / 8) * 32 + lane % 4 * 8;
      vectors[i] = make_uint4(0, 0, 0, 0);
      if (position < args.volume && first_channel + channel < Config::kAllChannels) {
        const Scalar* x = static_cast<const Scalar*>(args.x) + n * args.stride.n + position;
        vectors[i] = *reinterpret_cast<const uint4*>(x + (first_channel + channel) * args.stride.c);
      }
    }
    const int own = lane % 8 / 2 * 8 + lane / 8 * 2 + lane % 2;  // position whose row this lane addresses
#pragma unroll
    for (int i = 0; i < kTurns / kWarps; ++i) {
      const int turn = i * kWarps + warp, position = turn / (kChannels / 8) * 32 + own;
      ptx::store_transposed(staged + place(position, turn % (kChannels / 8)), vectors[i]);
    }
  }
  // Returns where a piece of a position's row lies, in bytes; the swizzle avoids bank conflicts of both reads
  // and writes.
  static __device__ __forceinline__ int place(int position, int piece) {
    return 128 * position + 16 * (piece ^ (position / 8 % 4 * 2 + position % 2));
  }
  static __device__ __forceinline__ void write_vectors(const Args& args, int n, long long first,
                                                       int first_channel) {
    const unsigned staged = ptx::shared_address(dynamic_shared<unsigned char>());
    Scalar* rows = static_cast<Scalar*>(args.rows) + (n * args.volume + first) * Config::kAllChannels;
    const int piece = static_cast<int>(threadIdx.x) % 8, channel = first_channel + piece * kItems;
#pragma unroll
    for (int i = 0; i < 8 * kPositions / kThreads; ++i) {
      const int position = static_cast<int>(threadIdx.x) / 8 + i * (kThreads / 8);
      const uint4 words = ptx::load_shared(staged + place(position, piece));
      if (first + position < args.volume && channel < Config::kAllChannels)
        ptx::store_global(rows + static_cast<long long>(position) * Config::kAllChannels + channel, words);
    }
  }

  // Rounds a tensor that has rows of channels already, piece by piece.
  static __device__ __forceinline__ void round(const Args& args, int n, long long first, int first_channel) {
    constexpr int kPieces = 8 * kPositions / kThreads;
    const Scalar* x = static_cast<const Scalar*>(args.x) + n * args.stride.n;
    Scalar* rows = static_cast<Scalar*>(args.rows) + n * args.volume * Config::kAllChannels;
    const int channel = first_channel + static_cast<int>(threadIdx.x) % 8 * kItems;
    if (channel >= Config::kAllChannels) return;
    Vector<Scalar, kItems> pieces[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const long long position = first + static_cast<int>(threadIdx.x) / 8 + i * (kThreads / 8);
      if (position < args.volume) pieces[i] = load_vector<kItems>(x + offset(args, position) + channel);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const long long position = first + static_cast<int>(threadIdx.x) / 8 + i * (kThreads / 8);
#pragma unroll
      for (int k = 0; k < kItems; ++k) pieces[i].at[k] = to_scalar(OperandOf<Scalar>::bits(pieces[i].at[k]));
      if (position < args.volume) store_vector(rows + position * Config::kAllChannels + channel, pieces[i]);
    }
  }

  static __device__ __forceinline__ Scalar to_scalar(unsigned bits) {
    if constexpr (sizeof(Scalar) == 4) {
      return ptx::bits_to_float(bits);
    } else {
      return Scalar{static_cast<unsigned short>(bits)};
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Tile = Rows<Config>;
  if constexpr (Config::kOverlaps) ptx::launch_dependents();
  [[maybe_unused]] unsigned* staged = dynamic_shared<unsigned>();
  const int block = static_cast<int>(blockIdx.x), rest = block / Tile::kTiles;
  const int n = rest / args.blocks, first_channel = block % Tile::kTiles * Tile::kChannels;
  const long long first = static_cast<long long>(rest % args.blocks) * Tile::kPositions;
  if constexpr (Config::kAlready) {
    Tile::round(args, n, first, first_channel);
  } else if constexpr (Config::kVectors) {
    Tile::read_vectors(args, n, first, first_channel);
    __syncthreads();
    Tile::write_vectors(args, n, first, first_channel);
  } else {
    Tile::read(args, staged, n, first, first_channel);
    __syncthreads();
    Tile::write(args, staged, n, first, first_channel);
  }
  // Ending after the previous launch lets a kernel that waits for this launch also read the previous launch's
  // results.
  if constexpr (Config::kOverlaps) ptx::wait_for_previous_launch();
}

}  // namespace tconv3d
