// The parts of up.cuh that depend on the memory layout of the tensors (contiguous or channels-last): how x is
// copied and loaded into registers, which output each column of the product is, and how accumulators are
// stored.
//
// Both layouts copy x as it is in memory, 16 bytes at a time; TF32 operands are rounded when they are loaded
// into registers. Rows of the product may be any positions, columns any outputs, and K may be permuted if
// both operands are: the orders are chosen so that each lane loads and stores contiguous memory.
#pragma once

#include "epilogue.cuh"
#include "operands.cuh"

namespace tconv3d {

// As many bytes as pieces of such a length can be copied at a time.
__device__ constexpr int common_bytes(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2;
}

// Constants and helpers that both layouts share.
template <class C>
struct UpShape {
  using Scalar = typename C::Scalar;
  static constexpr int kItem = sizeof(Scalar), kPerWord = 4 / kItem;
  static constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
  static constexpr bool kRounded = kOperand == ptx::Operand::kTf32;
  static constexpr int kTile = 64;  // positions per tile
  static constexpr int kStepBytes = 32, kRowBytes = 128;
  // kStepItems and kStageItems are the channels per K step and per stage.
  static constexpr int kStepItems = kStepBytes / kItem, kStageItems = kRowBytes / kItem;
  static constexpr int kStageSteps = kRowBytes / kStepBytes;
  static constexpr int kPieceItems = 16 / kItem;
  static constexpr int kUnitItems = 4 * kPerWord;  // channels in 16 bytes of K
  static constexpr int kTaps = C::kKernelD * C::kKernelH * C::kKernelW;
  static constexpr int kSums = C::kColumns / 2;
  static constexpr int kProducers = 128, kConsumers = 2;  // producer threads, consumer warpgroups

  // Sums holds a lane's accumulators, Step its A operand of one K step.
  struct Sums {
    float at[kSums];
  };
  struct Step {
    unsigned at[4];
  };

  const Args& args;
  int warp, lane, kind;  // kind: index of the set of columns that the block owns

  __device__ __forceinline__ UpShape(const Args& args, int warp, int lane, int kind)
      : args(args), warp(warp), lane(lane), kind(kind) {}

  static __device__ __forceinline__ unsigned rounded(unsigned word) {
    return kRounded ? OperandOf<float>::bits(ptx::bits_to_float(word)) : word;
  }
  // Joins half `which` (0 low, 1 high) of each of two words.
  static __device__ __forceinline__ unsigned pair(unsigned low, unsigned high, int which) {
    return which == 0 ? (low & 0xFFFFu) | high << 16 : low >> 16 | (high & 0xFFFF0000u);
  }
  // Returns the address of the first output of a position.
  __device__ __forceinline__ Scalar* outputs(int n, int position) const {
    const int line = divide(position, args.by_w), d = divide(line, args.by_h);
    const long long h = line - d * static_cast<int>(args.by_h.divisor);
    const long long w = position - line * static_cast<int>(args.by_w.divisor);
    return static_cast<Scalar*>(args.y) + n * args.y_strides.n +
           static_cast<long long>(d) * C::kKernelD * args.y_strides.d + h * C::kKernelH * args.y_strides.h +
           w * C::kKernelW * args.y_strides.w;
  }
};

// Contiguous tensors with one, two or four taps along w. Columns are (channel, tap) in the order of the
// weight. A stage holds its channels one after another. Lane (g, t) of a warp has positions 2g and 2g + 1 as
// rows g and g + 8. A lane's accumulators then hold two taps along w of both positions, which are adjacent
// outputs and one store (with four taps, two lanes first exchange halves), and the eight lanes with the same
// t fill whole sectors.
template <class C>
struct UpContiguous : UpShape<C> {
  using Shape = UpShape<C>;
  using Shape::args, Shape::warp, Shape::lane;
  using Shape::kItem, Shape::kPerWord, Shape::kRounded, Shape::kTile, Shape::kTaps, Shape::kProducers;
  using Shape::kStepItems, Shape::kStageItems, Shape::kStageSteps, Shape::kSums, Shape::kPieceItems,
      Shape::kUnitItems;
  using typename Shape::Scalar, typename Shape::Step, typename Shape::Sums;

