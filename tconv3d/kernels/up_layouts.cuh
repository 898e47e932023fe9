// What up.cuh does differently for contiguous tensors and for channels-last ones: how x is copied and taken
// to registers, which column of the product is which output, and how sums are stored.
//
// Both copy x as it is in memory, 16 bytes at a time; it is rounded to TF32 on its way to tensor cores. Rows
// of a product may be any positions, columns any outputs, and K may be permuted if both operands are: so both
// choose them such that what a lane loads lies together, and what it stores, too.
#pragma once

#include "epilogue.cuh"
#include "operands.cuh"

namespace tconv3d {

struct Args {
  const void* x;
  const void* weight;
  const void* bias;  // or null
  void* y;
  Strides x_strides, y_strides;  // the positions of x are one run: d and h follow from w
  Strides w_strides;             // input channel, output channel; taps are w apart
  int positions;                 // of a batch item
  int tiles, splits;             // tiles in all, and blocks that share them
  Divider by_tiles;              // of a batch item
  Divider by_h, by_w;
};

// As many bytes as pieces of such a length can be copied at a time.
__device__ constexpr int common_bytes(int bytes) {
  return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 2;
}

// What both agree on.
template <class C>
struct UpShape {
  using Scalar = typename C::Scalar;
  static constexpr int kItem = sizeof(Scalar), kPerWord = 4 / kItem;
  static constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
  static constexpr bool kRounded = kOperand == ptx::Operand::kTf32;
  static constexpr int kTile = 64 * C::kSlabs;  // positions
  static constexpr int kStepBytes = 32, kRowBytes = 128;
  static constexpr int kStepItems = kStepBytes / kItem, kStageItems = kRowBytes / kItem;  // channels
  static constexpr int kStageSteps = kRowBytes / kStepBytes;
  static constexpr int kPieceItems = 16 / kItem;
  static constexpr int kUnitItems = 4 * kPerWord;  // channels in 16 bytes of K
  static constexpr int kTaps = C::kKernelD * C::kKernelH * C::kKernelW;
  static constexpr int kSums = C::kColumns / 2;
  static constexpr int kProducers = 128, kConsumers = 2;  // threads; warpgroups

  // The sums of a lane, and the operand of one step.
  struct Sums {
    float at[C::kSlabs][kSums];
  };
  struct Step {
    unsigned at[C::kSlabs][4];
  };

  const Args& args;
  int warp, lane;

  static __device__ __forceinline__ unsigned rounded(unsigned word) {
    return kRounded ? OperandOf<float>::bits(ptx::bits_to_float(word)) : word;
  }
  // Half `which` of each of two words.
  static __device__ __forceinline__ unsigned pair(unsigned low, unsigned high, int which) {
    return which == 0 ? (low & 0xFFFFu) | high << 16 : low >> 16 | (high & 0xFFFF0000u);
  }
  // Where the outputs of a position begin.
  __device__ __forceinline__ Scalar* outputs(int n, int position) const {
    const int line = divide(position, args.by_w), d = divide(line, args.by_h);
    const long long h = line - d * static_cast<int>(args.by_h.divisor);
    const long long w = position - line * static_cast<int>(args.by_w.divisor);
    return static_cast<Scalar*>(args.y) + n * args.y_strides.n +
           static_cast<long long>(d) * C::kKernelD * args.y_strides.d + h * C::kKernelH * args.y_strides.h +
           w * C::kKernelW * args.y_strides.w;
  }
};

// Contiguous tensors, two taps along w. Columns are (channel, tap) in the order of the weight. A stage has
// its channels one after another. Lane (g, t) of a warp has positions 2g and 2g + 1 as rows g and g + 8; with
// two slabs of a 16-bit type, four. Of the sums it then has both taps along w of all: outputs in a row, one
// store, and the eight lanes with the same t fill whole lines.
template <class C>
struct UpContiguous : UpShape<C> {
  using Shape = UpShape<C>;
  using Shape::args, Shape::warp, Shape::lane;
  using Shape::kItem, Shape::kPerWord, Shape::kRounded, Shape::kTile, Shape::kTaps, Shape::kProducers;
  using Shape::kStepItems, Shape::kStageItems, Shape::kStageSteps, Shape::kSums, Shape::kPieceItems,
      Shape::kUnitItems;
  using typename Shape::Scalar, typename Shape::Step, typename Shape::Sums;

