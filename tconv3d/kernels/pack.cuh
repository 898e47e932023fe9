// Packs a weight for the halo kernel: every panel in the order in which tensor cores consume it, rounded to
// the operand type, swizzled, zero where there is no channel. The layout is in halo_layout.cuh.
//
// In the weight, taps are neighbours; in a panel, input channels are. So a block takes a chunk of input
// channels and kColumns output channels with all their taps: it reads them tap by tap into shared memory, and
// writes them channel by channel, for every variant and panel that wants them. It takes few, so that many
// blocks share a multiprocessor: while some wait for what they read, others write. Which thread reads what
// is arranged so that hardly anything is computed for each element.
#pragma once

#include "halo_layout.cuh"

namespace tconv3d {

struct Args {
  const void* weight;
  void* packed;
  Strides stride;        // of the weight: n is the reduced channel's, c the computed one's, then the taps'
  long long group, tap;  // from group to group; of tap 0 (the input gradient may take the taps in reverse)
};

template <class Config>
struct Pack {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kTaps = Config::kKernelD * Config::kKernelH * Config::kKernelW;
  static constexpr int kColumns = Config::kColumnsAtOnce;
  // From tap to tap, and from column to column: neither writing (a tap after the other) nor reading (pieces
  // of several columns) meets itself in a bank.
  static constexpr int kPitch = Layout::kPartItems + 1;
  static constexpr int kColumnPitch = (kTaps * kPitch + 30) / 32 * 32 + 1;
  static constexpr int kStaged = kColumns * kColumnPitch;
  static constexpr int kVariantLines = Layout::kRows / Config::kOutTile;
  static constexpr int kLines = Config::kVariants * kVariantLines;
  static constexpr int kShifts = Config::kShiftRange(Config::kSources * Config::kPatterns);
  static_assert(Config::kOutTile % kColumns == 0, "whole parts of a column tile");
  static_assert(Config::kSharedBytes >= 4 * (kStaged + 2 * kLines), "room for the taps and the lines");

  // Neighbouring threads read the taps of one (channel, column), a series.
  static constexpr int kTapThreads = kTaps > 16 ? 32 : kTaps > 8 ? 16 : kTaps > 4 ? 8 : kTaps > 2 ? 4 : kTaps;
  static constexpr int kTapRounds = (kTaps + kTapThreads - 1) / kTapThreads;
  static constexpr int kSeries = kColumns * Layout::kPartItems;
  static constexpr int kSeriesAtOnce = kThreads / kTapThreads;
  static constexpr int kSeriesRounds = (kSeries + kSeriesAtOnce - 1) / kSeriesAtOnce;

  const Args& args;
  unsigned* staged;  // [column][tap][input channel, of the part's], as bits
  int* line_tap;     // of every line of panel rows: the tap (and half) it has, or a negative number for zeros
  int* line_start;   // and where it lies in the panels of its column tile
  int tile, chunk, first_column;

  __device__ __forceinline__ Pack(const Args& args, unsigned* shared, int tile, int chunk, int first_column)
      : args(args),
        staged(shared),
        line_tap(reinterpret_cast<int*>(shared + kStaged)),
        line_start(line_tap + kLines),
        tile(tile),
        chunk(chunk),
        first_column(first_column) {}

  __device__ __forceinline__ long long tap_offset(int tap) const {
    const int kw = tap % Config::kKernelW, kh = tap / Config::kKernelW % Config::kKernelH;
    const int kd = tap / Config::kKernelW / Config::kKernelH;
    return kd * args.stride.d + kh * args.stride.h + kw * args.stride.w;
  }

  // This thread's element of a round: its tap of another series.
  struct Element {
    int column, slot;
    bool exists;
  };
  __device__ __forceinline__ Element element(int round) const {
    const int series = static_cast<int>(threadIdx.x) / kTapThreads + round * kSeriesAtOnce;
    const int column = series % kColumns, slot = series / kColumns;
    return {column, slot, kSeries % kSeriesAtOnce == 0 || series < kSeries};
  }
  __device__ __forceinline__ Scalar load(const Scalar* from, const Element& e) const {
    const auto channels = Layout::channels(chunk, e.slot / Layout::kPieceItems);
    const int item = e.slot % Layout::kPieceItems, out = Layout::first_out(tile) + first_column + e.column;
    if (!e.exists || item >= channels.count || out >= Config::kOut) return Scalar{};
    const long long group = (Layout::first_group(tile) + channels.group) * args.group;
    return load_constant(from + group + (channels.first + item) * args.stride.n + out * args.stride.c);
  }