  static constexpr int kSteps = (C::kIn + kStepItems - 1) / kStepItems;
  // Words from channel to channel in a stage, chosen so that operand loads have no bank conflicts.
  static constexpr int kPitch = kTile / kPerWord + 8 / kPerWord;
  static constexpr int kStageWords = kStageItems * kPitch;
  static constexpr int kPlanes = C::kKernelD * C::kKernelH, kAlongW = C::kKernelW;
  static constexpr int kColumnsAll = C::kOut * kTaps;
  static constexpr int kKinds = (kColumnsAll + C::kColumns - 1) / C::kColumns;
  static constexpr int kOutTile = (C::kColumns + kTaps - 1) / kTaps + (8 % kTaps != 0);
  static constexpr int kGroupLines = 8 / kAlongW;  // lines of y (channel, plane) in 8 columns
  // Offsets of a block's lines are computed if this is true, else looked up in a table.
  static constexpr bool kComputed = kGroupLines % kPlanes == 0;
  static constexpr int kTable = kComputed ? 0 : C::kColumns / kAlongW;

  static_assert(kAlongW == 1 || kAlongW == 2 || kAlongW == 4, "lines begin with a group of 8 columns");

  int first_column;
  long long* table;

  __device__ __forceinline__ UpContiguous(const Args& args, int warp, int lane, int kind, long long* table)
      : Shape(args, warp, lane, kind), first_column(kind * C::kColumns), table(table) {}

  __device__ __forceinline__ int first_out() const { return first_column / kTaps; }

  // Offset of a line of the block from the first output of a position, in elements.
  __device__ __forceinline__ long long begin_of(int line) const {
    line += first_column / kAlongW;
    const int plane = line % kPlanes;
    return line / kPlanes * args.y_strides.c + plane / C::kKernelH * args.y_strides.d +
           plane % C::kKernelH * args.y_strides.h;
  }
  // Called by `threads` consumers before they store.
  __device__ __forceinline__ void fill_table(int own, int threads) const {
    for (int i = own; i < kTable; i += threads) table[i] = begin_of(i);
  }

  // ---- Producers: a thread copies the same piece (16 bytes of positions) of several channels.

  struct Source {
    const Scalar* from;
    bool inside;
  };
  static constexpr int kPieces = kTile / kPieceItems, kRowsAtOnce = kProducers / kPieces;

  __device__ __forceinline__ Source source(int n, int first) const {
    const int position = first + static_cast<int>(threadIdx.x) % kPieces * kPieceItems;
    const bool inside = position < args.positions;
    return Source{static_cast<const Scalar*>(args.x) + n * args.x_strides.n + (inside ? position : 0),
                  inside};
  }
  __device__ __forceinline__ void copy(unsigned* stage, const Source& source, int chunk) const {
    const int row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces;
    unsigned* const to = stage + row * kPitch + piece * 4;
#pragma unroll
    for (int i = 0; i < kStageItems / kRowsAtOnce; ++i) {
      const int in = chunk * kStageItems + row + i * kRowsAtOnce;
      const bool there = source.inside && (C::kIn % kStageItems == 0 || in < C::kIn);
      ptx::copy_words_once<4>(to + i * kRowsAtOnce * kPitch,
                              source.from + (there ? in * args.x_strides.c : 0), there);
    }
  }

  // ---- Weights: columns are in memory order.

  static constexpr int kWeightPiece = common_bytes(kColumnsAll * kItem);
  static constexpr bool kNeighbours = true;

  __device__ __forceinline__ const Scalar* weight_at(int in, int column) const {
    column += first_column;
    if (in >= C::kIn || (kColumnsAll % C::kColumns != 0 && column >= kColumnsAll)) return nullptr;
    return static_cast<const Scalar*>(args.weight) + in * static_cast<long long>(kColumnsAll) + column;
  }
  static __device__ __forceinline__ int channel_of(int piece, int i) { return piece * kUnitItems + i; }
  static __device__ __forceinline__ int row_of(int column) { return column; }

  // ---- Consumers.

