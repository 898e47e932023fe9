// Memory faults and integer division by zero end the launch, not the process: while a SignalGuard lives,
// their signals leave the running fiber with a message. runtime.cpp includes this file after what it needs of
// fibers.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

namespace emulator {
namespace {

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

}  // namespace
}  // namespace emulator
