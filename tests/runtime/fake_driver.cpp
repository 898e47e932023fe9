// A libcuda.so.1 without a GPU: it does what the launcher relies on, and writes every call to a file.
//
// The real Python binding of the driver is loaded on top of it, so the tests see what the driver would see:
// the launch configuration, the bytes of the arguments, the context that is current in the calling thread.
// FAKE_CUDA_LOG names the file; FAKE_CUDA_FAIL=<call>:<code> makes a call fail; FAKE_CUDA_VERSION and
// FAKE_CUDA_ARGS_BYTES replace what the driver says of itself and of the kernel; FAKE_CUDA_CODE names a file
// that loaded code is compared with.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int kInvalidContext = 201;
constexpr std::uintptr_t kContexts = 0x1000, kLibraries = 0x2000, kKernels = 0x3000, kFunctions = 0x4000;

struct Attribute {  // CUlaunchAttribute
  int id;
  char padding[4];
  union {
    unsigned overlap;
    char value[64];
  };
};
struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned attribute_count;
};

thread_local std::vector<std::uintptr_t> contexts;
thread_local int capture_mode = 0;
int loaded = 0;

int number(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

// Logs a call; returns the error it shall have.
int call(const char* name, const char* format = "", ...) {
  char text[2000];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (const char* path = getenv("FAKE_CUDA_LOG")) {
    FILE* file = fopen(path, "a");
    fprintf(file, "%s %s\n", name, text);
    fclose(file);
  }
  const char* fail = getenv("FAKE_CUDA_FAIL");
  const std::string prefix = std::string(name) + ":";
  return fail && !strncmp(fail, prefix.c_str(), prefix.size()) ? atoi(fail + prefix.size()) : 0;
}

std::string hexadecimal(const void* data, int size) {
  std::string text(2 * size, '0');
  for (int i = 0; i < size; ++i)
    snprintf(&text[2 * i], 3, "%02x", static_cast<const unsigned char*>(data)[i]);
  return text;
}

}  // namespace

extern "C" {

int fake_cuInit(unsigned) { return call("cuInit"); }

int fake_cuDriverGetVersion(int* version) {
  *version = number("FAKE_CUDA_VERSION", 13000);
  return 0;
}

int fake_cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return call("cuDeviceGet");
}

int fake_cuDeviceGetName(char* name, int size, int) {
  snprintf(name, size, "Fake GPU");
  return call("cuDeviceGetName");
}

int fake_cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 97 ? 232448 : -1;
  return call("cuDeviceGetAttribute");
}

int fake_cuDevicePrimaryCtxRetain(std::uintptr_t* context, int device) {
  *context = kContexts + device;
  return call("cuDevicePrimaryCtxRetain");
}

int fake_cuCtxPushCurrent(std::uintptr_t context) {
  const int error = call("cuCtxPushCurrent", "device=%d", int(context - kContexts));
  if (!error) contexts.push_back(context);
  return error;
}

int fake_cuCtxPopCurrent(std::uintptr_t* context) {
  *context = contexts.back();
  contexts.pop_back();
  return call("cuCtxPopCurrent");
}

int fake_cuCtxGetDevice(int* device) {
  call("cuCtxGetDevice");
  if (contexts.empty()) return kInvalidContext;
  *device = int(contexts.back() - kContexts);
  return 0;
}

int fake_cuThreadExchangeStreamCaptureMode(int* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return call("cuThreadExchangeStreamCaptureMode", "mode=%d", capture_mode);
}

// Tells whether code begins with the content of the file that the environment variable FAKE_CUDA_CODE names.
int is_expected(const void* code) {
  const char* name = std::getenv("FAKE_CUDA_CODE");
  std::FILE* file = name ? std::fopen(name, "rb") : nullptr;
  if (!file) return 0;
  std::vector<char> expected(1 << 20);
  expected.resize(std::fread(expected.data(), 1, expected.size(), file));
  std::fclose(file);
  return !expected.empty() && !memcmp(code, expected.data(), expected.size());
}

int fake_cuLibraryLoadData(std::uintptr_t* library, const void* code, ...) {
  const int error = call("cuLibraryLoadData", "elf=%d mode=%d expected=%d",
                         !memcmp(code,
                                 "\x7f"
                                 "ELF",
                                 4),
                         capture_mode, is_expected(code));
  *library = kLibraries + loaded++;
  return error;
}

int fake_cuLibraryGetKernel(std::uintptr_t* kernel, std::uintptr_t library, const char* name) {
  *kernel = kKernels + (library - kLibraries);
  return call("cuLibraryGetKernel", "name=%s", name);
}

int fake_cuKernelGetFunction(std::uintptr_t* function, std::uintptr_t kernel) {
  *function = kFunctions + (kernel - kKernels);
  return call("cuKernelGetFunction");
}

int fake_cuFuncLoad(std::uintptr_t function) {
  return call("cuFuncLoad", "function=%d", int(function - kFunctions));
}

int fake_cuKernelGetParamInfo(std::uintptr_t, size_t, size_t* offset, size_t* size) {
  *offset = 0;
  *size = number("FAKE_CUDA_ARGS_BYTES", 24);
  return call("cuKernelGetParamInfo");
}

int fake_cuKernelSetAttribute(int attribute, int value, std::uintptr_t kernel, int device) {
  return call("cuKernelSetAttribute", "attribute=%d value=%d kernel=%d device=%d", attribute, value,
              int(kernel - kKernels), device);
}

int fake_cuLaunchKernelEx(const Config* config, std::uintptr_t kernel, void** parameters, void** extra) {
  if (contexts.empty()) return kInvalidContext;
  const int size = number("FAKE_CUDA_ARGS_BYTES", 24);
  const std::string arguments = hexadecimal(parameters[0], size);
  const auto stream = reinterpret_cast<std::uintptr_t>(config->stream);
  usleep(200);  // a thread that wrote into this slot would do it now
  const bool torn = arguments != hexadecimal(parameters[0], size) || config->stream != (void*)stream;
  unsigned overlap = 0;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id == 6) overlap = config->attributes[i].overlap;
  }
  return call("cuLaunchKernelEx",
              "kernel=%d device=%d grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%lu attributes=%u "
              "overlap=%u args=%s torn=%d extra=%d",
              int(kernel - kKernels), int(contexts.back() - kContexts), config->grid[0], config->grid[1],
              config->grid[2], config->block[0], config->block[1], config->block[2], config->shared_bytes,
              (unsigned long)stream, config->attribute_count, overlap, arguments.c_str(), torn,
              extra != nullptr);
}

int fake_cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return 0;
}

int fake_cuGetErrorString(int error, const char** text) {
  static thread_local char buffer[40];
  snprintf(buffer, sizeof buffer, "made up, code %d", error);
  *text = buffer;
  return 0;
}

int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&cuGetProcAddress_v2), &self);
  static void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *function = dlsym(library, (std::string("fake_") + name).c_str());
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}

int fake_cuGetProcAddress(const char* name, void** function, int version, uint64_t flags, int* status) {
  return cuGetProcAddress_v2(name, function, version, flags, status);
}

}  // extern "C"
