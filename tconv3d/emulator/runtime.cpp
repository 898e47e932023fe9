// The emulator's scheduler: fibers, barriers, shuffles, and the launch. cuda_emulator.h explains the idea.
//
// This file is compiled once and linked into every emulated kernel's library, and is compiled once more with
// EMULATOR_ASAN for kernels that run under AddressSanitizer. It must not have thread_local state of its own
// (`anchor` is an unused byte), because the library's thread-local segment is the kernel's static shared
// memory. It throws nothing: a failed launch leaves its stacks by a jump and abandons them.

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
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

#include "guarded_memory.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Thread* current = nullptr;
Cluster cluster;

struct StateNode {
  const void* key;
  void* object;
  void (*destroy)(void*);
  StateNode* next;
};

// ---- Contexts: the saved state of a fiber that does not run.
//
// switch_context(from, to) pushes the callee-saved registers, saves the stack pointer in `from`, and
// continues at the stack pointer saved in `to`. Caller-saved registers are dead at a call.

#if defined(__x86_64__) && defined(__ELF__) && !defined(EMULATOR_UCONTEXT)

struct Context {
  void* stack_pointer = nullptr;
};

extern "C" void emulator_switch(void** from, void* to);
asm(R"(
  .text
  .hidden emulator_switch
  .globl emulator_switch
  .type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size emulator_switch, .-emulator_switch
)");

void switch_context(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }

void make_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes);
  *--top = nullptr;  // null return address of `entry`, which ends a debugger's backtrace
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

#elif defined(__aarch64__) && defined(__ELF__) && !defined(EMULATOR_UCONTEXT)

struct Context {
  void* stack_pointer = nullptr;
};

extern "C" void emulator_switch(void** from, void* to);
asm(R"(
  .text
  .hidden emulator_switch
  .globl emulator_switch
  .type emulator_switch, %function
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size emulator_switch, .-emulator_switch
)");

void switch_context(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }

void make_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(stack + bytes - 160);
  memset(frame, 0, 160);
  frame[11] = reinterpret_cast<void*>(entry);  // x30, the return address
  context.stack_pointer = frame;
}

#else

}  // namespace emulator
#include <ucontext.h>
namespace emulator {

struct Context {
  ucontext_t saved;
};

void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }

void make_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = bytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, entry, 0);
}

#endif

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
constexpr unsigned kMostClusterSize = 8;   // largest cluster that every GPU with clusters can run
constexpr unsigned kMostArgsBytes = 4096;  // CUDA's limit for the arguments of a kernel on most architectures

pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;
std::string failure;
bool failed = false;
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

std::string format_text(const char* format, va_list arguments) {
  char text[2048];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

std::string format_text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_text(format, arguments);
  va_end(arguments);
  return text;
}

std::string name_of(uint3 index) { return format_text("(%u, %u, %u)", index.x, index.y, index.z); }

const char* file_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

void set_failure(std::string message) {
  if (failed) return;  // the first failure is the cause of all others
  failed = true;
  failure = std::move(message);
  if (current)
    failure += format_text("\n  in kernel %s, block %s, thread %s", emulated_kernel.name,
                           name_of(current->block->index).c_str(), name_of(current->index).c_str());
}

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
#endif

// The block whose static shared memory is the live one; swap_in() changes it before a thread is resumed.
Block* static_shared_owner = nullptr;

void swap_in(Block* block) {
  if (static_shared_owner == block || static_shared.bytes == 0) return;
  if (Block* other = static_shared_owner) {
    other->saved_static_shared = static_cast<unsigned char*>(malloc(static_shared.bytes));
    memcpy(other->saved_static_shared, static_shared.start, static_shared.bytes);
  }
  if (block->saved_static_shared) {
    memcpy(static_shared.start, block->saved_static_shared, static_shared.bytes);
    free(block->saved_static_shared);
    block->saved_static_shared = nullptr;
  } else {
    memset(static_shared.start, kPoison, static_shared.bytes);
  }
  static_shared_owner = block;
}

