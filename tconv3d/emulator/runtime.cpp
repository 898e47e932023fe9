// The emulator's scheduler: fibers, barriers, shuffles, and the launch. cuda_emulator.h explains the idea.
//
// This file is compiled once and linked into every emulated kernel's library, and is compiled once more with
// EMULATOR_ASAN for kernels that run under AddressSanitizer. It must not have thread_local state of its own
// (`anchor` is an unused byte), because the library's thread-local segment is the kernel's static shared
// memory. It throws nothing: a failed launch leaves its stacks by a jump and abandons them.

#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#ifdef __linux__
#include <link.h>
#endif

#include <new>
#include <string>
#include <utility>
#include <vector>

#ifdef EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "contexts.h"
#include "failures.h"
#include "guarded_memory.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Thread* current = nullptr;

struct StateNode {
  const void* key;
  void* object;
  void (*destroy)(void*);
  StateNode* next;
};

// A stack, and the saved context of the CUDA thread that runs on it. A Fiber lies right above its stack.
struct Fiber {
  Fiber* next;  // next fiber in the list of free fibers
  unsigned char* stack;
  size_t stack_bytes;
  void* fake_stack;  // AddressSanitizer's fake stack
  Context context;
};

namespace {

// The memory of a fiber is a guard region, the stack, and the Fiber. The stack is large because frames are
// several times larger without optimization or under a sanitizer.
constexpr size_t kGuardBytes = 64 * 1024;
constexpr size_t kStackBytes = 512 * 1024;
constexpr size_t kFiberBytes = 4096;
static_assert(sizeof(Fiber) <= kFiberBytes, "a Fiber fits above its stack");
constexpr unsigned kMostSharedBytes = 227 * 1024;
constexpr unsigned kMostStaticSharedBytes = 48 * 1024;
constexpr unsigned kMostArgsBytes = 4096;  // CUDA's limit for the arguments of a kernel on most architectures

pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;
const void* kernel_args = nullptr;
Context scheduler;
bool on_fiber = false;
jmp_buf failed_predicate;  // where fail() jumps to from the scheduler's own stack
Fiber* free_fibers = nullptr;

// AddressSanitizer must be told which stack is in use.
#ifdef EMULATOR_ASAN
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
void before_resume(Fiber* fiber) {
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber->stack, fiber->stack_bytes);
}
void after_resume() { __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr); }
void before_leave(Fiber* fiber, bool for_ever) {
  __sanitizer_start_switch_fiber(for_ever ? nullptr : &fiber->fake_stack, scheduler_stack,
                                 scheduler_stack_bytes);
}
void after_enter(Fiber* fiber) {
  __sanitizer_finish_switch_fiber(fiber ? fiber->fake_stack : nullptr, &scheduler_stack,
                                  &scheduler_stack_bytes);
}
void unpoison(void* start, size_t bytes) { __asan_unpoison_memory_region(start, bytes); }
#else
void before_resume(Fiber*) {}
void after_resume() {}
void before_leave(Fiber*, bool) {}
void after_enter(Fiber*) {}
void unpoison(void*, size_t) {}
#endif

// ---- Fibers.

// Returns to the scheduler for good.
[[noreturn]] void leave_fiber(Fiber* fiber) {
  before_leave(fiber, true);
  switch_context(fiber->context, scheduler);
  abort();  // the scheduler never resumes a fiber that has ended
}

void thread_main() {
  after_enter(nullptr);
  emulated_kernel.thread(kernel_args);
  Thread& thread = *current;
  Fiber* fiber = thread.fiber;
  thread.ended = true;
  thread.fiber = nullptr;
  thread.block->live -= 1;
  thread.block->warps[thread.rank / 32].ended |= 1u << thread.rank % 32;
  leave_fiber(fiber);
}

Fiber* new_fiber() {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes + kFiberBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for the stack of another thread");
  mprotect(memory, kGuardBytes, PROT_NONE);  // a stack overflow faults instead of corrupting another stack
  auto* stack = static_cast<unsigned char*>(memory) + kGuardBytes;
  // Stacks end at different offsets within a page, so that their frames use different cache sets.
  static size_t count = 0;
  const size_t bytes = kStackBytes - count++ % 64 * 192;
  auto* fiber = new (stack + bytes) Fiber();
  fiber->stack = stack;
  fiber->stack_bytes = bytes;
  return fiber;
}

