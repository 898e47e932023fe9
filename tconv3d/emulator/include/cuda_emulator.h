// The part of CUDA's language that this project's kernels use, for a host C++ compiler.
//
// The emulator compiles a kernel's own source with this header force-included (-include), and links it
// with runtime.cpp, which is compiled once. How a launch runs:
//
// - Every CUDA thread is a fiber: a stack of its own and a saved stack pointer. One OS thread runs all
//   fibers of a launch, each until it ends or blocks, so nothing here needs to be atomic. A fiber that
//   ends hands its stack to the next one: a kernel without barriers runs on one stack, with little
//   more than a function call per thread.
// - A fiber blocks in one place only, `emulator::wait_until(predicate)`. The scheduler goes over the
//   fibers in turn and resumes those whose predicate has become true. When nothing is left that can
//   run, the launch has deadlocked, and fails with a list of who waits where. Barriers, shuffles, and
//   all functions of emulated_ptx.h and emulated_ptx_hopper.h that wait are predicates over counters.
// - Blocks run one after the other.
// - A __shared__ variable is a thread_local: nothing else in a kernel's library is, so the library's
//   thread-local segment is exactly the block's static shared memory. The runtime fills it with 0xFF
//   (NaN in every floating-point format) at block start, as it does dynamic shared memory.
// - `emulator::fail` ends the launch with a message, which Python raises as a RuntimeError.
//
// A kernel's library serves one launch at a time (runtime.cpp holds a lock), so its state is in plain
// globals. This header must stay light, as every geometry compiles it anew: no standard C++ headers
// (<cmath> alone costs more than the rest of a small kernel).
#pragma once

#define TCONV3D_EMULATOR 1

#define __device__
#define __global__
#define __constant__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

// ---- Vector types, with CUDA's alignments.

#define EMULATOR_VECTOR2(name, type, alignment)     \
  struct alignas(alignment) name##2 { type x, y; }; \
  inline name##2 make_##name##2(type x, type y) { return name##2 {x, y}; }
#define EMULATOR_VECTOR3(name, type) \
  struct name##3 { type x, y, z; };  \
  inline name##3 make_##name##3(type x, type y, type z) { return name##3 {x, y, z}; }
#define EMULATOR_VECTOR4(name, type, alignment)           \
  struct alignas(alignment) name##4 { type x, y, z, w; }; \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return name##4 {x, y, z, w}; }
#define EMULATOR_VECTORS(name, type, alignment2, alignment4) \
  EMULATOR_VECTOR2(name, type, alignment2)                   \
  EMULATOR_VECTOR3(name, type)                               \
  EMULATOR_VECTOR4(name, type, alignment4)

EMULATOR_VECTORS(int, int, 8, 16)
EMULATOR_VECTORS(uint, unsigned, 8, 16)
EMULATOR_VECTORS(float, float, 8, 16)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// The indices of the running thread. The scheduler sets them before it resumes a fiber.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// ---- The runtime's interface.

