// The chunks of kernels over lists of tensors; only `.cu` files include it.
#pragma once

#include "base/device.h"
#include "multi_tensor/multi_tensor.h"

namespace {

using megatron::TensorTable;

constexpr int kChunkThreads = 512;

// The part of a tensor that a block works on.
struct Chunk {
  int64_t tensor, first, count;
};

// Finds the chunk of a block by binary search; uniform over its threads.
__device__ __forceinline__ Chunk chunk_of(const TensorTable& table, int64_t block) {
  int64_t low = 0, high = table.tensors;  // the last tensor whose first chunk is not after the block's
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (table.first_chunk(middle) <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t first = (block - table.first_chunk(low)) * megatron::kChunkElements;
  const int64_t rest = table.elements(low) - first;
  return {low, first, rest < megatron::kChunkElements ? rest : megatron::kChunkElements};
}

// Calls `body` with a value of the element type of a dtype code.
template <typename Body>
__device__ __forceinline__ void with_element(int dtype, Body body) {
  switch (dtype) {
    case megatron::kFloat16: body(__half()); break;
    case megatron::kBFloat16: body(__nv_bfloat16()); break;
    default: body(float()); break;
  }
}

template <typename T>
__device__ __forceinline__ T* pointer_to(int64_t address, int64_t offset) {
  return reinterpret_cast<T*>(address) + offset;
}

// Four adjacent elements, read and written at once at an address aligned to four elements.
struct Quad {
  float values[4];
};

template <typename T>
__device__ __forceinline__ bool is_aligned_for_quads(const T* address) {
  return reinterpret_cast<uintptr_t>(address) % (4 * sizeof(T)) == 0;
}

__device__ __forceinline__ Quad load_quad(const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  return {{four.x, four.y, four.z, four.w}};
}
template <typename T>
__device__ __forceinline__ Quad load_quad(const T* from) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  T four[4];
  memcpy(four, &bits, sizeof(bits));
  return {{to_float(four[0]), to_float(four[1]), to_float(four[2]), to_float(four[3])}};
}

__device__ __forceinline__ void store_quad(float* to, const Quad& quad) {
  *reinterpret_cast<float4*>(to) = make_float4(quad.values[0], quad.values[1], quad.values[2], quad.values[3]);
}
template <typename T>
__device__ __forceinline__ void store_quad(T* to, const Quad& quad) {
  T four[4];
  MEGATRON_UNROLL
  for (int i = 0; i < 4; ++i) four[i] = from_float<T>(quad.values[i]);
  uint2 bits;
  memcpy(&bits, four, sizeof(bits));
  *reinterpret_cast<uint2*>(to) = bits;
}

}  // namespace