Fiber* take_fiber() {
  Fiber* fiber = free_fibers;
  if (fiber)
    free_fibers = fiber->next;
  else
    fiber = new_fiber();
  fiber->fake_stack = nullptr;
  make_context(fiber->context, fiber->stack, fiber->stack_bytes, thread_main);
  return fiber;
}

void give_back(Fiber* fiber) {
  fiber->next = free_fibers;
  free_fibers = fiber;
}

// ---- Static shared memory: the thread-local segment of this library.

struct Span {
  unsigned char* start = nullptr;
  size_t bytes = 0;
};
Span static_shared;

#ifdef __linux__
// The thread-local segment exists in an OS thread once a variable in it, here `anchor`, has been touched.
thread_local volatile unsigned char anchor;

const void* library_start_found = nullptr;
const void* library_start() { return library_start_found; }

int find_segment(dl_phdr_info* info, size_t, void* result) {
  const auto here = reinterpret_cast<uintptr_t>(&find_segment);
  size_t tls_bytes = 0;
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) mine |= here - (info->dlpi_addr + header.p_vaddr) < header.p_memsz;
    if (header.p_type == PT_TLS) tls_bytes = header.p_memsz;
  }
  if (!mine) return 0;
  library_start_found = reinterpret_cast<const void*>(info->dlpi_addr);
  *static_cast<Span*>(result) = {static_cast<unsigned char*>(info->dlpi_tls_data), tls_bytes};
  return 1;
}
Span find_static_shared() {
  Span span;
  anchor = 0;
  dl_iterate_phdr(find_segment, &span);
  return span;
}
#else
Span find_static_shared() { return {}; }
const void* library_start() { return nullptr; }
#endif

// Places are given as offsets into this library, which Python translates to lines.
std::string name_of_place(const void* place) {
  return format_text("<%#zx>", static_cast<size_t>(static_cast<const char*>(place) -
                                                   reinterpret_cast<const char*>(library_start())));
}

}  // namespace
}  // namespace emulator

#include "memory_faults.h"
#include "races.h"

namespace emulator {
namespace {

// ---- The scheduler.

enum class Order { kForward, kReversed, kShuffled };

struct Scheduling {
  Order order = Order::kForward;
  unsigned long long random = 0;