namespace emulator {

constexpr unsigned kPoison = 0xFFu;

// A place in a kernel, for error messages.
struct Where {
  const char* what;
  const char* file;
  int line;
  const void* call = nullptr;  // where the kernel calls an instruction that all lanes must execute together
};

struct StateNode;

// The state of a warp whose lanes meet in a shuffle, a vote or a __syncwarp.
struct Warp {
  unsigned arrived = 0;  // lanes waiting to be matched
  unsigned ended = 0;    // lanes whose threads have returned, or which the block does not have
  unsigned mask[32];     // per waiting lane: the mask of its call
  const char* what[32];  // per waiting lane: the name of the intrinsic
  const void* call[32];  // per waiting lane: the place of a call that must be one for all lanes, or null
  int source[32];        // per waiting lane: the lane whose value it wants
  unsigned long long value[32];   // per waiting lane: the value it gives
  unsigned long long result[32];  // per matched lane: the value it gets
  unsigned ballot[32];            // per matched lane: the lanes that gave a non-zero value
};

struct Block {
  unsigned char* dynamic_shared;
  unsigned dynamic_shared_bytes;
  unsigned live;        // threads that have not returned
  unsigned arrived;     // threads waiting at __syncthreads
  unsigned generation;  // how many times __syncthreads has let the block through
  Where barrier;        // place of the __syncthreads at which threads wait
  bool waited;          // whether a thread has waited for the previous launch
  Warp* warps;
  StateNode* states;
};

struct Thread {
  unsigned rank;  // linear index in the block
  uint3 index;
  Block* block;
  StateNode* states;
  bool (*ready)(void* predicate);  // null unless the thread waits
  void* predicate;
  Where where;
  struct Fiber* fiber;  // null before the thread starts and after it ends
  bool ended;
};

extern Thread* current;  // the thread that runs, or whose predicate is being evaluated

inline unsigned thread_rank() { return current->rank; }
inline unsigned lane() { return current->rank % 32u; }
inline Block& block() { return *current->block; }
inline Warp& warp() { return current->block->warps[current->rank / 32u]; }

// Ends the launch with a message in printf's format. It may be called from a fiber or from a predicate.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void trap(Where where);
// Makes the launch fail once the running block has ended, for what is found then.
void complain(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Blocks the running fiber until ready(predicate) is true. Other code calls wait_until instead.
void block_fiber(bool (*ready)(void*), void* predicate, Where where);

// Blocks the running thread until the predicate is true. The scheduler evaluates the predicate (with
// `current` set) on its own stack, so a predicate must not block. It may change state, because it is not
// evaluated again once it was true.
template <class Predicate>
inline void wait_until(Predicate&& predicate, const char* what = "wait_until",
                       const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (predicate()) return;
  auto* address = &predicate;
  using Pointer = decltype(address);
  block_fiber([](void* p) -> bool { return (*static_cast<Pointer>(p))(); },
              const_cast<void*>(static_cast<const void*>(address)), Where{what, file, line});
}

// Lets every other thread that can run do so first, for a loop that polls memory. If threads do nothing but
// poll for long, the launch fails.
inline constexpr char kPolling[] = "yield";
inline void yield(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  block_fiber([](void*) -> bool { return true; }, nullptr, Where{kPolling, file, line});
}

// The block's dynamic shared memory, aligned to 1024 bytes.
inline unsigned char* dynamic_shared() { return current->block->dynamic_shared; }

// 32-bit addresses of the block's shared memory, as in PTX. Dynamic shared memory begins at address 0.
unsigned shared_address(const void* pointer);
void* shared_pointer(unsigned address, unsigned bytes);  // fails past the end

// State that the emulation of an instruction needs: one T() per thread or block, made at first use,
// and destroyed when the block has run.
StateNode*& thread_states();
StateNode*& block_states();
void* state(StateNode*& owner, const void* key, void* (*make)(), void (*destroy)(void*));
template <class T>
inline T& state(StateNode*& owner) {
  static const char key = 0;
  return *static_cast<T*>(state(
      owner, &key, []() -> void* { return new T(); }, [](void* object) { delete static_cast<T*>(object); }));
}
template <class T>
inline T& thread_state() {
  return state<T>(thread_states());
}
template <class T>
inline T& block_state() {
  return state<T>(block_states());
}

void sync_block(Where where);  // executes __syncthreads

// Waits for the launch in front of this one, which runs when the block can do nothing more without it.
void wait_for_previous_launch();

// exchange() waits for the lanes of `mask`, gives them `value`, and returns the value of lane `source`.
struct Exchanged {
  unsigned long long value;
  unsigned ballot;  // lanes that gave a non-zero value
};
Exchanged exchange(unsigned mask, unsigned long long value, int source, Where where);

// Lets the lanes of a warp meet in an instruction that the whole warp executes together. No memory accesses
// are ordered. `call` is the place of the call in the kernel: functions that give it are not inlined.
#define EMULATOR_TOGETHER __attribute__((noinline)) inline
#define EMULATOR_CALL __builtin_return_address(0)
inline void converge(const char* what, const void* call = nullptr, const char* file = __builtin_FILE(),
                     int line = __builtin_LINE()) {
  if (warp().ended) fail("%s in a warp that is not whole: lanes have returned, or do not exist", what);
  exchange(0xFFFFFFFFu, 0, static_cast<int>(lane()), {what, file, line, call});
}

// What emulated instructions tell the race detector (races.h); nothing in a build without it.
namespace races {
#ifdef EMULATOR_RACES
void read(const void* pointer, unsigned bytes);
void write(const void* pointer, unsigned bytes);
void read_by_async_proxy(const void* pointer, unsigned bytes, bool by_product);
void products_finished();  // the running thread's products in flight have read their operands
void write_by_copy_engine(const void* pointer, unsigned bytes, unsigned barrier);
void ignore(const void* pointer, unsigned bytes);  // a word that is polled
void fence_async_proxy();
void init_barrier(unsigned address);
void arrive(unsigned address);
void complete_phase(unsigned address, unsigned parity);
void pass(unsigned address, unsigned parity);  // the running thread has waited for a phase
void meet(unsigned first, unsigned count);     // threads have met at a barrier
#else
inline void read(const void*, unsigned) {}
inline void write(const void*, unsigned) {}
inline void read_by_async_proxy(const void*, unsigned, bool) {}
inline void products_finished() {}
inline void write_by_copy_engine(const void*, unsigned, unsigned) {}
inline void ignore(const void*, unsigned) {}
inline void fence_async_proxy() {}
inline void init_barrier(unsigned) {}
inline void arrive(unsigned) {}
inline void complete_phase(unsigned, unsigned) {}
inline void pass(unsigned, unsigned) {}
inline void meet(unsigned, unsigned) {}
#endif
}  // namespace races

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits: sizes differ");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
inline T shuffle(unsigned mask, T given, int source, Where where) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  unsigned long long wide = 0;
  __builtin_memcpy(&wide, &given, sizeof given);
  wide = exchange(mask, wide, source, where).value;
  __builtin_memcpy(&given, &wide, sizeof given);
  return given;
}

}  // namespace emulator

