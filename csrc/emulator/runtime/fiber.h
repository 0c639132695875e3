// A fiber: a stack of its own, which runs until it switches away.
#pragma once

#include <cstddef>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace simt {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kStackBytes = 64 * 1024;

struct Context {
#ifdef __x86_64__
  void* stack_pointer = nullptr;
#else
  ucontext_t registers;
#endif
};

// A stack with an inaccessible page below it.
char* allocate_stack();

// Lets the next switch to `context` begin `entry` at the top of `stack`. `entry` never returns.
void prepare(Context& context, char* stack, void (*entry)());

void switch_context(Context& from, Context& to);

}  // namespace simt
