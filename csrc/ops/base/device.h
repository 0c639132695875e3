// Common code of kernels; only `.cu` files include it. With nvcc this is CUDA, with MEGATRON_SIMT the emulator
// (`csrc/emulator`), which executes the same source on a CPU.
#pragma once

#include "base/portable.h"

#if defined(MEGATRON_SIMT)

#include "simt.h"

#define MEGATRON_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  SIMT_LAUNCH(kernel, grid, block, shared_bytes, stream, __VA_ARGS__)
#define MEGATRON_DYNAMIC_SHARED(type, name) SIMT_DYNAMIC_SHARED(type, name)
#define MEGATRON_UNROLL

#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define MEGATRON_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  kernel<<<(grid), (block), (shared_bytes), static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define MEGATRON_DYNAMIC_SHARED(type, name)                   \
  extern __shared__ __align__(16) unsigned char shared_bytes_[]; \
  type* name = reinterpret_cast<type*>(shared_bytes_)
#define MEGATRON_UNROLL _Pragma("unroll")

#endif

namespace {

using megatron::DType;

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kWarp = 32;

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// 2^x within 2 ulp, and 1 / x within 1 ulp, by one instruction each; subnormal numbers count as 0. For values that are
// rounded to half precision afterwards.
__device__ __forceinline__ float fast_exp2(float x) {
#if defined(MEGATRON_SIMT)
  return exp2f(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}
__device__ __forceinline__ float fast_reciprocal(float x) {
#if defined(MEGATRON_SIMT)
  return fabsf(x) > 0x1p126f ? 0.0f : 1.0f / x;
#else
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// 16 bytes of T: the widest load and store.
template <typename T>
struct Packet {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <typename T>
__device__ __forceinline__ Packet<T> load_packet(const T* from) {
  const uint4 bits = *reinterpret_cast<const uint4*>(from);
  Packet<T> packet;
  memcpy(&packet, &bits, 16);
  return packet;
}

// To global memory. An intrinsic, since nvcc splits an assignment in four if the packet's parts are computed.
template <typename T>
__device__ __forceinline__ void store_packet(T* to, const Packet<T>& packet) {
  uint4 bits;
  memcpy(&bits, &packet, 16);
  __stwb(reinterpret_cast<uint4*>(to), bits);
}

// Keeps a packet in its type: the compiler would keep values that are converted twice as float32, in twice the registers.
__device__ __forceinline__ void keep_packed(unsigned (&words)[4]) {
#if defined(MEGATRON_SIMT)
  static_cast<void>(words);
#else
  asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3]));
#endif
}
template <typename T>
__device__ __forceinline__ void keep_packed(Packet<T>& packet) {
  unsigned words[4];
  memcpy(words, &packet, 16);
  keep_packed(words);
  memcpy(&packet, words, 16);
}

// The number of leading elements of a row before its first 16-byte boundary.
template <typename T>
__device__ __forceinline__ int64_t elements_to_alignment(const T* row, int64_t count) {
  const int64_t head = ((16 - (reinterpret_cast<uintptr_t>(row) & 15)) & 15) / sizeof(T);
  return head < count ? head : count;
}

// True if all rows have their 16-byte boundaries at the same elements.
template <typename T, typename U>
__device__ __forceinline__ bool share_alignment(const T* one, const U* other) {
  return sizeof(T) == sizeof(U) &&
         ((reinterpret_cast<uintptr_t>(one) ^ reinterpret_cast<uintptr_t>(other)) & 15) == 0;
}

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// The reduction over a warp, on every lane; all 32 lanes take part.
template <typename Operation>
__device__ __forceinline__ float warp_reduce(float value, Operation operation) {
  MEGATRON_UNROLL
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = operation(value, __shfl_xor_sync(kFullWarp, value, offset));
  }
  return value;
}

// The reduction over a block of whole warps, on every thread. `parts` are shared and hold one value per warp; they may be
// used again afterwards.
template <typename Operation>
__device__ __forceinline__ float block_reduce(float value, float* parts, Operation operation, float neutral) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  value = warp_reduce(value, operation);
  if (lane == 0) parts[warp] = value;
  __syncthreads();
  value = warp_reduce(lane < warps ? parts[lane] : neutral, operation);
  __syncthreads();
  return value;
}

// Calls `body` with a value of each of the two element types.
template <typename Body>
int with_type(int dtype, Body body) {
  switch (dtype) {
    case DType::kFloat16: return body(__half());
    case DType::kBFloat16: return body(__nv_bfloat16());
    default: return body(float());
  }
}

inline int64_t blocks_for(int64_t count, int64_t per_block) { return (count + per_block - 1) / per_block; }

constexpr int64_t kMostBlocks = 1 << 16;  // kernels stride over the grid, so that more would not help

inline unsigned grid_size(int64_t count, int64_t per_block) {
  const int64_t blocks = blocks_for(count, per_block);
  return static_cast<unsigned>(blocks < kMostBlocks ? (blocks > 0 ? blocks : 1) : kMostBlocks);
}

}  // namespace
