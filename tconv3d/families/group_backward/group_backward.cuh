// The gradients of a layer with small groups (at most 8 input channels) from one read of dy, on every GPU
// since compute capability 8.0 (TF32, 16-bit types, whose values TF32 represents exactly, and strict
// float32):
//   dx[ci][i]      = sum over co, t of  w[ci][co][t] * dy[co][stride*i + t*dilation - padding]
//   dw[ci][co][t]  = sum over i of      x[ci][i]     * dy[co][stride*i + t*dilation - padding]
//   db[co]         = sum of dy[co], if it is wanted and every output belongs to a position (kBias)
//
// With so few channels the time is that of moving dy: every element is read from global memory once, by few
// instructions, and from shared memory once for each gradient, for all its taps. A block owns a bundle of
// groups (at most 8 channels in and out; weights between groups are zero) and loops over columns: a tile of
// whole lines of positions, some of them along h, from one position to another along d.
//
//   producer       a warp (several with kLast). It copies the lines of dy that a plane of the tile needs, a
//   run
//                  of memory for each channel, to a stage of a ring, and those of x to another ring. Since
//                  Hopper (kHopper) the copy engine moves a run; before, the lanes move 16 bytes each
//   input grad     warps with 16 positions of kRows lines each. Rows are positions, K is co, columns are ci.
//                  They hold all weights in registers, and accumulators for as many positions along d as a
//                  plane of dy contributes to
//   weight grad    warps that take 8 positions of kRows lines in turn. Rows are two taps along w and co, K is
//                  positions, columns are ci. Accumulators of all taps stay in registers until the end. These
//                  warps also sum the outputs that belong to the positions: db
//
// A plane of dy (output stride*q + phase along d) is used for all taps of its phase at once: tap t adds to dx
// at position q - shift(t), or is multiplied with x there. A lane loads a window of a line: all words that
// the taps of two adjacent positions reach, so that the lanes of a warp are two strides apart. Lines outside
// dy are skipped, words outside dy are zero.
//
// Runs may begin at any address: copies begin at the preceding multiple of 16 bytes. With a stride of 2 and
// an odd distance between channels, the windows of four channels begin in different banks.
//
// For channels-last tensors (kLast) the producers copy a bundle's part of every position, pieces of 16 bytes
// (or 8 of x), with cp.async into a cell. In a line of dy, cells of one phase along w are consecutive, so
// that a word of a window is at a constant distance from the first one; cells of dy are an odd number of
// pieces apart, which avoids bank conflicts.
//
// More than 8 output channels of a group are divided into slices (kSlices). A block loops over all its
// columns for one slice after another. Sums for dx continue from those of earlier slices, which the same lane
// has stored: in dx itself, or in float32 in the workspace for 16-bit types. Sums for dw and db end with each
// slice.
//
// Strict float32 (kHalves == 2) computes three TF32 products of the halves of two values for each product.
// Tensor cores add at most 32 terms of a sum, the small products first, and ordinary additions the rest. The
// high half of a value is the value itself, whose last bits tensor cores ignore, so that the many words of dy
// are split by three instructions each. The error is 2e-7: that of sums of about 200 multiply-adds. The low
// halves of the weights are in shared memory. A NaN whose only payload is in its last 13 bits may become
// infinite.
//
// Partial sums of dw and db are written side by side and added by reduce_gradients.cuh in a fixed order.
#pragma once

#include "group_backward_input_grad.cuh"
#include "group_backward_producer.cuh"
#include "group_backward_weight_grad.cuh"

namespace tconv3d {

// Computes all columns of the block for the bundle, or for a slice of its output channels.
template <class Config>
__device__ __forceinline__ void compute(const GroupTiles<Config>& tiles,
                                        typename GroupTiles<Config>::Rings& rings) {
  constexpr int kFirst = Config::kProducers, kFirstOfWeight = kFirst + Config::kInputWarps;
  if (tiles.warp < kFirst) {
    GroupProducer<Config>{tiles}.produce(rings);
  } else if (tiles.warp < kFirstOfWeight) {
    if constexpr (Config::kInputWarps > 0) {
      GroupInputGrad<Config>{tiles}.input_grad(tiles.warp - kFirst, rings);
    }
  }
  if constexpr (Config::kWeightWarps > 0) {
    const GroupWeightGrad<Config> weights{tiles};
    if (tiles.warp >= kFirstOfWeight) {
      weights.weight_grad(tiles.warp - kFirstOfWeight, rings);
    } else {
      tiles.meet();
    }
    tiles.meet();
    weights.store_weights();
  }
}

template <class Config>
__device__ void run(const Args& args) {
  if constexpr (Config::kHopper) ptx::launch_dependents();
  GroupTiles<Config> tiles(args);
  tiles.prepare();
  typename GroupTiles<Config>::Rings rings;
  if constexpr (Config::kSlices == 1) {
    compute<Config>(tiles, rings);
  } else {
#pragma unroll 1
    for (; tiles.slice < Config::kSlices; ++tiles.slice) {
      compute<Config>(tiles, rings);
      if constexpr (Config::kWeightWarps > 0) {  // the next slice is copied to where sums were passed
        if constexpr (Config::kHopper) ptx::fence_async_proxy();
        tiles.meet();
      }
    }
  }
}

}  // namespace tconv3d