  // Output channel of a lane's accumulator i, relative to the block's first one.
  __device__ __forceinline__ int out_of_sum(int i) const {
    const int in_group = lane % 4 * 2 + (kTaps % 2 == 0 ? 0 : i % 2);
    if constexpr (8 % kTaps == 0) return i / 4 * (8 / kTaps) + (kTaps == 8 ? 0 : in_group / kTaps);
    return (first_column + i / 4 * 8 + in_group) / kTaps - first_out();
  }

  // First of this lane's two positions, relative to the tile.
  __device__ __forceinline__ int own_position() const { return (warp % 4 * 8 + lane / 4) * 2; }

  template <int kCount>
  __device__ __forceinline__ void load(Step (&to)[kStageSteps], const unsigned* stage) const {
    static_for<kCount>(
        [&](auto i) { load_step(to[i], stage + own_position() / kPerWord + i * kStepItems * kPitch); });
  }
  // `from` points to this lane's positions in the first channel of the step.
  __device__ __forceinline__ void load_step(Step& to, const unsigned* from) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if constexpr (kRounded) {
        const auto both = load_vector<2>(from + (lane % 4 + 4 * k) * kPitch);
        to.at[2 * k] = Shape::rounded(both.at[0]);
        to.at[2 * k + 1] = Shape::rounded(both.at[1]);
      } else {
        const unsigned* const channel = from + (lane % 4 * 2 + 8 * k) * kPitch;
        to.at[2 * k] = Shape::pair(channel[0], channel[kPitch], 0);
        to.at[2 * k + 1] = Shape::pair(channel[0], channel[kPitch], 1);
      }
    }
  }

  // The adjacent outputs that a lane has in one line of y.
  using Values = Vector<Scalar, (kAlongW == 1 ? 2 : 4)>;

  // Lines of y per lane in a group of 8 columns, and outputs and runs of outputs per line before exchange():
  // with four taps along w a lane has two taps of each of two positions.
  static constexpr int kOwnLines = kAlongW == 1 ? 2 : 1, kCount = kAlongW == 1 ? 2 : 4;
  static constexpr int kRunsOfLine = kAlongW == 4 ? 2 : 1, kRun = kCount / kRunsOfLine;
  static constexpr int kLines = C::kColumns / 8 * kOwnLines;  // lines of a lane

  // Where a lane's lines begin. The lines of other lanes and groups of columns follow at the same distances.
  struct Begins {
    Scalar* lines[kOwnLines];
    bool inside;
  };
  __device__ __forceinline__ Begins begins(int n, int first, int lane) const {
    const int position = first + own_position();
    Scalar* const to = Shape::outputs(n, position) + (kAlongW == 4 ? lane % 2 * kAlongW : 0);
    Begins found;
    found.inside = position < args.positions;
#pragma unroll
    for (int i = 0; i < kOwnLines; ++i)
      found.lines[i] = to + (kComputed ? begin_of(lane % 4 * kGroupLines / 4 + i) : 0);
    return found;
  }
  static __device__ __forceinline__ int line_of(int index, int lane) {
    return index / kOwnLines * kGroupLines + lane % 4 * kGroupLines / 4 + index % kOwnLines;
  }
  __device__ __forceinline__ bool has_line(int line) const {
    return kColumnsAll % C::kColumns == 0 || first_column + line * kAlongW < kColumnsAll;
  }
  // Returns the address of the first output that a lane stores in its line `index`.
  __device__ __forceinline__ Scalar* output_of(const Begins& begins, int index, int lane) const {
    const long long further =
        kComputed ? index / kOwnLines * (kGroupLines / kPlanes) * static_cast<long long>(args.y_strides.c)
                  : table[line_of(index, lane)];
    return begins.lines[index % kOwnLines] + further;
  }
  // Returns run `part` of a lane's line, before exchange(): the first lane of two has taps 0 and 1, and its
  // address names its first position; that of the second lane names the second position.
  __device__ __forceinline__ OutputRun run_of(const Begins& begins, int index, int part, int n,
                                              int lane) const {
    const int line = line_of(index, lane);
    long long offset = output_of(begins, index, lane) - static_cast<const Scalar*>(args.y);
    if constexpr (kAlongW == 4) offset += lane % 2 * 2 - lane % 2 * kAlongW + part * kAlongW;
    return {n, (first_column / kAlongW + line) / kPlanes, offset, 1,
            begins.inside && has_line(line) ? kRun : 0};
  }

  // Calls the whole tensors of a tile into L2.
  __device__ __forceinline__ void prefetch(int n, int first) const {
    if constexpr (OperandCounts<typename C::Epilogue>::kWholes > 0) {
      int own = lane;
      ptx::renew(own);  // Without this the compiler keeps every address until the sums are finished.
      const Begins begin = begins(n, first, own);
#pragma unroll
      for (int i = 0; i < kLines; ++i) prefetch_run<C, false, kRun>(args, run_of(begin, i, 0, n, own));
    }
  }

  // With four taps along w, two lanes hold two taps each of the same two positions. After the exchange the
  // first lane has all taps of the first position, and the second lane all taps of the second.
  __device__ __forceinline__ void exchange(Values& values) const {
    constexpr int kWords = sizeof(Values) / 8;  // words per half
    auto& words = *reinterpret_cast<Vector<unsigned, 2 * kWords>*>(&values);
    const bool second = lane % 2 == 1;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const unsigned got = __shfl_xor_sync(0xFFFFFFFFu, second ? words.at[i] : words.at[kWords + i], 1);
      if (second) {
        words.at[i] = got;
      } else {
        words.at[kWords + i] = got;
      }
    }
  }

  __device__ __forceinline__ void store(const Sums& sums, int n, int first) const {
    const Begins begin = begins(n, first, lane);
    if (kAlongW != 4 && !begin.inside) return;  // no lane exchanges values with this one
    Scalar* lines[kOwnLines];  // where the next lines begin, whose addresses are then sums of two numbers
#pragma unroll
    for (int i = 0; i < kOwnLines; ++i) lines[i] = begin.lines[i];
    in_portions<kLines, portion_of<C>(kLines, kCount)>([&](auto start, auto count) {
      constexpr int kStart = decltype(start)::value, kPortion = decltype(count)::value;
      OutputRun runs[kPortion * kRunsOfLine];
      float own[kPortion * kRunsOfLine][kRun];
#pragma unroll
      for (int i = 0; i < kPortion * kRunsOfLine; ++i) {
        const int index = kStart + i / kRunsOfLine, part = i % kRunsOfLine;
        runs[i] = run_of(begin, index, part, n, lane);
#pragma unroll
        for (int e = 0; e < kRun; ++e)
          own[i][e] =
              sums.at[4 * (index / kOwnLines) + (kAlongW == 1 ? 2 * e + index % kOwnLines : part * kRun + e)];
      }
      finish_runs<C, false, Lie::kAsVector>(args, runs, own);
#pragma unroll
      for (int i = 0; i < kPortion; ++i) {
        Values values;
#pragma unroll
        for (int e = 0; e < kCount; ++e)
          values.at[e] = Narrow<Scalar>::from(own[i * kRunsOfLine + e / kRun][e % kRun]);
        if constexpr (kAlongW == 4) exchange(values);
        Scalar*& to = lines[(kStart + i) % kOwnLines];
        if (runs[i * kRunsOfLine].present > 0)
          store_vector(to + (kComputed ? 0 : table[line_of(kStart + i, lane)]), values);
        if constexpr (kComputed) to += kGroupLines / kPlanes * args.y_strides.c;
      }
    });
  }
};