  unsigned next(unsigned below) {  // splitmix64 generator
    random += 0x9E3779B97F4A7C15ull;
    unsigned long long z = random;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<unsigned>((z ^ (z >> 31)) % below);
  }
  void shuffle(std::vector<unsigned>& list) {
    for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[next(static_cast<unsigned>(i))]);
  }
  std::vector<unsigned> sequence(unsigned count) {
    std::vector<unsigned> list(count);
    for (unsigned i = 0; i < count; ++i) list[i] = order == Order::kReversed ? count - 1 - i : i;
    if (order == Order::kShuffled) shuffle(list);
    return list;
  }
};

void resume(Thread& thread) {
  if (!thread.fiber) thread.fiber = take_fiber();
  Fiber* fiber = thread.fiber;
  thread.ready = nullptr;
  threadIdx = thread.index;
  before_resume(fiber);
  on_fiber = true;
  switch_context(scheduler, fiber->context);
  on_fiber = false;
  after_resume();
  if (thread.ended) give_back(fiber);
}

// Runs the launch in front of this one, once; null if it has run. A launch that may overlap it begins first.
int (*previous_launch)() = nullptr;

void run_previous_launch() {
  current = nullptr;
  if (previous_launch()) set_failure("the previous launch failed");
  previous_launch = nullptr;
}

// The launch counts as deadlocked after so many passes over the threads in which they only polled memory.
constexpr int kPollingPasses = 100000;

// Runs the threads of a block to their end, in the order of `turns`. Owns nothing: fail() may jump out.
void run_threads(std::vector<Thread>& threads, std::vector<unsigned>& turns, Scheduling& scheduling) {
  int polling_passes = 0;
  while (!turns.empty()) {
    bool resumed = false, worked = false;
    size_t kept = 0;
    for (const unsigned turn : turns) {
      Thread& thread = threads[turn];
      current = &thread;
      if (!thread.ready || thread.ready(thread.predicate)) {
        const bool polled = thread.where.what == kPolling;
        resume(thread);
        if (failed) return;
        resumed = true;
        worked |= !(polled && !thread.ended && thread.where.what == kPolling);
      }
      if (!thread.ended) turns[kept++] = turn;
    }
    turns.resize(kept);
    // The previous launch runs as late as possible, so that whatever does not wait for it finds it missing.
    if (!worked && !turns.empty() && previous_launch) {
      run_previous_launch();
      if (failed) return;
      continue;
    }
    polling_passes = worked ? 0 : polling_passes + 1;
    if (!resumed || polling_passes == kPollingPasses) {
      current = nullptr;
      return set_failure(describe_deadlock(threads));
    }
    if (scheduling.order == Order::kShuffled) scheduling.shuffle(turns);
  }
}

void destroy_states(StateNode*& list) {
  while (StateNode* node = list) {
    list = node->next;
    node->destroy(node->object);
    delete node;
  }
}

// Prepares a block before its first thread runs.
void start_block(Block& block, std::vector<Warp>& warps, std::vector<Thread>& threads,
                 unsigned shared_bytes) {
  const auto count = static_cast<unsigned>(threads.size());
  block.live = count;
  block.warps = warps.data();
  if (count % 32) warps.back().ended = ~0u << count % 32;
  for (unsigned i = 0; i < count; ++i) {
    threads[i].rank = i;
    threads[i].index = {i, 0, 0};
    threads[i].block = &block;
  }
  if (static_shared.bytes) memset(static_shared.start, kPoison, static_shared.bytes);
  unsigned char* memory = take_guarded(shared_bytes, kPoison);
  if (!memory) return set_failure("no memory for dynamic shared memory");
  memset(memory, kPoison, shared_bytes);
  block.dynamic_shared = memory;
  block.dynamic_shared_bytes = shared_bytes;
  start_detector(count, shared_bytes, static_shared.bytes);
}

void end_thread(Thread& thread) {
  destroy_states(thread.states);
  if (!thread.fiber) return;
  unpoison(thread.fiber->stack, kStackBytes);  // frames of an abandoned stack are still poisoned
  give_back(thread.fiber);
}

void end_block(Block& block) {
  end_detector();
  destroy_states(block.states);
  if (block.dynamic_shared) {
    if (!past_end_has_only(kPoison, block.dynamic_shared, block.dynamic_shared_bytes))
      set_failure(
          format_text("kernel %s, block %s: a store past the end of %u bytes of dynamic shared memory",
                      emulated_kernel.name, name_of(blockIdx).c_str(), block.dynamic_shared_bytes));
    give_guarded_back(block.dynamic_shared, block.dynamic_shared_bytes);
  }
}

void run_block(uint3 index, unsigned shared_bytes, bool overlaps, Scheduling& scheduling) {
  const unsigned count = blockDim.x;
  Block block = {};
  std::vector<Warp> warps((count + 31) / 32);
  std::vector<Thread> threads(count);
  std::vector<unsigned> turns = scheduling.sequence(count);
  blockIdx = index;
  start_block(block, warps, threads, shared_bytes);
  if (!failed && setjmp(failed_predicate) == 0) run_threads(threads, turns, scheduling);
  current = nullptr;
  if (overlaps && !block.waited)
    set_failure(
        format_text("kernel %s, block %s may end before the previous launch, for which it never waits",
                    emulated_kernel.name, name_of(index).c_str()));
  for (Thread& thread : threads) end_thread(thread);
  end_block(block);
}

void run_grid(unsigned shared_bytes, Scheduling& scheduling) {
  const bool overlaps = previous_launch != nullptr;
  const unsigned long long count = 1ull * gridDim.x * gridDim.y * gridDim.z;
  if (count > 0xFFFFFFFFull) return set_failure("the grid has more blocks than an emulator should run");
  for (const unsigned i : scheduling.sequence(static_cast<unsigned>(count))) {
    const unsigned rest = i / gridDim.x;
    run_block({i % gridDim.x, rest % gridDim.y, rest / gridDim.y}, shared_bytes, overlaps, scheduling);
    if (failed) return;
  }
}

}  // namespace

// ---- Functions that cuda_emulator.h declares.

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  set_failure(format_text(format, arguments));
  va_end(arguments);
  if (on_fiber) leave_fiber(current->fiber);
  longjmp(failed_predicate, 1);
}

void complain(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  set_failure(format_text("kernel %s, block %s: %s", emulated_kernel.name, name_of(blockIdx).c_str(),
                          format_text(format, arguments).c_str()));
  va_end(arguments);
}

void trap(Where where) { fail("%s at %s:%d", where.what, file_name(where.file), where.line); }

