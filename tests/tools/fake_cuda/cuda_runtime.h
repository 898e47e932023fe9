// CUDA's runtime, as far as an exported file calls it, over the emulator: a launch runs to its end on the CPU.
// For one translation unit; the emulator's header is included before it.
#pragma once

#include <cstring>

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorLaunchFailure = 719 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

extern "C" int emulator_launch(const void* args, unsigned args_bytes, const unsigned* grid, unsigned threads,
                               unsigned shared_bytes, int order, unsigned long long seed,
                               int (*previous)(), void** stacks, char* error, size_t error_bytes);

namespace fake {

inline char error[16384];
inline void (*thread)(const void* args);
inline void (*kernel)();
inline size_t allowed_bytes;  // bytes of shared memory that the kernel asked for last
inline void (*asked)();
constexpr unsigned kArgsBytes = 4096;

}  // namespace fake

inline const char* cudaGetErrorString(cudaError_t) { return fake::error; }

template <class Args>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Args), cudaFuncAttribute, int bytes) {
  fake::asked = reinterpret_cast<void (*)()>(kernel);
  fake::allowed_bytes = bytes;
  return cudaSuccess;
}

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

// cudaLaunchKernel is missing here: CUDA 12 declares it so that nvcc 12 cannot deduce the type of a kernel.
template <class Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Args), Args args) {
  static_assert(sizeof(Args) <= fake::kArgsBytes);
  fake::kernel = reinterpret_cast<void (*)()>(kernel);
  const size_t shared_bytes = config->dynamicSmemBytes;
  if (shared_bytes > 48 * 1024 && (fake::asked != fake::kernel || fake::allowed_bytes < shared_bytes)) {
    strcpy(fake::error, "more shared memory than the kernel may have");
    return cudaErrorLaunchFailure;
  }
  fake::thread = [](const void* args) {
    reinterpret_cast<void (*)(Args)>(fake::kernel)(*static_cast<const Args*>(args));
  };
  alignas(16) unsigned char bytes[fake::kArgsBytes] = {};
  memcpy(bytes, &args, sizeof(Args));
  const unsigned size[3] = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  static void* stacks = nullptr;
  const int failed =
      emulator_launch(bytes, fake::kArgsBytes, size, config->blockDim.x, static_cast<unsigned>(shared_bytes), 0, 0,
                      nullptr, &stacks, fake::error, sizeof fake::error);
  return failed ? cudaErrorLaunchFailure : cudaSuccess;
}

emulator::Kernel emulated_kernel = {
    "exported", [](const void* args) { fake::thread(args); }, fake::kArgsBytes, 16, 1024};
