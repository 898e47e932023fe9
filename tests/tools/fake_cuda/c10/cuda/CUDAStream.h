// The CPU has one stream.
#pragma once

using cudaStream_t = void*;

namespace c10::cuda {
inline cudaStream_t getCurrentCUDAStream() { return nullptr; }
}  // namespace c10::cuda