void block_fiber(bool (*ready)(void*), void* predicate, Where where) {
  Thread& thread = *current;
  if (!on_fiber) fail("a predicate must not block (%s at %s:%d)", where.what, where.file, where.line);
  thread.ready = ready;
  thread.predicate = predicate;
  thread.where = where;
  Fiber* fiber = thread.fiber;
  before_leave(fiber, false);
  switch_context(fiber->context, scheduler);
  after_enter(fiber);
}

void wait_for_previous_launch() {
  current->block->waited = true;
  wait_until([] { return previous_launch == nullptr; }, "wait_for_previous_launch");
}

void sync_block(Where where) {
  Block& block = *current->block;
  if (block.arrived == 0) {
    block.barrier = where;
  } else if (!same_place(block.barrier, where)) {
    fail("diverged barrier: some threads of the block are in %s at %s:%d, this one in %s at %s:%d",
         block.barrier.what, file_name(block.barrier.file), block.barrier.line, where.what,
         file_name(where.file), where.line);
  }
  const unsigned generation = block.generation;
  block.arrived += 1;
  // Threads that have returned do not count, as on a GPU: a barrier may also open when a thread returns.
  const auto open = [&block, generation] {
    if (block.generation == generation && block.arrived == block.live) {
      block.arrived = 0;
      block.generation += 1;
      join_threads(0, blockDim.x, ~0u);
    }
    return block.generation != generation;
  };
  wait_until(open, where.what, where.file, where.line);
}

namespace {

// Gives each lane its result, if all lanes of the mask have arrived.
void match_lanes(Warp& warp, unsigned mask, const Where& where) {
  const unsigned present = mask & ~warp.ended;
  if ((warp.arrived & present) != present) return;
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(present >> lane & 1u)) continue;
    if (warp.mask[lane] != mask)
      fail("%s at %s:%d: lanes of one warp call with different masks, 0x%08x and (lane %u) 0x%08x",
           where.what, file_name(where.file), where.line, mask, lane, warp.mask[lane]);
    if (!same_text(warp.what[lane], where.what))
      fail("%s at %s:%d: lane %u of the same mask is in %s", where.what, file_name(where.file), where.line,
           lane, warp.what[lane]);
    if (warp.call[lane] != where.call)
      fail("%s: the lanes of a warp call it at several places, lane %u at %s and others at %s", where.what,
           lane, name_of_place(warp.call[lane]).c_str(), name_of_place(where.call).c_str());
    if (warp.value[lane]) ballot |= 1u << lane;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(present >> lane & 1u)) continue;
    const int source = warp.source[lane];
    // The value of a lane that takes no part is undefined on a GPU, and is all ones here.
    warp.result[lane] = present >> source & 1u ? warp.value[source] : ~0ull;
    warp.ballot[lane] = ballot;
  }
  if (same_text(where.what, "__syncwarp")) join_threads(current->rank / 32u * 32u, 32, present);
  warp.arrived &= ~present;
}

}  // namespace

Exchanged exchange(unsigned mask, unsigned long long value, int source, Where where) {
  Warp& warp = emulator::warp();
  const unsigned lane = emulator::lane();
  if (!(mask >> lane & 1u))
    fail("%s at %s:%d: lane %u is not in its own mask 0x%08x", where.what, file_name(where.file), where.line,
         lane, mask);
  warp.mask[lane] = mask;
  warp.what[lane] = where.what;
  warp.call[lane] = where.call;
  warp.value[lane] = value;
  warp.source[lane] = source;
  warp.arrived |= 1u << lane;
  const auto matched = [&warp, lane, mask, &where] {
    if (warp.arrived >> lane & 1u) match_lanes(warp, mask, where);
    return !(warp.arrived >> lane & 1u);
  };
  wait_until(matched, where.what, where.file, where.line);
  return {warp.result[lane], warp.ballot[lane]};
}

// Address at which static shared memory begins; dynamic shared memory begins at 0.
static constexpr unsigned kStaticOffset = 1u << 23;

unsigned shared_address(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  const auto dynamic_offset = static_cast<size_t>(byte - current->block->dynamic_shared);
  if (dynamic_offset <= current->block->dynamic_shared_bytes) return static_cast<unsigned>(dynamic_offset);
  const auto offset = static_cast<size_t>(byte - static_shared.start);
  if (offset >= static_shared.bytes) fail("%p is not an address in shared memory", pointer);
  return kStaticOffset | static_cast<unsigned>(offset);
}

