// Contexts: the saved state of a fiber that does not run.
//
// switch_context(from, to) pushes the callee-saved registers, saves the stack pointer in `from`, and
// continues at the stack pointer saved in `to`. Caller-saved registers are dead at a call. make_context()
// prepares a stack so that the first switch to it calls `entry`. Machines without assembly here use the C
// library's contexts, which are slower.
#pragma once

#include <string.h>

#if !defined(__ELF__) || !(defined(__x86_64__) || defined(__aarch64__))
#define EMULATOR_UCONTEXT
#endif
#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

#ifdef EMULATOR_UCONTEXT

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

#else

struct Context {
  void* stack_pointer = nullptr;
};

extern "C" void emulator_switch(void** from, void* to);
void switch_context(Context& from, Context& to) { emulator_switch(&from.stack_pointer, to.stack_pointer); }

#ifdef __x86_64__

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

void make_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes);
  *--top = nullptr;  // null return address of `entry`, which ends a debugger's backtrace
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

#else

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

void make_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(stack + bytes - 160);
  memset(frame, 0, 160);
  frame[11] = reinterpret_cast<void*>(entry);  // x30, the return address
  context.stack_pointer = frame;
}

#endif
#endif

}  // namespace emulator