  // Halves are made when they are written.
  static __device__ __forceinline__ unsigned staged_bits(Scalar value) {
    if constexpr (Config::kHalves == 2) {
      return ptx::float_to_bits(value);
    } else {
      return OperandOf<Scalar>::bits(value);
    }
  }
  static __device__ __forceinline__ unsigned written_bits(unsigned bits, int half) {
    if constexpr (Config::kHalves == 2) {
      return Layout::operand(ptx::bits_to_float(bits), half);
    } else {
      return bits;
    }
  }

  // The panels' lines are described while the first weights are on their way.
  __device__ __forceinline__ void stage() {
    const Scalar* from = static_cast<const Scalar*>(args.weight) + args.tap;
    for (int i = 0; i < kTapRounds; ++i) {
      const int tap = static_cast<int>(threadIdx.x) % kTapThreads + i * kTapThreads;
      const bool exists = kTaps % kTapThreads == 0 || tap < kTaps;
      const Scalar* series = from + tap_offset(tap);
      Scalar values[kSeriesRounds];
#pragma unroll
      for (int k = 0; k < kSeriesRounds; ++k) values[k] = exists ? load(series, element(k)) : Scalar{};
      if (i == 0) describe_lines();
#pragma unroll
      for (int k = 0; k < kSeriesRounds; ++k) {
        const Element e = element(k);
        if (exists && e.exists)
          staged[e.column * kColumnPitch + tap * kPitch + e.slot] = staged_bits(values[k]);
      }
    }
  }

  __device__ __forceinline__ void describe_lines() {
    for (int i = threadIdx.x; i < kLines; i += kThreads) {
      const int variant = i / kVariantLines, line = i % kVariantLines;
      int source = 0, shift = 0, place = 0, row = line * Config::kOutTile, fields_of_half = 1;
      if constexpr (Config::kSources == 1) {
#pragma unroll
        for (int p = 0; p < Config::kPatterns; ++p) {
          const int fields = Layout::panel_rows(p) / Config::kOutTile;
          const int local = line - Layout::rows_before(0, p) / Config::kOutTile;
          if (local >= 0 && local < fields * Layout::shifts(0, p)) {
            shift = Layout::first_shift(0, p) + local / fields;
            place = local % fields;
            fields_of_half = fields / Config::kHalves;
          }
        }
      } else {
        constexpr int kPanelFields = Layout::panel_rows(0) / Config::kOutTile;
        shift = line / kPanelFields;
        place = line % kPanelFields;
        fields_of_half = kPanelFields / Config::kHalves;
        while (shift >= Layout::first_shift(source + 1, 0)) ++source;
        row -= Layout::first_shift(source, 0) * Layout::panel_rows(0);
      }
      const int tap = Config::kTap(variant * kShifts + shift, place % fields_of_half);
      line_tap[i] = tap < 0 ? tap : place / fields_of_half * kTaps + tap;
      line_start[i] = Layout::chunk_start(source, chunk) + (row + first_column) * Layout::kPartBytes;
    }
  }

  __device__ __forceinline__ void write() const {
    constexpr int kPieces = kLines * kColumns * Layout::kPartPieces;
    for (int i = threadIdx.x; i < kPieces; i += kThreads) {
      const int piece = i % Layout::kPartPieces, column = i / Layout::kPartPieces % kColumns;
      const int line = i / (Layout::kPartPieces * kColumns), tap = line_tap[line];
      Piece<Scalar> values;
      if (tap >= 0) {
        const unsigned* from =
            staged + column * kColumnPitch + tap % kTaps * kPitch + piece * Layout::kPieceItems;
#pragma unroll
        for (int k = 0; k < Layout::kPieceItems; ++k) {
          values.set_bits(k, written_bits(from[k], tap / kTaps));
        }
      }
      const int at = line_start[line] + column * Layout::kPartBytes + piece * 16;
      unsigned char* panels = static_cast<unsigned char*>(args.packed) +
                              static_cast<long long>(tile + line / kVariantLines) * Layout::kTileBytes;
      *reinterpret_cast<uint4*>(panels + Layout::template swizzle<Layout::kPartPieces>(at)) = values.vector();
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Layout = HaloLayout<Config>;
  constexpr int kParts = Config::kOutTile / Config::kColumnsAtOnce;
  ptx::launch_dependents();
  const int block = static_cast<int>(blockIdx.x), rest = block / kParts;
  Pack<Config> pack(args, dynamic_shared<unsigned>(), rest / Layout::kChunks * Config::kVariants,
                    rest % Layout::kChunks, block % kParts * Config::kColumnsAtOnce);
  pack.stage();
  __syncthreads();
  pack.write();
}

}  // namespace tconv3d
