// The weight gradient on Hopper's tensor cores (sm_90a; TF32, float16, bfloat16):
//   dw[ci][co][t] = sum over n, i of  x[n][ci][i] * dy[n][co][stride*i + t*dilation - padding]
//
// With the positions i as K this is a matrix product: the rows are (tap, co), the columns ci. x is the same
// for all taps and goes to the tensor cores straight from shared memory; dy goes through registers, where a
// tap's shift along w selects other words, while shifts along d and h only change an address. A block owns a
// tile of channels and some taps, and loops over its part of the volume in steps, each a box of positions:
//
//   copying warps (kCopiers), for each step:
//     copy x[ci][box] to the next stage: K along 128-byte rows, swizzled
//     copy the sheets of dy (planes along d, with all that taps along h and w reach) that the previous step
//     did not load: the block advances along d, so a sheet is copied once for all taps along d
//
//   transposing warps (kTurners), for each step:
//     transpose x (see below), round it, hand it to the tensor cores
//
//   consumers, for each step, for each chunk of 16 words of K, for each of their tiles of 64 rows:
//     load the words of dy that the taps along w need, once
//     for each tap along w:  sums[tile][tap] += dy shifted by the tap  (x)  x
//
// A word is one TF32 number or two 16-bit ones. A segment is four words along w, and a chunk is four
// segments, one for each lane of a quad: words 2s and 2s + 1 of a lane's segment are columns lane%4 and
// lane%4 + 4 of K in step s of the chunk. K may be permuted if both operands are, so x is stored in this
// order. Rows g and g + 8 of a lane are two channels, a pair, which lie side by side in shared memory: one
// 16-byte load is one operand.
//
// This layout is for a stride of 1 along w, and for lines that are not whole words in memory: dy is then
// stored in one plane per phase, so that adjacent positions are adjacent for every tap. For other strides
// (kLines) the lines of dy are copied unchanged, in vectors, and consumers separate the phases: a lane loads,
// for each of its two channels, the vectors that the taps of its positions read, and assembles operands from
// them. 16-bit lines of odd length begin at any element of a vector (kShifted): the vectors that contain them
// are copied, and consumers load words from where the line begins in its first vector. TF32 tensors whose
// channels are contiguous are copied as rows of channels (kPieceX, kPieceY), of which kRowsY has the same
// planes: a lane loads a word of its two channels, neighbours, at a time, and x is transposed in place when
// it has arrived. Lines of x with half a segment are taken two at a time (kLinesAtOnce): they are contiguous
// in memory, so x is read as if its lines were twice as long, and only in dy does each half of a segment have
// its own line. Planes of dy have few vectors then, so a warp copies those of several planes at a time.
//
// Partial sums are stored side by side and added by reduce_taps.cuh in a fixed order; one may be the result.
//
// The bias gradient, the sum of dy, costs a few additions here: for each phase one tap reads position i's own
// output, and the rows of these taps see every output once. Consumers add these words before rounding.
//
// Both tensors are copied with cp.async where their words are whole in memory, so that many copies are in
// flight: x by segments where these are vectors in memory (kVectorsX), which are transposed in place when
// they have arrived. TF32 operands are rounded to nearest: x by the transposing warps, dy by the consumers
// when they load it. Elements outside the tensors are zero in both.
#pragma once

#include "hopper_weight_grad_operands.cuh"
#include "hopper_weight_grad_producers.cuh"
#include "hopper_weight_grad_results.cuh"

namespace tconv3d {

template <class C>
struct HopperWeightConsumers : HopperWeightResults<C> {
  using Results = HopperWeightResults<C>;
  using Operands = HopperWeightOperands<C>;
  using Fragments = typename Operands::Fragments;
  using Loaded = typename Operands::Loaded;
  using Results::args, Results::empty, Results::full, Results::kind, Results::lane, Results::lay_down;
  using Results::channel_of, Results::kRowsY, Results::kStepH, Results::part, Results::ring;
  using Results::kBlocksIn, Results::kChunkBytes, Results::kNoPlace, Results::kOperand, Results::kPairs;
  using Results::kRowBytes, Results::kRows, Results::kSides, Results::kStepBytes, Results::kSums;
  using Results::row_place, Results::row_segments;
  using Results::run_at, Results::segments;
  using Results::sheet_words, Results::stage_bytes, Results::stage_empty, Results::stage_full;
  using Results::stages, Results::store, Results::store_bias, Results::store_result, Results::warp;
  using typename Results::Consumer, typename Results::Run, typename Results::Segment;

