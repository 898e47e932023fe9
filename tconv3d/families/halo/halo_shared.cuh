// A block of the halo kernel: its warps, and the layout of its shared memory: halo stages, panels, barriers,
// the consumers' scratch, and at the end the loaders' tables (halo_loaders.cuh).
#pragma once

#include "halo_choices.cuh"
#include "halo_layout.cuh"

namespace tconv3d {

// A position in a ring of buffers, and the parity of the current phase of its barriers.
template <int kCount>
struct Ring {
  unsigned index = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1;
    }
  }
};

template <class Config>
struct HaloShared {
  using Choices = HaloChoices<Config>;
  using Layout = HaloLayout<Config>;

  static constexpr int kProducerThreads = 128 * Config::kProducers;
  static constexpr int kLoaderWarps =
      4 * Config::kProducers - (Config::kWeights == Weights::kResident ? 0 : 1);
  static constexpr int kConsumerWarps = 4 * Config::kConsumers;
  static constexpr int kSlotWarps =
      Config::kDivision == Division::kConsumers ? 4 : kConsumerWarps;  // consumer warps that use a slot
  // Whether asynchronous copies arrive at the barrier of a stage by themselves.
  static constexpr bool kCopiesArrive =
      Choices::kCopiesRows && (Choices::kOperands || Config::kInput == Input::kInRegisters);
  // Whether consumers' lanes read a stage themselves. Then every lane arrives at the barrier of the empty
  // stage: this is as fast as one arrival per warp, and race checkers see it.
  static constexpr bool kLanesRelease =
      Config::kInput == Input::kLines || Config::kInput == Input::kInRegisters;
  static_assert(Config::kThreads == kProducerThreads + 128 * Config::kConsumers, "whole warpgroups");

  static constexpr int kHalfBytes = Config::kStageRows * Config::kRowBytes;
  static constexpr int kStageBytes = Config::kHalves * kHalfBytes;
  static constexpr int kPanelBytes =
      Config::kWeights == Weights::kResident ? Layout::kTileBytes : Config::kSlots * Config::kSlotBytes;
  static constexpr int kRingBarriers =
      2 * Config::kStages + (Config::kWeights == Weights::kResident ? 1 : 2 * Config::kSlots);
  static constexpr int kLongRunWarps = 3;  // producer warps that store; the fourth one copies
  static constexpr int kBarriers = kRingBarriers + 2 + (Config::kDivision == Division::kConsumers ? 8 : 0) +
                                   (Config::kOutput == Output::kLongRuns ? 2 * Config::kLongRunBuffers : 0);

  // A warp's sums pass through scratch to become contiguous lines: 32 outputs of 8 channels, or 16 outputs of
  // 16 channels.
  static constexpr int kScratch = 256;  // floats per warp
  // With Output::kImages the sums of a plane's rows lie in a buffer almost as in global memory
  // (halo_images.cuh), channel by channel and row by row, each row with 32 spare bytes for its alignment. The
  // pitch spreads the stores of a warp over the banks.
  static constexpr int kRowPitch =
      Config::kSlabs * 64 * Config::kStrideW * static_cast<int>(sizeof(typename Config::Scalar)) + 32;
  static constexpr int kImagePitch = (Config::kImageRows * kRowPitch + 63) / 64 * 64 + 16;
  static constexpr int kBufferBytes = Config::kOutTile * kImagePitch;
  static constexpr int kScratchBytes =
      Config::kOutput == Output::kImages                        ? Config::kImageBuffers * kBufferBytes
      : Config::kOutputUnitC || Config::kInput == Input::kLines ? 0
                                                                : 4 * kScratch * 4;  // bytes per consumer
  // Slabs that share every 2 * kWoven positions in sequence, in builds that take input lines as they lie in
  // memory (halo_lines.cuh).
  static constexpr int kWoven = 4 / static_cast<int>(sizeof(typename Config::Scalar));
  // With Output::kLongRuns all consumers write to images of runs, laid out as in global memory
  // (halo_long_runs.cuh).
  static constexpr int kLongRunBytes = Config::kOutTile * Config::kLongRunPitch;
  static constexpr int kScratchStart =
      Config::kStages * kStageBytes + kPanelBytes + (8 * kBarriers + 15) / 16 * 16;
  // The second of two consumers that divide K hands its sums to the first through this memory
  // (halo_divided.cuh).
  static constexpr int kPartStart = kScratchStart + Config::kConsumers * kScratchBytes;
  static constexpr int kPartBytes =
      Config::kDivision == Division::kConsumers ? Config::kSlabs * Layout::kColumns * 64 * 4 : 0;
  static constexpr int kTableStart =
      kPartStart + kPartBytes +
      (Config::kOutput == Output::kLongRuns ? Config::kLongRunBuffers * kLongRunBytes : 0);
  static_assert(kHalfBytes % 1024 == 0 && kPanelBytes % 8 == 0, "swizzles start at multiples of 1024");
  static_assert(Config::kWeights == Weights::kResident || Config::kSlotBytes % 1024 == 0,
                "swizzles start at multiples of 1024");

