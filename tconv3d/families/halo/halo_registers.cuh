// The halo kernel with a first operand that passes through the consumers' registers (Input::kInRegisters):
// marches over channels-last input in TF32.
//
// Float32 values that asynchronous copies bring past the producers' registers have to be rounded somewhere.
// In-place rounding would wait for every stage to arrive and pass over shared memory twice, in few warps.
// Here consumers load the operand themselves and round it in registers. Their matrix instructions then read
// only panels from shared memory, so that small instructions are not bound by its bandwidth. A lane loads
// four neighbouring channels of a row at once. Which of the 16 channels of four lanes stands for which K
// index of two steps does not matter, as long as panels have the same order (pack.cuh).
#pragma once

#include "halo_consumer.cuh"

namespace tconv3d {

template <class Config>
struct HaloRegisters {
  using Choices = HaloChoices<Config>;
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Slab = typename HaloTile<Config>::Slab;
  using Accumulators = HaloSums<Config>;
  using Sums = typename Accumulators::Sums;
  using Consumer = HaloConsumer<Config>;

  static constexpr int kColumns = Layout::kUnitColumns;
  // Sets of registers: one is loaded while the others multiply.
  static constexpr int kSets = Config::kOperandSets;
  static constexpr int kShifts = Layout::first_shift(0, Config::kPatterns);
  static_assert(!Choices::kOperands || Config::kInput != Input::kInRegisters, "nothing is rounded twice");
  struct Operands {
    unsigned at[Config::kSlabs][Layout::kPartSteps][4];
  };

  static __device__ constexpr int pattern_of(int shift) {
    int pattern = 0;
    while (shift >= Layout::first_shift(0, pattern + 1)) ++pattern;
    return pattern;
  }

  // Loads and rounds a lane's rows of all slabs, displaced by a shift, for all channels of a stage.
  template <int kSteps>
  static __device__ __forceinline__ void load(const Args& args, const Consumer& me,
                                              const Slab (&slabs)[Config::kSlabs], int displacement,
                                              Operands& to) {
    const unsigned stage = me.shared.stage(me.stages.index);
    static_for<2 * Config::kSlabs>([&](auto i) {
      constexpr int kSlab = decltype(i)::value / 2, kHalf = decltype(i)::value % 2;
      const int row = slabs[kSlab].row + (2 * me.warp + kHalf) * args.group_rows +
                      Accumulators::row_of(me.lane) + displacement;
      const unsigned first =
          stage + Layout::template swizzle<Layout::kRowPieces>(row * Config::kRowBytes + me.lane % 4 * 16);
      static_for<(kSteps + 1) / 2>([&](auto block) {
        constexpr int kBlock = decltype(block)::value;
        const uint4 words = ptx::load_shared(first ^ 64 * kBlock);
        const unsigned found[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          unsigned& word = to.at[kSlab][2 * kBlock + k / 2][kHalf + k % 2 * 2];
          word = Layout::operand(ptx::bits_to_float(found[k]), 0);
          ptx::pin(word);
        }
      });
    });
  }

  // Issues the products of one shift.
  template <int kShift, int kSteps>
  static __device__ __forceinline__ void issue(Sums& sums, const Operands& from, unsigned panels) {
    constexpr int kPattern = pattern_of(kShift);
    constexpr int kPanel = Layout::rows_before(0, kPattern) * Layout::kPartBytes +
                           (kShift - Layout::first_shift(0, kPattern)) * Layout::panel_bytes(kPattern);
    const auto b = ptx::matrix_descriptor<Layout::kPartBytes>(panels, 8 * Layout::kPartBytes);
    static_for<kSteps * Layout::units(kPattern)>([&](auto i) {
      constexpr int kStep = decltype(i)::value / Layout::units(kPattern);
      constexpr int kPlace = decltype(i)::value % Layout::units(kPattern);
      constexpr int kUnit = Config::kUnit(Config::kPatternUnit(kPattern) + kPlace);
      const auto panel = ptx::advance(b, kPanel + kPlace * kColumns * Layout::kPartBytes + 32 * kStep);
      static_for<Config::kSlabs>([&](auto m) {
        ptx::MatrixMultiply<kColumns>::template issue<OperandOf<Scalar>::kOperand>(
            &sums[m][kUnit * kColumns / 2], from.at[m][kStep], panel);
      });
    });
  }

  // Adds a chunk of a plane to the sums. `kBefore` is the number of shifts of this plane that were multiplied
  // before.
  template <int kSteps, int kBefore>
  static __device__ __forceinline__ void multiply_stage(const Args& args, Consumer& me, Sums& sums,
                                                        const Slab (&slabs)[Config::kSlabs],
                                                        Operands (&operands)[kSets], int chunk) {
    const int line = args.halo.w * args.items;
    const unsigned panels = me.shared.panels() + Layout::chunk_start(0, chunk);
    ptx::barrier_wait(me.shared.stage_full(me.stages.index), me.stages.parity);
    static_for<kShifts>([&](auto shift) {
      constexpr int kShift = decltype(shift)::value;
      Operands& own = operands[(kBefore + kShift) % kSets];
      // The matrix instructions that read this set of registers must have finished.
      ptx::matrix_wait<kSets - 1>();
      load<kSteps>(args, me, slabs, Config::kShift(kShift, 1) * line + Config::kShift(kShift, 2) * args.near,
                   own);
      ptx::matrix_fence();
      issue<kShift, kSteps>(sums, own, panels);
      ptx::matrix_commit();
      if constexpr (kShift == kShifts - 1) ptx::barrier_arrive(me.shared.stage_empty(me.stages.index));
      me.announce_lead();
    });
    me.stages.advance();
  }

  // Adds all chunks of a plane to the sums.
  static __device__ __forceinline__ void multiply(const Args& args, Consumer& me, Sums& sums,
                                                  const Slab (&slabs)[Config::kSlabs]) {
    static_assert(Config::kSources == 1 && Config::kVariants == 1 && Config::kGroupsPerTile == 1 &&
                      Config::kMarch && Config::kWeights == Weights::kResident && Config::kIn % 16 == 0,
                  "whole blocks of channels, one after the other");
    Operands operands[kSets];
    Accumulators::pin(sums);
    me.keep_behind();
    static_for<Layout::kChunks>([&](auto chunk) {
      constexpr int kChunk = decltype(chunk)::value;
      constexpr int kSteps = kChunk == Layout::kChunks - 1 ? Layout::kLastSteps : Layout::kPartSteps;
      multiply_stage<kSteps, kChunk * kShifts>(args, me, sums, slabs, operands, kChunk);
    });
    ptx::matrix_wait<0>();
    Accumulators::pin(sums);
  }
};

}  // namespace tconv3d