  // The place of a lane's words of a chunk in the ring, and whether the lane's segment exists.
  struct Place {
    unsigned word;  // offset in the ring
    bool used;
    unsigned shift;  // with kShifted, modulo 8 the elements by which the line of the first channel is shifted
    int first;       // with kShifted, where the words begin in their line, in elements
  };
  // Where the sheets and lines of a step begin.
  struct Step {
    int sheet;       // the first sheet in the ring
    unsigned shift;  // with kShifted, what the step adds to the shift of a line
    int first;       // with kShifted, where its lines begin in those of dy, in elements
  };

  __device__ __forceinline__ void locate(Consumer& me, int consumer) const {
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      const int index =
          min(((r * C::kConsumers + consumer) * 4 + warp % 4) * 8 + lane / 4, kRows * kPairs - 1);
      const int row = index / kPairs, pair = index % kPairs;
      const int d = min(row / C::kRowsH, C::kCountD(kind.d) - 1),
                h = min(row % C::kRowsH, C::kCountH(kind.h) - 1);
      const int plane = (C::kPlaneD(kind.d, d) * C::kPlanesH + C::kPlaneH(kind.h, h)) * C::kPlanesW;
      me.place[r] = pair * args.pair_pitch +
                    kSides * (plane * args.plane_pitch + C::kShiftH(kind.h, h) * args.line_pitch);
      me.sheet[r] = C::kShiftD(kind.d, d);
      me.shift[r] =
          shift_of(kind.group * C::kOutPerGroup + kind.first_out + channel_of(pair, 0),
                   me.sheet[r] * C::kStrideD + C::kPlaneOffsetD(kind.d, C::kPlaneD(kind.d, d)),
                   C::kShiftH(kind.h, h) * C::kStrideH + C::kPlaneOffsetH(kind.h, C::kPlaneH(kind.h, h)));
    }
  }

  // Returns, modulo 8, the elements from the start of a vector of memory to the start of a line. Coordinates
  // of a line may be divided into terms, whose shifts are added.
  __device__ __forceinline__ unsigned shift_of(int channel, int d, int h) const {
    return static_cast<unsigned>(channel) * static_cast<unsigned>(args.dy_strides.c) +
           static_cast<unsigned>(d) * static_cast<unsigned>(args.dy_strides.d) +
           static_cast<unsigned>(h) * static_cast<unsigned>(args.dy_strides.h);
  }

  // Finds a lane's words of a chunk for row tile r.
  __device__ __forceinline__ Place find(const Consumer& me, int r, int chunk, const Step& step) const {
    const Segment& segment = segments[4 * chunk + lane % 4];
    const int sheets = args.groups * args.box.d;
    int sheet = step.sheet + segment.d + me.sheet[r];
    if (sheet >= sheets) sheet -= sheets;
    Place found{static_cast<unsigned>(sheet * sheet_words + me.place[r] + max(segment.place, 0)),
                segment.place != kNoPlace, 0, 0};
    if constexpr (C::kShifted) {
      found.shift = step.shift + me.shift[r] + shift_of(0, segment.d * C::kStrideD, segment.h * kStepH);
      found.first = step.first + segment.w * C::kStrideW;
    }
    return found;
  }

  // Returns a word of a line that begins `shift` elements behind its place; elements before the line are
  // zero.
  template <int kWord>
  static __device__ __forceinline__ unsigned shifted_word(const unsigned* line, unsigned shift, int first) {
    const unsigned* const from = line + kWord + shift / 2;
    const unsigned word = ptx::shifted(from[0], from[1], shift % 2 * 16);
    // Lines begin in a whole vector of dy's line, so that no word lies on both sides of its start.
    if constexpr (C::kPlaneOffsetW(0) + 2 * kWord >= 0) return word;
    return first + 2 * kWord < 0 ? 0u : word;
  }

