// The matrix instructions of the halo kernel: rows of the halo, in place, times one panel.
#pragma once

#include "halo_shared.cuh"
#include "halo_sums.cuh"

namespace tconv3d {

template <class Config>
struct HaloProducts {
  using Layout = HaloLayout<Config>;
  using Scalar = typename Config::Scalar;
  using Sums = typename HaloSums<Config>::Sums;

  // Issues the products of one panel: all units that its shift feeds, all slabs, all steps of the chunk.
  template <int kPattern, int kSteps, int kFirstSlab = 0, int kOwnSlabs = Config::kSlabs>
  static __device__ __forceinline__ void multiply_panel(Sums& sums,
                                                        const unsigned long long (&a)[Config::kSlabs],
                                                        unsigned long long b, unsigned displacement) {
    constexpr ptx::Operand kOperand = OperandOf<Scalar>::kOperand;
    static_for<Config::kGroupsPerTile>([&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      constexpr int kFirstStep = kGroup * Config::kGroupSlots / Layout::kStepItems;
      constexpr int kGroupSteps =
          Config::kGroupsPerTile > 1 ? Config::kGroupSlots / Layout::kStepItems : kSteps;
#pragma unroll
      for (int step = 0; step < kGroupSteps; ++step) {
        const unsigned k = 32 * (kFirstStep + step);
        static_for<Layout::units(kPattern)>([&](auto u) {
          constexpr int kPlace = decltype(u)::value;  // index of the unit in the panel
          constexpr int kUnit = Config::kUnit(Config::kPatternUnit(kPattern) + kPlace);
          constexpr int kFirst = kGroup * Layout::kGroupColumns + kUnit * Layout::kUnitColumns;
          const unsigned long long panel =
              ptx::advance(b, kPlace * Layout::kUnitColumns * Layout::kPartBytes + k);
          static_for<kOwnSlabs>([&](auto m) {
            constexpr int kSlab = kFirstSlab + decltype(m)::value;
            ptx::MatrixMultiply<Layout::kUnitColumns>::template issue<kOperand>(
                &sums[kSlab][kFirst / 2], ptx::advance(a[kSlab], displacement + k), panel);
          });
        });
      }
    });
  }

  // Issues and commits the products of one panel for some slabs: bit m of `which` stands for slab m.
  template <int kPattern, int kSteps>
  static __device__ __forceinline__ void multiply_slabs(Sums& sums,
                                                        const unsigned long long (&a)[Config::kSlabs],
                                                        unsigned long long b, unsigned displacement,
                                                        unsigned which) {
    if (which == (1u << Config::kSlabs) - 1) {
      ptx::matrix_fence();
      multiply_panel<kPattern, kSteps>(sums, a, b, displacement);
      ptx::matrix_commit();
    } else if constexpr (Config::kSlabs == 2) {
      // Each branch commits a group of its own. If branches joined inside a group, the compiler would split
      // it into several groups, and waiting for all groups but the last would wait for all products.
      if (which == 1) {
        ptx::matrix_fence();
        multiply_panel<kPattern, kSteps, 0, 1>(sums, a, b, displacement);
        ptx::matrix_commit();
      } else if (which == 2) {
        ptx::matrix_fence();
        multiply_panel<kPattern, kSteps, 1, 1>(sums, a, b, displacement);
        ptx::matrix_commit();
      } else {
        ptx::matrix_commit();
      }
    } else {
      static_for<Config::kSlabs == 1 ? 0 : Config::kSlabs>([&](auto m) {
        if (which >> m & 1) {
          ptx::matrix_fence();
          multiply_panel<kPattern, kSteps, m, 1>(sums, a, b, displacement);
        }
      });
      ptx::matrix_commit();
    }
  }

  // Issues the three products of one or several panels in strict float32, all small products first.
  template <int kPattern, int kSteps, int kPanels>
  static __device__ __forceinline__ void multiply_halves(Sums& sums,
                                                         const unsigned long long (&a)[Config::kSlabs],
                                                         const unsigned long long* b,
                                                         const unsigned* displacement) {
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
      const unsigned long long low = ptx::advance(b[i], Layout::half_rows(kPattern) * Layout::kPartBytes);
      multiply_panel<kPattern, kSteps>(sums, a, b[i], displacement[i] + HaloShared<Config>::kHalfBytes);
      multiply_panel<kPattern, kSteps>(sums, a, low, displacement[i]);
    }
#pragma unroll
    for (int i = 0; i < kPanels; ++i) multiply_panel<kPattern, kSteps>(sums, a, b[i], displacement[i]);
  }

  // Tensor cores round every sum towards zero, so that a long chain of products drifts. Strict float32
  // therefore adds the sums of one or several panels to totals, by additions that round to nearest; the
  // rounding errors of these additions are the values that the sums of the next panel start from. Sums over
  // 32 channels and more lose about one unit in the last place on average, which a factor of 1 + 2^-23
  // compensates.
  template <int kPattern, int kSteps>
  static __device__ __forceinline__ void add_to_totals(Sums& totals, Sums& sums, int panels) {
    constexpr int kChannels = Config::kGroupsPerTile > 1 ? Config::kGroupSlots : kSteps * Layout::kStepItems;
    const float scale = kChannels * panels >= 32 ? 1.0f + 0x1p-23f : 1.0f;
    static_for<Config::kSlabs * Config::kGroupsPerTile * Layout::units(kPattern)>([&](auto i) {
      constexpr int kIndex = decltype(i)::value, kUnits = Layout::units(kPattern);
      constexpr int kSlab = kIndex / kUnits / Config::kGroupsPerTile;
      constexpr int kGroup = kIndex / kUnits % Config::kGroupsPerTile;
      constexpr int kUnit = Config::kUnit(Config::kPatternUnit(kPattern) + kIndex % kUnits);
      constexpr int kFirst = (kGroup * Layout::kGroupColumns + kUnit * Layout::kUnitColumns) / 2;
#pragma unroll
      for (int k = kFirst; k < kFirst + Layout::kUnitColumns / 2; ++k) {
        ptx::add_keeping_rest(totals[kSlab][k], sums[kSlab][k], scale);
      }
    });
  }
};

}  // namespace tconv3d
