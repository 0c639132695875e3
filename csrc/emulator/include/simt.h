// CUDA C++ for g++: the words, types and functions that csrc/ops/*/*.cu use, so that the same source runs on a CPU.
//
// csrc/ops/base/device.h includes this file where MEGATRON_SIMT is defined. Threads, barriers and the checks of memory
// are in ../runtime.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "simt_intrinsics.h"

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// Blocks run one after another, so one copy is enough. The runtime takes every writable static of the library for shared
// memory, and forgets at the start of a block what was written.
#define __shared__ static
#define __constant__ static const

#define threadIdx (simt_thread_index())
#define blockIdx (simt_block_index())
#define blockDim (simt_block_dimensions())
#define gridDim (simt_grid_dimensions())
constexpr int warpSize = 32;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaStream_t = void*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToDevice };

static inline cudaError_t cudaGetLastError() { return simt_last_error(); }
static inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// Few multiprocessors, so that loops over the grid take more than one turn on small inputs.
static inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 3 : 227 * 1024;
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(Parameters...), int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int bytes) {
  return simt_allow_shared_bytes(reinterpret_cast<const void*>(kernel), bytes);
}
static inline cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  return simt_set_memory(address, value, bytes);
}
static inline cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t bytes, cudaMemcpyKind,
                                          cudaStream_t) {
  return simt_copy_memory(destination, source, bytes);
}

namespace simt {

// A kernel and its arguments, converted to its parameters once; each thread starts with copies, as on a GPU.
template <class... Parameters>
struct Call {
  void (*kernel)(Parameters...);
  std::tuple<Parameters...> arguments;

  static void run(void* self) {
    auto* call = static_cast<Call*>(self);
    std::apply(call->kernel, call->arguments);
  }
};

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
            Arguments... arguments) {
  Call<Parameters...> call{kernel, std::tuple<Parameters...>(static_cast<Parameters>(arguments)...)};
  simt_launch(name, {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes, &Call<Parameters...>::run,
              &call, sizeof call);
}

}  // namespace simt

// A kernel with several template arguments goes in parentheses.
#define SIMT_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream), simt::launch(#kernel, (kernel), (grid), (block), (shared_bytes), __VA_ARGS__))
#define SIMT_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(simt_dynamic_shared())

#ifdef MEGATRON_SIMT_COVERAGE
extern "C" {
void __gcov_dump();
void __gcov_reset();
void simt_dump_coverage() { __gcov_dump(); }
void simt_reset_coverage() { __gcov_reset(); }
}
#endif