  __device__ __forceinline__ void load(Loaded& to, const Place& from, bool with_bias) const {
    const unsigned* const words = ring + from.word;
    to.used = from.used && with_bias;
    static_for<C::kLoads>([&](auto i) {
      constexpr int kI = decltype(i)::value;
      if constexpr (C::kShifted) {
        static_for<2>([&](auto half) {
          constexpr int kHalf = decltype(half)::value;
          const unsigned* const line = words + kHalf * kPairs * args.pair_pitch;
          const unsigned shift = (from.shift + shift_of(kHalf * kPairs, 0, 0)) % 8;
          static_for<4>([&](auto e) {
            constexpr int kE = decltype(e)::value, kWord = C::kLoadWord(kI) + kE;
            to.words[kHalf][kI].at[kE] = shifted_word<kWord>(line, shift, from.first);
          });
        });
      } else if constexpr (C::kLines) {
        const unsigned* const line = words + C::kLoadPlane(kI) * args.line_pitch + C::kLoadWord(kI);
        to.words[0][kI] = load_vector<4>(line);
        to.words[1][kI] = load_vector<4>(line + kPairs * args.pair_pitch);
      } else if constexpr (kRowsY) {
        const unsigned* const line = words + C::kLoadPlane(kI) * args.plane_pitch;
        const auto first = load_vector<2>(line + row_place(C::kLoadWord(kI)));
        const auto second = load_vector<2>(line + row_place(C::kLoadWord(kI) + 1));
        to.words[0][kI] = {first.at[0], first.at[1], second.at[0], second.at[1]};
      } else {
        to.words[0][kI] =
            load_vector<4>(words + 2 * (C::kLoadPlane(kI) * args.plane_pitch + C::kLoadWord(kI)));
      }
    });
  }

  template <int kRowTile>
  __device__ __forceinline__ void multiply(Consumer& me, const Fragments& a, unsigned long long b) const {
    ptx::matrix_fence();
    static_for<2>([&](auto s) {
      constexpr int kStep = decltype(s)::value;
      static_for<C::kTaps>([&](auto t) {
        constexpr int kTap = decltype(t)::value, kOperandIndex = C::kOperandOf(kTap, kStep);
        const auto& operand = kOperandIndex >= 0 ? a.loaded[kOperandIndex >= 0 ? kOperandIndex : 0]
                                                 : a.joined[kOperandIndex < 0 ? -1 - kOperandIndex : 0];
        ptx::MatrixMultiply<C::kColumns>::template issue<kOperand>(me.sums[kRowTile][kTap], operand,
                                                                   ptx::advance(b, kStep * kStepBytes));
      });
    });
    ptx::matrix_commit();
  }

  // The group and stage that products in flight may still read when a step ends. They are released in the
  // next step, after its first products are issued.
  struct Held {
    int group = -1, stage = 0;  // group is -1 if nothing is held
  };
  __device__ __forceinline__ void give_back(Held& held) const {
    if (held.group < 0) return;
    ptx::barrier_arrive(empty(held.group));
    ptx::barrier_arrive(stage_empty(held.stage));
    held.group = -1;
  }

  // Finds the words of an item, which is one chunk and one row tile; row tiles vary fastest. Items past the
  // last one use the last chunk.
  __device__ __forceinline__ Place find_item(const Consumer& me, int row, int item, const Step& step) const {
    const int chunk = min(2 * row + item / C::kRowTiles, 2 * row_segments() - 1);
    return find(me, item % C::kRowTiles, chunk, step);
  }

  // Multiplies one row of K, two chunks, for all row tiles. While products run, the words of the next item
  // are loaded (`ahead`), and the place of the item after it (`next`) is computed; with two sets of operands
  // (kDepth is 2), loaded words also become operands meanwhile. The caller has prepared the first item.
  __device__ __forceinline__ void multiply_row(Consumer& me, Fragments (&operands)[C::kDepth], int row,
                                               unsigned long long b, const Step& step, Loaded& ahead,
                                               Place& next, bool with_bias, Held& before) const {
    constexpr int kItems = 2 * C::kRowTiles;
    static_for<kItems>([&](auto item) {
      constexpr int kItem = decltype(item)::value, kNext = kItem + 1, kTile = kItem % C::kRowTiles;
      const bool more = kNext < kItems || row + 1 < row_segments();
      if constexpr (C::kDepth == 1) {
        Operands::join(operands[0], ahead, me.bias[kTile]);
        if (more) load(ahead, next, with_bias);
      } else {
        // The place is computed before the products, to load its words as soon as operands are free.
        next = find_item(me, row, kNext, step);
        ptx::pin(next.word);
      }
      multiply<kTile>(me, operands[kItem % C::kDepth], ptx::advance(b, kItem / C::kRowTiles * kChunkBytes));
      if constexpr (C::kDepth == 1) next = find_item(me, row, kNext + 1, step);
      ptx::matrix_wait<C::kDepth - 1>();
      if constexpr (C::kDepth == 2) {
        if (kItem == 0 && row == 0) give_back(before);
        if (more) load(ahead, next, with_bias);
        if (more) Operands::join(operands[kNext % C::kDepth], ahead, me.bias[kNext % C::kRowTiles]);
      }
    });
  }