// Channels-last tensors with any number of taps. A block owns some channels of some taps. A stage holds its
// positions one after another, 128 bytes of channels each: lane (g, t) of a warp has positions g and g + 8,
// and loads 16 bytes at a time, one word for each of four steps. Columns come in blocks (kBlock: 16 in TF32,
// 32 for 16-bit types), ordered so that a lane has adjacent channels of one tap, 16 bytes of y, in each
// block.
template <class C>
struct UpChannelsLast : UpShape<C> {
  using Shape = UpShape<C>;
  using Shape::args, Shape::warp, Shape::lane;
  using Shape::kItem, Shape::kPerWord, Shape::kTile, Shape::kTaps, Shape::kProducers, Shape::kRowBytes;
  using Shape::kStageItems, Shape::kStageSteps, Shape::kSums, Shape::kPieceItems, Shape::kUnitItems;
  using typename Shape::Scalar, typename Shape::Step, typename Shape::Sums;

  static constexpr int kChunks = (C::kIn + kStageItems - 1) / kStageItems;
  // The channels of a chunk are spread over all of its steps.
  static constexpr int kSteps = kChunks * kStageSteps;
  static constexpr int kStageWords = kTile * kRowBytes / 4;
  // A block has kBlock columns, which are kBlockGroups groups of 8.
  static constexpr int kBlock = 4 * kPieceItems, kBlockGroups = kBlock / 8;
  static constexpr int kOutTile = C::kColumns / C::kTapTile;
  static constexpr int kTapTiles = kTaps / C::kTapTile;
  static constexpr int kKinds = kTapTiles * ((C::kOut + kOutTile - 1) / kOutTile);
  static constexpr int kTable = 0;

