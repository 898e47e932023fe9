// Writes the weight, or x, as the packed operand of up_grad.cuh: for every tile of input channels and every
// chunk of K the swizzled 64-byte rows of the channels, rounded to TF32. Of every 8 words of K the
// even-numbered ones come first. Channels and words outside the tensor are zeros.
#pragma once

#include "operands.cuh"

namespace tconv3d {

template <class Config>
struct UpGradPack {
  static constexpr int kRowBytes = 64, kSteps = 2;  // row bytes and K steps of a chunk
  using Words = Vector<unsigned, 4>;

  // Loads 4 pairs of words of a channel, from pair `first` on; words outside the tensor are zero.
  static __device__ __forceinline__ void load(const Args& args, float (&values)[8], int channel, int first) {
    const bool aligned = reinterpret_cast<unsigned long long>(args.from) % 16 == 0;
    if (args.vectors && aligned) {
      const bool there = channel < Config::kIn && first < args.pairs;
      const int item = there ? divide(first, args.by_item) : 0;
      const float* const from = at(args, channel, item, first);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto four = there ? load_vector<4>(from + 4 * i) : Vector<float, 4>{};
#pragma unroll
        for (int k = 0; k < 4; ++k) values[4 * i + k] = four.at[k];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool there = channel < Config::kIn && first + i < args.pairs;
      const int item = there ? divide(first + i, args.by_item) : 0;
      const float* const from = at(args, channel, item, first + i);
#pragma unroll
      for (int k = 0; k < 2; ++k) values[2 * i + k] = there ? load_constant(from + k) : 0.0f;
    }
  }
  static __device__ __forceinline__ const float* at(const Args& args, int channel, int item, int pair) {
    return static_cast<const float*>(args.from) + item * args.item_stride + channel * args.channel_stride +
           2ll * (pair - item * static_cast<int>(args.by_item.divisor));
  }

  static __device__ __forceinline__ void write(const Args& args, int unit) {
    const int panel = divide(unit, args.by_panel), tile = divide(panel, args.by_chunks);
    const int in_panel = unit - panel * static_cast<int>(args.by_panel.divisor);
    const int row = in_panel / kSteps, step = in_panel % kSteps;
    const int chunk = panel - tile * static_cast<int>(args.by_chunks.divisor);
    float values[8];
    load(args, values, tile * Config::kColumns + row, (chunk * kSteps + step) * 4);
    unsigned char* const to = static_cast<unsigned char*>(args.to) +
                              (static_cast<long long>(panel) * Config::kColumns + row) * kRowBytes;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      Words words;
#pragma unroll
      for (int i = 0; i < 4; ++i) words.at[i] = OperandOf<float>::bits(values[2 * i + k]);
      store_vector(reinterpret_cast<unsigned*>(to + ((2 * step + k) ^ row / 2 % 4) * 16), words);
    }
  }
};

template <class Config>
__device__ void run(const Args& args) {
  ptx::launch_dependents();
  ptx::wait_for_previous_launch();
  for (int unit = static_cast<int>(blockIdx.x) * Config::kThreads + static_cast<int>(threadIdx.x);
       unit < args.units; unit += static_cast<int>(gridDim.x) * Config::kThreads) {
    UpGradPack<Config>::write(args, unit);
  }
}

}  // namespace tconv3d
