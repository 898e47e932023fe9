// Packs the weights of an up-convolution for up.cuh, which then loads them by bulk copies: for every kind of
// block and every chunk of K, the swizzled rows of the block's columns. Float weights are rounded to TF32.
#pragma once

#include "up_layouts.cuh"

namespace tconv3d {

template <class C>
struct UpPack {
  using Layout = typename Choose<C::kLast, UpChannelsLast<C>, UpContiguous<C>>::type;
  using Scalar = typename Layout::Scalar;
  static constexpr int kChunks = (Layout::kSteps + Layout::kStageSteps - 1) / Layout::kStageSteps;
  static constexpr int kPieces = Layout::kRowBytes / 16;
  static constexpr int kUnits = C::kColumns * kPieces;  // units of 16 bytes per chunk

  // Consecutive units are consecutive columns, so that contiguous weights are read coalesced.
  static __device__ __forceinline__ void write(const Args& args, const Layout& layout, int chunk, int unit) {
    const int column = unit % C::kColumns, piece = unit / C::kColumns;
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned items[Layout::kPerWord];
#pragma unroll
      for (int k = 0; k < Layout::kPerWord; ++k) {
        const int in = Layout::channel_of(piece, i * Layout::kPerWord + k);
        const Scalar* const from = layout.weight_at(chunk * Layout::kStageItems + in, column);
        items[k] = OperandOf<Scalar>::bits(from == nullptr ? Scalar{} : load_constant(from));
      }
      words[i] = Layout::kPerWord == 1 ? items[0] : items[0] | items[Layout::kPerWord - 1] << 16;
    }
    const int row = Layout::row_of(column);
    unsigned char* const to = static_cast<unsigned char*>(args.y) +
                              (static_cast<long long>(layout.kind) * kChunks + chunk) * kUnits * 16;
    *reinterpret_cast<uint4*>(to + row * Layout::kRowBytes + (piece ^ row % 8) * 16) =
        uint4{words[0], words[1], words[2], words[3]};
  }
};

template <class Config>
__device__ void run(const Args& args) {
  using Pack = UpPack<Config>;
  ptx::launch_dependents();
  const int kind = static_cast<int>(blockIdx.x) / Pack::kChunks;
  const int chunk = static_cast<int>(blockIdx.x) % Pack::kChunks;
  const typename Pack::Layout layout(args, 0, 0, kind, nullptr);
  for (int unit = static_cast<int>(threadIdx.x); unit < Pack::kUnits; unit += Config::kThreads) {
    Pack::write(args, layout, chunk, unit);
  }
}

}  // namespace tconv3d