  static constexpr int kSteps = (C::kIn + kStepItems - 1) / kStepItems;
  static constexpr int kLaneWords = C::kSlabs * 2 / kPerWord;  // of a channel: the positions of a lane
  // From channel to channel in a stage, in words: no load of an operand meets a bank twice.
  static constexpr int kPitch = kTile / kPerWord + 8 / kPerWord;
  static constexpr int kStageWords = kStageItems * kPitch;
  static constexpr int kPlanes = C::kKernelD * C::kKernelH;
  static constexpr int kColumnsAll = C::kOut * kTaps;
  static constexpr int kKinds = (kColumnsAll + C::kColumns - 1) / C::kColumns;
  static constexpr int kGroupOut = 4 / kPlanes;  // output channels of 8 columns
  static constexpr int kOutTile = C::kColumns / 8 * kGroupOut;

  static_assert(C::kSlabs == 1 || (C::kSlabs == 2 && kPerWord == 2), "one store of 16 bytes at most");
  static_assert(C::kKernelW == 2 && 4 % kPlanes == 0, "8 columns are whole output channels");

  int first_column;

  __device__ __forceinline__ UpContiguous(const Args& args, int warp, int lane, int kind)
      : Shape{args, warp, lane}, first_column(kind * C::kColumns) {}

  __device__ __forceinline__ int first_out() const { return first_column / 8 * kGroupOut; }

  // ---- Producers: a thread has the same piece of every channel that it copies.

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

  // ---- Weights: in the order of memory.

  static constexpr int kWeightPiece = common_bytes(kColumnsAll * kItem);

  __device__ __forceinline__ const Scalar* weight_at(int in, int column) const {
    column += first_column;
    if (in >= C::kIn || (kColumnsAll % C::kColumns != 0 && column >= kColumnsAll)) return nullptr;
    return static_cast<const Scalar*>(args.weight) + in * static_cast<long long>(kColumnsAll) + column;
  }
  static __device__ __forceinline__ int channel_of(int piece, int i) { return piece * kUnitItems + i; }
  static __device__ __forceinline__ int row_of(int column) { return column; }

  // ---- Consumers.

  // The channel of a lane's sum, from the block's first.
  __device__ __forceinline__ int out_of_sum(int i) const { return i / 4 * kGroupOut + lane % 4 / kPlanes; }

  // Where this lane's first position is in a tile.
  __device__ __forceinline__ int own_position() const { return (warp % 4 * 8 + lane / 4) * (2 * C::kSlabs); }