// ---- Memory faults and integer division by zero end the launch, not the process.

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
constexpr size_t kSignalStackBytes = 64 * 1024;
pthread_t launch_thread;

const char* signal_name(int number) {
  switch (number) {
    case SIGSEGV:
      return "a memory access outside any allocation, or more stack than a thread has (SIGSEGV)";
    case SIGBUS:
      return "a memory access the machine refuses (SIGBUS)";
    case SIGFPE:
      return "an integer division by zero (SIGFPE)";
    default:
      return "an illegal instruction (SIGILL)";
  }
}

struct sigaction previous_actions[sizeof kSignals / sizeof *kSignals];

void on_signal(int number, siginfo_t* info, void*) {
  if (!on_fiber || !pthread_equal(pthread_self(), launch_thread)) {
    for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; ++i)
      if (kSignals[i] == number) sigaction(number, &previous_actions[i], nullptr);
    return;  // the instruction is executed again and faults again, now with the previous handler
  }
  set_failure(format_text("%s at address %p", signal_name(number), info->si_addr));
  leave_fiber(current->fiber);
}

class SignalGuard {
 public:
  SignalGuard() {
#ifndef EMULATOR_ASAN  // AddressSanitizer reports these signals itself
    launch_thread = pthread_self();
    stack_.ss_sp = malloc(kSignalStackBytes);
    stack_.ss_size = kSignalStackBytes;
    sigaltstack(&stack_, &previous_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; ++i)
      sigaction(kSignals[i], &action, &previous_actions[i]);
#endif
  }
  ~SignalGuard() {
#ifndef EMULATOR_ASAN
    for (size_t i = 0; i < sizeof kSignals / sizeof *kSignals; ++i) {
      struct sigaction now;
      sigaction(kSignals[i], nullptr, &now);
      // Another kernel's launch may have replaced the handler: then this handler stays below and passes on.
      if (now.sa_sigaction == on_signal) sigaction(kSignals[i], &previous_actions[i], nullptr);
    }
    sigaltstack(&previous_stack_, nullptr);
    free(stack_.ss_sp);
#endif
  }

 private:
  stack_t stack_ = {};
  stack_t previous_stack_ = {};
};

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
  blockIdx = thread.block->index;
  swap_in(thread.block);
  before_resume(fiber);
  on_fiber = true;
  switch_context(scheduler, fiber->context);
  on_fiber = false;
  after_resume();
  if (thread.ended) give_back(fiber);
}

// Formats ascending ranks as text, for example "threads 0-31, 64".
std::string ranges(const std::vector<unsigned>& ranks) {
  std::string text = ranks.size() == 1 ? "thread " : "threads ";
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

bool same_text(const char* a, const char* b) { return a == b || !strcmp(a, b); }

bool same_place(const Where& a, const Where& b) {
  return a.line == b.line && same_text(a.what, b.what) && same_text(a.file, b.file);
}

std::string describe_deadlock(const std::vector<Thread>& threads) {
  std::string text =
      format_text("deadlock in kernel %s: every thread that is left waits or polls", emulated_kernel.name);
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    const Block& block = cluster.blocks[rank];
    text += "\n  block " + name_of(block.index) + ":";
    std::vector<std::pair<Where, std::vector<unsigned>>> groups;
    std::vector<unsigned> ended;
    for (const Thread& thread : threads) {
      if (thread.block != &block) continue;
      if (thread.ended) {
        ended.push_back(thread.rank);
        continue;
      }
      size_t i = 0;
      while (i < groups.size() && !same_place(groups[i].first, thread.where)) ++i;
      if (i == groups.size()) groups.push_back({thread.where, {}});
      groups[i].second.push_back(thread.rank);
    }
    for (const auto& [where, ranks] : groups)
      text += format_text("\n    %s in %s at %s:%d", ranges(ranks).c_str(), where.what, file_name(where.file),
                          where.line);
    if (!ended.empty()) text += "\n    " + ranges(ended) + " ended";
  }
  return text;
}

// The launch counts as deadlocked after so many passes over the threads in which they only polled memory.
constexpr int kPollingPasses = 100000;

