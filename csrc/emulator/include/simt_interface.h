// What kernels compiled for the emulator call in its runtime. Both sides include this file.
#pragma once

#include <cstddef>
#include <cstdint>

struct uint3 {
  unsigned x, y, z;
};

namespace simt {

// What lanes of a warp do together.
enum WarpOperation : int { kSynchronize, kBallot, kShuffle };

}  // namespace simt

extern "C" {

// The position of the running thread. Constant as long as a thread lives, so the compiler may keep the values.
uint3 simt_thread_index() __attribute__((const));
uint3 simt_block_index() __attribute__((const));
uint3 simt_block_dimensions() __attribute__((const));
uint3 simt_grid_dimensions() __attribute__((const));
void* simt_dynamic_shared() __attribute__((const));

// Waits for all threads of the block, and returns how many of them passed a predicate that is not zero.
int simt_barrier(int predicate, const char* file, int line);

// Waits for the lanes of `mask`. A ballot returns the lanes whose value is not zero, a shuffle the value of lane `source`.
uint64_t simt_warp_operation(int operation, unsigned mask, uint64_t value, int source, const char* file, int line);

// Runs `kernel(arguments)` once for every thread of the grid, and returns when all have ended.
void simt_launch(const char* name, uint3 grid, uint3 block, size_t shared_bytes, void (*kernel)(void*), void* arguments,
                 size_t argument_bytes);

// Told before the access: an atomic one of `bytes` bytes, and a vector access at an address that is not aligned to them.
void simt_atomic_access(const void* address, unsigned bytes, const void* caller);
void simt_misaligned(const void* address, unsigned bytes);

// Copies that happen at the wait, as those of the hardware may.
void simt_copy_asynchronously(void* destination, const void* source, unsigned bytes);
void simt_commit_copies();
void simt_wait_for_copies(int groups_left);

// Host functions of the CUDA runtime that launchers call.
int simt_last_error();
int simt_allow_shared_bytes(const void* kernel, int bytes);
int simt_set_memory(void* address, int value, size_t bytes);
int simt_copy_memory(void* destination, const void* source, size_t bytes);

}  // extern "C"