// ---- Barriers, votes and shuffles.

#define EMULATOR_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_SITE) { emulator::sync_block({"__syncthreads", file, line}); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, EMULATOR_SITE) {
  emulator::exchange(mask, 0, static_cast<int>(emulator::lane()), {"__syncwarp", file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return emulator::exchange(mask, predicate != 0, static_cast<int>(emulator::lane()),
                            {"__ballot_sync", file, line})
      .ballot;
}
inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE) {
  const int self = static_cast<int>(emulator::lane());
  return emulator::shuffle(mask, value, (self & ~(width - 1)) | (source & (width - 1)),
                           {"__shfl_sync", file, line});
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, EMULATOR_SITE) {
  const int self = static_cast<int>(emulator::lane());
  const int source = self ^ lane_mask;
  // A source in a later segment of `width` lanes is out of range: the lane keeps its own value.
  return emulator::shuffle(mask, value, source <= (self | (width - 1)) ? source : self,
                           {"__shfl_xor_sync", file, line});
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
  const int self = static_cast<int>(emulator::lane());
  const bool inside = delta <= static_cast<unsigned>(self - (self & ~(width - 1)));
  return emulator::shuffle(mask, value, inside ? self - static_cast<int>(delta) : self,
                           {"__shfl_up_sync", file, line});
}

[[noreturn]] inline void __trap(EMULATOR_SITE) { emulator::trap({"__trap()", file, line}); }

// ---- Arithmetic.

extern "C" {
float fmaf(float, float, float) noexcept;
float sqrtf(float) noexcept;
float fabsf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float expf(float) noexcept;
float logf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float rintf(float) noexcept;
float expm1f(float) noexcept;
float log1pf(float) noexcept;
float tanhf(float) noexcept;
float erff(float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float powf(float, float) noexcept;
double fma(double, double, double) noexcept;
double sqrt(double) noexcept;
double fabs(double) noexcept;
double fmin(double, double) noexcept;
double fmax(double, double) noexcept;
double exp(double) noexcept;
double log(double) noexcept;
double floor(double) noexcept;
double ceil(double) noexcept;
double rint(double) noexcept;
double expm1(double) noexcept;
double log1p(double) noexcept;
double tanh(double) noexcept;
double erf(double) noexcept;
double sin(double) noexcept;
double cos(double) noexcept;
double pow(double, double) noexcept;
}
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }

// As in CUDA, the result for two integers is unsigned if either is, and a float beside a double gives a
// double.
#define EMULATOR_MIN_MAX(result, a_type, b_type)                                     \
  constexpr result min(a_type a, b_type b) {                                         \
    return static_cast<result>(a) < static_cast<result>(b) ? static_cast<result>(a)  \
                                                           : static_cast<result>(b); \
  }                                                                                  \
  constexpr result max(a_type a, b_type b) {                                         \
    return static_cast<result>(a) > static_cast<result>(b) ? static_cast<result>(a)  \
                                                           : static_cast<result>(b); \
  }
EMULATOR_MIN_MAX(int, int, int)
EMULATOR_MIN_MAX(unsigned, unsigned, unsigned)
EMULATOR_MIN_MAX(unsigned, int, unsigned)
EMULATOR_MIN_MAX(unsigned, unsigned, int)
EMULATOR_MIN_MAX(long, long, long)
EMULATOR_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMULATOR_MIN_MAX(unsigned long, long, unsigned long)
EMULATOR_MIN_MAX(unsigned long, unsigned long, long)
EMULATOR_MIN_MAX(long long, long long, long long)
EMULATOR_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
EMULATOR_MIN_MAX(unsigned long long, long long, unsigned long long)
EMULATOR_MIN_MAX(unsigned long long, unsigned long long, long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }
extern "C" int abs(int) noexcept;

inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31u));
}

// The cache hint of a load is ignored.
template <class T>
inline T __ldg(const T* address) {
  return *address;
}

using cuda_size_t = decltype(sizeof 0);
inline cuda_size_t __cvta_generic_to_shared(const void* pointer) { return emulator::shared_address(pointer); }

// ---- The launch.

namespace emulator {

// The description of a kernel that the last lines of an emulated translation unit give to the runtime.
struct Kernel {
  const char* name;
  void (*thread)(const void* args);  // runs one CUDA thread
  unsigned args_bytes, args_alignment;
  unsigned threads;  // largest number of threads per block
};

}  // namespace emulator

// The kernel of this library. It is not const, so that a program of several kernels can say which one it
// launches.
extern emulator::Kernel emulated_kernel;
