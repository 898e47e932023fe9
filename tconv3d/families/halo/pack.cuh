// Packs a weight for the halo kernel: every panel in the order in which tensor cores consume it, rounded to
// the operand type, swizzled, zero where there is no channel. The layout is in halo_layout.cuh.
//
// In the weight, taps are neighbours (or output channels, if it is channels-last); in a panel, input channels
// are. So a block takes a chunk of input channels, kColumns output channels and kTapsAtOnce taps. It reads
// them into shared memory in the order of global memory, each warp a run of neighbours, and writes them
// channel by channel, for every variant and panel that needs them. A block takes few weights, so that many
// blocks share a multiprocessor: while some wait for loads, others write. Little is computed for each
// element.
#pragma once

#include "halo_layout.cuh"

namespace tconv3d {

template <class Config>
struct Pack {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  static constexpr int kThreads = Config::kThreads;
  static constexpr int kTaps = Config::kKernelD * Config::kKernelH * Config::kKernelW;
  static constexpr int kColumns = Config::kColumnsAtOnce;
  // kPitch is the pitch of taps and kColumnPitch the pitch of columns in shared memory, in words. They avoid
  // bank conflicts both when taps are written one after the other and when pieces of several columns are
  // read.
  static constexpr int kTapsAtOnce = Config::kTapsAtOnce, kTapParts = (kTaps + kTapsAtOnce - 1) / kTapsAtOnce;
  static constexpr int kPitch = Layout::kPartItems + 1;
  static constexpr int kColumnPitch = (kTapsAtOnce * kPitch + 30) / 32 * 32 + 1;
  // Columns that are neighbours in memory, and aligned, are copied 16 bytes at a time, and lie in shared
  // memory in the same order: by tap, channel and column.
  static constexpr bool kVectors = Config::kColumnVectors;
  using Staged = typename Choose<kVectors, Scalar, unsigned>::type;  // elements, or their bits
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Scalar)), kVectorPitch = kColumns + kVector;
  static constexpr int kStaged =
      kVectors ? kTapsAtOnce * Layout::kPartItems * kVectorPitch * static_cast<int>(sizeof(Scalar)) / 4
               : kColumns * kColumnPitch;
  // Where lanes load four neighbouring channels of a row (halo_registers.cuh), these four stand for the same
  // lane's K index in the two halves of one step and then of the next. A piece of a panel therefore holds
  // every fourth of 16 channels.
  static constexpr bool kWoven = Config::kLaneOrder;
  static_assert(!kWoven || (sizeof(Scalar) == 4 && Layout::kPartItems % 16 == 0), "blocks of 16 floats");
  static constexpr int kVariantLines = Layout::kRows / Config::kOutTile;
  static constexpr int kLines = Config::kVariants * kVariantLines;
  static constexpr int kShifts = Config::kShiftRange(Config::kSources * Config::kPatterns);
  static_assert(Config::kOutTile % kColumns == 0, "whole parts of a column tile");
  static_assert(Config::kSharedBytes >= 4 * (kStaged + 2 * kLines + 1), "room for the taps and the lines");

  // The contents of a run of kLength neighbours in memory: taps of neighbouring columns or of neighbouring
  // channels, columns, or channels. With kOfTaps a run has the taps of one column and channel, at any
  // strides.
  static constexpr int kOfTaps = 0, kColumnTaps = 1, kChannelTaps = 2, kOfColumns = 3, kOfChannels = 4;
  static constexpr int kRun = Config::kRun;
  static_assert(kTapParts == 1 || kRun == kOfColumns, "all taps of a run");
  static_assert(kRun == kOfTaps || (Config::kGroupsPerTile == 1 && Config::kMerged == 1),
                "channels of one group");
  static_assert(!kVectors || (kRun == kOfColumns && kColumns % kVector == 0), "vectors of columns");
  static constexpr int kLength = kRun == kColumnTaps    ? kColumns * kTaps
                                 : kRun == kChannelTaps ? Layout::kPartItems * kTaps
                                 : kRun == kOfColumns   ? kColumns
                                 : kRun == kOfChannels  ? Layout::kPartItems
                                                        : kTaps;
  static constexpr int kRuns = kColumns * kTapsAtOnce * Layout::kPartItems / kLength;
  static constexpr int kUnits = kRuns * ((kLength + 31) / 32);  // units of up to 32 elements of a run
  static constexpr int kWarps = kThreads / 32, kInFlight = 8;

  const Args& args;
  Staged* staged;  // [column][tap][input channel of the part]; vectors: [tap][channel][column]
  int* line_tap;  // for every line of panel rows: the tap (and half) it holds, or a negative number for zeros
  int* line_start;  // for every line: its offset in 16 bytes from the panels of the first variant
  int* lines;       // number of lines that take taps of this block
  int tile, chunk, first_column, first_tap;

  __device__ __forceinline__ Pack(const Args& args, unsigned* shared, int tile, int chunk, int first_column,
                                  int first_tap)
      : args(args),
        staged(reinterpret_cast<Staged*>(shared)),
        line_tap(reinterpret_cast<int*>(shared + kStaged)),
        line_start(line_tap + kLines),
        lines(line_start + kLines),
        tile(tile),
        chunk(chunk),
        first_column(first_column),
        first_tap(first_tap) {}

  __device__ __forceinline__ long long tap_offset(int tap) const {
    const int kw = tap % Config::kKernelW, kh = tap / Config::kKernelW % Config::kKernelH;
    const int kd = tap / Config::kKernelW / Config::kKernelH;
    return kd * args.stride.d + kh * args.stride.h + kw * args.stride.w;
  }

  // An element of a run.
  struct Item {
    int column, slot, tap;  // tap is counted from the block's first
  };
  static __device__ __forceinline__ Item item(int run, int place) {
    if constexpr (kRun == kColumnTaps) return {place / kTaps, run, in_order(place % kTaps)};
    if constexpr (kRun == kChannelTaps) return {run, place / kTaps, in_order(place % kTaps)};
    if constexpr (kRun == kOfColumns) return {place, run / kTapsAtOnce, run % kTapsAtOnce};
    if constexpr (kRun == kOfChannels) return {run / kTapsAtOnce, place, run % kTapsAtOnce};
    return {run % kColumns, run / kColumns, place};
  }
  // Returns the tap at a place in memory. The input gradient may take taps in reverse: then the last tap is
  // the first in memory.
  static __device__ __forceinline__ int in_order(int tap) {
    return Config::kReversed ? kTaps - 1 - tap : tap;
  }

  // The address of this lane's element among 32 of a run, and whether it exists.
  struct From {
    const Scalar* address;
    bool exists;
  };
  __device__ __forceinline__ From from(int unit, int lane) const {
    const int run = unit % kRuns, place = unit / kRuns * 32 + lane;
    const Item first = item(run, 0);
    const auto channels = Layout::channels(chunk, first.slot / Layout::kPieceItems);
    const int of_piece = first.slot % Layout::kPieceItems, out = Layout::first_out(tile) + first_column;
    const int columns = Config::kOut - out - first.column;
    const int left = Config::kIn - channels.first - of_piece;  // channels of one group
    const int room = kRun == kColumnTaps    ? columns * kTaps
                     : kRun == kChannelTaps ? left * kTaps
                     : kRun == kOfColumns   ? columns
                     : kRun == kOfChannels  ? left
                                            : kTaps;
    // A group may merge kMerged groups of the layer: weights between channels of different groups are zero.
    constexpr int kOwnIn = Config::kIn / Config::kMerged, kOwnOut = Config::kOut / Config::kMerged;
    const int channel = channels.first + of_piece, column = out + first.column;
    const bool between = Config::kMerged > 1 && channel / kOwnIn != column / kOwnOut;
    const bool exists = of_piece < channels.count && columns > 0 && first_tap + first.tap < kTaps &&
                        place < (room < kLength ? room : kLength) && !between;
    const Scalar* weight = static_cast<const Scalar*>(args.weight);
    if (!exists) return {weight, false};
    const int first_group = (Layout::first_group(tile) + channels.group) * Config::kMerged;
    const long long group = (Config::kMerged > 1 ? first_group + channel / kOwnIn : first_group) * args.group;
    const Scalar* start = weight + args.tap + group +
                          (Config::kMerged > 1 ? channel % kOwnIn : channel) * args.stride.n +
                          (Config::kMerged > 1 ? column % kOwnOut : column) * args.stride.c;
    if constexpr (kRun == kOfTaps) return {start + tap_offset(place), true};
    return {start + tap_offset(first_tap + first.tap) + place, true};
  }
  __device__ __forceinline__ Staged* to(int unit, int lane) const {
    const Item at = item(unit % kRuns, unit / kRuns * 32 + lane);
    return staged + at.column * kColumnPitch + at.tap * kPitch + at.slot;
  }
  static __device__ __forceinline__ bool in_run(int unit, int lane) {
    return kLength % 32 == 0 || unit / kRuns * 32 + lane < kLength;
  }

  // Floats are copied past the registers by asynchronous copies, all at once, and rounded when they are
  // written.
  static constexpr bool kCopied = sizeof(Scalar) == 4;
  static __device__ __forceinline__ unsigned written_bits(Staged staged, int half) {
    if constexpr (kVectors) {
      return Layout::operand(staged, half);
    } else if constexpr (kCopied) {
      return Layout::operand(ptx::bits_to_float(staged), half);
    } else {
      return staged;
    }
  }

  __device__ __forceinline__ void copy_vectors() const {
    constexpr int kAcross = kColumns / kVector;
    const int out = Layout::first_out(tile) + first_column;
    const Scalar* weight = static_cast<const Scalar*>(args.weight) + args.tap +
                           Layout::first_group(tile) * args.group + out * args.stride.c;
#pragma unroll 4
    for (int i = threadIdx.x; i < kTapsAtOnce * Layout::kPartItems * kAcross; i += kThreads) {
      const int column = i % kAcross * kVector, line = i / kAcross;
      const int slot = line % Layout::kPartItems, tap = first_tap + line / Layout::kPartItems;
      const int channel = chunk * Layout::kPartItems + slot;
      const bool exists = channel < Config::kIn && tap < kTaps && out + column < Config::kOut;
      const long long offset = channel * args.stride.n + tap_offset(tap) + column;
      ptx::copy_words_once<4>(staged + line * kVectorPitch + column, weight + (exists ? offset : 0), exists);
    }
  }

  // Stages the block's weights in shared memory. The panels' lines are described while the first loads are in
  // flight.
  __device__ __forceinline__ void stage() {
    // The shuffle broadcasts lane 0's value, so that the compiler knows the warp index to be warp-uniform.
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (kVectors) {
      copy_vectors();
      ptx::copy_commit();
      find_lines(warp, lane);
      ptx::copy_wait<0>();
    } else if constexpr (kCopied) {
#pragma unroll 4
      for (int unit = warp; unit < kUnits; unit += kWarps) {
        const From item = from(unit, lane);
        if (in_run(unit, lane)) ptx::copy_words<1>(to(unit, lane), item.address, item.exists);
      }
      ptx::copy_commit();
      find_lines(warp, lane);
      ptx::copy_wait<0>();
    } else {
      find_lines(warp, lane);
#pragma unroll 1
      for (int first = warp; first < kUnits; first += kWarps * kInFlight) {
        Scalar values[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          const int unit = first + k * kWarps;
          const From item = from(unit, lane);
          values[k] = unit < kUnits && item.exists ? load_constant(item.address) : Scalar{};
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          const int unit = first + k * kWarps;
          if (unit < kUnits && in_run(unit, lane)) *to(unit, lane) = OperandOf<Scalar>::bits(values[k]);
        }
      }
    }
  }

  // Finds the lines that take taps of this block: all lines if it has all taps, otherwise one warp selects
  // them.
  __device__ __forceinline__ void find_lines(int warp, int lane) {
    if constexpr (kTapParts == 1) {
      for (int i = threadIdx.x; i < kLines; i += kThreads) describe_line(i, line_tap[i], line_start[i]);
      if (threadIdx.x == 0) *lines = kLines;
    } else if (warp == 0) {
      int found = 0;
      for (int first = 0; first < kLines; first += 32) {
        int tap = Config::kNotPacked, start = 0;
        if (first + lane < kLines) describe_line(first + lane, tap, start);
        const int place = (tap < 0 ? 0 : tap % kTaps) - first_tap;  // zeros are written with the first tap
        const int own = tap != Config::kNotPacked && place >= 0 && place < kTapsAtOnce;
        int rank = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(0xFFFFFFFFu, rank, step);
          if (lane >= step) rank += before;
        }
        if (own) {
          line_tap[found + rank - 1] = tap;
          line_start[found + rank - 1] = start;
        }
        found += __shfl_sync(0xFFFFFFFFu, rank, 31);
      }
      if (lane == 0) *lines = found;
    }
  }
  __device__ __forceinline__ void describe_line(int i, int& tap_of_line, int& start) const {
    const int variant = i / kVariantLines, line = i % kVariantLines;
    int shift = 0, place = 0, row = line * Config::kOutTile, fields_of_half = 1;
    if constexpr (Config::kSources == 1) {
      int before = 0;  // rows of this variant's earlier patterns
#pragma unroll
      for (int p = 0; p < Config::kPatterns; ++p) {
        const int fields = Layout::panel_rows(p) / Config::kOutTile;
        const int local = line - Layout::rows_before(0, p) / Config::kOutTile;
        if (local >= 0 && local < fields * Layout::shifts(0, p)) {
          shift = Layout::first_shift(0, p) + local / fields;
          place = local % fields;
          fields_of_half = fields / Config::kHalves;
          row = before + local * Config::kOutTile;
        }
        before += Layout::panel_rows(p) * Layout::own_shifts(variant, 0, p);
      }
      row += Layout::kChunks * Layout::variant_rows(variant) + chunk * before;
    } else {
      constexpr int kPanelFields = Layout::panel_rows(0) / Config::kOutTile;
      shift = line / kPanelFields;
      place = line % kPanelFields;
      fields_of_half = kPanelFields / Config::kHalves;
      int source = 0;
      while (shift >= Layout::first_shift(source + 1, 0)) ++source;
      row += Layout::chunk_start(source, chunk) / Layout::kPartBytes -
             Layout::first_shift(source, 0) * Layout::panel_rows(0);
    }
    const int tap = Config::kTap(variant * kShifts + shift, place % fields_of_half);
    tap_of_line = tap < 0 ? tap : place / fields_of_half * kTaps + tap;
    start = row * (Layout::kPartBytes / 16);
  }

  // A thread has the same piece of the same column in every line, and therefore always the same swizzle.
  __device__ __forceinline__ void write() const {
    constexpr int kPieces = kColumns * Layout::kPartPieces;  // pieces of a line
    constexpr int kAtOnce = kPieces < kThreads ? kThreads / kPieces : 1;
    for (int i = threadIdx.x % (kAtOnce * kPieces); i < kAtOnce * kPieces; i += kThreads) {
      // With kVectors neighbouring threads read neighbouring columns, at most 16, so that a warp still writes
      // whole sectors.
      [[maybe_unused]] constexpr int kNear = kColumns < 16 ? kColumns : 16;
      [[maybe_unused]] const int of_line = i % kPieces;
      const int piece = kVectors ? of_line / kNear % Layout::kPartPieces : i % Layout::kPartPieces;
      const int column = kVectors ? of_line % kNear + of_line / (kNear * Layout::kPartPieces) * kNear
                                  : i / Layout::kPartPieces % kColumns;
      const int offset = Layout::column_of(first_column + column) * Layout::kPartBytes + piece * 16;
      unsigned char* to = static_cast<unsigned char*>(args.packed) + Layout::tile_start(tile) +
                          Layout::template swizzle<Layout::kPartPieces>(offset);
      const int item = kWoven ? piece / 4 * 16 + piece % 4 : piece * Layout::kPieceItems;
      const Staged* from =
          kVectors ? staged + item * kVectorPitch + column : staged + column * kColumnPitch + item;
      const int count = *lines;
      const int own = static_cast<int>(threadIdx.x) < kAtOnce * kPieces ? i / kPieces : count;
      for (int line = own; line < count; line += kAtOnce) write_line(line, from, to);
    }
  }
  __device__ __forceinline__ void write_line(int line, const Staged* from, unsigned char* to) const {
    constexpr int kItemStep = (kVectors ? kVectorPitch : 1) * (kWoven ? 4 : 1);
    constexpr int kTapStep = kVectors ? Layout::kPartItems * kVectorPitch : kPitch;
    const int tap = line_tap[line];
    if (tap == Config::kNotPacked) return;
    Piece<Scalar> values;
    if (tap >= 0) {
      const Staged* first = from + (tap % kTaps - first_tap) * kTapStep;
#pragma unroll
      for (int k = 0; k < Layout::kPieceItems; ++k) {
        values.set_bits(k, written_bits(first[k * kItemStep], tap / kTaps));
      }
    }
    *reinterpret_cast<uint4*>(to + 16ull * static_cast<unsigned>(line_start[line])) = values.vector();
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Layout = HaloLayout<Config>;
  constexpr int kParts = Config::kOutTile / Config::kColumnsAtOnce;
  ptx::launch_dependents();
  constexpr int kTapParts = Pack<Config>::kTapParts;
  const int own = static_cast<int>(blockIdx.x), block = own / kTapParts, rest = block / kParts;
  Pack<Config> pack(args, dynamic_shared<unsigned>(), rest / Layout::kChunks * Config::kVariants,
                    rest % Layout::kChunks, block % kParts * Config::kColumnsAtOnce,
                    own % kTapParts * Config::kTapsAtOnce);
  pack.stage();
  __syncthreads();
  pack.write();
}

}  // namespace tconv3d