  // `before` is what the previous step still holds.
  __device__ __forceinline__ void multiply_step(Consumer& me, Fragments (&operands)[C::kDepth], int stage,
                                                const Step& step, bool with_bias, Held& before) const {
    const unsigned x = ptx::shared_address(stages + stage * stage_bytes);
    Loaded ahead;
    load(ahead, find_item(me, 0, 0, step), with_bias);
    Place next = find_item(me, 0, 1, step);
    if constexpr (C::kDepth == 2) Operands::join(operands[0], ahead, me.bias[0]);
#pragma unroll 1
    for (int row = 0; row < row_segments(); ++row) {
      multiply_row(me, operands, row,
                   ptx::matrix_descriptor<kRowBytes>(x + row * C::kColumns * kRowBytes, 8 * kRowBytes), step,
                   ahead, next, with_bias, before);
    }
  }

  __device__ __forceinline__ void consume(int consumer) const {
    Consumer me;
    locate(me, consumer);
#pragma unroll
    for (int r = 0; r < C::kRowTiles; ++r) {
      me.bias[r][0] = me.bias[r][1] = 0.0f;
#pragma unroll
      for (int t = 0; t < C::kTaps; ++t) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) me.sums[r][t][i] = 0.0f;
      }
    }
    Ring group, arriving, stage;  // arriving: the last group that the step needs
    Held held;
    Fragments operands[C::kDepth];  // a step's last operands are still read when the next one begins
    // Blocks that share outputs take turns at summing them: this is the number of steps until the next turn.
    int until_bias = kind.first_in / C::kColumns;
    for (int index = part.begin; index < part.end;) {
      const Run run = run_at(index);
      for (int i = 0; i < args.ahead; ++i) arriving.advance(args.groups);
#pragma unroll 1
      for (int step = 0; step < run.count; ++step) {
        // Producers deliver in order: when this group has arrived, all earlier ones have.
        ptx::barrier_wait(full(arriving.index), arriving.parity);
        ptx::barrier_wait(stage_full(stage.index), stage.parity);
        const Step at{group.index * args.box.d,
                      run.n * static_cast<unsigned>(args.dy_strides.n) +
                          shift_of(0, (run.first + step) * args.box.d * C::kStrideD, run.h * kStepH),
                      run.w * C::kStrideW + C::kPlaneOffsetW(0)};
        multiply_step(me, operands, stage.index, at, until_bias == 0, held);
        until_bias = (until_bias == 0 ? kBlocksIn : until_bias) - 1;
        held = Held{group.index, stage.index};
        if constexpr (C::kDepth == 1) give_back(held);  // no products are in flight
        group.advance(args.groups);
        arriving.advance(args.groups);
        stage.advance(C::kStages);
      }
      ptx::matrix_wait<0>();
      give_back(held);
      // These groups were only needed by the last step of the run.
      for (int i = 0; i < args.ahead; ++i) {
        ptx::barrier_arrive(empty(group.index));
        group.advance(args.groups);
      }
      index += run.count;
    }
    ptx::wait_for_previous_launch();  // the previous launch may still read the memory of the parts
    if constexpr (C::kBias) store_bias(me, consumer);
    if (args.result == nullptr) {
      store(me, consumer);
    } else {
      store_result([&] { lay_down(me, consumer); });
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  ptx::launch_dependents();
  HopperWeightBlock<Config> block(args);
  block.prepare();
  if (block.warp < block.kProducerWarps) {
    ptx::keep_registers<Config::kProducerRegisters>();
    HopperWeightProducers<Config>{block}.produce();
    ptx::wait_for_previous_launch();
    if (args.result != nullptr) HopperWeightResults<Config>{block}.store_result([] {});
  } else {
    ptx::claim_registers<Config::kConsumerRegisters>();
    HopperWeightConsumers<Config>{{block}}.consume(block.warp / 4 - Config::kProducers);
  }
}

}  // namespace tconv3d
