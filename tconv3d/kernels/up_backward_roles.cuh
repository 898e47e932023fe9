// Who does what in a block that computes all gradients of an up-convolution (up_backward.cuh,
// up_backward_last.cuh): one warpgroup copies, one computes the input's gradient, two share the weight's.
#pragma once

#include "ptx.cuh"

namespace tconv3d {

template <class Config, class Kernel>
__device__ __forceinline__ void take_roles(Kernel& kernel) {
  kernel.prepare();
  if (kernel.warp < 4) {
    ptx::keep_registers<Config::kProducerRegisters>();
    kernel.produce();
    return;
  }
  kernel.load_weights();
  if (kernel.warp < 8) {
    if constexpr (Config::kInputRegisters < 65536 / Config::kThreads) {  // fewer than it began with
      ptx::keep_registers<Config::kInputRegisters>();
    }
    kernel.input_grad();
  } else {
    ptx::claim_registers<Config::kWeightRegisters>();
    if (kernel.warp < 12) {
      kernel.template weight_grad<0>();
    } else {
      kernel.template weight_grad<1>();
    }
  }
}

}  // namespace tconv3d