void* shared_pointer(unsigned address, unsigned bytes) {
  const Block& block = *current->block;
  const bool is_static = address >= kStaticOffset;
  const size_t end = is_static ? kStaticOffset + static_shared.bytes : block.dynamic_shared_bytes;
  if (address + bytes > end)
    fail("an access to %u bytes at offset %u of %zu bytes of %s shared memory", bytes,
         address % kStaticOffset, end % kStaticOffset, is_static ? "static" : "dynamic");
  return is_static ? static_shared.start + (address - kStaticOffset) : block.dynamic_shared + address;
}

StateNode*& thread_states() { return current->states; }
StateNode*& block_states() { return current->block->states; }

void* state(StateNode*& owner, const void* key, void* (*make)(), void (*destroy)(void*)) {
  for (StateNode* node = owner; node; node = node->next)
    if (node->key == key) return node->object;
  owner = new StateNode{key, make(), destroy, owner};
  return owner->object;
}

// ---- The launch.

namespace {

struct Request {
  const void* args;
  unsigned args_bytes;
  const unsigned* grid;
  unsigned threads, shared_bytes;
  int order;
  unsigned long long seed;
  int (*previous)();  // null, or runs the launch that this one overlaps, and returns 0 if that succeeds
};

// Returns why a GPU's driver or the compiled kernel refuses the launch; empty if all is well.
std::string complaint(const Request& request) {
  const Kernel& kernel = emulated_kernel;
  const unsigned* grid = request.grid;
  if (kernel.args_bytes > kMostArgsBytes) return format_text("Args has %u bytes", kernel.args_bytes);
  // The struct Args may end in padding that the packed bytes do not have.
  if (request.args_bytes > kernel.args_bytes ||
      request.args_bytes + kernel.args_alignment <= kernel.args_bytes)
    return format_text("Args has %u bytes, the launch gives %u", kernel.args_bytes, request.args_bytes);
  if (request.threads == 0 || request.threads > 1024 || request.threads > kernel.threads)
    return format_text("%u threads in a block, compiled for %u", request.threads, kernel.threads);
  if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[0] > 0x7FFFFFFFu || grid[1] > 65535u ||
      grid[2] > 65535u)
    return format_text("a grid of %u x %u x %u blocks", grid[0], grid[1], grid[2]);
  if (request.shared_bytes > kMostSharedBytes)
    return format_text("%u bytes of shared memory, more than any block can have", request.shared_bytes);
  if (find_static_shared().bytes > kMostStaticSharedBytes)
    return format_text("%zu bytes of static shared memory, more than any block can have",
                       find_static_shared().bytes);
  return {};
}

void run(const Request& request) {
  failed = false;
  failure.clear();
  current = nullptr;
  if (std::string text = complaint(request); !text.empty())
    return set_failure(format_text("kernel %s: %s", emulated_kernel.name, text.c_str()));
  gridDim = {request.grid[0], request.grid[1], request.grid[2]};
  blockDim = {request.threads, 1, 1};
  alignas(64) unsigned char args[kMostArgsBytes] = {};
  memcpy(args, request.args, request.args_bytes);
  kernel_args = args;
  static_shared = find_static_shared();
  previous_launch = request.previous;
  Scheduling scheduling{static_cast<Order>(request.order), request.seed};
  SignalGuard guard;
  run_grid(request.shared_bytes, scheduling);
}

}  // namespace
}  // namespace emulator

#include "compiler_checks.h"

// The function that Python calls. It returns 0, or 1 with a message in `error`. `stacks` is the list of free
// stacks, which launches of all kernels take from and give back to.
#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))
EMULATOR_EXPORT int emulator_launch(const void* args, unsigned args_bytes, const unsigned* grid,
                                    unsigned threads, unsigned shared_bytes, int order,
                                    unsigned long long seed, int (*previous)(), void** stacks, char* error,
                                    size_t error_bytes) {
  using namespace emulator;
  pthread_mutex_lock(&launch_lock);
  free_fibers = static_cast<Fiber*>(*stacks);
  run({args, args_bytes, grid, threads, shared_bytes, order, seed, previous});
  *stacks = free_fibers;
  const int status = failed ? 1 : 0;
  if (status) snprintf(error, error_bytes, "%s", failure.c_str());
  pthread_mutex_unlock(&launch_lock);
  return status;
}