// Runs the threads of a cluster to their end, in the order of `turns`. Owns nothing: fail() may jump out.
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

// Prepares a block before its first thread runs. `warps` and `threads` are those of the block.
void start_block(Block& block, Warp* warps, Thread* threads, unsigned shared_bytes) {
  const unsigned count = blockDim.x;
  block.live = count;
  block.warps = warps;
  if (count % 32) warps[count / 32].ended = ~0u << count % 32;
  for (unsigned i = 0; i < count; ++i) {
    threads[i].rank = i;
    threads[i].index = {i, 0, 0};
    threads[i].block = &block;
  }
  unsigned char* memory = take_guarded(shared_bytes, kPoison);
  if (!memory) return set_failure("no memory for dynamic shared memory");
  memset(memory, kPoison, shared_bytes);
  block.dynamic_shared = memory;
  block.dynamic_shared_bytes = shared_bytes;
}

void end_thread(Thread& thread) {
  destroy_states(thread.states);
  if (!thread.fiber) return;
  unpoison(thread.fiber->stack, kStackBytes);  // frames of an abandoned stack are still poisoned
  give_back(thread.fiber);
}

void end_block(Block& block) {
  destroy_states(block.states);
  if (block.dynamic_shared) {
    if (!past_end_has_only(kPoison, block.dynamic_shared, block.dynamic_shared_bytes))
      set_failure(
          format_text("kernel %s, block %s: a store past the end of %u bytes of dynamic shared memory",
                      emulated_kernel.name, name_of(block.index).c_str(), block.dynamic_shared_bytes));
    give_guarded_back(block.dynamic_shared, block.dynamic_shared_bytes);
  }
  free(block.saved_static_shared);
}

// Runs one cluster: blocks first, first + 1, ... along x.
void run_cluster(uint3 first, unsigned shared_bytes, Scheduling& scheduling) {
  const unsigned size = cluster.size, count = blockDim.x;
  const unsigned warp_count = (count + 31) / 32;
  std::vector<Block> blocks(size);
  std::vector<Warp> warps(size * warp_count);
  std::vector<Thread> threads(size * count);
  std::vector<unsigned> turns = scheduling.sequence(size * count);
  cluster.blocks = blocks.data();
  static_shared_owner = nullptr;
  for (unsigned rank = 0; rank < size; ++rank) {
    blocks[rank].index = {first.x + rank, first.y, first.z};
    blocks[rank].rank_in_cluster = rank;
    start_block(blocks[rank], &warps[rank * warp_count], &threads[rank * count], shared_bytes);
  }
  if (!failed && setjmp(failed_predicate) == 0) run_threads(threads, turns, scheduling);
  current = nullptr;
  for (Thread& thread : threads) end_thread(thread);
  for (Block& block : blocks) end_block(block);
  destroy_states(cluster.states);
}

