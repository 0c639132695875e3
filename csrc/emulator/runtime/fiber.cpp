#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>

namespace simt {

char* allocate_stack() {
  void* mapping = mmap(nullptr, kPageBytes + kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) std::abort();
  mprotect(mapping, kPageBytes, PROT_NONE);
  return static_cast<char*>(mapping) + kPageBytes;
}

#ifdef __x86_64__

// A switch is a function call, so only the registers that a callee must keep are saved. glibc's swapcontext makes two
// system calls instead, which is ten times slower.
extern "C" void simt_switch_stacks(void** save, void* next);
asm(R"(
.text
.hidden simt_switch_stacks
.globl simt_switch_stacks
.type simt_switch_stacks, @function
simt_switch_stacks:
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
.size simt_switch_stacks, .-simt_switch_stacks
)");

void prepare(Context& context, char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // the return address of `entry`; it also leaves the stack aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int saved_register = 0; saved_register < 6; ++saved_register) *--top = nullptr;
  context.stack_pointer = top;
}

void switch_context(Context& from, Context& to) { simt_switch_stacks(&from.stack_pointer, to.stack_pointer); }

#else

void prepare(Context& context, char* stack, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack;
  context.registers.uc_stack.ss_size = kStackBytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

#endif

}  // namespace simt