  template <int kCount>
  __device__ __forceinline__ void load(Step (&to)[kStageSteps], const unsigned* stage) const {
    static_for<kCount>(
        [&](auto i) { load_step(to[i], stage + own_position() / kPerWord + i * kStepItems * kPitch); });
  }
  // `from`: this lane's positions of the step's first channel.
  __device__ __forceinline__ void load_step(Step& to, const unsigned* from) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if constexpr (kRounded) {
        const auto both = load_vector<kLaneWords>(from + (lane % 4 + 4 * k) * kPitch);
        to.at[0][2 * k] = Shape::rounded(both.at[0]);
        to.at[0][2 * k + 1] = Shape::rounded(both.at[1]);
      } else {
        const unsigned* const channel = from + (lane % 4 * 2 + 8 * k) * kPitch;
        const auto low = load_vector<kLaneWords>(channel), high = load_vector<kLaneWords>(channel + kPitch);
#pragma unroll
        for (int slab = 0; slab < C::kSlabs; ++slab) {
          to.at[slab][2 * k] = Shape::pair(low.at[slab], high.at[slab], 0);
          to.at[slab][2 * k + 1] = Shape::pair(low.at[slab], high.at[slab], 1);
        }
      }
    }
  }

  // Of each 8 columns a lane has both taps along w of an output channel, in a plane (taps along d and h).
  __device__ __forceinline__ void store(const Sums& sums, int n, int first) const {
    const int position = first + own_position();
    if (position >= args.positions) return;
    const int plane = lane % 4 % kPlanes, out = first_out() + lane % 4 / kPlanes;
    Scalar* to = Shape::outputs(n, position) + out * args.y_strides.c +
                 plane / C::kKernelH * args.y_strides.d + plane % C::kKernelH * args.y_strides.h;
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j) {
      if (kColumnsAll % C::kColumns != 0 && out + j * kGroupOut >= C::kOut) break;
      Vector<Scalar, 4 * C::kSlabs> values;
#pragma unroll
      for (int e = 0; e < 4 * C::kSlabs; ++e) {
        values.at[e] = Narrow<Scalar>::from(C::Epilogue::apply(sums.at[e / 4][4 * j + e % 4]));
      }
      store_vector(to, values);
      to += kGroupOut * args.y_strides.c;
    }
  }
};

// Channels-last tensors, any taps. A block has some channels of some taps. A stage has its positions one
// after another, 128 bytes of channels each: lane (g, t) of a warp has positions g and g + 8, and takes 16
// bytes at a time, which are a word of each of four steps. Columns are ordered such that in four or eight
// times 8 of them a lane has neighbouring channels of one tap, 16 bytes: a block of columns.
template <class C>
struct UpChannelsLast : UpShape<C> {
  using Shape = UpShape<C>;
  using Shape::args, Shape::warp, Shape::lane;
  using Shape::kItem, Shape::kPerWord, Shape::kTile, Shape::kTaps, Shape::kProducers, Shape::kRowBytes;
  using Shape::kStageItems, Shape::kStageSteps, Shape::kSums, Shape::kPieceItems, Shape::kUnitItems;
  using typename Shape::Scalar, typename Shape::Step, typename Shape::Sums;

  static constexpr int kChunks = (C::kIn + kStageItems - 1) / kStageItems;
  static constexpr int kSteps = kChunks * kStageSteps;  // a chunk's channels are in all of its steps
  static constexpr int kStageWords = kTile * kRowBytes / 4;
  static constexpr int kBlock = 4 * kPieceItems, kBlockGroups = kBlock / 8;  // columns; times 8 of them
  static constexpr int kOutTile = C::kColumns / C::kTapTile;
  static constexpr int kTapTiles = kTaps / C::kTapTile;
  static constexpr int kKinds = kTapTiles * ((C::kOut + kOutTile - 1) / kOutTile);

  static_assert(C::kSlabs == 1 && kTaps % C::kTapTile == 0 && C::kColumns % C::kTapTile == 0);
  static_assert(kOutTile % kBlock == 0, "a block of columns has one tap");
  static_assert(C::kIn % kPieceItems == 0 && C::kOut % kPieceItems == 0, "whole pieces");

  int first_tap, out;

  __device__ __forceinline__ UpChannelsLast(const Args& args, int warp, int lane, int kind)
      : Shape{args, warp, lane},
        first_tap(kind % kTapTiles * C::kTapTile),
        out(kind / kTapTiles * kOutTile) {}

  __device__ __forceinline__ int first_out() const { return out; }

  // ---- Producers: a thread has the same piece of some positions.

  static constexpr int kPieces = kRowBytes / 16, kRowsAtOnce = kProducers / kPieces;
  static constexpr int kCopies = kTile / kRowsAtOnce;

  struct Source {
    const Scalar* from;
    int first;  // position
  };
  __device__ __forceinline__ Source source(int n, int first) const {
    const int position = first + static_cast<int>(threadIdx.x) / kPieces;
    return Source{static_cast<const Scalar*>(args.x) + n * args.x_strides.n +
                      static_cast<int>(threadIdx.x) % kPieces * kPieceItems,
                  position};
  }
  // Of two neighbouring positions, the second has the halves of its 128 bytes exchanged: lanes of both load
  // the same half at once.
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

