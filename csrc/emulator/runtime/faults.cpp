// Faults of the processor inside a kernel become diagnoses; the launch ends, the process does not.
#include <sys/time.h>

#include <csignal>
#include <cstring>
#include <string>

#ifdef __x86_64__
#include <ucontext.h>
#endif

#include "memory.h"

namespace simt {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
constexpr int kSignalCount = sizeof kSignals / sizeof kSignals[0];
struct sigaction before[kSignalCount];
long seconds_allowed = 120;
stack_t stack_before;
alignas(16) char signal_stack[64 * 1024];

Site faulting_site(void* context) {
#ifdef __x86_64__
  const auto* registers = static_cast<const ucontext_t*>(context);
  return site_of(reinterpret_cast<const void*>(registers->uc_mcontext.gregs[REG_RIP] + 1));
#else
  (void)context;
  return 0;
#endif
}

std::string describe(int number, const char* address) {
  if (number == SIGFPE) return "integer division by zero or overflow";
  if (number == SIGILL) return "a path that the compiler takes for impossible";
  if (address >= running->stack - kPageBytes && address < running->stack) {
    return "the local variables of a thread take more than " + std::to_string(kStackBytes) + " bytes";
  }
  if (address >= dynamic_shared && address < dynamic_shared + launch.shared_bytes + 2 * kPageBytes) {
    return "access at dynamic shared memory + " + std::to_string(address - dynamic_shared) + " of " +
           std::to_string(launch.shared_bytes) + " bytes";
  }
  const Buffer* buffer = find_buffer(address);
  if (buffer == nullptr) return "access at an address outside every buffer, or at one that is not aligned";
  return "access at " + buffer->region.describe(address);
}

// The timer asks again every second until it meets a thread in its own code.
void on_timer(void* context) {
  if (!is_in_kernel) return;
  is_in_kernel = false;
  report("endless loop", "a thread still runs after " + std::to_string(seconds_allowed) + " s of the launch",
         faulting_site(context));
  abandon_launch();
}

void on_fault(int number, siginfo_t* information, void* context) {
  if (number == SIGVTALRM) return on_timer(context);
  if (!is_in_kernel) {
    stop_catching_faults();  // the runtime's own: the fault happens again, for whoever was there before
    return;
  }
  is_in_kernel = false;
  const bool is_memory = number == SIGSEGV || number == SIGBUS;
  report(is_memory ? "out of bounds" : "undefined", describe(number, static_cast<const char*>(information->si_addr)),
         faulting_site(context));
  abandon_launch();
}

}  // namespace

void catch_faults() {
  stack_t stack{};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &stack_before);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // a fault leaves the handler by switching stacks
  for (int number = 0; number < kSignalCount; ++number) sigaction(kSignals[number], &action, &before[number]);
  const itimerval timer{{1, 0}, {seconds_allowed, 0}};
  setitimer(ITIMER_VIRTUAL, &timer, nullptr);
}

void stop_catching_faults() {
  const itimerval none{};
  setitimer(ITIMER_VIRTUAL, &none, nullptr);
  for (int number = 0; number < kSignalCount; ++number) sigaction(kSignals[number], &before[number], nullptr);
  sigaltstack(&stack_before, nullptr);
}

}  // namespace simt

// How much processor time a launch may take.
extern "C" void simt_allow_seconds(long seconds) { simt::seconds_allowed = seconds; }