  static_assert(kTaps % C::kTapTile == 0 && C::kColumns % C::kTapTile == 0);
  static_assert(kOutTile % kBlock == 0, "a block of columns has one tap");
  static_assert(C::kIn % kPieceItems == 0 && C::kOut % kPieceItems == 0, "whole pieces");

  int first_tap, out;

  __device__ __forceinline__ UpChannelsLast(const Args& args, int warp, int lane, int kind, long long*)
      : Shape(args, warp, lane, kind),
        first_tap(kind % kTapTiles * C::kTapTile),
        out(kind / kTapTiles * kOutTile) {}

  __device__ __forceinline__ int first_out() const { return out; }
  __device__ __forceinline__ void fill_table(int, int) const {}

  // ---- Producers: a thread copies the same piece (16 bytes of channels) of several positions.

  static constexpr int kPieces = kRowBytes / 16, kRowsAtOnce = kProducers / kPieces;
  static constexpr int kCopies = kTile / kRowsAtOnce;

  struct Source {
    const Scalar* from;
    int first;  // first position that this thread copies
  };
  __device__ __forceinline__ Source source(int n, int first) const {
    const int position = first + static_cast<int>(threadIdx.x) / kPieces;
    return Source{static_cast<const Scalar*>(args.x) + n * args.x_strides.n +
                      static_cast<int>(threadIdx.x) % kPieces * kPieceItems,
                  position};
  }
  // Odd positions have the halves of their 128 bytes exchanged, so that lanes of two adjacent positions can
  // load the same half without bank conflicts.
  __device__ __forceinline__ void copy(unsigned* stage, const Source& source, int chunk) const {
    const int row = static_cast<int>(threadIdx.x) / kPieces, piece = static_cast<int>(threadIdx.x) % kPieces;
    unsigned* const to = stage + row * (kRowBytes / 4) + (piece ^ row % 2 * 4) * 4;
    const int in = chunk * kStageItems;
    const bool channel = C::kIn % kStageItems == 0 || in + piece * kPieceItems < C::kIn;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int position = source.first + i * kRowsAtOnce;
      const bool there = channel && position < args.positions;
      ptx::copy_words_once<4>(
          to + i * kRowsAtOnce * (kRowBytes / 4),
          there ? source.from + position * args.x_strides.w + in : static_cast<const Scalar*>(args.x), there);
    }
  }

  // ---- Weights: columns in memory order are (channel, tap), or (tap, channel) with kWeightLast.

  static constexpr int kWeightPiece = common_bytes((C::kWeightLast ? kOutTile : C::kTapTile) * kItem);
  static constexpr bool kNeighbours = C::kWeightLast;

  __device__ __forceinline__ const Scalar* weight_at(int in, int column) const {
    const int tap = first_tap + (C::kWeightLast ? column / kOutTile : column % C::kTapTile);
    const int co = out + (C::kWeightLast ? column % kOutTile : column / C::kTapTile);
    if (in >= C::kIn || (C::kOut % kOutTile != 0 && co >= C::kOut)) return nullptr;
    return static_cast<const Scalar*>(args.weight) + in * args.w_strides.n + co * args.w_strides.c +
           tap * args.w_strides.w;
  }
  // Input channel of element i of a piece of K. K is permuted, because a lane loads 16 bytes of x at a time,
  // one word for each of four steps.
  static __device__ __forceinline__ int channel_of(int piece, int i) {
    return (piece % 2 * 16 + i / kPerWord * 4 + piece / 2) * kPerWord + i % kPerWord;
  }
  static __device__ __forceinline__ int row_of(int column) {
    const int ordered =  // index in (tap, channel) order
        C::kWeightLast ? column : column % C::kTapTile * kOutTile + column / C::kTapTile;
    return ordered / kBlock * kBlock + row_in_block(ordered % kBlock);
  }
  static __device__ __forceinline__ int row_in_block(int column) {
    const int owner = column / kPieceItems, item = column % kPieceItems;
    return item / 2 * 8 + owner * 2 + item % 2;
  }

  // ---- Weights with contiguous output channels are loaded by blocks (up_weight_blocks.cuh).

  static constexpr int kInStride = C::kOut * kTaps;  // elements from input channel to input channel

  // Address of the weight of an input channel at the first column of a block.
  __device__ __forceinline__ const Scalar* weight_of(int in, int column) const {
    return static_cast<const Scalar*>(args.weight) + in * static_cast<long long>(kInStride) +
           (first_tap + column / kOutTile) * C::kOut + out + column % kOutTile;
  }
  __device__ __forceinline__ bool has_out(int column, int later) const {
    return C::kOut % kOutTile == 0 || out + column % kOutTile + later < C::kOut;
  }
  // Returns which of the 16 words of a block's channel lane `index` of a half warp has. Eight consecutive
  // lanes have eight consecutive rows, or, where a word is a pair of columns, every second row modulo 8
  // twice.
  static __device__ __forceinline__ int word_of(int index) {
    if constexpr (kPerWord == 2) return index % 4 * 4 + index / 4;
    return index % 8 / 2 * 4 + index / 8 * 2 + index % 2;
  }
  // Assembles 16 bytes of K of one column; `which` selects the column of a 16-bit pair.
  static __device__ __forceinline__ uint4 unit_of(const unsigned (&words)[kUnitItems], int which) {
    unsigned made[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kPerWord == 2) {
        made[i] = Shape::pair(words[2 * i], words[2 * i + 1], which);
      } else {
        made[i] = Shape::rounded(words[i]);
      }
    }
    return uint4{made[0], made[1], made[2], made[3]};
  }

  // ---- Consumers.

  // Output channel of a lane's accumulator i, relative to the block's first one.
  __device__ __forceinline__ int out_of_sum(int i) const {
    const int group = i / 4, item = group % kBlockGroups * 2 + i % 2;
    return group / kBlockGroups * kBlock % kOutTile + lane % 4 * kPieceItems + item;
  }

  __device__ __forceinline__ int own_position(int half) const { return warp % 4 * 16 + lane / 4 + 8 * half; }

  template <int kCount>
  __device__ __forceinline__ void load(Step (&to)[kStageSteps], const unsigned* stage) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // register k of the A operand: row half k % 2, K half k / 2
      const int position = own_position(k % 2), piece = k / 2 * 4 + lane % 4;
      const auto words = load_vector<4>(stage + position * (kRowBytes / 4) + (piece ^ position % 2 * 4) * 4);