  // ---- Weights: in the order of memory, by channel and tap, or by tap and channel.

  static constexpr int kWeightPiece = common_bytes((C::kWeightLast ? kOutTile : C::kTapTile) * kItem);

  __device__ __forceinline__ const Scalar* weight_at(int in, int column) const {
    const int tap = first_tap + (C::kWeightLast ? column / kOutTile : column % C::kTapTile);
    const int co = out + (C::kWeightLast ? column % kOutTile : column / C::kTapTile);
    if (in >= C::kIn || (C::kOut % kOutTile != 0 && co >= C::kOut)) return nullptr;
    return static_cast<const Scalar*>(args.weight) + in * args.w_strides.n + co * args.w_strides.c +
           tap * args.w_strides.w;
  }
  // A lane takes 16 bytes of x at a time: a word of each of four steps.
  static __device__ __forceinline__ int channel_of(int piece, int i) {
    return (piece % 2 * 16 + i / kPerWord * 4 + piece / 2) * kPerWord + i % kPerWord;
  }
  static __device__ __forceinline__ int row_of(int column) {
    const int ordered =  // by tap, then by channel
        C::kWeightLast ? column : column % C::kTapTile * kOutTile + column / C::kTapTile;
    const int in_block = ordered % kBlock, owner = in_block / kPieceItems, item = in_block % kPieceItems;
    return ordered / kBlock * kBlock + item / 2 * 8 + owner * 2 + item % 2;
  }

  // ---- Consumers.

  // The channel of a lane's sum, from the block's first.
  __device__ __forceinline__ int out_of_sum(int i) const {
    const int group = i / 4, item = group % kBlockGroups * 2 + i % 2;
    return group / kBlockGroups * kBlock % kOutTile + lane % 4 * kPieceItems + item;
  }

  __device__ __forceinline__ int own_position(int half) const { return warp % 4 * 16 + lane / 4 + 8 * half; }

  template <int kCount>
  __device__ __forceinline__ void load(Step (&to)[kStageSteps], const unsigned* stage) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // as in the operand: half of the rows, half of the step
      const int position = own_position(k % 2), piece = k / 2 * 4 + lane % 4;
      const auto words = load_vector<4>(stage + position * (kRowBytes / 4) + (piece ^ position % 2 * 4) * 4);
#pragma unroll
      for (int step = 0; step < kStageSteps; ++step) to[step].at[0][k] = Shape::rounded(words.at[step]);
    }
  }

  __device__ __forceinline__ void store(const Sums& sums, int n, int first) const {
    constexpr int kBlocks = C::kColumns / kBlock, kTapBlocks = kOutTile / kBlock;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = first + own_position(half);
      if (position >= args.positions) return;
      Scalar* const to = Shape::outputs(n, position) + out + lane % 4 * kPieceItems;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int tap = first_tap + block / kTapBlocks, in_tile = block % kTapBlocks * kBlock;
        const int kw = tap % C::kKernelW, kh = tap / C::kKernelW % C::kKernelH;
        const int kd = tap / (C::kKernelW * C::kKernelH);
        if (C::kOut % kOutTile != 0 && out + in_tile + lane % 4 * kPieceItems >= C::kOut) continue;
        Vector<Scalar, kPieceItems> values;
#pragma unroll
        for (int e = 0; e < kPieceItems; ++e) {
          const int i = 4 * (block * kBlockGroups + e / 2) + 2 * half + e % 2;
          values.at[e] = Narrow<Scalar>::from(C::Epilogue::apply(sums.at[0][i]));
        }
        store_vector(to + kd * args.y_strides.d + kh * args.y_strides.h + kw * args.y_strides.w + in_tile,
                     values);
      }
    }
  }
};

}  // namespace tconv3d