  // The shared-memory address at which the layout begins.
  unsigned base;
  __device__ __forceinline__ unsigned stage(unsigned i) const { return base + i * kStageBytes; }
  __device__ __forceinline__ unsigned panels() const { return base + Config::kStages * kStageBytes; }
  __device__ __forceinline__ unsigned slot(unsigned i) const { return panels() + i * Config::kSlotBytes; }
  __device__ __forceinline__ unsigned barrier(unsigned i) const { return panels() + kPanelBytes + 8 * i; }
  __device__ __forceinline__ unsigned stage_full(unsigned i) const { return barrier(i); }
  __device__ __forceinline__ unsigned stage_empty(unsigned i) const { return barrier(Config::kStages + i); }
  // The first consumer announces its lead at ahead(), and the second confirms at seen().
  __device__ __forceinline__ unsigned ahead() const { return barrier(kRingBarriers); }
  __device__ __forceinline__ unsigned seen() const { return barrier(kRingBarriers + 1); }
  // A warp of the second consumer has stored its sums at given(), and a warp of the first has read them at
  // taken().
  __device__ __forceinline__ unsigned given(int warp) const { return barrier(kRingBarriers + 2 + warp); }
  __device__ __forceinline__ unsigned taken(int warp) const { return barrier(kRingBarriers + 6 + warp); }
  __device__ __forceinline__ unsigned panels_full() const { return barrier(2 * Config::kStages); }
  __device__ __forceinline__ unsigned slot_full(unsigned i) const { return barrier(2 * Config::kStages + i); }
  __device__ __forceinline__ unsigned slot_empty(unsigned i) const {
    return barrier(2 * Config::kStages + Config::kSlots + i);
  }

  // Consumers arrive at image_full() after filling an image, producers at image_empty() after storing it.
  __device__ __forceinline__ unsigned image_full(unsigned i) const { return barrier(kRingBarriers + 2 + i); }
  __device__ __forceinline__ unsigned image_empty(unsigned i) const {
    return barrier(kRingBarriers + 2 + Config::kLongRunBuffers + i);
  }
  __device__ __forceinline__ unsigned char* image(unsigned i) const {
    return dynamic_shared<unsigned char>() + kPartStart + i * kLongRunBytes;
  }

  // Returns the image buffers of a consumer.
  __device__ __forceinline__ unsigned char* buffers(int consumer) const {
    return dynamic_shared<unsigned char>() + kScratchStart + consumer * kScratchBytes;
  }
  // Returns the scratch of a consumer's warp.
  __device__ __forceinline__ float* scratch(int consumer, int warp) const {
    return reinterpret_cast<float*>(dynamic_shared<unsigned char>() + kScratchStart +
                                    consumer * kScratchBytes + warp * (kScratchBytes / 4));
  }

  // Fills all stages with zeros. All threads call it before anybody uses the stages.
  __device__ __forceinline__ void clear_stages() const {
    constexpr int kBytes = Config::kStages * kStageBytes;
    for (int i = 16 * static_cast<int>(threadIdx.x); i < kBytes; i += 16 * Config::kThreads) {
      ptx::store_shared(base + i, make_uint4(0, 0, 0, 0));
    }
    ptx::fence_async_proxy();
  }

  // Initializes all barriers. One thread calls it before anybody uses them.
  __device__ __forceinline__ void start_barriers() const {
    for (int i = 0; i < Config::kStages; ++i) {
      ptx::barrier_init(stage_full(i),
                        Config::kInput == Input::kLines ? 1 : kLoaderWarps * (kCopiesArrive ? 32 : 1));
      ptx::barrier_init(stage_empty(i), kConsumerWarps * (kLanesRelease ? 32 : 1));
    }
    if constexpr (Config::kWeights == Weights::kResident) {
      ptx::barrier_init(panels_full(), 1);
    } else {
      for (int i = 0; i < Config::kSlots; ++i) {
        ptx::barrier_init(slot_full(i), 1);
        ptx::barrier_init(slot_empty(i), kSlotWarps);
      }
    }
    if constexpr (Config::kOutput == Output::kLongRuns) {
      for (int i = 0; i < Config::kLongRunBuffers; ++i) {
        ptx::barrier_init(image_full(i), kConsumerWarps * 32);
        ptx::barrier_init(image_empty(i), kLongRunWarps * 32);
      }
    } else {
      for (int i = kRingBarriers + 2; i < kBarriers; ++i) ptx::barrier_init(barrier(i), 32);
    }
    ptx::barrier_init(ahead(), 4);
    ptx::barrier_init(seen(), 4);
    ptx::fence_barrier_init();
  }
};

}  // namespace tconv3d