void run_grid(unsigned shared_bytes, Scheduling& scheduling) {
  const unsigned long long clusters_x = gridDim.x / cluster.size;
  const unsigned long long count = clusters_x * gridDim.y * gridDim.z;
  if (count > 0xFFFFFFFFull) return set_failure("the grid has more blocks than an emulator should run");
  for (const unsigned i : scheduling.sequence(static_cast<unsigned>(count))) {
    const unsigned x = static_cast<unsigned>(i % clusters_x), rest = static_cast<unsigned>(i / clusters_x);
    run_cluster({x * cluster.size, rest % gridDim.y, rest / gridDim.y}, shared_bytes, scheduling);
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

int sync_block(int vote, Where where) {
  Block& block = *current->block;
  if (block.arrived == 0) {
    block.barrier = where;
  } else if (!same_place(block.barrier, where)) {
    fail("diverged barrier: some threads of the block are in %s at %s:%d, this one in %s at %s:%d",
         block.barrier.what, file_name(block.barrier.file), block.barrier.line, where.what,
         file_name(where.file), where.line);
  }
  const unsigned generation = block.generation;
  block.votes[generation % 2] += vote;
  block.arrived += 1;
  // Threads that have returned do not count, as on a GPU: a barrier may also open when a thread returns.
  const auto open = [&block, generation] {
    if (block.generation == generation && block.arrived == block.live) {
      block.arrived = 0;
      block.generation += 1;
      block.votes[block.generation % 2] = 0;
    }
    return block.generation != generation;
  };
  wait_until(open, where.what, where.file, where.line);
  return block.votes[generation % 2];
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
    if (warp.value[lane]) ballot |= 1u << lane;
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (!(present >> lane & 1u)) continue;
    const int source = warp.source[lane];
    // The value of a lane that takes no part is undefined on a GPU, and is all ones here.
    warp.result[lane] = present >> source & 1u ? warp.value[source] : ~0ull;
    warp.ballot[lane] = ballot;
  }
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

namespace {

// Offset at which static shared memory begins in the address window of a block.
constexpr unsigned kStaticOffset = 1u << (kRankShift - 1);

}  // namespace

unsigned shared_address(const void* pointer) {
  const auto* byte = static_cast<const unsigned char*>(pointer);
  for (unsigned rank = 0; rank < cluster.size; ++rank) {
    const Block& block = cluster.blocks[rank];
    const auto offset = static_cast<size_t>(byte - block.dynamic_shared);
    if (offset <= block.dynamic_shared_bytes) return rank << kRankShift | static_cast<unsigned>(offset);
  }
  const auto offset = static_cast<size_t>(byte - static_shared.start);
  if (offset >= static_shared.bytes) fail("%p is not an address in shared memory", pointer);
  return current->block->rank_in_cluster << kRankShift | kStaticOffset | static_cast<unsigned>(offset);
}

void* shared_pointer(unsigned address, unsigned bytes) {
  const unsigned rank = address >> kRankShift, offset = address & ((1u << kRankShift) - 1u);
  if (rank >= cluster.size)
    fail("shared memory address 0x%08x: the cluster has %u blocks", address, cluster.size);
  Block& block = cluster.blocks[rank];
  if (block.live == 0)
    fail("shared memory address 0x%08x: all threads of block %u of the cluster have returned", address, rank);
  const bool is_static = offset >= kStaticOffset;
  const size_t end = is_static ? kStaticOffset + static_shared.bytes : block.dynamic_shared_bytes;
  if (offset + bytes > end)
    fail("an access to %u bytes at offset %u of %zu bytes of %s shared memory", bytes, offset % kStaticOffset,
         end % kStaticOffset, is_static ? "static" : "dynamic");
  if (!is_static) return block.dynamic_shared + offset;
  if (&block == static_shared_owner) return static_shared.start + (offset - kStaticOffset);
  if (!block.saved_static_shared)
    fail("shared memory address 0x%08x: block %u of the cluster has not started", address, rank);
  return block.saved_static_shared + (offset - kStaticOffset);
}

StateNode*& thread_states() { return current->states; }
StateNode*& block_states() { return current->block->states; }
StateNode*& cluster_states() { return cluster.states; }

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
  if (kernel.cluster_size > kMostClusterSize)
    return format_text("clusters of %u blocks, where %u are the most", kernel.cluster_size, kMostClusterSize);
  if (kernel.cluster_size == 0 || grid[0] % kernel.cluster_size)
    return format_text("%u blocks along x do not make clusters of %u", grid[0], kernel.cluster_size);
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
  cluster = {emulated_kernel.cluster_size, nullptr, nullptr};
  alignas(64) unsigned char args[kMostArgsBytes] = {};
  memcpy(args, request.args, request.args_bytes);
  kernel_args = args;
  static_shared = find_static_shared();
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
                                    unsigned long long seed, void** stacks, char* error, size_t error_bytes) {
  using namespace emulator;
  pthread_mutex_lock(&launch_lock);
  free_fibers = static_cast<Fiber*>(*stacks);
  run({args, args_bytes, grid, threads, shared_bytes, order, seed});
  *stacks = free_fibers;
  const int status = failed ? 1 : 0;
  if (status) snprintf(error, error_bytes, "%s", failure.c_str());
  pthread_mutex_unlock(&launch_lock);
  return status;
}