#pragma unroll
      for (int step = 0; step < kStageSteps; ++step) to[step].at[k] = Shape::rounded(words.at[step]);
    }
  }

  static constexpr int kBlocks = C::kColumns / kBlock, kTapBlocks = kOutTile / kBlock;
  // Returns where the outputs of a block of columns lie, from those of the block's first channel and tap on.
  __device__ __forceinline__ long long further(int block) const {
    const int tap = first_tap + block / kTapBlocks, in_tile = block % kTapBlocks * kBlock;
    const int kw = tap % C::kKernelW, kh = tap / C::kKernelW % C::kKernelH;
    const int kd = tap / (C::kKernelW * C::kKernelH);
    return kd * args.y_strides.d + kh * args.y_strides.h + kw * args.y_strides.w + in_tile;
  }
  // Returns the run of a lane's channels in a block of columns. `to` is the lane's first output of a position
  // in the block's first tap, or null if the position does not exist.
  __device__ __forceinline__ OutputRun run_of(const Scalar* to, int block, int n, int lane) const {
    const int channel = out + block % kTapBlocks * kBlock + lane % 4 * kPieceItems;
    return {n, channel, to - static_cast<const Scalar*>(args.y) + further(block), 1,
            to != nullptr && (C::kOut % kOutTile == 0 || channel < C::kOut) ? kPieceItems : 0};
  }

  // Calls the whole tensors of a tile into L2.
  __device__ __forceinline__ void prefetch(int n, int first) const {
    if constexpr (OperandCounts<typename C::Epilogue>::kWholes > 0) {
      int own = lane;
      ptx::renew(own);  // Without this the compiler keeps every address until the sums are finished.
#pragma unroll
      for (int i = 0; i < 2 * kBlocks; ++i) {
        const int position = first + own_position(i % 2);
        const Scalar* const to =
            position < args.positions ? Shape::outputs(n, position) + out + own % 4 * kPieceItems : nullptr;
        prefetch_run<C, true, kPieceItems>(args, run_of(to, i / 2, n, own));
      }
    }
  }

  // Finishes the sums of several blocks of a position, with the vectors of a lane's channels, [block of a
  // tap].
  template <int kStart, int kRuns, class Vectors>
  __device__ __forceinline__ void finish_blocks(const Scalar* to, int n, const Vectors (&vectors)[kTapBlocks],
                                                float (&own)[kRuns][kPieceItems]) const {
    OutputRun runs[kRuns];
    Vectors same[kRuns];
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      runs[r] = run_of(to, kStart + r, n, lane);
      same[r] = vectors[(kStart + r) % kTapBlocks];
    }
    finish_with<C, true, Lie::kAsVector>(args, runs, same, own);
  }

  __device__ __forceinline__ void store(const Sums& sums, int n, int first) const {
    using Vectors =
        typename Choose<C::Epilogue::kHasOperands, ChannelVectors<C, float, kPieceItems>, int>::type;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first + own_position(half);
      if (position >= args.positions) return;
      Scalar* const to = Shape::outputs(n, position) + out + lane % 4 * kPieceItems;
      // The vectors of a lane's channels, which all taps share.
      [[maybe_unused]] Vectors vectors[kTapBlocks];
      if constexpr (C::Epilogue::kHasOperands) {
        // Without this the compiler loads the vectors before the products, and keeps them.
        int item = n;
        if constexpr (Vectors::kVectors > 0) ptx::renew(item);
#pragma unroll
        for (int i = 0; i < kTapBlocks; ++i) {
          const int channel = out + i * kBlock + lane % 4 * kPieceItems;
          vectors[i] = Vectors::load(args, item, channel, C::kOut - channel);
        }
      }
      in_portions<kBlocks, portion_of<C>(kBlocks, kPieceItems)>([&](auto start, auto count) {
        constexpr int kStart = decltype(start)::value, kRuns = decltype(count)::value;
        float own[kRuns][kPieceItems];
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
#pragma unroll
          for (int e = 0; e < kPieceItems; ++e)
            own[r][e] = sums.at[4 * ((kStart + r) * kBlockGroups + e / 2) + 2 * half + e % 2];
        }
        if constexpr (C::Epilogue::kHasOperands) {
          finish_blocks<kStart>(to, n, vectors, own);
        } else {
#pragma unroll
          for (int i = 0; i < kRuns * kPieceItems; ++i) {
            float& sum = own[i / kPieceItems][i % kPieceItems];
            sum = C::Epilogue::apply(sum);
          }
        }
#pragma unroll
        for (int r = 0; r < kRuns; ++r) {
          const int in_tile = (kStart + r) % kTapBlocks * kBlock;
          if (C::kOut % kOutTile != 0 && out + in_tile + lane % 4 * kPieceItems >= C::kOut) continue;
          Vector<Scalar, kPieceItems> values;
#pragma unroll
          for (int e = 0; e < kPieceItems; ++e) values.at[e] = Narrow<Scalar>::from(own[r][e]);
          store_vector(to + further(kStart + r), values);
        }
      });
    }
  }
};

}  // namespace tconv3d
